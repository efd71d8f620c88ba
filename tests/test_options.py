"""Options: what --help says. Bad input of every program is one line and status 2, from rank 0 alone."""

import gc
import gzip
import json
import re
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import bench_sync
import train
from experiments import pictures
from gossip import onebyte
from model import Llama
from noloco import flatten
from plumbing import memory
from plumbing.inner import muon
from plumbing.options import gamma_of, whole_config
from plumbing.processes import BadInput
from plumbing.report import outer_warnings
from tests.harness import HERE, SMALL, SMALL_CONFIG, captured, error_of, options, processes, refused
from tools import emulate, export, hosts, partial, prepare

PROGRAMS = {main.__module__: main for main in (bench_sync.main, emulate.main, export.main, hosts.read,
                                               partial.main, prepare.main)}
FILES = {
    "empty/.hidden": b"", "empty.txt": b"", "mixed/a.txt": b"", "mixed/b.bin": b"",
    "hollow/a.bin": b"\1\0" * 2000, "hollow/b.bin": b"", "blank/a.txt": b"", "blank/b.txt": b"",
    "tiny.txt": b"too tiny", "short.txt": b"too short " * 60, "tokens.bin": b"\x01\0\x60\xea" * 2000,
    "c4.json.gz": gzip.compress(b'{"text": "one"}'),
    "torn/config.json": b'{"method": "nol', "foreign/config.json": b'{"unknown": 1}',
    "lr/config.json": b'{"lr": "fast"}', "ways/config.json": b'{"method": "fedavg"}',
    "stages/config.json": b'{"stages": [2, "2"]}', "batch/config.json": b'{"batch": 4.0}',
    "tied/config.json": b'{"tied": 1}', "nothing/config.json": b"{}",
    "delayed/config.json": json.dumps(vars(options("--delay", "half"))).encode(),
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


@pytest.mark.parametrize("main, option", [(partial.main, "--shares"), (emulate.main, "--time-scale")])
def test_help_of_a_tool_is_rank_0s_alone(main, option):
    (code, text), other = processes(2, captured, main, ["--help"])
    assert code == 0 and other == (0, "") and "usage: " in text and option in text


@pytest.mark.parametrize("delay", [5, 6])
def test_gamma_outside_its_bound_or_a_delay_beyond_half_is_a_warning(delay, trained):
    out = trained(2, "--alpha", 0.5, "--gamma", 3.1, "--delay", delay, "--steps", 1)
    late = "warning: --delay 6 is more than half of --inner-steps: replicas come together slowly\n"
    assert (late in out) == ("--delay" in out) == (delay == 6)
    assert "128 tokens per origin, 256 in all" in out
    assert out.count("warning: gamma 3.1 is outside 0 < gamma < 3.000") == 1    # for two; many replicas: 1.5
    assert "outer step every 10 steps, alpha 0.5, beta 1.0, gamma 3.1, weights travel in fp32" in out


@pytest.mark.parametrize("argv, warning", [
    ("--steps 9", "9 steps end before the first merge, at step 10: replicas never synchronise"),
    ("--steps 14 --delay 5", "14 steps end before the first merge, at step 15: replicas never synchronise"),
    ("--steps 6 --fragments 5 --delay 5", "6 steps end before the first merge, at step 7: replicas never"),
    ("--steps 9 --fragments 5", "9 steps end before step 10, when each fragment has met: some weights"),
    ("--group-size 3", "--group-size 3 is more than the 2 replicas of a stage: there all meet"),
    ("--steps 10", None), ("--steps 15 --delay 5", None), ("--steps 10 --fragments 5", None),
    ("--steps 1 --method ddp", None)])
def test_an_outer_step_that_is_not_what_was_asked_for_is_a_warning(argv, warning):
    """A run that ends before its messages are merged trains each replica alone. A delayed one did not say."""
    o = options("--model", "tiny", *argv.split())           # every 10 steps
    outer = None if o.method == "ddp" else object()
    told = list(outer_warnings(SimpleNamespace(o=o, outer=outer, stages=[[0, 1], [2]])))
    assert len(told) == (warning is not None) and all(warning in line for line in told)
    # a process alone has said that nothing is synchronised
    assert not list(outer_warnings(SimpleNamespace(o=o, outer=outer, stages=[[0], [1]])))


@pytest.mark.parametrize("warmup", [3, 4])
def test_a_run_that_ends_within_its_warm_up_says_so(warmup, trained):
    out = trained(1, "--steps", 3, "--warmup", warmup)
    said = "warning: 3 steps end within the warm-up of 4: the rate reaches 75% of its peak (--warmup)"
    assert out.count("within the warm-up") == out.count(said) == (warmup == 4)


@pytest.mark.parametrize("argv, outer", [("--model small", (50, 0.5, 0.7, 0.7)), ("", (10, 0.0, 1.0, 1.0)),
                                         ("--model small --alpha 0", (50, 0.0, 0.7, 0.7)),
                                         ("--model small --method diloco", (100, 0.3, 0.7, 0.7))])
def test_the_outer_settings_are_the_papers_but_for_tiny(argv, outer):
    o = options(*argv.split())
    assert (o.inner_steps, o.alpha, o.beta, gamma_of(o)) == outer


@pytest.mark.parametrize("environment, error", [
    ("WORLD_SIZE=2", "WORLD_SIZE=2 is set without RANK and MASTER_ADDR and MASTER_PORT: unset it"),
    ("WORLD_SIZE=2 RANK=0 MASTER_ADDR=localhost", "WORLD_SIZE=2 is set without MASTER_PORT: unset it"),
    ("WORLD_SIZE=2 RANK=0 MASTER_ADDR=localhost MASTER_PORT=x", "MASTER_PORT=x in the environment is no"),
    ("RANK=x", "RANK=x in the environment is no whole number"),
    ("LOCAL_WORLD_SIZE=x", "LOCAL_WORLD_SIZE=x in the environment is no whole number"),
    ("RANK=1", "RANK=1 must be below WORLD_SIZE=1: unset both for one process"),
    ("WORLD_SIZE=-1", "WORLD_SIZE=-1 in the environment is no whole number")])
def test_an_environment_that_no_torchrun_made_is_one_line(environment, error, files, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for assignment in environment.split():
        monkeypatch.setenv(*assignment.split("="))
    assert error in error_of(train.main)


def test_a_run_that_a_machine_cannot_hold_is_refused_before_anything_is_allocated(files, monkeypatch):
    """The ranks of one machine count together."""
    monkeypatch.setattr(memory, "free_bytes", lambda: 50e9)
    monkeypatch.setattr(train, "load_data", None)           # what would come next
    error = error_of(train.main, "--model", "medium")
    assert "1 rank needs about 99.5 GB of memory, and 50.0 GB are free" in error
    # two ranks of 4 vectors, with a microbatch in flight on the second stage
    line = refused(2, "--model", "small", "--stages", "1,1", cwd=Path(), main=_in_5_gb)
    assert "2 ranks on one machine need about " in line


def _in_5_gb(argv):
    memory.free_bytes = lambda: 5e9
    train.main(argv)


@pytest.mark.parametrize("argv, megabytes", [("", 61), ("--model small --vocab 32000 --batch 1", 5930)])
def test_the_memory_reckoned_is_what_speed_md_says(argv, megabytes):
    """Of a rank that holds all layers, one of several replicas, with one microbatch in flight."""
    o = options(*argv.split())
    needed = memory.bytes_needed(o, whole_config(o), o.layers, True, replicas=2, in_flight=1)
    assert needed / 1e6 == pytest.approx(megabytes, rel=0.01)
    o.optimizer = "muon"
    matrices = 4 * sum(p.numel() for p in muon(Llama(whole_config(o))).parts[0].param_groups[0]["params"])
    with_muon = memory.bytes_needed(o, whole_config(o), o.layers, True, replicas=2, in_flight=1)
    assert needed - with_muon == matrices


@pytest.mark.parametrize("argv, replicas", [
    ("", 2), ("--wire int8", 2), ("--gamma 0.9", 2), ("--group-size 4 --gamma 0.9", 4),
    ("--group-size 4 --wire int8", 4), ("--delay 5", 2), ("--method diloco --delay 5", 2),
    ("--method diloco", 2), ("--fragments 5 --delay 2", 2), ("--method ddp", 2), ("--group-size 4", 1)])
def test_the_vectors_that_memory_counts_are_those_that_a_rank_keeps(argv, replicas):
    """Around two outer steps, by what the tensors of its outer optimizer take."""
    o = options("--model", "tiny", *argv.split())
    kept = processes(replicas, _vectors_kept, o)
    assert kept[0] == pytest.approx(memory.vectors(o, replicas), rel=0.02)


def _vectors_kept(rank, world, o):
    dist.init_process_group("gloo")
    onebyte.BLOCK = 1024                                            # its room for a piece is nothing here
    model = Llama(SMALL_CONFIG)
    theta = flatten(model.parameters())
    theta.grad = train.flat_gradient(model, theta)
    run = SimpleNamespace(o=o, model=model, theta=theta, stages=[list(range(world))], stage=0)
    outer = train.make_outer(run)
    if outer:
        for _ in range(2 * o.inner_steps):
            theta.add_(1e-3 * (rank + 1))
            outer.step()
        outer.settle()
    dist.barrier()
    storages = {}
    for thing in gc.get_objects():
        if torch.is_tensor(thing):
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    adams = 2
    return sum(storages.values()) / theta.nbytes + adams


@pytest.mark.parametrize("given, gamma", [([], 0.5), (["--gamma", 0.6], 0.6)])
def test_gamma_is_beta_also_where_a_run_resumes_with_another_beta(given, gamma, tmp_path):
    """It was 0.7, and the run would have gone on with gamma 0.7 beside its beta of 0.5."""
    o = options("--beta", 0.7, *given)
    (tmp_path / "config.json").write_text(json.dumps(vars(o)))
    resumed = options("--resume", tmp_path, "--beta", 0.5)
    assert (gamma_of(o), gamma_of(resumed)) == (gamma if given else 0.7, gamma)


def test_an_older_config_with_a_gamma_for_diloco_goes_on_without_it(tmp_path):
    o = dict(vars(options("--method", "diloco")), gamma=1.0)
    (tmp_path / "config.json").write_text(json.dumps(o))
    assert gamma_of(options("--resume", tmp_path, "--beta", 0.5)) == 0.5


def test_a_method_without_a_class_is_an_error_and_never_trains_alone():
    o = options("--method", "diloco")
    o.method = "fedavg"
    with pytest.raises(ValueError, match="no .* for --method fedavg"):
        train.make_outer(None, o, [], [0, 1], None)


@pytest.mark.parametrize("launched, beside", [(True, 3), (True, 0), (False, 3)])
def test_survive_with_processes_that_one_torchrun_would_kill_together_is_a_warning(
        launched, beside, corpus, tmp_path, monkeypatch):
    """Workers started without torchrun (RANK, WORLD_SIZE) and a torchrun for each are as they should be."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(1 + beside))
    if launched:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    code, said = captured(0, 1, train.main, ["--survive", 5, "--steps", 1, "--data", corpus, *SMALL])
    line = "warning: when a process dies, torchrun ends the 3 beside it, and --survive cannot help: give each"
    assert code == 0 and said.startswith(line) == (launched and beside > 0)


def test_help_begins_with_what_most_runs_need_and_shows_each_models_and_methods_defaults():
    code, text = captured(0, 1, train.main, ["--help"])
    entries = re.findall(r"^  --([a-z0-9-]+)(.*?)(?=^  --|^$|\Z)", text, re.M | re.S)
    help_of = {option: " ".join(words.split()) for option, words in entries}
    assert code == 0 and sorted(help_of) == sorted(f.name.replace("_", "-") for f in fields(train.Options))
    assert [*help_of][:10] == "method inner-steps stages skip model steps lr data name resume".split()
    for option, defaults in {"lr": "tiny 0.003, small 0.0006, medium 0.0002, large 0.00012",
                             "inner-steps": "noloco 50, diloco 100, noloco with tiny 10, diloco with tiny 20",
                             "group-size": "noloco 2", "clip": "1.0", "seed": "0"}.items():
        assert help_of[option].endswith(f"(default: {defaults})"), help_of[option]
