"""The gap to DDP against the tokens of a replica's step.

    python -m experiments.tokens [--seeds 0] [--steps N] [--out DIR] [--plot]

tokens      six minutes of an H100. Rows are kept one by one (experiments/fleets.py), so a
            command that was stopped goes on

The paper's replicas see 31 000 tokens and more in a step, most of ours see 1024. Here the same
model, data and number of steps, with 512 to 32 768 tokens: many replicas in one process
(experiments/fleet.py), plain averages, Adam. The gap is perplexity per byte over DDP's, of the
merged model. Fragments: as many as a method's steps between two outer steps of the same weights.
"""
import itertools
import statistics

from experiments.comparing import Comparison, Table
from experiments.fleet import Trial
from experiments.fleets import Lesson, kept_rows, named, train_lessons
from experiments.harness import Part, headline, title_of
from experiments.pictures import COLOURS, WIDTH, counted, label_ends
from experiments.replicas import DDP, LENGTH
from experiments.results import over
from planning.drawing import NAMES

# The NoLoCo paper's small model after 25 000 steps: tokens a replica and step (half a million in
# all), then FSDP's, DiLoCo's (every 100 steps) and NoLoCo's (every 50) perplexity per token.
PAPER = {
    "C4": ((31250, 29.1, 39.1, 37.7), (62500, 29.1, 35.4, 34.5), (62500, 29.1, 34.0, 33.1),
           (125000, 29.1, 32.1, 31.3)),
    "Reddit": ((31250, 25.5, 29.7, 29.1), (62500, 25.5, 27.6, 27.3), (62500, 25.5, 27.6, 27.2),
               (125000, 25.7, 26.8, 26.4)),
}
BYTES_A_TOKEN = 4               # assumed of the paper's vocabulary of 128 000

TOKENS, OF_A_TRY = (512, 2048, 32768), (128, 256)       # of a replica's step
STEPS = 600
RATE = 6e-3                     # of all: none was searched
EVERY = {"noloco": (10, 50), "diloco": (20, 100)}
SEEDS = (0,)


# ---------------------------------------------------------------- training


def trials():
    """DDP, then each method whole and in as many fragments as steps between outer steps."""
    yield DDP
    for method, every in EVERY.items():
        for m in every:
            yield Trial(method, m)
            yield Trial(method, m, fragments=m)


def lessons_of(seeds, steps):
    """From few tokens to many. steps: of a try, which has few tokens and replicas."""
    counts = OF_A_TRY if steps else TOKENS
    replicas = 2 if steps else 8
    for tokens, seed, trial in itertools.product(counts, seeds or SEEDS, trials()):
        yield Lesson(trial, seed, RATE, replicas=replicas, sequences=tokens // LENGTH,
                     steps=steps or STEPS)


def measure(name, part, o):
    """Train what OUT/results and runs/fleets do not have; all rows of the part, {label: row}."""
    rows = kept_rows(name, o)
    train_lessons(named(lessons_of(o.seeds, o.steps), o), rows)
    return dict(rows=rows, steps=o.steps)


def has_all_tokens(found, part):
    """Whether every trial has all tokens and steps with some seed."""
    if found["steps"]:
        return False
    seeds = sorted({row["seed"] for row in found["rows"].values()})
    return all(lesson.label in found["rows"] for lesson in lessons_of(seeds, None))


# ---------------------------------------------------------------- what was found


def gaps(found):
    """{Trial: {tokens: Comparison with DDP}} and DDP's losses, {tokens: [its loss with each
    seed]}."""
    merged = {}
    for row in found["rows"].values():
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
    losses = [f"{statistics.mean(base[tokens]):.4f}" for tokens in counts]
    table.add("DDP, nats per byte", *losses)
    for trial in sorted(by_trial, key=lambda t: (t.fragments > 1, t.method, t.every)):
        table.add(name_of(trial), *[by_trial[trial].get(tokens) for tokens in counts])
    table.end()
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
                is_longest = trial.every == max(EVERY[trial.method])
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
    title = title_of(found, finding(by_trial, base), "The gap to DDP against tokens")
    figure.suptitle(f"{title}\n(equal steps, 8 replicas, {seeds_of(base)}; bars: range; hollow: "
                    "the paper's 125M, every 50 and 100, after\n25 000 steps, with 4 to 16 "
                    "replicas; squares C4, triangles Reddit; four bytes a token)",
                    x=0.01, ha="left")
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


def seeds_of(base):
    return counted(len(next(iter(base.values()))), "seed")


def finding(by_trial, base):
    """NoLoCo's longest interval, with few and with many tokens."""
    longest = max(EVERY["noloco"])
    at = by_trial[Trial("noloco", longest)]
    few, many = min(at), max(at)
    return (f"With {seeds_of(base)} NoLoCo's gap to DDP, every {longest} steps: "
            f"{at[few].mean:+.1%} with {few} tokens a replica and step, {at[many].mean:+.1%} with "
            f"{many}")


PARTS = {
    "tokens": Part(None, show, None, {"tokens": draw}, seeds=SEEDS, measure=measure,
                   is_whole=has_all_tokens),
}

if __name__ == "__main__":
    headline(__doc__, PARTS)
