"""NoLoCo: data parallelism without an all-reduce (arXiv 2506.10911).

Replica i keeps slow weights phi_i and trains a copy theta_i for m inner steps, with any optimizer.
Then a random group of n replicas (usually two) does the outer step. Means are over the group, and
delta_i starts at 0. alpha is the momentum, beta the outer learning rate, gamma the pull towards
mean(phi):

    Delta_i = theta_i - phi_i                                                              (N1)
    delta_i <- alpha delta_i + beta mean(Delta) - gamma (phi_i - mean(phi))                (N2)
    phi_i   <- phi_i + delta_i ;   theta_i <- phi_i                                        (N3)

N1 to N3 are the paper's Eqs. 1 to 3. If gamma = beta, as in the released code and by default
here, mean(phi) cancels in N2. Any vector may stand in its place, so each replica takes its own phi,
and theta is the only message: half of the released code's bytes.

With one group of all replicas and equal phi this is DiLoCo's step (arXiv 2311.08105), except that
DiLoCo has true Nesterov momentum. What the paper calls Nesterov is, as printed, heavy-ball
momentum. The paper prints -beta in N2, which would climb the loss; its appendix and the released
code have +beta. docs/annotated.md has the rest.
"""
import os
import random

import torch
import torch.distributed as dist


def outer_update(phi, delta, mean_theta, mean_phi, alpha, beta, gamma):
    """N1 to N3, in place on phi and delta. (`alpha=` below is torch's name for a factor.)"""
    mean_Delta = mean_theta - mean_phi                          # N1, averaged
    delta.mul_(alpha)                                           # N2: alpha delta
    delta.add_(mean_Delta, alpha=beta)                          #     + beta mean(Delta)
    if mean_phi is not phi:                                     # else zero
        delta.sub_(phi - mean_phi, alpha=gamma)                 #     - gamma (phi - mean(phi))
    phi.add_(delta)                                             # N3: phi; outer_step sets theta


