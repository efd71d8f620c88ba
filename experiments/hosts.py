"""Loss against real time on real links: 8 hosts, one clock, real messages.

    python -m experiments.hosts [--seeds 0] [--steps N] [--out DIR] [--plot]

Eight network namespaces of this machine with a link each (tools/hosts.py; root and iproute2), one replica of
the tiny model on each, and for every method the same measured time. DDP and DiLoCo in fp32, NoLoCo in fp32
and in one byte, each with a few settings. A step is one sequence a replica: two cores compute for eight
hosts, and the links are to be measured. `no limit` shows what computing takes.

Beside each run stands what links of these rates would take by themselves, computing as long as measured
there:

    seconds = 2 (n - 1)/n  bytes / rate of the slowest link of the n,  once all n have come      (H)

(the rate at that moment, where it changes) for a ring's all-reduce (DDP, DiLoCo: n = 8) and for a pair that
swaps its weights (NoLoCo: n = 2).

    python -m experiments.hosts --train SECONDS ...     train.py's options: about as many steps as fit
"""
import json
import math
import statistics
import sys
import time
from dataclasses import dataclass, field

import torch.distributed as dist

import train
from experiments.clock import every, loss_at, reaches
from experiments.pictures import COLOURS, show_head, show_row
from experiments.runs import (Run, built, ends, finals, headline, lines, over, results, same_seeds,
                              spread_of, spread_of_reached)
from model import count_parameters
from noloco import random_groups
from plumbing.options import whole_config
from plumbing.processes import BadInput, Job
from plumbing.report import Meter, replace

SECONDS, EVALUATIONS, FIRST = 100, 8, 20
# few of DDP's steps fit, so it is tried with less warm-up and a larger rate
METHODS = {"DDP": "ddp"}
METHODS |= {"DDP, warm-up 5": "ddp --warmup 5", "DDP, warm-up 5, 6e-3": "ddp --warmup 5 --lr 6e-3"}
METHODS |= {f"DiLoCo, every {m}": f"diloco --inner-steps {m}" for m in (1, 2, 5, 10, 20, 50)}
METHODS |= {f"NoLoCo, every {m}": f"noloco --inner-steps {m}" for m in (2, 5, 10, 20, 50)}
METHODS |= {f"NoLoCo, every {m}, one byte": f"noloco --inner-steps {m} --wire int8" for m in (2, 5, 10)}
TRIES = ("DDP", "DDP, warm-up 5", "DDP, warm-up 5, 6e-3", "DiLoCo, every 5", "DiLoCo, every 20",
         "NoLoCo, every 5", "NoLoCo, every 20", "NoLoCo, every 2, one byte", "NoLoCo, every 5, one byte")
RARER = "DiLoCo, every 50", "NoLoCo, every 50"
OFTENER = ("DiLoCo, every 1", "DiLoCo, every 2", "DiLoCo, every 10", "NoLoCo, every 2", "NoLoCo, every 10",
           "NoLoCo, every 10, one byte")
QUICK = "DDP", "DiLoCo, every 5", "NoLoCo, every 5", "NoLoCo, every 5, one byte"
TURN, END = 20, 300         # seconds: links change so often, and for longer than a run takes
START, PAUSE = 17, 4        # seconds, about: before the first step, and of an evaluation


