"""Rehearse several machines on one: network namespaces, joined by a relay with rates and latencies.

    python -m tools.hosts 8 -- torchrun --nproc-per-node 1 train.py --stages 8
    python -m tools.hosts 8 --mbit 200 --slow 5=20 -- ...       links of 200 Mbit/s, host 5's of 20
    python -m tools.hosts 8 --latency 25 --latency 2-5=80 -- ...    25 ms one way, 80 from 2 to 5
    python -m tools.hosts 8 --cpu 0.2 --cpu 5=0.07 -- ...       a fifth of a processor, host 5 less
    python -m tools.hosts 8 --cities -- ...                     the links between twelve cities
    python -m tools.hosts 8 -- sh -c 'train.sh > $PET_NODE_RANK.log'    a log of each host's own

The tool starts the command on every host, in this directory. PET_NNODES, PET_NODE_RANK,
PET_MASTER_ADDR and PET_MASTER_PORT tell torchrun where it is: static rendezvous, where each host
lives and dies by itself. OMP_NUM_THREADS, unless it is set, becomes this machine's cores divided by
the hosts, at least 1. The tool shows node 0's output and what every host writes to stderr, and
returns node 0's exit status. Then other hosts have 20 s to end. Host I has one interface, e0, with
the address 10.77.0.(I + 1), and reaches only the other hosts. Hosts share the files. Node 0's
torchrun waits at the end up to 300 s for a host that never comes back. The tool needs Linux, root,
iproute2 and util-linux.

LINK is a host (its link carries its rate each way), or a pair as 2-5. A pair's rate is a limit
in addition to those of its hosts' links. A pair's latency is its own, else the larger of its two
hosts'. A program of your own can change links later, with `Hosts.cut` and the tables of `Hosts`.

However the tool ends, SIGKILL included, the kernel ends its hosts: each command's parent dies with
the tool, and a host's processes with the first of them. Namespaces and interfaces end with the last
process in them.
"""
import argparse
import ctypes
import fcntl
import math
import os
import re
import sched
import select
import shutil
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from planning.instance import city_tables

QUEUE = 0.1                 # seconds of packets that may wait for a link, which drops later ones
CGROUPS = Path("/sys/fs/cgroup")
# A command's parent dies with the tool, and the first process of a host's own tree with this
# parent.
JOIN = ("setpriv --pdeathsig KILL nsenter --net={} "
        "unshare --pid --fork --kill-child --mount-proc sh -c")
# Waits for the end of the tool, then for the end of the processes in its control groups.
KEEPER = ("cat; for group; do while test -d $group && ! rmdir $group; do sleep 0.05; done; done "
          "2>/dev/null")


