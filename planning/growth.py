"""How planning grows with the network: results/planning.json, figures/planning.png and a table.

    python -m planning.growth           # 5 minutes on one core

The nodes are in the twelve published cities in turn, in 8 stages of which a path visits 6; 20 nodes are the
published instance. Each size is planned twice: without search, and within a limit of seconds, half of which
may go to the assignment.
"""
import json
import time
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

from planning.assign import assign_stages
from planning.instance import published_network, spread_network
from planning.search import plan

LIMITS = {20: 10, 42: 30, 84: 30, 168: 30, 504: 60, 1008: 120}     # nodes: seconds
COLUMNS = ("nodes", "limit, s", "CPU, s", "iteration, s", "bound, s", "gap, %", "peak memory, MiB")


def measured(nodes, limit):
    """The figures of COLUMNS for a network of so many nodes."""
    start, busy = time.perf_counter(), time.process_time()
    network, work = published_network()[0], (4, 3, 2)
    if nodes != 20:
        network, work = spread_network([nodes // 6] + [nodes // 6 * 5 // 7] * 7)[0], (6, 3, 2)
        network = assign_stages(network, *work, seconds=limit / 2)
    found = plan(network, *work, seconds=max(0.0, limit - (time.perf_counter() - start)))
    return (nodes, limit, time.process_time() - busy, found.makespan, found.bound,
            100 * (found.makespan / found.bound - 1), getrusage(RUSAGE_SELF).ru_maxrss / 1024)


def draw(rows):
    from matplotlib.figure import Figure
    axis = Figure(figsize=(9, 3.6), layout="constrained").subplots()
    for name, some in ("first plan", rows[::2]), ("within the limit of seconds", rows[1::2]):
        axis.plot([row[0] for row in some], [row[5] for row in some], "o-", label=name)
    axis.set(title=f"Simulated: in time the search ends at most {max(row[5] for row in rows[1::2]):.0f}% "
             "above the bound", xlabel="nodes", ylabel="% above the bound", xscale="log", ylim=(0, None))
    axis.legend()
    axis.figure.savefig("figures/planning.png", dpi=150)


if __name__ == "__main__":
    rows = []
    print("", *COLUMNS, "", sep=" | ")
    for nodes, most in LIMITS.items():
        for limit in 0, most:
            rows.append(measured(nodes, limit))
            print("", *(f"{x:.4g}" for x in rows[-1]), "", sep=" | ", flush=True)
    Path("results/planning.json").write_text(json.dumps([dict(zip(COLUMNS, x)) for x in rows], indent=1))
    draw(rows)
