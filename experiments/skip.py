"""SkipPipe's paths that leave stages out: loss in equal simulated time, and with stages missing at
inference.

    python -m experiments.skip [skip scale] [--seeds 0 1 2] [--steps N] [--out DIR] [--plot]

skip        evaluated as in the papers (--unscaled)
scale       the same runs under the rho rule (planning/rho.py), beside those of `skip` in OUT

8 layers in 4 or 8 stages of two nodes each, spread over the 12 cities of the published instance.
Gradients are averaged at every step, so only the paths differ. "In order" means no swapped
neighbours. 0% skipped is DT-FM's pipeline; 0% skipped, in order, is the planned one. "Equal time"
has as many steps as fit into DT-FM's time.
"""
import itertools
import json
import statistics
import subprocess
from dataclasses import replace

import train
from experiments.comparing import Comparison, Table
from experiments.harness import Part, Setting, headline, title_of, torchrun
from experiments.pictures import COLOURS, WIDTH, band, bars, counted, focus, label_ends
from experiments.results import finals, mean_final, over, over_runs, results, same_seeds, spread_of
from experiments.together import MICROBATCHES, keep_links, makespan, slowest_all_reduce
from planning.instance import CITIES, city_delays, city_links
from skippipe import Network

FULL = (0.0, "dtfm")
# (share skipped, routing)
KINDS = FULL, (0.0, "no-swaps"), (0.25, "no-swaps"), (0.5, "stronger")
UNSCALED = " --unscaled"
RHO = " (rho rule)"
# The nodes of each stage, as `assign_stages` found them for the full pipeline. Pinned, so that the
# tables can be made again.
STAGES = {
    4: [[0, 4], [2, 7], [1, 5], [3, 6]],
    8: [[0, 11], [1, 12], [9, 15], [10, 13], [3, 7], [2, 5], [6, 8], [4, 14]],
}


def network_of(stages):
    """Two nodes a stage: (Network, cities)."""
    cities = (CITIES * 2)[:2 * stages]
    compute = [0.44 * 6 / stages] * 2 * stages          # the published instance cuts the model in 6
    delay = city_delays(cities, city_links())
    network = Network(delay, compute, STAGES[stages], memory=3, overhead=0.13, origin_overhead=0.09)
    return network, cities


def skip_settings(steps):
    steps = steps or 300
    for stages, (skip, routing) in itertools.product(STAGES, KINDS):
        label = f"{stages} stages, {100 * skip:g}% skipped"
        if routing == "no-swaps":
            label += ", in order"
        if skip or (skip, routing) == FULL:         # a plan that skips nothing gains time only
            yield skip_setting(label, stages, skip, routing, steps)
        if (skip, routing) != FULL:
            more = equal_time(steps, stages, skip, routing)
            yield skip_setting(f"{label}, equal time", stages, skip, routing, more)


def scaled_settings(steps):
    for setting in skip_settings(steps):
        if UNSCALED in setting.options:
            options = setting.options.replace(UNSCALED, "")
            yield replace(setting, label=setting.label + RHO, options=options)


def skip_setting(label, stages, skip, routing, steps):
    links = keep_links(network_of(stages)[0], f"headline-links-{stages}.json")
    options = (f"--method ddp --layers 8 --lr 4e-3 --microbatches {MICROBATCHES} --batch 2 "
               f"--links {links} --stages {','.join(['2'] * stages)} --routing {routing} "
               f"--skip {skip:g}")
    if skip:
        options += UNSCALED
    return Setting(label, f"{options} --steps {steps}", 2 * stages, missing_stages)


def equal_time(steps, stages, skip, routing):
    """The steps that fit into DT-FM's time."""
    network, cities = network_of(stages)
    sync = slowest_all_reduce(network, cities)
    full = makespan(network, FULL[1], FULL[0]) + sync
    ours = makespan(network, routing, skip) + sync
    return round(steps * full / ours)


def all_reduce_seconds_by_stages():
    """{stages: seconds of an all-reduce}"""
    return {f"{stages} stages": slowest_all_reduce(*network_of(stages)) for stages in STAGES}


def missing_stages(folder):
    """{"shares": {share of the stages: [held-out loss of each choice of so many]}} of the last
    checkpoint.

    DDP keeps a stage's replicas equal, so one replica's loss is that of all.
    """
    stages = train.parse(["--resume", str(folder)]).stages
    torchrun(sum(stages), "-m", "tools.partial", str(folder), stdout=subprocess.DEVNULL)
    rows, found = json.loads((folder / "partial.json").read_text()), {}
    for row in rows:
        share = str(len(row["stages"]) / len(stages))
        found.setdefault(share, []).append(row["heldout_loss"])
    return dict(shares=found)


# ---------------------------------------------------------------- the tables


def losses_without(runs, key):
    """Each seed's held-out loss with stages missing, the mean over all choices of them. key: a
    share of the stages that run."""
    return [statistics.mean(run.shares[key]) for run in runs]


def missing_over(runs, key):
    """Perplexity with stages missing over that of the run's whole model, seed by seed."""
    whole = [run.shares["1.0"][0] for run in runs]
    return Comparison(over(losses_without(runs, key), whole), "+.1%")


def full_of(label, runs):
    """(the full pipeline beside which a run is put, its label): DT-FM's after equal steps, in equal
    time the planned one."""
    same = "0% skipped"
    if "equal time" in label:
        same = "0% skipped, in order, equal time"
    name = f"{label.split(',')[0]}, {same}"
    return runs[name], name


