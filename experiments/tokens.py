"""The gap to DDP against the tokens of a replica's step (part of experiments/gpu.py).

The paper's replicas see 31 000 tokens and more in a step, most of ours see 1024. Here the same
model, data and number of steps, with 512 to 32 768 tokens: many replicas in one process
(experiments/fleet.py), plain averages, Adam. The gap is perplexity per byte over DDP's, of the
merged model. Fragments: as many as a method's steps between two outer steps of the same weights.
"""
import itertools
import json
from dataclasses import dataclass

import torch

from experiments.comparing import Comparison, Table
from experiments.fleet import Trial, device, machine
from experiments.fleets import FOLDER, MODELS, Lesson, train_lessons
from experiments.pictures import COLOURS, WIDTH, counted, label_ends
from experiments.replicas import DDP, LENGTH
from experiments.results import over
from plumbing.drawing import NAMES
from plumbing.files import replace

# The NoLoCo paper's small model after 25 000 steps: tokens a replica and step (half a million in
# all), then FSDP's, DiLoCo's (every 100 steps) and NoLoCo's (every 50) perplexity per token.
PAPER = {
    "C4": ((31250, 29.1, 39.1, 37.7), (62500, 29.1, 35.4, 34.5), (62500, 29.1, 34.0, 33.1),
           (125000, 29.1, 32.1, 31.3)),
    "Reddit": ((31250, 25.5, 29.7, 29.1), (62500, 25.5, 27.6, 27.3), (62500, 25.5, 27.6, 27.2),
               (125000, 25.7, 26.8, 26.4)),
}
BYTES_A_TOKEN = 4               # assumed of the paper's vocabulary of 128 000
FIRST_RATES = {"cuda": 1e6, "cpu": 1e4}     # tokens a second, before anything is measured


@dataclass(frozen=True)
class Plan:
    """What is trained. rates: of these the best for each trial and number of tokens, on the first
    seed."""
    replicas: int = 8
    tokens: tuple = (512, 2048, 8192, 32768)
    steps: int = 600
    noloco: tuple = (10, 50)
    diloco: tuple = (20, 100)
    seeds: tuple = (0, 1, 2)
    rates: tuple = (6e-3,)

    def trials(self, fragments):
        """The trials but DDP. fragments: in as many as steps between outer steps; else whole."""
        for method in "noloco", "diloco":
            for m in getattr(self, method):
                yield Trial(method, m, fragments=m if fragments else 1)

    def lesson(self, trial, seed, rate, tokens):
        return Lesson(trial, seed, rate, replicas=self.replicas, sequences=tokens // LENGTH,
                      steps=self.steps)

    def lessons(self, seed, rates_of):
        """Those of a seed, from few tokens to many. rates_of(trial, tokens) -> rates."""
        for tokens in self.tokens:
            trials = [DDP, *self.trials(fragments=False), *self.trials(fragments=True)]
            for rate in self.rates:
                for trial in trials:
                    if rate in rates_of(trial, tokens):
                        yield self.lesson(trial, seed, rate, tokens)

    def best_rate(self, trial, tokens):
        """The rate with the lowest loss on the first seed; None while one is not trained."""
        lessons = [self.lesson(trial, self.seeds[0], rate, tokens) for rate in self.rates]
        rows = rows_of(lessons)
        if len(rows) < len(lessons):
            return None
        return min(lessons, key=lambda lesson: rows[lesson]["merged"]).lr


TRY = Plan(replicas=2, tokens=(128, 256), steps=8, noloco=(2, 4), diloco=(4, 8), seeds=(0,))
TRY_OPTIONS = "--eval-sequences 8 --warmup 4"
ON_CPU = Plan(tokens=(512, 2048, 8192), seeds=(0,))


def plan_of(o):
    """The Plan of the options of experiments/gpu.py."""
    plan = Plan() if torch.cuda.is_available() else ON_CPU
    if o.tiny:
        plan = TRY
    changes = {}
    if o.seeds:
        changes["seeds"] = tuple(o.seeds)
    if o.tokens:
        changes["tokens"] = tuple(o.tokens)
    if o.rates:
        changes["rates"] = tuple(o.rates)
    if o.steps:
        changes["steps"] = o.steps
    return Plan(**(vars(plan) | changes))


# ---------------------------------------------------------------- training


def measure(o, clock):
    """Train what is missing, as long as there is time. Raises OutOfTime."""
    plan = plan_of(o)
    extra = TRY_OPTIONS if o.tiny else ""
    train_while(clock, list(plan.lessons(plan.seeds[0], lambda *_: plan.rates)), extra)
    for seed in plan.seeds[1:]:
        train_while(clock, list(plan.lessons(seed, lambda *at: (plan.best_rate(*at),))), extra)


