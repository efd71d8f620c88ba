import csv
import itertools
import json
import random

import pytest

import skippipe

# The published routes and times (released code of arXiv 2502.19913): method -> (rounds, seconds, a path per microbatch of a round).
PUBLISHED_ROUTES = {
    "SkipPipe": (2, 33.3138, 3 * [(0, 14, 6, 12), (3, 15, 17, 5), (4, 7, 13, 19), (10, 1, 18, 2), (11, 8, 16, 9)]),
    "no TC2": (2, 35.4348, [(0, 12, 5, 19), (0, 1, 19, 18), (0, 6, 18, 17), (3, 12, 6, 2), (3, 14, 12, 2), (3, 6, 14, 13), (4, 15, 13, 7),
                            (4, 15, 5, 17), (4, 15, 13, 7), (10, 1, 17, 5), (10, 1, 7, 2), (10, 14, 18, 19), *[(11, 8, 16, 9)] * 3]),
    "random": (2, 48.9157, [(0, 12, 7, 17), (0, 14, 16, 9), (0, 1, 8, 19), (3, 12, 7, 17), (3, 15, 6, 5), (3, 1, 8, 19), (4, 13, 18, 2),
                            (4, 15, 6, 5), (4, 1, 8, 19), (10, 13, 18, 2), (10, 15, 6, 5), (10, 14, 16, 9), (11, 13, 18, 2), (11, 12, 7, 17),
                            (11, 14, 16, 9)]),
    "full": (3, 79.9397, [p for p in [(0, 15, 1, 16, 5, 17), (3, 8, 9, 12, 18, 2), (4, 14, 6, 13, 7, 19)] for _ in range(3)]),
}


def random_network(draw, shape, speeds=(1.0,), memory=(1, 2, 3)):
    """Nodes numbered stage by stage, delays with and without ties."""
    nodes, first = sum(shape), [sum(shape[:s]) for s in range(len(shape))]
    delay = [[0.0 if i == j else draw.choice([0.1, 0.5, 1.0, 2.0, 3 * draw.random()]) for j in range(nodes)] for i in range(nodes)]
    return skippipe.Network(delay, [draw.choice(speeds) for _ in range(nodes)], [list(range(a, a + n)) for a, n in zip(first, shape)],
                            draw.choice(memory), draw.choice([0.0, 0.13]), 0.09)


def assert_possible(network, paths, rounds, result):
    """The invariants of the time model, checked on a timeline."""
    end, tasks, hops = {}, [[] for _ in network.compute], {}
    for rank, u, kind, start, stop in result.timeline:
        path, hop = paths[u % len(paths)], hops.setdefault(u, 0)
        way = skippipe.chain(path)
        assert rank == way[hop] and kind == skippipe.kind(path, hop)
        if hop:
            assert start >= end[u, hop - 1] + (network.delay[way[hop - 1]][rank] if way[hop - 1] != rank else 0) - 1e-6
        elif u >= len(paths):
            assert start >= end[u - len(paths), len(way) - 1] - 1e-6
        assert stop - start == pytest.approx(network.compute[rank] * {"forward": 1, "loss": 0.25, "backward": 1.5}[kind])
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


def every_path(network, kept, origin):
    """All paths under CC1 and CC2, by trying every order of the stages."""
    for stages in itertools.permutations(range(1, len(network.stages)), kept - 1):
        swapped = [i for i in range(kept - 2) if stages[i] > stages[i + 1]]
        if all(stages[i] == stages[i + 1] + 1 for i in swapped) and len(swapped) <= 2 and not any(i + 1 in swapped for i in swapped):
            plain = list(stages)
            for i in swapped:
                plain[i:i + 2] = plain[i + 1], plain[i]
            if plain == sorted(plain):
                yield from ((origin, *nodes) for nodes in itertools.product(*(network.stages[s] for s in stages)))


def every_order(paths, nodes):
    """All orders in which the nodes can run one microbatch on each of these paths."""
    found, chains = set(), [skippipe.chain(p) for p in paths]

    def extend(done, order):
        open_ = [u for u, c in enumerate(chains) if done[u] < len(c)]
        for u in open_:
            rank = chains[u][done[u]]
            extend(done[:u] + (done[u] + 1,) + done[u + 1:], order[:rank] + (order[rank] + ((u, done[u]),),) + order[rank + 1:])
        if not open_:
            found.add(order)
    extend((0,) * len(paths), ((),) * nodes)
    return found


