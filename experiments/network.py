"""Loss against real time on real links: 8 hosts, one clock, real messages.

    python -m experiments.network [hosts cuts geography] [--seeds 0 1 2] [--steps N] [--out DIR] [--plot]

hosts       one replica of the tiny model on each host, every method for the same 100 measured seconds
cuts        one host is cut off for 15 s every minute; beside that the same command without cuts
geography   SkipPipe on 4 stages of 2 hosts: measured iterations beside the plan's simulated ones

The hosts are network namespaces of this machine with a link each (tools/hosts.py; root and iproute2). A step
is one sequence a replica: two cores compute for eight hosts, and the links are to be measured. Under cuts
NoLoCo trains with --survive: a replica that misses its partner goes on without it. DDP and DiLoCo wait until
the link is back and TCP has noticed.

    python -m experiments.network --train SECONDS ...   train.py's options: about as many steps as fit
    python -m experiments.network --count ...           train.py's options: evaluations count as time
"""
import json
import math
import statistics
import sys
import time
from dataclasses import dataclass

import torch.distributed as dist

import train
from experiments.pictures import COLOURS, WIDTH, label_ends, show_head, show_row
from experiments.runs import (Part, Run, band, built, ends, finals, headline, loss_at, over, reaches, results,
                              same_seeds, spread_of, spread_of_reached, timed)
from plumbing.processes import BadInput, Job
from plumbing.report import Meter, replace

SECONDS, EVALUATIONS, FIRST = 100, 8, 20
METHODS = {
    "DDP": "ddp",
    "DDP, warm-up 5, 6e-3": "ddp --warmup 5 --lr 6e-3",     # few steps fit
    **{f"DiLoCo, every {m}": f"diloco --inner-steps {m}" for m in (2, 5, 20, 50)},
    **{f"NoLoCo, every {m}": f"noloco --inner-steps {m}" for m in (5, 20)},
    **{f"NoLoCo, every {m}, one byte": f"noloco --inner-steps {m} --wire int8" for m in (2, 5)},
}
QUICK = "DDP", "DiLoCo, every 5", "NoLoCo, every 5", "NoLoCo, every 5, one byte"
BEST = ("DDP, warm-up 5, 6e-3", "DiLoCo, every 20", "DiLoCo, every 50", "NoLoCo, every 20",
        "NoLoCo, every 5, one byte")
TINY = "--hidden 128 --mlp 512 --heads 4"       # train.py's own
COMMON = f"{TINY} --microbatches 1 --batch 1 --eval-sequences 16 --warmup {FIRST}"


TURNS = " ".join(f"--rate {host}@{t}={200 if t % 40 == 0 else 20}" for t in range(20, 300, 20)
                 for host in (2, 5))
# name: (options of tools/hosts.py, what did best in a search with one seed)
LINKS = {
    "50 Mbit/s": ("--mbit 50", ("DDP", "DiLoCo, every 20", "NoLoCo, every 20",
                                "NoLoCo, every 2, one byte")),
    "200 Mbit/s, one host 20": ("--mbit 200 --slow 5=20", BEST),
    "200 Mbit/s, two hosts 20 by turns": (f"--mbit 200 {TURNS}", ("DDP", *BEST)),
    "200 Mbit/s": ("--mbit 200", (*QUICK, "DiLoCo, every 2")),
}


def hosts_runs(steps):
    """A try (steps): one of each kind between two hosts, by train.py itself."""
    links = {"50 Mbit/s": ("--mbit 50", QUICK)} if steps else LINKS
    program, length = how_long(steps)
    for name, (wires, methods) in links.items():
        for method in methods:
            yield Run(f"{name}: {method}", f"{COMMON}{length} --method {METHODS[method]}",
                      2 if steps else 8, program=program, hosts=wires)


def how_long(steps):
    """(program, options): as many steps as fit, or in a try so many."""
    return (Run.program, f" --steps {steps}") if steps else (f"-m experiments.network --train {SECONDS}", "")


# ---------------------------------------------------------------- one clock for all


