"""The programs of docs/trainers.md: checkpoints, the mean without an all-reduce, two paces."""

import itertools
import math
import os
import re
import shutil
import subprocess
import sys
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.utils._pytree import tree_leaves

from gossip import OneByte, PhiAhead, lengths_of, outer_optimizer
from noloco import DiLoCo, NoLoCo, random_groups
from test_minimal import brute_force, inner, small_model
from tests.harness import HERE, gloo, processes
from tests.test_noloco import recipe

TRAINERS = (HERE / "docs/trainers.md").read_text()

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
    """The weights after these steps."""
    model, optimizer, outer, xs, ys = training
    for step in steps:
        inner(model, optimizer, xs[step], ys[step])
        outer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


@gloo
def _checkpoints(rank, world, folder):
    """{kind: the weights at a save, those some steps later, and both again of a new training that loads}."""
    page = recipe("trainers.md", "With torch.distributed.checkpoint")
    group = dist.new_group(backend="gloo")
    found = {}
    for kind in OUTERS:
        training, again = fresh(rank, kind), fresh(rank, kind)
        before = trained_on(training, range(5))
        parts = lambda t: dict(model=t[0], optimizer=page["Pickled"](t[1]), outer=t[2])
        saved = page["save"](f"{folder}/{kind}", group, **parts(training))
        after = trained_on(training, range(5, 14))              # while a thread writes
        saved.result()
        page["load"](f"{folder}/{kind}", group, **parts(again))
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


# ---------------- noloco.py alone, in a loop of one's own


def run_alone(folder, program):
    """Two processes of the page's loop where nothing but noloco.py is beside it: their states."""
    shutil.copy(HERE / "noloco.py", folder)
    (folder / "mine.py").write_text(program)
    environment = dict(os.environ, GLOO_SOCKET_IFNAME="lo", RES_OPTIONS="attempts:0")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*torchrun, "mine.py"], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    losses = re.findall(r"rank \d: loss (\S+)", done.stdout)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)], [float(loss) for loss in losses]


def test_the_pages_own_loop_trains_and_goes_on_to_the_bit_with_noloco_alone(tmp_path):
    """With microbatches, a schedule, autocast in bf16 and its own checkpoint, of a step between meetings."""
    program = re.search(r"## A loop of your own.*?```python\n(.*?)```", TRAINERS, re.S)[1]
    shorter = program.replace("STEPS, MICROBATCHES = 200", "STEPS, MICROBATCHES = 53").replace("% 50", "% 53")
    assert shorter.count("53") == 2
    folders = [tmp_path / "whole", tmp_path / "stopped"]
    for folder in folders:
        folder.mkdir()
    whole, losses = run_alone(folders[0], program)
    run_alone(folders[1], shorter)
    resumed, _ = run_alone(folders[1], program)
    assert len(losses) == 2 and max(losses) < 0.1
    assert whole[0]["outer"]["steps"] == 200
    for want, found in zip(whole, resumed, strict=True):
        for a, b in zip(tree_leaves(want), tree_leaves(found), strict=True):
            assert torch.equal(a, b) if torch.is_tensor(a) else a == b


# ---------------- the mean without an all-reduce


@gloo
def _hypercube(rank, world, one_byte, ranks):
    """(theta before, phi, theta after): each replica has come its own way since phi, in two blocks."""
    merge = recipe("trainers.md", "The mean without an all-reduce", NoLoCo=NoLoCo)["merge"]
    tensors = [torch.nn.Parameter(10 * torch.randn(900, generator=torch.Generator().manual_seed(s)))
               for s in range(2)]
    outer = NoLoCo(tensors, ranks, inner_steps=1, gamma=None if one_byte else 1.0,
                   codec=OneByte(lengths_of(tensors)) if one_byte else None)
    come = torch.randn(len(outer.theta), generator=torch.Generator().manual_seed(9 + rank))
    outer.theta.add_(come, alpha=0.02)
    before = outer.theta.clone()
    merge(outer)
    return before.numpy(), outer.phi.numpy(), outer.theta.numpy()


def run_hypercube(world, one_byte, ranks=None):
    """The same, each as a float64 matrix with a row per replica."""
    before, phi, after = zip(*processes(world, _hypercube, one_byte, ranks))
    return as_rows(before), as_rows(phi), as_rows(after)


def as_rows(arrays):
    return torch.stack([torch.from_numpy(array).double() for array in arrays])


@pytest.mark.parametrize("world", [2, 4, 8])
def test_merging_on_a_hypercube_gives_all_the_same_mean(world):
    before, _, after = run_hypercube(world, False, list(reversed(range(world))))
    assert (after == after[0]).all()
    assert torch.allclose(after[0], before.mean(0), rtol=0, atol=math.log2(world) * 2**-24 * 64)


