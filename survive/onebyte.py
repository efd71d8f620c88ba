"""One byte a weight (plumbing/onebyte.py) where replicas may be away: with one that may be far, fp32.

A replica that has been late, alone or away, or has joined, writes far/R to the store before it meets anyone,
and takes it away when it has met. Whoever meets it sees that before a message leaves, so a group agrees.
"""
import contextlib

import torch

from plumbing.onebyte import OneByte, Unread
from survive.outer import SurvivingNoLoCo


class SurvivingOneByte(OneByte, SurvivingNoLoCo):
    """As SurvivingNoLoCo, with a quarter of the bytes."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.short = self.letter
        self.thetas = {}                                    # of partners, as they were read

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
        self.letter = self.theta if far else self.short
        if far:
            self.tell("fp32 instead of int8", far=far)
        super().swap(members, *rest)

    def encoded(self, vector):
        return vector if self.letter is self.theta else super().encoded(vector)

    def buffer(self, key):
        return super().buffer((key, self.letter.dtype))

    def accept(self, ranks, thetas, phis):
        """A replica that is itself not finite reads beside its phi."""
        own = self.theta if torch.isfinite(self.theta.sum()) else self.phi
        read = {r: self.whole(thetas[r], own, i) for i, r in enumerate(ranks)}
        return super().accept(ranks, read, phis)

    def whole(self, message, own, i):
        """All of a theta, to see whether it is finite before any of it is used."""
        if message.dtype == own.dtype:
            return message
        if i not in self.thetas:
            self.thetas[i] = torch.empty_like(own)
        theta = self.thetas[i]
        for out, part in zip(theta.split(self.pieces), Unread(self, message, own).split(self.pieces)):
            out.copy_(part)
        return theta
