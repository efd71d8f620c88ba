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

(After hop 0 it is `origin_overhead`.) A node runs one task at
a time and holds at most `memory` microbatches: a forward takes a slot, the same microbatch's
backward frees it.

planning/ holds a stronger search and the command line: `python skippipe.py` plans the published 20
nodes in 12 cities, `--instance mine.json` your own network.
"""
import heapq
import math
import random
import time
from collections import namedtuple
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain as joined

WORK = {"forward": 1.0, "loss": 0.25, "backward": 1.5}      # S2
TAKES = {"forward": 1, "loss": 0, "backward": -1}           # slots, from the task's start on
FORWARD, LOSS, BACKWARD = WORK


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


def plain(value):
    """Lists and numbers, also where numpy's or torch's were given."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (list, tuple, range)):
        return [x if type(x) is float else plain(x) for x in value]     # floats are the many
    return value


def per_node(value, nodes, name):
    """A list of one value per node, where these or one for all are given. nodes: rows of delay."""
    if not isinstance(value, (list, tuple)):
        return [value] * nodes
    if len(value) != nodes:
        raise ValueError(f"delay has {nodes} rows, {name} {len(value)} values: give one per node")
    return list(value)


@dataclass
class Network:
    """The nodes and links that a plan is made for.

    delay[i][j]: seconds from the end of a task on i to the arrival of its message on j. compute[i]:
    seconds of one forward on i (w). stages: the ranks of each stage, stages[0] the origins. memory:
    microbatches that a node holds at once. compute and memory are one number or one per node.
    overhead, origin_overhead: seconds (S5). Arrays and tensors become lists. Sets stage_of: rank ->
    stage. A node of no stage stays idle. Raises ValueError where these do not fit together."""
    delay: list
    compute: list
    stages: list
    memory: int = 3
    overhead: float = 0.0
    origin_overhead: float = None

    def __post_init__(self):
        for name in ("delay", "compute", "stages", "memory", "overhead", "origin_overhead"):
            setattr(self, name, plain(getattr(self, name)))
        nodes = len(self.delay)
        if not all(isinstance(row, list) and len(row) == nodes for row in self.delay):
            raise ValueError(f"delay must have as many columns as rows, {nodes}")
        self.compute = per_node(self.compute, nodes, "compute")
        self.memory = per_node(self.memory, nodes, "memory")
        if self.origin_overhead is None:
            self.origin_overhead = self.overhead
        seconds = [self.overhead, self.origin_overhead, *self.compute, *joined(*self.delay)]
        if not all(isinstance(x, (int, float)) and 0 <= x <= 1e9 for x in seconds):
            raise ValueError("delays, compute times and overheads must be seconds from 0 to 1e9")
        if not all(isinstance(m, int) and 0 <= m <= 1e9 for m in self.memory):
            raise ValueError("memory must be whole numbers of microbatches, 0 to 1e9, "
                             f"got {self.memory}")
        ranks = []
        if isinstance(self.stages, list) and all(isinstance(s, list) and s for s in self.stages):
            ranks = [*joined(*self.stages)]
        known = all(isinstance(r, int) and 0 <= r < nodes for r in ranks)
        if not ranks or not known or len(set(ranks)) != len(ranks):
            raise ValueError(f"stages must be non-empty lists of different nodes below {nodes}, "
                             f"whole numbers, got {self.stages}")
        self.stage_of = {r: s for s, stage in enumerate(self.stages) for r in stage}


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
    Deadlock where tasks can never start, ValueError without paths."""
    if not paths:
        raise ValueError("there is no path to simulate")
    count, slots = len(paths), list(network.memory)
    chains = [chain(path) for path in paths]
    places = [{} for _ in slots]        # {(microbatch, hop): place in the order} at each node
    for node, tasks in enumerate(order or []):
        places[node] = {tuple(task): place for place, task in enumerate(tasks)}
    forwards = [[] for _ in slots]      # at each node the forwards that wait, a heap
    others = [[] for _ in slots]        # the losses and backwards, which need no slot, a heap
    timeline, ran = [], [[] for _ in slots]
    idle = [True] * len(slots)
    events = [(0.0, ARRIVES, u, 0, path[0]) for u, path in enumerate(paths)]
    heapq.heapify(events)
    while events:
        now, event, u, hop, node = heapq.heappop(events)
        if event == USABLE:
            idle[node] = True
        else:
            what = kind(paths[u % count], hop)
            # Without an order hop 0, a new microbatch, has place 1 and all else 0: it comes last.
            place = places[node].get((u, hop), math.inf) if order else int(hop == 0)
            waiting = forwards[node] if what == FORWARD else others[node]
            heapq.heappush(waiting, (place, now, u, hop, what))
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


# ---- the constraints: each function yields Violations

class Infeasible(ValueError):
    """No valid plan exists; the message names the constraint that cannot be met."""


# text: what is wrong. bans: (microbatch, nodes) pairs. For CC3 and TC1 at least one of these
# microbatches keeps off its nodes in any valid plan; for TC2 each is worth a try. excess: visits or
# seconds of waiting too many
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
            a, b = stages[i - 1], stages[i]
            if b == a - 1:
                swapped += 1
            back = b < a - 1 or (b < a and swapped > swaps)
            if back or b in stages[:i] or b < max(stages[:i - 1], default=b):   # a in two swaps
                yield Violation(
                    f"CC2: microbatch {u} goes from stage {a} (node {path[i - 1]}) to stage {b} "
                    f"(node {path[i]}): not in order, even with {swaps} swaps of neighbours")


def visitors_of(paths, place):
    """{place(r): the microbatches that come through there after their origin}"""
    found = {}
    for u, path in enumerate(paths):
        for r in path[1:]:
            found.setdefault(place(r), []).append(u)
    return found


def cc3(network, paths, dead=()):
    """CC3: stages are skipped equally often, as far as the numbers allow: visits to any two stages
    differ by at most one. Stages without a living node do not count."""
    living = [s for s, nodes in enumerate(network.stages) if s and not set(nodes) <= set(dead)]
    visitors = {s: [] for s in living} | visitors_of(paths, network.stage_of.get)
    visits, count = sum(map(len, visitors.values())), max(1, len(visitors))
    low, high = visits // count, -(-visits // count)
    # An under-full stage gains only where a microbatch leaves a fuller one.
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
    """TC1: a node holds at most `memory` microbatches at once. `simulate` sees to that; here it
    means that at most caps[r] paths run through node r (see `node_caps`). Origins are left out:
    they carry their own microbatches, however many."""
    for r, users in sorted(visitors_of(paths, lambda r: r).items()):
        if len(users) > caps[r]:
            text = (f"TC1: node {r} (stage {network.stage_of[r]}) carries {len(users)} "
                    f"microbatches, {users}, of at most {caps[r]}")
            yield Violation(text, [(u, [r]) for u in users], len(users) - caps[r])


def tc2(network, paths, result):
    """TC2: no two microbatches want the same node at the same time. A soft constraint: `check`
    leaves it out. Yields a Violation for every task that waited at a node, the longest wait first.
    A Violation at an origin has no bans, since no microbatch can leave its origin out."""
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


def node_caps(network, share, dead=()):
    """For each node the most paths that may run through it, when each stage has `share` visits: its
    `memory`, or its part of the visits where that is more. A path has one microbatch under way at a
    time, so with at most `memory` paths a node never waits for memory: the published search's rule.
    The parts, by memory / compute, see that a plan exists, with fewer paths for slow nodes.
    `simulate` then sees to what is held at once."""
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


def check(network, paths, stages_kept=None, swaps=2, dead=()):
    """Every violation of CC1, CC2, CC3 and TC1 as a list of sentences that name microbatch, stage
    and node; empty for valid paths. The list also names paths of another length than stages_kept
    (default: the first path's), nodes that are dead or in no stage, and the absence of any path."""
    if not paths:
        return ["there is no path"]
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


# ---- the search

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
            if visits + count - s >= kept and s not in must:    # enough are left to skip this one
                reach(s + 1, (visits, swapped), ends)
            if visits + 1 < kept and here:
                reach(s + 1, (visits + 1, swapped), visit(ends, here))
            if visits + 2 < kept and swapped < swaps and here and after:
                reach(s + 2, (visits + 2, swapped + 1), visit(visit(ends, after), here))
    found = [(seconds + cost[n][origin], path) for (visits, _), ends in layers[count].items()
             for n, (seconds, path) in ends.items() if visits == kept - 1]
    return min(found, default=None)


def hop_costs(network, forward=1.0, backward=1.5):
    """cost[i][j] for `shortest_path`, in seconds: the link there and back, and j's work, `forward`
    and `backward` times w[j] (0: without that direction). The origin's own work is the same on all
    its paths and left out."""
    def hop(i, j):
        out = network.delay[i][j] if forward and i != j else 0.0
        back = network.delay[j][i] if backward and i != j else 0.0
        work = network.compute[j] if network.stage_of.get(j) else 0.0
        return out + back + (forward + backward) * work

    cost, nodes = [], range(len(network.compute))
    for i in nodes:
        cost.append([hop(i, j) for j in nodes])
    return cost


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


def plan(network, stages_kept, microbatches_per_origin=3, rounds=1, swaps=2, seconds=10.0, seed=0,
         *, iterations=None, dead=()):
    """Paths and dispatch order of one iteration, as short as the paper's search makes it: a `Plan`.

    stages_kept: how many stages a path visits, the origin's included. microbatches_per_origin:
    paths of each living origin, each planned on its own (the released search ties three together).
    rounds: microbatches that an origin sends down each path (2 by default on the command line, as
    in the published instance). dead: nodes that are not there; a dead origin takes its microbatches
    with it. seconds: limit of the search, the first plan excepted. iterations: limit in paths
    planned and simulations run. With seconds=None the plan depends on seed and iterations alone.
    Raises Infeasible exactly where no valid plan exists, ValueError where an argument is wrong.
    `planning.search.shorter_plan` takes the same arguments and finds shorter iterations."""
    asked = network, stages_kept, microbatches_per_origin, rounds, swaps, dead
    return Search(Problem(*asked), seed, seconds, iterations).plan(lower_bound(*asked))


class Problem:
    """What is to be planned, and what CC3 and TC1 make of it: visits, {stage: visits due}; spare,
    the stages that may get the one visit more; caps, each node's most paths. Raises ValueError, or
    Infeasible where no valid plan exists."""

    def __init__(self, network, stages_kept, microbatches_per_origin, rounds=1, swaps=2, dead=()):
        most, counts = len(network.stages), (stages_kept, microbatches_per_origin, rounds, swaps)
        whole = all(hasattr(count, "__index__") for count in counts)
        if not whole or min(counts[:3]) < 1 or swaps < 0 or stages_kept > most:
            raise ValueError(f"stages_kept must be 1 to {most}, microbatches_per_origin and rounds "
                             f"1 or more, swaps 0 or more, all whole numbers; got {counts}")
        self.network, self.kept = network, stages_kept
        self.each, self.rounds = microbatches_per_origin, rounds
        self.swaps, self.dead = swaps, frozenset(plain(dead))
        unknown = [*self.dead.difference(range(len(network.compute)))]
        if unknown:
            raise ValueError(f"dead: {unknown} are no nodes of a network of {len(network.compute)}")
        self.stages = without(self.dead, network.stages)
        self.origins = self.stages[0] * self.each
        self.share_out_visits()

    @cached_property
    def cost(self):
        return hop_costs(self.network)

    def share_out_visits(self):
        """Set visits, spare, caps, or raise Infeasible. A valid plan exists exactly if the visits
        fit the nodes: then deal the stages out in turn, each path visiting its own in order."""
        living = [s for s in range(1, len(self.stages)) if self.stages[s]]
        if not self.stages[0]:
            raise Infeasible("CC1 cannot be met: no node of stage 0 is alive")
        if not all(self.network.memory[o] for o in self.stages[0]):
            raise Infeasible("CC1 cannot be met: a node of stage 0 has memory 0")
        if len(living) < self.kept - 1:
            raise Infeasible(f"CC3 cannot be met: a path visits {self.kept - 1} stages after its "
                             f"origin, living nodes have only {living}")
        # Each stage gets low visits, `extra` stages one more.
        low, extra = divmod(len(self.origins) * (self.kept - 1), max(1, len(living)))
        high = low + 1 if extra else low
        self.caps, fits = node_caps(self.network, high, self.dead), {}
        for s in living:
            fits[s] = sum(self.caps[r] for r in self.stages[s])
        self.spare = [s for s in living if extra and fits[s] > low]
        if len(self.spare) < extra or min(fits.values(), default=low) < low:
            s = min(fits, key=fits.get)
            raise Infeasible(f"TC1 cannot be met: CC3 asks for {low} to {high} visits to each "
                             f"stage, stage {s} (nodes {self.stages[s]}) has room for {fits[s]}")
        self.visits = dict.fromkeys(living, low)
        for s in self.spare[:extra]:
            self.visits[s] += 1


class Search:
    """The paper's search: its problem, its limits, the work done, and the best simulation so far
    with its paths. Other searches override `find`, `over` and `ends`."""
    ends = False        # whether it comes to an end without seconds and iterations

    def __init__(self, problem, seed=0, seconds=None, iterations=None):
        self.problem, self.random = problem, random.Random(f"plan {seed}")
        for name, limit in (("seconds", seconds), ("iterations", iterations)):
            if limit is not None and not 0 <= limit < math.inf:
                raise ValueError(f"{name} must be a finite number from 0, or None, got {limit}")
        self.seconds = math.inf if seconds is None else seconds
        self.iterations = math.inf if iterations is None else iterations
        self.start, self.work = time.perf_counter(), 0
        self.best, self.paths = None, None
        self.trips, self.bound = {}, 0.0        # trips: what `best_trip` has found

    def plan(self, bound):
        """Run the search to its end and return the `Plan`. bound: seconds; no plan is faster."""
        self.bound = bound
        if self.seconds == self.iterations == math.inf and not self.ends:
            raise ValueError("plan needs an end: give seconds or iterations")
        self.find()
        best, spent = self.best, time.perf_counter() - self.start
        return Plan(self.paths, best.order, best.makespan, bound, spent, self.work, best)

    def find(self):
        """Every step of the search in turn, until it is `over`."""
        self.farthest_first()       # first of all, since it cannot fail
        self.conflict_based_search()

    def late(self):
        return time.perf_counter() - self.start > self.seconds

    def over(self):
        optimal = self.best is not None and self.best.makespan <= self.bound + 1e-6
        return optimal or self.work >= self.iterations or self.late()

    def simulate(self, paths, order=None):
        """The simulated iteration; None if it deadlocks. The best one is remembered."""
        self.work += 1
        try:
            result = simulate(self.problem.network, paths, self.problem.rounds, order)
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
            order = [[] for _ in self.problem.network.compute]
            for u in range(self.problem.rounds * len(paths)):
                for hop, rank in enumerate(chain(paths[u % len(paths)])):
                    order[rank].append((u, hop))
            for tasks in order:
                tasks.sort(key=lambda task: (depth * task[0] + task[1], task))
            result = self.simulate(paths, order)
        return result

    def conflict_based_search(self, limit=math.inf):
        """The paper's method: every microbatch on its own shortest path, then one conflict after
        the other resolved by branching: which microbatch keeps off? Ends after `limit` paths and
        simulations. A branch holds its bans: for each microbatch the nodes that it keeps off."""
        limit += self.work
        tree, seen = [], set()      # a heap of branches; the bans of all
        self.grow(tree, seen, (frozenset(),) * len(self.problem.origins))
        while tree and self.work < limit and not self.over():
            _, _, bans, children = heapq.heappop(tree)
            for u, nodes in children:
                if self.late():
                    break
                self.grow(tree, seen, (*bans[:u], bans[u] | frozenset(nodes), *bans[u + 1:]))

    def grow(self, tree, seen, bans):
        """Add the branch with these bans, unless it is known or leaves a microbatch no path. Its
        conflict is the first of: an over-full stage (CC3), an over-full node (TC1), a time overlap
        (TC2). Each child keeps one of the microbatches involved off the stage or the node."""
        problem = self.problem
        trips = [self.best_trip(o, banned) for o, banned in zip(problem.origins, bans)]
        if bans in seen or not all(trips):
            return
        seen.add(bans)
        self.work += 1
        paths, network = [path for _, path in trips], problem.network
        conflicts = [*cc3(network, paths, problem.dead), *tc1(network, paths, problem.caps)]
        excess, (seconds, _) = sum([v.excess for v in conflicts]), max(trips)
        if not conflicts:
            result = self.dispatch(paths)
            seconds = result.makespan
            conflicts = [v for v in tc2(network, paths, result) if v.bans]
        children = conflicts[0].bans if conflicts else []
        # Of equal excess the deepest branch comes first (ours; the paper's order is best first): a
        # full network shifts its last conflict about, and breadth would try all permutations. Then
        # the shortest iteration, for which the longest trip stands while paths are not valid.
        key = excess, -sum(map(len, bans)), seconds, sum([trip for trip, _ in trips])
        heapq.heappush(tree, (key, len(seen), bans, children))

    def best_trip(self, origin, banned=frozenset()):
        """(seconds, path) of the origin's shortest path off the banned nodes, or None."""
        if (origin, banned) not in self.trips:
            problem, stages = self.problem, without(banned, self.problem.stages)
            found = shortest_path(problem.cost, stages, origin, problem.kept, problem.swaps)
            self.trips[origin, banned] = found
        return self.trips[origin, banned]

    def fill(self, paths, visits, trip, costs=None, noise=0.0):
        """Plan the missing paths (None), so that each stage gets `visits` more. Never a dead end: a
        stage due for all that are left is a must. The origin with the longest trip (seconds) comes
        first: its path is the longest part of the iteration, and the other paths have slack to give
        way. costs(): for each path anew, the costs of the hops (default: `hop_costs`). noise: how
        far the order of planning is shuffled."""
        problem, stage_of = self.problem, self.problem.network.stage_of
        paths, visits = list(paths), dict(visits)
        room, todo = list(problem.caps), []
        for u, origin in enumerate(problem.origins):
            if paths[u]:
                for r in paths[u][1:]:
                    room[r] -= 1
            else:
                todo.append((-trip[origin] * (1 + noise * self.random.random()), u, origin))
        nodes, known = [*joined(*problem.stages[1:])], {}
        for planned, (_, u, origin) in enumerate(sorted(todo)):
            must = tuple([s for s, due in visits.items() if due == len(todo) - planned])
            closed = frozenset([r for r in nodes if room[r] <= 0 or not visits.get(stage_of[r])])
            choice = origin, closed, must
            if costs or choice not in known:
                cost, open_ = costs() if costs else problem.cost, without(closed, problem.stages)
                found = shortest_path(cost, open_, origin, problem.kept, problem.swaps, must)
                known[choice] = found[1]
            paths[u] = known[choice]
            self.work += 1
            for r in paths[u][1:]:
                room[r] -= 1
                visits[stage_of[r]] -= 1
        return paths

    def farthest_first(self):
        """All paths in one sweep: a valid plan in milliseconds, however large the network."""
        trip = {o: self.best_trip(o)[0] for o in self.problem.stages[0]}
        paths = self.fill([None] * len(self.problem.origins), self.problem.visits, trip)
        self.dispatch(paths)
        return paths


# ---- how good can a plan be

def one_machine(tasks, chains):
    """A lower bound of the seconds that one machine needs for `chains` equal chains of tasks: the
    machine works all the time, or a chain runs on undisturbed. tasks: (seconds busy, seconds from a
    task's start until its chain's next task may start; the last's: until the machine is usable)."""
    return max(chains * sum(busy for busy, _ in tasks), sum(wait for _, wait in tasks))


def lower_bound(network, stages_kept, microbatches_per_origin=3, rounds=1, swaps=2, dead=(),
                machine=one_machine, origins=None):
    """Seconds below which no plan can come, whatever its paths and order: each case drops rules.

    Take one origin alone. What remains of its microbatches is forward, loss and backward on the
    origin itself, with at least the shortest way out and the shortest way back between them (each
    the minimum over all paths that CC1 and CC2 allow). At most `lanes` of them are under way at
    once: as many as it has paths, or memory for. So they form `lanes` chains, each microbatch
    beginning after the one before it in its chain has ended, and the longest has at least q, the
    microbatches / lanes rounded up.

    Case 1: no chain is longer. Then at least microbatches - lanes (q - 1) chains have q, and
    machine(tasks, chains) bounds the time of these alone (planning/bound.py's is tighter). Case 2:
    a chain has q + 1, which alone takes its time. This cannot be where the chains are the paths, of
    `rounds` each. origins: which to look at, default all."""
    stages = Problem(network, stages_kept, microbatches_per_origin, rounds, swaps, dead).stages
    total, pause = microbatches_per_origin * rounds, network.overhead
    there, home = hop_costs(network, 1, 0), hop_costs(network, 0, 1.5)
    best = 0.0
    for o in origins or stages[0]:
        out, _ = shortest_path(there, stages, o, stages_kept, swaps)
        back, _ = shortest_path(home, stages, o, stages_kept, swaps)
        w = network.compute[o]
        # (seconds busy, seconds from a task's start to the next one's): forward, loss, backward
        tasks = [(w + network.origin_overhead, w + out), (w / 4 + pause, w / 4 + back),
                 (1.5 * w + pause, 1.5 * w + pause)]
        lanes = min(microbatches_per_origin, network.memory[o])
        q = -(-total // lanes)
        bound = machine(tasks * q, total - lanes * (q - 1))
        if lanes < microbatches_per_origin:
            bound = min(bound, (q + 1) * sum(wait for _, wait in tasks))
        best = max(best, bound - pause)         # the iteration ends before the last task's pause
    return best


if __name__ == "__main__":
    from importlib.util import find_spec
    if not find_spec("planning"):
        raise SystemExit("error: the command line is in planning/, which is not beside this file")
    from planning.__main__ import main
    main(program="python skippipe.py")
