"""The tokens of a run, from text or from nanoGPT's token files, and an origin's own part of them.

`load_data` is what a trainer calls; tools/prepare.py writes token files. Only the split of the data depends
on the number of origins.
"""
import hashlib
import os
import random
import re
import sysconfig
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch.utils.data import ConcatDataset

from plumbing.huggingface import named_end
from plumbing.processes import BadInput, forbid

ENDS = ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]"]       # of a tokenizer that names none
HELDOUT = r"(^|[^a-z])val(id|idation)?([^a-z]|$)"       # in a name: nanoGPT's val.bin, C4's c4-validation.*


@dataclass
class Corpus:
    train: list             # tensors of tokens (1-D, any integer type)
    heldout: torch.Tensor
    digest: str             # losses compare only between runs with the same
    bytes_per_token: float  # of the held-out part (one file: of the file); None when only tokens are known
    end: int                # id of the token that ends a document; None when unknown


def load_data(o, rank, origins):
    """(corpus, reader): the data, and the sequences of this origin's own part; (None, None) on other ranks.

    o: data, tokenizer, vocab, seq_len, batch, eval_sequences and seed. origins: ranks. Raises BadInput.
    """
    if rank not in origins:
        return None, None
    corpus = load_corpus(o)
    return corpus, reader_of(corpus, o.seq_len, o.seed, origins.index(rank), len(origins))


