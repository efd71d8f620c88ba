"""Messages that travel during inner steps, so that the outer step waits less or not at all.

`PhiAhead` is the paper's: phi leaves with the first of the inner steps. `Delayed` (ours, `--delay`) sends
theta at the m-th step too, goes on training, and merges D steps later what came, keeping what was learnt:

    at step s       sent <- theta, to the group drawn for the outer step
    at step s + D   phi, delta by N2 and N3 of what was sent and received;   theta <- phi + (theta - sent)

D = 0 is the paper's outer step. docs/stability.md says why D should be at most m / 2, from m = 2 on.
"""
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from types import SimpleNamespace

import torch
import torch.distributed as dist

from noloco import DiLoCo, NoLoCo, outer_update
from plumbing.onebyte import OneByteNoLoCo
from plumbing.wires import ShortDiLoCo, wired


class Travelling:
    """Before NoLoCo or a subclass among the bases of a class: some messages travel during inner steps.

    They have a process group, and so connections, of their own, since other messages must overtake them.
    flying: what is under way, (the group's vectors, works), or None.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.flying = self.lane = None
        if len(self.ranks) > 1:
            self.lane = dist.new_group(self.ranks, use_local_synchronization=True)
            if self.message_device.type == "cuda":
                dist.barrier(self.lane)         # NCCL: a group's first use must have all its ranks in it

    def settle(self):
        """Let what is under way arrive, without using it. Gloo needs it before a process ends."""
        if self.flying:
            vectors, works = self.flying
            for work in works:
                work.wait()
            self.flying = vectors, []           # Gloo hangs in a second wait

    def load_state_dict(self, state):
        """The partners load too, so what is under way will arrive, and leave again."""
        self.settle()
        self.flying = None
        super().load_state_dict(state)


class PhiAhead(Travelling, NoLoCo):
    """NoLoCo where gamma differs from beta: phi travels during the inner steps, so theta alone blocks."""

    @torch.no_grad()
    def step(self):
        self.flying = self.flying or super().post(self.group(), {"phi": self.phi}, self.lane)
        return super().step()

    def post(self, group, vectors):
        """Send theta. phi is under way to the same group."""
        (thetas,), works = super().post(group, {"theta": self.theta})
        (phis,), more = self.flying
        self.flying = None
        return (thetas, phis), works + more


class Delayed(Travelling):
    """Before NoLoCo or a subclass among the bases of a class: its messages travel during D inner steps.

    delay: D, from 1 to inner_steps. Memory beside that of the base class: sent, as large as theta; for DiLoCo
    what it sums, too. A run that stops after m k + D steps has just merged.
    """

    def __init__(self, *args, delay, **kwargs):
        super().__init__(*args, **kwargs)
        self.delay = delay
        self.sent = self.theta.clone()

    @torch.no_grad()
    def step(self):
        lands = bool(self.flying) and (self.steps + 1 - self.delay) % self.inner_steps == 0
        if lands:
            self.land()
        return super().step() or lands

    def exchange(self):
        if self.flying:                                                 # m has changed since it left
            self.land()
        self.sent.copy_(self.theta)
        return self.depart()

    def depart(self):
        vectors = {"theta": self.sent} if self.gamma == self.beta else {"theta": self.sent, "phi": self.phi}
        return self.post(self.group(), vectors, self.lane)

    def outer_step(self, *flying):
        self.flying = flying

    def land(self):
        """Merge what arrived, as the base class's outer step does, but in one pass with what was learnt."""
        self.settle()
        live, self.theta = self.theta, self.sent                        # messages are read beside `sent`
        thetas, *phis = self.flying[0]
        self.notice(thetas)
        averages = (self.alpha, self.beta, self.gamma) == (0, 1, 1)     # phi <- mean(theta), no delta
        vectors = live, self.sent, self.phi, self.delta, *thetas, *sum(phis, [])
        for theta, sent, phi, delta, *others in zip(*(v.split(self.pieces) for v in vectors)):
            theta.sub_(sent)                                            # what was learnt meanwhile
            others = [v.to(theta.device) for v in others]
            if averages:
                torch.div(reduce(torch.add, others), len(others), out=phi)
            else:
                mean_theta = reduce(torch.add, others[:len(thetas)]) / len(thetas)
                mean_phi = reduce(torch.add, others[len(thetas):]) / len(thetas) if phis else None
                outer_update(phi, delta, mean_theta, mean_phi, self.alpha, self.beta, self.gamma)
            theta.add_(phi)
        self.theta, self.flying = live, None

    def state_dict(self):
        return dict(super().state_dict(), sent=self.flying and self.sent)

    def load_state_dict(self, state):
        super().load_state_dict(state)
        if state["sent"] is not None:
            self.sent.copy_(state["sent"])
            self.steps = self.steps // self.inner_steps * self.inner_steps - 1      # when sent was sent
            self.flying = self.depart()
            self.steps = state["steps"]


class DelayedNoLoCo(Delayed, NoLoCo):
    """--delay"""


class DelayedOneByte(Delayed, OneByteNoLoCo):
    """--delay with --wire int8"""


class DelayedDiLoCo(Delayed, DiLoCo):
    """--delay with --method diloco"""

    def depart(self):
        mean, n = self.buffer("mean", self.sent).copy_(self.sent), len(self.ranks)
        self.bytes_sent += 2 * (n - 1) * mean.nbytes // n
        return [[mean]], [dist.all_reduce(mean.div_(n), group=self.lane, async_op=True)] if n > 1 else []


class DelayedShortDiLoCo(Delayed, ShortDiLoCo):
    """--delay with --method diloco --wire bf16 or int8

    A thread sends codes twice while the model trains. `owed` stays as it was before until they are merged.
    later: the Future of the next `owed`.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.thread = ThreadPoolExecutor(1)

    def depart(self):
        total = self.sent - self.phi
        self.later = self.thread.submit(self.wire.add_up, total, self.owed)
        self.bytes_sent += self.wire.bytes(len(total))
        return [[total]], [SimpleNamespace(wait=self.later.result)]

    def land(self):
        self.owed, ((total,),) = self.later.result(), self.flying[0]
        total.div_(len(self.ranks)).add_(self.phi)          # the mean of theta
        super().land()


KINDS = {"noloco": {"fp32": DelayedNoLoCo, "int8": DelayedOneByte},
         "diloco": {"fp32": DelayedDiLoCo, **wired(DelayedShortDiLoCo)}}


def overlapping(o):
    """What train.make_outer takes instead of its own classes."""
    return dict(kinds=KINDS, delay=o.delay) if o.delay else dict(kinds={"noloco": {"fp32": PhiAhead}})
