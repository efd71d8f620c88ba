"""Rehearse several machines on one: network namespaces, joined by links that have a rate and can be cut.

    python -m tools.hosts 8 -- torchrun --nproc-per-node 1 train.py --stages 8
    python -m tools.hosts 8 --mbit 200 --slow 5=20 -- torchrun ...     links of 200 Mbit/s, host 5's of 20
    python -m tools.hosts 8 --cut 3@10+15 -- torchrun ...              host 3 is cut off at 10 s, for 15 s
    python -m tools.hosts 8 --cut "3@step 20:" -- torchrun ...         for good, when node 0 prints "step 20:"
    python -m tools.hosts 8 --rate 2@30=5 --logs logs -- torchrun ...  host 2's link has 5 Mbit/s from 30 s on
    python -m tools.hosts 8 -- sh -c 'echo $NODE_RANK of $NNODES, node 0 is $MASTER_ADDR:$MASTER_PORT'

The command starts on every host, in this directory. torchrun is given --nnodes, --node-rank, --master-addr
and --master-port: static rendezvous, where each host lives and dies by itself. Node 0's output is shown and
its exit status is ours; when another host fails, its last lines are shown. Host I has one interface, e0, with
the address 10.77.0.(I + 1), and reaches the other hosts, nothing else. They share files and processors. When
a host never comes back, node 0's torchrun waits 300 s for it at the end. Needs Linux, root and iproute2.

Each host's network is a namespace without a name, which lives as long as the processes in it. However this
program ends, SIGKILL included, its pipe to the keeper closes; the keeper then ends them all.
"""
import argparse
import ctypes
import math
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT

LINGER = 20                 # seconds that the others have to end by themselves once node 0 has ended
PORT = 29500
# The burst is the largest piece that TCP hands to an interface, 64 KB. The kernel cuts larger pieces than the
# burst into packets: with 5 or 16 KB, 200 Mbit/s became 155 on busy processors. The queue is 100 ms long, and
# small messages wait that long behind large ones; 50 to 400 ms gave the same goodput.
SHAPE = "tbf rate {}mbit burst 64kb latency 100ms"


def missing():
    """What keeps this machine from being several, as a text; "" if nothing does."""
    try:
        with Hosts(2) as hosts:
            hosts.cut(0)
    except OSError as error:
        return str(error)
    return ""


def enter(pid):
    """Move this thread, and what it starts from now on, into the network of a process (one of Hosts.pids)."""
    libc = ctypes.CDLL(None, use_errno=True)                # os.setns came with Python 3.12
    with open(f"/proc/{pid}/ns/net") as file:
        if libc.setns(file.fileno(), 0x40000000):           # CLONE_NEWNET
            raise OSError(ctypes.get_errno(), f"cannot enter process {pid}'s network")


def inside(pid, command, lines=""):
    """Run one of iproute2's commands in the network of a process."""
    argv = ["nsenter", f"--net=/proc/{pid}/ns/net", *command.split()]
    done = subprocess.run(argv, input=lines, stdout=PIPE, stderr=STDOUT, text=True)
    if done.returncode:
        raise OSError(f"{command}: {' '.join(done.stdout.split())}")


def keep(count):
    """The keeper's work: hold networks until its maker closes the pipe or dies, then end all in them."""
    maker = os.getppid()                                    # may be in one of the networks itself
    # no IPv6 on interfaces to come, or Gloo might choose a link-local address
    hold = "cd /proc/sys/net/ipv6/conf/default 2>/dev/null && echo 1 > disable_ipv6; echo held; exec cat"
    hold = ["unshare", "--net", "sh", "-c", hold]
    holders = [subprocess.Popen(hold, stdin=PIPE, stdout=PIPE) for _ in range(count)]
    if all([holder.stdout.readline() for holder in holders]):
        pids = [holder.pid for holder in holders]
        print(*pids, flush=True)
        sys.stdin.read()
        end({os.readlink(f"/proc/{pid}/ns/net") for pid in pids}, spare={maker, *pids})
    for holder in holders:
        holder.communicate()


def end(networks, spare):
    """SIGTERM to all in these networks; SIGKILL to those who are still there after 5 seconds."""
    for number in [signal.SIGTERM, *[0] * 100, *[signal.SIGKILL] * 100]:        # 0 only asks
        found = False
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):                         # ended meanwhile
                if os.readlink(process / "ns/net") in networks and int(process.name) not in spare:
                    os.kill(int(process.name), number)
                    found = True
        if not found:
            return
        time.sleep(0.05)


