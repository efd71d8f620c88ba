"""Runs of train.py by the clock: about as many steps as fit into so many measured seconds.

    python -m experiments.network --clock SECONDS ...   train.py's options: as many steps as fit
    python -m experiments.network --clock 0 ...         times outer steps alone

The replicas are on hosts of this machine (tools/hosts.py; root and iproute2), each with CPU of a
processor; the relay, which is the network, has its own. A step is one sequence of 128 tokens a
replica. The held-out text has two halves, for validation and test. Each origin evaluates on its own
part of a half.
"""
import json
import time
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

import train
from experiments.harness import built
from gossip import outer_optimizer
from plumbing import report
from plumbing.options import Parser
from plumbing.processes import Job

FIRST, CPU = 20, 0.2                            # steps of warm-up; of a processor
EVALUATIONS = dict(validation=3, test=6)        # of a run
PROGRAM = "-m experiments.network --clock"
TINY = "--hidden 128 --mlp 512 --heads 4"       # train.py's own
COMMON = f"{TINY} --microbatches 1 --batch 1 --eval-sequences 64 --warmup {FIRST}"
# Outer steps that are timed alone: (method, wire).
OUTER_STEPS = {
    "all-reduce": ("diloco", "fp32"), "all-reduce, one byte": ("diloco", "int8"),
    "pair": ("noloco", "fp32"), "pair, one byte": ("noloco", "int8"),
}


