"""How fast the parts of this repository are, compared with other projects that do the same.

    python -m experiments.peers [--scale try|plot|full] [--plot]

Each number is a ratio, this repository's time / the peer's time: below 1 this repository is faster.
The two run by turns, so that other work on the machine slows both. Every turn gives a ratio; the
table has the median and the range. Synchronisation and pipelines are timed by the clock of the
slowest rank, the model by its processor time. The peers in torch are always there. The others are
measured if they are installed, and named if they are not:

    pip install torchft==0.2.0 hivemind==1.1.12 transformers

torchft has its lighthouse and managers, on this machine, and finds a quorum per outer step.
hivemind averages in a group that is given, without its search for one. The interleaved schedule
gives each rank two shorter stages.
"""
import asyncio
import json
import logging
import os
import statistics
import sys
import tempfile
import threading
import time
import warnings
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from datetime import timedelta
from importlib.metadata import version
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Callable, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

from experiments.harness import Row, command, results_file, run_ranks
from experiments.stats import Table
from model import Config, Llama
from noloco import DiLoCo, NoLoCo
from train import Job, Pipeline

# 55M weights, a message of 218 MB; and a model that is computed in a second or two.
LARGE = Config(hidden_size=512, intermediate_size=2048, num_hidden_layers=13,
               num_attention_heads=8, num_key_value_heads=8)
MIDDLE = Config(hidden_size=256, intermediate_size=1024, num_hidden_layers=8)
MICROBATCHES, BATCH = 8, 2
SYNC, PIPELINE, MODEL = "synchronisation", "pipeline", "model"


class Scale(NamedTuple):
    """replica: what is synchronised, between so many processes. model: of the other parts."""
    turns: int
    processes: tuple
    replica: Config
    model: Config
    tokens: int         # per sequence


SCALES = {"try": Scale(1, (2, 1), Config(), Config(), 16),
          "plot": Scale(3, (2, 1), MIDDLE, MIDDLE, 64),
          "full": Scale(9, (2, 4, 1), LARGE, MIDDLE, 128)}
# {ranks: the parts that so many measure, and by which clock}
PARTS = {1: ((MODEL,), time.process_time), 2: ((SYNC, PIPELINE), time.perf_counter),
         4: ((SYNC,), time.perf_counter)}


class Peer(NamedTuple):
    """A program of this repository and another project's that does the same. ours, theirs: Scale
    -> a context with the function that is timed."""
    part: str           # SYNC, PIPELINE or MODEL
    here: str
    ours: Callable
    package: str        # that must be installed
    name: str
    theirs: Callable


# ---------------------------------------------------------------- by turns


def by_turns(peer, scale, clock, wait):
    """[seconds of ours, seconds of theirs], each a list with a number per turn.

    wait: called before each, so that all ranks begin together. The first turn is not counted: it
    connects, and makes what is used again. Which of the two is first changes with the turn.
    """
    seconds = [], []
    with peer.ours(scale) as ours, peer.theirs(scale) as theirs:
        sides = [(ours, seconds[0]), (theirs, seconds[1])]
        for _ in range(scale.turns + 1):
            sides.reverse()
            for run, its in sides:
                wait()
                began = clock()
                run()
                its.append(clock() - began)
    return [its[1:] for its in seconds]


def record(peer, processes, seconds):
    """What is kept of one comparison."""
    ours, theirs = seconds
    ratios = [round(one / other, 4) for one, other in zip(ours, theirs)]
    return dict(part=peer.part, here=peer.here, peer=peer.name, package=peer.package,
                version=version(peer.package), processes=processes, ratios=ratios,
                seconds_here=round(statistics.median(ours), 4),
                seconds_peer=round(statistics.median(theirs), 4))


# ---------------------------------------------------------------- synchronisation


def replica(scale):
    """The model, which is another one on each rank, as after inner steps."""
    return Llama(scale.replica, seed=dist.get_rank())


@contextmanager
def noloco(scale):
    yield NoLoCo(replica(scale).parameters(), inner_steps=1).step


@contextmanager
def diloco(scale):
    yield DiLoCo(replica(scale).parameters(), inner_steps=1).step


@contextmanager
def all_reduce(scale):
    size = sum(p.numel() for p in replica(scale).parameters())
    vector = torch.zeros(size)
    yield lambda: dist.all_reduce(vector)


@contextmanager
def averager(scale):
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    model = replica(scale)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)                    # it averages only what has one
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")                 # that period 1 is DDP's
        its = PeriodicModelAverager(period=1)
    yield lambda: its.average_parameters(model.parameters())


