"""Processes that end by themselves, and the few helpers that several test files share."""

import contextlib
import functools
import io
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.run
from torch.utils._pytree import tree_leaves

import train
from model import Config, Llama
from survive.__main__ import main as surviving
from train import Job

# Torch asks for the name of each address that connects. A silent name server would hold a store for seconds.
os.environ["RES_OPTIONS"] = "attempts:0"
HERE = Path(__file__).parent.parent
SMALL = ["--hidden", "32", "--layers", "4", "--heads", "2", "--mlp", "64", "--seq-len", "32", "--batch", "2",
         "--eval-sequences", "8"]
SMALL_CONFIG = Config(256, 32, 64, 4, 2, 2)     # that of a run with these options
LINKS = dict(delay=[[0.002 * (i != j) * (1 + (i + j) % 3) for j in range(5)] for i in range(5)], compute=0.01,
             overhead=0.001)    # a network of five nodes

# The server imports everything once, all files with functions that ranks run, and what an optimizer would
# import by itself (seconds); each test process is a fork of it, ready in milliseconds.
fork = multiprocessing.get_context("forkserver")
FILES = [f"tests.{path.stem}" for path in HERE.glob("tests/test_*.py")]
fork.set_forkserver_preload(["torch._dynamo", "torch.distributed.fsdp", "test_minimal", *FILES])
HELD = deque(maxlen=64)


def free_port():
    """It is held, so that the system gives it to no other process; a store may still listen on it."""
    HELD.append(socket.socket())
    HELD[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    HELD[-1].bind(("127.0.0.1", 0))
    return HELD[-1].getsockname()[1]


def rank_process(pipe, rank, world, port, agent, cwd, function, args):
    os.chdir(cwd)
    signal.signal(signal.SIGINT, signal.default_int_handler)    # a shell's background jobs ignore it
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank),
                      LOCAL_WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
                      OMP_NUM_THREADS="1", TORCHELASTIC_USE_AGENT_STORE=str(agent),
                      TORCHELASTIC_RESTART_COUNT="0")
    torch.set_num_threads(1)
    Job.silent = 600        # a busy machine starts processes slowly, which is no fault to tell
    try:
        pipe.send((True, function(rank, world, *args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))


IDLE = 0.5      # seconds for the work of `slowness` on two cores that do nothing else than two or three tests
MEASURED = SimpleNamespace(slowness=1.0, at=-math.inf)


def slowness():
    """How many times slower tests are here now than on two idle cores, at least 1.

    It is measured at most every 30 s (a hundredth of the time of an idle machine). The work is that of a test
    with processes: four are forked, and meet at a store, as in an exchange, after each of ten steps of a
    small model.
    """
    if time.monotonic() - MEASURED.at > 30:
        processes(1, _nothing, limit=600)           # the server that forks starts, and imports everything
        begin = time.monotonic()
        processes(4, _ten_steps, limit=600)
        MEASURED.at = time.monotonic()
        MEASURED.slowness = max(1.0, (MEASURED.at - begin) / IDLE)
    return MEASURED.slowness


def _nothing(rank, world):
    """No work."""


def _ten_steps(rank, world):
    job, model = Job(), Llama(SMALL_CONFIG)
    tokens = torch.zeros(2, 33, dtype=torch.long)
    for step in range(10):
        model.loss(model.blocks(model.embed(tokens[:, :-1])), tokens[:, 1:]).backward()
        job.share(step)
    job.close()


def patience(seconds):
    """How long to wait here for what takes less than `seconds` on two idle cores.

    A test that waits for a fault, or for its end, takes its seconds from here: on a busy machine a healthy
    process may be silent for longer than a fault is meant to last. What can wait for an event does that.
    """
    return seconds * slowness()


def processes(world, function, *args, cwd=".", limit=None, port=None, fallen=()):
    """function(rank, world, *args) on `world` processes: their results in the order of ranks.

    All end here, whatever happens. limit: seconds until then (default: patience(120)). port: of a store
    hosted elsewhere, as torchrun does. fallen: ranks that need not finish; their result is None.
    """
    limit = patience(120) if limit is None else limit
    agent = port is not None
    port = port or free_port()
    pipes, children = [], []
    try:
        for rank in range(world):
            ours, theirs = fork.Pipe()
            inputs = (theirs, rank, world, port, agent, str(cwd), function, args)
            children.append(fork.Process(target=rank_process, args=inputs))
            children[-1].start()
            theirs.close()
            pipes.append(ours)
        results, waiting = {}, dict(zip(pipes, range(world)))
        end = time.monotonic() + limit
        while set(waiting.values()) - set(fallen):
            ready = multiprocessing.connection.wait(list(waiting), timeout=max(0, end - time.monotonic()))
            assert ready, f"ranks {sorted(waiting.values())} did not finish within {limit:.0f} s"
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    good, results[rank] = pipe.recv()
                except EOFError:
                    good, results[rank] = rank in fallen, None
                assert good, f"rank {rank}: {results[rank]}"
        return [results.get(r) for r in range(world)]
    finally:
        for child in children:
            child.kill()
            child.join()


def wait_until(condition, limit=None):
    """Returns when condition() is true; fails after `limit` seconds (default: patience(60))."""
    end = time.monotonic() + (patience(60) if limit is None else limit)
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)        # between two looks


CPUS = ("gloo", "cpu")      # (backend, device) of ranks: see conftest.py's `place`


def host_of_its_own(rank):
    """NCCL refuses two ranks on one GPU of one host: each rank says that it is a host of its own."""
    os.environ.update(NCCL_HOSTID=f"rank{rank}", NCCL_SOCKET_IFNAME="lo", LOCAL_RANK="0",
                      LOCAL_WORLD_SIZE="1")


