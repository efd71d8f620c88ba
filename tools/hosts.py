"""Rehearse several machines on one: network namespaces, joined by a relay with rates, latencies and cuts.

    python -m tools.hosts 8 -- torchrun --nproc-per-node 1 train.py --stages 8
    python -m tools.hosts 8 --mbit 200 --slow 5=20 -- torchrun ...     links of 200 Mbit/s, host 5's of 20
    python -m tools.hosts 8 --latency 25 --latency 2-5=80 -- ...       25 ms one way, 80 between hosts 2 and 5
    python -m tools.hosts 8 --cpu 0.2 --cpu 5=0.07 -- torchrun ...     a fifth of a processor, host 5 less
    python -m tools.hosts 8 --cities -- torchrun ...                   the links between twelve cities
    python -m tools.hosts 8 --cut 3@10+15 -- torchrun ...              host 3 is cut off at 10 s, for 15 s
    python -m tools.hosts 8 --cut "3@step 20:" -- torchrun ...         for good, when node 0 prints "step 20:"
    python -m tools.hosts 8 --rate 2@30=5 -- torchrun ...              host 2's link has 5 Mbit/s from 30 s on
    python -m tools.hosts 8 -- sh -c 'train.sh > $PET_NODE_RANK.log'   a log of each host's own

The tool starts the command on every host, in this directory. PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR and
PET_MASTER_PORT tell torchrun where it is: static rendezvous, where each host lives and dies by itself. The
tool shows node 0's output and what every host writes to stderr, and returns node 0's exit status. Then other
hosts have 20 s to end. Host I has one interface, e0, with the address 10.77.0.(I + 1), and reaches
only the other hosts. Hosts share the files. Node 0's torchrun waits at the end up to 300 s for a host that
never comes back. The tool needs Linux, root, iproute2 and util-linux.

LINK is a host (its link carries its rate each way), or a pair as 2-5. A pair's rate is a limit beside those
of its hosts' links. A pair's latency is its own, else the larger of its two hosts'. WHEN is seconds after
the start, or a text in node 0's output.

However the tool ends, SIGKILL included, the kernel ends its hosts: each command's parent dies with the tool,
and a host's processes with the first of them. Namespaces and interfaces end with the last process in them.
"""
import argparse
import ctypes
import fcntl
import math
import os
import re
import sched
import select
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path

from planning.instance import city_tables

QUEUE = 0.1                 # seconds of packets that may wait for a link, which drops later ones
CGROUPS = Path("/sys/fs/cgroup")
# A command's parent dies with the tool, and the first process of a host's own tree with this parent.
JOIN = "setpriv --pdeathsig KILL nsenter --net={} unshare --pid --fork --kill-child --mount-proc sh -c"
# Waits for the end of the tool, then for the end of the processes in its control groups.
KEEPER = 'cat; for group; do while test -d $group && ! rmdir $group; do sleep 0.05; done; done 2>/dev/null'


def enter(path=None):
    """Move this thread, and the processes it starts from now on, to one of Hosts.networks, or a new network.

    (Python has these two calls of the C library from 3.12 on.)
    """
    libc, kind = ctypes.CDLL(None, use_errno=True), 0x40000000              # CLONE_NEWNET
    with open(path or "/proc/thread-self/ns/net") as file:
        failed = libc.setns(file.fileno(), kind) if path else libc.unshare(kind)
    if failed:
        raise OSError(f"no network of its own: {os.strerror(ctypes.get_errno())}")


def plug(host):
    """Move this thread to a new network with an interface, e0: files of the network and of e0's packets."""
    enter()
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, 0x400454CA, struct.pack("16sH22x", b"e0", 0x5001))     # TUNSETIFF: TUN, NO_PI, VNET_HDR
    # TCP hands over up to 64 KB at once, as to a real network card, but still reckons in 1500 bytes.
    fcntl.ioctl(tun, 0x400454D0, 3)                                         # TUNSETOFFLOAD: CSUM, TSO4
    lines = f"link set lo up\naddress add 10.77.0.{host + 1}/24 dev e0\nlink set e0 txqueuelen 1000 up\n"
    subprocess.run(["ip", "-batch", "-"], input=lines, text=True, check=True)
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY), tun


def limit(group, share):
    """Make a control group whose processes have this share of a processor. OSError where it cannot be."""
    group.mkdir()
    quota = int(share * 20_000)                             # microseconds of every 20 ms
    if group.parent == CGROUPS:                             # version 2
        (CGROUPS / "cgroup.subtree_control").write_text("+cpu")
        (group / "cpu.max").write_text(f"{quota} 20000")
    else:
        (group / "cpu.cfs_period_us").write_text("20000")
        (group / "cpu.cfs_quota_us").write_text(str(quota))


def of_host(table, host):
    return table.get((host,), table.get(()))


