"""gossip/: one byte a weight, outer steps that nobody waits for, sums in fewer bytes, against float64."""

import copy
import math
import os
import random
import re
import signal
import time
import warnings
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import train
from gossip import outer_optimizer
from gossip.asynchronous import Asynchronous
from gossip.checks import Checked
from gossip.delay import Delayed, PhiAhead
from gossip.fragments import Fragments, cut
from gossip.onebyte import BLOCK, MARGIN, OneByteNoLoCo, lengths_of
from gossip.sums import BLOCK as SUM_BLOCK
from gossip.sums import Bf16Sum, Int8Sum, pieces, round_to, values
from gossip.window import gamma_bound
from noloco import NoLoCo, flatten, random_groups
from test_minimal import brute_force, flat_replicas, inner, quadratic_run, small_model
from tests.harness import (
    CPUS, SMALL, captured, gloo, host_of_its_own, processes, store_host, wait_until,
)


def phi_ahead(*args, **settings):
    return PhiAhead(NoLoCo(*args, **settings))


# ---------------- what processes do, and all replicas in float64


def _noloco(rank, world, place, kind, settings, steps, late=None):
    """(the weights, the bytes sent). place: (backend, device). late: a rank that comes late to each step."""
    backend, device = place
    if device == "cuda":
        host_of_its_own(rank)
        torch.cuda.set_device(0)
    dist.init_process_group(backend)
    dist.barrier()
    model, xs, ys = small_model(rank)
    model, xs, ys = model.to(device), xs.to(device), ys.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    outer = kind(model.parameters(), **settings)
    for step in range(steps):
        inner(model, optimizer, xs[step], ys[step])
        if rank == late:
            time.sleep(0.02)
        outer.step()
    outer.settle()
    weights = [p.detach().cpu().numpy() for p in model.parameters()]
    dist.barrier()
    dist.destroy_process_group()
    return weights, outer.bytes_sent


def simulated(world, steps, m, n, count=1, delay=0, gamma=0.7, alpha=0.5, beta=0.7, seen=None):
    """Every replica's flat vector of weights at the end. Fragments are slices of it.

    delay: inner steps from a departure to its merge, where theta becomes phi plus what was learnt
    since. seen: what a replica reads of a partner's theta, from that one's theta and phi and its own.
    """
    models, theta = flat_replicas(world)
    size = theta.shape[1]
    bounds = [size // 16 * k // count * 16 for k in range(count + 1)]
    phi, delta, flying = theta.clone(), torch.zeros_like(theta), {}

    def land(part, sent, number, seed):
        before, was = phi[:, part].clone(), delta[:, part].clone()
        for group in random_groups(range(world), n, number, seed):
            rows = list(group)
            for own, r in enumerate(rows):
                read = sent[rows]
                for place, o in enumerate(rows):
                    if seen and o != r:
                        read[place] = seen(sent[o], before[o], sent[r])
                phis, deltas = brute_force(read, before[rows], was[rows], alpha, beta, gamma)
                phi[r, part], delta[r, part] = phis[own], deltas[own]
        theta[:, part] += phi[:, part] - sent

    for step in range(steps):
        for model, xs, ys in models:
            inner(model, torch.optim.SGD(model.parameters(), lr=0.05), xs[step].double(), ys[step].double())
        for k in range(count):
            at, part = k * m // count, slice(bounds[k], bounds[k + 1])
            if delay and (k, step) in flying:
                land(part, *flying.pop((k, step)))
            if (step + 1 - at) % m == 0:
                sent = theta[:, part].clone(), step // m, f"0 {at}" if at else 0
                if delay:
                    flying[k, step + delay] = sent
                else:
                    land(part, *sent)
    return theta


def flat(tensors):
    """Tensors that a process returns, as the flat vector of its weights."""
    padded = [torch.nn.functional.pad(torch.from_numpy(t).flatten(), (0, -t.size % 16)) for t in tensors]
    return torch.cat(padded).double()


def assert_replicas(found, want, atol=2e-6):
    """The tensors that processes return are those of a simulation."""
    for (tensors, _), theta in zip(found, want, strict=True):
        assert torch.allclose(flat(tensors), theta, rtol=0, atol=atol)


def test_with_phi_ahead_processes_equal_the_simulation():
    """Also in groups of three; in pairs below, with all else."""
    found = processes(5, _noloco, CPUS, phi_ahead, dict(inner_steps=3, group_size=3, gamma=0.4), 12)
    assert_replicas(found, simulated(5, 12, 3, 3, gamma=0.4))


def noted():
    """([(which vector a replica swaps, the inner step)], where the present step stands). In this process."""
    left, now, swap = [], [0], NoLoCo.swap

    def noting(self, name, vector, group, process_group=None):
        left.append((name, now[0]))
        return swap(self, name, vector, group, process_group)

    NoLoCo.swap = noting
    return left, now


@gloo
def _leaving(rank, world, settings):
    left, now = noted()
    outer = outer_optimizer("noloco", "fp32", 0, [torch.nn.Parameter(torch.ones(3))], **settings)
    for now[0] in range(7):
        outer.step()
        outer.settle()                          # the thread has noted what it sends
    assert settings["gamma"] == settings["beta"] or outer.messenger.process_group       # one of its own
    return left


def _leaving_in_a_run(rank, world, argv):
    left, now = noted()
    usual = train.inner_step

    def inner_step(run, *rest):
        run.outer.settle()
        now[0] = run.step
        return usual(run, *rest)

    train.inner_step = inner_step
    captured(rank, world, train.main, argv)
    return left


AHEAD = [("phi", 0), ("theta", 2), ("phi", 3), ("theta", 5), ("phi", 6)]


@pytest.mark.parametrize("gamma, want", [(1.0, AHEAD), (0.7, [("theta", 2), ("theta", 5)])])
def test_phi_leaves_with_the_first_inner_step_so_that_theta_alone_is_waited_for(
        gamma, want, corpus, tmp_path):
    settings = dict(inner_steps=3, beta=0.7, gamma=gamma)
    assert processes(2, _leaving, settings) == [want] * 2
    argv = ["--stages", 2, "--inner-steps", 3, "--beta", 0.7, "--gamma", gamma, "--steps", 7,
            "--data", corpus, "--name", "x", *SMALL]
    assert processes(2, _leaving_in_a_run, [str(word) for word in argv], cwd=tmp_path) == [want] * 2


# ---------------- one byte a weight: M1 to M4 against float64


def moved(seed, size=1000):
    """A NoLoCo in one byte a weight whose theta has left phi, in two tensors of different size and step."""
    draw = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(size, generator=draw), 100 * torch.randn(16, generator=draw)]
    frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)         # does not travel
    outer = OneByteNoLoCo([frozen, *(torch.nn.Parameter(t) for t in tensors)], ranks=[0])
    outer.theta.sub_(1e-3 * torch.randn(outer.theta.shape, generator=draw))
    return outer


