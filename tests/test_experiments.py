"""experiments/: what all rows share: records of runs and their runner, statistics, tables, pictures, docs."""

import functools
import itertools
import json
import math
import multiprocessing
import re
import sys
import types
from collections import Counter
from dataclasses import replace

import pytest

import train
from experiments import (__main__, failures, gap, harness, many, missing, pictures, routing, skipping,
                         stats)
from tests.harness import HERE, error_of

ROWS = {row.name: row for row in (*__main__.ROWS, *__main__.BETWEEN_HOSTS)}


# ---------------------------------------------------------------- statistics


def test_intervals_are_those_of_the_printed_table():
    """Student's t at 97.5%, by degrees of freedom, as printed in any textbook."""
    for freedom, t in {1: 12.706, 2: 4.303, 4: 2.776, 9: 2.262, 15: 2.131, 29: 2.045}.items():
        values = [0.1 * (-1) ** i + i / 100 for i in range(freedom + 1)]
        one = stats.Comparison(values)
        mean = sum(values) / len(values)
        error = math.sqrt(sum((v - mean) ** 2 for v in values) / freedom / (freedom + 1))
        assert one.interval == pytest.approx((mean - t * error, mean + t * error), rel=1e-3)


def test_comparisons_by_hand():
    three = stats.Comparison([1.0, 2.0, 3.0], ".3f")
    assert str(three) == "2.000 [-0.484, 4.484]" and three.verdict == stats.NOT_SIGNIFICANT     # t is 4.303
    four = stats.Comparison([-1.0, -2.0, -3.0, -2.0], ".1f")
    assert str(four) == "-2.0 [-3.3, -0.7]" and four.verdict == "better"
    assert four.p == pytest.approx(0.0163, abs=1e-4)                    # t = 4.899, 3 degrees of freedom
    assert str(stats.Comparison([0.01, 0.02, 0.03], "+.1%")) == "+2.0% [-0.5, 4.5]"
    one = stats.Comparison([0.25])
    assert str(one) == "+0.250" and one.p is None and one.interval is None and one.verdict == "one seed"
    assert stats.Comparison([0.0, 0.0]).p == 1


def test_holm_against_a_worked_example():
    """At 5%: 0.005 <= 0.05/4, 0.01 <= 0.05/3, 0.03 > 0.05/2 ends it, so 0.04 <= 0.05 no longer
    counts."""
    assert stats.holm([0.01, 0.04, 0.03, 0.005]) == [True, False, False, True]
    assert stats.holm([0.04]) == [True] and stats.holm([]) == []
    assert stats.holm([0.02, 0.02, 0.02]) == [False] * 3


def test_a_tables_verdicts_are_those_after_holms_correction_over_a_column(capsys):
    table = stats.Table("method", "over DDP's")
    table.add("DDP", None)
    table.add("sure", stats.Comparison([1.00, 1.01, 0.99, 1.00]))
    table.add("alone", stats.Comparison([-1.0, -2.0, -3.0, -2.0]))      # p is 0.016, of six
    table.add("one seed", stats.Comparison([1.0]))
    for _ in range(4):
        table.add("neither", stats.Comparison([1.0, -1.0, 0.5, -0.5]))
    table.end()
    _, _, ddp, sure, alone, one, neither, *_ = capsys.readouterr().out.splitlines()
    assert sure.endswith("], worse |") and alone.endswith("], nominally better |")
    assert ddp == "| DDP |  |" and one == "| one seed | +1.000 |" and neither.endswith("] |")


RECORDS = [dict(method="noloco", rate=1, seed=0, merged=1.0),
           dict(method="noloco", rate=1, seed=2, merged=1.5),
           dict(method="ddp", rate=1, seed=2, merged=1.2), dict(method="ddp", rate=1, seed=0, merged=0.9),
           dict(method="ddp", rate=1, seed=7, merged=9.0), dict(method="ddp", rate=2, seed=0, merged=0.1)]


def test_records_are_paired_by_their_facts_and_seeds():
    ddp = dict(method="ddp", rate=1)
    one = stats.paired(RECORDS, dict(method="noloco"), ddp)
    assert one.differences == pytest.approx([0.1, 0.3]) and one.seeds == (0, 2)
    assert stats.paired(RECORDS, dict(method="noloco"), ddp, how=stats.perplexity).differences == \
        pytest.approx([math.exp(0.1) - 1, math.exp(0.3) - 1])
    double = stats.paired(RECORDS, dict(method="noloco"), ddp, lambda one: 2 * one["merged"], stats.ratio)
    assert double.differences == pytest.approx([1.0 / 0.9 - 1, 1.5 / 1.2 - 1])
    assert stats.paired(RECORDS, dict(method="noloco"), dict(method="ddp", rate=3)) is None
    with pytest.raises(ValueError, match="two records of seed 0"):
        stats.paired(RECORDS, dict(method="noloco"), dict(method="ddp"))


