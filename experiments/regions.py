"""Which method on which network: losses measured once, seconds computed for any network.

    python -m experiments.regions [lengths] [--seeds 0 1 2] [--steps N] [--out DIR] [--plot]

lengths     of DDP, DiLoCo and NoLoCo (pairs), every 1 to 50 steps, whole and in fragments, at once
            and delayed, after 150 to 2400 steps, each with a schedule planned for just so many:
            8 replicas in one process (experiments/fleet.py), 1024 tokens a replica and step, Adam,
            plain averages

The map. On a network a setting's step takes s times as long as one without messages
(gossip/pace.py, all in one byte a weight). In the time of T steps without messages it makes
n = T / s steps, and loses what it lost after n steps: between measured lengths a straight line over
log n; after fewer than the shortest, that one's loss, which favours it: where such a setting loses
least, the map is blank. Of each method the setting with the lowest mean counts; DDP's average
overlaps with the backward pass. Where steps
of all replicas take f times as long, or one's do, for which all others wait, the point is the one
with messages of 1 / f and a latency of 1 / f.

What it takes for granted: losses are those in fp32. Writing, coding and summing take no time. Links
do not contend.
"""
import itertools
import math
import statistics
from collections import Counter
from dataclasses import dataclass
from functools import partial

from experiments.comparing import Comparison, Table
from experiments.fleet import Trial
from experiments.fleets import kept_rows, train_lessons
from experiments.fragments import lesson_of
from experiments.harness import Part, headline, title_of
from experiments.pictures import COLOURS, WIDTH, counted
from experiments.replicas import DDP, by_trial, merged_loss, nats_over
from experiments.results import ROOT, kept_result
from gossip.advice import BACKWARD
from gossip.pace import Meetings, Situation, seconds_a_step
from plumbing.drawing import NAMES

EVERY = 1, 2, 5, 10, 20, 50
LENGTHS = 150, 300, 600, 1200, 2400         # steps
FIRST_LENGTHS = 150, 300, 600               # of all seeds; the longer ones of the first
METHODS = "ddp", "diloco", "noloco"
# The map's points: seconds of a one-byte message over those of a step, and the latency over a step.
MESSAGES = [0.03 * 10 ** (i / 10) for i in range(31)]
LATENCIES = [0.001 * 10 ** (i / 10) for i in range(31)]


# ---------------------------------------------------------------- the losses


