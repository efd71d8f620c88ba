"""Loss against real time between hosts with equal processors: real messages, rates and latencies.

    python -m experiments.network [PART ...] [--seeds 0 1 2] [--steps N] [--out DIR] [--plot]

tries       six settings of DiLoCo and NoLoCo (at 1000 Mbit/s four) and four of DDP on each network, one
            seed, compared on 16 kB of validation text                                              2 h 30
grid        five seeds of the best setting of each, and of the best without --delay, on 64 kB of
            test text; NoLoCo also with --survive on two networks                                   4 h
latency     an outer step alone: all-reduce and pair, 2 to 16 hosts, 0 to 100 ms                    20 min
pipeline    SkipPipe on 4 stages of 2 hosts between cities: three seeds                             1 h 20

Hours are estimates for one instance, which needs two idle cores. Several instances share a part by labels:

    python -m experiments.network tries --only "50 Mbit/s"          (and at the same time the other networks)
    python -m experiments.network tries --out .                     collects them: `grid` reads results/ here

The hosts are network namespaces of this machine (tools/hosts.py; root and iproute2). Each has CPU of a
processor; the relay, which is the network, has its own. A step is one sequence of 128 tokens a replica. The
held-out text has two halves, for validation and test. Each origin evaluates on its own part of a half.

    python -m experiments.network --clock SECONDS ...   train.py's options: about as many steps as fit
    python -m experiments.network --clock 0 ...         times outer steps alone
"""
import itertools
import json
import re
import statistics
import sys
import time
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

import train
from experiments.pictures import COLOURS, WIDTH, label_ends, show_head, show_row
from experiments.runs import (Part, Run, band, built, ends, finals, headline, interval_of, loss_at, published,
                              reaches, results, same_seeds, spread_of, spread_of_reached, timed)
from experiments.together import BYTES
from planning.instance import city_links
from plumbing import report
from plumbing.options import Parser
from plumbing.processes import Job
from plumbing.wires import KINDS

SECONDS, IN_PIPELINES, FIRST, CPU = 60, 100, 20, 0.2
EVALUATIONS = dict(validation=3, test=6)        # of a run
PROGRAM = "-m experiments.network --clock"
TINY = "--hidden 128 --mlp 512 --heads 4"       # train.py's own
MEGABITS = 8 * 1.115                            # of its weights in one byte each
COMMON = f"{TINY} --microbatches 1 --batch 1 --eval-sequences 64 --warmup {FIRST}"

# ---------------------------------------------------------------- what is run

# name: options
WAYS = {f"every {m}, int8": f"--inner-steps {m} --wire int8" for m in (2, 5, 10, 20)}
WAYS |= {f"every {m}, int8, delay half": f"{WAYS[f'every {m}, int8']} --delay half" for m in (5, 10)}
METHODS = {         # the rate is 3e-3, which DDP may double after a shorter warm-up
    "DDP": {**{wire: f"--wire {wire}" for wire in ("fp32", "bf16", "int8")},
            "int8, rate 6e-3": "--wire int8 --warmup 5 --lr 6e-3"},
    "DiLoCo": WAYS, "NoLoCo": WAYS}
SURVIVE = "every 5, int8, survive 6", f"{WAYS['every 5, int8']} --survive 6"
TURNS = " ".join(f"--rate {h}@{t}={20 if t % 40 else 200}" for t in range(20, 400, 20) for h in (2, 5))
SLOWER = f"one host with {CPU / 3:.2f} of a processor"
PLAIN, CUT, QUICK = "200 Mbit/s, 5 ms", "one host cut off twice for 15 s", "1000 Mbit/s, 0 ms"
NETWORKS = {        # name: (options of tools/hosts.py, ms one way, Mbit/s of the hosts' links by turns)
    "50 Mbit/s, 25 ms": ("--mbit 50 --latency 25", 25, [[50] * 8]),
    PLAIN: ("--latency 5", 5, [[200] * 8]),
    "one host 20 Mbit/s": ("--latency 5 --slow 5=20", 5, [[200] * 7 + [20]]),
    "two hosts 20 Mbit/s by turns": (f"--latency 5 {TURNS}", 5, [[200] * 8, [200] * 6 + [20] * 2]),
    SLOWER: (f"--latency 5 --cpu 5={CPU / 3:.3f}", 5, [[200] * 8]),
    CUT: ("--latency 5 --cut 5@40+15 --cut 5@72+15", 5, [[200] * 8]),
    QUICK: ("--mbit 1000", 0, [[1000] * 8])}
