"""experiments/gap.py: which runs, which rates, statistics by hand; what fleets do for it."""
import math
import multiprocessing
import random
from dataclasses import replace

import pytest
import torch

import train
from experiments import gap, gap_runs
from experiments.batches import Batches
from experiments.fleet import Fleet, ManyOuters, Trial
from noloco import random_groups
from train import Reader, load_corpus

FULL = gap_runs.SCALES["full"]


# ---------------------------------------------------------------- which runs


def test_the_full_scale_has_the_runs_that_were_named_before():
    named = {
        "Adam": (14, 10, 8, 1024, 1200), "Muon": (4, 5, 8, 1024, 1200),
        "1024 tokens, 300 steps": (2, 5, 8, 1024, 300),
        "4096 tokens, 300 steps": (2, 5, 8, 4096, 300),
        "4096 tokens, 1200 steps": (2, 5, 8, 4096, 1200),
        "2 replicas": (2, 5, 2, 1024, 600), "32 replicas": (2, 5, 32, 1024, 600)}
    found = {one.name: (len(one.trials), len(one.seeds), one.replicas, one.tokens, one.steps)
             for one in FULL.settings}
    assert found == named
    assert FULL.settings[0].name == "Adam" and FULL.settings[-1].name == "4096 tokens, 1200 steps"
    adam = FULL.settings[0].trials
    plain = {(trial.method, trial.every) for trial in adam
             if trial == Trial(trial.method, trial.every)}
    assert plain == {("ddp", 1), ("local", 1), ("noloco", 2), ("noloco", 10), ("noloco", 50),
                     ("diloco", 4), ("diloco", 20), ("diloco", 100)}
    rest = set(adam) - {Trial(*pair) for pair in plain}
    assert rest == {
        Trial("noloco", 10, 0, fragments=10), Trial("noloco", 10, 1, fragments=10),
        Trial("noloco", 10, 1), Trial("noloco", 10, 5),
        Trial("noloco", 50, alpha=0.5, beta=0.7), Trial("diloco", 100, alpha=0.3, beta=0.7)}


@pytest.mark.parametrize("name", gap_runs.SCALES)
def test_rates_are_chosen_on_seeds_that_measure_nothing_else(name):
    scale = gap_runs.SCALES[name]
    measured = {seed for setting in scale.settings for seed in setting.seeds}
    assert not measured & set(scale.rate_seeds)
    assert {lesson.seed for lesson in gap_runs.rate_lessons(scale)} <= set(scale.rate_seeds)


def test_every_trial_of_every_setting_but_one_that_borrows_is_tried_with_three_rates():
    tried = {}
    for lesson in gap_runs.rate_lessons(FULL):
        tried.setdefault((lesson.setting, lesson.trial), set()).add(lesson.rate)
    wanted = {(setting.name, trial) for setting in FULL.settings for trial in setting.trials
              if not setting.lender}
    assert set(tried) == wanted and {len(rates) for rates in tried.values()} == {3}


def rows_of(losses):
    """losses: {lesson: (merged, mean)}."""
    return {lesson.label: dict(merged=merged, mean=mean, digest="x")
            for lesson, (merged, mean) in losses.items()}


def test_the_best_rate_has_the_lowest_mean_loss_of_both_seeds():
    adam, lender = FULL.settings[0], FULL.settings[3]
    borrows = FULL.settings[-1]
    losses = {}
    for lesson in gap_runs.rate_lessons(FULL):
        place = FULL.rates["adam"].index(lesson.rate) if lesson.setting != "Muon" else 0
        # With seed 100 the first rate is best, with both the second; unmerged, the third.
        merged = {100: (1.0, 1.1, 1.5), 101: (2.0, 1.5, 2.0)}[lesson.seed][place]
        losses[lesson] = merged, (3.0, 2.0, 1.0)[place]
    rows = rows_of(losses)
    assert gap_runs.best_rate(FULL, adam, gap_runs.DDP, rows) == FULL.rates["adam"][1]
    assert gap_runs.best_rate(FULL, adam, gap_runs.NEVER, rows) == FULL.rates["adam"][2]
    missing = next(lesson for lesson in gap_runs.rate_lessons(FULL)
                   if lesson.setting == lender.name and lesson.trial == gap_runs.DDP)
    assert gap_runs.best_rate(FULL, borrows, gap_runs.DDP, rows) == FULL.rates["adam"][1]
    del rows[missing.label]
    assert gap_runs.best_rate(FULL, borrows, gap_runs.DDP, rows) is None
    ready = {lesson.trial for lesson in gap_runs.measured_lessons(FULL, borrows, rows)}
    assert ready == {gap_runs.NOLOCO[10]}


