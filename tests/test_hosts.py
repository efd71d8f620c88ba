"""Training between hosts: eight network namespaces with links of their own (needs root and iproute2)."""

import contextlib
import functools
import io
import itertools
import json
import math
import os
import re
import shutil
import signal
import threading
from pathlib import Path

import pytest
import torch

from train import Job
from survive.outer import SurvivingNoLoCo
from tests.harness import (SMALL, assert_same, checkpoint, metrics, patience, processes, run, surviving_main,
                           train_main, wait_until)
from tools.hosts import Hosts, enter

COMMON = ["--lr", 3e-3, "--warmup", 5, "--eval-every", 20, "--save-every", 20, "--name", "x", *SMALL]
JOBS = {    # each in 20 steps
    "noloco": ["--inner-steps", 5, "--gamma", 0.9], "diloco": ["--method", "diloco", "--inner-steps", 5],
    "ddp": ["--method", "ddp"], "pipeline": ["--stages", "2,2", "--inner-steps", 5],
    "skip": ["--stages", "2,1,1", "--inner-steps", 5, "--skip", 0.33, "--microbatches", 4,
             "--links", "links.json"],
}


@pytest.fixture(scope="module")
def hosts():
    try:
        eight = Hosts(8)
    except OSError as error:                        # CI is a place that has both: there it must run
        (pytest.fail if os.environ.get("CI") else pytest.skip)(str(error))
    with eight:
        yield eight


def be_on_host(rank, networks, environment, only=None):
    """As torchrun on node `rank` of a static rendezvous starts its one worker. only: the rank with this
    environment."""
    enter(networks[rank])
    environment = environment if only in (None, rank) else {}
    os.environ.update(MASTER_ADDR="10.77.0.1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", **environment)


def _on_host(rank, world, networks, argv, environment, only=None):
    be_on_host(rank, networks, environment, only)
    Path(f"pid{rank}").write_text(str(os.getpid()))
    main = surviving_main if "--survive" in argv else train_main
    return main(rank, world, argv)


def _alone_together(rank, world, networks, seconds, environment):
    """Two replicas that reach the store, but offer each other loopback: what they say in six outer steps."""
    be_on_host(rank, networks, environment)
    job, text = Job(), io.StringIO()
    outer = SurvivingNoLoCo([torch.nn.Parameter(torch.ones(4))], inner_steps=1, store=job.store,
                            timeout=seconds)
    with contextlib.redirect_stderr(text):
        for _ in range(6):
            outer.step()
    job.share()
    job.close()
    return outer.alone, text.getvalue()


def train_on(hosts, *argv, cwd, during=None, fallen=(), only=None, world=4, **environment):
    """Train with one rank on each host: [(exit status, output)].

    during: a function that runs beside it, from the first evaluation on.
    """
    def beside():
        wait_until(lambda: rows_of(cwd))
        during()

    if during:
        threading.Thread(target=beside, daemon=True).start()
    try:
        return processes(world, _on_host, hosts.networks, [*COMMON, *argv], environment, only, cwd=cwd,
                         fallen=fallen)
    finally:
        hosts.mbit, hosts.free, hosts.silent = {(): 200}, {}, [0.0] * 8


def rows_of(folder):
    """What is in metrics.jsonl by now."""
    with contextlib.suppress(OSError, ValueError):
        return metrics(folder / "runs/x")
    return []


@pytest.fixture(scope="module")
def here(corpus, tmp_path_factory):
    """A folder with this job's run on one machine, run once."""

    @functools.cache
    def folder(job):
        place = tmp_path_factory.mktemp(job)
        (place / "links.json").write_text(json.dumps(dict(delay=[[0.01] * 4] * 4, compute=0.01)))
        run(4, *COMMON, *JOBS[job], "--steps", 20, "--data", corpus, cwd=place)
        return place

    return folder


@pytest.mark.parametrize("job, survive, environment", [
    ("noloco", ["--survive", 30], dict(GLOO_SOCKET_IFNAME="e0")), ("skip", [], {}),
    *(pytest.param(*other, marks=pytest.mark.faults) for other in (
        ("noloco", [], {}), ("noloco", [], dict(GLOO_SOCKET_IFNAME="e0")), ("noloco", ["--survive", 30], {}),
        ("skip", ["--survive", 30], {}), ("pipeline", [], {}), ("pipeline", ["--survive", 30], {}),
        ("diloco", [], {}), ("ddp", [], {}))),
], ids=str)
def test_training_between_hosts_equals_one_machine(job, survive, environment, hosts, here, corpus, tmp_path):
    shutil.copy(here(job) / "links.json", tmp_path)
    argv = [*JOBS[job], "--steps", 20, *survive, "--data", corpus]
    results = train_on(hosts, *argv, cwd=tmp_path, **environment)
    assert [code for code, _ in results] == [0] * 4, results
    assert_same(tmp_path / "runs/x", here(job) / "runs/x", 20)
    rows = metrics(tmp_path / "runs/x")
    assert not [row for row in rows if "event" in row] and not rows[-1].get("steps_alone")
    assert rows[-1]["sync_bytes"] > 0


