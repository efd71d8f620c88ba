"""How results are drawn: OUT/figures/NAME.png, one style, each line's label at its end."""
import statistics
import textwrap
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


def frame(figure, found, finding, subject, caption):
    """Write the title and the caption, and the labels of all lines. Call it last.

    The title is the finding of the full scale, else the subject. caption: how it was made.
    """
    title = finding
    if found["scale"] != "full":
        title = subject
        caption = f"A small copy (--scale {found['scale']}), which holds no finding.  {caption}"
    figure.suptitle(title, x=0.01, ha="left")
    width = int(figure.get_figwidth() * 14)         # characters of a line
    figure.supxlabel(textwrap.fill(caption, width), x=0.01, ha="left", fontsize=8.5, color=GREY)
    for axis in figure.axes:
        label_ends(axis)


def counted(number, thing):
    """"1 seed", "3 seeds"."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def percent(value, _):
    """"-5%", "0%", "+0.5%": a formatter of an axis."""
    return f"{100 * value:+.3g}%" if abs(value) > 1e-9 else "0%"


# ---------------------------------------------------------------- comparisons


def aside(x, place):
    """x moved to the right, further for a line of a later place, so that no bar hides another."""
    return [at + 0.015 * place * max(x) for at in x]


def bars(axis, x, comparisons, colour, times=100, **style):
    """Draw the mean of each comparison, joined by a line, and its 95% interval as a bar; a single
    seed has none. times: what they are multiplied with, 100 for percent."""
    means, reach = [], []
    for one in comparisons:
        low, high = one.interval or (one.mean, one.mean)
        means.append(times * one.mean)
        reach.append(times * (high - low) / 2)
    style = {"marker": "o", "lw": 1.5} | style
    axis.errorbar(x, means, reach, color=colour, capsize=2, elinewidth=0.8, **style)


def differences(axis, comparisons, colours, names, form="+.3f"):
    """Draw comparisons below each other beside a line at zero: each one's mean, its 95% interval as
    a bar, and its number in a column at the right."""
    axis.axvline(0, color="#000000", lw=1)
    for height, (one, colour) in enumerate(zip(comparisons, colours)):
        low, high = one.interval or (one.mean, one.mean)
        axis.plot([low, high], [height, height], color=colour, lw=2.5)
        axis.plot(one.mean, height, "o", color=colour, ms=8)
        axis.annotate(f"{one.mean:{form}}", (1, height), xycoords=("axes fraction", "data"),
                      xytext=(6, 0), textcoords="offset points", va="center", color=colour)
    axis.set(yticks=range(len(names)), yticklabels=names, ylim=(len(names) - 0.4, -0.6))
    axis.grid(axis="y", visible=False)


# ---------------------------------------------------------------- labels at the lines' ends


def label_ends(axis):
    """Write each line's label beside its end, at its height, in its colour.

    Lines that end near each other have their labels in one column. Labels that would overlap push
    each other as little as they can. Call it last, once limits, titles and the labels of the axes
    are set.
    """
    figure = axis.figure
    figure.draw_without_rendering()         # sets the limits
    lines, texts = [], []
    for handle, text in zip(*axis.get_legend_handles_labels()):
        lines.append(getattr(handle, "lines", [handle])[0])     # of an errorbar: without its bars
        texts.append(text)
    if not lines:
        return
    labels = []
    for line, text, x in zip(lines, texts, columns(axis, lines)):
        end = x, line.get_ydata()[-1]
        labels.append(axis.annotate(text, end, xytext=(6, 0), textcoords="offset points",
                                    va="center", color=line.get_color(), annotation_clip=False))
    figure.draw_without_rendering()
    boxes = [label.get_window_extent() for label in labels]
    middles = [(box.y0 + box.y1) / 2 for box in boxes]
    places = push_apart(middles, [box.height for box in boxes])
    for label, middle, place in zip(labels, middles, places):
        label.xyann = 6, (place - middle) * 72 / figure.dpi


def columns(axis, lines):
    """The x of each line's label: the farthest of the ends that lie near its own."""
    ends = [line.get_xdata()[-1] for line in lines]
    to_axes = axis.transData + axis.transAxes.inverted()
    shares = [to_axes.transform((end, line.get_ydata()[-1]))[0] for end, line in zip(ends, lines)]
    found = []
    for own in shares:
        near = [i for i, share in enumerate(shares) if abs(share - own) < 0.12]
        found.append(ends[max(near, key=lambda i: shares[i])])
    return found


def push_apart(middles, heights):
    """Where labels with these middles and heights go so that none overlap: the least squares of
    moves.

    Neighbours that overlap become one block, which lies where its labels would be on average; a
    block that meets the next one joins it.
    """
    blocks = []         # each: the numbers of its labels, from below
    for i in sorted(range(len(middles)), key=lambda i: middles[i]):
        block = [i]
        while blocks and overlap(blocks[-1], block, middles, heights):
            block = blocks.pop() + block
        blocks.append(block)
    places = [0.0] * len(middles)
    for block in blocks:
        for i, place in zip(block, places_in(block, middles, heights)):
            places[i] = place
    return places


def places_in(block, middles, heights):
    """The middles of a block's labels, from below, where each touches the next."""
    offsets = [0.0]
    for below, above in zip(block, block[1:]):
        offsets.append(offsets[-1] + (heights[below] + heights[above]) / 2)
    wanted = [middles[i] - offset for i, offset in zip(block, offsets)]
    start = statistics.mean(wanted)
    return [start + offset for offset in offsets]


def overlap(lower, upper, middles, heights):
    top = places_in(lower, middles, heights)[-1] + heights[lower[-1]] / 2
    bottom = places_in(upper, middles, heights)[0] - heights[upper[0]] / 2
    return top > bottom
