"""What runs have written, read while they may still be writing: for tools.plot.

A run keeps its options in runs/NAME/config.json and a line per evaluation or event in
runs/NAME/metrics.jsonl (docs/metrics.md).
"""
import csv
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from plumbing.processes import BadInput, forbid

# Runs that differ in these options alone are several seeds of one method.
OF_ONE_RUN = ("seed", "name", "resume")


@dataclass
class Logged:
    """What one run has written."""
    folder: Path
    options: dict           # config.json
    lines: list             # of metrics.jsonl, in its order: evaluations and events

    @property
    def evaluations(self):
        return [line for line in self.lines if "event" not in line]

    @property
    def events(self):
        return [line for line in self.lines if "event" in line]

    @property
    def settings(self):
        """{option: value} of what several seeds of one method have in common, and the corpus."""
        found = {name: value for name, value in self.options.items() if name not in OF_ONE_RUN}
        return found | {"corpus": self.evaluations[-1].get("corpus")}


def read_run(folder):
    """The Logged of a run's folder. Raises BadInput if it holds no evaluation."""
    forbid((not folder.is_dir(), f"{folder} is no folder: give folders of runs, e.g. runs/NAME"))
    options = read_options(folder)
    run = Logged(folder, options, read_lines(folder / "metrics.jsonl"))
    every = options.get("eval_every")
    forbid((not run.evaluations,
            f"{folder} has no evaluation yet: the first one is after {every} steps (--eval-every)"))
    return run


def read_options(folder):
    try:
        options = json.loads((folder / "config.json").read_text())
        options["method"]
        return options
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{folder} is the folder of no run, or of one that has not begun: no "
                       f"readable config.json there ({type(error).__name__})")


def read_lines(file):
    """The lines of a metrics.jsonl, as dicts. Raises BadInput if it cannot be read.

    The last line may be half written: it is left out without a word, the run is under way.
    Another line that cannot be read is named and left out.
    """
    try:
        text = file.read_text(errors="replace")
    except OSError as error:
        raise BadInput(f"{file} cannot be read: {error.strerror}")
    found = []
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            row["step"]
            found.append(row)
        except (ValueError, KeyError, TypeError):
            under_way = number == len(lines) and not text.endswith("\n")
            if not under_way:
                print(f"warning: line {number} of {file} is damaged and left out: {line[:60]}",
                      file=sys.stderr)
    return found


def seeds_together(runs):
    """Lists of the runs that differ in their seeds alone, in the order of their first runs."""
    groups = {}
    for run in runs:
        key = json.dumps(run.settings, sort_keys=True)
        groups.setdefault(key, []).append(run)
    return list(groups.values())


def write_csv(runs, file):
    """Write every line of the runs' metrics.jsonl as one row, after the run, its method and seed.

    An event has its name in the column `event`, which an evaluation leaves empty. null and what a
    line lacks are empty cells; lists are JSON.
    """
    rows = []
    columns = {"run": None, "method": None, "seed": None, "event": None}      # as an ordered set
    for run in runs:
        of_run = dict(run=run.folder, method=run.options["method"], seed=run.options.get("seed"))
        for line in run.lines:
            rows.append(of_run | {name: cell(value) for name, value in line.items()})
            columns.update(dict.fromkeys(line))
    writer = csv.DictWriter(file, list(columns), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def cell(value):
    return json.dumps(value) if isinstance(value, list | dict) else value
