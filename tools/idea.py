"""Draw the idea of both papers: figures/idea.png.

    python -m tools.idea [FILE.png]

Columns are the stages of a model, circles are nodes. One microbatch goes from its origin through
nodes of other stages, leaves one stage out and goes home for its loss (SkipPipe). Now and then two
nodes of a stage average their weights (NoLoCo). The letters are large enough for a phone.
"""
import sys

STAGES = 4
NODES = 3                                   # of each stage
PATH = [(0, 2), (1, 1), (3, 2)]             # (stage, node) of each visit; stage 2 is left out
PAIR = [(2, 1), (2, 0)]
TRAVELS, MEETS, QUIET = "#D55E00", "#0072B2", "#666666"
RADIUS = 0.2


def main(argv):
    try:
        from matplotlib import pyplot
    except ImportError:
        sys.exit("no picture without matplotlib: pip install '.[plot]'")
    path = "figures/idea.png"
    if argv:
        path = argv[0]
    figure, axis = pyplot.subplots(figsize=(4.8, 4.3), layout="constrained")
    axis.set(xlim=(-0.45, 3.45), ylim=(-0.5, 3.2), aspect="equal")
    axis.axis("off")
    draw_nodes(axis)
    draw_path(axis)
    draw_pair(axis)
    figure.savefig(path, dpi=200)
    print(path)


def draw_nodes(axis):
    from matplotlib.patches import Circle

    for stage in range(STAGES):
        axis.text(stage, -0.42, f"stage {stage}", ha="center", color=QUIET, fontsize=12)
        for node in range(NODES):
            colour, width = QUIET, 1
            if (stage, node) in PATH:
                colour, width = TRAVELS, 2.5
            if (stage, node) in PAIR:
                colour, width = MEETS, 2.5
            axis.add_patch(Circle((stage, node), RADIUS, facecolor="white", edgecolor=colour,
                                  linewidth=width))


def draw_path(axis):
    """The visits, one after the other, and the way home over all other nodes."""
    for here, there in zip(PATH, PATH[1:]):
        arrow(axis, here, there, TRAVELS, "-|>")
    arrow(axis, PATH[-1], PATH[0], TRAVELS, "-|>", linestyle="--",
          connectionstyle="arc3,rad=0.33")
    axis.text(-0.4, 2.72, "A microbatch takes its own path, leaves a\nstage out, goes home for its "
              "loss.", color=TRAVELS, fontsize=12)


def draw_pair(axis):
    arrow(axis, *PAIR, MEETS, "<|-|>")
    axis.text(1.78, 0.5, "A pair averages\nits weights.", color=MEETS, fontsize=12, ha="right",
              va="center")


def arrow(axis, here, there, colour, style, **more):
    from matplotlib.patches import FancyArrowPatch

    axis.add_patch(FancyArrowPatch(here, there, color=colour, arrowstyle=style, linewidth=2.5,
                                   mutation_scale=16, shrinkA=17, shrinkB=17, **more))


if __name__ == "__main__":
    main(sys.argv[1:])
