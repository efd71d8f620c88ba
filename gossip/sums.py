"""Fewer bytes for the baselines: DDP's gradients and DiLoCo's Delta in bf16 or in one byte
(`--wire`).

Both are sums of a vector v_i over n replicas, in place. `Bf16Sum` is an all-reduce of bf16. Gloo
cannot sum codes, so `Int8Sum` swaps codes twice. Each of the n parts is cut into equal blocks of
at most BLOCK values, and a block has a scale s of its own.
Error feedback, e and f, adds what one rounding left over to the next:

    x = v_i + e_i ,   s = max |x| / 127 ,   k = round(x / s) ,   e_i <- x - s k         (Q1)
    replica i sends the j-th of n parts of its k and s to replica j, which adds up, in fp32:
    x = sum_i s_i k_i + f_j ,   s and k as in Q1 ,   f_j <- x - s k                     (Q2)
    replica j sends its k and s to all. On every replica s k is the j-th part of the sum.

Over any number of sums e and f hold all that has not been applied yet:

    total applied = sum_i (total v_i - e_i) - f     with f = (f_1, ..., f_n)            (Q3)

Each part travels directly, so a sum takes two latencies of the network, a ring 2 (n - 1). NoLoCo
has no bf16: it sends theta, from which bf16 would round updates away. Its one byte is in
onebyte.py.
"""
import math

import torch
import torch.distributed as dist

from noloco import DiLoCo

BLOCK = 512


class Fp32Sum:
    """Sums vectors over a process group."""
    dtype = torch.float32       # of what is sent

    def __init__(self, group):
        self.group, self.n = group, dist.get_world_size(group)

    def bytes(self, size):
        """What a process sends for a sum of `size` values; here by a ring."""
        return 2 * (self.n - 1) * self.dtype.itemsize * size // self.n

    def add_up(self, vector, owed):
        """Sum in place, with the same bits on all processes. Returns what to give as `owed` the
        next time.

        Here it is nothing. What one byte owed, before a run went on with another wire, is dropped:
        it would be stale by the time that one byte is used again.
        """
        sent = vector.to(self.dtype)                    # in fp32 the vector itself
        dist.all_reduce(sent, group=self.group)
        vector.copy_(sent)
        return ()


class Bf16Sum(Fp32Sum):
    dtype = torch.bfloat16


class Int8Sum(Fp32Sum):
    """Q1 to Q3, of vectors of one length. owed: (e_i, f_i), or () before the first sum.

    All memory is kept, since fresh pages would cost as much time as the sums: 10 + 8 / n bytes per
    value. So what `add_up` returns is overwritten by the call after the next one.
    """

    def __init__(self, group):
        super().__init__(group)
        self.codes = self.came = None
        self.spare = ()             # what was owed before: the next call writes to it

    def bytes(self, size):
        blocks, width = blocks_of(size, self.n)
        return 2 * (self.n - 1) * blocks * (width + 4)

    def add_up(self, vector, owed):
        blocks, width = blocks_of(len(vector), self.n)
        if self.codes is None:
            self.codes = vector.new_empty(self.n, blocks, width + 4, dtype=torch.uint8)
            self.came = torch.empty_like(self.codes)
        if owed:
            e = owed[0].to(vector.device)
            f = owed[1].to(vector.device)
        else:
            e, f = self.nothing(vector)
        next_e, next_f = self.spare or self.nothing(vector)
        self.spare = e, f

        flat = next_e.view(-1)
        for rows in pieces(self.n * blocks, width, vector):
            piece = slice(rows.start * width, min(rows.stop * width, len(vector)))
            torch.add(vector[piece], e.view(-1)[piece], out=flat[piece])
            round_to(self.codes.view(-1, width + 4)[rows], next_e.view(-1, width)[rows])    # Q1
        self.swap()
        for rows in pieces(blocks, self.n * width, vector):
            torch.add(values(self.came[:, rows]).sum(0), f[rows], out=next_f[rows])
            round_to(self.codes[0, rows], next_f[rows])                                     # Q2
        self.codes[1:] = self.codes[0]
        self.swap()
        for rows in pieces(self.n * blocks, width, vector):
            piece = slice(rows.start * width, min(rows.stop * width, len(vector)))
            sums = values(self.came.view(-1, width + 4)[rows]).view(-1)
            vector[piece] = sums[:piece.stop - piece.start]
        return next_e, next_f

    def nothing(self, vector):
        """(e, f) before the first sum. They have zeros behind the vector's end, and keep them."""
        blocks, width = blocks_of(len(vector), self.n)
        return vector.new_zeros(self.n, blocks, width), vector.new_zeros(blocks, width)

    def swap(self):
        """Send the i-th part of `codes` to the i-th process; `came` becomes what they sent."""
        dist.all_to_all_single(self.came, self.codes, group=self.group)


