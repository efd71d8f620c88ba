"""NoLoCo's theta in one byte a weight (after Moniqua, arXiv 2002.11787, and SwarmSGD, 1910.12308).

Partners hold nearly equal weights, so a weight may travel modulo some B: the receiver takes the value with
that remainder which is nearest to its own weight. The code needs no state, so any two replicas can meet. For
each block, a tensor of the model or a piece of one:

    B = 16 max |theta - phi| ,   s = B / 256                                           (M1)
    k = round(theta / s) mod 256         travels, one byte a weight, and s             (M2)
    theta' = s (k + 256 round((own / s - k) / 256))                                    (M3)

    |theta' - theta| <= s / 2    wherever  |theta - own| < B / 2 - s                   (M4)

B is the sender's. How far the sender has come since its last outer step tells how far replicas are apart.
(phi differs between replicas by about as much, since a pair's average halves what each round adds.)
Rounding is to the nearest, and fp32 weights stay where they are, so no update is rounded away. The error of a
pair's mean is at most s / 4, a 64th of the sender's largest step. s is at least 2^-22 max |theta|, since fp32
counts no further; so of a block that has not moved a partner reads little but its own. M4 holds in exact
arithmetic: rounding in fp32 adds at most about 2^-23 |theta|. We measured up to 0.33 s more than s / 2 where
|theta / s| is near 2^22, and at most 0.01 s below 2^16. docs/hosts.md says how often M4's condition fails.
"""
from itertools import pairwise

import torch

from noloco import NoLoCo

MARGIN = 16
BLOCK = 1 << 18             # weights at most: fewer stay in cache better, but cost more calls
WHOLE = 1.5 * 2**23         # added to a float up to 2^22, its last byte is that of the nearest whole number


def lengths(outer):
    """Of each tensor in theta, in order, with the gap that follows it."""
    starts = sorted({(place - outer.theta.data_ptr()) // 4 for place in outer.places if place})
    return [after - start for start, after in pairwise([*starts, len(outer.theta)])]


class OneByte:
    """Before NoLoCo, or a subclass, among the bases of a class: its theta travels in one byte a weight.

    Raises ValueError where gamma differs from beta, since phi would have to travel too.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self.gamma != self.beta:
            raise ValueError(f"one byte a weight needs gamma = beta, not {self.gamma} and {self.beta}")
        tensors = self.theta.split(lengths(self))
        self.pieces = [len(piece) for tensor in tensors for piece in tensor.split(BLOCK)]      # the blocks
        size = len(self.theta) + 4 * len(self.pieces)
        self.message = torch.empty(size, dtype=torch.uint8, device=self.theta.device)
        self.room = torch.empty(BLOCK, device=self.theta.device)        # for intermediate results

    def parts(self, message):
        """A message's bytes by block, and each block's s."""
        codes, scales = message.split([len(self.phi), 4 * len(self.pieces)])
        return codes.split(self.pieces), scales.view(torch.float32)

    def encode(self, vector, name):
        return super().encode(self.encoded(vector), name)

    def decode(self, message):
        """fp32 is a vector already."""
        return message if message.dtype == self.theta.dtype else Unread(self, message)

    def notice(self, thetas):
        """Not here: what is read differs from the partner's weights by its rounding."""

    def encoded(self, vector):
        """M1 and M2."""
        codes, scales = self.parts(self.message)
        for theta, phi, k, s in zip(vector.split(self.pieces), self.phi.split(self.pieces), codes, scales):
            x = self.room[:len(theta)]
            moved = largest(torch.sub(theta, phi, out=x))
            s.copy_(moved.mul_(MARGIN / 256).maximum(largest(theta).mul_(2**-22)).clamp_(min=1e-30))
            torch.div(theta, s, out=x).add_(WHOLE)
            k.copy_(x.view(torch.int32))                                # the last byte of each
        return self.message


class Unread:
    """A message of which `split` reads one block at a time, so that the block is still in cache when used.

    It is read beside outer.theta, and may arrive until `split` is called.
    """

    def __init__(self, outer, message):
        self.outer, self.message = outer, message

    def split(self, pieces):
        """M3. A block lasts until the next is read."""
        theta = self.outer.theta
        codes, scales = self.outer.parts(self.message.to(theta.device))
        room = torch.empty(2, BLOCK, device=theta.device)
        for own, k, s in zip(theta.split(pieces), codes, scales):
            x, y = room[:, :len(own)]
            x.copy_(k)
            torch.div(own, 256 * s, out=y).sub_(x, alpha=1 / 256).round_()
            yield torch.add(x, y, alpha=256, out=y).mul_(s)


def largest(x):
    """max |x|"""
    low, high = x.aminmax()
    return high.maximum(-low)


class OneByteNoLoCo(OneByte, NoLoCo):
    """As NoLoCo, with a quarter of the bytes."""
