"""gossip/pace.py beside a clock that ticks, and B1 to B5; gossip/advice.py beside all settings."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import bench_sync
from gossip import SUMS, OneByte
from gossip.advice import HELD, advise, plainness
from gossip.pace import (Meetings, Situation, bytes_a_step, bytes_of, message_seconds, rounds_of_clocks,
                         seconds_a_step, share_held, vectors)
from noloco import random_groups
from plumbing import memory
from tests.harness import captured

ASKED = ["--advise", "--params", "125e6", "--step-seconds", "1", "--mbit", "100", "--latency-ms", "50",
         "--replicas", "64"]
SMALL = Situation(params=1e6, replicas=8, step=1, rate=1e6, latency=0.1)


class Ticking:
    """A replica of the oracle: its training, and the queue of its thread. Times are whole ticks.

    compute(step) -> ticks of an inner step; the first is 1. message: ticks of a message. A fragment
    is due by the rule of NoLoCo.due: fragment k at the steps s + 1 with (s + 1 - k m // K) % m == 0.
    """

    def __init__(self, meetings, message, compute):
        self.meetings = meetings
        self.gap = meetings.m // meetings.K
        self.message = message
        self.compute = compute
        self.left = compute(1)
        self.step = 0               # inner steps whose arithmetic is done
        self.merged = 0             # those of them that are over
        self.queue = []             # [number of a message, ticks left], the oldest first
        self.arrived = set()
        self.ends = []              # when each step was over, its merge included

    def move(self, time):
        """Do what takes no time. Returns whether there was anything."""
        if self.queue and self.queue[0][1] == 0:
            number, _ = self.queue.pop(0)
            self.arrived.add(number)
            return True
        if self.left == 0 and self.step == self.merged:
            self.step += 1
            m, K = self.meetings.m, self.meetings.K
            due = [k for k in range(K) if (self.step - k * m // K) % m == 0]
            assert len(due) <= 1
            if due:
                self.queue.append([self.step // self.gap, self.message])
            return True
        if self.step > self.merged and not self.waits():
            self.merged += 1
            self.ends.append(time)
            self.left = self.compute(self.step + 1)
            return True
        return False

    def waits(self):
        """Whether a message is not there that this step merges."""
        number, rest = divmod(self.step - self.meetings.D, self.gap)
        return rest == 0 and number > 0 and number not in self.arrived

    def sends(self):
        """The number of the message that its thread has come to, or None."""
        return self.queue[0][0] if self.queue else None


def ticked(meetings, message, steps, computes, groups):
    """When each replica (steps, replicas) ended its steps, by a clock that ticks.

    groups(number) -> the groups, tuples of replicas, that exchange the message of that number.
    """
    replicas = [Ticking(meetings, message, compute) for compute in computes]
    time = 0
    while any(len(r.ends) < steps for r in replicas):
        for r in replicas:
            while r.move(time):
                pass
        time += 1
        heads = [r.sends() for r in replicas]
        for i, r in enumerate(replicas):
            if r.left > 0:
                r.left -= 1
            if heads[i] is None:
                continue
            group = next(group for group in groups(heads[i]) if i in group)
            if all(heads[j] == heads[i] for j in group):        # the partners have come to it, too
                r.queue[0][1] -= 1
    return torch.tensor([r.ends[:steps] for r in replicas]).T


def pairs_of(meetings, n):
    """groups(number) of `ticked`."""
    everyone = [tuple(range(n))]
    return lambda number: everyone if meetings.method == "diloco" else random_groups(range(n), 2, number, 0)


@pytest.mark.parametrize("method", ["diloco", "noloco"])
@pytest.mark.parametrize("m, K, D, message, slow", [
    (1, 1, 0, 7, 1), (1, 1, 1, 7, 1), (1, 1, 1, 13, 1), (4, 1, 0, 25, 1), (4, 1, 2, 25, 1), (4, 1, 2, 19, 1),
    (4, 1, 4, 50, 1), (4, 2, 0, 3, 1), (4, 2, 1, 17, 1), (4, 2, 2, 21, 1), (4, 2, 3, 21, 1), (4, 4, 1, 9, 1),
    (4, 4, 1, 14, 1), (4, 4, 3, 14, 1), (4, 4, 4, 9, 1), (6, 3, 2, 23, 1), (6, 3, 1, 23, 1), (6, 2, 3, 31, 1),
    (4, 2, 1, 17, 2), (4, 4, 3, 14, 2), (4, 4, 3, 27, 2), (4, 1, 0, 25, 2)])
def test_the_wait_is_that_of_a_ticking_clock(method, m, K, D, message, slow):
    """4 replicas, steps of 10 ticks; one is slow. In the long run the formula is exact."""
    n, step = 4, 10
    meetings = Meetings(method, m=m, K=K, D=D)
    computes = [lambda s, factor=factor: step * factor for factor in (slow, 1, 1, 1)]
    ends = ticked(meetings, message, 14 * m, computes, pairs_of(meetings, n))
    measured = (ends[-1] - ends[6 * m - 1]) / (8 * m)
    # b / rate alone, so that one message takes so many ticks
    situation = Situation(params=1, replicas=n, step=step, rate=1, latency=0, slow=slow)
    situation = replace(situation, rate=message_seconds(situation, meetings) / message)
    assert message_seconds(situation, meetings) == pytest.approx(message)
    expected = seconds_a_step(situation, meetings)
    assert float(measured[0]) == pytest.approx(expected)                # the slow one's clock decides
    if slow == 1 or method == "diloco":
        assert float(measured.max()) == pytest.approx(expected)


def test_a_slow_replica_keeps_all_others_waiting_with_random_pairs_too():
    meetings = Meetings("noloco", m=2, K=2, D=1)
    computes = [lambda s, ticks=ticks: ticks for ticks in (9, 3, 3, 3, 3, 3)]
    ends = ticked(meetings, 4, 120, computes, pairs_of(meetings, 6))
    pace = (ends[-1] - ends[19]) / 100
    assert pace.tolist() == pytest.approx([9] * 6, rel=0.05)


@pytest.mark.parametrize("method", ["diloco", "noloco"])
@pytest.mark.parametrize("m, K, D", [
    (1, 1, 0), (1, 1, 1), (4, 1, 0), (4, 1, 2), (4, 2, 1), (4, 4, 3), (6, 3, 2)])
def test_clocks_with_uneven_steps_are_those_of_the_ticking_clock(method, m, K, D):
    n, rounds = 4, 5
    message = 17 // K
    generator = torch.Generator().manual_seed(1)
    ticks = torch.randint(2, 20, (rounds * m + 2, n), generator=generator)
    meetings = Meetings(method, m=m, K=K, D=D)
    groups = pairs_of(meetings, n)
    done = 0

    def compute(steps):
        nonlocal done
        done += steps
        return ticks[done - steps + 1:done + 1].sum(0).double()

    def numbered(number):
        found = torch.zeros(n, dtype=torch.int64)
        for index, group in enumerate(groups(number)):
            found[list(group)] = index
        return found

    computes = [lambda s, i=i: int(ticks[min(s, rounds * m), i]) for i in range(n)]
    expected = ticked(meetings, message, rounds * m, computes, groups)
    clocks = rounds_of_clocks(meetings, message, rounds, compute, numbered)
    assert clocks.tolist() == expected[m - 1::m].tolist()


@pytest.mark.parametrize("n", [4, 64])
def test_messages_take_what_bench_sync_simulates(n):
    """B2 and B5, without spread."""
    situation = replace(SMALL, replicas=n, latency=0.5)
    whole = 4 * situation.params / situation.rate
    samples = bench_sync.reductions(n, 0, situation.latency, whole, torch.Generator())
    simulated = {name: float(sample()[0]) for name, sample in samples.items()}
    computed = {"NoLoCo here, one exchange": message_seconds(situation, Meetings("noloco"))}
    for name, way in (("ring", "ring"), ("tree", "tree"), ("halving and doubling", "halving")):
        computed[name] = message_seconds(situation, Meetings("diloco", all_reduce=way))
    assert computed == pytest.approx({name: simulated[name] for name in computed}, rel=1e-5)


def test_uneven_steps_make_replicas_wait_as_in_b4():
    """Without messages: DiLoCo's clock over NoLoCo's, which bench_sync draws in another way."""
    n, m = 16, 4
    b4 = math.sqrt(math.exp(0.5) - 1)
    total = bench_sync.training(n, (m,), (25, 100), 16, torch.Generator().manual_seed(0))
    free = replace(SMALL, replicas=n, step=math.exp(1.25), rate=1e30, latency=0, spread=b4)
    for method, name in (("diloco", "DiLoCo"), ("noloco", "NoLoCo")):
        drawn = (total[name][1] - total[name][0]).mean() / (75 * m)
        mine = [seconds_a_step(free, Meetings(method, m=m), seed) for seed in range(8)]
        assert sum(mine) / 8 == pytest.approx(float(drawn), rel=0.02)
    # A delay lets a replica run ahead of a late one.
    waits = [seconds_a_step(free, Meetings("noloco", m=m, D=D)) for D in (0, 2)]
    assert waits[0] > waits[1] > free.step


def test_an_overlapped_average_hides_behind_its_share_of_the_step():
    situation = replace(SMALL, rate=7e6, latency=0)                     # 4e6 bytes: 1 s by ring
    seconds = [seconds_a_step(situation, Meetings("ddp", overlap=share)) for share in (0, 2 / 3, 1)]
    assert seconds == pytest.approx([2, 4 / 3, 1])


@pytest.mark.parametrize("wire", SUMS)
@pytest.mark.parametrize("n", [2, 8])
def test_bytes_are_those_of_the_sums_and_codecs(wire, n):
    situation = replace(SMALL, replicas=n, params=1 << 20)
    sums = object.__new__(SUMS[wire])           # without a process group
    sums.n = n
    total = sums.bytes(1 << 20)
    for method in ("ddp", "diloco"):
        assert bytes_a_step(situation, Meetings(method, wire)) == total
    assert bytes_a_step(situation, Meetings("diloco", wire, m=4, K=2)) == total / 4
    codec = OneByte()
    codec.fit(torch.zeros(1 << 20), [1 << 20])
    pair = bytes_a_step(situation, Meetings("noloco", "int8"))
    assert pair == pytest.approx(codec.bytes(1 << 20), rel=1e-4)


@pytest.mark.parametrize("method, wire, D", [
    ("ddp", "fp32", 0), ("diloco", "fp32", 0), ("diloco", "fp32", 1), ("noloco", "fp32", 0),
    ("noloco", "fp32", 1), ("noloco", "int8", 0), ("noloco", "int8", 1)])
def test_memory_is_that_of_train(method, wire, D):
    o = SimpleNamespace(method=method, wire=wire, delay=D, group_size=2, gamma=None, alpha=0, beta=1)
    assert vectors(Meetings(method, wire, m=1, D=D), 8) == memory.vectors(o, 8)


@pytest.mark.parametrize("method", ["ddp", "diloco", "noloco"])
@pytest.mark.parametrize("mbit", [3, 30, 300, 3000])
def test_no_setting_tried_has_fewer_steps_between_meetings(method, mbit):
    """Every m, K that divides it, and D, none left out."""
    situation = replace(SMALL, rate=mbit * 1e6 / 8)

    def every(m):
        delays = [0] if method == "ddp" else range(max(1, m // 2) + 1)
        for wire in bytes_of(method):
            for K in range(1, m + 1):
                if m % K == 0:
                    yield from (Meetings(method, wire, m, K, D) for D in delays)

    def fits(meetings):
        return share_held(situation, meetings) < HELD

    found = advise(situation, method)
    if found is None:
        assert method == "ddp" and not any(fits(meetings) for meetings in every(1))
        return
    assert fits(found)
    assert not any(fits(meetings) for m in range(1, found.m) for meetings in every(m))
    assert plainness(found) == min(plainness(meetings) for meetings in every(found.m) if fits(meetings))


def test_a_fast_network_needs_neither_delay_nor_short_messages():
    fast = replace(SMALL, rate=1e12, latency=1e-6)
    for method in ("ddp", "diloco", "noloco"):
        assert advise(fast, method) == Meetings(method)
    far = replace(fast, latency=1e6)
    assert advise(far, "noloco") is None
    at_once = advise(SMALL, "diloco", at_once=True)
    assert (at_once.K, at_once.D) == (1, 0) and at_once.m > advise(SMALL, "diloco").m


@pytest.mark.parametrize("settings, error", [
    (("fedavg",), "method is"), (("noloco", "bf16"), "no wire bf16"), (("ddp", "fp32", 2), "every step"),
    (("diloco", "fp32", 5, 2), "K must divide m"), (("noloco", "fp32", 4, 1, 5), "D must be from 0 to m"),
    (("ddp", "fp32", 1, 1, 0, "star"), "all_reduce"), (("ddp", "fp32", 1, 1, 0, "ring", 2), "overlap must"),
    (("diloco", "fp32", 1, 1, 0, "ring", 0.5), "overlap is ddp's")])
def test_meetings_that_do_not_exist_are_refused(settings, error):
    with pytest.raises(ValueError, match=error):
        Meetings(*settings)


def test_advice_is_one_screen():
    code, text = captured(0, 1, bench_sync.main, ASKED)
    lines = text.splitlines()
    assert not code and len(lines) <= 24 and max(map(len, lines)) <= 100, text
    rows = {line[:20].strip(): line[20:].split() for line in lines[4:10]}
    assert rows["NoLoCo"] == ["10", "5", "2", "int8", "12.5", "2.1", "1.05", "4.8%", "3.75"]
    assert rows["DDP"][0] == "none:" and "20" in rows["DDP"] and "--trips 1" in text
    code, text = captured(0, 1, bench_sync.main, [*ASKED, "--trips", "1"])      # as on paper
    (row,) = [line for line in text.splitlines() if line.startswith("NoLoCo  ")]
    assert row.split()[1:] == ["10", "10", "1", "int8", "12.5", "1.05", "1.05", "4.8%", "3.75"]
    code, text = captured(0, 1, bench_sync.main, [*ASKED, "--slow", "1.5", "--step-std", "0.3"])
    assert not code and "1.5 times as long" in text and "std 0.3" in text
    code, text = captured(0, 1, bench_sync.main, [*ASKED, "--latency-ms", "1e8"])
    assert not code and text.count("none for m up to 1000") == 4
