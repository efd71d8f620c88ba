"""SkipPipe: pipelines whose microbatches take their own paths (arXiv 2502.19913).

    python skippipe.py                                                # the published 20 nodes in 12 cities: table and figures/skippipe.png
    python skippipe.py --nodes 42 --sizes 7,5,5,5,5,5,5,5 --kept 6    # a larger network from the same city table
    python skippipe.py --instance mine.json                           # your own: {"delay": [[...]], "compute": [...], "stages": [[...]]}

A path is the tuple of ranks that a microbatch visits, (origin, r1, ..., rm). The origin is a rank of stage 0: it holds the embedding,
its own layers, the final norm, the head and the loss. So every path ends by going home, and backward retraces it. A microbatch is a
chain of 2m + 3 tasks, numbered by hop:

    hop          0  ...  m        m + 1       m + 2  ...  2m + 2
    task         forward          loss        backward
    rank         path[0..m]       origin      path[m..0]                                         (1)
    time         w                w / 4       1.5 w            w: the rank's forward seconds     (2)

Between two tasks the message takes delay[i][j]; links do not contend and sending does not occupy the node. A node runs one task at a
time and holds at most `memory` microbatches: a forward takes a slot, the backward of the same microbatch frees it. After a task the
node cannot be used for `overhead` seconds (`origin_overhead` after an origin's first forward); the message leaves at once.

From top to bottom: the network and simple paths, the simulator, the constraints (CC1, CC2, CC3, TC1, TC2), the planner, the bound, the
baselines, the assignment of nodes to stages, and the command line.
"""
import argparse
import csv
import heapq
import json
import math
import random
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from itertools import chain as joined, islice
from pathlib import Path

FORWARD, LOSS, BACKWARD = "forward", "loss", "backward"
WORK = {FORWARD: 1.0, LOSS: 0.25, BACKWARD: 1.5}        # Eq. 2: seconds of a task per forward second of its node
SLOTS = {FORWARD: -1, LOSS: 0, BACKWARD: 1}             # memory slots that a task frees


def per_node(value, nodes, name):
    """A list with one value per node, of such a list or of one value for all."""
    values = list(value) if hasattr(value, "__len__") else [value] * nodes
    if len(values) != nodes:
        raise ValueError(f"{name} must be one number or {nodes}, one per node, got {len(values)}")
    return values


@dataclass
class Network:
    """The nodes and links that a plan is made for.

    delay[i][j]: seconds from the end of a task on i to the arrival of its message on j. compute[i]: seconds of one forward on i (w).
    stages: the ranks of each stage, stages[0] the origins. memory: microbatches held at once. Both are one number or one per node.
    overhead, origin_overhead: seconds (see the module). Raises ValueError when these do not fit together. Sets stage_of: rank -> stage.
    """
    delay: list
    compute: list
    stages: list
    memory: int = 3
    overhead: float = 0.0
    origin_overhead: float = None

    def __post_init__(self):
        nodes = len(self.delay)
        self.compute, self.memory = per_node(self.compute, nodes, "compute"), per_node(self.memory, nodes, "memory")
        if self.origin_overhead is None:
            self.origin_overhead = self.overhead
        if any(len(row) != nodes for row in self.delay):
            raise ValueError(f"delay must have as many columns as rows, {nodes}")
        numbers = [self.overhead, self.origin_overhead, *self.compute, *self.memory, *joined(*self.delay)]
        if not all(isinstance(x, (int, float)) and 0 <= x < float("inf") for x in numbers):
            raise ValueError("delays, compute times, memory and overheads must be numbers from 0, and finite (name a missing node as dead)")
        ranks = [r for stage in self.stages for r in stage]
        if not ranks or not all(self.stages) or len(set(ranks)) != len(ranks) or not set(ranks) <= set(range(nodes)):
            raise ValueError(f"stages must be non-empty lists of different ranks below {nodes}, got {self.stages}")
        self.stage_of = {r: s for s, stage in enumerate(self.stages) for r in stage}


def full_paths(stages, microbatches):
    """Paths through every stage, `microbatches` for each origin: replica i's go straight through the i-th rank of every stage.

    Where stages are unequal, each stage's ranks are dealt out in turn, so their shares differ by at most one. Listed microbatch by
    microbatch, the origins in turn.
    """
    return deal(stages, microbatches, lambda boundary: list)


def random_paths(stages, microbatches, step, seed):
    """NoLoCo's random routing (arXiv 2506.10911): at every stage boundary a fresh permutation says who sends to whom.

    Drawn per microbatch and boundary from (seed, step, boundary) by everyone alike, so no message is needed to agree. Shares are as
    even as in `full_paths`.
    """
    def shuffled(boundary):
        generator = random.Random(f"routes {seed} {step} {boundary}")
        return lambda ranks: generator.sample(ranks, len(ranks))
    return deal(stages, microbatches, shuffled)


def deal(stages, microbatches, shuffler):
    """Deal each stage's ranks to the microbatches, one deck after the other."""
    columns = [list(stages[0]) * microbatches]
    for boundary, ranks in enumerate(stages[1:]):
        shuffle = shuffler(boundary)
        columns.append(joined(*(shuffle(ranks) for _ in range(0, len(columns[0]), len(ranks)))))
    return list(zip(*columns))      # which ends with the origins, though the last deck may hold more cards


def chain(path):
    """Eq. 1: the rank of every hop. Hops below len(path) are forward, hop len(path) is the loss, later ones are backward."""
    return (*path, path[0], *reversed(path))


def kind(path, hop):
    return FORWARD if hop < len(path) else LOSS if hop == len(path) else BACKWARD


# ---- the simulator


class Deadlock(RuntimeError):
    """No task can start although some are left: the order or the memory is impossible."""


@dataclass
class Result:
    """makespan: seconds until the last microbatch is back home. timeline: (rank, microbatch, kind, start, end) in order of start,
    seconds. waiting[rank]: seconds that tasks spent at the rank before they started (collisions, TC2, and memory). hops: for each entry
    of the timeline (hop, seconds at which the task arrived)."""
    makespan: float
    timeline: list = field(repr=False)
    waiting: list = field(repr=False)
    hops: list = field(repr=False)

    def order(self):
        """For each rank the (microbatch, hop) that it ran, in order: what `simulate` takes as its planned order."""
        order = [[] for _ in self.waiting]
        for (rank, u, *_), (hop, _) in zip(self.timeline, self.hops):
            order[rank].append((u, hop))
        return order

    def last(self):
        """The microbatch that comes home last."""
        return max(self.timeline, key=lambda task: task[4])[1]


