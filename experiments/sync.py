"""How long synchronisation takes: bench_sync.py's tables and pictures, and messages with bytes.

    python -m experiments.sync [--scale try|plot|full] [--plot]
    torchrun --nproc-per-node 8 -m experiments.sync --out .     its measurement (its options), and
                                                                the row of one byte per weight

The simulations take a minute of a core. The full scale measures, too, what OUT/results lacks, with
2 and with 8 processes, each by the second command: on an idle machine.

The paper's Fig. 5A counts messages. Here a message of b bytes takes b / rate longer; links do not
contend. For B bytes of parameters, n replicas, and messages that all take t_c,

    all-reduce by halving and doubling: 2 log2 n t_c + 2 (n - 1) / n B / rate
    NoLoCo: t_c + B / rate                                                                     (B5)
"""
import json
import statistics

import torch
from tqdm import tqdm

import bench_sync
from bench_sync import mean_and_error, messages, tree_all_reduce
from experiments.harness import Row, command, results_file, run_ranks
from experiments.pictures import COLOURS, GREY, WIDTH, frame, legend
from experiments.stats import Expected, Table
from gossip.onebyte import OneByteNoLoCo
from train import Job

SHADES = ("#9E9AC8", "#807DBA", "#6A51A3", "#54278F", "#3F007D")    # one per number of replicas
COUNTS = ("16", "64", "256", "1024", "4096")                        # of replicas; tables have 4 too
PROCESSES = (2, 8)                                                  # of the measurements
# Rows of the measurement that are drawn, and their names there.
SHOWN = {"exchange of theta": "exchange", "all-reduce of theta": "all-reduce", "DiLoCo": "DiLoCo",
         "NoLoCo": "NoLoCo", "NoLoCo, one byte a weight": "NoLoCo,\none byte"}
TREE, RING, HALVING = "tree", "ring", "halving and doubling"        # all-reduces
PAPERS, OURS = "pair, two exchanges (paper)", "pair, one exchange (NoLoCo here)"


def methods_and_one_byte(o, size, device):
    """Those of bench_sync, and one byte per weight, below NoLoCo in fp32."""
    vectors, rows = bench_sync.methods(o, size, device)
    weights = bench_sync.equal_weights(o, size, device)
    short = OneByteNoLoCo([weights], inner_steps=1, seed=o.seed)
    short.step()
    names = [name for name, _, _ in rows]
    rows.insert(names.index("NoLoCo") + 1,
                ("NoLoCo, one byte a weight", short.step, short.bytes_sent))
    return [*vectors, weights.detach()], rows


def measure(o):
    """What bench_sync.py simulates, and seconds with bytes counted. At the full scale measure
    real processes first, unless OUT/results has them."""
    for processes in PROCESSES:
        if o.scale == "full" and not measured_file(o.out, processes).exists():
            run_ranks(processes, "-m", "experiments.sync", "--out", o.out)
    draws = 0.02 if o.scale == "try" else 1.0
    found = bench_sync.simulate(bench_sync.parse(["--simulate", "--draws", str(draws)]))
    generator = torch.Generator().manual_seed(0)
    found["seconds"] = {}
    for n in tqdm(bench_sync.COUNTS, "with bytes", leave=False):
        for name, seconds in synchronisations(n, draws, generator).items():
            found["seconds"].setdefault(name, {})[str(n)] = mean_and_error(seconds)
    return found


def measured_file(out, processes):
    return results_file(out, f"sync_measured_{processes}")


# ---------------------------------------------------------------- simulated, with bytes

PARAMS = 125e6
MBIT = 1000         # of a link
LATENCY = 0.05      # t_c, in seconds
SPREAD = 1.0        # std(t) / t_c


