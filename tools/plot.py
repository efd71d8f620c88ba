"""Draw runs, also of those that are under way.

    python -m tools.plot runs/A                             into runs/A/plot.png
    python -m tools.plot runs/A runs/B [--out FILE.png]     into runs/plot.png

The picture has the held-out loss against steps, seconds and bytes, and the replicas' weight spread.
A ring is the loss of the merged model, the mean of all replicas. A dashed line is an event, such as
a rank that died.
What is not finite is left out: a line that ends early is of a run that diverged.
This file needs nothing of ours: it reads runs/NAME/config.json and metrics.jsonl (docs/metrics.md).
"""
import argparse
import json
import math
import sys
import textwrap
from collections import Counter
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

LOSS = "held-out loss, nats per token"
PANELS = [      # two metrics of metrics.jsonl, what is written at their axes, and the axes' scales
    ("step", "heldout_loss", "inner steps", LOSS, "linear", "linear"),
    ("seconds", "heldout_loss", "seconds of training", LOSS, "linear", "linear"),
    ("sync_bytes", "heldout_loss", "bytes sent to synchronise, all ranks", LOSS, "log", "linear"),
    ("step", "weight_spread", "inner steps", "weight spread of replicas", "linear", "log"),
]
# Okabe and Ito's, which the colour-blind can tell apart, in the order of the command line.
COLOURS = ["#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]


def main(argv=None):
    parser = argparse.ArgumentParser("python -m tools.plot", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--out", type=Path, help="the picture (default: plot.png, in the folder of "
                        "one run, or next to the folder of the first)")
    a = parser.parse_args(argv)
    # `runs/*` may name an earlier picture.
    folders = [folder for folder in dict.fromkeys(a.runs) if not folder.is_file()]
    if not folders:
        refuse(f"{a.runs[0]} is a file: give folders of runs, e.g. runs/NAME")
    runs = [read_run(folder, colour) for folder, colour in zip(folders, cycle(COLOURS))]
    out = a.out or folders[0] / "plot.png"
    if not a.out and len(folders) > 1:
        out = folders[0].parent / "plot.png"
    try:
        draw(runs).savefig(out, dpi=150)
    except ImportError:
        refuse("no picture without matplotlib: pip install '.[plot]'")
    except (OSError, ValueError) as error:
        refuse(f"{out} cannot be written: {error}")
    print(out)


def refuse(problem):
    print(f"error: {problem}", file=sys.stderr)
    sys.exit(2)


# ---------------------------------------------------------------- what runs have written


@dataclass
class Run:
    name: str           # of its folder, and the method where that does not say it
    colour: str
    rows: list          # of metrics.jsonl: the evaluations that have a finite held-out loss
    events: list        # of metrics.jsonl: what else happened

    def points(self, x, y):
        """Two lists, of what was measured of both metrics."""
        rows = [row for row in self.rows if known(row, x) and known(row, y)]
        return [row[x] for row in rows], [row[y] for row in rows]

    def last_loss(self):
        return self.rows[-1]["heldout_loss"]

    def label(self):
        """The legend's lines: the name, the last loss, and how often each kind of event came."""
        told = [self.name, f"{self.last_loss():.4f} at step {self.rows[-1]['step']}"]
        for kind, times in Counter(event["event"] for event in self.events).items():
            told.append(f"{kind}: {times}")
        return "\n".join(textwrap.fill(line, 24) for line in told)


def known(row, metric):
    """Whether it was measured, and is finite."""
    return row.get(metric) is not None and math.isfinite(row[metric])


def read_run(folder, colour):
    """The Run of a folder. Ends this program if there is none, or nothing to draw yet."""
    try:
        method = json.loads((folder / "config.json").read_text())["method"]
        text = (folder / "metrics.jsonl").read_text()
        whole = text[:text.rfind("\n") + 1]         # the run may be writing its last line
        lines = [json.loads(line) for line in whole.splitlines()]
        rows = [line for line in lines if line["step"] >= 0 and known(line, "heldout_loss")]
    except OSError as error:
        refuse(f"{folder} is the folder of no run: {error.filename}: {error.strerror}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        refuse(f"{folder} holds a damaged config.json or metrics.jsonl: {error!r}")
    if not rows:
        refuse(f"{folder} has no evaluation with a finite loss yet: wait, or train with a smaller "
               "--eval-every")
    name = folder.resolve().name.replace("$", r"\$")        # else matplotlib reads a formula
    if method not in name:
        name = f"{name} ({method})"
    return Run(name, colour, rows, [line for line in lines if "event" in line])


# ---------------------------------------------------------------- the picture


def draw(runs):
    """The figure: two panels in a row, of what was measured, and one legend at their right, which
    names the lines in the order in which they end, the highest loss first."""
    from matplotlib.figure import Figure
    runs = sorted(runs, key=Run.last_loss, reverse=True)
    panels = [panel for panel in PANELS if measured(runs, panel)]
    rows = math.ceil(len(panels) / 2)
    figure = Figure(figsize=(11, 1 + 2.5 * rows), layout="constrained")
    axes = figure.subplots(rows, 2, squeeze=False).flat
    for axis, panel in zip(axes, panels):
        draw_panel(axis, measured(runs, panel), *panel)
    for axis in axes[len(panels):]:
        axis.remove()
    lines, labels = axes[0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside right upper", labelcolor="linecolor", frameon=False)
    notes = "Ring: the merged model. Dashed: an event."
    if len({run.rows[-1].get("corpus") for run in runs}) > 1:
        notes += " The runs have different corpora: their losses do not compare."
    figure.supxlabel(notes, x=0.01, ha="left", fontsize=9)
    return figure


def measured(runs, panel):
    """The runs that have a line there: one process alone sends nothing, and has no spread."""
    found = []
    for run in runs:
        x, y = run.points(*panel[:2])
        if any(x) and any(y):
            found.append(run)
    return found


def draw_panel(axis, runs, x_metric, y_metric, x_label, y_label, x_scale, y_scale):
    axis.set(xlabel=x_label, ylabel=y_label, xscale=x_scale, yscale=y_scale)
    axis.grid(alpha=0.3)
    late = []                   # without the first tenth, whose fall hides how runs differ
    for run in runs:
        x, y = run.points(x_metric, y_metric)
        axis.plot(x, y, ".-", color=run.colour, label=run.label())
        late += y[len(y) // 10:]
        if y_metric == "heldout_loss" and known(run.rows[-1], "merged_loss"):
            merged = run.rows[-1]["merged_loss"]
            axis.plot(x[-1], merged, "o", color=run.colour, ms=8, mfc="none")
            late.append(merged)
        if x_metric == "step":
            for step in {event["step"] for event in run.events}:
                axis.axvline(step, color=run.colour, lw=0.8, ls="--")
    margin = 0.06 * (max(late) - min(late))
    if y_scale == "linear" and margin > 0:
        axis.set_ylim(min(late) - margin, max(late) + margin)


if __name__ == "__main__":
    main()