def valid_combinations(network, kept, origins, caps):
    """All choices of paths that keep to CC1, CC2, CC3 and TC1."""
    for paths in itertools.product(*(list(every_path(network, kept, o)) for o in origins)):
        used = [r for p in paths for r in p[1:]]
        visits = [sum(r in stage for r in used) for stage in network.stages[1:]]
        if max(visits) - min(visits) <= 1 and all(used.count(r) <= caps[r] for r in used):
            yield paths


@pytest.mark.parametrize("method", PUBLISHED_ROUTES)
def test_published_times(method):
    rounds, seconds, paths = PUBLISHED_ROUTES[method]
    network, names = skippipe.published_network()
    result = skippipe.simulate(network, paths, rounds=rounds)
    assert result.makespan == pytest.approx(seconds, abs=1e-3)
    assert_possible(network, paths, rounds, result)
    again = skippipe.simulate(network, paths, rounds=rounds, order=result.order())
    assert again.timeline == result.timeline
    assert names[10] == "London" and 132 < network.delay[6][10] < 133 and skippipe.published_network(corrected=True)[0].delay[6][10] < 1


def test_published_plan_is_proven_optimal():
    network, _ = skippipe.published_network()
    found = skippipe.plan(network, 4, 3, rounds=2, seconds=None, iterations=20000)
    assert found.makespan == pytest.approx(33.0538, abs=1e-3) and found.bound == pytest.approx(found.makespan, abs=1e-5)
    assert skippipe.check(network, found.paths, 4) == []
    paths, order = found
    result = skippipe.simulate(network, paths, rounds=2, order=order)
    assert result.makespan == found.makespan
    assert_possible(network, paths, 2, result)
    # Six paths of its own per origin, so that the second round may differ from the first, are bounded by the same time.
    assert skippipe.lower_bound(network, 4, 6, rounds=1) == pytest.approx(33.0538, abs=1e-3)


def test_conflict_based_search_alone_finds_valid_paths():
    network, _ = skippipe.published_network()
    found = skippipe.plan(network, 4, 3, rounds=2, seconds=None, collisions=False)
    assert skippipe.check(network, found.paths, 4) == [] and found.work < 1000 and found.makespan < 40


