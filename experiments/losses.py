"""Loss against tokens and bytes: 8 replicas of one stage (8x1) and 4 of two stages (4x2).

    python -m experiments.losses [PART ...] [--seeds 0 1 2] [--steps N] [--out DIR] [--plot]

convergence     Figs. 2 to 4 and Table 2 of arXiv 2506.10911, tiny. `local` has no outer step.
onebyte         NoLoCo every m steps and DiLoCo every 2m, in fp32 and in one byte a weight
closing         what narrows NoLoCo's gap to DDP, on 64 kB of held-out text

Rows in one byte or bf16 are those of `--wire` (plumbing/wires.py for the baselines).
"""
import itertools
import math
import statistics

from experiments.pictures import COLOURS, WIDTH, label_ends, show_head, show_row
from experiments.runs import (Part, Run, band, finals, headline, mean_of_replicas, over, over_runs,
                              published, results, spread_of)

LEARN = "--layers 2 --warmup 50 --lr 6e-3 --batch 8 --microbatches 1"
EIGHT = f"{LEARN} --steps 1200"
FOUR = f"{LEARN} --steps 600 --microbatches 2 --stages 4,4"
CLOSER = f"{EIGHT} --routing fixed --eval-every 200 --eval-sequences 512"
NOLOCO, DILOCO = "--method noloco --inner-steps", "--method diloco --inner-steps"
MUON = "--optimizer muon --lr 1.2e-2"           # the best of three rates
SHAPES = {"8x1": EIGHT, "4x2": FOUR}
BYTE = "one byte"

# Runs of convergence that onebyte shows too: {its label: the label there}.
THERE = {
    "8x1 DDP": "8x1 DDP", "4x2 DDP": "4x2 DDP, fixed routing",
    "8x1 DiLoCo, every 20": "8x1 DiLoCo", "4x2 DiLoCo, every 20": "4x2 DiLoCo, fixed routing",
    "8x1 DiLoCo, every 4": "8x1 DiLoCo, every 4 steps", "8x1 NoLoCo, every 2": "8x1 NoLoCo, every 2 steps",
    "8x1 NoLoCo, every 10": "8x1 NoLoCo", "4x2 NoLoCo, every 10": "4x2 NoLoCo, random routing",
}

TABLE = {
    "convergence": {
        "8x1 DDP": f"{EIGHT} --method ddp",
        "8x1 DiLoCo": f"{EIGHT} {DILOCO} 20",
        "8x1 NoLoCo": f"{EIGHT} {NOLOCO} 10",
        "8x1 local": f"{EIGHT} --method local",
        "8x1 DiLoCo, every 4 steps": f"{EIGHT} {DILOCO} 4",
        "8x1 NoLoCo, every 2 steps": f"{EIGHT} {NOLOCO} 2",
        "4x2 DDP, fixed routing": f"{FOUR} --method ddp --routing fixed",
        "4x2 DiLoCo, fixed routing": f"{FOUR} {DILOCO} 20 --routing fixed",
        "4x2 NoLoCo, random routing": f"{FOUR} {NOLOCO} 10 --routing random",
        "4x2 NoLoCo, fixed routing": f"{FOUR} {NOLOCO} 10 --routing fixed",
        "4x2 local, random routing": f"{FOUR} --method local --routing random",
        "4x2 local, fixed routing": f"{FOUR} --method local --routing fixed",
    },
    "onebyte": {f"{shape} {kind}": f"{base} {how}" for shape, base in SHAPES.items() for kind, how in [
        *[(f"NoLoCo, every {m}, one byte", f"{NOLOCO} {m} --wire int8") for m in (10, 5, 3, 2, 1)],
        *[(f"NoLoCo, every {m}", f"{NOLOCO} {m}") for m in (10, 5, 2, 1)],
        *[(f"DiLoCo, every {m}, one byte", f"{DILOCO} {m} --wire int8 --routing fixed")
          for m in (20, 10, 4, 2)],
        *[(f"DiLoCo, every {m}", f"{DILOCO} {m} --routing fixed") for m in (20, 10, 4, 2)],
        ("DDP, bf16", "--method ddp --wire bf16 --routing fixed"),
    ] if f"{shape} {kind}" not in THERE},
    "closing": {
        "DDP, as it is": f"{CLOSER} --method ddp",
        "DiLoCo, as it is": f"{CLOSER} {DILOCO} 20",
        "NoLoCo, as it is": f"{CLOSER} {NOLOCO} 10",
        "DDP, beta2 0.99": f"{CLOSER} --method ddp --beta2 0.99",
        "NoLoCo, beta2 0.99": f"{CLOSER} {NOLOCO} 10 --beta2 0.99",
        "DDP, Muon, rate 1.2e-2": f"{CLOSER} --method ddp {MUON}",
        "DiLoCo, Muon, rate 1.2e-2": f"{CLOSER} {DILOCO} 20 {MUON}",
        "NoLoCo, Muon, rate 1.2e-2": f"{CLOSER} {NOLOCO} 10 {MUON}",
        "NoLoCo, Muon, every 2 steps in one byte": f"{CLOSER} {NOLOCO} 2 --wire int8 {MUON}",
    },
}

