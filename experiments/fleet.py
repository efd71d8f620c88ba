"""Many replicas in one process: every method on the same batches, on one GPU or on a CPU.

The models of a part are trained side by side: theta is (trials, seeds, N, P), and `vmap` computes
all gradients. Groups, outer steps, Adam, the data's order and the learning rate are those of
train.py, so a trial's loss is that of `torchrun ... train.py` with the same options, up to rounding
(tests/test_experiments.py compares them). Nothing is sent. All is computed in fp32, on a GPU as
well: matrices are multiplied without TF32.
"""
import os
import shutil
import sys
import sysconfig
from dataclasses import asdict, astuple, dataclass
from functools import cache, partial
from pathlib import Path

import torch
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parameters_to_vector
from tqdm import tqdm

import train
from experiments.batches import Batches
from model import Config, Llama
from noloco import outer_update, random_groups
from gossip.due import Due
from gossip.muon import orthogonal
from train import Reader, heldout_sequences, load_corpus

# Tokens whose gradients are computed in one call. On a CPU more would not stay in its caches:
# 1 << 13 take 1.2 to 1.8 times as long a token as 1 << 11. On a GPU fewer would not keep it busy,
# and 80 << 10 divide the rows of most fleets of five seeds, so that few calls are filled up.
AT_ONCE = {"cuda": 80 << 10, "cpu": 1 << 11}
# Tokens of one model in such a call. On a GPU fewer: steps of 1024 tokens and of 32 768 then call
# the gradient with one shape, and it is compiled once.
OF_A_MODEL = {"cuda": 1 << 10, "cpu": 1 << 11}
# Held-out tokens of a call, which keeps nothing for a gradient.
EVALUATED = {"cuda": 1 << 20, "cpu": 1 << 12}
# Steps from which on compiling the gradient pays. It takes 10 seconds of a core, and then a step on
# a CPU takes 0.75 times as long.
LONG = {"cuda": 1, "cpu": 300}


def device():
    """Where fleets train."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def machine():
    """What results say of it."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


@dataclass(frozen=True)
class Trial:
    """One method."""
    method: str                 # ddp, diloco, noloco or local (which never averages)
    every: int = 1              # m
    delay: int = 0              # D
    group: int = 2              # n
    fragments: int = 1          # K
    alpha: float = 0.0          # outer momentum
    beta: float = 1.0           # outer learning rate, and gamma


# ---------------------------------------------------------------- outer steps


class ManyOuters:
    """The outer steps of one trial, or of one of its fragments.

    theta: (seeds, N, P), which changes in place. offset: so many steps later than others.
    """

    def __init__(self, trial, theta, seeds, offset=0):
        self.trial = trial
        self.due = Due(trial.every, trial.delay, offset)
        self.theta = theta
        self.seeds = seeds
        self.phi = theta.clone()
        self.delta = None           # plain averages need none
        if (trial.alpha, trial.beta) != (0, 1):
            self.delta = torch.zeros_like(theta)
        self.steps = 0
        self.flying = None          # (theta when it left, the mean that will arrive)

    def step(self):
        """After an inner step: what arrives is merged, then what is due departs."""
        if self.flying and self.due.lands(self.steps):
            self.land()
        if self.due.departs(self.steps):
            self.flying = self.theta.clone(), self.means()
            if not self.due.delay:
                self.land()
        self.steps += 1

    def land(self):
        """N2 and N3: with plain averages phi is the mean of what was sent. What was learnt since it
        left stays."""
        sent, mean = self.flying
        if self.delta is None:
            self.phi = mean
        else:
            beta = self.trial.beta
            outer_update(self.phi, self.delta, mean, self.phi, self.trial.alpha, beta, beta)
        torch.add(self.phi, self.theta - sent, out=self.theta)
        self.flying = None

    def means(self):
        """Each replica's mean theta: over all replicas (DiLoCo), or its group."""
        if self.trial.method == "diloco":
            return self.theta.mean(1, keepdim=True)
        groups = self.groups()                                      # (seeds, N, n)
        seed = torch.arange(groups.shape[0], device=groups.device)
        return self.theta[seed[:, None, None], groups].mean(2)

    def groups(self):
        """(seeds, N, n): the group of each replica."""
        found, count = [], self.theta.shape[1]
        outer = self.steps // self.due.m
        for seed in self.seeds:
            drawn = f"{seed} {self.due.late}" if self.due.late else seed    # as NoLoCo.group draws
            groups = random_groups(range(count), self.trial.group, outer, drawn)
            of = {i: group for group in groups for i in group}
            found.append([of[i] for i in range(count)])
        # A blocking copy would wait until a GPU has done all that was asked of it before.
        return torch.tensor(found).to(self.theta.device, non_blocking=True)


