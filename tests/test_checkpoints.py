"""Runs that go on, the same to the bit, and runs that end early: a crash, a signal, a disk that is full."""

import functools
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

import train
from tests.harness import (SMALL, assert_same, captured, metrics, options, patience, processes,
                           refused, run, store_host, train_main)
from train import BadInput, Job


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

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", crash)
        assert captured(0, 1, train.main, [*argv, "x"])[0] == 130
    # and a line cut short
    (tmp_path / "runs/x/metrics.jsonl").write_text('{"step": 2}\n{"step": 4, "hel')
    captured(0, 1, train.main, ["--resume", "runs/x"])
    captured(0, 1, train.main, [*argv, "y"])
    assert_same(tmp_path / "runs/x", tmp_path / "runs/y", 6, world=1)
    # the whole line from before the checkpoint is still there
    assert [line["step"] for line in metrics(tmp_path / "runs/x")] == [2, 6]


KINDS = ["--gamma 1.0", "--optimizer muon", "--wire int8", "--delay 3 --wire int8", "--fragments 2 --delay 1",
         "--method diloco", "--method ddp --wire int8"]


@pytest.mark.parametrize("kind", KINDS)
def test_resume_is_bit_exact(kind, trained, tmp_path):
    """Planned and skipping paths: tests/test_routing.py, goes_on_to_the_bit."""
    if "ddp" not in kind:
        kind += " --inner-steps 4"
    trained(4, *kind.split(), "--stages", "2,2", "--steps", 12, "--eval-every", 3, "--save-every", 6)
    whole = tmp_path / "runs/x"
    again = shutil.copytree(whole, tmp_path / "runs/y")
    for rank in (1, 2, 3):  # as if killed while they wrote
        (again / f"checkpoints/00000012/rank{rank}.pt").unlink()
    out = run(4, "--resume", again, cwd=tmp_path)
    assert "from step 6" in out
    assert all(0 < line["held"] < 1 for line in metrics(again)[1:])
    assert f"{metrics(again)[-1]['held']:.1%} of it held by synchronisation" in out
    # what is in flight is sent again
    timed = ("held", "sync_bytes")
    same = lambda line: {k: v for k, v in line.items() if "second" not in k and k not in timed}
    assert list(map(same, metrics(again))) == list(map(same, metrics(whole)))
    assert_same(whole, again, 12)
    # the last two are kept
    assert sorted(p.name for p in (whole / "checkpoints").iterdir()) == ["00000006", "00000012"]


def test_instead_of_a_damaged_checkpoint_the_one_before_is_taken(done, tmp_path):
    folder = shutil.copytree(done, tmp_path / "copy")
    broken = Path("runs/x/checkpoints/00000004/rank1.pt")
    (folder / broken).write_bytes((folder / broken).read_bytes()[:1000])
    (_, out), (_, warned) = processes(2, train_main, ["--resume", "runs/x"], cwd=folder)
    assert "runs/x, from step 2" in out
    assert re.search(rf"^warning: {broken} is damaged \(.*\)$", warned, re.M)
    assert_same(folder / "runs/x", done / "runs/x", 4, world=2)
    for step, rank in ((2, 1), (4, 0)):
        (folder / f"runs/x/checkpoints/{step:08d}/rank{rank}.pt").write_bytes(b"")
    (code, text), _ = processes(2, train_main, ["--resume", "runs/x", "--steps", 20], cwd=folder)
    assert code == 2 and "error: runs/x has no checkpoint that all 2 ranks hold" in text
    assert "differs" in refused(2, "--resume", "runs/x", "--stages", "1,1", cwd=folder)


def test_resume_of_a_run_that_has_done_its_steps_says_so_and_changes_nothing(done, tmp_path):
    folder = shutil.copytree(done, tmp_path / "copy")
    state = lambda: {p: (p.stat().st_mtime_ns, p.is_file() and p.read_bytes()) for p in folder.rglob("*")}
    before = state()
    for extra in ([], ["--steps", 4, "--eval-every", 2], ["--steps", 3]):
        out = run(2, "--resume", "runs/x", *extra, cwd=folder)
        assert out.endswith("runs/x has done all its 4 steps: give more --steps to go on\n")
    assert "needs 2 processes but got 1" in refused(1, "--resume", "runs/x", cwd=folder)
    assert state() == before
    run(2, "--resume", "runs/x", "--steps", 5, cwd=folder)
    assert metrics(folder / "runs/x")[-1]["step"] == 5


def test_diloco_resumed_with_another_beta_goes_on_to_synchronise(trained, tmp_path):
    """It found no class for gamma = 1 beside its beta, and each replica trained alone."""
    trained(2, "--method", "diloco", "--inner-steps", 2, "--steps", 4)
    run(2, "--resume", "runs/x", "--beta", 0.5, "--steps", 8, cwd=tmp_path)
    before, after = (line["sync_bytes"] for line in metrics(tmp_path / "runs/x"))
    assert after == 2 * before > 0


