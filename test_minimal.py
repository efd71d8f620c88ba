"""Each numbered equation of the two papers, and each claim of this code, against its oracle.

Under a minute:

    python -m pytest -q test_minimal.py

`make test` runs these and tests/, which has a file for each part of the code.
"""

import contextlib
import functools
import io
import itertools
import multiprocessing
import os
import random
import socket
import traceback
from collections import Counter, deque
from itertools import accumulate, pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import bench_sync
import noloco
import skippipe
import train
from model import Config, Llama, count_parameters, rotary
from noloco import DiLoCo, NoLoCo, flatten, outer_update, random_groups
from skippipe import Deadlock, Network, chain, full_paths, random_paths, simulate

SMALL = ["--hidden", "32", "--layers", "4", "--heads", "2", "--mlp", "64", "--seq-len", "32",
         "--batch", "2", "--eval-sequences", "8"]
SMALL_CONFIG = Config(256, 32, 64, 4, 2, 2)     # that of a run with these options


def gloo(function):
    """Decorates a rank's function: the process group is up while it runs."""
    @functools.wraps(function)
    def wrapped(rank, world, *args):
        dist.init_process_group("gloo")
        result = function(rank, world, *args)
        dist.barrier()
        return result

    return wrapped


# ---------------- NoLoCo: N1 to N3, the draw, the exchange, DiLoCo


@pytest.mark.parametrize("count, size", [
    (1, 2), (2, 2), (3, 2), (7, 2), (8, 3), (9, 4), (5, 9), (64, 2),
])
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
    expected = draws * 3 / 15  # each of the 15 pairs is in a fifth of the partitions
    chi2 = sum((pairs[a, b] - expected) ** 2 / expected for b in range(6) for a in range(b))
    assert chi2 < 36.1  # 14 degrees of freedom, p = 0.001
    equal = 0
    for step in range(300):
        first_stage = random_groups(range(6), 2, step, 0)
        moved = [(a + 6, b + 6) for a, b in first_stage]
        if random_groups(range(6, 12), 2, step, 0) == moved:
            equal += 1
    assert equal < 60  # another stage draws independently: equal by chance in 1 of 15


def brute_force(thetas, phis, deltas, alpha, beta, gamma):
    """N1 to N3 for one group in float64, literally."""
    n = len(phis)
    mean_Delta = sum(t - p for t, p in zip(thetas, phis)) / n
    mean_phi = sum(phis) / n
    deltas = [alpha * d + beta * mean_Delta - gamma * (p - mean_phi) for d, p in zip(deltas, phis)]
    return [p + d for p, d in zip(phis, deltas)], deltas


@pytest.mark.parametrize("n", [2, 3, 16])
def test_outer_update_is_n1_to_n3_and_where_gamma_is_beta_n2_prime(n):
    """In float64, of one group. (N2'): with gamma = beta it suffices to send theta."""
    draw = random.Random(n)
    for _ in range(20):
        alpha, beta, gamma = draw.random(), 2 * draw.random(), 2 * draw.random()
        thetas, phis, deltas = torch.randn(3, n, 16, dtype=torch.float64)
        mean_theta = thetas.mean(0)
        for pull, mean_phi in ((gamma, phis.mean(0)), (beta, None)):
            want_phis, want_deltas = brute_force(thetas, phis, deltas, alpha, beta, pull)
            for i in range(n):
                phi, delta = phis[i].clone(), deltas[i].clone()
                others = phi if mean_phi is None else mean_phi
                outer_update(phi, delta, mean_theta, others, alpha, beta, pull)
                assert torch.allclose(delta, want_deltas[i], rtol=0, atol=1e-14)
                assert torch.allclose(phi, want_phis[i], rtol=0, atol=1e-14)
                if mean_phi is None:
                    n2_prime = alpha * deltas[i] + beta * (mean_theta - phis[i])
                    assert torch.allclose(delta, n2_prime, rtol=0, atol=1e-14)


