"""What bench_sync.py found: its tables and pictures, the row of one byte a weight, and a synchronisation on
paper.

    python -m experiments.sync --out .                                      tables and pictures of results/
    torchrun --nproc-per-node 8 -m experiments.sync [bench_sync's options]  its measurement and that row
"""
import itertools
import json
import math
import sys
from functools import partial
from pathlib import Path

import bench_sync
from bench_sync import Timed, quartiles
from experiments.pictures import COLOURS, WIDTH, label_ends, picture, show_head, show_row
from plumbing.onebyte import OneByteNoLoCo
from plumbing.options import Parser
from plumbing.overlap import DelayedNoLoCo, DelayedOneByte
from plumbing.processes import BadInput, Job

SHADES = ("#CC79A7", "#E69F00", "#009E73", "#56B4E9", "#0072B2", "#000000")      # one per number of replicas
PARAMS = {"small": 125e6, "medium": 1.3e9, "large": 6.8e9}      # of the NoLoCo paper's models, as stated


def methods(o, params):
    """Beside bench_sync's: one byte a weight; and delayed outer steps that nothing hides.

    A delayed row merges the message before, sends its own and waits for its arrival.
    """
    rows, common = bench_sync.methods(o, params), dict(inner_steps=1, seed=o.seed)
    short = OneByteNoLoCo(params, **common)
    name = "NoLoCo, one byte a weight"
    rows[name] = Timed(short.step, sent=lambda: short.bytes_sent, floor="exchange of theta")
    for below, kind in {"NoLoCo": DelayedNoLoCo, name: DelayedOneByte}.items():
        outer = kind(params, delay=1, **common)
        outer.phi, outer.delta = short.phi, short.delta         # what is in them does not change the time

        def run(outer, alpha, beta):
            outer.alpha, outer.beta, outer.gamma = alpha, beta, beta
            outer.step()
            outer.settle()

        for settings, more in ((outer.alpha, outer.beta), ""), ((0, 1), ", plain averages"):
            rows[f"{below}, delayed{more}"] = Timed(partial(run, outer, *settings), floor=below,
                                                    sent=partial(getattr, outer, "bytes_sent"))
    return rows


# ---------------------------------------------------------------- on paper


def on_paper(params, n, mbit, latency, step_seconds=1.0):
    """{method: bytes sent per rank, seconds of a synchronisation, its share of training, bytes of memory},
    by (B5) with constant t. delayed: in one byte, D that hides a message, seconds left to wait at D = 25."""
    B, rate = 4 * params, mbit * 1e6 / 8
    ring = 2 * (n - 1) / n * B
    reduce = 2 * math.ceil(math.log2(n)) * latency + ring / rate
    one_byte = latency + B / 4 / rate

    def row(inner_steps, sent, seconds, memory):
        return dict(bytes=sent, seconds=seconds, share=seconds / (seconds + inner_steps * step_seconds),
                    memory=memory * params)

    # theta, gradient and Adam's two take 16 bytes a parameter; phi and delta 8; NoLoCo's receive buffer 4,
    # with one byte a weight one to send and one to receive; delayed, 4 more for what was sent
    return {"DDP": row(1, ring, reduce, 16), "DiLoCo": row(100, ring, reduce, 24),
            "NoLoCo": row(50, B, latency + B / rate, 28), "one byte": row(50, B / 4, one_byte, 26),
            "delayed": dict(delay=math.ceil(one_byte / step_seconds), memory=30 * params,
                            left=max(0.0, one_byte - 25 * step_seconds))}


def show_paper():
    show_head("model, 1024 replicas | Mbit/s | GB sent per rank | seconds | share of training time, % "
              "| delayed: D, seconds left")
    for (model, params), mbit in itertools.product(PARAMS.items(), (100, 1000, 100000)):
        *rows, late = on_paper(params, 1024, mbit, 0.05).values()
        show_row(f"{model}, {params / 1e6:g}M", mbit,
                 " / ".join(f"{row['bytes'] / 1e9:.2f}" for row in rows),
                 " / ".join(f"{row['seconds']:.4g}" for row in rows),
                 " / ".join(f"{row['share'] * 100:.1f}" for row in rows),
                 f"{late['delay']}, {late['left']:.4g}")
    memory = [row["memory"] / params for row in (*rows, late)]
    print("bytes of memory per parameter, delayed last: " + " / ".join(f"{each:g}" for each in memory))


# ---------------------------------------------------------------- the pictures


