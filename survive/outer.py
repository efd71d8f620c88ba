"""NoLoCo that outlives its partners: they may die, hang, be late, send nonsense or come back (Gloo only).

Each outer step meets in a process group of its own (meeting.py), and Eq. 2 is done with those who came and
whose numbers are finite. Theta and phi then travel together: nothing is sent ahead.

Who takes part in an outer step is written down by the first replica to come to it: all who are not missed
by then. So one that is absent costs an exchange those who are to meet it in outer steps begun before it was
missed, about log2 N of them, and nobody later. On one stage who has lost one leaps over those of them, with
their inner steps, in which it would meet the absent one again. While a replica waits for its partner it is
known to be held up, and whoever waits for it is patient for longer (`meet`): lateness does not spread.
"""
import contextlib
import os
import sys
import time
from datetime import timedelta

import torch

from noloco import NoLoCo, random_groups
from plumbing.processes import gloo_interface
from survive.meeting import Gone, absent, come_back, connect, meet, wait_for, whereabouts


class SurvivingNoLoCo(NoLoCo):
    """store: a torch.distributed store that all replicas reach; ranks come from RANK and WORLD_SIZE.

    timeout: seconds that an outer step waits for partners (half of it for those who show no sign of life),
    and again for their numbers. catch_up: a replica that is late may leave out inner steps. tell: called
    with each thing that did not go as drawn, a dict (default: they gather in `events`). reset: called when
    this replica's numbers were not finite and it has taken a partner's: the inner optimizer's state should
    go too. alone: outer steps done without any partner. `step` raises RuntimeError when the store is lost,
    and Gone on rank 0 when it has met nobody for long.
    """

    def __init__(self, params, ranks=None, *, store, timeout=60.0, catch_up=True, tell=None, reset=None,
                 **kwargs):
        ranks = range(int(os.environ["WORLD_SIZE"])) if ranks is None else ranks
        super().__init__(params, ranks, **kwargs)
        self.rank = int(os.environ["RANK"])
        if self.rank not in self.ranks:
            raise ValueError(f"rank {self.rank} is not among the replicas {self.ranks}")
        self.store, self.timeout, self.catch_up = store, timeout, catch_up
        self.name = f"outer/{self.ranks[0]}"
        self.events = []
        self.on_event = tell or self.events.append
        self.on_adopt = reset
        self.late = False
        self.fixed = -1                     # the last outer step whose list may name one who is missed by now
        self.alone = self.in_a_row = 0
        self.unreached = set()              # partners who came, but were not reached, since the last exchange
        self.met = time.monotonic()
        self.asked = store.add(f"joins/{self.ranks[0]}", 0)
        self.joiners = set()

    def step(self):
        with contextlib.suppress(RuntimeError):             # a lost store is noticed after the step
            if self.late or self.steps // self.inner_steps <= self.fixed:
                self.leap()
            if self.late:
                self.hurry()
        due = super().step()
        if due:
            self.serve()
            self.look_round()
        return due

    def look_round(self):
        """Rank 0, where the store is, must not train alone for ever as if it trained together."""
        lonely = self.in_a_row >= 3 and time.monotonic() - self.met > 4 * self.timeout
        if self.rank == 0 and lonely and absent(self.store, self.ranks) == set(self.ranks) - {0} != set():
            raise Gone("no other replica has been met for long: they are gone, or this host is cut off")

    # ---- who meets whom

    def begun(self, outer):
        return self.store.check([f"{self.name}/{outer}/ranks"])

    def last_begun(self, outer):
        with contextlib.suppress(RuntimeError):
            while self.begun(outer + 1):
                outer += 1
        return outer

    def taking_part(self, outer):
        """The ranks of outer step `outer`: those not missed when the first of them came to it."""
        key = f"{self.name}/{outer}/ranks"
        if self.begun(outer):
            agreed = self.store.get(key)
        else:
            missed = absent(self.store, self.ranks) - {self.rank}
            here = " ".join(str(r) for r in self.ranks if r not in missed)
            agreed = self.store.compare_set(key, "", here)
        return [int(r) for r in agreed.split()]

    def group(self):
        """Alone where it has no part."""
        return self.group_in(self.steps // self.inner_steps) or (self.rank,)

    def group_in(self, outer):
        """This replica's group in an outer step, None when it has no part in it."""
        groups = random_groups(self.taking_part(outer), self.group_size, outer, self.seed)
        return next((g for g in groups if self.rank in g), None)

    def key(self, outer, group):
        return f"{self.name}/{outer}/{group[0]}"

    def leap(self):
        """Over outer steps in which nobody is left to meet."""
        now = first = self.steps // self.inner_steps
        while self.catch_up and self.begun(now) and not self.expected(now):
            now += 1
        if now > first:
            self.tell("leapt", outer_steps=now - first)
        self.steps += (now - first) * self.inner_steps

    def hurry(self):
        """Late, and now where the others are: leave out what inner steps are left if a partner waits."""
        now = self.steps // self.inner_steps
        come_back(self.store, self.rank)            # only now: nobody is to wait for one who is far behind
        if self.catch_up and self.begun(now):
            group = self.group()
            if any(self.store.check([f"{self.key(now, group)}/{r}"]) for r in group if r != self.rank):
                self.steps += -(self.steps + 1) % self.inner_steps

    def expected(self, outer):
        """Whether anyone can still come to meet this replica there."""
        group = self.group_in(outer) or (self.rank,)
        others = set(group) - {self.rank}
        if self.store.check([f"{self.key(outer, group)}/members"]):
            return False
        ahead = {r for r in others if whereabouts(self.store, r) >= (outer, "out")}
        return bool(others - ahead - absent(self.store, others))

    # ---- the exchange

    def compare(self):
        """Not here: who is there at the first step is not known."""

    def exchange(self):
        """As NoLoCo.exchange, of the partners that came and whose numbers are finite."""
        outer = self.steps // self.inner_steps
        missing, came, error = set(), set(), ""
        thetas, phis, works = {self.rank: self.theta}, {self.rank: self.phi}, {}
        try:
            self.store.set(f"at/{self.rank}", f"{outer} in")
            group = self.group()
            missing = set(group) - {self.rank}
            key = self.key(outer, group)
            members = wait_for(self.store, key, self.rank, group, self.timeout)
            missed = self.rank not in members or bool(absent(self.store, [self.rank]))
            self.late = missed or len(group) == 1
            came = set(members) - {self.rank} if self.rank in members else set()
            link = connect(self.store, key, self.rank, members, self.timeout)
            if link:
                missing -= came
                self.swap(members, link, thetas, phis, works)
                self.link = link        # lives until the next one: what we sent may still be on its way
        except RuntimeError as lost:    # the store, or a member as we met
            error = str(lost)[:100]
        for partner, mine in works.items():
            try:
                for work in mine:
                    work.wait(timedelta(seconds=self.timeout))
            except RuntimeError as lost:
                error = str(lost)[:100]
                missing.add(partner)
        with contextlib.suppress(RuntimeError):
            self.store.set(f"at/{self.rank}", f"{outer} out")
        if missing:
            self.late = True
            self.fixed = self.last_begun(outer)
            self.tell("outer step without partners", missing=sorted(missing), error=error)
        reached = [r for r in sorted(thetas) if r not in missing]
        self.count(len(reached), came & missing)
        return self.accept(reached, thetas, phis)

    def tell(self, event, **more):
        outer = self.steps // self.inner_steps + 1
        with contextlib.suppress(RuntimeError):             # a lost store is noticed after the step
            self.on_event(dict(event=event, outer=outer, rank=self.rank, **more))

    def count(self, n, unreached):
        """Outer steps done alone; and say it when partners who came, so they live, are never reached."""
        if n > 1:
            self.met = time.monotonic()
            self.in_a_row, self.unreached = 0, set()
            return
        self.alone += len(self.ranks) > 1
        self.in_a_row += 1
        self.unreached |= unreached
        if self.in_a_row % 3 == 0 and self.unreached:
            print(f"rank {self.rank}: three outer steps in a row without partners although they are alive "
                  f"(ranks {sorted(self.unreached)}): it trains alone. Can these hosts connect to them? "
                  f"Gloo uses {gloo_interface() or 'the default interface'} here (GLOO_SOCKET_IFNAME)",
                  file=sys.stderr, flush=True)

    def swap(self, members, link, thetas, phis, works):
        """As NoLoCo.post, within the members' own group, where a rank is a place; works: {partner: [...]}."""
        vectors = {"theta": (self.theta, thetas)}
        if self.gamma != self.beta:
            vectors["phi"] = (self.phi, phis)
        partners = [r for r in members if r != self.rank]
        for tag, (name, (vector, theirs)) in enumerate(vectors.items()):
            mine = self.encode(vector, name)
            for i, r in enumerate(partners):
                theirs[r] = self.buffer((name, i), mine)
                works.setdefault(r, []).append(link.recv([theirs[r]], members.index(r), tag))
            for r in partners:
                works[r].append(link.send([mine], members.index(r), tag))
            self.bytes_sent += len(partners) * mine.nbytes

    def accept(self, ranks, thetas, phis):
        """What is finite of these. A replica that is itself not finite takes a partner's theta as theta and
        phi and delta = 0, and goes on alone with them: then Delta is 0 and Eqs. 1-3 change nothing."""
        sound = [r for r in ranks if all(self.finite(v[r]) for v in (thetas, phis) if r in v)]
        adopts = self.rank not in sound
        if adopts:
            if sound:                                       # else alone: back to the last outer step
                self.adopt(thetas[sound[0]])
            self.theta.copy_(self.phi)
            self.delta.zero_()
        if len(sound) < len(ranks):
            taken = (sound or [self.rank])[0] if adopts else None
            self.tell("not finite", refused=sorted(set(ranks) - set(sound)), adopted=taken)
        if adopts:
            sound = [self.rank]
            if self.on_adopt:
                self.on_adopt()
        needed = [] if self.gamma == self.beta else [phis[r] for r in sound]
        return [self.decode(thetas[r]) for r in sound], needed, len(sound)

    def finite(self, message):
        return bool(torch.isfinite(message.sum()))

    def adopt(self, theta):
        self.phi.copy_(theta)

    # ---- coming back

    def join(self):
        """A replica that comes back takes phi (theta is phi after an outer step), delta and the number of
        steps from a live one, which gives them after its next outer step. RuntimeError: none did within 60
        timeouts."""
        key = f"join/{self.ranks[0]}/{self.store.add(f'joins/{self.ranks[0]}', 1)}"
        self.store.set(f"{key}/{self.rank}", "here")        # already at the meeting, though marked absent
        self.store.set(key, str(self.rank))
        self.store.wait([f"{key}/by"], timedelta(seconds=60 * self.timeout))
        giver, self.steps = map(int, self.store.get(f"{key}/by").split())
        self.hand_over(key, giver, gives=False)
        come_back(self.store, self.rank)
        self.theta.copy_(self.phi)
        self.late = True

    def serve(self):
        """After an outer step: phi and delta to whoever asks to join, unless another gives them."""
        before, self.asked = self.asked, self.store.add(f"joins/{self.ranks[0]}", 0)
        self.joiners |= set(range(before + 1, self.asked + 1))
        for number in sorted(self.joiners):
            key = f"join/{self.ranks[0]}/{number}"
            mine = f"{self.rank} {self.steps}"
            if not self.store.check([key]):         # about to write who it is, or dead
                continue
            self.joiners.remove(number)
            joiner = int(self.store.get(key))
            if joiner != self.rank and self.store.compare_set(f"{key}/by", "", mine).decode() == mine:
                outer = self.steps // self.inner_steps
                self.on_event(dict(event="joined", outer=outer, rank=joiner, given_by=self.rank))
                self.store.set(f"at/{self.rank}", f"{outer} in")
                with contextlib.suppress(RuntimeError):         # it may die again
                    self.hand_over(key, joiner, gives=True)
                    self.met = time.monotonic()
                self.store.set(f"at/{self.rank}", f"{outer} out")

    def hand_over(self, key, other, gives):
        """phi and delta to or from one other replica."""
        members, link = meet(self.store, key, self.rank, sorted((self.rank, other)), self.timeout)
        if link is None:
            raise RuntimeError(f"replica {other} did not come")
        for tag, vector in enumerate((self.phi, self.delta)):
            host = vector.to(self.message_device)
            work = (link.send if gives else link.recv)([host], members.index(other), tag)
            work.wait(timedelta(seconds=self.timeout))
            if not gives:
                vector.copy_(host)
            self.bytes_sent += gives * vector.nbytes
