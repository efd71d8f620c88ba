"""Losses of many replicas in one process (experiments/fleet.py), on one GPU or on a CPU.

    python -m experiments.replicas [PART ...] [--seeds 0 1 2] [--steps N] [--out DIR] [--plot]

delay       --delay D beside the outer step that waits: m = 1 to 10, fp32 and one byte, Adam and
            Muon; the README's first picture: the gap to DDP against the bytes sent
many        2 to 64 replicas, groups of 2 and 4: how the gap to DDP grows; with 16, larger and
            smaller steps

Every gap is over DDP with the same optimizer, seed and data. "Merged" is the loss of the model
with the mean of all replicas' weights, which is what one keeps; DiLoCo's replicas are merged by
nature. Where a run has no merged loss, the tables have its replicas' mean and say so.
"""
import itertools
import statistics
import time
from pathlib import Path

import torch

import train
from experiments.comparing import Comparison, Table
from experiments.fleet import Fleet, Trial, device, machine
from experiments.harness import Part, headline, title_of
from experiments.pictures import COLOURS, WIDTH, bars, counted, label_ends
from experiments.results import kept_result, over, save_result, spread_of
from train import BadInput

LEARN = ("--hidden 64 --mlp 256 --heads 2 --layers 2 --warmup 50 --microbatches 1 "
         "--eval-sequences 512")
SEQUENCES = 8                               # of a replica's step
SMALLER, LARGER = 4, 32                     # with 16 replicas also so many
LENGTH = 128                                # tokens of a sequence
RATES = {"adam": 6e-3, "muon": 1.2e-2}      # Muon's: DDP's and NoLoCo's best of three
REPLICAS = 2, 8, 16, 32, 64

# ---------------------------------------------------------------- what is trained

SHOWN = {
    "NoLoCo, every 2": Trial("noloco", 2), "DiLoCo, every 4": Trial("diloco", 4),
    "NoLoCo, every 2, groups of 4": Trial("noloco", 2, group=4),
    "NoLoCo, every 1": Trial("noloco", 1),
    "NoLoCo, every 10": Trial("noloco", 10), "DiLoCo, every 20": Trial("diloco", 20),
    "NoLoCo, every 10, groups of 4": Trial("noloco", 10, group=4),
}
DDP = Trial("ddp")


