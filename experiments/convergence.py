"""Figs. 2 to 4 and Table 2 of arXiv 2506.10911, tiny: loss against tokens and bytes, weight spread and
learning rate.

    python -m experiments.convergence [--seeds 0 1 2] [--steps N] [--out DIR] [--plot]

8 replicas of one stage (8x1) and 4 of two (4x2). `local` has no outer step: there routes alone keep
replicas together. The outer settings are train.TINY; experiments/tuning.py found them.
"""
import math
import statistics

import train
from experiments.pictures import COLOURS, show_head, show_row
from experiments.runs import (Run, band, finals, headline, losses, mean_of_replicas, over, results,
                              spread_of, spreads, tokens)

ONE_STAGE = {
    "DDP": "ddp",
    "DiLoCo": "diloco",
    "NoLoCo": "noloco",
    "local": "local",
    "NoLoCo, warm start": "noloco --warm-start {third}",
    "DiLoCo, every 4 steps": "diloco --inner-steps 4",
    "NoLoCo, every 2 steps": "noloco --inner-steps 2",
    "NoLoCo, warm start, every 2 steps": "noloco --warm-start {third} --inner-steps 2",
    "NoLoCo, warm start of half, every 2 steps": "noloco --warm-start {half} --inner-steps 2",
}
TWO_STAGES = {
    "DDP, fixed routing": "ddp --routing fixed",
    "DiLoCo, fixed routing": "diloco --routing fixed",
    "NoLoCo, random routing": "noloco --routing random",
    "NoLoCo, fixed routing": "noloco --routing fixed",
    "local, random routing": "local --routing random",
    "local, fixed routing": "local --routing fixed",
}


