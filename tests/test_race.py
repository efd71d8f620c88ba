"""The race between hosts: the clock, inner steps by speed, uneven steps, its turns and their load, and what
it compares."""

import json
import os
import re
import threading
import types
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import train
from experiments import clock, harness, race
from noloco import NoLoCo
from planning.drawing import pyplot
from tests.harness import HERE, checkpoint, metrics
from tools.hosts import Hosts

# ---------------------------------------------------------------- the clock


class OnTime:
    """A rank that only tells its clock how late it is. pace: seconds of a step."""

    def __init__(self, pace, limit=100.0, kind=clock.Clock, rank=0, world=1, store=None, m=3, D=1, warmup=4,
                 **asked):
        self.pace, self.planned = pace, []
        o = types.SimpleNamespace(warmup=warmup, steps=10**6, eval_every=10**6, inner_steps=m, delay=D,
                                  fragments=1)
        job = types.SimpleNamespace(leads=rank == 0, rank=rank, world=world, store=store or a_store(),
                                    share=mock.Mock(side_effect=lambda value: [value]))
        self.run = types.SimpleNamespace(o=o, job=job, step=0)
        self.clock = kind(self.run, limit, **asked)

    @property
    def ended(self):
        return self.run.step >= self.run.o.steps

    @property
    def seconds(self):
        return self.clock.sums["seconds"]

    def step(self, blocked=0.0):
        self.run.step += 1
        self.clock.sums["seconds"] += self.pace
        self.clock.sums["blocked"] += blocked
        self.clock.plan()
        self.planned.append(self.run.o.steps)


def run_together(*ranks):
    """The rank whose clock is furthest behind makes the next step, until all have ended."""
    for _ in range(500):
        going = [rank for rank in ranks if not rank.ended]
        if not going:
            return
        min(going, key=lambda rank: rank.seconds).step()
    pytest.fail("they never end")


def test_a_rank_that_never_waits_makes_the_steps_that_fit():
    """Steps of 2 s, from the 21st on of 4 s: it ends at the one after which another would be over 100 s."""
    rank = OnTime(2.0, kind=clock.OwnTime)
    for made in range(60):
        if not rank.ended:
            rank.pace = 2.0 if made < 20 else 4.0
            rank.step()
    assert rank.planned[6:20] == [50] * 14                      # at first all of 2 s
    assert abs(rank.seconds - 100.0) <= 4.0


def a_store():
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=10))        # an error where a rank waits for a number
    return store


@pytest.mark.parametrize("paces", [(2.0, 2.5), (2.5, 2.0), (2.0, 2.0, 2.5)])
def test_all_end_after_the_outer_steps_that_fit_the_slowest(paces):
    """m = 3, D = 1, 100 s: 50 or 40 steps fit, 16 and 13 outer steps and a landing. At first each plans by
    its own pace."""
    store = a_store()
    ranks = [OnTime(pace, rank=rank, world=len(paces), store=store) for rank, pace in enumerate(paces)]
    run_together(*ranks)
    for rank, pace in zip(ranks, paces):
        assert rank.planned[10] == (49 if pace == 2.0 else 40) and rank.planned[-1] == rank.run.step == 40


@pytest.mark.parametrize("m, D, fragments, ends", [
    (3, 1, 1, (41, 40)),        # the slow one's 13th message leaves after step 39, the next one after 42
    (20, 10, 1, (50, 40)),      # the second after 40, the next one after 60
    (10, 5, 5, (41, 40)),       # the 20th fragment after 40, the next one after 42
    (20, 10, 2, (49, 40))])     # the fourth after 40, the next one after 50
def test_who_evaluates_once_ends_when_its_time_is_over_or_before_its_next_message(m, D, fragments, ends):
    """100 s of which a step takes 2 and 2.5: without messages 50 and 40 steps."""
    store = a_store()
    ranks = [OnTime(pace, kind=clock.OneEvaluation, rank=rank, world=2, store=store, m=m, D=D)
             for rank, pace in enumerate((2.0, 2.5))]
    for rank in ranks:
        rank.run.o.fragments = fragments
    run_together(*ranks)
    sent = {rank.clock.last for rank in ranks}
    (last,) = sent
    for rank in ranks:
        assert rank.clock.departs(last) <= rank.run.step < rank.clock.departs(last + 1)
    assert tuple(rank.run.step for rank in ranks) == ends


