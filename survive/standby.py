"""Another store, for when node 0 is lost and its store with it.

Every rank hosts a standby store, whose address all ranks know. A rank that loses the store writes a
checkpoint (parts.py, survive). Then it goes to the standby store of the lowest rank that answers,
and meets the other ranks there. They go on from their checkpoints; in a pipeline at the latest
iteration of any. A rank that comes later joins.

Two parts of a run never train on:

1. The first rank writes list k, the ranks that answered evaluation k, to the store. A rank reads
   the newest list before it answers.
2. With the store, the first rank stops unless half of list k - 1 and half of list k - 2 answer.
   After a takeover this holds for evaluations after the step of the rank that was furthest ahead.
   Ranks ahead of the first one have done the earlier ones, and do not answer them again: those
   write no list.
3. Without the store, ranks go on if they are more than half of the newest list that any of them
   has read, and more than half of the list before.
4. Ranks that last read list k are in no list after k + 1. If they are more than half of list k,
   rule 2 stops the first rank at list k + 2. So the newest lists of two parts differ by one at
   most.
5. Then both parts need more than half of one common list, which only one can have. (The part with
   the store needs half, the other one more.)

A rank that is ahead of the first rank by a whole evaluation may have read one list less; rule 4
leaves that case out.
"""
import json
import os
import socket
import threading
from concurrent import futures
from contextlib import suppress
from copy import copy
from datetime import timedelta

import torch.distributed as dist

from survive.meeting import Left, mark_absent, members_of, notice_silence


def host_standby():
    """(this rank's standby store, [its address, its port])."""
    family, *_, master = socket.getaddrinfo(os.environ.get("MASTER_ADDR", "127.0.0.1"), 1)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(master)               # sends nothing
        store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
        return store, [probe.getsockname()[0], store.port]


def enough(here, *lists, tie=False):
    """Whether more than half of the ranks of each list are in `here`. tie: half is enough."""
    for ranks in lists:
        present = len(set(here) & set(ranks))
        absentees = len(ranks) - present
        if present < absentees or present == absentees and not tie:
            return False
    return True


def move(job, run):
    """Meet the other survivors at a standby store. Raises Left, with this rank's job there.

    Returns why this rank does not go on, where it does not. job: a SurvivingJob whose store is
    lost. run: a train.Run that has just written its checkpoint. Raises DistError if the standby
    store is lost too.
    """
    candidates = hosts_in_order(job)
    host, store = first_that_answers(job, candidates)
    if store is None:
        return "the store is lost, and no standby store answers"
    notice_silence(store, job.timeout)
    began = store.check(["takeover/members"])       # the others have met: this rank comes too late
    store.set(f"takes part/{job.rank}", json.dumps([*job.answered, run.step]))
    answering = candidates[candidates.index(host):]
    members = members_of(store, "takeover", job.rank, answering, 10 * job.timeout)
    told = [json.loads(text) for text in store.multi_get([f"takes part/{r}" for r in members])]
    number, last, last_but_one, _ = max(told)       # of all, the newest list of an evaluation
    if not enough(members, last, last_but_one) or members[0] not in run.stages[0]:
        # The first rank must be one of stage 0, since its log needs the data.
        forget_meeting(store, job)
        return (f"the store is lost; ranks {members} of {last} are too few to go on, or none of "
                "stage 0")
    other = copy(job)
    other.store = store
    other.latest = max(step for _, _, _, step in told)
    run.o.resume = str(run.folder)
    if not began:
        settle_job(store, job, run, host, number + 1, members)
    address, port = job.addresses[host]
    line = f"rank {job.rank} goes on at step {run.step}, store {address}:{port}"
    raise Left(line, other, asks=began or job.rank not in members)


def hosts_in_order(job):
    """The ranks whose standby stores are tried, in order: those of the newest list, and this one.

    The members come first. The rank that hosts the lost store leads no more, though its store may
    answer.
    """
    led = [r for r, address in job.addresses.items() if address == job.address]
    ranks = {*job.answered[1], job.rank}.difference(led)
    return sorted(ranks, key=lambda r: (r not in job.members, r))


def first_that_answers(job, ranks):
    """(the first of these ranks whose standby store answers, that store), or (None, None)."""
    for rank in ranks:
        store = standby_of(job, rank)
        if store:
            return rank, store
    return None, None


def forget_meeting(store, job):
    """Remove the traces of a meeting that was too small: a later one may be held at this store."""
    store.delete_key("takeover/members")
    store.delete_key(f"takeover/{job.rank}")
    for rank in range(job.world):
        store.delete_key(f"absent/{rank}")


def settle_job(store, job, run, host, number, members):
    """Write to the standby store what ranks read at a job's store. All members write the same."""
    settings = {"first plan": run.routes.plan, "address": job.addresses[host],
                "answered": [number, members, members]}
    for rank in range(job.world):                   # for ranks that join: the first call of `share`
        settings[f"1/{rank}"] = vars(run.o)
    store.multi_set(list(settings), [json.dumps(value) for value in settings.values()])
    for rank in set(range(job.world)) - set(members):
        mark_absent(store, rank, "takeover")


def accepts(job, rank):
    """Whether a rank's process takes a connection: a dead one's standby store refuses it."""
    return rank in job.addresses and takes_connection(job.addresses[rank], job.patience)


def takes_connection(address, patience):
    """Whether a process listens at [address, port]; a stopped one does, too."""
    with suppress(OSError):
        socket.create_connection(tuple(address), patience).close()
        return True
    return False


def address_in_use(store, rank):
    """"ADDRESS:PORT" of the process that has this rank now. None where there is none."""
    key = f"standby/{rank}"
    if not store.check([key]):
        return None
    address, port = json.loads(store.get(key))
    return f"{address}:{port}" if takes_connection([address, port], 5.0) else None


def standby_of(job, rank):
    """The standby store of a rank; None if it refuses a connection, or three tries are in vain.

    A rank on a busy machine may miss one. Longer tries would hold up every rank when this one has
    just died.
    """
    for _ in range(3):
        if not accepts(job, rank):
            return None
        with suppress(futures.TimeoutError, RuntimeError):
            store = within(job.patience, connect_to, job.addresses[rank], job.patience)
            store.set_timeout(timedelta(seconds=300))
            return dist.PrefixStore("attempt0", store)
    return None


def connect_to(address, patience):
    """A client of the store at this address. It may never return: see `within`."""
    wait = timedelta(seconds=patience)
    return dist.TCPStore(*address, timeout=wait, wait_for_workers=False)


def within(seconds, function, *args):
    """function(*args), made by a thread. Raises futures.TimeoutError if it is late.

    A stopped process takes a connection, as the kernel does it, and never answers. torch (2.13)
    then waits without a timeout. The thread is left behind.
    """
    found = futures.Future()

    def make():
        try:
            found.set_result(function(*args))
        except Exception as error:
            found.set_exception(error)

    threading.Thread(target=make, daemon=True).start()
    return found.result(seconds)
