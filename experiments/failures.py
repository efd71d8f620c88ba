"""A node of a later stage dies in a share of the iterations: NoLoCo on 4 stages of 2.

    python -m experiments.failures [--scale try|plot|full] [--plot]
    torchrun --nproc-per-node 8 -m experiments.failures --losing 0.1 0 --stages 2,2,2,2 ...    a run

full: an hour of two cores. Deaths are emulated: an iteration drops the microbatches of one
node, and no process ends. Named before the runs: perplexity with deaths in 10% of the iterations
compared with that without.
"""
import functools
import itertools
import random
import sys

import train
from experiments.harness import Row, Run, command, make_runs
from experiments.pictures import COLOURS, WIDTH, forest, frame, percent
from experiments.stats import Expected, Table, mean, paired, perplexity, significant, those

SHARES = {"try": (0.1,), "plot": (0, 0.1), "full": (0, 0.05, 0.1)}     # of the iterations
STEPS = {"try": 4, "plot": 40, "full": 300}
SEEDS = {"try": (0,), "plot": (0,), "full": range(5)}


class Losing(train.Pipeline):
    """In this share of its iterations a node of a later stage dies, with all microbatches that
    visit it, and is back for the next. All ranks draw the same node, by the seed."""

    def __init__(self, share, seed, *args):
        super().__init__(*args)
        self.share, self.seed, self.iterations = share, seed, 0

    def run(self, paths, batches, train=True, order=None):
        if train:
            paths, batches = self.lose_some(paths, batches)
        return super().run(paths, batches, train, order)

    def lose_some(self, paths, batches):
        """The (paths, batches) that this iteration's death leaves, if it has one."""
        draw = random.Random(f"fails {self.seed} {self.iterations}")
        self.iterations += 1
        if draw.random() >= self.share:
            return paths, batches
        later = {rank for path in paths for rank in path[1:]}
        victim = draw.choice(sorted(later))
        left = [u for u, path in enumerate(paths) if victim not in path]
        kept = {i: batches[u] for i, u in enumerate(left) if u in batches}
        return [paths[u] for u in left], kept


def lose(share, seed, argv):
    """train.main with such a pipeline."""
    train.main(argv, Pipeline=functools.partial(Losing, share, seed))


def wanted(scale):
    options = (f"--method noloco --steps {STEPS[scale]} --lr 4e-3 --microbatches 6 --batch 2 "
               "--stages 2,2,2,2 --layers 8")
    processes = 8
    if scale == "try":
        options += " --stages 2,2 --eval-sequences 8"
        processes = 4
    runs = []
    for seed, share in itertools.product(SEEDS[scale], SHARES[scale]):
        runs.append(Run(dict(share=share, seed=seed), options, processes,
                        program=f"-m experiments.failures --losing {share} {seed}"))
    return runs


def measure(o):
    make_runs("failures", wanted(o.scale), o)


def cost(records, share):
    """Perplexity compared with that without deaths; None without such runs."""
    return paired(records, dict(share=share), dict(share=0), how=perplexity)


def show(found):
    records = found["records"]
    table = Table("a node dies (emulated) in", "loss, nats per byte",
                  "perplexity compared with no deaths")
    for share in SHARES["full"]:
        if those(records, share=share):
            table.add(f"{share:.0%} of the iterations", mean(records, dict(share=share)),
                      cost(records, share) if share else None)
    table.end()


def draw(plt, found):
    records, costs = found["records"], {}
    for share in SHARES["full"][1:]:
        more = cost(records, share)
        if more:
            costs[f"{share:.0%}\nof the iterations"] = more
    figure, axis = plt.subplots(figsize=(WIDTH, 2.2))
    forest(axis, costs, len(costs) * [COLOURS["NoLoCo"]], "+.1%")
    axis.set(xlabel="perplexity compared with no deaths")
    axis.xaxis.set_major_formatter(percent)
    words = "no significant cost"
    ends = list(costs.values())
    if any(significant(ends)):
        words = f"they cost up to {ends[-1].mean:.0%} perplexity"
    frame(figure, found, f"Lost microbatches: {words}", "What lost microbatches cost")
    return figure


def expected(found):
    return [Expected("deaths in 10% of the iterations, perplexity compared with none",
                     cost(found["records"], 0.1).mean, 0.01, 0.06)]


ROW = Row("failures", measure, show, {"failures": draw}, expected)

if __name__ == "__main__":
    if sys.argv[1:2] == ["--losing"]:
        lose(float(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
    else:
        command(__doc__, ROW)
