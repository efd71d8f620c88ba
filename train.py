"""Train a Llama with NoLoCo, DiLoCo, data parallelism or no synchronisation, over any pipelines.

    python train.py                                             one process
    torchrun --nproc-per-node 8 train.py --stages 4,4           2 stages of 4 replicas, random paths
    torchrun --nproc-per-node 8 train.py --method ddp           8 replicas, all-reduce at every step
    torchrun --nproc-per-node 7 train.py --stages 3,2,2 --layers 6 --layers-per-stage 1,2,3
    torchrun --nproc-per-node 8 train.py --resume runs/NAME     goes on from the newest checkpoint

One step: every origin cuts its batch into microbatches, each of which takes its path through the
stages and comes home for its loss (skippipe.py says what a path is); backward retraces it. Each
rank then divides its gradient by the tokens that came home through it, clips it, takes an Adam step
on its own flat vector, and meets the other replicas of its stage as the method says (noloco.py).

Read from the bottom up: main, train, build, inner_step; then the executor, Pipeline. To follow a
step only noloco.py, skippipe.py and model.py are needed beside this file. plumbing/ has what
surrounds it: data, evaluation, checkpoints, the log, signals. `--survive SECONDS` puts the parts of
survive/ in the place of ours, tools/ and experiments/ theirs. TRACE=1 prints each message.
"""
import contextlib
import math
import os
import signal
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)    # no traceback; in training plumbing/signals.py
# Otherwise each broken connection prints a page of C++ stack.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
import torch
import torch.distributed as dist

from gossip import outer_optimizer
from gossip.sums import SUMS, Average
from model import Config, Llama
from noloco import flatten
from planning.replan import Replanning, TimedBackwards
from planning.rho import shares
from planning.training import PLANNERS, idle, measure, plan_paths, read_links
from plumbing.checkpoints import Checkpoints, begin, go_on, state_of, take_folder
from plumbing.data import load_data
from plumbing.evaluation import heldout
from plumbing.inner import Inner, adam, muon
from plumbing.lanes import lanes
from plumbing.memory import refuse_too_large
from plumbing.options import (METHODS, MODELS, asks_to_join, integers, layout, option,
                              parse_options, steps_or_half, whole_config)
from plumbing.processes import Job, complain, restarts
from plumbing.processor import warn_of_slow_bfloat16
from plumbing.report import Meter, banner
from plumbing.spread import compare, count_comparison, sampled_places
from skippipe import BACKWARD, FORWARD, LOSS, Network, chain, full_paths, kind, random_paths

# ---------------------------------------------------------------- options


