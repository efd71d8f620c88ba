"""Where replicas stay together: Eqs. 2 and 3 on the quadratic loss, the exact theory of gamma beside
simulations.

    python -m experiments.stability [--seed 0] [--out DIR] [--plot]

m inner steps on 1/2 lambda theta^2 give Delta = -p phi, p = 1 - (1 - omega lambda)^m (`pull`). N
replicas in G groups of n; x and d are what phi and delta differ from their means over all replicas.
Averaging within the groups (P) keeps P x and removes x - P x: Eq. 2 pulls on the first with beta p, on
the second with gamma.

    one outer step      d' = alpha d - r x,  x' = x + d',  with r = beta p on P x, gamma on x - P x
    random groups       E P = (1 - k) I with k = (N - G) / (N - 1): `contraction`
    two moments of r    r1 = k gamma + (1 - k) beta p,  r2 = k gamma^2 + (1 - k) (beta p)^2: `rates`
    moments of x, d     (V, C, D) = E (x^2, x d, d^2): `moment_matrix`
    stable where        (1 + alpha) r2 < 2 r1 (1 - alpha^2) + 2 alpha r1^2: `exact_bound`, for gamma = beta
    noise s in Delta    V = beta^2 (1 - k) s / (2 r1 (1 - alpha) + 2 alpha r1^2 / (1 + alpha) - r2)
"""
import argparse
import statistics

import torch
from tqdm import tqdm

import train
from experiments.pictures import COLOURS, kept, picture, save, show_head, show_row
from noloco import gamma_bound
from plumbing.options import Parser
from plumbing.processes import Job

PULLS = (0.0, 0.3)
ALPHAS = torch.arange(20) * 0.05
GAMMAS = torch.arange(80) * 0.05 + 0.025
OMEGAS = torch.logspace(-3.4, -0.7, 10)
SCAN = 0.15 * torch.arange(2, 10)           # of gamma, at omega = 2e-3
INNER = 5


# ---------------------------------------------------------------- theory


