"""Pairs that never wait (gossip/asynchronous.py) beside NoLoCo and DiLoCo, 90 s between hosts.

    python -m experiments.unwaiting [--scale try|plot|full] [--plot]        as root

full: 4.3 h of two idle cores. Eight hosts have a fifth of a processor each, 200 Mbit/s, 5 ms one
way. At two points, named before the runs:

    one slow host       host 5 has a tenth of a processor; DiLoCo makes inner steps by speed
    uneven steps        every step is stretched by a log-normal factor of mean 1 with sigma^2 0.5,
                        NoLoCo's own model (B4), by computing longer (experiments/clock.py)

sixteen seeds, the merged model's loss at each run's own end, pairs that never wait minus NoLoCo and
minus DiLoCo, paired, Holm's correction over the four. All by turns, as in experiments/race.py.

All send fp32, since pairs that never wait do. They have twice NoLoCo's m and so as many bytes: in m
steps a replica calls once and answers about one call, a copy of theta each.

Each method has three tries at each point, on seeds 100 and 101: m 2 without a delay, m 4 and m 10
with one of a step. Pairs that never wait have 4, 8 and 20, and need none. The lowest mean is raced.
The rate is the one that experiments/tries.py chose for both methods at all points. `full` makes the
tries first.
"""
import statistics
from dataclasses import replace
from pathlib import Path

from experiments import turns
from experiments.harness import Row, command
from experiments.race import (SECONDS, SLOW, Point, Racer, compared, of_seeds, show_load,
                              show_reasons, turns_at)
from experiments.tables import Table
from experiments.turns import counted_rows, take_turns
from train import BadInput

RATE = 0.003
WAYS = (2, 0), (4, 1), (10, 1)      # NoLoCo's and DiLoCo's m and D
TRIED = 100, 101                    # seeds


def never_waiting(m, _):
    return Racer("pairs that never wait", "noloco", RATE, 2 * m, wire="fp32",
                 clock="--never-waits")


def noloco(m, D):
    return Racer("NoLoCo", "noloco", RATE, m, D=D, wire="fp32")


def diloco(m, D):
    return Racer("DiLoCo", "diloco", RATE, m, D=D, wire="fp32")


def diloco_by_speed(m, D):
    return replace(diloco(m, D), name="DiLoCo, m by speed", clock="--by-speed")


POINTS = Point("one slow host", SLOW, ()), Point("uneven steps", "--mbit 200 --latency 5", (),
                                                 clock="--uneven")
METHODS = {"one slow host": (never_waiting, noloco, diloco_by_speed),
           "uneven steps": (never_waiting, noloco, diloco)}


# ---------------------------------------------------------------- the tries


def tries(point, method):
    """{a Racer: its Setting}"""
    found = {}
    for way in WAYS:
        racer = method(*way)
        setting = point.setting(racer, SECONDS["full"])
        found[racer] = replace(setting, label=f"{setting.label}, {racer.way}")
    return found


def tried_turns():
    """All methods by turns: a change of the machine's pace meets all of them."""
    found = []
    for seed in TRIED:
        for point in POINTS:
            for method in METHODS[point.name]:
                found += [([setting], seed) for setting in tries(point, method).values()]
    return found


def chosen(found, point, method):
    """The Racer of the lowest mean loss. found: what results/unwaiting_tuning.json holds. Raises
    BadInput where a run is missing."""
    rows, means = counted_rows(found, tried_turns()), {}
    for racer, setting in tries(point, method).items():
        by_seed = rows.get(setting.label, {})
        if len(by_seed) < len(TRIED):
            raise BadInput(f"no run yet of {setting.label}: python -m experiments.unwaiting "
                           "--scale full")
        means[racer] = statistics.mean(row["merged"] for row in by_seed.values())
    return min(means, key=means.get)


# ---------------------------------------------------------------- the race


def points(scale, out):
    """With those that race there: on the full scale those chosen, else the middle tries."""
    if scale == "try":
        return (Point("two hosts", "--mbit 200 --latency 5", (never_waiting(1, 0),),
                      clock="--uneven"),)
    found = []
    for point in POINTS:
        if scale == "full":
            kept = turns.kept(Path(out, "results", "unwaiting_tuning.json"))
            racers = [chosen(kept, point, method) for method in METHODS[point.name]]
        else:
            racers = [method(*WAYS[1]) for method in METHODS[point.name]]
        found.append(replace(point, racers=tuple(racers)))
    return found


def measure(o):
    if o.scale == "full":
        take_turns("unwaiting_tuning", tried_turns(), o)
    take_turns("unwaiting", of_seeds(turns_at(points(o.scale, o.out), o.scale), o), o)


# ---------------------------------------------------------------- what was found


def counted_in(found):
    scale = found["scale"]
    wanted = turns_at(points(scale, found["out"]), scale)
    return counted_rows(found, wanted, judged=scale == "full")


def races(found):
    """[(its name, pairs that never wait minus another)] of those that have runs."""
    rows, measured = counted_in(found), []
    for point in points(found["scale"], found["out"]):
        pairs, *others = point.racers
        for other in others:
            one = compared(rows, point.label(pairs), point.label(other))
            if one:
                measured.append((f"{point.label(pairs)} minus {other.name}", one))
    return measured


def show(found):
    measured = races(found)
    if measured:
        table = Table(f"{SECONDS[found['scale']]} s between hosts", "nats per byte")
        for name, one in measured:
            table.add(name, one)
        table.end()
    rows = counted_in(found)
    show_reasons(rows, points(found["scale"], found["out"]))
    show_load(found, rows)


def expected(found):
    return []


ROW = Row("unwaiting", measure, show, {}, expected)

if __name__ == "__main__":
    command(__doc__, ROW)