def train_while(clock, lessons, extra):
    """Fleet after fleet. Lessons of one kind come one after the other."""
    for _, same in itertools.groupby(lessons, lambda lesson: lesson.kind):
        waiting = [lesson for lesson in same if not lesson.file.exists()]
        while waiting:
            chunk = waiting[:fitting(clock, waiting[0])]
            train_lessons(chunk, {}, extra=extra)
            del waiting[:len(chunk)]


def fitting(clock, lesson):
    """How many lessons of this kind may train in one fleet that ends in time. Raises OutOfTime."""
    room = MODELS[device()] // lesson.replicas
    rate = measured_rate(lesson)
    tokens = lesson.replicas * lesson.sequences * LENGTH * lesson.steps
    if rate is None:
        seconds = tokens / FIRST_RATES[device()]
        most = int(clock.left() / seconds)
        return max(1, min(room, most))          # one tells how long they take
    seconds = 1.2 * tokens / rate + 5
    clock.need(lesson.label, seconds)
    return min(room, int(clock.left() / seconds))


def measured_rate(lesson):
    """Tokens a second of a lesson with as many tokens a step, or nearly, on this machine; None
    before the first."""
    here = machine()
    rates = []
    for file in FOLDER.glob("*.json"):
        row = json.loads(file.read_text())
        if row.get("machine") == here and row["replicas"] == lesson.replicas:
            trained = row["replicas"] * row["tokens"] * row["steps"]
            away = abs(row["tokens"] - lesson.sequences * LENGTH)
            rates.append((away, trained / max(0.01, row["seconds"])))
    if not rates:
        return None
    nearest = min(rates)[0]
    return min(rate for away, rate in rates if away == nearest)


# ---------------------------------------------------------------- what was found


def rows_of(lessons):
    """{lesson: its row} of those that are trained."""
    return {lesson: json.loads(lesson.file.read_text()) for lesson in lessons
            if lesson.file.exists()}


def collect(o):
    """What is trained of the Plan: "rows", those with the best rates; "files", all rows by their
    files' names, for `restore`; "plan"."""
    plan = plan_of(o)
    tried = list(plan.lessons(plan.seeds[0], lambda *_: plan.rates))
    rows = []
    for seed in plan.seeds:
        lessons = list(plan.lessons(seed, lambda *at: (plan.best_rate(*at),)))
        rows += rows_of(lessons).values()
        tried += lessons
    files = {lesson.file.name: row for lesson, row in rows_of(tried).items()}
    return dict(rows=rows, files=files, plan=vars(plan))


