"""make plots: numbers outside of their tolerance are told, and pictures show the numbers saved."""
import json
import math
import types

import pytest

import train
from experiments import claims, harness, plots, plotted
from experiments.claims import DDP, DILOCO, FRAGMENTS, FULL, HALF, NEVER, NOLOCO, NONE, PLANNED
from planning.instance import published_network
from train import layout
from train import BadInput

ENDS = {DDP: 2.0, DILOCO: 2.14, NOLOCO: 2.15, FRAGMENTS: 2.13, NEVER: 2.23}
BYTES = {DDP: 1.0, DILOCO: 1 / 20, NOLOCO: 1 / 17.5, FRAGMENTS: 1 / 17.5, NEVER: 0.0}    # of 8 replicas
SPREAD = {DDP: 0.0, DILOCO: 0.0, NOLOCO: 1.0, FRAGMENTS: 1.3, NEVER: 39.0}


def loss_numbers(seeds=3, **ends):
    """What the loss part might find. ends: other last losses of these methods."""
    runs = {}
    for label, end in (ENDS | ends).items():
        steps = [25 * (i + 1) for i in range(8)]
        curves = dict(step=steps, heldout_loss=[end + 0.1 * (7 - i) for i in range(8)],
                      sync_bytes=[8e6 * BYTES[label] * step for step in steps],
                      lr=[8.0 - i for i in range(8)],
                      weight_spread=[SPREAD[label] * (8.0 - i) for i in range(8)])
        runs[label] = [dict(command=f"x --seed {seed}", curves=curves, ranks=8, merged=end)
                       for seed in range(seeds)]
    return dict(runs=runs, quick=False, scale="200 steps, 8 replicas")


def outside(told):
    return [claim.text for claim in told if claim.is_outside]


def test_a_number_outside_of_its_tolerance_is_told():
    claim = lambda found, judged=True: claims.Claim("a number", found, 0.15, 0.05, judged=judged)
    for found, is_outside in ((0.101, False), (0.199, False), (0.09, True), (0.21, True), (None, True),
                              (math.nan, True)):
        assert claim(found).is_outside == is_outside, found
        assert not claim(found, judged=False).is_outside


def test_losses_out_of_order_are_told():
    assert outside(claims.of_loss(loss_numbers())) == []
    swapped = {DILOCO: 2.15, NOLOCO: 2.13}          # whose order is not claimed
    assert outside(claims.of_loss(loss_numbers(**swapped))) == []
    texts = outside(claims.of_loss(loss_numbers(**{NOLOCO: 2.24})))
    assert any("order" in text for text in texts) and any(NOLOCO in text for text in texts)
    assert claims.seeds_in_order(loss_numbers(**{DDP: 2.14})) == (0, 3)     # beside fragments' 2.13


def test_bytes_are_judged_in_a_try_too():
    found = loss_numbers(**{NOLOCO: 9.0}) | dict(quick=True)
    assert outside(claims.of_loss(found)) == []
    for row in found["runs"][NOLOCO]:
        row["curves"]["weight_spread"] = [0.0] * 8                          # of two replicas
        row["curves"]["sync_bytes"] = [2 * sent for sent in row["curves"]["sync_bytes"]]
    assert outside(claims.of_loss(found)) == [f"{NOLOCO}, bytes sent over DDP's"]


@pytest.fixture
def plt():
    found = pytest.importorskip("matplotlib.pyplot")
    found.switch_backend("agg")
    yield found
    found.close("all")


def lines(axis):
    """{label: (x, y)}"""
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axis.lines}


def test_the_curves_are_the_numbers_saved(plt):
    found = json.loads(json.dumps(loss_numbers()))
    figure = plotted.draw_loss(plt, found)
    steps, sent, spread = figure.axes
    for label, (name, *_) in plotted.LINES.items():
        curves = found["runs"][label][0]["curves"]
        assert lines(steps)[name] == (curves["step"], pytest.approx(curves["heldout_loss"]))
        assert (name in lines(sent)) == (label != NEVER)            # which sends nothing
        if label != NEVER:
            assert lines(sent)[name][0] == pytest.approx([b / 8e6 for b in curves["sync_bytes"]])
        assert (name in lines(spread)) == (label not in (DDP, DILOCO))      # whose replicas are equal
        if name in lines(spread):
            assert lines(spread)[name][1] == pytest.approx(curves["weight_spread"])


