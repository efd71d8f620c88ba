"""Both papers at once on the published instance: 20 nodes in 12 cities, 30 microbatches an
iteration.

    python -m experiments.together [--scale try|plot|full] [--plot]

full: 2.8 hours of two cores. Losses are measured with a tiny model. Seconds are simulated
with the messages and weights of the 500M model (experiments/simulated.py). All paths are planned.
Each run's learning rate is planned for the time at which the run is compared. A stage of three
nodes is one NoLoCo group, so five of six stages average all their replicas. Named before the runs,
both after the whole time: DDP, half skipped minus full; half skipped, NoLoCo minus DDP.
"""
import itertools

from experiments.harness import Row, Run, command, make_runs
from experiments.pictures import COLOURS, WIDTH, curve, frame, legend
from experiments.simulated import (keep_links, makespan, slowest_all_reduce, slowest_groups,
                                   stage_delays)
from experiments.stats import Expected, Table, mean, paired, significant, those
from planning.instance import published_network

INT8 = 1                        # bytes of a weight, in every method's messages
WHOLE = {"try": 200, "plot": 3000, "full": 40_000}      # simulated seconds of the longest runs
SEEDS = {"try": (0,), "plot": (0,), "full": (0, 1, 2)}
FULL, HALF = 0.0, 0.5           # the shares skipped
PATHS = {FULL: "full pipeline", HALF: "half skipped"}
MICROBATCHES = 6                # of an origin
LEARN = (f"--stages 5,3,3,3,3,3 --layers 6 --microbatches {MICROBATCHES} --batch 1 --lr 4e-3 "
         "--routing no-swaps --eval-every 1000000")


def method_of(method, m=1):
    """A method's facts. m: inner steps between synchronisations."""
    return dict(method=method, wire="int8", m=m)


DDP = method_of("DDP")
DILOCO = method_of("DiLoCo", m=2)
NOLOCO = method_of("NoLoCo", m=2)
SHARES = 1.0, 0.6, 0.4, 0.25            # of the time, after which runs are compared
COMPARED = {FULL: (DDP, NOLOCO), HALF: (DDP, DILOCO, NOLOCO)}


# ---------------------------------------------------------------- simulated time


def simulated_seconds():
    """({share skipped: of an iteration}, {method: of a synchronisation})"""
    network, names = published_network()
    iterations = {skip: makespan(network, "no-swaps", skip, MICROBATCHES) for skip in PATHS}
    all_reduce = slowest_all_reduce(network, names, INT8)
    pair = slowest_groups(network, stage_delays(network, names, size=INT8))
    return iterations, {"DDP": all_reduce, "DiLoCo": all_reduce, "NoLoCo": pair}


def a_step(seconds, skip, method):
    """Simulated seconds, synchronisation included. seconds: of `simulated_seconds`; method: its
    facts."""
    iterations, synchronisations = seconds
    return iterations[skip] + synchronisations[method["method"]] / method["m"]


# ---------------------------------------------------------------- the runs


