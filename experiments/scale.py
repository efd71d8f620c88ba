"""What the scale of Eq. 6 (skippipe.py) does to the runs of experiments/skip.py, and a share that falls to 0.

    python -m experiments.scale [--seeds 0 1 2] [--steps N] [--out DIR] [--plot]

The same plans, network and steps, with --scaled; what they are set beside is read from
results/headline_skip.json, not run again. 25% skipped in order has every seed, 50% the first. Where the share
falls, each plan leaves out one stage less than the one before, and each has as many of the steps. "a":
1/rho^a in training with rho^(1 - a) in evaluation, which keeps the sum's size for any a (the first seed only,
but for a = 0 in equal time). "Drawn anew": other paths at every step, where a plan always leaves out the same
stages together (the first seed only).

    torchrun --nproc-per-node 8 -m experiments.scale --power=0.5 ...    train.py's options; this a
    torchrun --nproc-per-node 8 -m experiments.scale --drawn ...        paths drawn anew
"""
import random
import sys
from dataclasses import replace

import torch

import train
from experiments import skip
from experiments.pictures import show_head, show_row
from experiments.runs import (built, finals, headline, over, over_runs, published, results, same_seeds,
                              spread_of)
from planning.falling import falling
from plumbing.processes import Job
from skippipe import share_of_visits

SKIPPED = {"25% skipped, in order": False, "50% skipped": True}         # with the first seed only
FALLS = (0.25, "no-swaps")      # from this share on, on such paths
UNSCALED = ", unscaled"
POWERS = {"25% skipped, in order": ("0.5", "0"), "25% skipped, in order, equal time": ("0",),
          "50% skipped": ("0.5", "0")}


def runs(steps):
    plain = list(skip.runs(steps))
    for run in plain:
        for name, first in SKIPPED.items():
            if run.label.removesuffix(", equal time").endswith(f" {name}"):
                yield scaled(replace(run, first=first))
    share, routing = FALLS
    for stages in skip.KINDS:
        kinds = [(less, routing) for less in falling(share, stages)]
        fitting = skip.equal_time(steps or 300, stages, kinds)
        run = skip.run(f"{stages} stages, 25% falling to 0, in order, equal time", stages, *FALLS, fitting)
        run.options += " --falling"
        yield scaled(run)
        yield replace(run, label=run.label + UNSCALED)
    for run in plain:
        stages, name = run.label.split(", ", 1)
        first = "equal time" not in name
        for a in POWERS.get(name, ()):
            yield replace(run, label=f"{run.label} (a = {a})", first=first,
                          program=f"-m experiments.scale --power={a}")
        if name in POWERS and first and stages == "8 stages":
            anew = replace(run, label=f"{run.label} (drawn anew)", first=True,
                           program="-m experiments.scale --drawn")
            yield scaled(anew)
            yield replace(anew, label=anew.label + UNSCALED)


def scaled(run):
    return replace(run, options=f"{run.options} --scaled")


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

    def run(self, paths, batches, train=True, order=None):
        if train:
            self.visited = share_of_visits(paths, self.replicas)
        return super().run(paths, batches, train, order)

    def blocks(self, x):
        power = -self.a if self.train else 1 - self.a
        return torch.lerp(x, self.model.blocks(x), self.visited ** power)


def program(argv):
    """What a run with --drawn or --power=a puts into train.build; None: it is the headline's."""
    way, _, a = "".join(argv[:1]).partition("=")
    if way == "--power":
        Power.a = float(a)
    return {"--drawn": dict(Routes=Drawn), "--power": dict(Pipeline=Power)}.get(way)


# ---------------------------------------------------------------- the table


def beside(label):
    """The label in experiments/skip.py of the run that neither scales nor falls."""
    return label.removesuffix(UNSCALED).split(" (")[0].replace("falling to 0", "skipped")


def table(found):
    theirs = published("skip")
    show_head("stages, share skipped, scaled unless it says not | seeds | held-out nats per byte "
              "| as it was | perplexity over that | over the planned full pipeline's, equal time "
              "| 75% of the stages, over as it was | half")
    for label, seeds in results(found).items():
        plain = same_seeds(seeds, theirs[beside(label)])
        full = theirs[f"{label.split(',')[0]}, 0% skipped, in order, equal time"]
        missing = [over(skip.losses_without(seeds, share), skip.losses_without(plain, share))
                   for share in ("0.75", "0.5")]
        cells = [over_runs(seeds, plain), over_runs(seeds, full), *missing]
        to_plain, to_full, *left_out = [spread_of(cell, "+.1%") for cell in cells]
        if "(a = " in label:            # missing stages are evaluated without the factor
            left_out = "", ""
        show_row(label, len(seeds), spread_of(finals(seeds)), spread_of(finals(plain)), to_plain,
                 to_full if "equal time" in label else "", *left_out)


if __name__ == "__main__":
    if parts := program(sys.argv[1:]):
        train.train(built(Job(), sys.argv[2:], **parts))
    else:
        headline("scale", __doc__, runs, table)
