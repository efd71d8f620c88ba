"""Train a Llama with NoLoCo, DiLoCo, data parallelism or no synchronisation, over pipelines of any shape.

    python train.py                                                         one process
    torchrun --nproc-per-node 8 train.py --stages 4,4                       4 replicas of 2 stages, NoLoCo, random routing
    torchrun --nproc-per-node 8 train.py --method ddp                       8 replicas of 1 stage, all-reduce at every step
    torchrun --nproc-per-node 7 train.py --stages 3,2,2 --layers 6 --layers-per-stage 1,2,3
    torchrun --nproc-per-node 8 train.py --resume runs/NAME                 goes on from the newest checkpoint, bit for bit
    torchrun --nproc-per-node 8 --max-restarts 3 train.py                   ... and by itself when a process dies

One step: every origin cuts its batch into microbatches, each of which takes its path through the stages and comes home for its loss
(skippipe.py says what a path is); backward retraces it. Each rank then divides its gradient by the tokens that came home through it,
clips it, takes an Adam step on its own flat vector, and meets the other replicas of its stage as the method says (noloco.py).

With noloco and local over Gloo training outlives its processes (--sync-timeout). A node that dies or falls silent takes the microbatches on it
along: whoever should pass one on passes on a message that says so. The first rank to begin an iteration writes down who is dead in it,
and all draw or plan their paths round these. Set TRACE=1 to see who sends what to whom.
"""
import argparse
import contextlib
import json
import math
import os
import random
import sys
import threading
import time
from dataclasses import asdict, dataclass, field, fields
from datetime import timedelta
from itertools import accumulate, combinations
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")        # or each broken connection is a page of C++ stack
import torch
import torch.distributed as dist
from torch.optim.adam import adam as adam_update
from tqdm import tqdm

import skippipe
from model import Config, Llama, count_parameters
from noloco import DiLoCo, NoLoCo, flatten, gamma_bound, gloo_group, meet
from plumbing.data import load_corpus, load_data
from plumbing.fast import speed_up
from plumbing.huggingface import load_weights, read_config, save_pretrained, save_tokenizer
from plumbing.processes import BadInput
from skippipe import WORK, Network, chain, full_paths, kind, random_paths, simulate

# The paper's table (arXiv 2506.10911); tiny is for two laptop cores. Rates are those of the inner optimizer.
MODELS = {
    "tiny": dict(hidden=128, layers=4, heads=4, mlp=512, vocab=256, seq_len=128, lr=3e-3, steps=300, warmup=30),
    "small": dict(hidden=768, layers=12, heads=16, mlp=3072, vocab=128000, seq_len=1024, lr=6e-4, steps=25000, warmup=1000),
    "medium": dict(hidden=2048, layers=24, heads=32, mlp=8192, vocab=128000, seq_len=1024, lr=2e-4, steps=25000, warmup=1000),
    "large": dict(hidden=4096, layers=32, heads=32, mlp=16384, vocab=128000, seq_len=1024, lr=1.2e-4, steps=25000, warmup=1000),
}
METHODS = {
    "noloco": dict(inner_steps=50, alpha=0.5, beta=0.7, gamma=None, group_size=2),      # gamma: as beta
    "diloco": dict(inner_steps=100, alpha=0.3, beta=0.7),
    "ddp": {},
    "local": {},
}
# The papers' values are for 25 000 steps; in a short run of a tiny model the best we found are these (README, Headline results).
TINY = {"noloco": dict(inner_steps=10, alpha=0.0, beta=1.0), "diloco": dict(inner_steps=20, alpha=0.0, beta=1.0)}


def planned(network, kept, each, rounds, seed, dead, **kwargs):
    return skippipe.plan(network, kept, each, rounds, seconds=None, iterations=3000, seed=seed, dead=dead, **kwargs)


# The planned routings, in the paper's words SkipPipe, ours with every path in order, SkipPipe without TC2, DT-FM skip (random valid paths) and DT-FM
# (every stage). A budget of work, not of time, so that a plan depends on the network and the seed alone. The last two run in the order that
# first come, first served gives.
PLANNERS = {
    "skippipe": planned,
    "no-swaps": lambda *args: planned(*args, swaps=0),
    "no-tc2": lambda *args: planned(*args, collisions=False),
    "dtfm-skip": lambda network, kept, each, rounds, seed, dead: served(
        network, kept, each, rounds, dead, skippipe.random_valid_paths(network, kept, each, seed=seed, dead=dead)),
    "dtfm": lambda network, _, each, rounds, seed, dead: served(
        network, len(living(network.stages, dead)), each, rounds, dead, full_paths(living(network.stages, dead), each)),
}


def served(network, kept, each, rounds, dead, paths):
    return paths, skippipe.Search(network, kept, each, rounds, dead=dead).dispatch(paths).order()


def living(stages, dead):
    """The ranks of each stage that are not dead, without the stages of which none is left."""
    return [alive for stage in stages if (alive := [r for r in stage if r not in dead])]


def numbers(kind):
    """An argument type: numbers with commas between them."""
    def parse(text):
        try:
            return [kind(x) for x in text.split(",")]
        except ValueError:
            raise argparse.ArgumentTypeError(f"takes numbers with commas between them, e.g. 3,2,2, not {text}")
    return parse


def option(default, help, **kwargs):
    return field(default=default, metadata=dict(help=help, **kwargs))


@dataclass
class Options:
    """Every option, its default and its help. None: from the model's or the method's row in the tables above."""
    method: str = option("noloco", "how replicas synchronise", choices=list(METHODS))
    stages: list = option(None, "replicas of each pipeline stage, e.g. 3,2,2 (default: one stage of all processes)", type=numbers(int))
    layers_per_stage: list = option(None, "e.g. 1,2,3 (default: as even as possible, later stages first)", type=numbers(int))
    routing: str = option(None, f"paths: a fresh permutation at every stage boundary, always the same, or planned: {', '.join(PLANNERS)} "
                          "(default: random; with --skip, skippipe)", choices=["random", "fixed", *PLANNERS])
    microbatches: int = option(2, "microbatches per origin and step")
    batch: int = option(4, "sequences per microbatch")
    inner_steps: int = option(None, "optimizer steps per outer step (m)")
    alpha: float = option(None, "outer momentum (Eq. 2)")
    beta: float = option(None, "outer learning rate (Eq. 2)")
    gamma: float = option(None, "pull between slow weights (Eq. 2; default: beta, as in the released code)")
    group_size: int = option(None, "replicas that average with each other in an outer step (n)")
    warm_start: int = option(0, "first steps in which the replicas' gradients are averaged, as in ddp, before the method begins")
    model: str = option("tiny", "a row of the paper's table, or tiny", choices=list(MODELS))
    hidden: int = option(None, "hidden size")
    layers: int = option(None, "number of layers")
    heads: int = option(None, "attention heads")
    kv_heads: int = option(None, "key-value heads (default: heads)")
    mlp: int = option(None, "intermediate size of the MLP")
    vocab: int = option(None, "vocabulary size")
    seq_len: int = option(None, "tokens per sequence")
    steps: int = option(None, "inner steps in all")
    lr: float = option(None, "Adam's peak rate; after warm-up a cosine to a tenth of it")
    warmup: int = option(None, "steps of linear warm-up")
    clip: float = option(1.0, "largest norm of a rank's gradient")
    rope_theta: float = option(10000.0, "base of the rotary positions")
    norm_eps: float = option(1e-5, "epsilon of RMSNorm")
    tied: bool = option(False, "the head is the embedding")
    init_from: str = option(None, "start from a folder in Hugging Face's form: its Llama gives every dimension and the weights")
    dtype: str = option("float32", "compute dtype; weights, optimizer and outer step stay fp32", choices=["float32", "bfloat16"])
    compile: bool = option(False, "torch.compile each layer")
    data: str = option(None, "text file or folder, C4 .json.gz shards or nanoGPT .bin tokens (default: Python's standard library)")
    tokenizer: str = option(None, "a Hugging Face tokenizer.json (default: bytes)")
    eval_every: int = option(100, "steps between evaluations")
    eval_sequences: int = option(128, "held-out sequences per evaluation and replica")
    save_every: int = option(100, "steps between checkpoints")
    skip: float = option(0.0, "share of the stages that each microbatch leaves out, on planned paths (SkipPipe)")
    links: str = option(None, "JSON with delay and compute, in seconds, of these ranks (README), instead of measuring them at the start")
    emulate: bool = option(False, "in training no message arrives and no task ends earlier than the links say (one machine, CPU)")
    time_scale: float = option(1.0, "with --emulate: seconds of ours per second of the links")
    eval_stages: list = option(None, "with --resume: no training; held-out loss with these shares of the stages running, e.g. 1,0.75,0.5",
                               type=numbers(float))
    dead: list = option((), "with --eval-stages: ranks that no path visits, e.g. 3,5 (their processes still run)", type=numbers(int))
    sync_timeout: float = option(60.0, "seconds that an outer step may wait for partners; a pipeline node silent for a third of it is declared dead "
                                 "(0: no failure is survived; so it is with ddp, diloco and nccl)")
    join: bool = option(False, "on a restarted process of a running job without pipeline: take the weights from a living replica and go on")
    export: str = option(None, "with --resume, in one process: no training; write the model to this folder, for transformers")
    export_replica: str = option("mean", "which replica's pipeline to export: 0, 1, ..., or the mean of all")
    name: str = option(None, "the run is kept in runs/NAME (default: method, stages and time)")
    resume: str = option(None, "run folder to go on with; its options hold unless given again")
    seed: int = option(0, "of weights, data order, routes and groups")
    device: str = option("auto", "where to compute", choices=["auto", "cpu", "cuda"])
    backend: str = option("auto", "nccl needs a GPU for every process; gloo does without", choices=["auto", "gloo", "nccl"])


