"""Outer steps beyond the equations: refusals and warnings, the docs' recipes, Gloo's interface."""

import itertools
import os
import re
import shutil
import subprocess
from functools import partial

import pytest
import torch
import torch.distributed as dist

import noloco
from gossip import outer_optimizer
from gossip.asynchronous import Asynchronous
from gossip.checks import Checked
from gossip.onebyte import OneByteNoLoCo
from noloco import NoLoCo, random_groups
from train import BadInput, gloo_interface
from test_minimal import brute_force, inner
from tests.harness import HERE, gloo, processes
from tests.test_gossip import phi_ahead


def test_noloco_notices_moved_parameters():
    model = torch.nn.Linear(4, 4)
    outer = NoLoCo(model.parameters(), inner_steps=1)
    model.weight.data = model.weight.data.clone()  # what .to() does
    with pytest.raises(RuntimeError, match="moved"):
        outer.step()


@pytest.mark.parametrize("kind, name, least, wrong", [
    *itertools.product([NoLoCo, Asynchronous], ["inner_steps"], [1], [0, 100 / 3, 10.0]),
    (NoLoCo, "group_size", 2, 1), (NoLoCo, "group_size", 2, 2.0)])
def test_a_setting_that_cannot_be_meant_is_refused(kind, name, least, wrong):
    """With inner_steps=100 / 3 there was no outer step in 10,000 inner ones, and no error."""
    line = f"{name} must be a whole number of at least {least}, not {wrong}"
    with pytest.raises(ValueError, match=re.escape(line)):
        kind(torch.nn.Linear(4, 4).parameters(), **{name: wrong})


def used_up(model):
    parameters = model.parameters()
    torch.optim.SGD(parameters, lr=0.1)
    return parameters


@pytest.mark.parametrize("kind", [
    NoLoCo, OneByteNoLoCo, Asynchronous, noloco.flatten, partial(outer_optimizer, "noloco", "fp32", 0),
    lambda params: Checked(NoLoCo([torch.nn.Parameter(torch.ones(3))]), params)])
@pytest.mark.parametrize("wrong", [
    used_up, lambda model: [], lambda model: model, torch.nn.Sequential,
    lambda model: model.named_parameters(), lambda model: torch.optim.SGD(model.parameters()).param_groups])
def test_what_is_no_parameters_is_refused_by_all_in_one_line_that_names_what_to_give(kind, wrong):
    with pytest.raises(ValueError, match=r"^give model.parameters\(\), called anew .*or param_groups$"):
        kind(wrong(torch.nn.Linear(4, 4)))


def test_where_a_launcher_says_that_there_are_others_nobody_trains_alone(monkeypatch):
    """WORLD_SIZE is set by torchrun, and by whoever starts ranks with srun or mpirun."""
    parameters = list(torch.nn.Linear(4, 4).parameters())
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert NoLoCo(parameters).ranks == [0]
    monkeypatch.setenv("WORLD_SIZE", "2")
    for kind in (NoLoCo, Asynchronous):
        with pytest.raises(ValueError, match="call init_process_group first: each process would train alone"):
            kind(parameters)


def test_shared_memory_is_no_move_and_the_default_dtype_is_not_the_vectors(monkeypatch):
    model = torch.nn.Linear(4, 4)
    outer = NoLoCo(model.parameters(), inner_steps=1)
    model.share_memory()
    outer.step()
    model.weight.data.fill_(3)
    assert outer.theta[:16].eq(3).all()                 # still views of it
    torch.set_default_dtype(torch.bfloat16)
    try:
        outer = OneByteNoLoCo([torch.nn.Parameter(torch.tensor([1 / 3], dtype=torch.float32))])
        outer.codec.encode(outer.theta, outer.phi)
    finally:
        torch.set_default_dtype(torch.float32)
    assert outer.theta.dtype == outer.codec.x.dtype == torch.float32
    assert outer.theta[0] == torch.tensor(1 / 3)


