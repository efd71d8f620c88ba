"""tools.plot: its numbers are those of metrics.jsonl, of runs that have ended and of those under way."""

import csv
import io
import json
import math
import re
import statistics
import sys
from pathlib import Path

import pytest

from tests.harness import error_of, metrics, options
from tools import plot
from tools.runs import read_run

pytest.importorskip("matplotlib")
STEPS = [10, 20, 30, 40]


def lines_of(start, steps=STEPS, events=(), **more):
    """Evaluations whose numbers all differ, after the events before each."""
    found, events = [], sorted(events, key=lambda event: event["step"])
    for i, step in enumerate(steps):
        while events and events[0]["step"] <= step:
            found.append(events.pop(0))
        found.append(dict(step=step, seconds=start + 0.3 * step, corpus="c", heldout_loss=start + 5 / (i + 1),
                          weight_spread=1e-3 * (start + i), held=0.1 + 0.01 * i + 0.001 * start,
                          sync_bytes=int(start * 1000 * step), merged_loss=None) | more)
    return found


@pytest.fixture
def write(tmp_path, monkeypatch):
    """A function that writes a run's folder in runs/, and returns its path from there."""
    monkeypatch.chdir(tmp_path)

    def write_run(name, lines, *argv):
        folder = Path("runs", name)
        folder.mkdir(parents=True)
        config = vars(options("--steps", STEPS[-1], "--name", name, *argv))
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return folder

    return write_run


@pytest.fixture
def drawn(monkeypatch):
    """A function: the figure that plot.main makes for these arguments."""
    figures, draw = [], plot.draw

    def spy(*args):
        figures.append(draw(*args))
        return figures[-1]

    monkeypatch.setattr(plot, "draw", spy)

    def figure_of(*argv):
        plot.main([str(word) for word in argv])
        return figures.pop()

    return figure_of


def panels(figure):
    """{(label of x, label of y): axes}"""
    return {(axis.get_xlabel(), axis.get_ylabel()): axis for axis in figure.axes if axis.get_xlabel()}


def line(axis, label):
    (found,) = [line for line in axis.lines if line.get_label() == label]
    return found


def points(axis, label):
    found = line(axis, label)
    return list(found.get_xdata()), list(found.get_ydata())


def legends(figure):
    found = [axis.get_legend() for axis in figure.axes if axis.get_legend()]
    return [[text.get_text() for text in legend.get_texts()] for legend in [*figure.legends, *found]]


def csv_rows(capsys, *folders):
    plot.main([*map(str, folders), "--csv"])
    return list(csv.DictReader(io.StringIO(capsys.readouterr().out)))


def as_cell(value):
    """A value of metrics.jsonl as the CSV must have it; a float's text gives the same float again."""
    return "" if value is None else json.dumps(value) if isinstance(value, list) else str(value)


def test_a_runs_last_line_names_the_command_that_draws_it_and_the_bar_its_losses(trained, tmp_path,
                                                                               monkeypatch, capsys):
    out = trained(2, "--steps", 6, "--eval-every", 2, "--inner-steps", 2, "--warmup", 2)
    rows = metrics(tmp_path / "runs/x")
    for row in rows:
        assert re.search(rf"loss \d\.\d+, held-out {row['heldout_loss']:.3f}\]", out)
    said = re.search(r"^kept in runs/x; a picture: python -m tools.plot (\S+)$", out.splitlines()[-1])
    monkeypatch.chdir(tmp_path)
    plot.main([said[1]])
    assert capsys.readouterr().out == "runs/x/plot.png\n"
    assert Path("runs/x/plot.png").read_bytes().startswith(b"\x89PNG")
    found = csv_rows(capsys, "runs/x")
    assert [row["run"] for row in found] == ["runs/x"] * 3 and {row["method"] for row in found} == {"noloco"}
    for row, cells in zip(rows, found, strict=True):
        assert row.keys() <= cells.keys()
        assert {name: cells[name] for name in row} == {name: as_cell(value) for name, value in row.items()}


