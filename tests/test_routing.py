"""Paths in training: the executor beyond test_minimal.py, the rho rule, planned and measured routes."""

import itertools
import json
import os
import random
import re
import time
from collections import Counter
from contextlib import suppress

import pytest
import torch

import skippipe
import train
from model import Llama
from noloco import flatten
from planning import search
from planning.instance import published_network
from planning.measure import main as measure_main
from planning.measure import measure
from planning.methods import random_valid_paths
from planning.training import PLANNERS, plan_paths
from skippipe import Network, chain, full_paths, incoming, random_paths, read_network, simulate
from tests.harness import (SMALL, SMALL_CONFIG, checkpoint, connected_job, goes_on_to_the_bit,
                           metrics, options, processes, run, train_main)
from tools.partial import with_stages_missing
from train import Reader, load_corpus, pipelines, scaled, shares
from tests.oracles import (any_paths, numbered, random_network, reference_logits, replay, through,
                           worst_gradient)


@pytest.mark.parametrize("sizes", [(4,), (4, 4), (3, 2, 2), (1, 5), (2, 3, 1, 4)])
def test_paths_visit_every_stage_as_evenly_as_possible(sizes):
    stages = numbered(sizes)
    for paths in (full_paths(stages, 3), *(random_paths(stages, 3, step, seed=0) for step in range(30))):
        assert len(paths) == 3 * sizes[0]
        for s, stage in enumerate(stages):
            visits = Counter(path[s] for path in paths)
            assert set(visits) <= set(stage)
            assert max(visits[r] for r in stage) - min(visits[r] for r in stage) <= 1
    if len(set(sizes)) == 1:
        assert set(full_paths(stages, 3)) == set(zip(*stages))          # each straight through
    assert random_paths(stages, 3, 5, 0) == random_paths(stages, 3, 5, 0)


@pytest.mark.parametrize("sizes", [(4,), (4, 4), (3, 2, 2), (1, 5), (2, 3, 1, 4)])
def test_evaluation_visits_every_rank(sizes):
    stages = numbered(sizes)
    paths = pipelines(stages)
    assert {rank for path in paths for rank in path} == {*range(sum(sizes))}
    assert len(paths) == max(sizes)
    assert all(rank in ranks for path in paths for rank, ranks in zip(path, stages))
    if sizes[0] == max(sizes):
        assert paths == full_paths(stages, 1)


def test_message_lists_replayed_as_blocking_fifo_channels_finish():
    r = random.Random(0)
    for trial in range(400):
        sizes = [r.randint(1, 4) for _ in range(r.randint(1, 5))]
        stages = numbered(sizes)
        count = r.randint(1, 5)
        paths = any_paths(stages, count, r) if trial % 2 else random_paths(stages, count, trial, 0)
        assert replay(paths, range(sum(sizes))), f"deadlock: {paths}"


@pytest.mark.parametrize("sizes, dtype, tolerance, worst", [
    ((2, 2, 1), torch.float32, 1e-5, 1e-5), ((1, 3), torch.bfloat16, 1e-2, 0.05)])
def test_pipeline_gradients_losses_and_counts_equal_one_process(sizes, dtype, tolerance, worst):
    r = random.Random(0)
    stages = numbered(sizes)
    sets = [full_paths(stages, 3)] + [random_paths(stages, 3, step, 0) for step in range(3)]
    sets += [any_paths(stages, r.randint(1, 4), r) for _ in range(6)]
    assert worst_gradient(stages, sets, (2, 8, 16), dtype, tolerance) < worst


