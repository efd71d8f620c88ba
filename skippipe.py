"""SkipPipe: pipelines whose microbatches take their own paths (arXiv 2502.19913).

A path is the tuple of ranks that a microbatch visits, (origin, r1, ..., rm). The origin is a rank
of stage 0: it holds the embedding, its own layers, the final norm, the head and the loss. So every
path ends by going home, and backward retraces it. A microbatch is 2m + 3 tasks, one a hop:

    hop     0  ...  m       m + 1     m + 2  ...  2m + 2
    task    forward         loss      backward
    rank    path[0..m]      origin    path[m..0]                                              (S1)
    work    1               1/4       1.5                                                     (S2)

The time model is that of the released scheduler. Node i begins a task at `start`. The next task of
the chain is due on node j:

    end     = start + work * w[i]          w[i]: the seconds of a forward on node i           (S3)
    arrival = end + delay[i][j]            links do not contend, sending occupies no node     (S4)
    usable  = end + overhead               when node i may begin its next task                (S5)

(After hop 0 it is `origin_overhead`.) A node runs one task at a time and holds at most `memory`
microbatches: a forward takes a slot, the same microbatch's backward frees it.

    python skippipe.py                      # plans six nodes
    python skippipe.py mine.json --kept 4   # your own delay, compute and stages, as in `Network`
"""
import argparse
import heapq
import json
import math
import random
import time
from collections import Counter, deque, namedtuple
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import chain as joined
from pathlib import Path

WORK = {"forward": 1.0, "loss": 0.25, "backward": 1.5}      # S2
TAKES = {"forward": 1, "loss": 0, "backward": -1}           # slots, from the task's start on
FORWARD, LOSS, BACKWARD = WORK


# ---- paths

def chain(path):
    """S1: the rank of every hop."""
    return (*path, path[0], *reversed(path))


def kind(path, hop):
    """The kind of a hop's task: FORWARD, LOSS or BACKWARD."""
    if hop < len(path):
        return FORWARD
    return LOSS if hop == len(path) else BACKWARD


def full_paths(stages, microbatches):
    """Paths through every stage: replica i's microbatches go straight through the i-th ranks. Where
    stages are unequal, each stage's ranks are dealt out in turn, so that their shares differ by at
    most one. Returns `microbatches` paths for each origin, the origins in turn."""
    return deal(stages, microbatches, lambda boundary, ranks: ranks)


def random_paths(stages, microbatches, step, seed):
    """NoLoCo's random routing (arXiv 2506.10911): a fresh permutation at every stage boundary. Each
    deck of microbatches has its own; the released code draws one for each sequence. Every rank
    draws the same ones from (seed, step, boundary), so ranks agree without a message. Shares and
    order are those of `full_paths`."""
    draws = [random.Random(f"routes {seed} {step} {after}") for after in range(len(stages) - 1)]
    shuffle = lambda boundary, ranks: draws[boundary].sample(ranks, len(ranks))
    return deal(stages, microbatches, shuffle)


def deal(stages, microbatches, shuffle):
    """Deal each stage's ranks to the microbatches, one deck after the other. shuffle(boundary,
    ranks): the next deck of the ranks after this boundary."""
    columns = [list(stages[0]) * microbatches]
    for boundary, ranks in enumerate(stages[1:]):
        column = []
        while len(column) < len(columns[0]):
            column += shuffle(boundary, ranks)
        columns.append(column)
    return list(zip(*columns))      # zip ends with the origins; a last deck may hold more cards


# ---- the order of tasks where nothing is planned

def tasks(chains, rank):
    """This rank's tasks (microbatch, hop) in the order in which it runs them.

    Sorted by (microbatch + hop, microbatch, origin), the microbatch counted within its origin.
    Every chain ascends in this key. So the smallest unfinished task of all ranks can always run,
    and nothing deadlocks, whatever the paths; and any two ranks send and receive in the same order.
    """
    seen = Counter()        # microbatches of each origin
    mine = []               # (the key, then the task)
    for u, ranks in enumerate(chains):
        origin = ranks[0]
        m = seen[origin]
        seen[origin] += 1
        mine += [(m + hop, m, origin, u, hop) for hop, r in enumerate(ranks) if r == rank]
    return [(u, hop) for *_, u, hop in sorted(mine)]


