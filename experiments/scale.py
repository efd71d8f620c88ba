"""The runs of experiments/skip.py with Eq. 6 (skippipe.py), with its relatives, and with a share that falls.

    python -m experiments.scale [--seeds 0 1 2] [--steps N] [--out DIR] [--plot]

The same plans, network and steps; what they are set beside is read from results/headline_skip.json, not run
again. Falling: each plan leaves out one stage less than the one before, and each has as many of the steps.
Relatives, mostly with the first seed: what a stage adds as a whole is times 1/rho^a in training and
rho^(1 - a) in evaluation, which keeps the sum's size for any a (a = 1: as inverted dropout; a = 0: Eq. 6, but
that a stage's layers still see all of each other). "Drawn anew": other paths at every step, where a plan
always leaves out the same stages together.

    torchrun --nproc-per-node 8 -m experiments.scale --power=0.5 ...    train.py's options; this a
    torchrun --nproc-per-node 8 -m experiments.scale --drawn ...        paths drawn anew (--drawn=1: a = 1)
"""
import random
import sys
from dataclasses import replace

import torch

import train
from experiments import skip
from experiments.clock import hours
from experiments.pictures import COLOURS, kept, show_head, show_row
from experiments.runs import (ROOT, band, built, finals, headline, losses, over, over_runs, published,
                              results, same_seeds, spread_of)
from plumbing.processes import Job
from planning.rho import shares

SCALED = ("25% skipped, in order", "37.5% skipped", "50% skipped")
# The first seed only.
RELATIVES = {"25% skipped, in order": ("--power=1", "--power=0.5", "--power=0"),
             "25% skipped, in order, equal time": ("--power=1",),
             "50% skipped": ("--power=1", "--power=0.5", "--power=0")}
ANEW = {"25% skipped, in order": ("--drawn", "--drawn=1"), "50% skipped": ("--drawn", "--drawn=1")}


def runs(steps):
    plain = [run for run in skip.runs(steps) if name(run).removesuffix(", equal time") in SCALED]
    for run in plain:
        yield replace(run, label=f"{run.label} (Eq. 6)", options=run.options.replace(skip.UNSCALED, ""))
    for run in plain:
        anew = ANEW.get(name(run), ()) if run.label.startswith("8 stages") else ()
        for program in RELATIVES.get(name(run), ()) + anew:
            yield replace(relative(run, program), first=True)


def name(run):
    """Without the number of stages."""
    return run.label.split(", ", 1)[1]


def relative(run, program):
    way, _, a = program.partition("=")
    ways = "drawn anew" if way == "--drawn" else f"a = {a}"
    if way == "--drawn" and a:
        ways += f", a = {a}"
    return replace(run, label=f"{run.label} ({ways})", program=f"-m experiments.scale {program}")


class Drawn(train.Routes):
    """Other paths at every step, in order, that leave out as many stages as the plan's."""

    def at(self, step):
        o, stages = self.o, len(self.stages)
        kept = round((1 - o.skip) * stages)
        draw = random.Random(f"drawn {o.seed} {step}")
        paths = []
        for whole in train.random_paths(self.stages, o.microbatches, step, o.seed):
            later = sorted(draw.sample(range(1, stages), kept - 1))
            paths.append((whole[0], *(whole[i] for i in later)))
        return paths, None


class Power(train.Pipeline):
    """What a visited stage adds, times 1/rho^a in training and rho^(1 - a) in evaluation."""
    a = 1.0
    visited = 1.0       # rho, of the last step

    def __init__(self, model, job, stages, *more):
        super().__init__(model, job, stages, *more)
        self.ranks = next(ranks for ranks in stages if job.rank in ranks)
        self.plain, model.blocks = model.blocks, self.blocks

    def run(self, paths, batches, train=True, order=None):
        if train:
            self.visited = shares(paths, [self.ranks])[0]
        return super().run(paths, batches, train, order)

    def blocks(self, x):
        power = -self.a if self.train else 1 - self.a
        return torch.lerp(x, self.plain(x), self.visited ** power)


def program(word):
    """What a run with --drawn or --power=a puts into train.build; None: it is the headline's."""
    way, _, a = word.partition("=")
    parts = {"--power": dict(Pipeline=Power), "--drawn": dict(Routes=Drawn)}.get(way)
    if parts and a:
        Power.a = float(a)
        parts = dict(parts, Pipeline=Power)
    return parts


# ---------------------------------------------------------------- the table


def beside(label):
    """The label in experiments/skip.py of the run that has the paper's way."""
    return label.split(" (")[0].replace("falling to 0", "skipped")


def table(found):
    theirs = published("skip")
    show_head("stages, share skipped | seeds | held-out nats per byte | as the papers do "
              "| perplexity over that | over a full pipeline's: DT-FM's, in equal time the planned one's "
              "| 75% of the stages, over as the papers do | half")
    for label, seeds in results(found).items():
        same = "0% skipped, in order, equal time" if "equal time" in label else "0% skipped"
        full = theirs[f"{label.split(',')[0]}, {same}"]
        plain = same_seeds(seeds, theirs[beside(label)])
        missing = [over(skip.losses_without(seeds, share), skip.losses_without(plain, share))
                   for share in ("0.75", "0.5")]
        cells = [over_runs(seeds, plain), over_runs(seeds, full), *missing]
        if "a = 0" in label:            # missing stages are evaluated without what it does in evaluation
            cells = cells[:2]
        show_row(label, len(seeds), spread_of(finals(seeds)), spread_of(finals(plain)),
                 *(spread_of(cell, "+.1%") for cell in cells), *[""] * (4 - len(cells)))


def draw(plt, found):
    """What ends when the planned full pipeline does: it, and what skips in the two ways of evaluation."""
    own, published = results(found), kept(ROOT, "headline_skip")
    theirs = results(published)
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for axis, stages in zip(axes, skip.KINDS):
        def show(label, seeds, colour, **style):
            x = hours(seeds[0], *skip.timing(published, seeds[0]))
            band(axis, losses(seeds), x, label, colour, **style)

        show("all stages, planned", theirs[f"{stages} stages, 0% skipped, in order, equal time"], COLOURS[0])
        for share, colour in (("25% skipped, in order", COLOURS[1]), ("50% skipped", COLOURS[2])):
            label = f"{stages} stages, {share}, equal time"
            show(f"{share}, as the papers do", theirs[label], colour, ls=":")
            show(f"{share}, Eq. 6", own[f"{label} (Eq. 6)"], colour)
        axis.set(xlabel="simulated hours, gradients averaged at every step", ylim=(1.65, 2.6),
                 ylabel="held-out nats per byte, whole model", title=f"{stages} stages of two nodes")
        axis.legend()
    return figure


if __name__ == "__main__":
    if parts := program("".join(sys.argv[1:2])):
        train.train(built(Job(), [*sys.argv[2:], skip.UNSCALED.strip()], **parts))
    else:
        headline("scale", __doc__, runs, table, draw)
