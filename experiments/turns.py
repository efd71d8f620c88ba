"""Runs by turns: compared methods run one right after the other, and each run is kept at once.

A turn is one seed at one point: a run of each Setting. results/NAME.json gets each run's row when
it has ended, with the machine and its load; the same command goes on with what is missing, on
another machine too. One such command runs at a time: others' runs would disturb it.

The rule on load, written before the first run; it looks at no loss. While a run goes on, others'
work is the processors' time that was neither idle nor ours, in processors: also what the kernel
does for messages outside of our processes. A turn is made again, with all its runs, if others' work
was over OTHERS in one of them, or if its runs were not made on one machine. A run that fails is run
again. After AGAIN such attempts at a seed the program stops. Rows of turns that do not count stay
in the file.
"""
import json
import os
import platform
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from experiments.harness import SMALL, folder_of, train_once
from train import BadInput, write_whole

OTHERS = 0.1        # of a processor
AGAIN = 5


@dataclass
class Turn:
    """What is kept of a seed's last turn. rows: {label: its row}; number: 0 before the first."""
    settings: list
    seed: int
    rows: dict
    number: int

    @property
    def calm(self):
        return all(row["others"] <= OTHERS for row in self.rows.values())

    @property
    def complete(self):
        return len(self.rows) == len(self.settings)

    def counts(self, judged=True):
        """Whether its runs may be compared. judged: whether load and machine matter."""
        if not judged:
            return self.complete
        machines = {row["machine"] for row in self.rows.values()}
        return self.complete and self.calm and len(machines) == 1

    def goes_on(self, judged):
        """Whether this turn lacks nothing but runs."""
        if not judged:
            return True
        here = machine()
        return self.calm and all(row["machine"] == here for row in self.rows.values())


def last_turn(found, settings, seed):
    """found: what results/NAME.json holds. Runs of other commands do not belong to it."""
    rows = []
    for setting in settings:
        for row in found["runs"].get(setting.label, []):
            if row["seed"] == seed and is_of(row, setting, seed):
                rows.append((setting.label, row))
    number = max((row["turn"] for _, row in rows), default=0)
    last = {label: row for label, row in rows if row["turn"] == number}
    return Turn(settings, seed, last, number)


def is_of(row, setting, seed):
    """Whether the row's run had the setting's program, options and hosts."""
    command = row["command"]
    return (command.startswith(f"{setting.program} --name")
            and command.endswith(f" {SMALL} {setting.options} --seed {seed}")
            and row.get("hosts", "") == setting.hosts)


def counted_rows(found, turns, judged=True):
    """{label: {seed: row}} of the turns, [(settings, seed)], that count."""
    rows = {}
    for settings, seed in turns:
        turn = last_turn(found, settings, seed)
        if turn.counts(judged):
            for label, row in turn.rows.items():
                rows.setdefault(label, {})[seed] = row
    return rows


# ---------------------------------------------------------------- the runs


def take_turns(name, turns, o):
    """Make the turns, [(settings, seed)], that do not count yet, in their order."""
    file = Path(o.out, "results", f"{name}.json")
    judged = o.scale == "full"
    with tqdm(total=sum(len(settings) for settings, _ in turns), unit="run", desc=name) as progress:
        for settings, seed in turns:
            take_turn(name, file, settings, seed, judged, progress)
            progress.update(len(settings))


def take_turn(name, file, settings, seed, judged, progress):
    for _ in range(AGAIN):
        turn = last_turn(kept(file), settings, seed)
        if turn.counts(judged):
            return
        if not turn.rows or not turn.goes_on(judged):
            turn = Turn(settings, seed, {}, turn.number + 1)
        try:
            run_missing(name, file, turn, judged, progress)
        except BadInput as error:                       # of a run
            tqdm.write(f"failed: {error}")
    if not last_turn(kept(file), settings, seed).counts(judged):
        raise BadInput(f"seed {seed} of {settings[0].label}: {AGAIN} turns were disturbed or "
                       "failed")


def run_missing(name, file, turn, judged, progress):
    """The turn's runs, as long as nothing disturbs them."""
    for setting in turn.settings:
        if setting.label not in turn.rows and turn.goes_on(judged):
            progress.set_postfix_str(f"{setting.label}, seed {turn.seed}")
            title = f"{name}-{setting.label}-{turn.seed}-{turn.number}"
            row = measured_run(setting, title, turn.seed)
            turn.rows[setting.label] = row | dict(seed=turn.seed, turn=turn.number)
            keep(file, setting.label, turn.rows[setting.label])


def measured_run(setting, name, seed):
    """The run's row: what train_once finds, the machine, and its load."""
    shutil.rmtree(folder_of(name), ignore_errors=True)          # a run whose row was lost
    load = [os.getloadavg()[0]]
    began, busy = time.perf_counter(), not_idle()
    row = train_once(setting, name, seed)
    row.pop("curves")
    wall = time.perf_counter() - began
    others = (not_idle() - busy - 3600 * row["cpu_hours"]) / wall
    load.append(os.getloadavg()[0])
    return row | dict(others=round(others, 3), load=load, wall=round(wall, 1), machine=machine())


def not_idle():
    """Seconds of all processors since the machine started that were not idle."""
    idle, waiting = Path("/proc/stat").read_text().split()[4:6]
    ticks = os.sysconf("SC_CLK_TCK")
    return os.cpu_count() * time.monotonic() - (int(idle) + int(waiting)) / ticks


def machine():
    """The processor's name, how many there are, the system, and which start of it this is."""
    name = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    kind = name[1] if name else platform.machine()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return (f"{kind}, {os.cpu_count()} processors, {platform.system()} {platform.release()}, "
            f"started as {boot[:8]}")


def kept(file):
    """What the file holds."""
    return json.loads(file.read_text()) if file.exists() else dict(runs={})


def keep(file, label, row):
    """Append the row, at once."""
    found = kept(file)
    found["runs"].setdefault(label, []).append(row)
    file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(found) + "\n"
    write_whole(file, lambda out: out.write(text.encode()))
