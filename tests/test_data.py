"""Data: text, token files, tokenizers, and streams of C4 shards."""

import gzip
import itertools
import json
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch

from plumbing import c4
from plumbing.data import Reader, load_corpus, load_tokenizer, standard_library
from plumbing.huggingface import save_tokenizer
from plumbing.processes import BadInput
from tests.harness import SMALL, checkpoint, metrics, options, processes, run, train_main


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
    for name, part in (
        ("train_0.bin", tokens[:4000]), ("train_1.bin", tokens[4000:4050]),
        ("train_2.bin", tokens[4050:8000]), ("val.bin", tokens[8000:]),
    ):
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
    argv = ["--data", tmp_path / "text", "--tokenizer", tmp_path / "tokenizer.json"]
    data = load_corpus(options(*argv))
    assert data.train[0].tolist() == [j % 50 + 2 for j in range(400)] + [1] and data.end == 1
    assert data.bytes_per_token == pytest.approx((tmp_path / "text/0.txt").stat().st_size / 400, rel=0.01)
    with pytest.raises(BadInput, match="give --vocab 52"):
        load_corpus(options(*argv, "--vocab", 40))
    # a text that spells the end token does not end a document; another end token is named beside the
    # tokenizer
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("w7 <|endoftext|> w9").ids == [9, 1, 11]
    assert load_tokenizer(options(*argv))[0]([b"w7 <|endoftext|> w9", b""])[0].tolist() == [
        9, 0, 0, 0, 11, 1
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(dict(eos_token=dict(content="w9"))))
    assert [part.tolist() for part in load_tokenizer(options(*argv))[0]([b"w7", b""])] == [
        [9, 11],
        [11],
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(dict(eos_token="nowhere")))
    with pytest.raises(BadInput, match="has no nowhere to end a document"):
        load_corpus(options(*argv))


def test_the_tokenizer_of_an_export_is_one_that_we_read(tmp_path):
    """Bytes are the same bytes and end with the same token; so does what names its end beside it."""
    tokenizers = pytest.importorskip("tokenizers")
    for folder in ("bytes", "words", "copy", "neither"):
        (tmp_path / folder).mkdir()
    save_tokenizer(tmp_path / "bytes", end=0)
    encode, end = load_tokenizer(options("--tokenizer", tmp_path / "bytes/tokenizer.json"))
    texts = ["".join(map(chr, range(300))).encode(), b"\0\0 \0a\0", "\u0100 \u4f60\u597d".encode(), b""]
    assert [tokens.tolist() for tokens in encode(texts)] == [[*text, 0] for text in texts] and end == 0

    words = tokenizers.models.WordLevel({"[UNK]": 0, "a": 1, "stop": 2}, unk_token="[UNK]")
    tokenizers.Tokenizer(words).save(str(tmp_path / "words/tokenizer.json"))
    (tmp_path / "words/tokenizer_config.json").write_text(json.dumps(dict(eos_token=dict(content="stop"))))
    save_tokenizer(tmp_path / "copy", tmp_path / "words/tokenizer.json", end=2)
    assert load_tokenizer(options("--tokenizer", tmp_path / "copy/tokenizer.json"))[1] == 2
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


def write_shards(folder, count, lines, bad=()):
    """C4 shards, in which line i of shard s has the text "s.i xx...", lines in `bad` are broken.

    Returns {line: text} of each shard.
    """
    folder.mkdir(exist_ok=True)
    shards = []
    spoilt = itertools.cycle(
        [b"{", b'{"text": null}', b'["text"]', b'{"url": ""}', b"\xff\xfe", b'{"text": "\\ud800"}', b""]
    )
    for s in range(count):
        texts = {i: f"{s}.{i} " + "x" * (7 * i % 23) for i in range(lines) if i not in bad}
        rows = [
            json.dumps(dict(text=texts[i], url="")).encode() if i in texts else next(spoilt)
            for i in range(lines)
        ]
        (folder / f"c4-train.{s:05d}-of-{count:05d}.json.gz").write_bytes(
            gzip.compress(b"\n".join(rows) + b"\n")
        )
        shards.append(texts)
    heldout = b"".join(json.dumps(dict(text=f"held out {i}")).encode() + b"\n" for i in range(90))
    (folder / "c4-validation.00000-of-00001.json.gz").write_bytes(gzip.compress(heldout))
    return shards


