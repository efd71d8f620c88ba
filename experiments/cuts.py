"""A host that is cut off again and again: what it costs each method, between real hosts.

    python -m experiments.cuts [--seeds 0 1 2] [--steps N] [--out DIR] [--plot]

The hosts of experiments/hosts.py with links of 200 Mbit/s. Every minute one of them is cut off for 15 s, both
ways; beside that, the same command without cuts. NoLoCo trains with --survive: who misses the host goes on
without it, and it leaps to where the others are when it is back. DDP and DiLoCo know no way round a replica:
all wait until its link is back, which TCP notices later still. Steps are as many as take some 100 s uncut.
"""
import numpy as np

from experiments.hosts import COMMON, Links
from experiments.pictures import COLOURS, show_head, show_row
from experiments.runs import Run, ends, finals, headline, lines, over, results, spread_of

HOST, EVERY, SECONDS, BEGIN, END = 5, 60, 15, 30, 600       # seconds after the launch
LINKS = {"uncut": "", "cut": "".join(f" --cut {HOST}@{t}+{SECONDS}" for t in range(BEGIN, END, EVERY))}
METHODS = {         # name: (steps, options)
    "DDP": (220, "ddp"),
    "DiLoCo, every 20": (700, "diloco --inner-steps 20"),
    "NoLoCo, every 20": (800, "noloco --inner-steps 20 --survive 6"),
    "NoLoCo, every 2, one byte": (560, "noloco --inner-steps 2 --wire int8 --survive 6"),
}


def runs(steps):
    for name, (whole, method) in METHODS.items():
        for links, more in LINKS.items():
            length = f"--steps {steps or whole} --eval-every {max(1, (steps or whole) // 10)}"
            yield Run(f"{name}: {links}", f"{COMMON} {length} --method {method}",
                      hosts=Links(200).options() + more)


def pairs(found):
    """{method: (its runs without cuts, with them)}"""
    runs = results(found)
    return {name: [runs[f"{name}: {links}"] for links in LINKS] for name in METHODS}


def at(second, run):
    """Its loss then, on straight lines between evaluations; after its end, the last."""
    return float(np.interp(second, run.curves["seconds"], run.losses))


def table(found):
    show_head("method | seeds | steps | seconds uncut | cut over uncut | held-out nats per byte uncut | cut "
              "| perplexity over uncut's, when uncut ends | outer steps alone")
    for name, (uncut, cut) in pairs(found).items():
        longer = [a / b for a, b in zip(ends(cut), ends(uncut))]
        then = [at(second, run) for second, run in zip(ends(uncut), cut)]
        alone = [run.curves["steps_alone"][-1] for run in cut]
        show_row(name, len(cut), f"{cut[0].steps[-1]:.0f}", spread_of(ends(uncut), ".0f"),
                 spread_of(longer, ".2f"), spread_of(finals(uncut)), spread_of(finals(cut)),
                 spread_of(over(then, finals(uncut)), "+.1%"), spread_of(alone, ".0f"))


def draw(plt, found):
    figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
    for colour, (name, both) in zip(COLOURS, pairs(found).items()):
        for style, label, seeds in zip((":", "-"), (None, name), both):
            lines(axis, seeds, label, colour, style)
    axis.set(xlabel="seconds, measured (dotted: without cuts)", ylabel="held-out nats per byte",
             title=f"200 Mbit/s, one of 8 hosts cut off {SECONDS} s every minute")
    axis.legend()
    return figure


if __name__ == "__main__":
    headline("cuts", __doc__, runs, table, draw)
