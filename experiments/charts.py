"""How the map of experiments/regions.py is drawn."""
import collections
import itertools
import math
import statistics

from experiments.pictures import COLOURS
from plumbing.drawing import NAMES

# Latency over a step from which on steps between hosts took 1.5 times the computed seconds, below
# it 1.2 times, in the median (experiments/paced.py, docs/speed.md).
DOUBTFUL = 0.36
SHADES = {"ddp": "#777777", "diloco": COLOURS["DiLoCo"], "noloco": COLOURS["NoLoCo"]}


def draw_chart(axis, messages, latencies, chart, marks):
    """Each point in the colour of the method that loses least, fainter the less it leads.

    chart: a list of places.Places for each latency, one for each message.
    """
    axis.pcolormesh(messages, latencies, colours_of(chart), shading="nearest", rasterized=True)
    unclear = hatched(chart)
    if any(map(any, unclear)):
        axis.contourf(messages, latencies, unclear, levels=[0.5, 1.5], colors="none",
                      hatches=["//"])
    axis.set(xscale="log", yscale="log", ylabel="y: one-way latency / time of a step",
             xlabel="\n".join(["x: time of a message of one byte a weight / time of a step",
                               *listed(marks)]),
             xlim=(messages[0], messages[-1]), ylim=(latencies[0], latencies[-1]))
    axis.grid(visible=False)
    axis.axhline(DOUBTFUL, color="black", ls="--", lw=1)
    axis.annotate("above, our hosts took 1.5 times the computed seconds, below 1.2",
                  (messages[0], DOUBTFUL), xytext=(4, 5), textcoords="offset points", fontsize=8,
                  bbox=dict(color="white", alpha=0.7, pad=1))
    for method, points in points_of(messages, latencies, chart).items():
        name_region(axis, NAMES[method], points)
    for number, mark in enumerate(marks, 1):
        axis.plot(mark.message, mark.late, "o", color="white", mec="black", ms=13)
        axis.annotate(str(number), (mark.message, mark.late), ha="center", va="center_baseline")


def colours_of(chart):
    """Red, green, blue and strength of each point, from 0 to 1."""
    rows = []
    for places in chart:
        rows.append([(*rgb(SHADES[place.order[0]]), strength(place)) for place in places])
    return rows


def hatched(chart):
    """Whether each point is hatched."""
    rows = []
    for places in chart:
        rows.append([place.is_unclear for place in places])
    return rows


def rgb(colour):
    """"#rrggbb" -> three numbers from 0 to 1."""
    return [int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)]


def strength(place):
    """0 where the map is blank, else from 0.15 to 0.85 by the lead in nats."""
    if not place.is_known:
        return 0
    return 0.15 + 0.7 * min(1, -place.lead.mean / 0.1)


def points_of(messages, latencies, chart):
    """{method: [(message, latency)]} of the points where it leads clearly."""
    found = {}
    for latency, places in zip(latencies, chart):
        for message, place in zip(messages, places):
            if place.leads_clearly:
                found.setdefault(place.order[0], []).append((message, latency))
    return found


def listed(marks):
    """The lines that say what the numbers on the map are."""
    return [f"{number}: {mark.text}" for number, mark in enumerate(marks, 1)]


def name_region(axis, name, points):
    """Write the method's name at one of its points, the nearest to their middle."""
    x = statistics.mean(math.log(message) for message, _ in points)
    y = statistics.mean(math.log(latency) for _, latency in points)

    def away(point):
        message, latency = point
        return (math.log(message) - x) ** 2 + (math.log(latency) - y) ** 2

    axis.text(*min(points, key=away), name, ha="center", va="center", weight="bold", fontsize=12,
              bbox=dict(color="white", alpha=0.7, pad=1.5))


def leads_in(chart):
    """({method: on what share of the points it leads clearly}, the largest share first; on what
    share we cannot tell who leads)."""
    places = list(itertools.chain(*chart))
    leaders = [place.order[0] for place in places if place.leads_clearly]
    shares = {}
    for method, count in collections.Counter(leaders).most_common():
        shares[method] = count / len(places)
    return shares, sum(place.is_unclear for place in places) / len(places)


def lead_in_words(chart):
    shares, unclear = leads_in(chart)
    words = [f"{NAMES[method]} on {share:.0%}" for method, share in shares.items()]
    return f"{', '.join(words) or 'nobody'}; on {unclear:.0%} we cannot tell"
