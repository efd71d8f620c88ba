"""Both papers at once on the published instance: 20 nodes in 12 cities, 30 microbatches an
iteration.

    python -m experiments.together [--seeds 0 1 2] [--steps N] [--out DIR] [--plot]

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

import train
from experiments.comparing import Table
from experiments.harness import MEANS_ONLY, Part, Setting, headline, title_of
from experiments.pictures import COLOURS, WIDTH, bars, counted, label_ends
from experiments.results import finals, mean_final, more_at_the_ends, results, spread_of
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
    "NoLoCo, int8, delayed": f"--method noloco {OUTER} --delay 1",
}
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


def together_settings(steps):
    """As many steps as fit into WHOLE; --steps: into a share of it, steps / 400."""
    links = keep_links(published_network()[0], "headline-links-20.json")
    found = simulated_seconds()
    whole = WHOLE
    if steps:
        whole *= steps / 400
    for (share, methods), paths in itertools.product(COMPARED.items(), PATHS):
        for method in methods:
            fit = int(share * whole / a_step(found, paths, method))
            fit = max(EVERY, fit // EVERY * EVERY)
            if method.endswith("delayed"):
                fit -= 1                            # just after a merge
            yield Setting(f"{paths}: {method}, {share:.0%}",
                          f"{LEARN} --skip {PATHS[paths]:g} --links {links} {METHODS[method]} "
                          f"--steps {fit}", 20)


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
    """The runs with the lowest mean loss of DDP's on the full pipeline for the whole time."""
    candidates = [seeds for paths, method, share, seeds in rows
                  if paths == FULL and method.startswith("DDP") and share == "100%"]
    return min(candidates, key=lambda seeds: statistics.mean(finals(seeds)))


def over_another(seeds, others):
    """Nats per byte over the others', each at its own end; None beside themselves."""
    if others is seeds:
        return None
    return more_at_the_ends(seeds, others)


def show_together(found):
    table = Table("paths: method, share of the time", "steps", "held-out nats per byte",
                  "over the best full pipeline's after 100%", "over DDP's, same paths and time")
    rows = share_rows(found)
    best = best_ddp(rows)
    ddp = {(paths, share): seeds for paths, method, share, seeds in rows if method == "DDP, int8"}
    for paths, method, share, seeds in rows:
        table.add(f"{paths}: {method}, {share}", f"{seeds[0].steps[-1]:.0f}", mean_final(seeds),
                  over_another(seeds, best), over_another(seeds, ddp[paths, share]))
    table.end()
    by_kind = {(paths, method, share): seeds for paths, method, share, seeds in rows}
    table = Table("share of the time, one byte a weight", "DDP: half skipped over full",
                  "half skipped: NoLoCo over DDP", "half skipped: NoLoCo over DiLoCo")
    for share in [f"{share:.0%}" for share in COMPARED]:
        ddp = by_kind[HALF, "DDP, int8", share]
        diloco = by_kind[HALF, "DiLoCo, int8", share]
        noloco = by_kind[HALF, "NoLoCo, int8", share]
        table.add(share, more_at_the_ends(ddp, by_kind[FULL, "DDP, int8", share]),
                  more_at_the_ends(noloco, ddp), more_at_the_ends(noloco, diloco))
    table.end()
    print(MEANS_ONLY)


def record_together(found):
    table = Table("paths: method, share of the time", "s a step", "where a node's messages queue",
                  "held-out nats per byte (least to largest)")
    for paths, method, share, seeds in share_rows(found):
        free = a_step(found["seconds"], paths, method)
        queued = a_step(found["seconds"], paths, method, ", queued")
        table.add(f"{paths}: {method}, {share}", f"{free:.1f}", f"{queued:.1f}",
                  spread_of(finals(seeds)))
    table.end()


# ---------------------------------------------------------------- the picture


def draw_together(plt, found):
    """Last losses of the runs planned for each share of the time."""
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH, 4.6), sharey=True)
    rows = share_rows(found)
    best = statistics.mean(finals(best_ddp(rows)))
    for axis, where in zip(axes, PATHS):
        axis.axhline(best, color=COLOURS["DDP"], ls=":", lw=1)
        for method in IN_INT8:
            ends = {}
            for paths, kind, share, seeds in reversed(rows):
                if (paths, kind) == (where, method):
                    ends[float(share[:-1])] = finals(seeds)
            name = method.split(",")[0]
            bars(axis, list(ends.values()), list(ends), COLOURS[name], label=name)
        axis.set(xlabel=f"% of {WHOLE / 3600:.1f} simulated hours",
                 xticks=[100 * share for share in COMPARED], xlim=(20, 103),
                 title=where.capitalize())
    axes[0].set_ylabel("held-out nats per byte")
    finding = ("Half skipped after 60% of the time is near the full pipeline after 100%; NoLoCo "
               "trails")
    seeds = counted(len(rows[0][-1]), "seed")
    figure.suptitle(title_of(found, finding, "Both papers together") + "\n(each point: runs whose "
                    f"rate is planned for that time; bars: range of {seeds}; dotted: DDP, full, "
                    "100%)",
                    x=0.01, ha="left")
    for axis in axes:
        label_ends(axis)
    return figure


PARTS = {"together": Part(together_settings, show_together, record_together,
                          {"together": draw_together}, simulated_seconds)}

if __name__ == "__main__":
    headline(__doc__, PARTS)