@dataclass
class Clock(Meter):
    """Stands still while replicas evaluate, from when the last one has come until all go on. It gives the run
    as many steps as fit at the pace so far."""
    run: object = None              # a train.Run
    whole: float = 0.0              # seconds

    def pause(self):
        dist.barrier()
        super().pause()

    def go_on(self):
        if self.run.step:
            self.fit(f"pace/{self.run.step}", self.seconds, self.run.step)
        dist.barrier()
        super().go_on()

    def add(self, *numbers):
        super().add(*numbers)
        if self.run.step == self.run.o.warmup:              # outer steps of the warm-up are done
            self.run.o.eval_every = 0                       # not known yet
            self.fit("first pace", time.perf_counter() - self.clock, self.run.step + 1)

    def fit(self, key, seconds, steps):
        """Set the steps in all and, once, the steps between evaluations, which follow outer steps."""
        o, m, gap = self.run.o, self.run.o.inner_steps or 1, self.whole / EVALUATIONS

        def rounds():                                       # of m steps, in a second; by rank 0's clock
            nearly_over = o.eval_every and self.whole - seconds < 1.5 * gap
            return 0.0 if nearly_over else steps / seconds / m          # the last part stays as planned

        pace = self.run.job.agree_on(key, rounds)
        if pace:
            o.steps = max(steps // m + 1, round(self.whole * pace)) * m
        o.eval_every = o.eval_every or max(1, round(gap * pace)) * m


class Counting(Meter):
    """Evaluations count, so that a cut that falls into one is not free. Seconds are rank 0's, until that
    evaluation begins."""

    def go_on(self):
        if not self.seconds:
            super().go_on()

    def pause(self):
        super().pause()
        super().go_on()


def clocked(argv):
    """train.main for argv[0] seconds. The steps of the warm-up are the first measure of the pace."""
    job = Job()
    seconds = job.together(read_seconds, argv)
    if job.world == 1:
        job.refuse("--train is for several processes: start torchrun with --nproc-per-node 2 or more")
    if "--survive" in argv:
        job.refuse("--train has no clock for --survive: use --count")
    run = built(job, [*argv[1:], "--eval-every", "1000000", "--steps", "1000000"])
    run.meter = Clock(run=run, whole=seconds)
    train.train(run)
    if job.rank == 0:
        replace(run.folder / "config.json", json.dumps(vars(run.o), indent=1))  # the steps that fitted


def read_seconds(argv):
    try:
        seconds = float(argv[0])
    except (IndexError, ValueError):
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise BadInput(f"--train takes the seconds to train, then train.py's options, got {argv[:1]}")
    return seconds


def counted(argv):
    """train.main by the other clock."""
    run = built(Job(), argv)
    run.meter = Counting()
    train.train(run)


# ---------------------------------------------------------------- hosts


def by_links(found):
    """{links: {method: [a Result per seed]}}"""
    runs = {}
    for label, seeds in results(found).items():
        links, name = label.split(": ")
        if links != "no limit":
            runs.setdefault(links, {})[name] = seeds
    return runs


KINDS = "DDP", "DiLoCo", "NoLoCo", "NoLoCo, one byte"


def best(runs, kind):
    """The name of the kind's try with the least loss at the end, among those with most seeds."""
    first, one_byte = kind.split(",")[0], kind.endswith("byte")
    names = [name for name in runs if name.split(",")[0] == first and name.endswith("byte") == one_byte]
    most = max(len(runs[name]) for name in names)
    return min((name for name in names if len(runs[name]) == most),
               key=lambda name: statistics.mean(finals(runs[name])))


def seconds_to(others, seeds):
    """Seconds until each run reaches the loss that the other of its seed ends with; None: never."""
    return [reaches(other.final, run.losses, run.curves["seconds"])
            for run, other in zip(seeds, same_seeds(seeds, others))]


def share_of(others, seeds):
    """The same as shares of the other's time."""
    found = zip(seconds_to(others, seeds), ends(same_seeds(seeds, others)))
    return spread_of_reached([second and second / whole for second, whole in found], ".0%")


def over_at_the_end(others, seeds):
    """Perplexity over the other's, when the shorter run of both ends."""
    pairs = list(zip(seeds, same_seeds(seeds, others)))
    moments = [min(ends(pair)) for pair in pairs]
    losses = zip(*([loss_at(moment, run) for run in pair] for moment, pair in zip(moments, pairs)))
    return spread_of(over(*losses), "+.0%")


def show_hosts(found):
    runs = by_links(found)
    show_head("links | method | seeds | DDP's last loss, in so much of its time | DiLoCo's "
              "| perplexity per byte over DiLoCo's")
    for links, methods in runs.items():
        ddp, diloco, *ours = [best(methods, kind) for kind in KINDS]
        for name in ours:
            seeds = methods[name]
            show_row(links, name, len(seeds), share_of(methods[ddp], seeds), share_of(methods[diloco], seeds),
                     over_at_the_end(methods[diloco], seeds))


def draw_hosts(plt, found):
    """Where one host is slow and where none is; in a try, what there is."""
    runs = by_links(found)
    shown = {links: title for links, title in {
        "200 Mbit/s, one host 20": "One of 8 hosts has 20 Mbit/s, the others 200: NoLoCo learns most",
        "200 Mbit/s": "All 8 hosts have 200 Mbit/s: DiLoCo ends lowest on average"}.items() if links in runs}
    shown = shown or {links: links for links in runs}
    figure, axes = plt.subplots(len(shown), 1, figsize=(WIDTH, 3.8 * len(shown)), layout="constrained",
                                squeeze=False)
    for axis, (links, title) in zip(axes.flat, shown.items()):
        labels = []
        for kind in KINDS:
            name = best(runs[links], kind)
            x, curves = timed(runs[links][name])
            text = name if name.endswith("byte") else f"{name}, fp32"
            colour = COLOURS[kind.split(",")[0]]
            last = band(axis, curves, x, colour, ls="--" if kind == "NoLoCo" else "-")
            labels.append((last, text.replace(", warm-up 5, 6e-3", ""), colour))
        axis.set(xlabel="measured seconds (bands: range of three seeds; fp32, one byte: a weight sent)",
                 ylabel="held-out nats per byte", title=title)
        label_ends(axis, labels)
    return figure


# ---------------------------------------------------------------- cuts

CUT = {"uncut": "", "cut": "".join(f" --cut 5@{t}+15" for t in range(30, 600, 60))}
CUT_METHODS = {         # name: (steps, options); an eighth of the steps is of whole rounds
    "DDP": (200, "ddp"),
    "DiLoCo, every 20": (640, "diloco --inner-steps 20"),
    "NoLoCo, every 20": (800, "noloco --inner-steps 20 --survive 6"),
    "NoLoCo, every 2, one byte": (560, "noloco --inner-steps 2 --wire int8 --survive 6"),
}


def cuts_runs(steps):
    program = Run.program if steps else "-m experiments.network --count"
    for name, (whole, method) in CUT_METHODS.items():
        for links, more in CUT.items():
            length = f"--steps {steps or whole} --eval-every {max(1, (steps or whole) // EVALUATIONS)}"
            yield Run(f"{name}: {links}", f"{COMMON} {length} --method {method}", program=program,
                      hosts=f"--mbit 200{more}")


def pairs(found):
    """(method, its runs without cuts, with cuts) of each, with the same seeds."""
    runs = results(found)
    for name in CUT_METHODS:
        uncut, cut = (runs[f"{name}: {links}"] for links in CUT)
        yield name, same_seeds(cut, uncut), cut


def show_cuts(found):
    show_head("method | seeds | steps | seconds uncut | cut over uncut | held-out nats per byte uncut | cut "
              "| perplexity over uncut's, when uncut ends | replicas in the last loss | tokens over uncut's "
              "| outer steps alone")
    for name, uncut, cut in pairs(found):
        longer = [a / b for a, b in zip(ends(cut), ends(uncut))]
        then = [loss_at(second, run) for second, run in zip(ends(uncut), cut)]
        here = min(run.curves["ranks"][-1] for run in cut)
        seen = [a.curves["tokens"][-1] / b.curves["tokens"][-1] for a, b in zip(cut, uncut)]
        alone = [run.curves["steps_alone"][-1] for run in cut]
        show_row(name, len(cut), f"{cut[0].steps[-1]:.0f}", spread_of(ends(uncut), ".0f"),
                 spread_of(longer, ".2f"), spread_of(finals(uncut)), spread_of(finals(cut)),
                 spread_of(over(then, finals(uncut)), "+.1%"), f"{here:.0f}", spread_of(seen, ".0%"),
                 spread_of(alone, ".0f"))


def draw_cuts(plt, found):
    figure, axes = plt.subplots(1, 4, figsize=(WIDTH, 4), layout="constrained", sharey=True)
    for axis, (name, uncut, cut) in zip(axes, pairs(found)):
        colour = COLOURS[name.split(",")[0]]
        for seeds, style in ((uncut, ":"), (cut, "-")):
            x, curves = timed(seeds)
            band(axis, curves, x, colour, ls=style)
        more = statistics.mean(a / b - 1 for a, b in zip(ends(cut), ends(uncut)))
        text = name if name.endswith("byte") else f"{name}, fp32"
        title = text.replace(", ", "\n", 1) + f"\n{more:+.0%} time"
        axis.set(xlabel="measured seconds", xlim=(0, 250), title=title)
    axes[0].set(ylabel="held-out nats per byte")
    figure.suptitle("A host cut off 15 s a minute stops DDP and DiLoCo, not NoLoCo (dotted: without cuts)\n"
                    "8 hosts of 200 Mbit/s share two cores: a cut host leaves its share to the others, hence "
                    "less time\n(bands: range of three seeds)", fontsize=10.5)
    return figure


# ---------------------------------------------------------------- geography

PLANS = {               # name: options
    "full, in the order of ranks": "--routing dtfm",
    "full, planned": "--routing no-swaps",
    "25% skipped, random paths": "--routing dtfm-skip --skip 0.25 --unscaled",
    "25% skipped, SkipPipe": "--routing skippipe --skip 0.25 --unscaled",
    "25% skipped, SkipPipe, rho rule": "--routing skippipe --skip 0.25",
    "50% skipped, SkipPipe, rho rule": "--routing skippipe --skip 0.5",
}


def geography_runs(steps):
    """Links of 200 Mbit/s, but in stages 1 and 2 one host has 50, in stage 3 one has 25."""
    program, length = how_long(steps)
    for name, options in PLANS.items():
        yield Run(name, f"{TINY} --stages 2,2,2,2 --microbatches 3 --batch 4 --warmup {FIRST} "
                  f"--method noloco --inner-steps 10 --eval-sequences 16{length} {options}", program=program,
                  hosts="--mbit 200 --slow 3=50 --slow 4=50 --slow 7=25")


def show_geography(found):
    runs = results(found)
    show_head("paths | seeds | steps | seconds of an iteration, measured | the plan's, simulated "
              "| measured over simulated | held-out nats per byte | seconds to the full one's last loss")
    for name, seeds in runs.items():
        took = [statistics.median(run.curves["iteration_seconds"]) for run in seeds]
        planned = [run.curves["simulated_seconds"][-1] for run in seeds]
        ratios = [a / b for a, b in zip(took, planned)]
        show_row(name, len(seeds), spread_of([run.steps[-1] for run in seeds], ".0f"), spread_of(took),
                 spread_of(planned), spread_of(ratios, ".2f"), spread_of(finals(seeds)),
                 spread_of_reached(seconds_to(runs["full, planned"], seeds), ".0f"))


def draw_geography(plt, found):
    runs = results(found)
    figure, axis = plt.subplots(figsize=(WIDTH, 4.6), layout="constrained")
    labels = []
    for name, colour in zip(PLANS, ("full", "planned", "random", "25%", "25%", "50%")):
        x, curves = timed(runs[name])
        last = band(axis, curves, x, COLOURS[colour], ls="--" if name == "25% skipped, SkipPipe" else "-")
        labels.append((last, name.replace(", SkipPipe", "\nSkipPipe"), COLOURS[colour]))
    axis.set(xlabel="measured seconds (bands: range of three seeds)", ylabel="held-out nats per byte",
             title="Paths that skip slow hosts learn more in the same time\n"
                   "4 stages of 2 hosts, links of 200, 50 and 25 Mbit/s")
    label_ends(axis, labels)
    return figure


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        clocked(sys.argv[2:])
    elif sys.argv[1:2] == ["--count"]:
        counted(sys.argv[2:])
    else:
        headline(__doc__, {"hosts": Part(hosts_runs, show_hosts, draw_hosts),
                           "cuts": Part(cuts_runs, show_cuts, draw_cuts),
                           "geography": Part(geography_runs, show_geography, draw_geography)})
