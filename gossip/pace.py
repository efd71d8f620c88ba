"""The pace of a run, computed: seconds, bytes and memory of a setting on a network.

A link carries `rate` bytes a second each way, messages arrive `latency` later, and links do not
contend, as in B5 of bench_sync.py. Over Gloo each message waits one latency more, since it leaves
when the receiver has said that it is ready (measured: docs/speed.md). Below, "latency" means
`trips` times the latency: 2 over Gloo, 1 in B5. Writing, reading and summing take no time. One
message, or one sum, of b bytes among n replicas takes

    a pair of NoLoCo's          latency + b / rate                       theta alone: gamma = beta
    a ring (Gloo's)             2 (n - 1) (latency + b / (n rate))
    halving and doubling        2 log2 n latency + 2 (n - 1) / n b / rate
    a tree                      2 log2 n (latency + b / rate)
    a sum in one byte           2 (latency + (n - 1) / n b / rate)       Q2: all parts go directly

Where n is no power of two, log2 n is rounded up. Of an odd number of replicas three of NoLoCo's
form a group, and each sends twice. Here all groups then take that long, which for more than three
replicas is an upper bound.

The wait (ours). The slowest replica's steps take c seconds. Every m steps each of K fragments sends
a message of t seconds, m / K steps after the fragment before it, and merges what came D steps
later. One thread sends one message at a time. In the long run

    m steps take    m c + K max(0, t - min(D, m / K) c) seconds

since the training stands still when a message is not there after D steps, and since the thread
falls behind when it gets a message every m / K steps that takes longer. A slow replica keeps all
others waiting, with random pairs too: whoever has met it is late for the next. With steps of
uneven length no formula is known. The clocks of B4, with messages, are then drawn.
"""
import math
from dataclasses import dataclass

import torch

from gossip.sums import BLOCK

# Bytes of a weight or of a number in a sum, by --wire. A block of a sum has a scale beside it.
PAIR_BYTES = {"fp32": 4, "int8": 1}
SUM_BYTES = {"fp32": 4, "bf16": 2, "int8": 1 + 4 / BLOCK}
ALL_REDUCES = ("ring", "halving", "tree")
GLOO = 2                    # trips over Gloo; B5 has 1
ROUNDS = 100                # of m steps, where steps are drawn; the first quarter is not counted


@dataclass(frozen=True)
class Situation:
    """What a run finds. rate: bytes a second; latency: seconds, one way; step: mean seconds of an
    inner step; spread: the std of its seconds over their mean (B4 has 0.81); slow: how many times
    as long the slowest replica's steps take; trips: for how many latencies a message waits."""
    params: float
    replicas: int
    step: float
    rate: float
    latency: float
    spread: float = 0
    slow: float = 1
    trips: int = 1


@dataclass(frozen=True)
class Meetings:
    """How replicas meet: --method, --wire, --inner-steps (m), --fragments (K), --delay (D).

    all_reduce: how sums in fp32 and bf16 go. overlap: of ddp, the share of a step during which its
    average travels already. Raises ValueError where there are no such meetings. K must divide m:
    uneven turns would make the wait depend on their order.
    """
    method: str
    wire: str = "fp32"
    m: int = 1
    K: int = 1
    D: int = 0
    all_reduce: str = "ring"
    overlap: float = 0

    def __post_init__(self):
        if self.method not in ("ddp", "diloco", "noloco"):
            raise ValueError(f"method is ddp, diloco or noloco, not {self.method}")
        if self.wire not in bytes_of(self.method):
            raise ValueError(f"{self.method} has no wire {self.wire}")
        if self.all_reduce not in ALL_REDUCES:
            raise ValueError(f"all_reduce is one of {', '.join(ALL_REDUCES)}, not "
                             f"{self.all_reduce}")
        if self.method == "ddp" and (self.m, self.K, self.D) != (1, 1, 0):
            raise ValueError("ddp averages at every step, all at once, and merges at once")
        if self.method != "ddp" and self.overlap:
            raise ValueError("overlap is ddp's; diloco and noloco have D")
        if not 1 <= self.K <= self.m or self.m % self.K:
            raise ValueError(f"K must divide m ({self.m}), not {self.K}")
        if not 0 <= self.D <= self.m:
            raise ValueError(f"D must be from 0 to m ({self.m}), not {self.D}")
        if not 0 <= self.overlap <= 1:
            raise ValueError(f"overlap must be from 0 to 1, not {self.overlap}")


def bytes_of(method):
    """{wire: bytes of a weight}"""
    return PAIR_BYTES if method == "noloco" else SUM_BYTES


def partners(replicas):
    """To how many others a replica of NoLoCo's sends, at most."""
    return 1 if replicas % 2 == 0 else 2


# ---------------------------------------------------------------- bytes and memory


def bytes_a_step(situation, meetings):
    """What a replica sends, per inner step."""
    vector = situation.params * bytes_of(meetings.method)[meetings.wire]
    n = situation.replicas
    if meetings.method == "noloco":
        return partners(n) * vector / meetings.m
    return 2 * (n - 1) / n * vector / meetings.m


