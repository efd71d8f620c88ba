"""What one does with a run, or before one: partial inference and export."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from tests.harness import SMALL, checkpoint, error_of, metrics, options, refused, run
from tests.oracles import heldout_loss, loaded, through
from tools import export, partial


def test_export_equals_ours_in_transformers(trained, tmp_path, monkeypatch, capsys):
    transformers = pytest.importorskip("transformers")
    trained(3, "--stages", "2,1", "--layers-per-stage", "1,3", "--method", "local",
            "--steps", 6, "--lr", 0.01)
    monkeypatch.chdir(tmp_path)
    tokens = torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(0))
    thetas = [checkpoint(tmp_path / "runs/x", 6, rank)["theta"] for rank in range(3)]
    printed = {}
    for choice, ranks in (("0", [0]), ("1", [1]), ("mean", [0, 1])):
        export.main(["runs/x", f"out{choice}", "--replica", choice])
        printed[choice] = float(re.search(rf"replica {choice} +(\S+)", capsys.readouterr().out)[1])
        theta = sum(thetas[rank] for rank in ranks) / len(ranks)
        ours = [loaded(theta, [0]), loaded(thetas[2], [1, 2, 3])]
        theirs = transformers.AutoModelForCausalLM.from_pretrained(f"out{choice}")
        wanted = ours[0].logits(through(ours, tokens))
        assert torch.allclose(theirs(tokens).logits, wanted, rtol=0, atol=1e-5)
        assert theirs.dtype == torch.float32
    line = metrics(tmp_path / "runs/x")[-1]
    assert (printed["0"] + printed["1"]) / 2 == pytest.approx(line["heldout_loss"], abs=2e-6)
    assert printed["mean"] == pytest.approx(line["merged_loss"], abs=2e-6) != printed["0"] != printed["1"]
    said = theirs.generate(tokens[:1, :5], attention_mask=torch.ones(1, 5), max_new_tokens=8,
                           do_sample=False)
    assert torch.equal(said[:, :5], tokens[:1, :5]) and 5 < said.shape[1] <= 13
    assert theirs.generation_config.eos_token_id == 0
    assert not Path("outmean/tokenizer.json").exists()
    torn = tmp_path / "runs/x/checkpoints/00000006/rank2.pt"
    torn.write_bytes(torn.read_bytes()[:1000])
    for argv, error in ((["out0"], "not an empty folder"),
                        (["new", "--replica", "2"], "takes 0, 1, mean, not 2"),
                        (["new"], "00000006/rank2.pt is damaged")):
        assert error in error_of(export.main, "runs/x", *argv)


def test_partial_inference_equals_the_layers_in_one_process(skip_run, corpus, tmp_path):
    """It deletes nothing: what only some ranks have written so far may be whole a moment later."""
    folder = shutil.copytree(skip_run / "runs/x", tmp_path / "x")
    (folder / "checkpoints/00000009").mkdir()
    for rank in range(4):
        later = dict(checkpoint(folder, 3, rank), step=9)
        torch.save(later, folder / f"checkpoints/00000009/rank{rank}.pt")
    before = sorted(folder.rglob("*.pt"))
    run(5, folder, "--shares", "1,0.67,0.34", cwd=skip_run, main=partial.main)
    rows = json.loads((folder / "partial.json").read_text())
    assert sorted(row["stages"] for row in rows) == [[0], [0, 1], [0, 1, 2], [0, 2]]
    assert rows[0]["heldout_loss"] == pytest.approx(metrics(folder)[-1]["heldout_loss"], abs=1e-6)
    run(5, folder, "--shares", "1", "--dead", "1,2,4", cwd=skip_run, main=partial.main)
    assert sorted(folder.rglob("*.pt")) == before and len(before) == 9
    dead = json.loads((folder / "partial.json").read_text())
    # stage 1 is gone; origin 0 and rank 3 are left
    assert len(dead) == 1 and dead[0]["stages"] == [0, 2]
    assert checkpoint(folder, 3, 0)["rho"] == [1, 0.5, 0.5]     # one of the two adds all it learnt
    left = [loaded(checkpoint(folder, 3, 0)["theta"], [0]),
            loaded(checkpoint(folder, 3, 3)["theta"], [2, 3])]
    want = heldout_loss(left, options("--data", corpus, *SMALL))
    assert dead[0]["heldout_loss"] == pytest.approx(want, abs=1e-5)


def test_what_is_exported_has_the_scale_in_its_weights(skip_run, tmp_path, monkeypatch, capsys):
    """So a plain Llama has the loss that training evaluated (the rho rule). --unscaled: neither."""
    safetensors = pytest.importorskip("safetensors.torch")
    monkeypatch.chdir(shutil.copytree(skip_run, tmp_path / "skip"))
    line = metrics(Path("runs/x"))[-1]
    states = [checkpoint(Path("runs/x"), 3, r) for r in range(5)]
    second = [path[1] for path in states[0]["plan"]["paths"]]
    rho = [second.count(2) / 8, (second.count(3) + second.count(4)) / 8]
    assert states[0]["rho"] == [1.0, *rho] and sum(rho) == 1.0 and min(rho) > 0
    config = json.loads(Path("runs/x/config.json").read_text())
    losses, parts = [], []
    for unscaled in (False, True):
        Path("runs/x/config.json").write_text(json.dumps({**config, "unscaled": unscaled}))
        for rank, state in enumerate(states):
            state["options"]["unscaled"] = unscaled
            torch.save(state, f"runs/x/checkpoints/00000003/rank{rank}.pt")
        export.main(["runs/x", f"out{unscaled}", "--replica", "1"])
        said = re.findall(r"replica \d +(\S+)", capsys.readouterr().out)
        losses.append([float(loss) for loss in said])
        weights = safetensors.load_file(f"out{unscaled}/model.safetensors")
        for share, layers, rank in ((rho[0], [1], 2), (rho[1], [2, 3], 4)):
            for name, w in loaded(states[rank]["theta"], layers).named_parameters():
                last = ("o_proj" in name or "down_proj" in name) and not unscaled
                assert torch.equal(weights[name], w.detach() * (share if last else 1.0))
        given = [] if unscaled else ["--unscaled"]              # to the run, or here
        run(5, "runs/x", "--shares", "1", *given, cwd=".", main=partial.main)
        parts.append(json.loads(Path("runs/x/partial.json").read_text())[0]["heldout_loss"])
    assert sum(losses[0]) / 2 == pytest.approx(line["heldout_loss"], abs=2e-6)
    assert parts == pytest.approx([sum(losses[1]) / 2] * 2, abs=2e-6)
    assert abs(parts[0] - line["heldout_loss"]) > 1e-4


def test_dead_ranks_must_leave_an_origin_of_this_run(skip_run):
    for ranks in ("7", "0,1", "0,1,2,3,4"):
        line = refused(5, "runs/x", "--dead", ranks, cwd=skip_run, main=partial.main)
        assert line == (f"error: --dead {ranks}: takes ranks of this run, and must leave one of "
                        "the origins [0, 1]")
