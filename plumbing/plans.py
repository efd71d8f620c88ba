"""runs/NAME/plan.json: the plans that a run has followed."""
import json

from planning.kept import as_json, bound_of
from planning.training import rounds_of
from plumbing.files import replace
from plumbing.processes import BadInput
from skippipe import Network


class KeptPlans:
    """The plans of a run, each with the step from which it held. run: a train.Run.

    Only the first rank writes. A run whose paths are not planned has no such file.
    """

    def __init__(self, run):
        self.run = run
        self.file = run.folder / "plan.json"
        self.step = run.step        # inner steps done at the last look
        self.plan = None            # in force at the last look
        self.rows = []
        if run.job.leads:
            self.rows = self.before()
        self.keep()

    def before(self):
        """The rows up to the checkpoint of a resumed run; training makes the later ones again.

        Raises BadInput where somebody has damaged the file.
        """
        if not (self.run.step and self.file.exists()):
            return []
        try:
            rows = json.loads(self.file.read_text())
            return [row for row in rows if row["step"] <= self.run.step]
        except (ValueError, KeyError, TypeError):
            raise BadInput(f"{self.file} is damaged: remove it, and the run writes a new one")

    def keep(self):
        """After every step: add the plan in force, if it is another one than at the last look."""
        plan = self.run.routes.in_force()
        if self.run.job.leads and plan is not self.plan:
            self.plan = plan
            self.add(self.row_of(plan))
        self.step = self.run.step

    def add(self, row):
        """Add a row to the file, unless its last one says the same, as in a resumed run."""
        row = json.loads(json.dumps(row))           # tuples become lists
        if self.rows and self.rows[-1]["step"] == row["step"]:
            self.rows.pop()                         # no step was made by that plan
        if not self.rows or self.rows[-1] | {"step": row["step"]} != row:
            self.rows.append(row)
        lines = ",\n".join(json.dumps(row) for row in self.rows)
        replace(self.file, f"[\n{lines}\n]\n")

    def row_of(self, plan):
        """The plan as plan.json has it (docs/planning.md)."""
        o = self.run.o
        network = Network(**plan["network"])
        dead = set(network.stage_of)
        for ranks in self.run.routes.living():
            dead -= set(ranks)
        rounds = rounds_of(o.microbatches, min(network.memory))
        bound = bound_of(network, plan["paths"], rounds, dead)
        made = dict(by="train.py", routing=o.routing, skip=o.skip, microbatches=o.microbatches,
                    seed=o.seed, links=o.links or "measured", planned=plan["planned"])
        return as_json(network.stages, plan["paths"], plan["order"], plan["makespan"], bound, made,
                       step=self.step, dead=sorted(dead), network=plan["network"])
