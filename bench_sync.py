"""How long synchronisation takes: simulated to thousands of replicas, measured on real processes, and on paper. The trainer beside others; what it learns.

    python bench_sync.py --simulate                                                     Figs. 5A and 5B of arXiv 2506.10911 and beyond
    python bench_sync.py --simulate --params 57e6 --mbit 100 --latency-ms 20            ... with your own model and link
    torchrun --nproc-per-node 8 bench_sync.py                                           the outer step as it is: Gloo or NCCL
    torchrun --nproc-per-node 64 bench_sync.py --latency-ms 50 --latency-std 1          real messages over emulated links
    python bench_sync.py --model large --replicas 1024 --mbit 100 --latency-ms 50       bytes, seconds and memory on paper
    python bench_sync.py --plot                                                         draw figures/ again from results/
    python bench_sync.py --trainer                                                      the trainer's own speed, beside others' (README, Speed)
    python bench_sync.py --headline convergence                                         the papers' headline results, tiny (README, Headline results)

n replicas. A message takes t ~ LogNormal(mu, sigma^2), independently of all others:

    t_c = E t = exp(mu + sigma^2 / 2),    std(t) / t_c = sqrt(exp(sigma^2) - 1)                             (1)
    tree all-reduce: up and down a binary tree whose leaves are the replicas; at sigma = 0    2 t_c log2 n  (2)
    pair averaging: the same with two leaves,    2 E max(t1, t2) = 2 (1 + erf(sigma / 2)) t_c               (3)

Inner steps take LogNormal(mu = 1, sigma^2 = 0.5), S_i is the sum of replica i's m. Its clock after an outer step, exchanges left out:

    DiLoCo: T <- T + max_i S_i    NoLoCo, with its partner j: T_i, T_j <- max(T_i + S_i, T_j + S_j)         (4)

Beyond the paper: a message of b bytes takes b / rate longer; links do not contend. For B bytes of parameters and at sigma = 0

    all-reduce by halving and doubling: 2 log2 n t_c + 2 (n - 1) / n B / rate    NoLoCo: t_c + B / rate     (5)

The paper counts two exchanges for a pair. Our NoLoCo needs one, of theta: phi is not needed or came ahead (Eq. 2' in noloco.py).
"""
import argparse
import copy
import itertools
import json
import math
import os
import platform
import random
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tqdm import tqdm

import skippipe
import train
from model import Config, Llama, count_parameters
from noloco import PIECE, DiLoCo, NoLoCo, flatten, gamma_bound, outer_update, random_groups, total
from plumbing.data import load_corpus
from plumbing.huggingface import load_weights
from train import BadInput, Job, Parser

PAPER = {"small": 125e6, "medium": 1.3e9, "large": 6.8e9}       # parameters, as the paper states them
COUNTS = (4, 16, 64, 256, 1024, 4096)
SPREADS = (0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.25, 2.5)
INNER_STEPS = (1, 2, 5, 10, 20, 35, 50, 75, 100, 120)
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#000000")        # Okabe and Ito's, safe for the colour-blind


def parse(argv):
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--simulate", action="store_true", help="the simulations and their picture")
    p.add_argument("--plot", action="store_true", help="draw the pictures again from what --out holds")
    p.add_argument("--trainer", nargs="*", choices=list(PARTS), help="the trainer's speed, these parts of it (default: all); starts its own processes")
    p.add_argument("--headline", nargs="+", choices=list(HEADLINES), help="the papers' headline results at the size of this machine; starts its own processes")
    p.add_argument("--seeds", type=int, default=3, help="runs of each kind in --headline (default: 3)")
    p.add_argument("--steps", type=int, help="training steps in --headline, in place of each part's own")
    p.add_argument("--model", nargs="+", choices=list(PAPER), help="the table on paper for these models")
    p.add_argument("--params", type=float, help="parameters (default: measured 57e6, emulated 25e3, simulated 125e6)")
    p.add_argument("--replicas", nargs="+", type=int, help="replica counts of the table on paper (default: 64 1024)")
    p.add_argument("--mbit", nargs="+", type=float, help="link rate in Mbit/s; the table takes several (simulated and table default: 1000)")
    p.add_argument("--latency-ms", type=float, help="mean time of a message beside its bytes, t_c (simulated and table default: 50)")
    p.add_argument("--latency-std", type=float, help="std(t) / t_c (emulated default: 0, simulated default: 1)")
    p.add_argument("--step-seconds", type=float, default=1.0, help="time of an inner step in the table on paper (default: 1)")
    p.add_argument("--trials", type=int, default=11, help="measurements of each kind, interleaved (default: 11)")
    p.add_argument("--seed", type=int, default=0, help="of all drawn times and groups")
    p.add_argument("--out", help="folder of results/ and figures/ (default: here; runs with your own numbers of steps, seeds, parameters or trials)")
    p.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    p.add_argument("--backend", default="auto", choices=["auto", "gloo", "nccl"])
    o = p.parse_args(argv)
    world = int(os.environ.get("WORLD_SIZE", 1))
    own = o.params or o.trials != 11 or o.steps or o.seeds != 3 or o.simulate and any(x is not None for x in (o.mbit, o.latency_ms, o.latency_std))
    o.out = o.out or ("runs" if own else ".")       # the README's figures are not overwritten by an experiment
    for name, least in dict(seeds=1, steps=1, params=1, latency_ms=0, latency_std=0, trials=1).items():
        value = getattr(o, name)
        if value is not None and not least <= value < math.inf:
            raise BadInput(f"--{name.replace('_', '-')} must be at least {least}, got {value:g}")
    if not all(0 < x < math.inf for x in (*(o.mbit or ()), o.step_seconds)) or o.simulate and (o.latency_std or 0) > 5:
        raise BadInput("--mbit and --step-seconds must be positive numbers, and --latency-std at most 5 in simulations (beyond, means need too many draws)")
    if min(o.replicas or [2]) < 2:
        raise BadInput(f"--replicas must be at least 2, got {min(o.replicas)}")
    o.emulate = world > 1 and not (o.latency_ms is None and o.latency_std is None and o.mbit is None)
    if o.trainer is not None:
        o.trainer, o.device, o.backend = o.trainer or list(PARTS), "cpu", "gloo"
        if world > 1 and [PARTS[part][1] for part in o.trainer] != [world]:
            raise BadInput("--trainer starts its own processes: python bench_sync.py --trainer")
        try:
            import transformers                                     # noqa: F401
        except ImportError:
            raise BadInput("--trainer compares with transformers: pip install '.[test]'")
        return o
    if world > 1 and (o.simulate or o.plot or o.model or o.headline):
        raise BadInput("--simulate, --plot, --model and --headline need no torchrun: python bench_sync.py ...")
    if world == 1 and not (o.simulate or o.plot or o.model or o.headline):
        raise BadInput("nothing to do: give --simulate, --model, --trainer, --headline or --plot, "
                       "or start several processes: torchrun --nproc-per-node 2 bench_sync.py")
    if o.emulate:
        if world % 2 or int(os.environ.get("LOCAL_WORLD_SIZE", world)) != world:
            raise BadInput(f"emulated links need an even number of processes, all on one machine (one clock); got {world}")
        if o.mbit and len(o.mbit) > 1:
            raise BadInput("emulated links have one rate: give --mbit one number")
        if o.backend == "nccl":
            raise BadInput("emulated links are for Gloo on the CPU: leave --backend nccl out")
        o.device, o.backend = "cpu", "gloo"
    return o


# ---------------------------------------------------------------- the model of a network; the last dimension is that of the trials


def messages(shape, spread, generator):
    """Times of messages (1) with t_c = 1 and std(t) / t_c = spread."""
    variance = math.log(1 + spread**2)
    return torch.randn(shape, generator=generator).mul_(variance**0.5).sub_(variance / 2).exp_()


def pair_closed_form(spread):
    """(3) with t_c = 1."""
    return 2 * (1 + math.erf(math.log(1 + spread**2) ** 0.5 / 2))


