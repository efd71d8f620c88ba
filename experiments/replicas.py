"""Losses of many replicas in one process: every method on the same batches, on one GPU or on a CPU.

    python -m experiments.replicas [PART ...] [--seeds 0 1 2] [--steps N] [--out DIR] [--plot]

delay       --delay D beside the outer step that waits: m = 1 to 10, fp32 and one byte, Adam and Muon
many        2 to 64 replicas, groups of 2 and 4: how the gap to DDP grows; with 16, larger and smaller steps

The models of a part are trained side by side: theta is (trials, seeds, N, P), and `vmap` computes all
gradients. Outer steps are plain averages (alpha = 0, beta = gamma = 1). Here only NoLoCo has one byte a
weight. Groups, Adam, the data's order and the learning rate are those of train.py, so a trial's loss is that
of `torchrun ... train.py` with the same options, up to rounding (tests/test_experiments.py compares them).
Nothing is sent.
"""
import itertools
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

import train
from experiments.pictures import COLOURS, WIDTH, kept, label_ends, save, show_head, show_row
from experiments.runs import Part, band, headline, over, spread_of
from model import Llama
from noloco import random_groups
from plumbing.data import heldout_sequences, load_corpus, reader_of
from plumbing.inner import Inner, adam
from gossip.onebyte import MARGIN

LEARN = "--hidden 64 --mlp 256 --heads 2 --layers 2 --warmup 50 --microbatches 1 --eval-sequences 512"
SMALLER, SEQUENCES, LARGER = 4, 8, 32       # sequences of a replica's step
LENGTH = 128                                # tokens of a sequence
AT_ONCE = 1 << 17                           # tokens whose gradients are computed in one call
RATES = {"adam": 6e-3, "muon": 1.2e-2}      # Muon's: DDP's and NoLoCo's best of three


@dataclass(frozen=True)
class Trial:
    """One method."""
    method: str                 # ddp, diloco or noloco
    every: int = 1              # m
    delay: int = 0              # D
    wire: str = "fp32"
    group: int = 2              # n


