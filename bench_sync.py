"""How long synchronisation takes: Figs. 5A and 5B of arXiv 2506.10911, and the outer step measured.

    python bench_sync.py --simulate                 both figures' numbers, for up to 4096 replicas
    torchrun --nproc-per-node 8 bench_sync.py       real processes: Gloo or NCCL

Tables are printed, numbers written to runs/results (--out), with what made them. This file needs
noloco.py, torch and tqdm.

n replicas. A message takes t ~ LogNormal(mu, sigma^2), independently of all others:

    t_c = E t = exp(mu + sigma^2 / 2),    std(t) / t_c = sqrt(exp(sigma^2) - 1)                (B1)
    tree all-reduce: up and down a binary tree of the replicas; sigma = 0: 2 t_c log2 n        (B2)
    pair averaging: the same with two leaves, 2 E max(t1, t2) = 2 (1 + erf(sigma / 2)) t_c     (B3)

Inner steps take LogNormal(mu = 1, sigma^2 = 0.5), S_i is the sum of replica i's m. Its clock after
an outer step, exchanges left out:

    DiLoCo: T <- T + max_i S_i
    NoLoCo, with its partner j: T_i, T_j <- max(T_i + S_i, T_j + S_j)                          (B4)

The paper counts two exchanges for a pair. NoLoCo here needs one where gamma = beta (noloco.py). The
paper's messages have no bytes; experiments/sync.py counts them, too.
"""
import argparse
import json
import math
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from noloco import DiLoCo, NoLoCo

COUNTS = (4, 16, 64, 256, 1024, 4096)
SPREADS = (0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.25, 2.5)
INNER_STEPS = (1, 2, 5, 10, 20, 35, 50, 75, 100, 120)
OUTER_STEPS = (250, 500)


def parse(argv=None, program="bench_sync.py"):
    """The options, and in `command` what asked for them. program: as python and torchrun take it.
    """
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--simulate", action="store_true", help="simulate, in one process, instead of measuring")
    add("--draws", type=float, default=1.0, help="simulated: share of the draws, e.g. 0.1")
    add("--params", type=float, default=57e6, help="number of weights (default: 57e6)")
    add("--trials", type=int, default=11, help="measurements of each (default: 11)")
    add("--seed", type=int, default=0, help="seed of the drawn times and groups")
    add("--out", default="runs", help="folder in which results/ is written (default: runs)")
    add("--device", default="auto", choices=["auto", "cpu"],
        help="auto: GPUs and NCCL if each process has its own GPU, else CPUs and Gloo")
    words = sys.argv[1:] if argv is None else argv
    o = parser.parse_args(words)
    world = int(os.environ.get("WORLD_SIZE", 1))
    if not o.simulate and world == 1:
        parser.error("give --simulate, or use torchrun --nproc-per-node 8")
    launcher = "python" if o.simulate else f"torchrun --nproc-per-node {world}"
    o.command = f"{launcher} {program} {shlex.join(words)}"
    return o


# ---------------------------------------------------------------- Fig. 5A
# The last dimension of each tensor is the trials.


def messages(shape, spread, generator):
    """Times of messages (B1) with t_c = 1 and std(t) / t_c = spread."""
    variance = math.log(1 + spread**2)
    return torch.randn(shape, generator=generator).mul_(variance**0.5).sub_(variance / 2).exp_()


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


def pair_average(spread):
    """(B3) with t_c = 1."""
    sigma = math.log(1 + spread**2) ** 0.5
    return 2 * (1 + math.erf(sigma / 2))


