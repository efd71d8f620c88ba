"""Runs that go on, the same to the bit, and runs that end early: a crash, a signal, a disk that is full."""

import functools
import json
import math
import os
import re
import resource
import shutil
import signal
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import train
from gossip.sums import BLOCK
from tests.harness import (SMALL, assert_same, captured, checkpoint, error_of, metrics, options, patience,
                           processes, refused, run, store_host, train_main)
from tools import export
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


KINDS = [       # options; how many messages are under way at step 5, and how many vectors rounding left over
    ("--stages 2,2 --inner-steps 4 --gamma 1.0", 0, 0),
    ("--stages 2,2 --inner-steps 4 --optimizer muon --delay 2", 1, 0),
    ("--inner-steps 4 --wire int8 --delay 2", 1, 0),
    ("--inner-steps 4 --fragments 4 --delay 2 --alpha 0.5 --gamma 0.8", 2, 0),
    ("--inner-steps 4 --fragments 4 --wire int8", 0, 0),
    ("--stages 3,1 --method diloco --inner-steps 4 --wire int8 --delay 1", 0, 2),
    ("--stages 3,1 --method diloco --inner-steps 4 --wire bf16 --fragments 2 --delay 3", 1, 0),
    ("--stages 3,1 --method ddp --wire int8", 0, 2),
]


@pytest.mark.parametrize("kind, under_way, left", KINDS)
def test_resume_is_bit_exact(kind, under_way, left, trained, tmp_path):
    """Planned and skipping paths: tests/test_routing.py."""
    trained(4, *kind.split(), "--steps", 10, "--eval-every", 3, "--save-every", 5)
    whole = tmp_path / "runs/x"
    five = checkpoint(whole, 5, 0)
    parts = [five]
    if five["outer"]:
        parts = five["outer"].get("fragments", [five["outer"]])
    assert sum(bool(part.get("group")) for part in parts) == under_way
    owed = [v for part in parts for v in part.get("owed", ())]
    assert len(owed) == left and all(v.any() for v in owed)
    again = shutil.copytree(whole, tmp_path / "runs/y")
    for rank in (1, 2, 3):  # as if killed while they wrote
        (again / f"checkpoints/00000010/rank{rank}.pt").unlink()
    out = run(4, "--resume", again, cwd=tmp_path)
    assert "from step 5" in out
    assert all(0 < line["blocked"] < 1 for line in metrics(again)[1:])
    assert f"synchronisation blocked a rank for {metrics(again)[-1]['blocked']:.1%}" in out
    # what is in flight is sent again
    timed = ("blocked", "sync_bytes")
    same = lambda line: {k: v for k, v in line.items() if "second" not in k and k not in timed}
    assert list(map(same, metrics(again))) == list(map(same, metrics(whole)))
    assert_same(whole, again, 10)
    # the last two are kept
    assert sorted(p.name for p in (whole / "checkpoints").iterdir()) == ["00000005", "00000010"]


def test_a_ddp_run_counts_the_bytes_of_its_sums_and_its_replicas_are_equal(trained, tmp_path):
    trained(4, "--stages", "3,1", "--method", "ddp", "--wire", "int8", "--steps", 3)
    thetas = [checkpoint(tmp_path / "runs/x", 3, rank)["theta"] for rank in range(3)]
    assert torch.equal(thetas[0], thetas[1]) and torch.equal(thetas[0], thetas[2])
    part = math.ceil(len(thetas[0]) / 3)
    (line,) = metrics(tmp_path / "runs/x")
    codes = line["sync_bytes"] / (3 * 3 * 2 * 2)        # steps, replicas, sums, others: of a part
    scales = 4 * math.ceil(part / BLOCK)
    assert part + scales <= codes < part + 2 * scales           # and hardly any padding


def test_instead_of_a_damaged_checkpoint_the_one_before_is_taken(done, tmp_path):
    folder = shutil.copytree(done, tmp_path / "copy")
    broken = Path("runs/x/checkpoints/00000004/rank1.pt")
    (folder / broken).write_bytes((folder / broken).read_bytes()[:1000])
    (_, out), (_, warned) = processes(2, train_main, ["--resume", "runs/x"], cwd=folder)
    assert "runs/x, from step 2" in out
    assert re.search(rf"^warning: {broken} is damaged or of another version \(.*\)$", warned, re.M)
    assert_same(folder / "runs/x", done / "runs/x", 4, world=2)
    for step, rank in ((2, 1), (4, 0)):
        (folder / f"runs/x/checkpoints/{step:08d}/rank{rank}.pt").write_bytes(b"")
    results = processes(2, train_main, ["--resume", "runs/x", "--steps", 20], cwd=folder)
    text = "".join(text for _, text in results)
    assert [code for code, _ in results] == [2, 2]
    assert re.search("error: (rank 1: )?runs/x has no checkpoint that all 2 ranks hold", text)


