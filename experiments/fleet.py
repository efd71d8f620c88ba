"""Many replicas in one process: every method on the same batches, on one GPU or on a CPU.

The models of a fleet are trained side by side: theta is (runs, N, P), and `vmap` computes all
gradients. Groups, outer steps, Adam, Muon, the data's order and the learning rate are those of
train.py, so a run's loss is that of `torchrun ... train.py` with the same options, up to rounding
(tests/test_fleet.py compares them). Nothing is sent. All is computed in fp32, without TF32; on a
GPU Muon's matrices are multiplied in bf16, as there in train.py.
"""
import argparse
import os
import shutil
import sys
import sysconfig
from dataclasses import asdict, astuple, dataclass
from functools import cache
from itertools import groupby
from pathlib import Path

import torch
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parameters_to_vector
from tqdm import tqdm

import train
from experiments.harness import cpu_seconds, here, make_missing
from gossip.due import Due
from gossip.muon import Muon
from model import Config, Llama
from noloco import outer_update, random_groups
from train import Reader, heldout_sequences, load_corpus

LENGTH = 128                # tokens of a sequence
# Tokens whose gradients are computed in one call. On a CPU more would not stay in its caches:
# 1 << 13 take 1.2 to 1.8 times as long a token as 1 << 11. On a GPU fewer would not keep it busy.
AT_ONCE = {"cuda": 80 << 10, "cpu": 1 << 11}
# Held-out tokens of a call, which keeps nothing for a gradient.
EVALUATED = {"cuda": 1 << 20, "cpu": 1 << 12}
# Models of a fleet at most: on a CPU theirs and their optimizers' numbers should fit into memory,
# and what is trained is kept once a fleet has ended.
MODELS = {"cuda": 640, "cpu": 16}
# Steps from which on compiling the gradient pays. It takes 10 seconds of a core, and then a step on
# a CPU takes 0.75 times as long.
LONG = {"cuda": 1, "cpu": 300}


def device():
    """Where fleets train."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def machine():
    """What records say of it."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else here()


@dataclass(frozen=True)
class Trial:
    """One run: N replicas that train with one method, rate and seed. Its fields are the facts of
    its record."""
    method: str                 # ddp, diloco, noloco or local (which never averages)
    m: int = 1                  # inner steps between outer steps
    D: int = 0                  # the delay
    K: int = 1                  # fragments
    n: int = 2                  # replicas of a group
    alpha: float = 0.0          # outer momentum
    beta: float = 1.0           # outer learning rate, and gamma
    optimizer: str = "adam"
    model: str = "0.16M"        # a key of gap.MODELS[scale]
    N: int = 8                  # replicas
    tokens: int = 1024          # of a replica and step
    steps: int = 1200
    rate: float = 4e-3
    seed: int = 0

    @property
    def known(self):
        """Of its record (experiments/harness.py)."""
        return asdict(self)

    @property
    def together(self):
        """Runs with the same of these can train in one fleet."""
        return self.optimizer, self.model, self.N, self.tokens


# ---------------------------------------------------------------- outer steps


class ManyOuters:
    """The outer steps of one run, or of one of its fragments.

    theta: (N, P), which changes in place. late: so many steps later than others.
    """

    def __init__(self, trial, theta, late=0):
        self.trial = trial
        self.due = Due(trial.m, trial.D, late)
        self.theta = theta
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
            return self.theta.mean(0, keepdim=True)
        return self.theta[self.groups()].mean(1)

    def groups(self):
        """(N, n): the group of each replica."""
        seed = self.trial.seed
        if self.due.late:
            seed = f"{seed} {self.due.late}"                    # as NoLoCo.group draws
        outer = self.steps // self.due.m
        groups = random_groups(range(self.trial.N), self.trial.n, outer, seed)
        of = {i: group for group in groups for i in group}
        found = torch.tensor([of[i] for i in range(self.trial.N)])
        # A blocking copy would wait until a GPU has done all that was asked of it before.
        return found.to(self.theta.device, non_blocking=True)


