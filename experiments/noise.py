"""How large noise keeps the differences between replicas: step 5 of docs/stability.md, measured.

    python -m experiments.noise [--steps N] [--out DIR] [--plot]

Each Delta has noise of variance s. In the steady state (`stationary`)

    V = beta^2 (1 - k) s / (2 r1 (1 - alpha) + 2 alpha r1^2 / (1 + alpha) - r2)

with k, r1 and r2 of experiments/stability.py. Theorem 1 of arXiv 2506.10911 says that the variance
between replicas grows as omega^2.
"""
import statistics

import torch
from tqdm import trange

from experiments.comparing import Table
from experiments.harness import Part, headline
from experiments.stability import REPLICAS, contraction, has_all_steps, rates

OMEGAS = torch.logspace(-3.4, -0.7, 10)
SCAN, SCAN_OMEGA = 0.15 * torch.arange(2, 10), 2e-3     # of gamma, at this omega
INNER, DIMS = 5, 64                                     # inner steps; of the quadratic
ALPHA, BETA = 0.5, 0.7
PAIR = 2
BURN_IN, STEPS = 2000, 8000                             # outer steps, or --steps


def stationary(alpha, k, beta, gamma, pull, noise):
    """V in the steady state, when noise of this variance comes with each Delta."""
    r, r2 = rates(k, beta, gamma, pull)
    return beta**2 * (1 - k) * noise / (2 * r * (1 - alpha) + 2 * alpha * r**2 / (1 + alpha) - r2)


def noisy_quadratic(omega, gamma, generator, steps):
    """{"spread": E V(phi - mean), "mean": E V(mean)} for each (omega, gamma), all driven by the
    same draws.

    Loss 1/2 (theta - c)^T A (theta - c), c ~ N(0, 1) fresh at every inner step and replica.
    """
    burn_in = min(BURN_IN, steps)
    A = curvature()[:, None]
    phi = torch.zeros(REPLICAS, DIMS, len(omega))
    delta = torch.zeros_like(phi)
    spread, mean_square = torch.zeros(len(omega)), torch.zeros(len(omega))
    for step in trange(burn_in + steps, desc="noise", dynamic_ncols=True):
        order = torch.randperm(REPLICAS, generator=generator)       # groups are neighbours
        phi, delta = phi[order], delta[order]
        theta = phi.clone()
        for _ in range(INNER):
            c = torch.randn((REPLICAS, DIMS, 1), generator=generator)
            theta.lerp_(c, omega * A)                               # theta - omega A (theta - c)
        shape = -1, PAIR, DIMS, len(omega)
        phis = phi.view(shape)
        deltas = delta.view(shape)
        thetas = theta.view(shape)
        mean = phis.mean(1, keepdim=True)
        learnt = thetas.mean(1, keepdim=True) - mean
        deltas.mul_(ALPHA).add_(learnt, alpha=BETA).sub_(gamma * (phis - mean))     # N2
        phi += delta                                                                # N3
        if step >= burn_in:
            spread += phi.var(0, correction=0).mean(0)
            mean_square += phi.mean(0).square().mean(0)
    return dict(spread=spread / steps, mean=mean_square / steps)


def curvature():
    """The diagonal of A."""
    return torch.logspace(-1, 1, DIMS, 2.0)


def expected(omega, gamma):
    """The same by `stationary`."""
    shrink = (1 - omega * curvature()[:, None]).double()
    pull = 1 - shrink**INNER
    noise = (omega * curvature()[:, None])**2 * (1 - shrink**(2 * INNER)) / (1 - shrink**2)
    k = contraction(REPLICAS, PAIR)
    apart = stationary(ALPHA, k, BETA, gamma, pull, noise * (1 - 1 / REPLICAS))
    together = stationary(ALPHA, 0, BETA, gamma, pull, noise / REPLICAS)
    return dict(spread_expected=apart.mean(0), mean_expected=together.mean(0))


def measure_noise(name, part, o):
    """Over omega at gamma = 0.7, and over gamma at one omega."""
    omega = torch.cat([OMEGAS, torch.full_like(SCAN, SCAN_OMEGA)])
    gamma = torch.cat([torch.full_like(OMEGAS, 0.7), SCAN])
    generator = torch.Generator().manual_seed(0)
    values = noisy_quadratic(omega, gamma, generator, o.steps or STEPS) | expected(omega, gamma)
    count = len(OMEGAS)
    noise = {key: value[:count].tolist() for key, value in values.items()}
    scan = {key: value[count:].tolist() for key, value in values.items() if "spread" in key}
    slopes = {key: slopes_of(OMEGAS, value[:count].double()) for key, value in values.items()}
    found = dict(noise=dict(m=INNER, omega=OMEGAS.tolist(), **noise, slopes=slopes),
                 scan=dict(omega=SCAN_OMEGA, gamma=SCAN.tolist(), **scan))
    if o.steps:
        found["steps"] = o.steps
    return found


def slopes_of(omega, values):
    """In logarithms: over the four smallest omega, and between the two largest."""
    x, y = omega.log().tolist(), values.log().tolist()
    return dict(small=statistics.linear_regression(x[:4], y[:4]).slope,
                largest=(y[-1] - y[-2]) / (x[-1] - x[-2]))


def show_noise(found):
    noise, scan = found["noise"], found["scan"]
    first, last = noise["m"] * noise["omega"][0], noise["m"] * noise["omega"][-1]
    table = Table(f"m omega = {first:.2g} to {last:.2g}", "slope in omega, smallest 4", "largest 2",
                  "off the closed form at most")
    for name, text in (("spread", "variance between replicas"), ("mean", "variance of their mean")):
        slopes = noise["slopes"][name]
        off = farthest_off(noise[name], noise[f"{name}_expected"])
        if name in scan:
            off = max(off, farthest_off(scan[name], scan[f"{name}_expected"]))
        table.add(text, f"{slopes['small']:.2f}", f"{slopes['largest']:.2f}", f"{off:.1%}")
    table.end()
    least = min(range(len(scan["gamma"])), key=lambda i: scan["spread"][i])
    print(f"omega {scan['omega']:g}: of gamma = {scan['gamma'][0]:.2f} to {scan['gamma'][-1]:.2f} "
          f"the spread is least at {scan['gamma'][least]:.2f}\n")


def farthest_off(values, expectations):
    return max(abs(value / expectation - 1) for value, expectation in zip(values, expectations))


PARTS = {"noise": Part(None, show_noise, measure=measure_noise, is_whole=has_all_steps)}

if __name__ == "__main__":
    headline(__doc__, PARTS)
