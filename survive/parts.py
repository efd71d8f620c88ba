"""Training with `--survive SECONDS`: train.build with parts that outlive the processes beside them.

One stage: a replica that dies, hangs or is late costs its partner one exchange (outer.py); one that is
started again with --join takes part again. Pipelines: paths go round the dead (pipeline.py, routes.py).
Node 0 hosts the store and must live: without it every survivor writes a checkpoint and stops with one line.
docs/failures.md has the whole table.
"""
import contextlib
import json
import sys
from datetime import timedelta

import torch.distributed as dist

import train
from plumbing.processes import Job
from survive.meeting import Gone, absent, come_back, meet, notice_silence
from survive.far import SurvivingOneByte
from survive.outer import SurvivingNoLoCo
from survive.pipeline import SurvivingPipeline
from survive.routes import SurvivingRoutes

KINDS = {"noloco": {"fp32": SurvivingNoLoCo, "int8": SurvivingOneByte}}


class SurvivingJob(Job):
    """A Job that waits for nobody for ever, and without a default process group."""

    def __init__(self, job, timeout, joining):
        vars(self).update(vars(job))        # it goes on as this one
        self.timeout = timeout
        self.patience = timeout / 3         # less than partners wait in an outer step
        self.joining = joining
        self.dead = set()                   # of a pipeline
        self.silent = set()                 # who did not answer the last time; nobody waits for them
        self.told = 0
        if self.store:
            notice_silence(self.store, timeout)

    def refuse(self, line):
        if self.joining:                    # the others are under way
            print("error: " + line, file=sys.stderr, flush=True)
            sys.exit(2)
        super().refuse(line)

    def gone(self, store=None):
        return self.dead | absent(store or self.store, range(self.world))

    def collect(self, name, values):
        """Rank 0 gets those who answer in time: less than partners wait in an outer step, or they would go on
        without it meanwhile."""
        if self.world == 1:
            return {0: values}
        self.store.set(f"{name}/{self.rank}", json.dumps(values))
        if self.rank:
            return None
        awaited = set(range(self.world)) - self.gone() - self.silent
        with contextlib.suppress(dist.DistStoreError):
            self.store.wait([f"{name}/{r}" for r in sorted(awaited)], timedelta(seconds=self.patience))
        here = {r for r in range(self.world) if self.store.check([f"{name}/{r}"])}
        self.silent = set(range(self.world)) - here
        return {r: json.loads(self.store.get(f"{name}/{r}")) for r in sorted(here)}

    def tell(self, event):
        """For rank 0's log."""
        if self.world > 1:
            self.store.set(f"event/{self.store.add('events', 1)}", json.dumps(event))

    def news(self):
        if self.world == 1:
            return []
        first, self.told = self.told + 1, self.store.add("events", 0)
        keys = [f"event/{n}" for n in range(first, self.told + 1)]
        told = [key for key in keys if self.store.check([key])]         # who dies telling leaves a gap
        return [json.loads(self.store.get(key)) for key in told]

    def meet(self, key, ranks):
        come_back(self.store, self.rank)
        return meet(self.store, key, self.rank, ranks, 2 * self.patience)

    @contextlib.contextmanager
    def rescue(self, run, save):
        """When what training needs is gone: a checkpoint and one line."""
        try:
            with super().rescue(run, save):
                try:
                    yield
                except (Gone, dist.DistError) as error:
                    save_what_can_be(save)
                    reason = str(error) if isinstance(error, Gone) else "the store on node 0 is lost"
                    sys.exit(f"stopped: rank {self.rank} at step {run.step}: {reason}; go on with --resume "
                             f"{run.folder}")
        finally:
            run.pipeline.stop()

    def silence(self, run):
        return contextlib.nullcontext()

    def another_gave_up(self):
        """The others go on without this one, so each says why it does not."""
        return False


def save_what_can_be(save):
    with contextlib.suppress(RuntimeError):         # telling that it is saved fails where the store is lost
        save()


def build(job, o, argv):
    """As train.build; on a process started with --join, what it has is then that of a living replica."""
    o.join = job.rank > 0 and "--join" in argv
    job = SurvivingJob(job, o.survive, o.join)
    if not o.survive:
        job.refuse("--join is for a run with --survive SECONDS: another one needs every process")
    job.connect(o, group=False)
    if job.nccl:
        job.refuse("--survive needs --backend gloo: with NCCL no process outlives another")
    if o.join and (o.method != "noloco" or len(o.stages) > 1):
        job.refuse("--join is for --method noloco on one stage; others go on from a checkpoint: --resume")
    run = train.build(job, o, SurvivingPipeline, SurvivingRoutes, make_outer)
    run.routes.outer = run.outer
    if o.join:
        join(run)
    return run


def make_outer(job, o, params, replicas, inner):
    if o.method != "noloco" or job.world == 1:
        return train.make_outer(job, o, params, replicas, inner)

    def tell(event):
        job.tell(dict(step=event["outer"] * o.inner_steps, **event))

    # in a pipeline the iterations of all go together: there nobody leaves out steps
    return train.make_outer(job, o, params, replicas, inner, KINDS, store=job.store,
                            timeout=job.timeout, catch_up=len(o.stages) == 1, tell=tell, reset=inner.reset)


def join(run):
    rank = run.job.rank
    line = f"rank {rank} asks to join: it gets its weights after a living replica's next outer step"
    print(line, flush=True)
    try:
        run.outer.join()
    except RuntimeError as error:
        run.job.refuse(f"--join: no living replica answered ({str(error)[:100]})")
    run.step = run.outer.steps
    print(f"rank {rank} joined at step {run.step}", flush=True)
    run.reader.cursor = run.step * run.o.microbatches * run.o.batch
