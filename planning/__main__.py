"""Plan SkipPipe's paths, without options for the published instance.

    python -m planning                                          # a table, and the paths
    python -m planning --sizes 7,5,5,5,5,5,5,5 --kept 6         # 42 nodes in the same cities
    python -m planning --instance mine.json                     # your own delay, compute and stages
    python -m planning --picture plan.png --results plan.json   # what each node does when
"""
import argparse
import json
from dataclasses import asdict
from pathlib import Path

from planning.assign import assign_stages
from planning.drawing import pyplot
from planning.instance import published_network, read_instance, spread_network
from planning.methods import compare_methods, print_paths, print_table
from planning.pictures import write_picture
from skippipe import rounds_of, skip_schedule, stages_to_keep


def numbers(text):
    return [int(x) for x in text.split(",")]


def options(argv):
    """(the parser, the options)."""
    parser = argparse.ArgumentParser("python -m planning", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--instance", metavar="FILE", help="a network of your own: JSON with delay "
                       "and compute (seconds) and stages")
    which.add_argument("--sizes", type=numbers, help="nodes of each stage, e.g. 7,5,5, in the "
                       "published cities; they are assigned to stages first")
    parser.add_argument("--kept", type=int, help="stages that a microbatch visits, the first "
                        "included (default: two thirds)")
    parser.add_argument("--microbatches", type=int, default=6, help="microbatches per origin, in "
                        "rounds of as many as a node holds, as in train.py (%(default)s)")
    parser.add_argument("--seconds", type=float, default=10.0, help="limit of the search; with "
                        "--sizes as much again for the assignment to stages (%(default)s)")
    parser.add_argument("--results", metavar="FILE", help="write the plan and the table as JSON")
    parser.add_argument("--picture", metavar="FILE", help="draw the plan's timeline, and if "
                        "nodes have names the map of its paths: .png, .svg, .pdf")
    return parser, parser.parse_args(argv)


def understand(o):
    """(network, names, (kept, paths per origin, rounds)). Raises ValueError, OSError or ImportError
    if nothing can be planned, drawn or written, so any exception after it is a mistake in this
    program."""
    if o.instance:
        network, names = read_instance(o.instance)
    elif o.sizes:
        network, names = spread_network(o.sizes)
    else:
        network, names = published_network()
    kept = o.kept
    if kept is None:
        kept = max(stages_to_keep(1 / 3, network.stages), min(2, len(network.stages)))
    rounds = rounds_of(o.microbatches, min(network.memory))
    work = (kept, o.microbatches // rounds, rounds)
    skip_schedule(network, kept, o.microbatches // rounds)      # refuses what cannot be planned
    if o.picture:
        if Path(o.picture).suffix not in (".png", ".svg", ".pdf"):
            raise ValueError(f"--picture {o.picture}: must end in .png, .svg or .pdf")
        pyplot()
    for file in (o.picture, o.results):
        if file:
            make_writable(file)
    return network, names, work


def make_writable(file):
    """Create the file if it is missing, and its folder. Raises OSError if it cannot be written,
    before any work is lost."""
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    with open(file, "a"):
        pass


def plan_and_show(o, network, names, work):
    if o.sizes:
        network = assign_stages(network, *work, seconds=o.seconds)
    rows, found = compare_methods(network, *work, o.seconds)
    print_table(network, work, rows, found.bound)
    print_paths(network, names, found.paths)
    if o.picture:
        write_picture(o.picture, network, found.paths, found, found.bound, names)
        print(f"written to {o.picture}")
    if o.results:
        kept, _, rounds = work
        made = dict(by="python -m planning", kept=kept, microbatches=o.microbatches)
        results = dict(stages=network.stages, paths=found.paths * rounds, order=found.order,
                       makespan=found.makespan, network=asdict(network), made=made,
                       bound=found.bound, methods=rows, names=names)
        Path(o.results).write_text(json.dumps(results) + "\n")
        print(f"written to {o.results}")


def main(argv=None):
    parser, o = options(argv)
    try:
        problem = understand(o)
    except (ValueError, OSError, ImportError) as error:
        line = " ".join(str(error).split())
        parser.exit(2, f"error: {line}\n")
    plan_and_show(o, *problem)


if __name__ == "__main__":
    main()
