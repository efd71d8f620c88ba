"""Where replicas stay together: N2 and N3 on the quadratic loss, the theory of gamma beside
simulations.

    python -m experiments.gamma [--scale try|plot|full] [--plot]

m inner steps on 1/2 lambda theta^2 give Delta = -p phi, p = 1 - (1 - omega lambda)^m (`pull`). N
replicas in G groups of n; x and d are what phi and delta differ from their means over all replicas.
Averaging within the groups (P) keeps P x and removes x - P x: N2 pulls on the first with beta p, on
the second with gamma.

    one outer step      d' = alpha d - r x,  x' = x + d',  with r = beta p on P x, gamma on x - P x
    random groups       E P = (1 - k) I with k = (N - G) / (N - 1): `contraction`
    two moments of r    r1 = k gamma + (1 - k) beta p,  r2 = k gamma^2 + (1 - k) (beta p)^2: `rates`
    moments of x, d     (V, C, D) = E (x^2, x d, d^2): `moment_matrix`
    stable where        (1 + alpha) r2 < 2 r1 (1 - alpha^2) + 2 alpha r1^2
                        (`exact_bound`, for gamma = beta)
"""
import itertools

import torch
from tqdm import tqdm

from experiments.harness import Row, command
from experiments.pictures import COLOURS, WIDTH, frame
from experiments.tables import Expected, Table
from gossip.window import gamma_bound
from train import TINY

REPLICAS = 64
DRAWS = 8                       # of groups
STEPS = {"try": 8, "plot": 80, "full": 240}     # outer steps
PULLS = (0.0, 0.3)
ALPHAS = torch.arange(20) * 0.05
GAMMAS = torch.arange(80) * 0.05 + 0.025


# ---------------------------------------------------------------- theory


