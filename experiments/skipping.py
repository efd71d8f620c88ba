"""The loss of a model trained with skipping, after equal steps and in equal simulated time.

    python -m experiments.skipping [--scale try|plot|full] [--plot]

full: 2.4 hours of two cores. 8 layers in 4 or 8 stages of two nodes each, spread over the 12
cities of the published instance. Gradients are averaged at every step, so only the paths differ.
"In order" means no swapped neighbours. 0% skipped is DT-FM's pipeline; 0% skipped, in order, is the
planned one. "Equal time" has as many steps as fit into DT-FM's time. Each model is trained once and
evaluated by the rho rule (train.py) and unscaled, as in the SkipPipe paper, each time whole and
with 75 and 50% of its stages (tools/partial.py): the mean over all choices of so many. Named before
the runs: half skipped compared with the full pipeline, by the rho rule.
"""
import functools
import itertools
import json
import statistics
import subprocess

from experiments.harness import Row, Run, command, make_runs, run_ranks
from experiments.pictures import COLOURS, WIDTH, forest, frame, percent
from experiments.simulated import keep_links, makespan, slowest_all_reduce
from experiments.stats import Expected, Table, mean, paired, perplexity, significant, those
from planning.instance import CITIES, city_delays, city_links
from skippipe import Network

MICROBATCHES = 6                # of an origin
# (share skipped, routing)
FULL = 0.0, "dtfm"
PLANNED = 0.0, "no-swaps"
QUARTER = 0.25, "no-swaps"
HALF = 0.5, "stronger"
# (share skipped, routing, what is equal)
KINDS = ((*FULL, "steps"), (*PLANNED, "time"), (*QUARTER, "steps"), (*QUARTER, "time"),
         (*HALF, "steps"), (*HALF, "time"))
SCALES = {      # (equal steps, seeds, numbers of stages, kinds, more options)
    "try": (4, (0,), (4,), [(*HALF, "steps")], "--eval-sequences 8"),
    "plot": (80, (0,), (4,), [kind for kind in KINDS if kind[:2] != QUARTER],
             "--eval-sequences 128"),
    "full": (300, range(5), (4, 8), KINDS, ""),
}
RULES = "rho", "unscaled"           # columns of a record
# The nodes of each stage, as `assign_stages` found them for the full pipeline. Pinned, so that the
# tables can be made again.
STAGES = {
    4: [[0, 4], [2, 7], [1, 5], [3, 6]],
    8: [[0, 11], [1, 12], [9, 15], [10, 13], [3, 7], [2, 5], [6, 8], [4, 14]],
}


def network_of(stages):
    """Two nodes per stage: (Network, cities)."""
    cities = (CITIES * 2)[:2 * stages]
    compute = [0.44 * 6 / stages] * 2 * stages          # the published instance cuts the model in 6
    delay = city_delays(cities, city_links())
    network = Network(delay, compute, STAGES[stages], memory=3, overhead=0.13, origin_overhead=0.09)
    return network, cities


def wanted(scale):
    steps, seeds, counts, kinds, more = SCALES[scale]
    runs = []
    for seed, stages, kind in itertools.product(seeds, counts, kinds):
        runs.append(run_of(facts_of(stages, *kind), seed, steps, more))
    return runs


def facts_of(stages, skip, routing, equal):
    return dict(stages=stages, skip=skip, routing=routing, equal=equal)


def run_of(facts, seed, steps, more):
    stages, routing = facts["stages"], facts["routing"]
    links = keep_links(network_of(stages)[0], f"links-{stages}.json")
    if facts["equal"] == "time":
        steps = equal_time(steps, stages, facts["skip"], routing)
    options = (f"--method ddp --layers 8 --lr 4e-3 --microbatches {MICROBATCHES} --batch 2 "
               f"--links {links} --stages {','.join(['2'] * stages)} --routing {routing} "
               f"--skip {facts['skip']:g} --steps {steps} --eval-every 1000 {more}")
    processes = 2 * stages
    return Run(facts | dict(seed=seed), options, processes,
               after=functools.partial(evaluations, processes, facts["skip"]))


@functools.cache
def equal_time(steps, stages, skip, routing):
    """The steps that fit into DT-FM's time."""
    network, cities = network_of(stages)
    sync = slowest_all_reduce(network, cities)
    full = makespan(network, FULL[1], FULL[0], MICROBATCHES) + sync
    ours = makespan(network, routing, skip, MICROBATCHES) + sync
    return round(steps * full / ours)


def evaluations(processes, skip, folder):
    """The held-out losses of the run's last checkpoint, by each of RULES: of the whole model, and
    with 75 and 50% of its stages ("rho_75"), the mean over all choices of so many.

    DDP keeps a stage's replicas equal, so the loss of its first one is that of all.
    """
    rho = choices(processes, folder)
    unscaled = rho                      # without skipping each rho is 1
    if skip:
        unscaled = choices(processes, folder, "--unscaled")
    return means_by_share("rho", rho) | means_by_share("unscaled", unscaled)


