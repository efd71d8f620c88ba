"""Data: text, token files and tokenizers; C4's shards made into token files."""

import gzip
import itertools
import json
import re
from pathlib import Path

import pytest
import torch

import train
from plumbing.data import Reader, load_corpus, load_tokenizer, standard_library
from plumbing.huggingface import save_tokenizer
from plumbing.processes import BadInput
from tests.harness import captured, options
from tools import prepare


def test_training_and_heldout_text_are_disjoint(tmp_path):
    for i in range(20):
        (tmp_path / f"{i}.txt").write_bytes(bytes([65 + i]) * 300)
    data = load_corpus(options("--data", tmp_path))
    (train_,) = data.train
    assert set(train_.tolist()) & set(data.heldout.tolist()) == {0}
    assert len(train_) == 19 * 301
    assert len(data.heldout) == 301
    one = tmp_path / "one"
    one.write_bytes(bytes(range(1, 201)) * 100)
    data = load_corpus(options("--data", one))
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
    for name, part in (("train_0.bin", tokens[:4000]), ("train_1.bin", tokens[4000:4050]),
                       ("train_2.bin", tokens[4050:8000]), ("val.bin", tokens[8000:])):
        (tmp_path / name).write_bytes(part.to(torch.uint16).numpy().tobytes())
    data = load_corpus(options("--data", tmp_path, "--vocab", 3000, "--eval-sequences", 4))
    assert [len(part) for part in data.train] == [4000, 50, 3950]
    assert torch.equal(torch.cat(data.train).long(), tokens[:8000])
    assert torch.equal(data.heldout.long(), tokens[8000:])
    assert data.bytes_per_token is None
    assert data.end is None
    if Path("/proc/self/maps").exists():  # Linux
        assert all(str(tmp_path / f"train_{i}.bin") in Path("/proc/self/maps").read_text() for i in range(3))
    reader = Reader(data.train, 128, 0)
    assert reader.next(2).shape == (2, 129) and reader.count == 31 + 30  # 50 tokens are no sequence
    seen = [reader.next(1)[0] for _ in range(2 * 61 - 2)][-61:]
    starts = [128 * i for i in range(31)] + [4050 + 128 * i for i in range(30)]
    assert sorted(row.tolist() for row in seen) == sorted(tokens[a : a + 129].tolist() for a in starts)


def test_tokenizer_file(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, "<|endoftext|>": 1, **{f"w{i}": i + 2 for i in range(50)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text").mkdir()
    for i in range(2):
        (tmp_path / f"text/{i}.txt").write_text(" ".join(f"w{j % 50}" for j in range(400)))
    argv = ["--data", tmp_path / "text", "--tokenizer", str(tmp_path / "tokenizer.json")]
    data = load_corpus(options(*argv))
    assert data.train[0].tolist() == [j % 50 + 2 for j in range(400)] + [1] and data.end == 1
    assert data.bytes_per_token == pytest.approx((tmp_path / "text/0.txt").stat().st_size / 400, rel=0.01)
    with pytest.raises(BadInput, match="give --vocab 52"):
        load_corpus(options(*argv, "--vocab", 40))
    # a text that spells the end token does not end a document; another end token is named beside the
    # tokenizer
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(argv[3])
    assert tokenizer.encode("w7 <|endoftext|> w9").ids == [9, 1, 11]
    encode = lambda *texts: [tokens.tolist() for tokens in load_tokenizer(argv[3]).encode(texts)]
    assert encode(b"w7 <|endoftext|> w9") == [[9, 0, 0, 0, 11, 1]]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(dict(eos_token=dict(content="w9"))))
    assert encode(b"w7", b"") == [[9, 11], [11]]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(dict(eos_token="nowhere")))
    with pytest.raises(BadInput, match="has no nowhere to end a document"):
        load_corpus(options(*argv))


