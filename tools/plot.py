"""Draw runs, also of those that are under way.

    python -m tools.plot runs/A                             into runs/A/plot.png
    python -m tools.plot runs/A runs/B [--out FILE.png]     into runs/plot.png

Held-out loss against steps, seconds and bytes, and the replicas' weight spread. A ring is the loss
of the merged model, the mean of all replicas. A dashed line is an event, such as a rank that died.
What is not finite is left out: a line that ends early is of a run that diverged.
This file needs nothing of ours: it reads runs/NAME/config.json and metrics.jsonl (docs/metrics.md).
"""
import argparse
import json
import math
import sys
import textwrap
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

LOSS = "held-out loss, nats per token"
PANELS = [      # two metrics of metrics.jsonl, and what is written at their axes
    ("step", "heldout_loss", "inner steps", LOSS),
    ("seconds", "heldout_loss", "seconds of training", LOSS),
    ("sync_bytes", "heldout_loss", "bytes sent to synchronise, all ranks", LOSS),
    ("step", "weight_spread", "inner steps", "weight spread of replicas"),
]
# Okabe and Ito's, which the colour-blind can tell apart, in the order of the command line.
COLOURS = ["#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
STYLE = {"font.size": 9.5, "axes.grid": True, "grid.alpha": 0.3, "axes.spines.top": False,
         "axes.spines.right": False, "lines.markersize": 4}
LINE = 0.09         # of an axis' height: what a label needs


def main(argv=None):
    parser = argparse.ArgumentParser("python -m tools.plot", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--out", type=Path, help="the picture (default: plot.png, in the folder of "
                        "one run, or beside that of the first)")
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
        from matplotlib import rc_context
    except ImportError:
        refuse("no picture without matplotlib: pip install '.[plot]'")
    try:
        with rc_context(STYLE):
            draw(runs).savefig(out, dpi=150)
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


def known(row, metric):
    """Whether it was measured, and is finite."""
    return row.get(metric) is not None and math.isfinite(row[metric])


def read_run(folder, colour):
    """The Run of a folder. Ends this program where there is none, or nothing to draw yet."""
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
    """The figure: two panels in a row, or one beside long names, of what was measured."""
    from matplotlib.figure import Figure
    panels = [panel for panel in PANELS if measured(runs, panel)]
    columns = 2
    if max(len(run.name) for run in runs) > 16:
        columns = 1
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(9, 1 + 2.5 * rows), layout="constrained")
    figure.get_layout_engine().set(wspace=0.08, hspace=0.06)
    axes = figure.subplots(rows, columns, squeeze=False).flat
    for axis, panel in zip(axes, panels):
        draw_panel(axis, panel, measured(runs, panel))
    for axis in axes[len(panels):]:
        axis.axis("off")
    figure.suptitle(textwrap.fill(title_of(runs), 110), x=0.01, ha="left", fontsize=10.5)
    notes = ["ring: the merged model"]
    notes += [f"dashed, {run.name}: {events_text(run)}" for run in runs if run.events]
    figure.supxlabel(textwrap.fill("; ".join(notes), 130), x=0.01, ha="left", fontsize=8.5)
    return figure


def measured(runs, panel):
    """The runs that have a line there: one process alone sends nothing, and has no spread."""
    found = []
    for run in runs:
        x, y = run.points(*panel[:2])
        if any(x) and any(y):
            found.append(run)
    return found


def draw_panel(axis, panel, runs):
    x_metric, y_metric, x_label, y_label = panel
    axis.set(xlabel=x_label, ylabel=y_label)
    ends, seen = [], []
    for run in runs:
        x, y = run.points(x_metric, y_metric)
        axis.plot(x, y, ".-", color=run.colour, lw=1.5)
        ends.append((x[-1], y[-1]))
        seen += y[len(y) // 10:]
        if y_metric == "heldout_loss" and known(run.rows[-1], "merged_loss"):
            merged = run.rows[-1]["merged_loss"]
            axis.plot(x[-1], merged, "o", color=run.colour, ms=8, mfc="none")
            seen.append(merged)
        mark_events(axis, run, x_metric)
    set_scales(axis, x_metric, y_metric, [x for x, _ in ends], seen)
    label_ends(axis, runs, [y for _, y in ends])


def mark_events(axis, run, x_metric):
    """A vertical at each event, between the evaluations around it by its share of their steps."""
    from numpy import interp            # it comes with matplotlib
    steps, places = run.points("step", x_metric)
    for step in {event["step"] for event in run.events}:
        place = interp(step, [0, *steps], [0, *places])
        axis.axvline(place, color=run.colour, lw=0.8, ls="--")


def set_scales(axis, x_metric, y_metric, last, seen):
    """last: each run's greatest x. seen: the y that are to be seen."""
    from matplotlib.ticker import EngFormatter, MaxNLocator
    if x_metric == "sync_bytes" and max(last) > 10 * min(last):
        axis.set_xscale("log")
    else:
        axis.set_xlim(left=0)
        axis.xaxis.set_major_locator(MaxNLocator(5))
    if x_metric == "sync_bytes":
        axis.xaxis.set_major_formatter(EngFormatter("B"))
    if y_metric == "weight_spread":
        axis.set_yscale("log")
    elif max(seen) > min(seen):
        # Without the first tenth: its fall would hide how runs differ.
        margin = 0.06 * (max(seen) - min(seen))
        axis.set_ylim(min(seen) - margin, max(seen) + margin)


def label_ends(axis, runs, heights):
    """Each run's name right of the panel, at the height of its line's end; those that would overlap
    push each other apart. The limits of the axis must be set."""
    to_axis = axis.transData + axis.transAxes.inverted()
    x = axis.get_xlim()[1]
    wanted = [to_axis.transform((x, height))[1] for height in heights]
    order = sorted(range(len(runs)), key=lambda i: wanted[i])
    places = []
    for i in order:
        place = max(0, wanted[i])
        if places:
            place = max(place, places[-1] + LINE)
        places.append(place)
    top = 1
    for i, place in zip(reversed(order), reversed(places)):
        place = min(top, place)
        axis.text(1.02, place, runs[i].name, transform=axis.transAxes, va="center",
                  color=runs[i].colour)
        top = place - LINE


def title_of(runs):
    """The losses at the last step that all runs have evaluated, the lowest first."""
    if len({run.rows[-1].get("corpus") for run in runs}) > 1:
        return "The runs have different corpora: their losses do not compare"
    tables = [dict(zip(*run.points("step", "heldout_loss"))) for run in runs]
    shared = set.intersection(*map(set, tables))
    if not shared:
        return "The runs have no evaluation at the same step yet"
    step = max(shared)
    losses = sorted((table[step], run.name) for table, run in zip(tables, runs))
    told = ", ".join(f"{name} {loss:.4f}" for loss, name in losses)
    return f"Held-out loss at step {step}: {told}"


def events_text(run):
    """Each kind of event, with the steps at which it came first and last."""
    steps = {}
    for event in run.events:
        steps.setdefault(event["event"], []).append(event["step"])
    told = []
    for kind, found in steps.items():
        text = f"{kind} at step {min(found)}"
        if len(found) > 1:
            text += f" to {max(found)}, {len(found)} times"
        told.append(text)
    return ", ".join(told)


if __name__ == "__main__":
    main()