def wanted(scale):
    """As many steps as fit into each share of WHOLE. The small scales have one share of it, and a
    try only NoLoCo, half skipped."""
    shares, compared = SHARES, COMPARED
    more = ""
    if scale != "full":
        shares = SHARES[:1]
    if scale == "plot":
        compared = {skip: (DDP, NOLOCO) for skip in PATHS}
        more = " --eval-sequences 64"
    if scale == "try":
        compared = {HALF: (NOLOCO,)}
        more = " --eval-sequences 5"                # one of each origin
    links = keep_links(published_network()[0], "links-20.json")
    seconds, runs = simulated_seconds(), []
    for seed, share, (skip, methods) in itertools.product(SEEDS[scale], shares, compared.items()):
        for method in methods:
            fit = int(share * WHOLE[scale] / a_step(seconds, skip, method))
            steps = max(2, fit // 2 * 2)            # an end just after an outer step of all
            facts = dict(skip=skip) | method | dict(share=share, seed=seed)
            runs.append(Run(facts, f"{LEARN} --skip {skip:g} --links {links} "
                            f"{options_of(method)} --steps {steps}{more}", 20))
    return runs


def options_of(method):
    """train.py's."""
    options = f"--method {method['method'].lower()} --wire {method['wire']}"
    if method["method"] != "DDP":
        options += f" --inner-steps {method['m']}"
    return options


def measure(o):
    make_runs("together", wanted(o.scale), o)


# ---------------------------------------------------------------- the tables


def facts_of(skip, method, share):
    return dict(skip=skip, share=share) | method


def kinds(records):
    """The facts of each kind of run that is there."""
    found = []
    for share, (skip, methods) in itertools.product(SHARES, COMPARED.items()):
        for method in methods:
            if those(records, **facts_of(skip, method, share)):
                found.append(facts_of(skip, method, share))
    return found


def name_of(facts):
    """As tables have it."""
    return f"{PATHS[facts['skip']]}: {facts['method']}, {facts['share']:.0%}"


def over(records, one, other):
    """One kind of run's loss minus another's; None without it, or if it is the same."""
    if one == other:
        return None
    return paired(records, one, other)


def show(found):
    records = found["records"]
    table = Table("paths: method, share of the time", "steps", "loss, nats per byte",
                  "minus DDP on the full pipeline after 100%", "minus DDP, same paths and time")
    for facts in kinds(records):
        table.add(name_of(facts), mean(records, facts, "steps", ".0f"),
                  mean(records, facts), over(records, facts, facts_of(FULL, DDP, 1.0)),
                  over(records, facts, facts | DDP))
    table.end()
    table = Table("share of the time, one byte per weight", "DDP: half skipped minus full",
                  "NoLoCo: half skipped minus full", "half skipped: NoLoCo minus DDP",
                  "half skipped: NoLoCo minus DiLoCo")
    for share in SHARES:
        cells = [skipping_brings(records, DDP, share), skipping_brings(records, NOLOCO, share),
                 noloco_brings(records, DDP, share), noloco_brings(records, DILOCO, share)]
        if any(cells):
            table.add(f"{share:.0%}", *cells)
    table.end()


def skipping_brings(records, method, share):
    """The loss with half skipped minus that of the full pipeline."""
    return over(records, facts_of(HALF, method, share), facts_of(FULL, method, share))


def noloco_brings(records, other, share):
    """NoLoCo's loss minus another method's, half skipped."""
    return over(records, facts_of(HALF, NOLOCO, share), facts_of(HALF, other, share))


# ---------------------------------------------------------------- the picture


def draw(plt, found):
    """What skipping brings, and what NoLoCo brings, against the time for which runs are planned."""
    figure, axes = plt.subplots(2, 1, figsize=(WIDTH, 4.6), sharex=True, sharey=True)
    draw_lines(axes[0], found, skipping_brings, ((DDP, "with DDP"), (NOLOCO, "with NoLoCo")))
    draw_lines(axes[1], found, noloco_brings, ((DDP, "minus DDP"), (DILOCO, "minus DiLoCo")))
    axes[0].set(title="half skipped minus full pipeline", ylabel="nats per byte")
    axes[1].set(title="half skipped: NoLoCo minus DDP, DiLoCo", ylabel="nats per byte",
                xlabel="simulated hours, for which each run's rate is planned",
                xlim=(0, 1.05 * WHOLE[found["scale"]] / 3600))
    finding = ""
    if found["scale"] == "full":
        column = [skipping_brings(found["records"], NOLOCO, share) for share in SHARES]
        told = {}
        for share, more, stays in zip(SHARES, column, significant(column)):
            told[share] = f"{more.mean:+.2f}{'' if stays else ' (not significant)'}"
        finding = (f"Half skipped, NoLoCo: {told[min(SHARES)]} nats after a quarter of the time,\n"
                   f"{told[max(SHARES)]} after all of it")
    frame(figure, found, finding, "Both papers together: loss in equal time")
    return figure


def draw_lines(axis, found, difference, methods):
    """A line for each method that was run. difference: of `skipping_brings`, `noloco_brings`."""
    axis.axhline(0, color="#000000", lw=1)
    for method, name in methods:
        points = {}
        for share in sorted(SHARES):
            more = difference(found["records"], method, share)
            if more:
                points[share * WHOLE[found["scale"]] / 3600] = more
        if points:
            curve(axis, points, COLOURS[method["method"]], name)
    legend(axis)


def expected(found):
    more = skipping_brings(found["records"], DDP, 1.0)
    return [Expected("DDP, half skipped minus full, the whole time, nats per byte", more.mean,
                     -0.35, 0.2, "+.3f")]


ROW = Row("together", measure, show, {"together": draw}, expected)

if __name__ == "__main__":
    command(__doc__, ROW)
