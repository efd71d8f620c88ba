"""SkipPipe's pipeline on eight hosts between cities: seconds of an iteration, loss in equal time.

    python -m experiments.cities [--scale try|plot|full] [--plot]       as root

full: 2 hours of two idle cores. 4 stages of 2 hosts, with the links published with SkipPipe's
code; the hosts are network namespaces of this machine, and the runs go by the clock
(experiments/clock.py). Losses are the mean over the replicas, by the rho rule. "Memory" is how many
microbatches the planner lets a host hold at once. Named before the runs: half skipped compared with
the planned full pipeline, with memory 3 and with memory 6, in seconds of an iteration and in loss.
"""
import functools
import itertools
import statistics

import numpy as np

from experiments.clock import CPU, PROGRAM
from experiments.harness import Row, Run, command, curves, make_runs, metrics
from experiments.pictures import COLOURS, WIDTH, curve, frame, legend
from experiments.stats import Expected, Table, mean, paired, ratio, those
from planning.instance import city_links

TINY = "--hidden 128 --mlp 512 --heads 4"       # train.py's own
SECONDS = {"try": 5, "plot": 30, "full": 100}   # by the clock
SEEDS = {"try": (0,), "plot": (0,), "full": range(5)}
MORE = {"try": "--warmup 4 --eval-sequences 8", "plot": "", "full": ""}     # options
MOST_OTHERS = {"full": 0.1}                     # of a processor, that others' work may take
# Two for each stage, in turn.
CITIES = "Belgium Canada Germany Iowa Japan LA NL Oregon".split()


def plan(routing, skip, memory=3):
    """A plan's facts."""
    return dict(routing=routing, skip=skip, memory=memory)


UNPLANNED, FULL = "full, in the order of ranks", "full, planned"
FULL_OF_6 = "full, planned, memory 6"
QUARTER, HALF = "25% skipped, memory 3", "50% skipped, memory 3"
PLANS = {
    UNPLANNED: plan("dtfm", 0.0),
    FULL: plan("no-swaps", 0.0),
    FULL_OF_6: plan("no-swaps", 0.0, memory=6),
    QUARTER: plan("stronger", 0.25),
    "25% skipped, memory 6": plan("stronger", 0.25, memory=6),
    HALF: plan("stronger", 0.5),
}
AT_SCALE = {"try": (FULL, HALF), "plot": (UNPLANNED, FULL, HALF), "full": tuple(PLANS)}
DRAWN = {               # compared with FULL: (in the picture, colour)
    UNPLANNED: ("none skipped,\nunplanned", "full"),
    FULL_OF_6: ("none skipped,\nplanned, memory 6", "planned"),
    QUARTER: ("25% skipped", "25%"),
    HALF: ("50% skipped", "50%"),
}
MOMENTS = 0.4, 0.6, 0.8, 1.0    # of the time; before them some runs have no evaluation


def between_cities():
    """Options of tools/hosts.py: the links published with SkipPipe's code."""
    links, options = city_links(), [f"--cpu {CPU} --mbit 0"]
    for i, j in itertools.combinations(range(len(CITIES)), 2):
        seconds, speed = links[CITIES[i], CITIES[j]]
        options.append(f"--latency {i}-{j}={1000 * seconds:.3g} --mbit {i}-{j}={speed * 8e-6:.0f}")
    return " ".join(options)


def wanted(scale):
    runs = []
    for seed, name in itertools.product(SEEDS[scale], AT_SCALE[scale]):
        runs.append(run_of(PLANS[name], seed, SECONDS[scale], MORE[scale]))
    return runs


def run_of(facts, seed, seconds, more):
    options = (f"{TINY} --stages 2,2,2,2 --microbatches 3 --batch 2 --eval-sequences 256 "
               f"--warmup 20 --method noloco --inner-steps 10 --routing {facts['routing']} "
               f"--skip {facts['skip']:g} {more}")
    return Run(facts | dict(seed=seed), options, len(CITIES),
               program=f"{PROGRAM} {seconds} --memory {facts['memory']}",
               hosts=between_cities(), after=read_times)