def contraction(replicas, n):
    """k: of the differences between replicas, a random partition into G groups of n removes on average
    the share (N - G) / (N - 1).

    A group mean is a projection P of trace G that keeps what all replicas share. Averaged over random
    partitions it treats all other directions alike, so there it is (G - 1) / (N - 1) times the identity:
    exact for any N, about 1 - 1/n when N >> n, 1 when n = N.
    """
    return (replicas - max(1, replicas // n)) / (replicas - 1)


def rates(k, beta, gamma, pull):
    """E r and E r^2."""
    return k * gamma + (1 - k) * beta * pull, k * gamma**2 + (1 - k) * (beta * pull)**2


def moment_matrix(alpha, k, beta, gamma, pull=0.0):
    """(..., 3, 3): takes (V, C, D) over one outer step."""
    alpha, gamma = torch.broadcast_tensors(torch.as_tensor(alpha, dtype=torch.float64),
                                           torch.as_tensor(gamma, dtype=torch.float64))
    r, r2 = rates(k, beta, gamma, pull)

    def row(*entries):
        return torch.stack([e + torch.zeros_like(alpha) for e in entries], -1)

    D = row(r2, -2 * alpha * r, alpha**2)
    E = row(-r, alpha, 0.0)                 # of x d'
    V = row(1.0, 0.0, 0.0)
    return torch.stack([V + 2 * E + D, E + D, D], -2)


def exact_bound(alpha, k, pull=0.0):
    """The gamma = beta at which the moment matrix has eigenvalue 1.

    With pull = 0 and k = 1 - 1/n that is noloco.gamma_bound.
    """
    r, r2 = rates(k, 1.0, 1.0, pull)
    return 2 * (1 - alpha**2) * r / ((1 + alpha) * r2 - 2 * alpha * r**2)


def paper_window(alpha, n):
    """Eq. 74 of arXiv 2506.10911."""
    return (n / (2 * (n - 1))) ** 0.5 * alpha, (n * (2 + alpha**2) / (2 * (n - 1))) ** 0.5


def stationary(alpha, k, beta, gamma, pull, noise):
    """V in the steady state, when noise of this variance comes with each Delta."""
    r, r2 = rates(k, beta, gamma, pull)
    return beta**2 * (1 - k) * noise / (2 * r * (1 - alpha) + 2 * alpha * r**2 / (1 + alpha) - r2)


# ---------------------------------------------------------------- simulations


def growth(alpha, gamma, n, pull, generator, replicas=64, draws=8, steps=240):
    """log of the RMS difference between replicas per outer step, over the last half of the steps,
    noise-free, beta = gamma; alpha, gamma: (points).

    `draws` independent sequences of groups, the same for all points, are pooled: what grows is the mean
    square. Once centred and scaled at every step, which a linear map does not feel, nothing overflows.
    """
    phi, delta = (torch.randn((draws * replicas, len(alpha)), generator=generator) for _ in range(2))
    total = torch.zeros_like(alpha)
    start = replicas * torch.arange(draws)[:, None]
    for step in range(steps):
        order = (torch.rand((draws, replicas), generator=generator).argsort(1) + start).flatten()
        phi, delta = phi[order], delta[order]                           # groups are neighbours
        phis, deltas = (v.view(-1, n, len(alpha)) for v in (phi, delta))
        mean = phis.mean(1, keepdim=True)
        deltas.mul_(alpha).sub_(gamma * phis).add_((gamma - gamma * pull) * mean)       # Eq. 2
        phi += delta                                                                    # Eq. 3
        for v in (phi.view(draws, replicas, -1), delta.view(draws, replicas, -1)):
            v -= v.mean(1, keepdim=True)
        square = (phi.square().mean(0) + delta.square().mean(0)) / 2
        scale = square.sqrt().clamp(min=1e-6)                   # alpha 0, gamma 1, n = N: all gone at once
        phi /= scale
        delta /= scale
        if step >= steps // 2:
            total += scale.log()
    return total / (steps - steps // 2)


def noisy_quadratic(omega, gamma, generator, n=2, alpha=0.5, beta=0.7, m=INNER, replicas=64, dims=64,
                    burn_in=2000, steps=8000):
    """E V(phi - mean), V(mean) and the same by `stationary`, for each (omega, gamma), all driven by the
    same draws.

    Loss 1/2 (theta - c)^T A (theta - c), c ~ N(0, 1) fresh at every inner step and replica, A diagonal
    from 1/2 to 2.
    """
    A = torch.logspace(-1, 1, dims, 2.0)[:, None]
    phi, delta = torch.zeros(replicas, dims, len(omega)), torch.zeros(replicas, dims, len(omega))
    spread, mean_square = torch.zeros(len(omega)), torch.zeros(len(omega))
    for step in range(burn_in + steps):
        order = torch.randperm(replicas, generator=generator)
        phi, delta, theta = phi[order], delta[order], phi[order]
        for _ in range(m):
            c = torch.randn((replicas, dims, 1), generator=generator)
            theta.lerp_(c, omega * A)                           # theta - omega A (theta - c)
        phis, deltas, thetas = (v.view(-1, n, dims, len(omega)) for v in (phi, delta, theta))
        mean = phis.mean(1, keepdim=True)
        deltas.mul_(alpha).add_(thetas.mean(1, keepdim=True) - mean, alpha=beta).sub_(gamma * (phis - mean))
        phi += delta
        if step >= burn_in:
            spread += phi.var(0, correction=0).mean(0)
            mean_square += phi.mean(0).square().mean(0)
    shrink = (1 - omega * A).double()
    pull = 1 - shrink**m
    noise = (omega * A)**2 * (1 - shrink**(2 * m)) / (1 - shrink**2)
    apart = stationary(alpha, contraction(replicas, n), beta, gamma, pull, noise * (1 - 1 / replicas))
    together = stationary(alpha, 0, beta, gamma, pull, noise / replicas)
    return dict(spread=spread / steps, mean=mean_square / steps, spread_expected=apart.mean(0),
                mean_expected=together.mean(0))


# ---------------------------------------------------------------- what is found


def stability(seed, replicas=64):
    """Where the differences between replicas die out over (alpha, gamma), beside the bounds, and how
    large noise keeps them."""
    generator = torch.Generator().manual_seed(seed)
    result = dict(replicas=replicas, pulls=PULLS, alphas=ALPHAS.tolist(), gammas=GAMMAS.tolist(),
                  default=(0.5, 0.7), groups={})
    for n in tqdm((2, 4, replicas), desc="maps", dynamic_ncols=True):
        result["groups"][n] = growth_map(n, replicas, generator)
    omega = torch.cat([OMEGAS, torch.full_like(SCAN, 2e-3)])
    gamma = torch.cat([torch.full_like(OMEGAS, 0.7), SCAN])
    values = noisy_quadratic(omega, gamma, generator, replicas=replicas)
    noise = {name: v[:10].tolist() for name, v in values.items()}
    scan = {name: v[10:].tolist() for name, v in values.items()}
    slopes = {name: slopes_of(OMEGAS, v[:10].double()) for name, v in values.items()}
    result["noise"] = dict(m=INNER, omega=OMEGAS.tolist(), **noise, slopes=slopes)
    result["scan"] = dict(omega=2e-3, gamma=SCAN.tolist(), spread=scan["spread"],
                          spread_expected=scan["spread_expected"])
    return result


def slopes_of(omega, values):
    """In logarithms: over the four smallest omega, and between the two largest."""
    x, y = omega.log().tolist(), values.log().tolist()
    return dict(small=statistics.linear_regression(x[:4], y[:4]).slope,
                largest=(y[-1] - y[-2]) / (x[-1] - x[-2]))


def growth_map(n, replicas, generator):
    alpha, gamma = (v.flatten() for v in torch.meshgrid(ALPHAS, GAMMAS, indexing="ij"))
    k = contraction(replicas, n)
    row = dict(bound=gamma_bound(ALPHAS, n).tolist(), window=[w.tolist() for w in paper_window(ALPHAS, n)],
               exact={}, crossing={})
    for pull in PULLS:
        rate = growth(alpha, gamma, n, pull, generator, replicas)
        crossing, exact = first_growth(rate.view(len(ALPHAS), -1)), exact_bound(ALPHAS, k, pull)
        row["exact"][pull] = exact.tolist()
        row["crossing"][pull] = crossing.tolist()
        if pull == 0.0:
            row.update(beside_bounds(rate, alpha, gamma, n, k))
    return row


def first_growth(rate):
    """The gamma at which differences begin to grow, on a straight line between two points; rate:
    (alphas, gammas)."""
    after = (rate > 0).int().argmax(1, keepdim=True)
    below, above = rate.gather(1, after - 1)[:, 0], rate.gather(1, after)[:, 0]
    return GAMMAS[after[:, 0]] - 0.05 * above / (above - below)


def beside_bounds(rate, alpha, gamma, n, k):
    """How the signs of growth agree with the bounds, and the rates with the theory."""
    theory = torch.linalg.eigvals(moment_matrix(alpha, k, gamma, gamma)).abs().amax(-1).log() / 2
    low, high = paper_window(alpha, n)
    grows, inside, apart = rate > 0, (low < gamma) & (gamma < high), (rate - theory).abs()

    def holds(bound):
        wrong = grows != (gamma > bound)
        return dict(share=1 - float(wrong.double().mean()),
                    farthest=float(((gamma - bound).abs() * wrong).max()))

    return dict(rate=[[round(x, 3) for x in r] for r in rate.view(len(ALPHAS), -1).tolist()],
                rate_off=[float(apart.median()), float(apart.quantile(0.99))],
                bound_holds=holds(gamma_bound(alpha, n)), exact_holds=holds(exact_bound(alpha, k)),
                window_fails=dict(inside=int(inside.sum()), inside_grows=int((inside & grows).sum()),
                                  decays=int((~grows).sum()), outside_decays=int((~inside & ~grows).sum())))


def table(r):
    at = min(range(len(r["alphas"])), key=lambda i: abs(r["alphas"][i] - 0.5))
    print(f"{r['replicas']} replicas, {len(r['alphas']) * len(r['gammas'])} points of (alpha, gamma)\n")
    show_head("n | inside the paper's window, of them grow | decay, of them outside the window "
              "| sign as gamma_bound's (farthest off) | as the exact bound's (farthest off) "
              f"| limit at alpha = 0.5: measured, exact | ... with pull {r['pulls'][1]:g}")
    for n, row in r["groups"].items():
        fails = row["window_fails"]
        signs = [f"{holds['share']:.1%} ({holds['farthest']:.2f})"
                 for holds in (row["bound_holds"], row["exact_holds"])]
        limits = [f"{row['crossing'][pull][at]:.2f}, {row['exact'][pull][at]:.2f}" for pull in row["exact"]]
        show_row(n, f"{fails['inside']}, {fails['inside_grows']}",
                 f"{fails['decays']}, {fails['outside_decays']}", *signs, *limits)
    q = r["noise"]
    print()
    show_head(f"m omega = {q['m'] * q['omega'][0]:.2g} to {q['m'] * q['omega'][-1]:.2g} "
              "| slope in omega, smallest 4 | largest 2 | off the closed form at most")
    for name, what in (("spread", "variance between replicas"), ("mean", "variance of their mean")):
        slopes = q["slopes"][name]
        scan = zip(r["scan"].get(name, ()), r["scan"].get(name + "_expected", ()))
        off = max(abs(a / b - 1) for a, b in (*zip(q[name], q[name + "_expected"]), *scan))
        show_row(what, f"{slopes['small']:.2f}", f"{slopes['largest']:.2f}", f"{off:.1%}")
    scan = r["scan"]
    _, best = min(zip(scan["spread"], scan["gamma"]))
    print(f"\nomega {scan['omega']:g}: of gamma = {scan['gamma'][0]:.2f} to {scan['gamma'][-1]:.2f} "
          f"the spread is least at {best:.2f}")


# ---------------------------------------------------------------- the picture


def draw(plt, r):
    from matplotlib.patheffects import Normal, Stroke
    halo = [Stroke(linewidth=3.5, foreground="w", alpha=0.8), Normal()]     # black lines cross dark colours
    figure, axes = plt.subplots(1, 4, figsize=(15, 4.4), layout="constrained", width_ratios=[1, 1, 1, 1.15])
    for axis, (n, row) in zip(axes, r["groups"].items()):
        coloured = draw_map(axis, r, row, halo)
        axis.set(xlabel="alpha", ylabel="gamma", title=f"n = {n}" + " = N" * (int(n) == r["replicas"]),
                 xlim=(0, 0.95), ylim=(0, 4))
        axis.grid(False)
    axes[0].legend(loc="upper right")
    figure.colorbar(coloured, ax=axes[:3], label="growth of differences, log per outer step, no pull",
                    extend="both", pad=0.02)
    q, b = r["noise"], axes[3]
    x = [q["m"] * w for w in q["omega"]]
    for name, label, i, mark in (("spread", "V(phi - mean), spread", 0, "o"),
                                 ("mean", "V(mean of replicas)", 3, "s")):
        slopes = f"slope {q['slopes'][name]['small']:.2f} ... {q['slopes'][name]['largest']:.2f}"
        b.plot(x, q[name], mark, color=COLOURS[i], label=f"{label}: {slopes}")
        b.plot(x, q[name + "_expected"], "-", color=COLOURS[i], lw=1.2)
    b.set(xscale="log", yscale="log", xlabel="m omega", ylabel="variance per weight",
          title="n = 2, alpha 0.5, beta = gamma 0.7; lines: closed form")
    b.legend()
    return figure


def draw_map(axis, r, row, halo):
    rate = torch.tensor(row["rate"]).T.clamp(-0.3, 0.3)
    coloured = axis.pcolormesh(r["alphas"], r["gammas"], rate, cmap="PuOr_r", vmin=-0.3, vmax=0.3,
                               shading="nearest", rasterized=True)
    axis.plot(r["alphas"], row["bound"], "k-", lw=2, label="our bound, N large (gamma_bound)",
              path_effects=halo)
    axis.plot(r["alphas"], row["exact"]["0.0"], "-", color=COLOURS[2], lw=1.5,
              label=f"our bound for N = {r['replicas']}")
    for w, label in zip(row["window"], ("the paper's window (Eq. 74)", None)):
        axis.plot(r["alphas"], w, "k--", lw=1.5, label=label, path_effects=halo)
    for pull in r["pulls"][1:]:
        axis.plot(r["alphas"], row["crossing"][str(pull)], "k:", lw=2,
                  label=f"measured limit with pull, Delta = -{pull:g} phi", path_effects=halo)
    tiny = train.TINY["noloco"]["alpha"], train.TINY["noloco"]["beta"]
    axis.plot(*r["default"], "o", color=COLOURS[3], mec="w", ms=7, ls="", label="the released code's values")
    axis.plot(*tiny, "s", color=COLOURS[0], mec="w", ms=7, ls="", label="those of tiny runs")
    return coloured


def show(argv=None):
    p = Parser(__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--out", default="runs", help="folder of results/ and figures/ (default: runs)")
    p.add_argument("--plot", action="store_true", help="only show what OUT/results has")
    o = p.parse_args(argv)
    if not o.plot:
        save(o.out, "headline_stability", stability(o.seed), indent=None)
    found = kept(o.out, "headline_stability")
    table(found)
    picture(o.out, "headline_stability", draw, found)


if __name__ == "__main__":
    Job().together(show)
