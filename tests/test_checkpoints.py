"""Checkpoints: resumed runs are the same to the bit; a crash, a damaged file and a missing one."""

import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves

import train
from plumbing import checkpoints
from plumbing.processes import BadInput
from tests.harness import NEEDS_MUON, SMALL, captured, checkpoint, metrics, options, processes, run


@pytest.fixture(scope="module")
def done(corpus, tmp_path_factory):
    """A folder with a run of 4 steps of two processes in runs/x."""
    folder = tmp_path_factory.mktemp("done")
    run(2, "--steps", 4, "--data", corpus, "--name", "x", *SMALL, cwd=folder)
    return folder


def refused(world, *argv, cwd, main=train.main):
    """The line of rank 0 when all ranks end with status 2; no other rank prints."""
    results = processes(world, captured, main, [str(a) for a in argv], cwd=cwd)
    assert [code for code, _ in results] == [2] * world
    assert not any(text for _, text in results[1:]) and results[0][1].count("\n") == 1
    return results[0][1]


def test_a_crash_while_writing_a_checkpoint_leaves_the_one_before(corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    argv = [str(a) for a in ["--steps", 6, "--save-every", 2, "--data", corpus, *SMALL, "--name"]]
    real = torch.save

    def crash(state, file):
        if state["step"] == 4:
            file.write(b"half of it")
            raise KeyboardInterrupt
        real(state, file)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch, "save", crash)
        train.main([*argv, "x"])
    # and a line cut short
    (tmp_path / "runs/x/metrics.jsonl").write_text('{"step": 2}\n{"step": 4, "hel')
    capsys.readouterr()
    train.main(["--resume", "runs/x"])
    damaged = 'warning: line 2 of runs/x/metrics.jsonl is damaged and left out: {"step": 4, "hel'
    assert damaged in capsys.readouterr().out.splitlines()
    train.main([*argv, "y"])
    first, second = (checkpoint(tmp_path / "runs" / name, 6, 0)["theta"] for name in "xy")
    assert torch.equal(first, second)
    # the whole line from before the checkpoint is still there
    assert [line["step"] for line in metrics(tmp_path / "runs/x")] == [2, 6]


@pytest.mark.parametrize("optimizer", ["adam", pytest.param("muon", marks=NEEDS_MUON)])
def test_resume_is_bit_exact(optimizer, corpus, tmp_path):
    argv = ["--optimizer", optimizer, "--stages", "2,2", "--steps", 12, "--inner-steps", 4, "--gamma", 1.0,
            "--eval-every", 3, "--save-every", 6, "--data", corpus, "--name", "x", *SMALL]
    run(4, *argv, cwd=tmp_path)
    whole = tmp_path / "runs/x"
    again = shutil.copytree(whole, tmp_path / "runs/y")
    for rank in (1, 2, 3):  # as if killed while they wrote
        (again / f"checkpoints/00000012/rank{rank}.pt").unlink()
    out = run(4, "--resume", again, cwd=tmp_path)
    lacking = f"{again}/checkpoints/00000012 lacks the part of rank 1, 2, 3"
    assert f"warning: {lacking}; step 6 is taken" in out.splitlines()
    assert all(0 < line["held"] <= line["held_max"] < 1 for line in metrics(again)[1:])
    assert f"{metrics(again)[-1]['held']:.1%} of it held by synchronisation" in out
    # phi in flight is sent again
    timed = ("held", "held_max", "sync_bytes")
    same = lambda line: {k: v for k, v in line.items() if "second" not in k and k not in timed}
    assert list(map(same, metrics(again))) == list(map(same, metrics(whole)))
    for rank in range(4):
        both = (checkpoint(folder, 12, rank) for folder in (whole, again))
        leaves = [tree_leaves([s["theta"], s["outer"]["phi"], s["cursor"], s["adam"]]) for s in both]
        for x, y in zip(*leaves, strict=True):
            assert torch.equal(x, y) if torch.is_tensor(x) else x == y
    # the last two are kept; instead of a damaged one the one before is taken
    assert sorted(p.name for p in (whole / "checkpoints").iterdir()) == ["00000006", "00000012"]
    broken = whole / "checkpoints/00000012/rank2.pt"
    broken.write_bytes(broken.read_bytes()[:1000])
    out = run(4, "--resume", whole, "--steps", 12, cwd=tmp_path)
    assert re.search(rf"^warning: {broken} is damaged \(.*\); step 6 is taken$", out, re.M)
    assert f"{whole}, from step 6" in out
    assert torch.equal(checkpoint(whole, 12, 2)["theta"], checkpoint(again, 12, 2)["theta"])
    for step in (6, 12):
        (whole / f"checkpoints/{step:08d}/rank{step // 6}.pt").write_bytes(b"")
    line = refused(4, "--resume", "runs/x", "--steps", 20, cwd=tmp_path)
    assert "and runs/x has no checkpoint that all 4 ranks hold" in line
    assert "differs" in refused(4, "--resume", "runs/x", "--stages", 4, cwd=tmp_path)


def test_resume_of_a_run_that_has_done_its_steps_says_so_and_changes_nothing(done, tmp_path):
    folder = shutil.copytree(done, tmp_path / "copy")

    def state():
        return {p: (p.stat().st_mtime_ns, p.is_file() and p.read_bytes()) for p in folder.rglob("*")}

    before = state()
    for extra in ([], ["--steps", 4, "--eval-every", 2]):
        out = run(2, "--resume", "runs/x", *extra, cwd=folder)
        assert out.endswith("\nruns/x has done all its 4 steps: give more --steps to go on\n")
    line = refused(2, "--resume", "runs/x", "--steps", 3, cwd=folder)
    assert line == "error: --steps 3: runs/x has done 4 already; give more\n"
    assert "needs 2 processes but got 1" in refused(1, "--resume", "runs/x", cwd=folder)
    assert state() == before
    out = run(2, "--resume", "runs/x", "--steps", 5, cwd=folder)
    assert "warning: --steps 5, until now 4: from step 4 on the cosine of the learning rate" in out


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


def test_machines_without_a_shared_folder_resume_and_one_without_its_part_refuses(corpus, tmp_path):
    in_own = dict(cwd=tmp_path, main=_main_in_own_folder)
    run(2, "--steps", 4, "--save-every", 2, "--data", corpus, "--name", "x", *SMALL, **in_own)
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


@pytest.mark.parametrize("form", [None, checkpoints.FORM - 1, checkpoints.FORM + 1])
def test_a_checkpoint_of_another_version_is_refused_in_one_line(form, done, tmp_path):
    """None: as older versions wrote it. Here it is rank 1's part alone."""
    part = shutil.copytree(done, tmp_path / "copy") / "runs/x/checkpoints/00000004/rank1.pt"
    state = torch.load(part, weights_only=True)
    del state["form"]
    torch.save(state if form is None else dict(state, form=form), part)
    assert refused(2, "--resume", "runs/x", "--steps", 5, cwd=tmp_path / "copy") == (
        "error: runs/x/checkpoints/00000004/rank1.pt was written by another version of this program, and "
        "runs/x has no checkpoint that all 2 ranks hold\n"
    )
