"""Pictures of a plan: its simulated timeline, and the map of its paths."""
from collections import Counter

from planning.drawing import WIDTH, pyplot
from skippipe import BACKWARD, FORWARD, LOSS

# The tone of each kind of task. White is a node that waits.
TONES = {FORWARD: "#8FC1E3", LOSS: "#0B2545", BACKWARD: "#2F7AB5"}
NAMED = 48      # nodes; of more, a picture names the stages only and has no map
# The colours of origins in the map, in turn.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#8C510A", "#E69F00", "#882255", "#000000")


# ---------------------------------------------------------------- the timeline


def rows_of(network):
    """{node: its row}, from below: the nodes of stage 0 first, those of no stage last."""
    nodes = [node for stage in network.stages for node in stage]
    nodes += [node for node in range(len(network.delay)) if node not in network.stage_of]
    return {node: row for row, node in enumerate(nodes)}


def draw_timeline(axis, network, timeline, names=None, until=None):
    """Draw what each node does when, as `simulate` has it: nodes up, seconds to the right.

        result = simulate(network, paths, rounds, order)
        draw_timeline(axis, network, result.timeline)

    Each task is one patch of the axis, a rectangle from its start to its end in the tone of its
    kind; `axis.legend()` names the tones. Where nothing is drawn the node waits. Rows are grouped
    by stage. names: of each node, e.g. its city. until: the seconds at which the axis ends
    (default: the last task's end). Two pipelines side by side share one time axis where both get
    the longer one's makespan."""
    rows = rows_of(network)
    for kind, tone in TONES.items():
        gap = 0.4                               # white, so that tasks in a row can be told apart
        if kind == LOSS or len(rows) > NAMED:
            gap = 0                             # it would hide what is thin
        tasks = [task for task in timeline if task.kind == kind]
        axis.barh(
            y=[rows[task.rank] for task in tasks],
            left=[task.start for task in tasks],
            width=[task.end - task.start for task in tasks],
            height=0.8, color=tone, edgecolor="white", linewidth=gap, label=kind)
    axis.grid(False)
    axis.set(xlim=(0, until or max(task.end for task in timeline)), ylim=(-0.6, len(rows) - 0.4))
    axis.set_xlabel("seconds (simulated)", loc="left")
    label_rows(axis, network, rows, names)


def label_rows(axis, network, rows, names):
    """Name the nodes at the left of a timeline and the stages at its right, and part the stages."""
    axis.set_yticks([])
    if len(rows) <= NAMED:
        shown = [f"{names[node]} {node}" if names else f"node {node}" for node in rows]
        axis.set_yticks(range(len(rows)), shown)
        axis.tick_params(axis="y", length=0, labelsize=8)
    for s, stage in enumerate(network.stages):
        middle = rows[stage[0]] + (len(stage) - 1) / 2
        axis.annotate(f"stage {s}", (1, middle), xycoords=("axes fraction", "data"),
                      xytext=(5, 0), textcoords="offset points", va="center", color="#666666",
                      fontsize=8, annotation_clip=False)
        if s:
            axis.axhline(rows[stage[0]] - 0.5, color="#BBBBBB", lw=0.6)


# ---------------------------------------------------------------- the map


def near_to_near(network, names):
    """The names in an order in which neighbours are near each other: from the most remote one on,
    always to the nearest that is left, by the seconds between their nearest nodes."""
    seconds = {}
    for i, row in enumerate(network.delay):
        for j, delay in enumerate(row):
            pair = names[i], names[j]
            seconds[pair] = min(delay, seconds.get(pair, delay))
    left = sorted(set(names))
    last = max(left, key=lambda name: sum(seconds[name, other] for other in left))
    order = []
    while left:
        left.remove(last)
        order.append(last)
        if left:
            last = min(left, key=lambda name: seconds[order[-1], name])
    return order