# What shapes the weights and the ranks: a checkpoint fits only the same.
SHAPE = ("vocab", "hidden", "mlp", "layers", "heads", "kv_heads", "rope_theta", "norm_eps", "tied")         # in the order of Config's fields
LAYOUT = ("stages", "layers_per_stage", "method", "warm_start", "model", *SHAPE, "init_from", "seq_len", "seed", "data", "tokenizer", "routing", "skip",
          "microbatches", "batch")


class Gone(Exception):
    """What training cannot go on without is gone: each survivor writes a checkpoint and the message, one line."""


class Parser(argparse.ArgumentParser):
    """argparse, but a mistake is one line."""

    def error(self, message):
        raise BadInput(f"{message} (see --help)")


def parse(argv, world=1):
    parser = Parser(description=__doc__.splitlines()[0], allow_abbrev=False)
    for f in fields(Options):
        how = dict(action="store_true") if f.type is bool else dict(type=f.metadata.get("type", f.type), choices=f.metadata.get("choices"))
        default = "" if f.default in (None, False, ()) else f" (default: {f.default})"
        parser.add_argument("--" + f.name.replace("_", "-"), help=f.metadata["help"] + default, default=argparse.SUPPRESS, **how)
    given, old = vars(parser.parse_args(argv)), {}
    if given.get("resume"):
        try:
            old = asdict(Options(**json.loads((Path(given["resume"]) / "config.json").read_text())))
            old.update(eval_stages=None, dead=(), export=None, export_replica="mean")       # these are of one call
        except (OSError, ValueError, TypeError) as error:
            raise BadInput(f"--resume {given['resume']}: no readable config.json there ({error})")
        for key in LAYOUT:
            if key in given and given[key] != old[key]:
                raise BadInput(f"--{key.replace('_', '-')} {given[key]} differs from the {old[key]} of {given['resume']}: "
                               "a run goes on only with the weights, ranks and data order it began with; leave the option out or start a new run")
    o = Options(**{**old, **given})
    for name in METHODS["noloco"]:
        if name in given and name not in METHODS[o.method]:
            raise BadInput(f"--method {o.method} has no --{name.replace('_', '-')}")
    if o.init_from and not o.resume:
        try:
            found = read_config(o.init_from)
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise BadInput(f"--init-from {o.init_from}: {error}")
        for name, value in zip(SHAPE, vars(found).values()):
            if given.get(name, value) != value:
                raise BadInput(f"--{name.replace('_', '-')} {given[name]} differs from the {value} of {o.init_from}: leave the option out")
            setattr(o, name, value)
    for name, value in {**MODELS[o.model], **METHODS[o.method], **(TINY.get(o.method, {}) if o.model == "tiny" else {})}.items():
        if getattr(o, name) is None:
            setattr(o, name, value)
    o.stages = o.stages or [world]
    o.kv_heads = o.kv_heads or o.heads
    o.routing = o.routing or ("skippipe" if o.skip else "random")
    if o.gamma is None:
        o.gamma = o.beta
    for name, least in dict(microbatches=1, batch=1, seq_len=1, steps=1, eval_every=1, eval_sequences=1, save_every=1, inner_steps=1, group_size=2,
                            lr=0.0, warm_start=0, time_scale=1e-6, clip=1e-6, sync_timeout=0.0).items():
        if getattr(o, name) is not None and not least <= getattr(o, name) < math.inf:
            raise BadInput(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(o, name)}")
    if not 0 <= o.skip < 1 or (o.skip and o.routing not in PLANNERS):
        raise BadInput(f"--skip takes a share from 0 to below 1 and a planned routing, got {o.skip} and {o.routing}")
    if o.join:
        raise BadInput("--join is for a process that comes back to a running job; rank 0 cannot: without node 0 there is no job")
    if not (o.name or o.resume) and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) and os.environ.get("TORCHELASTIC_RUN_ID") == "none":
        raise BadInput("--max-restarts needs --name NAME here: else processes that start again could not find their folder")
    if o.name and Path(o.name).name != o.name:
        raise BadInput(f"--name {o.name}: takes the name of a folder in runs, without a path")
    if o.emulate:       # the processes' clock is one machine's
        if not o.links or world == 1 or int(os.environ.get("LOCAL_WORLD_SIZE", world)) < world:
            raise BadInput("--emulate needs --links FILE and several processes, all on one machine")
        o.device, o.backend = "cpu", "gloo"
    if o.eval_stages and not (o.resume and all(0 < share <= 1 for share in o.eval_stages)) or o.dead and not o.eval_stages:
        raise BadInput("--eval-stages takes shares above 0, at most 1, and needs --resume RUN; --dead goes with it")
    if o.export and (not o.resume or world > 1):
        raise BadInput("--export needs --resume RUN and runs in one process, without torchrun")
    return o


def shape(o):
    """The whole model's Config."""
    try:
        return Config(*(getattr(o, name) for name in SHAPE))
    except ValueError as error:
        raise BadInput(str(error))


