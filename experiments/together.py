"""Both papers at once on the published instance: 20 nodes in 12 cities, 30 microbatches an
iteration.

    python -m experiments.together [--scale try|plot|full] [--plot]

full: 8 hours of two cores.
Losses are measured with a tiny model. Seconds are simulated with the messages and weights of the
500M model: an iteration by skippipe.simulate, a synchronisation by `slowest_all_reduce` or
`slowest_groups`. Of synchronisations only "delayed" ones overlap: they take less than an iteration,
also in queues. All paths are planned. Each run's learning rate is planned for the time at which the
run is compared. A stage of three nodes is one NoLoCo group, so five of six stages average all their
replicas.
"""
import itertools
import json
import statistics
from dataclasses import asdict
from pathlib import Path

from experiments.harness import Row, Setting, command, run_all
from experiments.pictures import COLOURS, WIDTH, aside, bars, counted, frame
from experiments.tables import (MEANS_ONLY, Expected, Table, finals, mean_final, more_at_the_ends,
                                results)
from noloco import random_groups
from planning.instance import city_delays, city_links, published_network
from planning.training import plan_paths

MODEL_BYTES = 4 * 500e6         # the 500M model whose messages the published instance has, fp32
BYTES = {"fp32": 4, "bf16": 2, "int8": 1}        # of a weight
WHOLE = {"try": 200, "plot": 3000, "full": 40_000}      # simulated seconds of the longest runs
SEEDS = {"try": (0,), "plot": (0,), "full": (0, 1, 2)}
FULL, HALF = "full pipeline", "half skipped"
PATHS = {FULL: 0.0, HALF: 0.5}  # the share skipped
EVERY = 2                       # inner steps of DiLoCo and NoLoCo
MICROBATCHES = 6                # of an origin
LEARN = (f"--stages 5,3,3,3,3,3 --layers 6 --microbatches {MICROBATCHES} --batch 1 --lr 4e-3 "
         "--routing no-swaps --eval-every 100")
OUTER = f"--inner-steps {EVERY} --wire int8"
METHODS = {
    "DDP, bf16": "--method ddp --wire bf16",
    "DDP, int8": "--method ddp --wire int8",
    "DiLoCo, int8": f"--method diloco {OUTER}",
    "NoLoCo, int8": f"--method noloco {OUTER}",
    "NoLoCo, int8, every 1": "--method noloco --inner-steps 1 --wire int8",
    "DiLoCo, int8, delayed": f"--method diloco {OUTER} --delay 1",
    "NoLoCo, int8, delayed": f"--method noloco {OUTER} --delay 1",
}
IN_INT8 = "DDP, int8", "DiLoCo, int8", "NoLoCo, int8"
# Of each share of the time: what is compared after it, on both kinds of paths.
COMPARED = {1.0: ("DDP, bf16", *IN_INT8), 0.6: (*METHODS,), 0.4: IN_INT8, 0.25: IN_INT8}


# ---------------------------------------------------------------- simulated time


def makespan(network, routing, skip):
    """Simulated seconds of an iteration on the paths that train.py plans with its default seed."""
    return plan_paths(network, routing, skip, MICROBATCHES, 0)["makespan"]


def keep_links(network, name):
    """Write the network as a file for --links; returns its path."""
    path = Path("runs", name)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(asdict(network)))
    return path


def all_reduce_seconds(ranks, whole, part, several=max):
    """Seconds of the fastest of three all-reduces.

    Two rounds of parts: each of n ranks sends every other its nth part, then the sum of it. One
    round of whole vectors, as in NoLoCo. The best ring. whole[a][b], part[a][b]: seconds of a
    message. several: of the messages that a rank sends in a round; max: links do not contend, sum:
    one message after the other.
    """
    parts_twice = 2 * slowest_round(ranks, part, several)
    whole_once = slowest_round(ranks, whole, several)
    ring = 2 * (len(ranks) - 1) * best_ring(ranks, part)
    return min(parts_twice, whole_once, ring)


def slowest_round(ranks, delay, several):
    """Seconds in which each rank has sent to every other."""
    seconds = []
    for a in ranks:
        others = [delay[a][b] for b in ranks if b != a]
        seconds.append(several(others))
    return max(seconds)


