"""What bench_sync.py found: its tables and pictures; and the row of one byte a weight.

    python -m experiments.sync --out .                  tables and pictures of results/
    torchrun --nproc-per-node 8 -m experiments.sync     its measurement (its options), and that row
"""
import sys
from pathlib import Path

import bench_sync
from bench_sync import quartiles
from experiments.pictures import COLOURS, WIDTH, label_ends, picture
from experiments.results import kept_result
from gossip.onebyte import OneByte, lengths_of
from noloco import NoLoCo
from train import Job, Parser

SHADES = ("#9E9AC8", "#807DBA", "#6A51A3", "#54278F", "#3F007D")    # one per number of replicas
COUNTS = ("16", "64", "256", "1024", "4096")                        # of replicas; tables have 4 too


def methods_and_one_byte(o, size, device):
    """Beside bench_sync's: one byte a weight, below NoLoCo in fp32."""
    vectors, rows = bench_sync.methods(o, size, device)
    weights = bench_sync.equal_weights(o, size, device)
    codec = OneByte(lengths_of([weights]))
    short = NoLoCo([weights], inner_steps=1, seed=o.seed, codec=codec)
    short.step()
    names = [name for name, _, _ in rows]
    rows.insert(names.index("NoLoCo") + 1,
                ("NoLoCo, one byte a weight", short.step, short.bytes_sent))
    return [*vectors, weights.detach()], rows


# ---------------------------------------------------------------- the simulated picture


def draw_simulated(plt, found):
    figure, axes = plt.subplots(3, 1, figsize=(WIDTH, 11.5))
    draw_over_tree(axes[0], found)
    draw_over_diloco(axes[1], found)
    draw_with_bytes(axes[2], found)
    for axis in axes:
        label_ends(axis)
    return figure


def line(axis, x, points, colour, name):
    """points: (value, its standard error)."""
    values = [value for value, _ in points]
    two = [2 * error for _, error in points]
    axis.errorbar(x, values, two, color=colour, marker="o", capsize=2, lw=1.2, label=name)


def draw_over_tree(axis, found):
    for colour, n in zip(SHADES, COUNTS):
        line(axis, found["spreads"], found["ratio"][n], colour, f"{n} replicas")
    axis.set(xlabel="std(t) / t_c of a message", ylabel="time, tree all-reduce / pair",
             ylim=(0, None),
             title="A  Simulated: a pair averages 10 times as fast as a tree of 1024, more if "
             "messages vary\n(bars: two standard errors)")


def draw_over_diloco(axis, found):
    """From many inner steps to few, so that the lines end apart."""
    for colour, n in zip(SHADES, COUNTS):
        ratios = found["training"]["NoLoCo"][n][1]
        line(axis, found["inner_steps"][::-1], ratios[::-1], colour, f"{n} replicas")
    axis.set_xscale("log")
    ticks = (100, 50, 20, 10, 5, 2, 1)
    axis.set(xlabel="inner steps per outer step (fewer to the right)", xlim=(150, 0.9),
             xticks=ticks, xticklabels=ticks, ylabel="training time, DiLoCo / NoLoCo",
             title="B  Simulated: DiLoCo waits for the slowest of all replicas, NoLoCo for a "
             "partner\n(500 outer steps, exchange time left out)")
    axis.minorticks_off()


def draw_with_bytes(axis, found):
    names = {"tree": "tree", "ring": "ring", "halving and doubling": "halving\nand doubling",
             "pair, two exchanges (paper)": "pair, two exchanges\n(paper)",
             "NoLoCo here, one exchange": "NoLoCo here,\none exchange"}
    colours = (SHADES[0], SHADES[2], SHADES[4], "#555555", COLOURS["NoLoCo"])
    for colour, (name, text) in zip(colours, names.items()):
        seconds = found["seconds"][name]
        line(axis, [int(n) for n in seconds], list(seconds.values()), colour, text)
    ticks = (5, 10, 50, 100, 500)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set(xlabel="replicas", ylabel="seconds per synchronisation",
             title="C  Simulated: with bytes an all-reduce is closer\n"
             f"({found['params'] / 1e6:g}M fp32 weights, {found['mbit']:g} Mbit/s, "
             f"{1000 * found['latency_seconds']:g} ms, std(t) / t_c {found['spread']:g})")
    axis.set_xticks(found["counts"], [str(n) for n in found["counts"]])
    axis.set_yticks(ticks, [str(tick) for tick in ticks])
    axis.minorticks_off()


# ---------------------------------------------------------------- the measured picture


def draw_measured(plt, found):
    """Bars of the same rows for each number of processes."""
    names = [name for name in found[0]["rows"] if "delayed" not in name and "memcpy" not in name]
    names.reverse()
    figure, axes = plt.subplots(1, len(found), figsize=(WIDTH, 4.4), sharey=True, squeeze=False)
    for axis, measured in zip(axes.flat, found):
        quarters = [quartiles(measured["rows"][name]["seconds"]) for name in names]
        middles = [middle for _, middle, _ in quarters]
        below = [middle - low for low, middle, _ in quarters]
        above = [high - middle for _, middle, high in quarters]
        axis.barh(names, middles, 0.7, xerr=[below, above], capsize=2, ecolor="#777777",
                  color=[bar_colour(name) for name in names])
        axis.set(xlabel="seconds", title=f"{measured['replicas']} processes, "
                 f"{measured['params'] / 1e6:g}M weights in fp32")
    figure.suptitle(f"{measured_finding(found)}\n(medians, bars: quartiles; grey: the bare "
                    f"messages; the rest: whole outer steps; {found[0]['device']})",
                    x=0.01, ha="left")
    return figure


def bar_colour(name):
    method = name.split(",")[0].split(":")[0]
    return COLOURS.get(method, "#999999")


def measured_finding(found):
    """What the largest number of processes shows."""
    most = max(found, key=lambda measured: measured["replicas"])
    diloco = quartiles(most["rows"]["DiLoCo"]["seconds"])[1]
    noloco = quartiles(most["rows"]["NoLoCo"]["seconds"])[1]
    relation = "faster" if noloco < diloco else "not faster"
    return (f"Measured: NoLoCo's outer step is {relation} than DiLoCo's between {most['replicas']} "
            "processes")


def show_sync(argv=None):
    p = Parser(__doc__)
    p.add_argument("--out", default="runs", help="folder of results/ and figures/ (default: runs)")
    p.add_argument("--plot", action="store_true",
                   help="the same: this program measures under torchrun only")
    o = p.parse_args(argv)
    simulated = kept_result(o.out, "sync_simulated")
    bench_sync.print_simulated(simulated)
    picture(o.out, "sync_simulated", draw_simulated, simulated)
    files = sorted(Path(o.out, "results").glob("sync_measured_*"))
    measured = [kept_result(o.out, file.stem) for file in files]
    for found in measured:
        bench_sync.print_measured(found)
    if measured:
        picture(o.out, "sync_measured", draw_measured, measured)


if __name__ == "__main__":
    job = Job()
    if job.world > 1:
        bench_sync.measure(bench_sync.parse(sys.argv[1:]), methods_and_one_byte)
    else:
        job.together(show_sync)
