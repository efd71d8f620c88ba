"""The executor beyond test_minimal.py: paths, planned orders, and messages in bfloat16."""

import itertools
import random
from collections import Counter

import pytest
import torch

import skippipe
import train
from model import Config, Llama
from planning.methods import random_valid_paths
from planning.rho import scaled, shares, with_stages_missing
from planning.search import plan
from skippipe import Network, chain, full_paths, random_paths
from tests.oracles import random_network, replay, scaled_blocks, worst_gradient


@pytest.mark.parametrize("sizes", [(4,), (4, 4), (3, 2, 2), (1, 5), (2, 3, 1, 4)])
def test_paths_visit_every_stage_as_evenly_as_possible(sizes):
    ranks = iter(range(sum(sizes)))
    stages = [[next(ranks) for _ in range(s)] for s in sizes]
    for paths in (full_paths(stages, 3), *(random_paths(stages, 3, step, seed=0) for step in range(30))):
        assert len(paths) == 3 * sizes[0]
        for s, stage in enumerate(stages):
            visits = Counter(path[s] for path in paths)
            assert set(visits) <= set(stage)
            assert max(visits[r] for r in stage) - min(visits[r] for r in stage) <= 1
    if len(set(sizes)) == 1:
        straight = lambda origin: tuple(s[stages[0].index(origin)] for s in stages)
        assert all(path == straight(path[0]) for path in full_paths(stages, 3))
    assert random_paths(stages, 3, 5, 0) == random_paths(stages, 3, 5, 0)


def test_planned_message_lists_replayed_as_blocking_fifo_channels_finish():
    draw = random.Random(3)
    for trial in range(40):
        network = random_network(draw, (2, 2, 1, 2), speeds=(0.1, 0.5))
        try:
            count = draw.randint(1, 4)
            paths, order = plan(network, 3, count, 2, seconds=None, iterations=30, seed=trial)
        except skippipe.Infeasible:
            continue
        assert replay(paths * 2, range(7), order)
    # rank 1 runs the second microbatch first, though the first is sent first
    order = [[(0, 0), (1, 0), (1, 2), (0, 2), (1, 4), (0, 4)], [(1, 1), (0, 1), (1, 3), (0, 3)]]
    assert train.incoming([chain((0, 1))] * 2, 1, order[1], order) == [
        (0, 0, 1), (0, 1, 1), (0, 1, 3), (0, 0, 3)
    ]
    assert replay([(0, 1)] * 2, range(2), order)


def test_bfloat16_messages_give_nearly_the_same_gradients():
    stages = [[0, 1], [2, 3]]
    sets = [full_paths(stages, 2)]
    assert worst_gradient(stages, sets, (2, 16, 32), torch.bfloat16, tolerance=1e-2) < 0.05


# ---- the rho rule: planning/rho.py


def test_the_rho_rule_scales_what_layers_add_and_leaves_no_trace():
    """The weights afterwards are those before, to the bit."""
    model = Llama(Config(hidden_size=32, num_attention_heads=2, num_key_value_heads=2))
    x = torch.randn(2, 8, 32)
    before = model.blocks(x)
    with torch.no_grad(), scaled(model, 0.75):
        got = model.blocks(x)
    assert torch.allclose(got.double(), scaled_blocks(model, x, 0.75), rtol=0, atol=1e-5)
    assert not torch.allclose(got, before, rtol=0, atol=1e-2)
    assert torch.equal(model.blocks(x), before)


def test_shares_of_visits_by_hand():
    stages, paths = [[0, 1], [2, 3], [4], [5]], [(0, 2, 4), (1, 4), (0, 3), (1, 4, 2)]
    assert shares(paths, stages) == [1, 0.75, 0.75, 0]
    assert shares([], stages) == [0, 0, 0, 0]       # every path had a dead node: there is no task either


def test_with_stages_missing_each_adds_more_by_hand():
    rho = [1, 0.75, 0.5, 0]                     # nobody visits the last one
    assert with_stages_missing(rho, 4) == with_stages_missing(rho, 3) == rho
    assert with_stages_missing(rho, 2) == with_stages_missing(rho, 1) == [1, 1, 1, 0]
    assert with_stages_missing([1, 0.5, 0.25, 0.25], 3) == [1, 0.75, 0.375, 0.375]


@pytest.mark.parametrize("there", (8, 7, 6))
def test_stages_that_are_there_add_on_average_what_paths_added_in_training(there):
    stages = [[rank] for rank in range(8)]
    network = Network([[0.0] * 8] * 8, 1.0, stages, memory=9)
    paths = random_valid_paths(network, 5, 13, seed=1)
    rho = shares(paths, stages)
    assert sum(rho) == pytest.approx(5) and len(set(rho)) > 2
    raised = with_stages_missing(rho, there)
    assert max(raised[1:]) < 1
    choices = [(raised[0], *chosen) for chosen in itertools.combinations(raised[1:], there - 1)]
    assert sum(map(sum, choices)) / len(choices) == pytest.approx(5)
