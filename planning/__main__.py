"""Plan SkipPipe's paths and draw them; without options for the published instance.

    python -m planning                                                # table, figures/skippipe.png
    python -m planning --nodes 42 --sizes 7,5,5,5,5,5,5,5 --kept 6    # more nodes in the same cities
    python -m planning --instance mine.json     # {"delay": [[...]], "compute": [...], "stages": [[...]]}
"""
import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

from planning.assign import assign_stages
from planning.instance import city_delays, city_links, published_network
from planning.show import canvas, compare, draw, print_paths, print_table
from skippipe import Deadlock, Infeasible, Network, per_node


def numbers(text):
    try:
        return [int(x) for x in text.split(",") if x]
    except ValueError:
        raise argparse.ArgumentTypeError(f"takes whole numbers with commas between them, not {text}")


OPTIONS = (     # name, type, default, help
    ("instance", str, None, "JSON file: delay (s), compute (s), stages; may have memory, overhead, "
     "origin_overhead (s), names"),
    ("links", str, None, "csv file a,b,latency_ms,bandwidth_gib_s with every pair of cities, in place of "
     "the built-in twelve"),
    ("nodes", int, None, "nodes, spread over the cities in turn and assigned to stages by search"),
    ("sizes", numbers, None, "nodes in each stage, e.g. 7,5,5,5,5,5,5,5, assigned to stages by search"),
    ("compute", float, None, "seconds of one forward on a node"),
    ("memory", int, None, "microbatches that a node holds at once"),
    ("kept", int, None, "stages that a microbatch visits, the first included (default: two thirds)"),
    ("microbatches", int, 3, "paths per origin"),
    ("rounds", int, 2, "microbatches per path, one after the other"),
    ("dead", numbers, [], "nodes that are not there, e.g. 5,17"),
    ("seconds", float, 10.0, "limit of the planning, and of the assignment"),
    ("figure", str, None, "the picture; '' for none (default: figures/skippipe.png; with any option "
     "above but --seconds runs/skippipe-OPTIONS.png)"),
    ("results", str, None, "the numbers behind table and picture, paths and order of dispatch; '' for none "
     "(default: results/skippipe.json or runs/skippipe-OPTIONS.json)"),
    ("save", str, None, "write the network to this file, in the form of --instance"),
)
PROBLEM = OPTIONS[:-4]      # without seconds, figure, results and save


def outputs(o):
    """(picture, numbers): where they go. Whatever is not the published instance has its options in the name:
    no plan overwrites another network's."""
    other = ""
    for name, kind, default, _ in PROBLEM:
        value = getattr(o, name)
        if value != default:
            file = kind is str and str(Path(value).with_suffix("")).strip("./")
            other += f"-{file}" if file else f"-{name}-{value}"
    other = other.replace("/", "-").translate({ord(c): None for c in "[] "})
    figure, results = ("runs", "runs") if other else ("figures", "results")
    return (f"{figure}/skippipe{other}.png" if o.figure is None else o.figure,
            f"{results}/skippipe{other}.json" if o.results is None else o.results)


def read_network(o):
    """The Network that the options ask for, and the names of its nodes. Raises ValueError."""
    given = {name: getattr(o, name) for name in ("compute", "memory") if getattr(o, name) is not None}
    for name in ("instance", "links"):
        if getattr(o, name) and not Path(getattr(o, name)).is_file():
            raise ValueError(f"--{name} {getattr(o, name)}: no such file")
    spread = any(value is not None for value in (o.links, o.nodes, o.sizes))
    if o.instance and spread:
        raise ValueError("--instance has nodes, links and stages of its own: leave out --nodes, --sizes and "
                         "--links")
    if o.instance:
        network, names = read_instance(o.instance, given)
    elif spread:
        network, names = spread_network(o, given)
    else:
        network, names = published_network()
        network = replace(network, **given)
    return network, names and per_node(names, len(network.delay), "names")


def read_instance(file, given):
    """(Network, names) of a file; given: what goes before its values."""
    try:
        data = json.loads(Path(file).read_text())
    except ValueError as error:
        raise ValueError(f"--instance {file}: is no JSON ({error})")
    if not isinstance(data, dict) or not {"delay", "compute", "stages"} <= set(data):
        raise ValueError(f"--instance {file}: must hold an object with delay, compute and stages")
    names = data.pop("names", None)
    try:
        return Network(**data | given), names
    except (ValueError, TypeError) as error:
        raise ValueError(f"--instance {file}: {error}")