def tree_over_pair(n, spread, precision, generator):
    """(mean, standard error) of the ratio in Fig. 5A, drawn until error < precision * mean."""
    trials = max(4, (1 << 18) // n)         # at once
    ratios = []
    mean, error = 1.0, math.inf
    while error > precision * mean:
        up, down = messages((2, 2 * n, trials), spread, generator)
        ratios.append(tree_all_reduce(up, down) / pair_average(spread))
        mean, error = mean_and_error(torch.cat(ratios))
    return mean, error


def mean_and_error(values):
    """(mean, standard error) of trials."""
    values = values.double()
    return float(values.mean()), float(values.std()) / len(values) ** 0.5


# ---------------------------------------------------------------- Fig. 5B


def training(n, inner_steps, outer_steps, trials, generator):
    """{method: seconds (B4) after each of outer_steps, for each of inner_steps, of each trial}."""
    everyone = torch.zeros(len(inner_steps), trials)
    clock = torch.zeros(len(inner_steps), n, trials)
    added = torch.empty_like(clock)
    totals = {"DiLoCo": [], "NoLoCo": []}
    # A longer m begins with the steps of a shorter one: each gap is what it adds to the one before.
    gaps = [b - a for a, b in zip((0,) + inner_steps, inner_steps)]
    for k in range(1, max(outer_steps) + 1):
        for i, gap in enumerate(gaps):
            normal = torch.randn((gap, n, trials), generator=generator)
            added[i] = normal.mul_(0.5**0.5).add_(1).exp_().sum(0)
        S = added.cumsum(0)
        everyone += S.amax(1)
        order = torch.rand((n, trials), generator=generator).argsort(0)     # neighbours are a pair
        pairs = (clock + S).gather(1, order.expand_as(S)).unflatten(1, (-1, 2))
        clock = pairs.amax(2).repeat_interleave(2, 1)
        if k in outer_steps:
            totals["DiLoCo"].append(everyone.clone())
            totals["NoLoCo"].append(clock.amax(1))
    return {name: torch.stack(total).double() for name, total in totals.items()}


def diloco_over_noloco(n, draws, generator):
    """Fig. 5B's ratio for each of OUTER_STEPS: (mean, standard error) for each of INNER_STEPS."""
    trials = max(2, round(draws * max(8, 4096 // n)))
    seconds = training(n, INNER_STEPS, OUTER_STEPS, trials, generator)
    rows = []
    for ratios in seconds["DiLoCo"] / seconds["NoLoCo"]:
        rows.append([mean_and_error(of_trials) for of_trials in ratios])
    return rows


def simulate(o):
    """Both figures' numbers, {"ratio": {n: of 5A}, "training": {n: of 5B}}, and their axes."""
    torch.set_num_threads(1)            # more threads wait for each other, on tensors of this size
    generator = torch.Generator().manual_seed(o.seed)
    precision = 0.004 / o.draws**0.5
    result = dict(counts=COUNTS, spreads=SPREADS, inner_steps=INNER_STEPS, outer_steps=OUTER_STEPS,
                  ratio={}, training={})
    for n in tqdm(COUNTS, "5A: trees", leave=False):
        result["ratio"][str(n)] = [tree_over_pair(n, spread, precision, generator)
                                   for spread in SPREADS]
    for n in tqdm(COUNTS, "5B: training", leave=False):
        result["training"][str(n)] = diloco_over_noloco(n, o.draws, generator)
    return result


def print_simulated(r):
    """Fig. 5A as a table in Markdown, and of Fig. 5B the sentence that the paper has."""
    counts = r["counts"]
    print("| std(t)/t_c | " + " | ".join(map(str, counts)) + " replicas |\n|" + 7 * "---|")
    for i, spread in enumerate(r["spreads"]):
        cells = [f"{r['ratio'][str(n)][i][0]:.1f}" for n in counts]
        print(f"| {spread:g} | " + " | ".join(cells) + " |")
    at = r["inner_steps"].index(100)
    for outer_steps, row in zip(r["outer_steps"], r["training"]["1024"]):
        ratio, error = row[at]
        print(f"\n1024 replicas, 100 inner steps, {outer_steps} outer steps: DiLoCo takes "
              f"{ratio - 1:.1%} +- {error:.1%} longer than NoLoCo")


# ---------------------------------------------------------------- measured


def methods(o, size, device):
    """(vectors, rows) of a model with so many weights. The rows: (name, function, bytes that a rank
    sends). vectors: what the functions change.
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
    rows = [("exchange of theta", exchange, theta.nbytes),
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
    device, machine = make_process_group(o)
    rank = dist.get_rank()
    vectors, rows = methods(o, int(o.params), device)
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
    spent = torch.tensor(cpu_seconds(), dtype=torch.float64, device=device)
    dist.all_reduce(spent)
    if rank == 0:
        found = {}
        for (row, _, sent), seconds in zip(rows, slowest[:, 1:].tolist()):      # the first warms up
            found[row] = dict(seconds=seconds, bytes=sent)
        result = dict(
            made=made(o.command, machine, float(spent) / 3600), replicas=dist.get_world_size(),
            params=int(o.params), bytes_of_theta=vectors[0].nbytes, trials=o.trials,
            load_before=load, backend=dist.get_backend(), rows=found)
        print_measured(result)
        save(o.out, f"sync_measured_{result['replicas']}", result)
    dist.destroy_process_group()


def make_process_group(o):
    """NCCL where each process has a GPU of its own, else Gloo: (the device, its name)."""
    gpus = torch.cuda.device_count() if o.device != "cpu" else 0
    if gpus < int(os.environ["LOCAL_WORLD_SIZE"]):
        dist.init_process_group("gloo")
        return torch.device("cpu"), here()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    return device, torch.cuda.get_device_name(device)


def print_measured(r):
    """The table in Markdown."""
    made, rows = r["made"], r["rows"]
    print(f"{r['replicas']} processes, {r['params'] / 1e6:g}M parameters, {r['backend']}, "
          f"{made['machine']}, torch {made['torch']}: slowest rank, "
          f"median [quartiles] of {r['trials']} trials\n")
    print("| | seconds | MB sent per rank | relative to the exchange | DiLoCo relative to it |\n|"
          + 5 * "---|")
    for name, row in rows.items():
        low, middle, high = statistics.quantiles(row["seconds"], n=4, method="inclusive")
        print(f"| {name} | {middle:.3f} [{low:.3f}, {high:.3f}] | {row['bytes'] / 1e6:.0f} "
              f"| {median_ratio(rows, name, 'exchange of theta'):.2f} "
              f"| {median_ratio(rows, 'DiLoCo', name):.2f} |")


def median_ratio(rows, one, other):
    """The median of the trials' ratios."""
    pairs = zip(rows[one]["seconds"], rows[other]["seconds"])
    return statistics.median(x / y for x, y in pairs)


# ---------------------------------------------------------------- files


def made(command, machine, cpu_hours):
    """What a file of results says of how it was made. Each file of results/ has it so."""
    return dict(command=command, commit=commit(), python=platform.python_version(),
                torch=torch.__version__, machine=machine, date=date.today().isoformat(),
                cpu_hours=round(cpu_hours, 5))


def cpu_seconds():
    """Of this process and of those that it has waited for."""
    return sum(os.times()[:4])


def here():
    """The machine: its processor's name, how many there are, the system."""
    name = None
    cpus = Path("/proc/cpuinfo")
    if cpus.exists():
        name = re.search(r"model name\s*: (.*)", cpus.read_text())
    kind = name[1] if name else platform.machine()
    return f"{kind}, {os.cpu_count()} processors, {platform.system()}"


def commit():
    """That of this file's git checkout, "-dirty" where more than its results and figures has
    changed; None where there is none."""
    ours = ["--", ".", ":!results", ":!figures"]
    try:
        name = git("describe", "--always", "--exclude=*")
        changed = git("status", "--porcelain", "--untracked-files=no", *ours)
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{name}-dirty" if changed else name


def git(*words):
    """What git says, in this file's folder."""
    return subprocess.check_output(["git", *words], cwd=Path(__file__).parent, text=True,
                                   stderr=subprocess.DEVNULL).strip()


def save(out, name, result):
    path = Path(out, "results", f"{name}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(path)


def main(argv=None):
    o = parse(argv)
    if not o.simulate:
        measure(o)
        return
    found = simulate(o)
    result = dict(made=made(o.command, here(), cpu_seconds() / 3600)) | found
    print_simulated(result)
    save(o.out, "sync_simulated", result)


if __name__ == "__main__":
    main()