def test_bars_and_timelines_are_the_simulations(plt):
    """The published instance, planned anew."""
    found = json.loads(json.dumps(plotted.measure_skip(True)))
    assert outside(claims.of_skip(found)) == []
    widths = [bar.get_width() for bar in plotted.draw_times(plt, found).axes[0].patches]
    assert widths[::2] == list(found["seconds"].values())
    assert widths[1::2] == list(claims.PUBLISHED.values())
    network, _ = published_network()
    for axis, name in zip(plotted.draw_timelines(plt, found).axes, (FULL, PLANNED)):
        assert max(bar.get_x() + bar.get_width() for bar in axis.patches) == pytest.approx(
            found["seconds"][name])
        busy = sum(bar.get_width() for bar in axis.patches)
        passes = {FULL: 6, PLANNED: 4}[name]        # stages of each of 30 microbatches, at 2.5 forwards
        assert busy == pytest.approx(30 * 0.44 * (2.5 * passes + 0.25))


def test_missing_stages_are_the_choices_losses(plt):
    rows = {HALF: {"1.0": [1.9], "0.75": [1.90, 1.904], "0.5": [1.89, 1.93]},
            NONE: {"1.0": [1.8], "0.75": [2.0, 2.1], "0.5": [2.2, 2.4]}}
    runs = {label: [dict(shares=shares)] for label, shares in rows.items()}
    found = dict(runs=runs, quick=False, scale="300 steps")
    assert claims.missing_over(found, HALF, "0.5") == pytest.approx(math.exp(0.01) - 1)
    assert outside(claims.of_partial(found)) == []
    rows[HALF]["0.5"] = [1.9, 2.1]
    assert len(outside(claims.of_partial(found))) == 1
    axis = plotted.draw_partial(plt, found).axes[0]
    drawn = [container.lines[0].get_ydata() for container in axis.containers]
    assert list(drawn[0]) == pytest.approx(
        [math.exp(1.9), (math.exp(1.9) + math.exp(1.904)) / 2, (math.exp(1.9) + math.exp(2.1)) / 2])
    assert drawn[1][0] == pytest.approx(math.exp(1.8))


def test_one_failing_part_says_so_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    fine = plots.Plot(lambda quick: dict(x=1.0),
                      lambda found: [claims.Claim("x", found["x"], 1.0, 0.1, ".1f")], {})

    def break_down(quick):
        raise BadInput("torchrun failed (see x.log): one\ntwo")

    monkeypatch.setattr(plots, "PLOTS", {"bad": plots.Plot(break_down, None, {}), "good": fine})
    o = types.SimpleNamespace(parts=[], quick=True, plot=False, out=tmp_path)
    assert plots.make_plots(o) == 1
    out, err = capsys.readouterr()
    assert "bad: torchrun failed (see x.log): one" in err and "two" not in err
    assert "pass: x: 1.0" in out
    assert json.loads((tmp_path / "results/good.json").read_text()) == dict(x=1.0)
    o.parts = ["good"]
    assert plots.make_plots(o) == 0
    o.plot = True                               # what was measured is judged again
    (tmp_path / "results/good.json").write_text('{"x": 2.0}')
    assert plots.make_plots(o) == 1


@pytest.mark.parametrize("words, line", [
    (["losses"], "error: no part losses, only skip, sync, partial, loss"),
    (["--steps", "3"], "error: unrecognized arguments: --steps"),
])
def test_bad_input_is_one_line(words, line, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["plots", *words])
    with pytest.raises(SystemExit) as stopped:
        plots.main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err.strip().startswith(line)


def test_the_runs_are_commands_that_train_accepts(monkeypatch):
    """Of both scales; and the runs of a try are not taken for the whole ones."""
    asked = []
    monkeypatch.setattr(plotted, "run_all",
                        lambda name, part, o: asked.append((name, part, o)) or dict(runs={}))
    monkeypatch.setattr(plotted.skip, "keep_links", lambda network, name: name)
    for quick in (False, True):
        for measure in (plotted.measure_loss, plotted.measure_partial):
            measure(quick)
    for name, part, o in asked:
        for setting in part.settings(o.steps):
            argv = f"--name x {harness.SMALL} {setting.options} --seed 0".split()
            layout(train.parse(argv, setting.processes), setting.processes)
    names = [name for name, *_ in asked]
    assert len(set(names)) == 4


def test_a_loss_that_was_not_measured_is_said_and_the_rest_is_judged(monkeypatch):
    row = dict(merged=None, curves=dict(heldout_loss=[1.0]))
    runs = {label: [row] for label in (claims.DDP, *claims.AVERAGED, claims.NEVER)}
    assert claims.over_other(dict(runs=runs), claims.NOLOCO) is None
    assert claims.seeds_in_order(dict(runs=runs)) == (None, 1)
    told = claims.Claim("x", None, 1.0, 0.1)
    assert told.is_outside and "not measured" in str(told)
