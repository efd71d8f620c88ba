"""What runs found: JSON files, paired differences with their intervals, tables, expected numbers.

Two methods are compared seed by seed: runs of one seed share their data and their first weights. A
bracket is always the 95% interval of the mean of such differences. "Better" and "worse" are said of
a difference that survives Holm's correction over its table's column.
"""
import functools
import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from train import BadInput

ROOT = Path(__file__).parent.parent
LEVEL = 0.05
# Below tables of runs that were made before train.py measured the merged model.
MEANS_ONLY = ("NoLoCo's losses are the mean over its replicas: these runs have no loss of the "
              "merged model.\n")


# ---------------------------------------------------------------- files


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
        raise BadInput(f"no {file}: first run the row without --plot")
    return json.loads(file.read_text())


# ---------------------------------------------------------------- Student's t


def share_within(t, freedom):
    """The probability that Student's t with `freedom` degrees of freedom lies between -t and t.

    The finite sums of Abramowitz and Stegun, 26.7.3 (odd degrees) and 26.7.4 (even ones).
    """
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    total = 0.0
    if freedom % 2 == 0:
        term = 1.0
        for k in range(1, freedom // 2 + 1):
            total += term
            term *= cosine**2 * (2 * k - 1) / (2 * k)
        return sine * total
    term = cosine
    for k in range(1, (freedom - 1) // 2 + 1):
        total += term
        term *= cosine**2 * 2 * k / (2 * k + 1)
    return 2 / math.pi * (angle + sine * total)


@functools.cache
def half_width(freedom):
    """Half of a 95% interval in standard errors, for any number of degrees of freedom."""
    low, high = 0.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        if share_within(middle, freedom) < 1 - LEVEL:
            low = middle
        else:
            high = middle
    return high


# ---------------------------------------------------------------- one comparison


@dataclass
class Comparison:
    """Paired differences, one per seed; below zero is better. form: a format such as "+.3f" or
    "+.1%"; as text "+5.2% [3.3, 7.1]"."""
    differences: list
    form: str = "+.3f"

    @property
    def mean(self):
        return statistics.mean(self.differences)

    @property
    def error(self):
        """The mean's standard error; None with one seed."""
        count = len(self.differences)
        if count == 1:
            return None
        return statistics.stdev(self.differences) / math.sqrt(count)

    @property
    def interval(self):
        """(low, high) of 95%; None with one seed."""
        if self.error is None:
            return None
        half = half_width(len(self.differences) - 1) * self.error
        return self.mean - half, self.mean + half

    @property
    def p(self):
        """The probability of a mean as far from zero as this one if there were no difference; None
        with one seed."""
        if self.error is None:
            return None
        if self.error == 0:
            return float(self.mean == 0)
        return 1 - share_within(abs(self.mean) / self.error, len(self.differences) - 1)

    @property
    def verdict(self):
        """"better", "worse" or "cannot tell", by this interval alone."""
        if self.interval is None:
            return "one seed"
        low, high = self.interval
        if high < 0:
            return "better"
        if low > 0:
            return "worse"
        return "cannot tell"

    def __str__(self):
        text = f"{self.mean:{self.form}}"
        if self.interval is None:
            return text
        times = 100 if self.form.endswith("%") else 1
        digits = self.form.strip("+f%")
        low, high = self.interval
        return f"{text} [{times * low:{digits}f}, {times * high:{digits}f}]"


def holm(values, level=LEVEL):
    """Which of the p values survive Holm's correction over all of them: a truth value for each.

    The smallest must be below level / n, the next below level / (n - 1), and so on; the first that
    is not ends it.
    """
    survives = [False] * len(values)
    by_size = sorted(range(len(values)), key=lambda i: values[i])
    for place, i in enumerate(by_size):
        if values[i] > level / (len(values) - place):
            break
        survives[i] = True
    return survives


def sure(comparisons):
    """Which survive Holm's correction over all of these: a truth value for each. Of one seed none
    does."""
    if any(one.p is None for one in comparisons):
        return [False] * len(comparisons)
    return holm([one.p for one in comparisons])


# ---------------------------------------------------------------- a table


class Table:
    """A table in Markdown whose cells may be Comparisons; `end` prints it and what its comparisons
    come to.

    A cell says "better" or "worse" where its interval leaves out zero and it survives Holm's
    correction over its column; "better alone", "worse alone" where only its own interval leaves out
    zero.
    """

    def __init__(self, *columns):
        self.columns, self.rows = columns, []

    def add(self, *cells):
        """A row; None is an empty cell."""
        assert len(cells) == len(self.columns), (cells, self.columns)
        self.rows.append(cells)

    def end(self):
        """Print the table, and a line for each column that compares."""
        survivors = {}
        for column in range(len(self.columns)):
            survivors |= self.survivors(column)
        print("|", " | ".join(self.columns), "|")
        print("|" + len(self.columns) * "---|")
        for number, row in enumerate(self.rows):
            cells = [self.text(cell, survivors.get((number, column)))
                     for column, cell in enumerate(row)]
            print("|", " | ".join(cells), "|")
        print()
        for column in range(len(self.columns)):
            self.tell_comparisons(column, survivors)
        if survivors:
            print()

    def survivors(self, column):
        """{(row, column): whether that comparison survives Holm's correction over the column}"""
        compared = {}
        for number, row in enumerate(self.rows):
            cell = row[column]
            if isinstance(cell, Comparison) and cell.p is not None:
                compared[number, column] = cell.p
        return dict(zip(compared, holm(list(compared.values()))))

    @staticmethod
    def text(cell, survives):
        if cell is None:
            return ""
        if not isinstance(cell, Comparison) or cell.verdict not in ("better", "worse"):
            return str(cell)
        if survives:
            return f"{cell}, {cell.verdict}"
        return f"{cell}, {cell.verdict} alone"

    def tell_comparisons(self, column, survivors):
        places = [place for place in survivors if place[1] == column]
        if not places:
            return
        zero_left_out = [row for row, _ in places
                         if self.rows[row][column].verdict != "cannot tell"]
        kept = [self.rows[row][0] for row in zero_left_out if survivors[row, column]]
        names = ""
        if 0 < len(kept) <= 4:
            names = f": {'; '.join(kept)}"
        print(f"* \"{self.columns[column]}\": {len(places)} comparisons, intervals that leave out "
              f"zero: {len(zero_left_out)}, after Holm's correction: {len(kept)}{names}.")


# ---------------------------------------------------------------- runs of train.py


class RunResult:
    """What one run found.

    row: {"command", "curves": {name: [its value at each evaluation]}, "ranks", and what the
    setting's `after` found}, as results/*.json keeps it.
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
        self.shares = row.get("shares")     # losses with stages missing (experiments/skipping.py)

    @property
    def seconds(self):
        """Measured seconds at each evaluation."""
        return self.curves["seconds"]


def results(found):
    """{label: [a RunResult per seed]} of a results/*.json."""
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


def more_than(runs, others, share=1.0):
    """Nats per byte over the other of its seed, after this share of the time at which the first of
    the two runs ends."""
    differences = []
    for run, other in zip(runs, same_seeds(runs, others)):
        moment = share * min(ends([run, other]))
        differences.append(loss_at(moment, run) - loss_at(moment, other))
    return Comparison(differences)


# ---------------------------------------------------------------- a loss and its moment


def loss_at(second, run):
    """The run's loss then, on straight lines between evaluations as measured; after its end, the
    last."""
    return float(np.interp(second, run.seconds, run.losses))


# ---------------------------------------------------------------- expected numbers


@dataclass
class Expected:
    """A number beside the expected one. form: a format such as "+.1%" or ".1f"."""
    text: str
    found: float            # None: it could not be measured
    expected: float
    tolerance: float
    form: str = "+.1%"
    judged: bool = True     # False: a try, too short for this number

    @property
    def passes(self):
        return self.found is not None and abs(self.found - self.expected) <= self.tolerance

    @property
    def is_outside(self):
        return self.judged and not self.passes

    def __str__(self):
        number = "not measured" if self.found is None else f"{self.found:{self.form}}"
        line = f"{self.text}: {number}"
        if not self.judged:
            return f"a try, not judged: {line}"
        verdict = "pass" if self.passes else "outside what was expected"
        wide = f"{self.tolerance:{self.form.removeprefix('+')}}"
        return f"{verdict}: {line} (expected {self.expected:{self.form}}, at most {wide} off)"
