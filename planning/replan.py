"""Planning anew while training runs (`--replan`; ours), where ranks have become slower or faster.

A rank compares its backward tasks with its own first ones. So whatever the time model leaves out is
on both sides. Links are not measured anew, nor is a rank without work.
"""
from dataclasses import replace
from functools import partial
from statistics import median

from planning.training import clock, idle, plan_paths
from skippipe import BACKWARD, kind, simulate

COUNTED = 100      # tasks whose median counts
NOISE = 1.1     # a rank whose tasks take up to so many times as long, or as short, has not changed


class TimedBackwards:
    """Before train.Pipeline among the bases of a class: the pipeline times its backward tasks.

    They are most of a rank's work, and the rank does as many of them as of forwards, whatever the
    paths."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.times = []             # seconds of each backward since the last look
        self.usual = None           # seconds of the first ones
        self.factor = 1.0           # how much longer than those this rank's backwards take

    def task(self, u, hop, x):
        if not self.train or kind(self.paths[u], hop) != BACKWARD:
            return super().task(u, hop, x)
        start = clock(self.device)
        out = super().task(u, hop, x)
        self.times.append(clock(self.device) - start)
        return out

    def slower(self):
        """How many times longer than at first this rank's backwards took since the last look.
        Changes within NOISE do not count."""
        if self.times:
            self.usual = self.usual or median(self.times[:COUNTED])
            factor = median(self.times[-COUNTED:]) / self.usual
            if not 1 / NOISE < factor / self.factor < NOISE:
                self.factor = factor
        self.times.clear()
        return self.factor


class Replanning:
    """Before train.Routes among the bases of a class; its pipeline is TimedBackwards."""

    factors = None          # of all ranks, at the last look

    def renew(self, step):
        """At an evaluation, on every rank: another plan where one is shorter by more than
        --replan."""
        factors = [float(x) for x in self.job.share(f"factor/{step}", self.pipeline.slower())]
        if factors == (self.factors or [1.0] * len(factors)):       # the plan stays
            return
        self.factors = factors
        if new := self.job.agree_on(f"plan/{step}", partial(self.better, factors, step)):
            self.plan = new
            self.job.say(idle(new, self.job.world))

    def better(self, factors, step):
        """On rank 0: a plan for the network as it is now, or None where the plan in force will
        do."""
        o, plan = self.o, self.plan
        compute = [w * x for w, x in zip(self.network.compute, factors)]
        network = replace(self.network, compute=compute)
        now = simulate(network, plan["paths"], order=plan["order"]).makespan
        new = plan_paths(network, o.routing, o.skip, o.microbatches, o.seed, before=plan)
        if now <= (1 + o.replan) * new["makespan"]:
            return None
        planned = plan["network"]["compute"]
        changed = [f"rank {r} takes {factors[r]:.1f}x its time"
                   for r, seconds in enumerate(network.compute) if seconds != planned[r]]
        line = (f"step {step}: {', '.join(changed)}: planned anew, iteration "
                f"{new['makespan']:.3g} s instead of {now:.3g} s (simulated)")
        self.job.tell(dict(event="planned anew", step=step, compute=network.compute, line=line))
        return new
