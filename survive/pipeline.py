"""A pipeline that outlives its ranks: a dead peer costs the microbatches on it, and later paths
avoid it.

What a dead or silent peer should have sent is lost, and so is everything computed from it alone. A
rank with nothing to deliver sends a LOST marker. So every live rank still makes all its planned
sends and receives.

Who takes part in an iteration: the first rank to begin iteration t writes every rank's life to
lives/t in the store (compare_set). All other ranks adopt that list, so no rank waits for agreement.
A life is a number that only grows. It starts at 0; an even life is alive, an odd one dead. A peer
that declares a rank dead adds 1. A rank that joins adds 1 again, and writes this into the first
iteration that no rank has begun. So a list with the larger number of each rank is always the newer
one.

Each pair of ranks has a Gloo group of its own, since a wait that is broken off closes all
connections of its group. Each pair also has a thread that waits for its messages. When a connection
breaks in the middle of a message, Gloo (2.13) never ends the wait for it. The main thread waits for
that thread instead, and `probe` can end this wait.
"""
import contextlib
import queue
import sys
import threading
import time
from concurrent.futures import Future, InvalidStateError
from datetime import timedelta

import torch
import torch.distributed as dist

from skippipe import BACKWARD, kind
from survive.meeting import Left, Silent, gloo_group, is_loss
from train import Pipeline, gloo_interface, one_line, tag

DAY = 86400.0       # seconds: no timeout in practice

# The first element of a LOST marker is a NaN that arithmetic never makes, so a real NaN stays
# visible.
LOST = {torch.float32: (torch.int32, 0x7FC0DEAD), torch.bfloat16: (torch.int16, 0x7FEB)}


def lost_marker(shape, dtype):
    integer, bits = LOST[dtype]
    message = torch.zeros(shape, dtype=dtype)
    message.view(-1)[:1].view(integer).fill_(bits)
    return message


def is_lost(message):
    integer, bits = LOST[message.dtype]
    return int(message.view(-1)[:1].view(integer)) == bits


def is_dead(life):
    """Whether a rank with this life, the number of its deaths and returns, is dead."""
    return life % 2 == 1


