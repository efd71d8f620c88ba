"""Rehearse several machines on one: network namespaces, joined by a relay with rates, latencies and cuts.

    python -m tools.hosts 8 -- torchrun --nproc-per-node 1 train.py --stages 8
    python -m tools.hosts 8 --mbit 200 --slow 5=20 -- torchrun ...     links of 200 Mbit/s, host 5's of 20
    python -m tools.hosts 8 --latency 25 --latency 2-5=80 -- ...       25 ms one way, 80 between hosts 2 and 5
    python -m tools.hosts 8 --cpu 0.2 --cpu 5=0.07 -- torchrun ...     a fifth of a processor, host 5 less
    python -m tools.hosts 8 --cities -- torchrun ...                   the links between twelve cities
    python -m tools.hosts 8 --cut 3@10+15 -- torchrun ...              host 3 is cut off at 10 s, for 15 s
    python -m tools.hosts 8 --cut "3@step 20:" -- torchrun ...         for good, when node 0 prints "step 20:"
    python -m tools.hosts 8 --rate 2@30=5 --logs logs -- torchrun ...  host 2's link has 5 Mbit/s from 30 s on
    python -m tools.hosts 8 -- sh -c 'echo $NODE_RANK of $NNODES, node 0 is $MASTER_ADDR:$MASTER_PORT'

The tool starts the command on every host, in this directory. PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR and
PET_MASTER_PORT tell torchrun where it is: static rendezvous, where each host lives and dies by itself. The
tool shows node 0's output and returns its exit status. Of another host that fails, it shows the last lines.
Host I has one interface, e0, with the address 10.77.0.(I + 1), and reaches only the other hosts. Hosts share
the files. When a host never comes back, node 0's torchrun waits 300 s for it at the end. The tool needs
Linux, root, iproute2 and util-linux.

LINK in an option is a host (its link carries its rate each way), or a pair as 2-5. A pair's rate is a limit
beside those of its hosts' links. A pair's latency is its own, else the larger of its two hosts'.

However the tool ends, SIGKILL included, the kernel ends its hosts: each command's parent dies with the tool,
and a host's processes with the first of them. Namespaces and interfaces end with the last process in them.
"""
import argparse
import ctypes
import fcntl
import heapq
import itertools
import math
import os
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

LINGER = 20                 # seconds that the other hosts have to end once node 0 has ended
QUEUE = 0.1                 # seconds of packets that may wait for a link, which drops later ones
CGROUPS = Path("/sys/fs/cgroup")
# A command's parent dies with the tool, and the first process of a host's own tree with this parent.
JOIN = "setpriv --pdeathsig KILL nsenter --net={} unshare --pid --fork --kill-child --mount-proc sh -c"
# Waits for the end of the tool, then for the end of the processes in its control groups.
KEEPER = 'cat; for group; do while test -d $group && ! rmdir $group; do sleep 0.05; done; done 2>/dev/null'


def network(function, *arguments):
    """Call unshare or setns of the C library (Python has them from 3.12 on) for this thread's network."""
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, function)(*arguments, 0x40000000):                     # CLONE_NEWNET
        raise OSError(f"no network of its own: {os.strerror(ctypes.get_errno())}")


def enter(path):
    """Move this thread, and the processes it starts from now on, to a host: one of Hosts.networks."""
    with open(path) as file:
        network("setns", file.fileno())


def plug(host):
    """Move this thread to a new network with an interface, e0: files of the network and of e0's packets."""
    network("unshare")
    with suppress(OSError):                                 # or Gloo might choose a link-local address
        Path("/proc/sys/net/ipv6/conf/default/disable_ipv6").write_text("1")
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, 0x400454CA, struct.pack("16sH22x", b"e0", 0x5001))     # TUNSETIFF: TUN, NO_PI, VNET_HDR
    # TCP hands over up to 64 KB at once, as to a real network card, but still reckons in 1500 bytes.
    fcntl.ioctl(tun, 0x400454D0, 3)                                         # TUNSETOFFLOAD: CSUM, TSO4
    lines = f"link set lo up\naddress add 10.77.0.{host + 1}/24 dev e0\nlink set e0 txqueuelen 1000 up\n"
    subprocess.run(["ip", "-batch", "-"], input=lines, text=True, check=True)
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY), tun