def choices(processes, folder, *options):
    """The rows of tools/partial.py, with the first replica of each stage."""
    second = ",".join(map(str, range(1, processes, 2)))
    run_ranks(processes, "-m", "tools.partial", str(folder), "--dead", second, *options,
              stdout=subprocess.DEVNULL)
    return json.loads((folder / "partial.json").read_text())


def means_by_share(rule, rows):
    """{column: the mean loss of the choices of so many stages} from the rows of partial.json."""
    count = max(len(row["stages"]) for row in rows)
    losses = {}
    for row in rows:
        share = round(100 * len(row["stages"]) / count)
        column = rule
        if share < 100:
            column = f"{rule}_{share}"
        losses.setdefault(column, []).append(row["heldout_loss"])
    return {column: round(statistics.mean(values), 5) for column, values in losses.items()}


def measure(o):
    make_runs("skipping", wanted(o.scale), o)


# ---------------------------------------------------------------- the tables


def trained(records):
    """The facts of each kind of run that is there, in the order of KINDS."""
    found = []
    for stages, kind in itertools.product(STAGES, KINDS):
        facts = facts_of(stages, *kind)
        if those(records, **facts):
            found.append(facts)
    return found


def name_of(facts):
    """As tables have it."""
    name = f"{facts['stages']} stages, {facts['skip']:.0%} skipped"
    if facts["routing"] == "no-swaps":
        name += ", in order"
    if facts["equal"] == "time":
        name += ", equal time"
    return name


def full_of(facts):
    """The full pipeline with which a run is compared: DT-FM's after equal steps, in equal time the
    planned one."""
    routing = {"steps": FULL[1], "time": PLANNED[1]}[facts["equal"]]
    return facts | dict(skip=0.0, routing=routing)


def over_full(records, facts, column, rule):
    """Perplexity of that column over that of the whole model trained on the full pipeline; None for
    that model itself, and without it. rule: of RULES."""
    if facts == full_of(facts):
        return None
    return paired(records, facts, full_of(facts), column, perplexity, rule)


def show(found):
    records, skipping = found["records"], []
    table = Table("stages, share skipped", "steps", "loss by the rho rule, nats per byte",
                  "perplexity compared with a full pipeline, rho rule", "the same, unscaled")
    for facts in trained(records):
        table.add(name_of(facts), mean(records, facts, "steps", ".0f"),
                  mean(records, facts, "rho"), over_full(records, facts, "rho", "rho"),
                  over_full(records, facts, "unscaled", "unscaled"))
        if facts["skip"]:
            skipping.append(facts)
    table.end()
    print("The full pipeline is DT-FM's after equal steps, and the planned one in equal time.\n")
    table = Table("stages, share skipped", "perplexity by the rho rule compared with unscaled",
                  "with 75% of the stages", "with half of the stages")
    for facts in skipping:
        table.add(name_of(facts), by_rho(records, facts, ""), by_rho(records, facts, "_75"),
                  by_rho(records, facts, "_50"))
    table.end()


def by_rho(records, facts, share):
    """Perplexity by the rho rule compared with the same weights' unscaled. share: the end of a
    column."""
    return paired(records, facts, facts, f"rho{share}", perplexity, f"unscaled{share}")


# ---------------------------------------------------------------- the picture


def draw(plt, found):
    """Perplexity compared with a full pipeline, by the rho rule, in equal steps and equal time."""
    records = found["records"]
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH, 3.0), sharey=True, sharex=True)
    for axis, equal, title in ((axes[0], "steps", "after equal steps"),
                               (axes[1], "time", "in equal simulated time")):
        compared, colours = {}, []
        for facts in trained(records):
            more = over_full(records, facts, "rho", "rho")
            if facts["equal"] == equal and more:
                share = f"{facts['skip']:.0%}"
                compared[f"{facts['stages']} stages,\n{share} skipped"] = more
                colours.append(COLOURS[share])
        forest(axis, compared, colours, "+.1%")
        axis.set(title=title, xlabel="perplexity compared\nwith the full pipeline")
        axis.locator_params(axis="x", nbins=5)
        axis.xaxis.set_major_formatter(percent)
    frame(figure, found, finding(records), "Perplexity of models trained with skipping")
    return figure


def finding(records):
    """Half skipped compared with the full pipeline in equal time; Holm's correction as in the
    table."""
    every = trained(records)
    compared = [over_full(records, facts, "rho", "rho") for facts in every]
    means, survive = [], []
    for facts, more, stays in zip(every, compared, significant(compared)):
        if more and facts["equal"] == "time" and facts["skip"] == HALF[0]:
            means.append(f"{more.mean:+.0%}")
            survive.append(stays)
    told = f"Half skipped, in equal time: {' and '.join(means)}"
    return told if any(survive) else f"{told}, not significant"


def expected(found):
    records, told = found["records"], []
    for equal, number in (("steps", -0.03), ("time", -0.06)):
        more = over_full(records, facts_of(4, *HALF, equal), "rho", "rho")
        told.append(Expected(f"4 stages, 50% skipped, equal {equal}, perplexity "
                             "compared with a full pipeline", more.mean, number, 0.06))
    return told


ROW = Row("skipping", measure, show, {"skipping": draw}, expected)

if __name__ == "__main__":
    command(__doc__, ROW)
