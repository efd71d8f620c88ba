"""Training that outlives its processes: every failure in every kind of job (make faults)."""

import contextlib
import enum
import functools
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import train
from model import Llama
from survive.checkpoints import SurvivingCheckpoints
from survive.meeting import (Silent, TooFew, absent, come_back, gloo_group, is_loss, mark_absent, members_of,
                             notice_silence)
from survive.outer import SurvivingNoLoCo
from survive.parts import SurvivingJob, own_checkpoint
from survive.pipeline import SurvivingPipeline, is_lost
from survive.standby import accepts, address_in_use, enough, host_standby, standby_of
from tests.harness import (HERE, SMALL, assert_same, checkpoint, fork, free_port, metrics, patience,
                           processes, rank_process, run, store_host, surviving, surviving_main, train_main,
                           wait_until)
from train import Job


Fault = enum.Enum("Fault", """LATE PAUSE DIE_IN_HAND_OVER STOP_STORE STOP_NODE_0 HANG SLOW SEND_NAN
    DIE_BEFORE_EXCHANGE LOSE_STORE DIE_IN_EXCHANGE DIE_IN_FORWARD DIE_IN_BACKWARD CRASH_IN_CHECKPOINT
    DIE_IN_EVALUATION LOSE_NODE_0""")
STORE_FAULTS = {    # what befalls the process that hosts the store
    Fault.STOP_STORE: signal.SIGSTOP, Fault.STOP_NODE_0: signal.SIGSTOP,
    Fault.LOSE_STORE: signal.SIGKILL, Fault.LOSE_NODE_0: signal.SIGKILL}
FAULTS = ["--steps", 60, "--inner-steps", 5, "--lr", 3e-3, "--warmup", 5, "--eval-every", 20,
          "--save-every", 20, "--name", "x", *SMALL, "--layers", 1]      # and --survive patience(3)
LONG = ["--steps", 120, "--eval-every", 60, "--save-every", 60, "--lr", 1e-2]
OFTEN = ["--eval-every", 20, "--save-every", 20]
SKIP = ["--layers", 3, "--skip", 0.33, "--links", "links.json"]
JOBS = {  # ranks, options, the rank that fails
    # until the loss is flat: one replica fewer, inner steps that a late one leaps over, and microbatches that
    # a dead one loses (more of them on a busy machine, where the ranks are farther apart) cost steps
    "one stage": (4, ["--stages", "4", *LONG], 2),
    "one byte": (4, ["--stages", "4", *LONG, "--wire", "int8"], 2),
    "pipeline": (4, ["--stages", "2,2", "--layers", 2], 3),
    "skip": (6, ["--stages", "2,2,2", *SKIP, *LONG], 4),
    "wide": (5, ["--stages", "2,3", "--layers", 2], None),
    "thin": (3, ["--stages", "1,1,1", "--layers", 3], None),
    "thin, skip": (3, ["--stages", "1,1,1", *SKIP], None),
}

# What is wrong with this process; the third of --survive after which a pipeline calls a silent peer dead.
NOW = types.SimpleNamespace(fault=None, third=0.0)
POST = SurvivingNoLoCo.post


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_exchange(*args):
    POST(*args)
    die()


def send_nan(outer):
    outer.theta[7], NOW.fault = math.nan, None


def write_half(state, file):
    file.write(b"half of it")
    file.flush()
    die()


ACTS = {    # fault: (at a call of what, what this process does before it)
    Fault.DIE_BEFORE_EXCHANGE: (SurvivingNoLoCo, "meet", die),
    Fault.DIE_IN_EXCHANGE: (SurvivingNoLoCo, "post", die_in_exchange),
    Fault.SEND_NAN: (SurvivingNoLoCo, "meet", send_nan),
    Fault.DIE_IN_FORWARD: (Llama, "blocks", die),
    Fault.SLOW: (Llama, "blocks", lambda *_: time.sleep(0.01)),
    Fault.LATE: (Llama, "blocks", lambda *_: time.sleep(NOW.third)),
    Fault.DIE_IN_BACKWARD: (torch.Tensor, "backward", die),
    Fault.DIE_IN_HAND_OVER: (SurvivingPipeline, "hand_over", die),
    Fault.CRASH_IN_CHECKPOINT: (torch, "save", write_half),
    Fault.DIE_IN_EVALUATION: (SurvivingJob, "average", die),
}


def act_at(fault, owner, name, act):
    """act(*args) before owner.name(*args), while this fault is due (None: always)."""
    call = getattr(owner, name)

    def acting(*args, **kwargs):
        if fault in (None, NOW.fault):
            act(*args)
        return call(*args, **kwargs)

    setattr(owner, name, acting)


def stop(pid, number):
    """Send this signal to a process, which `_wake` finds."""
    with open("stopped", "a") as file:
        file.write(f"{pid}\n")
    os.kill(pid, number)


def inject(faults, store):
    """This process is to fail so: [(fault, at step)] in the order of steps.

    Those before the step at which it starts are over.
    """
    queue = None
    NOW.fault = next((fault for fault, at in faults if at < 0), None)

    def begin(pipeline, step, *_):
        nonlocal queue
        job = pipeline.job
        NOW.third = job.timeout / 3
        with contextlib.suppress(RuntimeError):     # the store may be lost by now
            job.store.set(f"begun/{step}/{job.rank}", "")
        if queue is None:
            queue = [f for f in faults if f[1] >= step]
        if queue and step >= queue[0][1]:
            NOW.fault = queue.pop(0)[0]
            if NOW.fault is Fault.PAUSE:
                subprocess.Popen(["sh", "-c", f"sleep {2 * NOW.third}; kill -CONT {os.getpid()}"])
            if NOW.fault in STORE_FAULTS:               # when nobody still evaluates
                job.store.wait([f"begun/{step - 1}/{r}" for r in range(job.world)])
                stop(store, STORE_FAULTS[NOW.fault])
            if NOW.fault in (Fault.HANG, Fault.PAUSE, Fault.STOP_NODE_0):
                stop(os.getpid(), signal.SIGSTOP)
            if NOW.fault is Fault.LOSE_NODE_0:
                die()

    for fault, at_call in ({None: (SurvivingPipeline, "begin", begin)} | ACTS).items():
        act_at(fault, *at_call)