def written(outer):
    """The message of the present theta."""
    return outer.codec.encode(outer.theta, outer.phi).clone()


def whole(outer, message, own):
    """What is read of a message beside this vector."""
    return outer.codec.decode(message, own, torch.empty_like(own))


@pytest.mark.parametrize("share, size", [(0.0, 1000), (0.3, 1000), (0.999, 1000), (0.999, BLOCK + 8)])
def test_the_error_is_at_most_half_a_step_up_to_the_bound(share, size):
    """(M4), on both sides of the bound, for weights that differ by a share of what it allows."""
    outer = moved(0, size)
    message = written(outer)
    assert message.dtype == torch.uint8 and len(message) == len(outer.theta) + 4 * (2 + (size > BLOCK))
    scales = outer.codec.scales(message)
    s = torch.cat([v.expand(n) for v, n in zip(scales, outer.codec.blocks)]).double()
    sign = torch.randn(len(s), generator=torch.Generator().manual_seed(1)).sign()
    own = (outer.theta.double() + sign * share * 127 * s).float()
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
    same = whole(outer, written(outer), outer.theta)
    assert torch.allclose(same, outer.theta, rtol=0, atol=float(outer.theta.abs().max()) * 2**-22)
    for poison in (float("nan"), float("inf")):
        outer.theta[3] = poison
        message = written(outer)
        assert not torch.isfinite(whole(outer, message, outer.phi).sum())


def modulo(theta, phi, own):
    """What a partner reads: (M1) to (M3) in float64, for tensors that take 16 places each."""
    largest = (theta - phi).view(-1, 16).abs().amax(1)
    s = (MARGIN * largest / 256).repeat_interleave(16)
    q = torch.round(own / s)
    d = torch.remainder(torch.round(theta / s) - q + 128, 256) - 128
    return s * (q + d)


def test_processes_equal_a_float64_simulation_with_the_same_rounding():
    """In one group of five, whose partners' messages each rank reads; in pairs below, with all else."""
    found = processes(5, _noloco, CPUS, OneByteNoLoCo, dict(inner_steps=3, group_size=3), 12)
    assert_replicas(found, simulated(5, 12, 3, 3, seen=modulo))


