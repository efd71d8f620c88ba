"""Hundreds of nodes: near nodes form regions, and every region is planned by itself.

A region is some origins and their share of the nodes of every other stage. Its paths stay in it, so
regions run side by side, and an iteration takes as long as the slowest region's. The search works
on that one. After a death only the region around the dead node is planned anew (`around`).
"""
import math
import random
from collections import Counter
from dataclasses import replace

from planning.instance import network_without
from planning.neighbourhood import NeighbourhoodSearch, turns_of
from planning.progress import Progress
from skippipe import check, dispatch, hop_costs, skip_schedule

WHOLE = 48      # a network of so many nodes is one region


def evenly_mixed(counts):
    """The keys of {key: count}, each as often as it counts, evenly mixed."""
    placed = []
    for key, count in counts.items():
        placed += [((k + 0.5) / count, key) for k in range(count)]
    return [key for _, key in sorted(placed)]


def cut(delay, sizes, stage_of=None):
    """Cut the nodes into regions, each a dict {node: stage}.

    The first region begins with the most remote node, each later one with the node nearest to the
    region before. It takes the nodes nearest to that one: as few as hold every stage, or a few more
    where they would strand some nodes nearby. sizes: nodes in each stage. stage_of: {node: stage}
    as it is to be; None: a region's nodes take stages in turn."""
    def apart(i, j):
        return delay[i][j] + delay[j][i]

    rest = set(range(sum(sizes)) if stage_of is None else stage_of)
    origins = sizes[0]                                              # that are left
    others = evenly_mixed(dict(enumerate(sizes[1:], 1)))            # stages of the others left
    least = origins                                                 # origins of a region
    if len(rest) > WHOLE:
        least = math.ceil(origins / min(filter(None, sizes)))
    region = [max(sorted(rest), key=lambda i: sum(delay[i]))]
    regions = []
    while rest:
        first = min(sorted(rest), key=lambda j: min(apart(i, j) for i in region))
        nearest = sorted(rest, key=lambda j: (apart(first, j), j))
        each = len(rest) / origins      # nodes for each origin
        distances = [apart(first, j) for j in nearest]
        here = origins_here(distances, origins, each, least)
        more = round(here * each) - here            # nodes of the other stages
        due = Counter({0: here}) + Counter(others[:more])
        region = take_nodes(nearest, due, stage_of)
        rest -= set(region)
        origins -= here
        others = others[more:]
        regions.append(region)
    return regions