def test_frozen_parameters_stay_as_they_are_and_do_not_travel():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    outer = NoLoCo(model.parameters(), inner_steps=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    for _ in range(3):
        inner(model, optimizer, torch.ones(1, 4), 1)
        outer.step()
    assert model[0].weight.grad is None and torch.equal(model[0].weight, before)
    assert outer.theta.numel() == 16 + 16 and model[1].weight.data_ptr() == outer.theta.data_ptr()
    model[0].requires_grad_(True)
    with pytest.raises(RuntimeError, match="unfrozen"):
        outer.step()
    with pytest.raises(ValueError, match="give trainable float32 parameters"):
        NoLoCo(p.detach() for p in model.parameters())


@gloo
def _buffers(rank, world, wire):
    """Numbers of bytes of the buffers, after outer steps with every other replica."""
    outer = outer_optimizer("noloco", wire, 0, [torch.nn.Parameter(torch.ones(16))], inner_steps=1)
    met = set()
    while len(met) < world:
        met |= set(outer.group())
        outer.step()
    return sorted(buffer.nbytes for buffer in outer.buffers.values())


@pytest.mark.parametrize("wire, sizes", [("fp32", [64]), ("int8", [20, 64])])
def test_partners_share_one_buffer(wire, sizes):
    assert processes(4, _buffers, wire) == [sizes] * 4


# ---------------- replicas that are only some of the processes


@gloo
def _some_ranks(rank, world, kind):
    """Ranks 1 and 2 are replicas, with gamma different from beta; the others never hear of it."""
    if rank in (1, 2):
        model = torch.nn.Linear(3, 3)
        outer = kind(model.parameters(), ranks=[1, 2], inner_steps=1, alpha=0, beta=1, gamma=1.5)
        for _ in range(3):
            model.weight.data.add_(torch.randn(3, 3, generator=torch.Generator().manual_seed(rank)))
            outer.step()
        outer.settle()
        return True


@gloo
def _own_rank_first(rank, world):
    """The weights after three outer steps; each rank lists the replicas in another order."""
    ranks = [rank, *(r for r in range(world) if r != rank)]
    weight = torch.nn.Parameter(torch.full((3,), float(rank)))
    with pytest.raises(ValueError, match=f"this process's rank {rank} among them"):
        Asynchronous([weight], ranks=ranks[1:])
    outer = NoLoCo([weight], ranks=ranks, inner_steps=1)
    for _ in range(3):
        outer.step()
    return weight.tolist()


def test_ranks_may_come_in_another_order_on_each_replica():
    """Groups depended on it: all ranks hung."""
    found = processes(4, _own_rank_first)
    theta = torch.arange(4.0).double()[:, None]
    delta = torch.zeros_like(theta)
    for number in range(3):
        phi = theta.clone()
        for group in random_groups(range(4), 2, number, 0):
            rows = list(group)
            theta[rows], delta[rows] = brute_force(phi[rows], phi[rows], delta[rows], 0.5, 0.7, 0.7)
    for weights, want in zip(found, theta):
        assert weights == pytest.approx([float(want)] * 3, abs=1e-6)


def test_other_processes_need_not_construct_it():
    assert processes(4, _some_ranks, phi_ahead) == [None, True, True, None]


# ---------------- the flat vector and its pieces


def test_flatten_keeps_values_pads_and_refuses():
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
    before = [p.detach().clone() for p in model.parameters()]
    theta = noloco.flatten(model.parameters())
    assert theta.numel() == 16 * 4 and theta.count_nonzero() == 15 + 5 + 10 + 2
    for p, old in zip(model.parameters(), before):
        assert torch.equal(p, old) and p.data_ptr() % 64 == theta.data_ptr() % 64
    theta.zero_()
    assert not any(p.any() for p in model.parameters())
    assert noloco.flatten(torch.nn.ParameterList([torch.ones(0), torch.ones(3)])).numel() == 16
    tied = torch.nn.Linear(4, 4)
    assert noloco.flatten([tied.weight, tied.weight]).numel() == 16
    half = [torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))]
    with pytest.raises(ValueError, match="give trainable float32 parameters"):
        noloco.flatten(half)


@pytest.mark.parametrize("n, gamma", [(1, 0.7), (2, 1.1), (3, 0.7), (3, 0.0)])
def test_an_outer_step_in_pieces_equals_float64(n, gamma):
    torch.manual_seed(n)
    size = (3 << 17) + 5  # several pieces, the last one odd
    thetas, phis, deltas = torch.randn(3, n, size)
    want_phis, want_deltas = brute_force(thetas.double(), phis.double(), deltas.double(), 0.5, 0.7, gamma)
    padded = [torch.nn.functional.pad(v, (0, -size % 16)) for v in [*thetas, *phis]]
    for i in range(n):
        parameter = torch.nn.Parameter(thetas[i].clone())
        outer = NoLoCo([parameter], gamma=gamma)
        outer.phi[:size] = phis[i]
        outer.delta[:size] = deltas[i]
        came = padded[n:] if gamma != 0.7 else []
        outer.outer_step(outer.theta, [v.clone() for v in padded[:n]], came)    # it may write to what came
        found = outer.phi[:size], outer.delta[:size], parameter
        for got, want in zip(found, (want_phis[i], want_deltas[i], want_phis[i])):
            assert torch.allclose(got.double(), want, rtol=0, atol=4e-6)


# ---------------- other people's trainers: the recipes of docs/


def recipe(page, heading="", **scope):
    """The names that the first program below a heading of this page leaves."""
    text = (HERE / "docs" / page).read_text()
    exec(re.search(rf"## {heading}.*?```python\n(.*?)```", text, re.S)[1], scope)
    return scope


def small():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))


def loss_of(model, batch):
    return (model(batch) - 1).square().mean()


def batches(replica):
    """(steps, shards, rows, columns): what each of a replica's two ranks sees."""
    return torch.randn(9, 2, 5, 8, generator=torch.Generator().manual_seed(replica))


@gloo
def _sharded(rank, world):
    """The weights at the end of the example of docs/hosts.md."""
    mine = batches(rank // 2)[:, rank % 2]
    scope = dict(torch=torch, NoLoCo=NoLoCo, model=small(), loss_of=loss_of, batches=mine)
    model = recipe("hosts.md", **scope)["model"]
    with pytest.raises(ValueError, match="of sharded ones plain copies of this rank's shards"):
        NoLoCo(model.parameters())
    return torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()]).tolist()