def outers_of(trial, theta, seeds):
    """A trial's ManyOuters: one, or one for each of its fragments."""
    if trial.fragments == 1:
        return [ManyOuters(trial, theta, seeds)]
    found = []
    start = 0
    size = theta.shape[-1]
    for k in range(trial.fragments):
        # As gossip/ cuts them: all tensors here are as long as a multiple of 16.
        end = size // 16 * (k + 1) // trial.fragments * 16
        turn = k * trial.every // trial.fragments
        part = theta[..., start:end]
        found.append(ManyOuters(trial, part, seeds, turn))
        start = end
    return found


# ---------------------------------------------------------------- all models of a part


class ManyMuons:
    """The Muon of gossip/muon.py, for the matrices of many models at once, in fp32.

    matrices, grads: each (models, rows, columns). rates: (models,), of each model over the rate
    that `step` gets.
    """

    def __init__(self, matrices, grads, rates):
        self.orthogonal = vmap(partial(orthogonal, dtype=torch.float32))
        self.rates = rates[:, None, None]
        self.by_shape = {}          # {(rows, columns): [(weights, gradients, momentum)]}
        for w, g in zip(matrices, grads):
            parts = self.by_shape.setdefault(w.shape[1:], [])
            parts.append((w, g, torch.zeros_like(g)))

    def step(self, lr):
        """Leaves gradients of zero, by which Adam moves nothing."""
        for shape, parts in self.by_shape.items():
            ahead = []
            for _, g, momentum in parts:
                momentum.lerp_(g, 0.05)
                ahead.append(g.lerp(momentum, 0.95))
                g.zero_()
            # All matrices of a shape in one call: there are few shapes, and each call takes long
            # to begin.
            updates = self.orthogonal(torch.cat(ahead)).chunk(len(parts))
            scale = self.rates * (-0.2 * lr * max(shape) ** 0.5)
            for (w, _, _), update in zip(parts, updates):
                w.addcmul_(update, scale)


