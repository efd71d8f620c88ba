"""Who takes part in a step: one list for all ranks, in the store. Nothing else knows who lives.

Each rank has a life, a number that only grows:

    life % 3                                 goes over to
    ALIVE    it takes part                   ABSENT   a rank waited for it in vain      miss
    ABSENT   nobody waits for it             ALIVE    it was only slow (one stage)      come_back
                                             JOINING  it asks for weights (pipelines)   join
    JOINING  it has no weights yet           ALIVE    it has them                       begin
                                             ABSENT   a rank waited for it in vain      miss
    any                                      JOINING  a new process has its place       join

The store has everybody's newest life. The first rank to begin a step writes these lives down for
that step (compare_set). All others adopt them, so no rank waits for agreement. A rank that was
missed reads it there: in a pipeline it joins, on one stage it comes back.

The keys of the store in survive/, and who writes them:

    K/R           rank R's value in its K-th call of Job.share; 1: the options. left/R, stopped:
                  train.Job's too.
    lives         every rank's newest life. All, by compare_set.
    members/T     every rank's life in step T. The first rank to begin it. T - 0.5: in an evaluation
                  before step T.
    beat/R        rank R's sign of life: the time, the step that it has begun, and for how many more
                  seconds it may be silent. R itself.
    KEY/R         rank R has come to meeting KEY; on one stage whether it is "late".
    KEY/members   those that meet. The first rank to stop waiting.
    row/E/ENDS/R  rank R's row for the log at evaluation E. saved/S/R: it has its part of step S.
    events        a line for each event that the log is to have. The rank that it happened to.
    first plan    the plan that checkpoints hold (planned paths). The first rank, or those of a
                  takeover; address: the address of this store after one.
    standby/R     the address of rank R's standby store (standby.py). R itself.
    known         the number of the last evaluation, the ranks that answered it, and those that
                  answered the one before. The first rank, or those of a takeover.
    takes part/R  at a standby store: what rank R last read of `known`, and R's step. R itself.

Meetings are: outer/T/G (an outer step of the group whose first rank is G), pipeline/LIVES,
spread/STAGE/E (an evaluation), takeover.
"""
import contextlib
import time
from datetime import timedelta

import torch.distributed as dist

from survive.network import Lost

ABSENT, JOINING, ALIVE = range(3)


def numbers(text):
    return [int(word) for word in text.split()]


def words(values):
    return " ".join(map(str, values))


