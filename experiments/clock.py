"""Runs of train.py by the clock: about as many steps as fit into so many measured seconds.

    torchrun ... -m experiments.clock --clock SECONDS ...   train.py's options: as many steps as fit
                                      --by-speed            inner steps by each replica's speed
                                      --overlapped          ddp by torch's DistributedDataParallel
                                      --never-waits         pairs of gossip/asynchronous.py
                                      --uneven              steps of uneven length
                                      --one-evaluation      nobody evaluates before the end

The replicas are on hosts of this machine (tools/hosts.py; root and iproute2), each with CPU of a
processor; the relay, which is the network, has its own. Each origin evaluates on its own part of
the second half of the held-out text.
"""
import functools
import math
import random
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import train
from gossip import Delayed, Fragments
from gossip.asynchronous import Asynchronous
from planning.measure import measure
from planning.training import plan_paths
from skippipe import Network
from train import Job, Parser, timed

CPU = 0.2                       # of a processor, that each host has
EVALUATIONS = 6                 # of a run, and one at the warm-up's end
PROGRAM = "-m experiments.clock --clock"
VARIANCE = 0.5                  # of the logarithm of an uneven step's length (B4)


class Clock(train.Log):
    """Gives the run as many outer steps as fit into `limit` seconds at the slowest rank's pace.

    It counts in outer steps (m inner steps each; of a method without any, one), since by speed the
    ranks' m differ. The pace counts from half of the warm-up on, and is renewed at each evaluation.
    The clock stands still while replicas evaluate, from when the last one has come until all go on.

    limit: seconds. by_speed: until the warm-up has ended: give each rank steps of its own.
    """

    def __init__(self, run, limit, by_speed=False):
        super().__init__(run)
        self.limit, self.by_speed = limit, by_speed
        self.idle = 0.0             # seconds in which this rank waited for the others to evaluate
        self.begun = ()             # (seconds, of them blocked, steps) since when the pace counts
        self.rounds = None          # outer steps in total; None before the warm-up has ended
        self.every = None           # of them between evaluations
        self.inner_steps = None     # of each rank, by speed

    @property
    def seconds(self):
        """Of this rank's own time."""
        return self.sums["seconds"] - self.idle

    def between_steps(self, before):
        if not self.begun and before >= self.run.o.warmup // 2:             # first steps are slow
            self.begun = self.seconds, self.sums["blocked"], self.run.step
        super().between_steps(before)

    def take_row(self):
        came = time.perf_counter()
        with timed(self.sums, "seconds"):
            dist.barrier()
        self.idle += time.perf_counter() - came
        return super().take_row()

    def report(self, row, ends):
        super().report(row, ends)
        if not ends:
            self.renew()
        dist.barrier()

    @property
    def m(self):
        return self.run.o.inner_steps or 1

    def renew(self):
        """At an evaluation, which follows an outer step."""
        began, blocked, step = self.begun
        seconds = self.seconds - began
        steps = self.run.step - step
        pace = steps / seconds / self.m
        if self.by_speed:
            speed = steps / (seconds - (self.sums["blocked"] - blocked))
            self.take_own_steps(speed)
            pace = speed / self.m                       # at first as if nobody would wait
            self.begun = self.seconds, self.sums["blocked"], self.run.step
        self.fit(pace)

    def fit(self, pace):
        """All ranks set the numbers that fit the slowest. pace: outer steps a second."""
        o, job = self.run.o, self.run.job
        slowest = min(job.share(pace))
        self.rounds, self.every = job.share(self.numbers(slowest))[0]
        o.steps = self.rounds * self.m + o.delay        # the last message has landed
        o.eval_every = self.every * self.m

    def numbers(self, pace):
        """(outer steps in all, between evaluations)"""
        left = self.limit - self.sums["seconds"]
        gap = self.limit / EVALUATIONS
        if self.every and 0 < left < 0.75 * gap:        # the last part stays as planned
            return self.rounds, self.every
        every = self.every or max(1, round(gap * pace))
        done = self.run.step // self.m
        more = round(left * pace - self.run.o.delay / self.m)
        in_all = done + max(1, more)
        if self.rounds and left <= 0:   # over its time: an evaluation must not move the end away
            in_all = min(in_all, self.rounds)
        return in_all, every

    def take_own_steps(self, speed):
        """From here on each rank makes inner steps by its speed between outer steps, which keep
        their numbers: so groups are drawn alike."""
        run, o = self.run, self.run.o
        self.by_speed = False
        fastest = max(run.job.share(speed))
        done = run.step // o.inner_steps
        o.inner_steps, o.delay = own_steps(o.inner_steps, o.fragments, o.delay, speed / fastest)
        set_steps(run.outer, o.inner_steps, o.delay)
        # Steps count as if there had been so many from the first outer step on.
        run.step = run.outer.steps = o.warmup = done * o.inner_steps
        self.inner_steps = run.job.share(o.inner_steps)


