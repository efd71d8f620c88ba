"""Which method on which network: losses measured once, seconds computed for any network.

    python -m experiments.regions [lengths] [--seeds 0 1 2 3 4] [--steps N] [--out DIR] [--plot]

lengths     losses of DDP, DiLoCo and NoLoCo (pairs), every 1 to 50 steps, whole and in fragments,
            at once and delayed, after 150, 300, 600 and 1200 steps, and with the first seed after
            2400; each run has a schedule planned for just so many steps. 8 replicas in one process
            (experiments/fleet.py), 1024 tokens a replica and step, one byte a weight, Adam, plain
            averages, the rates of experiments/fragments.py. After 600 steps also in fp32. 14
            minutes of an H100, or 50 hours of two cores

The map. On a network a setting's step takes s times as long as one without messages
(gossip/pace.py, over Gloo, all in one byte a weight). In the time of T steps without messages it
makes n = T / s steps, and loses what it lost after n steps (experiments/lengths.py: between
measured lengths a line over 1 / sqrt(n); the tables say how far it is off). After fewer steps than
the shortest length a setting has that one's loss, which favours it: where such a setting loses
least, the map is blank. Of each method the best of its settings counts. For each seed it is chosen
by the other seeds, so that the interval of the methods' differences owes nothing to the choice. T
is 1200; the tables have 600, too, and 2400 with one seed.

Where all replicas' steps take f times as long, or one's do, for which all others wait, the point is
the one with a message of 1 / f and a latency of 1 / f.

What the map takes for granted: DDP's average overlaps with the backward pass, as in no run here.
Writing, coding and summing take no time. Links do not contend. The lines between lengths are exact.
Above the dashed line steps between our hosts took 1.5 times the computed seconds, DDP's twice
(docs/speed.md).

With N replicas instead of 8, DDP is taken to lose after as many steps what it loses with 8 (with 64
it loses 0.1 nats less, as all do), and a setting's gap to it grows by as many nats with each
doubling of N as those of results/headline_many.json from 8 to 64: whole messages at once, 600
steps; between their m on a straight line over log m. The growth's own error is left out.
"""
import itertools
import statistics
from dataclasses import dataclass

from experiments import fragments
from experiments.charts import draw_chart, lead_in_words, leads_in
from experiments.comparing import Table
from experiments.fleet import Trial
from experiments.fleets import measure_lessons
from experiments.harness import FIVE, Part, headline, title_of
from experiments.lengths import (COMPARED, MAPPED, best_rates, in_fp32, losses_of, show_errors,
                                 show_wire)
from experiments.pictures import WIDTH, counted
from experiments.places import advice_costs, growth_of, place_at
from experiments.results import ROOT, kept_result
from gossip.advice import BACKWARD
from plumbing.drawing import NAMES

METHODS = "ddp", "diloco", "noloco"
WIRE = "int8"               # of all methods
EVERY = 1, 2, 5, 10, 20, 50
FIRST_LENGTHS = 150, 300, COMPARED, MAPPED  # with all seeds
LENGTHS = *FIRST_LENGTHS, 2400              # with the first
LATE = 0.35                                 # a latency, over a step
# The map's points: seconds of a one-byte message over those of a step, and the latency over a step.
MESSAGES = [0.03 * 10 ** (i / 10) for i in range(31)]
LATENCIES = [0.001 * 10 ** (i / 10) for i in range(31)]


# ---------------------------------------------------------------- the runs


def trials():
    """Every setting: DDP first."""
    yield Trial("ddp", wire=WIRE)
    for m, method in itertools.product(EVERY, ("diloco", "noloco")):
        for K, D in ways(m):
            yield Trial(method, m, D, WIRE, fragments=K)