class Hosts(AbstractContextManager):
    """`with Hosts(4, mbit={(): 200, (3,): 20}, latency={(1, 2): 5}) as hosts:` four machines.

    Keys of the tables: () all hosts, (host,) one, (host, other) a pair, ascending. mbit: Mbit/s, 0 for as
    fast as the relay carries. latency: milliseconds one way. cpu: processors. networks: each host's path for
    `enter`. Raises OSError where this machine cannot be several.
    """

    def __init__(self, count, mbit=(), latency=(), cpu=()):
        if sys.platform != "linux" or os.geteuid():
            raise OSError("several hosts on one machine need Linux and root")
        places = [place for place in (CGROUPS / "cpu", CGROUPS) if (place / "cgroup.procs").exists()]
        if cpu and not places:
            raise OSError(f"--cpu: no control groups, version 1 or 2, in {CGROUPS}")
        self.mbit, self.latency, cpu = {(): 200, **dict(mbit)}, {(): 0, **dict(latency)}, dict(cpu)
        self.count, self.silent = count, [0.0] * count      # until when each host is cut off
        self.free = {}                      # link: when the last packet booked on it will have passed
        self.packets = sched.scheduler(time.monotonic, lambda seconds: None)
        self.started = []
        with ThreadPoolExecutor(1) as thread:                   # this one stays where it is
            self.files, self.tuns = zip(*thread.map(plug, range(count)))
        self.networks = [f"/proc/{os.getpid()}/fd/{file}" for file in self.files]
        self.groups = {host: places[0] / f"hosts.{os.getpid()}.{file}"
                       for host, file in enumerate(self.files) if of_host(cpu, host)}
        # in a session of its own, as the commands: Ctrl-C at the terminal is for the tool alone
        argv = ["sh", "-c", KEEPER, "sh", *self.groups.values()]
        self.keeper = subprocess.Popen(argv, stdin=subprocess.PIPE, start_new_session=True)
        for host, group in self.groups.items():
            limit(group, of_host(cpu, host))
        self.relay = threading.Thread(target=self.carry, daemon=True)
        self.relay.start()

    def __exit__(self, *error):
        for process in self.started:
            process.kill()
            process.wait()
        self.keeper.communicate()
        self.relay.join()
        for file in self.files + self.tuns:
            os.close(file)

    def start(self, host, argv, **options):
        """A subprocess.Popen on the host, whose processes end with this thread."""
        group = f"{self.groups[host]}/cgroup.procs" if host in self.groups else "/dev/null"
        join = [*JOIN.format(self.networks[host]).split(), 'echo 0 > "$0" && exec "$@"', group]
        self.started.append(subprocess.Popen([*join, *argv], start_new_session=True, **options))
        return self.started[-1]

    def cut(self, key, seconds=math.inf):
        """Silence a host in both directions; 0 seconds end it. e0 stays up: the fault is far away."""
        self.silent[key[0]] = time.monotonic() + seconds

    def journey(self, packet, source, target):
        """Carry a packet over its links; yields the moments at which it has passed them. May lose it."""
        now, size, way = time.monotonic(), len(packet) - 10, (source, target)
        pair = tuple(sorted(way))
        delay = self.latency.get(pair, max(of_host(self.latency, host) for host in pair)) / 1000
        links = ((("up", source), of_host(self.mbit, source), 0), (way, self.mbit.get(pair, 0), delay),
                 (("down", target), of_host(self.mbit, target), 0))
        for link, mbit, seconds in links:
            begin = max(now, self.free.get(link, 0.0))
            if begin > now + QUEUE:
                return
            self.free[link] = begin + (size * 8e-6 / mbit if mbit else 0)
            now = self.free[link] + seconds
            yield now
            if time.monotonic() < max(self.silent[source], self.silent[target]):
                return
        with suppress(OSError):                             # e0 is down
            os.write(self.tuns[target], packet)

    def go_on(self, journey):
        """Over the next link."""
        if when := next(journey, None):
            self.packets.enterabs(when, 0, self.go_on, (journey,))

    def carry(self):
        """The relay's thread: reads what hosts send, a packet a time, and moves packets that are due."""
        with suppress(OSError):                             # a relay that waits for a processor slows links
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        while self.keeper.returncode is None:
            pause = self.packets.run(blocking=False)        # until the next packet is due
            for tun in select.select(self.tuns, [], [], 0.05 if pause is None else min(pause, 0.05))[0]:
                packet, source = os.read(tun, 70_000), self.tuns.index(tun)
                if packet[26:29] == bytes([10, 77, 0]) and 0 < packet[29] <= len(self.tuns):
                    self.go_on(self.journey(packet, source, packet[29] - 1))


# ---- a command on all hosts