def delays(m):
    return sorted({0, 1, m // 2})


def delay_trials():
    yield DDP
    for m, wire in itertools.product((1, 2, 4, 10), ("fp32", "int8")):
        for delay in delays(m):
            yield Trial("noloco", m, delay, wire)
    for m in (2, 4, 10):
        for delay in delays(m):
            yield Trial("diloco", m, delay)
    yield Trial("diloco", 20)


def many_trials(replicas):
    yield DDP
    for m in (1, 2, 10):
        yield Trial("noloco", m)
        yield Trial("diloco", 2 * m)
        if replicas > 4:
            yield Trial("noloco", m, group=4)


def delay_fleets(steps):
    """(optimizer, replicas, sequences, steps, trials, seeds at most) of each."""
    for optimizer in RATES:
        yield optimizer, 8, SEQUENCES, steps or 1200, delay_trials(), None


def many_fleets(steps):
    """As above."""
    steps = steps or 600
    for optimizer, replicas in itertools.product(RATES, REPLICAS):
        most = 1 if replicas == 64 else None
        yield optimizer, replicas, SEQUENCES, steps, many_trials(replicas), most
    for sequences in SMALLER, LARGER:           # all that is shown but every 1
        trials = [DDP, *(trial for trial in SHOWN.values() if trial.every > 1)]
        yield "adam", 16, sequences, steps, trials, None


def train_all(name, part, o):
    """Train the fleets that OUT/results does not have yet, and save after each."""
    found = dict(fleets={}, machines={})
    if Path(o.out, "results", f"headline_{name}.json").exists():
        found = kept_result(o.out, f"headline_{name}")
    if found["fleets"] and found.get("steps") != o.steps:
        raise BadInput(f"{o.out}/results/headline_{name}.json has runs of other lengths: give "
                       "another --out")
    if o.steps:
        found["steps"] = o.steps
    ran = {}
    for optimizer, replicas, sequences, steps, trials, most in part.settings(o.steps):
        seeds = (o.seeds or list(part.seeds))[:most]
        key = (f"{optimizer}, {replicas} replicas, {sequences} sequences, {steps} steps, "
               f"seeds {seeds}")
        if key in found["fleets"] or o.only not in key:
            continue
        print(key)
        options = (f"{LEARN} --batch {sequences} --steps {steps} --lr {RATES[optimizer]} "
                   f"--optimizer {optimizer}")
        train_fleet(found, key, options, list(trials), replicas, seeds)
        save_result(o.out, f"headline_{name}", found)
        ran[key] = found["fleets"][key]
    if o.only:
        show_fleets(ran)
    return found


def train_fleet(found, key, options, trials, replicas, seeds):
    """Add the fleet's rows to found, and the machine that trained it."""
    fleet = Fleet(train.parse(options.split()), trials, replicas, seeds, device())
    start = time.perf_counter()
    found["fleets"][key] = fleet.train()
    found["machines"][key] = [machine(), torch.__version__, round(time.perf_counter() - start)]
    found["digest"] = fleet.digest


def has_all_fleets(found, part):
    """Whether all fleets are there, with all their steps and seeds."""
    if found.get("steps") or len(found["fleets"]) < len(list(part.settings(None))):
        return False
    return all(f"seeds {list(part.seeds)}" in key or "seeds [0]" in key for key in found["fleets"])


# ---------------------------------------------------------------- what was found


def by_trial(found, sequences=SEQUENCES):
    """{(optimizer, replicas): {Trial: {seed: row}}} of the runs with so many sequences a replica
    and step."""
    runs = {}
    for row in itertools.chain(*found["fleets"].values()):
        if row["tokens"] == sequences * LENGTH:
            trials = runs.setdefault((row["optimizer"], row["replicas"]), {})
            trials.setdefault(Trial(**row["trial"]), {})[row["seed"]] = row
    return runs


def mean_loss(row):
    """The mean over the replicas."""
    return row["losses"][-1]


def merged_loss(row):
    """Of the mean of the replicas' weights; None where it was not measured."""
    return row.get("merged")


def pairs(trials, trial, base, loss):
    """([losses], [the base's of the same seeds]); empty where one of the two was not measured."""
    losses, others = [], []
    base_rows = trials.get(base, {})
    for seed, row in trials.get(trial, {}).items():
        if seed in base_rows and loss(row) is not None and loss(base_rows[seed]) is not None:
            losses.append(loss(row))
            others.append(loss(base_rows[seed]))
    return losses, others


def gap(trials, trial, loss=merged_loss, base=DDP):
    """Perplexity over DDP's with the same optimizer, or another base's; None where there is
    none."""
    losses, others = pairs(trials, trial, base, loss)
    if not losses:
        return None
    return Comparison(over(losses, others), "+.1%")


def nats_over(trials, trial, base, loss):
    losses, others = pairs(trials, trial, base, loss)
    if not losses:
        return None
    return Comparison([a - b for a, b in zip(losses, others)])


def show_fleets(fleets):
    """What a command with --only ran."""
    table = Table("fleet", "method", "held-out nats per byte", "merged")
    for key, rows in fleets.items():
        for row in rows:
            trial = Trial(**row["trial"])
            method = (f"{trial.method}, m {trial.every}, D {trial.delay}, {trial.wire}, "
                      f"n {trial.group}")
            table.add(key, method, f"{mean_loss(row):.3f}", f"{merged_loss(row):.3f}")
    table.end()


# ---------------------------------------------------------------- the gap against bytes


def bytes_of_ddp(trial, replicas):
    """Bytes sent per rank, over DDP's in fp32: it reduces the gradient at every step in a ring,
    which sends 2 (N - 1) / N of it; DiLoCo every m steps; NoLoCo's pair sends the weights once."""
    ring = 2 * (replicas - 1) / replicas
    own = 1.0 if trial.method == "noloco" else ring
    return own / ring / trial.every


GAP = {     # its name in the picture: (optimizer, method, m of its points, colour, dashes)
    "NoLoCo, Adam": ("adam", "noloco", (1, 2, 4, 10), "NoLoCo", "-"),
    "DiLoCo, Adam": ("adam", "diloco", (2, 4, 10, 20), "DiLoCo", "-"),
    "NoLoCo, Muon": ("muon", "noloco", (1, 2, 4, 10), "NoLoCo", "--"),
    "DiLoCo, Muon": ("muon", "diloco", (2, 4, 10, 20), "DiLoCo", "--"),
}


def show_gap(found):
    runs = by_trial(found)
    table = Table("8 replicas, fp32", "averages every", "bytes of DDP's", "merged, nats per byte",
                  "over DDP's with the same optimizer")
    for optimizer in RATES:
        losses = [merged_loss(row) for row in runs[optimizer, 8][DDP].values()]
        table.add(f"DDP, {optimizer.title()}", "1", "100%", f"{statistics.mean(losses):.3f}", None)
    for name, (optimizer, method, every, _, _) in GAP.items():
        trials = runs[optimizer, 8]
        for m in every:
            trial = Trial(method, m)
            losses = [merged_loss(row) for row in trials.get(trial, {}).values()]
            if losses:
                table.add(name, m, f"{bytes_of_ddp(trial, 8):.0%}",
                          f"{statistics.mean(losses):.3f}", gap(trials, trial))
    table.end()


def in_percent(comparison):
    return [100 * more for more in comparison.differences]


def draw_gap(plt, found):
    """The merged model's gap to DDP against the bytes that a rank sends."""
    runs = by_trial(found)
    figure, axis = plt.subplots(figsize=(WIDTH, 4.6))
    for name, (optimizer, method, every, colour, dashes) in GAP.items():
        trials = runs[optimizer, 8]
        there = [Trial(method, m) for m in every if Trial(method, m) in trials]
        x = [100 * bytes_of_ddp(trial, 8) for trial in there]
        points = [in_percent(gap(trials, trial)) for trial in there]
        bars(axis, points, x, COLOURS[colour], ls=dashes, label=name)
        if optimizer == "adam":
            side = dict(xytext=(-4, 5), ha="right")
            if method == "diloco":
                side = dict(xytext=(4, -5), ha="left", va="top")
            for trial, at, point in zip(there, x, points):
                axis.annotate(f"every {trial.every}", (at, statistics.mean(point)), **side,
                              textcoords="offset points", color=COLOURS[colour])
    axis.plot([100], [0], "s", color=COLOURS["DDP"], label="_DDP", ms=6)
    axis.annotate("DDP", (100, 0), xytext=(0, 8), textcoords="offset points", ha="center")
    axis.set_xscale("log")
    seeds = len(runs["adam", 8][DDP])
    ticks = (100, 50, 25, 10, 5)
    finding = ("The fewer bytes, the wider the gap to DDP; with Muon it is less than half as "
               "wide,\nbut for averages at every step. DiLoCo is about as close for as many bytes")
    axis.set(xlim=(125, 4.6), xticks=ticks, xticklabels=[f"{tick}%" for tick in ticks],
             xlabel="bytes that a rank sends to synchronise, of DDP's (fewer to the right; fp32, "
             "8 replicas)",
             ylabel="perplexity over DDP's with the same optimizer, %\n"
             f"(bars: range of {counted(seeds, 'seed')})",
             title=title_of(found, finding, "The gap to DDP against the bytes sent"))
    axis.minorticks_off()
    label_ends(axis)
    return figure


# ---------------------------------------------------------------- delays and one byte


def show_delay(found):
    show_gap(found)
    runs = by_trial(found)
    table = Table("optimizer, m, D: over DDP's", "NoLoCo, fp32", "NoLoCo, one byte", "DiLoCo, fp32",
                  "NoLoCo, fp32: replicas' mean")
    for optimizer, m, delay in delay_rows():
        trials = runs[optimizer, 8]
        noloco = Trial("noloco", m, delay)
        table.add(f"{optimizer.title()}, {m}, {delay}", gap(trials, noloco),
                  gap(trials, Trial("noloco", m, delay, "int8")),
                  gap(trials, Trial("diloco", m, delay)), gap(trials, noloco, mean_loss))
    table.end()
    print("Merged models, but for the last column.\n")
    table = Table("optimizer, m, D", "NoLoCo, fp32: over D = 0", "NoLoCo: one byte over fp32",
                  "DiLoCo: over D = 0", "NoLoCo over DiLoCo, same m and D")
    for optimizer, m, delay in delay_rows():
        trials = runs[optimizer, 8]
        noloco, diloco = Trial("noloco", m, delay), Trial("diloco", m, delay)
        later, diloco_later = None, None
        if delay:
            later = gap(trials, noloco, base=Trial("noloco", m))
            diloco_later = gap(trials, diloco, base=Trial("diloco", m))
        table.add(f"{optimizer.title()}, {m}, {delay}", later,
                  gap(trials, Trial("noloco", m, delay, "int8"), base=noloco), diloco_later,
                  gap(trials, noloco, base=diloco))
    table.end()


def delay_rows():
    """(optimizer, m, D)"""
    for optimizer, m in itertools.product(RATES, (1, 2, 4, 10)):
        for delay in delays(m):
            yield optimizer, m, delay


# ---------------------------------------------------------------- many replicas

SHORT = "NoLoCo, every 2", "DiLoCo, every 4", "NoLoCo, every 2, groups of 4", "NoLoCo, every 1"
LONG = "NoLoCo, every 10", "DiLoCo, every 20", "NoLoCo, every 10, groups of 4"


def columns_of(runs):
    """(optimizer, replicas) that were trained, in the tables' order."""
    return [(optimizer, n) for optimizer in RATES for n in REPLICAS if (optimizer, n) in runs]


def show_many(found):
    runs = by_trial(found)
    for names, (kind, loss) in itertools.product((SHORT, LONG), LOSSES.items()):
        table = Table(f"{kind}, over DDP's", *names)
        for optimizer, n in columns_of(runs):
            cells = [gap(runs[optimizer, n], SHOWN[name], loss) for name in names]
            if any(cells):
                table.add(f"{n} replicas, {optimizer.title()}", *cells)
        table.end()
    show_over_diloco(runs)
    table = Table("replicas' mean, over DDP's", *SHORT[:2], *LONG[:2])
    for sequences in SMALLER, SEQUENCES, LARGER:
        trials = by_trial(found, sequences).get(("adam", 16), {})
        table.add(f"16 replicas, Adam, {sequences * LENGTH} tokens a step",
                  *(gap(trials, SHOWN[name], mean_loss) for name in (*SHORT[:2], *LONG[:2])))
    table.end()


LOSSES = {"merged models": merged_loss, "replicas' mean": mean_loss}


def show_over_diloco(runs):
    """NoLoCo beside DiLoCo at about as many bytes, in nats per byte."""
    table = Table("NoLoCo over DiLoCo, nats per byte", "every 2 over 4, merged",
                  "every 2 over 4, replicas' mean", "every 10 over 20, merged",
                  "every 10 over 20, replicas' mean")
    for optimizer, n in columns_of(runs):
        trials, cells = runs[optimizer, n], []
        for noloco, diloco in (SHORT[:2], LONG[:2]):
            for loss in LOSSES.values():
                cells.append(nats_over(trials, SHOWN[noloco], SHOWN[diloco], loss))
        table.add(f"{n} replicas, {optimizer.title()}", *cells)
    table.end()
    print("Runs without a merged loss (Muon's 32 and 64 replicas) have their replicas' mean "
          "alone.\n")


def record_many(found):
    """Ranges, mean over the replicas."""
    runs = by_trial(found)
    for optimizer in RATES:
        counts = [n for kind, n in columns_of(runs) if kind == optimizer]
        table = Table(f"{optimizer.title()}: over DDP's (least to largest)",
                      *(f"{n} replicas" for n in counts))
        for name, trial in SHOWN.items():
            gaps = [gap(runs[optimizer, n], trial, mean_loss) for n in counts]
            table.add(name, *(more and spread_of(more.differences, "+.1%") for more in gaps))
        table.end()


MANY = {        # name: (colour, text)
    "NoLoCo, every 2": ("NoLoCo", "NoLoCo, every 2"),
    "DiLoCo, every 4": ("DiLoCo", "DiLoCo, every 4"),
    "NoLoCo, every 2, groups of 4": ("groups", "NoLoCo, every 2,\ngroups of 4"),
}


def draw_many(plt, found):
    """The gap against the replicas, Adam and Muon; 64 replicas, which have one seed, apart."""
    runs = by_trial(found)
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH, 4.6), sharey=True)
    for axis, optimizer in zip(axes, RATES):
        for name, (colour, text) in MANY.items():
            draw_gaps(axis, runs, optimizer, SHOWN[name], COLOURS[colour], text)
        axis.set_xscale("log", base=2)
        axis.set(xlabel="replicas", xticks=REPLICAS, xticklabels=REPLICAS, xlim=(1.7, 75),
                 title=f"{optimizer.title()}, beside DDP with {optimizer.title()}")
        axis.minorticks_off()
    axes[0].set_ylabel("perplexity over DDP's, %")
    finding = "The gap to DDP grows with the replicas; with Muon it is narrower"
    figure.suptitle(
        title_of(found, finding, "The gap to DDP against the replicas") +
        "\n(merged models; hollow: mean over the replicas; bars: range of three seeds; "
        "64 replicas: one seed)", x=0.01, ha="left")
    for axis in axes:
        label_ends(axis)
    return figure


