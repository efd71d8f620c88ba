"""The map of networks: losses between lengths, seconds, and races at its points (experiments/regions.py,
paced.py, pauses.py, points.py)."""
import functools
import math
from types import SimpleNamespace

import pytest

from experiments import charts, fragments, lengths, paced, pauses, places, points, regions
from experiments.fleet import Trial
from experiments.replicas import DDP
from gossip.pace import GLOO, Situation, seconds_a_step, share_held
from gossip.sums import BLOCK
from model import Llama
from plumbing.drawing import pyplot
from plumbing.processes import BadInput
from tools import hosts as hosts_tool
from tests.harness import SMALL, SMALL_CONFIG, metrics, options, run

DDP_SHORT = Trial("ddp", wire=regions.WIRE)
END = {"ddp": 0.9, "diloco": 0.92, "noloco": 0.93}
BEST = lengths.best_rates()


def loss_after(trial, seed, steps):
    """A straight line over 1 / sqrt(steps), higher for longer m and with a delay, lower in fragments."""
    more = 0.1 * math.log(trial.every) + 0.01 * trial.delay
    if trial.fragments > 1:
        more -= 0.02
    return END[trial.method] + more + 0.003 * seed * len(trial.method) + 13.5 / math.sqrt(steps)


def row_of(trial, seed, steps, loss):
    """As a fleet leaves it."""
    return dict(trial=vars(trial), seed=seed, steps=steps, lr=fragments.rate_of(trial, BEST), merged=loss,
                digest="x")


def found_of(seeds=(0, 1, 2), lengths=regions.FIRST_LENGTHS, trials=None):
    rows = {}
    for trial in trials or regions.trials():
        for seed in seeds:
            for steps in lengths:
                rows[str(len(rows))] = row_of(trial, seed, steps, loss_after(trial, seed, steps))
    return dict(rows=rows, steps=None)


def test_lessons_are_those_of_fragments_where_both_have_them():
    """What runs/fleets keeps of one is not trained again for the other: the labels are equal."""
    lessons = list(dict.fromkeys(regions.lessons_of([0, 1], None)))
    count = len(list(regions.trials()))
    assert count == 65 and len(lessons) == count * (2 * 4 + 1 + 2)          # in fp32 after one length
    assert {lesson.trial.wire for lesson in lessons if lesson.steps != 600} == {"int8"}
    grid = {lesson.label for lesson in fragments.lessons_of(BEST, [0], 600)}
    both = [lesson for lesson in lessons if lesson.trial.wire == "fp32" and lesson.label in grid]
    assert len(both) == 1 + 2 * (4 + 3 * 5)             # m = 2, 10, 20, 50


def test_losses_between_lengths_are_on_lines_over_one_over_the_root():
    found = found_of()
    found["rows"]["another rate"] = dict(row_of(DDP_SHORT, 0, 600, 9.0), lr=1.0)   # neither counts
    found["rows"]["another wire"] = row_of(DDP, 0, 600, 9.0)
    losses = lengths.losses_of(found, regions.WIRE)
    trial = Trial("noloco", 10, 1, regions.WIRE, fragments=10)
    for steps in (150, 151, 299.5, 300, 450, 600):
        assert losses.of(trial, 1, steps) == pytest.approx(loss_after(trial, 1, steps))
    assert losses.of(trial, 1, 20) == losses.of(trial, 1, 150)
    assert losses.of(trial, 1, 1900) == losses.of(trial, 1, 1200)
    assert losses.of(DDP_SHORT, 0, 600) < 9
    errors = lengths.errors_of_lines(losses, lengths.by_root)
    assert sum(map(len, errors.values())) == 2 * 3 * len(losses.measured)
    assert {(steps, method) for steps in (300, 600) for method in END} == set(errors)
    assert all(abs(error) < 1e-12 for some in errors.values() for error in some)
    bent = {150: 2.0, 300: 1.5, 600: 1.4}
    missed = lengths.interpolated({150: 2.0, 600: 1.4}, 300, math.log) - bent[300]
    assert missed == pytest.approx(0.2)


