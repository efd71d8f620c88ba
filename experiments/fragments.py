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
    "fragments, D = 0, over whole, D = 0": (PARTS, NOLOCO[10]),
    "whole, D = 5, over whole, D = 0": (LATER, NOLOCO[10]),
    "whole, D = 1, over whole, D = 0": (LATE, NOLOCO[10]),
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
    table = Table("NoLoCo every 10 steps, merged models", "nats per byte")
    for name, nats in compared(found).items():
        table.add(name, nats)
    table.end()


def draw(plt, found):
    pairs = compared(found)
    seeds = counted(len(gap.Found.of(found).losses(MAIN, DDP)), "seed")
    figure, axis = plt.subplots(figsize=(WIDTH, 3.8))
    names = [name.replace(", over ", "\nover ") for name in pairs]
    colours = [COLOURS["NoLoCo" if "fragments" in name else "planned"] for name in pairs]
    differences(axis, list(pairs.values()), colours, names)
    axis.set(xlabel="nats per byte (below zero: the first one is better)")
    frame(figure, found, "Fragments beat whole messages, mostly by their shorter delay",
          "Fragments beside whole messages", f"NoLoCo: a tenth of the weights at each step, or all "
          f"every 10 steps, for as many bytes. D: steps until what came is merged. Grey: what a "
          f"delay costs by itself. Merged models, {seeds}; bars: 95% intervals.")
    return figure


def expected(found):
    known = {"full": (-0.052, 0.01), "plot": (-0.02, 0.04)}
    number = known.get(found["scale"], (0.0, 0.0))
    name = next(iter(COMPARED))
    nats = compared(found).get(name)
    return [Expected(f"{name}, nats per byte", nats and nats.mean, *number, form="+.3f",
                     judged=found["scale"] in known)]


ROW = Row("fragments", gap.measure, show, {"fragments": draw}, expected, of_row="gap")

if __name__ == "__main__":
    command(__doc__, ROW)
