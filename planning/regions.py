"""Hundreds of nodes: near nodes form regions, and every region is planned as an instance of its own.

A region is some origins and their share of the nodes of every other stage. Its paths stay in it, so
regions run side by side, and an iteration takes as long as the slowest region's. The search works on that
one.
"""
import math
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import count, islice

from planning.search import Search

WHOLE = 48      # a network of so many nodes is one region


def spread(counts):
    """The keys of {key: count}, each as often as it counts, evenly mixed."""
    return [key for _, key in sorted(((k + 0.5) / n, key) for key, n in counts.items() for k in range(n))]


def cut(delay, sizes, stage_of=None):
    """Cut the nodes into regions, each a dict {node: stage}.

    The next region is a remote node whose neighbours are few, and the nodes nearest to it: as few as hold
    every stage, or a few more where they would strand some nodes nearby. sizes: nodes in each stage.
    stage_of: {node: stage} as it is to be; None: a region's nodes take stages in turn.
    """
    def both(i, j):
        return delay[i][j] + delay[j][i]

    nodes = range(sum(sizes)) if stage_of is None else sorted(stage_of)
    near = {i: sorted(nodes, key=lambda j: both(i, j) if j != i else -1) for i in nodes}
    remote = {i: sum(both(i, j) for j in nodes) / len(near) for i in nodes}
    rest, origins, others, regions = set(nodes), sizes[0], spread(dict(enumerate(sizes[1:], 1))), []
    least = origins if len(rest) <= WHOLE else math.ceil(origins / min(sizes))      # in a region
    while rest:
        unit = len(rest) / origins      # nodes for each origin
        few = round(least * unit) - 1
        reach = {i: next(islice((both(i, j) for j in near[i] if j in rest), few, None)) for i in rest}
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


def share_out(rows, columns, limits):
    """The visits of each region to each stage, as Counters: rows[i] in all, columns[stage] from all regions,
    at most limits[i][stage]. None where that cannot be.

    One visit after the other takes the stage with the most room. Where all of a stage's are taken, another
    region moves one of its own elsewhere: an augmenting path.
    """
    visits, left = [Counter() for _ in rows], dict(columns)

    def place(i, tried):
        for s in sorted(left, key=lambda s: visits[i][s] - limits[i][s]):
            if s not in tried and visits[i][s] < limits[i][s]:
                tried.add(s)
                if left[s] == 0:
                    givers = (j for j in range(len(rows)) if j != i and visits[j][s] and place(j, tried))
                    giver = next(givers, None)
                    if giver is None:
                        continue
                    visits[giver][s] -= 1
                    left[s] += 1
                left[s] -= 1
                visits[i][s] += 1
                return True
        return False
    return visits if all(place(i, set()) for i, row in enumerate(rows) for _ in range(row)) else None


class Region(Search):
    """The search among some nodes of the network of `whole`: {stage: visits} are due, as in the whole."""

    def __init__(self, whole, nodes, visits):
        self.whole, self.nodes, self.walk = whole, nodes, None
        self.room, self.due = [whole.caps[r] for r in nodes], visits
        network = whole.network
        stages = [[i for i, r in enumerate(nodes) if network.stage_of[r] == s]
                  for s, _ in enumerate(network.stages)]
        compute, memory = ([each[r] for r in nodes] for each in (network.compute, network.memory))
        delay = [[network.delay[a][b] for b in nodes] for a in nodes]
        network = replace(network, delay=delay, compute=compute, memory=memory, stages=stages)
        dead = [i for i, r in enumerate(nodes) if r in whole.dead]
        super().__init__(network, whole.kept, whole.each, whole.rounds, whole.swaps, dead, nodes[0],
                         iterations=whole.iterations)

    def fair_visits(self):
        return self.room, self.due

    def late(self):
        return self.whole.late()


