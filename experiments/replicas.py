"""Losses of many replicas in one process: every method on the same batches, on one GPU or on a CPU.

    python -m experiments.replicas [PART ...] [--seeds 0 1 2] [--steps N] [--out DIR] [--plot]

delay       --delay D beside the outer step that waits: m = 1 to 10, fp32 and one byte, Adam and Muon
many        2 to 64 replicas, groups of 2 and 4, random pairs and hypercube pairs; how the gap to DDP grows

The models of a part are trained side by side: theta is (trials, seeds, N, P), and `vmap` computes all
gradients. Groups, the outer update, Adam, the data's order and the learning rate are those of train.py, so
a trial's loss is that of `torchrun ... train.py` with the same options, up to rounding
(tests/test_experiments.py compares them). Nothing is sent. DiLoCo's one byte has a scale for each tensor
here, and for each block of 512 values in plumbing/wires.py.
"""
import itertools
import statistics
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

import train
from experiments.pictures import COLOURS, WIDTH, kept, label_ends, picture, save, show_head, show_row
from experiments.runs import Part, arguments, over, spread_of
from model import Llama
from noloco import outer_update, random_groups
from plumbing.data import heldout_sequences, load_corpus, reader_of
from plumbing.fast import Adam
from plumbing.onebyte import MARGIN
from plumbing.processes import Job

LEARN = "--hidden 64 --mlp 256 --heads 2 --layers 2 --warmup 50 --microbatches 1 --eval-sequences 512"
AT_ONCE = 1 << 17                           # tokens
RATES = {"adam": 6e-3, "muon": 1.2e-2}      # each the best of three


@dataclass(frozen=True)
class Trial:
    """One method. `learnt`: the share that is kept of what was learnt while the messages flew."""
    method: str                 # ddp, local, diloco or noloco
    every: int = 1              # m
    delay: int = 0              # D
    wire: str = "fp32"
    group: int = 2              # n
    pairs: str = "random"       # or hypercube
    learnt: float = 1.0
    alpha: float = 0.0
    beta: float = 1.0
    gamma: float = None         # None: beta