def outers_of(trial, theta):
    """A run's ManyOuters: one, or one for each of its fragments."""
    if trial.method not in ("diloco", "noloco"):
        return []
    found = []
    start = 0
    size = theta.shape[-1]
    for k in range(trial.K):
        # As gossip/ cuts them: all tensors here are as long as a multiple of 16.
        end = size // 16 * (k + 1) // trial.K * 16
        found.append(ManyOuters(trial, theta[:, start:end], k * trial.m // trial.K))
        start = end
    return found


# ---------------------------------------------------------------- batches


class Batches:
    """What the readers of train.py draw, for all seeds and replicas at once.

    The text lies on the device, and a step is one index of it: readers stack sequence after
    sequence, for which a GPU would wait.
    """

    def __init__(self, corpus, readers, seq_len, device):
        self.text = corpus.train.to(device)
        self.readers = readers                              # seed by seed, each replica's
        self.seq_len = seq_len
        self.within = torch.arange(seq_len + 1, device=device)

    def next(self, count):
        """(readers, count, T + 1) tokens."""
        numbers = torch.tensor([reader.draw(count) for reader in self.readers])
        starts = (numbers * self.seq_len).to(self.text.device, non_blocking=True)
        return self.text[starts[..., None] + self.within].long()


# ---------------------------------------------------------------- all models of a fleet


class Fleet:
    """The models of all trials, which have the same optimizer, model, N and tokens, trained in
    step. o: options of train.py, of which a trial's own fields take precedence."""

    def __init__(self, o, trials, device):
        # Runs that end earlier are the last ones, so that those which go on are one slice; and so
        # are those which share a rate.
        self.trials = sorted(trials, key=lambda trial: (-trial.steps, trial.rate))
        self.o = o
        self.N = trials[0].N
        self.batch = trials[0].tokens // o.seq_len
        self.device = device
        self.corpus = load_corpus(o)
        self.heldout = heldout_sequences(self.corpus, o.eval_sequences, o.seq_len).to(device)
        self.seeds = sorted({trial.seed for trial in trials})
        self.make_models()
        self.make_readers()
        self.make_optimizers()

    def make_models(self):
        """theta and its gradient: (runs, N, P). The first weights depend only on the seed."""
        config = train.config_of(self.o)
        models = {seed: Llama(config, seed=seed) for seed in self.seeds}
        first = {seed: parameters_to_vector(model.parameters()).detach()
                 for seed, model in models.items()}
        one = models[self.seeds[0]]
        self.shapes = {name: p.shape for name, p in one.named_parameters()}
        self.lengths = [p.numel() for p in one.parameters()]
        theta = torch.stack([first[trial.seed] for trial in self.trials]).to(self.device)
        self.theta = theta[:, None].repeat(1, self.N, 1)
        self.grad = torch.zeros_like(self.theta)
        is_long = self.trials[0].steps >= LONG[self.device]
        self.is_compiled = is_long and finds_compiler(self.device)
        self.loss, self.gradient = loss_and_gradient(astuple(config), self.device,
                                                     self.is_compiled)

    def make_readers(self):
        """Each seed's batches are the same in all its runs."""
        readers = []
        for seed in self.seeds:
            for place in range(self.N):
                readers.append(Reader(self.corpus, self.o.seq_len, seed, place, self.N))
        self.batches = Batches(self.corpus, readers, self.o.seq_len, self.device)
        places = [self.seeds.index(trial.seed) for trial in self.trials]
        self.places = torch.tensor(places, device=self.device)

    def make_optimizers(self):
        """One tensor of all runs with the same rate and steps: on a GPU each call takes long to
        begin."""
        adam, muon, self.schedules = [], [], []
        start = 0
        for (steps, rate), alike in groupby(self.trials, lambda trial: (trial.steps, trial.rate)):
            end = start + len(list(alike))
            self.schedules.append(argparse.Namespace(lr=rate, steps=steps, warmup=self.o.warmup))
            vectors = with_gradient(self.theta[start:end], self.grad[start:end])
            adam.append(dict(params=[vectors]))
            muon.append(dict(params=self.matrices(vectors)))
            start = end
        self.adam = torch.optim.Adam(adam, betas=(0.9, self.o.beta2), fused=True)
        self.muon = None
        if self.trials[0].optimizer == "muon":
            self.muon = Muon(muon)
        self.outers = [outers_of(trial, self.theta[i]) for i, trial in enumerate(self.trials)]

    def matrices(self, vectors):
        """Those of the layers, (models, rows, columns), with their gradients."""
        weights, grads = self.named(vectors), self.named(vectors.grad)
        return [with_gradient(weights[name], grads[name]) for name, shape in self.shapes.items()
                if "layers" in name and len(shape) == 2]

    def named(self, vectors):
        """{name: (models, *shape)}, views of vectors (..., P)."""
        parts = vectors.view(-1, vectors.shape[-1]).split(self.lengths, 1)
        views = {}
        for part, (name, shape) in zip(parts, self.shapes.items()):
            views[name] = part.unflatten(1, shape)
        return views

    def step(self, number):
        """One step of all runs that go on: gradients, the inner optimizer, the outer steps that are
        due."""
        going = sum(trial.steps > number for trial in self.trials)
        self.fill_gradients(going)
        for trial, g in zip(self.trials, self.grad):
            if trial.method == "ddp":
                g.copy_(g.mean(0, keepdim=True).expand_as(g))
        norm = torch.linalg.vector_norm(self.grad, dim=-1, keepdim=True)
        self.grad.mul_((self.o.clip / norm).clamp(max=1.0))
        if self.muon:
            self.set_rates(self.muon, number)
            self.muon.step()
            self.muon.zero_grad(set_to_none=False)      # so that Adam does not move the matrices
        self.set_rates(self.adam, number)
        self.adam.step()
        for outers in self.outers[:going]:
            for outer in outers:
                outer.step()

    def set_rates(self, optimizer, number):
        for group, schedule in zip(optimizer.param_groups, self.schedules):
            group["lr"] = train.schedule(min(number, schedule.steps - 1), schedule)

    def fill_gradients(self, going):
        """The mean loss's gradient of each model of the first `going` runs."""
        tokens = self.batches.next(self.batch)
        tokens = tokens.unflatten(0, (len(self.seeds), self.N))[self.places[:going]].flatten(0, 1)
        room = max(1, AT_ONCE[self.device] // (self.batch * self.o.seq_len))
        for start in range(0, len(tokens), room):
            self.fill_models(start, tokens[start:start + room], room)

    def fill_models(self, start, tokens, room):
        """Those of the models from `start` on, with tokens (models, B, T + 1)."""
        count = len(tokens)
        models = torch.arange(start, start + count, device=self.device)
        if self.is_compiled:
            models, tokens = filled(models, room), filled(tokens, room)
        own = self.theta.flatten(0, 1)[models]
        grads = self.named(self.grad.flatten(0, 1)[start:start + count])
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
        """{trial: (mean, merged)}: the mean of the replicas' losses and the loss of the model with
        their mean weights, in nats per token, once a run has made its steps."""
        found = {}
        for number in tqdm(range(self.trials[0].steps), leave=False, dynamic_ncols=True):
            self.step(number)
            for i, trial in enumerate(self.trials):
                if trial.steps == number + 1:
                    merged = self.evaluate(self.theta[i].mean(0))
                    found[trial] = float(self.evaluate(self.theta[i]).mean()), float(merged)
        return found


def with_gradient(weights, gradient):
    """A view of weights whose gradient, for an optimizer, is the other view."""
    weights = weights.view_as(weights)
    weights.grad = gradient
    return weights


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


# ---------------------------------------------------------------- runs that are kept


def train_missing(name, trials, models, o):
    """Train the trials that OUT/results/NAME.json lacks, fleet by fleet, and keep each fleet's
    records. models: {Trial.model: options of train.py}."""

    def make(together):
        began = cpu_seconds()
        options = parse_options(models[together[0].model])
        fleet = Fleet(options, together, device())
        found = fleet.train()
        hours = (cpu_seconds() - began) / 3600 / len(found)
        records = []
        for trial, (mean, merged) in found.items():
            records.append(trial.known | dict(
                mean=round(mean, 5), merged=round(merged, 5), corpus=fleet.corpus.digest,
                machine=machine(), torch=torch.__version__, cpu_hours=round(hours, 5)))
        return records

    make_missing(name, list(dict.fromkeys(trials)), make, o, turn_of=of_one_fleet)


def parse_options(options):
    """Of the model and its evaluation; the rest is each trial's own."""
    return train.parse(f"{options} --seq-len {LENGTH} --microbatches 1".split())


def of_one_fleet(missing):
    """Of the trials that can train together with the first one, as many as fit: the longest, which
    are about equally long."""
    alike = [trial for trial in missing if trial.together == missing[0].together]
    alike.sort(key=lambda trial: -trial.steps)
    return alike[:max(1, MODELS[device()] // missing[0].N)]
