"""Train a Llama with NoLoCo, DiLoCo, data parallelism or no synchronisation, over pipelines of any shape.

    python train.py                                                         one process
    torchrun --nproc-per-node 8 train.py --stages 4,4                       4 replicas of 2 stages, NoLoCo, random routing
    torchrun --nproc-per-node 8 train.py --method ddp                       8 replicas of 1 stage, all-reduce at every step
    torchrun --nproc-per-node 7 train.py --stages 3,2,2 --layers 6 --layers-per-stage 1,2,3
    torchrun --nproc-per-node 8 train.py --resume runs/NAME                 goes on from the newest checkpoint, bit for bit

One step: every origin cuts its batch into microbatches, each of which takes its path through the stages and comes home for its loss
(skippipe.py says what a path is); backward retraces it. Each rank then divides its gradient by the tokens that came home through it,
clips it, takes an Adam step on its own flat vector, and meets the other replicas of its stage as the method says (noloco.py).
Set TRACE=1 to see who sends what to whom.
"""
import argparse
import contextlib
import gzip
import hashlib
import json
import math
import os
import random
import re
import sys
import sysconfig
import time
import zlib
from dataclasses import asdict, dataclass, field, fields
from itertools import accumulate, combinations, islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch.optim.adam import adam as adam_update
from tqdm import tqdm

import skippipe
from model import Config, Llama, count_parameters
from noloco import DiLoCo, NoLoCo, flatten, gamma_bound
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
# The planned routings, in the paper's words SkipPipe, SkipPipe without TC2, DT-FM skip (random valid paths) and DT-FM (every stage). A budget of
# work, not of time, so that a plan depends on the network and the seed alone. The last two run in the order that first come, first served gives.
PLANNERS = {
    "skippipe": lambda network, kept, each, rounds, seed: skippipe.plan(network, kept, each, rounds, seconds=None, iterations=3000, seed=seed),
    "no-tc2": lambda network, kept, each, rounds, seed: skippipe.plan(network, kept, each, rounds, seconds=None, iterations=3000, seed=seed,
                                                                      collisions=False),
    "dtfm-skip": lambda network, kept, each, rounds, seed: served(network, kept, each, rounds,
                                                                  skippipe.random_valid_paths(network, kept, each, seed=seed)),
    "dtfm": lambda network, _, each, rounds, seed: served(network, len(network.stages), each, rounds, full_paths(network.stages, each)),
}


def served(network, kept, each, rounds, paths):
    return paths, skippipe.Search(network, kept, each, rounds).dispatch(paths).order()


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
    name: str = option(None, "the run is kept in runs/NAME (default: method, stages and time)")
    resume: str = option(None, "run folder to go on with; its options hold unless given again")
    seed: int = option(0, "of weights, data order, routes and groups")
    device: str = option("auto", "where to compute", choices=["auto", "cpu", "cuda"])
    backend: str = option("auto", "nccl needs a GPU for every process; gloo does without", choices=["auto", "gloo", "nccl"])


# What shapes the weights and the ranks: a checkpoint fits only the same.
LAYOUT = ("stages", "layers_per_stage", "method", "model", "hidden", "layers", "heads", "kv_heads", "mlp", "vocab", "seq_len", "seed", "data", "tokenizer",
          "routing", "skip", "microbatches", "batch")


class BadInput(Exception):
    """Something the user can put right; the message is the one line that rank 0 prints."""


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
            old = {**asdict(Options(**json.loads((Path(given["resume"]) / "config.json").read_text()))), "eval_stages": None, "dead": ()}
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
    for name, value in {**MODELS[o.model], **METHODS[o.method]}.items():
        if getattr(o, name) is None:
            setattr(o, name, value)
    o.stages = o.stages or [world]
    o.kv_heads = o.kv_heads or o.heads
    o.routing = o.routing or ("skippipe" if o.skip else "random")
    if o.gamma is None:
        o.gamma = o.beta
    for name, least in dict(microbatches=1, batch=1, seq_len=1, steps=1, eval_every=1, eval_sequences=1, save_every=1, inner_steps=1, group_size=2,
                            lr=0.0, time_scale=1e-6, clip=1e-6).items():
        if getattr(o, name) is not None and not least <= getattr(o, name) < math.inf:
            raise BadInput(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(o, name)}")
    if not 0 <= o.skip < 1 or (o.skip and o.routing not in PLANNERS):
        raise BadInput(f"--skip takes a share from 0 to below 1 and a planned routing, got {o.skip} and {o.routing}")
    if o.emulate:       # the processes' clock is one machine's
        if not o.links or world == 1 or int(os.environ.get("LOCAL_WORLD_SIZE", world)) < world:
            raise BadInput("--emulate needs --links FILE and several processes, all on one machine")
        o.device, o.backend = "cpu", "gloo"
    if o.eval_stages and not (o.resume and all(0 < share <= 1 for share in o.eval_stages)) or o.dead and not o.eval_stages:
        raise BadInput("--eval-stages takes shares above 0, at most 1, and needs --resume RUN; --dead goes with it")
    return o


