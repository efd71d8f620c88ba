"""The processes of a run, and what they tell each other through the store that torchrun (or rank 0) hosts."""
import contextlib
import fcntl
import json
import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from plumbing.ending import Ending, next_command
from plumbing.silence import Silence

DAY = 86400.0       # seconds: as good as for ever


class BadInput(Exception):
    """Something the user can put right; the message is the one line that rank 0 prints."""


def restarts():
    """How often torchrun has started these processes again (--max-restarts)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def may_restart():
    """Whether torchrun would start them again."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0


class Job:
    """This process among those of the run: rank, world, device, and whether messages go through NCCL."""

    def __init__(self):
        self.rank = int(os.environ.get("RANK", 0))
        self.world = int(os.environ.get("WORLD_SIZE", 1))
        self.device = torch.device("cpu")
        self.nccl = self.joining = False
        self.store = None
        self.events = []
        if self.world > 1:
            store, *_ = next(iter(dist.rendezvous("env://")))
            # torchrun keeps its store when it starts processes again: what the dead wrote must not be read
            self.store = dist.PrefixStore(f"attempt{restarts()}", store)

    # ---- telling each other

    def share(self, name, text):
        """Every rank's text under this name, in the order of ranks."""
        if self.world == 1:
            return [text]
        self.store.set(f"{name}/{self.rank}", "=" + text)           # a store takes no empty values
        values = self.store.multi_get([f"{name}/{r}" for r in range(self.world)])
        return [value.decode()[1:] for value in values]

    def together(self, function, *args, name=None):
        """function(*args) on every rank; bad input on any ends all with status 2, after one line from rank 0.

        name: of this occasion; each has its own (default: the function's).
        """
        result, problem = None, ""
        try:
            result = function(*args)
        except (BadInput, OSError) as error:
            problem = one_line(error)
        for line in filter(None, self.share(f"problem/{name or function.__name__}", problem)):
            self.refuse(line)
        return result

    def refuse(self, line):
        """All ranks come here."""
        if self.rank == 0:
            complain(line)
        self.share("told", "")              # torchrun stops all when the first leaves: not before the line
        Job.collect(self, "left", 0)        # rank 0 may host the store, so it leaves last
        sys.exit(2)

    def agree(self, parse, argv):
        """Rank 0's options hold for all: the fields of parse(argv, world)."""
        return self.agree_on("options", lambda: vars(parse(argv, self.world)))

    def agree_on(self, name, function):
        """function() is called on rank 0 and its result, which JSON must be able to carry, given to all."""
        found = self.together(lambda: function() if self.rank == 0 else None, name=name)
        return json.loads(self.share(name, json.dumps(found))[0])

    def leaves_help(self, argv):
        """Whether --help is asked for, which rank 0 prints, and this is another."""
        return self.rank > 0 and not {"-h", "--help"}.isdisjoint(sys.argv if argv is None else argv)

    def say(self, lines):
        """On rank 0."""
        for line in lines if self.rank == 0 else []:
            print(line, flush=True)

    def collect(self, name, values):
        """What every rank tells for the log: rank 0 gets {rank: values}, the others None."""
        if self.world == 1:
            return {0: values}
        self.store.set(f"{name}/{self.rank}", json.dumps(values))
        if self.rank == 0:
            found = self.store.multi_get([f"{name}/{r}" for r in range(self.world)])
            return {r: json.loads(text) for r, text in enumerate(found)}

    def tell(self, event):
        """For rank 0's log. (Here on rank 0; with survive/ on any.)"""
        self.events.append(event)

    def news(self):
        """Events for rank 0's log since the last time."""
        told, self.events = self.events, []
        return told

    def gone(self, store=None):
        """Ranks from which nothing is expected any more."""
        return set()

    # ---- groups

    def connect(self, o, group=True):
        """Choose device and backend; make the default process group (NCCL, or if group)."""
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        local_world = int(os.environ.get("LOCAL_WORLD_SIZE", self.world))
        gpus = torch.cuda.device_count() if torch.cuda.is_available() and o.device != "cpu" else 0

        def devices():
            if o.device == "cuda" and not gpus:
                raise BadInput("--device cuda: torch sees no GPU on at least one machine")
            if o.backend == "nccl" and local_world > gpus:
                raise BadInput(f"--backend nccl: a machine has {gpus} GPUs for {local_world} ranks; use gloo")
        self.together(devices)
        if gpus:
            self.device = torch.device("cuda", local_rank % gpus)
            torch.cuda.set_device(self.device)
        own = all(self.share("gpu", "own" if local_world <= gpus else ""))
        self.nccl = self.world > 1 and o.backend != "gloo" and own
        if self.world > 1 and not self.nccl:
            self.together(self.interface)
        if self.world > 1 and (group or self.nccl):
            if self.world > 64:         # Gloo connects every pair at the start; here only those that talk
                os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
            store = dist.PrefixStore("job", self.store)
            backend = "nccl" if self.nccl else "gloo"
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world)
            dist.barrier()              # NCCL: the first use of a group must have everyone in it

    def interface(self):
        """Refuse hosts that would offer each other a loopback address: they could never meet."""
        names = problem = ""
        try:
            names = gloo_interface()
            known = [name for _, name in socket.if_nameindex()]
            if strange := [name for name in names.split(",") if name and name not in known]:
                problem = f"GLOO_SOCKET_IFNAME={names}: a host has no {strange[0]}, only {', '.join(known)}"
        except OSError as error:
            problem = f"MASTER_ADDR={os.environ.get('MASTER_ADDR')}: {error}"
        # told before anyone gives up: who finds nothing wrong waits for the others here
        told = [text.split("|") for text in self.share("host", f"{this_host()}|{names}|{problem}")]
        for problem in filter(None, (text for *_, text in told)):
            raise BadInput(problem)
        loopback = [r for r, (_, name, _) in enumerate(told) if name.split(",")[0] in ("lo", "lo0")]
        if loopback and len({host for host, *_ in told}) > 1:
            raise BadInput(f"rank {loopback[0]} would offer other hosts its loopback interface: there export "
                           "GLOO_SOCKET_IFNAME=NAME, the interface that the others reach, or give torchrun "
                           "--master-addr ADDRESS, node 0's address as the others see it")

    patience = DAY      # seconds for a message that only the log waits for

    def meet(self, key, ranks):
        """A Gloo group of these ranks, for once: (the ranks that came, group)."""
        return ranks, gloo_group(self.store, key, ranks.index(self.rank), len(ranks), DAY)

    def averager(self, replicas):
        """Of gradients, for ddp; None for one replica."""
        if len(replicas) == 1:
            return None
        group = dist.new_group(replicas, use_local_synchronization=True)
        return Average(lambda t: dist.all_reduce(t, group=group, async_op=True), len(replicas))

    @contextlib.contextmanager
    def rescue(self, run, save):
        """Around training, which needs every process. (survive/ saves here what can be saved.)"""
        try:
            with Ending(self, run) as self.ending, self.silence(run):
                yield
        except (BadInput, OSError) as error:        # a full disk, most often
            run.log.bar.close()
            self.give_up(f"{one_line(error)}; once that is put right {next_command(run)}")
        except RuntimeError:                        # most often a peer's connection that broke
            if self.another_gave_up():
                sys.exit(2)
            print(f"stopped: rank {self.rank} at step {run.step}; if another process is gone, "
                  f"{next_command(run)}", file=sys.stderr, flush=True)
            if self.ending.number:
                sys.exit(2)
            raise

    def silence(self, run):
        """Says which ranks say nothing. (survive/ goes on without them.)"""
        return Silence(self, run)

    def stop_if_asked(self, save):
        """At the start of a step: after Ctrl-C or SIGTERM all save and leave at the same one."""
        self.ending.stop_if_due(save)

    def give_up(self, line):
        """This rank cannot go on: it says why, and nobody else says anything."""
        if not self.another_gave_up():
            print(end="\n" if self.rank else "", file=sys.stderr)       # off rank 0's progress bar
            complain(line)
        sys.exit(2)

    def another_gave_up(self):
        """Whether a rank has come here, or to give_up, before. False where the store is gone."""
        with contextlib.suppress(RuntimeError):
            return self.store is not None and self.store.add("gave up", 1) > 1
        return False

    def close(self):
        self.collect("done", 0)             # rank 0 may host the store, so it leaves last
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()


