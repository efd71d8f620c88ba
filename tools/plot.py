"""A first picture of any runs: held-out loss against steps, tokens, bytes and seconds.

    python -m tools.plot runs/A runs/B [--out runs/plot.png]

One line a run, named after its folder, from its metrics.jsonl. Needs matplotlib (pip install '.[plot]').
"""
import json
from pathlib import Path

from plumbing.options import Parser
from plumbing.processes import BadInput, Job

PANELS = dict(step="inner steps", tokens="tokens", sync_bytes="bytes sent to synchronise, all ranks",
              seconds="seconds of training")


def main(argv=None):
    Job().together(plot, argv)


def plot(argv):
    parser = Parser(__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--out", default="runs/plot.png", help="the picture (default: %(default)s)")
    a = parser.parse_args(argv)
    draw({folder.name: rows_of(folder) for folder in a.runs}).savefig(a.out, dpi=150)
    print(a.out)


def rows_of(folder):
    """The evaluations of a run."""
    try:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        return [row for row in map(json.loads, lines) if "heldout_loss" in row]
    except (OSError, ValueError) as error:
        raise BadInput(f"{folder}: no readable metrics.jsonl there, give folders of runs ({error})")


def draw(runs):
    """runs: {label: rows of metrics.jsonl}."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(10, 7), layout="constrained")
    axes = figure.subplots(2, 2, sharey=True).flat
    for axis, (key, label) in zip(axes, PANELS.items()):
        for name, rows in runs.items():
            axis.plot([row[key] for row in rows], [row["heldout_loss"] for row in rows], ".-", label=name)
        axis.set(xlabel=label, ylabel="held-out nats per token")
    axes[2].set_xscale("symlog", linthresh=1e6)         # a run without synchronisation has sent no bytes
    axes[0].legend()
    if len({row.get("corpus") for rows in runs.values() for row in rows}) > 1:
        figure.suptitle("The runs have different corpora: their losses do not compare.")
    return figure


if __name__ == "__main__":
    main()
