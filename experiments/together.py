"""Both papers at once on the published instance: 20 nodes in 12 cities, 30 microbatches an iteration.

    python -m experiments.together [--seeds 0 1 2] [--steps N] [--out DIR] [--plot]

Losses are measured with a tiny model. Seconds are simulated with the messages and weights of the 500M model:
an iteration by skippipe.simulate, a synchronisation by `slowest_all_reduce` or `slowest_groups`. Of
synchronisations only "delayed" ones overlap: they take less than an iteration, also in queues.
All paths are planned. Each run's learning rate is planned for the time at which the run is compared. A stage
of three nodes is one NoLoCo group, so five of six stages average all their replicas.
"""
import itertools
import json
import statistics
from dataclasses import asdict
from pathlib import Path

import train
from experiments.pictures import COLOURS, WIDTH, label_ends, show_head, show_row
from experiments.runs import Part, Run, band, finals, headline, interval_of, results, same_seeds, spread_of
from noloco import random_groups
from planning.instance import city_delays, city_links, published_network
from planning.training import plan_paths

MODEL_BYTES = 4 * 500e6         # the 500M model whose messages the published instance has, fp32
BYTES = {"fp32": 4, "bf16": 2, "int8": 1}        # of a weight
WHOLE = 40_000                  # simulated seconds of the longest runs
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
    "NoLoCo, int8, delayed": f"--method noloco {OUTER} --delay 1"}
IN_INT8 = "DDP, int8", "DiLoCo, int8", "NoLoCo, int8"
# Of each share of the time: what is compared after it, on both kinds of paths.
COMPARED = {1.0: ("DDP, bf16", *IN_INT8), 0.6: (*METHODS,), 0.4: IN_INT8, 0.25: IN_INT8}


# ---------------------------------------------------------------- simulated time


def makespan(network, routing, skip):
    """Simulated seconds of an iteration on the paths that train.py plans with its default seed."""
    return plan_paths(network, routing, skip, MICROBATCHES, train.Options.seed)["makespan"]


def keep_links(network, name):
    """Write the network as a file for --links; returns its path."""
    path = Path("runs", name)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(asdict(network)))
    return path


def all_reduce_seconds(ranks, whole, part, several=max):
    """Seconds of the fastest of three all-reduces.

    Two rounds of parts: each of n ranks sends every other its nth part, then the sum of it. One round of
    whole vectors, as in NoLoCo. The best ring. whole[a][b], part[a][b]: seconds of a message. several: of the
    messages that a rank sends in a round; max: links do not contend, sum: one message after the other.
    """
    first, *others = ranks
    rings = [(first, *rest, first) for rest in itertools.permutations(others)]
    slowest_links = [max(part[a][b] for a, b in zip(ring, ring[1:])) for ring in rings]
    whole_round, part_round = (max(several(size[a][b] for b in ranks if b != a) for a in ranks)
                               for size in (whole, part))
    return min(2 * part_round, whole_round, 2 * (len(ranks) - 1) * min(slowest_links))


def stage_delays(network, names, parts=1, size=4):
    """delay[a][b] in seconds of one of `parts` parts of a stage; size: bytes of a number."""
    return city_delays(names, city_links(), MODEL_BYTES * size / 4 / len(network.stages) / parts)


def slowest_all_reduce(network, names, size=4, several=max):
    """Seconds in which the slowest stage is averaged over its nodes."""
    whole = stage_delays(network, names, size=size)
    return max(all_reduce_seconds(ranks, whole, stage_delays(network, names, len(ranks), size), several)
               for ranks in network.stages)


def slowest_groups(network, delay, several=max):
    """Seconds of the slowest NoLoCo group of all stages, on average over 100 outer steps."""
    slowest = []
    for outer in range(100):
        groups = [group for ranks in network.stages for group in random_groups(ranks, 2, outer, 0)]
        slowest.append(max(several(delay[a][b] for b in group if b != a) for group in groups for a in group))
    return statistics.mean(slowest)