def test_planned_message_lists_replayed_as_blocking_fifo_channels_finish():
    draw = random.Random(3)
    for trial in range(40):
        network = random_network(draw, (2, 2, 1, 2), speeds=(0.1, 0.5))
        count = draw.randint(1, 4)
        with suppress(skippipe.Infeasible):
            paths, order = search.shorter_plan(network, 3, count, 2, seconds=None, iterations=30,
                                               seed=trial)
            assert replay(paths * 2, range(7), order)
    # rank 1 runs the second microbatch first, though the first is sent first
    order = [[(0, 0), (1, 0), (1, 2), (0, 2), (1, 4), (0, 4)], [(1, 1), (0, 1), (1, 3), (0, 3)]]
    posted = [(0, 0, 1), (0, 1, 1), (0, 1, 3), (0, 0, 3)]
    assert incoming([chain((0, 1))] * 2, 1, order[1], order) == posted
    assert replay([(0, 1)] * 2, range(2), order)


# ---- the rho rule: planning/rho.py


def test_the_rho_rule_scales_what_layers_add_and_leaves_no_trace():
    """The weights afterwards are those before, to the bit."""
    model, tokens = Llama(SMALL_CONFIG), torch.arange(8)[None]
    before, weights = model(tokens), {name: w.double() for name, w in model.state_dict().items()}
    with torch.no_grad(), scaled(model, 0.75):
        got = model(tokens)
    want = reference_logits(tokens[0], weights, SMALL_CONFIG, 0.75)
    assert torch.allclose(got[0].double(), want, rtol=0, atol=1e-5)
    assert not torch.allclose(got, before, rtol=0, atol=1e-2)
    assert torch.equal(model(tokens), before)


def test_shares_of_visits_and_what_stages_add_where_some_are_missing_by_hand():
    stages, paths = [[0, 1], [2, 3], [4], [5]], [(0, 2, 4), (1, 4), (0, 3), (1, 4, 2)]
    assert shares(paths, stages) == [1, 0.75, 0.75, 0]
    assert shares([], stages) == [0, 0, 0, 0]       # every path had a dead node: there is no task either
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
    always, *raised = with_stages_missing(rho, there)
    assert max(raised) < 1
    sums = [always + sum(chosen) for chosen in itertools.combinations(raised, there - 1)]
    assert sum(sums) / len(sums) == pytest.approx(5)


# ---- paths in a run


def _traced(rank, world, argv):
    os.environ["TRACE"] = "1"
    return train_main(rank, world, argv)[1]


def test_random_routing_in_training_is_random_paths(corpus, tmp_path):
    argv = ["--stages", "2,2", "--steps", 3, "--seed", 5, "--data", corpus, "--name", "x", *SMALL]
    results = processes(4, _traced, argv, cwd=tmp_path)
    trace = re.findall(r"(rank \d -> \d: microbatch \d+, hop \d+),", "\n".join(results))
    stages = [[0, 1], [2, 3]]
    # the evaluations, of the replicas and of the merged model: forward, and home for the loss
    runs = [*((random_paths(stages, 2, step, 5), None) for step in range(3)),
            *[(full_paths(stages, 1) * 4, 3)] * 2]
    assert Counter(trace) == Counter(
        f"rank {a} -> {b}: microbatch {u}, hop {hop}" for paths, end in runs for u, path in enumerate(paths)
        for hop, (a, b) in enumerate(itertools.pairwise(chain(path)[:end]), 1))