def origins_here(distances, origins, each, least):
    """How many of the origins that are left the next region has, at least `least`.

    distances: of the nodes that are left from the region's first, ascending. each: nodes for each
    origin."""
    reach = 1.1 * distances[round(least * each) - 1]
    nearby = sum(distance <= reach for distance in distances)
    here = math.ceil(nearby / each - 1e-9)
    here = math.ceil(here / max(1, here // least))      # several regions share what is nearby
    if origins - here < least:
        return origins          # too few would be left for a region of their own
    return here


def take_nodes(nearest, due, stage_of):
    """{node: stage} of the first nodes that fill {stage: nodes due}. stage_of None: the first nodes
    take these stages in turn."""
    if stage_of is None:
        return dict(zip(nearest, evenly_mixed(due)))
    left, region = Counter(due), {}
    for node in nearest:
        stage = stage_of[node]
        if left[stage]:
            region[node] = stage
            left[stage] -= 1
    return region


def schedule_within(schedule, nodes, visits):
    """The schedule for the origins among these nodes: all other nodes are idle. visits: what the
    whole leaves to it of each stage."""
    network = network_without(schedule.network, set(range(len(schedule.caps))) - nodes)
    origins = network.stages[0] * paths_each(schedule)
    return replace(schedule, network=network, origins=origins, visits=visits, spare=[])


def paths_each(schedule):
    """How many paths each origin has."""
    return len(schedule.origins) // len(schedule.network.stages[0])


class Region:
    """The large neighbourhood search among some nodes of the network of `whole`, a RegionSearch.

    First come, first served, since an order of the whole would take a simulation of the whole. It
    has no conflict-based search, since CC3 holds for the whole and not in a region."""

    def __init__(self, whole, nodes, visits):
        schedule, of_whole = schedule_within(whole.schedule, nodes, visits), whole.progress
        self.progress = Progress(schedule.network, of_whole.rounds, of_whole.seconds,
                                 of_whole.iterations)
        self.progress.start = of_whole.start
        self.search = NeighbourhoodSearch(schedule, whole.swaps, self.progress, whole.cost,
                                          whole.random.random())
        self.walk = None        # the paths that the next turn goes on from

    def plan_first(self):
        self.walk = self.search.plan_first()

    def take_turn(self):
        self.walk = self.search.large_neighbourhood_search(self.walk, steps=200)

    @property
    def seconds(self):
        """Of the iteration of its best plan."""
        return self.progress.best.makespan


class RegionSearch:
    """The search of a network, region by region, always in the slowest. Its parts are those of a
    NeighbourhoodSearch."""

    def __init__(self, schedule, swaps, progress, cost, seed=0):
        self.schedule, self.swaps = schedule, swaps
        self.progress, self.cost = progress, cost
        self.random = random.Random(f"plan {seed}")

    def run(self):
        regions = self.plan_regions()
        self.join(regions)
        for _ in turns_of(self.progress):
            slowest = max(regions, key=lambda region: region.seconds)
            slowest.take_turn()
            self.progress.work = sum(region.progress.work for region in regions)
        self.join(regions)

    def plan_regions(self):
        """The regions, each with its first plan."""
        network = self.schedule.network
        sizes = [len(stage) for stage in network.stages]
        parts = [set(part) for part in cut(network.delay, sizes, network.stage_of)]
        visits = self.share_out(parts)
        while visits is None:           # two and two regions become one
            parts = [set().union(*parts[i:i + 2]) for i in range(0, len(parts), 2)]
            visits = self.share_out(parts)
        regions = [Region(self, nodes, due) for nodes, due in zip(parts, visits)]
        for region in regions:
            region.plan_first()
        return regions

    def share_out(self, parts):
        """The visits that each region's paths make to each stage, which are `schedule.visits`
        together. None where a region has no origin, or no room was found for a visit."""
        rooms = [self.most_visits(nodes) for nodes in parts]
        left = dict(self.schedule.visits)
        found = []
        for i, nodes in enumerate(parts):
            count = self.paths_of(nodes)
            if not count:
                return None
            later = Counter()           # the room of the regions after this one
            for room in rooms[i + 1:]:
                later.update(room)
            spare = {s: later[s] - due for s, due in left.items()}
            visits = Counter()
            for _ in range(count * (self.schedule.kept - 1)):
                open_stages = [s for s in left if left[s] and visits[s] < rooms[i][s]]
                if not open_stages:
                    return None
                # The regions after this one have least to spare of this stage.
                s = min(open_stages, key=lambda s: spare[s] + visits[s])
                left[s] -= 1
                visits[s] += 1
            found.append(visits)
        return found

    def paths_of(self, nodes):
        """How many paths the origins among these nodes have."""
        return paths_each(self.schedule) * len(nodes.intersection(self.schedule.network.stages[0]))

    def most_visits(self, nodes):
        """How many visits to each stage the paths of these nodes' origins can make there."""
        most, room = self.paths_of(nodes), {}
        for s in self.schedule.visits:
            there = nodes.intersection(self.schedule.network.stages[s])
            room[s] = min(most, sum(self.schedule.caps[r] for r in there))
        return room

    def join(self, regions):
        """Simulate the regions' paths together."""
        paths = []
        for region in regions:
            paths += region.progress.best.paths
        self.progress.dispatch(in_turn(paths, self.schedule.network.stages[0]))


def around(plan, network, kept, each, rounds, seed, dead):
    """The Result of the plan now that nodes are dead, mended node by node.

    plan: dict(paths of all rounds, makespan). None if all paths must be planned anew: `mend`
    finds no region, or no plan that is valid and at most 5% longer."""
    paths = [tuple(path) for path in plan["paths"][:len(plan["paths"]) // rounds]]
    gone = set()
    cost = hop_costs(network)
    try:
        for node in sorted(dead):
            gone.add(node)
            if any(node in path for path in paths):
                alive = network_without(network, gone)
                schedule = skip_schedule(alive, kept, each)
                whole = RegionSearch(schedule, 2, Progress(alive, rounds), cost, seed)
                paths = mend(node, paths, whole)
    except ValueError:          # Infeasible, or no path stays
        return None
    result = dispatch(network, paths, rounds)
    alive = network_without(network, dead)
    if result.makespan > 1.05 * plan["makespan"] or check(alive, paths, kept):
        return None
    return result


def mend(node, paths, whole, most=1500):
    """The paths, but those of the region around this node are planned anew: the search `whole` has
    its state.

    The region is the idle nodes and the groups (`groups_of`) nearest to the node, as few as have
    room for the visits that CC3 leaves to them. It is searched until it is no slower than the other
    paths, or has tried `most` plans. Raises ValueError if no path stays."""
    network, groups = whole.schedule.network, groups_of(paths)
    region = set(range(len(network.compute))) - set(groups)

    def nearness(r):
        return r != node, network.delay[r][node] + network.delay[node][r], r

    for near in sorted(groups, key=nearness):
        region |= groups[near]
        stay = [path for path in paths if region.isdisjoint(path)]
        due = Counter(whole.schedule.visits)
        for path in stay:
            due.subtract([network.stage_of[r] for r in path[1:]])
        room = whole.most_visits(region)
        if all(0 <= visits <= room[s] for s, visits in due.items()):
            break
    part = Region(whole, region, due)
    part.progress.bound = whole.progress.dispatch(stay).makespan
    part.progress.iterations = most
    if part.search.schedule.origins:
        part.plan_first()
        while not part.progress.over():
            part.take_turn()
        stay += part.progress.best.paths
    return in_turn(stay, network.stages[0])


def groups_of(paths):
    """{node: the nodes of its group}: nodes on one path are a group, and so are groups that share a
    node."""
    groups = {}
    for path in paths:
        nodes = set(path)
        for r in path:
            nodes |= groups.get(r, set())
        groups.update(dict.fromkeys(nodes, nodes))
    return groups


def in_turn(paths, origins):
    """The paths in the order in which a plan lists them: first one of each origin, then the next
    one."""
    columns = []
    for origin in origins:
        columns.append([path for path in paths if path[0] == origin])
    found = []
    for turn in zip(*columns):
        found += turn
    return found
