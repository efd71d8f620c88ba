"""A pair's exchange after a pause: the `pauses` part of experiments/paced.py.

    python -m experiments.pauses ...        train.py's options: times exchanges, and trains a step

TCP sends little at first, and after a pause again: it waits for answers before it fills the link,
the longer the larger the latency. With eight replicas a connection pauses for about seven rounds
between two exchanges, since each round's partner is another one. The hosts have the machine's own
TCP, and nobody else sends.
"""
import json
import statistics
import sys
import time
from pathlib import Path

import train
from experiments.clock import COMMON, seconds_of
from experiments.comparing import Table
from experiments.harness import Part, Setting, built
from gossip import outer_optimizer
from gossip.pace import GLOO, Meetings, Situation, message_seconds
from plumbing.files import replace
from plumbing.processes import Job

SHORTEST = 0.5                      # seconds for which clock.seconds_of waits
PAUSES = (SHORTEST, 2, 6)           # seconds before an exchange
TRIALS = 9                          # after each pause
TRIED = 1                           # of a try
# name: (Mbit/s, ms one way)
NETWORKS = {"100 Mbit/s, 100 ms": (100, 100), "30 Mbit/s, 50 ms": (30, 50)}
MEETINGS = Meetings("noloco", "int8")


# ---------------------------------------------------------------- the runs


def settings(steps):
    """steps: of a try, which has few trials, too."""
    for name, (mbit, latency) in NETWORKS.items():
        trials = TRIED if steps else TRIALS
        yield Setting(name, f"{COMMON} --method local --eval-every 1000000 --steps 1", 2, timed,
                      f"-m experiments.pauses {trials}", f"--mbit {mbit} --latency {latency}")


def timed(folder):
    return json.loads(Path(folder, "pauses.json").read_text())


def main(argv, pauses=PAUSES):
    """Time exchanges, then train. argv: how many after each pause, then train.py's options."""
    trials, *options = argv
    job = Job()
    run = built(job, options)
    params = list(run.model.parameters())
    outer = outer_optimizer(MEETINGS.method, MEETINGS.wire, 0, params, inner_steps=1)
    first = job.share("first", seconds_of(outer.step))
    paused = {}
    for pause in pauses:
        own = []
        for _ in range(int(trials)):
            time.sleep(pause - SHORTEST)
            own.append(seconds_of(outer.step))
        of_ranks = job.share(f"after {pause}", own)
        paused[pause] = [max(trial) for trial in zip(*of_ranks)]
    if job.rank == 0:
        found = dict(first=max(first), paused=paused, params=sum(p.numel() for p in params))
        replace(run.folder / "pauses.json", json.dumps(found))
    train.train(run)


# ---------------------------------------------------------------- what was found


def show(found):
    table = Table("a pair's exchange, one byte: seconds, median (range)", "computed", "the first",
                  *(f"after {pause:g} s" for pause in PAUSES))
    for name, rows in found["runs"].items():
        row = rows[0]
        cells = []
        for pause in PAUSES:
            seconds = row["paused"][str(pause)]
            cells.append(f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to "
                         f"{max(seconds):.2f})")
        table.add(name, f"{computed(name, row):.2f}", f"{row['first']:.2f}", *cells)
    table.end()


def computed(name, row):
    """Seconds of the exchange by gossip/pace.py."""
    mbit, latency = NETWORKS[name]
    situation = Situation(params=row["params"], replicas=2, step=1, rate=mbit * 1e6 / 8,
                          latency=latency / 1000, trips=GLOO)
    return message_seconds(situation, MEETINGS)


PART = Part(settings, show, seeds=(0,))

if __name__ == "__main__":
    main(sys.argv[1:])