def best_ring(ranks, delay):
    """The slowest link of the ring through all ranks whose slowest link is fastest."""
    first, *others = ranks
    slowest = []
    for rest in itertools.permutations(others):
        ring = (first, *rest, first)
        slowest.append(max(delay[a][b] for a, b in zip(ring, ring[1:])))
    return min(slowest)


def stage_delays(network, names, parts=1, size=4):
    """delay[a][b] in seconds of one of `parts` parts of a stage; size: bytes of a number."""
    message = MODEL_BYTES * size / 4 / len(network.stages) / parts
    return city_delays(names, city_links(), message)


def slowest_all_reduce(network, names, size=4, several=max):
    """Seconds in which the slowest stage is averaged over its nodes."""
    whole = stage_delays(network, names, size=size)
    slowest = []
    for ranks in network.stages:
        part = stage_delays(network, names, len(ranks), size)
        slowest.append(all_reduce_seconds(ranks, whole, part, several))
    return max(slowest)


def slowest_groups(network, delay, several=max):
    """Seconds of the slowest NoLoCo group of all stages, on average over 100 outer steps."""
    slowest = []
    for outer in range(100):
        groups = []
        for ranks in network.stages:
            groups += random_groups(ranks, 2, outer, 0)
        slowest.append(max(slowest_round(group, delay, several) for group in groups))
    return statistics.mean(slowest)


def simulated_seconds():
    """{paths: of an iteration; method: of a synchronisation, "queued": a node sends one message at
    a time}"""
    network, names = published_network()
    delay = stage_delays(network, names, size=BYTES["int8"])
    found = {paths: makespan(network, "no-swaps", skip) for paths, skip in PATHS.items()}
    for way, several in (("", max), (", queued", sum)):
        for wire in ("bf16", "int8"):
            found[f"DDP, {wire}{way}"] = slowest_all_reduce(network, names, BYTES[wire], several)
        found[f"NoLoCo, int8{way}"] = slowest_groups(network, delay, several)
    return found


def timing(found, paths, method, way=""):
    """Seconds of (an iteration, waiting for a synchronisation)."""
    if method.endswith("delayed"):
        return found[paths], 0.0
    return found[paths], found[method.replace("DiLoCo", "DDP").removesuffix(", every 1") + way]


def a_step(found, paths, method, way=""):
    """Simulated seconds, synchronisation included."""
    iteration, sync = timing(found, paths, method, way)
    if method.startswith("DDP") or method.endswith("every 1"):
        return iteration + sync
    return iteration + sync / EVERY


# ---------------------------------------------------------------- the runs