def test_the_csv_has_the_lines_of_all_runs_and_their_events(write, capsys):
    event = dict(event="dead", step=12, ranks=[1, None], line='from step 12, "without" 1, 2')
    a, b = lines_of(1, events=[event]), lines_of(2, more=None)
    found = csv_rows(capsys, write("a", a, "--seed", 3), write("b", b, "--method", "ddp"))
    assert [row["method"] for row in found] == ["noloco"] * 5 + ["ddp"] * 4
    assert [row["seed"] for row in found] == ["3"] * 5 + ["0"] * 4
    assert [row["event"] for row in found] == ["", "dead"] + [""] * 7
    for row, cells in zip(a + b, found, strict=True):
        wanted = {name: as_cell(row.get(name)) for name in cells if name not in ("run", "method", "seed")}
        assert wanted == {name: cells[name] for name in wanted}


def test_lines_are_the_numbers_of_metrics_jsonl(write, drawn):
    rows = lines_of(1)
    rows[1]["weight_spread"] = None
    rows[-1]["merged_loss"] = 1.5
    found = panels(drawn(write("a", rows)))
    assert len(found) == 5
    for panel in plot.PANELS:
        x, y = points(found[panel.x_label, panel.y_label], "NoLoCo")
        assert x == [row[panel.x] for row in rows]
        for row, number in zip(rows, y, strict=True):
            assert number == row[panel.y] or row[panel.y] is None and math.isnan(number)
        if panel.y == "heldout_loss":
            axis = found[panel.x_label, panel.y_label]
            assert points(axis, "merged model") == ([rows[-1][panel.x]], [1.5])
            assert axis.get_ylim()[0] < 1.5                         # the ring is seen


def test_only_what_was_measured_has_a_panel(write, drawn):
    alone = lines_of(1, weight_spread=None, held=0.0, sync_bytes=0)
    figure = drawn(write("a", alone))
    assert [x for x, _ in panels(figure)] == ["inner steps", "seconds of training"]
    assert legends(figure) == [["NoLoCo: 2.2500, sent nothing"]]


def test_seeds_of_one_method_are_a_band_from_the_lowest_to_the_highest(write, drawn):
    logs = {seed: lines_of(1 + (seed * 7) % 5) for seed in range(3)}
    logs[2].pop()                                                   # it is under way
    folders = [write(f"s{seed}", rows, "--seed", seed) for seed, rows in logs.items()]
    figure = drawn(*folders)
    assert legends(figure) == [["NoLoCo, 3 seeds: 4.6667 at step 30"]]
    for panel in plot.PANELS:
        axis = panels(figure)[panel.x_label, panel.y_label]
        (band,) = axis.collections
        columns = [rows[:3] for rows in logs.values()]
        x, y = points(axis, "NoLoCo, 3 seeds")
        corners = {(float(a), float(b)) for a, b in band.get_paths()[0].vertices}
        wanted = set()
        for i, at_step in enumerate(zip(*columns)):
            values = [row[panel.y] for row in at_step]
            assert x[i] == statistics.fmean(row[panel.x] for row in at_step)
            assert y[i] == statistics.fmean(values)
            wanted |= {(float(x[i]), float(min(values))), (float(x[i]), float(max(values)))}
        assert corners == wanted and len(x) == 3
        low, high = axis.get_ylim()
        assert low <= min(values) and max(values) <= high           # the band's end is seen
    other = drawn(*folders, write("other", logs[0], "--seed", 0, "--lr", 0.5))       # not a fourth seed
    labels = [text.split(":")[0] for text in legends(other)[0]]
    assert labels == ["NoLoCo, lr 0.003, 3 seeds", "NoLoCo, lr 0.5"]


