"""The methods and the plan, as text and as a picture."""
from collections import Counter

from skippipe import BACKWARD, LOSS

# Okabe and Ito's colours, which the colour-blind tell apart: one per method, and one per origin
COLOURS = {"full": "#000000", "random": "#E69F00", "SkipPipe without": "#56B4E9", "SkipPipe": "#009E73"}
HUES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")


def print_table(network, work, dead, rows, bound):
    """The head and the table. work: (kept, paths per origin, rounds)."""
    kept, paths, rounds = work
    alive = len(set(network.stages[0]) - set(dead))
    lost = len(network.stages[0]) - alive
    print(f"\n{len(network.delay)} nodes; stages of {[*map(len, network.stages)]} nodes, {kept} kept;\n"
          f"{alive} origins x {paths} paths x {rounds} rounds = {alive * paths * rounds} microbatches")
    if lost:
        print(f"{lost} dead of stage 0 take {lost * paths * rounds} microbatches with them: this iteration "
              "does less work than one with all origins")
    print(f"Simulated; no plan with these skips and stages takes less than {bound:.3f} s:\n")
    lines = [("method", "microbatches", "iteration", "gap", "planning", "collisions", "waiting")]
    for r in rows:
        gap = f"{max(0.0, r['seconds'] / bound - 1):.1%}" if bound and "full" not in r["method"] else ""
        microbatches = f"{r['microbatches']}: {r['note']}".rstrip(": ")
        lines.append((r["method"], microbatches, f"{r['seconds']:.3f} s", gap, f"{r['planning']:.2f} s",
                      str(r["collisions"]), f"{r['waiting']:.1f} s"))
    widths = [max(map(len, column)) for column in zip(*lines)]
    for line in lines:
        print("  ".join(cell.rjust(width) if i > 1 else cell.ljust(width)
                        for i, (cell, width) in enumerate(zip(line, widths))).rstrip())


def label(network, names, r):
    return f"{names[r] if names else 'node'} {r} ({network.stage_of.get(r, 'no stage')})"


def print_paths(network, names, paths, dead):
    """A line per path: how often it is taken, and its nodes. Then the nodes without work."""
    print("\nSkipPipe's paths, node by node (and its stage), and how many paths take the same nodes;\n"
          "then each goes home for its loss, and the same way back:\n")
    wide = max(len(label(network, names, r)) for path in paths for r in path)
    for path, times in sorted(Counter(map(tuple, paths)).items()):
        print(f"{times:4} x  {' > '.join(label(network, names, r).ljust(wide) for r in path).rstrip()}")
    idle = set(range(len(network.delay))) - {r for path in paths for r in path} - set(dead)
    print(f"\nIdle nodes: {', '.join(label(network, names, r) for r in sorted(idle)) or 'none'}\n")


def draw(file, network, names, rows, found):
    """The picture: the methods as bars; below them a line per node, with its tasks in SkipPipe's plan."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(9, 9), layout="constrained")
    top, bottom = figure.subplots(2, 1, height_ratios=[1.2, 2.7])
    colours = [next(hue for name, hue in COLOURS.items() if r["method"].startswith(name)) for r in rows]
    methods = [f"{r['method']}\n{r['microbatches']} microbatches, {r['note'] or 'planned'}" for r in rows]
    bars = top.barh(methods, [r["seconds"] for r in rows], color=colours)
    top.bar_label(bars, [f" {r['seconds']:.2f} s" for r in rows])
    top.axvline(found.bound, color="black", linestyle=":")
    top.margins(x=0.12)
    place = {r: i + stage for i, (r, stage) in enumerate(network.stage_of.items())}     # a gap between stages
    for task in found.result.timeline:
        turn, u = divmod(task.microbatch, len(found.paths))
        hue = HUES[network.stages[0].index(found.paths[u][0]) % len(HUES)]
        bottom.barh(place[task.rank], task.end - task.start, left=task.start, linewidth=0.5,
                    color="black" if task.kind == LOSS else (hue, 1 if turn == 0 else 0.45),
                    edgecolor="black", hatch="/////" if task.kind == BACKWARD else None)
    bottom.set_yticks([*place.values()], [label(network, names, r) for r in place])
    finding = (f"An iteration takes {found.makespan:.2f} s with SkipPipe, {rows[0]['seconds']:.2f} s with "
               f"the {rows[0]['method']}.\nDotted: no plan with these skips and stages takes less.")
    key = ("What each node (and its stage) does. Plain: forward, black: loss, hatched: backward.\n"
           "A colour: the microbatches of one origin, a node of stage 0; pale: later rounds.")
    for axis, title in (top, finding), (bottom, key):
        axis.set_title(title, loc="left", fontsize=10.5)
        axis.set_xlabel("seconds of the simulated iteration")
        axis.spines[["top", "right"]].set_visible(False)
        axis.invert_yaxis()
    figure.savefig(file, dpi=150)
