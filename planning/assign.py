"""Which node serves which stage."""
import math
import random
import time
from dataclasses import replace

from planning.regions import WHOLE, cut
from skippipe import Search


def assign_stages(network, stages_kept, microbatches_per_origin=3, rounds=1, swaps=2, seconds=10.0, seed=0, *,
                  iterations=None):
    """The network with its nodes dealt to stages of the same sizes, for short iterations.

    More than WHOLE nodes by geography (`regions.cut`). Up to WHOLE nodes by local search: swap two nodes
    of different stages, and keep the swap if the first plan's iteration gets no longer, or hardly. seconds
    and iterations (swaps tried) limit the search; the other options are as in `plan`.
    """
    sizes = [len(stage) for stage in network.stages]

    def dealt(stage_of):
        return replace(network, stages=[[r for r in sorted(stage_of) if stage_of[r] == s]
                                        for s in range(len(sizes))])

    def score(nodes):
        search = Search(dealt(dict(zip(nodes, stages))), stages_kept, microbatches_per_origin, rounds, swaps)
        search.farthest_first()
        return search.best.makespan, search.network

    if len(network.delay) > WHOLE:
        return dealt({r: s for region in cut(network.delay, sizes) for r, s in region.items()})
    draw, start, tried = random.Random(f"stages {seed}"), time.perf_counter(), 0
    stages = [s for s, size in enumerate(sizes) for _ in range(size)]
    nodes = draw.sample(range(len(stages)), len(stages))
    now = best = score(nodes)
    limit = math.inf if seconds is None else seconds
    while len(sizes) > 1 and tried != iterations and time.perf_counter() - start < limit:
        tried += 1
        i, j = draw.sample(range(len(nodes)), 2)
        other = list(nodes)
        other[i], other[j] = nodes[j], nodes[i]
        new = score(other) if stages[i] != stages[j] else (math.inf, None)
        # a little worse now and then, or it ends in the first dip
        if new[0] <= now[0] + 0.02 * best[0] * draw.random() ** 3:
            nodes, now = other, new
        best = min(best, now, key=lambda pair: pair[0])
    return best[1]
