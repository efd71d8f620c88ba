"""The planner beyond test_minimal.py: invariants, feasibility, the dead, assignment, command line."""

import csv
import json
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import skippipe
from planning import search
from planning.__main__ import main
from planning.assign import assign_stages
from planning.instance import published_network
from tests.harness import HERE
from tests.oracles import PUBLISHED_ROUTES, assert_possible, random_network, valid_combinations

PLANS = [skippipe.plan, search.plan]    # the paper's, and ours


def cap(monkeypatch, caps):
    """At most caps[r] paths through node r, whatever its memory and speed."""
    monkeypatch.setattr(skippipe, "node_caps", lambda network, share, dead=(): caps)


def test_conflict_based_search_alone_finds_valid_paths():
    network, _ = published_network()
    for plan in PLANS:
        found = plan(network, 4, 3, rounds=2, seconds=None, collisions=False)
        assert skippipe.check(network, found.paths, 4) == [] and found.work < 1000 and found.makespan < 40


@pytest.mark.parametrize("plan", PLANS)
def test_a_valid_plan_is_found_exactly_where_there_is_one(plan, monkeypatch):
    draw, none = random.Random("feasible"), 0
    for _ in range(150):
        shape, kept = draw.choice(
            [([1, 2, 1, 1], 3), ([2, 1, 1, 2], 2), ([1, 1, 2], 2), ([2, 2, 1], 3), ([1, 1, 1, 1], 4)]
        )
        network = random_network(draw, shape)
        quota = [draw.choice([0, 1, 1, 2, 3]) for _ in network.compute]
        origins = (
            network.stages[0] * draw.choice([1, 2]) if len(network.stages[0]) == 1 else network.stages[0]
        )
        possible = next(valid_combinations(network, kept, origins, quota), None)
        cap(monkeypatch, quota)
        try:
            found = plan(network, kept, len(origins) // len(network.stages[0]), seconds=None, iterations=30)
            assert possible and skippipe.check(network, found.paths, kept) == []
        except skippipe.Infeasible as error:
            assert possible is None and "cannot be met" in str(error)
            none += 1
    assert 10 < none < 140


@pytest.mark.parametrize("plan", PLANS)
def test_random_instances_keep_the_invariants(plan, monkeypatch):
    draw = random.Random("invariants")
    for case in range(200):
        shape = [draw.randint(1, 3) for _ in range(draw.randint(1, 5))]
        network = random_network(draw, shape, (1.0,) if case % 2 else (0.3, 1.0, 3.0))
        kept = draw.randint(1, len(shape))
        each = draw.randint(1, 4)
        rounds = draw.randint(1, 2)
        swaps = draw.randint(0, 2)
        dead = {draw.randrange(sum(shape))} if case % 3 == 0 else set()
        monkeypatch.undo()
        if case % 5 == 0:       # memory, not the caps, decides: first come, first served may deadlock
            cap(monkeypatch, [100] * sum(shape))
        try:
            found = plan(network, kept, each, rounds, swaps, None, case, iterations=60, dead=dead)
        except skippipe.Infeasible:
            assert dead
            continue
        assert skippipe.check(network, found.paths, kept, swaps, dead) == []
        assert not dead & {r for p in found.paths for r in p}
        result = skippipe.simulate(network, found.paths, rounds=rounds, order=found.order)
        assert result.makespan == found.makespan >= found.bound - 1e-6
        assert_possible(network, found.paths, rounds, result)
        paths = search.random_valid_paths(network, kept, each, swaps, case, dead)
        assert skippipe.check(network, paths, kept, swaps, dead) == []


def test_a_plan_depends_on_seed_and_work_alone():
    network = random_network(random.Random(3), [3, 2, 2, 2], memory=(3,))
    first, again, other = (
        search.plan(network, 3, 3, seconds=None, iterations=900, seed=seed) for seed in (1, 1, 2)
    )
    assert (first.paths, first.order, first.makespan, first.work) == (
        again.paths, again.order, again.makespan, again.work
    )
    assert (first.paths, first.order) != (other.paths, other.order)
    longer = search.plan(network, 3, 3, seconds=None, iterations=3000, seed=1)
    assert longer.makespan <= first.makespan


@pytest.mark.parametrize("plan", PLANS)
def test_dead_nodes_and_what_cannot_be_met(plan, monkeypatch):
    network, _ = published_network()
    found = plan(network, 4, 3, 2, seconds=None, iterations=50, dead={5, 8, 11})
    assert len(found.paths) == 12 and skippipe.check(network, found.paths, 4, dead={5, 8, 11}) == []
    whole_stage = plan(network, 4, 3, 2, seconds=None, iterations=50, dead={15, 8, 14})
    assert skippipe.check(network, whole_stage.paths, 4, dead={15, 8, 14}) == []
    three_stages = [r for stage in network.stages[1:4] for r in stage]
    for constraint, dead in {"CC1": network.stages[0], "CC3": three_stages, "TC1": ()}.items():
        if constraint == "TC1":
            cap(monkeypatch, [2] * 20)
        with pytest.raises(skippipe.Infeasible, match=constraint):
            plan(network, 4, 3, 2, seconds=None, iterations=50, dead=dead)
    for wrong in (dict(stages_kept=7), dict(stages_kept=4, microbatches_per_origin=0)):
        with pytest.raises(ValueError):
            plan(network, **wrong)


def test_a_slow_node_gets_less_work():
    compute = [1.0] * 8
    compute[3] = 5.0
    network = skippipe.Network([[0.2] * 8] * 8, compute, [[0, 1], [2, 3, 4], [5, 6, 7]], memory=3)
    found = search.plan(network, 3, 3, seconds=None, iterations=3000)
    visits = [sum(r in p for p in found.paths) for r in (2, 3, 4)]
    assert visits[1] < min(visits[0], visits[2]) and sum(visits) == 6
    one_each = [(0, 2, 5), (1, 3, 6), (0, 4, 7), (1, 2, 5), (0, 3, 6), (1, 4, 7)]
    assert found.makespan < skippipe.simulate(network, one_each).makespan


def test_planned_order_beats_waiting_in_line_and_deadlocks_are_refused():
    network, _ = published_network()
    paths = PUBLISHED_ROUTES["SkipPipe"][2]
    order = skippipe.simulate(network, paths, rounds=2).order()
    order[8].reverse()
    with pytest.raises(skippipe.Deadlock):
        skippipe.simulate(network, paths, rounds=2, order=order)
    assert skippipe.Search(network, 4, 3, 2).simulate(paths, order) is None


def test_assigned_stages_are_at_least_as_good_as_the_published():
    published, names = published_network()
    stages = assign_stages(
        published.delay, published.compute, [5, 3, 3, 3, 3, 3], 4, 3, 2, overhead=0.13, origin_overhead=0.09,
        seconds=None, iterations=250,
    )
    assert [len(s) for s in stages] == [5, 3, 3, 3, 3, 3]
    assert sorted(r for s in stages for r in s) == list(range(20))
    network = skippipe.Network(published.delay, published.compute, stages, 3, 0.13, 0.09)
    ours, theirs = (
        search.plan(n, 4, 3, 2, seconds=None, iterations=600).makespan for n in (network, published)
    )
    assert ours <= theirs
    with pytest.raises(ValueError):
        assign_stages(published.delay, published.compute, [5, 3], 2)


def test_skippipe_command_line(tmp_path, capsys):
    delay = [[0.0 if i == j else 0.5 for j in range(4)] for i in range(4)]
    (tmp_path / "mine.json").write_text(json.dumps(dict(delay=delay, compute=0.1, stages=[[0, 1], [2], [3]])))
    main(
        [
            "--instance", str(tmp_path / "mine.json"), "--kept", "2", "--figure", "",
            "--results", str(tmp_path / "r.json"), "--save", str(tmp_path / "again.json"), "--seconds", "0.5",
        ]
    )
    assert "SkipPipe without TC2" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "r.json").read_text())["paths"]) == 6
    assert json.loads((tmp_path / "again.json").read_text())["stages"] == [[0, 1], [2], [3]]
    with open(tmp_path / "links.csv", "w", newline="") as file:
        csv.writer(file).writerows([["a", "b", "latency_ms", "bandwidth_gib_s"], ["X", "Y", 10, 0.1]])
    main(
        [
            "--links", str(tmp_path / "links.csv"), "--sizes", "2,1,1", "--kept", "2", "--figure", "",
            "--results", "", "--seconds", "0.2",
        ]
    )
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "odd.json").write_text(
        json.dumps(dict(delay=[[0, "x"], [1, 0]], compute=1, stages=[[0], [1]]))
    )
    capsys.readouterr()
    for wrong in (
        ["--kept", "9"], ["--kept", "x"], ["--dead", "99"], ["--nodes", "7"], ["--sizes", "3,x"],
        ["--instance", "nowhere.json"], ["--instance", str(tmp_path / "broken.json")],
        ["--instance", str(tmp_path / "odd.json")], ["--nonsense"],
        ["--links", str(tmp_path / "broken.json")], ["--compute", "-1"], ["--memory", "0"],
        ["--dead", "0,3,4,10,11"], ["--seconds", "-1"], ["--rounds", "0"], ["--nodes", "-3"],
    ):
        with pytest.raises(SystemExit) as stop:
            main([*wrong, "--figure", "", "--results", ""])
        error = capsys.readouterr().err
        assert stop.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1, (wrong, error)


