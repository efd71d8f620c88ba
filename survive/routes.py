"""Paths around the dead: each iteration draws or plans its paths over the ranks that are alive in
it."""
import json

from planning.training import living, plan_paths
from skippipe import Network
from survive.meeting import Gone
from train import Routes


class SurvivingRoutes(Routes):
    """As Routes, over the ranks that are not in `job.excluded`."""

    def __init__(self, job, o, pipeline, stages, kept=None):
        if job.joining:
            kept = json.loads(job.store.get("first plan"))
        super().__init__(job, o, pipeline, stages, kept)
        if job.leads:
            job.store.set("first plan", json.dumps(self.first))
        self.pipeline = pipeline
        self.all_stages = stages

    def at(self, step):
        idle = self.plan and not self.plan["order"][self.job.rank]
        if self.pipeline.begin(step, idle):
            self.go_round(step)
        return super().at(step)

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
        if self.plan:
            self.plan_round(dead)
            how = f"; paths planned {self.plan.get('planned', 'anew')}"
        if dead and self.job.leads:         # a rank that joins tells that itself
            self.job.tell(dict(event="dead", step=step, ranks=dead, stages_left_out=left_out,
                               how=how))

    def plan_round(self, dead):
        """Plan without the dead, or go back to the first plan when all are back.

        The plan depends on the network, the seed, the first plan and the dead, so all ranks agree.
        """
        if not dead:
            self.plan = self.first
            return
        o = self.o
        self.pipeline.allow(10 * self.job.timeout)
        try:
            self.plan = plan_paths(Network(**self.first["network"]), o.routing, o.skip,
                                   o.microbatches, o.seed, tuple(dead), self.first)
        except ValueError as error:
            raise Gone(str(error))
        self.pipeline.allow(0.0)