def test_a_skip_run_equals_single_process_simulation_of_its_paths(skip_run, corpus):
    stages, layers = [[0, 1], [2], [3, 4]], [[0], [1], [2, 3]]
    states = [checkpoint(skip_run / "runs/x", 3, r) for r in range(5)]
    paths = states[0]["plan"]["paths"]
    assert all(state["plan"] == states[0]["plan"] for state in states)
    assert len(paths) == 8 and all(len(p) == 2 for p in paths)
    o = options("--data", corpus, "--steps", 3, "--warmup", 2, *SMALL)
    corpus = load_corpus(o)
    readers = [Reader(corpus, o.seq_len, o.seed, i, 2) for i in range(2)]
    models = [Llama(SMALL_CONFIG, layers[s], ends=s == 0) for s, ranks in enumerate(stages) for _ in ranks]
    thetas = [flatten(m.parameters()) for m in models]
    grads = [train.flat_gradient(*flat) for flat in zip(models, thetas)]
    adams = [torch.optim.Adam(m.parameters(), betas=(0.9, 0.95)) for m in models]
    for step in range(3):
        for grad in grads:
            grad.zero_()
        for path in paths:
            batch, visited = readers[path[0]].next(o.batch), [models[rank] for rank in path]
            visited[0].loss(through(visited, batch[:, :-1]), batch[:, 1:]).backward()
        for rank, grad in enumerate(grads):
            if visits := sum(rank in p for p in paths):
                grad /= visits * o.batch * o.seq_len
                grad *= min(1.0, 1.0 / grad.norm().item())
                adams[rank].param_groups[0]["lr"] = train.schedule(step, o)
                adams[rank].step()
    for theta, state in zip(thetas, states):
        assert torch.allclose(theta, state["theta"], rtol=0, atol=1e-5)
    line = metrics(skip_run / "runs/x")[-1]
    assert line["simulated_seconds"] == states[0]["plan"]["makespan"] > 0.05


@pytest.mark.parametrize("routing, method", [("dtfm", "ddp"), ("stronger", "diloco --inner-steps 2"),
                                             ("no-swaps", "noloco --inner-steps 2")])
def test_every_planned_routing_runs_with_every_method(routing, method, skip_run, corpus):
    run(5, "--stages", "2,1,2", "--skip", 0.33, "--routing", routing, "--method", *method.split(), "--links",
        "links.json", "--microbatches", 2, "--steps", 3, "--data", corpus, "--name", routing, *SMALL,
        cwd=skip_run)
    line = metrics(skip_run / "runs" / routing)[-1]
    plan = checkpoint(skip_run / "runs" / routing, 3, 0)["plan"]
    assert all(len(path) == (3 if routing == "dtfm" else 2) for path in plan["paths"])
    assert line["simulated_seconds"] == plan["makespan"] and line["skipped_steps"] == 0


def test_the_routing_without_swaps_keeps_every_path_in_order():
    network, _ = published_network()
    swapping = PLANNERS["stronger"](network, 4, 3, 2, seed=0)
    in_order = PLANNERS["no-swaps"](network, 4, 3, 2, seed=0)
    kept, swapped = (skippipe.check(network, found.paths, 4, swaps=0) for found in (in_order, swapping))
    assert kept == [] != swapped
    assert in_order.makespan > swapping.bound


class SlowPair(train.Pipeline):
    """A message from rank 1 to rank 2 takes 0.3 s more, far above any noise."""

    def send(self, tensor, to, u, hop):
        time.sleep(0.3 * ((self.rank, to) == (1, 2)))
        return super().send(tensor, to, u, hop)


class SlowNode(Llama):
    """Rank 0's forward takes 0.2 s more."""

    def blocks(self, x):
        time.sleep(0.2 * (os.environ["RANK"] == "0"))
        return super().blocks(x)


def _measured(rank, world):
    job, stages = connected_job(), [[r] for r in range(world)]
    pipeline = SlowPair(SlowNode(SMALL_CONFIG, [0]), job, stages, (1, 8, 32))
    result = measure(pipeline, stages, job)
    job.close()
    return result


def test_measure_finds_the_slow_pair_and_the_slow_node():
    (delay, compute), *others = processes(4, _measured)
    assert others == [(delay, compute)] * 3
    pairs = sorted((-delay[a][b], {a, b}) for a in range(4) for b in range(4) if a != b)
    assert pairs[0][1] == pairs[1][1] == {1, 2}             # both ends saw it
    assert delay[1][2] >= 0.15 and all(delay[a][a] == 0 for a in range(4))
    assert max(range(4), key=compute.__getitem__) == 0


def assert_kept(folder, plan):
    """plan.json holds this plan."""
    row = json.loads((folder / "plan.json").read_text())
    for key in ("paths", "order", "makespan", "network"):
        assert row[key] == json.loads(json.dumps(plan[key]))
    assert row["stages"] == plan["network"]["stages"] and row["made"]["routing"] == "skippipe"


