"""How long synchronisation takes: Figs. 5A and 5B of arXiv 2506.10911, and the outer step measured.

    python bench_sync.py --simulate                            for thousands of replicas
    python bench_sync.py --simulate --params 57e6 --mbit 100   for your own model and link
    torchrun --nproc-per-node 8 bench_sync.py                  real processes: Gloo or NCCL

Tables are printed, numbers written to runs/results (--out). This file needs noloco.py, torch and
tqdm.

n replicas. A message takes t ~ LogNormal(mu, sigma^2), independently of all others:

    t_c = E t = exp(mu + sigma^2 / 2),    std(t) / t_c = sqrt(exp(sigma^2) - 1)                (B1)
    tree all-reduce: up and down a binary tree of the replicas; sigma = 0: 2 t_c log2 n        (B2)
    pair averaging: the same with two leaves, 2 E max(t1, t2) = 2 (1 + erf(sigma / 2)) t_c     (B3)

Inner steps take LogNormal(mu = 1, sigma^2 = 0.5), S_i is the sum of replica i's m. Its clock after
an outer step, exchanges left out:

    DiLoCo: T <- T + max_i S_i
    NoLoCo, with its partner j: T_i, T_j <- max(T_i + S_i, T_j + S_j)                          (B4)

Beyond the paper: a message of b bytes takes b / rate longer; links do not contend. For B bytes of
parameters and at sigma = 0

    all-reduce by halving and doubling: 2 log2 n t_c + 2 (n - 1) / n B / rate
    NoLoCo: t_c + B / rate                                                                     (B5)

The paper counts two exchanges for a pair. NoLoCo here needs one where gamma = beta (noloco.py).
"""
import argparse
import json
import math
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from noloco import DiLoCo, NoLoCo

COUNTS = (4, 16, 64, 256, 1024, 4096)
SPREADS = (0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.25, 2.5)
INNER_STEPS = (1, 2, 5, 10, 20, 35, 50, 75, 100, 120)
OUTER_STEPS = (250, 500)


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--simulate", action="store_true", help="the simulations, in one process")
    add("--params", type=float, help="parameters (default: measured 57e6, simulated 125e6)")
    add("--mbit", type=float, default=1000.0, help="simulated: rate of a link (default: 1000)")
    add("--latency-ms", type=float, default=50.0, help="simulated: t_c (default: 50)")
    add("--latency-std", type=float, default=1.0, help="simulated: std(t) / t_c (default: 1)")
    add("--draws", type=float, default=1.0, help="simulated: share of the random draws, e.g. 0.1")
    add("--trials", type=int, default=11, help="measurements of each (default: 11)")
    add("--seed", type=int, default=0, help="of all drawn times and groups")
    add("--out", default="runs", help="folder of results/ (default: runs)")
    add("--device", default="auto", choices=["auto", "cpu"],
        help="auto: GPUs and NCCL where each process has one of its own, else CPUs and Gloo")
    o = parser.parse_args(argv)
    if not o.simulate and int(os.environ.get("WORLD_SIZE", 1)) == 1:
        parser.error("give --simulate, or use torchrun --nproc-per-node 8")
    return o


# ---------------------------------------------------------------- the model of a network
# The last dimension is that of the trials.


def messages(shape, spread, generator):
    """Times of messages (B1) with t_c = 1 and std(t) / t_c = spread."""
    variance = math.log(1 + spread**2)
    return torch.randn(shape, generator=generator).mul_(variance**0.5).sub_(variance / 2).exp_()


def pair_closed_form(spread):
    """(B3) with t_c = 1."""
    return 2 * (1 + math.erf(math.log(1 + spread**2) ** 0.5 / 2))


