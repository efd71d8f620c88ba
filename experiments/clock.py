"""The simulated seconds of an iteration and of a synchronisation, which turn a run's steps into time."""
import itertools
import json
from dataclasses import asdict
from pathlib import Path

import numpy as np

import train
from planning.instance import city_delays, city_links
from planning.training import plan_paths

MODEL_BYTES = 4 * 500e6         # the 500M model whose messages the published instance has, fp32


def makespan(network, routing, skip, microbatches=6):
    """Simulated seconds of an iteration on the paths that train.py would plan (its default seed)."""
    return plan_paths(network, routing, skip, microbatches, train.Options.seed)["makespan"]


def keep_links(network, name):
    """The network as a file for --links."""
    path = Path("runs", name)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(asdict(network)))
    return path


def all_reduce_seconds(ranks, whole, part):
    """As fast as there is: links do not contend, so all at once, or the best ring.

    All at once, each rank sends every other its nth part, then what it summed; or, as NoLoCo does, the
    whole vector. whole[a][b], part[a][b]: seconds of a message of all bytes and of their nth part.
    """
    pairs = list(itertools.combinations(ranks, 2))
    first, *others = ranks
    rings = [(first, *rest, first) for rest in itertools.permutations(others)]
    slowest_links = [max(part[a][b] for a, b in zip(ring, ring[1:])) for ring in rings]
    two_rounds = 2 * max(part[a][b] for a, b in pairs)
    one_round = max(whole[a][b] for a, b in pairs)
    return min(two_rounds, one_round, 2 * (len(ranks) - 1) * min(slowest_links))


def stage_delays(network, names, parts=1, size=4):
    """delay[a][b] of one of so many parts of a stage, on the published links. size: bytes of a number."""
    return city_delays(names, city_links(), MODEL_BYTES * size / 4 / len(network.stages) / parts)


def slowest_all_reduce(network, names, size=4):
    """Seconds in which the slowest stage is averaged over its nodes."""
    whole = stage_delays(network, names, size=size)
    return max(all_reduce_seconds(ranks, whole, stage_delays(network, names, len(ranks), size))
               for ranks in network.stages)


def every(o):
    """Steps per synchronisation."""
    return 1 if o.method == "ddp" else o.inner_steps


def hours(run, iteration, sync, averaging=0.0):
    """Simulated hours at each evaluation: seconds of an iteration, of a synchronisation, and of the
    gradients' all-reduce at every step of a warm start."""
    warm, m = run.o.warm_start, every(run.o)

    def at(step):
        return step * iteration + min(step, warm) * averaging + max(step // m - warm // m, 0) * sync

    return [at(step) / 3600 for step in run.steps]


def reaches(goal, losses, hours):
    """The hour at which the loss is at most the goal, on straight lines between evaluations; None:
    never."""
    points = list(zip(hours, losses))
    if losses[0] <= goal:
        return hours[0]
    for (before, above), (after, value) in zip(points, points[1:]):
        if value <= goal:
            return before + (above - goal) / (above - value) * (after - before)


def loss_at(second, run):
    """The run's loss then, on straight lines between evaluations as measured; after its end, the last."""
    return float(np.interp(second, run.curves["seconds"], run.losses))
