"""Races between hosts: the clock, inner steps by speed, torch's DDP, turns and their load, the tries."""

import itertools
import json
import os
import types
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import train
from experiments import clock, harness, race, tables, tries, turns
from gossip import Fragments
from noloco import NoLoCo
from tests.harness import HERE, SMALL, checkpoint, metrics, processes
from tools.hosts import Hosts

# ---------------------------------------------------------------- the clock


def metered(step, seconds, begun, limit, delay, m=3):
    """A Clock of a rank that has made so many steps, alone."""
    o = types.SimpleNamespace(inner_steps=m, delay=delay, steps=10**6, eval_every=10**6)
    job = mock.Mock(share=mock.Mock(side_effect=lambda value: [value]))
    meter = clock.Clock(types.SimpleNamespace(o=o, job=job, step=step), limit)
    meter.begun = begun
    meter.sums["seconds"] = seconds
    return meter, o


def first_shared(value):
    """What `share` gives where another rank's first value is this one."""
    calls = itertools.count()
    return lambda own: [own, value] if next(calls) == 0 else [own]


def test_waiting_for_others_before_an_evaluation_is_no_work():
    """12 steps in 20 s, of which 6 s in outer steps and 2 s at the evaluation were waits: one in 1 s. The
    fastest makes 2 a second."""
    meter, o = metered(12, 21.0, (1.0, 0.0, 0), limit=100.0, delay=0, m=4)
    meter.by_speed, meter.idle, meter.sums["blocked"], o.fragments = True, 2.0, 6.0, 1
    meter.run.outer = types.SimpleNamespace(inner_steps=4)
    meter.run.job.share.side_effect = first_shared(2.0)         # the speed
    meter.renew()
    assert (o.inner_steps, meter.run.outer.inner_steps, meter.run.step) == (2, 2, 6)
    assert meter.begun == (19.0, 6.0, 6)


def test_a_clock_gives_the_steps_that_fit():
    """11 steps in 30 s, then steps of 2.5 s, m = 3, D = 2; at a slower pace, here or elsewhere, fewer."""
    meter, o = metered(21, 55.0, (30.0, 0.0, 11), limit=100.0, delay=2)
    meter.renew()
    assert (o.steps, o.eval_every) == (38, 6)       # 21 and 17 in 45 s, with D; a sixth is 6.7 steps, so 6
    for meter.run.step, meter.sums["seconds"] in ((24, 69.0), (30, 90.0)):
        meter.renew()                               # steps of 3 s; then it is too late to change
        assert (o.steps, o.eval_every) == (35, 6)
    meter.run.job.share.side_effect = first_shared(1 / 15)      # the pace
    meter.run.step, meter.sums["seconds"] = 24, 60.0
    meter.renew()
    assert o.steps == 32                            # two outer steps in the 40 s


def test_a_run_that_is_over_its_time_ends():
    """Each evaluation finds the time over: the end stays where it was."""
    meter, o = metered(6, 3.0, (1.0, 0.0, 4), limit=2.0, delay=1)
    for meter.run.step, meter.sums["seconds"] in ((6, 3.0), (9, 4.0)):
        meter.renew()
        assert (o.steps, o.eval_every) == (10, 3)


def test_a_clocked_run_evaluates_just_after_outer_steps_and_ends_after_a_landing(trained, tmp_path):
    trained(2, "--clock", 2.0, "--inner-steps", 3, "--delay", 1, "--warmup", 5, main=clock.clocked)
    *steps, last = [row["step"] for row in metrics(tmp_path / "runs/x")]
    assert steps[0] == 6 and last % 3 == 1 and not any(step % 3 for step in steps)
    part = checkpoint(tmp_path / "runs/x", last, 1)
    assert part["step"] == last and not part["outer"]["group"]
    assert json.loads((tmp_path / "runs/x/config.json").read_text())["steps"] == last


# ---------------------------------------------------------------- inner steps by speed


