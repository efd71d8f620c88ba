"""A share of left-out stages that falls to none while training goes on (`--falling`; ours).

Skipping makes an iteration shorter, but a model that has always left stages out is worse as a whole. So the
first plan leaves out the share of --skip, each further plan one stage less, the last none, and all have as
many of the steps: many short iterations at first, and a whole model at the end.
"""
from functools import partial

from planning.routing import idle


class Falling:
    """Puts the plan of each step into routes, a train.Routes.

    All plans are made at the start. A run that goes on (not `begins`) makes them again, and they are the
    same: a plan depends on the network, which the checkpoint keeps, and on the seed alone.
    """

    def __init__(self, routes, begins):
        self.routes, self.usual = routes, routes.at
        routes.at = self.at
        self.shares = falling(routes.o.skip, len(routes.stages))
        self.plans = [routes.plan] if begins else []
        for share in self.shares[len(self.plans):]:
            self.plans.append(routes.job.agree_on(f"plan/{share}", partial(routes.new_plan, share)))
            routes.job.say(idle(self.plans[-1], routes.job.world))
        routes.job.say([self.summary()])

    def at(self, step):
        self.routes.plan = self.plans[step * len(self.plans) // self.routes.o.steps]
        return self.usual(step)

    def first_step(self, k):
        """Of plan k."""
        return -(-k * self.routes.o.steps // len(self.plans))

    def summary(self):
        stages = len(self.routes.stages)
        parts = [f"{round(share * stages)} from step {self.first_step(k)} ({plan['makespan']:.3g} s)"
                 for k, (share, plan) in enumerate(zip(self.shares, self.plans))]
        return f"of {stages} stages paths leave out {', '.join(parts)}; simulated iterations"


def falling(share, stages):
    """The shares: this one rounded to stages, then one stage less at a time, then none."""
    return [left_out / stages for left_out in range(stages - round((1 - share) * stages), -1, -1)]