def enter(path=None):
    """Move this thread to one of Hosts.networks (None: to a new network).

    So do the processes that it starts from now on. (Python has these two calls of the C library
    from 3.12 on.) Raises OSError.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    network = 0x40000000                                                # CLONE_NEWNET
    if path:
        with open(path) as file:
            failed = libc.setns(file.fileno(), network)
    else:
        failed = libc.unshare(network)
    if failed:
        raise OSError(f"no network of its own: {os.strerror(ctypes.get_errno())}")


def plug(host):
    """Move this thread to a new network with an interface, e0.

    Returns two files: of the network and of e0's packets.
    """
    enter()
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    # TUNSETIFF, with the flags TUN, NO_PI and VNET_HDR
    fcntl.ioctl(tun, 0x400454CA, struct.pack("16sH22x", b"e0", 0x5001))
    # TCP hands over up to 64 KB at once, as to a real network card, but still reckons in 1500
    # bytes: TUNSETOFFLOAD, with the flags CSUM and TSO4.
    fcntl.ioctl(tun, 0x400454D0, 3)
    lines = ["link set lo up", f"address add 10.77.0.{host + 1}/24 dev e0",
             "link set e0 txqueuelen 1000 up", ""]
    subprocess.run(["ip", "-batch", "-"], input="\n".join(lines), text=True, check=True)
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY), tun


def limit(group, share):
    """Make a control group whose processes have this share of a processor. Raises OSError."""
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


def place_of_groups():
    """The folder in which control groups for processors are made. Raises OSError."""
    for place in (CGROUPS / "cpu", CGROUPS):
        if (place / "cgroup.procs").exists():
            return place
    raise OSError(f"--cpu: no control groups, version 1 or 2, in {CGROUPS}")


class Hosts(AbstractContextManager):
    """`with Hosts(4, mbit={(): 200, (3,): 20}, latency={(1, 2): 5}) as hosts:` four machines.

    Keys of the tables: () all hosts, (host,) one, (host, other) a pair, ascending. mbit: Mbit/s, 0
    for as fast as the relay can. latency: milliseconds one way. cpu: processors. networks: each
    host's path for `enter`. The tables `mbit` and `latency` may change at any time. Raises OSError
    if this machine cannot be several hosts.
    """

    def __init__(self, count, mbit=(), latency=(), cpu=()):
        if sys.platform != "linux" or os.geteuid():
            raise OSError("several hosts on one machine need Linux and root")
        cpu = dict(cpu)
        place = place_of_groups() if cpu else None
        self.mbit = {(): 200, **dict(mbit)}
        self.latency = {(): 0, **dict(latency)}
        self.count = count
        self.silent = [0.0] * count         # until when each host is cut off
        self.free = {}                      # link: when its last packet will have passed
        self.packets = sched.scheduler(time.monotonic, lambda seconds: None)
        self.started = []
        with ThreadPoolExecutor(1) as thread:                   # this thread stays where it is
            plugged = list(thread.map(plug, range(count)))
        self.files = [network for network, _ in plugged]
        self.tuns = [tun for _, tun in plugged]
        self.networks = [f"/proc/{os.getpid()}/fd/{file}" for file in self.files]
        self.groups = {}                    # host: its control group
        for host, file in enumerate(self.files):
            if of_host(cpu, host):
                self.groups[host] = place / f"hosts.{os.getpid()}.{file}"
        # The keeper has a session of its own, as the commands: Ctrl-C at the terminal is for the
        # tool.
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
        process = subprocess.Popen([*join, *argv], start_new_session=True, **options)
        self.started.append(process)
        return process

    def cut(self, host, seconds=math.inf):
        """Silence a host both ways; 0 seconds end it. e0 stays up: the fault is far away."""
        self.silent[host] = time.monotonic() + seconds

    def journey(self, packet, source, target):
        """Carry a packet over its links; yields when it has passed each. May lose it."""
        pair = tuple(sorted((source, target)))
        delay = self.latency.get(pair)
        if delay is None:
            delay = max(of_host(self.latency, source), of_host(self.latency, target))
        links = [                                               # (link, Mbit/s, milliseconds)
            (("up", source), of_host(self.mbit, source), 0),
            ((source, target), self.mbit.get(pair, 0), delay),
            (("down", target), of_host(self.mbit, target), 0)]
        bits = 8 * (len(packet) - 10)                           # VNET_HDR's 10 bytes do not count
        now = time.monotonic()
        for link, mbit, milliseconds in links:
            begin = max(now, self.free.get(link, 0.0))
            if begin > now + QUEUE:
                return
            end = begin
            if mbit:
                end += bits * 1e-6 / mbit
            self.free[link] = end
            now = end + milliseconds / 1000
            yield now
            if time.monotonic() < max(self.silent[source], self.silent[target]):
                return
        with suppress(OSError):                                 # e0 is down
            os.write(self.tuns[target], packet)

    def go_on(self, journey):
        """Over the next link."""
        when = next(journey, None)
        if when is not None:
            self.packets.enterabs(when, 0, self.go_on, (journey,))

    def carry(self):
        """The relay's thread: reads what hosts send, and moves the packets that are due."""
        with suppress(OSError):                     # a relay that waits for a processor slows links
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        while self.keeper.returncode is None:
            pause = self.packets.run(blocking=False)            # until the next packet is due
            if pause is None or pause > 0.05:
                pause = 0.05
            readable, _, _ = select.select(self.tuns, [], [], pause)
            for tun in readable:
                packet = os.read(tun, 70_000)
                network, number = packet[26:29], packet[29]     # of the address where it goes
                if network == bytes([10, 77, 0]) and 0 < number <= len(self.tuns):
                    self.go_on(self.journey(packet, self.tuns.index(tun), number - 1))


# ---- a command on all hosts


def run_everywhere(hosts, command):
    """Run the command on all hosts, until at most 20 s after node 0's has ended.

    Returns node 0's status.
    """
    nodes = [start_command(hosts, host, command) for host in range(hosts.count)]
    status = nodes[0].wait()
    last = time.monotonic() + 20
    for host, node in enumerate(nodes[1:], 1):
        with suppress(subprocess.TimeoutExpired):
            node.wait(max(0, last - time.monotonic()))
        if node.returncode != 0:                        # None: it goes on, and the tool stops it
            print(f"host {host} ended with status {node.returncode}", file=sys.stderr)
    return status


