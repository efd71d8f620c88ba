"""SkipPipe's paths that leave stages out: loss against tokens and simulated time, then with stages
missing at inference.

    python -m experiments.skip [--seeds 0 1 2] [--steps N] [--out DIR] [--plot]

8 layers in 4 or 8 stages of two nodes each, spread over the 12 cities of the published instance;
gradients are averaged at every step, so that what differs is the paths. 0% skipped is DT-FM's pipeline;
"in order" means no swapped neighbours; "equal time": as many steps as fit into the full pipeline's time. All
are evaluated as the papers do; experiments/scale.py has most of them with Eq. 6.
"""
import itertools
import random
import statistics

from experiments.clock import hours, keep_links, makespan, slowest_all_reduce
from experiments.pictures import COLOURS, show_head, show_row
from experiments.runs import (Run, band, finals, headline, heldout, losses, mean_model, over,
                              results, spread_of)
from model import Llama
from planning.instance import CITIES, city_delays, city_links
from planning.rho import multiply, with_stages_missing
from skippipe import Network
from tools.partial import some_choices
from train import layout

# (share skipped, routing) for each number of stages; the first is the full pipeline
FULL = (0.0, "dtfm")
KINDS = {
    4: (FULL, (0.0, "no-swaps"), (0.25, "skippipe"), (0.25, "no-swaps"), (0.5, "skippipe")),
    8: (FULL, (0.0, "no-swaps"), (0.0, "skippipe"), (0.25, "skippipe"), (0.25, "no-swaps"),
        (0.375, "skippipe"), (0.5, "skippipe")),
}
COLOUR = {FULL: 0, (0.0, "no-swaps"): 1, (0.25, "skippipe"): 2, (0.25, "no-swaps"): 3,
          (0.375, "skippipe"): 4, (0.5, "skippipe"): 5, (0.0, "skippipe"): 6}

UNSCALED = " --unscaled"

# The nodes of each stage, as `assign_stages` found them for the full pipeline. Pinned, so that the tables can
# be made again: with the simulator's ties as they are now its search ends elsewhere (8 stages: an all-reduce
# of 19.9 s for 24.2 s).
STAGES = {
    4: [[0, 4], [2, 7], [1, 5], [3, 6]],
    8: [[0, 11], [1, 12], [9, 15], [10, 13], [3, 7], [2, 5], [6, 8], [4, 14]],
}


def kind(o):
    return o.skip, o.routing


def name(skip, routing):
    how = {"no-swaps": ", in order", "skippipe": "" if skip else ", with swaps", "dtfm": ""}
    return f"{100 * skip:g}% skipped{how[routing]}"


def network_of(stages):
    """Two nodes a stage: (Network, cities)."""
    cities = (CITIES * 2)[:2 * stages]
    compute = [0.44 * 6 / stages] * 2 * stages          # the published instance cuts the model in 6
    return Network(city_delays(cities, city_links()), compute, STAGES[stages], 3, 0.13, 0.09), cities


def runs(steps):
    steps = steps or 300
    for stages, kinds in KINDS.items():
        for skip, routing in kinds:
            label = f"{stages} stages, {name(skip, routing)}"
            if skip or (skip, routing) == FULL:     # a plan that skips nothing: what it gains is time
                yield run(label, stages, skip, routing, steps)
            if (skip, routing) != FULL:
                more = equal_time(steps, stages, [(skip, routing)])
                yield run(f"{label}, equal time", stages, skip, routing, more)


def run(label, stages, skip, routing, steps):
    network, _ = network_of(stages)
    links = keep_links(network, f"headline-links-{stages}.json")
    options = (f"--method ddp --layers 8 --lr 4e-3 --microbatches 6 --batch 2 --links {links} "
               f"--stages {','.join(['2'] * stages)} --routing {routing} --skip {skip:g}"
               f"{UNSCALED * bool(skip)}")
    return Run(label, f"{options} --steps {steps}", 2 * stages, missing_stages)


def equal_time(steps, stages, kinds):
    """The steps that fit into the full pipeline's time, each of these kinds having as many of them."""
    network, cities = network_of(stages)
    sync = slowest_all_reduce(network, cities)
    full, *ours = (makespan(network, routing, skip) + sync for skip, routing in (FULL, *kinds))
    return round(steps * full / statistics.mean(ours))


def seconds():
    """{stages: (None: each seed's plan says, seconds of an all-reduce)}"""
    return {f"{stages} stages": (None, slowest_all_reduce(*network_of(stages))) for stages in KINDS}


