"""An outer step alone between hosts, against latency: the `latency` part of
experiments/network.py."""
import itertools
import json
import statistics

from experiments.clock import COMMON, CPU, OUTER_STEPS, PROGRAM
from experiments.comparing import Table
from experiments.harness import Part, Setting, title_of
from experiments.pictures import COLOURS, WIDTH, bars, label_ends
from experiments.results import results, spread_of

SHARES = {2: CPU, 8: CPU, 16: CPU / 2}          # of a processor, by hosts
LATENCIES = (0, 5, 25, 50, 100)                 # ms one way


def latency_settings(steps):
    for n, ms in itertools.product(SHARES, LATENCIES):
        yield Setting(f"{n} hosts, {ms} ms", f"{COMMON} --method local", n, read_alone,
                      f"{PROGRAM} 0", f"--cpu {SHARES[n]} --mbit 200 --latency {ms}")


def read_alone(folder):
    return json.loads((folder / "alone.json").read_text())


def over_a_pair(run, wire=""):
    """The median seconds of an all-reduce over those of a pair's exchange."""
    all_reduce = statistics.median(run.alone[f"all-reduce{wire}"])
    return all_reduce / statistics.median(run.alone[f"pair{wire}"])


def show_latency(found):
    table = Table("hosts, ms one way", "all-reduce, seconds", "pair, seconds",
                  "all-reduce over pair", "in one byte")
    for label, (run, *_) in results(found).items():
        seconds = [f"{statistics.mean(run.alone[name]):.2f}" for name in ("all-reduce", "pair")]
        table.add(label, *seconds, f"{over_a_pair(run):.1f}",
                  f"{over_a_pair(run, ', one byte'):.1f}")
    table.end()


def record_latency(found):
    """Means and ranges of the trials."""
    table = Table("hosts, ms one way", *OUTER_STEPS)
    for label, (run, *_) in results(found).items():
        table.add(label, *(spread_of(run.alone[name], ".2f") for name in OUTER_STEPS))
    table.end()


def draw_latency(plt, found):
    """Seconds of an outer step between 8 and 16 hosts."""
    runs = results(found)
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH, 4.2), sharey=True)
    for axis, n in zip(axes, (8, 16)):
        here = [runs[f"{n} hosts, {ms} ms"][0] for ms in LATENCIES]
        for name in OUTER_STEPS:
            colour = COLOURS["NoLoCo" if name.startswith("pair") else "DiLoCo"]
            dashes = "--" if "byte" in name else "-"
            points = [run.alone[name] for run in here]
            bars(axis, points, LATENCIES, colour, ls=dashes, label=name.replace(", ", ",\n"))
        axis.set(title=f"{n} hosts, {SHARES[n]:g} of a processor each",
                 xlabel=f"ms one way (bars: range of {len(here[0].alone['pair'])} trials)")
    axes[0].set(ylabel="seconds of an outer step", ylim=(-0.4, None))
    most = max(over_a_pair(runs[f"16 hosts, {ms} ms"][0]) for ms in LATENCIES)
    finding = (f"Among 16 hosts with slow links an all-reduce takes up to {most:.1f} times as long "
               "as a pair's exchange\n(in fp32; in one byte much of the all-reduce is coding, on a "
               "tenth of a processor)")
    figure.suptitle(title_of(found, finding, "An outer step alone"), x=0.01, ha="left")
    for axis in axes:
        label_ends(axis)
    return figure


LATENCY = Part(latency_settings, show_latency, record_latency, {"latency": draw_latency},
               seeds=(0,))