def runs(steps):
    def common(steps, method):
        method = method.format(third=steps // 3, half=steps // 2)
        return f"--steps {steps} --layers 2 --warmup 50 --lr 6e-3 --method {method} --batch 8"

    for name, method in ONE_STAGE.items():
        options = f"{common(steps or 1200, method)} --microbatches 1"
        yield Run(f"8x1 {name}", options, after=mean_of_replicas)
    for name, method in TWO_STAGES.items():
        options = f"{common(steps or 600, method)} --microbatches 2 --stages 4,4"
        yield Run(f"4x2 {name}", options, after=mean_of_replicas)


def ddp_beside(runs, seeds):
    """The DDP runs of the same shape."""
    stages = seeds[0].o.stages
    return next(rows for rows in runs.values() if rows[0].o.method == "ddp" and rows[0].o.stages == stages)


def often(o):
    """More outer steps than usual."""
    return o.method in train.TINY and o.inner_steps < train.TINY[o.method]["inner_steps"]


# ---------------------------------------------------------------- the table


def table(found):
    runs = results(found)
    show_head("replicas x stages, method | seeds | held-out nats per byte | perplexity over DDP's "
              "| ... of the mean of all replicas | MB sent per rank to synchronise")
    for label, seeds in runs.items():
        base = finals(ddp_beside(runs, seeds))
        each, mean = over(finals(seeds), base), over([run.mean for run in seeds], base)
        show_row(label, len(seeds), spread_of(finals(seeds)), spread_of(each, "+.1%"),
                 spread_of(mean, "+.1%"), f"{seeds[0].sent:.0f}")
    for label, seeds in runs.items():
        if seeds[0].o.method == "noloco":
            rate, step = ([pearson(run, against) for run in seeds] for against in ("lr", "step"))
            print(f"Pearson(spread, rate), {label}: {spread_of(rate, '.2f')}; "
                  f"(spread, step): {spread_of(step, '.2f')}")
    routed, fixed = runs["4x2 local, random routing"], runs["4x2 local, fixed routing"]
    print("local, random over fixed routing: spread", spread_of(spread_ratio(routed, fixed), "+.1%"),
          "perplexity", spread_of(over(finals(routed), finals(fixed)), "+.1%"))


def pearson(run, against):
    """Correlation of the weight spread from step 100 on, after the warm-up, and after the replicas may
    part."""
    rows = zip(run.steps, run.curves["weight_spread"], run.curves[against])
    pairs = [(spread, x) for step, spread, x in rows if spread and step >= 100]
    return statistics.correlation(*zip(*pairs)) if len(pairs) > 2 else math.nan


def spread_ratio(runs, base):
    """Of the means over the evaluations of the second half of training, seed by seed, less 1."""
    def later(run):
        return statistics.mean(run.curves["weight_spread"][len(run.steps) // 2:])
    return [later(a) / later(b) - 1 for a, b in zip(runs, base)]


# ---------------------------------------------------------------- the picture


def colour(o):
    return COLOURS[2 if o.warm_start else {"ddp": 0, "diloco": 1, "noloco": 3, "local": 4}[o.method]]


def draw(plt, found):
    runs = results(found)
    figure, ((a, b, c), (d, e, f)) = plt.subplots(2, 3, figsize=(14, 8), layout="constrained")
    draw_losses(a, runs, 1)
    draw_losses(b, runs, 2)
    draw_bytes(c, runs)
    draw_lead(d, runs)
    draw_spread(e, runs)
    for i, routing in enumerate(("random", "fixed")):
        label = f"4x2 local, {routing} routing"
        band(f, spreads(runs[label]), runs[label][0].steps, label, COLOURS[i])
    f.set(xlabel="step", ylabel="weight spread", title="no outer step: routing alone", ylim=(0, None))
    for axis in (a, b, c, d, e, f):
        axis.legend(fontsize=6.5)
    return figure


def draw_losses(axis, runs, stages):
    shown = {label: seeds for label, seeds in runs.items() if len(seeds[0].o.stages) == stages}
    for label, seeds in shown.items():
        o = seeds[0].o
        every = 2 if o.method == "diloco" else 1        # every second evaluation comes after its outer step
        _, name = label.split(" ", 1)
        fixed = o.routing == "fixed" and o.method in ("noloco", "local")
        dashes = ":" if o.warm_start * 2 == o.steps else "--" if often(o) or fixed else "-"
        band(axis, losses(seeds, every), tokens(seeds, every), name, colour(o), ls=dashes)
    low = min(finals(ddp_beside(runs, next(iter(shown.values())))))
    replicas = 8 // stages
    shape = f"{replicas} replicas x {stages} stage{'s' * (stages > 1)}"
    axis.set(xlabel="million tokens, all replicas", ylabel="held-out nats per byte",
             ylim=(low - 0.05, low + 1), title=f"{shape} (DiLoCo: just after its outer steps)")


def draw_bytes(axis, runs):
    for label, seeds in runs.items():
        o = seeds[0].o
        marker = "^" if often(o) else "o" if len(o.stages) == 1 else "s"
        more = [100 * x for x in over(finals(seeds), finals(ddp_beside(runs, seeds)))]
        axis.plot([max(seeds[0].sent, 1)] * len(seeds), more, marker, color=colour(o), label=label,
                  mfc="none" if o.routing == "fixed" else None)
    axis.set(xscale="log", xlabel="MB sent per rank to synchronise (1: none)",
             ylabel="perplexity over the shape's own DDP, %", ylim=(-2, 60), title="loss against bytes")


def draw_lead(axis, runs):
    """DiLoCo's perplexity less NoLoCo's, over DDP's."""
    pairs = {"8x1": ("8x1 DiLoCo", "8x1 NoLoCo"),
             "8x1, every 2 steps": ("8x1 DiLoCo, every 4 steps", "8x1 NoLoCo, every 2 steps"),
             "4x2, random routing": ("4x2 DiLoCo, fixed routing", "4x2 NoLoCo, random routing"),
             "4x2, fixed routing": ("4x2 DiLoCo, fixed routing", "4x2 NoLoCo, fixed routing")}
    for i, (name, (theirs, ours)) in enumerate(pairs.items()):
        ddp = ddp_beside(runs, runs[ours])
        lead = []
        for diloco, noloco, base in zip(losses(runs[theirs], 2), losses(runs[ours], 2), losses(ddp, 2)):
            lead.append([math.exp(p - z) - math.exp(q - z) for p, q, z in zip(diloco, noloco, base)])
        band(axis, lead, tokens(ddp, 2), name, COLOURS[i])
    axis.axhline(0, color="black", lw=0.6)
    axis.set(xlabel="million tokens", ylabel="(DiLoCo - NoLoCo) / DDP, perplexity",
             title="above 0: NoLoCo is better", ylim=(-0.15, 0.1))


def draw_spread(axis, runs):
    """Beside the learning rate."""
    def share(run):
        return [100 * step / run.steps[-1] for step in run.steps]

    noloco = {label: seeds for label, seeds in runs.items() if seeds[0].o.method == "noloco"}
    peak = max(max(curve) for seeds in noloco.values() for curve in spreads(seeds))
    shown = [label for label, seeds in noloco.items() if seeds[0].o.routing != "fixed"]
    for i, label in enumerate(shown):
        band(axis, spreads(noloco[label]), share(noloco[label][0]), label, COLOURS[i])
    for shape, label, dashes in (("8x1", "8x1 DDP", "k:"), ("4x2", "4x2 DDP, fixed routing", "k--")):
        run = runs[label][0]
        rate = [peak * x / max(run.curves["lr"]) for x in run.curves["lr"]]
        axis.plot(share(run), rate, dashes, lw=0.8, label=f"learning rate of {shape}, scaled")
    axis.set(xlabel="% of the steps", ylabel="weight spread after the outer step",
             title="weight spread and learning rate", ylim=(None, 1.5 * peak))


if __name__ == "__main__":
    headline("convergence", __doc__, runs, table, draw)
