"""SkipPipe: pipelines whose microbatches take their own paths (arXiv 2502.19913).

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
"""
import heapq
import random
from dataclasses import dataclass, field

FORWARD, LOSS, BACKWARD = "forward", "loss", "backward"


@dataclass
class Network:
    """The nodes and links that a plan is made for.

    delay[i][j]: seconds from the end of a task on i to the arrival of its message on j. compute[i]: seconds of one forward on i (w).
    stages: the ranks of each stage, stages[0] the origins. memory: microbatches held at once, one number or one per node.
    overhead, origin_overhead: seconds (see the module). Raises ValueError when these do not fit together.
    """
    delay: list
    compute: list
    stages: list
    memory: int = 3
    overhead: float = 0.0
    origin_overhead: float = None

    def __post_init__(self):
        nodes = len(self.compute)
        if not hasattr(self.memory, "__len__"):
            self.memory = [self.memory] * nodes
        if self.origin_overhead is None:
            self.origin_overhead = self.overhead
        if len(self.delay) != nodes or any(len(row) != nodes for row in self.delay) or len(self.memory) != nodes:
            raise ValueError(f"delay must be {nodes} x {nodes} and memory one number or {nodes}, as there are {nodes} compute times")
        ranks = [r for stage in self.stages for r in stage]
        if not ranks or not all(self.stages) or len(set(ranks)) != len(ranks) or not set(ranks) <= set(range(nodes)):
            raise ValueError(f"stages must be non-empty lists of different ranks below {nodes}, got {self.stages}")


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
        shuffle, cards = shuffler(boundary), []
        while len(cards) < len(columns[0]):
            cards += shuffle(ranks)
        columns.append(cards[:len(columns[0])])
    return list(zip(*columns))


def chain(path):
    """Eq. 1: the rank of every hop. Hops below len(path) are forward, hop len(path) is the loss, later ones are backward."""
    return (*path, path[0], *reversed(path))


def kind(path, hop):
    return FORWARD if hop < len(path) else LOSS if hop == len(path) else BACKWARD


class Deadlock(RuntimeError):
    """No task can start although some are left: the order or the memory is impossible."""


@dataclass
class Result:
    """makespan: seconds until the last microbatch is back home. timeline: (rank, microbatch, kind, start, end) in order of start,
    seconds. waiting[rank]: seconds that tasks spent at the rank before they started (collisions, TC2, and memory)."""
    makespan: float
    timeline: list = field(repr=False)
    waiting: list = field(repr=False)


def simulate(network, paths, release=None, rounds=1, order=None):
    """Run one iteration in the time model of the module docstring and return a `Result`.

    release: seconds at which each path's first microbatch may start (default 0). rounds: microbatches per path; the next one starts
    when the one before it is back home, its origin usable again, and is numbered len(paths) higher. order: for each rank the list of
    (microbatch, hop) in which it must run its tasks; without it a free node starts, among the tasks present and startable, the one
    that arrived first, new injections last. A node that becomes free does not see what arrives at that very moment; of several
    arrivals at one moment the lowest microbatch comes first. Times are rounded to a nanosecond, so that ties are ties on every
    machine. Raises Deadlock when tasks are left that can never start.
    """
    nodes, count = len(network.compute), len(paths)
    chains = [chain(p) for p in paths]
    length = [len(p) for p in paths]
    free_slots, idle = list(network.memory), [True] * nodes
    forwards, others = [[] for _ in range(nodes)], [[] for _ in range(nodes)]   # present tasks: (injected, arrival, microbatch, hop)
    arrived, position = {}, [0] * nodes                                         # the same under a planned order
    events, timeline, waiting, makespan, left = [], [], [0.0] * nodes, 0.0, rounds * sum(map(len, chains))
    for u in range(count):      # an event: (time, 0 = the node becomes usable or 1 = a task arrives, microbatch, hop, node)
        events.append((release[u] if release else 0.0, 1, u, 0, paths[u][0]))
    heapq.heapify(events)
    while events:
        now, arrives, u, hop, node = heapq.heappop(events)
        if arrives:
            if order is None:
                heapq.heappush((forwards if hop < length[u % count] else others)[node], (hop == 0, now, u, hop))
            else:
                arrived[u, hop] = now
        else:
            idle[node] = True
        if not idle[node]:
            continue
        if order is None:
            ready = forwards[node] if forwards[node] and free_slots[node] else None
            if others[node] and (ready is None or others[node] < ready):
                ready = others[node]
            if not ready:
                continue
            _, came, u, hop = heapq.heappop(ready)
        else:
            if position[node] == len(order[node]):
                continue
            u, hop = order[node][position[node]]
            if (u, hop) not in arrived or hop < length[u % count] and not free_slots[node]:
                continue
            came = arrived.pop((u, hop))
            position[node] += 1
        path, ranks, m = paths[u % count], chains[u % count], length[u % count]
        w = network.compute[node]
        if hop < m:
            free_slots[node] -= 1
            duration = w
        elif hop == m:
            duration = w / 4
        else:
            free_slots[node] += 1       # the node is busy until the end, so the slot is in use until then
            duration = 1.5 * w
        end = round(now + duration, 9)
        idle[node] = False
        waiting[node] += now - came
        timeline.append((node, u, kind(path, hop), now, end))
        left -= 1
        usable = round(end + (network.overhead if hop else network.origin_overhead), 9)
        heapq.heappush(events, (usable, 0, u, hop, node))
        if hop + 1 < len(ranks):
            to = ranks[hop + 1]
            heapq.heappush(events, (round(end + (network.delay[node][to] if to != node else 0.0), 9), 1, u, hop + 1, to))
        else:
            makespan = max(makespan, end)
            if u + count < rounds * count:
                heapq.heappush(events, (usable, 1, u + count, 0, node))
    if left:
        raise Deadlock(f"{left} of {rounds * sum(map(len, chains))} tasks can never start: "
                       + ("the planned order contradicts itself or the memory" if order else "every node that could run one is out of memory"))
    return Result(makespan, timeline, waiting)
