"""How far NoLoCo and DiLoCo end above DDP, for how many bytes: the row "gap" of README's table.

    python -m experiments.gap train [--scale try|plot|full] [--minutes M] [--out DIR]
    python -m experiments.gap show [--scale try|plot|full] [--out DIR]

`train` trains what DIR/results/gap.json lacks, then tells and draws what is there, as `show` does
alone. It may be stopped at any moment: each chunk's rows are kept once it is trained, the same
command goes on, and with --minutes no chunk begins that would end too late. Two processes may train
into one DIR, with --seeds of their own: a row is added under a lock, and none is lost.

    try     seconds: all code, no finding
    plot    some minutes of a laptop: the five settings of the picture's middle, one rate, 300 steps
    full    minutes of an H100, some ten hours of two cores: the settings below

Fleets of replicas (experiments/fleet.py) learn the standard library's text, byte by byte, in fp32,
messages and sums as well. Every gap is the merged model's perplexity over DDP's, paired by seed.
A setting's rate is the best of three by the mean of seeds that measure nothing else. Where little
data is trained the rates are chosen after as many steps as are measured, and 4096 tokens for 1200
steps take the rates of 4096 for 300. The text has about 9 million bytes: a replica of eight reads
its part 1.1 times in 1200 steps of 1024 tokens and in 300 of 4096, 4.4 times in 1200 of 4096.
PRIMARY holds the comparisons that were named before the runs.
"""
import argparse
import math
import statistics
import sys

from experiments.comparing import Comparison, Table, holm
from experiments.gap_runs import (DDP, DILOCO, FULL, LATE, LATE_PARTS, LATER, MAIN, NAMES, NEVER,
                                  NOLOCO, PAIR, PAPER_DILOCO, PAPER_NOLOCO, SCALES, WIDE, Clock,
                                  OutOfTime, Rows, best_rate, measured_lessons, rate_losses,
                                  train_all)
from experiments.pictures import COLOURS, WIDTH, picture, push_apart

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
    ("NoLoCo every 10 over DDP: 4096 tokens for 300 steps over 1024 for 1200",
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

    def is_whole(self):
        """Whether every run of the scale is there."""
        for setting in self.scale.settings:
            lessons = list(measured_lessons(self.scale, setting, self.rows))
            if len(lessons) < len(setting.seeds) * len(setting.trials):
                return False
            if any(lesson.label not in self.rows for lesson in lessons):
                return False
        return True

    def is_finding(self):
        return self.scale.settings == FULL and self.is_whole()

    def rate(self, name, trial):
        return best_rate(self.scale, self.settings[name], trial, self.rows)


def show(found):
    """All tables of what is there."""
    show_primary(found)
    for setting in found.scale.settings:
        if found.losses(setting.name, DDP) and setting.trials != PAIR:
            show_setting(found, setting)
    show_pairs(found)
    show_means(found)
    show_rates(found)
    if not found.is_finding():
        print("A small copy, or not all is trained yet: these tables hold no finding.\n")


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
    table = Table(f"{head}, {setting.steps} steps", "bytes of DDP's", "rate", "nats per byte",
                  "over DDP's")
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
    table = Table("NoLoCo every 10 beside DDP", "DDP's rate", "NoLoCo's rate",
                  "DDP, nats per byte", "NoLoCo over DDP's")
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
    table = Table("replicas' mean", "nats per byte", "over DDP's")
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
    "NoLoCo with Muon": ("Muon", (NOLOCO[2], NOLOCO[10]), "NoLoCo", dict(ls="--")),
    "NoLoCo, the paper's outer step": (MAIN, (PAPER_NOLOCO,), "NoLoCo", dict(mfc="white", ms=6)),
    "DiLoCo, its paper's outer step": (MAIN, (PAPER_DILOCO,), "DiLoCo", dict(mfc="white", ms=6)),
}
TICKS = (50, 100), (10, 20), (2, 4)         # NoLoCo's m and DiLoCo's, of about as many bytes


