"""What the searches of this room share: their limits, and the best plan so far."""
import math
import time
from dataclasses import dataclass

from skippipe import Deadlock, Result, conflict_based_search, dispatch, simulate


@dataclass
class Plan(Result):
    """A Result with more. bound: seconds below which no plan comes. seconds, work: what the search
    took."""
    bound: float = 0.0
    seconds: float = 0.0
    work: int = 0


class Progress:
    """How far a search has come: its limits, the work done (paths planned and simulations run), and
    the best simulated iteration. bound: seconds of an iteration that will do."""

    def __init__(self, network, rounds=1, seconds=None, iterations=None):
        self.network, self.rounds = network, rounds
        self.bound = 0.0
        self.seconds = math.inf if seconds is None else seconds
        self.iterations = math.inf if iterations is None else iterations
        self.start, self.work = time.perf_counter(), 0
        self.best = None

    def late(self):
        return time.perf_counter() - self.start > self.seconds

    def over(self):
        optimal = self.best is not None and self.best.makespan <= self.bound + 1e-6
        return optimal or self.work >= self.iterations or self.late()

    def keep(self, result):
        """Remember the Result if it is the best one."""
        if self.best is None or result.makespan < self.best.makespan - 1e-9:
            self.best = result

    def simulate(self, paths, order):
        """The simulated iteration; None if it deadlocks."""
        self.work += 1
        try:
            result = simulate(self.network, paths, self.rounds, order)
        except Deadlock:
            return None
        self.keep(result)
        return result

    def dispatch(self, paths):
        """The simulated iteration, by `skippipe.dispatch`."""
        result = dispatch(self.network, paths, self.rounds)
        self.work += result.tries
        self.keep(result)
        return result

    def follow_paper(self, schedule, shortest, limit=math.inf):
        """Run `conflict_based_search` for `limit` units of work, or until the search is over."""
        limit += self.work
        deadline = self.start + self.seconds
        for work, found in conflict_based_search(schedule, shortest, self.rounds, deadline):
            self.work += work
            for result in found:
                self.keep(result)
            if self.work >= limit or self.over():
                break

    def plan(self):
        spent = time.perf_counter() - self.start
        return Plan(**vars(self.best), bound=self.bound, seconds=spent, work=self.work)