def missing_stages(folder):
    """Held-out loss of the mean of all replicas with only some of its stages: of three shares of them (0.5:
    the paper's case, half of the stages gone), and of what is left when half of the later stages' nodes are
    dead, where a stage is there while one of its two nodes is."""
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

    def survivors():
        nodes = [s for s in range(1, count) for _ in range(o.stages[s])]
        return (0, *sorted(set(draw.sample(nodes, len(nodes) - len(nodes) // 2))))

    missing = {}
    for share in (1.0, 0.75, 0.5):
        choices = some_choices(range(1, count), round(share * count) - 1, draw)
        missing[str(share)] = [loss((0, *choice)) for choice in choices]
    return dict(mean=loss(tuple(range(count))), shares=missing, dead=[loss(survivors()) for _ in range(16)])


# ---------------------------------------------------------------- the table


def full_beside(runs, seeds):
    """The full pipeline's runs on as many stages."""
    stages = seeds[0].o.stages
    return next(rows for rows in runs.values() if kind(rows[0].o) == FULL and rows[0].o.stages == stages)


def losses_without(runs, key):
    """Each seed's held-out loss with stages missing, over all choices of them. key: a share of them that
    runs, or "dead"."""
    return [statistics.mean(run.dead if key == "dead" else run.shares[key]) for run in runs]


def missing_over(runs, whole, key):
    """Perplexity with stages missing over that of the other run's whole model, seed by seed, less 1."""
    return over(losses_without(runs, key), [run.shares["1.0"][0] for run in whole])


def timing(found, run):
    """(seconds of an iteration, of an all-reduce)"""
    _, sync = found["seconds"][f"{len(run.o.stages)} stages"]
    return run.curves["simulated_seconds"][0], sync


def table(found):
    show_head("stages, share skipped | seeds | held-out nats per byte "
              "| simulated s per iteration + all-reduce "
              "| perplexity over its own whole: 75% of the stages | half of the stages gone "
              "| half of the nodes dead "
              "| perplexity over the full pipeline's whole: whole | 75% | half gone")
    runs = results(found)
    for label, seeds in runs.items():
        base = full_beside(runs, seeds)
        times = [timing(found, run) for run in seeds]
        iteration, sync = statistics.mean(t[0] for t in times), times[0][1]
        cells = [missing_over(seeds, seeds, key) for key in ("0.75", "0.5", "dead")]
        cells += [missing_over(seeds, base, key) for key in ("1.0", "0.75", "0.5")]
        show_row(label, len(seeds), spread_of(finals(seeds)), f"{iteration:.1f} + {sync:.1f}",
                 *(spread_of(cell, "+.1%") for cell in cells))


# ---------------------------------------------------------------- the picture


def draw(plt, found):
    """Against time: the runs that end when the full pipeline does. Missing stages: the runs of as many
    microbatches."""
    runs = results(found)
    figure, axes = plt.subplot_mosaic([["time4", "time8", "half"], ["part4", "part8", "half"]],
                                      figsize=(14, 8), layout="constrained")
    place = itertools.count()
    for label, seeds in runs.items():
        base = full_beside(runs, seeds)
        o, stages = seeds[0].o, len(seeds[0].o.stages)
        colour = COLOURS[COLOUR[kind(o)]]
        equal_time = o.steps != base[0].o.steps
        whole = seeds is base
        if whole or equal_time:
            x = hours(seeds[0], *timing(found, seeds[0]))
            title = name(*kind(o)) + ", DT-FM's order" * whole
            band(axes[f"time{stages}"], losses(seeds), x, title, colour)
        if not equal_time:
            draw_shares(axes[f"part{stages}"], seeds, base, colour)
            draw_half(axes["half"], seeds, -next(place), label.replace(" skipped", ""), colour)
    for stages in KINDS:
        time, part = axes[f"time{stages}"], axes[f"part{stages}"]
        time.set(xlabel="simulated hours, gradients averaged at every step",
                 ylabel="held-out nats per byte, whole model",
                 title=f"{stages} stages of two nodes, the 500M model's messages")
        part.set(xlabel="% of the stages that run", xticks=(100, 75, 50),
                 ylabel="perplexity over the full pipeline's whole model, %",
                 title=f"some stages missing, {stages} stages")
        part.invert_xaxis()
        time.legend()
        part.legend()
    axes["half"].axvline(100 * (1.07 ** 0.25 - 1), color="black", ls=":", lw=0.8)
    axes["half"].set(xlabel="perplexity per byte over its own whole, %",
                     title="half of the stages gone (dotted: the paper)")
    return figure


def draw_half(axis, seeds, place, label, colour):
    """Every choice of the stages that are left."""
    more = [over(run.shares["0.5"], run.shares["1.0"] * len(run.shares["0.5"])) for run in seeds]
    axis.boxplot([[100 * x for row in more for x in row]], positions=[place], widths=0.6,
                 orientation="horizontal", medianprops=dict(color=colour, lw=2), tick_labels=[label])


def draw_shares(axis, seeds, base, colour):
    o = seeds[0].o
    shares = list(seeds[0].shares)
    columns = [[100 * x for x in missing_over(seeds, base, share)] for share in shares]
    mean = [statistics.mean(v) for v in columns]
    errors = [[m - min(v) for m, v in zip(mean, columns)], [max(v) - m for m, v in zip(mean, columns)]]
    at = [100 * float(share) - COLOUR[kind(o)] / 2 for share in shares]         # a little apart
    axis.errorbar(at, mean, errors, marker="o", capsize=3, label=name(*kind(o)), color=colour)


if __name__ == "__main__":
    headline("skip", __doc__, runs, table, draw, seconds)
