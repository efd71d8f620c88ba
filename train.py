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
import sys
import sysconfig
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from model import Config, Llama, count_parameters
from noloco import DiLoCo, NoLoCo, flatten, gamma_bound
from skippipe import chain, full_paths, random_paths

# The paper's table (arXiv 2506.10911); tiny is for two laptop cores. Rates are those of the inner optimizer.
MODELS = {
    "tiny": dict(hidden=128, layers=4, heads=4, mlp=512, vocab=256, seq_len=128, lr=3e-3, steps=300, warmup=30),
    "small": dict(hidden=768, layers=12, heads=16, mlp=3072, vocab=128000, seq_len=1024, lr=6e-4, steps=25000, warmup=1000),
    "medium": dict(hidden=2048, layers=24, heads=32, mlp=8192, vocab=128000, seq_len=1024, lr=2e-4, steps=25000, warmup=1000),
    "large": dict(hidden=4096, layers=32, heads=32, mlp=16384, vocab=128000, seq_len=1024, lr=1.2e-4, steps=25000, warmup=1000),
}
METHODS = {
    "noloco": dict(inner_steps=50, alpha=0.5, beta=0.7, group_size=2),
    "diloco": dict(inner_steps=100, alpha=0.3, beta=0.7),
    "ddp": {},
    "local": {},
}


def option(default, help, **kwargs):
    return field(default=default, metadata=dict(help=help, **kwargs))


@dataclass
class Options:
    """Every option, its default and its help. None: from the model's or the method's row in the tables above."""
    method: str = option("noloco", "how replicas synchronise", choices=list(METHODS))
    stages: str = option(None, "replicas of each pipeline stage, e.g. 3,2,2 (default: one stage of all processes)")
    layers_per_stage: str = option(None, "e.g. 1,2,3 (default: as even as possible, later stages first)")
    routing: str = option("random", "who serves whom at a stage boundary: a fresh permutation per microbatch, or always the same",
                          choices=["random", "fixed"])
    microbatches: int = option(2, "microbatches per origin and step")
    batch: int = option(4, "sequences per microbatch")
    inner_steps: int = option(None, "optimizer steps per outer step (m)", type=int)
    alpha: float = option(None, "outer momentum (Eq. 2)", type=float)
    beta: float = option(None, "outer learning rate (Eq. 2)", type=float)
    gamma: float = option(None, "pull between slow weights (Eq. 2; default: beta, as in the released code)", type=float)
    group_size: int = option(None, "replicas that average with each other in an outer step (n)", type=int)
    model: str = option("tiny", "a row of the paper's table, or tiny", choices=list(MODELS))
    hidden: int = option(None, "hidden size", type=int)
    layers: int = option(None, "number of layers", type=int)
    heads: int = option(None, "attention heads", type=int)
    kv_heads: int = option(None, "key-value heads (default: heads)", type=int)
    mlp: int = option(None, "intermediate size of the MLP", type=int)
    vocab: int = option(None, "vocabulary size", type=int)
    seq_len: int = option(None, "tokens per sequence", type=int)
    steps: int = option(None, "inner steps in all", type=int)
    lr: float = option(None, "Adam's peak rate; after warm-up a cosine to a tenth of it", type=float)
    warmup: int = option(None, "steps of linear warm-up", type=int)
    clip: float = option(1.0, "largest norm of a rank's gradient")
    dtype: str = option("float32", "compute dtype; weights, optimizer and outer step stay fp32", choices=["float32", "bfloat16"])
    compile: bool = option(False, "torch.compile each layer")
    data: str = option(None, "text file or folder, C4 .json.gz shards or nanoGPT .bin tokens (default: Python's standard library)")
    tokenizer: str = option(None, "a Hugging Face tokenizer.json (default: bytes)")
    eval_every: int = option(100, "steps between evaluations")
    eval_sequences: int = option(128, "held-out sequences per evaluation and replica")
    save_every: int = option(100, "steps between checkpoints")
    name: str = option(None, "the run is kept in runs/NAME (default: method, stages and time)")
    resume: str = option(None, "run folder to go on with; its options hold unless given again")
    seed: int = option(0, "of weights, data order, routes and groups")
    device: str = option("auto", "where to compute", choices=["auto", "cpu", "cuda"])
    backend: str = option("auto", "nccl needs a GPU for every process; gloo does without", choices=["auto", "gloo", "nccl"])


