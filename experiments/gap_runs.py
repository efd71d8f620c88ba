"""What experiments/gap.py trains, and how: settings, rates, rows, chunks."""
import fcntl
import itertools
import json
import os
import statistics
import sys
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import train
from experiments.fleet import Fleet, Trial, device, machine

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
PARTS, LATE_PARTS = Trial("noloco", 10, fragments=10), Trial("noloco", 10, 1, fragments=10)
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
SHORT = "1024 tokens, 300 steps"
WIDE = "4096 tokens, 300 steps"
WIDE_LONG = "4096 tokens, 1200 steps"
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
MIDDLE = DDP, NOLOCO[2], NOLOCO[10], DILOCO[4], DILOCO[20], LATE_PARTS, LATE, LATER


def tried(setting):
    """The same in seconds."""
    tokens = setting.tokens // 1024 * LENGTH
    return replace(setting, seeds=setting.seeds[:2], replicas=min(4, setting.replicas),
                   tokens=tokens, steps=12, rate_steps=4)


SCALES = {
    "full": Scale(FULL, RATES, RATE_SEEDS, f"{MODEL} --warmup 50 --eval-sequences 512",
                  {"cuda": 1280, "cpu": 32}),
    "plot": Scale((Setting(MAIN, MIDDLE, (0,), steps=60),), {"adam": (4e-3,)}, RATE_SEEDS,
                  f"{MODEL} --warmup 20 --eval-sequences 128", {"cuda": 1280, "cpu": 40}),
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


def train_all(scale, rows, seeds=None):
    """Train what is missing, the rates first."""
    for setting in scale.settings:
        lessons = [one for one in rate_lessons(scale) if one.setting == setting.name]
        train_missing(scale, setting, lessons, rows)
    for setting in scale.settings:
        lessons = list(measured_lessons(scale, setting, rows.read(), seeds))
        train_missing(scale, setting, lessons, rows)


def train_missing(scale, setting, lessons, rows):
    """Chunk by chunk. What another process has added meanwhile is not trained."""
    while True:
        there = rows.read()
        missing = [lesson for lesson in lessons if lesson.label not in there]
        if not missing:
            return
        chunk = next_chunk(scale, setting, missing)
        print(f"{setting.name}: {len(chunk)} of {len(missing)} runs, {chunk[0].steps} steps",
              flush=True)
        rows.add(train_chunk(scale, setting, chunk, rows))


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
