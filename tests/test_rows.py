"""The rows of random routing, deaths, hosts between cities, skipping, missing stages, both papers."""

import functools
import itertools
import json
import math

import pytest

import train
from experiments import cities, failures, harness, missing, pictures, routing, simulated, skipping, together
from experiments.stats import those
from tests.harness import HERE, metrics
from train import layout

TRAINED = {"routing": routing, "failures": failures, "cities": cities, "skipping": skipping,
           "together": together}


@pytest.fixture
def planned(monkeypatch):
    """Nothing is planned, which takes seconds, and nothing written."""
    monkeypatch.setattr(skipping, "equal_time", lambda *_: 50)
    monkeypatch.setattr(together, "simulated_seconds", lambda: SECONDS)
    for module in (skipping, together):
        monkeypatch.setattr(module, "keep_links", lambda network, name: f"runs/{name}")


SECONDS = {0.0: 10.0, 0.5: 6.0}, {"NoLoCo": 4.0, "DDP": 2.0, "DiLoCo": 2.0}


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("scale", harness.FOLDERS)
def test_every_run_is_one_that_train_takes_and_has_facts_of_its_own(name, scale, planned):
    runs = TRAINED[name].wanted(scale)
    facts = [tuple(run.facts.items()) for run in runs]
    assert len(set(facts)) == len(facts) >= 1
    for run in runs:
        argv = f"--name x {harness.SMALL} {run.options} --seed {run.facts['seed']}".split()
        layout(train.parse(argv, run.processes), run.processes)


@pytest.mark.parametrize("name", TRAINED)
def test_the_records_in_results_are_runs_of_the_full_scale(name, planned):
    """By their facts; options that change no weight may differ."""
    wanted = [run.facts for run in TRAINED[name].wanted("full")]
    records = json.loads((HERE / f"results/{name}.json").read_text())["records"]
    for record in records:
        same = [facts for facts in wanted if record.items() >= facts.items()]
        assert len(same) == 1, record["command"]


# ---------------------------------------------------------------- small scales


def pretended(run):
    """What a run of these rows could have found."""
    values = dict(corpus="x", steps=4, mean=2.0 + run.facts["seed"], merged=1.5, seconds=9.0, sent=1.0)
    values |= dict(at=[1.0, 2.0, 3.0], spreads=[1.0, 2.0, 3.0], rates=[0.1, 0.2, 0.1],
                   losses=[3.0, 2.5, 2.0], iteration=0.5)
    for rule, share in itertools.product(skipping.RULES, ("", "_75", "_50")):
        values[rule + share] = 2.0
    return values | run.facts


@pytest.mark.parametrize("row", [module.ROW for module in (*TRAINED.values(), missing)],
                         ids=lambda row: row.name)
@pytest.mark.parametrize("scale", ["try", "plot"])
def test_a_small_scale_has_what_its_tables_pictures_and_numbers_need(row, scale, planned, capsys):
    pytest.importorskip("matplotlib")
    plt = pictures.pyplot()
    records = [pretended(run) for run in TRAINED[row.source].wanted(scale)]
    found = dict(records=records, scale=scale)
    row.show(found)
    for draw in row.pictures.values():
        assert draw(plt, found).axes
    plt.close("all")
    if scale == "plot":
        assert row.expected(found) and all(one.found is not None for one in row.expected(found))
    assert "|---" in capsys.readouterr().out


# ---------------------------------------------------------------- what was found, by hand


def test_routing_compares_spreads_seed_by_seed():
    records = []
    for method, how, seed, spreads in (
            ("NoLoCo", "random", 0, [9, 4, 3, 2, 1]), ("NoLoCo", "random", 1, [9, 4, 2, 3, 1]),
            ("NoLoCo", "fixed", 0, [9, 4, 3, 2, 2]), ("NoLoCo", "fixed", 1, [9, 4, 3, 2, 4]),
            ("local", "random", 0, [9, 4, 3, 2, 10]), ("local", "random", 1, [9, 4, 3, 2, 30])):
        records.append(dict(method=method, routing=how, seed=seed, spreads=spreads,
                            rates=[1, 5, 4, 3, 2]))
    found = routing.random_over_fixed(records, "NoLoCo", routing.last_spread, routing.ratio)
    assert found.differences == [1 / 2 - 1, 1 / 4 - 1]
    assert routing.times_noloco(records) == (10 + 30) / 2
    # after the rate's top: 4 3 2 1 beside 5 4 3 2 is 1; 4 2 3 1 is 0.8
    assert routing.follows_rate(records) == pytest.approx((1 + 0.8) / 2)


def test_a_death_costs_perplexity_over_the_same_seed_without():
    records = [dict(share=share, seed=seed, merged=loss) for share, seed, loss in
               ((0, 0, 2.0), (0, 1, 3.0), (0.1, 1, 3.5), (0.1, 0, 2.25))]
    found = failures.cost(records, 0.1)
    assert found.differences == pytest.approx([math.exp(0.5) - 1, math.exp(0.25) - 1])
    assert failures.cost(records, 0.05) is None


def test_cities_compare_losses_when_the_first_of_the_two_ends():
    own = dict(cities.PLANS[cities.HALF], seed=0, at=[10, 20], losses=[3.0, 1.0], iteration=0.3)
    other = dict(cities.PLANS[cities.FULL], seed=0, at=[10, 30], losses=[4.0, 2.0], iteration=0.6)
    more = functools.partial(cities.more_than, [own, other], cities.HALF, cities.FULL)
    assert more().differences == [1.0 - 3.0]                            # at 20 s
    assert more(0.75).differences == [2.0 - 3.5]                        # at 15 s
    assert cities.loss_at(5, own) == 3.0 and cities.loss_at(99, own) == 1.0
    assert cities.time_over([own, other], cities.HALF, cities.FULL).differences == [-0.5]


