"""Plan SkipPipe's paths; without options for the published instance.

    python -m planning                                                # a table, and the paths
    python -m planning --sizes 7,5,5,5,5,5,5,5 --kept 6               # 42 nodes in the same cities
    python -m planning --instance mine.json     # {"delay": [[...]], "compute": [...], "stages": [[...]]}
"""
import argparse
import json
from dataclasses import asdict
from pathlib import Path

from planning.assign import assign_stages
from planning.instance import published_network, read_instance, spread_network
from planning.methods import compare, print_paths, print_table
from skippipe import Search


def numbers(text):
    return [int(x) for x in text.split(",") if x]


OPTIONS = (     # name, type, default, help
    ("instance", str, None, "JSON file with delay and compute (s) and stages: a network of your own"),
    ("sizes", numbers, None, "nodes in each stage, e.g. 7,5,5: in the published cities, assigned by search"),
    ("nodes", int, None, "how many nodes there are: as many as --sizes adds up to"),
    ("kept", int, None, "stages that a microbatch visits, the first included (default: two thirds)"),
    ("microbatches", int, 3, "paths per origin: an iteration has origins x paths x rounds microbatches"),
    ("rounds", int, 2, "microbatches that go down each path, one after the other"),
    ("dead", numbers, [], "nodes that are not there, e.g. 5,17; dead origins take their microbatches along"),
    ("seconds", float, 10.0, "limit of the planning, first plans excepted; of the assignment (--sizes) too"),
    ("results", str, "runs/skippipe.json", "numbers, paths and order of dispatch; '' for none"),
    ("save", str, "", "write the network to this file, in the form of --instance"),
)


def read_network(o):
    """The Network that the options ask for, and the names of its nodes. Raises ValueError or OSError."""
    if o.instance and o.sizes:
        raise ValueError("--instance has stages of its own: leave out --sizes")
    if o.nodes and o.nodes != sum(o.sizes or [0]):
        raise ValueError(f"--nodes {o.nodes}: give --sizes that add up to as many (42: 7,5,5,5,5,5,5,5)")
    if o.instance:
        return read_instance(o.instance)
    return spread_network(o.sizes) if o.sizes else published_network()


def understand(o):
    """(network, names, (kept, microbatches, rounds)). Raises ValueError or OSError where nothing can be
    planned or written, so any exception after it is a mistake in this program."""
    network, names = read_network(o)
    work = round(2 / 3 * len(network.stages)) if o.kept is None else o.kept, o.microbatches, o.rounds
    Search(network, *work, dead=o.dead)
    if not o.seconds >= 0:
        raise ValueError(f"--seconds takes a time from 0, not {o.seconds}")
    for file in filter(None, (o.results, o.save)):
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        open(file, "a").close()
    return network, names, work


def run(o, network, names, work):
    if o.sizes:
        network = assign_stages(network, *work, seconds=o.seconds)
    rows, found = compare(network, *work, o.dead, o.seconds)
    print_table(network, work, o.dead, rows, found.bound)
    print_paths(network, names, found.paths, o.dead)
    results = dict(about="simulated by python skippipe.py", bound=found.bound, methods=rows,
                   stages=network.stages, names=names, rounds=o.rounds, paths=found.paths, order=found.order)
    for file, data in (o.results, results), (o.save, dict(asdict(network), names=names)):
        if file:
            Path(file).write_text(json.dumps(data) + "\n")
            print(f"written to {file}")


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
        problem = understand(o)
    except (ValueError, OSError) as error:
        parser.error(error)
    run(o, *problem)


if __name__ == "__main__":
    main()
