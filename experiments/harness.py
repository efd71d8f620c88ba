"""The harness of all experiments: runs of train.py, kept in runs/headline-*, told as tables and
pictures.

    python -m experiments.losses [PART ...] [--seeds 0 1 2] [--steps N] [--out DIR]
    python -m experiments.losses --plot --out .         the tables and pictures again, from results/
    python -m experiments.losses --plot --out . --record        and steps, ranges and predictions

A finished run is not run again; remove its folder in runs/ when train.py has changed. Several
instances may run at a time, each with an `--only LABEL` (and `--seeds`) of its own; the plain
command then collects all. Results go to OUT/results/headline_PART.json, pictures to OUT/figures
(default OUT: runs; the README shows those of `.`).
"""
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable

from tqdm import tqdm

import train
from experiments.comparing import Table
from experiments.pictures import picture
from experiments.results import ROOT, kept_result, mean_final, results, save_result
from train import BadInput, Job, Parser, write_text

# Wide enough to learn the default text, small enough that three seeds of everything take hours.
SMALL = "--hidden 64 --mlp 256 --heads 2 --eval-every 50 --eval-sequences 512 --save-every 1000000"
# The columns of metrics.jsonl that results keep.
KEPT = ("step", "tokens", "heldout_loss", "weight_spread", "lr", "sync_bytes", "simulated_seconds",
        "seconds", "iteration_seconds", "steps_alone", "ranks", "sync_seconds")
# Below tables of runs that were made before train.py measured the merged model.
MEANS_ONLY = ("NoLoCo's losses are the mean over its replicas: these runs have no loss of the "
              "merged model.\n")
FIVE = 0, 1, 2, 3, 4        # seeds
# torchrun would import torch once more on each host, which takes a fifth of a processor 12 seconds.
ALONE = ("RANK=$PET_NODE_RANK WORLD_SIZE=$PET_NNODES LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 "
         'MASTER_ADDR=$PET_MASTER_ADDR MASTER_PORT=$PET_MASTER_PORT exec "$@"')


@dataclass
class Setting:
    """What to run with each seed, and what to find out in the run's folder afterwards."""
    label: str
    options: str                # of train.py
    processes: int = 8
    after: Callable = None      # folder -> dict
    program: str = "-m train"   # or a module that puts parts of its own into train.build
    hosts: str = ""             # options of tools/hosts.py: each process on a host of its own


def has_all_seeds(found, part):
    """Whether these are the runs that the part's findings rest on: all steps, and all seeds of
    most."""
    if found.get("steps"):
        return False
    return max(map(len, found["runs"].values())) >= len(part.seeds)


@dataclass
class Part:
    """One result: OUT/results/headline_PART.json, its tables and its pictures."""
    settings: Callable          # steps or None -> Settings
    show: Callable              # found: prints its tables, of at most five columns
    record: Callable = None     # found: prints what is only for the record
    pictures: dict = field(default_factory=dict)    # {name: (plt, found) -> figure}
    seconds: Callable = None    # -> simulated seconds, kept beside the runs
    seeds: tuple = (0, 1, 2)    # without --seeds
    measure: Callable = None    # (name, part, o) -> found (default: `run_all`)
    beside: str = ""            # another part, whose results in the same OUT are found["beside"]
    is_whole: Callable = has_all_seeds


# ---------------------------------------------------------------- the command line


def headline(description, parts):
    """The whole command of an experiment; parts: {name: Part}. Bad input ends in one line."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))     # so that started processes end too

    def run_or_show():
        o = parse_arguments(description, parts)
        for name in o.parts or parts:
            run_part(name, parts[name], o)

    Job().together(run_or_show)


def run_part(name, part, o):
    """Run what is not run yet, unless --plot says not to; print and draw what there is."""
    if not o.plot:
        measure = part.measure or run_all
        found = measure(name, part, o)
        if o.only:              # it has said what it ran; the plain command collects it
            return
        save_result(o.out, f"headline_{name}", found)
    found = load_part(part, name, o.out)
    part.show(found)
    if o.record and part.record:
        part.record(found)
    for drawn, draw in part.pictures.items():
        picture(o.out, f"headline_{drawn}", draw, found)


def load_part(part, name, out):
    """What OUT/results has of the part, as its tables and pictures take it: with "whole", whether
    these are the runs that its findings rest on, and "beside"."""
    found = kept_result(out, f"headline_{name}")
    if part.beside:
        found["beside"] = kept_result(out, f"headline_{part.beside}")
    found["whole"] = part.is_whole(found, part)
    return found


def parse_arguments(description, parts):
    p = Parser(description)
    p.add_argument("parts", nargs="*", help=f"{', '.join(parts)} (default: all)")
    p.add_argument("--seeds", nargs="+", type=int, help="one run each of every kind (mostly 0 1 2)")
    p.add_argument("--only", default="",
                   help="run only what has this in its label, and show its losses")
    p.add_argument("--steps", type=int, help="training steps, in place of each run's own")
    p.add_argument("--out", default="runs", help="folder of results/ and figures/ (default: runs)")
    p.add_argument("--plot", action="store_true",
                   help="no runs: tables and pictures of OUT/results")
    p.add_argument("--record", action="store_true",
                   help="print the tables that are only for the record too")
    o = p.parse_args()
    for name in o.parts:
        if name not in parts:
            raise BadInput(f"no part {name}, only {', '.join(parts)}")
    if o.steps is not None and o.steps < 1:
        raise BadInput(f"--steps must be at least 1, got {o.steps}")
    return o


def show_runs(found):
    """What a command with --only ran."""
    if not found["runs"]:
        print("no run of this part has that in its label")
        return
    table = Table("run", "seeds", "steps", "held-out nats per byte")
    for label, runs in results(found).items():
        table.add(label, len(runs), f"{runs[0].steps[-1]:.0f}", mean_final(runs))
    table.end()


def title_of(found, finding, subject):
    """A picture's title: the finding of the whole runs, else the subject and that it is a try."""
    if found.get("whole", True):
        return finding
    steps = f"{found['steps']} steps" if found.get("steps") else "some of the runs"
    return f"{subject} (a try: {steps}, too little for a finding)"


