"""How good a plan can be at best: on the published instance none comes below 33.054 s."""
from itertools import accumulate, combinations

from skippipe import WORK, hop_costs, path_finder, skip_schedule


def lower_bound(network, stages_kept, microbatches_per_origin=3, rounds=1, swaps=2):
    """Seconds below which no plan can come, whatever its paths and order."""
    schedule = skip_schedule(network, stages_kept, microbatches_per_origin)
    shortest = path_finder(schedule, hop_costs(network), swaps)
    return max(origin_bound(schedule, o, rounds, shortest) for o in network.stages[0])


def origin_bound(schedule, origin, rounds, shortest):
    """Seconds that an origin alone needs for its microbatches. 1. It does their forwards, losses
    and backwards one at a time. 2. At most `lanes` of them are under way at once: as many as it has
    paths, or memory for. So they form `lanes` chains, in which each begins after the one before it
    has ended. The longest has at least 1 / lanes of them, each on the shortest path or a longer."""
    network, paths = schedule.network, schedule.origins.count(origin)
    own = sum(WORK.values()) * network.compute[origin]
    away, _ = shortest(origin)
    pause = network.overhead            # the iteration ends before the last task's pause
    one = own + network.origin_overhead + 2 * pause
    lanes = min(paths, network.memory[origin])
    longest = -(-paths * rounds // lanes)
    return max(paths * rounds * one, longest * (own + away + pause)) - pause


def one_machine(tasks, chains):
    """A lower bound of the seconds that one machine needs for `chains` equal chains of tasks: the
    largest that tasks i to j give, for i <= j. tasks: (seconds busy, seconds from a task's start
    until its chain's next task may start; after the last: until the machine is usable). For each j
    one i will do: 1 and 2 together grow with j, but equally for every i.

    1. No chain's task i starts before that chain's tasks 0 to i - 1 and their waits are over.
    2. From then on the machine does tasks i to j of every chain, one at a time.
    3. The last of these to end is some chain's task j, since chains run in order. Its chain must
       then still wait for task j's message and run its tasks after j.

    The sum of the three is a bound. On the published instance the largest one is exact.
    """
    busy = [0.0, *accumulate(seconds for seconds, _ in tasks)]      # busy[i]: of those before i
    waits = [0.0, *accumulate(seconds for _, seconds in tasks)]
    best, i = 0.0, 0
    for j, (last, _) in enumerate(tasks):
        if waits[j] - chains * busy[j] > waits[i] - chains * busy[i]:
            i = j
        before = waits[i]                                           # 1
        work = chains * (busy[j + 1] - busy[i])                     # 2
        best = max(best, before + work + waits[-1] - waits[j] - last)       # 3
    return best


def tighter_bound(network, stages_kept, microbatches_per_origin=3, rounds=1, swaps=2):
    """Seconds below which no plan can come: `lower_bound`, an origin's tasks one by one,
    or `crossing_bound`, whichever is largest. Of hundreds of nodes only the most remote origins are
    looked at; what they need is still a bound."""
    schedule = skip_schedule(network, stages_kept, microbatches_per_origin)
    both_ways = path_finder(schedule, hop_costs(network), swaps)
    out = path_finder(schedule, one_way(network, network.delay, 1.0), swaps)
    back = path_finder(schedule, one_way(network, list(zip(*network.delay)), 1.5), swaps)
    most = max(1, int(2e6 / len(network.delay) ** 2))
    bounds = [crossing_bound(schedule, rounds)]
    for o in sorted(network.stages[0], key=lambda o: -sum(network.delay[o]))[:most]:
        bounds.append(origin_bound(schedule, o, rounds, both_ways))
        bounds.append(task_bound(schedule, o, rounds, out, back))
    return max(bounds)


def one_way(network, delay, work):
    """As `skippipe.hop_costs`, of one direction alone, where a node's task takes work * w[j]."""
    def hop(i, j):
        task = work * network.compute[j] if network.stage_of.get(j) else 0.0
        return task + (delay[i][j] if i != j else 0.0)

    costs, nodes = [], range(len(delay))
    for i in nodes:
        costs.append([hop(i, j) for j in nodes])
    return costs


def task_bound(schedule, origin, rounds, out, back):
    """Seconds that an origin alone needs for its microbatches, task by task. out, back: what finds
    the shortest way out and the shortest way back.

    What remains of its microbatches is forward, loss and backward on the origin itself, with at
    least the ways out and back between them. At most `lanes` of them are under way at once: as many
    as it has paths, or memory for. So they form `lanes` chains, each microbatch beginning after the
    one before it in its chain has ended, and the longest has at least q, the microbatches / lanes
    rounded up.

    Case 1: no chain is longer. Then at least microbatches - lanes (q - 1) chains have q, and
    `one_machine` bounds the time of only these. Case 2: a chain has q + 1 and takes at least its
    own time. This cannot be if the chains are the paths, of `rounds` each."""
    network, paths = schedule.network, schedule.origins.count(origin)
    w, pause = network.compute[origin], network.overhead
    away, _ = out(origin)
    home, _ = back(origin)
    # (seconds busy, seconds from a task's start to the next one's): forward, loss, backward
    tasks = [(w + network.origin_overhead, w + away), (w / 4 + pause, w / 4 + home),
             (1.5 * w + pause, 1.5 * w + pause)]
    lanes, total = min(paths, network.memory[origin]), paths * rounds
    q = -(-total // lanes)
    bound = one_machine(tasks * q, total - lanes * (q - 1))
    if lanes < paths:
        bound = min(bound, (q + 1) * sum(wait for _, wait in tasks))
    return bound - pause                    # the iteration ends before the last task's pause


class Island:
    """Nodes, and how many visits they may have beyond those due to the origins among them: spare,
    less than 0 where room lacks."""

    def __init__(self, nodes, spare):
        self.nodes = nodes
        self.spare = spare


def crossing_bound(schedule, rounds=1):
    """Seconds of a path that must leave its island, in every valid plan.

    Islands are sets of nodes that have a stage, at first single nodes. All pairs of nodes are gone
    through by the seconds of their link there and back, least first; each pair joins its two
    islands.

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
    network, stages_kept = schedule.network, schedule.kept
    if stages_kept == 1:
        return 0.0
    island_of = {}
    for stage in network.stages:
        for r in stage:
            island_of[r] = Island({r}, schedule.caps[r])
    for o in schedule.origins:
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