def _faulty(rank, slots, world, helper, argv, faults, store):
    """A rank of the job; in the slot after the last one, a helper from outside it."""
    os.environ["WORLD_SIZE"] = str(world)
    if rank == world:
        return helper(argv)
    inject([(fault, at) for fault, victim, at in faults if victim == rank], store)
    return surviving_main(rank, world, argv)


def command(job, cwd, *extra):
    """(number of ranks, arguments of `python -m survive`)"""
    world, options, _ = JOBS[job]
    (cwd / "links.json").write_text(json.dumps(dict(delay=[[0.01] * world] * world, compute=0.01)))
    return world, [*FAULTS, "--survive", patience(3), *options, *extra]


def failing(job, faults, cwd, *extra, helper=None, fallen=()):
    """Training with faults [(fault, rank, step)]: (exit status, output) of every rank, then of the helper."""
    world, argv = command(job, cwd, *extra)
    with store_host() as (port, pid):
        return processes(world + bool(helper), _faulty, world, helper, argv, faults, pid, cwd=cwd, port=port,
                         fallen=fallen)


@pytest.fixture(scope="module")
def sound(corpus, tmp_path_factory):
    """Held-out loss of each job when nothing fails, run once."""

    @functools.cache
    def loss(job, *extra):
        folder = tmp_path_factory.mktemp("sound")
        more = [*extra, "--eval-every", 1000, "--save-every", 1000]
        assert all(code == 0 for code, _ in failing(job, [], folder, "--data", corpus, *more))
        return metrics(folder / "runs/x")[-1]["heldout_loss"]

    return loss


# `make test` has a death and a return, a lost store and a stage that dies out: the tests below
CASES = [pytest.param(f, j, id=f"{f.name}-{j}") for j in [*JOBS][:4] for f in [*Fault][5:]]


@pytest.mark.faults
@pytest.mark.parametrize("fault, job", CASES)
def test_survivors_reach_the_loss_of_a_run_without_the_fault(fault, job, sound, corpus, tmp_path):
    world, _, victim = JOBS[job]
    victim = 0 if fault is Fault.LOSE_NODE_0 else victim
    dies = fault not in (Fault.SLOW, Fault.SEND_NAN, Fault.LOSE_STORE)
    results = failing(job, [(fault, victim, 22)], tmp_path, "--data", corpus, fallen=[victim] if dies else [])
    print(*results, sep="\n")
    rows = metrics(tmp_path / "runs/x")
    if fault in (Fault.LOSE_STORE, Fault.LOSE_NODE_0):
        assert all(re.search(rf"on at step {'[23]' if 'one' in job else 2}\d,", r[1]) for r in results if r)
    assert all(result and result[0] == 0 for rank, result in enumerate(results) if rank != victim or not dies)
    events = [row for row in rows if "event" in row]
    if fault is Fault.SEND_NAN:
        assert any(e.get("refused") == [victim] and e["rank"] != victim for e in events)
        assert any(e.get("adopted") not in (None, victim) and e["rank"] == victim for e in events)
        assert (rows[-1]["weight_spread"] or 0) < 1             # None: one came late to compare
    elif dies and job.startswith("one"):
        # on a loaded machine a survivor that has waited for the victim may itself come too late for its next
        # partner; in the end all are there. Whom an evaluation misses no outer step waits for
        missed = {r for e in events for r in e.get("missing", ())}
        assert victim in missed or fault in (Fault.CRASH_IN_CHECKPOINT, Fault.DIE_IN_EVALUATION)
    elif dies:
        assert [e["ranks"] for e in events if e["event"] == "dead"] == [[victim]]
        if job == "skip" and fault is not Fault.LOSE_NODE_0:
            dead = next(e["step"] for e in events if e["event"] == "dead")
            assert dead > 22
        # what went through it in one iteration, and in those that others, who do not need it, had begun
        # by then: to the next outer step at most
        assert 0 <= rows[-1]["lost_microbatches"] <= (2 if job == "skip" else 4) * 6
    assert not dies or rows[-1]["ranks"] == world - 1
    assert rows[-1]["step"] == (60 if job == "pipeline" else 120)
    assert rows[-1]["heldout_loss"] == pytest.approx(sound(job), rel=0.05)


def fall(rank, store):
    """This process leaves a mark and dies, rank 0 with the store."""
    Path(f"killed{rank}").touch()
    if rank == 0:
        os.kill(store, signal.SIGKILL)
    die()


def _killed(rank, world, argv, kills, store):
    """A rank of the job. kills: {rank: (the step from which on it is killed, after so many seconds)}."""
    at, seconds = kills.get(rank, (math.inf, 0.0))

    def begin(pipeline, step, *_):
        nonlocal at
        if step >= at:              # a late rank may have leapt over the very step
            at = math.inf
            threading.Timer(seconds, fall, [rank, store]).start()

    act_at(None, SurvivingPipeline, "begin", begin)
    return surviving_main(rank, world, argv)


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(int(os.environ.get("KILLED_RUNS", 4))))
def test_nobody_is_lost_who_was_not_killed(seed, corpus, tmp_path):
    """Kills at random moments, of two ranks, or of node 0 with the store. KILLED_RUNS=60: of so many runs."""
    draw = random.Random(f"kills {seed}")
    stages = ["8", "4,4", "3,3,2"][seed % 3]
    victims = [0] if seed % 4 == 3 else draw.sample(range(1, 7), 2)
    kills = {victim: (draw.randrange(1, 40), draw.uniform(0, 0.1)) for victim in victims}
    argv = [*FAULTS, "--stages", stages, "--layers", 3, "--survive", patience(3), "--data", corpus]
    with store_host() as (port, pid):
        results = processes(8, _killed, argv, kills, pid, cwd=tmp_path, port=port, fallen=victims)
    print(kills, *results, sep="\n")
    survivors = set(range(8)) - set(victims)
    assert all((tmp_path / f"killed{r}").exists() for r in victims)
    assert all(results[r][0] == 0 for r in survivors)
    assert all(checkpoint(tmp_path / "runs/x", 60, r)["step"] == 60 for r in survivors)