def run(hosts, command, events):
    """Run the command on all hosts, until at most 20 s after node 0's has ended. Returns node 0's status.

    events: those of `read`.
    """
    # torchrun reads PET_*. Python would hold back lines that a --cut may wait for.
    environment = {"PYTHONUNBUFFERED": "1", **os.environ, "PET_NNODES": str(hosts.count),
                   "PET_MASTER_ADDR": "10.77.0.1", "PET_MASTER_PORT": "29500"}
    nodes = [hosts.start(host, command, env={**environment, "PET_NODE_RANK": str(host)},
                         stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL if host else subprocess.PIPE)
             for host in range(hosts.count)]
    os.set_blocking(nodes[0].stdout.fileno(), False)
    begun, printed, status = time.monotonic(), b"", None
    while status is None:
        status = nodes[0].poll()
        new = nodes[0].stdout.read() or b""
        os.write(1, new)
        printed = printed[-100_000:] + new
        happen(hosts, events, time.monotonic() - begun, printed.decode(errors="replace"))
        time.sleep(0.02)
    last = time.monotonic() + 20
    for host, node in enumerate(nodes[1:], 1):
        with suppress(subprocess.TimeoutExpired):
            node.wait(max(0, last - time.monotonic()))
        if node.returncode != 0:                            # None: it goes on, and the tool stops it
            print(f"host {host} ended with status {node.returncode}", file=sys.stderr)
    return status


def happen(hosts, events, now, printed):
    """Do, and drop, the events that are due by the seconds since the start or by node 0's output."""
    for event in list(events):
        what, key, when, number = event
        if float(when) <= now if re.fullmatch(NUMBER, when) else when in printed:
            events.remove(event)
            print(f"hosts: {now:.1f} s:", what, key, number, file=sys.stderr)
            change = hosts.cut if what == "cut" else getattr(hosts, what).__setitem__
            change(key, number)


# ---- the command line

LINK, NUMBER = r"(?P<link>\d+(?:-\d+)?)", r"(?P<number>\d+\.?\d*)"
FORMS = {       # of an option's value: as --help shows it, and as a pattern
    "[LINK[@WHEN]=]NUMBER": rf"(?:{LINK}(?:@(?P<when>.+))?=)?{NUMBER}",
    "LINK[@WHEN]=NUMBER": rf"{LINK}(?:@(?P<when>.+))?={NUMBER}",
    "[HOST=]NUMBER": rf"(?:(?P<link>\d+)=)?{NUMBER}",
    "HOST@WHEN[+SECONDS]": rf"(?P<link>\d+)@(?P<when>.+?)(?:\+{NUMBER})?",
}


def refuse(text):
    print(f"error: {text}", file=sys.stderr)
    raise SystemExit(2)


def setting(form, text):
    """(key of a table of Hosts, WHEN or None, number) of a value."""
    found = re.fullmatch(FORMS[form], text)
    if not found:
        raise argparse.ArgumentTypeError(f"takes {form}, not {text} (see --help)")
    link, when, number = (found.groupdict().get(name) for name in ("link", "when", "number"))
    return tuple(sorted(map(int, link.split("-")))) if link else (), when, float(number or math.inf)


def read(arguments):
    """The options, with `tables` for Hosts, and `events`: [(table or cut, key, WHEN, number)]."""
    parser = argparse.ArgumentParser("tools.hosts", description=__doc__)
    parser.formatter_class, parser.error = argparse.RawTextHelpFormatter, refuse

    def values(form):
        return dict(type=partial(setting, form), action="append", default=[], metavar=form)

    parser.add_argument("hosts", type=int)
    parser.add_argument("--mbit", **values("[LINK[@WHEN]=]NUMBER"), help="rate each way (200; 0: no limit)")
    parser.add_argument("--slow", "--rate", dest="mbit", **values("LINK[@WHEN]=NUMBER"), help="of one link")
    parser.add_argument("--latency", **values("[LINK[@WHEN]=]NUMBER"), help="milliseconds one way (0)")
    parser.add_argument("--cpu", **values("[HOST=]NUMBER"), help="processors, 0.05 or more")
    parser.add_argument("--cut", **values("HOST@WHEN[+SECONDS]"), help="without SECONDS: for good")
    parser.add_argument("--cities", action="store_true", help="links between cities; then --mbit is 0")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    if not 2 <= options.hosts <= 200:
        refuse(f"{options.hosts} hosts: it must be 2 to 200")
    mbit, latency = city_tables(options.hosts) if options.cities else ({}, {})
    options.tables = dict(mbit=mbit, latency=latency, cpu={})
    found = [(what, *value) for what in ("mbit", "latency", "cpu", "cut") for value in getattr(options, what)]
    for what, key, when, number in found:
        if len(set(key)) < len(key) or max(key, default=0) >= options.hosts:
            refuse(f"--{what}, hosts {key}: a host is 0 to {options.hosts - 1}, a pair has two")
        if what == "cpu" and number < 0.05:
            refuse(f"--cpu {number:g}: it must be 0.05 or more")
        if when is None:
            options.tables[what][key] = number
    options.events = [event for event in found if event[2] is not None]
    return options


def main():
    options = read(sys.argv[1:])
    try:
        with Hosts(options.hosts, **options.tables) as hosts:
            status = run(hosts, options.command, options.events)
    except OSError as error:
        refuse(error)
    except KeyboardInterrupt:
        status = 130
    sys.exit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
    main()
