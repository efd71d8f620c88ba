"""Eq. 6 of skippipe.py: what paths that leave stages out have trained, evaluated as a whole model (ours).

A stage that a share rho of the microbatches visits is part of only that share of the sums from which the
model learns. So where all stages run, it adds rho times as much.
"""
import contextlib

from skippipe import share_of_visits


class Scale:
    """Puts Eq. 6 into the evaluations of a run (t: the parts of train.build). Training stays as it is.

    t.rho: of each stage, by the paths that trained last. Checkpoints keep it for tools/.
    """

    def __init__(self, t):
        self.t, self.usual = t, t.pipeline.run
        t.pipeline.run = self.run
        self.paths = t.routes.in_force()["paths"]
        t.rho = t.rho or shares(self.paths, t.stages)
        if min(t.rho) < 1:
            t.job.say(["evaluated with what a stage adds times the share of the microbatches that visit it "
                       "(Eq. 6; without: --unscaled)"])

    def run(self, paths, batches, train=True, order=None):
        t = self.t
        if not train:
            rho = with_stages_missing(t.rho, len(paths[0]))
            with times(rho[t.stage], t.model.model.layers.values()):
                return self.usual(paths, batches, train, order)
        if paths is not self.paths:
            self.paths, t.rho = paths, shares(paths, t.stages)
        return self.usual(paths, batches, train, order)


def shares(paths, stages):
    """rho of each stage."""
    return [share_of_visits(paths, ranks) for ranks in stages]


def with_stages_missing(rho, there):
    """What takes rho's place where only so many of the stages run: each adds more, so that on average over
    the choices of them the sum is what it was in training; but none more than it has learnt."""
    later = sum(share > 0 for share in rho) - 1         # stage 0 always runs
    more = max(1.0, later / max(1, there - 1))
    return [min(1.0, share * more) for share in rho]


@contextlib.contextmanager
def times(rho, layers):
    """These layers with Eq. 6, then as they were, to the bit."""
    matrices = last_matrices(layers) if rho < 1 else []
    kept = [w.clone() for w in matrices]                # some 30% of a stage's weights, for so long
    try:
        multiply(rho, matrices)
        yield
    finally:
        for w, before in zip(matrices, kept):
            w.copy_(before)


def multiply(rho, matrices):
    for w in matrices:
        w.mul_(rho)


def last_matrices(layers):
    """Those with which each f of Eq. 6 ends: rho f is what rho times the matrix gives."""
    pairs = [(layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight) for layer in layers]
    return [w.detach() for pair in pairs for w in pair]