def _ahead_of_the_next_first_rank(rank, world, argv, store):
    """Rank 0 dies with the store when all but rank 1 evaluate at step 20. Until then these wait there, and
    rank 1 at step 12."""
    def evaluates(*_):
        Path(f"evaluates{rank}").touch()
        wait_until(Path("killed0").exists)

    def collect(*_):
        wait_until(lambda: all(Path(f"evaluates{r}").exists() for r in (2, 3)))
        fall(rank, store)

    def begin(pipeline, step, *_):
        if step == 12:
            wait_until(Path("killed0").exists)

    if rank == 0:
        act_at(None, SurvivingJob, "collect", collect)
    elif rank == 1:
        act_at(None, SurvivingPipeline, "begin", begin)
    else:
        act_at(None, SurvivingJob, "average", evaluates)
    return surviving_main(rank, world, argv)


@pytest.mark.faults
def test_a_first_rank_that_is_behind_after_a_takeover_goes_on(corpus, tmp_path):
    """The others have done an evaluation that it has yet to do: there it is alone."""
    world, argv = command("one stage", tmp_path, "--data", corpus, "--steps", 60, *OFTEN)
    with store_host() as (port, pid):
        results = processes(world, _ahead_of_the_next_first_rank, argv, pid, cwd=tmp_path, port=port,
                            fallen=[0])
    print(*results, sep="\n")
    assert [result and result[0] for result in results] == [None, 0, 0, 0]
    rows = metrics(tmp_path / "runs/x")
    assert [(row["rank"], row["missing"]) for row in rows if row.get("event") == "takeover"] == [(1, [0])]
    evaluated = [(row["step"], row["ranks"]) for row in rows if "ranks" in row]
    assert evaluated[0] == (20, 1) and evaluated[-1][0] == 60


@pytest.mark.faults
def test_the_first_rank_waits_at_the_end_for_a_late_replica(corpus, tmp_path):
    """It hosts the store. The others end seconds before the late one."""
    world, argv = command("one stage", tmp_path, "--steps", 40, "--data", corpus)
    results = processes(world, _faulty, world, None, argv, [(Fault.LATE, 2, 36)], None, cwd=tmp_path)
    assert [code for code, _ in results] == [0] * 4 and checkpoint(tmp_path / "runs/x", 40, 2)["step"] == 40


@pytest.fixture(scope="module")
def survivors(corpus, tmp_path_factory):
    """Where four replicas have trained to step 60 as runs/x; rank 2 died at step 22."""
    folder = tmp_path_factory.mktemp("survivors")
    results = failing("one stage", [(Fault.DIE_BEFORE_EXCHANGE, 2, 22)], folder, "--data", corpus,
                      "--steps", 60, *OFTEN, fallen=[2])
    assert [result and result[0] for result in results] == [0, 0, None, 0]
    return folder


def test_survivors_leave_checkpoints_that_name_the_dead(survivors):
    names = lambda folder: sorted(path.name for path in (survivors / "runs/x/checkpoints" / folder).iterdir())
    assert names("") == ["00000020", "00000040", "00000060"]        # 20: the last that all hold
    assert names("00000060") == ["rank0.pt", "rank1.pt", "rank2.dead", "rank3.pt"]


def _return(argv):
    """Rank 2 is started again once it is missed."""
    os.environ["RANK"] = "2"
    store = Job().store
    # With a limit: to measure how slow the machine is would take longer than the run.
    wait_until(lambda: store.check(["absent/2"]), limit=600)
    return surviving_main(2, 4, [*argv, "--join"])


@pytest.mark.parametrize("wire, at, end, more", [
    pytest.param("int8", 22, 160, [], id="anew"),
    pytest.param("fp32", 82, 280, ["--resume", "runs/x"], id="resumed", marks=pytest.mark.faults)])
def test_a_restarted_replica_joins_and_takes_part(wire, at, end, more, request, corpus, tmp_path):
    """more: the run goes on from the survivors' checkpoints, which serve the dead rank 2 too."""
    if more:
        shutil.copytree(request.getfixturevalue("survivors") / "runs", tmp_path / "runs")
    more = ["--data", corpus, *OFTEN, "--steps", end, "--wire", wire, *more]
    *results, joined = failing("one stage", [(Fault.DIE_BEFORE_EXCHANGE, 2, at)], tmp_path, *more,
                               helper=_return, fallen=[2])
    assert [result and result[0] for result in results] == [0, 0, None, 0] and joined[0] == 0, joined
    rows = metrics(tmp_path / "runs/x")
    assert next(row for row in rows if row["step"] == at - 2 and "ranks" in row)["ranks"] == 4
    back = next(row for row in rows if row.get("event") == "joined")
    assert not [row for row in rows if row.get("event") == "not finite"]
    assert back["rank"] == 2 and [row["ranks"] for row in rows if "ranks" in row][-1] == 4
    # to a joiner weights go in fp32, and then in one byte again
    far = [row["outer"] for row in rows if row.get("event") == "fp32 instead of int8" and 2 in row["far"]]
    assert bool(far) == (wire == "int8") and len(set(far)) <= 2
    # partner again from the next outer step on
    assert not [row for row in rows if row["step"] > back["step"] + 5 and 2 in row.get("missing", [])]
    assert (rows[-1]["weight_spread"] or 0) < 1e-2      # None: one came late to compare
    evaluated = [row["heldout_loss"] for row in rows if "ranks" in row]
    assert evaluated[-1] < 1.05 * min(evaluated)
    *states, last = (checkpoint(tmp_path / "runs/x", end, r) for r in range(4))
    assert all(state["step"] == last["step"] for state in states)
    assert all((state["theta"] - last["theta"]).norm() < 0.1 * last["theta"].norm() for state in states)


def test_one_process_has_nobody_to_survive(corpus, tmp_path):
    run(1, *FAULTS, "--survive", 3, "--data", corpus, cwd=tmp_path, main=surviving)
    assert metrics(tmp_path / "runs/x")[-1]["step"] == 60