# ---------------------------------------------------------------- the runs


def run_all(name, part, o):
    """{"cpu_hours", "runs": {label: [a row per seed]}} of the part's settings.

    Also "seconds" if the part simulates any, and "steps" if --steps cut the runs short.
    """
    settings = [setting for setting in part.settings(o.steps) if o.only in setting.label]
    seeds = o.seeds or part.seeds
    found = dict(cpu_hours=0.0, runs={setting.label: [] for setting in settings})
    if o.steps:
        found["steps"] = o.steps
    if part.seconds:
        found["seconds"] = part.seconds()
    with tqdm(total=len(seeds) * len(settings), unit="run") as progress:
        for seed, setting in itertools.product(seeds, settings):
            progress.set_postfix_str(setting.label)
            own = f"-of-{o.steps}-steps" if o.steps else ""     # a try keeps to folders of its own
            row = train_once(setting, f"{name}-{setting.label}-{seed}{own}", seed)
            found["cpu_hours"] = round(found["cpu_hours"] + row.pop("cpu_hours"), 3)
            found["runs"][setting.label].append(row)
            progress.update()
    if o.only:
        show_runs(found)
    return found


def torchrun(processes, *words, hosts=(), **kwargs):
    """Run words, `-m MODULE` or a script and its options, to the end. kwargs: of Popen.

    hosts: options of tools/hosts.py. Raises CalledProcessError. An interrupt ends the processes
    too.
    """
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    line += ["--nproc-per-node", str(processes)]
    if hosts:
        line = [sys.executable, "-m", "tools.hosts", str(processes), *hosts, "--"]
        line += ["sh", "-c", ALONE, "sh", sys.executable]
    with subprocess.Popen([*line, *words], env=environment(OMP_NUM_THREADS="1"), text=True,
                          **kwargs) as process:
        try:
            process.wait()
        finally:
            process.terminate()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, line)


def environment(**more):
    """That of this process, with which Python finds this repository from any folder."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return dict(os.environ, PYTHONPATH=path, **more)


def train_once(setting, name, seed):
    """The run's row of results: command, hosts, curves, CPU hours, and what `after` finds in its
    folder."""
    name = "headline-" + re.sub(r"[^\w.]+", "-", name)
    row = dict(command=f"{setting.program} --name {name} {SMALL} {setting.options} --seed {seed}")
    if setting.hosts:
        row["hosts"] = setting.hosts
    folder = Path("runs", name)
    done = folder / "headline.json"
    if done.exists():
        found = json.loads(done.read_text())
        if found.items() >= row.items():
            return found
    shutil.rmtree(folder, ignore_errors=True)
    start = cpu_seconds()
    run_logged(setting, row["command"], folder)
    row["curves"] = read_curves(folder)
    if setting.after:
        row |= setting.after(folder)
    row |= dict(ranks=setting.processes, cpu_hours=(cpu_seconds() - start) / 3600)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    write_text(done, json.dumps(row))
    return row


def cpu_seconds():
    """Of this process and of those that it has waited for."""
    return sum(os.times()[:4])


def run_logged(setting, command, folder):
    """Run the command. Where it fails, its output goes to FOLDER.log, and BadInput is raised."""
    with tempfile.TemporaryFile("w+") as log:
        try:
            torchrun(setting.processes, *command.split(), hosts=setting.hosts.split(), stdout=log,
                     stderr=log)
        except subprocess.CalledProcessError:
            log.seek(0)
            text = log.read()
            folder.parent.mkdir(exist_ok=True)
            Path(f"{folder}.log").write_text(text)
            raise BadInput(f"{command} failed (see {folder}.log): {text[-1000:]}")


def read_curves(folder):
    """{column of metrics.jsonl: [its value at each evaluation, in six digits]}"""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "heldout_loss" in line]
    curves = {}
    for key in KEPT:
        curves[key] = [line[key] and float(f"{line[key]:.6g}") for line in lines]
    return curves


def built(job, argv, **parts):
    """A train.Run as train.main builds it, with parts of our own."""
    o = train.Options(**job.agree_on(train.options_of, argv, job.world))
    job.connect(o)
    return train.build(job, o, **parts)
