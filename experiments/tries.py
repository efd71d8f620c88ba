"""The race's settings: tries on seeds of their own, before its first run, as many for DiLoCo as for
NoLoCo.

    python -m experiments.tries [--show]         as root; --show: no runs

At each point of experiments/race.py each method has six tries: three settings at two rates. All run
on seed 100; then the best setting at each rate on seeds 101 and 102, and the better mean of the
three is chosen. DDP, a control, has two tries on seed 100. In all 62 runs of 90 s and some 30 s
around them: two hours of two idle cores.

First the best two went on, of whatever rates. Seed 100 likes the higher rate, seeds 101 and 102
do not, and of DiLoCo at one slow host no setting at the lower rate went on. So the rule was
changed, before the race's first run. Rows of tries that it leaves out stay in the file. At short
messages, a control, nothing is tried for NoLoCo and DiLoCo: they have the lower rate, too.

The settings: the earlier race's at that point (commit 4fb55dd); what the formula of docs/speed.md
gives for that network and the slowest host's step, at 5 ms without a delay; and neighbours with
fewer messages. By speed the earlier one is not possible: a delay needs an m of 4, so that the slow
host's half is 2.
Who is chosen is written into race.py, by hand, and committed; a test compares.
"""
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

from experiments import turns
from experiments.harness import FOLDERS
from experiments.race import POINTS, SECONDS, ddp, diloco, noloco
from experiments.tables import Table
from experiments.turns import counted_rows, take_turns
from train import BadInput, Parser

RATES = 0.003, 0.006
SEEDS = 100, 101, 102
SETTINGS = {            # {point: {method: its m, K, D}}
    "one slow host": {noloco: [(2, 2, 1), (2, 1, 0), (5, 1, 1)],
                      diloco: [(2, 2, 1), (2, 1, 0), (5, 1, 1)]},
    "one slow host, m by speed": {noloco: [(2, 1, 0), (4, 1, 1), (10, 1, 1)],
                                  diloco: [(2, 1, 0), (4, 1, 1), (10, 1, 1)]},
    "high latency": {noloco: [(5, 5, 1), (1, 1, 1), (4, 1, 2)],
                     diloco: [(10, 5, 2), (10, 1, 5), (4, 1, 2)]},
    "short messages": {ddp: [()]},
}


@dataclass
class Contest:
    """A method's tries at a point, on these seeds."""
    point: object               # a race.Point
    tries: list                 # race.Racers
    seeds: tuple
    program: str = "experiments.tries"      # which makes the tries

    def setting(self, racer):
        setting = self.point.setting(racer, SECONDS["full"])
        return replace(setting, label=f"{setting.label}, {racer.way}")

    def losses(self, found, racer):
        """{seed: the merged model's loss}"""
        setting = self.setting(racer)
        rows = counted_rows(found, [([setting], seed) for seed in self.seeds])
        return {seed: row["merged"] for seed, row in rows.get(setting.label, {}).items()}

    def best(self, found, tries, seeds):
        """The tries in the order of their mean loss on these seeds. Raises BadInput where a run is
        missing."""
        means = {}
        for racer in tries:
            losses = self.losses(found, racer)
            for seed in seeds:
                if seed not in losses:
                    raise BadInput(f"no run yet of {self.setting(racer).label}, seed {seed}: "
                                   f"python -m {self.program}")
            means[racer] = statistics.mean(losses[seed] for seed in seeds)
        return sorted(tries, key=means.get)

    def running(self, found, seed):
        """The tries that run on this seed."""
        if seed == self.seeds[0]:
            return self.tries
        winners = []
        for rate in RATES:
            tries = [racer for racer in self.tries if racer.rate == rate]
            winners.append(self.best(found, tries, self.seeds[:1])[0])
        return winners

    def chosen(self, found):
        """Raises BadInput where a run is missing."""
        last = self.running(found, self.seeds[-1])
        return self.best(found, last, self.seeds)[0]


def contests():
    found = []
    for point in POINTS:
        for method, ways in SETTINGS[point.name].items():
            tries = [method(rate, *way) for way in ways for rate in RATES]
            seeds = SEEDS[:1] if point.control else SEEDS
            found.append(Contest(point, tries, seeds))
    return found


def measure(o):
    """Contests by turns within a seed: a change of the machine's pace meets both methods."""
    for seed in SEEDS:
        for contest in contests():
            if seed in contest.seeds:
                for racer in contest.running(kept(o), seed):
                    take_turns("race_tuning", [([contest.setting(racer)], seed)], o)


def kept(o):
    return turns.kept(Path(o.out, "results", "race_tuning.json"))


def refuse_unchosen(o):
    """Raises BadInput where race.py has other settings than those chosen, or none are yet."""
    found = kept(o)
    for contest in contests():
        chosen = contest.chosen(found)
        if chosen not in contest.point.racers:
            raise BadInput(f"{contest.point.name}: write {chosen.name}, {chosen.way} into "
                           "experiments/race.py, and commit it before the first run")


def show(found):
    table = Table("tries", *(f"seed {seed}" for seed in SEEDS), "chosen")
    for contest in contests():
        try:
            chosen = contest.chosen(found)
        except BadInput:
            chosen = None                       # some are missing
        for racer in contest.tries:
            losses = contest.losses(found, racer)
            cells = [f"{losses[seed]:.3f}" if seed in losses else None for seed in SEEDS]
            table.add(contest.setting(racer).label, *cells, "yes" if racer is chosen else None)
    table.end()


def main():
    p = Parser(__doc__)
    p.add_argument("--show", action="store_true", help="no runs")
    o = SimpleNamespace(scale="full", out=FOLDERS["full"], **vars(p.parse_args()))
    if not o.show:
        measure(o)
    show(kept(o))


if __name__ == "__main__":
    try:
        main()
    except (BadInput, OSError) as error:
        sys.exit(f"error: {error}")
