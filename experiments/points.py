"""Does the map say who wins? Four of its points (experiments/regions.py), measured between hosts.

    python -m experiments.points [--seeds 0 1 2 3 4] [--out DIR] [--plot]

alone       a step's seconds while nobody sends: 2 minutes
points      2 h 15 of two idle cores: at each point the two methods that the map has first, each at
            the setting that it advises, 90 s by the clock (experiments/clock.py), five seeds
tried       10 minutes: at the second point whole messages with delays, for both methods, one seed:
            does either have a setting there that the map does not advise?

POINTS and their comparisons were chosen before the runs. Two settings were chosen again once the
map had settings with K < m and D > 1; `former` are those that were raced at first. Model, batch,
rates and outer steps are those of the map: 164 000 parameters, 1024 tokens a replica and step.
Eight hosts have a fifth of a processor each; a point's messages and latencies are in the seconds of
such a step, STEP. All is sent in one byte a weight. Losses are the merged model's, each run's at
its own end.
"""
import json
import statistics
from dataclasses import dataclass
from pathlib import Path

from experiments import fragments, lengths, paced, places, regions
from experiments.clock import CPU, PROGRAM
from experiments.comparing import Comparison, Table, lower_and_sure
from experiments.fleet import Trial
from experiments.harness import FIVE, Part, Setting, headline, title_of
from experiments.pictures import COLOURS, WIDTH, counted
from experiments.results import ROOT, kept_result, spread_of
from plumbing.drawing import NAMES

SECONDS = 90
STEP = 0.15                     # seconds, of `alone`
PARAMS = 164_000
LEARN = ("--layers 2 --batch 8 --microbatches 1 --warmup 50 --eval-sequences 64 "
         "--eval-every 1000000")
ALONE = "nobody sends"


@dataclass(frozen=True)
class Point:
    """noloco and diloco: the Trials that the map advises for the race's time. message and latency:
    seconds over STEP; slow: how many times as long host 5's steps take; former: Trials that it
    advised, and that were raced, when it had fewer settings."""
    name: str
    noloco: Trial
    diloco: Trial
    message: float
    latency: float
    slow: float = 1
    former: tuple = ()

    @property
    def trials(self):
        return self.noloco, self.diloco, *self.former

    @property
    def hosts(self):
        """Options of tools/hosts.py."""
        mbit = 8 * PARAMS / (self.message * STEP) / 1e6
        words = f"--cpu {CPU} --mbit {mbit:.3g} --latency {1000 * self.latency * STEP:.3g}"
        if self.slow > 1:
            words += f" --cpu 5={CPU / self.slow:.3g}"
        return words

    @property
    def on_the_map(self):
        """The map's budget, message and latency, in steps of the slowest host."""
        return SECONDS / STEP / self.slow, self.message / self.slow, self.latency / self.slow

    def steps(self, trial):
        """Those that the map reckons with."""
        budget, message, latency = self.on_the_map
        return places.steps_in(budget, places.meetings_of(trial), message, latency)

    def label(self, trial):
        return f"{self.name}: {regions.name_of(trial)}"


def noloco(m, K, D):
    return Trial("noloco", m, D, regions.WIRE, fragments=K)


def diloco(m, K, D):
    return Trial("diloco", m, D, regions.WIRE, fragments=K)


POINTS = (
    Point("high latency", noloco(5, 5, 1), diloco(10, 5, 2), 1.5, 0.3, former=(diloco(10, 1, 5),)),
    Point("short messages", noloco(2, 2, 1), diloco(2, 2, 1), 0.8, 0.03),
    Point("long messages", noloco(10, 5, 2), diloco(20, 20, 1), 10, 0.05,
          former=(noloco(10, 10, 1),)),
    Point("one slow host", noloco(2, 2, 1), diloco(2, 2, 1), 2, 0.06, slow=2),
)
TRIED_AT = POINTS[1]
TRIED = diloco(5, 1, 2), diloco(10, 1, 5), noloco(5, 1, 2), noloco(10, 1, 5)


# ---------------------------------------------------------------- the runs


def alone_settings(steps):
    length = steps or 60
    yield Setting(ALONE, f"{LEARN} --method local --warmup 20 --steps {length}",
                  hosts=f"--cpu {CPU} --mbit 0")


def settings(steps):
    """steps: a try of the first point, between two hosts, for so many seconds."""
    if steps:
        point = POINTS[0]
        for trial in point.noloco, point.diloco:
            yield setting_at(point, trial, steps)
        return
    for point in POINTS:
        for trial in point.trials:
            yield setting_at(point, trial, steps)


def tried_settings(steps):
    """steps: as above."""
    for trial in TRIED:
        yield setting_at(TRIED_AT, trial, steps)


def setting_at(point, trial, steps):
    return Setting(point.label(trial), options_of(trial), processes=2 if steps else 8, after=merged,
                   hosts=point.hosts, program=f"{PROGRAM} {steps or SECONDS}")


def options_of(trial):
    """Of train.py."""
    rate = fragments.rate_of(trial, lengths.best_rates())
    return f"{LEARN} --lr {rate} {paced.options_of(places.meetings_of(trial))}"


def merged(folder):
    """What the run's row gets: the merged model's last loss, nats per byte."""
    lines = Path(folder, "metrics.jsonl").read_text().splitlines()
    return dict(merged=json.loads(lines[-1])["merged_nats_per_byte"])


# ---------------------------------------------------------------- what was found


def show_alone(found):
    for row in found["runs"][ALONE]:
        print(f"a step alone: {row['curves']['iteration_seconds'][-1]:.3f} s\n")


