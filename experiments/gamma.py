"""Where replicas stay together: N2 and N3 on the quadratic loss, simulated, and `gamma_bound`
(gossip/window.py) and the paper's window.

    python -m experiments.gamma [--scale try|plot|full] [--plot]

m inner steps on 1/2 lambda theta^2 give Delta = -p phi, p = 1 - (1 - omega lambda)^m (`pull`).
docs/stability.md has the proof, tests/test_gamma.py its algebra.
"""
import torch
from tqdm import tqdm

from experiments.harness import Row, command
from experiments.pictures import COLOURS, WIDTH, frame, legend
from experiments.stats import Expected, Table
from gossip.window import gamma_bound
from train import TINY

REPLICAS = 64
GROUPS = (2, 4)                 # replicas in a group
DRAWS = 8                       # of groups
STEPS = {"try": 8, "plot": 80, "full": 240}     # outer steps
PULL = 0.3                      # the one that is not 0, for alpha = 0.5
SPACING = 0.05
ALPHAS = torch.arange(20) * SPACING
GAMMAS = torch.arange(80) * SPACING + SPACING / 2
HALF = torch.tensor([0.5])
PAPERS = 0.5, 0.7               # the NoLoCo paper's alpha and beta


def paper_window(alpha, n):
    """Eq. 74 of arXiv 2506.10911."""
    return (n / (2 * (n - 1))) ** 0.5 * alpha, (n * (2 + alpha**2) / (2 * (n - 1))) ** 0.5


# ---------------------------------------------------------------- simulations


def growth(alphas, n, pull, generator, steps):
    """log of the RMS difference between replicas per outer step, over the last half of the steps,
    noise-free, for each alpha and each of GAMMAS (gamma = beta): (alphas, gammas).

    DRAWS independent sequences of groups, the same for all points, are pooled: what grows is the
    mean square. Once centred and scaled at every step, which a linear map does not feel, nothing
    overflows.
    """
    alpha, gamma = grid(alphas)
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
        scale = square.sqrt().clamp(min=1e-6)           # all may be gone at once
        phi /= scale
        delta /= scale
        if step >= steps // 2:
            total += scale.log()
    return (total / (steps - steps // 2)).view(len(alphas), len(GAMMAS))


def grid(alphas):
    """(alpha, gamma) of all points, flat."""
    alpha, gamma = torch.meshgrid(alphas, GAMMAS, indexing="ij")
    return alpha.flatten(), gamma.flatten()


def limit(rates):
    """The gamma at which differences begin to grow, on a straight line between two points; rates:
    those of GAMMAS."""
    after = max(1, int((rates > 0).int().argmax()))
    below, above = rates[after - 1], rates[after]
    return float(GAMMAS[after] - SPACING * above / (above - below))


def measure(o):
    """Which points grow (1), for each alpha and gamma, and the limits of alpha = 0.5."""
    generator = torch.Generator().manual_seed(0)
    found = dict(replicas=REPLICAS, groups={})
    for n in tqdm(GROUPS, desc="maps", dynamic_ncols=True):
        rates = growth(ALPHAS, n, 0.0, generator, STEPS[o.scale])
        pulled = growth(HALF, n, PULL, generator, STEPS[o.scale])
        found["groups"][str(n)] = dict(grows=(rates > 0).int().tolist(),
                                       limit=limit(rates[ALPHAS.tolist().index(0.5)]),
                                       limit_pulled=limit(pulled[0]))
    return found


# ---------------------------------------------------------------- the table


def points(found, n):
    """What the points of groups of n come to, as counts."""
    alpha, gamma = grid(ALPHAS)
    grows = torch.tensor(found["groups"][str(n)]["grows"]).flatten() > 0
    low, high = paper_window(alpha, n)
    inside = (low < gamma) & (gamma < high)
    bound = gamma_bound(alpha, n, found["replicas"])
    wrong = grows != (gamma > bound)
    return dict(all=len(grows), wrong=int(wrong.sum()),
                farthest=float(((gamma - bound).abs() * wrong).max()),
                inside=int(inside.sum()), inside_grows=int((inside & grows).sum()),
                decays=int((~grows).sum()), outside_decays=int((~inside & ~grows).sum()))


def show(found):
    table = Table("replicas in a group", "on our bound's right side (farthest off)",
                  "in the paper's window, but drift apart",
                  "stay together, but outside of that window",
                  f"limit at alpha = 0.5, with p = {PULL:g}")
    for n in GROUPS:
        row, counts = found["groups"][str(n)], points(found, n)
        right = counts["all"] - counts["wrong"]
        table.add(n, f"{right} of {counts['all']} ({counts['farthest']:.2f})",
                  f"{counts['inside_grows']} of {counts['inside']}",
                  f"{counts['outside_decays']} of {counts['decays']}",
                  f"{row['limit']:.2f}, {row['limit_pulled']:.2f}")
    table.end()


# ---------------------------------------------------------------- the picture


def draw(plt, found):
    """Where pairs' differences die out, our bound, and the paper's window."""
    figure, axis = plt.subplots(figsize=(WIDTH, 4.0))
    alphas = ALPHAS.tolist()
    grows = torch.tensor(found["groups"]["2"]["grows"]).T.tolist()
    axis.pcolormesh(alphas, GAMMAS.tolist(), grows, cmap=plt.matplotlib.colors.ListedColormap(
        ["#BFE3D6", "#F6D5BE"]), shading="nearest", rasterized=True)
    start, end = paper_window(ALPHAS, 2)
    bound = gamma_bound(ALPHAS, 2, found["replicas"])
    axis.plot(alphas, end, "--", color=COLOURS["DiLoCo"], lw=2, label="the paper's\nwindow: end")
    axis.plot(alphas, start, "--", color=COLOURS["DiLoCo"], lw=2,
              label="the paper's\nwindow: start")
    axis.plot(alphas, bound, color="#000000", lw=2.5, label="our bound")
    axis.text(0.6, 3.0, "replicas drift apart", ha="center")
    axis.text(0.05, 0.55, "pairs stay together")
    ours = TINY["noloco"]["alpha"], TINY["noloco"]["beta"]
    for name, (alpha, beta) in {"the paper's": PAPERS, "train.py's": ours}.items():
        axis.plot(alpha, beta, "o", color=COLOURS["NoLoCo"], ms=8, clip_on=False)
        axis.annotate(name, (alpha, beta), xytext=(8, 8), textcoords="offset points",
                      color=COLOURS["NoLoCo"])
    axis.set(xlabel="alpha, the momentum", ylabel="gamma = beta", xlim=(0, 0.95), ylim=(0, 4))
    axis.grid(False)
    legend(axis)
    frame(figure, found, "Pairs stay together below our bound, not inside the paper's window",
          "Where pairs stay together")
    return figure


def expected(found):
    counts = points(found, 2)
    return [
        Expected("alpha 0.5, pairs: gamma at which replicas drift apart (bound: 1.51)",
                 found["groups"]["2"]["limit"], 1.51, 0.05, ".2f"),
        Expected("points inside the paper's window whose differences grow",
                 counts["inside_grows"] / counts["inside"], 0.25, 0.03, ".0%"),
    ]


ROW = Row("gamma", measure, show, {"gamma": draw}, expected)

if __name__ == "__main__":
    command(__doc__, ROW)
