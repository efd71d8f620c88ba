"""Seconds a step between hosts, measured beside what gossip/pace.py computes.

    python -m experiments.paced [--seeds 0] [--steps N] [--out DIR] [--plot]

pace        eight hosts with a fifth of a processor each, on four networks that nothing was fitted
            to, ten settings each: 45 minutes of two idle cores
pauses      a pair's exchange after pauses, on the two networks with high latencies
            (experiments/pauses.py): 5 minutes

A step's own seconds are those of a run on the same hosts in which nobody sends (--method local).
All else of the computed seconds comes from the network's rate and latency. A second figure adds
what writing, coding and summing took where an outer step was timed alone (experiments/latency.py,
200 Mbit/s, 0 ms, the same hosts). The watch runs from step FIRST to the last, on every rank;
nothing is evaluated meanwhile. A step is one sequence of 128 tokens of the tiny model, as in
experiments/clock.py.

    python -m experiments.paced --watch ...             train.py's options: times the steps
"""
import json
import re
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from experiments import pauses
from experiments.clock import COMMON, CPU
from experiments.comparing import Table
from experiments.harness import Part, Setting, built, headline, title_of
from experiments.pictures import COLOURS, WIDTH
from experiments.results import ROOT, kept_result
from gossip.pace import GLOO, Meetings, Situation, message_seconds, seconds_a_step
from plumbing import report
from plumbing.drawing import NAMES
from plumbing.files import replace
from plumbing.processes import Job
import train

FIRST, LAST = 20, 80            # steps between which the watch runs
HOSTS = 8
FAR = 0.2                       # a difference of computed and measured that the page explains
# name: (Mbit/s of each host's link, ms one way)
NETWORKS = {
    "500 Mbit/s, 2 ms": (500, 2), "100 Mbit/s, 10 ms": (100, 10),
    "100 Mbit/s, 100 ms": (100, 100), "30 Mbit/s, 50 ms": (30, 50),
}
ALONE = "nobody sends"
# name: how replicas meet
WAYS = {
    "DDP, one byte": Meetings("ddp", "int8"),
    "DiLoCo, m 2, one byte": Meetings("diloco", "int8", 2),
    "DiLoCo, m 10, fp32": Meetings("diloco", "fp32", 10),
    "DiLoCo, m 10, D 5, one byte": Meetings("diloco", "int8", 10, D=5),
    "DiLoCo, m 10, K 10, D 1, one byte": Meetings("diloco", "int8", 10, 10, 1),
    "NoLoCo, m 2, one byte": Meetings("noloco", "int8", 2),
    "NoLoCo, m 10, fp32": Meetings("noloco", "fp32", 10),
    "NoLoCo, m 10, D 5, fp32": Meetings("noloco", "fp32", 10, D=5),
    "NoLoCo, m 5, K 5, one byte": Meetings("noloco", "int8", 5, 5),
    "NoLoCo, m 10, K 10, D 1, one byte": Meetings("noloco", "int8", 10, 10, 1),
}


# ---------------------------------------------------------------- the runs


def options_of(meetings):
    """Of train.py."""
    words = [f"--method {meetings.method} --wire {meetings.wire}"]
    if meetings.method != "ddp":
        words.append(f"--inner-steps {meetings.m}")
    if meetings.K > 1:
        words.append(f"--fragments {meetings.K}")
    if meetings.D:
        words.append(f"--delay {meetings.D}")
    return " ".join(words)


def settings(steps):
    """steps: of a try, between two hosts, on the first network alone."""
    last = steps or LAST
    networks = list(NETWORKS)[:1] if steps else NETWORKS
    for network in networks:
        mbit, latency = NETWORKS[network]
        hosts = f"--mbit {mbit} --latency {latency}"
        if not steps:
            hosts += f" --cpu {CPU}"
        ways = {ALONE: "--method local"}
        for name, meetings in WAYS.items():
            ways[name] = options_of(meetings)
        for name, options in ways.items():
            more = f"{options} --steps {last} --eval-every {last} --eval-sequences 8"
            yield Setting(f"{network}: {name}", f"{COMMON} --warmup {FIRST} {more}",
                          processes=2 if steps else HOSTS, after=watched,
                          program="-m experiments.paced --watch", hosts=hosts)


