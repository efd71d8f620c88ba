"""SkipPipe's paths that leave stages out: loss in equal simulated time, and with stages missing at inference.

    python -m experiments.skip [skip scale] [--seeds 0 1 2] [--steps N] [--out DIR] [--plot]

skip        evaluated as in the papers (--unscaled)
scale       the same runs under the rho rule (planning/rho.py), beside those of results/headline_skip.json

8 layers in 4 or 8 stages of two nodes each, spread over the 12 cities of the published instance. Gradients
are averaged at every step, so only the paths differ. "In order" means no swapped neighbours. 0% skipped is
DT-FM's pipeline; 0% skipped, in order, is the planned one. "Equal time" has as many steps as fit into DT-FM's
time.
"""
import itertools
import json
import statistics
import subprocess
from dataclasses import replace

import train
from experiments.pictures import COLOURS, WIDTH, kept, label_ends, show_head, show_row
from experiments.runs import (ROOT, Part, Run, band, finals, headline, over, over_runs, published, results,
                              same_seeds, spread_of, torchrun)
from experiments.together import MICROBATCHES, keep_links, makespan, slowest_all_reduce
from planning.instance import CITIES, city_delays, city_links
from skippipe import Network

FULL = (0.0, "dtfm")
KINDS = FULL, (0.0, "no-swaps"), (0.25, "no-swaps"), (0.5, "skippipe")      # (share skipped, routing)
UNSCALED = " --unscaled"
# The nodes of each stage, as `assign_stages` found them for the full pipeline. Pinned, so that the tables can
# be made again.
STAGES = {
    4: [[0, 4], [2, 7], [1, 5], [3, 6]],
    8: [[0, 11], [1, 12], [9, 15], [10, 13], [3, 7], [2, 5], [6, 8], [4, 14]],
}


def network_of(stages):
    """Two nodes a stage: (Network, cities)."""
    cities = (CITIES * 2)[:2 * stages]
    compute = [0.44 * 6 / stages] * 2 * stages          # the published instance cuts the model in 6
    delay = city_delays(cities, city_links())
    return Network(delay, compute, STAGES[stages], memory=3, overhead=0.13, origin_overhead=0.09), cities


def runs(steps):
    steps = steps or 300
    for stages, (skip, routing) in itertools.product(STAGES, KINDS):
        label = f"{stages} stages, {100 * skip:g}% skipped" + ", in order" * (routing == "no-swaps")
        if skip or (skip, routing) == FULL:         # a plan that skips nothing gains time only
            yield run(label, stages, skip, routing, steps)
        if (skip, routing) != FULL:
            more = equal_time(steps, stages, skip, routing)
            yield run(f"{label}, equal time", stages, skip, routing, more)


def scaled_runs(steps):
    for one in runs(steps):
        if UNSCALED in one.options:
            yield replace(one, label=f"{one.label} (rho rule)", options=one.options.replace(UNSCALED, ""))


def run(label, stages, skip, routing, steps):
    links = keep_links(network_of(stages)[0], f"headline-links-{stages}.json")
    options = (f"--method ddp --layers 8 --lr 4e-3 --microbatches {MICROBATCHES} --batch 2 --links {links} "
               f"--stages {','.join(['2'] * stages)} --routing {routing} --skip {skip:g}"
               f"{UNSCALED * bool(skip)}")
    return Run(label, f"{options} --steps {steps}", 2 * stages, missing_stages)


def equal_time(steps, stages, skip, routing):
    """The steps that fit into DT-FM's time."""
    network, cities = network_of(stages)
    sync = slowest_all_reduce(network, cities)
    full, ours = (makespan(network, how, share) + sync for share, how in (FULL, (skip, routing)))
    return round(steps * full / ours)


def seconds():
    """{stages: seconds of an all-reduce}"""
    return {f"{stages} stages": slowest_all_reduce(*network_of(stages)) for stages in STAGES}


def missing_stages(folder):
    """{"shares": {share of the stages: [held-out loss of each choice of so many]}} of the last checkpoint.

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
    """Each seed's held-out loss with stages missing, the mean over all choices of them. key: a share of the
    stages that run."""
    return [statistics.mean(run.shares[key]) for run in runs]


def missing_over(runs, key):
    """Perplexity with stages missing over that of the run's whole model, seed by seed, less 1."""
    return over(losses_without(runs, key), [run.shares["1.0"][0] for run in runs])