@pytest.mark.parametrize("parts, line", [({}, "no rank has rank 0's weights, nor has x a checkpoint"),
                                         ({20: __file__}, ".*test_survive.py is damaged .*")])
def test_only_the_joiner_is_refused_and_after_a_takeover_it_knows_its_stores_address(parts, line, capsys):
    job = Job()
    job.store.multi_set(["takeover/members", "address"], ["0", '["10.0.0.1", 29500]'])
    job = SurvivingJob(job, 1.0, asks=True)
    assert job.address == ["10.0.0.1", 29500]
    checkpoints = types.SimpleNamespace(own=lambda: parts)
    with pytest.raises(SystemExit) as stop, train.in_one_line(job):
        own_checkpoint(types.SimpleNamespace(job=job, folder="x", checkpoints=checkpoints))
    assert stop.value.code == 2 and re.fullmatch(f"error: {line}\n", capsys.readouterr().err)


def test_a_store_lost_before_an_evaluation_leaves_a_checkpoint_from_which_all_go_on(corpus, tmp_path):
    results = failing("one stage", [(Fault.LOSE_STORE, 2, 22)], tmp_path, "--data", corpus,
                      "--inner-steps", 50, *OFTEN)
    assert all(code == 0 and "goes on at step 40" in text for code, text in results)
    assert [checkpoint(tmp_path / "runs/x", 120, r)["step"] for r in range(4)] == [120] * 4


def _join_elsewhere(argv):
    """Rank 3 is started again, with the standby store of rank 1, once an evaluation there has missed it."""
    os.environ["RANK"] = "3"
    port = json.loads(Job().store.get("standby/1"))[1]
    os.environ["MASTER_PORT"] = str(port)
    Job().store.get("row/3/False/1")
    return surviving_main(3, 5, [*argv, "--join"])


@pytest.mark.faults
@pytest.mark.parametrize("stages", ["5", "3,2"])
def test_the_nodes_of_two_stores_die_and_between_them_a_node_comes_back(stages, corpus, tmp_path):
    faults = [(Fault.LOSE_NODE_0, 0, 22), (Fault.DIE_IN_FORWARD, 3, 45), (Fault.DIE_IN_FORWARD, 1, 240)]
    *results, joined = failing("wide", faults, tmp_path, "--stages", stages, "--data", corpus, "--steps", 300,
                               helper=_join_elsewhere, fallen=[0, 1, 3])
    assert [result and result[0] for result in results] == [None, None, 0, None, 0] and joined[0] == 0
    rows = metrics(tmp_path / "runs/x")
    assert [row["rank"] for row in rows if row.get("event") == "joined"] == [3]
    assert rows[-1]["step"] == 300 and rows[-1]["ranks"] == 3 and rows[-1]["heldout_loss"] < 0.5


def _wake(argv):
    """What is stopped wakes when the others train without it."""
    log = Path("runs/x/metrics.jsonl")
    taken_over = lambda: any(row.get("event") == "takeover" for row in metrics(log.parent))
    wait_until(lambda: log.exists() and taken_over(), limit=600)        # with a limit, as in `_return`
    for pid in Path("stopped").read_text().split():
        with contextlib.suppress(ProcessLookupError):       # it was killed
            os.kill(int(pid), signal.SIGCONT)


@pytest.mark.faults
@pytest.mark.parametrize("fault", [Fault.STOP_STORE, Fault.STOP_NODE_0])
@pytest.mark.parametrize("job", ["one stage", "pipeline", "skip"])
def test_a_stopped_store_holds_nobody(job, fault, corpus, tmp_path):
    """Its kernel still acknowledges what arrives, so TCP never gives it up."""
    first, *others, _ = failing(job, [(fault, 0, 22)], tmp_path, "--data", corpus, "--steps", 60, *OFTEN,
                                helper=_wake)
    print(first, *others, sep="\n")
    assert all(code == 0 for code, _ in others)
    rows = metrics(tmp_path / "runs/x")
    fallen = [0] if fault is Fault.STOP_NODE_0 else []
    assert [row["missing"] for row in rows if row.get("event") == "takeover"] == [fallen]
    assert rows[-1]["step"] == 60 and rows[-1]["ranks"] == JOBS[job][0] - len(fallen)
    said = first[1].splitlines()[-1] if first[0] == 0 else first[0]
    assert said.startswith("stopped: rank 0 at step ") == bool(fallen)


def _asks_a_stopped_store(rank, world, seconds, port, pid):
    """What a rank's requests raise for a key that never comes: at a store that lives, at one that is stopped,
    and when that has woken."""
    errors = []
    stores = [dist.TCPStore("127.0.0.1", port, wait_for_workers=False) for _ in range(3)]
    notice_silence(stores[0], seconds)

    def attempt(function, *args):
        try:
            function(*args)
        except dist.DistError as error:
            errors.append(type(error).__name__)

    attempt(stores[0].wait, ["nothing"], timedelta(seconds=10 * seconds))
    os.kill(pid, signal.SIGSTOP)
    attempt(stores[1].wait, ["nothing"], timedelta(hours=1))
    attempt(stores[2].get, "nothing")
    attempt(stores[0].check, ["nothing"])
    os.kill(pid, signal.SIGCONT)
    attempt(stores[0].check, ["nothing"])
    return errors


def test_a_stopped_store_is_lost_and_no_key_that_never_comes():
    with store_host() as host:
        [errors] = processes(1, _asks_a_stopped_store, patience(0.3), *host, limit=patience(30))
    assert errors == ["DistStoreError"] + ["DistNetworkError"] * 4


@pytest.fixture
def replica(monkeypatch):
    """A function that makes rank 1 of two replicas, without a store but its own, and rank 0 not yet there."""
    monkeypatch.setenv("RANK", "1")
    settings = dict(inner_steps=5, last=50, alpha=0.5, beta=0.7, timeout=6.0)

    def made(**more):
        params = [torch.nn.Parameter(torch.ones(4))]
        return SurvivingNoLoCo(params, range(2), store=dist.HashStore(), **(settings | more))

    return made


