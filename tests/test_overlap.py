"""plumbing/overlap.py: outer steps that nobody waits for, against a float64 simulation of all replicas."""

import os
import re
import signal

import pytest
import torch

import train
from noloco import DiLoCo, NoLoCo
from plumbing.onebyte import OneByteNoLoCo
from plumbing.overlap import DelayedDiLoCo, DelayedNoLoCo, DelayedOneByte
from test_minimal import _noloco, assert_replicas, simulated
from tests.harness import SMALL, captured, checkpoint, goes_on_to_the_bit, processes, store_host
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
@pytest.mark.parametrize("more", ["", "--wire int8", "--method diloco", "--method diloco --wire int8"])
def test_a_partner_that_dies_while_a_message_flies_ends_all_ranks_in_one_line(more, stages, corpus, tmp_path):
    argv = ["--stages", stages, "--inner-steps", 4, "--delay", 2, "--data", corpus, "--name", "x", *SMALL]
    with store_host() as (port, _):
        results = processes(4, _dies, [*argv, *more.split()], cwd=tmp_path, port=port, fallen=[1])
    codes, texts = zip(*filter(None, results))
    said = re.findall("stopped.*|Traceback", "".join(texts))
    line = r"stopped: rank \d at step \d+: another process is gone; remove runs/x, which holds no checkpoint"
    assert codes == (2, 2, 2) and len(said) == 1 and re.match(line, said[0]), results


@pytest.mark.parametrize("wire", ["fp32", "int8"])
def test_a_checkpoint_with_a_message_under_way_goes_on_to_the_bit(trained, tmp_path, wire):
    trained(4, "--wire", wire, "--inner-steps", 4, "--delay", "half", "--steps", 10, "--save-every", 1)
    assert checkpoint(tmp_path / "runs/x", 9, 0)["outer"]["sent"] is not None
    goes_on_to_the_bit(tmp_path / "runs/x", 10, options=["--delay", "half"])


class Mirrored(DelayedNoLoCo):
    """One of two replicas, whose partner's weights are always the negative of its own."""

    def post(self, group, vectors, lane=None):
        return [[vectors["theta"], -vectors["theta"]]], []


@pytest.mark.parametrize("m, delay, most", [(2, 1, 0.25), (6, 3, 0.25), (5, 4, 0.5350), (4, 4, 1.0)])
def test_a_difference_shrinks_from_departure_to_departure_as_docs_stability_says(m, delay, most):
    """Plain averaging of a pair; an inner step on a quadratic loss is a factor q, here 201 of them."""
    q, weights = torch.linspace(0, 1, 201), torch.nn.Parameter(torch.ones(201))
    factor = (1 - q**delay) * q**(m - delay)
    outer = Mirrored([weights], inner_steps=m, alpha=0, beta=1, delay=delay)
    for step in range(5 * m):
        weights.data.mul_(q)
        outer.step()
        if (step + 1) % m == 0:
            assert torch.allclose(outer.sent[:201], q**m * (-factor) ** (step // m), rtol=0, atol=1e-6)
    assert factor.max().item() == pytest.approx(most, abs=2e-4)
    learnt, outer.inner_steps = outer.theta - outer.sent, outer.steps + 1
    outer.step()                            # with another m the next departure comes before the landing
    assert torch.equal(outer.sent, learnt)
