"""NoLoCo: data parallelism without an all-reduce (arXiv 2506.10911).

N replicas. Replica i keeps slow weights phi_i and trains a copy theta_i for m inner steps with any optimizer. Then a fresh random
group of n replicas, n = 2 unless told otherwise, does the outer step; sums run over the group:

    Delta_i = theta_i - phi_i                                                                   (Eq. 1, outer gradient)
    delta_i <- alpha delta_i + (beta/n) sum_j Delta_j - gamma (phi_i - (1/n) sum_j phi_j)       (Eq. 2, modified momentum)
    phi_i   <- phi_i + delta_i ;  theta_i <- phi_i                                              (Eq. 3)

    0 < gamma < 2 (1 - alpha^2) / (1 - alpha + 2 alpha / n)                                     (when replicas stay together)

When the group is all replicas and phi is equal on all, the gamma term vanishes and the step is DiLoCo's (arXiv 2311.08105).

Where we differ from the paper and from the code released with it:
* The paper prints -beta in Eq. 2 although Delta = theta - phi, which would climb. Its appendix and the released code use +beta, as here.
* What it calls Nesterov momentum is, as printed, heavy-ball momentum. We implement what is printed; DiLoCo here does the same.
* The bound on gamma is ours (second moments of the differences between replicas, for N >> n and without Delta's pull: fewer replicas and
  pull allow more; derived in the README, Stability). The paper's window (its Eq. 74) is neither necessary nor sufficient. gamma is not
  stated in the paper; the released code uses gamma = beta = 0.7, our default.
* Weights, phi and delta are fp32: in bf16 small updates round away and large weights stop moving.

What travels. Eq. 2 regroups to

    delta_i <- alpha delta_i + beta mean(theta) - gamma phi_i + (gamma - beta) mean(phi)        (Eq. 2')

so theta is all that must be sent while training waits. phi is known right after the previous outer step: it is sent then and arrives
during the inner steps. With gamma = beta the last term is zero and phi never travels.

Replicas that may die, hang, be late or come back (`store`; Gloo only): each outer step meets in a process group of its own, and Eq. 2 is done
with those who came and whose numbers are finite. Theta and phi then travel together, in one meeting; nothing is sent ahead.
"""
import contextlib
import functools
import os
import random
import time
from datetime import timedelta

import torch
import torch.distributed as dist

ALIGN = 16          # floats: each tensor of a flat vector starts on a 64-byte boundary
PIECE = 1 << 17     # floats per piece of the outer update: small enough to stay in cache, large enough to hide what starting an operation costs
IN_FLIGHT = {}      # what a NoLoCo sends ahead when training ends: Gloo never delivers a message whose handle is dropped, and hangs


