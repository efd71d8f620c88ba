"""The tokens of a run, from text, nanoGPT's token files or C4's shards, and an origin's own part of them.

`load_data` is what a trainer calls. Nothing depends on the number of origins except how the data are split.
"""
import hashlib
import math
import os
import random
import re
import sysconfig
from bisect import bisect
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path

import torch

from plumbing.c4 import Stream, heldout_documents
from plumbing.huggingface import named_end
from plumbing.processes import BadInput

ENDS = ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]"]       # of a tokenizer that names none
HELDOUT = r"(^|[^a-z])val(id|idation)?([^a-z]|$)"       # in a name: nanoGPT's val.bin, C4's c4-validation.*


@dataclass
class Corpus:
    train: list             # tensors of tokens (1-D, any integer type), or the paths of C4 shards to stream
    heldout: torch.Tensor
    digest: str             # losses compare only between runs with the same
    bytes_per_token: float  # of the held-out part; None when only tokens are known
    encode: object          # documents, as bytes -> a tensor of tokens of each, closed by the end token
    end: int                # the end token; None when unknown
    streamed: bool
    alone: bool             # one file; of a shard some of the lines are then held out


def load_data(o, place, origins):
    """(corpus, reader): the data, and the sequences of origin number `place` of `origins`, its own part.

    o: data, tokenizer, vocab, seq_len, batch, eval_sequences, init_from and seed. Raises BadInput.
    """
    corpus = load_corpus(o)
    if corpus.streamed:
        return corpus, Stream(corpus, o.seq_len, place, origins)
    parts = []
    for tokens in corpus.train:
        share = len(tokens) // origins
        parts.append(tokens[place * share:(place + 1) * share])
    return corpus, Reader(parts, o.seq_len, f"data {o.seed} {place}")