def test_a_replica_that_comes_back_after_the_last_outer_step_is_told_so(replica):
    outer = replica()
    outer.store.multi_set(["at/0", "outer/0/9/ranks"], ["9 out", "0"])
    with pytest.raises(ValueError, match="no outer step is left"):
        outer.join()


def test_a_late_replica_leaps_over_outer_steps_and_cuts_inner_steps_short(replica):
    events = []
    outer = replica(tell=events.append)
    mark_absent(outer.store, 0, "outer/0/0/0")
    outer.store.multi_set(["outer/0/0/ranks", "outer/0/1/ranks"], ["0 1", "0 1"])
    outer.late = True
    assert not outer.step() and outer.steps == 2 * 5 + 1            # nobody can come to the first two
    assert [(event["event"], event["outer_steps"]) for event in events] == [("leapt", 2)]
    come_back(outer.store, 0)
    outer.store.multi_set(["outer/0/2/ranks", "outer/0/2/0/0"], ["0 1", "here"])
    outer.meet = lambda: None
    assert outer.step() and outer.steps == 3 * 5                    # rank 0 waits in the third


def test_an_outer_step_alone_has_no_gamma_term(replica):
    outer = replica(inner_steps=1, gamma=0.9)
    mark_absent(outer.store, 0, "before")
    outer.theta.add_(1.0)
    assert outer.step() and outer.alone == 1
    assert outer.params[0].tolist() == outer.phi[:4].tolist() == pytest.approx([1 + 0.7 * 1.0] * 4)     # N2


class Impatient(dist.HashStore):
    """No wait lasts. waits: [(its keys, its seconds)]."""

    def __init__(self):
        super().__init__()
        self.waits = []

    def wait(self, keys, time):
        self.waits.append((list(keys), time.total_seconds()))
        if not self.check(keys):
            raise dist.DistStoreError("not in time")


@pytest.mark.parametrize("at, marked, waits", [
    (None, False, [3.0]), ("4 out", False, [3.0]), ("4 in", False, [3.0, 3.0]), ("4 late", False, [3.0, 3.0]),
    ("4 in", True, [])])
def test_a_rank_waits_half_its_time_for_another_and_all_of_it_for_one_held_up(at, marked, waits):
    """at: where rank 1 was last. marked: it is absent already."""
    store = Impatient()
    if at:
        store.set("at/1", at)
    if marked:
        mark_absent(store, 1, "before")
    assert members_of(store, "now", 0, [0, 1], 6.0) == (0,)
    assert [seconds for _, seconds in store.waits] == waits and absent(store, range(2)) == {1}


@pytest.fixture
def first_of_three():
    """The first rank's job. No wait lasts; ranks 1 and 2 answer what a test says."""
    job = SurvivingJob.__new__(SurvivingJob)
    vars(job).update(store=Impatient(), rank=0, world=3, leads=True, members=range(3), dead=set(),
                     missed=set(), last="", latest=-1, standby=(None, ["host", 1]),
                     patience=2.0)          # of 6 s
    for rank in range(3):
        job.store.set(f"standby/{rank}", json.dumps(job.standby[1]))
    job.store.set("answered", json.dumps([0, [0, 1, 2], [0, 1, 2]]))
    return job


def test_an_evaluation_misses_a_silent_rank_once_waits_again_for_a_late_one_and_ends_a_run_of_too_few(
        first_of_three):
    job = first_of_three
    job.store.set("row/1/1", "7")
    assert job.collect("row/1", 5, 20) == {0: 5, 1: 7} and job.missed == {2}
    assert job.store.waits == [(["row/1/0", "row/1/1", "row/1/2"], 2.0)]
    job.store.set("row/2/1", "8")
    assert job.collect("row/2", 5, 40) == {0: 5, 1: 8}
    assert job.store.waits[1:] == [(["row/2/0", "row/2/1"], 2.0)]
    job.read()
    assert job.answered == [2, [0, 1], [0, 1]]
    job.store.multi_set(["row/2/2", "row/3/1", "row/3/2"], ["9", "8", "9"])      # rank 2 was only late
    assert job.collect("row/3", 5, 60) == {0: 5, 1: 8, 2: 9} and job.missed == set()
    assert job.store.waits[2:] == [(["row/3/0", "row/3/1", "row/3/2"], 2.0)]
    with pytest.raises(TooFew, match=r"^only ranks \[0\] answer, too few to go on"):
        job.collect("row/4", 5, 80)
    assert sum(seconds for _, seconds in job.store.waits[3:]) == 2.0 + 5 * 6.0


def test_a_first_rank_behind_the_step_of_a_takeover_is_alone_in_its_evaluations_until_then(first_of_three):
    """The others are ahead of it: they answer none of these, and count as before it."""
    job = first_of_three
    job.latest = 40
    assert job.collect("row/1", 5, 20) == job.collect("row/2", 5, 40) == {0: 5}
    assert [seconds for _, seconds in job.store.waits] == [2.0, 2.0]
    job.read()
    assert job.answered == [0, [0, 1, 2], [0, 1, 2]]
    with pytest.raises(TooFew, match=r"^only ranks \[0\] answer"):
        job.collect("row/3", 5, 60)


def test_a_peer_is_silent_after_a_third_of_the_timeout_without_a_beat(monkeypatch):
    pipeline = SurvivingPipeline.__new__(SurvivingPipeline)
    pipeline.job = types.SimpleNamespace(timeout=6.0)
    pipeline.rank, pipeline.lives, pipeline.groups = 0, [0, 0], {1: Future()}
    store, seen = dist.HashStore(), {}
    probe = lambda now: pipeline.probe(store, 1, Future(), seen, now)
    probe(100.0)
    probe(102.0)
    store.add("beat/1/0", 1)
    probe(103.0)
    probe(105.0)
    with pytest.raises(Silent, match="no sign of life for 2 s"):
        probe(105.1)
    pipeline.rank = 1                       # it wakes, and must not declare the other one dead
    with pytest.raises(Silent, match="other ranks do not wait for this rank any more"):
        probe(106.0)
    monkeypatch.setattr(train.Pipeline, "run", lambda *_: None)
    pipeline.run([], {}, train=False)
    assert pipeline.grace == 10 * 6.0       # for a checkpoint and the log


