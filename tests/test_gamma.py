"""The algebra of docs/stability.md's proof, and gossip/window.py and experiments/gamma.py beside it."""

import itertools
import math

import pytest
import torch

from experiments import gamma
from gossip.window import gamma_bound
from noloco import outer_update

# ---------------------------------------------------------------- the proof, step by step


def contraction(replicas, n):
    """k of step 1."""
    return (replicas - max(1, replicas // n)) / (replicas - 1)


def rates(k, beta, pull_together, pull):
    """(r1, r2) of step 2."""
    return (k * pull_together + (1 - k) * beta * pull,
            k * pull_together**2 + (1 - k) * (beta * pull) ** 2)


def moment_matrix(alpha, k, beta, pull_together, pull=0.0):
    """Step 3's map of (V, C, D) over one outer step."""
    r1, r2 = rates(k, beta, pull_together, pull)
    V, C, D = torch.tensor([[1.0, 0.0, 0.0],
                            [-r1, alpha, 0.0],                              # of x d'
                            [r2, -2 * alpha * r1, alpha**2]], dtype=torch.float64)
    return torch.stack([V + 2 * C + D, C + D, D])


def bound(alpha, k, pull=0.0):
    """Step 4's: the gamma = beta at which M has eigenvalue 1."""
    r1, r2 = rates(k, 1.0, 1.0, pull)
    return 2 * (1 - alpha**2) * r1 / ((1 + alpha) * r2 - 2 * alpha * r1**2)


def radius(*settings):
    return float(torch.linalg.eigvals(moment_matrix(*settings)).abs().max())


@pytest.mark.parametrize("replicas, n", [(4, 2), (5, 2), (6, 3), (4, 4)])
def test_moment_recursion_equals_the_average_over_all_groupings(replicas, n):
    """One outer step of N2 and N3 with Delta = -p phi, for every order that replicas can be drawn
    in."""
    alpha, beta, pull_together, pull = 0.6, 0.8, 1.1, 0.3
    draw = torch.randn(2, replicas, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    x, d = draw - draw.mean(1, keepdim=True)
    moments = lambda x, d: torch.stack([x @ x, x @ d, d @ d])
    total = torch.zeros(3, dtype=torch.float64)
    for order in itertools.permutations(range(replicas)):
        phi, delta = x + 7, d - 2  # what all share is no difference
        for g in (list(order[i :: replicas // n]) for i in range(replicas // n)):
            p, q = phi[g], delta[g]
            outer_update(p, q, (1 - pull) * p.mean(0), p.mean(0), alpha, beta, pull_together)
            phi[g], delta[g] = p, q
        total += moments(phi - phi.mean(), delta - delta.mean()) / math.factorial(replicas)
    matrix = moment_matrix(alpha, contraction(replicas, n), beta, pull_together, pull)
    assert torch.allclose(matrix @ moments(x, d), total, rtol=1e-12)


def test_spectral_radius_crosses_one_exactly_at_the_bound():
    for alpha, n, pull in itertools.product((0.0, 0.5, 0.9), (2, 4, 16), (0.0, 0.3)):
        for k in (1 - 1 / n, contraction(16, n)):
            at = bound(alpha, k, pull)
            low, high = 0.999 * at, 1.001 * at
            assert radius(alpha, k, low, low, pull) < 1 < radius(alpha, k, high, high, pull)
            assert at >= bound(alpha, k)            # gamma = beta: a pull widens the window
        assert bound(alpha, 1 - 1 / n) == pytest.approx(gamma_bound(alpha, n))
        for count in (2, 3, 4, 5, 16, 17):
            if n <= count:
                exact = bound(alpha, contraction(count, n))
                assert gamma_bound(alpha, n, count) == pytest.approx(exact)
    assert gamma_bound(0.9, 2) > 0.1 and radius(0.9, 0.5, 0.7, 0.1, 1.0) > 1    # another beta, full pull
    # heavy ball: 2 (1 + alpha); one replica has nothing to hold together
    assert bound(0.5, contraction(16, 16)) == pytest.approx(3)
    assert gamma_bound(0.5, 2, 1) == gamma_bound(0.5, 2, 2) == pytest.approx(3)


# ---------------------------------------------------------------- the simulation


@pytest.mark.parametrize("n, pull", [(2, 0.0), (2, 0.3), (4, 0.0)])
def test_simulated_differences_grow_as_the_moments_do(n, pull):
    """The root mean square of a difference grows by the root of the spectral radius per step."""
    found = gamma.growth(gamma.HALF, n, pull, torch.Generator().manual_seed(0), 80)[0]
    k = contraction(gamma.REPLICAS, n)
    want = [math.log(radius(0.5, k, g, g, pull)) / 2 for g in gamma.GAMMAS.tolist()]
    assert found.tolist() == pytest.approx(want, abs=0.03)
    assert gamma.limit(found) == pytest.approx(bound(0.5, k, pull), abs=0.05)
