"""Pairs that never wait (AD-PSGD, arXiv 1710.06952). Ours: no outer step of either paper.

NoLoCo's replicas wait for no all-reduce, but each waits for its partner. Here x_i is theta_i with
all that came for it. After m inner steps, replica i sends a copy of x_i to a random other one, j,
and goes on training. j answers at once with a copy of its own x_j as it is. Of these two copies
both keep

    x_i <- x_i + (x_j - x_i) / 2 ;   x_j <- x_j + (x_i - x_j) / 2

theta_i gets this after its next inner step. So each pair keeps its mean, whatever both have learnt
meanwhile, and nobody needs an order, a number or a partner that is ready.

Nothing deadlocks: each replica has a thread for every other one, which does nothing but receive
that one's calls and answer them. A call waits for its listening thread, and this thread
waits only for messages of the caller, which is receiving. A replica has at most one call under way
to each other one. So no replica waits for a third, and no training waits for anybody.

One thread that receives from any rank would need fewer buffers, but Gloo gives it the call of a
replica that died while it called again and again, and no other one.

Which replica calls which, and when, depends on the machines, so two runs do not agree to the bit.
"""
import random
import threading
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist

from noloco import flatten, need_whole, own_rank, parameter_list, places

CALL, END = 1.0, 0.0
EVER = timedelta(days=365)      # a replica may be silent for as long as it likes


class Asynchronous:
    """For any model and optimizer: call `step()` after every step of the inner optimizer, and
    `settle()` at the end.

    First call init_process_group, and load, tie and move the model. All replicas make this at once.
    Raises ValueError if this process would train alone, and if m is no whole number from 1 on.
    `step` raises RuntimeError if parameters were moved or frozen since.

    params: model.parameters(), equal on all replicas, or a vector from noloco.flatten.
    ranks: the global ranks of this model's replicas; None: all. inner_steps: m, between a replica's
    own calls. Among equally fast ones it is called as often, so it averages twice in m steps.
    A call and its answer are a copy of x each, in fp32 over Gloo. From a GPU the copy waits for
    the work that stands before it on the default stream.

    If a process ends, the others warn, and what was under way may be lost. If a host is cut off,
    nobody notices, and `settle` waits for it.

    Memory in addition to the model's, on the host: what came, as large as theta, and for each call
    under way two such vectors.
    """

    def __init__(self, params, ranks=None, *, inner_steps=50, seed=0):
        self.rank, self.ranks = own_rank(ranks)
        need_whole("inner_steps", inner_steps, 1)
        self.inner_steps = inner_steps
        self.params = [] if torch.is_tensor(params) else parameter_list(params)
        self.theta = flatten(self.params) if self.params else params
        self.places = places(self.params, self.theta)
        self.steps = 0                                  # inner steps so far
        self.bytes_sent = 0
        self.draws = random.Random(f"calls {seed} {self.rank}")
        self.lock = threading.RLock()                   # for all below, which threads write
        self.mail = torch.zeros_like(self.theta, device="cpu")      # what came, not added yet
        self.came = False                               # whether there is any
        self.others = [r for r in self.ranks if r != self.rank]     # that are not lost
        self.calls = {}                                 # {rank: the thread of the call under way}
        self.listeners = []
        if self.others:
            self.asking = self.new_group()
            self.answering = self.new_group()
            self.listeners = [begin(self.listen, r) for r in self.others]

    def new_group(self):
        """Connections of their own: answers must be able to overtake calls."""
        return dist.new_group(self.ranks, EVER, "gloo", use_local_synchronization=True)

    @torch.no_grad()
    def step(self):
        """Add what came; after every m-th inner step call a replica. Returns whether this did."""
        if places(self.params, self.theta) != self.places:
            raise RuntimeError("parameters were moved (.to), frozen or unfrozen: do that first, "
                               "then make Asynchronous")
        self.steps += 1
        self.read_mail()
        due = self.steps % self.inner_steps == 0
        if due:
            self.make_call()
        return due

    def read_mail(self):
        with self.lock:
            if self.came:
                self.theta.add_(self.mail.to(self.theta.device))
                self.mail.zero_()
                self.came = False

    def make_call(self):
        """To one of those that have answered all earlier calls; to nobody where there is none."""
        with self.lock:
            ready = [r for r in self.others if r not in self.calls]
            if ready:
                r = self.draws.choice(ready)
                self.calls[r] = begin(self.call, r, self.copy())

    def copy(self):
        """x. Training goes on while this copies. What it has of a step that is being made is kept,
        for both replicas use the same copies."""
        with self.lock:
            return self.theta.to("cpu", copy=True).add_(self.mail)

    def call(self, r, own):
        """In a thread. own: the copy of theta that r gets."""
        theirs = torch.empty_like(own)
        try:
            dist.send(torch.tensor([CALL]), r, self.asking)
            self.send(own, r, self.asking)
            dist.recv(theirs, r, self.answering)
            self.put(theirs, own)
        except RuntimeError as error:
            self.lose(r, error)
        with self.lock:
            self.calls.pop(r)

    def listen(self, r):
        """In a thread: answer r's calls, until it has ended or is lost."""
        head = torch.empty(1)
        try:
            dist.recv(head, r, self.asking)
            while head.item() == CALL:
                self.answer(r)
                dist.recv(head, r, self.asking)
        except RuntimeError as error:
            self.lose(r, error)

    def answer(self, r):
        theirs = torch.empty_like(self.mail)
        dist.recv(theirs, r, self.asking)
        with self.lock:                 # the next answer has this one's half already
            own = self.copy()
            self.put(theirs, own)
        self.send(own, r, self.answering)

    def send(self, vector, r, process_group):
        dist.send(vector, r, process_group)
        with self.lock:
            self.bytes_sent += vector.nbytes

    def put(self, theirs, own):
        """Into the mail. theirs is overwritten."""
        half = theirs.sub_(own).div_(2)
        with self.lock:
            self.mail.add_(half)
            self.came = True

    def lose(self, r, error):
        """Call r no more. Its listener and a call may both come here."""
        with self.lock:
            if r in self.others:
                self.others.remove(r)
                warnings.warn(f"rank {self.rank} goes on without rank {r}, which is lost: "
                              f"{str(error).splitlines()[0]}")

    def settle(self):
        """Call before the process ends, on all replicas. This one goes on answering until all
        others have ended, then it adds what came: now the mean of all is what training made it.
        From here on it trains alone."""
        with self.lock:
            calls = list(self.calls.values())
            others = list(self.others)
        for call in calls:
            call.join()
        for r in others:
            try:
                dist.send(torch.tensor([END]), r, self.asking)
            except RuntimeError as error:
                self.lose(r, error)
        for listener in self.listeners:
            listener.join()
        self.others = []
        self.read_mail()

    def state_dict(self):
        """theta is in the model. Of what is under way while replicas save, one may keep its half
        only."""
        with self.lock:
            return {"mail": self.mail.clone(), "steps": self.steps, "bytes_sent": self.bytes_sent}

    def load_state_dict(self, state):
        """Before any replica's first step."""
        with self.lock:
            self.mail.copy_(state["mail"])
            self.came = True
            self.steps, self.bytes_sent = state["steps"], state["bytes_sent"]


def begin(function, *args):
    """In a thread that does not keep the process from ending."""
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    return thread