@dataclass
class Options:
    """Every option, its default and its help. None: from plumbing/options.py."""
    # how replicas synchronise
    method: str = option("noloco", "how replicas synchronise", choices=list(METHODS))
    inner_steps: int = option(None, "optimizer steps per outer step (m)", least=1)
    alpha: float = option(None, "outer momentum (N2)")
    beta: float = option(None, "outer learning rate (N2)")
    gamma: float = option(None, "pull between slow weights (N2; default: beta, as released)")
    group_size: int = option(None, "replicas that meet in an outer step (n)", least=2)
    wire: str = option("fp32", "of a weight, Delta or gradient", choices=["fp32", "bf16", "int8"])
    delay: int = option(0, "inner steps that messages travel; half: m // 2; 0: the paper's",
                        parse=steps_or_half)
    fragments: int = option(1, "parts of the weights that meet in turn; 1: the paper's", least=1)
    # the pipeline
    stages: list = option(None, "replicas of each, e.g. 3,2,2 (default: one stage of all)",
                          parse=integers)
    layers_per_stage: list = option(None, "e.g. 1,2,3 (default: even, later stages first)",
                                    parse=integers)
    routing: str = option(
        None, "paths: random at every boundary, always the same, or planned (default: random; with "
        "--skip, skippipe)", choices=["random", "fixed", *PLANNERS])
    skip: float = option(0.0, "share of the stages that a microbatch leaves out, on planned paths")
    unscaled: bool = option(
        False, "with --skip, evaluate as the papers do, without the rho rule (planning/)")
    links: str = option(
        None, "JSON with the ranks' delay and compute in seconds, instead of measuring them",
        planned=True)
    replan: float = option(
        0.0, "plan anew where the plan takes this share longer than a new one (0: never)",
        planned=True)
    microbatches: int = option(2, "microbatches per origin and step", least=1)
    batch: int = option(4, "sequences per microbatch", least=1)
    # the model
    model: str = option("tiny", "tiny, or one of the NoLoCo paper's", choices=list(MODELS))
    hidden: int = option(None, "hidden size")
    layers: int = option(None, "number of layers")
    heads: int = option(None, "attention heads")
    kv_heads: int = option(None, "key-value heads (default: heads)")
    mlp: int = option(None, "intermediate size of the MLP")
    vocab: int = option(None, "vocabulary size")
    seq_len: int = option(None, "tokens per sequence", least=1)
    rope_theta: float = option(10000.0, "base of the rotary positions")
    norm_eps: float = option(1e-5, "epsilon of RMSNorm")
    tied: bool = option(False, "the head is the embedding")
    # the inner optimizer
    optimizer: str = option("adam", "muon: for layers' matrices", choices=["adam", "muon"])
    steps: int = option(None, "inner steps in all", least=1)
    lr: float = option(None, "peak rate; after warm-up a cosine to a tenth of it")
    warmup: int = option(None, "steps of linear warm-up")
    beta2: float = option(0.95, "Adam's, of squared gradients; the papers' released code: 0.999")
    clip: float = option(1.0, "largest norm of a rank's gradient", least=1e-6)
    # data
    data: str = option(None, "text file or folder, or nanoGPT .bin (default: Python's own library)")
    tokenizer: str = option(None, "a Hugging Face tokenizer.json (default: bytes)")
    # the run
    name: str = option(None, "the run is kept in runs/NAME (default: method, stages and time)")
    resume: str = option(None, "run folder to go on with; its options hold unless given again")
    eval_every: int = option(100, "steps between evaluations", least=1)
    eval_sequences: int = option(128, "held-out sequences per evaluation and replica", least=1)
    spread: str = option(
        "sample", "weights that replicas compare at an evaluation: 65536, or all (at the end: all)",
        choices=["sample", "all"])
    save_every: int = option(100, "steps between checkpoints", least=1)
    seed: int = option(0, "of weights, data order, routes and groups")
    # the machine
    dtype: str = option("float32", "of compute alone", choices=["float32", "bfloat16"])
    compile: bool = option(False, "torch.compile each layer (needs a C++ compiler)")
    device: str = option("auto", "where to compute", choices=["auto", "cpu", "cuda"])
    backend: str = option(
        "auto", "nccl needs a GPU for every process", choices=["auto", "gloo", "nccl"])
    survive: float = option(
        0.0, "go on without the dead: seconds to wait for a partner (noloco, local)")
    join: bool = option(
        False, "with --survive: a restarted process takes a living replica's weights")


def parse(argv, world=1):
    """The run's Options. Raises BadInput."""
    return parse_options(Options, argv, world, __doc__.splitlines()[0])


# ---------------------------------------------------------------- the executor

# Receives posted before they are needed: a Gloo send completes only when its receive is there.
AHEAD = 8


def tasks(chains, rank):
    """This rank's tasks (microbatch, hop) in the order in which it runs them.

    Sorted by (microbatch + hop, microbatch, origin), the microbatch counted within its origin.
    Every chain ascends in this key. So the smallest unfinished task of all ranks can always run,
    and nothing deadlocks, whatever the paths; and any two ranks send and receive in the same order.
    """
    seen = Counter()        # microbatches of each origin
    mine = []               # (the key, then the task)
    for u, ranks in enumerate(chains):
        origin = ranks[0]
        m = seen[origin]
        seen[origin] += 1
        mine += [(m + hop, m, origin, u, hop) for hop, r in enumerate(ranks) if r == rank]
    return [(u, hop) for *_, u, hop in sorted(mine)]


def incoming(chains, rank, mine, order=None):
    """(source, microbatch, hop) of this rank's messages, in the order in which it posts receives.

    The sources come in the order of its own tasks. Messages of one source come in the order in
    which it sends them, since NCCL matches so; under a planned order these two can differ.
    """
    receives = []
    for u, hop in mine:
        source = chains[u][hop - 1]                 # at hop 0 without meaning
        if hop and source != rank:
            receives.append((source, u, hop))
    if not order:
        return receives
    sent = []               # by each rank to this one, in its own order
    for work in order:
        sent.append(deque((u, hop + 1) for u, hop in work if next_rank(chains[u], hop) == rank))
    return [(source, *sent[source].popleft()) for source, *_ in receives]