def random_groups(ranks, size, step, seed):
    """A random partition of the N ranks into max(1, N // size) groups, whose sizes differ by at
    most one. So fewer than 2 size ranks form one group: with size 3, four ranks form one group of
    four. Equal arguments give equal groups, so replicas agree without a message.
    """
    order = list(ranks)
    # The first rank is another one in each stage of a pipeline, so stages draw different groups.
    random.Random(f"groups {seed} {step} {order[0]}").shuffle(order)
    count = max(1, len(order) // size)
    return [tuple(sorted(order[g::count])) for g in range(count)]


class NoLoCo:
    """For any model and optimizer: call `step()` after every step of the inner optimizer.

    First call init_process_group, and load, tie and move the model.

    params: model.parameters(), equal on all replicas, or a vector from `flatten`.
    ranks: the global ranks of this model's replicas (of this stage, of this shard); None: all.
    inner_steps: m. group_size: n; fewer than 2n replicas form one group. gamma: None means beta.

    Memory in addition to the model's: phi and delta, each as large as theta, and as much again for
    each partner in a group, twice that if phi travels too or if Gloo carries a GPU's weights.
    NCCL: call torch.distributed.barrier() once before; its first message must have all ranks in it.
    """

    def __init__(self, params, ranks=None, *, inner_steps=50, alpha=0.5, beta=0.7, gamma=None,
                 group_size=2, seed=0):
        self.rank, self.ranks = own_rank(ranks)
        need_whole("inner_steps", inner_steps, 1)
        need_whole("group_size", group_size, 2)
        self.inner_steps, self.group_size, self.seed = inner_steps, group_size, seed
        self.alpha, self.beta = alpha, beta
        self.gamma = beta if gamma is None else gamma
        self.params = [] if torch.is_tensor(params) else parameter_list(params)
        self.theta = flatten(self.params) if self.params else params
        self.places = places(self.params, self.theta)
        self.phi = self.theta.clone()
        self.delta = torch.zeros_like(self.theta)
        self.steps = 0                          # inner steps so far
        self.bytes_sent = 0
        self.buffers = {}
        nccl = dist.is_initialized() and "nccl" in str(dist.get_backend_config())
        self.message_device = self.theta.device if nccl else torch.device("cpu")    # Gloo: host

    @torch.no_grad()
    def step(self):
        """Count an inner step; every m-th ends with the outer step. Returns whether this did."""
        due = self.due()
        if due:
            self.meet()
        self.steps += 1
        return due

    def due(self):
        """Whether the present inner step ends with an outer step."""
        return (self.steps + 1) % self.inner_steps == 0

    def meet(self):
        """An outer step."""
        group = self.begin()
        thetas, phis = self.exchange(self.theta, group)
        self.outer_step(self.theta, thetas, phis)

    def begin(self):
        """Count what this outer step sends, and return the group that it goes to."""
        self.refuse_moved()
        group = self.group()
        self.bytes_sent += self.cost(group)
        return group

    def refuse_moved(self):
        """Raises RuntimeError if theta has lost the weights."""
        if places(self.params, self.theta) != self.places:
            raise RuntimeError("parameters were moved (.to), frozen or unfrozen: do that first, "
                               "then make NoLoCo")

    def group(self):
        """The ranks that average in this outer step, this one among them."""
        number = self.steps // self.inner_steps
        groups = random_groups(self.ranks, self.group_size, number, self.seed)
        return next(group for group in groups if self.rank in group)

    def cost(self, group):
        """Bytes that this replica sends in an exchange with this group."""
        vectors = 1 if self.gamma == self.beta else 2
        return vectors * (len(group) - 1) * self.theta.nbytes

    def exchange(self, theta, group, process_group=None):
        """Swap theta, and phi if its mean counts, with the group: (thetas, phis), by rank.

        process_group: None means the default one. `outer_step` and the next exchange overwrite
        what came.
        """
        thetas = self.swap("theta", theta, group, process_group)
        phis = []
        if self.gamma != self.beta:
            phis = self.swap("phi", self.phi, group, process_group)
        return thetas, phis

    def swap(self, name, vector, group, process_group=None):
        """The vectors of the group, by rank. Both directions of a pair are posted at once."""
        message = self.on_device(self.message_device, name, vector)
        partners = [r for r in group if r != self.rank]
        theirs = []
        operations = []
        for i, r in enumerate(partners):
            theirs.append(self.buffer((name, i), message, self.message_device))
            operations.append(dist.P2POp(dist.irecv, theirs[i], r, process_group))
            operations.append(dist.P2POp(dist.isend, message, r, process_group))
        works = dist.batch_isend_irecv(operations) if operations else []
        for work in works:
            work.wait()             # also for what this replica sent, which is about to change
        vectors = [self.on_device(vector.device, (name, i), its) for i, its in enumerate(theirs)]
        vectors.insert(group.index(self.rank), vector)
        return vectors

    def on_device(self, device, key, vector):
        """The vector itself if it is on this device, else a copy."""
        if vector.device == device:
            return vector
        return self.buffer(key, vector, device).copy_(vector)

    def buffer(self, key, like, device):
        """Memory for a vector, made once: fresh pages take longer than the message. Between a GPU
        and Gloo it is pinned.
        """
        key = (key, like.dtype, device)
        if key not in self.buffers:
            pinned = self.theta.is_cuda and device.type == "cpu"
            self.buffers[key] = torch.empty_like(like, device=device, pin_memory=pinned)
        return self.buffers[key]

    def outer_step(self, theta, thetas, phis):
        """N1 to N3 with the group's vectors, which it overwrites; theta becomes phi.

        Override it for an outer rule of your own.
        """
        size = 1 << 24 if theta.is_cuda else 1 << 17            # so that on CPUs all stays in cache
        for start in range(0, len(theta), size):
            piece = slice(start, start + size)
            phi = self.phi[piece]
            came = [vector[piece] for vector in thetas]
            mean_theta = self.mean(came, out=came[0])
            mean_phi = self.mean([vector[piece] for vector in phis]) if phis else phi
            outer_update(phi, self.delta[piece], mean_theta, mean_phi,
                         self.alpha, self.beta, self.gamma)
            theta[piece].copy_(phi)                             # N3: theta

    def mean(self, vectors, out=None):
        """The mean, added up in the order of ranks, so that all replicas get the same bits.

        out: None, or the first vector, which then becomes the mean.
        """
        mean = vectors[0]
        for count, vector in enumerate(vectors[1:], start=2):
            mean = torch.lerp(mean, vector, 1 / count, out=out)
        return mean

    def state_dict(self):
        """Without theta, which is in the model. Every rank needs a checkpoint of its own."""
        return {"phi": self.phi, "delta": self.delta, "steps": self.steps,
                "bytes_sent": self.bytes_sent}

    def load_state_dict(self, state):
        """All replicas load together."""
        self.phi.copy_(state["phi"])
        self.delta.copy_(state["delta"])
        self.steps, self.bytes_sent = state["steps"], state["bytes_sent"]

    def settle(self):
        """Call before the process ends. Here nothing is under way; gossip/delay.py waits."""


class DiLoCo(NoLoCo):
    """The baseline: all replicas are one group, which averages by an all-reduce."""

    def __init__(self, params, ranks=None, *, inner_steps=100, alpha=0.3, beta=0.7, everyone=None):
        """everyone: a process group of all ranks; None: a new one."""
        super().__init__(params, ranks, inner_steps=inner_steps, alpha=alpha, beta=beta)
        self.everyone = everyone
        if len(self.ranks) > 1 and not everyone:
            self.everyone = dist.new_group(self.ranks, use_local_synchronization=True)

    def group(self):
        return tuple(self.ranks)

    def cost(self, group):
        """Bytes that this replica sends if the all-reduce is a ring."""
        return 2 * (len(group) - 1) * self.theta.nbytes // len(group)

    def exchange(self, theta, group, process_group=None):
        """Returns one vector, the sum. `process_group` is not used."""
        total = self.overwritable(theta)
        if self.everyone:
            dist.all_reduce(total, group=self.everyone)
        return [total], []

    def overwritable(self, theta):
        """The model's own theta itself, since it becomes phi anyway; of another vector a copy.

        gossip/delay.py needs what it sent once more.
        """
        if theta is self.theta:
            return theta
        return self.buffer("total", theta, theta.device).copy_(theta)

    def mean(self, vectors, out=None):
        """The mean, from the sum."""
        return torch.div(vectors[0], len(self.ranks), out=out)


def own_rank(ranks):
    """(this process's rank, the replicas' ranks in ascending order). None: all. Raises ValueError
    if this process would train alone."""
    if dist.is_initialized():
        rank, world = dist.get_rank(), dist.get_world_size()
    else:
        rank, world = 0, 1
        if ranks is None and os.environ.get("WORLD_SIZE", "1") != "1":      # of torchrun, of srun
            raise ValueError("call init_process_group first: each process would train alone")
    ranks = sorted(range(world) if ranks is None else ranks)    # each rank may list itself first
    if world > 1 and not {rank} <= set(ranks) <= set(range(world)):
        raise ValueError(f"ranks {ranks}: give some of 0 to {world - 1}, this process's rank "
                         f"{rank} among them")
    return rank, ranks


def need_whole(name, value, least):
    """Raises ValueError, since with inner_steps=100 / 3 no outer step would ever be due."""
    if not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, not {value}")


def parameter_list(params):
    """The parameters that are given. Raises ValueError for none, or for anything else."""
    found = list(params) if hasattr(params, "__iter__") else []
    if not found or not all(map(torch.is_tensor, found)):
        raise ValueError("give model.parameters(), called anew (a generator that an optimizer has "
                         "read is empty), not the model, named_parameters() or param_groups")
    return found


def flatten(params):
    """Make the trainable parameters views of one fp32 vector, and return it: one message, one Adam.

    Tensors begin at 64-byte boundaries, and zeros fill the gaps. Move the model before.
    """
    params = dict.fromkeys(parameter_list(params))              # a tied weight counts once
    params = [p for p in params if p.requires_grad]
    if not params or any(p.dtype != torch.float32 or hasattr(p, "placements") for p in params):
        raise ValueError("give trainable float32 parameters (bf16 rounds small updates away), and "
                         "of sharded ones plain copies of this rank's shards (docs/hosts.md)")
    lengths = [padded(p) for p in params]
    theta = torch.zeros(sum(lengths), dtype=torch.float32, device=params[0].device)
    for p, place in zip(params, theta.split(lengths)):
        p.data = place[:p.numel()].view(p.shape).copy_(p.data)
    return theta


def padded(p):
    """How many numbers a parameter takes in the vector."""
    return -(-p.numel() // 16) * 16


def places(params, theta):
    """Where in theta each trainable parameter lies: (its number, bytes from the beginning)."""
    start = theta.data_ptr()
    return [(i, p.data_ptr() - start) for i, p in enumerate(params) if p.requires_grad]
