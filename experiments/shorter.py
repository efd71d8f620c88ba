"""SkipPipe's iteration times on its published instance, simulated: 20 nodes in 12 cities.

    python -m experiments.shorter [--scale try|plot|full] [--plot]

Seconds, and the same at each scale. The full pipeline (DT-FM), random skipping, SkipPipe without
TC2 and SkipPipe are compared with their published times. A full pipeline that is planned as
SkipPipe is (ours) tells planning from skipping. A third of the stages is skipped.
experiments/cities.py measures iterations between hosts.
"""
from tqdm import tqdm

from experiments.harness import Row, command
from experiments.pictures import COLOURS, WIDTH, frame
from experiments.stats import Expected, Table
from planning.instance import published_network
from planning.methods import compare_methods
from planning.pictures import draw_plan
from planning.training import plan_paths
from skippipe import dispatch, full_paths, simulate

KEPT, EACH, ROUNDS = 4, 3, 2        # stages kept, paths per origin, rounds
PATIENCE = 60.0     # seconds of planning at most; an idle machine needs less than one
FULL, PLANNED_FULL, RANDOM = "full pipeline", "full pipeline, planned", "random skipping"
NO_TC2, SKIPPIPE = "SkipPipe without TC2", "SkipPipe"
COMPARED = FULL, RANDOM, NO_TC2, SKIPPIPE           # as `compare_methods` has them
SHOWN = FULL, PLANNED_FULL, RANDOM, NO_TC2, SKIPPIPE
PUBLISHED = {FULL: 79.94, RANDOM: 48.92, NO_TC2: 35.43, SKIPPIPE: 33.31}    # seconds
SECONDS = {FULL: (81.49, 0.05), PLANNED_FULL: (66.34, 0.05), RANDOM: (54.8, 3.0),
           NO_TC2: (33.85, 0.6), SKIPPIPE: (33.05, 0.3)}
BARS = {FULL: "full", PLANNED_FULL: "planned", RANDOM: "random", NO_TC2: "25%", SKIPPIPE: "25%"}


def measure(o):
    network, _ = published_network()
    with tqdm(total=len(SHOWN), unit="method") as progress:

        def tell(method):
            progress.set_postfix_str(method)
            progress.update()

        rows, plan = compare_methods(network, KEPT, EACH, ROUNDS, seconds=PATIENCE, tell=tell)
        tell(PLANNED_FULL)
        planned = plan_paths(network, "no-swaps", 0, EACH * ROUNDS, seed=0)
    full = dispatch(network, full_paths(network.stages, EACH * ROUNDS))
    methods = {}
    for name, row in zip(COMPARED, rows, strict=True):
        methods[name] = dict(seconds=row["seconds"], planning=round(row["planning"], 3))
    methods[PLANNED_FULL] = dict(seconds=planned["makespan"], planning=None)
    methods[FULL]["works"] = working(network, full)
    methods[SKIPPIPE]["works"] = working(network, plan)
    return dict(methods=methods, plan=dict(paths=plan.paths * ROUNDS, order=plan.order,
                                           bound=plan.bound))


def working(network, result):
    """The share of its time in which a node computes."""
    busy = sum(task.end - task.start for task in result.timeline)
    return busy / (len(network.delay) * result.makespan)


def show(found):
    table = Table("20 nodes, 30 microbatches", "simulated seconds", "published", "a node computes")
    for name in SHOWN:
        row = found["methods"][name]
        published = works = None
        if name in PUBLISHED:
            published = f"{PUBLISHED[name]:.1f}"
        if "works" in row:
            works = f"{row['works']:.0%} of the time"
        table.add(name, f"{row['seconds']:.1f}", published, works)
    table.end()


def shorter(found):
    methods = found["methods"]
    return 1 - methods[SKIPPIPE]["seconds"] / methods[FULL]["seconds"]


def draw_times(plt, found):
    """Bars of the iteration times, and of the published ones below them."""
    figure, axis = plt.subplots(figsize=(WIDTH, 4.0))
    for row, name in enumerate(SHOWN):
        bar(axis, row - 0.2, found["methods"][name]["seconds"], COLOURS[BARS[name]])
        if name in PUBLISHED:
            bar(axis, row + 0.2, PUBLISHED[name], "#BBBBBB", " published")
    axis.set_yticks(range(len(SHOWN)), SHOWN)
    axis.invert_yaxis()
    axis.grid(False)
    axis.set(xlabel="seconds per iteration, simulated", xlim=(0, 112))
    frame(figure, found, f"SkipPipe's iteration takes {shorter(found):.0%} less time than the full "
          "pipeline's", "Seconds per iteration")
    return figure


def bar(axis, place, seconds, colour, words=""):
    axis.barh(place, seconds, 0.38, color=colour)
    axis.annotate(f"{seconds:.1f} s{words}", (seconds, place), xytext=(4, 0),
                  textcoords="offset points", va="center")


def draw_skippipe(plt, found):
    """SkipPipe's plan: what each node does when, and the map of its paths."""
    network, names = published_network()
    plan = found["plan"]
    paths = [tuple(path) for path in plan["paths"]]
    result = simulate(network, paths, order=plan["order"])
    of_a_round = paths[:len(paths) // ROUNDS]
    return draw_plan(plt, network, of_a_round, result, plan["bound"], names)


def expected(found):
    told = [Expected("SkipPipe's iteration, a third skipped, compared with the full pipeline "
                     "(paper: -55 to -58%)", -shorter(found), -0.594, 0.005)]
    for name, (number, tolerance) in SECONDS.items():
        text = f"{name}, simulated seconds (published: {PUBLISHED.get(name, 'none')})"
        told.append(Expected(text, found["methods"][name]["seconds"], number, tolerance, ".2f"))
    return told


ROW = Row("shorter", measure, show, {"shorter": draw_times, "plan": draw_skippipe}, expected)

if __name__ == "__main__":
    command(__doc__, ROW)
