"""noloco.py beyond the equations: what it refuses, the README's example, Gloo's network interface."""

import contextlib
import os
import re
import shutil
import socket
import subprocess
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel

from noloco import DiLoCo, NoLoCo, random_groups
from plumbing.overlap import PhiAhead
from plumbing.processes import BadInput, gloo_interface
from plumbing.window import gamma_bound
from test_minimal import quadratic_run
from tests.harness import HERE, gloo, processes


def test_noloco_notices_moved_parameters():
    model = torch.nn.Linear(4, 4)
    outer = NoLoCo(model.parameters(), inner_steps=1)
    model.weight.data = model.weight.data.clone()  # what .to() does
    with pytest.raises(RuntimeError, match="moved"):
        outer.step()


def test_frozen_parameters_stay_as_they_are_and_do_not_travel():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    outer = NoLoCo(model.parameters(), inner_steps=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        outer.step()
    assert model[0].weight.grad is None and torch.equal(model[0].weight, before)
    assert outer.theta.numel() == 16 + 16 and model[1].weight.data_ptr() == outer.theta.data_ptr()
    model[0].requires_grad_(True)
    with pytest.raises(RuntimeError, match="unfrozen"):
        outer.step()
    with pytest.raises(ValueError, match="trainable"):
        NoLoCo(p.detach() for p in model.parameters())


@gloo
def _warned(rank, world, method, seeds, averaged):
    """What the outer steps of a small training warn of. averaged: all ranks' gradients are, as by DDP."""
    torch.manual_seed(seeds[rank])
    model = torch.nn.Linear(3, 3)
    draw = torch.Generator().manual_seed(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        outer = method(model.parameters(), inner_steps=2, alpha=0, beta=1)
        for _ in range(10):
            optimizer.zero_grad()
            model(torch.randn(4, 3, generator=draw)).square().mean().backward()
            for p in model.parameters() if averaged else []:
                dist.all_reduce(p.grad)
            optimizer.step()
            outer.step()
    return [str(warning.message) for warning in told]


@pytest.mark.parametrize("method", [NoLoCo, DiLoCo])
def test_initial_weights_that_differ_are_said_once(method):
    """Also where those who meet first have the same."""
    assert (0, 1) in random_groups(range(4), 2, 0, 0)
    assert processes(4, _warned, method, [1, 1, 1, 1], False) == [[]] * 4
    first, *others = processes(4, _warned, method, [1, 1, 2, 2], False)
    assert others == [[]] * 3
    assert first == [f"rank {r} began with other weights than rank 0: seed all alike" for r in (2, 3)]


def test_gradients_averaged_by_something_else_are_said_once():
    line = "partners hold equal weights already: is something else averaging gradients? DDP?"
    assert processes(4, _warned, NoLoCo, [1, 1, 1, 1], True) == [[line], [], [], []]


# ---------------- the bound on gamma


def test_gamma_bound_of_one_replica():
    """There is nothing to hold together, and no division by zero."""
    assert gamma_bound(0.5, 2, 1) == gamma_bound(0.5, 2, 2) == pytest.approx(3)


@pytest.mark.parametrize("replicas, n", [(2, 2), (3, 2), (4, 4)])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5])
def test_gamma_bound_of_few_replicas_separates_decay_from_growth(replicas, n, alpha):
    for factor, grows in ((0.9, False), (0.97, False), (1.03, True)):
        gamma = factor * gamma_bound(alpha, n, replicas)
        # no noise, and next to nothing of Delta's own pull
        _, history = quadratic_run(replicas, 32, 1, 1e-9, alpha, 1e-9, gamma, steps=200, n=n, noise=0)
        assert (history[-1][1] > 2 * history[20][1]) if grows else (history[-1][1] < 0.5 * history[20][1])


# ---------------- replicas that are only some of the processes


@gloo
def _some_ranks(rank, world, kind):
    """Ranks 1 and 2 are replicas, with gamma different from beta; the others never hear of it."""
    if rank not in (1, 2):
        return None
    model = torch.nn.Linear(3, 3)
    outer = kind(model.parameters(), ranks=[1, 2], inner_steps=1, alpha=0, beta=1, gamma=1.5)
    for _ in range(3):
        model.weight.data.add_(torch.randn(3, 3, generator=torch.Generator().manual_seed(rank)))
        outer.step()
    outer.settle()
    return outer.phi.mean().item()


