"""What experiments/plots.py measures, and how it is drawn: functions of each for every part.

Where a part has less to do for a try, its numbers have "quick", whether they are one, and "scale",
in words.
"""
import contextlib
import io
import json
import math
import statistics
import tempfile
from dataclasses import replace
from types import SimpleNamespace

from tqdm import tqdm

import bench_sync
from experiments import claims, skip, sync
from experiments.claims import (DDP, DILOCO, FRAGMENTS, FULL, HALF, NEVER, NO_TC2, NOLOCO, NONE,
                                PLANNED, PUBLISHED, RANDOM)
from experiments.harness import Part, Setting, run_all
from experiments.pictures import COLOURS, WIDTH, band, bars, counted, focus, label_ends
from experiments.results import results
from planning.instance import published_network
from planning.methods import compare_methods
from planning.pictures import draw_timeline
from skippipe import Progress, Task, full_paths


def title(found, finding, subject):
    """A picture's title: the finding; of a try its subject."""
    if found["quick"]:
        return f"{subject} (a try: {found['scale']})"
    return finding


def run_settings(name, settings, seeds, scale, quick):
    """The settings' runs, as harness.run_all keeps them."""
    part = Part(lambda steps: settings, None)
    name = f"try-{name}" if quick else f"plots-{name}"
    found = run_all(name, part, SimpleNamespace(only="", seeds=seeds, steps=None))
    return found | dict(quick=quick, scale=scale)


# ---------------------------------------------------------------- loss

STEPS = 200
REPLICAS = 8
SEEDS = 0, 1, 2
LEARN = "--layers 2 --warmup 20 --lr 6e-3 --batch 4 --microbatches 1 --eval-sequences 64"
METHODS = {
    DDP: "--method ddp",
    DILOCO: "--method diloco --inner-steps 20",
    NOLOCO: "--method noloco --inner-steps 10",
    FRAGMENTS: "--method noloco --inner-steps 10 --fragments 10",
    NEVER: "--method local",
}
LINES = {       # from above: (its name in the picture, colour, dashes)
    NEVER: ("never", "local", "-"), NOLOCO: ("NoLoCo", "NoLoCo", "-"),
    FRAGMENTS: ("NoLoCo,\nfragments", "NoLoCo", ":"), DILOCO: ("DiLoCo", "DiLoCo", "-"),
    DDP: ("DDP", "DDP", "-"),
}


def measure_loss(quick):
    """Evaluations come right after an outer step, of DiLoCo as of NoLoCo, but for DiLoCo's first in
    a try."""
    scale = dict(steps=STEPS, replicas=REPLICAS, seeds=SEEDS, every=20)
    if quick:
        scale = dict(steps=20, replicas=2, seeds=(0,), every=10)
    steps = scale["steps"]
    replicas = scale["replicas"]
    settings = []
    for label, method in METHODS.items():
        options = f"{LEARN} {method} --steps {steps} --eval-every {scale['every']}"
        settings.append(Setting(label, options, replicas, read_merged))
    size = f"{steps} steps, {replicas} replicas"
    return run_settings("loss", settings, scale["seeds"], size, quick)


def read_merged(folder):
    """{"merged"}: the held-out loss of the mean of all replicas, at the end."""
    last = (folder / "metrics.jsonl").read_text().splitlines()[-1]
    return dict(merged=json.loads(last)["merged_loss"])


def draw_loss(plt, found):
    """Loss against steps and bytes above, the weight spread below."""
    figure, axes = plt.subplot_mosaic([["steps", "bytes"], ["spread", "spread"]],
                                      figsize=(WIDTH, 7.8), height_ratios=(3, 2))
    runs = results(found)
    losses = []
    for label, (name, colour, dashes) in LINES.items():
        style = dict(colour=COLOURS[colour], ls=dashes, label=name)
        steps, sent = runs[label][0].steps, sent_per_rank(found, label)
        curves = [run.losses for run in runs[label]]
        losses += curves
        band(axes["steps"], curves, steps, **style)
        if sent[-1] > 0:
            begin = len(sent) - len([total for total in sent if total > 0])
            band(axes["bytes"], [curve[begin:] for curve in curves], sent[begin:], **style)
        spreads = [run.curves["weight_spread"] for run in runs[label]]
        if spreads[0][-1] > 0:      # replicas that are equal after an outer step have no line
            band(axes["spread"], spreads, steps, **style)
    for name in "steps", "bytes":
        focus(axes[name], losses)
    end = statistics.mean(run.final for run in runs[NEVER])
    axes["bytes"].axhline(end, color=COLOURS["local"], lw=1)
    axes["bytes"].annotate("never: 0 MB", (0.02, end),
                           xycoords=("axes fraction", "data"), xytext=(0, 3),
                           textcoords="offset points", color=COLOURS["local"])
    label_loss(axes, found, figure)
    return figure