def test_skippipe_hands_over_to_the_command_line():
    line = [sys.executable, str(HERE / "skippipe.py"), "--kept", "9"]
    out = subprocess.run(line, capture_output=True, text=True, timeout=120)
    assert out.returncode == 2 and out.stderr.startswith("error: --kept 9: takes 1 to 6"), out.stderr


def error_of(capsys, *argv):
    """main's one line on this command line."""
    with pytest.raises(SystemExit) as stop:
        main([*map(str, argv)])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1, error
    return error


def write_network(file, stages, **more):
    nodes = sum(map(len, stages))
    delay = [[0.0 if i == j else 0.5 for j in range(nodes)] for i in range(nodes)]
    file.write_text(json.dumps(dict(delay=delay, compute=0.1, stages=stages, **more)))


def test_the_command_line_shows_the_paths_and_overwrites_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_network(tmp_path / "mine.json", [[0, 1], [2], [3]], names=["Rome", "Oslo", "Bern", "Kiev"])
    (tmp_path / "sub").mkdir()
    write_network(tmp_path / "sub/mine.json", [[0], [1], [2], [3], [4], [5]])
    made = set()
    for argv, name, stages in (
        (["--instance", "mine.json"], "runs/skippipe-mine", [[0, 1], [2], [3]]),
        (["--instance", "sub/mine.json"], "runs/skippipe-sub-mine", [[r] for r in range(6)]),
        (["--instance", "sub/mine.json", "--kept", 3], "runs/skippipe-sub-mine-kept-3",
         [[r] for r in range(6)]),
        (["--kept", 3], "runs/skippipe-kept-3", published_network()[0].stages),
        (["--dead", "5,7"], "runs/skippipe-dead-5,7", published_network()[0].stages),
    ):
        main([*map(str, argv), "--seconds", "0"])
        out = capsys.readouterr().out
        assert f"picture  {name}.png\nnumbers  {name}.json\n" in out
        data = json.loads((tmp_path / f"{name}.json").read_text())
        kept = argv[-1] if "--kept" in argv else round(2 / 3 * len(stages))
        assert data["stages"] == stages and {len(path) for path in data["paths"]} == {kept}
        stage_of = {r: s for s, stage in enumerate(stages) for r in stage}
        names = data["names"] or ["node"] * len(stage_of)
        for path in data["paths"]:
            shown = r" +> ".join(re.escape(f"{names[r]} {r} ({stage_of[r]})") for r in path)
            assert re.search(rf"^[\d,]+ +{shown}$", out, re.M), (path, out)
        made |= {f"{name}.png", f"{name}.json"}
        monkeypatch.setattr("planning.__main__.draw", lambda file, *_: Path(file).touch())  # one was drawn
    assert {str(p.relative_to(tmp_path)) for p in tmp_path.glob("*/skippipe*")} == made


