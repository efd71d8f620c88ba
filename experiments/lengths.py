"""Losses after any number of steps, from those of a few lengths: what the map of
experiments/regions.py draws on.

Between measured lengths a straight line over 1 / sqrt(steps), beyond them the nearest one's loss.
"""
import itertools
import math
import statistics
from dataclasses import replace

from experiments import fragments
from experiments.comparing import Comparison, Table
from experiments.fleet import Trial
from experiments.results import ROOT, kept_result
from plumbing.drawing import NAMES
from plumbing.processes import BadInput

MAPPED = 1200               # steps: the map's time, where it is measured with several seeds
COMPARED = 600              # steps, also in fp32


def best_rates():
    """As results/headline_fragments.json has them: after 600 steps, on seed 0."""
    return kept_result(ROOT, "headline_fragments")["best"]


class Losses:
    """Merged held-out losses of settings after any number of steps.

    measured: {trial: {seed: {steps: nats per byte}}}; lengths: all steps that are there.
    """

    def __init__(self, measured):
        self.measured = measured
        self.lengths = set()
        for by_seed in measured.values():
            for by_steps in by_seed.values():
                self.lengths |= set(by_steps)

    def seeds(self, longest):
        """The seeds with which every setting was trained for all lengths up to the first that is at
        least `longest` steps."""
        shorter = [length for length in self.lengths if length < longest]
        others = self.lengths - set(shorter)
        wanted = {*shorter, min(others)} if others else set(shorter)
        found = []
        for by_seed in self.measured.values():
            found.append({seed for seed, losses in by_seed.items() if wanted <= set(losses)})
        return sorted(set.intersection(*found))

    def budgets(self):
        """{steps: seeds}: the lengths, shortest first, and with which seeds every setting was
        trained for all lengths up to this one. Raises BadInput where there is none."""
        found = {}
        for length in sorted(self.lengths):
            seeds = self.seeds(length)
            if seeds:
                found[length] = seeds
        if not found:
            raise BadInput("no length has every setting with one seed: run the command on, "
                           "without --plot")
        return found

    def budget(self):
        """T of the map: MAPPED, else the longest of `budgets`."""
        found = self.budgets()
        return MAPPED if MAPPED in found else max(found)

    def of(self, trial, seed, steps):
        """Nats per byte: a straight line over 1 / sqrt(steps) between measured lengths, beyond
        them the nearest one's."""
        return interpolated(self.measured[trial][seed], steps, by_root)


def losses_of(found, wire):
    """The Losses of the rows with this wire that have their trial's rate."""
    best = best_rates()
    measured = {}
    for row in found["rows"].values():
        trial = Trial(**row["trial"])
        if trial.wire == wire and row["lr"] == fragments.rate_of(trial, best):
            by_seed = measured.setdefault(trial, {})
            by_seed.setdefault(row["seed"], {})[row["steps"]] = row["merged"]
    return Losses(measured)


def interpolated(values, at, scale):
    """On straight lines over scale(x) between neighbours; beyond them the nearest one's.

    values: {x: value}; at: an x."""
    places = sorted(values)
    if at <= places[0]:
        return values[places[0]]
    for below, above in itertools.pairwise(places):
        if at <= above:
            share = (scale(at) - scale(below)) / (scale(above) - scale(below))
            return (1 - share) * values[below] + share * values[above]
    return values[places[-1]]


def by_root(steps):
    return 1 / math.sqrt(steps)


def errors_of_lines(losses, scale):
    """How far the line between its neighbours is from each inner length's loss: {(steps, method):
    [nats]} over all trials and seeds, the line's less the measured. scale: of `interpolated`."""
    found = {}
    for trial, by_seed in losses.measured.items():
        for by_steps in by_seed.values():
            for left_out in sorted(by_steps)[1:-1]:
                others = {steps: loss for steps, loss in by_steps.items() if steps != left_out}
                error = interpolated(others, left_out, scale) - by_steps[left_out]
                found.setdefault((left_out, trial.method), []).append(error)
    return found


def show_errors(losses):
    """Of lines over 1 / sqrt(steps), which the map takes, and over log steps."""
    roots = errors_of_lines(losses, by_root)
    logs = errors_of_lines(losses, math.log)
    table = Table("a left-out length: the line less the measured, mean nats",
                  "over 1 / sqrt(steps)", "over log steps")
    for length, method in sorted(roots):
        cells = [statistics.mean(errors[length, method]) for errors in (roots, logs)]
        table.add(f"{length} steps, {NAMES[method]}", *(f"{cell:+.3f}" for cell in cells))
    table.end()


def in_fp32(trial):
    return replace(trial, wire="fp32")


def show_wire(losses, exact):
    """What one byte costs each method: the mean over its settings, and the two at the ends."""
    table = Table(f"one byte over fp32, {COMPARED} steps, merged", "settings", "nats, their mean",
                  "least", "most")
    for method in NAMES:
        costs = wire_costs(losses, exact, method)
        if not costs:
            continue
        means = [statistics.mean(by_seed.values()) for by_seed in costs.values()]
        table.add(NAMES[method], len(costs), mean_cost(costs), f"{min(means):+.3f}",
                  f"{max(means):+.3f}")
    table.end()


def mean_cost(costs):
    """The Comparison of the settings' mean with each seed that all have; None without any. costs:
    of `wire_costs`."""
    means = []
    for seed in sorted(set.intersection(*map(set, costs.values()))):
        means.append(statistics.mean(cost[seed] for cost in costs.values()))
    return Comparison(means) if means else None


def wire_costs(losses, exact, method):
    """{trial of the method: {seed: nats in one byte less those in fp32}}, where both are there.
    losses and exact: Losses."""
    found = {}
    for trial, by_seed in losses.measured.items():
        if trial.method != method:
            continue
        others = exact.measured.get(in_fp32(trial), {})
        costs = {}
        for seed in set(by_seed) & set(others):
            if COMPARED in by_seed[seed] and COMPARED in others[seed]:
                costs[seed] = by_seed[seed][COMPARED] - others[seed][COMPARED]
        if costs:
            found[trial] = costs
    return found