# ---- what the processes tell each other


def test_a_second_call_of_share_and_together_does_not_read_the_first_ones_values(monkeypatch):
    """A rank that is fast reads nothing until the others have told their value of the same call."""
    fast, slow = Job(), Job()
    slow.rank, slow.leads = 1, False
    fast.world = slow.world = 2
    slow.store = fast.store
    fast.store.set_timeout(timedelta(milliseconds=50))
    fast.store.set("loss/1/1", "2")
    assert fast.share("loss", 1) == [1, 2]
    with pytest.raises(dist.DistStoreError):
        fast.share("loss", 3)
    with pytest.raises(dist.DistStoreError):
        fast.together(int)
    assert slow.share("loss", 2) == [1, 2]
    assert slow.share("loss", 4) == [3, 4]


# ---- going on elsewhere


def test_a_folder_is_taken_once_and_found_again_by_a_restart(tmp_path, monkeypatch):
    """Of two runs that begin at once, the one that makes config.json first has the name."""
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/mine")
    train.claim(folder)
    with pytest.raises(BadInput, match="runs/mine exists: go on with --resume"):
        train.claim(folder)
    monkeypatch.setattr(Path, "exists", lambda self: False)         # the other run was not there yet
    with pytest.raises(FileExistsError):
        train.claim(folder)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    train.claim(folder)
    assert options("--stages", "1").name.startswith("noloco-1-") and options("--name", "mine").name == "mine"


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


@pytest.mark.parametrize("other", [["--layers", 2], ["--stages", "1,1"], ["--seed", 1], ["--vocab", 300]])
def test_a_run_does_not_go_on_as_another_one(other, done, tmp_path):
    folder = shutil.copytree(done, tmp_path / "copy")
    assert f"{other[0]} " in refused(2, "--resume", "runs/x", *other, cwd=folder)


# ---- ending


def _falls(rank, world, argv, number):
    """Rank 1 gets a signal in its third step after the checkpoint."""
    signal.signal(signal.SIGINT, signal.default_int_handler)       # a background job of a shell ignores it
    usual = train.inner_step

    def fall(run, *rest):
        if run.step == 5 and rank == 1:
            os.kill(os.getpid(), number)
        return usual(run, *rest)

    train.inner_step = fall
    return train_main(rank, world, argv)


NINE = ["--steps", 9, "--save-every", 4, "--name", "x", *SMALL]


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    """The folder of such a run in which nobody falls, run once."""

    @functools.cache
    def folder(kind):
        place = tmp_path_factory.mktemp("whole")
        run(4, *kind.split(), *NINE, "--data", corpus, cwd=place)
        return place / "runs/x"

    return folder


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.parametrize("kind", ["--stages 4 --inner-steps 2", "--stages 2,2", "--method ddp"])
def test_when_a_rank_falls_the_others_end_with_one_line_and_the_run_goes_on(
        number, kind, whole, corpus, tmp_path):
    """Within seconds, and from the last checkpoint to the bit."""
    argv = [*kind.split(), *NINE, "--data", corpus]
    with store_host() as (port, _):
        results = processes(4, _falls, argv, number, cwd=tmp_path, port=port, limit=patience(60),
                            fallen=[1] if number == signal.SIGKILL else [])
    left = [result for result in results if result]
    assert all(code in (2, 130) for code, _ in left)
    assert not any("Traceback" in text for _, text in left)
    told = [line for _, text in left for line in text.splitlines() if "go on with --resume runs/x" in line]
    assert len(told) == 1 and told[0].startswith("stopped")
    run(4, "--resume", "runs/x", cwd=tmp_path)
    assert_same(tmp_path / "runs/x", whole(kind), 9)


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
    assert "once that is put right; nothing is kept yet in runs/x" in line
    assert not [p for p in tmp_path.rglob("*") if p.suffix in (".tmp", ".pt")]


def test_a_disk_without_room_for_the_metrics_is_one_line(corpus, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device", "runs/x/metrics.jsonl")

    monkeypatch.chdir(tmp_path)
    line = "error: [Errno 28] No space left on device: 'runs/x/metrics.jsonl'"
    with monkeypatch.context() as patch:
        patch.setattr(train, "line_of", full)
        code, said = captured(0, 1, train.main, ["--steps", 4, "--data", corpus, "--name", "x", *SMALL])
    assert code == 2
    assert said.splitlines()[-1] == f"{line}; once that is put right; go on with --resume runs/x"
    monkeypatch.setattr(train.os, "replace", full)
    code, said = captured(0, 1, train.main, ["--resume", "runs/x", "--steps", 6])
    assert code == 2 and line in said and not list(tmp_path.rglob("*.tmp"))