def trials():
    """Every setting: DDP first."""
    yield DDP
    for m, method in itertools.product(EVERY, ("diloco", "noloco")):
        for delay in sorted({0, 1, m // 2}):
            yield Trial(method, m, delay)
        if m > 1:
            for delay in 0, 1:
                yield Trial(method, m, delay, fragments=m)


def lessons_of(seeds, lengths):
    """In the order of their weight: seed by seed, the longer lengths last. Rates are the best of
    three of the nearest trial after 600 steps, as results/headline_fragments.json has them."""
    best = kept_result(ROOT, "headline_fragments")["best"]
    for wanted, some in ((FIRST_LENGTHS, seeds), (LENGTHS, seeds[:1])):
        for seed, steps in itertools.product(some, lengths or wanted):
            for trial in trials():
                yield lesson_of(trial, seed, best, steps)


def measure(name, part, o):
    rows = kept_rows(name, o)
    lengths = [o.steps] if o.steps else None
    lessons = dict.fromkeys(lessons_of(o.seeds or list(part.seeds), lengths))
    train_lessons([lesson for lesson in lessons if o.only in lesson.label], rows)
    return dict(rows=rows, steps=o.steps)


class Losses:
    """Merged held-out losses of settings after any number of steps.

    rows: as experiments/fleets.py keeps them.
    """

    def __init__(self, rows):
        self.measured = {}          # {trial: {seed: {steps: loss}}}
        for row in rows:
            seeds = self.measured.setdefault(Trial(**row["trial"]), {})
            seeds.setdefault(row["seed"], {})[row["steps"]] = row["merged"]

    def seeds(self, longest):
        """The seeds with which every setting was trained for so many steps."""
        found = None
        for by_seed in self.measured.values():
            there = {seed for seed, losses in by_seed.items() if longest in losses}
            found = there if found is None else found & there
        return sorted(found)

    def of(self, trial, seed, steps):
        """Nats per byte: a straight line over the logarithm of the steps between measured lengths,
        beyond them the nearest one's."""
        return interpolated(self.measured[trial][seed], steps)


def interpolated(losses, steps):
    """losses: {steps: loss}."""
    lengths = sorted(losses)
    if steps <= lengths[0]:
        return losses[lengths[0]]
    for below, above in zip(lengths, lengths[1:]):
        if steps <= above:
            share = math.log(steps / below) / math.log(above / below)
            return (1 - share) * losses[below] + share * losses[above]
    return losses[lengths[-1]]


def errors_of_lines(losses):
    """How far each inner length's loss is from the line between its neighbours: {steps: [nats]}
    over all trials and seeds, the line's less the measured."""
    found = {}
    for by_seed in losses.measured.values():
        for by_steps in by_seed.values():
            for left_out in sorted(by_steps)[1:-1]:
                others = {steps: loss for steps, loss in by_steps.items() if steps != left_out}
                error = interpolated(others, left_out) - by_steps[left_out]
                found.setdefault(left_out, []).append(error)
    return found


# ---------------------------------------------------------------- the seconds


def meetings_of(trial):
    """How the map takes this setting's replicas to meet: in one byte a weight."""
    overlap = BACKWARD if trial.method == "ddp" else 0
    return Meetings(trial.method, "int8", trial.every, trial.fragments, trial.delay,
                    overlap=overlap)


def steps_in(budget, trial, message, latency, replicas):
    """Steps in the time of `budget` steps without messages. message and latency: seconds over a
    step's."""
    situation = Situation(params=1, replicas=replicas, step=1, rate=1 / message, latency=latency)
    return budget / seconds_a_step(situation, meetings_of(trial))


# ---------------------------------------------------------------- the map


@dataclass
class Place:
    """A point of the map. best: {method: (its trial, [the loss of each seed])}."""
    best: dict
    is_known: bool = True       # whether the first one made as many steps as the shortest length

    @property
    def order(self):
        """The methods, the one with the lowest mean first."""
        return sorted(self.best, key=lambda method: statistics.mean(self.best[method][1]))

    @property
    def lead(self):
        """The first method's losses less the second's, seed by seed."""
        first, second = self.order[:2]
        pairs = zip(self.best[first][1], self.best[second][1])
        return Comparison([a - b for a, b in pairs])


def place_at(losses, budget, message, latency, replicas=8, widened=lambda trial, gap: gap):
    """The Place of a network.

    widened(trial, nats over DDP after as many steps) -> the same with other numbers of replicas.
    """
    best = {}
    made = {}
    seeds = losses.seeds(budget)
    for trial in losses.measured:
        steps = steps_in(budget, trial, message, latency, replicas)
        made[trial] = steps
        found = []
        for seed in seeds:
            base = losses.of(DDP, seed, steps)
            found.append(base + widened(trial, losses.of(trial, seed, steps) - base))
        kept = best.get(trial.method)
        if kept is None or statistics.mean(found) < statistics.mean(kept[1]):
            best[trial.method] = trial, found
    place = Place(best)
    first, _ = best[place.order[0]]
    place.is_known = made[first] >= min(LENGTHS)
    return place


# ---------------------------------------------------------------- more replicas


def growths(found):
    """{(method, m): how much of its gap to DDP with 8 replicas a setting gains with each doubling
    of the replicas}: least squares over 8 to 64, of results/headline_many.json."""
    gaps = {}
    runs = by_trial(found)
    for (optimizer, replicas), by_seed in runs.items():
        if optimizer != "adam" or replicas < 8:
            continue
        for trial in by_seed:
            if trial.method != "ddp" and trial.group == 2:
                more = nats_over(by_seed, trial, DDP, merged_loss).mean
                gaps.setdefault((trial.method, trial.every), {})[replicas] = more
    found_growths = {}
    for setting, at in gaps.items():
        doublings = [math.log2(replicas / 8) for replicas in at]
        relative = [gap / at[8] - 1 for gap in at.values()]
        squares = sum(d * d for d in doublings)
        found_growths[setting] = sum(d * r for d, r in zip(doublings, relative)) / squares
    return found_growths


def widened_by(growth, replicas, trial, gap):
    """A setting's gap with so many replicas, by the growth of the nearest m of its method."""
    if trial.method == "ddp":
        return gap
    measured = [m for method, m in growth if method == trial.method]
    nearest = min(measured, key=lambda m: abs(math.log(m / trial.every)))
    return gap * (1 + growth[trial.method, nearest] * math.log2(replicas / 8))


# ---------------------------------------------------------------- what was found


@dataclass(frozen=True)
class Mark:
    """A network that the map shows. step: assumed seconds of a step; mbit: of a link each way;
    latency: ms one way."""
    name: str
    params: float
    step: float
    mbit: float
    latency: float

    @property
    def message(self):
        """Seconds of one byte a weight over those of a step."""
        return 8 * self.params / (1e6 * self.mbit) / self.step

    @property
    def late(self):
        """The latency over a step."""
        return self.latency / 1000 / self.step

    @property
    def text(self):
        return f"{self.name}, {self.mbit:g} Mbit/s, {self.latency:g} ms, {self.step:g} s a step"


MARKS = (
    Mark("our hosts, 1.1M", 1.1e6, 0.2, 200, 5), Mark("our hosts, 1.1M", 1.1e6, 0.2, 50, 25),
    Mark("125M", 125e6, 1, 1000, 10), Mark("125M", 125e6, 1, 100, 50),
    Mark("1.3B", 1.3e9, 5, 1000, 50),
)


def whole(found, part):
    """Whether every setting has three seeds of the first lengths."""
    losses = Losses(found["rows"].values())
    known = set(losses.measured) == set(trials())
    return known and all(len(losses.seeds(length)) >= 3 for length in FIRST_LENGTHS)


def budget_of(losses):
    """The longest length that every setting was trained for with as many seeds as the others."""
    most = max(len(losses.seeds(length)) for length in LENGTHS)
    return max(length for length in LENGTHS if len(losses.seeds(length)) == most)


def name_of(trial):
    """As the tables have it: m, K and D."""
    words = [NAMES[trial.method]]
    if trial.method != "ddp":
        words.append(f"m {trial.every}")
    if trial.fragments > 1:
        words.append(f"K {trial.fragments}")
    if trial.delay:
        words.append(f"D {trial.delay}")
    return ", ".join(words)


def show(found):
    losses = Losses(found["rows"].values())
    budget = budget_of(losses)
    show_losses(losses)
    table = Table(f"in the time of {budget} steps", "first", "second", "nats, first less second")
    for mark in MARKS:
        place = place_at(losses, budget, mark.message, mark.late)
        names = [name_of(place.best[method][0]) for method in place.order[:2]]
        table.add(mark.text, *names, place.lead)
    table.end()


def show_losses(losses):
    lengths = [length for length in LENGTHS if losses.seeds(length)]
    table = Table("merged, nats per byte", *(f"{length} steps" for length in lengths))
    for trial in losses.measured:
        cells = []
        for length in lengths:
            some = [losses.of(trial, seed, length) for seed in losses.seeds(length)]
            cells.append(f"{statistics.mean(some):.3f}")
        table.add(name_of(trial), *cells)
    table.end()
    for length, errors in errors_of_lines(losses).items():
        print(f"a line from the lengths beside {length} misses what was measured there by "
              f"{statistics.mean(errors):+.4f} nats in the mean, at most "
              f"{max(errors, key=abs):+.4f}")
    print()


# ---------------------------------------------------------------- the picture


def chart_of(losses, replicas=8, widened=lambda trial, gap: gap):
    """The Place of every point: a list for each latency, in the order of LATENCIES."""
    budget = budget_of(losses)
    rows = []
    for latency in LATENCIES:
        rows.append([place_at(losses, budget, message, latency, replicas, widened)
                     for message in MESSAGES])
    return rows


def draw_8(plt, found):
    """The map of 8 replicas, with the marks."""
    losses = Losses(found["rows"].values())
    chart = chart_of(losses)
    figure, axis = plt.subplots(figsize=(WIDTH, 6))
    draw_map(axis, chart, MARKS)
    figure.suptitle(title_of(found, finding(chart), SUBJECT) + legend(losses), x=0.01, ha="left")
    return figure


def draw_many(plt, found):
    """The maps of 64 and of 1024 replicas."""
    losses = Losses(found["rows"].values())
    growth = growths(kept_result(ROOT, "headline_many"))
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH, 4.6), sharey=True)
    findings = []
    for axis, replicas in zip(axes, (64, 1024)):
        chart = chart_of(losses, replicas, partial(widened_by, growth, replicas))
        draw_map(axis, chart, ())
        beyond = ", beyond what was measured" if replicas > 64 else ""
        axis.set_title(f"{replicas} replicas{beyond}")
        findings.append(f"{replicas} replicas: {finding(chart)}")
    figure.suptitle(title_of(found, "\n".join(findings), SUBJECT) + legend(losses), x=0.01,
                    ha="left")
    return figure


