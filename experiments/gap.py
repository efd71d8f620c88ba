"""How far NoLoCo and DiLoCo end above DDP, for how many bytes: the row "gap" of README's table.

    python -m experiments.gap [--scale try|plot|full] [--plot] [--seeds 0 1]

`full` takes 5 minutes of an H100 or some ten hours of two cores, and may be stopped at any moment:
each chunk's rows are kept once it is trained. Two processes may train into one DIR, with --seeds of
their own. `plot` has one seed, one rate and 200 steps.

Fleets of replicas (experiments/fleet.py) learn the standard library's text, byte by byte, in fp32,
messages and sums as well. Every gap is the merged model's perplexity over DDP's, paired by seed.
A setting's rate is the best of three by the mean of seeds that measure nothing else. Where little
data is trained the rates are chosen after as many steps as are measured, and 4096 tokens for 1200
steps take the rates of 4096 for 300. The text has about 9 million bytes: a replica of eight reads
its part 1.1 times in 1200 steps of 1024 tokens and in 300 of 4096, 4.4 times in 1200 of 4096.
PRIMARY holds the comparisons that were named before the runs.
"""
import math
import statistics

from experiments.gap_runs import (DDP, DILOCO, LATE, LATE_PARTS, LATER, MAIN, NAMES, NEVER,
                                  NOLOCO, PAIR, PAPER_DILOCO, PAPER_NOLOCO, SCALES, WIDE, Rows,
                                  best_rate, measured_lessons, rate_losses, train_all)
from experiments.harness import Row, command
from experiments.pictures import COLOURS, WIDTH, bars, counted, frame
from experiments.tables import Comparison, Expected, Table, holm

# ---------------------------------------------------------------- what was found

# Its name, the gap (setting, trial, base) and the gap that is taken from it.
TEN_OVER_DDP = "NoLoCo every 10 over DDP"
TEN_OVER_DILOCO = "NoLoCo every 10 over DiLoCo every 20"
PRIMARY = (
    (TEN_OVER_DDP, (MAIN, NOLOCO[10], DDP), None),
    (TEN_OVER_DILOCO, (MAIN, NOLOCO[10], DILOCO[20]), None),
    ("NoLoCo every 2 over DiLoCo every 4", (MAIN, NOLOCO[2], DILOCO[4]), None),
    ("fragments with D = 1 over whole with D = 5", (MAIN, LATE_PARTS, LATER), None),
    ("fragments with D = 1 over whole with D = 1", (MAIN, LATE_PARTS, LATE), None),
    ("gap to DDP: 300 steps of 4096 over 1200 of 1024",
     (WIDE, NOLOCO[10], DDP), (MAIN, NOLOCO[10], DDP)),
    ("NoLoCo every 10 over DDP, Muon", ("Muon", NOLOCO[10], DDP), None),
)


def bytes_of_ddp(trial, replicas):
    """Bytes sent per rank, over DDP's: it reduces the gradient at every step in a ring, which sends
    2 (N - 1) / N of it; DiLoCo every m steps; NoLoCo's pair sends the weights once."""
    if trial == NEVER:
        return 0.0
    ring = 2 * (replicas - 1) / replicas
    own = 1.0 if trial.method == "noloco" else ring
    return own / ring / trial.every


class Found:
    """The rows of a scale, read as losses and paired differences."""

    def __init__(self, scale, rows):
        self.scale = scale
        self.rows = rows
        self.settings = {setting.name: setting for setting in scale.settings}

    @classmethod
    def of(cls, found):
        """found: results/gap.json, and the name of its scale."""
        return cls(SCALES[found["scale"]], found["rows"])

    def losses(self, name, trial, key="merged"):
        """{seed: nats per byte} of a setting's trial. key: "merged", or "mean" of the replicas."""
        setting = self.settings.get(name)
        if setting is None or trial not in setting.trials:
            return {}
        found = {}
        for lesson in measured_lessons(self.scale, setting, self.rows):
            if lesson.trial == trial and lesson.label in self.rows:
                found[lesson.seed] = self.rows[lesson.label][key]
        return found

    def nats(self, name, trial, base, key="merged"):
        """{seed: nats over the base's}"""
        losses, others = self.losses(name, trial, key), self.losses(name, base)
        return {seed: loss - others[seed] for seed, loss in losses.items() if seed in others}

    def over(self, name, trial, base=DDP, key="merged"):
        """Perplexity over the base's, as a Comparison; None without a pair."""
        ratios = [math.exp(nats) - 1 for nats in self.nats(name, trial, base, key).values()]
        return Comparison(ratios, "+.1%") if ratios else None

    def primary(self, plus, minus):
        """Nats of the one gap less the other's, seed by seed; None without a pair."""
        more = self.nats(*plus)
        less = dict.fromkeys(more, 0.0)
        if minus:
            less = self.nats(*minus)
        differences = [nats - less[seed] for seed, nats in more.items() if seed in less]
        return Comparison(differences) if differences else None

    def verdicts(self):
        """{name of a primary comparison: "better", "worse" or "cannot tell", after Holm}; empty
        while one has fewer than two seeds."""
        compared = {name: self.primary(*gaps) for name, *gaps in PRIMARY}
        if any(one is None or one.p is None for one in compared.values()):
            return {}
        survives = holm([one.p for one in compared.values()])
        found = {}
        for (name, one), stays in zip(compared.items(), survives):
            found[name] = one.verdict if stays else "cannot tell"
        return found

    def rate(self, name, trial):
        return best_rate(self.scale, self.settings[name], trial, self.rows)