def test_a_seed_counts_where_every_setting_has_it_at_every_length():
    """The longer lengths have the first seed alone; seed 7 lacks one length of one setting."""
    found = found_of(lengths=regions.FIRST_LENGTHS, seeds=(0, 1, 2, 7))
    longer = found_of(lengths=(2400,), seeds=(0,))["rows"]
    found["rows"] |= {f"longer {label}": row for label, row in longer.items()}
    gone = next(label for label, row in found["rows"].items() if (row["seed"], row["steps"]) == (7, 150))
    del found["rows"][gone]
    losses = lengths.losses_of(found, regions.WIRE)
    three = [0, 1, 2]
    assert losses.budgets() == {150: three, 300: three, 600: three, 1200: three, 2400: [0]}
    assert losses.budget() == 1200
    assert losses.seeds(150) == losses.seeds(450) == three and losses.seeds(1201) == [0]
    assert regions.whole(found, SimpleNamespace(seeds=(0, 1, 2)))
    assert not regions.whole(found, regions.PARTS["lengths"])          # which has five seeds
    few = lengths.losses_of(found_of(lengths=(20,), seeds=(3,)), regions.WIRE)
    assert few.budgets() == {20: [3]} and few.budget() == 20
    with pytest.raises(BadInput, match="no length has every setting"):
        rows = dict(a=row_of(DDP, 0, 150, 2.0), b=row_of(Trial("noloco", 2), 0, 300, 2.0))
        lengths.losses_of(dict(rows=rows), "fp32").budgets()


@pytest.mark.parametrize("message, latency", [(0.03, 0.001), (0.5, 0.1), (3, 0.001), (30, 0.001), (1, 1)])
def test_a_place_is_the_best_of_settings_that_are_reckoned_by_hand(message, latency):
    """Whole messages at once: s = 1 + t / m of a pair and of a sum in one byte (Q2), over Gloo."""
    wanted = [trial for trial in regions.trials() if trial.fragments == 1 and trial.delay == 0]
    losses = lengths.losses_of(found_of(trials=wanted), regions.WIRE)
    found = places.place_at(losses, 600, message, latency)
    made = {}
    for method in ("ddp", "diloco", "noloco"):
        expected = {}
        for trial in wanted:
            if trial.method == method:
                seconds = 2 * latency + message
                if method != "noloco":
                    seconds = 2 * (2 * latency + 7 / 8 * message * (1 + 4 / BLOCK))
                if method == "ddp":
                    seconds = max(0, seconds - 2 / 3)
                made[trial] = 600 / (1 + seconds / trial.every)
                expected[trial] = [loss_after(trial, seed, max(150, made[trial])) for seed in range(3)]
        best = min(expected, key=lambda trial: sum(expected[trial]))
        assert found.settings[method] == best and found.losses[method] == pytest.approx(expected[best])
    first, second = found.order[:2]
    assert found.lead.differences == pytest.approx(
        [a - b for a, b in zip(found.losses[first], found.losses[second])])
    assert found.lead.mean <= 0
    assert found.is_known == (made[found.settings[first]] >= 150)


def test_a_setting_is_chosen_by_the_seeds_that_it_is_not_compared_with():
    """Of two settings that only noise tells apart, the one that is lucky with a seed does not win there."""
    lucky = {"a": [1.0, 2.0, 2.0], "b": [2.0, 0.9, 1.9]}
    assert [places.loss_by_others(lucky, i) for i in range(3)] == [2.0, 2.0, 1.9]
    assert places.loss_by_others({"a": [1.0], "b": [2.0]}, 0) == 1.0


