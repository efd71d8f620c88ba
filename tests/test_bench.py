"""bench_sync.py: simulated and measured reductions, and its options. experiments/sync.py."""

import json
import math

import pytest
import torch
import torch.distributed as dist

import bench_sync
import noloco
from experiments import sync
from tests.harness import captured, processes


@pytest.mark.parametrize("n", [4, 64])
def test_all_reduces_without_spread_equal_their_formulas(n):
    latency, seconds = 0.5, 3.0
    k = int(math.log2(n))
    samples = bench_sync.reductions(n, 0, latency, seconds, torch.Generator())
    got = {name: float(sample()[0]) for name, sample in samples.items()}
    assert got == pytest.approx({
        "tree": 2 * k * (latency + seconds),
        "ring": 2 * (n - 1) * (latency + seconds / n),
        "halving and doubling": 2 * k * latency + 2 * (n - 1) / n * seconds,
        "pair, two exchanges (paper)": 2 * (latency + seconds),
        "NoLoCo here, one exchange": latency + seconds,
    }, rel=1e-5)


def test_training_times_of_two_replicas_are_equal_and_more_replicas_gain():
    two = bench_sync.training(2, (1, 3), (5, 10), 4, torch.Generator().manual_seed(0))
    assert torch.allclose(two["DiLoCo"], two["NoLoCo"])
    assert torch.allclose(two["DiLoCo"], two["alone"])
    many = bench_sync.training(64, (1, 3), (5, 10), 4, torch.Generator().manual_seed(0))
    # a pair's delay goes on to its next partners
    assert bool((many["DiLoCo"] > many["NoLoCo"]).all() and (many["NoLoCo"] > many["alone"]).all())


def _bench(rank, world, argv):
    """The measurement with all its rows: (exit status, its output, the bytes of each message)."""
    sent = []
    post = noloco.dist.batch_isend_irecv

    def counted(ops):
        sent.append(sum(op.tensor.nbytes for op in ops if op.op is dist.isend))
        return post(ops)

    noloco.dist.batch_isend_irecv = counted
    measure = lambda argv: bench_sync.measure(bench_sync.parse(argv), sync.methods_and_one_byte)
    return *captured(rank, world, measure, argv), sent


def test_measured_bytes_equal_the_counted_bytes(tmp_path):
    argv = ["--params", "100001", "--trials", "2", "--device", "cpu", "--out", str(tmp_path)]
    results = processes(2, _bench, argv)
    assert [code for code, *_ in results] == [0, 0], results
    found = json.loads((tmp_path / "results" / "sync_measured_2.json").read_text())
    theta, rows = found["bytes_of_theta"], found["rows"]
    assert theta == 4 * 100001
    padded = 4 * 100016                 # to 64 bytes
    short = padded // 4 + 4             # and the tensor's s
    expect = {"memcpy of theta": 0, "exchange of theta": theta, "NoLoCo": padded,
              "NoLoCo, one byte a weight": short, "all-reduce of theta": theta, "DiLoCo": padded}
    assert {name: row["bytes"] for name, row in rows.items()} == expect
    assert [row["floor"] for row in rows.values()] == [None, *rows][:-1]
    # Each outer step once to connect; then every row that sends messages, 1 + 2 times.
    for _, _, sent in results:
        assert sent == [padded, short] + 3 * [theta, padded, short]
    assert all(len(row["seconds"]) == 2 and min(row["seconds"]) > 0 for row in rows.values())
    assert all(f"| {name} | " in results[0][1] for name in rows)


def test_without_torchrun_and_simulate_there_is_nothing_to_do():
    with pytest.raises(SystemExit) as stop:
        bench_sync.main([])
    assert stop.value.code == 2
