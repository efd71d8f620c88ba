"""Muon as the inner optimizer (`--optimizer muon`).

Neither paper uses Muon, but with it NoLoCo came nearer to DDP (docs/results.md). Adam divides each number of
a gradient by the noise of that replica's own small batches. Muon makes a matrix's update orthogonal instead.
"""
import torch

from plumbing.processes import BadInput


class Muon:
    """torch's Muon for the matrices of the layers, with updates as large as Adam's; Adam for all else.

    grad: the flat gradient, of which the parameters' gradients are views. beta2: Adam's.
    """

    def __init__(self, grad, model, beta2=0.95):
        if not hasattr(torch.optim, "Muon"):
            raise BadInput(f"--optimizer muon needs torch 2.9 or newer, this is {torch.__version__}")
        self.grad = grad
        layers = [p for p in model.model.layers.parameters() if p.ndim == 2]
        inside = set(layers)
        rest = [p for p in model.parameters() if p not in inside]
        self.parts = (torch.optim.Muon(layers, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
                      torch.optim.Adam(rest, betas=(0.9, beta2), fused=True))

    def step(self, lr):
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = lr
            part.step()

    def reset(self):
        for part in self.parts:
            part.state.clear()

    def state_dict(self):
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, state):
        for part, saved in zip(self.parts, state):
            settings = part.state_dict()["param_groups"]            # a new --beta2 holds
            part.load_state_dict(dict(saved, param_groups=settings))
