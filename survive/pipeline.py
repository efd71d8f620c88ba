"""A pipeline that outlives its ranks. A dead or silent peer is no error: what it should have sent is lost,
and so is what could only have come from that; the rest goes on, and later iterations go round it.

Each pair of ranks has a Gloo group of its own, because a wait that is broken off closes all connections of
its group; and a thread that waits for its messages, because who waits for one that was half on its way when
the connection broke is never told by Gloo (2.13). Who cannot deliver sends a message that says so, so every
live rank still makes all its planned sends and receives. Who is dead in an iteration is written down by the
first rank to begin it (compare_set); nobody waits to agree.
"""
import contextlib
import math
import queue
import sys
import threading
import time
from concurrent.futures import Future, InvalidStateError
from datetime import timedelta

import torch
import torch.distributed as dist

from plumbing.processes import DAY, gloo_devices, gloo_group
from skippipe import BACKWARD, kind
from survive.meeting import Gone, notice_silence
from train import Pipeline, tag

# A NaN that no arithmetic makes says "lost": a real NaN stays visible.
LOST = {torch.float32: (torch.int32, 0x7FC0DEAD), torch.bfloat16: (torch.int16, 0x7FEB)}


def lost(shape, dtype):
    """The message that says that there is none."""
    message, (integer, bits) = torch.zeros(shape, dtype=dtype), LOST[dtype]
    message.view(-1)[:1].view(integer).fill_(bits)
    return message


def is_lost(message):
    integer, bits = LOST[message.dtype]
    return int(message.view(-1)[:1].view(integer)) == bits


