"""Another store, for when node 0 is lost and its store with it.

Every rank hosts a standby store, whose address all ranks know. A rank that loses the store writes a
checkpoint (parts.py, rescue). Then it goes to the standby store of the lowest rank that answers, of the ranks
last known alive, and waits there for the others. If more than half of the ranks last known alive come, they
go on from their checkpoints; in a pipeline at the latest iteration of any. A rank that comes later joins.

Fewer ranks stop. The ranks that still have the store stop when more than half of all ranks are gone
(Pipeline.begin, SurvivingNoLoCo.step). So no two parts of a run train on.
"""
import contextlib
import json
import os
import socket
from copy import copy
from datetime import timedelta

import torch.distributed as dist

from survive.meeting import Gone, Left, mark_absent


def host_standby():
    """(this rank's standby store, [its address, its port])."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 1))      # sends nothing
        store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
        return store, [probe.getsockname()[0], store.port]


def move(job, run):
    """A Left for this rank, with the survivors' job at the standby store where they meet.

    job: a SurvivingJob whose store is lost. run: a train.Run that has just written its checkpoint. Raises
    Gone if there are too few survivors.
    """
    alive = sorted(set(range(job.world)) - job.away - job.excluded)
    host, store = next((r, store) for r in alive if (store := standby_of(job, r)))      # its own answers
    store.set(f"here/{job.rank}", str(run.step))
    with contextlib.suppress(dist.DistStoreError):          # lower ranks do not answer, others may be dead
        store.wait([f"here/{r}" for r in alive if r >= host], timedelta(seconds=5 * job.timeout))
    here = [r for r in alive if store.check([f"here/{r}"])]
    if 2 * len(here) <= len(alive):
        store.delete_key(f"here/{job.rank}")
        raise Gone(f"the store is lost, and {len(here)} of {len(alive)} ranks are too few to go on")
    other = copy(job)
    other.members = [int(r) for r in store.compare_set("members", "", " ".join(map(str, here))).split()]
    other.store, other.leads = store, job.rank == other.members[0]
    other.latest = max(int(step) for step in store.multi_get([f"here/{r}" for r in other.members]))
    store.set("first plan", json.dumps(run.routes.plan))        # for ranks that join
    for r in set(range(job.world)) - set(other.members):
        mark_absent(store, r, "members")
    run.o.resume = str(run.folder)
    line = f"rank {job.rank} goes on at step {run.step} with the store of another rank"
    return Left(line, other, job.rank not in other.members)


def standby_of(job, rank):
    """The standby store of a rank; None if it does not answer."""
    with contextlib.suppress(OSError, RuntimeError):
        address, port = job.addresses[rank]
        socket.create_connection((address, port), job.patience).close()     # or torch prints a page
        store = dist.TCPStore(address, port, timeout=timedelta(seconds=job.patience), wait_for_workers=False)
        store.set_timeout(timedelta(seconds=300))
        return dist.PrefixStore("attempt0", store)
