"""train.Run and train.train with parts that outlive the processes beside them.

Where a dead peer is handled:

    one stage: a partner is missed, and marked absent     meeting.py   members_of -> mark_absent
        the outer step of the rank that missed it         outer.py     exchange, accept
        outer steps begun later leave it out, for all     outer.py     settle_ranks
        outer steps that list it already                  outer.py     expected, leap (one stage)
        it comes back after a hang                        outer.py     step -> leap, hurry
        it comes back as a new process (--join)           outer.py     join, then accept -> adopt
    pipeline: a peer is silent or its connection broke    pipeline.py  watch -> probe; wait, attempt
        it is declared dead                               pipeline.py  declare_dead
        the iteration from which all do without           pipeline.py  publish, agree, go_over
        microbatches on it are lost and counted           pipeline.py  take, task
        paths and the plan, without it and with it again  routes.py    go_round
        outer steps of its stage                          outer.py     settle_ranks (dead)
        it wakes up: it joins as a new process does       pipeline.py  leave; parts.py go_through
        it comes back as a new process (--join)           parts.py     join; pipeline.py ask
        it takes a replica's weights, or its checkpoint   pipeline.py  take_weights, hand_over
        the other ranks connect to it                     pipeline.py  go_over -> admit
    both: an evaluation misses a rank                     parts.py     SurvivingJob.collect, meet
        its numbers in the log                            log.py       SurvivingLog.report
        the store is lost, with node 0                    parts.py     survive -> standby.py move
        the new first rank is behind others               parts.py     SurvivingJob.collect
        the process ends                                  __main__.py  main

In a pipeline too, a rank that is missed in an outer step is absent; only a peer of another stage
declares it dead. survive/meeting.py lists the states. docs/failures.md lists the faults and the
waiting times.
"""
import contextlib
import json
import os
import sys
from datetime import timedelta

import torch.distributed as dist
from tqdm import tqdm

import train
from gossip import more
from gossip.onebyte import OneByte, lengths_of
from survive.checkpoints import SurvivingCheckpoints
from survive.log import SurvivingLog
from survive.meeting import (Left, TooFew, absent, come_back, connect, is_loss, members_of,
                             notice_silence, outliving)
from survive.outer import SurvivingNoLoCo
from survive.pipeline import SurvivingPipeline
from survive.routes import SurvivingRoutes
from survive.standby import accepts, enough, host_standby, move
from train import STOPPED, BadInput, Job, average_in, need, one_line

EVENTS = {      # the first rank's line for each event, at its next evaluation
    "leapt":
        "rank {rank} left out {outer_steps} outer steps from outer step {outer} on: no partner is "
        "left",
    "outer step without partners":
        "rank {rank} did outer step {outer} without ranks {missing} {error}",
    "not finite":
        "rank {rank} refused the numbers of ranks {refused} in outer step {outer}: not finite",
    "fp32 instead of int8":
        "rank {rank} sent fp32 instead of int8 in outer step {outer}, to ranks {far}",
    "joined":
        "rank {rank} joined after outer step {outer} with the weights of rank {given_by}",
    "lost":
        "rank {rank} lost rank {peer} at step {step}: {error}",
    "dead":
        "from step {step} paths avoid ranks {ranks}, dead or joining, and stages "
        "{stages_left_out}{how}",
    "takeover":
        "rank {rank} leads from step {step} on, with another store and without ranks {missing}",
}