def pieces(count, width, vector):
    """Slices of `count` rows of this width, so short that on a CPU all of one stays in cache."""
    size = 1 << 24 if vector.is_cuda else 1 << 17
    step = max(1, size // width)
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


def blocks_of(size, n):
    """(blocks of each of the n parts of `size` values, values of a block). Little of it is padding,
    so that a small vector costs hardly more bytes a value than a large one."""
    part = math.ceil(size / n)
    blocks = math.ceil(part / BLOCK)
    width = 4 * math.ceil(part / blocks / 4)                # so that s lies where fp32 may lie
    return blocks, width


def round_to(codes, x):
    """Write x (..., blocks, width) to codes (uint8): k and behind it s of each block. x becomes
    what is left of it."""
    s = x.abs().amax(-1, keepdim=True).div_(127).clamp_(min=1e-30)
    k = (x / s).round_()
    codes[..., :-4].view(torch.int8).copy_(k)
    codes[..., -4:] = s.view(torch.uint8)
    x.addcmul_(s, k, value=-1)
    x.nan_to_num_(0, 0, 0)                              # an Inf spoils only its own step


def values(codes):
    """s k"""
    return codes[..., :-4].view(torch.int8) * codes[..., -4:].view(torch.float32)


class Average:
    """Of gradients over the replicas, for ddp. owed: what a checkpoint keeps of it."""

    def __init__(self, wire, replicas):
        self.wire = wire(dist.new_group(replicas, use_local_synchronization=True))
        self.bytes_sent, self.owed = 0, ()

    def __call__(self, grad, tokens):
        """Sum grad in place; returns the sum of tokens."""
        count = grad.new_tensor(float(tokens))
        work = dist.all_reduce(count, group=self.wire.group, async_op=True)
        self.owed = self.wire.add_up(grad, self.owed)
        self.bytes_sent += self.wire.bytes(len(grad))
        work.wait()
        return float(count)


class ShortDiLoCo(DiLoCo):
    """Delta travels by a wire.

    wire: Bf16Sum or Int8Sum, a class. owed: what its rounding left over; `exchange` finds the next
    one, which counts from the merge on, since a message that is under way at a checkpoint leaves
    once more. Raises ValueError for one replica.
    """

    def __init__(self, params, ranks=None, *, wire, **settings):
        super().__init__(params, ranks, **settings)
        if not self.everyone:               # without a group a wire would sum over all processes
            raise ValueError("one replica has nothing to sum in fewer bytes: use DiLoCo")
        self.wire = wire(self.everyone)
        self.owed = self.owed_next = ()

    def cost(self, group):
        return self.wire.bytes(len(self.theta))

    def exchange(self, theta, group, process_group=None):
        delta = self.overwritable(theta).sub_(self.phi)
        self.owed_next = self.wire.add_up(delta, self.owed)
        return [delta.add_(self.phi, alpha=len(group))], []

    def outer_step(self, theta, thetas, phis):
        self.owed = self.owed_next
        super().outer_step(theta, thetas, phis)

    def state_dict(self):
        return dict(super().state_dict(), owed=self.owed)

    def load_state_dict(self, state):
        owed = state.get("owed", ())                                    # of another wire: ()
        self.owed = tuple(v.clone() for v in owed)          # the wire will write to them
        super().load_state_dict(state)


SUMS = {"fp32": Fp32Sum, "bf16": Bf16Sum, "int8": Int8Sum}     # by --wire