def random_groups(ranks, size, step, seed):
    """A random partition of `ranks` into max(1, N // size) groups whose sizes differ by at most one.

    Everyone who calls it with the same arguments gets the same list of sorted tuples, so no message is needed to agree. Stages
    (lists with different first ranks) draw independently of each other.
    """
    order = list(ranks)
    random.Random(f"groups {seed} {step} {order[0]}").shuffle(order)
    groups = max(1, len(order) // size)
    return [tuple(sorted(order[g::groups])) for g in range(groups)]


def gamma_bound(alpha, n):
    """The gamma below which replicas in groups of n among many stay together (n = 2: 2 (1 - alpha^2)); a few replicas allow a little more."""
    return 2 * (1 - alpha**2) / (1 - alpha + 2 * alpha / n)


def outer_update(phi, delta, mean_Delta, mean_phi, alpha, beta, gamma):
    """Eqs. 2 and 3 in place on phi and delta; all four are tensors of one shape, the means are over the group."""
    delta.mul_(alpha)                                   # alpha delta
    delta.add_(mean_Delta, alpha=beta)                  # + beta/n sum Delta
    if mean_phi is not phi:                             # (else the term is zero: no need to run through memory for it)
        delta.sub_(phi - mean_phi, alpha=gamma)         # - gamma (phi - 1/n sum phi)
    phi.add_(delta)                                     # Eq. 3


def flatten(params):
    """Make parameters and their gradients views into two contiguous fp32 vectors and return these: (theta, grad).

    One message, one optimizer tensor and one norm then serve the whole model, without packing. Each tensor is padded with zeros to
    64 bytes. Called again on the same parameters it returns the same vectors. `.to()` and `zero_grad(set_to_none=True)` replace
    the views: move the model first, and where grad is used zero it in place. Raises ValueError on no parameters, mixed devices or
    anything but fp32.
    """
    params = list(dict.fromkeys(params))                # a tied weight counts once
    if not params:
        raise ValueError("no parameters to flatten")
    for p in params:
        if p.dtype != torch.float32:
            raise ValueError(f"parameters must be float32 (bf16 rounds small updates away; use autocast for speed), got {p.dtype}")
        if p.device != params[0].device:
            raise ValueError(f"parameters must be on one device, got {params[0].device} and {p.device}")
    starts, size = [], 0
    for p in params:
        starts.append(size)
        size += -(-p.numel() // ALIGN) * ALIGN

    def vector(tensors):
        """The vector that these tensors are views into already, else a new one with their values."""
        first = tensors[0]
        if all(t is not None and t.is_contiguous() and t.data_ptr() == first.data_ptr() + 4 * a for t, a in zip(tensors, starts)) \
                and first.untyped_storage().nbytes() >= 4 * (first.storage_offset() + size):
            return first.as_strided((size,), (1,))
        flat = torch.zeros(size, device=params[0].device)
        for t, a in zip(tensors, starts):
            if t is not None:
                flat[a:a + t.numel()].view(t.shape).copy_(t)
        return flat

    theta, grad = vector([p.data for p in params]), vector([p.grad for p in params])
    for p, a in zip(params, starts):
        p.data, p.grad = (v[a:a + p.numel()].view(p.shape) for v in (theta, grad))
    return theta, grad


def meet(store, key, rank, ranks, timeout):
    """Those of `ranks` who come within three quarters of `timeout` seconds, in the order of ranks, and a new Gloo group of them: (members, group).

    A wait that times out closes every connection of its process group, and a restarted process can never be in an old group: hence a
    new one. Whoever finds everyone here, or has waited long enough, writes down who is in. The first to do so counts (compare_set), so
    all go by the same list. Who comes later is not in it and gets no group (None), nor does who is alone. Who was waited for in vain is marked
    absent, and nobody waits for it again until it has come back. Raises RuntimeError when the store or a member is lost.
    """
    def settle(who):
        return store.compare_set(f"{key}/members", "", " ".join(map(str, who))).decode()

    end, seat = time.monotonic() + timeout, {r: f"{key}/{r}" for r in ranks}
    here = lambda: [r for r in ranks if store.check([seat[r]])]
    store.set(seat[rank], "here")
    if store.check(list(seat.values())) or all(store.check([seat[r]]) or store.check([f"absent/{r}"]) for r in ranks):
        members = settle(here())
    else:
        try:
            store.wait([f"{key}/members"], timedelta(seconds=0.75 * timeout))
            members = store.get(f"{key}/members").decode()
        except dist.DistStoreError:             # nobody has settled it in time
            came = here()
            for r in set(ranks) - set(came):
                store.set(f"absent/{r}", key)
            members = settle(came)
    members = tuple(int(r) for r in members.split())
    if rank not in members:
        store.delete_key(f"absent/{rank}")      # late, but back
    if rank not in members or len(members) == 1:
        return members, None
    return members, gloo_group(store, key, members.index(rank), len(members), max(0.001, end - time.monotonic()))


def gloo_group(store, key, place, size, timeout):
    """A new Gloo group of `size` processes, this one at `place`, who find each other under `key`; timeout: seconds for that and for each message."""
    options = dist.ProcessGroupGloo._Options()
    options._devices, options._threads, options._timeout = [gloo_device()], 1, timedelta(seconds=timeout)
    return dist.ProcessGroupGloo(dist.PrefixStore(key, store), place, size, options)


@functools.cache
def gloo_device():
    """One for all groups of the process: a device of its own would double what a new group costs."""
    return dist.ProcessGroupGloo.create_default_device()


class NoLoCo:
    """Eqs. 1-3 for any torch model and optimizer: call `step()` after every inner optimizer step.

    params: the model's parameters, equal on all replicas at the start; made flat (see `flatten`).
    ranks: the global ranks of this model's (or this stage's) replicas; default all. Without torch.distributed, this process alone.
    inner_steps: optimizer steps per outer step (m). group_size: n, from 2 to all. seed: of the random groups.
    store: a torch.distributed store that every replica reaches: then no failure of a partner is an error (`meet`), an outer step waits for
    its partners at most `timeout` seconds, and neither NCCL nor a default process group is used (ranks come from RANK and WORLD_SIZE).
    events: what did not go as drawn, one dict each, until the caller takes them away. adopted: whether this replica's numbers were not finite
    in the last outer step, so that it took a partner's; reset the inner optimizer's state then. A replica that came too late, or waited in
    vain, cuts its next inner steps short as soon as a partner waits for it (unless catch_up is set to False). A lost store raises RuntimeError, after the step.
    Memory beside the model: phi, delta and one receive buffer per partner, each of the parameters' size; twice the buffers when
    gamma != beta. With fewer than two replicas an outer step is Eqs. 1-3 with n = 1.
    """

    def __init__(self, params, ranks=None, *, inner_steps=50, alpha=0.5, beta=0.7, gamma=0.7, group_size=2, seed=0, store=None, timeout=60.0):
        joined = store is None and dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if joined else int(os.environ["RANK"]) if store else 0
        self.ranks = list(ranks) if ranks is not None else list(range(dist.get_world_size() if joined else int(os.environ["WORLD_SIZE"]) if store else 1))
        if self.rank not in self.ranks:
            raise ValueError(f"rank {self.rank} is not among the replicas {self.ranks}")
        if inner_steps < 1:
            raise ValueError(f"inner_steps must be at least 1, got {inner_steps}")
        if group_size < 2:
            raise ValueError(f"group_size must be at least 2, got {group_size}")
        self.params = list(dict.fromkeys(params))
        self.theta, _ = flatten(self.params)
        self.addresses = [p.data_ptr() for p in self.params]
        self.phi, self.delta = self.theta.clone(), torch.zeros_like(self.theta)
        self.inner_steps, self.group_size, self.seed = inner_steps, group_size, seed
        self.alpha, self.beta, self.gamma = alpha, beta, gamma
        self.steps, self.bytes_sent, self.ahead, self.buffers = 0, 0, None, {}
        self.store, self.timeout, self.events, self.adopted, self.late, self.catch_up = store, timeout, [], False, False, True
        nccl = joined and self.theta.is_cuda and "nccl" in str(dist.get_backend_config())
        self.staged = (joined or store is not None) and self.theta.is_cuda and not nccl         # Gloo sends host memory only
        self.ahead_group, self.asked, self.joiners = None, store.add(f"joins/{self.ranks[0]}", 0) if store else 0, set()
        if nccl:        # the first use of a group must have everyone in it; every rank of the job makes its NoLoCo, so everyone is here
            dist.barrier()
            if gamma != beta:       # NCCL runs what is posted on a group in turn: phi, long in flight, must not hold up what follows it
                self.ahead_group = dist.new_group()
                dist.barrier(self.ahead_group)

    def group(self, outer):
        """The sorted ranks that do outer step number `outer` together, this one among them."""
        return next(g for g in random_groups(self.ranks, self.group_size, outer, self.seed) if self.rank in g)

    def meeting(self):
        """Under which key the outer step that ends the present inner steps meets, and its group."""
        outer = (self.steps - 1) // self.inner_steps
        group = self.group(outer)
        return f"outer/{outer}/{group[0]}", group

    def step(self):
        """Count one inner step and, when it is due, do the outer step; returns whether it did one."""
        if self.ahead is None:          # the first call, or the first after loading
            self.send_ahead()
        self.steps += 1
        if self.late and self.catch_up:
            key, group = self.meeting()
            if any(self.store.check([f"{key}/{r}"]) for r in group if r != self.rank):
                self.steps += -self.steps % self.inner_steps
        if self.steps % self.inner_steps:
            return False
        if [p.data_ptr() for p in self.params] != self.addresses:
            raise RuntimeError("parameters were moved after NoLoCo took them: move the model first (.to, .cuda), then build NoLoCo")
        if vectors := self.exchange():
            self.outer_step(*vectors)
        if self.store is None:
            self.send_ahead()
        else:
            self.serve()
        return True

    def send_ahead(self):
        """phi to the next partners, if Eq. 2' needs it: it arrives during the inner steps."""
        if self.gamma != self.beta and self.store is None:
            self.ahead = IN_FLIGHT[id(self)] = self.post("phi", self.phi, self.group(self.steps // self.inner_steps), self.ahead_group)

    def post(self, name, vector, group, process_group=None):
        """Post one message each way with every partner at once, so that no pair waits for another; returns {rank: vector} and works."""
        partners, tag = [r for r in group if r != self.rank], int(name == "phi")
        if self.staged:
            host = self.buffer(name, "out", vector)
            vector = host.copy_(vector)
        vectors = {r: vector if r == self.rank else self.buffer(name, partners.index(r), vector) for r in group}
        self.bytes_sent += len(partners) * vector.nbytes
        if self.store is not None:      # a group of just these, its ranks are places in it
            return vectors, [process_group.recv([vectors[r]], group.index(r), tag) for r in partners] \
                + [process_group.send([vector], group.index(r), tag) for r in partners]
        ops = [dist.P2POp(dist.irecv, vectors[r], r, process_group, tag=tag) for r in partners]
        ops += [dist.P2POp(dist.isend, vector, r, process_group, tag=tag) for r in partners]
        return vectors, dist.batch_isend_irecv(ops) if ops else []

    def buffer(self, name, place, like):
        if (name, place) not in self.buffers:
            self.buffers[name, place] = (torch.empty(like.shape, dtype=like.dtype, pin_memory=True) if self.staged else torch.empty_like(like))
        return self.buffers[name, place]

    def exchange(self):
        """The group's theta and phi vectors in the order of its ranks; without phi (None) when Eq. 2' does not need it."""
        outer = self.steps // self.inner_steps - 1
        if self.store is not None:
            return self.accept(outer, *self.tentative())
        thetas, works = self.post("theta", self.theta, self.group(outer))
        phis, more = self.ahead or (None, [])
        for work in works + more:
            work.wait()             # our own sends too: what they read is about to change
        return self.accept(outer, thetas, phis)

    def tentative(self):
        """The exchange with those who come, and of these the ones whose vectors arrive whole; when all are lost, our own."""
        (key, group), start = self.meeting(), time.monotonic()
        partners, works, error, thetas, phis = [], [], "", {self.rank: self.theta}, {self.rank: self.phi}
        try:
            members, link = meet(self.store, key, self.rank, group, self.timeout)
            self.late = self.rank not in members or len(members) < len(group) and time.monotonic() - start > self.timeout / 2
            if link:
                partners = [r for r in members if r != self.rank]
                thetas, works = self.post("theta", self.theta, members, link)
                if self.gamma != self.beta:
                    phis, more = self.post("phi", self.phi, members, link)
                    works += more
                self.link = link        # lives until the next one: what we sent may still be on its way
        except RuntimeError as lost:    # the store, or a member as we met
            partners, error = [], str(lost)[:100]
        missing = set(group) - {self.rank, *partners}
        for place, work in enumerate(works):
            try:
                work.wait(timedelta(seconds=max(0.001, start + self.timeout - time.monotonic())))
            except RuntimeError as lost:
                missing.add(partners[place % len(partners)])
                error = str(lost)[:100]
        if missing:
            self.events.append(dict(event="outer step without partners", outer=self.steps // self.inner_steps, rank=self.rank,
                                    missing=sorted(missing), late=self.late, error=error))
        thetas, phis = ({r: v for r, v in vectors.items() if r not in missing} for vectors in (thetas, phis))
        return thetas, None if self.gamma == self.beta else phis

    def accept(self, outer, thetas, phis):
        """What is finite of these, as lists. A replica that is itself not finite takes a partner's theta as theta and phi, and delta = 0: None."""
        finite = lambda r: all(bool(torch.isfinite(v[r].sum())) for v in (thetas, phis) if v)
        sound = [r for r in thetas if finite(r)]
        self.adopted = self.rank not in sound
        if len(sound) < len(thetas):
            self.events.append(dict(event="not finite", outer=outer + 1, rank=self.rank, refused=sorted(set(thetas) - set(sound)),
                                    adopted=(sound or [self.rank])[0] if self.adopted else None))
        if not self.adopted:
            return [thetas[r] for r in sound], phis and [phis[r] for r in sound]
        self.phi.copy_(thetas[sound[0]] if sound else self.phi)         # alone: back to the last outer step
        self.theta.copy_(self.phi)
        self.delta.zero_()

    def outer_step(self, thetas, phis=None, n=None):
        """Eqs. 1-3 in pieces that stay in cache: the update is bound by memory, not by arithmetic. n: how many replicas' theta the
        vectors add up to, when it is not the number of vectors."""
        n, own = n or len(thetas), (self.theta, self.phi, self.delta)
        pieces = [zip(*(v.split(1 << 24 if self.theta.is_cuda else PIECE) for v in vectors)) for vectors in (own, thetas, phis or [self.phi])]
        for (theta, phi, delta), some_thetas, some_phis in zip(*pieces):
            # Eq. 2': with gamma = beta mean(phi) cancels, so any value serves; our own phi makes the gamma term zero
            mean_phi = total(some_phis, theta.device) / n if phis else phi
            # Eq. 1, summed (it may overwrite theta, which becomes phi in any case). Eq. 2 takes beta/n times the sum: to make it a mean
            # first would be one more pass over memory
            sum_Delta = total(some_thetas, theta.device).sub_(mean_phi, alpha=n)
            outer_update(phi, delta, sum_Delta, mean_phi, self.alpha, self.beta / n, self.gamma)
            theta.copy_(phi)

    def state_dict(self):
        """phi, delta and the number of inner steps; theta is in the model. A phi in flight is sent again after loading."""
        return {"phi": self.phi, "delta": self.delta, "steps": self.steps}

    def join(self):
        """A replica that comes back takes phi (theta is phi after an outer step), delta and the number of steps from a live one, which gives them
        after its next outer step. Raises RuntimeError when none answers within 60 timeouts."""
        key = f"join/{self.ranks[0]}/{self.store.add(f'joins/{self.ranks[0]}', 1)}"
        self.store.set(f"{key}/{self.rank}", "here")        # already at the meeting: being marked absent, we would not be waited for
        self.store.set(key, str(self.rank))
        self.store.wait([f"{key}/by"], timedelta(seconds=60 * self.timeout))
        giver, self.steps = map(int, self.store.get(f"{key}/by").decode().split())
        self.hand_over(key, giver, gives=False)
        self.store.delete_key(f"absent/{self.rank}")
        self.theta.copy_(self.phi)

    def serve(self):
        """After an outer step: give phi and delta to whoever asked to join since the last time, unless another replica does."""
        before, self.asked = self.asked, self.store.add(f"joins/{self.ranks[0]}", 0)
        self.joiners |= set(range(before + 1, self.asked + 1))
        for number in sorted(self.joiners):
            key, mine = f"join/{self.ranks[0]}/{number}", f"{self.rank} {self.steps}"
            if not self.store.check([key]):         # about to write who it is, or dead
                continue
            self.joiners.remove(number)
            joiner = int(self.store.get(key))
            if joiner != self.rank and self.store.compare_set(f"{key}/by", "", mine).decode() == mine:
                self.events.append(dict(event="joined", outer=self.steps // self.inner_steps, rank=joiner, given_by=self.rank))
                with contextlib.suppress(RuntimeError):         # it may die again
                    self.hand_over(key, joiner, gives=True)

    def hand_over(self, key, other, gives):
        """phi and delta to or from one other replica."""
        members, link = meet(self.store, key, self.rank, sorted((self.rank, other)), self.timeout)
        if link is None:
            raise RuntimeError(f"replica {other} did not come")
        for tag, vector in enumerate((self.phi, self.delta)):
            host = vector.cpu() if self.staged else vector
            (link.send if gives else link.recv)([host], members.index(other), tag).wait(timedelta(seconds=self.timeout))
            if not gives:
                vector.copy_(host)
            self.bytes_sent += gives * vector.nbytes

    def load_state_dict(self, state):
        """All replicas load together. Raises ValueError when the state is of another model."""
        if state["phi"].shape != self.phi.shape:
            raise ValueError(f"the state holds {state['phi'].numel()} weights, this model {self.phi.numel()}")
        for work in self.ahead[1] if self.ahead else []:
            work.wait()             # the partner loads too, so its message is on the way
        self.ahead = None
        self.phi.copy_(state["phi"])
        self.delta.copy_(state["delta"])
        self.steps = state["steps"]


def total(vectors, device):
    """The vectors' sum (of one vector itself), taken in the given order: a group of everyone gets the same bits on every replica."""
    return functools.reduce(torch.add, (v.to(device, non_blocking=True) for v in vectors))


class DiLoCo(NoLoCo):
    """The special case of one group with everyone (arXiv 2311.08105), by one flat all-reduce, as the baseline that it is."""

    def __init__(self, params, ranks=None, *, inner_steps=100, alpha=0.3, beta=0.7):
        super().__init__(params, ranks, inner_steps=inner_steps, alpha=alpha, beta=beta, gamma=beta)
        if len(self.ranks) > 1:
            self.all = dist.new_group(self.ranks, use_local_synchronization=True)

    def exchange(self):
        n = len(self.ranks)
        if n > 1:                   # in place: theta becomes phi in any case
            dist.all_reduce(self.theta, group=self.all)
            self.bytes_sent += 2 * (n - 1) * self.theta.nbytes // n        # of a ring all-reduce
        return [self.theta], None, n
