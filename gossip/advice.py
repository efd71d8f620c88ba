"""Which setting suits a network: python bench_sync.py --advise.

    python bench_sync.py --advise --params 125e6 --step-seconds 1 --mbit 100 --latency-ms 50 \\
        --replicas 64

For each method: the fewest steps m between meetings with which messages hold the slowest replica
for less than 5% of the time. Of the settings with this m the one with the shortest delay D, which
costs least perplexity; then the most exact wire; then the fewest fragments K. D is at most m / 2
(docs/stability.md; 1 where m = 1). gossip/pace.py has the formulas and what they leave out. The
advice says nothing of losses.
"""
import os
from dataclasses import replace

from gossip.pace import (ALL_REDUCES, GLOO, Meetings, Situation, bytes_a_step, bytes_of,
                         message_seconds, seconds_a_step, share_held, vectors)

HELD = 0.05             # of the time, by messages
MOST_STEPS = 1000       # m that are tried
BACKWARD = 2 / 3        # of a step, during which an overlapped average of DDP's can travel

OPTIONS = (     # name, type, smallest value, largest value, default (None: must be given), help
    ("params", float, 1, 1e15, None, "parameters, e.g. 125e6"),
    ("step-seconds", float, 1e-6, 1e9, None, "seconds of an inner step"),
    ("mbit", float, 1e-6, 1e15, None, "rate of a replica's link, each way; of the slowest link "
     "where they differ: all wait for it"),
    ("latency-ms", float, 0, 1e9, None, "from one replica to another, one way"),
    ("replicas", int, 2, 1_000_000, None, "how many replicas there are"),
    ("slow", float, 1, 1e6, 1.0, "how many times as long the slowest replica's steps take "
     "(default: 1)"),
    ("step-std", float, 0, 5, 0.0, "the std of a step's seconds over their mean; the paper's B4 "
     "has 0.81 (default: 0). The settings stay, their seconds are drawn"),
    ("trips", int, 1, 10, GLOO, "for how many latencies a message waits: over Gloo 2, the "
     "default; in B5 of bench_sync.py 1; over NCCL not measured"),
)


# ---------------------------------------------------------------- the search


def advise(situation, method, at_once=False, **kind):
    """The Meetings that are advised, or None where messages hold every one tried for too long.

    at_once: only D = 0 and K = 1. kind: all_reduce and overlap of the Meetings. Steps are taken to
    be even.
    """
    even = replace(situation, spread=0)
    for m in range(1, most_steps(method) + 1):
        enough = []
        for longest in longest_delays(method, m, at_once, kind):
            if share_held(even, longest) < HELD:
                enough.append(shortest_delay(even, longest))
        if enough:
            return min(enough, key=plainness)
    return None


def most_steps(method):
    return 1 if method == "ddp" else MOST_STEPS


