"""Runs of train.py for a headline: started by torchrun, kept in runs/headline-*, told as curves.

    python -m experiments.losses [PART ...] [--seeds 0 1 2] [--steps N] [--out DIR]
    python -m experiments.losses --plot --out .         the tables and pictures again, from results/

A finished run is not run again; remove its folder in runs/ when train.py has changed. Several instances may
run at a time, each with an `--only LABEL` (and `--seeds`) of its own; the plain command then collects all.
Results go to OUT/results/headline_PART.json, pictures to OUT/figures (default OUT: runs; the README shows
those of `.`).
"""
import argparse
import itertools
import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

import numpy as np
from tqdm import tqdm

import train
from experiments.pictures import kept, picture, save
from plumbing.options import Parser
from plumbing.processes import BadInput, Job
from plumbing.report import replace
from survive import parts as surviving

ROOT = Path(__file__).parent.parent

# Wide enough to learn the default text, small enough that three seeds of everything take hours.
SMALL = "--hidden 64 --mlp 256 --heads 2 --eval-every 50 --eval-sequences 512 --save-every 1000000"
# The columns of metrics.jsonl that results keep.
KEPT = ("step", "tokens", "heldout_loss", "weight_spread", "lr", "sync_bytes", "simulated_seconds", "seconds",
        "iteration_seconds", "steps_alone", "ranks", "sync_seconds")
# Half-widths of a 95% interval in standard errors: Student's t with 1, 2, ... degrees of freedom.
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
# torchrun would import torch once more on each host, which takes a fifth of a processor 12 seconds.
ALONE = ("RANK=$PET_NODE_RANK WORLD_SIZE=$PET_NNODES LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 "
         'MASTER_ADDR=$PET_MASTER_ADDR MASTER_PORT=$PET_MASTER_PORT exec "$@"')


@dataclass
class Run:
    """What to run, and what to find out in the run's folder afterwards."""
    label: str
    options: str                # of train.py
    processes: int = 8
    after: Callable = None      # folder -> dict
    program: str = "-m train"   # or a module that puts parts of its own into train.build
    hosts: str = ""             # options of tools/hosts.py: each process on a host of its own


@dataclass
class Part:
    """One table, from OUT/results/headline_PART.json."""
    runs: Callable              # steps or None -> Runs
    table: Callable             # found: prints it
    draw: Callable = None       # (plt, found) -> figure
    seconds: Callable = None    # -> simulated seconds, kept beside the runs
    picture: str = None         # its name (default: the part's)
    seeds: tuple = (0, 1, 2)    # without --seeds
    measure: Callable = None    # (name, part, o) -> found (default: `run_all`)


class Result:
    """What one run found: curves {name: [at each evaluation]}, ranks, what `after` says."""

    def __init__(self, row):
        self.__dict__.update(row)
        words = self.command.split()
        given = dict(zip(words, words[1:]))             # of an option given twice the last
        self.wire, self.seed = given.get("--wire", "fp32"), int(given["--seed"])
        self.steps = self.curves["step"]
        self.losses = self.curves["heldout_loss"]
        self.final = self.losses[-1]
        self.sent = self.curves["sync_bytes"][-1] / self.ranks / 1e6        # MB per rank to synchronise


def results(found):
    """{label: [a Result per seed]} of a results/headline_*.json."""
    return {label: [Result(row) for row in rows] for label, rows in found["runs"].items()}


def published(part):
    """{label: [a Result per seed]} of a part in this repository's results/."""
    return results(kept(ROOT, f"headline_{part}"))


# ---------------------------------------------------------------- the command line


