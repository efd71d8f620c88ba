"""How results are kept and shown: OUT/results/NAME.json, tables in Markdown, OUT/figures/NAME.png."""
import json
from pathlib import Path

from plumbing.processes import BadInput

# Mostly Okabe and Ito's, safe for the colour-blind. One for each method or kind of paths, in every picture.
COLOURS = {"DDP": "#000000", "DiLoCo": "#0072B2", "NoLoCo": "#D55E00", "local": "#CC79A7",
           "groups": "#8C510A", "full": "#000000", "planned": "#777777", "25%": "#009E73",
           "50%": "#882255", "random": "#E69F00"}
WIDTH = 9       # inches: at 900 pixels 9.5 points are 13 pixels high
STYLE = {"font.size": 9.5, "axes.titlesize": 10.5, "axes.titlelocation": "left", "legend.fontsize": 9.5,
         "axes.grid": True, "grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False,
         "lines.markersize": 4, "figure.constrained_layout.use": True}


def save(out, name, result):
    path = Path(out, "results", f"{name}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result) + "\n")
    print(path)


def kept(out, name):
    """The result that `save` wrote. Raises BadInput where it is missing."""
    file = Path(out, "results", f"{name}.json")
    if not file.exists():
        raise BadInput(f"no {file}: first run the experiment that writes it, without --plot")
    return json.loads(file.read_text())


def show_head(columns):
    """The head of a table; columns: "one | two"."""
    print(f"| {columns} |\n|" + (columns.count("|") + 1) * "---|")


def show_row(*cells):
    print("|", " | ".join(map(str, cells)), "|")


def picture(out, name, draw, found):
    """Write draw(plt, found) -> figure to OUT/figures/NAME.png. Raises BadInput without matplotlib."""
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


def label_ends(axis, gap=0.065):
    """Write each line's label right of the axis, at the height of the line's end.

    Labels keep `gap` of the axis apart. Call it once the limits of the axis are set.
    """
    place, ends = axis.transData + axis.transAxes.inverted(), []
    for handle, text in zip(*axis.get_legend_handles_labels()):
        line = getattr(handle, "lines", [handle])[0]                # of an errorbar: the line without bars
        _, height = place.transform((axis.get_xlim()[1], line.get_ydata()[-1]))
        ends.append((height, text, line.get_color()))
    ends.sort()
    heights = [height for height, *_ in ends]
    for _ in range(100):                                    # neighbours push each other apart
        for i, (below, above) in enumerate(zip(heights, heights[1:])):
            lack = max(0.0, gap * (1 + ends[i][1].count("\n")) - (above - below)) / 2
            heights[i], heights[i + 1] = below - lack, above + lack
        heights[0] = max(heights[0], 0.04)
    for height, (_, text, colour) in zip(heights, ends):
        axis.annotate(text, (1.01, height), xycoords="axes fraction", color=colour, va="center",
                      annotation_clip=False)