SUBJECT = "Which method loses least in equal time"


def finding(chart):
    """On which share of the map each method leads with an interval that leaves out zero."""
    places = [place for row in chart for place in row]
    leads = Counter(place.order[0] for place in places if leads_clearly(place))
    shares = [f"{NAMES[method]} on {count / len(places):.0%}" for method, count in
              leads.most_common()]
    return f"{SUBJECT}: {', '.join(shares) or 'none'} of the map; else we cannot tell"


def leads_clearly(place):
    return place.is_known and place.lead.verdict == "better"


def legend(losses):
    budget = budget_of(losses)
    seeds = counted(len(losses.seeds(budget)), "seed")
    return (f"\n(the time of {budget} steps without messages; full colour: 0.1 nats or more ahead "
            f"of the next method;\nhatched: {seeds} cannot tell; blank: too few steps were made; "
            "losses measured, seconds computed)")


def draw_map(axis, chart, marks):
    """Each point in the colour of the method that loses least, fainter the less it leads."""
    pixels = []
    unclear = []
    spots = {}                      # {method: [(x, y) of its points]}
    for latency, places in zip(LATENCIES, chart):
        pixels.append([(*rgb(SHADES[place.order[0]]), strength(place)) for place in places])
        unclear.append([place.is_known and not leads_clearly(place) for place in places])
        for message, place in zip(MESSAGES, places):
            if place.is_known:
                spots.setdefault(place.order[0], []).append((message, latency))
    axis.pcolormesh(MESSAGES, LATENCIES, pixels, shading="nearest", rasterized=True)
    if any(map(any, unclear)):
        axis.contourf(MESSAGES, LATENCIES, unclear, levels=[0.5, 1.5], colors="none",
                      hatches=["//"])
    axis.set(xscale="log", yscale="log", ylabel="latency over a step's seconds",
             xlabel="\n".join(["seconds of a one-byte message over a step's", *listed(marks)]),
             xlim=(MESSAGES[0], MESSAGES[-1]), ylim=(LATENCIES[0], LATENCIES[-1]))
    axis.grid(visible=False)
    for method, points in spots.items():
        name_region(axis, NAMES[method], points)
    for number, mark in enumerate(marks, 1):
        axis.plot(mark.message, mark.late, "o", color="white", mec="black", ms=13)
        axis.annotate(str(number), (mark.message, mark.late), ha="center", va="center_baseline")


