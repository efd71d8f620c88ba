"""Warnings for a trainer that is not ours: what makes outer steps useless without an error."""
import warnings

import torch
import torch.distributed as dist

from gossip.around import Around

LOOKS = 4           # so many inner steps in which a parameter did not move, an outer step apart


class Checked(Around):
    """Around any outer optimizer, used in its place: `Checked(NoLoCo(params), params)`.

    The first rank warns, once each, where
    * replicas begin with different weights;
    * replicas hold equal weights just before they meet: something else averages gradients;
    * a parameter does not move: most often the model does not use it any more.

    For the first two each replica sends the sum of its weights' bits, at the first inner step and
    before the second outer step. For the third it looks at every m-th inner step.
    """

    def __init__(self, outer, params):
        super().__init__(outer)
        self.params = [p for p in dict.fromkeys(params) if p.requires_grad]
        core = inmost(outer)
        self.rank, self.ranks = core.rank, core.ranks
        self.every, self.message_device = core.inner_steps, core.message_device
        self.count = 0                          # inner steps since this was made
        self.before = bits(self.params)         # before the step that is looked at
        self.still = torch.zeros_like(self.before)      # how many looks have found it unmoved

    @torch.no_grad()
    def step(self):
        self.count += 1
        if self.count == 1 and self.all_equal(self.before) is False:
            warnings.warn("replicas began with different weights: seed all alike")
        if self.count % self.every == 0:
            self.look()
        did = self.outer.step()
        if (self.count + 1) % self.every == 0:
            self.before = bits(self.params)
        return did

    def look(self):
        """Compare the weights before and after the last step of the inner optimizer."""
        after = bits(self.params)
        unmoved = after == self.before
        self.still = (self.still + 1) * unmoved
        if self.count == 2 * self.every and self.all_equal(after) and not unmoved.all():
            warnings.warn("replicas hold equal weights before they meet: is something else "
                          "averaging gradients? DDP?")
        stuck = (self.still == LOOKS).nonzero().flatten().tolist()
        if stuck and self.rank == self.ranks[0]:
            warnings.warn(f"{len(stuck)} of {len(self.params)} trainable parameters do not move, "
                          f"first number {stuck[0]}: does the model still use them? (Not after "
                          "load_state_dict(assign=True), a replaced layer or a deepcopy.)")

    def all_equal(self, sums):
        """Whether all replicas have these sums, which the first one knows. None: of no others, and
        on the others."""
        mine = sums.sum().to(self.message_device)
        first, *others = self.ranks
        if not others:
            return None
        if self.rank != first:
            dist.send(mine, first)
            return None
        theirs = [torch.empty_like(mine) for _ in others]
        # All are received at once: one after the other each would cost the latency of its link.
        works = [dist.irecv(sum_, r) for sum_, r in zip(theirs, others)]
        for work in works:
            work.wait()
        return all(bool(sum_ == mine) for sum_ in theirs)


def inmost(outer):
    """The NoLoCo or DiLoCo inside, or the first fragment's."""
    while True:
        if hasattr(outer, "outers"):
            outer = outer.outers[0]
        elif hasattr(outer, "outer"):
            outer = outer.outer
        else:
            return outer


def bits(params):
    """The sum of each parameter's bits."""
    return torch.stack([p.detach().view(torch.int32).sum() for p in params])
