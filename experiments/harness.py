"""The harness of all rows: the command line, runs of train.py that are kept, what is shown.

    python -m experiments.ROW [--scale try|plot|full] [--plot] [--seeds 0 1] [--out DIR]

    try     seconds: all code runs, no number counts
    plot    minutes of two cores: a small copy beside its expected numbers
    full    hours: what results/ and figures/ of this repository hold

A row has the same settings, table and picture at each scale. A finished run of train.py is kept in
runs/ and not run again; remove its folder when train.py has changed. Several commands may run at
one time, each with --seeds of its own; the plain command then collects all.
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
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Callable

from tqdm import tqdm

from experiments.pictures import picture
from experiments.tables import ROOT, kept_result, save_result
from train import BadInput, Job, Parser, in_one_line, write_json

FOLDERS = {"try": "runs/try", "plot": "runs/plot", "full": "."}     # of results/ and figures/
# Wide enough to learn the default text, small enough that three seeds of everything take hours.
SMALL = "--hidden 64 --mlp 256 --heads 2 --eval-every 50 --eval-sequences 512 --save-every 1000000"
# The columns of metrics.jsonl that results keep.
KEPT = ("step", "tokens", "heldout_loss", "weight_spread", "lr", "sync_bytes", "simulated_seconds",
        "seconds", "iteration_seconds", "ranks")


@dataclass(frozen=True)
class Row:
    """A row of README's table. What is found goes to results/SOURCE.json."""
    name: str
    measure: Callable       # o -> found, as JSON can hold it; None: it has saved what it found
    show: Callable          # found: prints its tables
    pictures: dict          # {name: draw(plt, found) -> figure}
    expected: Callable      # found -> [Expected]
    of_row: str = ""        # the row whose runs this one shows too
    full_alone: tuple = ()  # pictures that small scales do not have

    @property
    def source(self):
        return self.of_row or self.name


@dataclass
class Setting:
    """What to run with each seed, and what to find out in the run's folder afterwards."""
    label: str
    options: str                # of train.py
    processes: int = 8
    after: Callable = None      # folder -> dict
    program: str = "-m train"   # or a module that puts parts of its own into train.build
    hosts: str = ""             # options of tools/hosts.py: each process on a host of its own


# ---------------------------------------------------------------- the command line


def command(description, *rows):
    """The whole command of one row, or of all that are given. Bad input ends in one line."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))     # so that started processes end too
    with in_one_line(Job()):
        o = parse_arguments(description, rows)
    sys.exit(run_rows([row for row in rows if row.name in o.rows], o))


def parse_arguments(description, rows):
    """The command line. Raises BadInput."""
    names = [row.name for row in rows]
    p = Parser(description)
    if len(names) > 1:
        p.add_argument("rows", nargs="*", help=f"{', '.join(names)} (default: all)")
    p.add_argument("--scale", choices=list(FOLDERS), default="plot", help="default: plot")
    p.add_argument("--plot", action="store_true", help="no runs: show what DIR has")
    p.add_argument("--seeds", type=int, nargs="+", help="train these now, and show nothing")
    p.add_argument("--out", metavar="DIR", help="folder of results/ and figures/ (default: "
                   "runs/try, runs/plot, for full this repository's)")
    o = p.parse_args()
    o.rows = getattr(o, "rows", None) or names
    for name in o.rows:
        if name not in names:
            raise BadInput(f"no row {name}, only {', '.join(names)}")
    if not find_spec("matplotlib"):
        raise BadInput("no picture without matplotlib: pip install '.[plot]'")
    if o.out is None:
        o.out = FOLDERS[o.scale]
    return o


def run_rows(rows, o):
    """All rows, whatever becomes of one; then the expected numbers. Returns the exit status."""
    told, failed, measured = [], False, set()
    for row in rows:
        try:
            if not o.plot and row.source not in measured:
                measure(row, o)
                measured.add(row.source)
            if not o.seeds:
                told += show(row, o)
        except (BadInput, OSError) as error:
            print(f"error: {row.name}: {str(error).splitlines()[0]}", file=sys.stderr)
            failed = True
    for one in told:
        print(one)
    return int(failed or any(one.is_outside for one in told))


def measure(row, o):
    """Run what is not run yet, and save what was found."""
    began, spent = time.perf_counter(), cpu_seconds()
    found = row.measure(o)
    if found and not o.seeds:
        save_result(o.out, row.source, found)
    print(f"{row.name} took {(time.perf_counter() - began) / 60:.1f} minutes, "
          f"{cpu_seconds() - spent:.0f} processor seconds")


def show(row, o):
    """Print and draw what there is; its expected numbers."""
    found = load(row, o.out, o.scale)
    print(f"\n{row.name}\n")
    row.show(found)
    for name, draw in row.pictures.items():
        if o.scale == "full" or name not in row.full_alone:
            picture(o.out, name, draw, found)
    return row.expected(found)


def load(row, out, scale):
    """What OUT/results has of the row, with "scale" and "out", as tables and pictures take it."""
    return kept_result(out, row.source) | dict(scale=scale, out=out)


# ---------------------------------------------------------------- the runs


def run_all(name, settings, seeds, o):
    """{"cpu_hours", "runs": {label: [a row per seed]}}"""
    settings, seeds = list(settings), o.seeds or seeds
    found = dict(cpu_hours=0.0, runs={setting.label: [] for setting in settings})
    with tqdm(total=len(seeds) * len(settings), unit="run", desc=name) as progress:
        for seed, setting in itertools.product(seeds, settings):
            progress.set_postfix_str(setting.label)
            row = train_once(setting, f"{o.scale}-{name}-{setting.label}-{seed}", seed)
            found["cpu_hours"] = round(found["cpu_hours"] + row.pop("cpu_hours"), 3)
            found["runs"][setting.label].append(row)
            progress.update()
    return found


def run_ranks(processes, *words, hosts=(), **kwargs):
    """Run words, `-m MODULE` and its options, to the end, on so many ranks. kwargs: of Popen.

    hosts: options of tools/hosts.py. Raises CalledProcessError. An interrupt ends the ranks too.
    """
    line = [sys.executable, "-m", "experiments.launch", str(processes), *hosts]
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
    folder = folder_of(name)
    row = dict(command=f"{setting.program} --name {folder.name} {SMALL} {setting.options} "
                       f"--seed {seed}")
    if setting.hosts:
        row["hosts"] = setting.hosts
    done = folder / "row.json"
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
    write_json(done, row)
    return row


def folder_of(name):
    """Of a run. A name may have spaces and colons."""
    return Path("runs", re.sub(r"[^\w.]+", "-", name))


def cpu_seconds():
    """Of this process and of those that it has waited for."""
    return sum(os.times()[:4])


def run_logged(setting, words, folder):
    """Run the command. Where it fails, its output goes to FOLDER.log, and BadInput is raised."""
    with tempfile.TemporaryFile("w+") as log:
        try:
            run_ranks(setting.processes, *words.split(), hosts=setting.hosts.split(),
                      stdout=log, stderr=log)
        except subprocess.CalledProcessError:
            log.seek(0)
            text = log.read()
            folder.parent.mkdir(exist_ok=True)
            Path(f"{folder}.log").write_text(text)
            raise BadInput(f"{words} failed (see {folder}.log): {text[-1000:]}")


def read_curves(folder):
    """{column of metrics.jsonl: [its value at each evaluation, in six digits]}"""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "heldout_loss" in line]
    curves = {}
    for key in KEPT:
        curves[key] = [line[key] and float(f"{line[key]:.6g}") for line in lines]
    return curves
