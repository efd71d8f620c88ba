"""Choose the settings of experiments/race.py: one search for each method at each point.

    python -m experiments.race_tries --scale full         as root

About two hours of two idle cores. Each method had six tries per point, of m, K fragments and a
delay D of up to m / 2, on seed 100 (717b747, results/race_first_tries.json). Their best two run
again on seed 101; if the best had the list's shortest or longest m, one with half or twice its m
and D does, too. The best of these is tried with half and twice its rate on seeds 101 and 102, and
once beyond if an end of these three has the lowest mean. It prints the best ones;
results/race_tries.json has all.

In the first tries a step took as long as its computing, 0.2 s or a little more; on the next machine
it took half as long. Since then it takes race.STEP.

This program leaves when it has ended.
"""
import statistics

from experiments.harness import Row, command, make_runs, records_in, results_file
from experiments.race import DILOCO, METHODS, NOLOCO, OTHERS, PAIRS, POINTS, a_run, named
from experiments.stats import by_seed

SEEDS = 101, 102        # the first one of the settings, both of the rates
NAME = "race_tries"
RATE = 0.003            # of the first tries
CANDIDATES = {          # {(point, method): m, K and D}: the best two, and the one beyond
    ("uneven steps", NOLOCO): ((10, 5, 5), (20, 4, 10)),
    ("uneven steps", DILOCO): ((40, 1, 20), (20, 4, 10), (80, 1, 40)),
    ("uneven steps", PAIRS): ((4, 1, 0), (2, 1, 0)),
    ("one slow host", NOLOCO): ((2, 1, 0), (4, 1, 1), (1, 1, 0)),
    ("one slow host", DILOCO): ((4, 1, 1), (10, 1, 2), (2, 1, 0)),
    ("one slow host", PAIRS): ((4, 1, 0), (2, 1, 0)),
    ("50 ms one way", NOLOCO): ((5, 5, 1), (4, 1, 2)),
    ("50 ms one way", DILOCO): ((40, 4, 20), (20, 1, 10), (80, 4, 40)),
    ("50 ms one way", PAIRS): ((4, 1, 0), (8, 1, 0)),
}


def measure(o):
    """Prints race.RACED."""
    for raced, setting in chosen(o).items():
        print(f"    {raced}: {setting},")


def chosen(o):
    """{(point, method): the setting that races: m, K, D and the rate}. The tries that are missing
    are made before."""
    first = {raced: [(*setting, RATE) for setting in them] for raced, them in CANDIDATES.items()}
    order = tried(first, SEEDS[:1], o)
    order = tried({raced: with_rates(them[0]) for raced, them in order.items()}, SEEDS, o)
    order = tried({raced: them + beyond(them) for raced, them in order.items()}, SEEDS, o)
    return {raced: settings[0] for raced, settings in order.items()}


def tried(lists, seeds, o):
    """These lists of settings, each in the order of its mean losses on these seeds."""
    for seed in seeds:
        make_runs(NAME, tries(seed, lists, o), o, most_others=OTHERS)
    records = records_in(results_file(o.out, NAME))
    return {raced: ranked(raced, settings, seeds, records) for raced, settings in lists.items()}


def with_rates(setting):
    """The setting, and with half and twice its rate."""
    *others, rate = setting
    return [setting, (*others, rate / 2), (*others, 2 * rate)]


def beyond(settings):
    """One more if the first, the best, has the lowest or highest rate of these; else none."""
    *others, best = settings[0]
    rates = [rate for *_, rate in settings]
    if best == min(rates):
        return [(*others, best / 2)]
    if best == max(rates):
        return [(*others, 2 * best)]
    return []


def tries(seed, lists, o):
    """Their Runs. lists: {(point, method): settings}."""
    runs = []
    for point in POINTS:
        for method in METHODS:
            for setting in lists[point.name, method]:
                runs.append(a_run("try", point, method, setting, seed, o.scale))
    return runs


def ranked(raced, settings, seeds, records):
    """The tries in the order of their mean loss on these seeds."""
    point, method = raced
    means = {}
    for setting in settings:
        losses = by_seed(records, dict(point=point, method=method, **named(setting)), "merged")
        means[setting] = statistics.mean(losses[seed] for seed in seeds)
    return sorted(settings, key=means.get)


ROW = Row(NAME, measure, lambda found: None, {}, lambda found: [])

if __name__ == "__main__":
    command(__doc__, ROW)