def test_plan_against_brute_force():
    draw, missed = random.Random("brute force"), 0
    for case in range(40):
        shape, kept, each = draw.choice([([1, 2, 1], 2, 2), ([2, 1, 2], 2, 1), ([2, 1, 1], 3, 1), ([1, 2, 2], 2, 2), ([1, 1, 1], 2, 2)])
        network = random_network(draw, shape, (0.5, 1.0, 2.0))
        origins, best = network.stages[0] * each, float("inf")
        caps = skippipe.node_caps(network, -(-len(origins) * (kept - 1) // (len(shape) - 1)))
        for paths in valid_combinations(network, kept, origins, caps):
            for order in every_order(paths, len(network.compute)):
                try:
                    best = min(best, skippipe.simulate(network, paths, order=order).makespan)
                except skippipe.Deadlock:
                    pass
        found = skippipe.plan(network, kept, each, seconds=None, iterations=3000)
        assert skippipe.lower_bound(network, kept, each) <= best + 1e-6
        assert skippipe.check(network, found.paths, kept) == [] and found.makespan >= best - 1e-6
        missed += found.makespan > best + 1e-6
        assert found.makespan <= 1.1 * best, case
    assert missed <= 1      # found on all but at most one: the search is complete for validity, not for optimality


def test_a_valid_plan_is_found_exactly_where_there_is_one():
    draw, none = random.Random("feasible"), 0
    for _ in range(150):
        shape, kept = draw.choice([([1, 2, 1, 1], 3), ([2, 1, 1, 2], 2), ([1, 1, 2], 2), ([2, 2, 1], 3), ([1, 1, 1, 1], 4)])
        network = random_network(draw, shape)
        quota = [draw.choice([0, 1, 1, 2, 3]) for _ in network.compute]
        origins = network.stages[0] * draw.choice([1, 2]) if len(network.stages[0]) == 1 else network.stages[0]
        possible = next(valid_combinations(network, kept, origins, quota), None)
        try:
            found = skippipe.plan(network, kept, len(origins) // len(network.stages[0]), seconds=None, iterations=30, quota=quota)
            assert possible and skippipe.check(network, found.paths, kept, quota=quota) == []
        except skippipe.Infeasible as error:
            assert possible is None and "cannot be met" in str(error)
            none += 1
    assert 10 < none < 140


def test_random_instances_keep_the_invariants():
    draw = random.Random("invariants")
    for case in range(200):
        shape = [draw.randint(1, 3) for _ in range(draw.randint(1, 5))]
        network = random_network(draw, shape, (1.0,) if case % 2 else (0.3, 1.0, 3.0))
        kept, each, rounds, swaps = draw.randint(1, len(shape)), draw.randint(1, 4), draw.randint(1, 2), draw.randint(0, 2)
        dead = {draw.randrange(sum(shape))} if case % 3 == 0 else set()
        quota = 100 if case % 5 == 0 else None      # so much that memory, not the caps, decides: first come, first served may deadlock
        try:
            found = skippipe.plan(network, kept, each, rounds, swaps, None, case, iterations=60, dead=dead, quota=quota)
        except skippipe.Infeasible:
            assert dead
            continue
        assert skippipe.check(network, found.paths, kept, swaps, dead, quota) == []
        assert not dead & {r for p in found.paths for r in p}
        result = skippipe.simulate(network, found.paths, rounds=rounds, order=found.order)
        assert result.makespan == found.makespan >= found.bound - 1e-6
        assert_possible(network, found.paths, rounds, result)
        paths = skippipe.random_valid_paths(network, kept, each, swaps, case, dead, quota)
        assert skippipe.check(network, paths, kept, swaps, dead, quota) == []


def test_a_plan_depends_on_seed_and_work_alone():
    network = random_network(random.Random(3), [3, 2, 2, 2], memory=(3,))
    first, again, other = (skippipe.plan(network, 3, 3, seconds=None, iterations=900, seed=seed) for seed in (1, 1, 2))
    assert (first.paths, first.order, first.makespan, first.work) == (again.paths, again.order, again.makespan, again.work)
    assert (first.paths, first.order) != (other.paths, other.order)
    longer = skippipe.plan(network, 3, 3, seconds=None, iterations=3000, seed=1)
    assert longer.makespan <= first.makespan


def test_check_names_microbatch_stage_and_node():
    network, _ = skippipe.published_network()
    paths = sorted(PUBLISHED_ROUTES["SkipPipe"][2])
    for path, words in [((15, 14, 6, 12), "CC1: microbatch 2 has node 15 of stage 1"),
                        ((0, 14, 3, 12), "CC1: microbatch 2 has node 3 of stage 0"),
                        ((0, 6, 18, 14), "CC2: microbatch 2 goes from stage 4 (node 18) to stage 1 (node 14)"),
                        ((0, 12, 6, 14), "CC2: microbatch 2 goes from stage 2 (node 6) to stage 1 (node 14)"),
                        ((0, 14, 6, 16), "TC1: node 16 (stage 3) carries 4 microbatches, [2, 12, 13, 14], of at most 3"), ((0, 14, 6, 2), "CC3: stage 5"),
                        ((0, 14, 6), "microbatch 2 visits 3 stages, not 4"), ((0, 14, 6, 77), "microbatch 2 visits node 77")]:
        assert any(words in line for line in skippipe.check(network, [*paths[:2], path, *paths[3:]], 4)), words
    assert skippipe.check(network, paths, 4) == []
    assert any("node 5 of stage 4, which is not there" in line for line in skippipe.check(network, paths, 4, dead={5}))
    result = skippipe.simulate(network, paths, rounds=2)
    waits = list(skippipe.tc2(network, paths, result))
    assert "s at node" in waits[0].text and sum(v.excess for v in waits) == pytest.approx(sum(result.waiting), abs=1e-6)


def test_dead_nodes_and_what_cannot_be_met():
    network, _ = skippipe.published_network()
    found = skippipe.plan(network, 4, 3, 2, seconds=None, iterations=50, dead={5, 8, 11})
    assert len(found.paths) == 12 and skippipe.check(network, found.paths, 4, dead={5, 8, 11}) == []
    whole_stage = skippipe.plan(network, 4, 3, 2, seconds=None, iterations=50, dead={15, 8, 14})
    assert skippipe.check(network, whole_stage.paths, 4, dead={15, 8, 14}) == []
    three_stages = [r for stage in network.stages[1:4] for r in stage]
    for constraint, options in {"CC1": dict(dead=network.stages[0]), "CC3": dict(dead=three_stages), "TC1": dict(quota=2)}.items():
        with pytest.raises(skippipe.Infeasible, match=constraint):
            skippipe.plan(network, 4, 3, 2, seconds=None, iterations=50, **options)
    for wrong in (dict(stages_kept=7), dict(stages_kept=4, microbatches_per_origin=0), dict(stages_kept=4, quota=[1])):
        with pytest.raises(ValueError):
            skippipe.plan(network, **wrong)


def test_a_slow_node_gets_less_work():
    compute = [1.0] * 8
    compute[3] = 5.0
    network = skippipe.Network([[0.2] * 8] * 8, compute, [[0, 1], [2, 3, 4], [5, 6, 7]], memory=3)
    found = skippipe.plan(network, 3, 3, seconds=None, iterations=3000)
    visits = [sum(r in p for p in found.paths) for r in (2, 3, 4)]
    assert visits[1] < min(visits[0], visits[2]) and sum(visits) == 6
    one_each = [(0, 2, 5), (1, 3, 6), (0, 4, 7), (1, 2, 5), (0, 3, 6), (1, 4, 7)]
    assert found.makespan < skippipe.simulate(network, one_each).makespan


def test_planned_order_beats_waiting_in_line_and_deadlocks_are_refused():
    network, _ = skippipe.published_network()
    paths = PUBLISHED_ROUTES["SkipPipe"][2]
    order = skippipe.simulate(network, paths, rounds=2).order()
    order[8].reverse()
    with pytest.raises(skippipe.Deadlock):
        skippipe.simulate(network, paths, rounds=2, order=order)
    assert skippipe.Search(network, 4, 3, 2).simulate(paths, order) is None


def test_assigned_stages_are_at_least_as_good_as_the_published():
    published, names = skippipe.published_network()
    stages = skippipe.assign_stages(published.delay, published.compute, [5, 3, 3, 3, 3, 3], 4, 3, 2, overhead=0.13, origin_overhead=0.09,
                                    seconds=None, iterations=250)
    assert [len(s) for s in stages] == [5, 3, 3, 3, 3, 3] and sorted(r for s in stages for r in s) == list(range(20))
    network = skippipe.Network(published.delay, published.compute, stages, 3, 0.13, 0.09)
    ours, theirs = (skippipe.plan(n, 4, 3, 2, seconds=None, iterations=600).makespan for n in (network, published))
    assert ours <= theirs
    with pytest.raises(ValueError):
        skippipe.assign_stages(published.delay, published.compute, [5, 3], 2)


def test_skippipe_command_line(tmp_path, capsys):
    delay = [[0.0 if i == j else 0.5 for j in range(4)] for i in range(4)]
    (tmp_path / "mine.json").write_text(json.dumps(dict(delay=delay, compute=0.1, stages=[[0, 1], [2], [3]])))
    skippipe.main(["--instance", str(tmp_path / "mine.json"), "--kept", "2", "--figure", "", "--results", str(tmp_path / "r.json"),
                   "--save", str(tmp_path / "again.json"), "--seconds", "0.5"])
    assert "SkipPipe without TC2" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "r.json").read_text())["paths"]) == 6
    assert json.loads((tmp_path / "again.json").read_text())["stages"] == [[0, 1], [2], [3]]
    with open(tmp_path / "links.csv", "w", newline="") as file:
        csv.writer(file).writerows([["a", "b", "latency_ms", "bandwidth_gib_s"], ["X", "Y", 10, 0.1]])
    skippipe.main(["--links", str(tmp_path / "links.csv"), "--sizes", "2,1,1", "--kept", "2", "--figure", "", "--results", "", "--seconds",
                   "0.2"])
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "odd.json").write_text(json.dumps(dict(delay=[[0, "x"], [1, 0]], compute=1, stages=[[0], [1]])))
    capsys.readouterr()
    for wrong in (["--kept", "9"], ["--kept", "x"], ["--dead", "99"], ["--nodes", "7"], ["--sizes", "3,x"], ["--instance", "nowhere.json"],
                  ["--instance", str(tmp_path / "broken.json")], ["--instance", str(tmp_path / "odd.json")], ["--nonsense"],
                  ["--links", str(tmp_path / "broken.json")], ["--compute", "-1"], ["--memory", "0"], ["--dead", "0,3,4,10,11"],
                  ["--seconds", "-1"], ["--rounds", "0"], ["--nodes", "-3"]):
        with pytest.raises(SystemExit) as stop:
            skippipe.main([*wrong, "--figure", "", "--results", ""])
        error = capsys.readouterr().err
        assert stop.value.code == 2 and error.startswith("skippipe.py: error: ") and error.count("\n") == 1, (wrong, error)
