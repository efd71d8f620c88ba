"""Random routing and the weight spread of the replicas: Figs. 3B and 4 of arXiv 2506.10911.

    python -m experiments.routing [--scale try|plot|full] [--plot]

full: an hour of two cores. 4 replicas of 2 stages; "never averaged" has no outer step, NoLoCo one
every 10 steps. Losses are the mean over the replicas, as in the paper. Named before the runs: the
spread without outer steps, random compared with fixed routing.
"""
import functools
import itertools
import statistics

from experiments.harness import Row, Run, command, curves, make_runs
from experiments.pictures import COLOURS, WIDTH, curve, frame, legend
from experiments.stats import (Expected, Table, mean, paired, perplexity, ratio, significant,
                               those)

LEARN = "--layers 2 --lr 6e-3 --batch 8 --microbatches 2"
METHODS = {     # method: (its name, options)
    "NoLoCo": ("NoLoCo", "--method noloco --inner-steps 10"),
    "local": ("never averaged", "--method local"),
}
SCALES = {      # (options, processes, methods, seeds)
    "try": ("--stages 2,2 --warmup 2 --steps 12 --eval-every 4 --eval-sequences 8 --batch 1", 4,
            ("NoLoCo",), (0,)),
    "plot": ("--stages 4,4 --warmup 20 --steps 100 --eval-every 50 --eval-sequences 64", 8,
             tuple(METHODS), (0,)),
    "full": ("--stages 4,4 --warmup 50 --steps 600 --eval-every 100", 8, tuple(METHODS), range(5)),
}
# Of each record: lists with a number for each evaluation.
read_curves = functools.partial(curves, at="step", spreads="weight_spread", rates="lr")


def wanted(scale):
    options, processes, methods, seeds = SCALES[scale]
    runs = []
    for seed, method, routing in itertools.product(seeds, methods, ("random", "fixed")):
        facts = dict(method=method, routing=routing, seed=seed)
        of_method = METHODS[method][1]
        runs.append(Run(facts, f"{LEARN} {options} {of_method} --routing {routing}", processes,
                        after=read_curves))
    return runs


def measure(o):
    make_runs("routing", wanted(o.scale), o)


# ---------------------------------------------------------------- what was found


def last_spread(record):
    return record["spreads"][-1]


def random_over_fixed(records, method, key, how):
    """The Comparison of the two kinds of routing; None without such runs."""
    random = dict(method=method, routing="random")
    fixed = dict(method=method, routing="fixed")
    return paired(records, random, fixed, key, how)


def follows_rate(records):
    """Pearson's correlation of NoLoCo's weight spread with the learning rate after the warm-up, the
    mean over the seeds; None with too few evaluations."""
    found = []
    for record in those(records, method="NoLoCo", routing="random"):
        spreads, rates = record["spreads"], record["rates"]
        top = rates.index(max(rates))
        if len(rates) - top < 4:
            return None
        found.append(statistics.correlation(spreads[top:], rates[top:]))
    return statistics.mean(found)


def times_noloco(records):
    """The weight spread without outer steps over NoLoCo's, with random routing (Fig. 4); None
    if one was not run."""
    never = dict(method="local", routing="random")
    more = paired(records, never, dict(method="NoLoCo", routing="random"), last_spread, ratio)
    return more and more.mean + 1


def show(found):
    records = found["records"]
    table = Table("random compared with fixed routing", "loss, nats per byte", "perplexity",
                  "weight spread at the end")
    for method, (name, _) in METHODS.items():
        if those(records, method=method):
            table.add(name, mean(records, dict(method=method, routing="random"), "mean"),
                      random_over_fixed(records, method, "mean", perplexity),
                      random_over_fixed(records, method, last_spread, ratio))
    table.end()
    follows, times = follows_rate(records), times_noloco(records)
    if follows is not None:
        print("* NoLoCo's weight spread and the learning rate: correlation "
              f"{follows:.2f} (Fig. 3B)")
    if times is not None:
        print(f"* The spread without outer steps is {times:.0f} times NoLoCo's (Fig. 4)\n")


def draw(plt, found):
    """The weight spread with random routing over that with fixed, along the training (Fig. 4)."""
    records, ends = found["records"], []
    figure, axis = plt.subplots(figsize=(WIDTH, 3.6))
    axis.axhline(0, color="#000000", lw=1)
    for method, (name, _) in METHODS.items():
        runs, points = those(records, method=method), {}
        if not runs:
            continue
        for number, step in enumerate(runs[0]["at"]):
            spread = spread_at(number)
            points[step] = random_over_fixed(records, method, spread, ratio)
        curve(axis, points, COLOURS[method], name.replace(" ", "\n"), times=100)
        ends.append(list(points.values())[-1])
    legend(axis)
    axis.set(xlabel="steps", ylabel="weight spread,\nrandom compared with fixed routing, %")
    lower = f"Without outer steps random routing lowers the spread by {-ends[-1].mean:.0%}"
    if not significant(ends)[-1]:
        lower += ", not significantly"
    frame(figure, found, lower, "Weight spread, random compared with fixed routing")
    return figure


def spread_at(number):
    """A function of a record: its spread at that evaluation."""
    return lambda record: record["spreads"][number]


def expected(found):
    """In the 100 steps of a plot the spread is not lower yet."""
    records = found["records"]
    spread = random_over_fixed(records, "local", last_spread, ratio)
    return [
        Expected("weight spread, random compared with fixed routing, no outer steps", spread.mean,
                 0.05, 0.1),
        Expected("weight spread, never averaged, divided by NoLoCo's (Fig. 4)",
                 times_noloco(records), 25, 10, ".0f"),
    ]


ROW = Row("routing", measure, show, {"routing": draw}, expected)

if __name__ == "__main__":
    command(__doc__, ROW)
