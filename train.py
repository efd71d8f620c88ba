"""Train a Llama with NoLoCo, DiLoCo, data parallelism or no synchronisation, over pipelines of any shape.

    python train.py                                             one process
    torchrun --nproc-per-node 8 train.py --stages 4,4           4 replicas of 2 stages, random routing
    torchrun --nproc-per-node 8 train.py --method ddp           8 replicas, all-reduce at every step
    torchrun --nproc-per-node 7 train.py --stages 3,2,2 --layers 6 --layers-per-stage 1,2,3
    torchrun --nproc-per-node 8 train.py --resume runs/NAME     goes on from the newest checkpoint

One step: every origin cuts its batch into microbatches, each of which takes its path through the stages and
comes home for its loss (skippipe.py says what a path is); backward retraces it. Each rank then divides its
gradient by the tokens that came home through it, clips it, takes an Adam step on its own flat vector, and
meets the other replicas of its stage as the method says (noloco.py).

Read from the bottom up: main, train, build; then the executor, Pipeline. `--survive SECONDS` puts the parts
of survive/ in the place of ours; tools/ and experiments/ do likewise. TRACE=1 prints who sends what to whom.
"""
import contextlib
import math
import os
import signal
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)         # no traceback; in training plumbing/signals.py
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")    # or each broken connection is a page of C++ stack
import torch
import torch.distributed as dist

from model import Config, Llama
from noloco import flatten
from planning.replan import Replanning, TimedBackwards
from planning.rho import scaled, shares, with_stages_missing
from planning.training import PLANNERS, idle, measure, plan_paths, read_links
from plumbing.checkpoints import Checkpoints, begin, go_on, state_of, take_folder
from plumbing.data import heldout_sequences, load_data
from plumbing.fast import FastLlama
from plumbing.inner import Inner, adam, muon
from plumbing.lanes import lanes
from plumbing.options import METHODS, MODELS, layout, option, parse_options, steps_or_half, whole_config
from plumbing.overlap import overlapping
from plumbing.processes import Job, complain, restarts
from plumbing.report import Meter, banner
from plumbing.wires import AVERAGES, KINDS
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
    gamma: float = option(None, "pull between slow weights (N2; default: beta, as in the released code)")
    group_size: int = option(None, "replicas that average with each other in an outer step (n)", least=2)
    wire: str = option("fp32", "of a weight, Delta or gradient", choices=["fp32", "bf16", "int8"])
    delay: steps_or_half = option(0, "inner steps that messages travel; half: m // 2; 0: the paper's")
    # the pipeline
    stages: list = option(None, "replicas of each, e.g. 3,2,2 (default: one stage of all)")
    layers_per_stage: list = option(None, "e.g. 1,2,3 (default: even, later stages first)")
    routing: str = option(None, "paths: random at every boundary, always the same, or planned (default: "
                                "random; with --skip, skippipe)", choices=["random", "fixed", *PLANNERS])
    skip: float = option(0.0, "share of the stages that a microbatch leaves out, on planned paths (SkipPipe)")
    unscaled: bool = option(False, "with --skip, evaluate as the papers do, without the rho rule (planning/)")
    links: str = option(None, "JSON with the ranks' delay and compute in seconds, instead of measuring them")
    replan: float = option(0.0, "plan anew where the plan takes this share longer than a new one (0: never)")
    microbatches: int = option(2, "microbatches per origin and step", least=1)
    batch: int = option(4, "sequences per microbatch", least=1)
    # the model
    model: str = option("tiny", "tiny, or a paper's, for 0.5M, 1M, 2M tokens a step", choices=list(MODELS))
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
    optimizer: str = option("adam", "muon: for layers' matrices, Adam for the rest", choices=["adam", "muon"])
    steps: int = option(None, "inner steps in all", least=1)
    lr: float = option(None, "peak rate; after warm-up a cosine to a tenth of it")
    warmup: int = option(None, "steps of linear warm-up")
    beta2: float = option(0.95, "Adam's, of squared gradients: as Llama; the papers' released code: 0.999")
    clip: float = option(1.0, "largest norm of a rank's gradient", least=1e-6)
    # data
    data: str = option(None, "text file or folder, or nanoGPT .bin (default: Python's own library)")
    tokenizer: str = option(None, "a Hugging Face tokenizer.json (default: bytes)")
    # the run
    name: str = option(None, "the run is kept in runs/NAME (default: method, stages and time)")
    resume: str = option(None, "run folder to go on with; its options hold unless given again")
    eval_every: int = option(100, "steps between evaluations", least=1)
    eval_sequences: int = option(128, "held-out sequences per evaluation and replica", least=1)
    save_every: int = option(100, "steps between checkpoints", least=1)
    seed: int = option(0, "of weights, data order, routes and groups")
    # the machine
    dtype: str = option("float32", "of compute; all else stays fp32", choices=["float32", "bfloat16"])
    compile: bool = option(False, "torch.compile each layer (needs a C++ compiler)")
    device: str = option("auto", "where to compute", choices=["auto", "cpu", "cuda"])
    backend: str = option("auto", "nccl needs a GPU for every process", choices=["auto", "gloo", "nccl"])
    survive: float = option(0.0, "go on without the dead: seconds to wait for a partner (noloco, local)")
    join: bool = option(False, "with --survive: a restarted process takes a living replica's weights")


