"""Who ends lowest in equal time between hosts: NoLoCo, DiLoCo, or pairs that never wait?

    python -m experiments.race [--scale try|plot|full] [--plot]         as root

full: about eight hours of two idle cores. Eight hosts have a fifth of a processor each (CPU) and
200 Mbit/s; a run takes 90 s by the clock (experiments/clock.py). Three points, named before the
runs:

    uneven steps    5 ms one way. A step takes f times as long as two plain ones, but no less than
                    one, by computing longer; f is log-normal with mean 1 and sigma^2 0.5, NoLoCo's
                    own model (B4), on every host. Sixteen seeds
    one slow host   5 ms one way. Host 5 has a tenth of a processor; NoLoCo and DiLoCo make inner
                    steps by each host's speed. Eight seeds
    50 ms one way   Eight seeds

Named before, too: at each point NoLoCo minus DiLoCo, pairs that never wait minus NoLoCo, and minus
DiLoCo, of the merged model's loss at each run's own end; Holm's correction goes over all nine.

Each method has six tries per point, of m, K fragments and a delay D of up to m / 2, all on seed
100, then its best two on seed 101. The better mean is tried with half and twice its rate on both
seeds, and once beyond if an end of these three is the best. The best is raced. The tries are the
first stage of this program, and the race does not begin before it has them.

164 000 parameters, 1024 tokens per replica and step, which takes 0.15 s on a fifth of a processor
that does nothing else. All messages are fp32, four bytes per weight, since those of pairs that
never wait are. Nobody evaluates before the end: for that, all would wait for each other.
All racers of a point and seed run one right after the other, and who is first changes with the
seed. If others' work takes more than OTHERS of a processor in one of these runs, all of them are
made again, whatever they have found.
"""
import itertools
import json
import statistics
from dataclasses import dataclass
from typing import NamedTuple

from experiments.clock import CPU, PROGRAM
from experiments.harness import Row, Run, command, make_runs, records_in, results_file
from experiments.pictures import COLOURS, GREY, WIDTH, forest, frame
from experiments.stats import Comparison, Table, by_seed, mean, paired, significant, those
from train import BadInput

SECONDS = {"try": 4, "plot": 30, "full": 90}        # by the clock
SEEDS = {"plot": 1, "full": 16}                     # of a point, at most
OTHERS = 0.1            # of a processor; at full, the most that others' work may take
TOKENS = 1024           # of a replica's step
LEARN = "--layers 2 --batch 8 --microbatches 1 --warmup 20 --eval-sequences 64"
NOLOCO, DILOCO, PAIRS = METHODS = "NoLoCo", "DiLoCo", "pairs that never wait"
NAMED = (NOLOCO, DILOCO), (PAIRS, NOLOCO), (PAIRS, DILOCO)      # at each point: one minus the other
TRIED, AGAIN = 100, 101     # seeds of the tries: of all, of the best two
LOG = "race_tries"          # OUT/results/LOG.json has the tries
WIRES = {"fp32": "fp32", "int8": "one byte per weight"}
SHOWN = {"merged": ".3f", "steps": ".0f", "blocked": ".1f", "sent": ".1f"}
DRAWN = {NOLOCO: COLOURS["NoLoCo"], DILOCO: COLOURS["DiLoCo"], PAIRS: COLOURS["25%"]}


@dataclass(frozen=True)
class Point:
    """Where methods race. hosts: options of tools/hosts.py; clock: of experiments/clock.py.
    by_speed: whether those who can make inner steps by speed."""
    name: str
    seeds: int
    hosts: str
    clock: str = ""
    by_speed: bool = False