def test_what_advice_costs_is_its_settings_loss_over_the_best():
    """At the second point all messages are far too long for the rule."""
    losses = lengths.losses_of(found_of(), regions.WIRE)
    costs, missing = places.advice_costs(losses, "noloco", 600, [(1.9, 0.0), (1e4, 0.0)])
    means = places.means_at(losses, "noloco", 600, 1.9, 0)
    picked = Trial("noloco", 2, 1, regions.WIRE, fragments=2)
    assert costs == [means[picked] - min(means.values())] and missing == 1


@pytest.mark.parametrize("message, latency", [(0.1, 0.3), (0.8, 0.03), (1.5, 0.3), (9, 0.01), (10, 0.05)])
def test_the_rule_is_that_of_advise(message, latency):
    """What gossip/advice.py prefers, by hand: least m, then least D, then least K, held for less than 5%."""
    situation = Situation(params=1, replicas=8, step=1, rate=1 / message, latency=latency, trips=GLOO)
    for method in "diloco", "noloco":
        known = [trial for trial in regions.trials() if trial.method == method]
        held = {t: share_held(situation, places.meetings_of(t)) for t in known}
        order = sorted((t.every, t.delay, t.fragments) for t in known if held[t] < 0.05)
        found = places.advised(known, message, latency)
        assert (found.every, found.delay, found.fragments) == order[0]


def test_the_rule_of_advice_takes_the_fewest_steps_that_hold_little():
    """A message of 1.9 steps, no latency: every 2 steps in halves one step later a message takes 0.95 steps,
    and whole ones are held. Where all are held there is none."""
    known = list(regions.trials())
    noloco = [trial for trial in known if trial.method == "noloco"]
    assert places.advised(noloco, 1.9, 0) == Trial("noloco", 2, 1, regions.WIRE, fragments=2)
    assert places.advised(noloco, 0.01, 0) == Trial("noloco", 1, 0, regions.WIRE)
    assert places.advised(noloco, 1e4, 0) is None
    losses = lengths.losses_of(found_of(), regions.WIRE)
    found = places.means_at(losses, "noloco", 600, 1.9, 0)
    picked = Trial("noloco", 2, 1, regions.WIRE, fragments=2)
    assert set(found) == set(noloco)
    assert found[picked] == pytest.approx(loss_after(picked, 1, 600))         # the middle seed


def test_a_slow_replica_is_the_map_with_shorter_messages():
    """All wait for it: f times as long a step is messages and latencies of 1 / f."""
    for trial in regions.trials():
        plain = Situation(params=1, replicas=8, step=1, rate=1 / 0.5, latency=0.2)
        slow = Situation(params=1, replicas=8, step=1, rate=1 / 2.0, latency=0.8, slow=4)
        meetings = places.meetings_of(trial)
        seconds = seconds_a_step(plain, meetings)
        assert seconds_a_step(slow, meetings) == pytest.approx(4 * seconds)


def test_gaps_of_more_replicas_grow_as_those_of_the_same_seeds_did():
    """64 replicas have the seed alone whose gap was the largest with 8, too."""
    growths = {Trial("noloco", 2): 0.02, Trial("noloco", 10): 0.03, Trial("diloco", 4): 0.01}
    rows = []
    for count, seeds in ((8, (0, 1)), (16, (0, 1)), (64, (0,))):
        for seed in seeds:
            ddp = 1.5 - 0.05 * seed - 0.001 * count
            own = dict(seed=seed, replicas=count, optimizer="adam", tokens=1024)
            rows.append(dict(own, trial=vars(DDP), merged=ddp))
            for trial, nats in growths.items():
                gap = 0.08 - 0.05 * seed + nats * math.log2(count / 8)
                rows.append(dict(own, trial=vars(trial), merged=ddp + gap))
    growth = places.growth_of(dict(fleets=dict(all=rows)), 1024)
    assert growth.nats == {"noloco": {2: pytest.approx(0.02), 10: pytest.approx(0.03)},
                           "diloco": {4: pytest.approx(0.01)}}
    assert growth.of(Trial("noloco", 20, 1)) == pytest.approx(7 * 0.03)
    assert growth.of(Trial("noloco", 5)) == pytest.approx(7 * (0.02 + 0.01 * math.log(2.5) / math.log(5)))
    assert growth.of(Trial("diloco", 50)) == pytest.approx(0.07) and growth.of(DDP) == 0


