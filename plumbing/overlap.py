"""Messages that travel during inner steps, so that the outer step waits less."""
import torch
import torch.distributed as dist

from noloco import NoLoCo


class PhiAhead(NoLoCo):
    """NoLoCo where gamma differs from beta: phi leaves with the first of the inner steps.

    The paper proposes it: phi is known right after the previous outer step, so theta alone blocks. phi has a
    process group, and so connections, of its own, since theta must overtake it.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.ahead = self.lane = None
        if len(self.ranks) > 1:
            self.lane = dist.new_group(self.ranks, use_local_synchronization=True)
            if self.message_device.type == "cuda":
                dist.barrier(self.lane)         # NCCL: a group's first use must have all its ranks in it

    @torch.no_grad()
    def step(self):
        if self.ahead is None:
            self.ahead = self.send_ahead()
        due = super().step()
        if due:
            self.ahead = None
        return due

    def send_ahead(self):
        (phis,), works = self.post(self.group(), {"phi": self.phi}, self.lane)
        return phis, works

    def exchange(self):
        (thetas,), works = self.post(self.group(), {"theta": self.theta})
        phis, more = self.ahead
        for work in works + more:
            work.wait()
        self.notice(thetas)
        return thetas, phis, len(thetas)

    def settle(self):
        """Let a phi under way arrive. Gloo needs it before a process ends in the midst of inner steps."""
        for work in self.ahead[1] if self.ahead else []:
            work.wait()
        self.ahead = None

    def load_state_dict(self, state):
        self.settle()                           # the partner loads too, so its phi is on the way
        super().load_state_dict(state)