def test_a_copy_of_a_checkpoint_is_no_part(tmp_path):
    """Somebody keeps one beside the others."""
    for name in ("00000003", "00000003.bak"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        for file in ("rank0.pt", "rank0.bak.pt", "rank1.dead", "rank1.bak.dead"):
            (tmp_path / "checkpoints" / name / file).touch()
    job = types.SimpleNamespace(rank=1, stages=[[0, 1]])
    assert SurvivingCheckpoints(job, tmp_path).parts() == {3: tmp_path / "checkpoints/00000003/rank0.pt"}


@pytest.mark.parametrize("job, at, hint", [
    ("thin", 5, "the ranks have no checkpoint in common: start again with another --name"),
    ("thin", 22, "go on with --resume runs/x"), ("thin, skip", 22, None)], ids=["at once", "later", "skip"])
def test_a_stage_without_replicas_is_left_out_or_ends_the_run(job, at, hint, corpus, tmp_path):
    results = failing(job, [(Fault.DIE_IN_BACKWARD, 2, at)], tmp_path, "--data", corpus, fallen=[2])
    rows = metrics(tmp_path / "runs/x")
    if hint is None:
        assert [code for code, _ in results[:2]] == [0, 0]
        assert rows[-1]["step"] == 60 and rows[-1]["heldout_loss"] < rows[0]["heldout_loss"]
        assert [row["stages_left_out"] for row in rows if row.get("event") == "dead"] == [[2]]
    else:
        line = f"stopped: rank {{}} at step {at + 1}: every replica of stage 2 is dead and without --skip "
        line += f"no microbatch can leave it out; {hint}"
        assert [code for code, _ in results[:2]] == [line.format(r) for r in range(2)]
        assert [checkpoint(tmp_path / "runs/x", at + 1, r)["step"] for r in range(2)] == [at + 1] * 2


def _crashing(argv):
    """train.py; the first time, rank 1 dies at step 7."""
    def crash(routes, step):
        if step == 7 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            die()

    act_at(None, train.Routes, "at", crash)
    return train_main(0, 2, argv)


def _elastic(rank, world, argv):
    """torchrun --standalone --nproc-per-node 2 --max-restarts 1, with forks of this process as workers."""
    config = LaunchConfig(1, 1, 2, run_id="x", rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0",
                          max_restarts=1, start_method="fork")
    return elastic_launch(config, _crashing)(argv)


def test_torchrun_restarts_from_the_newest_whole_checkpoint(corpus, tmp_path):
    argv = ["--stages", "2", "--steps", 10, "--inner-steps", 2, "--save-every", 3, "--data", corpus, *SMALL]
    [results] = processes(1, _elastic, [*argv, "--name", "again"], cwd=tmp_path)
    assert [results[rank][0] for rank in range(2)] == [0, 0]
    (restarted,) = (tmp_path / "runs").iterdir()
    assert f"runs/{restarted.name}, from step 6" in results[0][1]
    run(2, *argv, "--name", "whole", cwd=tmp_path)
    assert_same(restarted, tmp_path / "runs/whole", 10, world=2)


def _half_way(rank, world, sends, number, seconds):
    """Rank 1 falls in the midst of the first message, 128 MB: which of two rank 0 has, who is dead to it, and
    whether the first had begun to come."""
    job = SurvivingJob(Job(), seconds, asks=False)
    pipeline = SurvivingPipeline(torch.nn.Linear(1, 1), job, [[0], [1]], (1, 8192, 4096))
    peer, word = 1 - rank, [torch.ones(1)]
    if rank == sends:
        pipeline.groups[peer].result().recv(word, peer, 1).wait()     # the peer's receives are there
        second = pipeline.send(torch.zeros(pipeline.message_shape), peer, 0, 2)
        if rank == 1:
            assert pipeline.arrives(second[0].work, peer)
        first = pipeline.send(torch.zeros(pipeline.message_shape), peer, 0, 1)
    else:
        first, second = (pipeline.receive(peer, 0, hop) for hop in (1, 2))
        first[1].view(-1)[0] = 1
        pipeline.groups[peer].result().send(word, peer, 1).wait()
    if rank == 1:
        os.kill(os.getpid(), number)
    arrived = [pipeline.arrives(message.work, peer) for message, _ in (first, second)]
    begun = float(first[1].view(-1)[0]) == 0
    first[0].wait()             # what came of it, if it came to this rank, is not used
    pipeline.close()
    return arrived, pipeline.newest, begun, is_lost(first[1])


@pytest.mark.parametrize("sends, number", [(1, signal.SIGKILL), (1, signal.SIGSTOP), (0, signal.SIGSTOP)])
def test_a_message_cut_off_in_its_midst_holds_nobody(sends, number):
    """Gloo tells nobody who waits for a message that is half on its way that its connection broke."""
    [found, _] = processes(2, _half_way, sends, number, patience(3), fallen=[1], limit=patience(30))
    assert found == ([False, sends == 1], [0, 1], True, sends == 1)     # what had come before is there


class WatchedInTurns(SurvivingPipeline):
    """Each time the watch has read what the main thread waits for, the main thread waits for another peer."""

    @property
    def waiting(self):
        found = self.__dict__["now"]
        if threading.current_thread() is self.watcher and not self.moved.is_set():
            self.look.set()
            self.moved.wait()
        return found

    @waiting.setter
    def waiting(self, value):
        self.__dict__["now"] = value

    def probe(self, store, peer, arrival, seen, now):
        if peer == "silent":
            raise Silent(f"{peer} gives no sign of life")
        self.judged.set()


def test_the_silence_of_one_peer_never_ends_the_wait_for_another():
    """The first message comes, and the wait for the second begins, while the watch reads."""
    pipeline = WatchedInTurns.__new__(WatchedInTurns)
    pipeline.job = types.SimpleNamespace(store=types.SimpleNamespace(clone=dist.HashStore), timeout=0.01)
    pipeline.rank, pipeline.step = 0, -1
    pipeline.lives = [0]
    pipeline.busy_until = pipeline.grace = math.inf
    pipeline.waiting = None
    pipeline.stopped = threading.Event()
    pipeline.look = threading.Event()       # the watch has read whom the main thread waits for
    pipeline.moved = threading.Event()      # the main thread waits for another peer
    pipeline.judged = threading.Event()     # the watch has judged that second wait
    pipeline.watcher = threading.Thread(target=pipeline.watch, daemon=True)
    silent, alive = Future(), Future()
    main = threading.Thread(target=pipeline.until, args=["silent", silent], daemon=True)
    main.start()
    wait_until(lambda: pipeline.waiting)
    pipeline.watcher.start()
    assert pipeline.look.wait(patience(60))
    silent.set_result("it came after all")
    main.join()
    after = threading.Thread(target=pipeline.until, args=["alive", alive], daemon=True)
    after.start()
    wait_until(lambda: pipeline.waiting)
    pipeline.moved.set()
    wait_until(lambda: alive.done() or pipeline.judged.is_set())
    pipeline.stopped.set()
    assert not alive.done()
    alive.set_result("it came")
    after.join()


def _losses(rank, world):
    """The errors of one who waits for a peer or the store, in the order in which they come here."""
    job = Job()
    group = gloo_group(job.store, "pair", rank, 2, 60)
    if rank == 1:
        job.store.set("connected", "=")
        job.store.get("enough")
        return None
    job.store.wait(["connected"])                           # the first error closes the connection
    errors = []
    first = group.recv([torch.empty(1)], 1, 1)
    second = group.recv([torch.empty(1)], 1, 2)

    def attempt(function, *args):
        try:
            function(*args)
        except RuntimeError as error:
            errors.append((type(error).__name__, is_loss(error), str(error)))

    attempt(first.wait, timedelta(milliseconds=1))
    attempt(second.wait)                                    # its connection is closed by now
    attempt(group.send, [torch.ones(1)], 1, 3)
    attempt(job.store.wait, ["nothing"], timedelta(milliseconds=1))
    attempt(gloo_group, job.store, "nobody", 0, 2, 0.1)
    attempt(torch.matmul, torch.ones(2), torch.ones(3))     # no loss
    job.store.set("enough", "=")
    return errors


def test_what_torch_raises_for_a_loss_is_told_from_other_errors():
    with store_host() as (port, _):
        errors, _ = processes(2, _losses, port=port)
    *losses, fault = errors
    assert len(losses) == 5 and all(found for _, found, _ in losses), losses
    assert not fault[1], fault


def _codec_fails(rank, world):
    """An outer step where rank 0 cannot write its message: what it raises, and outer steps done alone."""
    outer = SurvivingNoLoCo([torch.nn.Parameter(torch.ones(4))], inner_steps=1, store=Job().store, tell=id)

    def post(*_):
        raise RuntimeError("the codec is broken")

    if rank == 0:
        outer.post = post       # it encodes what it sends
    try:
        outer.step()
    except RuntimeError as error:
        return str(error), outer.alone
    return "", outer.alone


def test_an_error_of_this_process_is_no_lost_partner():
    """Rank 0 stops by it, instead of training on alone; rank 1 outlives rank 0."""
    with store_host() as (port, _):
        assert processes(2, _codec_fails, port=port) == [("the codec is broken", 0), ("", 1)]


def _finds_store(rank, world, port):
    job = types.SimpleNamespace(addresses={7: ["127.0.0.1", port]}, patience=0.1)
    return standby_of(job, 7) is not None, accepts(job, 7)


@pytest.mark.parametrize("number, found", [
    (signal.SIGSTOP, (False, True)), (signal.SIGKILL, (False, False)), (0, (True, True))])
def test_the_standby_store_of_a_stopped_process_holds_nobody(number, found):
    """torch waits for it without a timeout: the process takes connections, and never answers."""
    with store_host() as (port, pid):
        os.kill(pid, number)
        assert processes(1, _finds_store, port, limit=patience(30)) == [found]


def _joins_beside_itself(rank, world):
    """Rank 1 comes with --join while another process has its place: its address, what the new one says, and
    whether it wrote to the store; then the address where the other process has ended."""
    os.environ.update(RANK="1", WORLD_SIZE="2")
    store, held = Job().store, host_standby()       # as the other process holds it
    address, port = held[1]
    store.set("standby/1", json.dumps([address, port]))
    keys = store.num_keys()
    said = surviving_main(1, 2, ["--join"])
    wrote = store.num_keys() - keys
    store.set("standby/1", json.dumps([address, free_port()]))
    return f"{address}:{port}", said, wrote, address_in_use(store, 1), address_in_use(store, 7)


def test_a_rank_that_lives_is_joined_by_no_second_process():
    """It trained beside the first one, and left rows in its log."""
    with store_host() as (port, _):
        [(place, said, *rest)] = processes(1, _joins_beside_itself, port=port)
    line = f"error: --join takes the place of a lost process, but rank 1 lives at {place}: end it first\n"
    assert said == (2, line) and rest == [0, None, None]


@pytest.mark.faults
def test_a_takeover_passes_over_a_stopped_process(corpus, tmp_path):
    """Node 0 dies with the store while rank 1, whose standby store comes first, is stopped for a while."""
    faults = [(Fault.LOSE_NODE_0, 0, 22), (Fault.HANG, 1, 22)]
    results = failing("wide", faults, tmp_path, "--stages", "5", "--data", corpus, *OFTEN, helper=_wake,
                      fallen=[0])
    assert [result and result[0] for result in results[2:5]] == [0, 0, 0], results
    line = r"stopped: rank 1 at step 2\d: .*; go on with --resume runs/x"
    assert re.fullmatch(line, results[1][0]), results
    rows = metrics(tmp_path / "runs/x")
    assert [(row["rank"], row["missing"]) for row in rows if row.get("event") == "takeover"] == [(2, [0, 1])]
    assert rows[-1]["step"] == 60 and rows[-1]["ranks"] == 3


PROGRAM = """
import sys, threading, time
import torch.distributed as dist
import survive.__main__ as survive

class Last:     # when Python takes the interpreter down, the thread's wait ends
    def __del__(self):
        store.set("the end", "=")
        time.sleep(10)      # the process aborts meanwhile

store, last = dist.HashStore(), Last()
threading.Thread(target=store.wait, args=[["the end"]], daemon=True).start()
survive.main()
"""


@pytest.mark.faults
@pytest.mark.parametrize("exists, status, text", [
    pytest.param(False, 0, "kept in runs/x", id="done"),
    pytest.param(True, 2, "error: runs/x exists", id="refused")])
def test_a_thread_that_torch_holds_does_not_abort_the_process(exists, status, text, corpus, tmp_path):
    """At its end, as a thread did that waited for a lost peer, when other survivors ended just then."""
    if exists:
        (tmp_path / "runs/x").mkdir(parents=True)
        (tmp_path / "runs/x/config.json").touch()
    argv = [*FAULTS, "--steps", 2, "--survive", 3, "--data", corpus]
    environment = dict(os.environ, PYTHONPATH=str(HERE), OMP_NUM_THREADS="1")
    done = subprocess.run([sys.executable, "-c", PROGRAM, *map(str, argv)], cwd=tmp_path, env=environment,
                          capture_output=True, text=True, timeout=patience(120))
    assert done.returncode == status and text in done.stdout + done.stderr, done


def _connects_late(rank, world):
    """Rank 1 reads rank 0's address, and connects, once rank 0 has given up. Then the two meet."""
    create, store = dist.ProcessGroupGloo.create_device, Job().store
    dist.ProcessGroupGloo.create_device = lambda interface: create(hostname=f"127.0.0.{rank + 1}")
    late_store = type("LateStore", (dist.Store,), dict(
        set=lambda self, key, value: store.set(key, value), get=lambda self, key: store.get(key),
        wait=lambda self, keys, *_: store.wait([*keys, "given up"])))
    if rank == 0:
        store.wait(["first/0/1"])               # rank 1's address
    with contextlib.suppress(RuntimeError):
        gloo_group(late_store() if rank else store, "first", rank, 2, 0.2)
    junk = [b"\xff" * size for size in range(256, 4096, 8) for _ in range(20)]      # over what Gloo has freed
    store.set("given up", str(len(junk)))
    word = torch.ones(1)
    gloo_group(store, "second", rank, 2, 10).allreduce([word]).wait()
    return word.item()


def test_a_partner_that_connects_too_late_crashes_nobody():
    """Of two Gloo processes the one with the smaller address listens."""
    assert processes(2, _connects_late, limit=patience(30)) == [2, 2]


def supervised(job, faults, cwd, *extra):
    """Training with faults, where a process that died is started again with --join. Returns the rows of
    metrics.jsonl."""
    world, argv = command(job, cwd, *extra)
    deaths, children, results = [], {}, {}
    end = time.monotonic() + patience(120)
    with store_host() as (port, pid), contextlib.ExitStack() as stack:
        def start(rank, argv):
            # a fault at step -1 is for the first process that joins
            mine = [f for f in faults if f[2] >= 0 or deaths.count(rank) == 1]
            results[rank], theirs = fork.Pipe()
            args = theirs, rank, world, port, True, str(cwd), _faulty, (world, None, argv, mine, pid)
            children[rank] = fork.Process(target=rank_process, args=args)
            children[rank].start()
            stack.callback(children[rank].kill)

        for rank in range(world):
            start(rank, argv)
        while children[0].is_alive():
            assert time.monotonic() < end, "did not finish"
            children[0].join(0.2)
            for rank, child in list(children.items()):
                if child.exitcode:
                    deaths.append(rank)
                    start(rank, [*argv, "--join"])
        # results: (whether train.main returned or exited, (its exit status, output))
        assert children[0].exitcode == 0 and results[0].recv()[1][0] == 0
    return metrics(cwd / "runs/x")


BACK = {    # faults of a pipeline's ranks, which all take part again in the end
    "joiner dies": ("pipeline", [(Fault.DIE_IN_BACKWARD, 3, 22), (Fault.DIE_IN_HAND_OVER, 3, -1)]),
    "twice": ("pipeline", [(Fault.DIE_IN_FORWARD, 1, 22), (Fault.PAUSE, 1, 60)]),
    "two at once": ("skip", [(Fault.DIE_IN_BACKWARD, 2, 22), (Fault.DIE_IN_FORWARD, 4, 22)]),
    "giver dies": ("wide", [(Fault.DIE_IN_BACKWARD, 3, 22), (Fault.DIE_IN_HAND_OVER, 2, 22)]),
    "nobody can give": ("thin, skip", [(Fault.DIE_IN_BACKWARD, 2, 22)]),
}


@pytest.mark.faults
@pytest.mark.parametrize("name", BACK)
def test_a_pipeline_takes_nodes_back(name, sound, corpus, tmp_path):
    job, faults = BACK[name]
    rows = supervised(job, faults, tmp_path, "--data", corpus, "--steps", 300, "--eval-every", 60)
    joined = [(row["rank"], row["given_by"]) for row in rows if row.get("event") == "joined"]
    assert {rank for rank, _ in joined} == {rank for _, rank, _ in faults}
    assert job == "thin, skip" or all(giver != rank for rank, giver in joined)
    assert rows[-1]["ranks"] == JOBS[job][0]
    assert rows[-1]["heldout_loss"] == pytest.approx(sound(job, "--steps", 300), rel=0.05)


def test_at_most_one_part_of_a_split_run_goes_on_and_of_two_hosts_the_one_with_the_store():
    for k, n in itertools.combinations_with_replacement(range(10), 2):
        assert not (enough(range(k), range(n), tie=True) and enough(range(k, n), range(n)))
    assert enough([0], [0, 1], tie=True) and not enough([1], [0, 1])
    # evaluations were answered by a, b and then c; the part without the store last read list b or c
    some = [ranks for n in range(1, 5) for ranks in itertools.combinations(range(4), n)]
    for a, b, c, here in itertools.product(some, repeat=4):
        others = {*range(4)}.difference(here)
        assert not (enough(here, c, b, tie=True) and (enough(others, c, b) or enough(others, b, a)))
