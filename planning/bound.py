"""The proof that a plan cannot be better: on the published instance none comes below 33.054 s."""
from itertools import accumulate, combinations

from skippipe import Problem, lower_bound


def tighter_one_machine(tasks, chains):
    """As `skippipe.one_machine`, and tighter: the largest bound that tasks i to j give, for i <= j.

    1. No chain's task i starts before that chain's tasks 0 to i - 1 and their waits are over.
    2. From then on the machine does tasks i to j of every chain, one at a time.
    3. The last of these to end is some chain's task j, since chains run in order. Its chain must
       then still wait for task j's message and run its tasks after j.

    The sum of the three is a bound. On the published instance the largest one is exact.
    """
    busy = [0.0, *accumulate(seconds for seconds, _ in tasks)]      # busy[i]: of those before i
    waits = [0.0, *accumulate(seconds for _, seconds in tasks)]
    best = 0.0
    for j, (last, _) in enumerate(tasks):
        for i in range(j + 1):
            before = waits[i]                                           # 1
            work = chains * (busy[j + 1] - busy[i])                     # 2
            best = max(best, before + work + waits[-1] - waits[j] - last)       # 3
    return best


def tighter_bound(network, stages_kept, microbatches_per_origin=3, rounds=1, swaps=2, dead=()):
    """The larger of `skippipe.lower_bound` with the machine above and of `crossing_bound`. Of
    hundreds of nodes the first looks at the most remote origins only; what it finds is still a
    bound."""
    asked = (network, stages_kept, microbatches_per_origin, rounds, swaps, dead)
    living = [o for o in network.stages[0] if o not in dead]
    most = max(1, int(2e6 / len(network.delay) ** 2))
    remote = sorted(living, key=lambda o: -sum(network.delay[o]))[:most]
    return max(lower_bound(*asked, tighter_one_machine, remote), crossing_bound(*asked))


class Island:
    """Nodes, and how many visits they may have beyond those due to the origins among them: spare,
    less than 0 where room lacks."""

    def __init__(self, nodes, spare):
        self.nodes = nodes
        self.spare = spare


def crossing_bound(network, stages_kept, microbatches_per_origin=3, rounds=1, swaps=2, dead=()):
    """Seconds of a path that must leave its island, in every valid plan.

    Islands are sets of living nodes, at first single nodes. All pairs of nodes are gone through by
    the seconds of their link there and back, least first; each pair joins its two islands.

    1. An island lacks room if its origins' paths are due more visits after the origin than the caps
       of its nodes allow (TC1, `node_caps`). Then at least one of these paths visits a node of
       another island, whatever the plan.
    2. Let `slow` be the last pair joined while any island lacked room. All pairs before it lie
       inside islands. So every link out of the lacking island takes at least `slow`, there and
       back.
    3. A path is a round trip of stages_kept links, each taken there (forward) and back (backward).
       One that leaves its island crosses the border at least twice: out, and home.
    4. Each of its other stages_kept - 2 links takes at least as long as the fastest pair. Each of
       its nodes takes at least as long as the fastest node for its tasks (S2).
    5. These times add up along the microbatch's chain (S3, S4). The path's rounds run one after the
       other, so the iteration takes at least `rounds` times the sum.

    CC2, CC3, waits and overheads only make plans slower, so the bound leaves them out. A path of
    one stage never leaves: 0.
    """
    problem = Problem(network, stages_kept, microbatches_per_origin, rounds, swaps, dead)
    if stages_kept == 1:
        return 0.0
    island_of = {}
    for stage in problem.stages:
        for r in stage:
            island_of[r] = Island({r}, problem.caps[r])
    for o in problem.origins:
        island_of[o].spare -= stages_kept - 1
    delay, links = network.delay, []
    for i, j in combinations(island_of, 2):
        links.append((delay[i][j] + delay[j][i], i, j))
    links.sort()
    lacking = {island for island in island_of.values() if island.spare < 0}
    slow = 0.0
    for seconds, i, j in links:
        one, other = island_of[i], island_of[j]
        if not lacking:
            break
        if one is other:
            continue
        slow = seconds
        both = Island(one.nodes | other.nodes, one.spare + other.spare)
        lacking -= {one, other}
        if both.spare < 0:
            lacking.add(both)
        for r in both.nodes:
            island_of[r] = both
    work = (2.75 + 2.5 * (stages_kept - 1)) * min(network.compute[r] for r in island_of)
    fastest, _, _ = links[0]
    return rounds * (work + 2 * slow + (stages_kept - 2) * fastest)
