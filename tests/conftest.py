"""Fixtures that several test files share."""

import json

import pytest
import torch

import train
from tests.harness import CPUS, LINKS, SMALL, run, write_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A folder of ten small text files."""
    return write_corpus(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def skip_run(corpus, tmp_path_factory):
    """Five ranks in three stages, two of which each microbatch visits, on a network from a file."""
    folder = tmp_path_factory.mktemp("skip")
    (folder / "links.json").write_text(json.dumps(LINKS))
    run(5, "--stages", "2,1,2", "--skip", 0.33, "--method", "local", "--links", "links.json",
        "--microbatches", 4, "--steps", 3, "--warmup", 2, "--data", corpus, "--name", "x", *SMALL,
        cwd=folder)
    return folder


@pytest.fixture
def trained(corpus, tmp_path):
    """A function that trains with these options and returns rank 0's output: a small run, tmp_path/runs/x."""
    def small_run(world, *argv, main=train.main):
        return run(world, "--data", corpus, "--name", "x", *SMALL, *argv, cwd=tmp_path, main=main)

    return small_run


@pytest.fixture
def gpu():
    """Asked only in pytest's own process: a fork of one that has asked could not use the GPU."""
    if not torch.cuda.is_available():
        pytest.skip("it needs a GPU")


@pytest.fixture(params=[CPUS, ("gloo", "cuda"), ("nccl", "cuda")], ids=str)
def place(request):
    """(backend, device) of a test's ranks. Where there is a GPU, they share it."""
    if request.param != CPUS:
        request.getfixturevalue("gpu")
    return request.param
