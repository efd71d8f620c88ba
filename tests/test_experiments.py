"""What the experiments count with: the stability recursion, the clock of the headline results, losses."""

import functools
import importlib
import itertools
import json
import math
import shutil
import time
import types

import pytest
import torch

import train
from experiments import clock, closing, failure, hosts, runs, scale, skip, stability, together
from model import Config, count_parameters
from noloco import gamma_bound, outer_update
from plumbing.options import layout
from tests.harness import HERE, SMALL, checkpoint, metrics, run


@pytest.mark.parametrize("replicas, n", [(4, 2), (5, 2), (6, 3), (4, 4)])
def test_moment_recursion_equals_the_average_over_all_groupings(replicas, n):
    """One outer step of Eqs. 2 and 3 with Delta = -p phi, for every order that replicas can be drawn in."""
    alpha, beta, gamma, pull = 0.6, 0.8, 1.1, 0.3
    x, d = (
        v - v.mean()
        for v in torch.randn(2, replicas, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    )
    moments = lambda x, d: torch.stack([x @ x, x @ d, d @ d])
    total = torch.zeros(3, dtype=torch.float64)
    orders = list(itertools.permutations(range(replicas)))
    for order in orders:
        phi, delta = x + 7, d - 2  # what all share is no difference
        for g in (list(order[i :: replicas // n]) for i in range(replicas // n)):
            p, q = phi[g], delta[g]
            outer_update(p, q, -pull * p.mean(0), p.mean(0), alpha, beta, gamma)
            phi[g], delta[g] = p, q
        total += moments(phi - phi.mean(), delta - delta.mean()) / len(orders)
    matrix = stability.moment_matrix(alpha, stability.contraction(replicas, n), beta, gamma, pull)
    assert torch.allclose(matrix @ moments(x, d), total, rtol=1e-12)


def test_spectral_radius_crosses_one_exactly_at_the_bound():
    radius = lambda alpha, k, gamma, pull=0.0: float(
        torch.linalg.eigvals(stability.moment_matrix(alpha, k, gamma, gamma, pull)).abs().max()
    )
    for alpha, n, pull in itertools.product((0.0, 0.5, 0.9), (2, 4, 16), (0.0, 0.3)):
        for k in (1 - 1 / n, stability.contraction(16, n)):
            bound = stability.exact_bound(alpha, k, pull)
            assert radius(alpha, k, 0.999 * bound, pull) < 1 < radius(alpha, k, 1.001 * bound, pull)
        assert radius(alpha, 1 - 1 / n, gamma_bound(alpha, n)) == pytest.approx(1, abs=1e-6)
        assert stability.exact_bound(alpha, 1 - 1 / n) == pytest.approx(gamma_bound(alpha, n))
    for replicas, n in ((2, 2), (3, 2), (4, 2), (5, 2), (16, 4), (16, 16)):
        exact = stability.exact_bound(0.5, stability.contraction(replicas, n))
        assert gamma_bound(0.5, n, replicas) == pytest.approx(exact)
    # heavy ball: 2 (1 + alpha)
    assert stability.exact_bound(0.5, stability.contraction(16, 16)) == pytest.approx(3)


def test_all_reduce_seconds_by_hand():
    whole = [[0, 9, 2], [9, 0, 3], [2, 3, 0]]
    part = lambda by: [[x / by for x in row] for row in whole]
    # two rounds of 9 / 3; a ring: four of 3
    assert clock.all_reduce_seconds([0, 1, 2], whole, part(3)) == 6
    # mostly latency: whole vectors, once
    assert clock.all_reduce_seconds([0, 1, 2], whole, part(1.5)) == 9
    assert clock.all_reduce_seconds([0, 2], whole, part(2)) == 2
    slow = [[400 if {i, j} == {0, 2} else 4 for j in range(4)] for i in range(4)]
    # the ring goes round the slow link
    assert clock.all_reduce_seconds([0, 1, 2, 3], slow, [[x / 4 for x in row] for row in slow]) == 6


def a_run(options):
    curves = dict(step=[10, 20, 30], heldout_loss=[3.0, 2.0, 1.0], sync_bytes=[0, 0, 0])
    return runs.Result(dict(command=f"-m train --name x {options}", ranks=1, curves=curves))


def test_hours_to_a_loss_on_straight_lines():
    run = a_run("--inner-steps 10")
    assert clock.hours(run, 36.0, 360.0, 72.0) == pytest.approx([0.2, 0.4, 0.6])
    for warm, expect in ((10, [0.3, 0.5, 0.7]), (15, [0.3, 0.6, 0.8])):
        warmed = a_run(f"--inner-steps 10 --warm-start {warm}")
        assert clock.hours(warmed, 36.0, 360.0, 72.0) == pytest.approx(expect)
    hours = clock.hours(run, 36.0, 360.0, 72.0)
    assert clock.reaches(1.5, run.losses, hours) == pytest.approx(0.5)
    assert clock.reaches(0.9, run.losses, hours) is None
    ddp = a_run("--method ddp")     # synchronises at every step
    assert clock.hours(ddp, 36.0, 36.0) == pytest.approx([0.2, 0.4, 0.6])


def between_hosts(options, steps):
    curves = dict(step=steps, heldout_loss=[1.0] * len(steps), sync_bytes=[0] * len(steps))
    return runs.Result(dict(command=f"-m train --name x --seed 3 {options}", ranks=8, curves=curves))


def test_seconds_that_the_links_rates_give():
    """Steps of 0.5 s, on 8 hosts of 10 MB/s, one of them at 1: by hand."""
    size = count_parameters(Config())[0]         # the tiny model
    fast, slow, seconds = size / 10e6, size / 1e6, 0.5
    same, one_slow = hosts.Links(80), hosts.Links(80, {5: 8})
    ddp = hosts.predicted(between_hosts("--method ddp", [2, 4]), seconds, same)
    assert ddp == pytest.approx([2 * (seconds + 4 * fast * 14 / 8), 4 * (seconds + 4 * fast * 14 / 8)])
    diloco = hosts.predicted(between_hosts("--method diloco --inner-steps 2", [4]), seconds, one_slow)
    assert diloco == pytest.approx([4 * seconds + 2 * 4 * slow * 14 / 8])
    pair = hosts.predicted(between_hosts("--inner-steps 2 --wire int8", [2]), seconds, one_slow)
    assert pair == pytest.approx([2 * seconds + slow])
    # two rounds: whoever meets host 5 waits for it, and whoever then meets that one waits along
    twice = hosts.predicted(between_hosts("--inner-steps 2", [4]), seconds, one_slow)
    assert twice == pytest.approx([4 * seconds + 8 * slow])
    # host 5 is slow from 3 s after the first step on, for 20 s; so two rounds are fast, then three are slow
    by_turns = hosts.Links(80, changing=(5,), low=8)
    turns = hosts.predicted(between_hosts("--method ddp", [10]), seconds, by_turns)
    assert turns == pytest.approx([10 * seconds + (3 * slow + 7 * fast) * 4 * 14 / 8])
    whole = hosts.predicted(between_hosts("--inner-steps 2", [2, 4]), seconds, same)
    assert whole == pytest.approx([2 * seconds + 4 * fast, 4 * seconds + 8 * fast])


def test_a_clock_gives_the_steps_that_fit():
    """40 steps of 2.5 s in 100 s; at a slower pace then fewer. Every rank does what rank 0's clock says."""
    asked = []

    def agree_on(key, function):
        assert key not in asked
        asked.append(key)
        return function()

    o = types.SimpleNamespace(inner_steps=3, steps=10**6, eval_every=10**6, warmup=hosts.FIRST)
    t = types.SimpleNamespace(o=o, job=types.SimpleNamespace(agree_on=agree_on), step=hosts.FIRST)
    meter = hosts.Clock(t=t, whole=100.0)
    meter.clock = time.perf_counter() - 2.5 * 21
    meter.add(0.0, 0, None, 2.5)
    assert (o.steps, o.eval_every) == (39, 6)               # 13 rounds; of 12.5 s a part: 5 steps, so 6
    t.step = 21
    meter.fit("pace/21", 60.0, 21)
    assert (o.steps, o.eval_every) == (36, 6)               # 35 steps fit
    meter.fit("pace/30", 90.0, 30)
    assert (o.steps, o.eval_every) == (36, 6)               # too late to change


def test_a_clocked_run_evaluates_just_after_outer_steps(corpus, tmp_path):
    argv = ["--data", corpus, "--name", "x", *SMALL, "--inner-steps", 3]
    run(2, 1.0, *argv, cwd=tmp_path, main=hosts.clocked)
    steps = [row["step"] for row in metrics(tmp_path / "runs/x")]
    assert steps[0] > hosts.FIRST and not any(step % 3 for step in steps)
    assert len(steps) >= 2 and len({b - a for a, b in zip(steps, steps[1:-1])}) <= 1
    assert checkpoint(tmp_path / "runs/x", steps[-1], 1)["step"] == steps[-1]
    assert json.loads((tmp_path / "runs/x/config.json").read_text())["steps"] == steps[-1]


@pytest.mark.parametrize("name", [
    "tuning", "momentum", "convergence", "onebyte", "closing", "skip", "scale", "failure", "together",
    "hosts", "cuts", "geography", "links", "margin"])
@pytest.mark.parametrize("steps", [None, 4])
def test_every_run_is_one_that_train_takes_and_has_a_name_of_its_own(name, steps, monkeypatch):
    for module in (skip, together):
        monkeypatch.setattr(module, "makespan", lambda *_: 50.0)        # planning takes seconds
    kinds = list(importlib.import_module(f"experiments.{name}").runs(steps))
    assert len({kind.label for kind in kinds}) == len(kinds) > 1
    for kind in kinds:
        argv = f"--name x {runs.SMALL} {kind.options} --seed 1".split()
        layout(train.parse(argv, kind.processes), kind.processes)


def rows_of(capsys):
    """The rows of the tables that were just printed."""
    return [line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]


@pytest.mark.parametrize("name", [
    "tuning", "closing", "momentum", "convergence", "onebyte", "skip", "scale", "failure", "together",
    "hosts", "cuts", "geography", "links", "margin", "speed"])
def test_the_docs_tables_are_what_the_results_print(name, capsys):
    pytest.importorskip("transformers" if name == "speed" else "torch")
    file = HERE / "results" / ("speed.json" if name == "speed" else f"headline_{name}.json")
    found = json.loads(file.read_text())
    if name == "speed":
        found = {part: row["result"] for part, row in found.items()}
    importlib.import_module(f"experiments.{name}").table(found)
    texts = "".join(file.read_text() for file in (HERE / "README.md", *HERE.glob("docs/*.md")))
    rows = rows_of(capsys)
    assert len(rows) > 3 and [row for row in rows if row not in texts] == []


def test_skip_simulates_the_network_that_its_table_was_made_on():
    kept = json.loads((HERE / "results" / "headline_skip.json").read_text())["seconds"]
    assert {label: sync for label, (_, sync) in skip.seconds().items()} == pytest.approx(
        {label: sync for label, (_, sync) in kept.items()})


def test_stability_prints_what_it_found(capsys):
    stability.table(json.loads((HERE / "results" / "headline_stability.json").read_text()))
    two = next(row for row in rows_of(capsys) if row.startswith("| 2 |"))
    # the paper's window for n = 2: 416 points, of which 103 grow; 557 decay, 244 of them outside
    signs, limits = "99.8% (0.03) | 99.7% (0.02)", "1.51, 1.51 | 2.47, 2.47"
    assert two == f"| 2 | 416, 103 | 557, 244 | {signs} | {limits} |"


def test_a_try_keeps_to_folders_of_its_own_and_is_not_run_twice(monkeypatch, tmp_path):
    """Two runs of two seeds and a search, of which only the commands are told."""
    monkeypatch.chdir(tmp_path)
    started = []

    def torchrun(processes, *words, **_):
        started.append(words)
        folder = tmp_path / "runs" / words[words.index("--name") + 1]
        folder.mkdir(parents=True)
        row = dict.fromkeys(runs.KEPT, 1.0) | dict(step=int(words[words.index("--steps") + 1]))
        (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")

    monkeypatch.setattr(runs, "torchrun", torchrun)
    o = types.SimpleNamespace(seeds=[0, 5], steps=4)
    kinds = [runs.Run("a b", "--steps 4"), runs.Run("c", "--steps 4", after=lambda folder: dict(mean=2.0)),
             runs.Run("d", "--steps 4", first=True)]
    found, again = (dict(cpu_hours=0.0, runs={}) for _ in range(2))
    runs.run_all("x", kinds, o, found)
    assert len(started) == 5
    runs.run_all("x", kinds, o, again)
    assert again["runs"] == found["runs"] and len(started) == 5
    names = [f"headline-x-{run}-of-4-steps" for run in ("a-b-0", "a-b-5", "c-0", "c-5", "d-0")]
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == names
    assert [row["mean"] for row in found["runs"]["c"]] == [2.0, 2.0]
    assert [runs.Result(row).o.seed for row in found["runs"]["a b"]] == [0, 5]
    assert found["runs"]["a b"][0]["curves"]["step"] == [4]
    # results without their folders, in other words, and two seeds and a kind more
    shutil.rmtree("runs")
    for rows in found["runs"].values():
        rows[0]["command"] = rows[0]["command"].replace("-m train", "train.py")
    o.seeds = [3, 5, 7]
    kinds.insert(1, runs.Run("b", "--steps 4", first=True))
    runs.run_all("x", kinds, o, found)
    assert len(started) == 5 + 4 + 1
    seeds = {label: [runs.Result(row).o.seed for row in rows] for label, rows in found["runs"].items()}
    assert list(seeds.items()) == [("a b", [0, 3, 5, 7]), ("b", [3]), ("c", [0, 3, 5, 7]), ("d", [0])]


losing_always = functools.partial(failure.lose, 1.0)


def test_losing_drops_what_visits_the_victim(corpus, tmp_path):
    """In every iteration one of the two replicas of stage 1 dies, and half of the 4 microbatches with it."""
    argv = ["--stages", "2,2", "--steps", 5, "--data", corpus, "--name", "x", *SMALL]
    run(4, *argv, cwd=tmp_path, main=losing_always)
    row = metrics(tmp_path / "runs/x")[-1]
    assert row["lost_microbatches"] == 5 * 2 and math.isfinite(row["heldout_loss"])


def test_drawn_paths_are_in_order_and_leave_out_as_many_stages_as_the_plans():
    """And they visit each later stage as often as every other, which a plan's need not."""
    stages = [[0, 1], [2, 3], [4, 5], [6, 7]]
    routes = scale.Drawn.__new__(scale.Drawn)
    routes.stages = stages
    routes.o = types.SimpleNamespace(skip=0.25, seed=1, microbatches=6)
    steps = [routes.at(step)[0] for step in range(200)]
    assert steps[0] != steps[1] and all(len(paths) == 12 for paths in steps)
    at = {rank: stage for stage, ranks in enumerate(stages) for rank in ranks}
    ways = [tuple(at[rank] for rank in path) for paths in steps for path in paths]
    assert set(ways) == {(0, 1, 2), (0, 1, 3), (0, 2, 3)}
    for stage in (1, 2, 3):     # 6 standard deviations
        assert abs(sum(stage in way for way in ways) - 1600) < 6 * math.sqrt(2400 * 2 / 9)


@pytest.mark.parametrize("a", (0.0, 0.5, 1.0))
def test_any_power_keeps_what_a_stage_adds_on_average(a):
    """rho times what it adds in training is what it adds in evaluation, over rho^(1 - a) and 1/rho^a."""
    x, paths = torch.zeros(1, 1, 1), [(0, 1), (0, 2), (0, 2), (0, 2)]
    model = types.SimpleNamespace(blocks=lambda x: x + 3)
    job = types.SimpleNamespace(rank=1, world=1, device=x.device, nccl=False)
    pipeline = scale.Power(model, job, [[0], [1], [2]], x.shape)
    pipeline.a, pipeline.take = a, lambda u, hop: x.clone()
    added = []
    pipeline.give = lambda u, hop, out: added.append(out.item()) if hop == 1 else None
    pipeline.run(paths, {})
    pipeline.run([(0, 1, 2)], {}, train=False)
    in_training, in_evaluation = added
    assert in_training == 3 * 4 ** a and in_evaluation == 0.25 * in_training


def test_pairs_of_a_hypercube_hold_the_mean_of_all_after_log_n_steps():
    ranks = [3, 4, 6, 7, 10, 11, 12, 15]
    drawn = set()
    for seed, turn in itertools.product((0, 1), range(3)):
        x = {r: float(r) ** turn for r in ranks}
        mean = sum(x.values()) / 8
        for step in range(3 * turn, 3 * turn + 3):
            pairs = closing.pairs_of_a_cube(ranks, step, seed)
            assert sorted(itertools.chain(*pairs)) == ranks
            drawn.add(frozenset(pairs))
            for a, b in pairs:
                x[a] = x[b] = (x[a] + x[b]) / 2
        assert [*x.values()] == [mean] * 8          # exactly: whole numbers, halved three times
    assert len(drawn) > 9               # the turns differ
    for n in (1, 6):
        with pytest.raises(ValueError, match=f"2, 4, 8, ... corners, not {n}"):
            closing.pairs_of_a_cube(range(n), 0, 0)
