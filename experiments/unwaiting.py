"""Pairs that never wait (gossip/asynchronous.py) beside NoLoCo and DiLoCo, 90 s between hosts.

    python -m experiments.unwaiting [--scale try|plot|full] [--plot]        as root

full: 3.6 h of two idle cores. Eight hosts have a fifth of a processor each, 200 Mbit/s, 5 ms one
way. At two points, named before the runs:

    one slow host       host 5 has a tenth of a processor; DiLoCo makes inner steps by speed
    uneven steps        a step takes f times as long as two plain ones, but no less than one, by
                        computing longer (experiments/clock.py); f is log-normal with mean 1 and
                        sigma^2 0.5, NoLoCo's own model (B4), on every host

sixteen seeds, the merged model's loss at each run's own end, pairs that never wait minus NoLoCo and
minus DiLoCo, paired, Holm's correction over the four. All by turns, as in experiments/race.py.

With one slow host NoLoCo has equal m; pairs that never wait need no m by speed. All send fp32,
since pairs that never wait do.

NoLoCo and DiLoCo have three tries each with one slow host, on seeds 100 and 101: m 2 without a
delay, m 4 and m 10 with one of a step. At uneven steps they have a fourth, m 20: of the first three
both did best with m 10. The lowest mean is raced. Pairs that never wait have twice NoLoCo's m and
so as many bytes a step: in m steps a replica calls once and answers about one call, a copy of theta
each. The rate is the one that experiments/tries.py chose for NoLoCo and DiLoCo, in one byte; for
pairs that never wait none was searched. `full` makes the tries first.

Pairs that never wait evaluate once, at the end. At uneven steps the others do so, too: before it
all would wait for all, which no outer step of pairs asks for. With one slow host the others
evaluate on the way, as in experiments/race.py: there all wait for that host anyway, or have just
done an outer step of all.
"""
import statistics
from dataclasses import replace
from pathlib import Path

from experiments import turns
from experiments.harness import Row, command
from experiments.pictures import COLOURS, GREY, WIDTH, counted, differences, frame
from experiments.race import (SECONDS, SLOW, Point, Racer, compared, counted_at, of_seeds,
                              show_load, show_reasons, turns_at)
from experiments.tables import Expected, Table, sure
from experiments.tries import Contest
from experiments.turns import take_turns

RATE = 0.003
WAYS = {                            # NoLoCo's and DiLoCo's m and D
    "one slow host": [(2, 0), (4, 1), (10, 1)],
    "uneven steps": [(2, 0), (4, 1), (10, 1), (20, 1)],
}
TRIED = 100, 101                    # seeds


def never_waiting(noloco):
    """With as many bytes a step."""
    return Racer("pairs that never wait", "noloco", RATE, 2 * noloco.m, wire="fp32",
                 clock="--never-waits")


def noloco(m, D):
    return Racer("NoLoCo", "noloco", RATE, m, D=D, wire="fp32")


def diloco(m, D):
    return Racer("DiLoCo", "diloco", RATE, m, D=D, wire="fp32")


def diloco_by_speed(m, D):
    return replace(diloco(m, D), name="DiLoCo, m by speed", clock="--by-speed")


def noloco_once(m, D):
    return replace(noloco(m, D), clock="--one-evaluation")


def diloco_once(m, D):
    return replace(diloco(m, D), clock="--one-evaluation")


METHODS = {                         # NoLoCo and DiLoCo; pairs that never wait follow NoLoCo
    Point("one slow host", SLOW, ()): (noloco, diloco_by_speed),
    Point("uneven steps", "--mbit 200 --latency 5", (), clock="--uneven"):
        (noloco_once, diloco_once),
}


# ---------------------------------------------------------------- the tries


def contests(point):
    """One for NoLoCo, one for DiLoCo."""
    found = []
    for method in METHODS[point]:
        tries = [method(*way) for way in WAYS[point.name]]
        found.append(Contest(point, tries, TRIED, "experiments.unwaiting --scale full"))
    return found


def tried_turns():
    """All methods by turns: a change of the machine's pace meets all of them."""
    found = []
    for seed in TRIED:
        for point in METHODS:
            for contest in contests(point):
                found += [([contest.setting(racer)], seed) for racer in contest.tries]
    return found


# ---------------------------------------------------------------- the race


