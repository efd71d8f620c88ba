"""Does the map say who wins? Four of its points (experiments/regions.py), measured between hosts.

    python -m experiments.points [--seeds 0 1 2 3 4] [--out DIR] [--plot]

alone       a step's seconds while nobody sends: 2 minutes
points      1 h 20 of two idle cores: at each point the two methods that the map has first, each at
            the setting that it advises, 90 s by the clock (experiments/clock.py), five seeds

POINTS and their comparisons were chosen before the runs. Model, batch, rates and outer steps are
those of the map: 164 000 parameters, 1024 tokens a replica and step. Eight hosts have a fifth of a
processor each; a point's messages and latencies are in the seconds of such a step, STEP. All is
sent in one byte a weight. Losses are the merged model's, each run's at its own end.
"""
import json
import statistics
from dataclasses import dataclass
from pathlib import Path

from experiments import fragments, regions
from experiments.clock import CPU, PROGRAM
from experiments.comparing import Comparison, Table
from experiments.fleets import FIVE
from experiments.harness import Part, Setting, headline, title_of
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
    """message and latency: seconds over those of a step; slow: how many times as long one host's
    steps take."""
    name: str
    message: float
    latency: float
    slow: float = 1

    @property
    def hosts(self):
        """Options of tools/hosts.py."""
        mbit = 8 * PARAMS / (self.message * STEP) / 1e6
        words = f"--cpu {CPU} --mbit {mbit:.3g} --latency {1000 * self.latency * STEP:.3g}"
        return f"{words} --cpu 5={CPU / self.slow:.3g}" if self.slow > 1 else words

    def place(self):
        """The map's Place, for as many steps as the slowest host makes alone."""
        losses = regions.losses_of(kept_result(ROOT, "headline_lengths"))
        budget = SECONDS / STEP / self.slow
        return regions.place_at(losses, budget, self.message / self.slow, self.latency / self.slow)


POINTS = (
    Point("high latency", 1.5, 0.3), Point("short messages", 0.8, 0.03),
    Point("long messages", 10, 0.05), Point("one slow host", 2, 0.06, slow=2),
)


# ---------------------------------------------------------------- the runs


def alone_settings(steps):
    length = steps or 60
    yield Setting(ALONE, f"{LEARN} --method local --warmup 20 --steps {length}",
                  hosts=f"--cpu {CPU} --mbit 0")


def settings(steps):
    """steps: of a try, two hosts and one point, so many seconds by the clock."""
    for point in POINTS[:1] if steps else POINTS:
        place = point.place()
        for method in place.order[:2]:
            trial = place.settings[method]
            yield Setting(f"{point.name}: {fragments.name_of(trial)}", options_of(trial),
                          processes=2 if steps else 8, after=merged, hosts=point.hosts,
                          program=f"{PROGRAM} {steps or SECONDS}")


def options_of(trial):
    """Of train.py."""
    rate = fragments.rate_of(trial, regions.best_rates())
    words = [LEARN, f"--method {trial.method} --wire int8 --lr {rate}"]
    if trial.method != "ddp":
        words.append(f"--inner-steps {trial.every}")
    if trial.fragments > 1:
        words.append(f"--fragments {trial.fragments}")
    if trial.delay:
        words.append(f"--delay {trial.delay}")
    return " ".join(words)


def merged(folder):
    """What the run's row gets: the merged model's last loss, nats per byte."""
    *_, last = Path(folder, "metrics.jsonl").read_text().splitlines()
    return dict(merged=json.loads(last)["merged_nats_per_byte"])


# ---------------------------------------------------------------- what was found


def show_alone(found):
    for row in found["runs"][ALONE]:
        curves = row["curves"]
        print(f"a step alone: {curves['iteration_seconds'][-1]:.3f} s\n")


@dataclass
class Race:
    """The two methods at a point. losses: {method: [merged, of each seed]}; steps: {method: mean
    steps made}, in the map's order."""
    point: Point
    place: regions.Place
    losses: dict
    steps: dict

    @property
    def measured(self):
        """Nats per byte, the first of the map less its second."""
        first, second = self.losses.values()
        return Comparison([a - b for a, b in zip(first, second)])

    def name(self, method):
        return fragments.name_of(self.place.settings[method])


def races_of(found):
    """The Races of all points that have runs of both methods."""
    races = []
    for point in POINTS:
        place = point.place()
        losses = {}
        steps = {}
        for method in place.order[:2]:
            label = f"{point.name}: {fragments.name_of(place.settings[method])}"
            rows = found["runs"].get(label, ())
            losses[method] = [row["merged"] for row in rows]
            steps[method] = [row["curves"]["step"][-1] for row in rows]
        if all(losses.values()):
            races.append(Race(point, place, losses, steps))
    return races


def show(found):
    races = races_of(found)
    table = Table(f"{SECONDS} s between hosts", "first, by the map", "second", "the map says",
                  "measured, first less second")
    for race in races:
        names = [race.name(method) for method in race.losses]
        table.add(race.point.name, *names, race.place.lead, race.measured)
    table.end()
    table = Table("steps in that time", "computed", "made", "merged, nats per byte")
    for race in races:
        for method, losses in race.losses.items():
            table.add(f"{race.point.name}: {race.name(method)}", f"{computed(race, method):.0f}",
                      spread_of(race.steps[method], ".0f"), f"{statistics.mean(losses):.3f}")
    table.end()


def computed(race, method):
    """Steps that the map reckons with."""
    point = race.point
    budget = SECONDS / STEP / point.slow
    return regions.steps_in(budget, race.place.settings[method], point.message / point.slow,
                            point.latency / point.slow, 8)


def draw(plt, found):
    """The first's loss less the second's at each point: the map's, hollow, and what was measured,
    with its interval."""
    races = races_of(found)
    figure, axis = plt.subplots(figsize=(WIDTH, 1.8 + 0.55 * len(races)))
    axis.axvline(0, color="#000000", lw=1)
    names = []
    for place, race in enumerate(races):
        first, second = race.losses
        names.append(f"{race.point.name}:\n{NAMES[first]} less {NAMES[second]}")
        colour = COLOURS[NAMES[first]]
        measured = race.measured
        low, high = measured.interval or (measured.mean, measured.mean)
        axis.plot([low, high], [place, place], color=colour, lw=2.5)
        axis.plot(measured.mean, place, "o", color=colour, ms=8)
        axis.plot(race.place.lead.mean, place, "o", mec=colour, mfc="white", ms=8)
    seeds = len(races[0].measured.differences)
    axis.set(yticks=range(len(races)), yticklabels=names, ylim=(len(races) - 0.5, -0.5),
             xlabel="held-out nats per byte, merged: left of zero the map's first is better\n"
             f"(full: measured, {counted(seeds, 'seed')}, 95% interval; hollow: the map)",
             title=title_of(found, finding(races), "The map's winners between hosts"))
    axis.grid(axis="y", visible=False)
    return figure


def finding(races):
    """On how many points the map's first one won, and on how many surely."""
    lower = sum(race.measured.mean < 0 for race in races)
    sure = sum(race.measured.verdict == "better" for race in races)
    return (f"Between hosts the map's first method ended lower at {lower} of {len(races)} points, "
            f"at {sure} beyond its interval")


PARTS = {
    "alone": Part(alone_settings, show_alone, seeds=(0,)),
    "points": Part(settings, show, None, {"points": draw}, seeds=FIVE),
}

if __name__ == "__main__":
    headline(__doc__, PARTS)
