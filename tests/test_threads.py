"""Ranks that share a machine share its cores."""
import os

import pytest
import torch

from tests.harness import SMALL, processes, surviving_main, train_main

STEP = ["--steps", "1", "--warmup", "0", "--name", "x", *SMALL]


def threads_of(rank, world, argv, variable, main):
    """Threads after training, with OMP_NUM_THREADS as a torchrun for each rank has it."""
    os.environ.pop("OMP_NUM_THREADS")
    if variable:
        os.environ["OMP_NUM_THREADS"] = variable
    torch.set_num_threads(6)
    code, text = main(rank, world, argv)
    assert code == 0, text
    return torch.get_num_threads()


@pytest.mark.parametrize("world, variable, threads, main", [
    (2, "", 3, train_main), (2, "", 3, surviving_main), (2, "6", 6, train_main), (1, "", 6, train_main)])
def test_threads_are_shared_unless_somebody_set_them(world, variable, threads, main, corpus, tmp_path):
    argv = ["--data", corpus, *STEP]
    assert processes(world, threads_of, argv, variable, main, cwd=tmp_path) == [threads] * world
