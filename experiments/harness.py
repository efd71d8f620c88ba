"""The harness of all rows: the command line, records of runs, what is shown.

    python -m experiments.ROW [--scale try|plot|full] [--plot] [--seeds 0 1] [--out DIR]

    try     seconds: all code runs, no number counts
    plot    minutes of two cores: a small copy, compared with its expected numbers
    full    hours: what results/ and figures/ of this repository hold

A row has the same settings, table and picture at each scale. A run is one flat record, a dict of
what it was and what came out; OUT/results/ROW.json gets it as soon as it is made, and what is there
is not made again: remove the file when train.py has changed. Several commands may add to a file,
each with --seeds of its own; the plain command then shows all.
"""
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Callable

from tqdm import tqdm

import bench_sync
from bench_sync import cpu_seconds, here
from train import BadInput, Job, Parser, in_one_line, write_whole

ROOT = Path(__file__).parent.parent
FOLDERS = {"try": "runs/try", "plot": "runs/plot", "full": "."}     # of results/ and figures/
# Wide enough to learn the default text, small enough that three seeds of everything take hours.
SMALL = "--hidden 64 --mlp 256 --heads 2 --eval-every 50 --eval-sequences 512 --save-every 1000000"
ATTEMPTS = 5            # at a turn that others' work disturbs


@dataclass(frozen=True)
class Row:
    """A row of README's table. What is found goes to results/SOURCE.json."""
    name: str
    measure: Callable       # o -> found, as JSON can hold it; None: it has kept records
    show: Callable          # found: prints its tables
    pictures: dict          # {name: draw(plt, found) -> figure}
    expected: Callable      # found -> [Expected], judged only at the scale "plot"
    of_row: str = ""        # the row whose runs this one shows too
    full_alone: tuple = ()  # pictures that small scales do not have

    @property
    def source(self):
        return self.of_row or self.name


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
    p.add_argument("--seeds", type=int, nargs="+", help="make these now, and show nothing")
    p.add_argument("--out", metavar="DIR", help="folder of results/ and figures/ (default: "
                   "runs/try, runs/plot, for full this repository's)")
    o = p.parse_args()
    o.rows = getattr(o, "rows", None) or names
    for name in o.rows:
        if name not in names:
            raise BadInput(f"no row {name}, only {', '.join(names)}")
    for package in () if o.seeds else ("matplotlib", "scipy"):
        if not find_spec(package):
            raise BadInput(f"no table or picture without {package}: pip install '.[plot]'")
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
    """Make what is not made yet, and keep what was found."""
    began, spent = time.perf_counter(), cpu_seconds()
    found = row.measure(o)
    spent = cpu_seconds() - spent
    if found:
        head = made(row.source, o, here(), spent / 3600)
        save(results_file(o.out, row.source), dict(made=head) | found)
    print(f"{row.name} took {(time.perf_counter() - began) / 60:.1f} minutes, "
          f"{spent:.0f} processor seconds")


def show(row, o):
    """Print and draw what there is. Returns the expected numbers, if the scale has any."""
    from experiments.pictures import picture
    found = load(row, o.out, o.scale)
    print(f"\n{row.name}\n")
    row.show(found)
    for name, draw in row.pictures.items():
        if o.scale == "full" or name not in row.full_alone:
            picture(o.out, name, draw, found)
    return row.expected(found) if o.scale == "plot" else []


# ---------------------------------------------------------------- files of results


def results_file(out, name):
    return Path(out, "results", f"{name}.json")


def load(row, out, scale):
    """What OUT/results has of the row, with "scale" and "out", as tables and pictures take it.
    Raises BadInput where it is missing."""
    file = results_file(out, row.source)
    if not file.exists():
        raise BadInput(f"no {file}: first run the row without --plot")
    return json.loads(file.read_text()) | dict(scale=scale, out=out)


def made(name, o, machine, cpu_hours):
    """What a file of results says of how it was made."""
    words = f"python -m experiments.{name} --scale {o.scale}"
    if o.out != FOLDERS[o.scale]:
        words += f" --out {o.out}"
    return bench_sync.made(words, machine, cpu_hours)


def save(file, found):
    """A line for each record, so that a change of one is a change of one line."""
    file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(found)
    if "records" in found:
        head = json.dumps({key: value for key, value in found.items() if key != "records"})
        lines = ",\n".join(map(json.dumps, found["records"]))
        text = f'{head[:-1]}, "records": [\n{lines}\n]}}'
    write_whole(file, lambda out: out.write(f"{text}\n".encode()))


def records_in(file):
    """[record]; empty where there is no file."""
    if not file.exists():
        return []
    return json.loads(file.read_text())["records"]


def keep(name, records, o):
    """Add the records to OUT/results/NAME.json, which other processes may add to as well."""
    file = results_file(o.out, name)
    file.parent.mkdir(parents=True, exist_ok=True)
    with locked(file.parent):
        together = records_in(file) + records
        refuse_texts(together)
        hours = sum(record["cpu_hours"] for record in together)
        machines = sorted({record["machine"] for record in together})
        head = made(name, o, "; ".join(machines), hours)
        save(file, dict(made=head, records=together))


@contextmanager
def locked(folder):
    """No other process of this program is inside."""
    held = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


def refuse_texts(records):
    """Raises BadInput: losses on different texts do not compare."""
    if len({record["corpus"] for record in records}) > 1:
        raise BadInput("the file of results has records of another text or Python, which do not "
                       "compare: give another --out")


# ---------------------------------------------------------------- runs that are missing


