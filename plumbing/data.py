"""The tokens of a run, from text or from nanoGPT's token files, and an origin's own part of them.

`load_data` is what a trainer calls; tools/prepare.py writes token files. Only the split of the data
depends on the number of origins.
"""
import hashlib
import os
import random
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.data import ConcatDataset

from plumbing.huggingface import named_end
from plumbing.processes import BadInput, forbid

# What may end a document where a tokenizer does not name its end token.
ENDS = ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]"]
# In the name of a held-out file: nanoGPT's val.bin, C4's c4-validation.*
HELDOUT = r"(^|[^a-z])val(id|idation)?([^a-z]|$)"


@dataclass
class Corpus:
    train: list             # tensors of tokens (1-D, any integer type)
    heldout: torch.Tensor
    digest: str             # losses compare only between runs with the same
    bytes_per_token: float  # of the held-out part (one file: of the file); None of token files
    end: int                # id of the token that ends a document; None when unknown


def load_data(o, rank, origins):
    """(corpus, reader): the data, and the sequences of this origin's own part of them.

    o: data, tokenizer, vocab, seq_len, batch, eval_sequences and seed. origins: ranks; all others
    get (None, None). Raises BadInput.
    """
    if rank not in origins:
        return None, None
    corpus = load_corpus(o)
    return corpus, reader_of(corpus, o.seq_len, o.seed, origins.index(rank), len(origins))


def reader_of(corpus, seq_len, seed, place, origins):
    """The reader of the part of the training tokens that the place-th of so many origins has."""
    parts = []
    for tokens in corpus.train:
        share = len(tokens) // origins
        parts.append(tokens[place * share:(place + 1) * share])
    return Reader(parts, seq_len, f"data {seed} {place}")