def test_one_skipping_run_is_compared_by_both_rules_and_with_stages_missing():
    half, full = skipping.facts_of(4, 0.5, "stronger", "time"), skipping.facts_of(4, 0.0, "no-swaps", "time")
    assert skipping.full_of(half) == full == skipping.full_of(full)
    assert skipping.full_of(half | dict(equal="steps"))["routing"] == "dtfm"
    numbers = dict(rho=2.0, rho_75=2.1, rho_50=2.3, unscaled=2.4, unscaled_75=2.5, unscaled_50=2.3)
    records = [half | dict(seed=0) | numbers, full | dict(seed=0, rho=1.5, unscaled=1.5)]
    more = lambda nats: [pytest.approx(math.exp(nats) - 1)]
    assert skipping.over_full(records, half, "rho", "rho").differences == more(0.5)
    assert skipping.over_full(records, half, "unscaled_50", "unscaled").differences == more(0.8)
    assert skipping.over_full(records, full, "rho", "rho") is None
    assert skipping.by_rho(records, half, "_75").differences == more(-0.4)
    assert missing.over_whole(records, half, 50).differences == more(0.3)
    assert missing.over_whole(records, half, 75, "unscaled").differences == more(0.1)
    assert missing.over_whole(records, half, 100).differences == [0.0]
    assert skipping.name_of(full) == "4 stages, 0% skipped, in order, equal time"


def test_evaluations_are_means_over_the_choices_of_as_many_stages():
    rows = [dict(stages=stages, heldout_loss=loss) for stages, loss in
            (([0, 1, 2, 3], 1.0), ([0, 1, 2], 2.0), ([0, 1, 3], 4.0), ([0, 1], 5.0), ([0, 2], 6.0))]
    assert skipping.means_by_share("rho", rows) == dict(rho=1.0, rho_75=3.0, rho_50=5.5)


def test_equal_time_has_the_steps_that_fit(monkeypatch):
    """30 s and a synchronisation of 10 s, or 10 s and the same."""
    monkeypatch.setattr(skipping, "makespan", lambda network, routing, skip, per_origin: 30.0 - 40 * skip)
    monkeypatch.setattr(skipping, "slowest_all_reduce", lambda network, cities: 10.0)
    assert skipping.equal_time.__wrapped__(300, 4, 0.5, "stronger") == 600


def test_a_step_of_both_papers_holds_its_share_of_a_synchronisation():
    step = functools.partial(together.a_step, SECONDS)
    assert [step(0.5, method) for method in (together.DDP, together.DILOCO, together.NOLOCO)] == [8, 7, 8]
    assert step(0.0, together.NOLOCO) == 12


def test_both_papers_differences_are_of_one_share_of_the_time():
    losses = {(0.0, "DDP"): 2.0, (0.5, "DDP"): 1.75, (0.0, "NoLoCo"): 2.5, (0.5, "NoLoCo"): 2.0,
              (0.5, "DiLoCo"): 1.5}
    records = []
    for method in (together.DDP, together.DILOCO, together.NOLOCO):
        for share, skip in itertools.product((0.6, 1.0), (0.0, 0.5)):
            if (skip, method["method"]) in losses:
                loss = losses[skip, method["method"]] / share
                facts = together.facts_of(skip, method, share)
                records.append(facts | dict(seed=0, merged=loss, mean=9.0))
    brings = [together.skipping_brings(records, together.DDP, 1.0),
              together.skipping_brings(records, together.NOLOCO, 1.0),
              together.noloco_brings(records, together.DDP, 1.0),
              together.noloco_brings(records, together.DILOCO, 0.6)]
    assert [one.mean for one in brings] == pytest.approx([-0.25, -0.5, 0.25, 0.5 / 0.6])
    assert len(those(records, **together.facts_of(0.5, together.DDP, 0.6))) == 1


def test_all_reduce_seconds_by_hand():
    whole = [[0, 9, 2], [9, 0, 3], [2, 3, 0]]
    part = lambda by: [[x / by for x in row] for row in whole]
    # Two rounds of 9 / 3. Then mostly latency: whole vectors, once; of two also.
    cases = ([0, 1, 2], 3), ([0, 1, 2], 1.5), ([0, 2], 2)
    assert [simulated.all_reduce_seconds(ranks, whole, part(by)) for ranks, by in cases] == [6, 9, 2]
    slow = [[400 if {i, j} == {0, 2} else 4 for j in range(4)] for i in range(4)]
    # the ring goes round the slow link
    assert simulated.all_reduce_seconds([0, 1, 2, 3], slow, [[x / 4 for x in row] for row in slow]) == 6


def test_losing_drops_what_visits_the_victim(trained, tmp_path):
    """In every iteration one of the two replicas of stage 1 dies, and half of the 4 microbatches
    with it."""
    trained(4, "--stages", "2,2", "--steps", 5, main=functools.partial(failures.lose, 1.0, 0))
    row = metrics(tmp_path / "runs/x")[-1]
    assert row["tokens"] == 5 * 2 * 2 * 32 and math.isfinite(row["heldout_loss"])


def test_a_run_between_cities_keeps_its_curve_and_the_median_of_its_iterations(tmp_path):
    lines = [dict(seconds=1.23456789, heldout_loss=3.0, iteration_seconds=0.5), dict(event="no evaluation"),
             dict(seconds=2.0, heldout_loss=2.5, iteration_seconds=0.1),
             dict(seconds=3.0, heldout_loss=2.0, iteration_seconds=0.2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert cities.read_times(tmp_path) == dict(at=[1.23457, 2.0, 3.0], losses=[3.0, 2.5, 2.0], iteration=0.2)