class Outer:
    """The outer steps of one trial. theta: (seeds, N, P), which changes in place; lengths: of its tensors."""

    def __init__(self, trial, theta, seeds, lengths):
        self.trial, self.theta, self.seeds, self.lengths = trial, theta, seeds, lengths
        self.phi, self.delta = theta.clone(), torch.zeros_like(theta)
        self.gamma = trial.beta if trial.gamma is None else trial.gamma
        self.counts = torch.tensor(lengths, device=theta.device)
        self.left = [0.0, 0.0]          # error feedback of DiLoCo's one byte: of each Delta, of the sum
        self.steps, self.flying = 0, None

    def step(self):
        """After an inner step: what arrives is merged, then what is due departs (plumbing/overlap.py)."""
        self.steps += 1
        t = self.trial
        if self.flying and (self.steps - t.delay) % t.every == 0:
            self.land()
        if self.steps % t.every == 0:
            self.flying = self.theta.clone(), *self.means()
            if not t.delay:
                self.land()

    def land(self):
        (sent, *means), t = self.flying, self.trial
        learnt = self.theta - sent
        outer_update(self.phi, self.delta, *means, t.alpha, t.beta, self.gamma)
        torch.add(self.phi, learnt, alpha=t.learnt, out=self.theta)
        self.flying = None

    def means(self):
        """Each replica's mean theta and mean phi (None where gamma = beta)."""
        if self.trial.method == "diloco":
            return self.everyone(), None
        groups = self.groups()                                      # (seeds, N, n)
        seed, replica = (torch.arange(n, device=groups.device) for n in groups.shape[:2])
        there = seed[:, None, None], groups
        phis = None if self.gamma == self.trial.beta else self.phi[there].mean(2)
        if self.trial.wire == "fp32":
            return self.theta[there].mean(2), phis
        codes, scales = self.encoded()
        own = self.theta[:, :, None]
        thetas = decoded(codes[there], scales[there], own)
        mine = groups == replica[:, None]
        return torch.where(mine[..., None], own, thetas).mean(2), phis

    def groups(self):
        """(seeds, N, n): the group of each replica."""
        count, outer = self.theta.shape[1], self.steps // self.trial.every - 1
        bit = 1 << outer % max(1, count.bit_length() - 1)
        found = []
        for seed in self.seeds:
            groups = random_groups(range(count), self.trial.group, outer, seed)
            if self.trial.pairs == "hypercube":
                groups = [(i, i | bit) for i in range(count) if not i & bit]
            of = {i: group for group in groups for i in group}
            found.append([of[i] for i in range(count)])
        return torch.tensor(found, device=self.theta.device)

    def encoded(self):
        """M1 and M2 of plumbing/onebyte.py."""
        moved, size = self.largest(self.theta - self.phi), self.largest(self.theta)
        scales = self.spread(torch.maximum(moved * (MARGIN / 256), size * 2**-22))
        return (self.theta / scales).round() % 256, scales

    def everyone(self):
        """DiLoCo's mean theta. In one byte Delta and its sum are rounded, with error feedback: Q1, Q2."""
        if self.trial.wire == "fp32":
            return self.theta.mean(1, keepdim=True)
        total = self.rounded(self.theta - self.phi, 0).sum(1, keepdim=True)
        return self.phi + self.rounded(total, 1) / self.theta.shape[1]

    def rounded(self, x, which):
        """Q1 of plumbing/wires.py."""
        x = x + self.left[which]
        scales = self.spread(self.largest(x) / 127)
        sent = (x / scales).round() * scales
        self.left[which] = x - sent
        return sent

    def largest(self, x):
        """max |x| of each tensor: (seeds, N, tensors)."""
        return torch.stack([part.amax(-1) for part in x.abs().split(self.lengths, -1)], -1)

    def spread(self, scales):
        """A scale for each weight, of those of the tensors."""
        return scales.clamp(min=1e-30).repeat_interleave(self.counts, -1, output_size=self.theta.shape[-1])


def decoded(codes, scales, own):
    """M3."""
    return scales * (codes + 256 * ((own / scales - codes) / 256).round())


# ---------------------------------------------------------------- all models of a part


class Muon:
    """torch.optim.Muon with its settings in plumbing/muon.py, for the matrices of many models at once."""

    def __init__(self, matrices, grads):
        from torch.optim._muon import _zeropower_via_newtonschulz as orthogonal
        settings = dict(ns_coefficients=(3.4445, -4.775, 2.0315), ns_steps=5, eps=1e-7)
        self.orthogonal = vmap(partial(orthogonal, **settings))
        # each (models, rows, columns)
        self.parts = [(w, g, torch.zeros_like(g)) for w, g in zip(matrices, grads)]

    def step(self, lr):
        """Leaves gradients of zero, by which Adam moves nothing."""
        for w, g, momentum in self.parts:
            momentum.lerp_(g, 0.05)
            update = self.orthogonal(g.lerp(momentum, 0.95))
            w.add_(update, alpha=-0.2 * lr * max(w.shape[1:]) ** 0.5)
            g.zero_()