POINTS = (
    Point("uneven steps", 16, "--mbit 200 --latency 5", clock="--uneven"),
    Point("one slow host", 8, f"--mbit 200 --latency 5 --cpu 5={CPU / 2:.3g}", by_speed=True),
    Point("50 ms one way", 8, "--mbit 200 --latency 50"),
)
TRY = Point("two hosts", 1, f"--mbit 200 --latency 5 --cpu 1={CPU / 2:.3g}", by_speed=True)
RATE = 0.003            # of the first tries
WAITLESS = (2, 1, 0), (4, 1, 0), (8, 1, 0), (16, 1, 0), (32, 1, 0), (64, 1, 0)
LISTS = {                   # {(point, method): m, K and D}
    ("uneven steps", NOLOCO): ((10, 1, 1), (10, 1, 5), (10, 5, 5), (4, 1, 2), (20, 1, 10),
                               (20, 4, 10)),
    ("uneven steps", DILOCO): ((20, 1, 1), (20, 1, 10), (20, 4, 10), (10, 1, 5), (40, 1, 20),
                               (40, 4, 20)),
    ("uneven steps", PAIRS): WAITLESS,
    ("one slow host", NOLOCO): ((2, 1, 0), (2, 1, 1), (4, 1, 1), (4, 1, 2), (10, 1, 5), (10, 2, 4)),
    ("one slow host", DILOCO): ((4, 1, 1), (4, 1, 2), (10, 1, 2), (10, 1, 5), (10, 2, 4),
                                (20, 1, 10)),
    ("one slow host", PAIRS): WAITLESS,
    ("50 ms one way", NOLOCO): ((4, 1, 2), (5, 5, 1), (5, 5, 2), (10, 5, 5), (10, 1, 5),
                                (20, 4, 10)),
    ("50 ms one way", DILOCO): ((10, 1, 5), (10, 2, 5), (20, 1, 10), (20, 2, 10), (20, 4, 10),
                                (40, 4, 20)),
    ("50 ms one way", PAIRS): WAITLESS,
}
# {(point, method): settings}: m, K, D and the rate
TRIES = {raced: [(*setting, RATE) for setting in settings] for raced, settings in LISTS.items()}


# ---------------------------------------------------------------- the runs


def a_run(stage, point, method, setting, seed, scale):
    """The Run of a method with its setting (m, K, D, rate)."""
    m, K, D, rate = setting
    by_speed = point.by_speed and method != PAIRS       # they need none
    facts = dict(stage=stage, point=point.name, method=method, **named(setting), wire="fp32",
                 by_speed=by_speed, seed=seed)
    clock = [PROGRAM, str(SECONDS[scale]), "--one-evaluation", point.clock]
    if by_speed:
        clock.append("--by-speed")
    if method == PAIRS:
        clock.append("--never-waits")
    options = (f"{LEARN} --method {'diloco' if method == DILOCO else 'noloco'} --lr {rate} "
               f"--inner-steps {m} --fragments {K} --delay {D}")
    processes = 2 if scale == "try" else 8
    return Run(facts, options, processes, " ".join(filter(None, clock)),
               f"--cpu {CPU} {point.hosts}", after=ended)


def ended(folder):
    """What the record gets of the run's end: each replica's mean steps, and seconds in which it was
    blocked by synchronisation; the inner steps of each, where they differ."""
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    config = json.loads((folder / "config.json").read_text())
    return dict(steps=last["tokens"] / TOKENS / last["ranks"],
                blocked=round(last["blocked"] * last["seconds"], 2),
                inner_steps=config["inner_steps_by_rank"])


def measure(o):
    """On the full scale first the tries. At others the first try of each list races."""
    if o.scale == "try":
        runs = [a_run("race", TRY, method, (2, 1, 0, 0.003), 0, o.scale)
                for method in (NOLOCO, PAIRS)]
        make_runs("race", runs, o)
    elif o.scale == "plot":
        settings = {raced: tries[0] for raced, tries in TRIES.items()}
        make_runs("race", race_runs(settings, o.scale), o, turn_of=turn)
    else:
        make_runs("race", race_runs(chosen(o), o.scale), o, turn_of=turn, most_others=OTHERS)


def race_runs(settings, scale):
    """All runs of the race, in their order: who is first changes with the seed. settings: {(point,
    method): its setting}."""
    runs = []
    for seed in range(SEEDS[scale]):
        for point in POINTS:
            if seed < point.seeds:
                first = seed % len(METHODS)
                for method in METHODS[first:] + METHODS[:first]:
                    setting = settings[point.name, method]
                    runs.append(a_run("race", point, method, setting, seed, scale))
    return runs


def turn(missing):
    """All racers of a point and seed, one right after the other."""
    return [run for run in missing if place(run) == place(missing[0])]


def place(run):
    return run.facts["point"], run.facts["seed"]


# ---------------------------------------------------------------- the tries


def chosen(o):
    """{(point, method): the setting that races}. The tries that are missing are made before.

    Raises BadInput where --seeds leaves out a seed of the tries and they are not there.
    """
    both = TRIED, AGAIN
    order = tried(TRIES, [TRIED], o)
    order = tried({raced: settings[:2] for raced, settings in order.items()}, both, o)
    order = tried({raced: with_rates(settings[0]) for raced, settings in order.items()}, both, o)
    order = tried({raced: them + beyond(them) for raced, them in order.items()}, both, o)
    return {raced: settings[0] for raced, settings in order.items()}


