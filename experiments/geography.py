"""SkipPipe between real hosts: iterations measured beside what the plan's simulation says, loss against time.

    python -m experiments.geography [--seeds 0 1 2] [--steps N] [--out DIR] [--plot]

4 stages of 2 hosts (tools/hosts.py), whose links have three rates: in stages 1, 2 and 3 one of the two hosts
is slow. Links are measured at the start, as train.py does. The time model lets them carry any number of
messages at once; a host's real link shares its rate among them. A message is 256 kB: 84 ms at 25 Mbit/s,
10 ms at 200, beside some 10 ms of computing for a task. `no limit` shows what computing takes: 60 steps.
"""
import statistics

from experiments.hosts import FIRST, FREE, TINY, Links, how_long, seconds_to
from experiments.pictures import COLOURS, show_head, show_row
from experiments.runs import Run, finals, headline, lines, results, spread_of, spread_of_reached

LINKS = Links(200, {3: 50, 4: 50, 7: 25})
PLANS = {           # name: options
    "full, in the order of ranks": "--routing dtfm",
    "full, planned": "--routing no-swaps",
    "25% skipped, random paths": "--routing dtfm-skip --skip 0.25 --unscaled",
    "25% skipped, SkipPipe": "--routing skippipe --skip 0.25 --unscaled",
    "25% skipped, SkipPipe, Eq. 6": "--routing skippipe --skip 0.25",
    "50% skipped, SkipPipe, Eq. 6": "--routing skippipe --skip 0.5",
}
COMMON = (f"{TINY} --stages 2,2,2,2 --microbatches 3 --batch 4 --warmup {FIRST} "
          "--eval-sequences 16 --method noloco --inner-steps 10")


def runs(steps):
    program, length = how_long(steps)
    for name, options in PLANS.items():
        yield Run(name, f"{COMMON}{length} {options}", program=program, hosts=LINKS.options())
    for name in ("full, in the order of ranks", "25% skipped, SkipPipe", "50% skipped, SkipPipe, Eq. 6"):
        options = f"{COMMON} --steps {steps or 60} {PLANS[name]}"
        yield Run(f"{name}, {FREE}", options, hosts=Links(0).options(), first=True)


def table(found):
    runs = results(found)
    show_head("paths | seeds | steps | seconds of an iteration, measured | the plan's, simulated "
              "| measured over simulated | held-out nats per byte | seconds to the full one's last loss")
    for name, seeds in runs.items():
        took = [statistics.median(run.curves["iteration_seconds"]) for run in seeds]
        planned = [run.curves["simulated_seconds"][-1] for run in seeds]
        over = [a / b for a, b in zip(took, planned)]
        show_row(name, len(seeds), spread_of([run.steps[-1] for run in seeds], ".0f"), spread_of(took),
                 spread_of(planned), spread_of(over, ".2f"), spread_of(finals(seeds)),
                 spread_of_reached(seconds_to(runs["full, planned"], seeds), ".0f"))


def draw(plt, found):
    figure, axis = plt.subplots(figsize=(8, 4), layout="constrained")
    runs = results(found)
    for colour, name in zip(COLOURS, PLANS):
        lines(axis, runs[name], name, colour)
    axis.set(xlabel="seconds, measured", ylabel="held-out nats per byte",
             title="4 stages of 2 hosts, links of 200, 50 and 25 Mbit/s")
    figure.legend(loc="outside right upper")
    return figure


if __name__ == "__main__":
    headline("geography", __doc__, runs, table, draw)
