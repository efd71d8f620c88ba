"""The tokens of a run, from text or from nanoGPT's token files, and an origin's own part of them.

`load_data` is what a trainer calls; tools/prepare.py writes token files. Only the split of the data depends
on the number of origins.
"""
import hashlib
import os
import random
import re
import sysconfig
from bisect import bisect
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path

import torch

from plumbing.huggingface import named_end
from plumbing.processes import BadInput

ENDS = ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]"]       # of a tokenizer that names none
HELDOUT = r"(^|[^a-z])val(id|idation)?([^a-z]|$)"       # in a name: nanoGPT's val.bin, C4's c4-validation.*


@dataclass
class Corpus:
    train: list             # tensors of tokens (1-D, any integer type)
    heldout: torch.Tensor
    digest: str             # losses compare only between runs with the same
    bytes_per_token: float  # of the held-out part (one file: of the file); None when only tokens are known
    end: int                # id of the token that ends a document; None when unknown
    undecodable: int        # bytes of text that are no UTF-8, for a tokenizer that needs it


def load_data(o, place, origins):
    """(corpus, reader): the data, and the sequences of origin number `place` of `origins`, its own part.

    o: data, tokenizer, vocab, seq_len, batch, eval_sequences, init_from and seed. Raises BadInput.
    """
    corpus, parts = load_corpus(o), []
    for tokens in corpus.train:
        share = len(tokens) // origins
        parts.append(tokens[place * share:(place + 1) * share])
    return corpus, Reader(parts, o.seq_len, f"data {o.seed} {place}")


def load_corpus(o):
    """Training and held-out tokens, from disjoint files; from one file, disjoint ranges. Raises BadInput.

    Text is read and tokenised here; token files are mapped into memory.
    """
    root, files, kind = find_files(o.data)
    if kind == "C4":
        raise BadInput(f"--data {o.data}: training reads text and .bin files; write these shards as .bin "
                       f"files once: python -m tools.prepare {o.data} FOLDER")
    tokenizer = load_tokenizer(o.tokenizer)
    check_vocabulary(tokenizer, kind, o)
    digest = hashlib.sha256(Path(o.tokenizer).read_bytes() if o.tokenizer else b"")
    if kind == "bin":           # too large to read for this
        digest.update(str([(p.relative_to(root).as_posix(), p.stat().st_size) for p in files]).encode())

    def read(paths):
        return ([mapped(p) for p in paths], None) if kind == "bin" else tokenise(paths, tokenizer, digest)

    try:
        (train, _), (held, size) = map(read, split(root, files, named=bool(o.data)))
    except (OSError, RuntimeError) as error:
        raise BadInput(f"--data {o.data}: {error}")
    per_token = size and size / sum(map(len, held))
    if len(files) == 1:
        (whole,), cut = held, -max(o.seq_len + 1, len(held[0]) // 20)
        train, held = [whole[:cut]], [whole[cut:]]
    needed = (o.eval_sequences + o.batch) * o.seq_len + 1
    heldout = held[0] if len(held) == 1 else torch.cat([part[:needed] for part in held])
    check_tokens(heldout, train if kind == "bin" else [], o)
    end = tokenizer.end if o.tokenizer or kind == "text" else None
    return Corpus(train, heldout, digest.hexdigest()[:12], per_token, end, tokenizer.undecodable)


def heldout_sequences(corpus, count, seq_len):
    """(count, T + 1) held-out tokens, spread evenly: the same sequences for every replica."""
    last = len(corpus.heldout) - seq_len - 1
    starts = [round(i * last / max(1, count - 1)) for i in range(count)]
    return torch.stack([corpus.heldout[a:a + seq_len + 1] for a in starts]).long()


# ---- files


def find_files(data):
    """(the folder that paths are relative to, files, bin, C4 or text) of --data, else the standard library.

    Raises BadInput without a file, and for files of several kinds.
    """
    root, files = (Path(data), [Path(data)]) if data else standard_library()
    if root.is_dir() and data:
        inside = sorted(p for p in root.rglob("*") if p.is_file())
        files = [p for p in inside if not any(part.startswith(".") for part in p.relative_to(root).parts)]
    if not files or not all(p.is_file() for p in files):
        raise BadInput(f"{data}: no such file, or a folder without files")
    kinds = {"bin" if p.suffix == ".bin" else "C4" if p.name.endswith(".json.gz") else "text" for p in files}
    if len(kinds) > 1:
        raise BadInput(f"{data} mixes {' and '.join(sorted(kinds))} files: keep one kind in a folder")
    return root, files, kinds.pop()


def standard_library():
    """The .py files of the running Python's own library: real text, on every machine, nothing to download."""
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests", "idlelib",       # not its own
                "encodings"}                                                        # near-duplicate tables
    files = []
    for folder, inner, names in os.walk(root):      # what is left out is not even listed: it can take seconds
        inner[:] = [name for name in inner if name not in left_out]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    if sum(p.stat().st_size for p in files) < 5e6:
        raise BadInput(f"the standard library in {root} has under 5 MB of .py text: give --data TEXT")
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
    if b"\0" in text[:8192]:
        raise BadInput(f"{path} is no text file: its first bytes include a zero; keep text alone in --data")
    return text


