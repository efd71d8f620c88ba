"""What a run says whose ranks may be dead: metrics.jsonl from those that answer in time."""
from train import Log

# In a report, of a rank that did not answer: what it has measured since its last answer.
NOTHING = dict(loss=0, home=0, heldout=[], merged=[], squares=0.0, weights=0, iteration=0.0)


class SurvivingLog(Log):
    """As Log, from the ranks that answer in time. Its totals are of all ranks that have answered
    this first rank, the dead too: after a takeover those that died before are not in them."""
    at_evaluations = Log.at_evaluations | dict(ranks="{ranks} ranks")
    at_the_end = Log.at_the_end | dict(
        lost_microbatches="lost            {lost_microbatches} microbatches with ranks that died",
        steps_alone="alone           {steps_alone} outer steps that a replica did without any "
                    "partner")

    def __init__(self, run):
        super().__init__(run)
        self.latest = {}            # {rank: its newest row}

    def average(self, vector):
        run = self.run
        replicas = next(ranks for ranks in run.routes.stages if run.job.rank in ranks)
        if len(replicas) == 1:
            return 0.0, 0
        return run.job.average(vector, replicas, f"spread/{run.stage}/{self.place()}")

    def place(self):
        """Names this evaluation, alike on all ranks."""
        o, step = self.run.o, self.run.step
        return f"{step // o.eval_every}/{step >= o.steps}"

    def counts(self):
        found = super().counts()
        found["lost_microbatches"] = self.run.pipeline.lost
        found["steps_alone"] = getattr(self.run.outer, "alone", 0)
        return found

    def load(self, counts):
        super().load(counts)
        self.run.pipeline.lost = counts.get("lost_microbatches", 0)
        if hasattr(self.run.outer, "alone"):
            self.run.outer.alone = counts.get("steps_alone", 0)

    def report(self, row, ends):
        name = f"row/{self.place()}"
        found = self.run.job.collect(name, self.counts() | row, self.run.step)
        if not self.run.job.leads:
            return
        self.latest |= found
        rows = []
        for rank, its in self.latest.items():
            rows.append(its if rank in found else its | NOTHING)
        line = self.line_of(rows)
        line["ranks"] = len(found)
        line["simulated_seconds"] = self.run.routes.makespan
        for column in ("lost_microbatches", "steps_alone"):
            line[column] = sum(its[column] for its in self.latest.values())
        if not all_compared(found, self.run.stages):
            # A mean over some of the replicas is no model that anybody keeps, and those who came in
            # time may be just those who have averaged.
            line.update(weight_spread=None, merged_loss=None, merged_nats_per_byte=None)
        self.tell(line, ends)


def all_compared(rows, stages):
    """Whether every rank that answered was compared with the replicas of its stage, if it has any.

    rows: {rank: its row} of those that answered.
    """
    for ranks in stages:
        answered = [rows[r] for r in ranks if r in rows]
        if len(answered) > 1 and min(row["weights"] for row in answered) == 0:
            return False
    return True