def synchronisations(n, draws, generator, spread=SPREAD, latency=LATENCY,
                     seconds=32 * PARAMS / (MBIT * 1e6)):
    """{name: seconds (trials) of synchronising n replicas once}. `seconds` is what the bytes of the
    whole vector take on a link.
    """
    many = max(2, round(draws * (1 << 20) / n))
    few = max(2, round(draws * (1 << 15) / n))              # for a ring's many rounds
    ranks = torch.arange(n)

    def times(*shape, part=1.0):
        """Of messages that carry this part of the vector."""
        return messages(shape, spread, generator).mul_(latency).add_(part * seconds)

    ring = ((ranks.roll(1), times(n, few, part=1 / n)) for _ in range(2 * (n - 1)))
    halves = [(ranks ^ (n >> r), 0.5**r) for r in range(1, n.bit_length())]
    halving = ((other, times(n, many, part=part)) for other, part in halves + halves[::-1])
    return {
        TREE: tree_all_reduce(times(2 * n, many), times(2 * n, many)),
        RING: all_reduce(ring),
        HALVING: all_reduce(halving),
        PAPERS: times(2, 2, many).amax(1).sum(0),
        OURS: times(2, many).amax(0),
    }


def all_reduce(rounds):
    """Seconds (trials) of an all-reduce. A round is (whom each rank hears, times (n, trials) of
    what each sends). A rank sends once it has what the round before brought: in a ring to the next
    rank, by halves (a butterfly) to the one at a distance.
    """
    clock = torch.zeros(())
    for source, t in rounds:
        clock = torch.maximum(clock, (clock + t)[source])
    return clock.amax(0)


# ---------------------------------------------------------------- tables


def measured(out):
    """The measurements that OUT/results has."""
    files = [measured_file(out, processes) for processes in PROCESSES]
    return [json.loads(file.read_text()) for file in files if file.exists()]


def show(found):
    bench_sync.print_simulated(found)
    print()
    table = Table("1024 replicas", "seconds")
    for name, by in found["seconds"].items():
        table.add(name, f"{by['1024'][0]:.1f}")
    table.end()
    if found["scale"] == "full":
        for processes in measured(found["out"]):
            bench_sync.print_measured(processes)
            print()


# ---------------------------------------------------------------- the pictures


def line(axis, x, points, colour, name):
    """points: (value, its standard error, which is too small to be seen)."""
    axis.plot(x, [value for value, _ in points], "o-", color=colour, lw=1.5, label=name)


def mark_paper(axis, x, y, words, away):
    """Ring the point of which the paper tells a number. away: the words, in points."""
    axis.plot(x, y, "o", color=COLOURS["NoLoCo"], ms=12, mfc="none", mew=2)
    axis.annotate(words, (x, y), xytext=away, textcoords="offset points", color=COLOURS["NoLoCo"],
                  va="center")


def draw_over_tree(plt, found):
    """Fig. 5A."""
    figure, axis = plt.subplots(figsize=(WIDTH, 4.0))
    for colour, n in zip(SHADES, COUNTS):
        line(axis, found["spreads"], found["ratio"][n], colour, f"{n} replicas")
    alike = found["ratio"]["1024"][found["spreads"].index(0)][0]
    mark_paper(axis, 0, alike, "the paper: 10", (-4, 40))
    axis.set(xlabel="how much messages vary, std(t) / t_c", ylim=(0, None),
             ylabel="time of a tree all-reduce\nover a pair's")
    legend(axis)
    frame(figure, found, f"A pair averages {alike:.0f} times as fast as a tree of 1024, more if "
          "messages vary", "A tree all-reduce over a pair (Fig. 5A)")
    return figure


def draw_over_diloco(plt, found):
    """Fig. 5B, from many inner steps to few, so that the lines end apart."""
    figure, axis = plt.subplots(figsize=(WIDTH, 4.0))
    for colour, n in zip(SHADES, COUNTS):
        ratios = found["training"][n][1]
        line(axis, found["inner_steps"][::-1], ratios[::-1], colour, f"{n} replicas")
    ratio = found["training"]["1024"][1][found["inner_steps"].index(100)][0]
    mark_paper(axis, 100, ratio, "the paper:\nabout 1.2", (-12, 40))
    axis.set_xscale("log")
    ticks = (100, 50, 20, 10, 5, 2, 1)
    axis.set(xlabel="inner steps per outer step, fewer to the right", xlim=(150, 0.9),
             xticks=ticks, xticklabels=ticks, ylabel="training time,\nDiLoCo over NoLoCo")
    axis.minorticks_off()
    legend(axis)
    frame(figure, found, f"1024 replicas that wait for all every 100 steps take {ratio - 1:.0%} "
          "longer than pairs", "DiLoCo's training time over NoLoCo's (Fig. 5B)")
    return figure


