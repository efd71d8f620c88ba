"""Many replicas, in equal simulated time: what NoLoCo is for.

    python -m experiments.many [--scale try|plot|full] [--plot] [--seeds 0 1]

`full` takes a minute of an H200. Losses are trained (experiments/fleet.py); time is simulated, as
in the NoLoCo paper's Fig. 5B: a step of a replica takes a log-normal time with sigma^2 = 0.5, of
mean 1 (B4), exchanges take none, and at a merge a replica waits for what its partner, or everyone,
sent. A message leaves after step k m and is merged after step k m + D (the delay), so waits shorter
than D steps are hidden. Each method makes as many steps as the slowest replica has made after T
mean steps (`steps_in`); then the models are merged.

Each method is measured with its best m and D, and with its best m without a delay (`BEST`). `named`
has the comparisons that were named before the runs.
"""
import itertools
import statistics
from dataclasses import asdict, dataclass
from functools import cache

import torch

from experiments import gap
from experiments.fleet import Trial, train_missing
from experiments.harness import Row, command
from experiments.pictures import COLOURS, WIDTH, curve, frame, legend
from experiments.stats import (Comparison, Expected, Table, by_seed, less, mean, paired,
                               significant)
from gossip.due import Due

VARIANCE = 0.5                  # of the logarithm of a step's time (B4)
DRAWS = 32                      # of all replicas' times, over which a run's end is averaged
METHODS = "noloco", "diloco"
WORDS = {"noloco": "NoLoCo", "diloco": "DiLoCo"}
KINDS = "best delay", "no delay"

# {(method, replicas): (m, D, learning rate) with the best delay, and without a delay}. Both methods
# had the same tries at each number of replicas, on a seed that measures nothing: m in 2, 10, 50
# (DiLoCo's twice that, for about as many bytes), D in 0, m / 10, m / 2, rounded down, at the rate
# 0.004; then 0.002 and 0.008, and one more beyond the best of the three if that was an end. The
# search is in 36e6e0d, what it found in results/many_tries.json.
BEST = {
    ("noloco", 8): ((2, 1, 4e-3), (2, 0, 8e-3)),
    ("diloco", 8): ((4, 0, 4e-3), (4, 0, 4e-3)),
    ("noloco", 32): ((2, 1, 4e-3), (2, 0, 4e-3)),
    ("diloco", 32): ((4, 2, 4e-3), (4, 0, 4e-3)),
    ("noloco", 128): ((2, 1, 4e-3), (2, 0, 8e-3)),
    ("diloco", 128): ((4, 2, 4e-3), (4, 0, 8e-3)),
}


def alike(m, D, *replicas):
    """The same settings for all; DiLoCo's are twice as large."""
    settings = {}
    for N in replicas:
        settings["noloco", N] = (m, D, 4e-3), (m, 0, 4e-3)
        settings["diloco", N] = (2 * m, 2 * D, 4e-3), (2 * m, 0, 4e-3)
    return settings


@dataclass(frozen=True)
class Scale:
    """T: mean steps. best: as BEST."""
    T: int
    best: dict
    seeds: int
    tokens: int = 512

    @property
    def replicas(self):
        return sorted({N for _, N in self.best})


SCALES = {"full": Scale(600, BEST, 5), "plot": Scale(60, alike(5, 0, 4, 16), 1),
          "try": Scale(12, alike(2, 1, 2, 4), 2, 128)}


# ---------------------------------------------------------------- simulated time


@cache
def steps_in(T, method, N, m, D):
    """Inner steps that the slowest replica has made after T mean steps, on average over DRAWS."""
    for step, seconds in enumerate(ends(method, N, m, D)):
        if seconds.mean() > T:
            return step


def ends(method, N, m, D):
    """Yields, step by step, when the slowest replica has ended it, and its merge: (DRAWS,), in mean
    steps."""
    generator = torch.Generator().manual_seed(0)
    clock = torch.zeros(DRAWS, N)
    due = Due(m, D)
    arrives = None
    for step in itertools.count():
        normal = torch.randn(clock.shape, generator=generator)
        clock = clock + (VARIANCE**0.5 * normal - VARIANCE / 2).exp()
        if arrives is not None and due.lands(step):
            clock, arrives = torch.maximum(clock, arrives), None
        if due.departs(step):
            arrives = heard(method, clock, generator)
            if not D:
                clock, arrives = torch.maximum(clock, arrives), None
        yield clock.amax(1)


def heard(method, sent, generator):
    """When a replica has all that it waits for; sent (DRAWS, N): when each one's message left."""
    if method == "diloco":
        return sent.amax(1, keepdim=True).expand_as(sent)
    order = torch.rand(sent.shape, generator=generator).argsort(1)          # neighbours are a pair
    pairs = sent.gather(1, order).unflatten(1, (-1, 2))
    latest = pairs.amax(2).repeat_interleave(2, 1)
    return torch.empty_like(sent).scatter_(1, order, latest)