@pytest.mark.parametrize("shards, origins", [(3, 1), (3, 2), (2, 5)])
def test_stream_equals_the_joined_documents_from_any_cursor(shards, origins, tmp_path):
    texts = write_shards(tmp_path / "c4", shards, 240, bad=(0, 3, 77, 239))
    data = load_corpus(options("--data", tmp_path / "c4", "--seq-len", 32, "--eval-sequences", 8))
    assert bytes(data.heldout.tolist()).startswith(b"held out 0\0held out 1\0")
    assert b"x" not in bytes(data.heldout.tolist())
    assert data.bytes_per_token == 1
    every = set()
    for origin in range(origins):
        own = [
            (s, i)
            for s in range(shards)
            for i in texts[s]
            if (s % origins == origin if shards >= origins else i // 20 % origins == origin)
        ]
        assert not every & set(own)
        every |= set(own)
        want = b"".join(texts[s][i].encode() + b"\0" for s, i in own)
        stream, cursors, count = c4.Stream(data, 32, origin, origins), [], len(want) // 32
        rows = []
        for _ in range(count + 9):  # into the second epoch
            cursors.append(stream.cursor)
            rows += stream.next(1).tolist()
        joined = want + want
        assert rows == [list(joined[32 * k : 32 * k + 33]) for k in range(count + 9)]
        mine = [i for i in (0, 3, 77, 239) if shards >= origins or i // 20 % origins == origin]
        share = len(stream.files)
        passed = [cursor for cursor in cursors if cursor[0] < share]
        # met once more in the second epoch's first shard
        again = sum(i in mine and i < stream.cursor[1] for i in (0, 3, 77, 239))
        assert stream.cursor[0] == share and stream.cursor[2] == share * len(mine) + again
        for k in (0, 1, len(passed) // 2, len(passed) - 1):
            # a new process, and one that goes back
            for again in (c4.Stream(data, 32, origin, origins), stream):
                again.cursor = cursors[k]
                assert again.next(4).tolist() == rows[k : k + 4] and again.cursor == cursors[k + 4]
    assert every == {(s, i) for s in range(shards) for i in texts[s]}


def test_a_stream_reads_a_bounded_part_ahead(tmp_path, monkeypatch):
    write_shards(tmp_path / "c4", 1, 6000)
    data = load_corpus(options("--data", tmp_path / "c4", "--seq-len", 32))
    drawn = Counter()
    real = c4.documents

    def counted(*args):
        for document in real(*args):
            drawn["documents"] += 1
            yield document

    stream = c4.Stream(data, 32, 0, 1)
    monkeypatch.setattr(c4, "documents", counted)
    stream.next(1)
    for future in stream.ready:
        future.result()
    # documents of 5 to 30 bytes, 64 at a time
    assert c4.READY * 32 / 30 < drawn["documents"] < 64 + (c4.READY + 1) * 32 / 4


def test_what_follows_where_a_shard_breaks_off_is_skipped_and_counted(tmp_path):
    (texts,) = write_shards(tmp_path / "c4", 1, 6000)
    torn = tmp_path / "c4/c4-train.00000-of-00001.json.gz"
    torn.write_bytes(torn.read_bytes()[:-20])
    (tmp_path / "c4/c4-train.00001-of-00001.json.gz").write_bytes(gzip.compress(b'{"text": "whole"}\n' * 600))
    stream = c4.Stream(load_corpus(options("--data", tmp_path / "c4", "--seq-len", 32)), 32, 0, 1)
    text = b""
    while b"whole" not in text:
        text += bytes(stream.next(1)[0, :-1].tolist())
    read = text[: text.index(b"whole")].split(b"\0")[:-1]
    assert 3000 < len(read) < 6000
    assert read == [texts[i].encode() for i in range(len(read))]
    assert stream.cursor[2] == 1


def test_of_a_single_shard_every_20th_line_is_held_out(tmp_path):
    write_shards(tmp_path, 1, 400)
    data = load_corpus(
        options(
            "--data", tmp_path / "c4-train.00000-of-00001.json.gz", "--seq-len", 32, "--eval-sequences", 4
        )
    )
    numbers = lambda text: {int(n) for n in re.findall(rb"\x000\.(\d+) ", b"\0" + text)}
    stream, read = c4.Stream(data, 32, 0, 1), b""
    while stream.cursor[0] == 0:
        read += bytes(stream.next(1)[0, :-1].tolist())
    assert numbers(read) == set(range(400)) - set(range(0, 400, 20))
    assert {0, 20, 40, 60} < numbers(bytes(data.heldout.tolist())) <= set(range(0, 400, 20))


def test_a_run_on_streams_resumes_to_the_bit_and_reports_bad_lines(tmp_path):
    write_shards(tmp_path / "c4", 3, 400, bad=(1, 2))
    run(
        2, "--steps", 8, "--save-every", 4, "--eval-every", 4, "--data", "c4", "--name", "x", *SMALL,
        cwd=tmp_path,
    )
    whole = tmp_path / "runs/x"
    again = shutil.copytree(whole, tmp_path / "runs/y")
    shutil.rmtree(again / "checkpoints/00000008")
    out = run(2, "--resume", again, cwd=tmp_path)
    for rank in range(2):
        a, b = checkpoint(whole, 8, rank), checkpoint(again, 8, rank)
        assert torch.equal(a["theta"], b["theta"]) and a["cursor"] == b["cursor"] and a["cursor"][1] > 0
    assert (
        [line["bad_lines"] for line in metrics(again)]
        == [line["bad_lines"] for line in metrics(whole)]
        == [4, 4]
    )
    assert "bad lines       4" in out
    write_shards(tmp_path / "c4", 3, 401)  # the digest knows sizes
    (code, text), _ = processes(2, train_main, ["--resume", str(again), "--steps", "9"], cwd=tmp_path)
    assert code == 2 and "the data differ" in text