def seconds():
    """{paths: of an iteration; method: of a synchronisation, "queued": a node sends one message at a time}"""
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
    return iteration + sync / (1 if method.startswith("DDP") or method.endswith("every 1") else EVERY)


# ---------------------------------------------------------------- the runs


def runs(steps):
    """As many steps as fit into WHOLE; --steps: into a share of it, steps / 400."""
    links = keep_links(published_network()[0], "headline-links-20.json")
    found, whole = seconds(), WHOLE * (steps or 400) / 400
    for (share, methods), paths in itertools.product(COMPARED.items(), PATHS):
        for method in methods:
            fit = max(EVERY, int(share * whole / a_step(found, paths, method)) // EVERY * EVERY)
            fit -= method.endswith("delayed")           # just after a merge
            yield Run(f"{paths}: {method}, {share:.0%}", f"{LEARN} --skip {PATHS[paths]:g} --links {links} "
                      f"{METHODS[method]} --steps {fit}", 20)


# ---------------------------------------------------------------- table and picture


def rows_of(found):
    """[(paths, method, share, its runs)]"""
    labels = [(*label.split(": "), seeds) for label, seeds in results(found).items()]
    return [(paths, *method.rsplit(", ", 1), seeds) for paths, method, seeds in labels]


def best_ddp(rows):
    """The runs with the lowest mean loss of DDP's on the full pipeline for the whole time."""
    return min((seeds for paths, method, share, seeds in rows
                if (paths, method[:3], share) == (FULL, "DDP", "100%")),
               key=lambda seeds: statistics.mean(finals(seeds)))


def more(seeds, others):
    """Nats per byte over the others'."""
    if others is seeds:
        return ""
    return interval_of([a - b for a, b in zip(finals(seeds), finals(same_seeds(seeds, others)))], "+.3f")


def table(found):
    show_head("paths: method, share of the time | steps | s a step | where a node's messages queue "
              "| held-out nats per byte | over the best DDP's after 100% | over DDP's, same paths and time")
    rows = rows_of(found)
    best = best_ddp(rows)
    by_way = {(paths, share): seeds for paths, method, share, seeds in rows if method == "DDP, int8"}
    for paths, method, share, seeds in rows:
        free, queued = (a_step(found["seconds"], paths, method, way) for way in ("", ", queued"))
        show_row(f"{paths}: {method}, {share}", f"{seeds[0].steps[-1]:.0f}", f"{free:.1f}", f"{queued:.1f}",
                 spread_of(finals(seeds)), more(seeds, best), more(seeds, by_way[paths, share]))


def draw(plt, found):
    """Last losses of the runs planned for each share of the time."""
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH, 4.6), sharey=True)
    rows = rows_of(found)
    best = best_ddp(rows)
    for axis, where in zip(axes, PATHS):
        for method in IN_INT8:
            ends = {float(share[:-1]): finals(seeds) for paths, kind, share, seeds in reversed(rows)
                    if (paths, kind) == (where, method)}
            name = method.split(",")[0]
            band(axis, [*zip(*ends.values())], [*ends], COLOURS[name], marker="o", label=name)
        axis.axhline(statistics.mean(finals(best)), color=COLOURS["DDP"], ls=":", lw=1)
        axis.set(xlabel=f"% of {WHOLE / 3600:.1f} simulated hours (losses are measured)",
                 xticks=[100 * share for share in COMPARED], xlim=(20, 103), title=where.capitalize())
        label_ends(axis)
    axes[0].set_ylabel("held-out nats per byte (bands: range of seeds)")
    quick = next(seeds for *kind, seeds in rows if kind == [HALF, "DDP, int8", "60%"])
    figure.suptitle("Each point: runs whose rate is planned for that time, one byte a weight\n"
                    f"DDP half skipped after 60%, over the dotted line: {more(quick, best)}", fontsize=10.5)
    return figure


if __name__ == "__main__":
    headline(__doc__, {"together": Part(runs, table, draw, seconds)})
