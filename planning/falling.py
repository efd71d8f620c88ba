"""A share of left-out stages that falls to none while training goes on (`--falling`; ours).

Skipping makes an iteration shorter, but a model that has always left stages out is worse as a whole. So the
first plan leaves out the share of --skip, each further plan one stage less, the last none, and all have as
many of the steps: many short iterations at first, and a whole model at the end.
"""
from functools import partial

from planning.routing import idle, plan_paths
from train import Routes


class Falling(Routes):
    """All plans are made at the start. A run that goes on makes them again, and they are the same: a plan
    depends on the network, which the checkpoint keeps, and on the seed alone."""

    def __init__(self, job, o, pipeline, stages, plan=None):
        super().__init__(job, o, pipeline, stages, plan)
        self.plans = [] if plan else [self.plan]
        shares = falling(o.skip, len(stages))
        for share in shares[len(self.plans):]:
            new = partial(plan_paths, self.network, o.routing, share, o.microbatches, o.seed)
            self.plans.append(job.agree_on(f"plan/{share}", new))
            job.say(idle(self.plans[-1], job.world))
        job.say([self.summary(shares)])

    def summary(self, shares):
        count, steps, stages = len(self.plans), self.o.steps, len(self.stages)
        parts = [f"{round(share * stages)} from step {-(-k * steps // count)} ({plan['makespan']:.3g} s)"
                 for k, (share, plan) in enumerate(zip(shares, self.plans))]
        return f"of {stages} stages paths leave out {', '.join(parts)}; simulated iterations"

    def at(self, step):
        self.plan = self.plans[step * len(self.plans) // self.o.steps]
        return super().at(step)


def falling(share, stages):
    """The shares: this one rounded to stages, then one stage less at a time, then none."""
    return [left_out / stages for left_out in range(stages - round((1 - share) * stages), -1, -1)]
