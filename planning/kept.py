"""Plans as plain JSON, for people and for other pipelines: docs/planning.md has the schema."""
import json
from pathlib import Path

from planning.bound import tighter_bound
from skippipe import Infeasible, Network, rounds_of, simulate


def as_json(stages, paths, order, makespan, bound, made, **more):
    """A plan for a JSON file. paths: one per microbatch, those of all rounds. bound: seconds; None
    where it is not known. made: how, a dict. more: what else the file is to say."""
    return dict(stages=stages, paths=paths, order=order, makespan=makespan, bound=bound, made=made,
                **more)


def bound_of(network, paths, rounds):
    """Seconds; no valid plan of as much work as these paths, of all rounds, takes less. None where
    there is no valid plan: the full pipeline and drawn paths may break TC1."""
    each = len(paths) // (len(network.stages[0]) * rounds)
    try:
        return tighter_bound(network, len(paths[0]), each, rounds)
    except Infeasible:
        return None


def read_plan(file):
    """(Network, paths, Result, bound) of the plan.json of a run. Raises OSError, or ValueError with
    one line."""
    try:
        kept = json.loads(Path(file).read_text())
        network = Network(**kept["network"])
        paths = [tuple(path) for path in kept["paths"]]
        each = len(paths) // len(network.stages[0])
        rounds = rounds_of(each, min(network.memory))
        bound = bound_of(network, paths, rounds)
        return network, paths, simulate(network, paths, order=kept["order"]), bound
    except (KeyError, IndexError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{file}: is no plan.json of a run ({error})")