# What shapes the weights and the ranks: a checkpoint fits only the same.
LAYOUT = ("stages", "layers_per_stage", "method", "hidden", "layers", "heads", "kv_heads", "mlp", "vocab", "seq_len", "seed", "data", "tokenizer")


class BadInput(Exception):
    """Something the user can put right; the message is the one line that rank 0 prints."""


def parse(argv):
    class Parser(argparse.ArgumentParser):
        def error(self, message):
            raise BadInput(f"{message} (see --help)")
    parser = Parser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for f in fields(Options):
        how = dict(action="store_true") if f.type is bool else dict(type=f.metadata.get("type", type(f.default) if f.default is not None else str),
                                                                    choices=f.metadata.get("choices"))
        parser.add_argument("--" + f.name.replace("_", "-"), help=f.metadata["help"], default=argparse.SUPPRESS, **how)
    given = vars(parser.parse_args(argv))
    old = {}
    if given.get("resume"):
        try:
            old = json.loads((Path(given["resume"]) / "config.json").read_text())
        except (OSError, ValueError) as error:
            raise BadInput(f"--resume {given['resume']}: no readable config.json there ({error})")
        for key in LAYOUT:
            if key in given and given[key] != old[key]:
                raise BadInput(f"--{key.replace('_', '-')} {given[key]} differs from the {old[key]} of {given['resume']}: "
                               "a checkpoint fits only the layout that wrote it; leave the option out or start a new run")
    o = Options(**{**old, **given})
    for name, value in {**MODELS[o.model], **METHODS[o.method]}.items():
        if getattr(o, name) is None:
            setattr(o, name, value)
    o.kv_heads = o.kv_heads or o.heads
    if o.gamma is None:
        o.gamma = o.beta
    for name in ("microbatches", "batch", "seq_len", "steps", "eval_every", "eval_sequences", "save_every", "inner_steps"):
        if getattr(o, name) is not None and getattr(o, name) < 1:
            raise BadInput(f"--{name.replace('_', '-')} must be at least 1, got {getattr(o, name)}")
    if o.group_size is not None and o.group_size < 2:
        raise BadInput(f"--group-size must be at least 2, got {o.group_size}")
    return o


