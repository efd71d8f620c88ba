"""Many replicas, in equal simulated time: what NoLoCo is for.

    python -m experiments.many [--scale try|plot|full] [--plot] [--seeds 0 1]

`full` takes minutes of an H200. Losses are trained (experiments/fleet.py); time is simulated, as in
the NoLoCo paper's Fig. 5B: a step of a replica takes a log-normal time with sigma^2 = 0.5, of mean
1 (B4), exchanges take none, and at a merge a replica waits for what its partner, or everyone, sent.
A message leaves after step k m and is merged after step k m + D (the delay), so waits shorter than
D steps are hidden. Each method makes as many steps as the slowest replica has made after T mean
steps (`steps_in`); then the models are merged.

Both methods have the same tries at each number of replicas N: m (DiLoCo's twice as large, for about
as many bytes) and D at one rate, then other rates, on a seed that measures nothing. Each method is
measured with its best m and D, and with its best m without a delay. `named` has the comparisons
that were named before the runs.
"""
import itertools
import statistics
from dataclasses import asdict, dataclass, replace
from functools import cache

import torch

from experiments import gap
from experiments.fleet import Trial, beyond_the_edge, train_missing
from experiments.harness import Row, command, records_in, results_file
from experiments.pictures import COLOURS, WIDTH, curve, frame, legend
from experiments.stats import (Comparison, Expected, Table, by_seed, less, mean, paired,
                               significant, those)
from gossip.due import Due
from train import BadInput

VARIANCE = 0.5                  # of the logarithm of a step's time (B4)
DRAWS = 32                      # of all replicas' times, over which a run's end is averaged
METHODS = "noloco", "diloco"
WORDS = {"noloco": "NoLoCo", "diloco": "DiLoCo"}
KINDS = "best delay", "no delay"
TRY_SEED = 100


@dataclass(frozen=True)
class Scale:
    """T: mean steps. intervals: NoLoCo's m; DiLoCo has twice that. shares: of m, the delays that
    are tried. rates: the first one while m and D are chosen."""
    T: int = 600
    replicas: tuple = (8, 32, 128)
    intervals: tuple = (2, 10, 50)
    shares: tuple = (0, 0.1, 0.5)
    rates: tuple = (4e-3, 2e-3, 8e-3)
    seeds: tuple = (0, 1, 2, 3, 4)
    tokens: int = 512


SCALES = {"full": Scale(),
          "plot": Scale(60, (4, 16), (5,), (0,), (4e-3,), (0,)),
          "try": Scale(12, (2, 4), (2, 4), (0, 0.5), (4e-3, 2e-3), (0, 1), 128)}


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


def tries(scale, method, N):
    """Each m with each D, at one rate."""
    found = []
    for m in scale.intervals:
        own = m if method == "noloco" else 2 * m
        for D in sorted({int(share * own) for share in scale.shares}):
            steps = steps_in(scale.T, method, N, own, D)
            found.append(Trial(method, own, D, N=N, tokens=scale.tokens, steps=steps,
                               rate=scale.rates[0], stage="try", seed=TRY_SEED))
    return found


def best_try(scale, method, N, kind, records):
    """The try of a method with the lowest loss, of all (kind "best delay") or of those without a
    delay. Raises BadInput where one is missing."""
    found = [trial for trial in tries(scale, method, N) if kind == "best delay" or not trial.D]
    return lowest(found, records)


def chosen(scale, method, N, kind, records):
    """The best try, at its best rate. Raises BadInput where one is missing."""
    best = best_try(scale, method, N, kind, records)
    rated = [replace(best, rate=rate) for rate in scale.rates]
    rated += [trial for trial in beyond(scale, best, records) if those(records, **trial.known)]
    return lowest(rated, records)


def lowest(trials, records):
    losses = {}
    for trial in trials:
        found = those(records, **trial.known)
        if not found:
            raise BadInput(f"no try yet of {trial}: first run without --seeds, or with --seeds "
                           f"{TRY_SEED}")
        losses[trial] = found[0]["merged"]
    return min(losses, key=losses.get)