def limit(group, share):
    """Make a control group whose processes have this share of a processor. OSError where it cannot be."""
    quota = int(share * 20_000)                             # microseconds of every 20 ms
    group.mkdir()
    if group.parent == CGROUPS:                             # version 2
        (CGROUPS / "cgroup.subtree_control").write_text("+cpu")
        (group / "cpu.max").write_text(f"{quota} 20000")
    else:
        (group / "cpu.cfs_period_us").write_text("20000")
        (group / "cpu.cfs_quota_us").write_text(str(quota))


class Hosts:
    """`with Hosts(4, mbit={(): 200, (3,): 20}, latency={(1, 2): 5}) as hosts:` four machines.

    Keys of the tables: () all hosts, (host,) one, (host, other) a pair, ascending. mbit: Mbit/s, 0 for as
    fast as the relay carries. latency: milliseconds one way. cpu: processors. networks: each host's path for
    `enter`. bytes: [sent, received] by each host, with IP and TCP headers. OSError where this machine cannot
    be several.
    """

    def __init__(self, count, mbit=(), latency=(), cpu=()):
        if sys.platform != "linux" or os.geteuid():
            raise OSError("several hosts on one machine need Linux and root")
        places = [place for place in (CGROUPS / "cpu", CGROUPS) if (place / "cgroup.procs").exists()]
        if cpu and not places:
            raise OSError(f"--cpu: no control groups, version 1 or 2, in {CGROUPS}")
        self.mbit, self.latency, cpu = {(): 200, **dict(mbit)}, {(): 0, **dict(latency)}, dict(cpu)
        self.silent = [0.0] * count         # until when each host is cut off
        self.free = defaultdict(float)      # link: when the last packet booked on it will have passed
        self.waiting, self.number = [], itertools.count()
        self.bytes = [[0, 0] for _ in range(count)]
        self.started, self.closing = [], False
        with ThreadPoolExecutor(1) as thread:                   # this one stays where it is
            self.files, self.tuns = zip(*thread.map(plug, range(count)))
        self.networks = [f"/proc/{os.getpid()}/fd/{file}" for file in self.files]
        shares = {host: cpu.get((host,), cpu.get(())) for host in range(count)}
        names = [f"hosts.{os.getpid()}.{file}" for file in self.files]
        self.groups = {host: places[0] / names[host] for host in shares if shares[host]}
        # in a session of its own, as the commands: Ctrl-C at the terminal is for the tool alone
        argv = ["sh", "-c", KEEPER, "sh", *self.groups.values()]
        self.keeper = subprocess.Popen(argv, stdin=subprocess.PIPE, start_new_session=True)
        for host, group in self.groups.items():
            limit(group, shares[host])
        self.relay = threading.Thread(target=self.carry, daemon=True)
        self.relay.start()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for process in self.started:
            process.kill()
            process.wait()
        self.keeper.communicate()
        self.closing = True
        self.relay.join()
        for file in self.files + self.tuns:
            os.close(file)

    def start(self, host, argv, **options):
        """A subprocess.Popen on the host, whose processes end with this thread."""
        group = f"{self.groups[host]}/cgroup.procs" if host in self.groups else "/dev/null"
        join = [*JOIN.format(self.networks[host]).split(), 'echo 0 > "$0" && exec "$@"', group]
        self.started.append(subprocess.Popen([*join, *argv], start_new_session=True, **options))
        return self.started[-1]

    def cut(self, hosts, seconds=math.inf):
        """Silence, in both directions; 0 seconds end it. e0 stays up, as when something far away fails."""
        for host in hosts:
            self.silent[host] = time.monotonic() + seconds

    def rate(self, key, mbit):
        self.mbit[key] = mbit

    def journey(self, packet, source, target):
        """Carry a packet over its links; yields the moments at which it has passed them. May lose it."""
        now, size, pair = time.monotonic(), len(packet) - 10, tuple(sorted((source, target)))
        up, down = (self.mbit.get((host,), self.mbit[()]) for host in (source, target))
        delay = max(self.latency.get((host,), self.latency[()]) for host in pair)
        delay = self.latency.get(pair, delay) / 1000
        way = (source, target)
        links = (("up", source), up, 0), (way, self.mbit.get(pair, 0), delay), (("down", target), down, 0)
        for link, mbit, seconds in links:
            begin = max(now, self.free[link])
            if begin > now + QUEUE:
                return
            self.free[link] = begin + (size * 8e-6 / mbit if mbit else 0)
            now = self.free[link] + seconds
            yield now
            if time.monotonic() < max(self.silent[source], self.silent[target]):
                return
        self.bytes[target][1] += size
        with suppress(OSError):                             # e0 is down
            os.write(self.tuns[target], packet)

    def take(self, source):
        """Read the packets that a host has sent; their journeys are due at once."""
        with suppress(BlockingIOError):
            for _ in range(1000):                           # as many as e0 holds back
                packet = os.read(self.tuns[source], 70_000)
                self.bytes[source][0] += len(packet) - 10
                target = packet[29] - 1
                if packet[26:29] == bytes([10, 77, 0]) and 0 <= target < len(self.tuns):
                    journey = self.journey(packet, source, target)
                    heapq.heappush(self.waiting, (0, next(self.number), journey))

    def carry(self):
        """The relay's thread."""
        with suppress(OSError):                             # a relay that waits for a processor slows links
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        while not self.closing:
            while self.waiting and self.waiting[0][0] <= time.monotonic():
                _, number, journey = heapq.heappop(self.waiting)
                for when in itertools.islice(journey, 1):
                    heapq.heappush(self.waiting, (when, number, journey))
            pause = self.waiting[0][0] - time.monotonic() if self.waiting else 0.05
            for tun in select.select(self.tuns, [], [], min(max(0, pause), 0.05))[0]:
                self.take(self.tuns.index(tun))