def test_the_tokenizer_of_an_export_is_one_that_we_read(tmp_path):
    """Bytes are the same bytes and end with the same token; so does what names its end beside it."""
    tokenizers = pytest.importorskip("tokenizers")
    for folder in ("bytes", "words", "copy", "neither"):
        (tmp_path / folder).mkdir()
    save_tokenizer(tmp_path / "bytes", end=0)
    tokenizer = load_tokenizer(str(tmp_path / "bytes/tokenizer.json"))
    texts = ["".join(map(chr, range(300))).encode(), b"\0\0 \0a\0", "\u0100 \u4f60\u597d".encode(), b""]
    assert [tokens.tolist() for tokens in tokenizer.encode(texts)] == [[*text, 0] for text in texts]
    assert tokenizer.end == 0

    words = tokenizers.models.WordLevel({"[UNK]": 0, "a": 1, "stop": 2, "</s>": 3}, unk_token="[UNK]")
    file = str(tmp_path / "words/tokenizer.json")
    tokenizers.Tokenizer(words).save(file)
    assert load_tokenizer(file).end == 3
    save_tokenizer(tmp_path / "copy", file, end=3)      # which no tokenizer_config.json beside it names
    assert json.loads((tmp_path / "copy/tokenizer_config.json").read_text())["eos_token"] == "</s>"
    (tmp_path / "words/tokenizer_config.json").write_text(json.dumps(dict(eos_token=dict(content="stop"))))
    assert load_tokenizer(file).end == 2
    save_tokenizer(tmp_path / "copy", file, end=2)
    assert load_tokenizer(str(tmp_path / "copy/tokenizer.json")).end == 2
    save_tokenizer(tmp_path / "neither")
    assert not list((tmp_path / "neither").iterdir())


