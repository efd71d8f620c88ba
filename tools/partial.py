"""Partial inference: the held-out loss of a trained run with only some of its stages, or without some ranks.

    torchrun --nproc-per-node 6 -m tools.partial runs/NAME --shares 1,0.75,0.5 [--dead 3,5]

As many processes as the run has ranks; each loads its part of the newest checkpoint. Stage 0 always runs,
of the others all choices or 16 drawn ones, with the scale of planning/rho.py unless the run was --unscaled.
The numbers are kept in runs/NAME/partial.json.
"""
import argparse
import json
import math
import random
from itertools import combinations

from planning.rho import scaled, with_stages_missing
from plumbing.options import Parser, numbers
from plumbing.processes import BadInput, Job
from plumbing.report import perplexity, replace
from train import Options, build, evaluate, parse


def main(argv=None):
    job = Job()
    if job.leaves_help(argv):
        return
    parser = Parser(__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="its folder")
    shares = [1.0, 0.75, 0.5]
    parser.add_argument("--shares", type=numbers(float), default=shares, help="of the stages that run")
    parser.add_argument("--dead", type=numbers(int), default=[], help="ranks that no path visits")
    a, o = job.agree_on("arguments", lambda: arguments(parser, argv, job.world))
    o, dead = Options(**o), set(a["dead"])
    job.connect(o)
    run = build(job, o, make_outer=lambda *_: None)
    if not dead < set(range(job.world)) or set(run.stages[0]) <= dead:
        job.refuse(f"--dead {','.join(map(str, a['dead']))}: takes ranks of this run, and must leave one of "
                   f"the origins {run.stages[0]}")
    rows = []
    for kept in dict.fromkeys(max(1, round(share * len(run.stages))) for share in a["shares"]):
        rows += some_stages(run, kept, dead)
    if job.rank == 0:
        replace(run.folder / "partial.json", json.dumps(rows, indent=1))
    job.close()


def arguments(parser, argv, world):
    a = parser.parse_args(argv)
    if not all(0 < share <= 1 for share in a.shares):
        raise BadInput("--shares takes shares above 0, at most 1")
    return vars(a), vars(parse(["--resume", a.run], world))


def some_choices(stages, count, draw):
    """All choices of `count` of these stages, or 16 drawn ones where there are more."""
    if math.comb(len(stages), count) <= 16:
        return list(combinations(stages, count))
    drawn = [tuple(sorted(draw.sample(stages, count))) for _ in range(64)]
    return list(dict.fromkeys(drawn))[:16]


def some_stages(run, kept, dead):
    """With `kept` of the stages: on rank 0 a row for each choice."""
    alive = [[r for r in stage if r not in dead] for stage in run.stages]
    running = [s for s in range(1, len(run.stages)) if alive[s]]      # the others are left out by all
    others = min(kept - 1, len(running))
    choices = some_choices(running, others, random.Random(run.o.seed))
    share = (others + 1) / len(run.stages)
    rows = []
    for choice in choices:
        there = [alive[0], *(alive[s] for s in choice)]
        rho = with_stages_missing(run.rho, len(there))
        with scaled(run.model, rho[run.stage]):
            own = evaluate(run.pipeline, there, run.corpus, run.o)
        losses = run.job.collect(f"partial/{choice}", own)
        if losses:
            mean = sum(losses[r] for r in alive[0]) / len(alive[0])
            rows.append(dict(share=share, stages=[0, *choice], dead=sorted(dead), heldout_loss=mean,
                             perplexity=perplexity(mean)))
    if rows:
        found = [row["perplexity"] for row in rows]
        without = f", without ranks {sorted(dead)}" if dead else ""
        print(f"{others + 1} of {len(run.stages)} stages ({share:.0%}), choices {len(choices)}: perplexity "
              f"{sum(found) / len(found):.3f} (best {min(found):.3f}, worst {max(found):.3f}){without}",
              flush=True)
    return rows


if __name__ == "__main__":
    main()