def test_the_command_lines_errors_name_what_is_wrong(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_network(tmp_path / "mine.json", [[0, 1], [2], [3]])
    (tmp_path / "no.json").write_text("delay: 3")
    (tmp_path / "odd.csv").write_text("a,b,latency_ms,bandwidth_gib_s\nX,Y,1,1\nY,Z,1,1\n")
    for argv, words in (
        (["--instance", "mine.json", "--nodes", 4], "leave out --nodes, --sizes and --links"),
        (["--instance", "mine.json", "--sizes", "2,1,1"], "leave out --nodes, --sizes and --links"),
        (["--instance", "mine.json", "--kept", 4], "--kept 4: takes 1 to 3"),
        (["--sizes", "2,1,1", "--kept", 0], "--kept 0: takes 1 to 3"),
        (["--dead", "x"], "--dead: takes whole numbers with commas between them, not x"),
        (["--dead", "99"], "--dead: [99] are no nodes of the network"),
        (["--rounds", 0], "--microbatches and --rounds take numbers from 1"),
        (["--instance", "no.json"], "--instance no.json: is no JSON"),
        (["--links", "odd.csv"], "--links odd.csv: must have the columns a,b,latency_ms,bandwidth_gib_s"),
        (["--nodes", 0], "must be positive and add up to the 0 nodes"),
    ):
        assert words in error_of(capsys, *argv)

    def compare(*_):
        raise AssertionError("it began to plan")
    monkeypatch.setattr("planning.__main__.compare", compare)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "the picture needs matplotlib" in error_of(capsys)


def test_arrays_and_tensors_are_taken_as_delays_and_compute():
    numpy, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    delay = [[0, 1, 2, 3], [1, 0, 2, 2], [2, 2, 0, 1], [3, 2, 1, 0]]
    compute, stages = [1, 2, 1, 3], [[0, 1], [2], [3]]
    want = skippipe.plan(skippipe.Network(delay, compute, stages), 2, 2, seconds=None, iterations=50)
    given = [(numpy.array(delay, dtype), numpy.array(compute, dtype))
             for dtype in ("float64", "float32", "float16", "int64", "uint8")]
    given += [(torch.tensor(delay, dtype=dtype), torch.tensor(compute, dtype=dtype))
              for dtype in (torch.float32, torch.bfloat16, torch.int32)]
    given += [([numpy.array(row) for row in delay], [numpy.float32(w) for w in compute])]
    for delays, seconds in given:
        network = skippipe.Network(delays, seconds, numpy.array([[0], [2], [3]]), memory=numpy.int64(3))
        assert json.loads(json.dumps(vars(network)))["delay"] == delay and network.stages == [[0], [2], [3]]
        network = skippipe.Network(delays, seconds, stages)
        found = skippipe.plan(network, numpy.int64(2), 2, seconds=None, iterations=50)
        assert (found.paths, found.order, found.makespan) == (want.paths, want.order, want.makespan)
    with pytest.raises(ValueError, match="must be numbers from 0, and finite"):
        skippipe.Network(numpy.full((4, 4), numpy.nan), compute, stages)
    with pytest.raises(ValueError, match="as many columns as rows"):
        skippipe.Network(numpy.zeros(4), compute, stages)


@pytest.mark.parametrize("plan", PLANS)
def test_unknown_dead_nodes_and_broken_numbers_of_stages_are_refused(plan):
    network, _ = published_network()
    for wrong, words in (
        (dict(dead={99}), r"dead: \[99\] are no nodes of a network of 20"),
        (dict(stages_kept=1.5), "all whole numbers; got 1.5"),
        (dict(microbatches_per_origin=2.0), "all whole numbers; got 4, 2.0"),
    ):
        with pytest.raises(ValueError, match=words):
            plan(network, **{**dict(stages_kept=4, seconds=None, iterations=20), **wrong})
    with pytest.raises(ValueError, match="no nodes"):
        search.random_valid_paths(network, 4, dead={-1})


def test_readme_planner_example_prints_what_it_says(tmp_path):
    """Every number that the example's comments promise, from skippipe.py alone in a folder, without torch."""
    block = next(
        b
        for b in re.findall(r"```python\n(.*?)```", (HERE / "README.md").read_text(), re.S)
        if "skippipe.plan(" in b
    )
    shutil.copy(HERE / "skippipe.py", tmp_path)
    line = [sys.executable, "-S", "-c", block]      # -S: no installed packages
    out = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120).stdout
    promised = [line.split("# ")[1] for line in block.splitlines() if "print(" in line]
    lines = out.splitlines()
    assert len(lines) == len(promised) == 5 and lines[2] == "[]"
    for line, words in zip(lines, promised):
        assert all(number in line for number in re.findall(r"\d+\.\d+", words)), (line, words)
