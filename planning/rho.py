"""The rho rule (ours): what paths that leave stages out have trained, evaluated as a whole model.

A stage that a share rho of the microbatches visits is part of only that share of the sums from
which the model learns. So evaluation multiplies each residual of the stage by rho:

    x = x + rho f(x)                f: the attention or the MLP of a layer (model.py)

The whole model then adds on average what paths added in training. The rule is exact to first order
only, since later layers see the mean of the sums, not each sum. It is stochastic depth's
(1603.09382); LayerDrop (1909.11556) does not scale. 1/rho in training instead, as in inverted
dropout, gained nothing here that holds (results/headline_skip_before.json). `--unscaled` evaluates
as the papers do.
"""
import contextlib
import math
from itertools import combinations


def shares(paths, stages):
    """rho of each stage: the share of the paths that visit one of its ranks."""
    found = []
    for ranks in stages:
        there = set(ranks)
        visits = sum(1 for path in paths if not there.isdisjoint(path))
        found.append(visits / max(1, len(paths)))
    return found


def with_stages_missing(rho, there):
    """What takes rho's place where only so many of the stages run, stage 0 among them.

    Each adds more, so that on average over the choices of stages the sum is what it was in
    training; but none adds more than it has learnt."""
    later = sum(share > 0 for share in rho) - 1
    more = max(1.0, later / max(1, there - 1))
    return [min(1.0, share * more) for share in rho]


def some_choices(stages, count, draw):
    """All choices of `count` of these stages, or 16 drawn ones where there are more."""
    if math.comb(len(stages), count) <= 16:
        return list(combinations(stages, count))
    drawn = [tuple(sorted(draw.sample(stages, count))) for _ in range(64)]
    return list(dict.fromkeys(drawn))[:16]


@contextlib.contextmanager
def scaled(model, rho):
    """The layers of this Llama under the rho rule, afterwards as they were, to the bit."""
    layers = list(model.model.layers.values()) if rho < 1 else []
    kept = [w.clone() for w in last_matrices(layers)]       # some 30% of a stage's weights
    try:
        multiply(rho, layers)
        yield
    finally:
        for w, before in zip(last_matrices(layers), kept):
            w.copy_(before)


def multiply(rho, layers):
    """Put the rule into the weights, for good."""
    for w in last_matrices(layers):
        w.mul_(rho)


def last_matrices(layers):
    """Those with which each f of the rule ends: rho f is what rho times the matrix gives."""
    pairs = [(layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight) for layer in layers]
    return [w.detach() for pair in pairs for w in pair]
