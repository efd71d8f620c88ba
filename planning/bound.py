"""The proof that a plan cannot be better: on the published instance none comes below 33.054 s."""
import heapq
from itertools import combinations

import skippipe


def one_machine(tasks, chains, work=1000):
    """As `skippipe.one_machine`, and exact unless `work`, the nodes of the tree to open, runs out.

    Best-first branch and bound over the machine's order; the least bound of the open nodes is a bound of
    the whole. Next comes any task that can start before another could be done: a later one could be
    moved behind that at no cost. A node's bound: each chain runs on undisturbed, and the machine does
    all that is left without a pause.
    """
    count = len(tasks)
    if count * chains > work:           # the search would end before its first leaf
        return skippipe.one_machine(tasks, chains)
    tail = [sum(wait for _, wait in tasks[i:]) for i in range(count + 1)]
    rest = [sum(busy for busy, _ in tasks[i:]) for i in range(count + 1)]

    def bound(state):
        machine = min(head for _, head in state) + sum(rest[done] for done, _ in state)
        return max(machine, *(head + tail[done] for done, head in state))

    def after(state, j):
        """The state when the machine has done the next task of chain j."""
        done, head = state[j]
        busy, wait = tasks[done]
        others = [(d, max(h, head + busy) if d < count else h) for d, h in state[:j] + state[j + 1:]]
        return tuple(sorted((*others, (done + 1, head + wait))))

    # per chain: tasks done, earliest start of the next; sorted, as the chains are equal
    state = ((0, 0.0),) * chains
    tree, seen = [(bound(state), 0, state)], {state}
    while work and tree[0][2][0][0] < count:
        least, negative, state = heapq.heappop(tree)
        work -= 1
        first = min(head + tasks[done][0] for done, head in state if done < count)
        for j, (done, head) in enumerate(state):
            if done == count or head > first or state[j] in state[:j]:
                continue
            child = after(state, j)
            if child not in seen:
                seen.add(child)
                heapq.heappush(tree, (max(least, bound(child)), negative - 1, child))
    return tree[0][0]


def lower_bound(network, stages_kept, microbatches_per_origin=3, rounds=1, swaps=2, dead=()):
    """The larger of `skippipe.lower_bound` with the exact `one_machine` and of `crossing_bound`. Of hundreds
    of nodes the first looks at the most remote origins only; what it finds is still a bound."""
    problem = network, stages_kept, microbatches_per_origin, rounds, swaps, dead
    living = [o for o in network.stages[0] if o not in dead]
    remote = sorted(living, key=lambda o: -sum(network.delay[o]))[:max(1, int(2e6 / len(network.delay) ** 2))]
    return max(skippipe.lower_bound(*problem, one_machine, remote), crossing_bound(*problem))


def crossing_bound(network, stages_kept, microbatches_per_origin=3, rounds=1, swaps=2, dead=()):
    """Seconds that a path between islands takes, where there must be one.

    Join nodes to islands by their links, the fastest first. As long as the origins of an island are due
    more visits than its other nodes may have (CC3, TC1), some path leaves its island. It takes a link as
    slow as the last one joined twice, out and home. Its other links and its nodes are at least as slow as
    the fastest ones.
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
