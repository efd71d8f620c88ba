"""Both papers at once on the published instance: 20 nodes in 12 cities, 30 microbatches an iteration.

    python -m experiments.together [--seeds 0 1 2] [--steps N] [--out DIR] [--plot]

Losses are measured with a tiny model. Seconds are simulated with the messages and weights of the 500M model:
an iteration by skippipe.simulate, a synchronisation by `slowest_all_reduce` or `slowest_groups`. Nothing is
overlapped. Outer steps come every 50 steps unless the label says how many.
"""
import itertools
import json
import statistics
from dataclasses import asdict, replace
from pathlib import Path

import train
from experiments.pictures import COLOURS, WIDTH, label_ends, show_head, show_row
from experiments.runs import (Part, Run, band, finals, headline, reaches, results, same_seeds,
                              spread_of, spread_of_reached)
from noloco import random_groups
from planning.instance import city_delays, city_links, published_network
from planning.training import plan_paths
from skippipe import full_paths, simulate

MODEL_BYTES = 4 * 500e6         # the 500M model whose messages the published instance has, fp32
BYTES = {"fp32": 4, "bf16": 2, "int8": 1}
NOLOCO = "NoLoCo, SkipPipe, one byte"


# ---------------------------------------------------------------- simulated time


def makespan(network, routing, skip, microbatches=6):
    """Simulated seconds of an iteration on the paths that train.py plans with its default seed."""
    return plan_paths(network, routing, skip, microbatches, train.Options.seed)["makespan"]


def keep_links(network, name):
    """Write the network as a file for --links; returns its path."""
    path = Path("runs", name)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(asdict(network)))
    return path


def all_reduce_seconds(ranks, whole, part):
    """Seconds of the fastest of three all-reduces, on links that do not contend.

    Two rounds of parts: each of n ranks sends every other its nth part, then the sum of it. One round of
    whole vectors, as in NoLoCo. The best ring. whole[a][b], part[a][b]: seconds of a message.
    """
    links = list(itertools.combinations(ranks, 2))
    first, *others = ranks
    rings = [(first, *rest, first) for rest in itertools.permutations(others)]
    slowest_links = [max(part[a][b] for a, b in zip(ring, ring[1:])) for ring in rings]
    two_rounds = 2 * max(part[a][b] for a, b in links)
    one_round = max(whole[a][b] for a, b in links)
    return min(two_rounds, one_round, 2 * (len(ranks) - 1) * min(slowest_links))


def stage_delays(network, names, parts=1, size=4):
    """delay[a][b] in seconds of one of `parts` parts of a stage; size: bytes of a number."""
    return city_delays(names, city_links(), MODEL_BYTES * size / 4 / len(network.stages) / parts)


def slowest_all_reduce(network, names, size=4):
    """Seconds in which the slowest stage is averaged over its nodes."""
    whole = stage_delays(network, names, size=size)
    return max(all_reduce_seconds(ranks, whole, stage_delays(network, names, len(ranks), size))
               for ranks in network.stages)


def slowest_groups(network, delay):
    """Seconds of the slowest NoLoCo group of all stages, on average over 100 outer steps."""
    slowest = []
    for outer in range(100):
        groups = [group for ranks in network.stages for group in random_groups(ranks, 2, outer, 0)]
        links = [link for group in groups for link in itertools.combinations(group, 2)]
        slowest.append(max(delay[a][b] for a, b in links))
    return statistics.mean(slowest)


