"""Options: what --help says. Bad input of every program is one line and status 2, from rank 0 alone."""

import gzip
import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import bench_sync
import train
from plumbing.processes import BadInput
from tests.harness import HERE, SMALL, captured, error_of, errors_of, options, processes, run
from tools import emulate, export, partial, plot, prepare

PROGRAMS = {main.__module__: main for main in (bench_sync.main, emulate.main, export.main, partial.main,
                                               plot.main, prepare.main, train.main)}
LLAMA = dict(model_type="llama", vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
             num_attention_heads=2)
FILES = {
    "empty/.hidden": b"", "empty.txt": b"", "mixed/a.txt": b"", "mixed/b.bin": b"",
    "short.txt": b"too short " * 60, "tokens.bin": b"\x01\0\x60\xea" * 2000,
    "c4.json.gz": gzip.compress(b'{"text": "one"}'), "llama/config.json": json.dumps(LLAMA).encode(),
    "torn/config.json": b'{"method": "nol', "foreign/config.json": b'{"unknown": 1}',
    "lr/config.json": b'{"lr": "fast"}', "ways/config.json": b'{"method": "fedavg"}',
    "stages/config.json": b'{"stages": [2, "2"]}', "batch/config.json": b'{"batch": 4.0}',
    "tied/config.json": b'{"tied": 1}',
    "list.json": b"[]", "one.json": b'{"delay": [[0]], "compute": 1}',
    "three.json": json.dumps(dict(delay=[[1] * 3] * 3, compute=1, stages=[[2], [1]])).encode(),
    "long.txt": b"long enough " * 500,
    "started/config.json": json.dumps(dict(vars(options(*SMALL, "--data", "long.txt")), stages=[2])).encode(),
}
BAD = {
    "--stages 4,4": "needs 8 processes but got 1", "--stages x": "--stages: takes numbers with commas, not x",
    "--stages 1,0": "every stage needs a replica", "--layers-per-stage 1,1": "stages must share",
    "--hidden 30 --heads 4": "must be a multiple", "--method ddp --alpha 0.5": "ddp has no --alpha",
    "--method fedavg": "invalid choice", "--method local --delay 5": "local has no --delay",
    "--method local --wire int8 --delay 1": "--method local has no --wire and no --delay",
    "--method diloco --survive 5": "has no --survive",
    "--delay 51 --inner-steps 50": "--delay 51: takes 0 to --inner-steps, or half",
    "--delay 5 --survive 5": "--survive goes with neither --replan nor --delay",
    "--data nowhere.txt": "nowhere.txt: no such file", "--data empty": "empty: no such file, or none to read",
    "--data empty.txt": "1 held-out tokens", "--data short.txt --seq-len 512": "give more, or a smaller",
    "--data mixed": "mixes", "--data tokens.bin": "has token 60000: give --vocab 60001 or more, not 256",
    "--data c4.json.gz": "as .bin files once: python -m tools.prepare",
    "--vocab 100 --data short.txt": "needs --vocab 256, not 100",
    "--tokenizer nowhere.json --data short.txt": "nowhere.json",
    "--init-from nowhere": "nowhere", "--init-from torn": "Unterminated",
    "--init-from foreign": "model_type None is not supported, only llama",
    "--init-from llama --hidden 64": "--hidden 64 differs from the 32 of llama",
    "--init-from llama --data short.txt": "No such file",
    "--resume nowhere": "no readable config.json",
    "--resume torn": "torn: no readable config.json there: Unterminated",
    "--resume foreign": "foreign: no readable config.json there: unrecognized arguments: --unknown=1",
    "--resume lr": "--lr: invalid float value: 'fast'", "--resume ways": "--method: invalid choice: 'fedavg'",
    "--resume stages": "--stages: takes numbers with commas, not [2, '2']",
    "--resume batch": "invalid int value: '4.0'", "--resume tied": "--tied: ignored explicit argument '1'",
    "--steps 0": "at least 1", "--group-size 1": "at least 2", "--steps many": "invalid int",
    "--unknown": "unrecognized", "--hel": "unrecognized", "--beta2 1": "--beta2 must be below 1",
    "--skip 0.5": "at least 3 stages", "--skip 0.9 --stages 1": "at least 3 stages",
    "--skip 1.5": "--skip must be below 1", "--skip 0.5 --routing random": "planned routing, not --routing",
    "--lr -1": "--lr must be at least 0", "--survive -1": "must be at least 0", "--replan -1": "at least 0",
    "--survive inf": "at least 0, got inf", "--join": "is for a process that comes back to a",
    "--replan 0.2": "--replan is for planned paths", "--wire int8 --gamma 0.9": "int8 needs gamma = beta",
    "--replan 0.2 --routing skippipe --survive 5": "--survive goes with neither --replan",
    "--links nowhere.json": "nowhere.json", "--links short.txt": "short.txt",
    "--links list.json": "--links list.json: must hold an object with delay and compute",
    "--links three.json": "has stages of [1, 1] nodes, this run of [1]",
    "bench_sync": "nothing to do", "bench_sync --simulate --mbit 0": "--mbit",
    "bench_sync --simulate --latency-std -1": "--latency-std", "bench_sync --simulat": "--simulat",
    "tools.export": "the following arguments are required: run, out",
    "tools.export nowhere out": "error: nowhere: no readable config.json there",
    "tools.export started out": "started has no checkpoint with the parts of all 2 ranks",
    "tools.export started out --stages 2": "unrecognized arguments: --stages 2",
    "tools.plot started": "started: no readable metrics.jsonl there, give folders of runs",
    "tools.prepare nowhere out": "no such file", "tools.prepare mixed mixed": "not an empty folder",
    "tools.prepare tokens.bin out": "tokens.bin holds no .json.gz shards: give text and .bin files to",
    "tools.prepare short.txt out": "short.txt holds no .json.gz shards: give text and .bin files to",
    "--wire bf16": "rounds updates of NoLoCo's theta away",
    "tools.partial --dead 7": "the following arguments are required: run",
    "tools.partial started": "--stages needs 2 processes but got 1",
    "tools.emulate": "tools.emulate needs --links FILE and several processes, all on one machine",
    "tools.emulate --links short.txt": "tools.emulate needs --links FILE and several processes, all on one",
}
BAD_FOR_TWO = [
    ("train --stages 2,2", "needs 4 processes but got 2"), ("train --data nowhere", "nowhere: no such file"),
    ("train --links one.json", "--links one.json: stages must be non-empty lists of different nodes below 1"),
    ("bench_sync --simulate", "no torchrun"),
    ("bench_sync --trials 0", "--trials"), ("bench_sync --params nan", "--params"),
    ("tools.export started out", "tools.export runs in one process, without torchrun"),
    ("tools.partial nowhere", "error: nowhere: no readable config.json there"),
    ("tools.partial started", "started has no checkpoint that all 2 ranks hold"),
    *((f"tools.partial started --shares {shares}", "--shares: takes shares above 0, at most 1")
      for shares in ("nan", "0", "1,1.1")),
    ("tools.partial started --shares half", "takes numbers with commas, not half"),
    ("tools.emulate", "tools.emulate needs --links FILE and several processes, all on one machine"),
    *((f"tools.emulate --links no.json --time-scale {scale}", f"must be at least 1e-06, got {scale}")
      for scale in ("0", "nan", "inf")),
    ("tools.emulate --links no.json", "no.json"),
    ("tools.emulate --links no.json --stages 3", "--stages needs 3 processes but got 2"),
    ("tools.emulate --links no.json --unknown", "unrecognized arguments: --unknown"),
]


