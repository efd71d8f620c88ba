"""The processes of a run, and what they tell each other through a store.

torchrun hosts the store, or rank 0 where there is no torchrun.
"""
import contextlib
import fcntl
import json
import os
import socket
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from plumbing.processor import share_cores
from plumbing.signals import Signals, next_command

DAY = 86400.0       # seconds: no timeout in practice
# What the errors of Gloo and NCCL say when a peer is lost.
BROKEN = "Connection ", "Broken pipe", "ncclRemoteError"


class BadInput(Exception):
    """Something that the user can correct. The first rank prints the message, one line."""


def forbid(*rules):
    """Raise BadInput with the line of the first rule, (condition, line), whose condition holds."""
    for wrong, line in rules:
        if wrong:
            raise BadInput(line)


def restarts():
    """How often torchrun has started these processes again (--max-restarts)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def rank_and_world():
    """RANK and WORLD_SIZE, which torchrun sets in the environment; else 0 and 1.

    Raises BadInput where they, or others that torchrun sets, make no sense.
    """
    rank = whole_number("RANK", "0")
    world = whole_number("WORLD_SIZE", "1")
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"):
        whole_number(name, "0")                 # which this program reads later
    forbid((rank >= world,
            f"RANK={rank} must be below WORLD_SIZE={world}: unset both for one process, or start "
            "several with torchrun"))
    if world > 1:
        needed = "RANK", "MASTER_ADDR", "MASTER_PORT"
        lacking = [name for name in needed if name not in os.environ]
        forbid((lacking,
                f"WORLD_SIZE={world} is set without {' and '.join(lacking)}: unset it for one "
                "process, or start several with torchrun, which sets them all"))
        whole_number("MASTER_PORT", "")
    return rank, world


def whole_number(name, default):
    """The whole number in this variable of the environment. Raises BadInput."""
    text = os.environ.get(name, default)
    forbid((not text.isdecimal(), f"{name}={text} in the environment is no whole number"))
    return int(text)


class Job:
    """This process among the processes of the run.

    rank, world, device. nccl: whether messages travel over NCCL. store: every rank reads and writes
    its keys. The first rank, of `members`, is rank 0; in survive/ it may become another one.
    joining: whether this process takes a dead rank's place in a job that is training (survive/).
    """
    needs_all = True    # training stops when a process is lost
    patience = DAY      # seconds for a message that only the log waits for

    def __init__(self, argv=None):
        """argv: the command line (None: sys.argv).

        If that has --help, only rank 0 goes on, to print the help. A process whose environment is
        wrong says so, and ends with status 2.
        """
        try:
            self.rank, self.world = rank_and_world()
        except BadInput as error:       # each process tells: nobody knows which is the first rank
            complain(str(error))
            sys.exit(2)
        self.device = torch.device("cpu")
        self.nccl = self.joining = False
        self.members = range(self.world)        # the ranks that share values
        self.leads = self.rank == 0             # it prints, and writes the log
        self.store = dist.HashStore()
        self.calls = {}                         # how often each name has been used (`key_of_call`)
        self.events = []
        if self.world > 1:
            store, *_ = next(iter(dist.rendezvous("env://")))
            # torchrun keeps its store over a restart: nobody may read the keys from before
            self.store = dist.PrefixStore(f"attempt{restarts()}", store)
        if self.rank > 0 and not {"-h", "--help"}.isdisjoint(sys.argv if argv is None else argv):
            sys.exit(0)

    # ---- telling each other

    def key_of_call(self, name):
        """Count this call, and return its key: the name, and from the second call on a number, too.

        Without the number a fast rank would read what the others told in the call before. All
        ranks make the calls with one name in the same order, so all count alike. The first key is
        the name itself: survive/standby.py writes such keys by hand.
        """
        self.calls[name] = self.calls.get(name, 0) + 1
        if self.calls[name] == 1:
            return name
        return f"{name}, call {self.calls[name]}"

    def share(self, name, value):
        """Every rank's value under this name, in the order of ranks. JSON carries the values."""
        key = self.key_of_call(name)
        self.store.set(f"{key}/{self.rank}", json.dumps(value))
        texts = self.store.multi_get([f"{key}/{r}" for r in self.members])
        return [json.loads(text) for text in texts]

    def collect(self, name, value):
        """On the first rank {rank: its value}, for the log. The others get None at once."""
        if self.leads:
            return dict(zip(self.members, self.share(name, value)))
        self.store.set(f"{self.key_of_call(name)}/{self.rank}", json.dumps(value))
        return None

    def together(self, function, *args, name=None):
        """function(*args) on every rank.

        BadInput, OSError or a missing package on any rank ends all ranks with status 2, after the
        first rank has printed its one line. name: the same on all ranks (default: that of the
        function).
        """
        result = None
        problem = ""
        try:
            result = function(*args)
        except (BadInput, OSError) as error:
            problem = one_line(error)
        except ModuleNotFoundError as error:
            extra = "plot" if error.name == "matplotlib" else "hf"
            problem = f"this needs the {error.name} package: pip install '.[{extra}]'"
        for line in self.share(f"problem/{name or function.__name__}", problem):
            if line:
                self.refuse(line)
        return result

    def refuse(self, line):
        """Print the line on the first rank, then end all with status 2. Every rank calls this."""
        if self.leads:
            complain(line)
        self.share("told", "")      # the line comes first: torchrun stops all when one rank leaves
        Job.collect(self, "left", "")       # the first rank leaves last: it may host the store
        sys.exit(2)

    def agree(self, parse, argv):
        """The fields of parse(argv, world) on the first rank, for every rank."""
        return self.agree_on("options", lambda: vars(parse(argv, self.world)))

    def agree_on(self, name, function):
        """The first rank calls function(). Every rank gets its result, which JSON carries.

        Refuses as `together`.
        """
        def on_first_rank():
            return function() if self.leads else None

        return self.share(name, self.together(on_first_rank, name=name))[0]

    def say(self, lines):
        """The first rank prints the lines, while there is no progress bar."""
        if self.leads:
            for line in lines:
                print(line, flush=True)

    def tell(self, event):
        """Put an event in the first rank's log: a dict with `line` for the screen.

        Only the first rank may call it; in survive/ every rank may, and without `line`.
        """
        self.events.append(event)

    def news(self):
        """The events since the last call, on the first rank."""
        told, self.events = self.events, []
        return told

    def outlives(self, error):
        """Whether training goes on after this RuntimeError: never, but in survive/."""
        return False

    def gone(self, store=None):
        """The ranks that are dead or absent at this moment, of which each rank has its own view.

        store: this thread's own client (default: self.store).
        """
        return set()

    # ---- groups

    def connect(self, o, group=True):
        """Choose the device and the backend, and make the default process group.

        group: whether Gloo, too, shall have one; in survive/ it has none.
        """
        gpus = 0
        if o.device != "cpu" and torch.cuda.is_available():
            gpus = torch.cuda.device_count()
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", self.world))         # on this machine
        found = self.share("gpus", [gpus, processes])
        if o.device == "cuda" and not all(there for there, _ in found):
            self.refuse("--device cuda: torch sees no GPU on at least one machine")
        scarce = [f"{there} GPUs for {ranks} ranks" for there, ranks in found if there < ranks]
        if o.backend == "nccl" and scarce:
            self.refuse(f"--backend nccl: a machine has {scarce[0]}; use gloo")
        if gpus:
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % gpus)
            torch.cuda.set_device(self.device)
        if self.world == 1:
            return
        self.nccl = o.backend != "gloo" and not scarce
        if not self.nccl:
            hosts = self.hosts_that_connect()
            machines = [host.split()[0] for host in hosts]
            share_cores(this_host().split()[0], machines)
        if group or self.nccl:
            # Lazily Gloo connects only pairs that talk, otherwise every pair at the start.
            os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1" if self.world > 64 else "0")
            store = dist.PrefixStore("job", self.store)
            dist.init_process_group("nccl" if self.nccl else "gloo", rank=self.rank,
                                    world_size=self.world, store=store)
            dist.barrier()              # NCCL: the first use of a group must have every rank in it

    def hosts_that_connect(self):
        """Each rank's `this_host`.

        Refuses a host that offers the others its loopback address: they could never connect.
        """
        found = self.share("host", [this_host(), self.together(gloo_interface)])
        hosts = [host for host, _ in found]
        for rank, (_, names) in zip(self.members, found):
            if len(set(hosts)) > 1 and names.split(",")[0] in ("lo", "lo0"):
                self.refuse(f"rank {rank} offers other hosts its loopback interface: give torchrun "
                            "node 0's address as --master-addr, or on that host export "
                            "GLOO_SOCKET_IFNAME=NAME")
        return hosts

    def meet(self, key, ranks):
        """(the ranks that came, their Gloo group): a group for one use. Here all `ranks` come."""
        return ranks, gloo_group(self.store, key, ranks.index(self.rank), len(ranks), DAY)

    # ---- the end

    @contextlib.contextmanager
    def rescue(self, run, save):
        """Around training: an error ends this rank in one line, or in a traceback if its cause is
        unknown. However training ends, the run's folder is unlocked.

        save: writes a checkpoint (for survive/, which saves on an error).
        """
        try:
            with Signals(self, run) as self.signals:
                yield
        except (BadInput, OSError, RuntimeError) as error:
            self.end_with(error, run)
        finally:
            run.checkpoints.unlock()

    def end_with(self, error, run):
        """End this rank with status 2 and one line. An error of unknown cause is raised again."""
        run.log.bar.close()
        if self.another_gave_up():
            sys.exit(2)
        if not self.rank:
            print(file=sys.stderr)              # leave rank 0's progress bar
        if not isinstance(error, RuntimeError):                         # most often a full disk
            complain(f"{one_line(error)}; once that is put right {next_command(run)}")
        elif self.signals.number or any(words in str(error) for words in BROKEN):
            print(f"stopped: rank {self.rank} at step {run.step}: another process is gone; "
                  f"{next_command(run)}", file=sys.stderr, flush=True)
        else:
            raise error
        sys.exit(2)

    def another_gave_up(self):
        """Whether another rank has called this before, so that the cause has been told.

        False where the store is lost, or where every rank that stops must say why.
        """
        with contextlib.suppress(RuntimeError):
            return self.needs_all and self.store.add("gave up", 1) > 1
        return False

    def close(self):
        """At the end, when all is saved: a lost rank or store does not matter any more."""
        with contextlib.suppress(RuntimeError):
            self.collect("done", "")        # the first rank leaves last: it may host the store
            if dist.is_initialized():
                dist.barrier()
                dist.destroy_process_group()


