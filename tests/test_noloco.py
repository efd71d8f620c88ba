"""noloco.py beyond the equations: what it refuses, and the README's example."""

import contextlib
import io
import re

import pytest
import torch

from noloco import NoLoCo
from tests.harness import HERE, processes


def test_noloco_notices_moved_parameters():
    model = torch.nn.Linear(4, 4)
    outer = NoLoCo(model.parameters(), inner_steps=1)
    model.weight.data = model.weight.data.clone()  # what .to() does
    with pytest.raises(RuntimeError, match="moved"):
        outer.step()


def _readme_optimizer_example(rank, world):
    block = next(
        b
        for b in re.findall(r"```python\n(.*?)```", (HERE / "README.md").read_text(), re.S)
        if "outer = NoLoCo(" in b
    )
    scope, out = {}, io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(block, scope)
    return out.getvalue(), scope["outer"].steps, scope["model"].weight.tolist()


def test_readme_optimizer_example_learns_its_target():
    """A loop as torchrun runs it: every rank's weights come near those that they should be.

    With two replicas they are equal.
    """
    (first, steps, weights), (second, _, others) = processes(2, _readme_optimizer_example)
    assert first.startswith("rank 0: loss 0.0") and second.startswith("rank 1: loss 0.0") and steps == 400
    assert weights == others and torch.allclose(torch.tensor(weights), torch.ones(1, 8), rtol=0, atol=0.05)
