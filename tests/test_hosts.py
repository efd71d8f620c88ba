"""Training between hosts: four network namespaces with links of their own (needs root and iproute2)."""

import contextlib
import io
import json
import os
import threading
import time

import pytest
import torch
import torch.distributed as dist

from survive.meeting import Gone
from survive.outer import SurvivingNoLoCo
from tests.harness import SMALL, checkpoint, metrics, processes, run, train_main
from tools.hosts import Hosts, enter

COMMON = ["--inner-steps", 5, "--lr", 3e-3, "--warmup", 5, "--eval-every", 20, "--save-every", 20,
          "--name", "x", *SMALL, "--layers", 1]


@pytest.fixture(scope="module")
def hosts():
    try:
        four = Hosts(4)
    except OSError as error:                        # CI is a place that has both: there it must run
        (pytest.fail if os.environ.get("CI") else pytest.skip)(str(error))
    with four:
        yield four


def be_on_host(rank, networks, environment, only=None):
    """As torchrun on node `rank` of a static rendezvous starts its one worker. only: the rank with this
    environment."""
    enter(networks[rank])
    environment = environment if only in (None, rank) else {}
    os.environ.update(MASTER_ADDR="10.77.0.1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", **environment)


def _on_host(rank, world, networks, argv, environment, only=None):
    be_on_host(rank, networks, environment, only)
    return train_main(rank, world, argv)


def _alone_together(rank, world, networks, argv, environment):
    """Two replicas that reach the store, but offer each other loopback: what they say in six outer steps."""
    be_on_host(rank, networks, environment)
    (store, *_), text = next(iter(dist.rendezvous("env://"))), io.StringIO()
    outer = SurvivingNoLoCo([torch.nn.Parameter(torch.ones(4))], inner_steps=1, store=store, timeout=0.5)
    with contextlib.redirect_stderr(text), contextlib.suppress(Gone):       # rank 0 may have had enough
        for _ in range(6):
            outer.step()
    store.set(f"ended/{rank}", "=")
    store.wait([f"ended/{r}" for r in range(world)])
    store.set(f"left/{rank}", "=")
    if rank == 0:                                               # it hosts the store, and leaves last
        store.wait([f"left/{r}" for r in range(world)])
    return outer.alone, text.getvalue()


def train_on(hosts, *argv, cwd, during=None, fallen=(), **environment):
    """Train with one rank on each host; `during` runs beside it. [(exit status, output)]"""
    argv = [str(a) for a in [*COMMON, *argv]]
    beside = threading.Thread(target=during or (lambda: None), daemon=True)
    beside.start()
    try:
        return processes(4, _on_host, hosts.networks, argv, environment, cwd=cwd, fallen=fallen)
    finally:
        for host in range(4):
            hosts.cut([host], 0)


def wait_until(condition, limit=60):
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)        # between two looks


def rows_of(folder):
    """What is in metrics.jsonl by now."""
    with contextlib.suppress(OSError, ValueError):
        return metrics(folder / "runs/x")
    return []


def assert_same(folder, other, step):
    for rank in range(4):
        a, b = (checkpoint(place / "runs/x", step, rank)["theta"] for place in (folder, other))
        assert torch.equal(a, b)


