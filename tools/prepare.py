"""Write text once as nanoGPT's token files, OUT/train.bin and OUT/val.bin, which train.py maps into memory.

    python -m tools.prepare c4/ OUT --tokenizer tokenizer.json
    python train.py --data OUT --tokenizer tokenizer.json

SOURCE is a folder of C4's shards (.json.gz, a JSON document a line) or of text files, or one such file.
Tokens are uint16; the tokenizer's end token follows every document. val.bin gets the files with val or
validation in their name, else a 20th of the files, chosen by a hash of their path. Of a single shard it gets
every 20th line, of a single text its end. Memory holds one text file, or 256 documents of a shard, at a time.
"""
import argparse
import contextlib
import gzip
import json
import zlib
from array import array
from itertools import islice

from tqdm import tqdm

from plumbing.data import find_files, load_tokenizer, read_text, split
from plumbing.options import Parser, empty_folder
from plumbing.processes import BadInput, Job
from plumbing.report import atomic


def main(argv=None):
    parser = Parser(__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="C4's shards or text: a folder or a file")
    parser.add_argument("out", type=empty_folder, help="a folder that does not exist yet, or is empty")
    parser.add_argument("--tokenizer", help="a Hugging Face tokenizer.json (default: bytes)")
    Job().together(prepare, parser, argv)


def prepare(parser, argv):
    a = parser.parse_args(argv)
    root, files, kind = find_files(a.source)
    tokenizer = load_tokenizer(a.tokenizer)
    if kind == "bin":
        raise BadInput(f"{a.source} is .bin already: give it to train.py as --data")
    if tokenizer.size > 1 << 16:
        raise BadInput(f"{a.tokenizer} has {tokenizer.size} tokens: a .bin file holds at most 65536 (uint16)")
    a.out.mkdir(parents=True, exist_ok=True)
    counts, bad, found = [0, 0], 0, documents(files, split(root, files)[1])
    with atomic(a.out / "train.bin") as train, atomic(a.out / "val.bin") as val:
        while some := list(islice(found, 256)):
            good = [(held, text) for held, text in some if text is not None]
            bad += len(some) - len(good)
            for (held, _), tokens in zip(good, tokenizer.encode([text for _, text in good])):
                array("H", tokens.tolist()).tofile(val if held else train)
                counts[held] += len(tokens)
        said = (f"{a.source}: {counts[0]} training and {counts[1]} held-out tokens; {bad} lines without text "
                f"and {tokenizer.undecodable} bytes that are no UTF-8")
        if not all(counts):
            raise BadInput(f"{said}: neither part may be empty")
    print(f"{said}; written to {a.out}")


def documents(files, heldout):
    """(whether it is held out, its text as bytes or None) of each file, or of each line of a shard."""
    alone = len(files) == 1
    for path in tqdm(files, unit="file"):
        if path.suffix == ".gz":
            for number, text in enumerate(lines(path)):
                yield number % 20 == 0 if alone else path in heldout, text
        else:
            text = read_text(path)
            end = text.rfind(b"\n", 0, len(text) * 19 // 20) + 1
            yield from [(False, text[:end]), (True, text[end:])] if alone else [(path in heldout, text)]


def lines(path):
    """The text of each line of a shard, as bytes; None where it has none, and where the shard breaks off."""
    read = tqdm.wrapattr(open(path, "rb"), "read", path.stat().st_size, desc=path.name, leave=False)
    with read as packed, gzip.open(packed) as unpacked:
        try:
            for line in unpacked:
                yield text_of(line)
        except (EOFError, zlib.error, gzip.BadGzipFile):
            yield None


def text_of(line):
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        return json.loads(line)["text"].encode()


if __name__ == "__main__":
    main()