# QUICK has no tries with a delay. By turns a delay was not the best: five seeds beside the best.
BESIDE = "two hosts 20 Mbit/s by turns", "NoLoCo", "every 5, int8, delay half"


def between_hosts(name, method, way, options, half="test"):
    program = f"{PROGRAM} {SECONDS} --half {half}" + " --pace first" * (name == CUT)
    return Run(f"{name}: {method}, {way}", f"{COMMON} --method {method.lower()} {options}",
               program=program, hosts=f"--cpu {CPU} {NETWORKS[name][0]}")


def tries_runs(steps):
    for name, (method, ways) in itertools.product(NETWORKS, METHODS.items()):
        for way, options in ways.items() if name != CUT else ():        # the settings of PLAIN
            if name != QUICK or "delay" not in way:
                yield between_hosts(name, method, way, f"{options} --eval-sequences 16", "validation")


def grid_runs(steps):
    """Of each method on each network that `tries` has: the best way without --delay, then the best of all.

    A try (steps): each method's first way, 3 s by the clock on the last network, between two hosts.
    """
    if steps:
        for method, ways in METHODS.items():
            way, options = next(iter(ways.items()))
            run = between_hosts(QUICK, method, way, f"{options} --warmup 4 --eval-sequences 8")
            yield replace(run, processes=2, program=f"{PROGRAM} 3", hosts=NETWORKS[QUICK][0])
        return
    tried = published("tries")
    for name, (method, ways) in itertools.product(NETWORKS, METHODS.items()):
        labels = {way: f"{PLAIN if name == CUT else name}: {method}, {way}" for way in ways}
        losses = {way: tried[label][0].final for way, label in labels.items() if label in tried}
        plain = {way: loss for way, loss in losses.items() if "delay" not in way}
        for best in dict.fromkeys(min(some, key=some.get) for some in (plain, losses) if some):
            yield between_hosts(name, method, best, ways[best])
    yield between_hosts(*BESIDE, WAYS[BESIDE[-1]])
    yield from (between_hosts(name, "NoLoCo", *SURVIVE) for name in (SLOWER, CUT))


# ---------------------------------------------------------------- one clock for all


