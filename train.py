"""Train a Llama with NoLoCo, DiLoCo, data parallelism or no synchronisation, over any pipelines.

    python train.py                                             one process
    torchrun --nproc-per-node 8 train.py --stages 4,4           2 stages of 4 replicas, random paths
    torchrun --nproc-per-node 8 train.py --method ddp           8 replicas, all-reduce at every step
    torchrun --nproc-per-node 4 train.py --stages 1,1,1,1 --skip 0.5 --microbatches 3     SkipPipe
    torchrun --nproc-per-node 8 train.py --resume runs/NAME     goes on from the newest checkpoint

One step: every origin cuts its batch into microbatches, each of which takes its path through the
stages and comes home for its loss (skippipe.py says what a path is); backward retraces it. Each
rank then divides its gradient by the tokens that came home through it, clips it, takes an Adam step
on its own flat vector, and meets the other replicas of its stage as the method says (noloco.py).

This file needs noloco.py, skippipe.py and model.py; options that no paper has are in gossip/ and
planning/. `python -m survive` outlives lost processes. TRACE=1 prints each message.
"""
import argparse
import contextlib
import copy
import fcntl
import hashlib
import importlib
import json
import math
import os
import random
import re
import socket
import statistics
import sys
import sysconfig
import threading
import time
import zipfile
from collections import Counter, deque
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import accumulate, combinations
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")   # else a broken connection prints a page
import torch
import torch.distributed as dist
from torch.utils.data import ConcatDataset
from tqdm import tqdm

from model import Config, Llama
from noloco import DiLoCo, NoLoCo, flatten, random_groups
from skippipe import (BACKWARD, FORWARD, Deadlock, Infeasible, Network, chain, full_paths, kind,
                      plan, random_paths, stages_to_keep)

# ---------------------------------------------------------------- options


class BadInput(Exception):
    """Something that the user can correct: one line, and status 2."""


def need(good, line):
    if not good:
        raise BadInput(line)


def one_line(error):
    return " ".join(str(error).split())


