"""SkipPipe: pipelines whose microbatches take their own paths (arXiv 2502.19913).

A path is the tuple of ranks that a microbatch visits, (origin, r1, ..., rm). The origin is a rank
of stage 0: it holds the embedding, its own layers, the final norm, the head and the loss. So every
path ends at its origin, and backward retraces it. A microbatch is 2m + 3 tasks, one per hop:

    hop     0  ...  m       m + 1     m + 2  ...  2m + 2
    task    forward         loss      backward
    rank    path[0..m]      origin    path[m..0]                                              (S1)
    work    1               1/4       1.5                                                     (S2)

The time model is the released scheduler's. Node i begins a task at `start`. The next task of
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
from dataclasses import asdict, dataclass, field, replace
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
    """Paths through every stage that has ranks: replica i's microbatches go through the i-th ranks.
    If stages are unequal, each stage's ranks are dealt out in turn, so that their shares differ
    by at most one. Returns `microbatches` paths for each origin, the origins in turn."""
    return deal(stages, microbatches, lambda boundary, ranks: ranks)


def random_paths(stages, microbatches, step, seed):
    """NoLoCo's random routing (arXiv 2506.10911): a fresh permutation at every stage boundary, for
    each deck of microbatches; the released code draws one for each sequence. Every rank draws the
    same ones from (seed, step, boundary). Shares and order are those of `full_paths`."""
    draws = [random.Random(f"routes {seed} {step} {after}") for after in range(len(stages) - 1)]
    shuffle = lambda boundary, ranks: draws[boundary].sample(ranks, len(ranks))
    return deal(stages, microbatches, shuffle)


def deal(stages, microbatches, shuffle):
    """Deal each stage's ranks to the microbatches, in decks: shuffle(boundary, ranks) each."""
    columns = [list(stages[0]) * microbatches]
    for boundary, ranks in enumerate(stages[1:]):
        if not ranks:
            continue
        column = []
        while len(column) < len(columns[0]):
            column += shuffle(boundary, ranks)
        columns.append(column)
    return list(zip(*columns))      # zip ends with the origins; a last deck may hold more cards


def tasks(chains, rank):
    """This rank's tasks (microbatch, hop) in the order in which it runs them if none is planned:
    by (microbatch + hop, microbatch, origin), the microbatch counted within its origin. Every chain
    ascends in this key. So the smallest unfinished task of all ranks can always run, and nothing
    deadlocks, whatever the paths; and any two ranks send and receive in the same order."""
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
    which that one sends them, since NCCL matches so; under a planned order these two can differ."""
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
    """The rank of the hop after this one; None at the end of the chain."""
    return ranks[hop + 1] if hop + 1 < len(ranks) else None


# ---- the network

@dataclass
class Network:
    """The nodes and links that a plan is made for. delay[i][j]: seconds from the end of a task on i
    to the arrival of its message on j; delay[i][i] is not used. compute[i]: seconds of one
    forward on i (w). stages: the ranks of each stage, stages[0] the origins. A stage may be empty;
    a node of no stage, a dead one for example, is idle. memory: microbatches that a node holds at
    once. compute and memory are one number or one per node. overhead, origin_overhead: seconds
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
        need(all(len(row) == nodes for row in self.delay), f"delay must have {nodes} columns")
        need(all(0 <= x <= 1e9 for x in seconds), "all times must be seconds from 0 to 1e9")
        need(all(isinstance(m, int) and m >= 0 for m in self.memory), "memory: whole numbers only")
        need(self.stages and sorted({*ranks} & {*range(nodes)}) == sorted(ranks),
             f"stages must be lists of different nodes below {nodes}")
        self.stage_of = {r: s for s, stage in enumerate(self.stages) for r in stage}


def per_node(value, nodes, name):
    """A list of one value per node, where these or one for all are given."""
    if not hasattr(value, "__len__"):
        return [value] * nodes
    need(len(value) == nodes, f"{name} must have a value for each of {nodes} nodes")
    return list(value)


def need(true, message):
    if not true:
        raise ValueError(message)