@pytest.fixture
def files(tmp_path, monkeypatch):
    """FILES in the working folder."""
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(content)
    yield
    assert {p.as_posix() for p in Path().rglob("*") if p.is_file()} == set(FILES)       # nothing was written


def program_of(line):
    """(main, *arguments) of a line that begins with the program, or else is for train.py."""
    first, *rest = words = line.split() or [""]
    return (PROGRAMS[first], *rest) if first in PROGRAMS else (train.main, *words)


@pytest.mark.parametrize("line", BAD)
def test_bad_input_is_one_line_and_status_2(line, files):
    assert BAD[line] in error_of(*program_of(line))


def test_bad_input_under_several_processes_is_printed_by_rank_0_alone(files):
    told = errors_of(2, *(program_of(line) for line, _ in BAD_FOR_TWO), cwd=Path())
    for (line, error), said in zip(BAD_FOR_TWO, told, strict=True):
        assert error in said, line


@pytest.mark.parametrize("main, option", [(partial.main, "--shares"), (emulate.main, "--time-scale")])
def test_help_of_a_tool_is_rank_0s_alone(main, option):
    (code, text), other = processes(2, captured, main, ["--help"])
    assert code == 0 and other == (0, "") and "usage: " in text and option in text


@pytest.mark.parametrize("delay", [5, 6])
def test_gamma_outside_its_bound_or_a_delay_beyond_half_is_a_warning(delay, corpus, tmp_path):
    out = run(2, "--alpha", 0.5, "--gamma", 3.1, "--delay", delay, "--steps", 1, "--data", corpus,
              "--name", "x", *SMALL, cwd=tmp_path)
    late = ("warning: --delay 6 is more than half of --inner-steps 10: differences between replicas then die "
            "out slowly, see docs/stability.md\n")
    assert (late in out) == ("--delay" in out) == (delay == 6)
    assert "128 tokens per origin, 256 in all" in out
    assert out.count("warning: gamma 3.1 is outside 0 < gamma < 3.000") == 1    # for two; many replicas: 1.5
    assert "outer step every 10 steps, alpha 0.5, beta 1.0, gamma 3.1, weights travel in fp32" in out