class Hosts:
    """`with Hosts(4, mbit=200, slow={3: 20}) as hosts:` four machines."""

    def __init__(self, count, mbit=200, slow=()):
        if os.geteuid():
            raise OSError("network namespaces need root")
        self.started = []
        argv = [sys.executable, "-IS", __file__, "keep", str(count + 1)]
        # in a session of its own, as all that we start: Ctrl-C at the terminal is for us alone
        self.keeper = subprocess.Popen(argv, stdin=PIPE, stdout=PIPE, stderr=STDOUT, start_new_session=True)
        try:
            line = self.keeper.stdout.readline().decode()
            if not re.fullmatch(r"[\d ]+\n", line):
                self.keeper.stdin.close()
                line += self.keeper.stdout.read().decode()
                raise OSError("no network namespaces: " + line.strip().split("\n")[-1])
            *self.pids, self.switch = map(int, line.split())
            self.connect()
            for host in range(count):
                self.rate(host, dict(slow).get(host, mbit))
        except BaseException:
            self.close()
            raise

    def connect(self):
        """A bridge at the switch, and a cable to each host: e0 there, h0, h1, ... here."""
        hosts = list(enumerate(self.pids))
        lines = [f"link add h{host} type veth peer name e0 netns {pid}" for host, pid in hosts]
        inside(self.switch, "ip -batch -", "\n".join(["link add sw type bridge", "link set sw up", *lines]))
        for host, pid in hosts:
            lines = ["link set lo up", f"address add {self.address(host)}/24 dev e0", "link set e0 up"]
            inside(pid, "ip -batch -", "\n".join(lines))
        # last: a port that finds its cable plugged in works at once, and sees no change that would undo a cut
        lines = [f"link set h{host} master sw up" for host, pid in hosts]
        inside(self.switch, "ip -batch -", "\n".join(lines))

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def address(self, host):
        return f"10.77.0.{host + 1}"

    def enter(self, host):
        enter(self.pids[host])

    def start(self, host, argv, **options):
        """A subprocess.Popen on the host."""
        argv = ["nsenter", f"--net=/proc/{self.pids[host]}/ns/net", *argv]
        self.started.append(subprocess.Popen(argv, start_new_session=True, **options))
        return self.started[-1]

    def cut(self, host):
        """Both directions fall silent; the host's own link stays up, as when something far away fails."""
        inside(self.switch, f"bridge link set dev h{host} state 0")

    def restore(self, host):
        inside(self.switch, f"bridge link set dev h{host} state 3")

    def rate(self, host, mbit):
        """Of both directions; 0: as fast as the processors."""
        shape = SHAPE.format(mbit) if mbit else "noqueue"
        inside(self.pids[host], f"tc qdisc replace dev e0 root {shape}")
        inside(self.switch, f"tc qdisc replace dev h{host} root {shape}")

    def bytes(self, host):
        """(sent, received) by the host so far, with all headers."""
        table = Path(f"/proc/{self.switch}/net/dev").read_text()
        numbers = re.search(rf"\bh{host}:(.*)", table)[1].split()
        return int(numbers[0]), int(numbers[8])

    def close(self):
        self.keeper.stdin.close()
        self.keeper.wait()
        self.keeper.stdout.close()
        for process in self.started:
            process.wait()


def say(text):
    print(text, file=sys.stderr, flush=True)


def refuse(text):
    say(f"error: {text}")
    raise SystemExit(2)


def stop(number, frame):
    raise SystemExit(128 + number)


def slow(text):
    found = re.fullmatch(r"(\d+)=([\d.]+)", text)
    return int(found[1]), float(found[2])


def moment(text):
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else text.encode()


def cut(text):
    found = re.fullmatch(r"(\d+)@(.+?)(\+[\d.]+)?", text)
    return moment(found[2]), "cut", int(found[1]), float(found[3] or "inf")


def rate(text):
    found = re.fullmatch(r"(\d+)@(.+)=([\d.]+)", text)
    return moment(found[2]), "rate", int(found[1]), float(found[3])


def happen(hosts, events, now, printed):
    """Do what is due, or was waited for in what node 0 has printed."""
    for event in list(events):
        when, what, host, number = event
        due = when in printed if isinstance(when, bytes) else when <= now
        if not due:
            continue
        events.remove(event)
        if what == "rate":
            hosts.rate(host, number)
            what = f"at {number:g} Mbit/s"
        elif what == "cut":
            hosts.cut(host)
            events.append((now + number, "back", host, 0))
            what = "cut off"
        else:
            hosts.restore(host)
        say(f"hosts: {now:.1f} s: host {host} {what}")


