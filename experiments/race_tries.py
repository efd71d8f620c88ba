"""Choose race.RACED of NoLoCo and DiLoCo with one slow host, again.

    python -m experiments.race_tries --scale full         as root

Half an hour of two idle cores if two of these run at once. Six tries each, of m, K fragments and a
delay D of up to m / 2, all on seed 101. The best two run on seed 102, too; if the best has the
list's shortest or longest m, so does one with half or twice its m and D, on both seeds. The best
mean is tried with half and twice its rate on both, and once beyond if an end of these three is the
best. The other settings were chosen by 3dc9cb9, whose inner steps by speed began after the warm-up.

This program leaves when it has ended.
"""
import statistics

from experiments.harness import Row, command, make_runs, records_in, results_file
from experiments.race import DILOCO, NOLOCO, OTHERS, POINTS, a_run, named
from experiments.stats import by_seed
from train import BadInput

SEEDS = 101, 102        # the first one of all, both of the best two and of the rates
NAME = "race_tries"
RATE = 0.003            # of the first tries
LISTS = {               # {(point, method): m, K and D}
    ("one slow host", NOLOCO): ((2, 1, 0), (4, 1, 0), (4, 1, 1), (4, 1, 2), (10, 1, 5), (10, 2, 4)),
    ("one slow host", DILOCO): ((4, 1, 0), (4, 1, 1), (4, 1, 2), (10, 1, 5), (10, 2, 4),
                                (20, 1, 10)),
}
# {(point, method): settings}: m, K, D and the rate
TRIES = {raced: [(*setting, RATE) for setting in settings] for raced, settings in LISTS.items()}


def measure(o):
    """Prints race.RACED."""
    for raced, setting in chosen(o).items():
        print(f"    {raced}: {setting},")


def chosen(o):
    """{(point, method): the setting that races: m, K, D and the rate}. The tries that are missing
    are made before."""
    order = tried(TRIES, SEEDS[:1], o)
    order = tried({raced: best_two(settings) for raced, settings in order.items()}, SEEDS, o)
    order = tried({raced: with_rates(them[0]) for raced, them in order.items()}, SEEDS, o)
    order = tried({raced: them + beyond(them) for raced, them in order.items()}, SEEDS, o)
    return {raced: settings[0] for raced, settings in order.items()}


def tried(lists, seeds, o):
    """These lists of settings, each in the order of its mean losses on these seeds."""
    for seed in seeds:
        make_runs(NAME, tries(seed, lists, o), o, most_others=OTHERS)
    records = records_in(results_file(o.out, NAME))
    return {raced: ranked(raced, settings, seeds, records) for raced, settings in lists.items()}


def best_two(settings):
    """The first two; if the first one has the shortest or longest m of all, one more with half or
    twice its m and D."""
    m, K, D, rate = settings[0]
    intervals = [interval for interval, *_ in settings]
    if m == min(intervals):
        return [*settings[:2], (m // 2, K, D // 2, rate)]
    if m == max(intervals):
        return [*settings[:2], (2 * m, K, 2 * D, rate)]
    return settings[:2]


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
    places = {point.name: point for point in POINTS}
    for (point, method), settings in lists.items():
        for setting in settings:
            runs.append(a_run(places[point], method, setting, seed, o.scale))
    return runs


def ranked(raced, settings, seeds, records):
    """The tries in the order of their mean loss on these seeds. Raises BadInput where one is
    missing, as with --seeds."""
    point, method = raced
    means = {}
    for setting in settings:
        losses = by_seed(records, dict(point=point, method=method, **named(setting)), "merged")
        for seed in seeds:
            if seed not in losses:
                raise BadInput(f"no try of {method} at {point} with {named(setting)}, seed {seed}")
        means[setting] = statistics.mean(losses[seed] for seed in seeds)
    return sorted(settings, key=means.get)


ROW = Row(NAME, measure, lambda found: None, {}, lambda found: [])

if __name__ == "__main__":
    command(__doc__, ROW)
