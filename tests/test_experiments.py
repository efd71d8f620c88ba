"""What the experiments count with: the stability recursion, their clocks, their tables."""

import copy
import functools
import itertools
import json
import math
import sys
import types
from collections import Counter

import pytest
import torch

import train
from experiments import (__main__, cities, failures, fleet, gamma, harness, pictures, race, routing,
                         skipping, tables, together)
from noloco import outer_update
from train import layout
from gossip.window import gamma_bound
from tests.harness import HERE, SMALL, error_of, metrics, options


@pytest.mark.parametrize("replicas, n", [(4, 2), (5, 2), (6, 3), (4, 4)])
def test_moment_recursion_equals_the_average_over_all_groupings(replicas, n):
    """One outer step of N2 and N3 with Delta = -p phi, for every order that replicas can be drawn
    in."""
    alpha, beta, pull_together, pull = 0.6, 0.8, 1.1, 0.3
    draw = torch.randn(2, replicas, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    x, d = draw - draw.mean(1, keepdim=True)
    moments = lambda x, d: torch.stack([x @ x, x @ d, d @ d])
    total = torch.zeros(3, dtype=torch.float64)
    for order in itertools.permutations(range(replicas)):
        phi, delta = x + 7, d - 2  # what all share is no difference
        for g in (list(order[i :: replicas // n]) for i in range(replicas // n)):
            p, q = phi[g], delta[g]
            outer_update(p, q, (1 - pull) * p.mean(0), p.mean(0), alpha, beta, pull_together)
            phi[g], delta[g] = p, q
        total += moments(phi - phi.mean(), delta - delta.mean()) / math.factorial(replicas)
    matrix = gamma.moment_matrix(alpha, gamma.contraction(replicas, n), beta,
                                pull_together, pull)
    assert torch.allclose(matrix @ moments(x, d), total, rtol=1e-12)


def test_spectral_radius_crosses_one_exactly_at_the_bound():
    radius = lambda *settings: torch.linalg.eigvals(gamma.moment_matrix(*settings)).abs().max()
    for alpha, n, pull in itertools.product((0.0, 0.5, 0.9), (2, 4, 16), (0.0, 0.3)):
        for k in (1 - 1 / n, gamma.contraction(16, n)):
            bound = gamma.exact_bound(alpha, k, pull)
            low, high = 0.999 * bound, 1.001 * bound
            assert radius(alpha, k, low, low, pull) < 1 < radius(alpha, k, high, high, pull)
            assert bound >= gamma.exact_bound(alpha, k)         # gamma = beta: a pull widens the window
        assert gamma.exact_bound(alpha, 1 - 1 / n) == pytest.approx(gamma_bound(alpha, n))
        for count in (2, 3, 4, 5, 16, 17):
            if n <= count:
                exact = gamma.exact_bound(alpha, gamma.contraction(count, n))
                assert gamma_bound(alpha, n, count) == pytest.approx(exact)
    assert gamma_bound(0.9, 2) > 0.1 and radius(0.9, 0.5, 0.7, 0.1, 1.0) > 1         # another beta, full pull
    # heavy ball: 2 (1 + alpha); one replica has nothing to hold together
    assert gamma.exact_bound(0.5, gamma.contraction(16, 16)) == pytest.approx(3)
    assert gamma_bound(0.5, 2, 1) == gamma_bound(0.5, 2, 2) == pytest.approx(3)


def test_all_reduce_seconds_by_hand():
    whole = [[0, 9, 2], [9, 0, 3], [2, 3, 0]]
    part = lambda by: [[x / by for x in row] for row in whole]
    # Two rounds of 9 / 3, or of (9 + 3) / 3 where a rank's messages queue; a ring: four of 3. Then
    # mostly latency: whole vectors, once.
    cases = ([0, 1, 2], 3, max), ([0, 1, 2], 3, sum), ([0, 1, 2], 1.5, max), ([0, 2], 2, max)
    assert [together.all_reduce_seconds(r, whole, part(by), way) for r, by, way in cases] == [6, 8, 9, 2]
    slow = [[400 if {i, j} == {0, 2} else 4 for j in range(4)] for i in range(4)]
    # the ring goes round the slow link
    assert together.all_reduce_seconds([0, 1, 2, 3], slow, [[x / 4 for x in row] for row in slow]) == 6


def test_steps_take_what_they_hold_and_losses_lie_on_straight_lines():
    curves = dict(step=[1, 2, 3], seconds=[10, 20, 30], heldout_loss=[3.0, 2.0, 1.0], sync_bytes=[0, 0, 0])
    run = tables.RunResult(dict(command="--seed 1 --seed 3", ranks=1, curves=curves))
    assert run.seed == 3
    found = {"half": 10.0, "DDP, int8": 12.0, "NoLoCo, int8": 14.0}
    assert [together.a_step(found, "half", m) for m in [*together.METHODS][1:]] == [22, 16, 17, 24, 10, 10]
    assert [tables.loss_at(second, run) for second in (5, 15, 40)] == pytest.approx([3.0, 2.5, 1.0])


def test_half_widths_are_those_of_the_printed_table():
    """Student's t at 97.5%, by degrees of freedom, as printed in any textbook."""
    printed = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262,
               10: 2.228, 11: 2.201, 12: 2.179, 15: 2.131, 19: 2.093, 24: 2.064, 29: 2.045, 60: 2.000,
               120: 1.980}
    assert {n: round(tables.half_width(n), 3) for n in printed} == printed
    assert tables.share_within(2.228, 10) == pytest.approx(0.95, abs=1e-4)
    assert tables.share_within(2.0, 3) == pytest.approx(1 - 0.1393, abs=1e-4)
    many = tables.Comparison([0.1 * (-1) ** i + 1 for i in range(40)])     # any number of seeds
    assert many.interval[0] == pytest.approx(1 - 2.0227 * many.error, rel=1e-4)


def test_comparisons_by_hand():
    three = tables.Comparison([1.0, 2.0, 3.0], ".3f")
    assert str(three) == "2.000 [-0.484, 4.484]" and three.verdict == "cannot tell"     # t is 4.303
    four = tables.Comparison([-1.0, -2.0, -3.0, -2.0], ".1f")
    assert str(four) == "-2.0 [-3.3, -0.7]" and four.verdict == "better"
    assert four.p == pytest.approx(0.0163, abs=1e-4)                    # t = 4.899, 3 degrees of freedom
    assert str(tables.Comparison([0.01, 0.02, 0.03], "+.1%")) == "+2.0% [-0.5, 4.5]"
    one = tables.Comparison([0.25])
    assert str(one) == "+0.250" and one.p is None and one.interval is None and one.verdict == "one seed"
    assert tables.Comparison([1.0, 1.0]).p == 0 and tables.Comparison([0.0, 0.0]).p == 1


def test_holm_against_a_worked_example():
    """At 5%: 0.005 <= 0.05/4, 0.01 <= 0.05/3, 0.03 > 0.05/2 ends it, so 0.04 <= 0.05 no longer
    counts."""
    assert tables.holm([0.01, 0.04, 0.03, 0.005]) == [True, False, False, True]
    assert tables.holm([0.04]) == [True] and tables.holm([]) == []
    assert tables.holm([0.02, 0.02, 0.02]) == [False] * 3


def test_a_tables_verdicts_are_those_after_holms_correction_over_a_column(capsys):
    table = tables.Table("method", "over DDP's")
    table.add("DDP", None)
    table.add("sure", tables.Comparison([1.00, 1.01, 0.99, 1.00]))
    table.add("alone", tables.Comparison([-1.0, -2.0, -3.0, -2.0]))      # p is 0.016, of six
    table.add("one seed", tables.Comparison([1.0]))
    for _ in range(4):
        table.add("neither", tables.Comparison([1.0, -1.0, 0.5, -0.5]))
    table.end()
    _, _, ddp, sure, alone, one, neither, *_ = capsys.readouterr().out.splitlines()
    assert sure.endswith("], worse |") and alone.endswith("], better alone |")
    assert ddp == "| DDP |  |" and one == "| one seed | +1.000 |" and neither.endswith("] |")


ROWS = {row.name: row for row in (*__main__.ROWS, *__main__.BETWEEN_HOSTS)}
TRAINED = {"failures": failures, "routing": routing, "skipping": skipping, "together": together, "race": race,
           "cities": cities}


def given(command):
    """{option: its last value}, without the steps, which depend on the planner. What results/ calls
    skippipe is the search that is now called stronger."""
    command = command.replace("--routing skippipe", "--routing stronger")
    pairs = dict(part.partition(" ")[::2] for part in command.split(" --"))
    return {option: value for option, value in pairs.items() if option not in ("name", "seed", "steps")}


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("scale", harness.FOLDERS)
def test_every_run_is_one_that_train_takes_and_has_a_name_of_its_own(name, scale, monkeypatch):
    for module in (skipping, together):
        monkeypatch.setattr(module, "makespan", lambda *_: 50.0)        # planning takes seconds
        monkeypatch.setattr(module, "keep_links", lambda network, name: f"runs/headline-{name}")
    kinds = list(TRAINED[name].settings(scale))
    assert len({kind.label for kind in kinds}) == len(kinds) >= 1
    rows = tables.kept_result(HERE, name)["runs"] if scale == "full" else {}
    for kind in kinds:
        argv = f"--name x {harness.SMALL} {kind.options} --seed 1".split()
        layout(train.parse(argv, kind.processes), kind.processes)
        for row in rows.get(kind.label, [])[:1]:
            now = given(" ".join([kind.program, *argv]))
            assert now == given(row["command"]), kind.label     # as what results/ was made with
            assert kind.hosts == row.get("hosts", ""), kind.label


def printed_tables(capsys):
    """What all rows print from results/ for readers, line by line."""
    for row in ROWS.values():
        row.show(harness.load(row, HERE, "full"))
    return [line.strip() for line in capsys.readouterr().out.splitlines()]


def heads_of(lines):
    return [line for line, below in zip(lines, lines[1:]) if below.startswith("|---")]


def test_the_docs_tables_are_what_the_results_print(capsys):
    """Every row of a docs table whose head a program prints is a row that it prints from
    results/. All tables of docs/results.md are such."""
    lines = printed_tables(capsys)
    heads, printed = set(heads_of(lines)), {line for line in lines if line.startswith("| ")}
    checked = Counter()
    for file in (HERE / "README.md", *HERE.glob("docs/*.md")):
        lines = [line.strip() for line in file.read_text().splitlines()]
        for i, line in enumerate(lines[:-1]):
            if not lines[i + 1].startswith("|---"):
                continue
            assert line in heads or file.name != "results.md", line
            if line in heads:
                rows = list(itertools.takewhile(lambda row: row.startswith("|"), lines[i + 2:]))
                assert rows and [row for row in rows if row not in printed] == [], (file.name, line)
                checked[file.name] += 1
    assert checked["speed.md"] >= 3 and checked["results.md"] >= 12, checked


@pytest.fixture
def pretended(monkeypatch, tmp_path):
    """Runs are only told, in tmp_path: a function that gives the losses of a command's
    evaluations."""
    monkeypatch.chdir(tmp_path)

    def run_ranks(processes, *words, **_):
        folder = tmp_path / "runs" / words[words.index("--name") + 1]
        folder.mkdir(parents=True)          # an error where it runs again
        given = dict(zip(words, words[1:]))         # of an option given twice the last
        steps = int(given.get("--steps", 4))        # runs by the clock have none
        with open(folder / "metrics.jsonl", "w") as file:
            for share in (1.0,) if steps < 10 else (0.5, 1.0):
                row = dict.fromkeys(harness.KEPT, 1.0) | dict(step=steps * share)
                print(json.dumps(row | dict(heldout_loss=5.0 - share, tokens=100 * share)), file=file)

    monkeypatch.setattr(harness, "run_ranks", run_ranks)


def test_a_scale_keeps_to_folders_of_its_own_and_is_not_run_twice(pretended, tmp_path):
    """Two runs of two seeds, of which only the commands are told."""
    kinds = [harness.Setting("a b", "--steps 4"),
             harness.Setting("c", "--steps 4", after=lambda folder: dict(mean=2.0))]
    o = types.SimpleNamespace(seeds=None, scale="try")
    found = harness.run_all("x", kinds, (0, 5), o)
    assert harness.run_all("x", kinds, (0, 5), o)["runs"] == found["runs"]
    names = [f"try-x-{run}" for run in ("a-b-0", "a-b-5", "c-0", "c-5")]
    assert sorted(p.name for p in (tmp_path / "runs").iterdir() if p.is_dir()) == names
    assert [row["mean"] for row in found["runs"]["c"]] == [2.0, 2.0]
    read = [tables.RunResult(row) for row in found["runs"]["a b"]]
    assert [(run.seed, run.steps[-1]) for run in read] == [(0, 4), (5, 4)]


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
    monkeypatch.setattr(harness, "picture", lambda out, name, draw, found: drawn.append(draw(plt, found)))
    o = types.SimpleNamespace(plot=True, seeds=None, scale="full", out=HERE)
    assert harness.run_rows([ROWS[name]], o) == 0
    assert len(drawn) == len(ROWS[name].pictures) and all(figure.axes for figure in drawn)
    assert [box for figure in drawn for box in crowded(figure)] == []
    plt.close("all")


def test_one_failing_row_says_so_and_the_others_go_on(tmp_path, capsys):
    def break_down(o):
        raise train.BadInput("a run failed (see x.log): one\ntwo")

    def expected(found):
        return [tables.Expected("x", found["x"], 1.0, 0.1, ".1f")]

    bad = harness.Row("bad", break_down, print, {}, expected)
    good = harness.Row("good", lambda o: dict(x=1.0), lambda found: None, {}, expected)
    o = types.SimpleNamespace(plot=False, seeds=None, scale="try", out=tmp_path)
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


def test_a_number_outside_of_its_tolerance_is_told():
    for number, is_outside in ((0.101, False), (0.199, False), (0.09, True), (0.21, True), (None, True),
                               (math.nan, True)):
        assert tables.Expected("a number", number, 0.15, 0.05).is_outside == is_outside, number
        assert not tables.Expected("a number", number, 0.15, 0.05, judged=False).is_outside


def test_losing_drops_what_visits_the_victim(trained, tmp_path):
    """In every iteration one of the two replicas of stage 1 dies, and half of the 4 microbatches
    with it."""
    trained(4, "--stages", "2,2", "--steps", 5, main=functools.partial(failures.lose, 1.0))
    row = metrics(tmp_path / "runs/x")[-1]
    assert row["tokens"] == 5 * 2 * 2 * 32 and math.isfinite(row["heldout_loss"])


ALIKE = [(fleet.Trial("noloco", 2, 1), "--optimizer", "muon"), (fleet.Trial("noloco", 2, fragments=2),),
         (fleet.Trial("diloco", 3, 1, fragments=3),), (fleet.Trial("ddp"),)]


@pytest.mark.parametrize("case", ALIKE, ids=lambda case: case[0].method)
def test_replicas_in_one_process_lose_what_processes_lose(case, trained, corpus, tmp_path):
    """Delayed, in fragments, Adam and Muon: train.py's held-out loss."""
    trial, *optimizer = case
    small = ["--microbatches", 1, "--warmup", 2, "--steps", 6, "--layers", 1, *optimizer]
    o = options(*SMALL, "--data", corpus, *small)
    (found,) = fleet.Fleet(o, [trial], 4, [0], "cpu").train()
    outer = []
    if trial.method != "ddp":
        outer = ["--inner-steps", trial.every, "--delay", trial.delay, "--fragments", trial.fragments]
    trained(4, *small, "--method", trial.method, *outer)
    told = metrics(tmp_path / "runs/x")[-1]["heldout_loss"]
    assert found["losses"][-1] == pytest.approx(told, abs=2e-4)


@pytest.mark.parametrize("most, own, long", [(1 << 20, 1 << 20, 99), (128, 64, 99), (48, 48, 99),
                                             (128, 32, 1)])
def test_a_fleet_has_the_gradients_of_plain_autograd_however_it_cuts_them(most, own, long, corpus,
                                                                          monkeypatch):
    """All models and sequences in one call, or few; compiled, with a last call that is filled up.

    Traced as for torch's compiler, but run as it is: that torch's C++ is right is torch's own test.
    """
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    monkeypatch.setattr(fleet, "finds_compiler", lambda device: True)
    monkeypatch.setitem(fleet.AT_ONCE, "cpu", most)
    monkeypatch.setitem(fleet.OF_A_MODEL, "cpu", own)
    monkeypatch.setitem(fleet.LONG, "cpu", long)
    found = small_fleet(corpus, [fleet.Trial("noloco", 4), fleet.Trial("ddp")], 3, layers=1)
    found.theta += 0.02 * torch.randn_like(found.theta)
    batches = [reader.next(found.o.batch) for reader in copy.deepcopy(found.readers)]
    found.fill_gradients()
    for weights, gradient in zip(found.theta, found.grad):
        for own, g, batch in zip(weights[0], gradient[0], batches):
            torch.nn.utils.vector_to_parameters(own, found.model.parameters())
            loss = fleet.Whole(found.model)(batch)
            expected = torch.autograd.grad(loss, list(found.model.parameters()))
            torch.testing.assert_close(g, torch.cat([e.flatten() for e in expected]), atol=1e-6, rtol=1e-4)


# ---------------------------------------------------------------- fragments in one process


def small_fleet(corpus, trials, replicas=4, steps=4, layers=4):
    small = [*SMALL, "--data", corpus, "--microbatches", 1, "--warmup", 2, "--steps", steps,
             "--layers", layers]
    return fleet.Fleet(options(*small), trials, replicas, [0], "cpu")
