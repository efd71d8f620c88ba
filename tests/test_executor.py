"""The executor beyond test_minimal.py: paths, planned orders, and messages in bfloat16."""

import random
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

import skippipe
import train
from planning.search import plan
from skippipe import (FORWARD, Network, chain, full_paths, kind, random_paths, random_valid_paths,
                      share_of_visits)
from test_minimal import _gradients
from tests.harness import processes
from tests.oracles import random_network, replay


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
            paths, order = plan(
                network, 3, draw.randint(1, 4), 2, seconds=None, iterations=30, seed=trial
            )
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
    assert max(processes(4, _gradients, stages, [full_paths(stages, 2)], (2, 16, 32), torch.bfloat16)) < 0.05


# ---- the scale of what a stage adds (skippipe.py, Eq. 6); its gradients are in test_minimal.py

FIVE = [[r] for r in range(5)]
ADDS = {1: 3.0, 2: -5.0, 3: 7.0, 4: 11.0}      # by the later stages' ranks, to whatever comes


def added(paths, train_=True, scaled=True):
    """{rank: what it added to each microbatch}, by that rank's own executor."""
    found = {rank: [] for rank in ADDS}
    x = torch.ones(1, 1, 1)
    for rank, constant in ADDS.items():
        job = SimpleNamespace(rank=rank, world=1, device=x.device, nccl=False)
        pipeline = train.Pipeline(SimpleNamespace(blocks=lambda x: x + constant), job, FIVE, x.shape)
        pipeline.scaled = scaled
        pipeline.take = lambda u, hop: x.clone()

        def give(u, hop, out):
            if kind(paths[u], hop) == FORWARD:
                found[rank].append((out - x).item())
        pipeline.give = give
        pipeline.run(paths, {}, train_)
    return found


def test_shares_of_visits_by_hand():
    stages, paths = [[0, 1], [2, 3], [4], [5]], [(0, 2, 4), (1, 4), (0, 3), (1, 4, 2)]
    assert [share_of_visits(paths, ranks) for ranks in stages] == [1, 0.75, 0.75, 0]
    assert share_of_visits([], [0]) == 0        # every path had a dead node: there is no task either


def test_stages_add_on_average_what_the_whole_model_adds():
    network = Network([[0.0] * 5] * 5, 1.0, FIVE, memory=7)
    paths = random_valid_paths(network, 4, 7, seed=1)
    scaled = added(paths)
    assert {len(visits) for visits in scaled.values()} == {5, 6}       # 21 visits, 4 stages: two shares
    assert {rank: sum(visits) / 7 for rank, visits in scaled.items()} == pytest.approx(ADDS)
    for plain in (added(paths, scaled=False), added(paths, train_=False)):
        assert all(set(visits) == {ADDS[rank]} for rank, visits in plain.items())


def test_where_no_path_skips_nothing_is_scaled(monkeypatch):
    """So the bits are those of a run without it."""
    monkeypatch.delattr(torch, "lerp")
    for paths in (full_paths(FIVE, 3), [(0, 2, 1, 3, 4), (0, 1, 2, 4, 3)]):
        assert added(paths) == {rank: [constant] * len(paths) for rank, constant in ADDS.items()}
    with pytest.raises(AttributeError):
        added([(0, 1), (0, 2)])
