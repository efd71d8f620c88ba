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
import torch

from gossip.delay import Delayed, Messenger
from noloco import flatten, room, whereabouts


class Fragments:
    """The fragments' outer optimizers, stepped together, in place of one outer optimizer.

    make(params, offset) -> a NoLoCo or DiLoCo. params: of the whole model. fragments: K, from 1 to
    inner_steps. delay: D, from 0 to inner_steps. Raises ValueError.
    """

    def __init__(self, make, params, fragments, inner_steps, delay=0):
        if isinstance(params, torch.nn.Module):
            raise ValueError("give the model's parameters: model.parameters()")
        if not isinstance(fragments, int) or not 1 <= fragments <= inner_steps:
            raise ValueError(f"fragments must be from 1 to inner_steps ({inner_steps}), not "
                             f"{fragments}")
        self.params = list(params)
        parts = cut(self.params, fragments)
        self.outers = [make(part, k * inner_steps // fragments) for k, part in enumerate(parts)]
        # Of the model's own parameters: a fragment's outer optimizer sees pieces of their vector.
        self.places = whereabouts(self.params)
        for outer, part in zip(self.outers, parts):
            outer.watched = self.whole_tensors(part)
            for piece in part:
                piece.grad = None   # else a trainer that sets its own to None frees no memory
        if delay:
            messenger = Messenger(self.outers[0])
            self.outers = [Delayed(outer, delay, messenger) for outer in self.outers]

    def step(self):
        """Count an inner step. Returns whether a fragment did its outer step, or a message
        landed."""
        if whereabouts(self.params) != self.places:
            raise RuntimeError("parameters were moved (.to), frozen or unfrozen: first that, then "
                               "Fragments")
        did = [outer.step() for outer in self.outers]
        return any(did)

    def whole_tensors(self, part):
        """As NoLoCo.watched: {index in the part: the number of the parameter that it is, whole}.

        A piece of a tensor may well not move, such as the embedding's rows of rare tokens.
        """
        numbers = {}
        rooms = {}
        for p in dict.fromkeys(self.params):
            if p.requires_grad:
                numbers[p.data_ptr()] = len(numbers)
                rooms[p.data_ptr()] = room(p)
        watched = {}
        for index, piece in enumerate(part):
            if rooms.get(piece.data_ptr()) == piece.numel():
                watched[index] = numbers[piece.data_ptr()]
        return watched

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
        """Raises RuntimeError when the state is that of another number of fragments."""
        states = state.get("fragments", [])
        if len(states) != len(self.outers):
            raise RuntimeError(f"this is a state of {len(states)} fragments, not of "
                               f"{len(self.outers)}")
        for outer, its in zip(self.outers, states):
            outer.load_state_dict(its)


def cut(params, count):
    """The flat vector of the parameters in `count` parts of equal size, up to 16 weights.

    Each part is a list of parameters, which are pieces of the model's tensors: views of the same
    weights and gradients. Raises ValueError where there are fewer than 16 weights for a part.
    """
    params = [p for p in dict.fromkeys(params) if p.requires_grad]
    theta, grad = flatten(params)
    if len(theta) < 16 * count:
        raise ValueError(f"{count} fragments are too many for {len(theta)} weights")
    ends = [len(theta) // 16 * (k + 1) // count * 16 for k in range(count)]
    parts = [[] for _ in ends]
    k = start = 0
    for p in params:
        after = start + room(p)
        while start < after:
            end = min(after, ends[k])
            piece = torch.nn.Parameter(theta[start:end])
            piece.grad = grad[start:end]
            parts[k].append(piece)
            start = end
            if end == ends[k]:
                k += 1
    return parts