class Fleet:
    """N replicas of every trial with every seed, trained in step. o: train.parse's. rates: the
    learning rate of each trial (None: o.lr for all)."""

    def __init__(self, o, trials, replicas, seeds, device, rates=None):
        self.o = o
        self.trials = trials
        self.rates = rates or [o.lr] * len(trials)
        self.seeds = seeds
        self.N = replicas
        self.device = device
        corpus = load_corpus(o)
        self.digest = corpus.digest
        self.heldout = heldout_sequences(corpus, o.eval_sequences, o.seq_len).to(device)
        self.readers = []                                           # seed by seed, each replica's
        for seed in seeds:
            for place in range(replicas):
                self.readers.append(Reader(corpus, o.seq_len, seed, place, replicas))
        self.batches = Batches(corpus, self.readers, o.seq_len, device)
        self.make_models()
        self.make_optimizers()

    def make_models(self):
        """theta and its gradient: (trials, seeds, N, P). The first weights depend on the seed
        alone."""
        config = train.config_of(self.o)
        models = [Llama(config, seed=seed) for seed in self.seeds]
        first = torch.stack([parameters_to_vector(model.parameters()).detach() for model in models])
        self.model = models[0].to(self.device)
        self.shapes = {name: p.shape for name, p in self.model.named_parameters()}
        self.lengths = [p.numel() for p in self.model.parameters()]
        first = first.to(self.device)[None, :, None]
        self.theta = first.repeat(len(self.trials), 1, self.N, 1)
        self.grad = torch.zeros_like(self.theta)
        # A call takes so many sequences of a model. What a model has more is computed in pieces.
        most = OF_A_MODEL[self.device] // self.o.seq_len
        self.sequences = largest_divisor(self.o.batch, most)
        self.pieces = self.o.batch // self.sequences
        models = self.theta.shape[:-1].numel()
        self.row_grad = self.grad.view(models, -1)          # of each piece of each model
        if self.pieces > 1:
            self.row_grad = self.row_grad.repeat_interleave(self.pieces, 0)
        is_long = self.o.steps >= LONG[self.device]
        self.is_compiled = is_long and finds_compiler(self.device)
        self.loss, self.gradient = loss_and_gradient(astuple(config), self.device,
                                                     self.is_compiled)

    def make_optimizers(self):
        groups = []
        for vectors, grads in zip(self.theta, self.grad):
            vectors.grad = grads
            groups.append(dict(params=[vectors]))
        self.adam = torch.optim.Adam(groups, betas=(0.9, self.o.beta2), fused=True)
        self.muon = None
        if self.o.optimizer == "muon":
            theta, grads = self.named(self.theta), self.named(self.grad)
            inside = [name for name, shape in self.shapes.items()
                      if "layers" in name and len(shape) == 2]
            matrices = [theta[name] for name in inside]
            shares = torch.tensor(self.rates, device=self.device) / self.o.lr
            rates = shares.repeat_interleave(len(self.seeds) * self.N)
            self.muon = ManyMuons(matrices, [grads[name] for name in inside], rates)
        self.outers = []
        for trial, vectors in zip(self.trials, self.theta):
            if trial.method in ("diloco", "noloco"):
                self.outers += outers_of(trial, vectors, self.seeds)

    def named(self, vectors):
        """{name: (models, *shape)}, views of vectors (..., P)."""
        parts = vectors.view(-1, vectors.shape[-1]).split(self.lengths, 1)
        views = {}
        for part, (name, shape) in zip(parts, self.shapes.items()):
            views[name] = part.unflatten(1, shape)
        return views

    def step(self, number):
        """One step of all models: gradients, the inner optimizer, the outer steps that are due."""
        self.fill_gradients()
        for trial, g in zip(self.trials, self.grad):
            if trial.method == "ddp":
                g.copy_(g.mean(1, keepdim=True).expand_as(g))
        norm = torch.linalg.vector_norm(self.grad, dim=-1, keepdim=True)
        self.grad.mul_((self.o.clip / norm).clamp(max=1.0))
        lr = train.schedule(number, self.o)
        if self.muon:
            self.muon.step(lr)
        for group, rate in zip(self.adam.param_groups, self.rates):
            group["lr"] = lr * (rate / self.o.lr)
        self.adam.step()
        for outer in self.outers:
            outer.step()

    def fill_gradients(self):
        """Each replica's batch is the same in all trials. A row is a piece of a model's batch."""
        tokens = self.batches.next(self.o.batch)
        tokens = tokens.expand(len(self.trials), *tokens.shape)
        tokens = tokens.reshape(-1, self.sequences, self.o.seq_len + 1)
        room = max(1, AT_ONCE[self.device] // (self.sequences * self.o.seq_len))
        for start in range(0, len(tokens), room):
            self.fill_rows(start, tokens[start:start + room], room)
        if self.pieces > 1:
            shape = *self.theta.shape[:-1], self.pieces, -1
            torch.mean(self.row_grad.view(shape), -2, out=self.grad)

    def fill_rows(self, start, tokens, room):
        """The mean loss's gradients of the rows from `start` on, with tokens (rows, B, T + 1)."""
        count = len(tokens)
        rows = torch.arange(start, start + count, device=self.device)
        if self.is_compiled:
            rows, tokens = filled(rows, room), filled(tokens, room)
        theta = self.theta.view(-1, self.theta.shape[-1])
        own = theta[rows // self.pieces]
        grads = self.named(self.row_grad[start:start + count])
        for name, gradient in self.gradient(self.named(own), tokens).items():
            grads[name].copy_(gradient[:count])

    @torch.no_grad()
    def evaluate(self, vectors):
        """Held-out nats per token (...) of the models with weights vectors (..., P)."""
        weights = self.named(vectors)
        some = max(1, EVALUATED[self.device] // self.o.seq_len)         # sequences of a call
        total = 0.0
        for part in self.heldout.split(some):
            total = total + len(part) * self.losses(weights, part)
        return (total / len(self.heldout)).view(vectors.shape[:-1])

    def losses(self, weights, tokens):
        """(models,) mean nats per token."""
        found = []
        count = len(next(iter(weights.values())))
        some = max(1, EVALUATED[self.device] // tokens.numel())         # models of a call
        for a in range(0, count, some):
            part = {name: w[a:a + some] for name, w in weights.items()}
            found.append(vmap(self.loss, in_dims=(0, None))(part, tokens))
        return torch.cat(found)

    def train(self):
        """A row for each trial and seed. losses: the last one, the mean over the replicas; merged:
        that of the model with the mean of their weights."""
        for number in tqdm(range(self.o.steps), dynamic_ncols=True):
            self.step(number)
        last = self.evaluate(self.theta).mean(-1).cpu()             # (trials, seeds)
        merged = self.evaluate(self.theta.mean(2)).cpu()            # (trials, seeds)
        rows = []
        for i, trial in enumerate(self.trials):
            for s, seed in enumerate(self.seeds):
                rows.append(dict(
                    trial=asdict(trial), seed=seed, replicas=self.N, optimizer=self.o.optimizer,
                    tokens=self.o.batch * self.o.seq_len, lr=self.rates[i],
                    losses=[round(float(last[i, s]), 5)], merged=round(float(merged[i, s]), 5)))
        return rows


class Whole(torch.nn.Module):
    """A Llama's mean loss as one call."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens):
        with sdpa_kernel(SDPBackend.MATH):              # the fused ones know no vmap
            x = self.model.blocks(self.model.embed(tokens[:, :-1]))
        return self.model.loss(x, tokens[:, 1:]) / tokens[:, 1:].numel()


@cache
def loss_and_gradient(config, device, compiled):
    """Functions of many models' weights {name: (models, ...)}: the mean loss, and its gradient for
    tokens (models, B, T + 1). config: a Config's values. One pair for all fleets alike, so that
    the gradient is compiled once."""
    whole = Whole(Llama(Config(*config)).to(device))

    def loss(weights, tokens):
        named = {f"model.{name}": w for name, w in weights.items()}
        return functional_call(whole, named, (tokens,))

    gradient = vmap(grad(loss))
    if compiled:
        gradient = torch.compile(gradient, dynamic=False)
    return loss, gradient


def finds_compiler(device):
    """Whether torch.compile finds what it needs on a CPU: a C++ compiler and Python's headers. A
    GPU's is taken for granted."""
    if device == "cuda":
        return True
    usual = "clang++" if sys.platform == "darwin" else "g++"
    headers = Path(sysconfig.get_path("include"), "Python.h")
    return shutil.which(os.environ.get("CXX", usual)) is not None and headers.exists()


def filled(values, count):
    """The values, and the first ones again until there are `count`: what is compiled has one shape.
    What is computed for these is thrown away."""
    if len(values) == count:
        return values
    return values[torch.arange(count, device=values.device) % len(values)]


def largest_divisor(number, most):
    """The largest divisor of number that is at most `most`; 1 where there is none."""
    return next((n for n in range(most, 1, -1) if number % n == 0), 1)
