"""What a byte a weight costs and buys: loss against bytes, 8 replicas of one stage (8x1) and 4 of two (4x2).

    python -m experiments.onebyte [--seeds 0 1 2] [--steps N] [--out DIR] [--plot]

NoLoCo in fp32 and in one byte (plumbing/onebyte.py), every m = 10, 5, 2 and 1 steps, and DiLoCo every 2m;
and in one byte every 3, which is what DiLoCo sends every 20 in fp32.
So that it is fair DiLoCo gets one byte too, by what fits it: every replica rounds Delta, with what its last
rounding left over (error feedback), and the sum is rounded so once more,

    k = round((Delta + e) / s) ,   s = max |Delta + e| / 127 ,   e <- Delta + e - s k                   (Q)

for each tensor; and DDP averages gradients in bf16. DiLoCo's loss is what such messages would give, and its
bytes are counted, not sent: Gloo has no sum of such numbers.

    python -m experiments.onebyte --short ...       train.py's options, with these two
"""
import itertools
import statistics
import sys

import torch
import torch.distributed as dist

import train
from experiments.pictures import COLOURS, show_head, show_row
from experiments.runs import Run, built, finals, headline, over_runs, published, results, spread_of
from noloco import DiLoCo
from plumbing.onebyte import lengths
from plumbing.processes import Average, Job

EVERY = (10, 5, 2, 1)
# What experiments/convergence.py has run already: {our label: the label there}.
THERE = {
    "8x1 DDP": "8x1 DDP",
    "8x1 DiLoCo, every 20": "8x1 DiLoCo",
    "8x1 DiLoCo, every 4": "8x1 DiLoCo, every 4 steps",
    "8x1 NoLoCo, every 10": "8x1 NoLoCo",
    "8x1 NoLoCo, every 2": "8x1 NoLoCo, every 2 steps",
    "4x2 DDP": "4x2 DDP, fixed routing",
    "4x2 DiLoCo, every 20": "4x2 DiLoCo, fixed routing",
    "4x2 NoLoCo, every 10": "4x2 NoLoCo, random routing",
}
METHODS = {"DDP": "bf16", "DiLoCo": "one byte", "NoLoCo": "one byte"}       # and how it sends less
COMMON = "--layers 2 --warmup 50 --lr 6e-3 --batch 8"
SHAPES = {"8x1": "--microbatches 1", "4x2": "--microbatches 2 --stages 4,4"}
TRAIN, SHORT = Run.program, "-m experiments.onebyte --short"


def runs(steps):
    for shape, more in SHAPES.items():
        whole = 1200 if shape == "8x1" else 600
        for name, method, program in methods():
            options = f"--steps {steps or whole} {COMMON} {more} --method {method}"
            if f"{shape} {name}" not in THERE:
                yield Run(f"{shape} {name}", options, program=program)


def methods():
    """(name, options, program)"""
    for m in EVERY:
        noloco, diloco = f"noloco --inner-steps {m}", f"diloco --inner-steps {2 * m} --routing fixed"
        yield f"NoLoCo, every {m}, one byte", f"{noloco} --wire int8", TRAIN
        yield f"NoLoCo, every {m}", noloco, TRAIN
        yield f"DiLoCo, every {2 * m}", diloco, TRAIN
        yield f"DiLoCo, every {2 * m}, one byte", diloco, SHORT
    yield "NoLoCo, every 3, one byte", "noloco --inner-steps 3 --wire int8", TRAIN  # DiLoCo's bytes, every 20
    yield "DDP, bf16", "ddp --routing fixed", SHORT


# ---------------------------------------------------------------- the baselines in fewer bytes


class ShortDiLoCo(DiLoCo):
    """(Q), twice: Delta on each replica, and the sum."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.lengths = lengths(self)
        self.left = {"Delta": torch.zeros_like(self.theta), "sum": torch.zeros_like(self.theta)}

    def exchange(self):
        n = len(self.ranks)
        self.theta.sub_(self.phi)
        self.round("Delta")
        dist.all_reduce(self.theta, group=self.everyone)
        self.round("sum")
        self.theta.add_(self.phi, alpha=n)
        self.bytes_sent += 2 * (n - 1) * self.theta.numel() // n
        return [self.theta], None, n

    def round(self, name):
        left = self.left[name]
        left.add_(self.theta)
        for x, k in zip(left.split(self.lengths), self.theta.split(self.lengths)):
            s = x.abs().max().clamp_(min=1e-30) / 127
            torch.div(x, s, out=k).round_().mul_(s)
        left.sub_(self.theta)


class ShortAverage(Average):
    """Gradients in bf16."""

    def __call__(self, grad, tokens):
        sent = grad.bfloat16()
        tokens = super().__call__(sent, tokens)
        grad.copy_(sent)
        return tokens


def short(argv):
    """train.main with them."""
    def make_outer(job, o, params, replicas, inner):
        return ShortDiLoCo(params, replicas, inner_steps=o.inner_steps, alpha=o.alpha, beta=o.beta) \
            if o.method == "diloco" else None

    run = built(Job(), argv, make_outer=make_outer)
    if run.average:
        run.average = ShortAverage(run.stages[run.stage])
    train.train(run)


# ---------------------------------------------------------------- the table


def everything(found):
    """{label: [a Result per seed]}, with those of experiments/convergence.py; fewest bytes first."""
    there = published("convergence")
    runs = {label: there[name] for label, name in THERE.items()} | results(found)
    return dict(sorted(runs.items(), key=lambda item: (item[0][:3], item[1][0].sent)))


def table(found):
    runs = everything(found)
    show_head("replicas x stages, method | seeds | held-out nats per byte | perplexity over DDP's "
              "| MB sent per rank to synchronise")
    for label, seeds in runs.items():
        more = over_runs(seeds, runs[f"{label[:3]} DDP"])
        show_row(label, len(seeds), spread_of(finals(seeds)), spread_of(more, "+.1%"), f"{seeds[0].sent:.1f}")


def draw(plt, found):
    runs = everything(found)
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for axis, shape in zip(axes, SHAPES):
        for (colour, method), short in itertools.product(zip(COLOURS, METHODS), (False, True)):
            kinds = [seeds for label, seeds in runs.items() if label.startswith(f"{shape} {method}")
                     and label.endswith(METHODS[method]) == short]
            name = f"{method}, {METHODS[method]}" if short else method
            draw_kinds(axis, kinds, runs[f"{shape} DDP"], color=colour, label=name,
                       ls="-" if short else ":", mfc=None if short else "none")
        axis.set(xscale="log", xlabel="MB sent per rank to synchronise", title=shape,
                 ylabel="perplexity over DDP's, %")
        axis.legend(fontsize=8)
    return figure


def draw_kinds(axis, kinds, ddp, color, **style):
    """A small point for each seed, a line through their means."""
    sent = [seeds[0].sent for seeds in kinds]
    more = [[100 * x for x in over_runs(seeds, ddp)] for seeds in kinds]
    axis.plot(sent, [statistics.mean(each) for each in more], "o", ms=6, color=color, **style)
    for x, each in zip(sent, more):
        axis.plot([x] * len(each), each, ".", ms=3, color=color)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--short"]:
        short(sys.argv[2:])
    else:
        headline("onebyte", __doc__, runs, table, draw)
