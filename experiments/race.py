"""NoLoCo beside DiLoCo for 90 s between hosts, both at their best: which ends lower?

    python -m experiments.race [--scale try|plot|full] [--plot]         as root

full: 4.6 h of two idle cores. Eight hosts have a fifth of a processor each (CPU); a run takes 90 s
by the clock (experiments/clock.py). At three points, named before the runs:

    one slow host               200 Mbit/s, 5 ms one way; host 5 has a tenth of a processor
    one slow host, m by speed   the same; each replica makes inner steps by its speed
    high latency                200 Mbit/s, 50 ms

sixteen seeds, the merged model's loss at each run's own end, NoLoCo minus DiLoCo, paired, Holm's
correction over the three. Controls have the first eight seeds: DiLoCo by torch's ring all-reduce in
fp32, which says whether a difference belongs to the method or to our sum in one byte; and short
messages (1 Gbit/s, 5 ms) with DDP as torch's DistributedDataParallel does it, overlapped. (These
weights fit into one bucket of it, so there is little that it could overlap.)

All methods at a point run by turns, one right after the other within a seed; experiments/turns.py
has the rule on others' load. m, K, D and the rate of both methods are those that
experiments/tries.py chooses on seeds 100 to 102, with as many tries for each: `full` does not begin
before they stand here.

164 000 parameters, 1024 tokens a replica and step, a step 0.15 s on a fifth of a processor. One
byte a weight, but for the controls.
"""
import itertools
import json
import statistics
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.clock import CPU, PROGRAM
from experiments.harness import Row, Setting, command
from experiments.pictures import COLOURS, GREY, WIDTH, counted, differences, frame
from experiments.tables import Comparison, Expected, Table, sure
from experiments.turns import counted_rows, take_turns

SECONDS = {"try": 4, "plot": 30, "full": 90}     # by the clock
SEEDS = {"try": 1, "plot": 1, "full": 16}
CONTROLS = 8            # seeds
TOKENS = 1024           # of a replica's step
LEARN = ("--layers 2 --batch 8 --microbatches 1 --warmup 20 --eval-sequences 64 "
         "--save-every 1000000")


@dataclass(frozen=True)
class Racer:
    """A method at its setting: m, K, D and the learning rate. clock: options of
    experiments.clock."""
    name: str
    method: str
    rate: float
    m: int = None
    K: int = 1
    D: int = 0
    wire: str = "int8"
    clock: str = ""
    control: bool = False

    @property
    def way(self):
        """The setting in words."""
        if not self.m:
            return f"rate {self.rate}"
        parts = f", K {self.K}" if self.K > 1 else ""
        return f"m {self.m}{parts}, D {self.D}, rate {self.rate}"

    @property
    def options(self):
        """Of train.py."""
        words = [LEARN, f"--lr {self.rate} --method {self.method} --wire {self.wire}"]
        if self.m:
            words.append(f"--inner-steps {self.m}")
        if self.K > 1:
            words.append(f"--fragments {self.K}")
        if self.D:
            words.append(f"--delay {self.D}")
        return " ".join(words)


def noloco(rate, m, K=1, D=0):
    return Racer("NoLoCo", "noloco", rate, m, K, D)


def diloco(rate, m, K=1, D=0):
    return Racer("DiLoCo", "diloco", rate, m, K, D)


def ring(diloco):
    """The raced DiLoCo, but its sum is torch's all-reduce."""
    return replace(diloco, name="DiLoCo, ring in fp32", wire="fp32", control=True)


def ddp(rate):
    return Racer("DDP by torch", "ddp", rate, wire="fp32", clock="--overlapped", control=True)


@dataclass(frozen=True)
class Point:
    """Who races, and on which network. hosts: options of tools/hosts.py; clock: of
    experiments.clock. The first two racers are NoLoCo and DiLoCo. control: no point of the
    question."""
    name: str
    hosts: str
    racers: tuple
    clock: str = ""
    control: bool = False

    def label(self, racer):
        return f"{self.name}: {racer.name}"

    def setting(self, racer, seconds, processes=8):
        """What to run."""
        words = [PROGRAM, str(seconds), self.clock, racer.clock]
        return Setting(self.label(racer), racer.options, processes, after=ended,
                       program=" ".join(filter(None, words)), hosts=f"--cpu {CPU} {self.hosts}")


# What experiments/tries.py chose. At short messages, a control, NoLoCo and DiLoCo have the first
# race's m, K and D, and the rate that was chosen everywhere else.
SLOW = f"--mbit 200 --latency 5 --cpu 5={CPU / 2:.3g}"
DILOCO_SLOW = diloco(0.003, 5, 1, 1)
DILOCO_LATE = diloco(0.003, 10, 5, 2)
POINTS = (
    Point("one slow host", SLOW, (noloco(0.003, 2), DILOCO_SLOW, ring(DILOCO_SLOW))),
    Point("one slow host, m by speed", SLOW, (noloco(0.003, 2), diloco(0.003, 4, 1, 1)),
          clock="--by-speed"),
    Point("high latency", "--mbit 200 --latency 50",
          (noloco(0.003, 5, 5, 1), DILOCO_LATE, ring(DILOCO_LATE))),
    Point("short messages", "--mbit 1000 --latency 5",
          (noloco(0.003, 2, 2, 1), diloco(0.003, 2, 2, 1), ddp(0.003)), control=True),
)
TRY = Point("two hosts, m by speed", f"--mbit 200 --latency 5 --cpu 1={CPU / 2:.3g}",
            (noloco(0.006, 2),), clock="--by-speed")


