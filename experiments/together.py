"""Both papers at once on the published instance: 20 nodes in 12 cities, 30 microbatches an iteration, 50
inner steps unless the label says how many.

    python -m experiments.together [--seeds 0 1 2] [--steps N] [--out DIR] [--plot]
"""
import itertools
import statistics
from dataclasses import replace

from experiments.clock import every, hours, keep_links, makespan, reaches, slowest_all_reduce, stage_delays
from experiments.onebyte import SHORT
from experiments.pictures import COLOURS, show_head, show_row
from experiments.runs import Run, band, finals, headline, losses, results, spread_of, spread_of_reached
from noloco import random_groups
from planning.instance import published_network
from skippipe import full_paths, random_paths, simulate

INNER = 50
SOON = 0.58         # of DDP's time: under 70% of planned DDP's too, 77% of planned DDP's in bf16
# inner steps, wire, share of DDP's time: where it is less, with the first seed only
OFTEN = ((10, "int8", SOON), (2, "int8", SOON), (1, "int8", SOON), (2, "fp32", SOON), (1, "fp32", SOON),
         (2, "int8", 1.0))
# shares of DDP's time: every 2 steps in one byte, evaluated with Eq. 6 of skippipe.py
SCALED = (1.0, 0.4)
BYTES = {"fp32": 4, "bf16": 2, "int8": 1}
# in the picture
SHOWN = ("DDP, full pipeline", "DiLoCo, full pipeline", "NoLoCo, random routing", "NoLoCo, SkipPipe",
         "NoLoCo, SkipPipe in order, DDP's time",
         "NoLoCo, SkipPipe in order, every 10 steps, DDP's time",
         "NoLoCo, SkipPipe in order, every 2, int8, 100% of DDP's time",
         "NoLoCo, SkipPipe in order, 50% skipped, Eq. 6, every 2, int8, 100% of DDP's time")


