"""NoLoCo against DiLoCo for 90 s between hosts, at four points: which ends lower?

    python -m experiments.race [--scale try|plot|full] [--plot]         as root

full: 2 h 15 of two idle cores; at each point the two methods, 90 s by the clock
(experiments/clock.py), five seeds. The points and the comparisons were chosen before the runs; so
were the settings, by a map of computed seconds that is gone (commit 4fb55dd). Two settings were
chosen again when it had more of them; `former` are those that were raced at first.

164 000 parameters, 1024 tokens a replica and step. Eight hosts have a fifth of a processor each, on
which a step takes 0.15 s while nobody sends. All is sent in one byte a weight. Losses are the
merged model's, each run's at its own end.
"""
import json
import statistics
from dataclasses import dataclass
from pathlib import Path

from experiments.clock import CPU, PROGRAM
from experiments.harness import Row, Setting, command, run_all
from experiments.pictures import COLOURS, WIDTH, counted, differences, frame
from experiments.tables import Comparison, Expected, Table, lower_and_sure
from planning.drawing import NAMES

SECONDS = {"try": 5, "plot": 30, "full": 90}     # by the clock
SEEDS = {"try": (0,), "plot": (0,), "full": (0, 1, 2, 3, 4)}
LEARN = ("--layers 2 --batch 8 --microbatches 1 --warmup 50 --eval-sequences 64 "
         "--eval-every 1000000")


@dataclass(frozen=True)
class Racer:
    """A method at its setting: m, K, D and the learning rate."""
    method: str
    m: int
    K: int
    D: int
    rate: float

    @property
    def way(self):
        """The setting, without the method."""
        parts = f", K {self.K}" if self.K > 1 else ""
        return f"m {self.m}{parts}, D {self.D}"

    @property
    def options(self):
        """Of train.py."""
        words = [f"{LEARN} --lr {self.rate} --method {self.method} --wire int8",
                 f"--inner-steps {self.m}"]
        if self.K > 1:
            words.append(f"--fragments {self.K}")
        words.append(f"--delay {self.D}")
        return " ".join(words)


@dataclass(frozen=True)
class Point:
    """The two that race, and on which network. hosts: options of tools/hosts.py. former: Racers
    that were raced before one of the two was chosen again."""
    name: str
    noloco: Racer
    diloco: Racer
    hosts: str
    former: tuple = ()

    @property
    def racers(self):
        return self.noloco, self.diloco, *self.former

    def label(self, racer):
        return f"{self.name}: {NAMES[racer.method]}, {racer.way}"


POINTS = (
    Point("high latency", Racer("noloco", 5, 5, 1, 0.003), Racer("diloco", 10, 5, 2, 0.003),
          "--mbit 5.83 --latency 45", former=(Racer("diloco", 10, 1, 5, 0.006),)),
    Point("short messages", Racer("noloco", 2, 2, 1, 0.006), Racer("diloco", 2, 2, 1, 0.006),
          "--mbit 10.9 --latency 4.5"),
    Point("long messages", Racer("noloco", 10, 5, 2, 0.003), Racer("diloco", 20, 20, 1, 0.003),
          "--mbit 0.875 --latency 7.5", former=(Racer("noloco", 10, 10, 1, 0.003),)),
    Point("one slow host", Racer("noloco", 2, 2, 1, 0.006), Racer("diloco", 2, 2, 1, 0.006),
          f"--mbit 4.37 --latency 9 --cpu 5={CPU / 2:.3g}"),
)


# ---------------------------------------------------------------- the runs


def settings(scale):
    """A try: the first point alone, between two hosts."""
    processes, points = 8, POINTS
    if scale == "try":
        processes, points = 2, POINTS[:1]
    for point in points:
        racers = point.racers
        if scale != "full":
            racers = point.noloco, point.diloco
        for racer in racers:
            yield Setting(point.label(racer), racer.options, processes, after=merged,
                          program=f"{PROGRAM} {SECONDS[scale]}",
                          hosts=f"--cpu {CPU} {point.hosts}")


def measure(o):
    return run_all("race", settings(o.scale), SEEDS[o.scale], o)


def merged(folder):
    """What the run's row gets: the merged model's last loss, nats per byte."""
    lines = Path(folder, "metrics.jsonl").read_text().splitlines()
    return dict(merged=json.loads(lines[-1])["merged_nats_per_byte"])