def tried(lists, seeds, o):
    """These lists of settings, each in the order of its mean losses on these seeds."""
    for seed in seeds:
        make_runs(LOG, tries(seed, lists, o), o, most_others=OTHERS)
    records = records_in(results_file(o.out, LOG))
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
    """The tries in the order of their mean loss on these seeds. Raises BadInput where one is
    missing."""
    point, method = raced
    means = {}
    for setting in settings:
        facts = dict(stage="try", point=point, method=method, **named(setting))
        losses = by_seed(records, facts, "merged")
        for seed in seeds:
            if seed not in losses:
                raise BadInput(f"the race needs its tries first, and none is there of {method} at "
                               f"{point} with {named(setting)}: --seeds {TRIED} {AGAIN}")
        means[setting] = statistics.mean(losses[seed] for seed in seeds)
    return sorted(settings, key=means.get)


def named(setting):
    """The facts of a setting."""
    return dict(zip(("m", "K", "D", "rate"), setting))


# ---------------------------------------------------------------- what was found


class Race(NamedTuple):
    """One method minus another one at a point. survives: Holm's correction."""
    point: str
    one: str
    other: str
    measured: Comparison
    survives: bool

    @property
    def name(self):
        return f"{self.point}: {self.one} minus {self.other}"

    @property
    def colour(self):
        """That of the method that ended lower."""
        if not self.survives:
            return GREY
        return DRAWN[self.one if self.measured.mean < 0 else self.other]


def wires(found):
    """Those of the records. Up to 2026-11-28 two programs raced, one with one byte per weight."""
    there = {record["wire"] for record in found["records"]}
    return [wire for wire in WIRES if wire in there]


def points(found):
    return (TRY,) if found["scale"] == "try" else POINTS


def races(found, wire):
    """The Races named before that have runs with this wire."""
    named_before = []
    for point in points(found):
        facts = dict(stage="race", point=point.name, wire=wire)
        for one, other in NAMED:
            measured = paired(found["records"], facts | dict(method=one),
                              facts | dict(method=other))
            if measured:
                named_before.append((point.name, one, other, measured))
    survive = significant([measured for *_, measured in named_before])
    return [Race(*race, stays) for race, stays in zip(named_before, survive)]


def show(found):
    for wire in wires(found):
        table = Table(f"{SECONDS[found['scale']]} s between hosts, {WIRES[wire]}", "nats per byte")
        for race in races(found, wire):
            table.add(race.name, race.measured)
        table.end()
        show_means(found, wire)


def show_means(found, wire):
    """What each racer did."""
    table = Table(f"a replica's mean, {WIRES[wire]}", "merged, nats per byte", "steps",
                  "seconds blocked", "MB sent")
    for point, method in itertools.product(points(found), METHODS):
        facts = dict(stage="race", point=point.name, method=method, wire=wire)
        raced = those(found["records"], **facts)
        if raced:
            setting = "m {m}, K {K}, D {D}, rate {rate}".format(**raced[0])
            cells = [mean(raced, facts, key, form) for key, form in SHOWN.items()]
            table.add(f"{point.name}: {method}, {setting}", *cells)
    table.end()


def draw(plt, found):
    """All comparisons named before, with intervals; grey where they are not significant."""
    drawn = []
    for wire in wires(found):
        drawn += races(found, wire)
    figure, axis = plt.subplots(figsize=(WIDTH, 1.4 + 0.45 * len(drawn)))
    lines = {race.name.replace(": ", ":\n"): race.measured for race in drawn}
    forest(axis, lines, [race.colour for race in drawn])
    axis.set(xlabel="nats per byte after equal time")
    frame(figure, found, finding(drawn), "Three methods in equal time between hosts")
    return figure


def finding(drawn):
    """In how many comparisons the first one ended lower, after Holm's correction."""
    never = [race for race in drawn if race.one == PAIRS]
    pairs = [race for race in drawn if race.one == NOLOCO]
    return (f"Lower loss: pairs that never wait in {wins(never)} of {len(never)} cases, "
            f"NoLoCo than DiLoCo in {wins(pairs)} of {len(pairs)}")


def wins(drawn):
    return sum(1 for race in drawn if race.survives and race.measured.mean < 0)


def expected(_):
    """Of 30 s and one seed nothing is expected: seeds differ by more than methods do."""
    return []


ROW = Row("race", measure, show, {"race": draw}, expected)

if __name__ == "__main__":
    command(__doc__, ROW)
