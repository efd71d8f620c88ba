"""The map of networks: losses between lengths, and seconds (experiments/regions.py, paced.py)."""
import math

import pytest

from experiments import fragments, paced, regions
from experiments.fleet import Trial
from experiments.replicas import DDP
from experiments.results import kept_result
from gossip.sums import BLOCK
from model import Llama
from plumbing.drawing import pyplot
from tests.harness import SMALL, SMALL_CONFIG, metrics, options, run

BEGIN = {"ddp": 4.0, "diloco": 4.02, "noloco": 4.03}


def loss_after(trial, seed, steps):
    """A straight line over log steps, higher for longer m and with a delay, lower in fragments."""
    more = 0.1 * math.log(trial.every) + 0.01 * trial.delay - 0.02 * (trial.fragments > 1)
    return BEGIN[trial.method] + more + 0.003 * seed * len(trial.method) - 0.4 * math.log(steps)


def rows_of(seeds=(0, 1, 2), lengths=regions.FIRST_LENGTHS):
    """Rows as a fleet leaves them."""
    return [dict(trial=vars(trial), seed=seed, steps=steps, merged=loss_after(trial, seed, steps))
            for trial in regions.trials() for seed in seeds for steps in lengths]


def test_lessons_are_those_of_fragments_where_both_have_them():
    """Nothing is trained twice: after 600 steps the labels are the same."""
    lessons = list(dict.fromkeys(regions.lessons_of([0, 1], None)))
    count = len(list(regions.trials()))
    assert count == 53 and len(lessons) == count * (2 * 3 + 2)
    best = kept_result(regions.ROOT, "headline_fragments")["best"]
    grid = {lesson.label for lesson in fragments.lessons_of(best, [0], 600)}
    assert sum(lesson.label in grid for lesson in lessons) == 1 + 2 * (4 + 3 * 5)      # m = 2, 10, 20, 50


def test_losses_between_lengths_are_on_lines_over_the_logarithm():
    losses = regions.Losses(rows_of())
    trial = Trial("noloco", 10, 1, fragments=10)
    for steps in (150, 151, 299.5, 300, 450, 600):
        assert losses.of(trial, 1, steps) == pytest.approx(loss_after(trial, 1, steps))
    assert losses.of(trial, 1, 20) == losses.of(trial, 1, 150)
    assert losses.of(trial, 1, 900) == losses.of(trial, 1, 600)
    assert losses.seeds(600) == [0, 1, 2] and losses.seeds(1200) == []
    (errors,) = regions.errors_of_lines(losses).values()
    assert len(errors) == 3 * len(losses.measured) and max(map(abs, errors)) < 1e-12
    bent = {150: 2.0, 300: 1.5, 600: 1.4}
    assert regions.interpolated({150: 2.0, 600: 1.4}, 300) - bent[300] == pytest.approx(0.2)


@pytest.mark.parametrize("message, latency", [(0.03, 0.001), (0.5, 0.1), (3, 0.001), (30, 0.001), (1, 1)])
def test_a_place_is_the_best_of_settings_that_are_reckoned_by_hand(message, latency):
    """Whole messages at once: s = 1 + t / m of a pair, and of a sum in one byte (Q2)."""
    wanted = [trial for trial in regions.trials() if trial.fragments == 1 and trial.delay == 0]
    losses = regions.Losses([row for row in rows_of() if Trial(**row["trial"]) in wanted])
    found = regions.place_at(losses, 600, message, latency)
    for method in regions.METHODS:
        expected = {}
        for trial in wanted:
            if trial.method == method:
                seconds = latency + message
                if method != "noloco":
                    seconds = 2 * (latency + 7 / 8 * message * (1 + 4 / BLOCK))
                if method == "ddp":
                    seconds = max(0, seconds - 2 / 3)
                steps = max(150, 600 / (1 + seconds / trial.every))
                expected[trial] = [loss_after(trial, seed, steps) for seed in range(3)]
        best = min(expected, key=lambda trial: sum(expected[trial]))
        assert found.best[method][0] == best and found.best[method][1] == pytest.approx(expected[best])
    first, second = found.order[:2]
    assert found.lead.differences == pytest.approx(
        [a - b for a, b in zip(found.best[first][1], found.best[second][1])])
    assert found.lead.mean <= 0
    assert found.is_known == (found.order[0] != "ddp" or message < 2)


