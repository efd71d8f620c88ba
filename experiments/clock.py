"""Runs of train.py by the clock: about as many steps as fit into so many measured seconds.

    torchrun ... -m experiments.clock --clock SECONDS ...   train.py's options: as many steps as fit
                                      --never-waits         pairs of gossip/asynchronous.py
                                      --step SECONDS        a step takes no less
                                      --uneven              steps of uneven length
                                      --slow RANK           its steps take twice as long
                                      --by-speed            it makes half as many inner steps
                                      --one-evaluation      nobody evaluates before the end
                                      --memory N            for the planner of paths

The replicas are on hosts of this machine (tools/hosts.py; root and iproute2), each with CPU of a
processor; the relay, which is the network, has its own. Each origin evaluates on its own part of
the second half of the held-out text.
"""
import functools
import itertools
import math
import random
import signal
import sys
import time

import torch.distributed as dist

import train
from gossip.asynchronous import Asynchronous
from planning.measure import measure
from planning.training import plan_paths
from skippipe import Network
from train import Job, Parser, timed

CPU = 0.2                       # of a processor, that each host has
EVALUATIONS = 6                 # of a run that evaluates before the end
PROGRAM = "-m experiments.clock --clock"
FIXED = 0.7                     # of the time, after which all agree on the last message
VARIANCE = 0.5                  # of the logarithm of an uneven step's length (B4)