def measure(o):
    """Each row is kept as soon as it is trained."""
    train_all(SCALES[o.scale], Rows(o.out), o.seeds)


def show(found):
    """All tables of what is there."""
    found = Found.of(found)
    show_primary(found)
    for setting in found.scale.settings:
        if found.losses(setting.name, DDP) and setting.trials != PAIR:
            show_setting(found, setting)
    show_pairs(found)
    show_means(found)
    show_rates(found)


def show_primary(found):
    table = Table("named before the runs; merged models", "seeds", "nats per byte", "perplexity")
    for name, *gaps in PRIMARY:
        compared = found.primary(*gaps)
        if compared:
            times = f"{math.exp(compared.mean) - 1:+.1%}"
            table.add(name, len(compared.differences), compared, times)
        else:
            table.add(name, 0, None, None)
    table.end()


def show_setting(found, setting):
    head = f"{setting.name}: {setting.replicas} replicas, {setting.tokens} tokens"
    table = Table(f"{head}, {setting.steps} steps", "bytes of DDP's", "learning rate",
                  "loss, nats per byte", "perplexity over DDP's")
    for trial in setting.trials:
        name, key = NAMES[trial], "merged"
        if trial == NEVER:
            name, key = f"{name} (replicas' mean)", "mean"
        losses = found.losses(setting.name, trial, key)
        if losses:
            gap = None
            if trial != DDP:
                gap = found.over(setting.name, trial, key=key)
            table.add(name, f"{bytes_of_ddp(trial, setting.replicas):.1%}",
                      f"{found.rate(setting.name, trial):g}",
                      f"{statistics.mean(losses.values()):.3f}", gap)
    table.end()


def show_pairs(found):
    """The settings of data and of replicas, beside the main one."""
    table = Table("NoLoCo every 10 beside DDP", "DDP's learning rate", "NoLoCo's",
                  "DDP's loss, nats per byte", "NoLoCo's perplexity over DDP's")
    for setting in found.scale.settings:
        base = found.losses(setting.name, DDP)
        if base and (setting.trials == PAIR or setting.name == MAIN):
            table.add(f"{setting.replicas} replicas, {setting.tokens} tokens, "
                      f"{setting.steps} steps", f"{found.rate(setting.name, DDP):g}",
                      f"{found.rate(setting.name, NOLOCO[10]):g}",
                      f"{statistics.mean(base.values()):.3f}",
                      found.over(setting.name, NOLOCO[10]))
    table.end()


def show_means(found):
    """What the replicas lose before they are merged."""
    table = Table("replicas' mean", "loss, nats per byte", "perplexity over DDP's")
    for trial in NAMES:
        losses = found.losses(MAIN, trial, "mean")
        if losses and trial != DDP:
            table.add(NAMES[trial], f"{statistics.mean(losses.values()):.3f}",
                      found.over(MAIN, trial, key="mean"))
    table.end()


def show_rates(found):
    """The mean loss of the rate seeds with each rate. "At the edge" is said of a best rate that is
    not the middle one."""
    scale = found.scale
    for setting in scale.settings:
        rates = scale.rates[setting.optimizer]
        if setting.lender or len(rates) == 1:
            continue
        columns = [f"{rate:g}" for rate in rates]
        table = Table(f"{setting.name}, {setting.rate_steps} steps", *columns, "best")
        for trial in setting.trials:
            cells = []
            for rate in rates:
                losses = rate_losses(scale, setting, trial, rate, found.rows)
                cells.append(None if None in losses else f"{statistics.mean(losses):.3f}")
            best = found.rate(setting.name, trial)
            edge = ", at the edge" if best in (rates[0], rates[-1]) else ""
            table.add(NAMES[trial], *cells, best and f"{best:g}{edge}")
        table.end()


# ---------------------------------------------------------------- the picture