@pytest.mark.parametrize("kind", [NoLoCo, PhiAhead])
def test_other_processes_need_not_construct_it(kind):
    nothing, a, b, also_nothing = processes(4, _some_ranks, kind)
    assert nothing is also_nothing is None and isinstance(a, float) and isinstance(b, float)


# ---------------- sharded parameters


def small(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))


def loss_of(model, batch):
    return (model(batch) - 1).square().mean()


def batches(replica):
    """(steps, shards, rows, columns): what each of a replica's two ranks sees."""
    return torch.randn(9, 2, 5, 8, generator=torch.Generator().manual_seed(replica))


@gloo
def _sharded(rank, world):
    """The example of docs/hosts.md: (what NoLoCo says of the model's parameters, its weights at the end)."""
    block = re.findall(r"```python\n(.*?)```", (HERE / "docs/hosts.md").read_text(), re.S)[0]
    mine = batches(rank // 2)[:, rank % 2]
    scope = dict(torch=torch, NoLoCo=NoLoCo, model=small(), loss_of=loss_of, batches=mine)
    exec(block, scope)
    model, said = scope["model"], ""
    try:
        NoLoCo(model.parameters())
    except ValueError as error:
        said = str(error)
    flat = FullyShardedDataParallel(small(), device_id=torch.device("cpu"))
    with pytest.raises(ValueError, match="sharded"):
        NoLoCo(flat.parameters())
    return said, torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()]).tolist()


@gloo
def _whole(rank, world):
    """The same replicas, each on one rank."""
    with pytest.raises(ValueError, match="its rank in ranks"):
        NoLoCo(small().parameters(), ranks=[1 - rank])
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    outer = NoLoCo(model.parameters(), inner_steps=3, alpha=0, beta=1)
    for batch in batches(rank):
        optimizer.zero_grad()
        loss_of(model, batch.flatten(0, 1)).backward()
        optimizer.step()
        outer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def test_sharded_parameters_are_refused_and_a_noloco_per_shard_equals_whole_replicas():
    sharded, whole = processes(4, _sharded), processes(2, _whole)
    for rank, (said, weights) in enumerate(sharded):
        assert said.startswith("sharded parameters: give plain copies of this rank's shards")
        assert weights == pytest.approx(whole[rank // 2], abs=1e-6)


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


@pytest.mark.parametrize("names", ["lo", "lo,lo", ""])
@pytest.mark.parametrize("local", ["2", "4"])
def test_gloo_interface_keeps_what_is_set(names, local, monkeypatch):
    launch(monkeypatch, local, "4", "127.0.0.1", names)
    assert gloo_interface() == os.environ["GLOO_SOCKET_IFNAME"] == names


@pytest.mark.parametrize("master", ["127.0.0.1", "198.51.100.7", "no-such-host.invalid", None])
def test_gloo_interface_of_one_host_is_the_loopback_whatever_the_master(master, monkeypatch):
    launch(monkeypatch, "4", "4", master)
    assert gloo_interface() == os.environ["GLOO_SOCKET_IFNAME"] == own_addresses()["127.0.0.1"]


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


def _connected_addresses(rank, world, local, master):
    """The interface chosen, and this end's addresses of all that the default group has connected."""
    os.environ.update(LOCAL_WORLD_SIZE=local, MASTER_ADDR=master)
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    name, found, store = gloo_interface(), set(), int(os.environ["MASTER_PORT"])
    dist.init_process_group("gloo")
    dist.barrier()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(fd))) as link:
            ends = link.getsockname(), link.getpeername()
            if link.family != socket.AF_UNIX and store not in (ends[0][1], ends[1][1]):
                found.add(ends[0][0])
    dist.barrier()
    dist.destroy_process_group()
    return name, sorted(found)


def test_the_default_group_connects_through_the_chosen_interface():
    """That is the loopback's address on one host, else the one from which this host reaches its master."""
    own = own_addresses()
    others = [address for address in own if not address.startswith("127.")]
    for local, address in [("2", "127.0.0.1"), *(("1", address) for address in others[:1])]:
        master = others[0] if others else "127.0.0.1"  # on one host it does not matter
        assert processes(2, _connected_addresses, local, master) == [(own[address], [address])] * 2