# ---------------------------------------------------------------- the runs


def points(scale):
    """A try: one run between two hosts."""
    if scale == "try":
        return (TRY,)
    if scale == "plot":
        return POINTS[:3]
    return POINTS


def turns(scale):
    return turns_at(points(scale), scale)


def turns_at(points, scale):
    """[(Settings of all that race at a point, seed)], in the order in which they run: points of the
    question first."""
    found = []
    for control in (False, True):
        for seed in range(SEEDS[scale]):
            for point in points:
                settings = settings_at(point, seed, scale)
                if settings and point.control == control:
                    found.append((settings, seed))
    return found


def settings_at(point, seed, scale):
    """Who is first changes from seed to seed."""
    racers = point.racers
    if seed >= CONTROLS or scale == "plot":
        racers = [racer for racer in racers if not (racer.control or point.control)]
    processes = 2 if scale == "try" else 8
    settings = [point.setting(racer, SECONDS[scale], processes) for racer in racers]
    first = seed % len(settings) if settings else 0
    return settings[first:] + settings[:first]


def settings(scale):
    """All different ones."""
    found = {}
    for some, _ in turns(scale):
        found |= {setting.label: setting for setting in some}
    return list(found.values())


def measure(o):
    if o.scale == "full":
        from experiments.tries import refuse_unchosen       # here, since it imports this file
        refuse_unchosen(o)
    take_turns("race", of_seeds(turns(o.scale), o), o)


def of_seeds(turns, o):
    """The turns of the seeds that the command line asks for."""
    return [(some, seed) for some, seed in turns if not o.seeds or seed in o.seeds]


def ended(folder):
    """What the run's row gets of its end: the merged model's loss, nats per byte; each replica's
    mean steps, seconds held by synchronisation, and megabytes sent."""
    last = json.loads(Path(folder, "metrics.jsonl").read_text().splitlines()[-1])
    config = json.loads(Path(folder, "config.json").read_text())
    ranks = last["ranks"]
    return dict(corpus=last["corpus"], merged=round(last["merged_nats_per_byte"], 5),
                seconds=round(last["seconds"], 2), steps=last["tokens"] / TOKENS / ranks,
                held=round(last["blocked"] * last["seconds"], 2),
                sent=round(last["sync_bytes"] / ranks / 1e6, 3),
                inner_steps=config["inner_steps_by_rank"])


# ---------------------------------------------------------------- what was found


def compared(rows, one, other):
    """Nats per byte of one label's runs minus the other's, seed by seed; None without any."""
    own, others = rows.get(one, {}), rows.get(other, {})
    differences = [own[seed]["merged"] - others[seed]["merged"] for seed in own if seed in others]
    return Comparison(differences) if differences else None


def counted_in(found):
    return counted_at(points(found["scale"]), found)


def counted_at(points, found):
    """{label: {seed: row}} of the turns at these points that count."""
    scale = found["scale"]
    return counted_rows(found, turns_at(points, scale), judged=scale == "full")


def main_races(found):
    """[(point, NoLoCo minus DiLoCo)] of the points of the question that have runs."""
    rows, races = counted_in(found), []
    for point in points(found["scale"]):
        if len(point.racers) > 1 and not point.control:
            measured = compared(rows, *map(point.label, point.racers[:2]))
            if measured:
                races.append((point, measured))
    return races


def control_races(found):
    """[(its name, one minus the other)] of the controls that have runs."""
    rows, races = counted_in(found), []
    for point in points(found["scale"]):
        for one, other in itertools.combinations(point.racers, 2):
            if other.control or point.control:
                measured = compared(rows, point.label(one), point.label(other))
                if measured:
                    races.append((f"{point.name}: {one.name} minus {other.name}", measured))
    return races


def speed_races(found):
    """[(its name, one minus the other)] of what m by speed changes; not named before the runs."""
    if found["scale"] != "full":
        return []
    rows, races = counted_in(found), []
    equal, by_speed = POINTS[:2]
    for own, other in (0, 0), (1, 1), (1, 0):       # 0: NoLoCo, 1: DiLoCo
        one, two = by_speed.racers[own], equal.racers[other]
        measured = compared(rows, by_speed.label(one), equal.label(two))
        if measured:
            races.append((f"{one.name}, m by speed, minus {two.name}, equal m", measured))
    return races


def machine_races(found):
    """[(point, machine, NoLoCo minus DiLoCo on it)] where machines of several kinds made the runs;
    not named before them."""
    rows, races = counted_in(found), []
    if len({kind_of(row) for of in rows.values() for row in of.values()}) < 2:
        return []
    for point, _ in main_races(found):
        one, other = map(point.label, point.racers[:2])
        for kind in sorted({kind_of(row) for row in rows[one].values()}):
            own = {seed: row for seed, row in rows[one].items() if kind_of(row) == kind}
            races.append((point, kind, compared(rows | {one: own}, one, other)))
    return races