def show_over_full(own, full_runs):
    """How the runs compare with full pipelines."""
    table = Table("stages, share skipped", "steps", "held-out nats per byte",
                  "perplexity over a full pipeline's")
    for label, seeds in own.items():
        full, name = full_of(label, full_runs)
        more = over_runs(seeds, full) if label != name else None
        table.add(label, f"{seeds[0].steps[-1]:.0f}", mean_final(seeds), more)
    table.end()
    print("The full pipeline is DT-FM's after equal steps, and the planned one in equal time.\n")


def show_missing(own):
    """What missing stages cost each model."""
    table = Table("stages, share skipped in training", "75% of the stages, over all of them",
                  "half of the stages, over all")
    for label, seeds in own.items():
        table.add(label, missing_over(seeds, "0.75"), missing_over(seeds, "0.5"))
    table.end()


def show_skip(found):
    """Evaluated as in the papers."""
    own = results(found)
    show_over_full(own, own)
    show_missing(own)


def show_scale(found):
    """Evaluated under the rho rule, and beside the same weights evaluated as in the papers."""
    own, papers = results(found), results(found["beside"])
    show_over_full(own, papers)
    table = Table("stages, share skipped", "the rho rule over evaluation as in the papers",
                  "with 75% of the stages", "with half of the stages")
    for label, seeds in own.items():
        same = same_seeds(seeds, papers[label.removesuffix(RHO)])
        cells = [over_runs(seeds, same)]
        for share in ("0.75", "0.5"):
            more = over(losses_without(seeds, share), losses_without(same, share))
            cells.append(Comparison(more, "+.1%"))
        table.add(label, *cells)
    table.end()
    show_missing(own)


def record_losses(found):
    table = Table("stages, share skipped", "held-out nats per byte (least to largest)")
    for label, seeds in results(found).items():
        table.add(label, spread_of(finals(seeds)))
    table.end()


# ---------------------------------------------------------------- the pictures

IN_TIME = {         # the label's end: (its name in the picture, colour)
    "0% skipped, in order, equal time": ("none skipped,\nplanned", "planned"),
    "25% skipped, in order, equal time": ("25% skipped", "25%"),
    "50% skipped, equal time": ("50% skipped", "50%"),
}
MISSING = {
    "0% skipped": ("none skipped\nin training", "full"),
    "25% skipped, in order": ("25% skipped", "25%"),
    "50% skipped": ("50% skipped", "50%"),
}


def of_both(found):
    """{label without the rule: runs} of the runs under the rho rule, and of full pipelines, which
    need none."""
    runs = {}
    for label, seeds in results(found["beside"]).items():
        if " 0% skipped" in label:
            runs[label] = seeds
    for label, seeds in results(found).items():
        runs[label.removesuffix(RHO)] = seeds
    return runs


def draw_in_time(plt, found):
    """Loss in DT-FM's time, under the rho rule."""
    runs = of_both(found)
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH, 4.4), sharey=True)
    curves = []
    for axis, stages in zip(axes, STAGES):
        sync = found["beside"]["seconds"][f"{stages} stages"]
        for label, (name, colour) in IN_TIME.items():
            seeds = runs[f"{stages} stages, {label}"]
            step_hours = (seeds[0].curves["simulated_seconds"][0] + sync) / 3600
            x = [step * step_hours for step in seeds[0].steps]
            band(axis, [run.losses for run in seeds], x, COLOURS[colour], label=name)
            curves += [run.losses for run in seeds]
        axis.set(xlabel=f"simulated hours (bands: range of {counted(len(seeds), 'seed')})",
                 title=f"{stages} stages")
    focus(axes[0], curves)
    axes[0].set_ylabel("held-out nats per byte")
    finding = "In equal simulated time half skipped ends lowest, evaluated by our rho rule"
    figure.suptitle(title_of(found, finding, "Loss in equal simulated time"), x=0.01, ha="left")
    for axis in axes:
        label_ends(axis)
    return figure


def draw_missing(plt, found):
    """What missing stages cost each model."""
    runs = of_both(found)
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH, 4.4), sharey=True)
    for axis, stages in zip(axes, STAGES):
        for label, (name, colour) in MISSING.items():
            seeds = runs[f"{stages} stages, {label}"]
            points = []
            for share in ("1.0", "0.75", "0.5"):
                points.append([100 * more for more in missing_over(seeds, share).differences])
            bars(axis, points, (100, 75, 50), COLOURS[colour], label=name)
        axis.set(xlabel=f"% of the stages that run (bars: range of {counted(len(seeds), 'seed')})",
                 xticks=(100, 75, 50), xlim=(103, 47), title=f"{stages} stages")
    axes[0].set_ylabel("perplexity over its own whole model, %")
    finding = "A model trained with skipping bears missing stages; one trained without does not"
    figure.suptitle(title_of(found, finding, "Stages missing after training"), x=0.01, ha="left")
    for axis in axes:
        label_ends(axis)
    return figure


PARTS = {
    "skip": Part(skip_settings, show_skip, record_losses, seconds=all_reduce_seconds_by_stages),
    "scale": Part(scaled_settings, show_scale, record_losses, beside="skip",
                  pictures={"skip": draw_in_time, "skip_missing": draw_missing}),
}

if __name__ == "__main__":
    headline(__doc__, PARTS)
