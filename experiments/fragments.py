"""Fragments: the weights meet in K parts by turns, beside whole messages (experiments/fleet.py).

    python -m experiments.fragments [PART ...] [--seeds 0] [--steps N] [--out DIR] [--plot]

fragments   the loss of NoLoCo and DiLoCo, whole (K = 1) and in fragments, at once and delayed
why         what the replicas differ in (experiments/apart.py), and two kinds of fragments that are
            nobody's: with the same partners for all of a round, and all due at the same step

Adam, fp32, 1024 tokens a replica and step, 600 steps and 8 replicas, where nothing else is said;
plain averages. m: steps between an outer step and the next of the same weights; K: fragments; D:
delay. Each trial of RATED has the best of three learning rates, by the merged loss on seed 0, the
others the rate of the nearest one. PRIMARY holds the comparisons that were named before the runs.
They have five seeds, the others three.
"""
import itertools
import math
import statistics
from dataclasses import replace

from experiments import apart, replicas
from experiments.comparing import Comparison, Table
from experiments.fleet import Trial
from experiments.fleets import Lesson, kept_rows, train_lessons
from experiments.harness import Part, headline, title_of
from experiments.pictures import COLOURS, WIDTH, bars, label_ends
from experiments.replicas import (DDP, LENGTH, SEQUENCES, bytes_of_ddp, in_percent, mean_loss,
                                  merged_loss)
from plumbing.drawing import NAMES

RATES = {"adam": (3e-3, 6e-3, 1.2e-2), "muon": (6e-3, 1.2e-2, 2.4e-2)}
WHOLE, PARTS_OF_10 = Trial("noloco", 10), Trial("noloco", 10, fragments=10)
PRIMARY = (     # each over the other
    (PARTS_OF_10, WHOLE),
    (Trial("noloco", 10, 1, fragments=10), Trial("noloco", 10, 5)),
    (PARTS_OF_10, Trial("diloco", 20, fragments=20)),
    (Trial("noloco", 2, fragments=2), Trial("diloco", 4, fragments=4)),
)
IN_PRIMARY = tuple(dict.fromkeys([DDP, *itertools.chain(*PRIMARY)]))
RATED = {"adam": (*IN_PRIMARY, Trial("diloco", 20)), "muon": (DDP, WHOLE, PARTS_OF_10)}
# The embedding, the last norm and the head are a fifth of the weights: the bytes of m = 10.
TWO_PACES = Trial("noloco", 16, ends=4)
EVERY = 2, 4, 10, 20, 50
FIVE = 0, 1, 2, 3, 4
WHY_RATE = 3e-3         # of all of WHY: what replicas differ in depends on the rate
WHY = {
    "whole messages": WHOLE,
    "fragments: own partners, in turn": PARTS_OF_10,
    "fragments: the same partners, in turn": Trial("noloco", 10, fragments=10, partners="same"),
    "fragments: own partners, at one step": Trial("noloco", 10, fragments=10, phase="together"),
    "DiLoCo, whole": Trial("diloco", 10),
    "DiLoCo, fragments": Trial("diloco", 10, fragments=10),
}
PLAIN = "adam", 8, SEQUENCES * LENGTH       # optimizer, replicas, tokens of a replica's step


def setting_of(optimizer="adam", replicas=8, sequences=SEQUENCES):
    return optimizer, replicas, sequences * LENGTH


# ---------------------------------------------------------------- what is trained


def name_of(trial):
    """As the tables have it."""
    words = [NAMES[trial.method]]
    if trial.method != "ddp":
        words.append(f"m {trial.every}")
    if trial.ends:
        words.append(f"embedding and head every {trial.ends}")
    if trial.fragments > 1:
        words.append(f"K {trial.fragments}")
    if trial.delay:
        words.append(f"D {trial.delay}")
    if trial.wire != "fp32":
        words.append("one byte")
    if trial.group > 2:
        words.append(f"groups of {trial.group}")
    return ", ".join(words)


def rate_of(trial, best, optimizer="adam"):
    """The rate found for the trial, or for the nearest one that was rated: of its method, whole or
    in fragments like it, then by m, then by whether it is delayed.

    best: {optimizer: best_rates}."""
    alike = [rated for rated in RATED[optimizer] if rated.method == trial.method and
             (rated.fragments > 1) == (trial.fragments > 1)]

    def distance(rated):
        return abs(math.log(rated.every / trial.every)), (rated.delay > 0) != (trial.delay > 0)

    return best[optimizer][name_of(min(alike, key=distance))]


def rate_lessons(optimizer, steps):
    """{name of a rated trial: [a Lesson for each rate]} on seed 0."""
    found = {}
    for trial in RATED[optimizer]:
        found[name_of(trial)] = [Lesson(trial, 0, lr, optimizer, steps=steps)
                                 for lr in RATES[optimizer]]
    return found


