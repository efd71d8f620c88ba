"""Warnings for a trainer that is not ours: what makes outer steps useless without an error."""
import warnings
from zlib import crc32

import torch
import torch.distributed as dist

from gossip.around import Around
from noloco import parameter_list

LOOKS = 4           # so many inner steps in which a parameter did not move, an outer step apart


class Checked(Around):
    """Around any outer optimizer, used in its place: `Checked(NoLoCo(params), params)`.

    The first rank warns, once each, where
    * replicas begin with different weights or settings (inner_steps may differ on purpose);
    * replicas hold equal weights just before they meet: something else averages gradients;
    * a parameter does not move: most often the model does not use it any more.
    A rank warns, once, where its own training has made its weights NaN or infinite.

    For the first two each replica sends a few numbers, at the first inner step and before the
    second outer step. For the third it looks at every m-th inner step, for the last before each
    outer step.
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
        self.still = torch.zeros_like(self.before)      # how many looks have found it unmoved
        self.spoilt = False                     # whether weights were found that are not finite

    @torch.no_grad()
    def step(self):
        self.count += 1
        if self.count == 1:
            self.compare_beginnings()
        if any(core.due() for core in self.cores):
            self.look_for_nan()
        if self.count % self.every == 0:
            self.look()
        did = self.outer.step()
        if (self.count + 1) % self.every == 0:
            self.before = bits(self.params)
        return did

    def compare_beginnings(self):
        """With different settings replicas would average wrongly, or wait for each other."""
        mine = dict(weights=int(self.before.sum()), **settings_of(self.cores[0]))
        theirs = self.gather(list(mine.values()))
        unlike = []
        for i, name in enumerate(mine):
            if any(numbers[i] != mine[name] for numbers in theirs):
                unlike.append(name)
        if unlike:
            warnings.warn(f"replicas began with different {', '.join(unlike)}: give all the same "
                          "(weights: by the same seed)")

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
        after = bits(self.params)
        unmoved = after == self.before
        self.still = (self.still + 1) * unmoved
        if self.count == 2 * self.every:
            mine = [int(after.sum())]
            theirs = self.gather(mine)
            if theirs and all(others == mine for others in theirs) and not unmoved.all():
                warnings.warn("replicas hold equal weights before they meet: is something else "
                              "averaging gradients? DDP?")
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
    return [outer]


def settings_of(core):
    """{name: a number that is equal where the setting is}, of those that replicas must share."""
    settings = dict(method=type(core).__name__, alpha=float(core.alpha), beta=float(core.beta),
                    gamma=float(core.gamma), group_size=core.group_size, seed=core.seed)
    return {name: crc32(str(value).encode()) for name, value in settings.items()}


def bits(params):
    """The sum of each parameter's bits."""
    return torch.stack([p.detach().view(torch.int32).sum() for p in params])


def finite(vectors):
    """Whether all numbers of all vectors are finite."""
    return bool(torch.stack([vector.sum() for vector in vectors]).isfinite().all())