class SurvivingJob(Job):
    """A Job without a default process group, in which every wait ends.

    timeout: the seconds of --survive. members: the ranks that share values: all, or after a
    takeover those that met. joining: whether this process takes its place in a job that trains.
    """

    def __init__(self, job, timeout, asks):
        """job: this process's Job, or the SurvivingJob that it had before it built its parts anew.

        asks: whether this rank asks a living replica for its weights.
        """
        self.rank, self.world, self.restarts = job.rank, job.world, job.restarts
        self.store, self.then = job.store, job.then
        self.members = getattr(job, "members", range(job.world))
        self.device, self.nccl = job.device, job.nccl
        # Calls of `share` so far: one, of the options. All calls come before the training. A rank
        # that joins reads in its second call (`connect`) what the others told in theirs; of the
        # calls after it, which may be fewer than theirs were, nobody reads its values.
        self.calls = 1
        self.log = None                     # the file of the events: metrics.jsonl
        self.timeout = timeout
        # Seconds for a message that only the log waits for: less than a partner waits in an outer
        # step.
        self.patience = timeout / 3
        self.asks = asks
        # After a takeover: the step at which the job goes on, and the address of its store.
        self.latest = getattr(job, "latest", -1)
        self.address = getattr(job, "address", None)
        self.joining = asks or self.latest >= 0
        self.dead = set()                   # those of the present iteration; empty on one stage
        self.missed = set()     # ranks that the last `collect` missed
        self.last = ""          # the name of the last `collect`
        self.events_read = 0
        if self.store.check(["takeover/members"]):
            self.members = [int(r) for r in self.store.get("takeover/members").split()]
            self.address = json.loads(self.store.get("address"))
        self.leads = self.rank == self.members[0]
        self.standby = getattr(job, "standby", None) or host_standby()
        if self.leads and not self.joining:
            self.store.set("answered", json.dumps([0, list(self.members), list(self.members)]))

    def start_group(self):
        """None: each message has a group that ends with its peer."""

    def group_of(self, ranks):
        """As start_group."""

    def read(self):
        """Read what this rank must know when the store is lost."""
        # Not by `share`: a rank that joins has a new standby store, and the others read it the next
        # time.
        self.store.set(f"standby/{self.rank}", json.dumps(self.standby[1]))
        texts = self.store.multi_get([f"standby/{r}" for r in self.members])
        self.addresses = dict(zip(self.members, map(json.loads, texts)))
        self.addresses[self.rank] = self.standby[1]
        self.answered = json.loads(self.store.get("answered"))      # meeting.py says what it holds

    def share(self, value=None):
        """As Job.share, among the members."""
        self.calls += 1
        self.store.set(f"{self.calls}/{self.rank}", json.dumps(value))
        texts = self.store.multi_get([f"{self.calls}/{r}" for r in self.members])
        if STOPPED in texts and not self.joining:
            self.leave(5)
            sys.exit(2)
        return [json.loads(text) for text in texts]

    def stop(self, line, status=2):
        """As Job.stop while all build their parts. Later the other ranks train on, and each that
        ends says why."""
        if self.joining or self.log:
            tqdm.write(line + self.then, file=sys.stderr)
            sys.exit(status)
        super().stop(line, status)

    def leave(self, seconds):
        """As Job.leave, for the ranks that live."""
        self.store.set(f"left/{self.rank}", "=")
        if self.leads:
            everyone = set(range(self.world))
            here = self.answers("left", everyone - self.away() - self.missed, seconds)
            self.missed = everyone.difference(here)

    def away(self):
        """The ranks that are dead or absent at this moment, of which each rank has its own view."""
        return self.dead | absent(self.store, range(self.world))

    def collect(self, name, values, step):
        """{rank: its values} of the ranks that answer within `patience`. Only the first rank gets
        them; the others get {} at once.

        If the first rank waited longer, its partner would do the next outer step without it.

        step: of the evaluation. After a takeover other ranks may be ahead of the first one, and
        answer no evaluation up to `latest`. Only later ones need enough answers, and raise TooFew.
        """
        self.read()             # first: the answer says that this rank knows the newest list
        self.store.set(f"{name}/{self.rank}", json.dumps(values))
        if not self.leads:
            return {}
        # A rank whose last answer has come by now was only late, and is waited for again.
        self.missed = {r for r in self.missed if not self.store.check([f"{self.last}/{r}"])}
        expected = set(range(self.world)) - self.away() - self.missed
        here = self.answers(name, expected, self.patience)
        if step > self.latest:
            here = self.enough_answers(name, here)
        self.missed = set(range(self.world)) - set(here)
        self.last = name
        self.write_events()
        return {r: json.loads(self.store.get(f"{name}/{r}")) for r in here}

    def enough_answers(self, name, here):
        """The ranks that answer, the newest list of standby.py: `here`, or more after a wait.

        Raises TooFew if after 5 timeouts they are still too few.
        """
        number, last, last_but_one = self.answered
        for _ in range(15):                 # 15 times patience: 5 timeouts
            if enough(here, last, last_but_one, tie=True):
                break
            here = self.answers(name, last, self.patience)
        if not enough(here, last, last_but_one, tie=True):
            raise TooFew(f"only ranks {here} answer, too few to go on: the others have ended, or "
                         "this rank is cut off")
        self.store.set("answered", json.dumps([number + 1, here, last]))
        return here

    def answers(self, name, awaited, seconds):
        """The ranks that have answered, when all awaited ones have or after so many seconds."""
        with contextlib.suppress(dist.DistStoreError):          # not all in time
            self.store.wait([f"{name}/{r}" for r in awaited], timedelta(seconds=seconds))
        return [r for r in range(self.world) if self.store.check([f"{name}/{r}"])]

    def tell(self, event):
        """Send an event to the first rank's log, with its line for the screen."""
        event = dict(event, line=EVENTS[event["event"]].format(**event))
        self.store.append("events", json.dumps(event) + "\n")

    def write_events(self):
        """On the first rank: the events since the last call go into the log and onto the screen."""
        if not self.store.check(["events"]):
            return
        lines = self.store.get("events").decode().splitlines()
        with open(self.log, "a") as file:
            for line in lines[self.events_read:]:
                file.write(line + "\n")
                tqdm.write(json.loads(line)["line"])
        self.events_read = len(lines)

    def average(self, vector, replicas, key):
        """As train.average_in, over the replicas that come in time: (the sum, how many numbers were
        compared), (0.0, 0) if that was in vain. key: unique to this average."""
        try:
            members, self.link = self.meet(key, replicas)   # kept: peers may still read from it
            if self.link:
                return average_in(self.link, vector, len(members)), len(vector)
        except RuntimeError as error:
            if not is_loss(error):
                raise
        return 0.0, 0

    def meet(self, key, ranks):
        """(the ranks that come in time, their process group for one use)."""
        come_back(self.store, self.rank)
        members = members_of(self.store, key, self.rank, ranks, 2 * self.patience)
        return members, connect(self.store, key, self.rank, members, 2 * self.patience)

    def close(self):
        """As Job.close. The first rank may host the store: it waits 5 timeouts for late ranks."""
        with contextlib.suppress(RuntimeError):
            self.leave(self.patience)
        late = [r for r in self.missed - self.dead if accepts(self, r)]
        seconds = 5 * self.timeout
        for r in late:
            self.say(f"waiting up to {seconds:g} s for rank {r}, which is late")
        with outliving():
            self.store.wait([f"left/{r}" for r in late], timedelta(seconds=seconds))

    def say(self, line):
        if self.leads:
            tqdm.write(line)


