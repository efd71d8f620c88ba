"""How long synchronisation takes: Figs. 5A and 5B of arXiv 2506.10911 simulated, and the outer step
measured.

    python bench_sync.py --simulate                                            for thousands of replicas
    python bench_sync.py --simulate --params 57e6 --mbit 100 --latency-ms 20   for your own model and link
    torchrun --nproc-per-node 8 bench_sync.py                                  what is: Gloo or NCCL
    python bench_sync.py --plot --out .                                        draw figures/ from results/

n replicas. A message takes t ~ LogNormal(mu, sigma^2), independently of all others:

    t_c = E t = exp(mu + sigma^2 / 2),    std(t) / t_c = sqrt(exp(sigma^2) - 1)                       (1)
    tree all-reduce: up and down a binary tree with the replicas as leaves;  sigma = 0: 2 t_c log2 n  (2)
    pair averaging: the same with two leaves,    2 E max(t1, t2) = 2 (1 + erf(sigma / 2)) t_c         (3)

Inner steps take LogNormal(mu = 1, sigma^2 = 0.5), S_i is the sum of replica i's m. Its clock after an
outer step, exchanges left out:

    DiLoCo: T <- T + max_i S_i    NoLoCo, with its partner j: T_i, T_j <- max(T_i + S_i, T_j + S_j)   (4)

Beyond the paper: a message of b bytes takes b / rate longer; links do not contend. For B bytes of
parameters and at sigma = 0

    all-reduce by halving and doubling: 2 log2 n t_c + 2 (n - 1) / n B / rate    NoLoCo: t_c + B / rate  (5)

The paper counts two exchanges for a pair. Our NoLoCo needs one, of theta: phi is not needed or came
ahead (Eq. 2' in noloco.py).
"""
import argparse
import json
import math
import os
import platform
import time
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from experiments.pictures import picture, save
from experiments.sync import add_ratios, draw_measured, draw_simulated, print_measured, print_simulated
from noloco import DiLoCo, NoLoCo, flatten
from plumbing.onebyte import OneByteNoLoCo
from plumbing.options import Parser
from plumbing.processes import BadInput, Job

COUNTS = (4, 16, 64, 256, 1024, 4096)
SPREADS = (0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.25, 2.5)
INNER_STEPS = (1, 2, 5, 10, 20, 35, 50, 75, 100, 120)
OUTER_STEPS = (250, 500)