@pytest.mark.parametrize("m, K, D, share, own", [
    (10, 1, 0, 0.52, (5, 0)), (2, 1, 0, 0.1, (1, 0)),       # at least one
    (10, 5, 0, 0.1, (5, 0)),                                # for each fragment
    (4, 1, 1, 0.5, (2, 1)), (2, 1, 1, 0.5, (2, 1)),         # with a delay two
    (20, 1, 6, 0.5, (10, 3)), (20, 1, 6, 1.0, (20, 6))])
def test_inner_steps_are_in_proportion_to_speed(m, K, D, share, own):
    assert clock.own_steps(m, K, D, share) == own


def test_at_any_speed_a_message_lands_before_the_next_fragments_departs():
    for m, K in itertools.product(range(1, 25), range(1, 9)):
        for D, share in itertools.product(range(m // K), (0.01, 0.3, 0.5, 0.77, 0.99, 1.0)):
            own, late = clock.own_steps(m, K, D, share)
            assert K <= own <= m and bool(late) == bool(D) and late < own // K


def meetings(fragments, steps):
    """Who meets whom, in order: (fragment, its group)."""
    found = []
    for _ in range(steps):
        for k, outer in enumerate(fragments.outers):
            if outer.due():
                found.append((k, outer.outer.group()))
            outer.steps += 1
    return found


def test_with_own_inner_steps_groups_are_drawn_alike():
    """Three outer steps, then half as many inner steps between them, in two fragments."""
    def make(vector, lengths, late):
        return NoLoCo(vector, range(8), inner_steps=8, seed=f"0 {late}")

    fast, slow = [Fragments(make, torch.zeros(64), [64], 2, 8) for _ in range(2)]
    assert meetings(fast, 24) == meetings(slow, 24)
    clock.set_steps(slow, 4, 0)
    slow.steps = 3 * 4
    assert len(met := meetings(fast, 40)) == 10 and met == meetings(slow, 20)


def half_as_fast(rank, world, *argv):
    """Ranks 1 and 2 make half of the others' inner steps. Returns this rank's m."""
    own_steps = clock.own_steps
    share = 0.5 if rank in (1, 2) else 1.0
    clock.own_steps = lambda m, K, D, _: own_steps(m, K, D, share)
    clock.clocked(list(argv))
    return own_steps(8, 2, 1, share)


def test_replicas_of_unequal_steps_end_after_equally_many_outer_steps(corpus, tmp_path):
    argv = [*SMALL, "--data", corpus, "--name", "x", "--clock", 3, "--by-speed", "--warmup", 8,
            "--inner-steps", 8, "--fragments", 2, "--delay", 1, "--wire", "int8"]
    own = processes(4, half_as_fast, *map(str, argv), cwd=tmp_path)
    assert own == [(8, 1), (4, 1), (4, 1), (8, 1)]
    last = metrics(tmp_path / "runs/x")[-1]
    rounds = (last["step"] - 1) // 8
    assert rounds > 1 and last["merged_loss"] > 0 and last["weight_spread"] > 0
    for rank, (m, delay) in enumerate(own):
        part = checkpoint(tmp_path / "runs/x", rounds * m + delay, rank)
        assert part["counts"]["tokens"] == 2 * 2 * 32 * (8 + (rounds - 1) * m + delay)
        assert not any(fragment["group"] for fragment in part["outer"]["fragments"])
    config = json.loads((tmp_path / "runs/x/config.json").read_text())
    assert config["inner_steps_by_rank"] == [8, 4, 4, 8]


# ---------------------------------------------------------------- one evaluation, at the end


def made(meter, seconds):
    """The steps that this log plans after each step that it makes. seconds: so far, after each."""
    planned = []
    for now in seconds:
        if meter.run.step == meter.run.o.steps:
            return planned
        meter.run.step += 1
        meter.sums["seconds"] = now
        meter.between_steps(meter.run.step - 1)
        planned.append(meter.run.o.steps)


def test_a_rank_by_itself_makes_the_steps_that_fit(monkeypatch):
    """A step in 2 s, then steps of 4 s: it ends at the one after which another would be over 100 s."""
    monkeypatch.setattr(train.Log, "between_steps", lambda self, before: None)
    run = types.SimpleNamespace(o=types.SimpleNamespace(warmup=4, steps=10**6), step=0)
    times = [2.0 * min(made, 20) + 4.0 * max(0, made - 20) for made in range(1, 60)]
    planned = made(clock.OwnTime(run, 100.0), times)
    assert planned[:3] == [10**6] * 3 and planned[3:20] == [50] * 17        # at first all of 2 s
    assert abs(times[run.step - 1] - 100.0) <= 4.0


def test_replicas_that_meet_end_after_the_outer_steps_that_the_first_rank_tells(monkeypatch):
    """Rank 0 makes a step in 2 s, rank 1 in 2.5 s. After 70 of 100 s the first one's number counts for both:
    16 outer steps of 3, and a landing."""
    monkeypatch.setattr(train.Log, "between_steps", lambda self, before: None)
    ends = {}
    store = dist.HashStore()
    for rank, pace in ((0, 2.0), (1, 2.5)):
        o = types.SimpleNamespace(warmup=4, steps=10**6, inner_steps=3, delay=1)
        run = types.SimpleNamespace(o=o, step=0, job=types.SimpleNamespace(leads=rank == 0, store=store))
        planned = made(clock.CommonEnd(run, 100.0), itertools.count(pace, pace))
        ends[rank] = planned[10], planned[-1]
    assert ends == {0: (49, 49), 1: (40, 49)}


def test_an_uneven_step_computes_longer(monkeypatch):
    """Twice a plain step's 3 s are stretched by f, and no step is shorter than a plain one."""
    seconds = iter([10.0, 13.0, 20.0, 23.0])
    ends = []
    monkeypatch.setattr(clock.time, "thread_time", lambda: next(seconds))
    monkeypatch.setattr(clock, "compute_until", ends.append)
    monkeypatch.setattr(train.Pipeline, "run", lambda self, *_: "found")
    pipeline = clock.Uneven.__new__(clock.Uneven)
    pipeline.draws = mock.Mock(lognormvariate=mock.Mock(side_effect=[0.25, 4.0]))
    assert [pipeline.run([], {}) for _ in range(2)] == ["found", "found"]
    assert ends == [10.0 + 1.5, 20.0 + 24.0]
    mu, sigma = pipeline.draws.lognormvariate.call_args.args
    assert mu + sigma**2 / 2 == pytest.approx(0.0)              # so that the mean is 1


def test_a_clocked_run_of_pairs_that_never_wait(trained, tmp_path):
    trained(3, "--clock", 2.0, "--never-waits", "--uneven", "--inner-steps", 3, "--warmup", 5,
            main=clock.clocked)
    (row,) = metrics(tmp_path / "runs/x")                       # nobody waits at an evaluation before
    assert row["step"] >= 5 and row["merged_loss"] > 0 and row["sync_bytes"] > 0


@pytest.mark.parametrize("method", ["noloco", "diloco"])
def test_a_clocked_run_of_uneven_steps_that_evaluates_once(method, trained, tmp_path):
    trained(3, "--clock", 2.0, "--uneven", "--one-evaluation", "--method", method, "--inner-steps", 3,
            "--delay", 1, "--warmup", 5, main=clock.clocked)
    (row,) = metrics(tmp_path / "runs/x")
    assert row["step"] > 5 and row["step"] % 3 == 1 and row["merged_loss"] > 0


# ---------------------------------------------------------------- torch's DDP


def stepped(rank, world, corpus):
    """The weights after two steps of train.py's ddp, and after two by DistributedDataParallel."""
    job, found = train.Job(), []
    argv = [*SMALL, "--data", str(corpus), "--method", "ddp", "--steps", "2", "--warmup", "0"]
    o = train.parse(argv, world)
    job.connect(o)
    for parts in ({}, dict(Pipeline=clock.Overlapped, Average=clock.Averaged)):
        run = train.Run(job, o, **parts)
        for step in range(2):
            run.step = step
            train.inner_step(run, *run.routes.at(step))
        found.append((run.theta.tolist(), run.average.bytes_sent))
    job.close()
    return found


def test_overlapped_ddp_makes_train_pys_steps(corpus, tmp_path):
    for (plain, sent), (overlapped, also_sent) in processes(2, stepped, corpus, cwd=tmp_path):
        torch.testing.assert_close(torch.tensor(overlapped), torch.tensor(plain), atol=1e-5, rtol=1e-4)
        assert sent == also_sent > 0


# ---------------------------------------------------------------- turns, and the rule on load


@pytest.fixture
def told(monkeypatch):
    """Runs are told: a list of [others' work, machine] to fill, which gives the names of those that ran."""
    coming, ran = [], []

    def measured_run(setting, name, seed):
        others, where = coming.pop(0)
        ran.append(name)
        if others is None:
            raise train.BadInput("the run failed")
        command = f"{setting.program} --name {name} {harness.SMALL} {setting.options} --seed {seed}"
        return dict(command=command, others=others, machine=where, merged=1.0)

    monkeypatch.setattr(turns, "measured_run", measured_run)
    monkeypatch.setattr(turns, "machine", lambda: coming[0][1])
    return coming, ran


TWO = [harness.Setting("a", "--lr 1"), harness.Setting("b", "--lr 2")]
CALM, LOADED = turns.OTHERS, turns.OTHERS + 0.01


def take(tmp_path, seed, scale="full"):
    o = types.SimpleNamespace(out=tmp_path, scale=scale)
    turns.take_turns("x", [(TWO, seed)], o)
    return json.loads((tmp_path / "results/x.json").read_text())


def test_a_turn_under_load_is_made_again_with_all_its_runs(told, tmp_path):
    coming, ran = told
    coming += [(CALM, "here"), (LOADED, "here"), (LOADED, "here"), (CALM, "here"), (CALM, "here")]
    found = take(tmp_path, 7)
    assert ran == ["x-a-7-1", "x-b-7-1", "x-a-7-2", "x-a-7-3", "x-b-7-3"] and not coming
    rows = turns.counted_rows(found, [(TWO, 7), (TWO, 8)])
    assert {label: {seed: row["turn"] for seed, row in of.items()} for label, of in rows.items()} == {
        "a": {7: 3}, "b": {7: 3}}
    assert sum(map(len, found["runs"].values())) == 5       # nothing is thrown away
    take(tmp_path, 7)
    assert len(ran) == 5                                    # nor run again


def test_a_turn_goes_on_where_it_was_begun_and_begins_anew_elsewhere(told, tmp_path):
    coming, ran = told
    for seed, elsewhere in ((0, "here"), (1, "there")):
        coming[:] = [(CALM, "here")]
        with pytest.raises(IndexError):                     # cut off before the second run
            take(tmp_path, seed)
        coming[:] = [(CALM, elsewhere)] * (1 + seed)
        take(tmp_path, seed)
    assert ran == ["x-a-0-1", "x-b-0-1", "x-a-1-1", "x-a-1-2", "x-b-1-2"]


def test_a_run_that_fails_is_run_again(told, tmp_path):
    coming, ran = told
    coming += [(CALM, "here"), (None, "here"), (CALM, "here")]
    take(tmp_path, 3)
    assert ran == ["x-a-3-1", "x-b-3-1", "x-b-3-1"]


def test_a_machine_that_stays_busy_ends_the_program_and_a_try_takes_any_load(told, tmp_path):
    coming, ran = told
    coming += [(LOADED, "here")] * (turns.AGAIN + 2)
    with pytest.raises(train.BadInput, match="5 turns were disturbed"):
        take(tmp_path / "busy", 0)
    take(tmp_path, 0, scale="try")
    assert len(ran) == turns.AGAIN + 2


def test_others_work_is_what_is_neither_idle_nor_ours(monkeypatch, tmp_path):
    before = turns.not_idle()
    assert 0 < before and turns.not_idle() >= before - 0.1
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(turns, "not_idle", mock.Mock(side_effect=[1000.0, 1160.0]))
    monkeypatch.setattr(turns.time, "perf_counter", mock.Mock(side_effect=[5.0, 105.0]))
    monkeypatch.setattr(turns, "train_once", lambda *_: dict(curves={}, cpu_hours=0.04))
    row = turns.measured_run(TWO[0], "x", 0)
    assert row["others"] == pytest.approx(0.16) and row["wall"] == 100.0        # 160 s less 144, in 100 s


# ---------------------------------------------------------------- the race and its settings


def rows_of(setting, losses):
    """What a results file would hold of a setting. losses: {seed: loss}"""
    found = []
    for seed, loss in losses.items():
        command = f"{setting.program} --name x {harness.SMALL} {setting.options} --seed {seed}"
        found.append(dict(command=command, hosts=setting.hosts, seed=seed, turn=1, others=0.0, machine="m",
                          merged=loss, seconds=90.0, steps=400, held=3.0, sent=2.0))
    return found


def test_a_race_compares_the_same_seeds(capsys):
    """NoLoCo is 0.1 nats lower with each seed at the first point; the others are missing."""
    point, runs = race.POINTS[0], {}
    for racer, more in zip(point.racers, (0.0, 0.1, 0.3)):
        seeds = range(race.CONTROLS if racer.control else race.SEEDS["full"])
        losses = {seed: 1.5 + seed / 100 + more for seed in seeds}
        runs[point.label(racer)] = rows_of(point.setting(racer, race.SECONDS["full"]), losses)
    found = dict(runs=runs, scale="full")
    ((only, measured),) = race.main_races(found)
    assert only is point and measured.differences == pytest.approx([-0.1] * 16)
    (name, control), (other, diloco) = race.control_races(found)
    assert name.endswith(": NoLoCo minus DiLoCo, ring in fp32")
    assert other.endswith(": DiLoCo minus DiLoCo, ring in fp32")
    assert control.differences == pytest.approx([-0.3] * 8)
    assert diloco.differences == pytest.approx([-0.2] * 8)
    race.show(found)
    assert "| one slow host: DiLoCo, m" in capsys.readouterr().out


def test_a_race_on_two_machines_says_what_each_found_and_what_m_by_speed_changes():
    """By speed NoLoCo is 0.25 nats lower, and there DiLoCo is as low."""
    runs = {}
    for point, losses in zip(race.POINTS, [(2.0, 2.125, 2.0), (1.75, 1.75)]):
        for racer, loss in zip(point.racers, losses):
            rows = rows_of(point.setting(racer, race.SECONDS["full"]), dict.fromkeys(range(4), loss))
            for row in rows:
                row["machine"] = f"{'one' if row['seed'] < 3 else 'other'}, started as {row['seed']}"
            runs[point.label(racer)] = rows
    found = dict(runs=runs, scale="full")
    by_machine = [(point.name, kind, one.differences) for point, kind, one in race.machine_races(found)]
    assert by_machine == [("one slow host", "one", [-0.125] * 3), ("one slow host", "other", [-0.125]),
                          ("one slow host, m by speed", "one", [0.0] * 3),
                          ("one slow host, m by speed", "other", [0.0])]
    assert [one.differences for _, one in race.speed_races(found)] == [[-0.25] * 4, [-0.375] * 4, [-0.25] * 4]


def test_a_finding_counts_what_is_beyond_doubt():
    def of(mean):
        return tables.Comparison([mean - 0.01, mean, mean + 0.01])

    assert race.finding([of(-0.005), of(0.005), of(0.0)]).endswith("lower beyond doubt at any of 3 points")
    assert race.finding([of(-0.5), of(0.4), of(0.0), of(0.3)]).endswith("at 1 of 4 points, DiLoCo at 2")
    assert race.finding([tables.Comparison([0.1])]) == race.finding([]) == ""


def test_each_method_is_first_equally_often_and_controls_have_fewer_seeds():
    first, counts = {}, {}
    for settings, seed in race.turns("full"):
        first.setdefault(settings[0].label, []).append(seed)
        for setting in settings:
            counts[setting.label] = counts.get(setting.label, 0) + 1
    assert len(first["high latency: NoLoCo"]) == len(first["high latency: DiLoCo"]) == 7       # the ring: 2
    assert len(first["one slow host, m by speed: NoLoCo"]) == 8
    assert sorted(counts.values()) == 5 * [8] + 6 * [16]


def tried(losses_of):
    """What results/race_tuning.json would hold."""
    runs = {}
    for contest in tries.contests():
        for number, racer in enumerate(contest.tries):
            setting = contest.setting(racer)
            runs[setting.label] = rows_of(setting, losses_of(number, contest))
    return dict(runs=runs)


def test_the_best_of_the_tries_is_chosen():
    """On the first seed the first is best of the lower rate, the second of the higher one; over all three
    seeds that one is. The third, second on the first seed, has the lower rate and does not go on."""
    def losses(number, contest):
        by_number = (1.0, 3.0, 1.0), (1.2, 1.0, 1.0), (1.1, 0.0, 0.0), (1.3, 0.0, 0.0)
        return dict(zip(contest.seeds, by_number[min(number, 3)]))

    found = tried(losses)
    counts = {}
    for contest in tries.contests():
        place = 1 if len(contest.seeds) > 1 else 0          # a control has one seed
        assert contest.chosen(found) is contest.tries[place]
        counts.setdefault(contest.point.name, []).append(len(contest.tries))
    assert list(counts.values()) == [[6, 6]] * 3 + [[2]]    # as many for both
    with pytest.raises(train.BadInput, match="no run yet"):
        tries.contests()[0].chosen(dict(runs={}))


def test_every_try_is_a_run_that_train_takes():
    for contest in tries.contests():
        for racer in contest.tries:
            setting = contest.setting(racer)
            argv = f"--name x {harness.SMALL} {setting.options} --seed 1".split()
            o = train.parse(argv, 8)
            if "--by-speed" in setting.program:
                run = types.SimpleNamespace(o=o, outer=object())
                own = types.SimpleNamespace(overlapped=False, by_speed=True, never_waits=False, uneven=False,
                                            one_evaluation=False)
                clock.check(own, run)


def test_the_race_begins_with_the_settings_that_the_tries_chose(monkeypatch, tmp_path):
    o = types.SimpleNamespace(scale="full", out=tmp_path, seeds=None)
    monkeypatch.setattr(race, "take_turns", mock.Mock())
    for losses in (None, lambda number, contest: dict.fromkeys(contest.seeds, float(number))):
        if losses:
            tables.save_result(tmp_path, "race_tuning", tried(losses))
        with pytest.raises(train.BadInput, match="into experiments/race.py" if losses else "no run yet"):
            race.measure(o)
    assert not race.take_turns.called
    monkeypatch.setattr(tries.Contest, "chosen", lambda self, found: self.point.racers[0])
    race.measure(o)
    assert race.take_turns.called


def test_this_repositorys_race_has_the_settings_that_its_tries_chose():
    if tables.kept_result(HERE, "race")["runs"]:
        tries.refuse_unchosen(types.SimpleNamespace(out=HERE))


# ---------------------------------------------------------------- between hosts


@pytest.mark.alone
def test_a_try_runs_between_two_hosts(tmp_path, monkeypatch):
    try:
        with Hosts(2, cpu={(): 0.5}):
            pass
    except OSError as error:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(str(error))
    monkeypatch.chdir(tmp_path)
    race.measure(types.SimpleNamespace(out=tmp_path, scale="try", seeds=None))
    found = tables.kept_result(tmp_path, "race") | dict(scale="try")
    ((row,),) = found["runs"].values()
    assert row["merged"] > 0 and row["steps"] > 20 and row["inner_steps"] == [2, 1]
    race.show(found)