@dataclass
class Clock(report.Meter):
    """Gives the run as many steps as fit into own.clock seconds at the slowest rank's pace since half of the
    warm-up.

    The pace is that of the first steps, or renewed at each evaluation. The clock stands still while replicas
    evaluate, from when the last one has come until all go on.
    """
    run: object = None              # a train.Run
    own: object = None              # the options of `clocked`
    begun: tuple = ()               # (seconds, steps) at half of the warm-up: the first steps are slower
    paced: bool = False

    def pause(self):
        self.meet()
        super().pause()

    def go_on(self):
        if self.paced and self.own.pace == "latest" and self.run.step < self.run.o.steps:
            self.fit(f"pace/{self.run.step}", self.seconds, self.run.step)
        self.meet()
        super().go_on()

    def meet(self):
        dist.barrier()

    def add(self, *numbers):
        super().add(*numbers)
        self.reckon()

    def reckon(self):
        """After a step: the pace counts from half of the warm-up on; at its end it sets the steps."""
        now, steps, o = time.perf_counter() - self.clock, self.run.step + 1, self.run.o
        if not self.begun and self.run.step >= o.warmup // 2:
            self.begun = now, steps
        elif not self.paced and self.run.step >= o.warmup:              # outer steps of the warm-up are done
            self.paced, o.eval_every = True, 0
            self.fit("first pace", now, steps)

    def fit(self, key, seconds, steps):
        """All ranks set the numbers that fit the slowest."""
        pace = min(self.run.job.share(f"{key}, each", self.pace(seconds, steps)))
        agreed = self.run.job.agree_on(key, lambda: self.numbers(pace, seconds, steps))
        self.run.o.steps, self.run.o.eval_every = agreed

    def pace(self, seconds, steps):
        """Steps a second of this rank."""
        return (steps - self.begun[1]) / (seconds - self.begun[0])

    def numbers(self, pace, seconds, steps):
        """(steps in all, a delayed message landed; those between evaluations, which follow outer steps)"""
        o, m, left = self.run.o, self.run.o.inner_steps or 1, self.own.clock - seconds
        gap, delay = self.own.clock / EVALUATIONS[self.own.half], o.delay or 0
        in_all = max(steps // m + 1, round((steps - delay + left * pace) / m)) * m + delay
        nearly_over = o.eval_every and 0 < left < 0.75 * gap            # the last part stays as planned
        return o.steps if nearly_over else in_all, o.eval_every or max(1, round(gap * pace / m)) * m


class Leading(Clock):
    """Rank 0's with --survive: its own pace counts, and no replica waits for another's evaluation."""

    def meet(self):
        """Nobody waits."""

    def fit(self, key, seconds, steps):
        o = self.run.o
        o.steps, o.eval_every = self.numbers(self.pace(seconds, steps), seconds, steps)
        self.run.job.store.set("clock", json.dumps([o.steps, o.eval_every]))


class Following(Leading):
    """The other ranks': after outer steps they read rank 0's newest numbers, if there are any yet."""

    def reckon(self):
        o, store = self.run.o, self.run.job.store
        outer = self.run.step >= o.warmup and self.run.step % o.inner_steps == 0
        if outer and store.check(["clock"]):
            o.steps, o.eval_every = json.loads(store.get("clock"))


class Holding(train.Routes):
    """Plans for nodes that hold `memory` microbatches at once."""
    memory = 3

    def links(self):
        found = super().links()
        return found and replace(found, memory=self.memory)


def clocked(argv):
    """train.main for so many seconds, on a part of the held-out text."""
    p = Parser("train.py's options, and these")
    p.add_argument("--clock", type=float, help="seconds to train; 0: only time outer steps")
    p.add_argument("--half", choices=("validation", "test"), default="test", help="of the held-out text")
    p.add_argument("--pace", choices=("first", "latest"), default="latest", help="by which the clock reckons")
    p.add_argument("--memory", type=int, default=3, help="microbatches that a node holds, for the planner")
    job = Job()
    own, argv = job.together(p.parse_known_args, argv)
    if job.world == 1:
        job.refuse("--clock is for several processes: start torchrun with --nproc-per-node 2 or more")
    Holding.memory = own.memory
    length = "--eval-every 1000000 --steps 1000000" if own.clock else "--steps 1"
    run = built(job, [*argv, *length.split()], Routes=Holding)
    if run.o.replan:
        job.refuse("--clock has routes of its own: drop --replan")
    if run.corpus:
        half = run.corpus.heldout.chunk(2)[own.half == "test"]
        run.corpus.heldout = half.chunk(len(run.stages[0]))[run.stages[0].index(job.rank)]
    if own.clock:
        kind = Clock
        if run.o.survive:
            kind = Following if job.rank else Leading
        run.meter = kind(run=run, own=own)
    else:
        time_alone(run)
    train.train(run)
    if job.rank == 0:
        report.replace(run.folder / "config.json", json.dumps(vars(run.o), indent=1))   # steps that fitted


# ---------------------------------------------------------------- tables and pictures of both


def rows_of(found):
    """(network, method, way, its runs) of each row, network by network."""
    rows = [(*re.fullmatch("(.+): (.+?), (.+)", label).groups(), seeds)
            for label, seeds in results(found).items()]
    return sorted(rows, key=lambda row: list(NETWORKS).index(row[0]))


def predicted(method, wire, network):
    """Seconds of a synchronisation by rates and latencies alone, mean over hosts, at each turn."""
    _, latency, turns = NETWORKS[network]
    megabits = MEGABITS * BYTES[wire]
    for mbit in turns:
        pairs = [megabits / min(pair) for pair in itertools.combinations(mbit, 2)]
        messages = 2 if wire == "int8" else 2 * (len(mbit) - 1)         # one after the other
        whole = messages * latency / 1000 + 2 * (1 - 1 / len(mbit)) * megabits / min(mbit)
        yield latency / 1000 + statistics.mean(pairs) if method == "NoLoCo" else whole


def share_of(others, seeds):
    """When each run reaches the loss that the other of its seed ends with, as a share of the other's time."""
    if others is seeds:
        return ""
    others = same_seeds(seeds, others)
    found = [reaches(other.final, run.losses, run.curves["seconds"]) for run, other in zip(seeds, others)]
    return spread_of_reached([at and at / end for at, end in zip(found, ends(others))], ".0%")


def more_than(others, seeds):
    """Nats per byte over the other of its seed, at the moment when the first of the two runs ends."""
    if others is seeds:
        return ""
    pairs = [(run, other, min(ends([run, other]))) for run, other in zip(seeds, same_seeds(seeds, others))]
    return interval_of([loss_at(end, run) - loss_at(end, other) for run, other, end in pairs], "+.3f")


def show_tries(found):
    show_head("network | method | setting | steps | validation, nats per byte")
    for name, method, way, seeds in rows_of(found):
        show_row(name, method, way, f"{seeds[0].steps[-1]:.0f}", f"{seeds[0].final:.3f}")


def show_grid(found):
    show_head("network | method | steps | seconds of a synchronisation | predicted "
              "| held-out nats per byte | over DiLoCo's | DiLoCo's last loss, in so much of its time | DDP's")
    rows = rows_of(found)
    base = {(name, method): seeds for name, method, _, seeds in rows if method != "NoLoCo"}
    for name, method, way, seeds in rows:
        delayed = "delay" in way        # then departure and landing are counted apart
        guesses = "hidden" if delayed else " or ".join(
            f"{seconds:.2f}" for seconds in predicted(method, seeds[0].wire, name))
        held = spread_of([(1 + delayed) * run.curves["sync_seconds"][-1] for run in seeds], ".2f")
        ddp, diloco, last = base[name, "DDP"], base[name, "DiLoCo"], spread_of(finals(seeds))
        show_row(name, f"{method}, {way}", spread_of([run.steps[-1] for run in seeds], ".0f"), held, guesses,
                 last, more_than(diloco, seeds), share_of(diloco, seeds), share_of(ddp, seeds))


def draw_lines(axis, title, lines):
    """lines: (runs, text, colour). Dashed: with --delay."""
    for runs, text, colour in lines:
        x, curves = timed(runs)
        band(axis, curves, x, COLOURS[colour], ls="--" if "delay" in text else "-", label=text)
    axis.set(xlabel="measured seconds (bands: range of seeds)", ylabel="held-out nats per byte", title=title)
    label_ends(axis)


def draw_grid(plt, found):
    """The first two networks."""
    rows = rows_of(found)
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH, 4.4), subplot_kw={"ylim": (2, 2.8)})
    for axis, network in zip(axes, dict.fromkeys(row[0] for row in rows)):
        here = [(method, way, seeds) for name, method, way, seeds in rows if name == network]
        *_, diloco = (seeds for method, _, seeds in here if method == "DiLoCo")
        *_, (_, way, noloco) = here
        late = ", delayed," * ("delay" in way)
        draw_lines(axis, f"{network}: NoLoCo's loss{late} over DiLoCo's\n"
                   f"when the first ends {more_than(diloco, noloco)}",
                   [(seeds, f"{method}, {way}".replace(", ", "\n"), method) for method, way, seeds in here])
    return figure


