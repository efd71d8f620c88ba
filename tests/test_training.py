"""Whole runs of train.py: methods, losses, spread, warm start, what the report says."""

import copy
import json
import math
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

import train
from model import Config, Llama
from noloco import flatten
from plumbing.inner import muon
from plumbing.report import weight_spread
from skippipe import full_paths
from tests.harness import (HERE, SMALL, SMALL_CONFIG, assert_same, checkpoint, metrics, options, processes,
                           torchrun)
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
    # 4 messages each to train, 2 to evaluate
    message = 2 * 32 * 32 * 4
    assert lines[-1]["pipeline_bytes"] == (12 * 2 * 2 * 4 + 2 * 2 * 4 * 2) * message
    assert (lines[-1]["weight_spread"] == 0) == torch.equal(*thetas[:2]) == (how == "ddp")
    for theta, layers in zip(thetas, ([0], [0], [1, 2, 3])):
        start, end = Llama(SMALL_CONFIG, layers, ends=0 in layers), loaded(theta, layers)
        moved = [not torch.equal(a, b) for a, b in zip(start.parameters(), end.parameters(), strict=True)]
        assert all(moved)


def test_replicas_beyond_those_of_the_spread_stay_out_of_it():
    job = SimpleNamespace(rank=70)
    assert weight_spread(torch.ones(3), list(range(64)), job, "key") == (0.0, 0)


def test_weight_spread_and_heldout_loss_equal_one_process(trained, corpus, tmp_path):
    """Each origin's fixed pipeline over the same held-out sequences: the mean, the best and the worst."""
    trained(5, "--stages", "3,2", "--layers-per-stage", "1,3", "--method", "local", "--steps", 3,
            "--lr", 0.01)
    stages = [[0, 1, 2], [3, 4]]
    thetas = [checkpoint(tmp_path / "runs/x", 3, rank)["theta"] for rank in range(5)]
    replicas = [torch.stack([thetas[r] for r in ranks]).double() for ranks in stages]
    offsets = torch.cat([(each - each.mean(0)).flatten() for each in replicas])
    line, o = metrics(tmp_path / "runs/x")[-1], options("--data", corpus, *SMALL)
    assert line["weight_spread"] == pytest.approx(offsets.square().mean().sqrt().item(), rel=1e-5)
    losses = [heldout_loss([loaded(thetas[origin], [0]), loaded(thetas[last], [1, 2, 3])], o)
              for origin, last in full_paths(stages, 1)]
    found = [line["heldout_min"], line["heldout_loss"], line["heldout_max"]]
    assert found == pytest.approx([min(losses), sum(losses) / 3, max(losses)], rel=1e-5)


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
    theta, grad = flatten(model.parameters())
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
        theta, theta.grad = flatten(model.parameters())
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
