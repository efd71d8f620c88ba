"""A host that is cut off again and again: what it costs each method, between real hosts.

    python -m experiments.cuts [--seeds 0 1 2] [--steps N] [--out DIR] [--plot]

The hosts of experiments/hosts.py with links of 200 Mbit/s. Every minute one of them is cut off for 15 s, both
ways; beside that, the same command without cuts. NoLoCo trains with --survive: who misses the host goes on
without it, and it leaps to where the others are when it is back. DDP and DiLoCo know no way round a replica:
all wait until its link is back, which TCP notices later still. Steps are as many as take some 100 s uncut.

    python -m experiments.cuts --train ...              train.py's options, by a clock that never stands still
"""
import sys
from dataclasses import dataclass

import train
from experiments.clock import loss_at
from experiments.hosts import COMMON, Links
from experiments.pictures import COLOURS, show_head, show_row
from experiments.runs import (Run, built, ends, finals, headline, lines, over, results, same_seeds,
                              spread_of)
from plumbing.processes import Job
from plumbing.report import Meter

HOST, EVERY, SECONDS, BEGIN, END = 5, 60, 15, 30, 600       # seconds after the launch
LINKS = {"uncut": "", "cut": "".join(f" --cut {HOST}@{t}+{SECONDS}" for t in range(BEGIN, END, EVERY))}
EVALUATIONS = 8
METHODS = {         # name: (steps, options); an eighth of the steps is of whole rounds
    "DDP": (200, "ddp"),
    "DiLoCo, every 20": (640, "diloco --inner-steps 20"),
    "NoLoCo, every 20": (800, "noloco --inner-steps 20 --survive 6"),
    "NoLoCo, every 2, one byte": (560, "noloco --inner-steps 2 --wire int8 --survive 6"),
}


def runs(steps):
    program = Run.program if steps else "-m experiments.cuts --train"
    for name, (whole, method) in METHODS.items():
        for links, more in LINKS.items():
            length = f"--steps {steps or whole} --eval-every {max(1, (steps or whole) // EVALUATIONS)}"
            yield Run(f"{name}: {links}", f"{COMMON} {length} --method {method}", program=program,
                      hosts=Links(200).options() + more)


@dataclass
class Running(Meter):
    """Evaluations count: a cut that falls into one must not be free. The seconds of a row are rank 0's, until
    that evaluation begins."""

    def go_on(self):
        if not self.seconds:
            super().go_on()

    def pause(self):
        super().pause()
        super().go_on()


def timed(argv):
    """train.main, by that clock."""
    run = built(Job(), argv)
    run.meter = Running()
    train.train(run)


def pairs(found):
    """(method, its runs without cuts, with them) of each, the same seeds of both."""
    runs = results(found)
    for name in METHODS:
        uncut, cut = (runs[f"{name}: {links}"] for links in LINKS)
        yield name, same_seeds(cut, uncut), cut


def table(found):
    show_head("method | seeds | steps | seconds uncut | cut over uncut | held-out nats per byte uncut | cut "
              "| perplexity over uncut's, when uncut ends | replicas in the last loss | tokens over uncut's "
              "| outer steps alone")
    for name, uncut, cut in pairs(found):
        longer = [a / b for a, b in zip(ends(cut), ends(uncut))]
        then = [loss_at(second, run) for second, run in zip(ends(uncut), cut)]
        here = min(run.curves["ranks"][-1] for run in cut)
        seen = [a.curves["tokens"][-1] / b.curves["tokens"][-1] for a, b in zip(cut, uncut)]
        alone = [run.curves["steps_alone"][-1] for run in cut]
        show_row(name, len(cut), f"{cut[0].steps[-1]:.0f}", spread_of(ends(uncut), ".0f"),
                 spread_of(longer, ".2f"), spread_of(finals(uncut)), spread_of(finals(cut)),
                 spread_of(over(then, finals(uncut)), "+.1%"), f"{here:.0f}", spread_of(seen, ".0%"),
                 spread_of(alone, ".0f"))


def draw(plt, found):
    figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
    for colour, (name, *both) in zip(COLOURS, pairs(found)):
        for style, label, seeds in zip((":", "-"), (None, name), both):
            lines(axis, seeds, label, colour, style)
    axis.set(xlabel="seconds, measured (dotted: without cuts)", ylabel="held-out nats per byte",
             title=f"200 Mbit/s, one of 8 hosts cut off {SECONDS} s every minute")
    axis.legend()
    return figure


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        timed(sys.argv[2:])
    else:
        headline("cuts", __doc__, runs, table, draw)