def test_a_rank_that_is_half_as_fast_with_half_as_many_inner_steps_ends_at_the_same_time():
    """100 s of which a step takes 2 and 4. The 12th message leaves after 48 and 24 steps, the next one after
    52 and 26, so all steps that fit are made."""
    store = a_store()
    ranks = [OnTime(pace, kind=clock.OneEvaluation, rank=rank, world=2, store=store, m=m, D=D)
             for rank, (pace, m, D) in enumerate(((2.0, 4, 2), (4.0, 2, 1)))]
    run_together(*ranks)
    assert [(rank.run.step, rank.clock.last) for rank in ranks] == [(50, 12), (25, 12)]


def test_a_rank_that_is_half_as_fast_tells_what_fits_before_its_own_warm_up_is_over():
    """The fast one's time is over after 13 steps, when the slow one has made 6, of a warm-up of 8."""
    store = a_store()
    ranks = [OnTime(pace, limit=26.0, rank=rank, world=2, store=store, m=4, D=0, warmup=8,
                    kind=clock.OneEvaluation) for rank, pace in enumerate((2.0, 4.0))]
    clock.take_half(types.SimpleNamespace(o=ranks[1].run.o, outer=types.SimpleNamespace()))
    run_together(*ranks)
    assert [rank.run.step for rank in ranks] == [13, 6]


def test_nobody_is_told_a_number_that_it_has_passed():
    """After 70 of 100 s the first one has begun its 13th outer step, and only 6 fit the other."""
    store = a_store()
    ranks = [OnTime(pace, rank=rank, world=2, store=store) for rank, pace in enumerate((2.0, 5.0))]
    run_together(*ranks)
    assert [rank.run.step for rank in ranks] == [13 * 3 + 1] * 2


def test_who_is_over_its_time_waits_until_all_have_told_what_fits():
    """One is over its time before the other begins: both end after the same step, and neither goes past."""
    store, over = a_store(), threading.Event()
    late, early = (OnTime(2.0, rank=rank, world=2, store=store) for rank in (0, 1))

    def get(key):
        over.set()
        return store.get(key)

    def run_early():
        run_together(early)
        over.set()

    early.run.job.store = types.SimpleNamespace(set=store.set, check=store.check, get=get)
    thread = threading.Thread(target=run_early)
    thread.start()
    over.wait(timeout=10)
    assert not early.ended
    run_together(late)
    thread.join()
    assert early.run.step == late.run.step == 49


def test_a_run_that_is_over_its_time_ends_after_the_next_outer_step():
    rank = OnTime(20.0, limit=30.0)
    run_together(rank)
    assert rank.run.step == 10      # 6 is the first outer step after the warm-up: it finds the time over


def test_evaluations_follow_outer_steps_about_six_times():
    """A step in 1 s, elsewhere in 2.5: in a sixth of 100 s there fit 6.7 steps, so two outer steps."""
    rank = OnTime(1.0)
    rank.run.job.share.side_effect = lambda own: [own, 1 / 2.5 / 3]
    for _ in range(6):
        rank.step()
    assert rank.run.o.eval_every == 6


def test_a_clocked_run_evaluates_just_after_outer_steps_and_ends_after_a_landing(trained, tmp_path):
    trained(2, "--clock", 2.0, "--inner-steps", 3, "--delay", 1, "--warmup", 5, main=clock.clocked)
    *steps, last = [row["step"] for row in metrics(tmp_path / "runs/x")]
    assert steps and last % 3 == 1 and not any(step % 3 for step in steps)
    part = checkpoint(tmp_path / "runs/x", last, 1)
    assert part["step"] == last and not part["outer"]["group"]
    assert json.loads((tmp_path / "runs/x/config.json").read_text())["steps"] == last


# ---------------------------------------------------------------- inner steps by speed


