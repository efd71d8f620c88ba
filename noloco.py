"""NoLoCo: data parallelism without an all-reduce (arXiv 2506.10911).

Replica i keeps slow weights phi_i and trains a copy theta_i for m inner steps, with any optimizer.
Then a random group of n replicas (two, unless told otherwise) does the outer step; means are the group's:

    Delta_i = theta_i - phi_i                                                          (Eq. 1)
    delta_i <- alpha delta_i + beta mean(Delta) - gamma (phi_i - mean(phi))            (Eq. 2)
    phi_i   <- phi_i + delta_i ;   theta_i <- phi_i                                    (Eq. 3)

With a group of everyone and equal phi this is DiLoCo (arXiv 2311.08105). Eq. 2 regroups to

    delta_i <- alpha delta_i + beta mean(theta) - gamma phi_i + (gamma - beta) mean(phi)     (Eq. 2')

so training waits for theta alone: phi is known when the inner steps begin and travels during them,
and with gamma = beta, as in the released code, it does not travel at all.

Where we differ: the paper prints -beta in Eq. 2, which would climb; its appendix and the released code
have +beta. What it calls Nesterov momentum is, as printed, heavy-ball momentum, here too. Weights, phi and
delta are fp32. docs/differences.md has the rest, docs/stability.md the proof of `gamma_bound`.
"""
import contextlib
import functools
import os
import random
import socket
import warnings
from itertools import accumulate

import torch
import torch.distributed as dist

ALIGN = 16          # floats: each tensor of a flat vector starts on a 64-byte boundary
PIECE = 1 << 17     # floats: the outer step's share that stays in cache; memory, not arithmetic, is its bound