def runs_of(part):
    def runs(steps):
        for label, options in TABLE[part].items():
            options += f" --steps {steps}" if steps else ""
            yield Run(label, options, after=mean_of_replicas if part == "convergence" else None)
    return runs


# ---------------------------------------------------------------- the tables


def show_convergence(found):
    runs = results(found)
    show_head("replicas x stages, method | seeds | held-out nats per byte | perplexity over DDP's "
              "| ... of the mean of all replicas | MB sent per rank to synchronise")
    for label, seeds in runs.items():
        base = finals(runs["8x1 DDP" if label.startswith("8x1") else "4x2 DDP, fixed routing"])
        each, mean = over(finals(seeds), base), over([run.mean for run in seeds], base)
        show_row(label, len(seeds), spread_of(finals(seeds)), spread_of(each, "+.1%"),
                 spread_of(mean, "+.1%"), f"{seeds[0].sent:.0f}")
    for label, seeds in runs.items():
        if seeds[0].o.method == "noloco":
            rate, step = ([pearson(run, against) for run in seeds] for against in ("lr", "step"))
            print(f"Pearson(spread, rate), {label}: {spread_of(rate, '.2f')}; "
                  f"(spread, step): {spread_of(step, '.2f')}")


def pearson(run, against):
    """Correlation of the weight spread from step 100 on, when the warm-up is over."""
    rows = zip(run.steps, run.curves["weight_spread"], run.curves[against])
    pairs = [(spread, x) for step, spread, x in rows if spread and step >= 100]
    return statistics.correlation(*zip(*pairs)) if len(pairs) > 2 else math.nan


def with_convergence(found):
    """{label: [a Result per seed]} of onebyte and of the runs in THERE, fewest bytes first."""
    there = published("convergence")
    runs = {label: there[name] for label, name in THERE.items()} | results(found)
    return dict(sorted(runs.items(), key=lambda item: (item[0][:3], item[1][0].sent)))


def show_onebyte(found):
    runs = with_convergence(found)
    show_head("replicas x stages, method | seeds | held-out nats per byte | perplexity over DDP's "
              "| MB sent per rank to synchronise")
    for label, seeds in runs.items():
        more = over_runs(seeds, runs[f"{label[:3]} DDP"])
        show_row(label, len(seeds), spread_of(finals(seeds)), spread_of(more, "+.1%"), f"{seeds[0].sent:.1f}")


def show_closing(found):
    runs = results(found)
    show_head("method, what is tried | seeds | held-out nats per byte | perplexity over the method as it is "
              "| over DDP's with the same, Muon at its best rate | over DDP's as it is")
    for label, seeds in runs.items():
        method, way = label.split(", ", 1)
        same = "Muon, rate 1.2e-2" if "Muon" in way else way.removeprefix("hypercube").removeprefix(", ")
        bases = f"{method}, as it is", f"DDP, {same or 'as it is'}", "DDP, as it is"
        cells = [spread_of(over_runs(seeds, runs[base]), "+.1%") for base in bases]
        show_row(label, len(seeds), spread_of(finals(seeds)), *cells)


