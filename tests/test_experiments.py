"""What the experiments count with: the stability recursion, the clock of the headline results, losses."""

import itertools
import math
import subprocess
import sys

import pytest
import torch

import bench_sync
from noloco import gamma_bound, outer_update
from tests.harness import HERE, SMALL, metrics


@pytest.mark.parametrize("replicas, n", [(4, 2), (5, 2), (6, 3), (4, 4)])
def test_moment_recursion_equals_the_average_over_all_groupings(replicas, n):
    """One outer step of Eqs. 2 and 3 with Delta = -p phi, for every order that replicas can be drawn in."""
    alpha, beta, gamma, pull = 0.6, 0.8, 1.1, 0.3
    x, d = (
        v - v.mean()
        for v in torch.randn(2, replicas, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    )
    moments = lambda x, d: torch.stack([x @ x, x @ d, d @ d])
    total = torch.zeros(3, dtype=torch.float64)
    orders = list(itertools.permutations(range(replicas)))
    for order in orders:
        phi, delta = x + 7, d - 2  # what all share is no difference
        for g in (list(order[i :: replicas // n]) for i in range(replicas // n)):
            p, q = phi[g], delta[g]
            outer_update(p, q, -pull * p.mean(0), p.mean(0), alpha, beta, gamma)
            phi[g], delta[g] = p, q
        total += moments(phi - phi.mean(), delta - delta.mean()) / len(orders)
    matrix = bench_sync.moment_matrix(alpha, bench_sync.contraction(replicas, n), beta, gamma, pull)
    assert torch.allclose(matrix @ moments(x, d), total, rtol=1e-12)


def test_spectral_radius_crosses_one_exactly_at_the_bound():
    radius = lambda alpha, k, gamma, pull=0.0: float(
        torch.linalg.eigvals(bench_sync.moment_matrix(alpha, k, gamma, gamma, pull)).abs().max()
    )
    for alpha, n, pull in itertools.product((0.0, 0.5, 0.9), (2, 4, 16), (0.0, 0.3)):
        for k in (1 - 1 / n, bench_sync.contraction(16, n)):
            bound = bench_sync.exact_bound(alpha, k, pull)
            assert radius(alpha, k, 0.999 * bound, pull) < 1 < radius(alpha, k, 1.001 * bound, pull)
        assert radius(alpha, 1 - 1 / n, gamma_bound(alpha, n)) == pytest.approx(1, abs=1e-6)
        assert bench_sync.exact_bound(alpha, 1 - 1 / n) == pytest.approx(gamma_bound(alpha, n))
    # heavy ball: 2 (1 + alpha)
    assert bench_sync.exact_bound(0.5, bench_sync.contraction(16, 16)) == pytest.approx(3)


def test_all_reduce_seconds_by_hand():
    whole = [[0, 9, 2], [9, 0, 3], [2, 3, 0]]
    part = lambda by: [[x / by for x in row] for row in whole]
    # two rounds of 9 / 3; a ring: four of 3
    assert bench_sync.all_reduce_seconds([0, 1, 2], whole, part(3)) == 6
    # mostly latency: whole vectors, once
    assert bench_sync.all_reduce_seconds([0, 1, 2], whole, part(1.5)) == 9
    assert bench_sync.all_reduce_seconds([0, 2], whole, part(2)) == 2
    slow = [[400 if {i, j} == {0, 2} else 4 for j in range(4)] for i in range(4)]
    # the ring goes round the slow link
    assert bench_sync.all_reduce_seconds([0, 1, 2, 3], slow, [[x / 4 for x in row] for row in slow]) == 6


def test_hours_to_a_loss_on_straight_lines():
    found = dict(seconds={"x": (36.0, 360.0), "DDP, full pipeline": (36.0, 72.0)})
    run = dict(
        command="train.py --inner-steps 10",
        curves=dict(
            step=[10, 20, 30], heldout_loss=[3.0, 2.0, 1.0], weight_spread=[0.1, 0.2, 0.3], lr=[1, 2, 3]
        ),
    )
    assert bench_sync.clock(found, "x", run) == pytest.approx([0.2, 0.4, 0.6])
    assert bench_sync.clock(
        found, "x", run | dict(command="train.py --inner-steps 10 --warm-start 10")
    ) == pytest.approx([0.3, 0.5, 0.7])
    assert bench_sync.clock(
        found, "x", run | dict(command="train.py --inner-steps 10 --warm-start 15")
    ) == pytest.approx([0.3, 0.6, 0.8])
    assert bench_sync.reaches(found, "x", run, 1.5) == pytest.approx(0.5)
    assert bench_sync.reaches(found, "x", run, 0.9) is None


def test_losing_drops_what_visits_the_victim(corpus, tmp_path):
    """In every iteration one of the two replicas of stage 1 dies, and half of the 4 microbatches with it."""
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4",
            str(HERE / "bench_sync.py"), "--losing", "1", "--stages", "2,2", "--steps", "5",
            "--data", str(corpus), "--name", "x", *SMALL,
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    row = metrics(tmp_path / "runs/x")[-1]
    assert row["lost_microbatches"] == 5 * 2 and math.isfinite(row["heldout_loss"])
