"""experiments/fleet.py: many replicas in one process train as processes do. gap.py and many.py: which runs,
the simulated clock, and that their settings are the best of the logs."""
import functools
import itertools
import math
import random
import statistics
from dataclasses import fields, replace

import pytest
import torch

import train
from experiments import fleet, gap, harness, many
from experiments.fleet import Batches, Fleet, ManyOuters, Trial
from gossip.muon import orthogonal
from noloco import random_groups
from tests.harness import SMALL, metrics, options
from train import Reader, load_corpus

KEYS = [field.name for field in fields(Trial) if field.name not in ("rate", "seed")]
ALIKE = [(Trial("noloco", 2, 1), "--optimizer", "muon"), (Trial("noloco", 2, K=2),),
         (Trial("diloco", 3, 1, K=3),), (Trial("ddp"),)]


@pytest.mark.parametrize("case", ALIKE, ids=lambda case: case[0].method)
def test_replicas_in_one_process_lose_what_processes_lose(case, trained, corpus, tmp_path):
    """Delayed, in fragments, Adam and Muon: train.py's held-out loss."""
    trial, *optimizer = case
    small = ["--microbatches", 1, "--warmup", 2, "--steps", 6, "--layers", 1, *optimizer]
    o = options(*SMALL, "--data", corpus, *small)
    trial = replace(trial, N=4, tokens=o.batch * o.seq_len, steps=6, rate=o.lr, optimizer=o.optimizer)
    found = Fleet(o, [trial], "cpu").train()
    outer = []
    if trial.method != "ddp":
        outer = ["--inner-steps", trial.m, "--delay", trial.D, "--fragments", trial.K]
    trained(4, *small, "--method", trial.method, *outer)
    told = metrics(tmp_path / "runs/x")[-1]
    mean, merged = found[trial]
    assert mean == pytest.approx(told["heldout_loss"], abs=2e-4)
    if trial.method != "ddp":
        assert merged == pytest.approx(told["merged_loss"], abs=2e-4)