def test_resume_of_a_run_that_has_done_its_steps_says_so_and_changes_nothing(done, tmp_path):
    folder = shutil.copytree(done, tmp_path / "copy")
    state = lambda: {p: (p.stat().st_mtime_ns, p.is_file() and p.read_bytes()) for p in folder.rglob("*")}
    before = state()
    for steps, extra in ((4, []), (4, ["--steps", 4, "--eval-every", 2]), (3, ["--steps", 3])):
        out = run(2, "--resume", "runs/x", *extra, cwd=folder)
        assert out == f"runs/x is at step 4, --steps is {steps}: give more to go on\n"
    assert "needs 2 processes but got 1" in refused(1, "--resume", "runs/x", cwd=folder)
    assert state() == before
    out = run(2, "--resume", "runs/x", "--steps", 5, "--lr", 0.01, cwd=folder)
    assert "--lr 0.01, was 0.003\n" in out and "--steps 5, was 4\n" in out
    first, changed, last = metrics(folder / "runs/x")
    assert (first["step"], last["step"]) == (4, 5)
    assert changed == dict(event="changed", step=4, options=dict(lr=[0.003, 0.01], steps=[4, 5]))


# ---- parts


def _flip(file):
    """One bit of the weights."""
    whole = bytearray(file.read_bytes())
    whole[len(whole) // 2] ^= 4
    file.write_bytes(whole)


def _rewrite(change):
    def rewrite(file):
        state = torch.load(file)
        change(state)
        torch.save(state, file)

    return rewrite


def _spoil(state):
    state["theta"][5] = torch.nan


DAMAGES = {
    "wrong checksum": _flip,
    "it was written as 00000004/rank0.pt": lambda file: file.with_name("rank0.pt").rename(file),
    "it was written as 00000002/rank1.pt": _rewrite(lambda state: state.update(step=2)),
    "its weights are not finite": _rewrite(_spoil),
    "'theta'": _rewrite(lambda state: state.pop("theta")),
    "'rank'": _rewrite(lambda state: state.pop("rank")),
    "it lacks counts": _rewrite(lambda state: state.pop("counts")),     # as an older version wrote it
    "it lacks inner, outer": _rewrite(lambda state: [state.pop("inner"), state.pop("outer")]),
}


@pytest.mark.parametrize("words", DAMAGES)
def test_a_part_that_is_not_what_its_rank_wrote_is_refused(words, done, tmp_path):
    part = shutil.copytree(done / "runs/x/checkpoints/00000004", tmp_path / "00000004") / "rank1.pt"
    assert train.load_part(part)["rank"] == 1
    DAMAGES[words](part)
    with pytest.raises(BadInput, match=re.escape(f"{part} is damaged or of another version ({words})")):
        train.load_part(part)


@pytest.mark.parametrize("change, line", [
    (lambda state: state.update(theta=torch.zeros(64)), "runs/x is of other weights"),
    (lambda state: state["inner"][0][0].update(exp_avg=torch.zeros(64)), "optimizer's state of other"),
])
def test_a_state_of_another_length_is_one_line(change, line, corpus, tmp_path, monkeypatch):
    """Adam's fused step read behind its end: a segmentation fault, or silently other numbers."""
    monkeypatch.chdir(tmp_path)
    captured(0, 1, train.main, ["--steps", 1, "--data", corpus, "--name", "x", *SMALL])
    _rewrite(change)(Path("runs/x/checkpoints/00000001/rank0.pt"))
    assert line in error_of(train.main, "--resume", "runs/x", "--steps", 2)


def test_a_copied_checkpoint_folder_is_left_alone(done, tmp_path, monkeypatch):
    monkeypatch.chdir(shutil.copytree(done, tmp_path / "copy"))
    copied = shutil.copytree("runs/x/checkpoints/00000004", "runs/x/checkpoints/00000004.bak")
    run(2, "--resume", "runs/x", "--steps", 5, cwd=".")
    assert captured(0, 1, export.main, ["runs/x", "out"])[0] == 0 and len(os.listdir(copied)) == 2


def test_a_restart_needs_a_name(corpus, tmp_path, monkeypatch):
    """The default name holds the time: a restart began anew, at step 0 in a folder of another name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    assert "--max-restarts: give a --name" in error_of(train.main, "--data", corpus, *SMALL)
    assert options("--name", "x").name == "x"


def test_an_export_reads_the_text_of_its_run(done, tmp_path, monkeypatch):
    monkeypatch.chdir(shutil.copytree(done, tmp_path / "copy"))
    config = json.loads(Path("runs/x/config.json").read_text())
    moved = shutil.copytree(config["data"], "moved")
    code, said = captured(0, 1, export.main, ["runs/x", "out", "--data", moved])
    last = metrics(Path("runs/x"))[-1]
    assert code == 0 and f"replica mean     {last['merged_loss']:.6f}"[:-1] in said
    Path(moved, "0.txt").write_text("other words " * 3000)
    assert "the data differ from those of this run" in error_of(export.main, "runs/x", "o", "--data", moved)
    assert not Path("o").exists()


def test_a_printed_command_quotes_a_name_with_a_space(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = ["--steps", 1, "--data", corpus, "--name", "a b", *SMALL]
    assert "python -m tools.plot 'runs/a b'\n" in captured(0, 1, train.main, argv)[1]
    assert "give --resume 'runs/a b', or" in error_of(train.main, *argv)


def test_a_run_that_ends_without_a_finite_loss_fails_and_is_not_exported(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    usual = train.inner_step

    def spoil(run, *rest):
        found = usual(run, *rest)
        if run.step == 2:
            run.theta.fill_(torch.nan)
        return found

    argv = ["--steps", 4, "--save-every", 2, "--data", corpus, "--name", "x", *SMALL]
    with monkeypatch.context() as patch:
        patch.setattr(train, "inner_step", spoil)
        code, said = captured(0, 1, train.main, argv)
    assert code == 2
    assert said.splitlines()[-1] == ("error: the held-out loss at step 4 is not finite: give a smaller --lr; "
                                     "go on with --resume runs/x")
    assert "its weights are not finite" in error_of(export.main, "runs/x", "out") and not Path("out").exists()
    code, said = captured(0, 1, train.main, ["--resume", "runs/x"])        # from before
    assert code == 0 and "runs/x, from step 2" in said


def test_diloco_resumed_with_another_beta_goes_on_to_synchronise(trained, tmp_path):
    """It found no class for gamma = 1 beside its beta, and each replica trained alone."""
    trained(2, "--method", "diloco", "--inner-steps", 2, "--steps", 4)
    run(2, "--resume", "runs/x", "--beta", 0.5, "--steps", 8, cwd=tmp_path)
    before, changed, after = (line.get("sync_bytes") for line in metrics(tmp_path / "runs/x"))
    assert after == 2 * before > 0 and changed is None


# ---- what the processes tell each other


def test_a_second_call_of_share_does_not_read_the_first_ones_values():
    """A rank that is fast reads nothing until the others have told their value of the same call."""
    fast, slow = Job(), Job()
    slow.rank, slow.leads = 1, False
    fast.world = slow.world = 2
    slow.store = fast.store
    fast.store.set_timeout(timedelta(milliseconds=50))
    fast.store.set("1/1", "2")
    assert fast.share(1) == [1, 2]
    with pytest.raises(dist.DistStoreError):
        fast.share(3)
    assert slow.share(2) == [1, 2]
    assert slow.share(4) == [3, 4]


def test_who_stops_says_why_and_ends_all_that_wait_for_its_next_value(capsys):
    stops, waits, late = Job(), Job(), Job()
    for rank, job in enumerate((waits, stops, late)):
        job.rank, job.leads, job.world, job.store = rank, rank == 0, 3, stops.store
    stops.then = "; and then"
    for job in (stops, late):
        with pytest.raises(SystemExit) as stop:
            job.stop(f"error: {job.rank}")
        assert stop.value.code == 2
    with pytest.raises(SystemExit) as stop:
        waits.share(1)
    assert stop.value.code == 2 and capsys.readouterr().err == "error: 1; and then\n"


def test_a_second_interrupt_does_not_keep_a_rank_from_saying_why_it_stops_and_sigterm_does(capsys):
    """Ctrl-C may come twice."""
    job, usual = Job(), signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupted(*_):
        os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        return 1

    job.store = SimpleNamespace(add=interrupted, set=interrupted, wait=interrupted)
    with pytest.raises(SystemExit) as stop:
        job.stop("stopped", 130)
    assert signal.signal(signal.SIGINT, usual) == signal.default_int_handler
    assert stop.value.code == 130 and capsys.readouterr().err == "stopped\n"


# ---- going on elsewhere


def test_a_folder_is_taken_once_and_found_again_by_a_restart(corpus, tmp_path, monkeypatch):
    """Of two runs that begin at once, the one that makes the folder first has the name."""
    monkeypatch.chdir(tmp_path)
    argv = ["--steps", 2, "--data", corpus, "--name", "x", *SMALL]

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(train, "Reader", stop)                    # before the run begins
        assert captured(0, 1, train.main, argv) == (130, "stopped\n") and not Path("runs").exists()
    with monkeypatch.context() as patch:
        patch.setattr(train, "write_json", stop)                # when it has just taken its folder
        assert captured(0, 1, train.main, argv) == (130, "stopped\n") and Path("runs/x").exists()
    assert "mend or remove it" in error_of(train.main, "--resume", "runs/x")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "exists", lambda self: False)       # the other run was not there yet
        assert "File exists" in error_of(train.main, *argv)
        patch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        assert captured(0, 1, train.main, argv)[0] == 0
    assert "runs/x exists: give --resume runs/x, or another" in error_of(train.main, *argv)
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
    assert "the data differ from those of this run" in refused(2, "--resume", "runs/x", cwd=folder)


@pytest.mark.parametrize("other", [["--layers", 2], ["--stages", "1,1"], ["--seed", 1], ["--name", "y"],
                                   ["--eval-sequences", 16]])
def test_a_run_does_not_go_on_as_another_one(other, done, tmp_path):
    folder = shutil.copytree(done, tmp_path / "copy")
    said = refused(2, "--resume", "runs/x", *other, cwd=folder)
    assert f"{other[0]} " in said and ": it was " in said


def test_a_config_edited_by_hand_is_one_line(done, tmp_path, monkeypatch):
    """null is the default, as where an option was never given."""
    monkeypatch.chdir(shutil.copytree(done, tmp_path / "copy"))
    file = Path("runs/x/config.json")
    config = json.loads(file.read_text())
    file.write_text(json.dumps(dict(config, hidden=64, seq_len=None)))
    said = refused(2, "--resume", "runs/x", "--steps", 5, cwd=".")
    assert said == "error: --hidden 64: it was 32, and must be"
    assert said == error_of(export.main, "runs/x", "out").strip()


# ---- ending


def _falls(rank, world, argv, number):
    """Rank 1 gets a signal in its third step after the checkpoint."""
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


@pytest.mark.parametrize("kind, number", [
    ("--stages 4 --inner-steps 2", signal.SIGKILL), ("--stages 4 --inner-steps 2", signal.SIGTERM),
    *(pytest.param(*other, marks=pytest.mark.faults) for other in (
        ("--stages 4 --inner-steps 2", signal.SIGINT), ("--method ddp", signal.SIGKILL),
        ("--method ddp", signal.SIGINT), ("--stages 2,2", signal.SIGKILL), ("--stages 2,2", signal.SIGINT)))])
def test_when_a_rank_falls_the_others_end_with_one_line_and_the_run_goes_on(
        kind, number, whole, corpus, tmp_path):
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


def _small_disk(rank, world, argv, size, full):
    if rank in full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    return train_main(rank, world, argv)


@pytest.mark.parametrize("full", [[0], [1, 2]])
def test_a_disk_without_room_for_a_checkpoint_is_one_line_of_one_rank(full, corpus, tmp_path):
    """The limit on a file's size fails a write as a full disk does. The first rank hosts the store."""
    argv = ["--steps", 4, "--save-every", 2, "--data", corpus, "--name", "x", *SMALL]
    results = processes(3, _small_disk, argv, 100_000, full, cwd=tmp_path)
    codes, texts = zip(*results)
    assert codes == (2,) * 3
    (line,) = [line for text in texts for line in text.splitlines() if "runs/x/" in line]
    where = "" if full[0] == 0 else r"rank [12]: "
    assert re.match(rf"error: {where}cannot write into runs/x/checkpoints/00000002: \[Errno 27\] File", line)
    assert "stopped" not in "".join(texts) and not [p for p in tmp_path.rglob("*") if p.suffix == ".tmp"]


def test_a_disk_without_room_for_the_metrics_is_one_line(corpus, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device", "runs/x/metrics.jsonl")

    monkeypatch.chdir(tmp_path)
    line = "error: [Errno 28] No space left on device: 'runs/x/metrics.jsonl'"
    with monkeypatch.context() as patch:
        patch.setattr(train.Log, "line_of", full)
        code, said = captured(0, 1, train.main, ["--steps", 4, "--data", corpus, "--name", "x", *SMALL])
    assert code == 2
    assert said.splitlines()[-1] == f"{line}; go on with --resume runs/x"
    monkeypatch.setattr(train.os, "replace", full)
    code, said = captured(0, 1, train.main, ["--resume", "runs/x", "--steps", 6])
    assert code == 2 and line in said and not list(tmp_path.rglob("*.tmp"))