@pytest.fixture(scope="module")
def one_machine(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    run(4, *COMMON, "--steps", 40, "--gamma", 0.9, "--data", corpus, cwd=folder)
    return folder


@pytest.mark.parametrize("environment", [{}, dict(GLOO_SOCKET_IFNAME="e0")], ids=["unset", "set"])
@pytest.mark.parametrize("survive", [0, 30], ids=["plain", "survive"])
def test_noloco_between_hosts_equals_one_machine(environment, survive, hosts, one_machine, corpus, tmp_path):
    argv = ["--steps", 40, "--gamma", 0.9, "--survive", survive, "--data", corpus]
    results = train_on(hosts, *argv, cwd=tmp_path, **environment)
    assert [code for code, _ in results] == [0] * 4, results
    assert_same(tmp_path, one_machine, 40)
    rows = metrics(tmp_path / "runs/x")
    assert not [row for row in rows if "event" in row] and rows[-1]["steps_alone"] == 0
    assert rows[-1]["sync_bytes"] > 0


@pytest.mark.parametrize("method", ["ddp", "diloco"])
def test_collectives_between_hosts(method, hosts, corpus, tmp_path):
    more = ["--inner-steps", 5] if method == "diloco" else []
    argv = [*COMMON[2:], *more, "--method", method, "--steps", 20, "--data", corpus]
    results = processes(4, _on_host, hosts.networks, [str(a) for a in argv], {}, cwd=tmp_path)
    assert [code for code, _ in results] == [0] * 4, results
    thetas = [checkpoint(tmp_path / "runs/x", 20, rank)["theta"] for rank in range(4)]
    assert all(torch.equal(theta, thetas[0]) for theta in thetas)


@pytest.mark.parametrize("survive", [0, 30], ids=["plain", "survive"])
@pytest.mark.parametrize("paths", ["pipeline", "skip"])
def test_pipelines_between_hosts_equal_one_machine(paths, survive, hosts, corpus, tmp_path):
    stages = ["2,2"] if paths == "pipeline" else ["2,1,1", "--skip", 0.33, "--microbatches", 4, "--links",
                                                  "links.json"]
    argv = ["--stages", *stages, "--layers", 3, "--steps", 20, "--survive", survive, "--data", corpus]
    for name in ("here", "between"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "links.json").write_text(json.dumps(dict(delay=[[0.01] * 4] * 4, compute=0.01)))
    run(4, *COMMON, *argv, cwd=tmp_path / "here")
    results = train_on(hosts, *argv, cwd=tmp_path / "between")
    assert [code for code, _ in results] == [0] * 4, results
    assert_same(tmp_path / "between", tmp_path / "here", 20)


def test_a_loopback_interface_is_refused_between_hosts(hosts, corpus, tmp_path):
    results = train_on(hosts, "--steps", 5, "--data", corpus, cwd=tmp_path, GLOO_SOCKET_IFNAME="lo")
    assert [code for code, _ in results] == [2] * 4
    assert results[0][1].count("\n") == 1 and "export GLOO_SOCKET_IFNAME=NAME" in results[0][1]
    assert not any(text for _, text in results[1:])


def test_an_interface_that_one_host_lacks_is_refused(hosts, corpus, tmp_path):
    argv = [str(a) for a in [*COMMON, "--steps", 5, "--data", corpus]]
    environment = dict(GLOO_SOCKET_IFNAME="nosuch0")
    results = processes(4, _on_host, hosts.networks, argv, environment, 1, cwd=tmp_path)
    assert [code for code, _ in results] == [2] * 4
    assert results[0][1] == "error: GLOO_SOCKET_IFNAME=nosuch0: a host has no nosuch0, only lo, e0\n"


def test_replicas_that_never_reach_each_other_say_so(hosts, tmp_path):
    results = processes(2, _alone_together, hosts.networks, [], dict(GLOO_SOCKET_IFNAME="lo"), cwd=tmp_path)
    for rank, (alone, text) in enumerate(results):
        assert alone >= 3
        assert text.startswith(f"rank {rank}: three outer steps in a row without partners although they are")
        assert f"(ranks [{1 - rank}])" in text and "Gloo uses lo here" in text


def missed(folder, rank):
    """Whether another rank has waited for this one in vain."""
    return any(rank in row.get("missing", ()) and row["rank"] != rank for row in rows_of(folder))


def test_one_stage_goes_on_while_a_link_is_cut_and_takes_the_host_back(hosts, corpus, tmp_path):
    def during():
        wait_until(lambda: rows_of(tmp_path))
        hosts.cut([3])
        wait_until(lambda: missed(tmp_path, 3))         # told at an evaluation
        hosts.cut([3], 0)

    # evaluated often, so that the cut is short: TCP, which backs off, is to see the link again before the end
    argv = ["--steps", 600, "--eval-every", 5, "--survive", 3, "--data", corpus]
    results = train_on(hosts, *argv, cwd=tmp_path, during=during)
    assert [code for code, _ in results] == [0] * 4, results
    rows = metrics(tmp_path / "runs/x")
    assert rows[-1]["step"] == 600 and rows[-1]["ranks"] == 4
    assert "outer steps that a replica did without any partner" in results[0][1]
    # the others miss the absent one, once each, in outer steps begun before that was known, never each other
    lost = [row for row in rows if row.get("missing") and row["rank"] != 3]
    assert all(row["missing"] == [3] for row in lost)
    assert 1 <= len(lost) == len({row["outer"] for row in lost}) == len({row["rank"] for row in lost})


def test_one_stage_finishes_when_a_link_is_cut_for_good(hosts, corpus, tmp_path):
    def during():
        wait_until(lambda: rows_of(tmp_path))
        hosts.cut([3])

    argv = ["--steps", 60, "--survive", 2, "--data", corpus]
    results = train_on(hosts, *argv, cwd=tmp_path, during=during, fallen=[3])
    assert [result and result[0] for result in results][:3] == [0] * 3
    assert metrics(tmp_path / "runs/x")[-1]["ranks"] == 3


@pytest.mark.parametrize("seconds, steps, survive, n", [(1.5, 60, 9, 4), (4, 600, 3, 4), (None, 60, 2, 3)],
                         ids=["restored", "taken back", "for good"])
def test_a_pipeline_finishes_when_a_link_is_cut(seconds, steps, survive, n, hosts, corpus, tmp_path):
    def during():
        wait_until(lambda: rows_of(tmp_path))
        hosts.cut([3])
        if seconds:
            time.sleep(seconds)         # the fault itself, at first shorter than a third of --survive
            hosts.cut([3], 0)

    argv = ["--stages", "2,2", "--layers", 2, "--steps", steps, "--survive", survive, "--data", corpus]
    results = train_on(hosts, *argv, cwd=tmp_path, during=during, fallen=[] if seconds else [3])
    assert [result[0] for result in results if result][:n] == [0] * n
    rows = metrics(tmp_path / "runs/x")
    assert rows[-1]["step"] == steps and rows[-1]["ranks"] == n
    assert [row["rank"] for row in rows if row.get("event") == "joined"] == [3] * (seconds == 4)


@pytest.mark.parametrize("stages", ["4", "2,2"])
def test_node_0_cut_off_stops_everyone_with_one_line_and_a_checkpoint(stages, hosts, corpus, tmp_path):
    def during():
        wait_until(lambda: rows_of(tmp_path))
        hosts.cut([0])

    argv = ["--stages", stages, "--layers", 2, "--steps", 100000, "--survive", 0.8, "--data", corpus]
    results = train_on(hosts, *argv, cwd=tmp_path, during=during)
    for rank, (code, _) in enumerate(results):
        assert str(code).startswith(f"stopped: rank {rank} at step ") and code.endswith("--resume runs/x")
        step = int(code.split("step ")[1].split(":")[0])
        assert checkpoint(tmp_path / "runs/x", step, rank)["step"] == step
        why = code.split(": ", 2)[2]
        alone = ("no other replica", "every replica of stage 1", "every other rank")
        others = ("the store on node 0", "rank 0 is gone", "every replica of stage 0")
        assert why.startswith(others if rank else alone), code