# ---------------- any method, wire and delay against one simulation of all replicas

M, STEPS = 3, 14
PLAIN = dict(alpha=0.0, beta=1.0)
CASES = [       # method, wire, settings, delay
    ("noloco", "fp32", {}, 0), ("noloco", "fp32", {}, 2), ("noloco", "fp32", PLAIN, 3),
    ("noloco", "fp32", dict(gamma=1.0), 0), ("noloco", "fp32", dict(gamma=1.0), 2),
    ("noloco", "int8", dict(gamma=1.0), 0), ("noloco", "int8", {}, 2),
    ("diloco", "fp32", dict(alpha=0.5), 1), ("diloco", "fp32", PLAIN, 3),
    ("diloco", "bf16", dict(alpha=0.5), 2),
    ("diloco", "int8", dict(alpha=0.5), 0), ("diloco", "int8", dict(alpha=0.5), 2),
]
BYTES = {       # that a replica sends in an outer step: theta has 64 weights, in four tensors
    ("noloco", "fp32"): 4 * 64, ("noloco", "int8"): 64 + 4 * 4, ("diloco", "fp32"): 2 * 3 * 4 * 16,
    ("diloco", "bf16"): 2 * 3 * 2 * 16, ("diloco", "int8"): 2 * 3 * (16 + 4)}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_any_combination_equals_a_float64_simulation_and_counts_its_bytes(case, place):
    """Sums in fewer bytes are not simulated: they end within their rounding. Other tests know it exactly."""
    method, wire, settings, delay = case
    kind = partial(outer_optimizer, method, wire, delay)
    found = processes(4, _noloco, place, kind, dict(settings, inner_steps=M), STEPS)
    n = 4 if method == "diloco" else 2
    seen = {}
    if (method, wire) == ("noloco", "int8"):
        seen = dict(seen=modulo)
    gamma = settings.get("gamma", settings.get("beta", 0.7))
    want = simulated(4, STEPS, M, n, delay=delay, **dict(settings, gamma=gamma), **seen)
    rounds = method == "diloco" and wire != "fp32"
    assert_replicas(found, want, atol=5e-4 if rounds else 2e-6)
    phi = 4 * 64 if "gamma" in settings else 0
    outer_steps = STEPS // M
    assert [sent for _, sent in found] == [outer_steps * (BYTES[method, wire] + phi)] * 4


@pytest.mark.parametrize("method, wire", [("noloco", "bf16"), ("ddp", "fp32"), ("diloco", "int4")])
def test_a_method_or_wire_without_a_class_is_an_error(method, wire):
    with pytest.raises(ValueError, match=f"no outer optimizer for --method {method} with --wire {wire}"):
        outer_optimizer(method, wire, 0, [torch.nn.Parameter(torch.ones(3))])


def test_what_cannot_be_combined_is_said():
    weight = torch.nn.Parameter(torch.ones(3))
    for delay in (0, 11):
        with pytest.raises(ValueError, match=rf"delay must be from 1 to inner_steps \(10\), not {delay}"):
            Delayed(NoLoCo([weight], inner_steps=10), delay)
    with pytest.raises(ValueError, match="one replica has nothing to sum in fewer bytes: use DiLoCo"):
        outer_optimizer("diloco", "int8", 0, [weight])


def test_a_delayed_outer_optimizer_loads_the_state_of_one_without_a_delay():
    weight = torch.nn.Parameter(torch.ones(3))
    state = NoLoCo([weight], inner_steps=4).state_dict()
    delayed = Delayed(NoLoCo([weight], inner_steps=4), 2)
    delayed.load_state_dict(dict(state, steps=7))
    assert delayed.steps == 7 and delayed.flying is None


def _dies(rank, world, argv):
    """Rank 1, while a message of its is under way."""
    usual = train.inner_step

    def die(run, *rest):
        outers = getattr(run.outer, "outers", [run.outer])          # of fragments
        if rank == 1 and any(outer.flying for outer in outers):
            os.kill(os.getpid(), signal.SIGKILL)
        return usual(run, *rest)

    train.inner_step = die
    return captured(rank, world, train.main, argv)


@pytest.mark.parametrize("stages, more", [
    ("2,2", "--wire int8"), ("4", "--method diloco --wire int8"), ("4", "--fragments 2")])
