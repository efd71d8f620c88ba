"""How planning grows with the network: results/planning.json, figures/planning.png and a table.

    python -m planning.growth           # about 5 minutes on one core

The nodes are in the twelve published cities in turn, in 8 stages of which a path visits 6; 20 nodes are the
published instance. First: a plan without search. Best: assignment and planning within the limit.
"""
import json
import resource
import time
from pathlib import Path

from planning.assign import assign_stages
from planning.instance import published_network, spread_network
from planning.search import plan
from skippipe import check

LIMITS = {20: 10, 42: 30, 84: 30, 168: 30, 504: 60, 1008: 120}     # nodes: seconds


def timed_plan(nodes, seconds):
    """(simulated seconds, bound, wall seconds, CPU seconds) of a plan made within `seconds`."""
    start, busy = time.perf_counter(), time.process_time()
    work = (4 if nodes == 20 else 6), 3, 2
    if nodes == 20:
        network = published_network()[0]
    else:
        network = spread_network([nodes // 6] + [nodes // 6 * 5 // 7] * 7)[0]
        limit = dict(seconds=seconds / 2) if seconds else dict(iterations=0)
        network = assign_stages(network, *work, **limit)
    found = plan(network, *work, seconds=max(0.0, seconds - (time.perf_counter() - start)))
    assert check(network, found.paths, work[0]) == []
    return found.makespan, found.bound, time.perf_counter() - start, time.process_time() - busy


def measure_all():
    rows = []
    print("| nodes | first: CPU s | iteration | limit | wall s | CPU s | iteration | bound | gap | MiB |")
    for nodes, limit in LIMITS.items():
        first, _, _, early = timed_plan(nodes, 0)
        best, bound, wall, busy = timed_plan(nodes, limit)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        rows.append(dict(nodes=nodes, first=first, first_cpu=early, limit=limit, wall=wall, cpu=busy,
                         best=best, bound=bound, peak_mib=peak))
        print(f"| {nodes} | {early:.2f} | {first:.2f} s | {limit} s | {wall:.1f} | {busy:.1f} | {best:.2f} s "
              f"| {bound:.2f} s | {best / bound - 1:.1%} | {peak:.0f} |", flush=True)
    return rows


def draw(rows, file):
    from matplotlib.figure import Figure
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    nodes = [r["nodes"] for r in rows]
    for key, name, colour in ("first", "first plan", "#E69F00"), ("best", "within the limit", "#009E73"):
        left.semilogx(nodes, [100 * (r[key] / r["bound"] - 1) for r in rows], "o-", color=colour, label=name)
    left.set_title("Iteration above the lower bound, percent", loc="left", fontsize=10.5)
    left.set_ylim(0)
    right.loglog(nodes, [r["first_cpu"] for r in rows], "o-", color="#E69F00", label="first plan, CPU s")
    right.loglog(nodes, [r["wall"] for r in rows], "o-", color="#009E73", label="search, seconds")
    right.loglog(nodes, [r["peak_mib"] for r in rows], "s--", color="#0072B2", label="peak memory, MiB")
    right.set_title("What planning costs on one core", loc="left", fontsize=10.5)
    for axis in (left, right):
        axis.set_xlabel("nodes")
        axis.set_xticks(nodes, nodes)
        axis.minorticks_off()
        axis.legend(frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=100)


if __name__ == "__main__":
    found = measure_all()
    Path("results/planning.json").write_text(json.dumps(found, indent=1) + "\n")
    draw(found, "figures/planning.png")