def draw_gaps(axis, runs, optimizer, trial, colour, text):
    """A line through the numbers of replicas with several seeds, a point for one with a single
    seed; the last of them has the label."""
    x = []
    points = []
    fills = []
    for n in REPLICAS:
        trials, fill = runs.get((optimizer, n), {}), colour
        more = gap(trials, trial)
        if more is None:
            more, fill = gap(trials, trial, mean_loss), "white"
        if more is not None:
            x.append(n)
            points.append(in_percent(more))
            fills.append(fill)
    joined = [i for i in range(len(x)) if len(points[i]) == len(points[0])]
    means = [statistics.mean(points[i]) for i in joined]
    axis.plot([x[i] for i in joined], means, color=colour, lw=1.5)
    for i in range(len(x)):
        label = text if i == len(x) - 1 else None
        bars(axis, [points[i]], [x[i]], colour, ls="", mfc=fills[i], zorder=3, label=label)


PARTS = {
    "delay": Part(delay_fleets, show_delay, None, {"gap": draw_gap}, measure=train_all,
                  is_whole=has_all_fleets),
    "many": Part(many_fleets, show_many, record_many, {"many": draw_many}, measure=train_all,
                 is_whole=has_all_fleets),
}

if __name__ == "__main__":
    headline(__doc__, PARTS)