def best_rates(rows, optimizer, steps):
    """{name of a rated trial: the rate with the lowest merged loss}, of those that are trained;
    None while a trial has fewer than two."""
    best = {}
    for name, lessons in rate_lessons(optimizer, steps).items():
        trained = [lesson for lesson in lessons if lesson.label in rows]
        if len(trained) < 2:
            return None
        best[name] = min(trained, key=lambda lesson: rows[lesson.label]["merged"]).lr
    return best


def grid():
    """The trials of the table of all m."""
    for method, m in itertools.product(("noloco", "diloco"), EVERY):
        for delay in sorted({0, 1, m // 2}):
            yield Trial(method, m, delay)
        for delay in 0, 1:
            yield Trial(method, m, delay, fragments=m)


def at_10():
    """The trials of m = 10 that have more than the grid's two numbers of fragments."""
    for method, count in itertools.product(("noloco", "diloco"), (2, 5)):
        yield Trial(method, 10, fragments=count)
    for count in 1, 10:
        yield Trial("noloco", 10, wire="int8", fragments=count)
        yield Trial("noloco", 10, group=4, fragments=count)
    yield TWO_PACES


SETTINGS = {    # of NoLoCo, m = 10, K = 1 and 10, beside DDP: options of Lesson
    "Muon": dict(optimizer="muon"),
    "4096 tokens a step": dict(sequences=32),
    "32 replicas": dict(replicas=32),
}


def lessons_of(best, seeds, steps):
    """The lessons, in the order of their weight. best: {optimizer: best_rates or None}."""
    for seed, trial in itertools.product(seeds or FIVE, IN_PRIMARY):
        yield lesson_of(trial, seed, best, steps)
    for seed in seeds or FIVE[:3]:
        for trial in itertools.chain(grid(), at_10()):
            if trial not in IN_PRIMARY:
                yield lesson_of(trial, seed, best, steps)
        for options in SETTINGS.values():
            optimizer = options.get("optimizer", "adam")
            for trial in DDP, WHOLE, PARTS_OF_10:
                if best[optimizer]:
                    rate = rate_of(trial, best, optimizer)
                    yield Lesson(trial, seed, rate, steps=steps, **options)


def lesson_of(trial, seed, best, steps):
    """In the plain setting. What WHY compares is watched closely, in either part."""
    rate = rate_of(trial, best)
    closely = trial in WHY.values() and rate == WHY_RATE
    return Lesson(trial, seed, rate, steps=steps, closely=closely)


def why_lessons(seeds, steps):
    for seed, trial in itertools.product(seeds or FIVE[:3], WHY.values()):
        yield Lesson(trial, seed, WHY_RATE, steps=steps, closely=True)


def measure_fragments(name, part, o):
    """Train what OUT/results and runs/fleets do not have; all rows of the part, {label: row}."""
    steps = o.steps or 600
    rows = kept_rows(name, o)
    for optimizer in RATES:
        for lessons in rate_lessons(optimizer, steps).values():
            train_lessons([lesson for lesson in lessons if o.only in lesson.label], rows)
    best = {optimizer: best_rates(rows, optimizer, steps) for optimizer in RATES}
    if best["adam"]:
        lessons = lessons_of(best, o.seeds, steps)
        train_lessons([lesson for lesson in lessons if o.only in lesson.label], rows, apart.Apart)
    return dict(best=best, rows=rows, steps=o.steps)


def measure_why(name, part, o):
    """As above. All have one rate."""
    rows = kept_rows(name, o)
    lessons = [lesson for lesson in why_lessons(o.seeds, o.steps or 600) if o.only in lesson.label]
    train_lessons(lessons, rows, apart.Apart)
    return dict(rows=rows, steps=o.steps)


# ---------------------------------------------------------------- what was found


class Rows:
    """The rows of a part that have the rate of their trial. rate: (trial, optimizer) -> float."""

    def __init__(self, found, rate):
        self.rows = {}              # {setting: {trial: {seed: row}}}
        for row in found["rows"].values():
            trial, optimizer = Trial(**row["trial"]), row["optimizer"]
            if row["lr"] == rate(trial, optimizer):
                setting = optimizer, row["replicas"], row["tokens"]
                trials = self.rows.setdefault(setting, {})
                trials.setdefault(trial, {})[row["seed"]] = row

    def of(self, trial, setting=PLAIN):
        """{seed: row}, perhaps of no seed."""
        return self.rows.get(setting, {}).get(trial, {})

    def losses(self, trial, loss=merged_loss, setting=PLAIN):
        return [loss(row) for row in self.of(trial, setting).values()]

    def mean(self, trial, loss=merged_loss):
        """Of all seeds, as a cell; None without any."""
        losses = self.losses(trial, loss)
        return f"{statistics.mean(losses):.3f}" if losses else None

    def nats_over(self, trial, base, loss=merged_loss, setting=PLAIN):
        """As in replicas.py, of one setting."""
        return replicas.nats_over(self.rows.get(setting, {}), trial, base, loss)

    def gap(self, trial, setting=PLAIN):
        """As in replicas.py, of one setting."""
        return replicas.gap(self.rows.get(setting, {}), trial)


def rows_of_fragments(found):
    def rate(trial, optimizer):
        return found["best"][optimizer] and rate_of(trial, found["best"], optimizer)

    return Rows(found, rate)


def rows_of_why(found):
    return Rows(found, lambda trial, optimizer: WHY_RATE)


def show_fragments(found):
    rows = rows_of_fragments(found)
    show_rates(found)
    table = Table("primary comparison, nats per byte", "merged", "replicas' mean")
    for trial, base in PRIMARY:
        table.add(f"{name_of(trial)} over {name_of(base)}", rows.nats_over(trial, base),
                  rows.nats_over(trial, base, mean_loss))
    table.end()
    show_grid(rows)
    show_delays(rows)
    show_at_10(rows)


def show_rates(found):
    table = Table("merged, seed 0, nats per byte", "smaller rate", "middle", "larger", "best")
    tried = {}
    for row in found["rows"].values():
        setting = row["optimizer"], row["replicas"], row["tokens"]
        if row["seed"] == 0:
            tried[setting, Trial(**row["trial"]), row["lr"]] = row["merged"]
    for optimizer, trials in RATED.items():
        best = found["best"][optimizer]
        for trial in trials:
            if best:
                losses = [tried.get((setting_of(optimizer), trial, lr)) for lr in RATES[optimizer]]
                table.add(f"{name_of(trial)}, {optimizer.title()}",
                          *(loss and f"{loss:.3f}" for loss in losses), best[name_of(trial)])
    table.end()


def show_grid(rows):
    """All m, at once: whole and in as many fragments as steps."""
    table = Table("D = 0", "merged, K = 1", "merged, K = m", "merged: K = m over K = 1",
                  "K = m, over DDP's")
    for method, m in itertools.product(("noloco", "diloco"), EVERY):
        whole, parts = Trial(method, m), Trial(method, m, fragments=m)
        add_known(table, f"{NAMES[method]}, m {m}", rows.mean(whole), rows.mean(parts),
                  rows.nats_over(parts, whole), rows.gap(parts))
    table.end()


def show_delays(rows):
    table = Table("merged, nats per byte", "K = 1, D = 1", "K = m, D = 1", "K = 1, D = m / 2",
                  "K = m, D = 1 over K = 1, D = m / 2")
    for method, m in itertools.product(("noloco", "diloco"), EVERY):
        parts, half = Trial(method, m, 1, fragments=m), Trial(method, m, m // 2)
        add_known(table, f"{NAMES[method]}, m {m}", rows.mean(Trial(method, m, 1)),
                  rows.mean(parts), rows.mean(half), rows.nats_over(parts, half))
    table.end()


def add_known(table, name, *cells):
    """Add the row, unless nothing of it is trained."""
    if any(cells):
        table.add(name, *cells)


def show_at_10(rows):
    """Every 10 steps: other numbers of fragments and other settings."""
    table = Table("every 10 steps", "merged", "merged, over whole messages",
                  "merged, over DDP's")
    for trial in at_10():
        base = replace(trial, fragments=1)
        if trial == TWO_PACES:
            base = WHOLE
        over_whole = rows.nats_over(trial, base) if trial != base else None
        add_known(table, name_of(trial), rows.mean(trial), over_whole, rows.gap(trial))
    for name, options in SETTINGS.items():
        setting = setting_of(**options)
        for trial in WHOLE, PARTS_OF_10:
            losses = rows.losses(trial, setting=setting)
            over_whole = rows.nats_over(trial, WHOLE, setting=setting) if trial != WHOLE else None
            mean = f"{statistics.mean(losses):.3f}" if losses else None
            add_known(table, f"{name_of(trial)}, {name}", mean, over_whole,
                      rows.gap(trial, setting))
    table.end()


def draw_fragments(plt, found):
    """The merged model's gap to DDP against the bytes that a rank sends, whole and in fragments."""
    rows = rows_of_fragments(found)
    figure, axis = plt.subplots(figsize=(WIDTH, 4.6))
    for method, (kind, dashes) in itertools.product(("noloco", "diloco"), KINDS.items()):
        x = []
        points = []
        for m in EVERY:
            trial = Trial(method, m, fragments=m if kind == "in fragments" else 1)
            more = rows.gap(trial)
            if more:
                x.append(100 * bytes_of_ddp(trial, 8))
                points.append(in_percent(more))
        if x:
            bars(axis, points, x, COLOURS[NAMES[method]], ls=dashes,
                 label=f"{NAMES[method]}, {kind}")
    axis.set_xscale("log")
    ticks = (50, 25, 10, 5, 2, 1)
    axis.set(xlim=(60, 0.7), xticks=ticks, xticklabels=[f"{tick}%" for tick in ticks],
             xlabel="bytes that a rank sends to synchronise, of DDP's (fewer to the right; fp32, "
             "8 replicas, Adam)", ylabel="perplexity over DDP's, %\n(bars: range of the seeds)",
             title=title_of(found, finding(rows), "Whole messages and fragments"))
    axis.minorticks_off()
    label_ends(axis)
    return figure


def finding(rows):
    """What the picture shows; none while a seed is alone."""
    first = rows.nats_over(*PRIMARY[0])
    return FINDINGS.get(first.verdict if first else None, "")


KINDS = {"whole messages": "--", "in fragments": "-"}
FINDINGS = {        # by the verdict of the first primary comparison
    "better": "In fragments the gap to DDP is narrower for the same bytes",
    "worse": "In fragments the gap to DDP is wider for the same bytes",
    "cannot tell": "We cannot tell the gap to DDP in fragments from that of whole messages",
}


# ---------------------------------------------------------------- what replicas differ in


def show_why(found):
    """Of the kinds of fragments, at all ages of a message: the last PERIOD steps."""
    rows = rows_of_why(found)
    table = Table("m = 10, D = 0", "merged, nats per byte", "over whole messages")
    for name, trial in WHY.items():
        if rows.of(trial):
            over_whole = rows.nats_over(trial, whole_of(trial)) if trial.fragments > 1 else None
            table.add(name, rows.mean(trial), over_whole)
    table.end()
    table = Table("the last 100 steps", "spread", "over whole messages'",
                  "KL of merged from replicas", "over whole messages' KL")
    for name, trial in WHY.items():
        if rows.of(trial):
            cells = []
            for form, measure in ((".2e", spread_of_row), (".4f", distance_of_row)):
                values = [measure(row) for row in rows.of(trial).values()]
                cells.append(f"{statistics.mean(values):{form}}")
                over_whole = None
                if trial.fragments > 1:
                    over_whole = relative(rows, trial, whole_of(trial), measure)
                cells.append(over_whole)
            table.add(name, *cells)
    table.end()
    table = Table("replicas' mean less merged", "all ages", "just after an outer step",
                  "just before the next", "middle of a line between two, less its ends")
    for name, trial in WHY.items():
        if rows.of(trial):
            costs = [cost_by_age(row) for row in rows.of(trial).values()]
            bumps = [bump(row) for row in rows.of(trial).values()]
            table.add(name, *(f"{statistics.mean(values):.4f}" for values in (
                [later_mean(cost) for cost in costs], [cost[-1] for cost in costs],
                [cost[-2] for cost in costs], bumps)))
    table.end()


def whole_of(trial):
    """The same method's whole messages."""
    return Trial(trial.method, trial.every)


def spread_of_row(row):
    """Of the replicas' weights, the mean over the last 100 steps."""
    return statistics.mean(row["spreads"][-100:])


def distance_of_row(row):
    """The mean KL divergence of the merged model from the replicas, at all ages of a message."""
    return later_mean(row["distance_by_age"])


def relative(rows, trial, base, measure):
    """measure(row) over that of the base with the same seed, less 1."""
    values, others = replicas.pairs(rows.rows[PLAIN], trial, base, measure)
    return Comparison([value / other - 1 for value, other in zip(values, others)], "+.1%")


def later_mean(by_age):
    """Over one whole period: the first of the PERIOD + 1 steps is left out."""
    return statistics.mean(by_age[1:])


def cost_by_age(row):
    """Nats per byte at the last steps."""
    return [mean - merged for mean, merged in zip(row["mean_by_age"], row["merged_by_age"])]


def bump(row):
    ends = (row["line"][0] + row["line"][-1]) / 2
    return row["line"][len(row["line"]) // 2] - ends


def has_all_primary(found, part):
    rows = rows_of_fragments(found)
    return not found["steps"] and all(len(rows.of(trial)) == len(FIVE) for trial in IN_PRIMARY)


def has_all_why(found, part):
    rows = rows_of_why(found)
    return not found["steps"] and all(len(rows.of(trial)) == 3 for trial in WHY.values())


PARTS = {
    "fragments": Part(None, show_fragments, None, {"fragments": draw_fragments},
                      measure=measure_fragments, is_whole=has_all_primary),
    "why": Part(None, show_why, None, {}, measure=measure_why, is_whole=has_all_why),
}

if __name__ == "__main__":
    headline(__doc__, PARTS)
