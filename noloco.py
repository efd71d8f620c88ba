"""NoLoCo: data parallelism without an all-reduce (arXiv 2506.10911).

Replica i keeps slow weights phi_i and trains a copy theta_i for m inner steps, with any optimizer.
Then a random group of n replicas (usually two) does the outer step. Means are over the group, and
delta_i starts at 0. alpha is the momentum, beta the outer learning rate, gamma the pull towards
mean(phi):

    Delta_i = theta_i - phi_i                                                              (N1)
    delta_i <- alpha delta_i + beta mean(Delta) - gamma (phi_i - mean(phi))                (N2)
    phi_i   <- phi_i + delta_i ;   theta_i <- phi_i                                        (N3)

N1 to N3 are the paper's Eqs. 1 to 3. With a group of everyone and equal phi they are DiLoCo's step
(arXiv 2311.08105) but for its true Nesterov momentum. What travels follows from N2 with N1 put in:

    delta_i <- alpha delta_i + beta (mean(theta) - phi_i) + (gamma - beta) (mean(phi) - phi_i) (N2')

With gamma = beta the last term vanishes. So phi stays at home, and theta is the only message: half
of the released code's bytes. gamma = beta is that code's setting (the paper has none), and ours.

Deviations: the paper prints -beta in N2, which would climb; its appendix and the released code have
+beta. What it calls Nesterov momentum is, as printed, heavy-ball momentum, here too. The paper
sends phi during the inner steps; here phi, where it travels at all, goes beside theta
(gossip/delay.py sends it ahead). Weights, phi and delta are fp32. docs/differences.md has the rest.
"""
import math
import random
import warnings
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist


def random_groups(ranks, size, step, seed):
    """A random partition of the N `ranks` into max(1, N // size) groups.

    Their sizes differ by at most one: a group has `size` to 2 size - 1 ranks, or all N if there are
    fewer. step: the outer step's number. Calls with equal arguments, ranks in the same order, draw
    equal lists: replicas agree without a message.
    """
    order = list(ranks)
    draw = random.Random(f"groups {seed} {step} {order[0]}")    # order[0]: stages draw apart
    draw.shuffle(order)
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


class Fp32:
    """How a vector is written as a message: here it is the message. Each NoLoCo has its own codec.

    gossip/onebyte.py has another, which writes a byte a weight. exact: whether a partner reads the
    very numbers that were sent.
    """
    exact = True

    def fit(self, theta, lengths):
        """Prepare for vectors like theta, whose tensors have these lengths.

        Returns the slices in which the outer step goes through them: on CPUs one stays in cache.
        """
        size = 1 << 24 if theta.is_cuda else 1 << 17
        self.pieces = [slice(start, start + size) for start in range(0, len(theta), size)]
        return self.pieces

    def bytes(self, size):
        """Of a message of `size` weights."""
        return 4 * size

    def encode(self, vector, phi):
        """The message. phi: this replica's slow weights, from which `vector` set out."""
        return vector

    def decode(self, message, number, own):
        """The weights of piece `number`, in fp32. own: those that this replica sent itself."""
        return message[self.pieces[number]].to(own.device)


class Arrived(NamedTuple):
    """What the group of an outer step sent each other."""
    thetas: list    # messages by rank, of this replica its vector itself; DiLoCo: the sum alone
    phis: list      # likewise; empty where gamma = beta
    n: int          # how many replicas the thetas add up to


