"""NoLoCo's theta in one byte per weight (after Moniqua, arXiv 2002.11787, and SwarmSGD,
1910.12308).

Partners hold nearly equal weights, so a weight may travel modulo some B: the receiver takes the
value with that remainder which is nearest to its own weight. The code needs no state, so any two
replicas can average. For each block, a tensor of the model or a piece of one:

    B = 16 max |theta - phi| ,   s = B / 256                                           (M1)
    k = round(theta / s) mod 256         travels in one byte per weight, with s            (M2)
    theta' = s (k + 256 round((own / s - k) / 256))                                    (M3)

    |theta' - theta| <= s / 2    wherever  |theta - own| < B / 2 - s                   (M4)

The sender chooses B. How far it has come since its last outer step tells how far replicas are
apart. (phi differs between replicas by about as much, since a pair's average halves what each round
adds.) Rounding is to the nearest, and fp32 weights stay where they are, so no update is rounded
away. The error of a pair's mean is at most s / 4, a 64th of the sender's largest step. s is at
least 2^-22 max |theta|, since fp32 counts no further; so of a block that has not moved a partner
reads little but its own. M4 holds in exact
arithmetic: rounding in fp32 adds at most about 2^-23 |theta|. We measured up to 0.33 s more than s
/ 2 where |theta / s| is near 2^22, and at most 0.01 s below 2^16. docs/speed.md says how near M4's
condition came to failing.
"""
import torch

from noloco import NoLoCo, padded, parameter_list

MARGIN = 16
BLOCK = 1 << 18             # weights at most: fewer stay in cache better, but cost more calls
WHOLE = 1.5 * 2**23         # the last byte of x + WHOLE, |x| < 2^22, is that of round(x)


class OneByteNoLoCo(NoLoCo):
    """NoLoCo whose theta travels in one byte per weight.

    If phi travels too, it does so in fp32.

    lengths: if params is a vector, those of the tensors in it (see `lengths_of`).
    Memory in addition to NoLoCo's: one byte per weight for the message and for each partner's.
    """

    def __init__(self, params, ranks=None, *, lengths=None, **settings):
        if not torch.is_tensor(params):
            params = parameter_list(params)
            lengths = lengths_of(params)
        super().__init__(params, ranks, **settings)
        self.codec = OneByte(lengths)

    def cost(self, group):
        size = self.codec.bytes(len(self.theta))
        if self.gamma != self.beta:
            size += self.phi.nbytes
        return (len(group) - 1) * size

    def swap(self, name, vector, group, process_group=None):
        if name != "theta":
            return super().swap(name, vector, group, process_group)
        messages = super().swap(name, self.codec.encode(vector, self.phi), group, process_group)
        own = group.index(self.rank)
        messages.pop(own)
        vectors = []
        for i, theirs in enumerate(messages):
            out = self.buffer((name, i), vector, vector.device)
            vectors.append(self.codec.decode(theirs, vector, out))
        vectors.insert(own, vector)
        return vectors


class OneByte:
    """The code itself: a vector's message in one byte per weight, and back.

    lengths: see `lengths_of`. A block is a tensor, or BLOCK weights of a larger one.
    """

    def __init__(self, lengths):
        self.blocks = []
        for length in lengths:
            self.blocks += [BLOCK] * (length // BLOCK)
            if length % BLOCK:
                self.blocks.append(length % BLOCK)
        self.message = self.x = torch.empty(0)      # made when the device is known, then used again

    def bytes(self, size):
        """Of a message of `size` weights: each weight's k, then each block's s in fp32."""
        return size + 4 * len(self.blocks)

    def scales(self, message):
        """The message's s, one for each block."""
        return message[sum(self.blocks):].view(torch.float32)

    def encode(self, vector, phi):
        """M1 and M2. phi: this replica's slow weights, from which `vector` set out."""
        size = len(vector)
        self.make_buffers(vector)
        blocks = zip(vector.split(self.blocks), phi.split(self.blocks),
                     self.message[:size].split(self.blocks), self.scales(self.message))
        for theta, own_phi, k, s in blocks:
            x = self.x[:len(theta)]
            step = largest(torch.sub(theta, own_phi, out=x)).mul_(MARGIN / 256)
            finest = largest(theta).mul_(2**-22)
            s.copy_(step.maximum(finest).clamp_(min=1e-30))
            torch.div(theta, s, out=x).add_(WHOLE)
            k.copy_(x.view(torch.int32))                                # the last byte of each
        return self.message

    def decode(self, message, own, out):
        """M3, written to `out`. own: the vector that this replica sent itself."""
        self.make_buffers(own)
        blocks = zip(out.split(self.blocks), own.split(self.blocks),
                     message[:len(own)].split(self.blocks), self.scales(message))
        for theta, mine, k, s in blocks:
            x = self.x[:len(mine)].copy_(k)
            y = torch.div(mine, 256 * s, out=theta).sub_(x, alpha=1 / 256).round_()
            torch.add(x, y, alpha=256, out=theta).mul_(s)
        return out

    def make_buffers(self, vector):
        """Once: the message, and x for what is computed of a block."""
        if len(self.message) == 0:
            self.message = vector.new_empty(self.bytes(len(vector)), dtype=torch.uint8)
            self.x = vector.new_empty(max(self.blocks))


def lengths_of(params):
    """Of each tensor in noloco.flatten's vector, with the gap that follows it."""
    return [padded(p) for p in dict.fromkeys(params) if p.requires_grad]


def largest(x):
    """max |x|"""
    low, high = x.aminmax()
    return high.maximum(-low)