def layout(o, world):
    """stages, the ranks of each, and layers, the global layer numbers of each."""
    try:
        sizes = [int(s) for s in (o.stages or str(world)).split(",")]
        depths = [int(s) for s in o.layers_per_stage.split(",")] if o.layers_per_stage else None
    except ValueError:
        raise BadInput("--stages and --layers-per-stage take numbers with commas between them, e.g. 3,2,2")
    if min(sizes) < 1 or sum(sizes) != world:
        raise BadInput(f"--stages {o.stages} needs {sum(sizes)} processes but {world} are running: "
                       f"start torchrun with --nproc-per-node {sum(sizes)}, or give stages that add up to {world}")
    if depths is None:      # later stages first: origins also carry the embedding, the head and the loss
        depths = [(o.layers + s) // len(sizes) for s in range(len(sizes))]
    if len(depths) != len(sizes) or min(depths) < 1 or sum(depths) != o.layers:
        raise BadInput(f"{len(sizes)} stages must share the model's {o.layers} layers, at least one each; got {depths}")
    ends = [sum(sizes[:s]) for s in range(len(sizes) + 1)]
    marks = [sum(depths[:s]) for s in range(len(sizes) + 1)]
    return [list(range(a, b)) for a, b in zip(ends, ends[1:])], [list(range(a, b)) for a, b in zip(marks, marks[1:])]


# ---------------------------------------------------------------- processes


def share(text, device):
    """Every rank's text (at most 8 kB), in the order of ranks."""
    if not dist.is_initialized():
        return [text]
    mine = torch.zeros(8192, dtype=torch.uint8)
    data = text.encode()[:8192]
    mine[:len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else 0
    all_ = [torch.empty_like(mine, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(all_, mine.to(device))
    return [bytes(t.tolist()).rstrip(b"\0").decode(errors="replace") for t in all_]


def together(device, function, *args):
    """function(*args) on every rank; a BadInput on any ends all of them with status 2 after one line from rank 0."""
    result, problem = None, ""
    try:
        result = function(*args)
    except BadInput as error:
        problem = str(error)
    problems = share(problem, device)
    if any(problems):
        if not dist.is_initialized() or dist.get_rank() == 0:
            print("error: " + next(p for p in problems if p), file=sys.stderr, flush=True)
        if dist.is_initialized():
            dist.barrier()          # torchrun stops everyone when the first one leaves: not before the line is out
            dist.destroy_process_group()
        sys.exit(2)
    return result


def connect(o, world, local_rank, local_world):
    """The device of this process, once the process group is there."""
    cuda = torch.cuda.is_available() and o.device != "cpu"
    if o.device == "cuda" and not cuda:
        raise BadInput("--device cuda: torch sees no GPU here")
    own_gpu = cuda and local_world <= torch.cuda.device_count()
    if o.backend == "nccl" and not own_gpu:
        raise BadInput(f"--backend nccl needs a GPU for each of the {local_world} processes of this machine; use --backend gloo")
    device = torch.device("cuda", local_rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if world > 1:
        if world > 64:      # Gloo connects every pair at start-up; with hundreds of ranks only those that talk to each other should
            os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
        dist.init_process_group("nccl" if own_gpu and o.backend != "gloo" else "gloo")
        dist.barrier()      # NCCL: the first use of a group must have everyone in it
    return device


def collect(values, rank, world, device):
    """Numbers for the log, point to point: rank 0 gets every rank's list of floats in the order of ranks, the others None."""
    mine = torch.tensor(values, dtype=torch.float64)
    if dist.is_initialized() and dist.get_backend() == "nccl":
        mine = mine.to(device)
    if rank:
        dist.send(mine, 0)
        return None
    rows = [mine] + [torch.empty_like(mine) for _ in range(world - 1)]
    for r in range(1, world):
        dist.recv(rows[r], r)
    return [row.tolist() for row in rows]


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
    if path.name.endswith(".json.gz"):
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                yield json.loads(line)["text"].encode()
    else:
        yield path.read_bytes()


def load_corpus(o):
    """Read the data once: tokens for training and held-out tokens, from disjoint files (one file: disjoint ranges)."""
    if o.data:
        root = Path(o.data)
        files = sorted(p for p in root.rglob("*") if p.is_file() and not p.name.startswith(".")) if root.is_dir() else [root]
        if not files or not all(p.is_file() for p in files):
            raise BadInput(f"--data {o.data}: no such file, or a folder without files")
    else:
        root, files = standard_library()
        if sum(p.stat().st_size for p in files) < 5e6:
            raise BadInput(f"the standard library in {root} has under 5 MB of .py text: give --data a text file or folder")
    kinds = {"bin" if p.suffix == ".bin" else "c4" if p.name.endswith(".json.gz") else "text" for p in files}
    if len(kinds) > 1:
        raise BadInput(f"--data {o.data} mixes {' and '.join(sorted(kinds))} files: keep one kind in a folder")
    tokenizer, separator = None, 0
    if o.tokenizer:
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise BadInput("--tokenizer needs the tokenizers package: pip install '.[hf]'")
        try:
            tokenizer = Tokenizer.from_file(o.tokenizer)
        except Exception as error:
            raise BadInput(f"--tokenizer {o.tokenizer}: {error}")
        if tokenizer.get_vocab_size() > o.vocab:
            raise BadInput(f"{o.tokenizer} has {tokenizer.get_vocab_size()} tokens, the model {o.vocab}: give --vocab {tokenizer.get_vocab_size()}")
        ends = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
        separator = next((tokenizer.token_to_id(t) for t in ends if tokenizer.token_to_id(t) is not None), None)
    elif kinds != {"bin"} and o.vocab < 256:
        raise BadInput(f"bytes need a vocabulary of 256, the model has {o.vocab}")

    def tokens(paths):
        """The tokens of these files, documents joined by the tokenizer's end token (bytes: by a zero byte), and their size in bytes."""
        if kinds == {"bin"}:        # nanoGPT's: uint16 and nothing else; mapped, not read
            parts = [torch.from_file(str(p), size=p.stat().st_size // 2, dtype=torch.uint16) for p in paths if p.stat().st_size > 1]
            return (parts[0] if len(parts) == 1 else torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint16)), None
        docs = [d for p in paths for d in documents(p)]
        size = sum(len(d) + 1 for d in docs)
        if tokenizer is None:
            return torch.frombuffer(bytearray(b"\0".join(docs) + b"\0"), dtype=torch.uint8), size
        end = [] if separator is None else [separator]
        batch = tokenizer.encode_batch([d.decode(errors="replace") for d in docs], add_special_tokens=False)
        return torch.tensor([i for e in batch for i in e.ids + end], dtype=torch.int32), size

    try:
        if len(files) == 1:
            whole, size = tokens(files)
            cut = len(whole) - max(o.seq_len + 1, len(whole) // 20)
            train, heldout, size = whole[:max(cut, 0)], whole[max(cut, 0):], size and size * (len(whole) - cut) / max(1, len(whole))
        else:
            named = [p for p in files if "val" in p.name.lower()] if o.data else []     # nanoGPT's val.bin, C4's c4-validation.*
            by_hash = sorted(files, key=lambda p: hashlib.sha256(p.relative_to(root).as_posix().encode()).hexdigest())
            held = set(named if 0 < len(named) < len(files) else by_hash[:max(1, len(files) // 20)])
            (train, _), (heldout, size) = tokens([p for p in files if p not in held]), tokens([p for p in files if p in held])
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise BadInput(f"--data {o.data}: {error}")
    for part, name in ((train, "training"), (heldout, "held-out")):
        if len(part) < o.seq_len + 1:
            raise BadInput(f"the {name} data has {len(part)} tokens, fewer than one sequence of {o.seq_len} + 1: more data or a smaller --seq-len")
    top = max(int(part[:1 << 24].to(torch.int32).max()) for part in (train, heldout))
    if top >= o.vocab:
        raise BadInput(f"the data has token {top}, the model a vocabulary of {o.vocab}: give --vocab {top + 1} or more")
    head = hashlib.sha256(b"".join(part[:1 << 22].to(torch.int32).numpy().tobytes() for part in (train, heldout)))
    return Corpus(train, heldout, f"{head.hexdigest()[:12]}", size and size / len(heldout))


class Reader:
    """Sequences of one origin's part of the tokens, in a fresh random order each epoch. `cursor`, the sequences read, is all its state."""

    def __init__(self, tokens, seq_len, seed):
        self.tokens, self.seq_len, self.seed = tokens, seq_len, seed
        self.count, self.cursor, self.epoch = (len(tokens) - 1) // seq_len, 0, None
        if self.count < 1:
            raise BadInput(f"an origin's part of the data has {len(tokens)} tokens, fewer than one sequence of {seq_len} + 1: "
                           "more data, fewer origins or a smaller --seq-len")

    def next(self, batch):
        """(batch, T + 1) tokens: inputs and, one further, targets."""
        rows = []
        for _ in range(batch):
            epoch, place = divmod(self.cursor, self.count)
            if epoch != self.epoch:
                self.epoch = epoch
                self.order = torch.randperm(self.count, generator=torch.Generator().manual_seed(self.seed * 1_000_003 + epoch))
            start = int(self.order[place]) * self.seq_len
            rows.append(self.tokens[start:start + self.seq_len + 1])
            self.cursor += 1
        return torch.stack(rows).long()


def reader_seed(o, origin):
    return o.seed * 1_000_003 + origin


# ---------------------------------------------------------------- the executor


DEPTH = 2       # d of the order: smaller starts microbatches sooner, larger holds fewer activations
AHEAD = 8       # receives posted before they are needed: a Gloo send completes only when its receive is there


def tasks(paths, rank, hops=None):
    """This rank's tasks (microbatch, hop) in the order in which it runs them.

    Sorted by (d * microbatch + hop, microbatch, origin), the microbatch counted within its origin. Every chain ascends in this key, so
    the smallest unfinished task of all ranks can always run and nothing deadlocks, whatever the paths; and any two ranks send and
    receive in the same order. hops(path) cuts the chains: evaluation ends with the loss.
    """
    seen, mine = {}, []
    for u, path in enumerate(paths):
        m = seen[path[0]] = seen.get(path[0], -1) + 1
        ranks = chain(path)[:hops(path) if hops else None]
        mine += [(DEPTH * m + hop, m, path[0], u, hop) for hop, r in enumerate(ranks) if r == rank]
    return [task[3:] for task in sorted(mine)]


class Pipeline:
    """Runs paths: forward along them, loss at home, backward the same way back, gradients summed into the parameters."""

    def __init__(self, model, rank, shape, dtype, device):
        self.model, self.rank, self.shape, self.dtype, self.device = model, rank, shape, dtype, device
        self.bytes_sent, self.trace = 0, bool(os.environ.get("TRACE"))
        backend = dist.get_backend() if dist.is_initialized() else None
        self.staged = device.type == "cuda" and backend == "gloo"           # Gloo sends host memory only
        self.up = self.down = None
        if backend == "nccl":
            # NCCL ignores tags and runs what two ranks exchange within a group in the order posted. So each direction of a pair has a
            # group of its own, and all pairs connect here, in one order: later each would wait for the other's first message.
            self.up, self.down = dist.new_group(), dist.new_group()
            one = torch.zeros(1, device=device)
            for a in range(dist.get_world_size()):
                for b in range(a):
                    for group, source, to in ((self.up, b, a), (self.down, a, b)):
                        if rank in (source, to):
                            (dist.send if rank == source else dist.recv)(one, to if rank == source else source, group=group)

    def send(self, tensor, to, u, hop):
        tensor = tensor.contiguous()
        if self.staged:
            tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
        if self.trace:
            print(f"rank {self.rank} -> {to}: microbatch {u}, hop {hop}, {tensor.nbytes} bytes", file=sys.stderr, flush=True)
        self.bytes_sent += tensor.nbytes
        return dist.isend(tensor, to, group=self.up if self.rank < to else self.down, tag=tag(u, hop)), tensor

    def receive(self, source, u, hop):
        buffer = torch.empty(self.shape, dtype=self.dtype, device="cpu" if self.staged else self.device, pin_memory=self.staged)
        return dist.irecv(buffer, source, group=self.up if source < self.rank else self.down, tag=tag(u, hop)), buffer

    def run(self, paths, batches, train=True):
        """Run the paths; batches[u] is (B, T + 1) tokens for this rank's own microbatches u. Returns (loss in nats summed over this
        origin's tokens, on the device; tokens that went through this rank)."""
        model, count = self.model, self.shape[0] * self.shape[1]
        chains = [chain(path) if train else chain(path)[:len(path) + 1] for path in paths]
        mine = tasks(paths, self.rank, None if train else lambda path: len(path) + 1)
        receives = [(chains[u][hop - 1], u, hop) for u, hop in mine if hop and chains[u][hop - 1] != self.rank]
        inbox, sends, saved, needed, posted = {}, [], {}, 0, 0
        total, tokens = torch.zeros((), device=self.device), 0
        cast = torch.autocast(self.device.type, torch.bfloat16) if self.dtype == torch.bfloat16 else contextlib.nullcontext()
        for u, hop in mine:
            length, ranks = len(paths[u]), chains[u]
            if hop and ranks[hop - 1] != self.rank:
                while posted < min(needed + AHEAD, len(receives)):
                    inbox[receives[posted][1:]] = self.receive(*receives[posted])
                    posted += 1
                needed += 1
                work, x = inbox.pop((u, hop))
                work.wait()
                x = x.to(self.device, non_blocking=True)
            elif hop:
                x = inbox.pop((u, hop))                     # from this rank's own task before
            if hop < length:
                with torch.set_grad_enabled(train), cast:
                    x = x.requires_grad_(train) if hop else model.embed(batches[u][:, :-1])
                    y = model.blocks(x).to(self.dtype)
                if train:
                    saved[u, hop] = x, y
                out = y.detach()
                tokens += count
            elif hop == length:
                with torch.set_grad_enabled(train), cast:
                    loss = model.loss(x.requires_grad_(train), batches[u][:, 1:])
                if train:
                    loss.backward()
                total += loss.detach()
                out = x.grad
            else:
                h, y = saved.pop((u, 2 * length - hop))
                y.backward(x)
                out = h.grad if hop < 2 * length else None
            if hop + 1 < len(ranks):
                if ranks[hop + 1] == self.rank:
                    inbox[u, hop + 1] = out
                else:
                    sends.append(self.send(out, ranks[hop + 1], u, hop + 1))
        for work, _ in sends:
            work.wait()
        return total, tokens


def tag(u, hop):
    return 16 + 256 * u + hop


# ---------------------------------------------------------------- evaluation, checkpoints


def weight_spread(theta, replicas, rank, staged):
    """Sum over the replicas of |theta - mean|^2 on the first of them (others 0), point to point.

    Differences to the first replica are summed, so that nothing cancels: sum |d - mean d|^2 = sum |d|^2 - |sum d|^2 / N.
    """
    if rank != replicas[0]:
        dist.send(theta.cpu() if staged else theta, replicas[0])
        return 0.0
    other = torch.empty(theta.shape, device="cpu" if staged else theta.device)
    total, squares = torch.zeros_like(theta), 0.0
    for r in replicas[1:]:
        dist.recv(other, r)
        d = other.to(theta.device) - theta
        total += d
        squares += float(d.double().square().sum())
    return max(0.0, squares - float(total.double().square().sum()) / len(replicas))


def evaluate(pipeline, stages, corpus, o):
    """Held-out loss in nats per token of this origin's pipeline on its fixed route (other ranks: 0)."""
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
    return sorted(int(p.parent.name) for p in (folder / "checkpoints").glob(f"*/rank{rank}.pt"))


def forget(folder, rank):
    """Keep the last two of this rank's checkpoints."""
    for step in saved_steps(folder, rank)[:-2]:
        place = folder / "checkpoints" / f"{step:08d}"
        (place / f"rank{rank}.pt").unlink()
        with contextlib.suppress(OSError):      # the last rank to leave takes the folder
            place.rmdir()


def load(folder, rank, device, world):
    """This rank's part of the newest checkpoint that every rank holds."""
    steps = [set(json.loads(text)) for text in share(json.dumps(saved_steps(folder, rank)), device)]
    common = set.intersection(*steps)
    if not common:
        raise BadInput(f"{folder} has no checkpoint that all {world} ranks hold")
    file = folder / "checkpoints" / f"{max(common):08d}" / f"rank{rank}.pt"
    try:
        return torch.load(file, weights_only=True, map_location=device)
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:100]
        raise BadInput(f"{file} is damaged ({reason}); delete {file.parent} to go on from the checkpoint before it")


# ---------------------------------------------------------------- the run


def schedule(step, o):
    """Warm-up, then a cosine to a tenth of the peak rate."""
    if step < o.warmup:
        return o.lr * (step + 1) / o.warmup
    done = (step - o.warmup) / max(1, o.steps - o.warmup)
    return o.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done))))


def prepare(o, rank, world):
    """Everything that can be refused before work starts: layout, model, data, folder."""
    stages, layers = layout(o, world)
    stage = next(s for s, ranks in enumerate(stages) if rank in ranks)
    try:
        config = Config(o.vocab, o.hidden, o.mlp, o.layers, o.heads, o.kv_heads)
    except ValueError as error:
        raise BadInput(str(error))
    corpus = load_corpus(o) if stage == 0 else None
    reader = None
    if corpus:
        part = len(corpus.train) // len(stages[0])
        place = stages[0].index(rank)
        reader = Reader(corpus.train[place * part:(place + 1) * part], o.seq_len, reader_seed(o, place))
    folder = Path(o.resume) if o.resume else Path("runs") / o.name
    if rank == 0 and not o.resume and (folder / "config.json").exists():
        raise BadInput(f"{folder} exists: go on with --resume {folder}, or give another --name")
    return stages, layers[stage], stage, config, corpus, reader, folder


def main(argv=None):
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank, local_world = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", world))
    o, problem, device = None, None, torch.device("cpu")
    try:
        o = parse(argv)
        device = connect(o, world, local_rank, local_world)
    except BadInput as error:
        problem = error
        if world > 1:
            dist.init_process_group("gloo")

    def refuse():
        if problem:
            raise problem
    together(device, refuse)
    if o.name is None:
        o.name = f"{o.method}-{(o.stages or str(world)).replace(',', 'x')}-{time.strftime('%Y%m%d-%H%M%S')}"
    o = Options(**json.loads(share(json.dumps(asdict(o)), device)[0]))      # rank 0's, so that all agree
    stages, layers, stage, config, corpus, reader, folder = together(device, prepare, o, rank, world)
    say = print if rank == 0 else lambda *_: None

    # model, optimizer, method: all on one flat vector
    replicas = stages[stage]
    model = Llama(config, layers, ends=stage == 0, seed=o.seed, device=device)
    theta, grad = flatten(model.parameters())
    weights = torch.nn.Parameter(theta)
    weights.grad = grad
    adam = torch.optim.Adam([weights], lr=o.lr, betas=(0.9, 0.95), fused=True)
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
    dtype = getattr(torch, o.dtype)
    pipeline = Pipeline(model, rank, (o.batch, o.seq_len, o.hidden), dtype, device)
    step = loss_sum = loss_tokens = sync_bytes = seconds = norm = 0
    if o.resume:
        state = together(device, load, folder, rank, device, world)
        theta.copy_(state["theta"])
        adam.load_state_dict(state["adam"])
        torch.set_rng_state(state["rng"].cpu())
        if outer:
            outer.load_state_dict(state["outer"])
        if reader:
            reader.cursor = state["cursor"]
        step, loss_sum, loss_tokens, sync_bytes, pipeline.bytes_sent, seconds = state["counters"]

    # what runs, in a few lines
    whole, inner = count_parameters(config)
    say(f"{o.method}, stages {'x'.join(str(len(s)) for s in stages)}, {o.routing} routing, {world} processes on {device.type}"
        + (f" over {dist.get_backend()}" if world > 1 else ""))
    say(f"{o.model} model: {whole / 1e6:.2f}M parameters, {inner / 1e6:.2f}M without embedding and head; {o.dtype}")
    if corpus:
        say(f"{len(corpus.train) / 1e6:.1f}M training and {len(corpus.heldout) / 1e6:.2f}M held-out tokens, corpus {corpus.digest}")
        if int(corpus.bytes_per_token or 1) != 1:
            say(f"{corpus.bytes_per_token:.3f} bytes per held-out token")
    if o.method == "noloco" and len(replicas) > 1:
        n = min(o.group_size, len(replicas))
        if not 0 < o.gamma < gamma_bound(o.alpha, n):
            say(f"warning: gamma {o.gamma} is outside 0 < gamma < {gamma_bound(o.alpha, n):.3f} = 2 (1 - alpha^2) / (1 - alpha + 2 alpha / n): "
                "the replicas will drift apart")
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(asdict(o), indent=1))
        lines = (folder / "metrics.jsonl").read_text().splitlines() if o.resume and (folder / "metrics.jsonl").exists() else []
        (folder / "metrics.tmp").write_text("".join(line + "\n" for line in lines if json.loads(line)["step"] <= step))
        os.replace(folder / "metrics.tmp", folder / "metrics.jsonl")        # what was measured past the checkpoint is measured again
        say(f"{folder}{f', from step {step}' if step else ''}")
    tokens_per_step = len(stages[0]) * o.microbatches * o.batch * o.seq_len
    progress = tqdm(total=o.steps, initial=step, disable=rank != 0, unit="step", dynamic_ncols=True)
    clock, heldout = time.perf_counter(), None

    while step < o.steps:
        # paths, data, forward and backward
        paths = random_paths(stages, o.microbatches, step, o.seed) if o.routing == "random" else full_paths(stages, o.microbatches)
        batches = {u: reader.next(o.batch).to(device) for u, path in enumerate(paths) if path[0] == rank}
        grad.zero_()
        loss, tokens = pipeline.run(paths, batches)
        loss_sum, loss_tokens = loss_sum + loss, loss_tokens + len(batches) * o.batch * o.seq_len
        # the gradient: a mean over the tokens that came home through this rank (ddp: through this stage), clipped
        if group:
            count = torch.tensor(float(tokens), device=device)
            works = [dist.all_reduce(t, group=group, async_op=True) for t in (count, grad)]
            for work in works:
                work.wait()
            tokens = float(count)
            sync_bytes += 2 * (len(replicas) - 1) * grad.nbytes // len(replicas)        # of a ring all-reduce
        if tokens:
            norm = torch.linalg.vector_norm(grad) / tokens
            grad.mul_((o.clip / norm).clamp(max=1.0) / tokens)
            adam.param_groups[0]["lr"] = schedule(step, o)
            adam.step()
        if outer:
            outer.step()
        step += 1
        if step % 10 == 0 or step == 1:
            progress.set_postfix_str(f"loss {float(loss) / max(1, len(batches) * o.batch * o.seq_len):.3f}"
                                     + (f", held-out {heldout:.3f}" if heldout else ""), refresh=False)
        progress.update()

        last = step == o.steps
        if step % o.eval_every == 0 or last:
            seconds += time.perf_counter() - clock
            heldout_here = evaluate(pipeline, stages, corpus, o)
            spread = weight_spread(theta, replicas, rank, pipeline.staged)
            sent = sync_bytes + (outer.bytes_sent if outer else 0)
            rows = collect([float(loss_sum), loss_tokens, heldout_here, spread, theta.numel(), sent, pipeline.bytes_sent, float(norm)],
                           rank, world, device)
            if rank == 0:
                heldout = report(rows, folder, progress, o, stages, step, step * tokens_per_step, seconds, corpus)
            loss_sum, loss_tokens, clock = 0, 0, time.perf_counter()
        if step % o.save_every == 0 or last:
            counters = [step, float(loss_sum), loss_tokens, sync_bytes + (outer.bytes_sent if outer else 0), pipeline.bytes_sent,
                        seconds + time.perf_counter() - clock]
            save(folder, step, rank, dict(theta=theta, adam=adam.state_dict(), rng=torch.get_rng_state(), counters=counters,
                                          outer=outer and outer.state_dict(), cursor=reader and reader.cursor, options=asdict(o)))
            # When rank 0 takes this message it has everyone's message of the checkpoint before: that one is whole, older ones can go.
            collect([step], rank, world, device)
            forget(folder, rank)
    progress.close()
    if rank == 0:
        summary(folder)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def report(rows, folder, progress, o, stages, step, tokens, seconds, corpus):
    """One line of metrics.jsonl from every rank's numbers."""
    origins = [rows[r] for r in stages[0]]
    heldout = [row[2] for row in origins]
    mean = sum(heldout) / len(heldout)
    weights = sum(rows[s[0]][4] * len(s) for s in stages)
    line = dict(
        step=step, tokens=tokens, seconds=seconds, tokens_per_second=tokens / seconds, lr=schedule(step - 1, o),
        train_loss=sum(row[0] for row in origins) / sum(row[1] for row in origins),
        heldout_loss=mean, heldout_min=min(heldout), heldout_max=max(heldout), perplexity=math.exp(mean),
        heldout_nats_per_byte=corpus.bytes_per_token and mean / corpus.bytes_per_token,
        weight_spread=math.sqrt(sum(rows[s[0]][3] for s in stages) / weights),
        gradient_norm=sum(row[7] for row in rows) / len(rows),
        sync_bytes=sum(row[5] for row in rows), pipeline_bytes=sum(row[6] for row in rows))
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")
    progress.write(f"step {step}: held-out {mean:.4f}, train {line['train_loss']:.4f}, weight spread {line['weight_spread']:.2e}, "
                   f"sent {line['sync_bytes'] / 1e6:.1f} MB to synchronise + {line['pipeline_bytes'] / 1e6:.1f} MB in the pipeline, "
                   f"{line['tokens_per_second']:.0f} tokens/s", file=sys.stdout)
    return mean


def summary(folder):
    line = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    per_byte = line["heldout_nats_per_byte"]
    print(f"held-out loss   {line['heldout_loss']:.4f} nats per token" + (f", {per_byte:.4f} nats per byte" if per_byte else "")
          + f" (replicas {line['heldout_min']:.4f} to {line['heldout_max']:.4f}), perplexity {line['perplexity']:.3f} per token\n"
          f"weight spread   {line['weight_spread']:.3e} over the replicas of a stage\n"
          f"bytes sent      {line['sync_bytes'] / 1e6:.1f} MB to synchronise, {line['pipeline_bytes'] / 1e6:.1f} MB in the pipeline, all ranks\n"
          f"speed           {line['tokens_per_second']:.0f} tokens/s, {line['seconds']:.0f} s of training, evaluation not counted")


if __name__ == "__main__":
    main()
