"""Pictures and JSON files of plans, against the simulator's timeline."""

import json
import random
import re
import sys
from collections import Counter, defaultdict

import pytest

from planning import pictures
from planning.__main__ import main
from planning.instance import published_network
from planning.search import shorter_plan
from planning.drawing import pyplot
from skippipe import Network, check, full_paths, simulate
from tests.harness import HERE
from tests.oracles import random_network

NETWORK, NAMES = published_network()
PLAN = shorter_plan(NETWORK, 4, 3, 2, seconds=None, iterations=600)
TIMELINE = PLAN.timeline


@pytest.fixture
def plt():
    pytest.importorskip("matplotlib")
    plt = pyplot()
    yield plt
    plt.close("all")


def patches(axis):
    """{(row, start, end)} of the rectangles, by the name of their tone, and how many there are."""
    kinds = {pictures.TONES[kind].lower(): kind for kind in pictures.TONES}
    found = defaultdict(set)
    from matplotlib.colors import to_hex
    for patch in axis.patches:
        row = round(patch.get_y() + patch.get_height() / 2)
        start, end = patch.get_x(), patch.get_x() + patch.get_width()
        found[kinds[to_hex(patch.get_facecolor())]].add((row, round(start, 6), round(end, 6)))
    return found, len(axis.patches)


@pytest.mark.parametrize("kind", ["planned", "full", "an idle node"])
def test_the_rectangles_are_the_tasks_of_the_timeline(kind, plt):
    network, timeline = NETWORK, TIMELINE
    if kind == "full":
        timeline = simulate(network, full_paths(network.stages, 2)).timeline
    if kind == "an idle node":              # node 1 is of no stage, and above all others
        network = random_network(random.Random(1), [2, 1, 1])
        network = Network(network.delay, network.compute, [[3, 0], [2]])
        timeline = simulate(network, [(0, 2), (3,)]).timeline
    axis = plt.figure().subplots()
    pictures.draw_timeline(axis, network, timeline, until=100)
    rows = {node: row for row, node in enumerate(sum(network.stages, []))}
    want = defaultdict(set)
    for task in timeline:
        want[task.kind].add((rows[task.rank], round(task.start, 6), round(task.end, 6)))
    assert patches(axis) == (want, len(timeline))
    assert axis.get_xlim() == (0, 100) and axis.get_ylim()[1] > len(network.delay) - 1
    shown = [label.get_text() for label in axis.get_yticklabels()]
    assert sorted(shown) == sorted(f"node {node}" for node in range(len(network.delay)))
    assert all(shown[row] == f"node {node}" for node, row in rows.items())
    handles, labels = axis.get_legend_handles_labels()
    assert labels == ["forward", "loss", "backward"]


def test_the_maps_arrows_are_the_hops_of_the_paths(plt):
    axis = plt.figure().subplots()
    pictures.draw_map(axis, NETWORK, PLAN.paths, NAMES)
    cities = [label.get_text() for label in axis.get_yticklabels()]
    assert sorted(cities) == sorted(set(NAMES))
    # What is near on the map is near on Earth.
    assert abs(cities.index("London") - cities.index("Belgium")) == 1
    place = lambda node: (NETWORK.stage_of[node], cities.index(NAMES[node]))
    arrows = Counter((text.xyann, text.xy) for text in axis.texts if hasattr(text, "xyann"))
    hops = {(path[0], a, b) for path in PLAN.paths for a, b in zip(path, path[1:])}
    assert arrows == Counter((place(a), place(b)) for _, a, b in hops)
    assert {text.get_text() for text in axis.texts} - {""} == {str(node) for node in range(20)}


def test_nodes_of_one_stage_and_city_stand_side_by_side(plt):
    axis = plt.figure().subplots()
    network = Network([[0.1] * 4] * 4, 1, [[0, 1, 2], [3]])
    pictures.draw_map(axis, network, [(0, 3), (1, 3)], ["Rome", "Rome", "Oslo", "Rome"])
    places = [text.get_position() for text in axis.texts if text.get_text()]
    assert len(set(places)) == 4


def test_the_command_line_draws_and_writes_the_plan_that_it_made(tmp_path, monkeypatch, capsys, plt):
    monkeypatch.chdir(tmp_path)
    main("--seconds 0 --picture new/plan.png --results runs/NAME/plan.json".split())
    out = capsys.readouterr().out
    assert all(f"written to {file}\n" in out for file in ("new/plan.png", "runs/NAME/plan.json"))
    plan = json.loads((tmp_path / "runs/NAME/plan.json").read_text())
    assert plan["stages"] == NETWORK.stages and plan["names"] == NAMES
    assert Network(**plan["network"]) == NETWORK
    assert plan["made"] == dict(by="python -m planning", kept=4, microbatches=6)
    # The file alone gives another program the same iteration: all rounds are in it.
    paths = [tuple(path) for path in plan["paths"]]
    result = simulate(NETWORK, paths, order=plan["order"])
    assert len(paths) == 30 and result.makespan == pytest.approx(plan["makespan"])
    assert plan["makespan"] >= plan["bound"] > 33 and check(NETWORK, paths[:15], 4) == []
    for rank, tasks in enumerate(plan["order"]):        # as docs/planning.md says where a hop is
        for u, hop in tasks:
            visited = [*paths[u], paths[u][0], *reversed(paths[u])]
            assert rank == visited[hop]
    # The program of the docs draws the plan from its file.
    (program,) = re.findall(r"```python\n(.*?)```", (HERE / "docs/planning.md").read_text(), re.S)
    exec(program, {})
    for file in ("plan.png", "new/plan.png"):
        assert (tmp_path / file).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("argv, words", [
    ("--picture plan.bmp", "--picture plan.bmp: must end in .png, .svg or .pdf"),
    ("--picture file/plan.png", "'file'"), ("--results file/plan.json", "'file'")])
def test_a_wrong_file_is_one_line_before_the_search(argv, words, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("planning.__main__.compare_methods", None)      # calling it would be another error
    with pytest.raises(SystemExit) as stop:
        main(argv.split())
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1 and words in error


def test_without_matplotlib_one_line_names_the_extra(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit) as stop:
        main(["--picture", str(tmp_path / "plan.png")])
    assert stop.value.code == 2
    assert capsys.readouterr().err == "error: no picture without matplotlib: pip install '.[plot]'\n"
    assert not list(tmp_path.iterdir())
