"""The methods and the plan, as text."""
from collections import Counter


def print_table(network, work, dead, rows, bound):
    """The head and the table. work: (kept, paths per origin, rounds)."""
    kept, paths, rounds = work
    alive = len(set(network.stages[0]) - set(dead))
    print(f"\n{len(network.delay)} nodes; stages of {[*map(len, network.stages)]} nodes, {kept} kept;\n"
          f"{alive} origins x {paths} paths x {rounds} rounds = {alive * paths * rounds} microbatches")
    if lost := len(network.stages[0]) - alive:
        print(f"{lost} dead of stage 0 take {lost * paths * rounds} microbatches with them: this iteration "
              "does less work than one with all origins")
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