def contraction(replicas, n):
    """k: of the differences between replicas, a random partition into G groups of n removes on
    average the share (N - G) / (N - 1).

    A group mean is a projection P of trace G that keeps what all replicas share. Averaged over
    random partitions it treats all other directions alike, so there it is (G - 1) / (N - 1) times
    the identity: exact for any N, about 1 - 1/n when N >> n, 1 when n = N.
    """
    return (replicas - max(1, replicas // n)) / (replicas - 1)


def rates(k, beta, gamma, pull):
    """E r and E r^2."""
    return k * gamma + (1 - k) * beta * pull, k * gamma**2 + (1 - k) * (beta * pull)**2


def moment_matrix(alpha, k, beta, gamma, pull=0.0):
    """(3, 3): takes (V, C, D) over one outer step."""
    r, r2 = rates(k, beta, gamma, pull)
    V, E, D = torch.tensor([[1.0, 0.0, 0.0],
                            [-r, alpha, 0.0],                               # of x d'
                            [r2, -2 * alpha * r, alpha**2]], dtype=torch.float64)
    return torch.stack([V + 2 * E + D, E + D, D])


def exact_bound(alpha, k, pull=0.0):
    """The gamma = beta at which the moment matrix has eigenvalue 1.

    With pull = 0 and k = 1 - 1/n that is gamma_bound.
    """
    r, r2 = rates(k, 1.0, 1.0, pull)
    return 2 * (1 - alpha**2) * r / ((1 + alpha) * r2 - 2 * alpha * r**2)


def paper_window(alpha, n):
    """Eq. 74 of arXiv 2506.10911."""
    return (n / (2 * (n - 1))) ** 0.5 * alpha, (n * (2 + alpha**2) / (2 * (n - 1))) ** 0.5


# ---------------------------------------------------------------- simulations


def growth(alpha, gamma, n, pull, generator, steps):
    """log of the RMS difference between replicas per outer step, over the last half of the steps,
    noise-free, beta = gamma; alpha, gamma: (points).

    DRAWS independent sequences of groups, the same for all points, are pooled: what grows is the
    mean square. Once centred and scaled at every step, which a linear map does not feel, nothing
    overflows.
    """
    phi = torch.randn((DRAWS * REPLICAS, len(alpha)), generator=generator)
    delta = torch.randn(phi.shape, generator=generator)
    total = torch.zeros_like(alpha)
    start = REPLICAS * torch.arange(DRAWS)[:, None]
    for step in range(steps):
        order = (torch.rand((DRAWS, REPLICAS), generator=generator).argsort(1) + start).flatten()
        phi, delta = phi[order], delta[order]                           # groups are neighbours
        phis = phi.view(-1, n, len(alpha))
        deltas = delta.view(-1, n, len(alpha))
        mean = phis.mean(1, keepdim=True)
        deltas.mul_(alpha).sub_(gamma * phis).add_((gamma - gamma * pull) * mean)       # N2
        phi += delta                                                                    # N3
        for v in (phi.view(DRAWS, REPLICAS, -1), delta.view(DRAWS, REPLICAS, -1)):
            v -= v.mean(1, keepdim=True)
        square = (phi.square().mean(0) + delta.square().mean(0)) / 2
        scale = square.sqrt().clamp(min=1e-6)           # alpha 0, gamma 1, n = N: all gone at once
        phi /= scale
        delta /= scale
        if step >= steps // 2:
            total += scale.log()
    return total / (steps - steps // 2)


# ---------------------------------------------------------------- what is found


def measure(o):
    """Where differences between replicas die out over (alpha, gamma)."""
    generator = torch.Generator().manual_seed(0)
    found = dict(replicas=REPLICAS, pulls=PULLS, alphas=ALPHAS.tolist(), gammas=GAMMAS.tolist(),
                 default=(0.5, 0.7), groups={})
    alpha, gamma = torch.meshgrid(ALPHAS, GAMMAS, indexing="ij")
    alpha, gamma = alpha.flatten(), gamma.flatten()
    maps = list(itertools.product((2, 4, REPLICAS), PULLS))
    for n, pull in tqdm(maps, desc="maps", dynamic_ncols=True):
        k = contraction(REPLICAS, n)
        rate = growth(alpha, gamma, n, pull, generator, STEPS[o.scale])
        row = found["groups"].setdefault(str(n), dict(exact={}, crossing={}))
        row["exact"][str(pull)] = exact_bound(ALPHAS, k, pull).tolist()
        row["crossing"][str(pull)] = first_growth(rate.view(len(ALPHAS), -1)).tolist()
        if pull == 0.0:
            row |= beside_bounds(rate, alpha, gamma, n, k)
            row["bound"] = gamma_bound(ALPHAS, n).tolist()
            row["window"] = [edge.tolist() for edge in paper_window(ALPHAS, n)]
    return found


def first_growth(rate):
    """The gamma at which differences begin to grow, on a straight line between two points; rate:
    (alphas, gammas)."""
    after = (rate > 0).int().argmax(1, keepdim=True).clamp(min=1)
    below = rate.gather(1, after - 1)[:, 0]
    above = rate.gather(1, after)[:, 0]
    return GAMMAS[after[:, 0]] - 0.05 * above / (above - below)


def beside_bounds(rate, alpha, gamma, n, k):
    """How the signs of growth agree with the bounds."""
    low, high = paper_window(alpha, n)
    grows = rate > 0
    inside = (low < gamma) & (gamma < high)

    def holds(bound):
        wrong = grows != (gamma > bound)
        return dict(share=1 - float(wrong.double().mean()),
                    farthest=float(((gamma - bound).abs() * wrong).max()))

    fails = dict(inside=int(inside.sum()), inside_grows=int((inside & grows).sum()),
                 decays=int((~grows).sum()), outside_decays=int((~inside & ~grows).sum()))
    rates = []
    for row in rate.view(len(ALPHAS), -1).tolist():
        rates.append([round(x, 3) for x in row])
    return dict(rate=rates, bound_holds=holds(gamma_bound(alpha, n)),
                exact_holds=holds(exact_bound(alpha, k)), window_fails=fails)


def show(found):
    table = Table("replicas in a group", "points in the paper's window", "of these drift apart",
                  "points that stay together", "of these outside the window")
    for n, row in found["groups"].items():
        fails = row["window_fails"]
        table.add(n, fails["inside"], fails["inside_grows"], fails["decays"],
                  fails["outside_decays"])
    table.end()
    table = Table("replicas in a group", "our bound is right (farthest off)",
                  "the exact bound (farthest off)", "limit at alpha 0.5: measured, exact",
                  f"the same with pull {found['pulls'][1]:g}")
    at = min(range(len(found["alphas"])), key=lambda i: abs(found["alphas"][i] - 0.5))
    for n, row in found["groups"].items():
        cells = []
        for holds in (row["bound_holds"], row["exact_holds"]):
            cells.append(f"{holds['share']:.1%} ({holds['farthest']:.2f})")
        for pull in row["exact"]:
            cells.append(f"{row['crossing'][pull][at]:.2f}, {row['exact'][pull][at]:.2f}")
        table.add(n, *cells)
    table.end()


# ---------------------------------------------------------------- the picture


def draw(plt, found):
    """Where pairs' differences die out, beside our bound and the paper's window."""
    figure, axis = plt.subplots(figsize=(WIDTH, 4.4))
    row, alphas = found["groups"]["2"], found["alphas"]
    grows = (torch.tensor(row["rate"]).T > 0).tolist()
    axis.pcolormesh(alphas, found["gammas"], grows, cmap=plt.matplotlib.colors.ListedColormap(
        ["#BFE3D6", "#F6D5BE"]), shading="nearest", rasterized=True)
    lower, upper = row["window"]
    axis.plot(alphas, row["bound"], color="#000000", lw=2.5, label="our bound")
    axis.plot(alphas, upper, "--", color=COLOURS["DiLoCo"], lw=2, label="the window's end")
    axis.plot(alphas, lower, "--", color=COLOURS["DiLoCo"], lw=2, label="the window's start")
    axis.text(0.6, 3.0, "replicas drift apart", ha="center")
    axis.text(0.05, 0.55, "pairs stay together")
    for name, (alpha, beta) in {"the paper's": found["default"], "train.py": (
            TINY["noloco"]["alpha"], TINY["noloco"]["beta"])}.items():
        axis.plot(alpha, beta, "o", color=COLOURS["NoLoCo"], ms=8, clip_on=False)
        axis.annotate(name, (alpha, beta), xytext=(8, 8), textcoords="offset points",
                      color=COLOURS["NoLoCo"])
    axis.set(xlabel="alpha, the momentum", ylabel="gamma = beta", xlim=(0, 0.95), ylim=(0, 4))
    axis.grid(False)
    frame(figure, found, "Pairs stay together below our bound, not inside the paper's window",
          "Where pairs stay together", f"Simulated at each point: the outer step alone, "
          f"{found['replicas']} replicas that start apart, {DRAWS} draws of their pairs. Window: "
          f"Eq. 74 of the NoLoCo paper.")
    return figure


def expected(found):
    row = found["groups"]["2"]
    at = min(range(len(found["alphas"])), key=lambda i: abs(found["alphas"][i] - 0.5))
    fails = row["window_fails"]
    judged = found["scale"] != "try"
    return [
        Expected("alpha 0.5, pairs: gamma at which replicas drift apart (bound: 1.5)",
                 row["crossing"]["0.0"][at], 1.5, 0.1, ".2f", judged),
        Expected("points inside the paper's window whose differences grow",
                 fails["inside_grows"] / fails["inside"], 0.25, 0.05, ".0%", judged),
    ]


ROW = Row("gamma", measure, show, {"gamma": draw}, expected)

if __name__ == "__main__":
    command(__doc__, ROW)