def reader_of(corpus, seq_len, seed, place, origins):
    """The reader of the part of the training tokens that the place-th of so many origins has."""
    shares = [len(tokens) // origins for tokens in corpus.train]
    parts = [tokens[place * n:(place + 1) * n] for tokens, n in zip(corpus.train, shares)]
    return Reader(parts, seq_len, f"data {seed} {place}")


def load_corpus(o):
    """Training and held-out tokens, from disjoint files; from one file, disjoint ranges. Raises BadInput.

    Text is read and tokenised here; token files are mapped into memory.
    """
    root, files, kind = find_files(o.data)
    tokenizer, known = load_tokenizer(o.tokenizer), o.tokenizer or kind == "text"
    forbid((known and tokenizer.size > o.vocab,
            f"this tokenizer needs --vocab {tokenizer.size}, not {o.vocab} (bytes: 256)"))
    digest = hashlib.sha256(Path(o.tokenizer).read_bytes() if o.tokenizer else b"")
    if kind == "bin":           # too large to read for this
        digest.update(str([(p.relative_to(root).as_posix(), p.stat().st_size) for p in files]).encode())
    train_files, held_files = split(root, files, named=bool(o.data))
    train, held = (read(paths, kind, tokenizer, digest) for paths in (train_files, held_files))
    # a byte more for each end
    per_token = sum(p.stat().st_size + 1 for p in held_files) / sum(map(len, held)) if kind != "bin" else None
    if len(files) == 1:
        (whole,), cut = held, -max(o.seq_len + 1, len(held[0]) // 20)
        train, held = [whole[:cut]], [whole[cut:]]
    needed = (o.eval_sequences + o.batch) * o.seq_len + 1
    heldout = held[0] if len(held) == 1 else torch.cat([part[:needed] for part in held])
    # 16M tokens of each file must do
    top = max((int(part[:1 << 24].int().max()) for part in (*train, heldout) if len(part)), default=0)
    forbid(
        (len(heldout) <= o.seq_len, f"{len(heldout)} held-out tokens: give more data or a smaller --seq-len"),
        (top >= o.vocab, f"the data has token {top}: give --vocab {top + 1} or more, not {o.vocab}"))
    return Corpus(train, heldout, digest.hexdigest()[:12], per_token, tokenizer.end if known else None)


def heldout_sequences(corpus, count, seq_len):
    """(count, T + 1) held-out tokens, spread evenly: the same sequences for every replica."""
    last = len(corpus.heldout) - seq_len - 1
    starts = [round(i * last / max(1, count - 1)) for i in range(count)]
    return torch.stack([corpus.heldout[a:a + seq_len + 1] for a in starts]).long()


# ---- files


def find_files(data):
    """(the folder that paths are relative to, files, bin or text) of --data, else the standard library.

    Raises BadInput without a readable file, and for files of both kinds.
    """
    root, files = (Path(data), [Path(data)]) if data else standard_library()
    if root.is_dir() and data:
        inside = sorted(p for p in root.rglob("*") if p.is_file())
        files = [p for p in inside if not any(part.startswith(".") for part in p.relative_to(root).parts)]
    binary = {p.suffix == ".bin" for p in files}
    forbid(({os.access(p, os.R_OK) for p in files} != {True}, f"{data}: no such file, or none to read"),
           (len(binary) > 1, f"{data} mixes .bin files with text: keep one kind in a folder"))
    return root, files, "bin" if binary.pop() else "text"


def standard_library():
    """The .py files of the running Python's own library: real text, on every machine, nothing to download."""
    root = Path(sysconfig.get_paths()["stdlib"])
    # not its own, and near-duplicate tables. rglob would take seconds to list them
    left_out = {"site-packages", "dist-packages", "test", "tests", "idlelib", "encodings"}
    inside = [p for p in root.iterdir() if p.name not in left_out]
    files = [p for top in inside for p in (top, *top.rglob("*.py"))
             if p.suffix == ".py" and left_out.isdisjoint(p.relative_to(root).parts)]
    size = sum(p.stat().st_size for p in files)
    forbid((size < 5e6, f"the standard library in {root} has under 5 MB of .py text: give --data TEXT"))
    return root, sorted(files)


def split(root, files, named=True):
    """(training, held-out) files. Held out are those called val, if `named` and any, else a 20th, by hash."""
    by_hash = sorted(files, key=lambda p: hashlib.sha256(p.relative_to(root).as_posix().encode()).digest())
    by_name = [p for p in files if re.search(HELDOUT, p.name.lower())] if named else []
    held = set(by_name if 0 < len(by_name) < len(files) else by_hash[:max(1, len(files) // 20)])
    return [p for p in files if p not in held], [p for p in files if p in held]


def read_text(path):
    """The bytes of a text file. Raises BadInput for a binary one, which has a zero byte near its start."""
    text = path.read_bytes()
    forbid((b"\0" in text[:8192], f"{path} is no text file, its first bytes include a zero: keep text alone "
            "there, and write C4's shards as .bin files once: python -m tools.prepare FOLDER OUT"))
    return text


# ---- tokens


class ByteTokenizer:
    """A text's tokens are its bytes; a zero byte ends it."""

    size, end = 256, 0

    def encode(self, texts):
        """Texts, as bytes -> a 1-D tensor of each one's tokens, the end token last."""
        return [torch.frombuffer(bytearray(text + b"\0"), dtype=torch.uint8) for text in texts]


class FileTokenizer:
    """A Hugging Face tokenizer.json. size: 1 + the largest id; end: id of the token that ends a document."""

    def __init__(self, file):
        from tokenizers import Tokenizer
        self.inner = Tokenizer.from_file(file)
        self.inner.encode_special_tokens = True     # a text that spells the end token does not end there
        self.size = max(self.inner.get_vocab().values(), default=0) + 1
        names = [named] if (named := named_end(file)) else ENDS
        self.end = next((i for i in map(self.inner.token_to_id, names) if i is not None), None)
        if self.end is None:
            raise ValueError(f"it has no {' or '.join(names)} to end a document (tokenizer_config.json)")

    def encode(self, texts):
        found = self.inner.encode_batch_fast([text.decode(errors="replace") for text in texts],
                                             add_special_tokens=False)
        return [torch.tensor([*tokens.ids, self.end], dtype=torch.int32) for tokens in found]


def load_tokenizer(file):
    """The tokenizer of --tokenizer, by default bytes. Raises BadInput, ImportError without tokenizers."""
    try:
        return FileTokenizer(file) if file else ByteTokenizer()
    except ImportError:
        raise
    except Exception as error:          # the package raises nothing narrower
        raise BadInput(f"--tokenizer {file}: {error}")


def read(paths, kind, tokenizer, digest):
    """The tokens of these files: bin, a tensor each; text, all in one. digest takes in the text."""
    if kind == "bin":
        return [torch.from_file(str(p), size=p.stat().st_size // 2, dtype=torch.uint16) for p in paths]
    texts, parts = map(read_text, paths), [torch.empty(0, dtype=torch.uint8)]
    while some := list(islice(texts, 100)):
        digest.update(b"".join(text + b"\0" for text in some))
        parts += tokenizer.encode(some)
    return [torch.cat(parts)]


class Reader:
    """Sequences of one origin's part of the tokens in memory or mapped, in a fresh random order each epoch.

    `cursor`, the sequences read, is all its state. Raises BadInput for a part without a sequence.
    """

    def __init__(self, parts, seq_len, seed):
        # views, (sequences, T + 1), of which each begins with the last token of the one before
        views = [part.unfold(0, seq_len + 1, seq_len) for part in parts if len(part) > seq_len]
        forbid((not views, "too little data for every origin: give more, or a smaller --seq-len"))
        self.sequences, self.seed = ConcatDataset(views), seed
        self.cursor, self.epoch = 0, None

    def next(self, batch):
        """(batch, T + 1) tokens: inputs and, one further, targets."""
        rows = []
        for _ in range(batch):
            epoch, place = divmod(self.cursor, len(self.sequences))
            if epoch != self.epoch:
                seed = random.Random(f"{self.seed} {epoch}").getrandbits(63)
                self.epoch, generator = epoch, torch.Generator().manual_seed(seed)
                self.order = torch.randperm(len(self.sequences), generator=generator)
            rows.append(self.sequences[int(self.order[place])])
            self.cursor += 1
        return torch.stack(rows).long()