def own_steps(m, K, D, share):
    """(m, D) of a replica whose speed is this share of the fastest one's.

    At least one step for each of K fragments; with a delay two, so that on all replicas a message
    lands before the next fragment's departs.
    """
    least = K
    if D:
        least = 2 * K
    own = max(min(least, m), round(share * m))
    if D and own < m:
        D = min(max(1, D * own // m), own // K - 1)
    return own, D


def set_steps(outer, m, D):
    """Give an outer optimizer, which has just done an outer step, other numbers."""
    if isinstance(outer, Fragments):
        for k, fragment in enumerate(outer.outers):
            fragment.late = k * m // len(outer.outers)
            set_steps(fragment, m, D)
    elif isinstance(outer, Delayed):
        outer.delay, outer.outer.inner_steps = D, m
    else:
        outer.inner_steps = m


# ---------------------------------------------------------------- one evaluation, at the end


class OwnTime(train.Log):
    """Gives this rank as many steps as fit into `limit` seconds at its own pace. Ranks evaluate
    once, at the end: at an evaluation before it they would wait for each other."""

    def __init__(self, run, limit):
        super().__init__(run)
        self.limit = limit
        self.begun = ()             # (seconds, steps) since when the pace counts
        self.inner_steps = None     # as Clock's: here all ranks have the same

    def between_steps(self, before):
        o, made, now = self.run.o, self.run.step, self.sums["seconds"]
        if not self.begun and made >= o.warmup // 2:            # first steps are slow
            self.begun = now, made
        if o.warmup <= made < o.steps:
            began, steps = self.begun
            if made > steps:
                pace = (made - steps) / (now - began)
                self.fit(made, made + max(0, round((self.limit - now) * pace)), now)
        super().between_steps(before)

    def fit(self, made, fitting, now):
        """made: steps so far; fitting: those that fit in total."""
        self.run.o.steps = fitting

    def take_row(self):
        """What is under way arrives before the evaluation."""
        self.run.outer.settle()
        return super().take_row()


class CommonEnd(OwnTime):
    """For replicas that meet: all make equally many outer steps. Each plans by its own pace, until
    the first rank tells the others how many there will be, once most of the time has passed."""

    def __init__(self, run, limit):
        super().__init__(run, limit)
        self.told = False

    def fit(self, made, fitting, now):
        o, job = self.run.o, self.run.job
        if self.told:
            return
        rounds = max(made // o.inner_steps + 1, round((fitting - o.delay) / o.inner_steps))
        if now > 0.7 * self.limit:
            if job.leads:
                job.store.set("outer steps in all", str(rounds))
            self.told = job.store.check(["outer steps in all"])
            if self.told:
                rounds = int(job.store.get("outer steps in all"))
        o.steps = rounds * o.inner_steps + o.delay              # the last message has landed

    def take_row(self):
        """The time ends when the last rank has come."""
        with timed(self.sums, "seconds"):
            dist.barrier()
        return super().take_row()


def never_waiting(run):
    """In place of train.make_outer."""
    o = run.o
    return Asynchronous(run.theta, run.replicas, inner_steps=o.inner_steps, seed=o.seed)


# ---------------------------------------------------------------- steps of uneven length


class Uneven(train.Pipeline):
    """A step's forward and backward take f times as long as two plain ones, but no less than one.
    f is log-normal with mean 1, drawn from the seed; 26% of all f are below 1/2. It computes
    longer: sleeping would leave the processor to the messages."""
    draws = None                    # a random.Random

    def run(self, paths, batches, train=True, order=None):
        start = time.thread_time()
        found = super().run(paths, batches, train, order)
        if train:
            plain = time.thread_time() - start
            f = self.draws.lognormvariate(-VARIANCE / 2, math.sqrt(VARIANCE))
            compute_until(start + 2 * f * plain)
        return found


def compute_until(end):
    """end: in the processor seconds of this thread."""
    square = torch.ones(64, 64)
    while time.thread_time() < end:
        square @ square


# ---------------------------------------------------------------- DDP as torch does it


class Loss(torch.nn.Module):
    """A Llama's loss as one call, as DistributedDataParallel needs it."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens):
        x = self.model.blocks(self.model.embed(tokens[:, :-1]))
        return self.model.loss(x, tokens[:, 1:])


class Overlapped(train.Pipeline):
    """One stage, whose gradients DistributedDataParallel averages while backward goes on.

    held: seconds of the last step that backward waited for messages after its own work.
    """

    def __init__(self, model, *rest):
        super().__init__(model, *rest)
        self.held = self.worked = 0.0
        self.ddp = DistributedDataParallel(Loss(model))
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(self.note)

    def note(self, _):
        self.worked = time.perf_counter()

    def run(self, paths, batches, train=True, order=None):
        if not train:
            return super().run(paths, batches, train, order)
        tokens = torch.cat(list(batches.values()))
        loss = self.ddp(tokens)
        loss.backward()
        end = time.perf_counter()
        self.held = end - self.worked
        count = tokens[:, 1:].numel()
        return loss.detach(), count, count


class Averaged:
    """In place of train.Average: backward has averaged the gradients already.

    Each rank's batch has equally many tokens, so a mean of sums over them is what is wanted.
    """
    owed = ()

    def __init__(self, run):
        self.run, self.bytes_sent = run, 0

    def __call__(self, grad, tokens):
        n = self.run.job.world
        self.bytes_sent += 2 * (n - 1) * grad.nbytes // n           # a ring's
        self.run.log.sums["blocked"] += self.run.pipeline.held
        return tokens


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
    if own.overlapped:
        parts.update(Pipeline=Overlapped, Average=Averaged)
    if own.uneven:
        parts["Pipeline"] = Uneven
    if own.never_waits:
        parts.update(make_outer=never_waiting, Log=functools.partial(OwnTime, limit=own.clock))
    elif own.one_evaluation:
        parts["Log"] = functools.partial(CommonEnd, limit=own.clock)
    else:
        parts["Log"] = functools.partial(Clock, limit=own.clock, by_speed=own.by_speed)
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
        set_clock(own, run)
        train.train(run)
        job.close()
    if job.leads:           # with the steps that fitted
        config = vars(run.o) | dict(inner_steps=asked, inner_steps_by_rank=run.log.inner_steps)
        train.write_json(run.folder / "config.json", config)


def set_clock(own, run):
    """Give the run its part of the held-out text, and its evaluations."""
    o, job = run.o, run.job
    if run.corpus:
        test = run.corpus.heldout.chunk(2)[1]
        run.corpus.heldout = test.chunk(len(run.stages[0]))[run.stages[0].index(job.rank)]
    if own.uneven:
        run.pipeline.draws = random.Random(f"uneven {o.seed} {job.rank}")
    o.eval_every = o.steps
    if not (own.never_waits or own.one_evaluation):
        m = o.inner_steps or 1
        o.eval_every = -(-max(1, o.warmup) // m) * m        # at the warm-up's end


def check(own, run):
    """Raises BadInput."""
    o = run.o
    whole = o.method == "ddp" and o.wire == "fp32" and len(o.stages) == 1
    train.need(whole or not own.overlapped,
               "--overlapped is for --method ddp with --wire fp32 and one stage")
    train.need(not (own.overlapped and own.uneven), "--uneven is not for --overlapped")
    if own.never_waits:
        plain = o.method == "noloco" and o.wire == "fp32" and not o.delay and o.fragments == 1
        train.need(plain and not own.by_speed and len(o.stages) == 1,
                   "--never-waits is for --method noloco with --wire fp32, without --delay, "
                   "--fragments and --by-speed, and one stage")
    train.need(not own.one_evaluation or (run.outer and not own.by_speed),
               "--one-evaluation is for noloco and diloco, without --by-speed")
    train.need(o.warmup >= 4, "--clock needs a --warmup of 4 or more: in it, it finds the pace")
    if own.by_speed:
        train.need(run.outer, "--by-speed is for noloco and diloco")
        train.need(o.delay < o.inner_steps // o.fragments,
                   "--by-speed needs a --delay below --inner-steps / --fragments")


def clock_parser():
    p = Parser("train.py's options, and these")
    p.add_argument("--clock", type=float, help="seconds to train")
    p.add_argument("--memory", type=int, default=3,
                   help="microbatches that a node holds, for the planner")
    p.add_argument("--by-speed", action="store_true",
                   help="after the warm-up each replica makes inner steps by its speed")
    p.add_argument("--overlapped", action="store_true",
                   help="ddp by torch's DistributedDataParallel, during the backward pass")
    p.add_argument("--never-waits", action="store_true",
                   help="pairs that never wait, instead of NoLoCo's")
    p.add_argument("--uneven", action="store_true",
                   help="steps of log-normal length, which compute longer")
    p.add_argument("--one-evaluation", action="store_true",
                   help="at the end: before it nobody waits for others to evaluate")
    return p


if __name__ == "__main__":
    clocked(sys.argv[1:])