@contextmanager
def manager():
    """torchft's, each rank a replica group of its own, with one lighthouse."""
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer
    rank, addresses = dist.get_rank(), [None]
    with ExitStack() as stack:
        if rank == 0:
            lighthouse = LighthouseServer(bind="0.0.0.0:0", min_replicas=dist.get_world_size())
            stack.callback(lighthouse.shutdown)
            addresses = [f"http://127.0.0.1:{lighthouse.address().rsplit(':', 1)[1]}"]
        dist.broadcast_object_list(addresses)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        its = Manager(
            pg=ProcessGroupGloo(), load_state_dict=lambda state: None, state_dict=dict,
            min_replica_size=dist.get_world_size(), use_async_quorum=False, init_sync=False,
            replica_id=f"replica{rank}", rank=0, world_size=1, hostname="127.0.0.1",
            store_addr="127.0.0.1", store_port=store.port, lighthouse_addr=addresses[0],
            timeout=timedelta(minutes=5), quorum_timeout=timedelta(minutes=5))
        stack.callback(its.shutdown)
        yield its
        dist.barrier()          # the lighthouse outlives the others' last quorum


@contextmanager
def torchft_local_sgd(scale):
    from torchft.local_sgd import LocalSGD
    model = replica(scale)
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    with manager() as its, LocalSGD(its, model, inner, sync_every=1) as local:
        yield local.sync


@contextmanager
def torchft_diloco(scale):
    """Its inner step finds no gradient, and so is nothing but its outer step."""
    from torchft.local_sgd import DiLoCo as Theirs
    model = replica(scale)
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.3, nesterov=True)
    with manager() as its, Theirs(its, [model], inner, outer, sync_every=1):
        yield inner.step


@contextmanager
def hivemind_averaging(scale):
    """Its all-reduce, of which each peer averages a part, in a group that is known."""
    from hivemind.averaging.allreduce import AllReduceRunner
    from hivemind.p2p import P2P, PeerID
    from hivemind.utils.asyncio import switch_to_uvloop
    loop = switch_to_uvloop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    rank, world = dist.get_rank(), dist.get_world_size()
    tensors = [p.detach() for p in replica(scale).parameters()]
    turn = count()

    def wait_for(coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result()

    async def prepare(prefix):
        """This turn's runner, which others may call from now on."""
        runner = AllReduceRunner(
            p2p=p2p, servicer_type=AllReduceRunner, prefix=prefix, group_id=b"all",
            tensors=tensors, ordered_peer_ids=ids, peer_fractions=(1 / world,) * world)
        await runner.add_p2p_handlers(p2p, namespace=prefix)
        return runner

    async def average(runner):
        tensor = iter(tensors)
        async for delta in runner:
            next(tensor).add_(delta)

    def run():
        runner = wait_for(prepare(f"turn{next(turn)}"))
        dist.barrier()
        wait_for(average(runner))

    first = [None]
    if rank == 0:
        p2p = wait_for(P2P.create())
        first = wait_for(p2p.get_visible_maddrs())
        first = [[str(address) for address in first]]
    dist.broadcast_object_list(first)
    if rank > 0:
        p2p = wait_for(P2P.create(initial_peers=first[0]))
    ids = [None] * world
    dist.all_gather_object(ids, p2p.peer_id.to_base58())
    ids = [PeerID.from_base58(text) for text in ids]
    yield run
    dist.barrier()
    wait_for(p2p.shutdown())


# ---------------------------------------------------------------- pipelines


def some_tokens(scale, sequences):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (sequences, scale.tokens + 1), generator=generator)