@pytest.mark.parametrize("m, D, half", [(10, 0, (5, 0)), (2, 0, (1, 0)), (5, 1, (2, 1)), (20, 6, (10, 3))])
def test_a_rank_that_is_half_as_fast_makes_half_as_many_inner_steps(m, D, half):
    assert clock.half_as_many(m, D) == half


def test_the_slow_ones_message_lands_before_its_next_one_leaves():
    for m in range(2, 25):
        for D in [0, *range(1, m - 2)]:                         # those that `check` lets through
            own, late = clock.half_as_many(m, D)
            assert bool(late) == bool(D) and late < own


@pytest.mark.parametrize("asked, complaint", [
    (("--slow", 1), "--slow need a --step"), (("--by-speed", "--step", 0.01), "and --slow"),
    (("--by-speed", "--step", 0.01, "--slow", 1, "--delay", 1), "D \\+ 3"),
    (("--by-speed", "--step", 0.01, "--slow", 1, "--fragments", 2), "no --fragments")])
def test_a_clock_is_not_asked_for_what_it_has_not(asked, complaint):
    own, rest = clock.clock_parser().parse_known_args(["--clock", "1", "--one-evaluation", *map(str, asked)])
    o = train.parse(["--inner-steps", "3", *rest], 2)
    with pytest.raises(train.BadInput, match=complaint):
        clock.check(own, types.SimpleNamespace(o=o, outer=object()))


def meetings(outer, steps):
    """The groups that it meets, in order."""
    found = []
    for _ in range(steps):
        if outer.due():
            found.append(outer.group())
        outer.steps += 1
    return found


def test_with_half_as_many_inner_steps_groups_are_drawn_alike():
    fast = NoLoCo(torch.zeros(64), range(8), inner_steps=8)
    slow = NoLoCo(torch.zeros(64), range(8), inner_steps=8)
    clock.take_half(types.SimpleNamespace(outer=slow, o=types.SimpleNamespace(inner_steps=8, delay=0)))
    assert len(met := meetings(fast, 40)) == 5 and met == meetings(slow, 20)


