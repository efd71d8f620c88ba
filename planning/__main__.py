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
from planning.show import compare, draw, print_table
from skippipe import Deadlock, Infeasible, Network, per_node


def numbers(text):
    return [int(x) for x in text.split(",") if x]


OPTIONS = (     # name, type, default, help
    ("instance", str, None, "JSON file: delay (s), compute (s), stages; may have memory, overhead, "
     "origin_overhead (s), names"),
    ("links", str, None, "csv file a,b,latency_ms,bandwidth_gib_s with every pair of cities, in place of "
     "the built-in twelve"),
    ("nodes", int, None, "nodes, spread over the cities in turn and assigned to stages by search"),
    ("sizes", numbers, None, "nodes in each stage, e.g. 7,5,5,5,5,5,5,5, assigned to stages by search"),
    ("compute", float, None, "seconds of one forward on a node"),
    ("memory", int, None, "microbatches that a node holds at once"),
    ("kept", int, 4, "stages that a microbatch visits, the first included"),
    ("microbatches", int, 3, "paths per origin"),
    ("rounds", int, 2, "microbatches per path, one after the other"),
    ("dead", numbers, [], "nodes that are not there, e.g. 5,17"),
    ("seconds", float, 10.0, "limit of the planning, and of the assignment"),
    ("figure", str, None, "the picture; '' for none (default: figures/skippipe.png, other networks: "
     "runs/skippipe.png)"),
    ("results", str, None, "the numbers behind table and picture; '' for none (default: "
     "results/skippipe.json or runs/skippipe.json)"),
    ("save", str, None, "write the network to this file, in the form of --instance"),
)


def read_network(o):
    """The Network that the options ask for, and the names of its nodes. Raises ValueError and what bad
    files do."""
    given = {name: getattr(o, name) for name in ("compute", "memory") if getattr(o, name) is not None}
    for name in ("instance", "links"):
        if getattr(o, name) and not Path(getattr(o, name)).is_file():
            raise ValueError(f"--{name} {getattr(o, name)}: no such file")
    if o.instance:
        data = json.loads(Path(o.instance).read_text())
        if not isinstance(data, dict) or not {"delay", "compute", "stages"} <= set(data):
            raise ValueError(f"{o.instance} must hold an object with delay, compute and stages")
        names = data.pop("names", None)
        network = Network(**data | given)
    elif o.links or o.nodes or o.sizes:
        network, names = spread_network(o, given)
    else:
        network, names = published_network()
        network = replace(network, **given)
    return network, names and per_node(names, len(network.delay), "names")


def spread_network(o, given):
    """Nodes in all cities in turn, each assigned to a stage."""
    links, sizes = city_links(o.links), o.sizes or [5, 3, 3, 3, 3, 3]
    if not links:
        raise ValueError(f"{o.links} holds no links")
    cities, count = list(dict.fromkeys(a for a, _ in links)), o.nodes or sum(sizes)
    names = [cities[i % len(cities)] for i in range(count)]
    delay = city_delays(names, links)
    compute = [0.44 if o.compute is None else o.compute] * count
    times = dict(memory=3, overhead=0.13, origin_overhead=0.09)
    stages = assign_stages(delay, compute, sizes, o.kept, o.microbatches, o.rounds, **times,
                           seconds=o.seconds, progress=progress)
    return Network(delay, compute, stages, **times | given), names


def progress(work, seconds, makespan, bound=0.0):
    if sys.stderr.isatty():
        gap = f", at most {makespan / bound - 1:.1%} above the best" if bound else ""
        line = f"\r{seconds:6.1f} s: {work} tried, iteration {makespan:.3f} s{gap} "
        print(line, end="", file=sys.stderr)


def save(file, data):
    if file:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text(json.dumps(data) + "\n")


def run(o):
    network, names = read_network(o)
    if not set(o.dead) <= set(network.stage_of) or o.seconds < 0:
        raise ValueError("--dead takes nodes of the network, --seconds a time from 0")
    rows, found = compare(network, o.kept, o.microbatches, o.rounds, o.dead, o.seconds, progress)
    sizes = [len(stage) for stage in network.stages]
    print(f"\n{len(network.delay)} nodes in stages of {sizes}; {o.kept} stages kept; "
          f"lower bound {found.bound:.3f} s. Simulated:\n")
    print_table(rows, found.bound)
    own = network != published_network()[0]     # another network does not overwrite the published figure
    figure = ("runs" if own else "figures") + "/skippipe.png" if o.figure is None else o.figure
    results = ("runs" if own else "results") + "/skippipe.json" if o.results is None else o.results
    if figure:
        draw(figure, network, names, rows, found)
    save(results, dict(about="simulated by python skippipe.py", bound=found.bound, methods=rows,
                       stages=network.stages, names=names, rounds=o.rounds, paths=found.paths,
                       order=found.order))
    save(o.save, dict(asdict(network), names=names))


class Parser(argparse.ArgumentParser):
    def error(self, message):
        """One line, whatever is wrong."""
        self.exit(2, "error: " + " ".join(str(message).split()) + "\n")


def main(argv=None):
    parser = Parser("python -m planning", description=__doc__.split("\n")[0], allow_abbrev=False,
                    formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for name, kind, default, text in OPTIONS:
        parser.add_argument("--" + name, type=kind, default=default, help=text)
    o = parser.parse_args(argv)
    try:
        run(o)
    except (ValueError, Deadlock, OSError, KeyError, TypeError, IndexError, AttributeError) as error:
        ours = type(error) in (ValueError, Infeasible, Deadlock)    # not their subclasses, as of a bad file
        parser.error(error if ours else f"{type(error).__name__} {error}")


if __name__ == "__main__":
    main()