def table(found):
    show_head("stages, share skipped | held-out nats per byte, as the papers do "
              "| over its own whole: 75% of the stages | half")
    for label, seeds in results(found).items():
        show_row(label, spread_of(finals(seeds)),
                 *(spread_of(missing_over(seeds, key), "+.1%") for key in ("0.75", "0.5")))


def scaled_table(found):
    """The same weights, evaluated under the rho rule."""
    theirs = published("skip")
    show_head("stages, share skipped | held-out nats per byte | as the papers do "
              "| perplexity over that | over a full pipeline's: DT-FM's, in equal time the planned one's "
              "| 75% of the stages, over as the papers do | half")
    for label, seeds in results(found).items():
        same = "0% skipped, in order, equal time" if "equal time" in label else "0% skipped"
        full = theirs[f"{label.split(',')[0]}, {same}"]
        papers = same_seeds(seeds, theirs[label.removesuffix(" (rho rule)")])
        cells = [over_runs(seeds, papers), over_runs(seeds, full)]
        cells += [over(losses_without(seeds, share), losses_without(papers, share))
                  for share in ("0.75", "0.5")]
        show_row(label, spread_of(finals(seeds)), spread_of(finals(papers)),
                 *(spread_of(cell, "+.1%") for cell in cells))


# ---------------------------------------------------------------- the picture


def draw(plt, found):
    """Above: loss in DT-FM's time. Below: what missing stages cost each model."""
    own, papers = results(found), kept(ROOT, "headline_skip")
    theirs = results(papers)
    figure, axes = plt.subplots(2, 2, figsize=(WIDTH, 8), sharey="row")
    for stages, above, below in zip(STAGES, *axes):
        sync = papers["seconds"][f"{stages} stages"]
        lines = [("0% skipped, in order", "", "all stages,\nplanned", "planned", "-"),
                 ("25% skipped, in order", "", "25% skipped,\nas the papers", "25%", ":"),
                 ("25% skipped, in order", " (rho rule)", "25% skipped,\nrho rule", "25%", "-"),
                 ("50% skipped", "", "50% skipped,\nas the papers", "50%", ":"),
                 ("50% skipped", " (rho rule)", "50% skipped,\nrho rule", "50%", "-")]
        for label, rule, name, colour, dashes in lines:
            seeds = (own if rule else theirs)[f"{stages} stages, {label}, equal time{rule}"]
            step_hours = (seeds[0].curves["simulated_seconds"][0] + sync) / 3600
            x = [step * step_hours for step in seeds[0].steps]
            band(above, [run.losses for run in seeds], x, COLOURS[colour], ls=dashes, label=name)
        above.set(xlabel="simulated hours, all-reduce included", title=f"{stages} stages", ylim=(1.6, 2.4))
        missing = [(theirs[f"{stages} stages, 0% skipped"], "none skipped", "full")]
        missing += [(own[f"{stages} stages, {label} (rho rule)"], f"{label[:3]} skipped", label[:3])
                    for label in ("25% skipped, in order", "50% skipped")]
        for seeds, name, colour in missing:
            columns = [missing_over(seeds, share) for share in ("1.0", "0.75", "0.5")]
            curves = [[100 * x for x in row] for row in zip(*columns)]
            band(below, curves, (100, 75, 50), COLOURS[colour], marker="o", label=name)
        below.set(xlabel="% of the stages that run", xticks=(100, 75, 50), xlim=(103, 47), ylim=(-3, 62))
    axes[0, 0].set_ylabel("held-out nats per byte, whole model")
    axes[1, 0].set(ylabel="perplexity over its own whole model, %",
                   title="Trained with skipping (rho rule)\na model bears missing stages")
    label_ends(axes[0, 1], gap=0.055)
    label_ends(axes[1, 1])
    figure.suptitle("In equal time half skipped, under the rho rule, is better than the planned full "
                    "pipeline\n(below: after equal steps; bands: range of five seeds)", fontsize=10.5)
    return figure


if __name__ == "__main__":
    headline(__doc__, {"skip": Part(runs, table, seconds=seconds),
                       "scale": Part(scaled_runs, scaled_table, draw, picture="skip")})
