"""SkipPipe's iteration times on its published instance, simulated: 20 nodes in 12 cities.

    python -m experiments.shorter [--scale try|plot|full] [--plot]

Seconds, and the same at each scale. Planned four ways, beside the published times: the full
pipeline (DT-FM), random skipping, SkipPipe without TC2, SkipPipe. A third of the stages is skipped.
experiments/cities.py measures iterations between hosts.
"""
from tqdm import tqdm

from experiments.harness import Row, command
from experiments.pictures import COLOURS, WIDTH, frame
from experiments.tables import Expected, Table
from planning.instance import published_network
from planning.methods import compare_methods
from planning.pictures import rows_of
from skippipe import BACKWARD, LOSS, Task, dispatch, full_paths

KEPT, EACH, ROUNDS = 4, 3, 2        # stages kept, paths per origin, rounds
PATIENCE = 60.0     # seconds of planning at most; an idle machine needs less than one
FULL, RANDOM, NO_TC2, PLANNED = "full pipeline", "random skipping", "without TC2", "SkipPipe"
PUBLISHED = {FULL: 79.94, RANDOM: 48.92, NO_TC2: 35.43, PLANNED: 33.31}     # seconds
SECONDS = {FULL: (81.49, 0.05), RANDOM: (54.8, 3.0), NO_TC2: (33.85, 0.6), PLANNED: (33.05, 0.3)}
BARS = {FULL: "full", RANDOM: "random", NO_TC2: "25%", PLANNED: "25%"}      # colours
WORDS = {FULL: "full pipeline", RANDOM: "random skipping", NO_TC2: "SkipPipe\nwithout TC2",
         PLANNED: "SkipPipe"}
FOLLOWED = "#D55E00"
OTHERS = {"forward": "#D5DEE6", LOSS: "#8FA3B3", BACKWARD: "#B5C4D0"}


def measure(o):
    network, _ = published_network()
    with tqdm(total=len(PUBLISHED), unit="method") as progress:

        def tell(method):
            progress.set_postfix_str(method)
            progress.update()

        rows, plan = compare_methods(network, KEPT, EACH, ROUNDS, seconds=PATIENCE, tell=tell)
    seconds = {}
    for name, row in zip(PUBLISHED, rows, strict=True):
        seconds[name] = round(row["seconds"], 3)
    full = dispatch(network, full_paths(network.stages, EACH * ROUNDS))
    timelines = {FULL: rounded(full.timeline), PLANNED: rounded(plan.timeline)}
    return dict(seconds=seconds, timelines=timelines)


def rounded(timeline):
    """Tasks to the millisecond, as JSON holds them."""
    tasks = []
    for task in timeline:
        moments = [round(seconds, 3) for seconds in task[-3:]]
        tasks.append([*task[:-3], *moments])
    return tasks


def show(found):
    table = Table("20 nodes, 30 microbatches", "simulated seconds", "published")
    for name, published in PUBLISHED.items():
        table.add(WORDS[name].replace("\n", " "), f"{found['seconds'][name]:.1f}",
                  f"{published:.1f}")
    table.end()


def shorter(found):
    return 1 - found["seconds"][PLANNED] / found["seconds"][FULL]


def draw_times(plt, found):
    """Bars of the iteration times beside the published ones."""
    figure, axis = plt.subplots(figsize=(WIDTH, 3.6))
    for row, (name, published) in enumerate(PUBLISHED.items()):
        own = found["seconds"][name]
        for place, value, colour, words in (
                (row - 0.2, own, COLOURS[BARS[name]], ""),
                (row + 0.2, published, "#BBBBBB", " published")):
            axis.barh(place, value, 0.38, color=colour)
            axis.annotate(f"{value:.1f} s{words}", (value, place), xytext=(4, 0),
                          textcoords="offset points", va="center")
    axis.set_yticks(range(len(PUBLISHED)), [WORDS[name] for name in PUBLISHED])
    axis.invert_yaxis()
    axis.grid(False)
    axis.set(xlabel="seconds per iteration", xlim=(0, 112))
    finding = f"SkipPipe, a third of the stages skipped, takes {shorter(found):.0%} less time"
    frame(figure, found, finding, "Seconds per iteration", "Simulated: 20 nodes in 12 cities, 30 "
          "microbatches (the published full pipeline runs 27). TC2: no two microbatches want a "
          "node at one time.")
    return figure


def draw_timelines(plt, found):
    """What each node does when, in the full pipeline and in SkipPipe's plan. One microbatch stands
    out, and a line follows it from node to node."""
    network, names = published_network()
    figure, axes = plt.subplots(2, 1, figsize=(WIDTH, 6.4), sharex=True)
    for axis, (name, rows) in zip(axes, found["timelines"].items()):
        timeline = [Task(*row) for row in rows]
        followed = [task for task in timeline if task.microbatch == timeline[0].microbatch]
        draw_tasks(axis, network, timeline, followed)
        busy = sum(task.end - task.start for task in timeline)
        waits = 1 - busy / (len(names) * found["seconds"][name])
        axis.set_title(f"{name}: {found['seconds'][name]:.0f} s, a node waits {waits:.0%} of it")
    axes[1].set_xlabel("seconds")
    frame(figure, found, "Planned paths that skip a third of the stages leave nodes less to wait",
          "What each node does when", "Simulated; a row is a node. Orange: one microbatch, "
          "forward through its stages, home for its loss, and back; lines: its messages. Grey: "
          "the others.")
    return figure


def draw_tasks(axis, network, timeline, followed):
    """Bars of all tasks, those of `followed` above the others, and the lines between them."""
    rows = rows_of(network)
    for task in timeline:
        axis.barh(rows[task.rank], task.end - task.start, 0.9, left=task.start,
                  color=OTHERS[task.kind])
    followed = sorted(followed, key=lambda task: task.start)
    for task in followed:
        axis.barh(rows[task.rank], task.end - task.start, 0.9, left=task.start, color=FOLLOWED,
                  zorder=3)
    for here, there in zip(followed, followed[1:]):
        axis.plot([here.end, there.start], [rows[here.rank], rows[there.rank]], color=FOLLOWED,
                  lw=1.2)
    middles = []
    for s, stage in enumerate(network.stages):
        middles.append(rows[stage[0]] + (len(stage) - 1) / 2)
        if s:
            axis.axhline(rows[stage[0]] - 0.5, color="#BBBBBB", lw=0.6)
    axis.set_yticks(middles, [f"stage {s}" for s in range(len(middles))])
    axis.set_ylim(-0.6, len(rows) - 0.4)
    axis.tick_params(axis="y", length=0)
    axis.grid(False)


def expected(found):
    seconds = found["seconds"]
    told = [Expected("SkipPipe's iteration, a third skipped, over the full pipeline's (paper: -55 "
                     "to -58%)", -shorter(found), -0.594, 0.005)]
    for name, (number, tolerance) in SECONDS.items():
        text = f"{name}, simulated seconds (published: {PUBLISHED[name]})"
        told.append(Expected(text, seconds[name], number, tolerance, ".2f"))
    return told


ROW = Row("shorter", measure, show, {"shorter": draw_times, "shorter_timeline": draw_timelines},
          expected)

if __name__ == "__main__":
    command(__doc__, ROW)
