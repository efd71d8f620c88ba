"""A first picture of any runs: held-out loss against steps, tokens, bytes and seconds.

    python -m tools.plot runs/A runs/B [--out runs/plot.png]

One line a run, named after its folder, from its metrics.jsonl. Needs matplotlib (pip install '.[plot]').
"""
import argparse
import json
from pathlib import Path

from plumbing.options import Parser
from plumbing.processes import BadInput, Job

PANELS = {      # the label of the x axis: the value of a row
    "inner steps": lambda row: row["step"],
    "tokens, millions": lambda row: row["tokens"] / 1e6,
    "MB sent by all ranks": lambda row: (row["sync_bytes"] + row["pipeline_bytes"]) / 1e6,
    "seconds of training": lambda row: row["seconds"],
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
    try:
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise BadInput(f"{folder}: no readable metrics.jsonl there, give folders of runs ({error})")
    rows = [row for row in rows if "heldout_loss" in row]
    if not rows:
        raise BadInput(f"{folder}: no evaluation in its metrics.jsonl yet")
    return rows


def draw(found):
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(10, 7), sharey=True, layout="constrained")
    per_byte = all(row["heldout_nats_per_byte"] for rows in found.values() for row in rows)
    key, unit = ("heldout_nats_per_byte", "byte") if per_byte else ("heldout_loss", "token")
    for axis, (label, value) in zip(axes.flat, PANELS.items()):
        for folder, rows in found.items():
            axis.plot([value(row) for row in rows], [row[key] for row in rows], ".-", label=folder.name)
        axis.set(xlabel=label, ylabel=f"held-out nats per {unit}")
        axis.grid(alpha=0.3)
    if any(PANELS["MB sent by all ranks"](row) for rows in found.values() for row in rows):
        axes[1, 0].set_xscale("log")
    axes[0, 0].legend()
    if len({row.get("corpus") for rows in found.values() for row in rows} - {None}) > 1:
        figure.suptitle("The runs have different corpora: their losses do not compare.")
    return figure


if __name__ == "__main__":
    main()