# ---------------------------------------------------------------- an outer step alone

ALONE = {"all-reduce": ("diloco", "fp32"), "all-reduce, one byte": ("diloco", "int8"),
         "pair": ("noloco", "fp32"), "pair, one byte": ("noloco", "int8")}
SHARES, LATENCIES = {2: CPU, 8: CPU, 16: CPU / 2}, (0, 5, 25, 50, 100)       # of a processor, by hosts


def latency_runs(steps):
    for n, ms in itertools.product(SHARES, LATENCIES):
        yield Run(f"{n} hosts, {ms} ms", f"{COMMON} --method local", n, program=f"{PROGRAM} 0",
                  after=lambda folder: json.loads((folder / "alone.json").read_text()),
                  hosts=f"--cpu {SHARES[n]} --mbit 200 --latency {ms}")


def time_alone(run, first=2, trials=7):
    """Write the seconds of each kind's trials, until the last rank is through, to alone.json.

    All ranks begin at one moment: hosts share this machine's clock. The first trials connect.
    """
    found, params = {}, list(run.model.parameters())
    for name, (method, wire) in ALONE.items():
        outer, seconds = KINDS[method][wire](params, inner_steps=1), []
        for _ in range(first + trials):
            moment = torch.tensor(time.monotonic() + 0.5, dtype=torch.float64)
            dist.broadcast(moment, 0)
            time.sleep(max(0.0, float(moment) - time.monotonic()))
            outer.step()
            seconds.append(time.monotonic() - float(moment))
        found[name] = [*map(max, zip(*run.job.share(f"alone/{name}", seconds[first:])))]
    if run.job.rank == 0:
        report.replace(run.folder / "alone.json", json.dumps(dict(alone=found)))


def over_a_pair(run, wire=""):
    """The median seconds of an all-reduce over those of a pair's exchange."""
    whole, pair = (statistics.median(run.alone[name + wire]) for name in ("all-reduce", "pair"))
    return whole / pair


def show_latency(found):
    show_head("hosts, ms one way | " + " | ".join(ALONE) + " | all-reduce over pair | in one byte")
    for label, (run, *_) in results(found).items():
        show_row(label, *(spread_of(run.alone[name], ".2f") for name in ALONE),
                 f"{over_a_pair(run):.1f}", f"{over_a_pair(run, ', one byte'):.1f}")


