"""Whole runs of train.py: methods, losses, spread, warm start, what the report says."""

import copy
import functools
import json
import math
import re
import shutil
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

import train
from model import Config, Llama
from noloco import flatten
from plumbing import spread
from plumbing.inner import muon
from plumbing.processes import Job
from plumbing.report import Log, Meter
from survive.parts import SurvivingJob
from tests.harness import (HERE, SMALL, SMALL_CONFIG, assert_same, checkpoint, metrics, options, processes,
                           run, torchrun)
from tests.oracles import heldout_loss, loaded


@pytest.mark.parametrize("how", ["local", "ddp", "noloco --inner-steps 5", "diloco --inner-steps 5"])
def test_every_method_trains_on_unequal_stages(how, trained, tmp_path):
    out = trained(3, "--stages", "2,1", "--layers-per-stage", "1,3", "--steps", 12, "--eval-every", 6,
                  "--warmup", 2, "--method", *how.split())
    lines = metrics(tmp_path / "runs/x")
    thetas = [checkpoint(tmp_path / "runs/x", 12, rank)["theta"] for rank in range(3)]
    loss = lines[-1]["heldout_loss"]
    assert [line["step"] for line in lines] == [6, 12] and loss < 5.2 < math.log(256)
    assert lines[-1]["perplexity"] == pytest.approx(math.exp(loss)) and "perplexity" in out
    # per rank of the pair: a ring of two sends 2 (n-1)/n = 1
    exchanges = dict(local=0, ddp=12).get(how, 2)
    assert lines[-1]["sync_bytes"] == 2 * exchanges * thetas[0].nbytes
    # 4 messages each to train, 2 to evaluate, three times with the merged model at the end
    message = 2 * 32 * 32 * 4
    assert lines[-1]["pipeline_bytes"] == (12 * 2 * 2 * 4 + 3 * 2 * 4 * 2) * message
    assert (lines[-1]["weight_spread"] == 0) == torch.equal(*thetas[:2]) == (how == "ddp")
    assert ("never synchronises them" in out) == (how == "local")
    assert ("stages [1] have one replica each" in out) == (how != "local")
    for theta, layers in zip(thetas, ([0], [0], [1, 2, 3])):
        start, end = Llama(SMALL_CONFIG, layers, ends=0 in layers), loaded(theta, layers)
        moved = [not torch.equal(a, b) for a, b in zip(start.parameters(), end.parameters(), strict=True)]
        assert all(moved)


def spread_of(thetas, stages, places=slice(None)):
    """The definition: over the stages with several replicas, their distance to the mean."""
    offsets = []
    for ranks in stages:
        if len(ranks) > 1:
            replicas = torch.stack([thetas[r][places] for r in ranks]).double()
            offsets.append((replicas - replicas.mean(0)).flatten())
    return torch.cat(offsets).square().mean().sqrt().item()


@pytest.mark.parametrize("sizes", [(3, 2), (2, 3), (1, 2)])
def test_spread_and_held_out_losses_equal_one_process(sizes, trained, corpus, tmp_path):
    """Every rank is evaluated in a pipeline: the mean, the best, the worst, and the merged model's."""
    world = sum(sizes)
    trained(world, "--stages", ",".join(map(str, sizes)), "--layers-per-stage", "1,3", "--method",
            "local", "--steps", 3, "--lr", 0.01)
    stages = [list(range(sizes[0])), list(range(sizes[0], world))]
    thetas = [checkpoint(tmp_path / "runs/x", 3, rank)["theta"] for rank in range(world)]
    line, o = metrics(tmp_path / "runs/x")[-1], options("--data", corpus, *SMALL)

    def loss(first, second):
        return heldout_loss([loaded(first, [0]), loaded(second, [1, 2, 3])], o)

    assert line["weight_spread"] == pytest.approx(spread_of(thetas, stages), rel=1e-5)
    count = max(sizes)
    losses = [loss(thetas[i % sizes[0]], thetas[sizes[0] + i % sizes[1]]) for i in range(count)]
    found = [line["heldout_min"], line["heldout_loss"], line["heldout_max"]]
    assert found == pytest.approx([min(losses), sum(losses) / count, max(losses)], rel=1e-5)
    means = [torch.stack([thetas[r] for r in ranks]).mean(0) for ranks in stages]
    assert line["merged_loss"] == pytest.approx(loss(*means), rel=1e-5) != line["heldout_loss"]
    assert line["merged_perplexity"] == pytest.approx(math.exp(line["merged_loss"]))


