"""examples/distributed_checkpoint.py, for every outer optimizer."""

import itertools
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from examples.distributed_checkpoint import Pickled, load, save
from gossip import PhiAhead, outer_optimizer
from noloco import DiLoCo, NoLoCo
from test_minimal import inner, small_model
from tests.harness import gloo, processes

# ---------------- torch.distributed.checkpoint

OUTERS = {
    "fp32": NoLoCo,
    "one byte": partial(outer_optimizer, "noloco", "int8", 0),
    "phi ahead": lambda *args, **settings: PhiAhead(NoLoCo(*args, gamma=1.0, **settings)),
    "delayed": partial(outer_optimizer, "noloco", "fp32", 3),
    "fragments": partial(outer_optimizer, "noloco", "int8", 2, fragments=3),
    "DiLoCo": DiLoCo,
    "DiLoCo in one byte, delayed": partial(outer_optimizer, "diloco", "int8", 3),
}


def fresh(rank, kind):
    model, xs, ys = small_model(rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return model, optimizer, OUTERS[kind](model.parameters(), inner_steps=4), xs, ys


def trained_on(training, steps):
    """The weights after these steps, and the bytes sent."""
    model, optimizer, outer, xs, ys = training
    for step in steps:
        inner(model, optimizer, xs[step], ys[step])
        outer.step()
    return [*torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(), outer.bytes_sent]


@gloo
def _checkpoints(rank, world, folder):
    """{kind: the weights at a save, those some steps later, and both again of a new training that loads}."""
    group = dist.new_group(backend="gloo")
    found = {}
    for kind in OUTERS:
        training, again = fresh(rank, kind), fresh(rank, kind)
        before = trained_on(training, range(5))
        parts = lambda t: dict(model=t[0], optimizer=Pickled(t[1]), outer=t[2])
        saved = save(f"{folder}/{kind}", group, **parts(training))
        after = trained_on(training, range(5, 14))              # while a thread writes
        saved.result()
        load(f"{folder}/{kind}", group, **parts(again))
        loaded = trained_on(again, [])
        found[kind] = before, after, loaded, trained_on(again, range(5, 14))
        for outer in (training[2], again[2]):
            outer.settle()
    return found


def test_each_replica_saves_its_own_while_it_trains_and_goes_on_to_the_bit(tmp_path):
    """The fifth step is one after an outer step, so of the delayed a message is under way."""
    replicas = processes(4, _checkpoints, str(tmp_path))
    for kind in OUTERS:
        for before, after, loaded, went_on in (found[kind] for found in replicas):
            assert loaded == before and went_on == after != before, kind
        saved = [found[kind][0] for found in replicas]
        assert all(a != b for a, b in itertools.combinations(saved, 2)), kind


@gloo
def _naively(rank, world, folder):
    """What each replica loads of a key that all share, and of an Adam that is given as it is."""
    theta = torch.full((3,), float(rank))
    dcp.save({"theta": theta}, checkpoint_id=f"{folder}/theta")
    dcp.load({"theta": theta}, checkpoint_id=f"{folder}/theta")
    model, optimizer, outer, xs, ys = fresh(rank, "fp32")
    inner(model, optimizer, xs[0], ys[0])
    dcp.save({f"adam{rank}": optimizer}, checkpoint_id=f"{folder}/adam")
    _, new, *_ = fresh(rank, "fp32")
    dcp.load({f"adam{rank}": new}, checkpoint_id=f"{folder}/adam")
    return theta.tolist(), len(optimizer.state), len(new.state)


def test_the_naive_ways_lose_what_the_page_says(tmp_path):
    assert processes(2, _naively, str(tmp_path)) == [([0.0] * 3, 4, 0)] * 2
