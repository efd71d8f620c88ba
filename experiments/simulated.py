"""Simulated seconds of an iteration and of a synchronisation, with the messages and weights of the
500M model: an iteration by skippipe.simulate, a synchronisation by `slowest_all_reduce` or
`slowest_groups`. Nothing overlaps.
"""
import itertools
import json
import statistics
from dataclasses import asdict
from pathlib import Path

from noloco import random_groups
from planning.instance import city_delays, city_links
from planning.training import plan_paths

MODEL_BYTES = 4 * 500e6         # the 500M model whose messages the published instance has, fp32


def makespan(network, routing, skip, microbatches):
    """Seconds of an iteration on the paths that train.py plans with its default seed.

    microbatches: of an origin.
    """
    return plan_paths(network, routing, skip, microbatches, 0)["makespan"]


def keep_links(network, name):
    """Write the network as a file for --links; returns its path."""
    path = Path("runs", name)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(asdict(network)))
    return path


def all_reduce_seconds(ranks, whole, part):
    """Seconds of the fastest of three all-reduces.

    Two rounds of parts: each of n ranks sends every other its nth part, then the sum of it. One
    round of whole vectors, as in NoLoCo. The best ring. whole[a][b], part[a][b]: seconds of a
    message; links do not contend.
    """
    parts_twice = 2 * slowest_round(ranks, part)
    whole_once = slowest_round(ranks, whole)
    ring = 2 * (len(ranks) - 1) * best_ring(ranks, part)
    return min(parts_twice, whole_once, ring)


def slowest_round(ranks, delay):
    """Seconds in which each rank has sent to every other."""
    return max(delay[a][b] for a, b in itertools.permutations(ranks, 2))


def best_ring(ranks, delay):
    """The slowest link of the ring through all ranks whose slowest link is fastest."""
    first, *others = ranks
    slowest = []
    for rest in itertools.permutations(others):
        ring = (first, *rest, first)
        slowest.append(max(delay[a][b] for a, b in zip(ring, ring[1:])))
    return min(slowest)


def stage_delays(network, names, parts=1, size=4):
    """delay[a][b] in seconds of one of `parts` parts of a stage; size: bytes of a number."""
    message = MODEL_BYTES * size / 4 / len(network.stages) / parts
    return city_delays(names, city_links(), message)


def slowest_all_reduce(network, names, size=4):
    """Seconds in which the slowest stage is averaged over its nodes."""
    whole = stage_delays(network, names, size=size)
    slowest = []
    for ranks in network.stages:
        part = stage_delays(network, names, len(ranks), size)
        slowest.append(all_reduce_seconds(ranks, whole, part))
    return max(slowest)


def slowest_groups(network, delay):
    """Seconds of the slowest NoLoCo group of all stages, on average over 100 outer steps."""
    slowest = []
    for outer in range(100):
        groups = []
        for ranks in network.stages:
            groups += random_groups(ranks, 2, outer, 0)
        slowest.append(max(slowest_round(group, delay) for group in groups))
    return statistics.mean(slowest)
