"""Which node serves which stage."""
import math
import random
from dataclasses import replace

from planning.progress import Progress
from planning.regions import WHOLE, cut
from skippipe import dispatch, farthest_first, hop_costs, path_finder, skip_schedule


def assign_stages(network, stages_kept, microbatches_per_origin=3, rounds=1, swaps=2, seconds=10.0,
                  seed=0, *, iterations=None):
    """The network with its nodes dealt to stages of the same sizes, for short iterations.

    Above WHOLE nodes by geography (`regions.cut`), otherwise by local search: swap two
    nodes of different stages, and keep the swap if the first plan's iteration gets no longer, or
    hardly. seconds and iterations (swaps tried) limit the search; the other options are as in
    `plan`."""
    if seconds is None and iterations is None:
        raise ValueError("assign_stages needs an end: give seconds or iterations")
    limits = Progress(network, rounds, seconds, iterations)
    sizes = [len(stage) for stage in network.stages]
    if len(network.delay) > WHOLE:
        stage_of = {}
        for region in cut(network.delay, sizes):
            stage_of |= region
        return with_stages(network, stage_of)

    def score(nodes):
        """(seconds of the first plan's iteration, the network)"""
        dealt = with_stages(network, dict(zip(nodes, stages)))
        schedule = skip_schedule(dealt, stages_kept, microbatches_per_origin)
        shortest = path_finder(schedule, hop_costs(dealt), swaps)
        first = dispatch(dealt, farthest_first(schedule, shortest), rounds)
        return first.makespan, dealt

    draw = random.Random(f"stages {seed}")
    stages = []                 # of the first node, the second one, ...
    for s, size in enumerate(sizes):
        stages += [s] * size
    nodes = draw.sample(range(len(stages)), len(stages))
    now = best = score(nodes)
    tried = 0
    while len(sizes) > 1 and tried < limits.iterations and not limits.late():
        tried += 1
        i, j = draw.sample(range(len(nodes)), 2)
        other = list(nodes)
        other[i], other[j] = nodes[j], nodes[i]
        new = score(other) if stages[i] != stages[j] else (math.inf, None)
        # A little worse is taken now and then, or the search ends in the first dip.
        if new[0] <= now[0] + 0.02 * best[0] * draw.random() ** 3:
            nodes, now = other, new
        best = min(best, now, key=lambda pair: pair[0])
    return best[1]


def with_stages(network, stage_of):
    """The network whose nodes serve the stages in {node: stage}."""
    stages = [[] for _ in network.stages]
    for node in sorted(stage_of):
        stages[stage_of[node]].append(node)
    return replace(network, stages=stages)