def incoming(chains, rank, mine, order=None):
    """(source, microbatch, hop) of this rank's messages, in the order in which it posts receives.

    The sources come in the order of its own tasks. Messages of one source come in the order in
    which that one sends them, since NCCL matches so; under a planned order these two can differ.
    """
    sent = []               # by each rank to this one, in its own order
    for work in order or []:
        sent.append(deque((u, hop + 1) for u, hop in work if next_rank(chains[u], hop) == rank))
    receives = []
    for u, hop in mine:
        source = chains[u][hop - 1]                 # at hop 0 without meaning
        if hop and source != rank:
            place = sent[source].popleft() if order else (u, hop)
            receives.append((source, *place))
    return receives


def next_rank(ranks, hop):
    """Where a chain goes on after this hop; None at its end."""
    return ranks[hop + 1] if hop + 1 < len(ranks) else None


# ---- the network

@dataclass
class Network:
    """The nodes and links that a plan is made for.

    delay[i][j]: seconds from the end of a task on i to the arrival of its message on j; delay[i][i]
    counts for nothing. compute[i]: seconds of one forward on i (w). stages: the ranks of each
    stage, stages[0] the origins; a node of no stage is idle. memory: microbatches that a node holds
    at once. compute and memory are one number or one per node. overhead, origin_overhead: seconds
    (S5). Sets stage_of: rank -> stage."""
    delay: list
    compute: list
    stages: list
    memory: int = 3
    overhead: float = 0.0
    origin_overhead: float = None

    def __post_init__(self):
        nodes = len(self.delay)
        self.delay = [list(map(float, row)) for row in self.delay]      # also of arrays
        self.compute = list(map(float, per_node(self.compute, nodes, "compute")))
        self.stages = [list(map(int, stage)) for stage in self.stages]
        self.memory = per_node(self.memory, nodes, "memory")
        if self.origin_overhead is None:
            self.origin_overhead = self.overhead
        seconds = [self.overhead, self.origin_overhead, *self.compute, *joined(*self.delay)]
        ranks = [*joined(*self.stages)]
        need(all(len(row) == nodes for row in self.delay),
             f"delay must have as many columns as rows, {nodes}")
        need(all(0 <= x <= 1e9 for x in seconds),
             "delays, compute times and overheads must be seconds from 0 to 1e9")
        need(all(isinstance(m, int) and m >= 0 for m in self.memory),
             f"memory must be whole numbers of microbatches, got {self.memory}")
        need(ranks and all(self.stages) and sorted({*ranks} & {*range(nodes)}) == sorted(ranks),
             f"stages must be non-empty lists of different nodes below {nodes}, got {self.stages}")
        self.stage_of = {r: s for s, stage in enumerate(self.stages) for r in stage}


def per_node(value, nodes, name):
    """A list of one value per node, where these or one for all are given."""
    if not hasattr(value, "__len__"):
        return [value] * nodes
    need(len(value) == nodes, f"{name} has {len(value)} values, delay {nodes} rows: one per node")
    return list(value)


def need(true, message):
    if not true:
        raise ValueError(message)


def read_network(file, stages):
    """The Network of a JSON file with its fields, numbered as these stages. Without a file a
    message takes as long as a forward. Raises ValueError."""
    if not file:
        ranks = sum(map(len, stages))
        return Network([[1.0] * ranks] * ranks, 1.0, stages)
    try:
        told = json.loads(Path(file).read_text())
        told.pop("names", None)
        need(told.pop("stages", stages) == stages, f"it is not of the stages {stages}")
        return Network(stages=stages, **told)
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{file}: {error}")


# ---- the skip schedule: which stages are left out, and how often

class Infeasible(ValueError):
    """No valid plan exists; the message names the constraint that cannot be met."""


@dataclass
class Schedule:
    """kept: stages that a path visits, the first one included. origins: the origin of each path.
    visits: {stage: how many paths visit it}; all the others skip it. spare: the stages that can
    take one visit more, where not all can have equally many. caps: of each node, the most paths
    through it. stages: the living nodes of each stage. dead: nodes that are not there."""
    network: Network
    kept: int
    origins: list
    visits: dict
    spare: list
    caps: list
    stages: list
    dead: frozenset


