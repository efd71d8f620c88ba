"""Runs of train.py for a headline: started by torchrun, kept in runs/headline-*, told as curves.

    python -m experiments.convergence [--seeds 0 1 2] [--steps N] [--out DIR]
    python -m experiments.convergence --plot --out .          the table and the picture again, from results/

A run that is there already is not run again; remove its folder when train.py has changed. Results go to
OUT/results/headline_NAME.json, pictures to OUT/figures (default OUT: runs; what the README shows lies in
`.`). With --add those stay that are in OUT/results, and only what they lack is run: further seeds or kinds,
on another machine too where no seconds are measured.
"""
import argparse
import json
import math
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

from tqdm import tqdm

import train
from experiments.pictures import kept, picture, save
from model import Llama
from plumbing.data import load_data
from plumbing.options import Parser
from plumbing.processes import BadInput, Job
from survive import parts as surviving
from tools import export

ROOT = Path(__file__).parent.parent

# Wide enough to learn the default text, small enough that three seeds of everything take hours.
SMALL = "--hidden 64 --mlp 256 --heads 2 --eval-every 50 --save-every 1000000"
# Of metrics.jsonl.
KEPT = ("step", "tokens", "heldout_loss", "weight_spread", "lr", "sync_bytes", "simulated_seconds", "seconds",
        "sync_seconds", "sync_seconds_longest", "iteration_seconds", "steps_alone", "ranks")


@dataclass
class Run:
    """What to run: options of train.py, and what to find out in the run's folder afterwards."""
    label: str
    options: str
    processes: int = 8
    after: Callable = None      # folder -> dict
    first: bool = False         # with the first seed only: a search
    program: str = "-m train"   # or a module that puts parts of its own into train.build
    hosts: str = ""             # options of tools/hosts.py: each process on a host of its own


class Result:
    """What a run found: curves {name: [at each evaluation]}, ranks, and what `after` says; o: its
    options, as train.py reads its command."""

    def __init__(self, row):
        self.__dict__.update(row)
        words = shlex.split(self.command)
        self.o = train.parse(words[words.index("--name"):], self.ranks)
        self.steps = self.curves["step"]
        self.losses = self.curves["heldout_loss"]
        self.final = self.losses[-1]
        self.sent = self.curves["sync_bytes"][-1] / self.ranks / 1e6        # MB per rank to synchronise


def results(found):
    """{label: [a Result per seed]} of a results/headline_*.json."""
    return {label: [Result(row) for row in rows] for label, rows in found["runs"].items()}


def published(name):
    """The same of a headline that lies in results/."""
    return results(kept(ROOT, f"headline_{name}"))


# ---------------------------------------------------------------- the command line


def arguments(description):
    p = Parser(description, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="one run each of every kind")
    p.add_argument("--steps", type=int, help="training steps, in place of each run's own")
    p.add_argument("--out", default="runs", help="folder of results/ and figures/ (default: runs)")
    p.add_argument("--plot", action="store_true", help="no runs: table and picture of what OUT/results has")
    p.add_argument("--add", action="store_true", help="run what OUT/results lacks, and add it there")
    o = p.parse_args()
    if o.steps is not None and o.steps < 1:
        raise BadInput(f"--steps must be at least 1, got {o.steps}")
    if o.add and o.steps:
        raise BadInput("--add is for whole runs: leave out --steps")
    return o


def headline(name, description, runs, table, draw=None, seconds=None):
    """A headline's whole command; bad input is one line.

    runs(steps) -> [Run], table(found) prints, draw(plt, found) -> figure, seconds() -> simulated times.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))     # so that what was started ends too
    Job().together(run_or_show, name, description, runs, table, draw, seconds)


def run_or_show(name, description, runs, table, draw, seconds):
    o = arguments(description)
    if not o.plot:
        found = kept(o.out, f"headline_{name}") if o.add else dict(cpu_hours=0.0, runs={})
        run_all(name, list(runs(o.steps)), o, found)
        if seconds:
            found["seconds"] = seconds()
        save(o.out, f"headline_{name}", found, indent=None)
    found = kept(o.out, f"headline_{name}")
    table(found)
    if draw:
        picture(o.out, f"headline_{name}", draw, found)


def run_all(name, runs, o, found):
    """Adds to `found` what it lacks."""
    there = {label: [seed_of(row) for row in rows] for label, rows in found["runs"].items()}
    found["runs"] = {run.label: found["runs"].get(run.label, []) for run in runs} | found["runs"]
    todo = [(seed, run) for seed in o.seeds for run in runs if seed not in there.get(run.label, [])
            and (not run.first or seed == o.seeds[0] and run.label not in there)]
    with tqdm(total=len(todo), unit="run") as progress:
        for seed, run in todo:
            progress.set_postfix_str(run.label)
            own = f"-of-{o.steps}-steps" if o.steps else ""     # a try spares the whole runs
            row = train_once(run, identity(run, f"{name}-{run.label}-{seed}{own}", seed))
            found["cpu_hours"] = round(found["cpu_hours"] + row.pop("cpu_hours"), 3)
            found["runs"][run.label].append(row)
            found["runs"][run.label].sort(key=seed_of)
            progress.update()
    found["runs"] = {label: rows for label, rows in found["runs"].items() if rows}


# ---------------------------------------------------------------- one run


def command_line(processes, *words, hosts=()):
    """words: `-m MODULE` of this repository, or a script, and its options. hosts: those of tools/hosts.py."""
    if hosts:
        launcher = Path(sys.executable).with_name("torchrun")
        line = [sys.executable, "-m", "tools.hosts", str(processes), *hosts, "--"]
        return [*line, str(launcher), "--nproc-per-node", "1", *words]
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*line, "--nproc-per-node", str(processes), *words]


def torchrun(processes, *words, hosts=(), **kwargs):
    """That command, run to its end, which it finds also when we are interrupted; what it printed, with
    stdout=PIPE."""
    line = command_line(processes, *words, hosts=hosts)
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=path)
    with subprocess.Popen(line, env=env, text=True, **kwargs) as process:
        try:
            out, _ = process.communicate()
        finally:
            process.terminate()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, line)
    return out


def seed_of(row):
    return int(row["command"].split()[-1])


def identity(run, name, seed):
    """What a row of results begins with."""
    name = "headline-" + re.sub(r"[^\w.]+", "-", name)
    row = dict(command=f"{run.program} --name {name} {SMALL} {run.options} --seed {seed}")
    return {**row, "hosts": run.hosts} if run.hosts else row


def train_once(run, row):
    """The run's row of results: its identity, curves, CPU hours, and what `after` finds in its folder."""
    words = row["command"].split()
    folder = Path("runs", words[words.index("--name") + 1])
    done = folder / "headline.json"
    if done.exists() and (found := json.loads(done.read_text())).items() >= row.items():
        return found
    shutil.rmtree(folder, ignore_errors=True)
    start = cpu_seconds()
    with tempfile.TemporaryFile("w+") as log:
        try:
            torchrun(run.processes, *words, hosts=run.hosts.split(), stdout=log, stderr=log)
        except subprocess.CalledProcessError:
            log.seek(0)
            raise BadInput(f"{row['command']} failed: {log.read()[-2000:]}")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    row = dict(row, curves=curves([line for line in lines if "heldout_loss" in line]))
    row.update(run.after(folder) if run.after else {})
    row.update(ranks=run.processes, cpu_hours=(cpu_seconds() - start) / 3600)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    done.write_text(json.dumps(row))
    return row


