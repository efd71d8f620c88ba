"""Planned paths for training, without dead nodes or by the searches of this folder."""
from dataclasses import asdict
from functools import partial

from planning.instance import network_without
from planning.regions import WHOLE, around
from planning.search import shorter_plan
from skippipe import (Deadlock, Infeasible, dispatch, full_paths, plan, rounds_of, stages_to_keep,
                      without)

# A budget of work, not of time, so that a plan depends on the network and the seed alone.
BUDGET = dict(seconds=None, iterations=3000)


def every_stage(network, kept, each, rounds, seed):
    """The full pipeline, first come, first served."""
    return dispatch(network, full_paths(network.stages, each), rounds)


# --routing: (network, kept, each, rounds, seed) -> a skippipe.Result
PLANNERS = {
    "skippipe": partial(plan, **BUDGET),                        # the paper's, as train.py plans it
    "stronger": partial(shorter_plan, **BUDGET),
    "no-swaps": partial(shorter_plan, swaps=0, **BUDGET),       # every path in order
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
    per origin; it sends as many at once as nodes hold, the rest in further rounds if that
    divides. dead: ranks that are not there; the living may have less room, so then paths become
    shorter where they must. before: a plan from before they died. With more than `regions.WHOLE`
    ranks only their regions are planned anew (`regions.around`). Raises Infeasible if there is
    no plan."""
    rounds = rounds_of(microbatches, min(network.memory))
    kept = min(stages_to_keep(skip, network.stages), len(living(network.stages, dead)))
    while True:
        try:
            work = (kept, microbatches // rounds, rounds)
            return plan_of_work(network, routing, work, seed, dead, before)
        except (Infeasible, Deadlock) as error:
            if not dead or kept == 1:
                raise Infeasible(f"--routing {routing}: {error}")
            kept -= 1


def plan_of_work(network, routing, work, seed, dead, before):
    """As `plan_paths`. work: (stages kept, microbatches of an origin in a round, rounds). Raises
    Infeasible or Deadlock where there is no plan."""
    kept, _, rounds = work
    alive = network_without(network, dead)
    found = None
    if before and routing == "stronger" and len(network.delay) > WHOLE:
        if len(before["paths"][0]) == kept:
            found = around(before, network, *work, seed, dead)
    result = found or PLANNERS[routing](alive, *work, seed=seed)
    return dict(paths=result.paths * rounds, order=result.order, makespan=result.makespan,
                network=asdict(network), planned="in regions" if found else "anew")