def refuse(text):
    print(f"error: {text}", file=sys.stderr)
    raise SystemExit(2)


def setting(text):
    """NUMBER or LINK=NUMBER: (key, number) of a table."""
    found = re.fullmatch(r"(?:(\d+)(?:-(\d+))?=)?(\d+\.?\d*)", text)
    return tuple(sorted(int(host) for host in (found[1], found[2]) if host)), float(found[3])


def moment(text):
    """Seconds, or bytes that node 0 is to print."""
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else text.encode()


def cut(text):
    found = re.fullmatch(r"(\d+)@(.+?)(?:\+(\d+\.?\d*))?", text)
    return moment(found[2]), "cut", (int(found[1]),), float(found[3] or "inf")


def rate(text):
    found = re.fullmatch(r"([\d-]+)@(.+)(=.+)", text)
    return moment(found[2]), "rate", *setting(found[1] + found[3])


def run(hosts, command, events, logs):
    """The command on all hosts until they have ended, or node 0 has for LINGER seconds; node 0's status.

    events: a list of (when, method of Hosts, its arguments ...); when: seconds, or bytes that node 0 prints.
    """
    nodes, shown, begun, until = [], 0, time.monotonic(), math.inf
    for host, log in enumerate(logs):
        place = dict(NNODES=len(logs), NODE_RANK=host, MASTER_ADDR="10.77.0.1", MASTER_PORT=29500)
        # torchrun reads PET_*. Python would hold lines back that a --cut may wait for.
        place = {prefix + name: str(value) for name, value in place.items() for prefix in ("", "PET_")}
        outputs = dict(stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        environment = {"PYTHONUNBUFFERED": "1", **os.environ, **place}
        nodes.append(hosts.start(host, command, env=environment, **outputs))
    running = dict(enumerate(nodes))
    while running and time.monotonic() - begun < until:
        time.sleep(0.02)
        for host in [host for host in running if nodes[host].poll() is not None]:
            status = running.pop(host).returncode
            if host == 0:
                until = time.monotonic() - begun + LINGER
            elif status:
                lines = tail(logs[host]).decode(errors="replace").splitlines()[-40:]
                print(f"host {host} ended with status {status}:", *lines, sep="\n", file=sys.stderr)
        shown += sys.stdout.buffer.write(os.pread(logs[0].fileno(), 2**24, shown))
        sys.stdout.flush()
        happen(hosts, events, time.monotonic() - begun, tail(logs[0]))
    for host in running:
        print(f"hosts: host {host} has not ended {LINGER} s after node 0, and is stopped", file=sys.stderr)
    return nodes[0].returncode


def happen(hosts, events, now, printed):
    """Do what is due, or waited for in what node 0 has printed."""
    for event in list(events):
        when, what, *details = event
        if when in printed if isinstance(when, bytes) else when <= now:
            events.remove(event)
            getattr(hosts, what)(*details)
            print(f"hosts: {now:.1f} s:", what, *details, file=sys.stderr)


def tail(log, size=100_000):
    return os.pread(log.fileno(), size, max(0, os.fstat(log.fileno()).st_size - size))


def between_cities(count):
    """Tables (Mbit/s, milliseconds) of hosts that go round the twelve cities of SkipPipe's released code."""
    from planning.instance import CITIES, city_links
    links, mbit, latency = city_links(), {(): 0}, {}
    for pair in itertools.combinations(range(count), 2):
        cities = tuple(CITIES[host % len(CITIES)] for host in pair)
        seconds, speed = links.get(cities, (0.001, 2 * 2**30))              # within a city 1 ms, 2 GiB/s
        mbit[pair], latency[pair] = speed * 8e-6, seconds * 1000
    return mbit, latency


def read(arguments):
    parser = argparse.ArgumentParser("tools.hosts", description=__doc__)
    parser.formatter_class, parser.error = argparse.RawTextHelpFormatter, refuse
    parser.add_argument("hosts", type=int)
    table = dict(type=setting, action="append", default=[])
    parser.add_argument("--mbit", **table, help="rate of links (200); 0: as fast as the relay carries")
    parser.add_argument("--slow", **table, metavar="LINK=MBIT")
    parser.add_argument("--latency", **table, metavar="[LINK=]MILLISECONDS")
    parser.add_argument("--cpu", **table, metavar="[HOST=]PROCESSORS")
    parser.add_argument("--cities", action="store_true", help="links between cities; then --mbit is 0")
    events = dict(action="append", dest="events", default=[])
    parser.add_argument("--cut", type=cut, **events, metavar="HOST@WHEN[+SECONDS]")
    parser.add_argument("--rate", type=rate, **events, metavar="LINK@WHEN=MBIT")
    parser.add_argument("--logs", type=Path, help="folder for every host's output, hostI.log")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    if not 2 <= options.hosts <= 200:
        refuse(f"{options.hosts} hosts: it must be 2 to 200")
    options.mbit += options.slow
    keys = [key for key, _ in options.mbit + options.latency + options.cpu]
    for key in keys + [event[2] for event in options.events]:
        if len(set(key)) < len(key) or any(host >= options.hosts for host in key):
            refuse(f"hosts {key}: a host is 0 to {options.hosts - 1}, a pair has two")
    if () in dict(options.slow) or any(len(key) > 1 or share < 0.05 for key, share in options.cpu):
        refuse("--slow takes LINK=MBIT, --cpu a number from 0.05 on or HOST=NUMBER")
    if not shutil.which(options.command[0]):
        refuse(f"no command {options.command[0]}")
    mbit, latency = between_cities(options.hosts) if options.cities else ({}, {})
    options.tables = {**mbit, **dict(options.mbit)}, {**latency, **dict(options.latency)}, dict(options.cpu)
    return options


def main():
    options = read(sys.argv[1:])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    try:
        folder, names = options.logs, [f"host{host}.log" for host in range(options.hosts)]
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
        logs = [open(folder / name, "w+b") if folder else tempfile.TemporaryFile() for name in names]
        with Hosts(options.hosts, *options.tables) as hosts:
            status = run(hosts, options.command, options.events, logs)
    except OSError as error:
        refuse(error)
    sys.exit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
    main()
