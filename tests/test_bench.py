"""bench_sync.py: simulated and measured reductions, and its options. experiments/sync.py."""

import json
import math
import sys

import pytest
import torch
import torch.distributed as dist

import bench_sync
import noloco
from experiments import pictures, sync
from plumbing.processes import BadInput
from tests.harness import captured, processes


@pytest.mark.parametrize("n", [4, 64])
def test_all_reduces_without_spread_equal_their_formulas(n):
    latency, seconds, k = 0.5, 3.0, int(math.log2(n))
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
    assert torch.allclose(two["DiLoCo"], two["NoLoCo"]) and torch.allclose(two["DiLoCo"], two["alone"])
    many = bench_sync.training(64, (1, 3), (5, 10), 4, torch.Generator().manual_seed(0))
    # a pair's delay goes on to its next partners
    assert bool((many["DiLoCo"] > many["NoLoCo"]).all() and (many["NoLoCo"] > many["alone"]).all())


def test_on_paper_by_hand():
    rows = sync.on_paper(6.8e9, 1024, 100, 0.05, 1.0)
    assert rows["NoLoCo"]["bytes"] == 27.2e9
    assert rows["NoLoCo"]["seconds"] == pytest.approx(0.05 + 27.2e9 / 12.5e6)
    assert rows["one byte"]["seconds"] == pytest.approx(0.05 + 6.8e9 / 12.5e6)
    assert rows["DiLoCo"]["bytes"] == pytest.approx(2 * 1023 / 1024 * 27.2e9)
    assert rows["DiLoCo"]["seconds"] == pytest.approx(20 * 0.05 + 4347.75, rel=1e-5)
    assert rows["DDP"]["share"] == pytest.approx(4348.75 / 4349.75) and rows["NoLoCo"]["memory"] == 28 * 6.8e9
    late = sync.on_paper(1.3e9, 1024, 100, 0.05, 1.0)["delayed"]            # 104.05 s
    assert late == dict(delay=105, left=pytest.approx(0.05 + 1.3e9 / 12.5e6 - 25), memory=30 * 1.3e9)
    assert sync.on_paper(125e6, 1024, 100, 0.05, 1.0)["delayed"]["left"] == 0


def _bench(rank, world, argv):
    """The measurement with all its rows: (exit status, what it printed, the bytes of every message sent)."""
    sent, post = [], noloco.dist.batch_isend_irecv

    def counted(ops):
        sent.append(sum(op.tensor.nbytes for op in ops if op.op is dist.isend))
        return post(ops)

    noloco.dist.batch_isend_irecv = counted
    measure = lambda argv: bench_sync.measure(bench_sync.parse(argv), sync.methods)
    return *captured(rank, world, measure, argv), sent


def test_measured_bytes_equal_the_counted_bytes(tmp_path):
    argv = ["--params", "100001", "--trials", "2", "--device", "cpu", "--out", str(tmp_path)]
    results = processes(2, _bench, argv)
    assert [code for code, *_ in results] == [0, 0], results
    found = json.loads((tmp_path / "results" / "sync_measured_2.json").read_text())
    theta, rows = found["bytes_of_theta"], found["rows"]
    assert 4 * 100001 <= theta < 4 * 100001 + 64 * 32  # 32 tensors, each padded to 64 bytes
    short = theta // 4 + 4 * 32         # and each tensor's s
    expect = {"exchange of theta": theta, "all-reduce of theta": theta, "DDP: gradient": theta,
              "DiLoCo": theta, "NoLoCo": theta, "NoLoCo, one byte a weight": short, "memcpy of theta": 0}
    expect |= {f"{name}, delayed{more}": sent for name, sent in expect.items() if "NoLoCo" in name
               for more in ("", ", plain averages")}
    assert {name: row["bytes"] for name, row in rows.items()} == expect
    # one round of every row that sends messages, in the order of the table, 1 + 2 times
    for _, _, sent in results:
        # exchange; NoLoCo; one byte; both delayed, with momentum and without
        assert sent == 3 * [theta, theta, short, theta, theta, short, short]
    assert all(len(row["seconds"]) == 2 and min(row["seconds"]) > 0 for row in rows.values())
    for name, row in rows.items():
        assert f"| {name} | " in results[0][1] and f"] | {row['bytes'] / 1e6:.0f} | " in results[0][1]


def test_pictures_without_matplotlib_name_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BadInput, match=r"\[plot\]"):
        pictures.picture(tmp_path, "sync_measured", None, [])
