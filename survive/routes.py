"""Paths around the dead: each iteration draws or plans its paths over the ranks that are alive in
it."""
import json

from planning.training import living
from plumbing.processes import BadInput
from skippipe import Network
from survive.meeting import Gone
from train import Routes


class SurvivingRoutes(Routes):
    """As Routes, over the ranks that are not in `job.excluded`."""

    def __init__(self, job, o, pipeline, stages, plan=None):
        if job.joining:
            plan = json.loads(job.store.get("first plan"))
        super().__init__(job, o, pipeline, stages, plan)
        if job.leads:
            job.store.set("first plan", json.dumps(self.plan))
        if self.plan:
            # On every rank, so that each plans anew without asking.
            self.network = Network(**self.plan["network"])
        self.all_stages = stages
        self.present_plan = self.plan           # self.plan stays the first one, for checkpoints

    def at(self, step):
        idle = self.present_plan and not self.present_plan["order"][self.job.rank]
        if self.pipeline.begin(step, idle):
            self.go_round(step)
        plan = self.present_plan
        return (plan["paths"], plan["order"]) if plan else super().at(step)

    def in_force(self):
        return self.present_plan

    def go_round(self, step):
        """After a death or a return: new paths. Raises Gone when there are none."""
        dead = sorted(self.job.excluded)
        left_out = [s for s, ranks in enumerate(self.all_stages) if set(ranks) <= set(dead)]
        if 0 in left_out:
            raise Gone("every replica of stage 0 is gone")
        if left_out and not self.o.skip:
            raise Gone(f"every replica of stage {left_out[0]} is gone and without --skip no "
                       "microbatch can leave it out")
        self.stages = living(self.all_stages, dead)
        how = ""
        if self.present_plan:
            self.plan_round(dead)
            how = f"; paths planned {self.present_plan['planned']}"
        if dead and self.job.leads:         # a rank that joins tells that itself
            self.job.tell(dict(event="dead", step=step, ranks=dead, stages_left_out=left_out,
                               how=how))

    def plan_round(self, dead):
        """Plan without the dead, or go back to the first plan when all are back.

        The plan depends on the network, the seed, the first plan and the dead, so all ranks agree.
        """
        if not dead:
            self.present_plan = self.plan
            return
        self.pipeline.allow(10 * self.job.timeout)
        try:
            self.present_plan = self.new_plan(tuple(dead))
        except BadInput as error:
            raise Gone(str(error))
        self.pipeline.allow(0.0)
