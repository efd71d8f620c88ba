"""What one does with a run, or before one: partial inference, export, emulation."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from model import Config, Llama
from noloco import flatten
from plumbing.data import load_corpus
from tests.harness import SMALL, captured, checkpoint, metrics, options, processes, run
from tools import emulate, export, partial, plot


def test_export_equals_ours_in_transformers(corpus, tmp_path, monkeypatch, capsys):
    transformers = pytest.importorskip("transformers")
    run(3, "--stages", "2,1", "--layers-per-stage", "1,3", "--method", "local", "--kv-heads", 1,
        "--rope-theta", 500, "--steps", 6, "--lr", 0.01, "--data", corpus, "--name", "x", *SMALL,
        cwd=tmp_path)
    monkeypatch.chdir(tmp_path)
    config = Config(256, 32, 64, 4, 2, 1, 500.0)
    tokens = torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(0))
    printed = {}
    for choice, ranks in (("0", [0]), ("1", [1]), ("mean", [0, 1])):
        export.main(["runs/x", f"out{choice}", "--replica", choice])
        printed[choice] = float(re.search(rf"replica {choice} +(\S+)", capsys.readouterr().out)[1])
        ours = [Llama(config, [0]), Llama(config, [1, 2, 3], ends=False)]
        for part, held in zip(ours, (ranks, [2])):
            thetas = [checkpoint(tmp_path / "runs/x", 6, r)["theta"] for r in held]
            flatten(part.parameters())[0].copy_(sum(thetas) / len(held))
        theirs = transformers.AutoModelForCausalLM.from_pretrained(f"out{choice}")
        want = ours[0].logits(ours[1].blocks(ours[0].blocks(ours[0].embed(tokens))))
        assert torch.allclose(theirs(tokens).logits, want, rtol=0, atol=1e-5)
        assert theirs.dtype == torch.float32
    line = metrics(tmp_path / "runs/x")[-1]
    span = [line["heldout_min"], line["heldout_max"]]
    assert sorted([printed["0"], printed["1"]]) == pytest.approx(span, abs=2e-6)
    assert printed["mean"] != printed["0"]
    said = theirs.generate(tokens[:1, :5], attention_mask=torch.ones(1, 5), max_new_tokens=8, do_sample=False)
    assert torch.equal(said[:, :5], tokens[:1, :5])
    assert 5 < said.shape[1] <= 13
    assert theirs.generation_config.eos_token_id == 0
    for tokenizer in (transformers.AutoTokenizer.from_pretrained("outmean"),
                      transformers.PreTrainedTokenizerFast(tokenizer_file="outmean/tokenizer.json")):
        for text in ("def f(x):\n\treturn  x . 's , a",
                     " \u0100\u0120 \u00e9 e\u0301 \u4f60\u597d \U0001f389\0\r\n",
                     "".join(map(chr, range(300)))):
            assert tokenizer(text).input_ids == list(text.encode())
            assert tokenizer.decode(list(text.encode())) == text
    capsys.readouterr()  # transformers' bars
    torn = tmp_path / "runs/x/checkpoints/00000006/rank2.pt"
    torn.write_bytes(torn.read_bytes()[:1000])
    for argv, error in ((["out0"], "not an empty folder"),
                        (["new", "--replica", "2"], "takes 0, 1, mean, not 2"),
                        (["new"], "00000006/rank2.pt is damaged")):
        with pytest.raises(SystemExit):
            export.main(["runs/x", *argv])
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and error in lines[0]


def test_partial_inference_equals_the_layers_in_one_process(skip_run, corpus):
    folder = skip_run / "runs/x"
    run(5, folder, "--shares", "1,0.67,0.34", cwd=skip_run, main=partial.main)
    rows = json.loads((folder / "partial.json").read_text())
    assert sorted(row["stages"] for row in rows) == [[0], [0, 1], [0, 1, 2], [0, 2]]
    assert rows[0]["heldout_loss"] == pytest.approx(metrics(folder)[-1]["heldout_loss"], abs=1e-6)
    run(5, folder, "--shares", "1", "--dead", "1,2,4", cwd=skip_run, main=partial.main)
    dead = json.loads((folder / "partial.json").read_text())
    # stage 1 is gone; origin 0 and rank 3 are left
    assert len(dead) == 1 and dead[0]["stages"] == [0, 2]
    o = options("--data", corpus, *SMALL)
    heldout = load_corpus(o).heldout
    models = [Llama(Config(256, 32, 64, 4, 2, 2), layers, ends=not layers[0]) for layers in ([0], [2, 3])]
    for model, rank in zip(models, (0, 3)):
        flatten(model.parameters())[0].copy_(checkpoint(folder, 3, rank)["theta"])
    last, total = len(heldout) - o.seq_len - 1, 0.0
    assert checkpoint(folder, 3, 0)["rho"] == [1, 0.5, 0.5]     # so one of the two adds all it has learnt
    for i in range(8):
        row = heldout[round(i * last / 7) :][: o.seq_len + 1].long()[None]
        x = models[1].blocks(models[0].blocks(models[0].embed(row[:, :-1])))
        total += models[0].loss(x, row[:, 1:]).item()
    assert dead[0]["heldout_loss"] == pytest.approx(total / (8 * o.seq_len), abs=1e-5)


def test_what_is_exported_has_the_scale_in_its_weights(skip_run, tmp_path, monkeypatch, capsys):
    """So a plain Llama has the loss that training evaluated (the rho rule). --unscaled: neither."""
    safetensors = pytest.importorskip("safetensors.torch")
    monkeypatch.chdir(shutil.copytree(skip_run, tmp_path / "skip"))
    line, states = metrics(Path("runs/x"))[-1], [checkpoint(Path("runs/x"), 3, r) for r in range(5)]
    rho = [sum(path[1] in ranks for path in states[0]["plan"]["paths"]) / 8 for ranks in ([2], [3, 4])]
    assert states[0]["rho"] == [1.0, *rho] and sum(rho) == 1.0 and min(rho) > 0
    config = json.loads(Path("runs/x/config.json").read_text())
    losses = []
    for unscaled in (False, True):
        Path("runs/x/config.json").write_text(json.dumps({**config, "unscaled": unscaled}))
        export.main(["runs/x", f"out{unscaled}", "--replica", "1"])
        losses.append([float(loss) for loss in re.findall(r"replica \d +(\S+)", capsys.readouterr().out)])
        weights = safetensors.load_file(f"out{unscaled}/model.safetensors")
        for share, layers, rank in ((rho[0], [1], 2), (rho[1], [2, 3], 4)):
            trained = Llama(Config(256, 32, 64, 4, 2, 2), layers, ends=False)
            flatten(trained.parameters())[0].copy_(states[rank]["theta"])
            for name, w in trained.named_parameters():
                last = ("o_proj" in name or "down_proj" in name) and not unscaled
                assert torch.equal(weights[name], w.detach() * (share if last else 1.0))
    run(5, "runs/x", "--shares", "1", cwd=".", main=partial.main)
    unscaled = json.loads(Path("runs/x/partial.json").read_text())[0]["heldout_loss"]
    assert sorted(losses[0]) == pytest.approx([line["heldout_min"], line["heldout_max"]], abs=2e-6)
    assert unscaled == pytest.approx(sum(losses[1]) / 2, abs=2e-6)
    assert abs(unscaled - line["heldout_loss"]) > 1e-4


def test_partial_inference_deletes_nothing(skip_run, tmp_path):
    """A checkpoint that only some ranks have written so far may be whole a moment later."""
    folder = shutil.copytree(skip_run / "runs/x", tmp_path / "x")
    shutil.copytree(folder / "checkpoints/00000003", folder / "checkpoints/00000009")
    (folder / "checkpoints/00000009/rank4.pt").unlink()
    before = sorted(folder.rglob("*.pt"))
    run(5, folder, "--shares", "1", cwd=skip_run, main=partial.main)
    assert sorted(folder.rglob("*.pt")) == before and len(before) == 9


LINKS = ["--links", "nowhere.json"]
NO_LINKS = "tools.emulate needs --links FILE and several processes, all on one machine"


@pytest.mark.parametrize(
    "main, world, argv, error",
    [
        (export.main, 1, [], "the following arguments are required: run, out"),
        (export.main, 1, ["nowhere", "out"], "error: nowhere: no readable config.json there"),
        (export.main, 1, ["started", "out"], "started has no checkpoint with the parts of all 2 ranks"),
        (export.main, 1, ["started", "out", "--stages", "2"], "unrecognized arguments: --stages 2"),
        (export.main, 2, ["started", "out"], "tools.export runs in one process, without torchrun"),
        (plot.main, 1, ["started"], "started: no readable metrics.jsonl there, give folders of runs"),
        (partial.main, 1, [], "the following arguments are required: run"),
        (partial.main, 2, ["nowhere"], "error: nowhere: no readable config.json there"),
        (partial.main, 2, ["started", "--shares", "nan"], "--shares: takes shares above 0, at most 1"),
        (partial.main, 2, ["started", "--shares", "0"], "--shares: takes shares above 0, at most 1"),
        (partial.main, 2, ["started", "--shares", "1,1.1"], "--shares: takes shares above 0, at most 1"),
        (partial.main, 2, ["started", "--shares", "half"], "--shares: takes numbers with commas, not half"),
        (partial.main, 2, ["started"], "started has no checkpoint that all 2 ranks hold"),
        (partial.main, 1, ["started"], "--stages needs 2 processes but got 1"),
        (emulate.main, 1, LINKS, NO_LINKS),
        (emulate.main, 2, [], NO_LINKS),
        (emulate.main, 2, [*LINKS, "--time-scale", "0"], "--time-scale must be at least 1e-06, got 0"),
        (emulate.main, 2, [*LINKS, "--time-scale", "nan"], "--time-scale must be at least 1e-06, got nan"),
        (emulate.main, 2, LINKS, "nowhere.json"),
        (emulate.main, 2, [*LINKS, "--unknown"], "unrecognized arguments: --unknown"),
    ],
    ids=lambda value: getattr(value, "__module__", None),
)
def test_bad_input_of_a_tool_is_one_line_of_rank_0_and_status_2(main, world, argv, error, tmp_path):
    (tmp_path / "started").mkdir()
    (tmp_path / "started/config.json").write_text(json.dumps(dict(vars(options(*SMALL)), stages=[2])))
    results = processes(world, captured, main, argv, cwd=tmp_path)
    assert [code for code, _ in results] == [2] * world
    first, *others = [text.splitlines() for _, text in results]
    assert len(first) == 1 and first[0].startswith("error: ") and error in first[0]
    assert not any(others)
    assert [p.name for p in tmp_path.iterdir()] == ["started"]


@pytest.mark.parametrize("dead", ["7", "0", "0,1", "0,1,2,3,4"])
def test_dead_ranks_must_leave_an_origin_of_this_run(dead, skip_run):
    results = processes(5, captured, partial.main, ["runs/x", "--dead", dead], cwd=skip_run)
    if dead == "0":
        assert all(code == 0 for code, _ in results), results
        return
    assert [code for code, _ in results] == [2] * 5
    line = f"error: --dead {dead}: takes ranks of this run, and must leave one of the origins [0, 1]"
    assert results[0][1].splitlines()[-1] == line


@pytest.mark.parametrize("main", [partial.main, emulate.main], ids=lambda main: main.__module__)
def test_help_of_a_tool_is_rank_0s_alone(main, tmp_path):
    results = processes(2, captured, main, ["--help"], cwd=tmp_path, limit=60)
    assert [code for code, _ in results] == [0, 0]
    option = "--shares" if main is partial.main else "--time-scale"
    assert "usage: " in results[0][1] and option in results[0][1] and not results[1][1]


def test_plot_has_four_panels_and_a_note_where_corpora_differ(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    rows = [dict(step=s, tokens=s, sync_bytes=s, seconds=s, heldout_loss=3 / s) for s in (1, 2)]
    for name, corpus in (("a", "1"), ("b", "1"), ("c", "2")):
        Path(name).mkdir()
        lines = [dict(event="joined"), *(dict(row, corpus=corpus) for row in rows)]
        Path(name, "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    plotted = plot.draw({name: plot.rows_of(Path(name)) for name in "ab"})
    assert len(plotted.axes) == 4 and not plotted.get_suptitle()
    assert all([list(line.get_ydata()) for line in axis.lines] == [[3, 1.5]] * 2 for axis in plotted.axes)
    assert "different corpora" in plot.draw({name: plot.rows_of(Path(name)) for name in "ac"}).get_suptitle()
    plot.main(["a", "c", "--out", "out.png"])
    assert Path("out.png").exists()