def stages_to_keep(skip, stages):
    """How many stages a path visits where it skips this share of them: 4 of 6 for a third."""
    return round((1 - skip) * len(stages))


def rounds_of(microbatches, memory):
    """The fewest rounds of equally many microbatches that fit into a node's memory; else 1."""
    for rounds in range(1, microbatches):
        if microbatches % rounds == 0 and microbatches // rounds <= memory:
            return rounds
    return 1


def skip_schedule(network, stages_kept, microbatches_per_origin=3, dead=()):
    """Which stages may be left out, and how often: a `Schedule`. Raises Infeasible.

    A path visits stages_kept of the stages and skips the rest. The first is never skipped (CC1).
    The P paths visit each of the S others equally often (CC3): P * (stages_kept - 1) / S times,
    some once more where that is no whole number. A stage's nodes share its visits (TC1,
    `node_caps`). A valid plan exists exactly if the visits fit the nodes: then deal the stages out
    in turn, each path visiting its own in order."""
    most = len(network.stages)
    need(1 <= stages_kept <= most and microbatches_per_origin >= 1,
         f"stages_kept must be 1 to {most}, microbatches_per_origin 1 or more; "
         f"got {stages_kept} and {microbatches_per_origin}")
    stages = without(dead, network.stages)
    if not stages[0]:
        raise Infeasible("CC1 cannot be met: no node of stage 0 is alive")
    if not all(network.memory[origin] for origin in stages[0]):
        raise Infeasible("CC1 cannot be met: a node of stage 0 has memory 0")
    living = [s for s in range(1, most) if stages[s]]
    if len(living) < stages_kept - 1:
        raise Infeasible(f"CC3 cannot be met: a path visits {stages_kept - 1} stages after its "
                         f"origin, living nodes have only {living}")
    origins = stages[0] * microbatches_per_origin
    low, extra = divmod(len(origins) * (stages_kept - 1), max(1, len(living)))
    high = low + 1 if extra else low
    caps = node_caps(network, high, dead)
    fits = {}
    for s in living:
        fits[s] = sum(caps[r] for r in stages[s])
    spare = [s for s in living if extra and fits[s] > low]
    if len(spare) < extra or any(room < low for room in fits.values()):
        s = min(fits, key=fits.get)
        raise Infeasible(f"TC1 cannot be met: CC3 asks for {low} to {high} visits to each stage, "
                         f"stage {s} (nodes {stages[s]}) has room for {fits[s]}")
    visits = dict.fromkeys(living, low)
    for s in spare[:extra]:
        visits[s] += 1
    return Schedule(network, stages_kept, origins, visits, spare, caps, stages, frozenset(dead))


def node_caps(network, share, dead=()):
    """For each node the most paths through it, when each stage has `share` visits. With at most
    `memory` paths, the published search's rule, a node never waits for memory, since a path has one
    microbatch under way at a time. A larger part of the visits, by memory / compute, sees that a
    plan exists; `simulate` then sees to what is held at once."""
    caps = [0] * len(network.compute)
    for stage in network.stages[1:]:
        power = {r: network.memory[r] / max(network.compute[r], 1e-9)
                 for r in stage if r not in dead and network.memory[r]}
        whole = sum(power.values())
        for r in power:
            caps[r] = max(network.memory[r], math.ceil(share * power[r] / whole - 1e-9))
    return caps


def without(nodes, lists):
    """The lists (stages, paths) without these nodes."""
    left = []
    for each in lists:
        left.append([r for r in each if r not in nodes])
    return left


# ---- the simulator

class Deadlock(RuntimeError):
    """No task can start although some are left: the order or the memory is impossible."""


# one simulated task; arrived, start, end: seconds since the iteration began
Task = namedtuple("Task", "rank microbatch hop kind arrived start end")


@dataclass
class Result:
    """makespan: seconds until the last microbatch is back home. timeline: the Tasks in order of
    start. order: for each rank the (microbatch, hop) that it ran, in order; `simulate` takes it."""
    makespan: float
    timeline: list = field(repr=False)
    order: list = field(repr=False)


ARRIVES, USABLE = 0, 1      # in this order at one moment


