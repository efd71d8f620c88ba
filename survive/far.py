"""One byte a weight (plumbing/onebyte.py) where replicas may be away. A group with a far replica sends fp32.

One byte can only carry a weight that is close to the receiver's own. A late replica (survive/meeting.py) may
be far from its partners. It says that it is late before a meeting. Its partners read this before any message
leaves, so the group agrees.
"""
from plumbing.onebyte import OneByte, Unread
from survive.meeting import position
from survive.outer import SurvivingNoLoCo


class SurvivingOneByte(OneByte, SurvivingNoLoCo):
    """As SurvivingNoLoCo, with a quarter of the bytes."""

    far = ()            # the members of the present group that may be far

    def post(self, group, vectors, lane=None):
        self.far = [r for r in group if position(self.store, r)[1] == "late"]
        if self.far:
            self.report("fp32 instead of int8", far=self.far)
        return super().post(group, vectors, lane)

    def encoded(self, vector):
        return vector if self.far else super().encoded(vector)

    def buffer(self, key, like):
        return super().buffer((key, like.dtype), like)

    def finite(self, vector):
        """An unread message is judged by its scales s, before it is read.

        Its weights are at most B / 2 = 128 s from the vector beside which it is read.
        """
        return super().finite(128 * self.parts(vector.message)[1] if isinstance(vector, Unread) else vector)

    def adopt(self, theta):
        """This replica's own theta is not finite, so a message is read beside phi, of the last outer step."""
        self.theta.copy_(self.phi)
        for phi, part in zip(self.phi.split(self.pieces), theta.split(self.pieces)):
            phi.copy_(part)