def this_host():
    """A text that is another on every host, also where hosts are network namespaces of one machine."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not boot.exists():
        return socket.gethostname()
    return f"{boot.read_text().strip()} {Path('/proc/self/ns/net').stat().st_ino}"


class Average:
    """average(grad, tokens) sums both over the replicas: grad in place, the tokens returned."""

    def __init__(self, all_reduce, replicas):
        self.all_reduce, self.replicas = all_reduce, replicas
        self.bytes_sent = 0

    def __call__(self, grad, tokens):
        count = torch.tensor(float(tokens), device=grad.device)
        works = [self.all_reduce(t) for t in (count, grad)]
        for work in works:
            work.wait()
        self.bytes_sent += 2 * (self.replicas - 1) * grad.nbytes // self.replicas       # what a ring sends
        return float(count)


def one_line(error):
    return " ".join(str(error).split())


def complain(line):
    """The one line; and once more where torchrun shows it, at the end of its own report."""
    print("error: " + line, file=sys.stderr, flush=True)
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with contextlib.suppress(OSError):
            message = dict(message="error: " + line, extraInfo=dict(timestamp=str(int(time.time()))))
            Path(file).write_text(json.dumps(dict(message=message)))


def gloo_interface():
    """The network interface of all Gloo groups, torch's own too; call before init_process_group (Linux).

    GLOO_SOCKET_IFNAME names it (a comma list too). If unset, it becomes the interface from which this host
    reaches MASTER_ADDR. Torch alone would take the address of the host's own name, on Debian 127.0.1.1.
    """
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        here, world = os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("WORLD_SIZE")
        one_host = here is not None and here == world
        master = "127.0.0.1" if one_host else os.environ.get("MASTER_ADDR", "127.0.0.1")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((master, 1))                                  # sends nothing
            own = socket.inet_aton(probe.getsockname()[0])
            for _, name in socket.if_nameindex():
                with contextlib.suppress(OSError):                      # it may have no address
                    answer = fcntl.ioctl(probe, 0x8915, name.encode().ljust(40, b"\0"))     # SIOCGIFADDR
                    if answer[20:24] == own:
                        os.environ["GLOO_SOCKET_IFNAME"] = name
    return os.environ.get("GLOO_SOCKET_IFNAME", "")


def gloo_group(store, key, place, size, timeout):
    """A new Gloo group of `size` processes, this one at `place`, who find each other under `key`.

    timeout: seconds for each message; to find each other Gloo takes up to five times that.
    """
    options = dist.ProcessGroupGloo._Options()
    options._devices = gloo_devices()
    options._threads = 1
    options._timeout = timedelta(seconds=timeout)
    return dist.ProcessGroupGloo(dist.PrefixStore(key, store), place, size, options)


_devices = []


def gloo_devices():
    """One for each interface, for all groups: one of its own would double what a group costs."""
    if not _devices:
        create, default = dist.ProcessGroupGloo.create_device, dist.ProcessGroupGloo.create_default_device
        names = gloo_interface().split(",")
        _devices.extend(create(interface=name) if name else default() for name in names)
    return _devices
