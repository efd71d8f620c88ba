"""Shorter iterations than the paper's search finds: `shorter_plan`.

On the published instance `skippipe.plan` ends at 33.31 s, which its first sweep finds; this one at
33.05 s, which `bound.tighter_bound` proves to be the optimum.
"""
import math

from planning import regions
from planning.bound import tighter_bound
from planning.neighbourhood import NeighbourhoodSearch
from planning.progress import Progress
from skippipe import farthest_first, hop_costs, path_finder, skip_schedule


def shorter_plan(network, stages_kept, microbatches_per_origin=3, rounds=1, swaps=2, seconds=10.0,
                 seed=0, *, iterations=None):
    """As `skippipe.plan`, with this room's search and bound: a Plan. It ends when the bound is
    reached. More than `regions.WHOLE` nodes are planned in regions. On a terminal tqdm counts the
    turns after 3 s."""
    if seconds is None and iterations is None:
        raise ValueError("a search needs an end: give seconds or iterations")
    schedule = skip_schedule(network, stages_kept, microbatches_per_origin)
    progress = Progress(network, rounds, seconds, iterations)
    progress.bound = tighter_bound(network, stages_kept, microbatches_per_origin, rounds, swaps)
    small = len(network.delay) <= regions.WHOLE
    kind = NeighbourhoodSearch if small else regions.RegionSearch
    kind(schedule, swaps, progress, hop_costs(network), seed).run()
    return progress.plan()


def plan_without_tc2(network, stages_kept, microbatches_per_origin=3, rounds=1, swaps=2,
                     seconds=10.0, seed=0, *, iterations=None):
    """As `shorter_plan`, but the first valid paths of the paper's search, wherever microbatches
    meet; in regions their first plans."""
    schedule = skip_schedule(network, stages_kept, microbatches_per_origin)
    progress = Progress(network, rounds, seconds, iterations)
    progress.bound = math.inf           # the search is over with whatever is valid
    cost = hop_costs(network)
    if len(network.delay) > regions.WHOLE:
        search = regions.RegionSearch(schedule, swaps, progress, cost, seed)
        search.join(search.plan_regions())
    else:
        shortest = path_finder(schedule, cost, swaps)
        progress.follow_paper(schedule, shortest, limit=5000)
        if not progress.best:
            progress.dispatch(farthest_first(schedule, shortest))
    progress.bound = tighter_bound(network, stages_kept, microbatches_per_origin, rounds, swaps)
    return progress.plan()
