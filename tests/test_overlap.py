"""plumbing/overlap.py: outer steps that nobody waits for, against a float64 simulation of all replicas."""

import os
import re
import shutil
import signal

import pytest
import torch

import train
from noloco import DiLoCo, NoLoCo
from plumbing.onebyte import OneByteNoLoCo
from plumbing.overlap import DelayedDiLoCo, DelayedNoLoCo, DelayedOneByte
from test_minimal import _noloco, assert_replicas, simulated
from tests.harness import SMALL, captured, checkpoint, processes, run, store_host
from tests.test_noloco import modulo

M = 3
WAITING = {DelayedNoLoCo: NoLoCo, DelayedOneByte: OneByteNoLoCo, DelayedDiLoCo: DiLoCo}


def delayed_and_waiting(kind, delay, settings, *steps):
    """(weights, bytes sent) of four processes' ranks, and those with the undelayed class."""
    settings = dict(settings, inner_steps=M)
    return (processes(4, _noloco, kind, dict(settings, delay=delay), *steps),
            processes(4, _noloco, WAITING[kind], settings, *steps))


@pytest.mark.parametrize("kind, delay, settings", [
    (DelayedNoLoCo, 1, {}), (DelayedNoLoCo, 3, {}), (DelayedNoLoCo, 2, dict(gamma=1.0)),
    (DelayedNoLoCo, 1, dict(alpha=0.0, beta=1.0, gamma=1.0)), (DelayedOneByte, 1, {}),
    (DelayedOneByte, 2, dict(alpha=0.0, beta=1.0, gamma=1.0)), (DelayedDiLoCo, 2, dict(alpha=0.5)),
], ids=str)
def test_delayed_outer_steps_equal_a_float64_simulation_and_send_the_same_bytes(kind, delay, settings):
    delayed, waiting = delayed_and_waiting(kind, delay, settings, 14)
    n = 4 if kind is DelayedDiLoCo else 2
    seen = dict(seen=modulo) if kind is DelayedOneByte else {}
    assert_replicas(delayed, simulated(4, 14, M, n, delay=delay, **settings, **seen))
    assert [sent for _, sent in delayed] == [sent for _, sent in waiting]


@pytest.mark.parametrize("kind", WAITING)
def test_without_gradients_after_departures_the_undelayed_result_comes_later_to_the_bit(kind):
    still = [step for step in range(3 * M + 2) if step % M < 2]
    for (got, _), (want, _) in zip(*delayed_and_waiting(kind, 2, {}, 3 * M + 2, still)):
        assert all((a == b).all() for a, b in zip(got, want))


def _dies(rank, world, argv):
    """Rank 1, while a message of its is under way."""
    usual = train.inner_step

    def die(run, *rest):
        if rank == 1 and run.outer.flying:
            os.kill(os.getpid(), signal.SIGKILL)
        return usual(run, *rest)

    train.inner_step = die
    return captured(rank, world, train.main, argv)


@pytest.mark.parametrize("stages", ["4", "2,2"])
@pytest.mark.parametrize("more", [[], ["--wire", "int8"], ["--method", "diloco"]], ids=" ".join)
def test_a_partner_that_dies_while_a_message_flies_ends_all_ranks_in_one_line(more, stages, corpus, tmp_path):
    argv = ["--stages", stages, "--inner-steps", 4, "--delay", 2, "--data", corpus, "--name", "x", *SMALL]
    with store_host() as (port, _):
        results = processes(4, _dies, [*argv, *more], cwd=tmp_path, port=port, fallen=[1])
    codes, texts = zip(*filter(None, results))
    said = re.findall("stopped.*|Traceback", "".join(texts))
    line = r"stopped: rank \d at step \d+: another process is gone; remove runs/x, which holds no checkpoint"
    assert codes == (2, 2, 2) and len(said) == 1 and re.match(line, said[0]), results


@pytest.mark.parametrize("wire", ["fp32", "int8"])
def test_a_checkpoint_with_a_message_under_way_goes_on_to_the_bit(trained, tmp_path, wire):
    trained(4, "--wire", wire, "--inner-steps", 4, "--delay", "half", "--steps", 10, "--save-every", 1)
    whole = [checkpoint(tmp_path / "runs/x", 10, rank) for rank in range(4)]
    assert checkpoint(tmp_path / "runs/x", 9, 0)["outer"]["sent"] is not None
    shutil.rmtree(tmp_path / "runs/x/checkpoints/00000010")
    run(4, "--resume", "runs/x", cwd=tmp_path)
    for rank, before in enumerate(whole):
        assert torch.equal(checkpoint(tmp_path / "runs/x", 10, rank)["theta"], before["theta"])


def departing(q, m, delay, rounds=4):
    """The differences of two replicas at departures: SGD on a quadratic loss, plain averaging, delayed."""
    theta, sent, left = torch.tensor([1.0, -1.0], dtype=torch.float64), None, []
    for step in range(1, rounds * m + 1):
        theta = q * theta
        if sent is not None and step % m == delay % m:
            theta = sent.mean() + theta - sent
        if step % m == 0:
            sent = theta.clone()
            left.append((theta[0] - theta[1]).item())
    return left


@pytest.mark.parametrize("m, delay, most", [(2, 1, 0.25), (6, 3, 0.25), (5, 4, 0.5350), (4, 4, 1.0)])
def test_a_difference_shrinks_from_departure_to_departure_as_docs_stability_says(m, delay, most):
    factors = []
    for q in [i / 200 for i in range(201)]:
        left = departing(q, m, delay)
        factors.append((1 - q**delay) * q**(m - delay))
        for before, after in zip(left, left[1:]):
            assert after == pytest.approx(-factors[-1] * before, abs=1e-12)
    assert max(factors) == pytest.approx(most, abs=2e-4)
