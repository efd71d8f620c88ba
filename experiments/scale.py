"""What the scale of Eq. 6 (skippipe.py) does to the runs of experiments/skip.py, seed by seed.

    python -m experiments.scale [--seeds 0 1 2] [--steps N] [--out DIR] [--plot]

The same plans, network and steps, with --scaled; what they are set beside is read from
results/headline_skip.json, not run again. 25% skipped in order has every seed, 50% the first.
"""
import json
from dataclasses import replace

from experiments import skip
from experiments.runs import ROOT, finals, headline, over, results, same_seeds, spread_of

SKIPPED = {"25% skipped, in order": False, "50% skipped": True}         # with the first seed only


def runs(steps):
    for run in skip.runs(steps):
        for name, first in SKIPPED.items():
            if run.label.removesuffix(", equal time").endswith(f" {name}"):
                yield replace(run, options=f"{run.options} --scaled", first=first)


def table(found):
    unscaled = results(json.loads((ROOT / "results" / "headline_skip.json").read_text()))
    print("| stages, share skipped | seeds | held-out nats per byte, scaled | unscaled "
          "| perplexity over the unscaled | over the planned full pipeline's, equal time "
          "| 75% of the stages, over the unscaled's | half |\n" + 8 * "|---" + "|")
    for label, seeds in results(found).items():
        plain = same_seeds(seeds, unscaled[label])
        full = same_seeds(seeds, unscaled[f"{label.split(',')[0]}, 0% skipped, in order, equal time"])
        missing = [over(left(seeds, share), left(plain, share)) for share in ("0.75", "0.5")]
        to_plain, to_full, *left_out = [
            spread_of(cell, "+.1%") for cell in (over(finals(seeds), finals(plain)),
                                                 over(finals(seeds), finals(full)), *missing)]
        print(f"| {label} | {len(seeds)} | {spread_of(finals(seeds))} | {spread_of(finals(plain))}", to_plain,
              to_full if label.endswith("equal time") else "", *left_out, "", sep=" | ")


def left(seeds, share):
    """Each seed's held-out loss with this share of the stages, over all choices of them."""
    return [sum(run.shares[share]) / len(run.shares[share]) for run in seeds]


if __name__ == "__main__":
    headline("scale", __doc__, runs, table)