@dataclass
class Race:
    """A point's runs. rows: {trial: its rows, seed by seed}, at least those of the two that are
    advised, all of the same seeds. Comparisons are NoLoCo's nats per byte minus DiLoCo's."""
    point: Point
    rows: dict

    @property
    def measured(self):
        return self.compared(self.point.noloco, self.point.diloco)

    def compared(self, trial, other):
        """The trial's nats minus the other's."""
        pairs = zip(self.rows[trial], self.rows[other])
        return Comparison([one["merged"] - another["merged"] for one, another in pairs])

    def now(self, former):
        """The setting of former's method that the map advises now."""
        return self.point.noloco if former.method == "noloco" else self.point.diloco

    def as_it_was(self, former):
        """The race with `former` in place of what is advised now."""
        if former.method == "noloco":
            return self.compared(former, self.point.diloco)
        return self.compared(self.point.noloco, former)

    def computed(self, losses):
        """By the map's losses and seconds. losses: a lengths.Losses."""
        noloco, diloco = self.point.noloco, self.point.diloco
        budget, *_ = self.point.on_the_map
        differences = []
        for seed in losses.seeds(budget):
            one = losses.of(noloco, seed, self.point.steps(noloco))
            other = losses.of(diloco, seed, self.point.steps(diloco))
            differences.append(one - other)
        return Comparison(differences)


def races_of(found):
    """The Races of all points that have runs of both methods, of as many seeds as all have."""
    races = []
    for point in POINTS:
        rows = {}
        for trial in point.trials:
            if found["runs"].get(point.label(trial)):
                rows[trial] = found["runs"][point.label(trial)]
        if point.noloco in rows and point.diloco in rows:
            count = min(map(len, rows.values()))
            of_same_seeds = {trial: some[:count] for trial, some in rows.items()}
            races.append(Race(point, of_same_seeds))
    return races


def whole(found, part):
    """Whether every point was raced, with all seeds."""
    races = races_of(found)
    seeds = [len(race.measured.differences) for race in races]
    return not found.get("steps") and seeds == [len(part.seeds)] * len(POINTS)


def map_losses():
    return lengths.losses_of(kept_result(ROOT, "headline_lengths"), regions.WIRE)


def show(found):
    races = races_of(found)
    show_races(races)
    show_steps(races)
    if any(len(race.rows) > 2 for race in races):
        show_former(races)


def show_races(races):
    losses = map_losses()
    table = Table(f"{SECONDS} s between hosts", "NoLoCo", "DiLoCo", "NoLoCo minus DiLoCo, computed",
                  "NoLoCo minus DiLoCo, measured")
    for race in races:
        point = race.point
        table.add(point.name, way_of(point.noloco), way_of(point.diloco), race.computed(losses),
                  race.measured)
    table.end()


def show_steps(races):
    table = Table("steps in that time", "computed", "made", "merged, nats per byte")
    for race in races:
        point = race.point
        for trial, rows in race.rows.items():
            made = [row["curves"]["step"][-1] for row in rows]
            mean = statistics.mean(row["merged"] for row in rows)
            table.add(point.label(trial), f"{point.steps(trial):.0f}", spread_of(made, ".0f"),
                      f"{mean:.3f}")
    table.end()


def show_former(races):
    table = Table("advised when the map had fewer settings", "minus the setting advised now",
                  "the race with it, NoLoCo minus DiLoCo")
    for race in races:
        for former in race.point.former:
            if former in race.rows:
                table.add(race.point.label(former), race.compared(former, race.now(former)),
                          race.as_it_was(former))
    table.end()


def way_of(trial):
    """Its setting, without the method."""
    _, setting = regions.name_of(trial).split(", ", 1)
    return setting


def show_tried(found):
    table = Table(f"one seed, {SECONDS} s", "steps made", "merged, nats per byte")
    for label, rows in found["runs"].items():
        table.add(label, f"{rows[0]['curves']['step'][-1]:.0f}", f"{rows[0]['merged']:.3f}")
    table.end()


def draw(plt, found):
    """NoLoCo's loss minus DiLoCo's at each point: by the map, hollow, and what was measured, with
    its interval."""
    losses = map_losses()
    races = races_of(found)
    figure, axis = plt.subplots(figsize=(WIDTH, 1.8 + 0.45 * len(races)))
    axis.axvline(0, color="#000000", lw=1)
    for height, race in enumerate(races):
        measured = race.measured
        leader = NAMES["noloco" if measured.mean < 0 else "diloco"]
        low, high = measured.interval or (measured.mean, measured.mean)
        axis.plot([low, high], [height, height], color=COLOURS[leader], lw=2.5)
        axis.plot(measured.mean, height, "o", color=COLOURS[leader], ms=8)
        axis.plot(race.computed(losses).mean, height, "o", mec="#000000", mfc="white", ms=8)
    seeds = counted(len(races[0].measured.differences), "seed")
    axis.set(yticks=range(len(races)), yticklabels=[race.point.name for race in races],
             ylim=(len(races) - 0.5, -0.5),
             xlabel="NoLoCo's held-out nats per byte minus DiLoCo's: left of zero NoLoCo is better"
             f"\n(merged models; full: measured, {seeds}, 95% interval; hollow: by the map)",
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


PARTS = {
    "alone": Part(alone_settings, show_alone, seeds=(0,)),
    "tried": Part(tried_settings, show_tried, seeds=(0,)),
    "points": Part(settings, show, None, {"points": draw}, seeds=FIVE, is_whole=whole),
}

if __name__ == "__main__":
    headline(__doc__, PARTS)