def simulate(network, paths, rounds=1, order=None):
    """Run one iteration by S1 to S5 and return a `Result`. Seconds.

    rounds: microbatches per path. A path's next one, numbered len(paths) higher, starts when the
    one before is home and the origin usable. order: each rank's (microbatch, hop), in the order to
    keep. Without it a node runs what arrived first, hop 0 last, of equal arrivals the lowest
    microbatch. What arrives at the moment its node becomes usable is already waiting. Raises
    Deadlock where tasks can never start."""
    count, slots = len(paths), list(network.memory)
    chains = [chain(path) for path in paths]
    priority = places_in(order) if order else new_ones_last
    forwards = [[] for _ in slots]      # at each node the forwards that wait, a heap
    others = [[] for _ in slots]        # the losses and backwards, which need no slot, a heap
    timeline, ran = [], [[] for _ in slots]
    idle = [True] * len(slots)
    events = [(0.0, ARRIVES, u, 0, path[0]) for u, path in enumerate(paths)]    # a heap, too
    while events:
        now, event, u, hop, node = heapq.heappop(events)
        if event == USABLE:
            idle[node] = True
        else:
            what = kind(paths[u % count], hop)
            waiting = forwards[node] if what == FORWARD else others[node]
            heapq.heappush(waiting, (priority(node, u, hop), now, u, hop, what))
        if not idle[node]:
            continue
        heap = others[node]
        if slots[node] and forwards[node] and (not heap or forwards[node][0] < heap[0]):
            heap = forwards[node]
        if not heap or order and heap[0][0] != len(ran[node]):      # keep to the order: wait
            continue
        _, came, u, hop, what = heapq.heappop(heap)
        idle[node] = False
        ran[node].append((u, hop))
        slots[node] -= TAKES[what]
        end = now + WORK[what] * network.compute[node]                              # S3
        timeline.append(Task(node, u, hop, what, came, now, end))
        usable = end + (network.overhead if hop else network.origin_overhead)       # S5
        heapq.heappush(events, (usable, USABLE, u, hop, node))
        if hop + 1 < len(chains[u % count]):
            to = chains[u % count][hop + 1]
            arrival = end + (network.delay[node][to] if to != node else 0.0)        # S4
            heapq.heappush(events, (arrival, ARRIVES, u, hop + 1, to))
        elif u + count < rounds * count:
            heapq.heappush(events, (usable, ARRIVES, u + count, 0, node))
    left = rounds * sum(map(len, chains)) - len(timeline)
    if left > 0:
        raise Deadlock(f"{left} tasks can never start: the order or the nodes' memory forbids it")
    return Result(max(task.end for task in timeline), timeline, ran)


def new_ones_last(node, u, hop):
    """A task's priority without an order: 0, but 1 for a new microbatch. Equals go as they came."""
    return int(hop == 0)


def places_in(order):
    """priority(node, u, hop) where an order is given: the task's place in its node's order."""
    places = []
    for tasks in order:
        places.append({tuple(task): place for place, task in enumerate(tasks)})
    return lambda node, u, hop: places[node].get((u, hop), math.inf)


# ---- the constraints: each function yields Violations

# text: what is wrong. bans: the ways out that the search tries, a (microbatch, nodes) pair each:
# this microbatch keeps off these nodes. excess: visits or seconds of waiting too many
Violation = namedtuple("Violation", "text bans excess", defaults=((), 1))


def cc1(network, paths):
    """CC1: the first stage is never skipped. A path starts at a node of stage 0 and does not come
    back there before its loss."""
    for u, path in enumerate(paths):
        for i, r in enumerate(path):
            if (i == 0) != (network.stage_of[r] == 0):
                yield Violation(f"CC1: microbatch {u} has node {r} of stage {network.stage_of[r]} "
                                f"in place {i} of its path {path}")


def cc2(network, paths, swaps=2):
    """CC2: at most two consecutive stages are swapped: stage s+1 may come right before stage s, at
    most `swaps` times in a path, and each stage in at most one swap. The rest is in order and no
    stage comes twice."""
    for u, path in enumerate(paths):
        stages = [network.stage_of[r] for r in path]
        swapped = 0
        for i in range(1, len(path)):
            before, now = stages[i - 1], stages[i]
            if now == before - 1:
                swapped += 1
            twice = now in stages[:i]
            too_many_swaps = now < before and swapped > swaps
            not_neighbours = now < max([before - 1, *stages[:i - 1]])   # or a stage in two swaps
            if twice or too_many_swaps or not_neighbours:
                yield Violation(
                    f"CC2: microbatch {u} goes from stage {before} (node {path[i - 1]}) to stage "
                    f"{now} (node {path[i]}): not in order, even with {swaps} swaps of neighbours")


