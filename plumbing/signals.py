"""Ctrl-C and SIGTERM stop all ranks after the same step. Rank 0 names the ranks that are silent.

Between two steps ranks cannot ask each other where to stop: a rank may be waiting in the middle
of its step, where Python runs no signal handler. So each rank has a thread, which the signal
wakes. It writes to the store the first step after which its rank can stop. All ranks train on to
the largest of these steps.

A cut link breaks no connection. TCP repeats its packets for about a quarter of an hour (Linux:
net.ipv4.tcp_retries2), and until then every rank that needs the lost rank stands still. So the
thread also writes every few seconds that its rank lives, and rank 0's thread reads that of all
ranks.
"""
import contextlib
import os
import signal
import socket
import sys
import threading
from concurrent.futures import Future
from datetime import timedelta
from multiprocessing.connection import wait

AGREEMENT = timedelta(seconds=5)    # until the thread of every rank has written its step
BEAT = 3.0                          # seconds; a rank whose beats fail to come ten times is silent


def next_command(run):
    """How to continue a run that ended early."""
    if run.checkpoints.parts(run.job.rank):
        return f"go on with --resume {run.folder}"
    return f"remove {run.folder}, which holds no checkpoint yet, and start again"


class Signals:
    """Around training. run: a train.Run. number: of the signal that came, or 0."""

    def __init__(self, job, run):
        self.job, self.run = job, run
        self.number = 0
        self.last = Future()                # the step after which all ranks stop
        self.store = job.store.clone()      # the thread's own: a client serves one thread at a time
        self.beats = []                     # of each rank, when rank 0 looked last

    def __enter__(self):
        self.store.delete_key(f"last/{self.job.rank}")      # of a process whose place this one took
        self.handlers = {}                                  # those from before
        for number in (signal.SIGINT, signal.SIGTERM):
            self.handlers[number] = signal.signal(number, self.handle)
        self.ear, self.mouth = socket.socketpair()      # a signal's number comes in at the mouth
        self.mouth.setblocking(False)
        self.before = signal.set_wakeup_fd(self.mouth.fileno())
        threading.Thread(target=self.listen, daemon=True).start()
        return self

    def __exit__(self, error, *_):
        with contextlib.suppress(RuntimeError):             # of a lost store
            says_why = error and not self.last.done()
            last = -1 if says_why else self.run.step
            self.job.store.set(f"last/{self.job.rank}", str(last))
        signal.set_wakeup_fd(self.before)
        self.mouth.close()                                  # ends the thread
        for number, handler in self.handlers.items():
            if self.number and self.job.world > 1:
                handler = signal.SIG_IGN                    # torchrun may repeat the signal
            signal.signal(number, handler)

    def handle(self, number, frame):
        if self.job.world == 1:
            signal.signal(number, signal.SIG_DFL)       # a second Ctrl-C ends one process at once

    def listen(self):
        """The thread: it beats until a signal or the end of training comes."""
        while not wait([self.ear], BEAT):
            self.beat()
        heard = self.ear.recv(1)            # a signal's number; empty at the end of training
        if heard:
            self.number = heard[0]
            self.last.set_result(self.agree())

    def agree(self):
        """The largest of the first steps after which each rank can stop.

        The process ends here if a rank has not written its step in time, or ends by an error (-1).
        """
        told = []
        with contextlib.suppress(RuntimeError):
            self.store.set(f"last/{self.job.rank}", str(self.run.step + 1))
            gone = self.job.gone(self.store)
            keys = [f"last/{r}" for r in range(self.job.world) if r not in gone]
            self.store.wait(keys, AGREEMENT)
            told = [int(text) for text in self.store.multi_get(keys)]
        if not told:
            self.say(", without a checkpoint since other processes go on, or are gone")
        if -1 in told or not told:
            os._exit(128 + self.number)
        return max(told)

    def stop_if_due(self, save):
        """At the start of a step: if all ranks stop here, save, and raise SystemExit."""
        if not self.number or self.run.step < self.last.result():
            return
        if self.run.outer:
            self.run.outer.settle()
        self.run.meter.pause()
        save()
        self.job.close()
        self.say()
        sys.exit(128 + self.number)

    def say(self, more=""):
        self.run.log.bar.close()
        if self.job.leads:
            line = f"stopped at step {self.run.step}{more}; {next_command(self.run)}"
            print(line, file=sys.stderr)

    def beat(self):
        """Count this rank's beat in the store. At every tenth rank 0 names the silent ranks."""
        with contextlib.suppress(RuntimeError):             # of a lost store; training reports it
            own = self.store.add(f"alive/{self.job.rank}", 1)
            if self.job.rank == 0 and self.job.needs_all and own % 10 == 0:
                self.name_silent()

    def name_silent(self):
        """Name the ranks that have not beaten since the last call."""
        before = self.beats
        self.beats = [self.store.add(f"alive/{r}", 0) for r in range(self.job.world)]
        for rank, beats in enumerate(before):
            if beats == self.beats[rank]:
                self.run.log.bar.write(
                    f"no sign of life from rank {rank} for {10 * BEAT:.0f} s: stop this run, then "
                    f"{next_command(self.run)}", file=sys.stdout)
