"""The methods side by side on one network, and as text."""
import time
from collections import Counter

from planning.instance import published_network
from planning.search import plan
from skippipe import Search, full_paths

DRAWN = 200     # nodes; beyond, a random draw takes minutes


def random_valid_paths(network, stages_kept, microbatches_per_origin=3, swaps=2, seed=0, dead=()):
    """DT-FM skip: paths drawn at random, blind to the links, among those that keep to CC1, CC2, CC3 and
    TC1."""
    search = Search(network, stages_kept, microbatches_per_origin, 1, swaps, dead, seed)
    draw, nodes = search.random.random, range(len(network.compute))
    equal = dict.fromkeys(search.stages[0], 1.0)
    return search.fill([None] * len(search.origins), search.visits, equal,
                       lambda: [[draw() for _ in nodes] for _ in nodes], noise=1.0)


def compare(network, kept, microbatches_per_origin=3, rounds=1, dead=(), seconds=10.0):
    """Plan with each method, on equal work. Returns (rows, the SkipPipe Plan).

    A row: method, microbatches, seconds, planning (s). seconds: limit of the whole, each method's first
    plan excepted. Up to a quarter goes to the random draws, which are left out beyond DRAWN nodes, and as
    much to SkipPipe without TC2. The full pipeline is DT-FM's and runs all stages. On the published
    instance random paths get the faulty link corrected, or they take its 132 s most of the time.
    """
    def add(method, paths, result, planning=0.0, rounds=rounds):
        rows.append(dict(method=method, microbatches=len(paths) * rounds, seconds=result.makespan,
                         planning=planning))

    rows, start, work = [], time.perf_counter(), (kept, microbatches_per_origin, rounds)
    alive = [[r for r in stage if r not in dead and network.memory[r]] for stage in network.stages]
    if all(alive):
        paths = full_paths(alive, microbatches_per_origin * rounds)
        add("full pipeline (DT-FM)", paths, Search(network, len(alive), 1).dispatch(paths), rounds=1)
    published = network == published_network()[0] and work == (4, 3, 2) and not dead
    search = Search(published_network(corrected=True)[0] if published else network, *work, dead=dead)
    most, draws = 25 if len(network.delay) <= DRAWN else 0, []
    while len(draws) < most and (not draws or time.perf_counter() - start < seconds / 4):
        paths = random_valid_paths(network, kept, microbatches_per_origin, seed=len(draws), dead=dead)
        draws.append((paths, search.dispatch(paths)))
    if draws:
        median = sorted(draws, key=lambda drawn: drawn[1].makespan)[len(draws) // 2]
        add(f"random valid paths (DT-FM skip), median of {len(draws)} draws", *median)
    for method, share, collisions in ("SkipPipe without TC2", 1 / 4, False), ("SkipPipe", 1, True):
        left = max(0.0, seconds - (time.perf_counter() - start)) * share
        found = plan(network, *work, seconds=left, dead=dead, collisions=collisions)
        add(method, found.paths, found.result, found.seconds)
    return rows, found


def print_table(network, work, dead, rows, bound):
    """The head and the table. work: (kept, paths per origin, rounds)."""
    kept, paths, rounds = work
    alive = len(set(network.stages[0]) - set(dead))
    print(f"\n{len(network.delay)} nodes; stages of {[*map(len, network.stages)]} nodes, {kept} kept;\n"
          f"{alive} origins x {paths} paths x {rounds} rounds = {alive * paths * rounds} microbatches")
    print(f"Simulated; no plan with these skips and stages takes less than {bound:.3f} s:\n")
    print(f"{'method':50}   iteration      gap   planning")
    for r in rows:
        gap = f"{max(0.0, r['seconds'] / bound - 1):.1%}" if bound and "full" not in r["method"] else ""
        print(f"{r['method']:50}  {r['seconds']:8.3f} s  {gap:>7}  {r['planning']:7.2f} s")


def label(network, names, r):
    return f"{names[r] if names else 'node'} {r} ({network.stage_of.get(r, 'no stage')})"


def print_paths(network, names, paths, dead):
    """A line per path: how often it is taken, and its nodes. Then the nodes without work."""
    print("\nSkipPipe's paths, node by node (and its stage), and how many paths take the same nodes;\n"
          "then each goes home for its loss, and the same way back:\n")
    for path, times in sorted(Counter(paths).items()):
        print(f"{times:4} x  {' > '.join(label(network, names, r) for r in path)}")
    idle = set(range(len(network.delay))) - {r for path in paths for r in path} - set(dead)
    print(f"\nIdle nodes: {', '.join(label(network, names, r) for r in sorted(idle)) or 'none'}\n")
