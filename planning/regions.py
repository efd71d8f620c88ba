"""Hundreds of nodes: near nodes form regions, and every region is planned by itself.

A region is some origins and their share of the nodes of every other stage. Its paths stay in it, so
regions run side by side, and an iteration takes as long as the slowest region's. The search works on that
one.
"""
import math
from collections import Counter
from itertools import islice

from planning.search import Search

WHOLE = 48      # a network of so many nodes is one region


def spread(counts):
    """The keys of {key: count}, each as often as it counts, evenly mixed."""
    return [key for _, key in sorted(((k + 0.5) / n, key) for key, n in counts.items() for k in range(n))]


def cut(delay, sizes, stage_of=None):
    """Cut the nodes into regions, each a dict {node: stage}.

    The next region is a remote node whose neighbours are few, and the nodes nearest to it: as few as hold
    every stage, or a few more where they would strand some nodes nearby. sizes: nodes in each stage. stage_of: {node: stage}
    as it is to be; None: a region's nodes take stages in turn.
    """
    def both(i, j):
        return delay[i][j] + delay[j][i]

    nodes = range(sum(sizes)) if stage_of is None else sorted(stage_of)
    near = {i: sorted(nodes, key=lambda j: both(i, j) if j != i else -1) for i in nodes}
    remote = {i: sum(both(i, j) for j in nodes) / len(near) for i in nodes}
    rest, origins, others, regions = set(nodes), sizes[0], spread(dict(enumerate(sizes[1:], 1))), []
    least = origins if len(rest) <= WHOLE else math.ceil(origins / min(sizes))      # origins of a region
    while rest:
        unit = len(rest) / origins      # nodes for each origin
        few = round(least * unit) - 1
        reach = {i: both(i, next(islice((j for j in near[i] if j in rest), few, None))) for i in rest}
        first = max(rest, key=lambda i: (reach[i] + remote[i], -i))
        left = [j for j in near[first] if j in rest]
        here = math.ceil(sum(both(first, j) <= 1.1 * reach[first] for j in left) / unit - 1e-9)
        here = math.ceil(here / max(1, here // least))
        here = origins if origins - here < least else here
        size = round(here * unit)
        region, due = {}, Counter({0: here}) + Counter(others[:size - here])
        for j, s in zip(left, spread(due)) if stage_of is None else ((j, stage_of[j]) for j in left):
            if due[s]:
                region[j] = s
                due[s] -= 1
        rest, origins, others = rest - set(region), origins - here, others[size - here:]
        regions.append(region)
    return regions


class Region(Search):
    """The search among some nodes of the network of `whole`: all others are dead to it."""

    def __init__(self, whole, nodes, visits):
        self.whole, self.due, self.hop, self.walk = whole, visits, whole.hop, None
        outside = whole.dead | set(range(len(whole.caps))) - nodes
        super().__init__(whole.network, whole.kept, whole.each, whole.rounds, whole.swaps, outside,
                         seed=min(nodes), iterations=whole.iterations)

    def fair_visits(self):
        return self.whole.caps, self.due

    def late(self):
        return self.whole.late()


class Regions(Search):
    """The search of a network, region by region, always in the slowest."""

    def __init__(self, *problem, **options):
        super().__init__(*problem, **options)
        self.parts, self.each = [], len(self.origins) // len(self.stages[0])

    def farthest_first(self):
        network = self.network
        regions = [set(part) for part in cut(network.delay, [*map(len, network.stages)], network.stage_of)]
        while not (visits := self.share_out(regions)):
            regions = [set().union(*regions[i:i + 2]) for i in range(0, len(regions), 2)]
        self.parts = [Region(self, *part) for part in zip(regions, visits)]
        for part in self.parts:
            part.walk = part.farthest_first()
        self.join()

    def share_out(self, regions):
        """The visits that each region's paths make to each stage, which are `self.visits` together. None
        where a region has no living origin, or no room was found for a visit."""
        rows = [self.each * len(nodes.intersection(self.stages[0])) for nodes in regions]
        rooms = [{s: min(row, sum(self.caps[r] for r in nodes.intersection(self.stages[s])))
                  for s in self.visits} for row, nodes in zip(rows, regions)]
        left, later, found = dict(self.visits), Counter(), []
        for room in rooms:
            later.update(room)
        for row, room in zip(rows, rooms):
            later.subtract(room)
            visits = Counter()
            for _ in range(row * (self.kept - 1)):
                # first the stage for which the later regions have the least room to spare
                s = max(room, key=lambda s: (min(left[s], room[s] - visits[s]) > 0, left[s] - later[s]))
                left[s] -= 1
                visits[s] += 1
            found.append(visits)
            if not row or any(visits[s] > room[s] for s in room):
                return None
        return None if any(left.values()) else found

    def conflict_based_search(self, limit=math.inf, collisions=True):
        """Left out: the regions' first plans stand for it."""

    def turn(self, walk):
        slow = max(self.parts, key=Region.shortest)
        slow.walk = slow.turn(slow.walk)
        self.work = sum(part.work for part in self.parts)

    def shortest(self):
        return max(map(Region.shortest, self.parts))

    def find(self):
        super().find()
        self.join()

    def join(self):
        """Simulate the regions' plans side by side, their microbatches numbered as in the whole."""
        paths, order, origins = [None] * len(self.origins), [[] for _ in self.caps], self.stages[0]
        for part in self.parts:
            own = [origins.index(o) for o in part.stages[0]]
            number = [own[u % len(own)] + u // len(own) * len(origins)
                      for u in range(self.rounds * len(part.paths))]
            for u, path in zip(number, part.paths):
                paths[u] = path
            for tasks, run in zip(order, part.best.order):
                tasks += [(number[u], hop) for u, hop in run]
        self.simulate(paths, order)