def test_one_byte_is_told_beside_fp32_with_the_same_seeds_and_steps(capsys):
    """DiLoCo loses 0.02 nats by it every 2 steps, nothing every 10; another length does not count."""
    found = found_of(seeds=(0, 1, 2), trials=[DDP_SHORT])
    for m, more in ((2, (0.01, 0.02, 0.03)), (10, (0, 0, 0))):
        for seed in range(3):
            for wire, extra in (("fp32", 0), ("int8", more[seed])):
                trial = Trial("diloco", m, wire=wire)
                found["rows"][f"{m} {seed} {wire}"] = row_of(trial, seed, 600, 1.5 + extra)
                found["rows"][f"{m} {seed} {wire} short"] = row_of(trial, seed, 300, 1.6 + 2 * extra)
    losses, exact = lengths.losses_of(found, "int8"), lengths.losses_of(found, "fp32")
    two, ten = lengths.wire_costs(losses, exact, "diloco").values()
    assert two == {0: pytest.approx(0.01), 1: pytest.approx(0.02), 2: pytest.approx(0.03)}
    assert ten == {seed: pytest.approx(0) for seed in range(3)}
    assert lengths.wire_costs(losses, exact, "ddp") == lengths.wire_costs(losses, exact, "noloco") == {}
    lengths.show_wire(losses, exact)
    assert "| DiLoCo | 2 | +0.010 [-0.002, +0.022] | +0.000 | +0.020 |" in capsys.readouterr().out


def place(first, second, is_known=True):
    return places.Place({}, {"ddp": first, "noloco": second}, is_known)


CLEAR, UNCLEAR = ([1.0, 1.1, 1.2], [1.05, 1.16, 1.24]), ([1.0, 1.1, 1.2], [1.5, 1.05, 1.3])
CHART = [[place(*CLEAR), place(*UNCLEAR), place(*reversed(CLEAR))],
         [place(*CLEAR), place(*CLEAR, is_known=False), place(*UNCLEAR)]]


def test_a_charts_points_are_coloured_hatched_or_blank():
    """By who loses least; fainter with a lead of 0.05 than of 0.1; blank where too few steps were made."""
    rows = charts.colours_of(CHART)
    grey = charts.rgb(charts.SHADES["ddp"])
    red = charts.rgb(charts.SHADES["noloco"])
    assert [list(point[:3]) for point in rows[0]] == [grey, grey, red]
    strengths = [[point[3] for point in row] for row in rows]
    assert strengths == [pytest.approx([0.5, 0.85, 0.5]), pytest.approx([0.5, 0, 0.85])]
    assert charts.hatched(CHART) == [[False, True, False], [False, False, True]]
    assert charts.points_of([1, 2, 3], [7, 8], CHART) == {
        "ddp": [(1, 7), (1, 8)], "noloco": [(3, 7)]}
    assert charts.lead_in_words(CHART) == "DDP on 33%, NoLoCo on 17%; on 33% we cannot tell"


def test_leads_are_counted_on_all_points_and_on_late_ones():
    """Of six points two are unclear, two DDP's, one NoLoCo's, in the first row, and one is blank."""
    assert regions.cells_of(CHART) == ["33%", "0%", "17%", "33%"]
    assert regions.cells_of(CHART[1:]) == ["33%", "0%", "0%", "33%"]


