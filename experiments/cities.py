"""SkipPipe's pipeline on eight hosts between cities: seconds of an iteration, loss in equal time.

    python -m experiments.cities [--scale try|plot|full] [--plot]       as root

full: 1 h 20 of two idle cores. 4 stages of 2 hosts, with the links published beside SkipPipe's
code; the hosts are network namespaces of this machine, and the runs go by the clock
(experiments/clock.py). Losses are the mean over the replicas.
"""
import itertools
import statistics

from experiments.clock import CPU, PROGRAM
from experiments.harness import Row, Setting, command, run_all
from experiments.pictures import COLOURS, WIDTH, aside, bars, counted, frame
from experiments.tables import (MEANS_ONLY, Comparison, Expected, Table, mean_final, more_than,
                                results, same_seeds)
from planning.instance import city_links

TINY = "--hidden 128 --mlp 512 --heads 4"       # train.py's own
SECONDS = {"try": 10, "plot": 30, "full": 100}  # by the clock
SEEDS = {"try": (0,), "plot": (0,), "full": (0, 1, 2)}
FIRST = 20                                      # steps of warm-up
# Two for each stage, in turn.
CITIES = "Belgium Canada Germany Iowa Japan LA NL Oregon".split()
FAST = "Belgium Canada Iowa LA Oregon".split()      # the origins, and those which add least latency
UNPLANNED, FULL = "full, in the order of ranks", "full, planned"
HALF = "50% skipped, rho rule, memory 3"
PLANS = {               # name: (options, the planner's memory)
    UNPLANNED: ("--routing dtfm", 3),
    FULL: ("--routing no-swaps", 3),
    "full, planned, memory 6": ("--routing no-swaps", 6),
    "full, planned, five fast hosts alone": ("--routing no-swaps", 3),
    "25% skipped, rho rule, memory 3": ("--routing stronger --skip 0.25", 3),
    "25% skipped, rho rule, memory 4": ("--routing stronger --skip 0.25", 4),
    "25% skipped, rho rule, memory 5": ("--routing stronger --skip 0.25", 5),
    "25% skipped, rho rule, memory 6": ("--routing stronger --skip 0.25", 6),
    "25% skipped, memory 3": ("--routing stronger --skip 0.25 --unscaled", 3),
    HALF: ("--routing stronger --skip 0.5", 3),
}
SMALL = UNPLANNED, FULL, HALF                   # plans of a small copy
DRAWN = {               # beside FULL: (in the picture, colour)
    UNPLANNED: ("none skipped,\nunplanned", "full"),
    "25% skipped, rho rule, memory 3": ("25% skipped", "25%"),
    HALF: ("50% skipped", "50%"),
}
MOMENTS = 0.4, 0.6, 0.8, 1.0    # of SECONDS; before them some runs have no evaluation


def between_cities(names):
    """Options of tools/hosts.py: the links published with SkipPipe's code."""
    links, options = city_links(), [f"--cpu {CPU} --mbit 0"]
    for i, j in itertools.combinations(range(len(names)), 2):
        seconds, speed = links[names[i], names[j]]
        options.append(f"--latency {i}-{j}={1000 * seconds:.3g} --mbit {i}-{j}={speed * 8e-6:.0f}")
    return " ".join(options)


def settings(scale):
    plans = PLANS if scale == "full" else SMALL
    for name in plans:
        options, memory = PLANS[name]
        names, stages = CITIES, "2,2,2,2"
        if "alone" in name:
            names, stages = FAST, "2,1,1,1"
        yield Setting(name, f"{TINY} --stages {stages} --microbatches 3 --batch 2 "
                      f"--eval-sequences 256 --warmup {FIRST} --method noloco --inner-steps 10 "
                      f"{options}", len(names),
                      program=f"{PROGRAM} {SECONDS[scale]} --memory {memory}",
                      hosts=between_cities(names))


def measure(o):
    return run_all("cities", settings(o.scale), SEEDS[o.scale], o)


# ---------------------------------------------------------------- the tables


def iteration_seconds(runs):
    """Each run's median of an iteration."""
    return [statistics.median(run.curves["iteration_seconds"]) for run in runs]


def time_over(runs, others):
    """Seconds of an iteration over the others', seed by seed, less 1."""
    pairs = zip(iteration_seconds(runs), iteration_seconds(same_seeds(runs, others)))
    return Comparison([own / other - 1 for own, other in pairs], "+.0%")


def show(found):
    runs = results(found)
    table = Table("paths", "seconds of an iteration", "over the planned full pipeline's",
                  "loss, nats per byte", "over the planned full pipeline's, in equal time")
    for name, seeds in runs.items():
        seconds = f"{statistics.mean(iteration_seconds(seeds)):.3f}"
        time, more = None, None
        if name != FULL:
            time, more = time_over(seeds, runs[FULL]), more_than(seeds, runs[FULL])
        table.add(name, seconds, time, mean_final(seeds), more)
    table.end()
    unplanned = runs[UNPLANNED]
    table = Table("paths", "seconds of an iteration over the unplanned")
    for name, seeds in runs.items():
        if seeds is not unplanned:
            table.add(name, time_over(seeds, unplanned))
    table.end()
    print(MEANS_ONLY)


# ---------------------------------------------------------------- the picture


def draw(plt, found):
    """Nats per byte over the planned full pipeline's, at moments of the runs."""
    figure, axis = plt.subplots(figsize=(WIDTH, 4.0))
    runs, moments = results(found), [SECONDS[found["scale"]] * share for share in MOMENTS]
    axis.plot(moments, [0] * len(moments), color=COLOURS["planned"],
              label="none skipped,\nplanned")
    for place, name in enumerate(name for name in DRAWN if name in runs):
        text, colour = DRAWN[name]
        more = [more_than(runs[name], runs[FULL], share) for share in MOMENTS]
        bars(axis, aside(moments, place), more, COLOURS[colour], times=1, label=text)
    axis.set(xlabel="measured seconds", ylabel="nats per byte over\nnone skipped, planned",
             xticks=moments)
    seconds = SECONDS[found["scale"]]
    lower = -more_than(runs[HALF], runs[FULL]).mean
    frame(figure, found,
          f"Half skipped: {lower:.2f} nats lower than none skipped after {seconds} s",
          "A pipeline between cities: loss in equal time",
          f"8 hosts of one machine with links as between eight cities, 4 stages of 2, 1.1M "
          f"weights, replicas' means; {counted(len(runs[FULL]), 'seed')}, bars: 95% intervals.")
    return figure


def expected(found):
    runs = results(found)
    time = time_over(runs[HALF], runs[FULL]).mean
    planned = time_over(runs[FULL], runs[UNPLANNED]).mean
    judged = found["scale"] != "try"
    return [
        Expected("planned over in the order of ranks, seconds of an iteration", planned, -0.21,
                 0.05, "+.0%", judged),
        Expected("half skipped over planned, seconds of an iteration", time, -0.48, 0.12, "+.0%",
                 judged),
    ]


ROW = Row("cities", measure, show, {"cities": draw}, expected)

if __name__ == "__main__":
    command(__doc__, ROW)
