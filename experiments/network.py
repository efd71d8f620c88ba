"""Loss against real time between hosts with equal processors: real messages, rates and latencies.

    python -m experiments.network [PART ...] [--seeds 0 1 2] [--steps N] [--out DIR] [--plot]

tries       2 h 30: six settings of DiLoCo and NoLoCo (at 1000 Mbit/s four) and four of DDP on each
            network, one seed, compared on 16 kB of validation text
grid        4 h: five seeds of the best setting of each, and of the best without --delay, on 64 kB
            of test text; NoLoCo also with --survive on two networks
latency     20 min: an outer step alone: all-reduce and pair, 2 to 16 hosts, 0 to 100 ms
pipeline    1 h 20: SkipPipe on 4 stages of 2 hosts between cities, three seeds

Hours are estimates for one instance, which needs two idle cores. Several instances share a part by
labels:

    python -m experiments.network tries --only "50 Mbit/s"      and at the same time the others
    python -m experiments.network tries --out .                 collects them, for `grid`

The hosts are network namespaces of this machine, and the runs go by the clock
(experiments/clock.py):

    python -m experiments.network --clock SECONDS ...   train.py's options: as many steps as fit
    python -m experiments.network --clock 0 ...         times outer steps alone
"""
import itertools
import re
import statistics
import sys
from dataclasses import replace

from experiments.cities import PIPELINE, share_of
from experiments.clock import COMMON, CPU, PROGRAM, clocked
from experiments.comparing import Table
from experiments.harness import FIVE, MEANS_ONLY, Part, Setting, headline
from experiments.latency import LATENCY
from experiments.results import (finals, mean_final, more_at_the_ends, more_than, published,
                                 results, spread_of)
from experiments.together import BYTES

SECONDS = 60
MEGABITS = 8 * 1.115                            # of the tiny model's weights in one byte each

# ---------------------------------------------------------------- what is run

# name: options
WAYS = {f"every {m}, int8": f"--inner-steps {m} --wire int8" for m in (2, 5, 10, 20)}
for m in (5, 10):
    WAYS[f"every {m}, int8, delay half"] = f"{WAYS[f'every {m}, int8']} --delay half"
DDP_WAYS = {f"{wire}": f"--wire {wire}" for wire in ("fp32", "bf16", "int8")}
# The rate is 3e-3, which DDP may double after a shorter warm-up.
DDP_WAYS["int8, rate 6e-3"] = "--wire int8 --warmup 5 --lr 6e-3"
METHODS = {"DDP": DDP_WAYS, "DiLoCo": WAYS, "NoLoCo": WAYS}
SURVIVE = "every 5, int8, survive 6", f"{WAYS['every 5, int8']} --survive 6"
SLOWER = f"one host with {CPU / 3:.2f} of a processor"
PLAIN, FAR = "200 Mbit/s, 5 ms", "50 Mbit/s, 25 ms"
QUICK = "1000 Mbit/s, 0 ms"
CUT, BY_TURNS = "one host cut off twice for 15 s", "two hosts 20 Mbit/s by turns"


def slow_by_turns():
    """Options: hosts 2 and 5 alternate 20 and 200 Mbit/s every 20 s."""
    options = []
    for second, host in itertools.product(range(20, 400, 20), (2, 5)):
        mbit = 20 if second % 40 else 200
        options.append(f"--rate {host}@{second}={mbit}")
    return " ".join(options)


# name: (options of tools/hosts.py, ms one way, Mbit/s of the hosts' links by turns)
NETWORKS = {
    FAR: ("--mbit 50 --latency 25", 25, [[50] * 8]),
    PLAIN: ("--latency 5", 5, [[200] * 8]),
    "one host 20 Mbit/s": ("--latency 5 --slow 5=20", 5, [[200] * 7 + [20]]),
    BY_TURNS: (f"--latency 5 {slow_by_turns()}", 5, [[200] * 8, [200] * 6 + [20] * 2]),
    SLOWER: (f"--latency 5 --cpu 5={CPU / 3:.3f}", 5, [[200] * 8]),
    CUT: ("--latency 5 --cut 5@40+15 --cut 5@72+15", 5, [[200] * 8]),
    QUICK: ("--mbit 1000", 0, [[1000] * 8])}
# QUICK has no tries with a delay. By turns a delay was not the best: five seeds beside the best.
BESIDE = BY_TURNS, "NoLoCo", "every 5, int8, delay half"


def between_hosts(name, method, way, options, half="test"):
    program = f"{PROGRAM} {SECONDS} --half {half}"
    if name == CUT:
        program += " --pace first"
    return Setting(f"{name}: {method}, {way}", f"{COMMON} --method {method.lower()} {options}",
                   program=program, hosts=f"--cpu {CPU} {NETWORKS[name][0]}")


def tries_settings(steps):
    for name, (method, ways) in itertools.product(NETWORKS, METHODS.items()):
        if name == CUT:                                                 # has the settings of PLAIN
            continue
        for way, options in ways.items():
            if name != QUICK or "delay" not in way:
                options += " --eval-sequences 16"
                yield between_hosts(name, method, way, options, "validation")