class Membership:
    """record: every rank's life in `step`, the step that this rank has begun last. away: ranks that
    are absent when a job begins. lease: for how many more seconds this rank may be silent."""

    def __init__(self, store, rank, world, timeout, away=()):
        self.store, self.timeout = store, timeout
        self.rank, self.world = rank, world
        first = [ABSENT if r in away else ALIVE for r in range(world)]
        self.record = numbers(store.compare_set("lives", "", words(first)))
        self.step = -1
        self.lease = self.beaten = 0.0
        self.heard = {}             # {rank: its last sign of life, when this rank first read it}

    def read(self, key):
        """The value of a key, in one request; empty if it has none. (`get` would first wait for the
        key, without the deadline that network.py sets.)"""
        return self.store.compare_set(key, "", "").decode()

    def lives(self):
        """Every rank's newest life."""
        return numbers(self.read("lives"))

    def at(self, step):
        """Every rank's life in this step."""
        if step != self.step:
            now = self.read("lives")
            self.record = numbers(self.store.compare_set(f"members/{step}", "", now))
            self.step = step
        return self.record

    def begun(self, step, seconds=0.0):
        """Whether a rank has begun this step, or begins it within so many seconds."""
        end = time.monotonic() + seconds
        while not self.store.check([f"members/{step}"]):
            if time.monotonic() >= end:
                return False
            self.beat()
            with contextlib.suppress(dist.DistStoreError):
                self.store.wait([f"members/{step}"], timedelta(seconds=self.tick))
        return True

    def alive(self):
        """The ranks that take part in this rank's step."""
        return [r for r, life in enumerate(self.record) if life % 3 == ALIVE]

    def away(self):
        """The ranks that do not take part at this moment."""
        return {r for r, life in enumerate(self.lives()) if life % 3 != ALIVE}

    def over(self, group, lives):
        """Whether one of these ranks is not in the life that it has in this rank's step."""
        return any(lives[r] // 3 != self.record[r] // 3 for r in group)

    # ---- changes

    def move(self, rank, state, unless=()):
        """A rank goes over to a state, unless a rank of a group has done so (see `over`). Returns
        whether it did."""
        while True:
            before = self.read("lives")
            lives = numbers(before)
            if self.over(unless, lives):
                return False
            lives[rank] += 1
            while lives[rank] % 3 != state:
                lives[rank] += 1
            after = words(lives)
            if self.store.compare_set("lives", before, after).decode() == after:
                return True

    def miss(self, rank, group):
        """Nobody waits for `rank` any more. group: the ranks that waited together.

        If one of the group is absent already, this rank may be, then that is why the others do not
        come, and `rank` stays what it is. Returns whether it is absent by this.
        """
        return self.move(rank, ABSENT, unless=group)

    def come_back(self):
        """This rank was only slow: steps that begin from now on have it."""
        if self.lives()[self.rank] % 3 == ABSENT:
            self.move(self.rank, ALIVE)

    def join(self):
        """A new life of this rank, without weights. Returns the first step that has it."""
        self.move(self.rank, JOINING)
        life = self.lives()[self.rank]
        step = self.newest()
        while self.at(step)[self.rank] < life:          # this step has begun without this rank
            step += 1
        return step

    def begin(self):
        """This rank has weights."""
        self.move(self.rank, ALIVE)

    def newest(self):
        """A step that a rank has begun lately. Raises Lost if none begins within 60 timeouts."""
        end = time.monotonic() + 60 * self.timeout
        while time.monotonic() < end:
            newest = max(self.begun_by(r) for r in range(self.world))
            if newest >= 0:
                return int(newest)
            time.sleep(self.tick)
        raise Lost("no rank trains")

    def begun_by(self, rank):
        """The step that a rank has begun last, or -1."""
        beat = self.read(f"beat/{rank}")
        return float(beat.split()[1]) if beat else -1.0

    # ---- signs of life

    @property
    def tick(self):
        """Seconds between two signs of life of a rank that waits."""
        return self.timeout / 12

    def beat(self, lease=None):
        """Give a sign of life, at most every tick. lease: this rank may be silent for so much
        longer."""
        now = time.monotonic()
        if lease in (None, self.lease) and now - self.beaten < self.tick:
            return
        if lease is not None:
            self.lease = lease
        self.beaten = now
        self.store.set(f"beat/{self.rank}", f"{time.time()} {self.step} {self.lease}")

    def silent(self, rank, seconds, since):
        """Whether a rank has given no sign of life for so long (with its lease) since this time."""
        beat = self.read(f"beat/{rank}")
        if self.heard.get(rank, (None, 0.0))[0] != beat:
            self.heard[rank] = beat, time.monotonic()
        lease = float(beat.split()[2]) if beat else 0.0
        _, heard = self.heard[rank]
        return time.monotonic() - max(heard, since) > seconds + lease

    # ---- meetings

    def gather(self, key, ranks, silence, longest, word="here"):
        """Come to meeting `key`, and wait for these ranks. Returns those that came, one list for
        all.

        No rank waits for an absent one, nor for one that gives no sign of life for `silence`
        seconds. longest: seconds.
        """
        self.store.set(f"{key}/{self.rank}", word)
        since = time.monotonic()
        while True:
            here = self.came(key, ranks)
            missing = set(ranks) - set(here)
            late = time.monotonic() - since > longest
            if late or not self.awaited(missing, silence, since):
                return numbers(self.store.compare_set(f"{key}/members", "", words(here)))
            self.beat()
            with contextlib.suppress(dist.DistStoreError):          # no rank has written the list
                self.store.wait([f"{key}/members"], timedelta(seconds=self.tick))
                return numbers(self.read(f"{key}/members"))

    def came(self, key, ranks):
        """Those of these ranks that have come to a meeting."""
        if self.store.check([f"{key}/{r}" for r in ranks]):
            return list(ranks)
        return [r for r in ranks if self.store.check([f"{key}/{r}"])]

    def awaited(self, missing, silence, since):
        """Those of the missing ranks for which a rank that waits since then waits on.

        A rank that lives on in another life comes to other meetings.
        """
        if not missing:
            return []
        lives = self.lives()
        return [r for r in missing if lives[r] % 3 != ABSENT and not self.over([r], lives)
                and not self.silent(r, silence, since)]