@pytest.mark.parametrize("world", [2, 4, 8])
def test_merging_in_one_byte_is_as_exact_as_the_page_says(world):
    before, phi, after = run_hypercube(world, True)
    error = (after - before.mean(0)).abs()
    for block in (slice(0, 912), slice(912, None)):
        d = (before - phi)[:, block].abs().max()
        worst = error[:, block].max()
        assert d / 1000 < worst <= math.log2(world) / 64 * d + 1e-5
    assert (after != after[0]).any()


@gloo
def _merged_in_fp32(rank, world):
    """(weights, merged weights) of delayed fragments in one byte, merged by a NoLoCo made for it."""
    merge = recipe("trainers.md", "The mean without an all-reduce")["merge"]
    training = model, _, outer, *_ = fresh(rank, "fragments")
    weights = trained_on(training, range(10))
    outer.settle()
    merge(NoLoCo(model.parameters()))
    return weights, trained_on(training, [])


def test_a_noloco_made_for_the_merge_is_exact_after_anything():
    weights, merged = zip(*processes(4, _merged_in_fp32))
    assert all(m == merged[0] for m in merged)
    mean = torch.tensor(weights, dtype=torch.float64).mean(0)
    assert torch.allclose(torch.tensor(merged[0]).double(), mean, rtol=0, atol=1e-7)


def test_what_cannot_be_merged_so_is_said():
    merge = recipe("trainers.md", "The mean without an all-reduce")["merge"]
    weight = torch.nn.Parameter(torch.ones(3))
    three = NoLoCo([weight], [0, 1, 2], inner_steps=2)
    with pytest.raises(ValueError, match="3 replicas are no power of two: average them by an all-reduce"):
        merge(three)
    outer = NoLoCo([weight], [0], inner_steps=2, codec=OneByte(lengths_of([weight])))
    with pytest.raises(ValueError, match="in one byte, merge in place of an outer step"):
        merge(outer)
    outer.step()
    merge(outer)                    # the second step is due


# ---------------- two paces

PACES = {"often": 2, "seldom": 3}


@gloo
def _two_paces(rank, world, steps):
    """The weights, and for each outer optimizer the steps at which it met and its bytes."""
    model, xs, ys = small_model(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    outers = recipe("trainers.md", "Two paces")["two_paces"](model, ends=("0.",), **PACES)
    met = [[], []]
    for step in range(steps):
        inner(model, optimizer, xs[step], ys[step])
        for outer, at in zip(outers, met):
            if outer.step():
                at.append(step + 1)
    return [p.detach().numpy() for p in model.parameters()], met, [outer.bytes_sent for outer in outers]


def simulated_paces(world, steps):
    """Every replica's tensors in float64: the first layer's two and the last's meet at their own steps."""
    models = [small_model(r) for r in range(world)]
    replicas = [list(model.double().parameters()) for model, *_ in models]
    phis, deltas = [], []
    for tensors in replicas:
        phis.append([p.detach().clone() for p in tensors])
        deltas.append([torch.zeros_like(p) for p in phis[-1]])
    for step in range(1, steps + 1):
        for (model, xs, ys), tensors in zip(models, replicas):
            inner(model, torch.optim.SGD(tensors, lr=0.05), xs[step - 1].double(), ys[step - 1].double())
        for seed, (m, part) in enumerate(zip(PACES.values(), [(0, 1), (2, 3)])):
            if step % m:
                continue
            for group, i in itertools.product(random_groups(range(world), 2, step // m - 1, seed), part):
                of = lambda tensors: torch.stack([tensors[r][i].detach() for r in group])
                news = brute_force(of(replicas), of(phis), of(deltas), 0.5, 0.7, 0.7)
                for r, phi, delta in zip(group, *news):
                    phis[r][i], deltas[r][i] = phi, delta
                    replicas[r][i].data.copy_(phi)
    return replicas


def test_two_paces_equal_a_float64_simulation_and_no_circle_waits():
    """At step 12 both meet, and their pairs make a ring of all four: it ends since all keep one order."""
    first, second = random_groups(range(4), 2, 5, 0), random_groups(range(4), 2, 3, 1)
    assert not set(first) & set(second)
    found = processes(4, _two_paces, 12)
    for (tensors, met, sent), wanted in zip(found, simulated_paces(4, 12), strict=True):
        assert met == [[2, 4, 6, 8, 10, 12], [3, 6, 9, 12]]
        assert sent == [6 * 4 * (16 + 16), 4 * 4 * (16 + 16)]
        for tensor, want in zip(tensors, wanted, strict=True):
            assert torch.allclose(torch.from_numpy(tensor).double(), want, rtol=0, atol=2e-6)