def tree_all_reduce(up, down):
    """(2) for any n: up[j] and down[j] (trials) are times between heap node j and its parent j // 2; the replicas are nodes n ... 2n-1."""
    last = len(up)                                              # 2n
    ready = torch.zeros_like(up)
    levels = [(a, min(2 * a, last)) for a in (2**k for k in range(1, last.bit_length())) if a < last]
    for a, b in reversed(levels):                               # a parent waits for the later of its two children
        ready[a // 2:b // 2] = (ready[a:b] + up[a:b]).unflatten(0, (-1, 2)).amax(1)
    for a, b in levels:
        ready[a:b] = ready[a // 2:b // 2].repeat_interleave(2, 0) + down[a:b]
    return ready[last // 2:].amax(0)                            # (trials)


def pair_average(t):
    """(3) from t (exchanges, 2, trials): an exchange is over when both messages have arrived."""
    return t.amax(1).sum(0)


def ring_all_reduce(steps):
    """Each of the 2 (n - 1) steps is (n, trials): rank i passes a piece on to i + 1 once it has that of the step before."""
    clock = 0
    for t in steps:
        clock = torch.maximum(clock + torch.zeros_like(t), (clock + t).roll(1, 0))
    return clock.amax(0)


def butterfly_all_reduce(rounds):
    """Each round is (distance, times (n, trials)): rank i exchanges with rank i xor distance."""
    clock = 0
    for distance, t in rounds:
        sent = clock + t
        clock = torch.maximum(clock + torch.zeros_like(t), sent[torch.arange(len(t)) ^ distance])
    return clock.amax(0)


def estimate(sample, relative=0.004):
    """(mean, standard error) of sample() -> (trials); draws again until the error is below `relative` of the mean."""
    values = sample()
    while float(values.std()) > relative * float(values.mean()) * len(values) ** 0.5:
        values = torch.cat([values] + [sample() for _ in range(max(1, len(values) // 1024))])
    return float(values.double().mean()), float(values.double().std()) / len(values) ** 0.5


# ---------------------------------------------------------------- simulated


def reductions(n, spread, latency, seconds, generator):
    """{name: sample() -> (trials)} of synchronising n replicas once; `seconds` is what the whole vector's bytes take on a link."""
    def draw(*shape, part=1.0, trials=max(4, (1 << 20) // n)):
        return messages((*shape, trials), spread, generator).mul_(latency).add_(part * seconds)
    few, halves = max(4, (1 << 15) // n), [(n >> r, 0.5**r) for r in range(1, n.bit_length())]
    return {
        "tree": lambda: tree_all_reduce(draw(2 * n), draw(2 * n)),
        "ring": lambda: ring_all_reduce(draw(n, part=1 / n, trials=few) for _ in range(2 * (n - 1))),
        "butterfly": lambda: butterfly_all_reduce((d, draw(n)) for d, _ in halves),
        "halving and doubling": lambda: butterfly_all_reduce((d, draw(n, part=p)) for d, p in halves + halves[::-1]),
        "pair, two exchanges (paper)": lambda: pair_average(draw(2, 2)),
        "NoLoCo here, one exchange": lambda: pair_average(draw(1, 2)),
    }


def training(n, inner_steps, outer_steps, trials, generator):
    """Total times (4) after each of outer_steps, for each of inner_steps: {name: (outer steps, inner steps, trials)}.

    "alone" forgets who was late at every outer step: a pair then costs E max(S_1, S_2), as in the paper's analysis of an exchange.
    """
    everyone, clock = torch.zeros(len(inner_steps), trials), torch.zeros(len(inner_steps), n, trials)
    alone, totals = torch.zeros_like(everyone), {"DiLoCo": [], "NoLoCo": [], "alone": []}
    for k in range(1, max(outer_steps) + 1):
        gaps = [b - a for a, b in zip((0,) + inner_steps, inner_steps)]
        S = torch.stack([torch.randn((gap, n, trials), generator=generator).mul_(0.5**0.5).add_(1).exp_().sum(0) for gap in gaps]).cumsum(0)
        everyone += S.amax(1)
        alone += S.unflatten(1, (-1, 2)).amax(2).mean(1)
        clock = (clock + S)[:, torch.randperm(n, generator=generator)].unflatten(1, (-1, 2)).amax(2).repeat_interleave(2, 1)
        if k in outer_steps:
            for name, total in (("DiLoCo", everyone), ("NoLoCo", clock.amax(1)), ("alone", alone)):
                totals[name].append(total.clone())
    return {name: torch.stack(total).double() for name, total in totals.items()}


def late_replica(generator, n=1024, inner_steps=50, outer_steps=24, start=4, trials=8):
    """Mean time that replicas have lost to one late replica, in mean outer steps without it: {case: {method: [(mean, error), ...]}}."""
    unit = inner_steps * math.exp(1.25)
    S = [torch.randn((inner_steps, n, trials), generator=generator).mul_(0.5**0.5).add_(1).exp_().sum(0) for _ in range(outer_steps)]
    order = [torch.randperm(n, generator=generator) for _ in S]
    cases = {"none": lambda k, s: s, "stops once, for 1 outer step": lambda k, s: s + unit * (k == start),
             "for 4 (or is dead, given up after 4)": lambda k, s: s + 4 * unit * (k == start),
             "half speed from then on": lambda k, s: s * (2 if k >= start else 1)}
    clocks = {}
    for case, late in cases.items():
        everyone, clock, history = torch.zeros(trials), torch.zeros(n, trials), {"DiLoCo": [], "NoLoCo": []}
        for k, (s, permutation) in enumerate(zip(S, order)):
            s = torch.cat([late(k, s[:1]), s[1:]])
            everyone = everyone + s.amax(0)
            pairs = (clock + s)[permutation].unflatten(0, (-1, 2)).amax(1).repeat_interleave(2, 0)
            clock = torch.empty_like(pairs).index_copy_(0, permutation, pairs)      # the late one keeps its place
            history["DiLoCo"].append(everyone)
            history["NoLoCo"].append(clock.mean(0))
        clocks[case] = {method: torch.stack(h) for method, h in history.items()}
    lost = {case: {method: (clocks[case][method] - clocks["none"][method]) / unit for method in clocks[case]} for case in list(cases)[1:]}
    return {case: {method: [(float(x.mean()), float(x.std()) / trials**0.5) for x in h] for method, h in by.items()} for case, by in lost.items()}


def simulate(o):
    """Everything simulated, its checks, results/sync_simulated.json and figures/sync_simulated.png."""
    began, generator = time.perf_counter(), torch.Generator().manual_seed(o.seed)
    params, mbit = o.params or PAPER["small"], (o.mbit or [1000.0])[0]
    latency, spread = (50.0 if o.latency_ms is None else o.latency_ms) / 1000, 1.0 if o.latency_std is None else o.latency_std
    result = dict(params=params, mbit=mbit, latency_seconds=latency, spread=spread, counts=COUNTS, spreads=SPREADS, inner_steps=INNER_STEPS,
                  outer_steps=(250, 500), ratio={}, pair=[], training={}, seconds={})
    progress = tqdm(total=len(SPREADS) + 3 * len(COUNTS) + 1, desc="simulating", dynamic_ncols=True)
    for s in SPREADS:                                                       # (A)
        pair = estimate(reductions(1 << 12, s, 1.0, 0.0, generator)["pair, two exchanges (paper)"], 0.001)
        result["pair"].append((*pair, pair_closed_form(s)))
        progress.update()
    for n in COUNTS:
        trees = [estimate(reductions(n, s, 1.0, 0.0, generator)["tree"]) for s in SPREADS]
        result["ratio"][n] = [(a / b, a / b * math.hypot(da / a, db / b)) for (a, da), (b, db, _) in zip(trees, result["pair"])]
        progress.update()
    for n in COUNTS:                                                        # (B)
        for steps, trials in ((INNER_STEPS[:3], max(40, 4096 // n)), (INNER_STEPS[3:], max(4, 1024 // n))):      # few steps vary most
            total = training(n, steps, result["outer_steps"], trials, generator)
            for name in ("NoLoCo", "alone"):
                r, rows = total["DiLoCo"] / total[name], result["training"].setdefault(name, {}).setdefault(n, [[], []])
                for row, mean_, error in zip(rows, r.mean(2).tolist(), (r.std(2) / trials**0.5).tolist()):
                    row += zip(mean_, error)
        progress.update()
    for n in COUNTS:                                                        # (C)
        for name, sample in reductions(n, spread, latency, 32 * params / (mbit * 1e6), generator).items():
            result["seconds"].setdefault(name, {})[n] = estimate(sample)
        progress.update()
    result["late"] = late_replica(generator)
    progress.update()
    progress.close()
    for s, (a, da, closed) in zip(SPREADS, result["pair"]):
        print(f"std(t)/t_c {s:4}: 2 E[max] simulated {a:.4f} +- {da:.4f}, closed form {closed:.4f}")
    for n in COUNTS:
        zero, wide = result["ratio"][n][0][0], result["ratio"][n][-1]
        print(f"{n:4} replicas: tree / pair {zero:g} at zero spread (log2 n = {math.log2(n):g}), {wide[0]:.1f} +- {wide[1]:.1f} at {SPREADS[-1]}")
    at = INNER_STEPS.index(100)
    for i, outer in enumerate(result["outer_steps"]):
        now, alone = result["training"]["NoLoCo"][1024][i][at], result["training"]["alone"][1024][i][at]
        print(f"1024 replicas, 100 inner steps, {outer} outer steps: DiLoCo takes {100 * (now[0] - 1):.1f}% +- {100 * now[1]:.1f} longer than NoLoCo "
              f"({100 * (alone[0] - 1):.1f}% if a pair's delay were forgotten at once; the paper says ~20%)")
    pairs = [p for rows in result["ratio"].values() for p in rows] + [p for by in result["seconds"].values() for p in by.values()]
    pairs += [p for by in result["training"].values() for rows in by.values() for row in rows for p in row]
    result["wall_seconds"] = time.perf_counter() - began
    print(f"largest standard error {100 * max(error / value for value, error in pairs):.2f}% of its value; {result['wall_seconds']:.0f} s")
    save(o, "sync_simulated", result)


# ---------------------------------------------------------------- headline: stability on the quadratic loss


def contraction(replicas, n):
    """k: of the differences between replicas, a random partition into G groups of n removes on average the share k = (N - G) / (N - 1).

    A group mean is a projection P of trace G that keeps what all replicas share. Averaged over random partitions it treats all other
    directions alike, so there it is (G - 1) / (N - 1) times the identity: exact for any N, about 1 - 1/n when N >> n, 1 when n = N.
    """
    return (replicas - max(1, replicas // n)) / (replicas - 1)


def rates(k, beta, gamma, pull):
    """E r and E r^2, where Delta = -pull phi makes Eq. 2 delta <- alpha delta - r phi for differences: r is beta pull on P's side, else gamma."""
    return k * gamma + (1 - k) * beta * pull, k * gamma**2 + (1 - k) * (beta * pull)**2


def moment_matrix(alpha, k, beta, gamma, pull=0.0):
    """(..., 3, 3): takes (V, C, D) = E (x^2, x d, d^2) of differences x in phi and d in delta over one outer step."""
    alpha, gamma = torch.broadcast_tensors(torch.as_tensor(alpha, dtype=torch.float64), torch.as_tensor(gamma, dtype=torch.float64))
    r, r2 = rates(k, beta, gamma, pull)
    row = lambda *entries: torch.stack([e + torch.zeros_like(alpha) for e in entries], -1)
    D, E, V = row(r2, -2 * alpha * r, alpha**2), row(-r, alpha, 0.0), row(1.0, 0.0, 0.0)
    return torch.stack([V + 2 * E + D, E + D, D], -2)


def exact_bound(alpha, k, pull=0.0):
    """The gamma = beta at which the moment matrix has eigenvalue 1; with pull = 0 and k = 1 - 1/n that is noloco.gamma_bound."""
    r, r2 = rates(k, 1.0, 1.0, pull)
    return 2 * (1 - alpha**2) * r / ((1 + alpha) * r2 - 2 * alpha * r**2)


def paper_window(alpha, n):
    """Eq. 74 of arXiv 2506.10911."""
    return (n / (2 * (n - 1))) ** 0.5 * alpha, (n * (2 + alpha**2) / (2 * (n - 1))) ** 0.5


def stationary(alpha, k, beta, gamma, pull, noise):
    """V in the steady state, when noise of this variance comes with each Delta."""
    r, r2 = rates(k, beta, gamma, pull)
    return beta**2 * (1 - k) * noise / (2 * r * (1 - alpha) + 2 * alpha * r**2 / (1 + alpha) - r2)


def growth(alpha, gamma, n, pull, generator, replicas=64, draws=8, steps=240):
    """log of the RMS difference between replicas per outer step, over the last half of the steps, noise-free, beta = gamma; alpha, gamma: (points).

    `draws` independent sequences of groups, the same for all points, are pooled: what grows is the mean square. Once centred and scaled
    at every step, which a linear map does not feel, nothing overflows.
    """
    phi, delta = (torch.randn((draws * replicas, len(alpha)), generator=generator) for _ in range(2))
    total, start = torch.zeros_like(alpha), replicas * torch.arange(draws)[:, None]
    for step in range(steps):
        order = (torch.rand((draws, replicas), generator=generator).argsort(1) + start).flatten()   # groups are neighbours in it
        phi, delta = phi[order], delta[order]
        phis, deltas = (v.view(-1, n, len(alpha)) for v in (phi, delta))
        mean = phis.mean(1, keepdim=True)
        deltas.mul_(alpha).sub_(gamma * phis).add_((gamma - gamma * pull) * mean)                   # Eq. 2
        phi += delta                                                                                # Eq. 3
        for v in (phi.view(draws, replicas, -1), delta.view(draws, replicas, -1)):
            v -= v.mean(1, keepdim=True)
        scale = ((phi.square().mean(0) + delta.square().mean(0)) / 2).sqrt().clamp(min=1e-6)        # alpha 0, gamma 1, n = N: all gone at once
        phi /= scale
        delta /= scale
        if step >= steps // 2:
            total += scale.log()
    return total / (steps - steps // 2)


def noisy_quadratic(omega, gamma, generator, n=2, alpha=0.5, beta=0.7, m=5, replicas=64, dims=64, burn_in=2000, steps=8000):
    """E V(phi - mean), V(mean) and the same by `stationary`, for each (omega, gamma), all driven by the same draws.

    Loss 1/2 (theta - c)^T A (theta - c), c ~ N(0, 1) fresh at every inner step and replica, A diagonal from 1/2 to 2.
    """
    A = torch.logspace(-1, 1, dims, 2.0)[:, None]
    phi, delta = torch.zeros(replicas, dims, len(omega)), torch.zeros(replicas, dims, len(omega))
    spread, mean_square = torch.zeros(len(omega)), torch.zeros(len(omega))
    for step in range(burn_in + steps):
        order = torch.randperm(replicas, generator=generator)
        phi, delta, theta = phi[order], delta[order], phi[order]
        for _ in range(m):
            theta.lerp_(torch.randn((replicas, dims, 1), generator=generator), omega * A)           # theta - omega A (theta - c)
        phis, deltas, thetas = (v.view(-1, n, dims, len(omega)) for v in (phi, delta, theta))
        mean = phis.mean(1, keepdim=True)
        deltas.mul_(alpha).add_(thetas.mean(1, keepdim=True) - mean, alpha=beta).sub_(gamma * (phis - mean))
        phi += delta
        if step >= burn_in:
            spread += phi.var(0, correction=0).mean(0)
            mean_square += phi.mean(0).square().mean(0)
    shrink = (1 - omega * A).double()
    pull, noise = 1 - shrink**m, (omega * A)**2 * (1 - shrink**(2 * m)) / (1 - shrink**2)
    expected = (stationary(alpha, contraction(replicas, n), beta, gamma, pull, noise * (1 - 1 / replicas)),
                stationary(alpha, 0, beta, gamma, pull, noise / replicas))
    return [v / steps for v in (spread, mean_square)] + [v.mean(0) for v in expected]


def stability(o, replicas=64, pulls=(0.0, 0.3)):
    """Where the differences between replicas die out over (alpha, gamma), beside the bounds, and how large noise keeps them."""
    generator = torch.Generator().manual_seed(o.seed)
    alphas, gammas = torch.arange(20) * 0.05, torch.arange(80) * 0.05 + 0.025
    alpha, gamma = (v.flatten() for v in torch.meshgrid(alphas, gammas, indexing="ij"))
    result = dict(replicas=replicas, pulls=pulls, alphas=alphas.tolist(), gammas=gammas.tolist(), default=(0.5, 0.7), groups={})
    for n in tqdm((2, 4, replicas), desc="maps", dynamic_ncols=True):
        k, (low, high) = contraction(replicas, n), paper_window(alpha, n)
        row = result["groups"][n] = dict(bound=gamma_bound(alphas, n).tolist(), window=[w.tolist() for w in paper_window(alphas, n)], exact={}, crossing={})
        for pull in pulls:
            rate = growth(alpha, gamma, n, pull, generator, replicas)
            by_alpha, exact = rate.view(len(alphas), -1), exact_bound(alphas, k, pull)
            after = (by_alpha > 0).int().argmax(1, keepdim=True)                # the first gamma that grows
            before, there = (by_alpha.gather(1, i)[:, 0] for i in (after - 1, after))
            crossing = gammas[after[:, 0]] - 0.05 * there / (there - before)
            row["exact"][pull], row["crossing"][pull] = exact.tolist(), crossing.tolist()
            row.setdefault("crossing_off", {})[pull] = float((crossing - exact).abs().max())
            if pull:
                continue
            theory = torch.linalg.eigvals(moment_matrix(alpha, k, gamma, gamma)).abs().amax(-1).log() / 2
            grows, inside, apart = rate > 0, (low < gamma) & (gamma < high), (rate - theory).abs()
            row.update(rate=[[round(x, 3) for x in r] for r in by_alpha.tolist()], rate_off=[float(apart.median()), float(apart.quantile(0.99))])
            for name, bound in (("bound_holds", gamma_bound(alpha, n)), ("exact_holds", exact_bound(alpha, k))):
                wrong = grows != (gamma > bound)
                row[name] = dict(share=1 - float(wrong.double().mean()), wrong=int(wrong.sum()), grows_below=int((grows & wrong).sum()),
                                 farthest=float(((gamma - bound).abs() * wrong).max()))
            row["window_fails"] = dict(inside=int(inside.sum()), inside_grows=int((inside & grows).sum()),
                                       decays=int((~grows).sum()), outside_decays=int((~inside & ~grows).sum()))
    m, omegas, scan = 5, torch.logspace(-3.4, -0.7, 10), 0.15 * torch.arange(2, 10)
    omega, gamma = torch.cat([omegas, torch.full_like(scan, 2e-3)]), torch.cat([torch.full_like(omegas, 0.7), scan])
    names, values = ("spread", "mean", "spread_expected", "mean_expected"), noisy_quadratic(omega, gamma, generator, m=m, replicas=replicas)
    result["noise"] = dict(m=m, omega=omegas.tolist(), **{name: v[:10].tolist() for name, v in zip(names, values)}, slopes={})
    result["scan"] = dict(omega=2e-3, gamma=scan.tolist(), spread=values[0][10:].tolist(), spread_expected=values[2][10:].tolist())
    for name, v in zip(names, values):
        x, y = omegas.log().tolist(), v[:10].double().log().tolist()
        result["noise"]["slopes"][name] = dict(small=statistics.linear_regression(x[:4], y[:4]).slope, largest=(y[-1] - y[-2]) / (x[-1] - x[-2]))
    return result


# ---------------------------------------------------------------- measured


class HalfWire(NoLoCo):
    """NoLoCo that blocks on half the bytes: Delta in bf16, with phi ahead in fp32 (1.5 times the bytes in all). Here only to learn its speed."""

    def exchange(self):
        if "own" not in self.buffers:
            self.buffers["own"] = torch.empty_like(self.theta, dtype=torch.bfloat16)
        for own, theta, phi in zip(*(v.split(PIECE) for v in (self.buffers["own"], self.theta, self.phi))):
            own.copy_(theta - phi)
        Deltas, works = self.post("Delta", self.buffers["own"], self.group(self.steps // self.inner_steps - 1))
        phis, more = self.ahead
        for work in works + more:
            work.wait()
        return list(Deltas.values()), list(phis.values())

    def outer_step(self, Deltas, phis):
        vectors, piece = (self.theta, self.phi, self.delta, *Deltas, *phis), self.theta.numel() if self.theta.is_cuda else PIECE
        for theta, phi, delta, *others in zip(*(v.split(piece) for v in vectors)):
            half = [v.to(theta.device, torch.float32) for v in others]
            sum_Delta, sum_phi = (total(v, theta.device) for v in (half[:len(Deltas)], half[len(Deltas):]))
            outer_update(phi, delta, sum_Delta, sum_phi / len(Deltas), self.alpha, self.beta / len(Deltas), self.gamma)
            theta.copy_(phi)


def measure(o, job):
    """The whole outer step of each method beside the floors below it, interleaved; a time is that of the slowest rank."""
    rank, world, device, size, tensors = job.rank, job.world, job.device, int(o.params or 57e6), 32
    cuts = [size * (i + 1) // tensors - size * i // tensors for i in range(tensors)]
    params = [torch.nn.Parameter(torch.randn(cut, device=device).mul_(0.02)) for cut in cuts if cut]
    theta, grad = flatten(params)
    dist.broadcast(theta, 0)        # NoLoCo expects equal weights at the start
    diloco = DiLoCo(params, inner_steps=1)
    noloco = NoLoCo(params, inner_steps=1, seed=o.seed)
    early, late, half = (kind(params, inner_steps=1, gamma=0.9, seed=o.seed) for kind in (NoLoCo, NoLoCo, HalfWire))
    send_phi = {outer: outer.send_ahead for outer in (early, late, half)}
    for outer in send_phi:          # inner steps hide what travels ahead: so that it does not disturb what is timed, we say when it is sent
        outer.send_ahead = lambda: None
    for other in (diloco, late, early, half):       # one set of vectors: what is in them does not change the time
        other.phi, other.delta, other.buffers = noloco.phi, noloco.delta, noloco.buffers
    bf16, ring = torch.empty_like(theta, dtype=torch.bfloat16), 2 * (world - 1) * theta.nbytes // world

    def all_reduce(divide):
        dist.all_reduce(grad)
        if divide:
            grad.div_(world)

    def bare(**vectors):
        for work in [work for name, vector in vectors.items() for work in noloco.post(name, vector, noloco.group(noloco.steps))[1]]:
            work.wait()

    def arrive(outer):
        """Send phi ahead and wait for it."""
        send_phi[outer]()
        vectors, works = outer.ahead
        for work in works:
            work.wait()
        outer.ahead = vectors, []

    rows = {    # name: (what is timed, what comes before it, who counts the bytes or their number, the floor)
        "memcpy of theta": (lambda: grad.copy_(theta), None, 0, None),
        "exchange of theta": (lambda: bare(theta=theta), None, noloco, None),
        "exchange of theta and phi": (lambda: bare(theta=theta, phi=noloco.phi), None, noloco, None),
        "exchange of Delta in bf16": (lambda: bare(Delta=bf16), None, noloco, None),
        "all-reduce of theta": (lambda: all_reduce(False), lambda: grad.copy_(theta), ring, None),
        "DDP: gradient": (lambda: all_reduce(True), None, ring, "all-reduce of theta"),
        "DiLoCo": (diloco.step, None, diloco, "all-reduce of theta"),
        "NoLoCo": (noloco.step, None, noloco, "exchange of theta"),
        "NoLoCo, gamma != beta, phi ahead": (early.step, lambda: arrive(early), early, "exchange of theta"),
        "NoLoCo, gamma != beta, phi not ahead": (lambda: (send_phi[late](), late.step()), None, late, "exchange of theta and phi"),
        "NoLoCo, Delta in bf16, phi ahead": (half.step, lambda: arrive(half), half, "exchange of Delta in bf16"),
    }
    count = lambda source: source if isinstance(source, int) else source.bytes_sent
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    times, sent = torch.zeros(len(rows), o.trials + 1, dtype=torch.float64), torch.zeros(len(rows), 2, dtype=torch.float64)
    load = os.getloadavg()[0]
    for trial in tqdm(range(o.trials + 1), desc="measuring", disable=rank != 0, dynamic_ncols=True):    # the first warms up and is not counted
        for i, (run, before, source, _) in enumerate(rows.values()):
            theta.mul_(1.001)       # so that Delta is not zero
            start = count(source)
            if before:
                before()
            ready = count(source)
            wait()
            dist.barrier()
            clock = time.perf_counter()
            run()
            wait()
            times[i, trial] = time.perf_counter() - clock
            sent[i] = torch.tensor([source if isinstance(source, int) else count(source) - ready, ready - start])
    slowest = torch.cat([times[:, 1:], sent], 1).to(device if job.nccl else "cpu")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    if rank:
        return
    result = dict(replicas=world, params=size, bytes_of_theta=theta.nbytes, trials=o.trials, load_before=load, **machine(device), rows={})
    for (name, (*_, floor)), row in zip(rows.items(), slowest.tolist()):
        result["rows"][name] = dict(seconds=row[:-2], bytes=int(row[-2]), bytes_ahead=int(row[-1]), floor=floor)
    table = result["rows"]
    ratio = lambda a, b: statistics.median(x / y for x, y in zip(table[a]["seconds"], table[b]["seconds"]))
    print(f"{world} processes, {size / 1e6:g}M parameters, {result['backend']}, {result['device']}, torch {result['torch']}: "
          f"slowest rank, median [quartiles] of {o.trials} trials; ratios are medians of the trials'")
    print(f"{'':38}{'seconds':>8} {'[quartiles]':>16}{'MB sent':>9}{'MB ahead':>9}{'MB/s':>7}{'DiLoCo / it':>13}{'it / floor':>11}")
    for name, row in table.items():
        low, middle, high = quartiles(row["seconds"])
        row.update(median=middle, quartiles=[low, high], diloco_over_it=ratio("DiLoCo", name), over_floor=row["floor"] and ratio(name, row["floor"]))
        print(f"{name:38}{middle:8.4f} {f'[{low:.4f} {high:.4f}]':>16}{row['bytes'] / 1e6:9.1f}{row['bytes_ahead'] / 1e6:9.1f}"
              f"{row['bytes'] / middle / 1e6:7.0f}{row['diloco_over_it']:13.2f}" + (f"{row['over_floor']:11.2f}" if row["floor"] else ""))
    result["all_reduce_over_exchange"] = ratio("all-reduce of theta", "exchange of theta")
    print(f"the exchange is {result['all_reduce_over_exchange']:.2f}x faster than the all-reduce "
          f"(bytes alone: {ring / table['exchange of theta']['bytes']:.2f}x)")
    save(o, f"sync_measured_{world}", result)


def quartiles(x):
    return statistics.quantiles(x, n=4, method="inclusive") if len(x) > 1 else x * 3


def machine(device):
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{os.cpu_count()} cores {platform.machine()}"
    return dict(device=name, backend=dist.get_backend(), torch=torch.__version__, python=platform.python_version())


# ---------------------------------------------------------------- emulated links


class Wire:
    """Messages between processes of one machine that take a drawn time: each says when it was sent, and its receiver waits until it is due."""

    def __init__(self, rank):
        self.rank, self.inbox, self.sent = rank, {}, []

    def expect(self, source, tag, like):
        """Post the receive ahead: a Gloo send ends only once it is there."""
        if source != self.rank:
            message = like.new_empty(len(like) + 1)
            self.inbox[tag] = message, dist.irecv(message, source, tag=tag)

    def send(self, vector, to, tag):
        """Returns when it was sent. A message to itself (a leaf whose parent is on the same process) only takes its time."""
        message = torch.cat([vector.new_tensor([time.perf_counter()]), vector])
        if to == self.rank:
            self.inbox[tag] = message, None
        else:
            self.sent.append((dist.isend(message, to, tag=tag), message))
        return float(message[0])

    def receive(self, tag, takes):
        message, work = self.inbox.pop(tag)
        if work:
            work.wait()
        sleep_until(float(message[0]) + takes)
        return message[1:]

    def finish(self):
        for work, _ in self.sent:
            work.wait()
        self.sent.clear()


def sleep_until(moment):
    time.sleep(max(0.0, moment - time.perf_counter()))


def real_tree(wire, n, up, down, vector):
    """tree_all_reduce with messages: process r is leaf n + r and, from r = 1 on, inner node r of the heap; tags are heap indices."""
    rank, leaf = wire.rank, n + wire.rank
    host = lambda node: node % n if node >= n else node
    children = (2 * rank, 2 * rank + 1) if rank else ()
    for node in children:
        wire.expect(host(node), node, vector)
    for node in ([rank] if rank > 1 else []) + [leaf]:
        wire.expect(host(node // 2), 2 * n + node, vector)
    wire.send(vector, host(leaf // 2), leaf)
    if rank:
        total = sum(wire.receive(node, up[node]) for node in children)
        if rank > 1:
            wire.send(total, host(rank // 2), rank)
            total = wire.receive(2 * n + rank, down[rank])
        for node in children:
            wire.send(total, host(node), 2 * n + node)
    return wire.receive(2 * n + leaf, down[leaf]) / n


def real_pair(wire, partner, t, vector):
    """pair_average with messages: two exchanges, each over when both messages have arrived."""
    for k in range(len(t)):
        wire.expect(partner, k, vector)
    for k, takes in enumerate(t):
        sent = wire.send(vector, partner, k)
        other = wire.receive(k, takes[partner])
        sleep_until(sent + takes[wire.rank])
    return (vector + other) / 2


def emulate(o, job):
    """Tree and pair as real messages that take drawn times, beside the simulation of the same draws."""
    rank, n, generator, size = job.rank, job.world, torch.Generator().manual_seed(o.seed), int(o.params or 25e3)
    latency, spread, trials = (50.0 if o.latency_ms is None else o.latency_ms) / 1000, o.latency_std or 0.0, o.trials
    extra = 32 * size / (o.mbit[0] * 1e6) if o.mbit else 0.0
    up, down = (messages((2 * n, trials), spread, generator).mul_(latency).add_(extra).double() for _ in range(2))
    t = messages((2, n, trials), spread, generator).mul_(latency).add_(extra).double()
    groups = [random_groups(range(n), 2, trial, o.seed) for trial in range(trials)]
    pairs = torch.stack([pair_average(t[:, torch.tensor(groups[k]), k].transpose(1, 2)) for k in range(trials)], 1)     # (pairs, trials)
    simulated = dict(tree=tree_all_reduce(up, down).tolist(), pair=pairs.mean(0).tolist())
    wire, vector = Wire(rank), torch.full((max(1, size // 2),), float(rank), dtype=torch.float64)       # the bytes of `size` fp32 numbers
    times = torch.zeros(2, trials, dtype=torch.float64)
    for k in tqdm(range(trials), desc="emulating", disable=rank != 0, dynamic_ncols=True):
        partner = sum(next(g for g in groups[k] if rank in g)) - rank
        for i in range(2):
            dist.barrier()
            start = torch.tensor(time.perf_counter() + 0.05 + 0.002 * n, dtype=torch.float64)       # all begin at once, when all know when
            dist.broadcast(start, 0)
            sleep_until(float(start))
            if i == 0:
                average, right = real_tree(wire, n, up[:, k].tolist(), down[:, k].tolist(), vector), (n - 1) / 2
            else:
                average, right = real_pair(wire, partner, t[:, :, k].tolist(), vector), (rank + partner) / 2
            times[i, k] = time.perf_counter() - float(start)
            wire.finish()
            if not torch.all(average == right):
                raise RuntimeError(f"the average is {average[0]}, not {right}")
    tree, pair = times[0].contiguous(), times[1].contiguous()
    dist.all_reduce(tree, op=dist.ReduceOp.MAX)     # the last replica ends it; of pairs the mean
    dist.all_reduce(pair)
    if rank:
        return
    measured = dict(tree=tree.tolist(), pair=(pair / n).tolist())
    result = dict(replicas=n, latency_seconds=latency, spread=spread, mbit=o.mbit and o.mbit[0], bytes=4 * size, trials=trials,
                  load_after=os.getloadavg()[0], **machine(torch.device("cpu")), measured=measured, simulated=simulated)
    print(f"{n} processes, {trials} trials, {1000 * latency:g} ms, std(t)/t_c {spread:g}, {4 * size} bytes"
          + (f" at {o.mbit[0]:g} Mbit/s" if o.mbit else ""))
    for kind in ("tree", "pair"):
        a, b = statistics.mean(measured[kind]), statistics.mean(simulated[kind])
        worst = max(abs(x / y - 1) for x, y in zip(measured[kind], simulated[kind]) if y)
        result[f"{kind}_measured_over_simulated"], result[f"{kind}_worst_trial"] = a / b, worst
        print(f"{kind}: measured {a:.4f} s, simulated from the same draws {b:.4f} s: {100 * (a / b - 1):+.1f}%, worst trial {100 * worst:.1f}% off")
    print(f"tree / pair: measured {statistics.mean(tree.tolist()) / statistics.mean(measured['pair']):.2f}, "
          f"simulated {statistics.mean(simulated['tree']) / statistics.mean(simulated['pair']):.2f}, log2 n = {math.log2(n):.2f}")
    save(o, f"sync_emulated_{n}", result)


# ---------------------------------------------------------------- on paper


def on_paper(params, n, mbit, latency, step_seconds):
    """{method: bytes sent per rank, seconds of a synchronisation, its share of training time, bytes of memory per rank}: (5) with constant t."""
    B, rate = 4 * params, mbit * 1e6 / 8
    reduce = 2 * (n - 1) / n * B, 2 * math.ceil(math.log2(n)) * latency + 2 * (n - 1) / n * B / rate
    # theta, gradient and Adam's two moments take 16 bytes a parameter; phi and delta 8 more; NoLoCo's receive buffer 4
    rows = {"DDP": (1, *reduce, 16), "DiLoCo": (100, *reduce, 24), "NoLoCo": (50, B, latency + B / rate, 28)}
    return {name: dict(bytes=b, seconds=s, share=s / (s + m * step_seconds), memory=each * params) for name, (m, b, s, each) in rows.items()}


def paper_table(o):
    latency = (50.0 if o.latency_ms is None else o.latency_ms) / 1000
    print(f"fp32, {1000 * latency:g} ms, inner steps of {o.step_seconds:g} s; DDP (each step) / DiLoCo (each 100) / NoLoCo (each 50, theta only)\n")
    print("| model | replicas | Mbit/s | GB sent per rank | seconds | share of training time, % | GB of memory per rank |\n" + 7 * "|---" + "|")
    for model, n, mbit in itertools.product(o.model, o.replicas or (64, 1024), o.mbit or (1000.0,)):
        params = o.params or PAPER[model]
        rows = on_paper(params, n, mbit, latency, o.step_seconds).values()
        columns = [" / ".join(f"{row[key] * scale:{form}}" for row in rows)
                   for key, scale, form in (("bytes", 1e-9, ".2f"), ("seconds", 1, ".4g"), ("share", 100, ".1f"), ("memory", 1e-9, ".1f"))]
        print(f"| {model}, {params / 1e6:g}M | {n} | {mbit:g} | {' | '.join(columns)} |")


# ---------------------------------------------------------------- the trainer, beside others


def medians(works, trials, job=None, warm=1):
    """{name: seconds of each trial} of functions, interleaved; with several processes a time is that of the slowest rank."""
    times = {name: [] for name in works}
    for trial in range(warm + trials):
        for name, work in works.items():
            if job:
                dist.barrier()
            start = time.perf_counter()
            work()
            seconds = torch.tensor(time.perf_counter() - start)
            if job:
                dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
            times[name] += [float(seconds)] if trial >= warm else []
    return times


def ours_over(times, ours, other):
    """Tokens per second of ours over the other's: [median, lower, upper quartile] of the trials' ratios."""
    low, middle, high = quartiles([b / a for a, b in zip(times[ours], times[other])])
    return [middle, low, high]


def hugging_face(config, **kwargs):
    """transformers' LlamaForCausalLM of the same configuration and weights."""
    from transformers import LlamaConfig, LlamaForCausalLM
    other = LlamaForCausalLM(LlamaConfig(**vars(config), attn_implementation="sdpa", use_cache=False, **kwargs))
    other.load_state_dict(Llama(config).state_dict())
    return other


def speed_model(o, job):
    """Forward and backward of 2 microbatches (train.py's default), then Adam, in one process, one thread: ours, Hugging Face's with the same
    fused Adam, both compiled too."""
    torch.set_num_threads(1)
    rows = []
    for hidden, T in itertools.product((128, 512), (128, 512)):
        config, tokens = Config(hidden_size=hidden, intermediate_size=4 * hidden), torch.randint(256, (4, T + 1))
        x, y, works = tokens[:, :-1], tokens[:, 1:], {}
        for compiled in (False, True):
            model, other = Llama(config), hugging_face(config)
            theta, grad = flatten(model.parameters())
            adam = train.adam_state(theta)
            theirs = torch.optim.Adam(other.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
            if compiled:
                for layer in (*model.model.layers.values(), *other.model.layers):
                    layer.compile()

            def ours(model=model, theta=theta, grad=grad, adam=adam):
                grad.zero_()
                for _ in range(2):
                    (model.loss(model.blocks(model.embed(x)), y) / y.numel()).backward()
                train.inner_step(theta, grad, adam, 1e-4)

            def hf(other=other, theirs=theirs):
                theirs.zero_grad()
                for _ in range(2):
                    F.cross_entropy(other(input_ids=x).logits.flatten(0, 1), y.flatten()).backward()
                theirs.step()
            works.update({"ours, compiled": ours, "theirs, compiled": hf} if compiled else {"ours": ours, "theirs": hf})
        times = medians(works, o.trials, warm=2)
        row = dict(hidden=hidden, T=T, tokens_per_second={k: 2 * y.numel() / statistics.median(t) for k, t in times.items()},
                   ratio=ours_over(times, "ours", "theirs"), ratio_compiled=ours_over(times, "ours, compiled", "theirs, compiled"))
        print("model", row, flush=True)
        rows.append(row)
    return rows


def rig(job, stages, config, shape, microbatches, timeout=0.0, route=skippipe.random_paths):
    """step(k): one inner step of train.py on random tokens, on `stages`; ranks outside of them do nothing. Also its Pipeline, model and tokens."""
    stage = next((s for s, ranks in enumerate(stages) if job.rank in ranks), None)
    if stage is None:
        return lambda step: None, None, None, None
    depth = config.num_hidden_layers // len(stages)
    model = Llama(config, range(stage * depth, stage * depth + depth), ends=stage == 0)
    theta, grad = flatten(model.parameters())
    job = copy.copy(job)
    job.store, job.timeout = dist.PrefixStore(f"rig {timeout} {route.__name__}", job.store) if job.world > 1 else None, timeout
    adam, pipeline = train.adam_state(theta), train.Pipeline(model, job, stages, (*shape, config.hidden_size), torch.float32)
    data = torch.randint(config.vocab_size, (shape[0], shape[1] + 1))

    def step(k):
        pipeline.begin(k)
        paths = route(stages, microbatches, k, 0)
        grad.zero_()
        *_, tokens = pipeline.run(paths, {u: data for u, path in enumerate(paths) if path[0] == job.rank})
        grad.div_(max(1, tokens))
        train.inner_step(theta, grad, adam, 1e-4)
    return step, pipeline, model, data


def fixed_paths(stages, microbatches, *_):
    return skippipe.full_paths(stages, microbatches)


def torch_1f1b(job, config, shape, microbatches):
    """step(k): the same on torch.distributed.pipelining, two pipelines 0 -> 2 and 1 -> 3; there the last stage holds norm, head and loss."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    stage, groups = job.rank // 2, [dist.new_group([i, i + 2]) for i in range(2)]
    half = config.num_hidden_layers // 2
    model = Llama(config, range(stage * half, stage * half + half))
    if stage:
        del model.model.embed_tokens
        model.forward = lambda x: model.logits(model.blocks(x))
    else:
        del model.model.norm, model.lm_head
        model.forward = lambda tokens: model.blocks(model.embed(tokens))
    theta, grad = flatten(model.parameters())
    adam, data = train.adam_state(theta), torch.randint(config.vocab_size, (microbatches * shape[0], shape[1] + 1))
    loss = lambda logits, y: F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum")
    schedule = Schedule1F1B(PipelineStage(model, stage, 2, job.device, group=groups[job.rank % 2]), microbatches, loss, scale_grads=False)

    def step(k):
        grad.zero_()
        schedule.step(*(() if stage else (data[:, :-1],)), target=data[:, 1:] if stage else None, return_outputs=False)
        grad.div_(data[:, 1:].numel())
        train.inner_step(theta, grad, adam, 1e-4)
    return step


def speed_pipeline(o, job):
    """4 processes: two pipelines of 2 stages, beside 2 processes with the whole model and beside torch's 1F1B; 16 sequences of 128 tokens a step."""
    config, shape, microbatches, steps = Config(), (4, 128), 2, 8
    kinds = {"2 x 2": rig(job, [[0, 1], [2, 3]], config, shape, microbatches, 60.0)[0],           # as train.py runs it
             "2 x 2, fixed": rig(job, [[0, 1], [2, 3]], config, shape, microbatches, 60.0, fixed_paths)[0],        # as torch's
             "2 x 2, sync-timeout 0": rig(job, [[0, 1], [2, 3]], config, shape, microbatches)[0],
             "no pipeline": rig(job, [[0, 1]], config, shape, microbatches)[0],
             "torch 1F1B": torch_1f1b(job, config, shape, microbatches)}
    times = medians({name: lambda step=step: [step(k) for k in range(steps)] for name, step in kinds.items()}, o.trials, job)
    return dict(tokens_per_second={k: steps * 2 * microbatches * shape[0] * shape[1] / statistics.median(t) for k, t in times.items()},
                over_no_pipeline=ours_over(times, "2 x 2", "no pipeline"), over_fragile=ours_over(times, "2 x 2", "2 x 2, sync-timeout 0"),
                over_1f1b=ours_over(times, "2 x 2", "torch 1F1B"),
                fixed_over_1f1b=ours_over(times, "2 x 2, fixed", "torch 1F1B"))


def speed_idle(o, job):
    """One pipeline of 2 stages, a core for each rank: the share of an iteration that a rank does not compute, beside what `simulate` says.

    The simulator gets the message and forward times that train.py measures, and the ratios of loss and backward to them from here.
    """
    stages, shape, microbatches = [[0], [1]], (4, 128), 4
    step, pipeline, model, data = rig(job, stages, Config(), shape, microbatches)
    delay, compute = train.measure(pipeline, stages, job)
    x, seconds = torch.randn(*shape, 128), {}
    for name, start, work in (("forward", lambda: x.requires_grad_(), model.blocks),
                              ("backward", lambda: model.blocks(x.requires_grad_()), lambda y: y.backward(x.detach())),
                              ("loss", lambda: x.requires_grad_(), lambda x: job.rank or model.loss(x, data[:, 1:]).backward())):
        trials = []
        for _ in range(o.trials):
            given, begin = start(), time.perf_counter()
            work(given)
            trials.append(time.perf_counter() - begin)
        seconds[name] = statistics.median(trials)
    paths, idle = skippipe.full_paths(stages, microbatches), []
    batches = {u: data for u in range(microbatches)} if job.rank == 0 else {}
    for trial in range(o.trials):
        dist.barrier()
        wall, busy = time.perf_counter(), time.thread_time()
        pipeline.run(paths, batches)
        idle.append((time.thread_time() - busy, time.perf_counter() - wall))
    rows = job.collect("idle", [seconds["forward"], seconds["backward"], seconds["loss"], statistics.median(1 - b / w for b, w in idle)])
    if job.rank:
        return None
    rows = list(rows.values())
    chains = [skippipe.chain(path) for path in paths]
    network = skippipe.Network(delay, [row[0] for row in rows], stages, memory=microbatches)
    with mock.patch.dict(skippipe.WORK, backward=sum(r[1] for r in rows) / sum(r[0] for r in rows), loss=rows[0][2] / rows[0][0]):
        result = skippipe.simulate(network, paths, order=[train.tasks(chains, r) for r in range(2)])
    works = [sum(end - start for node, _, _, start, end in result.timeline if node == r) for r in range(2)]
    return dict(measured=[row[3] for row in rows], simulated=[1 - w / result.makespan for w in works], makespan=result.makespan,
                iteration=statistics.median(w for _, w in idle))


def speed_sync(o, job):
    """4 replicas of the tiny model: 50 inner steps with and without the outer step; how long phi blocks when sent early or late."""
    step, _, model, _ = rig(job, [[0, 1, 2, 3]], Config(), (4, 128), 2)
    outer, blocked, alone = NoLoCo(model.parameters(), store=dist.PrefixStore("sync", job.store)), {"early": [], "late": []}, {}     # as in train.py

    def noloco():
        for k in range(50):
            step(k)
            outer.step()
    times = medians({"noloco": noloco, "local": lambda: [step(k) for k in range(50)]}, max(1, o.trials // 2), job)
    kinds = {"survives": NoLoCo(model.parameters(), inner_steps=1, store=dist.PrefixStore("one", job.store)),
             "fragile": NoLoCo(model.parameters(), inner_steps=1)}
    alone = medians({name: kind.step for name, kind in kinds.items()}, 4 * o.trials, job)
    for name in 2 * o.trials * list(blocked):
        outer = NoLoCo(model.parameters(), gamma=0.9, inner_steps=3)
        if name == "late":
            send, outer.send_ahead = outer.send_ahead, lambda: None
        for k in range(2):
            step(k)
            outer.step()
        step(2)
        dist.barrier()
        start = time.perf_counter()
        if name == "late":
            send()
        outer.steps = 3
        outer.exchange()
        blocked[name].append(time.perf_counter() - start)
    rows = job.collect("sync", {name: statistics.median(seconds) for name, seconds in blocked.items()})
    low, middle, high = quartiles([a / b - 1 for a, b in zip(times["noloco"], times["local"])])
    return rows and dict(share=[middle, low, high], fifty_steps=statistics.median(times["local"]),
                         blocked={name: max(row[name] for row in rows.values()) for name in blocked},
                         outer_step={name: statistics.median(seconds) for name, seconds in alone.items()})


FLOOR = "import time, torch, torch.distributed as dist\ndist.init_process_group('gloo')\nprint(f'at {time.time()} {dist.get_rank()}\\n', end='', flush=True)"
FIRST = """import sys, time
sys.path.insert(0, sys.argv.pop(1))
import train
run = train.Pipeline.run
def timed(*args, **kwargs):         # called again: the first step, with its Adam, is over
    print(f'at {time.time()} {args[0].rank}\\n', end='', flush=True)
    return run(*args, **kwargs)
train.Pipeline.run = timed
train.main()"""


def speed_start(o, job):
    """From launch until the last of 8 processes has done its first step, beside bare torchrun, import torch and a process group."""
    seconds = {"floor": [], "begins": [], "done": []}
    with tempfile.TemporaryDirectory() as folder:
        for name, script in (("floor", FLOOR), ("first", FIRST)):
            Path(folder, name + ".py").write_text(script)
        for trial in range(max(1, o.trials // 2)):
            for name, args in (("floor", []), ("first", [str(Path(__file__).parent), "--stages", "4,4", "--steps", "2", "--eval-sequences", "4"])):
                start = time.time()
                out = torchrun(8, f"{name}.py", *args, cwd=folder, capture_output=True, text=True).stdout
                at = {}
                for line in out.splitlines():
                    if line.startswith("at "):
                        at.setdefault(line.split()[2], []).append(float(line.split()[1]) - start)
                if name == "floor":
                    seconds["floor"].append(max(t[0] for t in at.values()))
                else:               # each rank's first two calls; evaluation comes later
                    seconds["begins"].append(max(t[0] for t in at.values()))
                    seconds["done"].append(max(t[1] for t in at.values()))
    return {**{name: statistics.median(t) for name, t in seconds.items()},
            "beyond": statistics.median(b - a for a, b in zip(seconds["floor"], seconds["done"]))}


def memory(config, tokens, microbatches, vectors=7, layers=None):
    """Bytes of a rank with both ends and `layers` layers: theta, gradient, Adam's two, phi, delta and a receive buffer (`vectors`), the activations
    of this many microbatches in flight, `tokens` tokens each, and while a loss is taken back its logits and the head's own gradient.

    A layer keeps of a token, in floats: x, x / rms(x), norm(x) twice, q, attention's result and its log-sum, k and v, gate, up, silu(gate), their product.
    """
    C, D = config.hidden_size, config.hidden_size // config.num_attention_heads
    layer = 8 * C + 2 * D * config.num_key_value_heads + config.num_attention_heads + 4 * config.intermediate_size + 2
    depth = config.num_hidden_layers if layers is None else layers
    return 4 * (vectors * count_parameters(config)[0] + tokens * (microbatches * depth * layer + config.vocab_size + 2 * C) + C * config.vocab_size)


def speed_memory(o, job):
    """Peak resident memory beyond what the process had before its model, 2 replicas, beside `memory`."""
    rows = {}
    warm_up = {**train.MODELS["tiny"], "hidden": 32, "mlp": 32}     # libraries load what they need at first use: that is not the model's
    for name, batch in (("warm-up", 1), ("tiny", 4), ("small", 1)):
        c = train.MODELS.get(name, warm_up)
        config = Config(c["vocab"], c["hidden"], c["mlp"], c["layers"], c["heads"], c["heads"])
        before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
        step, _, model, _ = rig(job, [[0, 1]], config, (batch, c["seq_len"]), 1)
        outer = NoLoCo(model.parameters(), inner_steps=1)
        for k in range(2):
            step(k)
            outer.step()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
        rows[name] = dict(measured=peak, formula=memory(config, batch * c["seq_len"], 1))
        del step, model, outer, _
    del rows["warm-up"]
    found = job.collect("memory", {name: row["measured"] for name, row in rows.items()})
    return found and {name: dict(row, measured=max(f[name] for f in found.values())) for name, row in rows.items()}


PARTS = {"model": (speed_model, 1), "pipeline": (speed_pipeline, 4), "idle": (speed_idle, 2), "sync": (speed_sync, 4), "start": (speed_start, 1),
         "memory": (speed_memory, 2)}


def torchrun(processes, *command, **kwargs):
    return subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), *command],
                          check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, **kwargs)


def trainer(o, job):
    """Each part in turn, with the processes that it needs; results/speed.json keeps the parts that are not run again."""
    path = Path(o.out, "results", "speed.json")
    for part in o.trainer:
        function, processes = PARTS[part]
        if processes != job.world:
            torchrun(processes, __file__, "--trainer", part, "--trials", str(o.trials), "--out", o.out)
            continue
        load = os.getloadavg()[0]
        result = function(o, job)
        if job.rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            found = json.loads(path.read_text()) if path.exists() else {}
            found[part] = dict(result=result, trials=o.trials, load_before=load, torch=torch.__version__, cores=os.cpu_count())
            path.write_text(json.dumps(found, indent=1) + "\n")
            print(part, json.dumps(result), flush=True)
    if job.world == 1 and len(o.trainer) == len(PARTS):
        speed_table({part: row["result"] for part, row in json.loads(path.read_text()).items()})


def speed_table(r):
    """The README's table, of what `trainer` found."""
    times = lambda ratio: "{:.2f}x [{:.2f}, {:.2f}]".format(*ratio)
    print("| what | measured | aim |\n|---|---|---|")
    for row in r["model"]:
        ours, theirs = (row["tokens_per_second"][k] for k in ("ours", "theirs"))
        print(f"| model, hidden {row['hidden']}, T {row['T']}: tokens/s over Hugging Face's (both compiled) "
              f"| {times(row['ratio'])} ({times(row['ratio_compiled'])}), "
              f"{ours:.0f} and {theirs:.0f} tokens/s | 1.0x |")
    print(f"| 2 stages x 2 replicas over 2 processes without a pipeline | {times(r['pipeline']['over_no_pipeline'])} | 0.85x |")
    print(f"| 2 stages x 2 replicas over torch's Schedule1F1B (fixed routes, as torch's) | {times(r['pipeline']['over_1f1b'])} "
          f"({times(r['pipeline']['fixed_over_1f1b'])}) | 1.0x |")
    print("| idle share of ranks 0 and 1, 2 stages x 1 (simulated) | {:.0%}, {:.0%} ({:.0%}, {:.0%}) | |".format(
        *r["idle"]["measured"], *r["idle"]["simulated"]))
    share = r["sync"]["outer_step"]["survives"] / r["sync"]["fifty_steps"]
    print(f"| an outer step over 50 inner steps (50 steps with it over 50 of `local`, less 1) | {share:.2%} "
          "({:+.1%} [{:+.1%}, {:+.1%}]) | 3% |".format(*r["sync"]["share"]))
    print("| an outer step that survives failures (one that does not), all replicas at once | {survives:.4f} s ({fragile:.4f} s) | +0.025 s |".format(
        **r["sync"]["outer_step"]))
    print(f"| 2 x 2: inner steps that survive failures over ones that do not | {times(r['pipeline']['over_fragile'])} | |")
    print("| exchange blocks, phi sent early (late); without a store | {early:.4f} s ({late:.4f} s) | |".format(**r["sync"]["blocked"]))
    print("| launch to first step done, 8 processes (floor) | {done:.1f} s ({floor:.1f} s), {beyond:+.1f} s | +2 s |".format(**r["start"]))
    for name, row in r["memory"].items():
        print(f"| peak memory of a rank, {name} (formula) | {row['measured'] / 1e6:.0f} MB ({row['formula'] / 1e6:.0f} MB) | |")


# ---------------------------------------------------------------- the headline results: runs of train.py, each with three seeds

# Wide enough to learn the default text, small enough that three seeds of everything take hours. No failure is looked for.
SMALL = "--hidden 64 --mlp 256 --heads 2 --eval-every 50 --save-every 1000000".split()
TOGETHER = "--stages 5,3,3,3,3,3 --layers 6 --microbatches 6 --batch 1"
KEPT = ("step", "tokens", "heldout_loss", "weight_spread", "lr", "sync_bytes", "simulated_seconds")       # of metrics.jsonl


def convergence_runs(o):
    """Figs. 2 and 3 and Table 2 of arXiv 2506.10911, and Fig. 4: `local`, where routes alone keep replicas together. The outer settings are train.TINY."""
    def methods(steps):
        common = f"--steps {steps} --layers 2 --warmup 50 --lr 6e-3 --method"
        return {**{name: f"{common} {name.lower()}" for name in ("DDP", "DiLoCo", "NoLoCo", "local")},
                "NoLoCo, warm start": f"{common} noloco --warm-start {steps // 3}",
                "DiLoCo, every 4 steps": f"{common} diloco --inner-steps 4", "NoLoCo, every 2 steps": f"{common} noloco --inner-steps 2",
                "NoLoCo, warm start, every 2 steps": f"{common} noloco --warm-start {steps // 3} --inner-steps 2",
                "NoLoCo, warm start of half, every 2 steps": f"{common} noloco --warm-start {steps // 2} --inner-steps 2"}

    for name, options in methods(o.steps or 1200).items():
        yield f"8x1 {name}", 8, f"{options} --microbatches 1 --batch 8", mean_of_replicas, None
    for name, options in methods(o.steps or 600).items():
        for routing in {"NoLoCo": ("random", "fixed"), "local": ("random", "fixed")}.get(name, () if "," in name else ("fixed",)):
            yield f"4x2 {name}, {routing} routing", 8, f"{options} --microbatches 2 --batch 8 --stages 4,4 --routing {routing}", mean_of_replicas, None


def tuning_runs(o):
    """What the settings of the other parts were chosen by: one grid for both methods, then what might close NoLoCo's gap to DDP."""
    common = "--layers 2 --warmup 50 --microbatches 1 --batch"
    usual = f"--steps {o.steps or 800} {common} 8 --method"
    for rate in ("4e-3", "6e-3", "8e-3", "1.2e-2"):
        yield f"DDP, rate {rate}", 8, f"{usual} ddp --lr {rate}", None, None
    for method, inner in (("DiLoCo", 20), ("NoLoCo", 10)):
        for rate, alpha, beta in (("3e-3", 0, 1.0), ("3e-3", 0.3, 1.0), ("4e-3", 0, 1.0), ("4e-3", 0.3, 0.7), ("4e-3", 0.3, 1.0), ("6e-3", 0, 1.0),
                                  ("6e-3", 0.3, 1.0), ("6e-3", 0.5, 1.0), ("1.2e-2", 0.3, 1.0)):
            yield (f"{method}, rate {rate}, alpha {alpha}, beta {beta}", 8,
                   f"{usual} {method.lower()} --inner-steps {inner} --lr {rate} --alpha {alpha} --beta {beta}", None, None)
    best = f"{usual} noloco --lr 6e-3"
    yield "NoLoCo, rate 6e-3, alpha 0, beta 1.3, gamma 1.0", 8, f"{best} --beta 1.3 --gamma 1.0", None, None
    yield "NoLoCo, every 5 steps", 8, f"{best} --inner-steps 5", None, None
    yield "NoLoCo, every 2 steps", 8, f"{best} --inner-steps 2", None, None
    yield "NoLoCo, warm start of a third", 8, f"{best} --warm-start {(o.steps or 800) // 3}", None, None
    yield "NoLoCo, warm start of a third, every 2 steps", 8, f"{best} --warm-start {(o.steps or 800) // 3} --inner-steps 2", None, None
    for alpha in (0, 0.3):
        yield f"DiLoCo, every 4 steps, alpha {alpha}", 8, f"{usual} diloco --lr 6e-3 --inner-steps 4 --alpha {alpha}", None, None
    yield "DiLoCo, warm start of a third", 8, f"{usual} diloco --lr 6e-3 --warm-start {(o.steps or 800) // 3}", None, None
    half = (o.steps or 800) // 2
    for name, method in (("DDP", "ddp"), ("DiLoCo", "diloco"), ("NoLoCo", "noloco"), ("NoLoCo, warm start of a third", f"noloco --warm-start {half // 3}")):
        yield f"{name}, 4 times the batch, half the steps", 8, f"--steps {half} {common} 32 --lr 6e-3 --method {method}", None, None


def skip_network(stages):
    """Two nodes a stage, spread over the 12 cities: (network, simulated seconds of the slowest stage's all-reduce)."""
    # the published instance cuts the model in 6; nodes get their stages as suits the pipeline without skips
    names, compute = (skippipe.CITIES * 2)[:2 * stages], [0.44 * 6 / stages] * 2 * stages
    delay, times = skippipe.city_delays(names, skippipe.city_links()), dict(memory=3, overhead=0.13, origin_overhead=0.09)
    network = skippipe.Network(delay, compute, skippipe.assign_stages(
        delay, compute, [2] * stages, stages, rounds=2, **times, seconds=None, iterations=300), **times)
    return network, slowest_all_reduce(network, names, skippipe.city_links())[0]


def skip_runs(o):
    """Paths that leave stages out: loss against tokens and against simulated time, then with stages and nodes missing at inference."""
    steps = o.steps or 300
    for stages, skips in ((4, ("0", "0 in order", "25", "25 in order", "50")), (8, ("0", "0 in order", "0 with swaps", "25", "25 in order", "37.5", "50"))):
        network, sync = skip_network(stages)
        links, seconds = keep_links(network, f"headline-links-{stages}.json"), {}
        for skip, _, how in (x.partition(" ") for x in skips):  # 0: DT-FM, else planned; without swapped neighbours where it says "in order"
            name = f"{skip}% skipped" + f", {how}" * bool(how)
            routing = f"--routing {'no-swaps' if how == 'in order' else 'dtfm' if name == '0% skipped' else 'skippipe'} --skip {float(skip) / 100:g}"
            options = f"--layers 8 --lr 4e-3 --microbatches 6 --batch 2 --stages {','.join(['2'] * stages)} --links {links} {routing}"
            seconds[name] = makespan(options, network) + sync
            if skip != "0" or not how:                          # a plan that skips nothing: what it gains is time
                yield f"{stages} stages, {name}", 2 * stages, f"--method ddp --steps {steps} {options}", missing_stages, None
            if name != "0% skipped":
                more = round(steps * seconds["0% skipped"] / seconds[name])
                yield f"{stages} stages, {name}, equal time", 2 * stages, f"--method ddp --steps {more} {options}", missing_stages, None


def seconds_skip():
    """As `seconds_together`."""
    return {f"{stages} stages": (None, skip_network(stages)[1]) for stages in (4, 8)}


def failure_runs(o):
    """A node of a later stage dies in a share of the iterations (see `losing`)."""
    for share in (0, 0.05, 0.1):
        yield (f"{share:.0%} of the iterations", 8, f"--method noloco --steps {o.steps or 300} --lr 4e-3 "
               "--microbatches 6 --batch 2 --stages 2,2,2,2 --layers 8", None, str(share))


def together_runs(o):
    """Both papers at once on the published instance: 20 nodes, 30 microbatches an iteration, 50 inner steps."""
    network, _ = skippipe.published_network()
    steps = o.steps or 400
    common, outer = f"{TOGETHER} --lr 4e-3 --steps", "--inner-steps 50"
    skipping = f"--method noloco {outer} --skip 0.33 --links {keep_links(network, 'headline-links-20.json')}"
    yield "DDP, full pipeline", 20, f"{common} {steps} --method ddp --routing fixed", None, None
    yield "DiLoCo, full pipeline", 20, f"{common} {steps} --method diloco {outer} --routing fixed", None, None
    yield "NoLoCo, random routing", 20, f"{common} {steps} --method noloco {outer}", None, None
    yield "NoLoCo, SkipPipe", 20, f"{common} {steps} {skipping}", None, None
    # within 40% and 100% of DDP's time, and ending with an outer step
    seconds = seconds_together()
    (full, averaging), (_, sync), every = seconds["DDP, full pipeline"], seconds["NoLoCo, SkipPipe"], 50
    swaps, in_order = (makespan(f"{TOGETHER} --links x --skip 0.33 --routing {routing}", network) for routing in ("skippipe", "no-swaps"))
    warm, whole, time = steps // 100 * 50, lambda steps: max(1, int(steps) // every * every), steps * (full + averaging)
    yield ("NoLoCo, SkipPipe, warm start", 20, f"{common} {whole(warm + (0.4 * time - warm * (swaps + averaging)) / (swaps + sync / every))} "
           f"{skipping} --warm-start {warm}", None, None)
    yield "NoLoCo, SkipPipe, DDP's time", 20, f"{common} {whole(time / (swaps + sync / every))} {skipping}", None, None
    yield ("NoLoCo, SkipPipe in order, DDP's time", 20, f"{common} {whole(time / (in_order + sync / every))} {skipping} --routing no-swaps", None, None)
    yield ("NoLoCo, SkipPipe in order, every 10 steps, DDP's time", 20,
           f"{common} {whole(time / (in_order + sync / 10))} {skipping} --routing no-swaps --inner-steps 10", None, None)


def makespan(options, network):
    """Simulated seconds of an iteration on the paths that train.py would plan with these options."""
    return json.loads(train.plan_paths(train.parse(options.split(), len(network.delay)), network))["makespan"]


def keep_links(network, name):
    path = Path("runs", name)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(asdict(network)))
    return path


def headline(o, job):
    """Each part's runs, seed by seed, then its numbers, its picture and its table. A run that is there already is not run again."""
    for part in o.headline:
        if part == "stability":
            found = stability(o)
        else:
            runs, found = list(HEADLINES[part][0](o)), dict(cpu_hours=0.0, runs={})
            progress = tqdm([(seed, *run) for seed in range(o.seeds) for run in runs], unit="run")
            for seed, label, processes, options, after, lost in progress:
                progress.set_postfix_str(label)
                name = f"{part}-{label}-{seed}" + f"-of-{o.steps}-steps" * bool(o.steps)       # a try leaves the whole runs where they are
                run = trained(job, name, processes, [*SMALL, *options.split(), "--seed", str(seed)], after, lost)
                found["cpu_hours"] = round(found["cpu_hours"] + run.pop("cpu_hours"), 3)
                found["runs"].setdefault(label, []).append(run)
            if part in SECONDS:
                found["seconds"] = SECONDS[part]()
        save(o, f"headline_{part}", found)
        if part != "stability":
            HEADLINES[part][1](found)


def trained(job, name, processes, options, after=None, lost=None):
    """One run in runs/headline-...: its command, CPU hours, curves, and what `after` finds in its folder. (Remove the folder when train.py has changed.)"""
    name = "headline-" + re.sub(r"[^\w.]+", "-", name)
    folder, script = Path("runs", name), ["train.py"] if lost is None else ["bench_sync.py", "--losing", lost]
    command, done = f"{' '.join(script)} --name {name} {' '.join(options)}", folder / "headline.json"
    if done.exists() and (found := json.loads(done.read_text()))["command"] == command:
        return found
    shutil.rmtree(folder, ignore_errors=True)
    used = lambda: sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_CHILDREN, resource.RUSAGE_SELF))
    start = used()
    with tempfile.TemporaryFile("w+") as log:
        try:
            torchrun(processes, str(Path(__file__).with_name(script[0])), *command.split()[1:], stdout=log, stderr=log)
        except subprocess.CalledProcessError:
            log.seek(0)
            raise BadInput(f"{command} failed: {log.read()[-2000:]}")
    rows = [row for line in (folder / "metrics.jsonl").read_text().splitlines() if "heldout_loss" in (row := json.loads(line))]
    found = dict(command=command, curves={key: [row[key] and float(f"{row[key]:.6g}") for row in rows] for key in KEPT})
    found.update(after(job, folder) if after else {}, ranks=processes, cpu_hours=(used() - start) / 3600)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    done.write_text(json.dumps(found))
    return found


def mean_of_replicas(job, folder):
    """Held-out loss of the mean over the replicas, which one all-reduce at the very end would give."""
    out = subprocess.run([sys.executable, str(Path(__file__).with_name("train.py")), "--resume", str(folder), "--export", str(folder / "export")],
                         check=True, capture_output=True, text=True).stdout
    return dict(mean=float(re.search(r"^mean of all +(\S+)", out, re.M)[1]))


def missing_stages(job, folder):
    """Held-out loss of the model with only some of its stages: of three shares of them, and of what is left when half of the nodes are dead."""
    mean, o = mean_of_replicas(job, folder), train.parse(["--resume", str(folder)])
    corpus, draw, count, losses = load_corpus(o), random.Random(0), len(o.stages), {}
    _, layers = train.layout(o, sum(o.stages))

    def loss(stages):
        if stages not in losses:
            model = Llama(train.shape(o), [i for s in stages for i in layers[s]])
            load_weights(model, folder / "export")
            losses[stages] = train.evaluate(train.Pipeline(model, job, [[0]], (o.batch, o.seq_len, o.hidden), torch.float32), [[0]], corpus, o)
        return losses[stages]

    def survivors():        # half of the later stages' nodes are dead; a stage is there while one of its replicas is
        nodes = [s for s in range(1, count) for _ in range(o.stages[s])]
        return (0, *sorted(set(draw.sample(nodes, len(nodes) - len(nodes) // 2))))

    shares = {str(share): [loss((0, *c)) for c in train.some_choices(range(1, count), round(share * count) - 1, draw)] for share in (1.0, 0.75, 0.5)}
    return dict(**mean, shares=shares, dead=[loss(survivors()) for _ in range(16)])


def losing(share, argv):
    """train.py, but in this share of its iterations a node of a later stage dies, with all microbatches that visit it, and is back for the next."""
    run, iterations = train.Pipeline.run, itertools.count()

    def failing(pipeline, paths, batches, train=True, order=None):
        draw = random.Random(f"fails {next(iterations)}") if train else None
        if train and draw.random() < share:
            victim = draw.choice(sorted({r for path in paths for r in path[1:]}))
            left = [u for u, path in enumerate(paths) if victim not in path]
            pipeline.lost += sum(u in batches for u, path in enumerate(paths) if victim in path)
            paths, batches = [paths[u] for u in left], {i: batches[u] for i, u in enumerate(left) if u in batches}
        return run(pipeline, paths, batches, train, order)
    with mock.patch.object(train.Pipeline, "run", failing):
        train.main(argv)


def all_reduce_seconds(ranks, whole, part):
    """As fast as there is: links do not contend, so all at once (each rank sends every other its nth part, then what it summed; or, as NoLoCo does,
    the whole vector), or the best ring. whole[a][b], part[a][b]: seconds of a message of all bytes and of their nth part."""
    pairs, n, (first, *others) = list(itertools.combinations(ranks, 2)), len(ranks), ranks
    rings = ((first, *rest, first) for rest in itertools.permutations(others))
    return min(2 * max(part[a][b] for a, b in pairs), max(whole[a][b] for a, b in pairs),
               2 * (n - 1) * min(max(part[a][b] for a, b in zip(ring, ring[1:])) for ring in rings))


def slowest_all_reduce(network, names, links):
    """Simulated: (seconds in which the slowest stage of the 500M model, fp32, is averaged over its nodes; delay of a whole stage's bytes)."""
    each = 4 * 500e6 / len(network.stages)
    delay = {n: skippipe.city_delays(names, links, each / n) for n in {1, *map(len, network.stages)}}
    return max(all_reduce_seconds(ranks, delay[1], delay[len(ranks)]) for ranks in network.stages), delay[1]


def seconds_together():
    """Simulated: {label: (seconds of an iteration, None: as each seed's plan has it; of a synchronisation)} on the published instance's links."""
    (network, names), links = skippipe.published_network(), skippipe.city_links()
    # the slowest stage; and the slowest group of all stages, though only its own pipelines would wait for it. With 3 replicas a group is everyone
    everyone, whole = slowest_all_reduce(network, names, links)
    some = statistics.mean(max(whole[a][b] for ranks in network.stages for group in random_groups(ranks, 2, outer, 0)
                               for a, b in itertools.combinations(group, 2)) for outer in range(100))
    full = skippipe.simulate(network, skippipe.full_paths(network.stages, 6)).makespan
    planned = makespan(f"{TOGETHER} --links x --routing no-swaps --skip 0", network)
    routed = statistics.mean(skippipe.simulate(network, skippipe.random_paths(network.stages, 6, step, 0)).makespan for step in range(100))
    return {"DDP, full pipeline": (full, everyone), "DDP, planned": (planned, everyone), "DiLoCo, full pipeline": (full, everyone),
            "NoLoCo, random routing": (routed, some), "NoLoCo, SkipPipe": (None, some)}


def final(runs, key="heldout_loss"):
    """The last values of all seeds."""
    return [run["curves"][key][-1] for run in runs]


def spread_of(values, form=".3f"):
    return f"{statistics.mean(values):{form}}" + f" [{min(values):{form}}, {max(values):{form}}]" * (len(values) > 1)


def over(runs, base, key=None):
    """Perplexity over the base's, seed by seed, less 1."""
    return [math.exp((run[key] if key else a) - b) - 1 for run, a, b in zip(runs, final(runs), final(base))]


def ddp_of(label):
    """The label of the shape's DDP."""
    return f"{label[:3]} DDP" + ", fixed routing" * label.startswith("4x2")


def convergence_table(found):
    print("| replicas x stages, method | seeds | held-out nats per byte | perplexity over DDP's | ... of the mean of all replicas "
          "| MB sent per rank to synchronise |\n" + 6 * "|---" + "|")
    for label, runs in found["runs"].items():
        base = found["runs"][ddp_of(label)]
        print(f"| {label} | {len(runs)} | {spread_of(final(runs))} | {spread_of(over(runs, base), '+.1%')} | {spread_of(over(runs, base, 'mean'), '+.1%')} "
              f"| {final(runs, 'sync_bytes')[0] / runs[0]['ranks'] / 1e6:.0f} |")
    for label, runs in found["runs"].items():
        if "NoLoCo" in label:
            print(f"Pearson(spread, rate), {label}: {spread_of([pearson(run) for run in runs], '.2f')}; "
                  f"(spread, step): {spread_of([pearson(run, 'step') for run in runs], '.2f')}")
    routed, fixed = (found["runs"][f"4x2 local, {routing} routing"] for routing in ("random", "fixed"))
    print("local, random over fixed routing: spread", spread_of(spread_ratio(routed, fixed), "+.1%"), "perplexity", spread_of(over(routed, fixed), "+.1%"))


def pearson(run, against="lr"):
    """Correlation of the weight spread with the learning rate from step 100 on, after the warm-up, and after the replicas may part."""
    pairs = [(s, x) for step, s, x in zip(*(run["curves"][key] for key in ("step", "weight_spread", against))) if s and step >= 100]
    return statistics.correlation(*zip(*pairs)) if len(pairs) > 2 else math.nan


def spread_ratio(runs, base):
    """Mean over the evaluations of the second half of training, seed by seed, less 1."""
    later = lambda run: statistics.mean(run["curves"]["weight_spread"][len(run["curves"]["step"]) // 2:])
    return [later(a) / later(b) - 1 for a, b in zip(runs, base)]


def missing_over(runs, whole, key):
    """Perplexity with stages missing (key: a share of them that runs, or "dead") over that of the other run's whole model, seed by seed, less 1."""
    return [math.exp(statistics.mean(run["dead"] if key == "dead" else run["shares"][key]) - b["shares"]["1.0"][0]) - 1
            for run, b in zip(runs, whole)]


def skip_table(found):
    print("| stages, share skipped | seeds | held-out nats per byte | simulated s per iteration + all-reduce | perplexity "
          "over its own whole: 75% of the stages | 50% | half of the nodes dead | perplexity over the full pipeline's whole: whole | 75% | 50% |\n"
          + 10 * "|---" + "|")
    for label, runs in found["runs"].items():
        base = found["runs"][label.split(",")[0] + ", 0% skipped"]
        iterations, (sync, *_), _ = zip(*(timing(found, label, run) for run in runs))
        print(f"| {label} | {len(runs)} | {spread_of(final(runs))} | {statistics.mean(iterations):.1f} + {sync:.1f}", *(
            spread_of(missing_over(runs, b, key), "+.1%")
            for b, keys in ((runs, ("0.75", "0.5", "dead")), (base, ("1.0", "0.75", "0.5"))) for key in keys), "", sep=" | ")


def failure_table(found):
    base = next(iter(found["runs"].values()))
    print("| a node dies in | seeds | held-out nats per byte | perplexity over none |\n|---|---|---|---|")
    for label, runs in found["runs"].items():
        print(f"| {label} | {len(runs)} | {spread_of(final(runs))} | {spread_of(over(runs, base), '+.1%')} |")


def timing(found, label, run):
    """(seconds of an iteration, of a synchronisation, every how many steps): what `found` has for this method, of which the label may name a variant."""
    iteration, sync = next(value for name, value in found["seconds"].items() if label.startswith(name))
    return iteration or run["curves"]["simulated_seconds"][0], sync, option(run, "inner-steps", 1)


def option(run, name, default):
    """The last --name NUMBER of the run's command."""
    return int((re.findall(rf"--{name} (\d+)", run["command"]) or [default])[-1])


def clock(found, label, run):
    """Simulated hours at each evaluation. A warm start pays DDP's all-reduce at every step."""
    iteration, sync, every = timing(found, label, run)
    warm = option(run, "warm-start", 0)
    averaged = warm and found["seconds"]["DDP, full pipeline"][1]
    return [(step * iteration + min(step, warm) * averaged + max(step // every - warm // every, 0) * sync) / 3600 for step in run["curves"]["step"]]


def reaches(found, label, run, loss):
    """Simulated hours after which the run's held-out loss is at most `loss`, between evaluations on a straight line; None: never."""
    points = list(zip(clock(found, label, run), run["curves"]["heldout_loss"]))
    if points[0][1] <= loss:
        return points[0][0]
    for (before, above), (hours, value) in zip(points, points[1:]):
        if value <= loss:
            return before + (above - loss) / (above - value) * (hours - before)


def together_table(found):
    first = found["runs"]["DDP, full pipeline"]
    bases = [[clock(found, name, run)[-1] for run in first] for name in ("DDP, full pipeline", "DDP, planned")]     # the same losses, sooner
    print("| method | seeds | held-out nats per byte | s per iteration | s per synchronisation | hours in all | hours to DDP's final loss, over DDP's "
          "| ... over planned DDP's |\n" + 8 * "|---" + "|")
    for label, runs in found["runs"].items():
        iterations, (sync, *_), (every, *_) = zip(*(timing(found, label, run) for run in runs))
        taken = [reaches(found, label, run, final([base])[0]) for run, base in zip(runs, first)]
        reached = f", {sum(t is not None for t in taken)} of {len(taken)} seeds" * (None in taken)
        shares = ["not reached" if not any(taken) else spread_of([a / b for a, b in zip(taken, whole) if a], ".0%") + reached for whole in bases]
        print(f"| {label} | {len(runs)} | {spread_of(final(runs))} | {statistics.mean(iterations):.1f} | {sync:.1f} every {every} "
              f"| {clock(found, label, runs[0])[-1]:.1f} | {' | '.join(shares)} |")


def tuning_table(found):
    print("| setting | seeds | held-out nats per byte | MB sent per rank to synchronise |\n|---|---|---|---|")
    for label, runs in found["runs"].items():
        print(f"| {label} | {len(runs)} | {spread_of(final(runs))} | {final(runs, 'sync_bytes')[0] / runs[0]['ranks'] / 1e6:.0f} |")


HEADLINES = {"tuning": (tuning_runs, tuning_table), "convergence": (convergence_runs, convergence_table), "skip": (skip_runs, skip_table),
             "failure": (failure_runs, failure_table), "together": (together_runs, together_table), "stability": None}
SECONDS = {"skip": seconds_skip, "together": seconds_together}


# ---------------------------------------------------------------- results and pictures


def save(o, name, result):
    path = Path(o.out, "results", name + ".json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=None if name.startswith("headline") else 1) + "\n")
    print(path)
    try:
        figure = name if name in FIGURES else None if name.startswith("headline") else "sync_measured"
        figure and draw(o, figure)
    except BadInput as error:       # the numbers are safe
        print(error)


def draw(o, name):
    """figures/NAME.png from results/*.json: sync_simulated, sync_measured or headline_..."""
    try:
        import matplotlib
        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        raise BadInput("no picture without matplotlib: pip install '.[plot]'")
    found = {p.stem: json.loads(p.read_text()) for p in sorted(Path(o.out, "results").glob("*.json"))}
    path = Path(o.out, "figures", f"{name}.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    plt.rcParams.update({"font.size": 9, "axes.titlesize": 10, "axes.grid": True, "grid.alpha": 0.3, "legend.fontsize": 7.5, "lines.markersize": 4})
    figure = FIGURES[name](plt, found[name] if name.startswith("headline") else found)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    print(path)


def draw_simulated(plt, found):
    if "sync_simulated" not in found:
        raise BadInput("no results/sync_simulated.json: run --simulate first")
    r, marks = found["sync_simulated"], "osD^vX"
    figure, ((a, b), (c, d)) = plt.subplots(2, 2, figsize=(10, 7.6), layout="constrained")
    def line(axis, x, points, i, label, **style):
        value, error = zip(*points)
        axis.errorbar(x, value, [2 * e for e in error], color=COLOURS[i], marker=marks[i], capsize=2, lw=1.2, label=label, **style)
    for i, (n, points) in enumerate(r["ratio"].items()):
        line(a, r["spreads"], points, i, f"{n} replicas")
    for i, (n, points) in enumerate(r["training"]["NoLoCo"].items()):
        line(b, r["inner_steps"], points[1], i, f"{n} replicas")
    at = r["inner_steps"].index(100)
    b.plot(100, r["training"]["alone"]["1024"][1][at][0], "k*", ms=9, label="1024, delays forgotten at once", zorder=5)
    for i, (name, by) in enumerate(r["seconds"].items()):
        line(c, [int(n) for n in by], list(by.values()), i, name)
    for i, (case, by) in enumerate(r["late"].items()):
        for method, dashes in (("DiLoCo", "--"), ("NoLoCo", "-")):
            line(d, range(len(by[method])), by[method], i, f"{method}: {case}", ls=dashes)
    a.set(xlabel="std(t) / t_c of a message", ylabel="time of tree all-reduce / pair averaging", title="A  one synchronisation", ylim=(0, None))
    b.set(xlabel="inner steps per outer step", ylabel="training time DiLoCo / NoLoCo", title="B  500 outer steps, exchange time left out")
    c.set(xscale="log", yscale="log", xlabel="replicas", ylabel="seconds per synchronisation",
          title=f"C  {r['params'] / 1e6:g}M fp32 at {r['mbit']:g} Mbit/s, {1000 * r['latency_seconds']:g} ms, std(t)/t_c {r['spread']:g}")
    c.set_xticks(r["counts"], [str(n) for n in r["counts"]])
    c.minorticks_off()
    d.set(xlabel="outer step", ylabel="mean time lost by a replica / outer step", title="D  one of 1024 replicas is late from outer step 4 (m = 50)")
    for axis in (a, b, c, d):
        axis.legend()
    figure.suptitle("Simulated. Bars: two standard errors")
    return figure


def draw_stability(plt, r):
    """One figure of what `stability` found, read back from its JSON."""
    from matplotlib.patheffects import Normal, Stroke
    halo = dict(path_effects=[Stroke(linewidth=3.5, foreground="w", alpha=0.8), Normal()])      # black lines cross dark colours
    figure, axes = plt.subplots(1, 4, figsize=(15, 4.4), layout="constrained", width_ratios=[1, 1, 1, 1.15])
    for axis, (n, row) in zip(axes, r["groups"].items()):
        rate = torch.tensor(row["rate"]).T.clamp(-0.3, 0.3)
        picture = axis.pcolormesh(r["alphas"], r["gammas"], rate, cmap="PuOr_r", vmin=-0.3, vmax=0.3, shading="nearest", rasterized=True)
        axis.plot(r["alphas"], row["bound"], "k-", lw=2, label="our bound, N large (gamma_bound)", **halo)
        axis.plot(r["alphas"], row["exact"]["0.0"], "-", color=COLOURS[2], lw=1.5, label=f"our bound for N = {r['replicas']}")
        for w, label in zip(row["window"], ("the paper's window (Eq. 74)", None)):
            axis.plot(r["alphas"], w, "k--", lw=1.5, label=label, **halo)
        for pull in r["pulls"][1:]:
            axis.plot(r["alphas"], row["crossing"][str(pull)], "k:", lw=2, label=f"measured limit with pull, Delta = -{pull:g} phi", **halo)
        axis.plot(*r["default"], "o", color=COLOURS[3], mec="w", ms=7, ls="", label="the papers' values")
        axis.plot(train.TINY["noloco"]["alpha"], train.TINY["noloco"]["beta"], "s", color=COLOURS[0], mec="w", ms=7, ls="", label="those of tiny runs")
        axis.set(xlabel="alpha", ylabel="gamma", title=f"n = {n}" + (" = N" if int(n) == r["replicas"] else ""), xlim=(0, 0.95), ylim=(0, 4))
        axis.grid(False)
    axes[0].legend(loc="upper right")
    figure.colorbar(picture, ax=axes[:3], label="growth of differences, log per outer step, no pull", extend="both", pad=0.02)
    q, b = r["noise"], axes[3]
    x = [q["m"] * w for w in q["omega"]]
    for name, label, i in (("spread", "V(phi - mean), spread", 0), ("mean", "V(mean of replicas)", 3)):
        b.plot(x, q[name], "os"[i > 0], color=COLOURS[i], label=f"{label}: slope {q['slopes'][name]['small']:.2f} ... {q['slopes'][name]['largest']:.2f}")
        b.plot(x, q[name + "_expected"], "-", color=COLOURS[i], lw=1.2)
    b.set(xscale="log", yscale="log", xlabel="m omega", ylabel="variance per weight", title="n = 2, the papers' values; lines: closed form")
    b.legend()
    return figure


def draw_measured(plt, found):
    whole = sorted((r for name, r in found.items() if name.startswith("sync_measured_")), key=lambda r: r["replicas"])
    links = sorted((r for name, r in found.items() if name.startswith("sync_emulated_")), key=lambda r: r["replicas"])
    if not whole and not links:
        raise BadInput("no results/sync_measured_*.json or sync_emulated_*.json: run under torchrun first")
    figure, (a, b) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained", width_ratios=[1.35, 1])
    for k, r in enumerate(whole):
        rows = list(r["rows"].items())[::-1]
        height = 0.8 / len(whole)
        error = [[row["median"] - row["quartiles"][0] for _, row in rows], [row["quartiles"][1] - row["median"] for _, row in rows]]
        places = [i - height * (k - (len(whole) - 1) / 2) for i in range(len(rows))]
        a.barh(places, [row["median"] for _, row in rows], height, xerr=error, capsize=2, color=COLOURS[k],
               label=f"{r['replicas']} processes, {r['params'] / 1e6:g}M fp32, {r['backend']}, {r['device']}")
        a.set_yticks(range(len(rows)), [name for name, _ in rows])
    for k, kind in enumerate(("tree", "pair")):
        n = [r["replicas"] for r in links]
        real = [r["measured"][kind] for r in links]
        b.plot(n, [statistics.mean(r["simulated"][kind]) for r in links], "-", color=COLOURS[k], label=f"{kind}, simulated from the same draws")
        b.errorbar(n, [statistics.mean(x) for x in real], [2 * statistics.pstdev(x) / max(1, len(x) - 1) ** 0.5 for x in real], fmt="os"[k],
                   color=COLOURS[k], capsize=3, label=f"{kind}, real messages")
    a.set(xlabel="seconds, median and quartiles over trials, slowest rank", title="Measured: floors, then whole steps")
    b.set(xscale="log", xlabel="processes", ylabel="seconds per synchronisation, mean and 2 standard errors", ylim=(0, None), title="Emulated links")
    if links:
        b.set_title(f"Emulated links: {1000 * links[0]['latency_seconds']:g} ms, std(t)/t_c {links[0]['spread']:g}")
        b.set_xticks(n, [str(x) for x in n])
        b.minorticks_off()
        b.set_ylim(0, 1.3 * b.get_ylim()[1])        # room for the legend
    for axis in (a, b):
        if axis.get_legend_handles_labels()[0]:
            axis.legend()
    return figure


def band(axis, runs, x, label, colour, y=lambda run: run["curves"]["heldout_loss"], every=1, **style):
    """The seeds' mean as a line, their range as a band, at every so manieth evaluation."""
    points = list(zip(*map(y, runs)))[every - 1::every]
    x = x[every - 1::every][:len(points)]
    axis.plot(x, [statistics.mean(v) for v in points], color=colour, label=label, lw=1.3, **style)
    axis.fill_between(x, [min(v) for v in points], [max(v) for v in points], color=colour, alpha=0.2, lw=0)


def tokens(runs):
    return [x / 1e6 for x in runs[0]["curves"]["tokens"]]


def draw_convergence(plt, r):
    figure, ((a, b, c), (d, e, f)) = plt.subplots(2, 3, figsize=(14, 8), layout="constrained")
    runs, shapes, outer = r["runs"], ("8x1", "4x2"), 2          # every second evaluation comes after an outer step of DiLoCo's
    colour = lambda label: COLOURS[next(i for i, name in ((2, "warm"), (0, "DDP"), (1, "DiLoCo"), (3, "NoLoCo"), (4, "local")) if name in label)]
    for axis, shape in zip((a, b), shapes):
        for label in runs:
            if label.startswith(shape):
                dashed = "every" in label or "fixed" in label and ("NoLoCo," in label or "local" in label)
                band(axis, runs[label], tokens(runs[label]), label[4:], colour(label), every=outer if "DiLoCo" in label else 1,
                     ls=":" if "half" in label else "--" if dashed else "-")
        low = min(final(runs[ddp_of(shape)]))
        axis.set(xlabel="million tokens, all replicas", ylabel="held-out nats per byte", ylim=(low - 0.05, low + 1),
                 title=f"{shape[0]} replicas x {shape[2]} stage{'s' * (shape == '4x2')} (DiLoCo: just after its outer steps)")
    for label, row in runs.items():
        sent = final(row, "sync_bytes")[0] / row[0]["ranks"] / 1e6
        marker = "^" if "every" in label else "o" if label.startswith("8x1") else "s"
        c.plot([max(sent, 1)] * len(row), [100 * x for x in over(row, runs[ddp_of(label)])], marker, color=colour(label), label=label,
               mfc="none" if "fixed" in label else None)
    c.set(xscale="log", xlabel="MB sent per rank to synchronise (1: none)", ylabel="perplexity over the shape's own DDP, %", ylim=(-2, 60),
          title="loss against bytes")
    for i, (shape, theirs, ours) in enumerate((("8x1", "", ""), ("8x1", ", every 4 steps", ", every 2 steps"),
                                               ("4x2", ", fixed routing", ", random routing"), ("4x2", ", fixed routing", ", fixed routing"))):
        ddp, diloco, noloco = (runs[label] for label in (ddp_of(shape), f"{shape} DiLoCo{theirs}", f"{shape} NoLoCo{ours}"))
        ahead = [[math.exp(p - z) - math.exp(q - z) for p, q, z in zip(*(run["curves"]["heldout_loss"] for run in three))]
                 for three in zip(diloco, noloco, ddp)]
        band(d, ahead, tokens(ddp), shape + ours, COLOURS[i], y=list, every=outer)
    d.axhline(0, color="black", lw=0.6)
    d.set(xlabel="million tokens", ylabel="(DiLoCo - NoLoCo) / DDP, perplexity", title="above 0: NoLoCo is better", ylim=(-0.15, 0.1))
    for i, label in enumerate(x for x in runs if "NoLoCo" in x and "fixed" not in x):
        curves = runs[label][0]["curves"]
        band(e, runs[label], [100 * step / curves["step"][-1] for step in curves["step"]], label, COLOURS[i], y=lambda run: run["curves"]["weight_spread"])
    peak = max(max(run["curves"]["weight_spread"]) for x in runs if "NoLoCo" in x for run in runs[x])
    for shape in shapes:
        curves = runs[ddp_of(shape)][0]["curves"]
        e.plot([100 * step / curves["step"][-1] for step in curves["step"]], [peak * x / max(curves["lr"]) for x in curves["lr"]],
               "k:" if shape == "8x1" else "k--", lw=0.8, label=f"learning rate of {shape}, scaled")
    e.set(xlabel="% of the steps", ylabel="weight spread after the outer step", title="weight spread and learning rate", ylim=(None, 1.5 * peak))
    for i, routing in enumerate(("random", "fixed")):
        label = f"4x2 local, {routing} routing"
        band(f, runs[label], runs[label][0]["curves"]["step"], label, COLOURS[i], y=lambda run: run["curves"]["weight_spread"])
    f.set(xlabel="step", ylabel="weight spread", title="no outer step: routing alone", ylim=(0, None))
    for axis in (a, b, c, d, e, f):
        axis.legend(fontsize=6.5)
    return figure


def draw_skip(plt, r):
    """Against time: the runs that end when the full pipeline does. Missing stages: the runs of as many microbatches."""
    figure, axes = plt.subplot_mosaic([["time4", "time8", "dead"], ["part4", "part8", "dead"]], figsize=(14, 8), layout="constrained")
    kinds = ["0% skipped", "0% skipped, in order", "25% skipped", "25% skipped, in order", "37.5% skipped", "50% skipped", "0% skipped, with swaps"]
    place = itertools.count()
    for label, runs in r["runs"].items():
        stages, name = label[0], label[len("4 stages, "):].replace(", equal time", "")
        kind, whole = kinds.index(name), name == kinds[0]
        if whole or "equal time" in label:
            band(axes["time" + stages], runs, clock(r, label, runs[0]), name + ", DT-FM's order" * whole, COLOURS[kind])
        if "equal time" not in label:
            base = r["runs"][f"{stages} stages, {kinds[0]}"]
            columns = [[100 * x for x in missing_over(runs, base, share)] for share in runs[0]["shares"]]
            mean, *errors = zip(*((m := statistics.mean(v), m - min(v), max(v) - m) for v in columns))
            at = [100 * float(share) - kind / 2 for share in runs[0]["shares"]]         # a little apart
            axes["part" + stages].errorbar(at, mean, errors, marker="o", capsize=3, label=name, color=COLOURS[kind])
            dead = [100 * (math.exp(loss - run["shares"]["1.0"][0]) - 1) for run in runs for loss in run["dead"]]
            axes["dead"].boxplot([dead], positions=[-next(place)], widths=0.6, orientation="horizontal", medianprops=dict(color=COLOURS[kind], lw=2),
                                 tick_labels=[label.replace(" skipped", "")])
    for stages in "48":
        axes["time" + stages].set(xlabel="simulated hours, gradients averaged at every step", ylabel="held-out nats per byte, whole model",
                                  title=f"{stages} stages of two nodes, the 500M model's messages")
        axes["part" + stages].set(xlabel="% of the stages that run", ylabel="perplexity over the full pipeline's whole model, %",
                                  title=f"some stages missing, {stages} stages", xticks=(100, 75, 50))
        axes["part" + stages].invert_xaxis()
        axes["time" + stages].legend()
        axes["part" + stages].legend()
    axes["dead"].axvline(7, color="black", ls=":", lw=0.8)
    axes["dead"].set(xlabel="perplexity over its own whole, %", title="half of the later stages' nodes dead (dotted: 7%)")
    return figure


def draw_failure(plt, r):
    figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
    for i, (label, runs) in enumerate(r["runs"].items()):
        band(axis, runs, tokens(runs), label, COLOURS[i])
    axis.set(xlabel="million tokens that came home", ylabel="held-out nats per byte", title="a node of a later stage dies in a share of the iterations")
    axis.legend()
    return figure


def draw_together(plt, r):
    figure, (a, b) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for i, (label, runs) in enumerate(r["runs"].items()):
        colour = (*COLOURS, "gray")[i]
        band(a, runs, clock(r, label, runs[0]), label, colour)
        band(b, runs, runs[0]["curves"]["step"], label, colour)
    goal = statistics.mean(final(r["runs"]["DDP, full pipeline"]))
    a.axhline(goal, color="black", ls=":", lw=0.8)
    a.set(xscale="log", xlabel="simulated hours on the published instance, 20 nodes in 12 cities", ylabel="held-out nats per byte",
          title="loss against time", ylim=(goal - 0.1, goal + 1.2))
    b.set(xlabel="steps of 30 microbatches", ylabel="held-out nats per byte", title="loss against steps", ylim=(goal - 0.1, goal + 1.2))
    a.set_xticks((0.5, 1, 2, 5, 10), ("0.5", "1", "2", "5", "10"))
    a.set_xticks((), minor=True)
    b.legend()
    return figure


FIGURES = {"sync_simulated": draw_simulated, "sync_measured": draw_measured, "headline_convergence": draw_convergence, "headline_skip": draw_skip,
           "headline_failure": draw_failure, "headline_together": draw_together, "headline_stability": draw_stability}


def main(argv=None):
    if (argv or [None])[0] == "--losing":
        return losing(float(argv[1]), argv[2:])
    job = Job()
    o = job.together(parse, argv)
    job.connect(o)
    if o.headline:
        headline(o, job)
    elif o.trainer:
        trainer(o, job)
    elif job.world > 1:
        (emulate if o.emulate else measure)(o, job)
    elif o.plot:
        job.together(lambda: [draw(o, name) for name in FIGURES if name.startswith("sync") or Path(o.out, "results", f"{name}.json").exists()])
    elif o.simulate:
        simulate(o)
    else:
        paper_table(o)
    job.close()


if __name__ == "__main__":
    main(sys.argv[1:])
