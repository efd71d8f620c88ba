"""Fragments: K parts of the weights synchronise in turn, so that no message holds the whole model
(`--fragments K`).

Fragment k is about 1/K of the flat vector of weights. It has an outer optimizer of its own, with
phi, delta and partners of its own, and does its outer step every m inner steps, k m / K steps after
fragment 0:

    at step s = k m / K + j m       fragment k does N1 to N3 with the group drawn for (j, k)

A replica sends the same bytes as with whole messages, in messages a K-th as long. A delay of D
steps hides a message that takes D steps, and a fragment's message takes a K-th of a whole one's
time. For DiLoCo fragments are known as Streaming DiLoCo (arXiv 2501.18512). For pairs they are
ours, not the paper's.

Delayed fragments share one thread and one process group, so exchanges leave in the order of inner
steps, which all ranks share; fragments that are due at one step leave in the order of k. An
exchange may wait for an earlier one, never for a later one. So the oldest can always end, and no
circle of fragments waits for each other.
"""
from functools import partial

import torch

from gossip.around import Around
from gossip.delay import Delayed, Messenger
from gossip.due import Due


class InTurn(Around):
    """Around an outer optimizer without a delay: its outer steps come `late` inner steps after
    others'."""

    def __init__(self, outer, late):
        super().__init__(outer)
        self.late = late

    @torch.no_grad()
    def step(self):
        due = self.due()
        if due:
            self.outer.meet()
        self.outer.steps += 1
        return due

    def due(self):
        return Due(self.inner_steps, 0, self.late).departs(self.steps)


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
        turns = [k * inner_steps // fragments for k in range(fragments)]
        outers = []
        for late, start, end in zip(turns, ends, ends[1:]):
            outers.append(make(theta[start:end], cut(lengths, start, end), late))
        if delay:
            wrap = partial(Delayed, delay=delay, messenger=Messenger(outers[0]))
        else:
            wrap = InTurn
        self.outers = [wrap(outer, late=late) for outer, late in zip(outers, turns)]

    def step(self):
        """Count an inner step. Returns whether a fragment did its outer step, or a message
        landed."""
        did = [outer.step() for outer in self.outers]
        return any(did)

    def due(self):
        """Whether a fragment's message departs at the end of the present inner step."""
        return any(outer.due() for outer in self.outers)

    @property
    def steps(self):
        return self.outers[0].steps

    @steps.setter
    def steps(self, steps):
        for outer in self.outers:
            outer.steps = steps

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
        # All count alike. In checkpoints up to 2026-11-28 each began at a number of its own.
        self.steps = self.outers[0].steps


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