@pytest.mark.parametrize("argv, outer", [((), (50, 0.5, 0.7, 0.7)), (("--alpha", "0"), (50, 0.0, 0.7, 0.7)),
                                         (("--method", "diloco"), (100, 0.3, 0.7, 0.7)),
                                         (("--model", "tiny"), (10, 0.0, 1.0, 1.0))], ids=str)
def test_weights_from_elsewhere_take_the_papers_outer_settings_unless_asked_for_tinys(argv, outer, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    o = train.parse(["--init-from", str(tmp_path), *argv], 8)
    assert (o.inner_steps, o.alpha, o.beta, o.gamma) == outer


def test_help_begins_with_what_most_runs_need_and_shows_each_models_and_methods_defaults(capsys):
    with pytest.raises(SystemExit) as stop:
        train.main(["--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0
    listed = re.findall(r"^  --([a-z0-9-]+)", text, re.M)
    assert listed[:10] == "method inner-steps stages skip model steps lr data name resume".split()
    assert sorted(listed) == sorted(f.name.replace("_", "-") for f in fields(train.Options))
    entries = re.findall(r"^  --([a-z0-9-]+)(.*?)(?=^  --|^$|\Z)", text, re.M | re.S)
    help_of = {option: " ".join(words.split()) for option, words in entries}
    for option, defaults in {"lr": "tiny 0.003, small 0.0006, medium 0.0002, large 0.00012",
                             "inner-steps": "noloco 50, diloco 100, noloco with tiny 10, diloco with tiny 20",
                             "alpha": "noloco 0.5, diloco 0.3, noloco with tiny 0.0, diloco with tiny 0.0",
                             "group-size": "noloco 2", "clip": "1.0", "seed": "0"}.items():
        assert help_of[option].endswith(f"(default: {defaults})"), help_of[option]


def test_runs_of_older_versions_go_on_unless_they_used_what_is_gone(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs/x").mkdir(parents=True)
    config = vars(options("--data", corpus, "--name", "x", *SMALL))
    del config["unscaled"]
    Path("runs/x/config.json").write_text(json.dumps({**config, "scaled": False, "falling": None}))
    assert not options("--resume", "runs/x").unscaled
    assert options("--resume", "runs/x", "--unscaled").unscaled
    Path("runs/x/config.json").write_text(json.dumps({**config, "warm_start": 100}))
    with pytest.raises(BadInput, match="unrecognized arguments: --warm-start=100"):
        options("--resume", "runs/x")


def test_importing_a_module_changes_no_warnings():
    code = ("import warnings, torch, tqdm, model, noloco; before = list(warnings.filters); "
            "import plumbing.report, plumbing.checkpoints, plumbing.data; assert warnings.filters == before")
    subprocess.run([sys.executable, "-c", code], cwd=HERE, check=True, timeout=60)