def halves(config):
    """The layers of each of two stages."""
    layers = range(config.num_hidden_layers)
    return layers[:len(layers) // 2], layers[len(layers) // 2:]


@contextmanager
def pipeline(scale):
    config, rank = scale.model, dist.get_rank()
    model = Llama(config, halves(config)[rank], ends=rank == 0)
    its = Pipeline(model, Job(), [[0], [1]], (BATCH, scale.tokens, config.hidden_size))
    batches = some_tokens(scale, MICROBATCHES * BATCH).split(BATCH)
    yield lambda: its.run([(0, 1)] * MICROBATCHES, dict(enumerate(batches)))[0]


class Stage(nn.Module):
    """Consecutive layers of a model, as torch's pipelines take them: the first with the embedding,
    the last with the norm and the head."""

    def __init__(self, model, layers, config):
        super().__init__()
        self.first, self.last = 0 in layers, config.num_hidden_layers - 1 in layers
        self.model = model

    def forward(self, x):
        if self.first:
            x = self.model.embed(x)
        x = self.model.blocks(x)
        return self.model.logits(x) if self.last else x


def summed_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def torch_pipeline(name, per_rank=1):
    """theirs, with this schedule of torch.distributed.pipelining and so many stages per rank."""

    @contextmanager
    def theirs(scale):
        from torch.distributed import pipelining
        config, rank = scale.model, dist.get_rank()
        count = 2 * per_rank
        size = config.num_hidden_layers // count
        stages = []
        for i in range(rank, count, 2):
            layers = range(i * size, (i + 1) * size)
            model = Llama(config, layers, ends=i in (0, count - 1))
            stage = Stage(model, layers, config)
            stages.append(pipelining.PipelineStage(stage, i, count, torch.device("cpu")))
        make = getattr(pipelining, name)
        schedule = make(stages if per_rank > 1 else stages[0], MICROBATCHES, loss_fn=summed_loss)
        tokens = some_tokens(scale, MICROBATCHES * BATCH)
        losses = []

        def run():
            losses.clear()
            if rank == 0:
                schedule.step(tokens[:, :-1])
            else:
                schedule.step(target=tokens[:, 1:], losses=losses)
            return sum(losses)

        yield run

    return theirs


# ---------------------------------------------------------------- the model


def with_backward(logits, tokens):
    loss = summed_loss(logits, tokens[:, 1:])
    loss.backward()
    return loss.detach()


@contextmanager
def llama(scale):
    model, tokens = Llama(scale.model), some_tokens(scale, BATCH)
    yield lambda: with_backward(model(tokens[:, :-1]), tokens)


@contextmanager
def transformers_llama(scale):
    from transformers import LlamaConfig, LlamaForCausalLM
    config = LlamaConfig(**asdict(scale.model), use_cache=False)
    model, tokens = LlamaForCausalLM(config), some_tokens(scale, BATCH)
    model.load_state_dict(Llama(scale.model).state_dict())
    yield lambda: with_backward(model(tokens[:, :-1]).logits, tokens)


# ---------------------------------------------------------------- all of them


PEERS = (
    Peer(SYNC, "NoLoCo's outer step", noloco, "torch", "all_reduce of the same vector", all_reduce),
    Peer(SYNC, "NoLoCo's outer step", noloco, "torch", "PeriodicModelAverager", averager),
    Peer(SYNC, "NoLoCo's outer step", noloco, "torchft", "LocalSGD", torchft_local_sgd),
    Peer(SYNC, "NoLoCo's outer step", noloco, "hivemind", "averaging", hivemind_averaging),
    Peer(SYNC, "DiLoCo's outer step", diloco, "torch", "all_reduce of the same vector", all_reduce),
    Peer(SYNC, "DiLoCo's outer step", diloco, "torchft", "DiLoCo", torchft_diloco),
    Peer(PIPELINE, "train.Pipeline", pipeline, "torch", "GPipe", torch_pipeline("ScheduleGPipe")),
    Peer(PIPELINE, "train.Pipeline", pipeline, "torch", "1F1B", torch_pipeline("Schedule1F1B")),
    Peer(PIPELINE, "train.Pipeline", pipeline, "torch", "interleaved 1F1B",
         torch_pipeline("ScheduleInterleaved1F1B", per_rank=2)),
    Peer(MODEL, "model.Llama", llama, "transformers", "LlamaForCausalLM", transformers_llama),
)


def installed(*parts):
    """The peers of these parts that can be measured."""
    return [peer for peer in PEERS if peer.part in parts and find_spec(peer.package)]


def measure(o):
    """All records, and the names of the peers that are not installed. At the full scale nothing if
    OUT/results has them: a machine without these peers would replace them by fewer."""
    if o.scale == "full" and results_file(o.out, "peers").exists():
        return None
    records = []
    for processes in SCALES[o.scale].processes:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "records.json")
            run_ranks(processes, "-m", "experiments.peers", o.scale, str(file))
            records += json.loads(file.read_text())
    missing = [f"{peer.package}'s {peer.name}" for peer in PEERS if not find_spec(peer.package)]
    return dict(records=records, missing=missing)


def measure_in_ranks(scale, file):
    """The parts that so many ranks have. Rank 0 writes the records."""
    os.environ.setdefault("RUST_LOG", "error")          # else torchft tells of every quorum,
    logging.disable(logging.WARNING)                    # and that there is no NCCL
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    parts, clock = PARTS[world]
    records = []
    for peer in tqdm(installed(*parts), "peers", disable=dist.get_rank() > 0):
        seconds = torch.tensor(by_turns(peer, SCALES[scale], clock, dist.barrier))
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        records.append(record(peer, world, seconds.tolist()))
    if dist.get_rank() == 0:
        Path(file).write_text(json.dumps(records))
    dist.destroy_process_group()


def show(found):
    table = Table("here", "compared with", "processes", "here / peer: median [range]")
    for one in found["records"]:
        ratios = one["ratios"]
        table.add(one["here"], "{package} {version}: {peer}".format(**one), str(one["processes"]),
                  f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]")
    table.end()
    for name in found["missing"]:
        print(f"not measured, since it is not installed: {name}")


ROW = Row("peers", measure, show, {}, lambda found: [])

if __name__ == "__main__":
    if "RANK" in os.environ:
        measure_in_ranks(*sys.argv[1:])
    else:
        command(__doc__, ROW)
