"""What the scale of Eq. 6 (skippipe.py) does to the runs of experiments/skip.py, and a share that falls to 0.

    python -m experiments.scale [--seeds 0 1 2] [--steps N] [--out DIR] [--plot]

The same plans, network and steps, with --scaled; what they are set beside is read from
results/headline_skip.json, not run again. 25% skipped in order has every seed, 50% the first. Where the share
falls, each plan leaves out one stage less than the one before, and each has as many of the steps:

    torchrun --nproc-per-node 8 -m experiments.scale --falling --skip 0.25 --stages 2,2,2,2 ...
"""
import functools
import sys
from dataclasses import replace

import train
from experiments import skip
from experiments.pictures import show_head, show_row
from experiments.runs import (built, finals, headline, over, over_runs, published, results, same_seeds,
                              spread_of)
from planning.routing import plan_paths
from plumbing.processes import Job

SKIPPED = {"25% skipped, in order": False, "50% skipped": True}         # with the first seed only
FALLS = (0.25, "no-swaps")      # from this share on, on such paths
UNSCALED = ", unscaled"


def runs(steps):
    for run in skip.runs(steps):
        for name, first in SKIPPED.items():
            if run.label.removesuffix(", equal time").endswith(f" {name}"):
                yield replace(run, options=f"{run.options} --scaled", first=first)
    share, routing = FALLS
    for stages in skip.KINDS:
        kinds = [(less, routing) for less in falling(share, stages)]
        fitting = skip.equal_time(steps or 300, stages, kinds)
        run = skip.run(f"{stages} stages, 25% falling to 0, in order, equal time", stages, *FALLS, fitting)
        run.program = "-m experiments.scale --falling"
        yield replace(run, options=f"{run.options} --scaled")
        yield replace(run, label=run.label + UNSCALED)


def falling(share, stages):
    """This share of the stages, then one stage less at a time, then none."""
    return [left_out / stages for left_out in range(round(share * stages), -1, -1)]


class Falling(train.Routes):
    """A plan for each share. A run that goes on plans anew, from the same --links to the same."""

    def __init__(self, job, o, pipeline, stages, plan=None):
        super().__init__(job, o, pipeline, stages)
        self.plans = [self.plan]
        for share in falling(o.skip, len(stages))[1:]:
            new = functools.partial(plan_paths, self.network, o.routing, share, o.microbatches, o.seed)
            self.plans.append(job.agree_on(f"plan/{share}", new))

    def at(self, step):
        self.plan = self.plans[step * len(self.plans) // self.o.steps]
        return super().at(step)


# ---------------------------------------------------------------- the table


def beside(label):
    """The label in experiments/skip.py of the run that neither scales nor falls."""
    return label.removesuffix(UNSCALED).replace("falling to 0", "skipped")


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
        show_row(label, len(seeds), spread_of(finals(seeds)), spread_of(finals(plain)), to_plain,
                 to_full if "equal time" in label else "", *left_out)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--falling"]:
        train.train(built(Job(), sys.argv[2:], Routes=Falling))
    else:
        headline("scale", __doc__, runs, table)