def grid_settings(steps):
    """Of each method on each network that `tries` has: the best way without --delay, then the best
    of all.

    A try (steps): each method's first way, 3 s by the clock on the last network, between two hosts.
    """
    if steps:
        yield from short_settings()
        return
    tried = published("tries")
    for name, (method, ways) in itertools.product(NETWORKS, METHODS.items()):
        for best in best_ways(tried, name, method, ways):
            yield between_hosts(name, method, best, ways[best])
    yield between_hosts(*BESIDE, WAYS[BESIDE[-1]])
    for name in (SLOWER, CUT):
        yield between_hosts(name, "NoLoCo", *SURVIVE)


def short_settings():
    for method, ways in METHODS.items():
        way, options = next(iter(ways.items()))
        options += " --warmup 4 --eval-sequences 8"
        setting = between_hosts(QUICK, method, way, options)
        yield replace(setting, processes=2, program=f"{PROGRAM} 3", hosts=NETWORKS[QUICK][0])


def best_ways(tried, name, method, ways):
    """The way with the lowest loss of those without --delay, and of all, if that is another."""
    network = PLAIN if name == CUT else name
    losses = {}
    for way in ways:
        label = f"{network}: {method}, {way}"
        if label in tried:
            losses[way] = tried[label][0].final
    if not losses:
        return []
    plain = [way for way in losses if "delay" not in way]
    best = [min(plain, key=losses.get), min(losses, key=losses.get)]
    return list(dict.fromkeys(best))


# ---------------------------------------------------------------- the tables


def grid_rows(found):
    """(network, method, way, its runs) of each row, network by network."""
    rows = []
    for label, seeds in results(found).items():
        parts = re.fullmatch("(.+): (.+?), (.+)", label)
        rows.append((*parts.groups(), seeds))
    return sorted(rows, key=lambda row: list(NETWORKS).index(row[0]))


def base_of(rows, name, method):
    """The runs of the last row of this method on the network: of its best way."""
    return [seeds for network, kind, _, seeds in rows if (network, kind) == (name, method)][-1]


def predicted(method, wire, network):
    """Seconds of a synchronisation by rates and latencies alone, mean over hosts, at each turn."""
    _, latency, turns = NETWORKS[network]
    megabits = MEGABITS * BYTES[wire]
    for mbit in turns:
        if method == "NoLoCo":
            pairs = [megabits / min(pair) for pair in itertools.combinations(mbit, 2)]
            yield latency / 1000 + statistics.mean(pairs)
        else:
            messages = 2 if wire == "int8" else 2 * (len(mbit) - 1)         # one after the other
            yield messages * latency / 1000 + 2 * (1 - 1 / len(mbit)) * megabits / min(mbit)


def show_tries(found):
    table = Table("network", "method", "setting", "steps", "validation, nats per byte")
    for name, method, way, seeds in grid_rows(found):
        table.add(name, method, way, f"{seeds[0].steps[-1]:.0f}", f"{seeds[0].final:.3f}")
    table.end()


def show_grid(found):
    table = Table("network", "method", "held-out nats per byte", "over DDP's", "over DiLoCo's")
    own_ends = Table("network: method", "over DDP's, at their own ends",
                     "over DiLoCo's, at their own ends")
    rows = grid_rows(found)
    for name, method, way, seeds in rows:
        ddp, diloco = base_of(rows, name, "DDP"), base_of(rows, name, "DiLoCo")
        over_ddp, over_diloco = None, None
        if method != "DDP":
            over_ddp = more_than(seeds, ddp)
        if method == "NoLoCo":
            over_diloco = more_than(seeds, diloco)
            own_ends.add(f"{name}: {method}, {way}", more_at_the_ends(seeds, ddp),
                         more_at_the_ends(seeds, diloco))
        table.add(name, f"{method}, {way}", mean_final(seeds), over_ddp, over_diloco)
    table.end()
    print("Compared in equal time: when the first of the two runs ends.\n" + MEANS_ONLY)
    own_ends.end()


def record_grid(found):
    """Steps, seconds and what was predicted, with ranges."""
    table = Table("network: method", "steps", "seconds of a synchronisation", "predicted",
                  "held-out nats per byte", "DiLoCo's last loss, in so much of its time", "DDP's")
    rows = grid_rows(found)
    for name, method, way, seeds in rows:
        shares = []
        for base in (base_of(rows, name, "DiLoCo"), base_of(rows, name, "DDP")):
            shares.append(share_of(base, seeds) if base is not seeds else None)
        table.add(f"{name}: {method}, {way}", spread_of([run.steps[-1] for run in seeds], ".0f"),
                  held(way, seeds), guess(method, way, name, seeds), spread_of(finals(seeds)),
                  *shares)
    table.end()


def held(way, seeds):
    """Seconds of a synchronisation; with a delay, departure and landing are counted apart."""
    times = 2 if "delay" in way else 1
    return spread_of([times * run.curves["sync_seconds"][-1] for run in seeds], ".2f")


def guess(method, way, name, seeds):
    if "delay" in way:
        return "hidden"
    return " or ".join(f"{seconds:.2f}" for seconds in predicted(method, seeds[0].wire, name))


PARTS = {
    "tries": Part(tries_settings, show_tries, seeds=(9,)),
    "grid": Part(grid_settings, show_grid, record_grid, seeds=FIVE),
    "latency": LATENCY,
    "pipeline": PIPELINE,
}

if __name__ == "__main__":
    if "--clock" in sys.argv:
        clocked(sys.argv[1:])
    else:
        headline(__doc__, PARTS)