def read_times(folder):
    """The median of an iteration's seconds, and the loss at the seconds of each evaluation."""
    iterations = [line["iteration_seconds"] for line in metrics(folder)]
    found = curves(folder, at="seconds", losses="heldout_loss")
    return found | dict(iteration=statistics.median(iterations))


def measure(o):
    make_runs("cities", wanted(o.scale), o, most_others=MOST_OTHERS.get(o.scale))


# ---------------------------------------------------------------- the tables


def time_over(records, name, other):
    """By how much its seconds of an iteration differ from the other plan's, as a share of those,
    paired by seed; None without the other, or if it is the same."""
    if name == other:
        return None
    return paired(records, PLANS[name], PLANS[other], "iteration", ratio)


def more_than(records, name, other, share=1.0):
    """Its loss minus the other plan's, after this share of the time at which the first of the two
    runs ends; None without the other, or if it is the same."""
    if name == other:
        return None
    return paired(records, PLANS[name], PLANS[other], whole_record,
                  functools.partial(in_equal_time, share))


def whole_record(record):
    return record


def in_equal_time(share, own, other):
    moment = share * min(own["at"][-1], other["at"][-1])
    return loss_at(moment, own) - loss_at(moment, other)


def loss_at(second, record):
    """The run's loss then, on straight lines between evaluations as measured; after its end, the
    last."""
    return float(np.interp(second, record["at"], record["losses"]))


def show(found):
    records = found["records"]
    there = [name for name, facts in PLANS.items() if those(records, **facts)]
    table = Table("paths", "seconds of an iteration", "compared with full, planned",
                  "loss, nats per byte", "loss minus full, planned, in equal time")
    for name in there:
        table.add(name, mean(records, PLANS[name], "iteration"), time_over(records, name, FULL),
                  mean(records, PLANS[name], "mean"), more_than(records, name, FULL))
    table.end()
    table = Table("paths", "seconds of an iteration, compared with full, in the order of ranks",
                  "compared with full, planned, memory 6",
                  "loss minus full, planned, memory 6, in equal time")
    for name in there:
        table.add(name, time_over(records, name, UNPLANNED), time_over(records, name, FULL_OF_6),
                  more_than(records, name, FULL_OF_6))
    table.end()


# ---------------------------------------------------------------- the picture


def draw(plt, found):
    """Loss minus the planned full pipeline's, at moments of the runs."""
    records, seconds = found["records"], SECONDS[found["scale"]]
    figure, axis = plt.subplots(figsize=(WIDTH, 3.8))
    moments = [seconds * share for share in MOMENTS]
    axis.plot(moments, len(moments) * [0], color=COLOURS["planned"],
              label="none skipped,\nplanned, memory 3")
    for name, (text, colour) in DRAWN.items():
        if not those(records, **PLANS[name]):
            continue
        points = {}
        for share in MOMENTS:
            points[seconds * share] = more_than(records, name, FULL, share)
        curve(axis, points, COLOURS[colour], text, ls="--" if name == FULL_OF_6 else "-")
    axis.set(xlabel="measured seconds", ylabel="nats per byte minus\nnone skipped, planned",
             xticks=moments)
    legend(axis)
    lower = -more_than(records, HALF, FULL).mean
    frame(figure, found, f"Half skipped: {lower:.2f} nats below none skipped with memory 3 "
          f"after {seconds} s", "A pipeline between cities: loss in equal time")
    return figure


def expected(found):
    records = found["records"]
    return [
        Expected("planned compared with in the order of ranks, seconds of an iteration",
                 time_over(records, FULL, UNPLANNED).mean, -0.21, 0.05, "+.0%"),
        Expected("half skipped compared with planned, seconds of an iteration",
                 time_over(records, HALF, FULL).mean, -0.48, 0.12, "+.0%"),
    ]


ROW = Row("cities", measure, show, {"cities": draw}, expected)

if __name__ == "__main__":
    command(__doc__, ROW)