def test_the_tokenizer_of_an_export_gives_transformers_the_same_bytes_and_end(tmp_path):
    transformers = pytest.importorskip("transformers")
    save_tokenizer(tmp_path, end=0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.eos_token_id == 0
    for text in ("def f(x):\n\treturn  x . 's , a", "".join(map(chr, range(300))), "\0 a \0\0", "\u0100"):
        assert tokenizer(text).input_ids == list(text.encode())
        assert tokenizer.decode(list(text.encode())) == text


def test_reader_gives_each_sequence_once_per_epoch_and_resumes():
    tokens = torch.arange(1000)
    reader = Reader([tokens], 10, 5)
    epochs = [sorted(int(reader.next(1)[0, 0]) for _ in range(reader.count)) for _ in range(2)]
    assert epochs[0] == epochs[1] == list(range(0, 990, 10))
    other = Reader([tokens], 10, 5)
    other.cursor = reader.cursor
    assert torch.equal(other.next(7), reader.next(7))


def test_binary_files_are_refused_and_bytes_that_are_no_utf8_counted(tmp_path, monkeypatch):
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({"</s>": 0, "caf\ufffd": 1}, unk_token="</s>")
    tokenizers.Tokenizer(words).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text").mkdir()
    argv = ["--data", tmp_path / "text", "--seq-len", 1]
    for i in range(3):
        (tmp_path / f"text/{i}.txt").write_bytes("caf\u00e9".encode("latin-1"))
    corpus = load_corpus(options(*argv, "--tokenizer", tmp_path / "tokenizer.json"))
    assert corpus.undecodable == 3 and corpus.heldout.tolist() == [1, 0]
    assert load_corpus(options(*argv)).undecodable == 0            # as bytes it is read as it is
    monkeypatch.chdir(tmp_path)
    argv += ["--tokenizer", "tokenizer.json", "--steps", 1]
    code, said = captured(0, 1, train.main, [*map(str, argv)])
    assert code == 0 and "warning: 3 bytes of the text are no UTF-8" in said
    (tmp_path / "text/x.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    with pytest.raises(BadInput, match="x.png is no text file"):
        load_corpus(options(*argv))


# ---- tools.prepare


def write_shards(folder, count, lines, bad=(), heldout=90):
    """C4 shards, in which line i of shard s has the text "s.i xx...", lines in `bad` are broken.

    Returns {line: text} of each shard, and of the held-out one.
    """
    folder.mkdir(exist_ok=True)
    spoilt = itertools.cycle([b"{", b'{"text": null}', b'["text"]', b'{"url": ""}', b"\xff\xfe",
                              b'{"text": "\\ud800"}', b""])
    names = [f"c4-train.{s:05d}-of-{count:05d}.json.gz" for s in range(count)]
    shards = []
    for s, name in enumerate([*names, "c4-validation.00000-of-00001.json.gz"][: count + bool(heldout)]):
        shard = range(lines if s < count else heldout)
        texts = {i: f"{s}.{i} " + "x" * (7 * i % 23) for i in shard if s == count or i not in bad}
        rows = [json.dumps(dict(text=texts[i])).encode() if i in texts else next(spoilt) for i in shard]
        (folder / name).write_bytes(gzip.compress(b"\n".join(rows) + b"\n"))
        shards.append(texts)
    return shards


def prepared(source, out, *argv):
    """What is printed, and the bytes behind the tokens of train.bin and val.bin."""
    code, said = captured(0, 1, prepare.main, [str(source), str(out), *map(str, argv)])
    assert code == 0, said
    train_, val = files = sorted(out.iterdir())
    assert train_.name == "train.bin" and val.name == "val.bin"
    return said.splitlines()[-1], *(torch.from_file(str(p), size=p.stat().st_size // 2, dtype=torch.uint16)
                                    for p in files)


def joined(texts):
    return b"".join(text.encode() + b"\0" for text in texts)


def test_prepared_files_hold_the_tokens_of_the_joined_documents_and_train(tmp_path):
    shards = write_shards(tmp_path / "c4", 3, 900, bad=(0, 3, 77, 899))     # more than one batch of 256
    said, train_, val = prepared(tmp_path / "c4", tmp_path / "out")
    assert bytes(train_.tolist()) == joined(text for texts in shards[:3] for text in texts.values())
    assert bytes(val.tolist()) == joined(shards[3].values())
    assert f"{len(train_)} training and {len(val)} held-out tokens; 12 lines without text" in said
    corpus = load_corpus(options("--data", tmp_path / "out", "--seq-len", 32, "--eval-sequences", 4))
    assert torch.equal(corpus.train[0], train_) and torch.equal(corpus.heldout, val)


def test_what_follows_where_a_shard_breaks_off_is_left_out_and_counted(tmp_path):
    texts, _ = write_shards(tmp_path / "c4", 1, 6000)
    torn = tmp_path / "c4/c4-train.00000-of-00001.json.gz"
    torn.write_bytes(torn.read_bytes()[:-20])
    (tmp_path / "c4/c4-train.00001-of-00001.json.gz").write_bytes(gzip.compress(b'{"text": "whole"}\n' * 600))
    said, train_, _ = prepared(tmp_path / "c4", tmp_path / "out")
    *read, end = bytes(train_.tolist()).split(b"\0")
    assert read[-600:] == [b"whole"] * 600 and not end and 3000 < len(read) - 600 < 6000
    assert read[:-600] == [texts[i].encode() for i in range(len(read) - 600)]
    assert "; 1 lines without text" in said


def test_of_a_single_shard_every_20th_line_is_held_out(tmp_path):
    write_shards(tmp_path / "c4", 1, 400, heldout=0)
    _, *parts = prepared(tmp_path / "c4/c4-train.00000-of-00001.json.gz", tmp_path / "out")
    numbers = [{int(n) for n in re.findall(rb"0\.(\d+) ", bytes(part.tolist()))} for part in parts]
    assert numbers == [set(range(400)) - set(range(0, 400, 20)), set(range(0, 400, 20))]


def test_bad_input_of_prepare_is_one_line(tmp_path, monkeypatch):
    tokenizers = pytest.importorskip("tokenizers")
    monkeypatch.chdir(tmp_path)
    words = tokenizers.models.WordLevel({"</s>": 0, "many": 65536}, unk_token="</s>")
    tokenizers.Tokenizer(words).save("large.json")
    Path("text").mkdir()
    Path("text/1.txt").write_text("1")
    for name, content in (("broken", b"not gzip"), ("nulls", gzip.compress(b'{"text": null}\n' * 30))):
        Path(f"{name}.json.gz").write_bytes(content)
    Path("tokens.bin").touch()
    for argv, error in (
        (["nowhere", "out"], "no such file"),
        (["text", "text"], "not an empty folder"),
        (["tokens.bin", "out"], "tokens.bin holds no .json.gz shards: give text and .bin files to train.py"),
        (["text", "out"], "text holds no .json.gz shards: give text and .bin files to train.py as --data"),
        (["nulls.json.gz", "out", "--tokenizer", "large.json"], "has 65537 tokens: a .bin file holds"),
        (["broken.json.gz", "out"], "1 lines without text"),
        (["nulls.json.gz", "out1"], "30 lines without text"),
    ):
        code, said = captured(0, 1, prepare.main, argv)
        assert code == 2 and error in said.splitlines()[-1] and "Traceback" not in said, said
