"""What one does with a run: partial inference and export."""

import json
import re

import pytest
import torch

import train
from model import Config, Llama
from noloco import flatten
from tests.harness import SMALL, checkpoint, metrics, options, run


def test_export_equals_ours_in_transformers(corpus, tmp_path, monkeypatch, capsys):
    transformers = pytest.importorskip("transformers")
    run(
        3, "--stages", "2,1", "--layers-per-stage", "1,3", "--method", "local", "--kv-heads", 1,
        "--rope-theta", 500, "--steps", 6, "--lr", 0.01, "--data", corpus, "--name", "x", *SMALL,
        cwd=tmp_path,
    )
    monkeypatch.chdir(tmp_path)
    config = Config(256, 32, 64, 4, 2, 1, 500.0)
    tokens = torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(0))
    printed = {}
    for choice, ranks in (("0", [0]), ("1", [1]), ("mean", [0, 1])):
        train.main(["--resume", "runs/x", "--export", f"out{choice}", "--export-replica", choice])
        printed[choice] = float(
            re.search(
                rf"{'mean of all' if choice == 'mean' else 'replica ' + choice} +(\S+)",
                capsys.readouterr().out,
            )[1]
        )
        ours = [Llama(config, [0]), Llama(config, [1, 2, 3], ends=False)]
        for part, held in zip(ours, (ranks, [2])):
            flatten(part.parameters())[0].copy_(
                sum(checkpoint(tmp_path / "runs/x", 6, r)["theta"] for r in held) / len(held)
            )
        theirs = transformers.AutoModelForCausalLM.from_pretrained(f"out{choice}")
        want = ours[0].logits(ours[1].blocks(ours[0].blocks(ours[0].embed(tokens))))
        assert torch.allclose(theirs(tokens).logits, want, rtol=0, atol=1e-5)
        assert theirs.dtype == torch.float32
    line = metrics(tmp_path / "runs/x")[-1]
    assert sorted([printed["0"], printed["1"]]) == pytest.approx(
        [line["heldout_min"], line["heldout_max"]], abs=2e-6
    )
    assert printed["mean"] != printed["0"]
    said = theirs.generate(tokens[:1, :5], attention_mask=torch.ones(1, 5), max_new_tokens=8, do_sample=False)
    assert torch.equal(said[:, :5], tokens[:1, :5])
    assert 5 < said.shape[1] <= 13
    assert theirs.generation_config.eos_token_id == 0
    for tokenizer in (
        transformers.AutoTokenizer.from_pretrained("outmean"),
        transformers.PreTrainedTokenizerFast(tokenizer_file="outmean/tokenizer.json"),
    ):
        for text in (
            "def f(x):\n\treturn  x . 's , a",
            " \u0100\u0120 \u00e9 e\u0301 \u4f60\u597d \U0001f389\0\r\n",
            "".join(map(chr, range(300))),
        ):
            assert tokenizer(text).input_ids == list(text.encode())
            assert tokenizer.decode(list(text.encode())) == text
    capsys.readouterr()  # transformers' bars
    torn = tmp_path / "runs/x/checkpoints/00000006/rank2.pt"
    torn.write_bytes(torn.read_bytes()[:1000])
    for argv, error in (
        (["--export", "out0"], "not an empty folder"),
        (["--export", "new", "--export-replica", "2"], "takes 0, 1, mean, not 2"),
        (["--export", "new"], "00000006 is damaged"),
    ):
        with pytest.raises(SystemExit):
            train.main(["--resume", "runs/x", *argv])
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and error in lines[0]


def test_partial_inference_equals_the_layers_in_one_process(skip_run, corpus):
    folder = skip_run / "runs/x"
    run(5, "--resume", folder, "--eval-stages", "1,0.67,0.34", cwd=skip_run)
    rows = json.loads((folder / "partial.json").read_text())
    assert [row["stages"] for row in sorted(rows, key=lambda row: row["stages"])] == [
        [0], [0, 1], [0, 1, 2], [0, 2]
    ]
    assert rows[0]["heldout_loss"] == pytest.approx(metrics(folder)[-1]["heldout_loss"], abs=1e-6)
    run(5, "--resume", folder, "--eval-stages", "1", "--dead", "1,2,4", cwd=skip_run)
    dead = json.loads((folder / "partial.json").read_text())
    # stage 1 is gone; origin 0 and rank 3 are left
    assert len(dead) == 1 and dead[0]["stages"] == [0, 2]
    o = options("--data", corpus, *SMALL)
    heldout = train.load_corpus(o).heldout
    models = [Llama(Config(256, 32, 64, 4, 2, 2), layers, ends=not layers[0]) for layers in ([0], [2, 3])]
    for model, rank in zip(models, (0, 3)):
        flatten(model.parameters())[0].copy_(checkpoint(folder, 3, rank)["theta"])
    last, total = len(heldout) - o.seq_len - 1, 0.0
    for i in range(8):
        row = heldout[round(i * last / 7) :][: o.seq_len + 1].long()[None]
        total += (
            models[0]
            .loss(models[1].blocks(models[0].blocks(models[0].embed(row[:, :-1]))), row[:, 1:])
            .item()
        )
    assert dead[0]["heldout_loss"] == pytest.approx(total / (8 * o.seq_len), abs=1e-5)
