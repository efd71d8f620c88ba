"""A pair's exchange after a pause: the `pauses` part of experiments/paced.py.

    python -m experiments.pauses TRIALS ...     train.py's options: times exchanges, trains a step

Does TCP explain why steps take longer than computed? On a new connection it sends little at first
and waits for answers before it fills the link; some kinds of it do so again after a pause. With
eight replicas a connection pauses for about seven rounds between two exchanges, since each round's
partner is another one. The hosts have the machine's own TCP, and nobody else sends.
"""
import json
import statistics
import sys
import time
from pathlib import Path

import train
from experiments.clock import COMMON, seconds_from
from experiments.comparing import Table
from experiments.harness import Part, Setting, built
from gossip import outer_optimizer
from gossip.pace import GLOO, Meetings, Situation, message_seconds
from plumbing.files import replace
from plumbing.processes import Job

EVERY = (1, 7)                      # seconds from an exchange's start to the next one's
FIRST = 4                           # seconds that the first exchange may take
TRIALS = 9                          # of each
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


def main(argv, every=EVERY, first=FIRST):
    """Time exchanges, then train. argv: how many with each pause, then train.py's options.

    Exchanges begin at moments that are agreed on before, so that nothing else wakes the connection:
    hosts share this machine's clock.
    """
    trials, *options = argv
    job = Job()
    run = built(job, options)
    params = list(run.model.parameters())
    outer = outer_optimizer(MEETINGS.method, MEETINGS.wire, 0, params, inner_steps=1)
    moment = max(job.share("moment", time.monotonic())) + 1
    own = {"first": [seconds_from(moment, outer.step)]}
    moment += first
    for gap in every:
        own[f"every {gap:g} s"] = []
        for _ in range(int(trials)):
            moment += gap
            own[f"every {gap:g} s"].append(seconds_from(moment, outer.step))
    of_ranks = job.share("seconds", own)
    seconds = {}
    for name in own:
        trials_of_ranks = zip(*(rank[name] for rank in of_ranks))
        seconds[name] = [max(trial) for trial in trials_of_ranks]
    if job.rank == 0:
        found = dict(seconds=seconds, params=sum(p.numel() for p in params))
        replace(run.folder / "pauses.json", json.dumps(found))
    train.train(run)


# ---------------------------------------------------------------- what was found


def show(found):
    table = Table("a pair's exchange, one byte: seconds, median (range)", "computed", "the first",
                  *(f"every {gap:g} s" for gap in EVERY))
    for name, rows in found["runs"].items():
        seconds = rows[0]["seconds"]
        cells = [f"{computed(name, rows[0]):.2f}", f"{seconds['first'][0]:.2f}"]
        for gap in EVERY:
            some = seconds[f"every {gap:g} s"]
            cells.append(f"{statistics.median(some):.2f} ({min(some):.2f} to {max(some):.2f})")
        table.add(name, *cells)
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
