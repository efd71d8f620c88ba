"""Warnings for other trainers: mistakes that make outer steps useless without an error."""
import warnings
from zlib import crc32

import torch
import torch.distributed as dist

from gossip.around import Around
from noloco import NoLoCo, parameter_list

LOOKS = 4           # so many inner steps in which a parameter did not move, an outer step apart


class Checked(Around):
    """Around any outer optimizer, used in its place: `Checked(NoLoCo(params), params)`.

    The first rank warns, once each, where
    * replicas begin with different weights, with parameters in another order, or with different
      settings (inner_steps may differ on purpose);
    * replicas hold equal weights just before they average: something else averages gradients;
    * a parameter does not move: most often the model does not use it any more;
    * a parameter is no part of the vector that is averaged: it was moved. (Fragments know no more
      than their vector; without fragments an outer step then raises an error.)
    * weights were loaded after the outer optimizer was made, whose phi is still the first draw.
    A rank warns, once, if its own training has made its weights NaN or infinite.

    For the first two each replica sends a few numbers, at the first inner step and before the
    second outer step. It looks for the third and fourth at every m-th inner step, for the fifth at
    the first two, between which it keeps a copy of the weights, and for the last before each outer
    step. Raises TypeError around anything but NoLoCo, DiLoCo and what goes around these.
    """

    def __init__(self, outer, params):
        super().__init__(outer)
        self.params = [p for p in dict.fromkeys(parameter_list(params)) if p.requires_grad]
        self.cores = cores(outer)
        core = self.cores[0]
        self.rank, self.ranks = core.rank, core.ranks
        self.every, self.message_device = core.inner_steps, core.message_device
        self.count = 0                          # inner steps since this was made
        self.before = bits(self.params)         # before the step that is looked at
        self.fingerprint = fingerprint(self.params, self.before)
        self.still = torch.zeros_like(self.before)      # how many looks have found it unmoved
        self.spoilt = False                     # whether weights were found that are not finite
        self.astray = False                     # whether parameters were found outside theta
        self.jump = 0.0                         # from phi to the weights after the first inner step
        self.first = []                         # the weights of then, until the second one

    @torch.no_grad()
    def step(self):
        self.count += 1
        if self.count == 1:
            self.compare_beginnings()
            self.look_for_strays()
        if self.count <= 2:
            self.look_for_loaded()
        if self.outer.due():
            self.look_for_nan()
        if self.count % self.every == 0:
            self.look()
        did = self.outer.step()
        if self.count == 1:
            self.first = [core.theta.clone() for core in self.cores]
        if (self.count + 1) % self.every == 0:
            self.before = bits(self.params)
        return did

    def compare_beginnings(self):
        """With different settings replicas would average wrongly, or wait for each other."""
        mine = dict(weights=self.fingerprint, **settings_of(self.cores[0]))
        theirs = self.gather(list(mine.values()))
        unlike = []
        for i, name in enumerate(mine):
            if any(numbers[i] != mine[name] for numbers in theirs):
                unlike.append(name)
        if unlike:
            warnings.warn(f"replicas began with different {', '.join(unlike)}: give all the same "
                          "(weights: by the same seed, and in the same order)")

    def look_for_strays(self):
        """Parameters outside theta are trained, and nothing averages them."""
        strays = [i for i, p in enumerate(self.params) if p.numel() and not self.averages(p)]
        if strays and not self.astray and self.rank == self.ranks[0]:
            self.astray = True
            warnings.warn(f"{len(strays)} of {len(self.params)} trainable parameters are not "
                          f"averaged, first number {strays[0]}: they were moved (.to), or belong "
                          "to another model. Do that first, then flatten and make the outer "
                          "optimizer")

    def averages(self, p):
        """Whether the parameter lies in the vector, or in a fragment of it."""
        behind = [p.data_ptr() - core.theta.data_ptr() for core in self.cores]
        return any(0 <= at < core.theta.nbytes for at, core in zip(behind, self.cores))

    def look_for_loaded(self):
        """Weights that were loaded are far from phi, ten times as far as an inner step goes. A run
        that goes on loads phi too, with the count of steps."""
        thetas = [core.theta for core in self.cores]
        if self.count == 1 and self.steps == 0:
            self.jump = distance(thetas, [core.phi for core in self.cores])
        elif self.count == 2:
            pace = distance(thetas, self.first)
            size = length(thetas)
            if self.jump > max(10 * pace, size / 10) and self.rank == self.ranks[0]:
                warnings.warn("weights were loaded after the outer optimizer was made, whose outer "
                              "steps go on from the weights before: load first, then make it")
            self.first = []

    def look_for_nan(self):
        """Where phi is not finite either, it came from a partner, and that rank has warned."""
        if self.spoilt or finite(self.params):
            return
        self.spoilt = True
        if finite([core.phi for core in self.cores]):
            warnings.warn(f"rank {self.rank}: the weights are not finite after inner step "
                          f"{self.steps + 1}, and outer steps carry this to all replicas. Leave "
                          "out optimizer steps whose gradient is not finite")

    def look(self):
        """Compare the weights before and after the last step of the inner optimizer."""
        self.look_for_strays()
        after = bits(self.params)
        unmoved = after == self.before
        self.still = (self.still + 1) * unmoved
        if self.count == 2 * self.every:
            mine = [int(after.sum())]
            theirs = self.gather(mine)
            if theirs and all(others == mine for others in theirs) and not unmoved.all():
                warnings.warn("replicas hold equal weights before they average: is something "
                              "else averaging gradients? DDP?")
        stuck = (self.still == LOOKS).nonzero().flatten().tolist()
        if stuck and self.rank == self.ranks[0] and not self.spoilt:        # NaN stays NaN
            warnings.warn(f"{len(stuck)} of {len(self.params)} trainable parameters do not move, "
                          f"first number {stuck[0]}: does the model still use them? (Not after "
                          "load_state_dict(assign=True), a replaced layer or a deepcopy.)")

    def gather(self, numbers):
        """The whole numbers of each other replica, on the first one. On the others []."""
        mine = torch.tensor(numbers, device=self.message_device)
        first, *others = self.ranks
        if self.rank != first:
            dist.send(mine, first)
            return []
        theirs = [torch.empty_like(mine) for _ in others]
        # All are received at once: one after the other each would cost the latency of its link.
        works = [dist.irecv(its, r) for its, r in zip(theirs, others)]
        for work in works:
            work.wait()
        return [its.tolist() for its in theirs]


