"""Plan SkipPipe's paths; without options for the published instance.

    python -m planning                                          # a table, and the paths
    python -m planning --sizes 7,5,5,5,5,5,5,5 --kept 6         # 42 nodes in the same cities
    python -m planning --instance mine.json                     # your own delay, compute and stages
    python -m planning --picture plan.png --trace trace.json    # what each node does when
    python -m planning --plan runs/NAME/plan.json --picture plan.png    # a run's newest plan
"""
import json
import math
import time
from dataclasses import asdict
from pathlib import Path

from planning.arguments import PlanningParser, make_writable
from planning.assign import assign_stages
from planning.instance import (network_without, published_network, read_instance,
                               spread_network)
from planning.kept import as_json, read_plan
from planning.methods import compare_methods, print_paths, print_table
from planning.pictures import trace, write_picture
from planning.drawing import pyplot
from skippipe import plan, skip_schedule, stages_to_keep

WITH_PLAN = "plan", "picture", "trace", "results"       # the options that --plan goes with

PATIENCE = 5.0      # seconds by which first plans may take longer than --seconds
FEW = 30            # paths per origin, whose first plans take no longer


def numbers(text):
    return [int(x) for x in text.split(",") if x]


OPTIONS = (     # name, type, default, help
    ("instance", str, None,
     "JSON file with delay and compute (s) and stages: a network of your own"),
    ("sizes", numbers, None,
     "nodes in each stage, e.g. 7,5,5: in the published cities, assigned by search"),
    ("nodes", int, None, "how many nodes there are: as many as --sizes adds up to"),
    ("kept", int, None,
     "stages that a microbatch visits, the first included (default: two thirds)"),
    ("microbatches", int, 3,
     "paths per origin: an iteration has origins x paths x rounds microbatches"),
    ("rounds", int, 2,
     "microbatches that go down each path in turn: 2 as in the published instance, where the "
     "function skippipe.plan has 1"),
    ("dead", numbers, [],
     "nodes that are not there, e.g. 5,17; dead origins take their microbatches along"),
    ("seconds", float, 10.0,
     "limit of the planning; of the assignment (--sizes) too"),
    ("results", str, "runs/skippipe.json",
     "the plan as JSON: paths, order of dispatch and numbers; '' for none"),
    ("picture", str, "",
     "draw the plan's timeline, and where nodes have names the map of its paths: .png, .svg, .pdf"),
    ("trace", str, "", "write the timeline as a Chrome trace, for Perfetto or chrome://tracing"),
    ("plan", str, "", "plan nothing: draw the newest plan of a run's plan.json"),
    ("save", str, "", "write the network to this file, in the form of --instance"),
)


def read_network(o):
    """The Network that the options ask for, and the names of its nodes. Raises ValueError or
    OSError."""
    if o.instance and o.sizes:
        raise ValueError("--instance has stages of its own: leave out --sizes")
    if o.nodes and o.nodes != sum(o.sizes or [0]):
        raise ValueError(f"--nodes {o.nodes}: give --sizes that add up to as many "
                         "(42: 7,5,5,5,5,5,5,5)")
    if o.instance:
        return read_instance(o.instance)
    return spread_network(o.sizes) if o.sizes else published_network()


def understand(o):
    """(network, names, (kept, microbatches, rounds)). Raises ValueError, OSError or ImportError
    where nothing can be planned, drawn or written, so any exception after it is a mistake in this
    program."""
    if not 0 <= o.seconds < math.inf:
        raise ValueError(f"--seconds takes a time from 0, not {o.seconds}")
    network, names = read_network(o)
    kept = o.kept
    if kept is None:
        kept = max(stages_to_keep(1 / 3, network.stages), min(2, len(network.stages)))
    work = (kept, o.microbatches, o.rounds)
    if o.rounds < 1:
        raise ValueError(f"--rounds must be 1 or more, got {o.rounds}")
    if not set(o.dead) <= set(range(len(network.delay))):
        raise ValueError(f"--dead {o.dead}: not all are nodes of this network")
    alive = network_without(network, o.dead)
    skip_schedule(alive, kept, o.microbatches)      # refuses what cannot be planned
    refuse_too_many(alive, work, o)
    prepare_files(o, o.results, o.save)
    return network, names, work