def points(scale, out):
    """With those that race there: on the full scale NoLoCo and DiLoCo with the lowest mean loss of
    their tries, else with the second. Raises BadInput where a try is missing."""
    if scale == "try":
        return (Point("two hosts", "--mbit 200 --latency 5", (never_waiting(noloco(1, 0)),),
                      clock="--uneven"),)
    kept = turns.kept(Path(out, "results", "unwaiting_tuning.json"))
    found = []
    for point in METHODS:
        racers = [contest.tries[1] for contest in contests(point)]
        if scale == "full":
            racers = [contest.best(kept, contest.tries, TRIED)[0] for contest in contests(point)]
        found.append(replace(point, racers=(never_waiting(racers[0]), *racers)))
    return found


def measure(o):
    if o.scale == "full":
        take_turns("unwaiting_tuning", tried_turns(), o)
    take_turns("unwaiting", of_seeds(turns_at(points(o.scale, o.out), o.scale), o), o)


# ---------------------------------------------------------------- what was found


def races(found):
    """[(point, another method, pairs that never wait minus it)] of those that have runs."""
    raced = points(found["scale"], found["out"])
    rows, measured = counted_at(raced, found), []
    for point in raced:
        pairs, *others = point.racers
        for other in others:
            one = compared(rows, point.label(pairs), point.label(other))
            if one:
                measured.append((point, other, one))
    return measured


def show(found):
    raced = points(found["scale"], found["out"])
    measured = races(found)
    if measured:
        table = Table(f"{SECONDS[found['scale']]} s between hosts: pairs that never wait minus",
                      "nats per byte")
        for point, other, one in measured:
            table.add(point.label(other), one)
        table.end()
    rows = counted_at(raced, found)
    if rows:
        table = Table("training", "seconds, mean", "least", "most")
        for label, by_seed in rows.items():
            seconds = [row["seconds"] for row in by_seed.values()]
            table.add(label, f"{statistics.mean(seconds):.1f}", f"{min(seconds):.1f}",
                      f"{max(seconds):.1f}")
        table.end()
    show_reasons(rows, raced)
    show_load(found, rows)


def draw(plt, found):
    """Pairs that never wait minus each other method, with intervals; grey where it is not sure."""
    measured = races(found)
    comparisons = [one for _, _, one in measured]
    names = [f"{point.name}:\nminus {other.name}" for point, other, _ in measured]
    colours = [COLOURS["25%"] if stays else GREY for stays in sure(comparisons)]
    figure, axis = plt.subplots(figsize=(WIDTH, 2.0 + 0.5 * len(measured)))
    differences(axis, comparisons, colours, names)
    axis.set(xlabel="nats per byte, pairs that never wait minus the other")
    seeds = max((len(one.differences) for one in comparisons), default=0)
    frame(figure, found, finding(comparisons), "Pairs that never wait, between hosts",
          f"{SECONDS[found['scale']]} s between eight hosts of one machine, fp32, as many bytes a "
          f"step as NoLoCo. Merged models, {counted(seeds, 'seed')}; bars: 95% intervals.")
    return figure


def finding(comparisons):
    """In how many pairs that never wait ended lower, and higher, beyond doubt."""
    if not comparisons or any(one.p is None for one in comparisons):
        return ""                   # one seed
    lower = [one.mean < 0 for one, stays in zip(comparisons, sure(comparisons)) if stays]
    return (f"Of {len(comparisons)} comparisons, pairs that never wait ended lower in "
            f"{lower.count(True)}, higher in {lower.count(False)}")


EXPECTED = {                        # {(point, another method): nats per byte}
    ("one slow host", "NoLoCo"): -0.295, ("one slow host", "DiLoCo, m by speed"): -0.061,
    ("uneven steps", "NoLoCo"): -0.040, ("uneven steps", "DiLoCo"): -0.066,
}


def expected(found):
    judged = found["scale"] == "full"
    numbers = []
    for point, other, one in races(found):
        if (point.name, other.name) in EXPECTED:
            what = f"{point.name}: pairs that never wait minus {other.name}, nats per byte"
            value = EXPECTED[point.name, other.name]
            numbers.append(Expected(what, one.mean, value, 0.05, "+.3f", judged))
    return numbers


ROW = Row("unwaiting", measure, show, {"unwaiting": draw}, expected)

if __name__ == "__main__":
    command(__doc__, ROW)
