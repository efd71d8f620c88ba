"""What the experiments count with: the stability recursion, their clocks, their tables."""

import functools
import itertools
import json
import math
import time
import types
from collections import Counter
from unittest import mock

import pytest
import torch

import train
from experiments import failure, losses, network, replicas, runs, skip, stability, sync, together
from noloco import outer_update
from plumbing.options import layout
from gossip.window import gamma_bound
from tests.harness import HERE, SMALL, checkpoint, metrics, options, run


@pytest.mark.parametrize("replicas, n", [(4, 2), (5, 2), (6, 3), (4, 4)])
def test_moment_recursion_equals_the_average_over_all_groupings(replicas, n):
    """One outer step of N2 and N3 with Delta = -p phi, for every order that replicas can be drawn in."""
    alpha, beta, gamma, pull = 0.6, 0.8, 1.1, 0.3
    draw = torch.randn(2, replicas, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    x, d = draw - draw.mean(1, keepdim=True)
    moments = lambda x, d: torch.stack([x @ x, x @ d, d @ d])
    total = torch.zeros(3, dtype=torch.float64)
    for order in itertools.permutations(range(replicas)):
        phi, delta = x + 7, d - 2  # what all share is no difference
        for g in (list(order[i :: replicas // n]) for i in range(replicas // n)):
            p, q = phi[g], delta[g]
            outer_update(p, q, (1 - pull) * p.mean(0), p.mean(0), alpha, beta, gamma)
            phi[g], delta[g] = p, q
        total += moments(phi - phi.mean(), delta - delta.mean()) / math.factorial(replicas)
    matrix = stability.moment_matrix(alpha, stability.contraction(replicas, n), beta, gamma, pull)
    assert torch.allclose(matrix @ moments(x, d), total, rtol=1e-12)


def test_spectral_radius_crosses_one_exactly_at_the_bound():
    radius = lambda *settings: torch.linalg.eigvals(stability.moment_matrix(*settings)).abs().max()
    for alpha, n, pull in itertools.product((0.0, 0.5, 0.9), (2, 4, 16), (0.0, 0.3)):
        for k in (1 - 1 / n, stability.contraction(16, n)):
            bound = stability.exact_bound(alpha, k, pull)
            low, high = 0.999 * bound, 1.001 * bound
            assert radius(alpha, k, low, low, pull) < 1 < radius(alpha, k, high, high, pull)
            assert bound >= stability.exact_bound(alpha, k)         # gamma = beta: a pull widens the window
        assert stability.exact_bound(alpha, 1 - 1 / n) == pytest.approx(gamma_bound(alpha, n))
        for count in (2, 3, 4, 5, 16, 17):
            if n <= count:
                exact = stability.exact_bound(alpha, stability.contraction(count, n))
                assert gamma_bound(alpha, n, count) == pytest.approx(exact)
    assert gamma_bound(0.9, 2) > 0.1 and radius(0.9, 0.5, 0.7, 0.1, 1.0) > 1         # another beta, full pull
    # heavy ball: 2 (1 + alpha); one replica has nothing to hold together
    assert stability.exact_bound(0.5, stability.contraction(16, 16)) == pytest.approx(3)
    assert gamma_bound(0.5, 2, 1) == gamma_bound(0.5, 2, 2) == pytest.approx(3)


def test_all_reduce_seconds_by_hand():
    whole = [[0, 9, 2], [9, 0, 3], [2, 3, 0]]
    part = lambda by: [[x / by for x in row] for row in whole]
    # Two rounds of 9 / 3, or of (9 + 3) / 3 where a rank's messages queue; a ring: four of 3. Then mostly
    # latency: whole vectors, once.
    cases = ([0, 1, 2], 3, max), ([0, 1, 2], 3, sum), ([0, 1, 2], 1.5, max), ([0, 2], 2, max)
    assert [together.all_reduce_seconds(r, whole, part(by), way) for r, by, way in cases] == [6, 8, 9, 2]
    slow = [[400 if {i, j} == {0, 2} else 4 for j in range(4)] for i in range(4)]
    # the ring goes round the slow link
    assert together.all_reduce_seconds([0, 1, 2, 3], slow, [[x / 4 for x in row] for row in slow]) == 6


def test_steps_take_what_they_hold_and_losses_lie_on_straight_lines():
    curves = dict(step=[1, 2, 3], seconds=[10, 20, 30], heldout_loss=[3.0, 2.0, 1.0], sync_bytes=[0, 0, 0])
    run = runs.Result(dict(command="--seed 1 --wire bf16 --wire int8 --seed 3", ranks=1, curves=curves))
    assert (run.wire, run.seed) == ("int8", 3)
    found = {"half": 10.0, "DDP, int8": 12.0, "NoLoCo, int8": 14.0}
    assert [together.a_step(found, "half", m) for m in [*together.METHODS][1:]] == [22, 16, 17, 24, 10, 10]
    assert [runs.reaches(loss, run.losses, curves["seconds"]) for loss in (1.5, 0.9)] == [25, None]
    assert [runs.loss_at(second, run) for second in (5, 15, 40)] == pytest.approx([3.0, 2.5, 1.0])


def test_intervals_and_predicted_seconds_by_hand():
    assert runs.interval_of([1.0, 2.0, 3.0], ".3f") == "2.000 [-0.484, 4.484], undecided"      # t is 4.303
    assert runs.interval_of([-1.0, -2.0, -3.0, -2.0], ".1f") == "-2.0 [-3.3, -0.7], better"
    # 8.92 Mbit a byte: a ring of eight takes 14 messages, codes 2; a pair shares its slower link
    found = [next(network.predicted(*how)) for how in (
        ("DDP", "fp32", "50 Mbit/s, 25 ms"), ("DiLoCo", "int8", "50 Mbit/s, 25 ms"),
        ("NoLoCo", "int8", "one host 20 Mbit/s"))]
    assert found == pytest.approx([0.35 + 1.75 * 4 * 8.92 / 50, 0.05 + 1.75 * 8.92 / 50,
                                   0.005 + 8.92 * (3 / 4 / 200 + 1 / 4 / 20)])


def test_a_clock_gives_the_steps_that_fit():
    """11 steps in 30 s, then steps of 2.5 s; at a slower pace, here or elsewhere, fewer. Rank 0 decides.

    With --survive its pace alone counts, and the others read its numbers.
    """
    job = mock.Mock(agree_on=mock.Mock(side_effect=lambda key, function: function()),
                    share=lambda key, pace: [pace, 0.2 if "slow" in key else 9.0])
    o = types.SimpleNamespace(inner_steps=3, delay=2, steps=10**6, eval_every=10**6, warmup=20)
    of_rank = types.SimpleNamespace(o=o, job=job)
    meter = network.Clock(run=of_rank, own=types.SimpleNamespace(clock=100.0, half="test"))
    for of_rank.step, seconds in ((10, 30.0), (20, 55.0)):
        meter.clock = time.perf_counter() - seconds
        meter.add(0.0, 0, None, 2.5)
    assert (o.steps, o.eval_every) == (38, 6)       # 21 and 18 in 45 s, with D; a sixth is 6.7 steps, so 6
    for at, seconds in ((21, 60.0), (30, 90.0)):    # 34 steps fit; then it is too late to change
        meter.fit(f"pace/{at}", seconds, at)
        assert (o.steps, o.eval_every) == (35, 6)
    meter.fit("a slow host", 60.0, 21)
    assert o.steps == 29                            # 8 steps in 40 s
    assert len({call.args[0] for call in job.agree_on.call_args_list}) == 4
    job.store, of_rank.step = torch.distributed.HashStore(), 21
    network.Leading(run=of_rank, own=meter.own, begun=meter.begun).fit("a slow host", 60.0, 21)
    o.steps = o.eval_every = 10**6
    network.Following(run=of_rank).add(0.0, 0, None, 2.5)
    assert (o.steps, o.eval_every) == (35, 6)


def test_a_clocked_run_evaluates_just_after_outer_steps_and_ends_after_a_landing(trained, tmp_path):
    trained(2, "--clock", 2.0, "--inner-steps", 3, "--delay", 1, "--warmup", 6, main=network.clocked)
    *steps, last = [row["step"] for row in metrics(tmp_path / "runs/x")]
    assert steps[0] > 6 and last % 3 == 1 and not any(step % 3 for step in steps)
    assert len({b - a for a, b in zip(steps, steps[1:])}) <= 1
    part = checkpoint(tmp_path / "runs/x", last, 1)
    assert part["step"] == last and part["outer"]["sent"] is None
    assert json.loads((tmp_path / "runs/x/config.json").read_text())["steps"] == last


PARTS = {       # name: (its runs, its table)
    "convergence": (losses.runs, losses.table),
    **{part: (getattr(network, f"{part}_runs"), getattr(network, f"show_{part}"))
       for part in ("tries", "grid", "latency", "pipeline")},
    **{part.__name__.split(".")[1]: (part.runs, part.table) for part in (failure, skip, together)},
    "scale": (skip.scaled_runs, skip.scaled_table),
}


def given(command):
    """{option: its last value}, without the steps, which depend on the planner."""
    pairs = dict(part.partition(" ")[::2] for part in command.split(" --"))
    return {option: value for option, value in pairs.items() if option not in ("name", "seed", "steps")}


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("steps", [None, 4])
def test_every_run_is_one_that_train_takes_and_has_a_name_of_its_own(name, steps, monkeypatch):
    for module in (skip, together):
        monkeypatch.setattr(module, "makespan", lambda *_: 50.0)        # planning takes seconds
    kinds = list(PARTS[name][0](steps))
    assert len({kind.label for kind in kinds}) == len(kinds) > 1
    rows = {} if steps else runs.kept(HERE, f"headline_{name}")["runs"]
    for kind in kinds:
        argv = f"--name x {runs.SMALL} {kind.options} --seed 1".split()
        layout(train.parse(argv, kind.processes), kind.processes)
        for row in rows.get(kind.label, [])[:1]:
            now = given(" ".join([kind.program, *argv]))
            assert now == given(row["command"]), kind.label     # as what results/ was made with


def test_the_docs_tables_are_what_the_results_print(capsys, monkeypatch, tmp_path):
    """Every row of a docs table whose head a program prints is a row that it prints from results/."""
    monkeypatch.setattr(sync, "picture", lambda *_: None)
    tables = dict(stability=stability.table, delay=replicas.show_delay, many=replicas.show_many)
    for name, table in (tables | {name: table for name, (_, table) in PARTS.items()}).items():
        table(runs.kept(HERE, f"headline_{name}"))
    sync.show(["--out", str(HERE)])
    printed = {line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith("| ")}
    checked = Counter()
    for file in (HERE / "README.md", *HERE.glob("docs/*.md")):
        lines = [line.strip() for line in file.read_text().splitlines()]
        for i, line in enumerate(lines):
            if line in printed and lines[i + 1].startswith("|---"):
                rows = [*itertools.takewhile(lambda row: row.startswith("|"), lines[i + 2:])]
                assert rows and [row for row in rows if row not in printed] == [], (file.name, line)
                checked[file.name] += 1
    assert checked["results.md"] >= 7 and checked["speed.md"] >= 3, checked


def test_skip_simulates_the_network_that_its_table_was_made_on():
    found = runs.kept(HERE, "headline_skip")["seconds"]
    assert skip.seconds() == {label: pytest.approx(sync) for label, sync in found.items()}


def test_a_try_keeps_to_folders_of_its_own_and_is_not_run_twice(monkeypatch, tmp_path):
    """Two runs of two seeds, of which only the commands are told."""
    monkeypatch.chdir(tmp_path)

    def torchrun(processes, *words, **_):
        folder = tmp_path / "runs" / words[words.index("--name") + 1]
        folder.mkdir(parents=True)          # an error where it runs again
        row = dict.fromkeys(runs.KEPT, 1.0) | dict(step=int(words[words.index("--steps") + 1]))
        (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")

    monkeypatch.setattr(runs, "torchrun", torchrun)
    kinds = [runs.Run("a b", "--steps 4"), runs.Run("c", "--steps 4", after=lambda folder: dict(mean=2.0))]
    part, o = runs.Part(lambda steps: kinds, None), types.SimpleNamespace(seeds=[0, 5], steps=4, only="")
    found = runs.run_all("x", part, o)
    assert runs.run_all("x", part, o)["runs"] == found["runs"]
    names = [f"headline-x-{run}-of-4-steps" for run in ("a-b-0", "a-b-5", "c-0", "c-5")]
    assert sorted(p.name for p in (tmp_path / "runs").iterdir() if p.is_dir()) == names
    assert [row["mean"] for row in found["runs"]["c"]] == [2.0, 2.0]
    assert [(runs.Result(r).seed, *r["curves"]["step"]) for r in found["runs"]["a b"]] == [(0, 4), (5, 4)]


def test_losing_drops_what_visits_the_victim(trained, tmp_path):
    """In every iteration one of the two replicas of stage 1 dies, and half of the 4 microbatches with it."""
    trained(4, "--stages", "2,2", "--steps", 5, main=functools.partial(failure.lose, 1.0))
    row = metrics(tmp_path / "runs/x")[-1]
    assert row["lost_microbatches"] == 5 * 2 and math.isfinite(row["heldout_loss"])


def test_replicas_in_one_process_lose_what_processes_lose(corpus, tmp_path):
    """One byte, delayed, Adam and Muon: train.py's held-out loss."""
    small = [*SMALL, "--data", corpus, "--microbatches", 1, "--warmup", 2, "--steps", 6]
    for i, (trial, *optimizer) in enumerate((
            (replicas.Trial("noloco", 2, 1, "int8"), "--optimizer", "muon"), (replicas.Trial("noloco", 3),),
            (replicas.Trial("diloco", 2),), (replicas.Trial("ddp"),))):
        fleet = replicas.Fleet(options(*small, *optimizer), [trial], 4, [0], "cpu")
        (found,) = fleet.train()
        outer = ["--wire", trial.wire, "--inner-steps", trial.every] if trial.method != "ddp" else []
        outer += ["--delay", trial.delay] if trial.delay else []
        run(4, *small, *optimizer, "--method", trial.method, *outer, "--name", f"x{i}", cwd=tmp_path)
        told = metrics(tmp_path / f"runs/x{i}")[-1]["heldout_loss"]
        assert found["losses"][-1] == pytest.approx(told, abs=2e-4)
