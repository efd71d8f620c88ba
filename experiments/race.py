"""Who ends lowest in equal time between hosts: NoLoCo, DiLoCo, or pairs that never wait?

    python -m experiments.race [--scale try|plot|full] [--plot]         as root

full: 2.7 hours of two idle cores. Eight hosts have 200 Mbit/s; a run takes 90 s by the clock
(experiments/clock.py). A step's forward and backward take STEP: on a fifth of a processor, which
each host has (CPU), they are computed in less, and the rest of the time the host sleeps, so that
the speed of the machine does not decide. Three points, named before the runs:

    uneven steps    5 ms one way. On every host a step takes f times twice STEP, but no less than
                    STEP. f is log-normal with mean 1 and sigma^2 0.5, as in NoLoCo's own model
                    (B4). Sixteen seeds
    one slow host   5 ms one way. A step of host 5 takes twice as long; with NoLoCo and DiLoCo it
                    makes half as many inner steps between outer steps. Eight seeds
    50 ms one way   Eight seeds

Named before, too, at each point: NoLoCo minus DiLoCo, pairs that never wait minus NoLoCo, and pairs
that never wait minus DiLoCo. The losses are the merged model's at each run's own end. Holm's
correction goes over all nine.

164 000 parameters, 1024 tokens per replica and step. All messages are fp32, four bytes per weight,
since those of pairs that never wait are. Nobody evaluates before the end: for that, all would wait
for each other. All replicas of a NoLoCo or DiLoCo run send equally many messages. After the last
one each trains on until its time is over, but ends before the next one would leave; a replica that
is late sends the last one all the same. Pairs that never wait send as many as they can.
All racers of a point and seed run one right after the other, and who is first changes with the
seed. If others' work takes too much of a processor in one of these runs (POINTS), all of them are
made again, whatever they have found.
"""
import itertools
import json
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from experiments.clock import CPU, PROGRAM
from experiments.harness import Row, Run, command, make_runs
from experiments.pictures import COLOURS, GREY, WIDTH, forest, frame
from experiments.stats import Comparison, Table, mean, paired, significant, those

SECONDS = {"try": 8, "plot": 30, "full": 90}        # by the clock
SEEDS = {"plot": 1, "full": 16}                     # of a point, at most
STEP = 0.25             # seconds
TOKENS = 1024           # of a replica's step
LEARN = "--layers 2 --batch 8 --microbatches 1 --warmup 20 --eval-sequences 64"
NOLOCO, DILOCO, PAIRS = METHODS = "NoLoCo", "DiLoCo", "pairs that never wait"
NAMED = (NOLOCO, DILOCO), (PAIRS, NOLOCO), (PAIRS, DILOCO)      # at each point: one minus the other
SHOWN = {"merged": ".3f", "steps": ".0f", "blocked": ".1f", "sent": ".1f"}
DRAWN = {NOLOCO: COLOURS["NoLoCo"], DILOCO: COLOURS["DiLoCo"], PAIRS: COLOURS["25%"]}


@dataclass(frozen=True)
class Point:
    """Where methods race. others: at full, the most of a processor that others' work may take.
    hosts: options of tools/hosts.py; clock: of experiments/clock.py. by_speed: NoLoCo's and
    DiLoCo's inner steps are in proportion to each host's speed."""
    name: str
    seeds: int
    others: float
    hosts: str
    clock: str = ""
    by_speed: bool = False


# A run takes 0.35 of a processor with uneven steps, 0.8 with a slow host and 1.0 at 50 ms. With
# this much of others' work runs have as many steps as with less. With 0.8 those at 50 ms had 2 to
# 5% fewer.
POINTS = (
    Point("uneven steps", 16, 1.0, "--mbit 200 --latency 5", clock="--uneven"),
    Point("one slow host", 8, 0.8, "--mbit 200 --latency 5", clock="--slow 5", by_speed=True),
    Point("50 ms one way", 8, 0.7, "--mbit 200 --latency 50"),
)
TRY = Point("two hosts", 1, 1.0, "--mbit 200 --latency 5", clock="--slow 1", by_speed=True)
# {(point, method): m, K fragments, D and rate}: the best of results/race_tries.json. Each method
# had six tries of m, K and D per point on one seed, D up to m / 2. The best two had a second seed,
# and so had one beyond the shortest or longest m if that was the best, and half and twice the best
# one's rate, and one rate beyond. The search is in 3dc9cb9, with one slow host for NoLoCo and
# DiLoCo in aeaa4bf.
RACED = {
    ("uneven steps", NOLOCO): (10, 1, 1, 0.003),
    ("uneven steps", DILOCO): (40, 1, 20, 0.003),
    ("uneven steps", PAIRS): (1, 1, 0, 0.006),
    ("one slow host", NOLOCO): (4, 1, 1, 0.003),
    ("one slow host", DILOCO): (4, 1, 1, 0.003),
    ("one slow host", PAIRS): (4, 1, 0, 0.003),
    ("50 ms one way", NOLOCO): (5, 5, 1, 0.003),
    ("50 ms one way", DILOCO): (20, 2, 10, 0.003),
    ("50 ms one way", PAIRS): (4, 1, 0, 0.003),
}


