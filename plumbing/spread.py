"""How far the replicas of a stage are apart, and the merged model, which is their mean.

At an evaluation the replicas of a stage compare the same SAMPLE weights, which each rank draws once
from the seed. To compare all weights would send as much as several outer steps. That they do once,
at the end of a run.

The mean is taken in float64. There that of equal replicas is exact, so their spread is 0.
"""
import contextlib
import random
from datetime import timedelta

import torch

SAMPLE = 1 << 16        # weights
PIECE = 1 << 18         # weights that are compared at once, 2 MB in float64

# What a rank knows that was not compared: it has no peers, a peer was lost, or it came too late.
UNMEASURED = dict(squares=None, weights=0, compared=0)


# ---- at an evaluation; run: a train.Run


def count_comparison(run, ends):
    """Count the bytes that `compare` sends if all living replicas come.

    Call it before the checkpoint, which keeps the count, is written.
    """
    everything = ends or run.places is None
    weights = len(run.theta) if everything else len(run.places)
    replicas = len(living_replicas(run))
    # A ring sends this to sum a float64 for each weight.
    run.meter.counts["log_bytes"] += 2 * (replicas - 1) * 8 * weights // replicas


def compare(run, moment, ends, heldout):
    """How far replicas are apart, for the log; at the run's end also the merged model's losses.

    The merged model is the mean of each stage's replicas. Every rank evaluates it, by heldout(run),
    as it does its own model, so that the two losses are of the same text. Then it puts its own
    weights back.
    """
    replicas = living_replicas(run)
    key = f"spread/{run.stage}/{moment}"
    if not ends:
        vector = run.theta if run.places is None else run.theta[run.places]
        return weight_spread(vector, replicas, run.job, key) | dict(merged=[])
    if all(len(ranks) == 1 for ranks in run.routes.living()):
        return UNMEASURED | dict(merged=[])             # there is nothing to merge
    with merged(run.theta, replicas, run.job, key) as spread:
        return spread | dict(merged=heldout(run))


def living_replicas(run):
    """The ranks of this rank's stage, itself among them."""
    return next(ranks for ranks in run.routes.living() if run.job.rank in ranks)


def sampled_places(size, seed, sample=SAMPLE):
    """Where in a vector of `size` weights the sample lies, in order (None: it is the whole vector).

    Every rank of a stage draws the same places. A place may be drawn twice, which biases nothing.
    """
    if size <= sample:
        return None
    generator = torch.Generator()
    generator.manual_seed(random.Random(f"spread {seed} {size}").getrandbits(63))
    return torch.randint(size, (sample,), generator=generator).sort().values


def whole_spread(rows, stages):
    """(weight spread, how many ranks were compared), as the log has them.

    rows: {rank: what `compare` returned there} of the ranks that answered. The spread is the mean
    over the stages with several of them. It is None if one of these ranks was not compared: those
    who came in time may be just those who have averaged.
    """
    squares = 0.0
    weights = compared = 0
    missed = False
    for ranks in stages:
        answered = [rows[r] for r in ranks if r in rows]
        if len(answered) == 1:
            continue
        for row in answered:
            if row["compared"]:
                squares += row["squares"]
                weights += row["weights"]
                compared += 1
            else:
                missed = True
    if missed or not weights:
        return None, compared
    return (squares / weights) ** 0.5, compared


# ---- between the replicas


def weight_spread(vector, replicas, job, key, average=False):
    """Compare this rank's vector with those of the other replicas.

    Returns squares: the sum of (vector - mean)^2; weights: how many; compared: how many ranks came;
    or UNMEASURED. average: the vector becomes the mean, piece by piece. key: unique to this
    comparison. Raises RuntimeError if a replica is lost and the job needs all its ranks.
    """
    if len(replicas) == 1:
        return UNMEASURED
    squares = 0.0
    try:
        members, job.link = job.meet(key, replicas)     # kept: peers may still read from this link
        if not job.link:
            return UNMEASURED
        for piece in vector.split(PIECE):
            own = piece.cpu().double()
            mean = own.clone()
            job.link.allreduce([mean]).wait(timedelta(seconds=job.patience))
            mean /= len(members)
            squares += float((own - mean).square().sum())
            if average:
                piece.copy_(mean)
    except RuntimeError as error:       # most often a replica is lost, or the store
        if not job.outlives(error):
            raise
        return UNMEASURED
    return dict(squares=squares, weights=len(vector), compared=len(members))


@contextlib.contextmanager
def merged(theta, replicas, job, key):
    """Inside, theta is the mean of the replicas that came; afterwards what it was, to the bit.

    Yields what `weight_spread` returns. Memory: one more vector.
    """
    own = theta.clone()
    try:
        yield weight_spread(theta, replicas, job, key, average=True)
    finally:
        theta.copy_(own)