def beside(option, module):
    """The module, of a folder beside this file. Raises BadInput without the folder."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise BadInput(f"{option} needs the folder {module.split('.')[0]}/ beside train.py")


def option(default, help, choices=None, parse=None, least=0):
    """A field of Options. parse: from a word of the command line (default: the field's type)."""
    return field(default=default,
                 metadata=dict(help=help, choices=choices, parse=parse, least=least))


def integers(text):
    """Parses "3,2,2"."""
    return [int(number) for number in text.split(",")]


# --routing by planning/: its stronger search, the same without swaps, and every stage.
PLANNERS = ["stronger", "no-swaps", "dtfm"]


@dataclass
class Options:
    """Every option, its default and its help. None: from MODELS or METHODS."""
    method: str = option("noloco", "how replicas synchronise",
                         choices=["noloco", "diloco", "ddp", "local"])
    inner_steps: int = option(None, "optimizer steps per outer step (m)", least=1)
    alpha: float = option(None, "outer momentum (N2)")
    beta: float = option(None, "outer learning rate (N2)", least=1e-6)
    gamma: float = option(None, "pull between slow weights (N2; default: beta, as released)")
    group_size: int = option(2, "replicas that meet in an outer step (n)", least=2)
    wire: str = option("fp32", "of a weight, Delta or gradient (others: gossip/)",
                       choices=["fp32", "bf16", "int8"])
    delay: int = option(0, "inner steps that messages travel (gossip/); 0: the paper's")
    fragments: int = option(1, "parts of the weights that meet in turn (gossip/); 1: the paper's",
                            least=1)
    stages: list = option(None, "replicas of each, e.g. 3,2,2 (default: one stage of all)",
                          parse=integers)
    layers_per_stage: list = option(None, "e.g. 1,2,3 (default: even, later stages first)",
                                    parse=integers)
    routing: str = option(None, "paths: random at every boundary, always the same, planned by the "
                          "paper's search, or by planning/ (default: random; with --skip skippipe)",
                          choices=["random", "fixed", "skippipe", *PLANNERS])
    skip: float = option(0.0, "share of the stages that a microbatch leaves out, on planned paths")
    unscaled: bool = option(False, "with --skip, evaluate as the papers do, all residuals whole")
    links: str = option(None, "JSON with the ranks' delay and compute in seconds, for planned "
                        "paths (default: measured)")
    microbatches: int = option(2, "microbatches per origin and step", least=1)
    batch: int = option(4, "sequences per microbatch", least=1)
    model: str = option("tiny", "tiny, or one of the NoLoCo paper's",
                        choices=["tiny", "small", "medium", "large"])
    hidden: int = option(None, "hidden size", least=1)
    layers: int = option(None, "number of layers", least=1)
    heads: int = option(None, "attention heads", least=1)
    mlp: int = option(None, "intermediate size of the MLP", least=1)
    vocab: int = option(None, "vocabulary size", least=1)
    seq_len: int = option(None, "tokens per sequence", least=1)
    optimizer: str = option("adam", "muon: for layers' matrices (gossip/)",
                            choices=["adam", "muon"])
    steps: int = option(None, "inner steps in all", least=1)
    lr: float = option(None, "peak rate; after warm-up a cosine to a tenth of it")
    warmup: int = option(None, "steps of linear warm-up")
    beta2: float = option(0.95, "Adam's, of squared gradients; the papers' released code: 0.999")
    clip: float = option(1.0, "largest norm of a rank's gradient", least=1e-6)
    data: str = option(None, "text file or folder, or nanoGPT .bin (default: Python's own library)")
    tokenizer: str = option(None, "a Hugging Face tokenizer.json (default: bytes)")
    name: str = option(None, "the run is kept in runs/NAME (default: method, stages and time)")
    resume: str = option(None, "run folder to go on with; its options hold unless given again")
    eval_every: int = option(100, "steps between evaluations", least=1)
    eval_sequences: int = option(128, "held-out sequences per evaluation and replica", least=1)
    save_every: int = option(100, "steps between checkpoints", least=1)
    seed: int = option(0, "of weights, data order, routes and groups")
    dtype: str = option("float32", "of compute alone", choices=["float32", "bfloat16"])
    backend: str = option("auto", "nccl needs a GPU for every process",
                          choices=["auto", "gloo", "nccl"])


# The paper's table (arXiv 2506.10911); tiny is for two laptop cores. lr: of the inner optimizer.
PAPER = dict(vocab=128000, seq_len=1024, steps=25000, warmup=1000)
MODELS = {
    "tiny": dict(hidden=128, layers=4, heads=4, mlp=512, lr=3e-3,
                 vocab=256, seq_len=128, steps=300, warmup=30),
    "small": dict(hidden=768, layers=12, heads=16, mlp=3072, lr=6e-4, **PAPER),
    "medium": dict(hidden=2048, layers=24, heads=32, mlp=8192, lr=2e-4, **PAPER),
    "large": dict(hidden=4096, layers=32, heads=32, mlp=16384, lr=1.2e-4, **PAPER),
}
# The options that only some methods have. gamma stays None where nobody gave it: it is beta, also
# where a run resumes with another one.
METHODS = {
    "noloco": dict(inner_steps=50, alpha=0.5, beta=0.7, gamma=None, group_size=2, wire="fp32",
                   delay=0, fragments=1),
    "diloco": dict(inner_steps=100, alpha=0.3, beta=0.7, wire="fp32", delay=0, fragments=1),
    "ddp": dict(wire="fp32"),
    "local": {},
}
# The papers' values are for 25 000 steps; these are the best that we found for short runs of tiny.
TINY = {
    "noloco": dict(inner_steps=10, alpha=0.0, beta=1.0),
    "diloco": dict(inner_steps=20, alpha=0.0, beta=1.0),
}
# A checkpoint fits only a run that agrees in these. The last two are the yardstick of its losses.
LAYOUT = ("name", "method", "delay", "fragments", "stages", "layers_per_stage", "routing", "skip",
          "links", "microbatches", "batch", "model", "hidden", "layers", "heads", "mlp", "vocab",
          "seq_len", "optimizer", "tokenizer", "seed", "eval_sequences", "unscaled")


class Parser(argparse.ArgumentParser):
    """argparse, but a mistake is one line."""

    def __init__(self, description):
        super().__init__(description=description, allow_abbrev=False,
                         formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message):
        raise BadInput(f"{message} (see --help)")


def flag(name):
    return "--" + name.replace("_", "-")


def parse(argv, world=1, Options=Options, description=__doc__):
    """The run's Options. Raises BadInput."""
    parser = Parser(description)
    for f in fields(Options):
        more = dict(default=argparse.SUPPRESS, help=f.metadata["help"])
        if f.type is bool:
            more["action"] = "store_true"
        else:
            more |= dict(type=f.metadata["parse"] or f.type, choices=f.metadata["choices"])
            if f.default is not None:
                more["help"] += f" (default: {f.default})"
        parser.add_argument(flag(f.name), **more)
    # A space in front, or argparse would take the value -1,3 for an option.
    given = vars(parser.parse_args([re.sub(r"^-\d", r" \g<0>", word) for word in argv]))
    for name, value in given.items():
        need(value != "", f"{flag(name)} is empty: give a value, or leave it out")
    kept = read_config(parser, given["resume"]) if "resume" in given else {}
    o = Options(**(kept | given))
    defaults = MODELS[o.model] | METHODS[o.method] | dict(stages=[world])
    if o.model == "tiny":
        defaults |= TINY.get(o.method, {})
    defaults["routing"] = "skippipe" if o.skip else "random"
    for name, value in defaults.items():
        if getattr(o, name) is None:
            setattr(o, name, value)
    if not o.name:
        sizes = "x".join(str(size) for size in o.stages)
        o.name = f"{o.method}-{sizes}-{time.strftime('%Y%m%d-%H%M%S')}"
    check(o, given)
    return o


def options_of(argv, world, Options=Options):
    """As `parse`: {name: value}."""
    return vars(parse(argv, world, Options))


def read_config(parser, folder):
    """{name: value} of a run's config.json, parsed like a command line. Raises BadInput."""
    words = []
    try:
        for name, value in json.loads(Path(folder, "config.json").read_text()).items():
            text = ",".join(map(str, value)) if isinstance(value, list) else value
            if value is not None and value is not False:
                words.append(flag(name) if value is True else f"{flag(name)}={text}")
        kept, _ = parser.parse_known_args(words)        # survive/ has options that train.py has not
        need({"method", "model", "stages"} <= set(vars(kept)), "it is of no run")
        return vars(kept)
    except (OSError, ValueError, AttributeError, BadInput) as error:
        raise BadInput(f"{folder}: no readable config.json there: {error}: mend or remove it")


def check(o, given):
    """Raise BadInput for options that are out of range, do not go together, or would do nothing."""
    for name in given:
        need(name not in METHODS["noloco"] or name in METHODS[o.method],
             f"--method {o.method} has no {flag(name)}")
    for f in fields(o):
        value, least = getattr(o, f.name), f.metadata["least"]
        if f.type in (int, float) and value is not None:
            need(least <= value < math.inf, f"{flag(f.name)} must be at least {least}, got {value}")
    for name in ("skip", "alpha", "beta2"):
        value = getattr(o, name)
        need(value is None or value < 1, f"{flag(name)} must be below 1, got {value}")
    planned = o.routing not in ("random", "fixed")
    need(planned or not o.links, "--links is for planned paths: give --skip or --routing skippipe")
    need(planned or not o.skip, f"--skip needs a planned routing, not --routing {o.routing}")
    need(o.wire != "bf16" or o.method != "noloco",
         "--wire bf16 rounds updates of NoLoCo's theta away: give --wire int8")
    need(Path(o.name).name == o.name != "..", f"--name {o.name}: takes a name without a path")


def layout(o, world):
    """stages, the ranks of each, and layers, the global layer numbers of each. Raises BadInput."""
    sizes, count = o.stages, len(o.stages)
    depths = o.layers_per_stage
    if depths is None:          # later stages first: origins also carry embedding, head and loss
        depths = [(o.layers + s) // count for s in range(count)]
    need(min(sizes) >= 1, f"--stages {sizes}: every stage needs a replica")
    need(sum(sizes) == world,
         f"--stages needs {sum(sizes)} processes but got {world} (--nproc-per-node)")
    need(len(depths) == count and min(depths) >= 1 and sum(depths) == o.layers,
         f"{count} stages must share {o.layers} layers, at least one each; got {depths}")
    need(not o.skip or count >= 3 and stages_to_keep(o.skip, sizes) >= 1,
         f"--skip needs at least 3 stages and must keep one; got {count} and {o.skip}")
    least = -(-max(sizes) // sizes[0])
    need(o.microbatches >= least, f"replicas would be idle: give --microbatches {least} or more")
    return cuts(sizes), cuts(depths)


def cuts(parts):
    """[2, 3] -> [[0, 1], [2, 3, 4]]"""
    return [list(range(end - n, end)) for n, end in zip(parts, accumulate(parts))]


# ---------------------------------------------------------------- data

HELDOUT = r"(^|[^a-z])val(id|idation)?([^a-z]|$)"       # in the name of a held-out file
ENDS = ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]"]   # what may end a document


@dataclass
class Corpus:
    train: list             # tensors of tokens (1-D, any integer type)
    heldout: torch.Tensor
    digest: str             # losses compare only between runs with the same
    bytes_per_token: float  # None of token files
    end: int                # the token that ends a document; None of token files


def load_corpus(o):
    """Training and held-out tokens from disjoint files; of a single file the end is held out.

    Text is read and tokenised here, token files are mapped into memory. Raises BadInput.
    """
    root, files = find_files(o.data)
    train_files, held_files = split(root, files)
    if files[0].suffix == ".bin":
        sizes = [(path.name, path.stat().st_size) for path in files]
        digest = hashlib.sha256(str(sizes).encode())
        train, held = map_tokens(train_files), map_tokens(held_files)
        per_token = end = None
    else:
        encode, size, end = load_tokenizer(o.tokenizer)
        need(size <= o.vocab, f"this tokenizer needs --vocab {size}, not {o.vocab} (bytes: 256)")
        digest = hashlib.sha256(Path(o.tokenizer).read_bytes() if o.tokenizer else b"")
        train = read_texts(train_files, encode, digest)
        held = read_texts(held_files, encode, digest)
        per_token = sum(path.stat().st_size + 1 for path in held_files) / len(held[0])
    if len(files) == 1:
        count = max(o.seq_len + 1, len(held[0]) // 20)
        train, held = [held[0][:-count]], [held[0][-count:]]
    heldout = held[0] if len(held) == 1 else torch.cat(held)
    count = (len(heldout) - 1) // o.seq_len
    need(count >= o.eval_sequences, f"{o.data} has {len(heldout)} held-out tokens, {count} "
         "sequences: give more data, or a smaller --eval-sequences or --seq-len")
    top = max(int(part[:1 << 24].int().max()) for part in [*train, heldout] if len(part))
    need(top < o.vocab, f"the data has token {top}: give --vocab {top + 1} or more, not {o.vocab}")
    return Corpus(train, heldout, digest.hexdigest()[:12], per_token, end)


def find_files(data):
    """(the folder that paths are relative to, files) of --data: all text, or all .bin."""
    if not data:
        return standard_library()
    root, files = Path(data), [Path(data)]
    if root.is_dir():
        inside = sorted(path for path in root.rglob("*") if path.is_file())
        files = [path for path in inside if "/." not in f"/{path.relative_to(root).as_posix()}"]
    readable = [path for path in files if os.access(path, os.R_OK)]
    need(files and readable == files, f"{data}: no such file, or none to read")
    binary = [path for path in files if path.suffix == ".bin"]
    need(len(binary) in (0, len(files)), f"{data} mixes .bin files with text: keep one kind there")
    empty = [path for path in files if path.stat().st_size == 0]
    need(len(empty) < len(files) and not (empty and binary), f"{(empty or files)[0]} is empty")
    return root if root.is_dir() else root.parent, files


def standard_library():
    """(its folder, its .py files): real text, on every machine, so that nobody downloads data."""
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests", "idlelib", "encodings"}
    files = []
    for top in root.iterdir():
        if top.name not in left_out:            # rglob would take seconds to list them
            files += [path for path in (top, *top.rglob("*.py")) if path.suffix == ".py"]
    files = [path for path in files if left_out.isdisjoint(path.relative_to(root).parts)]
    size = sum(path.stat().st_size for path in files)
    need(size > 5e6, f"the standard library in {root} has under 5 MB of .py text: give --data TEXT")
    return root, sorted(files)


def split(root, files):
    """(training, held-out) files. Held out are those with val or validation in their names, else a
    20th, at least one, by a hash of their names."""
    def by_hash(path):
        return hashlib.sha256(path.relative_to(root).as_posix().encode()).digest()

    held = [path for path in files if re.search(HELDOUT, path.name.lower())]
    if len(held) in (0, len(files)):
        held = sorted(files, key=by_hash)[:max(1, len(files) // 20)]
    held = set(held)
    return [path for path in files if path not in held], [path for path in files if path in held]


def map_tokens(paths):
    """The tokens of nanoGPT's .bin files, a tensor each, mapped into memory."""
    return [torch.from_file(str(path), size=path.stat().st_size // 2, dtype=torch.uint16)
            for path in paths]


def read_texts(paths, encode, digest):
    """[the tokens of these text files], all in one tensor. The digest takes in the text."""
    parts = []
    for path in paths:
        text = path.read_bytes()
        need(b"\0" not in text[:8192], f"{path} is no text file: keep text alone there, and write "
             "C4's shards as .bin files once: python -m tools.prepare FOLDER OUT")
        digest.update(text + b"\0")
        parts.append(encode(text))
    return [torch.cat(parts)] if parts else []


def load_tokenizer(file):
    """(encode, size, end): bytes -> a tensor of tokens, end last; 1 + the largest token. By default
    tokens are bytes, and a zero ends a text. Raises BadInput."""
    if not file:
        return lambda text: torch.frombuffer(bytearray(text + b"\0"), dtype=torch.uint8), 256, 0
    try:
        from tokenizers import Tokenizer
        tokenizer = Tokenizer.from_file(file)
    except ImportError:
        raise BadInput("--tokenizer needs the tokenizers package: pip install '.[hf]'")
    except Exception as error:                  # the package raises nothing narrower
        raise BadInput(f"--tokenizer {file}: {error}")
    tokenizer.encode_special_tokens = True      # a text that spells the end token goes on there
    known = [name for name in ENDS if tokenizer.token_to_id(name) is not None]
    need(known, f"--tokenizer {file}: it has no {' or '.join(ENDS)} to end a document")
    end = tokenizer.token_to_id(known[0])

    def encode(text):
        """Bytes that are no UTF-8 become replacement characters."""
        tokens = tokenizer.encode(text.decode(errors="replace"), add_special_tokens=False)
        return torch.tensor([*tokens.ids, end], dtype=torch.int32)

    return encode, 1 + max(tokenizer.get_vocab().values()), end


def heldout_sequences(corpus, count, seq_len):
    """(count, T + 1) held-out tokens, spread evenly: the same sequences for every replica."""
    last = len(corpus.heldout) - seq_len - 1
    starts = [round(i * last / max(1, count - 1)) for i in range(count)]
    return torch.stack([corpus.heldout[a:a + seq_len + 1] for a in starts]).long()


class Reader:
    """One origin's sequences, in a fresh random order each epoch; `cursor` is all its state.

    Its part is the place-th of so many of each tensor of training tokens. Raises BadInput.
    """

    def __init__(self, corpus, seq_len, seed, place=0, origins=1):
        views = []          # (sequences, T + 1): each begins with the last token of the one before
        for tokens in corpus.train:
            share = len(tokens) // origins
            part = tokens[place * share:(place + 1) * share]
            if len(part) > seq_len:
                views.append(part.unfold(0, seq_len + 1, seq_len))
        need(views, "too little data for every origin: give more, or a smaller --seq-len")
        self.sequences = ConcatDataset(views)
        self.seed = f"data {seed} {place}"
        self.cursor = 0
        self.epoch = None

    def next(self, batch):
        """(batch, T + 1) tokens: inputs and, one further, targets."""
        rows = []
        for _ in range(batch):
            epoch, place = divmod(self.cursor, len(self.sequences))
            if epoch != self.epoch:
                self.shuffle(epoch)
            rows.append(self.sequences[int(self.order[place])])
            self.cursor += 1
        return torch.stack(rows).long()

    def shuffle(self, epoch):
        """Draw the order of this epoch's sequences."""
        seed = random.Random(f"{self.seed} {epoch}").getrandbits(63)
        generator = torch.Generator().manual_seed(seed)
        self.order = torch.randperm(len(self.sequences), generator=generator)
        self.epoch = epoch


# ---------------------------------------------------------------- processes


def restarts():
    """How often torchrun has started these processes again (--max-restarts)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


class Job:
    """This process among those of the run, which tell each other small values through a store.

    nccl: whether messages travel over NCCL. leads: it prints, and writes the log. Subclasses may
    override share, collect, refuse, average, leave and close.
    """
    joining = False         # whether it takes its place in a job that is training (survive/)
    silent = 5              # seconds, before a line says for whom this process waits

    def __init__(self):
        self.rank = int(os.environ.get("RANK", 0))
        self.world = int(os.environ.get("WORLD_SIZE", 1))
        self.device = torch.device("cpu")
        self.nccl = False
        self.leads = self.rank == 0
        self.calls = Counter()      # of `share`, by name
        self.groups = {}            # process groups of replicas that `average`
        self.store = dist.HashStore()
        if self.world > 1:
            # torchrun keeps its store over a restart: nobody may read the keys from before.
            self.store = dist.PrefixStore(f"attempt{restarts()}", self.meet())

    def meet(self):
        """The store of all ranks, once all have come."""
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        line = f"rank {self.rank}: waiting for rank 0 at {place}, and all others"
        late = threading.Timer(self.silent, print, [line], dict(file=sys.stderr, flush=True))
        late.start()
        try:
            return next(iter(dist.rendezvous("env://")))[0]
        except (RuntimeError, ValueError) as error:
            sys.stderr.write(f"error: rank {self.rank}, {place}: {one_line(error)[:200]}\n")
            sys.exit(2)
        finally:
            late.cancel()

    def share(self, name, value):
        """Every rank's value, by rank. All ranks use a name equally often."""
        self.calls[name] += 1
        key = f"{name}/{self.calls[name]}"
        self.store.set(f"{key}/{self.rank}", json.dumps(value))
        texts = self.store.multi_get([f"{key}/{r}" for r in range(self.world)])
        return [json.loads(text) for text in texts]

    def collect(self, name, value):
        """{rank: its value}, which only the first rank needs."""
        return dict(enumerate(self.share(name, value)))

    def together(self, function, *args, name=None):
        """function(*args) on every rank. Bad input on any rank ends all: see `refuse`."""
        result, problem = None, ""
        try:
            result = function(*args)
        except (BadInput, OSError, ValueError) as error:
            problem = one_line(error)
        for line in self.share(f"problem/{name or function.__name__}", problem):
            if line:
                self.refuse(line)
        return result

    def agree_on(self, function, *args):
        """What function(*args) returns on the first rank, for every rank. JSON carries it."""
        def on_first_rank():
            return function(*args) if self.leads else None

        name = function.__name__
        return self.share(name, self.together(on_first_rank, name=name))[0]

    def refuse(self, line):
        """Every rank calls this: the first one prints the line, and all end with status 2."""
        if self.leads:
            tqdm.write(f"error: {line}", file=sys.stderr)
        self.share("told", "")          # the line comes first: torchrun ends all when one leaves
        self.leave()
        sys.exit(2)

    def leave(self):
        """The first rank leaves last: it may host the store."""
        self.store.set(f"left/{self.rank}", "=")
        if self.leads:
            self.store.wait([f"left/{r}" for r in range(self.world)])

    def say(self, line):
        if self.leads:
            tqdm.write(line)

    def connect(self, o, group=True):
        """NCCL where each process has a GPU of its own, else Gloo. group: whether Gloo has one."""
        gpus = torch.cuda.device_count()
        found = self.share("gpus", [gpus, int(os.environ.get("LOCAL_WORLD_SIZE", self.world))])
        enough = all(there >= ranks for there, ranks in found)
        if o.backend == "nccl" and not enough:
            self.refuse("--backend nccl: a machine has fewer GPUs than processes: use gloo")
        if gpus:
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % gpus)
            torch.cuda.set_device(self.device)
        if self.world == 1:
            return
        self.nccl = o.backend != "gloo" and enough
        if not self.nccl:
            self.meet_hosts()
        if group or self.nccl:
            # Lazily Gloo connects only pairs that talk, otherwise every pair at the start.
            os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1" if self.world > 64 else "0")
            store = dist.PrefixStore("job", self.store)
            dist.init_process_group("nccl" if self.nccl else "gloo", rank=self.rank,
                                    world_size=self.world, store=store)
            dist.barrier()              # NCCL: the first use of a group must have every rank in it

    def meet_hosts(self):
        """Refuse hosts that offer others their loopback address; share out each machine's cores."""
        machine, host = this_host()
        found = self.share("host", [machine, host, self.together(gloo_interface)])
        several = len({host for _, host, _ in found}) > 1
        for rank, (_, _, names) in enumerate(found):
            if several and names.split(",")[0] in ("lo", "lo0"):
                self.refuse(f"rank {rank} offers other hosts its loopback interface: give torchrun "
                            "node 0's address as --master-addr, or on that host export "
                            "GLOO_SOCKET_IFNAME=NAME")
        if "OMP_NUM_THREADS" not in os.environ:         # else every rank would use every core
            ranks = [there for there, _, _ in found].count(machine)
            torch.set_num_threads(max(1, torch.get_num_threads() // ranks))

    def average(self, vector, replicas, key):
        """Make the vector the mean of those of the replicas: (sum of (vector - mean)^2, how many).

        key: unique to this average (for survive/).
        """
        ranks = tuple(replicas)
        if ranks not in self.groups:
            self.groups[ranks] = dist.new_group(replicas, use_local_synchronization=True)
        return average_in(self.groups[ranks], vector, len(ranks)), len(ranks)

    def close(self):
        """At the end, when all is saved: a lost rank or store does not matter any more."""
        with contextlib.suppress(RuntimeError):
            self.leave()
            if dist.is_initialized():
                dist.barrier()
                dist.destroy_process_group()


def average_in(group, vector, count):
    """Make the vector the mean of those of `count` processes: the sum of (vector - mean)^2."""
    squares = 0.0
    for piece in vector.split(1 << 18):         # in float64: the mean of equal replicas is exact
        own = piece.double()
        mean = own.clone()
        group.allreduce([mean]).wait()
        mean /= count
        squares += float((own - mean).square().sum())
        piece.copy_(mean)
    return squares


def this_host():
    """(a text that no other machine has, one that no other host has): a network namespace is a
    host."""
    boot, network = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    if not (boot.exists() and network.exists()):            # not Linux
        return socket.gethostname(), socket.gethostname()
    return boot.read_text(), f"{boot.read_text()} {network.stat().st_ino}"


def gloo_interface():
    """The network interface of all Gloo groups, torch's own too (or several, with commas).

    GLOO_SOCKET_IFNAME names it. If unset, it becomes the one from which this host reaches
    MASTER_ADDR: torch alone would take that of the host's own name, on Debian the loopback, and
    hosts would never meet. Raises BadInput.
    """
    known = [name for _, name in socket.if_nameindex()]
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        for name in interfaces_to_master(known):
            os.environ["GLOO_SOCKET_IFNAME"] = name
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    for name in names.split(","):
        need(not name or name in known,
             f"GLOO_SOCKET_IFNAME={names}: a host has no {name}, only {', '.join(known)}")
    return names


def interfaces_to_master(known):
    """Those of the known interfaces with the address from which this host reaches MASTER_ADDR."""
    alone = os.environ.get("LOCAL_WORLD_SIZE", "") == os.environ.get("WORLD_SIZE")
    master = "127.0.0.1" if alone else os.environ.get("MASTER_ADDR", "127.0.0.1")
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((master, 1))                                  # sends nothing
        except OSError as error:
            raise BadInput(f"MASTER_ADDR={master}: {error}")
        own = socket.inet_aton(probe.getsockname()[0])
        for name in known:
            with contextlib.suppress(OSError):                          # it may have no address
                answer = fcntl.ioctl(probe, 0x8915, name.encode().ljust(40, b"\0"))  # SIOCGIFADDR
                if answer[20:24] == own:
                    found.append(name)
    return found


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
    which that one sends them, since NCCL matches so; under a planned order these two can differ.
    """
    sent = []               # by each rank to this one, in its own order
    for work in order or []:
        sent.append(deque((u, hop + 1) for u, hop in work if next_rank(chains[u], hop) == rank))
    receives = []
    for u, hop in mine:
        source = chains[u][hop - 1]                 # at hop 0 without meaning
        if hop and source != rank:
            place = sent[source].popleft() if order else (u, hop)
            receives.append((source, *place))
    return receives


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
        if what == FORWARD:
            return self.forward(u, hop, x)
        if what == BACKWARD:
            return self.backward(u, 2 * len(self.paths[u]) - hop, x)
        return self.loss_at_home(u, x)

    def forward(self, u, hop, x):
        with torch.set_grad_enabled(self.train), self.cast:
            if hop == 0:
                x = self.model.embed(self.batches[u][:, :-1])
            else:
                x.requires_grad_(self.train)
            y = self.model.blocks(x.float()).to(self.dtype)     # inside, the residuals are fp32
        if self.train:
            self.saved[u, hop] = x, y
        return y.detach()

    def loss_at_home(self, u, x):
        with torch.set_grad_enabled(self.train), self.cast:
            x.requires_grad_(self.train)
            loss = self.model.loss(x.float(), self.batches[u][:, 1:])
        self.loss = self.loss + loss.detach()
        self.home += self.message_shape[0] * self.message_shape[1]
        if self.train:
            loss.backward()
        return x.grad

    def backward(self, u, hop, gradient):
        """Undo the forward task of this hop."""
        x, y = self.saved.pop((u, hop))
        y.backward(gradient)
        self.tokens += self.message_shape[0] * self.message_shape[1]
        if (u, hop + 1) in self.sent:           # it has arrived, since its gradient is back
            work, _, peer = self.sent.pop((u, hop + 1))
            self.wait(work, peer)
        return x.grad if hop else None

    def give(self, u, hop, out):
        """To the next hop of the chain, if there is one."""
        to = next_rank(self.chains[u], hop)
        if to == self.rank:
            self.inbox[u, hop + 1] = out
        elif to is not None:
            self.sent[u, hop + 1] = self.send(out, to, u, hop + 1)

    # The messages. Gloo tells those of a pair apart by their tag.

    def connect(self, pairs):
        """Make `lane`, (source, to) -> process group. pairs: the ranks that a path may join.

        NCCL ignores tags, and runs what two ranks exchange within a group in the order posted. So
        each direction of a pair has a group of its own. All pairs connect here, in one order for
        all ranks: in training each rank would wait for the other's first message.
        """
        self.lane = lambda source, to: None             # Gloo: the default group
        if not self.job.nccl:
            return
        self.warm_up()
        up, down = dist.new_group(), dist.new_group()
        one = torch.zeros(1, device=self.device)
        for a, b in pairs:
            for group, source, to in ((up, a, b), (down, b, a)):
                if self.rank == source:
                    dist.send(one, to, group=group)
                elif self.rank == to:
                    dist.recv(one, source, group=group)
        self.lane = lambda source, to: up if source < to else down

    def warm_up(self):
        """Run each kind of task before the first message. It leaves gradients, which a step zeroes.

        CUDA loads a kernel when it is first called, and may wait until all running kernels end. A
        receive of NCCL is a running kernel: ranks would wait for each other for ever.
        """
        tokens = torch.zeros(self.message_shape[0], self.message_shape[1] + 1, dtype=torch.long,
                             device=self.device)
        for training in (True, True, False):    # the second run adds to the gradients of the first
            with torch.set_grad_enabled(training), self.cast:
                x = torch.zeros(self.message_shape, dtype=self.dtype, device=self.device)
                y = self.model.blocks(x.requires_grad_(training).float()).to(self.dtype)
                if hasattr(self.model, "lm_head"):
                    y = self.model.blocks(self.model.embed(tokens[:, :-1])).to(self.dtype)
                    y = self.model.loss(y.float(), tokens[:, 1:])
            if training:
                y.backward(torch.zeros_like(y))
        torch.cuda.synchronize()

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

    plan: dict(paths, order, makespan, network) of planned paths. first: the one that a checkpoint
    holds. stages: those that paths visit. (In survive/ plan and stages change with the dead.)
    """

    def __init__(self, job, o, pipeline, stages, kept=None):
        self.job, self.o, self.stages = job, o, stages
        self.plan = kept
        if o.routing not in ("random", "fixed") and not kept:
            network = job.together(self.network, pipeline)
            self.plan = job.agree_on(self.planned, network)
            idle = set(range(job.world)).difference(*self.plan["paths"])
            if idle:
                job.say(f"warning: ranks {sorted(idle)} get no work in this plan")
        self.first = self.plan

    def network(self, pipeline):
        """What --links tells, or what the ranks measure: the same on all of them."""
        if self.o.links:
            return read_links(self.o.links, self.stages)
        return Network(*measure(pipeline, self.stages, self.job), self.stages)

    def planned(self, network):
        """The plan. A budget of work, not of time: it depends on the network and the seed alone."""
        o = self.o
        if o.routing != "skippipe":
            training = beside(f"--routing {o.routing}", "planning.training")
            return training.plan_paths(network, o.routing, o.skip, o.microbatches, o.seed)
        rounds = rounds_of(o.microbatches, min(network.memory))
        try:
            kept = stages_to_keep(o.skip, network.stages)
            found = plan(network, kept, o.microbatches // rounds, rounds, seconds=None,
                         iterations=3000, seed=o.seed)
        except (Infeasible, Deadlock) as error:
            raise BadInput(f"--routing skippipe: {error}")
        return dict(paths=found.paths * rounds, order=found.order, makespan=found.makespan,
                    network=asdict(network))

    def at(self, step):
        """(paths, order) of a step."""
        if self.plan:
            return self.plan["paths"], self.plan["order"]
        if self.o.routing == "random":
            return random_paths(self.stages, self.o.microbatches, step, self.o.seed), None
        return full_paths(self.stages, self.o.microbatches), None


def rounds_of(microbatches, memory):
    """The fewest rounds of equally many microbatches that fit into a node's memory; else 1."""
    for rounds in range(1, microbatches):
        if microbatches % rounds == 0 and microbatches // rounds <= memory:
            return rounds
    return 1


def read_links(file, stages):
    """The Network of a JSON file: delay, compute, and what else a Network has. Rank r is the r-th
    node of its stages, which are this run's where it has none. Raises BadInput."""
    try:
        told = dict(json.loads(Path(file).read_text()))
        told.pop("names", None)
        network = Network(**(dict(stages=stages) | told))
    except (OSError, ValueError, TypeError) as error:
        raise BadInput(f"--links {file}: {one_line(error)}")
    sizes = [len(stage) for stage in network.stages]
    own = [len(stage) for stage in stages]
    need(sizes == own, f"--links {file} has stages of {sizes} nodes, this run of {own}")
    nodes = [node for stage in network.stages for node in stage]
    delay = []
    for a in nodes:
        delay.append([network.delay[a][b] for b in nodes])
    compute = [network.compute[node] for node in nodes]
    memory = [network.memory[node] for node in nodes]
    return replace(network, delay=delay, compute=compute, stages=stages, memory=memory)


def measure(pipeline, stages, job):
    """(delay, compute): seconds of a message between every two ranks of different stages, and of a
    microbatch's forward on each rank; medians of 5. In turn t ranks i and j with i + j = t meet."""
    message = torch.zeros(pipeline.message_shape, dtype=pipeline.dtype, device=pipeline.device)
    own = next(stage for stage in stages if job.rank in stage)

    def there_and_back(peer):
        for sends in (job.rank < peer, job.rank > peer):        # the lower rank sends first
            if sends:
                work, _, _ = pipeline.send(message, peer, 0, 0)
            else:
                work, _, _ = pipeline.receive(peer, 0, 0)
            pipeline.wait(work, peer)

    def forward():
        with pipeline.cast:
            pipeline.model.blocks(message.float().requires_grad_())

    def median_seconds(work):
        times = []
        for _ in range(6):                  # the first connects or compiles, and does not count
            start = time.perf_counter()
            work()
            if pipeline.device.type == "cuda":
                torch.cuda.current_stream().synchronize()
            times.append(time.perf_counter() - start)
        return sorted(times[1:])[2]

    delays = [0.0] * job.world
    for turn in range(job.world):
        peer = (turn - job.rank) % job.world
        if peer not in own:
            delays[peer] = median_seconds(lambda: there_and_back(peer)) / 2
    compute = median_seconds(forward)
    pipeline.bytes_sent = 0                             # training's bytes are counted, not these
    rows = job.share("measured", [*delays, compute])
    return [row[:-1] for row in rows], [row[-1] for row in rows]


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
    grad = run.theta.grad
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
        for optimizer in run.inner:
            for group in optimizer.param_groups:
                group["lr"] = run.lr
            optimizer.step()
    return loss, home, float(norm)


class Average:
    """Sums gradients over the replicas, for ddp. gossip/sums.py has it in fewer bytes."""
    owed = ()           # of those: what rounding left over

    def __init__(self, replicas):
        self.group = dist.new_group(replicas, use_local_synchronization=True)
        self.replicas = len(replicas)
        self.bytes_sent = 0

    def __call__(self, grad, tokens):
        """Sum grad in place. Returns the sum of tokens."""
        count = torch.tensor(float(tokens), device=grad.device)
        dist.all_reduce(count, group=self.group)
        dist.all_reduce(grad, group=self.group)
        self.bytes_sent += 2 * (self.replicas - 1) * grad.nbytes // self.replicas       # a ring's
        return float(count)


# ---------------------------------------------------------------- evaluation

SAMPLE = 1 << 16        # weights that replicas compare at an evaluation; at the end all


def shares(paths, stages):
    """rho of each stage: the share of the paths that visit it."""
    found = []
    for ranks in stages:
        visits = sum(1 for path in paths if not set(ranks).isdisjoint(path))
        found.append(visits / max(1, len(paths)))       # experiments/ may leave no path
    return found


@contextlib.contextmanager
def scaled(model, rho):
    """Stochastic depth's rule (arXiv 1603.09382): a stage that a share rho of the microbatches
    visited in training adds rho times its residuals where all visit it."""
    matrices = last_matrices(model.model.layers.values()) if rho < 1 else []
    kept = [w.clone() for w in matrices]
    for w in matrices:
        w.mul_(rho)
    yield
    for w, before in zip(matrices, kept):
        w.copy_(before)


def last_matrices(layers):
    """Those with which each residual ends: rho times the matrix makes rho times the residual."""
    found = []
    for layer in layers:
        found += [layer.self_attn.o_proj.weight.detach(), layer.mlp.down_proj.weight.detach()]
    return found


def pipelines(stages):
    """Paths through every stage that visit every rank at least once: what evaluation runs.

    The i-th goes through the i-th rank of each stage; smaller stages begin anew.
    """
    count = max(len(ranks) for ranks in stages)
    return [tuple(ranks[i % len(ranks)] for ranks in stages) for i in range(count)]


def evaluate(pipeline, stages, corpus, o):
    """Held-out loss, in nats per token, of each of this origin's pipelines (on other ranks: []).

    All pipelines read the same text. An origin with several runs one after the other.
    """
    rounds = -(-o.eval_sequences // o.batch)
    batches = []
    if corpus:
        rows = heldout_sequences(corpus, rounds * o.batch, o.seq_len).to(pipeline.device)
        batches = rows.split(o.batch)
    losses = []
    paths, origins = pipelines(stages), len(stages[0])
    for first in range(0, len(paths), origins):
        turn = paths[first:first + origins] * rounds        # at most one pipeline of each origin
        mine = [u for u, path in enumerate(turn) if path[0] == pipeline.rank]
        loss, home, _ = pipeline.run(turn, dict(zip(mine, batches)), train=False)
        if home:                                            # survive/: or all were lost
            losses.append(float(loss) / home)
    return losses


def heldout(run):
    """The losses of this origin's pipelines through all stages that paths visit."""
    rho = 1.0 if run.o.unscaled else run.rho[run.stage]
    with scaled(run.model, rho):
        return evaluate(run.pipeline, run.routes.stages, run.corpus, run.o)


def sample_of(size, seed):
    """Where in a vector of `size` weights the sample lies: the same for all ranks of a stage."""
    if size <= SAMPLE:
        return torch.arange(size)
    draw = random.Random(f"spread {seed} {size}").getrandbits(63)
    generator = torch.Generator().manual_seed(draw)
    return torch.randint(size, (SAMPLE,), generator=generator).sort().values


def compare(run, ends):
    """How far the replicas of this stage are apart: by a sample of weights, at the end by all.

    At the end also the losses of the merged model, their mean, which every rank evaluates before it
    takes its own weights back.
    """
    replicas = next(ranks for ranks in run.routes.stages if run.job.rank in ranks)
    own = run.theta.clone() if ends else run.theta[run.sample]
    mean = own.clone()
    row = dict(weights=0, squares=0.0, merged=[])
    if len(replicas) > 1:
        key = f"spread/{run.stage}/{run.step // run.o.eval_every}/{ends}"
        row["squares"], count = run.job.average(mean, replicas, key)
        row["weights"] = len(mean) if count else 0
    if ends and max(len(ranks) for ranks in run.routes.stages) > 1:
        run.theta.copy_(mean)
        row["merged"] = heldout(run)
        run.theta.copy_(own)
    return row


def weight_spread(rows, stages):
    """The root mean square distance to the mean of a stage's replicas, over all stages.

    rows: {rank: its row} of those that answered. None where one that has replicas was not compared:
    those who came in time may be just those who have averaged.
    """
    compared = []
    for ranks in stages:
        answered = [rows[r] for r in ranks if r in rows]
        if len(answered) > 1:
            compared += answered
    if not compared or min(row["weights"] for row in compared) == 0:
        return None
    squares = sum(row["squares"] for row in compared)
    return (squares / sum(row["weights"] for row in compared)) ** 0.5


# ---------------------------------------------------------------- what a run says

# What a rank counts over the whole run. A checkpoint keeps it; metrics.jsonl has the ranks' sum.
COUNTS = ("tokens", "skipped_steps", "lost_microbatches", "steps_alone", "sync_bytes",
          "pipeline_bytes")


@dataclass
class Meter:
    """What one rank has measured."""
    seconds: float = 0.0        # of training, without evaluations and checkpoints
    waited: float = 0.0         # of them, in synchronisations
    syncs: int = 0              # how many there were
    counts: dict = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    loss: float = 0.0           # summed since the last report, over `home` tokens
    home: int = 0
    norm: float = None          # of the last gradient (None: none reached this rank)
    iterations: list = field(default_factory=list)      # seconds of each since the last report
    clock: float = 0.0

    def add(self, loss, home, norm, iteration):
        """Count one step of this rank."""
        self.loss = self.loss + loss        # a tensor: read at the next report, not at every step
        self.home += home
        self.counts["tokens"] += home
        self.iterations.append(iteration)
        self.norm = norm
        if norm is not None and not math.isfinite(norm):
            self.counts["skipped_steps"] += 1

    def add_sync(self, seconds):
        """Count an outer step or an all-reduce that held this rank for so long."""
        self.waited += seconds
        self.syncs += 1

    def pause(self):
        """Evaluations and checkpoints do not count towards `seconds`."""
        self.seconds += time.perf_counter() - self.clock

    def go_on(self):
        self.clock = time.perf_counter()

    def take_row(self, losses):
        """The numbers since the last report, which begin anew here. losses: of this evaluation."""
        row = dict(loss=float(self.loss), home=self.home, heldout=losses, norm=self.norm,
                   waited=self.waited, syncs=self.syncs,
                   iteration=statistics.median_high(self.iterations))
        self.loss, self.home, self.iterations = 0.0, 0, []
        return row


def counts(run):
    """This rank's COUNTS: its meter's, and what the parts have counted since this process began."""
    found = dict(run.meter.counts)
    found["lost_microbatches"] += run.pipeline.lost
    found["pipeline_bytes"] += run.pipeline.bytes_sent
    for part in (run.outer, run.average):
        if part:
            found["sync_bytes"] += part.bytes_sent
            found["steps_alone"] += getattr(part, "alone", 0)       # of survive/
    return found


# How the first rank says a number of metrics.jsonl: at each evaluation, and at the end.
STEP = dict(
    heldout_loss="held-out {:.4f}", train_loss="train {:.4f}", tokens_per_second="{:.0f} tokens/s",
    weight_spread="weight spread {:.2e}", iteration_seconds="iteration {:.4g} s",
    simulated_seconds="simulated {:.4g} s", ranks="{} ranks")
LAST = dict(
    heldout_loss="held-out loss   {:.4f} nats per token",
    heldout_nats_per_byte="                {:.4f} nats per byte",
    perplexity="                {:.3f} perplexity per token",
    merged_loss="merged model    {:.4f} nats per token: one model, the mean of all replicas",
    merged_nats_per_byte="                {:.4f} nats per byte",
    weight_spread="weight spread   {:.3e} over a stage's replicas, after an outer step if due",
    sync_bytes="bytes sent      {:,} to synchronise, all ranks",
    pipeline_bytes="bytes sent      {:,} in the pipeline, all ranks",
    seconds="training        {:.0f} s, without evaluations",
    held="                {:.1%} of it held by synchronisation, mean over ranks",
    skipped_steps="skipped         {} optimizer steps with a gradient that was not finite",
    lost_microbatches="lost            {} microbatches with ranks that died",
    steps_alone="alone           {} outer steps that a replica did without any partner")


def in_words(line, words):
    """What was measured. Zeros are left out, but for a spread: replicas may be equal."""
    told = []
    for key, text in words.items():
        if line[key] or (key == "weight_spread" and line[key] == 0):
            told.append(text.format(line[key]))
    return told


def report(run, row, ends):
    """One line of metrics.jsonl, and one on the screen, from every rank's row."""
    rows = run.job.collect(f"row/{run.step // run.o.eval_every}/{ends}", row | counts(run))
    if not run.job.leads:
        return
    run.latest |= rows
    line = line_of(run, rows, list(run.latest.values()))
    with open(run.folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")
    told = [f"step {run.step}: {', '.join(in_words(line, STEP))}"]
    if ends:
        need(math.isfinite(line["heldout_loss"] or 0),
             f"the held-out loss at step {run.step} is not finite: give a smaller --lr")
        told += in_words(line, LAST)
        told.append(f"kept in {run.folder}; a picture: python -m tools.plot {run.folder}")
    run.bar.write("\n".join(told), file=sys.stdout)


def line_of(run, rows, latest):
    """A line of metrics.jsonl. rows: {rank: its row} of those that answered; latest: of all."""
    seconds = run.meter.seconds
    now = rows.values()
    home = sum(row["home"] for row in now)
    waited = sum(row["waited"] for row in latest)
    syncs = sum(row["syncs"] for row in latest)
    losses = [loss for row in now for loss in row["heldout"]]
    heldout = mean(losses)
    norms = [row["norm"] for row in now if row["norm"] is not None]
    spread = weight_spread(rows, run.stages)
    merged = mean([loss for row in now for loss in row["merged"]])
    if spread is None:          # a mean over some of the replicas is no model that anybody keeps
        merged = None
    totals = {key: sum(row[key] for row in latest) for key in COUNTS}
    return dict(
        step=run.step, seconds=seconds, lr=run.lr, ranks=len(rows), corpus=run.corpus.digest,
        train_loss=sum(row["loss"] for row in now) / home if home else None, heldout_loss=heldout,
        heldout_min=min(losses, default=None), heldout_max=max(losses, default=None),
        perplexity=None if heldout is None else math.exp(min(heldout, 700)),
        heldout_nats_per_byte=per_byte(heldout, run.corpus),
        merged_loss=merged, merged_nats_per_byte=per_byte(merged, run.corpus),
        weight_spread=spread, gradient_norm=mean(norms),
        held=waited / len(latest) / seconds, sync_seconds=waited / syncs if syncs else None,
        iteration_seconds=max(row["iteration"] for row in now),
        simulated_seconds=run.routes.plan and run.routes.plan["makespan"],
        tokens_per_second=totals["tokens"] / seconds, **totals)


def mean(numbers):
    """None of no numbers: no pipeline could be evaluated, or no gradient came."""
    return statistics.fmean(numbers) if numbers else None


def per_byte(loss, corpus):
    """Nats per byte of the held-out text; None where only tokens are known."""
    return loss / corpus.bytes_per_token if loss and corpus.bytes_per_token else None


# ---------------------------------------------------------------- checkpoints


@contextlib.contextmanager
def atomic(path):
    """The file, open to write bytes; it changes as a whole or not at all."""
    half = Path(f"{path}.tmp")
    try:
        with open(half, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(half, path)
    finally:
        half.unlink(missing_ok=True)            # it is there only after an error


def write_text(path, text):
    with atomic(path) as file:
        file.write(text.encode())


class Checkpoints:
    """Every rank writes its own part, runs/NAME/checkpoints/00000600/rank3.pt, on its own machine
    or in a folder for all. Subclasses may override parts, save, forget and load."""

    def __init__(self, job, folder):
        self.job, self.folder = job, folder / "checkpoints"

    def place(self, step):
        return self.folder / f"{step:08d}"

    def parts(self):
        """{step: file} of this rank's parts here, in order."""
        found = sorted(self.folder.glob(f"*/rank{self.job.rank}.pt"))
        return {int(file.parent.name): file for file in found}

    def then(self):
        """How to go on with this run, in words."""
        if self.parts() or self.job.joining:
            return f"go on with --resume {self.folder.parent}"
        return f"nothing is kept yet: remove {self.folder.parent}"

    def save(self, step, state):
        """Write this rank's part. When all ranks have, drop all parts but the last two."""
        self.job.together(self.write, step, state)
        self.forget(list(self.parts())[:-2])

    def write(self, step, state):
        """Raises BadInput without room, or without leave, to write."""
        place = self.place(step)
        try:
            place.mkdir(parents=True, exist_ok=True)
            with atomic(place / f"rank{self.job.rank}.pt") as file:
                torch.save(state, file)
        except (OSError, RuntimeError) as error:        # torch hides a full disk behind its own
            cause = one_line(error.__context__ or error)
            raise BadInput(f"cannot write the checkpoint {place}: {cause}; once that is put right, "
                           f"{self.then()}")

    def forget(self, steps):
        """Remove this rank's parts of these steps."""
        for step in steps:
            (self.place(step) / f"rank{self.job.rank}.pt").unlink(missing_ok=True)
            with contextlib.suppress(OSError):          # the last rank to leave takes the folder
                self.place(step).rmdir()

    def load(self):
        """This rank's part of the newest step of which all ranks hold a sound part.

        Newer parts are removed: training passes there again. None after a restart without any.
        """
        sound = {}
        for step, file in self.parts().items():
            try:
                sound[step] = load_part(file)
            except BadInput as error:
                tqdm.write(f"warning: {error}", file=sys.stderr)
        held = self.job.share("sound", list(sound))
        step = max(set.intersection(*map(set, held)), default=-1)
        if step < 0 and not restarts():
            self.job.refuse(f"{self.folder.parent} has no checkpoint that all {self.job.world} "
                            "ranks hold: bring the missing parts here, or remove it")
        self.forget([newer for newer in self.parts() if newer > step])
        return sound.get(step)


def load_part(file):
    """A part, mapped into memory. Raises BadInput if it is damaged, or not what its name says."""
    try:
        with zipfile.ZipFile(file) as parts:
            need(not parts.testzip(), "wrong checksum")         # torch compares none
        state = torch.load(file, weights_only=True, mmap=True, map_location="cpu")
        own = f"{state['step']:08d}/rank{state['rank']}.pt"
        need(file.as_posix().endswith(f"/{own}"), f"it was written as {own}")
        need(state["theta"].sum().isfinite(), "its weights are not finite")
        return state
    except Exception as error:      # damaged bytes make torch raise nearly anything
        raise BadInput(f"{file} is damaged or of another version ({one_line(error)[:100]})")


def state_of(run):
    """What a rank's part of a checkpoint holds."""
    meter = {f.name: getattr(run.meter, f.name) for f in fields(Meter)}
    meter |= dict(loss=float(run.meter.loss), counts=counts(run), iterations=[])
    return dict(step=run.step, rank=run.job.rank, theta=run.theta, rho=run.rho,
                options={name: getattr(run.o, name) for name in LAYOUT},
                plan=run.routes.first, cursor=run.cursor,
                inner=[optimizer.state_dict()["state"] for optimizer in run.inner],
                outer=run.outer and run.outer.state_dict(), owed=run.average and run.average.owed,
                meter=meter, corpus=run.corpus and run.corpus.digest)


def need_same(o, state):
    """Raises BadInput if the checkpoint is of other options."""
    for name, was in state["options"].items():
        now = getattr(o, name)
        need(now == was, f"{flag(name)} {now} differs from {o.resume}'s {was}: drop it")


def restore(run, state):
    """Put what `state_of` returned into the run, but for the plan. Raises BadInput."""
    need(not run.corpus or state["corpus"] == run.corpus.digest,
         f"the data differ from those of {run.folder}: give the same --data or start a new run")
    need_same(run.o, state)
    need(len(state["theta"]) == len(run.theta), f"{run.folder} is of other weights: begin anew")
    run.step, run.rho, run.cursor = state["step"], state["rho"], state["cursor"]
    run.theta.copy_(state["theta"])
    for optimizer, kept in zip(run.inner, state["inner"]):
        # A copy, since the state is mapped from a file. Settings may be new, as --beta2.
        optimizer.load_state_dict(dict(optimizer.state_dict(), state=copy.deepcopy(kept)))
    run.meter = Meter(**state["meter"])
    if run.outer:
        run.outer.load_state_dict(state["outer"])
        run.meter.counts["sync_bytes"] -= run.outer.bytes_sent          # `counts` adds them
    if run.average:
        run.average.owed = state["owed"]
    if run.reader:
        run.reader.cursor = run.cursor


# ---------------------------------------------------------------- a run


@dataclass
class Run:
    """One rank's share of a run: `build` makes the parts, `train` uses them."""
    job: Job                # this process among those of the run
    o: Options
    stages: list            # the ranks of each stage
    stage: int              # this rank's own
    corpus: Corpus          # the data (None on a rank that is no origin)
    reader: Reader          # of this origin's part of the data (None likewise)
    model: Llama            # the layers of this rank's stage
    theta: torch.Tensor     # all its parameters, in one vector; theta.grad: their gradients
    inner: list             # the inner optimizers: Adam, or Muon and Adam
    average: object         # of gradients over the stage's replicas, for ddp; else None
    pipeline: Pipeline
    folder: Path            # runs/NAME
    sample: torch.Tensor    # where in theta the weights lie that evaluations compare
    checkpoints: Checkpoints
    outer: object = None    # the outer optimizer; None for ddp and local
    routes: Routes = None
    meter: Meter = field(default_factory=Meter)
    latest: dict = field(default_factory=dict)      # {rank: its last row for the log}
    bar: tqdm = None
    step: int = 0           # inner steps done
    cursor: int = 0         # the reader's, after those steps
    lr: float = 0.0         # of the last step
    rho: list = None        # of each stage, by the last step's paths


def config_of(o):
    """Of the whole model. Raises ValueError."""
    return Config(o.vocab, o.hidden, o.mlp, o.layers, o.heads, o.heads)


def make_model(o, layers, stage, device):
    """(the model of this stage, its parameters in one vector whose .grad has their gradients)."""
    model = Llama(config_of(o), layers[stage], ends=stage == 0, seed=o.seed, device=device)
    theta = flatten(model.parameters())
    theta.grad = flat_gradient(model, theta)
    return model, theta


def flat_gradient(model, theta):
    """A vector like theta, of which the parameters' gradients are views."""
    grad = torch.zeros_like(theta)
    for p in model.parameters():
        start = (p.data_ptr() - theta.data_ptr()) // 4
        p.grad = grad[start:start + p.numel()].view(p.shape)
    return grad


def load_data(o, rank, origins):
    """(corpus, reader of this origin's part); (None, None) on other ranks."""
    if rank not in origins:
        return None, None
    corpus = load_corpus(o)
    return corpus, Reader(corpus, o.seq_len, o.seed, origins.index(rank), len(origins))


def make_inner(o, model, theta):
    """The inner optimizers."""
    if o.optimizer == "muon":
        return beside("--optimizer muon", "gossip.muon").muon(model, o.beta2)
    return [torch.optim.Adam([theta], betas=(0.9, o.beta2), fused=True)]


def make_outer(run):
    """The outer optimizer of this rank's stage; None for ddp and local. Raises BadInput."""
    o, replicas = run.o, run.stages[run.stage]
    settings = dict(inner_steps=o.inner_steps, alpha=o.alpha, beta=o.beta)
    if o.method == "noloco":
        settings.update(gamma=o.gamma, group_size=o.group_size, seed=o.seed)
    if o.method in ("ddp", "local"):
        return None
    if o.wire != "fp32" or o.delay or o.fragments > 1:
        gossip = beside("--wire, --delay and --fragments", "gossip")
        wire = o.wire if len(replicas) > 1 else "fp32"
        return gossip.outer_optimizer(o.method, wire, o.delay, run.model.parameters(), replicas,
                                      theta=run.theta, fragments=o.fragments, **settings)
    kind = NoLoCo if o.method == "noloco" else DiLoCo
    return kind(run.theta, replicas, **settings)


def make_average(o, replicas):
    """What sums the gradients of ddp over the replicas; None for other methods, and one replica."""
    if o.method != "ddp" or len(replicas) == 1:
        return None
    if o.wire != "fp32":
        sums = beside("--wire", "gossip.sums")
        return sums.Average(sums.SUMS[o.wire], replicas)
    return Average(replicas)


def build(job, o, Pipeline=Pipeline, Routes=Routes, Checkpoints=Checkpoints,
          make_outer=make_outer):
    """This rank's share of the run. survive/, tools/ and experiments/ bring parts of their own."""
    stages, layers = job.together(layout, o, job.world)
    stage = next(s for s, ranks in enumerate(stages) if job.rank in ranks)
    corpus, reader = job.together(load_data, o, job.rank, stages[0])
    model, theta = job.together(make_model, o, layers, stage, job.device)
    inner = job.together(make_inner, o, model, theta)
    average = job.together(make_average, o, stages[stage])
    shape = o.batch, o.seq_len, o.hidden
    pipeline = Pipeline(model, job, stages, shape, getattr(torch, o.dtype))
    folder = Path(o.resume) if o.resume else Path("runs", o.name)
    run = Run(job, o, stages, stage, corpus, reader, model, theta, inner, average, pipeline, folder,
              sample_of(len(theta), o.seed), Checkpoints(job, folder))
    run.outer = job.together(make_outer, run)
    state = run.checkpoints.load() if o.resume or restarts() else None
    if state:
        job.together(restore, run, state)
    run.routes = Routes(job, o, pipeline, stages, state and state["plan"])
    return run


def begin(run):
    """On the first rank, write config.json and plan.json, and keep the lines of metrics.jsonl up to
    this step: training writes the later ones again. Raises BadInput if the folder is taken."""
    o, config = run.o, run.folder / "config.json"
    again = o.resume or restarts()
    need(again or not run.folder.exists(),
         f"{run.folder} exists: {run.checkpoints.then()}, or give another --name")
    run.folder.mkdir(parents=True, exist_ok=bool(again))    # the second of two at once fails here
    was = json.loads(config.read_text()) if config.exists() else {}
    changed = {name: [was[name], value] for name, value in vars(o).items()
               if name != "resume" and was.get(name, value) != value}
    write_text(config, json.dumps(vars(o), indent=1))
    if run.routes.first:
        made = dict(by="train.py", routing=o.routing, skip=o.skip, seed=o.seed)
        told = dict(run.routes.first, stages=run.stages, made=made)
        write_text(run.folder / "plan.json", json.dumps(told))
    kept = []
    log = run.folder / "metrics.jsonl"
    for line in log.read_text(errors="replace").splitlines() if log.exists() else []:
        with contextlib.suppress(ValueError, KeyError):     # a crash may have cut the last one
            if json.loads(line)["step"] <= run.step:
                kept.append(line + "\n")
    if changed:
        kept.append(json.dumps(dict(event="changed", step=run.step, options=changed)) + "\n")
    write_text(log, "".join(kept))
    print(f"{o.method}, stages {o.stages}, {o.routing} routing, {run.job.world} processes on "
          f"{run.job.device.type}, {o.model} model, corpus {run.corpus.digest}")
    if max(o.stages) == 1:
        print(f"no other replicas: nothing is synchronised, {o.method} trains one model alone")
    elif o.method == "noloco":
        most = max(len(random_groups(ranks, o.group_size, 0, 0)[0]) for ranks in run.stages)
        if most > o.group_size:
            print(f"up to {most} replicas meet: they do not divide into groups of {o.group_size}")
    for name, (was, now) in changed.items():
        print(f"{flag(name)} {now}, was {was}")
    print(f"{run.folder}, from step {run.step}", flush=True)


def train(run):
    """Make all steps that are left."""
    o, job, outer = run.o, run.job, run.outer
    if run.step >= o.steps and not job.joining:
        job.say(f"{run.folder} has done all its {run.step} steps: give more --steps to go on")
        return job.close()
    job.agree_on(begin, run)
    run.bar = tqdm(total=o.steps, initial=run.step, disable=not job.leads, unit="step",
                   dynamic_ncols=True, leave=False)
    run.meter.go_on()
    while run.step < o.steps:
        before = run.step

        # Forward and backward along this step's paths, and the inner optimizer's step.
        paths, order = run.routes.at(run.step)
        mine = [u for u, path in enumerate(paths) if path[0] == job.rank]
        batches = {u: run.reader.next(o.batch).to(job.device) for u in mine}
        run.lr = schedule(run.step, o)
        loss, home, norm = inner_step(run, batches, paths, order)
        run.meter.add(loss, home, norm, run.pipeline.seconds)
        run.step += 1
        run.cursor = run.reader and run.reader.cursor
        run.rho = shares(paths, run.stages)

        # The outer step, every m-th time (N1 to N3).
        if outer:
            start = time.perf_counter()
            if outer.step():
                run.meter.add_sync(time.perf_counter() - start)
            run.step = min(outer.steps, o.steps)    # survive/: a late replica leaps over steps
            outer.steps = run.step

        if run.step % 10 == 0:
            run.bar.set_postfix_str(f"loss {float(loss) / max(1, home):.3f}", refresh=False)
        run.bar.update(run.step - run.bar.n)
        between_steps(run, before)
    if outer:
        outer.settle()
    run.bar.close()
    job.close()


def between_steps(run, before):
    """Evaluate, save and report, as far as due since step `before`. It does not count as training.

    The checkpoint is written before ranks wait to compare weights and report.
    """
    o = run.o
    ends = run.step == o.steps
    evaluates = ends or run.step // o.eval_every > before // o.eval_every
    saves = ends or run.step // o.save_every > before // o.save_every
    if not (evaluates or saves):
        return
    run.meter.pause()
    if evaluates:
        row = run.meter.take_row(heldout(run))
    if saves:
        run.checkpoints.save(run.step, state_of(run))
    if evaluates:
        report(run, row | compare(run, ends), ends)
    run.meter.go_on()


BROKEN = "Connection ", "Broken pipe", "ncclRemoteError"        # in the errors of a lost peer


@contextlib.contextmanager
def in_one_line(run):
    """Around training: it ends with one line of one rank, or a traceback of an unknown cause."""
    then = run.checkpoints.then
    try:
        yield
    except KeyboardInterrupt:
        status, line = 130, f"stopped at step {run.step}; {then()}"
    except BadInput as error:
        status, line = 2, f"error: {error}"
    except OSError as error:                                    # most often a full disk
        status, line = 2, f"error: {one_line(error)}; once that is put right, {then()}"
    except RuntimeError as error:
        if not any(words in str(error) for words in BROKEN):
            raise
        status = 2
        line = f"stopped: rank {run.job.rank} at step {run.step}: another process is gone; {then()}"
    else:
        return
    if run.bar:
        run.bar.close()
    with contextlib.suppress(RuntimeError):                     # of a lost store
        if run.job.store.add("stopped", 1) > 1:
            sys.exit(status)
    print(line, file=sys.stderr, flush=True)
    sys.exit(status)


def main(argv=None):
    """argv: the command line (None: sys.argv)."""
    argv = sys.argv[1:] if argv is None else argv
    job = Job()
    if not job.leads and {"-h", "--help"} & set(argv):
        sys.exit(0)
    o = Options(**job.agree_on(options_of, argv, job.world))
    job.connect(o)
    run = build(job, o)
    with in_one_line(run):
        train(run)


if __name__ == "__main__":
    main()