def headline(description, parts):
    """The whole command of an experiment; parts: {name: Part}. Bad input ends in one line."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))     # so that started processes end too

    def run_or_show():
        o = arguments(description, parts)
        for name in o.parts or parts:
            part = parts[name]
            if not o.plot:
                found = (part.measure or run_all)(name, part, o)
                if o.only:
                    continue
                save(o.out, f"headline_{name}", found)
            found = kept(o.out, f"headline_{name}")
            part.table(found)
            if part.draw:
                picture(o.out, f"headline_{part.picture or name}", part.draw, found)

    Job().together(run_or_show)


def arguments(description, parts):
    p = Parser(description, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("parts", nargs="*", help=f"{', '.join(parts)} (default: all)")
    p.add_argument("--seeds", nargs="+", type=int, help="one run each of every kind (mostly 0 1 2)")
    p.add_argument("--only", default="", help="run only what has this in its label, and show nothing")
    p.add_argument("--steps", type=int, help="training steps, in place of each run's own")
    p.add_argument("--out", default="runs", help="folder of results/ and figures/ (default: runs)")
    p.add_argument("--plot", action="store_true", help="no runs: tables and pictures of OUT/results")
    o = p.parse_args()
    if wrong := [name for name in o.parts if name not in parts]:
        raise BadInput(f"no part {wrong[0]}, only {', '.join(parts)}")
    if o.steps is not None and o.steps < 1:
        raise BadInput(f"--steps must be at least 1, got {o.steps}")
    return o


def run_all(name, part, o):
    """{"cpu_hours", "runs": {label: [a row per seed]}, "seconds" if the part has any} of the part's runs."""
    runs, seeds = [run for run in part.runs(o.steps) if o.only in run.label], o.seeds or part.seeds
    found = dict(cpu_hours=0.0, runs={run.label: [] for run in runs})
    if part.seconds:
        found["seconds"] = part.seconds()
    with tqdm(total=len(seeds) * len(runs), unit="run") as progress:
        for seed, run in itertools.product(seeds, runs):
            progress.set_postfix_str(run.label)
            own = f"-of-{o.steps}-steps" if o.steps else ""     # a try keeps to folders of its own
            row = train_once(run, f"{name}-{run.label}-{seed}{own}", seed)
            found["cpu_hours"] = round(found["cpu_hours"] + row.pop("cpu_hours"), 3)
            found["runs"][run.label].append(row)
            progress.update()
    return found


# ---------------------------------------------------------------- one run


def torchrun(processes, *words, hosts=(), **kwargs):
    """Run words, `-m MODULE` or a script and its options, to the end. kwargs: of Popen.

    hosts: options of tools/hosts.py. Raises CalledProcessError. An interrupt ends the processes too.
    """
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    if hosts:
        line = [sys.executable, "-m", "tools.hosts", str(processes), *hosts, "--",
                "sh", "-c", ALONE, "sh", sys.executable]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=path)
    with subprocess.Popen([*line, *words], env=env, text=True, **kwargs) as process:
        try:
            process.wait()
        finally:
            process.terminate()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, line)


def train_once(run, name, seed):
    """The run's row of results: command, hosts, curves, CPU hours, and what `after` finds in its folder."""
    name = "headline-" + re.sub(r"[^\w.]+", "-", name)
    row = dict(command=f"{run.program} --name {name} {SMALL} {run.options} --seed {seed}")
    row |= dict(hosts=run.hosts) if run.hosts else {}
    folder = Path("runs", name)
    done = folder / "headline.json"
    if done.exists() and (found := json.loads(done.read_text())).items() >= row.items():
        return found
    shutil.rmtree(folder, ignore_errors=True)
    start = sum(os.times()[:4])      # CPU seconds, also of processes waited for
    with tempfile.TemporaryFile("w+") as log:
        try:
            torchrun(run.processes, *row["command"].split(), hosts=run.hosts.split(), stdout=log, stderr=log)
        except subprocess.CalledProcessError:
            log.seek(0)
            text = log.read()
            folder.parent.mkdir(exist_ok=True)
            Path(f"{folder}.log").write_text(text)
            raise BadInput(f"{row['command']} failed (see {folder}.log): {text[-1000:]}")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "heldout_loss" in line]
    curves = {key: [line[key] and float(f"{line[key]:.6g}") for line in lines] for key in KEPT}
    row = dict(row, curves=curves, **(run.after(folder) if run.after else {}), ranks=run.processes,
               cpu_hours=(sum(os.times()[:4]) - start) / 3600)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    replace(done, json.dumps(row))
    return row