# ---------------------------------------------------------------- the runs


def a_run(point, method, setting, seed, scale):
    """The Run of a method with its setting (m, K, D, rate)."""
    m, K, D, rate = setting
    by_speed = point.by_speed and method != PAIRS
    facts = dict(point=point.name, method=method, m=m, K=K, D=D, rate=rate, by_speed=by_speed,
                 seed=seed)
    clock = [PROGRAM, str(SECONDS[scale]), f"--step {STEP} --one-evaluation", point.clock]
    if by_speed:
        clock.append("--by-speed")
    if method == PAIRS:
        clock.append("--never-waits")
    options = (f"{LEARN} --method {'diloco' if method == DILOCO else 'noloco'} --lr {rate} "
               f"--inner-steps {m} --fragments {K} --delay {D}")
    processes = 2 if scale == "try" else 8
    return Run(facts, options, processes, " ".join(filter(None, clock)),
               f"--cpu {CPU} {point.hosts}", after=ended)


def ended(folder):
    """What the record gets of the run's end: a replica's mean steps; its mean seconds in which it
    was blocked by synchronisation; the inner steps of each, where they differ."""
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    config = json.loads((folder / "config.json").read_text())
    return dict(steps=last["tokens"] / TOKENS / last["ranks"],
                blocked=round(last["blocked"] * last["seconds"], 2),
                inner_steps=config["inner_steps_by_rank"])


def measure(o):
    if o.scale == "try":
        runs = [a_run(TRY, method, (2, 1, 0, 0.003), 0, o.scale)
                for method in (NOLOCO, PAIRS)]
        make_runs("race", runs, o)
    else:
        for point in POINTS:
            most = point.others if o.scale == "full" else None
            make_runs("race", race_runs(point, o.scale), o, turn_of=turn, most_others=most)


def race_runs(point, scale):
    """All runs at this point, in their order: who is first changes with the seed."""
    runs = []
    for seed in range(min(SEEDS[scale], point.seeds)):
        first = seed % len(METHODS)
        for method in METHODS[first:] + METHODS[:first]:
            runs.append(a_run(point, method, RACED[point.name, method], seed, scale))
    return runs


def turn(missing):
    """All racers of a seed, one right after the other."""
    seed = missing[0].facts["seed"]
    return [run for run in missing if run.facts["seed"] == seed]


# ---------------------------------------------------------------- what was found


class Race(NamedTuple):
    """One method minus another one at a point. survives: Holm's correction."""
    point: str
    one: str
    other: str
    measured: Comparison
    survives: bool

    @property
    def name(self):
        return f"{self.point}: {self.one} minus {self.other}"

    @property
    def lower(self):
        """The method with the lower loss; None if the difference is not significant."""
        if not self.survives:
            return None
        return self.one if self.measured.mean < 0 else self.other


def points(found):
    return (TRY,) if found["scale"] == "try" else POINTS


def races(found):
    """The Races named before."""
    named_before = []
    for point in points(found):
        for one, other in NAMED:
            measured = paired(found["records"], dict(point=point.name, method=one),
                              dict(point=point.name, method=other))
            if measured:
                named_before.append((point.name, one, other, measured))
    survive = significant([measured for *_, measured in named_before])
    return [Race(*race, stays) for race, stays in zip(named_before, survive)]


def show(found):
    table = Table(f"{SECONDS[found['scale']]} s between hosts", "nats per byte")
    for race in races(found):
        table.add(race.name, race.measured)
    table.end()
    show_means(found)


def show_means(found):
    """What each racer did."""
    table = Table("a replica's mean", "merged, nats per byte", "steps", "seconds blocked",
                  "MB sent")
    for point, method in itertools.product(points(found), METHODS):
        facts = dict(point=point.name, method=method)
        raced = those(found["records"], **facts)
        if raced:
            setting = "m {m}, K {K}, D {D}, rate {rate}".format(**raced[0])
            cells = [mean(raced, facts, key, form) for key, form in SHOWN.items()]
            table.add(f"{point.name}: {method}, {setting}", *cells)
    table.end()


def draw(plt, found):
    """All comparisons named before, with intervals; grey where they are not significant."""
    drawn = races(found)
    figure, axis = plt.subplots(figsize=(WIDTH, 1.4 + 0.45 * len(drawn)))
    lines = {race.name.replace(": ", ":\n"): race.measured for race in drawn}
    forest(axis, lines, [DRAWN.get(race.lower, GREY) for race in drawn])
    axis.set(xlabel="nats per byte after equal time")
    frame(figure, found, finding(drawn), "Three methods in equal time between hosts")
    return figure


def finding(drawn):
    """In how many of its comparisons each method has the significantly lower loss."""
    wins = Counter(race.lower for race in drawn)
    counts = ", ".join(f"{method} {wins[method]}" for method in (PAIRS, NOLOCO, DILOCO))
    return f"Significantly lower loss in so many of 6: {counts}"


def expected(_):
    """Of 30 s and one seed nothing is expected: seeds differ by more than methods do."""
    return []


ROW = Row("race", measure, show, {"race": draw}, expected)

if __name__ == "__main__":
    command(__doc__, ROW)