def simulate(network, paths, release=None, rounds=1, order=None):
    """Run one iteration in the time model of the module docstring and return a `Result`.

    release: seconds at which each path's first microbatch may start (default 0). rounds: microbatches per path; the next one starts
    when the one before it is back home, its origin usable again, and is numbered len(paths) higher. order: for each rank the list of
    (microbatch, hop) in which it must run its tasks; without it a free node starts, among the tasks present and startable, the one
    that arrived first, new injections last. What arrives at the very moment at which a node becomes usable is already waiting for
    it; of several arrivals at one moment the lowest microbatch comes first. Times are plain doubles, added up in the order in which
    things happen, so that they are the same on every machine. Raises Deadlock when tasks are left that can never start.
    """
    nodes, count = len(network.compute), len(paths)
    chains, lengths = [chain(p) for p in paths], [len(p) for p in paths]
    slots, idle, ran, waiting = list(network.memory), [True] * nodes, [0] * nodes, [0.0] * nodes
    turn = order and {(node, *task): i for node, tasks in enumerate(order) for i, task in enumerate(tasks)}
    present = [[] for _ in range(nodes)]    # tasks that wait at each node: (injected, arrival, microbatch, hop)
    timeline, hops, makespan, left = [], [], 0.0, rounds * sum(map(len, chains))
    # an event: (time, 0 = a task arrives or 1 = the node becomes usable, microbatch, hop, node)
    events = [(release[u] if release else 0.0, 0, u, 0, path[0]) for u, path in enumerate(paths)]
    heapq.heapify(events)
    while events:
        now, usable_again, u, hop, node = heapq.heappop(events)
        if usable_again:
            idle[node] = True
        else:
            present[node].append((hop == 0, now, u, hop))
        if not idle[node]:
            continue
        ready = [task for task in present[node] if slots[node] or task[3] >= lengths[task[2] % count]]
        if order:
            ready = [task for task in ready if turn.get((node, *task[2:])) == ran[node]]
        if not ready:
            continue
        task = min(ready)
        present[node].remove(task)
        _, came, u, hop = task
        ranks, what = chains[u % count], kind(paths[u % count], hop)
        # A backward's slot counts as free from its start: the node is busy until its end anyway.
        work, slot = WORK[what], SLOTS[what]
        end = now + work * network.compute[node]
        usable = end + (network.overhead if hop else network.origin_overhead)
        idle[node] = False
        ran[node] += 1
        left -= 1
        slots[node] += slot
        waiting[node] += now - came
        timeline.append((node, u, what, now, end))
        hops.append((hop, came))
        heapq.heappush(events, (usable, 1, u, hop, node))
        if hop + 1 < len(ranks):
            to = ranks[hop + 1]
            heapq.heappush(events, (end + (network.delay[node][to] if to != node else 0.0), 0, u, hop + 1, to))
        else:
            makespan = max(makespan, end)
            if u + count < rounds * count:
                heapq.heappush(events, (usable, 0, u + count, 0, node))
    if left:
        why = "the planned order contradicts itself or the memory" if order else "every node that could run one is out of memory"
        raise Deadlock(f"{left} of {rounds * sum(map(len, chains))} tasks can never start: {why}")
    return Result(makespan, timeline, waiting, hops)


# ---- the constraints: each function yields Violations


class Infeasible(ValueError):
    """No valid plan exists; the message names the constraint that cannot be met."""


@dataclass
class Violation:
    """text: what is wrong. bans: (microbatch, nodes) pairs; in any valid plan at least one of these microbatches keeps off its nodes.
    excess: by how many visits, or seconds of waiting, the constraint is exceeded."""
    text: str
    bans: list = field(default_factory=list, repr=False)
    excess: float = 1


def cc1(network, paths):
    """CC1: the first stage is never skipped. A path starts at a node of stage 0 and does not come back there before its loss."""
    for u, path in enumerate(paths):
        for i, r in enumerate(path):
            if (i == 0) != (network.stage_of[r] == 0):
                yield Violation(f"CC1: microbatch {u} has node {r} of stage {network.stage_of[r]} in place {i} of its path {path}")


def cc2(network, paths, swaps=2):
    """CC2: at most two consecutive stages are swapped: stage s+1 may come right before stage s, at most `swaps` times in a path, and each
    stage takes part in one swap. The rest is in order and no stage comes twice. (The released search lets a path hop back twice in a row,
    as in 3, 2, 1, which moves a stage by two places; it also forbids jumps of more than four stages, which the paper does not ask for.)
    """
    for u, path in enumerate(paths):
        stages, swapped = [network.stage_of[r] for r in path], 0
        for i in range(1, len(path)):
            a, b = stages[i - 1], stages[i]
            swapped += b == a - 1
            if b < a - 1 or b in stages[:i] or (b < a and swapped > swaps) or b < max(stages[:i - 1], default=b):
                yield Violation(f"CC2: microbatch {u} goes from stage {a} (node {path[i - 1]}) to stage {b} (node {path[i]}) after stages "
                                f"{stages[:i - 1]}: not in order, even with {swaps} swaps of neighbours")


def visitors_of(paths, place):
    """{place(r): the microbatches that come through there after their origin}"""
    found = {}
    for u, path in enumerate(paths):
        for r in path[1:]:
            found.setdefault(place(r), []).append(u)
    return found


def cc3(network, paths, dead=()):
    """CC3: stages are skipped equally often, as far as the numbers allow: visits to any two stages differ by at most one. Stages without a
    living node do not count."""
    visitors = {s: [] for s, nodes in enumerate(network.stages) if s and not set(nodes) <= set(dead)}
    visitors |= visitors_of(paths, lambda r: network.stage_of[r])
    low, extra = divmod(sum(map(len, visitors.values())), max(1, len(visitors)))
    crowded = [(u, network.stages[s]) for s, users in visitors.items() if len(users) > low for u in users]
    for s, users in sorted(visitors.items(), key=lambda item: -len(item[1])):       # over-full stages first
        excess = max(len(users) - low - (extra > 0), low - len(users))
        if excess > 0:
            bans = [(u, network.stages[s]) for u in users] if len(users) > low else crowded
            yield Violation(f"CC3: stage {s} (nodes {network.stages[s]}) is visited by {len(users)} microbatches, {users}; {low} to "
                            f"{low + (extra > 0)} are due", bans, excess)


