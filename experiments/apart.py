"""What replicas differ in: watched in fleets, to find why fragments change the loss.

    spread      sqrt(mean over weights and replicas of (theta_i - mean)^2), at every step
    cost        the replicas' mean loss less the merged model's, nats per byte
    distance    KL of the merged model's next byte from a replica's, nats, mean over replicas
    line        losses on the line between two replicas: at t = 0, 1/4, 1/2, 3/4, 1

cost and distance are taken in each of the last PERIOD + 1 steps, so at all ages of a message; line
at the end. All losses are on the first SEQUENCES held-out sequences.
"""
import torch
import torch.nn.functional as F
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

PERIOD = 10
SEQUENCES = 128
WHERE = 0, 0.25, 0.5, 0.75, 1


class Apart:
    """Call it with the number of steps done, after each step of a Fleet."""

    def __init__(self, fleet):
        self.fleet = fleet
        self.spreads = []           # of each step: (trials, seeds)
        self.merged = []            # of each of the last steps, as are the next two
        self.means = []
        self.distances = []

    @torch.no_grad()
    def __call__(self, done):
        fleet = self.fleet
        self.spreads.append(fleet.theta.var(2, unbiased=False).mean(-1).sqrt().cpu())
        if done < fleet.o.steps - PERIOD:
            return
        middle = fleet.theta.mean(2)                                    # (trials, seeds, P)
        self.merged.append(fleet.evaluate(middle, SEQUENCES).cpu())
        self.means.append(fleet.evaluate(fleet.theta, SEQUENCES).mean(-1).cpu())
        self.distances.append(self.distance(middle).cpu())
        if done == fleet.o.steps:
            self.line = self.on_lines().cpu()                           # (WHERE, trials, seeds)

    def distance(self, middle):
        """(trials, seeds): mean KL of the merged model's predictions from the replicas'."""
        tokens = self.fleet.heldout[:SEQUENCES, :-1]
        of_merged = self.predictions(middle, tokens)                    # (trials * seeds, B, T, V)
        flat = self.fleet.theta.flatten(0, 1)                           # (trials * seeds, N, P)
        found = []
        for expected, replicas in zip(of_merged, flat):
            own = self.predictions(replicas, tokens)                    # (N, B, T, V)
            kl = F.kl_div(own, expected.expand_as(own), reduction="none", log_target=True)
            found.append(kl.sum(-1).mean())
        return torch.stack(found).view(middle.shape[:-1])

    def predictions(self, vectors, tokens):
        """Log probabilities (models, B, T, V)."""
        def logits(weights):
            with sdpa_kernel(SDPBackend.MATH):
                return functional_call(self.fleet.model, weights, (tokens,))

        return F.log_softmax(vmap(logits)(self.fleet.named(vectors)), -1)

    def on_lines(self):
        """Of neighbouring replicas (0 and 1, 2 and 3, ...), mean over these pairs."""
        ones, others = self.fleet.theta[:, :, ::2], self.fleet.theta[:, :, 1::2]
        losses = []
        for t in WHERE:
            between = torch.lerp(ones, others, t)
            losses.append(self.fleet.evaluate(between, SEQUENCES).mean(-1))
        return torch.stack(losses)

    def rows(self):
        """What to add to each row of the fleet, trial by trial, seed by seed."""
        found = []
        trials, seeds = self.spreads[0].shape
        for trial in range(trials):
            for seed in range(seeds):
                at = ..., trial, seed
                found.append(dict(
                    spreads=shown(torch.stack(self.spreads)[at]),
                    merged_by_age=shown(torch.stack(self.merged)[at]),
                    mean_by_age=shown(torch.stack(self.means)[at]),
                    distance_by_age=shown(torch.stack(self.distances)[at]),
                    line=shown(self.line[at])))
        return found


def shown(values):
    """A list of five digits each."""
    return [float(f"{value:.5g}") for value in values]
