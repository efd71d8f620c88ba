"""tools/hosts.py. The oracles: sockets and clocks inside hosts; what /proc and control groups still show.

These tests are `alone` (make faults): they measure rates and times, to which other tests' work would add, and
they look for network namespaces that other tests make too. Work that is no test's only makes them try more
often.
"""
import functools
import math
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from planning.instance import city_links
from tests.harness import HERE, patience, slowness, wait_until
from tools import hosts as tool
from tools.hosts import Hosts, enter, read

TOOL = [sys.executable, "-m", "tools.hosts"]
pytestmark = pytest.mark.alone
UDP, TCP = socket.SOCK_DGRAM, socket.SOCK_STREAM
# processor time, not work: processors of a shared machine are not equally fast
COUNT = """import time
begin = float(input())
time.sleep(begin - time.time())
before = time.process_time()
while time.time() < begin + 1: pass
print(int(1e6 * (time.process_time() - before)))"""


@pytest.fixture(scope="module", autouse=True)
def able():
    """Skip where this machine cannot be several, unless it is the one that must test this."""
    try:
        with Hosts(2, cpu={(): 0.5}):
            pass
    except OSError as error:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(str(error))


def run(*arguments):
    return subprocess.run([*TOOL, *arguments], cwd=HERE, capture_output=True, text=True,
                          timeout=patience(60))


def left():
    """The network namespaces of all processes, and the tool's control groups."""
    found = set(tool.CGROUPS.glob("**/hosts.*"))
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):         # it ended meanwhile
            found.add(os.readlink(process / "ns/net"))
    return found


def socket_on(hosts, host, kind):
    """A bound socket. It stays in the network where a thread, which then ends, has made it."""
    def make():
        enter(hosts.networks[host])
        return socket.socket(socket.AF_INET, kind)

    with ThreadPoolExecutor(1) as thread:
        made = thread.submit(make).result()
    if kind == TCP:         # every kernel has reno; what others make of losses is not the tool's
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
    made.settimeout(patience(20))
    made.bind((f"10.77.0.{host + 1}", 0))
    return made


def connected(hosts, one, other):
    client = socket_on(hosts, one, TCP)
    with socket_on(hosts, other, TCP) as server:
        server.listen()
        client.connect(server.getsockname())
        return client, server.accept()[0]