def launch(hosts, host, command, log):
    count, master = str(len(hosts.pids)), hosts.address(0)
    if Path(command[0]).name == "torchrun":
        static = f"--nnodes {count} --node-rank {host} --master-addr {master} --master-port {PORT}"
        command = [command[0], *static.split(), *command[1:]]
    node = {"NODE_RANK": str(host), "NNODES": count, "MASTER_ADDR": master, "MASTER_PORT": str(PORT)}
    # Python holds lines back in front of a pipe; a --cut that waits for one of node 0's would come late
    environment = {"PYTHONUNBUFFERED": "1", **os.environ, **node}
    outputs = {"stdout": log, "stderr": STDOUT} if host else {"stdout": PIPE, "stderr": PIPE}
    return hosts.start(host, command, stdin=DEVNULL, env=environment, **outputs)


def report(host, status, log):
    start = max(0, os.fstat(log.fileno()).st_size - 10000)
    text = os.pread(log.fileno(), 10000, start).decode(errors="replace")
    say(f"host {host} ended with status {status}:\n" + "\n".join(text.splitlines()[-40:]))


def run(hosts, command, events, logs):
    """The command on all hosts until they have ended, or node 0 has for LINGER seconds; node 0's status."""
    begun = time.monotonic()
    nodes = [launch(hosts, host, command, log) for host, log in enumerate(logs)]
    running = dict(enumerate(nodes))
    shown = {nodes[0].stdout: sys.stdout.buffer, nodes[0].stderr: sys.stderr.buffer}
    printed = b""
    now, until = 0, math.inf
    while now < until and (running or shown):
        for pipe in select.select(list(shown), [], [], 0.1)[0]:
            data = os.read(pipe.fileno(), 65536)
            for file in (shown[pipe], logs[0]):
                file.write(data)
                file.flush()
            printed = (printed + data)[-200000:]
            if not data:
                del shown[pipe]
        now = time.monotonic() - begun
        happen(hosts, events, now, printed)
        for host in [host for host, node in running.items() if node.poll() is not None]:
            status = running.pop(host).returncode
            if host == 0:
                until = now + LINGER
            elif status:
                report(host, status, logs[host])
    for host in running:
        say(f"hosts: host {host} has not ended {LINGER} s after node 0, and is stopped")
    return nodes[0].returncode


def read(arguments):
    parser = argparse.ArgumentParser("tools.hosts", description=__doc__)
    parser.formatter_class = argparse.RawTextHelpFormatter
    parser.error = refuse
    parser.add_argument("hosts", type=int)
    parser.add_argument("--mbit", type=float, default=200, help="rate of every link, 0: no limit")
    parser.add_argument("--slow", type=slow, action="append", default=[], metavar="HOST=MBIT")
    events = {"action": "append", "dest": "events"}
    parser.add_argument("--cut", type=cut, **events, default=[], metavar="HOST@WHEN[+SECONDS]")
    parser.add_argument("--rate", type=rate, **events, metavar="HOST@WHEN=MBIT")
    parser.add_argument("--logs", type=Path, help="folder for every host's output, hostI.log")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    if options.mbit < 0:
        refuse(f"--mbit {options.mbit:g}")
    if not 2 <= options.hosts <= 200:
        refuse(f"{options.hosts} hosts: it must be 2 to 200")
    for host in [host for host, mbit in options.slow] + [event[2] for event in options.events]:
        if host >= options.hosts:
            refuse(f"host {host} is none of 0 to {options.hosts - 1}")
    if not shutil.which(options.command[0]):
        refuse(f"no command {options.command[0]}")
    return options


def main():
    options = read(sys.argv[1:])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    try:
        folder = options.logs
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
        names = [f"host{host}.log" for host in range(options.hosts)]
        logs = [open(folder / name, "w+b") if folder else tempfile.TemporaryFile() for name in names]
        with Hosts(options.hosts, options.mbit, dict(options.slow)) as hosts:
            status = run(hosts, options.command, options.events, logs)
    except OSError as error:
        refuse(error)
    sys.exit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
    if sys.argv[1:2] == ["keep"]:
        keep(int(sys.argv[2]))
    else:
        main()