# ---------------------------------------------------------------- what was found


@dataclass
class Race:
    """A point's runs. rows: {Racer: its rows, seed by seed}, at least those of the two that race
    now, all of the same seeds. Comparisons are in nats per byte."""
    point: Point
    rows: dict

    @property
    def measured(self):
        """NoLoCo minus DiLoCo."""
        return self.compared(self.point.noloco, self.point.diloco)

    def compared(self, racer, other):
        """The racer's nats minus the other's."""
        pairs = zip(self.rows[racer], self.rows[other])
        return Comparison([one["merged"] - another["merged"] for one, another in pairs])

    def now(self, former):
        """Who took the former one's place."""
        return self.point.noloco if former.method == "noloco" else self.point.diloco

    def as_it_was(self, former):
        """The race with `former`, NoLoCo minus DiLoCo."""
        if former.method == "noloco":
            return self.compared(former, self.point.diloco)
        return self.compared(self.point.noloco, former)


def races_of(found):
    """The Races of all points that have runs of both methods, of as many seeds as all have."""
    races = []
    for point in POINTS:
        rows = {}
        for racer in point.racers:
            if found["runs"].get(point.label(racer)):
                rows[racer] = found["runs"][point.label(racer)]
        if point.noloco in rows and point.diloco in rows:
            count = min(map(len, rows.values()))
            of_same_seeds = {racer: some[:count] for racer, some in rows.items()}
            races.append(Race(point, of_same_seeds))
    return races


def show(found):
    races = races_of(found)
    seconds = SECONDS[found["scale"]]
    table = Table(f"{seconds} s between hosts", "NoLoCo", "DiLoCo", "NoLoCo minus DiLoCo")
    for race in races:
        point = race.point
        table.add(point.name, point.noloco.way, point.diloco.way, race.measured)
    table.end()
    show_steps(races)
    if any(len(race.rows) > 2 for race in races):
        show_former(races)


def show_steps(races):
    table = Table("steps in that time, mean", "made", "merged, nats per byte")
    for race in races:
        for racer, rows in race.rows.items():
            made = statistics.mean(row["curves"]["step"][-1] for row in rows)
            mean = statistics.mean(row["merged"] for row in rows)
            table.add(race.point.label(racer), f"{made:.0f}", f"{mean:.3f}")
    table.end()


def show_former(races):
    table = Table("raced at first", "minus the setting raced now",
                  "the race with it, NoLoCo minus DiLoCo")
    for race in races:
        for former in race.point.former:
            if former in race.rows:
                table.add(race.point.label(former), race.compared(former, race.now(former)),
                          race.as_it_was(former))
    table.end()


def draw(plt, found):
    """NoLoCo's loss minus DiLoCo's at each point, with its interval."""
    races = races_of(found)
    figure, axis = plt.subplots(figsize=(WIDTH, 2.2 + 0.45 * len(races)))
    measured = [race.measured for race in races]
    colours = [COLOURS["NoLoCo" if one.mean < 0 else "DiLoCo"] for one in measured]
    differences(axis, measured, colours, [race.point.name for race in races])
    axis.set(xlabel="NoLoCo's held-out nats per byte minus DiLoCo's: left of zero NoLoCo is lower")
    frame(figure, found, finding(measured), "NoLoCo beside DiLoCo between hosts",
          f"{SECONDS[found['scale']]} s between eight hosts of one machine, one byte a weight. "
          f"Merged models, {counted(len(measured[0].differences), 'seed')}; bars: 95% intervals.")
    return figure


def finding(measured):
    """At how many points NoLoCo ended lower, and at how many beyond doubt."""
    if any(one.p is None for one in measured):
        return ""                   # one seed
    lower, sure = lower_and_sure(measured)
    return (f"In equal time NoLoCo ended lower than DiLoCo at {len(lower)} of {len(measured)} "
            f"points, beyond doubt at {len(sure)}")


def expected(found):
    judged = found["scale"] == "full"
    return [Expected(f"{race.point.name}: NoLoCo minus DiLoCo, nats per byte", race.measured.mean,
                     number, 0.05, "+.3f", judged)
            for race, number in zip(races_of(found), (-0.018, -0.034, -0.004, -0.148))]


ROW = Row("race", measure, show, {"race": draw}, expected)

if __name__ == "__main__":
    command(__doc__, ROW)