def goodput(hosts, pairs, seconds=0.5):
    """Mbit/s over TCP to each pair's second host: the median of three spans, after a second."""
    begin = time.monotonic() + 1

    def send(client):
        while time.monotonic() < begin + 3 * seconds:
            client.sendall(bytes(100_000))
        client.close()

    def receive(server):
        sizes = Counter()
        while text := server.recv(1_000_000):
            sizes[(time.monotonic() - begin) // seconds] += len(text)
        return statistics.median(sizes[span] for span in range(3)) * 8e-6 / seconds

    ends = [connected(hosts, *pair) for pair in pairs]
    with ThreadPoolExecutor(2 * len(pairs)) as threads:
        for client, _ in ends:
            threads.submit(send, client)
        results = [threads.submit(receive, server) for _, server in ends]
    return [result.result() for result in results]


def within(tolerance, wanted, measure, *args):
    """Whether one of a few measurements is `wanted`: other work on the machine disturbs single ones.

    There are up to four, and so many times more as tests are slower here now.
    """
    tries = math.ceil(4 * slowness())
    return any(measure(*args) == pytest.approx(wanted, rel=tolerance) for _ in range(tries))


def round_trip(hosts, one, other):
    """Milliseconds, the least of 8: what is not the network's only adds."""
    ends = [socket_on(hosts, host, UDP) for host in (one, other)]
    times = []
    for _ in range(8):
        begin = time.monotonic()
        exchange(*ends)
        times.append(1000 * (time.monotonic() - begin))
    return min(times)


def exchange(one, other, text=b"ping"):
    """What each of two sockets sends arrives at the other."""
    for here, there in ((one, other), (other, one)):
        here.sendto(text, there.getsockname())
        assert there.recv(100) == text


def test_hosts_reach_each_other_and_nobody_else():
    with Hosts(2) as hosts, socket.create_server(("", 0)) as outside:
        client, server = connected(hosts, 0, 1)
        with client, server:
            client.sendall(b"hello")
            assert server.recv(5) == b"hello" and server.getpeername()[0] == "10.77.0.1"
        for address in ("127.0.0.1", "192.0.2.1"):          # its own loopback; the world
            with socket_on(hosts, 0, TCP) as client, pytest.raises(OSError):
                client.connect((address, outside.getsockname()[1]))
        outside.setblocking(False)
        with pytest.raises(BlockingIOError):                # nobody came
            outside.accept()


def test_round_trip_times_are_those_asked_for():
    with Hosts(5, latency={(): 20, (3,): 40, (1, 2): 60, (1, 3): 10}) as hosts:
        for pair, latency in {(0, 1): 20, (3, 0): 40, (2, 1): 60, (1, 3): 10}.items():
            assert within(0.1, 2 * latency, round_trip, hosts, *pair)


def test_goodput_is_the_rate_asked_for():
    with Hosts(4, mbit={(): 80, (3,): 8, (0, 2): 20}, latency={(): 5}) as hosts:
        assert within(0.1, [80, 80, 8], goodput, hosts, [(1, 0), (2, 1), (3, 2)])
        assert within(0.1, [20, 8], goodput, hosts, [(0, 2), (1, 3)])
        hosts.mbit[0,] = 40
        assert within(0.1, [40], goodput, hosts, [(1, 0)])


def half_over_full():
    """The processor time of a host with half the processors over that of another at that moment."""
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with Hosts(2, cpu={(): 0.2, (1,): 0.1}) as hosts:
        counts = [hosts.start(host, [sys.executable, "-c", COUNT], **pipes) for host in (0, 1)]
        begin = f"{time.time() + 0.5}\n"
        with ThreadPoolExecutor(2) as threads:
            full, half = threads.map(lambda count: int(count.communicate(begin)[0]), counts)
    return half / full


def test_half_the_processors_compute_half_as_long():
    assert within(0.15, 0.5, half_over_full)


def test_control_groups_of_version_2_and_none(monkeypatch, tmp_path):
    monkeypatch.setattr(tool, "CGROUPS", tmp_path)
    with pytest.raises(OSError, match="^--cpu: no control groups, version 1 or 2, in"):
        Hosts(2, cpu={(): 0.5})
    tool.limit(tmp_path / "x", 0.25)
    assert (tmp_path / "x/cpu.max").read_text() == "5000 20000"
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+cpu"


def test_cut_drops_both_directions_until_restored():
    with Hosts(3, mbit={(): 100, (1,): 50}) as hosts:
        ends = [socket_on(hosts, host, UDP) for host in range(3)]
        exchange(ends[0], ends[1], b"before")
        hosts.cut(1)
        for here, there in (ends[:2], ends[1::-1]):
            here.sendto(b"lost", there.getsockname())
        exchange(ends[0], ends[2], b"meanwhile")            # the others go on
        hosts.mbit[1,] = 20
        hosts.cut(1, 0)
        exchange(ends[0], ends[1], b"after")        # had "lost" only been late, it would come first


@pytest.mark.parametrize("command, number, status", [
    ("exit 0", None, 0), ("exit 3", None, 3),
    ("echo here; sleep 1000", signal.SIGINT, 130),
    ("echo here; sleep 1000 & wait", signal.SIGTERM, -15),
    ("echo here; setsid sleep 1000 & wait", signal.SIGKILL, -9),
])
def test_nothing_is_left_behind(command, number, status):
    before = left()
    argv = [*TOOL, "2", "--cpu", "0.5", "--", "sh", "-c", command]
    # A shell's background jobs ignore SIGINT, and so would the tool if these tests run in one.
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(argv, cwd=HERE, stdout=subprocess.PIPE, preexec_fn=heed) as process:
        try:
            if number:
                assert process.stdout.readline() == b"here\n"
                wait_until(lambda: len(left() - before) >= 4)   # two networks, two control groups
                process.send_signal(number)
            assert process.wait(patience(60)) == status
        finally:
            process.kill()
    wait_until(lambda: left() <= before)


def test_every_host_is_told_where_it_is():
    words = "$PET_NNODES $PET_NODE_RANK $PET_MASTER_ADDR $PET_MASTER_PORT"
    done = run("2", "--", "sh", "-c", f"echo {words}; echo {words} >&2; exit $PET_NODE_RANK")
    told = [f"2 {host} 10.77.0.1 29500" for host in range(2)]
    assert (done.returncode, done.stdout) == (0, told[0] + "\n")
    assert sorted(done.stderr.splitlines()) == [*told, "host 1 ended with status 1"]


@pytest.mark.parametrize("hosts", [2, 3])
def test_hosts_share_the_cores_unless_the_variable_is_set(hosts, monkeypatch):
    """torchrun sets it only for several processes; each host would have a thread for each core."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    share = max(1, len(os.sched_getaffinity(0)) // hosts)
    assert run(str(hosts), "--", "sh", "-c", "echo $OMP_NUM_THREADS").stdout == f"{share}\n"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert run(str(hosts), "--", "sh", "-c", "echo $OMP_NUM_THREADS").stdout == "7\n"


def test_a_host_that_is_not_there_is_blamed_on_the_option_that_was_typed():
    for option in ("--slow", "--mbit"):
        done = run("2", option, "9=3", "--", "true")
        line = f"error: {option} 9=3: a host is 0 to 1, a pair has two\n"
        assert (done.returncode, done.stdout, done.stderr) == (2, "", line)


def test_cities():
    options = read("14 --cities --mbit 5=20 --latency 0-1=7 -- true".split())
    mbit, latency = options.tables["mbit"], options.tables["latency"]
    seconds, speed = city_links()["Belgium", "Germany"]
    assert (mbit[0, 2], latency[0, 2]) == (speed * 8e-6, seconds * 1000)
    assert (mbit[()], mbit[5,], latency[0, 1], latency[0, 12]) == (0, 20, 7, 1)
    assert (latency[2, 12], mbit[2, 12]) == (latency[0, 2], mbit[0, 2])