# ---------------------------------------------------------------- what is trained


def trial(scale, method, N, kind, seed=0):
    m, D, rate = scale.best[method, N][KINDS.index(kind)]
    return Trial(method, m, D, N=N, tokens=scale.tokens, steps=steps_in(scale.T, method, N, m, D),
                 rate=rate, seed=seed)


def measure(o):
    """The largest N first."""
    scale = SCALES[o.scale]
    trials = []
    for N in reversed(scale.replicas):
        for method, kind, seed in itertools.product(METHODS, KINDS, range(scale.seeds)):
            trials.append(trial(scale, method, N, kind, seed))
    train_missing("many", trials, gap.MODELS[o.scale], o)


# ---------------------------------------------------------------- what was found


def selector(scale, method, N, kind):
    """The facts of its records."""
    facts = asdict(trial(scale, method, N, kind))
    del facts["seed"]
    return facts


def noloco_less_diloco(scale, N, kind, records):
    sides = [selector(scale, method, N, kind) for method in METHODS]
    return paired(records, *sides)


def named(found):
    """{name: Comparison}, as named before the runs: NoLoCo minus DiLoCo at the largest N, at the
    smallest, and the first minus the second, each with the best delays and without any."""
    records, scale = found["records"], SCALES[found["scale"]]
    few, many = scale.replicas[0], scale.replicas[-1]
    compared = {}
    for kind in KINDS:
        ends = [noloco_less_diloco(scale, N, kind, records) for N in (many, few)]
        for N, one in zip((many, few), ends):
            compared[f"NoLoCo minus DiLoCo, {N} replicas, {kind}"] = one
        compared[f"{many} replicas minus {few}, {kind}"] = less(*ends)
    return compared


def show(found):
    records, scale = found["records"], SCALES[found["scale"]]
    table = Table(f"named before the runs; {scale.T} mean steps", "nats per byte")
    for name, one in named(found).items():
        table.add(name, one)
    table.end()
    table = Table("replicas, delay", "NoLoCo: m, D, rate, steps", "DiLoCo: m, D, rate, steps",
                  "losses: NoLoCo, DiLoCo", "NoLoCo minus DiLoCo, nats per byte")
    for kind in KINDS:
        for N in scale.replicas:
            settings, losses = [], []
            for method in METHODS:
                own = selector(scale, method, N, kind)
                settings.append("{m}, {D}, {rate:g}, {steps}".format(**own))
                losses.append(mean(records, own))
            table.add(f"{N}, {kind}", *settings, ", ".join(losses),
                      noloco_less_diloco(scale, N, kind, records))
    table.end()


def draw(plt, found):
    """Losses against the number of replicas."""
    records, scale = found["records"], SCALES[found["scale"]]
    figure, axis = plt.subplots(figsize=(WIDTH, 3.8))
    for kind, dashes in zip(KINDS, ("-", "--")):
        for method in METHODS:
            points = {}
            for N in scale.replicas:
                losses = by_seed(records, selector(scale, method, N, kind), "merged")
                points[N] = Comparison(list(losses.values()))
            curve(axis, points, COLOURS[WORDS[method]], f"{WORDS[method]},\n{kind}", ls=dashes)
    axis.set_xscale("log")
    axis.set(xticks=scale.replicas, xticklabels=scale.replicas, xlabel="replicas",
             ylabel="loss of the merged model,\nnats per byte")
    axis.minorticks_off()
    legend(axis)
    frame(figure, found, finding(found), "NoLoCo and DiLoCo in equal simulated time")
    return figure


def finding(found):
    """The picture's title."""
    compared = named(found)
    keys = list(compared)
    at_many = compared[keys[0]]
    if not significant(list(compared.values()))[0]:
        return "NoLoCo and DiLoCo in equal time: no significant difference with most replicas"
    word = "lower" if at_many.mean < 0 else "higher"
    return (f"{SCALES[found['scale']].replicas[-1]} replicas, simulated time: NoLoCo's loss is "
            f"{abs(at_many.mean):.3f} nats {word} than DiLoCo's")


def expected(found):
    records, scale = found["records"], SCALES[found["scale"]]
    compared = [noloco_less_diloco(scale, N, "no delay", records) for N in scale.replicas]
    values = [one.mean for one in compared if one]
    return [Expected("NoLoCo minus DiLoCo in equal simulated time, mean over the numbers of "
                     "replicas, nats per byte", statistics.mean(values), -0.03, 0.1, "+.3f")]


ROW = Row("many", measure, show, {"many": draw}, expected)

if __name__ == "__main__":
    command(__doc__, ROW)
