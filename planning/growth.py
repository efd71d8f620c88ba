"""How planning grows with the network: results/planning.json, figures/planning.png and a table.

    python -m planning.growth       # 5 minutes on one core; --out runs keeps the README's figures

The nodes are in the twelve published cities in turn, in 8 stages of which a path visits 6; 20 nodes
are the published instance. Each size is planned twice: without search, and within a limit of
seconds, half of which may go to the assignment.
"""
import json
import time
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

from planning.arguments import PlanningParser, make_writable
from planning.assign import assign_stages
from planning.instance import published_network, spread_network
from planning.search import shorter_plan
from plumbing.drawing import STYLE, WIDTH

LIMITS = {20: 10, 42: 30, 84: 30, 168: 30, 504: 60, 1008: 120}     # nodes: seconds
COLUMNS = ("nodes", "limit, s", "CPU, s", "iteration, s", "bound, s", "gap, %", "peak memory, MiB")


def planned_within(nodes, limit):
    """The figures of COLUMNS for a network of so many nodes and a limit of seconds."""
    start, busy = time.perf_counter(), time.process_time()
    if nodes == 20:
        network, _ = published_network()
        work = (4, 3, 2)
    else:
        network, _ = spread_network([nodes // 6] + [nodes // 6 * 5 // 7] * 7)
        work = (6, 3, 2)
        network = assign_stages(network, *work, seconds=limit / 2)
    left = max(0.0, limit - (time.perf_counter() - start))
    found = shorter_plan(network, *work, seconds=left)
    gap = 100 * (found.makespan / found.bound - 1)
    memory = getrusage(RUSAGE_SELF).ru_maxrss / 1024
    return nodes, limit, time.process_time() - busy, found.makespan, found.bound, gap, memory


def draw_growth(rows, file):
    """The gap to the bound by nodes."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    first, searched = rows[::2], rows[1::2]
    sizes = [nodes for nodes, *_ in searched]
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 3.6))
        axis = figure.subplots()
        lines = ("first plan", first, "#777777"), ("after the search", searched, "#D55E00")
        for name, some, colour in lines:
            gaps = [row[5] for row in some]
            axis.plot(sizes, gaps, "o-", color=colour, ms=4, lw=1.5)
            axis.annotate(name, (sizes[-1], gaps[-1]), xytext=(6, 0), textcoords="offset points",
                          va="center", color=colour, annotation_clip=False)
        most = max(row[5] for row in searched)
        axis.set_xscale("log")
        axis.set_xticks(sizes, [str(size) for size in sizes])
        axis.minorticks_off()
        axis.set(xlabel="nodes", ylabel="simulated iteration, % above the bound", ylim=(0, None),
                 title=f"After 10 to 120 s of search a plan is at most {most:.0f}% above the "
                 "bound, below which no plan can be")
        figure.savefig(file, dpi=150)


def main(argv=None):
    parser = PlanningParser("python -m planning.growth", __doc__)
    parser.add_argument("--out", default=".",
                        help="folder of results/ and figures/ (default: this one)")
    out = Path(parser.parse_args(argv).out)
    table, picture = out / "results/planning.json", out / "figures/planning.png"
    try:
        make_writable(table)
        make_writable(picture)
    except OSError as error:
        parser.error(error)
    rows = []
    print("", *COLUMNS, "", sep=" | ")
    for nodes, most in LIMITS.items():
        for limit in (0, most):
            rows.append(planned_within(nodes, limit))
            print("", *(f"{x:.4g}" for x in rows[-1]), "", sep=" | ", flush=True)
    table.write_text(json.dumps([dict(zip(COLUMNS, row)) for row in rows], indent=1))
    draw_growth(rows, picture)


if __name__ == "__main__":
    main()
