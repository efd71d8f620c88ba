"""Checkpoints of a run whose ranks may be dead.

    runs/NAME/checkpoints/00000600/rank2.dead     rank 2 was dead: any replica's part will do for it
"""
import contextlib

from train import Checkpoints, resume


class SurvivingCheckpoints(Checkpoints):
    """As Checkpoints, but no rank waits for another; job: a SurvivingJob."""

    def own(self):
        """{step: file} of the parts that this rank wrote, in order."""
        return super().parts()

    def parts(self):
        """As Checkpoints.parts. Where this rank was dead, a replica's part stands for its own."""
        found = self.own()
        replicas = next(ranks for ranks in self.job.stages if self.job.rank in ranks)
        for mark in self.folder.glob(f"*/rank{self.job.rank}.dead"):
            for r in replicas:
                file = mark.with_name(f"rank{r}.pt")
                if file.exists() and mark.parent.name.isdigit():    # no copy that somebody keeps
                    found.setdefault(int(mark.parent.name), file)
        return dict(sorted(found.items()))

    def load(self):
        """As Checkpoints.load. A rank that joins takes no part of a checkpoint here."""
        if self.job.joining:
            return None
        state = super().load()
        if state:
            self.tell_of_part(state["step"])
        return state

    def save(self, step, state):
        self.write_part(step, state)
        self.job.then = f"; go on with {resume(self.folder.parent)}"
        self.seal()

    def seal(self):
        """Tell that this rank has written its part, and drop the parts that nobody needs.

        This rank keeps its last two parts, its part of the newest checkpoint that all ranks hold,
        and all from the newest on that all living ranks hold. The first rank marks the dead where
        they have no part.
        """
        held = list(self.own())
        self.tell_of_part(held[-1])
        away = self.job.away()
        if self.job.leads:
            self.mark_dead(held, away)
        everyone = range(self.job.world)
        living = [r for r in everyone if r not in away]
        of_all = self.newest_saved(held, everyone)
        of_living = self.newest_saved(held, living)
        self.forget([step for step in held[:-2] if step < of_living and step != of_all])

    def tell_of_part(self, step):
        """Tell the other ranks, through the store, that this rank has a part of this step."""
        self.job.store.set(f"saved/{step}/{self.job.rank}", "=")    # a store may refuse no value

    def newest_saved(self, steps, ranks):
        """The newest of these steps of which all these ranks told that they have a part, or 0."""
        newest = 0
        for step in steps:
            if self.job.store.check([f"saved/{step}/{r}" for r in ranks]):
                newest = max(newest, step)
        return newest

    def mark_dead(self, steps, away):
        """Mark the ranks that are away, at each of these steps of which they have no part."""
        for step in steps:
            for r in away:
                if not self.job.store.check([f"saved/{step}/{r}"]):
                    (self.place(step) / f"rank{r}.dead").touch()

    def forget(self, steps):
        """Remove this rank's parts of these steps, and the marks of the dead: they serve nobody."""
        for step in steps:
            for file in self.place(step).glob("rank*.dead"):
                with contextlib.suppress(OSError):          # another rank was faster
                    file.unlink()
        super().forget(steps)
