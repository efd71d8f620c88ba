"""The proof that a plan cannot be better: on the published instance none comes below 33.054 s."""
from itertools import accumulate, combinations

import skippipe


def one_machine(tasks, chains):
    """As `skippipe.one_machine`, and tighter: the largest bound that tasks i to j give, over all i <= j.

    1. No chain's task i starts before that chain's tasks 0 to i - 1 and their waits are over.
    2. From then on the machine does tasks i to j of every chain, one at a time.
    3. The last of these to end is some chain's task j, since chains run in order. Its chain must then
       still wait for task j's message and run its tasks after j.

    The sum of the three is a bound. On the published instance the largest one is exact.
    """
    busy, waits = ([0.0, *accumulate(column)] for column in zip(*tasks))
    return max(waits[i] + chains * (busy[j + 1] - busy[i]) + waits[-1] - waits[j] - tasks[j][0]
               for j in range(len(tasks)) for i in range(j + 1))


def lower_bound(network, stages_kept, microbatches_per_origin=3, rounds=1, swaps=2, dead=()):
    """The larger of `skippipe.lower_bound` with this `one_machine` and of `crossing_bound`. Of hundreds of
    nodes the first looks at the most remote origins only; what it finds is still a bound."""
    problem = network, stages_kept, microbatches_per_origin, rounds, swaps, dead
    living = [o for o in network.stages[0] if o not in dead]
    remote = sorted(living, key=lambda o: -sum(network.delay[o]))[:max(1, int(2e6 / len(network.delay) ** 2))]
    return max(skippipe.lower_bound(*problem, one_machine, remote), crossing_bound(*problem))


def crossing_bound(network, stages_kept, microbatches_per_origin=3, rounds=1, swaps=2, dead=()):
    """Seconds of a path that must leave its island, in every valid plan.

    Islands are sets of living nodes, at first single nodes. All pairs of nodes are gone through by the
    seconds of their link there and back, least first; each pair joins its two islands.

    1. An island lacks room if its origins' paths are due more visits after the origin than the caps of
       its nodes allow (TC1, `node_caps`). Then at least one of these paths visits a node of another
       island, whatever the plan.
    2. Let `slow` be the last pair joined while any island lacked room. All pairs before it lie inside
       islands. So every link out of the lacking island takes at least `slow`, there and back.
    3. A path is a round trip of stages_kept links, each taken there (forward) and back (backward). One
       that leaves its island crosses the border at least twice: out, and home.
    4. Each of its other stages_kept - 2 links takes at least as long as the fastest pair. Each of its
       nodes takes at least as long as the fastest node for its tasks (S2).
    5. These times add up along the microbatch's chain (S3, S4). The path's rounds run one after the
       other, so the iteration takes at least `rounds` times the sum.

    CC2, CC3, waits and overheads only make plans slower, so the bound leaves them out. A path of one
    stage never leaves: 0.
    """
    search = skippipe.Search(network, stages_kept, microbatches_per_origin, rounds, swaps, dead)
    if stages_kept == 1:
        return 0.0
    spare = list(search.caps)           # visits that a node may have, less those due to an origin
    for o in search.origins:
        spare[o] -= stages_kept - 1

    def lacks(nodes):
        return sum(spare[r] for r in nodes) < 0
    island = {r: {r} for stage in search.stages for r in stage}
    links = sorted((network.delay[i][j] + network.delay[j][i], i, j) for i, j in combinations(island, 2))
    lacking, slow = sum(map(lacks, island.values())), 0.0
    for seconds, i, j in links:
        if lacking and island[i] is not island[j]:
            both, slow = island[i] | island[j], seconds
            lacking += lacks(both) - lacks(island[i]) - lacks(island[j])
            island.update(dict.fromkeys(both, both))
    work = (2.75 + 2.5 * (stages_kept - 1)) * min(network.compute[r] for r in island)
    return rounds * (work + 2 * slow + (stages_kept - 2) * links[0][0])
