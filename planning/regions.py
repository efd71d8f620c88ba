"""Hundreds of nodes: near nodes form regions, and every region is planned by itself.

A region is some origins and their share of the nodes of every other stage. Its paths stay in it, so
regions run side by side, and an iteration takes as long as the slowest region's. The search works on that
one. After a death only the region around the dead node is planned anew (`around`).
"""
import math
from collections import Counter

from planning.search import Search
from skippipe import check

WHOLE = 48      # a network of so many nodes is one region


def spread(counts):
    """The keys of {key: count}, each as often as it counts, evenly mixed."""
    return [key for _, key in sorted(((k + 0.5) / n, key) for key, n in counts.items() for k in range(n))]


def cut(delay, sizes, stage_of=None):
    """Cut the nodes into regions, each a dict {node: stage}.

    The first region begins with the most remote node, each later one with the node nearest to the region
    before. It takes the nodes nearest to that one: as few as hold every stage, or a few more where they
    would strand some nodes nearby. sizes: nodes in each stage. stage_of: {node: stage} as it is to be;
    None: a region's nodes take stages in turn.
    """
    def apart(i, j):
        return delay[i][j] + delay[j][i]

    rest, regions = set(stage_of or range(sum(sizes))), []
    origins, others = sizes[0], spread(dict(enumerate(sizes[1:], 1)))
    region = [max(sorted(rest), key=lambda i: sum(delay[i]))]
    least = origins if len(rest) <= WHOLE else math.ceil(origins / min(sizes))      # origins of a region
    while rest:
        unit = len(rest) / origins      # nodes for each origin
        first = min(sorted(rest), key=lambda j: min(apart(i, j) for i in region))
        left = sorted(rest, key=lambda j: (apart(first, j), j))
        reach = 1.1 * apart(first, left[round(least * unit) - 1])
        here = math.ceil(sum(apart(first, j) <= reach for j in left) / unit - 1e-9)
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
        self.whole, self.due, self.cost, self.walk = whole, visits, whole.cost, None
        outside = whole.dead | set(range(len(whole.caps))) - nodes
        super().__init__(whole.network, whole.kept, whole.each, whole.rounds, whole.swaps, outside,
                         whole.random.random(), whole.seconds, whole.iterations)
        self.start = whole.start

    def fair_visits(self):
        return self.whole.caps, self.due, ()        # the whole has shared out the visits

    def turn(self, walk):
        """First come, first served: an order of the whole would take a simulation of the whole."""
        return self.large_neighbourhood_search(walk, steps=200)

    def conflict_based_search(self, limit=math.inf, collisions=True):
        """Left out: CC3 holds for the whole, not in a region."""


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
        rooms = [*map(self.most_visits, regions)]
        left, found = dict(self.visits), []
        for i, room in enumerate(rooms):
            spare = {s: sum(later[s] for later in rooms[i + 1:]) - left[s] for s in left}
            visits = Counter()
            for _ in range(rows[i] * (self.kept - 1)):
                open_stages = [s for s in left if left[s] and visits[s] < room[s]]
                if not open_stages:
                    return None
                s = min(open_stages, key=lambda s: spare[s] + visits[s])    # later there is least to spare
                left[s] -= 1
                visits[s] += 1
            found.append(visits)
        return found if all(rows) else None

    def most_visits(self, nodes):
        """How many visits to each stage the paths of these nodes' origins can make there."""
        most = self.each * len(nodes.intersection(self.stages[0]))
        return {s: min(most, sum(self.caps[r] for r in nodes.intersection(self.stages[s])))
                for s in self.visits}

    def conflict_based_search(self, limit=math.inf, collisions=True):
        """Left out: the regions' first plans stand for it."""

    def turn(self, walk):
        slow = max(self.parts, key=lambda part: part.best.makespan)
        slow.walk = slow.turn(slow.walk)
        self.work = sum(part.work for part in self.parts)

    def find(self):
        super().find()
        self.join()

    def join(self):
        """The regions' paths together."""
        self.dispatch(in_turn([path for part in self.parts for path in part.paths], self.stages[0]))


def around(plan, network, kept, each, rounds, seed, dead):
    """(paths, order) of the plan now that nodes are dead, or their compute is another, mended node by node.

    plan: dict(paths of all rounds, makespan, network: a Network's fields). None where all paths must be
    planned anew: if `mend` finds no region, or no plan that is valid and at most 5% longer.
    """
    paths, work = [*map(tuple, plan["paths"][:len(plan["paths"]) // rounds])], (kept, each, rounds, 2)
    changed = [r for r, w in enumerate(plan["network"]["compute"]) if r in dead or w != network.compute[r]]
    try:
        for i, node in enumerate(changed, 1):
            if any(node in path for path in paths):
                paths = mend(node, paths, Regions(network, *work, set(dead).intersection(changed[:i]), seed))
    except ValueError:          # Infeasible, or no path stays
        return None
    result = Search(network, *work, dead).dispatch(paths)
    good = result.makespan <= 1.05 * plan["makespan"] and not check(network, paths, kept, dead=dead)
    return (paths, result.order) if good else None


def mend(node, paths, whole, most=1500):
    """The paths, but those of the region around this node are planned anew: the search `whole` has its state.

    Nodes on one path are a group, and so are groups that share a node. The region is the idle nodes and the
    groups nearest to the node, as few as have room for the visits that CC3 leaves to them. It is searched
    until it is no slower than the other paths, or has tried `most` plans. Raises ValueError if no path stays.
    """
    network, groups = whole.network, {}
    for path in paths:
        nodes = set(path).union(*(groups.get(r, ()) for r in path))
        groups.update(dict.fromkeys(nodes, nodes))
    region = set(range(len(whole.caps))) - set(groups)
    for near in sorted(groups, key=lambda r: (r != node, network.delay[r][node] + network.delay[node][r], r)):
        region |= groups[near]
        stay = [path for path in paths if region.isdisjoint(path)]
        due = Counter(whole.visits)
        due.subtract(network.stage_of[r] for path in stay for r in path[1:])
        room = whole.most_visits(region)
        if all(0 <= visits <= room[s] for s, visits in due.items()):
            break
    part = Region(whole, region, due)
    part.bound, part.iterations = whole.dispatch(stay).makespan, most
    if part.origins:
        part.find()
        stay += part.paths
    return in_turn(stay, whole.stages[0])


def in_turn(paths, origins):
    """The paths in the order in which a plan lists them: first one of each origin, then the next one."""
    own = ([path for path in paths if path[0] == o] for o in origins)
    return [path for turn in zip(*own) for path in turn]
