"""Runs that go on, the same to the bit, and runs that end early: a crash, a signal, a disk that is full."""

import os
import re
import resource
import shutil
import signal
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tqdm import tqdm

import train
from plumbing import checkpoints, signals
from plumbing.processes import BadInput, Job
from plumbing.report import Log
from tests.harness import (SMALL, assert_same, captured, checkpoint, fork, metrics, options, processes,
                           rank_process, refused, run, store_host, train_main)


@pytest.fixture(scope="module")
def done(corpus, tmp_path_factory):
    """A folder with a run of 4 steps of two processes in runs/x."""
    folder = tmp_path_factory.mktemp("done")
    run(2, "--steps", 4, "--save-every", 2, "--data", corpus, "--name", "x", *SMALL, cwd=folder)
    return folder


# ---- going on


def test_a_crash_while_writing_a_checkpoint_leaves_the_one_before(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv, real = ["--steps", 6, "--save-every", 2, "--data", corpus, *SMALL, "--name"], torch.save

    def crash(state, file):
        if state["step"] == 4:
            file.write(b"half of it")
            raise KeyboardInterrupt
        real(state, file)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch, "save", crash)
        captured(0, 1, train.main, [*argv, "x"])
    # and a line cut short
    (tmp_path / "runs/x/metrics.jsonl").write_text('{"step": 2}\n{"step": 4, "hel')
    _, said = captured(0, 1, train.main, ["--resume", "runs/x"])
    damaged = 'warning: line 2 of runs/x/metrics.jsonl is damaged and left out: {"step": 4, "hel'
    assert damaged in said.splitlines()
    captured(0, 1, train.main, [*argv, "y"])
    assert_same(tmp_path / "runs/x", tmp_path / "runs/y", 6, world=1)
    # the whole line from before the checkpoint is still there
    assert [line["step"] for line in metrics(tmp_path / "runs/x")] == [2, 6]


@pytest.mark.parametrize("kind", ["--gamma 1.0", "--optimizer muon", "--wire int8"])
def test_resume_is_bit_exact(kind, trained, tmp_path):
    trained(4, *kind.split(), "--stages", "2,2", "--steps", 12, "--inner-steps", 4, "--eval-every", 3,
            "--save-every", 6)
    whole = tmp_path / "runs/x"
    again = shutil.copytree(whole, tmp_path / "runs/y")
    for rank in (1, 2, 3):  # as if killed while they wrote
        (again / f"checkpoints/00000012/rank{rank}.pt").unlink()
    out = run(4, "--resume", again, cwd=tmp_path)
    assert f"warning: {again}/checkpoints/00000012 lacks the part of rank 1, 2, 3; step 6 is taken\n" in out
    assert all(0 < line["held"] <= line["held_max"] < 1 for line in metrics(again)[1:])
    assert f"{metrics(again)[-1]['held']:.1%} of it held by synchronisation" in out
    # phi in flight is sent again
    timed = ("held", "held_max", "sync_bytes")
    same = lambda line: {k: v for k, v in line.items() if "second" not in k and k not in timed}
    assert list(map(same, metrics(again))) == list(map(same, metrics(whole)))
    assert_same(whole, again, 12)
    # the last two are kept
    assert sorted(p.name for p in (whole / "checkpoints").iterdir()) == ["00000006", "00000012"]


def test_instead_of_a_damaged_checkpoint_the_one_before_is_taken(done, tmp_path):
    folder = shutil.copytree(done, tmp_path / "copy")
    broken = Path("runs/x/checkpoints/00000004/rank1.pt")
    (folder / broken).write_bytes((folder / broken).read_bytes()[:1000])
    out = run(2, "--resume", "runs/x", cwd=folder)
    assert re.search(rf"^warning: {broken} is damaged \(.*\); step 2 is taken$", out, re.M)
    assert "runs/x, from step 2" in out
    assert_same(folder / "runs/x", done / "runs/x", 4, world=2)
    for step, rank in ((2, 1), (4, 0)):
        (folder / f"runs/x/checkpoints/{step:08d}/rank{rank}.pt").write_bytes(b"")
    line = refused(2, "--resume", "runs/x", "--steps", 20, cwd=folder)
    assert "and runs/x has no checkpoint that all 2 ranks hold" in line
    assert "differs" in refused(2, "--resume", "runs/x", "--stages", "1,1", cwd=folder)