def tc1(network, paths, caps):
    """TC1: a node holds at most `memory` microbatches at once. `simulate` sees to that; here it means that at most caps[r] paths run
    through node r (see `node_caps`). Origins are left out: they carry their own microbatches, however many."""
    for r, users in sorted(visitors_of(paths, lambda r: r).items()):
        if len(users) > caps[r]:
            yield Violation(f"TC1: node {r} (stage {network.stage_of[r]}) carries {len(users)} microbatches, {users}, of at most {caps[r]}",
                            [(u, [r]) for u in users], len(users) - caps[r])


def tc2(network, paths, result):
    """TC2: two microbatches do not want the same node at the same time. A wish, not a rule, so `check` leaves it out: yields a Violation
    for every task that had to wait at a node, the longest wait first. Nobody can be sent away from an origin: no bans there."""
    before, found = {}, []
    for (rank, u, _, start, _), (_, came) in zip(result.timeline, result.hops):
        if start - came > 1e-9 and rank in before:
            found.append((came - start, rank, u, before[rank]))
        before[rank] = u
    for wait, rank, u, v in sorted(found):
        users = sorted({u % len(paths), v % len(paths)}) if network.stage_of[rank] else []
        yield Violation(f"TC2: microbatch {u} waits {-wait:.2f} s at node {rank} for {v}", [(x, [rank]) for x in users], -wait)


def node_caps(network, share, dead=(), quota=None):
    """For each node the most paths that may run through it, when each stage is visited by `share` paths. quota: your own, one or per node.

    A path has one microbatch under way at a time, so a node with at most `memory` paths never waits for memory: that is the published
    search's rule and the default. Where it would leave a stage too few places or no choice between slow and fast nodes, a cap grows to
    the node's part of the stage's memory x speed; what is held at once is the simulator's business then.
    """
    caps = [0] * len(network.compute)
    quotas = per_node(quota, len(caps), "quota")
    for stage in network.stages[1:]:
        power = {r: network.memory[r] / max(network.compute[r], 1e-9) for r in stage if r not in dead and network.memory[r]}
        for r in power:
            part = math.ceil(share * power[r] / sum(power.values()) - 1e-9)
            caps[r] = max(network.memory[r], part) if quota is None else quotas[r]
    return caps


