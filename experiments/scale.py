"""What the scale of Eq. 6 (skippipe.py) does to the runs of experiments/skip.py, seed by seed.

    python -m experiments.scale [--seeds 0 1 2] [--steps N] [--out DIR] [--plot]

The same plans, network and steps, with --scaled; what they are set beside is read from
results/headline_skip.json, not run again. 25% skipped in order has every seed, 50% the first.
"""
from dataclasses import replace

from experiments import skip
from experiments.pictures import show_head, show_row
from experiments.runs import finals, headline, over, over_runs, published, results, same_seeds, spread_of

SKIPPED = {"25% skipped, in order": False, "50% skipped": True}         # with the first seed only


def runs(steps):
    for run in skip.runs(steps):
        for name, first in SKIPPED.items():
            if run.label.removesuffix(", equal time").endswith(f" {name}"):
                yield replace(run, options=f"{run.options} --scaled", first=first)


def table(found):
    unscaled = published("skip")
    show_head("stages, share skipped | seeds | held-out nats per byte, scaled | unscaled "
              "| perplexity over the unscaled | over the planned full pipeline's, equal time "
              "| 75% of the stages, over the unscaled's | half")
    for label, seeds in results(found).items():
        plain = same_seeds(seeds, unscaled[label])
        full = unscaled[f"{label.split(',')[0]}, 0% skipped, in order, equal time"]
        missing = [over(skip.losses_without(seeds, share), skip.losses_without(plain, share))
                   for share in ("0.75", "0.5")]
        cells = [over_runs(seeds, plain), over_runs(seeds, full), *missing]
        to_plain, to_full, *left_out = [spread_of(cell, "+.1%") for cell in cells]
        show_row(label, len(seeds), spread_of(finals(seeds)), spread_of(finals(plain)), to_plain,
                 to_full if label.endswith("equal time") else "", *left_out)


if __name__ == "__main__":
    headline("scale", __doc__, runs, table)