@pytest.mark.parametrize("interface, only, error", [
    ("lo", None, "export GLOO_SOCKET_IFNAME=NAME"),
    ("nosuch0", 1, "error: rank 1: GLOO_SOCKET_IFNAME=nosuch0: a host has only lo, e0\n"),
])
def test_an_interface_that_does_not_serve_is_refused(interface, only, error, hosts, corpus, tmp_path):
    argv = ["--inner-steps", 5, "--steps", 5, "--data", corpus]
    results = train_on(hosts, *argv, cwd=tmp_path, only=only, GLOO_SOCKET_IFNAME=interface)
    text = "".join(text for _, text in results)
    assert [code for code, _ in results] == [2] * 4 and text.count("\n") == 1 and error in text


def test_replicas_that_never_reach_each_other_say_so(hosts, tmp_path):
    interface = dict(GLOO_SOCKET_IFNAME="lo")
    results = processes(2, _alone_together, hosts.networks, patience(0.5), interface, cwd=tmp_path)
    for rank, (alone, text) in enumerate(results):
        assert alone >= 3
        assert f"rank {rank}: three outer steps in a row without partners although they are" in text
        assert f"(ranks [{1 - rank}])" in text and "Gloo uses lo here" in text


@pytest.mark.faults
@pytest.mark.parametrize("stages", ["4", "2,2"])
def test_training_goes_on_while_a_link_is_cut_and_takes_the_host_back(stages, hosts, corpus, tmp_path):
    def during():
        hosts.cut(3)
        # told at an evaluation: another rank has waited in vain
        wait_until(lambda: any(3 in row.get("missing", ()) and row["rank"] != 3 or row.get("event") == "dead"
                               for row in rows_of(tmp_path)))
        hosts.cut(3, 0)
        wait_until(lambda: [row["ranks"] for row in rows_of(tmp_path) if "ranks" in row][-5:] == [4] * 5)
        for rank in range(4):
            os.kill(int((tmp_path / f"pid{rank}").read_text()), signal.SIGINT)

    # evaluated often, so that the cut is short: TCP, which backs off, then soon sees the link again
    argv = ["--stages", stages, "--layers", 2, "--inner-steps", 5, "--steps", 100000, "--eval-every", 5]
    argv += ["--survive", patience(3), "--data", corpus]
    results = train_on(hosts, *argv, cwd=tmp_path, during=during)
    assert [code for code, _ in results] == [130] * 4, results
    rows = metrics(tmp_path / "runs/x")
    assert [row["rank"] for row in rows if row.get("event") == "joined"] == ([] if stages == "4" else [3])
    # the others miss the absent one, once each, in outer steps begun before that was known, never each other
    lost = [row for row in rows if row.get("missing") and row["rank"] != 3]
    assert all(row["missing"] == [3] for row in lost)
    assert lost or stages != "4"
    assert len({row["outer"] for row in lost}) == len(lost) == len({row["rank"] for row in lost})


@pytest.mark.faults
@pytest.mark.parametrize("stages, seconds", [("4", math.inf), ("2,2", math.inf), ("2,2", 1)],
                         ids=["one stage", "for good", "restored"])
def test_a_run_finishes_when_a_link_is_cut(stages, seconds, hosts, corpus, tmp_path):
    """For good, or for less than a third of --survive (with the wait of TCP's next try)."""
    survive, fallen, n = (patience(9), [], 4) if seconds == 1 else (patience(2), [3], 3)
    argv = ["--stages", stages, "--layers", 2, "--inner-steps", 5, "--steps", 60, "--survive", survive]
    results = train_on(hosts, *argv, "--data", corpus, cwd=tmp_path, fallen=fallen,
                       during=lambda: hosts.cut(3, seconds))
    assert [result[0] for result in results if result][:n] == [0] * n
    rows, said = metrics(tmp_path / "runs/x"), results[0][1]
    assert rows[-1]["step"] == 60 and rows[-1]["ranks"] == n
    assert not [row for row in rows if row.get("event") == "joined"]
    assert stages != "4" or "outer steps that a replica did without any partner" in said


@pytest.mark.parametrize("stages, few", [
    ("8", {0, 1, 2}), ("8", {4, 5, 6, 7}), ("4,4", {0, 1, 4})], ids=str)
@pytest.mark.faults
def test_of_two_parts_one_goes_on(stages, few, hosts, corpus, tmp_path):
    """Five of eight hosts train on without node 0 and its store; of two halves the one with the store."""
    between = {}
    for one, other in itertools.combinations(range(8), 2):
        if (one in few) != (other in few):
            between[one, other] = 1e-9
    argv = ["--stages", stages, "--layers", 2, "--inner-steps", 5, "--steps", 400, "--survive", patience(0.8)]
    results = train_on(hosts, *argv, "--data", corpus, cwd=tmp_path, world=8,
                       during=lambda: hosts.mbit.update(between))
    for rank, (code, _) in enumerate(results):
        line = rf"stopped: rank {rank} at step (\d+): .*(too few|standby).*; go on with --resume runs/x"
        stopped = re.fullmatch(line, str(code))
        assert stopped if rank in few else code == 0, results
        step = int(stopped[1]) if stopped else 400
        assert checkpoint(tmp_path / "runs/x", step, rank)["step"] == step