def spread_network(o, given):
    """Nodes in all cities in turn, each assigned to a stage."""
    sizes = o.sizes or [5, 3, 3, 3, 3, 3]
    count = sum(sizes) if o.nodes is None else o.nodes
    try:
        links = city_links(o.links)
        if not links:
            raise ValueError("no row")
        cities = list(dict.fromkeys(a for a, _ in links))
        names = [cities[i % len(cities)] for i in range(count)]
        delay = city_delays(names, links)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--links {o.links}: must have the columns a,b,latency_ms,bandwidth_gib_s and every "
                         f"pair of cities once ({type(error).__name__}: {error})")
    compute = [0.44 if o.compute is None else o.compute] * count
    times = dict(memory=3, overhead=0.13, origin_overhead=0.09)
    work = (stages_kept(o, len(sizes)), o.microbatches, o.rounds)
    stages = assign_stages(delay, compute, sizes, *work, **times, seconds=o.seconds, progress=progress)
    return Network(delay, compute, stages, **times | given), names


def progress(work, seconds, makespan, bound=0.0):
    if sys.stderr.isatty():
        gap = f", at most {makespan / bound - 1:.1%} above the best" if bound else ""
        line = f"\r{seconds:6.1f} s: {work} tried, iteration {makespan:.3f} s{gap} "
        print(line, end="", file=sys.stderr)


def stages_kept(o, stages):
    """How many of so many stages a path visits."""
    kept = round(2 / 3 * stages) if o.kept is None else o.kept
    if not 1 <= kept <= stages:
        raise ValueError(f"--kept {kept}: takes 1 to {stages}, as many as the network has stages")
    return kept


def save(what, file, data):
    if file:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text(json.dumps(data) + "\n")
        print(f"{what:9}{file}")


def run(o):
    figure, results = outputs(o)
    if figure:
        canvas()        # said before minutes of planning
    if min(o.microbatches, o.rounds) < 1 or not o.seconds >= 0:
        raise ValueError("--microbatches and --rounds take numbers from 1, --seconds a time from 0")
    network, names = read_network(o)
    if unknown := set(o.dead) - set(network.stage_of):
        raise ValueError(f"--dead: {sorted(unknown)} are no nodes of the network, which has "
                         f"{len(network.stage_of)}, numbered from 0")
    kept = stages_kept(o, len(network.stages))
    rows, found = compare(network, kept, o.microbatches, o.rounds, o.dead, o.seconds, progress)
    sizes = ", ".join(str(len(stage)) for stage in network.stages)
    print(f"\n{len(network.delay)} nodes in stages of {sizes}; {kept} of {len(network.stages)} stages kept; "
          f"lower bound {found.bound:.3f} s. Simulated:\n")
    print_table(rows, found.bound)
    print_paths(network, names, found.paths, o.rounds)
    if figure:
        draw(figure, network, names, rows, found)
        print(f"{'picture':9}{figure}")
    save("numbers", results, dict(
        about="simulated by python skippipe.py", bound=found.bound, methods=rows, stages=network.stages,
        names=names, rounds=o.rounds, paths=found.paths, order=found.order))
    save("network", o.save, dict(asdict(network), names=names))


class Parser(argparse.ArgumentParser):
    def error(self, message):
        """One line, whatever is wrong."""
        self.exit(2, "error: " + " ".join(str(message).split()) + "\n")


def main(argv=None):
    parser = Parser("python skippipe.py", description=__doc__.split("\n")[0], allow_abbrev=False)
    for name, kind, default, text in OPTIONS:
        shown = f" (default: {default})" if default else ""
        parser.add_argument("--" + name, type=kind, default=default, help=text + shown)
    o = parser.parse_args(argv)
    try:
        run(o)
    except (ValueError, Deadlock, OSError, KeyError, TypeError, IndexError, AttributeError) as error:
        ours = type(error) in (ValueError, Infeasible, Deadlock)    # not their subclasses, as of a bad file
        parser.error(error if ours else f"{type(error).__name__} {error}")


if __name__ == "__main__":
    main()
