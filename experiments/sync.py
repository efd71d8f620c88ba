"""The tables and the two pictures of what bench_sync.py found."""
import math
import statistics

from experiments.pictures import COLOURS

MARKS = "osD^vX"


def print_simulated(r):
    for s, (value, error, closed) in zip(r["spreads"], r["pair"]):
        print(f"std(t)/t_c {s:4}: 2 E[max] simulated {value:.4f} +- {error:.4f}, closed form {closed:.4f}")
    for n in r["counts"]:
        zero, wide = r["ratio"][n][0][0], r["ratio"][n][-1]
        print(f"{n:4} replicas: tree / pair {zero:g} at zero spread (log2 n = {math.log2(n):g}), "
              f"{wide[0]:.1f} +- {wide[1]:.1f} at {r['spreads'][-1]}")
    at = r["inner_steps"].index(100)
    for i, outer in enumerate(r["outer_steps"]):
        now, alone = (r["training"][name][1024][i][at] for name in ("NoLoCo", "alone"))
        print(f"1024 replicas, 100 inner steps, {outer} outer steps: DiLoCo takes "
              f"{100 * (now[0] - 1):.1f}% +- {100 * now[1]:.1f} longer than NoLoCo "
              f"({100 * (alone[0] - 1):.1f}% if a pair's delay were forgotten at once; the paper says ~20%)")
    pairs = [pair for rows in r["ratio"].values() for pair in rows]
    pairs += [pair for by in r["seconds"].values() for pair in by.values()]
    for by in r["training"].values():
        pairs += [pair for rows in by.values() for row in rows for pair in row]
    worst = max(error / value for value, error in pairs)
    print(f"largest standard error {100 * worst:.2f}% of its value; {r['wall_seconds']:.0f} s")


def add_ratios(result):
    """Medians, quartiles and ratios (medians of the trials'), in place."""
    table = result["rows"]

    def ratio(a, b):
        return statistics.median(x / y for x, y in zip(table[a]["seconds"], table[b]["seconds"]))

    for name, row in table.items():
        low, middle, high = quartiles(row["seconds"])
        over = ratio(name, row["floor"]) if row["floor"] else None
        row.update(median=middle, quartiles=[low, high], diloco_over_it=ratio("DiLoCo", name),
                   over_floor=over)
    result["all_reduce_over_exchange"] = ratio("all-reduce of theta", "exchange of theta")


def quartiles(x):
    return statistics.quantiles(x, n=4, method="inclusive") if len(x) > 1 else x * 3


def print_measured(r):
    print(f"{r['replicas']} processes, {r['params'] / 1e6:g}M parameters, {r['backend']}, {r['device']}, "
          f"torch {r['torch']}: slowest rank, median [quartiles] of {r['trials']} trials; "
          "ratios are medians of the trials'")
    print(f"{'':34}{'seconds':>8} {'[quartiles]':>16}{'MB sent':>9}{'MB ahead':>9}{'MB/s':>7}"
          f"{'DiLoCo / it':>13}{'it / floor':>11}")
    for name, row in r["rows"].items():
        low, high = row["quartiles"]
        floor = f"{row['over_floor']:11.2f}" if row["floor"] else ""
        print(f"{name:34}{row['median']:8.4f} {f'[{low:.4f} {high:.4f}]':>16}{row['bytes'] / 1e6:9.1f}"
              f"{row['bytes_ahead'] / 1e6:9.1f}{row['bytes'] / row['median'] / 1e6:7.0f}"
              f"{row['diloco_over_it']:13.2f}{floor}")
    bytes_alone = r["rows"]["all-reduce of theta"]["bytes"] / r["rows"]["exchange of theta"]["bytes"]
    print(f"the exchange is {r['all_reduce_over_exchange']:.2f}x faster than the all-reduce (bytes alone: "
          f"{bytes_alone:.2f}x)")


def draw_simulated(plt, found):
    (r,) = found
    figure, ((a, b), (c, d)) = plt.subplots(2, 2, figsize=(10, 7.6), layout="constrained")

    def line(axis, x, points, i, label, **style):
        value, error = zip(*points)
        axis.errorbar(x, value, [2 * e for e in error], color=COLOURS[i], marker=MARKS[i], capsize=2,
                      lw=1.2, label=label, **style)

    for i, (n, points) in enumerate(r["ratio"].items()):
        line(a, r["spreads"], points, i, f"{n} replicas")
    for i, (n, points) in enumerate(r["training"]["NoLoCo"].items()):
        line(b, r["inner_steps"], points[1], i, f"{n} replicas")
    at = r["inner_steps"].index(100)
    forgotten = r["training"]["alone"]["1024"][1][at][0]
    b.plot(100, forgotten, "k*", ms=9, label="1024, delays forgotten at once", zorder=5)
    for i, (name, by) in enumerate(r["seconds"].items()):
        line(c, [int(n) for n in by], list(by.values()), i, name)
    for i, (case, by) in enumerate(r["late"].items()):
        for method, dashes in (("DiLoCo", "--"), ("NoLoCo", "-")):
            line(d, range(len(by[method])), by[method], i, f"{method}: {case}", ls=dashes)
    link = f"{r['mbit']:g} Mbit/s, {1000 * r['latency_seconds']:g} ms, std(t)/t_c {r['spread']:g}"
    a.set(xlabel="std(t) / t_c of a message", ylabel="time of tree all-reduce / pair averaging",
          title="A  one synchronisation", ylim=(0, None))
    b.set(xlabel="inner steps per outer step", ylabel="training time DiLoCo / NoLoCo",
          title="B  500 outer steps, exchange time left out")
    c.set(xscale="log", yscale="log", xlabel="replicas", ylabel="seconds per synchronisation",
          title=f"C  {r['params'] / 1e6:g}M fp32 at {link}")
    c.set_xticks(r["counts"], [str(n) for n in r["counts"]])
    c.minorticks_off()
    d.set(xlabel="outer step", ylabel="mean time lost by a replica / outer step",
          title="D  one of 1024 replicas is late from outer step 4 (m = 50)")
    for axis in (a, b, c, d):
        axis.legend()
    figure.suptitle("Simulated. Bars: two standard errors")
    return figure


def draw_measured(plt, found):
    found = sorted(found, key=lambda r: r["replicas"])
    names = list(found[0]["rows"])[::-1]
    figure, axis = plt.subplots(figsize=(8, 4.6), layout="constrained")
    height = 0.8 / len(found)
    for k, r in enumerate(found):
        shown = [name for name in names if name in r["rows"]]
        rows = [r["rows"][name] for name in shown]
        middle = [row["median"] for row in rows]
        error = [[row["median"] - row["quartiles"][0] for row in rows],
                 [row["quartiles"][1] - row["median"] for row in rows]]
        places = [names.index(name) - height * (k - (len(found) - 1) / 2) for name in shown]
        what = f"{r['replicas']} processes, {r['params'] / 1e6:g}M fp32, {r['backend']}, {r['device']}"
        axis.barh(places, middle, height, xerr=error, capsize=2, color=COLOURS[k], label=what)
    axis.set_yticks(range(len(names)), names)
    axis.set(xlabel="seconds, median and quartiles over trials, slowest rank",
             title="Measured: floors, then whole steps")
    axis.legend()
    return figure