def settings(scale):
    """As many steps as fit into each share of WHOLE. The small scales have one share of it, and a
    try the most of the paths alone."""
    links = keep_links(published_network()[0], "links-20.json")
    seconds = simulated_seconds()
    compared, ways, small = COMPARED, PATHS, ""
    if scale != "full":
        compared, small = {1.0: ("DDP, int8", "NoLoCo, int8")}, " --eval-sequences 64"
    if scale == "try":
        compared, ways = {1.0: ("NoLoCo, int8",)}, (HALF,)
        small = " --eval-sequences 5"               # one of each origin
    for (share, methods), paths in itertools.product(compared.items(), ways):
        for method in methods:
            fit = int(share * WHOLE[scale] / a_step(seconds, paths, method))
            fit = max(EVERY, fit // EVERY * EVERY)
            if method.endswith("delayed"):
                fit -= 1                            # just after a merge
            yield Setting(f"{paths}: {method}, {share:.0%}",
                          f"{LEARN} --skip {PATHS[paths]:g} --links {links} {METHODS[method]} "
                          f"--steps {fit}{small}", 20)


def measure(o):
    found = run_all("together", settings(o.scale), SEEDS[o.scale], o)
    return found | dict(seconds=simulated_seconds())


# ---------------------------------------------------------------- the tables


def share_rows(found):
    """[(paths, method, share, its runs)]"""
    rows = []
    for label, seeds in results(found).items():
        paths, rest = label.split(": ")
        method, share = rest.rsplit(", ", 1)
        rows.append((paths, method, share, seeds))
    return rows


def best_ddp(rows):
    """The runs with the lowest mean loss of DDP's on the full pipeline for the whole time; None
    without any."""
    candidates = [seeds for paths, method, share, seeds in rows
                  if paths == FULL and method.startswith("DDP") and share == "100%"]
    return min(candidates, key=lambda seeds: statistics.mean(finals(seeds)), default=None)


def over_another(seeds, others):
    """Nats per byte over the others', each at its own end; None beside themselves or nothing."""
    if others is seeds or others is None:
        return None
    return more_at_the_ends(seeds, others)


def show(found):
    table = Table("paths: method, share of the time", "steps", "loss, nats per byte",
                  "over the best full pipeline's after 100%", "over DDP's, same paths and time")
    rows = share_rows(found)
    best = best_ddp(rows)
    ddp = {(paths, share): seeds for paths, method, share, seeds in rows if method == "DDP, int8"}
    for paths, method, share, seeds in rows:
        table.add(f"{paths}: {method}, {share}", f"{seeds[0].steps[-1]:.0f}", mean_final(seeds),
                  over_another(seeds, best), over_another(seeds, ddp.get((paths, share))))
    table.end()
    print(MEANS_ONLY)
    show_each(found)


def show_each(found):
    """What each paper brings, at each share of the time."""
    runs = by_kind(found)
    table = Table("share of the time, one byte a weight", "DDP: half skipped over full",
                  "half skipped: NoLoCo over DDP", "half skipped: NoLoCo over DiLoCo")
    for share in dict.fromkeys(share for *_, share in runs):
        table.add(share, difference(runs, share, (HALF, "DDP"), (FULL, "DDP")),
                  difference(runs, share, (HALF, "NoLoCo"), (HALF, "DDP")),
                  difference(runs, share, (HALF, "NoLoCo"), (HALF, "DiLoCo")))
    table.end()


def by_kind(found):
    """{(paths, method, share): its runs}"""
    return {(paths, method, share): seeds for paths, method, share, seeds in share_rows(found)}


def difference(runs, share, one, other):
    """Nats per byte of one (paths, method) over another's, in one byte; None where one is
    missing."""
    found = []
    for paths, method in (one, other):
        found.append(runs.get((paths, f"{method}, int8", share)))
    return None if None in found else more_at_the_ends(*found)


# ---------------------------------------------------------------- the picture

LINES = {   # (paths, method): (its name, colour, dashes)
    (FULL, "NoLoCo"): ("NoLoCo, none skipped", "NoLoCo", "--"),
    (HALF, "NoLoCo"): ("NoLoCo, half skipped", "NoLoCo", "-"),
    (HALF, "DDP"): ("DDP, half skipped", "DDP", "-"),
}


def draw(plt, found):
    """Last losses of the runs planned for each share of the time, over those of DDP on the full
    pipeline."""
    figure, axis = plt.subplots(figsize=(WIDTH, 4.2))
    runs, whole = by_kind(found), WHOLE[found["scale"]] / 3600
    shares = sorted({share for *_, share in runs}, key=lambda share: float(share[:-1]))
    hours = [whole * float(share[:-1]) / 100 for share in shares]
    axis.plot(hours, [0] * len(hours), "o--", color=COLOURS["DDP"], label="DDP, none skipped")
    for place, (kind, (name, colour, dashes)) in enumerate(LINES.items()):
        more = [difference(runs, share, kind, (FULL, "DDP")) for share in shares]
        if None not in more:
            bars(axis, aside(hours, place), more, COLOURS[colour], times=1, ls=dashes,
                 label=name)
    axis.set(xlim=(0, 1.08 * whole),
             xlabel="simulated hours, for which each run's rate is planned",
             ylabel="nats per byte over\nDDP, none skipped")
    seeds = counted(len(next(iter(runs.values()))), "seed")
    frame(figure, found, "Both papers: the gain is the skipping's, and shrinks with the time",
          "Both papers together: loss in equal time",
          f"Simulated times of the published instance, losses of a tiny model, replicas' means. "
          f"One byte a weight, NoLoCo averages every {EVERY} steps; {seeds}, bars: 95% intervals.")
    return figure


def expected(found):
    runs = by_kind(found)
    more = difference(runs, "100%", (HALF, "DDP"), (FULL, "DDP"))
    known = {"full": (-0.056, 0.06), "plot": (-0.35, 0.2)}
    return [Expected("DDP, half skipped over full, the whole time, nats per byte",
                     more and more.mean, *known.get(found["scale"], (0, 0)), "+.3f",
                     judged=found["scale"] in known)]


ROW = Row("together", measure, show, {"together": draw}, expected)

if __name__ == "__main__":
    command(__doc__, ROW)
