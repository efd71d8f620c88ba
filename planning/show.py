"""The methods side by side on one network, as a table and as a picture."""
from pathlib import Path

from planning.instance import PUBLISHED, published_network
from planning.search import Search, plan, random_valid_paths
from skippipe import BACKWARD, FORWARD, LOSS, full_paths, simulate, tc2

# Okabe and Ito's, which the colour-blind tell apart: one per origin
HUES = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999"]


def compare(network, kept, microbatches_per_origin=3, rounds=1, dead=(), seconds=10.0, progress=None):
    """The methods on equal work. Returns (rows, the SkipPipe Plan).

    A row: method, note, microbatches, seconds, planning (s), collisions, waiting (s) and, for the
    published instance, published (s). The full pipeline is DT-FM's and runs all stages; once with all
    origins and once with as many as have partners of their own. Random paths take the 132 s of the
    faulty link most of the time, so they get it corrected.
    """
    work = (kept, microbatches_per_origin, rounds)
    published = network == published_network()[0] and work == (4, 3, 2) and not dead
    rows = full_rows(network, microbatches_per_origin * rounds, dead)
    if published:
        paths = full_paths([network.stages[0][:3], *network.stages[1:]], 3)
        rows.append(row(network, "full pipeline, as published", "3 origins x 9", paths, 3))
    draws = [random_valid_paths(network, kept, microbatches_per_origin, seed=seed, dead=dead)
             for seed in range(25)]
    search = Search(published_network(corrected=True)[0] if published else network, *work, dead=dead)
    median = sorted(draws, key=lambda paths: search.dispatch(paths).makespan)[12]
    rows.append(row(network, "random valid paths (DT-FM skip)", "median of 25 draws", median, rounds,
                    search.dispatch(median)))
    for method, options in (("SkipPipe without TC2", dict(collisions=False)),
                            ("SkipPipe", dict(progress=progress))):
        found = plan(network, *work, seconds=seconds, dead=dead, **options)
        rows.append(row(network, method, "", found.paths, rounds, found.result, found.seconds))
    if published:
        rows = [dict(r, published=PUBLISHED.get(r["method"])) for r in rows]
    return rows, found


def row(network, method, note, paths, rounds, result=None, planning=0.0):
    result = result or simulate(network, paths, rounds)
    late = list(tc2(network, paths, result))
    return dict(method=method, note=note, microbatches=len(paths) * rounds, seconds=result.makespan,
                planning=planning, collisions=len(late), waiting=sum(v.excess for v in late),
                published=None)


def full_rows(network, each, dead):
    """The full pipeline with `each` microbatches per living origin, and as many in all from fewer
    origins."""
    alive = [[r for r in stage if r not in dead] for stage in network.stages]
    total, fewest, rows = len(alive[0]) * each, min(map(len, alive)), []
    for origins in sorted({len(alive[0]), fewest}, reverse=True):
        if fewest and total % origins == 0:
            paths = full_paths([alive[0][:origins], *alive[1:]], total // origins)
            note = f"{origins} origins x {total // origins}"
            rows.append(row(network, "full pipeline (DT-FM)", note, paths, 1))
    return rows


def print_table(rows, bound):
    known = any(r["published"] for r in rows)
    print(f"{'method':33}{'microbatches':25}{'iteration':>9}{'gap':>8}{'planning':>11}{'collisions':>12}"
          f"{'waiting':>10}{'published' if known else '':>12}".rstrip())
    for r in rows:
        skips = "full" not in r["method"]           # the bound is for paths that skip
        gap = f"{max(0.0, r['seconds'] / bound - 1):.1%}" if skips and bound else ""
        published = f"{r['published']:.2f} s" if r["published"] else ""
        print(f"{r['method']:33}{r['microbatches']:<4}{r['note']:21}{r['seconds']:7.3f} s{gap:>8}"
              f"{r['planning']:9.2f} s{r['collisions']:12}{r['waiting']:8.1f} s{published:>12}".rstrip())


def print_paths(network, names, paths, rounds):
    """A line per path: who takes it, and its nodes with their cities, if they have any."""
    lines = {}
    for u, path in enumerate(paths):
        lines.setdefault(tuple(path), []).append(str(u))
    down = "" if rounds == 1 else f", each for {rounds} microbatches one after the other"
    print(f"\nSkipPipe's paths{down}, node by node (and its stage);\n"
          "then each goes home for its loss, and the same way back:\n")
    words = [[f"{names[r] if names else 'node'} {r} ({network.stage_of[r]})" for r in path] for path in lines]
    width = max(len(word) for path in words for word in path)
    for users, path in zip(lines.values(), words):
        print(f"{','.join(users):12}" + " > ".join(word.ljust(width) for word in path).rstrip())
    print()


def canvas():
    """An empty picture. Raises ValueError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("the picture needs matplotlib: install the extra `plot`, or give --figure ''")
    return Figure(figsize=(17, 7.5), layout="constrained")


def draw(file, network, names, rows, found):
    """The picture: the methods as bars, and the plan as a Gantt chart."""
    figure = canvas()
    left, right = figure.subplots(1, 2, width_ratios=[1, 3.2])
    draw_bars(left, rows, found.bound)
    draw_plan(right, network, names, found)
    right.set_title(f"SkipPipe's plan: {rows[-1]['microbatches']} microbatches in {found.makespan:.2f} s")
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)


def draw_bars(axis, rows, bound):
    seconds = [r["seconds"] for r in rows]
    bars = axis.barh([f"{r['method']}\n{r['note']}" for r in rows], seconds, color="#BBBBBB")
    bars[-1].set_color("#0072B2")
    axis.bar_label(bars, fmt=" %.1f s")
    axis.axvline(bound, color="black", linestyle=":")
    axis.set_xlabel(f"simulated iteration in seconds (dotted: bound, {bound:.2f})")
    axis.set_xlim(0, 1.35 * max(seconds))
    axis.invert_yaxis()


def draw_plan(axis, network, names, found):
    """A line per node, grouped by stage; one hue per origin, one shade and number per microbatch."""
    place, height = {}, 0
    for stage in network.stages:
        for r in stage:
            place[r] = height
            height += 1
        height += 1
    last = max(task[1] for task in found.result.timeline)
    for (rank, u, what, start, end), (_, came) in zip(found.result.timeline, found.result.hops):
        y, origin = place[rank], found.paths[u % len(found.paths)][0]
        hue = HUES[network.stages[0].index(origin) % len(HUES)]
        color = "black" if what == LOSS else (hue, 1 - 0.7 * u / max(1, last))
        axis.hlines(y + 0.45, came, start, color=hue, linewidth=2)
        axis.barh(y, end - start, left=start, height=0.76, color=color, edgecolor="black",
                  hatch="////" if what == BACKWARD else None)
        if what == FORWARD:
            axis.text((start + end) / 2, y, u, ha="center", va="center", fontsize=6)
    labels = [f"stage {network.stage_of[r]}: {names[r] if names else 'node'} {r}" for r in place]
    axis.set_yticks(list(place.values()), labels)
    axis.invert_yaxis()
    axis.set_xlabel("simulated seconds; numbered: forward, black: loss, hatched: backward, "
                    "line below: the task waits for its node")