def parse(argv):
    p = Parser(__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--simulate", action="store_true", help="the simulations and their picture")
    p.add_argument("--plot", action="store_true", help="draw the pictures again from what --out holds")
    p.add_argument("--params", type=float, help="parameters (default: measured 57e6, simulated 125e6)")
    p.add_argument("--mbit", type=float, default=1000.0, help="simulated: rate of a link (default: 1000)")
    p.add_argument("--latency-ms", type=float, default=50.0, help="simulated: t_c (default: 50)")
    p.add_argument("--latency-std", type=float, default=1.0, help="simulated: std(t) / t_c (default: 1)")
    p.add_argument("--trials", type=int, default=11, help="measurements of each (default: 11)")
    p.add_argument("--seed", type=int, default=0, help="of all drawn times and groups")
    p.add_argument("--out", default="runs", help="folder of results/ and figures/ (default: runs)")
    p.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    p.add_argument("--backend", default="auto", choices=["auto", "gloo", "nccl"])
    o = p.parse_args(argv)
    world = int(os.environ.get("WORLD_SIZE", 1))
    alone = o.simulate or o.plot
    if world > 1 and alone:
        raise BadInput("--simulate and --plot need no torchrun: python bench_sync.py ...")
    if world == 1 and not alone:
        raise BadInput("nothing to do: give --simulate or --plot, or start torchrun ... bench_sync.py")
    for name, least in dict(params=1, mbit=1e-6, latency_ms=0, latency_std=0, trials=1).items():
        value = getattr(o, name)
        if value is not None and not least <= value < math.inf:
            raise BadInput(f"--{name.replace('_', '-')} must be at least {least}, got {value:g}")
    if o.latency_std > 5:
        raise BadInput("--latency-std must be at most 5: beyond, means need too many draws")
    return o


# ---------------------------------------------------------------- the model of a network
# The last dimension is that of the trials.


def messages(shape, spread, generator):
    """Times of messages (1) with t_c = 1 and std(t) / t_c = spread."""
    variance = math.log(1 + spread**2)
    return torch.randn(shape, generator=generator).mul_(variance**0.5).sub_(variance / 2).exp_()


def pair_closed_form(spread):
    """(3) with t_c = 1."""
    return 2 * (1 + math.erf(math.log(1 + spread**2) ** 0.5 / 2))


def tree_all_reduce(up, down):
    """(2) for any n: up[j] and down[j] (trials) are times between heap node j and its parent j // 2.

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
    """(3) from t (exchanges, 2, trials): an exchange is over when both messages have arrived."""
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
        "butterfly": lambda: all_reduce((other, draw(n)) for other, _ in halves),
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
    """Times of single inner steps (4)."""
    return torch.randn(shape, generator=generator).mul_(0.5**0.5).add_(1).exp_()


def training(n, inner_steps, outer_steps, trials, generator):
    """Total times (4) after each of outer_steps, for each of inner_steps: {name: (outer steps, inner
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


def late_replica(generator, n=1024, inner_steps=50, outer_steps=24, start=4, trials=8):
    """Mean time that replicas have lost to one late replica, in mean outer steps without it.

    {case: {method: [(mean, error) after each outer step]}}
    """
    unit = inner_steps * math.exp(1.25)                         # the mean of an outer step
    S = [inner_seconds((inner_steps, n, trials), generator).sum(0) for _ in range(outer_steps)]
    order = [torch.randperm(n, generator=generator) for _ in S]

    def clocks(late):
        everyone = torch.zeros(trials)
        clock = torch.zeros(n, trials)
        history = {"DiLoCo": [], "NoLoCo": []}
        for k, (s, permutation) in enumerate(zip(S, order)):
            s = torch.cat([late(k, s[:1]), s[1:]])
            everyone = everyone + s.amax(0)
            pairs = (clock + s)[permutation].unflatten(0, (-1, 2)).amax(1).repeat_interleave(2, 0)
            clock = torch.empty_like(pairs).index_copy_(0, permutation, pairs)  # the late one stays
            history["DiLoCo"].append(everyone)
            history["NoLoCo"].append(clock.mean(0))
        return {method: torch.stack(h) for method, h in history.items()}

    usual = clocks(lambda k, s: s)
    cases = {"stops once, for 1 outer step": lambda k, s: s + unit * (k == start),
             "for 4 (or is dead, given up after 4)": lambda k, s: s + 4 * unit * (k == start),
             "half speed from then on": lambda k, s: s * (2 if k >= start else 1)}
    lost = {}
    for case, late in cases.items():
        now = clocks(late)
        rows = {method: (now[method] - usual[method]) / unit for method in now}
        lost[case] = {method: list(zip(x.mean(1).tolist(), (x.std(1) / trials**0.5).tolist()))
                      for method, x in rows.items()}
    return lost


# ---------------------------------------------------------------- simulated


def simulate(o):
    """Everything simulated, its checks, results/sync_simulated.json and figures/sync_simulated.png."""
    began = time.perf_counter()
    generator = torch.Generator().manual_seed(o.seed)
    params = o.params or 125e6
    latency = o.latency_ms / 1000
    result = dict(params=params, mbit=o.mbit, latency_seconds=latency, spread=o.latency_std,
                  counts=COUNTS, spreads=SPREADS, inner_steps=INNER_STEPS, outer_steps=OUTER_STEPS,
                  ratio={}, pair=[], training={}, seconds={})
    progress = tqdm(total=len(SPREADS) + 3 * len(COUNTS) + 1, desc="simulating", dynamic_ncols=True)
    for spread in SPREADS:                                                      # (A)
        sample = reductions(1 << 12, spread, 1.0, 0.0, generator)["pair, two exchanges (paper)"]
        result["pair"].append((*estimate(sample, 0.001), pair_closed_form(spread)))
        progress.update()
    for n in COUNTS:
        result["ratio"][n] = tree_over_pair(n, result["pair"], generator)
        progress.update()
    for n in COUNTS:                                                            # (B)
        for name, rows in training_ratios(n, generator).items():
            result["training"].setdefault(name, {})[n] = rows
        progress.update()
    for n in COUNTS:                                                            # (C)
        samples = reductions(n, o.latency_std, latency, 32 * params / (o.mbit * 1e6), generator)
        for name, sample in samples.items():
            result["seconds"].setdefault(name, {})[n] = estimate(sample)
        progress.update()
    result["late"] = late_replica(generator)                                    # (D)
    progress.update()
    progress.close()
    result["wall_seconds"] = time.perf_counter() - began
    print_simulated(result)
    save(o.out, "sync_simulated", result)
    plot(o.out, "sync_simulated")


def tree_over_pair(n, pairs, generator):
    """(ratio, error) for each spread."""
    rows = []
    for spread, (pair, pair_error, _) in zip(SPREADS, pairs):
        tree, error = estimate(reductions(n, spread, 1.0, 0.0, generator)["tree"])
        rows.append((tree / pair, tree / pair * math.hypot(error / tree, pair_error / pair)))
    return rows


def training_ratios(n, generator):
    """DiLoCo's time over NoLoCo's: {name: [[(ratio, error) for each of INNER_STEPS] for each of
    OUTER_STEPS]}."""
    found = {"NoLoCo": [[] for _ in OUTER_STEPS], "alone": [[] for _ in OUTER_STEPS]}
    for steps, trials in ((INNER_STEPS[:3], max(40, 4096 // n)), (INNER_STEPS[3:], max(4, 1024 // n))):
        total = training(n, steps, OUTER_STEPS, trials, generator)              # few inner steps vary most
        for name, rows in found.items():
            ratio = total["DiLoCo"] / total[name]
            error = ratio.std(2) / trials**0.5
            for row, values, errors in zip(rows, ratio.mean(2).tolist(), error.tolist()):
                row += zip(values, errors)
    return found


# ---------------------------------------------------------------- measured


class Timed:
    """What is timed, what comes before it, who counts its bytes (or how many they are), and the floor
    below it."""

    def __init__(self, run, outer=None, before=None, sends=0, floor=None):
        self.run, self.outer, self.before, self.sends, self.floor = run, outer, before, sends, floor
        self.seconds = []

    def sent(self):
        return self.outer.bytes_sent if self.outer else 0


def methods(o, job):
    """({name: Timed}, theta): floors, then whole outer steps, of all replicas at once."""
    size, tensors = int(o.params or 57e6), 32
    cuts = [size * (i + 1) // tensors - size * i // tensors for i in range(tensors)]
    params = [torch.nn.Parameter(torch.randn(cut, device=job.device).mul_(0.02)) for cut in cuts if cut]
    theta, grad = flatten(params)
    dist.broadcast(theta, 0)        # NoLoCo expects equal weights at the start
    noloco = NoLoCo(params, inner_steps=1, seed=o.seed)
    early = NoLoCo(params, inner_steps=1, seed=o.seed, gamma=0.9)
    diloco = DiLoCo(params, inner_steps=1)
    short = OneByteNoLoCo(params, inner_steps=1, seed=o.seed)
    early.buffers = noloco.buffers
    for other in (diloco, early, short):    # one set of vectors: what is in them does not change the time
        other.phi, other.delta = noloco.phi, noloco.delta

    def exchange():
        for work in noloco.post("theta", theta)[1]:
            work.wait()

    def phi_arrives():              # inner steps hide what travels ahead
        phis, works = early.send_ahead()
        for work in works:
            work.wait()
        early.ahead = phis, []

    def ddp():
        dist.all_reduce(grad)
        grad.div_(job.world)

    ring = 2 * (job.world - 1) * theta.nbytes // job.world
    reduce, swap = "all-reduce of theta", "exchange of theta"
    return {
        "memcpy of theta": Timed(lambda: grad.copy_(theta)),
        swap: Timed(exchange, noloco),
        reduce: Timed(lambda: dist.all_reduce(grad), before=lambda: grad.copy_(theta), sends=ring),
        "DDP: gradient": Timed(ddp, sends=ring, floor=reduce),
        "DiLoCo": Timed(diloco.step, diloco, floor=reduce),
        "NoLoCo": Timed(noloco.step, noloco, floor=swap),
        "NoLoCo, gamma != beta, phi ahead": Timed(early.step, early, before=phi_arrives, floor=swap),
        "NoLoCo, one byte a weight": Timed(short.step, short, floor=swap),
    }, theta


def measure(o, job):
    """The whole outer step of each method beside the floors below it, interleaved; a time is the slowest
    rank's.

    Keeps results/sync_measured_N.json and draws figures/sync_measured.png.
    """
    load = os.getloadavg()[0]
    rows, theta = methods(o, job)
    wait = torch.cuda.synchronize if job.device.type == "cuda" else lambda: None
    for _ in tqdm(range(o.trials + 1), desc="measuring", disable=job.rank != 0, dynamic_ncols=True):
        for row in rows.values():
            theta.mul_(1.001)       # so that Delta is not zero
            start = row.sent()
            if row.before:
                row.before()
            ready = row.sent()
            wait()
            dist.barrier()
            clock = time.perf_counter()
            row.run()
            wait()
            row.seconds.append(time.perf_counter() - clock)
            row.ahead = ready - start
            row.bytes = row.sends or row.sent() - ready
    table = [[*row.seconds[1:], row.bytes, row.ahead] for row in rows.values()]     # the first warms up
    slowest = torch.tensor(table, dtype=torch.float64, device=job.device if job.nccl else "cpu")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    if job.rank:
        return
    cores = f"{os.cpu_count()} cores {platform.machine()}"
    device = torch.cuda.get_device_name(job.device) if job.device.type == "cuda" else cores
    result = dict(replicas=job.world, params=int(o.params or 57e6), bytes_of_theta=theta.nbytes,
                  trials=o.trials, load_before=load, device=device, backend=dist.get_backend(),
                  torch=torch.__version__, python=platform.python_version(), rows={})
    for (name, row), (*seconds, sent, ahead) in zip(rows.items(), slowest.tolist()):
        result["rows"][name] = dict(seconds=seconds, bytes=int(sent), bytes_ahead=int(ahead),
                                    floor=row.floor)
    add_ratios(result)
    print_measured(result)
    save(o.out, f"sync_measured_{job.world}", result)
    plot(o.out, "sync_measured")


def plot(out, name):
    """figures/sync_simulated.png or sync_measured.png from results/."""
    files = sorted(Path(out, "results").glob(f"{name}*.json"))
    if not files:
        raise BadInput(f"no results/{name}*.json in {out}: simulate or measure first")
    draw = draw_simulated if name == "sync_simulated" else draw_measured
    picture(out, name, draw, [json.loads(file.read_text()) for file in files])


def main(argv=None):
    job = Job()
    o = job.together(parse, argv)
    job.connect(o)
    if o.plot:
        for name in ("sync_simulated", "sync_measured"):
            job.together(plot, o.out, name)
    elif o.simulate:
        simulate(o)
    else:
        measure(o, job)
    job.close()


if __name__ == "__main__":
    main()