def ways(m):
    """(K, D) of the settings that meet every m steps."""
    for D in sorted({0, 1, m // 2}):
        yield 1, D
    if m > 1:
        yield m, 0
        yield m, 1
    if m >= 10:                 # messages that are always under way, as those of K = m, D = 1
        yield 2, m // 2
        yield 5, m // 5


def name_of(trial):
    """As fragments.py has it, without the wire, which all have alike."""
    return fragments.name_of(in_fp32(trial))


def lessons_of(seeds, lengths):
    """In the order of their weight: the longer lengths last, then those in fp32."""
    best = best_rates()
    for wanted, some in ((FIRST_LENGTHS, seeds), (LENGTHS, seeds[:1])):
        for seed, steps in itertools.product(some, lengths or wanted):
            for trial in trials():
                yield fragments.lesson_of(trial, seed, best, steps)
    for seed, trial in itertools.product(seeds, trials()):
        yield fragments.lesson_of(in_fp32(trial), seed, best, max(lengths or [COMPARED]))


def measure(name, part, o):
    lengths = [o.steps] if o.steps else None
    lessons = dict.fromkeys(lessons_of(o.seeds or list(part.seeds), lengths))
    return measure_lessons(name, o, lessons)



# ---------------------------------------------------------------- what was found


def chart_of(losses, budget, growth=None, overlap=BACKWARD):
    """The Place of every point: a list for each latency, in the order of LATENCIES. growth and
    overlap: of places.place_at."""
    rows = []
    for latency in LATENCIES:
        rows.append([place_at(losses, budget, message, latency, growth, overlap)
                     for message in MESSAGES])
    return rows


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
    """Whether every setting has all seeds of the first lengths."""
    losses = losses_of(found, WIRE)
    has_all = set(losses.measured) == set(trials()) and losses.lengths >= set(FIRST_LENGTHS)
    return has_all and len(losses.seeds(max(FIRST_LENGTHS))) >= len(part.seeds)


def show(found):
    losses = losses_of(found, WIRE)
    budgets = losses.budgets()
    show_losses(losses, budgets)
    shown = {}
    for budget, seeds in budgets.items():
        if budget >= min(COMPARED, max(budgets)):
            shown[budget] = seeds
    for budget, seeds in shown.items():
        show_marks(losses, budget, seeds)
    several = [budget for budget, seeds in shown.items() if len(seeds) > 1]
    if several:
        show_leads(losses, several)
        show_advice(losses, several)
    exact = losses_of(found, "fp32")
    if exact.measured:
        show_wire(losses, exact)
    show_errors(losses)
    corpora = {row["digest"] for row in found["rows"].values()}
    if len(corpora) > 1:
        print(f"warning: these are of {len(corpora)} texts, and do not compare")


def show_losses(losses, budgets):
    """A table for the lengths that have all seeds, and one for those that have fewer."""
    alike = {}                              # {seeds: lengths}
    for length, seeds in budgets.items():
        alike.setdefault(tuple(seeds), []).append(length)
    for seeds, lengths in alike.items():
        table = Table(f"merged, nats per byte, {counted(len(seeds), 'seed')}",
                      *(f"{length} steps" for length in lengths))
        for trial in trials():
            if trial not in losses.measured:
                continue
            cells = []
            for length in lengths:
                mean = statistics.mean(losses.of(trial, seed, length) for seed in seeds)
                cells.append(f"{mean:.3f}")
            table.add(name_of(trial), *cells)
        table.end()


def show_marks(losses, budget, seeds):
    """Who is first at each mark."""
    table = Table(f"in the time of {budget} steps, {counted(len(seeds), 'seed')}", "first",
                  "second", "nats, first less second")
    for mark in MARKS:
        place = place_at(losses, budget, mark.message, mark.late)
        names = [name_of(place.settings[method]) for method in place.order[:2]]
        table.add(mark.text, *names, place.lead if place.is_known else "too few steps")
    table.end()


def show_leads(losses, budgets):
    """On what share of the map's points each method leads clearly."""
    table = Table("a method leads clearly, of the map's points", *(NAMES[m] for m in METHODS),
                  "cannot tell")
    for budget in budgets:
        chart = chart_of(losses, budget)
        late = [row for latency, row in zip(LATENCIES, chart) if latency > LATE]
        alone = chart_of(losses, budget, overlap=0)
        table.add(f"{budget} steps", *cells_of(chart))
        table.add(f"{budget} steps, latency above {LATE:g} of a step", *cells_of(late))
        table.add(f"{budget} steps, DDP without overlap", *cells_of(alone))
    table.end()


def cells_of(chart):
    """The share of the points where each method leads clearly, and where seeds cannot tell."""
    shares, unclear = leads_in(chart)
    cells = [f"{shares.get(method, 0):.0%}" for method in METHODS]
    return [*cells, f"{unclear:.0%}"]


def show_advice(losses, budgets):
    """What one loses who takes the setting that --advise's rule picks, over all points."""
    table = Table("the map's setting that --advise's rule picks, over the method's best",
                  "mean nats", "nine of ten points below", "most", "points without one")
    points = list(itertools.product(MESSAGES, LATENCIES))
    for budget, method in itertools.product(budgets, METHODS[1:]):
        costs, missing = advice_costs(losses, method, budget, points)
        if costs:
            costs.sort()
            cells = statistics.mean(costs), costs[int(0.9 * len(costs))], costs[-1]
            table.add(f"{NAMES[method]}, {budget} steps", *(f"{cost:.3f}" for cost in cells),
                      missing)
    table.end()


SUBJECT = "Which method loses least in equal time"


def draw_8(plt, found):
    """The map of 8 replicas, with the marks."""
    losses = losses_of(found, WIRE)
    chart = chart_of(losses, losses.budget())
    figure, axis = plt.subplots(figsize=(WIDTH, 6))
    draw_chart(axis, MESSAGES, LATENCIES, chart, MARKS)
    title = title_of(found, f"Who leads in equal time, of the points drawn: {lead_in_words(chart)}",
                     SUBJECT)
    figure.suptitle(title + legend(losses, [chart]), x=0.01, ha="left")
    return figure


def draw_many(plt, found):
    """The maps of 64 and of 1024 replicas."""
    losses = losses_of(found, WIRE)
    many = kept_result(ROOT, "headline_many")
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH, 4.8), sharey=True)
    findings = ["Who leads in equal time, of the points drawn, if gaps to DDP grow as from 8 to 64 "
                "replicas"]
    charts = []
    for axis, replicas in zip(axes, (64, 1024)):
        chart = chart_of(losses, losses.budget(), growth_of(many, replicas))
        charts.append(chart)
        draw_chart(axis, MESSAGES, LATENCIES, chart, ())
        beyond = ", beyond what was measured" if replicas > 64 else ""
        axis.set_title(f"{replicas} replicas{beyond}")
        findings.append(f"with {replicas} replicas {lead_in_words(chart)}")
    title = title_of(found, "\n".join(findings), SUBJECT)
    figure.suptitle(title + legend(losses, charts), x=0.01, ha="left")
    return figure


def legend(losses, charts):
    budget = losses.budget()
    seeds = losses.seeds(budget)
    places = itertools.chain.from_iterable(itertools.chain(*charts))
    blank = ""
    if not all(place.is_known for place in places):
        blank = "blank: too few steps; "
    return (f"\n(the time of {budget} steps without messages; full colour: 0.1 nats or more ahead "
            f"of the next method;\nhatched: {counted(len(seeds), 'seed')} cannot tell, each point "
            f"alone; {blank}losses of 8 replicas, seconds computed)")


PARTS = {"lengths": Part(lessons_of, show, None, {"map": draw_8, "map_many": draw_many},
                         seeds=FIVE, measure=measure, is_whole=whole)}

if __name__ == "__main__":
    headline(__doc__, PARTS)
