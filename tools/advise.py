"""Which setting suits a network: for each method the fewest steps m between meetings.

    python -m tools.advise --params 125e6 --step-seconds 1 --mbit 100 --latency-ms 50 --replicas 64

Replicas shall wait for messages during at most 5% of their time. Of the settings with fewest steps
between meetings it takes the one with the shortest delay D, which costs least perplexity; then the
most exact wire; then the fewest fragments K. The formulas are those of B5 (experiments/sync.py),
with Gloo's latencies, fragments and delays. Nothing is measured.

n replicas, whose links carry `rate` bytes a second each way and do not contend. Over Gloo a message
leaves when its receiver has said that it is ready, so L is twice the latency. b bytes take

    a pair of NoLoCo's              L + b / rate
    a sum by a ring (Gloo's)        2 (n - 1) (L + b / (n rate))
    a sum in one byte a weight      2 (L + (n - 1) / n b / rate)        each part goes directly

All steps take c seconds. Every m steps each of K fragments sends a message of t seconds, m / K
steps after the fragment before it, and merges what came D steps later. One thread sends one message
at a time. So a message travels unseen for D steps, or until the next one wants the thread:

    in m steps a replica waits for      K max(0, t - min(D, m / K) c) seconds

Writing, reading and summing take no time here.
"""
import argparse
import math
from dataclasses import dataclass, replace

WAITING = 0.05          # of the time, at most
MOST_STEPS = 1000       # between meetings, that are tried
MOST = 1e15             # of any number that is asked for
GLOO = 2                # latencies that a message waits for
BACKWARD = 2 / 3        # of a step, during which an overlapped average of gradients can travel

# Bytes of a weight, by --wire of train.py, the most exact one first.
BYTES = {"ddp": {"fp32": 4, "bf16": 2, "int8": 1},
         "overlapped": {"fp32": 4, "bf16": 2},
         "diloco": {"fp32": 4, "bf16": 2, "int8": 1},
         "noloco": {"fp32": 4, "int8": 1}}
OUTER = "diloco", "noloco"      # the others meet at every step

ROWS = (        # a method, and what it does with its messages
    ("DDP", "ddp", "whole"),
    ("DDP, overlapped", "overlapped", "delayed"),
    ("DiLoCo", "diloco", "whole"),
    ("DiLoCo, delayed", "diloco", "delayed"),
    ("DiLoCo, fragments", "diloco", "fragments"),
    ("NoLoCo", "noloco", "whole"),
    ("NoLoCo, delayed", "noloco", "delayed"),
    ("NoLoCo, fragments", "noloco", "fragments"))
LINE = "{:<18}{:>12}{:>9}   {}".format
LEGEND = """\
A message, or a sum, holds all weights or a fragment of them. Fragments are delayed as well: alone
they save nothing. Overlapped: by torch's own DDP; train.py sums after the backward pass.

This is arithmetic. Between our hosts steps took 1.2 to 2 times the computed seconds. And it knows
nothing of losses: more steps between meetings, and delays, cost perplexity (docs/results.md)."""

OPTIONS = (     # name, type, smallest value, help
    ("params", float, 1, "parameters, e.g. 125e6"),
    ("step-seconds", float, 1e-6, "an inner step of the slowest replica: all wait for it"),
    ("mbit", float, 1e-6, "rate of the slowest link, each way"),
    ("latency-ms", float, 0, "from one replica to another, one way"),
    ("replicas", int, 2, "how many there are"))


@dataclass(frozen=True)
class Situation:
    """What a run finds. step: c; rate: bytes a second; latency: seconds, one way."""
    params: float
    replicas: int
    step: float
    rate: float
    latency: float


@dataclass(frozen=True)
class Setting:
    """How replicas meet: --method, --wire, --inner-steps (m), --fragments (K), --delay (D).

    Where DDP is overlapped, its average travels unseen for two thirds of a step: that is its D.
    """
    method: str
    wire: str
    m: int = 1
    K: int = 1
    D: float = 0


# ---------------------------------------------------------------- the formulas


def exchange_seconds(situation, size):
    """A pair's exchange of b bytes: L + b / rate.

    Of an odd number of replicas three meet, and each sends twice: L + 2 b / rate.
    """
    sends = 1 + situation.replicas % 2
    return GLOO * situation.latency + sends * size / situation.rate


def ring_seconds(situation, size):
    """A sum of b bytes by a ring: 2 (n - 1) (L + b / (n rate))."""
    n = situation.replicas
    return 2 * (n - 1) * (GLOO * situation.latency + size / (n * situation.rate))


def direct_seconds(situation, size):
    """A sum of b bytes whose parts go directly: 2 (L + (n - 1) / n b / rate)."""
    n = situation.replicas
    return 2 * (GLOO * situation.latency + (n - 1) / n * size / situation.rate)


