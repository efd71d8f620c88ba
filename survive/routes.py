"""Paths around the dead: each iteration draws or plans its paths over the ranks that are alive in
it."""
import json

from planning.training import living, plan_paths
from skippipe import Network
from survive.meeting import TooFew
from train import Routes, make_plan


class SurvivingRoutes(Routes):
    """As Routes, over the ranks that are not in `job.dead`.

    plan: the first plan, which checkpoints hold. mended: the plan around the dead; None without.
    """

    def __init__(self, run, kept=None, make_plan=make_plan):
        self.job, self.pipeline = run.job, run.pipeline
        if self.job.joining:
            kept = json.loads(self.job.store.get("first plan"))
        super().__init__(run, kept, make_plan)
        if self.job.leads:
            self.job.store.set("first plan", json.dumps(self.plan))
        self.all_stages = run.stages
        self.mended = None

    @property
    def makespan(self):
        """Seconds of an iteration by the plan of this moment; None without a plan."""
        plan = self.mended or self.plan
        return plan and plan["makespan"]

    def at(self, step):
        idle = self.plan and not (self.mended or self.plan)["order"][self.job.rank]
        if self.pipeline.begin(step, idle):
            self.go_round(step)
        if self.mended:
            return self.mended["paths"], self.mended["order"]
        return super().at(step)

    def go_round(self, step):
        """After a death or a return: new paths. Raises TooFew when there are none."""
        dead = sorted(self.job.dead)
        left_out = [s for s, ranks in enumerate(self.all_stages) if set(ranks) <= set(dead)]
        if 0 in left_out:
            raise TooFew("every replica of stage 0 is dead")
        if left_out and not self.o.skip:
            raise TooFew(f"every replica of stage {left_out[0]} is dead and without --skip no "
                         "microbatch can leave it out")
        self.stages = living(self.all_stages, dead)
        how = ""
        if self.plan:
            self.mended = self.plan_round(dead) if dead else None
            how = f"; paths planned {(self.mended or {}).get('planned', 'anew')}"
        if dead and self.job.leads:         # a rank that joins tells that itself
            self.job.tell(dict(event="dead", step=step, ranks=dead, stages_left_out=left_out,
                               how=how))

    def plan_round(self, dead):
        """The plan without the dead. It depends on the network, the seed, the first plan and the
        dead, so all ranks agree."""
        o = self.o
        self.pipeline.allow(10 * self.job.timeout)
        try:
            mended = plan_paths(Network(**self.plan["network"]), o.routing, o.skip, o.microbatches,
                                o.seed, tuple(dead), self.plan)
        except ValueError as error:
            raise TooFew(str(error))
        self.pipeline.allow(0.0)
        return mended
