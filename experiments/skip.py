"""SkipPipe's paths that leave stages out: loss in equal simulated time, and with stages missing at inference.

    python -m experiments.skip [skip scale] [--seeds 0 1 2] [--steps N] [--out DIR] [--plot]

skip        evaluated as in the papers (--unscaled)
scale       the same runs under the rho rule (planning/rho.py), beside those of results/headline_skip.json

8 layers in 4 or 8 stages of two nodes each, spread over the 12 cities of the published instance. Gradients
are averaged at every step, so only the paths differ. 0% skipped is DT-FM's pipeline; "in order" means no
swapped neighbours; "equal time" has as many steps as fit into the full pipeline's time.
"""
import random
import statistics
from dataclasses import replace

from experiments.pictures import COLOURS, WIDTH, kept, label_ends, show_head, show_row
from experiments.runs import (ROOT, Part, Run, band, finals, headline, heldout, mean_model, over, over_runs,
                              published, results, same_seeds, spread_of)
from experiments.together import hours, keep_links, makespan, slowest_all_reduce
from model import Llama
from planning.instance import CITIES, city_delays, city_links
from planning.rho import multiply, some_choices, with_stages_missing
from skippipe import Network
from train import layout

# (share skipped, routing) for each number of stages; the first is the full pipeline
FULL = (0.0, "dtfm")
KINDS = {
    4: (FULL, (0.0, "no-swaps"), (0.25, "skippipe"), (0.25, "no-swaps"), (0.5, "skippipe")),
    8: (FULL, (0.0, "no-swaps"), (0.0, "skippipe"), (0.25, "skippipe"), (0.25, "no-swaps"),
        (0.375, "skippipe"), (0.5, "skippipe")),
}
SCALED = ("25% skipped, in order", "37.5% skipped", "50% skipped")
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
    return Network(city_delays(cities, city_links()), compute, STAGES[stages], 3, 0.13, 0.09), cities


def runs(steps):
    steps = steps or 300
    for stages, kinds in KINDS.items():
        for skip, routing in kinds:
            how = {"no-swaps": ", in order", "skippipe": "" if skip else ", with swaps", "dtfm": ""}
            label = f"{stages} stages, {100 * skip:g}% skipped{how[routing]}"
            if skip or (skip, routing) == FULL:     # a plan that skips nothing gains time only
                yield run(label, stages, skip, routing, steps)
            if (skip, routing) != FULL:
                more = equal_time(steps, stages, skip, routing)
                yield run(f"{label}, equal time", stages, skip, routing, more)


def scaled_runs(steps):
    for run in runs(steps):
        if run.label.split(", ", 1)[1].removesuffix(", equal time") in SCALED:
            yield replace(run, label=f"{run.label} (rho rule)", options=run.options.replace(UNSCALED, ""))


def run(label, stages, skip, routing, steps):
    network, _ = network_of(stages)
    links = keep_links(network, f"headline-links-{stages}.json")
    options = (f"--method ddp --layers 8 --lr 4e-3 --microbatches 6 --batch 2 --links {links} "
               f"--stages {','.join(['2'] * stages)} --routing {routing} --skip {skip:g}"
               f"{UNSCALED * bool(skip)}")
    return Run(label, f"{options} --steps {steps}", 2 * stages, missing_stages)


def equal_time(steps, stages, skip, routing):
    """The steps that fit into the full pipeline's time."""
    network, cities = network_of(stages)
    sync = slowest_all_reduce(network, cities)
    full, ours = (makespan(network, how, share) + sync for share, how in (FULL, (skip, routing)))
    return round(steps * full / ours)


def seconds():
    """{stages: (None: each seed's plan says, seconds of an all-reduce)}"""
    return {f"{stages} stages": (None, slowest_all_reduce(*network_of(stages))) for stages in KINDS}


def missing_stages(folder):
    """Held-out loss of the mean of all replicas with only some of its stages.

    shares: with three shares of the stages (0.5: the paper's case, half of the stages gone).
    """
    o, whole, corpus, rho = mean_model(folder)
    weights = whole.state_dict()
    _, layers = layout(o, sum(o.stages))
    draw = random.Random(0)
    count = len(o.stages)
    losses = {}

    def loss(stages):
        if stages not in losses:
            model = Llama(whole.config, [i for s in stages for i in layers[s]])
            model.load_state_dict({name: weights[name] for name in model.state_dict()})
            raised = with_stages_missing(rho, len(stages))
            for s in stages:
                multiply(raised[s], [model.model.layers[str(i)] for i in layers[s]])
            losses[stages] = heldout(o, model, corpus)
        return losses[stages]

    missing = {}
    for share in (1.0, 0.75, 0.5):
        choices = some_choices(range(1, count), round(share * count) - 1, draw)
        missing[str(share)] = [loss((0, *choice)) for choice in choices]
    return dict(mean=loss(tuple(range(count))), shares=missing)


