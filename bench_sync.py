"""How long synchronisation takes: Figs. 5A and 5B of arXiv 2506.10911 simulated, and the outer step measured.

    python bench_sync.py --simulate                                            for thousands of replicas
    python bench_sync.py --simulate --params 57e6 --mbit 100 --latency-ms 20   for your own model and link
    torchrun --nproc-per-node 8 bench_sync.py                                  real processes: Gloo or NCCL

Tables are printed, numbers written to runs/results (--out). This file needs noloco.py, torch and tqdm.

n replicas. A message takes t ~ LogNormal(mu, sigma^2), independently of all others:

    t_c = E t = exp(mu + sigma^2 / 2),    std(t) / t_c = sqrt(exp(sigma^2) - 1)                      (B1)
    tree all-reduce: up and down a binary tree with the replicas as leaves;  sigma = 0: 2 t_c log2 n (B2)
    pair averaging: the same with two leaves,    2 E max(t1, t2) = 2 (1 + erf(sigma / 2)) t_c        (B3)

Inner steps take LogNormal(mu = 1, sigma^2 = 0.5), S_i is the sum of replica i's m. Its clock after an
outer step, exchanges left out:

    DiLoCo: T <- T + max_i S_i    NoLoCo, with its partner j: T_i, T_j <- max(T_i + S_i, T_j + S_j)  (B4)

Beyond the paper: a message of b bytes takes b / rate longer; links do not contend. For B bytes of
parameters and at sigma = 0

    all-reduce by halving and doubling: 2 log2 n t_c + 2 (n - 1) / n B / rate   NoLoCo: t_c + B / rate  (B5)

The paper counts two exchanges for a pair. NoLoCo here needs one, of theta, where gamma = beta (Eq. N2' in
noloco.py).
"""
import argparse
import json
import math
import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable

import torch
import torch.distributed as dist
from tqdm import tqdm

from noloco import DiLoCo, NoLoCo, flatten

COUNTS = (4, 16, 64, 256, 1024, 4096)
SPREADS = (0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.25, 2.5)
INNER_STEPS = (1, 2, 5, 10, 20, 35, 50, 75, 100, 120)
OUTER_STEPS = (250, 500)


class Parser(argparse.ArgumentParser):
    """argparse, but a mistake is one line, from rank 0."""

    def error(self, message):
        if int(os.environ.get("RANK", 0)):
            time.sleep(1)               # torchrun stops all processes when the first leaves
        else:
            print(f"error: {message} (see --help)", file=sys.stderr)
        sys.exit(2)