def test_a_map_of_a_try_states_no_finding(capsys, monkeypatch):
    """Drawn on few points, without the seeds that its findings rest on."""
    pytest.importorskip("matplotlib")
    for axis in ("MESSAGES", "LATENCIES"):
        monkeypatch.setattr(regions, axis, getattr(regions, axis)[::10])
    found = found_of(seeds=(0, 1))
    found["whole"] = regions.whole(found, regions.PARTS["lengths"])
    assert not found["whole"]
    regions.show(found)
    out = capsys.readouterr().out
    assert "125M, 100 Mbit/s" in out and "| 300 steps, DDP | -0.000 | +0.047 |" in out
    assert "1200 steps, 2 seeds" in out and "one byte over fp32" not in out       # none is in fp32
    for draw in (regions.draw_8, regions.draw_many):
        figure = draw(pyplot(), found)
        assert "a try" in figure.get_suptitle()


# ---------------------------------------------------------------- seconds between hosts (paced.py)


def test_the_settings_that_are_timed_are_the_meetings_that_are_computed():
    """train.py takes the options, and they say what the Meetings say."""
    found = list(paced.settings(None))
    assert len(found) == len(paced.NETWORKS) * (1 + len(paced.WAYS))
    for setting in found:
        o = options(*setting.options.split())
        meetings = paced.WAYS.get(setting.label.split(": ")[1])
        if meetings is None:
            assert o.method == "local"
            continue
        assert (o.method, o.wire) == (meetings.method, meetings.wire)
        if o.method != "ddp":
            assert (o.inner_steps, o.fragments or 1, o.delay or 0) == (meetings.m, meetings.K, meetings.D)
        assert o.steps % meetings.m == 0 and paced.FIRST % meetings.m == 0      # whole rounds are timed


def test_computed_seconds_stand_beside_those_that_were_measured(capsys):
    """A pair's message of a byte a weight at 100 Mbit/s every 2 steps; a step is that of the run alone."""
    name = "100 Mbit/s, 10 ms"
    row = dict(params=1_000_000, ranks=8)
    runs = {f"{name}: {paced.ALONE}": [dict(row, pace=[0.2, 0.3])],
            f"{name}: NoLoCo, m 2, one byte": [dict(row, pace=[0.3, 0.4]), dict(row, pace=[0.2, 0.3])]}
    found = dict(runs=runs, whole=False, steps=8)
    (pair,) = paced.pairs_of(found)
    assert pair.measured == pytest.approx([0.35, 0.25])
    assert pair.computed == pytest.approx(0.25 + (0.08 + 2 * 0.01) / 2)
    paced.show(found)
    assert "| NoLoCo, m 2, one byte | 0.300 | 0.300 | +0% |" in capsys.readouterr().out
    pytest.importorskip("matplotlib")
    assert "a try" in paced.draw(pyplot(), found).axes[0].get_title(loc="left")


def test_a_watch_times_the_steps_after_the_first_on_every_rank(corpus, tmp_path):
    run(2, *SMALL, "--data", corpus, "--method", "local", "--microbatches", 1, "--steps", 6, "--name", "x",
        cwd=tmp_path, main=paced.watch)
    found = paced.watched(tmp_path / "runs/x")
    (row,) = [row for row in metrics(tmp_path / "runs/x") if row["step"] == 6]
    assert len(found["pace"]) == 2 and all(0 < 3 * pace < row["seconds"] for pace in found["pace"])
    assert row["sync_seconds"] is None              # nobody synchronised
    assert found["params"] == sum(p.numel() for p in Llama(SMALL_CONFIG).parameters())


