"""NoLoCo whose replicas may die, hang, be late, send nonsense or come back (Gloo only).

survive/membership.py says who takes part in an outer step. Each one uses a process group of its
own. N2 is done with the partners that came and whose numbers are finite.

A rank that waits for a partner in vain tells the membership, so an absent replica costs one
exchange to each partner already scheduled with it. On one stage a late replica jumps to the first
begun outer step in which it can still meet a partner. Lateness does not spread: a replica that
waits gives signs of life, and who waits for this one waits twice as long.
"""
import contextlib
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from noloco import NoLoCo, random_groups
from survive.membership import ALIVE, Membership, numbers
from survive.network import Lost, connect, is_loss, set_deadline
from train import gloo_interface

NO_WEIGHT = -torch.inf       # all that a replica sends which joins and has no weights yet


class SurvivingNoLoCo(NoLoCo):
    """NoLoCo without a default process group: RANK and WORLD_SIZE give the ranks.

    store: a torch.distributed store that all replicas reach.
    timeout: seconds that an outer step waits for a partner (half of it without a sign of life), and
    again for the partner's numbers.
    members: the Membership of all ranks of a pipeline, where each iteration has the same number as
    the inner step; None: one of these replicas.
    jumps: a late replica may leave out inner steps. last: how many inner steps there are.
    tell: called with a dict for each outer step that did not go as drawn.
    reset: called when this replica was not finite and has taken a partner's weights. The caller
    then resets the inner optimizer.
    codec: a OneByte (gossip/onebyte.py), by which theta travels where all of a group can read it;
    None: it travels in fp32.
    alone: the number of outer steps done without any partner.
    late: this replica did its last outer step without a partner, or has just joined.

    `step` outlives the loss of a partner. It raises DistError when the store is lost, and every
    other error as it is, such as one of a codec. Not for fragments, which would write to the same
    keys of the store.
    """

    def __init__(self, params, ranks=None, *, store, timeout=60.0, members=None, jumps=True,
                 last=sys.maxsize, tell=print, reset=lambda: None, codec=None, **kwargs):
        world = int(os.environ["WORLD_SIZE"])
        super().__init__(params, range(world) if ranks is None else ranks, **kwargs)
        self.rank = int(os.environ["RANK"])
        if self.rank not in self.ranks:
            raise ValueError(f"rank {self.rank} is not among the replicas {self.ranks}")
        if not members:
            set_deadline(store, 5 * timeout)
            store = dist.PrefixStore(f"replicas {self.ranks[0]}", store)
            members = Membership(store, self.rank, world, timeout)
        self.members, self.store, self.timeout = members, members.store, timeout
        self.jumps, self.last = jumps, last
        self.tell, self.reset = tell, reset
        self.codec = codec
        self.late = False
        self.alone = self.alone_in_a_row = 0
        self.unreached = set()      # since the last exchange: partners that came, but sent nothing
        self.error = None           # what torch raised when a partner was lost in this outer step
        self.adopted = None         # the partner whose weights were taken in the last outer step
        self.link = None            # the last outer step's process group

    def step(self):
        self.error = None
        try:
            if self.late and self.jumps:
                self.jump()
            due = super().step()
        except dist.DistError:          # the store is lost: this outer step is left out
            self.steps += 1
            raise
        self.steps = min(self.steps, self.last)             # a jump may go over the end
        return due

    @contextlib.contextmanager
    def outliving(self):
        """Suppress the error of a lost partner, and keep it."""
        try:
            yield
        except RuntimeError as error:
            if not is_loss(error):
                raise
            self.error = error

    def last_of(self, outer):
        """The inner step with which this outer step ends."""
        return (outer + 1) * self.inner_steps - 1

    def jump(self):
        """A late replica comes back. It leaves out begun outer steps to which no partner can come,
        with their inner steps, and does the first other one next: a partner may wait there."""
        self.members.come_back()
        first = outer = self.steps // self.inner_steps
        while self.members.begun(self.last_of(outer)):
            if self.is_open(outer):
                self.steps = self.last_of(outer)
                break
            outer += 1
        if outer > first:
            self.steps = max(self.steps, outer * self.inner_steps)
            self.report("leapt", outer_steps=outer - first)

    def is_open(self, outer):
        """Whether a partner can still come to meet this replica in this begun outer step."""
        step = self.last_of(outer)
        then = numbers(self.members.read(f"members/{step}"))
        group = self.draw(outer, then)
        if self.store.check([f"outer/{step}/{group[0]}/members"]):
            return False
        now = self.members.lives()
        return any(r != self.rank and now[r] == then[r] and self.members.begun_by(r) <= step
                   for r in group)

    # ---- an outer step

    def group(self):
        return self.draw(self.steps // self.inner_steps, self.members.at(self.steps))

    def draw(self, outer, lives):
        """This replica's group among those that are alive; this one alone if it is not."""
        alive = [r for r in self.ranks if lives[r] % 3 == ALIVE]
        if self.rank not in alive:
            return (self.rank,)
        groups = random_groups(alive, self.group_size, outer, self.seed)
        return next(group for group in groups if self.rank in group)

    def cost(self, group):
        """`post` counts what is sent."""
        return 0

    def exchange(self, theta, group, process_group=None):
        """As NoLoCo.exchange, with the partners that came and whose numbers are finite."""
        own = {"theta": theta}
        if self.gamma != self.beta:
            own["phi"] = self.phi
        arrived = {self.rank: list(own.values())}
        self.members.beat(self.timeout)             # it may wait so long for a partner's numbers
        key = f"outer/{self.steps}/{group[0]}"
        came = self.gather(key, group)
        with self.outliving():
            self.link = connect(self.store, key, self.rank, came, self.timeout) or self.link
            if len(came) > 1:
                arriving, works = self.post(own, came, self.codec_for(key, came))
                for r in works:
                    if self.arrives(works[r]):
                        arrived[r] = self.read(came.index(r), arriving[r])
        self.members.beat(0.0)
        missing = set(group) - set(arrived)
        self.late = bool(missing) or self.rank not in self.members.alive()
        if missing:
            self.report("outer step without partners", missing=sorted(missing),
                        error=str(self.error or "")[:100])
        self.count(len(arrived), set(came) - set(arrived))
        return self.accept(arrived)

    def gather(self, key, group):
        """Come to this outer step's meeting. Returns those that came, at least this replica.

        No rank waits any more for those that did not.
        """
        word = "late" if self.late else "here"
        came = self.members.gather(key, group, self.timeout / 2, self.timeout, word)
        if self.rank not in came:                       # the others have given this replica up
            return (self.rank,)
        for r in set(group) - set(came):
            self.members.miss(r, [self.rank, r])
        return came

    def codec_for(self, key, came):
        """The codec that all of this group use (None: fp32).

        One byte can only carry a weight that is close to the reader's own. A late replica may be
        far from its partners, so a group with one sends fp32. A replica says that it is late when
        it comes to a meeting, so all of them choose alike.
        """
        if not self.codec:
            return None
        far = [r for r in came if self.members.read(f"{key}/{r}") == "late"]
        if far:
            self.report("fp32 instead of int8", far=far)
        return None if far else self.codec

    def post(self, own, came, codec):
        """Post this replica's vectors to its partners, and receives of theirs. Returns ({partner:
        its messages}, {partner: works}). In the process group a rank is its place in `came`."""
        arriving = {r: [] for r in came if r != self.rank}
        works = {r: [] for r in arriving}
        for tag, (name, vector) in enumerate(own.items()):
            mine = codec.encode(vector, self.phi) if codec and name == "theta" else vector
            mine = self.on_device(self.message_device, name, mine)
            for r in arriving:
                theirs = self.buffer((name, came.index(r)), mine, self.message_device)
                arriving[r].append(theirs)
                works[r].append(self.link.recv([theirs], came.index(r), tag))
            for r in arriving:
                works[r].append(self.link.send([mine], came.index(r), tag))
            self.bytes_sent += len(arriving) * mine.nbytes
        return arriving, works

    def arrives(self, works):
        """Wait for what a partner sends and is sent. Returns whether all of it arrived."""
        with self.outliving():
            for work in works:
                work.wait(timedelta(seconds=self.timeout))
            return True
        return False

    def read(self, place, messages):
        """A partner's vectors. What came in one byte per weight is read beside this replica's own
        theta; beside phi, of the last outer step, if theta is not finite."""
        vectors = []
        for number, message in enumerate(messages):
            vector = self.on_device(self.theta.device, (number, place), message)
            if vector.dtype == torch.uint8:
                own = self.theta if is_finite([self.theta]) else self.phi
                out = self.buffer((number, place), own, own.device)
                vector = self.codec.decode(vector, own, out)
            vectors.append(vector)
        return vectors

    def accept(self, arrived):
        """(thetas, phis) of the finite replicas. arrived: {rank: [theta, phi if it travels]}.

        A replica that is not finite itself takes a partner's theta as its theta and phi, and delta
        = 0. Without a finite partner it takes its own phi. It does the outer step alone: Delta and
        delta are 0, so N1 to N3 change nothing. `adopted` is this partner, or None.
        """
        finite = [r for r in sorted(arrived) if is_finite(arrived[r])]
        refused = [r for r in arrived if r not in finite and not joins(arrived[r][0])]
        self.adopted = None
        if self.rank not in finite:
            if finite:
                self.adopted = finite[0]
                self.phi.copy_(arrived[self.adopted][0])
            self.theta.copy_(self.phi)
            self.delta.zero_()
            self.reset()
            finite = [self.rank]
        if refused:
            self.report("not finite", refused=sorted(refused), adopted=self.adopted)
        thetas = [arrived[r][0] for r in finite]
        phis = [phi for r in finite for phi in arrived[r][1:]]
        return thetas, phis

    # ---- what is said

    def report(self, event, **more):
        outer = self.steps // self.inner_steps + 1
        step = outer * self.inner_steps
        self.tell(dict(event=event, step=step, outer=outer, rank=self.rank, **more))

    def count(self, n, unreached):
        """Count outer steps done alone. Warn if partners that came, so live, are never reached."""
        if n > 1:
            self.alone_in_a_row, self.unreached = 0, set()
            return
        if len(self.ranks) > 1:
            self.alone += 1
        self.alone_in_a_row += 1
        self.unreached |= unreached
        if self.alone_in_a_row % 3 == 0 and self.unreached:
            interface = gloo_interface() or "the default interface"
            print(f"rank {self.rank}: three outer steps in a row without partners although they "
                  f"are alive (ranks {sorted(self.unreached)}): it trains alone. Can these hosts "
                  f"connect to them? Gloo uses {interface} here (GLOO_SOCKET_IFNAME)",
                  file=sys.stderr, flush=True)

    # ---- coming back

    def join(self):
        """Come to the next outer steps without weights, until a partner has given its theta.

        Raises Lost, a RuntimeError, when no outer step is left, or no replica begins one within 60
        timeouts.
        """
        self.adopted = None
        while self.adopted is None:
            self.members.come_back()
            outer = (self.members.newest() + 1) // self.inner_steps
            while self.members.begun(self.last_of(outer)):
                outer += 1
            if self.last_of(outer) >= self.last:
                raise Lost("training is over")
            if not self.members.begun(self.last_of(outer), 60 * self.timeout):
                raise Lost("no rank trains")
            self.theta.fill_(NO_WEIGHT)
            self.late = True
            self.steps = self.last_of(outer)
            super().step()
        self.late = True
        self.tell(dict(event="joined", step=self.steps, outer=outer + 1, rank=self.rank,
                       given_by=self.adopted))


def is_finite(vectors):
    return all(torch.isfinite(vector.sum()) for vector in vectors)


def joins(message):
    """Whether a vector is that of a replica which joins."""
    return bool((message == NO_WEIGHT).all())
