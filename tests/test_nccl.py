"""gossip/ and pipelines on one GPU, over NCCL and over Gloo, against what CPUs find.

Skipped without a GPU, but for two tests of the tests, so that this file cannot rot unseen. NCCL refuses two
ranks on one GPU of one host: each rank says that it is a host of its own (NCCL_HOSTID).
"""

import json
import math
import os
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist

import train
from gossip import outer_optimizer
from train import layout
from test_minimal import assert_replicas, inner, simulated, small_model
from tests.harness import LINKS, SMALL, metrics, processes, run
from tests.test_gossip import M, PLAIN, STEPS, flat, modulo, simulated_fragments


@pytest.fixture
def gpu():
    """Asked only in pytest's own process: a fork of one that has asked could not use the GPU."""
    if not torch.cuda.is_available():
        pytest.skip("it needs a GPU")


def host_of_its_own(rank):
    os.environ.update(NCCL_HOSTID=f"rank{rank}", NCCL_SOCKET_IFNAME="lo", LOCAL_RANK="0",
                      LOCAL_WORLD_SIZE="1")


def _outer(rank, world, backend, device, kind, settings, steps, late=None):
    """(weights, bytes sent) after so many steps of a small model on the device.

    late: a rank that comes late to each step.
    """
    host_of_its_own(rank)
    if device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group(backend)
    dist.barrier()
    model, xs, ys = small_model(rank)
    model = model.to(device)
    xs = xs.to(device)
    ys = ys.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    outer = kind(model.parameters(), **settings)
    for step in range(steps):
        inner(model, optimizer, xs[step], ys[step])
        if rank == late:
            time.sleep(0.02)
        outer.step()
    outer.settle()
    weights = [p.detach().cpu().numpy() for p in model.parameters()]
    dist.barrier()
    dist.destroy_process_group()
    return weights, outer.bytes_sent


WHOLE = [   # method, wire, settings, D
    ("diloco", "int8", dict(alpha=0.5), 2),
    ("diloco", "int8", dict(alpha=0.5), 0), ("diloco", "bf16", dict(alpha=0.5), 2),
    ("diloco", "fp32", PLAIN, 3), ("diloco", "fp32", dict(alpha=0.5), 0),
    ("noloco", "fp32", {}, 0), ("noloco", "fp32", {}, 2), ("noloco", "fp32", PLAIN, 3),
    ("noloco", "fp32", dict(gamma=1.0), 0), ("noloco", "fp32", dict(gamma=1.0), 2),
    ("noloco", "int8", {}, 0), ("noloco", "int8", {}, 2),
]


def assert_equal_to_a_simulation(backend, device, method, wire, settings, delay):
    """As tests/test_gossip.py's."""
    kind = partial(outer_optimizer, method, wire, delay)
    found = processes(4, _outer, backend, device, kind, dict(settings, inner_steps=M), STEPS)
    n = 4 if method == "diloco" else 2
    seen = dict(seen=modulo) if (method, wire) == ("noloco", "int8") else {}
    gamma = settings.get("gamma", settings.get("beta", 0.7))
    want = simulated(4, STEPS, M, n, delay=delay, **dict(settings, gamma=gamma), **seen)
    rounds = method == "diloco" and wire != "fp32"
    assert_replicas(found, want, atol=5e-4 if rounds else 2e-6)


def test_the_ranks_work_of_these_tests_on_a_cpu():
    assert_equal_to_a_simulation("gloo", "cpu", *WHOLE[0])


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@pytest.mark.parametrize("case", WHOLE, ids=str)
def test_any_combination_on_a_gpu_equals_a_float64_simulation(backend, case, gpu):
    assert_equal_to_a_simulation(backend, "cuda", *case)


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@pytest.mark.parametrize("method, settings, count, delay", [
    ("noloco", {}, 4, 0), ("noloco", {}, 4, 2), ("noloco", {}, 4, 4), ("noloco", dict(gamma=1.0), 3, 1),
    ("diloco", dict(alpha=0.5), 4, 0), ("diloco", dict(alpha=0.5), 4, 2)], ids=str)
def test_fragments_on_a_gpu_equal_a_float64_simulation(backend, method, settings, count, delay, gpu):
    m, steps = 4, 18
    n = 4 if method == "diloco" else 2
    kind = partial(outer_optimizer, method, "fp32", delay, fragments=count)
    found = processes(4, _outer, backend, "cuda", kind, dict(settings, inner_steps=m), steps)
    want = simulated_fragments(4, steps, m, n, count, delay, **settings)
    for (tensors, _), theta in zip(found, want, strict=True):
        assert torch.allclose(flat(tensors), theta, rtol=0, atol=2e-6)


