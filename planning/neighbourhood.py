"""The search of up to `regions.WHOLE` nodes: paths planned anew a few at a time, and an order of
dispatch that lets a node wait for what is about to arrive."""
import random
from collections import Counter
from dataclasses import replace

from tqdm import tqdm

from skippipe import one_sweep, path_finder


def turns_of(progress):
    """An item for each turn of a search, until it is over. On a terminal tqdm counts them after 3
    s."""
    return tqdm(iter(progress.over, True), "planning", delay=3, disable=None, unit="turn")


class NeighbourhoodSearch:
    """The paper's search, then two of ours in turns until the time is up or the bound is
    reached. progress: a Progress, which knows the best plan. cost: `hop_costs`."""

    def __init__(self, schedule, swaps, progress, cost, seed=0):
        self.schedule, self.swaps = schedule, swaps
        self.progress, self.cost = progress, cost
        self.random = random.Random(f"plan {seed}")
        self.shortest = path_finder(schedule, cost, swaps)
        self.trip = {}          # {origin: seconds of its shortest path}
        for origin in schedule.network.stages[0]:
            self.trip[origin], _ = self.shortest(origin)

    def run(self):
        walk = self.plan_first()        # where the large neighbourhood search goes on from
        self.progress.follow_paper(self.schedule, self.shortest, limit=500)
        for _ in turns_of(self.progress):
            for paths in (self.progress.best.paths, walk):
                self.reorder(paths, steps=50)
            walk = self.large_neighbourhood_search(walk, steps=200)

    def plan_first(self):
        """All paths in one sweep, which is tried and returned."""
        paths = self.fill([None] * len(self.schedule.origins), self.schedule.visits, self.shortest)
        self.progress.dispatch(paths)
        return paths

    def fill(self, paths, visits, shortest, noise=0.0):
        """Plan the missing paths (None), so that each stage gets `visits` more: the origin with the
        longest trip first, as in `skippipe.farthest_first`. shortest: what finds a path. noise: how
        far the order of planning is shuffled."""
        order = shuffled(self.schedule.origins, paths, self.trip, noise, self.random)
        self.progress.work += len(order)
        return fill(self.schedule, paths, visits, order, shortest)

    def reorder(self, paths, steps):
        """Ordered dispatch: swap two neighbours in a node's order. Only swaps on the critical path
        can shorten the iteration, for whatever keeps to that chain of tasks, each starting when the
        one before lets it, is as long. First-come-first-served cannot let a node wait for a task
        that is about to arrive; this can."""
        progress = self.progress
        result = progress.best
        if paths != result.paths:
            result = progress.dispatch(paths)
        for _ in range(steps):
            swaps = critical_swaps(paths, result)
            if progress.over() or not swaps:
                break
            rank, i = self.random.choice(swaps)
            order = [list(tasks) for tasks in result.order]
            order[rank][i:i + 2] = reversed(order[rank][i:i + 2])
            new = progress.simulate(paths, order)
            if new and new.makespan <= result.makespan + self.leeway(2):
                result = new

    def large_neighbourhood_search(self, paths, steps):
        """Take a few paths out, often the last to come home among them, and plan them anew on
        somewhat random costs; go on from there unless the iteration gets clearly longer. One step
        untangles what conflict-based search, one ban at a time, must branch over again and again.
        Returns the paths it ended on."""
        result = self.progress.dispatch(paths)
        for _ in range(steps):
            if self.progress.over():
                break
            out = self.some_paths(result, len(paths))
            visits = self.visits_of(paths, out)
            shortest = path_finder(self.schedule, self.noisy_cost(), self.swaps)
            rest = [None if u in out else path for u, path in enumerate(paths)]
            candidate = self.fill(rest, visits, shortest, noise=0.5)
            new = self.progress.dispatch(candidate)
            if new.makespan <= result.makespan + self.leeway(4):
                paths, result = candidate, new
        return paths

    def some_paths(self, result, count):
        """The indices of a few of the `count` paths, often with the last to come home."""
        out = set(self.random.sample(range(count), min(count, self.random.choice((1, 2, 2, 3, 4)))))
        if self.random.random() < 0.5:
            out.add(last_home(result) % count)
        return out

    def noisy_cost(self):
        """The costs of the hops between the living nodes, each with as much noise as is drawn
        now."""
        draw = self.random.random
        scale = 0.3 * draw() ** 4 * max(self.trip.values())
        nodes = [r for stage in self.schedule.network.stages for r in stage]
        cost = {}
        for i in nodes:
            exact = self.cost[i]
            cost[i] = {j: exact[j] + scale * draw() for j in nodes}
        return cost

    def visits_of(self, paths, out):
        """{stage: visits} that the paths in `out` are to make: those that they made. CC3 leaves
        open which stages get one visit more, so now and then that changes."""
        seen, gone = Counter(), Counter()
        for u, path in enumerate(paths):
            stages = [self.schedule.network.stage_of[r] for r in path]
            seen.update(stages)
            if u in out:
                gone.update(stages)
        due = self.schedule.visits
        visits = {s: gone[s] for s in due}
        low = min(due.values(), default=0)
        give = [s for s in visits if visits[s] and seen[s] > low]
        take = [s for s in self.schedule.spare if visits[s] < len(out) and seen[s] == low]
        if give and take and self.random.random() < 0.5:
            visits[self.random.choice(give)] -= 1
            visits[self.random.choice(take)] += 1
        return visits

    def leeway(self, power):
        """By how many seconds a step may be worse: up to a tenth of the iteration, mostly far
        less."""
        return 0.1 * self.random.random() ** power * self.progress.best.makespan


def shuffled(origins, paths, trip, noise, draw):
    """The indices of the missing paths, the origin with the longest trip first, as far as `noise`
    lets it be."""
    keys = []
    for u, path in enumerate(paths):
        if path is None:
            keys.append((-trip[origins[u]] * (1 + noise * draw.random()), u))
    return [u for _, u in sorted(keys)]


def fill(schedule, paths, visits, order, shortest):
    """The paths with the missing ones, which are planned in this order (`one_sweep`) on what room
    the others leave."""
    room = list(schedule.caps)
    for path in filter(None, paths):
        for r in path[1:]:
            room[r] -= 1
    origins = [schedule.origins[u] for u in order]
    rest = replace(schedule, origins=origins, visits=visits, caps=room)
    paths = list(paths)
    for u, path in zip(order, one_sweep(rest, shortest, range(len(order)))):
        paths[u] = path
    return paths


def last_home(result):
    """The microbatch that comes home last."""
    return max(result.timeline, key=lambda task: task.end).microbatch


def critical_swaps(paths, result):
    """(rank, i): the tasks i and i + 1 of a rank's order that follow each other without a pause on
    the critical path, which is walked back from the last task: to the task that the node ran before
    if that kept it waiting, else to the hop before."""
    place = {}          # {(microbatch, hop): (rank, its place in the rank's order)}
    for rank, tasks in enumerate(result.order):
        for i, task in enumerate(tasks):
            place[task] = rank, i
    waited = {(task.microbatch, task.hop): task.start > task.arrived for task in result.timeline}
    found = []
    u = last_home(result)
    hop = 2 * len(paths[u % len(paths)])
    while u >= 0:
        rank, i = place[u, hop]
        if waited[u, hop] and i:
            before, its_hop = result.order[rank][i - 1]
            if before != u:
                found.append((rank, i - 1))
            u, hop = before, its_hop
        elif hop:
            hop -= 1
        else:       # an injection waited for the end of its path's round before, or is the start
            hop = 2 * len(paths[u % len(paths)])
            u -= len(paths)
    return found
