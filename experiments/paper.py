"""A synchronisation on paper: bytes, seconds and memory of each method, by Eq. 5 of bench_sync.py with
constant t.

    python -m experiments.paper --model small medium large --mbit 100 1000
    python -m experiments.paper --model large --replicas 1024 --mbit 100 --latency-ms 50
"""
import argparse
import itertools
import math

from experiments.pictures import show_head, show_row
from plumbing.options import Parser
from plumbing.processes import BadInput, Job

PARAMS = {"small": 125e6, "medium": 1.3e9, "large": 6.8e9}      # as the paper states them


def on_paper(params, n, mbit, latency, step_seconds):
    """{method: bytes sent per rank, seconds of a synchronisation, its share of training, bytes of memory
    per rank}."""
    B, rate = 4 * params, mbit * 1e6 / 8
    ring = 2 * (n - 1) / n * B
    reduce = 2 * math.ceil(math.log2(n)) * latency + ring / rate

    def row(inner_steps, sent, seconds, memory):
        return dict(bytes=sent, seconds=seconds, share=seconds / (seconds + inner_steps * step_seconds),
                    memory=memory * params)

    # theta, gradient and Adam's two take 16 bytes a parameter; phi and delta 8; NoLoCo's receive buffer 4,
    # one byte a weight (--wire int8) one to send and one to receive
    return {"DDP": row(1, ring, reduce, 16), "DiLoCo": row(100, ring, reduce, 24),
            "NoLoCo": row(50, B, latency + B / rate, 28),
            "one byte": row(50, B / 4, latency + B / 4 / rate, 26)}


def table(argv):
    o = parse(argv)
    latency = o.latency_ms / 1000
    print(f"fp32, {o.latency_ms:g} ms, inner steps of {o.step_seconds:g} s; DDP (each step) / "
          "DiLoCo (each 100) / NoLoCo (each 50, theta only) / NoLoCo in one byte a weight (each 50)\n")
    show_head("model | replicas | Mbit/s | GB sent per rank | seconds | share of training time, % "
              "| GB of memory per rank")
    for model, n, mbit in itertools.product(o.model, o.replicas, o.mbit):
        params = o.params or PARAMS[model]
        rows = on_paper(params, n, mbit, latency, o.step_seconds).values()
        show_row(f"{model}, {params / 1e6:g}M", n, f"{mbit:g}",
                 " / ".join(f"{row['bytes'] / 1e9:.2f}" for row in rows),
                 " / ".join(f"{row['seconds']:.4g}" for row in rows),
                 " / ".join(f"{row['share'] * 100:.1f}" for row in rows),
                 " / ".join(f"{row['memory'] / 1e9:.1f}" for row in rows))


def parse(argv):
    p = Parser(__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", nargs="+", choices=list(PARAMS), default=list(PARAMS))
    p.add_argument("--params", type=float, help="parameters, in place of the model's")
    p.add_argument("--replicas", nargs="+", type=int, default=[64, 1024])
    p.add_argument("--mbit", nargs="+", type=float, default=[1000.0], help="rates of a link in Mbit/s")
    p.add_argument("--latency-ms", type=float, default=50.0, help="time of a message beside its bytes")
    p.add_argument("--step-seconds", type=float, default=1.0, help="time of an inner step")
    o = p.parse_args(argv)
    if min(o.replicas) < 2:
        raise BadInput(f"--replicas must be at least 2, got {min(o.replicas)}")
    if not all(0 < x < math.inf for x in (*o.mbit, o.step_seconds, o.params or 1)):
        raise BadInput("--mbit, --step-seconds and --params must be positive numbers")
    if not 0 <= o.latency_ms < math.inf:
        raise BadInput(f"--latency-ms must be at least 0, got {o.latency_ms:g}")
    return o


def main(argv=None):
    Job().together(table, argv)


if __name__ == "__main__":
    main()