@gloo
def _whole(rank, world):
    """The same replicas, each on one rank."""
    for wrong in ([1 - rank], [0, 1, 2]):
        line = f"ranks {wrong}: give some of 0 to 1, this process's rank {rank} among them"
        with pytest.raises(ValueError, match=re.escape(line)):
            NoLoCo(small().parameters(), ranks=wrong)
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    outer = NoLoCo(model.parameters(), inner_steps=3, alpha=0, beta=1)
    for batch in batches(rank):
        inner(model, optimizer, batch.flatten(0, 1), 1)
        outer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def test_sharded_parameters_are_refused_and_a_noloco_per_shard_equals_whole_replicas():
    sharded, whole = processes(4, _sharded), processes(2, _whole)
    for rank, weights in enumerate(sharded):
        assert weights == pytest.approx(whole[rank // 2], abs=1e-6)


@gloo
def _mix(rank, world):
    """(theta before, theta after) one outer step of the page's own rule."""
    mix = recipe("trainers.md", "An outer rule of your own")["Mix"]
    outer = mix([torch.nn.Parameter(torch.zeros(16))], inner_steps=1)
    outer.theta.add_(rank + 1.0)
    outer.step()
    return outer.theta[0].item(), outer.phi[0].item()


def test_a_rule_of_ones_own_mixes_as_it_says():
    """Three replicas are one group: each keeps 0.7 of its own and takes 0.3 of the mean of the others."""
    mixed = [0.7 * own + 0.3 * others for own, others in ((1, 2.5), (2, 2), (3, 1.5))]
    assert processes(3, _mix) == [(pytest.approx(value), pytest.approx(value)) for value in mixed]


@gloo
def _merged(rank, world, how):
    """The weights of the model that the page keeps at the end, and their mean over the replicas."""
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    outer = recipe("trainers.md", "Its arguments")[how](model.parameters())
    for step in range(25):
        inner(model, optimizer, batches(rank)[step % 9, 0], 1)
        outer.step()
    mean = torch.cat([p.detach().flatten() for p in model.parameters()])
    dist.all_reduce(mean)
    outer.settle()
    recipe("trainers.md", "At the end, and in checkpoints", noloco=noloco, dist=dist, model=model)
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(), (mean / world).tolist()


@pytest.mark.parametrize("how", ["delayed", "in_fragments"])
def test_the_pages_delays_and_fragments_train_and_merge_as_it_says(how):
    for found, mean in processes(2, _merged, how):
        assert found == mean


# ---------------- gloo_interface


def ip(*argv):
    """What the system's own `ip` says, a list of words per line."""
    if not shutil.which("ip"):
        pytest.skip("needs ip, of iproute2")
    done = subprocess.run(["ip", "-o", *argv], capture_output=True, text=True, timeout=30)
    return [line.split() for line in done.stdout.splitlines()]


def own_addresses():
    """{IPv4 address: the interface that has it}, the first of each interface."""
    first = {words[1]: words[3].split("/")[0] for words in reversed(ip("-4", "addr"))}
    return {address: name for name, address in first.items()}


def launch(monkeypatch, local, world, master, names=None):
    """Set the environment as torchrun does before a process: no interface given. None: not there."""
    given = dict(os.environ, LOCAL_WORLD_SIZE=local, WORLD_SIZE=world, MASTER_ADDR=master,
                 GLOO_SOCKET_IFNAME=names)
    monkeypatch.setattr(os, "environ", {name: value for name, value in given.items() if value is not None})


@pytest.mark.parametrize("local, master, names", [
    *itertools.product(["2", "4"], ["127.0.0.1"], ["lo", "lo,lo", ""]),
    *itertools.product(["4"], ["127.0.0.1", "198.51.100.7", "no-such-host.invalid", None], [None])])
def test_gloo_interface_keeps_what_is_set_and_is_one_hosts_loopback(local, master, names, monkeypatch):
    launch(monkeypatch, local, "4", master, names)
    want = own_addresses()["127.0.0.1"] if names is None else names
    assert gloo_interface() == os.environ["GLOO_SOCKET_IFNAME"] == want


@pytest.mark.parametrize("local, world", [("2", "4"), (None, None)])
def test_gloo_interface_of_several_hosts_reaches_the_master(local, world, monkeypatch):
    """Each address of this host, and one that is elsewhere where there is a way to it.

    The oracle is the system's routing table: the interface that has the address which it would send from.
    A program that torchrun has not started knows neither LOCAL_WORLD_SIZE nor WORLD_SIZE.
    """
    own = own_addresses()
    for master in (*own, "198.51.100.7"):
        launch(monkeypatch, local, world, master)
        (route,) = ip("route", "get", master) or [[]]
        if "src" in route:
            way = own[route[route.index("src") + 1]]
            assert gloo_interface() == os.environ["GLOO_SOCKET_IFNAME"] == way
        else:
            assert master not in own
            with pytest.raises(BadInput, match=f"MASTER_ADDR={master}: "):
                gloo_interface()
