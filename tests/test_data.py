"""Data: text, token files and tokenizers, and who reads what."""

import gzip
import json
import os
import random
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import train
from tests.harness import HERE, SMALL, captured, options
from tools import export
from tools.export import save_tokenizer
from tools.tokenizer import load
from train import BadInput, Reader, find_files, heldout_sequences, load_corpus


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
    assert set(data.train.tolist()) & set(data.heldout.tolist()) == {0}
    assert (len(data.train), len(data.heldout)) == (19 * 301, 301)
    one = write(tmp_path, {"one": bytes(range(1, 201)) * 100}) / "one"
    data = load_corpus(options("--data", one, "--eval-sequences", 7))
    assert bytes(data.train.tolist() + data.heldout.tolist()) == one.read_bytes() + b"\0"
    assert len(data.heldout) == 1000


def test_default_corpus_is_the_standard_library():
    data = load_corpus(options())
    assert len(data.train) + len(data.heldout) > 5e6 and data.bytes_per_token == 1
    root, files = find_files(None)
    assert (root / "random.py") in files and not any("site-packages" in p.parts for p in files)
    assert data.digest == load_corpus(options()).digest


def test_nanogpt_tokens_are_mapped_and_read_once_per_epoch(tmp_path):
    tokens = torch.arange(9000) % 3000
    parts = zip(("train", "val"), tokens.split([8000, 1000]))
    write(tmp_path, {f"{name}.bin": part.to(torch.uint16).numpy().tobytes() for name, part in parts})
    data = load_corpus(options("--data", tmp_path, "--vocab", 3000, "--eval-sequences", 4))
    assert torch.equal(torch.cat([data.train, data.heldout]).long(), tokens)
    assert data.bytes_per_token is data.end is None
    if Path("/proc/self/maps").exists():  # Linux
        assert str(tmp_path / "train.bin") in Path("/proc/self/maps").read_text()
    reader, other = Reader(data, 128, 0), Reader(data, 128, 0)
    assert reader.next(2).shape == (2, 129) and reader.count == 62          # of 8000 tokens
    seen = [reader.next(1)[0] for _ in range(2 * 62 - 2)][-62:]
    assert sorted(row.tolist() for row in seen) == sorted(tokens[a:a + 129].tolist()
                                                          for a in range(0, 62 * 128, 128))
    other.cursor = reader.cursor        # a resumed run
    assert torch.equal(other.next(7), reader.next(7))