def tree_all_reduce(up, down):
    """(B2) for any n: up[j] and down[j] (trials) are times between node j of a heap and its parent,
    node j // 2. The replicas are nodes n ... 2n-1."""
    end = len(up)                                   # 2n, after the last node
    ready = torch.zeros_like(up)
    levels = []                                     # (first node, node after the last) of each
    start = 2
    while start < end:
        levels.append((start, min(2 * start, end)))
        start *= 2
    for a, b in reversed(levels):               # a parent waits for the later of its two children
        ready[a // 2:b // 2] = (ready[a:b] + up[a:b]).unflatten(0, (-1, 2)).amax(1)
    for a, b in levels:
        ready[a:b] = ready[a // 2:b // 2].repeat_interleave(2, 0) + down[a:b]
    return ready[end // 2:].amax(0)                # (trials)


def pair_average(t):
    """(B3) from t (exchanges, 2, trials): an exchange is over when both messages have arrived."""
    return t.amax(1).sum(0)


def all_reduce(rounds):
    """Seconds (trials) of an all-reduce. A round is (whom each rank hears, times (n, trials) of
    what each sends). A rank sends once it has what the round before brought: in a ring to the next
    rank, by halves (a butterfly) to the one at a distance.
    """
    clock = torch.zeros(())
    for source, t in rounds:
        clock = torch.maximum(clock, (clock + t)[source])
    return clock.amax(0)


def reductions(n, spread, latency, seconds, generator):
    """{name: sample() -> (trials)} of synchronising n replicas once. The whole vector's bytes take
    `seconds` on a link.
    """
    many = max(4, (1 << 20) // n)
    few = max(4, (1 << 15) // n)
    ranks = torch.arange(n)
    halves = [(ranks ^ (n >> r), 0.5**r) for r in range(1, n.bit_length())]

    def times(*shape, part=1.0, trials=many):
        """Of messages that carry this part of the vector."""
        drawn = messages((*shape, trials), spread, generator)
        return drawn.mul_(latency).add_(part * seconds)

    def tree():
        return tree_all_reduce(times(2 * n), times(2 * n))

    def ring():
        steps = 2 * (n - 1)
        return all_reduce((ranks.roll(1), times(n, part=1 / n, trials=few)) for _ in range(steps))

    def halving():
        return all_reduce((other, times(n, part=part)) for other, part in halves + halves[::-1])

    return {
        "tree": tree,
        "ring": ring,
        "halving and doubling": halving,
        "pair, two exchanges (paper)": lambda: pair_average(times(2, 2)),
        "NoLoCo here, one exchange": lambda: pair_average(times(1, 2)),
    }


def estimate(sample, relative=0.004):
    """(mean, standard error) of sample() -> (trials), drawn until error < relative * mean."""
    values = sample()
    while float(values.std()) > relative * float(values.mean()) * len(values) ** 0.5:
        more = max(1, len(values) // 1024)
        values = torch.cat([values] + [sample() for _ in range(more)])
    values = values.double()
    return float(values.mean()), float(values.std()) / len(values) ** 0.5


def training(n, inner_steps, outer_steps, trials, generator):
    """{name: total times (B4) after each of outer_steps, for each of inner_steps, of each trial}.
    "alone" forgets at every outer step who was late: a pair then costs E max(S_1, S_2), as in the
    paper's analysis.
    """
    everyone = torch.zeros(len(inner_steps), trials)
    alone = torch.zeros_like(everyone)
    clock = torch.zeros(len(inner_steps), n, trials)
    added = torch.empty_like(clock)
    totals = {"DiLoCo": [], "NoLoCo": [], "alone": []}
    # A longer m begins with the steps of a shorter one: each gap is what it adds to the one before.
    gaps = [b - a for a, b in zip((0,) + inner_steps, inner_steps)]
    for k in range(1, max(outer_steps) + 1):
        for i, gap in enumerate(gaps):
            normal = torch.randn((gap, n, trials), generator=generator)
            added[i] = normal.mul_(0.5**0.5).add_(1).exp_().sum(0)
        S = added.cumsum(0)
        everyone += S.amax(1)
        alone += S.unflatten(1, (-1, 2)).amax(2).mean(1)
        order = torch.randperm(n, generator=generator)              # neighbours in it are a pair
        pairs = (clock + S)[:, order].unflatten(1, (-1, 2))
        clock = pairs.amax(2).repeat_interleave(2, 1)
        if k in outer_steps:
            totals["DiLoCo"].append(everyone.clone())
            totals["NoLoCo"].append(clock.amax(1))
            totals["alone"].append(alone.clone())
    return {name: torch.stack(total).double() for name, total in totals.items()}


# ---------------------------------------------------------------- simulated


def simulate(o):
    """Everything simulated and its checks, into results/sync_simulated.json; returns it."""
    torch.set_num_threads(1)            # more threads wait for each other, on tensors of this size
    began = time.perf_counter()
    generator = torch.Generator().manual_seed(o.seed)
    params = o.params or 125e6
    latency = o.latency_ms / 1000
    error = 0.004 / o.draws**0.5
    result = dict(params=params, mbit=o.mbit, latency_seconds=latency, spread=o.latency_std,
                  counts=COUNTS, spreads=SPREADS, inner_steps=INNER_STEPS, outer_steps=OUTER_STEPS,
                  ratio={}, pair=[], training={}, seconds={})
    for spread in tqdm(SPREADS, "pairs", leave=False):
        sample = reductions(1 << 12, spread, 1.0, 0.0, generator)["pair, two exchanges (paper)"]
        result["pair"].append((*estimate(sample, error / 4), pair_closed_form(spread)))
    for n in tqdm(COUNTS, "A: trees", leave=False):
        result["ratio"][str(n)] = tree_over_pair(n, result["pair"], error, generator)
    for n in tqdm(COUNTS, "B: training", leave=False):
        for name, rows in training_ratios(n, o.draws, generator).items():
            result["training"].setdefault(name, {})[str(n)] = rows
    for n in tqdm(COUNTS, "C: seconds", leave=False):
        samples = reductions(n, o.latency_std, latency, 32 * params / (o.mbit * 1e6), generator)
        for name, sample in samples.items():
            result["seconds"].setdefault(name, {})[str(n)] = estimate(sample, error)
    result["wall_seconds"] = time.perf_counter() - began
    print_simulated(result)
    save(o.out, "sync_simulated", result)
    return result


def tree_over_pair(n, pairs, relative, generator):
    """The tree's time over the pair's: (ratio, standard error) for each of SPREADS."""
    rows = []
    for spread, (pair, pair_error, _) in zip(SPREADS, pairs):
        tree, error = estimate(reductions(n, spread, 1.0, 0.0, generator)["tree"], relative)
        rows.append((tree / pair, tree / pair * math.hypot(error / tree, pair_error / pair)))
    return rows


def training_ratios(n, draws, generator):
    """DiLoCo's time over NoLoCo's, {name: rows}: a row for each of OUTER_STEPS, which holds
    (ratio, standard error) for each of INNER_STEPS.
    """
    found = {"NoLoCo": [[] for _ in OUTER_STEPS], "alone": [[] for _ in OUTER_STEPS]}
    many, few = max(40, 4096 // n), max(4, 1024 // n)       # trials: few inner steps vary most
    for steps, trials in ((INNER_STEPS[:3], many), (INNER_STEPS[3:], few)):
        trials = max(2, round(trials * draws))
        total = training(n, steps, OUTER_STEPS, trials, generator)
        for name, rows in found.items():
            ratio = total["DiLoCo"] / total[name]
            error = ratio.std(2) / trials**0.5
            for row, values, errors in zip(rows, ratio.mean(2).tolist(), error.tolist()):
                row += zip(values, errors)
    return found


def print_simulated(r):
    """Tables A and C in Markdown, and B in a sentence."""
    counts = r["counts"]
    print("| std(t)/t_c | " + " | ".join(map(str, counts)) + " replicas |\n|" + 7 * "---|")
    for i, spread in enumerate(r["spreads"]):
        cells = [f"{r['ratio'][str(n)][i][0]:.1f}" for n in counts]
        print(f"| {spread:g} | " + " | ".join(cells) + " |")
    at = r["inner_steps"].index(100)
    for i, outer in enumerate(r["outer_steps"]):
        ratio, error = r["training"]["NoLoCo"]["1024"][i][at]
        forgotten, _ = r["training"]["alone"]["1024"][i][at]
        print(f"\n1024 replicas, 100 inner steps, {outer} outer steps: DiLoCo takes "
              f"{ratio - 1:.1%} +- {error:.1%} longer than NoLoCo "
              f"({forgotten - 1:.1%} if a pair's delay were forgotten at once)")
    print("\n| 1024 replicas | seconds |\n|---|---|")
    for name, by in r["seconds"].items():
        print(f"| {name} | {by['1024'][0]:.1f} |")


# ---------------------------------------------------------------- measured


def methods(o, size, device):
    """(vectors, rows) of a model with so many weights. The rows: (name, function, bytes that a rank
    sends), each method below the bare messages that it needs. vectors: what the functions change.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    weights = equal_weights(o, size, device), equal_weights(o, size, device)
    noloco = NoLoCo([weights[0]], inner_steps=1, seed=o.seed)
    diloco = DiLoCo([weights[1]], inner_steps=1)
    noloco.step()                       # the first step connects, and tells the bytes
    diloco.step()
    theta, other = weights[0].detach(), torch.empty_like(weights[1].detach())

    def exchange():
        partner = rank ^ 1
        if partner < world:
            both = [dist.P2POp(dist.irecv, other, partner), dist.P2POp(dist.isend, theta, partner)]
            for work in dist.batch_isend_irecv(both):
                work.wait()

    ring = 2 * (world - 1) * theta.nbytes // world
    rows = [("memcpy of theta", lambda: other.copy_(theta), 0),
            ("exchange of theta", exchange, theta.nbytes),
            ("NoLoCo", noloco.step, noloco.bytes_sent),
            ("all-reduce of theta", lambda: dist.all_reduce(other), ring),
            ("DiLoCo", diloco.step, diloco.bytes_sent)]
    return [each.detach() for each in weights], rows


def equal_weights(o, size, device):
    """A vector of them, the same on all ranks."""
    torch.manual_seed(o.seed)
    return torch.nn.Parameter(torch.randn(size, device=device).mul_(0.02))


def measure(o, methods=methods):
    """All rows by turns, each time the slowest rank's. Rank 0 prints the table and saves it."""
    load = os.getloadavg()[0]
    device, name = make_process_group(o)
    rank, size = dist.get_rank(), int(o.params or 57e6)
    vectors, rows = methods(o, size, device)
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    table = [[] for _ in rows]          # seconds of each row
    for _ in tqdm(range(o.trials + 1), "measuring", disable=rank != 0, dynamic_ncols=True):
        for (_, run, _), seconds in zip(rows, table):
            for vector in vectors:
                vector.mul_(1.001 + 0.001 * rank)       # Delta is not zero, replicas differ
            wait()
            dist.barrier()
            clock = time.perf_counter()
            run()
            wait()
            seconds.append(time.perf_counter() - clock)
    slowest = torch.tensor(table, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    if rank == 0:
        found, floor = {}, None         # the floor of a row is the row above
        for (row, _, sent), seconds in zip(rows, slowest[:, 1:].tolist()):      # the first warms up
            found[row] = dict(seconds=seconds, bytes=sent, floor=floor)
            floor = row
        result = dict(
            replicas=dist.get_world_size(), params=size, bytes_of_theta=vectors[0].nbytes,
            trials=o.trials, load_before=load, backend=dist.get_backend(), device=name,
            torch=torch.__version__, python=sys.version.split()[0], rows=found)
        print_measured(result)
        save(o.out, f"sync_measured_{result['replicas']}", result)
    dist.destroy_process_group()


def make_process_group(o):
    """NCCL where each process has a GPU of its own, else Gloo: (the device, its name)."""
    gpus = torch.cuda.device_count() if o.device != "cpu" else 0
    if gpus < int(os.environ["LOCAL_WORLD_SIZE"]):
        dist.init_process_group("gloo")
        return torch.device("cpu"), f"{os.cpu_count()} cores {os.uname().machine}"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    return device, torch.cuda.get_device_name(device)


def quartiles(x):
    return statistics.quantiles(x, n=4, method="inclusive")


def print_measured(r):
    """The table in Markdown. Ratios are medians of the trials' ratios."""
    rows = r["rows"]

    def ratio(a, b):
        return statistics.median(x / y for x, y in zip(rows[a]["seconds"], rows[b]["seconds"]))

    print(f"{r['replicas']} processes, {r['params'] / 1e6:g}M parameters, {r['backend']}, "
          f"{r['device']}, torch {r['torch']}: slowest rank, "
          f"median [quartiles] of {r['trials']} trials\n")
    print("| | seconds | MB sent per rank | DiLoCo's / its | its / its floor's |\n|" + 5 * "---|")
    for name, row in rows.items():
        low, middle, high = quartiles(row["seconds"])
        floor = f"{ratio(name, row['floor']):.2f}" if row["floor"] else ""
        print(f"| {name} | {middle:.3f} [{low:.3f}, {high:.3f}] | {row['bytes'] / 1e6:.0f} "
              f"| {ratio('DiLoCo', name):.2f} | {floor} |")


def save(out, name, result):
    path = Path(out, "results", f"{name}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(path)


def main(argv=None):
    o = parse(argv)
    if o.simulate:
        simulate(o)
    else:
        measure(o)


if __name__ == "__main__":
    main()