class SurvivingPipeline(Pipeline):
    """job.timeout: seconds; a peer that says nothing for a third of it is given up. lost: microbatches that
    never came home. dead: those known here; agreed: those that all leave out in the present iteration."""

    def connect(self, pairs):
        job = self.job
        self.step = 0
        self.dead, self.agreed = set(), set()
        self.groups, self.works = {}, {}
        for a, b in pairs:                                  # in one order for all: nobody waits in a circle
            if self.rank in (a, b):
                peer = a + b - self.rank
                self.groups[peer] = gloo_group(job.store, f"pair/{a}/{b}", int(self.rank == b), 2, DAY)
                self.works[peer] = queue.SimpleQueue()
                threading.Thread(target=await_each, args=[self.works[peer]], daemon=True).start()
        self.nothing = lost(self.message_shape, self.dtype)
        self.waiting = self.arrival = None                  # the peer that this rank waits for, and for what
        self.broken = set()                                 # peers to whom the connection is
        self.since = self.grace = math.inf                  # at work until then; the first run may compile
        self.stopped = threading.Event()
        self.watcher = threading.Thread(target=self.watch, daemon=True)
        if self.groups:
            self.watcher.start()

    # ---- an iteration

    def begin(self, step, idle=False):
        """Returns whether this iteration's dead are others than the last one's. Raises Gone when rank 0 is
        among them.

        An idle rank, which has no task, follows the others: if it ran ahead, iterations would begin before
        a death in those before them is known.
        """
        self.step, before = step, self.agreed
        if self.grace < math.inf:
            self.pause(0.0)
        if self.groups:
            if idle:
                with contextlib.suppress(dist.DistStoreError):
                    self.job.store.wait([f"dead/{step}"], timedelta(seconds=self.job.timeout))
            self.agreed = self.agree(step)
        if self.rank in self.agreed:
            self.leave()
        if 0 in self.agreed:
            raise Gone("rank 0 is gone")
        return self.agreed != before

    def run(self, paths, batches, train=True, order=None):
        found = super().run(paths, batches, train, order)
        self.pause(self.job.timeout * (1 if train else 10))     # an outer step; a checkpoint, the log
        return found

    def take(self, u, hop):
        self.since = time.monotonic() + self.grace
        x = super().take(u, hop)
        return None if x is None or is_lost(x) else x

    def task(self, u, hop, x):
        if x is not None or hop == 0:
            return super().task(u, hop, x)
        forward = 2 * len(self.paths[u]) - hop              # nothing came, so there is nothing to pass on
        if kind(self.paths[u], hop) == BACKWARD:
            self.saved.pop((u, forward), None)
            self.lost += forward == 0
        return None

    # ---- the wire

    def send(self, tensor, to, u, hop):
        tensor = self.nothing if tensor is None else tensor.to(self.message_device).contiguous()
        self.count(tensor, to, u, hop)
        place = int(to > self.rank)
        return self.post(to, lambda group: group.send([tensor], place, tag(u, hop))), tensor, to

    def receive(self, source, u, hop):
        buffer = torch.empty(self.message_shape, dtype=self.dtype)
        place = int(source > self.rank)
        return self.post(source, lambda group: group.recv([buffer], place, tag(u, hop))), buffer, source

    def post(self, peer, message):
        """None when the peer is dead."""
        if peer in self.dead:
            return None
        try:
            return message(self.groups[peer])
        except RuntimeError as error:
            return self.bury(peer, error)

    def wait(self, work, peer):
        """False when the message is lost with its peer."""
        if work is None:
            return False
        try:
            if peer in self.broken:             # its thread may be held; what could still come has come
                return work.wait(timedelta(milliseconds=1))
            self.arrival = arrival = Future()
            self.waiting = peer                 # in this order: `probe` asks in the other
            self.works[peer].put((work, arrival))
            return arrival.result()
        except RuntimeError as error:
            self.broken.add(peer)
            return bool(self.bury(peer, error))
        finally:
            self.waiting = None
            self.since = time.monotonic() + self.grace

    # ---- who is dead

    def bury(self, peer, error):
        """Declare a peer dead, from the first iteration on that nobody has begun."""
        if peer in self.dead:
            return
        if self.job.store.check([f"dropped/{self.rank}"]):
            self.leave()
        self.dead.add(peer)
        error = " ".join(str(error).split())[:100]
        self.job.tell(dict(event="lost", step=self.step, rank=self.rank, peer=peer, error=error))
        step = self.step + 1
        while not self.dead <= self.agree(step):
            step += 1

    def agree(self, step):
        """Who is dead in iteration `step`: what the first to ask wrote down."""
        mine = " ".join(map(str, sorted(self.dead))) or "-"         # a store takes no empty values
        text = self.job.store.compare_set(f"dead/{step}", "", mine).decode()
        agreed = {int(r) for r in text.split() if r != "-"}
        self.dead |= agreed
        return agreed

    def leave(self):
        """This rank was declared dead."""
        line = f"rank {self.rank} had been silent for so long that the others declared it dead"
        if self.rank == 0:
            raise Gone(line)
        print(f"{line}: it leaves at step {self.step}", file=sys.stderr, flush=True)
        sys.exit(0)

    # ---- the watch

    def watch(self):
        """A thread: say every now and then that this rank is alive, which it is while it waits or its task
        is not overdue; and break off waiting for a peer that has not said so for a third of the timeout, or
        to whom the connection broke. (A third: the other replicas then still wait in the outer step for those
        who were held up.)"""
        store = self.job.store.clone()                      # of its own: a client that waits serves no other
        notice_silence(store, self.job.timeout)
        beat, seen = 0, {}
        while not self.stopped.wait(self.job.timeout / 12):
            now, peer = time.monotonic(), self.waiting
            try:
                if peer is not None or now - self.since < self.job.timeout / 3:
                    beat += 1
                    store.set(f"beat/{self.rank}", str(beat))
                silent = peer is not None and self.is_silent(store, peer, seen, now)
            except RuntimeError:                            # the store is lost: so is everything
                silent = peer is not None
            if silent and self.waiting == peer:
                self.drop(store, peer)
            if peer is not None:
                self.probe(peer)

    def is_silent(self, store, peer, seen, now):
        last = store.get(f"beat/{peer}") if store.check([f"beat/{peer}"]) else b""
        if seen.get(peer, (None, 0.0))[0] != last:
            seen[peer] = last, now
        return now - seen[peer][1] > self.job.timeout / 3

    def drop(self, store, peer):
        """Close the connections, by a wait on each that times out at once."""
        with contextlib.suppress(RuntimeError):             # said before the connection closes: when it wakes
            store.set(f"dropped/{peer}", str(self.rank))    # the peer must not take us for dead
        for number in range(len(gloo_devices())):
            with contextlib.suppress(RuntimeError):
                self.ask(peer, number).wait(timedelta(milliseconds=1))

    def probe(self, peer):
        """Break off the wait for a message that was half on its way when the connection broke: then nothing
        can be posted any more."""
        arrival = self.arrival
        try:
            for number in range(len(gloo_devices())):
                self.ask(peer, number)
        except RuntimeError as error:
            if self.waiting == peer:
                settle(arrival, error)

    def ask(self, peer, number):
        """A receive of what nobody sends, over one of the connections (one an interface: Gloo takes that of
        the tag modulo their number). Gloo forgets it when nobody holds it."""
        return self.groups[peer].recv([torch.empty(1)], int(peer > self.rank), number)

    def pause(self, seconds):
        """What comes now may take so much longer than a task."""
        self.since = time.monotonic() + seconds
        self.grace = seconds

    def stop(self):
        self.stopped.set()
        for works in self.works.values():
            works.put(None)
        if self.groups:
            self.watcher.join()


def await_each(works):
    """A thread: wait for a peer's messages, (work, Future) by (work, Future). For one that never comes it
    waits for a day."""
    for work, arrival in iter(works.get, None):
        try:
            work.wait()
            settle(arrival)
        except RuntimeError as error:
            settle(arrival, error)
        del work, arrival                       # they hold the message


def settle(arrival, error=None):
    """The first to say what became of a message is right."""
    with contextlib.suppress(InvalidStateError):
        if error:
            arrival.set_exception(error)
        else:
            arrival.set_result(True)
