"""Messages that travel during inner steps, so that the outer step waits less or not at all.

`PhiAhead` is the paper's: phi leaves with the first of the inner steps. `Delayed` (ours, `--delay`)
sends theta at the m-th step too, goes on training, and merges D steps later what came, keeping what
was learnt:

    at step s       sent <- theta, to the group drawn for the outer step
    at step s + D   phi, delta by N2 and N3 of what was sent and received
                    theta <- phi + (theta - sent)

D = 0 is the paper's outer step. docs/stability.md says why D should be at most m / 2, from m = 2
on.

Both are objects around an outer optimizer, and call its parts: due, group, exchange, update. A
thread waits for the messages; Gloo and torch release Python's lock meanwhile. A lost partner's
error appears where the messages are used.
"""
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from noloco import Arrived, NoLoCo


class Messenger:
    """A thread that exchanges messages beside the training, one exchange after the other, in the
    order in which they leave.

    This order is the same on all ranks, since it is that of their inner steps. So the oldest
    exchange that is not done can always end: both partners have come to it, or will without waiting
    for a later one.
    lane: a process group, and so connections, of its own: the training's other messages must be
    able to overtake these.
    """

    def __init__(self, outer):
        self.thread = ThreadPoolExecutor(1)
        self.lane = self.stream = None
        on_gpu = outer.message_device.type == "cuda"
        if outer.theta.is_cuda:
            # Else what the thread waits for would hold up the training's kernels, too.
            self.stream = torch.cuda.Stream(outer.theta.device)
        if len(outer.ranks) > 1:
            self.lane = dist.new_group(outer.ranks, use_local_synchronization=True)
            if on_gpu:
                # NCCL: all ranks must be in a group's first use, and with the GPU of the messages.
                dist.barrier(self.lane, device_ids=[outer.theta.device.index])

    def send(self, exchange, *args):
        """exchange(*args, lane) in the thread. Returns the Future of its result."""
        if self.stream is None:
            return self.thread.submit(exchange, *args, self.lane)
        # Of the weights' GPU, which need not be the process's current one.
        written = torch.cuda.current_stream(self.stream.device).record_event()
        return self.thread.submit(self.on_stream, written, exchange, *args)

    def on_stream(self, written, exchange, *args):
        """On a GPU: when what is sent has been written, exchange on a stream of the thread's
        own."""
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(written)
            arrived = exchange(*args, self.lane)
            self.stream.synchronize()
        return arrived


class Travelling:
    """Around an outer optimizer, some of whose messages travel during inner steps. Subclasses have
    `step`.

    flying: the Future of what is under way, or None. messenger: several may share one (fragments).
    """

    def __init__(self, outer, messenger=None):
        self.outer = outer
        self.messenger = messenger or Messenger(outer)
        self.flying = None

    @property
    def steps(self):
        return self.outer.steps

    @steps.setter
    def steps(self, steps):
        self.outer.steps = steps

    @property
    def bytes_sent(self):
        return self.outer.bytes_sent

    def settle(self):
        """Let what is under way arrive, without using it. Gloo needs it before a process ends."""
        if self.flying:
            self.flying.result()

    def state_dict(self):
        return self.outer.state_dict()

    def load_state_dict(self, state):
        """The partners load too, so what is under way will arrive, and leave again."""
        self.settle()
        self.flying = None
        self.outer.load_state_dict(state)


class PhiAhead(Travelling):
    """Around a NoLoCo where gamma differs from beta: phi travels during the inner steps, so theta
    alone blocks.
    """

    @torch.no_grad()
    def step(self):
        outer = self.outer
        outer.check()
        if self.flying is None:
            group = outer.group(outer.current)
            self.flying = self.messenger.send(outer.swap, {"phi": outer.phi}, group)
        due = outer.due()
        if due:
            group = outer.group(outer.current)          # the one to which phi left
            outer.bytes_sent += outer.cost(group)
            thetas = outer.swap({"theta": outer.theta}, group)["theta"]
            phis = self.flying.result()["phi"]
            self.flying = None
            outer.outer_step(outer.theta, Arrived(thetas, phis, len(group)))
        outer.steps += 1
        return due


class Delayed(Travelling):
    """Around any outer optimizer: its messages travel during D inner steps.

    delay: D, from 1 to inner_steps. Memory beside that of the outer optimizer: sent, as large as
    theta; for DiLoCo what it sums, too. A run that stops after m k + D steps has just merged.
    Raises ValueError.
    """

    def __init__(self, outer, delay, messenger=None):
        if not isinstance(delay, int) or not 1 <= delay <= outer.inner_steps:
            raise ValueError(f"delay must be from 1 to inner_steps ({outer.inner_steps}), not "
                             f"{delay}")
        super().__init__(outer, messenger)
        self.delay = delay
        self.sent = torch.zeros_like(outer.theta)
        self.message = torch.empty_like(self.sent) if outer.spoils else self.sent

    @torch.no_grad()
    def step(self):
        """Returns whether a message departed or landed."""
        outer = self.outer
        outer.check()
        departs = outer.due()
        arrives = (outer.steps + 1 - outer.offset - self.delay) % outer.inner_steps == 0
        # A message lands before the next one departs: where D = m, or where m has changed.
        lands = self.flying is not None and (arrives or departs)
        if lands:
            self.land()
        if departs:
            self.sent.copy_(outer.theta)
            self.depart(outer.current)
        outer.steps += 1
        return departs or lands

    def depart(self, number):
        """Send what `sent` holds to the group of outer step `number`."""
        outer = self.outer
        if self.message is not self.sent:
            self.message.copy_(self.sent)
        group = outer.group(number)
        outer.bytes_sent += outer.cost(group)
        self.flying = self.messenger.send(outer.exchange, self.message, group)

    def land(self):
        """Merge what arrived as the outer step does, but in one pass with what was learnt
        meanwhile."""
        outer = self.outer
        arrived = self.flying.result()
        self.flying = None
        outer.before_merge(arrived)
        averages = averages_plainly(outer)
        for number, piece in enumerate(outer.pieces):
            sent = self.sent[piece]
            theta = outer.theta[piece].sub_(sent)                       # what was learnt meanwhile
            if averages:
                total = outer.total(arrived.thetas, number, sent)
                torch.div(total, arrived.n, out=outer.phi[piece])
            else:
                outer.update(number, self.sent, arrived)                # N1 to N3's phi
            theta.add_(outer.phi[piece])

    def state_dict(self):
        """`sent` is a tensor also where nothing is under way: torch.distributed.checkpoint loads
        into the tensors that a new process has."""
        return dict(super().state_dict(), sent=self.sent, flying=self.flying is not None)

    def load_state_dict(self, state):
        super().load_state_dict(state)
        sent = state.get("sent")                        # without a delay there is none
        if state.get("flying", sent is not None):       # older states: None told that nothing was
            self.sent.copy_(sent)
            self.depart(self.outer.current - 1)         # the outer step in which it had left


def averages_plainly(outer):
    """Whether the outer step is a plain average: phi <- mean(theta), in which delta has no part.

    Not for an outer rule of somebody's own.
    """
    own_rule = type(outer).update is not NoLoCo.update
    return not own_rule and (outer.alpha, outer.beta, outer.gamma) == (0, 1, 1)