def check(network, paths, stages_kept=None, swaps=2, dead=(), quota=None):
    """Every violation of CC1, CC2, CC3 and TC1 as a list of sentences that name microbatch, stage and node; empty for valid paths.

    Paths of another length than stages_kept (default: the first path's) and nodes that are dead or of no stage are listed too.
    """
    kept = stages_kept or len(paths[0])
    found = [f"microbatch {u} visits {len(path)} stages, not {kept}: {path}" for u, path in enumerate(paths) if len(path) != kept]
    found += [f"microbatch {u} visits node {r} of stage {network.stage_of.get(r)}, which is not there" for u, path in enumerate(paths)
              for r in path if r in dead or r not in network.stage_of]
    known = [[r for r in path if r in network.stage_of] for path in paths]
    living = [s for s in network.stages[1:] if not set(s) <= set(dead)]
    caps = node_caps(network, -(-len(paths) * (kept - 1) // max(1, len(living))), dead, quota)
    return found + [v.text for v in joined(cc1(network, known), cc2(network, known, swaps), cc3(network, known, dead),
                                           tc1(network, known, caps))]


# ---- the planner


def shortest_path(hop, stages, origin, kept, swaps, must=()):
    """The cheapest path of one microbatch through `kept` stages under CC1 and CC2, as (seconds, path), or None where there is none.

    hop[i][j]: seconds from i to j and of the work on j; j = origin: of the way home. stages: the nodes of each stage that may be used.
    must: the stages that may not be skipped. A dynamic programme over the stages in order: skip stage s, visit it, or visit s+1 and then
    s. layers[s][visits, swaps][last node] = (seconds, path), everything below stage s being decided.
    """
    def visit(ends, nodes):
        best = [min((seconds + hop[e][n], path) for e, (seconds, path) in ends.items()) for n in nodes]
        return {n: (seconds, path + (n,)) for n, (seconds, path) in zip(nodes, best)}

    def reach(s, state, ends):
        known = layers[s].setdefault(state, {})
        for n, label in ends.items():
            known[n] = min(label, known.get(n, label))

    count = len(stages)
    layers = [{} for _ in range(count + 1)]
    layers[1][0, 0] = {origin: (0.0, (origin,))}
    for s in range(1, count):
        for (visits, swapped), ends in layers[s].items():
            if visits + count - s >= kept and s not in must:            # enough stages are left to skip this one
                reach(s + 1, (visits, swapped), ends)
            if visits + 1 < kept and stages[s]:
                reach(s + 1, (visits + 1, swapped), visit(ends, stages[s]))
            if visits + 2 < kept and swapped < swaps and s + 1 < count and stages[s] and stages[s + 1]:
                reach(s + 2, (visits + 2, swapped + 1), visit(visit(ends, stages[s + 1]), stages[s]))
    return min(((seconds + hop[n][origin], path) for (visits, _), ends in layers[count].items() if visits == kept - 1
                for n, (seconds, path) in ends.items()), default=None)


def hop_costs(network, forward=1.0, backward=1.5):
    """hop[i][j] for `shortest_path`: the link there and back and the work on j, as multiples of w; 0 leaves a direction out. The origin's
    own work is the same on all its paths and left out."""
    w, delay, nodes = network.compute, network.delay, range(len(network.compute))
    return [[(0.0 if i == j else (forward > 0) * delay[i][j] + (backward > 0) * delay[j][i])
             + ((forward + backward) * w[j] if network.stage_of.get(j) else 0.0) for j in nodes] for i in nodes]


@dataclass
class Plan:
    """paths: a tuple of ranks per microbatch of a round, the origins in turn. order: for each rank its (microbatch, hop) in order of
    dispatch; simulate(network, paths, rounds=rounds, order=order) takes `makespan` seconds. bound: no plan is faster, seconds. seconds,
    work: what planning took. result: the simulation. Unpacks: paths, order = plan(...)."""
    paths: list
    order: list = field(repr=False)
    makespan: float
    bound: float
    seconds: float
    work: int
    result: Result = field(repr=False)

    def __iter__(self):
        return iter((self.paths, self.order))


def plan(network, stages_kept, microbatches_per_origin=3, rounds=1, swaps=2, seconds=10.0, seed=0, *, iterations=None, dead=(), quota=None,
         collisions=True, progress=None):
    """Paths and dispatch order of one iteration that is as short as the search can make it. Returns a `Plan`.

    stages_kept: how many stages a path visits, the origin's included. Each living origin gets microbatches_per_origin paths, each planned
    on its own (the released search ties three together), and sends `rounds` microbatches down each. dead: nodes that are not there.
    quota: see `node_caps`. seconds: limit of the search; iterations: limit in paths planned and simulations run. The clock only decides
    where the one sequence of steps ends, so with seconds=None the plan depends on seed and iterations alone. collisions=False stops
    before TC2. progress(work, seconds, makespan, bound) is called now and then. Raises Infeasible where no valid plan exists; where one
    does, one is found.
    """
    if collisions and seconds is None and iterations is None:
        raise ValueError("plan needs an end: give seconds or iterations")
    search = Search(network, stages_kept, microbatches_per_origin, rounds, swaps, dead, quota, seed, seconds, iterations)
    search.bound = lower_bound(network, stages_kept, microbatches_per_origin, rounds, swaps, dead)
    if collisions:
        walk = search.farthest_first()      # first of all, since it cannot fail
        search.conflict_based_search(limit=500)
    else:
        search.conflict_based_search(limit=5000, collisions=False)
        if not search.best:
            search.farthest_first()
    while collisions and not search.over():
        if progress:
            progress(search.work, time.perf_counter() - search.start, search.best.makespan, search.bound)
        for paths in (search.paths, walk):
            search.reorder(paths, steps=50)
        walk = search.large_neighbourhood_search(walk, steps=200)
    result = simulate(network, search.paths, rounds=rounds, order=search.best.order())
    return Plan(search.paths, result.order(), result.makespan, search.bound, time.perf_counter() - search.start, search.work, result)


class Search:
    """What the steps of the search share: the problem, its random numbers, the work done and the best plan so far."""

    def __init__(self, network, stages_kept, microbatches_per_origin, rounds=1, swaps=2, dead=(), quota=None, seed=0, seconds=None,
                 iterations=None):
        if min(stages_kept, microbatches_per_origin, rounds, swaps + 1) < 1 or stages_kept > len(network.stages):
            raise ValueError(f"stages_kept must be 1 to {len(network.stages)}, microbatches_per_origin and rounds 1 or more, swaps 0 or "
                             f"more; got {stages_kept}, {microbatches_per_origin}, {rounds} and {swaps}")
        self.network, self.kept, self.rounds, self.swaps, self.dead = network, stages_kept, rounds, swaps, frozenset(dead)
        self.random, self.work, self.iterations = random.Random(f"plan {seed}"), 0, math.inf if iterations is None else iterations
        self.start, self.seconds = time.perf_counter(), math.inf if seconds is None else seconds
        self.stages = [[r for r in stage if r not in self.dead] for stage in network.stages]
        self.origins = self.stages[0] * microbatches_per_origin
        self.hop, self.best, self.paths, self.bound = hop_costs(network), None, None, 0.0
        self.visits = self.fair_visits(quota)

    def fair_visits(self, quota):
        """CC3 as numbers, {stage: visits}, and TC1's caps. A valid plan exists exactly if these visits fit the nodes: deal the stages out
        in turn and let every path visit its own in ascending order."""
        living = [s for s in range(1, len(self.stages)) if self.stages[s]]
        if not self.stages[0] or not all(self.network.memory[o] for o in self.stages[0]):
            raise Infeasible("CC1 cannot be met: no node of stage 0 is alive, or one has no memory")
        if len(living) < self.kept - 1:
            raise Infeasible(f"CC3 cannot be met: a path visits {self.kept - 1} stages after its origin, living nodes have only {living}")
        low, extra = divmod(len(self.origins) * (self.kept - 1), max(1, len(living)))
        self.caps = node_caps(self.network, low + (extra > 0), self.dead, quota)
        fits = {s: sum(self.caps[r] for r in self.stages[s]) for s in living}
        self.low, self.spare = low, [s for s in living if fits[s] > low] if extra else []
        if len(self.spare) < extra or min(fits.values(), default=low) < low:
            s = min(fits, key=fits.get)
            raise Infeasible(f"TC1 cannot be met: CC3 asks for {low} to {low + (extra > 0)} visits to each stage, stage {s} "
                             f"(nodes {self.stages[s]}) has room for {fits[s]}")
        return {s: low + (s in self.spare[:extra]) for s in living}

    def over(self):
        return (self.work >= self.iterations or time.perf_counter() - self.start > self.seconds
                or self.best is not None and self.best.makespan <= self.bound + 1e-6)

    def simulate(self, paths, order=None):
        """The simulated iteration, remembered if it is the best; None if it deadlocks, which counts as infinitely long."""
        self.work += 1
        try:
            result = simulate(self.network, paths, rounds=self.rounds, order=order)
        except Deadlock:
            return None
        if self.best is None or result.makespan < self.best.makespan - 1e-9:
            self.best, self.paths = result, paths
        return result

    def dispatch(self, paths):
        """First come, first served; where that runs out of memory and deadlocks, every rank's tasks in order of depth * microbatch + hop.
        The larger depth, the fewer microbatches are under way at once, in the end one, so this ends."""
        result, depth, count = self.simulate(paths), 1, len(paths)
        while result is None:
            depth, order = 2 * depth, [[] for _ in self.network.compute]
            for _, u, hop, rank in sorted((depth * u + hop, u, hop, rank) for u in range(self.rounds * count)
                                          for hop, rank in enumerate(chain(paths[u % count]))):
                order[rank].append((u, hop))
            result = self.simulate(paths, order)
        return result

    def conflict_based_search(self, limit, collisions=True):
        """The paper's method: every microbatch on its own shortest path, then one conflict after the other resolved by branching on who
        keeps off.

        A node of the tree holds the bans of each microbatch. Its conflict is the first of: an over-full stage (CC3), an over-full node
        (TC1), a time overlap (TC2); each child forbids one of the microbatches involved the stage or the node. Best first: the least
        excess, then the shortest iteration; for paths not valid yet the farthest microbatch's trip stands for it. Ends after `limit`
        children, or without TC2 at the first valid paths.
        """
        @cache
        def best_trip(origin, banned):
            stages = [[r for r in stage if r not in banned] for stage in self.stages]
            return shortest_path(self.hop, stages, origin, self.kept, self.swaps)

        def push(bans):
            trips = list(map(best_trip, self.origins, bans))
            if bans not in seen and all(trips):
                seen.add(bans)
                self.work += 1
                paths = [path for _, path in trips]
                conflicts = [*cc3(self.network, paths, self.dead), *tc1(self.network, paths, self.caps)]
                result = None if conflicts else self.dispatch(paths)
                # Of equal excess the deepest first: a full network shifts its last conflict about, and breadth would try all permutations.
                heapq.heappush(tree, (sum(v.excess for v in conflicts), -sum(map(len, bans)), result.makespan if result else max(trips)[0],
                                      sum(trip for trip, _ in trips), len(seen), bans, paths, result, conflicts))

        seen, tree, limit = set(), [], self.work + limit
        push((frozenset(),) * len(self.origins))
        while tree and self.work < limit and not self.over():
            *_, bans, paths, result, conflicts = heapq.heappop(tree)
            if result and not collisions:
                break
            conflicts = [v for v in tc2(self.network, paths, result) if v.bans] if result else conflicts
            for u, nodes in conflicts[0].bans if conflicts else ():
                push(bans[:u] + (bans[u] | frozenset(nodes),) + bans[u + 1:])

    def fill(self, paths, visits, hops=None, noise=0.0):
        """Plan the missing paths (None), so that each stage gets `visits` more. Never a dead end: a stage due for all that are left is a
        must.

        Farthest origin first, since its trip is the longest part of the iteration and the others have slack to give way. hops(): for each
        path anew, the costs of the hops; noise: how far the order of planning is shuffled.
        """
        paths, visits, room = list(paths), dict(visits), list(self.caps)
        for r in joined(*(path[1:] for path in paths if path)):
            room[r] -= 1
        todo = [(-self.trip[o] * (1 + noise * self.random.random()), u, o) for u, o in enumerate(self.origins) if not paths[u]]
        for left, (_, u, origin) in zip(range(len(todo), 0, -1), sorted(todo)):
            stages = [[r for r in stage if room[r] > 0] if visits.get(s) else [] for s, stage in enumerate(self.stages)]
            must = [s for s, due in visits.items() if due == left]
            paths[u] = shortest_path(hops() if hops else self.hop, stages, origin, self.kept, self.swaps, must)[1]
            self.work += 1
            for r in paths[u][1:]:
                room[r] -= 1
                visits[self.network.stage_of[r]] -= 1
        return paths

    def farthest_first(self):
        """All paths in one sweep: a valid plan in milliseconds, however large the network."""
        self.trip = {o: shortest_path(self.hop, self.stages, o, self.kept, self.swaps)[0] for o in self.stages[0]}
        paths = self.fill([None] * len(self.origins), self.visits)
        self.dispatch(paths)
        return paths

    def large_neighbourhood_search(self, paths, steps):
        """Take a few paths out, often the last to come home among them, and plan them anew on somewhat random costs; go on from there
        unless the iteration gets clearly longer. One step untangles what conflict-based search, one ban at a time, must branch over again
        and again. Returns the paths it ended on."""
        result, draw = self.dispatch(paths), self.random
        for _ in range(steps):
            if self.over():
                break
            out = set(draw.sample(range(len(paths)), min(len(paths), draw.choice((1, 2, 2, 3, 4)))))
            if draw.random() < 0.5:
                out.add(result.last() % len(paths))
            seen, gone = (Counter(self.network.stage_of[r] for u in some for r in paths[u]) for some in (range(len(paths)), out))
            visits = {s: gone[s] for s in self.visits}
            # CC3 leaves open which stages get one visit more.
            give = [s for s in visits if visits[s] and seen[s] > self.low]
            take = [s for s in self.spare if visits[s] < len(out) and seen[s] == self.low]
            if give and take and draw.random() < 0.5:
                visits[draw.choice(give)] -= 1
                visits[draw.choice(take)] += 1
            scale = 0.3 * draw.random() ** 4 * max(self.trip.values())
            hop = [[seconds + scale * draw.random() for seconds in row] for row in self.hop]
            candidate = self.fill([None if u in out else path for u, path in enumerate(paths)], visits, lambda: hop, 0.5)
            new = self.dispatch(candidate)
            if new.makespan <= result.makespan + 0.1 * draw.random() ** 4 * self.best.makespan:
                paths, result = candidate, new
        return paths

    def reorder(self, paths, steps):
        """Ordered dispatch: swap two neighbours in a node's order. Only swaps on the critical path can shorten the iteration, for
        whatever keeps to that chain of tasks, each starting when the one before lets it, is as long. First-come-first-served cannot let a
        node wait for a task that is about to arrive; this can."""
        result = self.best if paths == self.paths else self.dispatch(paths)
        for _ in range(steps):
            swaps = critical_swaps(paths, result)
            if self.over() or not swaps:
                break
            rank, i = self.random.choice(swaps)
            order = result.order()
            order[rank][i:i + 2] = reversed(order[rank][i:i + 2])
            new = self.simulate(paths, order)
            if new and new.makespan <= result.makespan + 0.1 * self.random.random() ** 2 * self.best.makespan:
                result = new


def critical_swaps(paths, result):
    """(rank, i): the tasks i and i + 1 of a rank's order that follow each other without a pause on the critical path, which is walked
    back from the last task: to the task that the node ran before if that kept it waiting, else to the hop before."""
    order, found = result.order(), []
    place = {task: (rank, i) for rank, tasks in enumerate(order) for i, task in enumerate(tasks)}
    waited = {(u, hop): start > came for (_, u, _, start, _), (hop, came) in zip(result.timeline, result.hops)}
    u, hop = result.last(), 2 * len(paths[result.last() % len(paths)])
    while u >= 0:
        rank, i = place[u, hop]
        if waited[u, hop] and i:
            if order[rank][i - 1][0] != u:
                found.append((rank, i - 1))
            u, hop = order[rank][i - 1]
        elif hop:
            hop -= 1
        else:       # an injection: it waited for the end of its path's round before, or it is the start
            u, hop = u - len(paths), 2 * len(paths[u % len(paths)])
    return found


# ---- how good can a plan be


def lower_bound(network, stages_kept, microbatches_per_origin=3, rounds=1, swaps=2, dead=(), work=1000):
    """Seconds below which no plan can come, whatever its paths and order: each step of the argument only drops rules.

    Take one origin alone. What remains of its microbatches is forward, loss and backward on the origin itself, with at least the shortest
    way out and the shortest way back between them (each the minimum over all paths that CC1 and CC2 allow). At most `lanes` of them are
    under way at once: as many as it has paths, or memory for. So they form `lanes` chains, each microbatch beginning after the one before
    it in its chain has ended, and the longest chain has at least q = ceil(microbatches / lanes). Either none has more: then at least
    microbatches - lanes (q - 1) chains have q; drop the rest, and `one_machine` bounds the time of these. Or one has q + 1 in a row,
    which cannot be where the chains are simply the paths, of `rounds` each.
    """
    search = Search(network, stages_kept, microbatches_per_origin, rounds, swaps, dead)
    w, pause, best = network.compute, network.overhead, 0.0
    for o in search.stages[0]:
        out, back = (shortest_path(hop_costs(network, *way), search.stages, o, stages_kept, swaps)[0] for way in ((1, 0), (0, 1.5)))
        # (seconds busy, seconds from a task's start to the next one's): forward, loss, backward
        tasks = [(w[o] + network.origin_overhead, w[o] + out), (w[o] / 4 + pause, w[o] / 4 + back), (1.5 * w[o] + pause,) * 2]
        total, lanes = microbatches_per_origin * rounds, min(microbatches_per_origin, network.memory[o])
        longest = -(-total // lanes)
        one_more = (longest + 1) * sum(wait for _, wait in tasks) if lanes < microbatches_per_origin else math.inf
        best = max(best, min(one_more, one_machine(tasks * longest, total - lanes * (longest - 1), work)) - pause)
    return best


def one_machine(tasks, jobs, work):
    """A lower bound, exact unless `work` runs out, of the time one machine needs for `jobs` equal chains of tasks. tasks: (seconds busy,
    seconds from its start until the chain's next task may start; for the last task: until the end).

    Best-first branch and bound over the machine's order; the least bound of the open nodes is a bound of the whole. Next comes any task
    that can start before another could be done: a later one could be moved behind that at no cost. A node's bound: each chain
    runs on undisturbed, and the machine does all that is left without a pause.
    """
    tail = [sum(wait for _, wait in tasks[i:]) for i in range(len(tasks) + 1)]
    rest = [sum(busy for busy, _ in tasks[i:]) for i in range(len(tasks) + 1)]

    def bound(state):
        machine = min(head for _, head in state) + sum(rest[done] for done, _ in state)
        return max(machine, *(head + tail[done] for done, head in state))

    state = ((0, 0.0),) * jobs          # per chain: tasks done, earliest start of the next; sorted, as the chains are equal
    tree, seen = [(bound(state), 0, state)], {state}
    while work and tree[0][2][0][0] < len(tasks):
        least, negative, state = heapq.heappop(tree)
        work -= 1
        first = min(head + tasks[done][0] for done, head in state if done < len(tasks))
        for j, (done, head) in enumerate(state):
            if done < len(tasks) and head <= first and state[j] not in state[:j]:
                free, next_ = head + tasks[done][0], (done + 1, head + tasks[done][1])
                others = [(d, max(h, free) if d < len(tasks) else h) for d, h in state[:j] + state[j + 1:]]
                child = tuple(sorted((*others, next_)))
                if child not in seen:
                    seen.add(child)
                    heapq.heappush(tree, (max(least, bound(child)), negative - 1, child))
    return tree[0][0]


# ---- the baselines, and nodes to stages


def random_valid_paths(network, stages_kept, microbatches_per_origin=3, swaps=2, seed=0, dead=(), quota=None):
    """DT-FM skip: paths drawn at random among those that keep to CC1, CC2, CC3 and TC1, with no eye on the links."""
    search = Search(network, stages_kept, microbatches_per_origin, 1, swaps, dead, quota, seed)
    nodes, draw = range(len(network.compute)), search.random.random
    search.trip = dict.fromkeys(search.stages[0], 1.0)
    return search.fill([None] * len(search.origins), search.visits, lambda: [[draw() for _ in nodes] for _ in nodes], noise=1.0)


def assign_stages(delay, compute, sizes, stages_kept, microbatches_per_origin=3, rounds=1, swaps=2, memory=3, overhead=0.0,
                  origin_overhead=None, seconds=10.0, seed=0, *, iterations=None, progress=None):
    """Which node serves which stage, from a flat list of nodes: stages as lists of nodes, sizes[s] of them in stage s.

    Local search over swaps of two nodes of different stages, starting from a random assignment (the paper takes DT-FM's genetic
    algorithm). The proxy it minimises is the simulated iteration of the farthest-first paths, which take milliseconds and come within a
    few percent of the plan's. seconds, iterations and seed as in `plan`, an iteration being one assignment tried. Raises ValueError if
    sizes do not fit.
    """
    if sum(sizes) != len(compute) or min(sizes) < 1:
        raise ValueError(f"stage sizes {sizes} must be positive and add up to the {len(compute)} nodes")
    draw, start, done = random.Random(f"stages {seed}"), time.perf_counter(), 0
    iterations, seconds = (math.inf if limit is None else limit for limit in (iterations, seconds))

    stage = [s for s, size in enumerate(sizes) for _ in range(size)]

    def score(nodes):
        rest = iter(nodes)
        stages = [sorted(islice(rest, size)) for size in sizes]
        network = Network(delay, compute, stages, memory, overhead, origin_overhead)
        search = Search(network, stages_kept, microbatches_per_origin, rounds, swaps)
        search.farthest_first()
        return search.best.makespan, stages

    nodes = draw.sample(range(len(compute)), len(compute))
    now = best = score(nodes)
    while len(nodes) > 1 and done < iterations and time.perf_counter() - start < seconds:
        i, j = draw.sample(range(len(nodes)), 2)
        other, done = list(nodes), done + 1
        other[i], other[j] = nodes[j], nodes[i]
        new = score(other) if stage[i] != stage[j] else (math.inf, None)
        if new[0] <= now[0] + 0.02 * best[0] * draw.random() ** 3:      # a little worse now and then, or it ends in the first dip
            nodes, now = other, new
        best = min(best, now)
        if progress:
            progress(done, time.perf_counter() - start, best[0])
    return best[1]


# ---- the published instance, and the command line

# The 12 cities of the released code (arXiv 2502.19913): latency in ms / bandwidth in 2^20 bits per second from each city to those after it.
CITIES = "Belgium Canada Germany Iowa Japan LA NL Oregon Singapore Taiwan London Australia".split()
LINKS = """
    41/163 4/1986.56 49/232 112/96 70/159 3/1986.56 66/171 83/132 105/102 3.5/1986.56 129/80.5
    44/261 14/620 74/148 35/250 42/205 30.5/386 107/97.8 89/120.5 38.5/298 98/108
    53.5/218 112/90.8 73/149.5 3.5/1986.56 68/122.2 80/102.4 102/103 6.6/1546.25 125.5/85.7
    72.5/114.5 23.4/503.5 51/224.5 19.3/740 101.5/103.5 88/104.86 48.1/179 84/92
    50/227.5 108.5/93.2 46.2/249.5 35.6/319.5 19.2/628.5 107/72.8 58/113
    71.5/116.75 12.4/971 79.5/138 64/132.65 68/122.2 69/120
    67/167 81.5/134 105.5/98 4.8/1986.56 128/78
    78.5/137.5 59.5/191 64/174 68/120
    23.2/507 85/128.5 48/244
    109.5/73.4 67/172
    132/77"""
MESSAGE = 4 * 1024 * 1024 * 8       # bytes: fp32, width 1024, 1024 tokens, 8 samples
STAGES = [[0, 3, 4, 10, 11], [15, 8, 14], [1, 9, 6], [16, 12, 13], [5, 18, 7], [17, 2, 19]]
PUBLISHED = {       # simulated seconds
    "full pipeline, as published": 79.94, "random valid paths (DT-FM skip)": 48.92, "SkipPipe without TC2": 35.43, "SkipPipe": 33.31}


def city_links(file=None):
    """{(a, b): (latency in seconds, bytes per second)} both ways, from the table above or a csv with the columns
    a,b,latency_ms,bandwidth_gib_s."""
    links = {}
    if file:
        with open(file, newline="") as lines:
            for row in csv.DictReader(lines):
                links[row["a"], row["b"]] = float(row["latency_ms"]) / 1000, float(row["bandwidth_gib_s"]) * 2**30
    else:
        for i, line in enumerate(LINKS.split("\n")[1:]):
            for city, link in zip(CITIES[i + 1:], line.split()):
                latency, speed = map(float, link.split("/"))
                links[CITIES[i], city] = latency / 1000, speed * 2**20 / 8
    return links | {(b, a): link for (a, b), link in links.items()}


def city_delays(names, links, message=MESSAGE):
    """delay[i][j] in seconds between nodes in these cities: latency + bytes / bandwidth + 0.35; within a city 1 ms and 2 GiB/s (the
    released figures)."""
    def delay(i, j):
        latency, speed = (0.001, 2 * 2**30) if names[i] == names[j] else links[names[i], names[j]]
        return 0.0 if i == j else latency + message / speed + 0.35
    return [[delay(i, j) for j in range(len(names))] for i in range(len(names))]


def published_network(corrected=False):
    """The published instance: (Network of 20 nodes, their cities). The released table has NL-London 1024 times too slow: so it is here,
    or corrected."""
    names, links = (CITIES * 2)[:20], city_links()
    for pair in (("NL", "London"), ("London", "NL")):
        links[pair] = (links[pair][0], links[pair][1] / (1 if corrected else 1024))
    return Network(city_delays(names, links), [0.44] * 20, STAGES, 3, 0.13, 0.09), names


def compare(network, kept, microbatches_per_origin=3, rounds=1, dead=(), seconds=10.0, progress=None):
    """The methods on equal work. Returns (rows, the SkipPipe Plan); a row: method, note, microbatches, seconds, planning (s), collisions,
    waiting (s) and, for the published instance, published (s). The full pipeline is DT-FM's and runs all stages; once with all origins
    and once with as many as have partners of their own. Random paths take the 132 s of the faulty link most of the time, so they get it
    corrected."""
    published = network == published_network()[0] and (kept, microbatches_per_origin, rounds, len(dead)) == (4, 3, 2, 0)
    alive = [[r for r in stage if r not in dead] for stage in network.stages]
    total, fewest, rows = len(alive[0]) * microbatches_per_origin * rounds, min(map(len, alive)), []

    def add(method, note, paths, rounds, result, planning=0.0):
        late = list(tc2(network, paths, result))
        rows.append(dict(method=method, note=note, microbatches=len(paths) * rounds, seconds=result.makespan, planning=planning,
                         collisions=len(late), waiting=sum(v.excess for v in late), published=PUBLISHED.get(method) if published else None))

    def full(method, origins, each, rounds):
        paths = full_paths([alive[0][:origins], *alive[1:]], each)
        add(method, f"{origins} origins x {each * rounds}", paths, rounds, simulate(network, paths, rounds=rounds))

    for origins in sorted({len(alive[0]), fewest}, reverse=True):
        if fewest and total % origins == 0:
            full("full pipeline (DT-FM)", origins, total // origins, 1)
    if published:
        full("full pipeline, as published", 3, 3, 3)
    draws = [random_valid_paths(network, kept, microbatches_per_origin, seed=seed, dead=dead) for seed in range(25)]
    search = Search(published_network(corrected=True)[0] if published else network, kept, microbatches_per_origin, rounds, dead=dead)
    median = sorted(draws, key=lambda paths: search.dispatch(paths).makespan)[12]
    add("random valid paths (DT-FM skip)", "median of 25 draws", median, rounds, search.dispatch(median))
    for method, options in (("SkipPipe without TC2", dict(collisions=False)), ("SkipPipe", dict(progress=progress))):
        found = plan(network, kept, microbatches_per_origin, rounds, seconds=seconds, dead=dead, **options)
        add(method, "", found.paths, rounds, found.result, found.seconds)
    return rows, found


def print_table(rows, bound):
    print(f"{'method':33}{'microbatches':25}{'iteration':>9}{'gap':>8}{'planning':>11}{'collisions':>12}{'waiting':>10}{'published':>12}")
    for r in rows:
        gap = "" if "full" in r["method"] else f"{max(0.0, r['seconds'] / bound - 1):.1%}"    # the bound is for paths that skip
        published = f"{r['published']:.2f} s" if r["published"] else ""
        print(f"{r['method']:33}{r['microbatches']:<4}{r['note']:21}{r['seconds']:7.3f} s{gap:>8}{r['planning']:9.2f} s"
              f"{r['collisions']:12}{r['waiting']:8.1f} s{published:>12}")


def draw(file, network, names, rows, found):
    """The picture: the methods as bars, and the plan as a Gantt chart. Raises ValueError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("the figure needs matplotlib: install the extra `plot`, or give --figure ''")
    figure = Figure(figsize=(17, 7.5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1, 3.2])
    bars = left.barh([f"{r['method']}\n{r['note']}" for r in rows], [r["seconds"] for r in rows], color="#BBBBBB")
    bars[-1].set_color("#0072B2")
    left.bar_label(bars, fmt=" %.1f s")
    left.axvline(found.bound, color="black", linestyle=":")
    left.set(xlabel=f"simulated iteration in seconds (dotted: bound, {found.bound:.2f})", xlim=(0, 1.35 * max(r["seconds"] for r in rows)))
    left.invert_yaxis()
    place = {r: i + s for i, (s, r) in enumerate((s, r) for s, stage in enumerate(network.stages) for r in stage)}
    # One hue per origin (Okabe and Ito's, which the colour-blind tell apart), one shade and number per microbatch.
    hues = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999"]
    last = max(task[1] for task in found.result.timeline)
    for (rank, u, what, start, end), (_, came) in zip(found.result.timeline, found.result.hops):
        y, origin = place[rank], found.paths[u % len(found.paths)][0]
        hue = hues[network.stages[0].index(origin) % len(hues)]
        color = "black" if what == LOSS else (hue, 1 - 0.7 * u / max(1, last))
        right.hlines(y + 0.45, came, start, color=hue, linewidth=2)
        right.barh(y, end - start, left=start, height=0.76, color=color, edgecolor="black", hatch="////" if what == BACKWARD else None)
        if what == FORWARD:
            right.text((start + end) / 2, y, u, ha="center", va="center", fontsize=6)
    right.set_yticks(list(place.values()), [f"stage {network.stage_of[r]}: {names[r] if names else 'node'} {r}" for r in place])
    right.invert_yaxis()
    right.set(xlabel="simulated seconds; numbered: forward, black: loss, hatched: backward, line below: the task waits for its node",
              title=f"SkipPipe's plan: {rows[-1]['microbatches']} microbatches in {found.makespan:.2f} s")
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)


def read_network(o, progress):
    """The Network that the options ask for, and the names of its nodes."""
    given = {name: value for name, value in (("compute", o.compute), ("memory", o.memory)) if value is not None}
    for name in ("instance", "links"):
        if getattr(o, name) and not Path(getattr(o, name)).is_file():
            raise ValueError(f"--{name} {getattr(o, name)}: no such file")
    if o.instance:
        data = json.loads(Path(o.instance).read_text())
        if not isinstance(data, dict) or not {"delay", "compute", "stages"} <= set(data):
            raise ValueError(f"{o.instance} must hold an object with delay, compute and stages")
        names = data.pop("names", None)
        network = Network(**data | given)
    elif o.links or o.nodes or o.sizes:
        links, sizes = city_links(o.links), o.sizes or [5, 3, 3, 3, 3, 3]
        if not links:
            raise ValueError(f"{o.links} holds no links")
        cities, count = list(dict.fromkeys(a for a, _ in links)), o.nodes or sum(sizes)
        names = [cities[i % len(cities)] for i in range(count)]
        times = dict(memory=3, overhead=0.13, origin_overhead=0.09)
        delay, compute = city_delays(names, links), [0.44 if o.compute is None else o.compute] * count
        stages = assign_stages(delay, compute, sizes, o.kept, o.microbatches, o.rounds, **times, seconds=o.seconds, progress=progress)
        network = Network(delay, compute, stages, **times | given)
    else:
        network, names = published_network()
        network = replace(network, **given)
    return network, names and per_node(names, len(network.delay), "names")


def save(file, data):
    if file:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text(json.dumps(data) + "\n")


def main(argv=None):
    numbers = lambda text: [int(x) for x in text.split(",") if x]
    parser = argparse.ArgumentParser(description="Plan SkipPipe's paths and draw them; without options for the published instance.",
                                     allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.error = lambda message: parser.exit(2, "error: " + " ".join(str(message).split()) + "\n")
    for name, kind_, default, text in (
            ("instance", str, None, "JSON file: delay (s), compute (s), stages; may have memory, overhead, origin_overhead (s), names"),
            ("links", str, None, "csv file a,b,latency_ms,bandwidth_gib_s with every pair of cities, in place of the built-in twelve"),
            ("nodes", int, None, "nodes, spread over the cities in turn and assigned to stages by search"),
            ("sizes", numbers, None, "nodes in each stage, e.g. 7,5,5,5,5,5,5,5, assigned to stages by search"),
            ("compute", float, None, "seconds of one forward on a node"),
            ("memory", int, None, "microbatches that a node holds at once"),
            ("kept", int, 4, "stages that a microbatch visits, the first included"),
            ("microbatches", int, 3, "paths per origin"),
            ("rounds", int, 2, "microbatches per path, one after the other"),
            ("dead", numbers, [], "nodes that are not there, e.g. 5,17"),
            ("seconds", float, 10.0, "limit of the planning, and of the assignment"),
            ("figure", str, None, "the picture; '' for none (default: figures/skippipe.png, other networks: runs/skippipe.png)"),
            ("results", str, None, "the numbers behind table and picture; '' for none (default: results/skippipe.json or runs/skippipe.json)"),
            ("save", str, None, "write the network to this file, in the form of --instance")):
        parser.add_argument("--" + name, type=kind_, default=default, help=text)
    o = parser.parse_args(argv)

    def progress(work, seconds, makespan, bound=0.0):
        if sys.stderr.isatty():
            gap = f", at most {makespan / bound - 1:.1%} above the best" if bound else ""
            print(f"\r{seconds:6.1f} s: {work} tried, iteration {makespan:.3f} s{gap} ", end="", file=sys.stderr)

    try:
        network, names = read_network(o, progress)
        if not set(o.dead) <= set(network.stage_of) or o.seconds < 0:
            raise ValueError("--dead takes nodes of the network, --seconds a time from 0")
        rows, found = compare(network, o.kept, o.microbatches, o.rounds, o.dead, o.seconds, progress)
        print(f"\n{len(network.delay)} nodes in stages of {[len(stage) for stage in network.stages]}; {o.kept} stages kept; lower bound "
              f"{found.bound:.3f} s. Simulated:\n")
        print_table(rows, found.bound)
        own = network != published_network()[0]        # the README's figure is not overwritten by another network
        o.figure = ("runs" if own else "figures") + "/skippipe.png" if o.figure is None else o.figure
        o.results = ("runs" if own else "results") + "/skippipe.json" if o.results is None else o.results
        if o.figure:
            draw(o.figure, network, names, rows, found)
        save(o.results, dict(about="simulated by python skippipe.py", bound=found.bound, methods=rows, stages=network.stages, names=names,
                             rounds=o.rounds, paths=found.paths, order=found.order))
        save(o.save, dict(asdict(network), names=names))
    except (ValueError, Deadlock, OSError, KeyError, TypeError, IndexError, AttributeError) as error:
        parser.error(error if type(error) in (ValueError, Infeasible, Deadlock) else f"{type(error).__name__} {error}")


if __name__ == "__main__":
    main()