@dataclass
class Watch(report.Meter):
    """Keeps the seconds from step FIRST to the last, each taken before the step's own outer step,
    so that whole rounds of messages lie between them."""
    run: object = None              # a train.Run
    begun: float = 0.0

    def add(self, *numbers):
        super().add(*numbers)
        last = self.run.o.steps
        first = min(FIRST, last // 2)
        done = self.run.step + 1
        if done == first:
            self.begun = time.perf_counter()
        if done == last:
            seconds = (time.perf_counter() - self.begun) / (last - first)
            of_ranks = self.run.job.share("watch", seconds)
            if self.run.job.rank == 0:
                params = sum(p.numel() for p in self.run.model.parameters())
                replace(self.run.folder / "watch.json",
                               json.dumps(dict(pace=of_ranks, params=params)))


def watch(argv):
    """train.main with a watch."""
    job = Job()
    run = built(job, argv)
    run.meter = Watch(run=run)
    train.train(run)


def watched(folder):
    """What the run's row gets: seconds a step of each rank, and the parameters."""
    return json.loads(Path(folder, "watch.json").read_text())


# ---------------------------------------------------------------- what was found


@dataclass
class Pair:
    """A setting on a network: seconds a step."""
    network: str
    way: str
    measured: list              # of each seed, the mean over ranks
    computed: float
    with_work: float            # computed, and what an outer step's work takes

    @property
    def mean(self):
        """Of the measured."""
        return statistics.mean(self.measured)

    @property
    def error(self):
        """Computed over measured, less 1."""
        return self.computed / self.mean - 1

    @property
    def error_with_work(self):
        return self.with_work / self.mean - 1


def pairs_of(found):
    pairs = []
    for label, rows in found["runs"].items():
        network, way = re.fullmatch("(.+): (.+)", label).groups()
        if way == ALONE:
            continue
        mbit, latency = NETWORKS[network]
        situation = Situation(params=rows[0]["params"], replicas=rows[0]["ranks"],
                              step=alone_on(network, found), rate=mbit * 1e6 / 8,
                              latency=latency / 1000, trips=GLOO)
        computed = seconds_a_step(situation, WAYS[way])
        work = seconds_of_work(WAYS[way], rows[0]["params"]) / WAYS[way].m
        pairs.append(Pair(network, way, paces(rows), computed, computed + work))
    return pairs


def seconds_of_work(meetings, params):
    """Of an outer step alone between eight hosts, what its bytes do not take."""
    (row,) = kept_result(ROOT, "headline_latency")["runs"]["8 hosts, 0 ms"]
    name = "pair" if meetings.method == "noloco" else "all-reduce"
    if meetings.wire == "int8":
        name += ", one byte"
    situation = Situation(params=params, replicas=HOSTS, step=1, rate=200e6 / 8, latency=0)
    at_once = Meetings(meetings.method, meetings.wire)
    return statistics.median(row["alone"][name]) - message_seconds(situation, at_once)


def alone_on(network, found):
    """Seconds of a step on the network's hosts while nobody sends."""
    return statistics.mean(paces(found["runs"][f"{network}: {ALONE}"]))


def paces(rows):
    """Of each seed, the mean over ranks."""
    return [statistics.mean(row["pace"]) for row in rows]


def show(found):
    pairs = pairs_of(found)
    for network in dict.fromkeys(pair.network for pair in pairs):
        alone = alone_on(network, found)
        table = Table(f"{network}; a step alone: {alone:.3f} s", "measured, s a step",
                      "computed", "over measured", "with an outer step's work, over measured")
        for pair in pairs:
            if pair.network == network:
                table.add(pair.way, f"{pair.mean:.3f}",
                          f"{pair.computed:.3f}", f"{pair.error:+.0%}",
                          f"{pair.error_with_work:+.0%}")
        table.end()
    tell_errors("computed", [pair.error for pair in pairs])
    tell_errors("with an outer step's work", [pair.error_with_work for pair in pairs])


def tell_errors(name, errors):
    far = [error for error in errors if abs(error) > FAR]
    print(f"{name}: {len(far)} of {len(errors)} are more than {FAR:.0%} off; half of all are "
          f"within {statistics.median(map(abs, errors)):.0%}.")


def draw(plt, found):
    """Computed against measured seconds a step."""
    pairs = pairs_of(found)
    figure, axis = plt.subplots(figsize=(WIDTH, 5))
    ends = [0.8 * min(pair.computed for pair in pairs), 1.3 * max(pair.computed for pair in pairs)]
    axis.plot(ends, ends, color="#777777", lw=1)
    lowest = [end / (1 + FAR) for end in ends]          # that is computed over measured, less 1
    highest = [end / (1 - FAR) for end in ends]
    axis.fill_between(ends, lowest, highest, color="#777777", alpha=0.15, lw=0)
    markers = dict(zip(NETWORKS, "osv^"))
    for pair in pairs:
        colour = COLOURS[NAMES[WAYS[pair.way].method]]
        axis.plot(pair.computed, pair.mean, markers[pair.network], color=colour, ms=6)
    handles = []
    for network, marker in markers.items():
        handles += axis.plot([], [], marker, color="#777777", ls="", label=network)
    axis.legend(handles=handles, frameon=False)
    for line, name in enumerate(("NoLoCo", "DiLoCo", "DDP")):
        axis.annotate(name, (0.97, 0.05 + 0.06 * line), xycoords="axes fraction", ha="right",
                      color=COLOURS[name], weight="bold")
    axis.set(xscale="log", yscale="log", xlabel="computed seconds a step (gossip/pace.py)",
             ylabel="measured seconds a step\n(8 hosts of one machine; grey: within 20%)",
             title=title_of(found, finding(pairs), "Seconds a step, computed and measured"))
    return figure


def finding(pairs):
    near = [pair for pair in pairs if abs(pair.error) <= FAR]
    return (f"For {len(near)} of {len(pairs)} settings the computed seconds a step are within "
            f"{FAR:.0%} of the measured")


PARTS = {
    "pace": Part(settings, show, None, {"pace": draw}, seeds=(0,)),
    "pauses": pauses.PART,
}

if __name__ == "__main__":
    if "--watch" in sys.argv:
        watch([word for word in sys.argv[1:] if word != "--watch"])
    else:
        headline(__doc__, PARTS)