# ---------------------------------------------------------------- the tables


def losses_without(runs, key):
    """Each seed's held-out loss with stages missing, the mean over all choices of them. key: a share of the
    stages that run."""
    return [statistics.mean(run.shares[key]) for run in runs]


def missing_over(runs, key):
    """Perplexity with stages missing over that of the run's whole model, seed by seed, less 1."""
    return over(losses_without(runs, key), [run.shares["1.0"][0] for run in runs])


def timing(found, run):
    """(seconds of an iteration, of an all-reduce)"""
    _, sync = found["seconds"][f"{len(run.o.stages)} stages"]
    return run.curves["simulated_seconds"][0], sync


def table(found):
    show_head("stages, share skipped | seeds | held-out nats per byte, as the papers do "
              "| over its own whole: 75% of the stages | half")
    for label, seeds in results(found).items():
        show_row(label, len(seeds), spread_of(finals(seeds)),
                 *(spread_of(missing_over(seeds, key), "+.1%") for key in ("0.75", "0.5")))


def scaled_table(found):
    """The rho rule's runs; results/ also has relatives of the rule, which this program no longer runs."""
    theirs = published("skip")
    show_head("stages, share skipped | seeds | held-out nats per byte | as the papers do "
              "| perplexity over that | over a full pipeline's: DT-FM's, in equal time the planned one's "
              "| 75% of the stages, over as the papers do | half")
    for label, seeds in results(found).items():
        plain, rule, _ = label.partition(" (rho rule)")
        if rule:
            same = "0% skipped, in order, equal time" if "equal time" in label else "0% skipped"
            full = theirs[f"{label.split(',')[0]}, {same}"]
            papers = same_seeds(seeds, theirs[plain])
            cells = [over_runs(seeds, papers), over_runs(seeds, full)]
            cells += [over(losses_without(seeds, share), losses_without(papers, share))
                      for share in ("0.75", "0.5")]
            show_row(label, len(seeds), spread_of(finals(seeds)), spread_of(finals(papers)),
                     *(spread_of(cell, "+.1%") for cell in cells))


# ---------------------------------------------------------------- the picture


def draw(plt, found):
    """Above: loss in the planned full pipeline's time. Below: what missing stages cost each model."""
    own, published = results(found), kept(ROOT, "headline_skip")
    theirs = results(published)
    figure, axes = plt.subplots(2, 2, figsize=(WIDTH, 8), layout="constrained", sharey="row")
    for stages, above, below in zip(KINDS, *axes):
        lines = [("0% skipped, in order", "", "all stages,\nplanned", "planned", "-"),
                 ("25% skipped, in order", "", "25% skipped,\nas the papers", "25%", ":"),
                 ("25% skipped, in order", " (rho rule)", "25% skipped,\nrho rule", "25%", "-"),
                 ("50% skipped", "", "50% skipped,\nas the papers", "50%", ":"),
                 ("50% skipped", " (rho rule)", "50% skipped,\nrho rule", "50%", "-")]
        for label, rule, name, colour, dashes in lines:
            seeds = (own if rule else theirs)[f"{stages} stages, {label}, equal time{rule}"]
            x = hours(seeds[0], *timing(published, seeds[0]))
            band(above, [run.losses for run in seeds], x, COLOURS[colour], ls=dashes, label=name)
        above.set(xlabel="simulated hours, all-reduce included", title=f"{stages} stages", ylim=(1.65, 2.4))
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
    figure.suptitle("Half of the stages skipped, under the rho rule, beats the planned full pipeline "
                    "in equal time\n(below: after equal steps; bands: range of three seeds)",
                    fontsize=10.5)
    return figure


if __name__ == "__main__":
    headline(__doc__, {"skip": Part(runs, table, seconds=seconds),
                       "scale": Part(scaled_runs, scaled_table, draw, picture="skip")})