def sent_per_rank(found, label):
    """MB at each evaluation."""
    row = found["runs"][label][0]
    return [total / row["ranks"] / 1e6 for total in row["curves"]["sync_bytes"]]


def label_loss(axes, found, figure):
    """The titles and labels of draw_loss's axes."""
    rows = found["runs"][DDP]
    gap, never = claims.over_other(found, NOLOCO), claims.over_other(found, NEVER)
    share = claims.share_of_bytes(found, NOLOCO)
    finding = (f"Merged, NoLoCo ends {gap:.0%} over DDP's perplexity with {share:.0%} of its "
               f"bytes; never averaging, {never:.0%} over")
    finding += f" ({found['scale']}, {counted(len(rows), 'seed')})"
    figure.suptitle(
        title(found, finding, "Loss against steps and bytes, and the spread of the replicas") +
        "\nNoLoCo averages pairs every 10 steps, DiLoCo all every 20; fragments: a tenth of the "
        "weights at each step", x=0.01, ha="left")
    axes["steps"].set(xlabel="steps (bands: range of the seeds)",
                      ylabel="held-out nats per byte, replicas' mean", title="Loss against steps")
    axes["bytes"].set_xscale("log")
    axes["bytes"].xaxis.set_major_formatter("{x:g}")
    axes["bytes"].xaxis.set_minor_formatter("")
    axes["bytes"].set(xlabel="MB sent per replica to synchronise", title="Loss against bytes")
    axes["spread"].set_yscale("log")
    axes["spread"].set(xlabel="steps", ylabel="weight spread",
                       title="Averages hold replicas together (after outer steps; those of DDP and "
                       "DiLoCo are equal)")
    for axis in axes.values():
        label_ends(axis)


# ---------------------------------------------------------------- sync


def measure_sync(quick):
    """What `python bench_sync.py --simulate` writes."""
    scale = "5% of the draws" if quick else "all draws"
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        draws = ["--draws", "0.05"] if quick else []
        found = bench_sync.simulate(bench_sync.parse(["--simulate", "--out", folder, *draws]))
    return found | dict(quick=quick, scale=scale)


def draw_sync(plt, found):
    """Figs. 5A and 5B."""
    figure, axes = plt.subplots(2, 1, figsize=(WIDTH, 7.8))
    sync.draw_over_tree(axes[0], found)
    sync.draw_over_diloco(axes[1], found)
    if found["quick"]:
        figure.suptitle(title(found, "", "Figs. 5A and 5B"), x=0.01, ha="left")
    for axis in axes:
        label_ends(axis)
    return figure


# ---------------------------------------------------------------- skip

KEPT, EACH, ROUNDS = 4, 3, 2        # the published instance: stages kept, paths per origin, rounds
PATIENCE = 60.0     # seconds of planning at most; an idle machine needs less than one
BARS = {FULL: "full", RANDOM: "random", NO_TC2: "25%", PLANNED: "25%"}      # colours


def measure_skip(quick):
    """The published instance, planned four ways, and the timelines of two. A try is the same."""
    network, _ = published_network()
    with tqdm(total=len(PUBLISHED), unit="method") as progress:

        def tell(method):
            progress.set_postfix_str(method)
            progress.update()

        rows, plan = compare_methods(network, KEPT, EACH, ROUNDS, seconds=PATIENCE, tell=tell)
    seconds = {}
    for name, row in zip(PUBLISHED, rows, strict=True):
        seconds[name] = row["seconds"]
    full = Progress(network).dispatch(full_paths(network.stages, EACH * ROUNDS))
    timelines = {FULL: full.timeline, PLANNED: plan.result.timeline}
    return dict(seconds=seconds, timelines=timelines)