class Outer:
    """The outer steps of one trial. theta: (seeds, N, P), which changes in place; lengths: of its tensors."""

    def __init__(self, trial, theta, seeds, lengths):
        self.trial, self.theta, self.seeds, self.lengths = trial, theta, seeds, lengths
        self.phi = theta.clone()
        self.counts = torch.tensor(lengths, device=theta.device)
        self.steps, self.flying = 0, None

    def step(self):
        """After an inner step: what arrives is merged, then what is due departs (gossip/delay.py)."""
        self.steps += 1
        t = self.trial
        if self.flying and (self.steps - t.delay) % t.every == 0:
            self.land()
        if self.steps % t.every == 0:
            self.flying = self.theta.clone(), self.means()
            if not t.delay:
                self.land()

    def land(self):
        """phi is the mean of what was sent; what was learnt since stays."""
        sent, self.phi = self.flying
        torch.add(self.phi, self.theta - sent, out=self.theta)
        self.flying = None

    def means(self):
        """Each replica's mean theta: over all replicas (DiLoCo), or its group."""
        if self.trial.method == "diloco":
            return self.theta.mean(1, keepdim=True)
        groups = self.groups()                                      # (seeds, N, n)
        seed, replica = (torch.arange(n, device=groups.device) for n in groups.shape[:2])
        there = seed[:, None, None], groups
        if self.trial.wire == "fp32":
            return self.theta[there].mean(2)
        codes, scales = self.encoded()
        own = self.theta[:, :, None]
        thetas = decoded(codes[there], scales[there], own)
        mine = groups == replica[:, None]
        return torch.where(mine[..., None], own, thetas).mean(2)

    def groups(self):
        """(seeds, N, n): the group of each replica."""
        found, count = [], self.theta.shape[1]
        for seed in self.seeds:
            groups = random_groups(range(count), self.trial.group, self.steps // self.trial.every - 1, seed)
            of = {i: group for group in groups for i in group}
            found.append([of[i] for i in range(count)])
        return torch.tensor(found, device=self.theta.device)

    def encoded(self):
        """M1 and M2 of gossip/onebyte.py: each weight's code and scale."""
        moved, size = (torch.stack([part.amax(-1) for part in x.abs().split(self.lengths, -1)], -1)
                       for x in (self.theta - self.phi, self.theta))            # (seeds, N, tensors)
        scales = torch.maximum(moved * (MARGIN / 256), size * 2**-22).clamp(min=1e-30)
        scales = scales.repeat_interleave(self.counts, -1, output_size=self.theta.shape[-1])
        return (self.theta / scales).round() % 256, scales


def decoded(codes, scales, own):
    """M3 of gossip/onebyte.py."""
    return scales * (codes + 256 * ((own / scales - codes) / 256).round())


# ---------------------------------------------------------------- all models of a part


class Muon:
    """torch.optim.Muon with its settings in plumbing/inner.py, for the matrices of many models at once."""

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
        first = torch.stack([torch.nn.utils.parameters_to_vector(m.parameters()).detach() for m in models])
        self.model = models[0].to(device)
        self.shapes = {name: p.shape for name, p in self.model.named_parameters()}
        lengths = self.lengths = [p.numel() for p in self.model.parameters()]
        # (trials, seeds, N, P)
        self.theta = first.to(device)[None, :, None].repeat(len(trials), 1, replicas, 1)
        self.theta.grad = self.grad = torch.zeros_like(self.theta)
        self.adam = Inner(adam([self.theta], o.beta2))
        inside = [name for name, shape in self.shapes.items() if "layers" in name and len(shape) == 2]
        theta, grads = self.named(self.theta), self.named(self.grad)
        self.loss, self.gradient = loss_and_gradient(self.model, device)
        self.muon = o.optimizer == "muon" and Muon([theta[n] for n in inside], [grads[n] for n in inside])
        self.outers = [Outer(trial, theta, seeds, lengths) for trial, theta in zip(trials, self.theta)
                       if trial.method != "ddp"]

    def named(self, vectors):
        """{name: (models, *shape)}, views of vectors (..., P)."""
        parts = vectors.view(-1, vectors.shape[-1]).split(self.lengths, 1)
        return {name: part.unflatten(1, shape) for part, (name, shape) in zip(parts, self.shapes.items())}

    def step(self, number):
        tokens = torch.stack([torch.stack([r.next(self.o.batch) for r in row]) for row in self.readers])
        tokens = tokens.to(self.device).expand(len(self.trials), *tokens.shape).flatten(0, 2)
        weights, grads = self.named(self.theta), self.named(self.grad)
        room = min(len(tokens), max(1, AT_ONCE // tokens[0].numel()))
        for a in [*range(0, len(tokens) - room, room), len(tokens) - room]:     # the last overlaps: one shape
            some = slice(a, a + room)
            found = self.gradient({name: w[some] for name, w in weights.items()}, tokens[some])
            for name, gradient in found.items():
                grads[name][some] = gradient
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
    def evaluate(self):
        """Held-out nats per token of all models: (trials, seeds, N)."""
        weights, found = self.named(self.theta), []
        some = max(1, 2 * AT_ONCE // self.heldout.numel())
        for a in range(0, len(next(iter(weights.values()))), some):
            part = {name: w[a:a + some] for name, w in weights.items()}
            found.append(vmap(self.loss, in_dims=(0, None))(part, self.heldout))
        return torch.cat(found).view(self.theta.shape[:-1])

    def train(self):
        """A row for each trial and seed; losses: the last one, mean over the replicas."""
        for number in tqdm(range(self.o.steps), dynamic_ncols=True):
            self.step(number)
        last = self.evaluate().mean(-1).cpu()
        return [dict(trial=asdict(trial), seed=seed, replicas=self.N, optimizer=self.o.optimizer,
                     tokens=self.o.batch * self.o.seq_len, lr=self.o.lr, losses=[round(float(last[i, s]), 5)])
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


def loss_and_gradient(model, device):
    """Functions of many models' weights {name: (models, ...)}: the mean loss, and its gradient for tokens
    (models, B, T + 1)."""
    whole = Whole(model)

    def loss(weights, tokens):
        return functional_call(whole, {f"model.{name}": w for name, w in weights.items()}, (tokens,))

    gradient = vmap(grad(loss))
    if device == "cuda":
        torch.set_float32_matmul_precision("high")              # TF32
        gradient = torch.compile(gradient, dynamic=False)
    return loss, gradient


# ---------------------------------------------------------------- the parts

REPLICAS = 2, 8, 16, 32, 64
SHOWN = {
    "NoLoCo, every 2": Trial("noloco", 2), "DiLoCo, every 4": Trial("diloco", 4),
    "NoLoCo, every 2, groups of 4": Trial("noloco", 2, group=4),
    "NoLoCo, every 1": Trial("noloco", 1),
    "NoLoCo, every 10": Trial("noloco", 10), "DiLoCo, every 20": Trial("diloco", 20),
    "NoLoCo, every 10, groups of 4": Trial("noloco", 10, group=4),
}


def delays(m):
    return sorted({0, 1, m // 2})


def delay_trials():
    yield Trial("ddp")
    for m, wire in itertools.product((1, 2, 4, 10), ("fp32", "int8")):
        yield from (Trial("noloco", m, delay, wire) for delay in delays(m))
    for m in (2, 4, 10):
        yield from (Trial("diloco", m, delay) for delay in delays(m))


def many_trials(replicas):
    yield Trial("ddp")
    for m in (1, 2, 10):
        yield Trial("noloco", m)
        yield Trial("diloco", 2 * m)
        if replicas > 4:
            yield Trial("noloco", m, group=4)


def delay_fleets(steps):
    """(optimizer, replicas, sequences, steps, trials, seeds at most) of each."""
    for optimizer in RATES:
        yield optimizer, 8, SEQUENCES, steps or 1200, delay_trials(), None


def many_fleets(steps):
    """As above."""
    steps = steps or 600
    for optimizer, replicas in itertools.product(RATES, REPLICAS):
        yield optimizer, replicas, SEQUENCES, steps, many_trials(replicas), 1 if replicas == 64 else None
    for sequences in SMALLER, LARGER:           # all that is shown but every 1
        yield "adam", 16, sequences, steps, [Trial("ddp"), *(t for t in SHOWN.values() if t.every > 1)], None


def train_all(name, part, o):
    """Train the fleets that OUT/results does not have yet, and save after each."""
    file = Path(o.out, "results", f"headline_{name}.json")
    found = kept(o.out, f"headline_{name}") if file.exists() else dict(fleets={}, machines={})
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for optimizer, replicas, sequences, steps, trials, most in part.runs(o.steps):
        seeds = (o.seeds or list(part.seeds))[:most]
        key = f"{optimizer}, {replicas} replicas, {sequences} sequences, {steps} steps, seeds {seeds}"
        if key in found["fleets"] or o.only not in key:
            continue
        print(key)
        words = f"{LEARN} --batch {sequences} --steps {steps} --lr {RATES[optimizer]} --optimizer {optimizer}"
        fleet = Fleet(train.parse(words.split()), list(trials), replicas, seeds, device)
        start = time.perf_counter()
        found["fleets"][key] = fleet.train()
        machine = torch.cuda.get_device_name() if device == "cuda" else "CPU"
        found["machines"][key] = [machine, torch.__version__, round(time.perf_counter() - start)]
        found["digest"] = fleet.digest
        save(o.out, f"headline_{name}", found)
    return found


# ---------------------------------------------------------------- tables and picture


def by_trial(found, sequences=SEQUENCES):
    """{(optimizer, replicas): {Trial: {seed: row}}} of the runs with so many sequences a replica and step."""
    runs = {}
    for row in itertools.chain(*found["fleets"].values()):
        if row["tokens"] == sequences * LENGTH:
            trials = runs.setdefault((row["optimizer"], row["replicas"]), {})
            trials.setdefault(Trial(**row["trial"]), {})[row["seed"]] = row
    return runs


def over_ddp(trials, trial):
    """Perplexity over DDP's with the same optimizer: of each seed that this trial has."""
    rows, ddp = trials.get(trial, {}), trials.get(Trial("ddp"))
    return over(*([there[seed]["losses"][-1] for seed in rows] for there in (rows, ddp)))


def cell(trials, trial):
    values = over_ddp(trials, trial)
    return spread_of(values, "+.1%") if values else ""


def show_delay(found):
    runs = by_trial(found)
    show_head("m, D | NoLoCo, Adam, fp32 | one byte | NoLoCo, Muon, fp32 | one byte | DiLoCo, Adam, fp32 "
              "| DiLoCo, Muon, fp32")
    for m in (1, 2, 4, 10):
        for delay in delays(m):
            noloco = [cell(runs[optimizer, 8], Trial("noloco", m, delay, wire))
                      for optimizer in RATES for wire in ("fp32", "int8")]
            diloco = [cell(runs[optimizer, 8], Trial("diloco", m, delay)) for optimizer in RATES]
            show_row(f"{m}, {delay}", *noloco, *diloco)


DRAWN = {"NoLoCo, every 2": "NoLoCo", "NoLoCo, every 2, groups of 4": "groups", "DiLoCo, every 4": "DiLoCo"}


def show_many(found):
    runs = by_trial(found)
    columns = [(optimizer, n) for optimizer in RATES for n in REPLICAS if (optimizer, n) in runs]
    show_head("method | " + " | ".join(f"{n} replicas, {optimizer.title()}" for optimizer, n in columns))
    for name, trial in SHOWN.items():
        show_row(name, *(cell(runs[column], trial) for column in columns))
    show_head("16 replicas, Adam: tokens of a replica and step | " + " | ".join(SHOWN))
    for sequences in SMALLER, SEQUENCES, LARGER:
        trials = by_trial(found, sequences).get(("adam", 16), {})
        show_row(sequences * LENGTH, *(cell(trials, trial) for trial in SHOWN.values()))


def draw_many(plt, found):
    runs = by_trial(found)
    figure, axis = plt.subplots(figsize=(WIDTH, 4.8))
    for (name, colour), optimizer in itertools.product(DRAWN.items(), RATES):
        gaps = {n: [100 * gap for gap in over_ddp(runs.get((optimizer, n), {}), SHOWN[name])]
                for n in REPLICAS}
        x = [n for n in REPLICAS[:-1] if gaps[n]]               # the last has one seed
        seeds = [*zip(*(gaps[n] for n in x))]
        band(axis, seeds, x, COLOURS[colour], ls="-" if optimizer == "adam" else "--", marker="o",
             label=f"{name}, {optimizer.title()}")
        first_seed = [gaps[n][0] for n in REPLICAS[-2:]]
        axis.plot(REPLICAS[-2:], first_seed, color=COLOURS[colour], ls=":", lw=1, marker=".")
    axis.set_xscale("log", base=2)
    axis.set(xlabel="replicas (bands: range of three seeds; dotted: seed 0 alone)",
             xticks=REPLICAS, xticklabels=REPLICAS, ylabel="% perplexity over DDP's with as many replicas",
             title="The gap to DDP grows with the replicas; it is smaller with Muon (dashed)")
    label_ends(axis)
    return figure


if __name__ == "__main__":
    headline(__doc__, {"delay": Part(delay_fleets, show_delay, measure=train_all),
                       "many": Part(many_fleets, show_many, draw_many, measure=train_all)})
