"""noloco.py beyond the equations: what it refuses, the README's example, Gloo's network interface."""

import contextlib
import io
import os
import re
import shutil
import socket
import subprocess

import pytest
import torch
import torch.distributed as dist

from noloco import NoLoCo, gloo_interface
from tests.harness import HERE, processes


def test_noloco_notices_moved_parameters():
    model = torch.nn.Linear(4, 4)
    outer = NoLoCo(model.parameters(), inner_steps=1)
    model.weight.data = model.weight.data.clone()  # what .to() does
    with pytest.raises(RuntimeError, match="moved"):
        outer.step()


def _readme_optimizer_example(rank, world):
    block = next(
        b
        for b in re.findall(r"```python\n(.*?)```", (HERE / "README.md").read_text(), re.S)
        if "outer = NoLoCo(" in b
    )
    scope, out = {}, io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(block, scope)
    return out.getvalue(), scope["outer"].steps, scope["model"].weight.tolist()


def test_readme_optimizer_example_learns_its_target():
    """A loop as torchrun runs it: every rank's weights come near those that they should be.

    With two replicas they are equal.
    """
    (first, steps, weights), (second, _, others) = processes(2, _readme_optimizer_example)
    assert first.startswith("rank 0: loss 0.0") and second.startswith("rank 1: loss 0.0") and steps == 400
    assert weights == others and torch.allclose(torch.tensor(weights), torch.ones(1, 8), rtol=0, atol=0.05)


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


def launch(monkeypatch, local, world, master):
    """As torchrun starts a process: no interface given."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # so that what it sets is undone
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    monkeypatch.setenv("WORLD_SIZE", world)
    monkeypatch.setenv("MASTER_ADDR", master)


@pytest.mark.parametrize("names", ["eth7", "eth7,ib3", ""])
@pytest.mark.parametrize("local", ["2", "4"])
def test_gloo_interface_keeps_what_is_set(names, local, monkeypatch):
    launch(monkeypatch, local, "4", "127.0.0.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", names)
    assert gloo_interface() == os.environ["GLOO_SOCKET_IFNAME"] == names


@pytest.mark.parametrize("master", ["127.0.0.1", "198.51.100.7", "no-such-host.invalid", None])
def test_gloo_interface_of_one_host_is_the_loopback_whatever_the_master(master, monkeypatch):
    launch(monkeypatch, "4", "4", master or "127.0.0.1")
    if master is None:
        monkeypatch.delenv("MASTER_ADDR")
    loopback = own_addresses()["127.0.0.1"]
    assert gloo_interface() == os.environ["GLOO_SOCKET_IFNAME"] == loopback


def test_gloo_interface_of_several_hosts_reaches_the_master(monkeypatch):
    """Each address of this host, and one that is elsewhere where there is a way to it.

    The oracle is the system's routing table: the interface that has the address which it would send from.
    """
    own = own_addresses()
    for master in (*own, "198.51.100.7"):
        launch(monkeypatch, "2", "4", master)
        (route,) = ip("route", "get", master) or [[]]
        if "src" in route:
            want = own[route[route.index("src") + 1]]
            assert gloo_interface() == os.environ["GLOO_SOCKET_IFNAME"] == want
        else:
            assert master not in own
            with pytest.raises(OSError):
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
