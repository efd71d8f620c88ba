"""The loss of a model trained with skipping, after equal steps and in equal simulated time.

    python -m experiments.skipping [--scale try|plot|full] [--plot]

full: 2 hours of two cores. 8 layers in 4 or 8 stages of two nodes each, spread over the 12 cities
of the published instance. Gradients are averaged at every step, so only the paths differ. "In
order" means no swapped neighbours. 0% skipped is DT-FM's pipeline; 0% skipped, in order, is the
planned one. "Equal time" has as many steps as fit into DT-FM's time. Models are evaluated as in the
papers (--unscaled), and under the rho rule (train.py).
"""
import itertools
import json
import statistics
import subprocess
from dataclasses import replace

import train
from experiments.harness import Row, Setting, command, run_all, run_ranks
from experiments.pictures import COLOURS, WIDTH, counted, differences, frame, percent
from experiments.tables import (Comparison, Expected, Table, mean_final, over, over_runs, results,
                                same_seeds, sure)
from experiments.together import MICROBATCHES, keep_links, makespan, slowest_all_reduce
from planning.instance import CITIES, city_delays, city_links
from skippipe import Network

FULL = (0.0, "dtfm")
# (share skipped, routing)
KINDS = FULL, (0.0, "no-swaps"), (0.25, "no-swaps"), (0.5, "stronger")
UNSCALED = " --unscaled"
STEPS = {"try": 4, "plot": 80, "full": 300}         # of equal steps
SEEDS = {"try": (0,), "plot": (0,), "full": (0, 1, 2, 3, 4)}
RHO = " (rho rule)"
# The nodes of each stage, as `assign_stages` found them for the full pipeline. Pinned, so that the
# tables can be made again.
STAGES = {
    4: [[0, 4], [2, 7], [1, 5], [3, 6]],
    8: [[0, 11], [1, 12], [9, 15], [10, 13], [3, 7], [2, 5], [6, 8], [4, 14]],
}


def network_of(stages):
    """Two nodes a stage: (Network, cities)."""
    cities = (CITIES * 2)[:2 * stages]
    compute = [0.44 * 6 / stages] * 2 * stages          # the published instance cuts the model in 6
    delay = city_delays(cities, city_links())
    network = Network(delay, compute, STAGES[stages], memory=3, overhead=0.13, origin_overhead=0.09)
    return network, cities


def settings(scale):
    if scale != "full":
        yield from small_settings(scale)
        return
    papers = list(papers_settings(STEPS[scale]))
    yield from papers
    for setting in papers:
        if UNSCALED in setting.options:
            yield under_rho(setting)


def small_settings(scale):
    """4 stages, half skipped, under the rho rule; where it is no try, beside full pipelines."""
    steps, half = STEPS[scale], (0.5, "stronger")
    runs = [skip_setting("4 stages, 50% skipped", 4, *half, steps)]
    sequences = 8 if scale == "try" else 128
    more = f" --eval-every {steps} --eval-sequences {sequences}"
    if scale != "try":
        planned = 0.0, "no-swaps"
        runs += [skip_setting("4 stages, 0% skipped", 4, *FULL, steps),
                 skip_setting("4 stages, 0% skipped, in order, equal time", 4, *planned,
                              equal_time(steps, 4, *planned)),
                 skip_setting("4 stages, 50% skipped, equal time", 4, *half,
                              equal_time(steps, 4, *half))]
    for setting in runs:
        if UNSCALED in setting.options:
            setting = under_rho(setting)
        yield replace(setting, options=setting.options + more)


def papers_settings(steps):
    """All that is trained, evaluated as in the papers."""
    for stages, (skip, routing) in itertools.product(STAGES, KINDS):
        label = f"{stages} stages, {100 * skip:g}% skipped"
        if routing == "no-swaps":
            label += ", in order"
        if skip or (skip, routing) == FULL:         # a plan that skips nothing gains time only
            yield skip_setting(label, stages, skip, routing, steps)
        if (skip, routing) != FULL:
            more = equal_time(steps, stages, skip, routing)
            yield skip_setting(f"{label}, equal time", stages, skip, routing, more)


def under_rho(setting):
    return replace(setting, label=setting.label + RHO,
                   options=setting.options.replace(UNSCALED, ""))


def skip_setting(label, stages, skip, routing, steps):
    links = keep_links(network_of(stages)[0], f"links-{stages}.json")
    options = (f"--method ddp --layers 8 --lr 4e-3 --microbatches {MICROBATCHES} --batch 2 "
               f"--links {links} --stages {','.join(['2'] * stages)} --routing {routing} "
               f"--skip {skip:g}")
    if skip:
        options += UNSCALED
    return Setting(label, f"{options} --steps {steps}", 2 * stages, missing_stages)


def equal_time(steps, stages, skip, routing):
    """The steps that fit into DT-FM's time."""
    network, cities = network_of(stages)
    sync = slowest_all_reduce(network, cities)
    full = makespan(network, FULL[1], FULL[0]) + sync
    ours = makespan(network, routing, skip) + sync
    return round(steps * full / ours)


def measure(o):
    """Also what `missing` shows: see `missing_stages`."""
    return run_all("skipping", settings(o.scale), SEEDS[o.scale], o)


