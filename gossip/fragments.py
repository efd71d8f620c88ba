"""Fragments: K parts of the weights take turns, so that no message holds the whole model
(`--fragments K`).

Fragment k is about 1/K of the flat vector of weights. It has an outer optimizer of its own, with
phi, delta and partners of its own, and does its outer step every m inner steps, k m / K steps after
fragment 0:

    at step s = k m / K + j m       fragment k does N1 to N3 with the group drawn for (j, k)

A replica sends the same bytes as with whole messages, in messages a K-th as long. With a delay of D
steps a message is hidden that takes D steps, K times less than a whole one. For DiLoCo fragments
are known as Streaming DiLoCo (arXiv 2501.18512). For pairs they are ours.

Delayed fragments share one thread and one process group, so exchanges leave in the order of inner
steps, which all ranks share; fragments that are due at one step leave in the order of k. An
exchange may wait for an earlier one, never for a later one. So the oldest can always end, and no
circle of fragments waits for each other.
"""
from gossip.delay import Delayed, Messenger


class Fragments:
    """The fragments' outer optimizers, stepped together, in place of one outer optimizer.

    make(vector, lengths, late) -> a NoLoCo or DiLoCo of this part of theta. late: by how many inner
    steps its outer steps come after fragment 0's; NoLoCo takes it as its seed, so that fragments
    draw apart. theta: noloco.flatten's vector. lengths: gossip.lengths_of(params).
    fragments: K, from 1 to inner_steps. delay: D, from 0 to inner_steps.
    """

    def __init__(self, make, theta, lengths, fragments, inner_steps, delay=0):
        if not 1 <= fragments <= min(inner_steps, len(theta) // 16):
            raise ValueError(f"fragments must be from 1 to inner_steps ({inner_steps}), and of 16 "
                             f"weights or more, not {fragments}")
        ends = [len(theta) // 16 * k // fragments * 16 for k in range(fragments + 1)]
        self.late = [k * inner_steps // fragments for k in range(fragments)]
        self.outers = []
        for late, start, end in zip(self.late, ends, ends[1:]):
            self.outers.append(make(theta[start:end], cut(lengths, start, end), late))
        self.steps = 0
        if delay:
            messenger = Messenger(self.outers[0])
            self.outers = [Delayed(outer, delay, messenger) for outer in self.outers]

    def step(self):
        """Count an inner step. Returns whether a fragment did its outer step, or a message
        landed."""
        did = [outer.step() for outer in self.outers]
        return any(did)

    @property
    def steps(self):
        return self.outers[0].steps

    @steps.setter
    def steps(self, steps):
        """Each fragment counts from its own beginning, so its first outer step comes later."""
        for outer, late in zip(self.outers, self.late):
            outer.steps = steps - late

    @property
    def bytes_sent(self):
        return sum(outer.bytes_sent for outer in self.outers)

    def settle(self):
        for outer in self.outers:
            outer.settle()

    def state_dict(self):
        return {"fragments": [outer.state_dict() for outer in self.outers]}

    def load_state_dict(self, state):
        for outer, its in zip(self.outers, state["fragments"], strict=True):
            outer.load_state_dict(its)


def cut(lengths, start, end):
    """The lengths of the tensors' pieces that lie between start and end."""
    found = []
    at = 0
    for length in lengths:
        inside = min(end, at + length) - max(start, at)
        if inside > 0:
            found.append(inside)
        at += length
    return found