def prepare_files(o, *others):
    """See that --picture, --trace and the other files can be written. Raises ValueError, OSError or
    ImportError."""
    if o.picture:
        if o.picture == o.trace:
            raise ValueError(f"--picture and --trace both name {o.picture}")
        if Path(o.picture).suffix not in (".png", ".svg", ".pdf"):
            raise ValueError(f"--picture {o.picture}: must end in .png, .svg or .pdf")
        pyplot()
    for file in (o.picture, o.trace, *others):
        if file:
            make_writable(file)


def refuse_too_many(network, work, o):
    """Raises ValueError where the first plans, which each method needs, take much longer than
    --seconds. They grow with the number of microbatches, so FEW are planned and timed."""
    kept, microbatches, rounds = work
    if microbatches <= FEW:
        return
    start = time.perf_counter()
    plan(network, kept, FEW, rounds, iterations=0)
    # The full pipeline and a random draw take one such plan each, either SkipPipe two.
    seconds = 6 * (time.perf_counter() - start) * microbatches / FEW
    if seconds > o.seconds + PATIENCE:
        raise ValueError(f"--microbatches {microbatches}: the first plans alone take about "
                         f"{seconds:.0f} s here: give fewer, or more --seconds than that")


def plan_and_show(o, network, names, work):
    if o.sizes:
        network = assign_stages(network, *work, seconds=o.seconds)
    alive = network_without(network, o.dead)
    rows, found = compare_methods(alive, *work, o.seconds)
    print_table(alive, work, rows, found.bound)
    print_paths(network, names, found.paths, o.dead)
    write_views(o, network, found.paths, found, found.bound, names)
    kept, microbatches, rounds = work
    made = dict(by="python -m planning", kept=kept, microbatches=microbatches, rounds=rounds,
                dead=o.dead)
    results = as_json(network.stages, found.paths * rounds, found.order, found.makespan,
                      found.bound, made, methods=rows, names=names)
    instance = dict(asdict(network), names=names)
    for file, data in ((o.results, results), (o.save, instance)):
        if file:
            write_json(file, data)


def write_views(o, network, paths, result, bound, names=None):
    """Write --picture and --trace."""
    if o.picture:
        write_picture(o.picture, network, paths, result, bound, names)
        print(f"written to {o.picture}")
    if o.trace:
        write_json(o.trace, trace(network, result.timeline, names))


def write_json(file, data):
    Path(file).write_text(json.dumps(data) + "\n")
    print(f"written to {file}")


def read_kept(o):
    """The plan of --plan, as `write_views` takes it. Raises ValueError, OSError or ImportError."""
    if not (o.picture or o.trace):
        raise ValueError(f"--plan {o.plan}: give --picture or --trace as well")
    for name, _, default, _ in OPTIONS:
        if name not in WITH_PLAN and getattr(o, name) != default:
            raise ValueError(f"--plan {o.plan} draws a plan that is made: drop --{name}")
    found = read_plan(o.plan)
    prepare_files(o)
    return found


def main(argv=None):
    parser = PlanningParser("python -m planning", __doc__)
    for name, kind, default, text in OPTIONS:
        shown = f" (default: {default})" if default else ""
        parser.add_argument("--" + name, type=kind, default=default, help=text + shown)
    o = parser.parse_args(argv)
    understood, act = understand, plan_and_show
    if o.plan:
        understood, act = read_kept, write_views
    try:
        problem = understood(o)
    except (ValueError, OSError, ImportError) as error:
        parser.error(error)
    act(o, *problem)


if __name__ == "__main__":
    main()