def beyond(scale, best, records):
    """One try beyond the rates where the best of them is at their edge."""
    rate = lowest([replace(best, rate=rate) for rate in scale.rates], records).rate
    return [replace(best, rate=more) for more in beyond_the_edge(scale.rates, rate)]


def measure(o):
    """Tries, rates, one rate beyond the edge, then what is measured; the largest N first."""
    scale = SCALES[o.scale]
    cases = [(method, N) for N in scale.replicas[::-1] for method in METHODS]

    def train(trials):
        train_missing("many", trials, gap.MODELS[o.scale], o)
        return records_in(results_file(o.out, "many"))

    records = train([trial for case in cases for trial in tries(scale, *case)])
    best = [best_try(scale, *case, kind, records) for case in cases for kind in KINDS]
    records = train([replace(one, rate=rate) for one in best for rate in scale.rates])
    records = train([more for one in best for more in beyond(scale, one, records)])
    train([replace(chosen(scale, *case, kind, records), stage="measured", seed=seed)
           for case in cases for kind in KINDS for seed in scale.seeds])


# ---------------------------------------------------------------- what was found


def selector(scale, method, N, kind, records):
    """The facts of its measured records."""
    facts = asdict(chosen(scale, method, N, kind, records)) | dict(stage="measured")
    del facts["seed"]
    return facts


def noloco_less_diloco(scale, N, kind, records):
    sides = [selector(scale, method, N, kind, records) for method in METHODS]
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
                own = selector(scale, method, N, kind, records)
                settings.append("{m}, {D}, {rate:g}, {steps}".format(**own))
                losses.append(mean(records, own))
            table.add(f"{N}, {kind}", *settings, ", ".join(losses),
                      noloco_less_diloco(scale, N, kind, records))
    table.end()
    show_tries(scale, records)


def show_tries(scale, records):
    """All tries at one rate: their losses and steps."""
    columns = [f"{WORDS[method]}, {N}" for method in METHODS for N in scale.replicas]
    table = Table("tries: NoLoCo's m, D (DiLoCo's are twice that)", *columns)
    for m in scale.intervals:
        for D in sorted({int(share * m) for share in scale.shares}):
            cells = [cell_of(scale, records, "noloco", N, m, D) for N in scale.replicas]
            cells += [cell_of(scale, records, "diloco", N, 2 * m, 2 * D) for N in scale.replicas]
            table.add(f"{m}, {D}", *cells)
    table.end()


def cell_of(scale, records, method, N, m, D):
    """The loss and the steps of a try."""
    (trial,) = [one for one in tries(scale, method, N) if (one.m, one.D) == (m, D)]
    (record,) = those(records, **trial.known)
    return f"{record['merged']:.3f}, {trial.steps}"


def draw(plt, found):
    """Losses against the number of replicas."""
    records, scale = found["records"], SCALES[found["scale"]]
    figure, axis = plt.subplots(figsize=(WIDTH, 3.8))
    for kind, dashes in zip(KINDS, ("-", "--")):
        for method in METHODS:
            points = {}
            for N in scale.replicas:
                losses = by_seed(records, selector(scale, method, N, kind, records), "merged")
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
    return (f"With {SCALES[found['scale']].replicas[-1]} replicas NoLoCo's loss is "
            f"{abs(at_many.mean):.3f} nats {word} than DiLoCo's in equal time")


def expected(found):
    records, scale = found["records"], SCALES[found["scale"]]
    compared = [noloco_less_diloco(scale, N, "no delay", records) for N in scale.replicas]
    values = [one.mean for one in compared if one]
    return [Expected("NoLoCo minus DiLoCo in equal simulated time, mean over the numbers of "
                     "replicas, nats per byte", statistics.mean(values), -0.03, 0.1, "+.3f")]


ROW = Row("many", measure, show, {"many": draw}, expected)

if __name__ == "__main__":
    command(__doc__, ROW)
