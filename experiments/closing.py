"""What might close NoLoCo's gap to DDP, and whether it does: 8 replicas of one stage, 64 kB of held-out text.

    python -m experiments.closing [--seeds 0 1 2] [--steps N] [--out DIR] [--plot]

Each way is tried with every method that it fits, at the settings of experiments/convergence.py: DiLoCo every
20 steps, NoLoCo every 10. (That averaging more often closes it, experiments/onebyte.py shows.)

A replica's own Adam divides by the noise of its own small batch. Less noise: a longer memory (beta2), larger
batches (as many steps, so more tokens too), no division by squares at all (Muon). And where random pairs mix
replicas by chance, those of a hypercube mix all of them in log2 N rounds.

    torchrun --nproc-per-node 8 -m experiments.closing --cube ...       train.py's options; who meets whom
"""
import functools
import random
import sys

import train
from experiments.pictures import show_head, show_row
from experiments.runs import Run, built, finals, headline, over_runs, results, spread_of
from noloco import NoLoCo
from plumbing.processes import Job

COMMON = "--layers 2 --warmup 50 --microbatches 1 --routing fixed --eval-every 200 --eval-sequences 512"
METHODS = ("DDP", "DiLoCo", "NoLoCo")
PLAIN = "as it is"
BETA2 = "beta2 0.99"
OFTEN = "Muon, every 2 steps in one byte"
RATES = ("6e-3", "1.2e-2", "2.4e-2")    # of Muon, with the first seed
MUON = "1.2e-2"                         # the best of them


def runs(steps):
    def run(method, way, options, **more):
        options = f"--steps {steps or 1200} {COMMON} --method {method.lower()} {options}"
        return Run(f"{method}, {way}", options, **more)

    plain, beta2 = "--batch 8 --lr 6e-3", "--batch 8 --lr 6e-3 --" + BETA2
    for method in METHODS:
        yield run(method, PLAIN, plain)
        yield run(method, BETA2, beta2)
    for way, options in (("hypercube", plain), (f"hypercube, {BETA2}", beta2)):
        yield run("NoLoCo", way, options, program="-m experiments.closing --cube")
    for method in METHODS:
        for rate in RATES:
            yield run(method, f"Muon, rate {rate}", f"--batch 8 --lr {rate} --optimizer muon",
                      first=rate != MUON)
    often = f"--batch 8 --lr {MUON} --inner-steps 2 --wire int8"
    yield run("NoLoCo", OFTEN, f"{often} --optimizer muon")
    for method in METHODS:              # ten minutes a run
        yield run(method, "4 times the batch and tokens", "--batch 32 --lr 6e-3", first=True)


# ---------------------------------------------------------------- the ways


def pairs_of_a_cube(ranks, step, seed):
    """Partners differ in bit `step mod log2 N` of their places, and all are shuffled anew every log2 N steps:
    with alpha = 0, gamma = beta = 1 and nothing learnt between, all then hold the mean of all.

    Raises ValueError where N is not 2, 4, 8, ...
    """
    if len(ranks) < 2 or len(ranks) & (len(ranks) - 1):
        raise ValueError(f"a hypercube has 2, 4, 8, ... corners, not {len(ranks)}")
    turn, bit = divmod(step, len(ranks).bit_length() - 1)
    order = list(ranks)
    random.Random(f"cube {seed} {turn} {order[0]}").shuffle(order)
    return [tuple(sorted((r, order[i ^ 1 << bit]))) for i, r in enumerate(order) if not i >> bit & 1]


class CubeNoLoCo(NoLoCo):
    """Meets those partners instead of random ones."""

    def group(self):
        pairs = pairs_of_a_cube(self.ranks, self.steps // self.inner_steps, self.seed)
        return next(pair for pair in pairs if self.rank in pair)


def cube(argv):
    make_outer = functools.partial(train.make_outer, wires=dict(fp32=CubeNoLoCo))
    train.train(built(Job(), argv, make_outer=make_outer))


# ---------------------------------------------------------------- the table


def table(found):
    runs = results(found)
    show_head("method, what is tried | seeds | held-out nats per byte | perplexity over the method as it is "
              "| over DDP's with the same, Muon at its best rate | over DDP's as it is")
    for label, seeds in runs.items():
        method, way = label.split(", ", 1)
        same = f"Muon, rate {MUON}" if "Muon" in way else way
        same = same.removeprefix("hypercube").removeprefix(", ") or PLAIN
        bases = f"{method}, {PLAIN}", f"DDP, {same}", f"DDP, {PLAIN}"
        cells = [spread_of(over_runs(seeds, runs[base]), "+.1%") for base in bases]
        show_row(label, len(seeds), spread_of(finals(seeds)), *cells)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--cube"]:
        cube(sys.argv[2:])
    else:
        headline("closing", __doc__, runs, table)