def test_measured_links_make_a_plan_and_resume_keeps_it(trained, corpus, tmp_path):
    stages = ["--stages", "2,1,1"]
    out = run(4, "links.json", *stages, "--data", corpus, *SMALL, cwd=tmp_path, main=measure_main)
    assert out.splitlines()[-1] == "links.json"
    trained(4, *stages, "--skip", 0.33, "--links", "links.json", "--steps", 2, "--save-every", 1,
            "--eval-every", 1)
    plan = checkpoint(tmp_path / "runs/x", 1, 0)["plan"]
    assert_kept(tmp_path / "runs/x", plan)
    goes_on_to_the_bit(tmp_path / "runs/x", 2)
    assert_kept(tmp_path / "runs/x", plan)
    assert checkpoint(tmp_path / "runs/x", 2, 3)["plan"] == plan and 0 < plan["makespan"] < 60
    result = simulate(Network(**plan["network"]), plan["paths"], order=plan["order"])
    assert result.makespan == plan["makespan"]


def test_ranks_without_work_in_a_plan_are_named(trained, tmp_path):
    """One microbatch that visits two of three stages leaves out one rank."""
    (tmp_path / "links.json").write_text(json.dumps(dict(delay=[[0.1] * 3] * 3, compute=0.05)))
    out = trained(3, "--stages", "1,1,1", "--skip", 0.33, "--microbatches", 1, "--links", "links.json",
                  "--steps", 1)
    ((_, visited),) = checkpoint(tmp_path / "runs/x", 1, 0)["plan"]["paths"]
    assert f"warning: ranks [{3 - visited}] get no work in this plan\n" in out


@pytest.mark.parametrize("routing", ["random", "fixed", "skippipe"])
@pytest.mark.parametrize("stages, least", [("1,3", 3), ("2,5", 3), ("2,1", 1)])
def test_fewer_microbatches_than_a_stage_has_replicas_are_refused(stages, least, routing):
    """In a step some would be idle, whatever the routing: they trained for 6, 12 and 6 steps of 24."""
    for microbatches in range(1, 5):
        o = options("--stages", stages, "--routing", routing, "--microbatches", microbatches)
        if microbatches < least:
            with pytest.raises(train.BadInput, match=f"idle: give --microbatches {least} or more"):
                train.layout(o, sum(o.stages))
        else:
            train.layout(o, sum(o.stages))


def test_links_are_read_in_the_order_of_this_runs_ranks(tmp_path):
    file = tmp_path / "links.json"
    delay = [[0, 1, 2], [3, 0, 4], [5, 6, 0]]
    file.write_text(json.dumps(dict(delay=delay, compute=[7, 8, 9], stages=[[2], [0, 1]], overhead=0.5)))
    network = read_network(file, [[0], [1, 2]])         # rank 0 is the file's node 2
    assert network.delay == [[0, 5, 6], [2, 0, 1], [4, 3, 0]] and network.compute == [9, 7, 8]
    assert network.stages == [[0], [1, 2]] and network.memory == [3] * 3 and network.origin_overhead == 0.5


def test_the_living_get_shorter_paths_where_they_must():
    network = Network([[0.1] * 4] * 4, 0.1, [[0], [1], [2, 3]])
    whole = plan_paths(network, "skippipe", 0.0, 4, 0)
    assert len(whole["paths"]) == 4 and {len(path) for path in whole["paths"]} == {3}
    assert Network(**whole["network"]) == network
    result = simulate(network, whole["paths"], order=json.loads(json.dumps(whole["order"])))
    assert result.makespan <= whole["makespan"]         # here all at once, there in two rounds
    for routing in PLANNERS:
        assert {len(path) for path in plan_paths(network, routing, 0.0, 2, 0, dead=[1])["paths"]} == {2}
    with pytest.raises(skippipe.Infeasible, match="CC1 cannot be met"):
        plan_paths(network, "skippipe", 0.34, 2, 0, dead=[0])
