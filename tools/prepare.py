"""Write C4's shards once as nanoGPT's token files, OUT/train.bin and OUT/val.bin, for train.py.

    python -m tools.prepare c4/ OUT --tokenizer tokenizer.json
    python train.py --data OUT --tokenizer tokenizer.json --vocab 32000

SOURCE is a folder of shards (.json.gz, a JSON document a line), or one shard. Tokens are uint16.
The tokenizer's end token follows every document. val.bin gets the shards with val or validation
in their name. Without such names it gets a 20th of the shards, chosen by a hash of their path; of
fewer than 20 shards, every 20th line of each.
"""
import gzip
import json
import re
import zlib
from array import array
from contextlib import suppress

from tqdm import tqdm

from train import HELDOUT, Job, Parser, atomic, find_files, load_tokenizer, need, split
from tools import empty_folder


def main(argv=None):
    Job().together(prepare, argv)


def prepare(argv):
    parser = Parser(__doc__)
    parser.add_argument("source", help="C4's shards: a folder or a file")
    parser.add_argument("out", type=empty_folder,
                        help="a folder that does not exist yet, or is empty")
    parser.add_argument("--tokenizer", help="a Hugging Face tokenizer.json (default: bytes)")
    a = parser.parse_args(argv)
    root, files = find_files(a.source)
    encode, size, _ = load_tokenizer(a.tokenizer)
    strange = [path for path in files if not path.name.endswith(".json.gz")]
    need(not strange,
         f"{a.source} holds no .json.gz shards: give text and .bin files to train.py as --data")
    need(size <= 1 << 16,
         f"{a.tokenizer} has {size} tokens: a .bin file holds at most 65536 (uint16)")
    a.out.mkdir(parents=True, exist_ok=True)
    with atomic(a.out / "train.bin") as train, atomic(a.out / "val.bin") as val:
        bad = write_tokens(documents(files, heldout_shards(root, files)), encode, train, val)
        counts = train.tell() // 2, val.tell() // 2
        said = (f"{a.source}: {counts[0]} training and {counts[1]} held-out tokens; "
                f"{bad} lines without text")
        need(0 not in counts, f"{said}: neither part may be empty")
    print(f"{said}; written to {a.out}")


def write_tokens(found, encode, train, val):
    """Write the documents' tokens to the open files. Returns how many lines had no text.

    found: (held out or not, text) of each.
    """
    bad = 0
    for held, text in found:
        if text:
            array("H", encode(text).tolist()).tofile(val if held else train)
        else:
            bad += 1
    return bad


def heldout_shards(root, files):
    """The shards that are held out as a whole; none if they are so few that every 20th line is."""
    named = [path for path in files if re.search(HELDOUT, path.name.lower())]
    if 0 < len(named) < len(files) or len(files) >= 20:
        return split(root, files)[1]
    return []


def documents(files, heldout):
    """Yields (held out or not, text as bytes) of each line; b"" without a text.

    Where a shard breaks off, that counts as one line without a text.

    heldout: files; where there are none, every 20th line of each file.
    """
    for path in tqdm(files, unit="shard"):
        try:
            with gzip.open(path) as lines:
                for number, line in enumerate(lines):
                    held = path in heldout if heldout else number % 20 == 0
                    yield held, text_of(line)
        except (EOFError, zlib.error, gzip.BadGzipFile):
            yield False, b""


def text_of(line):
    """The text of a line that is a JSON object with one, as bytes; else b""."""
    with suppress(ValueError, KeyError, TypeError, AttributeError):
        return json.loads(line)["text"].encode()
    return b""


if __name__ == "__main__":
    main()
