"""Planned paths for training: what links and ranks take, measured or read from a file, and the
plan."""
import time
from dataclasses import asdict, replace
from functools import partial

import torch

from planning.instance import read_instance
from planning.methods import random_valid_paths
from planning.regions import WHOLE, around
from planning.search import plan_without_tc2, shorter_plan
from plumbing.processes import BadInput
from skippipe import Deadlock, Infeasible, Progress, full_paths, simulate, stages_to_keep, without

# A budget of work, not of time, so that a plan depends on the network and the seed alone.
BUDGET = dict(seconds=None, iterations=3000)


def planned(network, kept, each, rounds, seed, dead, **options):
    return shorter_plan(network, kept, each, rounds, seed=seed, dead=dead, **BUDGET, **options)


def first_valid(network, kept, each, rounds, seed, dead):
    return plan_without_tc2(network, kept, each, rounds, seed=seed, dead=dead, **BUDGET)


def drawn(network, kept, each, rounds, seed, dead):
    """Random valid paths, first come, first served."""
    return random_valid_paths(network, kept, each, seed=seed, dead=dead), None


def every_stage(network, kept, each, rounds, seed, dead):
    """The full pipeline of the living, first come, first served."""
    return full_paths(living(network.stages, dead), each), None


# --routing: (network, kept, each, rounds, seed, dead) -> paths, order (None: first come, first
# served)
PLANNERS = {
    "skippipe": planned,
    "no-swaps": partial(planned, swaps=0),              # ours: every path in order
    "no-tc2": first_valid,
    "dtfm-skip": drawn,
    "dtfm": every_stage,
}


def living(stages, dead):
    """The ranks of each stage that are not dead, without the stages of which none is left."""
    return [stage for stage in without(dead, stages) if stage]


def plan_paths(network, routing, skip, microbatches, seed, dead=(), before=None):
    """An iteration's plan: dict(paths (of all rounds), order (every rank's tasks), makespan
    (simulated seconds), network (the fields of the Network it is for), planned (anew, or in
    regions: only around nodes that have died since `before`)), which JSON can hold.

    routing: a key of PLANNERS. skip: the share of the stages that a path leaves out. microbatches:
    per origin; it sends as many at once as nodes hold, the rest in further rounds where that
    divides. dead: ranks that are not there; the living may have less room, so then paths become
    shorter where they must. before: a plan from before they died. With more than `regions.WHOLE`
    ranks only their regions are planned anew (`regions.around`). Raises BadInput where there is no
    plan."""
    rounds = rounds_of(microbatches, min(network.memory))
    kept = min(stages_to_keep(skip, network.stages), len(living(network.stages, dead)))
    while True:
        try:
            work = (kept, microbatches // rounds, rounds)
            return plan_of_work(network, routing, work, seed, dead, before)
        except (Infeasible, Deadlock) as error:
            if not dead or kept == 1:
                raise BadInput(f"--routing {routing}: {error}")
            kept -= 1


def rounds_of(microbatches, memory):
    """The fewest rounds of equally many microbatches that fit into a node's memory; else 1."""
    for rounds in range(1, microbatches):
        if microbatches % rounds == 0 and microbatches // rounds <= memory:
            return rounds
    return 1


def plan_of_work(network, routing, work, seed, dead, before):
    """As `plan_paths`. work: (stages kept, microbatches of an origin in a round, rounds). Raises
    Infeasible or Deadlock where there is no plan."""
    kept, _, rounds = work
    found = None
    if before and routing == "skippipe" and len(network.delay) > WHOLE:
        if len(before["paths"][0]) == kept:
            found = around(before, network, *work, seed, dead)
    paths, order = found or PLANNERS[routing](network, *work, seed, tuple(dead))
    if order:
        result = simulate(network, paths, rounds, order)
    else:
        result = Progress(network, rounds).dispatch(paths)
    return dict(paths=paths * rounds, order=result.order, makespan=result.makespan,
                network=asdict(network), planned="in regions" if found else "anew")


def idle(plan, world):
    """The warning that a plan leaves ranks out."""
    ranks = set(range(world))
    for path in plan["paths"]:
        ranks -= set(path)
    if ranks:
        yield (f"warning: ranks {sorted(ranks)} get no work in this plan: more --microbatches, or "
               "fewer replicas")


def read_links(file, stages):
    """The Network in a JSON file (`planning.instance.read_instance`; stages default to this run's),
    its nodes in the order of this run's ranks. Raises BadInput."""
    try:
        network, _ = read_instance(file, stages)
    except (OSError, ValueError) as error:
        raise BadInput(f"--links {error}")
    sizes = [len(stage) for stage in network.stages]
    own = [len(stage) for stage in stages]
    if sizes != own:
        raise BadInput(f"{file} has stages of {sizes} nodes, this run of {own}: give --stages as "
                       "there")
    nodes = [node for stage in network.stages for node in stage]    # rank r is nodes[r] of the file
    delay = []
    for a in nodes:
        delay.append([network.delay[a][b] for b in nodes])
    compute = [network.compute[node] for node in nodes]
    memory = [network.memory[node] for node in nodes]
    return replace(network, delay=delay, compute=compute, memory=memory, stages=stages)


def measure(pipeline, stages, job):
    """On rank 0: delay[i][j], seconds of one message between every two ranks of different stages
    (no path joins others), and compute[i], seconds of one microbatch's forward on each rank while
    all compute; medians of 5. None, None on the other ranks.

    N ranks take N turns. In turn t ranks i and j meet if i + j = t modulo N, up to N / 2 pairs at
    once. Each rank sends 6 messages in a turn. So the time grows as N and all messages together as
    N^2, 6 N (N - 1)."""
    message = torch.zeros(pipeline.message_shape, dtype=pipeline.dtype, device=pipeline.device)
    sent = pipeline.bytes_sent
    own = next(stage for stage in stages if job.rank in stage)

    def there_and_back(peer):
        """The lower rank sends first, then the other one."""
        for sends in (job.rank < peer, job.rank > peer):
            if sends:
                work, _, _ = pipeline.send(message, peer, 0, 0)
            else:
                work, _, _ = pipeline.receive(peer, 0, 0)
            pipeline.wait(work, peer)

    def forward():
        with pipeline.cast:
            pipeline.model.blocks(message.float().requires_grad_())

    delays = [0.0] * job.world
    for turn in range(job.world):
        peer = (turn - job.rank) % job.world
        if peer not in own:
            delays[peer] = median_seconds(partial(there_and_back, peer), pipeline.device) / 2
    compute = median_seconds(forward, pipeline.device)
    pipeline.bytes_sent = sent                          # training's bytes are counted, not these
    rows = job.share("measured", [*delays, compute])
    if job.rank:
        return None, None
    return [row[:-1] for row in rows], [row[-1] for row in rows]


def median_seconds(work, device):
    times = []
    for _ in range(6):                  # the first one connects or compiles, and does not count
        start = clock(device)
        work()
        times.append(clock(device) - start)
    return sorted(times[1:])[2]


def clock(device):
    """Seconds, once a GPU has done this stream's work: the host runs ahead of it.

    The other streams may hold receives that NCCL has posted ahead, which end later."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return time.perf_counter()