SHADES = {"ddp": "#777777", "diloco": COLOURS["DiLoCo"], "noloco": COLOURS["NoLoCo"]}


def listed(marks):
    """The lines that say what the numbers on the map are."""
    return [f"{number}: {mark.text}" for number, mark in enumerate(marks, 1)]


def rgb(colour):
    """"#rrggbb" -> three numbers from 0 to 1."""
    return [int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)]


def strength(place):
    """Of the colour: 0 where the map is blank, else from 0.15 to 0.85 by the lead in nats."""
    if not place.is_known:
        return 0
    return 0.15 + 0.7 * min(1, -place.lead.mean / 0.1)


def name_region(axis, name, points):
    """Write the method's name at one of its points, the nearest to their middle."""
    x = statistics.mean(math.log(message) for message, _ in points)
    y = statistics.mean(math.log(latency) for _, latency in points)

    def away(point):
        return (math.log(point[0]) - x) ** 2 + (math.log(point[1]) - y) ** 2

    place = min(points, key=away)
    axis.text(*place, name, ha="center", va="center", weight="bold", fontsize=12,
              bbox=dict(color="white", alpha=0.7, pad=1.5))


PARTS = {"lengths": Part(lessons_of, show, None, {"map": draw_8, "map_many": draw_many},
                         measure=measure, is_whole=whole)}

if __name__ == "__main__":
    headline(__doc__, PARTS)
