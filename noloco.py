"""NoLoCo: data parallelism without an all-reduce (arXiv 2506.10911).

Replica i keeps slow weights phi_i and trains a copy theta_i for m inner steps, with any optimizer.
Then a random group of n replicas (usually two) does the outer step. Means are over the group, and delta_i
starts at 0. alpha is the momentum, beta the outer learning rate, gamma the pull towards mean(phi):

    Delta_i = theta_i - phi_i                                                              (N1)
    delta_i <- alpha delta_i + beta mean(Delta) - gamma (phi_i - mean(phi))                (N2)
    phi_i   <- phi_i + delta_i ;   theta_i <- phi_i                                        (N3)

N1 to N3 are the paper's Eqs. 1 to 3. With a group of everyone and equal phi they are DiLoCo's step
(arXiv 2311.08105) but for its true Nesterov momentum. What travels follows from N2 with N1 put in:

    delta_i <- alpha delta_i + beta (mean(theta) - phi_i) + (gamma - beta) (mean(phi) - phi_i)   (N2')

With gamma = beta the last term vanishes. So phi stays at home, and theta is the only message: half of the
released code's bytes. The released code sets gamma = beta (the paper gives no value), which is the default.

Deviations: the paper prints -beta in N2, which would climb; its appendix and the released code have +beta.
What it calls Nesterov momentum is, as printed, heavy-ball momentum, here too. The paper sends phi during the
inner steps; here phi, where it travels at all, goes beside theta (plumbing/overlap.py sends it ahead).
Weights, phi and delta are fp32. docs/differences.md lists the rest.
"""
import random
import warnings
from functools import reduce
from itertools import accumulate

import torch
import torch.distributed as dist


