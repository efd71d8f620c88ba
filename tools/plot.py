"""A first picture of any runs: held-out loss against steps, tokens, bytes and seconds, and the weight spread.

    python -m tools.plot runs/A runs/B [--out runs/plot.png]

One line a run, named after its folder, from its metrics.jsonl. Needs matplotlib (pip install '.[plot]').
"""
import argparse
import json
from pathlib import Path

from plumbing.options import Parser
from plumbing.processes import BadInput, Job

PANELS = {      # what is on the x axis: (its label, a row's value)
    "step": ("inner steps", lambda row: row["step"]),
    "tokens": ("tokens, millions", lambda row: row["tokens"] / 1e6),
    "bytes": ("sent by all ranks, GB", lambda row: (row["sync_bytes"] + row["pipeline_bytes"]) / 1e9),
    "seconds": ("seconds of training", lambda row: row["seconds"]),
}


def main(argv=None):
    parser = Parser(__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--out", type=Path, default=Path("runs/plot.png"))
    Job().together(plot, parser, argv)


def plot(parser, argv):
    a = parser.parse_args(argv)
    found = {folder: rows_of(folder) for folder in a.runs}
    try:
        import matplotlib
    except ImportError:
        raise BadInput("tools.plot needs the matplotlib package: pip install '.[plot]'")
    matplotlib.use("Agg")
    a.out.parent.mkdir(parents=True, exist_ok=True)
    draw(found).savefig(a.out, dpi=150)
    print(a.out)


def rows_of(folder):
    """The evaluations of a run."""
    file = folder / "metrics.jsonl"
    if not file.exists():
        raise BadInput(f"{folder}: no metrics.jsonl there; give folders of runs, e.g. runs/NAME")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows = [row for row in rows if "heldout_loss" in row]
    if not rows:
        raise BadInput(f"{folder}: no evaluation in its metrics.jsonl yet")
    return rows


def draw(found):
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(PANELS) + 1, figsize=(4 * len(PANELS) + 4, 3.6), layout="constrained")
    per_byte = all(row["heldout_nats_per_byte"] for rows in found.values() for row in rows)
    key = "heldout_nats_per_byte" if per_byte else "heldout_loss"
    for axis, (label, value) in zip(axes, PANELS.values()):
        for folder, rows in found.items():
            axis.plot([value(row) for row in rows], [row[key] for row in rows], ".-", label=folder.name)
        axis.set_xlabel(label)
        axis.set_ylabel("held-out nats per byte" if per_byte else "held-out nats per token")
    for folder, rows in found.items():
        axes[-1].plot([row["step"] for row in rows], [row["weight_spread"] for row in rows], ".-")
    axes[-1].set_xlabel("inner steps")
    axes[-1].set_ylabel("weight spread over a stage's replicas")
    axes[0].legend()
    for axis in axes:
        axis.grid(alpha=0.3)
    return figure


if __name__ == "__main__":
    main()
