"""One byte a weight (plumbing/onebyte.py) where replicas may be away: with one that may be far, fp32.

A replica that has been late, alone or away, or has joined, writes far/R to the store before it meets anyone,
and takes it away when it has met. Whoever meets it sees that before a message leaves, so a group agrees.
"""
import contextlib

from plumbing.onebyte import OneByte, Unread
from survive.outer import SurvivingNoLoCo


class SurvivingOneByte(OneByte, SurvivingNoLoCo):
    """As SurvivingNoLoCo, with a quarter of the bytes."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.far = False            # whether a member of the present meeting may be far

    def exchange(self):
        far = self.late
        with contextlib.suppress(RuntimeError):             # a lost store is noticed after the step
            if far:
                self.store.set(f"far/{self.rank}", "")
        found = super().exchange()
        with contextlib.suppress(RuntimeError):
            if far and not self.late:
                self.store.delete_key(f"far/{self.rank}")
        return found

    def swap(self, members, *rest):
        far = [r for r in members if self.store.check([f"far/{r}"])]
        self.far = bool(far)
        if far:
            self.tell("fp32 instead of int8", far=far)
        super().swap(members, *rest)

    def encoded(self, vector):
        return vector if self.far else super().encoded(vector)

    def buffer(self, key, like):
        return super().buffer((key, like.dtype), like)

    def finite(self, message):
        """Its scales tell, before any of it is read: a weight is at most half of B, 128 s, from one's own."""
        fp32 = message.dtype == self.theta.dtype
        return super().finite(message if fp32 else 128 * self.parts(message)[1])

    def adopt(self, theta):
        """Read beside phi, of the last outer step: its own theta need not be finite."""
        fp32 = theta.dtype == self.phi.dtype
        parts = (theta if fp32 else Unread(self, theta, self.phi)).split(self.pieces)
        for phi, part in zip(self.phi.split(self.pieces), parts):
            phi.copy_(part)
