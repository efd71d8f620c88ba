"""Tests, each named after the oracle that it compares with. `make test` runs them all; those with processes end by themselves.

    python -m pytest -q test_minimal.py
"""
import contextlib
import csv
import enum
import functools
import gzip
import io
import itertools
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
import types
import zipfile
from collections import Counter, deque
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import bench_sync
import noloco
import skippipe
import train
from model import Config, Llama, count_parameters, load_weights, read_config, save_pretrained
from noloco import DiLoCo, NoLoCo, flatten, gamma_bound, outer_update, random_groups
from skippipe import Deadlock, Network, chain, full_paths, random_paths, simulate

HERE = Path(__file__).parent
SMALL = ["--hidden", "32", "--layers", "4", "--heads", "2", "--mlp", "64", "--seq-len", "32", "--batch", "2", "--eval-sequences", "8", "--device", "cpu"]

# ---------------------------------------------------------------- processes

# The server imports everything once; each test process is a fork of it, ready in milliseconds.
fork = multiprocessing.get_context("forkserver")
fork.set_forkserver_preload(["test_minimal"])


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _child(pipe, rank, world, port, agent, cwd, function, args):
    os.chdir(cwd)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1", TORCHELASTIC_USE_AGENT_STORE=str(agent),
                      TORCHELASTIC_RESTART_COUNT="0")
    torch.set_num_threads(1)
    try:
        pipe.send((True, function(rank, world, *args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))


def processes(world, function, *args, cwd=".", limit=120, port=None, fallen=()):
    """function(rank, world, *args) on `world` processes: their results in the order of ranks. All end here, whatever happens.

    port: of a store hosted elsewhere, as torchrun does. fallen: ranks that need not finish; their result is None.
    """
    agent, port = port is not None, port or free_port()
    pipes, children = [], []
    try:
        for rank in range(world):
            ours, theirs = fork.Pipe()
            children.append(fork.Process(target=_child, args=(theirs, rank, world, port, agent, str(cwd), function, args)))
            children[-1].start()
            theirs.close()
            pipes.append(ours)
        results, waiting, end = {}, dict(zip(pipes, range(world))), time.monotonic() + limit
        while set(waiting.values()) - set(fallen):
            ready = multiprocessing.connection.wait(list(waiting), timeout=max(0, end - time.monotonic()))
            assert ready, f"ranks {sorted(waiting.values())} did not finish within {limit} s"
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    good, results[rank] = pipe.recv()
                except EOFError:
                    good, results[rank] = rank in fallen, None
                assert good, f"rank {rank}: {results[rank]}"
        return [results.get(r) for r in range(world)]
    finally:
        for child in children:
            child.kill()
            child.join()


def gloo(function):
    """Decorates a rank's function: the process group is up while it runs."""
    def wrapped(rank, world, *args):
        dist.init_process_group("gloo")
        result = function(rank, world, *args)
        dist.barrier()
        return result
    wrapped.__name__ = wrapped.__qualname__ = function.__name__
    return wrapped


def _main(rank, world, argv):
    """train.main in this process: (exit status, what it printed)."""
    out, code = io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            train.main(argv)
        except SystemExit as stop:
            code = stop.code
    return code, out.getvalue()


def run(world, *argv, cwd):
    """Train; fails unless every rank ends well. Returns rank 0's output."""
    results = processes(world, _main, [str(a) for a in argv], cwd=cwd)
    assert all(code == 0 for code, _ in results), results
    return results[0][1]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A folder of ten small text files."""
    folder, r = tmp_path_factory.mktemp("data"), random.Random(0)
    for i in range(10):
        (folder / f"{i}.txt").write_text(" ".join(r.choice(["phi", "theta", "delta", "gossip", "stage"]) for _ in range(1500)))
    return folder


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def checkpoint(folder, step, rank):
    return torch.load(folder / "checkpoints" / f"{step:08d}" / f"rank{rank}.pt", weights_only=True)


# ---------------------------------------------------------------- noloco.py


@pytest.mark.parametrize("count, size", [(1, 2), (2, 2), (3, 2), (7, 2), (8, 3), (9, 4), (5, 9), (64, 2)])
def test_random_groups_are_a_partition(count, size):
    ranks = list(range(10, 10 + count))
    for step in range(20):
        groups = random_groups(ranks, size, step, seed=1)
        assert sorted(r for g in groups for r in g) == ranks
        assert len(groups) == max(1, count // size)
        assert max(map(len, groups)) - min(map(len, groups)) <= 1
        assert groups == random_groups(tuple(ranks), size, step, seed=1)


def test_random_groups_are_uniform():
    draws = 6000
    pairs = Counter(g for step in range(draws) for g in random_groups(range(6), 2, step, seed=0))
    expected = draws * 3 / 15           # each of the 15 pairs is in a fifth of the partitions
    chi2 = sum((pairs[a, b] - expected) ** 2 / expected for b in range(6) for a in range(b))
    assert chi2 < 36.1                  # 14 degrees of freedom, p = 0.001
    other = [random_groups(range(6, 12), 2, s, 0) == [tuple(r + 6 for r in g) for g in random_groups(range(6), 2, s, 0)] for s in range(300)]
    assert sum(other) < 60              # another stage draws independently: equal by chance in 1 of 15


def brute_force(thetas, phis, deltas, alpha, beta, gamma):
    """Eqs. 1-3 for one group in float64, literally."""
    n = len(phis)
    mean_Delta = sum(t - p for t, p in zip(thetas, phis)) / n
    mean_phi = sum(phis) / n
    deltas = [alpha * d + beta * mean_Delta - gamma * (p - mean_phi) for d, p in zip(deltas, phis)]
    return [p + d for p, d in zip(phis, deltas)], deltas


@pytest.mark.parametrize("n", [1, 2, 3, 8])
@pytest.mark.parametrize("gamma", [0.7, 0.0, 1.1])
def test_outer_step_equals_float64_brute_force(n, gamma):
    torch.manual_seed(n)
    size = 3 * noloco.PIECE + 5         # several pieces, the last one odd
    phis, thetas, deltas = ([torch.randn(size, dtype=torch.float64).float() for _ in range(n)] for _ in range(3))
    want_phi, want_delta = brute_force(*([v.double() for v in vs] for vs in (thetas, phis, deltas)), 0.5, 0.7, gamma)
    padded = size + -size % 16
    for i in range(n):
        parameter = torch.nn.Parameter(thetas[i].clone())
        outer = NoLoCo([parameter], gamma=gamma)
        outer.phi[:size], outer.delta[:size] = phis[i], deltas[i]
        pad = lambda vs: [torch.nn.functional.pad(v, (0, padded - size)) for v in vs]
        outer.outer_step(pad(thetas), pad(phis) if gamma != 0.7 else None)      # with gamma = beta phi is not needed
        for got, want in ((outer.phi[:size], want_phi[i]), (outer.delta[:size], want_delta[i]), (parameter, want_phi[i])):
            assert torch.allclose(got.double(), want, rtol=0, atol=4e-6)


def test_outer_update_is_in_place():
    phi, delta = torch.ones(4), torch.full((4,), 2.0)
    outer_update(phi, delta, torch.full((4,), 3.0), torch.full((4,), 5.0), 0.5, 0.1, 0.25)
    assert torch.allclose(delta, torch.full((4,), 0.5 * 2 + 0.1 * 3 - 0.25 * (1 - 5))) and torch.allclose(phi, 1 + delta)


def no_collectives():
    """From here on a collective in this process is an error."""
    def refuse(*_, **__):
        raise AssertionError("a collective in NoLoCo's training path")
    for name in ("all_reduce", "all_gather", "broadcast", "reduce", "barrier", "all_gather_object", "broadcast_object_list"):
        setattr(noloco.dist, name, refuse)


def quadratic(rank, seed=0):
    """A small model with odd sizes and this replica's own data."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
    generator = torch.Generator().manual_seed(100 + rank)
    return model, torch.randn(64, 8, 3, generator=generator), torch.randn(64, 8, 2, generator=generator)


def inner(model, optimizer, x, y):
    optimizer.zero_grad()
    (model(x) - y).square().mean().backward()
    optimizer.step()


@gloo
def _noloco(rank, world, kwargs, steps):
    model, xs, ys = quadratic(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    outer = NoLoCo(model.parameters(), **kwargs)
    barrier = dist.barrier
    no_collectives()
    for step in range(steps):
        inner(model, optimizer, xs[step], ys[step])
        outer.step()
    dist.barrier = barrier
    return [p.detach().numpy() for p in model.parameters()], outer.bytes_sent


@pytest.mark.parametrize("kwargs", [dict(), dict(gamma=1.0), dict(group_size=3, gamma=0.4), dict(group_size=4)], ids=str)
def test_four_processes_equal_float64_simulation(kwargs):
    world, steps, m = (5 if kwargs.get("group_size") == 3 else 4), 12, 3
    got = processes(world, _noloco, dict(kwargs, inner_steps=m), steps)
    models = [quadratic(r) for r in range(world)]
    replicas = [m_.double() for m_, *_ in models]
    optimizers = [torch.optim.SGD(r.parameters(), lr=0.05) for r in replicas]
    read = lambda r: torch.cat([p.detach().flatten() for p in replicas[r].parameters()])
    phis, deltas = [read(r) for r in range(world)], [torch.zeros_like(read(0)) for _ in range(world)]
    for step in range(steps):
        for r in range(world):
            inner(replicas[r], optimizers[r], models[r][1][step].double(), models[r][2][step].double())
        if (step + 1) % m == 0:
            for group in random_groups(range(world), kwargs.get("group_size", 2), step // m, 0):
                news = brute_force([read(r) for r in group], [phis[r] for r in group], [deltas[r] for r in group], 0.5, 0.7, kwargs.get("gamma", 0.7))
                for r, phi, delta in zip(group, *news):
                    phis[r], deltas[r] = phi, delta
                    torch.nn.utils.vector_to_parameters(phi.clone(), replicas[r].parameters())
    for r in range(world):
        flat = torch.cat([torch.from_numpy(p).flatten() for p in got[r][0]]).double()
        assert torch.allclose(flat, read(r), rtol=0, atol=2e-6)
    if not kwargs:      # theta only: one message of the padded vector each outer step
        padded = sum(-(-p.numel() // 16) * 16 for p in replicas[0].parameters())
        assert [sent for _, sent in got] == [4 * padded * steps // m] * world


@gloo
def _everyone(rank, world, method, kwargs):
    model, xs, ys = quadratic(rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    outer = method(model.parameters(), inner_steps=2, alpha=0.3, **kwargs)
    for step in range(8):
        inner(model, optimizer, xs[step], ys[step])
        outer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def test_a_group_of_everyone_equals_diloco():
    gossip, allreduce = processes(3, _everyone, NoLoCo, dict(group_size=3, gamma=1.2)), processes(3, _everyone, DiLoCo, {})
    assert gossip[0] == gossip[1] == gossip[2] and allreduce[0] == allreduce[1] == allreduce[2]     # to the bit
    assert torch.allclose(torch.tensor(gossip[0]), torch.tensor(allreduce[0]), rtol=0, atol=1e-6)


@gloo
def _state_dict(rank, world):
    """Interrupt after 5 of 12 steps, rebuild everything from the state dicts, go on: as if nothing had happened."""
    results = []
    for stop in (None, 5):
        model, xs, ys = quadratic(rank)
        optimizer, outer = torch.optim.SGD(model.parameters(), lr=0.05), NoLoCo(model.parameters(), inner_steps=3, gamma=1.0)
        for step in range(12):
            if step == stop:
                kept = io.BytesIO()
                torch.save([model.state_dict(), outer.state_dict()], kept)
                for work in outer.ahead[1]:         # phi is on its way to the partners of the next outer step
                    work.wait()
                kept.seek(0)
                weights, state = torch.load(kept, weights_only=True)
                model, *_ = quadratic(rank, seed=9)
                optimizer, outer = torch.optim.SGD(model.parameters(), lr=0.05), NoLoCo(model.parameters(), inner_steps=3, gamma=1.0)
                model.load_state_dict(weights)
                outer.load_state_dict(state)
            inner(model, optimizer, xs[step], ys[step])
            outer.step()
        results.append(outer.theta.tolist())
        for work in outer.ahead[1] if outer.ahead else []:
            work.wait()
    return results


def test_state_dict_round_trips_to_the_bit():
    for whole, resumed in processes(4, _state_dict):
        assert whole == resumed


def test_flatten_keeps_values_pads_and_refuses():
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
    model[0](torch.ones(1, 3)).sum().backward()
    before = [p.detach().clone() for p in model.parameters()]
    theta, grad = flatten(model.parameters())
    assert theta.numel() == grad.numel() == 16 * 4 and theta.count_nonzero() == 15 + 5 + 10 + 2
    for p, old in zip(model.parameters(), before):
        assert torch.equal(p, old) and p.data_ptr() % 64 == theta.data_ptr() % 64
    assert torch.equal(model[0].bias.grad, torch.ones(5)) and grad.sum() == model[0].weight.grad.sum() + 5
    again = flatten(model.parameters())
    assert again[0].data_ptr() == theta.data_ptr() and again[1].data_ptr() == grad.data_ptr()
    theta.zero_()
    assert not any(p.any() for p in model.parameters())
    tied = torch.nn.Linear(4, 4)
    assert flatten([tied.weight, tied.weight])[0].numel() == 16
    for bad in ([], [torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))],
                [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2, device="meta"))]):
        with pytest.raises(ValueError):
            flatten(bad)


def test_noloco_notices_moved_parameters():
    model = torch.nn.Linear(4, 4)
    outer = NoLoCo(model.parameters(), inner_steps=1)
    model.weight.data = model.weight.data.clone()       # what .to() does
    with pytest.raises(RuntimeError, match="moved"):
        outer.step()


def _readme_optimizer_example(rank, world):
    block = next(b for b in re.findall(r"```python\n(.*?)```", (HERE / "README.md").read_text(), re.S) if "outer = NoLoCo(" in b)
    scope, out = {}, io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(block, scope)
    return out.getvalue(), scope["outer"].steps, scope["model"].weight.tolist()


def test_readme_optimizer_example_learns_its_target():
    """A loop as torchrun runs it: on every rank the weights come near the ones that they should be, and with two replicas they are equal."""
    (first, steps, weights), (second, _, others) = processes(2, _readme_optimizer_example)
    assert first.startswith("rank 0: loss 0.0") and second.startswith("rank 1: loss 0.0") and steps == 400
    assert weights == others and torch.allclose(torch.tensor(weights), torch.ones(1, 8), rtol=0, atol=0.05)


# ---------------------------------------------------------------- theory, on the quadratic loss


def quadratic_run(replicas, dims, m, omega, alpha, beta, gamma, steps, n=2, noise=1.0, start=0.0, seed=0, rate=1.0):
    """NoLoCo on L = 1/2 rate |theta - c|^2, c ~ N(0, noise^2), SGD with constant rate omega; phi (replicas, dims), a history of its moments."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randn(replicas, dims, generator=generator, dtype=torch.float64)
    phi = start + (1.0 if noise == 0 else 0.0) * draw()
    delta, history = torch.zeros_like(phi), []
    for step in range(steps):
        theta = phi.clone()
        for _ in range(m):
            theta -= omega * rate * (theta - (noise * draw() if noise else 0.0))
        for group in random_groups(range(replicas), n, step, seed):
            g = list(group)
            p, d = phi[g], delta[g]
            outer_update(p, d, (theta[g] - p).mean(0), p.mean(0), alpha, beta, gamma)
            phi[g], delta[g] = p, d
        history.append((phi.mean().item(), (phi - phi.mean(0)).square().mean().item()))
    return phi, history


def test_theorem_1_mean_goes_to_zero():
    _, history = quadratic_run(64, 64, m=5, omega=0.05, alpha=0.5, beta=0.7, gamma=0.7, steps=120, start=3.0)
    late = [mean for mean, _ in history[-40:]]
    assert abs(sum(late) / 40) < 0.02 and abs(history[0][0]) > 2


def test_theorem_1_spread_grows_as_omega_squared():
    omegas, spreads = [1e-4, 2e-4, 4e-4, 8e-4], []        # m omega Lambda << 1
    for omega in omegas:
        _, history = quadratic_run(64, 64, m=5, omega=omega, alpha=0.5, beta=0.7, gamma=0.7, steps=200)
        spreads.append(sum(v for _, v in history[40:]) / 160)
    x, y = torch.tensor(omegas).double().log(), torch.tensor(spreads).double().log()
    slope = ((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()
    assert abs(slope - 2) < 0.1


@pytest.mark.parametrize("alpha, n", [(0.5, 2), (0.3, 2), (0.8, 2), (0.5, 4)])
def test_gamma_bound_separates_decay_from_growth(alpha, n):
    for factor, grows in ((0.9, False), (1.1, True)):
        # beta tiny: Delta's pull, which widens the bound a little, is left out; noise-free
        _, history = quadratic_run(256, 32, m=1, omega=1e-9, alpha=alpha, beta=1e-9, gamma=factor * gamma_bound(alpha, n), steps=160, n=n, noise=0)
        assert (history[-1][1] > 10 * history[20][1]) if grows else (history[-1][1] < 0.1 * history[20][1])
    assert gamma_bound(alpha, 2) == pytest.approx(2 * (1 - alpha**2))


@pytest.mark.parametrize("replicas, n", [(4, 2), (5, 2), (6, 3), (4, 4)])
def test_moment_recursion_equals_the_average_over_all_groupings(replicas, n):
    """One outer step of Eqs. 2 and 3 with Delta = -p phi, for every order that the replicas can be drawn in."""
    alpha, beta, gamma, pull = 0.6, 0.8, 1.1, 0.3
    x, d = (v - v.mean() for v in torch.randn(2, replicas, generator=torch.Generator().manual_seed(n), dtype=torch.float64))
    moments, total, orders = lambda x, d: torch.stack([x @ x, x @ d, d @ d]), torch.zeros(3, dtype=torch.float64), list(itertools.permutations(range(replicas)))
    for order in orders:
        phi, delta = x + 7, d - 2           # what all share is no difference
        for g in (list(order[i::replicas // n]) for i in range(replicas // n)):
            p, q = phi[g], delta[g]
            outer_update(p, q, -pull * p.mean(0), p.mean(0), alpha, beta, gamma)
            phi[g], delta[g] = p, q
        total += moments(phi - phi.mean(), delta - delta.mean()) / len(orders)
    matrix = bench_sync.moment_matrix(alpha, bench_sync.contraction(replicas, n), beta, gamma, pull)
    assert torch.allclose(matrix @ moments(x, d), total, rtol=1e-12)


def test_spectral_radius_crosses_one_exactly_at_the_bound():
    radius = lambda alpha, k, gamma, pull=0.0: float(torch.linalg.eigvals(bench_sync.moment_matrix(alpha, k, gamma, gamma, pull)).abs().max())
    for alpha, n, pull in itertools.product((0.0, 0.5, 0.9), (2, 4, 16), (0.0, 0.3)):
        for k in (1 - 1 / n, bench_sync.contraction(16, n)):
            bound = bench_sync.exact_bound(alpha, k, pull)
            assert radius(alpha, k, 0.999 * bound, pull) < 1 < radius(alpha, k, 1.001 * bound, pull)
        assert radius(alpha, 1 - 1 / n, gamma_bound(alpha, n)) == pytest.approx(1, abs=1e-6)
        assert bench_sync.exact_bound(alpha, 1 - 1 / n) == pytest.approx(gamma_bound(alpha, n))
    assert bench_sync.exact_bound(0.5, bench_sync.contraction(16, 16)) == pytest.approx(3)      # heavy ball: 2 (1 + alpha)


# ---------------------------------------------------------------- model.py


def reference_logits(tokens, w, config):
    """A Llama in float64, position by position, written apart from model.py."""
    norm = lambda x, g: x / (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * g
    heads, shared = config.num_attention_heads, config.num_attention_heads // config.num_key_value_heads
    d = config.hidden_size // heads
    x = w["model.embed_tokens.weight"][tokens]

    def turn(vector, position):     # pairs (i, i + d/2) as complex numbers
        z = torch.complex(vector[: d // 2], vector[d // 2:])
        z = z * torch.exp(1j * position * config.rope_theta ** (-2 * torch.arange(d // 2, dtype=torch.float64) / d))
        return torch.cat((z.real, z.imag))
    for i in range(config.num_hidden_layers):
        part = lambda name: w[f"model.layers.{i}.{name}.weight"]
        h, rows = norm(x, part("input_layernorm")), []
        q, k, v = (h @ part(f"self_attn.{s}_proj").T for s in "qkv")
        for t in range(len(tokens)):
            row = []
            for j in range(heads):
                kv = slice(j // shared * d, j // shared * d + d)
                scores = torch.stack([turn(q[t, j * d:j * d + d], t) @ turn(k[s, kv], s) for s in range(t + 1)]) / d**0.5
                row.append(scores.softmax(0) @ v[:t + 1, kv])
            rows.append(torch.cat(row))
        x = x + torch.stack(rows) @ part("self_attn.o_proj").T
        h = norm(x, part("post_attention_layernorm"))
        gate = h @ part("mlp.gate_proj").T
        x = x + (gate / (1 + (-gate).exp()) * (h @ part("mlp.up_proj").T)) @ part("mlp.down_proj").T
    return norm(x, w["model.norm.weight"]) @ w["lm_head.weight"].T


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_logits_equal_independent_float64_llama(kv_heads):
    config = Config(vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=kv_heads)
    model = Llama(config, seed=3)
    with torch.no_grad():
        for p in model.parameters():    # gains and weights far from their start, so that each matters
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.2)
    tokens = torch.randint(50, (1, 9), generator=torch.Generator().manual_seed(0))
    want = reference_logits(tokens[0], {k: v.double() for k, v in model.state_dict().items()}, config)
    assert torch.allclose(model(tokens)[0].double(), want, rtol=1e-4, atol=1e-4)
    targets = torch.randint(50, (1, 9), generator=torch.Generator().manual_seed(1))
    loss = model.loss(model.blocks(model.embed(tokens)), targets)
    assert loss.item() == pytest.approx(-want.log_softmax(-1)[range(9), targets[0]].sum().item(), rel=1e-5)
    assert count_parameters(config)[0] == sum(p.numel() for p in model.parameters())


def test_gradients_equal_independent_float64_llama():
    config = Config(vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    model, generator = Llama(config, seed=3), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * 0.2)
    tokens = torch.randint(50, (1, 10), generator=generator)
    w = {k: v.double().requires_grad_() for k, v in model.state_dict().items()}
    (3 * -reference_logits(tokens[0, :-1], w, config).log_softmax(-1)[range(9), tokens[0, 1:]].sum()).backward()
    (3 * model.loss(model.blocks(model.embed(tokens[:, :-1])), tokens[:, 1:])).backward()       # not 1: the gradient from above counts
    for name, p in model.named_parameters():
        assert torch.allclose(p.grad.double(), w[name].grad, rtol=1e-4, atol=1e-4 * float(w[name].grad.abs().max())), name


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_loss_equals_hugging_faces(kv_heads):
    pytest.importorskip("transformers")
    config, tokens = Config(num_key_value_heads=kv_heads), torch.randint(256, (2, 65), generator=torch.Generator().manual_seed(0))
    other, model = bench_sync.hugging_face(config), Llama(config)
    want = torch.nn.functional.cross_entropy(other(input_ids=tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten())
    assert model.loss(model.blocks(model.embed(tokens[:, :-1])), tokens[:, 1:]).item() / 128 == pytest.approx(want.item(), rel=1e-5)


@pytest.mark.parametrize("kv_heads", [4, 1])
def test_activation_bytes_equal_what_autograd_keeps(kv_heads):
    config, kept = Config(num_key_value_heads=kv_heads, num_hidden_layers=3), {}
    model, x = Llama(config), torch.randn(2, 32, 128, requires_grad=True)
    model.blocks(x)                         # makes the rotary angles, which belong to the model
    address = lambda t: t.untyped_storage().data_ptr()
    own = {address(t) for t in (*model.parameters(), *model.angles)}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(address(t), t) if t.is_floating_point() and address(t) not in own else t,
                                                  lambda t: t):
        model.blocks(x)
    bytes_of = lambda layers: bench_sync.memory(config, tokens=64, microbatches=1, vectors=0, layers=layers)
    assert sum(t.untyped_storage().nbytes() for t in kept.values()) == bytes_of(3) - bytes_of(0)


def test_causality():
    model, tokens = Llama(Config()), torch.randint(256, (1, 20))
    changed = tokens.clone()
    changed[0, 12:] += 1
    a, b = model(tokens), model(changed % 256)
    assert torch.equal(a[:, :12], b[:, :12]) and not torch.allclose(a[:, 12:], b[:, 12:])


def test_stages_hold_the_whole_models_weights_and_loss():
    config = Config(num_hidden_layers=5)
    whole, tokens = Llama(config, seed=7), torch.randint(256, (2, 17))
    stages = [Llama(config, [0], seed=7), Llama(config, [1, 2], ends=False, seed=7), Llama(config, [3, 4], ends=False, seed=7)]
    union = {k: v for s in stages for k, v in s.state_dict().items()}
    assert union.keys() == whole.state_dict().keys() and all(torch.equal(v, whole.state_dict()[k]) for k, v in union.items())
    x = stages[0].embed(tokens[:, :-1])
    for s in stages:
        x = s.blocks(x)
    want = whole.loss(whole.blocks(whole.embed(tokens[:, :-1])), tokens[:, 1:])
    assert torch.equal(stages[0].loss(x, tokens[:, 1:]), want)
    swapped = Llama(config, [3, 4, 1], ends=False, seed=7)
    assert list(swapped.model.layers) == ["3", "4", "1"]


# ---------------------------------------------------------------- paths and the executor


@pytest.mark.parametrize("sizes", [(4,), (4, 4), (3, 2, 2), (1, 5), (2, 3, 1, 4)])
def test_paths_visit_every_stage_as_evenly_as_possible(sizes):
    ranks = iter(range(sum(sizes)))
    stages = [[next(ranks) for _ in range(s)] for s in sizes]
    for paths in (full_paths(stages, 3), *(random_paths(stages, 3, step, seed=0) for step in range(30))):
        assert len(paths) == 3 * sizes[0]
        for s, stage in enumerate(stages):
            visits = Counter(path[s] for path in paths)
            assert set(visits) <= set(stage) and max(visits[r] for r in stage) - min(visits[r] for r in stage) <= 1
    if len(set(sizes)) == 1:
        assert all(path == tuple(s[stages[0].index(path[0])] for s in stages) for path in full_paths(stages, 3))
    assert random_paths(stages, 3, 5, 0) == random_paths(stages, 3, 5, 0)


def any_paths(stages, count, r):
    """Paths that skip and swap: each origin's go through any of the other stages, in any order."""
    return [(origin, *(r.choice(s) for s in r.sample(stages[1:], r.randint(0, len(stages) - 1)))) for _ in range(count) for origin in stages[0]]


def replay(paths, ranks, order=None):
    """Every rank's program over channels that are first in, first out and where a receive blocks; True when all come to their end."""
    chains, programs, channels, moved = [chain(p) for p in paths], {}, {}, True
    for rank in ranks:
        mine = order[rank] if order else train.tasks(chains, rank)
        posted, program = {}, programs.setdefault(rank, deque())
        for source, *message in train.incoming(chains, rank, mine, order):
            posted.setdefault(source, deque()).append(tuple(message))
        for u, hop in mine:
            way = chains[u]
            if hop and way[hop - 1] != rank:
                while (u, hop) in posted[way[hop - 1]]:     # NCCL: what the pair posted before comes first
                    program.append(("receive", way[hop - 1], posted[way[hop - 1]].popleft()))
            if hop + 1 < len(way) and way[hop + 1] != rank:
                program.append(("send", way[hop + 1], (u, hop + 1)))
    while moved:
        moved = False
        for rank, program in programs.items():
            while program:
                what, peer, message = program[0]
                if what == "send":
                    channels.setdefault((rank, peer), deque()).append(message)
                elif channels.get((peer, rank)):
                    assert channels[peer, rank].popleft() == message        # the pair agrees on the order, without tags
                else:
                    break
                program.popleft()
                moved = True
    return not any(programs.values())


def test_message_lists_replayed_as_blocking_fifo_channels_finish():
    r = random.Random(0)
    for trial in range(400):
        sizes = [r.randint(1, 4) for _ in range(r.randint(1, 5))]
        ranks = iter(range(sum(sizes)))
        stages = [[next(ranks) for _ in range(s)] for s in sizes]
        paths = any_paths(stages, r.randint(1, 5), r) if trial % 2 else random_paths(stages, r.randint(1, 5), trial, 0)
        assert replay(paths, range(sum(sizes))), f"deadlock: {paths}"


def test_planned_message_lists_replayed_as_blocking_fifo_channels_finish():
    draw = random.Random(3)
    for trial in range(40):
        network = random_network(draw, (2, 2, 1, 2), speeds=(0.1, 0.5))
        try:
            paths, order = skippipe.plan(network, 3, draw.randint(1, 4), 2, seconds=None, iterations=30, seed=trial)
        except skippipe.Infeasible:
            continue
        assert replay(paths * 2, range(7), order)
    # rank 1 runs the second microbatch first, though the first is sent first
    order = [[(0, 0), (1, 0), (1, 2), (0, 2), (1, 4), (0, 4)], [(1, 1), (0, 1), (1, 3), (0, 3)]]
    assert train.incoming([chain((0, 1))] * 2, 1, order[1], order) == [(0, 0, 1), (0, 1, 1), (0, 1, 3), (0, 0, 3)]
    assert replay([(0, 1)] * 2, range(2), order)


def stage_layers(stages):
    """Layers of unequal depth: stage s holds s % 2 + 1."""
    marks = [0]
    for s in range(len(stages)):
        marks.append(marks[-1] + s % 2 + 1)
    return [list(range(a, b)) for a, b in zip(marks, marks[1:])]


def _gradients(rank, world, stages, all_paths, shape, dtype):
    """The largest relative error of this rank's gradients over all the path sets, against the whole model in one process."""
    layers = stage_layers(stages)
    config = Config(hidden_size=shape[2], num_attention_heads=2, num_key_value_heads=1, intermediate_size=48, num_hidden_layers=layers[-1][-1] + 1)
    stage = next(s for s, ranks in enumerate(stages) if rank in ranks)
    model, whole = Llama(config, layers[stage], ends=stage == 0), Llama(config).double()
    theta, grad = flatten(model.parameters())
    job = train.Job()
    pipeline = train.Pipeline(model, job, stages, shape, dtype)
    worst = 0.0
    for t, paths in enumerate(all_paths):
        tokens = torch.randint(256, (len(paths), shape[0], shape[1] + 1), generator=torch.Generator().manual_seed(t))
        grad.zero_()
        loss, home, count = pipeline.run(paths, {u: tokens[u] for u, p in enumerate(paths) if p[0] == rank})
        assert count == shape[0] * shape[1] * sum(rank in p for p in paths) and home == shape[0] * shape[1] * sum(rank == p[0] for p in paths)
        whole.zero_grad()
        want_loss = 0.0
        for u, path in enumerate(paths):
            if rank in path:
                x = whole.embed(tokens[u][:, :-1])
                for visited in path:
                    for i in layers[next(s for s, ranks in enumerate(stages) if visited in ranks)]:
                        whole.blocks(x)     # sets the angles
                        x = whole.model.layers[str(i)](x, *whole.angles)
                one = whole.loss(x, tokens[u][:, 1:])
                one.backward()
                want_loss += one.item() * (path[0] == rank)
        assert abs(loss.item() - want_loss) <= (1e-5 if dtype == torch.float32 else 1e-2) * max(1, abs(want_loss))
        named = dict(whole.named_parameters())
        for name, p in model.named_parameters():
            want = named[name].grad
            if want is None or not want.any():
                assert not p.grad.any()
            else:
                worst = max(worst, ((p.grad.double() - want).norm() / want.norm()).item())
        if any(rank in p for p in paths) and stage == 0:
            assert all(p.grad.any() for p in model.parameters())      # embedding, gains and head included
    job.close()
    return worst


@pytest.mark.parametrize("sizes", [(2, 2, 1), (1, 1, 1, 1), (3,), (1, 3)])
def test_pipeline_gradients_equal_one_process(sizes):
    r, ranks = random.Random(0), iter(range(sum(sizes)))
    stages = [[next(ranks) for _ in range(s)] for s in sizes]
    sets = [full_paths(stages, 3)] + [random_paths(stages, 3, step, 0) for step in range(12)] + [any_paths(stages, r.randint(1, 4), r) for _ in range(12)]
    assert max(processes(sum(sizes), _gradients, stages, sets, (2, 8, 16), torch.float32)) < 1e-5


def test_bfloat16_messages_give_nearly_the_same_gradients():
    stages = [[0, 1], [2, 3]]
    assert max(processes(4, _gradients, stages, [full_paths(stages, 2)], (2, 16, 32), torch.bfloat16)) < 0.05


# ---------------------------------------------------------------- skippipe.py: the simulator


def test_simulator_equals_hand_computation():
    # one origin, one node: forward 1 + delay 2 + forward 2 + back 2 + loss 0.25 + out 2 + backward 3 + back 2 + backward 1.5
    network = Network([[0, 2], [2, 0]], [1, 2], [[0], [1]], memory=1, overhead=0.1)
    one = simulate(network, [(0, 1)])
    assert one.makespan == pytest.approx(15.75)
    assert [(rank, kind) for rank, _, kind, *_ in one.timeline] == [(0, "forward"), (1, "forward"), (0, "loss"), (1, "backward"), (0, "backward")]
    # memory 1: the second microbatch starts when the first one's backward has freed the origin, 0.1 s after its end
    assert simulate(network, [(0, 1), (0, 1)]).makespan == pytest.approx(2 * 15.75 + 0.1)
    assert simulate(network, [(0, 1)], rounds=2).makespan == pytest.approx(2 * 15.75 + 0.1)
    assert simulate(network, [(0, 1)], release=[5]).makespan == pytest.approx(20.75)
    order = [[(0, 0), (0, 2), (0, 4)], [(0, 1), (0, 3)]]
    assert simulate(network, [(0, 1)], order=order).makespan == pytest.approx(15.75)
    with pytest.raises(Deadlock):
        simulate(network, [(0, 1)], order=[[(0, 2), (0, 0), (0, 4)], [(0, 1), (0, 3)]])
    for bad in (dict(delay=[[0]]), dict(stages=[[0], [0]]), dict(stages=[[0], []]), dict(memory=[1])):
        with pytest.raises(ValueError):
            Network(**{**dict(delay=[[0, 2], [2, 0]], compute=[1, 2], stages=[[0], [1]]), **bad})


# ---------------------------------------------------------------- train.py


@pytest.mark.parametrize("method", list(train.METHODS))
def test_every_method_trains_on_unequal_stages(method, corpus, tmp_path):
    out = run(3, "--method", method, "--stages", "2,1", "--layers-per-stage", "1,3", "--steps", 12, "--eval-every", 6, "--data", corpus, "--name", "x",
              "--warmup", 2, *(["--inner-steps", 5] if method in ("noloco", "diloco") else []), *SMALL, cwd=tmp_path)
    lines = metrics(tmp_path / "runs/x")
    assert [line["step"] for line in lines] == [6, 12] and lines[-1]["heldout_loss"] < 5.2 < math.log(256)
    assert lines[-1]["perplexity"] == pytest.approx(math.exp(lines[-1]["heldout_loss"])) and "perplexity" in out
    theta = checkpoint(tmp_path / "runs/x", 12, 0)["theta"].numel()
    want = dict(local=0, ddp=12 * 4 * theta, noloco=2 * 4 * theta, diloco=2 * 4 * theta)[method]      # per rank of the pair: a ring of two sends 2 (n-1)/n = 1
    assert lines[-1]["sync_bytes"] == 2 * want
    assert lines[-1]["pipeline_bytes"] == 12 * 2 * 2 * 4 * (2 * 32 * 32 * 4) + 2 * (2 * 4 * 2) * (2 * 32 * 32 * 4)      # 4 messages each to train, 2 to evaluate
    if method == "ddp":
        assert lines[-1]["weight_spread"] == 0 and torch.equal(checkpoint(tmp_path / "runs/x", 12, 0)["theta"], checkpoint(tmp_path / "runs/x", 12, 1)["theta"])
    else:
        assert lines[-1]["weight_spread"] > 0
    for rank in range(3):       # every parameter has moved
        config = Config(256, 32, 64, 4, 2, 2)
        model = Llama(config, [0] if rank < 2 else [1, 2, 3], ends=rank < 2)
        start, _ = flatten(model.parameters())
        end = checkpoint(tmp_path / "runs/x", 12, rank)["theta"]
        starts = [p.data_ptr() - start.data_ptr() for p in model.parameters()]
        for p, a in zip(model.parameters(), starts):
            assert not torch.equal(p.flatten(), end[a // 4:a // 4 + p.numel()])


def test_weight_spread_equals_its_formula(corpus, tmp_path):
    run(5, "--stages", "3,2", "--method", "local", "--steps", 4, "--data", corpus, "--name", "x", *SMALL, cwd=tmp_path)
    squares = weights = 0.0
    for ranks in ([0, 1, 2], [3, 4]):
        thetas = torch.stack([checkpoint(tmp_path / "runs/x", 4, r)["theta"] for r in ranks]).double()
        squares += (thetas - thetas.mean(0)).square().sum().item()
        weights += thetas.numel()
    assert metrics(tmp_path / "runs/x")[-1]["weight_spread"] == pytest.approx(math.sqrt(squares / weights), rel=1e-5)


def test_ddp_on_two_processes_equals_one_process(corpus, tmp_path):
    """The gradient is the mean over all tokens: one process that reads both parts takes the same steps."""
    run(2, "--method", "ddp", "--steps", 3, "--data", corpus, "--name", "x", *SMALL, cwd=tmp_path)
    got = checkpoint(tmp_path / "runs/x", 3, 0)["theta"]
    o = train.parse(["--steps", "3", "--data", str(corpus), *SMALL])
    data = train.load_corpus(o)
    readers = [train.Reader.of(o, data, i, 2) for i in range(2)]
    model = Llama(Config(256, 32, 64, 4, 2, 2))
    theta, _ = flatten(model.parameters())
    adam = torch.optim.Adam(model.parameters(), betas=(0.9, 0.95))
    for step in range(3):
        for p in model.parameters():
            p.grad.zero_()
        batch = torch.cat([r.next(o.batch) for _ in range(2) for r in readers])
        (model.loss(model.blocks(model.embed(batch[:, :-1])), batch[:, 1:]) / batch[:, 1:].numel()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.param_groups[0]["lr"] = train.schedule(step, o)
        adam.step()
    assert torch.allclose(got, theta, rtol=0, atol=2e-5)


def test_heldout_loss_equals_one_process_on_the_heldout_text(corpus, tmp_path):
    """Each origin's fixed pipeline over the same held-out sequences: the mean, the best and the worst."""
    run(4, "--stages", "2,2", "--layers-per-stage", "1,3", "--method", "local", "--steps", 3, "--lr", 0.01, "--data", corpus, "--name", "x", *SMALL, cwd=tmp_path)
    o = options("--data", corpus, *SMALL)
    heldout, losses = train.load_corpus(o).heldout, []
    last = len(heldout) - o.seq_len - 1
    rows = torch.stack([heldout[round(i * last / 7):][:o.seq_len + 1] for i in range(8)]).long()
    for replica in range(2):
        first, second = Llama(Config(256, 32, 64, 4, 2, 2), [0]), Llama(Config(256, 32, 64, 4, 2, 2), [1, 2, 3], ends=False)
        for model, rank in ((first, replica), (second, 2 + replica)):
            flatten(model.parameters())[0].copy_(checkpoint(tmp_path / "runs/x", 3, rank)["theta"])
        losses.append(first.loss(second.blocks(first.blocks(first.embed(rows[:, :-1]))), rows[:, 1:]).item() / rows[:, 1:].numel())
    line = metrics(tmp_path / "runs/x")[-1]
    assert [line["heldout_min"], line["heldout_loss"], line["heldout_max"]] == pytest.approx([min(losses), sum(losses) / 2, max(losses)], rel=1e-5)


def test_random_routing_in_training_is_random_paths(corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACE", "1")
    results = processes(4, _traced, [str(a) for a in ["--stages", "2,2", "--steps", 3, "--seed", 5, "--data", corpus, "--name", "x", *SMALL]], cwd=tmp_path)
    sent = Counter(line for text in results for line in re.findall(r"(rank \d -> \d: microbatch \d+, hop \d+),", text))
    want = Counter()
    for step in range(3):
        for u, path in enumerate(random_paths([[0, 1], [2, 3]], 2, step, 5)):
            ranks = chain(path)
            want.update(f"rank {a} -> {b}: microbatch {u}, hop {hop}" for hop, (a, b) in enumerate(zip(ranks, ranks[1:]), 1) if a != b)
    for u, path in enumerate(full_paths([[0, 1], [2, 3]], 1) * 4):      # the evaluation
        want.update([f"rank {path[0]} -> {path[1]}: microbatch {u}, hop 1", f"rank {path[1]} -> {path[0]}: microbatch {u}, hop 2"])
    assert sent == want


def _traced(rank, world, argv):
    os.environ["TRACE"] = "1"
    return _main(rank, world, argv)[1]


@pytest.mark.parametrize("stages, timeout", [("4", 60), ("2,2", 60), ("4", 0)])
def test_warm_start_is_ddp_and_then_the_method_begins(corpus, tmp_path, stages, timeout):
    """Six steps of DDP, bit for bit; then the first outer step is NoLoCo's from there, that of float64 Eqs. 1-3 on what the inner steps made."""
    common = ["--stages", stages, "--routing", "fixed", "--data", corpus, "--lr", 3e-3, "--warmup", 2, *SMALL]
    warm = ["--method", "noloco", "--inner-steps", 4, "--alpha", 0.5, "--beta", 0.7, "--warm-start", 6, "--sync-timeout", timeout]
    run(4, *common, "--method", "ddp", "--steps", 8, "--save-every", 6, "--name", "ddp", cwd=tmp_path)
    run(4, *common, *warm, "--steps", 8, "--save-every", 6, "--name", "noloco", cwd=tmp_path)
    run(4, *common, *warm, "--steps", 8, "--inner-steps", 100, "--name", "parting", cwd=tmp_path)        # the same without an outer step
    ranks = range(4) if stages == "4" else range(2)
    at = lambda name, step: [checkpoint(tmp_path / "runs" / name, step, r) for r in ranks]
    phi = [c["theta"] for c in at("ddp", 6)]
    assert all(torch.equal(phi[0], theta) and torch.equal(c["theta"], theta) for c, theta in zip(at("noloco", 6), phi))
    thetas, groups = [c["theta"].double() for c in at("parting", 8)], random_groups(list(ranks), 2, 1, 0)
    for group in groups:
        delta = 0.7 * (sum(thetas[r] for r in group) / len(group) - phi[0].double())
        for r in group:
            assert torch.allclose(at("noloco", 8)[r]["outer"]["phi"].double(), phi[0].double() + delta, atol=1e-6)


@pytest.mark.parametrize("method", ["noloco", "ddp"])
def test_a_gradient_that_is_not_finite_is_skipped_and_counted(method, corpus, tmp_path):
    results = processes(2, _poisoned, ["--method", method, "--steps", "6", *(["--inner-steps", "2"] if method == "noloco" else []),
                                       "--data", str(corpus), "--name", "x", *SMALL], cwd=tmp_path)
    assert all(code == 0 for code, _ in results)
    line = metrics(tmp_path / "runs/x")[-1]
    assert line["skipped_steps"] == (1 if method == "noloco" else 2) and math.isfinite(line["heldout_loss"])
    assert all(checkpoint(tmp_path / "runs/x", 6, r)["theta"].isfinite().all() for r in range(2))


def _poisoned(rank, world, argv):
    """An Inf in rank 0's gradient at its third step."""
    real, calls = train.Pipeline.run, Counter()

    def run(self, *args, **kwargs):
        result = real(self, *args, **kwargs)
        calls["run"] += kwargs.get("train", True)
        if rank == 0 and calls["run"] == 3 and kwargs.get("train", True):
            next(self.model.parameters()).grad.view(-1)[0] = math.inf
        return result
    train.Pipeline.run = run
    return _main(rank, world, argv)


def test_a_crash_while_writing_a_checkpoint_leaves_the_one_before(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = [str(a) for a in ["--steps", 6, "--save-every", 2, "--data", corpus, "--name", "x", *SMALL]]
    real = torch.save

    def crash(state, file):
        if state["step"] == 4:
            file.write(b"half of it")
            raise KeyboardInterrupt
        real(state, file)
    monkeypatch.setattr(torch, "save", crash)
    with pytest.raises(KeyboardInterrupt):
        train.main(argv)
    (tmp_path / "runs/x/metrics.jsonl").write_text('{"step": 2}\n{"step": 4, "hel')      # and a line cut short
    monkeypatch.setattr(torch, "save", real)
    train.main(["--resume", "runs/x"])
    train.main([*argv[:-1 - len(SMALL) - 1], "--name", "y", *SMALL])
    assert torch.equal(checkpoint(tmp_path / "runs/x", 6, 0)["theta"], checkpoint(tmp_path / "runs/y", 6, 0)["theta"])
    assert [line["step"] for line in metrics(tmp_path / "runs/x")] == [2, 6]      # the whole line from before the checkpoint is still there


def test_resume_is_bit_exact(corpus, tmp_path):
    argv = ["--stages", "2,2", "--steps", 12, "--inner-steps", 4, "--gamma", 1.0, "--eval-every", 3, "--save-every", 6, "--data", corpus, "--name", "x", *SMALL]
    run(4, *argv, cwd=tmp_path)
    whole = tmp_path / "runs/x"
    again = shutil.copytree(whole, tmp_path / "runs/y")
    shutil.rmtree(again / "checkpoints/00000012")       # as if killed at step 11
    (again / "checkpoints/00000012").mkdir()
    (again / "checkpoints/00000012/rank0.pt").write_bytes(b"written by one rank only")
    run(4, "--resume", again, cwd=tmp_path)
    same = lambda line: {k: v for k, v in line.items() if "second" not in k and k != "sync_bytes"}       # phi in flight is sent again
    assert list(map(same, metrics(again))) == list(map(same, metrics(whole)))
    for rank in range(4):
        a, b = checkpoint(whole, 12, rank), checkpoint(again, 12, rank)
        assert torch.equal(a["theta"], b["theta"]) and torch.equal(a["outer"]["phi"], b["outer"]["phi"]) and a["cursor"] == b["cursor"]
        assert torch.equal(a["adam"]["v"], b["adam"]["v"])
    # the last two are kept; a damaged or foreign one is refused in one line
    assert sorted(p.name for p in (whole / "checkpoints").iterdir()) == ["00000006", "00000012"]
    broken = whole / "checkpoints/00000012/rank2.pt"
    broken.write_bytes(broken.read_bytes()[:1000])
    for extra, message in ((["--resume", whole, "--steps", "20"], "damaged"), (["--resume", whole, "--stages", "4"], "differs")):
        results = processes(4, _main, [str(a) for a in extra], cwd=tmp_path)
        assert [code for code, _ in results] == [2] * 4
        assert len(results[0][1].splitlines()) == 1 and message in results[0][1] and not any(text for _, text in results[1:])


def bad(*argv, error):
    return pytest.param([str(a) for a in argv], error, id=error.replace(" ", "-")[:30])


@pytest.mark.parametrize("argv, error", [
    bad("--stages", "4,4", error="needs 8 processes but got 1"),
    bad("--stages", "x", error="numbers with commas"),
    bad("--stages", "1,0", error="every stage needs a replica"),
    bad("--method", "ddp", "--alpha", 0.5, error="ddp has no --alpha"),
    bad("--dead", 7, error="needs --resume"),
    bad("--method", "fedavg", error="invalid choice"),
    bad("--data", "nowhere.txt", error="no such file"),
    bad("--data", "empty", error="no such file, or a folder without files"),
    bad("--data", "empty.txt", error="fewer than one sequence"),
    bad("--data", "short.txt", "--seq-len", 512, error="data has"),
    bad("--data", "mixed", error="mixes"),
    bad("--data", "tokens.bin", error="give --vocab 60001 or more"),
    bad("--data", "broken.json.gz", error="broken.json.gz"),
    bad("--data", "nulls.json.gz", error="nulls.json.gz, line 21: no JSON object with a text"),
    bad("--data", "few.json.gz", error="fewer than one sequence"),
    bad("--export", "out", error="--export needs --resume RUN"),
    bad("--init-from", "nowhere", error="nowhere"),
    bad("--init-from", "torn", error="Unterminated"),
    bad("--init-from", "foreign", error="model_type None is not supported, only llama"),
    bad("--init-from", "llama", "--hidden", 64, error="--hidden 64 differs from the 32 of llama"),
    bad("--init-from", "llama", "--data", "short.txt", error="No such file"),
    bad("--resume", "torn", error="no readable config.json there (Unterminated"),
    bad("--resume", "foreign", error="no readable config.json there"),
    bad("--vocab", 100, "--data", "short.txt", error="vocabulary of 256"),
    bad("--tokenizer", "nowhere.json", "--data", "short.txt", error="nowhere.json"),
    bad("--layers-per-stage", "1,1", error="stages must share"),
    bad("--hidden", 30, "--heads", 4, error="must be a multiple"),
    bad("--resume", "nowhere", error="no readable config.json"),
    bad("--steps", 0, error="at least 1"),
    bad("--group-size", 1, error="at least 2"),
    bad("--steps", "many", error="invalid int"),
    bad("--unknown", error="unrecognized"),
    bad("--skip", 0.5, error="at least 3 stages"),
    bad("--skip", 1.5, error="from 0 to below 1"),
    bad("--skip", 0.5, "--routing", "random", error="planned routing"),
    bad("--emulate", error="needs --links"),
    bad("--skip", 0.9, "--stages", 1, error="at least 3 stages"),
    bad("--lr", -1, error="--lr must be at least"),
    bad("--time-scale", 0, error="--time-scale must be at least"),
    bad("--hel", error="unrecognized"),
    bad("--links", "nowhere.json", error="nowhere.json"),
    bad("--links", "short.txt", error="short.txt"),
    bad("--eval-stages", 1, error="needs --resume"),
    bad("--eval-stages", "nan", error="above 0"),
])
def test_bad_input_is_one_line_and_status_2(argv, error, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("mixed").mkdir()
    for name in ("empty.txt", "mixed/a.txt", "mixed/b.bin"):
        Path(name).touch()
    Path("short.txt").write_text("too short " * 60)
    Path("tokens.bin").write_bytes(torch.tensor([1, 60000] * 2000, dtype=torch.uint16).numpy().tobytes())
    Path("broken.json.gz").write_bytes(b"not gzip")
    Path("nulls.json.gz").write_bytes(gzip.compress(b'{"text": null}\n' * 30))
    Path("few.json.gz").write_bytes(gzip.compress(b'{"text": "fine"}\n' * 30))
    for name, text in (("torn", '{"method": "nol'), ("foreign", '{"unknown": 1}')):
        Path(name).mkdir()
        Path(name, "config.json").write_text(text)
    Path("llama").mkdir()
    Path("llama/config.json").write_text(json.dumps(dict(model_type="llama", vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                                         num_attention_heads=2)))
    with pytest.raises(SystemExit) as stop:
        train.main(argv)
    printed = capsys.readouterr()
    assert stop.value.code == 2 and not printed.out
    assert len(printed.err.splitlines()) == 1 and error in printed.err


def test_bad_input_under_several_processes_is_printed_by_rank_0_alone(tmp_path):
    for argv in (["--stages", "2,2"], ["--method", "x"], ["--data", "nowhere"]):
        results = processes(3, _main, argv, cwd=tmp_path)
        assert [code for code, _ in results] == [2, 2, 2]
        assert len(results[0][1].splitlines()) == 1 and not results[1][1] + results[2][1]


def _main_in_own_folder(rank, world, argv):
    """Each rank on a machine of its own, as far as files go."""
    Path(f"machine{rank}").mkdir(exist_ok=True)
    os.chdir(f"machine{rank}")
    return _main(rank, world, argv)


def test_machines_without_a_shared_folder_resume_and_one_without_its_part_refuses(corpus, tmp_path):
    argv = ["--steps", "4", "--save-every", "2", "--data", str(corpus), "--name", "x", *SMALL]
    assert all(code == 0 for code, _ in processes(2, _main_in_own_folder, argv, cwd=tmp_path))
    assert not (tmp_path / "machine1/runs/x/config.json").exists()
    results = processes(2, _main_in_own_folder, ["--resume", "runs/x", "--steps", "6"], cwd=tmp_path)
    assert all(code == 0 for code, _ in results) and "from step 4" in results[0][1]
    shutil.rmtree(tmp_path / "machine1")        # the BadInput is rank 1's alone
    results = processes(2, _main_in_own_folder, ["--resume", "runs/x"], cwd=tmp_path)
    assert [code for code, _ in results] == [2, 2] and "no checkpoint that all 2 ranks hold" in results[0][1] and not results[1][1]


def test_resume_with_another_number_of_processes_is_refused(corpus, tmp_path):
    run(2, "--steps", 2, "--data", corpus, "--name", "x", *SMALL, cwd=tmp_path)
    (code, text), = processes(1, _main, ["--resume", "runs/x"], cwd=tmp_path)
    assert code == 2 and "needs 2 processes but got 1" in text


def test_gamma_outside_the_bound_is_a_warning_with_the_bound(corpus, tmp_path):
    out = run(2, "--alpha", 0.5, "--gamma", 1.6, "--steps", 1, "--data", corpus, "--name", "x", *SMALL, cwd=tmp_path)
    assert "warning: gamma 1.6 is outside 0 < gamma < 1.500" in out


def options(*argv):
    return train.parse([str(a) for a in argv])


def test_training_and_heldout_text_are_disjoint(tmp_path):
    for i in range(20):
        (tmp_path / f"{i}.txt").write_bytes(bytes([65 + i]) * 300)
    data = train.load_corpus(options("--data", tmp_path))
    train_, = data.train
    assert set(train_.tolist()) & set(data.heldout.tolist()) == {0} and len(train_) == 19 * 301 and len(data.heldout) == 301
    one = tmp_path / "one"
    one.write_bytes(bytes(range(1, 201)) * 100)
    data = train.load_corpus(options("--data", one))
    assert bytes(data.train[0].tolist() + data.heldout.tolist()) == one.read_bytes() + b"\0" and len(data.heldout) == 1000


def test_default_corpus_is_the_standard_library():
    data = train.load_corpus(options())
    assert len(data.train[0]) + len(data.heldout) > 5e6 and data.bytes_per_token == 1
    root, files = train.standard_library()
    assert (root / "random.py") in files and not any("site-packages" in p.parts for p in files)
    assert data.digest == train.load_corpus(options()).digest


def test_nanogpt_tokens_of_several_files_are_mapped_and_read_once_per_epoch(tmp_path):
    tokens = torch.arange(9000) % 3000
    for name, part in (("train_0.bin", tokens[:4000]), ("train_1.bin", tokens[4000:4050]), ("train_2.bin", tokens[4050:8000]), ("val.bin", tokens[8000:])):
        (tmp_path / name).write_bytes(part.to(torch.uint16).numpy().tobytes())
    data = train.load_corpus(options("--data", tmp_path, "--vocab", 3000, "--eval-sequences", 4))
    assert [len(part) for part in data.train] == [4000, 50, 3950] and torch.equal(torch.cat(data.train).long(), tokens[:8000])
    assert torch.equal(data.heldout.long(), tokens[8000:]) and data.bytes_per_token is None and data.end is None
    if Path("/proc/self/maps").exists():        # Linux
        assert all(str(tmp_path / f"train_{i}.bin") in Path("/proc/self/maps").read_text() for i in range(3))
    reader = train.Reader(data.train, 128, 0)
    assert reader.next(2).shape == (2, 129) and reader.count == 31 + 30        # 50 tokens are no sequence
    seen = [reader.next(1)[0] for _ in range(2 * 61 - 2)][-61:]
    starts = [128 * i for i in range(31)] + [4050 + 128 * i for i in range(30)]
    assert sorted(row.tolist() for row in seen) == sorted(tokens[a:a + 129].tolist() for a in starts)


def test_tokenizer_file(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, "<|endoftext|>": 1, **{f"w{i}": i + 2 for i in range(50)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text").mkdir()
    for i in range(2):
        (tmp_path / f"text/{i}.txt").write_text(" ".join(f"w{j % 50}" for j in range(400)))
    argv = ["--data", tmp_path / "text", "--tokenizer", tmp_path / "tokenizer.json"]
    data = train.load_corpus(options(*argv))
    assert data.train[0].tolist() == [j % 50 + 2 for j in range(400)] + [1] and data.end == 1
    assert data.bytes_per_token == pytest.approx((tmp_path / "text/0.txt").stat().st_size / 400, rel=0.01)
    with pytest.raises(train.BadInput, match="give --vocab 52"):
        train.load_corpus(options(*argv, "--vocab", 40))
    # a text that spells the end token does not end a document; another end token is named beside the tokenizer
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("w7 <|endoftext|> w9").ids == [9, 1, 11]
    assert train.load_tokenizer(options(*argv))[0]([b"w7 <|endoftext|> w9", b""])[0].tolist() == [9, 0, 0, 0, 11, 1]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(dict(eos_token=dict(content="w9"))))
    assert [part.tolist() for part in train.load_tokenizer(options(*argv))[0]([b"w7", b""])] == [[9, 11], [11]]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(dict(eos_token="nowhere")))
    with pytest.raises(train.BadInput, match="has no nowhere to end a document"):
        train.load_corpus(options(*argv))


def test_reader_gives_each_sequence_once_per_epoch_and_resumes():
    tokens = torch.arange(1000)
    reader = train.Reader([tokens], 10, 5)
    epochs = [sorted(int(reader.next(1)[0, 0]) for _ in range(reader.count)) for _ in range(2)]
    assert epochs[0] == epochs[1] == list(range(0, 990, 10))
    other = train.Reader([tokens], 10, 5)
    other.cursor = reader.cursor
    assert torch.equal(other.next(7), reader.next(7))


def test_schedule_warms_up_and_ends_at_a_tenth():
    o = options("--steps", 100, "--warmup", 10, "--lr", 1.0)
    rates = [train.schedule(s, o) for s in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == rates[10] == max(rates) == 1.0 and rates[-1] == pytest.approx(0.1, abs=1e-3)
    assert rates[55] == pytest.approx(0.55, abs=0.01) and rates[10:] == sorted(rates[10:], reverse=True)


def test_model_sizes_are_the_papers():
    for name, (millions, inner) in dict(tiny=(1.1, 1.0), small=(310, 113), medium=(2135, 1611), large=(9639, 8590)).items():
        o = options("--model", name)
        all_, without = count_parameters(Config(o.vocab, o.hidden, o.mlp, o.layers, o.heads, o.kv_heads))
        assert all_ / 1e6 == pytest.approx(millions, rel=0.02) and without / 1e6 == pytest.approx(inner, rel=0.05)


def test_torchrun_launch_line(corpus, tmp_path):
    """The README's command, through torchrun itself, with compute in bfloat16."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "--standalone", str(HERE / "train.py"), "--stages", "2,2", "--steps", "4",
               "--dtype", "bfloat16", "--data", str(corpus), "--name", "x", *SMALL]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "weight spread" in done.stdout, done.stderr
    assert json.loads((tmp_path / "runs/x/config.json").read_text())["stages"] == [2, 2]


# ---------------------------------------------------------------- failures


class Fault(enum.Enum):
    DIE_BEFORE_EXCHANGE = enum.auto()
    DIE_IN_EXCHANGE = enum.auto()
    HANG = enum.auto()
    SLOW = enum.auto()
    SEND_NAN = enum.auto()
    DIE_IN_FORWARD = enum.auto()
    DIE_IN_BACKWARD = enum.auto()
    CRASH_IN_CHECKPOINT = enum.auto()
    DIE_IN_EVALUATION = enum.auto()
    LOSE_STORE = enum.auto()


FAULTS = ["--steps", 60, "--inner-steps", 5, "--sync-timeout", 3, "--lr", 3e-3, "--warmup", 5, "--eval-every", 20, "--save-every", 20, "--name", "x", *SMALL]
JOBS = {    # ranks, options, the rank that fails
    "one stage": (4, ["--stages", "4"], 2),
    "pipeline": (4, ["--stages", "2,2"], 3),
    "skip": (6, ["--stages", "2,2,2", "--skip", 0.33, "--microbatches", 4, "--links", "links.json"], 4),
}


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def inject(faults, store):
    """This process is to fail so: [(fault, at step)] in the order of steps. Those before the step at which it starts are over."""
    begin, tentative, post, blocks, backward, save, spread = (
        train.Pipeline.begin, NoLoCo.tentative, NoLoCo.post, Llama.blocks, torch.Tensor.backward, torch.save, train.weight_spread)
    now = types.SimpleNamespace(fault=None, queue=None)

    def beginning(pipeline, step, **kwargs):
        if now.queue is None:
            now.queue = [f for f in faults if f[1] >= step]
        if now.queue and step >= now.queue[0][1]:
            now.fault = now.queue.pop(0)[0]
            if now.fault is Fault.HANG:
                pipeline.job.store.set("stopped", str(os.getpid()))
                os.kill(os.getpid(), signal.SIGSTOP)
            if now.fault is Fault.LOSE_STORE:
                os.kill(store, signal.SIGKILL)
        return begin(pipeline, step, **kwargs)

    def meeting(outer):
        if now.fault is Fault.DIE_BEFORE_EXCHANGE:
            die()
        if now.fault is Fault.SEND_NAN:
            outer.theta[7], now.fault = math.nan, None
        return tentative(outer)

    def posting(outer, *args):
        posted = post(outer, *args)
        if now.fault is Fault.DIE_IN_EXCHANGE:
            die()
        return posted

    def forward(model, x):
        if now.fault is Fault.DIE_IN_FORWARD:
            die()
        if now.fault is Fault.SLOW:
            time.sleep(0.02)        # the fault itself
        return blocks(model, x)

    def backwards(*args):
        if now.fault is Fault.DIE_IN_BACKWARD:
            die()
        return backward(*args)

    def saving(state, file):
        if now.fault is Fault.CRASH_IN_CHECKPOINT:
            file.write(b"half of it")
            file.flush()
            die()
        save(state, file)

    def evaluating(*args):
        if now.fault is Fault.DIE_IN_EVALUATION:
            die()
        return spread(*args)

    train.Pipeline.begin, NoLoCo.tentative, NoLoCo.post, Llama.blocks, torch.Tensor.backward, torch.save, train.weight_spread = (
        beginning, meeting, posting, forward, backwards, saving, evaluating)


def _faulty(rank, world, argv, faults, store):
    inject([(fault, at) for fault, victim, at in faults if victim == rank], store)
    return _main(rank, world, argv)


def _host(pipe):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


@contextlib.contextmanager
def store_host():
    """A process that hosts the store, as node 0's torchrun does: (port, pid)."""
    ours, theirs = fork.Pipe()
    host = fork.Process(target=_host, args=(theirs,))
    host.start()
    try:
        yield ours.recv(), host.pid
    finally:
        host.kill()
        host.join()


def failing(job, faults, cwd, *extra, fallen=(), limit=120):
    """Run a job with faults [(fault, rank, step)]: {rank: (exit status, output)} of those that ended by themselves."""
    world, options, _ = JOBS[job]
    (cwd / "links.json").write_text(json.dumps(dict(delay=[[0.01] * 6] * 6, compute=0.01)))
    with store_host() as (port, pid):
        return processes(world, _faulty, [str(a) for a in [*FAULTS, *options, *extra]], faults, pid, cwd=cwd, limit=limit, port=port, fallen=fallen)


@pytest.fixture(scope="module")
def sound(corpus, tmp_path_factory):
    """Held-out loss of each job when nothing fails, run once."""
    @functools.cache
    def loss(job):
        folder = tmp_path_factory.mktemp("sound")
        assert all(code == 0 for code, _ in failing(job, [], folder, "--data", corpus))
        return metrics(folder / "runs/x")[-1]["heldout_loss"]
    return loss


SMOKE = [(Fault.DIE_IN_EXCHANGE, "one stage"), (Fault.SEND_NAN, "one stage"), (Fault.DIE_IN_BACKWARD, "pipeline"), (Fault.LOSE_STORE, "pipeline"),
         (Fault.HANG, "skip")]
CASES = [pytest.param(f, j, id=f"{f.name}-{j}", marks=[] if (f, j) in SMOKE else pytest.mark.faults) for j in JOBS for f in Fault]


@pytest.mark.parametrize("fault, job", CASES)
def test_survivors_reach_the_loss_of_a_run_without_the_fault(fault, job, sound, corpus, tmp_path):
    world, _, victim = JOBS[job]
    dies = fault not in (Fault.SLOW, Fault.SEND_NAN, Fault.LOSE_STORE)
    results = failing(job, [(fault, victim, 22)], tmp_path, "--data", corpus, fallen=[victim] if dies else [])
    print(*results, sep="\n")
    rows = metrics(tmp_path / "runs/x")
    if fault is Fault.LOSE_STORE:           # all write a checkpoint and stop with one line; a new job goes on from there
        for r, (code, _) in enumerate(results):         # at the latest at the next outer step
            assert re.fullmatch(rf"stopped: rank {r} at step 2[2-5]: the store on node 0 is lost; go on with --resume runs/x", code)
        results = processes(world, _main, ["--resume", "runs/x"], cwd=tmp_path)
        rows = metrics(tmp_path / "runs/x")
    ends = [result for rank, result in enumerate(results) if rank != victim or not dies]
    assert all(result and result[0] == 0 for result in ends)
    events = [row for row in rows if "event" in row]
    if fault is Fault.SEND_NAN:
        assert any(e.get("refused") == [victim] and e["rank"] != victim for e in events)
        assert any(e.get("adopted") not in (None, victim) and e["rank"] == victim for e in events)
        assert rows[-1]["weight_spread"] < 1
    elif dies and job == "one stage":
        # on a loaded machine a survivor that has waited for the victim may itself come too late for its next partner; in the end all are there
        assert victim in {r for e in events for r in e["missing"]} and rows[-1]["ranks"] == world - 1
    elif dies:
        assert [e["ranks"] for e in events if e["event"] == "dead"] == [[victim]] and rows[-1]["ranks"] == world - 1
        # what went through it in one iteration, and in those that others, who do not need it, had begun by then: to the next outer step at most
        assert 0 <= rows[-1]["lost_microbatches"] <= 4 * 6
    assert rows[-1]["step"] == 60 and rows[-1]["heldout_loss"] == pytest.approx(sound(job), rel=0.05)


def _helped(rank, slots, helper, world, argv, faults, store):
    """The ranks of a job, and in the last slot a helper from outside it."""
    os.environ["WORLD_SIZE"] = str(world)
    return _faulty(rank, world, argv, faults, store) if rank < world else helper(argv)


def _wake(argv):
    """Once the hung process is given up, it goes on, while the others still train."""
    store = train.Job().store
    store.wait(["dropped/3"], timedelta(seconds=100))
    os.kill(int(store.get("stopped")), signal.SIGCONT)


def test_a_node_that_wakes_after_it_was_declared_dead_leaves(corpus, tmp_path):
    world, options, victim = JOBS["pipeline"]
    with store_host() as (port, pid):
        *results, _ = processes(world + 1, _helped, _wake, world, [str(a) for a in [*FAULTS, *options, "--data", corpus, "--steps", 200]],
                                [(Fault.HANG, victim, 22)], pid,
                                cwd=tmp_path, port=port)
    assert [code for code, _ in results] == [0] * world and "declared it dead" in results[victim][1] and metrics(tmp_path / "runs/x")[-1]["ranks"] == world - 1


def _return(argv):
    """Rank 2 is started again once it is missed."""
    os.environ["RANK"] = "2"
    train.Job().store.wait(["absent/2"], timedelta(seconds=100))
    return _main(2, 4, [*argv, "--join"])


@pytest.mark.parametrize("streamed", [False, True])
def test_a_restarted_replica_joins_and_takes_part(streamed, sound, corpus, tmp_path):
    data = corpus
    if streamed:
        data = tmp_path / "c4"
        data.mkdir()
        for i, file in enumerate(sorted(corpus.iterdir())):
            with gzip.open(data / f"c4-{'train' if i else 'validation'}.{i}.json.gz", "wt") as shard:
                shard.writelines(json.dumps(dict(text=file.read_text()[a:a + 500])) + "\n" for a in range(0, 8000, 500))
    with store_host() as (port, pid):
        *results, joined = processes(5, _helped, _return, 4, [str(a) for a in [*FAULTS, "--stages", 4, "--data", data, "--steps", 300]],
                                     [(Fault.DIE_BEFORE_EXCHANGE, 2, 22)], pid, cwd=tmp_path, port=port, fallen=[2])
    assert [result and result[0] for result in results] == [0, 0, None, 0] and joined[0] == 0, joined
    rows = metrics(tmp_path / "runs/x")
    back = next(row for row in rows if row.get("event") == "joined")
    assert back["rank"] == 2 and [row["ranks"] for row in rows if "ranks" in row][-1] == 4
    assert not [row for row in rows if row["step"] > back["step"] + 5 and 2 in row.get("missing", [])]     # partner again from the next outer step on
    assert rows[-1]["weight_spread"] < 1e-2 and rows[-1]["heldout_loss"] < sound("one stage")
    for rank in range(3):       # the same number of steps, and weights close to the others'
        state = [checkpoint(tmp_path / "runs/x", 300, r) for r in (rank, 3)]
        assert state[0]["step"] == state[1]["step"] and (state[0]["theta"] - state[1]["theta"]).norm() < 0.1 * state[1]["theta"].norm()


def _intrude(argv):
    """A fifth process that would join a pipeline."""
    os.environ["RANK"] = "3"
    return _main(3, 4, [*argv, "--join"])


def test_joining_a_pipeline_is_refused_by_the_joiner_alone(corpus, tmp_path):
    with store_host() as (port, pid):
        *results, (code, text) = processes(5, _helped, _intrude, 4, [str(a) for a in [*FAULTS, "--stages", "2,2", "--data", corpus]], [], pid,
                                           cwd=tmp_path, port=port)
    assert code == 2 and text.startswith("error: --join is for --method noloco on one stage") and text.count("\n") == 1
    assert [code for code, _ in results] == [0] * 4


def test_a_store_lost_before_an_evaluation_leaves_a_checkpoint_and_one_line(corpus, tmp_path):
    results = failing("one stage", [(Fault.LOSE_STORE, 2, 22)], tmp_path, "--data", corpus, "--inner-steps", 50)
    assert [code for code, _ in results] == [f"stopped: rank {r} at step 40: the store on node 0 is lost; go on with --resume runs/x" for r in range(4)]
    assert [checkpoint(tmp_path / "runs/x", 40, r)["step"] for r in range(4)] == [40] * 4


@pytest.mark.parametrize("skip", [False, True])
def test_a_stage_without_replicas_is_left_out_or_ends_the_run_with_a_checkpoint(skip, corpus, tmp_path):
    options = ["--stages", "1,1,1", "--microbatches", 4, "--links", "links.json", *(["--skip", 0.33] if skip else []), "--data", corpus]
    (tmp_path / "links.json").write_text(json.dumps(dict(delay=[[0.01] * 3] * 3, compute=0.01)))
    with store_host() as (port, pid):
        results = processes(3, _faulty, [str(a) for a in [*FAULTS, *options]], [(Fault.DIE_IN_BACKWARD, 2, 22)], pid, cwd=tmp_path, port=port, fallen=[2])
    rows = metrics(tmp_path / "runs/x")
    if skip:
        assert [code for code, _ in results[:2]] == [0, 0] and rows[-1]["step"] == 60 and rows[-1]["heldout_loss"] < rows[0]["heldout_loss"]
        assert [row["stages_left_out"] for row in rows if row.get("event") == "dead"] == [[2]]
    else:
        line = "stopped: rank {} at step 23: every replica of stage 2 is gone and without --skip no microbatch can leave it out; go on with --resume runs/x"
        assert [code for code, _ in results[:2]] == [line.format(r) for r in range(2)]
        assert [checkpoint(tmp_path / "runs/x", 23, r)["step"] for r in range(2)] == [23, 23]


def test_a_death_in_the_warm_start_leaves_checkpoints_and_one_line(corpus, tmp_path):
    world, _, victim = JOBS["one stage"]
    results = failing("one stage", [(Fault.DIE_IN_FORWARD, victim, 4)], tmp_path, "--data", corpus, "--warm-start", 10, fallen=[victim])
    line = "stopped: rank {} at step 4: --warm-start needs every process, and one is gone; go on with --resume runs/x"
    assert [code for code, _ in (r for r in results if r)] == [line.format(r) for r in range(world) if r != victim]
    assert all(checkpoint(tmp_path / "runs/x", 4, r)["step"] == 4 for r in range(world) if r != victim)


def test_survivors_checkpoints_serve_the_dead(corpus, tmp_path):
    world, _, victim = JOBS["one stage"]
    results = failing("one stage", [(Fault.DIE_BEFORE_EXCHANGE, victim, 22)], tmp_path, "--data", corpus, fallen=[victim])
    assert [result and result[0] for result in results] == [0, 0, None, 0]
    folder = tmp_path / "runs/x/checkpoints"
    assert sorted(p.name for p in folder.iterdir()) == ["00000020", "00000040", "00000060"]        # 20: the last that all hold
    assert sorted(p.name for p in (folder / "00000060").iterdir()) == ["rank0.pt", "rank1.pt", "rank2.dead", "rank3.pt"]
    run(world, "--resume", "runs/x", "--steps", 70, cwd=tmp_path)
    assert metrics(tmp_path / "runs/x")[-1]["ranks"] == world and metrics(tmp_path / "runs/x")[-1]["step"] == 70


def test_torchrun_restarts_from_the_newest_whole_checkpoint(corpus, tmp_path):
    script = tmp_path / "crash.py"
    script.write_text("import os, signal, sys, train\nbegin = train.Pipeline.begin\n"
                      "def crash(pipeline, step, **kwargs):\n    if step == 7 and pipeline.rank == 1 and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
                      "        os.kill(os.getpid(), signal.SIGKILL)\n    return begin(pipeline, step, **kwargs)\n"
                      "train.Pipeline.begin = crash\ntrain.main()\n")
    argv = ["--stages", "2", "--steps", 10, "--inner-steps", 2, "--save-every", 3, "--sync-timeout", 0, "--data", corpus, *SMALL]
    env = {**os.environ, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node", "2", "--max-restarts", "1", str(script),
                           *map(str, argv)], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    restarted, = (tmp_path / "runs").iterdir()
    assert f"{Path('runs') / restarted.name}, from step 6" in done.stdout
    run(2, *argv, "--name", "whole", cwd=tmp_path)
    for rank in range(2):
        assert torch.equal(checkpoint(restarted, 10, rank)["theta"], checkpoint(tmp_path / "runs/whole", 10, rank)["theta"])


@pytest.mark.soak
def test_soak(corpus, tmp_path):
    """200 outer steps on 8 processes with a random fault every ten; who dies is started again and joins, who hangs goes on within 5 s."""
    r, world, steps = random.Random(0), 8, 400
    kinds = [f for f in Fault if f is not Fault.LOSE_STORE]
    faults = [(r.choice(kinds), r.randrange(1, world), at) for at in range(20, steps, 20)]
    argv = [str(a) for a in [*FAULTS, "--steps", steps, "--inner-steps", 2, "--stages", world, "--data", corpus]]
    deaths, end = 0, time.monotonic() + 900
    with store_host() as (port, pid):
        children, pipes = {}, {}

        def start(rank, *extra):
            pipes[rank], theirs = fork.Pipe()
            children[rank] = fork.Process(target=_child, args=(theirs, rank, world, port, True, str(tmp_path), _faulty, ([*argv, *extra], faults, pid)))
            children[rank].start()
            theirs.close()
        try:
            for rank in range(world):
                start(rank)
            while children[0].is_alive():
                assert time.monotonic() < end, "did not finish"
                multiprocessing.connection.wait([c.sentinel for c in children.values()], timeout=5)
                for rank, child in list(children.items()):
                    if child.exitcode is not None and child.exitcode != 0:
                        deaths += 1
                        start(rank, "--join")
                    elif child.exitcode is None:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(child.pid, signal.SIGCONT)      # who has hung goes on
            good, (code, output) = pipes[0].recv()
        finally:
            for child in children.values():
                child.kill()
                child.join()
    assert good and code == 0, output
    rows = metrics(tmp_path / "runs/x")
    events = Counter(row["event"] for row in rows if "event" in row)
    print(f"\nfaults {dict(Counter(f.name for f, *_ in faults))}\nprocesses that died {deaths}\nevents {dict(events)}\n"
          f"held-out {[round(row['heldout_loss'], 2) for row in rows if 'event' not in row]}")
    assert rows[-1]["step"] == steps and rows[-1]["heldout_loss"] < 1 and events["joined"] >= deaths - 1


# ---------------------------------------------------------------- streams


def write_shards(folder, count, lines, bad=()):
    """C4 shards, in which line i of shard s has the text "s.i xx...", lines in `bad` are broken. Returns {line: text} of each shard."""
    folder.mkdir(exist_ok=True)
    shards, spoilt = [], itertools.cycle([b"{", b'{"text": null}', b'["text"]', b'{"url": ""}', b"\xff\xfe", b'{"text": "\\ud800"}', b""])
    for s in range(count):
        texts = {i: f"{s}.{i} " + "x" * (7 * i % 23) for i in range(lines) if i not in bad}
        rows = [json.dumps(dict(text=texts[i], url="")).encode() if i in texts else next(spoilt) for i in range(lines)]
        (folder / f"c4-train.{s:05d}-of-{count:05d}.json.gz").write_bytes(gzip.compress(b"\n".join(rows) + b"\n"))
        shards.append(texts)
    heldout = b"".join(json.dumps(dict(text=f"held out {i}")).encode() + b"\n" for i in range(90))
    (folder / "c4-validation.00000-of-00001.json.gz").write_bytes(gzip.compress(heldout))
    return shards


@pytest.mark.parametrize("shards, origins", [(3, 1), (3, 2), (2, 5)])
def test_stream_equals_the_joined_documents_from_any_cursor(shards, origins, tmp_path):
    texts = write_shards(tmp_path / "c4", shards, 240, bad=(0, 3, 77, 239))
    data = train.load_corpus(options("--data", tmp_path / "c4", "--seq-len", 32, "--eval-sequences", 8))
    assert bytes(data.heldout.tolist()).startswith(b"held out 0\0held out 1\0") and b"x" not in bytes(data.heldout.tolist()) and data.bytes_per_token == 1
    every = set()
    for origin in range(origins):
        own = [(s, i) for s in range(shards) for i in texts[s] if (s % origins == origin if shards >= origins else i // 20 % origins == origin)]
        assert not every & set(own)
        every |= set(own)
        want = b"".join(texts[s][i].encode() + b"\0" for s, i in own)
        stream, cursors, count = train.Stream(data, 32, origin, origins), [], len(want) // 32
        rows = []
        for _ in range(count + 9):          # into the second epoch
            cursors.append(stream.cursor)
            rows += stream.next(1).tolist()
        joined = want + want
        assert rows == [list(joined[32 * k:32 * k + 33]) for k in range(count + 9)]
        mine = [i for i in (0, 3, 77, 239) if shards >= origins or i // 20 % origins == origin]
        share = len(stream.files)
        passed = [cursor for cursor in cursors if cursor[0] < share]
        again = sum(i in mine and i < stream.cursor[1] for i in (0, 3, 77, 239))        # met once more in the second epoch's first shard
        assert stream.cursor[0] == share and stream.cursor[2] == share * len(mine) + again
        for k in (0, 1, len(passed) // 2, len(passed) - 1):
            for again in (train.Stream(data, 32, origin, origins), stream):         # a new process, and one that goes back
                again.cursor = cursors[k]
                assert again.next(4).tolist() == rows[k:k + 4] and again.cursor == cursors[k + 4]
    assert every == {(s, i) for s in range(shards) for i in texts[s]}


def test_a_stream_reads_a_bounded_part_ahead(tmp_path, monkeypatch):
    write_shards(tmp_path / "c4", 1, 6000)
    data, drawn, real = train.load_corpus(options("--data", tmp_path / "c4", "--seq-len", 32)), Counter(), train.documents

    def counted(*args):
        for document in real(*args):
            drawn["documents"] += 1
            yield document
    stream = train.Stream(data, 32, 0, 1)
    monkeypatch.setattr(train, "documents", counted)
    stream.next(1)
    for future in stream.ready:
        future.result()
    assert train.READY * 32 / 30 < drawn["documents"] < 64 + (train.READY + 1) * 32 / 4        # documents of 5 to 30 bytes, 64 at a time


def test_what_follows_where_a_shard_breaks_off_is_skipped_and_counted(tmp_path):
    texts, = write_shards(tmp_path / "c4", 1, 6000)
    torn = tmp_path / "c4/c4-train.00000-of-00001.json.gz"
    torn.write_bytes(torn.read_bytes()[:-20])
    (tmp_path / "c4/c4-train.00001-of-00001.json.gz").write_bytes(gzip.compress(b'{"text": "whole"}\n' * 600))
    stream = train.Stream(train.load_corpus(options("--data", tmp_path / "c4", "--seq-len", 32)), 32, 0, 1)
    text = b""
    while b"whole" not in text:
        text += bytes(stream.next(1)[0, :-1].tolist())
    read = text[:text.index(b"whole")].split(b"\0")[:-1]
    assert 3000 < len(read) < 6000 and read == [texts[i].encode() for i in range(len(read))] and stream.cursor[2] == 1


def test_of_a_single_shard_every_20th_line_is_held_out(tmp_path):
    write_shards(tmp_path, 1, 400)
    data = train.load_corpus(options("--data", tmp_path / "c4-train.00000-of-00001.json.gz", "--seq-len", 32, "--eval-sequences", 4))
    numbers = lambda text: {int(n) for n in re.findall(rb"\x000\.(\d+) ", b"\0" + text)}
    stream, read = train.Stream(data, 32, 0, 1), b""
    while stream.cursor[0] == 0:
        read += bytes(stream.next(1)[0, :-1].tolist())
    assert numbers(read) == set(range(400)) - set(range(0, 400, 20)) and {0, 20, 40, 60} < numbers(bytes(data.heldout.tolist())) <= set(range(0, 400, 20))


def test_a_run_on_streams_resumes_to_the_bit_and_reports_bad_lines(tmp_path):
    write_shards(tmp_path / "c4", 3, 400, bad=(1, 2))
    run(2, "--steps", 8, "--save-every", 4, "--eval-every", 4, "--data", "c4", "--name", "x", *SMALL, cwd=tmp_path)
    whole = tmp_path / "runs/x"
    again = shutil.copytree(whole, tmp_path / "runs/y")
    shutil.rmtree(again / "checkpoints/00000008")
    out = run(2, "--resume", again, cwd=tmp_path)
    for rank in range(2):
        a, b = checkpoint(whole, 8, rank), checkpoint(again, 8, rank)
        assert torch.equal(a["theta"], b["theta"]) and a["cursor"] == b["cursor"] and a["cursor"][1] > 0
    assert [line["bad_lines"] for line in metrics(again)] == [line["bad_lines"] for line in metrics(whole)] == [4, 4] and "bad lines       4" in out
    write_shards(tmp_path / "c4", 3, 401)           # the digest knows sizes
    (code, text), _ = processes(2, _main, ["--resume", str(again), "--steps", "9"], cwd=tmp_path)
    assert code == 2 and "the data differ" in text


# ---------------------------------------------------------------- Hugging Face's form


def test_export_equals_ours_in_transformers(corpus, tmp_path, monkeypatch, capsys):
    transformers = pytest.importorskip("transformers")
    run(3, "--stages", "2,1", "--layers-per-stage", "1,3", "--method", "local", "--kv-heads", 1, "--rope-theta", 500, "--steps", 6, "--lr", 0.01,
        "--data", corpus, "--name", "x", *SMALL, cwd=tmp_path)
    monkeypatch.chdir(tmp_path)
    config = Config(256, 32, 64, 4, 2, 1, 500.0)
    tokens = torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(0))
    printed = {}
    for choice, ranks in (("0", [0]), ("1", [1]), ("mean", [0, 1])):
        train.main(["--resume", "runs/x", "--export", f"out{choice}", "--export-replica", choice])
        printed[choice] = float(re.search(rf"{'mean of all' if choice == 'mean' else 'replica ' + choice} +(\S+)", capsys.readouterr().out)[1])
        ours = [Llama(config, [0]), Llama(config, [1, 2, 3], ends=False)]
        for part, held in zip(ours, (ranks, [2])):
            flatten(part.parameters())[0].copy_(sum(checkpoint(tmp_path / "runs/x", 6, r)["theta"] for r in held) / len(held))
        theirs = transformers.AutoModelForCausalLM.from_pretrained(f"out{choice}")
        want = ours[0].logits(ours[1].blocks(ours[0].blocks(ours[0].embed(tokens))))
        assert torch.allclose(theirs(tokens).logits, want, rtol=0, atol=1e-5) and theirs.dtype == torch.float32
    line = metrics(tmp_path / "runs/x")[-1]
    assert sorted([printed["0"], printed["1"]]) == pytest.approx([line["heldout_min"], line["heldout_max"]], abs=2e-6) and printed["mean"] != printed["0"]
    said = theirs.generate(tokens[:1, :5], attention_mask=torch.ones(1, 5), max_new_tokens=8, do_sample=False)
    assert torch.equal(said[:, :5], tokens[:1, :5]) and 5 < said.shape[1] <= 13 and theirs.generation_config.eos_token_id == 0
    for tokenizer in (transformers.AutoTokenizer.from_pretrained("outmean"), transformers.PreTrainedTokenizerFast(tokenizer_file="outmean/tokenizer.json")):
        for text in ("def f(x):\n\treturn  x . 's , a", " \u0100\u0120 \u00e9 e\u0301 \u4f60\u597d \U0001f389\0\r\n", "".join(map(chr, range(300)))):
            assert tokenizer(text).input_ids == list(text.encode()) and tokenizer.decode(list(text.encode())) == text
    capsys.readouterr()         # transformers' bars
    torn = tmp_path / "runs/x/checkpoints/00000006/rank2.pt"
    torn.write_bytes(torn.read_bytes()[:1000])
    for argv, error in ((["--export", "out0"], "not an empty folder"), (["--export", "new", "--export-replica", "2"], "takes 0, 1, mean, not 2"),
                        (["--export", "new"], "00000006 is damaged")):
        with pytest.raises(SystemExit):
            train.main(["--resume", "runs/x", *argv])
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and error in lines[0]


@pytest.mark.parametrize("tied", [False, True])
def test_init_from_transformers_llama_and_back(tied, corpus, tmp_path, monkeypatch, capsys):
    """At rate 0 the held-out loss is that of transformers' model; a resume does not need the folder; what is exported is the same model."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-3,
        rope_parameters=dict(rope_type="default", rope_theta=700.0), initializer_range=0.1, tie_word_embeddings=tied))
    theirs.save_pretrained(tmp_path / "llama", max_shard_size="20KB" if tied else "1GB")
    assert tied == (tmp_path / "llama/model.safetensors.index.json").exists()
    tokens = torch.randint(256, (2, 20))
    parts = [Llama(read_config(tmp_path / "llama"), held, ends=0 in held, seed=9) for held in ([0, 1], [2, 3])]
    for part in parts:
        load_weights(part, tmp_path / "llama")
    got = parts[0].logits(parts[1].blocks(parts[0].blocks(parts[0].embed(tokens))))
    assert torch.allclose(got, theirs(tokens).logits, rtol=0, atol=1e-5)
    assert count_parameters(parts[0].config)[0] == sum(p.numel() for p in theirs.parameters())

    monkeypatch.chdir(tmp_path)
    data = ["--data", str(corpus), "--seq-len", "32", "--batch", "2", "--eval-sequences", "8", "--device", "cpu"]
    run(2, "--init-from", "llama", "--stages", "1,1", "--steps", 1, "--lr", 0, "--name", "x", *data, cwd=tmp_path)
    heldout = train.load_corpus(options(*data)).heldout
    rows = torch.stack([heldout[round(i * (len(heldout) - 33) / 7):][:33] for i in range(8)]).long()
    want = torch.nn.functional.cross_entropy(theirs(rows[:, :-1]).logits.flatten(0, 1), rows[:, 1:].flatten()).item()
    assert metrics(tmp_path / "runs/x")[-1]["heldout_loss"] == pytest.approx(want, rel=1e-5)
    shutil.rmtree("llama")
    run(2, "--resume", "runs/x", "--steps", 2, cwd=tmp_path)
    train.main(["--resume", "runs/x", "--export", "out"])
    back = transformers.AutoModelForCausalLM.from_pretrained("out")
    assert torch.allclose(back(tokens).logits, theirs(tokens).logits, rtol=0, atol=1e-6)
    assert back.config.tie_word_embeddings == tied == torch.equal(back.lm_head.weight, back.model.embed_tokens.weight)


def test_a_stage_reads_its_own_tensors_only(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    whole = Llama(Config(), seed=1)
    save_pretrained(whole, tmp_path / "whole", 128)
    assert read_config(tmp_path / "whole") == Config()
    kept = {name: p.detach() for name, p in whole.named_parameters() if ".layers.2." in name}
    safetensors.save_file(kept, tmp_path / "whole/model.safetensors")       # the rest is gone
    part = Llama(Config(), [2], ends=False)
    load_weights(part, tmp_path / "whole")
    assert all(torch.equal(p, kept[name]) for name, p in part.named_parameters())
    with pytest.raises(ValueError, match="model.layers.1"):
        load_weights(Llama(Config(), [1], ends=False), tmp_path / "whole")
    with pytest.raises(ValueError, match="has shape"):
        load_weights(Llama(Config(intermediate_size=256), [2], ends=False), tmp_path / "whole")


@pytest.mark.parametrize("change, error", [
    (dict(model_type="mistral"), "model_type mistral is not supported, only llama"),
    (dict(rope_scaling=dict(rope_type="llama3", factor=8.0)), "rope_type llama3"),
    (dict(rope_parameters=dict(rope_type="yarn", rope_theta=1e4)), "rope_type yarn"),
    (dict(rope_scaling=dict(type="linear", factor=2.0)), "type linear"),
    (dict(attention_bias=True), "attention_bias True"), (dict(mlp_bias=True), "mlp_bias True"), (dict(head_dim=64), "head_dim 64 is not supported, only 32"),
    (dict(hidden_act="gelu"), "hidden_act gelu"), (dict(quantization_config=dict(bits=4)), "quantization_config"),
    (dict(hidden_size=None), "no hidden_size"), (dict(vocab_size=None), "no vocab_size"), (dict(num_key_value_heads=3), "multiple of 3 key-value heads"),
    (dict(vocab_size="many"), "must be positive, got many"), (dict(hidden_size=100), "multiple of 2 x 4 heads")], ids=str)
def test_init_from_refuses_what_this_llama_has_not(change, error, tmp_path):
    config = dict(model_type="llama", vocab_size=256, hidden_size=128, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    (tmp_path / "config.json").write_text(json.dumps(config))
    o = options("--init-from", tmp_path)
    assert (o.hidden, o.kv_heads, o.norm_eps, o.rope_theta, o.tied) == (128, 4, 1e-6, 1e4, False)      # transformers' own defaults
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in {**config, **change}.items() if v is not None}))
    with pytest.raises(train.BadInput, match=f"--init-from {tmp_path}: .*{error}"):
        options("--init-from", tmp_path)


def test_a_missing_package_names_the_extra(tmp_path, monkeypatch, capsys):
    (tmp_path / "config.json").write_text(json.dumps(dict(model_type="llama", vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                                          num_attention_heads=2)))
    monkeypatch.chdir(tmp_path)
    for package, argv in (("safetensors", ["--init-from", str(tmp_path)]), ("tokenizers", ["--tokenizer", "x.json"])):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(SystemExit):
            train.main(argv)
        error = capsys.readouterr().err
        assert f"needs the {package} package: pip install '.[hf]'" in error and error.count("\n") == 1 and not (tmp_path / "runs").exists()


# ---------------------------------------------------------------- packaging


def test_the_wheel_holds_five_modules_and_installs(tmp_path):
    pytest.importorskip("build")
    modules = ["noloco", "skippipe", "model", "train", "bench_sync"]
    for name in ("pyproject.toml", "README.md", "LICENSE", *(m + ".py" for m in modules)):
        shutil.copy(HERE / name, tmp_path)
    run_in = lambda *command: subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    built = run_in("-m", "build", "--no-isolation")             # an sdist, and the wheel from it
    assert built.returncode == 0, built.stdout + built.stderr
    wheel, = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert {n for n in archive.namelist() if ".dist-info/" not in n} == {m + ".py" for m in modules}
        about = archive.read(next(n for n in archive.namelist() if n.endswith("METADATA"))).decode()
    assert re.findall(r"^Provides-Extra: (.*)$", about, re.M) == ["plot", "hf", "test", "all"]
    assert re.findall(r"^Requires-Dist: (\w+)>=[\d.]+$", about, re.M) == ["torch", "einops", "tqdm"]
    assert run_in("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", "fresh", str(wheel)).returncode == 0
    code = "import sys; sys.path.insert(0, 'fresh'); import noloco, skippipe, model; print(noloco.__file__, skippipe.__file__, model.__file__)"
    found = run_in("-c", code).stdout
    assert [Path(f).parent.name for f in found.split()] == ["fresh"] * 3


# ---------------------------------------------------------------- planned paths in training, partial inference


@pytest.fixture(scope="module")
def skip_run(corpus, tmp_path_factory):
    """Five ranks in three stages, two of which each microbatch visits, on a network from a file."""
    folder = tmp_path_factory.mktemp("skip")
    delay = [[0.0 if i == j else 0.002 * (1 + (i + j) % 3) for j in range(5)] for i in range(5)]
    (folder / "links.json").write_text(json.dumps(dict(delay=delay, compute=0.01, overhead=0.001)))
    out = run(5, "--stages", "2,1,2", "--skip", 0.33, "--method", "local", "--links", "links.json", "--emulate", "--time-scale", 2, "--microbatches", 4,
              "--steps", 3, "--warmup", 2, "--data", corpus, "--name", "x", *SMALL, cwd=folder)
    assert "planning skippipe paths" in out
    return folder


def test_a_skip_run_equals_single_process_simulation_of_its_paths(skip_run, corpus):
    stages, layers = [[0, 1], [2], [3, 4]], [[0], [1], [2, 3]]
    states = [checkpoint(skip_run / "runs/x", 3, r) for r in range(5)]
    paths = states[0]["plan"]["paths"]
    assert all(state["plan"] == states[0]["plan"] for state in states) and len(paths) == 8 and all(len(p) == 2 for p in paths)
    o = options("--data", corpus, "--steps", 3, "--warmup", 2, *SMALL)
    readers = [train.Reader.of(o, train.load_corpus(o), i, 2) for i in range(2)]
    models = [Llama(Config(256, 32, 64, 4, 2, 2), layers[s], ends=s == 0) for s, ranks in enumerate(stages) for _ in ranks]
    flats = [flatten(m.parameters()) for m in models]
    adams = [torch.optim.Adam(m.parameters(), betas=(0.9, 0.95)) for m in models]
    for step in range(3):
        for _, grad in flats:
            grad.zero_()
        for path in paths:
            batch = readers[path[0]].next(o.batch)
            x = models[path[0]].embed(batch[:, :-1])
            for rank in path:
                x = models[rank].blocks(x)
            models[path[0]].loss(x, batch[:, 1:]).backward()
        for rank, (_, grad) in enumerate(flats):
            visits = sum(rank in p for p in paths)
            if visits:
                grad /= visits * o.batch * o.seq_len
                grad *= min(1.0, 1.0 / grad.norm().item())
                adams[rank].param_groups[0]["lr"] = train.schedule(step, o)
                adams[rank].step()
    for (theta, _), state in zip(flats, states):
        assert torch.allclose(theta, state["theta"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("routing, method", [("dtfm", "ddp"), ("dtfm-skip", "diloco"), ("no-tc2", "noloco")])
def test_every_planned_routing_runs_emulated_with_every_method(routing, method, skip_run, corpus):
    run(5, "--stages", "2,1,2", "--skip", 0.33, "--routing", routing, "--method", method, *(["--inner-steps", 2] if method != "ddp" else []),
        "--links", "links.json", "--emulate", "--microbatches", 2, "--steps", 3, "--data", corpus, "--name", routing, *SMALL, cwd=skip_run)
    line, plan = metrics(skip_run / "runs" / routing)[-1], checkpoint(skip_run / "runs" / routing, 3, 0)["plan"]
    assert all(len(path) == (3 if routing == "dtfm" else 2) for path in plan["paths"])
    assert line["iteration_seconds"] >= plan["makespan"] * 0.999 and line["skipped_steps"] == 0


def test_the_routing_without_swaps_keeps_every_path_in_order():
    network, _ = skippipe.published_network()
    swapping, in_order = (train.PLANNERS[routing](network, 4, 3, 2, 0, ()) for routing in ("skippipe", "no-swaps"))
    assert skippipe.check(network, in_order.paths, 4, swaps=0) == [] != skippipe.check(network, swapping.paths, 4, swaps=0)
    assert in_order.makespan > swapping.bound


def _measured(rank, world):
    """`measure` with one slow pair: messages from rank 1 to rank 2 take 0.3 s more, and rank 0's forward 0.2 s: far above any noise."""
    job = train.Job()
    model = Llama(Config(hidden_size=32, intermediate_size=32, num_hidden_layers=1))
    stages = [[r] for r in range(world)]
    pipeline = train.Pipeline(model, job, stages, (1, 8, 32), torch.float32)
    send, blocks = pipeline.send, model.blocks
    pipeline.send = lambda tensor, to, u, hop: (time.sleep(0.3 * ((rank, to) == (1, 2))), send(tensor, to, u, hop))[1]
    model.blocks = lambda x: (time.sleep(0.2 * (rank == 0)), blocks(x))[1]
    result = train.measure(pipeline, stages, job)
    job.close()
    return result


def test_measure_finds_the_slow_pair_and_the_slow_node():
    (delay, compute), *others = processes(4, _measured)
    assert others == [(None, None)] * 3
    flat = [(delay[a][b], {a, b}) for a in range(4) for b in range(4) if a != b]
    assert sorted(flat, key=lambda x: -x[0])[0][1] == sorted(flat, key=lambda x: -x[0])[1][1] == {1, 2}     # both ends saw it
    assert delay[1][2] >= 0.15 and all(delay[a][a] == 0 for a in range(4)) and max(range(4), key=compute.__getitem__) == 0


def test_an_emulated_iteration_is_never_shorter_than_simulated(skip_run):
    line, plan = metrics(skip_run / "runs/x")[-1], checkpoint(skip_run / "runs/x", 3, 0)["plan"]
    assert line["iteration_seconds"] >= line["simulated_seconds"] * 0.999 and line["simulated_seconds"] == plan["makespan"] > 0.05


def test_partial_inference_equals_the_layers_in_one_process(skip_run, corpus):
    folder = skip_run / "runs/x"
    run(5, "--resume", folder, "--eval-stages", "1,0.67,0.34", cwd=skip_run)
    rows = json.loads((folder / "partial.json").read_text())
    assert [row["stages"] for row in sorted(rows, key=lambda row: row["stages"])] == [[0], [0, 1], [0, 1, 2], [0, 2]]
    assert rows[0]["heldout_loss"] == pytest.approx(metrics(folder)[-1]["heldout_loss"], abs=1e-6)
    run(5, "--resume", folder, "--eval-stages", "1", "--dead", "1,2,4", cwd=skip_run)
    dead = json.loads((folder / "partial.json").read_text())
    assert len(dead) == 1 and dead[0]["stages"] == [0, 2]        # stage 1 is gone; origin 0 and rank 3 are left
    o = options("--data", corpus, *SMALL)
    heldout = train.load_corpus(o).heldout
    models = [Llama(Config(256, 32, 64, 4, 2, 2), layers, ends=not layers[0]) for layers in ([0], [2, 3])]
    for model, rank in zip(models, (0, 3)):
        flatten(model.parameters())[0].copy_(checkpoint(folder, 3, rank)["theta"])
    last, total = len(heldout) - o.seq_len - 1, 0.0
    for i in range(8):
        row = heldout[round(i * last / 7):][:o.seq_len + 1].long()[None]
        total += models[0].loss(models[1].blocks(models[0].blocks(models[0].embed(row[:, :-1]))), row[:, 1:]).item()
    assert dead[0]["heldout_loss"] == pytest.approx(total / (8 * o.seq_len), abs=1e-5)


def test_measured_delays_make_a_plan_and_resume_keeps_it(corpus, tmp_path):
    run(4, "--stages", "2,1,1", "--skip", 0.33, "--steps", 2, "--save-every", 1, "--data", corpus, "--name", "x", *SMALL, cwd=tmp_path)
    plan = checkpoint(tmp_path / "runs/x", 1, 0)["plan"]
    shutil.rmtree(tmp_path / "runs/x/checkpoints/00000002")
    run(4, "--resume", "runs/x", cwd=tmp_path)
    assert checkpoint(tmp_path / "runs/x", 2, 3)["plan"] == plan and 0 < plan["makespan"] < 60


# ---------------------------------------------------------------- skippipe.py: the planner

# The published routes and times (released code of arXiv 2502.19913): method -> (rounds, seconds, a path per microbatch of a round).
PUBLISHED_ROUTES = {
    "SkipPipe": (2, 33.3138, 3 * [(0, 14, 6, 12), (3, 15, 17, 5), (4, 7, 13, 19), (10, 1, 18, 2), (11, 8, 16, 9)]),
    "no TC2": (2, 35.4348, [(0, 12, 5, 19), (0, 1, 19, 18), (0, 6, 18, 17), (3, 12, 6, 2), (3, 14, 12, 2), (3, 6, 14, 13), (4, 15, 13, 7),
                            (4, 15, 5, 17), (4, 15, 13, 7), (10, 1, 17, 5), (10, 1, 7, 2), (10, 14, 18, 19), *[(11, 8, 16, 9)] * 3]),
    "random": (2, 48.9157, [(0, 12, 7, 17), (0, 14, 16, 9), (0, 1, 8, 19), (3, 12, 7, 17), (3, 15, 6, 5), (3, 1, 8, 19), (4, 13, 18, 2),
                            (4, 15, 6, 5), (4, 1, 8, 19), (10, 13, 18, 2), (10, 15, 6, 5), (10, 14, 16, 9), (11, 13, 18, 2), (11, 12, 7, 17),
                            (11, 14, 16, 9)]),
    "full": (3, 79.9397, [p for p in [(0, 15, 1, 16, 5, 17), (3, 8, 9, 12, 18, 2), (4, 14, 6, 13, 7, 19)] for _ in range(3)]),
}


def random_network(draw, shape, speeds=(1.0,), memory=(1, 2, 3)):
    """Nodes numbered stage by stage, delays with and without ties."""
    nodes, first = sum(shape), [sum(shape[:s]) for s in range(len(shape))]
    delay = [[0.0 if i == j else draw.choice([0.1, 0.5, 1.0, 2.0, 3 * draw.random()]) for j in range(nodes)] for i in range(nodes)]
    return skippipe.Network(delay, [draw.choice(speeds) for _ in range(nodes)], [list(range(a, a + n)) for a, n in zip(first, shape)],
                            draw.choice(memory), draw.choice([0.0, 0.13]), 0.09)


def assert_possible(network, paths, rounds, result):
    """The invariants of the time model, checked on a timeline."""
    end, tasks, hops = {}, [[] for _ in network.compute], {}
    for rank, u, kind, start, stop in result.timeline:
        path, hop = paths[u % len(paths)], hops.setdefault(u, 0)
        way = skippipe.chain(path)
        assert rank == way[hop] and kind == skippipe.kind(path, hop)
        if hop:
            assert start >= end[u, hop - 1] + (network.delay[way[hop - 1]][rank] if way[hop - 1] != rank else 0) - 1e-6
        elif u >= len(paths):
            assert start >= end[u - len(paths), len(way) - 1] - 1e-6
        assert stop - start == pytest.approx(network.compute[rank] * {"forward": 1, "loss": 0.25, "backward": 1.5}[kind])
        end[u, hop], hops[u] = stop, hop + 1
        tasks[rank].append((start, stop, hop, {"forward": 1, "loss": 0, "backward": -1}[kind]))
    assert all(hops[u] == len(skippipe.chain(paths[u % len(paths)])) for u in range(rounds * len(paths)))
    for rank, mine in enumerate(tasks):
        held = 0
        for (start, stop, hop, take), after in zip(mine, mine[1:] + [(1e9,)]):
            held += take
            assert held <= network.memory[rank]
            assert after[0] >= stop + (network.overhead if hop else network.origin_overhead) - 1e-6
    assert result.makespan == max(end.values())


def every_path(network, kept, origin):
    """All paths under CC1 and CC2, by trying every order of the stages."""
    for stages in itertools.permutations(range(1, len(network.stages)), kept - 1):
        swapped = [i for i in range(kept - 2) if stages[i] > stages[i + 1]]
        if all(stages[i] == stages[i + 1] + 1 for i in swapped) and len(swapped) <= 2 and not any(i + 1 in swapped for i in swapped):
            plain = list(stages)
            for i in swapped:
                plain[i:i + 2] = plain[i + 1], plain[i]
            if plain == sorted(plain):
                yield from ((origin, *nodes) for nodes in itertools.product(*(network.stages[s] for s in stages)))


def every_order(paths, nodes):
    """All orders in which the nodes can run one microbatch on each of these paths."""
    found, chains = set(), [skippipe.chain(p) for p in paths]

    def extend(done, order):
        open_ = [u for u, c in enumerate(chains) if done[u] < len(c)]
        for u in open_:
            rank = chains[u][done[u]]
            extend(done[:u] + (done[u] + 1,) + done[u + 1:], order[:rank] + (order[rank] + ((u, done[u]),),) + order[rank + 1:])
        if not open_:
            found.add(order)
    extend((0,) * len(paths), ((),) * nodes)
    return found


def valid_combinations(network, kept, origins, caps):
    """All choices of paths that keep to CC1, CC2, CC3 and TC1."""
    for paths in itertools.product(*(list(every_path(network, kept, o)) for o in origins)):
        used = [r for p in paths for r in p[1:]]
        visits = [sum(r in stage for r in used) for stage in network.stages[1:]]
        if max(visits) - min(visits) <= 1 and all(used.count(r) <= caps[r] for r in used):
            yield paths


@pytest.mark.parametrize("method", PUBLISHED_ROUTES)
def test_published_times(method):
    rounds, seconds, paths = PUBLISHED_ROUTES[method]
    network, names = skippipe.published_network()
    result = skippipe.simulate(network, paths, rounds=rounds)
    assert result.makespan == pytest.approx(seconds, abs=1e-3)
    assert_possible(network, paths, rounds, result)
    again = skippipe.simulate(network, paths, rounds=rounds, order=result.order())
    assert again.timeline == result.timeline
    assert names[10] == "London" and 132 < network.delay[6][10] < 133 and skippipe.published_network(corrected=True)[0].delay[6][10] < 1


def test_published_plan_is_proven_optimal():
    network, _ = skippipe.published_network()
    found = skippipe.plan(network, 4, 3, rounds=2, seconds=None, iterations=20000)
    assert found.makespan == pytest.approx(33.0538, abs=1e-3) and found.bound == pytest.approx(found.makespan, abs=1e-5)
    assert skippipe.check(network, found.paths, 4) == []
    paths, order = found
    result = skippipe.simulate(network, paths, rounds=2, order=order)
    assert result.makespan == found.makespan
    assert_possible(network, paths, 2, result)
    # Six paths of its own per origin, so that the second round may differ from the first, are bounded by the same time.
    assert skippipe.lower_bound(network, 4, 6, rounds=1) == pytest.approx(33.0538, abs=1e-3)


def test_conflict_based_search_alone_finds_valid_paths():
    network, _ = skippipe.published_network()
    found = skippipe.plan(network, 4, 3, rounds=2, seconds=None, collisions=False)
    assert skippipe.check(network, found.paths, 4) == [] and found.work < 1000 and found.makespan < 40


def test_plan_against_brute_force():
    draw, missed = random.Random("brute force"), 0
    for case in range(40):
        shape, kept, each = draw.choice([([1, 2, 1], 2, 2), ([2, 1, 2], 2, 1), ([2, 1, 1], 3, 1), ([1, 2, 2], 2, 2), ([1, 1, 1], 2, 2)])
        network = random_network(draw, shape, (0.5, 1.0, 2.0))
        origins, best = network.stages[0] * each, float("inf")
        caps = skippipe.node_caps(network, -(-len(origins) * (kept - 1) // (len(shape) - 1)))
        for paths in valid_combinations(network, kept, origins, caps):
            for order in every_order(paths, len(network.compute)):
                try:
                    best = min(best, skippipe.simulate(network, paths, order=order).makespan)
                except skippipe.Deadlock:
                    pass
        found = skippipe.plan(network, kept, each, seconds=None, iterations=3000)
        assert skippipe.lower_bound(network, kept, each) <= best + 1e-6
        assert skippipe.check(network, found.paths, kept) == [] and found.makespan >= best - 1e-6
        missed += found.makespan > best + 1e-6
        assert found.makespan <= 1.1 * best, case
    assert missed <= 1      # found on all but at most one: the search is complete for validity, not for optimality


def test_a_valid_plan_is_found_exactly_where_there_is_one():
    draw, none = random.Random("feasible"), 0
    for _ in range(150):
        shape, kept = draw.choice([([1, 2, 1, 1], 3), ([2, 1, 1, 2], 2), ([1, 1, 2], 2), ([2, 2, 1], 3), ([1, 1, 1, 1], 4)])
        network = random_network(draw, shape)
        quota = [draw.choice([0, 1, 1, 2, 3]) for _ in network.compute]
        origins = network.stages[0] * draw.choice([1, 2]) if len(network.stages[0]) == 1 else network.stages[0]
        possible = next(valid_combinations(network, kept, origins, quota), None)
        try:
            found = skippipe.plan(network, kept, len(origins) // len(network.stages[0]), seconds=None, iterations=30, quota=quota)
            assert possible and skippipe.check(network, found.paths, kept, quota=quota) == []
        except skippipe.Infeasible as error:
            assert possible is None and "cannot be met" in str(error)
            none += 1
    assert 10 < none < 140


def test_random_instances_keep_the_invariants():
    draw = random.Random("invariants")
    for case in range(200):
        shape = [draw.randint(1, 3) for _ in range(draw.randint(1, 5))]
        network = random_network(draw, shape, (1.0,) if case % 2 else (0.3, 1.0, 3.0))
        kept, each, rounds, swaps = draw.randint(1, len(shape)), draw.randint(1, 4), draw.randint(1, 2), draw.randint(0, 2)
        dead = {draw.randrange(sum(shape))} if case % 3 == 0 else set()
        quota = 100 if case % 5 == 0 else None      # so much that memory, not the caps, decides: first come, first served may deadlock
        try:
            found = skippipe.plan(network, kept, each, rounds, swaps, None, case, iterations=60, dead=dead, quota=quota)
        except skippipe.Infeasible:
            assert dead
            continue
        assert skippipe.check(network, found.paths, kept, swaps, dead, quota) == []
        assert not dead & {r for p in found.paths for r in p}
        result = skippipe.simulate(network, found.paths, rounds=rounds, order=found.order)
        assert result.makespan == found.makespan >= found.bound - 1e-6
        assert_possible(network, found.paths, rounds, result)
        paths = skippipe.random_valid_paths(network, kept, each, swaps, case, dead, quota)
        assert skippipe.check(network, paths, kept, swaps, dead, quota) == []


def test_a_plan_depends_on_seed_and_work_alone():
    network = random_network(random.Random(3), [3, 2, 2, 2], memory=(3,))
    first, again, other = (skippipe.plan(network, 3, 3, seconds=None, iterations=900, seed=seed) for seed in (1, 1, 2))
    assert (first.paths, first.order, first.makespan, first.work) == (again.paths, again.order, again.makespan, again.work)
    assert (first.paths, first.order) != (other.paths, other.order)
    longer = skippipe.plan(network, 3, 3, seconds=None, iterations=3000, seed=1)
    assert longer.makespan <= first.makespan


def test_check_names_microbatch_stage_and_node():
    network, _ = skippipe.published_network()
    paths = sorted(PUBLISHED_ROUTES["SkipPipe"][2])
    for path, words in [((15, 14, 6, 12), "CC1: microbatch 2 has node 15 of stage 1"),
                        ((0, 14, 3, 12), "CC1: microbatch 2 has node 3 of stage 0"),
                        ((0, 6, 18, 14), "CC2: microbatch 2 goes from stage 4 (node 18) to stage 1 (node 14)"),
                        ((0, 12, 6, 14), "CC2: microbatch 2 goes from stage 2 (node 6) to stage 1 (node 14)"),
                        ((0, 14, 6, 16), "TC1: node 16 (stage 3) carries 4 microbatches, [2, 12, 13, 14], of at most 3"), ((0, 14, 6, 2), "CC3: stage 5"),
                        ((0, 14, 6), "microbatch 2 visits 3 stages, not 4"), ((0, 14, 6, 77), "microbatch 2 visits node 77")]:
        assert any(words in line for line in skippipe.check(network, [*paths[:2], path, *paths[3:]], 4)), words
    assert skippipe.check(network, paths, 4) == []
    assert any("node 5 of stage 4, which is not there" in line for line in skippipe.check(network, paths, 4, dead={5}))
    result = skippipe.simulate(network, paths, rounds=2)
    waits = list(skippipe.tc2(network, paths, result))
    assert "s at node" in waits[0].text and sum(v.excess for v in waits) == pytest.approx(sum(result.waiting), abs=1e-6)


def test_dead_nodes_and_what_cannot_be_met():
    network, _ = skippipe.published_network()
    found = skippipe.plan(network, 4, 3, 2, seconds=None, iterations=50, dead={5, 8, 11})
    assert len(found.paths) == 12 and skippipe.check(network, found.paths, 4, dead={5, 8, 11}) == []
    whole_stage = skippipe.plan(network, 4, 3, 2, seconds=None, iterations=50, dead={15, 8, 14})
    assert skippipe.check(network, whole_stage.paths, 4, dead={15, 8, 14}) == []
    three_stages = [r for stage in network.stages[1:4] for r in stage]
    for constraint, options in {"CC1": dict(dead=network.stages[0]), "CC3": dict(dead=three_stages), "TC1": dict(quota=2)}.items():
        with pytest.raises(skippipe.Infeasible, match=constraint):
            skippipe.plan(network, 4, 3, 2, seconds=None, iterations=50, **options)
    for wrong in (dict(stages_kept=7), dict(stages_kept=4, microbatches_per_origin=0), dict(stages_kept=4, quota=[1])):
        with pytest.raises(ValueError):
            skippipe.plan(network, **wrong)


def test_a_slow_node_gets_less_work():
    compute = [1.0] * 8
    compute[3] = 5.0
    network = skippipe.Network([[0.2] * 8] * 8, compute, [[0, 1], [2, 3, 4], [5, 6, 7]], memory=3)
    found = skippipe.plan(network, 3, 3, seconds=None, iterations=3000)
    visits = [sum(r in p for p in found.paths) for r in (2, 3, 4)]
    assert visits[1] < min(visits[0], visits[2]) and sum(visits) == 6
    one_each = [(0, 2, 5), (1, 3, 6), (0, 4, 7), (1, 2, 5), (0, 3, 6), (1, 4, 7)]
    assert found.makespan < skippipe.simulate(network, one_each).makespan


def test_planned_order_beats_waiting_in_line_and_deadlocks_are_refused():
    network, _ = skippipe.published_network()
    paths = PUBLISHED_ROUTES["SkipPipe"][2]
    order = skippipe.simulate(network, paths, rounds=2).order()
    order[8].reverse()
    with pytest.raises(skippipe.Deadlock):
        skippipe.simulate(network, paths, rounds=2, order=order)
    assert skippipe.Search(network, 4, 3, 2).simulate(paths, order) is None


def test_assigned_stages_are_at_least_as_good_as_the_published():
    published, names = skippipe.published_network()
    stages = skippipe.assign_stages(published.delay, published.compute, [5, 3, 3, 3, 3, 3], 4, 3, 2, overhead=0.13, origin_overhead=0.09,
                                    seconds=None, iterations=250)
    assert [len(s) for s in stages] == [5, 3, 3, 3, 3, 3] and sorted(r for s in stages for r in s) == list(range(20))
    network = skippipe.Network(published.delay, published.compute, stages, 3, 0.13, 0.09)
    ours, theirs = (skippipe.plan(n, 4, 3, 2, seconds=None, iterations=600).makespan for n in (network, published))
    assert ours <= theirs
    with pytest.raises(ValueError):
        skippipe.assign_stages(published.delay, published.compute, [5, 3], 2)


def test_skippipe_command_line(tmp_path, capsys):
    delay = [[0.0 if i == j else 0.5 for j in range(4)] for i in range(4)]
    (tmp_path / "mine.json").write_text(json.dumps(dict(delay=delay, compute=0.1, stages=[[0, 1], [2], [3]])))
    skippipe.main(["--instance", str(tmp_path / "mine.json"), "--kept", "2", "--figure", "", "--results", str(tmp_path / "r.json"),
                   "--save", str(tmp_path / "again.json"), "--seconds", "0.5"])
    assert "SkipPipe without TC2" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "r.json").read_text())["paths"]) == 6
    assert json.loads((tmp_path / "again.json").read_text())["stages"] == [[0, 1], [2], [3]]
    with open(tmp_path / "links.csv", "w", newline="") as file:
        csv.writer(file).writerows([["a", "b", "latency_ms", "bandwidth_gib_s"], ["X", "Y", 10, 0.1]])
    skippipe.main(["--links", str(tmp_path / "links.csv"), "--sizes", "2,1,1", "--kept", "2", "--figure", "", "--results", "", "--seconds",
                   "0.2"])
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "odd.json").write_text(json.dumps(dict(delay=[[0, "x"], [1, 0]], compute=1, stages=[[0], [1]])))
    capsys.readouterr()
    for wrong in (["--kept", "9"], ["--kept", "x"], ["--dead", "99"], ["--nodes", "7"], ["--sizes", "3,x"], ["--instance", "nowhere.json"],
                  ["--instance", str(tmp_path / "broken.json")], ["--instance", str(tmp_path / "odd.json")], ["--nonsense"],
                  ["--links", str(tmp_path / "broken.json")], ["--compute", "-1"], ["--memory", "0"], ["--dead", "0,3,4,10,11"],
                  ["--seconds", "-1"], ["--rounds", "0"], ["--nodes", "-3"]):
        with pytest.raises(SystemExit) as stop:
            skippipe.main([*wrong, "--figure", "", "--results", ""])
        error = capsys.readouterr().err
        assert stop.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1, (wrong, error)


# ---------------------------------------------------------------- bench_sync.py


def test_all_reduce_seconds_by_hand():
    whole = [[0, 9, 2], [9, 0, 3], [2, 3, 0]]
    part = lambda by: [[x / by for x in row] for row in whole]
    assert bench_sync.all_reduce_seconds([0, 1, 2], whole, part(3)) == 6        # two rounds of 9 / 3; a ring: four of 3
    assert bench_sync.all_reduce_seconds([0, 1, 2], whole, part(1.5)) == 9      # mostly latency: whole vectors, once
    assert bench_sync.all_reduce_seconds([0, 2], whole, part(2)) == 2
    slow = [[400 if {i, j} == {0, 2} else 4 for j in range(4)] for i in range(4)]
    assert bench_sync.all_reduce_seconds([0, 1, 2, 3], slow, [[x / 4 for x in row] for row in slow]) == 6       # the ring goes round the slow link


def test_hours_to_a_loss_on_straight_lines():
    found = dict(seconds={"x": (36.0, 360.0), "DDP, full pipeline": (36.0, 72.0)})
    run = dict(command="train.py --inner-steps 10", curves=dict(step=[10, 20, 30], heldout_loss=[3.0, 2.0, 1.0], weight_spread=[0.1, 0.2, 0.3], lr=[1, 2, 3]))
    assert bench_sync.clock(found, "x", run) == pytest.approx([0.2, 0.4, 0.6])
    assert bench_sync.clock(found, "x", run | dict(command="train.py --inner-steps 10 --warm-start 10")) == pytest.approx([0.3, 0.5, 0.7])
    assert bench_sync.clock(found, "x", run | dict(command="train.py --inner-steps 10 --warm-start 15")) == pytest.approx([0.3, 0.6, 0.8])
    assert bench_sync.reaches(found, "x", run, 1.5) == pytest.approx(0.5) and bench_sync.reaches(found, "x", run, 0.9) is None


def test_losing_drops_what_visits_the_victim(corpus, tmp_path):
    """In every iteration one of the two replicas of stage 1 dies, and half of the 4 microbatches with it."""
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(HERE / "bench_sync.py"), "--losing", "1",
                           "--stages", "2,2", "--steps", "5", "--data", str(corpus), "--name", "x", *SMALL], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    row = metrics(tmp_path / "runs/x")[-1]
    assert row["lost_microbatches"] == 5 * 2 and math.isfinite(row["heldout_loss"])


@pytest.mark.parametrize("spread", [0, 0.5, 1, 2.5])
def test_simulated_pair_equals_its_closed_form(spread):
    sample = bench_sync.reductions(1024, spread, 1.0, 0.0, torch.Generator().manual_seed(1))["pair, two exchanges (paper)"]
    value, error = bench_sync.estimate(sample, 0.001)
    assert abs(value - bench_sync.pair_closed_form(spread)) <= 4 * error


def test_simulated_messages_have_the_asked_mean_and_deviation():
    t = bench_sync.messages((1 << 20,), 0.8, torch.Generator().manual_seed(0)).double()
    assert abs(float(t.mean()) - 1) < 0.005 and abs(float(t.std()) - 0.8) < 0.02


@pytest.mark.parametrize("k", range(1, 13))
def test_trees_without_spread_cost_2_k_exactly(k):
    generator, n = torch.Generator(), 2**k
    up, down = (bench_sync.messages((2 * n, 3), 0, generator) for _ in range(2))
    assert bench_sync.tree_all_reduce(up, down).tolist() == [2 * k] * 3


def by_hand_tree(n, up, down):
    """The same tree by recursion."""
    arrive = lambda j: up[j] + (0 if j >= n else max(arrive(2 * j), arrive(2 * j + 1)))
    leave = lambda j, now: now + down[j] if j >= n else max(leave(c, now + down[j]) for c in (2 * j, 2 * j + 1))
    top = max(arrive(2), arrive(3))
    return max(leave(2, top), leave(3, top))


@pytest.mark.parametrize("n", [2, 3, 5, 8, 13, 32])
def test_simulated_tree_equals_recursion(n):
    up, down = (bench_sync.messages((2 * n, 4), 1.5, torch.Generator().manual_seed(n + s)).double() for s in range(2))
    got = bench_sync.tree_all_reduce(up, down).tolist()
    assert got == pytest.approx([by_hand_tree(n, up[:, i].tolist(), down[:, i].tolist()) for i in range(4)])
    if n == 2:
        assert got == pytest.approx(bench_sync.pair_average(torch.stack([up[2:], down[2:]])).tolist())


@pytest.mark.parametrize("n", [4, 64])
def test_all_reduces_without_spread_equal_their_formulas(n):
    latency, seconds, k = 0.5, 3.0, int(math.log2(n))
    got = {name: float(sample()[0]) for name, sample in bench_sync.reductions(n, 0, latency, seconds, torch.Generator()).items()}
    assert got == pytest.approx({
        "tree": 2 * k * (latency + seconds), "ring": 2 * (n - 1) * (latency + seconds / n), "butterfly": k * (latency + seconds),
        "halving and doubling": 2 * k * latency + 2 * (n - 1) / n * seconds,
        "pair, two exchanges (paper)": 2 * (latency + seconds), "NoLoCo here, one exchange": latency + seconds}, rel=1e-5)
    paper = bench_sync.on_paper(seconds * 1e6 / 32, n, 1.0, latency, 1.0)       # so many parameters take `seconds` at 1 Mbit/s
    assert paper["DiLoCo"]["seconds"] == pytest.approx(got["halving and doubling"]) and paper["NoLoCo"]["seconds"] == pytest.approx(latency + seconds)


def test_training_times_of_two_replicas_are_equal_and_more_replicas_gain():
    two = bench_sync.training(2, (1, 3), (5, 10), 4, torch.Generator().manual_seed(0))
    assert torch.allclose(two["DiLoCo"], two["NoLoCo"]) and torch.allclose(two["DiLoCo"], two["alone"])
    many = bench_sync.training(64, (1, 3), (5, 10), 4, torch.Generator().manual_seed(0))
    assert bool((many["DiLoCo"] > many["NoLoCo"]).all() and (many["NoLoCo"] > many["alone"]).all())     # a pair's delay goes on to its next partners


def test_a_late_replica_delays_everyone_at_once_or_by_doubling():
    lost = bench_sync.late_replica(torch.Generator().manual_seed(0), n=64, outer_steps=16, trials=2)["for 4 (or is dead, given up after 4)"]
    at_once, by_doubling = ([mean for mean, _ in lost[m]] for m in ("DiLoCo", "NoLoCo"))
    assert at_once[3] == by_doubling[3] == 0 and at_once[4] > 3
    for k in range(5):          # after its first meeting at most 2 of 64 are late, then 4, ...
        assert 0 < by_doubling[4 + k] <= 4.6 * 2 ** (k + 1) / 64
    assert max(by_doubling) < 4


def test_on_paper_by_hand():
    rows = bench_sync.on_paper(6.8e9, 1024, 100, 0.05, 1.0)
    assert rows["NoLoCo"]["bytes"] == 27.2e9 and rows["NoLoCo"]["seconds"] == pytest.approx(0.05 + 27.2e9 / 12.5e6)
    assert rows["DiLoCo"]["bytes"] == pytest.approx(2 * 1023 / 1024 * 27.2e9) and rows["DiLoCo"]["seconds"] == pytest.approx(20 * 0.05 + 4347.75, rel=1e-5)
    assert rows["DDP"]["share"] == pytest.approx(4348.75 / 4349.75) and rows["NoLoCo"]["memory"] == 28 * 6.8e9


def _bench(rank, world, argv, patch=None):
    """bench_sync.main in this process: (exit status, what it printed, what `patch` returned)."""
    out, code, seen = io.StringIO(), 0, patch() if patch else None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            bench_sync.main(argv)
        except SystemExit as stop:
            code = stop.code
    return code, out.getvalue(), seen


def count_messages():
    """Bytes of every message that NoLoCo sends in this process, in order."""
    sent, post = [], noloco.dist.batch_isend_irecv
    def counted(ops):
        sent.append(sum(op.tensor.nbytes for op in ops if op.op is dist.isend))
        return post(ops)
    noloco.dist.batch_isend_irecv = counted
    return sent


def test_measured_bytes_equal_the_counted_bytes(tmp_path):
    results = processes(2, _bench, ["--params", "100001", "--trials", "2", "--device", "cpu", "--out", str(tmp_path)], count_messages)
    assert [code for code, *_ in results] == [0, 0], results
    found = json.loads((tmp_path / "results" / "sync_measured_2.json").read_text())
    theta, rows = found["bytes_of_theta"], found["rows"]
    assert 4 * 100001 <= theta < 4 * 100001 + 64 * 32       # 32 tensors, each padded to 64 bytes
    expect = {"exchange of theta": (theta, 0), "exchange of theta and phi": (2 * theta, 0), "exchange of Delta in bf16": (theta // 2, 0),
              "all-reduce of theta": (theta, 0), "DDP: gradient": (theta, 0), "DiLoCo": (theta, 0), "NoLoCo": (theta, 0),
              "NoLoCo, gamma != beta, phi ahead": (theta, theta), "NoLoCo, gamma != beta, phi not ahead": (2 * theta, 0),
              "NoLoCo, Delta in bf16, phi ahead": (theta // 2, theta), "memcpy of theta": (0, 0)}
    assert {name: (row["bytes"], row["bytes_ahead"]) for name, row in rows.items()} == expect
    for _, _, sent in results:      # one round of every row that sends messages, in the order of the table, 1 + 2 times
        assert sent == 3 * [theta, theta, theta, theta // 2, theta, theta, theta, theta, theta, theta, theta // 2]
    assert all(len(row["seconds"]) == 2 and min(row["seconds"]) > 0 for row in rows.values())
    for name, row in rows.items():
        assert f"{name} " in results[0][1] and f"{row['bytes'] / 1e6:9.1f}" in results[0][1]


def _half_wire(rank, world):
    dist.init_process_group("gloo")
    weights = []
    for kind in (noloco.NoLoCo, bench_sync.HalfWire):
        torch.manual_seed(0)
        parameter = torch.nn.Parameter(torch.randn(1000))
        outer = kind([parameter], inner_steps=2, gamma=0.9)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(6):
            with torch.no_grad():
                parameter.add_(0.01 * torch.randn(1000, generator=generator))
            outer.step()
        weights.append(parameter.detach().clone())
    dist.barrier()
    return float((weights[0] - weights[1]).abs().max())


def test_half_wire_nearly_equals_noloco():
    assert all(0 < difference < 1e-3 for difference in processes(2, _half_wire))


def virtual_time():
    """bench_sync's clock stands still but where it waits: what it measures is then exactly what its messages add up to."""
    clock, barrier = [0.0], dist.barrier
    def wait(moment):
        clock[0] = max(clock[0], moment)
    def meet():
        now = torch.tensor(clock[0], dtype=torch.float64)
        dist.all_reduce(now, op=dist.ReduceOp.MAX)
        clock[0] = float(now)
        barrier()
    bench_sync.time = types.SimpleNamespace(perf_counter=lambda: clock[0])
    bench_sync.sleep_until, bench_sync.dist.barrier = wait, meet


@pytest.mark.parametrize("world", [2, 4, 6])
def test_emulated_links_equal_the_simulation_of_the_same_draws(world, tmp_path):
    argv = ["--latency-ms", "30", "--latency-std", "1.5", "--mbit", "10", "--params", "2000", "--trials", "4", "--out", str(tmp_path)]
    results = processes(world, _bench, argv, virtual_time)
    assert [code for code, *_ in results] == [0] * world, results
    found = json.loads((tmp_path / "results" / f"sync_emulated_{world}.json").read_text())
    for kind in ("tree", "pair"):
        assert found["measured"][kind] == pytest.approx(found["simulated"][kind], rel=1e-9) and len(set(found["measured"][kind])) == 4
    assert min(found["simulated"]["pair"]) > 2 * 8000 / 1.25e6       # two exchanges of 8000 bytes at 1.25 MB/s


def test_a_message_waits_until_it_is_due(monkeypatch):
    monkeypatch.setattr(bench_sync, "time", time)
    wire = bench_sync.Wire(0)
    sent = wire.send(torch.arange(3.0, dtype=torch.float64), 0, 7)
    assert wire.receive(7, 0.05).tolist() == [0, 1, 2] and time.perf_counter() >= sent + 0.05


@pytest.mark.parametrize("world, argv, error", [
    (1, [], "nothing to do"),
    (1, ["--model", "huge"], "huge"),
    (1, ["--model", "large", "--replicas", "1"], "--replicas"),
    (1, ["--model", "large", "--mbit", "0"], "--mbit"),
    (1, ["--simulate", "--latency-std", "-1"], "--latency-std"),
    (1, ["--plot", "--out", "nowhere"], "sync_simulated.json"),
    (2, ["--simulate"], "no torchrun"),
    (2, ["--trials", "0"], "--trials"),
    (2, ["--params", "nan"], "--params"),
    (2, ["--latency-ms", "5", "--mbit", "1", "2"], "--mbit"),
    (2, ["--latency-ms", "5", "--backend", "nccl"], "--backend"),
    (3, ["--latency-ms", "5"], "even number"),
])
def test_bad_bench_options_get_one_clear_line(world, argv, error, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    if world > 1:
        monkeypatch.setenv("WORLD_SIZE", str(world))
        with pytest.raises(bench_sync.BadInput) as problem:
            bench_sync.parse(argv)
        lines = [str(problem.value)]
    else:
        with pytest.raises(SystemExit) as stop:
            bench_sync.main(argv)
        assert stop.value.code == 2
        lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "\n" not in lines[0] and error in lines[0]


def test_bad_bench_options_under_several_processes_are_printed_by_rank_0_alone(tmp_path):
    (code, out, _), (other, silence, _) = processes(2, _bench, ["--trials", "-3", "--device", "cpu"], cwd=tmp_path)
    assert (code, other, silence) == (2, 2, "") and out.startswith("error: ") and out.count("\n") == 1 and "--trials" in out


def test_pictures_without_matplotlib_name_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(bench_sync.BadInput, match=r"\[plot\]"):
        bench_sync.draw(types.SimpleNamespace(out=str(tmp_path)), "measured")


def test_paper_table_launch_line():
    line = [sys.executable, str(HERE / "bench_sync.py"), "--model", "large", "--replicas", "1024", "--mbit", "100", "--latency-ms", "50"]
    out = subprocess.run(line, capture_output=True, text=True, timeout=60, env={**os.environ, "WORLD_SIZE": "1"})
    assert out.returncode == 0 and "| large, 6800M | 1024 | 100 | 54.35 / 54.35 / 27.20 |" in out.stdout, out.stderr


def test_readme_planner_example_prints_what_it_says():
    """Every number that the example's comments promise."""
    block = next(b for b in re.findall(r"```python\n(.*?)```", (HERE / "README.md").read_text(), re.S) if "skippipe.plan(" in b)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(block, {})
    promised = [line.split("# ")[1] for line in block.splitlines() if "print(" in line]
    lines = out.getvalue().splitlines()
    assert len(lines) == len(promised) == 5 and lines[2] == "[]"
    for line, words in zip(lines, promised):
        assert all(number in line for number in re.findall(r"\d+\.\d+", words)), (line, words)