def kind_of(row):
    """The processor's name."""
    return row["machine"].split(",")[0]


def show(found):
    seconds = SECONDS[found["scale"]]
    races = main_races(found)
    if races:
        table = Table(f"{seconds} s between hosts", "NoLoCo", "DiLoCo", "NoLoCo minus DiLoCo")
        for point, measured in races:
            table.add(point.name, point.racers[0].way, point.racers[1].way, measured)
        table.end()
    by_machine = [(f"{point.name}, {kind}", measured)
                  for point, kind, measured in machine_races(found)]
    for title, races in (("controls", control_races(found)),
                         ("not named before: m by speed", speed_races(found)),
                         ("not named before: NoLoCo minus DiLoCo by machine", by_machine)):
        if races:
            table = Table(title, "nats per byte")
            for name, measured in races:
                table.add(name, measured)
            table.end()
    rows = counted_in(found)
    show_reasons(rows, points(found["scale"]))
    show_load(found, rows)


def show_reasons(rows, points):
    """A row a method: why. Then the controls, beside the others on their seeds. rows: {label:
    {seed: row}}."""
    question, controlled = [], []
    for point in points:
        has_controls = point.control or any(racer.control for racer in point.racers)
        for racer in point.racers:
            if not (point.control or racer.control):
                question.append((point, racer))
            if has_controls:
                controlled.append((point, racer))
    show_means("a replica's mean", rows, question, SEEDS["full"])
    show_means("a replica's mean, seeds of the controls", rows, controlled, CONTROLS)


def show_means(title, rows, raced, seeds):
    """raced: [(point, racer)]; seeds: how many of the first."""
    table = Table(title, "seeds", "merged, nats per byte", "steps", "seconds held", "MB sent")
    for point, racer in raced:
        by_seed = rows.get(point.label(racer), {})
        runs = [row for seed, row in by_seed.items() if seed < seeds]
        if runs:
            table.add(f"{point.label(racer)}, {racer.way}", len(runs),
                      mean(runs, "merged", ".3f"), mean(runs, "steps", ".0f"),
                      mean(runs, "held", ".1f"), mean(runs, "sent", ".1f"))
    if table.rows:
        table.end()


def mean(rows, key, form):
    return f"{statistics.mean(row[key] for row in rows):{form}}"


def show_load(found, rows):
    counted = [row for runs in rows.values() for row in runs.values()]
    made = sum(map(len, found["runs"].values()))
    if counted:
        others = max(row["others"] for row in counted)
        print(f"Runs that count: {len(counted)}; others' work took at most {others:.3f} of a "
              f"processor in them. Runs of turns that were made again or are not complete: "
              f"{made - len(counted)}.\n")


def draw(plt, found):
    """NoLoCo's loss minus DiLoCo's at each point, with intervals; grey where it is not sure."""
    races = main_races(found)
    measured = [one for _, one in races]
    figure, axis = plt.subplots(figsize=(WIDTH, 2.2 + 0.45 * len(measured)))
    colours = [colour_of(one, stays) for one, stays in zip(measured, sure(measured))]
    differences(axis, measured, colours, [point.name for point, _ in races])
    axis.set(xlabel="nats per byte, NoLoCo minus DiLoCo")
    seeds = max((len(one.differences) for one in measured), default=0)
    frame(figure, found, finding(measured), "NoLoCo beside DiLoCo between hosts",
          f"{SECONDS[found['scale']]} s between eight hosts of one machine, one byte a weight. "
          f"Merged models, {counted(seeds, 'seed')}; bars: 95% intervals.")
    return figure


def colour_of(measured, is_sure):
    """That of the method that ended lower."""
    if not is_sure:
        return GREY
    return COLOURS["NoLoCo" if measured.mean < 0 else "DiLoCo"]


def finding(measured):
    """At how many points each method ended lower beyond doubt."""
    if not measured or any(one.p is None for one in measured):
        return ""                   # one seed
    lower = [one.mean < 0 for one, stays in zip(measured, sure(measured)) if stays]
    if not lower:
        return f"In equal time neither ended lower beyond doubt at any of {len(measured)} points"
    return (f"In equal time NoLoCo ended lower beyond doubt at {lower.count(True)} of "
            f"{len(measured)} points, DiLoCo at {lower.count(False)}")


EXPECTED = {"one slow host": -0.024, "one slow host, m by speed": -0.005, "high latency": -0.014}


def expected(found):
    judged = found["scale"] == "full"
    return [Expected(f"{point.name}: NoLoCo minus DiLoCo, nats per byte", measured.mean,
                     EXPECTED[point.name], 0.05, "+.3f", judged)
            for point, measured in main_races(found) if point.name in EXPECTED]


ROW = Row("race", measure, show, {"race": draw}, expected)

if __name__ == "__main__":
    command(__doc__, ROW)
