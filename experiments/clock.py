"""Runs of train.py by the clock: about as many steps as fit into so many measured seconds.

    torchrun ... -m experiments.clock --clock SECONDS ...   train.py's options: as many steps as fit

The replicas are on hosts of this machine (tools/hosts.py; root and iproute2), each with CPU of a
processor; the relay, which is the network, has its own. Each origin evaluates on its own part of
the second half of the held-out text.
"""
import json
import sys
import time
from dataclasses import dataclass, replace

import torch.distributed as dist

import train
from experiments.harness import built
from train import Job, Parser

CPU = 0.2                       # of a processor, that each host has
EVALUATIONS = 6                 # of a run
PROGRAM = "-m experiments.clock --clock"


@dataclass
class Clock(train.Meter):
    """Gives the run as many steps as fit into `limit` seconds at the slowest rank's pace since half
    of the warm-up.

    The pace is renewed at each evaluation. The clock stands still while replicas evaluate, from
    when the last one has come until all go on.
    """
    run: object = None              # a train.Run
    limit: float = 0.0
    begun: tuple = ()               # (seconds, steps) at half of the warm-up: first steps are slow
    paced: bool = False

    def pause(self):
        dist.barrier()
        super().pause()

    def go_on(self):
        if self.paced and self.run.step < self.run.o.steps:
            self.fit(f"pace/{self.run.step}", self.seconds, self.run.step)
        dist.barrier()
        super().go_on()

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
        agreed = self.run.job.share(key, self.numbers(pace, seconds, steps))
        self.run.o.steps, self.run.o.eval_every = agreed[0]

    def pace(self, seconds, steps):
        """Steps a second of this rank."""
        return (steps - self.begun[1]) / (seconds - self.begun[0])

    def numbers(self, pace, seconds, steps):
        """(steps in all, a delayed message landed; those between evaluations, which follow outer
        steps)"""
        o = self.run.o
        m = o.inner_steps or 1
        delay = o.delay or 0
        left = self.limit - seconds
        gap = self.limit / EVALUATIONS
        every = o.eval_every or max(1, round(gap * pace / m)) * m
        if o.eval_every and 0 < left < 0.75 * gap:      # the last part stays as planned
            return o.steps, every
        in_all = max(steps // m + 1, round((steps - delay + left * pace) / m)) * m + delay
        if left <= 0:           # over its time: an evaluation must not move the end farther away
            in_all = min(in_all, o.steps)
        return in_all, every


class Holding(train.Routes):
    """Plans for nodes that hold `memory` microbatches at once."""
    memory = 3

    def network(self, pipeline):
        return replace(super().network(pipeline), memory=self.memory)


def clocked(argv):
    """train.main for so many seconds, on a part of the held-out text."""
    job = Job()
    own, argv = job.together(clock_parser().parse_known_args, argv)
    if job.world == 1:
        job.refuse("--clock is for several processes: start torchrun with --nproc-per-node 2 "
                   "or more")
    Holding.memory = own.memory
    endless = "--eval-every 1000000 --steps 1000000".split()
    run = built(job, [*argv, *endless], Routes=Holding)
    if run.corpus:
        test = run.corpus.heldout.chunk(2)[1]
        run.corpus.heldout = test.chunk(len(run.stages[0]))[run.stages[0].index(job.rank)]
    run.meter = Clock(run=run, limit=own.clock)
    train.train(run)
    if job.rank == 0:       # with the steps that fitted
        train.write_text(run.folder / "config.json", json.dumps(vars(run.o), indent=1))


def clock_parser():
    p = Parser("train.py's options, and these")
    p.add_argument("--clock", type=float, help="seconds to train")
    p.add_argument("--memory", type=int, default=3,
                   help="microbatches that a node holds, for the planner")
    return p


if __name__ == "__main__":
    clocked(sys.argv[1:])
