"""Fragments: the weights meet in K parts by turns, beside whole messages (experiments/fleet.py).

    python -m experiments.fragments [--seeds 0] [--steps N] [--out DIR] [--plot]

8 replicas, plain averages, Adam with the rate of experiments/replicas.py, which was tuned for whole
messages. m: steps between an outer step and the next of the same weights; K: fragments; D: delay.
PRIMARY holds the comparisons that were named before the runs.
"""
import statistics

from experiments.comparing import Table
from experiments.fleet import Trial
from experiments.harness import Part, headline
from experiments.replicas import (DDP, SEQUENCES, by_trial, gap, has_all_fleets, mean_loss,
                                  merged_loss, nats_over, train_all)

TRIALS = {
    "DDP": DDP,
    "NoLoCo, m 10": Trial("noloco", 10),
    "NoLoCo, m 10, K 10": Trial("noloco", 10, fragments=10),
    "NoLoCo, m 10, D 5": Trial("noloco", 10, 5),
    "NoLoCo, m 10, K 10, D 1": Trial("noloco", 10, 1, fragments=10),
    "DiLoCo, m 20, K 20": Trial("diloco", 20, fragments=20),
    "NoLoCo, m 2, K 2": Trial("noloco", 2, fragments=2),
    "DiLoCo, m 4, K 4": Trial("diloco", 4, fragments=4),
}
PRIMARY = (
    ("NoLoCo, m 10, K 10", "NoLoCo, m 10"),
    ("NoLoCo, m 10, K 10, D 1", "NoLoCo, m 10, D 5"),
    ("NoLoCo, m 10, K 10", "DiLoCo, m 20, K 20"),
    ("NoLoCo, m 2, K 2", "DiLoCo, m 4, K 4"),
)


def fragments_fleets(steps):
    """(optimizer, replicas, sequences, steps, trials, seeds at most) of each."""
    yield "adam", 8, SEQUENCES, steps or 600, TRIALS.values(), None


def show_fragments(found):
    trials = by_trial(found)["adam", 8]
    table = Table("8 replicas, Adam, fp32", "merged, nats per byte", "replicas' mean",
                  "merged, over DDP's")
    for name, trial in TRIALS.items():
        rows = trials[trial].values()
        table.add(name, f"{statistics.mean(map(merged_loss, rows)):.3f}",
                  f"{statistics.mean(map(mean_loss, rows)):.3f}",
                  None if trial == DDP else gap(trials, trial))
    table.end()
    table = Table("primary comparison", "merged, nats per byte", "replicas' mean")
    for name, base in PRIMARY:
        pair = TRIALS[name], TRIALS[base]
        table.add(f"{name} over {base}", nats_over(trials, *pair, merged_loss),
                  nats_over(trials, *pair, mean_loss))
    table.end()


PARTS = {"fragments": Part(fragments_fleets, show_fragments, None, {}, measure=train_all,
                           is_whole=has_all_fleets)}

if __name__ == "__main__":
    headline(__doc__, PARTS)