def random_groups(ranks, size, step, seed):
    """A random partition of the N `ranks` into max(1, N // size) groups whose sizes differ by at most one.

    So a group has `size` to 2 size - 1 ranks, or all N if there are fewer. step: the outer step's number.
    Calls with equal arguments, ranks in the same order, draw equal lists: replicas agree without a message.
    """
    order = list(ranks)
    random.Random(f"groups {seed} {step} {order[0]}").shuffle(order)    # order[0]: pipeline stages draw apart
    count = max(1, len(order) // size)
    return [tuple(sorted(order[g::count])) for g in range(count)]


def outer_update(phi, delta, mean_theta, mean_phi, alpha, beta, gamma):
    """N2' and N3's phi, in place on phi and delta. mean_phi may be None where gamma = beta.

    torch's keyword `alpha` is the factor of what is added, not the momentum.
    """
    delta.mul_(alpha)                                       # alpha delta
    delta.add_(mean_theta - phi, alpha=beta)                # + beta (mean(theta) - phi)
    if gamma != beta:
        delta.add_(mean_phi - phi, alpha=gamma - beta)      # + (gamma - beta) (mean(phi) - phi)
    phi.add_(delta)                                         # N3


class NoLoCo:
    """N1 to N3 for any model and optimizer: call `step()` after every step of the inner optimizer.

    First call init_process_group, then load, tie and move the model, then make this: phi starts as the
    weights are now. Numbers that are not finite are not checked here.
    params: model.parameters(), equal on all replicas. They become views of one vector (see `flatten`, also
    for the errors). Frozen parameters and buffers stay as they are and do not travel.
    ranks: the global ranks of this model's replicas (of this pipeline stage, of this shard); None: all.
    inner_steps: m. group_size: n. gamma: None means beta. The optimizer may set gradients to None.
    Memory beside the model: phi, delta and one receive buffer per partner, each as large as theta. CUDA over
    Gloo also has a buffer to send from. There are twice as many buffers where gamma differs from beta.
    NCCL: call torch.distributed.barrier() once before, since its first message must have every rank in it.
    Replicas stay together, in mean square, for gamma = beta, 0 < gamma < 2 (1 - alpha^2) / (1 - alpha +
    2 alpha / n): ours, for many replicas, plain SGD and a quadratic loss (docs/stability.md).
    """

    def __init__(self, params, ranks=None, *, inner_steps=50, alpha=0.5, beta=0.7, gamma=None,
                 group_size=2, seed=0):
        # torchrun without init_process_group: each process would train alone, silently
        alone = ranks is None and dist.is_torchelastic_launched() and not dist.is_initialized()
        self.rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.ranks = list(range(world) if ranks is None else ranks)
        if inner_steps < 1 or group_size < 2 or alone or (world > 1 and self.rank not in self.ranks):
            raise ValueError("needs init_process_group, its rank in ranks, inner_steps >= 1, group_size >= 2")
        self.inner_steps, self.group_size, self.seed = inner_steps, group_size, seed
        self.alpha, self.beta, self.gamma = alpha, beta, beta if gamma is None else gamma
        self.params = list(params)
        self.theta, _ = flatten(self.params)
        self.phi, self.delta = self.theta.clone(), torch.zeros_like(self.theta)
        self.places = self.whereabouts()
        self.pieces = 1 << 24 if self.theta.is_cuda else 1 << 17    # floats in a piece: on CPUs in cache
        self.steps = self.bytes_sent = self.alike = 0
        self.buffers = {}
        nccl = world > 1 and "nccl" in str(dist.get_backend_config())
        self.message_device = self.theta.device if nccl else torch.device("cpu")    # Gloo sends host memory

    @torch.no_grad()
    def step(self):
        """Count an inner step; the m-th ends with the outer step. Returns whether this one did."""
        if self.steps == 0 and len(self.ranks) > 1:
            self.compare()
        due = (self.steps + 1) % self.inner_steps == 0
        if due:
            if self.whereabouts() != self.places:
                raise RuntimeError("parameters were moved (.to), frozen or unfrozen: first that, then NoLoCo")
            self.outer_step(*self.exchange())
        self.steps += 1
        return due

    def outer_step(self, thetas, phis, n):
        """N1 to N3. n: how many replicas the thetas add up to; DiLoCo passes one sum of n.

        phis: empty where gamma = beta.
        """
        vectors = self.theta, self.phi, self.delta, *thetas, *phis
        for theta, phi, delta, *others in zip(*(v.split(self.pieces) for v in vectors)):
            others = [v.to(theta.device) for v in others]
            mean_theta = reduce(torch.add, others[:len(thetas)]) / n        # by rank: the same bits for all
            mean_phi = reduce(torch.add, others[len(thetas):]) / n if phis else None
            outer_update(phi, delta, mean_theta, mean_phi, self.alpha, self.beta, self.gamma)
            theta.copy_(phi)                                                # N3

    def group(self):
        """The group of the next outer step: its ranks, this one among them."""
        groups = random_groups(self.ranks, self.group_size, self.steps // self.inner_steps, self.seed)
        return next(g for g in groups if self.rank in g)

    def exchange(self):
        """The group's thetas and, where gamma is not beta, phis, by rank, its own among them; and n."""
        vectors = {"theta": self.theta} | ({} if self.gamma == self.beta else {"phi": self.phi})
        (thetas, *phis), works = self.post(self.group(), vectors)
        for work in works:
            work.wait()                         # also for what this replica sent, which is about to change
        self.notice(thetas)                     # averaged gradients would make outer steps useless
        return thetas, phis[0] if phis else [], len(thetas)

    def post(self, group, vectors, lane=None):
        """Swap {name: vector} with the partners: (for each name the group's vectors, by rank; works).

        Both directions are posted at once. Messages have no tags: a pair's match by the order of `vectors`. A
        partner's vector is there when the works are done.
        lane: the process group to send in (None: the default one).
        """
        partners = [r for r in group if r != self.rank]
        ops, arriving = [], []
        for name, vector in vectors.items():
            mine = self.encode(vector, name)
            theirs = {r: self.buffer((name, i), mine) for i, r in enumerate(partners)}
            ops += [dist.P2POp(dist.irecv, theirs[r], r, lane) for r in partners]
            ops += [dist.P2POp(dist.isend, mine, r, lane) for r in partners]
            arriving.append([self.decode(theirs[r]) if r in theirs else vector for r in group])
            self.bytes_sent += len(partners) * mine.nbytes
        return arriving, dist.batch_isend_irecv(ops) if ops else []

    def encode(self, vector, name):
        """A vector as a message. (plumbing/onebyte.py sends a byte a weight.)"""
        return vector if vector.device == self.message_device else self.buffer(name, vector).copy_(vector)

    def decode(self, message):
        """The vector in a message perhaps still under way, or an object that splits alike. Here: itself."""
        return message

    def buffer(self, key, like):
        """Room for a message, made once."""
        if key not in self.buffers:
            self.buffers[key] = torch.empty_like(like, device=self.message_device)
        return self.buffers[key]

    def notice(self, thetas):
        """The first rank warns if partners twice running bring equal thetas that have moved."""
        def same(a, b):                         # ends at the first piece that differs
            return all(torch.equal(p.cpu(), q.cpu()) for p, q in zip(a.split(1 << 20), b.split(1 << 20)))
        moved = len(thetas) > 1 and not same(thetas[0], self.phi)
        self.alike = self.alike + 1 if moved and all(same(thetas[0], theta) for theta in thetas[1:]) else 0
        if self.alike == 2 and self.rank == self.ranks[0]:
            warnings.warn("partners hold equal weights already: is something else averaging gradients? DDP?")

    def whereabouts(self):
        """Each trainable parameter's address. Once one changes, theta no longer holds the weights."""
        return [p.requires_grad and p.data_ptr() for p in self.params]

    def compare(self):
        """At the first step the first replica warns of initial weights that differ.

        Each replica sends the sum of phi's bits, 8 bytes. phi still has the initial weights; theta has moved.
        """
        mine = sum(v.view(torch.int32).sum() for v in self.phi.split(1 << 20)).to(self.message_device)
        if self.rank != self.ranks[0]:
            return dist.send(mine, self.ranks[0])
        for r in self.ranks[1:]:
            dist.recv(theirs := torch.empty_like(mine), r)
            if theirs != mine:
                warnings.warn(f"rank {r} began with other weights than rank {self.rank}: seed all alike")

    def settle(self):
        """Call before the process ends. Here nothing is under way then; plumbing/overlap.py overrides it."""

    def state_dict(self):
        """theta is in the model. Every rank needs a checkpoint of its own."""
        return {"phi": self.phi, "delta": self.delta, "steps": self.steps}

    def load_state_dict(self, state):
        """All replicas load together. Raises RuntimeError when the state has another number of weights."""
        self.phi.copy_(state["phi"])
        self.delta.copy_(state["delta"])
        self.steps = state["steps"]


class DiLoCo(NoLoCo):
    """The baseline: one group with everyone, by an all-reduce."""

    def __init__(self, params, ranks=None, *, inner_steps=100, alpha=0.3, beta=0.7):
        super().__init__(params, ranks, inner_steps=inner_steps, alpha=alpha, beta=beta)
        self.everyone = len(self.ranks) > 1 and dist.new_group(self.ranks, use_local_synchronization=True)

    def exchange(self):
        n = len(self.ranks)
        if n > 1:                               # in place: theta becomes phi in any case
            dist.all_reduce(self.theta, group=self.everyone)
            self.bytes_sent += 2 * (n - 1) * self.theta.nbytes // n         # what a ring sends
        return [self.theta], [], n


def flatten(params):
    """Make parameters and gradients views of two fp32 vectors: one message, one Adam, one norm.

    Returns (theta, grad), in which zeros fill the gaps between tensors. Repeated calls return the same two
    vectors. Frozen parameters are left alone. Move the model first. grad follows the gradients only while
    they are zeroed in place. Raises ValueError on sharded parameters, on mixed devices, on anything but fp32,
    and where nothing is trainable.
    """
    params = [p for p in dict.fromkeys(params) if p.requires_grad]         # a tied weight counts once
    if any(hasattr(p, "placements") or hasattr(p, "_fsdp_flattened") for p in params):      # DTensor, FSDP
        raise ValueError("sharded parameters: give plain copies of this rank's shards (docs/hosts.md)")
    if len({p.device for p in params}) != 1 or {p.dtype for p in params} != {torch.float32}:
        raise ValueError("give trainable float32 parameters (bf16 rounds small updates away), on one device")
    *starts, size = accumulate((-(-p.numel() // 16) * 16 for p in params), initial=0)   # 64-byte boundaries

    def vector(tensors):
        first = tensors[0]
        if all(t is not None and t.is_contiguous() and t.data_ptr() == first.data_ptr() + 4 * a
               for t, a in zip(tensors, starts)) \
                and first.untyped_storage().nbytes() == 4 * size:
            return first.as_strided((size,), (1,))          # they are views of such a vector already
        flat = torch.zeros(size, dtype=torch.float32, device=params[0].device)
        for t, a in zip(tensors, starts):
            if t is not None:
                flat[a:a + t.numel()].view(t.shape).copy_(t)
        return flat

    theta, grad = vector([p.data for p in params]), vector([p.grad for p in params])
    for p, a in zip(params, starts):
        p.data, p.grad = (v[a:a + p.numel()].view(p.shape) for v in (theta, grad))
    return theta, grad