def vectors(meetings, replicas):
    """How many fp32 vectors as long as the weights a replica keeps, for Adam and the method.

    As plumbing.memory has it; in addition what the baselines' sums need in fewer bytes.
    """
    count = 4                                       # theta, its gradient and Adam's two
    if meetings.method != "ddp":
        count += 2                                  # phi and delta
    if meetings.D:
        count += 1                                  # the theta that it sent
        if meetings.method == "diloco":
            count += 1                              # and the sum
    width = bytes_of(meetings.method)[meetings.wire] / 4
    if meetings.method == "noloco":
        count += width * partners(replicas)         # what comes
        if meetings.wire == "int8":
            count += width                          # and what leaves
    elif meetings.wire == "bf16":
        count += width
    elif meetings.wire == "int8":
        count += 3                                  # what it owes, owed before, and the values
    return count


# ---------------------------------------------------------------- seconds


def message_seconds(situation, meetings):
    """Seconds that one message or sum takes, which holds a K-th of the weights: t of the wait."""
    n = situation.replicas
    latency = situation.trips * situation.latency
    size = situation.params * bytes_of(meetings.method)[meetings.wire] / meetings.K
    seconds = size / situation.rate                     # of the whole vector on one link
    levels = math.ceil(math.log2(n))
    if meetings.method == "noloco":
        return latency + partners(n) * seconds
    if meetings.wire == "int8":
        return 2 * (latency + (n - 1) / n * seconds)
    if meetings.all_reduce == "ring":
        return 2 * (n - 1) * (latency + seconds / n)
    if meetings.all_reduce == "halving":
        return 2 * levels * latency + 2 * (n - 1) / n * seconds
    return 2 * levels * (latency + seconds)


def seconds_a_step(situation, meetings, seed=0):
    """Mean seconds of an inner step with its share of the messages, in the long run (the wait).

    seed: of the seconds that are drawn where steps are uneven.
    """
    slowest = situation.slow * situation.step
    seconds = message_seconds(situation, meetings)
    seconds = max(0, seconds - meetings.overlap * slowest)
    if situation.spread:
        return drawn_seconds(situation, meetings, seconds, seed)
    hidden = min(meetings.D, meetings.m / meetings.K) * slowest
    wait = meetings.K * max(0, seconds - hidden)
    return slowest + wait / meetings.m


def share_held(situation, meetings, seed=0):
    """The share of the time in which the slowest replica does not compute."""
    slowest = situation.slow * situation.step
    return 1 - slowest / seconds_a_step(situation, meetings, seed)


def drawn_seconds(situation, meetings, seconds, seed):
    """seconds_a_step with LogNormal steps, whose mean is situation.step. seconds: t."""
    n = situation.replicas
    generator = torch.Generator().manual_seed(seed)
    variance = math.log(1 + situation.spread**2)
    slower = torch.ones(n, dtype=torch.float64)
    slower[0] = situation.slow

    def compute(steps):
        drawn = torch.randn((steps, n), generator=generator, dtype=torch.float64)
        drawn.mul_(variance**0.5).sub_(variance / 2).exp_()
        return drawn.sum(0) * situation.step * slower

    def groups(number):
        if meetings.method != "noloco":
            return torch.zeros(n, dtype=torch.int64)
        # Two neighbours in a random order are a pair; the last of an odd number joins one.
        return (torch.randperm(n, generator=generator) // 2).clamp_(max=max(0, n // 2 - 1))

    clocks = rounds_of_clocks(meetings, seconds, ROUNDS, compute, groups).mean(1)
    first = ROUNDS // 4
    return float(clocks[-1] - clocks[first]) / ((ROUNDS - 1 - first) * meetings.m)


def rounds_of_clocks(meetings, seconds, rounds, compute, groups):
    """Each replica's clock (rounds, replicas) after each m steps: B4, with messages.

    compute(steps) -> (replicas), the seconds of each one's next so many steps. groups(number) ->
    (replicas), the number of the group in which each one sends its message of that number.
    """
    m, D = meetings.m, meetings.D
    gap = m // meetings.K                   # steps from a fragment to the next
    clock = torch.zeros((), dtype=torch.float64)            # of each replica's training
    free = clock                                            # when its thread is free
    arrive = {}                             # {number of a message: when, at each replica}
    found = []
    counted = 0                             # steps that are in the clock
    for step in range(1, rounds * m + 1):
        departs = step % gap == 0
        lands = (step - D) % gap == 0
        if not departs and not lands:
            continue
        clock = clock + compute(step - counted)
        counted = step
        if departs:
            number = step // gap
            ready = torch.maximum(clock, free)
            free = latest_of_group(ready, groups(number)) + seconds
            arrive[number] = free
        if lands and step > D:
            clock = torch.maximum(clock, arrive.pop((step - D) // gap))
        if step % m == 0:
            found.append(clock)
    return torch.stack(found)


def latest_of_group(ready, group):
    """(replicas): when the last of each one's group is ready. group (replicas): its number."""
    latest = torch.zeros_like(ready)
    latest.scatter_reduce_(0, group, ready, "amax")
    return latest[group]