def draw_latency(plt, found):
    runs = results(found)
    figure, axes = plt.subplots(1, len(SHARES), figsize=(WIDTH, 4), sharey=True)
    for axis, n in zip(axes, SHARES):
        here = [runs[f"{n} hosts, {ms} ms"][0] for ms in LATENCIES]
        for name in ALONE:
            trials = list(zip(*(run.alone[name] for run in here)))
            colour = COLOURS["NoLoCo" if "pair" in name else "DiLoCo"]
            band(axis, trials, LATENCIES, colour, ls="--" if "byte" in name else "-", label=name)
        shares = sorted(over_a_pair(run) for run in here)
        axis.set(title=f"{n} hosts, {SHARES[n]:g} of a processor:\nall-reduce / pair in fp32 "
                 f"{shares[0]:.1f} to {shares[-1]:.1f}", xlabel="ms one way")
    axes[0].set(ylabel="seconds of an outer step (bands: range of trials)", ylim=(0, None))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


# ---------------------------------------------------------------- the pipeline between cities

CITIES = "Belgium Canada Germany Iowa Japan LA NL Oregon".split()       # two for each stage, in turn
FAST = "Belgium Canada Iowa LA Oregon".split()      # the origins, and those which add least latency
FULL, HALF = "full, planned", "50% skipped, rho rule, memory 3"
PLANS = {               # name: (options, the planner's memory, colour)
    "full, in the order of ranks": ("--routing dtfm", 3, "full"),
    FULL: ("--routing no-swaps", 3, "planned"),
    "full, planned, memory 6": ("--routing no-swaps", 6, None),
    "full, planned, five fast hosts alone": ("--routing no-swaps", 3, "random"),
    **{f"25% skipped, rho rule, memory {n}": ("--routing skippipe --skip 0.25", n, "25%" if n == 3 else None)
       for n in (3, 4, 5, 6)},
    "25% skipped, memory 3": ("--routing skippipe --skip 0.25 --unscaled", 3, None),
    HALF: ("--routing skippipe --skip 0.5", 3, "50%")}


def between_cities(names):
    """Options of tools/hosts.py: the links published with SkipPipe's code."""
    links, options = city_links(), [f"--cpu {CPU} --mbit 0"]
    for i, j in itertools.combinations(range(len(names)), 2):
        seconds, speed = links[names[i], names[j]]
        options.append(f"--latency {i}-{j}={1000 * seconds:.3g} --mbit {i}-{j}={speed * 8e-6:.0f}")
    return " ".join(options)


def pipeline_runs(steps):
    for name, (options, memory, _) in PLANS.items():
        names, stages = (FAST, "2,1,1,1") if "alone" in name else (CITIES, "2,2,2,2")
        yield Run(name, f"{TINY} --stages {stages} --microbatches 3 --batch 2 --eval-sequences 256 "
                  f"--warmup {FIRST} --method noloco --inner-steps 10 {options}", len(names),
                  program=f"{PROGRAM} {IN_PIPELINES} --memory {memory}", hosts=between_cities(names))


def show_pipeline(found):
    runs = results(found)
    show_head("paths | steps | seconds of an iteration, measured | the plan's, simulated | held-out "
              "nats per byte | over the full one's, planned | its last loss, in so much of its time")
    for name, seeds in runs.items():
        took = [statistics.median(run.curves["iteration_seconds"]) for run in seeds]
        plan = [run.curves["simulated_seconds"][-1] for run in seeds]
        show_row(name, spread_of([run.steps[-1] for run in seeds], ".0f"), spread_of(took),
                 spread_of(plan), spread_of(finals(seeds)), more_than(runs[FULL], seeds),
                 share_of(runs[FULL], seeds))


def draw_pipeline(plt, found):
    figure, axis = plt.subplots(figsize=(WIDTH, 4.6))
    runs = results(found)
    half = more_than(runs[FULL], runs[HALF])
    draw_lines(axis, f"Half skipped, nats over the planned full pipeline: {half}\n"
               "(4 stages of 2 hosts between eight cities)",
               [(seeds, name.removesuffix(", memory 3").replace(", ", "\n", 1), PLANS[name][2])
                for name, seeds in runs.items() if PLANS[name][2]])
    return figure


if __name__ == "__main__":
    if "--clock" in sys.argv:
        clocked(sys.argv[1:])
    else:
        headline(__doc__, {"tries": Part(tries_runs, show_tries, seeds=(9,)),
                           "grid": Part(grid_runs, show_grid, draw_grid, seeds=(0, 1, 2, 3, 4)),
                           "latency": Part(latency_runs, show_latency, draw_latency, seeds=(0,)),
                           "pipeline": Part(pipeline_runs, show_pipeline, draw_pipeline)})
