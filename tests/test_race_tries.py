"""The search for the settings of the race between hosts."""

import itertools
import json

from experiments import harness
from experiments.race_tries import CANDIDATES, RATE, SEEDS, chosen, tries
from tests.harness import HERE
from tests.test_race import asked, check_that_train_takes, kept


def test_each_try_is_a_run_that_train_takes(tmp_path):
    lists = {raced: [(*setting, RATE) for setting in settings] for raced, settings in CANDIDATES.items()}
    check_that_train_takes(tries(SEEDS[0], lists, asked(tmp_path)))


def test_candidates_are_the_best_two_of_the_first_six_and_one_beyond_an_end():
    records = json.loads((HERE / "results/race_first_tries.json").read_text())["records"][:54]
    for (point, method), candidates in CANDIDATES.items():
        losses = {}
        for record in records:
            if (record["point"], record["method"]) == (point, method):
                losses[record["m"], record["K"], record["D"]] = record["merged"]
        assert len(losses) == 6
        best, second, *_ = sorted(losses, key=losses.get)
        m, K, D = best
        intervals = [interval for interval, *_ in losses]
        beyond = {min(intervals): (m // 2, K, D // 2), max(intervals): (2 * m, K, 2 * D)}
        assert candidates == (best, second, *([beyond[m]] if m in beyond else []))


def test_the_best_on_the_first_seed_races_with_the_best_rate_on_both(monkeypatch, tmp_path):
    """The second candidate is best on the first seed, on which twice its rate is better still; on the mean
    of both half of it is, a quarter is not."""
    ran = []

    def train_once(name, run):
        facts = run.facts
        ran.append(facts)
        setting = facts["m"], facts["K"], facts["D"]
        loss = 1.0 if setting == CANDIDATES[facts["point"], facts["method"]][1] else 1.9
        on_each = {0.5: (-0.2, -0.2), 1: (0.0, 0.0), 2: (-0.3, 0.5), 0.25: (0.1, 0.1)}
        return kept(run, loss + on_each[facts["rate"] / RATE][SEEDS.index(facts["seed"])])

    monkeypatch.setattr(harness, "train_once", train_once)
    found = chosen(asked(tmp_path))
    candidates = len(list(itertools.chain(*CANDIDATES.values())))
    assert len(ran) == candidates + 9 * (1 + 4 + 2)     # on a second seed; two rates and one beyond
    for raced, setting in found.items():
        assert setting == (*CANDIDATES[raced][1], RATE / 2)
    chosen(asked(tmp_path))
    assert len(ran) == candidates + 9 * (1 + 4 + 2)         # and none again
