"""The search for the settings of the race between hosts."""

import pytest

import train
from experiments import harness, race
from experiments.race_tries import RATE, SEEDS, TRIES, best_two, chosen, tries
from tests.test_race import asked, check_that_train_takes, kept


def test_each_method_has_six_tries_and_each_is_a_run_that_train_takes(tmp_path):
    for settings in TRIES.values():
        assert len(set(settings)) == 6
    check_that_train_takes(tries(SEEDS[0], TRIES, asked(tmp_path)))


def test_train_takes_what_lies_beyond_the_ends_of_a_list(tmp_path):
    lists = {}
    for raced, settings in TRIES.items():
        lists[raced] = [best_two([best, *settings])[-1] for best in settings]
    check_that_train_takes(tries(SEEDS[0], lists, asked(tmp_path)))


def test_a_best_interval_at_an_end_of_the_list_has_another_one_beyond():
    short = 4, 1, 2, 0.003
    long = 20, 4, 10, 0.003
    between = 10, 1, 5, 0.003
    assert best_two([short, long, between]) == [short, long, (2, 1, 1, 0.003)]
    assert best_two([long, short, between]) == [long, short, (40, 4, 20, 0.003)]
    assert best_two([between, short, long]) == [between, short]


def test_the_best_mean_of_the_best_two_races_with_its_best_rate(monkeypatch, tmp_path):
    """On the first seed the fourth try is best, then the second; on the other one the second is far better.
    On the first one twice its rate is better still, on the mean of both half of it, and a quarter is not.
    In two lists the fourth one's m is an end, and one more is tried."""
    ran, on_first, on_second = [], (1.5, 1.2, 1.6, 1.1, 1.4, 1.3, 1.9), (1.9, 1.0, *5 * [1.9])
    by_rate = ({0.25: 0.1, 0.5: -0.2, 1: 0.0, 2: -0.3}, {0.25: 0.1, 0.5: -0.2, 1: 0.0, 2: 0.5})

    def train_once(name, run):
        facts = run.facts
        ran.append(facts)
        settings = [race.named(setting) for setting in TRIES[facts["point"], facts["method"]]]
        setting = dict(m=facts["m"], K=facts["K"], D=facts["D"], rate=RATE)
        number = settings.index(setting) if setting in settings else 6
        turn = SEEDS.index(facts["seed"])
        return kept(run, (on_first, on_second)[turn][number] + by_rate[turn][facts["rate"] / RATE])

    monkeypatch.setattr(harness, "train_once", train_once)
    with pytest.raises(train.BadInput, match=f"seed {SEEDS[1]}"):
        chosen(asked(tmp_path, seeds=SEEDS[:1]))
    assert len(ran) == 9 * 6 + 2                            # of nine lists: six tries, two more m
    found = chosen(asked(tmp_path))
    # nine lists of six; the best two on the second seed; on both two rates and one beyond them; one more m
    assert len(ran) == 9 * (6 + 2 + 4 + 2) + 2 * 2
    for raced, setting in found.items():
        *second, rate = TRIES[raced][1]
        assert setting == (*second, rate / 2)
    chosen(asked(tmp_path))
    assert len(ran) == 9 * (6 + 2 + 4 + 2) + 2 * 2          # and none again
