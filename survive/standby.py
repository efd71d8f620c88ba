"""Another store, for when node 0 is lost and its store with it.

Every rank hosts a standby store, whose address all ranks know. A rank that loses the store writes a
checkpoint (parts.py, rescue). Then it goes to the standby store of the lowest rank that answers, and meets
the other ranks there. They go on from their checkpoints; in a pipeline at the latest iteration of any. A rank
that comes later joins.

No two parts of a run train on, since one needs half and the other more than half of the same ranks. Those are
the ranks that answered the last evaluation. The first rank writes this list to the store after each
evaluation. Each rank reads it at the next evaluation, before it answers. Two rules then suffice:

    with the store      the first rank stops unless at least half of each of the last two lists answer
    without it          ranks go on if more than half of the newest list that any of them has read are there

A newer list may be unknown to the ranks without the store. Then more than half of the list before have not
answered since, so the first rule stops the first rank, and the store with it.
"""
import json
import os
import socket
from contextlib import suppress
from copy import copy
from datetime import timedelta

import torch.distributed as dist

from survive.meeting import Left, mark_absent, members_of


def host_standby():
    """(this rank's standby store, [its address, its port])."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 1))      # sends nothing
        store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
        return store, [probe.getsockname()[0], store.port]


def enough(here, *lists, tie=False):
    """Whether more than half of the ranks of each list are in `here`. tie: half is enough."""
    return all(2 * len(set(here) & set(ranks)) + tie > len(ranks) for ranks in lists)


def move(job, run):
    """Raises Left, with the survivors' job at the standby store where they meet, or returns why it does not.

    job: a SurvivingJob whose store is lost. run: a train.Run that has just written its checkpoint. Raises
    DistError if the standby store is lost too.
    """
    ranks = sorted({*job.known[1], job.rank}, key=lambda r: (r not in job.members, r))
    host, store = next((r, store) for r in ranks if (store := standby_of(job, r)))      # its own answers
    began = store.check(["takeover/members"])
    store.set(f"takes part/{job.rank}", json.dumps([*job.known, run.step]))
    # the ranks before the host do not answer
    members = members_of(store, "takeover", job.rank, ranks[ranks.index(host):], 10 * job.timeout)
    told = [json.loads(text) for text in store.multi_get([f"takes part/{r}" for r in members])]
    number, known, _ = max(told)
    if not enough(members, known) or members[0] not in run.stages[0]:       # the first rank's log needs data
        return f"the store is lost; ranks {members} of {known} are too few to go on, or none of stage 0"
    other = copy(job)
    other.store, other.address = store, job.addresses[host]
    other.known, other.latest = [number + 1, members], max(step for *_, step in told)
    run.o.resume = str(run.folder)
    settings = {"first plan": run.routes.plan, "known": other.known}
    for r in range(job.world):                              # for ranks that join
        settings |= {f"options/{r}": vars(run.o), f"problem/options/{r}": ""}
        if r not in members:
            mark_absent(store, r, "takeover")
    for key, value in settings.items() if not began else ():
        store.set(key, json.dumps(value))
    line = f"rank {job.rank} goes on at step {run.step} with the store at {':'.join(map(str, other.address))}"
    raise Left(line, other, began or job.rank not in members)


def standby_of(job, rank):
    """The standby store of a rank; None if it does not answer."""
    with suppress(OSError, RuntimeError):
        address, port = job.addresses[rank]
        socket.create_connection((address, port), job.patience).close()     # or torch prints a page
        store = dist.TCPStore(address, port, timeout=timedelta(seconds=job.patience), wait_for_workers=False)
        store.set_timeout(timedelta(seconds=300))
        return dist.PrefixStore("attempt0", store)