@pytest.mark.parametrize("n", [1, 2, 3, 8])
@pytest.mark.parametrize("gamma", [0.7, 0.0, 1.1])
def test_outer_step_equals_float64_brute_force(n, gamma):
    torch.manual_seed(n)
    size = (3 << 17) + 5  # several pieces, the last one odd
    phis = torch.randn(n, size, dtype=torch.float64).float()
    thetas = torch.randn(n, size, dtype=torch.float64).float()
    deltas = torch.randn(n, size, dtype=torch.float64).float()
    want_phi, want_delta = brute_force(
        thetas.double(), phis.double(), deltas.double(), 0.5, 0.7, gamma)
    padded = [torch.nn.functional.pad(v, (0, -size % 16)) for v in [*thetas, *phis]]
    for i in range(n):
        parameter = torch.nn.Parameter(thetas[i].clone())
        outer = NoLoCo([parameter], gamma=gamma)
        outer.phi[:size] = phis[i]
        outer.delta[:size] = deltas[i]
        came = padded[n:] if gamma != 0.7 else []
        outer.outer_step(outer.theta, padded[:n], came)
        found = outer.phi[:size], outer.delta[:size], parameter
        for got, want in zip(found, (want_phi[i], want_delta[i], want_phi[i])):
            assert torch.allclose(got.double(), want, rtol=0, atol=4e-6)


def no_collectives():
    """From here on a collective in this process is an error."""

    def refuse(*_, **__):
        raise AssertionError("a collective in NoLoCo's training path")

    for name in ("all_reduce", "all_gather", "broadcast", "reduce", "barrier",
                 "all_gather_object", "broadcast_object_list"):
        setattr(noloco.dist, name, refuse)


def small_model(rank, seed=0):
    """One with odd sizes, and this replica's own data."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
    generator = torch.Generator().manual_seed(100 + rank)
    xs = torch.randn(64, 8, 3, generator=generator)
    ys = torch.randn(64, 8, 2, generator=generator)
    return model, xs, ys


def inner(model, optimizer, x, y):
    optimizer.zero_grad()
    (model(x) - y).square().mean().backward()
    optimizer.step()


@gloo
def _noloco(rank, world, kind, kwargs, steps, still=()):
    """still: the inner steps without a gradient."""
    model, xs, ys = small_model(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    outer = kind(model.parameters(), **kwargs)
    barrier = dist.barrier                              # the harness's own, put back below
    outers = getattr(outer, "outers", [outer])          # Fragments has several
    inmost = getattr(outers[0], "outer", outers[0])     # Delayed and PhiAhead are around one
    if not isinstance(inmost, DiLoCo):
        no_collectives()
    for step in range(steps):
        if step not in still:
            inner(model, optimizer, xs[step], ys[step])
        outer.step()
    dist.barrier = barrier
    outer.settle()
    return [p.detach().numpy() for p in model.parameters()], outer.bytes_sent


def simulated(world, steps, m, n, gamma=0.7, seen=lambda theta, phi, own: theta, alpha=0.5,
              beta=0.7, delay=0):
    """Every replica's tensors at the end, in float64.

    seen: what a replica reads of a partner's theta. delay: inner steps from a departure to its
    merge, where theta becomes phi plus what was learnt since (gossip/delay.py).
    """
    models = [small_model(r) for r in range(world)]
    replicas = [list(model.double().parameters()) for model, *_ in models]
    optimizers = [torch.optim.SGD(tensors, lr=0.05) for tensors in replicas]
    phis = copies(replicas)
    deltas = copies(replicas)
    for delta in itertools.chain(*deltas):
        delta.zero_()
    after = []                      # every replica's tensors after each inner step
    for step in range(steps):
        for optimizer, (model, xs, ys) in zip(optimizers, models):
            inner(model, optimizer, xs[step].double(), ys[step].double())
        left = step - delay         # when what would merge now has left
        if left >= 0 and (left + 1) % m == 0:
            thetas = after[left] if delay else copies(replicas)
            for group in random_groups(range(world), n, left // m, 0):
                merge(group, replicas, thetas, phis, deltas, seen, alpha, beta, gamma)
        after.append(copies(replicas))
    return after[-1]


def copies(replicas):
    """Of every replica's tensors."""
    return [clones(tensors) for tensors in replicas]


def clones(tensors):
    return [p.detach().clone() for p in tensors]


