"""How results are drawn: OUT/figures/NAME.png, one style."""
from pathlib import Path

from planning.drawing import COLOURS, WIDTH, pyplot     # noqa: F401, for all parts
from train import BadInput

GREY = "#555555"


def picture(out, name, draw, found):
    """Write draw(plt, found) -> figure to OUT/figures/NAME.png. Raises BadInput without
    matplotlib."""
    try:
        plt = pyplot()
    except ImportError as error:
        raise BadInput(str(error))
    path = Path(out, "figures", f"{name}.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure = draw(plt, found)
    figure.savefig(path)
    plt.close(figure)
    print(path)


def frame(figure, found, finding, subject):
    """Write the title: the finding of the full scale, else the subject. How it was made stands
    below the picture in docs/results.md."""
    title = finding
    if found["scale"] != "full":
        title = f"{subject} (a small copy, which holds no finding)"
    figure.suptitle(title, x=0.01, ha="left")


def percent(value, _):
    """"-5%", "0%", "+0.5%": a formatter of an axis."""
    return f"{100 * value:+.3g}%" if abs(value) > 1e-9 else "0%"


def forest(axis, comparisons, colours, form="+.3f"):
    """Draw {name: Comparison} below each other, with a line at zero: each one's mean, its 95%
    interval as a bar, and its number in a column at the right. A single seed has no bar."""
    axis.axvline(0, color="#000000", lw=1)
    for height, (one, colour) in enumerate(zip(comparisons.values(), colours, strict=True)):
        low, high = one.interval or (one.mean, one.mean)
        axis.plot([low, high], [height, height], color=colour, lw=2.5)
        axis.plot(one.mean, height, "o", color=colour, ms=8)
        axis.annotate(f"{one.mean:{form}}", (1, height), xycoords=("axes fraction", "data"),
                      xytext=(6, 0), textcoords="offset points", va="center", color=colour)
    axis.set(yticks=range(len(comparisons)), yticklabels=comparisons,
             ylim=(len(comparisons) - 0.4, -0.6))
    axis.grid(axis="y", visible=False)


def curve(axis, points, colour, name, times=1, **style):
    """Draw {x: Comparison} as a line of means with their 95% intervals as bars. times: what both
    are multiplied with, 100 for percent."""
    means, reach = [], []
    for one in points.values():
        low, high = one.interval or (one.mean, one.mean)
        means.append(times * one.mean)
        reach.append(times * (high - low) / 2)
    style = {"marker": "o", "lw": 1.5} | style
    axis.errorbar(list(points), means, reach, color=colour, capsize=2, elinewidth=0.8, label=name,
                  **style)


def legend(axis):
    """Name the lines at the right edge, in their colours and in the order in which they end. Call
    it once all lines are drawn."""
    named = []
    for handle, name in zip(*axis.get_legend_handles_labels()):
        line = getattr(handle, "lines", [handle])[0]        # of an errorbar: without its bars
        named.append((line.get_ydata()[-1], line, name))
    named.sort(key=lambda one: -one[0])
    axis.legend([line for _, line, _ in named], [name for *_, name in named], loc="center left",
                bbox_to_anchor=(1, 0.5), frameon=False, labelcolor="linecolor")
