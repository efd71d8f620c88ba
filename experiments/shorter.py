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
from planning.pictures import label_rows, rows_of
from skippipe import BACKWARD, LOSS, Progress, Task, full_paths

KEPT, EACH, ROUNDS = 4, 3, 2        # stages kept, paths per origin, rounds
PATIENCE = 60.0     # seconds of planning at most; an idle machine needs less than one
FULL, RANDOM, NO_TC2, PLANNED = "full pipeline", "random skipping", "without TC2", "SkipPipe"
PUBLISHED = {FULL: 79.94, RANDOM: 48.92, NO_TC2: 35.43, PLANNED: 33.31}     # seconds
SECONDS = {FULL: (81.49, 0.05), RANDOM: (54.8, 3.0), NO_TC2: (33.85, 0.6), PLANNED: (33.05, 0.3)}
BARS = {FULL: "full", RANDOM: "random", NO_TC2: "25%", PLANNED: "25%"}      # colours
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
    full = Progress(network).dispatch(full_paths(network.stages, EACH * ROUNDS))
    timelines = {FULL: rounded(full.timeline), PLANNED: rounded(plan.result.timeline)}
    return dict(seconds=seconds, timelines=timelines)


def rounded(timeline):
    """Tasks to the millisecond, as JSON holds them."""
    tasks = []
    for task in timeline:
        moments = [round(seconds, 3) for seconds in task[-3:]]
        tasks.append([*task[:-3], *moments])
    return tasks


def show(found):
    table = Table("published instance, 30 microbatches", "simulated seconds", "published")
    for name, published in PUBLISHED.items():
        table.add(name, f"{found['seconds'][name]:.1f}", f"{published:.1f}")
    table.end()


def shorter(found):
    return 1 - found["seconds"][PLANNED] / found["seconds"][FULL]


def draw_times(plt, found):
    """Bars of the iteration times beside the published ones."""
    figure, axis = plt.subplots(figsize=(WIDTH, 3.8))
    for row, (name, published) in enumerate(PUBLISHED.items()):
        own = found["seconds"][name]
        for place, value, colour, words in (
                (row - 0.2, own, COLOURS[BARS[name]], ""),
                (row + 0.2, published, "#BBBBBB", " published")):
            axis.barh(place, value, 0.38, color=colour)
            axis.annotate(f"{value:.1f} s{words}", (value, place), xytext=(4, 0),
                          textcoords="offset points", va="center")
    axis.set_yticks(range(len(PUBLISHED)), PUBLISHED)
    axis.invert_yaxis()
    axis.grid(False)
    axis.set(xlabel="seconds per iteration", xlim=(0, 95))
    finding = (f"SkipPipe, which skips a third of the stages, shortens an iteration by "
               f"{shorter(found):.0%}")
    frame(figure, found, finding, "Seconds per iteration", "Simulated: 20 nodes in 12 cities, 30 "
          "microbatches (the published full pipeline runs 27).")
    return figure


def draw_timelines(plt, found):
    """What each node does when, in the full pipeline and in SkipPipe's plan; the microbatches of
    one origin stand out."""
    network, names = published_network()
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH, 5.6), sharey=True)
    origin = network.stages[0][0]
    for axis, (name, rows) in zip(axes, found["timelines"].items()):
        timeline = [Task(*row) for row in rows]
        own = {task.microbatch for task in timeline if task.kind == LOSS and task.rank == origin}
        draw_tasks(axis, network, timeline, own)
        label_rows(axis, network, rows_of(network), names)
        busy = sum(task.end - task.start for task in timeline)
        waits = 1 - busy / (len(names) * found["seconds"][name])
        axis.set(xlim=(0, max(found["seconds"].values())), ylim=(-0.6, len(names) - 0.4),
                 xlabel="seconds",
                 title=f"{name}: {found['seconds'][name]:.0f} s, a node waits {waits:.0%} of it")
        axis.grid(False)
    axes[1].tick_params(axis="y", labelleft=False)
    frame(figure, found,
          "Planned paths, which skip a third of the stages, leave nodes less to wait",
          "What each node does when", f"Simulated. Orange: the microbatches of node {origin}, "
          "forward, loss and backward; grey: all others; white: the node waits.")
    return figure


def draw_tasks(axis, network, timeline, own):
    rows = rows_of(network)
    for task in timeline:
        colour = FOLLOWED if task.microbatch in own else OTHERS[task.kind]
        axis.barh(rows[task.rank], task.end - task.start, 0.85, left=task.start, color=colour,
                  edgecolor="white", linewidth=0.3)


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
