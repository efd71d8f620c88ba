"""experiments/peers.py: both sides of each comparison do the same work, and what is missing is named."""

import types

import pytest
import torch

from experiments import peers
from model import Llama
from tests.harness import gloo, processes

TRY = peers.SCALES["try"]


def named(name):
    return next(peer for peer in peers.PEERS if peer.name == name)


@gloo
def _one_loss(rank, world, name):
    peer = named(name)
    with peer.ours(TRY) as ours, peer.theirs(TRY) as theirs:
        return float(ours()), float(theirs())


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "interleaved 1F1B"])
def test_torchs_pipelines_find_the_loss_that_ours_finds(name):
    (ours, _), (_, theirs) = processes(2, _one_loss, name)      # here the origin has it, there the last stage
    assert ours == pytest.approx(theirs, rel=1e-5) and ours > 0


def test_transformers_model_finds_the_loss_that_ours_finds():
    pytest.importorskip("transformers")
    peer = named("LlamaForCausalLM")
    with peer.ours(TRY) as ours, peer.theirs(TRY) as theirs:
        assert float(ours()) == pytest.approx(float(theirs()), rel=1e-5)


@gloo
def _averaged(rank, world, name):
    """Whether the peer leaves the mean of all ranks' weights on this one."""
    made = []

    def replica(scale):
        made.append(Llama(scale.replica, seed=rank))
        return made[-1]

    peers.replica = replica
    with named(name).theirs(TRY) as theirs:
        theirs()
    want = sum(vector(Llama(TRY.replica, seed=r)) for r in range(world)) / world
    return bool(torch.allclose(vector(made[0]), want, atol=1e-6))


def vector(model):
    return torch.nn.utils.parameters_to_vector(model.parameters())


@pytest.mark.parametrize("name", ["PeriodicModelAverager", "LocalSGD", "averaging"])
def test_other_averages_end_at_the_mean(name):
    pytest.importorskip(named(name).package)
    assert processes(2, _averaged, name) == [True, True]


def test_what_is_not_installed_is_named_and_not_measured(monkeypatch, capsys):
    monkeypatch.setattr(peers, "find_spec", lambda package: package == "torch")
    monkeypatch.setattr(peers, "run_ranks", lambda processes, *words: peers.Path(words[-1]).write_text("[]"))
    found = peers.measure(types.SimpleNamespace(scale="try"))
    peers.show(found)
    assert found["records"] == []
    assert capsys.readouterr().out.splitlines()[-1].endswith("transformers's LlamaForCausalLM")
    assert found["missing"][:2] == ["torchft's LocalSGD", "hivemind's averaging"]
    assert {peer.package for peer in peers.installed(peers.SYNC)} == {"torch"}


def test_a_ratio_is_ours_over_the_peers_turn_by_turn(capsys):
    """By hand: 1/2, 3/2, 2/4. Ours is first in the first and third of these, the peer's in the second."""
    clock = iter([0, 5, 0, 7, 0, 1, 0, 2, 0, 2, 0, 3, 0, 2, 0, 4])      # the first turn is not counted
    scale = TRY._replace(turns=3)
    side = peers.contextmanager(lambda scale: iter([lambda: None]))
    peer = peers.Peer(peers.SYNC, "ours", side, "torch", "theirs", side)
    found = peers.record(peer, 2, peers.by_turns(peer, scale, lambda: next(clock), lambda: None))
    assert found["ratios"] == [0.5, 1.5, 0.5] and found["seconds_here"] == 2
    peers.show(dict(records=[found], missing=[]))
    assert f"| ours | torch {torch.__version__}: theirs | 2 | 0.50 [0.50, 1.50] |" in capsys.readouterr().out