def test_an_event_is_a_mark_at_its_step_on_the_line(write, drawn):
    events = [dict(event="dead", step=3, ranks=[1]), dict(event="lost", step=3, rank=0),
              dict(event="outer step without partners", step=25, missing=[1]),
              dict(event="joined", step=35, rank=1), dict(event="planned anew", step=30),
              dict(event="takeover", step=38), dict(event="leapt", step=40), dict(event="leapt", step=35)]
    rows = lines_of(1, events=events)
    folder = write("a", rows)
    figure = drawn(folder)
    rows = [row for row in rows if "event" not in row]
    assert legends(figure) == [["NoLoCo: 2.2500", "a rank is dead or missed", "a rank joins",
                                "another rank leads", "new plan", "other event"]]
    for panel in plot.PANELS:
        axis = panels(figure)[panel.x_label, panel.y_label]
        marks = {}
        for mark in axis.lines[1:]:
            ((x,), (y,)) = mark.get_xdata(), mark.get_ydata()
            marks.setdefault(mark.get_label(), []).append((x, y))
        assert {label: len(places) for label, places in marks.items()} == {
            "a rank is dead or missed": 2, "a rank joins": 1, "new plan": 1, "another rank leads": 1,
            "other event": 1}
        # a new plan was made at an evaluation, a partner missed half-way between two
        assert marks["new plan"] == [(rows[2][panel.x], rows[2][panel.y])]
        halfway = [pytest.approx((rows[1][key] + rows[2][key]) / 2) for key in (panel.x, panel.y)]
        assert list(max(marks["a rank is dead or missed"])) == halfway
        # before the first evaluation: between the run's begin and that
        first = pytest.approx(0.3 * rows[0][panel.x]), rows[0][panel.y]
        assert min(marks["a rank is dead or missed"]) == first
        low, high = sorted(axis.get_ylim())
        assert all(low <= y <= high for places in marks.values() for _, y in places)


def test_a_run_under_way_is_drawn_up_to_its_last_whole_line(write, drawn, capsys):
    rows = lines_of(1)
    folder = write("a", rows[:2])
    text = json.dumps(rows[2])
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(text[:30])
    figure = drawn(folder)
    axis = panels(figure)[plot.PANELS[0].x_label, plot.PANELS[0].y_label]
    assert points(axis, "NoLoCo")[0] == [10, 20] and legends(figure) == [["NoLoCo: 3.5000 at step 20"]]
    assert figure.get_suptitle() == "runs/a: held-out loss 3.5000 at step 20 of 40"
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(text[30:] + "\n")
    assert [row["step"] for row in read_run(folder).evaluations] == [10, 20, 30]
    assert capsys.readouterr().err == ""
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(text[30:] + "\n" + json.dumps(rows[3]) + "\n")
    assert [row["step"] for row in read_run(folder).evaluations] == [10, 20, 30, 40]
    told = capsys.readouterr().err
    assert told.startswith("warning: line 4 of runs/a/metrics.jsonl is damaged and left out: ")


def test_a_method_has_one_colour_and_other_dashes_for_other_options(write, drawn):
    folders = [write("a", lines_of(1)), write("b", lines_of(2), "--inner-steps", 2),
               write("c", lines_of(3), "--method", "ddp"), write("d", lines_of(1.5), "--wire", "int8")]
    figure = drawn(*folders)
    axis = figure.axes[0]
    labels = ["NoLoCo, inner-steps 10, wire fp32", "NoLoCo, inner-steps 2, wire fp32", "DDP, wire fp32",
              "NoLoCo, inner-steps 10, wire int8"]
    lines = [line(axis, label) for label in labels]
    colours = [found.get_color() for found in lines]
    assert colours == [plot.COLOURS[name] for name in ("NoLoCo", "NoLoCo", "DDP", "NoLoCo")]
    assert len({(found.get_color(), found.get_linestyle()) for found in lines}) == 4
    (texts,) = legends(figure)
    assert [text.split(": ")[0] for text in texts] == labels
    assert figure.get_suptitle() == f"Lowest held-out loss after 40 steps: {labels[0]}, 2.2500"