@pytest.mark.parametrize("method, wire", [("noloco", "fp32"), ("noloco", "int8"), ("diloco", "int8")])
def test_a_slow_replica_on_a_gpu_changes_nothing(method, wire, gpu):
    """The others' messages queue up in the thread, behind kernels that wait for it."""
    kind = partial(outer_optimizer, method, wire, 4, fragments=4)
    found = processes(4, _outer, "nccl", "cuda", kind, dict(inner_steps=4), 18, 3)
    want = processes(4, _outer, "nccl", "cuda", kind, dict(inner_steps=4), 18)
    for (tensors, _), (wanted, _) in zip(found, want, strict=True):
        assert all((a == b).all() for a, b in zip(tensors, wanted, strict=True))


# ---------------- train.py


def _train(argv):
    """train.py where this rank is a host of its own."""
    host_of_its_own(os.environ["RANK"])
    train.main(argv)


def _train_on_cpus(argv):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    train.main(argv)


RUNS = {
    "delayed fragments": "--method noloco --inner-steps 4 --fragments 4 --delay 2",
    "phi ahead": "--method noloco --inner-steps 4 --gamma 0.5 --beta 0.7",
    "one byte, delayed": "--method noloco --inner-steps 4 --wire int8 --delay 2",
    "diloco in one byte, delayed": "--method diloco --inner-steps 4 --wire int8 --delay 2",
    "diloco in bf16, fragments": "--method diloco --inner-steps 4 --wire bf16 --fragments 2",
    "ddp in one byte": "--method ddp --wire int8",
    "muon": "--method noloco --inner-steps 4 --optimizer muon --fragments 4 --delay 2",
    "a pipeline": "--stages 2,2 --inner-steps 4 --fragments 2 --delay 1",
    "fixed routes": "--stages 1,2,1 --routing fixed --microbatches 4",
}


@pytest.mark.parametrize("name", RUNS)
def test_the_runs_are_such_as_train_takes(name):
    layout(train.parse([*SMALL, *RUNS[name].split()], 4), 4)


def trained_on(device, options, corpus, folder):
    """The last line of metrics.jsonl of 4 ranks that train so."""
    name = device
    argv = ["--data", corpus, "--name", name, *SMALL, "--steps", 12, "--warmup", 2, *options.split()]
    if device == "cuda":
        run(4, *argv, "--backend", "nccl", cwd=folder, main=_train)
    else:
        run(4, *argv, cwd=folder, main=_train_on_cpus)
    return metrics(folder / "runs" / name)[-1]


@pytest.mark.parametrize("name", RUNS)
def test_nccl_loses_what_gloo_loses(name, corpus, tmp_path, gpu):
    """Muon multiplies in bf16 on a GPU."""
    found = trained_on("cuda", RUNS[name], corpus, tmp_path)
    want = trained_on("cpu", RUNS[name], corpus, tmp_path)
    near = 2e-2 if name == "muon" else 1e-3
    assert found["heldout_loss"] == pytest.approx(want["heldout_loss"], abs=near)
    if want["merged_loss"] is not None:
        assert found["merged_loss"] == pytest.approx(want["merged_loss"], abs=near)
    assert found["sync_bytes"] == want["sync_bytes"] and found["pipeline_bytes"] == want["pipeline_bytes"]


@pytest.mark.parametrize("options", ["--method noloco --fragments 4", "--method diloco --wire int8"])
def test_on_a_gpu_a_run_goes_on_with_a_message_under_way(options, corpus, tmp_path, gpu):
    """Stopped at step 9, one step before what left at step 8 lands: as the run that is not stopped."""
    more = f"{options} --inner-steps 4 --delay 2 --save-every 9"
    want = trained_on("cuda", more, corpus, tmp_path)
    os.rename(tmp_path / "runs/cuda/checkpoints/00000012", tmp_path / "last")
    run(4, "--resume", tmp_path / "runs/cuda", cwd=tmp_path, main=_train)
    found = metrics(tmp_path / "runs/cuda")[-1]
    assert found["step"] == 12 and found["heldout_loss"] == pytest.approx(want["heldout_loss"], abs=1e-4)


@pytest.mark.parametrize("links", [True, False], ids=["given links", "measured links"])
def test_planned_paths_over_nccl(links, corpus, tmp_path, gpu):
    """They depend on times, so only that all ranks end, with a loss that falls."""
    argv = "--stages 2,1,2 --skip 0.33 --method local --microbatches 4 --steps 24 --warmup 2 --eval-every 8"
    if links:
        (tmp_path / "links.json").write_text(json.dumps(LINKS))
        argv += " --links links.json"
    run(5, "--data", corpus, "--name", "x", *SMALL, *argv.split(), "--backend",
        "nccl", cwd=tmp_path, main=_train)
    lines = metrics(tmp_path / "runs/x")
    first, last = lines[0], lines[-1]
    assert last["step"] == 24 and math.isfinite(last["heldout_loss"])
    assert last["heldout_loss"] < first["heldout_loss"]
