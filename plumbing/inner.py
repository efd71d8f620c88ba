"""The inner optimizer: Adam on a rank's flat vector, or Muon (`--optimizer muon`).

Neither paper uses Muon, but with it NoLoCo came nearer to DDP (docs/results.md). Adam divides each number of
a gradient by the noise of that replica's own small batches. Muon makes a matrix's update orthogonal instead.
"""
import copy

import torch


class Inner:
    """torch optimizers that step together, each on parameters of its own."""

    def __init__(self, *parts):
        self.parts = parts

    def step(self, lr):
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = lr
            part.step()

    def reset(self):
        for part in self.parts:
            part.state.clear()

    def state_dict(self):
        """Without the settings: those of the run that loads hold, such as a new --beta2."""
        return [part.state_dict()["state"] for part in self.parts]

    def load_state_dict(self, states):
        for part, state in zip(self.parts, states):
            # a copy: the state may be mapped from a file that will be removed
            part.load_state_dict(dict(part.state_dict(), state=copy.deepcopy(state)))


def adam(params, beta2=0.95):
    """torch's Adam in its fastest form. params: a list, of parameters or of one flat vector with its grad."""
    return torch.optim.Adam(params, betas=(0.9, beta2), fused=True)


def muon(model, beta2=0.95):
    """An Inner for a Llama: torch's Muon for its layers' matrices, with updates as large as Adam's; Adam for
    all else.
    """
    layers = [p for p in model.model.layers.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if all(p is not matrix for matrix in layers)]
    part = torch.optim.Muon(layers, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    return Inner(part, adam(rest, beta2))
