"""plumbing/processor.py: ranks that share a machine."""
import os

import pytest
import torch

from plumbing import processor
from plumbing.processor import cores
from tests.harness import SMALL, processes, train_main

STEP = ["--steps", "1", "--warmup", "0", "--name", "x", *SMALL]


def threads_of(rank, world, argv, variable):
    """(threads after training, what it printed), with OMP_NUM_THREADS as a torchrun for each rank
    has it.

    Each rank is the first of its node.
    """
    os.environ.pop("OMP_NUM_THREADS")
    if variable:
        os.environ["OMP_NUM_THREADS"] = variable
    os.environ["LOCAL_RANK"] = "0"
    torch.set_num_threads(3)
    code, text = train_main(rank, world, argv)
    assert code == 0, text
    return torch.get_num_threads(), text


@pytest.mark.parametrize("how", [["--inner-steps", "1"], ["--survive", "30"]])
def test_ranks_of_one_machine_share_its_cores(how, corpus, tmp_path):
    argv = ["--data", corpus, *how, *STEP]
    share = min(3, max(1, cores() // 2))
    line = (f"2 ranks share this machine's {cores()} cores: torch uses "
            f"OMP_NUM_THREADS={share} in each,")
    for threads, text in processes(2, threads_of, argv, "", cwd=tmp_path):
        assert threads == share and text.count(line) == 1


def test_a_variable_that_is_set_and_a_single_process_keep_torchs_threads(corpus, tmp_path):
    argv = ["--data", corpus, *STEP]
    for world, variable in ((2, "3"), (1, "")):
        folder = tmp_path / str(world)
        folder.mkdir()
        for threads, text in processes(world, threads_of, argv, variable, cwd=folder):
            assert threads == 3 and "OMP_NUM_THREADS" not in text


def test_cores_are_those_of_a_machine_not_of_a_network(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "")           # so that pytest puts it back
    monkeypatch.setattr(processor, "cores", lambda: 6)
    before = torch.get_num_threads()
    try:
        for rank, threads in ((0, 2), (3, 8)):          # three share a machine, the fourth is alone
            os.environ.pop("OMP_NUM_THREADS", None)
            torch.set_num_threads(8)
            processor.share_cores("aaab"[rank], ["a", "a", "a", "b"])
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
