"""A program for a folder that has only some of our files: tests.harness.runs_alone starts it there.

It imports torch once. The ranks of each run are forked from it, and run a file as torchrun's
workers would. It reads [(processes, file, words, folder)] of the runs, and prints a list of
[exit status, what is printed] for each rank of each run.
"""
import contextlib
import io
import json
import multiprocessing
import os
import runpy
import socket
import sys
import traceback

import torch._dynamo        # noqa: F401, so that forked ranks have it: an optimizer would import it

fork = multiprocessing.get_context("fork")


def rank_of(pipe, rank, world, port, file, words, folder):
    os.chdir(folder)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world),
                      LOCAL_WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    sys.argv = [file, *words]
    sys.path[0] = os.path.dirname(os.path.abspath(file))
    status, said = 0, io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            runpy.run_path(file, run_name="__main__")
        except SystemExit as stop:
            status = stop.code or 0
        except BaseException:
            status = 1
            traceback.print_exc()
    pipe.send((status, said.getvalue()))


def run(world, *program):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pipes, children = [], []
    for rank in range(world):
        ours, theirs = fork.Pipe()
        inputs = (theirs, rank, world, port, *program)
        children.append(fork.Process(target=rank_of, args=inputs, daemon=True))
        children[-1].start()
        theirs.close()
        pipes.append(ours)
    found = [pipe.recv() for pipe in pipes]
    for child in children:
        child.join()
    return found


if __name__ == "__main__":
    json.dump([run(*one) for one in json.load(sys.stdin)], sys.stdout)