def draw_simulated(plt, r):
    figure, (a, b, c) = plt.subplots(3, 1, figsize=(WIDTH, 11.5), layout="constrained")

    def line(axis, x, points, colour, name, ends):
        value, error = zip(*points)
        axis.errorbar(x, value, [2 * e for e in error], color=colour, marker="o", capsize=2, lw=1.2)
        ends.append((value[-1], name, colour))

    ends_a, ends_b, ends_c = [], [], []
    for colour, n in zip(SHADES, r["ratio"]):
        line(a, r["spreads"], r["ratio"][n], colour, f"{n} replicas", ends_a)
        line(b, r["inner_steps"], r["training"]["NoLoCo"][n][1], colour, f"{n} replicas", ends_b)
    names = {"tree": "tree", "ring": "ring", "halving and doubling": "halving\nand doubling",
             "pair, two exchanges (paper)": "pair, two exchanges\n(paper)",
             "NoLoCo here, one exchange": "NoLoCo here,\none exchange"}
    for colour, (name, text) in zip((*SHADES[:3], "#555555", COLOURS["NoLoCo"]), names.items()):
        by = r["seconds"][name]
        line(c, [int(n) for n in by], list(by.values()), colour, text, ends_c)
    a.set(xlabel="std(t) / t_c of a message", ylabel="time, tree all-reduce / pair", ylim=(0, 65),
          title="A  Simulated: a pair averages 10 times as fast as a tree of 1024, more if messages vary\n"
                "(bars: two standard errors)")
    b.set(xlabel="inner steps per outer step", ylabel="training time, DiLoCo / NoLoCo",
          title="B  DiLoCo waits for the slowest of all replicas, NoLoCo for a partner\n"
                "(500 outer steps, exchange time left out)")
    c.set(xscale="log", yscale="log", xlabel="replicas", ylabel="seconds per synchronisation",
          title=f"C  With bytes counted the best all-reduce is closer\n({r['params'] / 1e6:g}M fp32 weights, "
                f"{r['mbit']:g} Mbit/s, {1000 * r['latency_seconds']:g} ms, std(t) / t_c {r['spread']:g})")
    c.set_xticks(r["counts"], [str(n) for n in r["counts"]])
    c.minorticks_off()
    for axis, ends in ((a, ends_a), (b, ends_b), (c, ends_c)):
        label_ends(axis, ends)
    return figure


def draw_measured(plt, found):
    """Bars of the same rows for each number of processes."""
    names = [name for name in found[0]["rows"] if "ahead" not in name][::-1]
    figure, axes = plt.subplots(1, len(found), figsize=(WIDTH, 5), layout="constrained", sharey=True,
                                squeeze=False)
    for axis, r in zip(axes.flat, found):
        rows = [quartiles(r["rows"][name]["seconds"]) for name in names]
        error = [[middle - low for low, middle, _ in rows], [high - middle for _, middle, high in rows]]
        colours = [COLOURS.get(name.split(",")[0].split(":")[0], "#999999") for name in names]
        labels = [name.replace(", delayed", ",\ndelayed") for name in names]
        axis.barh(labels, [middle for _, middle, _ in rows], 0.7, xerr=error, capsize=2, color=colours,
                  ecolor="#777777")
        axis.set(xlabel="seconds", title=f"{r['replicas']} processes, {r['params'] / 1e6:g}M weights in fp32")
    figure.suptitle("Measured: NoLoCo's outer step is faster than DiLoCo's between 8 processes\n"
                    f"(medians, quartiles; grey: floors; the rest: whole outer steps; {found[0]['device']})",
                    fontsize=10.5)
    return figure


def show(argv=None):
    p = Parser(__doc__)
    p.add_argument("--out", default="runs", help="folder of results/ and figures/ (default: runs)")
    p.add_argument("--plot", action="store_true", help="the same: this program measures under torchrun only")
    o = p.parse_args(argv)
    there = [json.loads(file.read_text()) for file in sorted(Path(o.out, "results").glob("sync_*.json"))]
    if not there:
        raise BadInput(f"no results/sync_*.json in {o.out}: first python bench_sync.py --simulate")
    for r in [r for r in there if "ratio" in r]:
        bench_sync.print_simulated(r)
        picture(o.out, "sync_simulated", draw_simulated, r)
    measured = [r for r in there if "rows" in r]
    for r in measured:
        bench_sync.print_measured(r)
    if measured:
        picture(o.out, "sync_measured", draw_measured, measured)
    show_paper()


if __name__ == "__main__":
    job = Job()
    if job.world > 1:
        bench_sync.measure(bench_sync.parse(sys.argv[1:]), methods)
    else:
        job.together(show)