def layout(o, world):
    """stages, the ranks of each, and layers, the global layer numbers of each."""
    sizes, depths = o.stages, o.layers_per_stage
    if min(sizes) < 1 or sum(sizes) != world:
        raise BadInput(f"--stages {','.join(map(str, sizes))} needs {sum(sizes)} processes but {world} are running: "
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
        self.store = next(iter(dist.rendezvous("env://")))[0] if self.world > 1 else None
        self.rounds, self.device, self.nccl = 0, torch.device("cpu"), False

    def share(self, text):
        """Every rank's text, in the order of ranks."""
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

    def connect(self, o):
        """Choose the device and the backend and make the process group."""
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
        if self.world > 1:
            if self.world > 64:     # Gloo connects every pair at start-up; with hundreds of ranks only those that talk to each other should
                os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
            dist.init_process_group("nccl" if self.nccl else "gloo", store=dist.PrefixStore("job", self.store), rank=self.rank, world_size=self.world)
            dist.barrier()          # NCCL: the first use of a group must have everyone in it

    def collect(self, values):
        """Numbers for the log, point to point: rank 0 gets every rank's list of floats in the order of ranks, the others None."""
        mine = torch.tensor(values, dtype=torch.float64, device=self.device if self.nccl else "cpu")
        if self.rank:
            dist.send(mine, 0)
            if self.nccl:
                torch.cuda.synchronize()        # Gloo's send returns when rank 0 has taken the message; so must this
            return None
        rows = [mine] + [torch.empty_like(mine) for _ in range(self.world - 1)]
        for r in range(1, self.world):
            dist.recv(rows[r], r)
        return [row.tolist() for row in rows]

    def close(self):
        if self.world > 1:
            dist.barrier()
            dist.destroy_process_group()


# ---------------------------------------------------------------- data


@dataclass
class Corpus:
    train: torch.Tensor         # tokens, 1-D of any integer type
    heldout: torch.Tensor
    digest: str                 # losses compare only between runs with the same
    bytes_per_token: float      # of the held-out part; None when only tokens are known


def standard_library():
    """The .py files of the running Python's own library: real text, on every machine, nothing to download."""
    root = Path(sysconfig.get_paths()["stdlib"])
    leave_out = {"site-packages", "dist-packages", "test", "tests", "idlelib", "encodings"}     # not its own, or near-duplicates
    return root, sorted(p for p in root.rglob("*.py") if not leave_out & set(p.relative_to(root).parts))


def documents(path):
    """The documents of one file, as bytes: a text file is one, a C4 shard has one per line."""
    if not path.name.endswith(".json.gz"):
        yield path.read_bytes()
        return
    with gzip.open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield json.loads(line)["text"].encode()
            except (ValueError, KeyError, TypeError, AttributeError):
                raise BadInput(f"{path}, line {number}: no JSON object with a text")


def load_tokenizer(o):
    """The tokenizer of --tokenizer and the tokens that end a document."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise BadInput("--tokenizer needs the tokenizers package: pip install '.[hf]'")
    try:
        tokenizer = Tokenizer.from_file(o.tokenizer)
    except Exception as error:          # the package raises nothing narrower
        raise BadInput(f"--tokenizer {o.tokenizer}: {error}")
    if tokenizer.get_vocab_size() > o.vocab:
        raise BadInput(f"{o.tokenizer} has {tokenizer.get_vocab_size()} tokens, the model {o.vocab}: give --vocab {tokenizer.get_vocab_size()}")
    ends = [tokenizer.token_to_id(t) for t in ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")]
    return tokenizer, [t for t in ends if t is not None][:1]


def load_corpus(o):
    """Read the data once: tokens for training and held-out tokens, from disjoint files (one file: disjoint ranges)."""
    if o.data:
        root = Path(o.data)
        hidden = lambda p: any(part.startswith(".") for part in p.relative_to(root).parts)
        files = sorted(p for p in root.rglob("*") if p.is_file() and not hidden(p)) if root.is_dir() else [root]
        if not files or not all(p.is_file() for p in files):
            raise BadInput(f"--data {o.data}: no such file, or a folder without files")
    else:
        root, files = standard_library()
        if sum(p.stat().st_size for p in files) < 5e6:
            raise BadInput(f"the standard library in {root} has under 5 MB of .py text: give --data a text file or folder")
    kinds = {"bin" if p.suffix == ".bin" else "c4" if p.name.endswith(".json.gz") else "text" for p in files}
    if len(kinds) > 1:
        raise BadInput(f"--data {o.data} mixes {' and '.join(sorted(kinds))} files: keep one kind in a folder")
    tokenizer, end = load_tokenizer(o) if o.tokenizer else (None, None)
    if kinds != {"bin"} and not tokenizer and o.vocab < 256:
        raise BadInput(f"bytes need a vocabulary of 256, the model has {o.vocab}")
    digest = hashlib.sha256()

    def tokens(paths):
        """The tokens of these files, each document closed by the tokenizer's end token (bytes: by a zero byte), and their size in bytes."""
        if kinds == {"bin"}:            # nanoGPT's: uint16 and nothing else; one file is mapped, several are joined in memory
            digest.update(str([(p.name, p.stat().st_size) for p in paths]).encode())
            parts = [torch.from_file(str(p), size=p.stat().st_size // 2, dtype=torch.uint16) for p in paths if p.stat().st_size > 1]
            return parts[0] if len(parts) == 1 else torch.cat(parts or [torch.empty(0, dtype=torch.uint16)]), None
        buffer, parts, size = bytearray(), [], 0
        docs = (d for p in paths for d in documents(p))
        while some := list(islice(docs, 1000)):
            size += sum(len(d) + 1 for d in some)
            for d in some:
                digest.update(d + b"\0")
            if tokenizer:
                encoded = tokenizer.encode_batch([d.decode(errors="replace") for d in some], add_special_tokens=False)
                parts.append(torch.tensor([i for e in encoded for i in e.ids + end], dtype=torch.int32))
            else:
                buffer += b"\0".join(some) + b"\0"
        return torch.cat(parts) if parts else torch.frombuffer(buffer or bytearray(1), dtype=torch.uint8), size

    try:
        if len(files) == 1:
            whole, size = tokens(files)
            cut = max(0, len(whole) - max(o.seq_len + 1, len(whole) // 20))
            train, heldout, size = whole[:cut], whole[cut:], size and size * (len(whole) - cut) / len(whole)
        else:                           # named so: nanoGPT's val.bin, C4's c4-validation.*
            named = [p for p in files if re.search(r"(^|[^a-z])val(id|idation)?([^a-z]|$)", p.name.lower())] if o.data else []
            by_hash = sorted(files, key=lambda p: hashlib.sha256(p.relative_to(root).as_posix().encode()).hexdigest())
            held = set(named if 0 < len(named) < len(files) else by_hash[:max(1, len(files) // 20)])
            (train, _), (heldout, size) = tokens([p for p in files if p not in held]), tokens([p for p in files if p in held])
    except (OSError, EOFError, zlib.error, RuntimeError) as error:
        raise BadInput(f"--data {o.data}: {error}")
    for part, name in ((train, "training"), (heldout, "held-out")):
        if len(part) < o.seq_len + 1:
            raise BadInput(f"the {name} data has {len(part)} tokens, fewer than one sequence of {o.seq_len} + 1: more data or a smaller --seq-len")
    top = max(int(piece.to(torch.int32).max()) for part in (train, heldout) for piece in part.split(1 << 24))
    if top >= o.vocab:
        raise BadInput(f"the data has token {top}, the model a vocabulary of {o.vocab}: give --vocab {top + 1} or more")
    return Corpus(train, heldout, digest.hexdigest()[:12], size and size / len(heldout))


class Reader:
    """Sequences of one origin's part of the tokens, in a fresh random order each epoch. `cursor`, the sequences read, is all its state."""

    def __init__(self, tokens, seq_len, seed):
        self.tokens, self.seq_len, self.seed = tokens, seq_len, seed
        self.count, self.cursor, self.epoch = (len(tokens) - 1) // seq_len, 0, None
        if self.count < 1:
            raise BadInput(f"an origin's part of the data has {len(tokens)} tokens, fewer than one sequence of {seq_len} + 1: "
                           "more data, fewer origins or a smaller --seq-len")

    @classmethod
    def of(cls, o, corpus, origin, origins):
        """Origin number `origin` of `origins` reads its own part."""
        part = len(corpus.train) // origins
        return cls(corpus.train[origin * part:(origin + 1) * part], o.seq_len, f"data {o.seed} {origin}")

    def next(self, batch):
        """(batch, T + 1) tokens: inputs and, one further, targets."""
        rows = []
        for _ in range(batch):
            epoch, place = divmod(self.cursor, self.count)
            if epoch != self.epoch:
                generator = torch.Generator().manual_seed(random.Random(f"{self.seed} {epoch}").getrandbits(63))
                self.epoch, self.order = epoch, torch.randperm(self.count, generator=generator)
            start = int(self.order[place]) * self.seq_len
            rows.append(self.tokens[start:start + self.seq_len + 1])
            self.cursor += 1
        return torch.stack(rows).long()


# ---------------------------------------------------------------- the executor


DEPTH = 2       # d of the order: smaller starts microbatches sooner, larger holds fewer activations
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
    """Runs paths: forward along them, loss at home, backward the same way back, gradients summed into the parameters."""

    def __init__(self, model, job, stages, shape, dtype):
        self.model, self.rank, self.device, self.shape, self.dtype = model, job.rank, job.device, shape, dtype
        self.bytes_sent, self.trace = 0, bool(os.environ.get("TRACE"))
        self.cast = torch.autocast(job.device.type, torch.bfloat16) if dtype == torch.bfloat16 else contextlib.nullcontext()
        self.emulated, self.scale = None, 1.0       # with --emulate: the Network, and seconds of ours per second of its
        self.staged = job.device.type == "cuda" and not job.nccl            # Gloo sends host memory only
        self.up = self.down = None
        if job.nccl:
            # NCCL ignores tags and runs what two ranks exchange within a group in the order posted. So each direction of a pair has a
            # group of its own, and all pairs connect here, in one order: later each would wait for the other's first message.
            self.up, self.down = dist.new_group(), dist.new_group()
            one, stage_of = torch.zeros(1, device=job.device), {r: s for s, ranks in enumerate(stages) for r in ranks}
            for a, b in combinations(range(job.world), 2):
                for group, source, to in ((self.up, a, b), (self.down, b, a)):
                    if self.rank in (a, b) and stage_of[a] != stage_of[b]:
                        (dist.send if self.rank == source else dist.recv)(one, b if self.rank == a else a, group=group)

    def send(self, tensor, to, u, hop):
        tensor = tensor.contiguous()
        if self.staged:
            tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
        if self.trace:
            print(f"rank {self.rank} -> {to}: microbatch {u}, hop {hop}, {tensor.nbytes} bytes", file=sys.stderr, flush=True)
        self.bytes_sent += tensor.nbytes
        if self.emulated:       # a note goes ahead: when the message is to arrive, on the clock that all processes of a machine share
            note = torch.tensor([time.monotonic() + self.emulated.delay[self.rank][to] * self.scale], dtype=torch.float64)
            self.notes.append((dist.isend(note, to, tag=tag(u, hop) + NOTE), note))
        return dist.isend(tensor, to, group=self.up if self.rank < to else self.down, tag=tag(u, hop)), tensor

    def receive(self, source, u, hop):
        buffer = torch.empty(self.shape, dtype=self.dtype, device="cpu" if self.staged else self.device, pin_memory=self.staged)
        return dist.irecv(buffer, source, group=self.up if source < self.rank else self.down, tag=tag(u, hop)), buffer

    def pace(self, start, path, hop):
        """Emulation: the task ends no earlier than the network says; returns the time at which the rank can be used again."""
        work = WORK[kind(path, hop)] * self.emulated.compute[self.rank]
        sleep_until(start + work * self.scale)
        return time.monotonic() + (self.emulated.overhead if hop else self.emulated.origin_overhead) * self.scale

    def run(self, paths, batches, train=True, order=None):
        """Run the paths; batches[u] is (B, T + 1) tokens for this rank's own microbatches u. order[rank] lists each rank's tasks for
        planned paths (default: `tasks`). Returns (loss in nats summed over this origin's tokens, on the device; tokens that went
        through this rank)."""
        model, count = self.model, self.shape[0] * self.shape[1]
        chains = [chain(path)[:None if train else len(path) + 1] for path in paths]     # evaluation ends with the loss
        mine = order[self.rank] if order else tasks(chains, self.rank)
        receives = incoming(chains, self.rank, mine, order)
        inbox, sends, saved, needed, posted = {}, {}, {}, 0, 0
        total, tokens, self.notes, usable = torch.zeros((), device=self.device), 0, [], 0.0
        for u, hop in mine:
            length, ranks = len(paths[u]), chains[u]
            if hop and ranks[hop - 1] != self.rank:
                while posted < min(needed + AHEAD, len(receives)) or (u, hop) not in inbox:
                    inbox[receives[posted][1:]] = self.receive(*receives[posted])
                    posted += 1
                needed += 1
                work, x = inbox.pop((u, hop))
                work.wait()
                if self.emulated:
                    note = torch.empty(1, dtype=torch.float64)
                    dist.recv(note, ranks[hop - 1], tag=tag(u, hop) + NOTE)
                    sleep_until(note.item())
                x = x.to(self.device, non_blocking=True)
            elif hop:
                x = inbox.pop((u, hop))                     # from this rank's own task before
            if self.emulated:
                sleep_until(usable)
                start = time.monotonic()
            if hop < length:
                with torch.set_grad_enabled(train), self.cast:
                    x = x.requires_grad_(train) if hop else model.embed(batches[u][:, :-1])
                    y = model.blocks(x.float()).to(self.dtype)      # the residual stream is fp32 in every stage
                if train:
                    saved[u, hop] = x, y
                out = y.detach()
                tokens += count
            elif hop == length:
                with torch.set_grad_enabled(train), self.cast:
                    loss = model.loss(x.requires_grad_(train).float(), batches[u][:, 1:])
                if train:
                    loss.backward()
                total += loss.detach()
                out = x.grad
            else:
                forward = 2 * length - hop
                h, y = saved.pop((u, forward))
                y.backward(x)
                if (u, forward + 1) in sends:               # its gradient is back, so the activation has long arrived: let it go
                    sends.pop((u, forward + 1))[0].wait()
                out = h.grad if hop < 2 * length else None
            if self.emulated:
                usable = self.pace(start, paths[u], hop)
            if hop + 1 < len(ranks):
                if ranks[hop + 1] == self.rank:
                    inbox[u, hop + 1] = out
                else:
                    sends[u, hop + 1] = self.send(out, ranks[hop + 1], u, hop + 1)
        for work, _ in [*sends.values(), *self.notes]:
            work.wait()
        return total, tokens


NOTE = 2048     # a path has fewer hops


def tag(u, hop):
    return 16 + 2 * NOTE * u + hop


def sleep_until(moment):
    time.sleep(max(0.0, moment - time.monotonic()))


# ---------------------------------------------------------------- planned paths


def measure(pipeline, job):
    """On rank 0: delay[i][j], seconds of one message between every two ranks, and compute[i], seconds of one microbatch's forward on each rank
    while all compute; medians of 5 (other ranks: None)."""
    message, kept = torch.zeros(pipeline.shape, dtype=pipeline.dtype, device=job.device), pipeline.bytes_sent

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
            work, _ = pipeline.send(message, peer, 0, 0) if sends else pipeline.receive(peer, 0, 0)
            work.wait()

    def forward():
        with pipeline.cast:
            pipeline.model.blocks(message.float().requires_grad_())

    delays = [0.0] * job.world
    for pair in combinations(range(job.world), 2):          # in one order for all, so nobody waits in a circle
        if job.rank in pair:
            peer = sum(pair) - job.rank
            delays[peer] = median(lambda: there_and_back(peer)) / 2
    compute = median(forward)
    pipeline.bytes_sent = kept
    rows = job.collect([*delays, compute])
    return rows and [row[:-1] for row in rows], rows and [row[-1] for row in rows]


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


def plan_paths(o, network, stages):
    """Rank 0's plan, as JSON: the paths of all rounds, every rank's tasks in order, the iteration's simulated seconds."""
    m = o.microbatches      # an origin sends as many at once as nodes hold, the rest in further rounds where that divides
    rounds = next((r for r in range(1, m) if m % r == 0 and m // r <= min(network.memory)), 1)
    try:
        paths, order = PLANNERS[o.routing](network, round((1 - o.skip) * len(stages)), m // rounds, rounds, o.seed)
        makespan = simulate(network, paths, rounds=rounds, order=order).makespan
    except (ValueError, skippipe.Deadlock) as error:
        raise BadInput(f"--routing {o.routing}: {error}")
    return json.dumps(dict(paths=paths * rounds, order=order, makespan=makespan))


# ---------------------------------------------------------------- evaluation, checkpoints


def weight_spread(theta, replicas, rank, staged):
    """Sum over the replicas of |theta - mean|^2 on the first of them (others 0), point to point: each sends its theta there.

    Differences to the first replica are summed, so that nothing cancels: sum |d - mean d|^2 = sum |d|^2 - |sum d|^2 / N.
    """
    if rank != replicas[0]:
        dist.send(theta.cpu() if staged else theta, replicas[0])
        return 0.0
    other, square = torch.empty_like(theta, device="cpu" if staged else theta.device), lambda d: float(torch.linalg.vector_norm(d, dtype=torch.float64)) ** 2
    total, squares = torch.zeros_like(theta), 0.0
    for r in replicas[1:]:
        dist.recv(other, r)
        d = other.to(theta.device) - theta
        total += d
        squares += square(d)
    return squares - square(total) / len(replicas)


def evaluate(pipeline, stages, corpus, o):
    """Held-out loss in nats per token of this origin's pipeline on its fixed route through these stages (other ranks: 0)."""
    rounds = -(-o.eval_sequences // o.batch)
    paths = full_paths(stages, 1) * rounds
    batches = {}
    if corpus:
        last = len(corpus.heldout) - o.seq_len - 1
        starts = [round(i * last / max(1, rounds * o.batch - 1)) for i in range(rounds * o.batch)]     # the same on all replicas
        rows = torch.stack([corpus.heldout[a:a + o.seq_len + 1] for a in starts]).long().to(pipeline.device)
        batches = {u: rows[u // len(stages[0]) * o.batch:][:o.batch] for u, path in enumerate(paths) if path[0] == pipeline.rank}
    total, _ = pipeline.run(paths, batches, train=False)
    return float(total) / (rounds * o.batch * o.seq_len)


def partial_inference(pipeline, stages, corpus, o, job, folder):
    """Held-out loss with only some of the stages running and without the dead ranks: stage 0 always, all or 16 sampled choices of the others."""
    alive = [[r for r in stage if r not in o.dead] for stage in stages]
    rows = []
    for kept in dict.fromkeys(max(1, round(share * len(stages))) for share in o.eval_stages):
        running = [s for s in range(1, len(stages)) if alive[s]]        # a stage without a living replica is skipped by all
        others, draw = min(kept - 1, len(running)), random.Random(o.seed)
        share = (others + 1) / len(stages)
        if math.comb(len(running), others) <= 16:
            choices = list(combinations(running, others))
        else:
            choices = sorted({tuple(sorted(draw.sample(running, others))) for _ in range(64)})[:16]
        for choice in choices:
            losses = job.collect([evaluate(pipeline, [alive[0], *(alive[s] for s in choice)], corpus, o)])
            if job.rank == 0:
                mean = sum(losses[r][0] for r in alive[0]) / len(alive[0])
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


def saved_steps(folder, rank):
    return sorted(int(p.parent.name) for p in (folder / "checkpoints").glob(f"*/rank{rank}.pt") if p.parent.name.isdigit())


def forget(folder, rank, steps):
    """Remove this rank's part of these checkpoints."""
    for step in steps:
        place = folder / "checkpoints" / f"{step:08d}"
        (place / f"rank{rank}.pt").unlink()
        with contextlib.suppress(OSError):      # the last rank to leave takes the folder
            place.rmdir()


def load(folder, job, corpus):
    """This rank's part of the newest checkpoint that every rank holds. Newer parts, which only some hold, go: training passes there again."""
    held = saved_steps(folder, job.rank)
    common = set.intersection(*(set(json.loads(text)) for text in job.share(json.dumps(held))))
    if not common:
        raise BadInput(f"{folder} has no checkpoint that all {job.world} ranks hold")
    file = folder / "checkpoints" / f"{max(common):08d}" / f"rank{job.rank}.pt"
    try:
        state = torch.load(file, weights_only=True, map_location=job.device)
    except Exception as error:
        raise BadInput(f"{file} is damaged ({str(error)[:100]}); delete {file.parent} to go on from the checkpoint before it")
    if corpus and state["corpus"] != corpus.digest:
        raise BadInput(f"the data differ from those of {folder} (corpus {corpus.digest}, then {state['corpus']}): give the same --data or start a new run")
    return state, [step for step in held if step > max(common)]


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
    try:
        config = Config(o.vocab, o.hidden, o.mlp, o.layers, o.heads, o.kv_heads)
    except ValueError as error:
        raise BadInput(str(error))
    network = read_links(o, stages) if o.links and not o.eval_stages and (o.emulate or job.rank == 0 and not o.resume) else None
    if not set(o.dead) < set(range(job.world)) or set(stages[0]) <= set(o.dead):
        raise BadInput(f"--dead {','.join(map(str, o.dead))}: takes ranks of this run, and must leave one of the origins {stages[0]}")
    corpus = load_corpus(o) if stage == 0 else None
    reader = Reader.of(o, corpus, stages[0].index(job.rank), len(stages[0])) if corpus else None
    folder = Path(o.resume) if o.resume else Path("runs") / o.name
    if job.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        try:            # "x": of two runs that start at once with one name, one gets it
            o.resume or open(folder / "config.json", "x").close()
        except FileExistsError:
            raise BadInput(f"{folder} exists: go on with --resume {folder}, or give another --name")
    return stages, layers[stage], stage, config, network, corpus, reader, folder


def main(argv=None):
    job = Job()
    if job.rank and {"-h", "--help"} & set(sys.argv[1:] if argv is None else argv):
        return
    o = job.together(lambda: parse(argv, job.world) if job.rank == 0 else None)     # rank 0's options hold for all
    if job.rank == 0 and o.name is None:
        o.name = f"{o.method}-{'x'.join(map(str, o.stages))}-{time.strftime('%Y%m%d-%H%M%S')}"
    o = Options(**json.loads(job.share(json.dumps(asdict(o)) if o else "")[0]))
    job.connect(o)
    stages, layers, stage, config, network, corpus, reader, folder = job.together(prepare, o, job)
    say = print if job.rank == 0 else lambda *_: None

    # model, optimizer, method: all on one flat vector
    replicas = stages[stage]
    model = Llama(config, layers, ends=stage == 0, seed=o.seed, device=job.device)
    theta, grad = flatten(model.parameters())
    adam = adam_state(theta)
    if o.compile:
        for layer in model.model.layers.values():
            layer.compile()
    outer = group = None
    if o.method == "noloco":
        outer = NoLoCo(model.parameters(), replicas, inner_steps=o.inner_steps, alpha=o.alpha, beta=o.beta, gamma=o.gamma,
                       group_size=o.group_size, seed=o.seed)
    elif o.method == "diloco":
        outer = DiLoCo(model.parameters(), replicas, inner_steps=o.inner_steps, alpha=o.alpha, beta=o.beta)
    elif o.method == "ddp" and len(replicas) > 1:
        group = dist.new_group(replicas, use_local_synchronization=True)
    pipeline = Pipeline(model, job, stages, (o.batch, o.seq_len, o.hidden), getattr(torch, o.dtype))
    step, plan = 0, None
    totals = dict(seconds=0.0, sync_bytes=0, skipped=0, loss=0.0, tokens=0)     # loss and tokens since the last evaluation
    if o.resume:
        state, stale = job.together(load, folder, job, corpus)
        theta.copy_(state["theta"])
        for name, value in adam.items():
            value.copy_(state["adam"][name])
        torch.set_rng_state(state["rng"].cpu())
        if outer:
            outer.load_state_dict(state["outer"])
        if reader:
            reader.cursor = state["cursor"]
        step, plan, totals, pipeline.bytes_sent = state["step"], state["plan"], state["totals"], state["pipeline_bytes"]
    if o.eval_stages:
        partial_inference(pipeline, stages, corpus, o, job, folder)
        return job.close()
    if o.resume:
        forget(folder, job.rank, stale)

    # what runs, in a few lines
    whole, inner = count_parameters(config)
    say(f"{o.method}, stages {'x'.join(map(str, o.stages))}, {o.routing} routing, {job.world} processes on {job.device.type}"
        + (f" over {dist.get_backend()}" if job.world > 1 else ""))
    say(f"{o.model} model: {whole / 1e6:.2f}M parameters, {inner / 1e6:.2f}M without embedding and head; {o.dtype}")
    if corpus:
        say(f"{len(corpus.train) / 1e6:.1f}M training and {len(corpus.heldout) / 1e6:.2f}M held-out tokens, corpus {corpus.digest}"
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
            delay, compute = measure(pipeline, job)
            network = Network(delay, compute, stages) if job.rank == 0 else None
        say(f"planning {o.routing} paths")
        plan = json.loads(job.share(job.together(lambda: plan_paths(o, network, stages) if job.rank == 0 else ""))[0])
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
    clock, heldout, iterations, norm = time.perf_counter(), None, [], 0.0

    while step < o.steps:
        # paths, data, forward and backward
        if plan:
            paths = plan["paths"]
        else:
            paths = random_paths(stages, o.microbatches, step, o.seed) if o.routing == "random" else full_paths(stages, o.microbatches)
        batches = {u: reader.next(o.batch).to(job.device) for u, path in enumerate(paths) if path[0] == job.rank}
        grad.zero_()
        if o.emulate:
            dist.barrier()          # so that an iteration's time is its own
            pipeline.emulated, pipeline.scale = network, o.time_scale
        start = time.perf_counter()
        loss, tokens = pipeline.run(paths, batches, order=plan and plan["order"])
        pipeline.emulated = None
        iterations.append(time.perf_counter() - start)
        totals["loss"], totals["tokens"] = totals["loss"] + loss, totals["tokens"] + len(batches) * o.batch * o.seq_len

        # the gradient: a mean over the tokens that came home through this rank (ddp: through this stage), clipped
        if group:
            count = torch.tensor(float(tokens), device=job.device)
            works = [dist.all_reduce(t, group=group, async_op=True) for t in (count, grad)]
            for work in works:
                work.wait()
            tokens = float(count)
            totals["sync_bytes"] += 2 * (len(replicas) - 1) * grad.nbytes // len(replicas)      # of a ring all-reduce
        if tokens:
            norm = torch.linalg.vector_norm(grad) / tokens
            if torch.isfinite(norm):
                grad.mul_((o.clip / norm).clamp(max=1.0) / tokens)
                inner_step(theta, grad, adam, schedule(step, o))
            else:                   # one Inf would reach every replica in a few outer steps
                totals["skipped"] += 1
        if outer:
            outer.step()
        step += 1
        if step % 10 == 0 or step == 1:
            progress.set_postfix_str(f"loss {float(loss) / max(1, len(batches) * o.batch * o.seq_len):.3f}"
                                     + (f", held-out {heldout:.3f}" if heldout else ""), refresh=False)
        progress.update()

        evaluates, saves = (step == o.steps or step % every == 0 for every in (o.eval_every, o.save_every))
        if evaluates or saves:
            totals["seconds"] += time.perf_counter() - clock
            if outer:
                totals["sync_bytes"], outer.bytes_sent = totals["sync_bytes"] + outer.bytes_sent, 0
        if evaluates:
            row = dict(loss=float(totals["loss"]), tokens=totals["tokens"], heldout=evaluate(pipeline, stages, corpus, o),
                       spread=weight_spread(theta, replicas, job.rank, pipeline.staged), weights=theta.numel(), skipped=totals["skipped"],
                       sync=totals["sync_bytes"], pipeline=pipeline.bytes_sent, norm=float(norm), iteration=sorted(iterations)[len(iterations) // 2])
            rows = job.collect(list(row.values()))
            if job.rank == 0:
                rows = [dict(zip(row, values)) for values in rows]
                heldout = report(rows, folder, progress, o, stages, step, totals["seconds"], corpus, plan)
            totals["loss"], totals["tokens"], iterations = 0.0, 0, []
        if saves:
            save(folder, step, job.rank, dict(
                step=step, theta=theta, adam=adam, rng=torch.get_rng_state(), outer=outer and outer.state_dict(),
                cursor=reader and reader.cursor, corpus=corpus and corpus.digest, plan=plan, options=asdict(o),
                totals={**totals, "loss": float(totals["loss"])}, pipeline_bytes=pipeline.bytes_sent))
            # When rank 0 takes this message it has everyone's message of the checkpoint before: that one is whole, older ones can go.
            job.collect([step])
            forget(folder, job.rank, saved_steps(folder, job.rank)[:-2])
        if evaluates or saves:
            clock = time.perf_counter()
    progress.close()
    if job.rank == 0:
        summary(folder)
    job.close()


def perplexity(loss):
    return math.exp(loss) if loss < 700 else math.inf


def report(rows, folder, progress, o, stages, step, seconds, corpus, plan):
    """One line of metrics.jsonl from every rank's numbers; returns the mean held-out loss."""
    origins, total = [rows[r] for r in stages[0]], lambda key: sum(row[key] for row in rows)
    heldout, tokens = [row["heldout"] for row in origins], step * len(origins) * o.microbatches * o.batch * o.seq_len
    mean = sum(heldout) / len(heldout)
    line = dict(
        step=step, tokens=tokens, seconds=seconds, tokens_per_second=tokens / seconds, lr=schedule(step - 1, o),
        train_loss=sum(row["loss"] for row in origins) / sum(row["tokens"] for row in origins),
        heldout_loss=mean, heldout_min=min(heldout), heldout_max=max(heldout), perplexity=perplexity(mean),
        heldout_nats_per_byte=corpus.bytes_per_token and mean / corpus.bytes_per_token,
        weight_spread=math.sqrt(max(total("spread"), 0.0) / total("weights")) if math.isfinite(total("spread")) else math.nan,
        gradient_norm=total("norm") / len(rows), skipped_steps=total("skipped"), sync_bytes=total("sync"), pipeline_bytes=total("pipeline"),
        iteration_seconds=max(row["iteration"] for row in rows) / (o.time_scale if o.emulate else 1), simulated_seconds=plan and plan["makespan"])
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")
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
          + (f"\nskipped         {line['skipped_steps']:.0f} optimizer steps with a gradient that was not finite" if line["skipped_steps"] else ""))


if __name__ == "__main__":
    main()
