"""Fewer bytes for the baselines: DDP's gradients and DiLoCo's Delta in bf16 or in one byte
(`--wire`).

Both are sums of a vector v_i over n replicas, in place. `Bf16Sum` is an all-reduce of bf16. Gloo
cannot sum codes, so `Int8Sum` swaps codes twice. Each of the n parts is cut into equal blocks of at
most BLOCK values, and a block has a scale s of its own.
Error feedback, e and f, adds what one rounding left over to the next:

    x = v_i + e_i ,   s = max |x| / 127 ,   k = round(x / s) ,   e_i <- x - s k         (Q1)
    replica i sends the j-th of n parts of its k and s to replica j, which adds up, in fp32:
    x = sum_i s_i k_i + f_j ,   s and k as in Q1 ,   f_j <- x - s k                     (Q2)
    replica j sends its k and s to all. On every replica s k is the j-th part of the sum.

Over any number of sums e and f hold all that has not been applied yet:

    total applied = sum_i (total v_i - e_i) - f     with f = (f_1, ..., f_n)            (Q3)

Each part travels directly, so a sum takes two latencies of the network, a ring 2 (n - 1). NoLoCo
has no bf16: it sends theta, from which bf16 would round updates away. Its one byte is that of
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
    """Q1 to Q3. owed: (e_i, f_i), or () before the first sum."""

    def bytes(self, size):
        blocks, width = blocks_of(size, self.n)
        return 2 * (self.n - 1) * blocks * (width + 4)

    def add_up(self, vector, owed):
        x = vector.new_zeros(self.n, *blocks_of(len(vector), self.n))
        x.view(-1)[:len(vector)] = vector
        e = f = 0
        if owed:
            e, f = owed
            e = e.to(x.device)
            f = f.to(x.device)
        codes, e = rounded(x.add_(e))                                   # Q1
        part = values(self.swapped(codes)).sum(0)
        codes, f = rounded(part.add_(f))                                # Q2
        parts = values(self.swapped(codes.repeat(self.n, 1, 1)))
        vector.copy_(parts.view(-1)[:len(vector)])
        return e, f

    def swapped(self, messages):
        """Send the i-th message to the i-th process; returns those that came."""
        found = torch.empty_like(messages)
        dist.all_to_all_single(found, messages, group=self.group)
        return found


def blocks_of(size, n):
    """(blocks of each of the n parts of `size` values, values of a block). Little of it is padding,
    so that a small vector costs hardly more bytes a value than a large one."""
    part = math.ceil(size / n)
    blocks = math.ceil(part / BLOCK)
    width = 4 * math.ceil(part / blocks / 4)                # so that s lies where fp32 may lie
    return blocks, width


def rounded(x):
    """x (..., blocks, width) -> (codes, uint8: k and behind it s of each block; what is left of
    x)."""
    s = x.abs().amax(-1, keepdim=True).div_(127).clamp_(min=1e-30)
    k = (x / s).round_()
    codes = torch.cat([k.to(torch.int8).view(torch.uint8), s.view(torch.uint8)], -1)
    left = x.addcmul_(s, k, value=-1)
    return codes, left.nan_to_num_(0, 0, 0)             # an Inf spoils only its own step


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
        count = torch.tensor(float(tokens), device=grad.device)
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
        self.owed = state.get("owed", ())                               # of another wire: ()
        super().load_state_dict(state)


SUMS = {"fp32": Fp32Sum, "bf16": Bf16Sum, "int8": Int8Sum}     # by --wire
