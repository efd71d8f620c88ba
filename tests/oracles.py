"""Oracles of several test files: a Llama in float64, blocking channels, all plans by trying everything."""

import itertools
from collections import Counter, deque
from itertools import accumulate, pairwise

import pytest
import torch

import skippipe
import train
from model import Config, Llama, rotary
from noloco import flatten
from skippipe import chain
from tests.harness import SMALL_CONFIG, connected_job, processes
from train import load_corpus


def reference_logits(tokens, w, config, rho=1.0):
    """A Llama in float64, position by position, written apart from model.py; its residuals times rho."""
    norm = lambda x, g: x / (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * g
    heads, shared = config.num_attention_heads, config.num_attention_heads // config.num_key_value_heads
    d = config.hidden_size // heads
    x = w["model.embed_tokens.weight"][tokens]

    def turn(vector, position):  # pairs (i, i + d/2) as complex numbers
        rate = config.rope_theta ** (-2 * torch.arange(d // 2, dtype=torch.float64) / d)
        z = torch.complex(vector[: d // 2], vector[d // 2 :]) * torch.exp(1j * position * rate)
        return torch.cat((z.real, z.imag))

    for i in range(config.num_hidden_layers):
        part = lambda name: w[f"model.layers.{i}.{name}.weight"]
        h, rows = norm(x, part("input_layernorm")), []
        q, k, v = (h @ part(f"self_attn.{s}_proj").T for s in "qkv")
        for t in range(len(tokens)):
            row = []
            for j in range(heads):
                kv = slice(j // shared * d, j // shared * d + d)
                scores = [turn(q[t, j * d : j * d + d], t) @ turn(k[s, kv], s) for s in range(t + 1)]
                row.append((torch.stack(scores) / d**0.5).softmax(0) @ v[: t + 1, kv])
            rows.append(torch.cat(row))
        x = x + rho * torch.stack(rows) @ part("self_attn.o_proj").T
        h = norm(x, part("post_attention_layernorm"))
        gate = h @ part("mlp.gate_proj").T
        x = x + rho * (gate / (1 + (-gate).exp()) * (h @ part("mlp.up_proj").T)) @ part("mlp.down_proj").T
    return norm(x, w["model.norm.weight"]) @ w["lm_head.weight"].T


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


def numbered(sizes):
    """Stages of so many ranks each, numbered stage by stage."""
    return [list(range(a, b)) for a, b in pairwise(accumulate(sizes, initial=0))]


def small_llama(stages, shape):
    """(the layers of each stage, the config of a model for messages of this shape): 1, 2, 1, ... layers."""
    layers = numbered([s % 2 + 1 for s in range(len(stages))])
    return layers, Config(hidden_size=shape[2], num_attention_heads=2, num_key_value_heads=1,
                          intermediate_size=48, num_hidden_layers=layers[-1][-1] + 1)


def microbatches(t, paths, shape):
    generator = torch.Generator().manual_seed(t)
    return torch.randint(256, (len(paths), shape[0], shape[1] + 1), generator=generator)


def _gradients(rank, world, stages, sets, shape, dtype):
    """Of each set of paths: (loss, tokens home, tokens through this rank, its gradients by name)."""
    layers, config = small_llama(stages, shape)
    stage = next(s for s, ranks in enumerate(stages) if rank in ranks)
    model, job, found = Llama(config, layers[stage], ends=stage == 0), connected_job(), []
    grad = train.flat_gradient(model, flatten(model.parameters()))
    pipeline = train.Pipeline(model, job, stages, shape, dtype)
    for t, paths in enumerate(sets):
        grad.zero_()
        tokens = microbatches(t, paths, shape)
        loss, *counts = pipeline.run(paths, {u: tokens[u] for u, p in enumerate(paths) if p[0] == rank})
        gradients = {name: p.grad.numpy().copy() for name, p in model.named_parameters()}
        found.append((float(loss), *counts, gradients))
    job.close()
    return found


def worst_gradient(stages, sets, shape, dtype=torch.float32, tolerance=1e-5):
    """The largest relative error of a rank's gradient, against one process in float64."""
    layers, config = small_llama(stages, shape)
    stage_of = {r: s for s, ranks in enumerate(stages) for r in ranks}
    whole, size, worst = Llama(config).double(), shape[0] * shape[1], 0.0
    angles = rotary(shape[1], config.hidden_size // 2, config.rope_theta, torch.device("cpu"))   # of 2 heads
    by_rank = processes(len(stage_of), _gradients, stages, sets, shape, dtype)
    for t, (paths, found) in enumerate(zip(sets, zip(*by_rank), strict=True)):
        losses, wants = Counter(), [Counter() for _ in stage_of]
        for path, tokens in zip(paths, microbatches(t, paths, shape)):
            x = whole.embed(tokens[:, :-1])
            for i in [i for r in path for i in layers[stage_of[r]]]:
                x = whole.model.layers[str(i)](x, *angles)
            whole.zero_grad()
            loss = whole.loss(x, tokens[:, 1:])
            loss.backward()
            losses[path[0]] += loss.item()
            for rank, (name, p) in itertools.product(path, whole.named_parameters()):
                wants[rank][name] += 0 if p.grad is None else p.grad
        for rank, (loss, home, count, gradients) in enumerate(found):
            assert count == size * sum(rank in p for p in paths)
            assert home == size * sum(rank == p[0] for p in paths)
            assert abs(loss - losses[rank]) <= tolerance * max(1, abs(losses[rank]))
            for name, got in gradients.items():
                got, want = torch.from_numpy(got), torch.as_tensor(wants[rank][name])
                assert got.any() == want.any()                  # embedding, gains and head included
                if want.any():
                    worst = max(worst, ((got.double() - want).norm() / want.norm()).item())
    return worst


def any_paths(stages, count, r):
    """Paths that skip and swap: each origin's go through any of the other stages, in any order."""
    others = lambda: r.sample(stages[1:], r.randint(0, len(stages) - 1))
    return [(origin, *(r.choice(s) for s in others())) for _ in range(count) for origin in stages[0]]


def replay(paths, ranks, order=None):
    """Every rank's program over channels that are first in, first out and where a receive blocks.

    True when all come to their end.
    """
    chains, programs, channels, moved = [chain(p) for p in paths], {}, {}, True
    for rank in ranks:
        mine = order[rank] if order else skippipe.tasks(chains, rank)
        posted, program = {}, programs.setdefault(rank, deque())
        for source, *message in skippipe.incoming(chains, rank, mine, order):
            posted.setdefault(source, deque()).append(tuple(message))
        for u, hop in mine:
            way = chains[u]
            if hop and way[hop - 1] != rank:
                while (u, hop) in posted[way[hop - 1]]:  # NCCL: what the pair posted before comes first
                    program.append(("receive", way[hop - 1], posted[way[hop - 1]].popleft()))
            if hop + 1 < len(way) and way[hop + 1] != rank:
                program.append(("send", way[hop + 1], (u, hop + 1)))
    while moved:
        moved = False
        for rank, program in programs.items():
            while program:
                what, peer, message = program[0]
                if what == "send":
                    channels.setdefault((rank, peer), deque()).append(message)
                elif channels.get((peer, rank)):
                    # the pair agrees on the order, without tags
                    assert channels[peer, rank].popleft() == message
                else:
                    break
                program.popleft()
                moved = True
    return not any(programs.values())


def random_network(draw, shape, speeds=(1.0,), memory=(1, 2, 3)):
    """Nodes numbered stage by stage, delays with and without ties."""
    nodes = sum(shape)
    near_or_far = lambda: draw.choice([0.1, 0.5, 1.0, 2.0, 3 * draw.random()])
    delay = [[0.0 if i == j else near_or_far() for j in range(nodes)] for i in range(nodes)]
    compute = [draw.choice(speeds) for _ in range(nodes)]
    return skippipe.Network(delay, compute, numbered(shape), draw.choice(memory),
                            draw.choice([0.0, 0.13]), 0.09)


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


def every_path(network, kept, origin):
    """All paths under CC1 and CC2, by trying every order of the stages."""
    for stages in itertools.permutations(range(1, len(network.stages)), kept - 1):
        swapped, plain = [i for i in range(kept - 2) if stages[i] > stages[i + 1]], list(stages)
        for i in swapped:
            plain[i : i + 2] = stages[i + 1], stages[i]
        neighbours = all(stages[i] == stages[i + 1] + 1 and i + 1 not in swapped for i in swapped)
        if neighbours and len(swapped) <= 2 and plain == sorted(plain):
            for nodes in itertools.product(*(network.stages[s] for s in stages)):
                yield origin, *nodes


def valid_combinations(network, kept, origins, caps):
    """All choices of paths that keep to CC1, CC2, CC3 and TC1."""
    for paths in itertools.product(*(list(every_path(network, kept, o)) for o in origins)):
        used = [r for p in paths for r in p[1:]]
        visits = [sum(r in stage for r in used) for stage in network.stages[1:]]
        if max(visits) - min(visits) <= 1 and all(used.count(r) <= caps[r] for r in used):
            yield paths


def every_order(paths, nodes):
    """All orders in which the nodes can run one microbatch on each of these paths."""
    found, chains = set(), [skippipe.chain(p) for p in paths]

    def extend(done, order):
        open_ = [u for u, c in enumerate(chains) if done[u] < len(c)]
        for u in open_:
            rank = chains[u][done[u]]
            longer = order[rank] + ((u, done[u]),)
            further = done[:u] + (done[u] + 1,) + done[u + 1 :]
            extend(further, order[:rank] + (longer,) + order[rank + 1 :])
        if not open_:
            found.add(order)

    extend((0,) * len(paths), ((),) * nodes)
    return found
