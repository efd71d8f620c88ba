"""Messages that travel during inner steps, so that the outer step waits less or not at all.

`PhiAhead` is the paper's: phi leaves with the first of the inner steps. `Delayed` (ours, `--delay`) sends
theta at the m-th step too, goes on training, and merges D steps later what came, keeping what was learnt:

    at step s       sent <- theta, to the group drawn for the outer step
    at step s + D   phi, delta by N2 and N3 of what was sent and received;   theta <- phi + (theta - sent)

D = 0 is the paper's outer step. docs/stability.md says why D should be at most m / 2.
"""
import torch
import torch.distributed as dist

from noloco import DiLoCo, NoLoCo
from plumbing.onebyte import OneByteNoLoCo


def own_lane(outer):
    """A process group, and so connections, of its own for messages that others must overtake."""
    if len(outer.ranks) == 1:
        return None
    lane = dist.new_group(outer.ranks, use_local_synchronization=True)
    if outer.message_device.type == "cuda":
        dist.barrier(lane)                      # NCCL: a group's first use must have all its ranks in it
    return lane


class PhiAhead(NoLoCo):
    """NoLoCo where gamma differs from beta: phi travels during the inner steps, so theta alone blocks."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.ahead, self.lane = None, own_lane(self)

    @torch.no_grad()
    def step(self):
        if self.ahead is None:
            self.ahead = self.post(self.group(), {"phi": self.phi}, self.lane)
        due = super().step()
        if due:
            self.ahead = None
        return due

    def exchange(self):
        (thetas,), works = self.post(self.group(), {"theta": self.theta})
        (phis,), more = self.ahead
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


class Delayed:
    """Before NoLoCo or a subclass among the bases of a class: its messages travel during D inner steps."""

    def __init__(self, *args, delay, **kwargs):
        super().__init__(*args, **kwargs)
        self.delay, self.lane = delay, own_lane(self)
        self.sent, self.left = self.theta.clone(), 0
        self.flying = None                      # what is on its way: (thetas, phis, n), works

    @torch.no_grad()
    def step(self):
        if self.flying and (self.steps + 1) % self.inner_steps == self.delay % self.inner_steps:
            self.land()
        return super().step()

    def exchange(self):
        self.sent.copy_(self.theta)
        self.left = self.steps
        return self.depart()

    def depart(self):
        vectors = {"theta": self.sent} if self.gamma == self.beta else {"theta": self.sent, "phi": self.phi}
        (thetas, *phis), works = self.post(self.group(), vectors, self.lane)
        return (thetas, phis[0] if phis else [], len(thetas)), works

    def outer_step(self, arriving, works):
        self.flying = arriving, works

    def land(self):
        """Merge what arrived."""
        self.settle()
        arrived, _ = self.flying
        self.notice(arrived[0])
        theta = self.theta
        self.theta = Merging(theta, self.sent)
        super().outer_step(*arrived)
        self.theta, self.flying = theta, None

    def settle(self):
        """Let the messages arrive, without merging them. Gloo needs it before a process ends."""
        for work in self.flying[1] if self.flying else []:
            work.wait()

    def state_dict(self):
        return dict(super().state_dict(), sent=self.flying and self.sent, left=self.left)

    def load_state_dict(self, state):
        """A message that was under way leaves again: the partner loads too."""
        self.settle()
        super().load_state_dict(state)
        self.flying = None
        if state["sent"] is not None:
            self.sent.copy_(state["sent"])
            self.left = self.steps = state["left"]
            self.flying = self.depart()
            self.steps = state["steps"]


class Merging:
    """Stands for theta in the outer step of what was sent.

    `split` yields pieces of sent, which become phi, and adds what was learnt meanwhile to each in cache.
    """

    def __init__(self, theta, sent):
        self.theta, self.sent = theta, sent

    def split(self, pieces):
        for theta, sent in zip(self.theta.split(pieces), self.sent.split(pieces)):
            theta.sub_(sent)                    # what was learnt meanwhile
            yield sent
            theta.add_(sent)


class DelayedNoLoCo(Delayed, NoLoCo):
    """--delay"""


class DelayedOneByte(Delayed, OneByteNoLoCo):
    """--delay with --wire int8"""

    def beside(self):
        return self.sent


class DelayedDiLoCo(Delayed, DiLoCo):
    """--delay with --method diloco"""

    def depart(self):
        n = len(self.ranks)
        total = self.buffer("sum", self.sent).copy_(self.sent)
        works = [dist.all_reduce(total, group=self.everyone, async_op=True)] if n > 1 else []
        self.bytes_sent += 2 * (n - 1) * total.nbytes // n
        return ([total], [], n), works


def overlapping(o):
    """What train.make_outer takes instead of its own classes."""
    if not o.delay:
        return dict(kinds={"noloco": {"fp32": PhiAhead}})
    noloco = {"fp32": DelayedNoLoCo, "int8": DelayedOneByte}
    return dict(kinds={"noloco": noloco, "diloco": {"fp32": DelayedDiLoCo}}, delay=o.delay)