def test_less_takes_one_difference_from_another_seed_by_seed():
    one = stats.Comparison([1.0, 2.0, 5.0], seeds=(0, 1, 3))
    other = stats.Comparison([0.5, 4.0, 9.0], seeds=(1, 3, 4))
    assert stats.less(one, other).differences == [1.5, 1.0]
    assert stats.less(one, stats.Comparison([1.0], seeds=(7,))) is None


def test_a_number_outside_of_its_tolerance_is_told():
    for number, is_outside in ((0.101, False), (0.199, False), (0.09, True), (0.21, True), (None, True),
                               (math.nan, True)):
        assert stats.Expected("a number", number, 0.15, 0.05).is_outside == is_outside, number


# ---------------------------------------------------------------- records and their runner


@pytest.fixture
def o(tmp_path):
    return types.SimpleNamespace(seeds=None, scale="try", out=tmp_path, plot=False)


def run_of(seed, **facts):
    return harness.Run(dict(facts, seed=seed), "--steps 4")


def record_of(run, **more):
    return run.known | dict(corpus="x", machine="m", cpu_hours=0.5) | more


def test_what_is_there_is_not_made_again_and_a_stopped_row_goes_on(o):
    wanted = [run_of(seed, method=method) for seed in (0, 1) for method in ("a", "b")]
    made = []

    def make(turn):
        if len(made) == 3:
            raise KeyboardInterrupt
        made.extend(turn)
        return [record_of(run) for run in turn]

    with pytest.raises(KeyboardInterrupt):
        harness.make_missing("x", wanted, make, o)
    made.append(None)                       # from here on nothing is stopped
    harness.make_missing("x", wanted, make, o)
    assert [run for run in made if run] == wanted
    changed = replace(wanted[0], options="--steps 5")
    harness.make_missing("x", [changed], make, o)
    assert made[-1] == changed              # other options are another run
    found = json.loads((o.out / "results/x.json").read_text())
    assert len(found["records"]) == 5 and found["made"]["cpu_hours"] == 2.5
    assert found["made"]["machine"] == "m"


def test_a_turn_is_made_again_until_others_work_is_below_the_limit(o):
    others = iter([0.3, 0.05, 0.2, 0.0])
    turns = []

    def make(turn):
        turns.append(len(turn))
        return [record_of(run, others=next(others)) for run in turn]

    wanted = [run_of(0, method=method) for method in ("a", "b")]
    harness.make_missing("x", wanted, make, o, turn_of=lambda missing: missing, most_others=0.2)
    assert turns == [2, 2]
    assert [record["others"] for record in harness.records_in(o.out / "results/x.json")] == [0.2, 0.0]
    with pytest.raises(train.BadInput, match="disturbed 5 attempts"):
        harness.undisturbed([run_of(1)], lambda turn: [record_of(turn[0], others=1.0)], 0.1)


def keep_one(out, number):
    o = types.SimpleNamespace(scale="try", out=out)
    harness.keep("x", [record_of(run_of(number))], o)


def test_processes_that_keep_records_at_the_same_time_lose_none(tmp_path, o):
    with multiprocessing.get_context("fork").Pool(4) as pool:
        pool.starmap(keep_one, [(tmp_path, number) for number in range(20)])
    file = tmp_path / "results/x.json"
    assert sorted(record["seed"] for record in harness.records_in(file)) == list(range(20))
    with pytest.raises(train.BadInput, match="another text"):
        harness.keep("x", [record_of(run_of(20), corpus="y")], o)
    assert len(harness.records_in(file)) == 20