# ---------------------------------------------------------------- statistics


def made_up(losses):
    """A Found of the full scale whose rates are all the first: {(setting, trial): [by seed]}."""
    scale = replace(FULL, rates={"adam": (1.0,), "muon": (1.0,)})
    rows = {}
    for (name, trial), values in losses.items():
        setting = next(one for one in scale.settings if one.name == name)
        for seed, value in enumerate(values):
            lesson = gap_runs.Lesson(name, trial, 1.0, seed, setting.steps)
            rows |= rows_of({lesson: (value, value + 1)})
    return gap.Found(scale, rows)


def test_gaps_are_paired_by_seed_and_equal_what_a_hand_reckons():
    found = made_up({("Adam", gap_runs.DDP): [1.0, 2.0, 3.0],
                     ("Adam", gap_runs.NOLOCO[10]): [1.1, 2.3, 3.2]})
    one = found.over("Adam", gap_runs.NOLOCO[10])
    assert one.mean == pytest.approx((math.exp(0.1) + math.exp(0.3) + math.exp(0.2)) / 3 - 1)
    primary = found.primary(("Adam", gap_runs.NOLOCO[10], gap_runs.DDP), None)
    # Student's t with two degrees: 4.3027 standard errors of 0.1 / sqrt(3).
    assert primary.mean == pytest.approx(0.2)
    assert primary.interval == pytest.approx((0.2 - 0.24841, 0.2 + 0.24841), abs=1e-4)


def test_the_gap_with_equal_data_is_a_difference_of_gaps_of_the_same_seed():
    found = made_up({
        (gap_runs.MAIN, gap_runs.DDP): [1.0, 1.0, 9.0],
        (gap_runs.MAIN, gap_runs.NOLOCO[10]): [1.2, 1.3, 9.9],
        (gap_runs.WIDE, gap_runs.DDP): [2.0, 3.0],
        (gap_runs.WIDE, gap_runs.NOLOCO[10]): [2.1, 3.4]})
    (gaps,) = [gaps for _, *gaps in gap.PRIMARY if gaps[1]]
    assert found.primary(*gaps).differences == pytest.approx([-0.1, 0.1])
    assert len(gap.PRIMARY) == 7 and found.verdicts() == {}     # six are not there yet


def test_bytes_are_those_of_a_ring_and_of_a_pair():
    assert gap.bytes_of_ddp(gap_runs.DDP, 8) == 1
    assert gap.bytes_of_ddp(gap_runs.DILOCO[20], 8) == 1 / 20
    assert gap.bytes_of_ddp(gap_runs.NOLOCO[10], 8) == pytest.approx(4 / 7 / 10)
    assert gap.bytes_of_ddp(gap_runs.NOLOCO[10], 2) == 1 / 10


# ---------------------------------------------------------------- chunks, time, the file


def test_chunks_hold_every_run_once_and_all_seeds_of_a_trial_have_its_rate():
    setting = FULL.settings[0]
    missing = [gap_runs.Lesson(setting.name, trial, 1.0, seed, 1200)
               for seed in setting.seeds for trial in setting.trials
               if (seed, trial) != (3, gap_runs.DDP)]
    trained = []
    while missing:
        chunk = gap_runs.next_chunk(FULL, setting, missing)
        learners, seeds = gap_runs.learners_of(chunk), {lesson.seed for lesson in chunk}
        assert len(chunk) == len(learners) * len(seeds) and len(seeds) <= 5
        trained += chunk
        missing = [lesson for lesson in missing if lesson not in chunk]
    assert len(trained) == len(set(trained)) == 14 * 10 - 1


def add_one(out, number):
    gap_runs.Rows(out).add({f"row {number}": dict(digest="x", merged=number)})


def test_processes_that_add_rows_at_the_same_time_lose_none(tmp_path):
    with multiprocessing.get_context("fork").Pool(4) as pool:
        pool.starmap(add_one, [(tmp_path, number) for number in range(20)])
    rows = gap_runs.Rows(tmp_path)
    assert len(rows.read()) == 20
    with pytest.raises(SystemExit, match="another text"):
        rows.add({"other": dict(digest="y")})
    assert len(rows.read()) == 20


# ---------------------------------------------------------------- what fleets do


