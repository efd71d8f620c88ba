"""The search for the settings of the race between hosts."""

import pytest

import train
from experiments import harness, race
from experiments.race_tries import AGAIN, RATE, TRIED, TRIES, best_two, chosen, tries
from tests.test_race import asked, check_that_train_takes, kept


def test_each_method_has_six_tries_and_each_is_a_run_that_train_takes(tmp_path):
    for settings in TRIES.values():
        assert len(set(settings)) == 6
    check_that_train_takes(tries(TRIED, TRIES, asked(tmp_path)))


def test_train_takes_what_lies_beyond_the_ends_of_a_list(tmp_path):
    lists = {raced: [best_two([best, *settings])[1] for best in settings]
             for raced, settings in TRIES.items()}
    check_that_train_takes(tries(TRIED, lists, asked(tmp_path)))


def test_a_best_interval_at_an_end_of_the_list_has_another_one_beyond():
    short, long, between = (4, 1, 2, 0.003), (20, 4, 10, 0.003), (10, 1, 5, 0.003)
    assert best_two([short, long, between]) == [short, (2, 1, 1, 0.003)]
    assert best_two([long, short, between]) == [long, (40, 4, 20, 0.003)]
    assert best_two([between, short, long]) == [between, short]


def test_the_best_two_tries_run_again_and_the_better_mean_races(monkeypatch, tmp_path):
    """On the first seed the fourth try is best, then the second; on the others the second is far better, and
    half its rate is better still, a quarter is not. In two lists the fourth one's m is an end, and the one
    beyond takes the second's place."""
    ran, on_first = [], (1.5, 1.2, 1.6, 1.1, 1.4, 1.3)

    def train_once(name, run):
        facts = run.facts
        ran.append(facts)
        settings = [race.named(setting) for setting in TRIES[facts["point"], facts["method"]]]
        setting = dict(m=facts["m"], K=facts["K"], D=facts["D"], rate=RATE)
        number = settings.index(setting) if setting in settings else None
        if facts["seed"] == TRIED:
            loss = on_first[number]
        else:
            loss = 1.9 if number == 3 else 1.0
        loss += {0.5: -0.2, 1: 0.0, 2: 0.3, 0.25: 0.1}[facts["rate"] / RATE]
        return kept(run, loss)

    monkeypatch.setattr(harness, "train_once", train_once)
    with pytest.raises(train.BadInput, match=f"seed {AGAIN[0]}"):
        chosen(asked(tmp_path, seeds=[TRIED]))
    assert len(ran) == 9 * 6                                # of nine lists: six tries,
    found = chosen(asked(tmp_path))
    assert len(ran) == 9 * (6 + 4 + 4 + 2)                  # on two seeds: two again, two rates, one beyond
    for raced, setting in found.items():
        by_first = sorted(TRIES[raced], key=lambda one: on_first[TRIES[raced].index(one)])
        *second, rate = best_two(by_first)[1]
        assert setting == (*second, rate / 2)
    chosen(asked(tmp_path))
    assert len(ran) == 9 * (6 + 4 + 4 + 2)                  # and none again
