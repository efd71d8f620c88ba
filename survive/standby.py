"""Another store, for the day when node 0 is lost and its store with it.

Every rank hosts a standby store, whose address all ranks know. A rank that loses the store writes a
checkpoint (parts.py, rescue) and goes to the standby of the lowest rank that answers, of those last known
alive. There it waits for the others. If more than half of those last known alive come, they go on from their
checkpoints; in a pipeline at the latest iteration of any. A rank that comes later joins them. The rest is a
minority, whose ranks stop: so no two parts of a run train on.

The part that has the store stops too if it is less than half of the ranks that were alive shortly before
(`too_few`).
"""
import os
import socket
import time
from copy import copy
from datetime import timedelta

import torch.distributed as dist

from survive.meeting import Gone, mark_absent


class Moved(Exception):
    """This rank goes on at another store. job: it, with this store."""

    def __init__(self, job):
        super().__init__(f"rank {job.rank} goes on at the store of rank {job.host}")
        self.job = job


def host_standby():
    """(this rank's standby store, [its address, its port])."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 1))      # sends nothing
        store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
        return store, [probe.getsockname()[0], store.port]


def move(job, step, plan):
    """The job at the standby store at which its survivors meet. Raises Gone if half of them or fewer come.

    step: which the checkpoint is of. plan: the first one, for ranks that join.
    """
    alive = sorted(set(range(job.world)) - job.away)
    host, store = next(filter(None, (reach(job, rank) for rank in alive)))      # this rank's own answers
    store.set(f"here/{job.rank}", str(step))
    try:
        store.wait([f"here/{r}" for r in alive], timedelta(seconds=5 * job.timeout))
    except dist.DistStoreError:
        pass                                    # ranks that died with node 0
    here = [r for r in alive if store.check([f"here/{r}"])]
    if 2 * len(here) <= len(alive):
        store.delete_key(f"here/{job.rank}")
        raise Gone(f"the store is lost, and only {len(here)} of {len(alive)} ranks are left together")
    members = [int(r) for r in store.compare_set("members", "", " ".join(map(str, here))).split()]
    store.set("first plan", plan)
    for r in set(range(job.world)) - set(members):
        mark_absent(store, r, "members")
    other = copy(job)
    other.store, other.members, other.leads, other.host = store, members, job.rank == members[0], host
    other.latest = max(int(step) for step in store.multi_get([f"here/{r}" for r in members]))
    return other


def reach(job, rank):
    """(rank, its standby store); None if it does not answer."""
    address, port = job.addresses.get(rank, ("", 0))
    try:
        store = dist.TCPStore(address, port, timeout=timedelta(seconds=job.patience), wait_for_workers=False)
    except RuntimeError:
        return None
    store.set_timeout(timedelta(seconds=300))
    return rank, dist.PrefixStore("attempt0", store)


def too_few(history, alive, seconds):
    """Whether less than half of the ranks that were alive within `seconds` still are. history: a list."""
    now = time.monotonic()
    history[:] = [(when, n) for when, n in [*history, (now, alive)] if when > now - seconds]
    return 2 * alive < max(n for _, n in history)
