"""Options: what --help says. Bad input of every program is one line and status 2, from rank 0 alone."""

import contextlib
import gzip
import io
import json
import re
import socket
import sys
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace

import pytest

import train
from experiments import pictures
from tests.harness import HERE, SMALL, captured, error_of, options, patience, processes, refused, surviving
from planning import measure
from tools import export, hosts, partial
from train import BadInput

PROGRAMS = {main.__module__: main for main in (export.main, hosts.read, measure.main,
                                               partial.main)} | {"survive": surviving}
FILES = {
    "empty/.hidden": b"", "empty.txt": b"", "mixed/a.txt": b"", "mixed/b.bin": b"",
    "hollow/a.bin": b"\1\0" * 2000, "hollow/b.bin": b"", "blank/a.txt": b"", "blank/b.txt": b"",
    "wide.bin": b"\5\0\0\0" * 3000,
    "tiny.txt": b"too tiny", "short.txt": b"too short " * 60, "tokens.bin": b"\x01\0\x60\xea" * 2000,
    "c4.json.gz": gzip.compress(b'{"text": "one"}'),
    "torn/config.json": b'{"method": "nol', "foreign/config.json": b'{"unknown": 1}',
    "nothing/config.json": b"{}",
    "edited/config.json": json.dumps(dict(vars(options()), batch="many")).encode(),
    "list.json": b"[]", "one.json": b'{"delay": [[0]], "compute": 1}',
    "three.json": json.dumps(dict(delay=[[1] * 3] * 3, compute=1, stages=[[2], [1]])).encode(),
    "long.txt": b"long enough " * 500, "pictures/x.png": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR",
    "started/config.json": json.dumps(dict(vars(options(*SMALL, "--data", "long.txt")), stages=[2])).encode(),
}
BAD = [line.split(" => ") for line in (HERE / "tests/bad_input.txt").read_text().splitlines()
       if not line.startswith("#")]


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


@pytest.mark.parametrize("line, error", BAD)
def test_bad_input_is_one_line_of_rank_0_and_status_2(line, error, files):
    main, *argv = program_of(line.removeprefix("2: "))
    told = refused(2, *argv, main=main, cwd=Path()) if line.startswith("2: ") else error_of(main, *argv)
    assert error in told


def test_a_missing_package_names_the_extra(files, monkeypatch):
    for package in ("tokenizers", "matplotlib"):
        monkeypatch.setitem(sys.modules, package, None)
    error = error_of(train.main, "--tokenizer", "x.json")
    assert "needs the tokenizers package: pip install '.[hf]'" in error
    with pytest.raises(BadInput, match=r"\[plot\]"):
        pictures.picture(Path(), "sync_measured", None, [])


def test_help_of_a_tool_is_rank_0s_alone():
    (code, text), other = processes(2, captured, partial.main, ["--help"])
    assert code == 0 and other == (0, "") and "usage: " in text and "--shares" in text


@pytest.mark.parametrize("argv, outer", [("--model small", (50, 0.5, 0.7)), ("", (10, 0.0, 1.0)),
                                         ("--model small --alpha 0", (50, 0.0, 0.7)),
                                         ("--model small --method diloco", (100, 0.3, 0.7))])
def test_the_outer_settings_are_the_papers_but_for_tiny(argv, outer):
    o = options(*argv.split())
    assert (o.inner_steps, o.alpha, o.beta) == outer


@pytest.mark.parametrize("given, gamma", [([], None), (["--gamma", 0.6], 0.6)])
def test_gamma_is_beta_also_where_a_run_resumes_with_another_beta(given, gamma, tmp_path):
    """None is beta, of NoLoCo. It was 0.7, and the run went on with that beside its beta of 0.5."""
    o = options("--beta", 0.7, *given)
    (tmp_path / "config.json").write_text(json.dumps(vars(o)))
    assert o.gamma == options("--resume", tmp_path, "--beta", 0.5).gamma == gamma


@pytest.mark.parametrize("launched, beside", [(True, 3), (True, 0), (False, 3)])
def test_survive_with_processes_that_one_torchrun_would_kill_together_is_a_warning(
        launched, beside, corpus, tmp_path, monkeypatch):
    """Workers started without torchrun (RANK, WORLD_SIZE) and a torchrun for each are as they should be."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(1 + beside))
    if launched:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    code, said = captured(0, 1, surviving, ["--survive", 5, "--steps", 1, "--data", corpus, *SMALL])
    line = "warning: when a process dies, torchrun ends the 3 beside it, and survive cannot help: give each"
    assert code == 0 and said.startswith(line) == (launched and beside > 0)


@pytest.mark.parametrize("port, words", [("99999", "port must have value from 0 to 65535"),
                                         ("abc", "invalid literal"), ("taken", "address already in use")])
def test_a_port_that_cannot_be_is_one_line(port, words, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        if port == "taken":
            port = str(taken.getsockname()[1])
        for name, value in dict(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port).items():
            monkeypatch.setenv(name, value)
        error = error_of(train.main)
    assert error.startswith(f"error: rank 0, 127.0.0.1:{port}: ") and words in error


def _comes_late(rank, world):
    """What a rank says while it waits for the first one."""
    if rank == 0:
        time.sleep(patience(1))
    train.Job.silent = 0.1
    out = io.StringIO()
    with contextlib.redirect_stderr(out):
        train.Job().close()
    return out.getvalue()


def test_a_process_says_for_whom_it_waits():
    _, said = processes(2, _comes_late)
    assert re.fullmatch(r"rank 1: waiting for rank 0 at 127\.0\.0\.1:\d+, and all others\n", said)


@pytest.mark.parametrize("size, most", [(2, 0), (3, 4)])
def test_groups_that_are_larger_than_was_asked_for_are_named(size, most):
    o = options("--stages", "4", "--group-size", size)
    plain = SimpleNamespace(o=o, stages=[[0, 1, 2, 3]], routes=SimpleNamespace(plan=None))
    found = train.remarks(plain)
    assert (f"up to {most} replicas average together: a stage does not divide into groups of {size}"
            in found) == (most > 0)


@pytest.mark.parametrize("name", ["survive.__main__", "experiments.gap", None])
def test_help_names_the_program_as_python_takes_it(name, monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", name and ModuleSpec(name, None), raising=False)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    names = {"survive.__main__": "python -m survive", "experiments.gap": "python -m experiments.gap"}
    assert train.Parser("").prog == names.get(name, "train.py")


def test_help_has_every_option():
    code, text = captured(0, 1, train.main, ["--help"])
    found = re.findall(r"^  --([a-z0-9-]+)", text, re.M)
    assert code == 0 and [name.replace("-", "_") for name in found] == [*vars(options())]