def gloo(function):
    """Decorates a rank's function: the process group is up while it runs."""

    @functools.wraps(function)
    def wrapped(rank, world, *args):
        dist.init_process_group("gloo")
        result = function(rank, world, *args)
        dist.barrier()
        return result

    return wrapped


def connected_job():
    """What a Pipeline made by hand needs: this process's Job, with the default process group."""
    job = Job()
    job.connect(SimpleNamespace(backend="gloo"))
    return job


def captured(rank, world, main, argv):
    """main(argv, as words) in this process: (exit status, what it printed)."""
    out, code = io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            main([str(a) for a in argv])
        except SystemExit as stop:
            code = stop.code
    return code, out.getvalue()


def train_main(rank, world, argv):
    return captured(rank, world, train.main, argv)


def surviving_main(rank, world, argv):
    return captured(rank, world, surviving, argv)


def run(world, *argv, cwd, main=train.main):
    """Train, or another program; fails unless every rank ends well. Returns rank 0's output."""
    results = processes(world, captured, main, argv, cwd=cwd)
    assert all(code == 0 for code, _ in results), results
    return results[0][1]


def torchrun(rank, world, *argv):
    """In a fork: torchrun with two workers, fresh interpreters. The file `said` gets what they print."""
    with open("said", "w") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    os.environ.pop("PYTHONPATH", None)
    torch.distributed.run.main(["--standalone", "--nproc-per-node", "2", *argv])


def alone(folder, *command, given=""):
    """(exit status, what it prints) of a fresh Python in this folder, without any path to ours."""
    environment = dict(os.environ, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    environment.pop("PYTHONPATH", None)
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen([sys.executable, *command], cwd=folder, env=environment, start_new_session=True,
                          **pipes) as process:
        try:
            said, wrong = process.communicate(given, timeout=patience(240))
        finally:
            with contextlib.suppress(ProcessLookupError):       # its own processes end with it
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, said or wrong


def runs_alone(folder, *runs):
    """[[exit status, what is printed] of each rank] of each run: (processes, file, words, its folder).

    All in one fresh Python in the folder, which imports torch once (tests/alone.py).
    """
    listed = []
    for world, file, words, *inside in runs:
        listed.append((world, file, [str(word) for word in words], str(Path(folder, *inside))))
    program = (HERE / "tests/alone.py").read_text()
    status, said = alone(folder, "-c", program, given=json.dumps(listed))
    assert status == 0, said
    return json.loads(said)


def error_of(main, *argv):
    """The one line that main prints for this bad input; it ends with status 2."""
    code, text = captured(0, 1, main, argv)
    assert code == 2 and text.startswith("error: ") and text.count("\n") == 1, (argv, code, text)
    return text


def refused(world, *argv, cwd, main=train.main, after=0):
    """The one line of one rank, after so many others of rank 0, for this bad input. All ranks end with status
    2. Of a rank but the first the line names it: here it does not."""
    results = processes(world, captured, main, argv, cwd=cwd)
    told = [line for _, text in results for line in text.splitlines()]
    errors = [re.sub(r"^error: rank \d+: ", "error: ", line) for line in told if line.startswith("error: ")]
    assert all(code == 2 for code, _ in results), (argv, results)
    assert len(errors) == 1 and len(told) == after + 1, (argv, results)
    return errors[0]


def goes_on_to_the_bit(folder, step, world=4, options=()):
    """Without its last checkpoint, that of this step, the run goes on from the one before, as it did.

    options: some of its own, given again.
    """
    whole = shutil.copytree(folder, folder.with_name("whole"))
    shutil.rmtree(folder / f"checkpoints/{step:08d}")
    run(world, "--resume", folder, *options, cwd=folder.parents[1])
    assert_same(folder, whole, step, world)


def write_corpus(folder):
    """A folder of ten small text files."""
    r = random.Random(0)
    folder.mkdir(exist_ok=True)
    for i in range(10):
        words = (r.choice(["phi", "theta", "delta", "gossip", "stage"]) for _ in range(1500))
        (folder / f"{i}.txt").write_text(" ".join(words))
    return folder


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def checkpoint(folder, step, rank):
    return torch.load(folder / "checkpoints" / f"{step:08d}" / f"rank{rank}.pt", weights_only=True)


def slow_weights(state):
    """Of a checkpoint: phi, delta and what rounding left over, those of each fragment."""
    outer = state["outer"] or {}
    parts = [state, *outer.get("fragments", [outer])]
    return [part[name] for part in parts for name in ("phi", "delta", "owed") if name in part]


def assert_same(folder, other, step, world=4):
    """Two runs are the same at this step, to the bit: weights, optimizer, outer state, place in the data."""
    for rank in range(world):
        states = [checkpoint(run, step, rank) for run in (folder, other)]
        leaves = [tree_leaves([s["theta"], s["inner"], s["cursor"], *slow_weights(s)]) for s in states]
        for a, b in zip(*leaves, strict=True):
            assert torch.equal(a, b) if torch.is_tensor(a) else a == b, rank


def options(*argv):
    return train.parse([str(a) for a in argv])


def _host(pipe):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


@contextlib.contextmanager
def store_host():
    """A process that hosts the store, as node 0's torchrun does: (port, pid)."""
    ours, theirs = fork.Pipe()
    host = fork.Process(target=_host, args=(theirs,))
    host.start()
    try:
        yield ours.recv(), host.pid
    finally:
        host.kill()
        host.join()
