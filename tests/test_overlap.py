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
def _train(rank, world, kind, kwargs, steps, still):
    """(theta after each step, bytes sent). still: no gradient in the steps after a departure."""
    model, xs, ys = quadratic(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    outer = kind(model.parameters(), inner_steps=M, **kwargs)
    history = []
    for step in range(steps):
        if not (still and step % M < kwargs.get("delay", 0) and step >= M):
            inner(model, optimizer, xs[step], ys[step])
        outer.step()
        history.append(outer.theta.tolist())
    outer.settle()
    return history, outer.bytes_sent


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


@pytest.mark.parametrize("kind, kwargs, gamma, atol", [
    (DelayedNoLoCo, dict(delay=1), 0.7, 2e-6), (DelayedNoLoCo, dict(delay=3), 0.7, 2e-6),
    (DelayedNoLoCo, dict(delay=2, gamma=1.0), 1.0, 2e-6), (DelayedOneByte, dict(delay=1), 0.7, 2e-3),
    (DelayedDiLoCo, dict(delay=2, alpha=0.5), 0.7, 2e-6),
], ids=str)
def test_delayed_outer_steps_equal_a_float64_simulation_and_send_the_same_bytes(kind, kwargs, gamma, atol):
    world, steps = 4, 14
    got = processes(world, _train, kind, kwargs, steps, False)
    everyone = kind is DelayedDiLoCo
    groups = lambda k: [tuple(range(world))] if everyone else random_groups(range(world), 2, k, 0)
    for (history, _), want in zip(got, simulated(world, steps, kwargs["delay"], groups, gamma=gamma)):
        assert torch.allclose(unpadded(history[-1]), want, rtol=0, atol=atol)
    plain = {DelayedNoLoCo: NoLoCo, DelayedDiLoCo: DiLoCo}.get(kind)
    if plain:
        settings = {name: value for name, value in kwargs.items() if name != "delay"}
        waiting = processes(world, _train, plain, settings, steps, False)
        assert [sent for _, sent in got] == [sent for _, sent in waiting]


def test_without_gradients_after_departure_the_undelayed_result_comes_later():
    steps, delay = 11, 2
    delayed = processes(4, _train, DelayedNoLoCo, dict(delay=delay), steps, True)
    plain = processes(4, _train, NoLoCo, dict(), M, False)
    for (late, _), (soon, _) in zip(delayed, plain):
        assert late[M - 1 + delay] == pytest.approx(soon[M - 1], abs=1e-7)


def test_plain_averaging_keeps_the_mean_of_all_replicas():
    """What a landing changes adds up to nothing: beside runs that never meet only local progress is left."""
    averages = dict(alpha=0.0, beta=1.0, delay=1)
    got = processes(4, _train, DelayedNoLoCo, averages, 2 * M, False)
    before, after = (sum(torch.tensor(h[step]).double() for h, _ in got) for step in (M - 1, M))
    progress = torch.zeros_like(before)
    for rank, (history, _) in enumerate(got):
        model, xs, ys = quadratic(rank)
        torch.nn.utils.vector_to_parameters(unpadded(history[M - 1]).float(), model.parameters())
        start = torch.cat([p.detach().flatten() for p in model.parameters()])
        inner(model, torch.optim.SGD(model.parameters(), lr=0.05), xs[M], ys[M])
        moved = torch.cat([p.detach().flatten() for p in model.parameters()]) - start
        padded = torch.zeros(64)
        for i, (a, n) in enumerate(((0, 15), (15, 5), (20, 10), (30, 2))):
            padded[16 * i:16 * i + n] = moved[a:a + n]
        progress += padded.double()
    assert torch.allclose(after - before, progress, rtol=0, atol=4e-6)


@pytest.mark.parametrize("wire", ["fp32", "int8"])
def test_a_checkpoint_with_a_message_under_way_goes_on_to_the_bit(corpus, tmp_path, wire):
    argv = ["--wire", wire, "--inner-steps", 4, "--delay", 2, "--steps", 10, "--save-every", 1]
    run(4, *argv, "--data", corpus, "--name", "x", *SMALL, cwd=tmp_path)
    whole = [checkpoint(tmp_path / "runs/x", 10, rank) for rank in range(4)]
    assert checkpoint(tmp_path / "runs/x", 9, 0)["outer"]["sent"] is not None
    shutil.rmtree(tmp_path / "runs/x/checkpoints/00000010")
    run(4, "--resume", "runs/x", cwd=tmp_path)
    for rank, before in enumerate(whole):
        assert torch.equal(checkpoint(tmp_path / "runs/x", 10, rank)["theta"], before["theta"])
