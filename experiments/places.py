"""Who leads on a network, and with which setting: a point of the map of experiments/regions.py.

Losses are those of experiments/lengths.py, seconds those of gossip/pace.py, over Gloo. message and
latency are in steps: a message of one byte a weight takes `message` times as long as a step.
"""
import math
import statistics
from dataclasses import dataclass, replace
from functools import cached_property

from experiments.comparing import Comparison
from experiments.lengths import interpolated
from experiments.replicas import DDP, by_trial, merged_loss
from gossip.advice import BACKWARD, HELD, plainness
from gossip.pace import GLOO, Meetings, Situation, seconds_a_step


# ---------------------------------------------------------------- the seconds


def meetings_of(trial, overlap=BACKWARD):
    """How a setting's replicas meet. overlap: of DDP, the share of a step in which its average
    travels already."""
    if trial.method != "ddp":
        overlap = 0
    return Meetings(trial.method, trial.wire, trial.every, trial.fragments, trial.delay,
                    overlap=overlap)


def steps_in(budget, meetings, message, latency, replicas=8):
    """Steps in the time of `budget` steps without messages."""
    situation = Situation(params=1, replicas=replicas, step=1, rate=1 / message, latency=latency,
                          trips=GLOO)
    return budget / seconds_a_step(situation, meetings)


# ---------------------------------------------------------------- more replicas


@dataclass(frozen=True)
class Growth:
    """How gaps to DDP grow from 8 replicas on. nats: {method: {m: with each doubling}}."""
    replicas: int
    nats: dict

    def of(self, trial):
        """What the trial's gap gains, in nats per byte."""
        if trial.method == "ddp":
            return 0
        doublings = math.log2(self.replicas / 8)
        return interpolated(self.nats[trial.method], trial.every, math.log) * doublings


def growth_of(found, replicas):
    """The Growth that results/headline_many.json shows with Adam and pairs: for each setting least
    squares over 16 to 64 replicas of its gap less that with 8 replicas and the same seed."""
    runs = by_trial(found)
    nats = {}
    for trial in runs["adam", 8]:
        if trial.method == "ddp" or trial.group > 2:
            continue
        products = squares = 0
        for (optimizer, count), by_seed in runs.items():
            if optimizer == "adam" and count > 8:
                doublings = math.log2(count / 8)
                for seed in by_seed.get(trial, {}):
                    more = gap(runs, count, trial, seed) - gap(runs, 8, trial, seed)
                    products += doublings * more
                    squares += doublings**2
        nats.setdefault(trial.method, {})[trial.every] = products / squares
    return Growth(replicas, nats)


def gap(runs, replicas, trial, seed):
    """Nats over DDP's, merged."""
    rows = runs["adam", replicas]
    return merged_loss(rows[trial][seed]) - merged_loss(rows[DDP][seed])


# ---------------------------------------------------------------- the map


@dataclass(frozen=True)
class Place:
    """A point of the map. settings: {method: its best one by all seeds}; losses: {method: [with
    each seed, of the setting that is best by the others]}; is_known: whether the first setting made
    as many steps as the shortest length."""
    settings: dict
    losses: dict
    is_known: bool = True

    @cached_property
    def order(self):
        """The methods, the one with the lowest mean first."""
        return sorted(self.losses, key=lambda method: statistics.fmean(self.losses[method]))

    @cached_property
    def lead(self):
        """The first method's losses less the second's, seed by seed."""
        first, second = self.order[:2]
        pairs = zip(self.losses[first], self.losses[second])
        return Comparison([a - b for a, b in pairs])

    @property
    def leads_clearly(self):
        return self.is_known and self.lead.verdict == "better"

    @property
    def is_unclear(self):
        return self.is_known and self.lead.verdict != "better"


def place_at(losses, budget, message, latency, growth=None, overlap=BACKWARD):
    """The Place of a network. growth: a Growth, with more replicas than 8. overlap: of DDP."""
    replicas = growth.replicas if growth else 8
    seeds = losses.seeds(budget)
    made = {}                       # {trial: its steps}
    by_method = {}                  # {method: {trial: [its loss with each seed]}}
    for trial in losses.measured:
        meetings = meetings_of(trial, overlap)
        made[trial] = steps_in(budget, meetings, message, latency, replicas)
        more = growth.of(trial) if growth else 0
        found = [losses.of(trial, seed, made[trial]) + more for seed in seeds]
        by_method.setdefault(trial.method, {})[trial] = found
    settings = {}
    chosen = {}
    for method, losses_by_trial in by_method.items():
        settings[method] = min(losses_by_trial, key=lambda t: sum(losses_by_trial[t]))
        chosen[method] = [loss_by_others(losses_by_trial, i) for i in range(len(seeds))]
    place = Place(settings, chosen)
    first = settings[place.order[0]]
    return replace(place, is_known=made[first] >= min(losses.lengths))


def loss_by_others(losses_by_trial, i):
    """The i-th seed's loss of the setting that is best by the other seeds; with one seed by
    itself."""

    def total(trial):
        losses = losses_by_trial[trial]
        return sum(losses) - losses[i] if len(losses) > 1 else losses[i]

    return losses_by_trial[min(losses_by_trial, key=total)][i]


# ---------------------------------------------------------------- what --advise would take


def advice_costs(losses, method, budget, points):
    """(nats that a method loses at each point with the setting that --advise's rule takes, over its
    best one; at how many points it takes none). points: [(message, latency)]."""
    costs = []
    missing = 0
    for message, latency in points:
        means = means_at(losses, method, budget, message, latency)
        picked = advised(means, message, latency)
        if picked:
            costs.append(means[picked] - min(means.values()))
        else:
            missing += 1
    return costs, missing


def means_at(losses, method, budget, message, latency):
    """{trial of the method: its mean loss over the seeds}"""
    seeds = losses.seeds(budget)
    found = {}
    for trial in losses.measured:
        if trial.method == method:
            steps = steps_in(budget, meetings_of(trial), message, latency)
            found[trial] = statistics.fmean(losses.of(trial, seed, steps) for seed in seeds)
    return found


def advised(trials, message, latency):
    """Of the trials the one that gossip/advice.py would take; None where all are held too long."""
    enough = []
    for trial in trials:
        if 1 - steps_in(1, meetings_of(trial), message, latency) < HELD:
            enough.append(trial)
    return min(enough, key=lambda t: (t.every, plainness(meetings_of(t))), default=None)