def merge(group, replicas, thetas, phis, deltas, seen, alpha, beta, gamma):
    """The outer step of one group: phi, delta and the replicas' tensors change in place."""
    before = {o: (list(phis[o]), list(deltas[o])) for o in group}
    for r, i in itertools.product(group, range(len(replicas[0]))):
        read = []                   # what replica r has of each member's theta
        for o in group:
            theta = thetas[o][i]
            read.append(theta if o == r else seen(theta, before[o][0][i], thetas[r][i]))
        group_phis = [before[o][0][i] for o in group]
        group_deltas = [before[o][1][i] for o in group]
        new_phis, new_deltas = brute_force(read, group_phis, group_deltas, alpha, beta, gamma)
        own = group.index(r)
        phis[r][i] = new_phis[own]
        deltas[r][i] = new_deltas[own]
        replicas[r][i].data.add_(phis[r][i] - thetas[r][i])


def assert_replicas(found, want, atol=2e-6):
    """The tensors that processes return are those of a simulation."""
    for (tensors, _), wanted in zip(found, want, strict=True):
        for got, tensor in zip(tensors, wanted, strict=True):
            assert torch.allclose(torch.from_numpy(got).double(), tensor, rtol=0, atol=atol)


@pytest.mark.parametrize("n, gamma", [(2, 0.7), (2, 1.0), (4, 0.7)])
def test_processes_equal_float64_simulation(n, gamma):
    world, steps, m = 4, 12, 3
    found = processes(world, _noloco, NoLoCo, dict(inner_steps=m, group_size=n, gamma=gamma), steps)
    want = simulated(world, steps, m, n, gamma)
    assert_replicas(found, want)
    if n == 2 and gamma == 0.7:  # theta only: one message of the padded vector each outer step
        padded = sum(-(-p.numel() // 16) * 16 for p in want[0])
        assert [sent for _, sent in found] == [4 * padded * steps // m] * world


@gloo
def _everyone(rank, world, method, kwargs):
    model, xs, ys = small_model(rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    outer = method(model.parameters(), inner_steps=2, alpha=0.3, **kwargs)
    for step in range(8):
        inner(model, optimizer, xs[step], ys[step])
        outer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def test_a_group_of_everyone_equals_diloco():
    gossip = processes(3, _everyone, NoLoCo, dict(group_size=3, gamma=1.2))
    allreduce = processes(3, _everyone, DiLoCo, {})
    # to the bit
    assert gossip[0] == gossip[1] == gossip[2] and allreduce[0] == allreduce[1] == allreduce[2]
    assert torch.allclose(torch.tensor(gossip[0]), torch.tensor(allreduce[0]), rtol=0, atol=1e-6)


@gloo
def _state_dict(rank, world, kind):
    """Interrupt after 5 of 12 steps, rebuild all from the state dicts, go on: as if nothing had
    happened."""
    results = []
    for stop in (None, 5):
        model, xs, ys = small_model(rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        outer = kind(model.parameters(), inner_steps=3, gamma=1.0)
        for step in range(12):
            if step == stop:
                kept = io.BytesIO()
                torch.save([model.state_dict(), outer.state_dict()], kept)
                outer.settle()  # phi is on its way to the partners of the next outer step
                kept.seek(0)
                weights, state = torch.load(kept, weights_only=True)
                model, *_ = small_model(rank, seed=9)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
                outer = kind(model.parameters(), inner_steps=3, gamma=1.0)
                model.load_state_dict(weights)
                outer.load_state_dict(state)
            inner(model, optimizer, xs[step], ys[step])
            outer.step()
        results.append([p.tolist() for p in model.parameters()])
        outer.settle()
    return results


def test_state_dict_round_trips_to_the_bit():
    for whole, resumed in processes(4, _state_dict, NoLoCo):
        assert whole == resumed


def test_flatten_keeps_values_pads_and_refuses():
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
    before = [p.detach().clone() for p in model.parameters()]
    theta = flatten(model.parameters())
    assert theta.numel() == 16 * 4 and theta.count_nonzero() == 15 + 5 + 10 + 2
    for p, old in zip(model.parameters(), before):
        assert torch.equal(p, old) and p.data_ptr() % 64 == theta.data_ptr() % 64
    theta.zero_()
    assert not any(p.any() for p in model.parameters())
    assert flatten(torch.nn.ParameterList([torch.ones(0), torch.ones(3)])).numel() == 16
    tied = torch.nn.Linear(4, 4)
    assert flatten([tied.weight, tied.weight]).numel() == 16
    half = [torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))]
    for bad in ([], half):
        with pytest.raises(ValueError, match="give trainable float32 parameters"):
            flatten(bad)


# ---------------- NoLoCo: Theorem 1 and the bound on gamma, on the quadratic loss


def quadratic_run(replicas, dims, m, omega, alpha, beta, gamma, steps, n=2, noise=1.0, start=0.0,
                  seed=0, rate=1.0):
    """NoLoCo on L = 1/2 rate |theta - c|^2, c ~ N(0, noise^2), SGD with constant rate omega.

    Returns phi (replicas, dims) and a history of its moments.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw():
        return torch.randn(replicas, dims, generator=generator, dtype=torch.float64)

    phi = torch.full((replicas, dims), start, dtype=torch.float64)
    if not noise:                   # something that can shrink or grow
        phi += draw()
    delta = torch.zeros_like(phi)
    history = []
    for step in range(steps):
        theta = phi.clone()
        for _ in range(m):
            c = noise * draw() if noise else 0.0
            theta -= omega * rate * (theta - c)
        groups = random_groups(range(replicas), n, step, seed)
        for size in set(map(len, groups)):
            rows = torch.tensor([group for group in groups if len(group) == size])
            p = phi[rows]                                       # (groups, size, dims)
            d = delta[rows]
            mean_theta = theta[rows].mean(1, True)
            outer_update(p, d, mean_theta, p.mean(1, True), alpha, beta, gamma)
            phi[rows] = p
            delta[rows] = d
        history.append((phi.mean().item(), (phi - phi.mean(0)).square().mean().item()))
    return phi, history


def test_theorem_1_mean_goes_to_zero():
    _, history = quadratic_run(64, 64, m=5, omega=0.05, alpha=0.5, beta=0.7, gamma=0.7, steps=120,
                               start=3.0)
    late = [mean for mean, _ in history[-40:]]
    assert abs(sum(late) / 40) < 0.02 and abs(history[0][0]) > 2


def test_theorem_1_spread_grows_as_omega_squared():
    omegas, spreads = [1e-4, 2e-4, 4e-4, 8e-4], []  # m omega Lambda << 1
    for omega in omegas:
        _, history = quadratic_run(64, 64, m=5, omega=omega, alpha=0.5, beta=0.7, gamma=0.7,
                                   steps=200)
        spreads.append(sum(v for _, v in history[40:]) / 160)
    x = torch.tensor(omegas).double().log()
    y = torch.tensor(spreads).double().log()
    slope = ((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()
    assert abs(slope - 2) < 0.1


# ---------------- the model


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_logits_equal_independent_float64_llama(kv_heads):
    config = Config(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=kv_heads,
    )
    model = Llama(config, seed=3)
    with torch.no_grad():
        for p in model.parameters():  # gains and weights far from their start, so that each matters
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.2)
    tokens = torch.randint(50, (1, 9), generator=torch.Generator().manual_seed(0))
    doubles = {name: weights.double() for name, weights in model.state_dict().items()}
    want = reference_logits(tokens[0], doubles, config)
    assert torch.allclose(model(tokens)[0].double(), want, rtol=1e-4, atol=1e-4)
    targets = torch.randint(50, (1, 9), generator=torch.Generator().manual_seed(1))
    loss = model.loss(model.blocks(model.embed(tokens)), targets)
    logs = want.log_softmax(-1)[range(9), targets[0]]
    assert loss.item() == pytest.approx(-logs.sum().item(), rel=1e-5)
    assert count_parameters(config)[0] == sum(p.numel() for p in model.parameters())


# ---------------- paths and the executor


def test_message_lists_replayed_as_blocking_fifo_channels_finish():
    r = random.Random(0)
    for trial in range(400):
        sizes = [r.randint(1, 4) for _ in range(r.randint(1, 5))]
        stages = numbered(sizes)
        count = r.randint(1, 5)
        paths = any_paths(stages, count, r) if trial % 2 else random_paths(stages, count, trial, 0)
        assert replay(paths, range(sum(sizes))), f"deadlock: {paths}"


@pytest.mark.parametrize("sizes", [(2, 2, 1), (1, 1, 1, 1), (3,), (1, 3)])
def test_pipeline_gradients_equal_one_process(sizes):
    r = random.Random(0)
    stages = numbered(sizes)
    sets = [full_paths(stages, 3)] + [random_paths(stages, 3, step, 0) for step in range(12)]
    sets += [any_paths(stages, r.randint(1, 4), r) for _ in range(12)]
    assert worst_gradient(stages, sets, (2, 8, 16)) < 1e-5


def _trained(rank, world, argv):
    train.main(argv)


def test_ddp_on_two_processes_equals_one_process(tmp_path):
    """The gradient is the mean over all tokens: one process that reads both parts takes the same
    steps."""
    corpus = write_corpus(tmp_path / "data")
    argv = ("--method", "ddp", "--steps", 3, "--beta2", 0.999, "--data", corpus, "--name", "x")
    processes(2, _trained, [str(word) for word in (*argv, *SMALL)], cwd=tmp_path)
    got = torch.load(tmp_path / "runs/x/checkpoints/00000003/rank0.pt")["theta"]
    o = train.parse(["--steps", "3", "--data", str(corpus), *SMALL])
    readers = [train.load_data(o, i, [0, 1])[1] for i in range(2)]
    model = Llama(SMALL_CONFIG)
    theta = flatten(model.parameters())
    adam = torch.optim.Adam(model.parameters(), betas=(0.9, 0.999))
    for step in range(3):
        adam.zero_grad()
        batch = torch.cat([r.next(o.batch) for _ in range(2) for r in readers])
        targets = batch[:, 1:]
        loss = model.loss(model.blocks(model.embed(batch[:, :-1])), targets) / targets.numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.param_groups[0]["lr"] = train.schedule(step, o)
        adam.step()
    assert torch.allclose(got, theta, rtol=0, atol=2e-5)


# ---------------- SkipPipe: the simulator, the published plan, the constraints


def test_simulator_equals_hand_computation():
    # one origin, one node: forward 1 + delay 2 + forward 2 + back 2 + loss 0.25
    # + out 2 + backward 3 + back 2 + backward 1.5
    network = Network([[0, 2], [2, 0]], [1, 2], [[0], [1]], memory=1, overhead=0.1)
    one = simulate(network, [(0, 1)])
    assert one.makespan == pytest.approx(15.75)
    assert one.order == [[(0, 0), (0, 2), (0, 4)], [(0, 1), (0, 3)]]
    kinds = [task.kind for task in one.timeline]
    assert kinds == ["forward", "forward", "loss", "backward", "backward"]
    # memory 1: the second microbatch starts when the first one's backward has freed the origin,
    # 0.1 s later
    assert simulate(network, [(0, 1), (0, 1)]).makespan == pytest.approx(2 * 15.75 + 0.1)
    assert simulate(network, [(0, 1)], rounds=2).makespan == pytest.approx(2 * 15.75 + 0.1)
    assert simulate(network, [(0, 1)], order=one.order).makespan == one.makespan
    with pytest.raises(Deadlock):
        simulate(network, [(0, 1)], order=[[(0, 2), (0, 0), (0, 4)], [(0, 1), (0, 3)]])
    good = dict(delay=[[0, 2], [2, 0]], compute=[1, 2], stages=[[0], [1]])
    for bad in (dict(delay=[[0]]), dict(stages=[[0], [0]]), dict(stages=[[0], []]),
                dict(memory=[1])):
        with pytest.raises(ValueError):
            Network(**(good | bad))


def test_plan_against_brute_force():
    draw = random.Random("brute force")
    kinds = [([1, 2, 1], 2, 2), ([2, 1, 2], 2, 1), ([2, 1, 1], 3, 1), ([1, 2, 2], 2, 2),
             ([1, 1, 1], 2, 2)]
    for _ in range(40):
        shape, kept, each = draw.choice(kinds)
        network = random_network(draw, shape, (0.5, 1.0, 2.0))
        origins = network.stages[0] * each
        best = float("inf")
        caps = skippipe.node_caps(network, -(-len(origins) * (kept - 1) // (len(shape) - 1)))
        for paths in valid_combinations(network, kept, origins, caps):
            for order in every_order(paths, len(network.compute)):
                with contextlib.suppress(Deadlock):
                    best = min(best, simulate(network, paths, order=order).makespan)
        assert skippipe.lower_bound(network, kept, each) <= best + 1e-6
        found = skippipe.plan(network, kept, each, seconds=None, iterations=1000)
        assert skippipe.check(network, found.paths, kept) == [] and found.makespan >= best - 1e-6


# ---------------- Figs. 5A and 5B: synchronisation in closed form


@pytest.mark.parametrize("spread", [0, 0.5, 1, 2.5])
def test_simulated_pair_equals_its_closed_form(spread):
    generator = torch.Generator().manual_seed(1)
    samples = bench_sync.reductions(1024, spread, 1.0, 0.0, generator)
    value, error = bench_sync.estimate(samples["pair, two exchanges (paper)"], 0.001)
    assert abs(value - bench_sync.pair_closed_form(spread)) <= 4 * error


@pytest.mark.parametrize("k", range(1, 13))
def test_trees_without_spread_cost_2_k_exactly(k):
    generator = torch.Generator()
    n = 2**k
    up = bench_sync.messages((2 * n, 3), 0, generator)
    down = bench_sync.messages((2 * n, 3), 0, generator)
    assert bench_sync.tree_all_reduce(up, down).tolist() == [2 * k] * 3


def by_hand_tree(n, up, down):
    """The same tree by recursion."""

    def arrive(j):
        """When node j's message is at its parent."""
        if j >= n:
            return up[j]
        return up[j] + max(arrive(2 * j), arrive(2 * j + 1))

    def leave(j, now):
        """When the last leaf below node j has the sum, which leaves its parent now."""
        now += down[j]
        if j >= n:
            return now
        return max(leave(2 * j, now), leave(2 * j + 1, now))

    top = max(arrive(2), arrive(3))
    return max(leave(2, top), leave(3, top))


@pytest.mark.parametrize("n", [2, 3, 5, 8, 13, 32])
def test_simulated_tree_equals_recursion(n):
    up, down = messages_of_seed(n, n), messages_of_seed(n, n + 1)
    got = bench_sync.tree_all_reduce(up, down).tolist()
    want = [by_hand_tree(n, up[:, i].tolist(), down[:, i].tolist()) for i in range(4)]
    assert got == pytest.approx(want)
    if n == 2:
        pair = bench_sync.pair_average(torch.stack([up[2:], down[2:]]))
        assert got == pytest.approx(pair.tolist())


def messages_of_seed(n, seed):
    """Seconds of the messages of a tree of n, four trials."""
    generator = torch.Generator().manual_seed(seed)
    return bench_sync.messages((2 * n, 4), 1.5, generator).double()


# ---------------- processes


def processes(world, function, *args, cwd="."):
    """function(rank, world, *args) on `world` processes: their results in the order of ranks."""
    context = multiprocessing.get_context("forkserver")     # it imports torch once
    context.set_forkserver_preload(["test_minimal"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(world):
        ours, theirs = context.Pipe()
        inputs = (theirs, rank, world, port, str(cwd), function, args)
        child = context.Process(target=_rank, args=inputs, daemon=True)
        child.start()
        started.append((ours, child))
    results = []
    try:
        for rank, (ours, _) in enumerate(started):
            assert ours.poll(600), f"rank {rank} did not finish"
            good, result = ours.recv()
            assert good, f"rank {rank}: {result}"
            results.append(result)
    finally:
        for _, child in started:
            child.kill()
            child.join()
    return results


def _rank(pipe, rank, world, port, cwd, function, args):
    os.chdir(cwd)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank),
                      LOCAL_WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
                      OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    try:
        pipe.send((True, function(rank, world, *args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    pipe.recv()             # until it is killed: rank 0 hosts the store


def write_corpus(folder):
    """A folder of ten small text files."""
    r = random.Random(0)
    folder.mkdir(exist_ok=True)
    for i in range(10):
        words = (r.choice(["phi", "theta", "delta", "gossip", "stage"]) for _ in range(1500))
        (folder / f"{i}.txt").write_text(" ".join(words))
    return folder


# ---------------- oracles: a Llama in float64, blocking channels, all plans by trying everything


def reference_logits(tokens, w, config, rho=1.0):
    """A Llama in float64, position by position, apart from model.py. rho: of residuals."""
    norm = lambda x, g: x / (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * g
    heads = config.num_attention_heads
    shared = heads // config.num_key_value_heads
    d = config.hidden_size // heads
    x = w["model.embed_tokens.weight"][tokens]

    def turn(vector, position):  # pairs (i, i + d/2) as complex numbers
        rate = config.rope_theta ** (-2 * torch.arange(d // 2, dtype=torch.float64) / d)
        z = torch.complex(vector[: d // 2], vector[d // 2 :]) * torch.exp(1j * position * rate)
        return torch.cat((z.real, z.imag))

    for i in range(config.num_hidden_layers):
        part = lambda name: w[f"model.layers.{i}.{name}.weight"]
        h, rows = norm(x, part("input_layernorm")), []
        q, k, v = (h @ part(f"self_attn.{s}_proj").T for s in "qkv")
        for t in range(len(tokens)):
            row = []
            for j in range(heads):
                kv = slice(j // shared * d, j // shared * d + d)
                query = turn(q[t, j * d : j * d + d], t)
                scores = [query @ turn(k[s, kv], s) for s in range(t + 1)]
                row.append((torch.stack(scores) / d**0.5).softmax(0) @ v[: t + 1, kv])
            rows.append(torch.cat(row))
        x = x + rho * torch.stack(rows) @ part("self_attn.o_proj").T
        h = norm(x, part("post_attention_layernorm"))
        gate = h @ part("mlp.gate_proj").T
        gated = gate / (1 + (-gate).exp()) * (h @ part("mlp.up_proj").T)
        x = x + rho * gated @ part("mlp.down_proj").T
    return norm(x, w["model.norm.weight"]) @ w["lm_head.weight"].T


def numbered(sizes):
    """Stages of so many ranks each, numbered stage by stage."""
    return [list(range(a, b)) for a, b in pairwise(accumulate(sizes, initial=0))]


def small_llama(stages, shape):
    """(the layers of each stage, 1, 2, 1, ..., the config of a model for such messages)."""
    layers = numbered([s % 2 + 1 for s in range(len(stages))])
    return layers, Config(hidden_size=shape[2], num_attention_heads=2, num_key_value_heads=1,
                          intermediate_size=48, num_hidden_layers=layers[-1][-1] + 1)


def microbatches(t, paths, shape):
    generator = torch.Generator().manual_seed(t)
    return torch.randint(256, (len(paths), shape[0], shape[1] + 1), generator=generator)


def _gradients(rank, world, stages, sets, shape, dtype):
    """Of each set of paths: (loss, tokens home, tokens through this rank, its gradients)."""
    layers, config = small_llama(stages, shape)
    stage = next(s for s, ranks in enumerate(stages) if rank in ranks)
    model, job, found = Llama(config, layers[stage], ends=stage == 0), train.Job(), []
    job.connect(SimpleNamespace(backend="gloo"))
    grad = train.flat_gradient(model, flatten(model.parameters()))
    pipeline = train.Pipeline(model, job, stages, shape, dtype)
    for t, paths in enumerate(sets):
        grad.zero_()
        tokens = microbatches(t, paths, shape)
        mine = {u: tokens[u] for u, path in enumerate(paths) if path[0] == rank}
        loss, *counts = pipeline.run(paths, mine)
        gradients = {name: p.grad.numpy().copy() for name, p in model.named_parameters()}
        found.append((float(loss), *counts, gradients))
    job.close()
    return found


def worst_gradient(stages, sets, shape, dtype=torch.float32, tolerance=1e-5):
    """The largest relative error of a rank's gradient, against one process in float64."""
    layers, config = small_llama(stages, shape)
    stage_of = {r: s for s, ranks in enumerate(stages) for r in ranks}
    whole, size, worst = Llama(config).double(), shape[0] * shape[1], 0.0
    dim = config.hidden_size // 2           # of two heads
    angles = rotary(shape[1], dim, config.rope_theta, torch.device("cpu"))
    by_rank = processes(len(stage_of), _gradients, stages, sets, shape, dtype)
    for t, (paths, found) in enumerate(zip(sets, zip(*by_rank), strict=True)):
        losses, wants = Counter(), [Counter() for _ in stage_of]
        for path, tokens in zip(paths, microbatches(t, paths, shape)):
            x = whole.embed(tokens[:, :-1])
            for i in [i for r in path for i in layers[stage_of[r]]]:
                x = whole.model.layers[str(i)](x, *angles)
            whole.zero_grad()
            loss = whole.loss(x, tokens[:, 1:])
            loss.backward()
            losses[path[0]] += loss.item()
            for rank, (name, p) in itertools.product(path, whole.named_parameters()):
                wants[rank][name] += 0 if p.grad is None else p.grad
        for rank, (loss, home, count, gradients) in enumerate(found):
            assert count == size * sum(rank in p for p in paths)
            assert home == size * sum(rank == p[0] for p in paths)
            assert abs(loss - losses[rank]) <= tolerance * max(1, abs(losses[rank]))
            for name, got in gradients.items():
                got, want = torch.from_numpy(got), torch.as_tensor(wants[rank][name])
                assert got.any() == want.any()                  # embedding, gains and head included
                if want.any():
                    worst = max(worst, ((got.double() - want).norm() / want.norm()).item())
    return worst


def any_paths(stages, count, r):
    """Paths that skip and swap: each origin's go through any of the other stages, in any order."""
    others = lambda: r.sample(stages[1:], r.randint(0, len(stages) - 1))
    origins = stages[0] * count
    return [(origin, *(r.choice(stage) for stage in others())) for origin in origins]


def replay(paths, ranks, order=None):
    """Every rank's program over channels that are first in, first out and where a receive blocks.

    True when all come to their end.
    """
    chains, programs, channels, moved = [chain(p) for p in paths], {}, {}, True
    for rank in ranks:
        mine = order[rank] if order else train.tasks(chains, rank)
        posted, program = {}, programs.setdefault(rank, deque())
        for source, *message in train.incoming(chains, rank, mine, order):
            posted.setdefault(source, deque()).append(tuple(message))
        for u, hop in mine:
            way = chains[u]
            if hop and way[hop - 1] != rank:
                while (u, hop) in posted[way[hop - 1]]:     # NCCL: in the order posted
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
                    # the pair agrees on the order, without tags
                    assert channels[peer, rank].popleft() == message
                else:
                    break
                program.popleft()
                moved = True
    return not any(programs.values())


def random_network(draw, shape, speeds=(1.0,), memory=(1, 2, 3)):
    """Nodes numbered stage by stage, delays with and without ties."""
    nodes = sum(shape)
    near_or_far = lambda: draw.choice([0.1, 0.5, 1.0, 2.0, 3 * draw.random()])
    delay = [[0.0 if i == j else near_or_far() for j in range(nodes)] for i in range(nodes)]
    compute = [draw.choice(speeds) for _ in range(nodes)]
    return skippipe.Network(delay, compute, numbered(shape), draw.choice(memory),
                            draw.choice([0.0, 0.13]), 0.09)


def every_path(network, kept, origin):
    """All paths under CC1 and CC2, by trying every order of the stages."""
    for stages in itertools.permutations(range(1, len(network.stages)), kept - 1):
        swapped, plain = [i for i in range(kept - 2) if stages[i] > stages[i + 1]], list(stages)
        for i in swapped:
            plain[i : i + 2] = stages[i + 1], stages[i]
        neighbours = all(stages[i] == stages[i + 1] + 1 and i + 1 not in swapped for i in swapped)
        if neighbours and len(swapped) <= 2 and plain == sorted(plain):
            for nodes in itertools.product(*(network.stages[s] for s in stages)):
                yield origin, *nodes


def valid_combinations(network, kept, origins, caps):
    """All choices of paths that keep to CC1, CC2, CC3 and TC1."""
    for paths in itertools.product(*(list(every_path(network, kept, o)) for o in origins)):
        used = [r for p in paths for r in p[1:]]
        visits = [sum(r in stage for r in used) for stage in network.stages[1:]]
        if max(visits) - min(visits) <= 1 and all(used.count(r) <= caps[r] for r in used):
            yield paths


def every_order(paths, nodes):
    """All orders in which the nodes can run one microbatch on each of these paths."""
    found, chains = set(), [skippipe.chain(p) for p in paths]

    def extend(done, order):
        open_ = [u for u, c in enumerate(chains) if done[u] < len(c)]
        for u in open_:
            rank = chains[u][done[u]]
            longer = order[rank] + ((u, done[u]),)
            further = done[:u] + (done[u] + 1,) + done[u + 1 :]
            extend(further, order[:rank] + (longer,) + order[rank + 1 :])
        if not open_:
            found.add(order)

    extend((0,) * len(paths), ((),) * nodes)
    return found
