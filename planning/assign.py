"""Which node serves which stage."""
import math
import random
import time
from itertools import islice

from skippipe import Network, Search


def assign_stages(delay, compute, sizes, stages_kept, microbatches_per_origin=3, rounds=1, swaps=2,
                  memory=3, overhead=0.0, origin_overhead=None, seconds=10.0, seed=0, *, iterations=None,
                  progress=None):
    """Stages as lists of nodes, sizes[s] of them in stage s, from a flat list of nodes.

    Local search over swaps of two nodes of different stages, starting from a random assignment (the
    paper takes DT-FM's genetic algorithm). The proxy it minimises is the simulated iteration of the
    farthest-first paths, which take milliseconds and come within a few percent of the plan's. seconds,
    iterations and seed as in `plan`, an iteration being one assignment tried. progress(text) is called
    after each. Raises ValueError if sizes do not fit.
    """
    if sum(sizes) != len(compute) or min(sizes) < 1:
        raise ValueError(f"stage sizes {sizes} must be positive and add up to the {len(compute)} nodes")

    def score(nodes):
        rest = iter(nodes)
        stages = [sorted(islice(rest, size)) for size in sizes]
        network = Network(delay, compute, stages, memory, overhead, origin_overhead)
        search = Search(network, stages_kept, microbatches_per_origin, rounds, swaps)
        search.farthest_first()
        return search.best.makespan, stages

    draw, start, tried = random.Random(f"stages {seed}"), time.perf_counter(), 0
    stage = [s for s, size in enumerate(sizes) for _ in range(size)]
    nodes = draw.sample(range(len(compute)), len(compute))
    now = best = score(nodes)
    limit = math.inf if iterations is None else iterations
    until = start + (math.inf if seconds is None else seconds)
    while len(nodes) > 1 and tried < limit and time.perf_counter() < until:
        tried += 1
        i, j = draw.sample(range(len(nodes)), 2)
        other = list(nodes)
        other[i], other[j] = nodes[j], nodes[i]
        new = score(other) if stage[i] != stage[j] else (math.inf, None)
        # a little worse now and then, or it ends in the first dip
        if new[0] <= now[0] + 0.02 * best[0] * draw.random() ** 3:
            nodes, now = other, new
        best = min(best, now)
        if progress:
            progress(f"stages: {tried} assignments tried, iteration {best[0]:.3f} s")
    return best[1]
