"""Records compared seed by seed: paired differences with their intervals, tables, expected numbers.

Two methods are compared seed by seed: runs of one seed share their data and their first weights. A
bracket is always the 95% interval of the mean of such differences (Student's t). "Better" and
"worse" are said of a difference that survives Holm's correction over its table's column.
"""
import math
import statistics
from dataclasses import dataclass

LEVEL = 0.05
NOT_SIGNIFICANT = "no significant difference"


# ---------------------------------------------------------------- records


def those(records, **facts):
    """The records that have these facts."""
    return [record for record in records if record.items() >= facts.items()]


def by_seed(records, facts, key):
    """{seed: value}. key: a column, or a function of a record. Raises ValueError where two records
    have these facts and one seed."""
    read = key if callable(key) else lambda record: record[key]
    found = {}
    for record in those(records, **facts):
        if record["seed"] in found:
            raise ValueError(f"two records of seed {record['seed']} have {facts}")
        found[record["seed"]] = read(record)
    return found


def nats(own, other):
    return own - other


def perplexity(own, other):
    """Of losses in nats: one perplexity over the other's, less 1."""
    return math.exp(own - other) - 1


def ratio(own, other):
    """One value over the other, less 1."""
    return own / other - 1


FORMS = {nats: "+.3f", perplexity: "+.1%", ratio: "+.1%"}


def paired(records, one, other, key="merged", how=nats, other_key=None):
    """The Comparison of all seeds that both have; None without any.

    one, other: the facts of the records of each side. key: as `by_seed` has it; other_key: of the
    other side, if it is another one. how: nats, perplexity or ratio, or a function of a value of
    each side that returns nats.
    """
    own, others = by_seed(records, one, key), by_seed(records, other, other_key or key)
    differences = {seed: how(own[seed], others[seed]) for seed in own if seed in others}
    if not differences:
        return None
    return Comparison(list(differences.values()), FORMS.get(how, FORMS[nats]),
                      tuple(differences))


def less(one, other):
    """One Comparison less another, seed by seed; None without a seed that both have."""
    if one is None or other is None:
        return None
    others = dict(zip(other.seeds, other.differences))
    found = {seed: own - others[seed] for seed, own in zip(one.seeds, one.differences)
             if seed in others}
    return Comparison(list(found.values()), one.form, tuple(found)) if found else None


def mean(records, facts, key="merged", form=".3f"):
    """The mean over the seeds, as a table's cell; None without any."""
    values = by_seed(records, facts, key).values()
    return f"{statistics.mean(values):{form}}" if values else None


# ---------------------------------------------------------------- one comparison


@dataclass
class Comparison:
    """Paired differences, one per seed; below zero is better. form: a format such as "+.3f" or
    "+.1%"; as text "+5.2% [3.3, 7.1]"."""
    differences: list
    form: str = "+.3f"
    seeds: tuple = ()

    @property
    def mean(self):
        return statistics.mean(self.differences)

    @property
    def test(self):
        """Student's t test of the mean against zero; None with one seed."""
        from scipy.stats import ttest_1samp         # here: fleets on a GPU do without it
        if len(self.differences) == 1:
            return None
        return ttest_1samp(self.differences, 0)

    @property
    def interval(self):
        """(low, high) of 95%; None with one seed."""
        if self.test is None:
            return None
        low, high = self.test.confidence_interval(1 - LEVEL)
        return float(low), float(high)

    @property
    def p(self):
        """The probability of a mean as far from zero as this one if there were no difference; None
        with one seed."""
        if self.test is None:
            return None
        if not any(self.differences):
            return 1.0                              # nothing differs; the test divides by zero
        return float(self.test.pvalue)

    @property
    def verdict(self):
        """"better", "worse" or NOT_SIGNIFICANT, by this interval alone."""
        if self.interval is None:
            return "one seed"
        low, high = self.interval
        if high < 0:
            return "better"
        if low > 0:
            return "worse"
        return NOT_SIGNIFICANT

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


def significant(comparisons):
    """Which survive Holm's correction over those of these that have more than one seed: a truth
    value for each. None and one seed do not count."""
    counted = [i for i, one in enumerate(comparisons) if one is not None and one.p is not None]
    survives = [False] * len(comparisons)
    for i, survived in zip(counted, holm([comparisons[i].p for i in counted])):
        survives[i] = survived
    return survives


# ---------------------------------------------------------------- a table


class Table:
    """A table in Markdown whose cells may be Comparisons; `end` prints it and what its comparisons
    come to.

    A cell says "better" or "worse" where its interval leaves out zero and it survives Holm's
    correction over its column; "nominally better", "nominally worse" where only its own interval
    leaves out zero.
    """

    def __init__(self, *columns):
        self.columns, self.rows = columns, []

    def add(self, *cells):
        """A row; None is an empty cell."""
        assert len(cells) == len(self.columns), (cells, self.columns)
        self.rows.append(cells)

    def end(self):
        """Print the table, if it has rows, and a line for each column that compares."""
        if not self.rows:
            return
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
                compared[number, column] = cell
        return dict(zip(compared, significant(list(compared.values()))))

    @staticmethod
    def text(cell, survives):
        if cell is None:
            return ""
        if not isinstance(cell, Comparison) or cell.verdict not in ("better", "worse"):
            return str(cell)
        if survives:
            return f"{cell}, {cell.verdict}"
        return f"{cell}, nominally {cell.verdict}"

    def tell_comparisons(self, column, survivors):
        places = [place for place in survivors if place[1] == column]
        if not places:
            return
        zero_left_out = [row for row, _ in places
                         if self.rows[row][column].verdict != NOT_SIGNIFICANT]
        kept = [self.rows[row][0] for row in zero_left_out if survivors[row, column]]
        names = ""
        if 0 < len(kept) <= 4:
            names = f": {'; '.join(kept)}"
        print(f"* \"{self.columns[column]}\": {len(places)} comparisons, intervals that leave out "
              f"zero: {len(zero_left_out)}, after Holm's correction: {len(kept)}{names}.")


# ---------------------------------------------------------------- expected numbers


@dataclass
class Expected:
    """A number of the scale "plot" and the expected one. form: a format such as "+.1%"."""
    text: str
    found: float            # None: it could not be measured
    expected: float
    tolerance: float
    form: str = "+.1%"

    @property
    def is_outside(self):
        return self.found is None or not abs(self.found - self.expected) <= self.tolerance

    def __str__(self):
        number = "not measured" if self.found is None else f"{self.found:{self.form}}"
        verdict = "outside what was expected" if self.is_outside else "pass"
        wide = f"{self.tolerance:{self.form.removeprefix('+')}}"
        return (f"{verdict}: {self.text}: {number} (expected {self.expected:{self.form}}, at most "
                f"{wide} off)")