def curves(lines):
    return {key: [line[key] and float(f"{line[key]:.6g}") for line in lines] for key in KEPT}


def cpu_seconds():
    """Of this process and of those that it has waited for."""
    return sum(os.times()[:4])


def built(job, argv, **parts):
    """The parts of train.build, as train.main has them, but for our own."""
    o = train.Options(**job.agree(train.parse, argv))
    if o.survive:
        return surviving.build(job, o, argv, **parts)           # has its own
    job.connect(o)
    return train.build(job, o, **parts)


# ---------------------------------------------------------------- the model that a run leaves


def mean_model(folder):
    """(the run's options, the whole model with the mean over the replicas of each stage, its corpus, rho of
    each stage, which is not in the weights yet)."""
    o = train.parse(["--resume", str(folder)])
    stages, layers = train.layout(o, sum(o.stages))
    _, parts = export.newest(Job(), folder, stages)
    model = Llama(train.whole_config(o))
    for flat, ranks in zip(export.by_stage(model, layers), stages):
        flat.copy_(sum(parts[r]["theta"] for r in ranks) / len(ranks))
    return o, model, load_data(o, 0, [0])[0], export.rho_of(o, parts[0])


def heldout(o, model, corpus):
    """Its held-out loss, in this process."""
    pipeline = train.Pipeline(model, Job(), [[0]], (o.batch, o.seq_len, o.hidden))
    return train.evaluate(pipeline, [[0]], corpus, o)


def mean_of_replicas(folder):
    """Held-out loss of the mean over the replicas, which one all-reduce at the very end would give."""
    o, model, corpus, _ = mean_model(folder)
    return dict(mean=heldout(o, model, corpus))


# ---------------------------------------------------------------- tables


def spread_of(values, form=".3f"):
    """Mean, and [least, largest] of several."""
    text = f"{statistics.mean(values):{form}}"
    return text if len(values) == 1 else f"{text} [{min(values):{form}}, {max(values):{form}}]"


def spread_of_reached(values, form):
    """Of the seeds that got there; None: one did not."""
    there = [value for value in values if value is not None]
    if not there:
        return "not reached"
    return spread_of(there, form) + f", {len(there)} of {len(values)} seeds" * (len(there) < len(values))


def same_seeds(runs, others):
    """Of the others those of the runs' seeds, in their order."""
    by_seed = {run.o.seed: run for run in others}
    return [by_seed[run.o.seed] for run in runs]


def over(losses, base):
    """Perplexity over the base's, seed by seed, less 1."""
    return [math.exp(a - b) - 1 for a, b in zip(losses, base)]


def finals(runs):
    return [run.final for run in runs]


def ends(runs):
    """Seconds of each run in all, as measured."""
    return [run.curves["seconds"][-1] for run in runs]


def over_runs(runs, others):
    """Perplexity at the end over the others', seed by seed, less 1. They may have more seeds."""
    return over(finals(runs), finals(same_seeds(runs, others)))


# ---------------------------------------------------------------- pictures


def band(axis, curves, x, label, colour, **style):
    """curves: one per seed. Their mean as a line, their range as a band."""
    points = list(zip(*curves))
    x = x[:len(points)]
    axis.plot(x, [statistics.mean(v) for v in points], color=colour, label=label, lw=1.3, **style)
    axis.fill_between(x, [min(v) for v in points], [max(v) for v in points], color=colour, alpha=0.2, lw=0)


def lines(axis, runs, label, colour, style="-"):
    """Loss against seconds as measured, a line per seed."""
    for i, run in enumerate(runs):
        axis.plot(run.curves["seconds"], run.losses, style, color=colour, label=None if i else label)


def losses(runs, every=1):
    """Held-out curves of all seeds, at every so manieth evaluation."""
    return [run.losses[every - 1::every] for run in runs]


def spreads(runs):
    return [run.curves["weight_spread"] for run in runs]


def tokens(runs, every=1):
    """Millions."""
    return [x / 1e6 for x in runs[0].curves["tokens"][every - 1::every]]