def test_resume_of_a_run_that_has_done_its_steps_says_so_and_changes_nothing(done, tmp_path):
    folder = shutil.copytree(done, tmp_path / "copy")
    state = lambda: {p: (p.stat().st_mtime_ns, p.is_file() and p.read_bytes()) for p in folder.rglob("*")}
    before = state()
    for extra in ([], ["--steps", 4, "--eval-every", 2], ["--steps", 3]):
        out = run(2, "--resume", "runs/x", *extra, cwd=folder)
        assert out.endswith("\nruns/x has done all its 4 steps: give more --steps to go on\n")
    assert "needs 2 processes but got 1" in refused(1, "--resume", "runs/x", cwd=folder)
    assert state() == before
    run(2, "--resume", "runs/x", "--steps", 5, cwd=folder)
    assert metrics(folder / "runs/x")[-1]["step"] == 5


def test_more_steps_on_resume_are_a_warning_that_the_cosine_is_stretched(done, tmp_path):
    folder = shutil.copytree(done, tmp_path / "copy")
    line = "warning: --steps 6, and the run had 4 before: its cosine is stretched, so at step 4 the learning"
    assert line in run(2, "--resume", "runs/x", "--steps", 6, cwd=folder)
    shutil.rmtree(folder / "runs/x/checkpoints/00000004")
    assert line not in run(2, "--resume", "runs/x", "--steps", 6, cwd=folder)


def test_diloco_resumed_with_another_beta_goes_on_to_synchronise(trained, tmp_path):
    """It found no class for gamma = 1 beside its beta, and each replica trained alone."""
    trained(2, "--method", "diloco", "--inner-steps", 2, "--steps", 4)
    out = run(2, "--resume", "runs/x", "--beta", 0.5, "--steps", 8, cwd=tmp_path)
    before, after = (line["sync_bytes"] for line in metrics(tmp_path / "runs/x"))
    assert after == 2 * before > 0 and "beta 0.5, gamma 0.5, weights travel" in out


# ---- one run in a folder


