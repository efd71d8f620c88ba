"""The states of a replica, and how replicas meet when one of them may die, hang or be late.

A wait that times out closes every connection of its process group. A restarted process cannot enter
an old group. So each meeting makes a Gloo group of its own (about 10 ms). The store holds the list
of its members.

Which kind of dead is a rank? It is *absent* if no rank waits for it in outer steps and evaluations.
It is *dead*, in a pipeline, if no path visits it and no rank waits for it. It is *away* if it is
absent or dead, or both. It is *missed* if it did not answer the last evaluation in time. The next
one waits for it only if that answer has come since (`SurvivingJob.missed`, the first rank's own
set). It has *ended* if its process has. No rank knows that: the others mark it absent, or declare
it dead, when they have waited for it in vain.

    state       of rank R
    alive       it takes part
    late        it takes part, but may be behind: `SurvivingNoLoCo.late`
    absent      absent/R is in the store
    dead        in a pipeline: its life, the number in lives/T, is odd
    joining     it has no weights yet, and asks a replica for them
    ended       its process has ended

    from         to        cause                                     function
    alive        late      R did an outer step without a partner     SurvivingNoLoCo.note_missing
                           R goes on at another store                parts.join
    late         alive     every partner came, and R is not absent    SurvivingNoLoCo.gather
    alive, late  absent    a rank waited in vain for R:
                           in an outer step, or to compare weights   members_of -> mark_absent
                           at a takeover                             standby.move -> mark_absent
    alive, late  dead      a peer waited in vain for R's message     Pipeline.declare_dead
    absent       late      R was only slow, and removes absent/R:
                           before an inner step                      SurvivingNoLoCo.step -> hurry
                           to compare weights in an evaluation       SurvivingJob.meet
    absent       joining   R comes too late to a takeover            standby.move
    dead         joining   R was only slow                           Pipeline.leave
    joining      joining   the replica that was to give R weights died:
                           on one stage                              SurvivingNoLoCo.join
                           in a pipeline                             Pipeline.take_weights
    joining      absent    R has a replica's weights, on one stage   SurvivingNoLoCo.join
    joining      late      R has a replica's or own, in a pipeline   parts.join
    joining      ended     no replica has weights for R, nor has R   parts.own_checkpoint
    any          ended     R's process dies
                           too few ranks are left                    TooFew, or standby.move
                           a new process has R's place               Pipeline.leave
    ended        joining   R's new process, started with --join      parts.build

The keys of the store in survive/, and who writes them:

    K/R             rank R's value in its K-th call of Job.share; 1: the options. left/R, stopped:
                    train.Job's too.
    row/E/ENDS/R    rank R's row for the log at evaluation E. saved/S/R: it has its part of step S.
    absent/R        rank R is absent. A rank that waited for R in vain; R removes the key when it
                    comes back.
    absences        how often a rank was marked absent. Who marked it.
    at/R            "17 in": rank R has come to outer step 17, so it lives, even if its partner
                    holds it up. "17 late": as "17 in", and rank R is late, so its partners meet it
                    in fp32. "17 out": rank R has done outer step 17. R itself.
    outer/S/N/ranks the ranks of stage S (its first rank) in outer step N. The first rank to come
                    to it.
    outer/S/N/G/R   rank R has come to its group, whose first rank is G, in that outer step.
                    outer/S/N/G/members: those that meet. The first rank to stop waiting.
    lives/T         in pipelines, of each rank in iteration T: how often it has died and joined
                    (odd: it is dead). The first rank to begin T; a rank that joins, if no rank has
                    begun T.
    pair/A/B/V/W    Gloo's, to connect ranks A and B in their lives V and W (pipelines).
    beat/R/V        a count that grows while rank R works or waits, in its life V. R's watch thread.
    dropped/R/V     a rank has given up R; R must not declare it dead.
    giver/R/V       the replica that gives R weights. The first rank of its stage to ask.
    ready/R/V       rank R has joined and has weights. R itself.
    step            an iteration that a rank has begun lately. Watch threads.
    address         the address of this store, after a takeover. The first ranks of the takeover.
    events          a line for each event that the log is to have. The rank that it happened to.
    first plan      the plan that checkpoints hold (planned paths). The first rank, or those of a
                    takeover.
    standby/R       the address of rank R's standby store (standby.py). R itself.
    answered        the number of the last evaluation, the ranks that answered it, and those that
                    answered the one before. The first rank, or those of a takeover.
    takes part/R    at a standby store: what rank R last read of `answered`, and R's step. R itself.
    takeover/R      rank R has come to that store. takeover/members: the ranks that go on, the
                    first first.
"""
import contextlib
import os
import socket
import struct
import sys
import threading
import time
from datetime import timedelta

import torch.distributed as dist

from train import gloo_interface


class TooFew(RuntimeError):
    """Too few ranks are left. Each of them writes a checkpoint and prints the message, one line."""


class Silent(RuntimeError):
    """A peer gives no sign of life, or the other ranks do not wait for this rank any more."""


class Left(Exception):
    """This rank builds its parts anew and goes on with them.

    line: what it prints before. job: the SurvivingJob with which it goes on. asks: whether it asks
    to join.
    """

    def __init__(self, line, job, asks):
        super().__init__(line)
        self.line, self.job, self.asks = line, job, asks


