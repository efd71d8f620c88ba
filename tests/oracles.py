"""Oracles of several test files, beside those of test_minimal.py."""

import json

import pytest
import torch

import skippipe
from gossip.delay import PhiAhead
from model import Llama
from noloco import NoLoCo, flatten
from test_minimal import SMALL_CONFIG
from tests.harness import HERE
from train import load_corpus


def phi_ahead(*args, **settings):
    return PhiAhead(NoLoCo(*args, **settings))


def loaded(theta, layers, config=SMALL_CONFIG):
    """The stage with these layers and these weights, of a checkpoint."""
    model = Llama(config, layers, ends=0 in layers)
    flatten(model.parameters()).copy_(theta)
    return model


def through(stages, tokens):
    """What comes home of these tokens through these stages, of which the first has the ends."""
    x = stages[0].embed(tokens)
    for stage in stages:
        x = stage.blocks(x)
    return x


def heldout_loss(stages, o):
    """On the eight sequences on which a small run evaluates."""
    heldout = load_corpus(o).heldout
    starts = [round(i * (len(heldout) - o.seq_len - 1) / 7) for i in range(8)]
    rows = torch.stack([heldout[start : start + o.seq_len + 1] for start in starts]).long()
    return stages[0].loss(through(stages, rows[:, :-1]), rows[:, 1:]).item() / rows[:, 1:].numel()


# The published routes and times (released code of arXiv 2502.19913):
# method -> (rounds, {seconds of a forward: seconds of an iteration}, a path per microbatch of a round).
PUBLISHED_ROUTES = {
    method: (row["rounds"], {float(forward): seconds for forward, seconds in row["times"].items()},
             [tuple(path) for path in row["paths"]])
    for method, row in json.loads((HERE / "tests/published_routes.json").read_text()).items()}


def assert_possible(network, paths, rounds, result):
    """The invariants of the time model, checked on a timeline."""
    end, tasks, hops = {}, [[] for _ in network.compute], {}
    for rank, u, number, kind, arrived, start, stop in result.timeline:
        path, hop = paths[u % len(paths)], hops.setdefault(u, 0)
        way = skippipe.chain(path)
        assert rank == way[hop] and kind == skippipe.kind(path, hop)
        assert number == hop and start >= arrived
        if hop:
            way_there = network.delay[way[hop - 1]][rank] if way[hop - 1] != rank else 0
            assert start >= end[u, hop - 1] + way_there - 1e-6
        elif u >= len(paths):
            assert start >= end[u - len(paths), len(way) - 1] - 1e-6
        work = {"forward": 1, "loss": 0.25, "backward": 1.5}[kind]
        assert stop - start == pytest.approx(network.compute[rank] * work)
        end[u, hop], hops[u] = stop, hop + 1
        tasks[rank].append((start, stop, hop, {"forward": 1, "loss": 0, "backward": -1}[kind]))
    assert all(hops[u] == len(skippipe.chain(paths[u % len(paths)])) for u in range(rounds * len(paths)))
    for rank, mine in enumerate(tasks):
        held = 0
        for (start, stop, hop, take), after in zip(mine, mine[1:] + [(1e9,)]):
            held += take
            assert held <= network.memory[rank]
            assert after[0] >= stop + (network.overhead if hop else network.origin_overhead) - 1e-6
    assert result.makespan == max(end.values())