@dataclass
class Links:
    """mbit: of all links. slow: {host: Mbit/s of its link}. changing: hosts whose links have mbit and `low`
    by turns, all of them at once. tries: of METHODS, what the first seed takes. best: what did best then,
    and all seeds take."""
    mbit: float
    slow: dict = field(default_factory=dict)
    changing: tuple = ()
    best: tuple = ()
    tries: tuple = ()
    low: float = 20

    def options(self):
        """Of tools/hosts.py."""
        slow = [f"--slow {host}={rate}" for host, rate in self.slow.items()]
        turns = [f"--rate {host}@{TURN * i}={self.low if i % 2 else self.mbit}"
                 for i in range(1, END // TURN) for host in self.changing]
        return " ".join([f"--mbit {self.mbit}", *slow, *turns])

    def rate(self, host, second):
        """Bytes a second of a host's link, so long after the launch."""
        low = host in self.changing and second // TURN % 2
        return (self.low if low else self.slow.get(host, self.mbit)) * 1e6 / 8


BEST = ("DDP, warm-up 5, 6e-3", "DiLoCo, every 20", "DiLoCo, every 50", "NoLoCo, every 20",
        "NoLoCo, every 5, one byte")
LINKS = {
    "50 Mbit/s": Links(50, best=("DDP", "DiLoCo, every 20", "NoLoCo, every 20", "NoLoCo, every 2, one byte"),
                       tries=(*TRIES, *RARER)),
    "200 Mbit/s, one host 20": Links(200, {5: 20}, best=BEST, tries=(*TRIES, *RARER)),
    "200 Mbit/s, two hosts 20 by turns": Links(200, changing=(2, 5), best=("DDP", *BEST)),
    "200 Mbit/s": Links(200, best=(*QUICK, "DiLoCo, every 2"), tries=(*TRIES, *OFTENER)),
}
FREE = "no limit"
TINY = "--hidden 128 --mlp 512 --heads 4"       # train.py's own
# rate and batch that fit some hundreds of steps
COMMON = f"{TINY} --microbatches 1 --batch 1 --eval-sequences 16 --warmup {FIRST}"


def runs(steps):
    """A try (steps): one of each on the first links, on two hosts, by train.py itself."""
    program, length = how_long(steps)
    count, links = 8, LINKS
    if steps:
        count, links = 2, {"50 Mbit/s": Links(50, best=QUICK)}
    for name, wires in links.items():
        for method in METHODS:
            if method not in (*wires.best, *wires.tries):
                continue
            yield Run(f"{name}: {method}", f"{COMMON}{length} --method {METHODS[method]}", count,
                      program=program, first=method not in wires.best, hosts=wires.options())
    for method in ("ddp", "local"):
        options = f"{COMMON} --steps {steps or 100} --method {method}"
        yield Run(f"{FREE}: {method}", options, count, hosts=Links(0).options(), first=True)


def how_long(steps):
    """(program, options): as many steps as fit; or, in a try, so many."""
    return (Run.program, f" --steps {steps}") if steps else (f"-m experiments.hosts --train {SECONDS}", "")


# ---------------------------------------------------------------- one clock for all


@dataclass
class Clock(Meter):
    """Stands still while all evaluate: from when the last replica has come until all go on. Gives the run as
    many steps as fit, at the pace so far."""
    run: object = None              # a train.Run
    whole: float = 0.0              # seconds

    def pause(self):
        dist.barrier()
        super().pause()

    def go_on(self):
        if self.run.step:
            self.fit(f"pace/{self.run.step}", self.seconds, self.run.step)
        dist.barrier()
        super().go_on()

    def add(self, *numbers):
        super().add(*numbers)
        if self.run.step == self.run.o.warmup:                  # outer steps of these are done
            self.run.o.eval_every = 0                         # not known yet
            self.fit("first pace", time.perf_counter() - self.clock, self.run.step + 1)

    def fit(self, key, seconds, steps):
        """Steps in all; and between evaluations, which come just after an outer step. (These once: the log
        numbers evaluations by it.)"""
        o, m, gap = self.run.o, self.run.o.inner_steps or 1, self.whole / EVALUATIONS

        def rounds():                                       # of m steps, in a second; by rank 0's clock
            nearly_over = o.eval_every and self.whole - seconds < 1.5 * gap
            return 0.0 if nearly_over else steps / seconds / m          # the last part stays as planned

        pace = self.run.job.agree_on(key, rounds)
        if pace:
            o.steps = max(steps // m + 1, round(self.whole * pace)) * m
        o.eval_every = o.eval_every or max(1, round(gap * pace)) * m


def clocked(argv):
    """train.main, for so long: argv begins with the seconds. The first steps, of the warm-up, are the first
    measure of the pace."""
    job = Job()
    seconds = job.together(read_seconds, argv)
    if job.world == 1:
        job.refuse("--train is for several processes: start torchrun with --nproc-per-node 2 or more")
    if "--survive" in argv:
        job.refuse("--train has no clock for --survive: see experiments/cuts.py")
    run = built(job, [*argv[1:], "--eval-every", "1000000", "--steps", "1000000"])
    run.meter = Clock(run=run, whole=seconds)
    train.train(run)
    if job.rank == 0:
        replace(run.folder / "config.json", json.dumps(vars(run.o), indent=1))  # the steps that fitted


def read_seconds(argv):
    try:
        seconds = float(argv[0])
    except (IndexError, ValueError):
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise BadInput(f"--train takes the seconds to train, then train.py's options, got {argv[:1]}")
    return seconds


# ---------------------------------------------------------------- what the rates alone would give


def predicted(run, compute, links):
    """Seconds at each evaluation, by (H). compute: seconds of an inner step."""
    o, m = run.o, every(run.o)
    size = count_parameters(whole_config(o))[0] * (1 if o.wire == "int8" else 4)
    ready, found = [0.0] * run.ranks, []
    for step in range(1, int(run.steps[-1]) + 1):
        ready = [moment + compute for moment in ready]
        for group in meeting(run, step // m - 1) if step % m == 0 else []:
            n, begin = len(group), max(ready[host] for host in group)
            slowest = min(links.rate(host, START + begin + PAUSE * len(found)) for host in group)
            done = begin + 2 * (n - 1) / n * size / slowest
            for host in group:
                ready[host] = done
        if step in run.steps:
            ready = [max(ready)] * run.ranks                            # all wait for the evaluation
            found.append(ready[0])
    return found


def meeting(run, number):
    """Who meets whom in this outer step."""
    hosts, o = list(range(run.ranks)), run.o
    return random_groups(hosts, o.group_size, number, o.seed) if o.method == "noloco" else [hosts]


# ---------------------------------------------------------------- the table


def by_links(found):
    """{links: {method: [a Result per seed]}} and {method: seconds of a step} without a limit."""
    runs, free = {}, {}
    for label, seeds in results(found).items():
        links, name = label.split(": ")
        if links == FREE:
            free[name] = ends(seeds)[0] / seeds[0].steps[-1]
        else:
            runs.setdefault(links, {})[name] = seeds
    return runs, free


KINDS = "DDP", "DiLoCo", "NoLoCo", "NoLoCo, one byte"


def best(runs, method):
    """The name of its try with the least loss at the end, of those with most seeds."""
    first, one_byte = method.split(",")[0], method.endswith("byte")
    names = [name for name in runs if name.split(",")[0] == first and name.endswith("byte") == one_byte]
    most = max(len(runs[name]) for name in names)
    names = [name for name in names if len(runs[name]) == most]
    return min(names, key=lambda name: statistics.mean(finals(runs[name])))


def seconds_to(others, seeds):
    """Until each run reaches the loss that the other of its seed ends with; None: it does not."""
    return [reaches(other.final, run.losses, run.curves["seconds"])
            for run, other in zip(seeds, same_seeds(seeds, others))]


def share_of(others, seeds):
    """The same as a share of the other's time."""
    found = zip(seconds_to(others, seeds), ends(same_seeds(seeds, others)))
    return spread_of_reached([second and second / whole for second, whole in found], ".0%")


def over_at_the_end(others, seeds):
    """Perplexity over the other's, when the shorter run of both ends."""
    pairs = list(zip(seeds, same_seeds(seeds, others)))
    moments = [min(ends(pair)) for pair in pairs]
    losses = zip(*([loss_at(moment, run) for run in pair] for moment, pair in zip(moments, pairs)))
    return spread_of(over(*losses), "+.0%")


def held(run):
    """The share of the time that a replica was held by synchronisation."""
    syncs = run.steps[-1] // every(run.o)
    return run.curves["sync_seconds"][-1] * syncs / run.curves["seconds"][-1]


def table(found):
    runs, free = by_links(found)
    show_head("links | method | seeds | steps | held-out nats per byte | seconds | to DDP's last loss "
              "| to the best DiLoCo's | held | MB sent by all | predicted seconds over measured")
    for links, methods in runs.items():
        goals = [methods[best(methods, name)] for name in ("DDP", "DiLoCo")]
        for name, seeds in methods.items():
            expected = [predicted(run, free["local"], LINKS[links])[-1] for run in seeds]
            shares = [a / b for a, b in zip(expected, ends(seeds))]
            sent = statistics.mean(run.curves["sync_bytes"][-1] for run in seeds) / 1e6
            show_row(links, name, len(seeds), spread_of([run.steps[-1] for run in seeds], ".0f"),
                     spread_of(finals(seeds)), spread_of(ends(seeds), ".0f"),
                     *(spread_of_reached(seconds_to(others, seeds), ".0f") for others in goals),
                     spread_of([held(run) for run in seeds], ".0%"), f"{sent:.0f}", spread_of(shares, ".2f"))
    print()
    verdicts(runs)
    print("seconds of a step without a limit:", ", ".join(f"{name} {s:.3f}" for name, s in free.items()))


def verdicts(runs):
    """NoLoCo's best beside DDP's and DiLoCo's best, seed by seed."""
    show_head("links | method | seeds | DDP's last loss, in so much of its time | DiLoCo's "
              "| perplexity per byte over DiLoCo's")
    for links, methods in runs.items():
        ddp, diloco, *ours = [best(methods, kind) for kind in KINDS]
        for name in ours:
            seeds = methods[name]
            show_row(links, name, len(seeds), share_of(methods[ddp], seeds), share_of(methods[diloco], seeds),
                     over_at_the_end(methods[diloco], seeds))


def draw(plt, found):
    runs, free = by_links(found)
    columns = min(2, len(runs))
    rows = -(-len(runs) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(4.6 * columns, 3.6 * rows), layout="constrained",
                                sharey=True, squeeze=False)
    for axis, (links, methods) in zip(axes.flat, runs.items()):
        for colour, method in zip(COLOURS, KINDS):
            name = best(methods, method)
            lines(axis, methods[name], name, colour)
            for run in methods[name]:
                expected = predicted(run, free["local"], LINKS[links])
                axis.plot(expected, run.losses, ":", color=colour, lw=1)
        axis.set(xlabel="seconds, measured (dotted: what the rates alone give)", title=links)
        axis.legend(loc="lower left")
    axes[0, 0].set(ylim=(1.85, None))
    for axis in axes[:, 0]:
        axis.set(ylabel="held-out nats per byte")
    return figure


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        clocked(sys.argv[2:])
    else:
        headline("hosts", __doc__, runs, table, draw)