# In the texts of Gloo's errors for a lost peer, which are plain RuntimeErrors (torch 2.13): nearly
# all name the file of Gloo's source where they were raised.
LOSS_WORDS = ("/gloo/", "Gloo connectFullMesh failed", "Application timeout caused pair closure",
          "Operation timed out")


def is_loss(error):
    """Whether this RuntimeError says that a peer or the store is lost, or silent.

    Every other error is a fault of this process: nobody should train on beside it.
    """
    if isinstance(error, (dist.DistError, Silent)):
        return True
    return any(words in str(error) for words in LOSS_WORDS)


@contextlib.contextmanager
def outliving():
    """Suppress the error of a lost peer or store, and no other one."""
    try:
        yield
    except RuntimeError as error:
        if not is_loss(error):
            raise


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
    """A new Gloo group of the members. Each wait for one of its messages needs its own timeout."""
    if rank not in members or len(members) == 1:
        return None
    # Gloo takes up to five times its timeout to connect.
    return gloo_group(store, key, members.index(rank), len(members), timeout / 5)


def members_of(store, key, rank, ranks, timeout):
    """Wait for `ranks` to come to meeting `key`, mark absent those that do not, return the members.

    The wait lasts half of `timeout` seconds, and all of it if a missing rank is held up in an outer
    step. It is no wait if all missing ranks are absent already. The rank that stops waiting first
    writes the list of members (compare_set), which counts for all.
    """
    def missing():
        return [r for r in ranks if r != rank and not store.check([f"{key}/{r}"])]

    def settle(absentees):
        here = " ".join(str(r) for r in ranks if r not in absentees)
        members = store.compare_set(f"{key}/members", "", here)     # the first list counts for all
        return tuple(int(r) for r in members.split())

    store.set(f"{key}/{rank}", "here")
    absentees = missing()
    if all(store.check([f"absent/{r}"]) for r in absentees):
        return settle(absentees)
    half = timedelta(seconds=timeout / 2)
    with contextlib.suppress(dist.DistStoreError):          # no rank has written the list in time
        store.wait([f"{key}/members"], half)
        return settle(absentees)                            # the one that is there
    if any(position(store, r)[1] != "out" for r in missing()):
        with contextlib.suppress(dist.DistStoreError):
            store.wait([f"{key}/members"], half)
    absentees = missing()
    for r in absentees:
        mark_absent(store, r, key)
    return settle(absentees)


def mark_absent(store, rank, key):
    """No replica waits for `rank` any more. key: the meeting that it missed."""
    store.set(f"absent/{rank}", key)
    store.add("absences", 1)


def come_back(store, rank):
    """This rank is here, absent or not before: outer steps that begin from now on have it."""
    store.delete_key(f"absent/{rank}")


def absent(store, ranks):
    """The set of the absent ones of `ranks`."""
    any_ever = store.add("absences", 0)                     # one request in a run without faults
    return {r for r in ranks if any_ever and store.check([f"absent/{r}"])}


def announce(store, rank, outer, where):
    """Tell the other replicas that this rank is "in" outer step `outer`, also if "late", or "out"
    of it."""
    store.set(f"at/{rank}", f"{outer} {where}")


def position(store, rank):
    """(the last outer step to which `rank` came, or -1; "in", "late" or "out").

    Positions compare as the words do by chance: "in" < "late" < "out" of one outer step.
    """
    if not store.check([f"at/{rank}"]):
        return -1, "out"
    outer, where = store.get(f"at/{rank}").split()
    return int(outer), where.decode()


def notice_silence(store, timeout):
    """Start a thread that closes this process's connections to the store when it does not answer
    for 5 timeouts (Linux). From then on every request raises DistNetworkError.

    A cut link breaks no connection, and the kernel of a stopped process still acknowledges, so a
    request would otherwise wait for ever. A deadline of each connection would not do: torch (2.13)
    would read the late answer to one request as the answer to the next. The factor is 5 because a
    cut that the replicas survive must not end the job.
    """
    if sys.platform != "linux":
        return
    pause = timeout / 4
    seconds, rest = divmod(5 * timeout - pause, 1)
    others = {link.getsockname()[1] for link in connections(store)}
    client = store.clone()
    for link in connections(store):
        if link.getsockname()[1] not in others:
            limit = struct.pack("ll", int(seconds), int(1e6 * rest))
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    def ask():
        with contextlib.suppress(dist.DistError):
            while True:
                client.check(["nothing"])
                time.sleep(pause)
        for link in connections(store):
            with contextlib.suppress(OSError):              # it is closed already
                link.shutdown(socket.SHUT_RDWR)

    threading.Thread(target=ask, daemon=True).start()


def connections(store):
    """This process's connections to a TCPStore, as sockets. torch has no function for it."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    for number in map(int, os.listdir("/proc/self/fd")):
        # An OSError or IndexError: this is no TCP socket.
        with contextlib.suppress(OSError, IndexError):
            with socket.fromfd(number, socket.AF_INET, socket.SOCK_STREAM) as link:
                if link.getpeername()[1] == store.port:
                    yield link
