"""What bench_sync.py found: its tables and pictures; and the row of one byte a weight.

    python -m experiments.sync --out .                                      tables and pictures of results/
    torchrun --nproc-per-node 8 -m experiments.sync [bench_sync's options]  its measurement and that row
"""
import sys
from pathlib import Path

import bench_sync
from bench_sync import TableRow, quartiles
from experiments.pictures import COLOURS, WIDTH, kept, label_ends, picture
from plumbing.onebyte import OneByteNoLoCo
from plumbing.options import Parser
from plumbing.processes import Job

SHADES = ("#BCBDDC", "#9E9AC8", "#807DBA", "#6A51A3", "#54278F", "#3F007D")      # one per number of replicas


def methods(o, params):
    """Beside bench_sync's: one byte a weight."""
    rows, short = bench_sync.methods(o, params), OneByteNoLoCo(params, inner_steps=1, seed=o.seed)
    sent = lambda: short.bytes_sent
    rows["NoLoCo, one byte a weight"] = TableRow(short.step, sent=sent, floor="exchange of theta")
    return rows


# ---------------------------------------------------------------- the pictures


def draw_simulated(plt, r):
    figure, (a, b, c) = plt.subplots(3, 1, figsize=(WIDTH, 11.5))

    def line(axis, x, points, colour, name):
        value, error = zip(*points)
        two = [2 * e for e in error]
        axis.errorbar(x, value, two, color=colour, marker="o", capsize=2, lw=1.2, label=name)

    for colour, n in zip(SHADES, r["ratio"]):
        line(a, r["spreads"], r["ratio"][n], colour, f"{n} replicas")
        line(b, r["inner_steps"], r["training"]["NoLoCo"][n][1], colour, f"{n} replicas")
    names = {"tree": "tree", "ring": "ring", "halving and doubling": "halving\nand doubling",
             "pair, two exchanges (paper)": "pair, two exchanges\n(paper)",
             "NoLoCo here, one exchange": "NoLoCo here,\none exchange"}
    for colour, (name, text) in zip((*SHADES[:3], "#555555", COLOURS["NoLoCo"]), names.items()):
        by = r["seconds"][name]
        line(c, [int(n) for n in by], list(by.values()), colour, text)
    a.set(xlabel="std(t) / t_c of a message", ylabel="time, tree all-reduce / pair", ylim=(0, 65),
          title="A  Simulated: a pair averages 10 times as fast as a tree of 1024, more if messages vary\n"
                "(bars: two standard errors)")
    b.set(xlabel="inner steps per outer step", ylabel="training time, DiLoCo / NoLoCo",
          title="B  Simulated: DiLoCo waits for the slowest of all replicas, NoLoCo for a partner\n"
                "(500 outer steps, exchange time left out)")
    c.set(xscale="log", yscale="log", xlabel="replicas", ylabel="seconds per synchronisation",
          title=f"C  Simulated: with bytes an all-reduce is closer\n({r['params'] / 1e6:g}M fp32 weights, "
                f"{r['mbit']:g} Mbit/s, {1000 * r['latency_seconds']:g} ms, std(t) / t_c {r['spread']:g})")
    c.set_xticks(r["counts"], [str(n) for n in r["counts"]])
    c.minorticks_off()
    for axis in (a, b, c):
        label_ends(axis)
    return figure


def draw_measured(plt, found):
    """Bars of the same rows for each number of processes."""
    names = [name for name in found[0]["rows"] if "delayed" not in name][::-1]
    figure, axes = plt.subplots(1, len(found), figsize=(WIDTH, 5), sharey=True,
                                squeeze=False)
    for axis, r in zip(axes.flat, found):
        rows = [quartiles(r["rows"][name]["seconds"]) for name in names]
        error = [[middle - low for low, middle, _ in rows], [high - middle for _, middle, high in rows]]
        colours = [COLOURS.get(name.split(",")[0].split(":")[0], "#999999") for name in names]
        axis.barh(names, [middle for _, middle, _ in rows], 0.7, xerr=error, capsize=2, color=colours,
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
    simulated = kept(o.out, "sync_simulated")
    bench_sync.print_simulated(simulated)
    picture(o.out, "sync_simulated", draw_simulated, simulated)
    measured = [kept(o.out, file.stem) for file in sorted(Path(o.out, "results").glob("sync_measured_*"))]
    for r in measured:
        bench_sync.print_measured(r)
    if measured:
        picture(o.out, "sync_measured", draw_measured, measured)


if __name__ == "__main__":
    job = Job()
    if job.world > 1:
        bench_sync.measure(bench_sync.parse(sys.argv[1:]), methods)
    else:
        job.together(show)
