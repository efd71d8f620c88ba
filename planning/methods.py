"""The methods side by side on one network, and as text."""
import random
import time
from collections import Counter

from planning.instance import published_network
from planning.neighbourhood import fill, shuffled
from planning.search import plan_without_tc2, shorter_plan
from skippipe import dispatch, full_paths, shortest_path, skip_schedule, without

DRAWN = 200     # nodes; beyond, a random draw takes minutes


def random_valid_paths(network, stages_kept, microbatches_per_origin=3, swaps=2, seed=0):
    """DT-FM skip: paths drawn at random, blind to the links, among those that keep to CC1, CC2, CC3
    and TC1."""
    schedule = skip_schedule(network, stages_kept, microbatches_per_origin)
    draw = random.Random(f"plan {seed}")
    nodes = range(len(network.compute))

    def any_path(origin, closed, must):
        """The shortest path where all hops have random costs."""
        costs = []
        for _ in nodes:
            costs.append([draw.random() for _ in nodes])
        stages = without(closed, network.stages)
        return shortest_path(costs, stages, origin, stages_kept, swaps, must)

    equal = dict.fromkeys(schedule.origins, 1.0)
    none = [None] * len(schedule.origins)
    order = shuffled(schedule.origins, none, equal, 1.0, draw)
    return fill(schedule, none, schedule.visits, order, any_path)


def compare_methods(network, kept, microbatches_per_origin=3, rounds=1, seconds=10.0,
                    tell=lambda method: None):
    """Plan with each method, on equal work. Returns (rows, SkipPipe's Plan).

    A row: method, microbatches, seconds, planning (s). seconds: limit of the whole, each method's
    first plan excepted. Up to a quarter goes to the random draws, which are left out beyond DRAWN
    nodes, and as much to SkipPipe without TC2. tell(method) is called as each begins."""
    start, work = time.perf_counter(), (kept, microbatches_per_origin, rounds)

    def left():
        return max(0.0, seconds - (time.perf_counter() - start))

    rows = []
    tell("the full pipeline")
    rows += full_pipeline(network, microbatches_per_origin * rounds)
    tell("random valid paths")
    rows += random_draws(network, work, lambda: time.perf_counter() - start >= seconds / 4)
    for method, plan, share in (("SkipPipe without TC2", plan_without_tc2, 1 / 4),
                                ("SkipPipe", shorter_plan, 1)):
        tell(method)
        found = plan(network, *work, seconds=left() * share)
        rows.append(row_of(method, len(found.paths) * rounds, found, found.seconds))
    return rows, found


def row_of(method, microbatches, result, planning=0.0):
    return dict(method=method, microbatches=microbatches, seconds=result.makespan,
                planning=planning)


def full_pipeline(network, microbatches):
    """DT-FM's row, on all stages: a list, empty where a stage has no node left that can work."""
    unable = {r for r, memory in enumerate(network.memory) if not memory}
    able = without(unable, network.stages)
    if not all(able):
        return []
    paths = full_paths(able, microbatches)
    result = dispatch(network, paths)
    return [row_of("full pipeline (DT-FM)", len(paths), result)]


def random_draws(network, work, late):
    """The row of the median of up to 25 random draws: a list, empty beyond DRAWN nodes.

    On the published instance random paths get the faulty link corrected, or they take its 132 s
    most of the time. late(): whether this draw is the last one."""
    if len(network.delay) > DRAWN:
        return []
    kept, each, rounds = work
    published = network == published_network()[0] and work == (4, 3, 2)
    if published:
        on, _ = published_network(corrected=True)
    else:
        on = network
    results = []
    while len(results) < 25 and not (results and late()):
        paths = random_valid_paths(network, kept, each, seed=len(results))
        results.append(dispatch(on, paths, rounds))
    results.sort(key=lambda result: result.makespan)
    median = results[len(results) // 2]
    method = f"random valid paths (DT-FM skip), median of {len(results)} draws"
    return [row_of(method, len(paths) * rounds, median)]


def print_table(network, work, rows, bound):
    """The head and the table. work: (kept, paths per origin, rounds)."""
    kept, paths, rounds = work
    origins = len(network.stages[0])
    sizes = [len(stage) for stage in network.stages]
    print(f"\n{len(network.delay)} nodes; stages of {sizes} nodes, {kept} kept;\n"
          f"{origins} origins x {paths} paths x {rounds} rounds = {origins * paths * rounds} "
          "microbatches")
    print(f"Simulated; no plan with these skips and stages takes less than {bound:.3f} s:\n")
    print(f"{'method':50}   iteration      gap   planning")
    for r in rows:
        gap = ""
        if bound and "full" not in r["method"]:
            gap = f"{max(0.0, r['seconds'] / bound - 1):.1%}"
        print(f"{r['method']:50}  {r['seconds']:8.3f} s  {gap:>7}  {r['planning']:7.2f} s")


def name_of(network, names, r):
    """A node's city, number and stage."""
    return f"{names[r] if names else 'node'} {r} ({network.stage_of[r]})"


def print_paths(network, names, paths):
    """A line per path: how often it is taken, and its nodes. Then the nodes that have a stage and
    no work."""
    print("\nSkipPipe's paths, node by node (and its stage), and how many paths take the same "
          "nodes;\nthen each goes home for its loss, and the same way back:\n")
    for path, times in sorted(Counter(paths).items()):
        print(f"{times:4} x  {' > '.join(name_of(network, names, r) for r in path)}")
    idle = set(network.stage_of).difference(*paths)
    shown = ", ".join(name_of(network, names, r) for r in sorted(idle))
    print(f"\nIdle nodes: {shown or 'none'}\n")
