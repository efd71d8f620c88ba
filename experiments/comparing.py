"""Runs beside each other: intervals of paired differences, and Holm's correction over a table.

Two methods are compared seed by seed: runs of one seed share their data and their first weights. A
bracket is always the 95% interval of the mean of such differences.
"""
import functools
import math
import statistics
from dataclasses import dataclass

LEVEL = 0.05


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
    "+.1%"."""
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
        if self.interval is None:
            return f"{self.mean:{self.form}}"
        low, high = self.interval
        return f"{self.mean:{self.form}} [{low:{self.form}}, {high:{self.form}}]"


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


def lower_and_sure(comparisons):
    """(those with a mean below zero, those of these that survive Holm's correction over all).
    Comparisons of several seeds each."""
    lower = [one for one in comparisons if one.mean < 0]
    survives = holm([one.p for one in comparisons])
    sure = [one for one, stays in zip(comparisons, survives) if stays and one.mean < 0]
    return lower, sure


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
