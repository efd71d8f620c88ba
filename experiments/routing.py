"""Random routing and the weight spread of the replicas: Figs. 3B and 4 of arXiv 2506.10911.

    python -m experiments.routing [--scale try|plot|full] [--plot]

full: 70 minutes of two cores. 4 replicas of 2 stages; "never" has no outer step, NoLoCo one every
10 steps. Losses are the mean over the replicas, which still differ.
"""
import statistics

from experiments.harness import Row, Setting, command, run_all
from experiments.pictures import COLOURS, WIDTH, aside, bars, counted, frame
from experiments.tables import (Comparison, Expected, Table, mean_final, over_runs, results,
                                same_seeds, sure)

LEARN = "--layers 2 --lr 6e-3 --batch 8 --microbatches 2"
WORDS = {"NoLoCo": "NoLoCo", "local": "never averaged"}
METHODS = {"NoLoCo": "--method noloco --inner-steps 10", "local": "--method local"}
SCALES = {      # (options, processes, seeds)
    # without what never averages: it would take as many processes again
    "try": ("--stages 2,2 --warmup 2 --steps 12 --eval-every 4 --eval-sequences 8 --batch 1", 4,
            (0,)),
    "plot": ("--stages 4,4 --warmup 20 --steps 100 --eval-every 50 --eval-sequences 64", 8, (0,)),
    "full": ("--stages 4,4 --warmup 50 --steps 600 --eval-every 100", 8, (0, 1, 2)),
}


def settings(scale):
    options, processes, _ = SCALES[scale]
    for name, method in METHODS.items():
        if scale == "try" and name == "local":
            continue
        for routing in "random", "fixed":
            yield Setting(f"4x2 {name}, {routing} routing",
                          f"{LEARN} {options} {method} --routing {routing}", processes)


def measure(o):
    return run_all("routing", settings(o.scale), SCALES[o.scale][2], o)


# ---------------------------------------------------------------- what was found


def pairs(found):
    """{method: (runs with random routing, with fixed)}"""
    runs = results(found)
    return {name: (runs[f"4x2 {name}, random routing"], runs[f"4x2 {name}, fixed routing"])
            for name in METHODS if f"4x2 {name}, fixed routing" in runs}


def spread_over(runs, others, at=-1):
    """The weight spread over the others', seed by seed, less 1. at: which evaluation."""
    ratios = []
    for run, other in zip(runs, same_seeds(runs, others)):
        ratios.append(run.curves["weight_spread"][at] / other.curves["weight_spread"][at] - 1)
    return Comparison(ratios, "+.1%")


def spread_follows_rate(runs):
    """Pearson's correlation of the weight spread with the learning rate after the warm-up, the mean
    over the seeds; None with too few evaluations."""
    found = []
    for run in runs:
        spread, rate = run.curves["weight_spread"], run.curves["lr"]
        top = rate.index(max(rate))
        if len(rate) - top < 4:
            return None
        found.append(statistics.correlation(spread[top:], rate[top:]))
    return statistics.mean(found)


def times_noloco(found):
    """The weight spread without outer steps over NoLoCo's, with random routing (Fig. 4); None
    where NoLoCo's alone is there."""
    by_method = pairs(found)
    if "local" not in by_method:
        return None
    return spread_over(by_method["local"][0], by_method["NoLoCo"][0]).mean + 1


def show(found):
    table = Table("random routing over fixed", "loss, nats per byte", "perplexity",
                  "weight spread at the end")
    for name, (random, fixed) in pairs(found).items():
        table.add(WORDS[name], mean_final(random), over_runs(random, fixed),
                  spread_over(random, fixed))
    table.end()
    follows = spread_follows_rate(pairs(found)["NoLoCo"][0])
    if follows is not None:
        print("* NoLoCo's weight spread and the learning rate: correlation "
              f"{follows:.2f} (Fig. 3B)")
    times = times_noloco(found)
    if times is not None:
        print(f"* The spread without outer steps is {times:.0f} times NoLoCo's (Fig. 4)\n")


def draw(plt, found):
    """The weight spread with random routing over that with fixed, along the training (Fig. 4)."""
    figure, axis = plt.subplots(figsize=(WIDTH, 3.8))
    axis.axhline(0, color="#000000", lw=1)
    for place, (name, (random, fixed)) in enumerate(pairs(found).items()):
        steps = random[0].steps
        ratios = [spread_over(random, fixed, at) for at in range(len(steps))]
        bars(axis, aside(steps, place), ratios, COLOURS[name], label=WORDS[name].replace(" ", "\n"))
    axis.set(xlabel="steps", ylabel="weight spread,\nrandom over fixed routing, %")
    ends = [spread_over(*both) for both in pairs(found).values()]
    verb = "lowers" if sure(ends)[-1] else "may lower"
    seeds = counted(len(next(iter(found["runs"].values()))), "seed")
    frame(figure, found, f"Random routing {verb} the spread, by {-ends[-1].mean:.0%} without "
          "outer steps",
          "The weight spread with random over fixed routing", f"4 replicas of 2 stages; never "
          f"averaged as in the NoLoCo paper's Fig. 4, or NoLoCo every 10 steps, just after an "
          f"outer step. {seeds}, bars: 95% intervals.")
    return figure


# {scale: (expected, at most so much off)}. In the 100 steps of a plot the spread is not lower yet.
NUMBERS = {
    "spread": dict(full=(-0.088, 0.03), plot=(0.05, 0.1)),
    "rate": dict(full=(0.9, 0.1)),
    "never": dict(full=(104, 30), plot=(23, 10)),
}


def expected(found):
    def one(key, text, number, form):
        known = NUMBERS[key].get(found["scale"])
        return Expected(text, number, *(known or (0, 0)), form, judged=known is not None)

    by_method = pairs(found)
    without = by_method.get("local")
    return [
        one("spread", "weight spread, random over fixed routing, without outer steps (paper: -10 "
            "to -15%)", without and spread_over(*without).mean,
            "+.1%"),
        one("rate", "NoLoCo's weight spread and the learning rate, correlation (Fig. 3B; paper: "
            "0.91 to 0.97)", spread_follows_rate(by_method["NoLoCo"][0]), ".2f"),
        one("never", "weight spread, never over NoLoCo (Fig. 4)", times_noloco(found), ".0f"),
    ]


ROW = Row("routing", measure, show, {"routing": draw}, expected)

if __name__ == "__main__":
    command(__doc__, ROW)