def draw(plt, found):
    """The merged model's perplexity over DDP's against the bytes that a rank sends."""
    figure, axis = plt.subplots(figsize=(WIDTH, 4.6))
    left, right = [], []
    for label, (name, trials, colour, style) in LINES.items():
        compared = {}
        for trial in trials:
            gap = found.over(name, trial)
            if gap:
                compared[100 * bytes_of_ddp(trial, 8)] = gap
        if not compared:
            continue
        x = sorted(compared)
        draw_line(axis, x, [compared[at] for at in x], COLOURS[colour], style)
        end = label, COLOURS[colour], x[-1], 100 * compared[x[-1]].mean
        (left if len(trials) == 1 else right).append(end)
    axis.plot([100], [0], "s", color=COLOURS["DDP"], ms=6)
    axis.annotate("DDP", (100, 0), xytext=(8, 0), textcoords="offset points", va="center")
    axis.set_xscale("log")
    places, names = ticks(found)
    axis.set(xlim=(0.09 if left else 3.5, 220), ylim=(-3, None), xticks=places, xticklabels=names,
             xlabel="bytes that a rank sends to synchronise, of DDP's (fp32, 8 replicas)",
             ylabel="perplexity over DDP's, %\n(same optimizer; bars: 95% intervals)",
             title=title(found))
    axis.minorticks_off()
    figure.draw_without_rendering()
    label_column(axis, right, "left", 8)
    label_column(axis, left, "right", -8)
    return figure


def draw_line(axis, x, gaps, colour, style):
    means = [100 * gap.mean for gap in gaps]
    reach = []
    for gap in gaps:
        low, high = gap.interval or (gap.mean, gap.mean)
        reach.append(50 * (high - low))
    axis.errorbar(x, means, reach, color=colour, marker="o", capsize=2, elinewidth=0.8, lw=1.5,
                  **style)


def ticks(found):
    """([the bytes of about equal settings, of DDP's], [their labels])."""
    places, names = [], []
    for ours, theirs in TICKS:
        if found.losses(MAIN, NOLOCO[ours]):
            x = 100 * math.sqrt(bytes_of_ddp(NOLOCO[ours], 8) * bytes_of_ddp(DILOCO[theirs], 8))
            places.append(x)
            names.append(f"~{x:.0f}%\nNoLoCo every {ours}\nDiLoCo every {theirs}")
    return [*places, 100], [*names, "100%\nDDP"]


def label_column(axis, ends, side, away):
    """Write labels beside the ends (label, colour, x, y) of lines: in one column, none on another.
    side: of the text, at which its end lies; away: points between them."""
    if not ends:
        return
    pick = max if side == "left" else min
    x = pick(end[2] for end in ends)
    to_points = 72 / axis.figure.dpi
    heights = [to_points * axis.transData.transform((x, y))[1] for _, _, _, y in ends]
    moved = push_apart(heights, [13.0] * len(ends))
    for (label, colour, _, y), height, place in zip(ends, heights, moved):
        axis.annotate(label, (x, y), xytext=(away, place - height), textcoords="offset points",
                      ha=side, va="center", color=colour, annotation_clip=False)


def title(found):
    """The finding, where the whole of the full scale is there."""
    verdicts = found.verdicts()
    if not (verdicts and found.is_finding()):
        setting = found.settings[MAIN]
        return (f"NoLoCo and DiLoCo beside DDP (a small copy: {setting.steps} steps, "
                f"{len(found.losses(MAIN, DDP))} seeds; no finding)")
    far = found.over(MAIN, NOLOCO[10]).mean
    near = found.over(MAIN, NOLOCO[2]).mean
    diloco = {"better": "and below DiLoCo", "worse": "and above DiLoCo",
              "cannot tell": "with no clear difference to DiLoCo"}[verdicts[TEN_OVER_DILOCO]]
    return (f"NoLoCo ends {far:.0%} above DDP for {bytes_of_ddp(NOLOCO[10], 8):.0%} of its bytes "
            f"({near:.0%} for {bytes_of_ddp(NOLOCO[2], 8):.0%}), {diloco}")


# ---------------------------------------------------------------- the command line


def parse(argv=None):
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=["train", "show"])
    p.add_argument("--scale", choices=list(SCALES), default="full")
    p.add_argument("--minutes", type=float, help="no chunk begins that would end later")
    p.add_argument("--seeds", type=int, nargs="+", help="only these are measured now")
    p.add_argument("--out", help="folder of results/ and figures/ (default: for full here, else "
                   "runs/gap-SCALE)")
    o = p.parse_args(argv)
    if o.minutes is not None and not o.minutes > 0:
        sys.exit(f"--minutes must be above 0, got {o.minutes:g}")
    if o.out is None:
        o.out = "." if o.scale == "full" else f"runs/gap-{o.scale}"
    return o


def main(argv=None):
    o = parse(argv)
    scale = SCALES[o.scale]
    rows = Rows(o.out)
    if o.what == "train":
        try:
            train_all(scale, rows, Clock(o.minutes), o.seeds)
        except OutOfTime as error:
            print(f"stopped: {error}. The same command goes on from here\n")
    found = Found(scale, rows.read())
    show(found)
    if found.losses(MAIN, DDP):
        picture(o.out, "gap", draw, found)


if __name__ == "__main__":
    main()
