"""Ctrl-C and SIGTERM, which torchrun passes on to its workers: all ranks stop after one same step.

Which one, they cannot ask each other between two steps: others wait for them in the midst of a step, for
ever, and in there Python runs no signal handler. So a thread, which the signal wakes, tells the store at once
the first step after which this rank can stop, and all train on to the largest of these.
"""
import contextlib
import os
import signal
import socket
import sys
import threading
from datetime import timedelta

PATIENCE = timedelta(seconds=5)     # for what the threads of the others tell at once
GONE = "gone"                       # what a rank tells that ends by itself, saying why


def next_command(run):
    """How to go on with a run that ended early."""
    if run.checkpoints.steps(run.job.rank):
        return f"go on with --resume {run.folder}"
    return f"remove {run.folder}, which holds no checkpoint yet, and start again"


class Ending:
    """Around training. run: a train.Run."""

    def __init__(self, job, run):
        self.job, self.run = job, run
        self.number = 0                                 # of the signal that came
        self.last = 0                                   # the step after which all stop
        self.decided = threading.Event()
        self.store = job.store and job.store.clone()    # a store serves one thread at a time

    def __enter__(self):
        if self.store:
            self.store.delete_key(f"last/{self.job.rank}")      # of a process whose place this one took
        self.handlers = {n: signal.signal(n, self.hear) for n in (signal.SIGINT, signal.SIGTERM)}
        self.ear, self.mouth = socket.socketpair()
        self.mouth.setblocking(False)
        self.before = signal.set_wakeup_fd(self.mouth.fileno())
        threading.Thread(target=self.listen, daemon=True).start()
        return self

    def __exit__(self, error, *_):
        self.tell(self.job.store, GONE if error and not self.last else self.run.step)
        signal.set_wakeup_fd(self.before)
        self.mouth.close()                                      # ends the thread
        for number, handler in self.handlers.items():           # torchrun may repeat the signal
            signal.signal(number, signal.SIG_IGN if self.number and self.store else handler)

    def hear(self, number, frame):
        if not self.store:
            signal.signal(number, signal.SIG_DFL)       # a second Ctrl-C ends it at once

    def tell(self, store, what):
        with contextlib.suppress(RuntimeError):         # the store may be gone
            if store:
                store.set(f"last/{self.job.rank}", str(what))

    def listen(self):
        if heard := self.ear.recv(1):
            self.number = heard[0]
            self.tell(self.store, self.run.step + 1)
            self.last = self.agree() if self.store else self.run.step
            self.decided.set()

    def agree(self):
        """The largest of the ranks' steps. Without all of them this process ends: its part is of no use."""
        told = []
        with contextlib.suppress(RuntimeError):
            keys = [f"last/{r}" for r in range(self.job.world) if r not in self.job.gone(self.store)]
            self.store.wait(keys, PATIENCE)
            told = [self.store.get(key).decode() for key in keys]
        if not told:
            self.say(", without a checkpoint since other processes go on, or are gone")
        if not told or GONE in told:
            os._exit(128 + self.number)
        return max(map(int, told))

    def stop_if_due(self, save):
        """Raises SystemExit where all stop at this step."""
        if not self.number or self.decided.wait() and self.run.step < self.last:
            return
        if self.run.outer:
            self.run.outer.settle()
        self.run.meter.pause()
        save()
        with contextlib.suppress(RuntimeError):
            self.job.close()
        self.say()
        sys.exit(128 + self.number)

    def say(self, more=""):
        self.run.log.bar.close()
        if self.job.rank == 0:
            line = f"stopped at step {self.run.step}{more}; {next_command(self.run)}"
            print(line, file=sys.stderr, flush=True)