def runs(steps):
    steps = steps or 400
    network, _ = published_network()
    links = keep_links(network, "headline-links-20.json")
    found = seconds()
    full, averaging = found["DDP, full pipeline"]
    _, sync = found["NoLoCo, SkipPipe"]
    swaps, in_order = (makespan(network, routing, 0.33) for routing in ("skippipe", "no-swaps"))
    time = steps * (full + averaging)
    warm = steps // 100 * 50

    def fit(seconds, iteration, inner=INNER, after=0, sync=sync, multiple=INNER):
        """Steps in all when these seconds are left after so many, ending with an outer step."""
        return max(1, int(after + seconds / (iteration + sync / inner)) // multiple * multiple)

    def run(label, steps, options):
        return Run(label, "--stages 5,3,3,3,3,3 --layers 6 --microbatches 6 --batch 1 --lr 4e-3 "
                   f"--steps {steps} {options}", 20)

    def skipping(label, steps, routing="skippipe", inner=INNER, more=""):
        return run(label, steps, f"--method noloco --inner-steps {inner} --skip 0.33 --unscaled "
                   f"--links {links} --routing {routing}{more}")

    yield run("DDP, full pipeline", steps, "--method ddp --routing fixed")
    yield run("DiLoCo, full pipeline", steps, f"--method diloco --inner-steps {INNER} --routing fixed")
    yield run("NoLoCo, random routing", steps, f"--method noloco --inner-steps {INNER}")
    yield skipping("NoLoCo, SkipPipe", steps)
    rest = 0.4 * time - warm * (swaps + averaging)                          # within 40% of DDP's time
    yield skipping("NoLoCo, SkipPipe, warm start", fit(rest, swaps, after=warm),
                   more=f" --warm-start {warm}")
    yield skipping("NoLoCo, SkipPipe, DDP's time", fit(time, swaps))
    yield skipping("NoLoCo, SkipPipe in order, DDP's time", fit(time, in_order), "no-swaps")
    yield skipping("NoLoCo, SkipPipe in order, every 10 steps, DDP's time", fit(time, in_order, 10),
                   "no-swaps", 10)
    for inner, wire, share in OFTEN:
        _, each = found[NOLOCO[wire]]
        fitting = fit(share * time, in_order, inner, sync=each, multiple=inner)
        label = f"NoLoCo, SkipPipe in order, every {inner}, {wire}, {share:.0%} of DDP's time"
        often = skipping(label, fitting, "no-swaps", inner, f" --wire {wire}")
        yield replace(often, first=share < 1)
    _, short = found[NOLOCO["int8"]]
    iterations = {0.33: in_order, 0.5: makespan(network, "no-swaps", 0.5)}
    for skip, share in itertools.product(iterations, SCALED):
        fitting = fit(share * time, iterations[skip], 2, sync=short, multiple=2)
        way = f"{skip:.0%} skipped, Eq. 6, every 2, int8, {share:.0%} of DDP's time"
        often = "--method noloco --inner-steps 2 --routing no-swaps --wire int8"
        yield run(f"NoLoCo, SkipPipe in order, {way}", fitting, f"{often} --skip {skip} --links {links}")
    yield replace(run("DDP, bf16, full pipeline", steps, "--method ddp --routing fixed"), program=SHORT)


# ---------------------------------------------------------------- simulated time

NOLOCO = {"fp32": "NoLoCo, SkipPipe", "int8": "NoLoCo, SkipPipe, one byte"}


def seconds():
    """{method: (seconds of an iteration, None: as each seed's plan has it; of a synchronisation)}"""
    network, names = published_network()
    everyone, half = (slowest_all_reduce(network, names, BYTES[form]) for form in ("fp32", "bf16"))
    full = simulate(network, full_paths(network.stages, 6)).makespan
    routed = [simulate(network, random_paths(network.stages, 6, step, 0)).makespan for step in range(100)]
    some, short = (slowest_groups(network, stage_delays(network, names, size=BYTES[wire])) for wire in NOLOCO)
    planned = makespan(network, "no-swaps", 0.0)
    return {"DDP, full pipeline": (full, everyone),
            "DDP, planned": (planned, everyone),
            "DDP, bf16, full pipeline": (full, half),
            "DDP, bf16, planned": (planned, half),
            "DiLoCo, full pipeline": (full, everyone),
            "NoLoCo, random routing": (statistics.mean(routed), some),
            NOLOCO["fp32"]: (None, some),
            NOLOCO["int8"]: (None, short)}


def slowest_groups(network, delay):
    """The slowest group of all stages, on average over 100 outer steps, though only its own pipelines
    would wait for it. With 3 replicas a group is everyone."""
    slowest = []
    for outer in range(100):
        groups = [group for ranks in network.stages for group in random_groups(ranks, 2, outer, 0)]
        pairs = [pair for group in groups for pair in itertools.combinations(group, 2)]
        slowest.append(max(delay[a][b] for a, b in pairs))
    return statistics.mean(slowest)


def method(run):
    """Its name in `seconds`."""
    o = run.o
    if o.method == "noloco":
        return "NoLoCo, random routing" if o.routing == "random" else NOLOCO[o.wire]
    short = ", bf16" if run.command.startswith(SHORT) else ""
    return {"ddp": f"DDP{short}, full pipeline", "diloco": "DiLoCo, full pipeline"}[o.method]


def timing(found, run):
    iteration, sync = found["seconds"][method(run)]
    return iteration or run.curves["simulated_seconds"][0], sync


def clock(found, run):
    return hours(run, *timing(found, run), averaging=found["seconds"]["DDP, full pipeline"][1])


# ---------------------------------------------------------------- table and picture


def table(found):
    show_head("method | seeds | held-out nats per byte | s per iteration | s per synchronisation "
              "| hours in all | hours to DDP's final loss, over DDP's | ... over planned DDP's "
              "| ... over planned DDP's in bf16, to that one's final loss")
    runs = results(found)
    bases = [base(found, runs, "DDP"), base(found, runs, "DDP", "planned"),
             base(found, runs, "DDP, bf16", "planned")]
    for label, seeds in runs.items():
        times = [timing(found, run) for run in seeds]
        iteration, sync = statistics.mean(t[0] for t in times), times[0][1]
        show_row(label, len(seeds), spread_of(finals(seeds)), f"{iteration:.1f}",
                 f"{sync:.1f} every {every(seeds[0].o)}", f"{clock(found, seeds[0])[-1]:.1f}",
                 *(shares(found, seeds, *other) for other in bases))


def base(found, runs, name, pipeline="full pipeline"):
    """(a baseline's runs, their hours on such a pipeline: planned, the same losses come sooner)"""
    ran = runs[f"{name}, full pipeline"]
    return ran, hours(ran[0], *found["seconds"][f"{name}, {pipeline}"])[-1]


def shares(found, seeds, others, whole):
    """Of a baseline's time until its final loss is reached, for the seeds that it has too."""
    goals = {run.o.seed: run.final for run in others}
    there = [run for run in seeds if run.o.seed in goals]
    taken = [reaches(goals[run.o.seed], run.losses, clock(found, run)) for run in there]
    text = spread_of_reached([a and a / whole for a in taken], ".0%") if there else ""
    return text if len(there) == len(seeds) else f"{text} (seed {', '.join(str(r.o.seed) for r in there)})"


def draw(plt, found):
    runs = results(found)
    figure, (a, b) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for label, colour in zip(SHOWN, (*COLOURS, "gray"), strict=True):
        seeds = runs[label]
        band(a, losses(seeds), clock(found, seeds[0]), label, colour)
        band(b, losses(seeds), seeds[0].steps, label, colour)
    goal = statistics.mean(finals(runs["DDP, full pipeline"]))
    a.axhline(goal, color="black", ls=":", lw=0.8)
    a.set(xscale="log", xlabel="simulated hours on the published instance, 20 nodes in 12 cities",
          ylabel="held-out nats per byte", title="loss against time", ylim=(goal - 0.2, goal + 1.2))
    b.set(xlabel="steps of 30 microbatches", ylabel="held-out nats per byte", title="loss against steps",
          ylim=(goal - 0.2, goal + 1.2))
    a.set_xticks((0.5, 1, 2, 5, 10), ("0.5", "1", "2", "5", "10"))
    a.set_xticks((), minor=True)
    b.legend()
    return figure


if __name__ == "__main__":
    headline("together", __doc__, runs, table, draw, seconds)