def first_alone(missing):
    """Each run by itself."""
    return missing[:1]


def make_missing(name, wanted, make, o, turn_of=first_alone, most_others=None):
    """Make the runs that OUT/results/NAME.json lacks, turn by turn, and keep each turn at once.

    wanted: runs, in their order; `known` of a run is what its record is known to have before.
    make(turn): a record for each run of a turn. turn_of(missing): which of them come next,
    together. most_others: the most of a processor that others' work may take; a turn in which they
    took more is made again, whatever it found.
    """
    wanted = [run for run in wanted if not o.seeds or run.known["seed"] in o.seeds]
    with tqdm(total=len(wanted), unit="run", desc=name, dynamic_ncols=True) as progress:
        while True:
            there = records_in(results_file(o.out, name))
            missing = [run for run in wanted if not is_there(run, there)]
            progress.update(len(wanted) - len(missing) - progress.n)
            if not missing:
                return
            records = undisturbed(turn_of(missing), make, most_others)
            keep(name, records, o)


def is_there(run, records):
    return any(record.items() >= run.known.items() for record in records)


def undisturbed(turn, make, most_others):
    """The turn's records, of an attempt that others' work did not disturb. Raises BadInput."""
    if most_others is None:
        return make(turn)
    for _ in range(ATTEMPTS):
        records = make(turn)
        others = max(record["others"] for record in records)
        if others <= most_others:
            return records
        tqdm.write(f"again: others' work took {others:.2f} of a processor")
    raise BadInput(f"others' work disturbed {ATTEMPTS} attempts at one turn: end it, and start "
                   "this command again")


# ---------------------------------------------------------------- a run of train.py


@dataclass
class Run:
    """A run of train.py. facts: what its record says of it, with "seed"."""
    facts: dict
    options: str                # of train.py
    processes: int = 8
    program: str = "-m train"   # or a module that gives parts of its own to train.built
    hosts: str = ""             # options of tools/hosts.py: each process on a host of its own
    after: Callable = field(default=None, compare=False)    # folder -> more of the record

    @property
    def command(self):
        return f"{self.program} {SMALL} {self.options} --seed {self.facts['seed']}"

    @property
    def known(self):
        return self.facts | dict(command=self.command, hosts=self.hosts)


def make_runs(name, wanted, o, **turns):
    """Records of runs of train.py. turns: of `make_missing`."""

    def make(turn):
        return [train_once(name, run) for run in turn]

    make_missing(name, wanted, make, o, **turns)


def train_once(name, run):
    """The run's record. Raises BadInput where it fails."""
    values = [str(value) for value in run.facts.values()]
    folder = Path("runs", re.sub(r"[^\w.]+", "-", "-".join([name, *values])))
    shutil.rmtree(folder, ignore_errors=True)
    began, spent, busy = time.perf_counter(), cpu_seconds(), not_idle()
    run_logged(run, f"{run.command} --name {folder.name}", folder)
    others = others_work(busy, spent, began)
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    record = run.known | end_of(last)
    if run.after:
        record |= run.after(folder)
    shutil.rmtree(folder)
    return record | dict(machine=here(), others=others,
                         cpu_hours=round((cpu_seconds() - spent) / 3600, 5))


def end_of(last):
    """What every record has of a run's last line of metrics.jsonl. Losses are nats per byte: "mean"
    is the mean over the replicas, "merged" the loss of the model with their mean weights. sent:
    megabytes per rank."""
    merged = last["merged_nats_per_byte"]
    return dict(corpus=last["corpus"], steps=last["step"], mean=round(last["heldout_loss"], 5),
                merged=None if merged is None else round(merged, 5),
                seconds=round(last["seconds"], 2),
                sent=round(last["sync_bytes"] / last["ranks"] / 1e6, 3))


def run_logged(run, words, folder):
    """Run the command. If it fails, its output goes to FOLDER.log, and BadInput is raised."""
    with tempfile.TemporaryFile("w+") as log:
        try:
            run_ranks(run.processes, *words.split(), hosts=run.hosts.split(), stdout=log,
                      stderr=log)
        except subprocess.CalledProcessError:
            log.seek(0)
            text = log.read()
            folder.parent.mkdir(exist_ok=True)
            Path(f"{folder}.log").write_text(text)
            raise BadInput(f"{words} failed (see {folder}.log): {text[-1000:]}")


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


def metrics(folder):
    """The lines of a run's metrics.jsonl that have an evaluation."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line.get("heldout_loss") is not None]


def curves(folder, **columns):
    """Lists for a record: {name: a column of metrics.jsonl at each evaluation, in six digits}."""
    lines = metrics(folder)
    found = {}
    for name, column in columns.items():
        found[name] = [float(f"{line[column]:.6g}") for line in lines]
    return found


# ---------------------------------------------------------------- the machine


def not_idle():
    """Seconds of all processors since the machine started that were not idle; None if the system
    does not tell."""
    file = Path("/proc/stat")
    if not file.exists():
        return None
    idle, waiting = file.read_text().split()[4:6]
    ticks = os.sysconf("SC_CLK_TCK")
    return os.cpu_count() * time.monotonic() - (int(idle) + int(waiting)) / ticks


def others_work(busy, spent, began):
    """The processors that others' work has taken on average since `began` (time.perf_counter), when
    `not_idle` gave busy and `cpu_seconds` spent; None if the system does not tell."""
    if busy is None:
        return None
    theirs = not_idle() - busy - (cpu_seconds() - spent)
    return round(theirs / (time.perf_counter() - began), 3)