class Clock(train.Log):
    """Gives the run as many outer steps as fit into `limit` seconds at the slowest rank's pace.

    It counts in outer steps, m inner steps each, which all ranks must make equally many of. A
    rank's pace counts from half of the warm-up on, and each plans the end by its own, until FIXED
    of the time has passed. Then each tells what fits at its pace, and the first rank sets the
    least. Nobody ends before this number has come, and nobody waits for it while there is time.
    The clock stands still while replicas evaluate, from when the last one has come until all go on.

    limit: seconds. Subclasses may override `agree`, `last_message`, `end`, `ends_after` and
    `take_row`.
    """

    def __init__(self, run, limit):
        super().__init__(run)
        self.limit = limit
        # The first outer step after the warm-up, the same one on all ranks.
        self.first = math.ceil(run.o.warmup / run.o.inner_steps)
        self.begun = None           # (seconds, steps) since when the pace counts
        self.told = False           # whether the others know what fits at this rank's pace
        self.last = None            # the number of the last message, once all have agreed

    def between_steps(self, before):
        with timed(self.sums, "seconds"):
            self.plan()
        super().between_steps(before)

    def plan(self):
        """Find the pace, then plan the end, anew after each step: the rate's cosine goes on to
        it."""
        o, step = self.run.o, self.run.step
        first = self.first * o.inner_steps
        if not self.begun and step >= min(o.warmup // 2, first - 1):        # first steps are slow
            self.begun = self.sums["seconds"], step
        if step == first:
            self.agree()
        elif step > first:
            o.steps = self.ends_after(step + (self.limit - self.sums["seconds"]) * self.pace)

    @property
    def pace(self):
        """Inner steps per second."""
        began, step = self.begun
        return (self.run.step - step) / (self.sums["seconds"] - began)

    def agree(self):
        """At the first outer step after the warm-up, to which all come: what each needs of the
        others."""
        o = self.run.o
        slowest = min(self.run.job.share(self.pace / o.inner_steps))
        o.eval_every = max(1, round(self.limit / EVALUATIONS * slowest)) * o.inner_steps

    def ends_after(self, fitting):
        """How many steps this rank shall make in total. fitting: as many as fit at its pace.

        Messages count from 0 on: K of them, one of each fragment, between two outer steps.
        """
        o = self.run.o
        next_one = o.fragments * (self.run.step // o.inner_steps + 1)   # of the next outer step
        last = self.last_message(fitting)
        # Between outer steps a rank must not wait: others may need its next message to come so far.
        waits = last < next_one and self.run.step % o.inner_steps == 0
        last = max(last, next_one)
        if self.last is None and self.sums["seconds"] > FIXED * self.limit:
            self.last = self.common(last, next_one, waits)
        return self.end(self.last or last, fitting)

    def last_message(self, fitting):
        """The last one of this rank if so many steps fit: all ranks stop after an outer step."""
        o = self.run.o
        return o.fragments * round((fitting - o.delay) / o.inner_steps)

    def end(self, last, fitting):
        """The step after which this rank ends: where its last message has landed."""
        o = self.run.o
        return last // o.fragments * o.inner_steps + o.delay

    def common(self, last, next_one, waits):
        """The last message of all, the least that fits anybody; None while it is not known and this
        rank does not wait for it (waits). Other ranks are told this one's numbers."""
        job, key = self.run.job, "last message"
        if not self.told:
            job.store.set(f"last message of {job.rank}", f"{last} {next_one}")
            self.told = True
        every = [f"last message of {rank}" for rank in range(job.world)]
        if job.leads and (waits or job.store.check(every)):
            plans = [text.split() for text in job.store.multi_get(every)]
            least = min(int(fitting) for fitting, _ in plans)
            begun = max(int(next_one) for _, next_one in plans)
            job.store.set(key, str(max(least, begun)))
        return int(job.store.get(key)) if waits or job.store.check([key]) else None

    def take_row(self):
        """The time ends when the last rank has come."""
        with timed(self.sums, "seconds"):
            dist.barrier()
        return super().take_row()

    def report(self, row, ends):
        """All go on together."""
        super().report(row, ends)
        dist.barrier()


class OneEvaluation(Clock):
    """For replicas that evaluate at the end only: all send equally many messages. Each then trains
    by itself until its time is over, or ends before its next message would leave; one that is late
    makes its last message all the same. A message that is still under way at a rank's end is not
    merged there."""

    def agree(self):
        """Nothing: nobody evaluates before the end."""

    def last_message(self, fitting):
        """The last one of this rank that leaves in time."""
        o = self.run.o
        last = o.fragments * int(fitting // o.inner_steps + 1)
        while self.departs(last) > fitting and last > 0:
            last -= 1
        return last

    def end(self, last, fitting):
        in_time = max(self.departs(last), round(fitting))
        return max(self.run.step, min(in_time, self.departs(last + 1) - 1))

    def departs(self, message):
        """The step after which this message leaves."""
        o = self.run.o
        outer_steps, fragment = divmod(message, o.fragments)
        return outer_steps * o.inner_steps + fragment * o.inner_steps // o.fragments


class OwnTime(Clock):
    """For pairs that never wait: each rank makes as many steps as fit at its own pace, and
    evaluates once, at the end."""

    def agree(self):
        """Nothing: for that ranks would wait."""

    def ends_after(self, fitting):
        return max(self.run.step, round(fitting))

    def take_row(self):
        """What is under way arrives before the evaluation."""
        self.run.outer.settle()
        return train.Log.take_row(self)


def half_as_many(m, D):
    """(m, D) of a replica that is half as fast as the others. A delay stays one step or more."""
    return m // 2, (D + 1) // 2


def take_half(run):
    """Before its first step, give a rank half as many inner steps between outer steps, which have
    the same numbers on all ranks: so groups are drawn alike."""
    o = run.o
    o.inner_steps, o.delay = half_as_many(o.inner_steps, o.delay)
    run.outer.inner_steps = o.inner_steps
    if o.delay:
        run.outer.delay = o.delay


def never_waiting(run):
    """In place of train.make_outer."""
    o = run.o
    return Asynchronous(run.theta, run.replicas, inner_steps=o.inner_steps, seed=o.seed)


# ---------------------------------------------------------------- steps of a given length


class Paced(train.Pipeline):
    """Forward and backward of each step take its length, which this machine's speed does not
    change. Once they are computed it sleeps, as if it waited for an accelerator."""
    lengths = None                  # an iterator of seconds

    def run(self, paths, batches, train=True, order=None):
        end = time.perf_counter()
        if train:
            end += next(self.lengths)
        found = super().run(paths, batches, train, order)
        time.sleep(max(0.0, end - time.perf_counter()))
        return found


def uneven(seconds, draws):
    """The lengths of steps: f times twice `seconds`, but no less than `seconds`. f is log-normal
    with mean 1; 26% of all f are below 1/2, so the mean length is 2.08 times `seconds`. draws: a
    random.Random."""
    while True:
        f = draws.lognormvariate(-VARIANCE / 2, math.sqrt(VARIANCE))
        yield seconds * max(1.0, 2 * f)


def lengths_of(own, seed, rank):
    """An iterator of the seconds of this rank's steps."""
    seconds = own.step
    if rank == own.slow:
        seconds *= 2
    if own.uneven:
        return uneven(seconds, random.Random(f"uneven {seed} {rank}"))
    return itertools.repeat(seconds)


# ---------------------------------------------------------------- a run


class Measured(train.Routes):
    """Paths planned for the links that the ranks measure, and for nodes that hold `memory`
    microbatches at once."""

    def __init__(self, run, kept, make_plan, memory):
        o = run.o
        if o.routing not in ("random", "fixed"):
            delay, compute = measure(run.pipeline, run.stages, run.job)
            network = Network(delay, compute, run.stages, memory)

            def make_plan(o, stages):
                return plan_paths(network, o.routing, o.skip, o.microbatches, o.seed)

        super().__init__(run, kept, make_plan)


def parts_of(own):
    """What takes the place of train.Run's parts."""
    parts = dict(Routes=functools.partial(Measured, memory=own.memory))
    if own.step:
        parts["Pipeline"] = Paced
    if own.never_waits:
        parts.update(make_outer=never_waiting, Log=functools.partial(OwnTime, limit=own.clock))
    elif own.one_evaluation:
        parts["Log"] = functools.partial(OneEvaluation, limit=own.clock)
    else:
        parts["Log"] = functools.partial(Clock, limit=own.clock)
    return parts


def clocked(argv):
    """train.main for so many seconds, on a part of the held-out text."""
    job = Job()
    with train.in_one_line(job):
        own, argv = clock_parser().parse_known_args(argv)
        train.need(job.world > 1, "--clock is for several processes: start torchrun with "
                   "--nproc-per-node 2 or more")
        signal.alarm(int(6 * own.clock) + 600)      # a run that hangs must not hold those behind it
        run = train.built(job, [*argv, "--steps", "1000000"], **parts_of(own))
        check(own, run)
        asked = run.o.inner_steps
        if own.by_speed and job.rank == own.slow:
            take_half(run)
        inner_steps = job.share(run.o.inner_steps) if own.by_speed else None
        # At a checkpoint all wait for each other, and replicas may be at different steps.
        run.o.eval_every = run.o.save_every = run.o.steps
        if run.corpus:
            test = run.corpus.heldout.chunk(2)[1]
            run.corpus.heldout = test.chunk(len(run.stages[0]))[run.stages[0].index(job.rank)]
        if own.step:
            run.pipeline.lengths = lengths_of(own, run.o.seed, job.rank)
        train.train(run)
        job.close()
    if job.leads:           # with the steps that fitted
        config = vars(run.o) | dict(inner_steps=asked, inner_steps_by_rank=inner_steps)
        train.write_json(run.folder / "config.json", config)


def check(own, run):
    """Raises BadInput."""
    o = run.o
    train.need(run.outer, "--clock is for --method noloco and diloco")
    train.need(o.warmup >= 4, "--clock needs a --warmup of 4 or more: in it, it finds the pace")
    train.need(own.step or not own.uneven and own.slow is None, "--uneven and --slow need a --step")
    if own.never_waits:
        plain = o.method == "noloco" and o.wire == "fp32" and not o.delay and o.fragments == 1
        train.need(plain and not own.by_speed and len(o.stages) == 1,
                   "--never-waits is for --method noloco with --wire fp32, without --delay, "
                   "--fragments and --by-speed, and one stage")
    train.need(not own.one_evaluation or len(o.stages) == 1, "--one-evaluation is for one stage")
    if own.by_speed:
        train.need(own.one_evaluation and own.slow is not None,
                   "--by-speed is for --one-evaluation and --slow")
        # The slow one's message, too, must land before its next one leaves.
        least = o.delay + 3 if o.delay else 2
        train.need(o.fragments == 1 and o.inner_steps >= least, "--by-speed needs --inner-steps "
                   "of at least 2 (with a --delay D at least D + 3), and no --fragments")


def clock_parser():
    p = Parser("train.py's options, and these")
    p.add_argument("--clock", type=float, help="seconds to train")
    p.add_argument("--memory", type=int, default=3,
                   help="microbatches that a node holds, for the planner")
    p.add_argument("--never-waits", action="store_true",
                   help="pairs that never wait, instead of NoLoCo's")
    p.add_argument("--step", type=float, metavar="SECONDS",
                   help="a step's forward and backward take no less")
    p.add_argument("--uneven", action="store_true",
                   help="steps of log-normal length, no less than --step, on average 2.08 times it")
    p.add_argument("--slow", type=int, metavar="RANK", help="its steps take twice as long")
    p.add_argument("--by-speed", action="store_true",
                   help="the slow one makes half as many inner steps between outer steps")
    p.add_argument("--one-evaluation", action="store_true",
                   help="at the end: before it nobody waits for others to evaluate")
    return p


if __name__ == "__main__":
    clocked(sys.argv[1:])
