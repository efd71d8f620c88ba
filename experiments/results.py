"""What runs found: OUT/results/NAME.json, read as curves, last losses and their differences."""
import json
import math
import statistics
from pathlib import Path

import numpy as np

from experiments.comparing import Comparison
from train import BadInput

ROOT = Path(__file__).parent.parent


def save_result(out, name, found):
    """Write OUT/results/NAME.json."""
    path = Path(out, "results", f"{name}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found) + "\n")
    print(path)


def kept_result(out, name):
    """What `save_result` wrote. Raises BadInput where it is missing."""
    file = Path(out, "results", f"{name}.json")
    if not file.exists():
        raise BadInput(f"no {file}: first run the experiment that writes it, without --plot")
    return json.loads(file.read_text())


class RunResult:
    """What one run found.

    row: {"command", "curves": {name: [its value at each evaluation]}, "ranks", and what the
    setting's `after` found}, as results/headline_*.json keeps it.
    """

    def __init__(self, row):
        words = row["command"].split()
        given = dict(zip(words, words[1:]))             # of an option given twice the last counts
        self.seed = int(given["--seed"])
        self.curves = row["curves"]
        self.steps = self.curves["step"]
        self.losses = self.curves["heldout_loss"]
        self.final = self.losses[-1]
        self.sent = self.curves["sync_bytes"][-1] / row["ranks"] / 1e6      # MB per rank
        self.shares = row.get("shares")     # losses with stages missing (experiments/skip.py)

    @property
    def seconds(self):
        """Measured seconds at each evaluation."""
        return self.curves["seconds"]


def results(found):
    """{label: [a RunResult per seed]} of a results/headline_*.json."""
    read = {}
    for label, rows in found["runs"].items():
        read[label] = [RunResult(row) for row in rows]
    return read


# ---------------------------------------------------------------- runs of the same seeds


def same_seeds(runs, others):
    """The others with the runs' seeds, in the runs' order."""
    by_seed = {run.seed: run for run in others}
    return [by_seed[run.seed] for run in runs]


def finals(runs):
    """Each run's last held-out loss."""
    return [run.final for run in runs]


def ends(runs):
    """Measured seconds of each run in all."""
    return [run.seconds[-1] for run in runs]


def mean_final(runs):
    """The mean of the last held-out losses, as a table's cell."""
    return f"{statistics.mean(finals(runs)):.3f}"


def over(losses, base):
    """Perplexity over the base's, seed by seed, less 1."""
    return [math.exp(loss - other) - 1 for loss, other in zip(losses, base)]


def over_runs(runs, others):
    """Perplexity at the end over the others', seed by seed. The others may have more seeds."""
    return Comparison(over(finals(runs), finals(same_seeds(runs, others))), "+.1%")


def more_at_the_ends(runs, others):
    """Nats per byte over the others', each at its own end."""
    pairs = zip(finals(runs), finals(same_seeds(runs, others)))
    return Comparison([loss - other for loss, other in pairs])


def more_than(runs, others):
    """Nats per byte over the other of its seed, at the moment when the first of the two runs
    ends."""
    differences = []
    for run, other in zip(runs, same_seeds(runs, others)):
        end = min(ends([run, other]))
        differences.append(loss_at(end, run) - loss_at(end, other))
    return Comparison(differences)


# ---------------------------------------------------------------- a loss and its moment


def reaches(goal, losses, moments):
    """The moment at which the loss is at most the goal, on straight lines; None: never."""
    points = list(zip(moments, losses))
    if losses[0] <= goal:
        return moments[0]
    for (before, above), (after, value) in zip(points, points[1:]):
        if value <= goal:
            return before + (above - goal) / (above - value) * (after - before)
    return None


def loss_at(second, run):
    """The run's loss then, on straight lines between evaluations as measured; after its end, the
    last."""
    return float(np.interp(second, run.seconds, run.losses))


def timed(runs, count=60):
    """(seconds, [the losses of each seed at these seconds]) of runs evaluated at moments of their
    own."""
    begin = max(run.seconds[0] for run in runs)
    length = min(ends(runs)) - begin
    moments = [begin + length * i / (count - 1) for i in range(count)]
    curves = []
    for run in runs:
        curves.append([loss_at(moment, run) for moment in moments])
    return moments, curves


# ---------------------------------------------------------------- ranges, for the record


def spread_of(values, form=".3f"):
    """Mean, and (least to largest) of several: for the record, never in the docs' brackets."""
    text = f"{statistics.mean(values):{form}}"
    if len(values) == 1:
        return text
    return f"{text} ({min(values):{form}} to {max(values):{form}})"


def spread_of_reached(values, form):
    """The same of the seeds that reached a goal; None: that seed did not."""
    there = [value for value in values if value is not None]
    if not there:
        return "not reached"
    if len(there) == len(values):
        return spread_of(there, form)
    return f"{spread_of(there, form)}, {len(there)} of {len(values)} seeds"