def longest_delays(method, m, at_once, kind):
    """Meetings every m steps, each wire and K once, with the longest delay: it holds the least.

    Beyond m / K steps a delay hides no more (the wait).
    """
    found = []
    fragments = divisors(m)
    if at_once:
        fragments = [1]
    for wire in bytes_of(method):
        for K in fragments:
            D = min(m // K, max(1, m // 2))
            if at_once or method == "ddp":
                D = 0
            found.append(Meetings(method, wire, m, K, D, **kind))
    return found


def shortest_delay(situation, longest):
    """Meetings like these with the shortest delay that is long enough."""
    for D in range(longest.D):
        shorter = replace(longest, D=D)
        if share_held(situation, shorter) < HELD:
            return shorter
    return longest


def plainness(meetings):
    """What is least is preferred, among meetings with one m."""
    wires = list(bytes_of(meetings.method))
    return meetings.D, wires.index(meetings.wire), meetings.K


def divisors(m):
    return [K for K in range(1, m + 1) if m % K == 0]


def least_held(situation, method, at_once=False, **kind):
    """The Meetings that hold the least, of those with the largest m that is tried."""
    even = replace(situation, spread=0)
    tried = longest_delays(method, most_steps(method), at_once, kind)
    return min(tried, key=lambda meetings: share_held(even, meetings))


# ---------------------------------------------------------------- the screen

HEADINGS = "", "m", "K", "D", "wire", "MB a step", "s a message", "s a step", "held", "GB"
ROW = "{:<20}{:>5}{:>5}{:>5}{:>6}{:>11}{:>13}{:>10}{:>7}{:>8}"


def print_advice(situation, all_reduce):
    """One screen: what was asked, a row for each method, and what the words mean."""
    print(question(situation))
    print()
    print(ROW.format(*HEADINGS))
    sums = {"all_reduce": all_reduce}
    for name, method, limits in (
            ("DDP", "ddp", sums),
            ("DDP, overlapped", "ddp", dict(sums, overlap=BACKWARD)),
            ("DiLoCo", "diloco", sums),
            ("DiLoCo, at once", "diloco", dict(sums, at_once=True)),
            ("NoLoCo", "noloco", {}),
            ("NoLoCo, at once", "noloco", {"at_once": True})):
        print(row(name, situation, method, limits))
    print()
    print(legend(situation, all_reduce))


def question(situation):
    """What is looked for, in two lines; x and y are those of the map in README."""
    mbit = situation.rate * 8 / 1e6
    return (f"{situation.params / 1e6:g}M parameters, {situation.replicas} replicas, "
            f"{situation.step:g} s a step, {mbit:g} Mbit/s, {situation.latency * 1000:g} ms "
            f"(on README's map x = {situation.params / situation.rate / situation.step:.2g}, "
            f"y = {situation.latency / situation.step:.2g}).\n"
            f"The fewest steps m between meetings with which messages hold the run for less than "
            f"{HELD:.0%}:")


def row(name, situation, method, limits):
    """A method's line: its setting and what it costs, or that there is none."""
    meetings = advise(situation, method, **limits)
    if meetings is None:
        best = least_held(situation, method, **limits)
        held = share_held(replace(situation, spread=0), best)
        tried = "" if method == "ddp" else f" for m up to {MOST_STEPS}"
        return (f"{name:<20} none{tried}: at best (K {best.K}, D {best.D}, {best.wire}) a message "
                f"takes {message_seconds(situation, best):.3g} s, held {held:.1%}")
    seconds = seconds_a_step(situation, meetings)
    held = 1 - situation.slow * situation.step / seconds
    memory = 4 * vectors(meetings, situation.replicas) * situation.params
    return ROW.format(
        name, meetings.m, meetings.K, meetings.D, meetings.wire,
        f"{bytes_a_step(situation, meetings) / 1e6:.3g}",
        f"{message_seconds(situation, meetings):.3g}", f"{seconds:.4g}", f"{held:.1%}",
        f"{memory / 1e9:.3g}")


def legend(situation, all_reduce):
    lines = [
        "m: --inner-steps, K: --fragments, D: --delay. At once: D = 0, K = 1, as in the papers.",
        f"Sums in fp32 and bf16 go by {all_reduce}; in int8 each part goes directly.",
        "DDP's sums begin after the backward pass, as in train.py; overlapped, two thirds of a "
        "step earlier.",
        "MB a step: what a replica sends. Held: of the time, beyond the slowest replica's steps.",
        "GB: weights, gradient, Adam and what the method keeps, without activations.",
        "Encoding and summing take no time here. Of losses this says nothing: docs/results.md."]
    if situation.trips > 1:
        over = ", as over Gloo" if situation.trips == GLOO else ""
        lines.append(f"A message waits for {situation.trips} latencies{over}; --trips 1: as in B5.")
    if situation.slow > 1:
        lines.append(f"One replica's steps take {situation.slow:g} times as long: all wait for it, "
                     "whatever the method.")
    if situation.spread:
        lines.append(f"Settings are those for even steps. Seconds and held are drawn, with steps "
                     f"of std {situation.spread:g} of their mean.")
    return "\n".join(lines)


# ---------------------------------------------------------------- the command line


def main(argv, parser_class):
    """What --advise does. parser_class: an ArgumentParser that tells a mistake in one line."""
    parser = parser_class(prog="bench_sync.py --advise", allow_abbrev=False,
                          description="The setting with the fewest steps between meetings.")
    for name, kind, _, _, default, text in OPTIONS:
        parser.add_argument(f"--{name}", type=kind, required=default is None, default=default,
                            help=text)
    parser.add_argument("--all-reduce", choices=ALL_REDUCES, default="ring",
                        help="how sums in fp32 and bf16 go (default: ring, as Gloo's)")
    o = parser.parse_args(argv)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        parser.error("--advise needs no torchrun: python bench_sync.py --advise ...")
    for name, _, least, most, *_ in OPTIONS:
        value = getattr(o, name.replace("-", "_"))
        if not least <= value <= most:
            parser.error(f"--{name} must be from {least} to {most:g}, got {value:g}")
    situation = Situation(params=o.params, replicas=o.replicas, step=o.step_seconds,
                          rate=o.mbit * 1e6 / 8, latency=o.latency_ms / 1000,
                          spread=o.step_std, slow=o.slow, trips=o.trips)
    print_advice(situation, o.all_reduce)
