"""Ranks that say nothing: a plain run needs every process, so it must not wait for one without a word.

A cut link breaks no connection. TCP repeats its packets for about a quarter of an hour (Linux:
net.ipv4.tcp_retries2), and until then every rank that needs the lost one stands still.
"""
import contextlib
import sys
import threading
import time

PATIENCE = 30.0     # seconds without a sign of life before rank 0 speaks, and between its lines


class Silence:
    """Around training: a thread tells the store that this rank lives; rank 0's says which ranks do not."""

    def __init__(self, job, run):
        self.job, self.run = job, run
        self.over = threading.Event()
        self.store = job.store and job.store.clone()        # a store serves one thread at a time
        self.heard = {}                                     # {rank: (its last beat, when it came)}
        self.said = 0.0                                     # when rank 0 spoke last

    def __enter__(self):
        if self.store:
            threading.Thread(target=self.watch, daemon=True).start()

    def __exit__(self, *error):
        self.over.set()

    def watch(self):
        beat = 0
        with contextlib.suppress(RuntimeError):             # the store is gone: training says so
            while not self.over.wait(PATIENCE / 10):
                beat += 1
                self.store.set(f"alive/{self.job.rank}", str(beat))
                if self.job.rank == 0:
                    self.listen(time.monotonic())

    def listen(self, now):
        """Rank 0 says who has been silent for how long, once every PATIENCE seconds."""
        for rank in range(1, self.job.world):
            key = f"alive/{rank}"
            beat = self.store.get(key) if self.store.check([key]) else b""
            if self.heard.get(rank, (None, now))[0] != beat:
                self.heard[rank] = beat, now
        silent = {rank: now - since for rank, (_, since) in self.heard.items() if now - since > PATIENCE}
        if silent and now - self.said > PATIENCE:
            self.said = now
            ranks = ", ".join(f"rank {rank} for {seconds:.0f} s" for rank, seconds in silent.items())
            self.run.log.bar.write(f"no sign of life from {ranks}: is a host or a link gone? This run needs "
                                   f"every process: stop it and go on with --resume {self.run.folder}. "
                                   "(--survive SECONDS goes on without the lost ones.)", file=sys.stdout)
