"""The race of pairs that never wait: its tries, and what it compares."""

import itertools
import types

import pytest

import train
from experiments import clock, harness, race, tables, unwaiting
from tests.test_race import rows_of


def tried(best):
    """The try at this place is best by its mean; on the first seed another is."""
    runs = {}
    for contest in itertools.chain(*map(unwaiting.contests, unwaiting.METHODS)):
        for place, setting in enumerate(map(contest.setting, contest.tries)):
            first = 1.5 if place == best else 1.4 + place / 100
            losses = {100: first, 101: 1.0 if place == best else 2.0}
            runs[setting.label] = rows_of(setting, losses)
    return dict(runs=runs)


@pytest.mark.parametrize("best", range(3))
def test_the_try_of_the_lowest_mean_is_raced(best, tmp_path):
    with pytest.raises(train.BadInput, match="no run yet"):
        unwaiting.points("full", tmp_path)
    tables.save_result(tmp_path, "unwaiting_tuning", tried(best))
    for point in unwaiting.points("full", tmp_path):
        pairs, noloco, diloco = point.racers
        assert (noloco.m, noloco.D) == (diloco.m, diloco.D) == unwaiting.WAYS[point.name][best]
        assert pairs.m == 2 * noloco.m                  # so as many bytes
        assert {racer.wire for racer in point.racers} == {"fp32"}


def test_every_run_is_one_that_train_takes(tmp_path):
    for point, methods in unwaiting.METHODS.items():
        for method, contest in zip(methods, unwaiting.contests(point), strict=True):
            for racer in contest.tries:
                own = taken(contest.setting(racer))
                assert own.uneven == own.one_evaluation == (point.name == "uneven steps")
                assert own.by_speed == (method is unwaiting.diloco_by_speed) and not own.never_waits
    for scale in ("try", "plot"):
        for point in unwaiting.points(scale, tmp_path):
            own = taken(point.setting(point.racers[0], 1))
            assert own.never_waits and own.uneven == (point.name != "one slow host")


def taken(setting):
    """The clock's own options of a setting, which train.py and the clock take."""
    argv = f"--name x {harness.SMALL} {setting.options} --seed 1".split()
    run = types.SimpleNamespace(o=train.parse(argv, 8), outer=object(), stages=[range(8)])
    words = setting.program.removeprefix("-m experiments.clock").split()
    own, _ = clock.clock_parser().parse_known_args(words)
    clock.check(own, run)
    return own


def test_pairs_that_never_wait_are_compared_with_both_on_the_same_seeds(tmp_path, capsys):
    tables.save_result(tmp_path, "unwaiting_tuning", tried(1))
    runs = {}
    for point in unwaiting.points("full", tmp_path):
        for racer, more in zip(point.racers, (0.0, 0.1, 0.3)):
            losses = {seed: 1.5 + seed / 100 + more for seed in range(race.SEEDS["full"])}
            runs[point.label(racer)] = rows_of(point.setting(racer, race.SECONDS["full"]), losses)
    found = dict(runs=runs, scale="full", out=tmp_path)
    measured = unwaiting.races(found)
    assert [(point.name, other.name) for point, other, _ in measured] == [
        ("one slow host", "NoLoCo"), ("one slow host", "DiLoCo, m by speed"),
        ("uneven steps", "NoLoCo"), ("uneven steps", "DiLoCo")]
    for (*_, one), by in zip(measured, (-0.1, -0.3) * 2):
        assert one.differences == pytest.approx([by] * 16)
    unwaiting.show(found)
    assert "Runs that count: 96" in capsys.readouterr().out


def test_a_finding_counts_what_is_beyond_doubt():
    def of(mean):
        return tables.Comparison([mean - 0.01, mean, mean + 0.01])

    assert unwaiting.finding([of(-0.5), of(0.4), of(0.0), of(-0.3)]).endswith("lower in 2, higher in 1")
    assert unwaiting.finding([tables.Comparison([0.1])]) == unwaiting.finding([]) == ""
