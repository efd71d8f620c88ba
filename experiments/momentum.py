"""The papers' own outer step on a language model, Eq. 2 with its momentum, and what each term of it does.

    python -m experiments.momentum [--seeds 0 1 2] [--steps N] [--out DIR] [--plot]

8 replicas of one stage, 800 steps, beside the plain averages of experiments/tuning.py, which are read, not
run again. Of the rates the first is the best one and gets every seed, the others the first seed. Each
ablation strikes a term of Eq. 2 and changes nothing else: alpha = 0 is without momentum, gamma = 0 without
the pull between slow weights.
"""
import statistics

from experiments.pictures import show_head, show_row
from experiments.runs import Run, finals, headline, mean_of_replicas, over, published, results, spread_of
from experiments.tuning import options

NOLOCO = "noloco --inner-steps 10 --alpha 0.5 --beta 0.7"
PAPERS = {
    "NoLoCo, every 10 steps": (NOLOCO, "6e-3", "3e-3"),
    "NoLoCo, every 50 steps": ("noloco --inner-steps 50 --alpha 0.5 --beta 0.7", "3e-3", "6e-3"),
    "DiLoCo, every 20 steps": ("diloco --inner-steps 20 --alpha 0.3 --beta 0.7", "6e-3", "3e-3"),
    "DiLoCo, every 100 steps": ("diloco --inner-steps 100 --alpha 0.3 --beta 0.7", "3e-3", "6e-3"),
}
STRUCK = {
    "without the third term (gamma 0)": f"{NOLOCO} --gamma 0",
    "without momentum (alpha 0)": f"{NOLOCO} --alpha 0",
    "without both": f"{NOLOCO} --alpha 0 --gamma 0",
    "groups of 4": f"{NOLOCO} --group-size 4",
    "a group of all": f"{NOLOCO} --group-size 8",
}
PLAIN = ("DDP, rate 6e-3", "DiLoCo, rate 6e-3, alpha 0, beta 1.0", "NoLoCo, rate 4e-3, alpha 0, beta 1.0",
         "NoLoCo, rate 6e-3, alpha 0, beta 1.0")


def runs(steps):
    def run(label, method, rate, first=False):
        return Run(f"{label}, rate {rate}", options(steps or 800, method, rate), after=mean_of_replicas,
                   first=first)

    for label, (method, best, *others) in PAPERS.items():
        yield run(label, method, best)
        for rate in others:
            yield run(label, method, rate, first=True)
    for label, method in STRUCK.items():
        yield run(f"NoLoCo, every 10 steps, {label}", method, PAPERS["NoLoCo, every 10 steps"][1])


def plain():
    """{label: [a Result per seed]} of the tuning."""
    found = published("tuning")
    return {label: found[label] for label in PLAIN}


def table(found):
    runs = {**plain(), **results(found)}
    base = finals(runs["DDP, rate 6e-3"])
    show_head("outer step | seeds | held-out nats per byte | perplexity over DDP's | ... of the mean of all "
              "replicas | weight spread at the end | MB sent per rank to synchronise")
    for label, seeds in runs.items():
        each = spread_of(over(finals(seeds), base), "+.1%")
        own = hasattr(seeds[0], "mean")
        mean = spread_of(over([run.mean for run in seeds], base), "+.1%") if own else ""
        spread = statistics.mean(run.curves["weight_spread"][-1] for run in seeds)
        show_row(label, len(seeds), spread_of(finals(seeds)), each, mean, f"{spread:.1e}",
                 f"{seeds[0].sent:.0f}")


if __name__ == "__main__":
    headline("momentum", __doc__, runs, table)
