"""Ranks that import torch once: `python -m experiments.launch N [HOSTS] -m MODULE OPTIONS`.

torchrun starts N interpreters, each of which imports torch for seconds: on a tenth of a processor
for most of a minute. Here one imports it, and the ranks are forked from it, before torch has any
thread. If one rank fails, all end.

HOSTS: options of tools/hosts.py (root). Each rank is then a host of its own.
"""
import ctypes
import json
import os
import runpy
import signal
import socket
import sys
from contextlib import nullcontext
from pathlib import Path

# So that forked ranks have them; what an optimizer imports by itself takes seconds, too.
import torch._dynamo    # noqa: F401

import experiments.harness  # noqa: F401
import gossip           # noqa: F401
from tools.hosts import Hosts, enter, read


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def start(rank, size, words):
    """Fork a rank, which waits for its place. Returns its process id and where to write this."""
    told, tell = os.pipe()
    child = os.fork()
    if child:
        os.close(told)
        return child, tell
    signal.signal(signal.SIGTERM, signal.SIG_DFL)           # until `train.begin` sets it anew
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)              # PR_SET_PDEATHSIG: no rank is left over
    place = json.loads(os.read(told, 10_000))
    take(place)
    os.environ |= dict(RANK=str(rank), WORLD_SIZE=str(size), **place["environment"])
    _, module, *options = words
    sys.argv = [module, *options]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.stdout.flush()
    os._exit(0)         # to take torch's modules apart takes seconds, too: on a slow host 15


def take(place):
    """Move this process to its host's network and control group."""
    if place["network"]:
        enter(place["network"])
    if place["group"]:
        Path(place["group"], "cgroup.procs").write_text("0")


def place_of(rank, size, hosts):
    """The environment that places a rank. hosts: Hosts, or None for one machine."""
    if not hosts:
        local = dict(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1")
        return dict(network=None, group=None, environment=local)
    local = dict(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR="10.77.0.1", MASTER_PORT="29500")
    group = hosts.groups.get(rank)
    return dict(network=hosts.networks[rank], group=group and str(group), environment=local)


def main():
    size = int(sys.argv[1])
    begin = sys.argv.index("-m")
    network, words = sys.argv[2:begin], sys.argv[begin:]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))     # so that the ranks end too
    # First the ranks: a process that has threads, such as the network's, must not fork.
    ranks = [start(rank, size, words) for rank in range(size)]
    machine = nullcontext()
    if network:
        machine = Hosts(size, **read([str(size), *network, "--", "true"]).tables)
    with machine as hosts:
        port = str(free_port())
        for rank, (_, tell) in enumerate(ranks):
            place = place_of(rank, size, hosts)
            place["environment"].setdefault("MASTER_PORT", port)
            os.write(tell, json.dumps(place).encode())
        wait_for({child for child, _ in ranks})


def wait_for(running):
    """Until all ranks have ended; where one fails, all end, also those that wait for a message."""
    try:
        while running:
            child, status = os.wait()
            running.discard(child)          # else it was none of the ranks
            if status:
                sys.exit(os.waitstatus_to_exitcode(status) or 1)
    finally:
        for child in running:
            os.kill(child, signal.SIGKILL)


if __name__ == "__main__":
    main()
