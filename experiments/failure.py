"""A node of a later stage dies in a share of the iterations: NoLoCo on 4 stages of 2.

    python -m experiments.failure [--seeds 0 1 2] [--steps N] [--out DIR] [--plot]
    torchrun --nproc-per-node 8 -m experiments.failure --losing 0.1 --stages 2,2,2,2 ...    one run
"""
import functools
import random
import sys

import train
from experiments.comparing import Table
from experiments.harness import MEANS_ONLY, Part, Setting, built, headline
from experiments.results import finals, mean_final, over_runs, results, spread_of
from train import Job

NONE = "0% of the iterations"


class Losing(train.Pipeline):
    """In this share of its iterations a node of a later stage dies, with all microbatches that
    visit it, and is back for the next. All ranks draw the same node."""

    def __init__(self, share, *args):
        super().__init__(*args)
        self.share, self.iterations = share, 0

    def run(self, paths, batches, train=True, order=None):
        if train:
            paths, batches = self.lose_some(paths, batches)
        return super().run(paths, batches, train, order)

    def lose_some(self, paths, batches):
        """The (paths, batches) that this iteration's death leaves, if it has one."""
        draw = random.Random(f"fails {self.iterations}")
        self.iterations += 1
        if draw.random() >= self.share:
            return paths, batches
        later = {rank for path in paths for rank in path[1:]}
        victim = draw.choice(sorted(later))
        left = [u for u, path in enumerate(paths) if victim not in path]
        self.lost += len(batches.keys() - set(left))
        kept = {i: batches[u] for i, u in enumerate(left) if u in batches}
        return [paths[u] for u in left], kept


def lose(share, argv):
    """train.main with such a pipeline."""
    train.train(built(Job(), argv, Pipeline=functools.partial(Losing, share)))


def failure_settings(steps):
    options = (f"--method noloco --steps {steps or 300} --lr 4e-3 --microbatches 6 --batch 2 "
               "--stages 2,2,2,2 --layers 8")
    for p in (0, 0.05, 0.1):
        yield Setting(f"{p:.0%} of the iterations", options,
                      program=f"-m experiments.failure --losing {p}")


def show_failure(found):
    runs = results(found)
    table = Table("a node dies in", "held-out nats per byte", "perplexity over none")
    for label, seeds in runs.items():
        more = over_runs(seeds, runs[NONE]) if label != NONE else None
        table.add(label, mean_final(seeds), more)
    table.end()
    print(MEANS_ONLY)


def record_failure(found):
    table = Table("a node dies in", "held-out nats per byte (least to largest)")
    for label, seeds in results(found).items():
        table.add(label, spread_of(finals(seeds)))
    table.end()


PARTS = {"failure": Part(failure_settings, show_failure, record_failure)}

if __name__ == "__main__":
    if sys.argv[1:2] == ["--losing"]:
        lose(float(sys.argv[2]), sys.argv[3:])
    else:
        headline(__doc__, PARTS)
