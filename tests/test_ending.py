"""Runs that end early: Ctrl-C, a disk that is full."""

import os
import re
import resource
import signal
from pathlib import Path

import pytest
import torch
from tqdm import tqdm

import train
from plumbing import signals
from plumbing.report import Log
from tests.harness import SMALL, captured, checkpoint, metrics, processes, run, store_host, train_main


def _interrupted(rank, world, argv, number):
    """As torchrun and a terminal do it: every process gets the signal, twice, and not at the same step."""
    at = train.Routes.at

    def routes(self, step):
        if step in (5 + rank % 2, 6 + rank % 2):
            os.kill(os.getpid(), number)
        return at(self, step)

    train.Routes.at = routes
    return train_main(rank, world, argv)


@pytest.mark.parametrize("number, extra", [(signal.SIGINT, ["--gamma", "1.0"]),
                                           (signal.SIGTERM, ["--survive", "30"])])
def test_a_signal_stops_all_ranks_at_one_step_and_the_run_goes_on_to_the_bit(number, extra, corpus, tmp_path):
    argv = ["--stages", "2,2", "--inner-steps", "4", "--steps", "9", "--eval-every", "4", *extra, *SMALL,
            "--data", str(corpus)]
    results = processes(4, _interrupted, [*argv, "--name", "x"], number, cwd=tmp_path)
    assert [code for code, _ in results] == [128 + number] * 4
    (step,) = (int(p.name) for p in (tmp_path / "runs/x/checkpoints").iterdir())
    assert 5 < step < 9 and not any(text for _, text in results[1:])
    lines = results[0][1].splitlines()
    assert lines[-1] == f"stopped at step {step}; go on with --resume runs/x" and "Traceback" not in lines
    run(4, "--resume", "runs/x", cwd=tmp_path)
    run(4, *argv, "--name", "whole", cwd=tmp_path)
    for rank in range(4):
        stopped, whole = (checkpoint(tmp_path / "runs" / name, 9, rank) for name in ("x", "whole"))
        assert torch.equal(stopped["theta"], whole["theta"])
    rows, again = (metrics(tmp_path / "runs" / name) for name in ("x", "whole"))
    for key in ("step", "heldout_loss", "train_loss", "tokens"):
        assert [row[key] for row in rows] == [row[key] for row in again]


def _small_disk(rank, world, argv, size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    return train_main(rank, world, argv)


def test_a_disk_without_room_for_a_checkpoint_is_one_line_of_one_rank(corpus, tmp_path):
    """The limit on a file's size fails a write as a full disk does."""
    argv = [*map(str, ["--steps", 4, "--save-every", 2, "--data", corpus, "--name", "x", *SMALL])]
    with store_host() as (port, _):
        results = processes(4, _small_disk, argv, 100_000, cwd=tmp_path, port=port)
    assert [code for code, _ in results] == [2] * 4
    lines = [line for _, text in results for line in text.splitlines() if "runs/x/" in line]
    assert lines == [
        "error: cannot write the checkpoint runs/x/checkpoints/00000002: [Errno 27] File too large; once "
        "that is put right remove runs/x, which holds no checkpoint yet, and start again"
    ]
    assert not any("Traceback" in text or "stopped" in text for _, text in results)
    assert not [p for p in tmp_path.rglob("*") if p.suffix in (".tmp", ".pt")]


def test_a_disk_without_room_for_the_metrics_is_one_line(corpus, tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(28, "No space left on device", "runs/x/metrics.jsonl")

    monkeypatch.chdir(tmp_path)
    argv = [*map(str, ["--steps", 4, "--data", corpus, "--name", "x", *SMALL])]
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(Log, "line_of", full)
        train.main(argv)
    assert stop.value.code == 2
    line = "error: [Errno 28] No space left on device: 'runs/x/metrics.jsonl'"
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == f"{line}; once that is put right go on with --resume runs/x"
    monkeypatch.setattr("plumbing.report.os.replace", full)
    with pytest.raises(SystemExit) as stop:
        train.main(["--resume", "runs/x", "--steps", "6"])
    assert stop.value.code == 2 and line in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.tmp"))


def _silent(rank, world, argv):
    """Rank 1 stops in the midst of training; it goes on when rank 0 has said that it is silent."""
    signals.BEAT = 0.1
    pid, usual, write = Path("pid"), train.inner_step, tqdm.write

    def stop_once(run, *rest):
        if rank == 1 and run.step == 2 and not pid.exists():
            pid.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        return usual(run, *rest)

    def wake(text, *args, **kwargs):
        write(text, *args, **kwargs)
        if "no sign of life" in text:
            os.kill(int(pid.read_text()), signal.SIGCONT)

    train.inner_step, tqdm.write = stop_once, staticmethod(wake)
    return captured(rank, world, train.main, argv)


def test_a_silent_rank_is_named_and_training_goes_on_when_it_is_back(corpus, tmp_path):
    argv = ["--method", "ddp", "--steps", 4, "--data", corpus, "--name", "x", *SMALL]
    (code, out), _ = processes(2, _silent, [str(a) for a in argv], cwd=tmp_path)
    assert code == 0 and "kept in" in out
    assert re.search(r"no sign of life from rank 1 for 1 s\. .* --resume runs/x", out)
