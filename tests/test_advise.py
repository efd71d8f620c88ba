"""tools/advise.py: its formulas beside cases reckoned by hand, and a clock that goes step by step."""

import pytest

from tests.harness import captured
from tools import advise
from tools.advise import Setting, Situation, message_seconds, waiting_share

# A million parameters: 4 s in fp32 on a link, 1 s in one byte. Gloo makes the latency 0.2 s.
FOUR = Situation(params=1e6, replicas=4, step=1, rate=1e6, latency=0.1)
THREE = Situation(params=1e6, replicas=3, step=1, rate=1e6, latency=0.1)
ASKED = "--params 125e6 --step-seconds 1 --mbit 100 --latency-ms 50 --replicas 64".split()


@pytest.mark.parametrize("situation, setting, seconds", [
    (FOUR, Setting("noloco", "fp32"), 4.2),                 # 0.2 + 4
    (FOUR, Setting("noloco", "int8"), 1.2),                 # 0.2 + 1
    (FOUR, Setting("noloco", "int8", m=5, K=5), 0.4),       # 0.2 + 1 / 5
    (THREE, Setting("noloco", "fp32"), 8.2),                # 0.2 + 2 x 4: each sends to two others
    (FOUR, Setting("diloco", "fp32"), 7.2),                 # 6 rounds of 0.2 + 4 / 4
    (FOUR, Setting("ddp", "bf16"), 4.2),                    # 6 rounds of 0.2 + 2 / 4
    (FOUR, Setting("ddp", "int8"), 1.9),                    # 2 (0.2 + 3 / 4)
    (THREE, Setting("diloco", "fp32", m=2, K=2), 3.466667)])    # 4 rounds of 0.2 + 2 / 3
def test_messages_reckoned_by_hand(situation, setting, seconds):
    assert message_seconds(situation, setting) == pytest.approx(seconds)


@pytest.mark.parametrize("setting, share", [
    (Setting("noloco", "fp32", m=10), 4.2 / 14.2),
    (Setting("noloco", "fp32", m=10, D=4), 0.2 / 10.2),
    (Setting("noloco", "fp32", m=10, D=5), 0),
    (Setting("noloco", "fp32", m=10, K=5), 5 / 15),             # five messages of 0.2 + 0.8
    (Setting("noloco", "fp32", m=4, K=4, D=3), 0.8 / 4.8),      # 1.2 each, and the thread is wanted after 1
    (Setting("ddp", "int8"), 1.9 / 2.9),
    (Setting("overlapped", "bf16", D=2 / 3), 3.533333 / 4.533333)])     # 4.2 - 2 / 3
def test_waiting_reckoned_by_hand(setting, share):
    assert waiting_share(FOUR, setting) == pytest.approx(share)


@pytest.mark.parametrize("method, how, setting", [
    # 1.2 of m + 1.2 is 5% at m = 22.8; in fp32 it would be 80 steps
    ("noloco", "whole", Setting("noloco", "int8", m=23)),
    # with D = 1, 0.2 of m + 0.2: 6.3% for m = 3, 4.8% for m = 4
    ("noloco", "delayed", Setting("noloco", "int8", m=4, D=1)),
    # halves take 0.7, less than a step; in fp32 2.2. One whole message waits for 0.2 of 1.2 (m = 1)
    ("noloco", "fragments", Setting("noloco", "int8", m=2, K=2, D=1)),
    ("diloco", "whole", Setting("diloco", "int8", m=37)),           # 1.9 of m + 1.9: 36.1
    # m / 2 = 1 hides 1 of 1.9, K = 2 all but 0.15 (2 x 0.15 of 2.3); m = 3: thirds take 0.9
    ("diloco", "fragments", Setting("diloco", "int8", m=3, K=3, D=1))])
def test_the_fewest_steps_by_hand(method, how, setting):
    assert advise.advise(FOUR, method, how) == setting


def waiting_of_a_clock(setting, message, rounds=40):
    """Seconds that equal replicas wait per m steps of 1 s, late in a run that goes step by step."""
    gap = setting.m // setting.K
    clock = free = 0.0              # of the training; when its thread is free
    arrival = {}                    # when each message is there
    marks = []
    for step in range(1, rounds * setting.m + 1):
        clock += 1
        if step % gap == 0:
            free = max(clock, free) + message
            arrival[step] = free
        if step - setting.D in arrival:
            clock = max(clock, arrival[step - setting.D])
        if step % setting.m == 0:
            marks.append(clock)
    half = rounds // 2
    return (marks[-1] - marks[-1 - half]) / half - setting.m


@pytest.mark.parametrize("m, K, D", [(1, 1, 0), (1, 1, 1), (4, 1, 0), (4, 1, 2), (4, 1, 4), (4, 2, 1),
                                     (4, 2, 2), (4, 4, 1), (6, 3, 2), (6, 2, 3), (6, 6, 3)])
@pytest.mark.parametrize("params", [0.05e6, 0.4e6, 1e6, 3e6])
def test_waiting_is_that_of_a_clock_in_the_long_run(m, K, D, params):
    situation = Situation(params=params, replicas=4, step=1, rate=1e6, latency=0.1)
    setting = Setting("noloco", "fp32", m, K, D)
    waited = waiting_of_a_clock(setting, message_seconds(situation, setting))
    assert waiting_share(situation, setting) == pytest.approx(waited / (m + waited))


def test_a_fast_network_needs_neither_delay_nor_fragments_nor_one_byte():
    fast = Situation(params=1e6, replicas=4, step=1, rate=1e12, latency=1e-6)
    for method, how in (("ddp", "whole"), ("diloco", "fragments"), ("noloco", "fragments")):
        assert advise.advise(fast, method, how) == Setting(method, "fp32")


def test_the_advice_is_one_screen():
    code, text = captured(0, 1, advise.main, ASKED)
    lines = text.splitlines()
    assert not code and len(lines) <= 24 and max(map(len, lines)) <= 100, text
    assert "1.2 to 2 times the computed seconds" in text and "nothing of losses" in text
    (row,) = [line.split() for line in lines if line.startswith("NoLoCo, fragments")]
    # a fifth of 125e6 bytes at 12.5e6 a second, and 0.1; hidden for 2 s, so 5 x 0.1 of 10.5 s
    assert row[2:4] == ["2.1", "4.8%"]
    assert " ".join(row[4:]) == "--wire int8 --inner-steps 10 --fragments 5 --delay 2"
    assert text.count("waits too long") == 2                # DDP
    code, text = captured(0, 1, advise.main, [*ASKED, "--latency-ms", "1e8"])
    assert not code and text.count("waits too long, even with --inner-steps 1000") == 6