def layout(o, world):
    """stages, the ranks of each, and layers, the global layer numbers of each."""
    sizes, depths = o.stages, o.layers_per_stage
    if min(sizes) < 1:
        raise BadInput(f"--stages {','.join(map(str, sizes))}: every stage needs a replica")
    if sum(sizes) != world:
        raise BadInput(f"--stages {','.join(map(str, sizes))} needs {sum(sizes)} processes but got {world}: "
                       f"start torchrun with --nproc-per-node {sum(sizes)}, or give stages that add up to {world}")
    if depths is None:      # later stages first: origins also carry the embedding, the head and the loss
        depths = [(o.layers + s) // len(sizes) for s in range(len(sizes))]
    if len(depths) != len(sizes) or min(depths) < 1 or sum(depths) != o.layers:
        raise BadInput(f"{len(sizes)} stages must share the model's {o.layers} layers, at least one each; got {depths}")
    if o.skip and (len(sizes) < 3 or round((1 - o.skip) * len(sizes)) < 1):
        raise BadInput(f"--skip needs at least 3 stages, of which round((1 - skip) x stages) >= 1 are kept; got {len(sizes)} and {o.skip}")
    if o.routing == "fixed" and sizes[0] * o.microbatches < max(sizes):
        raise BadInput(f"--routing fixed leaves replicas without work for ever: give at least {-(-max(sizes) // sizes[0])} --microbatches")
    cuts = lambda parts: [list(range(end - n, end)) for n, end in zip(parts, accumulate(parts))]
    return cuts(sizes), cuts(depths)


# ---------------------------------------------------------------- processes


class Job:
    """The processes of this run. Before any process group exists they agree through the store that torchrun (or rank 0) hosts."""

    def __init__(self):
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        # torchrun keeps its store when it starts the processes again: what the dead ones wrote there must not be read
        self.store = dist.PrefixStore(f"attempt{restarts()}", next(iter(dist.rendezvous("env://")))[0]) if self.world > 1 else None
        self.rounds, self.device, self.nccl, self.timeout, self.joining, self.told, self.silent = \
            0, torch.device("cpu"), False, 0.0, False, 0, set()

    def share(self, text):
        """Every rank's text, in the order of ranks. (Who joins later finds what the others wrote when they started.)"""
        if self.world == 1:
            return [text]
        self.rounds += 1
        self.store.set(f"{self.rounds}/{self.rank}", "=" + text)        # a store takes no empty values
        return [value.decode()[1:] for value in self.store.multi_get([f"{self.rounds}/{r}" for r in range(self.world)])]

    def together(self, function, *args):
        """function(*args) on every rank; bad input on any ends all of them with status 2 after one line from rank 0."""
        result, problem = None, ""
        try:
            result = function(*args)
        except (BadInput, OSError) as error:
            problem = " ".join(str(error).split())
        if problem and self.joining:        # the others are under way
            sys.exit(print("error: " + problem, file=sys.stderr, flush=True) or 2)
        if problems := [p for p in self.share(problem) if p]:
            if self.rank == 0:
                print("error: " + problems[0], file=sys.stderr, flush=True)
            self.share("")          # torchrun stops everyone when the first one leaves: not before the line is out
            if self.rank:
                self.store.set(f"left/{self.rank}", "=")
            for r in range(1, self.world if self.rank == 0 else 0):
                self.store.get(f"left/{r}")         # rank 0 may host the store, so it leaves last
            sys.exit(2)
        return result

    def connect(self, o, collectives=True):
        """Choose the device and the backend; make the default process group if it is needed: for collectives, or NCCL."""
        local_rank, local_world = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", self.world))
        gpus = torch.cuda.device_count() if torch.cuda.is_available() and o.device != "cpu" else 0

        def refuse():
            if o.device == "cuda" and not gpus:
                raise BadInput("--device cuda: torch sees no GPU on at least one machine")
            if o.backend == "nccl" and local_world > gpus:
                raise BadInput(f"--backend nccl needs a GPU for each of the {local_world} processes of a machine, one has {gpus}; use --backend gloo")
        self.together(refuse)
        if gpus:
            self.device = torch.device("cuda", local_rank % gpus)
            torch.cuda.set_device(self.device)
        self.nccl = self.world > 1 and o.backend != "gloo" and all(self.share("own GPU" if local_world <= gpus else ""))
        if self.world > 1 and (collectives or self.nccl):
            if self.world > 64:     # Gloo connects every pair at start-up; with hundreds of ranks only those that talk to each other should
                os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
            dist.init_process_group("nccl" if self.nccl else "gloo", store=dist.PrefixStore("job", self.store), rank=self.rank, world_size=self.world)
            dist.barrier()          # NCCL: the first use of a group must have everyone in it

    def patience(self):
        """Seconds to wait for another rank at an evaluation: less than partners wait in an outer step, or they would go on without us meanwhile."""
        return self.timeout / 3 or 1e6

    def collect(self, key, values, dead=frozenset()):
        """What every rank tells for the log, through the store: rank 0 gets {rank: values} of those who answer in time, the others None."""
        if self.world == 1:
            return {0: values}
        self.store.set(f"{key}/{self.rank}", json.dumps(values))
        if self.rank:
            return None
        awaited = [r for r in range(self.world) if r not in dead | self.silent and not self.store.check([f"absent/{r}"])]
        with contextlib.suppress(dist.DistStoreError):
            self.store.wait([f"{key}/{r}" for r in awaited], timedelta(seconds=self.patience()))
        here = {r for r in range(self.world) if self.store.check([f"{key}/{r}"])}
        self.silent = set(range(self.world)) - here         # nobody waits for these again until they answer
        return {r: json.loads(self.store.get(f"{key}/{r}")) for r in sorted(here)}

    def tell(self, events):
        """For rank 0's log."""
        for event in events if self.world > 1 else []:
            self.store.set(f"event/{self.store.add('events', 1)}", json.dumps(event))

    def news(self):
        """On rank 0: what has been told since the last time."""
        first, self.told = self.told + 1, self.store.add("events", 0) if self.world > 1 else 0
        return [json.loads(self.store.get(f"event/{n}")) for n in range(first, self.told + 1)
                if self.store.check([f"event/{n}"])]        # (who died as it told never wrote it)

    def close(self, dead=frozenset()):
        if self.world > 1:
            self.collect("done", 0, dead)       # rank 0 may host the store, so it leaves last
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()


# ---------------------------------------------------------------- the executor


DEPTH = 1       # d of the order: larger holds fewer activations, smaller starts microbatches sooner (2 to 3% faster on 2 x 2)
AHEAD = 8       # receives posted before they are needed: a Gloo send completes only when its receive is there


def tasks(chains, rank):
    """This rank's tasks (microbatch, hop) in the order in which it runs them.

    Sorted by (d * microbatch + hop, microbatch, origin), the microbatch counted within its origin. Every chain ascends in this key, so
    the smallest unfinished task of all ranks can always run and nothing deadlocks, whatever the paths; and any two ranks send and
    receive in the same order.
    """
    seen, mine = {}, []
    for u, ranks in enumerate(chains):
        origin = ranks[0]
        m = seen[origin] = seen.get(origin, -1) + 1
        mine += [(DEPTH * m + hop, m, origin, u, hop) for hop, r in enumerate(ranks) if r == rank]
    return [task[3:] for task in sorted(mine)]


def incoming(chains, rank, mine, order=None):
    """(source, microbatch, hop) of this rank's messages in the order in which their receives are posted: that of its own tasks, but from any
    one rank in the order in which that rank sends, since NCCL matches so. (Under a planned order the two can differ.)"""
    receives = [(chains[u][hop - 1], u, hop) for u, hop in mine if hop and chains[u][hop - 1] != rank]
    if order:
        sent = {r: iter([(u, hop + 1) for u, hop in order[r] if chains[u][hop + 1:hop + 2] == (rank,)]) for r in range(len(order))}
        receives = [(r, *next(sent[r])) for r, *_ in receives]
    return receives


class Pipeline:
    """Runs paths: forward along them, loss at home, backward the same way back, gradients summed into the parameters.

    With a timeout a dead or silent peer is no error: what it should have sent is lost, and so is what could only have come from that. Each pair of
    ranks has a Gloo group of its own, because a wait that is broken off closes all connections of its group.
    """

    def __init__(self, model, job, stages, shape, dtype):
        self.model, self.job, self.rank, self.device, self.shape, self.dtype = model, job, job.rank, job.device, shape, dtype
        self.bytes_sent, self.lost, self.trace = 0, 0, bool(os.environ.get("TRACE"))
        self.cast = torch.autocast(job.device.type, torch.bfloat16) if dtype == torch.bfloat16 else contextlib.nullcontext()
        self.emulated, self.scale = None, 1.0       # with --emulate: the Network, and seconds of ours per second of its
        self.staged = job.device.type == "cuda" and not job.nccl            # Gloo sends host memory only
        self.pairs, self.step, self.dead, self.agreed = {}, 0, set(), set()     # the dead: known here; agreed on for this iteration
        self.waiting, self.since, self.grace, self.stopped = None, math.inf, math.inf, threading.Event()       # the first iteration may compile
        stage_of = {r: s for s, ranks in enumerate(stages) for r in ranks}
        pairs = [(a, b) for a, b in combinations(sorted(stage_of), 2) if self.rank in (a, b) and stage_of[a] != stage_of[b]]
        if job.nccl:
            # NCCL ignores tags and runs what two ranks exchange within a group in the order posted. So each direction of a pair has a
            # group of its own, and all pairs connect here, in one order: later each would wait for the other's first message.
            self.up, self.down, one = dist.new_group(), dist.new_group(), torch.zeros(1, device=job.device)
            for a, b in pairs:
                for group, source in ((self.up, a), (self.down, b)):
                    (dist.send if self.rank == source else dist.recv)(one, a + b - self.rank, group=group)
        else:
            for a, b in pairs:      # in one order for all, so nobody waits in a circle
                self.pairs[a + b - self.rank] = gloo_group(job.store, f"pair/{a}/{b}", int(self.rank == b), 2, 1e6)
        self.timeout = job.timeout if self.pairs else 0.0
        self.watcher = threading.Thread(target=self.watch, daemon=True)
        if self.timeout:
            self.watcher.start()

    def post(self, peer, tensor, tag, sends):
        """Post a message; None when the peer is dead."""
        if self.job.nccl:
            return (dist.isend if sends else dist.irecv)(tensor, peer, group=self.up if (self.rank < peer) == sends else self.down)
        if peer in self.dead:
            return None
        try:
            return (self.pairs[peer].send if sends else self.pairs[peer].recv)([tensor], int(peer > self.rank), tag)
        except RuntimeError as error:
            return self.bury(peer, error)

    def finish(self, work, peer):
        """Wait for a posted message; False when it is lost with its peer."""
        try:
            self.waiting = peer
            return work is not None and (work.wait() or True)
        except RuntimeError as error:
            return bool(self.bury(peer, error))
        finally:
            self.waiting, self.since = None, time.monotonic() + self.grace

    def bury(self, peer, error):
        """Declare a peer dead, from the first iteration on that nobody has begun."""
        if not self.timeout:
            raise error
        if peer in self.dead:
            return
        if self.job.store.check([f"dropped/{self.rank}"]):
            self.leave()
        self.dead.add(peer)
        self.job.tell([dict(event="lost", step=self.step, rank=self.rank, peer=peer, error=" ".join(str(error).split())[:100])])
        step = self.step + 1
        while not self.dead <= self.agree(step):
            step += 1

    def agree(self, step):
        """Who is dead in iteration `step`: what the first to ask wrote down."""
        mine = " ".join(map(str, sorted(self.dead))) or "-"         # a store takes no empty values
        agreed = {int(r) for r in self.job.store.compare_set(f"dead/{step}", "", mine).decode().split() if r != "-"}
        self.dead |= agreed
        return agreed

    def begin(self, step, idle=False):
        """Start an iteration; returns whether its dead are others than before. Raises Gone when rank 0 is among them. An idle rank, which has
        no task, follows the others: if it ran ahead, iterations would begin before a death in those before them is known."""
        self.step, before = step, self.agreed
        if self.grace < math.inf:
            self.pause(0.0)
        if self.timeout:
            if idle:
                with contextlib.suppress(dist.DistStoreError):
                    self.job.store.wait([f"dead/{step}"], timedelta(seconds=self.timeout))
            self.agreed = self.agree(step)
        if self.rank in self.agreed:
            self.leave()
        if 0 in self.agreed:
            raise Gone("rank 0 is gone")
        return self.agreed != before

    def leave(self):
        """This rank was declared dead."""
        line = f"rank {self.rank} had been silent for so long that the others declared it dead"
        if self.rank == 0:
            raise Gone(line)
        print(f"{line}: it leaves at step {self.step}", file=sys.stderr, flush=True)
        sys.exit(0)

    def watch(self):
        """A thread: say every now and then that this rank is alive, which it is while it waits or its task is not overdue; and break off
        waiting for a peer that has not said so for a third of --sync-timeout, by a wait on the pair's group that times out at once. (A third: the
        other replicas then still wait in the outer step for those who were held up.)"""
        store, beat, seen = self.job.store.clone(), 0, {}       # a client of its own: a waiting one serves nobody else
        while not self.stopped.wait(self.timeout / 12):
            now, peer, silent = time.monotonic(), self.waiting, False
            try:
                if peer is not None or now - self.since < self.timeout / 3:
                    beat += 1
                    store.set(f"beat/{self.rank}", str(beat))
                if peer is not None:
                    last = store.get(f"beat/{peer}") if store.check([f"beat/{peer}"]) else b""
                    if seen.get(peer, (None, 0.0))[0] != last:
                        seen[peer] = last, now
                    silent = now - seen[peer][1] > self.timeout / 3
            except RuntimeError:        # the store is lost: so is everything
                silent = peer is not None
            if silent and self.waiting == peer:
                with contextlib.suppress(RuntimeError):         # before its connection closes: it must not take us for dead when it wakes
                    store.set(f"dropped/{peer}", str(self.rank))
                with contextlib.suppress(RuntimeError):
                    self.pairs[peer].recv([torch.empty(1)], int(peer > self.rank), 0).wait(timedelta(milliseconds=1))

    def pause(self, seconds):
        """What comes now may take so much longer than a task."""
        self.since, self.grace = time.monotonic() + seconds, seconds

    def stop(self):
        self.stopped.set()
        if self.timeout:
            self.watcher.join()

    def send(self, tensor, to, u, hop):
        tensor = tensor.contiguous()
        if self.staged:
            tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
        if self.trace:
            print(f"rank {self.rank} -> {to}: microbatch {u}, hop {hop}, {tensor.nbytes} bytes", file=sys.stderr, flush=True)
        self.bytes_sent += tensor.nbytes
        if self.emulated:       # a note goes ahead: when the message is to arrive, on the clock that all processes of a machine share
            note = torch.tensor([time.monotonic() + self.emulated.delay[self.rank][to] * self.scale], dtype=torch.float64)
            self.notes.append((self.post(to, note, tag(u, hop) + NOTE, True), note, to))
        return self.post(to, tensor, tag(u, hop), True), tensor, to

    def receive(self, source, u, hop):
        buffer = torch.empty(self.shape, dtype=self.dtype, device="cpu" if self.staged else self.device, pin_memory=self.staged)
        return self.post(source, buffer, tag(u, hop), False), buffer, source

    def pace(self, start, path, hop):
        """Emulation: the task ends no earlier than the network says; returns the time at which the rank can be used again."""
        work = WORK[kind(path, hop)] * self.emulated.compute[self.rank]
        sleep_until(start + work * self.scale)
        return time.monotonic() + (self.emulated.overhead if hop else self.emulated.origin_overhead) * self.scale

    def run(self, paths, batches, train=True, order=None):
        """Run the paths; batches[u] is (B, T + 1) tokens for this rank's own microbatches u. order[rank] lists each rank's tasks for
        planned paths (default: `tasks`). Returns (loss in nats summed over this origin's tokens, on the device; how many tokens that
        are; tokens whose gradient went through this rank)."""
        model, count = self.model, self.shape[0] * self.shape[1]
        chains = [chain(path)[:None if train else len(path) + 1] for path in paths]     # evaluation ends with the loss
        mine = order[self.rank] if order else tasks(chains, self.rank)
        receives = incoming(chains, self.rank, mine, order)
        inbox, sends, saved, needed, posted = {}, {}, {}, 0, 0
        total, home, tokens, self.notes, usable = torch.zeros((), device=self.device), 0, 0, [], 0.0
        for u, hop in mine:
            self.since = time.monotonic() + self.grace
            length, ranks, x = len(paths[u]), chains[u], None
            if hop and ranks[hop - 1] != self.rank:
                while posted < min(needed + AHEAD, len(receives)) or (u, hop) not in inbox:
                    inbox[receives[posted][1:]] = self.receive(*receives[posted])
                    posted += 1
                needed += 1
                work, x, source = inbox.pop((u, hop))
                arrived = self.finish(work, source)
                if self.emulated:
                    note = torch.empty(1, dtype=torch.float64)
                    arrived = self.finish(self.post(source, note, tag(u, hop) + NOTE, False), source) and arrived
                    sleep_until(note.item() if arrived else 0.0)
                x = x.to(self.device, non_blocking=True) if arrived and not (self.timeout and is_lost(x)) else None
            elif hop:
                x = inbox.pop((u, hop))                     # from this rank's own task before
            if self.emulated:
                sleep_until(usable)
                start = time.monotonic()
            out = None                                      # what is passed on when x is lost
            if hop < length and (x is not None or not hop):
                with torch.set_grad_enabled(train), self.cast:
                    x = x.requires_grad_(train) if hop else model.embed(batches[u][:, :-1])
                    y = model.blocks(x.float()).to(self.dtype)      # the residual stream is fp32 in every stage
                if train:
                    saved[u, hop] = x, y
                out = y.detach()
            elif hop == length and x is not None:
                with torch.set_grad_enabled(train), self.cast:
                    loss = model.loss(x.requires_grad_(train).float(), batches[u][:, 1:])
                if train:
                    loss.backward()
                total, home, out = total + loss.detach(), home + count, x.grad
            elif hop > length:
                forward = 2 * length - hop
                h, y = saved.pop((u, forward), (None, None))
                if x is not None:
                    torch.dot(y.flatten(), x.to(y.dtype).flatten()).backward()      # y.backward(x) imports sympy: half a second per process
                    tokens += count
                    out = h.grad if forward else None
                elif not forward:
                    self.lost += 1
                if (u, forward + 1) in sends:               # its gradient is back, so the activation has long arrived: let it go
                    work, _, to = sends.pop((u, forward + 1))
                    self.finish(work, to)
            if self.emulated:
                usable = self.pace(start, paths[u], hop)
            if hop + 1 < len(ranks):
                if ranks[hop + 1] == self.rank:
                    inbox[u, hop + 1] = out
                else:
                    sends[u, hop + 1] = self.send(lost(self.shape, self.dtype) if out is None else out, ranks[hop + 1], u, hop + 1)
        for work, _, to in [*sends.values(), *self.notes]:
            self.finish(work, to)
        return total, home, tokens


LOST = {torch.float32: (torch.int32, 0x7FC0DEAD), torch.bfloat16: (torch.int16, 0x7FEB)}     # a NaN that no arithmetic makes: a real NaN stays visible


def lost(shape, dtype):
    """The message that says that there is none."""
    message, (integer, bits) = torch.zeros(shape, dtype=dtype), LOST[dtype]
    message.view(-1)[:1].view(integer).fill_(bits)
    return message


def is_lost(message):
    integer, bits = LOST[message.dtype]
    return int(message.view(-1)[:1].view(integer)) == bits


NOTE = 2048     # a path has fewer hops


def tag(u, hop):
    return 16 + 2 * NOTE * u + hop


def sleep_until(moment):
    time.sleep(max(0.0, moment - time.monotonic()))


# ---------------------------------------------------------------- planned paths


def measure(pipeline, stages, job):
    """On rank 0: delay[i][j], seconds of one message between every two ranks of different stages (no path joins others), and compute[i], seconds of
    one microbatch's forward on each rank while all compute; medians of 5 (other ranks: None)."""
    message, kept = torch.zeros(pipeline.shape, dtype=pipeline.dtype, device=job.device), pipeline.bytes_sent
    own = next(stage for stage in stages if job.rank in stage)

    def median(work):
        times = []
        for _ in range(6):                  # the first one connects or compiles, and does not count
            start = time.perf_counter()
            work()
            if job.device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return sorted(times[1:])[2]

    def there_and_back(peer):
        for sends in (job.rank < peer, job.rank > peer):
            work, *_ = pipeline.send(message, peer, 0, 0) if sends else pipeline.receive(peer, 0, 0)
            work.wait()

    def forward():
        with pipeline.cast:
            pipeline.model.blocks(message.float().requires_grad_())

    delays = [0.0] * job.world
    for pair in combinations(range(job.world), 2):          # in one order for all, so nobody waits in a circle
        if job.rank in pair and not set(pair) <= set(own):
            peer = sum(pair) - job.rank
            delays[peer] = median(lambda: there_and_back(peer)) / 2
    compute = median(forward)
    pipeline.bytes_sent = kept
    rows = job.collect("measured", [*delays, compute])
    return rows and [rows[r][:-1] for r in range(job.world)], rows and [rows[r][-1] for r in range(job.world)]


def read_links(o, stages):
    """The network in the file of --links, its nodes in the order of this run's ranks."""
    try:
        links = json.loads(Path(o.links).read_text())
        if not all(isinstance(s, list) for s in links.get("stages", stages)):
            raise BadInput(f"{o.links}: stages must be lists of nodes, e.g. [[0, 1], [2, 3]]")
        if [len(s) for s in links.get("stages", stages)] != [len(s) for s in stages]:
            raise BadInput(f"{o.links} has stages of {[len(s) for s in links['stages']]} nodes, this run of {[len(s) for s in stages]}: give --stages as there")
        nodes = [n for stage in links.get("stages", stages) for n in stage]
        each = lambda value: [value[n] for n in nodes] if isinstance(value, list) else [value] * len(nodes)
        return Network([[links["delay"][a][b] for b in nodes] for a in nodes], each(links["compute"]), stages, each(links.get("memory", 3)),
                       links.get("overhead", 0.0), links.get("origin_overhead"))
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise BadInput(f"--links {o.links}: {type(error).__name__} {error}")


def plan_paths(o, network, dead=()):
    """Rank 0's plan, as JSON: the paths of all rounds, every rank's tasks in order, the iteration's simulated seconds, and for what network."""
    m = o.microbatches      # an origin sends as many at once as nodes hold, the rest in further rounds where that divides
    rounds = next((r for r in range(1, m) if m % r == 0 and m // r <= min(network.memory)), 1)
    kept = min(round((1 - o.skip) * len(network.stages)), len(living(network.stages, dead)))
    while True:
        try:
            paths, order = PLANNERS[o.routing](network, kept, m // rounds, rounds, o.seed, tuple(dead))
            makespan = simulate(network, paths, rounds=rounds, order=order).makespan
            return json.dumps(dict(paths=paths * rounds, order=order, makespan=makespan, network=asdict(network)))
        except (ValueError, skippipe.Deadlock) as error:
            if not dead or kept == 1:
                raise BadInput(f"--routing {o.routing}: {error}")
            kept -= 1       # the living have less room


# ---------------------------------------------------------------- evaluation, checkpoints


def weight_spread(theta, replicas, job, key):
    """(sum over the replicas of |theta - mean|^2, how many weights that are) on the first of them, (0, 0) on the others: each sends its theta there.

    Differences to the first replica are summed, so that nothing cancels: sum |d - mean d|^2 = sum |d|^2 - |sum d|^2 / N.
    """
    if job.rank not in replicas:
        return 0.0, 0
    square, squares = lambda d: float(torch.linalg.vector_norm(d, dtype=torch.float64)) ** 2, 0.0
    try:
        members, link = meet(job.store, key, job.rank, replicas, job.patience()) if len(replicas) > 1 else (replicas, None)
        if job.rank not in members:
            return 0.0, 0
        for piece in theta.split(1 << 22) if link else []:
            if job.rank != members[0]:
                link.send([piece.cpu()], 0, 0).wait(timedelta(seconds=job.patience()))
                continue
            total, other = torch.zeros_like(piece), torch.empty_like(piece, device="cpu")
            for place in range(1, len(members)):
                link.recv([other], place, 0).wait(timedelta(seconds=job.patience()))
                d = other.to(piece.device) - piece
                total += d
                squares += square(d)
            squares -= square(total) / len(members)
        return squares, len(members) * theta.numel() if job.rank == members[0] else 0
    except RuntimeError:        # who was lost on the way spoils it for this time
        return 0.0, 0


def evaluate(pipeline, stages, corpus, o):
    """Held-out loss in nats per token of this origin's pipeline on its fixed route through these stages (None: other ranks, and if all was lost)."""
    rounds = -(-o.eval_sequences // o.batch)
    paths = full_paths(stages, 1) * rounds
    batches = {}
    if corpus:
        last = len(corpus.heldout) - o.seq_len - 1
        starts = [round(i * last / max(1, rounds * o.batch - 1)) for i in range(rounds * o.batch)]     # the same on all replicas
        rows = torch.stack([corpus.heldout[a:a + o.seq_len + 1] for a in starts]).long().to(pipeline.device)
        batches = {u: rows[u // len(stages[0]) * o.batch:][:o.batch] for u, path in enumerate(paths) if path[0] == pipeline.rank}
    total, home, _ = pipeline.run(paths, batches, train=False)
    return float(total) / home if home else None


def some_choices(stages, count, draw):
    """All choices of `count` of these stages, or 16 drawn ones where there are more."""
    if math.comb(len(stages), count) <= 16:
        return list(combinations(stages, count))
    return list(dict.fromkeys(tuple(sorted(draw.sample(stages, count))) for _ in range(64)))[:16]


def partial_inference(pipeline, stages, corpus, o, job, folder):
    """Held-out loss with only some of the stages running and without the dead ranks: stage 0 always, all or 16 sampled choices of the others."""
    alive = [[r for r in stage if r not in o.dead] for stage in stages]
    rows = []
    for kept in dict.fromkeys(max(1, round(share * len(stages))) for share in o.eval_stages):
        running = [s for s in range(1, len(stages)) if alive[s]]        # a stage without a living replica is skipped by all
        others, draw = min(kept - 1, len(running)), random.Random(o.seed)
        share = (others + 1) / len(stages)
        choices = some_choices(running, others, draw)
        for choice in choices:
            losses = job.collect(f"partial/{choice}", evaluate(pipeline, [alive[0], *(alive[s] for s in choice)], corpus, o))
            if job.rank == 0:
                mean = sum(losses[r] for r in alive[0]) / len(alive[0])
                rows.append(dict(share=share, stages=[0, *choice], dead=sorted(o.dead), heldout_loss=mean, perplexity=perplexity(mean)))
        if job.rank == 0:
            last = [row["perplexity"] for row in rows[-len(choices):]]
            print(f"{others + 1} of {len(stages)} stages ({share:.0%}), choices {len(choices)}: perplexity {sum(last) / len(last):.3f} "
                  f"(best {min(last):.3f}, worst {max(last):.3f})" + (f", without ranks {sorted(o.dead)}" if o.dead else ""), flush=True)
    if job.rank == 0:
        replace(folder / "partial.json", json.dumps(rows, indent=1))


def save(folder, step, rank, state):
    """Write this rank's part of a checkpoint; it appears whole or not at all."""
    place = folder / "checkpoints" / f"{step:08d}"
    place.mkdir(parents=True, exist_ok=True)
    with open(place / f"rank{rank}.tmp", "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(place / f"rank{rank}.tmp", place / f"rank{rank}.pt")


def seal(folder, job, dead):
    """Tell that this rank has written a checkpoint, and drop those that nobody needs. Rank 0 finds out, without waiting for anyone, which is the newest
    that all have, and the newest that all living have; in newer ones than the former it marks who will not write them. Both, and all newer, stay."""
    held = saved_steps(folder, job.rank)
    if job.world == 1:
        return forget(folder, job, held[:-2])
    job.store.set(f"saved/{held[-1]}/{job.rank}", "=")
    if job.rank == 0:
        gone, sealed = {r for r in range(job.world) if r in dead or job.store.check([f"absent/{r}"])}, None
        for step in reversed([step for step in held if job.store.check([f"saved/{step}/0"])]):      # (others are from before this job)
            missing = {r for r in range(job.world) if not job.store.check([f"saved/{step}/{r}"])}
            for r in missing & gone:
                (folder / "checkpoints" / f"{step:08d}" / f"rank{r}.dead").touch()
            sealed = step if sealed is None and missing <= gone else sealed
            if not missing:
                job.store.set("whole", str(step))
                break
        if sealed is not None:
            job.store.set("sealed", str(sealed))
    whole, sealed = (int(job.store.get(key)) if job.store.check([key]) else 0 for key in ("whole", "sealed"))
    forget(folder, job, {step for step in held[:-2] if step < sealed} - {whole})


def saved_steps(folder, rank):
    return sorted(int(p.parent.name) for p in (folder / "checkpoints").glob(f"*/rank{rank}.pt") if p.parent.name.isdigit())


def forget(folder, job, steps):
    """Remove this rank's part of these checkpoints."""
    for step in steps:
        place = folder / "checkpoints" / f"{step:08d}"
        for file in [place / f"rank{job.rank}.pt", place / f"rank{job.rank}.tmp", *(place.glob("rank*.dead") if job.rank == 0 else [])]:
            file.unlink(missing_ok=True)
        if job.world > 1:
            job.store.delete_key(f"saved/{step}/{job.rank}")
        with contextlib.suppress(OSError):      # the last rank to leave takes the folder
            place.rmdir()


def parts(folder, rank, replicas):
    """{step: file name} of a rank's parts of checkpoints. Where it was dead when the others wrote (rankR.dead says so), any replica's will do."""
    held = {step: f"rank{rank}.pt" for step in saved_steps(folder, rank)}
    for mark in (folder / "checkpoints").glob(f"*/rank{rank}.dead"):
        others = [file.name for r in replicas if (file := mark.with_name(f"rank{r}.pt")).exists()]
        held = {**{int(mark.parent.name): name for name in others[:1]}, **held}
    return held


def load(folder, job, corpus, replicas):
    """This rank's part of the newest checkpoint that every rank holds (none yet: None). Newer parts, which only some hold, go: training passes
    there again."""
    held = parts(folder, job.rank, replicas)
    common = set.intersection(*(set(json.loads(text)) for text in job.share(json.dumps(list(held)))))
    if not common:
        return None, list(held)
    file = folder / "checkpoints" / f"{max(common):08d}" / held[max(common)]
    try:
        state = torch.load(file, weights_only=True, mmap=True, map_location="cpu")
    except Exception as error:
        raise BadInput(f"{file} is damaged ({str(error)[:100]}); delete {file.parent} to go on from the checkpoint before it")
    if corpus and state["corpus"] != corpus.digest:
        raise BadInput(f"the data differ from those of {folder} (corpus {corpus.digest}, then {state['corpus']}): give the same --data or start a new run")
    return state, [step for step in held if step > max(common)]


def export(o, job):
    """Write one replica's pipeline, or the mean over the replicas of each stage, as a folder that transformers loads; prints the held-out loss of each."""
    stages, layers = layout(o, sum(o.stages))
    folder, out, routes = Path(o.resume), Path(o.export), full_paths(stages, 1)
    names = [*map(str, range(len(routes))), "mean"]
    if o.export_replica not in names:
        raise BadInput(f"--export-replica takes {', '.join(names)}, not {o.export_replica}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise BadInput(f"--export {out}: exists and is not an empty folder")
    held = {r: parts(folder, r, ranks) for ranks in stages for r in ranks}
    steps = set.intersection(*map(set, held.values()))
    if not steps:
        raise BadInput(f"{folder} has no checkpoint with the parts of all {sum(o.stages)} ranks: bring those that are on other machines here")
    place, corpus, model = folder / "checkpoints" / f"{max(steps):08d}", load_corpus(o), Llama(shape(o), device=job.device)
    try:
        theta = {r: torch.load(place / held[r][max(steps)], weights_only=True, mmap=True, map_location="cpu")["theta"] for r in held}
    except Exception as error:
        raise BadInput(f"{place} is damaged ({str(error)[:100]}); delete it to export the checkpoint before it")
    owner = lambda name: next((s for s, held in enumerate(layers) for i in held if f".layers.{i}." in name), 0)
    flat = [flatten(p for name, p in model.named_parameters() if owner(name) == s)[0] for s in range(len(stages))]      # laid out as the stage's theta
    pipeline = Pipeline(model, job, [[0]], (o.batch, o.seq_len, o.hidden), getattr(torch, o.dtype))
    print(f"{folder}, step {max(steps)}; held-out loss in nats per token, corpus {corpus.digest}")
    for name in sorted(names, key=o.export_replica.__eq__):         # that one comes last and stays in the model
        for s, ranks in enumerate(stages):
            chosen = ranks if name == "mean" else [routes[int(name)][s]]
            flat[s].copy_(sum(theta[r] for r in chosen) / len(chosen))
        print(f"{'mean of all' if name == 'mean' else 'replica ' + name:<12}{evaluate(pipeline, [[0]], corpus, o):.6f}")
    try:
        save_pretrained(model, out, o.seq_len, corpus.end)
    except ImportError:
        raise BadInput("--export needs the safetensors package: pip install '.[hf]'")
    save_tokenizer(out, o.tokenizer, corpus.end)
    print(f"{name}, written to {out}")


def replace(file, text):
    """Write a small file; it changes as a whole or not at all."""
    file.with_suffix(".tmp").write_text(text)
    os.replace(file.with_suffix(".tmp"), file)


# ---------------------------------------------------------------- the run


def schedule(step, o):
    """Warm-up, then a cosine to a tenth of the peak rate."""
    if step < o.warmup:
        return o.lr * (step + 1) / o.warmup
    done = (step - o.warmup) / max(1, o.steps - o.warmup)
    return o.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done))))


def adam_state(theta):
    return dict(m=torch.zeros_like(theta), v=torch.zeros_like(theta), steps=torch.zeros((), device=theta.device))


def inner_step(theta, grad, adam, lr):
    """Adam in place on theta and its moments m and v, in one pass. (The class torch.optim.Adam imports all of torch.compile: a second per process.)"""
    adam_update([theta], [grad], [adam["m"]], [adam["v"]], [], [adam["steps"]], fused=True, amsgrad=False, beta1=0.9, beta2=0.95,
                lr=lr, weight_decay=0.0, eps=1e-8, maximize=False)


def prepare(o, job):
    """Everything that can be refused before work starts: layout, model, data, links, folder."""
    stages, layers = layout(o, job.world)
    stage = next(s for s, ranks in enumerate(stages) if job.rank in ranks)
    config = shape(o)
    network = read_links(o, stages) if o.links and not o.eval_stages and (o.emulate or job.rank == 0 and not o.resume) else None
    if not set(o.dead) < set(range(job.world)) or set(stages[0]) <= set(o.dead):
        raise BadInput(f"--dead {','.join(map(str, o.dead))}: takes ranks of this run, and must leave one of the origins {stages[0]}")
    corpus, reader = load_data(o, stages[0].index(job.rank), len(stages[0])) if stage == 0 else (None, None)
    model = speed_up(Llama(config, layers[stage], ends=stage == 0, seed=o.seed, device=job.device))
    if o.init_from and not o.resume:
        try:
            load_weights(model, o.init_from)
        except ImportError:
            raise BadInput("--init-from needs the safetensors package: pip install '.[hf]'")
        except ValueError as error:
            raise BadInput(f"--init-from {o.init_from}: {error}")
    folder = Path(o.resume) if o.resume else Path("runs") / o.name
    if job.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        try:            # "x": of two runs that start at once with one name, one gets it
            o.resume or restarts() or open(folder / "config.json", "x").close()
        except FileExistsError:
            raise BadInput(f"{folder} exists: go on with --resume {folder}, or give another --name")
    return stages, model, stage, config, network, corpus, reader, folder


def refuse(line):
    raise BadInput(line)


def restarts():
    """How often torchrun has started these processes again (--max-restarts)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def main(argv=None):
    job = Job()
    job.joining = job.rank > 0 and "--join" in (sys.argv if argv is None else argv)
    if job.rank and {"-h", "--help"} & set(sys.argv[1:] if argv is None else argv):
        return
    o = job.together(lambda: parse(argv, job.world) if job.rank == 0 else None)     # rank 0's options hold for all
    if job.rank == 0 and o.name is None:        # a restarted run must find its folder again
        launch = os.environ.get("TORCHELASTIC_RUN_ID") if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) else time.strftime("%Y%m%d-%H%M%S")
        o.name = f"{o.method}-{'x'.join(map(str, o.stages))}-{launch}"
    o = Options(**json.loads(job.share(json.dumps(asdict(o)) if o else "")[0]))
    job.connect(o, collectives=o.method in ("ddp", "diloco") or not o.sync_timeout)
    if o.export:
        job.together(export, o, job)
        return job.close()
    job.timeout = o.sync_timeout if job.world > 1 and not dist.is_initialized() else 0.0
    if job.joining and (o.method != "noloco" or len(o.stages) > 1 or not job.timeout):
        job.together(refuse, "--join is for --method noloco on one stage over Gloo with a --sync-timeout; others go on from a checkpoint: --resume")
    stages, model, stage, config, network, corpus, reader, folder = job.together(prepare, o, job)
    say = print if job.rank == 0 else lambda *_: None

    # model, optimizer, method: all on one flat vector
    replicas = stages[stage]
    theta, grad = flatten(model.parameters())
    adam = adam_state(theta)
    if o.compile:
        for layer in model.model.layers.values():
            layer.compile()
    outer = group = None
    if o.method == "noloco":
        outer = NoLoCo(model.parameters(), replicas, inner_steps=o.inner_steps, alpha=o.alpha, beta=o.beta, gamma=o.gamma,
                       group_size=o.group_size, seed=o.seed, store=job.store if job.timeout else None, timeout=job.timeout)
        outer.catch_up = len(stages) == 1           # in a pipeline the iterations of all go together
    elif o.method == "diloco":
        outer = DiLoCo(model.parameters(), replicas, inner_steps=o.inner_steps, alpha=o.alpha, beta=o.beta)
    if len(replicas) > 1 and (o.method == "ddp" or o.warm_start and not job.joining):
        group = dist.new_group(replicas, use_local_synchronization=True) if dist.is_initialized() else \
            gloo_group(job.store, f"warm/{stage}", replicas.index(job.rank), len(replicas), 10 * job.timeout)
    pipeline = Pipeline(model, job, stages, (o.batch, o.seq_len, o.hidden), getattr(torch, o.dtype))
    step, plan = 0, None
    totals = dict(seconds=0.0, sync_bytes=0, skipped=0, seen=0, loss=0.0, tokens=0)     # loss and tokens since the last evaluation
    state, stale = None, []
    if (o.resume or restarts()) and not job.joining:
        state, stale = job.together(load, folder, job, corpus, replicas)
        if not state and not restarts():
            job.together(refuse, f"{folder} has no checkpoint that all {job.world} ranks hold")
    if state:
        theta.copy_(state["theta"])
        for name, value in adam.items():
            value.copy_(state["adam"][name])
        torch.set_rng_state(state["rng"].cpu())
        if outer:
            outer.load_state_dict(state["outer"])
        if reader:
            reader.cursor = state["cursor"]
        if job.world > 1:
            job.store.set("whole", str(state["step"]))
        step, plan, totals, pipeline.bytes_sent, pipeline.lost = (state[key] for key in ("step", "plan", "totals", "pipeline_bytes", "lost"))
    if o.eval_stages:
        partial_inference(pipeline, stages, corpus, o, job, folder)
        return job.close()
    state = None                # it is as large as all that it filled
    forget(folder, job, stale)
    if job.joining:
        print(f"rank {job.rank} asks to join: it gets its weights after a living replica's next outer step", flush=True)
        try:
            outer.join()
        except RuntimeError as error:
            job.together(refuse, f"--join: no living replica answered ({str(error)[:100]})")
        step = outer.steps
        print(f"rank {job.rank} joined at step {step}", flush=True)
        if not corpus.streamed:
            reader.cursor = step * o.microbatches * o.batch
        elif held := saved_steps(folder, job.rank):         # (a stream is read again from there, or from its start)
            reader.cursor = torch.load(folder / "checkpoints" / f"{held[-1]:08d}" / f"rank{job.rank}.pt", weights_only=True, mmap=True)["cursor"]

    # what runs, in a few lines
    whole, inner = count_parameters(config)
    pipelines = f"stages {'x'.join(map(str, o.stages))}, {o.routing} routing" if len(o.stages) > 1 else "replicas of the whole model"
    say(f"{o.method}, {pipelines}, {job.world} processes on {job.device.type}"
        + (f" over {'NCCL' if job.nccl else 'Gloo'}" if job.world > 1 else ""))
    say(f"{o.init_from or o.model} model: {whole / 1e6:.2f}M parameters, {inner / 1e6:.2f}M without embedding and head; {o.dtype}")
    if corpus:
        amount = f"{len(corpus.train)} shards to stream" if corpus.streamed else f"{sum(map(len, corpus.train)) / 1e6:.1f}M training"
        say(f"{amount} and {len(corpus.heldout) / 1e6:.2f}M held-out tokens, corpus {corpus.digest}"
            + (f", {corpus.bytes_per_token:.3f} bytes per token" if o.tokenizer else ""))
    groups = [min(len(ranks), o.group_size or 0) for ranks in stages if len(ranks) > 1]
    if o.method == "noloco" and groups and not 0 < o.gamma < gamma_bound(o.alpha, min(groups)):
        say(f"warning: gamma {o.gamma} is outside 0 < gamma < {gamma_bound(o.alpha, min(groups)):.3f} = 2 (1 - alpha^2) / (1 - alpha + 2 alpha / n): "
            "the replicas will drift apart")

    if outer and o.steps < o.inner_steps:
        say(f"warning: {o.steps} steps are fewer than --inner-steps {o.inner_steps}: replicas never synchronise")

    # planned paths, links
    if o.routing in PLANNERS and plan is None:
        if not o.links:
            delay, compute = measure(pipeline, stages, job)
            network = Network(delay, compute, stages) if job.rank == 0 else None
        say(f"planning {o.routing} paths")
        plan = json.loads(job.share(job.together(lambda: plan_paths(o, network) if job.rank == 0 else ""))[0])
        if idle := set(range(job.world)) - {r for path in plan["paths"] for r in path}:
            say(f"warning: ranks {sorted(idle)} get no work in this plan: more --microbatches, or fewer replicas")

    if job.rank == 0:
        replace(folder / "config.json", json.dumps(asdict(o), indent=1))
        kept, history = [], folder / "metrics.jsonl"
        for line in history.read_text().splitlines() if step and history.exists() else []:
            with contextlib.suppress(ValueError):           # a crash cut the line short
                kept += [line] if json.loads(line)["step"] <= step else []
        replace(folder / "metrics.jsonl", "".join(line + "\n" for line in kept))        # what came after the checkpoint comes again
        say(f"{folder}{f', from step {step}' if step else ''}")
    progress = tqdm(total=o.steps, initial=step, disable=job.rank != 0, unit="step", dynamic_ncols=True)
    clock, heldout, iterations, norm, latest, alive, first_plan = time.perf_counter(), None, [], 0.0, {}, stages, plan
    if plan:
        network = network or Network(**plan["network"])

    def keep(cursor):
        save(folder, step, job.rank, dict(
            step=step, theta=theta, adam=adam, rng=torch.get_rng_state(), outer=outer and outer.state_dict(),
            cursor=cursor, corpus=corpus and corpus.digest, plan=first_plan, options=asdict(o),
            totals={**totals, "loss": float(totals["loss"])}, pipeline_bytes=pipeline.bytes_sent, lost=pipeline.lost))

    try:
        while step < o.steps:
            before, cursor = step, reader and reader.cursor
            # who is dead, paths, data, forward and backward
            if pipeline.begin(step, idle=plan and not plan["order"][job.rank]):
                alive, plan = go_round(o, job, pipeline, stages, plan, network, step)
                if outer:
                    outer.ranks = next(s for s in alive if job.rank in s)
            if plan:
                paths = plan["paths"]
            else:
                paths = random_paths(alive, o.microbatches, step, o.seed) if o.routing == "random" else full_paths(alive, o.microbatches)
            batches = {u: reader.next(o.batch).to(job.device) for u, path in enumerate(paths) if path[0] == job.rank}
            grad.zero_()
            if o.emulate:
                job.share("")           # all begin together, so that an iteration's time is its own
                pipeline.emulated, pipeline.scale = network, o.time_scale
            start = time.perf_counter()
            loss, home, tokens = pipeline.run(paths, batches, order=plan and plan["order"])
            pipeline.emulated = None
            iterations.append(time.perf_counter() - start)
            pipeline.pause(job.timeout)

            # the gradient: a mean over the tokens that came home through this rank (ddp: through this stage), clipped
            if group and (o.method == "ddp" or step < o.warm_start):
                count = torch.tensor(float(tokens), device=job.device)
                works = [group.allreduce([t]) for t in (count, grad)]
                for work in works:
                    work.wait()
                tokens = float(count)
                totals["sync_bytes"] += 2 * (len(replicas) - 1) * grad.nbytes // len(replicas)      # of a ring all-reduce
            totals["loss"], totals["tokens"], totals["seen"] = totals["loss"] + loss, totals["tokens"] + home, totals["seen"] + home
            if tokens:
                norm = torch.linalg.vector_norm(grad) / tokens
                if torch.isfinite(norm):
                    grad.mul_((o.clip / norm).clamp(max=1.0) / tokens)
                    inner_step(theta, grad, adam, schedule(step, o))
                else:                   # one Inf would reach every replica in a few outer steps
                    totals["skipped"] += 1
            step, cursor = step + 1, reader and reader.cursor
            if outer and step == o.warm_start:      # the method begins
                outer.steps = step
                outer.phi.copy_(theta)
            elif outer and step > o.warm_start:
                outer.step()
                step = outer.steps              # a late replica may have caught up
                if outer.adopted:
                    adam, outer.adopted = adam_state(theta), False
            if outer and outer.events:
                job.tell([{"step": step, **event} for event in outer.events])
                outer.events.clear()
            if step % 10 == 0 or step == 1:
                progress.set_postfix_str(f"loss {float(loss) / max(1, home):.3f}" + (f", held-out {heldout:.3f}" if heldout else ""), refresh=False)
            progress.update(step - before)

            evaluates, saves = step == o.steps or step // o.eval_every > before // o.eval_every, step == o.steps or step % o.save_every == 0
            if evaluates or saves:
                pipeline.pause(10 * job.timeout)
                totals["seconds"] += time.perf_counter() - clock
                if outer:
                    totals["sync_bytes"], outer.bytes_sent = totals["sync_bytes"] + outer.bytes_sent, 0
            if evaluates:
                row = dict(loss=float(totals["loss"]), tokens=totals["tokens"], heldout=evaluate(pipeline, alive, corpus, o), seen=totals["seen"],
                           skipped=totals["skipped"], lost=pipeline.lost, bad=reader.cursor[2] if reader and corpus.streamed else 0, norm=float(norm),
                           sync=totals["sync_bytes"], pipeline=pipeline.bytes_sent, iteration=sorted(iterations)[len(iterations) // 2])
                totals["loss"], totals["tokens"], iterations = 0.0, 0, []
            if saves:               # before anyone is waited for
                keep(cursor)
                seal(folder, job, pipeline.agreed)
            if evaluates:
                moment = f"{step // o.eval_every}/{step == o.steps}"
                row["spread"], row["weights"] = weight_spread(theta, next(s for s in alive if job.rank in s)[:64], job, f"spread/{stage}/{moment}")
                rows = job.collect(f"row/{moment}", row, pipeline.agreed)
                if job.rank == 0:
                    latest.update(rows)
                    heldout = report(rows, latest, job.news(), folder, progress, o, step, totals["seconds"], corpus, plan)
            if evaluates or saves:
                clock = time.perf_counter()
    except (Gone, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not ("gloo" in str(error) or isinstance(error, dist.DistError)):
            raise
        if isinstance(error, Gone) or job.timeout:
            keep(cursor)
        progress.close()
        pipeline.stop()
        lost = "the store on node 0 is lost" if job.timeout and step >= o.warm_start else \
            f"{'--warm-start' if step < o.warm_start else '--method ' + o.method} needs every process, and one is gone"
        reason = error if isinstance(error, Gone) else lost
        sys.exit(f"stopped: rank {job.rank} at step {step}: {reason}; go on with --resume {folder}")
    progress.close()
    pipeline.stop()
    if job.rank == 0:
        summary(folder)
    with contextlib.suppress(RuntimeError):     # all is saved: the store may go
        job.close(pipeline.agreed)
        seal(folder, job, pipeline.agreed)


def go_round(o, job, pipeline, stages, plan, network, step):
    """The living of each stage and, where paths are planned, rank 0's new plan for them. Raises Gone when there is none."""
    dead = pipeline.agreed
    out = [s for s, ranks in enumerate(stages) if set(ranks) <= dead]
    if 0 in out or out and not o.skip:
        raise Gone(f"every replica of stage {out[0]} is gone" + (" and without --skip no microbatch can leave it out" if out[0] else ""))
    if job.rank == 0:
        job.tell([dict(event="dead", step=step, ranks=sorted(dead), stages_left_out=out)])
    if plan:
        pipeline.pause(10 * job.timeout)
        if job.rank == 0:
            try:
                job.store.set(f"plan/{step}", plan_paths(o, network, dead))
            except BadInput as error:
                job.store.set(f"plan/{step}", json.dumps(dict(error=str(error))))
        plan = json.loads(job.store.get(f"plan/{step}"))
        pipeline.pause(0.0)
        if "error" in plan:
            raise Gone(plan["error"])
    return living(stages, dead), plan


def perplexity(loss):
    return math.exp(loss) if loss < 700 else math.inf


def report(rows, latest, news, folder, progress, o, step, seconds, corpus, plan):
    """Events and one line of metrics.jsonl from every rank's numbers (`latest` also has those that no longer answer); returns the mean held-out loss."""
    origins, total = [row for row in rows.values() if row["tokens"]], lambda key, rows=latest: sum(row[key] for row in rows.values())
    heldout = [row["heldout"] for row in rows.values() if row["heldout"] is not None] or [math.nan]
    mean, tokens, spread = sum(heldout) / len(heldout), total("seen"), total("spread", rows)
    line = dict(
        step=step, tokens=tokens, seconds=seconds, tokens_per_second=tokens / seconds, lr=schedule(step - 1, o),
        train_loss=sum(row["loss"] for row in origins) / max(1, sum(row["tokens"] for row in origins)),
        heldout_loss=mean, heldout_min=min(heldout), heldout_max=max(heldout), perplexity=perplexity(mean),
        heldout_nats_per_byte=corpus.bytes_per_token and mean / corpus.bytes_per_token,
        weight_spread=math.sqrt(max(spread, 0.0) / max(1, total("weights", rows))) if math.isfinite(spread) else math.nan,
        gradient_norm=total("norm", rows) / len(rows), skipped_steps=total("skipped"), lost_microbatches=total("lost"), bad_lines=total("bad"),
        ranks=len(rows), sync_bytes=total("sync"), pipeline_bytes=total("pipeline"),
        iteration_seconds=max(row["iteration"] for row in rows.values()) / (o.time_scale if o.emulate else 1), simulated_seconds=plan and plan["makespan"])
    for event in news:
        progress.write(", ".join(f"{key} {value}" for key, value in event.items() if value not in ("", None)), file=sys.stdout)
    with open(folder / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps(row) + "\n" for row in [*news, line])
    progress.write(f"step {step}: held-out {mean:.4f}, train {line['train_loss']:.4f}, weight spread {line['weight_spread']:.2e}, "
                   f"sent {line['sync_bytes'] / 1e6:.1f} MB to synchronise + {line['pipeline_bytes'] / 1e6:.1f} MB in the pipeline, "
                   f"{line['tokens_per_second']:.0f} tokens/s"
                   + (f", iteration {line['iteration_seconds']:.4g} s, simulated {plan['makespan']:.4g} s" if plan else ""), file=sys.stdout)
    return mean


def summary(folder):
    line = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    per_byte = line["heldout_nats_per_byte"]
    print(f"held-out loss   {line['heldout_loss']:.4f} nats per token" + (f", {per_byte:.4f} nats per byte" if per_byte else "")
          + f" (replicas {line['heldout_min']:.4f} to {line['heldout_max']:.4f}), perplexity {line['perplexity']:.3f} per token\n"
          f"weight spread   {line['weight_spread']:.3e} over the replicas of a stage\n"
          f"bytes sent      {line['sync_bytes'] / 1e6:.1f} MB to synchronise, {line['pipeline_bytes'] / 1e6:.1f} MB in the pipeline, all ranks\n"
          f"speed           {line['tokens_per_second']:.0f} tokens/s, {line['seconds']:.0f} s of training, evaluation not counted"
          + (f"\nskipped         {line['skipped_steps']:.0f} optimizer steps with a gradient that was not finite" if line["skipped_steps"] else "")
          + (f"\nlost            {line['lost_microbatches']:.0f} microbatches with ranks that died" if line["lost_microbatches"] else "")
          + (f"\nbad lines       {line['bad_lines']:.0f} lines of the data were no JSON object with a text, or broke off" if line["bad_lines"] else ""))


if __name__ == "__main__":
    main()