class NoLoCo:
    """N1 to N3 for any model and optimizer: call `step()` after every step of the inner optimizer.

    First call init_process_group, then load, tie and move the model, then make this: phi starts as
    the weights are now. Numbers that are not finite are not checked here.

    params: model.parameters(), equal on all replicas. They become views of one vector (see
        `flatten`, also for the errors). Frozen parameters and buffers stay as they are and do not
        travel. A layer that is replaced later, a deepcopy of the model and
        load_state_dict(assign=True) bring other parameters: outer steps do not reach those. `step`
        warns where a parameter does not move.
    ranks: the global ranks of this model's replicas (of this stage, of this shard); None: all.
    inner_steps: m. group_size: n. gamma: None means beta. docs/trainers.md has all ranges.
    offset: above 0, outer steps come after offset, offset + m, ... inner steps (for fragments).
    codec: how vectors are written as messages (None: in fp32).

    Memory beside the model: phi, delta and a receive buffer per partner, as large as theta each
    (where gamma differs from beta two buffers; CUDA over Gloo: one more, to send from).
    NCCL: call torch.distributed.barrier() once before: its first message must have all ranks in it.
    Replicas stay together, in mean square, for gamma = beta, 0 < gamma < 2 (1 - alpha^2) /
    (1 - alpha + 2 alpha / n): ours, for many replicas, plain SGD, a quadratic loss
    (docs/stability.md). Raises ValueError for settings that cannot be meant.
    """
    spoils = False      # whether `exchange` overwrites the vector that it is given

    def __init__(self, params, ranks=None, *, inner_steps=50, alpha=0.5, beta=0.7, gamma=None,
                 group_size=2, seed=0, offset=0, codec=None):
        self.rank, world = 0, 1
        if dist.is_initialized():
            self.rank, world = dist.get_rank(), dist.get_world_size()
        elif ranks is None and dist.is_torchelastic_launched():
            raise ValueError("call init_process_group first: each process would train alone")
        self.ranks = list(range(world) if ranks is None else ranks)
        if world > 1 and self.rank not in self.ranks:
            raise ValueError(f"rank {self.rank} is not among the ranks {self.ranks} that it "
                             "averages with")
        if world > 1 and not set(self.ranks) <= set(range(world)):
            raise ValueError(f"ranks {self.ranks}: there are only ranks 0 to {world - 1}")
        self.inner_steps, self.offset = inner_steps, offset
        self.alpha, self.beta = alpha, beta
        self.gamma = beta if gamma is None else gamma
        self.group_size, self.seed = group_size, seed
        self.refuse_settings()
        if isinstance(params, torch.nn.Module):
            raise ValueError("give the model's parameters: NoLoCo(model.parameters())")
        self.params = list(params)
        self.theta, _ = flatten(self.params)
        self.phi = self.theta.clone()
        self.delta = torch.zeros_like(self.theta)
        self.places = whereabouts(self.params)
        self.codec = codec or Fp32()
        if self.gamma != self.beta and not self.codec.exact:
            raise ValueError("a codec that rounds sends theta alone: gamma must be beta, not "
                             f"{self.gamma}")
        self.pieces = self.codec.fit(self.theta, self.lengths())
        self.steps = 0
        self.bytes_sent = 0
        self.alike = 0              # outer steps in a row in which partners brought equal weights
        # The tensors in theta that `step` warns of if they do not move: {index in theta: number
        # among the trainable parameters}. gossip/fragments.py has others. Empty after a warning.
        self.watched = {index: index for index in range(len(self.lengths()))}
        self.stuck = set()          # numbers of the parameters that did not move
        self.buffers = {}
        nccl = world > 1 and "nccl" in str(dist.get_backend_config())
        self.message_device = self.theta.device if nccl else torch.device("cpu")

    def refuse_settings(self):
        """Raises ValueError for a setting that is out of its range, and warns of a large gamma."""
        def need(good, name, wanted):
            if not good:
                raise ValueError(f"{name} {getattr(self, name)} must be {wanted}")

        need(isinstance(self.inner_steps, int) and self.inner_steps >= 1,
             "inner_steps", "a whole number, at least 1")
        need(isinstance(self.group_size, int) and self.group_size >= 2,
             "group_size", "a whole number, at least 2")
        need(isinstance(self.offset, int) and 0 <= self.offset < self.inner_steps,
             "offset", "a whole number from 0 to inner_steps - 1")
        need(0 <= self.alpha < 1, "alpha", "at least 0 and below 1: it is the momentum")
        need(0 < self.beta < math.inf, "beta", "above 0: it is the outer learning rate")
        need(0 <= self.gamma < math.inf, "gamma", "at least 0: it pulls partners together")
        if self.gamma > 2 * (1 + self.alpha) and self.rank == self.ranks[0]:
            warnings.warn(f"gamma {self.gamma} is above 2 (1 + alpha): replicas will drift apart, "
                          "in groups of any size (docs/stability.md)")

    @torch.no_grad()
    def step(self):
        """Count an inner step; every m-th ends with the outer step. Returns whether this did."""
        self.check()
        due = self.due()
        if due:
            self.meet()
        self.steps += 1
        return due

    def due(self):
        """Whether the present inner step ends with an outer step."""
        return (self.steps + 1 - self.offset) % self.inner_steps == 0

    @property
    def current(self):
        """The number of the next outer step. The first is 0; where there is an offset it is -1."""
        return (self.steps - self.offset) // self.inner_steps

    def meet(self):
        """An outer step."""
        group = self.group(self.current)
        self.bytes_sent += self.cost(group)
        self.outer_step(self.theta, self.exchange(self.theta, group))

    def outer_step(self, theta, arrived):
        """N1 to N3. arrived: what the group sent, of this replica theta, which becomes phi."""
        self.before_merge(arrived)
        for number, piece in enumerate(self.pieces):
            self.update(number, theta, arrived)
            theta[piece].copy_(self.phi[piece])                                 # N3

    def update(self, number, theta, arrived):
        """N2' and N3's phi, for piece `number`. Override it for an outer rule of your own."""
        piece = self.pieces[number]
        own = theta[piece]
        mean_theta = self.total(arrived.thetas, number, own) / arrived.n
        mean_phi = None
        if arrived.phis:
            mean_phi = self.total(arrived.phis, number, own) / arrived.n
        outer_update(self.phi[piece], self.delta[piece], mean_theta, mean_phi,
                     self.alpha, self.beta, self.gamma)

    def total(self, messages, number, own):
        """The sum of piece `number` of the messages, by rank: in fp32 the same bits for all.

        Where a codec rounds, a replica reads its own numbers as they are, its partners' rounded.
        """
        total = self.codec.decode(messages[0], number, own)
        for message in messages[1:]:
            total = total + self.codec.decode(message, number, own)
        return total

    def group(self, outer):
        """The ranks of the group of outer step number `outer`, this one among them."""
        seed = self.seed
        if self.offset:
            seed = f"{self.seed} {self.offset}"                 # fragments draw apart
        groups = random_groups(self.ranks, self.group_size, outer, seed)
        return next(group for group in groups if self.rank in group)

    def cost(self, group):
        """Bytes that this replica sends in an exchange with this group."""
        vectors = 1 if self.gamma == self.beta else 2
        return vectors * (len(group) - 1) * self.codec.bytes(len(self.theta))

    def exchange(self, theta, group, lane=None):
        """Swap theta and, where gamma is not beta, phi with the group. Returns an `Arrived`.

        lane: the process group (None: the default one). The next exchange overwrites the messages.
        """
        vectors = {"theta": theta}
        if self.gamma != self.beta:
            vectors["phi"] = self.phi
        swapped = self.swap(vectors, group, lane)
        return Arrived(swapped["theta"], swapped.get("phi", []), len(group))

    def swap(self, vectors, group, lane=None):
        """Swap {name: vector} with the partners. Returns {name: the group's messages, by rank}.

        Both directions are posted at once. A pair's messages match by the order of `vectors`.
        """
        partners = [r for r in group if r != self.rank]
        swapped = {}
        operations = []
        for name, vector in vectors.items():
            mine = self.staged(name, self.codec.encode(vector, self.phi))
            theirs = {r: self.buffer((name, i), mine) for i, r in enumerate(partners)}
            operations += [dist.P2POp(dist.irecv, theirs[r], r, lane) for r in partners]
            operations += [dist.P2POp(dist.isend, mine, r, lane) for r in partners]
            swapped[name] = [theirs.get(r, vector) for r in group]
        works = dist.batch_isend_irecv(operations) if operations else []
        for work in works:
            work.wait()             # also for what this replica sent, which is about to change
        return swapped

    def staged(self, name, message):
        """The message where it can be sent: Gloo sends host memory only."""
        if message.device == self.message_device:
            return message
        return self.buffer(name, message).copy_(message)

    def buffer(self, key, like):
        """Room for a message, made once."""
        key = key, like.dtype
        if key not in self.buffers:
            pin = self.theta.is_cuda and self.message_device.type == "cpu"
            self.buffers[key] = torch.empty_like(like, device=self.message_device, pin_memory=pin)
        return self.buffers[key]

    # ---- what goes wrong in other people's trainers

    def check(self):
        """Compare initial weights, once. Before an outer step: RuntimeError if theta lost them."""
        if self.steps == 0 and len(self.ranks) > 1:
            self.compare()
        if self.due():
            if whereabouts(self.params) != self.places:
                raise RuntimeError("parameters were moved (.to), frozen or unfrozen: first that, "
                                   "then NoLoCo")
            self.warn_of_stuck()

    def lengths(self):
        """Of each tensor in theta, in order, with the gap that follows it."""
        trainable = [place for place in self.places if place]
        starts = sorted({(place - self.theta.data_ptr()) // 4 for place in trainable})
        return [after - start for start, after in pairwise([*starts, len(self.theta)])]

    def warn_of_stuck(self):
        """The first rank warns, once, of parameters that do not move for two outer steps running.

        Most often the model does not use them any more.
        """
        if self.rank != self.ranks[0] or not self.watched:
            return
        lengths = self.lengths()
        thetas = self.theta.split(lengths)
        phis = self.phi.split(lengths)              # as the weights were after the last outer step
        last_time = self.stuck
        self.stuck = set()
        for index, number in self.watched.items():
            if not moved(thetas[index], phis[index]):
                self.stuck.add(number)
        twice = last_time & self.stuck
        if twice:
            warnings.warn(f"{len(twice)} of {len(self.watched)} trainable parameters do not move, "
                          f"first number {min(twice)}: does the model still use them? (Not after "
                          "load_state_dict(assign=True), a replaced layer or a deepcopy.)")
            self.watched = {}

    def before_merge(self, arrived):
        """The first rank warns if partners twice running bring equal thetas that have moved.

        Averaged gradients would make outer steps useless. It is called once for what arrived.
        """
        if not self.codec.exact:
            return
        first, *others = arrived.thetas
        same = bool(others) and moved(first, self.phi)
        for theta in others:
            same = same and not moved(first, theta)
        self.alike = self.alike + 1 if same else 0
        if self.alike == 2 and self.rank == self.ranks[0]:
            warnings.warn("partners hold equal weights already: is something else averaging "
                          "gradients? DDP?")

    def compare(self):
        """At the first step the first replica warns of initial weights that differ.

        Each replica sends the sum of the bits of phi, which still has the initial weights: 8 bytes.
        """
        bits = self.phi.view(torch.int32)
        mine = sum(piece.sum() for piece in bits.split(1 << 20)).to(self.message_device)
        first, *others = self.ranks
        if self.rank != first:
            dist.send(mine, first)
            return
        theirs = {r: torch.empty_like(mine) for r in others}
        # All are received at once: one after the other each would cost the latency of its link.
        works = [dist.irecv(theirs[r], r) for r in others]
        for work in works:
            work.wait()
        for r in others:
            if theirs[r] != mine:
                warnings.warn(f"rank {r} began with other weights than rank {first}: seed all "
                              "alike")

    # ---- checkpoints, and the end

    def settle(self):
        """Call before the process ends. Here nothing is under way; gossip/delay.py waits."""

    def state_dict(self):
        """theta is in the model. Every rank needs a checkpoint of its own."""
        return {"phi": self.phi, "delta": self.delta, "steps": self.steps}

    def load_state_dict(self, state):
        """All replicas load together. Raises RuntimeError for the state of something else."""
        lacking = {"phi", "delta", "steps"} - set(state)
        if lacking:
            raise RuntimeError(f"this is no state of NoLoCo: it lacks {', '.join(sorted(lacking))}")
        self.phi.copy_(state["phi"])
        self.delta.copy_(state["delta"])
        self.steps = state["steps"]


class DiLoCo(NoLoCo):
    """The baseline: one group with everyone, by an all-reduce."""

    spoils = True

    def __init__(self, params, ranks=None, *, inner_steps=100, alpha=0.3, beta=0.7, offset=0,
                 everyone=None):
        """everyone: a process group of all ranks; None: a new one."""
        super().__init__(params, ranks, inner_steps=inner_steps, alpha=alpha, beta=beta,
                         offset=offset)
        self.everyone = everyone
        if len(self.ranks) > 1 and not everyone:
            self.everyone = dist.new_group(self.ranks, use_local_synchronization=True)

    def group(self, outer):
        return tuple(self.ranks)

    def cost(self, group):
        """What a ring sends."""
        return 2 * (len(group) - 1) * self.theta.nbytes // len(group)

    def exchange(self, theta, group, lane=None):
        """The sum takes theta's place, which becomes phi in any case. `lane` is not needed."""
        if self.everyone:
            dist.all_reduce(theta, group=self.everyone)
        return Arrived([theta], [], len(group))


def moved(a, b):
    """Whether two vectors differ, on whichever devices. Most often the first numbers tell."""
    if not torch.equal(a[:1 << 10].cpu(), b[:1 << 10].cpu()):
        return True
    pieces = zip(a.split(1 << 20), b.split(1 << 20))
    return any(not torch.equal(p.cpu(), q.cpu()) for p, q in pieces)


def flatten(params):
    """Make parameters and gradients views of two fp32 vectors: one message, one Adam, one norm.

    Returns (theta, grad), in which zeros fill the gaps between tensors. A later call returns the
    same memory, for neighbours among the parameters a view of it; of grad only while gradients are
    zeroed in place, not set to None. Frozen parameters stay out. Move the model first. Raises
    ValueError if none is trainable, or they are sharded, not fp32, on two devices, or share memory.
    """
    params = [p for p in dict.fromkeys(params) if p.requires_grad]      # a tied weight counts once
    if any(hasattr(p, "placements") or hasattr(p, "_fsdp_flattened") for p in params):
        raise ValueError("sharded parameters: give plain copies of this rank's shards "
                         "(docs/hosts.md)")         # of a DTensor, or FullyShardedDataParallel
    if not params:
        raise ValueError("there is no trainable parameter (a generator may be used up)")
    if any(p.dtype != torch.float32 for p in params):
        raise ValueError("give float32 parameters: bf16 rounds small updates away")
    if len({p.device for p in params}) > 1:
        raise ValueError("give parameters that are all on one device")
    places = [p.data_ptr() for p in params if p.data_ptr()]             # 0: an empty tensor
    if len(set(places)) < len(places):
        raise ValueError("two parameters share their memory: tie them as one parameter instead")
    starts = [0, *accumulate(room(p) for p in params)]      # and the length of the vector
    theta = one_vector([p.data for p in params], starts, params[0].device)
    grad = one_vector([p.grad for p in params], starts, params[0].device)
    for p, start in zip(params, starts):
        place = slice(start, start + p.numel())
        p.data = theta[place].view(p.shape)
        p.grad = grad[place].view(p.shape)
    return theta, grad


def whereabouts(params):
    """Each trainable parameter's address. Once one changes, theta has lost the weights."""
    return [p.requires_grad and p.data_ptr() for p in params]


def room(p):
    """Numbers that a parameter takes in the vector: tensors begin at 64-byte boundaries."""
    return -(-p.numel() // 16) * 16


def one_vector(tensors, starts, device):
    """A vector with copies of the tensors at these starts, of which the last is its length.

    None counts as zeros. If the tensors lie like this already, the vector in which they lie.
    """
    size = starts[-1]
    if lie_so(tensors, starts):
        return tensors[0].as_strided((size,), (1,))
    flat = torch.zeros(size, dtype=torch.float32, device=device)
    flat.untyped_storage().by_flatten = True        # torch keeps this while a view is alive
    for tensor, start in zip(tensors, starts):
        if tensor is not None:
            flat[start:start + tensor.numel()].view(tensor.shape).copy_(tensor)
    return flat


def lie_so(tensors, starts):
    """Whether the tensors lie at these starts in a vector of `flatten`'s, with zeros in the gaps.

    In somebody else's vector the gaps may be other tensors that happen to be zero now.
    """
    if any(tensor is None for tensor in tensors):
        return False
    first = tensors[0]
    storage = first.untyped_storage()
    end = 4 * (first.storage_offset() + starts[-1])
    if not hasattr(storage, "by_flatten") or end > storage.nbytes():
        return False
    flat = first.as_strided((starts[-1],), (1,))
    for tensor, (start, after) in zip(tensors, pairwise(starts)):
        there = tensor.numel() == 0 or tensor.data_ptr() == flat.data_ptr() + 4 * start
        gap = flat[start + tensor.numel():after]
        if not (there and tensor.is_contiguous()) or gap.any():
            return False
    return True