def test_x_bytes_draws_the_loss_against_bytes_alone(write, drawn, capsys):
    logs = [lines_of(1), lines_of(30), lines_of(1, sync_bytes=0)]
    logs[0][0]["sync_bytes"] = 0                        # a logarithmic axis has no place for it
    folders = [write("a", logs[0]), write("b", logs[1], "--method", "ddp"),
               write("c", logs[2], "--method", "local")]
    figure = drawn(*folders, "--x", "bytes")
    (axis,) = figure.axes
    assert (axis.get_xlabel(), axis.get_xscale()) == ("bytes sent to synchronise, all ranks", "log")
    assert points(axis, "DDP") == ([30_000 * step for step in STEPS], [30 + 5 / i for i in (1, 2, 3, 4)])
    x, y = points(axis, "NoLoCo")
    assert math.isnan(x[0]) and x[1:] == [1000 * step for step in STEPS[1:]]
    assert "local: 2.2500, sent nothing" in legends(figure)[0]
    assert capsys.readouterr().out == "runs/plot-bytes.png\n" and Path("runs/plot-bytes.png").exists()
    # an earlier picture among the folders, as runs/* names it, is none of them
    assert len(panels(drawn(*sorted(Path("runs").iterdir()), "--out", "new/all.svg"))) == 5
    assert Path("new/all.svg").exists()
    assert {axis.get_xscale() for axis in drawn(folders[0]).axes} == {"linear"}     # no methods to compare


def test_runs_with_other_data_are_no_seeds_and_the_title_says_so(write, drawn):
    figure = drawn(write("a", lines_of(1)), write("b", lines_of(2, corpus="d"), "--seed", 1))
    assert figure.get_suptitle() == "The runs have different corpora: their losses do not compare"
    assert [text.split(":")[0] for text in legends(figure)[0]] == ["NoLoCo, corpus c", "NoLoCo, corpus d"]


def test_a_loss_that_was_not_measured_is_no_lowest_loss(write, drawn):
    rows = lines_of(1)
    rows[-1]["heldout_loss"] = None
    figure = drawn(write("a", rows), write("b", lines_of(2), "--method", "ddp"))
    assert figure.get_suptitle() == "A held-out loss after 40 steps was not measured"
    assert legends(figure) == [["NoLoCo: not measured", "DDP: 3.2500"]]
    assert drawn("runs/a").get_suptitle() == "runs/a: held-out loss not measured at step 40"


def test_what_cannot_be_drawn_is_one_line(write, monkeypatch):
    good = write("good", lines_of(1))
    write("silent", [], "--eval-every", 70)
    write("early", lines_of(1, steps=[7]), "--seed", 1)
    write("begun", []).joinpath("config.json").write_text("")
    write("bare", []).joinpath("metrics.jsonl").unlink()
    Path("picture.png").touch()
    for argv, error in (
            (["nowhere"], "nowhere is no folder: give folders of runs, e.g. runs/NAME"),
            ([good, "runs"], "runs is the folder of no run, or of one that has not begun"),
            (["runs/begun"], "runs/begun is the folder of no run, or of one that has not begun"),
            (["runs/bare"], "runs/bare/metrics.jsonl cannot be read: No such file"),
            (["runs/silent"], "has no evaluation yet: the first one is after 70 steps (--eval-every)"),
            ([good, "runs/early"], "have no evaluation after the same number of steps yet"),
            (["picture.png"], "picture.png is a file: give folders of runs"),
            ([good, "--csv", "--x", "steps"], "--csv prints all numbers and draws nothing"),
            ([good, "--out", "x.jpeg2"], "ends with .png, .pdf or .svg"),
            ([good, "--out", "picture.png/x.png"], "picture.png/x.png cannot be written"),
            ([], "the following arguments are required: runs")):
        assert error in error_of(plot.main, *argv)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install '.[plot]'" in error_of(plot.main, good)
    assert not list(Path().rglob("plot*"))