def test_a_run_of_train_becomes_a_flat_record(tmp_path, monkeypatch):
    """The run is only told: its last line of metrics.jsonl, and what the row finds in its folder."""
    monkeypatch.chdir(tmp_path)
    told = []

    def run_ranks(processes, *words, hosts, **_):
        told.append((processes, words, hosts))
        folder = tmp_path / "runs" / words[words.index("--name") + 1]
        folder.mkdir(parents=True)
        row = dict(step=4, heldout_loss=2.0, merged_nats_per_byte=1.5, seconds=7.0, sync_bytes=8e6, ranks=2,
                   corpus="c")
        (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")

    monkeypatch.setattr(harness, "run_ranks", run_ranks)
    run = harness.Run(dict(method="noloco", seed=3), "--steps 4", 2, hosts="--mbit 8",
                      after=lambda folder: dict(lines=len(harness.metrics(folder))))
    record = harness.train_once("row", run)
    assert record.items() >= dict(method="noloco", seed=3, mean=2.0, merged=1.5, steps=4, seconds=7.0,
                                  sent=4.0, corpus="c", lines=1, hosts="--mbit 8").items()
    ((processes, words, hosts),) = told
    assert processes == 2 and hosts == ["--mbit", "8"] and words[words.index("--seed") + 1] == "3"
    assert not list((tmp_path / "runs").iterdir())


# ---------------------------------------------------------------- what is shown


def printed_tables(capsys):
    """What all rows print from results/ for readers, line by line."""
    for row in ROWS.values():
        row.show(harness.load(row, HERE, "full"))
    return [line.strip() for line in capsys.readouterr().out.splitlines()]


def heads_of(lines):
    return [line for line, below in zip(lines, lines[1:]) if below.startswith("|---")]


def tables_of(file):
    """(head, rows) of each Markdown table of the page."""
    lines = [line.strip() for line in file.read_text().splitlines()]
    for i, line in enumerate(lines[:-1]):
        if lines[i + 1].startswith("|---"):
            yield line, list(itertools.takewhile(lambda row: row.startswith("|"), lines[i + 2:]))


def test_the_docs_tables_are_what_the_results_print(capsys):
    """Every row of a docs table whose head a program prints is a row that it prints from
    results/. All tables of docs/results.md are such, after the first one, its summary."""
    lines = printed_tables(capsys)
    heads, printed = set(heads_of(lines)), {line for line in lines if line.startswith("| ")}
    checked = Counter()
    for file in (HERE / "README.md", *HERE.glob("docs/*.md")):
        for number, (head, rows) in enumerate(tables_of(file)):
            assert head in heads or file.name != "results.md" or number == 0, head
            if head in heads:
                assert rows and [row for row in rows if row not in printed] == [], (file.name, head)
                checked[file.name] += 1
    assert checked["speed.md"] >= 3 and checked["results.md"] >= 12, checked


INTERVAL = re.compile(r"([-+]?[\d.]+)%?(?: nats(?: per byte)?| perplexity)?(?:\*\*)? "
                      r"\[(-?[\d.]+), (-?[\d.]+)\]")


def intervals_of(text):
    """{(mean, low, high)} of each interval in the text; of a percentage, the numbers."""
    return {tuple(map(float, found)) for found in INTERVAL.findall(text)}


def test_every_interval_of_readme_and_results_is_one_that_the_results_give(capsys):
    """Those of sentences may have the other sign: 0.1 [0.0, 0.2] lower."""
    printed = intervals_of("\n".join(printed_tables(capsys)))
    turned = {(-mean, -high, -low) for mean, low, high in printed}
    for name in ("README.md", "docs/results.md"):
        lines = (HERE / name).read_text().splitlines()
        table = "\n".join(line for line in lines if line.startswith("|"))
        rest = " ".join(line.strip() for line in lines if not line.startswith("|"))
        assert intervals_of(table) - printed == set(), name
        assert intervals_of(rest) - printed - turned == set(), name
        for text in (table, rest):
            brackets = re.findall(r" \[-?[\d.]+, -?[\d.]+\]", text)
            assert len(brackets) == len(INTERVAL.findall(text)) > 3, name


def claims():
    """{a section of docs/results.md: the Comparisons that its row tells}, of the sections with seeds."""
    records = {name: harness.load(ROWS[name], HERE, "full")["records"]
               for name in ("gap", "routing", "skipping", "failures")}
    of_many = many.named(harness.load(ROWS["many"], HERE, "full"))
    over = functools.partial(gap.over, records["gap"], gap.MAIN, gap.NOLOCO[10])
    halves = [missing.over_whole(records["skipping"], skipping.facts_of(stages, *skipping.HALF, "steps"), 50)
              for stages in (4, 8)]
    quarters = [skipping.over_full(records["skipping"], skipping.facts_of(stages, *skipping.QUARTER, "steps"),
                                   "unscaled", "unscaled") for stages in (4, 8)]
    return {
        "many-replicas": [of_many["NoLoCo minus DiLoCo, 128 replicas, best delay"]],
        "compared-with-ddp": [over()],
        "compared-with-diloco": [over(base=gap.DILOCO[20], how=stats.nats)],
        "random-routing": [routing.random_over_fixed(records["routing"], "local", routing.last_spread,
                                                     stats.ratio)],
        "skipping": quarters,
        "missing": halves,
        "failures": [failures.cost(records["failures"], 0.1)],
    }


def row_of(name, place):
    """The row of the page's first table that links to this section of docs/results.md."""
    _, rows = next(tables_of(HERE / name))
    (row,) = [row for row in rows if f"#{place})" in row]
    return row


@pytest.mark.parametrize("name, link", [("README.md", "docs/results.md"), ("docs/results.md", "")])
def test_a_rows_figure_is_the_one_of_its_section_and_its_seeds_are_counted(name, link):
    for place, compared in claims().items():
        row = row_of(name, place)
        for one in compared:
            text = str(one) if "%" in one.form else str(one).replace(" [", " nats [")
            assert text in row, (name, place, text)
            seeds = len(one.differences)
            assert f"{seeds} seeds" in row or row.split("|")[3].strip() == str(seeds), (name, place)


def test_the_figures_without_seeds_are_what_the_results_give():
    shorter = harness.load(ROWS["shorter"], HERE, "full")["methods"]
    full = shorter["full pipeline"]["seconds"]
    less = f"{1 - shorter['SkipPipe']['seconds'] / full:.0%}"
    planned = f"{1 - shorter['full pipeline, planned']['seconds'] / full:.0%}"
    pair = harness.load(ROWS["sync"], HERE, "full")["ratio"]["1024"][0][0]
    for name in ("README.md", "docs/results.md"):
        assert f"| {less}" in row_of(name, "shorter-iterations")
        assert f"| {pair:.0f} times" in row_of(name, "synchronisation")
        text = " ".join((HERE / name).read_text().split())
        sent = f"{gap.bytes_of_ddp(gap.NOLOCO[10], 8):.0%}"
        assert re.search(rf"for {sent} of (the|DDP's) bytes", text)
        assert re.search(rf"takes {less} less time than the unplanned full pipeline", text)
        assert re.search(rf"without skipping, already saves {planned}\.", text)


def crowded(figure):
    """The texts that leave the figure or lie on another one; of ticks none is looked at."""
    figure.draw_without_rendering()
    texts = list(figure.texts)
    for axis in figure.axes:
        texts += [*axis.texts, axis.xaxis.label, axis.yaxis.label]
    boxes = [text.get_window_extent().padded(-1) for text in texts if text.get_text()]
    width, height = figure.bbox.size
    outside = [box for box in boxes if min(box.x0, box.y0, width - box.x1, height - box.y1) < 0]
    return outside + [one for one, other in itertools.combinations(boxes, 2) if one.overlaps(other)]


@pytest.mark.parametrize("name", ROWS)
def test_every_row_shows_this_repositorys_results_as_expected(name, monkeypatch, capsys):
    """Tables, pictures and numbers of the full scale; no text of a picture is cut or covered."""
    pytest.importorskip("matplotlib")
    plt, drawn = pictures.pyplot(), []
    monkeypatch.setattr(pictures, "picture", lambda out, name, draw, found: drawn.append(draw(plt, found)))
    o = types.SimpleNamespace(plot=True, seeds=None, scale="full", out=HERE)
    assert harness.run_rows([ROWS[name]], o) == 0
    assert len(drawn) == len(ROWS[name].pictures) and all(figure.axes for figure in drawn)
    assert [box for figure in drawn for box in crowded(figure)] == []
    plt.close("all")


def test_one_failing_row_says_so_and_the_others_go_on(tmp_path, capsys):
    def break_down(o):
        raise train.BadInput("a run failed (see x.log): one\ntwo")

    def expected(found):
        return [stats.Expected("x", found["x"], 1.0, 0.1, ".1f")]

    bad = harness.Row("bad", break_down, print, {}, expected)
    good = harness.Row("good", lambda o: dict(x=1.0), lambda found: None, {}, expected)
    o = types.SimpleNamespace(plot=False, seeds=None, scale="plot", out=tmp_path)
    assert harness.run_rows([bad, good], o) == 1
    out, err = capsys.readouterr()
    assert "bad: a run failed (see x.log): one" in err and "two" not in err and "pass: x: 1.0" in out
    assert harness.run_rows([good], o) == 0
    o.plot = True                               # what was measured is judged again
    (tmp_path / "results/good.json").write_text('{"x": 2.0}')
    assert harness.run_rows([good], o) == 1


@pytest.mark.parametrize("words, line", [
    ("shorter nosuch", "no row nosuch, only shorter, sync, gamma"), ("--nosuch", "arguments: --nosuch"),
    ("--scale huge", "argument --scale: invalid"), ("--seeds one", "argument --seeds: invalid")])
def test_a_command_line_with_a_mistake_is_one_line_and_status_2(words, line, monkeypatch):
    monkeypatch.setattr(harness.signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["experiments", *words.split()])
    assert line in error_of(lambda _: harness.command("All rows.", *__main__.ROWS))


@pytest.mark.parametrize("name", ROWS)
def test_a_picture_of_what_was_not_run_is_one_line(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(harness.signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["experiments", "--plot", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as stop:
        harness.command("One row.", ROWS[name])
    out, err = capsys.readouterr()
    file = tmp_path / f"results/{ROWS[name].source}.json"
    assert stop.value.code == 1 and out == ""
    assert err == f"error: {name}: no {file}: first run the row without --plot\n"


