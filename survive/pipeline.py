"""A pipeline that outlives its ranks: an iteration is tentative, as torchft's steps are.

All ranks that take part in an iteration (membership.py) share one Gloo group, for as long as they
stay the same. A rank that waits in vain for a peer tells the membership that it is absent, and then
closes all its own connections. So every rank that waits for this one gets an error, finds in the
store that somebody is absent, and closes its own connections too. The tokens of that iteration, and
of those that were begun before anyone knew, are lost on these ranks. The next iteration has a group
without the absent one.

A rank tells first and closes then. So a connection that breaks while all ranks of the group are
still there is that of a dead peer.

A wait that is broken off closes all connections of its group, and when a connection breaks in the
middle of a message, Gloo never ends the wait for it. So a thread waits for the messages, and the
main thread for that thread. Meanwhile it gives signs of life, and looks for those of its peer.
"""
import contextlib
import math
import sys
import time
from concurrent.futures import wait
from datetime import timedelta

import torch
import torch.distributed as dist

from survive.membership import ABSENT, ALIVE, JOINING
from survive.network import DAY, Caller, Left, Lost, close, gloo_group, is_loss, probe
from train import Pipeline, one_line, tag


class SurvivingPipeline(Pipeline):
    """As Pipeline; job is a SurvivingJob. A peer is absent without a sign of life for a third of
    its timeout.

    lost: microbatches of this origin that never came home. ranks: those that are connected, or
    join, in the lives `epoch`; group: their Gloo group, None after a loss.
    """

    def connect(self, pairs):
        # The ranks of other stages that a path may join with this one.
        self.peers = [a + b - self.rank for a, b in pairs if self.rank in (a, b)]
        self.members = self.job.members
        self.third = self.job.timeout / 3
        self.lost = 0
        self.group = self.epoch = None
        self.ranks, self.dead = [], []
        self.ran = False
        self.thread = Caller()
        self.allow(10 * self.job.timeout)                   # the first run may compile

    def allow(self, seconds):
        """Until the next iteration this rank may be silent for so much longer."""
        if self.peers:
            self.members.beat(seconds)

    # ---- an iteration

    def begin(self, step, idle=False):
        """Begin iteration `step`. Returns whether other ranks take part in it than before.

        idle: this rank has no task. It lets another rank begin first. If it ran ahead, iterations
        would begin before a death in earlier ones is known. Raises DistError when the first rank is
        absent, and Left when this rank is.
        """
        if not self.peers:
            return False
        if idle:
            self.members.begun(step, 10 * self.job.timeout)
        life, before = self.members.record[self.rank], self.dead
        record = self.members.at(step)
        if self.ran:
            self.allow(0.0)
        if record[self.rank] // 3 != life // 3:
            self.leave(life)
        alive = self.members.alive()
        self.dead = [r for r, _ in enumerate(record) if r not in alive]
        if self.job.ranks[0] in self.dead:
            raise dist.DistError("the rank that leads is gone")
        # A rank that joins stays connected when it begins. Each other change makes a new key.
        epoch = [life - 1 if life % 3 == ALIVE else life for life in record]
        if epoch != self.epoch:
            self.epoch = epoch
            with self.tentative():
                self.regroup()
        return self.dead != before

    @contextlib.contextmanager
    def tentative(self):
        """After a loss this rank closes its connections: the others get to know of it."""
        try:
            yield
        except Lost:
            if self.group:
                close(self.group)
            self.group = None
            self.thread.end()
            self.thread = Caller()                  # the other one may wait for ever

    def run(self, paths, batches, train=True, order=None):
        if not self.peers:
            return super().run(paths, batches, train, order)
        found = None
        if self.group:
            with self.tentative():
                found = super().run(paths, batches, train, order)
        self.ran = True
        # What comes next is an outer step, or after an evaluation a checkpoint and the log.
        self.allow(0.0 if train else 10 * self.job.timeout)
        if found:
            return found
        if train:
            self.lost += len(batches)
        return torch.zeros((), device=self.device), 0, 0

    def take(self, u, hop):
        if self.peers:
            self.members.beat()
        return super().take(u, hop)

    # ---- messages

    def send(self, tensor, to, u, hop):
        tensor = tensor.to(self.message_device).contiguous()
        self.count(tensor, to, u, hop)
        return self.post(self.group.send, tensor, to, tag(u, hop)), tensor

    def receive(self, source, u, hop):
        buffer = torch.empty(self.message_shape, dtype=self.dtype)
        return self.post(self.group.recv, buffer, source, tag(u, hop)), buffer

    def post(self, move, tensor, peer, number):
        """move: the group's send or recv. Returns a Message."""
        try:
            return Message(self, move([tensor], self.ranks.index(peer), number), peer)
        except RuntimeError as error:
            self.blame(peer, error)

    def arrive(self, future, peers):
        """Wait until the thread has done what needs these peers. Raises Lost if a rank of the
        present group is absent by then."""
        since = time.monotonic()
        while not wait([future], self.members.tick).done:
            self.members.beat()
            if self.members.over(self.ranks, self.members.lives()):
                raise Lost("another rank is lost")
            for peer in peers:
                if self.members.silent(peer, self.third, since):
                    self.blame(peer, Lost(f"no sign of life for {self.third:g} s"))
                self.check(peer)

    def check(self, peer):
        """Raises Lost if the connection to a peer is broken."""
        if not self.group:
            return
        try:
            probe(self.group, self.ranks.index(peer))
        except RuntimeError as error:
            self.blame(peer, error)

    def blame(self, peer, error):
        """Tell the membership that a peer is absent, unless another rank was lost before.

        Raises Lost; an error that is no loss is raised as it is.
        """
        if not is_loss(error):
            raise error
        if self.members.miss(peer, self.ranks):
            self.job.tell(dict(event="lost", step=math.ceil(self.members.step), rank=self.rank,
                               peer=peer, error=one_line(error)[:100]))
        raise Lost(f"rank {peer} is lost")

    # ---- who takes part

    def regroup(self):
        """Meet the ranks of the present iteration in a new group, and give weights to those that
        join.

        The old group lives until all have come, since others may still wait for its messages.
        """
        record, old, self.group = self.members.record, self.group, None
        self.ranks = [r for r, life in enumerate(record) if life % 3 != ABSENT]
        key = "pipeline/" + ".".join(str(life) for life in self.epoch)
        here = self.members.gather(key, self.ranks, self.third, DAY)
        for rank in set(self.ranks) - set(here):
            self.blame(rank, Lost("it did not come"))
        place = self.ranks.index(self.rank)
        store = self.job.store.clone()                      # a client serves one thread
        connecting = self.thread.call(gloo_group, store, key, place, len(here),
                                      self.job.timeout / 5)
        self.arrive(connecting, self.ranks)
        if connecting.exception():
            # Gloo does not say who did not come. If one has died, it gives no sign of life now.
            self.arrive(self.thread.call(time.sleep, self.job.timeout), self.ranks)
            self.blame(self.rank, connecting.exception())
        self.group = connecting.result()
        del old
        for rank in self.ranks:
            if record[rank] % 3 == JOINING:
                self.hand_over(rank)

    def giver(self, rank):
        """The replica that gives its weights to `rank`, which joins; None if none is left."""
        stage = next(ranks for ranks in self.job.stages if rank in ranks)
        return min(set(stage) & set(self.members.alive()), default=None)

    def hand_over(self, rank):
        """Send job.vectors to a rank that joins, or receive them as this rank."""
        giver = self.giver(rank)
        if giver is None or self.rank not in (giver, rank):
            return
        move, peer = self.group.send, rank
        if self.rank == rank:
            move, peer = self.group.recv, giver
        for number, vector in enumerate(self.job.vectors, start=8):     # train.tag is above 15
            host = vector.cpu()
            self.post(move, host, peer, number).wait()
            vector.copy_(host)

    def leave(self, life):
        """This rank, which was in this life, is absent. Raises Left; ends the process if a new one
        has its place."""
        if self.job.leads:
            raise dist.DistError("this rank led, and was silent for so long that others left it")
        if self.members.lives()[self.rank] != 3 * (life // 3 + 1):
            print(f"rank {self.rank} leaves: a new process has its place", file=sys.stderr,
                  flush=True)
            sys.exit(0)
        line = f"rank {self.rank} was declared dead, since it was silent: it joins again"
        raise Left(line, self.job, asks=True)

    def close(self):
        self.thread.end()


class Message:
    """The work of a message. Its wait raises Lost if the peer is lost."""

    def __init__(self, pipeline, work, peer):
        self.pipeline, self.work, self.peer = pipeline, work, peer

    def wait(self):
        waiting = self.pipeline.thread.call(self.work.wait, timedelta(seconds=DAY))
        self.pipeline.arrive(waiting, [self.peer])
        if waiting.exception():
            self.pipeline.blame(self.peer, waiting.exception())
