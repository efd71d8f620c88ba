"""Why fragments change the loss: what replicas differ in (experiments/apart.py), a part of
experiments/fragments.py.

Beside whole messages and fragments, two kinds of fragments that are nobody's: with the same
partners for all of a round, and all due at the same step.
"""
import itertools
import statistics

from experiments import replicas
from experiments.comparing import Comparison, Table
from experiments.fleet import Trial
from experiments.fleets import PLAIN, Lesson, Rows, measure_lessons
from experiments.harness import FIVE, Part

WHY_RATE = 3e-3         # of all of WHY: what replicas differ in depends on the rate
WHY = {
    "whole messages": Trial("noloco", 10),
    "fragments: own partners, in turn": Trial("noloco", 10, fragments=10),
    "fragments: the same partners, in turn": Trial("noloco", 10, fragments=10, partners="same"),
    "fragments: own partners, at one step": Trial("noloco", 10, fragments=10, phase="together"),
    "DiLoCo, whole": Trial("diloco", 10),
    "DiLoCo, fragments": Trial("diloco", 10, fragments=10),
}


def why_lessons(seeds, steps):
    for seed, trial in itertools.product(seeds or FIVE, WHY.values()):
        yield Lesson(trial, seed, WHY_RATE, steps=steps, closely=True)


def measure_why(name, part, o):
    return measure_lessons(name, o, why_lessons(o.seeds, o.steps or 600))


def rows_of_why(found):
    return Rows(found, lambda trial, optimizer: WHY_RATE)


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
            always = [later_mean(cost) for cost in costs]
            after = [cost[-1] for cost in costs]
            before = [cost[-2] for cost in costs]
            bumps = [bump(row) for row in rows.of(trial).values()]
            columns = always, after, before, bumps
            table.add(name, *(f"{statistics.mean(values):.4f}" for values in columns))
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


def has_all_why(found, part):
    rows = rows_of_why(found)
    return not found["steps"] and all(len(rows.of(trial)) == len(FIVE) for trial in WHY.values())


PART = Part(None, show_why, None, {}, measure=measure_why, is_whole=has_all_why)
