"""The script for a GPU, without one. (tests/test_nccl.py needs a GPU.)"""

import json
import math
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch

import train
from experiments import fleets, gpu, outer, pieces, small, tokens
from experiments.replicas import DDP
from plumbing.options import layout
from plumbing.processes import Job
from tests.harness import error_of

# ---------------------------------------------------------------- experiments.gpu


def gpu_main(argv):
    Job().together(gpu.run, argv)


def test_a_clock_lets_begin_what_ends_in_time_and_says_what_would_not():
    clock = pieces.Clock(8)
    clock.need("a", 400)
    with pytest.raises(pieces.OutOfTime, match="^b takes about 17 min: give --minutes 18 or more$"):
        clock.need("b", 1000)
    clock.end -= 300
    with pytest.raises(pieces.OutOfTime, match="^c takes about 7 min$"):        # it fits the next piece
        clock.need("c", 400)


def test_a_process_that_takes_too_long_is_stopped_and_another_tells_its_status(tmp_path):
    log = tmp_path / "a/log"
    assert pieces.run_within(60, ["-c", "print(7); raise SystemExit(3)"], log) == 3
    assert pieces.tail(log) == "7"
    assert pieces.run_within(0, ["-c", "import time; time.sleep(1000)"], log) is None


SMALL_PLAN = tokens.Plan(seeds=(0, 1), tokens=(512, 2048), rates=(1e-3, 2e-3))
MACHINE = "CPU"


@pytest.fixture
def pretended_fleets(tmp_path, monkeypatch):
    """The lists of lessons that would train. Each takes a second.

    Losses are 1 at 1e-3 and 2 at 2e-3, and more with few tokens and long intervals.
    """
    monkeypatch.setattr(fleets, "FOLDER", tmp_path)
    monkeypatch.setattr(tokens, "FOLDER", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    trained = []

    def train_lessons(lessons, rows, extra=""):
        trained.append(lessons)
        for one in lessons:
            trial = one.trial
            loss = 1000 * one.lr + 0.01 * trial.every / (one.sequences if trial.method != "ddp" else 1e9)
            row = dict(trial=asdict(trial), seed=one.seed, replicas=one.replicas, tokens=128 * one.sequences,
                       steps=one.steps, merged=loss, seconds=1, machine=MACHINE, lr=one.lr, digest="d")
            one.file.write_text(json.dumps(row))

    monkeypatch.setattr(tokens, "train_lessons", train_lessons)
    monkeypatch.setattr(tokens, "plan_of", lambda o: SMALL_PLAN)
    return trained


def test_tokens_trains_all_rates_on_the_first_seed_the_best_on_others_and_nothing_twice(pretended_fleets):
    o = SimpleNamespace(tiny=False)
    tokens.measure(o, pieces.Clock(1e6))
    lessons = [one for chunk in pretended_fleets for one in chunk]
    assert len(lessons) == len(set(lessons)) == 9 * 2 * (2 + 1)
    assert {(one.seed, one.lr) for one in lessons} == {(0, 1e-3), (0, 2e-3), (1, 1e-3)}
    assert all(len({one.kind for one in chunk}) == 1 for chunk in pretended_fleets)
    tokens.measure(o, pieces.Clock(1e6))
    assert sum(map(len, pretended_fleets)) == len(lessons)
    found = tokens.collect(o)
    assert len(found["rows"]) == 9 * 2 * 2 and {row["lr"] for row in found["rows"]} == {1e-3}
    by_trial, base = tokens.gaps(found)
    assert all(base[count] == pytest.approx([1.0, 1.0]) for count in (512, 2048))
    gap = by_trial[tokens.Trial("noloco", 50)][512]
    assert gap.differences == pytest.approx([math.exp(0.01 * 50 / 4) - 1] * 2)
    assert not tokens.whole_of(found)
    for file in fleets.FOLDER.iterdir():            # on another machine
        file.unlink()
    tokens.restore(json.loads(json.dumps(found)))
    tokens.measure(o, pieces.Clock(1e6))
    assert sum(map(len, pretended_fleets)) == len(lessons)


def test_tokens_begins_no_fleet_that_would_end_too_late(pretended_fleets):
    """A lesson of 512 tokens took a second, so one of 2048 takes 1.2 x 4 + 5 s: three in half a minute."""
    few = SMALL_PLAN.lesson(DDP, 0, 1e-3, 512)
    many = SMALL_PLAN.lesson(DDP, 0, 1e-3, 2048)
    clock = pieces.Clock(0.5)
    assert tokens.fitting(clock, few) == 1          # nothing is measured yet, and a guess is slow
    tokens.train_lessons([few], {})
    assert tokens.fitting(clock, many) == 3
    clock.end -= 25
    with pytest.raises(pieces.OutOfTime, match="sequences 16"):
        tokens.fitting(clock, many)


def test_the_papers_gap_per_byte_is_what_papers_say():
    """Its own table is +0.7 to +6.7% a byte, at four bytes a token."""
    small = [tokens.per_byte(noloco, ddp) for rows in tokens.PAPER.values() for _, ddp, _, noloco in rows]
    assert min(small) == pytest.approx(0.007, abs=5e-4) and max(small) == pytest.approx(0.067, abs=5e-4)


def test_the_tokens_picture_and_table_of_a_try_state_no_finding(pretended_fleets, capsys):
    plt = pytest.importorskip("matplotlib.pyplot")
    plt.switch_backend("agg")
    o = SimpleNamespace(tiny=False)
    tokens.measure(o, pieces.Clock(1e6))
    found = json.loads(json.dumps(tokens.collect(o)))
    tokens.show(found)
    assert "| NoLoCo, every 50 in 50 |" in capsys.readouterr().out
    figure = tokens.draw(plt, found)
    assert "no finding" in figure.get_suptitle()
    assert all(len(axis.get_legend_handles_labels()[1]) <= 5 for axis in figure.axes)
    plt.close(figure)


def test_the_tokens_picture_of_the_cpus_plan_says_that_it_is_of_one_seed(pretended_fleets, monkeypatch):
    monkeypatch.setattr(tokens, "plan_of", lambda o: tokens.ON_CPU)
    o = SimpleNamespace(tiny=False)
    tokens.measure(o, pieces.Clock(1e6))
    found = tokens.collect(o)
    assert tokens.whole_of(found) and len(found["rows"]) == 9 * 3
    few, many = math.exp(0.01 * 50 / 4) - 1, math.exp(0.01 * 50 / 64) - 1
    assert tokens.title(found, tokens.gaps(found)[0]) == (
        f"One seed: NoLoCo's gap to DDP, every 50 steps: {few:+.1%} with 512 tokens a replica and step, "
        f"{many:+.1%} with 8192")
    del found["rows"][0]
    assert "no finding" in tokens.title(found, tokens.gaps(found)[0])


def test_outer_times_by_hand():
    row = {"without": [1.0, 1.1, 1.2], "at once": [1.5, 1.6, 9.0], "delayed": [1.2, 1.2, 1.2]}
    assert outer.times(row) == pytest.approx((500, 100))


def test_without_a_gpu_only_tokens_runs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "small and nccl and outer: torch sees no GPU" in error_of(gpu_main, "small", "nccl", "outer")
    assert "no part fast, only tokens" in error_of(gpu_main, "fast")


@pytest.mark.parametrize("setting", [small.FULL, small.TINY])
def test_the_small_models_runs_are_such_as_train_takes(setting):
    for processes, options_ in small.METHODS.values():
        options_ = f"{setting['options']} --steps {setting['steps']} {options_.format(**setting)}"
        layout(train.parse(options_.split(), processes), processes)