def restore(found):
    """Write what was collected elsewhere, such as on a GPU's machine that is gone, where it is
    missing."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, row in found["files"].items():
        if not (FOLDER / name).exists():
            replace(FOLDER / name, json.dumps(row))


def whole_of(found):
    """Whether everything of the plan is there, with as many steps and tokens as on a CPU or
    more."""
    plan = Plan(**{name: tuplified(value) for name, value in found["plan"].items()})
    trials = 1 + len(list(plan.trials(True))) + len(list(plan.trials(False)))
    every = len(found["rows"]) == trials * len(plan.tokens) * len(plan.seeds)
    return every and plan.steps >= ON_CPU.steps and max(plan.tokens) >= max(ON_CPU.tokens)


def tuplified(value):
    return tuple(value) if isinstance(value, list) else value


def gaps(found):
    """{Trial: {tokens: Comparison with DDP}} and DDP's losses, {tokens: [its loss with each
    seed]}."""
    merged = {}
    for row in found["rows"]:
        merged[Trial(**row["trial"]), row["tokens"], row["seed"]] = row["merged"]
    pairs = {}
    base = {}
    for (trial, tokens, seed), loss in sorted(merged.items(), key=lambda item: item[0][1:]):
        ddp = merged.get((DDP, tokens, seed))
        if trial == DDP:
            base.setdefault(tokens, []).append(loss)
        elif ddp is not None:
            pairs.setdefault(trial, {}).setdefault(tokens, []).append((loss, ddp))
    by_trial = {}
    for trial, at in pairs.items():
        by_trial[trial] = {tokens: compared(some) for tokens, some in at.items()}
    return by_trial, base


def compared(pairs):
    """pairs: (loss, DDP's) of each seed."""
    losses = [loss for loss, _ in pairs]
    return Comparison(over(losses, [ddp for _, ddp in pairs]), "+.1%")


def name_of(trial):
    parts = f" in {trial.fragments}" if trial.fragments > 1 else ""
    return f"{NAMES[trial.method]}, every {trial.every}{parts}"


def show(found):
    """Gaps of the merged model; the first row has DDP's loss."""
    by_trial, base = gaps(found)
    counts = sorted(base)
    table = Table("tokens a replica and step", *map(str, counts))
    losses = [f"{sum(some) / len(some):.4f}" for some in base.values()]
    table.add("DDP, nats per byte", *losses)
    for trial in sorted(by_trial, key=lambda t: (t.fragments > 1, t.method, t.every)):
        table.add(name_of(trial), *[by_trial[trial].get(tokens) for tokens in counts])
    table.end()
    corpora = {row["digest"] for row in found["rows"]}
    if len(corpora) > 1:
        print(f"warning: these are of {len(corpora)} texts, and do not compare: remove the rows of "
              f"the others from {FOLDER}")
    for text, rows in PAPER.items():
        for tokens, ddp, diloco, noloco in rows:
            print(f"the paper, {text}, small, {tokens} tokens: DiLoCo {per_byte(diloco, ddp):+.1%},"
                  f" NoLoCo {per_byte(noloco, ddp):+.1%}")


def per_byte(perplexity, base):
    """A perplexity per token over another, as one per byte."""
    return (perplexity / base) ** (1 / BYTES_A_TOKEN) - 1


def draw(plt, found):
    """From many tokens to few, so that the lines end apart and the paper's points stand free."""
    by_trial, base = gaps(found)
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH, 5), sharey=True)
    for axis, fragments in zip(axes, (False, True)):
        for trial, at in by_trial.items():
            if (trial.fragments > 1) == fragments:
                is_longest = trial.every == max(found["plan"][trial.method])
                draw_trial(axis, trial, at, is_longest)
        draw_paper(axis)
        axis.set_xscale("log", base=2)
        low = min(base)
        ticks = [tick for tick in (512, 2048, 8192, 32768, 131072) if tick >= low]
        axis.set_xticks(ticks, [str(tick) for tick in ticks])
        axis.set(xlabel="tokens a replica and step (fewer to the right)",
                 xlim=(180000, 0.8 * low))
    axes[0].set(ylabel="perplexity per byte over DDP's, %",
                title="whole messages (names, steps between outer steps)")
    axes[1].set(title="in fragments, by turns")
    seeds = counted(len(found["plan"]["seeds"]), "seed")
    figure.suptitle(f"{title(found, by_trial)}\n(equal steps, {found['plan']['replicas']} replicas,"
                    f" {seeds}; bars: range; hollow: the paper's 125M, every 50 and 100, after\n"
                    "25 000 steps, with 4 to 16 replicas; squares C4, triangles Reddit; "
                    "four bytes a token)", x=0.01, ha="left")
    for axis in axes:
        label_ends(axis)
    lowest = 0.0
    for at in by_trial.values():
        lowest = min(lowest, *(min(gap.differences) for gap in at.values()))
    axes[0].set_ylim(100 * lowest - 1, None)
    return figure


def draw_trial(axis, trial, at, is_longest):
    """A line through the means, dashed for the method's longest interval."""
    tokens = sorted(at, reverse=True)
    means = [100 * at[count].mean for count in tokens]
    low = [100 * (at[count].mean - min(at[count].differences)) for count in tokens]
    high = [100 * (max(at[count].differences) - at[count].mean) for count in tokens]
    axis.errorbar(tokens, means, [low, high], color=COLOURS[NAMES[trial.method]], marker="o",
                  ls="--" if is_longest else "-", capsize=2, lw=1.3,
                  label=f"{NAMES[trial.method]}, {trial.every}")


def draw_paper(axis):
    """The paper's own points, hollow: NoLoCo every 50 steps, DiLoCo every 100."""
    for text, marker in (("C4", "s"), ("Reddit", "^")):
        for tokens, ddp, diloco, noloco in PAPER[text]:
            for name, perplexity in (("DiLoCo", diloco), ("NoLoCo", noloco)):
                axis.plot([tokens], [100 * per_byte(perplexity, ddp)], marker, mfc="none",
                          color=COLOURS[name], ms=6)


def title(found, by_trial):
    """The finding, where NoLoCo's longest interval was trained with few and with many tokens."""
    longest = max(found["plan"]["noloco"])
    at = by_trial.get(Trial("noloco", longest), {})
    if not whole_of(found) or len(at) < 2:
        seeds = counted(len(found["plan"]["seeds"]), "seed")
        return (f"The gap to DDP against tokens (a try: {found['plan']['steps']} steps, {seeds}: "
                "no finding)")
    few, many = min(at), max(at)
    alone = "One seed: " if len(found["plan"]["seeds"]) == 1 else ""
    return (f"{alone}NoLoCo's gap to DDP, every {longest} steps: {at[few].mean:+.1%} with {few} "
            f"tokens a replica and step, {at[many].mean:+.1%} with {many}")