def visitors_of(paths, place):
    """{place(r): the microbatches that come through there after their origin}"""
    found = {}
    for u, path in enumerate(paths):
        for r in path[1:]:
            found.setdefault(place(r), []).append(u)
    return found


def cc3(network, paths, dead=()):
    """CC3: stages are skipped equally often, as far as the numbers allow: visits to any two living
    stages differ by at most one. In any valid plan one of the bans holds, or more: an under-full
    stage gains only where a microbatch leaves a fuller one."""
    living = [s for s, nodes in enumerate(network.stages) if s and not set(nodes) <= set(dead)]
    visitors = {s: [] for s in living} | visitors_of(paths, network.stage_of.get)
    visits, count = sum(map(len, visitors.values())), max(1, len(visitors))
    low, high = visits // count, -(-visits // count)
    crowded = {s: users for s, users in visitors.items() if len(users) > low}
    leavers = [(u, network.stages[s]) for s, users in crowded.items() for u in users]
    for s, users in sorted(visitors.items(), key=lambda item: -len(item[1])):   # over-full first
        excess = max(len(users) - high, low - len(users))
        if excess > 0:
            bans = [(u, network.stages[s]) for u in users] if s in crowded else leavers
            text = (f"CC3: stage {s} (nodes {network.stages[s]}) is visited by {len(users)} "
                    f"microbatches, {users}; {low} to {high} are due")
            yield Violation(text, bans, excess)


def tc1(network, paths, caps):
    """TC1: a node holds at most `memory` microbatches at once. `simulate` sees to that; here at
    most caps[r] paths run through node r (`node_caps`). In any valid plan one of the bans holds, or
    more. Origins are left out: they carry their own microbatches, however many."""
    for r, users in sorted(visitors_of(paths, lambda r: r).items()):
        if len(users) > caps[r]:
            text = (f"TC1: node {r} (stage {network.stage_of[r]}) carries {len(users)} "
                    f"microbatches, {users}, of at most {caps[r]}")
            yield Violation(text, [(u, [r]) for u in users], len(users) - caps[r])


def tc2(network, paths, result):
    """TC2: no two microbatches want the same node at the same time. A soft constraint: `check`
    leaves it out. A Violation for every task that waited at a node, the longest wait first; without
    bans at an origin, which no microbatch can leave out."""
    before, found = {}, []      # before: the microbatch that each node ran last
    for task in result.timeline:
        wait = task.start - task.arrived        # seconds
        if wait > 1e-9 and task.rank in before:
            found.append((wait, task.rank, task.microbatch, before[task.rank]))
        before[task.rank] = task.microbatch
    for wait, rank, u, v in sorted(found, key=lambda waited: (-waited[0], waited[1:])):
        users = sorted({u % len(paths), v % len(paths)}) if network.stage_of.get(rank) else []
        text = f"TC2: microbatch {u} waits {wait:.2f} s at node {rank} for {v}"
        yield Violation(text, [(user, [rank]) for user in users], wait)


