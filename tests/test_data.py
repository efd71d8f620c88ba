"""Data: text, token files and tokenizers; C4's shards made into token files."""

import gzip
import json
from array import array
from pathlib import Path

import pytest
import torch

from tests.harness import captured, options
from tools import prepare
from tools.export import save_tokenizer
from train import BadInput, Reader, load_corpus, load_tokenizer, standard_library


def write(folder, files):
    """files: their contents, bytes, by name."""
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def word_tokenizer(folder, words):
    """(tokenizer, file): tokenizer.json of these words, numbered in order; the first is the unknown one."""
    tokenizers = pytest.importorskip("tokenizers")
    numbered = {word: i for i, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbered, unk_token=words[0]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer, str(folder / "tokenizer.json")


def test_training_and_heldout_text_are_disjoint(tmp_path):
    write(tmp_path, {f"{i}.txt": bytes([65 + i]) * 300 for i in range(20)})
    data = load_corpus(options("--data", tmp_path, "--eval-sequences", 2))
    assert set(data.train[0].tolist()) & set(data.heldout.tolist()) == {0}
    assert (len(data.train[0]), len(data.heldout)) == (19 * 301, 301)
    one = write(tmp_path, {"one": bytes(range(1, 201)) * 100}) / "one"
    data = load_corpus(options("--data", one, "--eval-sequences", 7))
    assert bytes(data.train[0].tolist() + data.heldout.tolist()) == one.read_bytes() + b"\0"
    assert len(data.heldout) == 1000


def test_default_corpus_is_the_standard_library():
    data = load_corpus(options())
    assert len(data.train[0]) + len(data.heldout) > 5e6 and data.bytes_per_token == 1
    root, files = standard_library()
    assert (root / "random.py") in files and not any("site-packages" in p.parts for p in files)
    assert data.digest == load_corpus(options()).digest


def test_nanogpt_tokens_of_several_files_are_mapped_and_read_once_per_epoch(tmp_path):
    tokens = torch.arange(9000) % 3000
    parts = zip(("train_0", "train_1", "train_2", "val"), tokens.split([4000, 50, 3950, 1000]))
    write(tmp_path, {f"{name}.bin": part.to(torch.uint16).numpy().tobytes() for name, part in parts})
    data = load_corpus(options("--data", tmp_path, "--vocab", 3000, "--eval-sequences", 4))
    assert [len(part) for part in data.train] == [4000, 50, 3950]
    assert torch.equal(torch.cat([*data.train, data.heldout]).long(), tokens)
    assert data.bytes_per_token is data.end is None
    if Path("/proc/self/maps").exists():  # Linux
        assert all(str(tmp_path / f"train_{i}.bin") in Path("/proc/self/maps").read_text() for i in range(3))
    reader = Reader(data, 128, 0)
    assert reader.next(2).shape == (2, 129) and len(reader.sequences) == 31 + 30  # 50 tokens are no sequence
    seen, other = [reader.next(1)[0] for _ in range(2 * 61 - 2)][-61:], Reader(data, 128, 0)
    starts = [128 * i for i in range(31)] + [4050 + 128 * i for i in range(30)]
    assert sorted(row.tolist() for row in seen) == sorted(tokens[a : a + 129].tolist() for a in starts)
    other.cursor = reader.cursor        # a resumed run
    assert torch.equal(other.next(7), reader.next(7))


def test_a_token_file_has_one_hash_alone_and_in_a_folder(tmp_path):
    write(tmp_path / "tokens", {"some.bin": b"\1\0" * 3000})
    digests = {load_corpus(options("--data", path, "--eval-sequences", 1)).digest
               for path in (tmp_path / "tokens", tmp_path / "tokens/some.bin")}
    assert len(digests) == 1


def test_tokenizer_file(tmp_path):
    tokenizer, file = word_tokenizer(tmp_path, ["[UNK]", "<|endoftext|>", *(f"w{i}" for i in range(50))])
    text = " ".join(f"w{j % 50}" for j in range(400)).encode()
    argv = ["--data", write(tmp_path / "text", {"0.txt": text, "1.txt": text}), "--tokenizer", file,
            "--eval-sequences", 3]
    data = load_corpus(options(*argv))
    assert data.train[0].tolist() == [j % 50 + 2 for j in range(400)] + [1] and data.end == 1
    assert data.bytes_per_token == pytest.approx(len(text) / 400, rel=0.01)
    with pytest.raises(BadInput, match="needs --vocab 52, not 40"):
        load_corpus(options(*argv, "--vocab", 40))
    # a text that spells the end token does not end there
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(file)
    assert tokenizer.encode("w7 <|endoftext|> w9").ids == [9, 1, 11]
    encode, size, end = load_tokenizer(file)
    assert (size, end) == (52, 1)
    encoded = [encode(text).tolist() for text in (b"w7 <|endoftext|> w9", b"")]
    assert encoded == [[9, 0, 0, 0, 11, 1], [1]]
    _, other = word_tokenizer(tmp_path, ["[UNK]", "a"])
    with pytest.raises(BadInput, match="to end a document"):
        load_tokenizer(other)


def test_the_tokenizer_of_an_export_is_one_that_we_read(tmp_path):
    """It ends documents with the same token, and so does transformers'."""
    transformers = pytest.importorskip("transformers")
    _, file = word_tokenizer(tmp_path, ["[UNK]", "a", "stop", "</s>"])
    (tmp_path / "copy").mkdir()
    save_tokenizer(tmp_path / "copy", file, end=3)
    assert load_tokenizer(str(tmp_path / "copy/tokenizer.json"))[2] == 3
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "copy")
    assert (theirs.eos_token_id, theirs("a stop").input_ids) == (3, [1, 2])


