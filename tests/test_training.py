"""Whole runs of train.py: methods, losses, spread, warm start, what the report says."""

import copy
import functools
import json
import math
import re
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

import train
from model import Config, Llama
from noloco import flatten
from gossip.muon import muon
from survive.log import all_compared
from survive.parts import SurvivingJob
from tests.harness import (HERE, SMALL, SMALL_CONFIG, assert_same, checkpoint, metrics, options, processes,
                           surviving, torchrun)
from tests.oracles import heldout_loss, loaded


@pytest.mark.parametrize("how", ["local", "ddp", "noloco --inner-steps 5", "diloco --inner-steps 6"])
def test_every_method_trains_on_unequal_stages(how, trained, tmp_path):
    """Replicas that are equal at the end are the merged model. Evaluations leave the weights as they were."""
    out = trained(3, "--stages", "2,1", "--layers-per-stage", "1,3", "--steps", 12, "--eval-every", 6,
                  "--warmup", 2, "--method", *how.split(), main=_kept_weights)
    lines = metrics(tmp_path / "runs/x")
    thetas = [checkpoint(tmp_path / "runs/x", 12, rank)["theta"] for rank in range(3)]
    last = lines[-1]
    loss = last["heldout_loss"]
    assert [line["step"] for line in lines] == [6, 12] and loss < 5.2 < math.log(256)
    assert last["perplexity"] == pytest.approx(math.exp(loss)) and "perplexity" in out
    # per rank of the pair: a ring of two sends 2 (n-1)/n = 1
    exchanges = dict(local=0, ddp=12).get(how, 2)
    assert last["sync_bytes"] == 2 * exchanges * thetas[0].nbytes
    # 4 messages each to train, 2 to evaluate, three times with the merged model at the end
    message = 2 * 32 * 32 * 4
    assert last["pipeline_bytes"] == (12 * 2 * 2 * 4 + 3 * 2 * 4 * 2) * message
    equal = how.startswith(("ddp", "diloco"))
    assert (last["weight_spread"] == 0) == torch.equal(*thetas[:2]) == equal
    assert (last["merged_loss"] == loss) == equal
    assert f"merged model    {last['merged_loss']:.4f} nats per token" in out
    for theta, layers in zip(thetas, ([0], [0], [1, 2, 3])):
        start, end = Llama(SMALL_CONFIG, layers, ends=0 in layers), loaded(theta, layers)
        moved = [not torch.equal(a, b) for a, b in zip(start.parameters(), end.parameters(), strict=True)]
        assert all(moved)


def _kept_weights(argv):
    """train.py, after which the weights must be those of the checkpoint, which is written before."""
    real = train.train

    def train_and_look(run):
        real(run)
        assert torch.equal(run.theta, checkpoint(run.folder, run.step, run.job.rank)["theta"])

    train.train = train_and_look
    train.main(argv)


def spread_of(thetas, stages, places=slice(None)):
    """The definition: over the stages with several replicas, their distance to the mean."""
    offsets = []
    for ranks in stages:
        if len(ranks) > 1:
            replicas = torch.stack([thetas[r][places] for r in ranks]).double()
            offsets.append((replicas - replicas.mean(0)).flatten())
    return torch.cat(offsets).square().mean().sqrt().item()


@pytest.mark.parametrize("sizes", [(3, 2), (1, 2)])
def test_spread_and_held_out_losses_equal_one_process(sizes, trained, corpus, tmp_path):
    """Every rank is evaluated in a pipeline: the mean of these, and the merged model's."""
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
    assert line["heldout_loss"] == pytest.approx(sum(losses) / count, rel=1e-5)
    means = [torch.stack([thetas[r] for r in ranks]).mean(0) for ranks in stages]
    assert line["merged_loss"] == pytest.approx(loss(*means), rel=1e-5) != line["heldout_loss"]


FEW = 500       # weights in a sample, about


def _few_places(argv):
    """train.py with a small sample."""
    train.SAMPLE = FEW
    train.main(argv)