class SurvivingPipeline(Pipeline):
    """As Pipeline; job is a SurvivingJob. A peer is dead without a beat for a third of its timeout.

    lost: microbatches of this origin that never came home.
    lives: every rank's life in the present iteration, on which all ranks agree.
    newest: the newest life of each rank that is known here.
    job.dead: the ranks whose life is odd in the present iteration: every rank leaves them out.
    """

    def connect(self, pairs):
        job = self.job
        # The ranks of other stages that a path may join with this one.
        self.peers = [a + b - self.rank for a, b in pairs if self.rank in (a, b)]
        self.step = -1
        self.newest = [0 if r in job.members else 1 for r in range(job.world)]
        self.lives = self.newest.copy()
        self.lost = 0
        self.groups = {}                    # of each peer: the Future of a Gloo group
        self.queues = {}                    # of each peer: what its thread is to do
        self.marker = lost_marker(self.message_shape, self.dtype)
        # (a peer, the Future of its message or its group) during a wait. The watch reads it, so the
        # two are one value: read one after the other, they could be of two waits.
        self.waiting = None
        self.broken = set()                 # peers whose connection broke during a wait
        self.busy_until = self.grace = torch.inf        # see `allow`; the first run may compile
        self.stopped = threading.Event()
        self.watcher = threading.Thread(target=self.watch, daemon=True)
        if not self.peers or job.asks:
            return
        for peer in self.living(self.peers):
            self.link(peer)
        if job.latest < 0:          # all begin together. After a takeover a peer may die meanwhile
            for group in self.groups.values():
                group.result()
        self.watcher.start()

    def link(self, peer):
        """Start the thread that connects to a peer's present life, then waits for its messages."""
        a, b = sorted((self.rank, peer))
        key = f"pair/{a}/{b}/{self.lives[a]}/{self.lives[b]}"

        def connect():
            # The clone connects to the store, which may be stopped: that holds this thread only.
            return gloo_group(self.job.store.clone(), key, int(self.rank == b), 2, DAY)

        if peer in self.queues:
            self.queues[peer].put(None)
        self.broken.discard(peer)
        self.groups[peer], self.queues[peer] = Future(), queue.SimpleQueue()
        self.queues[peer].put((connect, self.groups[peer]))
        threading.Thread(target=serve_pair, args=[self.queues[peer]], daemon=True).start()

    # ---- an iteration

    def begin(self, step, idle=False):
        """Begin iteration `step`. Returns whether other ranks are dead in it than before.

        idle: this rank has no task. It lets another rank begin first. If it ran ahead, iterations
        would begin before a death in earlier ones is known. Raises DistError when the first rank is
        dead, and Left when this rank is.
        """
        self.step = step
        before = set(self.job.dead)
        if self.grace < torch.inf:
            self.allow(0.0)
        if self.peers:
            if idle:
                with contextlib.suppress(dist.DistStoreError):      # no rank has begun in time
                    self.job.store.wait([f"lives/{step}"], timedelta(seconds=self.job.timeout))
            self.go_over(self.agree(step))
        if self.job.members[0] in self.job.dead:
            raise dist.DistError("the rank that leads is dead")
        return self.job.dead != before

    def go_over(self, lives):
        """Go over to every rank's life in the present iteration, and meet those that join in it.

        Raises Left if this rank is dead in it.
        """
        old = self.lives
        if lives[self.rank] != old[self.rank]:
            self.leave()
        self.lives = lives
        dead = {r for r, life in enumerate(lives) if is_dead(life)}
        # The outer step holds this very set, and threads read it: it never lacks a dead rank.
        self.job.dead |= dead
        self.job.dead &= dead
        changed = [r for r, life in enumerate(lives) if life != old[r]]
        for rank in self.living(changed):
            self.job.missed.discard(rank)
            self.admit(rank)

    def run(self, paths, batches, train=True, order=None):
        found = super().run(paths, batches, train, order)
        # What comes next is an outer step, or after an evaluation a checkpoint and the log.
        self.allow(self.job.timeout if train else 10 * self.job.timeout)
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
            if forward == 0:                    # the microbatch should have come home here
                self.lost += 1
        return None

    # ---- messages

    def send(self, tensor, to, u, hop):
        tensor = self.marker if tensor is None else tensor.to(self.message_device).contiguous()
        self.count(tensor, to, u, hop)
        place = int(to > self.rank)
        work = self.attempt(to, lambda group: group.send([tensor], place, tag(u, hop)))
        return Message(self, work, to), tensor

    def receive(self, source, u, hop):
        buffer = torch.empty(self.message_shape, dtype=self.dtype)
        place = int(source > self.rank)
        work = self.attempt(source, lambda group: group.recv([buffer], place, tag(u, hop)))
        return Message(self, work, source, buffer), buffer

    def attempt(self, peer, message):
        """The work of a message to or from a peer; None when the peer is dead."""
        if self.newest[peer] != self.lives[peer]:
            return None
        try:
            return message(self.until(peer, self.groups[peer]))
        except RuntimeError as error:
            if not is_loss(error):
                raise
            self.declare_dead(peer, error)

    def until(self, peer, arrival):
        """The result of a Future that the peer's thread sets, or the error that the watch sets."""
        if not arrival.done():
            self.waiting = peer, arrival
        try:
            return arrival.result()
        finally:
            self.waiting = None
            self.busy_until = time.monotonic() + self.grace

    def arrives(self, work, peer):
        """Wait for a message. Returns False if it is lost with its peer."""
        if work is None:
            return False
        try:
            if peer in self.broken:             # the peer's thread may be stuck; no more can arrive
                return work.wait(timedelta(milliseconds=1))
            arrival = Future()
            self.queues[peer].put((work.wait, arrival))
            return self.until(peer, arrival)
        except RuntimeError as error:
            if not is_loss(error):
                raise
            self.broken.add(peer)
            self.declare_dead(peer, error)
            return False

    # ---- the dead

    def living(self, ranks):
        return [r for r in ranks if not is_dead(self.lives[r])]

    def declare_dead(self, peer, error):
        """Every rank leaves this peer out, from the first iteration on that no rank has begun."""
        if self.newest[peer] != self.lives[peer]:
            return
        if self.job.store.check([self.key("dropped", self.rank)]):
            self.leave()                        # a peer has declared this rank dead
        self.newest[peer] += 1
        error = one_line(error)[:100]
        self.job.tell(dict(event="lost", step=self.step, rank=self.rank, peer=peer, error=error))
        self.publish()

    def publish(self):
        """Write `newest` for the first iteration that no rank has begun.

        Returns (this iteration, its lives).
        """
        step = self.step + 1
        lives = self.agree(step)
        while lives != self.newest:         # that iteration has begun without what this rank knows
            step += 1
            lives = self.agree(step)
        return step, lives

    def agree(self, step):
        """Settle the lives of iteration `step`, and return them.

        The first rank to ask writes its own list, which counts for all.
        """
        mine = " ".join(str(life) for life in self.newest)
        lives = [int(n) for n in self.job.store.compare_set(f"lives/{step}", "", mine).split()]
        self.newest = [max(both) for both in zip(self.newest, lives)]
        return lives

    def leave(self):
        """This rank was declared dead. Raises Left; ends the process if another has its place."""
        if self.job.leads:
            raise dist.DistError("this rank led, and was silent for so long that others left it")
        self.agree(int(self.job.store.get("step")))
        if self.newest[self.rank] > self.lives[self.rank] + 1:
            print(f"rank {self.rank} leaves: a new process has its place", file=sys.stderr,
                  flush=True)
            sys.exit(0)
        line = f"rank {self.rank} was declared dead, since it was silent: it joins again"
        raise Left(line, self.job, asks=True)

    # ---- coming back

    def ask(self):
        """Take part from the first iteration that no rank has begun. Returns this iteration."""
        self.step = int(self.job.store.get("step"))         # waits until a rank has begun
        self.agree(self.step)
        # An even number: a new life of this rank, whose death may not have been noticed.
        life = self.newest[self.rank]
        self.newest[self.rank] = life + 1 if is_dead(life) else life + 2
        self.step, self.lives = self.publish()
        self.watcher.start()
        return self.step

    def take_weights(self):
        """Receive job.vectors from a living replica, and connect to the other stages.

        Returns this replica: this rank itself if no replica of its stage has weights. Raises Left
        if the replica died.
        """
        giver = self.choose_giver(self.rank)
        if giver != self.rank and not self.hand_over(giver, gives=False):
            self.close()
            line = f"rank {self.rank} lost rank {giver}, which gave it its weights"
            raise Left(line, self.job, asks=True)
        self.job.store.set(self.key("ready", self.rank), "=")
        for peer in self.living(self.peers):
            self.link(peer)
        return giver

    def admit(self, rank):
        """Connect to a rank that joins in this iteration, or give it weights."""
        if rank in self.peers:
            self.link(rank)
        elif self.rank == self.choose_giver(rank):
            self.hand_over(rank, gives=True)

    def choose_giver(self, rank):
        """The replica that gives its weights to `rank`, which joins: the first rank to ask chooses.

        It is `rank` itself if no other replica of the stage is alive and has weights.
        """
        store = self.job.store
        replicas = set(range(self.job.world)) - {*self.peers, rank}
        # A replica of life 0 has trained from the start. A later one must have its weights.
        able = [r for r in self.living(replicas)
                if self.lives[r] == 0 or store.check([self.key("ready", r)])]
        return int(store.compare_set(self.key("giver", rank), "", str(min(able, default=rank))))

    def hand_over(self, peer, gives):
        """Send job.vectors to a replica that joins, or receive them. Returns whether all came."""
        self.link(peer)
        place = int(peer > self.rank)

        def message(group):
            move = group.send if gives else group.recv
            return move([host], place, number)

        for number, vector in enumerate(self.job.vectors):
            host = vector.cpu()
            if not self.arrives(self.attempt(peer, message), peer):
                return False
            vector.copy_(host)
        return True

    # ---- the watch

    def watch(self):
        """A thread. It sends this rank's beats, and ends a wait for which no message can come.

        This rank beats while it waits for a peer or its task is not overdue.
        """
        store = self.job.store.clone()          # a client that waits serves no other thread
        seen = {}
        while not self.stopped.wait(self.job.timeout / 12):
            now, waiting = time.monotonic(), self.waiting
            try:
                if waiting or now - self.busy_until < self.job.timeout / 3:
                    store.add(self.key("beat", self.rank), 1)
                    if self.step >= 0:
                        store.set("step", str(self.step))
                if waiting:
                    self.probe(store, *waiting, seen, now)
            except RuntimeError as error:       # also of a lost store, which training notices
                if waiting:
                    with contextlib.suppress(InvalidStateError):    # the message was faster
                        _, arrival = waiting
                        arrival.set_exception(error)
                elif not is_loss(error):
                    raise

    def probe(self, store, peer, arrival, seen, now):
        """Raises RuntimeError if the wait for a peer should end: `is_loss` is true of it.

        seen: {beat's key: (its count, when this rank first read that count)}.

        Another rank may have dropped this one. The peer is silent without a beat for a third of the
        timeout. (A third, because other replicas of the stage then still wait in their outer step
        for the ranks that were held up.) A connection may have broken in the middle of a message:
        then no receive can be posted.
        """
        if store.check([self.key("dropped", self.rank)]):
            raise Silent("other ranks do not wait for this rank any more")
        key = self.key("beat", peer)
        count = store.add(key, 0)
        if seen.get(key, (None, 0.0))[0] != count:
            seen[key] = count, now
        if now - seen[key][1] > self.job.timeout / 3 and not arrival.done():
            # When it wakes it must not declare this rank dead.
            store.set(self.key("dropped", peer), "=")
            raise Silent(f"no sign of life for {self.job.timeout / 3:g} s")
        if not self.groups[peer].done():
            return
        # There is one connection for each interface. Gloo takes the one of the tag modulo their
        # number. It forgets a receive whose work is dropped.
        for number, _ in enumerate(gloo_interface().split(",")):
            self.groups[peer].result().recv([torch.empty(1)], int(peer > self.rank), number)

    def key(self, what, rank):
        """A key of the store that concerns the present life of a rank."""
        return f"{what}/{rank}/{self.lives[rank]}"

    def allow(self, seconds):
        """This rank's next tasks may take `seconds` longer than a third of the timeout."""
        self.busy_until = time.monotonic() + seconds
        self.grace = seconds

    def close(self):
        self.stopped.set()
        for works in self.queues.values():
            works.put(None)
        if self.watcher.is_alive():
            self.watcher.join()


class Message:
    """What stands for the work of a message: its wait ends if the peer is lost, too. buffer: of a
    message to this rank; it then holds the LOST marker."""

    def __init__(self, pipeline, work, peer, buffer=None):
        self.pipeline, self.work, self.peer, self.buffer = pipeline, work, peer, buffer

    def wait(self):
        arrived = self.pipeline.arrives(self.work, self.peer)
        if not arrived and self.buffer is not None:
            self.buffer.copy_(self.pipeline.marker)


def serve_pair(works):
    """A thread, which may never end: make each of a peer's works, (function, Future of its result).

    Whoever waits for the Future gets the error of its work, too.
    """
    for work, arrival in iter(works.get, None):
        with contextlib.suppress(InvalidStateError):        # the watch was faster
            try:
                arrival.set_result(work())
            except Exception as error:
                arrival.set_exception(error)
        del work, arrival                                   # they hold the message
