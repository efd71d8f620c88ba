"""What is faster by hand than plain torch: Adam on one flat vector, and a cross-entropy with one copy of its
logits (docs/speed.md has the figures).

With a vocabulary of 128000 that copy is the largest tensor of all, and torch's cross-entropy makes three.
"""
import torch
from torch.optim.adam import adam as adam_update

from model import Llama


class Adam:
    """Adam on one flat vector, in one pass. (torch.optim.Adam imports torch.compile: a second.)"""

    def __init__(self, theta, grad, beta2=0.95):
        self.theta, self.grad, self.beta2 = theta, grad, beta2
        self.state = dict(m=torch.zeros_like(theta), v=torch.zeros_like(theta),
                          steps=torch.zeros((), device=theta.device))

    def step(self, lr):
        m, v, steps = ([value] for value in self.state.values())
        adam_update([self.theta], [self.grad], m, v, [], steps, lr=lr, beta1=0.9, beta2=self.beta2, eps=1e-8,
                    weight_decay=0.0, fused=True, amsgrad=False, maximize=False)

    def reset(self):
        for value in self.state.values():
            value.zero_()

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        for name, value in self.state.items():
            value.copy_(state[name])


class FastLlama(Llama):
    """A Llama with the loss below, equal to its own up to float32 rounding."""

    def loss(self, x, targets):
        logits = self.logits(x).flatten(0, 1).float()                           # (B T, V)
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