def test_exchanges_after_pauses_are_timed_beside_what_is_computed(corpus, tmp_path, capsys):
    """A byte a weight at 30 Mbit/s and two latencies; two processes time a first one and two more."""
    run(2, 2, *SMALL, "--data", corpus, "--method", "local", "--microbatches", 1, "--steps", 1, "--name", "x",
        cwd=tmp_path, main=functools.partial(pauses.main, every=(0.25,), first=0.5))
    row = pauses.timed(tmp_path / "runs/x")
    assert row["params"] == sum(p.numel() for p in Llama(SMALL_CONFIG).parameters())
    assert {name: len(some) for name, some in row["seconds"].items()} == {"first": 1, "every 0.25 s": 2}
    assert min(map(min, row["seconds"].values())) > 0
    name = "30 Mbit/s, 50 ms"
    seconds = dict(first=[1.0], **{f"every {gap} s": [0.7, 0.5, 0.6] for gap in pauses.EVERY})
    row = dict(params=1_500_000, seconds=seconds)
    assert pauses.computed(name, row) == pytest.approx(1.5e6 * 8 / 30e6 + 2 * 0.05)
    pauses.show(dict(runs={name: [row]}))
    assert f"| {name} | 0.50 | 1.00 | 0.60 (0.50 to 0.70) |" in capsys.readouterr().out


# ---------------------------------------------------------------- points between hosts (points.py)


def test_points_are_raced_at_the_settings_that_the_map_advises():
    """train.py and tools/hosts.py take the options; a message is as many steps long as the point says."""
    losses = points.map_losses()
    found = {one.label: one for one in points.settings(None)}
    assert len(found) == sum(len(point.trials) for point in points.POINTS)
    for point in points.POINTS:
        place = places.place_at(losses, *point.on_the_map)
        assert set(place.order[:2]) == {"noloco", "diloco"}
        assert [place.settings[method] for method in ("noloco", "diloco")] == [point.noloco, point.diloco]
        for trial in point.trials:
            one = found[point.label(trial)]
            o = options(*one.options.split())
            assert (o.method, o.wire, o.inner_steps) == (trial.method, "int8", trial.every)
            assert (o.fragments or 1, o.delay or 0) == (trial.fragments, trial.delay)
            assert o.lr == fragments.rate_of(trial, BEST) and o.batch * o.seq_len == 1024
            hosts = hosts_tool.read(["8", *one.hosts.split(), "--", "true"]).tables
            seconds = 8 * points.PARAMS / (1e6 * hosts["mbit"][()])
            assert seconds / points.STEP == pytest.approx(point.message, rel=0.01)
            assert hosts["latency"][()] / 1000 / points.STEP == pytest.approx(point.latency, rel=0.01)
            slow = hosts["cpu"][()] / hosts["cpu"].get((5,), hosts["cpu"][()])
            assert slow == pytest.approx(point.slow)


def test_a_race_is_told_by_what_was_measured_and_by_the_map(capsys):
    """Losses 0.1 apart with each seed at the first point, equal on average at the second; the others are
    missing."""
    pytest.importorskip("matplotlib")
    runs = {}
    for point, more in zip(points.POINTS, ((0.1, 0.1, 0.1), (0.1, -0.1, 0.0))):
        raced = [(point.noloco, (0, 0, 0)), (point.diloco, more)]
        raced += [(trial, (0.3, 0.3, 0.3)) for trial in point.former]
        for trial, by in raced:
            runs[point.label(trial)] = [dict(merged=1.5 + extra, curves=dict(step=[400])) for extra in by]
    first, second = points.races_of(dict(runs=runs))
    assert first.measured.differences == pytest.approx([-0.1] * 3)
    assert second.measured.mean == pytest.approx(0) and second.measured.verdict == "cannot tell"
    assert not points.whole(dict(runs=runs), points.PARTS["points"])
    points.show(dict(runs=runs))
    out = capsys.readouterr().out
    assert "-0.100 [-0.100, -0.100], better" in out
    assert ("| high latency: DiLoCo, m 10, D 5 | +0.200 [+0.200, +0.200], worse | "
            "-0.300 [-0.300, -0.300], better |") in out
    assert str(first.computed(points.map_losses())) in out
    title = points.draw(pyplot(), dict(runs=runs, whole=True)).axes[0].get_title(loc="left")
    assert "lower than DiLoCo at 1 of 2 points,\nbeyond doubt (95%, after Holm's correction) at 1" in title