class Fleet:
    """N replicas of every trial with every seed, trained in step. o: train.Options."""

    def __init__(self, o, trials, replicas, seeds, device):
        self.o, self.trials, self.seeds, self.N, self.device = o, trials, seeds, replicas, device
        corpus = load_corpus(o)
        self.digest = corpus.digest
        self.heldout = heldout_sequences(corpus, o.eval_sequences, o.seq_len).to(device)
        self.readers = [[reader_of(corpus, o.seq_len, seed, place, replicas) for place in range(replicas)]
                        for seed in seeds]
        models = [Llama(train.whole_config(o), seed=seed) for seed in seeds]
        self.model = models[0].to(device)
        self.shapes = {name: p.shape for name, p in self.model.named_parameters()}
        lengths = self.lengths = [p.numel() for p in self.model.parameters()]
        first = torch.stack([torch.cat([p.detach().flatten() for p in m.parameters()]) for m in
                             (m.to(device) for m in models)])                       # (seeds, P)
        self.theta = first[None, :, None].repeat(len(trials), 1, replicas, 1)       # (trials, seeds, N, P)
        self.grad = torch.zeros_like(self.theta)
        self.adam = Adam(self.theta.view(-1), self.grad.view(-1), o.beta2)
        inside = [name for name, shape in self.shapes.items() if "layers" in name and len(shape) == 2]
        theta, grads = self.named(self.theta), self.named(self.grad)
        self.loss, self.slope = loss_and_slope(self.model, device)
        self.muon = o.optimizer == "muon" and Muon([theta[n] for n in inside], [grads[n] for n in inside])
        self.outers = [Outer(trial, theta, seeds, lengths) for trial, theta in zip(trials, self.theta)
                       if trial.method in ("noloco", "diloco")]

    def named(self, vectors):
        """{name: (models, *shape)}, views of vectors (..., P)."""
        parts = vectors.view(-1, vectors.shape[-1]).split(self.lengths, 1)
        return {name: part.unflatten(1, shape) for part, (name, shape) in zip(parts, self.shapes.items())}

    def step(self, number):
        tokens = torch.stack([torch.stack([r.next(self.o.batch) for r in row]) for row in self.readers])
        tokens = tokens.to(self.device).expand(len(self.trials), *tokens.shape).flatten(0, 2)
        weights, grads = self.named(self.theta), self.named(self.grad)
        room = min(len(tokens), max(1, AT_ONCE // tokens[0].numel()))
        for a in [*range(0, len(tokens) - room, room), len(tokens) - room]:     # of one shape: compiled once
            some = slice(a, a + room)
            slopes = self.slope({name: w[some] for name, w in weights.items()}, tokens[some])
            for name, slope in slopes.items():
                grads[name][some] = slope
        for trial, g in zip(self.trials, self.grad):
            if trial.method == "ddp":
                g.copy_(g.mean(1, keepdim=True).expand_as(g))
        norm = torch.linalg.vector_norm(self.grad, dim=-1, keepdim=True)
        self.grad.mul_((self.o.clip / norm).clamp(max=1.0))
        lr = train.schedule(number, self.o)
        if self.muon:
            self.muon.step(lr)
        self.adam.step(lr)
        for outer in self.outers:
            outer.step()

    @torch.no_grad()
    def evaluate(self, vectors):
        """Held-out nats per token of models (..., P): (...)."""
        weights, found = self.named(vectors), []
        some = max(1, 2 * AT_ONCE // self.heldout.numel())
        for a in range(0, len(next(iter(weights.values()))), some):
            part = {name: w[a:a + some] for name, w in weights.items()}
            found.append(vmap(self.loss, in_dims=(0, None))(part, self.heldout))
        return torch.cat(found).view(vectors.shape[:-1])

    def train(self, evaluations=4):
        """A row for each trial and seed."""
        curves, gap = [], max(1, self.o.steps // evaluations)
        for number in tqdm(range(self.o.steps), dynamic_ncols=True):
            self.step(number)
            if (number + 1) % gap == 0 or number + 1 == self.o.steps:
                curves.append((number + 1, self.evaluate(self.theta).mean(-1).cpu()))
        middle = self.theta.mean(2, keepdim=True)
        spread = (self.theta - middle).square().mean((2, 3)).sqrt().cpu()
        merged = self.evaluate(middle[:, :, 0]).cpu()
        return [dict(trial=asdict(trial), seed=seed, replicas=self.N, optimizer=self.o.optimizer,
                     tokens=self.o.batch * self.o.seq_len, lr=self.o.lr, steps=[n for n, _ in curves],
                     losses=[round(float(c[i, s]), 5) for _, c in curves],
                     merged=round(float(merged[i, s]), 5), spread=float(f"{spread[i, s]:.4g}"))
                for i, trial in enumerate(self.trials) for s, seed in enumerate(self.seeds)]


class Whole(torch.nn.Module):
    """A Llama's mean loss as one call."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens):
        with sdpa_kernel(SDPBackend.MATH):              # the fused ones know no vmap
            x = self.model.blocks(self.model.embed(tokens[:, :-1]))
        return self.model.loss(x, tokens[:, 1:]) / tokens[:, 1:].numel()


COMPILED = {}


def loss_and_slope(model, device):
    """Functions of many models' weights {name: (models, ...)}: the mean loss, and its gradient for tokens
    (models, B, T + 1)."""
    if (key := (str(model.config), device)) not in COMPILED:
        whole = Whole(model)

        def loss(weights, tokens):
            return functional_call(whole, {f"model.{name}": w for name, w in weights.items()}, (tokens,))

        slope = vmap(grad(loss))
        if device == "cuda":
            torch.set_float32_matmul_precision("high")              # TF32
            slope = torch.compile(slope, dynamic=False)
        COMPILED[key] = loss, slope
    return COMPILED[key]


# ---------------------------------------------------------------- the parts

REPLICAS = 2, 8, 16, 32, 64


def delays(m):
    return sorted({0, 1, m // 2})


def delay_trials():
    yield Trial("ddp")
    for method, every in (("noloco", (1, 2, 4, 10)), ("diloco", (2, 4, 10, 20))):
        for m, wire in itertools.product(every, ("fp32", "int8")):
            for delay in delays(m):
                yield Trial(method, m, delay, wire)
                if delay and wire == "fp32":
                    yield Trial(method, m, delay, wire, learnt=0.5)


def many_trials(replicas):
    yield Trial("ddp")
    for m in (1, 2, 10):
        yield Trial("noloco", m)
        yield Trial("diloco", 2 * m)
        if replicas > 4:
            yield Trial("noloco", m, group=4)
            yield Trial("noloco", m, pairs="hypercube")


def delay_fleets():
    """(optimizer, replicas, sequences a replica and step, steps, trials, seeds at most) of each."""
    for optimizer in RATES:
        yield optimizer, 8, 8, 1200, delay_trials(), None


def many_fleets():
    """As above."""
    for optimizer, replicas in itertools.product(RATES, REPLICAS):
        yield optimizer, replicas, 8, 600, many_trials(replicas), 1 if replicas == 64 else None
    for batch in (4, 32):
        yield "adam", 16, batch, 600, many_trials(16), None


def run(name, o):
    """Train the fleets that OUT/results does not have yet, and save after each."""
    file = Path(o.out, "results", f"headline_{name}.json")
    found = kept(o.out, f"headline_{name}") if file.exists() else dict(fleets={})
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for optimizer, replicas, batch, steps, trials, most in PARTS[name].runs():
        steps, seeds = o.steps or steps, (o.seeds or list(PARTS[name].seeds))[:most]
        key = f"{optimizer}, {replicas} replicas, {batch} sequences, {steps} steps, seeds {seeds}"
        if key in found["fleets"] or o.only not in key:
            continue
        print(key)
        words = f"{LEARN} --batch {batch} --steps {steps} --lr {RATES[optimizer]} --optimizer {optimizer}"
        fleet = Fleet(train.parse(words.split()), list(trials), replicas, seeds, device)
        start = time.perf_counter()
        found["fleets"][key] = fleet.train()
        machine = torch.cuda.get_device_name() if device == "cuda" else "CPU"
        took = round(time.perf_counter() - start)
        found.setdefault("machines", {})[key] = [machine, torch.__version__, took]
        found["digest"] = fleet.digest
        save(o.out, f"headline_{name}", found)


# ---------------------------------------------------------------- tables and picture


def by_trial(found):
    """{(optimizer, replicas, sequences): {Trial: {seed: row}}}"""
    runs = {}
    for rows in found["fleets"].values():
        for row in rows:
            trials = runs.setdefault((row["optimizer"], row["replicas"], row["tokens"] // 128), {})
            trials.setdefault(Trial(**row["trial"]), {})[row["seed"]] = row
    return runs


def over_ddp(trials, trial):
    """Perplexity over DDP's with the same optimizer: of each seed that this trial has."""
    rows, ddp = trials.get(trial, {}), trials[Trial("ddp")]
    return over(*([there[seed]["losses"][-1] for seed in rows] for there in (rows, ddp)))


def cell(trials, trial):
    values = trials and over_ddp(trials, trial)
    return spread_of(values, "+.1%") if values else ""


def show_delay(found):
    runs = by_trial(found)
    show_head("m, D | NoLoCo, Adam, fp32 | one byte | NoLoCo, Muon, fp32 | one byte | DiLoCo, Adam, fp32 "
              "| DiLoCo, Muon, fp32")
    for m in (1, 2, 4, 10):
        for delay in delays(m):
            noloco = [cell(runs[optimizer, 8, 8], Trial("noloco", m, delay, wire))
                      for optimizer in RATES for wire in ("fp32", "int8")]
            diloco = [cell(runs[optimizer, 8, 8], Trial("diloco", m, delay)) for optimizer in RATES]
            show_row(f"{m}, {delay}", *noloco, *diloco)


SHOWN = {
    "NoLoCo, every 2": Trial("noloco", 2), "DiLoCo, every 4": Trial("diloco", 4),
    "NoLoCo, every 2, groups of 4": Trial("noloco", 2, group=4),
    "NoLoCo, every 2, hypercube": Trial("noloco", 2, pairs="hypercube"),
    "NoLoCo, every step": Trial("noloco", 1), "DiLoCo, every 2": Trial("diloco", 2),
    "NoLoCo, every 10": Trial("noloco", 10), "DiLoCo, every 20": Trial("diloco", 20),
}
DRAWN = {"NoLoCo, every 2": "NoLoCo", "NoLoCo, every 2, groups of 4": "50%", "DiLoCo, every 4": "DiLoCo"}


def show_many(found):
    runs = by_trial(found)
    columns = [(optimizer, n, 8) for optimizer in RATES for n in REPLICAS if (optimizer, n, 8) in runs]
    show_head("method | " + " | ".join(f"{n} replicas, {optimizer.title()}" for optimizer, n, _ in columns))
    for name, trial in SHOWN.items():
        show_row(name, *(cell(runs[column], trial) for column in columns))


def draw_many(plt, found):
    runs, labels = by_trial(found), []
    figure, axis = plt.subplots(figsize=(WIDTH, 4.8), layout="constrained")
    for (name, colour), optimizer in itertools.product(DRAWN.items(), RATES):
        points = {n: [100 * x for x in over_ddp(runs[optimizer, n, 8], SHOWN[name])]
                  for n in REPLICAS if SHOWN[name] in runs.get((optimizer, n, 8), ())}
        middle = [statistics.mean(seeds) for seeds in points.values()]
        dashes = "-" if optimizer == "adam" else "--"
        axis.plot(list(points), middle, dashes, marker="o", color=COLOURS[colour])
        axis.fill_between(list(points), *([edge(seeds) for seeds in points.values()] for edge in (min, max)),
                          color=COLOURS[colour], alpha=0.15, lw=0)
        labels.append((middle[-1], f"{name}, {optimizer.title()}", COLOURS[colour]))
    axis.set_xscale("log", base=2)
    axis.set(xlabel="replicas (bands: range of three seeds; 64 replicas: one seed)",
             xticks=REPLICAS, xticklabels=REPLICAS, ylabel="% perplexity over DDP's with as many replicas",
             title="The gap to DDP grows with the replicas; with Muon (dashed) by half as much")
    label_ends(axis, labels)
    return figure


def main():
    o = arguments(__doc__, PARTS)
    for name in o.parts or PARTS:
        part = PARTS[name]
        if not o.plot:
            run(name, o)
        found = kept(o.out, f"headline_{name}")
        part.table(found)
        if part.draw:
            picture(o.out, f"headline_{name}", part.draw, found)


PARTS = {"delay": Part(delay_fleets, show_delay), "many": Part(many_fleets, show_many, draw_many)}


if __name__ == "__main__":
    Job().together(main)