def draw_map(axis, network, paths, names):
    """Draw the paths as arrows between columns of stages: a column per stage, a row per city, a
    colour per origin. A flat arrow stays in its city. The more paths take a hop, the wider it is.

    names: the city or region of each node."""
    cities = near_to_near(network, names)
    place, seats = {}, Counter()        # nodes of one stage and city stand side by side
    for node, s in network.stage_of.items():
        y = cities.index(names[node])
        place[node] = s + 0.2 * seats[s, y], y
        seats[s, y] += 1
    origins = sorted({path[0] for path in paths})
    hops = Counter()
    for path in paths:
        hops.update((path[0], a, b) for a, b in zip(path, path[1:]))
    for (origin, a, b), times in hops.items():
        which = origins.index(origin)
        bend = 0.04 * (which - (len(origins) - 1) / 2)      # or shared hops would hide each other
        if abs(network.stage_of[b] - network.stage_of[a]) > 1:
            bend += 0.12                                    # past the nodes between
        axis.annotate("", place[b], place[a], arrowprops=dict(
            arrowstyle="-|>", color=PALETTE[which % len(PALETTE)], lw=0.6 + 0.4 * times,
            connectionstyle=f"arc3,rad={bend}", shrinkA=8, shrinkB=8, mutation_scale=10))
    for node, (x, y) in place.items():
        axis.plot(x, y, "o", ms=15, mfc="white", mec="#666666", mew=0.8, zorder=4)
        axis.text(x, y, node, ha="center", va="center", fontsize=8, zorder=5)
    axis.grid(False)
    axis.set_yticks(range(len(cities)), cities)
    axis.set_xticks(range(len(network.stages)), [f"stage {s}" for s in range(len(network.stages))])
    axis.tick_params(length=0, labelsize=8)
    axis.set(xlim=(-0.4, len(network.stages) - 0.6), ylim=(-0.6, len(cities) - 0.4))


# ---------------------------------------------------------------- files


def draw_plan(plt, network, paths, result, bound, names=None):
    """A figure of the timeline and, where `names` has cities or regions, of the map below it.

    paths: of a round or of all. result: their simulation. bound: seconds; no plan takes less (None:
    not known)."""
    nodes = len(network.delay)
    mapped = names and nodes <= NAMED
    heights = [1 + 0.18 * min(nodes, NAMED)]            # inches
    if mapped:
        heights.append(1 + 0.28 * len(set(names)))
    figure, panels = plt.subplots(len(heights), squeeze=False, height_ratios=heights,
                                  figsize=(WIDTH, sum(heights)))
    top, bottom = panels[0][0], panels[-1][0]
    draw_timeline(top, network, result.timeline, names)
    top.set_title(finding(result, bound))
    top.legend(loc="upper right", bbox_to_anchor=(1, -0.2 / heights[0]), ncols=3, frameon=False)
    if mapped:
        draw_map(bottom, network, paths, names)
        bottom.set_title("Its paths: a flat arrow stays in its city, one to the left swaps stages")
    return figure


def finding(result, bound):
    """What the timeline shows, in words."""
    nodes = {task.rank for task in result.timeline}
    busy = sum(task.end - task.start for task in result.timeline)
    share = busy / (len(nodes) * result.makespan)
    words = ""
    if bound:
        above = result.makespan / bound - 1
        words = f" (no plan takes less than {bound:.4g} s)"
        if above <= 0.1:
            words = f", at most {above:.1%} above the optimum"
        if above <= 5e-4:
            words = ", the optimum"
    return f"This plan takes {result.makespan:.4g} s{words}: a node waits {1 - share:.0%} of it"


def write_picture(file, network, paths, result, bound, names=None):
    """Write the figure that `draw_plan` makes of the plan. Raises ImportError, in one line, without
    matplotlib."""
    plt = pyplot()
    figure = draw_plan(plt, network, paths, result, bound, names)
    figure.savefig(file)
    plt.close(figure)
