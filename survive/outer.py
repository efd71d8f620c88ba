"""NoLoCo whose replicas may die, hang, be late, send nonsense or come back (Gloo only).

survive/meeting.py has the states of a replica. Each outer step uses a process group of its own. N2
is done with the partners that came and whose numbers are finite.

The first replica to come to an outer step writes down which replicas take part: all that are not
absent by then. So an absent replica costs one exchange to each partner already scheduled with it,
in about log2 N outer steps. On one stage a replica that lost such an exchange leaps: it leaves out
the outer steps in which it would meet the absent replica again, and their inner steps.

Lateness does not spread: a replica that waits for its partner says so ("in" its outer step). The
replica that waits for it in turn then waits twice as long.
"""
import contextlib
import os
import sys
from datetime import timedelta

import torch

from noloco import NoLoCo, random_groups
from survive.meeting import (absent, announce, come_back, connect, is_loss, mark_absent, members_of,
                             outliving, position)
from train import gloo_interface

NO_WEIGHT = -torch.inf       # all that a replica sends which joins and has no weights yet


class SurvivingNoLoCo(NoLoCo):
    """NoLoCo without a default process group: RANK and WORLD_SIZE give the ranks.

    store: a torch.distributed store that all replicas reach.
    timeout: seconds that an outer step waits for a partner (half of it without a sign of life), and
    again for the partner's numbers.
    catch_up: a late replica may leave out inner steps. last: how many inner steps there are.
    tell: called with a dict for each outer step that did not go as drawn.
    reset: called when this replica was not finite and has taken a partner's weights. The caller
    then resets the inner optimizer.
    codec: a OneByte (gossip/onebyte.py), by which theta travels where all of a group can read it;
    None: it travels in fp32.
    dead: a set that the caller keeps: the replicas that are dead now (empty without a pipeline).
    alone: the number of outer steps done without any partner.

    `step` outlives the loss of a partner. It raises DistError when the store is lost, and every
    other error as it is, such as one of a codec. Not for fragments, which would write to the same
    keys of the store.
    """

    def __init__(self, params, ranks=None, *, store, timeout=60.0, catch_up=True, last=sys.maxsize,
                 tell=print, reset=lambda: None, dead=frozenset(), codec=None, **kwargs):
        ranks = range(int(os.environ["WORLD_SIZE"])) if ranks is None else ranks
        super().__init__(params, ranks, **kwargs)
        self.rank = int(os.environ["RANK"])
        if self.rank not in self.ranks:
            raise ValueError(f"rank {self.rank} is not among the replicas {self.ranks}")
        self.store, self.timeout = store, timeout
        self.catch_up, self.last, self.dead = catch_up, last, dead
        self.name = f"outer/{self.ranks[0]}"
        self.tell, self.reset = tell, reset
        self.codec = codec
        self.late = False
        self.stale_until = -1       # lists of outer steps up to this one may name an absentee
        self.alone = self.alone_in_a_row = 0
        self.unreached = set()      # since the last exchange: partners that came, but sent nothing
        self.error = ""             # what torch said when a partner was lost in this outer step
        self.adopted = None         # the partner whose weights were taken in the last outer step
        self.link = None            # the last outer step's process group

    @property
    def current(self):
        """The number of the next outer step, from 0."""
        return self.steps // self.inner_steps

    def step(self):
        with outliving():                                   # a lost store is noticed after the step
            if self.late or self.current <= self.stale_until:
                self.leap()
            if self.late:
                self.hurry()
        due = super().step()
        self.steps = min(self.steps, self.last)             # a leap may go over the end
        if due:
            absent(self.store, self.ranks)                  # raises if the store is lost
        return due

    # ---- who meets whom

    def begun(self, outer):
        """Whether a replica has settled who takes part in outer step `outer`."""
        return self.store.check([f"{self.name}/{outer}/ranks"])

    def settle_ranks(self, outer):
        """Settle which replicas take part in outer step `outer`, and return their list.

        The first replica to ask writes the list, without those that are absent by then. It counts
        for all.
        """
        away = (self.dead | absent(self.store, self.ranks)) - {self.rank}
        here = " ".join(str(r) for r in self.ranks if r not in away)
        settled = self.store.compare_set(f"{self.name}/{outer}/ranks", "", here)
        return [int(r) for r in settled.split()]

    def settle_group(self, outer):
        """Settle outer step `outer`. Returns this replica's group: alone if it takes no part."""
        groups = random_groups(self.settle_ranks(outer), self.group_size, outer, self.seed)
        return next((g for g in groups if self.rank in g), (self.rank,))

    def key(self, outer, group):
        return f"{self.name}/{outer}/{group[0]}"

    def leap(self):
        """Leave out begun outer steps where no partner can come, with their inner steps."""
        if not self.catch_up:
            return
        first = now = self.current
        while self.begun(now) and not self.expected(now):
            now += 1
        if now > first:
            self.report("leapt", outer_steps=now - first)
            self.steps += (now - first) * self.inner_steps

    def hurry(self):
        """A late replica comes back. It cuts its inner steps short if a partner waits for it.

        `leap` comes first, since no replica should wait for one that is far behind.
        """
        come_back(self.store, self.rank)
        if not self.catch_up or not self.begun(self.current):
            return
        group = self.settle_group(self.current)
        key = self.key(self.current, group)
        if any(self.store.check([f"{key}/{r}"]) for r in group if r != self.rank):
            # The next inner step is the last one before the outer step.
            self.steps = (self.current + 1) * self.inner_steps - 1

    def expected(self, outer):
        """Whether a partner can still come to meet this replica in this begun outer step."""
        group = self.settle_group(outer)
        partners = set(group) - {self.rank}
        if self.store.check([f"{self.key(outer, group)}/members"]):
            return False
        ahead = {r for r in partners if position(self.store, r) >= (outer, "out")}
        return bool(partners - ahead - absent(self.store, partners))

    # ---- the exchange

    def meet(self):
        """As NoLoCo.meet, with the partners that came and whose numbers are finite."""
        self.refuse_moved()
        outer = self.current
        vectors = {"theta": self.theta}
        if self.gamma != self.beta:
            vectors["phi"] = self.phi
        self.error = ""
        group, members, link = self.gather(outer)
        arrived = self.trade(members, vectors, link)
        with outliving():
            announce(self.store, self.rank, outer, "out")
        missing = set(group) - set(arrived)
        if missing:
            self.note_missing(outer, missing)
        self.count(len(arrived), set(members) - set(arrived))
        thetas, phis = self.accept(arrived)
        self.outer_step(self.theta, thetas, phis)

    @contextlib.contextmanager
    def outlive(self):
        """Suppress the error of a lost partner or store; `self.error` keeps what it says."""
        try:
            yield
        except RuntimeError as error:
            if not is_loss(error):
                raise
            self.error = str(error)[:100]

    def gather(self, outer):
        """Come to outer step `outer`. Returns (its group, the members that came, a process group).

        The process group is None where no partner came, or where one was lost while they connected.
        """
        group = members = (self.rank,)
        link = None
        with self.outlive():
            announce(self.store, self.rank, outer, "late" if self.late else "in")
            group = self.settle_group(outer)
            key = self.key(outer, group)
            present = members_of(self.store, key, self.rank, group, self.timeout)
            if self.rank in present:            # else the others have given this replica up
                members = present
            self.late = len(group) == 1 or bool(absent(self.store, [self.rank]))
            link = connect(self.store, key, self.rank, present, self.timeout)
        return group, members, link

    def trade(self, members, vectors, link):
        """{rank: its vectors}, by rank, of this replica and the members whose numbers arrived."""
        if link:
            with self.outlive():                # a member that is lost by now makes posting fail
                arriving, works = self.post(members, vectors, link)
                self.link = link        # lives until the next one: messages may be on their way
                lost = {r for r in works if not self.arrives(works[r])}
                return {r: its for r, *its in zip(members, *arriving) if r not in lost}
        return {self.rank: list(vectors.values())}

    def arrives(self, works):
        """Wait for what a partner sends and is sent. Returns whether all of it arrived."""
        with self.outlive():
            for work in works:
                work.wait(timedelta(seconds=self.timeout))
            return True
        return False

    def note_missing(self, outer, missing):
        """This replica is late now. The lists of begun outer steps may name the missing ones."""
        self.late, self.stale_until = True, outer
        with outliving():
            while self.begun(self.stale_until + 1):
                self.stale_until += 1
        self.report("outer step without partners", missing=sorted(missing), error=self.error)

    def post(self, group, vectors, process_group):
        """As NoLoCo.swap, but it does not wait. Returns each vector's messages, by rank, and the
        works as {partner: [...]}. In this process group a rank is a place in the group.
        """
        partners = [r for r in group if r != self.rank]
        arriving = []
        works = {r: [] for r in partners}
        codec = self.codec_for(group)
        for tag, (name, vector) in enumerate(vectors.items()):
            mine = vector
            if codec and name == "theta":
                mine = codec.encode(vector, self.phi)
            mine = self.on_device(self.message_device, name, mine)
            theirs = {}
            for i, r in enumerate(partners):
                theirs[r] = self.buffer((name, i), mine, self.message_device)
            for r in partners:
                works[r].append(process_group.recv([theirs[r]], group.index(r), tag))
            for r in partners:
                works[r].append(process_group.send([mine], group.index(r), tag))
            arriving.append([theirs.get(r, vector) for r in group])
            self.bytes_sent += len(partners) * mine.nbytes
        return arriving, works

    def codec_for(self, group):
        """The codec that all of this group use (None: fp32).

        One byte can only carry a weight that is close to the reader's own. A late replica may be
        far from its partners, so a group with one sends fp32. A replica says that it is late before
        a meeting, and its partners read this before any message leaves: all of them choose alike.
        """
        if not self.codec:
            return None
        far = [r for r in group if position(self.store, r)[1] == "late"]
        if not far:
            return self.codec
        self.report("fp32 instead of int8", far=far)
        return None

    def report(self, event, **more):
        with outliving():                                   # a lost store is noticed after the step
            outer = self.current + 1
            step = outer * self.inner_steps
            self.tell(dict(event=event, step=step, outer=outer, rank=self.rank, **more))

    def count(self, n, unreached):
        """Count outer steps done alone. Warn if partners that came, so live, are never reached."""
        if n > 1:
            self.alone_in_a_row, self.unreached = 0, set()
            return
        if len(set(self.ranks) - self.dead) > 1:
            self.alone += 1
        self.alone_in_a_row += 1
        self.unreached |= unreached
        if self.alone_in_a_row % 3 == 0 and self.unreached:
            interface = gloo_interface() or "the default interface"
            print(f"rank {self.rank}: three outer steps in a row without partners although they "
                  f"are alive (ranks {sorted(self.unreached)}): it trains alone. Can these hosts "
                  f"connect to them? Gloo uses {interface} here (GLOO_SOCKET_IFNAME)",
                  file=sys.stderr, flush=True)

    def accept(self, arrived):
        """(thetas, phis) of the finite replicas.

        arrived: {rank: messages of [theta, phi if it travels]}, by rank.

        A replica that is not finite itself takes a partner's theta as its theta and phi, and delta
        = 0. Without a finite partner it takes its own phi. It does the outer step alone: Delta and
        delta are 0, so N1 to N3 change nothing. `adopted` is this partner, or None.
        """
        finite = [r for r, messages in arrived.items() if self.finite(messages)]
        adopts = self.rank not in finite
        refused = [r for r in arrived if r not in finite and not joins(arrived[r][0])]
        self.adopted = finite[0] if adopts and finite else None
        if refused:
            self.report("not finite", refused=refused, adopted=self.adopted)
        if adopts:
            if finite:
                self.adopt(arrived[self.adopted][0])
            self.theta.copy_(self.phi)
            self.delta.zero_()
            self.reset()
            finite = [self.rank]
        partners = [r for r in finite if r != self.rank]
        thetas, phis = [], []
        for r in finite:
            theta, *phi = arrived[r]
            if r != self.rank:
                i = partners.index(r)
                theta = self.read(("theta", i), theta, self.theta)
                phi = [self.read(("phi", i), message, self.phi) for message in phi]
            thetas.append(theta)
            phis += phi
        return thetas, phis

    def finite(self, messages):
        """Whether all numbers in a replica's messages are finite.

        One byte a weight is judged by its scales s, before it is read: its weights are at most
        B / 2 = 128 s from the vector beside which it is read.
        """
        for message in messages:
            if message.dtype == torch.uint8:
                message = 128 * self.codec.scales(message)
            if not torch.isfinite(message.sum()):
                return False
        return True

    def read(self, key, message, own):
        """The vector of a message. What came in one byte per weight is read beside `own`."""
        message = self.on_device(own.device, key, message)
        if message.dtype == torch.uint8:
            message = self.codec.decode(message, own, self.buffer(key, own, own.device))
        return message

    def adopt(self, message):
        """phi becomes a partner's theta. The message is read beside phi, of the last outer step,
        since this replica's own theta is not finite.
        """
        self.phi.copy_(self.read(("theta", 0), message, self.phi))

    # ---- coming back

    def join(self):
        """Come to the next outer steps without weights, until a partner has given its theta.

        Raises ValueError when no outer step is left, and RuntimeError when no replica begins one
        within 60 timeouts.
        """
        self.adopted = None
        outer = max(0, *(position(self.store, r)[0] for r in self.ranks))
        while self.adopted is None:
            come_back(self.store, self.rank)
            self.wait_for_begin(outer)
            if self.rank in self.settle_ranks(outer):
                # A partner expects it, maybe already in the first one.
                self.theta.fill_(NO_WEIGHT)
                self.late = True
                self.steps = (outer + 1) * self.inner_steps - 1
                super().step()
                # No partner waits until it trains, once the other replicas have left an evaluation.
                mark_absent(self.store, self.rank, "join")
                self.wait_for_begin(outer + 1)
            outer += 1
        self.late = True
        self.tell(dict(event="joined", step=self.steps, outer=outer, rank=self.rank,
                       given_by=self.adopted))

    def wait_for_begin(self, outer):
        """Wait until a replica has begun outer step `outer`, at most 60 timeouts."""
        if (outer + 1) * self.inner_steps > self.last:
            raise ValueError("no outer step is left to join: training is over")
        self.store.wait([f"{self.name}/{outer}/ranks"], timedelta(seconds=60 * self.timeout))


def joins(message):
    """Whether a message is that of a replica which joins. (It travels in fp32.)"""
    return message.dtype == torch.float32 and bool((message == NO_WEIGHT).all())
