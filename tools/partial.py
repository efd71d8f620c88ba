"""Partial inference: the held-out loss of a trained run with only some of its stages, or without some ranks.

    torchrun --nproc-per-node 6 -m tools.partial runs/NAME --shares 1,0.75,0.5 [--dead 3,5]

As many processes as the run has ranks; each loads its part of the newest checkpoint. Stage 0 always runs,
of the others all choices or 16 drawn ones, with the scale of planning/rho.py unless the run was --unscaled.
The numbers are kept in runs/NAME/partial.json.
"""
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
    a = job.together(arguments, argv)
    o = Options(**job.agree(parse, ["--resume", a.run]))
    job.connect(o)
    run = build(job, o, make_outer=lambda *_: None)
    alive = [[r for r in ranks if r not in a.dead] for ranks in run.stages]
    if not set(a.dead) < set(range(job.world)) or not alive[0]:
        job.refuse(f"--dead {','.join(map(str, a.dead))}: takes ranks of this run, and must leave one of the "
                   f"origins {run.stages[0]}")
    rows = []
    for kept in dict.fromkeys(max(1, round(share * len(run.stages))) for share in a.shares):
        rows += some_stages(run, alive, kept)
    if job.rank == 0:
        replace(run.folder / "partial.json", json.dumps(rows, indent=1))
    job.close()


def arguments(argv):
    parser = Parser(__doc__)
    parser.add_argument("run", help="its folder")
    shares = [1.0, 0.75, 0.5]
    parser.add_argument("--shares", type=numbers(float), default=shares, help="of the stages that run")
    parser.add_argument("--dead", type=numbers(int), default=[], help="ranks that no path visits")
    a = parser.parse_args(argv)
    if not all(0 < share <= 1 for share in a.shares):
        raise BadInput("--shares takes shares above 0, at most 1")
    return a


def some_choices(stages, count, draw):
    """All choices of `count` of these stages, or 16 drawn ones where there are more."""
    if math.comb(len(stages), count) <= 16:
        return list(combinations(stages, count))
    drawn = [tuple(sorted(draw.sample(stages, count))) for _ in range(64)]
    return list(dict.fromkeys(drawn))[:16]


def some_stages(run, alive, kept):
    """On rank 0, for each choice of `kept` stages: the stages and the mean held-out loss. alive: by stage."""
    later = [s for s in range(1, len(alive)) if alive[s]]
    rows = []
    for choice in some_choices(later, min(kept - 1, len(later)), random.Random(run.o.seed)):
        stages = [0, *choice]
        rho = with_stages_missing(run.rho, len(stages))
        with scaled(run.model, rho[run.stage]):
            own = evaluate(run.pipeline, [alive[s] for s in stages], run.corpus, run.o)
        losses = run.job.collect(f"partial/{choice}", own)
        if losses:
            mean = sum(losses[r] for r in alive[0]) / len(alive[0])
            rows.append(dict(stages=stages, heldout_loss=mean, perplexity=perplexity(mean)))
    if found := [row["perplexity"] for row in rows]:
        print(f"{len(stages)} of {len(alive)} stages, {len(found)} choices: perplexity mean "
              f"{sum(found) / len(found):.3f}, best {min(found):.3f}, worst {max(found):.3f}", flush=True)
    return rows


if __name__ == "__main__":
    main()
