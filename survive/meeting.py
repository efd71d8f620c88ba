"""How processes that may die, hang or be late meet: in a Gloo group for once, agreed on in the store.

A wait that times out closes every connection of its process group, and a restarted process can never be in an
old group: hence a new one for each meeting (about 10 ms). Keys of the store that all rooms of survive/ share:

    absent/R    rank R was waited for in vain; nobody waits for it until it has come back
    at/R        "17 in": rank R is in outer step 17, so it lives, though its partner may be holding it up;
                "17 out": it has done that one
"""
import contextlib
import os
import socket
import stat
from datetime import timedelta

import torch.distributed as dist

from plumbing.processes import gloo_group


class Gone(Exception):
    """Training cannot go on: each survivor writes a checkpoint and the message, one line."""


def meet(store, key, rank, ranks, timeout):
    """Those of `ranks` who come, in their order, and a new Gloo group of them: (members, group).

    Who shows no sign of life is waited for during half of `timeout` seconds, who is held up in an outer step
    for all of it. Whoever finds everyone here, or has waited long enough, writes down who is in; the first to
    do so counts (compare_set), so all go by the same list. Who comes later is not in it and gets no group
    (None), nor does who is alone. Raises RuntimeError when the store or a member is lost.
    """
    members = wait_for(store, key, rank, ranks, timeout)
    return members, connect(store, key, rank, members, timeout)


def connect(store, key, rank, members, timeout):
    """A new Gloo group of those who came; its messages are to be waited for with a time of one's own."""
    if rank not in members or len(members) == 1:
        return None
    # to find each other Gloo takes up to five times its timeout
    return gloo_group(store, key, members.index(rank), len(members), timeout / 5)


def wait_for(store, key, rank, ranks, timeout):
    """Who is in, by the list that counts."""
    def settle(who):
        agreed = store.compare_set(f"{key}/members", "", " ".join(map(str, who)))
        return tuple(map(int, agreed.split()))

    def here():
        return [r for r in ranks if store.check([f"{key}/{r}"])]

    def missing():
        return [r for r in ranks if not store.check([f"{key}/{r}"])]

    store.set(f"{key}/{rank}", "here")
    if all(store.check([f"absent/{r}"]) for r in missing()):
        return settle(here())
    half = timedelta(seconds=timeout / 2)
    with contextlib.suppress(dist.DistStoreError):          # nobody has settled it in time
        store.wait([f"{key}/members"], half)
        return settle(here())
    if any(whereabouts(store, r)[1] == "in" for r in missing()):
        with contextlib.suppress(dist.DistStoreError):
            store.wait([f"{key}/members"], half)
    for r in missing():
        store.set(f"absent/{r}", key)
        store.add("absences", 1)
    return settle(here())


def whereabouts(store, rank):
    """(the last outer step to which a rank came, whether it is still "in" it or "out")."""
    outer, where = store.get(f"at/{rank}").split() if store.check([f"at/{rank}"]) else (-1, b"out")
    return int(outer), where.decode()


def come_back(store, rank):
    """This rank was marked absent, but is here."""
    store.delete_key(f"absent/{rank}")


def absent(store, ranks):
    """Those of `ranks` that nobody waits for."""
    if not store.add("absences", 0):                        # so it is in most runs
        return set()
    return {r for r in ranks if store.check([f"absent/{r}"])}


def notice_silence(store, timeout):
    """Let the kernel give up a store that does not answer for 5 timeouts (Linux): a cut link breaks no
    connection, and whoever asks would wait for a quarter of an hour. (5: a cut that the replicas survive
    must not end the job.)"""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    seconds = max(2, round(5 * timeout))
    settings = {socket.SO_KEEPALIVE: 1}
    tcp = {"TCP_KEEPIDLE": max(1, seconds // 2), "TCP_KEEPINTVL": max(1, seconds // 8), "TCP_KEEPCNT": 4,
           "TCP_USER_TIMEOUT": 1000 * seconds}
    for fd in os.listdir("/proc/self/fd") if hasattr(socket, "TCP_USER_TIMEOUT") else []:
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(fd)).st_mode):
                continue
            link = socket.socket(fileno=os.dup(int(fd)))
            if link.family != socket.AF_UNIX and link.getpeername()[1] == store.port:
                for option, value in settings.items():
                    link.setsockopt(socket.SOL_SOCKET, option, value)
                for option, value in tcp.items():
                    link.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
            link.close()
