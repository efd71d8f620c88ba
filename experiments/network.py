"""SkipPipe's pipeline on hosts between cities: loss against real time.

    python -m experiments.network [--seeds 0 1 2] [--steps N] [--out DIR] [--plot]

pipeline    1 h 20 of two idle cores: 4 stages of 2 hosts, three seeds

The hosts are network namespaces of this machine, and the runs go by the clock
(experiments/clock.py):

    python -m experiments.network --clock SECONDS ...   train.py's options: as many steps as fit
"""
import itertools
import statistics
import sys

from experiments.clock import CPU, FIRST, PROGRAM, TINY, clocked
from experiments.comparing import Comparison, Table
from experiments.harness import MEANS_ONLY, Part, Setting, headline, title_of
from experiments.pictures import COLOURS, WIDTH, band, counted, focus, label_ends
from experiments.results import (ends, finals, mean_final, more_than, reaches, results, same_seeds,
                                 spread_of, spread_of_reached, timed)
from planning.instance import city_links

SECONDS, TRY = 100, 10          # by the clock; with --steps
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
OF_A_TRY = UNPLANNED, FULL, HALF
DRAWN = {               # name: (in the picture, colour)
    UNPLANNED: ("none skipped,\nunplanned", "full"),
    FULL: ("none skipped,\nplanned", "planned"),
    "full, planned, five fast hosts alone": ("none skipped,\nfive fast hosts", "random"),
    "25% skipped, rho rule, memory 3": ("25% skipped", "25%"),
    HALF: ("50% skipped", "50%"),
}


def between_cities(names):
    """Options of tools/hosts.py: the links published with SkipPipe's code."""
    links, options = city_links(), [f"--cpu {CPU} --mbit 0"]
    for i, j in itertools.combinations(range(len(names)), 2):
        seconds, speed = links[names[i], names[j]]
        options.append(f"--latency {i}-{j}={1000 * seconds:.3g} --mbit {i}-{j}={speed * 8e-6:.0f}")
    return " ".join(options)


def pipeline_settings(steps):
    """A try (steps): three plans for TRY seconds by the clock, whatever the steps."""
    seconds = TRY if steps else SECONDS
    plans = OF_A_TRY if steps else PLANS
    for name in plans:
        options, memory = PLANS[name]
        names, stages = CITIES, "2,2,2,2"
        if "alone" in name:
            names, stages = FAST, "2,1,1,1"
        yield Setting(name, f"{TINY} --stages {stages} --microbatches 3 --batch 2 "
                      f"--eval-sequences 256 --warmup {FIRST} --method noloco --inner-steps 10 "
                      f"{options}", len(names), program=f"{PROGRAM} {seconds} --memory {memory}",
                      hosts=between_cities(names))


# ---------------------------------------------------------------- the tables


def iteration_seconds(runs):
    """Each run's median of an iteration."""
    return [statistics.median(run.curves["iteration_seconds"]) for run in runs]


def time_over(runs, others):
    """Seconds of an iteration over the others', seed by seed, less 1."""
    pairs = zip(iteration_seconds(runs), iteration_seconds(same_seeds(runs, others)))
    return Comparison([own / other - 1 for own, other in pairs], "+.0%")


def show_pipeline(found):
    runs = results(found)
    table = Table("paths", "seconds of an iteration", "over the planned full pipeline's",
                  "held-out nats per byte", "over the planned full pipeline's, in equal time")
    for name, seeds in runs.items():
        seconds = f"{statistics.mean(iteration_seconds(seeds)):.3f}"
        time, more = None, None
        if name != FULL:
            time, more = time_over(seeds, runs[FULL]), more_than(seeds, runs[FULL])
        table.add(name, seconds, time, mean_final(seeds), more)
    table.end()
    unplanned = runs[UNPLANNED]
    table = Table("paths", "seconds of an iteration over the unplanned full pipeline's")
    for name, seeds in runs.items():
        if seeds is not unplanned:
            table.add(name, time_over(seeds, unplanned))
    table.end()
    print(MEANS_ONLY)


def share_of(others, runs):
    """When each run reaches the loss that the other of its seed ends with, as a share of the
    other's time."""
    others = same_seeds(runs, others)
    shares = []
    for run, other, end in zip(runs, others, ends(others)):
        moment = reaches(other.final, run.losses, run.seconds)
        shares.append(None if moment is None else moment / end)
    return spread_of_reached(shares, ".0%")


def record_pipeline(found):
    runs = results(found)
    table = Table("paths", "steps", "seconds of an iteration", "the plan's, simulated",
                  "held-out nats per byte",
                  "the planned full one's last loss, in so much of its time")
    for name, seeds in runs.items():
        steps = spread_of([run.steps[-1] for run in seeds], ".0f")
        plan = spread_of([run.curves["simulated_seconds"][-1] for run in seeds])
        share = share_of(runs[FULL], seeds) if name != FULL else None
        table.add(name, steps, spread_of(iteration_seconds(seeds)), plan, spread_of(finals(seeds)),
                  share)
    table.end()


# ---------------------------------------------------------------- the picture


def draw_pipeline(plt, found):
    figure, axis = plt.subplots(figsize=(WIDTH, 4.6))
    runs, drawn = results(found), []
    for name in [name for name in DRAWN if name in runs]:
        text, colour = DRAWN[name]
        x, curves = timed(runs[name])
        band(axis, curves, x, COLOURS[colour], label=text)
        drawn += curves
    focus(axis, drawn)
    axis.set(xlabel=f"measured seconds, 8 hosts between eight cities (bands: range of "
             f"{counted(len(runs[FULL]), 'seed')})", ylabel="held-out nats per byte",
             title=title_of(found, "Half skipped: half the time an iteration, and a lower loss in "
                            "equal time", "A pipeline between cities"))
    label_ends(axis)
    return figure


PARTS = {
    "pipeline": Part(pipeline_settings, show_pipeline, record_pipeline,
                     {"pipeline": draw_pipeline}),
}

if __name__ == "__main__":
    if "--clock" in sys.argv:
        clocked(sys.argv[1:])
    else:
        headline(__doc__, PARTS)
