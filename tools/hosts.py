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
tool shows node 0's output and returns its exit status. Then other hosts have 20 s to end; of one that fails
the tool shows the last lines. Host I has one interface, e0, with the address 10.77.0.(I + 1), and reaches
only the other hosts. Hosts share the files. Node 0's torchrun waits at the end up to 300 s for a host that
never comes back. The tool needs Linux, root, iproute2 and util-linux.

LINK is a host (its link carries its rate each way), or a pair as 2-5. A pair's rate is a limit beside those
of its hosts' links. A pair's latency is its own, else the larger of its two hosts'. --slow and --rate are
other names of --mbit. WHEN is seconds after the start, or a text that node 0 prints.

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
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from planning.instance import city_tables

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
        self.silent = [0.0] * count         # until when each host is cut off
        self.free = {}                      # link: when the last packet booked on it will have passed
        self.packets = sched.scheduler(time.monotonic, lambda seconds: None)
        self.started, self.closing = [], False
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

    def cut(self, key, seconds=math.inf):
        """Silence a host in both directions; 0 seconds end it. e0 stays up: the fault is far away."""
        for host in key:
            self.silent[host] = time.monotonic() + seconds

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
        while not self.closing:
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
    nodes, logs = [], [tempfile.TemporaryFile() for _ in hosts.networks]
    for host, log in enumerate(logs):
        # torchrun reads PET_*. Python would hold lines back that a --cut may wait for.
        environment = {"PYTHONUNBUFFERED": "1", **os.environ, "PET_NNODES": str(len(logs)),
                       "PET_NODE_RANK": str(host), "PET_MASTER_ADDR": "10.77.0.1", "PET_MASTER_PORT": "29500"}
        outputs = dict(stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        nodes.append(hosts.start(host, command, env=environment, **outputs))
    begun, shown, status = time.monotonic(), 0, None
    while status is None:
        status = nodes[0].poll()
        shown += sys.stdout.buffer.write(os.pread(logs[0].fileno(), 2**24, shown))
        sys.stdout.flush()
        happen(hosts, events, time.monotonic() - begun, tail(logs[0]))
        time.sleep(0.02)
    last = time.monotonic() + 20
    for host, node in enumerate(nodes[1:], 1):
        with suppress(subprocess.TimeoutExpired):
            node.wait(max(0, last - time.monotonic()))
        if node.returncode != 0:                            # None: it goes on, and the tool stops it
            lines = tail(logs[host]).splitlines()[-40:]
            print(f"host {host} ended with status {node.returncode}:", *lines, sep="\n", file=sys.stderr)
    return status


def tail(log):
    """The last 100 KB of a host's output, as text."""
    size = os.fstat(log.fileno()).st_size
    return os.pread(log.fileno(), 100_000, max(0, size - 100_000)).decode(errors="replace")


def happen(hosts, events, now, printed):
    """Do, and drop, the events that are due by the seconds since the start or by node 0's output."""
    for event in list(events):
        what, key, when, number = event
        if float(when) <= now if re.fullmatch(NUMBER, when) else when in printed:
            events.remove(event)
            print(f"hosts: {now:.1f} s:", what, key, number, file=sys.stderr)
            if what == "cut":
                hosts.cut(key, number)
            else:
                getattr(hosts, what)[key] = number


# ---- the command line

LINK, NUMBER = r"(\d+(?:-\d+)?)", r"(\d+\.?\d*)"
SETTING = rf"(?:{LINK}(?:@(.+))?=)?{NUMBER}"            # [LINK[@WHEN]=]NUMBER
CUT = rf"{LINK}@(.+?)(?:\+{NUMBER})?"                   # HOST@WHEN[+SECONDS]


def refuse(text):
    print(f"error: {text}", file=sys.stderr)
    raise SystemExit(2)


def setting(text, pattern=SETTING):
    """(key of a table of Hosts, WHEN or None, number)."""
    found = re.fullmatch(pattern, text)
    if not found:
        raise argparse.ArgumentTypeError(f"cannot read {text} (see --help)")
    link, when, number = found.groups()
    return tuple(sorted(map(int, link.split("-")))) if link else (), when, float(number or math.inf)


def cut(text):
    return setting(text, CUT)


def read(arguments):
    """The options, with `tables` for Hosts, and `events`: [(table or cut, key, WHEN, number)]."""
    parser = argparse.ArgumentParser("tools.hosts", description=__doc__)
    parser.formatter_class, parser.error = argparse.RawTextHelpFormatter, refuse
    parser.add_argument("hosts", type=int)
    table, mbit = dict(type=setting, action="append", default=[]), "[LINK[@WHEN]=]MBIT"
    parser.add_argument("--mbit", "--slow", "--rate", **table, metavar=mbit, help="(200) 0: no limit")
    parser.add_argument("--latency", **table, metavar="[LINK[@WHEN]=]MILLISECONDS", help="one way (0)")
    parser.add_argument("--cpu", **table, metavar="[HOST=]PROCESSORS", help="0.05 or more")
    parser.add_argument("--cut", type=cut, action="append", default=[], metavar="HOST@WHEN[+SECONDS]")
    parser.add_argument("--cities", action="store_true", help="links between cities; then --mbit is 0")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    if not 2 <= options.hosts <= 200:
        refuse(f"{options.hosts} hosts: it must be 2 to 200")
    mbit, latency = city_tables(options.hosts) if options.cities else ({}, {})
    options.tables, options.events = dict(mbit=mbit, latency=latency, cpu={}), []
    for what in ("mbit", "latency", "cpu", "cut"):
        for key, when, number in getattr(options, what):
            if len(set(key)) < len(key) or any(host >= options.hosts for host in key):
                refuse(f"--{what}, hosts {key}: a host is 0 to {options.hosts - 1}, a pair has two")
            if what in ("cpu", "cut") and len(key) > 1 or what == "cpu" and (when or number < 0.05):
                refuse("--cut takes one host; --cpu too, or none, and a number from 0.05 on")
            if when:
                options.events.append((what, key, when, number))
            else:
                options.tables[what][key] = number
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
