"""How far partners are apart, in steps of the sender: what B must be (Eqs. M1 and M4 of plumbing/onebyte.py).

    python -m experiments.margin [--seeds 0] [--steps N] [--out DIR] [--plot]
    torchrun --nproc-per-node 8 -m experiments.margin --tell --inner-steps 1 ...        one such run

Runs in fp32. At every exchange each replica asks of each of its tensors, and of each partner,

    |theirs - theta| / max |theta - phi|                                        (a)

its largest step since the last outer step, by which a message in one byte would choose B. (M4) holds where
(a) is under 8 less 1/16 (B / 2 - s).
"""
import json
import statistics
import sys

import train
from experiments.pictures import show_head, show_row
from experiments.runs import Run, built, headline, results, spread_of
from noloco import NoLoCo
from plumbing.onebyte import MARGIN, lengths
from plumbing.processes import Job

BOUNDS = MARGIN // 4, MARGIN // 2
COMMON = "--layers 2 --warmup 50 --lr 6e-3 --batch 8 --microbatches 1"
SETTINGS = {
    "every step": "--inner-steps 1",
    "every 10 steps": "--inner-steps 10",
    "every 10 steps, alpha 0.5, beta 0.7": "--inner-steps 10 --alpha 0.5 --beta 0.7",
}


def runs(steps):
    for name, method in SETTINGS.items():
        options = f"--steps {max(10, steps or 300)} {COMMON} {method}"
        yield Run(name, options, program="-m experiments.margin --tell", after=what_was_told)


class TellingNoLoCo(NoLoCo):
    """Keeps the largest (a) of every tensor, exchange and partner, and how many weights were beyond."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.largest, self.beyond = [], []

    def exchange(self):
        thetas, phis, n = super().exchange()
        sizes = lengths(self)
        self.beyond.append(dict.fromkeys(BOUNDS, 0))
        for theirs in [v.to(self.theta.device) for v in thetas if v is not self.theta]:
            for x, y, phi in zip(*(v.split(sizes) for v in (self.theta, theirs, self.phi))):
                a = (y - x).abs_() / (x - phi).abs().max().clamp_(min=1e-30)
                self.largest.append(a.max().item())
                for bound in BOUNDS:
                    self.beyond[-1][bound] += (a > bound).sum().item()
        return thetas, phis, n


def tell(argv):
    """train.main with it; each rank keeps what it has found."""
    run = built(Job(), argv, make_outer=lambda *args: train.make_outer(*args, {"fp32": TellingNoLoCo}))
    train.train(run)
    last = run.outer.beyond[-max(1, run.o.steps // run.o.inner_steps // 10):]     # a tenth of the outer steps
    share = [sum(row[bound] for row in last) / len(last) / len(run.theta) for bound in BOUNDS]
    row = dict(largest=run.outer.largest, beyond=share)
    (run.folder / f"margin{run.job.rank}.json").write_text(json.dumps(row))


def what_was_told(folder):
    rows = [json.loads(file.read_text()) for file in folder.glob("margin*.json")]
    ratios = [x for row in rows for x in row["largest"]]
    beyond = [statistics.mean(shares) for shares in zip(*(row["beyond"] for row in rows))]
    tenths = statistics.quantiles(ratios, n=10)
    return dict(median=statistics.median(ratios), tenths=tenths, largest=max(ratios), beyond=beyond)


def table(found):
    show_head("outer step | seeds | largest (a) in a tensor, median of all exchanges | 90% are under "
              f"| the largest | share of weights beyond {BOUNDS[0]} at the end | beyond {BOUNDS[1]}")
    for label, seeds in results(found).items():
        show_row(label, len(seeds), spread_of([run.median for run in seeds], ".1f"),
                 spread_of([run.tenths[-1] for run in seeds], ".1f"),
                 spread_of([run.largest for run in seeds], ".1f"),
                 *(spread_of([run.beyond[i] for run in seeds], ".1e") for i in range(len(BOUNDS))))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--tell"]:
        tell(sys.argv[2:])
    else:
        headline("margin", __doc__, runs, table)
