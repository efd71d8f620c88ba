"""tools/hosts.py. The oracle is the kernel: who hears whom, and which networks /proc still shows."""
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tools.hosts import Hosts, missing, read

ROOT = Path(__file__).parents[1]
TOOL = [sys.executable, "-m", "tools.hosts"]


@pytest.fixture(scope="module")
def able():
    """Skip where this machine cannot be several, unless it is the one that must test this."""
    reason = missing()
    if reason and os.environ.get("CI"):
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)


def run(*arguments):
    return subprocess.run([*TOOL, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)


def networks():
    """The network namespaces of all processes."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            found.add(os.readlink(process / "ns/net"))
        except OSError:                 # ended meanwhile
            pass
    return found


def socket_on(hosts, host, kind):
    """A socket stays in the network where it was made: a thread goes there, makes it, and ends."""
    def make():
        hosts.enter(host)
        return socket.socket(socket.AF_INET, kind)

    with ThreadPoolExecutor(1) as thread:
        made = thread.submit(make).result()
    made.settimeout(20)
    return made


def test_hosts_reach_each_other_and_nobody_else(able):
    tcp = socket.SOCK_STREAM
    with Hosts(2) as hosts, socket.create_server(("", 0)) as outside:
        with socket_on(hosts, 1, tcp) as server, socket_on(hosts, 0, tcp) as client:
            server.bind((hosts.address(1), 0))
            server.listen()
            client.connect(server.getsockname())
            client.sendall(b"hello")
            accepted, (address, _) = server.accept()
            with accepted:
                assert accepted.recv(5) == b"hello"
            assert address == hosts.address(0)
            assert min(hosts.bytes(0)) > 100
        port = outside.getsockname()[1]
        for address in ("127.0.0.1", "192.0.2.1"):          # its own loopback; the world
            with socket_on(hosts, 0, tcp) as client, pytest.raises(OSError):
                client.connect((address, port))
        outside.setblocking(False)
        with pytest.raises(BlockingIOError):                # nobody came
            outside.accept()


def test_cut_drops_both_directions_until_restored(able):
    with Hosts(3, mbit=100, slow={1: 50}) as hosts:
        ends = [socket_on(hosts, host, socket.SOCK_DGRAM) for host in range(3)]
        for host, end in enumerate(ends):
            end.bind((hosts.address(host), 7000))

        def send(text, sender, receiver):
            ends[sender].sendto(text, (hosts.address(receiver), 7000))

        def exchange(text, one, other):
            send(text, one, other)
            assert ends[other].recv(100) == text
            send(text, other, one)
            assert ends[one].recv(100) == text

        exchange(b"before", 0, 1)
        hosts.cut(1)
        send(b"lost", 0, 1)
        send(b"lost", 1, 0)
        exchange(b"meanwhile", 0, 2)                        # the others go on
        hosts.rate(1, 20)
        hosts.restore(1)
        exchange(b"after", 0, 1)                            # had "lost" only been late, it would come first
        for end in ends:
            end.close()


@pytest.mark.parametrize("command, number, status", [
    ("exit 0", None, 0),
    ("exit 3", None, 3),
    ("echo here; sleep 1000", signal.SIGINT, 130),
    ("echo here; sleep 1000 & wait", signal.SIGTERM, 143),
    ("echo here; sleep 1000 & wait", signal.SIGKILL, -9),
])
def test_nothing_is_left_behind(able, command, number, status):
    before = networks()
    with subprocess.Popen([*TOOL, "2", "--", "sh", "-c", command], cwd=ROOT, stdout=subprocess.PIPE) as tool:
        try:
            if number:
                assert tool.stdout.readline() == b"here\n"
                assert len(networks() - before) >= 3        # two hosts and the switch
                tool.send_signal(number)
            assert tool.wait(60) == status
        finally:
            tool.kill()
    deadline = time.monotonic() + 30
    while networks() - before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert networks() <= before


def test_torchrun_is_told_where_it_is(able, tmp_path):
    torchrun = tmp_path / "torchrun"
    torchrun.write_text('#!/bin/sh\necho "$@"\nexit $NODE_RANK\n')
    torchrun.chmod(0o755)
    done = run("2", "--logs", str(tmp_path), "--", str(torchrun), "--nproc-per-node", "1", "train.py")
    told = "--nnodes 2 --node-rank {} --master-addr 10.77.0.1 --master-port 29500 --nproc-per-node 1 train.py"
    told = [told.format(host) + "\n" for host in range(2)]
    assert done.returncode == 0
    assert done.stdout == told[0]
    assert done.stderr == "host 1 ended with status 1:\n" + told[1]
    assert [(tmp_path / f"host{host}.log").read_text() for host in range(2)] == told


def test_what_node_0_prints_sets_things_off(able):
    events = ["--cut", "2@step 1:+0", "--rate", "1@0=5", "--cut", "1@step 2:"]
    done = run("3", *events, "--", "sh", "-c", "echo step 1:")
    lines = sorted(line.split(" s: ")[1] for line in done.stderr.splitlines())
    assert lines == ["host 1 at 5 Mbit/s", "host 2 back", "host 2 cut off"]


@pytest.mark.parametrize("arguments", [
    "", "4", "4 --", "1 -- true", "201 -- true", "x -- true", "4 --mbit -1 -- true", "4 --slow 4=2 -- true",
    "4 --slow 2 -- true", "4 --cut 3 -- true", "4 --cut 4@1 -- true", "4 --rate 3@1 -- true", "4 -- no-such",
])
def test_bad_arguments_give_one_line(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        read(arguments.split())
    error = capsys.readouterr().err
    assert stopped.value.code == 2
    assert error.startswith("error: ") and error.count("\n") == 1