def one_line(error):
    return " ".join(str(error).split())


def complain(line):
    print("error: " + line, file=sys.stderr, flush=True)


# ---- Gloo's network interfaces and groups


def this_host():
    """A text that no other host has. Network namespaces of one machine count as hosts."""
    network = Path("/proc/self/ns/net")
    if not network.exists():                    # not Linux
        return socket.gethostname()
    return f"{this_machine()} {network.stat().st_ino}"


def this_machine():
    """A text that no other machine has."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else socket.gethostname()


def gloo_interface():
    """The network interface of all Gloo groups, torch's own too (Linux).

    Call this before init_process_group. GLOO_SOCKET_IFNAME names the interface, or several with
    commas. If unset, it becomes the interface from which this host reaches MASTER_ADDR. Torch
    alone would take the address of the host's own name, on Debian 127.0.1.1. Raises BadInput if
    this host has no such interface, or no way to MASTER_ADDR.
    """
    known = [name for _, name in socket.if_nameindex()]
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        name = interface_to_master(known)
        if name:
            os.environ["GLOO_SOCKET_IFNAME"] = name
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    for name in names.split(","):
        if name and name not in known:
            raise BadInput(f"GLOO_SOCKET_IFNAME={names}: a host has no {name}, only "
                           f"{', '.join(known)}")
    return names


def interface_to_master(names):
    """The name of the interface from which this host reaches MASTER_ADDR; None if none fits."""
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    if os.environ.get("LOCAL_WORLD_SIZE", "") == os.environ.get("WORLD_SIZE"):
        master = "127.0.0.1"                                        # all ranks are on this host
    found = None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((master, 1))                              # sends nothing
        except OSError as error:
            raise BadInput(f"MASTER_ADDR={master}: {error}")
        own = socket.inet_aton(probe.getsockname()[0])
        for name in names:
            request = name.encode().ljust(40, b"\0")
            with contextlib.suppress(OSError):                      # it may have no address
                answer = fcntl.ioctl(probe, 0x8915, request)        # SIOCGIFADDR
                if answer[20:24] == own:
                    found = name
    return found


def gloo_group(store, key, place, size, timeout):
    """A new Gloo group of `size` processes, this one at `place`, which find each other under `key`.

    timeout: seconds for each message. To connect, Gloo takes up to five times that.
    """
    create = dist.ProcessGroupGloo.create_device
    default = dist.ProcessGroupGloo.create_default_device
    # The private names below were tried with torch 2.13, and stand in no other file.
    options = dist.ProcessGroupGloo._Options()
    # A group has devices of its own, which end with it. After a timeout Gloo frees the
    # connection, but a living device still calls it when the partner connects after all: the
    # process would crash.
    names = gloo_interface().split(",")
    options._devices = [create(interface=name) if name else default() for name in names]
    options._threads = 1
    options._timeout = timedelta(seconds=timeout)
    return dist.ProcessGroupGloo(dist.PrefixStore(key, store), place, size, options)