def message_seconds(situation, setting):
    """t: seconds of one message or sum, which holds a K-th of the weights."""
    size = BYTES[setting.method][setting.wire] * situation.params / setting.K
    if setting.method == "noloco":
        return exchange_seconds(situation, size)
    if setting.wire == "int8":
        return direct_seconds(situation, size)
    return ring_seconds(situation, size)


def waiting_share(situation, setting):
    """The share of the time that a replica waits: w / (m c + w).

    w = K max(0, t - min(D, m / K) c).
    """
    unseen = min(setting.D, setting.m / setting.K) * situation.step
    wait = setting.K * max(0, message_seconds(situation, setting) - unseen)
    return wait / (setting.m * situation.step + wait)


def delay_for(situation, setting):
    """The shortest D with which a replica waits little enough, but at most m / 2 and m / K.

    K (t - D c) = m c s, where s = 0.05 / 0.95, so D is t / c - m s / K, rounded up. Beyond m / 2
    replicas come together slowly (docs/stability.md); where m is 1, D may be 1.
    """
    if setting.method == "overlapped":
        return BACKWARD
    longest = min(max(1, setting.m // 2), setting.m // setting.K)
    allowed = WAITING / (1 - WAITING) * setting.m / setting.K
    needed = math.ceil(message_seconds(situation, setting) / situation.step - allowed)
    return min(longest, max(0, needed))


# ---------------------------------------------------------------- the search


def candidates(situation, method, how, m):
    """Settings that meet every m steps: each wire and number of fragments once, preferred first."""
    numbers = [1]
    if how == "fragments":
        numbers = [K for K in range(1, m + 1) if m % K == 0]
    found = []
    for wire in BYTES[method]:
        for K in numbers:
            setting = Setting(method, wire, m, K)
            if how != "whole":
                setting = replace(setting, D=delay_for(situation, setting))
            found.append(setting)
    return found


def advise(situation, method, how):
    """The Setting with the fewest steps between meetings. If replicas wait too long with each that
    is tried: the one with which they wait least.
    """
    for m in range(1, most_steps(method) + 1):
        tried = candidates(situation, method, how, m)
        enough = [setting for setting in tried if waiting_share(situation, setting) <= WAITING]
        if enough:
            return min(enough, key=lambda setting: setting.D)       # the first of equal ones
    return min(tried, key=lambda setting: waiting_share(situation, setting))


def most_steps(method):
    return MOST_STEPS if method in OUTER else 1


# ---------------------------------------------------------------- the screen


def print_advice(situation):
    """What was asked, a row for each method, and what the words mean."""
    s = situation
    print(f"{s.params / 1e6:g}M parameters, {s.replicas} replicas, {s.step:g} s a step, "
          f"{s.rate * 8 / 1e6:g} Mbit/s, {s.latency * 1000:g} ms.\n"
          f"The fewest --inner-steps with which replicas wait at most {WAITING:.0%} of the time:")
    print("\n" + LINE("", "s a message", "waiting", "options of train.py, beside --method"))
    for name, method, how in ROWS:
        setting = advise(situation, method, how)
        seconds = message_seconds(situation, setting)
        share = waiting_share(situation, setting)
        words = options_of(setting)
        if share > WAITING:
            words = "waits too long"
            if method in OUTER:
                words += f", even with --inner-steps {MOST_STEPS}"
        print(LINE(name, f"{seconds:.3g}", f"{share:.1%}", words))
    print("\n" + LEGEND)


def options_of(setting):
    """The setting as options of train.py, beside --method."""
    if setting.method == "overlapped":
        return f"not in train.py; {setting.wire}"
    words = f"--wire {setting.wire}"
    if setting.method in OUTER:
        words += f" --inner-steps {setting.m} --fragments {setting.K} --delay {setting.D}"
    return words


class OneLineParser(argparse.ArgumentParser):
    """argparse, but a mistake is one line."""

    def error(self, message):
        self.exit(2, f"error: {message} (see --help)\n")


def main(argv=None):
    parser = OneLineParser("python -m tools.advise", description=__doc__, allow_abbrev=False,
                           formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, kind, _, text in OPTIONS:
        parser.add_argument(f"--{name}", type=kind, required=True, help=text)
    o = parser.parse_args(argv)
    for name, _, least, _ in OPTIONS:
        value = getattr(o, name.replace("-", "_"))
        if not least <= value <= MOST:
            parser.error(f"--{name} must be from {least:g} to {MOST:g}, got {value:g}")
    print_advice(Situation(params=o.params, replicas=o.replicas, step=o.step_seconds,
                           rate=o.mbit * 1e6 / 8, latency=o.latency_ms / 1000))


if __name__ == "__main__":
    main()
