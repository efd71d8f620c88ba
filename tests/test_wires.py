"""plumbing/wires.py: sums in bf16 and in one byte, against float64, and runs that go on to the bit."""

import shutil
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from noloco import DiLoCo
from plumbing.overlap import DelayedDiLoCo, DelayedShortDiLoCo
from plumbing.wires import BLOCK, Bf16, Int8, ShortDiLoCo, rounded, values
from test_minimal import _noloco
from tests.harness import checkpoint, gloo, metrics, processes, run

WORLD, ROUNDS = 3, 4
SIZE, WHOLE = 2 * WORLD * BLOCK - 300, 2 * WORLD * BLOCK        # parts of two blocks, the last one not full


def vectors(rank):
    """One for each sum, whose blocks differ in size."""
    draw = torch.Generator().manual_seed(rank)
    return torch.randn(ROUNDS, SIZE, generator=draw) * torch.logspace(-3, 2, SIZE)


@gloo
def _sums(rank, world, wire):
    """(the sums, what rounding left over, bytes counted, bytes that went to other processes)."""
    wire, owed, found, sent = wire(dist.group.WORLD), (), vectors(rank), []
    swap = dist.all_to_all_single

    def counting(found, messages, **kwargs):
        sent.append(messages.nbytes - messages[rank].nbytes)
        return swap(found, messages, **kwargs)

    with mock.patch.object(dist, "all_to_all_single", counting):
        for vector in found:
            owed = wire.add_up(vector, owed)
    return found.tolist(), [v.flatten().tolist() for v in owed], ROUNDS * wire.bytes(SIZE), sum(sent)


def rounding(x):
    """(s k, x - s k) in float64."""
    blocks = x.view(-1, BLOCK)
    s = (blocks.abs().amax(1, keepdim=True).float() / 127).double().clamp(min=1e-30)
    return (s * torch.round(blocks / s)).view(-1), (blocks - s * torch.round(blocks / s)).view(-1)


def test_one_byte_equals_a_float64_simulation_and_error_feedback_loses_nothing():
    found = processes(WORLD, _sums, Int8)
    wide = lambda v: torch.nn.functional.pad(torch.as_tensor(v).double(), (0, WHOLE - SIZE))
    given, e, f = [wide(vectors(rank)) for rank in range(WORLD)], [0] * WORLD, 0
    for step in range(ROUNDS):
        codes, e = zip(*[rounding(given[rank][step] + e[rank]) for rank in range(WORLD)])
        want, f = rounding(sum(codes) + f)
        assert torch.allclose(wide(found[0][0][step]), want, rtol=2e-6, atol=1e-6)
    assert all(sums == found[0][0] for sums, *_ in found)               # the same bits
    owed = sum(torch.tensor(mine).double() for _, (mine, _), *_ in found)
    owed += torch.cat([torch.tensor(part).double() for _, (_, part), *_ in found])
    applied, true = wide(found[0][0]).sum(0), sum(given).sum(0)
    assert torch.allclose(applied + owed, true, rtol=0, atol=1e-6 * float(true.abs().max()))        # (Q3)
    assert all(counted == sent == ROUNDS * 2 * (WORLD - 1) * 2 * (BLOCK + 4) for *_, counted, sent in found)


def test_bf16_sums_have_the_same_bits_everywhere_and_bf16s_error():
    found = processes(WORLD, _sums, Bf16)
    given = [vectors(rank).double() for rank in range(WORLD)]
    for sums, owed, counted, _ in found:
        assert sums == found[0][0] and not owed and counted == ROUNDS * 2 * (WORLD - 1) * 2 * SIZE // WORLD
        error = (torch.tensor(sums).double() - sum(given)).abs()
        assert 0 < error.max() and (error <= WORLD * 2**-8 * sum(map(torch.abs, given))).all()


def test_an_inf_spoils_one_sum():
    x = torch.ones(2, BLOCK)
    x[0, 3] = torch.inf
    codes, owed = rounded(x)
    assert not values(codes)[0].isfinite().all() and values(codes)[1].isfinite().all()
    assert owed.isfinite().all()


@pytest.mark.parametrize("whole, short, settings", [
    (DiLoCo, ShortDiLoCo, {}), (DelayedDiLoCo, DelayedShortDiLoCo, dict(delay=2))], ids=str)
def test_delta_by_a_wire_equals_delta_in_fp32_but_for_the_rounding(whole, short, settings):
    """The fp32 classes have oracles of their own."""
    settings = dict(settings, inner_steps=3, alpha=0.5)
    wants = processes(4, _noloco, whole, settings, 14)
    for wire in (Bf16, Int8):
        for (got, _), (want, _) in zip(processes(4, _noloco, partial(short, wire), settings, 14), wants):
            assert all(abs(a - b).max() <= 5e-4 for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("how", [
    "ddp --wire bf16", "ddp --wire int8", "diloco --wire int8 --inner-steps 4",
    "diloco --wire int8 --inner-steps 4 --delay half", "diloco --wire bf16 --inner-steps 4 --delay 3"])
def test_a_run_goes_on_to_the_bit_and_its_replicas_are_equal(how, trained, tmp_path):
    trained(4, "--method", *how.split(), "--stages", "3,1", "--steps", 10, "--save-every", 1)
    whole = [checkpoint(tmp_path / "runs/x", 10, rank) for rank in range(4)]
    nine = checkpoint(tmp_path / "runs/x", 9, 0)
    owed = nine["owed"] if "ddp" in how else nine["outer"]["owed"]
    assert all(v.any() for v in owed) and len(owed) == (2 if "int8" in how else 0)
    states = [part["theta"] if "ddp" in how else part["outer"]["phi"] for part in whole[:3]]
    assert all(torch.equal(states[0], state) for state in states)
    size, sums = len(whole[0]["theta"]), 10 if "ddp" in how else 2
    each = 8 * size // 3 if "bf16" in how else 4 * -(-size // (3 * BLOCK)) * (BLOCK + 4)
    assert metrics(tmp_path / "runs/x")[-1]["sync_bytes"] == 3 * sums * each
    shutil.rmtree(tmp_path / "runs/x/checkpoints/00000010")
    run(4, "--resume", "runs/x", cwd=tmp_path)
    for rank, before in enumerate(whole):
        assert torch.equal(checkpoint(tmp_path / "runs/x", 10, rank)["theta"], before["theta"])