def test_a_run_that_still_trains_is_not_resumed_a_second_time(corpus, tmp_path, monkeypatch):
    """The second run is refused and changes nothing; when the first has ended it may go on."""
    monkeypatch.chdir(tmp_path)
    usual, refusals = train.inner_step, []

    def resume_once(run, *rest):
        if run.step == 3:
            refusals.append(captured(0, 1, train.main, ["--resume", "runs/x", "--steps", 9]))
        return usual(run, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(train, "inner_step", resume_once)
        argv = ["--steps", 4, "--save-every", 2, "--data", corpus, "--name", "x", *SMALL]
        assert captured(0, 1, train.main, argv)[0] == 0
    ((code, said),) = refusals
    assert code == 2 and said.splitlines()[-1] == (
        "error: another process trains in runs/x: stop it first, or wait for its end")
    assert metrics(tmp_path / "runs/x")[-1]["step"] == 4
    assert captured(0, 1, train.main, ["--resume", "runs/x", "--steps", 5])[0] == 0


def _dies(rank, world, argv):
    usual = train.inner_step

    def die(run, *rest):
        if run.step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return usual(run, *rest)

    train.inner_step = die
    return train_main(rank, world, argv)


def test_a_crashed_run_is_resumable_at_once(corpus, tmp_path):
    argv = ["--steps", 5, "--save-every", 2, "--data", corpus, "--name", "x", *SMALL]
    _, theirs = fork.Pipe()
    child = fork.Process(target=rank_process, args=(theirs, 0, 1, 0, False, str(tmp_path), _dies, [argv]))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    assert (tmp_path / "runs/x/lock").exists()
    assert "runs/x, from step 2" in run(1, "--resume", "runs/x", cwd=tmp_path)


def test_a_takeover_goes_on_beside_the_lock_of_the_process_that_led(tmp_path, capsys):
    hung, next_one = (checkpoints.Checkpoints(Job(), tmp_path) for _ in range(2))
    hung.lock()
    with pytest.raises(BadInput, match="another process trains in"):
        next_one.lock()
    next_one.lock(takeover=True)
    assert capsys.readouterr().out == f"warning: the process that led before still has {tmp_path}/lock\n"
    hung.unlock()
    next_one.lock()
    with pytest.raises(BadInput):
        hung.lock()
    next_one.unlock()


def test_a_folder_that_cannot_be_locked_is_a_warning(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(checkpoints.fcntl, "flock", refuse)
    checkpoints.Checkpoints(Job(), tmp_path).lock()
    assert "cannot be locked against a second run: [Errno 38]" in capsys.readouterr().out


# ---- what the processes tell each other


def test_a_second_call_of_share_and_together_does_not_read_the_first_ones_values(monkeypatch):
    """A rank that is fast reads nothing until the others have told their value of the same call."""
    fast, slow = Job(), Job()
    slow.rank, slow.leads = 1, False
    fast.members = slow.members = range(2)
    slow.store = fast.store
    fast.store.set_timeout(timedelta(milliseconds=50))
    assert slow.collect("loss", 2) is None and fast.share("loss", 1) == [1, 2]
    with pytest.raises(dist.DistStoreError):
        fast.share("loss", 3)
    with pytest.raises(dist.DistStoreError):
        fast.together(int)
    slow.collect("loss", 4)
    slow.collect("loss", 6)
    assert fast.share("loss", 5) == [5, 6]


# ---- going on elsewhere


def test_a_folder_is_taken_once_and_found_again_by_a_restart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checkpoints.time, "strftime", lambda form: "now")
    for name, argv in (("noloco-1-now", []), ("mine", ["--name", "mine"])):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
        assert checkpoints.new_folder(options(*argv)) == name
        with pytest.raises(BadInput, match=f"runs/{name} exists: go on with --resume"):
            checkpoints.new_folder(options(*argv))
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        assert checkpoints.new_folder(options(*argv)) == name
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    with pytest.raises(BadInput, match="torchrun's --max-restarts needs --name, to find the folder"):
        options()


def _main_in_own_folder(argv):
    """Each rank on a machine of its own, as far as files go."""
    folder = Path(f"machine{os.environ['RANK']}")
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    train.main(argv)


def test_machines_without_a_shared_folder_resume_and_one_without_its_part_refuses(trained, tmp_path):
    in_own = dict(cwd=tmp_path, main=_main_in_own_folder)
    trained(2, "--steps", 4, "--save-every", 2, main=_main_in_own_folder)
    assert not (tmp_path / "machine1/runs/x/config.json").exists()
    assert "from step 4" in run(2, "--resume", "runs/x", "--steps", 6, **in_own)
    shutil.rmtree(tmp_path / "machine1")
    assert "no checkpoint that all 2 ranks hold" in refused(2, "--resume", "runs/x", **in_own)


def test_a_run_goes_on_where_its_data_were_moved_and_not_with_other_data(corpus, done, tmp_path):
    folder = shutil.copytree(done, tmp_path / "copy")
    shutil.copytree(corpus, folder / "after")
    run(2, "--resume", "runs/x", "--data", "after", "--steps", 5, cwd=folder)
    assert '"data": "after"' in (folder / "runs/x/config.json").read_text()
    (folder / "after/0.txt").write_text("other words")
    assert "the data differ from those of runs/x" in refused(2, "--resume", "runs/x", cwd=folder)


@pytest.mark.parametrize("form", [{}, dict(form=checkpoints.FORM - 1), dict(form=checkpoints.FORM + 1)])
def test_a_checkpoint_of_another_version_is_refused(form, done, tmp_path):
    """Versions before the first number wrote none."""
    state = checkpoint(done / "runs/x", 4, 1)
    del state["form"]
    torch.save({**state, **form}, tmp_path / "rank1.pt")
    with pytest.raises(BadInput, match="rank1.pt was written by another version of this program$"):
        checkpoints.load(tmp_path / "rank1.pt")


# ---- ending


def _interrupted(rank, world, argv, number):
    """As torchrun and a terminal do it: every process gets the signal, twice, and not at the same step."""
    at = train.Routes.at

    def routes(self, step):
        if step in (5 + rank % 2, 6 + rank % 2):
            os.kill(os.getpid(), number)
        return at(self, step)

    train.Routes.at = routes
    return train_main(rank, world, argv)


@pytest.mark.parametrize("number, extra", [(signal.SIGINT, ["--gamma", 1.0]),
                                           (signal.SIGTERM, ["--survive", 30])])
def test_a_signal_stops_all_ranks_at_one_step_and_the_run_goes_on_to_the_bit(number, extra, corpus, tmp_path):
    argv = ["--stages", "2,2", "--inner-steps", 4, "--steps", 9, "--eval-every", 4, *extra, *SMALL,
            "--data", corpus, "--name"]
    results = processes(4, _interrupted, [*argv, "x"], number, cwd=tmp_path)
    assert [code for code, _ in results] == [128 + number] * 4
    (step,) = (int(p.name) for p in (tmp_path / "runs/x/checkpoints").iterdir())
    assert 5 < step < 9 and not any(text for _, text in results[1:])
    lines = results[0][1].splitlines()
    assert lines[-1] == f"stopped at step {step}; go on with --resume runs/x" and "Traceback" not in lines
    run(4, "--resume", "runs/x", cwd=tmp_path)
    run(4, *argv, "whole", cwd=tmp_path)
    assert_same(tmp_path / "runs/x", tmp_path / "runs/whole", 9)
    rows, again = (metrics(tmp_path / "runs" / name) for name in ("x", "whole"))
    for key in ("step", "heldout_loss", "train_loss", "tokens"):
        assert [row[key] for row in rows] == [row[key] for row in again]


def _small_disk(rank, world, argv, size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    return train_main(rank, world, argv)


def test_a_disk_without_room_for_a_checkpoint_is_one_line_of_one_rank(corpus, tmp_path):
    """The limit on a file's size fails a write as a full disk does."""
    argv = ["--steps", 4, "--save-every", 2, "--data", corpus, "--name", "x", *SMALL]
    with store_host() as (port, _):
        results = processes(4, _small_disk, argv, 100_000, cwd=tmp_path, port=port)
    codes, texts = zip(*results)
    assert codes == (2,) * 4 and not any("Traceback" in text or "stopped" in text for text in texts)
    (line,) = [line for line in "".join(texts).splitlines() if "runs/x/" in line]
    assert line.startswith("error: cannot write the checkpoint runs/x/checkpoints/00000002: [Errno 27] File")
    assert "once that is put right remove runs/x, which holds no checkpoint yet" in line
    assert not [p for p in tmp_path.rglob("*") if p.suffix in (".tmp", ".pt")]


def test_a_disk_without_room_for_the_metrics_is_one_line(corpus, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device", "runs/x/metrics.jsonl")

    monkeypatch.chdir(tmp_path)
    line = "error: [Errno 28] No space left on device: 'runs/x/metrics.jsonl'"
    with monkeypatch.context() as patch:
        patch.setattr(Log, "line_of", full)
        code, said = captured(0, 1, train.main, ["--steps", 4, "--data", corpus, "--name", "x", *SMALL])
    assert code == 2
    assert said.splitlines()[-1] == f"{line}; once that is put right go on with --resume runs/x"
    monkeypatch.setattr("plumbing.files.os.replace", full)
    code, said = captured(0, 1, train.main, ["--resume", "runs/x", "--steps", 6])
    assert code == 2 and line in said and not list(tmp_path.rglob("*.tmp"))


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
    return train_main(rank, world, argv)


def test_a_silent_rank_is_named_and_training_goes_on_when_it_is_back(corpus, tmp_path):
    argv = ["--method", "ddp", "--steps", 4, "--data", corpus, "--name", "x", *SMALL]
    (code, out), _ = processes(2, _silent, argv, cwd=tmp_path)
    assert code == 0 and "kept in" in out
    assert "no sign of life from rank 1 for 1 s: stop this run, then " in out