def parse(argv, world=1):
    """The run's Options. Raises BadInput."""
    return parse_options(Options, argv, world, __doc__.splitlines()[0])


# ---------------------------------------------------------------- the executor

AHEAD = 8       # receives posted before they are needed: a Gloo send completes only when its receive is there


def tasks(chains, rank):
    """This rank's tasks (microbatch, hop) in the order in which it runs them.

    Sorted by (microbatch + hop, microbatch, origin), the microbatch counted within its origin. Every
    chain ascends in this key, so the smallest unfinished task of all ranks can always run and nothing
    deadlocks, whatever the paths; and any two ranks send and receive in the same order.
    """
    seen, mine = {}, []
    for u, ranks in enumerate(chains):
        origin = ranks[0]
        m = seen[origin] = seen.get(origin, -1) + 1
        mine += [(m + hop, m, origin, u, hop) for hop, r in enumerate(ranks) if r == rank]
    return [task[3:] for task in sorted(mine)]


def incoming(chains, rank, mine, order=None):
    """(source, microbatch, hop) of this rank's messages in the order in which their receives are posted.

    That of its own tasks, but from any one rank in the order in which that rank sends, since NCCL matches
    so. (Under a planned order the two can differ.)
    """
    receives = [(chains[u][hop - 1], u, hop) for u, hop in mine if hop and chains[u][hop - 1] != rank]
    if not order:
        return receives
    sent = {}
    for r, work in enumerate(order):
        sent[r] = iter([(u, hop + 1) for u, hop in work if next_rank(chains[u], hop) == rank])
    return [(r, *next(sent[r])) for r, *_ in receives]


def next_rank(ranks, hop):
    """Where a chain goes on after this hop; None at its end."""
    return ranks[hop + 1] if hop + 1 < len(ranks) else None


def tag(u, hop):
    return 16 + 4096 * u + hop      # a chain has fewer than 4096 hops; survive/ uses the tags below 16


