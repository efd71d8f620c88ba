"""What survive/ knows of torch and Gloo (2.13): which errors are a loss, and how each wait ends.

A wait that times out closes every connection of its process group, and a restarted process cannot
enter an old group. So whoever meets a peer that may be lost makes a new group (about 10 ms).
"""
import contextlib
import os
import queue
import socket
import struct
import threading
from concurrent.futures import Future
from datetime import timedelta

import torch
import torch.distributed as dist

from train import gloo_interface

DAY = 86400.0       # seconds: no timeout in practice


class Gone(RuntimeError):
    """Training cannot go on. Each survivor writes a checkpoint and prints the message, one line."""


class Lost(RuntimeError):
    """A peer gives no sign of life, or another rank has found that one is lost."""


class Left(Exception):
    """This rank builds its parts anew and goes on with them.

    line: what it prints before. job: the SurvivingJob with which it goes on. asks: whether it asks
    to join.
    """

    def __init__(self, line, job, asks):
        super().__init__(line)
        self.line, self.job, self.asks = line, job, asks


# In the texts of Gloo's errors for a lost peer, which are plain RuntimeErrors: nearly all name the
# file of Gloo's source where they were raised.
LOSS_WORDS = ("/gloo/", "Gloo connectFullMesh failed", "Application timeout caused pair closure",
              "Operation timed out")


def is_loss(error):
    """Whether this RuntimeError says that a peer is lost, or silent, or that a key never came.

    Every other error is a lost store, or a fault of this process: nobody should train on beside it.
    """
    if isinstance(error, dist.DistError):
        return isinstance(error, dist.DistStoreError)
    return isinstance(error, Lost) or any(words in str(error) for words in LOSS_WORDS)


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


def connect(store, key, rank, members, timeout):
    """A new Gloo group of the members, after at most `timeout` seconds; None for fewer than two.

    Each wait for one of its messages needs its own timeout.
    """
    if rank not in members or len(members) == 1:
        return None
    return gloo_group(store, key, members.index(rank), len(members), timeout / 5)


def probe(group, place):
    """Raises RuntimeError if the connection to this place of the group is broken.

    When it breaks in the middle of a message, Gloo never ends the wait for that. But then it posts
    no receive. There is one connection for each interface: Gloo takes the one of the tag modulo
    their number. It forgets a receive whose work is dropped.
    """
    for number, _ in enumerate(gloo_interface().split(",")):
        group.recv([torch.empty(1)], place, number)


def close(group):
    """Close all connections of a group at once, so that those who wait for this rank get an error.

    A wait that times out does so. (`abort` and `shutdown` do not, nor does the group's end, while a
    thread still waits for a message.) On a broken connection no wait can begin, so all are tried.
    """
    for place in set(range(group.size())) - {group.rank()}:
        for number, _ in enumerate(gloo_interface().split(",")):
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1)], place, number).wait(timedelta(milliseconds=1))


class Caller:
    """A thread that makes calls, one after the other. If one never ends it is left behind."""

    def __init__(self):
        self.calls = queue.SimpleQueue()
        threading.Thread(target=self.serve, daemon=True).start()

    def call(self, function, *args):
        """The Future of function(*args)."""
        found = Future()
        self.calls.put((function, args, found))
        return found

    def serve(self):
        for function, args, found in iter(self.calls.get, None):
            try:
                found.set_result(function(*args))
            except Exception as error:
                found.set_exception(error)
            del function, args, found               # they hold the message

    def end(self):
        self.calls.put(None)


def set_deadline(store, seconds):
    """Make every request to the store raise DistError if it has no answer for so long (Linux).

    TCP alone waits a quarter of an hour after a cut. To a stopped process it waits for ever: its
    kernel still acknowledges. (torch's own timeout is only for keys that are not there.)
    """
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore) or not hasattr(socket, "TCP_USER_TIMEOUT"):
        return
    seconds = max(2, round(seconds))
    for descriptor in os.listdir("/proc/self/fd"):
        # torch tells nobody which socket is the store's. An OSError or IndexError: this is no TCP
        # socket.
        with contextlib.suppress(OSError, IndexError):
            with socket.fromfd(int(descriptor), socket.AF_INET, socket.SOCK_STREAM) as link:
                if link.getpeername()[1] == store.port:
                    limit = struct.pack("ll", seconds, 0)
                    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
                    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * seconds)