def load_corpus(o):
    """Training data and held-out tokens, from disjoint files (one file: disjoint ranges, or lines of C4).

    Text is read and tokenised here; nanoGPT's token files are mapped; of C4 only the held-out documents that
    an evaluation uses are read.
    """
    root, files = find_files(o)
    kind = kind_of(files, o)
    encode, end = load_tokenizer(o)
    digest = hashlib.sha256(Path(o.tokenizer).read_bytes() if o.tokenizer else b"")
    if kind != "text":          # too large to read for this
        digest.update(str([(p.relative_to(root).as_posix(), p.stat().st_size) for p in files]).encode())
    needed = (o.eval_sequences + o.batch) * o.seq_len + 1
    alone = len(files) == 1
    train, held = (files, files) if alone else split(root, files, named=bool(o.data))
    try:
        if kind == "c4":
            parts, size = tokenise(heldout_documents(held, alone), encode, needed)
        elif alone:
            (whole,), size = read(files, kind, encode, digest)
            cut = max(0, len(whole) - max(o.seq_len + 1, len(whole) // 20))
            train, parts = [whole[:cut]], [whole[cut:]]
            size = size and size * (len(whole) - cut) / len(whole)
        else:
            train, _ = read(train, kind, encode, digest)
            parts, size = read(held, kind, encode, digest)
    except (OSError, RuntimeError) as error:
        raise BadInput(f"--data {o.data}: {error}")
    heldout = parts[0] if len(parts) == 1 else torch.cat([part[:needed] for part in parts])
    check_tokens(heldout, train if kind == "bin" else [], o)
    return Corpus(train, heldout, digest.hexdigest()[:12], size and size / len(heldout), encode,
                  end if o.tokenizer or kind != "bin" else None, streamed=kind == "c4", alone=alone)


def heldout_sequences(corpus, count, seq_len):
    """(count, T + 1) held-out tokens, spread evenly: the same sequences for every replica."""
    last = len(corpus.heldout) - seq_len - 1
    starts = [round(i * last / max(1, count - 1)) for i in range(count)]
    return torch.stack([corpus.heldout[a:a + seq_len + 1] for a in starts]).long()


# ---- files


def find_files(o):
    """(the folder that paths are relative to, files): those of --data, else the standard library's."""
    if not o.data:
        root, files = standard_library()
        if sum(p.stat().st_size for p in files) < 5e6:
            raise BadInput(f"the standard library in {root} has under 5 MB of .py text: "
                           "give --data a text file or folder")
        return root, files
    root = Path(o.data)
    files = [root]
    if root.is_dir():
        inside = sorted(p for p in root.rglob("*") if p.is_file())
        files = [p for p in inside if not any(part.startswith(".") for part in p.relative_to(root).parts)]
    if not files or not all(p.is_file() for p in files):
        raise BadInput(f"--data {o.data}: no such file, or a folder without files")
    return root, files


def standard_library():
    """The .py files of the running Python's own library: real text, on every machine, nothing to download."""
    root = Path(sysconfig.get_paths()["stdlib"])
    not_its_own = {"site-packages", "dist-packages", "test", "tests", "idlelib"}
    near_duplicates = {"encodings"}
    files = []
    for folder, inner, names in os.walk(root):      # what is left out is not even listed: it can take seconds
        inner[:] = [name for name in inner if name not in not_its_own | near_duplicates]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return root, sorted(files)


def kind_of(files, o):
    """bin, c4 or text: the same for all files, and one that the model's vocabulary can read."""
    kinds = {"bin" if p.suffix == ".bin" else "c4" if p.name.endswith(".json.gz") else "text" for p in files}
    if len(kinds) > 1:
        mixed = " and ".join(sorted(kinds))
        raise BadInput(f"--data {o.data} mixes {mixed} files: keep one kind in a folder")
    (kind,) = kinds
    if kind != "bin" and not o.tokenizer and (o.vocab < 256 or o.init_from and o.vocab > 256):
        give = f": give --tokenizer {o.init_from}/tokenizer.json" if o.init_from else ""
        raise BadInput(f"bytes need a vocabulary of 256, the model has {o.vocab}" + give)
    return kind


def split(root, files, named):
    """(training, held-out) files. Held out are those called val, if `named` and any, else a 20th, by hash."""
    def by_path(path):
        return hashlib.sha256(path.relative_to(root).as_posix().encode()).hexdigest()
    by_hash = sorted(files, key=by_path)
    by_name = [p for p in files if re.search(HELDOUT, p.name.lower())] if named else []
    held = set(by_name if 0 < len(by_name) < len(files) else by_hash[:max(1, len(files) // 20)])
    return [p for p in files if p not in held], [p for p in files if p in held]


# ---- tokens


def load_tokenizer(o):
    """(encode, end) as in Corpus, of --tokenizer, else of bytes, which a zero byte closes."""
    if not o.tokenizer:
        return encode_bytes, 0
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise BadInput("--tokenizer needs the tokenizers package: pip install '.[hf]'")
    try:
        tokenizer = Tokenizer.from_file(o.tokenizer)
        named = named_end(o.tokenizer)
    except Exception as error:          # the package raises nothing narrower
        raise BadInput(f"--tokenizer {o.tokenizer}: {error}")
    size = max(tokenizer.get_vocab().values(), default=0) + 1
    if size > o.vocab:
        raise BadInput(f"{o.tokenizer} has {size} tokens, the model {o.vocab}: give --vocab {size}")
    names = [named] if named else ENDS
    ends = [i for i in map(tokenizer.token_to_id, names) if i is not None]
    if not ends:
        raise BadInput(f"{o.tokenizer} has no {' or '.join(names)} to end a document: "
                       "name its eos_token in a tokenizer_config.json beside it")
    tokenizer.encode_special_tokens = True      # a text that spells the end token does not end there

    def encode(texts):
        texts = [text.decode(errors="replace") for text in texts]
        found = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [torch.tensor(e.ids + ends[:1], dtype=torch.int32) for e in found]
    return encode, ends[0]


def encode_bytes(texts):
    return [torch.frombuffer(bytearray(text + b"\0"), dtype=torch.uint8) for text in texts]


def read(paths, kind, encode, digest):
    """Of these files ([their tokens, in one tensor or more], bytes of text behind them; None: unknown)."""
    if kind == "bin":                   # uint16 and nothing else
        return [torch.from_file(str(p), size=p.stat().st_size // 2, dtype=torch.uint16) for p in paths], None
    return tokenise(texts_of(paths, digest), encode)


def texts_of(paths, digest):
    for path in paths:
        text = path.read_bytes()
        digest.update(text + b"\0")
        yield text


def tokenise(texts, encode, needed=math.inf):
    """Of as many texts as give `needed` tokens ([their tokens], their bytes, an end to each included)."""
    parts = [torch.empty(0, dtype=torch.uint8)]
    size = count = 0
    while count < needed and (some := list(islice(texts, 100))):
        tokens = encode(some)
        parts += tokens
        count += sum(map(len, tokens))
        size += sum(len(text) + 1 for text in some)
    return [torch.cat(parts)], size


def check_tokens(heldout, mapped, o):
    """Raise BadInput without a held-out sequence, or for tokens of mapped files beyond the vocabulary."""
    if len(heldout) < o.seq_len + 1:
        raise BadInput(f"the held-out data has {len(heldout)} tokens, fewer than one sequence of "
                       f"{o.seq_len} + 1: more data or a smaller --seq-len")
    if not mapped:
        return
    starts = [part[:1 << 24] for part in (*mapped, heldout) if len(part)]       # 16M of each file must do
    top = max(int(start.to(torch.int32).max()) for start in starts)
    if top >= o.vocab:
        raise BadInput(f"the data has token {top}, the model a vocabulary of {o.vocab}: "
                       f"give --vocab {top + 1} or more")


class Reader:
    """Sequences of one origin's part of the tokens in memory or mapped, in a fresh random order each epoch.

    `cursor`, the sequences read, is all its state. Raises BadInput for a part without a sequence.
    """

    bad_lines = 0       # of streams only

    def __init__(self, parts, seq_len, seed):
        self.parts = parts
        self.seq_len = seq_len
        self.seed = seed
        sequences = [max(0, len(part) - 1) // seq_len for part in parts]
        self.firsts = list(accumulate(sequences, initial=0))    # the number of each part's first sequence
        self.count = self.firsts[-1]
        self.cursor = 0
        self.epoch = None
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