class Pipeline:
    """Runs paths: forward along them, loss at home, backward the same way back, gradients summed into the
    parameters.

    message_shape: (B, T, C). bytes_sent: so far. Subclasses may override take, task, give, send, receive,
    wait and run.
    """

    def __init__(self, model, job, stages, message_shape, dtype=torch.float32):
        self.model, self.job, self.message_shape, self.dtype = model, job, message_shape, dtype
        self.rank, self.device = job.rank, job.device
        self.bytes_sent = 0
        self.lost = 0                                       # microbatches that never came home (survive/)
        self.seconds = 0.0                                  # that the last run took
        self.trace = bool(os.environ.get("TRACE"))
        bf16 = dtype == torch.bfloat16
        self.cast = torch.autocast(job.device.type, dtype) if bf16 else contextlib.nullcontext()
        self.message_device = job.device if job.nccl else torch.device("cpu")   # Gloo sends host memory
        stage_of = {r: s for s, ranks in enumerate(stages) for r in ranks}
        self.connect([(a, b) for a, b in combinations(stage_of, 2) if stage_of[a] != stage_of[b]])

    def run(self, paths, batches, train=True, order=None):
        """Run the paths; batches[u] is (B, T + 1) tokens for this rank's own microbatches u.

        order[rank] lists each rank's tasks for planned paths (default: `tasks`). Returns (loss in nats
        summed over this origin's tokens, on the device; how many tokens that are; tokens whose gradient
        went through this rank).
        """
        start = time.perf_counter()
        self.paths, self.batches, self.train = paths, batches, train
        ends = [None if train else len(path) + 1 for path in paths]         # evaluation ends with the loss
        self.chains = [chain(path)[:end] for path, end in zip(paths, ends)]
        mine = order[self.rank] if order else tasks(self.chains, self.rank)
        self.coming = deque(incoming(self.chains, self.rank, mine, order))
        self.posted, self.inbox, self.saved, self.sent = {}, {}, {}, {}
        self.loss, self.home, self.tokens = torch.zeros((), device=self.device), 0, 0
        for u, hop in mine:
            self.give(u, hop, self.task(u, hop, self.take(u, hop)))
        for work, _, peer in self.sent.values():
            self.wait(work, peer)
        self.seconds = time.perf_counter() - start
        return self.loss, self.home, self.tokens

    def take(self, u, hop):
        """What the hop before made, here or elsewhere. None at hop 0; survive/ also for a lost message."""
        source = self.chains[u][hop - 1] if hop else self.rank
        if source == self.rank:
            return self.inbox.pop((u, hop), None)
        while self.coming and (len(self.posted) < AHEAD or (u, hop) not in self.posted):
            peer, *place = self.coming.popleft()
            self.posted[tuple(place)] = self.receive(peer, *place)
        work, x, peer = self.posted.pop((u, hop))
        return x.to(self.device) if self.wait(work, peer) else None

    def task(self, u, hop, x):
        """One task of microbatch u. x and what it returns: (B, T, C) activations, after the loss gradients.

        A path's first task takes None, its last returns None.
        """
        what = kind(self.paths[u], hop)
        count = self.message_shape[0] * self.message_shape[1]
        if what == BACKWARD:
            forward = 2 * len(self.paths[u]) - hop              # the hop that this one undoes
            inputs, y = self.saved.pop((u, forward))
            y.backward(x)
            self.tokens += count
            if (u, forward + 1) in self.sent:                   # long there, since its gradient is back
                work, _, peer = self.sent.pop((u, forward + 1))
                self.wait(work, peer)
            return inputs.grad if forward else None
        with torch.set_grad_enabled(self.train), self.cast:
            if what == LOSS:
                loss = self.model.loss(x.requires_grad_(self.train).float(), self.batches[u][:, 1:])
            else:
                x = x.requires_grad_(self.train) if hop else self.model.embed(self.batches[u][:, :-1])
                y = self.model.blocks(x.float()).to(self.dtype)     # the residual stream is fp32 everywhere
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
        return dist.isend(tensor, to, group=self.lane(self.rank, to), tag=tag(u, hop)), tensor, to

    def count(self, tensor, to, u, hop):
        self.bytes_sent += tensor.nbytes
        if self.trace:
            line = f"rank {self.rank} -> {to}: microbatch {u}, hop {hop}, {tensor.nbytes} bytes"
            print(line, file=sys.stderr, flush=True)

    def receive(self, source, u, hop):
        buffer = torch.empty(self.message_shape, dtype=self.dtype, device=self.message_device)
        return dist.irecv(buffer, source, group=self.lane(source, self.rank), tag=tag(u, hop)), buffer, source

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
        self.job, self.o, self.pipeline, self.stages = job, o, pipeline, stages
        self.network, self.plan = None, plan
        if o.routing not in PLANNERS:
            return
        if plan:
            self.network = Network(**plan["network"])
            return
        start = time.perf_counter()
        self.network = job.together(self.links)
        job.say([f"links known after {time.perf_counter() - start:.1f} s, planning {o.routing} paths"])
        self.plan = job.agree_on("plan", lambda: self.new_plan())
        job.say(idle(self.plan, job.world))

    def links(self):
        """What --links says, or the measured network (on rank 0)."""
        if self.o.links:
            return read_links(self.o.links, self.stages)
        found = measure(self.pipeline, self.stages, self.job)
        return Network(*found, self.stages) if self.job.rank == 0 else None

    def new_plan(self, dead=()):
        o = self.o
        return plan_paths(self.network, o.routing, o.skip, o.microbatches, o.seed, dead, self.plan)

    def at(self, step):
        """(paths, order) of a step."""
        if self.plan:
            return self.plan["paths"], self.plan["order"]
        if self.o.routing == "random":
            return random_paths(self.stages, self.o.microbatches, step, self.o.seed), None
        return full_paths(self.stages, self.o.microbatches), None

    def makespan(self):
        """Simulated seconds of an iteration (None: no plan)."""
        return self.plan and self.plan["makespan"]

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

    The norm is None if no gradient reached this rank. A norm that is not finite means no step: one Inf
    would soon reach every replica.
    """
    grad = run.grad
    grad.zero_()
    loss, home, tokens = run.pipeline.run(paths, batches, order=order)
    if run.average:
        tokens = run.meter.synchronise(run.average, grad, tokens)
    if not tokens:
        return loss, home, None
    norm = torch.linalg.vector_norm(grad) / tokens
    if torch.isfinite(norm):
        grad.mul_((run.o.clip / norm).clamp(max=1.0) / tokens)          # the mean over what came through
        run.inner.step(run.lr)
    return loss, home, float(norm)


def evaluate(pipeline, stages, corpus, o):
    """Held-out loss, nats per token, of this origin's fixed route through these stages (None: no origin)."""
    rounds = -(-o.eval_sequences // o.batch)
    paths = full_paths(stages, 1) * rounds
    batches = {}
    if corpus:
        rows = heldout_sequences(corpus, rounds * o.batch, o.seq_len).to(pipeline.device)
        mine = [u for u, path in enumerate(paths) if path[0] == pipeline.rank]
        batches = dict(zip(mine, rows.split(o.batch)))
    loss, home, _ = pipeline.run(paths, batches, train=False)
    return float(loss) / home if home else None


# ---------------------------------------------------------------- a run


def make_outer(job, o, params, replicas, inner, kinds=KINDS, **more):
    """None for ddp and local. kinds: a class for each method and wire. more: what these classes also take."""
    if o.method not in kinds:
        return None
    settings = dict(inner_steps=o.inner_steps, alpha=o.alpha, beta=o.beta, **more)
    if o.method == "noloco":
        settings.update(gamma=o.gamma, group_size=o.group_size, seed=o.seed)
    wire = o.wire if len(replicas) > 1 else "fp32"
    return kinds[o.method][wire](params, replicas, **settings)


@dataclass
class Run:
    """One rank's share of a run: `build` makes the parts, `train` uses them."""
    job: Job                # this process among those of the run
    o: Options
    stages: list            # the ranks of each stage
    stage: int              # this rank's own
    config: Config          # of the whole model
    corpus: object          # the data and this rank's reader of its part; None on a rank that is no origin
    reader: object
    model: Llama            # the layers of this rank's stage
    theta: torch.Tensor     # all its parameters, in one vector
    grad: torch.Tensor      # their gradients, in another
    inner: Inner            # the inner optimizer
    folder: Path            # runs/NAME
    outer: object = None            # plumbing/wires.py lists the classes; None for ddp and local
    average: object = None          # of gradients over the stage's replicas, for ddp
    pipeline: object = None
    routes: object = None
    checkpoints: object = None
    meter: Meter = field(default_factory=Meter)
    log: object = None
    step: int = 0                   # inner steps done
    cursor: object = None           # the reader's, after those steps
    lr: float = 0.0                 # of the last step
    rho: list = None                # of each stage, by the paths that trained last (planning/rho.py)
    stale: list = field(default_factory=list)       # steps of checkpoints that this run makes again


def build(job, o, Pipeline=Pipeline, Routes=Routes, make_outer=make_outer):
    """This rank's share of the run. survive/, tools/ and experiments/ bring parts of their own."""
    stages, layers = job.together(layout, o, job.world)
    stage = next(s for s, ranks in enumerate(stages) if job.rank in ranks)
    replicas, ends = stages[stage], stage == 0
    config = job.together(whole_config, o)
    if o.links and not o.resume:
        job.together(read_links, o.links, stages)                       # refused before any work
    corpus, reader = job.together(load_data, o, job.rank, stages[0])
    model = FastLlama(config, layers[stage], ends, o.seed, job.device)
    theta, grad = flatten(model.parameters())
    theta.grad = grad
    inner = muon(model, o.beta2) if o.optimizer == "muon" else Inner(adam([theta], o.beta2))
    run = Run(job, o, stages, stage, config, corpus, reader, model, theta, grad, inner, take_folder(o, job))
    if o.compile:
        for layer in model.model.layers.values():
            layer.compile()
    # theta flies on, or phi goes ahead (plumbing/overlap.py)
    more = overlapping(o) if o.delay or o.gamma != o.beta else {}
    run.outer = make_outer(job, o, model.parameters(), replicas, inner, **more)
    run.average = AVERAGES[o.wire](replicas) if o.method == "ddp" and len(replicas) > 1 else None
    run.pipeline = Pipeline(model, job, stages, (o.batch, o.seq_len, o.hidden), getattr(torch, o.dtype))
    run.checkpoints = Checkpoints(job, run.folder)
    plan = go_on(run) if (o.resume or restarts()) and not job.joining else None
    job.say(banner(run))
    run.routes = Routes(job, o, run.pipeline, stages, plan)
    return run


def train(run):
    o, job, outer = run.o, run.job, run.outer
    log = run.log = begin(run)
    run.cursor = run.reader and run.reader.cursor

    def save():
        run.checkpoints.save(run.step, state_of(run))

    with job.rescue(run, save):
        while run.step < o.steps:
            job.signals.stop_if_due(save)
            before = run.step
            paths, order = run.routes.at(run.step)
            mine = [u for u, path in enumerate(paths) if path[0] == job.rank]
            batches = {u: run.reader.next(o.batch).to(job.device) for u in mine}
            run.rho = [1.0] * len(run.stages) if o.unscaled else shares(paths, run.stages)
            run.lr = schedule(run.step, o)
            loss, home, norm = inner_step(run, batches, paths, order)
            run.meter.add(loss, home, norm, run.pipeline.seconds)
            run.step += 1
            run.cursor = run.reader and run.reader.cursor
            if outer:
                run.meter.synchronise(outer.step)
                run.step = outer.steps = min(outer.steps, o.steps)      # survive: a late one may leap
            log.progress(loss, home)
            between_steps(run, before, save)
        if outer:
            outer.settle()
    log.finish()
    with contextlib.suppress(RuntimeError):                 # all is saved: the store may go
        job.close()
        run.checkpoints.seal()


def between_steps(run, before, save):
    """Evaluate, plan anew, save and report, as far as due since step `before`, while the clock stands."""
    o = run.o
    evaluates = run.step == o.steps or run.step // o.eval_every > before // o.eval_every
    saves = run.step == o.steps or run.step // o.save_every > before // o.save_every
    if not (evaluates or saves):
        return
    run.meter.pause()
    if evaluates:
        stages = run.routes.living()
        rho = with_stages_missing(run.rho, len(stages))     # 1 unless paths skip
        with scaled(run.model, rho[run.stage]):
            row = run.log.own_row(evaluate(run.pipeline, stages, run.corpus, o))
        if run.step < o.steps:
            run.routes.renew(run.step)                      # before the checkpoint, which has the plan
    if saves:                                               # before anyone is waited for
        save()
    if evaluates:
        run.log.report(row, f"{run.step // o.eval_every}/{run.step == o.steps}")
    run.meter.go_on()


class TimedPipeline(TimedBackwards, Pipeline):
    """For --replan."""


class ReplanningRoutes(Replanning, Routes):
    """For --replan."""


def main(argv=None):
    job = Job(argv)
    words = sys.argv if argv is None else argv
    if "--join" in words and job.rank == 0:     # alone: a word to the other ranks would stay in their store
        complain("--join is for a process that comes back to a running job, never for rank 0")
        sys.exit(2)
    o = Options(**job.agree(parse, argv))
    if o.survive or "--join" in words:
        from survive import parts
        return parts.run(job, o, words)
    job.connect(o)
    parts = (TimedPipeline, ReplanningRoutes) if o.replan else ()
    train(build(job, o, *parts))


if __name__ == "__main__":
    import train            # one module, also for those who import it (survive/, tools/)
    train.main()