def test_a_slow_replica_is_the_map_with_shorter_messages():
    """All wait for it: f times as long a step is messages and latencies of 1 / f."""
    for trial in regions.trials():
        plain = regions.Situation(params=1, replicas=8, step=1, rate=1 / 0.5, latency=0.2)
        slow = regions.Situation(params=1, replicas=8, step=1, rate=1 / 2.0, latency=0.8, slow=4)
        meetings = regions.meetings_of(trial)
        seconds = regions.seconds_a_step(plain, meetings)
        assert regions.seconds_a_step(slow, meetings) == pytest.approx(4 * seconds)


def test_gaps_of_more_replicas_grow_as_the_runs_did():
    """A gap that gains a fifth of its first with each doubling."""
    rows = [dict(trial=vars(DDP), seed=0, replicas=n, optimizer="adam", tokens=1024, losses=[1.5], merged=1.5)
            for n in (8, 16, 32, 64)]
    for n in (8, 16, 32, 64):
        gaps = {Trial("noloco", 2): 0.05, Trial("noloco", 10): 0.1, Trial("diloco", 4): 0.04}
        for trial, gap in gaps.items():
            share = 0.2 if trial.every == 10 else 0
            merged = 1.5 + gap * (1 + share * math.log2(n / 8))
            rows.append(dict(rows[0], trial=vars(trial), replicas=n, losses=[merged], merged=merged))
    growth = regions.growths(dict(fleets=dict(all=rows)))
    assert growth == pytest.approx({("noloco", 2): 0, ("noloco", 10): 0.2, ("diloco", 4): 0}, abs=1e-9)
    assert regions.widened_by(growth, 1024, Trial("noloco", 20, 1), 0.1) == pytest.approx(0.1 * (1 + 0.2 * 7))
    assert regions.widened_by(growth, 1024, DDP, 0) == 0


def test_a_map_of_a_try_states_no_finding(capsys, monkeypatch):
    """Drawn on few points, without the seeds that its findings rest on."""
    pytest.importorskip("matplotlib")
    for axis in ("MESSAGES", "LATENCIES"):
        monkeypatch.setattr(regions, axis, getattr(regions, axis)[::10])
    found = dict(rows={str(i): row for i, row in enumerate(rows_of(seeds=(0, 1)))}, steps=None)
    found["whole"] = regions.whole(found, None)
    assert not found["whole"]
    regions.show(found)
    out = capsys.readouterr().out
    assert "125M, 100 Mbit/s" in out and "a line from the lengths beside 300 misses" in out
    for draw in (regions.draw_8, regions.draw_many):
        figure = draw(pyplot(), found)
        assert "a try" in figure.get_suptitle()


def test_the_maps_title_counts_the_points_where_a_method_leads_clearly():
    def place(first, second, is_known=True):
        return regions.Place({"ddp": (DDP, first), "noloco": (Trial("noloco", 2), second)}, is_known)

    clear, unclear = ([1.0, 1.1, 1.2], [1.5, 1.6, 1.71]), ([1.0, 1.1, 1.2], [1.5, 1.05, 1.3])
    chart = [[place(*clear), place(*reversed(clear))], [place(*clear), place(*clear, is_known=False)],
             [place(*unclear), place(*unclear)], [place(*clear), place(*unclear)]]
    assert "DDP on 38%, NoLoCo on 12% of the map" in regions.finding(chart)


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
    assert pair.computed == pytest.approx(0.25 + (0.08 + 0.01) / 2)
    paced.show(found)
    assert "| NoLoCo, m 2, one byte | 0.300 | 0.295 | -2% |" in capsys.readouterr().out
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
