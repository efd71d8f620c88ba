"""Another store, for when node 0 is lost and its store with it.

Every rank hosts a standby store, whose address all ranks know. A rank that loses the store writes a
checkpoint (parts.py, rescue). Then it goes to the standby store of the lowest rank that answers, and meets
the other ranks there. They go on from their checkpoints; in a pipeline at the latest iteration of any. A rank
that comes later joins.

Two parts of a run never train on:

1. The first rank writes list k, the ranks that answered evaluation k, to the store. A rank reads the newest
   list before it answers.
2. With the store, the first rank stops unless half of list k - 1 and half of list k - 2 answer.
3. Without the store, ranks go on if they are more than half of the newest list that any of them has read, and
   more than half of the list before.
4. Ranks that last read list k are in no list after k + 1. If they are more than half of list k, rule 2 stops
   the first rank at list k + 2. So the newest lists of two parts differ by one at most.
5. Then both parts need more than half of one common list, which only one can have. (The part with the store
   needs half, the other one more.)

A rank that is ahead of the first rank by a whole evaluation may have read one list less; rule 4 leaves that
case out.
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
    family, *_, master = socket.getaddrinfo(os.environ.get("MASTER_ADDR", "127.0.0.1"), 1)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(master)               # sends nothing
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
    # The rank that hosts the lost store leads no more, though its store may answer.
    led = {r for r, address in job.addresses.items() if address == job.address}
    ranks = sorted({*job.known[1], job.rank} - led, key=lambda r: (r not in job.members, r))
    host, store = next(((r, store) for r in ranks if (store := standby_of(job, r))), (None, None))
    if not store:
        return "the store is lost, and no standby store answers"
    began = store.check(["takeover/members"])
    store.set(f"takes part/{job.rank}", json.dumps([*job.known, run.step]))
    # the ranks before the host do not answer
    members = members_of(store, "takeover", job.rank, ranks[ranks.index(host):], 10 * job.timeout)
    told = [json.loads(text) for text in store.multi_get([f"takes part/{r}" for r in members])]
    number, *lists, _ = max(told)
    if not enough(members, *lists) or members[0] not in run.stages[0]:      # the first rank's log needs data
        for key in "takeover/members", f"takeover/{job.rank}", *(f"absent/{r}" for r in range(job.world)):
            store.delete_key(key)           # for a later meeting here
        return f"the store is lost; ranks {members} of {lists[0]} are too few to go on, or none of stage 0"
    other = copy(job)
    other.store, other.latest = store, max(step for *_, step in told)
    run.o.resume = str(run.folder)
    if not began:
        settings = {"first plan": run.routes.plan, "address": job.addresses[host],
                    "known": [number + 1, members, members]}
        settings |= {f"options/{r}": vars(run.o) for r in range(job.world)}             # for ranks that join
        settings |= {f"problem/options/{r}": "" for r in range(job.world)}
        store.multi_set([*settings], [*map(json.dumps, settings.values())])
        for r in {*range(job.world)} - {*members}:
            mark_absent(store, r, "takeover")
    line = f"rank {job.rank} goes on at step {run.step}, store {':'.join(map(str, job.addresses[host]))}"
    raise Left(line, other, began or job.rank not in members)


def accepts(job, rank):
    """Whether a rank's process is there: a dead one's standby store refuses connections."""
    with suppress(OSError, LookupError):
        return not socket.create_connection(tuple(job.addresses[rank]), job.patience).close()


def standby_of(job, rank):
    """The standby store of a rank; None if it takes no connection, or does not answer in three tries.

    A rank on a busy machine may miss one. Longer tries would hold up every rank when this one has just died.
    A stopped process takes the connection and never answers; torch (2.13) then waits without a timeout.
    """
    for _ in range(3):
        if not accepts(job, rank):
            return None
        with suppress(RuntimeError):
            wait = timedelta(seconds=job.patience)
            store = dist.TCPStore(*job.addresses[rank], timeout=wait, wait_for_workers=False)
            store.set_timeout(timedelta(seconds=300))
            return dist.PrefixStore("attempt0", store)
