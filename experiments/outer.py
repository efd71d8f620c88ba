"""The outer step on a GPU: how long it takes, and how much of it the training does not see (part of
experiments/gpu.py).

    torchrun --nproc-per-node 2 -m experiments.outer KEPT.json --backend gloo [its options]

Ranks that share a GPU, or CPUs, make inner steps of pretended work and outer steps between them.
Every m = 10 inner steps all weights have met once: in one message, or in 10 fragments, one a step.

    ms      (seconds of 10 inner steps with outer steps) - (without), where nothing travels
            beside the training (D = 0)
    seen    the same with a delay: D = 5 for whole messages, 1 for fragments

The slowest rank counts, and the median of the trials. On one GPU the ranks take turns, and messages
never leave the machine: a network is slower. Over Gloo messages are staged through pinned memory.
"""
import statistics
import time

import torch

from experiments.comparing import Table
from experiments.pieces import Clock, Kept
from gossip import outer_optimizer
from noloco import flatten
from plumbing.options import Parser
from plumbing.processes import Job

M = 10
KINDS = {}              # {name: (wire, fragments, D)}
for wire in "fp32", "int8":
    KINDS[f"{wire}, whole"] = wire, 1, 5
    KINDS[f"{wire}, in fragments"] = wire, M, 1


def parse(argv=None):
    p = Parser(__doc__)
    p.add_argument("kept", help="the JSON file that keeps each row")
    p.add_argument("--backend", default="auto", choices=["auto", "gloo", "nccl"])
    p.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    p.add_argument("--params", type=float, default=125e6, help="weights of a replica")
    p.add_argument("--work", type=int, default=8192, help="rows of the pretended work's matrix")
    p.add_argument("--products", type=int, default=40, help="matrix products of an inner step")
    p.add_argument("--trials", type=int, default=3, help="of 10 inner steps each")
    p.add_argument("--minutes", type=float, default=8, help="no row begins later than this")
    return p.parse_args(argv)


class Work:
    """An inner step: matrix products in bf16 on a GPU, and weights that move."""

    def __init__(self, o, theta, rank):
        dtype = torch.bfloat16 if theta.is_cuda else torch.float32
        self.a = torch.randn(o.work, o.work, device=theta.device, dtype=dtype) / o.work**0.5
        self.products = o.products
        self.theta = theta
        self.factor = 1 + 1e-3 * (rank + 1)         # so that replicas differ

    def __call__(self):
        x = self.a
        for _ in range(self.products):
            x = self.a @ x
        self.theta.mul_(self.factor)


def seconds_of(job, work, outer, trials):
    """The slowest rank's seconds of M inner steps, in each trial; a first one warms up."""
    found = []
    for _ in range(trials + 1):
        wait(job)
        job.share("ready", 0)
        start = time.perf_counter()
        for _ in range(M):
            work()
            if outer:
                outer.step()
        wait(job)
        found.append(max(job.share("seconds", time.perf_counter() - start)))
    if outer:
        outer.settle()
    return found[1:]


def wait(job):
    """Until this GPU has done all its work: the host runs ahead of it. What is under way in another
    stream belongs to it."""
    if job.device.type == "cuda":
        torch.cuda.current_stream().synchronize()


def outer_of(wire, fragments, delay, params):
    return outer_optimizer("noloco", wire, delay, params, fragments=fragments, inner_steps=M,
                           alpha=0.5, beta=0.7)


def measure(job, o):
    """Measure each kind that the file lacks, as long as there is time."""
    clock = Clock(o.minutes)
    kept = Kept(o.kept)
    size = int(o.params)
    torch.manual_seed(0)                # equal weights on all ranks
    parts = torch.randn(size, device=job.device).mul_(0.02).tensor_split(min(32, size))
    params = [torch.nn.Parameter(part) for part in parts]
    theta, _ = flatten(params)
    first = theta.clone()
    work = Work(o, theta, job.rank)
    backend = "nccl" if job.nccl else "gloo"
    machine = torch.cuda.get_device_name() if job.device.type == "cuda" else "CPU"
    taken = 0.0
    for name, (wire, fragments, delay) in KINDS.items():
        key = f"{backend}, {name}"
        if job.agree_on("kept", lambda: key in kept.rows):
            continue
        if job.agree_on("time", lambda: 1.2 * taken > clock.left()):
            return
        began = time.monotonic()
        row = dict(machine=machine, ranks=job.world, params=size, backend=backend)
        row["without"] = seconds_of(job, work, None, o.trials)
        for what, steps in (("at once", 0), ("delayed", delay)):
            theta.copy_(first)
            row[what] = seconds_of(job, work, outer_of(wire, fragments, steps, params), o.trials)
        taken = time.monotonic() - began
        if job.leads:
            kept.keep(key, row)


def main(argv=None):
    job = Job()
    o = job.together(parse, argv)
    job.connect(o)
    measure(job, o)
    job.close()


# ---------------------------------------------------------------- what was found


def times(row):
    """(ms of an outer step, ms that the training sees of it where it is delayed): medians."""
    without = statistics.median(row["without"])
    whole = statistics.median(row["at once"]) - without
    seen = statistics.median(row["delayed"]) - without
    return 1000 * whole, 1000 * seen


def show(found):
    rows = found["rows"]
    for row in list(rows.values())[:1]:
        step = 1000 * statistics.median(row["without"]) / M
        print(f"{row['ranks']} ranks, {row['params'] / 1e6:g}M weights, {row['machine']}; an inner "
              f"step takes {step:.1f} ms\n")
    table = Table("all weights meet once", "ms", "delayed: ms seen", "share unseen")
    for name, row in rows.items():
        whole, seen = times(row)
        share = f"{1 - seen / whole:.0%}" if whole > 0 else None
        table.add(name, f"{whole:.1f}", f"{seen:.1f}", share)
    table.end()


if __name__ == "__main__":
    main()
