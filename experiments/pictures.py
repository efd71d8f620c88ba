"""How results are kept and shown: OUT/results/NAME.json, tables in Markdown, OUT/figures/NAME.png."""
import json
from pathlib import Path

from plumbing.processes import BadInput

# Okabe and Ito's, safe for the colour-blind
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#000000")
STYLE = {"font.size": 9, "axes.titlesize": 10, "axes.grid": True, "grid.alpha": 0.3, "legend.fontsize": 7.5,
         "lines.markersize": 4}


def save(out, name, result, indent=1):
    path = Path(out, "results", f"{name}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=indent) + "\n")
    print(path)


def kept(out, name):
    """What `save` has left there. Raises BadInput where it is missing."""
    file = Path(out, "results", f"{name}.json")
    if not file.exists():
        raise BadInput(f"no {file}: first the experiment that writes it, without --plot, --add or --table")
    return json.loads(file.read_text())


def show_head(columns):
    """Of a table. columns: "one | two"."""
    print(f"| {columns} |\n|" + (columns.count("|") + 1) * "---|")


def show_row(*cells):
    print("|", " | ".join(map(str, cells)), "|")


def picture(out, name, draw, found):
    """draw(plt, found) -> figure, written to OUT/figures/NAME.png. Raises BadInput without matplotlib."""
    try:
        import matplotlib
        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        raise BadInput("no picture without matplotlib: pip install '.[plot]'")
    path = Path(out, "figures", f"{name}.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    plt.rcParams.update(STYLE)
    figure = draw(plt, found)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    print(path)