def test_replicas_of_unequal_steps_send_equally_many_messages(trained, tmp_path):
    trained(4, "--clock", 3, "--step", 0.01, "--slow", 2, "--by-speed", "--one-evaluation", "--warmup", 8,
            "--inner-steps", 8, "--delay", 2, main=clock.clocked)
    own = [8, 8, 4, 8]
    last = metrics(tmp_path / "runs/x")[-1]
    assert last["merged_loss"] > 0 and last["weight_spread"] > 0
    sent = set()
    for rank, m in enumerate(own):
        (file,) = (tmp_path / "runs/x/checkpoints").glob(f"*/rank{rank}.pt")
        step = int(file.parent.name)
        part = checkpoint(tmp_path / "runs/x", step, rank)
        assert part["step"] == step and part["counts"]["tokens"] == 2 * 2 * 32 * step
        sent.add(step // m)
    assert len(sent) == 1 and sent.pop() >= 2                   # two outer steps or more
    config = json.loads((tmp_path / "runs/x/config.json").read_text())
    assert config["inner_steps"] == 8 and config["inner_steps_by_rank"] == own


# ---------------------------------------------------------------- steps of uneven length, and who never waits


def test_a_step_takes_the_length_it_is_given(monkeypatch):
    """Of 5 s, 3 are computed; of 2 s nothing is left; an evaluation has no length."""
    now, slept = [10.0], []
    monkeypatch.setattr(clock.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(clock.time, "sleep", slept.append)

    def compute(self, *_):
        now[0] += 3.0
        return "found"

    monkeypatch.setattr(train.Pipeline, "run", compute)
    pipeline = clock.Paced.__new__(clock.Paced)
    pipeline.lengths = iter([5.0, 2.0])
    assert [pipeline.run([], {}, train) for train in (True, False, True)] == ["found"] * 3
    assert slept == [2.0, 0.0, 0.0]


def test_uneven_steps_are_twice_even_ones_times_f_but_no_shorter_than_one():
    draws = mock.Mock(lognormvariate=mock.Mock(side_effect=[0.25, 1.0, 4.0]))
    lengths = clock.uneven(0.5, draws)
    assert [next(lengths) for _ in range(3)] == [0.5, 1.0, 4.0]
    mu, sigma = draws.lognormvariate.call_args.args
    assert mu + sigma**2 / 2 == pytest.approx(0.0)              # so that the mean is 1


def test_each_rank_has_lengths_of_its_own():
    own = types.SimpleNamespace(step=0.5, slow=1, uneven=False)
    assert [next(clock.lengths_of(own, 3, rank)) for rank in range(3)] == [0.5, 1.0, 0.5]
    own.uneven = True
    lengths = [next(clock.lengths_of(own, 3, rank)) for rank in (0, 0, 2)]
    assert lengths[0] == lengths[1] != lengths[2]


def test_a_clocked_run_of_pairs_that_never_wait(trained, tmp_path):
    trained(3, "--clock", 2.0, "--never-waits", "--step", 0.01, "--uneven", "--inner-steps", 3, "--warmup", 5,
            main=clock.clocked)
    (row,) = metrics(tmp_path / "runs/x")                       # nobody waits at an evaluation before
    assert row["step"] >= 5 and row["merged_loss"] > 0 and row["sync_bytes"] > 0


@pytest.mark.parametrize("method", ["noloco", "diloco"])
def test_a_clocked_run_of_uneven_steps_that_evaluates_once(method, trained, tmp_path):
    trained(3, "--clock", 2.0, "--step", 0.01, "--uneven", "--one-evaluation", "--method", method,
            "--inner-steps", 3, "--delay", 1, "--warmup", 5, main=clock.clocked)
    (row,) = metrics(tmp_path / "runs/x")
    assert row["step"] > 5 and row["merged_loss"] > 0


# ---------------------------------------------------------------- turns, and the rule on load


@pytest.fixture
def told(monkeypatch):
    """Runs are only told: a list of others' work in each to fill, and the names of those that ran."""
    coming, ran = [], []

    def train_once(name, run):
        ran.append(f"{run.facts['point']} {run.facts['method']} {run.facts['seed']}")
        known = dict(corpus="text", machine="here", cpu_hours=0.0, others=coming.pop(0), merged=1.0)
        return run.known | known

    monkeypatch.setattr(harness, "train_once", train_once)
    return coming, ran


def asked(tmp_path, scale="full", seeds=None):
    return types.SimpleNamespace(out=tmp_path, scale=scale, seeds=seeds)


UNEVEN = race.POINTS[0]
CALM, LOADED = UNEVEN.others, UNEVEN.others + 0.01


def take(tmp_path, **kwargs):
    """Make the first seed's first turn."""
    runs = race.race_runs(UNEVEN, "full")[:3]
    harness.make_runs("race", runs, asked(tmp_path), turn_of=race.turn, **kwargs)
    return harness.records_in(tmp_path / "results/race.json")


def test_a_turn_under_load_is_made_again_with_all_its_runs(told, tmp_path):
    coming, ran = told
    coming += [CALM, LOADED, CALM, CALM, CALM, CALM]
    records = take(tmp_path, most_others=UNEVEN.others)
    assert ran == 2 * [f"uneven steps {method} 0" for method in race.METHODS] and not coming
    assert [record["others"] for record in records] == [CALM] * 3
    take(tmp_path, most_others=UNEVEN.others)
    assert len(ran) == 6                                    # nor run again


def test_a_machine_that_stays_busy_ends_the_program_and_small_scales_take_any_load(told, tmp_path):
    coming, ran = told
    coming += [LOADED] * 3 * (harness.ATTEMPTS + 1)
    with pytest.raises(train.BadInput, match="disturbed"):
        take(tmp_path, most_others=UNEVEN.others)
    assert len(ran) == 3 * harness.ATTEMPTS and not (tmp_path / "results/race.json").exists()
    assert len(take(tmp_path)) == 3


def test_others_work_is_what_is_neither_idle_nor_ours(monkeypatch, tmp_path):
    """In 100 s all processors were busy for 160 s, ours for 144."""
    monkeypatch.chdir(tmp_path)
    before = harness.not_idle()
    assert 0 < before <= harness.not_idle() + 0.1
    monkeypatch.setattr(harness, "not_idle", mock.Mock(side_effect=[1000.0, 1160.0]))
    monkeypatch.setattr(harness, "cpu_seconds", mock.Mock(side_effect=[7.0, 151.0, 151.0]))
    monkeypatch.setattr(harness.time, "perf_counter", mock.Mock(side_effect=[5.0, 105.0]))

    def run_logged(run, words, folder):
        last = dict(corpus="text", step=3, heldout_loss=1.0, merged_nats_per_byte=None, seconds=1.0,
                    sync_bytes=0, ranks=8)
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text(json.dumps(last))

    monkeypatch.setattr(harness, "run_logged", run_logged)
    record = harness.train_once("x", harness.Run(dict(seed=0), ""))
    assert record["others"] == pytest.approx(0.16) and record["cpu_hours"] == 0.04


def all_runs():
    return [run for point in race.POINTS for run in race.race_runs(point, "full")]


@pytest.mark.parametrize("point", race.POINTS)
def test_a_turn_is_all_racers_of_a_seed_and_each_is_first_as_often(point):
    missing = race.race_runs(point, "full")
    first, seeds = [], []
    while missing:
        turn = race.turn(missing)
        assert {run.facts["method"] for run in turn} == set(race.METHODS) and len(turn) == 3
        first.append(turn[0].facts["method"])
        seeds.append(turn[0].facts["seed"])
        missing = missing[3:]
    assert seeds == list(range(point.seeds))
    counts = [first.count(method) for method in race.METHODS]
    assert max(counts) - min(counts) <= 1


def test_each_racer_is_a_run_that_train_takes():
    for run in all_runs():
        facts = run.facts
        assert facts["D"] <= facts["m"] / 2
        argv = f"--name x {harness.SMALL} {run.options} --seed 1".split()
        o = train.parse(argv, 8)
        assert (o.inner_steps, o.fragments, o.delay) == (facts["m"], facts["K"], facts["D"])
        assert o.wire == "fp32"
        words = run.program.removeprefix("-m experiments.clock").split()
        own, rest = clock.clock_parser().parse_known_args(words)
        clock.check(own, types.SimpleNamespace(o=o, outer=object()))
        assert own.one_evaluation and own.uneven == (facts["point"] == "uneven steps") and not rest
        assert own.step == race.STEP and (own.slow is not None) == (facts["point"] == "one slow host")
        assert own.never_waits == (facts["method"] == race.PAIRS)
        by_speed = facts["point"] == "one slow host" and not own.never_waits
        assert own.by_speed == facts["by_speed"] == by_speed


def test_the_settings_are_the_best_of_the_log():
    """The lowest mean loss of two seeds among the tries that both of them have."""
    losses = {}
    for record in harness.records_in(HERE / "results/race_tries.json"):
        raced = record["point"], record["method"]
        setting = tuple(record[key] for key in ("m", "K", "D", "rate"))
        losses.setdefault((raced, setting), {})[record["seed"]] = record["merged"]
    best = {}
    for (raced, setting), by_seed in losses.items():
        if set(by_seed) == {101, 102}:
            best[raced] = min(best.get(raced, (9.0,)), (sum(by_seed.values()), setting))
    assert {raced: setting for raced, (_, setting) in best.items()} == race.RACED
    for record in harness.records_in(HERE / "results/race.json"):
        setting = tuple(record[key] for key in ("m", "K", "D", "rate"))
        assert setting == race.RACED[record["point"], record["method"]]


# ---------------------------------------------------------------- what is compared


def kept(run, loss):
    return run.known | dict(corpus="text", machine="here", cpu_hours=0.0, others=0.0, merged=loss)


def found(tmp_path, losses):
    """What a results file would hold. losses: {method: its mean over seeds, of which every other one lies
    10% above the rest}"""
    records = []
    for run in all_runs():
        method, seed = run.facts["method"], run.facts["seed"]
        if method in losses:
            records.append(kept(run, losses[method] * (1 + 0.05 * (-1)**seed)))
    return dict(records=records, scale="full", out=tmp_path)


def test_all_three_are_compared_at_each_point_on_the_same_seeds(tmp_path):
    losses = {race.PAIRS: 1.0, race.NOLOCO: 1.1, race.DILOCO: 1.4}
    races = race.races(found(tmp_path, losses))
    assert [len(one.measured.differences) for one in races] == 3 * [16] + 6 * [8]
    for one in races:
        assert one.measured.mean == pytest.approx(losses[one.one] - losses[one.other])
    assert {one.point for one in races} == {point.name for point in race.POINTS}
    assert len({(one.one, one.other) for one in races}) == 3


def test_holms_correction_goes_over_all_nine(tmp_path):
    """Differences whose own p is 0.016: in one table of nine none of them survives."""
    def noisy(method):
        records = found(tmp_path, {method: 1.0})["records"]
        return [record for record in records if record["seed"] < 4]

    records = []
    for method in race.METHODS:
        records += noisy(method)
    for record in records:
        if record["method"] == race.NOLOCO:
            record["merged"] += (-0.01, -0.02, -0.03, -0.02)[record["seed"]]
    races = race.races(dict(records=records, scale="full"))
    alone = [one for one in races if one.measured.p == pytest.approx(0.0163, abs=1e-4)]
    assert len(races) == 9 and len(alone) == 6 and not any(one.survives for one in races)


def test_the_picture_has_a_bar_in_the_colour_of_the_lower_method_and_grey_by_chance(tmp_path):
    """NoLoCo and pairs that never wait differ by 0.1, on every other seed to the other side."""
    pytest.importorskip("matplotlib")
    plt = pyplot()
    raced = found(tmp_path, {race.PAIRS: 1.0, race.NOLOCO: 1.0, race.DILOCO: 1.4})
    for record in raced["records"]:
        if record["method"] == race.PAIRS:
            record["merged"] = 2 - record["merged"]
    figure = race.draw(plt, raced)
    bars = [line.get_color() for line in figure.axes[0].lines if len(line.get_xdata()) == 2][1:]
    plt.close(figure)
    colours = {(race.NOLOCO, race.DILOCO): race.DRAWN[race.NOLOCO], (race.PAIRS, race.NOLOCO): race.GREY,
               (race.PAIRS, race.DILOCO): race.DRAWN[race.PAIRS]}
    assert bars == [colours[named] for named in race.NAMED] * 3


def test_each_method_has_as_many_wins_as_significant_comparisons_in_which_it_is_the_lower_one():
    """Of NoLoCo minus DiLoCo: lower, higher, and lower by chance. Pairs that never wait are lower once."""
    def raced(one, other, mean, survives=True):
        return race.Race("here", one, other, mock.Mock(mean=mean), survives)

    drawn = [raced(race.NOLOCO, race.DILOCO, -0.1), raced(race.NOLOCO, race.DILOCO, 0.1),
             raced(race.NOLOCO, race.DILOCO, -0.1, survives=False), raced(race.PAIRS, race.NOLOCO, -0.1),
             raced(race.PAIRS, race.DILOCO, 0.1)]
    assert [one.lower for one in drawn] == [race.NOLOCO, race.DILOCO, None, race.PAIRS, race.DILOCO]
    assert re.findall(r"\d", race.finding(drawn)) == ["6", "1", "1", "2"]       # pairs, NoLoCo, DiLoCo


# ---------------------------------------------------------------- between hosts


@pytest.mark.alone
def test_a_try_runs_between_two_hosts(tmp_path, monkeypatch, capsys):
    try:
        with Hosts(2, cpu={(): 0.5}):
            pass
    except OSError as error:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(str(error))
    monkeypatch.chdir(tmp_path)
    o = asked(tmp_path, scale="try")
    race.measure(o)
    noloco, pairs = harness.records_in(tmp_path / "results/race.json")
    assert noloco["inner_steps"] == [2, 1] and pairs["inner_steps"] is None
    for record in (noloco, pairs):
        assert record["merged"] > 0 and record["steps"] > 20 and record["sent"] > 0
    race.show(dict(records=[noloco, pairs], scale="try", out=tmp_path))
    assert "two hosts" in capsys.readouterr().out
