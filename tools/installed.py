"""More text than the standard library, without a download: the sources of all installed packages.

    python -m tools.installed OUT                                       as bytes
    python -m tools.installed OUT --vocab 32000 --tokenizer bpe.json    first trains this tokenizer
    python train.py --data OUT --tokenizer bpe.json --vocab 32000

OUT gets nanoGPT's token files, train.bin and val.bin. A document is a file of source code of the
packages or of the standard library. Left out are licence files, binary, empty and large files (most
are generated tables), and every file whose content another file has. A twentieth of the files is
held out, chosen by a hash of their content, so no text is in both parts. The order is that of the
hashes, too: the same packages give the same tokens, wherever they lie. Losses compare only between
runs that print the same `corpus` hash.
"""
import hashlib
import re
import sysconfig
from pathlib import Path

from plumbing.data import load_tokenizer, standard_library
from plumbing.files import atomic
from plumbing.options import Parser, empty_folder
from plumbing.processes import BadInput, Job, forbid
from tools.prepare import forbid_large_vocabulary, write_tokens

SOURCES = {".py", ".pyi", ".pyx", ".pxd", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".js",
           ".md", ".rst"}
LICENCE = r"(licen[sc]e|copying|copyright|notice|authors)"      # begins the name of such a file
LARGEST = 1 << 20               # bytes of a file
LEARNT = 1 << 26                # bytes of text, at least, from which a tokenizer is trained
END = "<|endoftext|>"


def main(argv=None):
    Job().together(write_installed, argv)


def write_installed(argv):
    parser = Parser(__doc__)
    parser.add_argument("out", type=empty_folder,
                        help="a folder that does not exist yet, or is empty")
    parser.add_argument("--tokenizer", help="a Hugging Face tokenizer.json (default: bytes)")
    parser.add_argument("--vocab", type=int,
                        help="first train a BPE of so many tokens, and write it as --tokenizer")
    parser.add_argument("--megabytes", type=float, default=float("inf"),
                        help="of text at most (default: all)")
    a = parser.parse_args(argv)
    forbid((a.vocab and not a.tokenizer, "--vocab trains a tokenizer: give the file to write, too, "
            "as --tokenizer"),
           (a.vocab and a.tokenizer and Path(a.tokenizer).exists(),
            f"{a.tokenizer} exists: give --tokenizer another file, or leave out --vocab"),
           (a.vocab is not None and not 257 <= a.vocab <= 1 << 16,
            f"--vocab {a.vocab}: takes 257 (256 bytes and the end) to 65536 (uint16)"))
    files = some_of(distinct(source_files(package_folders())), 1e6 * a.megabytes)
    if a.vocab:
        train_tokenizer(files, a.vocab, a.tokenizer)
    tokenizer = load_tokenizer(a.tokenizer)
    forbid_large_vocabulary(a.tokenizer, tokenizer)
    a.out.mkdir(parents=True, exist_ok=True)
    with atomic(a.out / "train.bin") as train, atomic(a.out / "val.bin") as val:
        write_tokens(documents(files), tokenizer, train, val)
        counts = train.tell() // 2, val.tell() // 2
    print(f"{len(files)} files: {counts[0]:,} training and {counts[1]:,} held-out tokens; written "
          f"to {a.out}")


def package_folders():
    """Where this Python's packages lie."""
    paths = sysconfig.get_paths()
    return {Path(paths["purelib"]), Path(paths["platlib"])}


def source_files(folders):
    """Yields the files with source code in these folders, and in the standard library."""
    for folder in folders:
        for path in folder.rglob("*"):
            if path.suffix in SOURCES and path.is_file():
                yield path
    yield from standard_library()[1]


def distinct(paths):
    """{hash of its content: path}, by hash. Raises BadInput where there is nothing left."""
    found = {}
    for path in paths:
        if re.match(LICENCE, path.name.lower()) or path.stat().st_size > LARGEST:
            continue
        text = path.read_bytes()
        if text.strip() and b"\0" not in text:
            found.setdefault(hashlib.sha256(text).digest(), path)
    if len(found) < 20:
        raise BadInput(f"only {len(found)} files of source code are installed: give train.py other "
                       "text as --data")
    return dict(sorted(found.items()))


def some_of(files, size):
    """The first of them that are together no larger than so many bytes; at least 20."""
    found = {}
    total = 0
    for digest, path in files.items():
        total += path.stat().st_size
        if total > size and len(found) >= 20:
            break
        found[digest] = path
    return found


def is_held_out(digest):
    """Of a twentieth of all contents."""
    return int.from_bytes(digest[:4], "big") % 20 == 0


def documents(files):
    """Yields (held out or not, text as bytes) of each file."""
    for digest, path in files.items():
        yield is_held_out(digest), path.read_bytes()


def train_tokenizer(files, vocab, file):
    """Write a byte-level BPE of so many tokens, from training files that come first.

    Fewer tokens than asked for, from little text, are well: train.py's --vocab may be larger.
    """
    def texts():
        size = 0
        for held, text in documents(files):
            if not held and size < LEARNT:
                size += len(text)
                yield text.decode(errors="replace")

    write_bpe(texts(), vocab, file)


def write_bpe(texts, vocab, file):
    """Train a byte-level BPE of so many tokens at most on these texts. Raises ImportError without
    tokenizers."""
    from tokenizers import ByteLevelBPETokenizer
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=vocab, special_tokens=[END],
                                  show_progress=False)
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(file))


if __name__ == "__main__":
    main()