@pytest.mark.parametrize("most, long", [(1 << 20, 99), (48, 99), (128, 1)])
def test_a_fleet_has_the_gradients_of_plain_autograd_however_it_cuts_them(most, long, corpus, monkeypatch):
    """All models in one call, or few; compiled, with a last call that is filled up.

    Traced as for torch's compiler, but run as it is: that torch's C++ is right is torch's own test.
    """
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    monkeypatch.setattr(fleet, "finds_compiler", lambda device: True)
    monkeypatch.setitem(fleet.AT_ONCE, "cpu", most)
    monkeypatch.setitem(fleet.LONG, "cpu", long)
    o = options(*SMALL, "--data", corpus, "--warmup", 2, "--layers", 1)
    facts = dict(N=3, tokens=o.batch * o.seq_len, steps=4)
    found = Fleet(o, [Trial("noloco", 4, seed=1, **facts), Trial("ddp", **facts)], "cpu")
    found.theta += 0.02 * torch.randn_like(found.theta)
    readers = [Reader(found.corpus, o.seq_len, trial.seed, place, 3)
               for trial in found.trials for place in range(3)]
    batches = [reader.next(o.batch) for reader in readers]
    found.fill_gradients(2)
    config = train.config_of(o)
    for own, g, batch in zip(found.theta.flatten(0, 1), found.grad.flatten(0, 1), batches):
        model = fleet.Llama(config, seed=0)
        torch.nn.utils.vector_to_parameters(own, model.parameters())
        loss = fleet.Whole(model)(batch)
        expected = torch.autograd.grad(loss, list(model.parameters()))
        torch.testing.assert_close(g, torch.cat([e.flatten() for e in expected]), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("method, alpha, beta", [("noloco", 0.5, 0.7), ("diloco", 0.3, 0.7)])
def test_a_fleets_outer_steps_are_n1_to_n3(method, alpha, beta):
    """In float64, replica by replica as the paper has it: its Delta, its mean over the group."""
    torch.manual_seed(0)
    theta = torch.randn(1, 6, dtype=torch.float64).repeat(4, 1)
    own = list(theta.clone())
    phi = [vector.clone() for vector in own]
    delta = [torch.zeros(6, dtype=torch.float64) for _ in own]
    outers = ManyOuters(Trial(method, 2, alpha=alpha, beta=beta, N=4, seed=7), theta)
    for step in range(1, 7):
        moves = torch.randn(4, 6, dtype=torch.float64)
        theta += moves
        own = [vector + move for vector, move in zip(own, moves)]
        outers.step()
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
        torch.testing.assert_close(theta, torch.stack(own), rtol=1e-12, atol=1e-12)


@pytest.fixture
def o(tmp_path):
    """Options of a small run whose text is epochs short."""
    text = tmp_path / "text.txt"
    draw = random.Random(0)
    text.write_text("".join(draw.choice("abcdefgh \n") for _ in range(3000)))
    return train.parse(f"--data {text} --hidden 16 --mlp 32 --heads 2 --layers 1 --seq-len 16 "
                       "--eval-sequences 4 --microbatches 1 --warmup 1".split())


def test_batches_are_what_readers_give_over_several_epochs(o):
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
def test_runs_of_other_rates_seeds_and_lengths_train_together_as_alone(o, optimizer):
    facts = dict(N=2, tokens=64, optimizer=optimizer)
    trials = [Trial("local", steps=2, rate=8e-3, **facts), Trial("ddp", steps=4, seed=1, **facts),
              Trial("noloco", 2, alpha=0.5, beta=0.7, steps=4, rate=1e-3, **facts)]
    together = Fleet(o, trials, "cpu").train()
    for trial in trials:
        alone = Fleet(o, [trial], "cpu").train()
        assert together[trial] == pytest.approx(alone[trial], abs=2e-5)


def test_muon_makes_each_matrix_of_a_stack_orthogonal_as_alone():
    stack = torch.randn(3, 4, 6, 2, generator=torch.Generator().manual_seed(0))
    for shape in (stack, stack.mT):
        found = orthogonal(shape, torch.float32)
        for i, j in itertools.product(range(3), range(4)):
            torch.testing.assert_close(found[i, j], orthogonal(shape[i, j], torch.float32),
                                       atol=1e-5, rtol=1e-5)
        singular = torch.linalg.svdvals(found)
        assert singular.min() > 0.6 and singular.max() < 1.3


# ---------------------------------------------------------------- gap


def records_of(losses):
    """losses: {(setting, method): [by seed]}."""
    found = []
    for (setting, method), values in losses.items():
        for seed, value in enumerate(values):
            found.append(setting.trial(method, seed=seed).known | dict(merged=value, mean=value + 1))
    return found


def test_gaps_are_paired_by_seed_and_a_gap_of_sizes_is_a_difference_of_gaps():
    found = records_of({
        (gap.MAIN, gap.DDP): [1.0, 1.0, 9.0], (gap.MAIN, gap.NOLOCO[10]): [1.2, 1.3, 9.9],
        (gap.LARGER, gap.DDP): [2.0, 3.0], (gap.LARGER, gap.NOLOCO[10]): [2.1, 3.4]})
    one = gap.over(found, gap.MAIN, gap.NOLOCO[10])
    assert one.mean == pytest.approx((math.exp(0.2) + math.exp(0.3) + math.exp(0.9)) / 3 - 1)
    primary = gap.primary(found, "full")
    assert primary["NoLoCo every 10 minus DDP"].differences == pytest.approx([0.2, 0.3, 0.9])
    sizes = primary["NoLoCo every 10 minus DDP: 1.1M less 0.16M weights"]
    assert sizes.differences == pytest.approx([-0.1, 0.1])
    assert len(primary) == 8 and list(primary.values()).count(None) == 6


def log(name):
    """{a try, with the default rate and seed: {text: {rate: its records}}}"""
    tries = {}
    for record in harness.records_in(harness.results_file(harness.ROOT, name)):
        trial = Trial(**{key: record[key] for key in KEYS})
        rates = tries.setdefault(trial, {}).setdefault(record["corpus"], {})
        rates.setdefault(record["rate"], []).append(record)
    return tries


def lowest(rates, key="merged"):
    return min(rates, key=lambda rate: statistics.mean(record[key] for record in rates[rate]))


@pytest.mark.parametrize("scale, tables", [("try", 9), ("plot", 4), ("full", 9)])
def test_every_scale_shows_what_it_trains(scale, tables, capsys):
    """plot has fewer methods and settings, so fewer tables."""
    records = [trial.known | dict(merged=random.Random(f"{trial}").random(), mean=2.0 + trial.seed)
               for setting in gap.SETTINGS[scale] for trial in setting.trials()]
    shown = dict(records=records, scale=scale, out=".")
    gap.show(shown)
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("|---") for line in lines) == tables
    assert all(one.found is not None for one in gap.expected(shown))


