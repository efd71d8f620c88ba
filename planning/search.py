"""Shorter iterations than the paper's search finds: paths planned anew a few at a time, and an
order of dispatch that lets a node wait for what is about to arrive.

On the published instance the paper's search ends at 33.31 s, as published; this one at 33.05 s,
which `bound.tighter_bound` proves to be the optimum.
"""
from collections import Counter
from functools import cached_property

from tqdm import tqdm

from planning.bound import tighter_bound
from skippipe import Problem, Search


def shorter_plan(network, stages_kept, microbatches_per_origin=3, rounds=1, swaps=2, seconds=10.0,
                 seed=0, *, iterations=None, dead=(), collisions=True):
    """As `skippipe.plan`, with this room's search and bound; it ends when the bound is reached.
    More than `regions.WHOLE` nodes are planned in regions. On a terminal tqdm counts the turns
    after 3 s. collisions=False: the paper's search without TC2, in regions their first plans."""
    # That file builds on this one.
    from planning.regions import WHOLE, FirstPlansOfRegions, RegionSearch
    asked = (network, stages_kept, microbatches_per_origin, rounds, swaps, dead)
    if len(network.delay) <= WHOLE:
        kind = NeighbourhoodSearch if collisions else SearchWithoutTC2
    else:
        kind = RegionSearch if collisions else FirstPlansOfRegions
    return kind(Problem(*asked), seed, seconds, iterations).plan(tighter_bound(*asked))


class SearchWithoutTC2(Search):
    """The paper's search, which is over at the first valid paths."""
    ends = True

    def find(self):
        self.conflict_based_search(limit=5000)
        if not self.best:
            self.farthest_first()

    def over(self):
        return self.best is not None or super().over()


def turns_of(search):
    """An item for each turn of the search, until it is over. On a terminal tqdm counts them after 3
    s."""
    return tqdm(iter(search.over, True), "planning", delay=3, disable=None, unit="turn")


class NeighbourhoodSearch(Search):
    """The paper's search, then two of ours in turns until the time is up or the bound is
    reached."""

    @cached_property
    def trip(self):
        """{origin: seconds of its shortest path}"""
        return {o: self.best_trip(o)[0] for o in self.problem.stages[0]}

    def find(self):
        walk = self.farthest_first()        # where the large neighbourhood search goes on from
        self.conflict_based_search(limit=500)
        for _ in turns_of(self):
            for paths in (self.paths, walk):
                self.reorder(paths, steps=50)
            walk = self.large_neighbourhood_search(walk, steps=200)

    def reorder(self, paths, steps):
        """Ordered dispatch: swap two neighbours in a node's order. Only swaps on the critical path
        can shorten the iteration, for whatever keeps to that chain of tasks, each starting when the
        one before lets it, is as long. First-come-first-served cannot let a node wait for a task
        that is about to arrive; this can."""
        result = self.best if paths == self.paths else self.dispatch(paths)
        for _ in range(steps):
            swaps = critical_swaps(paths, result)
            if self.over() or not swaps:
                break
            rank, i = self.random.choice(swaps)
            order = [list(tasks) for tasks in result.order]
            order[rank][i:i + 2] = reversed(order[rank][i:i + 2])
            new = self.simulate(paths, order)
            if new and new.makespan <= result.makespan + self.leeway(2):
                result = new

    def large_neighbourhood_search(self, paths, steps):
        """Take a few paths out, often the last to come home among them, and plan them anew on
        somewhat random costs; go on from there unless the iteration gets clearly longer. One step
        untangles what conflict-based search, one ban at a time, must branch over again and again.
        Returns the paths it ended on."""
        result = self.dispatch(paths)
        for _ in range(steps):
            if self.over():
                break
            out = self.some_paths(result, len(paths))
            visits = self.visits_of(paths, out)
            cost = self.noisy_cost()
            rest = [None if u in out else path for u, path in enumerate(paths)]
            candidate = self.fill(rest, visits, self.trip, lambda: cost, 0.5)
            new = self.dispatch(candidate)
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
        nodes = [r for stage in self.problem.stages for r in stage]
        cost = {}
        for i in nodes:
            exact = self.problem.cost[i]
            cost[i] = {j: exact[j] + scale * draw() for j in nodes}
        return cost

    def visits_of(self, paths, out):
        """{stage: visits} that the paths in `out` are to make: those that they made. CC3 leaves
        open which stages get one visit more, so now and then that changes."""
        seen, gone = Counter(), Counter()
        for u, path in enumerate(paths):
            stages = [self.problem.network.stage_of[r] for r in path]
            seen.update(stages)
            if u in out:
                gone.update(stages)
        due = self.problem.visits
        visits = {s: gone[s] for s in due}
        low = min(due.values(), default=0)
        give = [s for s in visits if visits[s] and seen[s] > low]
        take = [s for s in self.problem.spare if visits[s] < len(out) and seen[s] == low]
        if give and take and self.random.random() < 0.5:
            visits[self.random.choice(give)] -= 1
            visits[self.random.choice(take)] += 1
        return visits

    def leeway(self, power):
        """By how many seconds a step may be worse: up to a tenth of the iteration, mostly far
        less."""
        return 0.1 * self.random.random() ** power * self.best.makespan


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
