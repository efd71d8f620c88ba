"""plumbing/overlap.py: outer steps that nobody waits for, against a float64 simulation of all replicas."""

import shutil

import pytest
import torch

from noloco import DiLoCo, NoLoCo, random_groups
from plumbing.overlap import DelayedDiLoCo, DelayedNoLoCo, DelayedOneByte
from test_minimal import brute_force, inner, quadratic
from tests.harness import SMALL, checkpoint, gloo, processes, run

M = 3


@gloo
def _train(rank, world, kind, kwargs, steps):
    """(theta at the end, bytes sent)."""
    model, xs, ys = quadratic(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    outer = kind(model.parameters(), inner_steps=M, **kwargs)
    for step in range(steps):
        inner(model, optimizer, xs[step], ys[step])
        outer.step()
    theta = outer.theta.tolist()
    outer.settle()
    return theta, outer.bytes_sent


def simulated(world, steps, delay, groups_of, alpha=0.5, beta=0.7, gamma=0.7):
    """theta of every replica at the end, in float64: the two statements of the module's docstring."""
    models = [quadratic(r) for r in range(world)]
    replicas = [model.double() for model, *_ in models]
    optimizers = [torch.optim.SGD(r.parameters(), lr=0.05) for r in replicas]
    read = lambda r: torch.cat([p.detach().flatten() for p in replicas[r].parameters()])
    write = lambda r, vector: torch.nn.utils.vector_to_parameters(vector, replicas[r].parameters())
    phi, delta, sent = [read(r) for r in range(world)], [torch.zeros_like(read(0))] * world, {}
    for step in range(1, steps + 1):
        for r in range(world):
            _, xs, ys = models[r]
            inner(replicas[r], optimizers[r], xs[step - 1].double(), ys[step - 1].double())
        if sent and step % M == delay % M:
            for group in groups_of((step - delay) // M - 1):
                thetas = [sent[r] for r in group]
                before = [phi[r] for r in group], [delta[r] for r in group]
                for r, p, d in zip(group, *brute_force(thetas, *before, alpha, beta, gamma)):
                    phi[r], delta[r] = p, d
                    write(r, p + read(r) - sent[r])
        if step % M == 0:
            sent = {r: read(r) for r in range(world)}
    return [read(r) for r in range(world)]


def unpadded(theta):
    """Without the gaps between tensors: sizes 15, 5, 10 and 2, each from a multiple of 16 on."""
    return torch.cat([torch.tensor(theta[16 * i:16 * i + n]) for i, n in enumerate((15, 5, 10, 2))]).double()


@pytest.mark.parametrize("kind, delay, settings, atol", [
    (DelayedNoLoCo, 1, {}, 2e-6), (DelayedNoLoCo, 3, {}, 2e-6), (DelayedNoLoCo, 2, dict(gamma=1.0), 2e-6),
    (DelayedNoLoCo, 1, dict(alpha=0.0, beta=1.0, gamma=1.0), 2e-6), (DelayedOneByte, 1, {}, 2e-3),
    (DelayedDiLoCo, 2, dict(alpha=0.5), 2e-6),
], ids=str)
def test_delayed_outer_steps_equal_a_float64_simulation_and_send_the_same_bytes(kind, delay, settings, atol):
    world, steps = 4, 14
    got = processes(world, _train, kind, dict(settings, delay=delay), steps)
    everyone = kind is DelayedDiLoCo
    groups = lambda k: [tuple(range(world))] if everyone else random_groups(range(world), 2, k, 0)
    for (theta, _), want in zip(got, simulated(world, steps, delay, groups, **settings)):
        assert torch.allclose(unpadded(theta), want, rtol=0, atol=atol)
    plain = {DelayedNoLoCo: NoLoCo, DelayedDiLoCo: DiLoCo}.get(kind)
    if plain:
        waiting = processes(world, _train, plain, settings, steps)
        assert [sent for _, sent in got] == [sent for _, sent in waiting]


@pytest.mark.parametrize("wire", ["fp32", "int8"])
def test_a_checkpoint_with_a_message_under_way_goes_on_to_the_bit(corpus, tmp_path, wire):
    argv = ["--wire", wire, "--inner-steps", 4, "--delay", "half", "--steps", 10, "--save-every", 1]
    run(4, *argv, "--data", corpus, "--name", "x", *SMALL, cwd=tmp_path)
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
