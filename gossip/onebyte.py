"""NoLoCo's theta in one byte a weight (after Moniqua, arXiv 2002.11787, and SwarmSGD, 1910.12308).

Partners hold nearly equal weights, so a weight may travel modulo some B: the receiver takes the
value with that remainder which is nearest to its own weight. The code needs no state, so any two
replicas can meet. For each block, a tensor of the model or a piece of one:

    B = 16 max |theta - phi| ,   s = B / 256                                           (M1)
    k = round(theta / s) mod 256         travels, one byte a weight, and s             (M2)
    theta' = s (k + 256 round((own / s - k) / 256))                                    (M3)

    |theta' - theta| <= s / 2    wherever  |theta - own| < B / 2 - s                   (M4)

B is the sender's. How far the sender has come since its last outer step tells how far replicas are
apart. (phi differs between replicas by about as much, since a pair's average halves what each round
adds.) Rounding is to the nearest, and fp32 weights stay where they are, so no update is rounded
away. The error of a pair's mean is at most s / 4, a 64th of the sender's largest step. s is at
least 2^-22 max |theta|, since fp32 counts no further; so of a block that has not moved a partner
reads little but its own. M4 holds in exact
arithmetic: rounding in fp32 adds at most about 2^-23 |theta|. We measured up to 0.33 s more than s
/ 2 where |theta / s| is near 2^22, and at most 0.01 s below 2^16. docs/hosts.md says how often M4's
condition fails.
"""
import torch

MARGIN = 16
BLOCK = 1 << 18             # weights at most: fewer stay in cache better, but cost more calls
WHOLE = 1.5 * 2**23         # the last byte of x + WHOLE, |x| < 2^22, is that of round(x)


class OneByte:
    """A codec for NoLoCo (`codec=OneByte()`): theta travels in one byte a weight. phi cannot travel
    so, since it says nothing of its own about how far replicas are apart: gamma must be beta.

    Memory beside noloco.Fp32's: the message, a byte a weight. A partner reads rounded weights.
    """
    exact = False

    def fit(self, theta, lengths):
        """As noloco.Fp32.fit. A piece is a block: a tensor, or BLOCK weights of a larger one."""
        self.pieces = []
        start = 0
        for length in lengths:
            end = start + length
            while start < end:
                self.pieces.append(slice(start, min(start + BLOCK, end)))
                start = self.pieces[-1].stop
        self.size = len(theta)
        self.message = torch.empty(self.bytes(self.size), dtype=torch.uint8, device=theta.device)
        largest_block = max(piece.stop - piece.start for piece in self.pieces)
        self.room = torch.empty(largest_block, device=theta.device)     # for intermediate results
        return self.pieces

    def bytes(self, size):
        """Of a message of `size` weights: each weight's k, then each block's s in fp32."""
        return size + 4 * len(self.pieces)

    def scales(self, message):
        """The message's s, one for each block."""
        return message[self.size:].view(torch.float32)

    def encode(self, vector, phi):
        """M1 and M2."""
        scales = self.scales(self.message)
        for piece, s in zip(self.pieces, scales):
            theta = vector[piece]
            x = self.room[:len(theta)]
            step = largest(torch.sub(theta, phi[piece], out=x)).mul_(MARGIN / 256)
            finest = largest(theta).mul_(2**-22)
            s.copy_(step.maximum(finest).clamp_(min=1e-30))
            torch.div(theta, s, out=x).add_(WHOLE)
            self.message[piece].copy_(x.view(torch.int32))              # the last byte of each
        return self.message

    def decode(self, message, number, own):
        """M3 of one block. A vector in fp32, such as this replica's own, is read as it is."""
        piece = self.pieces[number]
        if message.dtype == torch.float32:
            return message[piece].to(own.device)
        k = message[piece].to(own.device)
        s = self.scales(message)[number].to(own.device)
        x = self.room[:len(own)].copy_(k)
        y = torch.div(own, 256 * s).sub_(x, alpha=1 / 256).round_()
        return torch.add(x, y, alpha=256, out=y).mul_(s)


def largest(x):
    """max |x|"""
    low, high = x.aminmax()
    return high.maximum(-low)