def read_network(file, stages=None):
    """The Network of a JSON file with its fields (`names` are ignored). stages: those of a run,
    its ranks in order; rank r is the r-th node of the file's stages, where it has any. Without a
    file a message takes as long as a forward. Raises ValueError."""
    if not file:
        ranks = sum(map(len, stages))
        return Network([[1.0] * ranks] * ranks, 1.0, stages)
    try:
        told = dict(stages=stages) if stages else {}
        told.update(json.loads(Path(file).read_text()))
        told.pop("names", None)
        network = Network(**told)
    except (OSError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{file}: {error}")
    if stages is None:
        return network
    sizes, own = list(map(len, network.stages)), list(map(len, stages))
    need(sizes == own, f"{file} has stages of {sizes} nodes, this run of {own}")
    nodes = [*joined(*network.stages)]
    in_turn = lambda values: [values[node] for node in nodes]
    delay = [in_turn(row) for row in in_turn(network.delay)]
    return replace(network, delay=delay, compute=in_turn(network.compute),
                   memory=in_turn(network.memory), stages=stages)


# ---- the skip schedule: which stages are left out, and how often

class Infeasible(ValueError):
    """No valid plan exists; the message names the constraint that cannot be met."""


@dataclass
class Schedule:
    """kept: stages that a path visits, the first one included. origins: the origin of each path.
    visits: {stage: paths that visit it}; the others skip it. spare: stages that can take a visit
    more, where not all can have equally many. caps: of each node, the most paths through it."""
    network: Network
    kept: int
    origins: list
    visits: dict
    spare: list
    caps: list


def stages_to_keep(skip, stages):
    """How many stages a path visits if it skips this share of them: 4 of 6 for a third."""
    return round((1 - skip) * len(stages))


def skip_schedule(network, stages_kept, microbatches_per_origin=3):
    """Which stages may be left out, and how often: a `Schedule`. A path visits stages_kept of the
    stages and skips the rest, but never the first (CC1). The P paths visit each of the S others
    with nodes equally often (CC3): P * (stages_kept - 1) / S times, some once more if that is no
    whole number. A stage's nodes share its visits (TC1, `node_caps`). Raises Infeasible exactly
    where visits do not fit; else deal stages out in turn, each path visiting its own in order."""
    stages, most = network.stages, len(network.stages)
    need(1 <= stages_kept <= most and microbatches_per_origin >= 1,
         f"stages_kept must be 1 to {most}, microbatches_per_origin 1 or more")
    if not stages[0] or not all(network.memory[origin] for origin in stages[0]):
        raise Infeasible("CC1 cannot be met: stage 0 has no node, or one of memory 0")
    others = [s for s in range(1, most) if stages[s]]
    if len(others) < stages_kept - 1:
        raise Infeasible(f"CC3 cannot be met: after its origin a path visits {stages_kept - 1} "
                         f"stages, of {others}, which have nodes")
    origins = stages[0] * microbatches_per_origin
    low, extra = divmod(len(origins) * (stages_kept - 1), max(1, len(others)))
    high = low + 1 if extra else low
    caps = node_caps(network, high)
    fits = {}
    for s in others:
        fits[s] = sum(caps[r] for r in stages[s])
    spare = [s for s in others if extra and fits[s] > low]
    if len(spare) < extra or any(room < low for room in fits.values()):
        s = min(fits, key=fits.get)
        raise Infeasible(f"TC1 cannot be met: CC3 asks for {low} to {high} visits to each stage, "
                         f"but stage {s} has room for {fits[s]}")
    visits = dict.fromkeys(others, low)
    for s in spare[:extra]:
        visits[s] += 1
    return Schedule(network, stages_kept, origins, visits, spare, caps)


def node_caps(network, share):
    """For each node the most paths through it, when each stage has `share` visits: its memory, the
    published rule, so that it never waits for memory; or, lest no plan exists, its part of the
    visits by memory / compute, where `simulate` sees to what is held at once."""
    caps = [0] * len(network.compute)
    for stage in network.stages[1:]:
        power = {r: network.memory[r] / max(network.compute[r], 1e-9)
                 for r in stage if network.memory[r]}
        whole = sum(power.values())
        for r in power:
            caps[r] = max(network.memory[r], math.ceil(share * power[r] / whole - 1e-9))
    return caps


def rounds_of(microbatches, memory):
    """The fewest rounds of equally many microbatches that fit into a node's memory; else 1."""
    even = [rounds for rounds in range(1, microbatches) if microbatches % rounds == 0]
    return min([rounds for rounds in even if microbatches // rounds <= memory], default=1)


# ---- the simulator

class Deadlock(ValueError):
    """No task can start although some are left: the order or the memory is impossible."""


# one simulated task; arrived, start, end: seconds since the iteration began
Task = namedtuple("Task", "rank microbatch hop kind arrived start end")


@dataclass
class Result:
    """makespan: seconds until the last microbatch is back. timeline: the Tasks in order of their
    start. order: for each rank the (microbatch, hop) that it ran, in order; `simulate` takes it.
    tries: simulations that it took (`dispatch`). Unpacks: paths, order = plan(...)."""
    paths: list
    makespan: float
    timeline: list = field(repr=False)
    order: list = field(repr=False)
    tries: int = 1

    def __iter__(self):
        return iter((self.paths, self.order))


ARRIVES, USABLE = 0, 1      # in this order at one moment


def simulate(network, paths, rounds=1, order=None):
    """Run one iteration by S1 to S5 and return a `Result`. rounds: microbatches per path. A path's
    next one, numbered len(paths) higher, starts when the one before is back and the origin usable.
    order: each rank's (microbatch, hop), in the order to keep. Without it a node runs what arrived
    first, hop 0 last, of equal arrivals the lowest microbatch. What arrives at the moment its node
    becomes usable is already waiting. Raises Deadlock if tasks can never start."""
    count, slots = len(paths), list(network.memory)
    chains = [chain(path) for path in paths]
    priority = priority_in(order)
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
    return Result(paths, max(task.end for task in timeline), timeline, ran)


def priority_in(order):
    """priority(node, u, hop) of a task: its place in its node's order. Without an order new
    microbatches are last, and equals go as they came."""
    if not order:
        return lambda node, u, hop: int(hop == 0)
    places = []
    for work in order:
        places.append({tuple(task): place for place, task in enumerate(work)})
    return lambda node, u, hop: places[node].get((u, hop), math.inf)


def dispatch(network, paths, rounds=1):
    """`simulate`, first come, first served. If that runs out of memory and deadlocks, every rank's
    tasks go in order of depth * microbatch + hop. The larger depth is, the fewer microbatches are
    under way at once, in the end one. Raises Deadlock if not even that one can run."""
    tries, order = 0, None
    while True:
        tries += 1
        try:
            return replace(simulate(network, paths, rounds, order), tries=tries)
        except Deadlock:
            if 2 ** tries > 4 * max(map(len, paths)):   # it was one microbatch after the other
                raise
        depth = 2 ** tries
        order = [[] for _ in network.compute]
        for u in range(rounds * len(paths)):
            for hop, rank in enumerate(chain(paths[u % len(paths)])):
                order[rank].append((u, hop))
        for work in order:
            work.sort(key=lambda task: (depth * task[0] + task[1], task))


# ---- the constraints: each function yields Violations

# text: what is wrong. bans: the ways out that the search tries, each a microbatch and the nodes
# that it then keeps off. excess: visits or seconds of waiting too many
Violation = namedtuple("Violation", "text bans excess", defaults=((), 1))


def cc1(network, paths):
    """CC1: the first stage is never skipped. A path starts at a node of stage 0 and does not
    return there before its loss."""
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
                yield Violation(f"CC2: microbatch {u} goes from stage {before} (node {path[i - 1]})"
                                f" to stage {now} (node {path[i]}), {swaps} swaps being allowed")


def visitors_of(paths, place):
    """{place(r): the microbatches that come through there after their origin}"""
    found = {}
    for u, path in enumerate(paths):
        for r in path[1:]:
            found.setdefault(place(r), []).append(u)
    return found


def cc3(network, paths):
    """CC3: stages are skipped equally often, as far as the numbers allow: visits to any two stages
    with nodes differ by at most one. In any valid plan one of the bans holds, or more: an
    under-full stage gains only if a microbatch leaves a fuller one."""
    others = [s for s, nodes in enumerate(network.stages) if s and nodes]
    visitors = {s: [] for s in others} | visitors_of(paths, network.stage_of.get)
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


def check(network, paths, stages_kept=None, swaps=2):
    """Every violation of CC1, CC2, CC3 and TC1 as a list of sentences that name microbatch, stage
    and node; empty for valid paths. Also named: nodes of no stage, and paths of another length than
    stages_kept (default: the first path's)."""
    kept = stages_kept or len(paths[0])
    strangers = set(joined(*paths)) - set(network.stage_of)
    found = [f"microbatch {u} visits {len(path)} stages, not {kept}: {path}"
             for u, path in enumerate(paths) if len(path) != kept]
    found += [f"microbatch {u} visits node {r}, which is of no stage"
              for u, path in enumerate(paths) for r in path if r in strangers]
    known = without(strangers, paths)
    others = sum(map(bool, network.stages[1:]))
    caps = node_caps(network, -(-len(paths) * (kept - 1) // max(1, others)))
    violations = joined(cc1(network, known), cc2(network, known, swaps), cc3(network, known),
                        tc1(network, known, caps))
    return found + [v.text for v in violations]


def without(nodes, lists):
    """The lists (stages, paths) without these nodes."""
    left = []
    for each in lists:
        left.append([r for r in each if r not in nodes])
    return left


# ---- the shortest path of one microbatch

def shortest_path(cost, stages, origin, kept, swaps, must=()):
    """The cheapest path through `kept` stages under CC1 and CC2: (seconds, path) or None.
    cost[i][j]: seconds from i to j and of the work on j; j = origin: of the way back. stages: the
    nodes that may be used. must: stages that may not be skipped. A dynamic programme over the
    stages in order: skip stage s, visit it, or visit s+1 and then s. layers[s][visits, swaps][last
    node] = (seconds, path), all below stage s being decided."""
    def visit(ends, nodes):     # the best way from any of the ends to each of the nodes
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
        stages = without(banned, schedule.network.stages)
        return shortest_path(cost, stages, origin, schedule.kept, swaps, must)
    return shortest


# ---- the search

def farthest_first(schedule, shortest):
    """Valid paths in one sweep (ours). The origin with the longest trip goes first: its path is the
    longest part of the iteration, and the other paths have slack to give way."""
    trips = [shortest(origin)[0] for origin in schedule.origins]
    order = sorted(range(len(trips)), key=lambda u: -trips[u])
    return one_sweep(schedule, shortest, order)


def one_sweep(schedule, shortest, order):
    """The shortest path for each of the schedule's origins, planned in this order. Never a dead
    end: a node or stage that is full is closed, and a stage due for all that are left is a must."""
    stage_of, nodes = schedule.network.stage_of, [*joined(*schedule.network.stages[1:])]
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
# minus the number of its bans. seconds: of the iteration, or of the longest trip while paths are
# not valid. trips: of all. bans: of each microbatch. children: those of which each child adds one
Branch = namedtuple("Branch", "excess depth seconds trips number bans children")


def conflict_based_search(schedule, shortest, rounds=1, deadline=math.inf):
    """The paper's method: every microbatch on its own shortest path, then one conflict after the
    other resolved by branching: which microbatch keeps off? Of equal excess the deepest branch
    comes first (ours; the paper's order is best first): a full network shifts its last conflict
    about, and breadth would try all permutations. deadline: of time.perf_counter. Yields for each
    conflict (work: paths planned and simulations run, Results of the branches that are valid)."""
    tree, seen = [], set()                              # a heap of branches; the bans of all
    coming = [(frozenset(),) * len(schedule.origins)]   # the bans of the branches to grow
    while True:
        work, found = 0, []
        for bans in coming:
            if seen and time.perf_counter() > deadline:
                break
            trips = [shortest(o, banned) for o, banned in zip(schedule.origins, bans)]
            if bans in seen or not all(trips):
                continue
            seen.add(bans)
            grown, result = branch(schedule, rounds, trips, bans, len(seen))
            heapq.heappush(tree, grown)
            work += 1
            if result:
                work += result.tries
                found.append(result)
        yield work, found
        if not tree:
            return
        first, coming = heapq.heappop(tree), []
        for u, nodes in first.children:
            banned = first.bans[u] | frozenset(nodes)
            coming.append((*first.bans[:u], banned, *first.bans[u + 1:]))


def branch(schedule, rounds, trips, bans, number):
    """The Branch of these trips, (seconds, path) each, and its Result if the paths are valid. Its
    conflict is the first of: over-full stage (CC3), over-full node (TC1), time overlap (TC2)."""
    network, result = schedule.network, None
    paths = [path for _, path in trips]
    conflicts = [*cc3(network, paths), *tc1(network, paths, schedule.caps)]
    excess, (seconds, _) = sum([v.excess for v in conflicts]), max(trips)
    if not conflicts:
        result = dispatch(network, paths, rounds)
        seconds = result.makespan
        conflicts = [v for v in tc2(network, paths, result) if v.bans]
    children = conflicts[0].bans if conflicts else []
    depth, sum_of_trips = -sum(map(len, bans)), sum([trip for trip, _ in trips])
    return Branch(excess, depth, seconds, sum_of_trips, number, bans, children), result


def plan(network, stages_kept, microbatches_per_origin=3, rounds=1, swaps=2, seconds=10.0, seed=0,
         *, iterations=None):
    """The shortest iteration that a first sweep (ours) and the paper's search find: a `Result` with
    valid paths. Raises Infeasible if there are none. stages_kept: stages that a path
    visits, the origin's included. microbatches_per_origin: paths of each origin, each planned on
    its own (the released search ties three together). rounds: microbatches down each path. seconds:
    limit of the search, the first sweep excepted. iterations: limit in paths planned and
    simulations run. seed: of searches that draw, such as `planning.search.shorter_plan`."""
    deadline = time.perf_counter() + (math.inf if seconds is None else seconds)
    most = math.inf if iterations is None else iterations
    schedule = skip_schedule(network, stages_kept, microbatches_per_origin)
    shortest = path_finder(schedule, hop_costs(network), swaps)
    paths = farthest_first(schedule, shortest)      # first of all, since it cannot fail
    best = dispatch(network, paths, rounds)
    done = len(paths) + best.tries
    for work, found in conflict_based_search(schedule, shortest, rounds, deadline):
        done += work
        for result in found:
            if result.makespan < best.makespan - 1e-9:
                best = result
        if done >= most or time.perf_counter() > deadline:
            break
    return best


def plan_iteration(network, skip, microbatches, seed):
    """A training iteration's plan as JSON can hold it: dict(paths, order, makespan, network). A
    budget of work, not of time, so that it depends only on the network and the seed."""
    rounds = rounds_of(microbatches, min(network.memory))
    kept = stages_to_keep(skip, network.stages)
    found = plan(network, kept, microbatches // rounds, rounds, seconds=None, iterations=3000,
                 seed=seed)
    return dict(paths=found.paths * rounds, order=found.order, makespan=found.makespan,
                network=asdict(network))


# ---- the command line

# Two islands of three nodes: links within one take 0.1 s, between the two 0.9 s.
SIX_NODES = dict(delay=[[0.1, 0.9] * 3, [0.9, 0.1] * 3] * 3, compute=0.2,
                 stages=[[0, 1], [2, 3], [4, 5]])


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", help="JSON with Network's fields (default: six nodes)")
    parser.add_argument("--kept", type=int, help="stages that a path visits (default: two thirds)")
    parser.add_argument("--microbatches", type=int, default=4, help="of each origin (default: 4)")
    o = parser.parse_args(argv)
    try:
        network = read_network(o.file) if o.file else Network(**SIX_NODES)
        two_thirds = max(stages_to_keep(1 / 3, network.stages), min(2, len(network.stages)))
        kept = two_thirds if o.kept is None else o.kept
        found = plan(network, kept, o.microbatches, iterations=2000)
    except ValueError as error:
        parser.exit(2, f"error: {error}\n")
    for path in found.paths:
        print(*path, sep=" > ")
    print(f"{found.makespan:.2f} s")


if __name__ == "__main__":
    main()