def missing_stages(folder):
    """{"shares": {share of the stages: [held-out loss of each choice of so many]}} of the last
    checkpoint.

    DDP keeps a stage's replicas equal, so one replica's loss is that of all.
    """
    stages = train.parse(["--resume", str(folder)]).stages
    run_ranks(sum(stages), "-m", "tools.partial", str(folder), stdout=subprocess.DEVNULL)
    rows, found = json.loads((folder / "partial.json").read_text()), {}
    for row in rows:
        share = str(len(row["stages"]) / len(stages))
        found.setdefault(share, []).append(row["heldout_loss"])
    return dict(shares=found)


# ---------------------------------------------------------------- the tables


def full_of(label):
    """The label of the full pipeline beside which a run is put: DT-FM's after equal steps, in equal
    time the planned one."""
    same = "0% skipped"
    if "equal time" in label:
        same = "0% skipped, in order, equal time"
    return f"{label.split(',')[0]}, {same}"


def over_full(label, runs):
    """Perplexity over the full pipeline's; None of that itself, and without it."""
    name = full_of(label)
    if label == name or name not in runs:
        return None
    return over_runs(runs[label], runs[name])


def show(found):
    """A table of each way to evaluate, then the two beside each other."""
    runs = results(found)
    by_rho = [label for label in runs if label.endswith(RHO)]
    for labels in ([label for label in runs if label not in by_rho], by_rho):
        table = Table("stages, share skipped", "steps", "loss, nats per byte",
                      "perplexity over a full pipeline's")
        for label in labels:
            steps = f"{runs[label][0].steps[-1]:.0f}"
            table.add(label, steps, mean_final(runs[label]), over_full(label, runs))
        table.end()
    print("The full pipeline is DT-FM's after equal steps, and the planned one in equal time.\n")
    if found["scale"] == "full":
        show_rho(runs, by_rho)


def show_rho(runs, by_rho):
    """The same weights under the rho rule and as in the papers."""
    table = Table("stages, share skipped", "perplexity, rho rule over none",
                  "with 75% of the stages", "with half of the stages")
    for label in by_rho:
        same = same_seeds(runs[label], runs[label.removesuffix(RHO)])
        cells = [over_runs(runs[label], same)]
        for share in ("0.75", "0.5"):
            more = over(losses_without(runs[label], share), losses_without(same, share))
            cells.append(Comparison(more, "+.1%"))
        table.add(label, *cells)
    table.end()


def losses_without(runs, key):
    """Each seed's held-out loss with stages missing, the mean over all choices of them. key: a
    share of the stages that run."""
    return [statistics.mean(run.shares[key]) for run in runs]


# ---------------------------------------------------------------- the picture


def draw(plt, found):
    """Perplexity over a full pipeline's under the rho rule, after equal steps and in equal time."""
    runs = results(found)
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH, 3.4), sharey=True, sharex=True)
    labels = [label for label in runs if label.endswith(RHO)]
    for axis, title, there in (
            (axes[0], "after equal steps", [x for x in labels if "equal time" not in x]),
            (axes[1], "in equal simulated time", [x for x in labels if "equal time" in x])):
        there = [label for label in there if over_full(label, runs)]
        names = []
        for label in there:
            stages, share = label.split(" skipped")[0].split(", ")
            names.append(f"{stages},\n{share} skipped")
        colours = [COLOURS["25%" if "25%" in label else "50%"] for label in there]
        differences(axis, [over_full(label, runs) for label in there], colours, names, "+.1%")
        axis.set(title=title, xlabel="over the full pipeline's")
        axis.locator_params(axis="x", nbins=5)
        axis.xaxis.set_major_formatter(percent)
    compared = filter(None, [over_full(label, runs) for label in labels])
    survive = sure(list(compared)).count(True)
    seeds = counted(len(runs[labels[0]]), "seed")
    frame(figure, found, "Skipping may cost a little in equal steps, and gain in equal time",
          "Perplexity of models trained with skipping", f"Perplexity, by the rho rule; {survive} "
          f"of these survive Holm's correction. Equal time: as many steps as fit into the "
          f"unplanned full pipeline's, beside the planned one. DDP, {seeds}, bars: 95% intervals.")
    return figure


NUMBERS = {     # {label: {scale: (perplexity over a full pipeline's, at most so much off)}}
    f"4 stages, 50% skipped{RHO}": dict(full=(0.006, 0.03), plot=(-0.04, 0.06)),
    f"4 stages, 50% skipped, equal time{RHO}": dict(full=(-0.059, 0.03), plot=(-0.09, 0.06)),
}


def expected(found):
    runs, told = results(found), []
    for label, numbers in NUMBERS.items():
        if label in runs:
            more = over_full(label, runs)
            number = numbers.get(found["scale"], (0.0, 0.0))
            told.append(Expected(f"{label}, perplexity over a full pipeline's",
                                 more and more.mean, *number,
                                 judged=found["scale"] in numbers))
    return told


ROW = Row("skipping", measure, show, {"skipping": draw}, expected)

if __name__ == "__main__":
    command(__doc__, ROW)