def draw_times(plt, found):
    """Bars of the iteration times beside the published ones."""
    figure, axis = plt.subplots(figsize=(WIDTH, 3.8))
    for row, (name, published) in enumerate(PUBLISHED.items()):
        own = found["seconds"][name]
        for place, value, colour, words in (
                (row - 0.2, own, COLOURS[BARS[name]], ""),
                (row + 0.2, published, "#BBBBBB", " published")):
            axis.barh(place, value, 0.38, color=colour)
            axis.annotate(f"{value:.1f} s{words}", (value, place), xytext=(4, 0),
                          textcoords="offset points", va="center")
    axis.set_yticks(range(len(PUBLISHED)), PUBLISHED)
    axis.invert_yaxis()
    axis.grid(False)
    shorter = 1 - found["seconds"][PLANNED] / found["seconds"][FULL]
    finding = (f"SkipPipe, which skips a third of the stages, shortens an iteration by "
               f"{shorter:.0%}")
    axis.set(xlabel="seconds per iteration, simulated: 20 nodes in 12 cities (the published full "
             "pipeline runs 27 microbatches, ours 30)", xlim=(0, 95), title=finding)
    return figure


def draw_timelines(plt, found):
    """What each node does when, in the full pipeline and in SkipPipe's plan."""
    network, names = published_network()
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH, 5.4), sharey=True)
    seconds, waits = found["seconds"], {}
    for axis, (name, rows) in zip(axes, found["timelines"].items()):
        timeline = [Task(*row) for row in rows]
        draw_timeline(axis, network, timeline, names, until=max(seconds.values()))
        busy = sum(task.end - task.start for task in timeline)
        waits[name] = 1 - busy / (len(names) * seconds[name])
        axis.set_title(f"{name}: {seconds[name]:.1f} s, a node waits {waits[name]:.0%} of it")
    axes[1].tick_params(axis="y", labelleft=False)
    axes[1].legend(loc="lower right", title="white: the node waits")
    finding = ("Planned paths, which skip a third of the stages, keep the nodes waiting for "
               f"{waits[PLANNED] * seconds[PLANNED]:.0f} s instead of "
               f"{waits[FULL] * seconds[FULL]:.0f} s")
    figure.suptitle(finding, x=0.01, ha="left")
    return figure


# ---------------------------------------------------------------- partial

RUNS = {HALF: (0.5, "stronger"), NONE: (0.0, "dtfm")}       # (share skipped, routing)
SHARES = {"1.0": 100, "0.75": 75, "0.5": 50}                # keys of partial.json's shares: %


def measure_partial(quick):
    """Two runs of experiments/skip.py, 4 stages of two nodes, with stages missing afterwards."""
    settings = []
    steps = 4 if quick else 300
    for label, (share, routing) in RUNS.items():
        setting = skip.skip_setting(label, 4, share, routing, steps)
        options = setting.options.replace(skip.UNSCALED, "") + f" --eval-every {steps}"
        if quick:
            options += " --eval-sequences 16"
        settings.append(replace(setting, options=options))
    if quick:
        settings = settings[:1]
    return run_settings("partial", settings, (0,), f"{steps} steps", quick)


def draw_partial(plt, found):
    """Perplexity with stages missing: all choices of stages, and their mean loss."""
    figure, axis = plt.subplots(figsize=(WIDTH, 4.4))
    for label, colour in ((HALF, "50%"), (NONE, "full")):
        if label in found["runs"]:
            points = perplexities(found, label)
            bars(axis, points, list(SHARES.values()), COLOURS[colour],
                 label=label.replace(" in", "\nin"))
    axis.set(xlabel="% of the stages that run (bars: from the best to the worst choice of stages)",
             xticks=(100, 75, 50), xlim=(103, 47), ylabel="perplexity per byte")
    if not found["quick"]:
        more = claims.missing_over(found, HALF, "0.5")
        finding = f"Half of the stages cost a model trained with skipping {more:.1%} in perplexity"
        if NONE in found["runs"]:
            other = claims.missing_over(found, NONE, "0.5")
            finding += f", one trained without {other:.0%}"
        axis.set_title(finding + f"\n(4 stages, {found['scale']}, 1 seed)")
    else:
        axis.set_title(title(found, "", "Stages missing after training"))
    label_ends(axis)
    return figure


def perplexities(found, label):
    """[perplexities of all choices] for each of SHARES."""
    shares = found["runs"][label][0]["shares"]
    return [[math.exp(loss) for loss in shares[key]] for key in SHARES]