def survive(run):
    """As train.train. On TooFew and on a lost store this rank writes a checkpoint.

    Raises Left if this rank goes on at another store. Otherwise it prints one line and ends.
    """
    job = run.job
    with contextlib.closing(run.pipeline), train.in_one_line(job):
        try:
            train.train(run)
            job.close()
        except (TooFew, dist.DistError) as error:
            then = f"go on with {train.resume(run.folder)}"
            if not run.checkpoints.parts():
                # Nor do the ranks that died before have one.
                then = "the ranks have no checkpoint in common: start again with another --name"
            with outliving():               # `save` ends with a message to the lost store
                run.checkpoints.save(run.step, train.state_of(run))
            why = error
            if not isinstance(error, TooFew):
                why = "the store is lost, and a standby store too"
                with contextlib.suppress(dist.DistError):
                    why = move(job, run)
            sys.exit(f"stopped: rank {job.rank} at step {run.step}: {one_line(why)[:200]}; {then}")
    with contextlib.suppress(RuntimeError):                 # all is saved: the store may go
        run.checkpoints.seal()


def go_through(job, o, joins):
    """Build and train. A rank that was silent, so that others left it, joins again."""
    if job.world > 1:
        notice_silence(job.store, o.survive)
    while True:
        job = SurvivingJob(job, o.survive, joins)
        try:
            with train.in_one_line(job):
                run = build(job, o)
            return survive(run)
        except Left as left:
            print(left.line, file=sys.stderr, flush=True)
            job, joins = left.job, left.asks


