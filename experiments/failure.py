"""A node of a later stage dies in a share of the iterations: NoLoCo on 4 stages of 2.

    python -m experiments.failure [--seeds 0 1 2] [--steps N] [--out DIR] [--plot]
    torchrun --nproc-per-node 8 -m experiments.failure --losing 0.1 --stages 2,2,2,2 ...     one such run
"""
import functools
import random
import sys

import train
from experiments.pictures import show_head, show_row
from experiments.runs import Part, Run, built, finals, headline, over, results, spread_of
from plumbing.processes import Job


class Losing(train.Pipeline):
    """In this share of its iterations a node of a later stage dies, with all microbatches that visit it, and
    is back for the next. All ranks draw the same node."""

    def __init__(self, share, *args):
        super().__init__(*args)
        self.share, self.iterations = share, 0

    def run(self, paths, batches, train=True, order=None):
        if train:
            draw = random.Random(f"fails {self.iterations}")
            self.iterations += 1
            if draw.random() < self.share:
                victim = draw.choice(sorted({r for path in paths for r in path[1:]}))
                left = [u for u, path in enumerate(paths) if victim not in path]
                self.lost += len(batches.keys() - set(left))
                batches = {i: batches[u] for i, u in enumerate(left) if u in batches}
                paths = [paths[u] for u in left]
        return super().run(paths, batches, train, order)


def lose(share, argv):
    """train.main with such a pipeline."""
    train.train(built(Job(), argv, Pipeline=functools.partial(Losing, share)))


def runs(steps):
    options = (f"--method noloco --steps {steps or 300} --lr 4e-3 --microbatches 6 --batch 2 "
               "--stages 2,2,2,2 --layers 8")
    for p in (0, 0.05, 0.1):
        yield Run(f"{p:.0%} of the iterations", options, program=f"-m experiments.failure --losing {p}")


def table(found):
    runs = results(found)
    base = finals(next(iter(runs.values())))
    show_head("a node dies in | held-out nats per byte | perplexity over none")
    for label, seeds in runs.items():
        show_row(label, spread_of(finals(seeds)), spread_of(over(finals(seeds), base), "+.1%"))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--losing"]:
        lose(float(sys.argv[2]), sys.argv[3:])
    else:
        headline(__doc__, {"failure": Part(runs, table)})