FEW = 500       # weights in a sample


def _few_places(argv):
    """train.py with a small sample."""
    train.sampled_places = functools.partial(spread.sampled_places, sample=FEW)
    train.main(argv)


def test_replicas_compare_a_sample_of_weights_and_at_the_end_all(trained, tmp_path):
    """What that sends is counted apart from what synchronises, by a resumed run likewise."""
    trained(3, "--method", "local", "--steps", 6, "--eval-every", 2, "--save-every", 2, "--lr", 0.01,
            main=_few_places)
    folder = tmp_path / "runs/x"
    thetas = {step: [checkpoint(folder, step, rank)["theta"] for rank in range(3)] for step in (4, 6)}
    size = len(thetas[4][0])
    places = spread.sampled_places(size, 0, FEW)
    assert len(places) == FEW
    before, middle, last = metrics(folder)
    some, whole = spread_of(thetas[4], [[0, 1, 2]], places), spread_of(thetas[6], [[0, 1, 2]])
    assert middle["weight_spread"] == pytest.approx(some, rel=1e-6)
    assert last["weight_spread"] == pytest.approx(whole, rel=1e-6)
    ring = [3 * (2 * 2 * 8 * weights // 3) for weights in (len(places), size)]
    assert [before["log_bytes"], middle["log_bytes"]] == [ring[0], 2 * ring[0]]
    assert last["log_bytes"] == 2 * ring[0] + ring[1] and last["sync_bytes"] == 0
    shutil.rmtree(folder / "checkpoints/00000006")
    run(3, "--resume", folder, cwd=tmp_path, main=_few_places)
    assert metrics(folder)[-1]["log_bytes"] == last["log_bytes"]


def test_a_sample_is_the_same_for_all_and_its_error_small():
    places = spread.sampled_places(10**6, 5)
    assert torch.equal(places, spread.sampled_places(10**6, 5)) and len(places) == 65536
    assert not torch.equal(places, spread.sampled_places(10**6, 6))
    assert 0 <= places.min() and places.max() < 10**6
    squares = torch.randn(10**6, generator=torch.Generator().manual_seed(0)).square()
    # of the mean of these, whose standard deviation is sqrt(2)
    assert abs(float(squares[places].mean() / squares.mean()) - 1) < 4 * (2 / 65536) ** 0.5


@pytest.mark.parametrize("method", ["ddp", "diloco --inner-steps 2", "noloco --inner-steps 3", "local"])
def test_the_merged_model_is_evaluated_and_each_ranks_weights_are_put_back(method, trained, tmp_path):
    """What is in the checkpoint, which is written before. Replicas that are equal are the merged model."""
    out = trained(3, "--stages", "2,1", "--method", *method.split(), "--steps", 4, main=_kept_weights)
    line = metrics(tmp_path / "runs/x")[-1]
    assert (line["merged_loss"] == line["heldout_loss"]) == (line["weight_spread"] == 0)
    assert (line["weight_spread"] == 0) == method.startswith(("ddp", "diloco"))
    assert f"merged model    {line['merged_loss']:.4f} nats per token" in out


def _kept_weights(argv):
    """train.py, after which the weights must be those of the checkpoint."""
    real = train.train

    def train_and_look(run):
        real(run)
        assert torch.equal(run.theta, checkpoint(run.folder, run.step, run.job.rank)["theta"])

    train.train = train_and_look
    train.main(argv)


def test_what_was_not_measured_is_null_and_a_process_alone_says_so(trained, tmp_path):
    out = trained(1, "--steps", 2, "--eval-every", 1)
    for line in metrics(tmp_path / "runs/x"):
        assert line["weight_spread"] is None and line["merged_loss"] is None and line["compared"] == 0
    assert "no other replicas: nothing is synchronised, noloco trains one model alone" in out
    assert "spread" not in out and "merged" not in out and "outer step every" not in out


def _late_to_compare(argv):
    """train.py, but rank 3 comes to compare weights when the others have given it up."""
    real = SurvivingJob.meet

    def meet(self, key, ranks):
        if self.rank == 3 and key.endswith("/1/False"):
            self.store.wait([f"{key}/members"])
        return real(self, key, ranks)

    SurvivingJob.meet = meet
    train.main(argv)


def test_a_spread_of_those_alone_who_came_in_time_is_none(trained, tmp_path):
    """All four answer, and one was not compared. At the end all are."""
    out = trained(4, "--survive", 4, "--steps", 4, "--inner-steps", 2, "--eval-every", 2, "--lr", 0.01,
                  main=_late_to_compare)
    first, last = [line for line in metrics(tmp_path / "runs/x") if "event" not in line]
    assert first["ranks"] == last["ranks"] == 4
    assert first["weight_spread"] is None and first["compared"] == 3
    assert last["weight_spread"] > 0 and last["compared"] == 4 and last["merged_loss"] > 0
    assert "weight spread unknown (3 ranks came to compare)" in out


@pytest.mark.parametrize("survives, message, outlived", [
    (False, "Connection closed by peer", False), (True, "a mistake of ours", False),
    (True, "[/gloo/transport/tcp/pair.cc:525] Connection closed by peer", True)])
def test_a_comparison_outlives_a_lost_peer_and_nothing_else(survives, message, outlived):
    def meet(key, replicas):
        raise RuntimeError(message)

    job = SimpleNamespace(meet=meet)
    job.outlives = functools.partial((SurvivingJob if survives else Job).outlives, job)
    compare = functools.partial(spread.weight_spread, torch.ones(3), [0, 1], job, "key")
    if outlived:
        assert compare() == spread.UNMEASURED
    else:
        with pytest.raises(RuntimeError, match=re.escape(message)):
            compare()


def test_a_spread_is_of_all_that_answered_or_none():
    """Of two stages; rank 4, the last of its stage, has no replica."""
    def row(squares, weights=2, compared=2):
        return dict(squares=squares, weights=weights, compared=compared)

    stages = [[0, 1], [2, 3, 5], [4]]
    rows = {0: row(1.0), 1: row(1.0), 2: row(3.0), 3: row(3.0), 4: spread.UNMEASURED}
    assert spread.whole_spread(rows, stages) == (1.0, 4)
    rows[5] = spread.UNMEASURED                                 # it answered
    assert spread.whole_spread(rows, stages) == (None, 4)
    assert spread.whole_spread({4: rows[4], 0: row(1.0)}, stages) == (None, 0)


def _lost(argv, steps):
    """train.py, where nothing comes home, and no gradient reaches rank 1, in these training steps."""
    real = train.inner_step

    def inner_step(run, *args):
        loss, home, norm = real(run, *args)
        if run.step in steps:
            return 0 * loss, 0, None if run.job.rank == 1 else 2.5
        return loss, home, norm

    train.inner_step = inner_step
    train.main(argv)


def test_a_gradient_that_did_not_come_and_a_loss_of_no_tokens_are_null_and_no_zero(trained, tmp_path):
    lost = functools.partial(_lost, steps=(0, 1))
    trained(2, "--steps", 4, "--eval-every", 2, "--method", "local", main=lost)
    first, last = metrics(tmp_path / "runs/x")
    assert first["train_loss"] is None and first["tokens"] == 0 and last["train_loss"] > 5
    assert first["gradient_norm"] == 2.5                        # of rank 0 alone


@pytest.mark.parametrize("steps, said", [(100, True), (99, False)])
def test_a_run_that_takes_long_says_early_how_long(steps, said, tmp_path, monkeypatch, capsys):
    """By the pace of steps 6 to 20, each of which takes 2 s here, 3 s with its evaluation."""
    run = SimpleNamespace(o=options("--steps", steps), job=Job(), folder=tmp_path, step=0, meter=Meter(),
                          routes=SimpleNamespace(in_force=lambda: None))
    log = Log(run)
    clock = SimpleNamespace(perf_counter=lambda: 0.0)
    monkeypatch.setattr("plumbing.report.time", clock)
    run.meter.clock = 0.0
    now = 0.0
    for run.step in range(1, steps + 1):
        now += 2.0 if run.step > 5 else 50.0
        clock.perf_counter = lambda: now
        log.progress(1.0, 1)
        run.meter.pause()
        now += 1.0
        run.meter.go_on()
    log.bar.close()
    told = [line for line in capsys.readouterr().out.splitlines() if "at this pace" in line]
    line = "step 20: the other 80 steps take about 3 min at this pace, without evaluations"
    assert told == ([line] if said else [])


@pytest.mark.parametrize("kind", ["--stages 4 --gamma 0.9", "--stages 4 --wire int8", "--stages 2,2"])
def test_surviving_parts_give_the_plain_runs_losses_to_the_bit(kind, trained, tmp_path):
    """While nobody fails, `--survive` changes nothing: neither a number of the log nor a weight."""
    for name, seconds in (("plain", 0), ("surviving", 60)):
        trained(4, *kind.split(), "--steps", 13, "--inner-steps", 3, "--alpha", 0.5, "--beta", 0.7, "--lr",
                3e-3, "--warmup", 2, "--eval-every", 5, "--survive", seconds, "--name", name)
    plain, surviving = (metrics(tmp_path / "runs" / name) for name in ("plain", "surviving"))
    same = lambda line: {k: v for k, v in line.items() if "second" not in k and k not in ("held", "held_max")}
    assert [line["step"] for line in plain] == [5, 10, 13]
    for a, b in zip(map(same, plain), map(same, surviving), strict=True):
        assert a == b
        assert b["weight_spread"] > 0 == b["steps_alone"] == b["lost_microbatches"]
    assert_same(tmp_path / "runs/plain", tmp_path / "runs/surviving", 13)


@pytest.mark.parametrize("method", ["noloco --inner-steps 2", "ddp"])
def test_a_gradient_that_is_not_finite_is_skipped_and_counted(method, trained, tmp_path):
    trained(2, "--method", *method.split(), "--steps", 6, main=_poisoned)
    line = metrics(tmp_path / "runs/x")[-1]
    assert line["skipped_steps"] == (2 if method == "ddp" else 1) and math.isfinite(line["heldout_loss"])
    assert all(checkpoint(tmp_path / "runs/x", 6, r)["theta"].isfinite().all() for r in range(2))


def _poisoned(argv):
    """train.py with an Inf in rank 0's gradient at its third step."""
    real, calls = train.Pipeline.run, Counter()

    def run(self, *args, **kwargs):
        result = real(self, *args, **kwargs)
        calls["run"] += kwargs.get("train", True)
        if self.rank == 0 and calls["run"] == 3 and kwargs.get("train", True):
            next(self.model.parameters()).grad.view(-1)[0] = math.inf
        return result

    train.Pipeline.run = run
    train.main(argv)


def test_ddp_on_two_processes_equals_one_process(trained, corpus, tmp_path):
    """The gradient is the mean over all tokens: one process that reads both parts takes the same
    steps."""
    trained(2, "--method", "ddp", "--steps", 3, "--beta2", 0.999)
    got = checkpoint(tmp_path / "runs/x", 3, 0)["theta"]
    o = train.parse(["--steps", "3", "--data", str(corpus), *SMALL])
    readers = [train.load_data(o, i, [0, 1])[1] for i in range(2)]
    model = Llama(SMALL_CONFIG)
    theta = flatten(model.parameters())
    adam = torch.optim.Adam(model.parameters(), betas=(0.9, 0.999))
    for step in range(3):
        adam.zero_grad()
        batch = torch.cat([r.next(o.batch) for _ in range(2) for r in readers])
        targets = batch[:, 1:]
        loss = model.loss(model.blocks(model.embed(batch[:, :-1])), targets) / targets.numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.param_groups[0]["lr"] = train.schedule(step, o)
        adam.step()
    assert torch.allclose(got, theta, rtol=0, atol=2e-5)


def test_schedule_warms_up_and_ends_at_a_tenth():
    o = options("--steps", 100, "--warmup", 10, "--lr", 1.0)
    rates = [train.schedule(s, o) for s in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == rates[10] == max(rates) == 1.0
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)
    assert rates[55] == pytest.approx(0.55, abs=0.01) and rates[10:] == sorted(rates[10:], reverse=True)


def test_torchrun_launch_line(corpus, tmp_path):
    """The README's command, through torchrun itself, with compute in bfloat16."""
    processes(1, torchrun, str(HERE / "train.py"), "--stages", "1,1", "--steps", "4", "--dtype", "bfloat16",
              "--data", str(corpus), "--name", "x", *SMALL, cwd=tmp_path)
    assert "kept in runs/x" in (tmp_path / "said").read_text()
    assert json.loads((tmp_path / "runs/x/config.json").read_text())["stages"] == [1, 1]


def test_muon_moves_matrices_as_far_as_adam_would_and_adam_all_else():
    model = Llama(Config(num_hidden_layers=1))
    grad = train.flat_gradient(model, flatten(model.parameters()))
    grad.normal_(generator=torch.Generator().manual_seed(0))
    before, lr = copy.deepcopy(model.state_dict()), 1e-3
    muon(model).step(lr)
    moved = {name: (p.detach() - before[name]) / lr for name, p in model.named_parameters()}
    matrices = [d for name, d in moved.items() if "layers" in name and d.ndim == 2]
    others = [d for name, d in moved.items() if "layers" not in name or d.ndim == 1]
    assert len(matrices) == 7 and len(others) == 5
    for d in matrices:          # nearly every direction about as far as every other
        ratios = torch.linalg.svdvals(d) / (0.2 * max(d.shape) ** 0.5)
        assert 0.6 < ratios.quantile(0.05) and ratios.max() < 1.3
    # 0.2, as Adam's are in training; the first step of Adam is lr for every weight
    assert all(float(d.square().mean().sqrt()) == pytest.approx(0.2, rel=0.3) for d in matrices)
    assert all(torch.allclose(d.abs(), torch.ones_like(d), atol=1e-2) for d in others)
    assert all((moved[name] * p.grad).sum() < 0 for name, p in model.named_parameters())


def test_a_reset_muon_is_a_new_one_and_takes_no_settings_from_a_state():
    def moved(reset):
        """By the second step, of another gradient."""
        model = Llama(Config(num_hidden_layers=1))
        theta = flatten(model.parameters())
        theta.grad = train.flat_gradient(model, theta)
        optimizer, draw = muon(model, 0.5), torch.Generator().manual_seed(0)
        for step in range(2):
            before = copy.deepcopy(model.state_dict())
            theta.grad.normal_(generator=draw)
            if step and reset:
                optimizer.reset()
            optimizer.step(1e-2)
        return {name: p.detach() - before[name] for name, p in model.named_parameters()}, optimizer

    # all that it remembers of the first step is gone: its second is the step of a new one
    (ours, _), (again, optimizer) = moved(False), moved(True)
    assert all(not torch.equal(again[name], d) for name, d in ours.items())
    assert all(float(v["step"]) == 1 for v in optimizer.parts[1].state.values())
    other = muon(Llama(Config(num_hidden_layers=1)), 0.9)
    other.load_state_dict(optimizer.state_dict())
    assert other.parts[1].param_groups[0]["betas"] == (0.9, 0.9)        # a new --beta2 holds