def next_rank(ranks, hop):
    """Where a chain goes on after this hop; None at its end."""
    return ranks[hop + 1] if hop + 1 < len(ranks) else None


def tag(u, hop):
    return 16 + 4096 * u + hop      # a chain has fewer than 4096 hops; survive/ uses tags below 16


class Pipeline:
    """Runs paths: forward along them, loss at home, backward the same way back.

    Gradients are summed into the parameters. message_shape: (B, T, C). bytes_sent: evaluations too.
    Subclasses may override connect, take, task, give, send, receive, wait and run.
    """

    def __init__(self, model, job, stages, message_shape, dtype=torch.float32):
        self.model, self.job = model, job
        self.message_shape, self.dtype = message_shape, dtype
        self.rank, self.device = job.rank, job.device
        self.bytes_sent = 0
        self.lost = 0           # microbatches that never came home (survive/)
        self.seconds = 0.0      # that the last run took
        self.trace = bool(os.environ.get("TRACE"))
        bf16 = dtype == torch.bfloat16
        self.cast = torch.autocast(job.device.type, dtype) if bf16 else contextlib.nullcontext()
        self.message_device = job.device if job.nccl else torch.device("cpu")   # Gloo: host memory
        stage_of = {r: s for s, ranks in enumerate(stages) for r in ranks}
        self.connect([(a, b) for a, b in combinations(stage_of, 2) if stage_of[a] != stage_of[b]])

    def run(self, paths, batches, train=True, order=None):
        """Run the paths; batches[u] is (B, T + 1) tokens for this rank's own microbatches u.

        order[rank] lists each rank's tasks for planned paths (default: `tasks`). Returns (loss in
        nats summed over this origin's tokens, on the device; how many tokens that are; tokens whose
        gradient went through this rank).
        """
        start = time.perf_counter()
        self.paths, self.batches = paths, batches
        self.train = train
        self.chains = [chain(path) for path in paths]
        if not train:                   # evaluation ends with the loss
            self.chains = [ranks[:len(path) + 1] for ranks, path in zip(self.chains, paths)]
        mine = order[self.rank] if order else tasks(self.chains, self.rank)
        self.coming = deque(incoming(self.chains, self.rank, mine, order))  # receives to post
        self.posted = {}                # receives posted ahead
        self.inbox = {}                 # what this rank gives itself
        self.saved = {}                 # inputs and outputs of forwards, for their backwards
        self.sent = {}                  # messages that may still be read
        self.loss = torch.zeros((), device=self.device)
        self.home = 0
        self.tokens = 0
        for u, hop in mine:
            x = self.take(u, hop)
            out = self.task(u, hop, x)
            self.give(u, hop, out)
        for work, _, peer in self.sent.values():
            self.wait(work, peer)
        self.seconds = time.perf_counter() - start
        return self.loss, self.home, self.tokens

    def take(self, u, hop):
        """What the hop before made. None at hop 0; in survive/ also for a lost message."""
        source = self.chains[u][hop - 1]
        if hop == 0 or source == self.rank:
            return self.inbox.pop((u, hop), None)           # at hop 0 there is nothing
        while self.coming and (len(self.posted) < AHEAD or (u, hop) not in self.posted):
            peer, *place = self.coming.popleft()
            self.posted[tuple(place)] = self.receive(peer, *place)
        work, x, peer = self.posted.pop((u, hop))
        return x.to(self.device) if self.wait(work, peer) else None

    def task(self, u, hop, x):
        """One task of microbatch u. x and the result: (B, T, C) activations, or gradients of them.

        A path's first task takes None, its last returns None.
        """
        what = kind(self.paths[u], hop)
        count = self.message_shape[0] * self.message_shape[1]
        if what == BACKWARD:
            forward = 2 * len(self.paths[u]) - hop              # the hop that this one undoes
            inputs, y = self.saved.pop((u, forward))
            y.backward(x)
            self.tokens += count
            if (u, forward + 1) in self.sent:       # it has arrived, since its gradient is back
                work, _, peer = self.sent.pop((u, forward + 1))
                self.wait(work, peer)
            return inputs.grad if forward else None
        with torch.set_grad_enabled(self.train), self.cast:
            if hop == 0:
                x = self.model.embed(self.batches[u][:, :-1])
            else:
                x.requires_grad_(self.train)
            if what == LOSS:
                loss = self.model.loss(x.float(), self.batches[u][:, 1:])
            else:
                y = self.model.blocks(x.float()).to(self.dtype)     # inside, the residuals are fp32
        if what == FORWARD:
            if self.train:
                self.saved[u, hop] = x, y
            return y.detach()
        self.loss = self.loss + loss.detach()
        self.home += count
        if self.train:
            loss.backward()
        return x.grad

    def give(self, u, hop, out):
        """To the next hop of the chain, if there is one."""
        to = next_rank(self.chains[u], hop)
        if to == self.rank:
            self.inbox[u, hop + 1] = out
        elif to is not None:
            self.sent[u, hop + 1] = self.send(out, to, u, hop + 1)

    # The messages. Gloo tells those of a pair apart by their tag.

    def connect(self, pairs):
        """pairs: the ranks between which a path may lead."""
        self.lane = lanes(self, pairs)

    def send(self, tensor, to, u, hop):
        """(work, tensor, peer)"""
        tensor = tensor.to(self.message_device).contiguous()
        self.count(tensor, to, u, hop)
        work = dist.isend(tensor, to, group=self.lane(self.rank, to), tag=tag(u, hop))
        return work, tensor, to

    def count(self, tensor, to, u, hop):
        self.bytes_sent += tensor.nbytes
        if self.trace:
            line = f"rank {self.rank} -> {to}: microbatch {u}, hop {hop}, {tensor.nbytes} bytes"
            print(line, file=sys.stderr, flush=True)

    def receive(self, source, u, hop):
        """(work, the tensor that it fills, peer)"""
        buffer = torch.empty(self.message_shape, dtype=self.dtype, device=self.message_device)
        work = dist.irecv(buffer, source, group=self.lane(source, self.rank), tag=tag(u, hop))
        return work, buffer, source

    def wait(self, work, peer):
        """Whether the message arrived: always, unless somebody's pipeline survives its peers."""
        work.wait()
        return True


