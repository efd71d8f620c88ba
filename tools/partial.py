"""Partial inference: the held-out loss of a trained run with only some of its stages, or ranks.

    torchrun --nproc-per-node 6 -m tools.partial runs/NAME --shares 1,0.75,0.5 [--dead 3,5]

It needs as many processes as the run has ranks; each loads its part of the newest checkpoint. Stage
0 always runs. All choices of the other stages run, or 16 sampled ones, with the scale of
`with_stages_missing`, or without any scale if --unscaled was given to the run or is given here.
The numbers are kept in runs/NAME/partial.json.
"""
import math
import random
import sys
from itertools import combinations

from train import (BadInput, Checkpoints, Parser, built, evaluate, in_one_line, integers, need,
                   scaled, start, write_json)


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    job = start(argv)
    with in_one_line(job):
        infer(job, argv)
        job.close()


def infer(job, argv):
    parser = Parser(__doc__)
    parser.add_argument("run", help="the run's folder")
    parser.add_argument("--shares", type=shares, default=[1.0, 0.75, 0.5],
                        help="shares of the stages that run (1,0.75,0.5)")
    parser.add_argument("--dead", type=integers, default=[], help="ranks that no path visits")
    parser.add_argument("--unscaled", action="store_true", help="evaluate as SkipPipe does")
    a = parser.parse_args(argv)
    run = built(job, ["--resume", a.run], Checkpoints=ReadOnly, make_outer=lambda run: None)
    run.o.unscaled |= a.unscaled
    alive = []                                                  # the ranks of each stage that run
    for ranks in run.stages:
        alive.append([r for r in ranks if r not in a.dead])
    need(set(a.dead) < set(range(job.world)) and alive[0],
         f"--dead {','.join(map(str, a.dead))}: takes ranks of this run, and must leave one of the "
         f"origins {run.stages[0]}")
    rows = []
    numbers = [max(1, round(share * len(alive))) for share in a.shares]
    for kept in dict.fromkeys(numbers):                         # each number once
        rows += some_stages(run, alive, kept)
    if job.leads:
        write_json(run.folder / "partial.json", rows)


class ReadOnly(Checkpoints):
    """A part that only some ranks have written so far may be whole a moment later: it stays."""

    def forget(self, steps):
        pass


def shares(text):
    """An argument type."""
    found = [float(share) for share in text.split(",")]
    if not all(0 < share <= 1 for share in found):
        raise BadInput("--shares: takes shares above 0, at most 1, with commas between them")
    return found


def with_stages_missing(rho, there):
    """What takes rho's place if only so many of the stages run, stage 0 among them.

    Each adds more, so that on average over the choices of stages the sum is what it was in
    training; but none adds more than it has learnt.
    """
    later = sum(share > 0 for share in rho) - 1
    more = max(1.0, later / max(1, there - 1))
    return [min(1.0, share * more) for share in rho]


def some_choices(stages, count, draw):
    """All choices of `count` of these stages, or 16 drawn ones where there are more."""
    if math.comb(len(stages), count) <= 16:
        return list(combinations(stages, count))
    drawn = [tuple(sorted(draw.sample(stages, count))) for _ in range(64)]
    return list(dict.fromkeys(drawn))[:16]


def some_stages(run, alive, kept):
    """On rank 0 a row for each choice of `kept` stages, else []. alive: the ranks of each stage."""
    later = [s for s in range(1, len(alive)) if alive[s]]
    rows = []
    for choice in some_choices(later, min(kept - 1, len(later)), random.Random(run.o.seed)):
        stages = [0, *choice]
        rho = with_stages_missing(run.rho, len(stages))
        if run.o.unscaled:
            rho = [1.0] * len(rho)
        with scaled(run.model, rho[run.stage]):
            own = evaluate(run.pipeline, [alive[s] for s in stages], run.corpus, run.o)
        losses = run.job.share(own)
        if run.job.leads:
            found = [loss for r in alive[0] for loss in losses[r]]
            mean = sum(found) / len(found)
            rows.append(dict(stages=stages, heldout_loss=mean, perplexity=math.exp(min(mean, 700))))
    if rows:
        found = [row["perplexity"] for row in rows]
        print(f"{len(stages)} of {len(alive)} stages, {len(found)} choices: perplexity mean "
              f"{sum(found) / len(found):.3f}, best {min(found):.3f}, worst {max(found):.3f}",
              flush=True)
    return rows


if __name__ == "__main__":
    main()