def build(job, o):
    """As train.built, with surviving parts."""
    try:
        return build_parts(job, o)
    except ValueError as error:
        raise BadInput(error)
    except dist.DistError as error:
        sys.exit(f"stopped: rank {job.rank} lost another rank before it could train "
                 f"({one_line(error)[:100]}); start again, with --join or --resume")


def build_parts(job, o):
    need(not job.asks or o.method == "noloco" or len(o.stages) > 1,
         "--join has no weights to take: without pipelines, replicas of --method local never meet")
    beside = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) - 1
    if dist.is_torchelastic_launched() and beside and not job.joining:
        job.say(f"warning: when a process dies, torchrun ends the {beside} beside it, and survive "
                "cannot help: give each process a torchrun of its own (--nproc-per-node 1)")
    job.connect(o)
    need(not job.nccl, "survive needs --backend gloo: with NCCL no process outlives another")
    job.stages, _ = train.layout(o, job.world)
    parts = more.parts(o) | dict(
        Pipeline=SurvivingPipeline, Routes=SurvivingRoutes, Checkpoints=SurvivingCheckpoints,
        Log=SurvivingLog, make_outer=make_outer)
    run = train.Run(job, o, **parts)
    job.read()          # it waits for the other ranks: no outer step misses one that builds slower
    job.log = run.folder / "metrics.jsonl"
    job.vectors = [run.theta]           # what a replica of the stage gives to one that joins
    if run.outer:
        job.vectors += [run.outer.phi, run.outer.delta]
    if job.joining:
        join(run)
    return run


def make_outer(run):
    """As train.make_outer, of a class that outlives its partners."""
    job, o = run.job, run.o
    replicas = run.stages[run.stage]
    if o.method != "noloco" or job.world == 1:
        return train.make_outer(run)
    codec = None
    if o.wire == "int8" and len(replicas) > 1:
        codec = OneByte(lengths_of(run.model.parameters()))

    def reset():
        for optimizer in run.inner:
            optimizer.state.clear()

    return SurvivingNoLoCo(
        run.theta, replicas, **run.outer_settings, codec=codec, store=job.store,
        timeout=job.timeout,
        # In a pipeline all ranks do each iteration together, so no replica may leave out inner
        # steps there.
        catch_up=len(o.stages) == 1, last=o.steps, tell=job.tell, reset=reset,
        dead=job.dead)


def join(run):
    """Weights and a step for a rank that joins, or goes on at another store.

    Raises Left if the replica died that was to give its weights.
    """
    job, outer = run.job, run.outer
    if not job.asks:
        own_checkpoint(run)
        step = job.latest if run.pipeline.peers else run.step
        if job.leads:
            job.tell(dict(event="takeover", step=step, rank=job.rank, missing=sorted(job.away())))
    elif run.pipeline.peers:
        step = join_pipeline(run)
    else:
        outer.join()
        step = outer.steps
    print(f"rank {job.rank} takes part from step {step}", flush=True)
    if outer:
        outer.steps, outer.late = step, True
    if run.reader and (job.asks or step != run.step):
        run.reader.cursor = step * run.o.microbatches * run.o.batch
    run.step = step


def join_pipeline(run):
    """Take a replica's weights, or this rank's own. Returns the step from which it takes part."""
    job, rank = run.job, run.job.rank
    step = run.pipeline.ask()
    need(step < run.o.steps, "--join: training is over")
    giver = run.pipeline.take_weights()
    if giver == rank:
        own_checkpoint(run)
    job.dead.add(rank)          # until it begins, so that it makes new paths as all ranks do
    come_back(job.store, rank)
    outer = step // (run.o.inner_steps or 1)
    job.tell(dict(event="joined", step=step, outer=outer, rank=rank, given_by=giver))
    return step


def own_checkpoint(run):
    """Take this rank's newest part of a checkpoint. Without one the process ends with one line."""
    own = run.checkpoints.own()
    need(own, f"no rank has rank {run.job.rank}'s weights, nor has {run.folder} a checkpoint")
    train.restore(run, train.load_part(own[max(own)]))
    print(f"rank {run.job.rank} has its own weights of step {run.step}", flush=True)
