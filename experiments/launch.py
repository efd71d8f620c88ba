"""Ranks of one machine that import torch once: `python -m experiments.launch N -m MODULE OPTIONS`.

torchrun starts N interpreters, each of which imports torch for seconds. Here one imports it, and
the ranks are forked from it, before torch has any thread. If one rank fails, all end.
"""
import os
import runpy
import signal
import socket
import sys

import train        # noqa: F401, so that forked ranks have it, and torch


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def start(rank, size, port, words):
    """Fork a rank; returns its process id."""
    child = os.fork()
    if child:
        return child
    os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size),
                       LOCAL_WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    _, module, *options = words
    sys.argv = [module, *options]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.exit()


def main():
    size = int(sys.argv[1])
    port = free_port()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))     # so that the ranks end too
    running = {start(rank, size, port, sys.argv[2:]) for rank in range(size)}
    try:
        while running:
            child, status = os.wait()
            running.remove(child)
            if status:
                sys.exit(os.waitstatus_to_exitcode(status) or 1)
    finally:
        for child in running:
            os.kill(child, signal.SIGTERM)


if __name__ == "__main__":
    main()
