"""One byte a weight: M1 to M4 against float64, and runs on four processes."""

import shutil

import pytest
import torch

from plumbing.onebyte import BLOCK, MARGIN, OneByteNoLoCo, Unread
from test_minimal import _noloco, assert_replicas, simulated
from tests.harness import checkpoint, gloo, metrics, processes, run


def moved(seed, size=1000):
    """A OneByteNoLoCo whose theta has left phi, in two tensors of different size and step."""
    draw = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(size, generator=draw), 100 * torch.randn(16, generator=draw)]
    frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)         # does not travel
    outer = OneByteNoLoCo([frozen, *(torch.nn.Parameter(t) for t in tensors)], ranks=[0])
    outer.theta.sub_(1e-3 * torch.randn(outer.theta.shape, generator=draw))
    return outer


def whole(outer, message, own):
    return torch.cat([part.clone() for part in Unread(outer, message, own).split(outer.pieces)])


@pytest.mark.parametrize("share, size", [(0.0, 1000), (0.3, 1000), (0.999, 1000), (0.999, BLOCK + 8)])
def test_the_error_is_at_most_half_a_step_up_to_the_bound(share, size):
    """(M4), on both sides of the bound, for weights that differ by a share of what it allows."""
    outer = moved(0, size)
    message = outer.encode(outer.theta, "theta").clone()
    assert message.dtype == torch.uint8 and len(message) == len(outer.theta) + 4 * (2 + (size > BLOCK))
    _, scales = outer.parts(message)
    s = torch.cat([v.expand(n) for v, n in zip(scales, outer.pieces)]).double()
    far = share * (128 * s - s)
    sign = torch.randn(len(s), generator=torch.Generator().manual_seed(1)).sign()
    own = (outer.theta.double() + sign * far).float()
    theirs = whole(outer, message, own).double()
    rounding = outer.theta.double().abs() * 2**-22
    assert ((theirs - outer.theta).abs() <= s / 2 + rounding).all()
    # beyond it the value is off by B, and yet no farther from one's own than B / 2
    own = (outer.theta.double() + sign * 130 * s).float()
    theirs = whole(outer, message, own).double()
    assert ((theirs - outer.theta - sign * 256 * s).abs() <= s / 2 + 2 * rounding).all()
    assert ((theirs - own).abs() <= 129 * s).all()


def test_what_has_not_moved_and_what_is_not_finite():
    outer = moved(1)
    outer.phi.copy_(outer.theta)                        # s is as small as fp32 can count
    same = whole(outer, outer.encode(outer.theta, "theta").clone(), outer.theta)
    assert torch.allclose(same, outer.theta, rtol=0, atol=float(outer.theta.abs().max()) * 2**-22)
    for poison in (float("nan"), float("inf")):
        outer.theta[3] = poison
        message = outer.encode(outer.theta, "theta").clone()
        assert not torch.isfinite(whole(outer, message, outer.phi).sum())


def modulo(theta, phi, own):
    """What a partner reads: (M1) to (M3) for one tensor, in float64."""
    s = MARGIN * (theta - phi).abs().max() / 256
    q = torch.round(own / s)
    d = torch.remainder(torch.round(theta / s) - q + 128, 256) - 128
    return s * (q + d)


@pytest.mark.parametrize("world, n", [(4, 2), (5, 3), (4, 4)])
def test_processes_equal_a_float64_simulation_with_the_same_rounding(world, n):
    steps, m = 12, 3
    found = processes(world, _noloco, OneByteNoLoCo, dict(inner_steps=m, group_size=n), steps)
    want = simulated(world, steps, m, n, seen=modulo)
    assert_replicas(found, want)
    if world == 4:
        padded = sum(-(-p.numel() // 16) * 16 for p in want[0])
        assert [sent for _, sent in found] == [(n - 1) * (padded + 4 * len(want[0])) * steps // m] * world


@gloo
def _one_step(rank, world):
    model = torch.nn.Linear(50, 50)
    torch.nn.init.constant_(model.weight, 0.1)
    torch.nn.init.constant_(model.bias, 0.1)
    outer = OneByteNoLoCo(model.parameters(), inner_steps=1, alpha=0, beta=1)
    draw = torch.Generator().manual_seed(rank)
    with torch.no_grad():
        outer.theta.add_(0.01 * torch.randn(outer.theta.shape, generator=draw))
    before = outer.theta.clone()
    outer.encode(outer.theta, "theta")
    scales = outer.parts(outer.message)[1].tolist()
    outer.step()
    return before.tolist(), outer.theta.tolist(), scales


def test_both_partners_end_with_the_same_mean_up_to_half_a_step():
    (a, after_a, scale_a), (b, after_b, scale_b) = processes(2, _one_step)
    mean = (torch.tensor(a).double() + torch.tensor(b).double()) / 2
    s = max(scale_a + scale_b)
    for after in (after_a, after_b):
        assert (torch.tensor(after).double() - mean).abs().max() <= s / 4 + 1e-7


def test_a_run_goes_on_bit_for_bit_and_sends_a_quarter(trained, tmp_path):
    trained(4, "--wire", "int8", "--steps", 12, "--inner-steps", 3, "--eval-every", 6, "--save-every", 6)
    whole, again = tmp_path / "runs/x", tmp_path / "runs/y"
    shutil.copytree(whole, again)
    shutil.rmtree(again / "checkpoints/00000012")
    run(4, "--resume", again, cwd=tmp_path)
    for rank in range(4):
        a, b = (checkpoint(folder, 12, rank) for folder in (whole, again))
        assert torch.equal(a["theta"], b["theta"]) and torch.equal(a["outer"]["phi"], b["outer"]["phi"])
    theta = checkpoint(whole, 12, 0)["theta"].numel()
    assert 4 * 4 * theta <= metrics(whole)[-1]["sync_bytes"] <= 4 * 4 * theta * 1.05