def parse(argv=None):
    p = Parser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--simulate", action="store_true", help="the simulations")
    p.add_argument("--params", type=float, help="parameters (default: measured 57e6, simulated 125e6)")
    p.add_argument("--mbit", type=float, default=1000.0, help="simulated: rate of a link (default: 1000)")
    p.add_argument("--latency-ms", type=float, default=50.0, help="simulated: t_c (default: 50)")
    p.add_argument("--latency-std", type=float, default=1.0, help="simulated: std(t) / t_c (default: 1)")
    p.add_argument("--draws", type=float, default=1.0, help="simulated: share of the random draws, e.g. 0.1")
    p.add_argument("--trials", type=int, default=11, help="measurements of each (default: 11)")
    p.add_argument("--seed", type=int, default=0, help="of all drawn times and groups")
    p.add_argument("--out", default="runs", help="folder of results/ (default: runs)")
    p.add_argument("--device", default="auto", choices=["auto", "cpu"], help="auto: a GPU where there is one")
    p.add_argument("--backend", default="auto", choices=["auto", "gloo"], help="auto: NCCL where it can run")
    o = p.parse_args(argv)
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world > 1 and o.simulate:
        p.error("--simulate needs no torchrun: python bench_sync.py --simulate")
    if world == 1 and not o.simulate:
        p.error("nothing to do: give --simulate, or start torchrun --nproc-per-node 8 bench_sync.py")
    for name, least in dict(params=1, mbit=1e-6, latency_ms=0, latency_std=0, draws=1e-3, trials=1).items():
        value, most = getattr(o, name), 5 if name == "latency_std" else 1e15    # beyond 5 draws get many
        if value is not None and not least <= value <= most:
            p.error(f"--{name.replace('_', '-')} must be from {least} to {most:g}, got {value:g}")
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
    """(B2) for any n: up[j] and down[j] (trials) are times between heap node j and its parent j // 2.

    The replicas are nodes n ... 2n-1.
    """
    last = len(up)                                  # 2n
    ready = torch.zeros_like(up)
    starts = [2**k for k in range(1, last.bit_length()) if 2**k < last]
    levels = [(a, min(2 * a, last)) for a in starts]
    for a, b in reversed(levels):                   # a parent waits for the later of its two children
        ready[a // 2:b // 2] = (ready[a:b] + up[a:b]).unflatten(0, (-1, 2)).amax(1)
    for a, b in levels:
        ready[a:b] = ready[a // 2:b // 2].repeat_interleave(2, 0) + down[a:b]
    return ready[last // 2:].amax(0)                # (trials)


def pair_average(t):
    """(B3) from t (exchanges, 2, trials): an exchange is over when both messages have arrived."""
    return t.amax(1).sum(0)


def all_reduce(rounds):
    """Each round is (whom each rank hears, times of what each sends (n, trials)). A rank sends once it has
    the round before's: in a ring to the next, or by halves (a butterfly) to the one at a distance."""
    clock = torch.zeros(())
    for source, t in rounds:
        clock = torch.maximum(clock, (clock + t)[source])
    return clock.amax(0)


def reductions(n, spread, latency, seconds, generator):
    """{name: sample() -> (trials)} of synchronising n replicas once; the whole vector's bytes take
    `seconds` on a link."""
    many = max(4, (1 << 20) // n)
    few = max(4, (1 << 15) // n)
    ranks = torch.arange(n)
    halves = [(ranks ^ (n >> r), 0.5**r) for r in range(1, n.bit_length())]

    def draw(*shape, part=1.0, trials=many):
        return messages((*shape, trials), spread, generator).mul_(latency).add_(part * seconds)

    def ring():
        steps = 2 * (n - 1)
        return all_reduce((ranks.roll(1), draw(n, part=1 / n, trials=few)) for _ in range(steps))

    def halving():
        return all_reduce((other, draw(n, part=part)) for other, part in halves + halves[::-1])

    return {
        "tree": lambda: tree_all_reduce(draw(2 * n), draw(2 * n)),
        "ring": ring,
        "halving and doubling": halving,
        "pair, two exchanges (paper)": lambda: pair_average(draw(2, 2)),
        "NoLoCo here, one exchange": lambda: pair_average(draw(1, 2)),
    }


def estimate(sample, relative=0.004):
    """(mean, standard error) of sample() -> (trials); draws until the error is below `relative` of the
    mean."""
    values = sample()
    while float(values.std()) > relative * float(values.mean()) * len(values) ** 0.5:
        values = torch.cat([values] + [sample() for _ in range(max(1, len(values) // 1024))])
    return float(values.double().mean()), float(values.double().std()) / len(values) ** 0.5


def inner_seconds(shape, generator):
    """Times of single inner steps (B4)."""
    return torch.randn(shape, generator=generator).mul_(0.5**0.5).add_(1).exp_()


def training(n, inner_steps, outer_steps, trials, generator):
    """Total times (B4) after each of outer_steps, for each of inner_steps: {name: (outer steps, inner
    steps, trials)}.

    "alone" forgets who was late at every outer step: a pair then costs E max(S_1, S_2), as in the
    paper's analysis.
    """
    everyone = torch.zeros(len(inner_steps), trials)
    alone = torch.zeros_like(everyone)
    clock = torch.zeros(len(inner_steps), n, trials)
    totals = {"DiLoCo": [], "NoLoCo": [], "alone": []}
    gaps = [b - a for a, b in zip((0,) + inner_steps, inner_steps)]
    for k in range(1, max(outer_steps) + 1):
        S = torch.stack([inner_seconds((gap, n, trials), generator).sum(0) for gap in gaps]).cumsum(0)
        everyone += S.amax(1)
        alone += S.unflatten(1, (-1, 2)).amax(2).mean(1)
        pairs = (clock + S)[:, torch.randperm(n, generator=generator)].unflatten(1, (-1, 2))
        clock = pairs.amax(2).repeat_interleave(2, 1)
        if k in outer_steps:
            for name, total in (("DiLoCo", everyone), ("NoLoCo", clock.amax(1)), ("alone", alone)):
                totals[name].append(total.clone())
    return {name: torch.stack(total).double() for name, total in totals.items()}


# ---------------------------------------------------------------- simulated


def simulate(o):
    """Everything simulated and its checks, into results/sync_simulated.json; returns it."""
    torch.set_num_threads(1)            # more threads wait for each other, on tensors of this size
    began = time.perf_counter()
    generator = torch.Generator().manual_seed(o.seed)
    params = o.params or 125e6
    latency, error = o.latency_ms / 1000, 0.004 / o.draws**0.5
    result = dict(params=params, mbit=o.mbit, latency_seconds=latency, spread=o.latency_std,
                  counts=COUNTS, spreads=SPREADS, inner_steps=INNER_STEPS, outer_steps=OUTER_STEPS,
                  ratio={}, pair=[], training={}, seconds={})
    progress = tqdm(total=len(SPREADS) + 3 * len(COUNTS), desc="simulating", dynamic_ncols=True)
    for spread in SPREADS:                                                      # (A)
        sample = reductions(1 << 12, spread, 1.0, 0.0, generator)["pair, two exchanges (paper)"]
        result["pair"].append((*estimate(sample, error / 4), pair_closed_form(spread)))
        progress.update()
    for n in COUNTS:
        result["ratio"][str(n)] = tree_over_pair(n, result["pair"], error, generator)
        progress.update()
    for n in COUNTS:                                                            # (B)
        for name, rows in training_ratios(n, o.draws, generator).items():
            result["training"].setdefault(name, {})[str(n)] = rows
        progress.update()
    for n in COUNTS:                                                            # (C)
        samples = reductions(n, o.latency_std, latency, 32 * params / (o.mbit * 1e6), generator)
        for name, sample in samples.items():
            result["seconds"].setdefault(name, {})[str(n)] = estimate(sample, error)
        progress.update()
    progress.close()
    result["wall_seconds"] = time.perf_counter() - began
    print_simulated(result)
    return save(o.out, "sync_simulated", result)


def tree_over_pair(n, pairs, relative, generator):
    """(ratio, error) for each spread."""
    rows = []
    for spread, (pair, pair_error, _) in zip(SPREADS, pairs):
        tree, error = estimate(reductions(n, spread, 1.0, 0.0, generator)["tree"], relative)
        rows.append((tree / pair, tree / pair * math.hypot(error / tree, pair_error / pair)))
    return rows


def training_ratios(n, draws, generator):
    """DiLoCo's time over NoLoCo's: {name: [[(ratio, error) for each of INNER_STEPS] for each of
    OUTER_STEPS]}."""
    found = {"NoLoCo": [[] for _ in OUTER_STEPS], "alone": [[] for _ in OUTER_STEPS]}
    many, few = max(40, 4096 // n), max(4, 1024 // n)           # few inner steps vary most
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
    print("| std(t)/t_c | " + " | ".join(map(str, r["counts"])) + " replicas |\n|" + 7 * "---|")
    for i, spread in enumerate(r["spreads"]):
        print(f"| {spread:g} | " + " | ".join(f"{r['ratio'][str(n)][i][0]:.1f}" for n in r["counts"]) + " |")
    at = r["inner_steps"].index(100)
    for i, outer in enumerate(r["outer_steps"]):
        now, alone = (r["training"][name]["1024"][i][at] for name in ("NoLoCo", "alone"))
        print(f"\n1024 replicas, 100 inner steps, {outer} outer steps: DiLoCo takes "
              f"{now[0] - 1:.1%} +- {now[1]:.1%} longer than NoLoCo "
              f"({alone[0] - 1:.1%} if a pair's delay were forgotten at once)")
    print("\n| 1024 replicas | seconds |\n|---|---|")
    for name, by in r["seconds"].items():
        print(f"| {name} | {by['1024'][0]:.1f} |")


# ---------------------------------------------------------------- measured


@dataclass
class Timed:
    """What is timed, what comes before, bytes it sends (or a count so far), the row that is its floor."""
    run: Callable
    before: Callable = lambda: None
    sends: int = 0
    sent: Callable = lambda: 0
    floor: str = None
    seconds: list = field(default_factory=list)


def methods(o, params):
    """{name: Timed}: floors, then whole outer steps, of all replicas at once."""
    theta, grad = flatten(params)
    noloco = NoLoCo(params, inner_steps=1, seed=o.seed)
    diloco = DiLoCo(params, inner_steps=1)
    diloco.phi, diloco.delta = noloco.phi, noloco.delta     # what is in them does not change the time

    def ddp():
        dist.all_reduce(grad)
        grad.div_(dist.get_world_size())

    pair = noloco.group(0)

    def exchange():
        noloco.exchange(theta, pair)

    ring = 2 * (dist.get_world_size() - 1) * theta.nbytes // dist.get_world_size()
    reduce, swap = "all-reduce of theta", "exchange of theta"
    return {
        "memcpy of theta": Timed(lambda: grad.copy_(theta)),
        swap: Timed(exchange, sends=noloco.cost(pair)),
        reduce: Timed(lambda: dist.all_reduce(grad), before=lambda: grad.copy_(theta), sends=ring),
        "DDP: gradient": Timed(ddp, sends=ring, floor=reduce),
        "DiLoCo": Timed(diloco.step, sent=lambda: diloco.bytes_sent, floor=reduce),
        "NoLoCo": Timed(noloco.step, sent=lambda: noloco.bytes_sent, floor=swap),
    }


def measure(o, methods=methods):
    """Each method's whole outer step beside its floors, trial by trial in turn; a time is the slowest rank's.

    Rank 0 prints the table and writes results/sync_measured_N.json. methods(o, params) -> {name: Timed}.
    """
    load = os.getloadavg()[0]
    device = connect(o)
    size, tensors = int(o.params or 57e6), 32
    cuts = [size * (i + 1) // tensors - size * i // tensors for i in range(tensors)]
    params = [torch.nn.Parameter(torch.randn(cut, device=device).mul_(0.02)) for cut in cuts if cut]
    theta, _ = flatten(params)
    dist.broadcast(theta, 0)            # NoLoCo expects equal weights at the start
    rows = methods(o, params)
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for _ in tqdm(range(o.trials + 1), desc="measuring", disable=dist.get_rank() != 0, dynamic_ncols=True):
        for row in rows.values():
            theta.mul_(1.001 + 0.001 * dist.get_rank())     # Delta is not zero, replicas differ
            row.before()
            start = row.sent()
            wait()
            dist.barrier()
            clock = time.perf_counter()
            row.run()
            wait()
            row.seconds.append(time.perf_counter() - clock)
            row.bytes = row.sends or row.sent() - start
    nccl = dist.get_backend() == "nccl"
    table = [[*row.seconds[1:], row.bytes] for row in rows.values()]        # the first warms up
    slowest = torch.tensor(table, dtype=torch.float64, device=device if nccl else "cpu")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    result = dict(replicas=dist.get_world_size(), params=size, bytes_of_theta=theta.nbytes,
                  trials=o.trials, load_before=load, backend=dist.get_backend(), torch=torch.__version__,
                  device=torch.cuda.get_device_name(device) if device.type == "cuda" else
                  f"{os.cpu_count()} cores {os.uname().machine}", python=sys.version.split()[0], rows={})
    for (name, row), (*seconds, sent) in zip(rows.items(), slowest.tolist()):
        result["rows"][name] = dict(seconds=seconds, bytes=int(sent), floor=row.floor)
    if dist.get_rank() == 0:
        print_measured(result)
        save(o.out, f"sync_measured_{result['replicas']}", result)
    dist.destroy_process_group()


def connect(o):
    """Make the process group: NCCL where each process has a GPU of its own, else Gloo. Returns the device."""
    local, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count() if o.device != "cpu" else 0
    nccl = gpus >= int(os.environ["LOCAL_WORLD_SIZE"]) and o.backend != "gloo"
    device = torch.device("cuda", local % gpus) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if nccl else "gloo")
    return device


def quartiles(x):
    return statistics.quantiles(x, n=4, method="inclusive") if len(x) > 1 else x * 3


def print_measured(r):
    """The table in Markdown. Ratios are medians of the trials' ratios."""
    rows = r["rows"]

    def ratio(a, b):
        return statistics.median(x / y for x, y in zip(rows[a]["seconds"], rows[b]["seconds"]))

    print(f"{r['replicas']} processes, {r['params'] / 1e6:g}M parameters, {r['backend']}, {r['device']}, "
          f"torch {r['torch']}: slowest rank, median [quartiles] of {r['trials']} trials\n")
    print("| | seconds | MB sent per rank | DiLoCo's / its | its / its floor's |\n|" + 5 * "---|")
    for name, row in rows.items():
        low, middle, high = quartiles(row["seconds"])
        sent = row["bytes"] / 1e6
        floor = f"{ratio(name, row['floor']):.2f}" if row["floor"] else ""
        print(f"| {name} | {middle:.3f} [{low:.3f}, {high:.3f}] | {sent:.0f} | {ratio('DiLoCo', name):.2f} "
              f"| {floor} |")


def save(out, name, result):
    path = Path(out, "results", f"{name}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(path)
    return result


def main(argv=None):
    o = parse(argv)
    simulate(o) if o.simulate else measure(o)


if __name__ == "__main__":
    main()