def draw_with_bytes(plt, found):
    names = {TREE: "tree", RING: "ring", HALVING: "halving and\ndoubling",
             PAPERS: "pair, as in\nthe paper", OURS: "pair, here"}
    colours = (SHADES[0], SHADES[2], SHADES[4], GREY, COLOURS["NoLoCo"])
    figure, axis = plt.subplots(figsize=(WIDTH, 4.2))
    for colour, (name, text) in zip(colours, names.items()):
        seconds = found["seconds"][name]
        line(axis, [int(n) for n in seconds], list(seconds.values()), colour, text)
    ticks = (5, 10, 50, 100, 500)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set(xlabel="replicas", ylabel="seconds per synchronisation")
    axis.set_xticks(found["counts"], [str(n) for n in found["counts"]])
    axis.set_yticks(ticks, [str(tick) for tick in ticks])
    axis.minorticks_off()
    legend(axis)
    best, _ = found["seconds"][HALVING]["1024"]
    here, _ = found["seconds"][OURS]["1024"]
    frame(figure, found, f"With bytes counted, a pair is {best / here:.1f} times as fast as the "
          "best all-reduce of 1024", "Synchronisation with bytes counted")
    return figure


def draw_measured(plt, found):
    """Medians and quartiles of the same rows for each number of processes. Grey: the bare messages;
    in colour: whole outer steps."""
    rows = measured(found["out"])
    names = [name for name in rows[0]["rows"] if name in SHOWN]
    figure, axes = plt.subplots(1, len(rows), figsize=(WIDTH, 2.9), sharey=True, squeeze=False)
    for axis, processes in zip(axes.flat, rows):
        for height, name in enumerate(names):
            seconds = processes["rows"][name]["seconds"]
            low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
            colour = COLOURS.get(name.split(",")[0], GREY)
            axis.plot([low, high], [height, height], color=colour, lw=2.5)
            axis.plot(middle, height, "o", color=colour, ms=8)
            axis.annotate(f"{middle:.2f} s", (1, height), xycoords=("axes fraction", "data"),
                          xytext=(6, 0), textcoords="offset points", va="center", color=colour)
        axis.set(xlabel="seconds", title=f"{processes['replicas']} processes", xlim=(0, None),
                 yticks=range(len(names)), yticklabels=[SHOWN[name] for name in names],
                 ylim=(len(names) - 0.4, -0.6))
        axis.locator_params(axis="x", nbins=4)
        axis.grid(axis="y", visible=False)
    most = rows[-1]
    times = bench_sync.median_ratio(most["rows"], "DiLoCo", "NoLoCo")
    frame(figure, found, f"NoLoCo's outer step is {times:.1f} times as fast as DiLoCo's between "
          f"{most['replicas']} processes", "Outer steps, measured")
    return figure


# ---------------------------------------------------------------- expected numbers


def expected(found):
    alike, varied = found["spreads"].index(0), found["spreads"].index(1)
    ratios = found["ratio"]["1024"]
    hundred = found["inner_steps"].index(100)
    most = found["outer_steps"].index(500)
    return [
        Expected("a tree all-reduce over a pair, 1024 replicas, all messages alike (Fig. 5A; "
                 "paper: 10)", ratios[alike][0], 10.0, 0.01, ".2f"),
        Expected("the same with std(t) = t_c", ratios[varied][0], 17.0, 0.6, ".1f"),
        Expected("DiLoCo's time over NoLoCo's, 1024 replicas, 100 inner steps (Fig. 5B; paper: "
                 "about +20%)", found["training"]["1024"][most][hundred][0] - 1, 0.194,
                 0.015),
    ]


PICTURES = {"sync_5a": draw_over_tree, "sync_5b": draw_over_diloco, "sync_bytes": draw_with_bytes,
            "sync_measured": draw_measured}
ROW = Row("sync", measure, show, PICTURES, expected, full_alone=("sync_measured",))

if __name__ == "__main__":
    if Job().world > 1:
        bench_sync.measure(bench_sync.parse(program="-m experiments.sync"), methods_and_one_byte)
    else:
        command(__doc__, ROW)
