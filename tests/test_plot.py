"""tools.plot: what it reads, what it refuses, and that it draws."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import HERE, error_of
from tools import plot

ROWS = [dict(step=step, seconds=0.3 * step, corpus="c", heldout_loss=2 + 5 / step, weight_spread=1e-3,
             sync_bytes=1000 * step, merged_loss=None) for step in (10, 20, 30, 40)]
EVENTS = [dict(event="dead", step=15, ranks=[1]), dict(event="joined", step=30, rank=1)]


@pytest.fixture
def write(tmp_path, monkeypatch):
    """A function that writes a run's folder in runs/, and returns its path from there."""
    monkeypatch.chdir(tmp_path)

    def write_run(name, lines, method="noloco"):
        folder = Path("runs", name)
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(dict(method=method)))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return folder

    return write_run


def test_a_real_run_is_drawn_where_its_last_line_says(trained, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    out = trained(2, "--steps", 4, "--eval-every", 2, "--inner-steps", 2, "--warmup", 2)
    monkeypatch.chdir(tmp_path)
    plot.main(re.search(r"python -m tools\.plot (\S+)", out)[1].split())
    assert capsys.readouterr().out == "runs/x/plot.png\n"
    assert Path("runs/x/plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_panels_lines_are_the_numbers_of_metrics_jsonl(write):
    pytest.importorskip("matplotlib")
    later = [row | dict(heldout_loss=3.0 + row["step"], weight_spread=None) for row in ROWS[:-1]]
    later[-1]["merged_loss"] = 2.5
    later.insert(1, dict(step=15, heldout_loss=None))
    runs = [plot.read_run(write("a", ROWS + EVENTS), "red"), plot.read_run(write("b", later), "blue")]
    losses, seconds, sent, spread = plot.draw(runs).axes
    for axis, x in ((losses, "step"), (seconds, "seconds"), (sent, "sync_bytes")):
        # The run with the highest last loss is drawn first. The first run's events follow its line.
        lines = [line.get_xydata().tolist() for line in axis.lines]
        second, ring, first = lines[:3]
        assert first == [[row[x], row["heldout_loss"]] for row in ROWS]
        assert second == [[row[x], 3.0 + row["step"]] for row in ROWS[:-1]]
        assert ring == [[ROWS[2][x], 2.5]]
        places = {start[0] for start, _ in lines[3:]}
        assert places == ({15, 30} if x == "step" else set())
    assert [line.get_color() for line in spread.lines] == ["red"] * 3       # b has none


def test_the_legend_names_the_lines_in_the_order_in_which_they_end(write):
    pytest.importorskip("matplotlib")
    other = [row | dict(corpus="d") for row in ROWS[:2]]
    runs = [plot.read_run(write("a", ROWS + EVENTS + EVENTS[:1]), "red"),
            plot.read_run(write("ddp", other, "ddp"), "blue")]
    figure = plot.draw(runs)
    (legend,) = figure.legends
    assert [(text.get_text(), text.get_color()) for text in legend.get_texts()] == [
        ("ddp\n2.2500 at step 20", "blue"), ("a (noloco)\n2.1250 at step 40\ndead: 2\njoined: 1", "red")]
    assert "do not compare" in figure.get_supxlabel()
    assert "do not compare" not in plot.draw(runs[:1]).get_supxlabel()


def test_one_process_alone_has_no_panel_of_bytes_and_none_of_spread(write):
    pytest.importorskip("matplotlib")
    alone = [row | dict(sync_bytes=0, weight_spread=None) for row in ROWS]
    figure = plot.draw([plot.read_run(write("a", alone), "red")])
    assert len(figure.axes) == 2


def test_what_is_not_finite_is_left_out_and_a_name_is_no_formula(write):
    pytest.importorskip("matplotlib")
    wild = [ROWS[0], *(row | dict(heldout_loss=loss) for row, loss in zip(ROWS[1:], (math.inf, math.nan)))]
    folder = write("a$b$", wild)
    figure = plot.draw([plot.read_run(folder, "red")])
    figure.canvas.draw()
    assert figure.axes[0].lines[0].get_xydata().tolist() == [[10, ROWS[0]["heldout_loss"]]]
    plot.main([str(folder)])
    assert error_of(plot.main, write("none", wild[1:])).startswith("error: runs/none has no evaluation")


def test_a_run_under_way_is_read_up_to_its_last_whole_line(write):
    folder = write("a", ROWS[:2])
    text = json.dumps(ROWS[2])
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(text[:30])
    assert plot.read_run(folder, "red").rows == ROWS[:2]
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(text[30:] + "\n")
    assert plot.read_run(folder, "red").rows == ROWS[:3]


def test_what_cannot_be_drawn_is_one_line(write, monkeypatch):
    good = write("good", ROWS)
    write("silent", [])
    write("bare", []).joinpath("metrics.jsonl").unlink()
    write("torn", []).joinpath("metrics.jsonl").write_text("{\n")
    for name, line in dict(number=5, list=[], stepless=dict(event="dead"), text=dict(step="x")).items():
        write(name, [*ROWS, line])
    write("begun", ROWS).joinpath("config.json").write_text("")
    Path("picture.png").touch()
    for argv, error in ((["nowhere"], "nowhere is the folder of no run"),
                        ([good, "runs"], "runs is the folder of no run"),
                        (["runs/bare"], "runs/bare is the folder of no run"),
                        (["runs/silent"], "runs/silent has no evaluation with a finite loss yet"),
                        (["runs/torn"], "runs/torn holds a damaged"),
                        (["runs/number"], "runs/number holds a damaged"),
                        (["runs/list"], "runs/list holds a damaged"),
                        (["runs/stepless"], "runs/stepless holds a damaged"),
                        (["runs/text"], "runs/text holds a damaged"),
                        (["runs/begun"], "runs/begun holds a damaged"),
                        (["picture.png"], "picture.png is a file"),
                        ([good, "--out", "picture.png/x.png"], "picture.png/x.png cannot be written")):
        assert error in error_of(plot.main, *argv)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install '.[plot]'" in error_of(plot.main, good)
    assert not list(Path().rglob("plot*"))


def test_it_stands_alone(write, tmp_path):
    """Copied away from all our files, it draws."""
    pytest.importorskip("matplotlib")
    folder = write("a", ROWS)
    alone = tmp_path / "plot.py"
    alone.write_text((HERE / "tools/plot.py").read_text())
    subprocess.run([sys.executable, "-I", alone, folder], check=True)
    assert (folder / "plot.png").exists()