def cores(outer):
    """The NoLoCo or DiLoCo inside, or those of all fragments."""
    if hasattr(outer, "outers"):
        return [core for fragment in outer.outers for core in cores(fragment)]
    if hasattr(outer, "outer"):
        return cores(outer.outer)
    if not isinstance(outer, NoLoCo):
        raise TypeError(f"Checked goes around NoLoCo or DiLoCo, not {type(outer).__name__}, which "
                        "has no outer step that all replicas share")
    return [outer]


def settings_of(core):
    """{name: a number that is equal where the setting is}, of those that replicas must share."""
    settings = dict(method=type(core).__name__, alpha=float(core.alpha), beta=float(core.beta),
                    gamma=float(core.gamma), group_size=core.group_size, seed=core.seed)
    return {name: crc32(str(value).encode()) for name, value in settings.items()}


def bits(params):
    """The sum of each parameter's bits."""
    return torch.stack([p.detach().view(torch.int32).sum() for p in params])


def fingerprint(params, sums):
    """A number that depends on the parameters' bits, of which these are the sums, and on their
    order in the vector that is averaged."""
    found = []
    for p, total in zip(params, sums.tolist()):
        found.append((p.data_ptr(), tuple(p.shape), total))
    in_order = [(shape, total) for _, shape, total in sorted(found)]
    return crc32(str(in_order).encode())


def length(vectors):
    """Of the vectors as one."""
    return float(torch.linalg.vector_norm(torch.stack([vector.norm() for vector in vectors])))


def distance(vectors, others):
    return length([vector - other for vector, other in zip(vectors, others)])


def finite(vectors):
    """Whether all numbers of all vectors are finite."""
    return bool(torch.stack([vector.sum() for vector in vectors]).isfinite().all())
