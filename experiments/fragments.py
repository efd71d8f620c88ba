"""Fragments: the weights meet in K parts by turns, beside whole messages (experiments/fleet.py).

    python -m experiments.fragments [PART ...] [--seeds 0] [--steps N] [--out DIR] [--plot]

fragments   the loss of NoLoCo and DiLoCo, whole (K = 1) and in fragments, at once and delayed: 9
            minutes of an H100, or 14 hours of two cores
primary     only the comparisons that were named before the runs, on CPUs: 2 hours of two cores

Adam, fp32, 1024 tokens a replica and step, 600 steps, 8 replicas and five seeds, where nothing else
is said; plain averages. m: steps between an outer step and the next of the same weights; K:
fragments; D: delay. Each trial of RATED has the best of three learning rates, by the merged loss on
seed 0, the others the rate of the nearest one. PRIMARY holds the comparisons that were named before
the runs.
"""
import itertools
import math
import statistics
from dataclasses import replace

from experiments.comparing import Comparison, Table, lower_and_sure
from experiments.fleet import Trial
from experiments.fleets import Lesson, Rows, kept_rows, named, setting_of, train_lessons
from experiments.harness import FIVE, Part, headline, title_of
from experiments.pictures import COLOURS, WIDTH, bars, label_ends
from experiments.replicas import DDP, bytes_of_ddp, in_percent, mean_loss
from planning.drawing import NAMES

RATES = {"adam": (3e-3, 6e-3, 1.2e-2), "muon": (6e-3, 1.2e-2, 2.4e-2)}
WHOLE, PARTS_OF_10 = Trial("noloco", 10), Trial("noloco", 10, fragments=10)
PRIMARY = (     # each over the other
    (PARTS_OF_10, WHOLE),
    (Trial("noloco", 10, 1, fragments=10), Trial("noloco", 10, 5)),
    (PARTS_OF_10, Trial("diloco", 20, fragments=20)),
    (Trial("noloco", 2, fragments=2), Trial("diloco", 4, fragments=4)),
)
ALSO = (        # what the delays of the second one cost, and what is left of it
    (Trial("noloco", 10, 5), WHOLE),
    (Trial("noloco", 10, 1, fragments=10), WHOLE),
    (Trial("noloco", 10, 1, fragments=10), PARTS_OF_10),
)
IN_PRIMARY = tuple(dict.fromkeys([DDP, *itertools.chain(*PRIMARY)]))
RATED = {"adam": (*IN_PRIMARY, Trial("diloco", 20)), "muon": (DDP, WHOLE, PARTS_OF_10)}
EVERY = 2, 4, 10, 20, 50


# ---------------------------------------------------------------- what is trained


def name_of(trial):
    """As the tables have it."""
    words = [NAMES[trial.method]]
    if trial.method != "ddp":
        words.append(f"m {trial.every}")
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


SETTINGS = {    # of NoLoCo, m = 10, K = 1 and 10, beside DDP: options of Lesson
    "Muon": dict(optimizer="muon"),
    "4096 tokens a step": dict(sequences=32),
    "32 replicas": dict(replicas=32),
}


def primary_lessons(best, seeds, steps):
    """best: {optimizer: best_rates or None}."""
    for seed, trial in itertools.product(seeds or FIVE, IN_PRIMARY):
        yield lesson_of(trial, seed, best, steps)


def lessons_of(best, seeds, steps):
    """The lessons, in the order of their weight. best: {optimizer: best_rates or None}."""
    yield from primary_lessons(best, seeds, steps)
    for seed in seeds or FIVE:
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
    """In the plain setting."""
    return Lesson(trial, seed, rate_of(trial, best), steps=steps)


def measure_fragments(name, part, o):
    """Train what OUT/results and runs/fleets do not have; all rows of the part, {label: row}."""
    return measure_with_rates(name, o, RATES, lessons_of)


def measure_primary(name, part, o):
    """The same of the primary comparisons."""
    return measure_with_rates(name, o, ("adam",), primary_lessons)


def measure_with_rates(name, o, optimizers, lessons_with):
    """Train all rates of RATED, then lessons_with(best rates, seeds, steps)."""
    steps = o.steps or 600
    rows = kept_rows(name, o)
    for optimizer in optimizers:
        rated = itertools.chain(*rate_lessons(optimizer, steps).values())
        train_lessons(named(rated, o), rows)
    best = dict.fromkeys(RATES)
    for optimizer in optimizers:
        best[optimizer] = best_rates(rows, optimizer, steps)
    if best["adam"]:
        train_lessons(named(lessons_with(best, o.seeds, steps), o), rows)
    return dict(best=best, rows=rows, steps=o.steps)


# ---------------------------------------------------------------- what was found


def rows_of_fragments(found):
    def rate(trial, optimizer):
        return found["best"][optimizer] and rate_of(trial, found["best"], optimizer)

    return Rows(found, rate)


def show_fragments(found):
    rows = rows_of_fragments(found)
    show_rates(found)
    show_named(rows)
    show_grid(rows)
    show_delays(rows)
    show_at_10(rows)


def show_primary(found):
    show_rates(found)
    show_named(rows_of_fragments(found))


def show_named(rows):
    """What was named before the runs, and what explains it."""
    table = Table("primary comparison, nats per byte", "merged", "replicas' mean",
                  "merged, without seed 0, which chose the rates")
    for trial, base in PRIMARY:
        merged = rows.nats_over(trial, base)
        table.add(f"{name_of(trial)} over {name_of(base)}", merged,
                  rows.nats_over(trial, base, mean_loss), without_first(merged))
    table.end()
    table = Table("not named before the runs, nats per byte", "merged")
    for trial, base in ALSO:
        table.add(f"{name_of(trial)} over {name_of(base)}", rows.nats_over(trial, base))
    table.end()


def without_first(comparison):
    """Without the first seed; None with one or none."""
    if comparison is None or len(comparison.differences) == 1:
        return None
    return Comparison(comparison.differences[1:], comparison.form)


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
    """What the picture shows: in how many settings (a method and m) the mean gap is narrower in
    fragments, and in how many beyond doubt; none while a seed is alone."""
    differences = []
    for method, m in itertools.product(("noloco", "diloco"), EVERY):
        more = rows.nats_over(Trial(method, m, fragments=m), Trial(method, m))
        if more and more.p is not None:
            differences.append(more)
    if not differences:
        return ""
    lower, sure = lower_and_sure(differences)
    return (f"For the same bytes the mean gap to DDP is narrower in fragments in {len(lower)} of "
            f"{len(differences)} settings;\nbeyond doubt (95%, after Holm's correction) in "
            f"{len(sure)}")


KINDS = {"whole messages": "--", "in fragments": "-"}


def has_all_primary(found, part):
    return has_five_seeds(found, IN_PRIMARY)


def has_all_grid(found, part):
    return has_five_seeds(found, [*IN_PRIMARY, *grid()])


def has_five_seeds(found, trials):
    rows = rows_of_fragments(found)
    return not found["steps"] and all(len(rows.of(trial)) == len(FIVE) for trial in trials)


PARTS = {
    "fragments": Part(None, show_fragments, None, {"fragments": draw_fragments},
                      measure=measure_fragments, is_whole=has_all_grid),
    "primary": Part(None, show_primary, None, {}, measure=measure_primary,
                    is_whole=has_all_primary),
}

if __name__ == "__main__":
    headline(__doc__, PARTS)