@pytest.mark.parametrize("method, alpha, beta", [("noloco", 0.5, 0.7), ("diloco", 0.3, 0.7)])
def test_a_fleets_outer_steps_are_n1_to_n3(method, alpha, beta):
    """In float64, replica by replica as the paper has it: its Delta, its mean over the group."""
    torch.manual_seed(0)
    theta = torch.randn(1, 1, 6, dtype=torch.float64).repeat(1, 4, 1)
    own = list(theta[0].clone())
    phi = [vector.clone() for vector in own]
    delta = [torch.zeros(6, dtype=torch.float64) for _ in own]
    many = ManyOuters(Trial(method, 2, alpha=alpha, beta=beta), theta, [7])
    for step in range(1, 7):
        moves = torch.randn(4, 6, dtype=torch.float64)
        theta += moves
        own = [vector + move for vector, move in zip(own, moves)]
        many.step()
        if step % 2 == 0:
            groups = [range(4)]
            if method == "noloco":
                groups = random_groups(range(4), 2, step // 2 - 1, 7)
            for group in groups:
                mean_delta = sum(own[i] - phi[i] for i in group) / len(group)            # N1
                mean_phi = sum(phi[i] for i in group) / len(group)
                for i in group:
                    delta[i] = alpha * delta[i] + beta * mean_delta - beta * (phi[i] - mean_phi)
                for i in group:
                    phi[i] = phi[i] + delta[i]
                    own[i] = phi[i].clone()
        torch.testing.assert_close(theta[0], torch.stack(own), rtol=1e-12, atol=1e-12)


@pytest.fixture
def words(tmp_path):
    """Options of a small run whose text is epochs short."""
    text = tmp_path / "text.txt"
    draw = random.Random(0)
    text.write_text("".join(draw.choice("abcdefgh \n") for _ in range(3000)))
    return (f"--data {text} --hidden 16 --mlp 32 --heads 2 --layers 1 --seq-len 16 --batch 4 "
            "--eval-sequences 4 --microbatches 1 --warmup 1 --steps 3").split()


def test_batches_are_what_readers_give_over_several_epochs(words):
    o = train.parse(words)
    corpus = load_corpus(o)
    readers, others = [], []
    for seed in (3, 4):
        for place in range(2):
            readers.append(Reader(corpus, o.seq_len, seed, place, 2))
            others.append(Reader(corpus, o.seq_len, seed, place, 2))
    batches = Batches(corpus, readers, o.seq_len, "cpu")
    for _ in range(60):
        expected = torch.stack([reader.next(5) for reader in others])
        assert batches.next(5).equal(expected)
    assert readers[0].epoch > 1


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_each_trial_trains_with_a_rate_of_its_own(words, optimizer):
    """As it does in a fleet by itself, never averaging or with an outer momentum."""
    trials = Trial("local"), Trial("noloco", 2, alpha=0.5, beta=0.7)
    words += ["--optimizer", optimizer, "--lr"]
    rates = [1e-3, 8e-3]
    together = Fleet(train.parse([*words, "3e-3"]), trials, 2, [0, 1], "cpu", rates).train()
    alone = []
    for trial, rate in zip(trials, rates):
        alone += Fleet(train.parse([*words, str(rate)]), [trial], 2, [0, 1], "cpu").train()
    assert [row["lr"] for row in together] == [row["lr"] for row in alone]
    for row, other in zip(together, alone):
        assert row["merged"] == pytest.approx(other["merged"], abs=2e-5)
        assert row["losses"] == pytest.approx(other["losses"], abs=2e-5)


def test_what_is_there_is_not_trained_again_and_a_stopped_piece_goes_on(tmp_path, monkeypatch):
    scale = gap_runs.SCALES["try"]
    chunks = []

    def pretend(scale, setting, chunk, rows):
        chunks.append(chunk)
        if len(chunks) == 3:
            raise KeyboardInterrupt
        return rows_of({lesson: (1.0, 2.0) for lesson in chunk})

    monkeypatch.setattr(gap_runs, "train_chunk", pretend)
    rows = gap_runs.Rows(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        gap_runs.train_all(scale, rows)
    gap_runs.train_all(scale, rows)
    trained = [lesson for number, chunk in enumerate(chunks) if number != 2 for lesson in chunk]
    assert len(trained) == len(set(trained)) == len(rows.read())
    wanted = sum(len(setting.seeds) * len(setting.trials) for setting in scale.settings)
    measured = [lesson.label for setting in scale.settings
                for lesson in gap_runs.measured_lessons(scale, setting, rows.read())]
    assert len(measured) == wanted and set(measured) <= set(rows.read())