def test_bytes_that_are_no_utf8_are_replaced(tmp_path):
    _, file = word_tokenizer(tmp_path, ["</s>", "caf", "\ufffd"])
    text = write(tmp_path / "text", {f"{i}.txt": "caf\u00e9".encode("latin-1") for i in range(3)})
    argv = ["--data", text, "--seq-len", 1, "--eval-sequences", 2]
    corpus = load_corpus(options(*argv, "--tokenizer", file))
    assert corpus.heldout.tolist() == [1, 2, 0]
    corpus = load_corpus(options(*argv))
    assert bytes(corpus.heldout.tolist()) == b"caf\xe9\0"     # as bytes as it is


# ---- tools.prepare


TEXTS = [f"{i} " + "x" * (7 * i % 23) for i in range(900)]              # more than three batches of 256
SPOILT = [b"{", b'{"text": null}', b'["text"]', b'{"url": ""}', b"\xff\xfe", b'{"text": "\\ud800"}', b""]


def shard(*lines):
    """The bytes of a C4 shard; a line is a document's text, or bytes for itself."""
    rows = (line if isinstance(line, bytes) else json.dumps(dict(text=line)).encode() for line in lines)
    return gzip.compress(b"\n".join(rows) + b"\n")


def prepared(source, out):
    """What is printed last, and the text behind the tokens of train.bin and val.bin."""
    code, said = captured(0, 1, prepare.main, [str(source), str(out)])
    assert code == 0 and sorted(p.name for p in out.iterdir()) == ["train.bin", "val.bin"], said
    tokens = [array("H", (out / name).read_bytes()) for name in ("train.bin", "val.bin")]
    return said.splitlines()[-1], *(bytes(part).decode() for part in map(list, tokens))


def test_prepared_files_hold_the_tokens_of_the_joined_documents_and_train(tmp_path):
    shards = {f"c4-train.{s:05d}-of-00003.json.gz": shard(f"shard {s}", *SPOILT, *TEXTS) for s in range(3)}
    shards["c4-validation.00000-of-00001.json.gz"] = shard(*TEXTS[:90])
    said, train_, val = prepared(write(tmp_path / "c4", shards), tmp_path / "out")
    assert train_ == "".join(f"{text}\0" for s in range(3) for text in (f"shard {s}", *TEXTS))
    assert val == "".join(f"{text}\0" for text in TEXTS[:90])
    assert f"{len(train_)} training and {len(val)} held-out tokens; 21 lines without text" in said
    corpus = load_corpus(options("--data", tmp_path / "out", "--seq-len", 32, "--eval-sequences", 4))
    assert [bytes(part.tolist()).decode() for part in (*corpus.train, corpus.heldout)] == [train_, val]


def test_what_follows_where_a_shard_breaks_off_is_left_out_and_counted(tmp_path):
    texts = [f"0.{i} " + "x" * (7 * i % 23) for i in range(6000)]
    write(tmp_path / "c4", {"c4-train.0.json.gz": shard(*texts)[:-20], "c4-validation.json.gz": shard("held"),
                            "c4-train.1.json.gz": shard(*["whole"] * 600)})
    said, train_, _ = prepared(tmp_path / "c4", tmp_path / "out")
    *read, end = train_.split("\0")
    assert read[-600:] == ["whole"] * 600 and not end and 3000 < len(read) - 600 < 6000
    assert read[:-600] == texts[:len(read) - 600] and "; 1 lines without text" in said


@pytest.mark.parametrize("shards", [1, 2])
def test_of_few_shards_every_20th_line_is_held_out(shards, tmp_path):
    size = len(TEXTS) // shards
    write(tmp_path / "c4", {f"{i}.json.gz": shard(*TEXTS[i * size:(i + 1) * size]) for i in range(shards)})
    source = tmp_path / "c4" if shards > 1 else tmp_path / "c4/0.json.gz"
    _, *parts = prepared(source, tmp_path / "out")
    numbers = [{int(text.split()[0]) for text in part.split("\0")[:-1]} for part in parts]
    held = {i for i in range(900) if i % size % 20 == 0}
    assert numbers == [set(range(900)) - held, held]


def test_of_twenty_shards_one_is_held_out_as_a_whole(tmp_path):
    shards = {f"{i}.json.gz": shard(f"text {i}", f"more {i}") for i in range(20)}
    _, train_, val = prepared(write(tmp_path / "c4", shards), tmp_path / "out")
    (held,) = {text.split()[1] for text in val.split("\0")[:-1]}
    assert val == f"text {held}\0more {held}\0" and train_.count("\0") == 38


def test_shards_without_text_and_too_large_a_vocabulary_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    word_tokenizer(tmp_path, ["</s>", *map(str, range(65536))])
    write(Path(), {"broken.json.gz": b"not gzip", "nulls.json.gz": shard(*SPOILT)})
    for argv, error in {"nulls.json.gz out --tokenizer tokenizer.json": "has 65537 tokens: a .bin file holds",
                        "broken.json.gz out": "1 lines without text",
                        "nulls.json.gz out1": "7 lines without text"}.items():
        code, said = captured(0, 1, prepare.main, argv.split())
        assert code == 2 and error in said.splitlines()[-1] and "Traceback" not in said, said
