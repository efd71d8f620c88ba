"""How long outer steps hold the training: whole and in fragments, at once and delayed.

    torchrun --nproc-per-node 2 -m experiments.held [--params 57e6] [--inner-seconds 0.5]

Between outer steps a rank sleeps for --inner-seconds, as if a GPU were training, so that its
processor is free for messages. The four settings take turns. "Seconds in 10 steps" is the time for
which `outer.step()` held the slowest rank in m = 10 inner steps, so in one outer step of each
weight: the median over the rounds. OUT/results/held_PROCESSES_PARAMS_METHOD_WIRE.json keeps all.
"""
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
from tqdm import tqdm

from experiments.comparing import Table
from experiments.results import save_result
from gossip import outer_optimizer
from noloco import flatten
from plumbing.options import Parser
from plumbing.processes import BadInput, Job

M = 10                                                  # inner steps of an outer step
SETTINGS = {"K 1, D 0": (1, 0), "K 10, D 0": (10, 0), "K 1, D 1": (1, 1), "K 10, D 1": (10, 1)}


def parse(argv, world):
    p = Parser(__doc__)
    p.add_argument("--params", type=float, default=57e6, help="weights (default: 57e6)")
    p.add_argument("--inner-seconds", type=float, default=0.5, help="of an inner step, asleep")
    p.add_argument("--rounds", type=int, default=5, help="of all settings (default: 5)")
    p.add_argument("--method", choices=("noloco", "diloco"), default="noloco")
    p.add_argument("--wire", default="fp32", help="fp32 or int8")
    p.add_argument("--out", default="runs", help="folder of results/ (default: runs)")
    if world < 2:
        raise BadInput("one process has no partner: torchrun --nproc-per-node 2 -m "
                       "experiments.held")
    return p.parse_args(argv)


def measure(o):
    """{setting: [of each round: [seconds held in each of M steps, of the slowest rank]]}, and the
    bytes that a rank sent in M steps: {setting: bytes}."""
    size = int(o.params)
    params = []
    for part in torch.randn(size).mul_(0.02).tensor_split(min(32, size)):
        params.append(torch.nn.Parameter(part))
    theta, _ = flatten(params)
    held = {name: [] for name in SETTINGS}
    sent = {}
    for _ in tqdm(range(o.rounds), "rounds", disable=dist.get_rank() != 0, dynamic_ncols=True):
        for name, (fragments, delay) in SETTINGS.items():
            dist.broadcast(theta, 0)            # an outer optimizer begins with equal weights
            outer = outer_optimizer(o.method, o.wire, delay, params, fragments=fragments,
                                    inner_steps=M, alpha=0, beta=1)
            steps(outer, theta, M + delay, o.inner_seconds)     # warms up
            before = outer.bytes_sent
            seconds = steps(outer, theta, M, o.inner_seconds)
            sent[name] = outer.bytes_sent - before
            outer.settle()
            del outer               # before the next one takes as much memory
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            held[name].append(seconds.tolist())
    return held, sent


def steps(outer, theta, count, inner_seconds):
    """The seconds that each of `count` steps is held."""
    seconds = []
    dist.barrier()
    for _ in range(count):
        time.sleep(inner_seconds)
        theta.mul_(1 + 1e-6 * (1 + dist.get_rank()))            # replicas differ
        clock = time.perf_counter()
        outer.step()
        seconds.append(time.perf_counter() - clock)
    return torch.tensor(seconds, dtype=torch.float64)


def show(found):
    print(f"{found['method']}, {found['wire']}, {found['params'] / 1e6:g}M weights, "
          f"{found['replicas']} processes on {found['cores']} cores (load before: "
          f"{found['load_before']:.1f}), inner steps of {found['inner_seconds']:g} s")
    table = Table("setting", "seconds in 10 steps", "of K 1, D 0's", "longest step", "share held")
    base = found["held"]["K 1, D 0"]
    for name, rounds in found["held"].items():
        sums = [sum(seconds) for seconds in rounds]
        ratios = [sum(seconds) / sum(others) for seconds, others in zip(rounds, base)]
        longest = statistics.median(max(seconds) for seconds in rounds)
        middle = statistics.median(sums)
        share = middle / (middle + M * found["inner_seconds"])
        table.add(name, f"{middle:.3f}", f"{statistics.median(ratios):.2f}", f"{longest:.3f} s",
                  f"{share:.1%}")
    table.end()


def main(argv):
    job = Job()
    o = job.together(parse, argv, job.world)
    load = os.getloadavg()[0]
    dist.init_process_group("gloo")
    held, sent = measure(o)
    if dist.get_rank() == 0:
        found = dict(params=o.params, inner_seconds=o.inner_seconds, rounds=o.rounds,
                     method=o.method, wire=o.wire, replicas=job.world, cores=os.cpu_count(),
                     load_before=load, held=held, sent=sent)
        show(found)
        save_result(o.out, f"held_{job.world}_{int(o.params)}_{o.method}_{o.wire}", found)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
