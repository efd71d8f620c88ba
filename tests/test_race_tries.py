"""The search for the settings of the race between hosts."""

import pytest

import train
from experiments import harness, race
from experiments.race_tries import AGAIN, RATE, TRIED, TRIES, chosen
from tests.test_race import asked, kept


def test_each_method_has_six_tries():
    for settings in TRIES.values():
        assert len(set(settings)) == 6


def test_the_best_two_tries_run_again_and_the_better_mean_races(monkeypatch, tmp_path):
    """On the first seed the fourth try is best, then the second; on the other the second is far better, and
    half its rate is better still, a quarter is not."""
    ran, on_first = [], (1.5, 1.2, 1.6, 1.1, 1.4, 1.3)

    def train_once(name, run):
        facts = run.facts
        ran.append(facts)
        settings = [race.named(setting) for setting in TRIES[facts["point"], facts["method"]]]
        number = settings.index(dict(m=facts["m"], K=facts["K"], D=facts["D"], rate=RATE))
        loss = {TRIED: on_first[number], AGAIN: 1.0 if number == 1 else 1.9}[facts["seed"]]
        loss += {0.5: -0.2, 1: 0.0, 2: 0.3, 0.25: 0.1}[facts["rate"] / RATE]
        return kept(run, loss)

    monkeypatch.setattr(harness, "train_once", train_once)
    with pytest.raises(train.BadInput, match=f"seed {AGAIN}"):
        chosen(asked(tmp_path, seeds=[TRIED]))
    assert len(ran) == 9 * 6                                # of nine lists: six tries,
    found = chosen(asked(tmp_path))
    assert len(ran) == 9 * (6 + 2 + 4 + 2)                  # two again, two rates and one beyond on both
    for raced, setting in found.items():
        *second, rate = TRIES[raced][1]
        assert setting == (*second, rate / 2)
    chosen(asked(tmp_path))
    assert len(ran) == 9 * (6 + 2 + 4 + 2)                  # and none again