def start_command(hosts, host, command):
    """The command's process on this host. Only node 0's output is shown."""
    cores = len(os.sched_getaffinity(0))
    environment = {
        "OMP_NUM_THREADS": str(max(1, cores // hosts.count)),
        **os.environ,
        "PET_NNODES": str(hosts.count), "PET_NODE_RANK": str(host),     # torchrun reads these
        "PET_MASTER_ADDR": "10.77.0.1", "PET_MASTER_PORT": "29500"}
    output = None if host == 0 else subprocess.DEVNULL
    return hosts.start(host, command, env=environment, stdin=subprocess.DEVNULL, stdout=output)


# ---- the command line

NUMBER = r"(?P<number>\d+\.?\d*)"
FORMS = {       # of an option's value: as --help shows it, and as a pattern
    "[LINK=]NUMBER": rf"(?:(?P<link>\d+(?:-\d+)?)=)?{NUMBER}",
    "LINK=NUMBER": rf"(?P<link>\d+(?:-\d+)?)={NUMBER}",
    "[HOST=]NUMBER": rf"(?:(?P<link>\d+)=)?{NUMBER}",
}


@dataclass
class HostSetting:
    """A number for a key of a table of Hosts. typed: the option with its value."""
    key: tuple
    number: float
    typed: str


def setting_of(option, form, text):
    """The HostSetting that this option's value asks for, if it has this form."""
    found = re.fullmatch(FORMS[form], text)
    if not found:
        raise argparse.ArgumentTypeError(f"takes {form}, not {text} (see --help)")
    key = ()
    if found["link"]:
        key = tuple(sorted(map(int, found["link"].split("-"))))
    return HostSetting(key, float(found["number"]), typed=f"{option} {text}")


def refuse(text):
    print(f"error: {text}", file=sys.stderr)
    raise SystemExit(2)


def read(arguments):
    """The options, with `tables` for Hosts."""
    parser = argparse.ArgumentParser("python -m tools.hosts", description=__doc__,
                                     formatter_class=argparse.RawTextHelpFormatter)

    def error(why):
        if "--" not in arguments:
            why += " (the command and its options come after --)"
        refuse(why)

    parser.error = error

    def add(table, option, form, help):
        parser.add_argument(option, dest=table, action="append", default=[], metavar=form,
                            help=help, type=partial(setting_of, option, form))

    parser.add_argument("hosts", type=int)
    add("mbit", "--mbit", "[LINK=]NUMBER", help="rate each way (200; 0: no limit)")
    add("mbit", "--slow", "LINK=NUMBER", help="rate of one link")
    add("latency", "--latency", "[LINK=]NUMBER", help="milliseconds one way (0)")
    add("cpu", "--cpu", "[HOST=]NUMBER", help="processors of each host, 0.05 or more")
    parser.add_argument("--cities", action="store_true", help="links between cities; --mbit is 0")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    if not 2 <= options.hosts <= 200:
        refuse(f"{options.hosts} hosts: it must be 2 to 200")
    program = options.command[0]
    if not shutil.which(program):
        refuse(f"{program}: no such program: begin with torchrun or python (. .venv/bin/activate)")
    mbit, latency = city_tables(options.hosts) if options.cities else ({}, {})
    options.tables = {"mbit": mbit, "latency": latency, "cpu": {}}
    for name, table in options.tables.items():
        for setting in getattr(options, name):              # of one link the last one holds
            check_host(setting, options.hosts)
            table[setting.key] = setting.number
    for setting in options.cpu:
        if setting.number < 0.05:
            refuse(f"{setting.typed}: it must be 0.05 or more")
    return options


def check_host(setting, hosts):
    """Refuse a host, or a pair, that is not among this many hosts."""
    if len(set(setting.key)) < len(setting.key) or max(setting.key, default=0) >= hosts:
        refuse(f"{setting.typed}: a host is 0 to {hosts - 1}, a pair has two")


def main():
    options = read(sys.argv[1:])
    try:
        with Hosts(options.hosts, **options.tables) as hosts:
            status = run_everywhere(hosts, options.command)
    except OSError as error:
        refuse(error)
    except KeyboardInterrupt:
        status = 130
    if status < 0:                          # a signal, as a shell tells it
        status = 128 - status
    sys.exit(status)


if __name__ == "__main__":
    main()