def check(network, paths, stages_kept=None, swaps=2, dead=()):
    """Every violation of CC1, CC2, CC3 and TC1 as a list of sentences that name microbatch, stage
    and node; empty for valid paths. The list also names paths of another length than stages_kept
    (default: the first path's) and nodes that are dead or in no stage."""
    kept = stages_kept or len(paths[0])
    strangers = set(joined(*paths)) - set(network.stage_of)
    found = [f"microbatch {u} visits {len(path)} stages, not {kept}: {path}"
             for u, path in enumerate(paths) if len(path) != kept]
    missing = "microbatch {} visits node {} of stage {}, which is not there"
    found += [missing.format(u, r, network.stage_of.get(r))
              for u, path in enumerate(paths) for r in path if r in dead or r in strangers]
    known = without(strangers, paths)
    living = [stage for stage in without(dead, network.stages[1:]) if stage]
    caps = node_caps(network, -(-len(paths) * (kept - 1) // max(1, len(living))), dead)
    violations = joined(cc1(network, known), cc2(network, known, swaps), cc3(network, known, dead),
                        tc1(network, known, caps))
    return found + [v.text for v in violations]


# ---- the shortest path of one microbatch

def shortest_path(cost, stages, origin, kept, swaps, must=()):
    """The cheapest path of one microbatch through `kept` stages under CC1 and CC2: (seconds, path)
    or None. cost[i][j]: seconds from i to j and of the work on j; j = origin: of the way home.
    stages: the nodes of each stage that may be used. must: the stages that may not be skipped. A
    dynamic programme over the stages in order: skip stage s, visit it, or visit s+1 and then s.
    layers[s][visits, swaps][last node] = (seconds, path), everything below stage s being
    decided."""
    def visit(ends, nodes):
        """The best way from any of `ends` on to each of the nodes."""
        found = {}
        for n in nodes:
            seconds, path = min((done + cost[e][n], way) for e, (done, way) in ends.items())
            found[n] = seconds, path + (n,)
        return found

    def reach(s, state, ends):
        known = layers[s].setdefault(state, {})
        for n, label in ends.items():
            known[n] = min(label, known.get(n, label))

    count = len(stages)
    layers = [{} for _ in range(count + 1)]
    layers[1][0, 0] = {origin: (0.0, (origin,))}
    for s in range(1, count):
        here, after = stages[s], stages[s + 1] if s + 1 < count else []
        for (visits, swapped), ends in layers[s].items():
            if visits + count - s >= kept and s not in must:                # skip this stage
                reach(s + 1, (visits, swapped), ends)
            if visits + 1 < kept and here:                                  # visit it
                reach(s + 1, (visits + 1, swapped), visit(ends, here))
            if visits + 2 < kept and swapped < swaps and here and after:    # the next one first
                reach(s + 2, (visits + 2, swapped + 1), visit(visit(ends, after), here))
    found = [(seconds + cost[n][origin], path) for (visits, _), ends in layers[count].items()
             for n, (seconds, path) in ends.items() if visits == kept - 1]
    return min(found, default=None)


def hop_costs(network):
    """cost[i][j] for `shortest_path`, in seconds: the link there and back, and j's forward and
    backward. The origin's own work is the same on all its paths and left out."""
    def hop(i, j):
        links = network.delay[i][j] + network.delay[j][i] if i != j else 0.0
        work = network.compute[j] if network.stage_of.get(j) else 0.0
        return links + (WORK[FORWARD] + WORK[BACKWARD]) * work

    cost, nodes = [], range(len(network.compute))
    for i in nodes:
        cost.append([hop(i, j) for j in nodes])
    return cost


def path_finder(schedule, cost, swaps):
    """shortest(origin, banned, must): `shortest_path` off the banned nodes, each found once."""
    @cache
    def shortest(origin, banned=frozenset(), must=()):
        stages = without(banned, schedule.stages)
        return shortest_path(cost, stages, origin, schedule.kept, swaps, must)
    return shortest


# ---- the search

@dataclass
class Plan:
    """paths: a tuple of ranks per microbatch of a round, the origins in turn. order: for each rank
    its (microbatch, hop) in order of dispatch. makespan: seconds of simulate(network, paths,
    rounds, order). bound: no plan is faster, seconds. seconds, work: what the search took. result:
    the simulation. Unpacks: paths, order = plan(...)."""
    paths: list
    order: list = field(repr=False)
    makespan: float
    bound: float
    seconds: float
    work: int
    result: Result = field(repr=False)

    def __iter__(self):
        return iter((self.paths, self.order))


class Progress:
    """How far a search has come: its limits, the work done (paths planned and simulations run), and
    the best simulated iteration with its paths. bound: seconds of an iteration that will do."""

    def __init__(self, network, rounds=1, seconds=None, iterations=None):
        self.network, self.rounds = network, rounds
        self.bound = 0.0
        self.seconds = math.inf if seconds is None else seconds
        self.iterations = math.inf if iterations is None else iterations
        self.start, self.work = time.perf_counter(), 0
        self.best, self.paths = None, None

    def late(self):
        return time.perf_counter() - self.start > self.seconds

    def over(self):
        optimal = self.best is not None and self.best.makespan <= self.bound + 1e-6
        return optimal or self.work >= self.iterations or self.late()

    def simulate(self, paths, order=None):
        """The simulated iteration; None if it deadlocks. The best one is remembered."""
        self.work += 1
        try:
            result = simulate(self.network, paths, self.rounds, order)
        except Deadlock:
            return None
        if self.best is None or result.makespan < self.best.makespan - 1e-9:
            self.best, self.paths = result, paths
        return result

    def dispatch(self, paths):
        """Simulate first come, first served. Where that runs out of memory and deadlocks, every
        rank's tasks go in order of depth * microbatch + hop. The larger depth, the fewer
        microbatches are under way at once, in the end one, so this ends."""
        result, depth = self.simulate(paths), 1
        while result is None:
            depth *= 2
            order = [[] for _ in self.network.compute]
            for u in range(self.rounds * len(paths)):
                for hop, rank in enumerate(chain(paths[u % len(paths)])):
                    order[rank].append((u, hop))
            for tasks in order:
                tasks.sort(key=lambda task: (depth * task[0] + task[1], task))
            result = self.simulate(paths, order)
        return result

    def plan(self):
        spent = time.perf_counter() - self.start
        return Plan(self.paths, self.best.order, self.best.makespan, self.bound, spent, self.work,
                    self.best)


def farthest_first(schedule, shortest):
    """Valid paths in one sweep (ours). The origin with the longest trip goes first: its path is the
    longest part of the iteration, and the other paths have slack to give way."""
    trips = [shortest(origin)[0] for origin in schedule.origins]
    order = sorted(range(len(trips)), key=lambda u: -trips[u])
    return one_sweep(schedule, shortest, order)


def one_sweep(schedule, shortest, order):
    """The shortest path for each of the schedule's origins, planned in this order. Never a dead
    end: a node or stage that is full is closed, and a stage due for all that are left is a must."""
    stage_of, nodes = schedule.network.stage_of, [*joined(*schedule.stages[1:])]
    room, visits = list(schedule.caps), dict(schedule.visits)
    paths = [None] * len(order)
    for planned, u in enumerate(order):
        must = tuple([s for s, due in visits.items() if due == len(order) - planned])
        closed = frozenset([r for r in nodes if room[r] <= 0 or not visits.get(stage_of[r])])
        _, paths[u] = shortest(schedule.origins[u], closed, must)
        for r in paths[u][1:]:
            room[r] -= 1
            visits[stage_of[r]] -= 1
    return paths


# A branch of the search; the least comes first. excess: how far its paths are from valid. depth:
# minus the number of its bans. seconds: of the iteration; of the longest trip while paths are not
# valid. trips: the seconds of all. bans: for each microbatch the nodes that it keeps off. children:
# the bans of its first conflict, one of which each child adds
Branch = namedtuple("Branch", "excess depth seconds trips number bans children")


def conflict_based_search(schedule, shortest, progress, limit=math.inf):
    """The paper's method: every microbatch on its own shortest path, then one conflict after the
    other resolved by branching: which microbatch keeps off? Of equal excess the deepest branch
    comes first (ours; the paper's order is best first): a full network shifts its last conflict
    about, and breadth would try all permutations. Ends after `limit` paths and simulations."""
    limit += progress.work
    tree, seen = [], set()      # a heap of branches; the bans of all

    def grow(bans):
        trips = [shortest(o, banned) for o, banned in zip(schedule.origins, bans)]
        if bans not in seen and all(trips):
            seen.add(bans)
            heapq.heappush(tree, branch(schedule, progress, trips, bans, len(seen)))

    grow((frozenset(),) * len(schedule.origins))
    while tree and progress.work < limit and not progress.over():
        first = heapq.heappop(tree)
        for u, nodes in first.children:
            if progress.late():
                break
            banned = first.bans[u] | frozenset(nodes)
            grow((*first.bans[:u], banned, *first.bans[u + 1:]))


def branch(schedule, progress, trips, bans, number):
    """The Branch of these trips, (seconds, path) each. Its conflict is the first of: an over-full
    stage (CC3), an over-full node (TC1), a time overlap (TC2)."""
    progress.work += 1
    network, paths = schedule.network, [path for _, path in trips]
    conflicts = [*cc3(network, paths, schedule.dead), *tc1(network, paths, schedule.caps)]
    excess, (seconds, _) = sum([v.excess for v in conflicts]), max(trips)
    if not conflicts:
        result = progress.dispatch(paths)
        seconds = result.makespan
        conflicts = [v for v in tc2(network, paths, result) if v.bans]
    children = conflicts[0].bans if conflicts else []
    depth = -sum(map(len, bans))
    return Branch(excess, depth, seconds, sum([trip for trip, _ in trips]), number, bans, children)


# ---- the plan, and how good one can be

def plan(network, stages_kept, microbatches_per_origin=3, rounds=1, swaps=2, seconds=10.0, seed=0,
         *, iterations=None, dead=()):
    """Paths and dispatch order of one iteration, as short as the paper's search makes it: a `Plan`.

    stages_kept: how many stages a path visits, the origin's included. microbatches_per_origin:
    paths of each living origin, each planned on its own (the released search ties three together).
    rounds: microbatches that an origin sends down each path (2 in the published instance). dead:
    nodes that are not there; a dead origin takes its microbatches with it. seconds: limit of the
    search, the first plan excepted. iterations: limit in paths planned and simulations run. seed:
    of searches that draw; this one does not. Raises Infeasible exactly where no valid plan exists.
    `planning.search.shorter_plan` takes the same arguments and finds shorter iterations."""
    schedule = skip_schedule(network, stages_kept, microbatches_per_origin, dead)
    progress = Progress(network, rounds, seconds, iterations)
    shortest = path_finder(schedule, hop_costs(network), swaps)
    progress.bound = max(origin_bound(schedule, o, rounds, shortest) for o in schedule.stages[0])
    progress.dispatch(farthest_first(schedule, shortest))       # first of all, since it cannot fail
    progress.work += len(schedule.origins)
    conflict_based_search(schedule, shortest, progress)
    return progress.plan()


def plan_iteration(network, skip, microbatches, seed):
    """A training iteration's plan as JSON can hold it: dict(paths, order, makespan, network). A
    budget of work, not of time: it depends on the network and the seed alone."""
    rounds = rounds_of(microbatches, min(network.memory))
    kept = stages_to_keep(skip, network.stages)
    found = plan(network, kept, microbatches // rounds, rounds, seconds=None, iterations=3000,
                 seed=seed)
    return dict(paths=found.paths * rounds, order=found.order, makespan=found.makespan,
                network=asdict(network))


def lower_bound(network, stages_kept, microbatches_per_origin=3, rounds=1, swaps=2, dead=()):
    """Seconds below which no plan can come, whatever its paths and order."""
    schedule = skip_schedule(network, stages_kept, microbatches_per_origin, dead)
    shortest = path_finder(schedule, hop_costs(network), swaps)
    return max(origin_bound(schedule, o, rounds, shortest) for o in schedule.stages[0])


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


# ---- the command line

# Two islands of three nodes: links within one take 0.1 s, between the two 0.9 s.
SIX_NODES = dict(delay=[[0.1, 0.9] * 3, [0.9, 0.1] * 3] * 3, compute=0.2,
                 stages=[[0, 1], [2, 3], [4, 5]])


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", help="JSON of a Network's fields (default: six nodes)")
    parser.add_argument("--kept", type=int, help="stages a path visits (default: two thirds)")
    parser.add_argument("--microbatches", type=int, default=4, help="per origin (default: 4)")
    o = parser.parse_args(argv)
    try:
        fields = json.loads(Path(o.file).read_text()) if o.file else dict(SIX_NODES)
        fields.pop("names", None)
        network = Network(**fields)
        kept = o.kept or stages_to_keep(1 / 3, network.stages)
        found = plan(network, kept, o.microbatches, iterations=2000)
    except (OSError, TypeError, ValueError) as error:
        parser.exit(2, f"error: {error}\n")
    for path in found.paths:
        print(*path, sep=" > ")
    print(f"{found.makespan:.2f} s, at least {found.bound:.2f}")


if __name__ == "__main__":
    main()