# ---------------------------------------------------------------- paths


class Routes:
    """The paths of a step's microbatches, and the order of each rank's tasks (None: `tasks`).

    plan: what the checkpoint of a resumed run holds, as `plan_paths` returns it.
    """
    pace = 1.0          # seconds of ours per second of the plan (tools/emulate.py)

    def __init__(self, job, o, pipeline, stages, plan=None):
        self.job, self.o = job, o
        self.pipeline, self.stages = pipeline, stages
        self.network, self.plan = None, plan
        if o.routing not in PLANNERS:
            return
        if plan:
            self.network = Network(**plan["network"])
            return
        start = time.perf_counter()
        self.network = job.together(self.links)
        seconds = time.perf_counter() - start
        job.say([f"links known after {seconds:.1f} s, planning {o.routing} paths"])
        self.plan = job.agree_on("plan", self.new_plan)
        job.say(idle(self.plan, job.world))

    def links(self):
        """What --links says, or the measured network (on rank 0)."""
        if self.o.links:
            return read_links(self.o.links, self.stages)
        found = measure(self.pipeline, self.stages, self.job)
        return Network(*found, self.stages) if self.job.rank == 0 else None

    def new_plan(self, dead=()):
        """The plan that is best without the dead ranks, as `plan_paths` returns it."""
        o = self.o
        return plan_paths(self.network, o.routing, o.skip, o.microbatches, o.seed, dead, self.plan)

    def at(self, step):
        """(paths, order) of a step."""
        if self.plan:
            return self.plan["paths"], self.plan["order"]
        if self.o.routing == "random":
            return random_paths(self.stages, self.o.microbatches, step, self.o.seed), None
        return full_paths(self.stages, self.o.microbatches), None

    def in_force(self):
        """The plan of the coming step, as `plan_paths` returns it (None: no plan)."""
        return self.plan

    def living(self):
        """The ranks of each stage: all, unless survive/ goes round the dead."""
        return self.stages

    def renew(self, step):
        """Nothing, unless --replan plans anew here."""


# ---------------------------------------------------------------- one step


def schedule(step, o):
    """Warm-up, then a cosine to a tenth of the peak rate."""
    if step < o.warmup:
        return o.lr * (step + 1) / o.warmup
    done = (step - o.warmup) / max(1, o.steps - o.warmup)
    return o.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done))))