def random_groups(ranks, size, step, seed):
    """A random partition of `ranks` into max(1, N // size) groups whose sizes differ by at most one.

    All who call it with the same arguments draw the same list of sorted tuples: nobody has to agree.
    """
    order = list(ranks)
    random.Random(f"groups {seed} {step} {order[0]}").shuffle(order)    # order[0]: each stage draws its own
    count = max(1, len(order) // size)
    return [tuple(sorted(order[g::count])) for g in range(count)]


def outer_update(phi, delta, mean_Delta, mean_phi, alpha, beta, gamma):
    """Eqs. 2 and 3 in place on phi and delta."""
    delta.mul_(alpha)                                   # alpha delta
    delta.add_(mean_Delta, alpha=beta)                  # + beta mean(Delta)
    if mean_phi is not phi:                             # (else there is nothing to pull)
        delta.sub_(phi - mean_phi, alpha=gamma)         # - gamma (phi - mean(phi))
    phi.add_(delta)                                     # Eq. 3


def gamma_bound(alpha, n, replicas=None):
    """Replicas in groups of n stay together for 0 < gamma < this bound (ours; a few replicas allow more).

    replicas: how many there are, default far more than n. kept: 1 - k of the proof.
    """
    kept = (max(1, replicas // n) - 1) / (replicas - 1) if replicas else 1 / n
    return 2 * (1 - alpha**2) / (1 - alpha + 2 * alpha * kept) if kept else 2 * (1 + alpha)


class NoLoCo:
    """Eqs. 1-3 for any model and optimizer: call `step()` after every step of the inner optimizer.

    params: model.parameters(), equal on all replicas, and from here on views of one vector (`flatten`, which
    says what it refuses). Frozen ones (requires_grad=False) stay as they are and do not travel. Nor do the
    model's buffers: each replica keeps its own.
    ranks: the replicas of this model, pipeline stage or shard, default all. inner_steps: m. group_size: n.
    Memory: phi, delta and a receive buffer per partner (two, if gamma differs from beta), all like theta.
    The first of the ranks warns of a gamma beyond `gamma_bound`, and of initial weights that differ.
    """

    def __init__(self, params, ranks=None, *, inner_steps=50, alpha=0.5, beta=0.7, gamma=None,
                 group_size=2, seed=0):
        if inner_steps < 1 or group_size < 2:
            raise ValueError(f"inner_steps >= 1 and group_size >= 2, not {inner_steps} and {group_size}")
        self.inner_steps, self.group_size, self.seed = inner_steps, group_size, seed
        self.alpha, self.beta, self.gamma = alpha, beta, beta if gamma is None else gamma
        self.params = checked(params)
        self.theta, _ = flatten(self.params)
        self.phi = self.theta.clone()
        self.delta = torch.zeros_like(self.theta)
        self.places = self.whereabouts()
        self.steps = self.bytes_sent = 0
        self.letter = self.theta                                # a message is of this form
        self.pieces = 1 << 24 if self.theta.is_cuda else PIECE  # the outer step goes through in these
        self.buffers = {}
        self.ahead = self.lane = None
        joined = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if joined else 0
        self.ranks = list(range(dist.get_world_size() if joined else 1) if ranks is None else ranks)
        if joined and self.rank not in self.ranks:
            raise ValueError(f"rank {self.rank} is not among the replicas {self.ranks}")
        if self.rank == self.ranks[0] and len(self.ranks) > 1:
            bound = gamma_bound(alpha, group_size, len(self.ranks))
            if not 0 < self.gamma < bound:
                warnings.warn(f"gamma {self.gamma} is outside 0 < gamma < {bound:.3f}: replicas drift apart")
        nccl = joined and "nccl" in str(dist.get_backend_config())
        self.wire = self.theta.device if nccl else torch.device("cpu")      # Gloo sends host memory only
        if joined and self.gamma != beta:
            self.lane = dist.new_group()                        # phi travels long: theta must overtake it
        if nccl:                                                # whose groups begin with everyone
            dist.barrier()
            dist.barrier(self.lane)

    @torch.no_grad()
    def step(self):
        """Count an inner step; the m-th ends with the outer step. Returns whether this one did."""
        if self.steps == 0 and len(self.ranks) > 1:
            self.compare()
        if self.ahead is None:
            self.ahead = self.send_ahead()
        due = (self.steps + 1) % self.inner_steps == 0
        if due:
            if self.whereabouts() != self.places:
                raise RuntimeError("parameters were moved (.to), frozen or unfrozen: first that, then NoLoCo")
            self.outer_step(*self.exchange())
            self.ahead = None
        self.steps += 1
        return due

    def whereabouts(self):
        return [p.requires_grad and p.data_ptr() for p in self.params]

    def compare(self):
        """Once, at the first step: all send the first replica a checksum of their initial weights."""
        first, *others = self.ranks
        # in pieces: torch's sum copies what it adds as int64
        mine = sum(v.view(torch.int32).sum() for v in self.phi.split(self.pieces)).to(self.wire)
        sums = {r: torch.empty_like(mine) for r in others}
        ops = [dist.P2POp(dist.irecv, theirs, r) for r, theirs in sums.items()]
        if self.rank != first:
            ops = [dist.P2POp(dist.isend, mine, first)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        if self.rank == first and (differ := [r for r in others if sums[r] != mine]):
            warnings.warn(f"ranks {differ} began with other weights than rank {first}: seed all alike")

    def outer_step(self, thetas, phis, n):
        """Eqs. 1-3. n: how many replicas the thetas add up to; phis: None where Eq. 2' does not need them."""
        def mean(vectors):                                              # by rank: the same bits for all
            return functools.reduce(torch.add, vectors) / n

        vectors = (self.theta, self.phi, self.delta, *thetas, *(phis or ()))
        for theta, phi, delta, *others in zip(*(v.split(self.pieces) for v in vectors)):
            others = [v.to(theta.device) for v in others]
            mean_phi = mean(others[len(thetas):]) if phis else phi      # gamma = beta: any value serves
            mean_Delta = mean(others[:len(thetas)]) - mean_phi          # Eq. 1
            outer_update(phi, delta, mean_Delta, mean_phi, self.alpha, self.beta, self.gamma)
            theta.copy_(phi)                                            # Eq. 3

    def group(self):
        """The ranks that end the present inner steps together, this one among them."""
        groups = random_groups(self.ranks, self.group_size, self.steps // self.inner_steps, self.seed)
        return next(g for g in groups if self.rank in g)

    def send_ahead(self):
        """Eq. 2': phi leaves with the first of the inner steps."""
        return self.post("phi", self.phi, self.lane) if self.gamma != self.beta else (None, [])

    def exchange(self):
        """The group's thetas, its phis if Eq. 2' needs them, and n."""
        thetas, works = self.post("theta", self.theta)
        phis, more = self.ahead
        for work in works + more:
            work.wait()                         # also for what we sent: it is about to change
        return thetas, phis, len(thetas)

    def post(self, name, vector, lane=None):
        """Swap a vector with all partners at once: ([the group's vectors, by rank], what to wait for)."""
        group = self.group()
        partners = [r for r in group if r != self.rank]
        if not partners:
            return [vector], []
        mine = self.write(name, vector)
        theirs = {r: self.buffer((name, i)) for i, r in enumerate(partners)}
        ops = [dist.P2POp(dist.irecv, theirs[r], r, lane) for r in partners]
        ops += [dist.P2POp(dist.isend, mine, r, lane) for r in partners]
        self.bytes_sent += len(partners) * mine.nbytes
        return [theirs.get(r, vector) for r in group], dist.batch_isend_irecv(ops)

    def write(self, name, vector):
        """The message: the vector itself, where Gloo or NCCL can send it."""
        return vector if vector.device == self.wire else self.buffer((name, "out")).copy_(vector)

    def buffer(self, key):
        """Room for a message."""
        if key not in self.buffers:
            pin = self.theta.device != self.wire
            self.buffers[key] = torch.empty_like(self.letter, device=self.wire, pin_memory=pin)
        return self.buffers[key]

    def settle(self):
        """Let a phi under way arrive. Gloo needs it before a process ends in the midst of inner steps."""
        for work in self.ahead[1] if self.ahead else []:
            work.wait()
        self.ahead = None

    def state_dict(self):
        """theta is in the model; a phi under way is sent again after loading."""
        return {"phi": self.phi, "delta": self.delta, "steps": self.steps}

    def load_state_dict(self, state):
        """All replicas load together. Raises ValueError when the state is of another model."""
        if state["phi"].shape != self.phi.shape:
            raise ValueError(f"the state holds {len(state['phi'])} weights, this model {len(self.phi)}")
        self.settle()                           # the partner loads too, so its phi is on the way
        self.phi.copy_(state["phi"])
        self.delta.copy_(state["delta"])
        self.steps = state["steps"]


class DiLoCo(NoLoCo):
    """The special case of one group with everyone, by an all-reduce: the baseline."""

    def __init__(self, params, ranks=None, *, inner_steps=100, alpha=0.3, beta=0.7):
        everyone = float("inf")
        super().__init__(params, ranks, inner_steps=inner_steps, alpha=alpha, beta=beta, group_size=everyone)
        alone = len(self.ranks) == 1
        self.everyone = None if alone else dist.new_group(self.ranks, use_local_synchronization=True)

    def exchange(self):
        n = len(self.ranks)
        if n > 1:                               # in place: theta becomes phi in any case
            dist.all_reduce(self.theta, group=self.everyone)
            self.bytes_sent += 2 * (n - 1) * self.theta.nbytes // n         # what a ring sends
        return [self.theta], None, n


def checked(params):
    """A list of them. TypeError, ValueError: what nobody should flatten."""
    params = [params] if isinstance(params, torch.nn.Module) else list(params)
    if not all(isinstance(p, torch.Tensor) for p in params):
        raise TypeError("give model.parameters(): not the model, named_parameters() or param groups")
    if any(hasattr(p, "placements") or hasattr(p, "_fsdp_flattened") for p in params):      # DTensor, FSDP
        raise ValueError("sharded parameters: give NoLoCo plain copies of this rank's shards, and as ranks= "
                         "the ranks that hold the same shards (docs/hosts.md)")
    return params


def flatten(params):
    """Make parameters and gradients views of two fp32 vectors: one message, one Adam, one norm. Returns
    these two.

    Frozen parameters (requires_grad=False) are left alone. Whoever calls it again gets the same two. Move
    the model first, and zero gradients in place. Raises TypeError on what is no tensor; ValueError on
    sharded parameters, and where those to train are none, on mixed devices or anything but fp32.
    """
    params = [p for p in dict.fromkeys(checked(params)) if p.requires_grad]     # a tied weight counts once
    if len({p.device for p in params}) != 1 or {p.dtype for p in params} != {torch.float32}:
        raise ValueError("give trainable float32 parameters (bf16 rounds small updates away), on one device")
    *starts, size = accumulate((-(-p.numel() // ALIGN) * ALIGN for p in params), initial=0)

    def vector(tensors):
        first = tensors[0]
        if all(t is not None and t.is_contiguous() and t.data_ptr() == first.data_ptr() + 4 * a
               for t, a in zip(tensors, starts)) \
                and first.untyped_storage().nbytes() >= 4 * (first.storage_offset() + size):
            return first.as_strided((size,), (1,))                      # they are views of one already
        flat = torch.zeros(size, device=params[0].device)
        for t, a in zip(tensors, starts):
            if t is not None:
                flat[a:a + t.numel()].view(t.shape).copy_(t)
        return flat

    theta, grad = vector([p.data for p in params]), vector([p.grad for p in params])
    for p, a in zip(params, starts):
        p.data, p.grad = (v[a:a + p.numel()].view(p.shape) for v in (theta, grad))
    return theta, grad


def gloo_interface():
    """Call before init_process_group("gloo"): the network interface of all Gloo groups, torch's own too
    (Linux).

    As GLOO_SOCKET_IFNAME says (a comma list too). Unset, it becomes the one from which this host reaches
    MASTER_ADDR; torch alone would take the address of the host's own name, which Debian has as 127.0.1.1.
    """
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        import fcntl
        one_host = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
        master = "127.0.0.1" if one_host else os.environ.get("MASTER_ADDR", "127.0.0.1")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((master, 1))                                  # sends nothing
            here = socket.inet_aton(probe.getsockname()[0])
            for _, name in socket.if_nameindex():
                with contextlib.suppress(OSError):                      # it may have no address
                    answer = fcntl.ioctl(probe, 0x8915, name.encode().ljust(40, b"\0"))     # SIOCGIFADDR
                    if answer[20:24] == here:
                        os.environ["GLOO_SOCKET_IFNAME"] = name
    return os.environ.get("GLOO_SOCKET_IFNAME", "")