LINES = {   # its label: (setting, trials, colour, style)
    "NoLoCo": (MAIN, NOLOCO.values(), "NoLoCo", dict(ls="-")),
    "DiLoCo": (MAIN, DILOCO.values(), "DiLoCo", dict(ls="-")),
    "NoLoCo\nwith Muon": ("Muon", (NOLOCO[2], NOLOCO[10]), "NoLoCo", dict(ls="--")),
    "NoLoCo with its paper's outer step": (MAIN, (PAPER_NOLOCO,), "NoLoCo", dict(mfc="white")),
    "DiLoCo with its paper's outer step": (MAIN, (PAPER_DILOCO,), "DiLoCo", dict(mfc="white")),
}
ASIDE = 1.4         # points of the papers' outer steps are so much to the right of their bytes
TICKS = (50, 100), (10, 20), (2, 4)         # NoLoCo's m and DiLoCo's, of about as many bytes


def draw(plt, found):
    """The merged model's perplexity over DDP's against the bytes that a rank sends."""
    there = Found.of(found)
    figure, axis = plt.subplots(figsize=(WIDTH, 4.4))
    for label, (name, trials, colour, style) in LINES.items():
        aside = ASIDE if "paper" in label else 1
        gaps = {}
        for trial in trials:
            gap = there.over(name, trial)
            if gap:
                gaps[100 * bytes_of_ddp(trial, 8) * aside] = gap
        if gaps:
            x = sorted(gaps)
            bars(axis, x, [gaps[at] for at in x], COLOURS[colour], label=label, **style)
    axis.plot([100], [0], "s", color=COLOURS["DDP"], ms=6)
    axis.annotate("DDP", (100, 0), xytext=(0, 8), textcoords="offset points", ha="center")
    axis.set_xscale("log")
    places, names = ticks(there)
    axis.set(xlim=(min(places) / 1.8, 180), ylim=(-4, None), xticks=places, xticklabels=names,
             xlabel="bytes that a rank sends to synchronise, of DDP's",
             ylabel="perplexity over DDP's, %")
    axis.minorticks_off()
    seeds = counted(len(there.losses(MAIN, DDP)), "seed")
    frame(figure, found, finding(there), "NoLoCo and DiLoCo beside DDP: perplexity against bytes",
          f"Each over DDP with its own optimizer (Adam where none is named). Rings: the papers' "
          f"outer steps, moved to the right, for as many bytes as the points beside them. Merged "
          f"models, 8 replicas, {there.settings[MAIN].steps} steps of 1024 tokens, fp32; {seeds} "
          f"(Muon 5), bars: 95% intervals.")
    return figure


def ticks(found):
    """([the bytes of about equal settings, of DDP's], [their labels])."""
    places, names = [], []
    for ours, theirs in TICKS:
        if found.losses(MAIN, NOLOCO[ours]):
            x = 100 * math.sqrt(bytes_of_ddp(NOLOCO[ours], 8) * bytes_of_ddp(DILOCO[theirs], 8))
            places.append(x)
            names.append(f"{x:.0f}%\nNoLoCo every {ours}\nDiLoCo every {theirs}")
    return [*places, 100], [*names, "100%\nevery 1"]


def finding(found):
    """The picture's title, where all primary comparisons are there."""
    verdicts = found.verdicts()
    if not verdicts:
        return ""
    far = found.over(MAIN, NOLOCO[10]).mean
    diloco = {"better": "below DiLoCo", "worse": "above DiLoCo",
              "cannot tell": "not clearly apart from DiLoCo"}[verdicts[TEN_OVER_DILOCO]]
    return (f"NoLoCo ends {far:.1%} above DDP for {bytes_of_ddp(NOLOCO[10], 8):.0%} of its bytes, "
            f"{diloco}")


# ---------------------------------------------------------------- expected numbers

NUMBERS = {     # (trial, base): {scale: (perplexity over the base's, at most so much off)}
    (NOLOCO[2], DDP): dict(full=(0.052, 0.01), plot=(0.105, 0.05)),
    (NOLOCO[10], DDP): dict(full=(0.115, 0.01), plot=(0.12, 0.05)),
    (DILOCO[20], DDP): dict(full=(0.118, 0.01), plot=(0.12, 0.05)),
    (NOLOCO[10], DILOCO[20]): dict(full=(0.0, 0.01), plot=(0.0, 0.04)),
}


def expected(found):
    there = Found.of(found)
    told = []
    for (trial, base), numbers in NUMBERS.items():
        more = there.over(MAIN, trial, base)
        number = numbers.get(found["scale"], (0.0, 0.0))
        told.append(Expected(f"{NAMES[trial]} over {NAMES[base]}, perplexity", more and more.mean,
                             *number, judged=found["scale"] in numbers))
    return told


ROW = Row("gap", measure, show, {"gap": draw}, expected)

if __name__ == "__main__":
    command(__doc__, ROW)
