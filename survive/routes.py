"""Paths round the dead: those of each iteration are drawn, or planned anew, from who is alive in it."""
import json

from planning.training import living
from plumbing.processes import BadInput
from survive.meeting import Gone
from train import Routes


class SurvivingRoutes(Routes):
    """outer: the NoLoCo whose ranks are the living of this stage (set by parts.build)."""
    outer = None

    def __init__(self, job, o, pipeline, stages, plan=None):
        super().__init__(job, o, pipeline, stages, plan)
        self.whole = stages
        self.now = self.plan            # self.plan stays the first one, for checkpoints

    def at(self, step):
        idle = self.now and not self.now["order"][self.job.rank]
        if self.pipeline.begin(step, idle):
            self.go_round(step)
        return (self.now["paths"], self.now["order"]) if self.now else super().at(step)

    def makespan(self):
        return self.now and self.now["makespan"]

    def go_round(self, step):
        """Raises Gone when nothing leads round the dead."""
        self.job.dead = dead = self.pipeline.agreed
        out = [s for s, ranks in enumerate(self.whole) if set(ranks) <= dead]
        if len(dead) == self.job.world - 1:
            raise Gone("every other rank is gone, or this host is cut off")
        if 0 in out or out and not self.o.skip:
            way = " and without --skip no microbatch can leave it out" if out[0] else ""
            raise Gone(f"every replica of stage {out[0]} is gone{way}")
        if self.job.rank == 0:
            self.job.tell(dict(event="dead", step=step, ranks=sorted(dead), stages_left_out=out))
        self.stages = living(self.whole, dead)
        if self.outer:
            self.outer.ranks = next(s for s in self.stages if self.job.rank in s)
        if self.now:
            self.now = self.replan(step, dead)

    def replan(self, step, dead):
        """Rank 0's new plan, for all."""
        self.pipeline.pause(10 * self.job.timeout)
        key = f"plan/{step}"
        if self.job.rank == 0:
            try:
                plan = self.new_plan(tuple(sorted(dead)))
            except BadInput as error:
                plan = dict(error=str(error))
            self.job.store.set(key, json.dumps(plan))
        plan = json.loads(self.job.store.get(key))
        self.pipeline.pause(0.0)
        if "error" in plan:
            raise Gone(plan["error"])
        return plan