def mapped(path):
    """The tokens of a .bin file: uint16 and nothing else."""
    return torch.from_file(str(path), size=path.stat().st_size // 2, dtype=torch.uint16)


# ---- tokens


class ByteTokenizer:
    """A text's tokens are its bytes; a zero byte ends it."""

    size, end, undecodable = 256, 0, 0

    def encode(self, texts):
        """Texts, as bytes -> a 1-D tensor of each one's tokens, the end token last."""
        return [torch.frombuffer(bytearray(text + b"\0"), dtype=torch.uint8) for text in texts]


class FileTokenizer:
    """A Hugging Face tokenizer.json. size: 1 + the largest id; end: id of the token that ends a document.

    undecodable: bytes so far that were no UTF-8; each run of them became a replacement character.
    """

    def __init__(self, file):
        from tokenizers import Tokenizer
        self.inner = Tokenizer.from_file(file)
        self.inner.encode_special_tokens = True     # a text that spells the end token does not end there
        self.size = max(self.inner.get_vocab().values(), default=0) + 1
        self.undecodable = 0
        names = [named] if (named := named_end(file)) else ENDS
        self.end = next((i for i in map(self.inner.token_to_id, names) if i is not None), None)
        if self.end is None:
            raise ValueError(f"it has no {' or '.join(names)} to end a document: name its eos_token in a "
                             "tokenizer_config.json beside it")

    def encode(self, texts):
        found = self.inner.encode_batch_fast([self.decode(text) for text in texts], add_special_tokens=False)
        return [torch.tensor([*tokens.ids, self.end], dtype=torch.int32) for tokens in found]

    def decode(self, text):
        try:
            return text.decode()
        except UnicodeDecodeError:
            self.undecodable += len(text) - len(text.decode(errors="ignore").encode())
            return text.decode(errors="replace")


def load_tokenizer(file):
    """The tokenizer of --tokenizer, by default bytes. Raises BadInput."""
    try:
        return FileTokenizer(file) if file else ByteTokenizer()
    except ImportError:
        raise BadInput("--tokenizer needs the tokenizers package: pip install '.[hf]'")
    except Exception as error:          # the package raises nothing narrower
        raise BadInput(f"--tokenizer {file}: {error}")


def tokenise(paths, tokenizer, digest):
    """([the tokens of these files, in one tensor], the bytes of their text, with one for each end)."""
    texts, size = map(read_text, paths), 0
    parts = [torch.empty(0, dtype=torch.uint8)]
    while some := list(islice(texts, 100)):
        for text in some:
            digest.update(text + b"\0")
            size += len(text) + 1
        parts += tokenizer.encode(some)
    return [torch.cat(parts)], size


def check_vocabulary(tokenizer, kind, o):
    """Raise BadInput where the model lacks the tokenizer's tokens."""
    if o.tokenizer and tokenizer.size > o.vocab:
        raise BadInput(f"{o.tokenizer} has {tokenizer.size} tokens, the model {o.vocab}: "
                       f"give --vocab {tokenizer.size}")
    if kind == "text" and not o.tokenizer and (o.vocab < 256 or o.init_from and o.vocab > 256):
        give = f": give --tokenizer {o.init_from}/tokenizer.json" if o.init_from else ""
        raise BadInput(f"bytes need a vocabulary of 256, the model has {o.vocab}" + give)


def check_tokens(heldout, mapped, o):
    """Raise BadInput without a held-out sequence, or for tokens of mapped files beyond the vocabulary."""
    if len(heldout) < o.seq_len + 1:
        raise BadInput(f"the held-out data has {len(heldout)} tokens, fewer than one sequence of "
                       f"{o.seq_len} + 1: more data or a smaller --seq-len")
    starts = [part[:1 << 24] for part in (*mapped, heldout) if len(part)]       # 16M of each file must do
    top = max(int(start.to(torch.int32).max()) for start in starts)
    if mapped and top >= o.vocab:
        raise BadInput(f"the data has token {top}, the model a vocabulary of {o.vocab}: "
                       f"give --vocab {top + 1} or more")


class Reader:
    """Sequences of one origin's part of the tokens in memory or mapped, in a fresh random order each epoch.

    `cursor`, the sequences read, is all its state. Raises BadInput for a part without a sequence.
    """

    def __init__(self, parts, seq_len, seed):
        self.parts, self.seq_len, self.seed = parts, seq_len, seed
        sequences = [max(0, len(part) - 1) // seq_len for part in parts]
        *self.firsts, self.count = accumulate(sequences, initial=0)     # number of each part's first sequence
        self.cursor, self.epoch = 0, None
        if self.count < 1:
            raise BadInput(f"an origin's part of the data has {sum(map(len, parts))} tokens, fewer than one "
                           f"sequence of {seq_len} + 1: more data, fewer origins or a smaller --seq-len")

    def next(self, batch):
        """(batch, T + 1) tokens: inputs and, one further, targets."""
        rows = []
        for _ in range(batch):
            epoch, place = divmod(self.cursor, self.count)
            if epoch != self.epoch:
                seed = random.Random(f"{self.seed} {epoch}").getrandbits(63)
                self.epoch = epoch
                self.order = torch.randperm(self.count, generator=torch.Generator().manual_seed(seed))
            number = int(self.order[place])
            part = bisect(self.firsts, number) - 1
            start = (number - self.firsts[part]) * self.seq_len
            rows.append(self.parts[part][start:start + self.seq_len + 1])
            self.cursor += 1
        return torch.stack(rows).long()
