"""A pipeline that outlives its ranks: a dead peer costs the microbatches on it, and later paths avoid it.

What a dead or silent peer should have sent is lost, and so is everything computed from it alone. A rank with
nothing to deliver sends a LOST marker. So every live rank still makes all its planned sends and receives.

The dead of an iteration: the first rank to begin iteration t writes dead/t to the store (compare_set). Every
other rank adopts that list, so no rank waits for agreement.

Each pair of ranks has a Gloo group of its own, since a wait that is broken off closes all connections of its
group. Each pair also has a thread that waits for its messages. When a connection breaks in the middle of a
message, Gloo (2.13) never ends the wait for it. The main thread waits for that thread instead, and `probe`
can end this wait.
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

from plumbing.processes import DAY, gloo_devices, gloo_group, one_line
from skippipe import BACKWARD, kind
from survive.meeting import Gone, notice_silence
from train import Pipeline, tag

# The first element of a LOST marker is a NaN that arithmetic never makes, so a real NaN stays visible.
LOST = {torch.float32: (torch.int32, 0x7FC0DEAD), torch.bfloat16: (torch.int16, 0x7FEB)}


def lost_marker(shape, dtype):
    message, (integer, bits) = torch.zeros(shape, dtype=dtype), LOST[dtype]
    message.view(-1)[:1].view(integer).fill_(bits)
    return message


def is_lost(message):
    integer, bits = LOST[message.dtype]
    return int(message.view(-1)[:1].view(integer)) == bits


class SurvivingPipeline(Pipeline):
    """As Pipeline; job is a SurvivingJob. A peer without a beat for a third of job.timeout seconds is dead.

    lost: microbatches of this origin that never came home.
    dead: the peers that this rank knows to be dead. job.excluded: those that every rank leaves out of the
    present iteration.
    """

    def connect(self, pairs):
        job = self.job
        self.step = 0
        self.dead = set()
        self.groups, self.queues = {}, {}                   # of each peer
        for a, b in pairs:                                  # in one order for all: no deadlock
            if self.rank in (a, b):
                peer = a + b - self.rank
                self.groups[peer] = gloo_group(job.store, f"pair/{a}/{b}", int(self.rank == b), 2, DAY)
                self.queues[peer] = queue.SimpleQueue()
                threading.Thread(target=wait_for_each, args=[self.queues[peer]], daemon=True).start()
        self.marker = lost_marker(self.message_shape, self.dtype)
        self.waiting = self.arrival = None                  # a peer; the Future of its message
        self.broken = set()                                 # peers whose connection broke during a wait
        self.busy_until = self.grace = math.inf             # see `allow`; the first run may compile
        self.stopped = threading.Event()
        self.watcher = threading.Thread(target=self.watch, daemon=True)
        if self.groups:
            self.watcher.start()

    # ---- an iteration

    def begin(self, step, idle=False):
        """Adopt the dead of iteration `step`. Returns whether there are more than in the iteration before.

        idle: this rank has no task. It lets another rank begin first. If it ran ahead, iterations would
        begin before a death in earlier ones is known. Raises Gone when rank 0 is dead.
        """
        self.step, before = step, len(self.job.excluded)
        if self.grace < math.inf:
            self.allow(0.0)
        if self.groups:
            if idle:
                with contextlib.suppress(dist.DistStoreError):
                    self.job.store.wait([f"dead/{step}"], timedelta(seconds=self.job.timeout))
            self.job.excluded.update(self.excluded_in(step))
        if self.rank in self.job.excluded:
            self.leave()
        if 0 in self.job.excluded:
            raise Gone("rank 0 is gone")
        return len(self.job.excluded) > before

    def run(self, paths, batches, train=True, order=None):
        found = super().run(paths, batches, train, order)
        self.allow(self.job.timeout * (1 if train else 10))     # an outer step; a checkpoint and the log
        return found

    def take(self, u, hop):
        self.busy_until = time.monotonic() + self.grace
        x = super().take(u, hop)
        return None if x is None or is_lost(x) else x

    def task(self, u, hop, x):
        """As Pipeline.task. Without an input (x is None) the task is skipped and passes on None."""
        if x is not None or hop == 0:
            return super().task(u, hop, x)
        forward = 2 * len(self.paths[u]) - hop
        if kind(self.paths[u], hop) == BACKWARD:
            self.saved.pop((u, forward), None)
            self.lost += forward == 0
        return None

    # ---- messages

    def send(self, tensor, to, u, hop):
        tensor = self.marker if tensor is None else tensor.to(self.message_device).contiguous()
        self.count(tensor, to, u, hop)
        place = int(to > self.rank)
        return self.attempt(to, lambda group: group.send([tensor], place, tag(u, hop))), tensor, to

    def receive(self, source, u, hop):
        buffer = torch.empty(self.message_shape, dtype=self.dtype)
        place = int(source > self.rank)
        return self.attempt(source, lambda group: group.recv([buffer], place, tag(u, hop))), buffer, source

    def attempt(self, peer, message):
        """The work of a message to or from a peer; None when the peer is dead."""
        if peer in self.dead:
            return None
        try:
            return message(self.groups[peer])
        except RuntimeError as error:
            self.declare_dead(peer, error)

    def wait(self, work, peer):
        """Whether the message arrived. False: it is lost with its peer."""
        if work is None:
            return False
        try:
            if peer in self.broken:             # the peer's thread may be stuck; no more can arrive
                return work.wait(timedelta(milliseconds=1))
            self.arrival = arrival = Future()
            self.waiting = peer                 # after `arrival`: the watch reads `waiting` first
            self.queues[peer].put((work, arrival))
            return arrival.result()
        except RuntimeError as error:
            self.broken.add(peer)
            self.declare_dead(peer, error)
            return False
        finally:
            self.waiting = None
            self.busy_until = time.monotonic() + self.grace

    # ---- the dead

    def declare_dead(self, peer, error):
        """Every rank leaves this peer out, from the first iteration on that no rank has begun."""
        if peer in self.dead:
            return
        if self.job.store.check([f"dropped/{self.rank}"]):      # a peer has declared this rank dead
            self.leave()
        self.dead.add(peer)
        error = one_line(error)[:100]
        self.job.tell(dict(event="lost", step=self.step, rank=self.rank, peer=peer, error=error))
        step = self.step + 1
        while not self.dead <= self.excluded_in(step):
            step += 1

    def excluded_in(self, step):
        """The dead of iteration `step`: the first rank to ask writes its own list, which counts for all."""
        mine = " ".join(map(str, sorted(self.dead))) or "-"         # the store takes no empty values
        text = self.job.store.compare_set(f"dead/{step}", "", mine).decode()
        excluded = {int(r) for r in text.split() if r != "-"}
        self.dead |= excluded
        return excluded

    def leave(self):
        """This rank was declared dead, so its process ends."""
        line = f"rank {self.rank} was silent for so long that other ranks declared it dead"
        if self.rank == 0:
            raise Gone(line)
        print(f"{line}: it leaves at step {self.step}", file=sys.stderr, flush=True)
        sys.exit(0)

    # ---- the watch

    def watch(self):
        """A thread. It sends this rank's beats, and drops a silent peer for which this rank waits.

        This rank beats while it waits for a peer or its task is not overdue. A peer is silent without a
        beat for a third of the timeout. (A third, because other replicas of the stage then still wait in
        their outer step for the ranks that were held up.)
        """
        store = self.job.store.clone()                      # a store client that waits serves no other thread
        notice_silence(store, self.job.timeout)
        beat, seen = 0, {}
        while not self.stopped.wait(self.job.timeout / 12):
            now, peer = time.monotonic(), self.waiting
            try:
                if peer is not None or now - self.busy_until < self.job.timeout / 3:
                    beat += 1
                    store.set(f"beat/{self.rank}", str(beat))
                silent = peer is not None and self.is_silent(store, peer, seen, now)
            except RuntimeError:                            # the store is lost, so the wait must end
                silent = peer is not None
            if silent and self.waiting == peer:
                self.drop(store, peer)
            if peer is not None:
                self.probe(peer)

    def is_silent(self, store, peer, seen, now):
        """seen: {peer: (its last beat, when that was first read)}"""
        last = store.get(f"beat/{peer}") if store.check([f"beat/{peer}"]) else b""
        if seen.get(peer, (None, 0.0))[0] != last:
            seen[peer] = last, now
        return now - seen[peer][1] > self.job.timeout / 3

    def drop(self, store, peer):
        """Close all connections to a peer for ever: the pair cannot connect again. Retry before this.

        A wait that times out at once closes a connection.
        """
        with contextlib.suppress(RuntimeError):             # written first: a peer that wakes must find the
            store.set(f"dropped/{peer}", str(self.rank))    # key, and not declare this rank dead
        for number in range(len(gloo_devices())):
            with contextlib.suppress(RuntimeError):
                self.spare_receive(peer, number).wait(timedelta(milliseconds=1))

    def probe(self, peer):
        """End the wait for a message whose connection broke in its middle: then no receive can be posted."""
        arrival = self.arrival
        try:
            for number in range(len(gloo_devices())):
                self.spare_receive(peer, number)
        except RuntimeError as error:
            if self.waiting == peer:
                resolve(arrival, error)

    def spare_receive(self, peer, number):
        """Post a receive that no send matches, over one of the connections to a peer.

        There is one connection for each interface. Gloo takes the one of the tag modulo their number. It
        forgets a receive whose work is dropped.
        """
        return self.groups[peer].recv([torch.empty(1)], int(peer > self.rank), number)

    def allow(self, seconds):
        """This rank's next tasks may take `seconds` longer than a third of the timeout."""
        self.busy_until = time.monotonic() + seconds
        self.grace = seconds

    def stop(self):
        self.stopped.set()
        for works in self.queues.values():
            works.put(None)
        if self.groups:
            self.watcher.join()


def wait_for_each(works):
    """A thread: wait for one peer's messages in order, each a (work, Future). A wait may never end."""
    for work, arrival in iter(works.get, None):
        try:
            work.wait()
            resolve(arrival)
        except RuntimeError as error:
            resolve(arrival, error)
        del work, arrival                       # they hold the message


def resolve(arrival, error=None):
    """Say what became of a message. The first call counts: `probe` may have been faster."""
    with contextlib.suppress(InvalidStateError):
        if error:
            arrival.set_exception(error)
        else:
            arrival.set_result(True)