@pytest.mark.parametrize("setting", gap.FULL, ids=lambda one: one.name)
def test_rates_of_gap_are_the_best_of_its_log(setting):
    """On the text with the most rates; beyond an edge as another text decides between two rates."""
    tries = log("gap_rates")
    for method, rate in setting.rates.items():
        key = "mean" if method == gap.NEVER else "merged"
        texts = tries[replace(lender(method), **setting.facts)].values()
        first, *others = sorted(texts, key=len, reverse=True)
        best = lowest(first, key)
        if best in (min(first), max(first)):
            (other,) = others
            assert set(other) > {best} and set(other) & {best / 2, 2 * best}
            best = lowest(other, key)
        assert rate == best, method


def lender(method):
    """Fragments and delays have the rate of NoLoCo every 10."""
    return gap.NOLOCO[10] if method.D or method.K > 1 else method


def test_bytes_are_those_of_a_ring_and_of_a_pair():
    assert gap.bytes_of_ddp(gap.DDP, 8) == 1
    assert gap.bytes_of_ddp(gap.DILOCO[20], 8) == 1 / 20
    assert gap.bytes_of_ddp(gap.NOLOCO[10], 8) == pytest.approx(4 / 7 / 10)
    assert gap.bytes_of_ddp(gap.NOLOCO[10], 2) == 1 / 10


# ---------------------------------------------------------------- many replicas


def test_everyone_waits_for_the_slowest_and_a_delay_hides_waits_of_its_steps():
    """DiLoCo, by hand, from the same draws: the times of each draw's steps are added up."""
    for m, D in ((1, 0), (3, 0), (3, 1), (4, 2)):
        generator = torch.Generator().manual_seed(0)
        times = torch.stack([torch.randn(many.DRAWS, 5, generator=generator) for _ in range(12)])
        times = (0.5**0.5 * times - 0.25).exp()
        found = list(itertools.islice(many.ends("diloco", 5, m, D), 12))
        for draw in (0, 7):
            clock, sent = [0.0] * 5, {}
            for step in range(12):
                clock = [now + float(t) for now, t in zip(clock, times[step, draw])]
                if (step + 1 - D) in sent:
                    clock = [max(now, sent[step + 1 - D]) for now in clock]
                if (step + 1) % m == 0:
                    sent[step + 1] = max(clock)
                    if D == 0:
                        clock = [max(clock)] * 5
                assert float(found[step][draw]) == pytest.approx(max(clock), rel=1e-5)


def test_a_pair_waits_for_its_slower_member_alone():
    sent = torch.rand(many.DRAWS, 6)
    latest = many.heard("noloco", sent, torch.Generator().manual_seed(1))
    for own, other in zip(sent, latest):
        slower = sorted(other.tolist())
        assert slower[::2] == slower[1::2] and len(set(slower)) == 3        # three pairs, each its own
        assert bool((other >= own).all()) and set(slower) <= set(own.tolist())


def test_pace_at_10_steps_between_pairs_and_between_everyone():
    """Mean steps per step, as an earlier simulation without a delay had them."""
    for N, pair, everyone in ((8, 1.23, 1.41), (64, 1.30, 1.78)):
        for method, wanted in (("noloco", pair), ("diloco", everyone)):
            ends = list(itertools.islice(many.ends(method, N, 10, 0), 1000))
            assert float(ends[-1].mean()) / 1000 == pytest.approx(wanted, abs=0.015)


def test_settings_are_the_best_of_the_log():
    """The lowest loss at one rate chooses m and D, with a delay or without; then its rates compete."""
    tries = {trial: rates for trial, texts in log("many_tries").items() for rates in texts.values()}
    for (method, N), chosen in many.BEST.items():
        own = [trial for trial in tries if (trial.method, trial.N) == (method, N)]
        without = [trial for trial in own if not trial.D]
        for (m, D, rate), may in zip(chosen, (own, without)):
            best = min(may, key=lambda trial: tries[trial][4e-3][0]["merged"])
            assert (m, D, rate) == (best.m, best.D, lowest(tries[best])), (method, N)


def test_searches_gave_both_methods_the_same_tries_on_seeds_that_measure_nothing():
    settings = gap.settings_of("full").values()
    measured = {trial.seed for setting in settings for trial in setting.trials()}
    measured |= set(range(many.SCALES["full"].seeds))
    for name in ("gap_rates", "many_tries"):
        records = harness.records_in(harness.results_file(harness.ROOT, name))
        assert not measured & {record["seed"] for record in records}
    tries = [trial for trial in log("many_tries") if not trial.D]
    ours = {(trial.N, 2 * trial.m) for trial in tries if trial.method == "noloco"}
    theirs = {(trial.N, trial.m) for trial in tries if trial.method == "diloco"}
    assert ours == theirs and len(ours) == 9
