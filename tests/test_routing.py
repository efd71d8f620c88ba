"""Paths in training: random and planned, measured and emulated networks."""

import os
import re
import shutil
import time
from collections import Counter

import pytest
import torch

import skippipe
import train
from model import Config, Llama
from noloco import flatten
from plumbing.data import load_data
from skippipe import chain, full_paths, random_paths
from tests.harness import SMALL, checkpoint, metrics, options, processes, run, train_main


def test_random_routing_in_training_is_random_paths(corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACE", "1")
    results = processes(
        4,
        _traced,
        [
            str(a)
            for a in ["--stages", "2,2", "--steps", 3, "--seed", 5, "--data", corpus, "--name", "x", *SMALL]
        ],
        cwd=tmp_path,
    )
    sent = Counter(
        line for text in results for line in re.findall(r"(rank \d -> \d: microbatch \d+, hop \d+),", text)
    )
    want = Counter()
    for step in range(3):
        for u, path in enumerate(random_paths([[0, 1], [2, 3]], 2, step, 5)):
            ranks = chain(path)
            want.update(
                f"rank {a} -> {b}: microbatch {u}, hop {hop}"
                for hop, (a, b) in enumerate(zip(ranks, ranks[1:]), 1)
                if a != b
            )
    for u, path in enumerate(full_paths([[0, 1], [2, 3]], 1) * 4):  # the evaluation
        want.update(
            [
                f"rank {path[0]} -> {path[1]}: microbatch {u}, hop 1",
                f"rank {path[1]} -> {path[0]}: microbatch {u}, hop 2",
            ]
        )
    assert sent == want


def _traced(rank, world, argv):
    os.environ["TRACE"] = "1"
    return train_main(rank, world, argv)[1]


def test_a_skip_run_equals_single_process_simulation_of_its_paths(skip_run, corpus):
    stages, layers = [[0, 1], [2], [3, 4]], [[0], [1], [2, 3]]
    states = [checkpoint(skip_run / "runs/x", 3, r) for r in range(5)]
    paths = states[0]["plan"]["paths"]
    assert all(state["plan"] == states[0]["plan"] for state in states)
    assert len(paths) == 8
    assert all(len(p) == 2 for p in paths)
    o = options("--data", corpus, "--steps", 3, "--warmup", 2, *SMALL)
    readers = [load_data(o, i, 2)[1] for i in range(2)]
    models = [
        Llama(Config(256, 32, 64, 4, 2, 2), layers[s], ends=s == 0)
        for s, ranks in enumerate(stages)
        for _ in ranks
    ]
    flats = [flatten(m.parameters()) for m in models]
    adams = [torch.optim.Adam(m.parameters(), betas=(0.9, 0.95)) for m in models]
    for step in range(3):
        for _, grad in flats:
            grad.zero_()
        for path in paths:
            batch = readers[path[0]].next(o.batch)
            x = models[path[0]].embed(batch[:, :-1])
            for rank in path:
                x = models[rank].blocks(x)
            models[path[0]].loss(x, batch[:, 1:]).backward()
        for rank, (_, grad) in enumerate(flats):
            visits = sum(rank in p for p in paths)
            if visits:
                grad /= visits * o.batch * o.seq_len
                grad *= min(1.0, 1.0 / grad.norm().item())
                adams[rank].param_groups[0]["lr"] = train.schedule(step, o)
                adams[rank].step()
    for (theta, _), state in zip(flats, states):
        assert torch.allclose(theta, state["theta"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("routing, method", [("dtfm", "ddp"), ("dtfm-skip", "diloco"), ("no-tc2", "noloco")])
def test_every_planned_routing_runs_emulated_with_every_method(routing, method, skip_run, corpus):
    run(
        5, "--stages", "2,1,2", "--skip", 0.33, "--routing", routing, "--method", method,
        *(["--inner-steps", 2] if method != "ddp" else []), "--links", "links.json", "--emulate",
        "--microbatches", 2, "--steps", 3, "--data", corpus, "--name", routing, *SMALL, cwd=skip_run,
    )
    line = metrics(skip_run / "runs" / routing)[-1]
    plan = checkpoint(skip_run / "runs" / routing, 3, 0)["plan"]
    assert all(len(path) == (3 if routing == "dtfm" else 2) for path in plan["paths"])
    assert line["iteration_seconds"] >= plan["makespan"] * 0.999 and line["skipped_steps"] == 0


def test_the_routing_without_swaps_keeps_every_path_in_order():
    network, _ = skippipe.published_network()
    swapping, in_order = (
        train.PLANNERS[routing](network, 4, 3, 2, 0, ()) for routing in ("skippipe", "no-swaps")
    )
    assert (
        skippipe.check(network, in_order.paths, 4, swaps=0)
        == []
        != skippipe.check(network, swapping.paths, 4, swaps=0)
    )
    assert in_order.makespan > swapping.bound


def _measured(rank, world):
    """`measure` with one slow pair: messages from rank 1 to rank 2 take 0.3 s more, rank 0's forward 0.2 s.

    Both are far above any noise.
    """
    job = train.Job()
    model = Llama(Config(hidden_size=32, intermediate_size=32, num_hidden_layers=1))
    stages = [[r] for r in range(world)]
    pipeline = train.Pipeline(model, job, stages, (1, 8, 32), torch.float32)
    send, blocks = pipeline.send, model.blocks
    pipeline.send = lambda tensor, to, u, hop: (
        time.sleep(0.3 * ((rank, to) == (1, 2))),
        send(tensor, to, u, hop),
    )[1]
    model.blocks = lambda x: (time.sleep(0.2 * (rank == 0)), blocks(x))[1]
    result = train.measure(pipeline, stages, job)
    job.close()
    return result


def test_measure_finds_the_slow_pair_and_the_slow_node():
    (delay, compute), *others = processes(4, _measured)
    assert others == [(None, None)] * 3
    flat = [(delay[a][b], {a, b}) for a in range(4) for b in range(4) if a != b]
    # both ends saw it
    assert sorted(flat, key=lambda x: -x[0])[0][1] == sorted(flat, key=lambda x: -x[0])[1][1] == {1, 2}
    assert delay[1][2] >= 0.15
    assert all(delay[a][a] == 0 for a in range(4))
    assert max(range(4), key=compute.__getitem__) == 0


def test_an_emulated_iteration_is_never_shorter_than_simulated(skip_run):
    line, plan = metrics(skip_run / "runs/x")[-1], checkpoint(skip_run / "runs/x", 3, 0)["plan"]
    assert line["iteration_seconds"] >= line["simulated_seconds"] * 0.999
    assert line["simulated_seconds"] == plan["makespan"] > 0.05


def test_measured_delays_make_a_plan_and_resume_keeps_it(corpus, tmp_path):
    run(
        4, "--stages", "2,1,1", "--skip", 0.33, "--steps", 2, "--save-every", 1, "--data", corpus,
        "--name", "x", *SMALL, cwd=tmp_path,
    )
    plan = checkpoint(tmp_path / "runs/x", 1, 0)["plan"]
    shutil.rmtree(tmp_path / "runs/x/checkpoints/00000002")
    run(4, "--resume", "runs/x", cwd=tmp_path)
    assert checkpoint(tmp_path / "runs/x", 2, 3)["plan"] == plan and 0 < plan["makespan"] < 60