def test_a_partner_that_dies_while_a_message_flies_ends_all_ranks_in_one_line(more, stages, corpus, tmp_path):
    argv = ["--stages", stages, "--inner-steps", 4, "--delay", 2, "--data", corpus, "--name", "x", *SMALL]
    with store_host() as (port, _):
        results = processes(4, _dies, [*argv, *more.split()], cwd=tmp_path, port=port, fallen=[1])
    codes, texts = zip(*filter(None, results))
    said = re.findall("stopped.*|Traceback", "".join(texts))
    assert codes == (2, 2, 2) and len(said) == 1, results
    assert re.fullmatch(r"stopped: rank \d lost the connection to another process", said[0]), results


class Mirrored(NoLoCo):
    """One of two replicas, whose partner's weights are always the negative of its own."""

    def exchange(self, theta, group, process_group=None):
        return [theta, -theta], []


@pytest.mark.parametrize("m, delay, most", [(2, 1, 0.25), (6, 3, 0.25), (5, 4, 0.5350), (4, 4, 1.0)])
def test_a_difference_shrinks_from_departure_to_departure_as_docs_stability_says(m, delay, most):
    """Plain averaging of a pair; an inner step on a quadratic loss is a factor q, here 201 of them."""
    q, weights = torch.linspace(0, 1, 201), torch.nn.Parameter(torch.ones(201))
    factor = (1 - q**delay) * q**(m - delay)
    outer = Mirrored([weights], inner_steps=m, alpha=0, beta=1)
    delayed = Delayed(outer, delay)
    for step in range(5 * m):
        weights.data.mul_(q)
        delayed.step()
        if (step + 1) % m == 0:
            assert torch.allclose(delayed.sent[:201], q**m * (-factor) ** (step // m), rtol=0, atol=1e-6)
    assert factor.max().item() == pytest.approx(most, abs=2e-4)
    learnt, outer.inner_steps = outer.theta - delayed.sent, outer.steps + 1
    delayed.step()                          # with another m the next departure comes before the landing
    assert torch.equal(delayed.sent, learnt)


# ---------------- the window of gamma


@pytest.mark.parametrize("alpha, n", [(0.5, 2), (0.3, 2), (0.8, 2), (0.5, 4)])
def test_gamma_bound_separates_decay_from_growth(alpha, n):
    for factor, grows in ((0.9, False), (1.1, True)):
        # beta tiny: Delta's pull, which widens the bound a little, is left out; noise-free
        gamma = factor * gamma_bound(alpha, n)
        _, history = quadratic_run(256, 32, 1, 1e-9, alpha, beta=1e-9, gamma=gamma, steps=160, n=n,
                                   noise=0)
        growth = history[-1][1] / history[20][1]
        assert growth > 10 if grows else growth < 0.1
    assert gamma_bound(alpha, 2) == pytest.approx(2 * (1 - alpha**2))


# ---------------- sums in bf16 and in one byte: Q1 to Q3

WORLD, ROUNDS = 3, 4
SIZE = 2 * WORLD * SUM_BLOCK - 300          # parts of 924 values: two equal blocks
WIDTH = 464
WHOLE = 2 * WORLD * WIDTH                   # the last 12 are padding


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
    blocks = x.view(-1, WIDTH)
    s = (blocks.abs().amax(1, keepdim=True).float() / 127).double().clamp(min=1e-30)
    return (s * torch.round(blocks / s)).view(-1), (blocks - s * torch.round(blocks / s)).view(-1)


def test_one_byte_equals_a_float64_simulation_and_error_feedback_loses_nothing():
    found = processes(WORLD, _sums, Int8Sum)
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
    each = ROUNDS * 2 * (WORLD - 1) * 2 * (WIDTH + 4)
    assert all(counted == sent == each for *_, counted, sent in found)


@gloo
def _long_sums(rank, world):
    """Of 600,001 values: (the sum, what is left) in the usual pieces, and in one piece."""
    whole = lambda count, width, vector: [slice(0, count)]
    found = []
    for cutting in (pieces, whole):
        vector = torch.randn(600_001, generator=torch.Generator().manual_seed(rank))
        with mock.patch("gossip.sums.pieces", cutting):
            left = Int8Sum(dist.group.WORLD).add_up(vector, ())
        found.append([v.clone() for v in (vector, *left)])
    return [torch.equal(some, all_) for some, all_ in zip(*found, strict=True)]


def test_a_sum_in_pieces_has_the_bits_of_the_sum_as_a_whole():
    assert len(pieces(600_001 // SUM_BLOCK, SUM_BLOCK, torch.empty(0))) > 4
    assert processes(2, _long_sums) == [[True] * 3] * 2


def test_bf16_sums_have_the_same_bits_everywhere_and_bf16s_error():
    found = processes(WORLD, _sums, Bf16Sum)
    given = [vectors(rank).double() for rank in range(WORLD)]
    for sums, owed, counted, _ in found:
        assert sums == found[0][0] and not owed and counted == ROUNDS * 2 * (WORLD - 1) * 2 * SIZE // WORLD
        error = (torch.tensor(sums).double() - sum(given)).abs()
        assert 0 < error.max() and (error <= WORLD * 2**-8 * sum(map(torch.abs, given))).all()


def test_what_one_byte_owed_is_dropped_by_another_wire(monkeypatch):
    """A run may go on from an int8 checkpoint in bf16, and then in int8 again."""
    monkeypatch.setattr(dist, "get_world_size", lambda group: 1)
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)
    assert Bf16Sum(None).add_up(torch.ones(4), (torch.ones(1), torch.ones(1))) == ()


def test_an_inf_spoils_one_sum():
    x = torch.ones(2, SUM_BLOCK)
    x[0, 3] = torch.inf
    codes = torch.empty(2, SUM_BLOCK + 4, dtype=torch.uint8)
    round_to(codes, x)
    assert not values(codes)[0].isfinite().all() and values(codes)[1].isfinite().all()
    assert x.isfinite().all()                           # what is left


# ---------------- fragments


FRAGMENTS = [       # method, wire, settings, fragments, delay, the rank that is late
    ("noloco", "fp32", dict(gamma=1.0), 4, 0, None), ("noloco", "fp32", {}, 3, 1, None),
    ("noloco", "int8", {}, 4, 4, 3),
    ("diloco", "fp32", dict(alpha=0.5), 2, 0, None), ("diloco", "fp32", dict(alpha=0.5), 4, 4, 3)]


@pytest.mark.parametrize("case", FRAGMENTS, ids=str)
def test_fragments_equal_a_float64_simulation_and_send_the_bytes_of_one(case, place):
    """Where a rank is late, the others' messages of several fragments queue up for it: no circle waits."""
    method, wire, settings, count, delay, late = case
    m, steps = 4, 18
    n = 4 if method == "diloco" else 2
    kind = partial(outer_optimizer, method, wire, delay, fragments=count)
    found = processes(4, _noloco, place, kind, dict(settings, inner_steps=m), steps, late)
    seen = dict(seen=modulo) if wire == "int8" else {}
    want = simulated(4, steps, m, n, count, delay, **settings, **seen)
    assert_replicas(found, want)
    # the first m / K steps before fragment k's first turn apart, each fragment goes every m steps
    vectors = 2 if settings.get("gamma") else 1
    turns = [(steps - k * m // count) // m + (k * m // count > 0) for k in range(count)]
    sizes = [len(want[0]) // 16 * (k + 1) // count * 16 - len(want[0]) // 16 * k // count * 16
             for k in range(count)]
    sent = [turn * vectors * 4 * size for turn, size in zip(turns, sizes)]
    if wire == "int8":      # each fragment is one of the four tensors
        sent = [turn * (size + 4) for turn, size in zip(turns, sizes)]
    if method == "diloco":
        sent = [turn * (2 * 3 * 4 * size // 4) for turn, size in zip(turns, sizes)]
    assert [bytes_sent for _, bytes_sent in found] == [sum(sent)] * 4


@gloo
def _goes_back(rank, world, kind):
    """The weights after 16 steps; the same where steps 9 to 12 were made twice, with the same objects."""
    found = []
    for steps in ([*range(16)], [*range(9), *range(9, 13), *range(9, 16)]):
        model, xs, ys = small_model(rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        outer = kind(model.parameters(), inner_steps=4)
        for turn, step in enumerate(steps):
            if turn == 9:
                weights, state = copy.deepcopy([model.state_dict(), outer.state_dict()])
            if turn == 13 and step == 9:
                model.load_state_dict(weights)
                outer.load_state_dict(state)
            inner(model, optimizer, xs[step], ys[step])
            outer.step()
        outer.settle()
        found.append([p.tolist() for p in model.parameters()])
    return found


@pytest.mark.parametrize("method, wire, delay", [("noloco", "int8", 4), ("diloco", "int8", 3)])
def test_a_state_is_loaded_to_the_bit_while_other_messages_are_under_way(method, wire, delay):
    kind = partial(outer_optimizer, method, wire, delay, fragments=4)
    for whole, again in processes(4, _goes_back, kind):
        assert whole == again


def test_fragments_are_equal_parts_of_theta_and_what_cannot_be_is_said():
    params = list(small_model(0)[0].parameters())
    theta, lengths = flatten(params), lengths_of(params)
    parts = []

    def make(vector, its, late):
        parts.append((vector.data_ptr() - theta.data_ptr(), its, late))
        return NoLoCo(vector, inner_steps=3)

    outer = Fragments(make, theta, lengths, 3, 3)
    assert parts == [(0, [16], 0), (64, [16], 1), (128, [16, 16], 2)]
    before = theta.clone()
    theta.add_(1)
    outer.step()                            # it is the second one's turn, which takes 0.7 of what was learnt
    assert torch.allclose(theta - before, torch.tensor([1.0] * 16 + [0.7] * 16 + [1.0] * 32))
    with pytest.raises(KeyError, match="fragments"):
        outer.load_state_dict(NoLoCo(theta).state_dict())
    with pytest.raises(ValueError, match="shorter"):
        outer.load_state_dict({"fragments": outer.state_dict()["fragments"][:2]})
    for count, m in ((0, 3), (4, 3), (5, 5)):
        with pytest.raises(ValueError, match=rf"from 1 to inner_steps \({m}\), .*, not {count}"):
            Fragments(make, theta, lengths, count, m)


@pytest.mark.parametrize("delay", [0, 1])
def test_fragments_of_an_older_checkpoint_go_on_in_their_turns(delay):
    """There each fragment's count began at a number of its own."""
    params = list(small_model(0)[0].parameters())
    outer = outer_optimizer("noloco", "fp32", delay, params, inner_steps=6, fragments=3)
    for _ in range(7):
        outer.step()
    state = copy.deepcopy(outer.state_dict())
    for k, its in enumerate(state["fragments"]):
        its["steps"] -= 2 * k
    outer.load_state_dict(state)
    turns = []
    for step in range(7, 24):
        turns += [(step, k) for k, fragment in enumerate(outer.outers) if fragment.due()]
        outer.step()
    assert turns == [(7, 1), (9, 2), (11, 0), (13, 1), (15, 2), (17, 0), (19, 1), (21, 2), (23, 0)]


def test_a_tensors_pieces_in_the_fragments_are_as_long_as_it():
    lengths = [16, 160, 32]
    bounds = [0, 64, 128, 208]
    pieces = [cut(lengths, *ends) for ends in zip(bounds, bounds[1:])]
    assert pieces == [[16, 48], [64], [48, 32]]


# ---------------- checks for other people's trainers


@gloo
def _checked(rank, world, kind, faults):
    """{fault: what this rank is warned of in 18 steps}"""
    return {fault: _warned(rank, kind, fault) for fault in faults}


def _warned(rank, kind, fault):
    """NaN: of rank 1, in the fifth step."""
    model, xs, ys = small_model(0 if fault == "averaged" else rank)
    if fault == "NaN" and rank == 1:
        xs[4] = math.nan
    if fault == "seeds" and rank == 2:
        model[0].weight.data.add_(1)
    loaded, *_ = small_model(0, seed=9)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        params = list(model.parameters())
        if fault == "order" and rank == 3:
            params.reverse()
        outer = Checked(kind(params, inner_steps=2), list(model.parameters()))
        if fault == "loaded":
            model.load_state_dict(loaded.state_dict())
        if fault == "moved":
            model.double().float()
        if fault == "replaced":
            model[2] = torch.nn.Linear(5, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(18):
            inner(model, optimizer, xs[step], ys[step])
            outer.step()
        outer.settle()
    return [str(warning.message) for warning in told]


KINDS = {"pairs": NoLoCo, "DiLoCo": partial(outer_optimizer, "diloco", "fp32", 0),
         "delayed fragments": partial(outer_optimizer, "noloco", "int8", 1, fragments=2)}
WARNINGS = {        # fault: part of what the first rank says of it, once
    "none": None,
    "seeds": "replicas began with different weights: ",
    "order": "replicas began with different weights: ",
    "loaded": "weights were loaded after the outer optimizer was made, ",
    "averaged": "replicas hold equal weights before they average: ",
    "replaced": "2 of 4 trainable parameters do not move, first number 2: ",
    "NaN": None,
}


@pytest.mark.parametrize("name", KINDS)
def test_each_fault_of_a_foreign_trainer_is_said_once_and_of_a_healthy_run_nothing(name):
    """NaN is said by the rank where it begins, before it spreads: whole messages leave after the second of
    two inner steps, a fragment after each. A plain outer step raises an error for moved parameters."""
    lines, nan = dict(WARNINGS), "rank 1: the weights are not finite after inner step 6, "
    if name == "delayed fragments":
        lines["moved"] = "4 of 4 trainable parameters are not averaged, first number 0: "
        nan = nan.replace("6", "5")
    first, second, *others = processes(4, _checked, KINDS[name], [*lines])
    for fault, line in lines.items():
        told = [first[fault], second[fault]]
        said, expected = (told[1], nan) if fault == "NaN" else (told[0], line)
        assert len(said) == (expected is not None), (fault, told)
        assert all(text.startswith(expected) for text in said), (fault, told)
        assert sum(map(len, told)) == len(said) and not any(rank[fault] for rank in others), (fault, told)


def test_checked_is_for_outer_steps_that_all_share():
    weight = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(TypeError, match="^Checked goes around NoLoCo or DiLoCo, not Asynchronous, which "):
        Checked(Asynchronous([weight]), [weight])


def test_of_a_run_that_goes_on_and_of_weights_loaded_before_nothing_is_said():
    model, xs, ys = small_model(0)
    state = NoLoCo(model.parameters(), inner_steps=3).state_dict()
    for resumed in (False, True):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model.load_state_dict(small_model(0, seed=9)[0].state_dict())
            outer = Checked(NoLoCo(model.parameters(), inner_steps=3), model.parameters())
            if resumed:
                model.load_state_dict(small_model(0, seed=7)[0].state_dict())
                outer.load_state_dict(dict(state, steps=4))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(4):
                inner(model, optimizer, xs[step], ys[step])
                outer.step()


@gloo
def _unlike(rank, world, cases):
    """What this rank is warned of at the first inner step, where the last rank has such settings."""
    found = []
    for kind, settings in cases:
        weight = torch.nn.Parameter(torch.ones(3))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            outer = kind([weight], **settings) if rank == world - 1 else NoLoCo([weight])
            Checked(outer, [weight]).step()
        found.append([str(warning.message) for warning in told])
    return found


def test_replicas_with_other_settings_are_warned_of_before_they_meet():
    cases = [(NoLoCo, dict(alpha=0)), (NoLoCo, dict(beta=1)), (NoLoCo, dict(gamma=1.0)),
             (NoLoCo, dict(group_size=3)), (NoLoCo, dict(seed=1)), (OneByteNoLoCo, {}),
             (NoLoCo, dict(inner_steps=10, gamma=0.7))]         # these may differ, or do not
    names = ["alpha", "beta, gamma", "gamma", "group_size", "seed", "method"]
    first, *others = processes(3, _unlike, cases)
    for told, name in zip(first, [*names, None], strict=True):
        assert len(told) == (name is not None)
        assert all(text.startswith(f"replicas began with different {name}: ") for text in told)
    assert others == [[[]] * len(cases)] * 2


def test_a_replica_alone_is_warned_of_nothing_and_checks_pass_on_what_a_trainer_uses():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weight = torch.nn.Parameter(torch.ones(3))
        outer = Checked(NoLoCo([weight], inner_steps=2), [weight])
        for _ in range(4):
            weight.data.add_(1)
            outer.step()
    assert (outer.steps, outer.bytes_sent) == (4, 0)
    assert set(outer.state_dict()) == {"phi", "delta", "steps", "bytes_sent"}
    outer.steps = 7
    assert outer.outer.steps == 7


# ---------------------------------------------------------------- pairs that never wait


def own_theta(rank, size=160):
    return torch.randn(size, generator=torch.Generator().manual_seed(rank))


def join_calls(outer):
    """Until this replica's calls have been answered."""
    for call in list(outer.calls.values()):
        call.join()


@gloo
def _calls_alone(rank, world, rounds):
    """Outer steps without any training, one after another. Nobody reads its mail before the end."""
    outer = Asynchronous(own_theta(rank), inner_steps=1, seed=3)
    for _ in range(rounds):
        for caller in range(world):
            if rank == caller:
                outer.make_call()
                join_calls(outer)
            dist.barrier()
    outer.settle()
    return outer.theta.tolist(), outer.bytes_sent


def test_calls_keep_the_mean_and_lower_the_spread_as_simulated():
    world, rounds = 4, 6
    theta = torch.stack([own_theta(rank) for rank in range(world)]).double()
    begun = theta.clone()
    draws = [random.Random(f"calls 3 {rank}") for rank in range(world)]
    for _ in range(rounds):
        for rank in range(world):
            other = draws[rank].choice([r for r in range(world) if r != rank])
            theta[rank] = theta[other] = (theta[rank] + theta[other]) / 2
    ends = processes(world, _calls_alone, rounds)
    found = torch.tensor([end for end, _ in ends], dtype=torch.float64)
    torch.testing.assert_close(found, theta, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.mean(0), begun.mean(0), atol=1e-6, rtol=0)
    assert found.std(0).mean() < begun.std(0).mean() / 10
    assert sum(sent for _, sent in ends) == world * rounds * 2 * 160 * 4    # a call and an answer each


@gloo
def _learns_meanwhile(rank, world, steps):
    """The sum of the inner steps, which no replica waits to make, and the weights at the end; then its count
    of steps, and whom it calls after the end."""
    outer = Asynchronous(own_theta(rank), inner_steps=1 + rank)
    learnt = torch.zeros_like(outer.theta)
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(steps * (1 + rank)):                 # one makes thrice as many as another
        inner_step = 0.01 * torch.randn(learnt.shape, generator=generator)
        outer.theta.add_(inner_step)
        learnt.add_(inner_step)
        outer.step()
    outer.settle()
    outer.make_call()
    return learnt.tolist(), outer.theta.tolist(), outer.steps, list(outer.calls)


def test_in_the_mean_there_is_what_all_have_learnt():
    ends = processes(3, _learns_meanwhile, 30)
    learnt, theta = [torch.tensor(column, dtype=torch.float64) for column in list(zip(*ends))[:2]]
    begun = torch.stack([own_theta(rank) for rank in range(3)]).double()
    torch.testing.assert_close(theta.mean(0), (begun + learnt).mean(0), atol=1e-5, rtol=0)
    assert [end[2:] for end in ends] == [(30, []), (60, []), (90, [])]


@gloo
def _one_stands_still(rank, world):
    """Rank 2 is stopped until the others have made all their steps."""
    outer = Asynchronous(own_theta(rank), inner_steps=1)
    pids = [None] * world
    dist.all_gather_object(pids, os.getpid())
    store, called = dist.distributed_c10d._get_default_store(), None
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        wait_until(lambda: stopped(pids[2]))
        for _ in range(50):
            outer.step()
        called = 2 in outer.calls
        assert stopped(pids[2])
        if store.add("done", 1) == 2:
            os.kill(pids[2], signal.SIGCONT)
    outer.settle()
    return outer.theta.tolist(), called


def stopped(pid):
    return Path(f"/proc/{pid}/stat").read_text().split()[2] == "T"


def test_a_replica_that_stands_still_holds_nobody():
    ends = processes(3, _one_stands_still)
    found = torch.tensor([theta for theta, _ in ends])
    begun = torch.stack([own_theta(rank) for rank in range(3)])
    torch.testing.assert_close(found.mean(0), begun.mean(0))
    assert ends[0][1] or ends[1][1]                     # one of them did call it


def _one_dies(rank, world):
    dist.init_process_group("gloo")
    outer = Asynchronous(own_theta(rank), inner_steps=1)
    dist.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        wait_until(lambda: 2 not in outer.others)
        for _ in range(50):
            outer.step()
        outer.settle()
    return outer.theta.tolist(), [str(one.message) for one in told]


def test_a_dead_replica_costs_a_warning():
    ends = processes(3, _one_dies, fallen=(2,))[:2]
    found = torch.tensor([theta for theta, _ in ends])
    begun = torch.stack([own_theta(rank) for rank in range(2)])
    torch.testing.assert_close(found.mean(0), begun.mean(0))
    for rank, (_, told) in enumerate(ends):
        assert len(told) == 1 and f"rank {rank} goes on without rank 2" in told[0]


@gloo
def _keeps_its_mail(rank, world):
    outer = Asynchronous(own_theta(rank), inner_steps=1)
    outer.make_call()
    outer.settle()                                      # adds what came
    outer.put(own_theta(7), torch.zeros(160))
    state = outer.state_dict()
    outer.read_mail()
    other = Asynchronous(torch.zeros(160), [rank], inner_steps=1)
    other.load_state_dict(state)
    other.step()
    return other.theta.tolist(), other.bytes_sent, outer.bytes_sent, other.steps


def test_a_state_has_what_came_and_was_not_added_yet():
    for theta, sent, had_sent, steps in processes(2, _keeps_its_mail):
        torch.testing.assert_close(torch.tensor(theta), own_theta(7) / 2)
        assert sent == had_sent == 2 * 160 * 4 and steps == 1


def test_asynchronous_notices_moved_parameters():
    outer = Asynchronous([weight := torch.nn.Parameter(torch.zeros(4))], inner_steps=1)
    weight.data = weight.data.clone()
    with pytest.raises(RuntimeError, match="parameters were moved"):
        outer.step()
