"""bench_sync.py: what it measures, its files and options. experiments/sync.py: messages with bytes."""

import json
import math
import platform
import subprocess

import pytest
import torch
import torch.distributed as dist

import bench_sync
import noloco
from experiments import sync
from tests.harness import captured, processes


@pytest.mark.parametrize("n", [4, 64])
def test_b5_the_bytes_of_an_all_reduce_and_of_a_pair(n):
    """Without spread each takes what its formula says."""
    latency, seconds = 0.5, 3.0
    k = int(math.log2(n))
    found = sync.synchronisations(n, 1e-9, torch.Generator(), 0, latency, seconds)
    got = {name: times.tolist() for name, times in found.items()}
    want = {
        "tree": 2 * k * (latency + seconds),
        "ring": 2 * (n - 1) * (latency + seconds / n),
        "halving and doubling": 2 * k * latency + 2 * (n - 1) / n * seconds,
        "pair, two exchanges (paper)": 2 * (latency + seconds),
        "pair, one exchange (NoLoCo here)": latency + seconds,
    }
    assert got == {name: pytest.approx([value, value], rel=1e-5) for name, value in want.items()}


def _all_reduce_by_hand(rounds, n):
    """One trial, rank by rank: rounds of (whom a rank hears, seconds of what each rank sends)."""
    clock = [0.0] * n
    for heard, seconds in rounds:
        clock = [max(clock[rank], clock[heard(rank)] + seconds[heard(rank)]) for rank in range(n)]
    return max(clock)


def test_an_all_reduce_waits_for_whom_a_rank_hears():
    n = 8
    drawn = torch.rand(6, n, generator=torch.Generator().manual_seed(0))
    distances = [4, 2, 1, 1, 2, 4]
    ranks = torch.arange(n)
    got = sync.all_reduce((ranks ^ distance, t[:, None]) for distance, t in zip(distances, drawn))
    by_hand = [(lambda rank, d=d: rank ^ d, t.tolist()) for d, t in zip(distances, drawn)]
    assert float(got) == pytest.approx(_all_reduce_by_hand(by_hand, n))


def test_b4_replica_by_replica_from_the_same_draws():
    """Each trial has partners of its own."""
    n, trials, outer_steps = 6, 3, 4
    got = bench_sync.training(n, (2, 5), (outer_steps,), trials, torch.Generator().manual_seed(3))
    generator = torch.Generator().manual_seed(3)
    everyone, clock = torch.zeros(2, trials), torch.zeros(2, n, trials)
    for _ in range(outer_steps):
        first = torch.randn((2, n, trials), generator=generator)
        more = torch.randn((3, n, trials), generator=generator)
        order = torch.rand((n, trials), generator=generator).argsort(0)
        short = (1 + first / 2**0.5).exp().sum(0)
        for i, S in enumerate([short, short + (1 + more / 2**0.5).exp().sum(0)]):
            everyone[i] += S.max(0).values
            before = clock[i].clone()
            for trial in range(trials):
                for pair in range(n // 2):
                    a, b = order[2 * pair, trial], order[2 * pair + 1, trial]
                    end = max(before[a, trial] + S[a, trial], before[b, trial] + S[b, trial])
                    # The simulation renumbers the replicas: they are alike.
                    clock[i, 2 * pair:2 * pair + 2, trial] = end
    assert torch.allclose(got["DiLoCo"][0].float(), everyone)
    assert torch.allclose(got["NoLoCo"][0].float(), clock.amax(1))


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
    expect = {"exchange of theta": theta, "NoLoCo": padded, "NoLoCo, one byte a weight": short,
              "all-reduce of theta": theta, "DiLoCo": padded}
    assert {name: row["bytes"] for name, row in rows.items()} == expect
    made = found["made"]
    assert made["command"] == "torchrun --nproc-per-node 2 bench_sync.py " + " ".join(argv)
    assert made["python"] == platform.python_version() and made["torch"] == torch.__version__
    assert made["cpu_hours"] > 0
    # Each outer step once to connect; then every row that sends messages, 1 + 2 times.
    for _, _, sent in results:
        assert sent == [padded, short] + 3 * [theta, padded, short]
    assert all(len(row["seconds"]) == 2 and min(row["seconds"]) > 0 for row in rows.values())
    assert all(f"| {name} | " in results[0][1] for name in rows)


def test_without_torchrun_and_simulate_there_is_nothing_to_do():
    with pytest.raises(SystemExit) as stop:
        bench_sync.main([])
    assert stop.value.code == 2


def test_a_file_of_results_names_its_commit(tmp_path, monkeypatch):
    """None outside a checkout; "-dirty" once anything but its results has changed."""
    here = tmp_path / "bench_sync.py"
    here.write_text("one")
    monkeypatch.setattr(bench_sync, "__file__", str(here))
    assert bench_sync.commit() is None
    git = lambda *words: subprocess.run(
        ["git", "-c", "user.name=n", "-c", "user.email=e", *words], cwd=tmp_path, check=True,
        capture_output=True, text=True).stdout.strip()
    git("init")
    results = tmp_path / "results/a.json"
    results.parent.mkdir()
    results.write_text("{}")
    git("add", here.name, "results/a.json")
    git("commit", "-m", "one")
    results.write_text("[]")
    assert git("rev-parse", "HEAD").startswith(bench_sync.commit())
    here.write_text("two")
    assert bench_sync.commit().endswith("-dirty")
    monkeypatch.setenv("PATH", "")
    assert bench_sync.commit() is None          # no git