@pytest.mark.parametrize("origins", [1, 3, 8])
def test_shards_are_alike_and_each_epoch_deals_all_sequences_once(origins):
    """Every origin's part is drawn from the whole text: each takes every origins-th of one permutation."""
    corpus = SimpleNamespace(train=torch.arange(100 * 8 + 1), vocab=801)   # sequence i begins with 8 i
    readers = [Reader(corpus, 8, 5, place, origins) for place in range(origins)]
    count = 100 // origins
    for epoch in range(3):
        drawn = [[int(row[0]) // 8 for row in reader.next(count)] for reader in readers]
        every = [number for numbers in zip(*drawn) for number in numbers]
        assert len(set(every)) == count * origins and set(every) <= set(range(100))
        generator = torch.Generator().manual_seed(random.Random(f"data 5 {epoch}").getrandbits(63))
        assert every == torch.randperm(100, generator=generator)[:count * origins].tolist()
    assert drawn != [reader.draw(count) for reader in readers]      # another epoch, another order
    for numbers in drawn if origins > 1 else []:                    # nobody has a stretch of the text
        assert max(numbers) - min(numbers) > 60


def test_a_token_file_has_one_hash_alone_and_in_a_folder(tmp_path):
    write(tmp_path / "tokens", {"some.bin": b"\1\0" * 3000})
    digests = {load_corpus(options("--data", path, "--eval-sequences", 1)).digest
               for path in (tmp_path / "tokens", tmp_path / "tokens/some.bin")}
    assert len(digests) == 1


def test_a_file_of_uint32_is_refused(tmp_path):
    """Read as uint16, every second token would be a zero, or of a large vocabulary a 1."""
    ids = torch.arange(9000) * 7 % 128000
    for part in (ids % 200, ids):
        write(tmp_path, {"a.bin": part.to(torch.int32).numpy().tobytes()})
        with pytest.raises(BadInput, match="every second token is below 4"):
            load_corpus(options("--data", tmp_path / "a.bin", "--vocab", 128000))
    for top in (3, 60000):      # but not tokens of a vocabulary that small, nor every second one large
        write(tmp_path, {"a.bin": (torch.arange(9000) % top).to(torch.uint16).numpy().tobytes()})
        load_corpus(options("--data", tmp_path / "a.bin", "--vocab", top, "--eval-sequences", 2))


def test_a_token_above_the_vocabulary_is_found_where_it_is_read():
    """At the start only the beginning of a file is read, 16.7 million tokens."""
    corpus = SimpleNamespace(train=torch.arange(801), heldout=torch.arange(801), vocab=800)
    reader = Reader(corpus, 8, 0)
    with pytest.raises(BadInput, match="the data has token 800: give --vocab 801 or more, not 800"):
        reader.next(reader.count)
    with pytest.raises(BadInput, match="the data has token 800"):
        heldout_sequences(corpus, 100, 8)


def test_token_files_with_their_tokenizer_are_exported_with_it(tmp_path, monkeypatch):
    """docs/data.md's way. Without a tokenizer the model's config has no end token."""
    pytest.importorskip("safetensors")
    monkeypatch.chdir(tmp_path)
    word_tokenizer(tmp_path, ["[UNK]", "a", "b", "</s>"])
    write(tmp_path, {"a.bin": (torch.arange(9000) % 4).to(torch.uint16).numpy().tobytes()})
    for name, given, end in (("x", ["--tokenizer", "tokenizer.json"], 3), ("y", [], None)):
        argv = ["--data", "a.bin", "--name", name, "--steps", 1, *given, *SMALL]
        assert captured(0, 1, train.main, argv)[0] == 0
        assert captured(0, 1, export.main, [f"runs/{name}", f"out-{name}"])[0] == 0
        assert json.loads(Path(f"out-{name}/config.json").read_text())["eos_token_id"] == end
        assert Path(f"out-{name}/tokenizer.json").exists() == bool(given)


def test_file_names_may_be_no_utf8(tmp_path):
    files = {os.fsdecode(b"%d\xff.txt" % i): b"some text " * 300 for i in range(3)}
    data = load_corpus(options("--data", write(tmp_path / "text", files), "--eval-sequences", 2))
    assert len(data.train) + len(data.heldout) == 3 * 3001


def test_tokenizer_file(tmp_path):
    tokenizer, file = word_tokenizer(tmp_path, ["[UNK]", "<|endoftext|>", *(f"w{i}" for i in range(50))])
    text = " ".join(f"w{j % 50}" for j in range(400)).encode()
    argv = ["--data", write(tmp_path / "text", {"0.txt": text, "1.txt": text}), "--tokenizer", file,
            "--eval-sequences", 3]
    data = load_corpus(options(*argv), load(file, 256))
    assert data.train.tolist() == [j % 50 + 2 for j in range(400)] + [1] and data.end == 1
    assert data.bytes_per_token == pytest.approx(len(text) / 400, rel=0.01)
    with pytest.raises(ValueError, match="needs --vocab 52, not 40"):
        load(file, 40)
    # a text that spells the end token does not end there
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(file)
    assert tokenizer.encode("w7 <|endoftext|> w9").ids == [9, 1, 11]
    read = load(file, 52)
    assert read.end == 1
    encoded = [read.encode(text).tolist() for text in (b"w7 <|endoftext|> w9", b"")]
    assert encoded == [[9, 0, 0, 0, 11, 1], [1]]
    _, other = word_tokenizer(tmp_path, ["[UNK]", "a"])
    with pytest.raises(ValueError, match="to end a document"):
        load(other, 256)
    tokenizer.model = type(tokenizer.model)(dict(w7=0), unk_token="[UNK]")
    tokenizer.save(file)
    assert load(file, 52).encode(b"w7").tolist() == [0, 1]
    with pytest.raises(ValueError, match="tokenizer.json: .*UNK"):        # which it lacks
        load(file, 52).encode(b"w8")


def test_the_tokenizer_of_an_export_is_one_that_we_read(tmp_path):
    """It ends documents with the same token, and so does transformers'."""
    transformers = pytest.importorskip("transformers")
    _, file = word_tokenizer(tmp_path, ["[UNK]", "a", "stop", "</s>"])
    (tmp_path / "copy").mkdir()
    save_tokenizer(tmp_path / "copy", file, end=3)
    assert load(str(tmp_path / "copy/tokenizer.json"), 256).end == 3
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "copy")
    assert (theirs.eos_token_id, theirs("a stop").input_ids) == (3, [1, 2])


def test_bytes_that_are_no_utf8_are_replaced(tmp_path):
    _, file = word_tokenizer(tmp_path, ["</s>", "caf", "\ufffd"])
    text = write(tmp_path / "text", {f"{i}.txt": "caf\u00e9".encode("latin-1") for i in range(3)})
    argv = ["--data", text, "--seq-len", 1, "--eval-sequences", 2]
    corpus = load_corpus(options(*argv, "--tokenizer", file), load(file, 256))
    assert corpus.heldout.tolist() == [1, 2, 0]
    corpus = load_corpus(options(*argv))
    assert bytes(corpus.heldout.tolist()) == b"caf\xe9\0"     # as bytes as it is


def test_the_recipe_for_c4_writes_token_files_that_train_reads(tmp_path, monkeypatch):
    """docs/data.md's own lines. Tokens of the joined documents, an end after each."""
    monkeypatch.chdir(tmp_path)
    word_tokenizer(tmp_path, ["[UNK]", *(f"w{i}" for i in range(50)), "</s>"])
    texts = {"train": [[f"w{(i + j) % 50}" for j in range(i % 40)] for i in range(300)],
             "validation": [["w1", "w2"]] * 60}
    Path("c4").mkdir()
    for part, documents in texts.items():
        for number in range(2):         # two shards
            lines = "".join(json.dumps(dict(text=" ".join(words))) + "\n" for words in documents[number::2])
            Path(f"c4/c4-{part}.0000{number}-of-00002.json.gz").write_bytes(gzip.compress(lines.encode()))
    (recipe,) = re.findall(r"```python\n(.*?)```", (HERE / "docs/data.md").read_text(), re.S)
    exec(recipe, {})
    Path("tokens").mkdir()
    for name in ("train.bin", "val.bin"):
        Path(name).rename(Path("tokens", name))
    corpus = load_corpus(options("--data", "tokens", "--seq-len", 8, "--eval-sequences", 4))
    for tokens, part in ((corpus.train, "train"), (corpus.heldout, "validation")):
        want = []
        for words in [*texts[part][0::2], *texts[part][1::2]]:
            want += [1 + int(word[1:]) for word in words] + [51]
        assert tokens.tolist() == want