@dataclass
class Clock(report.Meter):
    """Gives the run as many steps as fit into own.clock seconds at the slowest rank's pace since
    half of the warm-up.

    The pace is that of the first steps, or renewed at each evaluation. The clock stands still while
    replicas evaluate, from when the last one has come until all go on.
    """
    run: object = None              # a train.Run
    own: object = None              # the options of `clocked`
    begun: tuple = ()               # (seconds, steps) at half of the warm-up: first steps are slow
    paced: bool = False

    def pause(self):
        self.meet()
        super().pause()

    def go_on(self):
        if self.paced and self.own.pace == "latest" and self.run.step < self.run.o.steps:
            self.fit(f"pace/{self.run.step}", self.seconds, self.run.step)
        self.meet()
        super().go_on()

    def meet(self):
        dist.barrier()

    def add(self, *numbers):
        super().add(*numbers)
        self.reckon()

    def reckon(self):
        """After a step: the pace counts from half of the warm-up on; at its end it sets the
        steps."""
        now = time.perf_counter() - self.clock
        steps = self.run.step + 1
        o = self.run.o
        if not self.begun and self.run.step >= o.warmup // 2:
            self.begun = now, steps
        elif not self.paced and self.run.step >= o.warmup:      # the warm-up's outer steps are done
            self.paced = True
            o.eval_every = 0
            self.fit("first pace", now, steps)

    def fit(self, key, seconds, steps):
        """All ranks set the numbers that fit the slowest."""
        pace = min(self.run.job.share(f"{key}, each", self.pace(seconds, steps)))
        agreed = self.run.job.agree_on(key, lambda: self.numbers(pace, seconds, steps))
        self.run.o.steps, self.run.o.eval_every = agreed

    def pace(self, seconds, steps):
        """Steps a second of this rank."""
        return (steps - self.begun[1]) / (seconds - self.begun[0])

    def numbers(self, pace, seconds, steps):
        """(steps in all, a delayed message landed; those between evaluations, which follow outer
        steps)"""
        o = self.run.o
        m = o.inner_steps or 1
        delay = o.delay or 0
        left = self.own.clock - seconds
        gap = self.own.clock / EVALUATIONS[self.own.half]
        every = o.eval_every or max(1, round(gap * pace / m)) * m
        if o.eval_every and 0 < left < 0.75 * gap:      # the last part stays as planned
            return o.steps, every
        in_all = max(steps // m + 1, round((steps - delay + left * pace) / m)) * m + delay
        if left <= 0:           # over its time: an evaluation must not move the end farther away
            in_all = min(in_all, o.steps)
        return in_all, every


class Leading(Clock):
    """Rank 0's with --survive: its own pace counts, and no replica waits for another's
    evaluation."""

    def meet(self):
        """Nobody waits."""

    def fit(self, key, seconds, steps):
        o = self.run.o
        o.steps, o.eval_every = self.numbers(self.pace(seconds, steps), seconds, steps)
        self.run.job.store.set("clock", json.dumps([o.steps, o.eval_every]))


class Following(Leading):
    """The other ranks': after outer steps they read rank 0's newest numbers, if there are any
    yet."""

    def reckon(self):
        o, store = self.run.o, self.run.job.store
        outer = self.run.step >= o.warmup and self.run.step % o.inner_steps == 0
        if outer and store.check(["clock"]):
            o.steps, o.eval_every = json.loads(store.get("clock"))


class Holding(train.Routes):
    """Plans for nodes that hold `memory` microbatches at once."""
    memory = 3

    def links(self):
        found = super().links()
        return found and replace(found, memory=self.memory)


def clocked(argv):
    """train.main for so many seconds, on a part of the held-out text."""
    job = Job()
    own, argv = job.together(clock_parser().parse_known_args, argv)
    if job.world == 1:
        job.refuse("--clock is for several processes: start torchrun with --nproc-per-node 2 "
                   "or more")
    Holding.memory = own.memory
    length = "--eval-every 1000000 --steps 1000000" if own.clock else "--steps 1"
    run = built(job, [*argv, *length.split()], Routes=Holding)
    if run.o.replan:
        job.refuse("--clock has routes of its own: drop --replan")
    if run.corpus:
        validation, test = run.corpus.heldout.chunk(2)
        half = test if own.half == "test" else validation
        run.corpus.heldout = half.chunk(len(run.stages[0]))[run.stages[0].index(job.rank)]
    if own.clock:
        run.meter = clock_of(run)(run=run, own=own)
    else:
        time_alone(run)
    train.train(run)
    if job.rank == 0:       # with the steps that fitted
        report.replace(run.folder / "config.json", json.dumps(vars(run.o), indent=1))


def clock_parser():
    p = Parser("train.py's options, and these")
    p.add_argument("--clock", type=float, help="seconds to train; 0: only time outer steps")
    p.add_argument("--half", choices=("validation", "test"), default="test",
                   help="of the held-out text")
    p.add_argument("--pace", choices=("first", "latest"), default="latest",
                   help="by which the clock reckons")
    p.add_argument("--memory", type=int, default=3,
                   help="microbatches that a node holds, for the planner")
    return p


def clock_of(run):
    """The class of this rank's clock."""
    if not run.o.survive:
        return Clock
    return Leading if run.job.rank == 0 else Following


# ---------------------------------------------------------------- an outer step alone


def time_alone(run, first=2, trials=7):
    """Write the seconds of each kind's trials, until the last rank is through, to alone.json.

    The first trials connect and are not counted.
    """
    found, params = {}, list(run.model.parameters())
    for name, (method, wire) in OUTER_STEPS.items():
        outer = outer_optimizer(method, wire, 0, params, inner_steps=1)
        seconds = [seconds_of(outer.step) for _ in range(first + trials)]
        of_ranks = run.job.share(f"alone/{name}", seconds[first:])
        found[name] = [max(trial) for trial in zip(*of_ranks)]
    if run.job.rank == 0:
        report.replace(run.folder / "alone.json", json.dumps(dict(alone=found)))


def seconds_of(step):
    """Seconds of one step that all ranks begin at one moment: hosts share this machine's clock."""
    moment = torch.tensor(time.monotonic() + 0.5, dtype=torch.float64)
    dist.broadcast(moment, 0)
    return seconds_from(float(moment), step)


def seconds_from(moment, step):
    """Seconds from the moment, which is to come, until the step is done."""
    time.sleep(max(0.0, moment - time.monotonic()))
    step()
    return time.monotonic() - moment
