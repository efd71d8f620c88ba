"""Measurements in pieces of a few minutes: each run is kept once it is done, and not run again."""
import json
import subprocess
import sys
import time
from pathlib import Path

from experiments.harness import environment
from plumbing.files import replace
from plumbing.report import say_time

SAVING = 60.0           # seconds that a run which is stopped may take to write its checkpoint


class OutOfTime(Exception):
    """The next run would end too late. The message says what it is."""


class Clock:
    """Until when runs may begin. minutes: of this piece."""

    def __init__(self, minutes):
        self.minutes = minutes
        self.end = time.monotonic() + 60 * minutes

    def left(self):
        """Seconds."""
        return self.end - time.monotonic()

    def need(self, what, seconds):
        """Raises OutOfTime where there are not so many seconds left for what comes next."""
        if seconds > self.left():
            more = ""
            if seconds > 60 * self.minutes:
                more = f": give --minutes {seconds / 60 * 1.1:.0f} or more"
            raise OutOfTime(f"{what} takes about {say_time(seconds)}{more}")


class Kept:
    """{name: what its run found}, in a file that changes as a whole with each run."""

    def __init__(self, file):
        self.file = Path(file)
        self.rows = {}
        if self.file.exists():
            self.rows = json.loads(self.file.read_text())

    def keep(self, name, row):
        self.rows[name] = row
        self.file.parent.mkdir(parents=True, exist_ok=True)
        replace(self.file, json.dumps(self.rows))


def run_within(seconds, words, log, **more):
    """Run python with these words, all it prints in the file log. Returns its exit status.

    After so many seconds it gets SIGTERM, by which train.py writes a checkpoint, and None is
    returned.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    env = environment(PYTHONUNBUFFERED="1", **more)
    with open(log, "w") as file:
        process = subprocess.Popen([sys.executable, *words], env=env, stdout=file, stderr=file)
        try:
            return process.wait(timeout=max(1.0, seconds))
        except subprocess.TimeoutExpired:
            return None
        finally:
            end(process)


def end(process):
    """End a process that may be over already."""
    process.terminate()
    try:
        process.wait(SAVING)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def tail(log, count=15):
    """The last lines of a file."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-count:])