def built(job, argv, **parts):
    """A train.Run as train.main builds it, with parts of our own; with --survive it has its own."""
    o = train.Options(**job.agree(train.parse, argv))
    if o.survive:
        return surviving.build(job, o, argv)
    job.connect(o)
    return train.build(job, o, **parts)


# ---------------------------------------------------------------- tables


def spread_of(values, form=".3f"):
    """Mean, and [least, largest] of several."""
    text = f"{statistics.mean(values):{form}}"
    return text if len(values) == 1 else f"{text} [{min(values):{form}}, {max(values):{form}}]"


def interval_of(differences, form):
    """Mean [95% interval] of paired differences, and "better" or "worse" where that leaves out zero."""
    n, mean = len(differences), statistics.mean(differences)
    if n == 1:
        return f"{mean:{form}}"
    half = T95[n - 2] * statistics.stdev(differences) / math.sqrt(n)
    verdict = "worse" if mean > half else "better" if mean < -half else "undecided"
    return f"{mean:{form}} [{mean - half:{form}}, {mean + half:{form}}], {verdict}"


def spread_of_reached(values, form):
    """The same of the seeds that reached a goal; None: that seed did not."""
    there = [value for value in values if value is not None]
    if not there:
        return "not reached"
    return spread_of(there, form) + f", {len(there)} of {len(values)} seeds" * (len(there) < len(values))


def same_seeds(runs, others):
    """The others with the runs' seeds, in the runs' order."""
    by_seed = {run.seed: run for run in others}
    return [by_seed[run.seed] for run in runs]


def over(losses, base):
    """Perplexity over the base's, seed by seed, less 1."""
    return [math.exp(a - b) - 1 for a, b in zip(losses, base)]


def finals(runs):
    return [run.final for run in runs]


def ends(runs):
    """Measured seconds of each run in all."""
    return [run.curves["seconds"][-1] for run in runs]


def over_runs(runs, others):
    """Perplexity at the end over the others', seed by seed, less 1. The others may have more seeds."""
    return over(finals(runs), finals(same_seeds(runs, others)))


# ---------------------------------------------------------------- pictures


def band(axis, curves, x, colour, **style):
    """Draw the mean of the curves, one per seed, as a line and their range as a band; some may end early."""
    points = [[curve[i] for curve in curves if i < len(curve)] for i in range(max(map(len, curves)))]
    x = x[:len(points)]
    axis.plot(x, [*map(statistics.mean, points)], color=colour, **{"lw": 1.5, **style})
    axis.fill_between(x, [*map(min, points)], [*map(max, points)], color=colour, alpha=0.15, lw=0)


def timed(runs, count=60):
    """(seconds, losses of each seed at these seconds) of runs evaluated at moments of their own."""
    begin = max(run.curves["seconds"][0] for run in runs)
    moments = [begin + (min(ends(runs)) - begin) * i / (count - 1) for i in range(count)]
    return moments, [[loss_at(moment, run) for moment in moments] for run in runs]


# ---------------------------------------------------------------- a loss and its moment


def reaches(goal, losses, moments):
    """The moment at which the loss is at most the goal, on straight lines; None: never."""
    points = list(zip(moments, losses))
    if losses[0] <= goal:
        return moments[0]
    for (before, above), (after, value) in zip(points, points[1:]):
        if value <= goal:
            return before + (above - goal) / (above - value) * (after - before)


def loss_at(second, run):
    """The run's loss then, on straight lines between evaluations as measured; after its end, the last."""
    return float(np.interp(second, run.curves["seconds"], run.losses))
