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
A setting's rate is the best of RATES by the mean of seeds that measure nothing else. Where little
data is trained the rates are chosen after as many steps as are measured, and 4096 tokens for 1200
steps take the rates of 4096 for 300. The text has about 9 million bytes: a replica of eight reads
its part 1.1 times in 1200 steps of 1024 tokens and in 300 of 4096, 4.4 times in 1200 of 4096.
PRIMARY holds the comparisons that were named before the runs.
"""
import argparse
import fcntl
import itertools
import json
import math
import os
import statistics
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import train
from experiments.comparing import Comparison, Table, holm
from experiments.fleet import Fleet, Trial, device, machine
from experiments.pictures import COLOURS, WIDTH, picture, push_apart

MODEL = "--hidden 64 --mlp 256 --heads 2 --layers 2 --microbatches 1"
LENGTH = 128                                # tokens of a sequence
RATES = {"adam": (2e-3, 4e-3, 8e-3), "muon": (1.2e-2, 2.4e-2, 4.8e-2)}
RATE_SEEDS = 100, 101
TEN = tuple(range(10))
FIVE = TEN[:5]

# ---------------------------------------------------------------- what is trained

DDP, NEVER = Trial("ddp"), Trial("local")
NOLOCO = {m: Trial("noloco", m) for m in (2, 10, 50)}
DILOCO = {m: Trial("diloco", m) for m in (4, 20, 100)}
PARTS, LATE_PARTS = (Trial("noloco", 10, delay, fragments=10) for delay in (0, 1))
LATE, LATER = Trial("noloco", 10, 1), Trial("noloco", 10, 5)
PAPER_NOLOCO = Trial("noloco", 50, alpha=0.5, beta=0.7)
PAPER_DILOCO = Trial("diloco", 100, alpha=0.3, beta=0.7)
NAMES = {DDP: "DDP", NEVER: "never averaged"}
NAMES |= {trial: f"NoLoCo, every {m}" for m, trial in NOLOCO.items()}
NAMES |= {trial: f"DiLoCo, every {m}" for m, trial in DILOCO.items()}
NAMES |= {
    PARTS: "NoLoCo, every 10, 10 fragments", LATE_PARTS: "NoLoCo, every 10, 10 fragments, D = 1",
    LATE: "NoLoCo, every 10, D = 1", LATER: "NoLoCo, every 10, D = 5",
    PAPER_NOLOCO: "NoLoCo, the paper's outer step, every 50",
    PAPER_DILOCO: "DiLoCo, its paper's outer step, every 100"}
PAIR = DDP, NOLOCO[10]


@dataclass(frozen=True)
class Setting:
    """Trials that compare. rate_steps: after which rates are chosen. lender: the name of the
    setting whose rates it takes (default: its own)."""
    name: str
    trials: tuple = PAIR
    seeds: tuple = FIVE
    optimizer: str = "adam"
    replicas: int = 8
    tokens: int = 1024          # of a replica and step
    steps: int = 600
    rate_steps: int = 600
    lender: str = ""


@dataclass(frozen=True)
class Lesson:
    """A run of a setting: its row has these keys."""
    setting: str
    trial: Trial
    rate: float
    seed: int
    steps: int

    @property
    def label(self):
        return ", ".join(map(str, (self.setting, NAMES[self.trial], self.rate, f"seed {self.seed}",
                                   f"{self.steps} steps")))


@dataclass(frozen=True)
class Scale:
    """settings: in the order in which they are trained; rates of all come first."""
    settings: tuple
    rates: dict
    rate_seeds: tuple
    options: str                # of train.py
    models: dict                # trained in one fleet, by device


MAIN = "Adam"
SHORT, WIDE, WIDE_LONG = ("1024 tokens, 300 steps", "4096 tokens, 300 steps",
                          "4096 tokens, 1200 steps")
# The last are dropped first where time is short.
FULL = (
    Setting(MAIN, tuple(NAMES), TEN, steps=1200),
    Setting("Muon", (DDP, NOLOCO[2], NOLOCO[10], DILOCO[20]), optimizer="muon", steps=1200),
    Setting(SHORT, steps=300, rate_steps=300),
    Setting(WIDE, tokens=4096, steps=300, rate_steps=300),
    Setting("2 replicas", replicas=2),
    Setting("32 replicas", replicas=32),
    Setting(WIDE_LONG, tokens=4096, steps=1200, lender=WIDE),
)
MIDDLE = DDP, NOLOCO[2], NOLOCO[10], DILOCO[4], DILOCO[20]


def tried(setting):
    """The same in seconds."""
    tokens = setting.tokens // 1024 * LENGTH
    return replace(setting, seeds=setting.seeds[:2], replicas=min(4, setting.replicas),
                   tokens=tokens, steps=12, rate_steps=4)


SCALES = {
    "full": Scale(FULL, RATES, RATE_SEEDS, f"{MODEL} --warmup 50 --eval-sequences 512",
                  {"cuda": 1280, "cpu": 32}),
    "plot": Scale((Setting(MAIN, MIDDLE, (0, 1), steps=300),), {"adam": (4e-3,)}, RATE_SEEDS,
                  f"{MODEL} --warmup 50 --eval-sequences 256", {"cuda": 1280, "cpu": 40}),
    "try": Scale(tuple(map(tried, FULL)), {"adam": RATES["adam"][:2], "muon": RATES["muon"][:1]},
                 RATE_SEEDS, "--hidden 16 --mlp 32 --heads 2 --layers 1 --microbatches 1 "
                 "--warmup 2 --eval-sequences 8", {"cuda": 1280, "cpu": 256}),
}


def rate_lessons(scale):
    """Those by which rates are chosen. Where there is no choice there are none."""
    for setting in scale.settings:
        rates = scale.rates[setting.optimizer]
        if setting.lender or len(rates) == 1:
            continue
        for seed, trial, rate in itertools.product(scale.rate_seeds, setting.trials, rates):
            yield Lesson(setting.name, trial, rate, seed, setting.rate_steps)


def best_rate(scale, setting, trial, rows):
    """The rate with the lowest mean loss over the rate seeds; None while a row is missing."""
    name = setting.lender or setting.name
    lender = next(one for one in scale.settings if one.name == name)
    rates = scale.rates[setting.optimizer]
    if len(rates) == 1:
        return rates[0]
    means = {}
    for rate in rates:
        losses = rate_losses(scale, lender, trial, rate, rows)
        if None in losses:
            return None
        means[rate] = statistics.mean(losses)
    return min(means, key=means.get)


def rate_losses(scale, setting, trial, rate, rows):
    """Of each rate seed, None where it is not trained. Replicas that never average have no merged
    model to speak of: theirs are their means."""
    found = []
    for seed in scale.rate_seeds:
        row = rows.get(Lesson(setting.name, trial, rate, seed, setting.rate_steps).label)
        key = "mean" if trial == NEVER else "merged"
        found.append(row and row[key])
    return found


def measured_lessons(scale, setting, rows, seeds=None):
    """The runs that a setting rests on; none of a trial whose rate is not chosen yet."""
    for seed, trial in itertools.product(setting.seeds, setting.trials):
        rate = best_rate(scale, setting, trial, rows)
        if rate is not None and (seeds is None or seed in seeds):
            yield Lesson(setting.name, trial, rate, seed, setting.steps)


# ---------------------------------------------------------------- the rows


class Rows:
    """{label: row} in DIR/results/gap.json, of which several processes may be adding rows."""

    def __init__(self, out):
        self.file = Path(out, "results", "gap.json")
        self.file.parent.mkdir(parents=True, exist_ok=True)

    def read(self):
        if not self.file.exists():
            return {}
        return json.loads(self.file.read_text())["rows"]

    def add(self, rows):
        """Together with what others have added meanwhile; the file changes as a whole."""
        with self.locked():
            together = self.read() | rows
            self.refuse_texts(together)
            part = self.file.with_suffix(".part")
            lines = [f"{json.dumps(label)}: {json.dumps(row)}" for label, row in together.items()]
            part.write_text('{"rows": {\n' + ",\n".join(lines) + "\n}}\n")
            os.replace(part, self.file)

    @contextmanager
    def locked(self):
        folder = os.open(self.file.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)

    def refuse_texts(self, rows):
        if len({row["digest"] for row in rows.values()}) > 1:
            sys.exit(f"{self.file} has rows of another text or Python, which do not compare: give "
                     "another --out")


# ---------------------------------------------------------------- training


class OutOfTime(Exception):
    """The next chunk would end too late. The message says what it is."""


class Clock:
    """Until when a chunk may end, and how long one takes. minutes: None: for ever.

    The first fleet of a GPU also compiles the gradient; until one is trained nothing is known.
    """
    FIRST = {"cuda": 4e6, "cpu": 5e3}       # tokens a second
    START = {"cuda": 75.0, "cpu": 20.0}     # seconds of compiling
    MORE = 1.15                             # of what is expected, to be on the safe side

    def __init__(self, minutes):
        self.end = time.monotonic() + 60 * (minutes or math.inf)
        self.rates = {}                     # tokens a second: {(optimizer, tokens of a step): it}
        self.warm = False

    def seconds(self, setting, lessons):
        tokens = tokens_of(setting, lessons)
        known = self.rates.get(setting.optimizer, min(self.rates.values(), default=None))
        if known is None:
            return self.START[device()] + tokens / self.FIRST[device()]
        return self.MORE * tokens / known + 3

    def saw(self, setting, lessons, seconds):
        if not self.warm:
            seconds = max(0.3 * seconds, seconds - self.START[device()] / 2)
        self.warm = True
        self.rates[setting.optimizer] = tokens_of(setting, lessons) / seconds

    def fitting(self, setting, lessons):
        """The lessons of as many seeds, the first ones, as end in time. Raises OutOfTime."""
        left = self.end - time.monotonic()
        seeds = sorted({lesson.seed for lesson in lessons})
        for count in range(len(seeds), 0, -1):
            some = [lesson for lesson in lessons if lesson.seed in seeds[:count]]
            needed = self.seconds(setting, some)
            if needed <= left:
                return some
        raise OutOfTime(f"{setting.name}, {len(some)} runs would take {needed:.0f} s")


def tokens_of(setting, lessons):
    return sum(lesson.steps for lesson in lessons) * setting.replicas * setting.tokens


def train_all(scale, rows, clock, seeds=None):
    """Train what is missing, the rates first. Raises OutOfTime."""
    for setting in scale.settings:
        lessons = [one for one in rate_lessons(scale) if one.setting == setting.name]
        train_missing(scale, setting, lessons, rows, clock)
    for setting in scale.settings:
        lessons = list(measured_lessons(scale, setting, rows.read(), seeds))
        train_missing(scale, setting, lessons, rows, clock)


def train_missing(scale, setting, lessons, rows, clock):
    """Chunk by chunk. What another process has added meanwhile is not trained."""
    while True:
        there = rows.read()
        missing = [lesson for lesson in lessons if lesson.label not in there]
        if not missing:
            return
        chunk = clock.fitting(setting, next_chunk(scale, setting, missing))
        began = time.monotonic()
        print(f"{setting.name}: {len(chunk)} of {len(missing)} runs, {chunk[0].steps} steps",
              flush=True)
        rows.add(train_chunk(scale, setting, chunk, rows))
        seconds = time.monotonic() - began
        clock.saw(setting, chunk, seconds)
        print(f"{seconds:.0f} s, {tokens_of(setting, chunk) / seconds / 1e6:.2f} million tokens a "
              "second", flush=True)


def next_chunk(scale, setting, missing):
    """Lessons that one fleet trains: the same trials and rates with up to five seeds."""
    of_seed = {}
    for lesson in missing:
        of_seed.setdefault(lesson.seed, []).append(lesson)
    first = min(of_seed)
    learners = learners_of(of_seed[first])
    room = max(1, scale.models[device()] // setting.replicas)
    learners = learners[:room]
    alike = [seed for seed in sorted(of_seed) if learners_of(of_seed[seed])[:room] == learners]
    count = max(1, room // len(learners))
    seeds = alike[:min(5, count)]
    return [lesson for lesson in missing
            if lesson.seed in seeds and (lesson.trial, lesson.rate) in learners]


def learners_of(lessons):
    """Their (trial, rate), each once."""
    return list(dict.fromkeys((lesson.trial, lesson.rate) for lesson in lessons))


def train_chunk(scale, setting, chunk, rows):
    """{label: row} of the lessons: each trial and rate of them with each seed of them. rows: beside
    which they will stand."""
    learners = learners_of(chunk)
    seeds = sorted({lesson.seed for lesson in chunk})
    rates = [rate for _, rate in learners]
    options = (f"{scale.options} --batch {setting.tokens // LENGTH} --seq-len {LENGTH} "
               f"--steps {chunk[0].steps} --lr {rates[0]} --optimizer {setting.optimizer}")
    fleet = Fleet(train.parse(options.split()), [trial for trial, _ in learners], setting.replicas,
                  seeds, device(), rates)
    rows.refuse_texts(rows.read() | {"this one": dict(digest=fleet.digest)})
    found = {}
    for row in fleet.train():
        lesson = Lesson(setting.name, Trial(**row["trial"]), row["lr"], row["seed"],
                        chunk[0].steps)
        found[lesson.label] = dict(
            merged=row["merged"], mean=row["losses"][-1], digest=fleet.digest, machine=machine(),
            torch=torch.__version__)
    return found


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
    if not found.is_whole():
        print("Not all is trained yet: these tables hold no finding.\n")


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
        table = Table(f"{setting.name}, {setting.rate_steps} steps", *(f"{rate:g}" for rate in rates),
                      "best")
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
    if not (verdicts and found.is_whole()):
        setting = found.settings[MAIN]
        return (f"NoLoCo and DiLoCo beside DDP (a small copy: {setting.steps} steps, "
                f"{len(found.losses(MAIN, DDP))} seeds; no finding)")
    far, near = (found.over(MAIN, NOLOCO[m]).mean for m in (10, 2))
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