def inner_step(run, batches, paths, order):
    """Forward, backward, clip, the optimizer's step: (loss, tokens at home, norm of the gradient).

    The norm is None if no gradient reached this rank. A norm that is not finite means no step: one
    Inf would soon reach every replica.
    """
    grad = run.grad
    grad.zero_()
    loss, home, tokens = run.pipeline.run(paths, batches, order=order)
    if run.average:                                             # ddp
        start = time.perf_counter()
        tokens = run.average(grad, tokens)                      # sums both over the replicas
        run.meter.add_sync(time.perf_counter() - start)
    if not tokens:
        return loss, home, None
    norm = torch.linalg.vector_norm(grad) / tokens
    if torch.isfinite(norm):
        grad.mul_((run.o.clip / norm).clamp(max=1.0) / tokens)    # the mean over what came through
        run.inner.step(run.lr)
    return loss, home, float(norm)


# ---------------------------------------------------------------- a run


def flat_gradient(model, theta):
    """A vector like theta, of which the parameters' gradients are views."""
    grad = torch.zeros_like(theta)
    for p in model.parameters():
        start = (p.data_ptr() - theta.data_ptr()) // 4
        p.grad = grad[start:start + p.numel()].view(p.shape)
    return grad


def make_outer(run):
    """The outer optimizer of this rank's stage (None: ddp, local)."""
    o = run.o
    replicas = run.stages[run.stage]
    if o.method in ("ddp", "local"):
        return None
    settings = dict(inner_steps=o.inner_steps, alpha=o.alpha, beta=o.beta)
    if o.method == "noloco":
        settings.update(gamma=o.gamma, group_size=o.group_size, seed=o.seed)
    wire = o.wire if len(replicas) > 1 else "fp32"
    return outer_optimizer(o.method, wire, o.delay, run.model.parameters(), replicas,
                           theta=run.theta, fragments=o.fragments, **settings)


@dataclass
class Run:
    """One rank's share of a run: `build` makes the parts, `train` uses them."""
    job: Job                # this process among those of the run
    o: Options
    stages: list            # the ranks of each stage
    stage: int              # this rank's own
    config: Config          # of the whole model
    corpus: object          # the data (None on a rank that is no origin)
    reader: object          # of this origin's part of the data (None likewise)
    model: Llama            # the layers of this rank's stage
    theta: torch.Tensor     # all its parameters, in one vector
    grad: torch.Tensor      # their gradients, in another
    inner: Inner            # the inner optimizer
    folder: Path            # runs/NAME
    outer: object = None            # the outer optimizer; None for ddp and local
    average: object = None          # of gradients over the stage's replicas, for ddp
    pipeline: object = None
    routes: object = None
    checkpoints: object = None
    meter: Meter = field(default_factory=Meter)
    log: object = None
    step: int = 0                   # inner steps done
    cursor: object = None           # the reader's, after those steps
    lr: float = 0.0                 # of the last step
    rho: list = None                # of each stage, by the last step's paths (planning/rho.py)
    places: object = None           # the sample of theta that evaluations compare (None: all)
    stale: list = field(default_factory=list)       # steps of checkpoints that this run makes again


def build(job, o, Pipeline=Pipeline, Routes=Routes, make_outer=make_outer):
    """This rank's share of the run. survive/, tools/ and experiments/ bring parts of their own."""
    stages, layers = job.together(layout, o, job.world)
    stage = next(s for s, ranks in enumerate(stages) if job.rank in ranks)
    replicas = stages[stage]
    config = job.together(whole_config, o)
    refuse_too_large(job, o, config, stages, layers)
    if o.links and not o.resume:
        job.together(read_links, o.links, stages)                       # refused before any work
    corpus, reader = job.together(load_data, o, job.rank, stages[0])
    model = Llama(config, layers[stage], ends=stage == 0, seed=o.seed, device=job.device)
    theta = flatten(model.parameters())
    theta.grad = grad = flat_gradient(model, theta)
    inner = muon(model, o.beta2) if o.optimizer == "muon" else Inner(adam([theta], o.beta2))
    run = Run(job=job, o=o, stages=stages, stage=stage, config=config, corpus=corpus, reader=reader,
              model=model, theta=theta, grad=grad, inner=inner, folder=take_folder(o, job))
    if o.compile:
        for layer in model.model.layers.values():
            layer.compile()
    run.outer = make_outer(run)
    if o.method == "ddp" and len(replicas) > 1:
        run.average = Average(SUMS[o.wire], replicas)
    message_shape = o.batch, o.seq_len, o.hidden
    run.pipeline = Pipeline(model, job, stages, message_shape, getattr(torch, o.dtype))
    run.places = sampled_places(len(theta), o.seed) if o.spread == "sample" else None
    run.checkpoints = Checkpoints(job, run.folder)
    plan = go_on(run) if (o.resume or restarts()) and not job.joining else None
    job.say(banner(run))
    warn_of_slow_bfloat16(o.dtype, job.device)
    run.routes = Routes(job, o, run.pipeline, stages, plan)
    return run