# ---------------------------------------------------------------- the pictures


def draw_convergence(plt, found):
    """Loss against tokens, with the bytes that each method sends."""
    runs = results(found)
    figure, axis = plt.subplots(figsize=(WIDTH, 5), layout="constrained")
    lines = {"8x1 DDP": "DDP", "8x1 NoLoCo, every 2 steps": "NoLoCo, every 2",
             "8x1 DiLoCo": "DiLoCo, every 20", "8x1 NoLoCo": "NoLoCo, every 10", "8x1 local": "never (local)"}
    ends = []
    for label, name in lines.items():
        seeds = runs[label]
        every = 2 if name.startswith("DiLoCo") else 1       # every second evaluation follows an outer step
        colour = COLOURS[label.split(",")[0].removeprefix("8x1 ")]
        x = [tokens / 1e6 for tokens in seeds[0].curves["tokens"][every - 1::every]]
        dashes = "--" if "every 2 steps" in label else "-"
        last = band(axis, [run.losses[every - 1::every] for run in seeds], x, colour, ls=dashes)
        ends.append((last, f"{name}: {seeds[0].sent:.0f} MB", colour))
    more = statistics.mean(over_runs(runs["8x1 NoLoCo"], runs["8x1 DDP"]))
    axis.set(xlabel="million tokens, all 8 replicas", ylabel="held-out nats per byte", ylim=(1.35, 2.4),
             title=f"Every 10 steps NoLoCo ends {more:.0%} perplexity over DDP, every 2 much closer\n"
                   "(bands: range of three seeds; MB: sent per replica to synchronise)")
    label_ends(axis, ends)
    return figure


def draw_onebyte(plt, found):
    """The 8 x 1 runs: a line through each method's means, a small point per seed."""
    runs = with_convergence(found)
    figure, axis = plt.subplots(figsize=(WIDTH, 5.2), layout="constrained")
    for method, short in itertools.product(("DDP", "DiLoCo", "NoLoCo"), (True, False)):
        form = "fp32" if not short else "bf16" if method == "DDP" else BYTE
        kinds = {label: seeds for label, seeds in runs.items() if label.startswith(f"8x1 {method}")
                 and label.endswith((BYTE, "bf16")) == short}
        sent = [seeds[0].sent for seeds in kinds.values()]
        more = [[100 * x for x in over_runs(seeds, runs["8x1 DDP"])] for seeds in kinds.values()]
        middle = [statistics.mean(each) for each in more]
        axis.plot(sent, middle, "o-" if short else "o:", color=COLOURS[method], ms=6,
                  mfc=None if short else "white", label=f"{method}, {form}")
        axis.vlines(sent, list(map(min, more)), list(map(max, more)), COLOURS[method], lw=0.8)
        for label, x, y in zip(kinds, sent, middle):
            side = 1 if method == "NoLoCo" else -1
            every = label.split(", ")[1] if "every" in label else form
            axis.annotate(every, (x, y), (6 * side, 3 * side), textcoords="offset points", fontsize=9,
                          ha="left" if side > 0 else "right", va="bottom" if side > 0 else "top",
                          color=COLOURS[method])
    axis.set(xscale="log", xlabel="MB sent per replica to synchronise", xlim=(9, 2500), ylim=(-3.5, 19),
             ylabel="perplexity over DDP's, %",
             title="One byte a weight costs little: each curve moves left by a factor of four\n"
                   "(8 replicas; \"every m\": steps per synchronisation; bars: range of three seeds)")
    axis.set_xticks((10, 30, 100, 300, 1000), ("10", "30", "100", "300", "1000"))
    axis.minorticks_off()
    axis.legend(ncols=3, loc="upper right")
    return figure


if __name__ == "__main__":
    shown = {"convergence": (show_convergence, draw_convergence), "onebyte": (show_onebyte, draw_onebyte),
             "closing": (show_closing,)}
    headline(__doc__, {part: Part(runs_of(part), *how) for part, how in shown.items()})
