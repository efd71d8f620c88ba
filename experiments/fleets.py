"""Fleets whose rows are kept one by one: a row that is there is not trained again.

Several processes may train parts of one experiment at the same time, with --only or --seeds. Each
row is a file in runs/fleets/ and is written once, so nothing that was trained is lost.
"""
import itertools
import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import train
from experiments.fleet import Fleet, Trial, device, machine
from experiments import replicas
from experiments.replicas import LEARN, LENGTH, SEQUENCES, merged_loss
from experiments.results import kept_result
from train import write_text

FOLDER = Path("runs", "fleets")
# Trained in one fleet, if a trial with its seeds has no more, so that a process needs little memory
# and what it trained is soon kept.
MODELS = {"cuda": 512, "cpu": 32}
# Whether the seeds of a trial train in one fleet, or one after the other.
SEEDS_TOGETHER = {"cuda": True, "cpu": False}


@dataclass(frozen=True)
class Lesson:
    """What is trained: a trial, and all else that its row depends on.

    Lessons that differ in trial and seed alone may train in one fleet.
    """
    trial: Trial
    seed: int
    lr: float
    optimizer: str = "adam"
    replicas: int = 8
    sequences: int = SEQUENCES          # of a replica's step
    steps: int = 600

    @property
    def kind(self):
        """All but the trial and the seed, as text."""
        own = asdict(self)
        del own["trial"], own["seed"]
        return ", ".join(f"{name} {value}" for name, value in own.items())

    @property
    def label(self):
        """What --only looks in, and the row's name."""
        t = self.trial
        words = [t.method, f"m {t.every}", f"K {t.fragments}", f"D {t.delay}", t.wire,
                 f"n {t.group}"]
        return ", ".join([*words, f"seed {self.seed}", self.kind])

    @property
    def file(self):
        return FOLDER / (self.label.replace(", ", "-").replace(" ", "") + ".json")


def kept_rows(name, o):
    """{label: row} that OUT/results has of a part."""
    if Path(o.out, "results", f"headline_{name}.json").exists():
        return kept_result(o.out, f"headline_{name}")["rows"]
    return {}


def named(lessons, o):
    """Those that --only names."""
    return [lesson for lesson in lessons if o.only in lesson.label]


def train_lessons(lessons, rows):
    """Add to rows, {label: row}, those that are missing: from their files, else by training
    them."""
    lessons = list(dict.fromkeys(lessons))
    for lesson in lessons:
        if lesson.label not in rows and lesson.file.exists():
            rows[lesson.label] = json.loads(lesson.file.read_text())
    missing = [lesson for lesson in lessons if lesson.label not in rows]
    for chunk in chunks(missing):
        seeds = sorted({lesson.seed for lesson in chunk})
        print(f"{len(chunk)} of {len(missing)} lessons: seeds {seeds}, {chunk[0].kind}", flush=True)
        train_chunk(chunk)
        for lesson in chunk:
            rows[lesson.label] = json.loads(lesson.file.read_text())


def chunks(lessons):
    """Lists of lessons that may train together: some trials, each with the same seeds. Kind by
    kind; on a CPU also seed by seed."""
    for alike in alike_lessons(lessons):
        for trials in of_equal_seeds(alike):
            models = trials[0][0].replicas * len(trials[0])
            most = max(1, MODELS[device()] // models)
            for start in range(0, len(trials), most):
                yield list(itertools.chain(*trials[start:start + most]))


def alike_lessons(lessons):
    """Lists of lessons of one kind, on a CPU also of one seed."""
    found = {}
    for lesson in lessons:
        alone = None if SEEDS_TOGETHER[device()] else lesson.seed
        found.setdefault((lesson.kind, alone), []).append(lesson)
    return found.values()


def of_equal_seeds(lessons):
    """Lists of the trials with equal seeds, each as the list of its lessons, seed by seed."""
    by_trial = {}
    for lesson in lessons:
        by_trial.setdefault(lesson.trial, []).append(lesson)
    found = {}
    for same in by_trial.values():
        seeds = tuple(lesson.seed for lesson in same)
        found.setdefault(seeds, []).append(same)
    return found.values()


def train_chunk(chunk):
    """Train lessons of one kind, some trials with the same seeds, and write a file for each."""
    one = chunk[0]
    options = (f"{LEARN} --batch {one.sequences} --steps {one.steps} --lr {one.lr} "
               f"--optimizer {one.optimizer}")
    trials = list(dict.fromkeys(lesson.trial for lesson in chunk))
    seeds = list(dict.fromkeys(lesson.seed for lesson in chunk))
    fleet = Fleet(train.parse(options.split()), trials, one.replicas, seeds, device())
    start = time.perf_counter()
    rows = fleet.train()
    seconds = time.perf_counter() - start
    found = {(Trial(**row["trial"]), row["seed"]): row for row in rows}
    FOLDER.mkdir(parents=True, exist_ok=True)
    for lesson in chunk:
        row = found[lesson.trial, lesson.seed]
        row |= dict(steps=one.steps, digest=fleet.digest, machine=machine(),
                    torch=torch.__version__, seconds=round(seconds / len(chunk), 2))
        write_text(lesson.file, json.dumps(row))


# ---------------------------------------------------------------- what was found

PLAIN = "adam", 8, SEQUENCES * LENGTH       # optimizer, replicas, tokens of a replica's step


def setting_of(optimizer="adam", replicas=8, sequences=SEQUENCES):
    """As PLAIN. sequences: of a replica's step."""
    return optimizer, replicas, sequences * LENGTH


class Rows:
    """The rows of a part that have the rate of their trial. rate: (trial, optimizer) -> float."""

    def __init__(self, found, rate):
        self.rows = {}              # {setting: {trial: {seed: row}}}
        for row in sorted(found["rows"].values(), key=lambda row: row["seed"]):
            trial = Trial(**row["trial"])
            optimizer = row["optimizer"]
            if row["lr"] == rate(trial, optimizer):
                setting = optimizer, row["replicas"], row["tokens"]
                trials = self.rows.setdefault(setting, {})
                trials.setdefault(trial, {})[row["seed"]] = row

    def of(self, trial, setting=PLAIN):
        """{seed: row}, perhaps of no seed."""
        return self.rows.get(setting, {}).get(trial, {})

    def losses(self, trial, loss=merged_loss, setting=PLAIN):
        return [loss(row) for row in self.of(trial, setting).values()]

    def mean(self, trial, loss=merged_loss):
        """Of all seeds, as a cell; None without any."""
        losses = self.losses(trial, loss)
        return f"{statistics.mean(losses):.3f}" if losses else None

    def nats_over(self, trial, base, loss=merged_loss, setting=PLAIN):
        """As in replicas.py, of one setting."""
        return replicas.nats_over(self.rows.get(setting, {}), trial, base, loss)

    def gap(self, trial, setting=PLAIN):
        """As in replicas.py, of one setting."""
        return replicas.gap(self.rows.get(setting, {}), trial)
