"""NoLoCo against DiLoCo for 90 s between hosts, at four points: which ends lower?

    python -m experiments.points [--seeds 0 1 2 3 4] [--out DIR] [--plot]

points      2 h 15 of two idle cores: at each point the two methods, 90 s by the clock
            (experiments/clock.py), five seeds

The points and the comparisons were chosen before the runs; so were the settings, by a map of
computed seconds that is gone (commit 4fb55dd). Two settings were chosen again when it had more of
them; `former` are those that were raced at first. 164 000 parameters, 1024 tokens a replica and
step. Eight hosts have a fifth of a processor each, on which a step takes 0.15 s while nobody sends.
All is sent in one byte a weight. Losses are the merged model's, each run's at its own end.
"""
import json
import statistics
from dataclasses import dataclass
from pathlib import Path

from experiments.clock import CPU, PROGRAM
from experiments.comparing import Comparison, Table, lower_and_sure
from experiments.harness import FIVE, Part, Setting, headline, title_of
from experiments.pictures import COLOURS, WIDTH, counted
from experiments.results import spread_of
from planning.drawing import NAMES

SECONDS = 90
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


def settings(steps):
    """steps: a try of the first point, between two hosts, for so many seconds."""
    if steps:
        point = POINTS[0]
        for racer in point.noloco, point.diloco:
            yield setting_at(point, racer, steps, processes=2)
        return
    for point in POINTS:
        for racer in point.racers:
            yield setting_at(point, racer, SECONDS, processes=8)


def setting_at(point, racer, seconds, processes):
    return Setting(point.label(racer), racer.options, processes, after=merged,
                   program=f"{PROGRAM} {seconds}", hosts=f"--cpu {CPU} {point.hosts}")


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


def whole(found, part):
    """Whether every point was raced, with all seeds."""
    races = races_of(found)
    seeds = [len(race.measured.differences) for race in races]
    return not found.get("steps") and seeds == [len(part.seeds)] * len(POINTS)


def show(found):
    races = races_of(found)
    table = Table(f"{SECONDS} s between hosts", "NoLoCo", "DiLoCo", "NoLoCo minus DiLoCo")
    for race in races:
        point = race.point
        table.add(point.name, point.noloco.way, point.diloco.way, race.measured)
    table.end()
    show_steps(races)
    if any(len(race.rows) > 2 for race in races):
        show_former(races)


def show_steps(races):
    table = Table("steps in that time", "made", "merged, nats per byte")
    for race in races:
        for racer, rows in race.rows.items():
            made = [row["curves"]["step"][-1] for row in rows]
            mean = statistics.mean(row["merged"] for row in rows)
            table.add(race.point.label(racer), spread_of(made, ".0f"), f"{mean:.3f}")
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
    figure, axis = plt.subplots(figsize=(WIDTH, 1.8 + 0.45 * len(races)))
    axis.axvline(0, color="#000000", lw=1)
    for height, race in enumerate(races):
        measured = race.measured
        leader = NAMES["noloco" if measured.mean < 0 else "diloco"]
        low, high = measured.interval or (measured.mean, measured.mean)
        axis.plot([low, high], [height, height], color=COLOURS[leader], lw=2.5)
        axis.plot(measured.mean, height, "o", color=COLOURS[leader], ms=8)
    seeds = counted(len(races[0].measured.differences), "seed")
    axis.set(yticks=range(len(races)), yticklabels=[race.point.name for race in races],
             ylim=(len(races) - 0.5, -0.5),
             xlabel="NoLoCo's held-out nats per byte minus DiLoCo's: left of zero NoLoCo is better"
             f"\n(merged models, {seeds}, 95% interval)",
             title=title_of(found, finding(races), "NoLoCo beside DiLoCo between hosts"))
    axis.grid(axis="y", visible=False)
    return figure


def finding(races):
    """At how many points NoLoCo ended lower, and at how many beyond doubt."""
    found = [race.measured for race in races]
    if any(one.p is None for one in found):
        return ""                   # one seed: a try
    lower, sure = lower_and_sure(found)
    return (f"In {SECONDS} s between hosts NoLoCo ended lower than DiLoCo at {len(lower)} of "
            f"{len(found)} points,\nbeyond doubt (95%, after Holm's correction) at {len(sure)}")


PARTS = {"points": Part(settings, show, None, {"points": draw}, seeds=FIVE, is_whole=whole)}

if __name__ == "__main__":
    headline(__doc__, PARTS)