def hours(run, iteration, sync):
    """Simulated hours at each evaluation, from the seconds of an iteration and of a synchronisation."""
    return [(step * iteration + step // run.o.every * sync) / 3600 for step in run.steps]


def seconds():
    """{method: (seconds of an iteration, None: as each seed's plan has it; of a synchronisation)}"""
    network, names = published_network()
    everyone, half = (slowest_all_reduce(network, names, BYTES[form]) for form in ("fp32", "bf16"))
    full = simulate(network, full_paths(network.stages, 6)).makespan
    planned = makespan(network, "no-swaps", 0.0)
    return {"DDP, full pipeline": (full, everyone), "DDP, planned": (planned, everyone),
            "DDP, bf16, full pipeline": (full, half), "DDP, bf16, planned": (planned, half),
            NOLOCO: (None, slowest_groups(network, stage_delays(network, names, size=BYTES["int8"])))}


# ---------------------------------------------------------------- the runs


def runs(steps):
    steps = steps or 400
    network, _ = published_network()
    links = keep_links(network, "headline-links-20.json")
    found = seconds()
    time = steps * sum(found["DDP, full pipeline"])
    _, short = found[NOLOCO]

    def run(label, steps, options):
        return Run(label, "--stages 5,3,3,3,3,3 --layers 6 --microbatches 6 --batch 1 --lr 4e-3 "
                   f"--steps {steps} {options}", 20)

    def skipping(skip, way, share):
        """As many steps as fit into this share of DDP's time, ending with an outer step."""
        each = makespan(network, "no-swaps", skip) + short / 2
        label = f"NoLoCo, SkipPipe in order, {way}every 2, int8, {share:.0%} of DDP's time"
        return run(label, max(2, int(share * time / each) // 2 * 2),
                   f"--method noloco --inner-steps 2 --wire int8 --routing no-swaps --skip {skip} "
                   f"--links {links}" + " --unscaled" * (not way))

    ddp = run("DDP, full pipeline", steps, "--method ddp --routing fixed")
    yield ddp
    yield skipping(0.33, "", 1.0)
    for share in (1.0, 0.4):
        yield skipping(0.5, "50% skipped, rho rule, ", share)
    yield replace(ddp, label="DDP, bf16, full pipeline", options=f"{ddp.options} --wire bf16")


# ---------------------------------------------------------------- table and picture


def timing(found, run):
    """(seconds of an iteration, of a synchronisation)"""
    short = ", bf16" if run.o.wire == "bf16" else ""
    name = NOLOCO if run.o.method == "noloco" else f"DDP{short}, full pipeline"
    iteration, sync = found["seconds"][name]
    return iteration or run.curves["simulated_seconds"][0], sync


def clock(found, run):
    return hours(run, *timing(found, run))


def table(found):
    show_head("method | seeds | held-out nats per byte | s per iteration | s per synchronisation "
              "| hours in all | hours to DDP's final loss, over DDP's | ... over planned DDP's "
              "| ... over planned DDP's in bf16, to that one's final loss")
    runs = results(found)
    bases = [base(found, runs, *name) for name in (("DDP",), ("DDP", "planned"), ("DDP, bf16", "planned"))]
    for label, seeds in runs.items():
        if seeds[0].o.method != "ddp" and seeds[0].o.wire != "int8":      # results/ has more
            continue
        iteration, sync = map(statistics.mean, zip(*(timing(found, run) for run in seeds)))
        show_row(label, len(seeds), spread_of(finals(seeds)), f"{iteration:.1f}",
                 f"{sync:.1f} every {seeds[0].o.every}", f"{clock(found, seeds[0])[-1]:.1f}",
                 *(shares(found, seeds, *other) for other in bases))


def base(found, runs, name, pipeline="full pipeline"):
    """(a baseline's runs, its hours on such a pipeline: planned, the same losses come sooner)"""
    ran = runs[f"{name}, full pipeline"]
    return ran, hours(ran[0], *found["seconds"][f"{name}, {pipeline}"])[-1]


def shares(found, seeds, others, whole):
    """Shares of a baseline's time until its final loss is reached, for the seeds that it has too."""
    goals = {run.o.seed: run.final for run in others}
    there = [run for run in seeds if run.o.seed in goals]
    taken = [reaches(goals[run.o.seed], run.losses, clock(found, run)) for run in there]
    text = spread_of_reached([a and a / whole for a in taken], ".0%") if there else ""
    return text if len(there) == len(seeds) else f"{text} (seed {', '.join(str(r.o.seed) for r in there)})"


def draw(plt, found):
    """Four lines: DDP as it is, planned, planned in bf16; and both papers together."""
    runs = results(found)
    ours = runs["NoLoCo, SkipPipe in order, 50% skipped, rho rule, every 2, int8, 100% of DDP's time"]
    figure, axis = plt.subplots(figsize=(WIDTH, 5))
    shares = []
    for name, paths, label, dashes in (("DDP", "full pipeline", "DDP, fp32,\nunplanned", "-"),
                                       ("DDP", "planned", "DDP, fp32,\nplanned paths", "--"),
                                       ("DDP, bf16", "planned", "DDP, bf16,\nplanned paths", ":")):
        seeds, whole = base(found, runs, name, paths)
        x = hours(seeds[0], *found["seconds"][f"{name}, {paths}"])
        band(axis, [run.losses for run in seeds], x, COLOURS["DDP"], ls=dashes, label=label)
        taken = [reaches(goal.final, run.losses, clock(found, run))
                 for run, goal in zip(ours, same_seeds(ours, seeds))]
        shares.append(f"{statistics.mean(taken) / whole:.0%}" if all(taken) else "more")
    band(axis, [run.losses for run in ours], clock(found, ours[0]), COLOURS["NoLoCo"],
         label="half skipped (rho rule),\nNoLoCo every 2,\none byte a weight")
    goal = statistics.mean(finals(runs["DDP, full pipeline"]))
    axis.set(xlabel="simulated hours on 20 nodes in 12 cities (losses are measured)", xlim=(0, None),
             ylabel="held-out nats per byte", ylim=(goal - 0.2, goal + 1),
             title="Simulated time: both papers first reach DDP's final loss after {} of its time, a planned "
             "one's after {},\nin bf16 {} (20 nodes, 6 stages; bands: range of three seeds)".format(*shares))
    label_ends(axis)
    return figure


if __name__ == "__main__":
    headline(__doc__, {"together": Part(runs, table, draw, seconds)})