def train(run):
    """Make all steps that are left. Errors, lost processes and Ctrl-C end it early."""
    o, job = run.o, run.job
    outer = run.outer
    run.log = begin(run)            # ends the process here if there is nothing left to do
    run.cursor = run.reader and run.reader.cursor

    def save():
        run.checkpoints.save(run.step, state_of(run))

    with job.rescue(run, save):     # an error ends this rank in one line; survive/ then saves
        while run.step < o.steps:
            job.signals.stop_if_due(save)
            before = run.step

            # Forward and backward along this step's paths, and the inner optimizer's step.
            paths, order = run.routes.at(run.step)
            mine = [u for u, path in enumerate(paths) if path[0] == job.rank]
            batches = {u: run.reader.next(o.batch).to(job.device) for u in mine}
            run.lr = schedule(run.step, o)
            loss, home, norm = inner_step(run, batches, paths, order)
            run.meter.add(loss, home, norm, run.pipeline.seconds)
            # From here on a checkpoint may be written, in survive/ also on an error.
            run.step += 1
            run.cursor = run.reader and run.reader.cursor
            run.rho = [1.0] * len(run.stages) if o.unscaled else shares(paths, run.stages)

            # The outer step, every m-th time (N1 to N3).
            if outer:
                start = time.perf_counter()
                if outer.step():
                    run.meter.add_sync(time.perf_counter() - start)
                run.step = min(outer.steps, o.steps)    # survive/: a late replica leaps over steps
                outer.steps = run.step

            run.log.progress(loss, home)
            between_steps(run, before, save)
        if outer:
            outer.settle()
    run.log.finish()
    with contextlib.suppress(RuntimeError):                 # all is saved: the store may go
        job.close()
        run.checkpoints.seal()


def between_steps(run, before, save):
    """Evaluate, plan anew, save and report, as far as due since step `before`.

    None of this counts towards `seconds`. The checkpoint is written before ranks wait to compare
    weights and report; the evaluation's pipelines, and --replan, have waited before it.
    """
    o = run.o
    ends = run.step == o.steps
    evaluates = ends or run.step // o.eval_every > before // o.eval_every
    saves = ends or run.step // o.save_every > before // o.save_every
    if not (evaluates or saves):
        return
    run.meter.pause()
    if evaluates:
        row = run.log.take_row(heldout(run))
        # Before the checkpoint, which has the counts and the plan.
        count_comparison(run, ends)
        if not ends:
            run.routes.renew(run.step)
    if saves:
        save()
    if evaluates:
        moment = f"{run.step // o.eval_every}/{ends}"
        row |= compare(run, moment, ends, heldout)
        run.log.report(row, moment)
    run.meter.go_on()


class TimedPipeline(TimedBackwards, Pipeline):
    """For --replan."""


class ReplanningRoutes(Replanning, Routes):
    """For --replan."""


def main(argv=None):
    """argv: the command line (None: sys.argv)."""
    argv = sys.argv[1:] if argv is None else argv
    job = Job(argv)
    joins = asks_to_join(argv)
    if joins and job.rank == 0:     # without a word to other ranks: it would stay in their store
        complain("--join is for a process that comes back to a running job, never for rank 0")
        sys.exit(2)
    o = Options(**job.agree(parse, argv))
    if o.survive or joins:
        from survive import parts
        return parts.run(job, o, argv)
    job.connect(o)
    classes = (TimedPipeline, ReplanningRoutes) if o.replan else ()
    train(build(job, o, *classes))


if __name__ == "__main__":
    sys.modules["train"] = sys.modules["__main__"]      # survive/ imports it: not a second copy
    main()
