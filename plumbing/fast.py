"""Model code by hand, where it buys 5% of a training step or a third of its memory over plain torch.

One piece does: a cross-entropy that keeps one copy of its logits. With a vocabulary of 128000 a copy is the
largest tensor of all, and the plain one makes three (docs/speed.md has the numbers).
"""
from types import MethodType

import torch


def speed_up(model):
    """Let a Llama compute its loss as here: the same numbers to float32 rounding. Returns the model."""
    model.loss = MethodType(loss, model)
    return model


def loss(model, x, targets):
    """Llama.loss of x (B, T, C) and targets (B, T)."""
    logits = model.logits(x).flatten(0, 1).float()                              # (B T, V)
    return CrossEntropy.apply(logits, targets.flatten())


class CrossEntropy(torch.autograd.Function):
    """Sum of -log softmax(logits)[target] over the tokens, in nats.

    Overwrites its logits (tokens, V), first with exp(logits - max), then with the gradient: softmax minus
    one-hot.
    """

    @staticmethod
    def forward(ctx, logits, targets):
        targets = targets[:, None]                                              # (tokens, 1)
        logits.sub_(logits.amax(1, keepdim=True))
        right = logits.gather(1, targets).sum()
        total = logits.exp_().sum(1, keepdim=True)                              # (tokens, 1)
        ctx.save_for_backward(logits, targets, total)
        return total.log().sum() - right

    @staticmethod
    def backward(ctx, g):
        e, targets, total = ctx.saved_tensors
        return e.mul_(g / total).scatter_add_(1, targets, -g.expand(targets.shape)), None
