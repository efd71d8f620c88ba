"""Messages that travel during inner steps, so that the outer step waits less or not at all.

`PhiAhead` is in the paper: phi leaves with the first inner step. `Delayed` (ours, `--delay`)
sends theta at the m-th step too, goes on training, and merges D steps later what came, keeping what
was learnt:

    at step s       sent <- theta, to the group drawn for the outer step
    at step s + D   phi, delta by N2 and N3 of what was sent and received
                    theta <- phi + (theta - sent)

D = 0 is the paper's outer step. docs/stability.md says why D should be at most m / 2, from m = 2
on.

Both are objects around an outer optimizer, and call its parts: due, begin, exchange, outer_step. A
thread waits for the messages; Gloo and torch release Python's lock meanwhile. A lost partner's
error appears where the messages are used.
"""
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from gossip.around import Around
from gossip.due import Due


class Messenger:
    """A thread that exchanges messages during the training, one exchange after the other, in the
    order in which they leave.

    This order is the same on all ranks, since it is the order of their inner steps. So the oldest
    exchange that is not done can always end: both partners have come to it, or will without waiting
    for a later one.
    process_group: one of its own, and so connections of its own: the training's other messages must
    be able to overtake these.
    """

    def __init__(self, outer):
        self.thread = ThreadPoolExecutor(1)
        self.process_group = self.stream = None
        on_gpu = outer.message_device.type == "cuda"
        if outer.theta.is_cuda:
            # Else what the thread waits for would hold up the training's kernels, too.
            self.stream = torch.cuda.Stream(outer.theta.device)
        if len(outer.ranks) > 1:
            self.process_group = dist.new_group(outer.ranks, use_local_synchronization=True)
            if on_gpu:
                # NCCL: all ranks must be in a group's first use, and with the GPU of the messages.
                dist.barrier(self.process_group, device_ids=[outer.theta.device.index])

    def send(self, exchange, *args):
        """exchange(*args, process_group) in the thread. Returns the Future of its result."""
        if self.stream is None:
            return self.thread.submit(exchange, *args, self.process_group)
        # Of the weights' GPU, which need not be the process's current one.
        written = torch.cuda.current_stream(self.stream.device).record_event()
        return self.thread.submit(self.on_stream, written, exchange, *args)

    def on_stream(self, written, exchange, *args):
        """On a GPU: when what is sent has been written, exchange on a stream of the thread's
        own."""
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(written)
            arrived = exchange(*args, self.process_group)
            self.stream.synchronize()
        return arrived


class PhiAhead(Around):
    """Around a NoLoCo whose gamma differs from beta: phi travels during the inner steps, so only
    theta blocks.
    """

    def __init__(self, outer):
        super().__init__(outer)
        self.messenger = Messenger(outer)
        self.flying = None                      # the Future of the group's phis

    @torch.no_grad()
    def step(self):
        outer = self.outer
        if self.flying is None:
            self.flying = self.messenger.send(outer.swap, "phi", outer.phi, outer.group())
        due = outer.due()
        if due:
            group = outer.begin()                                   # the one to which phi left
            thetas = outer.swap("theta", outer.theta, group)
            phis = self.flying.result()
            self.flying = None
            outer.outer_step(outer.theta, thetas, phis)
        outer.steps += 1
        return due

    def settle(self):
        """Let what is under way arrive, without using it. Gloo needs it before a process ends."""
        if self.flying:
            self.flying.result()

    def load_state_dict(self, state):
        """The partners load too, so what is under way will arrive, and leave again."""
        self.settle()
        self.flying = None
        super().load_state_dict(state)


class Delayed(Around):
    """Around any outer optimizer: its messages travel during D inner steps.

    delay: D, from 1 to inner_steps. messenger, late: fragments share one, and take turns.
    Memory in addition to the outer optimizer's: sent, as large as theta, and for DiLoCo also what
    it sums. A run that stops after m k + D steps has just merged.
    """

    def __init__(self, outer, delay, messenger=None, late=0):
        super().__init__(outer)
        if not 1 <= delay <= outer.inner_steps:
            raise ValueError(f"delay must be from 1 to inner_steps ({outer.inner_steps}), not "
                             f"{delay}")
        self.delay, self.late = delay, late
        self.messenger = messenger or Messenger(outer)
        self.sent = torch.zeros_like(outer.theta)
        self.group = ()             # to which it is under way
        self.flying = None          # the Future of what comes back

    @torch.no_grad()
    def step(self):
        """Returns whether a message departed or landed."""
        outer = self.outer
        departs = self.due()
        # A message lands before the next one departs: where D = m, or where m has changed.
        lands = self.flying is not None and (departs or self.timing.lands(outer.steps))
        if lands:
            self.land()
        if departs:
            self.sent.copy_(outer.theta)
            self.depart(outer.begin())
        outer.steps += 1
        return departs or lands

    @property
    def timing(self):
        """Made anew, since m and D may change between two steps."""
        return Due(self.inner_steps, self.delay, self.late)

    def due(self):
        return self.timing.departs(self.steps)

    def depart(self, group):
        self.group = group
        self.flying = self.messenger.send(self.outer.exchange, self.sent, group)

    def land(self):
        """The outer step of what was sent and came; then what was learnt meanwhile is added."""
        thetas, phis = self.flying.result()
        self.flying, self.group = None, ()
        theta = self.outer.theta.sub_(self.sent)                # what was learnt meanwhile
        self.outer.outer_step(self.sent, thetas, phis)          # sent becomes phi
        theta.add_(self.sent)

    def settle(self):
        """Let what is under way arrive, without using it. Gloo needs it before a process ends."""
        if self.flying:
            self.flying.result()

    def state_dict(self):
        """`sent` is a tensor even if nothing is under way: torch.distributed.checkpoint loads
        into the tensors that a new process has."""
        return dict(super().state_dict(), sent=self.sent, group=self.group)

    def load_state_dict(self, state):
        """The partners load too, so what is under way will arrive, and leave again."""
        self.settle()
        self.flying, self.group = None, ()
        super().load_state_dict(state)
        if state.get("group"):                  # without a delay there is none
            self.sent.copy_(state["sent"])
            self.depart(state["group"])
