"""Options: what --help says; bad input is one line and status 2, from rank 0 alone."""

import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import train
from model import Config
from plumbing import report
from plumbing.processes import BadInput
from tests.harness import HERE, SMALL, options, processes, run, train_main


LLAMA = dict(model_type="llama", vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
             num_attention_heads=2)


def bad(*argv, error):
    return pytest.param([str(a) for a in argv], error, id=error.replace(" ", "-")[:30])


@pytest.mark.parametrize(
    "argv, error",
    [
        bad("--stages", "4,4", error="needs 8 processes but got 1"),
        bad("--stages", "x", error="numbers with commas"),
        bad("--stages", "1,0", error="every stage needs a replica"),
        bad("--method", "ddp", "--alpha", 0.5, error="ddp has no --alpha"),
        bad("--method", "fedavg", error="invalid choice"),
        bad("--data", "nowhere.txt", error="no such file"),
        bad("--data", "empty", error="no such file, or a folder without files"),
        bad("--data", "empty.txt", error="fewer than one sequence"),
        bad("--data", "short.txt", "--seq-len", 512, error="data has"),
        bad("--data", "mixed", error="mixes"),
        bad("--data", "tokens.bin", error="give --vocab 60001 or more"),
        bad("--data", "c4.json.gz", error="as .bin files once: python -m tools.prepare c4.json.gz FOLDER"),
        bad("--data", "x.png", error="x.png is no text file"),
        bad("--init-from", "nowhere", error="nowhere"),
        bad("--init-from", "torn", error="Unterminated"),
        bad("--init-from", "foreign", error="model_type None is not supported, only llama"),
        bad("--init-from", "llama", "--hidden", 64, error="--hidden 64 differs from the 32 of llama"),
        bad("--init-from", "llama", "--data", "short.txt", error="No such file"),
        bad("--resume", "torn", error="no readable config.json of a run there (Unterminated"),
        bad("--resume", "foreign", error="no readable config.json of a run there"),
        bad("--resume", "lr", error="lr is 'fast'"),
        bad("--resume", "ways", error="method is 'fedavg'"),
        bad("--resume", "stages", error="stages is [2, '2']"),
        bad("--resume", "batch", error="batch is None"),
        bad("--resume", "tied", error="tied is 1"),
        bad("--vocab", 100, "--data", "short.txt", error="vocabulary of 256"),
        bad("--tokenizer", "nowhere.json", "--data", "short.txt", error="nowhere.json"),
        bad("--layers-per-stage", "1,1", error="stages must share"),
        bad("--hidden", 30, "--heads", 4, error="must be a multiple"),
        bad("--resume", "nowhere", error="no readable config.json"),
        bad("--steps", 0, error="at least 1"),
        bad("--group-size", 1, error="at least 2"),
        bad("--steps", "many", error="invalid int"),
        bad("--unknown", error="unrecognized"),
        bad("--skip", 0.5, error="at least 3 stages"),
        bad("--skip", 1.5, error="from 0 to below 1"),
        bad("--skip", 0.5, "--routing", "random", error="planned routing"),
        bad("--survive", 5, "--method", "ddp", error="noloco and local: --method ddp needs every process"),
        bad("--survive", 5, "--method", "diloco", error="noloco and local: --method diloco needs every"),
        bad("--survive", -1, error="--survive must be at least 0"),
        bad("--survive", "inf", error="--survive must be at least 0.0, got inf"),
        bad("--join", error="--join is for a process that comes back to a running job"),
        bad("--replan", 0.2, error="--replan is for planned paths"),
        bad("--replan", 0.2, "--routing", "skippipe", "--survive", 5, error="and not with --survive"),
        bad("--replan", -1, error="--replan must be at least 0"),
        bad("--skip", 0.9, "--stages", 1, error="at least 3 stages"),
        bad("--wire", "int8", "--gamma", 0.9, error="noloco with gamma = beta"),
        bad("--wire", "int8", "--method", "ddp", error="--wire int8 is for noloco"),
        bad("--lr", -1, error="--lr must be at least"),
        bad("--beta2", 1, error="--beta2 must be from 0 to below 1, got 1.0"),
        bad("--hel", error="unrecognized"),
        bad("--links", "nowhere.json", error="nowhere.json"),
        bad("--links", "short.txt", error="short.txt"),
    ],
)
def test_bad_input_is_one_line_and_status_2(argv, error, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("mixed").mkdir()
    for name in ("empty.txt", "mixed/a.txt", "mixed/b.bin", "c4.json.gz"):
        Path(name).touch()
    Path("short.txt").write_text("too short " * 60)
    Path("tokens.bin").write_bytes(torch.tensor([1, 60000] * 2000, dtype=torch.uint16).numpy().tobytes())
    Path("x.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    for name, text in (("torn", '{"method": "nol'), ("foreign", '{"unknown": 1}'), ("lr", '{"lr": "fast"}'),
                       ("ways", '{"method": "fedavg"}'), ("stages", '{"stages": [2, "2"]}'),
                       ("batch", '{"batch": null}'), ("tied", '{"tied": 1}')):
        Path(name).mkdir()
        Path(name, "config.json").write_text(text)
    Path("llama").mkdir()
    Path("llama/config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(SystemExit) as stop:
        train.main(argv)
    printed = capsys.readouterr()
    assert stop.value.code == 2 and not printed.out
    assert len(printed.err.splitlines()) == 1 and error in printed.err


def test_bad_input_under_several_processes_is_printed_by_rank_0_alone(tmp_path):
    for argv in (["--stages", "2,2"], ["--method", "x"], ["--data", "nowhere"]):
        results = processes(3, train_main, argv, cwd=tmp_path)
        assert [code for code, _ in results] == [2, 2, 2]
        assert len(results[0][1].splitlines()) == 1 and not results[1][1] + results[2][1]


def test_gamma_outside_the_bound_is_a_warning_with_the_bound(corpus, tmp_path):
    out = run(2, "--alpha", 0.5, "--gamma", 3.1, "--steps", 1, "--data", corpus, "--name", "x", *SMALL,
              cwd=tmp_path)
    assert out.count("warning: gamma 3.1") == 1
    assert "warning: gamma 3.1 is outside 0 < gamma < 3.000" in out         # for two; many replicas: 1.5


def first_lines(o, origins):
    """What a run with these options says first, on so many replicas."""
    job = SimpleNamespace(world=origins, device=torch.device("cpu"), nccl=False)
    corpus = SimpleNamespace(train=[], heldout=[], digest="", undecodable=0)
    return list(report.banner(SimpleNamespace(o=o, job=job, corpus=corpus, stages=[range(origins)], step=0,
                                              config=Config(), outer=o.inner_steps)))


@pytest.mark.parametrize("argv, outer", [((), (50, 0.5, 0.7, 0.7)), (("--alpha", "0"), (50, 0.0, 0.7, 0.7)),
                                         (("--method", "diloco"), (100, 0.3, 0.7, 0.7)),
                                         (("--model", "tiny"), (10, 0.0, 1.0, 1.0))], ids=str)
def test_weights_from_elsewhere_take_the_papers_outer_settings_unless_asked_for_tinys(argv, outer, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    o = train.parse(["--init-from", str(tmp_path), *argv], 8)
    assert (o.inner_steps, o.alpha, o.beta, o.gamma) == outer
    every, alpha, beta, gamma = outer
    said = first_lines(o, 8)
    step = f"outer step every {every} steps, alpha {alpha}, beta {beta}, gamma {gamma}"
    assert step + ", weights travel in fp32" in said


@pytest.mark.parametrize("origins", [1, 16])
def test_the_first_lines_say_how_many_tokens_a_step_has(origins):
    said = first_lines(train.parse(["--model", "small"], origins), origins)
    assert any(f"8192 tokens per origin, {8192 * origins} in all" in line for line in said)


@pytest.mark.parametrize("method", ["noloco", "diloco"])
@pytest.mark.parametrize("delay", ["3", "half", "4"])
def test_a_delay_of_more_than_half_of_the_inner_steps_is_a_warning(delay, method):
    argv = ["--method", method, "--inner-steps", "6", "--delay", delay]
    warnings = [line for line in first_lines(train.parse(argv, 2), 2) if "warning" in line]
    assert warnings == (delay == "4") * [
        "warning: --delay 4 is more than half of --inner-steps 6: differences between replicas then die out "
        "slowly, see docs/stability.md"]


def test_help_begins_with_what_most_runs_need_and_shows_each_models_and_methods_defaults(capsys):
    with pytest.raises(SystemExit) as stop:
        train.main(["--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0
    listed = re.findall(r"^  --([a-z0-9-]+)", text, re.M)
    assert listed[:10] == "method stages model data steps lr inner-steps skip name resume".split()
    assert sorted(listed) == sorted(f.name.replace("_", "-") for f in fields(train.Options))
    entries = re.findall(r"^  --([a-z0-9-]+)(.*?)(?=^  --|^$|\Z)", text, re.M | re.S)
    help_of = {option: " ".join(words.split()) for option, words in entries}
    for option, defaults in {"lr": "tiny 0.003, small 0.0006, medium 0.0002, large 0.00012",
                             "steps": "tiny 300, small 25000, medium 25000, large 25000",
                             "hidden": "tiny 128, small 768, medium 2048, large 4096",
                             "inner-steps": "noloco 50, diloco 100, noloco with tiny 10, diloco with tiny 20",
                             "alpha": "noloco 0.5, diloco 0.3, noloco with tiny 0.0, diloco with tiny 0.0",
                             "group-size": "noloco 2", "clip": "1.0"}.items():
        assert help_of[option].endswith(f"(default: {defaults})"), help_of[option]


def test_runs_of_older_versions_go_on_unless_they_used_what_is_gone(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs/x").mkdir(parents=True)
    config = vars(options("--data", corpus, "--name", "x", *SMALL))
    config.pop("unscaled")
    for before in ({}, {"scaled": False, "falling": False, "warm_start": 0}):
        Path("runs/x/config.json").write_text(json.dumps({**config, **before}))
        assert not options("--resume", "runs/x").unscaled
        assert options("--resume", "runs/x", "--unscaled").unscaled
    for gone in ({"scaled": True}, {"warm_start": 100}):
        Path("runs/x/config.json").write_text(json.dumps({**config, **gone}))
        with pytest.raises(BadInput, match="was started with --.*, which this version lacks"):
            options("--resume", "runs/x")


def test_importing_a_module_changes_no_warnings():
    code = ("import warnings, torch, tqdm, model, noloco; before = list(warnings.filters); "
            "import plumbing.report, plumbing.checkpoints, plumbing.data; assert warnings.filters == before")
    subprocess.run([sys.executable, "-c", code], cwd=HERE, check=True, timeout=60)
