"""Fragments: parts of the weights meet in turn, beside whole messages; the runs are those of gap.

    python -m experiments.fragments [--scale try|plot|full] [--plot]

NoLoCo every 10 steps, for the same bytes in each setting: whole, or a tenth of the weights at every
step; merged at once or D steps later.
"""
from experiments import gap
from experiments.gap_runs import DDP, LATE, LATE_PARTS, LATER, MAIN, NOLOCO, PARTS
from experiments.harness import Row, command
from experiments.pictures import COLOURS, WIDTH, counted, differences, frame
from experiments.tables import Comparison, Expected, Table

COMPARED = {        # the first over the second
    "fragments, D = 1, over whole, D = 5": (LATE_PARTS, LATER),
    "fragments, D = 1, over whole, D = 1": (LATE_PARTS, LATE),
    "fragments over whole, both D = 0": (PARTS, NOLOCO[10]),
    "whole: D = 5 over D = 0": (LATER, NOLOCO[10]),
    "whole: D = 1 over D = 0": (LATE, NOLOCO[10]),
}


def compared(found):
    """{its name: nats per byte} of those that are trained."""
    there = gap.Found.of(found)
    pairs = {}
    for name, (trial, base) in COMPARED.items():
        nats = there.nats(MAIN, trial, base)
        if nats:
            pairs[name] = Comparison(list(nats.values()))
    return pairs


def show(found):
    table = Table("NoLoCo every 10, merged models", "nats per byte")
    for name, nats in compared(found).items():
        table.add(name, nats)
    table.end()


def draw(plt, found):
    pairs = compared(found)
    seeds = counted(len(gap.Found.of(found).losses(MAIN, DDP)), "seed")
    figure, axis = plt.subplots(figsize=(WIDTH, 3.8))
    colours = [COLOURS["NoLoCo"] if "fragments" in name else COLOURS["planned"] for name in pairs]
    differences(axis, list(pairs.values()), colours, list(pairs))
    axis.set(xlabel="nats per byte (left of zero: the first one ends lower)")
    frame(figure, found, "A tenth of the weights at every step beats all of them every ten steps, "
          "mostly by the shorter delay", "Fragments beside whole messages",
          f"NoLoCo every 10 steps, 10 fragments or whole messages, for the same bytes; D: steps "
          f"until what came is merged. Merged models, {seeds}; bars: 95% intervals.")
    return figure


def expected(found):
    known = {"full": (-0.052, 0.01), "plot": (-0.05, 0.06)}
    number = known.get(found["scale"], (0.0, 0.0))
    name = next(iter(COMPARED))
    nats = compared(found).get(name)
    return [Expected(f"{name}, nats per byte", nats and nats.mean, *number, form="+.3f",
                     judged=found["scale"] in known)]


ROW = Row("fragments", gap.measure, show, {"fragments": draw}, expected, of_row="gap")

if __name__ == "__main__":
    command(__doc__, ROW)
