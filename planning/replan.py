"""Planning anew while training runs (`--replan`; ours), where ranks have become slower or faster.

A rank compares its tasks with its own first ones, forward, loss and backward each by itself. So whatever
the time model leaves out is on both sides. Links are not measured anew, nor is a rank without work.
"""
import time
from dataclasses import replace
from functools import partial
from statistics import median

import torch

from planning.training import idle, plan_paths
from skippipe import kind, simulate

MANY = 100      # tasks of a kind whose median counts
NOISE = 1.1     # a rank whose tasks take up to so many times as long, or as short, has not changed


class Timed:
    """Before train.Pipeline among the bases of a class: the pipeline times its tasks."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.times = {}             # {kind: (start, end) of each task since the last look}
        self.usual = {}             # {kind: seconds of the first tasks}
        self.factor = 1.0           # how much longer than those this rank's tasks take

    def task(self, u, hop, x):
        start = self.now()
        out = super().task(u, hop, x)
        if self.train:
            times = self.times.setdefault(kind(self.paths[u], hop), [])
            times.append((start, self.now()))
        return out

    def now(self):
        """On a GPU an event of its own clock, since the host runs ahead of it."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed(self, start, end):
        if self.device.type != "cuda":
            return end - start
        end.synchronize()
        return start.elapsed_time(end) / 1000

    def slower(self):
        """How many times longer than at first this rank's tasks took since the last look. Changes within
        NOISE do not count."""
        took, usually = 0.0, 0.0
        for what, times in self.times.items():
            self.usual.setdefault(what, median(self.elapsed(*pair) for pair in times[:MANY]))
            took += len(times) * median(self.elapsed(*pair) for pair in times[-MANY:])
            usually += len(times) * self.usual[what]
        self.times.clear()
        if usually and not 1 / NOISE < took / usually / self.factor < NOISE:
            self.factor = took / usually
        return self.factor


class Replanning:
    """Before train.Routes among the bases of a class; its pipeline is Timed."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.factors = [1.0] * self.job.world       # of all ranks, at the last look

    def renew(self, step):
        """At an evaluation, on every rank: another plan where one is shorter by more than --replan."""
        told = self.job.share(f"factor/{step}", str(self.pipeline.slower()))
        factors = [float(text) for text in told]
        if factors == self.factors:         # no rank has changed: the plan stays, whatever a new one would be
            return
        self.factors = factors
        if new := self.job.agree_on(f"plan/{step}", partial(self.better, factors, step)):
            self.plan = new
            self.job.say(idle(new, self.job.world))

    def better(self, factors, step):
        """On rank 0: a plan for the network as it is now, or None where the plan in force will do."""
        o, plan = self.o, self.plan
        network = replace(self.network, compute=[w * x for w, x in zip(self.network.compute, factors)])
        now = simulate(network, plan["paths"], order=plan["order"]).makespan
        new = plan_paths(network, o.routing, o.skip, o.microbatches, o.seed)
        if now <= (1 + o.replan) * new["makespan"]:
            return None
        planned = plan["network"]["compute"]
        changed = [f"rank {r} takes {factors[r]:.1f}x its time"
                   for r, seconds in enumerate(network.compute) if seconds != planned[r]]
        line = (f"step {step}: {', '.join(changed)}: planned anew, iteration {new['makespan']:.3g} s instead "
                f"of {now:.3g} s (simulated)")
        self.job.tell(dict(event="planned anew", step=step, compute=network.compute, line=line))
        return new
