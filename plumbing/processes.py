"""The processes of a run, and what they tell each other through the store that torchrun (or rank 0) hosts."""
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
BROKEN = "Connection ", "Broken pipe", "ncclRemoteError"      # in the errors of Gloo and NCCL for a lost peer


class BadInput(Exception):
    """Something that the user can correct. The message is the one line that the first rank prints."""


def forbid(*rules):
    """Raise BadInput with the line of the first rule, (condition, line), whose condition holds."""
    for wrong, line in rules:
        if wrong:
            raise BadInput(line)


def restarts():
    """How often torchrun has started these processes again (--max-restarts)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


class Job:
    """This process among the processes of the run.

    rank, world; device; nccl: whether messages travel over NCCL. store: every rank reads and writes its keys.
    The first rank, of `members`, is rank 0; in survive/ it may become another one.
    joining: whether this process takes a dead rank's place in a job that is training (survive/).
    """
    needs_all = True    # training stops when a process is lost
    patience = DAY      # seconds for a message that only the log waits for

    def __init__(self, argv=None):
        """argv: the command line (None: sys.argv). If it has --help, only rank 0 goes on, to print the help.
        """
        self.rank = int(os.environ.get("RANK", 0))
        self.world = int(os.environ.get("WORLD_SIZE", 1))
        self.device = torch.device("cpu")
        self.nccl = self.joining = False
        self.members = range(self.world)        # the ranks that share values
        self.leads = self.rank == 0             # it prints, and writes the log
        self.store = dist.HashStore()
        self.events = []
        if self.world > 1:
            store, *_ = next(iter(dist.rendezvous("env://")))
            # torchrun keeps its store over a restart: the keys of the processes before must not be read
            self.store = dist.PrefixStore(f"attempt{restarts()}", store)
        if self.rank > 0 and not {"-h", "--help"}.isdisjoint(sys.argv if argv is None else argv):
            sys.exit(0)

    # ---- telling each other

    def share(self, name, value, read=True):
        """Every rank's value under this name, in the order of ranks. JSON carries the values.

        Every call has a name of its own. read: False writes this rank's value, waits for no rank and returns
        None.
        """
        self.store.set(f"{name}/{self.rank}", json.dumps(value))
        if read:
            texts = self.store.multi_get([f"{name}/{r}" for r in self.members])
            return [json.loads(text) for text in texts]

    def collect(self, name, value):
        """On the first rank {rank: its value}, for the log; None on the other ranks, which do not wait."""
        found = self.share(name, value, read=self.leads)
        return found and dict(zip(self.members, found))

    def together(self, function, *args, name=None):
        """function(*args) on every rank. BadInput or OSError on any rank ends all ranks with status 2.

        So does a missing package. The first rank prints its one line before. name: unique to this call
        (default: that of the function).
        """
        result, problem = None, ""
        try:
            result = function(*args)
        except (BadInput, OSError) as error:
            problem = one_line(error)
        except ModuleNotFoundError as error:
            extra = "plot" if error.name == "matplotlib" else "hf"
            problem = f"this needs the {error.name} package: pip install '.[{extra}]'"
        for line in filter(None, self.share(f"problem/{name or function.__name__}", problem)):
            self.refuse(line)
        return result

    def refuse(self, line):
        """Ends all ranks with status 2, after the first rank has printed the line. Every rank calls it."""
        if self.leads:
            complain(line)
        self.share("told", "")              # the line comes first: torchrun stops all when one rank leaves
        Job.collect(self, "left", "")       # the first rank leaves last: it may host the store
        sys.exit(2)

    def agree(self, parse, argv):
        """The fields of parse(argv, world) on the first rank, for every rank."""
        return self.agree_on("options", lambda: vars(parse(argv, self.world)))

    def agree_on(self, name, function):
        """The first rank calls function(). Every rank gets its result, which JSON carries.

        Refuses as `together`.
        """
        found = self.together(lambda: function() if self.leads else None, name=name)
        return self.share(name, found)[0]

    def say(self, lines):
        """The first rank prints the lines, while there is no progress bar."""
        for line in lines if self.leads else []:
            print(line, flush=True)

    def tell(self, event):
        """Put an event in the first rank's log: a dict with `line` for the screen. Only the first rank
        may call it; in survive/ every rank may, and without `line`."""
        self.events.append(event)

    def news(self):
        """The events since the last call, on the first rank."""
        told, self.events = self.events, []
        return told

    def gone(self, store=None):
        """The ranks that are dead or absent at this moment, of which each rank has its own view.

        store: this thread's own client (default: self.store).
        """
        return set()

    # ---- groups

    def connect(self, o, group=True):
        """Choose the device and the backend. Make the default process group (with Gloo only if `group`)."""
        gpus = torch.cuda.device_count() if torch.cuda.is_available() and o.device != "cpu" else 0
        found = self.share("gpus", [gpus, int(os.environ.get("LOCAL_WORLD_SIZE", self.world))])
        if o.device == "cuda" and not all(there for there, _ in found):
            self.refuse("--device cuda: torch sees no GPU on at least one machine")
        scarce = [f"{there} GPUs for {ranks} ranks" for there, ranks in found if there < ranks]
        if o.backend == "nccl" and scarce:
            self.refuse(f"--backend nccl: a machine has {scarce[0]}; use gloo")
        if gpus:
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % gpus)
            torch.cuda.set_device(self.device)
        self.nccl = self.world > 1 and o.backend != "gloo" and not scarce
        if self.world > 1 and not self.nccl:
            hosts = self.refuse_loopback()
            share_cores(self.rank, [host.split()[0] for host in hosts])
        if self.world > 1 and (group or self.nccl):
            # lazily Gloo connects only pairs that talk, otherwise every pair at the start
            os.environ.setdefault("TORCH_GLOO_LAZY_INIT", str(int(self.world > 64)))
            dist.init_process_group("nccl" if self.nccl else "gloo", rank=self.rank, world_size=self.world,
                                    store=dist.PrefixStore("job", self.store))
            dist.barrier()              # NCCL: the first use of a group must have every rank in it

    def refuse_loopback(self):
        """Each rank's `this_host`. Refuses hosts of which one offers the others its loopback address, since
        they could never connect."""
        found = self.share("host", [this_host(), self.together(gloo_interface)])
        loopback = [r for r, (_, names) in enumerate(found) if names.split(",")[0] in ("lo", "lo0")]
        if loopback and len({host for host, _ in found}) > 1:
            self.refuse(f"rank {loopback[0]} offers other hosts its loopback interface: give torchrun "
                        "node 0's address as --master-addr, or on that host export GLOO_SOCKET_IFNAME=NAME")
        return [host for host, _ in found]

    def meet(self, key, ranks):
        """(the ranks that came, their Gloo group): a group for one use. Here all `ranks` come."""
        return ranks, gloo_group(self.store, key, ranks.index(self.rank), len(ranks), DAY)

    # ---- the end

    @contextlib.contextmanager
    def rescue(self, run, save):
        """Around training: an error ends this rank in one line, or in a traceback if its cause is unknown.

        save: writes a checkpoint (for survive/, which saves on an error).
        """
        try:
            with Signals(self, run) as self.signals:
                yield
        except (BadInput, OSError, RuntimeError) as error:
            run.log.bar.close()
            if self.another_gave_up():
                sys.exit(2)
            print(end="\n" if self.rank else "", file=sys.stderr)           # leave rank 0's progress bar
            if not isinstance(error, RuntimeError):                         # most often a full disk
                complain(f"{one_line(error)}; once that is put right {next_command(run)}")
            elif self.signals.number or any(words in str(error) for words in BROKEN):
                print(f"stopped: rank {self.rank} at step {run.step}: another process is gone; "
                      f"{next_command(run)}", file=sys.stderr, flush=True)
            else:
                raise
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
    boot, network = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    return f"{boot.read_text().strip()} {network.stat().st_ino}" if boot.exists() else socket.gethostname()


def gloo_interface():
    """The network interface of all Gloo groups, torch's own too; call before init_process_group (Linux).

    GLOO_SOCKET_IFNAME names it (a comma list too). If unset, it becomes the interface from which this host
    reaches MASTER_ADDR. Torch alone would take the address of the host's own name, on Debian 127.0.1.1.
    Raises BadInput if this host has no such interface, or no way to MASTER_ADDR.
    """
    known = [name for _, name in socket.if_nameindex()]
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        one_host = os.environ.get("LOCAL_WORLD_SIZE", "") == os.environ.get("WORLD_SIZE")
        master = "127.0.0.1" if one_host else os.environ.get("MASTER_ADDR", "127.0.0.1")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((master, 1))                              # sends nothing
            except OSError as error:
                raise BadInput(f"MASTER_ADDR={master}: {error}")
            own = socket.inet_aton(probe.getsockname()[0])
            for name in known:
                with contextlib.suppress(OSError):                      # it may have no address
                    answer = fcntl.ioctl(probe, 0x8915, name.encode().ljust(40, b"\0"))     # SIOCGIFADDR
                    if answer[20:24] == own:
                        os.environ["GLOO_SOCKET_IFNAME"] = name
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if strange := [name for name in names.split(",") if name and name not in known]:
        raise BadInput(f"GLOO_SOCKET_IFNAME={names}: a host has no {strange[0]}, only {', '.join(known)}")
    return names


def gloo_group(store, key, place, size, timeout):
    """A new Gloo group of `size` processes, this one at `place`, which find each other under `key`.

    timeout: seconds for each message. To connect, Gloo takes up to five times that.
    """
    create, default = dist.ProcessGroupGloo.create_device, dist.ProcessGroupGloo.create_default_device
    options = dist.ProcessGroupGloo._Options()
    # A group has devices of its own, which end with it. After a timeout Gloo frees the connection, but a
    # living device still calls it when the partner connects after all: the process would crash.
    options._devices = [create(interface=name) if name else default() for name in gloo_interface().split(",")]
    options._threads = 1
    options._timeout = timedelta(seconds=timeout)
    return dist.ProcessGroupGloo(dist.PrefixStore(key, store), place, size, options)
