"""Fragments: the weights meet in K parts by turns, beside whole messages (experiments/fleet.py).

    python -m experiments.fragments [PART ...] [--seeds 0] [--steps N] [--out DIR] [--plot]

fragments   the loss of NoLoCo and DiLoCo, whole (K = 1) and in fragments, at once and delayed
why         what the replicas differ in (experiments/apart.py), and two kinds of fragments that are
            nobody's: with the same partners for all of a round, and all due at the same step

Adam, fp32, 1024 tokens a replica and step, 600 steps and 8 replicas, where nothing else is said;
plain averages. m: steps between an outer step and the next of the same weights; K: fragments; D:
delay. RATED holds where each method's learning rate, the best of three, is found: on seed 0.
PRIMARY holds the comparisons that were named before the runs. They have five seeds, the others
three.
"""
import itertools
import statistics

from experiments import apart
from experiments.comparing import Comparison, Table
from experiments.fleet import Trial
from experiments.fleets import Lesson, rows_of, train_lessons
from experiments.harness import Part, headline
from experiments.replicas import DDP
from experiments.results import over

RATES = {"adam": (3e-3, 6e-3, 1.2e-2), "muon": (6e-3, 1.2e-2, 2.4e-2)}
RATED = {
    "DDP": DDP,
    "NoLoCo, K = 1": Trial("noloco", 10),
    "NoLoCo, K > 1": Trial("noloco", 10, fragments=10),
    "DiLoCo, K = 1": Trial("diloco", 20),
    "DiLoCo, K > 1": Trial("diloco", 20, fragments=20),
}
NAMES = {"noloco": "NoLoCo", "diloco": "DiLoCo", "ddp": "DDP"}
WHOLE, PARTS_OF_10 = RATED["NoLoCo, K = 1"], RATED["NoLoCo, K > 1"]
PRIMARY = (     # each over the other
    (PARTS_OF_10, WHOLE),
    (Trial("noloco", 10, 1, fragments=10), Trial("noloco", 10, 5)),
    (PARTS_OF_10, RATED["DiLoCo, K > 1"]),
    (Trial("noloco", 2, fragments=2), Trial("diloco", 4, fragments=4)),
)
EVERY = 2, 4, 10, 20, 50
FIVE = 0, 1, 2, 3, 4
WHY = {
    "whole messages": WHOLE,
    "fragments: own partners, in turn": PARTS_OF_10,
    "fragments: the same partners, in turn": Trial("noloco", 10, fragments=10, partners="same"),
    "fragments: own partners, at one step": Trial("noloco", 10, fragments=10, phase="together"),
    "DiLoCo, whole": Trial("diloco", 10),
    "DiLoCo, fragments": Trial("diloco", 10, fragments=10),
}


# ---------------------------------------------------------------- what is trained


def family(trial):
    """The key in RATED of the trial's method."""
    if trial.method == "ddp":
        return "DDP"
    return f"{NAMES[trial.method]}, K {'= 1' if trial.fragments == 1 else '> 1'}"


def rate_lessons(optimizer, steps):
    """{family: [a Lesson for each rate]} on seed 0."""
    found = {}
    for name, trial in RATED.items():
        found[name] = [Lesson(trial, 0, lr, optimizer, steps=steps) for lr in RATES[optimizer]]
    return found


def best_rates(rows, optimizer, steps):
    """{family: the rate with the lowest merged loss}; None while one is not trained."""
    best = {}
    for name, lessons in rate_lessons(optimizer, steps).items():
        if any(lesson not in rows for lesson in lessons):
            return None
        best[name] = min(lessons, key=lambda lesson: rows[lesson]["merged"]).lr
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
    for m in 3, 4:
        yield Trial("noloco", m)
    yield Trial("noloco", 10, ends=5)


SETTINGS = {    # of NoLoCo, m = 10, K = 1 and 10, beside DDP: options of Lesson
    "Muon": dict(optimizer="muon"),
    "4096 tokens a step": dict(sequences=32),
    "32 replicas": dict(replicas=32),
}


def lessons_of(name, best, seeds, steps):
    """The lessons of a part, in the order of their weight. best: {optimizer: best_rates or
    None}."""
    rates = best["adam"]
    if name == "why":
        for seed in seeds or FIVE[:3]:
            for trial in WHY.values():
                yield Lesson(trial, seed, rates[family(trial)], steps=steps, closely=True)
        return
    primary = list(dict.fromkeys([DDP, *itertools.chain(*PRIMARY)]))
    for seed in seeds or FIVE:
        for trial in primary:
            yield Lesson(trial, seed, rates[family(trial)], steps=steps)
    for seed in seeds or FIVE[:3]:
        for trial in itertools.chain(grid(), at_10()):
            if trial not in primary:
                yield Lesson(trial, seed, rates[family(trial)], steps=steps)
        for options in SETTINGS.values():
            of_optimizer = best[options.get("optimizer", "adam")]
            for trial in DDP, WHOLE, PARTS_OF_10:
                if of_optimizer:
                    rate = of_optimizer[family(trial)]
                    yield Lesson(trial, seed, rate, steps=steps, **options)


def measure(name, part, o):
    """Train what is not trained yet; all rows of the part that there are."""
    steps = o.steps or 600
    tried = []
    for optimizer in RATES:
        for lessons in rate_lessons(optimizer, steps).values():
            tried += lessons
    train_lessons([lesson for lesson in tried if o.only in lesson.label])
    rows = rows_of(tried)
    best = {optimizer: best_rates(rows, optimizer, steps) for optimizer in RATES}
    if best["adam"]:
        lessons = list(lessons_of(name, best, o.seeds, steps))
        train_lessons([lesson for lesson in lessons if o.only in lesson.label], apart.Apart)
        rows |= rows_of(lessons_of(name, best, None, steps))
    found = dict(best=best, rows=list(rows.values()))
    if o.steps:
        found["steps"] = o.steps
    return found


# ---------------------------------------------------------------- what was found


def show_fragments(found):
    print(found["best"])


PARTS = {"fragments": Part(None, show_fragments, None, {}, measure=measure,
                           is_whole=lambda found, part: not found.get("steps")),
         "why": Part(None, show_fragments, None, {}, measure=measure,
                           is_whole=lambda found, part: not found.get("steps"))}

if __name__ == "__main__":
    headline(__doc__, PARTS)
