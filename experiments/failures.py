"""A node of a later stage dies in a share of the iterations: NoLoCo on 4 stages of 2.

    python -m experiments.failures [--scale try|plot|full] [--plot]
    torchrun --nproc-per-node 8 -m experiments.failures --losing 0.1 --stages 2,2,2,2 ...   one run

full: 20 minutes of two cores. Deaths are emulated: an iteration drops the microbatches of one node,
and no process ends.
"""
import functools
import random
import sys

import train
from experiments.harness import Row, Setting, command, run_all
from experiments.pictures import COLOURS, WIDTH, counted, differences, frame, percent
from experiments.tables import MEANS_ONLY, Expected, Table, mean_final, over_runs, results, sure

SHARES = {"try": (0.1,), "plot": (0, 0.1), "full": (0, 0.05, 0.1)}
STEPS = {"try": 4, "plot": 40, "full": 300}
SEEDS = {"try": (0,), "plot": (0,), "full": (0, 1, 2)}
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
        kept = {i: batches[u] for i, u in enumerate(left) if u in batches}
        return [paths[u] for u in left], kept


def lose(share, argv):
    """train.main with such a pipeline."""
    train.main(argv, Pipeline=functools.partial(Losing, share))


def settings(scale):
    options = (f"--method noloco --steps {STEPS[scale]} --lr 4e-3 --microbatches 6 --batch 2 "
               "--stages 2,2,2,2 --layers 8")
    processes = 8
    if scale == "try":
        options += " --stages 2,2 --eval-sequences 8"
        processes = 4
    for share in SHARES[scale]:
        yield Setting(f"{share:.0%} of the iterations", options, processes,
                      program=f"-m experiments.failures --losing {share}")


def measure(o):
    return run_all("failures", settings(o.scale), SEEDS[o.scale], o)


def costs(found):
    """{share of the iterations: perplexity over none's}"""
    runs = results(found)
    return {label: over_runs(seeds, runs[NONE]) for label, seeds in runs.items()
            if NONE in runs and label != NONE}


def show(found):
    more = costs(found)
    table = Table("a node dies in", "loss, nats per byte", "perplexity over none")
    for label, seeds in results(found).items():
        table.add(label, mean_final(seeds), more.get(label))
    table.end()
    print(MEANS_ONLY)


def draw(plt, found):
    more = costs(found)
    figure, axis = plt.subplots(figsize=(WIDTH, 2.4))
    names = [label.replace(" of", "\nof") for label in more]
    differences(axis, list(more.values()), len(more) * [COLOURS["NoLoCo"]], names, "+.1%")
    axis.set(xlabel="perplexity over that without deaths")
    axis.xaxis.set_major_formatter(percent)
    seeds = counted(len(next(iter(found["runs"].values()))), "seed")
    words = "what it costs, we cannot tell"
    if any(sure(list(more.values()))):
        words = f"it costs {list(more.values())[-1].mean:.0%}"
    frame(figure, found, f"Training goes on where nodes die; {words}",
          "What deaths of nodes cost", f"In so many iterations a node of a later stage loses its "
          f"microbatches. NoLoCo, 4 stages of 2 nodes, replicas' means, {seeds}; bars: 95% "
          f"intervals.")
    return figure


def expected(found):
    return [Expected("deaths in 10% of the iterations, perplexity over none", one.mean, 0.03, 0.06)
            for label, one in costs(found).items() if label.startswith("10%")]


ROW = Row("failures", measure, show, {"failures": draw}, expected)

if __name__ == "__main__":
    if sys.argv[1:2] == ["--losing"]:
        lose(float(sys.argv[2]), sys.argv[3:])
    else:
        command(__doc__, ROW)
