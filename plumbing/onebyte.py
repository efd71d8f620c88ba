"""NoLoCo's theta in one byte a weight (after Moniqua, arXiv 2002.11787, and SwarmSGD, 1910.12308).

Partners hold nearly the same weights, so weights may travel modulo some B: whoever receives them takes the
value with that remainder which is nearest to its own. It needs no state, so any two can meet. For each
block, a tensor of the model or a piece of one:

    B = 16 max |theta - phi| ,   s = B / 256                                           (M1)
    k = round(theta / s) mod 256         travels, one byte a weight, and s             (M2)
    q = round(own / s) ,    d = (k - q) mod 256, from -128 to 127
    theta' = s (q + d)                                                                 (M3)

    |theta' - theta| <= s / 2    wherever  |theta - own| < B / 2 - s                   (M4)

B is the sender's: how far it has come since the last outer step says how far replicas are apart. (phi differs
between them by about as much: a pair's average halves what each round adds.) Rounding is to the nearest; fp32
weights stay where they are, so nothing is rounded away. The error of a pair's mean, at most s / 4, is a 64th
of the sender's largest step. (s is at least 2^-22 max |theta|: fp32 counts no further. So of a block that has
not moved at all a partner reads little but its own.) docs/hosts.md says how often (M4) fails.
"""
from itertools import pairwise

import torch

from noloco import PIECE, NoLoCo

MARGIN = 16


def lengths(outer):
    """Of each tensor in theta, in order, with the gap that follows it."""
    starts = sorted({(place - outer.theta.data_ptr()) // 4 for place in outer.places if place})
    return [after - start for start, after in pairwise([*starts, len(outer.theta)])]


class OneByte:
    """Before NoLoCo, or a subclass, among the bases of a class: its theta then travels so.

    Raises ValueError where gamma differs from beta, since phi would have to travel too.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self.gamma != self.beta:
            raise ValueError(f"one byte a weight needs gamma = beta, not {self.gamma} and {self.beta}")
        tensors = self.theta.split(lengths(self))
        self.sizes = [len(piece) for tensor in tensors for piece in tensor.split(PIECE)]
        size = len(self.theta) + 4 * len(self.sizes)
        self.letter = torch.empty(size, dtype=torch.uint8, device=self.theta.device)
        self.room = torch.empty(PIECE, device=self.theta.device)        # to reckon in
        self.whole = torch.empty(PIECE, dtype=torch.int32, device=self.theta.device)
        self.thetas = {}                                                # of partners, as they were read

    def parts(self, message):
        """A message's bytes by block, and each block's s."""
        codes, scales = message.split([len(self.theta), 4 * len(self.sizes)])
        return codes.split(self.sizes), scales.view(torch.float32)

    def write(self, name, vector):
        return super().write(name, self.encoded(vector))

    def encoded(self, vector):
        """Eqs. M1 and M2."""
        codes, scales = self.parts(self.letter)
        for theta, phi, k, s in zip(vector.split(self.sizes), self.phi.split(self.sizes), codes, scales):
            x = self.room[:len(theta)]
            least = torch.abs(theta, out=x).max() * 2**-22              # fp32 counts no further
            torch.sub(theta, phi, out=x)
            s.copy_((x.abs_().max() * (MARGIN / 256)).maximum(least).clamp_(min=1e-30))
            k.copy_(self.low_byte(torch.div(theta, s, out=x).round_()))
        return self.letter

    def read(self, message, own, i):
        """Eq. M3, beside a vector of one's own. i: of several partners. What is no such message stays."""
        if message.dtype != torch.uint8:
            return message
        if i not in self.thetas:
            self.thetas[i] = torch.empty_like(own)
        theirs = self.thetas[i]
        codes, scales = self.parts(message.to(own.device))
        for out, x, k, s in zip(theirs.split(self.sizes), own.split(self.sizes), codes, scales):
            q = torch.div(x, s, out=out).round_()
            d = k - self.low_byte(q)                                    # bytes: modulo 256
            q.add_(d.view(torch.int8)).mul_(s)
        return theirs

    def low_byte(self, q):
        """Of whole numbers, negative ones too."""
        return self.whole[:len(q)].copy_(q).to(torch.uint8)

    def exchange(self):
        thetas, phis, n = super().exchange()
        return [self.read(v, self.theta, i) for i, v in enumerate(thetas)], phis, n


class OneByteNoLoCo(OneByte, NoLoCo):
    """As NoLoCo, with a quarter of the bytes."""
