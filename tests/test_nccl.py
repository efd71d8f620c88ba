"""Runs of train.py on one GPU, over NCCL, against what CPUs find. (gossip/ there: tests/test_gossip.py.)

Skipped without a GPU, but for a test of the tests, so that this file cannot rot unseen.
"""

import json
import math
import os

import pytest

import train
from train import layout
from tests.harness import LINKS, SMALL, host_of_its_own, metrics, run


def _train(argv):
    """train.py where this rank is a host of its own."""
    host_of_its_own(os.environ["RANK"])
    train.main(argv)


def _train_on_cpu(argv):
    """train.py where no GPU can be seen."""
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
        run(4, *argv, cwd=folder, main=_train_on_cpu)
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
    run(5, "--data", corpus, "--name", "x", *SMALL, *argv.split(), "--backend", "nccl",
        cwd=tmp_path, main=_train)
    lines = metrics(tmp_path / "runs/x")
    first, last = lines[0], lines[-1]
    assert last["step"] == 24 and math.isfinite(last["heldout_loss"])
    assert last["heldout_loss"] < first["heldout_loss"]