def test_replicas_compare_a_sample_of_weights_and_at_the_end_all(trained, tmp_path):
    trained(3, "--method", "local", "--steps", 6, "--eval-every", 2, "--save-every", 2, "--lr", 0.01,
            main=_few_places)
    folder = tmp_path / "runs/x"
    thetas = {step: [checkpoint(folder, step, rank)["theta"] for rank in range(3)] for step in (4, 6)}
    sample = slice(None, None, 1 + len(thetas[4][0]) // FEW)
    assert FEW / 2 < len(thetas[4][0][sample]) <= FEW
    _, middle, last = metrics(folder)
    some, whole = spread_of(thetas[4], [[0, 1, 2]], sample), spread_of(thetas[6], [[0, 1, 2]])
    assert middle["weight_spread"] == pytest.approx(some, rel=1e-6)
    assert last["weight_spread"] == pytest.approx(whole, rel=1e-6)


def test_what_was_not_measured_is_null_and_a_process_alone_says_so(trained, tmp_path):
    out = trained(1, "--steps", 2, "--eval-every", 1)
    for line in metrics(tmp_path / "runs/x"):
        assert line["weight_spread"] is None and line["merged_loss"] is None
    assert "no other replicas: nothing is synchronised\n" in out
    assert "spread" not in out and "merged" not in out and "outer step every" not in out


def _late_to_compare(argv):
    """train.py, but rank 3 comes to compare weights when the others have given it up."""
    real = SurvivingJob.meet

    def meet(self, key, ranks):
        if self.rank == 3 and key.endswith("/1/False"):
            self.store.wait([f"{key}/members"])
        return real(self, key, ranks)

    SurvivingJob.meet = meet
    surviving(argv)


def test_a_spread_of_those_alone_who_came_in_time_is_none(trained, tmp_path):
    """All four answer, and one was not compared. At the end all are."""
    trained(4, "--survive", 4, "--steps", 4, "--inner-steps", 2, "--eval-every", 2, "--lr", 0.01,
                  main=_late_to_compare)
    first, last = [line for line in metrics(tmp_path / "runs/x") if "event" not in line]
    assert first["ranks"] == last["ranks"] == 4
    assert first["weight_spread"] is None and last["weight_spread"] > 0 and last["merged_loss"] > 0


@pytest.mark.parametrize("message, outlived", [
    ("a mistake of ours", False), ("[/gloo/transport/tcp/pair.cc:525] Connection closed by peer", True)])
def test_a_comparison_outlives_a_lost_peer_and_nothing_else(message, outlived):
    def meet(key, replicas):
        raise RuntimeError(message)

    job = SimpleNamespace(meet=meet)
    average = functools.partial(SurvivingJob.average, job, torch.ones(3), [0, 1], "key")
    if outlived:
        assert average() == (0.0, 0)
    else:
        with pytest.raises(RuntimeError, match=re.escape(message)):
            average()


def test_a_spread_is_of_all_that_answered_or_none():
    """Of two stages; rank 4, the last of its stage, has no replica."""
    compared, missed = dict(weights=2), dict(weights=0)
    stages, rows = [[0, 1], [2, 3, 5], [4]], dict.fromkeys(range(4), compared) | {4: missed}
    assert all_compared(rows, stages)
    rows[5] = missed                                            # it answered
    assert not all_compared(rows, stages)
    assert all_compared({4: missed, 0: compared}, stages)       # nobody to be compared with


def _lost(argv, steps):
    """train.py, where nothing comes home in these training steps."""
    real = train.Pipeline.run

    def run(self, *args, **kwargs):
        loss, home, tokens = real(self, *args, **kwargs)
        self.iterations = getattr(self, "iterations", -1) + 1
        return (0 * loss, 0, 0) if self.iterations in steps else (loss, home, tokens)

    train.Pipeline.run = run
    train.main(argv)


def test_a_loss_of_no_tokens_is_null_and_no_zero(trained, tmp_path):
    lost = functools.partial(_lost, steps=(0, 1))
    trained(2, "--steps", 4, "--eval-every", 2, "--method", "local", main=lost)
    first, last = metrics(tmp_path / "runs/x")
    assert first["train_loss"] is None and first["tokens"] == 0 and last["train_loss"] > 5


@pytest.mark.parametrize("kind", ["--stages 4 --wire int8", "--stages 2,2"])
def test_surviving_parts_give_the_plain_runs_losses_to_the_bit(kind, trained, tmp_path):
    """While nobody fails, survive/ changes nothing: neither a number of the log nor a weight."""
    for name, main in (("plain", train.main), ("outliving", surviving)):
        trained(4, *kind.split(), "--steps", 13, "--inner-steps", 3, "--alpha", 0.5, "--beta", 0.7, "--lr",
                3e-3, "--warmup", 2, "--eval-every", 5, "--name", name, main=main)
    plain, outliving = (metrics(tmp_path / "runs" / name) for name in ("plain", "outliving"))
    same = lambda line: {k: v for k, v in line.items() if "second" not in k and k != "blocked"}
    assert [line["step"] for line in plain] == [5, 10, 13]
    for a, b in zip(map(same, plain), map(same, outliving), strict=True):
        assert b.pop("steps_alone") == b.pop("lost_microbatches") == 0
        assert a == b and b["weight_spread"] > 0
    assert_same(tmp_path / "runs/plain", tmp_path / "runs/outliving", 13)


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
    corpus = train.load_corpus(o)
    readers = [train.Reader(corpus, o.seq_len, o.seed, i, 2) for i in range(2)]
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
    for optimizer in muon(model):
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
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