def load_corpus(o):
    """The Corpus of o.data: training and held-out tokens from disjoint files.

    Of a single file they are disjoint ranges. Text is read and tokenised here, token files are
    mapped into memory. Raises BadInput.
    """
    root, files, kind = find_files(o.data)
    tokenizer = load_tokenizer(o.tokenizer)
    known = o.tokenizer or kind == "text"           # of a .bin file only --tokenizer tells
    forbid((known and tokenizer.size > o.vocab,
            f"this tokenizer needs --vocab {tokenizer.size}, not {o.vocab} (bytes: 256)"))
    digest = hashlib.sha256(Path(o.tokenizer).read_bytes() if o.tokenizer else b"")
    train_files, held_files = split(root, files, named=bool(o.data))
    if kind == "bin":
        digest.update(str(sizes(root, files)).encode())     # they are too large to read for this
        train, held = map_tokens(train_files), map_tokens(held_files)
        per_token = None
    else:
        train = [read_texts(train_files, tokenizer, digest)]
        held = [read_texts(held_files, tokenizer, digest)]
        text_bytes = sum(path.stat().st_size + 1 for path in held_files)    # and one for each end
        per_token = text_bytes / len(held[0])
    if len(files) == 1:
        whole = held[0]
        count = max(o.seq_len + 1, len(whole) // 20)
        train, held = [whole[:-count]], [whole[-count:]]
    heldout = held[0]
    if len(held) > 1:           # of mapped files no more than an evaluation needs
        needed = (o.eval_sequences + o.batch) * o.seq_len + 1
        heldout = torch.cat([part[:needed] for part in held])
    top = max(largest_id(part) for part in [*train, heldout])
    forbid(
        (len(heldout) <= o.seq_len,
         f"{o.data or root} has {len(heldout)} held-out tokens: give more data or a smaller "
         "--seq-len"),
        (top >= o.vocab,
         f"the data has token {top}: give --vocab {top + 1} or more, not {o.vocab}"))
    end = tokenizer.end if known else None
    return Corpus(train, heldout, digest.hexdigest()[:12], per_token, end)


def largest_id(tokens):
    """The largest of the first 16M tokens, which must do; 0 without tokens."""
    if not len(tokens):
        return 0
    return int(tokens[:1 << 24].int().max())


def heldout_sequences(corpus, count, seq_len):
    """(count, T + 1) held-out tokens, spread evenly: the same sequences for every replica."""
    last = len(corpus.heldout) - seq_len - 1
    starts = [round(i * last / max(1, count - 1)) for i in range(count)]
    return torch.stack([corpus.heldout[a:a + seq_len + 1] for a in starts]).long()


# ---- files


def find_files(data):
    """(the folder that paths are relative to, files, "bin" or "text") of --data.

    Without --data they are those of the standard library. Raises BadInput where a file is
    missing, not readable, or empty, and for files of both kinds.
    """
    if not data:
        root, files = standard_library()
        return root, files, "text"
    root, files = Path(data), [Path(data)]
    if root.is_dir():
        inside = sorted(path for path in root.rglob("*") if path.is_file())
        files = [path for path in inside if not is_hidden(path.relative_to(root))]
    readable = [path for path in files if os.access(path, os.R_OK)]
    forbid((not files or len(readable) < len(files), f"{data}: no such file, or none to read"))
    binary = [path for path in files if path.suffix == ".bin"]
    forbid((binary and len(binary) < len(files),
            f"{data} mixes .bin files with text: keep one kind in a folder"))
    empty = [path for path in files if path.stat().st_size == 0]
    if empty and (binary or len(empty) == len(files)):      # some empty text files do no harm
        raise BadInput(f"{empty[0]} is empty")
    if root.is_file():
        root = root.parent
    return root, files, "bin" if binary else "text"


def is_hidden(path):
    return any(part.startswith(".") for part in path.parts)


def standard_library():
    """(its folder, the .py files) of the running Python's own library.

    It is real text, and on every machine, so that nobody needs to download data.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    # not its own, and near-duplicate tables
    left_out = {"site-packages", "dist-packages", "test", "tests", "idlelib", "encodings"}
    files = []
    for top in root.iterdir():
        if top.name not in left_out:            # rglob would take seconds to list them
            files += [path for path in (top, *top.rglob("*.py")) if path.suffix == ".py"]
    files = [path for path in files if left_out.isdisjoint(path.relative_to(root).parts)]
    size = sum(path.stat().st_size for path in files)
    forbid((size < 5e6,
            f"the standard library in {root} has under 5 MB of .py text: give --data TEXT"))
    return root, sorted(files)


def split(root, files, named=True):
    """(training, held-out) files.

    Held out are, if `named`, those that their names say; else a 20th, at least one, by a hash.
    """
    def by_hash(path):
        return hashlib.sha256(path.relative_to(root).as_posix().encode()).digest()

    held = named_heldout(files) if named else []
    if not held:
        held = sorted(files, key=by_hash)[:max(1, len(files) // 20)]
    held = set(held)
    return [path for path in files if path not in held], [path for path in files if path in held]


def named_heldout(files):
    """The files with val, valid or validation in their names; none if all have it."""
    found = [path for path in files if re.search(HELDOUT, path.name.lower())]
    return found if len(found) < len(files) else []


def sizes(root, files):
    """[(path, bytes)] of the files. A file alone has the same as a folder that holds it alone."""
    return [(path.relative_to(root).as_posix(), path.stat().st_size) for path in files]


def read_text(path):
    """The bytes of a text file. Raises BadInput for a binary one: it has a zero near its start."""
    text = path.read_bytes()
    forbid((b"\0" in text[:8192],
            f"{path} is no text file, its first bytes include a zero: keep text alone there, and "
            "write C4's shards as .bin files once: python -m tools.prepare FOLDER OUT"))
    return text


# ---- tokens


class ByteTokenizer:
    """A text's tokens are its bytes; a zero byte ends it."""

    size, end = 256, 0

    def encode(self, texts):
        """Texts, as bytes -> a 1-D tensor of each one's tokens, the end token last."""
        return [torch.frombuffer(bytearray(text + b"\0"), dtype=torch.uint8) for text in texts]


class FileTokenizer:
    """A Hugging Face tokenizer.json.

    size: 1 + the largest id. end: id of the token that ends a document.
    """

    def __init__(self, file):
        from tokenizers import Tokenizer
        self.inner = Tokenizer.from_file(file)
        self.inner.encode_special_tokens = True     # a text that spells the end token goes on there
        self.size = max(self.inner.get_vocab().values(), default=0) + 1
        named = named_end(file)
        names = [named] if named else ENDS
        there = [name for name in names if self.inner.token_to_id(name) is not None]
        if not there:
            raise ValueError(f"it has no {' or '.join(names)} to end a document "
                             "(tokenizer_config.json)")
        self.end = self.inner.token_to_id(there[0])

    def encode(self, texts):
        """As ByteTokenizer's. Bytes that are no UTF-8 become replacement characters."""
        words = [text.decode(errors="replace") for text in texts]
        found = self.inner.encode_batch_fast(words, add_special_tokens=False)
        return [torch.tensor([*tokens.ids, self.end], dtype=torch.int32) for tokens in found]


def load_tokenizer(file):
    """The tokenizer of --tokenizer, by default bytes.

    Raises BadInput, and ImportError without the tokenizers package.
    """
    if not file:
        return ByteTokenizer()
    try:
        return FileTokenizer(file)
    except ImportError:
        raise
    except Exception as error:          # the package raises nothing narrower
        raise BadInput(f"--tokenizer {file}: {error}")


def map_tokens(paths):
    """The tokens of .bin files, a tensor each, mapped into memory."""
    tensors = []
    for path in paths:
        count = path.stat().st_size // 2
        tensors.append(torch.from_file(str(path), size=count, dtype=torch.uint16))
    return tensors


def read_texts(paths, tokenizer, digest):
    """The tokens of text files, all in one tensor. digest takes in the text."""
    parts = [torch.empty(0, dtype=torch.uint8)]
    for start in range(0, len(paths), 100):         # as many at a time as a tokenizer is fast with
        texts = [read_text(path) for path in paths[start:start + 100]]
        digest.update(b"".join(text + b"\0" for text in texts))
        parts += tokenizer.encode(texts)
    return torch.cat(parts)


class Reader:
    """Sequences of one origin's part of the tokens, in a fresh random order each epoch.

    `cursor`, the sequences read, is all its state. Raises BadInput for a part without a sequence.
    """

    def __init__(self, parts, seq_len, seed):
        # views, (sequences, T + 1), of which each begins with the last token of the one before
        views = [part.unfold(0, seq_len + 1, seq_len) for part in parts if len(part) > seq_len]
        forbid((not views, "too little data for every origin: give more, or a smaller --seq-len"))
        self.sequences = ConcatDataset(views)
        self.seed = seed
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