class Regions(Search):
    """The search of a network, region by region, always in the slowest."""

    def __init__(self, *problem, **options):
        super().__init__(*problem, **options)
        self.parts, self.each = [], len(self.origins) // len(self.stages[0])

    def regions(self):
        network = self.network
        return [set(part) for part in cut(network.delay, [*map(len, network.stages)], network.stage_of)]

    def first_parts(self):
        """The regions to plan. Neighbours in the list are joined where one cannot do with its own nodes."""
        regions = self.regions()
        while not (visits := self.visits_of(regions, self.visits)):
            regions = [set().union(*regions[i:i + 2]) for i in range(0, len(regions), 2)]
        return [Region(self, sorted(nodes), due) for nodes, due in zip(regions, visits)]

    def visits_of(self, regions, columns):
        """As `share_out`; also None where a region has no origin or no node of some stage."""
        stages = [[nodes & set(stage) for stage in self.network.stages] for nodes in regions]
        paths = [self.each * len(origins - self.dead) for origins, *_ in stages]
        limits = [{s: min(most, sum(self.caps[r] for r in region[s] - self.dead)) for s in columns}
                  for most, region in zip(paths, stages)]
        whole = all(paths) and all(all(region) for region in stages) and min(columns.values(), default=0) >= 0
        return share_out([most * (self.kept - 1) for most in paths], columns, limits) if whole else None

    def farthest_first(self):
        self.parts = self.first_parts()
        for part in self.parts:
            part.walk = part.farthest_first()
        self.join()

    def conflict_based_search(self, limit=math.inf, collisions=True):
        """Left out: the regions' first plans stand for it."""

    def find(self):
        self.farthest_first()
        while not self.over():
            slow = max(self.parts, key=lambda part: part.best.makespan)
            slow.walk = slow.turn(slow.walk)
            self.work = sum(part.work for part in self.parts)
        self.join()

    def plans(self):
        """(paths, order, the network's nodes in their numbering) of each region."""
        return [(part.paths, part.best.order, part.nodes) for part in self.parts]

    def join(self):
        """Simulate the regions' plans side by side. A microbatch's name: its origin, its path's number among
        the origin's, its round."""
        found, tasks = {}, [[] for _ in self.caps]
        for paths, order, nodes in self.plans():
            names = named(paths)
            found |= {(nodes[o], k): tuple(nodes[r] for r in path) for (o, k), path in zip(names, paths)}
            for r, run in zip(nodes, order):
                tasks[r] = [(nodes[names[u % len(paths)][0]], names[u % len(paths)][1], u // len(paths), hop)
                            for u, hop in run]
        names = named([(o,) for o in self.origins])
        number = {name: u for u, name in enumerate(names)}
        order = [[(number[o, k] + turn * len(names), hop) for o, k, turn, hop in run] for run in tasks]
        self.simulate([found[name] for name in names], order)


def named(paths):
    """(origin, k) for the k-th path of each origin."""
    numbers = defaultdict(count)
    return [(path[0], next(numbers[path[0]])) for path in paths]


class Mended(Regions):
    """Plan anew only the regions of some `touched` nodes: dead ones, or such whose times have changed. The
    rest of an older plan for the same stages, with or without dead nodes, stays as it is."""

    def __init__(self, old, touched, *problem, **options):
        super().__init__(*problem, **options)
        self.old, self.touched = old, set(touched)

    def first_parts(self):
        regions, paths = self.regions(), self.old[0]
        group, grown = set(), self.touched
        while True:
            while group != grown:       # with all regions that its paths run through
                group = set().union(*(nodes for nodes in regions if nodes & grown))
                grown = group.union(*(path for path in paths if group & set(path)))
            stays = Counter(self.network.stage_of[r] for path in paths if path[0] not in group for r in path)
            if visits := self.visits_of([group], {s: due - stays[s] for s, due in self.visits.items()}):
                return [Region(self, sorted(group), visits[0])]
            grown = group | min((nodes for nodes in regions if not nodes & group), key=lambda nodes: min(
                self.network.delay[i][j] for i in group for j in nodes))

    def plans(self):
        return [(*self.old, range(len(self.caps))), *super().plans()]
