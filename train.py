"""Train a Llama with NoLoCo, DiLoCo, data parallelism or no synchronisation, over any pipelines.

    python train.py                                             one process
    torchrun --nproc-per-node 8 train.py --stages 4,4           2 stages of 4 replicas, random paths
    torchrun --nproc-per-node 8 train.py --method ddp           8 replicas, all-reduce at every step
    torchrun --nproc-per-node 4 train.py --stages 1,1,1,1 --skip 0.5 --microbatches 3     SkipPipe
    torchrun --nproc-per-node 8 train.py --resume runs/NAME     goes on from the newest checkpoint

One step: every origin cuts its batch into microbatches, each of which takes its path through the
stages and returns to its origin for its loss (skippipe.py says what a path is); backward retraces
it. Each rank then divides its gradient by the tokens that went through it, clips it, takes an Adam
step on its own flat vector, and synchronises with the other replicas of its stage (noloco.py).

In this order: training, the executor, paths, evaluation; then what a run says, checkpoints, a run,
options, data, processes, the command line. This file needs noloco.py, skippipe.py and model.py. If
the folder gossip/ is there too, gossip/more.py adds options that no paper has. TRACE=1 prints each
message.
"""
import argparse
import contextlib
import copy
import fcntl
import hashlib
import json
import math
import os
import random
import re
import shlex
import signal
import socket
import statistics
import sys
import sysconfig
import threading
import time
import zipfile
from collections import deque, namedtuple
from datetime import timedelta
from itertools import accumulate, combinations
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")   # else a broken connection prints a page
import torch
import torch.distributed as dist
from tqdm import tqdm

from model import Config, Llama
from noloco import DiLoCo, NoLoCo, flatten, random_groups
from skippipe import (BACKWARD, FORWARD, chain, full_paths, incoming, kind, next_rank,
                      plan_iteration, random_paths, read_network, stages_to_keep, tasks)

try:
    from gossip import more
except ModuleNotFoundError as error:
    if error.name != "gossip":
        raise
    more = None                     # only the papers' options

# ---------------------------------------------------------------- training


def train(run):
    """Make all steps that are left."""
    begin(run)
    outer, log = run.outer, run.log
    with log.progress() as log.bar:
        while run.step < run.o.steps:
            before = run.step
            with timed(log.sums, "seconds"):

                # Forward and backward along this step's paths, and the inner optimizer's step. A
                # stage that a microbatch skips has no rank in its path (skippipe.py plans them).
                paths, order = run.routes.at(run.step)
                inner_step(run, paths, order)
                run.rho = shares(paths, run.stages)
                run.step += 1

                # The outer step, every m-th time (N1 to N3), with noloco.random_groups' partner.
                if outer:
                    with timed(log.sums, "blocked"):
                        outer.step()
                    run.step = outer.steps          # survive/: a late replica leaps over steps

            log.between_steps(before)
        if outer:
            outer.settle()                          # messages may be under way (gossip/)


def inner_step(run, paths, order):
    """Forward, backward, clip, the optimizer's step."""
    o, sums, grad = run.o, run.log.sums, run.theta.grad
    mine = [u for u, path in enumerate(paths) if path[0] == run.job.rank]
    batches = {u: run.reader.next(o.batch).to(run.job.device) for u in mine}
    grad.zero_()
    start = time.perf_counter()
    loss, home, passed = run.pipeline.run(paths, batches, order=order)
    run.log.iterations.append(time.perf_counter() - start)
    sums["loss"] = sums["loss"] + loss          # a tensor, which is read much later
    sums["home"] += home
    sums["tokens"] += home
    if run.average:                                             # ddp
        with timed(sums, "blocked"):
            passed = run.average(grad, passed)                  # sums both over the replicas
    run.lr = schedule(run.step, o)
    norm = torch.linalg.vector_norm(grad) / max(1, passed)      # of the mean over these tokens
    if not torch.isfinite(norm):
        sums["skipped_steps"] += 1              # one Inf would soon reach every replica
    elif passed:
        grad.mul_((o.clip / norm).clamp(max=1.0) / passed)
        for optimizer in run.inner:
            for group in optimizer.param_groups:
                group["lr"] = run.lr
            optimizer.step()


def schedule(step, o):
    """Warm-up, then a cosine to a tenth of the peak rate."""
    if step < o.warmup:
        return o.lr * (step + 1) / o.warmup
    done = (step - o.warmup) / max(1, o.steps - o.warmup)
    return o.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done))))


class Average:
    """Sums gradients over the replicas, for ddp. gossip/sums.py has it in fewer bytes."""
    owed = ()           # gossip/sums.py keeps here what rounding left over

    def __init__(self, run):
        self.group, self.replicas, self.bytes_sent = run.group, len(run.replicas), 0

    def __call__(self, grad, tokens):
        """Sum grad in place. Returns the sum of tokens."""
        count = torch.tensor(float(tokens), device=grad.device)
        dist.all_reduce(count, group=self.group)
        dist.all_reduce(grad, group=self.group)
        self.bytes_sent += 2 * (self.replicas - 1) * grad.nbytes // self.replicas       # a ring's
        return float(count)


# ---------------------------------------------------------------- the executor

# Receives posted before they are needed: a Gloo send completes only when its receive is there.
AHEAD = 8


def tag(u, hop):
    return 16 + 4096 * u + hop      # a chain has fewer than 4096 hops; survive/ uses tags below 16


class Pipeline:
    """Runs paths: forward along them, loss at home, backward the same way back.

    Gradients are summed into the parameters. message_shape: (B, T, C). bytes_sent: evaluations too.
    Subclasses may override connect, take, task, give, send, receive and run.
    """

    def __init__(self, model, job, stages, message_shape, dtype=torch.float32):
        self.model, self.job = model, job
        self.message_shape, self.dtype = message_shape, dtype
        self.rank, self.device = job.rank, job.device
        self.bytes_sent = 0
        bf16 = dtype == torch.bfloat16
        self.cast = torch.autocast(job.device.type, dtype) if bf16 else contextlib.nullcontext()
        self.message_device = job.device if job.nccl else torch.device("cpu")   # Gloo: host memory
        stage_of = {r: s for s, ranks in enumerate(stages) for r in ranks}
        self.connect([(a, b) for a, b in combinations(stage_of, 2) if stage_of[a] != stage_of[b]])

    def run(self, paths, batches, train=True, order=None):
        """Run the paths; batches[u] is (B, T + 1) tokens for this rank's own microbatches u.

        order[rank] lists each rank's tasks for planned paths (default: `tasks`). Returns (loss in
        nats summed over this origin's tokens, on the device; how many tokens that are; tokens whose
        gradient went through this rank).
        """
        self.paths, self.batches = paths, batches
        self.train = train
        self.chains = [chain(path) for path in paths]
        if not train:                   # evaluation ends with the loss
            self.chains = [ranks[:len(path) + 1] for ranks, path in zip(self.chains, paths)]
        mine = order[self.rank] if order else tasks(self.chains, self.rank)
        self.coming = deque(incoming(self.chains, self.rank, mine, order))  # receives to post
        self.posted = {}                # receives posted ahead
        self.inbox = {}                 # what this rank gives itself
        self.saved = {}                 # inputs and outputs of forwards, for their backwards
        self.sent = {}                  # messages that may still be read
        self.loss = torch.zeros((), device=self.device)
        self.home = 0
        self.tokens = 0
        for u, hop in mine:
            x = self.take(u, hop)
            out = self.task(u, hop, x)
            self.give(u, hop, out)
        for work, _ in self.sent.values():
            work.wait()
        return self.loss, self.home, self.tokens

    def take(self, u, hop):
        """What the hop before made. None at hop 0."""
        source = self.chains[u][hop - 1]
        if hop == 0 or source == self.rank:
            return self.inbox.pop((u, hop), None)           # at hop 0 there is nothing
        while self.coming and (len(self.posted) < AHEAD or (u, hop) not in self.posted):
            message = self.coming.popleft()
            self.posted[message[1:]] = self.receive(*message)
        work, x = self.posted.pop((u, hop))
        work.wait()
        return x.to(self.device)

    def task(self, u, hop, x):
        """One task of microbatch u. x and the result: (B, T, C) activations, or gradients of them.

        A path's first task takes None, its last returns None.
        """
        what = kind(self.paths[u], hop)
        if what == FORWARD:
            return self.forward(u, hop, x)
        if what == BACKWARD:
            return self.backward(u, 2 * len(self.paths[u]) - hop, x)
        return self.loss_at_home(u, x)

    def forward(self, u, hop, x):
        with torch.set_grad_enabled(self.train), self.cast:
            if hop == 0:
                x = self.model.embed(self.batches[u][:, :-1])
            else:
                x.requires_grad_(self.train)
            y = self.model.blocks(x.float()).to(self.dtype)     # inside, the residuals are fp32
        if self.train:
            self.saved[u, hop] = x, y
        return y.detach()

    def loss_at_home(self, u, x):
        with torch.set_grad_enabled(self.train), self.cast:
            x.requires_grad_(self.train)
            loss = self.model.loss(x.float(), self.batches[u][:, 1:])
        self.loss = self.loss + loss.detach()
        self.home += self.message_shape[0] * self.message_shape[1]
        if self.train:
            loss.backward()
        return x.grad

    def backward(self, u, hop, gradient):
        """Undo the forward task of this hop."""
        x, y = self.saved.pop((u, hop))
        y.backward(gradient)
        self.tokens += self.message_shape[0] * self.message_shape[1]
        if (u, hop + 1) in self.sent:           # this message has arrived: its gradient is back
            work, _ = self.sent.pop((u, hop + 1))
            work.wait()
        return x.grad if hop else None

    def give(self, u, hop, out):
        """To the next hop of the chain, if there is one."""
        to = next_rank(self.chains[u], hop)
        if to == self.rank:
            self.inbox[u, hop + 1] = out
        elif to is not None:
            self.sent[u, hop + 1] = self.send(out, to, u, hop + 1)

    # The messages. Gloo tells those of a pair apart by their tag.

    def connect(self, pairs):
        """Make `lane`, (source, to) -> process group. pairs: the ranks that a path may join.

        NCCL ignores tags, and runs what two ranks exchange within a group in the order posted. So
        each direction of a pair has a group of its own. All pairs connect here, in one order for
        all ranks: in training each rank would wait for the other's first message.
        """
        self.lane = lambda source, to: None             # Gloo: the default group
        if not self.job.nccl:
            return
        self.warm_up()
        up, down = dist.new_group(), dist.new_group()
        one = torch.zeros(1, device=self.device)
        for a, b in pairs:
            for group, source, to in ((up, a, b), (down, b, a)):
                if self.rank == source:
                    dist.send(one, to, group=group)
                elif self.rank == to:
                    dist.recv(one, source, group=group)
        self.lane = lambda source, to: up if source < to else down

    def warm_up(self):
        """Run each kind of task before the first message. It leaves gradients, which a step zeroes.

        CUDA loads a kernel when it is first called, and may wait until all running kernels end. A
        receive of NCCL is a running kernel: ranks would wait for each other for ever.
        """
        tokens = torch.zeros(self.message_shape[0], self.message_shape[1] + 1, dtype=torch.long,
                             device=self.device)
        for training in (True, True, False):    # the second run adds to the gradients of the first
            with torch.set_grad_enabled(training), self.cast:
                x = torch.zeros(self.message_shape, dtype=self.dtype, device=self.device)
                y = self.model.blocks(x.requires_grad_(training).float()).to(self.dtype)
                if hasattr(self.model, "lm_head"):
                    y = self.model.blocks(self.model.embed(tokens[:, :-1])).to(self.dtype)
                    y = self.model.loss(y.float(), tokens[:, 1:])
            if training:
                y.backward(torch.zeros_like(y))
        torch.cuda.synchronize()

    def send(self, tensor, to, u, hop):
        """(work, tensor): the tensor must stay until the work is done."""
        tensor = tensor.to(self.message_device).contiguous()
        self.count(tensor, to, u, hop)
        work = dist.isend(tensor, to, group=self.lane(self.rank, to), tag=tag(u, hop))
        return work, tensor

    def count(self, tensor, to, u, hop):
        self.bytes_sent += tensor.nbytes
        if "TRACE" in os.environ:
            line = f"rank {self.rank} -> {to}: microbatch {u}, hop {hop}, {tensor.nbytes} bytes"
            print(line, file=sys.stderr, flush=True)

    def receive(self, source, u, hop):
        """(work, the tensor that it fills)"""
        buffer = torch.empty(self.message_shape, dtype=self.dtype, device=self.message_device)
        work = dist.irecv(buffer, source, group=self.lane(source, self.rank), tag=tag(u, hop))
        return work, buffer


# ---------------------------------------------------------------- paths


def make_plan(o, stages):
    """dict(paths, order, makespan, network) by the paper's search, which JSON can hold."""
    return plan_iteration(read_network(o.links, stages), o.skip, o.microbatches, o.seed)


class Routes:
    """The paths of a step's microbatches, and the order of each rank's tasks (None: `tasks`).

    plan: what make_plan made, for planned paths. kept: the plan of a checkpoint. stages: the ranks
    of each stage that paths visit. Subclasses may override at.
    """

    def __init__(self, run, kept=None, make_plan=make_plan):
        self.o, self.stages, self.plan = run.o, run.stages, kept
        if self.o.routing not in ("random", "fixed") and not kept:
            found = make_plan(self.o, self.stages) if run.job.leads else None
            self.plan = run.job.share(found)[0]

    def at(self, step):
        """(paths, order) of a step."""
        if self.plan:
            return self.plan["paths"], self.plan["order"]
        if self.o.routing == "random":
            return random_paths(self.stages, self.o.microbatches, step, self.o.seed), None
        return full_paths(self.stages, self.o.microbatches), None


# ---------------------------------------------------------------- evaluation

SAMPLE = 1 << 16        # weights that replicas compare at an evaluation; at the end all


def shares(paths, stages):
    """rho of each stage: the share of the paths that visit it."""
    found = []
    for ranks in stages:
        visits = sum(1 for path in paths if not set(ranks).isdisjoint(path))
        found.append(visits / max(1, len(paths)))       # experiments/ may leave no path
    return found


@contextlib.contextmanager
def scaled(model, rho):
    """Stochastic depth's rule (arXiv 1603.09382): a stage that a share rho of the microbatches
    visited in training adds rho times its residuals where all visit it."""
    matrices = last_matrices(model.model.layers.values()) if rho < 1 else []
    kept = [w.clone() for w in matrices]
    for w in matrices:
        w.mul_(rho)
    yield
    for w, before in zip(matrices, kept):
        w.copy_(before)


def last_matrices(layers):
    """Those with which each residual ends: rho times the matrix makes rho times the residual."""
    found = []
    for layer in layers:
        found += [layer.self_attn.o_proj.weight.detach(), layer.mlp.down_proj.weight.detach()]
    return found


def pipelines(stages):
    """Paths through every stage that visit every rank at least once: what evaluation runs.

    The i-th goes through the i-th rank of each stage; smaller stages begin anew.
    """
    count = max(len(ranks) for ranks in stages)
    return [tuple(ranks[i % len(ranks)] for ranks in stages) for i in range(count)]


def evaluate(pipeline, stages, corpus, o):
    """Held-out loss, in nats per token, of each of this origin's pipelines (on other ranks: []).

    All pipelines read the same text. An origin with several runs one after the other.
    """
    rounds = -(-o.eval_sequences // o.batch)
    batches = []
    if corpus:
        rows = heldout_sequences(corpus, rounds * o.batch, o.seq_len).to(pipeline.device)
        batches = rows.split(o.batch)
    losses = []
    paths, origins = pipelines(stages), len(stages[0])
    for first in range(0, len(paths), origins):
        turn = paths[first:first + origins] * rounds        # at most one pipeline of each origin
        mine = [u for u, path in enumerate(turn) if path[0] == pipeline.rank]
        loss, home, _ = pipeline.run(turn, dict(zip(mine, batches)), train=False)
        if home:
            losses.append(float(loss) / home)
    return losses


def heldout(run):
    """The losses of this origin's pipelines through all stages that paths visit."""
    rho = 1.0 if run.o.unscaled else run.rho[run.stage]
    with scaled(run.model, rho):
        return evaluate(run.pipeline, run.routes.stages, run.corpus, run.o)


def average_in(group, vector, count):
    """Make the vector the mean of those of the group's `count` processes. Returns the sum of
    (vector - mean)^2."""
    squares = 0.0
    for piece in vector.split(1 << 18):         # in float64: the mean of equal replicas is exact
        own = piece.double()
        mean = own.clone()
        group.allreduce([mean]).wait()
        mean /= count
        squares += float((own - mean).square().sum())
        piece.copy_(mean)
    return squares


# ---------------------------------------------------------------- what a run says

# What a rank adds up over the run. `loss`, and `home`, the tokens that it is of, begin anew at each
# report.
SUMS = ("seconds", "blocked", "tokens", "skipped_steps", "loss", "home")


@contextlib.contextmanager
def timed(sums, name):
    """Add the seconds that this takes."""
    start = time.perf_counter()
    yield
    sums[name] += time.perf_counter() - start


class Log:
    """Evaluates the run, and writes a line of metrics.jsonl (docs/metrics.md) for each evaluation.

    Subclasses may override between_steps, average, counts, load and report, and say more.
    """
    at_evaluations = dict(          # what is said of each column of metrics.jsonl
        step="step {step}", heldout_loss="held-out {heldout_loss:.4f}",
        train_loss="train {train_loss:.4f}", weight_spread="weight spread {weight_spread:.2e}",
        tokens_per_second="{tokens_per_second:.0f} tokens/s")
    at_the_end = dict(
        heldout_loss="held-out loss   {heldout_loss:.4f} nats per token, "
                     "perplexity {perplexity:.3f} per token",
        heldout_nats_per_byte="                {heldout_nats_per_byte:.4f} nats per byte",
        merged_loss="merged model    {merged_loss:.4f} nats per token: the mean of all replicas",
        merged_nats_per_byte="                {merged_nats_per_byte:.4f} nats per byte",
        weight_spread="weight spread   {weight_spread:.3e} between a stage's replicas",
        sync_bytes="bytes sent      {sync_bytes:,} to synchronise, by all ranks",
        pipeline_bytes="                {pipeline_bytes:,} in the pipeline, by all ranks",
        seconds="training        {seconds:.0f} s without evaluations, in which synchronisation "
                "blocked a rank for {blocked:.1%}")

    def __init__(self, run):
        self.run = run
        self.sums = dict.fromkeys(SUMS, 0)
        self.iterations = []        # seconds of each iteration since the last report

    def progress(self):
        """A bar on the first rank."""
        run = self.run
        return tqdm(total=run.o.steps, initial=run.step, unit="step", dynamic_ncols=True,
                    leave=False, disable=not run.job.leads or run.step >= run.o.steps)

    def between_steps(self, before):
        """Evaluate, save and report as far as due since step `before`, which is not training time.

        The checkpoint is written before ranks wait for each other's weights and report.
        """
        run, o = self.run, self.run.o
        if run.step % 10 == 0 and self.sums["home"] and not self.bar.disable:
            loss = float(self.sums["loss"]) / self.sums["home"]
            self.bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
        self.bar.update(run.step - before)
        ends = run.step >= o.steps
        evaluates = ends or run.step // o.eval_every > before // o.eval_every
        saves = ends or run.step // o.save_every > before // o.save_every
        if evaluates:
            row = self.take_row()
            row["heldout"] = heldout(run)
        if saves:
            run.checkpoints.save(run.step, state_of(run))
        if evaluates:
            self.report(row | self.compare(ends), ends)

    def take_row(self):
        """What was measured since the last report; it begins anew here."""
        row = dict(loss=float(self.sums["loss"]), home=self.sums["home"],
                   iteration=statistics.median_high(self.iterations))
        self.sums.update(loss=0, home=0)
        self.iterations = []
        return row

    def compare(self, ends):
        """How far this rank's weights are from the mean of its stage's replicas: a sample of them,
        at the end all. At the end also the losses of that mean, the merged model; then every rank
        takes its own weights back."""
        run = self.run
        own = run.theta.clone() if ends else run.theta[::1 + len(run.theta) // SAMPLE].clone()
        mean = own.clone()
        squares, count = self.average(mean)
        merged = []
        if ends and max(run.o.stages) > 1:
            run.theta.copy_(mean)
            merged = heldout(run)
            run.theta.copy_(own)
        return dict(squares=squares, weights=count, merged=merged)

    def average(self, vector):
        """Make the vector the mean of those of the stage's replicas. Returns (the sum of
        (vector - mean)^2, how many numbers were compared)."""
        group, replicas = self.run.group, self.run.replicas
        if not group:
            return 0.0, 0
        return average_in(group, vector, len(replicas)), len(vector)

    def counts(self):
        """All that this rank has added up, as plain numbers."""
        run = self.run
        synchronising = [part.bytes_sent for part in (run.outer, run.average) if part]
        return dict(self.sums, loss=float(self.sums["loss"]), sync_bytes=sum(synchronising),
                    pipeline_bytes=run.pipeline.bytes_sent)

    def load(self, counts):
        """Go on from the counts of a checkpoint."""
        self.sums = {name: counts[name] for name in SUMS}
        self.run.pipeline.bytes_sent = counts["pipeline_bytes"]
        if self.run.average:
            self.run.average.bytes_sent = counts["sync_bytes"]      # outer's are in its state

    def report(self, row, ends):
        """A line of metrics.jsonl, and on the screen, from every rank's row."""
        rows = self.run.job.share(self.counts() | row)
        if self.run.job.leads:
            self.tell(self.line_of(rows), ends)

    def line_of(self, rows):
        """A line of metrics.jsonl from the rows of all ranks. What nobody measured is None."""
        def total(key):
            return sum(row[key] for row in rows)

        run, corpus, seconds = self.run, self.run.corpus, self.sums["seconds"]
        loss = mean_of([loss for row in rows for loss in row["heldout"]])
        merged = mean_of([loss for row in rows for loss in row["merged"]])
        spread = ratio(total("squares"), total("weights"))
        return dict(
            step=run.step, seconds=seconds, lr=run.lr, ranks=len(rows), corpus=corpus.digest,
            tokens=total("tokens"), train_loss=ratio(total("loss"), total("home")),
            heldout_loss=loss, heldout_nats_per_byte=ratio(loss, corpus.bytes_per_token),
            perplexity=None if loss is None else math.exp(min(loss, 700)),
            merged_loss=merged, merged_nats_per_byte=ratio(merged, corpus.bytes_per_token),
            weight_spread=None if spread is None else spread ** 0.5,
            sync_bytes=total("sync_bytes"), pipeline_bytes=total("pipeline_bytes"),
            blocked=total("blocked") / len(rows) / seconds,
            iteration_seconds=max(row["iteration"] for row in rows),
            simulated_seconds=run.routes.plan and run.routes.plan["makespan"],
            tokens_per_second=total("tokens") / seconds, skipped_steps=total("skipped_steps"))

    def tell(self, line, ends):
        """Into metrics.jsonl and onto the screen."""
        folder = self.run.folder
        with open(folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")
        tqdm.write(", ".join(in_words(line, self.at_evaluations)))
        if ends:
            need(math.isfinite(line["heldout_loss"] or 0),
                 f"the held-out loss at step {line['step']} is not finite: give a smaller --lr")
            tqdm.write("\n".join(in_words(line, self.at_the_end)))
            if line["skipped_steps"]:
                tqdm.write(f"skipped         {line['skipped_steps']} optimizer steps with a "
                           "gradient that was not finite")
            words = shlex.quote(str(folder))
            tqdm.write(f"kept in {folder}; a picture: python -m tools.plot {words}")


def in_words(line, texts):
    """The texts of what was measured, with its numbers. texts: {column of metrics.jsonl: text}."""
    return [text.format(**line) for column, text in texts.items() if line[column] is not None]


def mean_of(numbers):
    """None of no numbers."""
    return statistics.fmean(numbers) if numbers else None


def ratio(a, b):
    """None where one is not known, or b is zero."""
    return None if a is None or not b else a / b


# ---------------------------------------------------------------- checkpoints

# What may differ in a run that goes on; the other options decide what a checkpoint means.
FREE = ("resume", "data", "steps", "lr", "warmup", "beta2", "clip", "inner_steps", "alpha", "beta",
        "gamma", "group_size", "wire", "eval_every", "save_every", "dtype", "backend", "survive")

# What `state_of` returns.
PART = set("step rank theta rho options plan cursor corpus inner outer owed counts".split())


class Checkpoints:
    """Every rank writes its own part, runs/NAME/checkpoints/00000600/rank3.pt, on its own machine
    or in a folder for all. Subclasses may override parts, save, forget and load."""

    def __init__(self, job, folder):
        self.job, self.folder = job, folder / "checkpoints"

    def parts(self):
        """{step: file} of this rank's parts here, in order."""
        found = sorted(self.folder.glob(f"*/rank{self.job.rank}.pt"))
        return {int(file.parent.name): file for file in found if file.parent.name.isdigit()}

    def place(self, step):
        return self.folder / f"{step:08d}"

    def save(self, step, state):
        """Write this rank's part. When all ranks have, drop all parts but the last two."""
        self.write_part(step, state)
        self.job.share()
        self.job.then = f"; go on with {resume(self.folder.parent)}"
        self.forget(list(self.parts())[:-2])

    def write_part(self, step, state):
        """Raises BadInput without room, or without leave, to write."""
        place = self.place(step)
        place.mkdir(parents=True, exist_ok=True)
        try:
            write_whole(place / f"rank{self.job.rank}.pt", lambda file: torch.save(state, file))
        except RuntimeError as error:                   # torch hides a full disk behind its own
            raise BadInput(f"cannot write into {place}: {one_line(error.__context__ or error)}")

    def forget(self, steps):
        """Remove this rank's parts of these steps."""
        for step in steps:
            (self.place(step) / f"rank{self.job.rank}.pt").unlink(missing_ok=True)
            with contextlib.suppress(OSError):          # the last rank to leave takes the folder
                self.place(step).rmdir()

    def load(self):
        """This rank's part of the newest step of which all ranks hold a sound part.

        Newer parts are removed: training passes there again. None after a restart without any.
        """
        sound = {}
        for step, file in self.parts().items():
            try:
                sound[step] = load_part(file)
            except BadInput as error:
                tqdm.write(f"warning: {error}", file=sys.stderr)
        held = self.job.share(list(sound))
        step = max(set.intersection(*map(set, held)), default=-1)
        need(step >= 0 or self.job.restarts, f"{self.folder.parent} has no checkpoint that all "
             f"{self.job.world} ranks hold: bring the missing parts here, or remove it (steps that "
             f"each rank holds: {held})")
        self.forget([newer for newer in self.parts() if newer > step])
        return sound.get(step)


def resume(folder):
    """The option that goes on with this run, as a shell takes it."""
    return f"--resume {shlex.quote(str(folder))}"


def load_part(file):
    """A part, mapped into memory. Raises BadInput if it is damaged, or not what its name says."""
    try:
        with zipfile.ZipFile(file) as parts:
            need(not parts.testzip(), "wrong checksum")         # torch compares none
        state = torch.load(file, weights_only=True, mmap=True, map_location="cpu")
        own = f"{state['step']:08d}/rank{state['rank']}.pt"
        need(file.as_posix().endswith(f"/{own}"), f"it was written as {own}")
        need(state["theta"].sum().isfinite(), "its weights are not finite")
        need(PART <= set(state), f"it lacks {', '.join(sorted(PART - set(state)))}")
        return state
    except Exception as error:      # damaged bytes make torch raise nearly anything
        raise BadInput(f"{file} is damaged or of another version ({one_line(error)[:100]})")


def state_of(run):
    """What a rank's part of a checkpoint holds."""
    return dict(step=run.step, rank=run.job.rank, theta=run.theta, rho=run.rho,
                options=vars(run.o), plan=run.routes.plan,
                cursor=run.reader and run.reader.cursor, corpus=run.corpus and run.corpus.digest,
                inner=[optimizer.state_dict()["state"] for optimizer in run.inner],
                outer=run.outer and run.outer.state_dict(), owed=run.average and run.average.owed,
                counts=run.log.counts())


def restore(run, state):
    """Put what `state_of` returned into the run, except for the plan. Raises BadInput."""
    need_same(run.o, state, run.corpus)
    need(len(state["theta"]) == len(run.theta), f"{run.folder} is of other weights: begin anew")
    run.step, run.rho = state["step"], state["rho"]
    run.theta.copy_(state["theta"])
    for optimizer, kept in zip(run.inner, state["inner"]):
        # A copy, since the state is mapped from a file. Settings may be new, as --beta2.
        optimizer.load_state_dict(dict(optimizer.state_dict(), state=copy.deepcopy(kept)))
        for p, held in optimizer.state.items():     # fused, other shapes would end the process
            need(all(x.shape == p.shape for x in held.values() if x.ndim),
                 f"{run.folder} has an optimizer's state of other weights: begin anew")
    run.log.load(state["counts"])
    if run.outer:
        run.outer.load_state_dict(state["outer"])
    if run.average:
        run.average.owed = state["owed"]
    if run.reader:
        run.reader.cursor = state["cursor"]


def need_same(o, state, corpus):
    """Raises BadInput if the checkpoint is of other options, or of other data than this corpus."""
    need(not corpus or state["corpus"] == corpus.digest,
         "the data differ from those of this run: give the same --data or start a new run")
    for name, was in state["options"].items():
        now = getattr(o, name, None)
        need(name in FREE or now == was, f"{flag(name)} {now}: it was {was}, and must be")


def write_whole(path, put):
    """Write a file whole or not at all. put: writes to the open file."""
    half = Path(f"{path}.tmp")
    try:
        with open(half, "wb") as file:
            put(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(half, path)
    finally:
        half.unlink(missing_ok=True)            # after an error half a file is there


def write_json(path, value):
    write_whole(path, lambda file: file.write(json.dumps(value, indent=1).encode()))


# ---------------------------------------------------------------- a run


def config_of(o):
    """Of the whole model. Raises ValueError."""
    return Config(o.vocab, o.hidden, o.mlp, o.layers, o.heads, o.heads)


def flat_gradient(model, theta):
    """A vector like theta, of which the parameters' gradients are views."""
    grad = torch.zeros_like(theta)
    for p in model.parameters():
        start = (p.data_ptr() - theta.data_ptr()) // 4
        p.grad = grad[start:start + p.numel()].view(p.shape)
    return grad


def make_inner(run):
    """The inner optimizers."""
    return [torch.optim.Adam([run.theta], betas=(0.9, run.o.beta2), fused=True)]


def make_outer(run):
    """The outer optimizer of this rank's stage; None for ddp and local. Raises ValueError."""
    if run.o.method == "noloco":
        return NoLoCo(run.theta, run.replicas, **run.outer_settings)
    if run.o.method == "diloco":
        return DiLoCo(run.theta, run.replicas, everyone=run.group, **run.outer_settings)
    return None


def outer_settings(o):
    """{argument of NoLoCo or DiLoCo: its value}"""
    settings = dict(inner_steps=o.inner_steps, alpha=o.alpha, beta=o.beta)
    if o.method == "noloco":
        settings.update(gamma=o.gamma, group_size=o.group_size, seed=o.seed)
    return settings


class Run:
    """One rank's share of a run: its parts, which `train` uses, and how far it is.

    survive/, tools/ and experiments/ bring parts of their own.
    """

    def __init__(self, job, o, Pipeline=Pipeline, Routes=Routes, Checkpoints=Checkpoints, Log=Log,
                 tokenizer=None, make_plan=make_plan, make_inner=make_inner, make_outer=make_outer,
                 Average=Average):
        self.job, self.o = job, o
        self.stages, layers = layout(o, job.world)      # the ranks and the layers of each stage
        self.stage = next(s for s, ranks in enumerate(self.stages) if job.rank in ranks)
        self.replicas = self.stages[self.stage]
        self.corpus = self.reader = None                # only origins have data
        if self.stage == 0:
            self.corpus = load_corpus(o, tokenizer)
            place = self.replicas.index(job.rank)
            self.reader = Reader(self.corpus, o.seq_len, o.seed, place, len(self.replicas))
        self.model = Llama(config_of(o), layers[self.stage], self.stage == 0, o.seed, job.device)
        self.theta = flatten(self.model.parameters())           # all parameters in one vector
        self.theta.grad = flat_gradient(self.model, self.theta)
        self.inner = make_inner(self)
        job.share()                                     # all have found their data
        self.group = job.group_of(self.replicas)        # of their processes; None for one replica
        self.outer_settings = outer_settings(o)
        self.outer = make_outer(self)                   # None for ddp and local
        self.average = None                             # of gradients, for ddp
        if o.method == "ddp" and self.group:
            self.average = Average(self)
        shape = o.batch, o.seq_len, o.hidden
        self.pipeline = Pipeline(self.model, job, self.stages, shape, getattr(torch, o.dtype))
        self.step = 0                                   # inner steps done
        self.lr = 0.0                                   # of the last step
        self.rho = [1.0] * len(self.stages)             # by the last step's paths
        self.log = Log(self)
        self.folder = Path(o.resume or Path("runs", o.name))
        self.checkpoints = Checkpoints(job, self.folder)
        state = self.checkpoints.load() if o.resume or job.restarts else None
        if state:
            restore(self, state)
        job.share()                                     # all go on from their parts
        self.routes = Routes(self, state and state["plan"], make_plan)


def begin(run):
    """The first rank says what begins, and writes what a run's folder has then."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)       # as Ctrl-C: see `in_one_line`
    if run.step:
        run.job.then = f"; go on with {resume(run.folder)}"
    if run.job.leads and run.step >= run.o.steps:
        print(f"{run.folder} is at step {run.step}, --steps is {run.o.steps}: give more to go on")
    elif run.job.leads:
        write_folder(run)
    run.job.share()                                     # the folder is there


def write_folder(run):
    """config.json, plan.json, and the lines of metrics.jsonl up to this step: training writes the
    later ones again."""
    o, again = run.o, bool(run.o.resume or run.job.restarts)
    need(again or not run.folder.exists(),
         f"{run.folder} exists: give {resume(run.folder)}, or another --name")
    run.folder.mkdir(parents=True, exist_ok=again)      # the second of two at once fails here
    config = run.folder / "config.json"
    was = json.loads(config.read_text()) if config.exists() else {}
    changed = {name: [was[name], value] for name, value in vars(o).items()
               if name != "resume" and was.get(name, value) != value}
    write_json(config, vars(o))
    if run.routes.plan:
        made = dict(by="train.py", routing=o.routing, skip=o.skip, seed=o.seed)
        write_json(run.folder / "plan.json", dict(run.routes.plan, stages=run.stages, made=made))
    lines = lines_until(run.step, run.folder / "metrics.jsonl")
    if changed:
        lines.append(json.dumps(dict(event="changed", step=run.step, options=changed)))
    text = "".join(line + "\n" for line in lines)
    write_whole(run.folder / "metrics.jsonl", lambda file: file.write(text.encode()))
    print(f"{o.method}, stages {o.stages}, {o.routing} routing, {run.job.world} processes on "
          f"{run.job.device.type}, {o.model} model, corpus {run.corpus.digest}")
    for line in remarks(run):
        print(line)
    for name, (before, now) in changed.items():
        print(f"{flag(name)} {now}, was {before}")
    print(f"{run.folder}, from step {run.step}", flush=True)


def lines_until(step, log):
    """The lines of metrics.jsonl up to this step. A crash may have cut the last one."""
    kept = []
    for line in log.read_text(errors="replace").splitlines() if log.exists() else []:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            if json.loads(line)["step"] <= step:
                kept.append(line)
    return kept


def remarks(run):
    """What may surprise in the layout, a line each."""
    o, found = run.o, []
    if max(o.stages) == 1:
        found.append("no other replicas: nothing is synchronised")
    elif o.method == "noloco":
        most = max(len(random_groups(ranks, o.group_size, 0, 0)[0]) for ranks in run.stages)
        if most > o.group_size:
            found.append(f"up to {most} replicas average together: a stage does not divide into "
                         f"groups of {o.group_size}")
    if run.routes.plan:
        idle = set(range(run.job.world)).difference(*run.routes.plan["paths"])
        if idle:
            found.append(f"warning: ranks {sorted(idle)} get no work in this plan")
    return found


# ---------------------------------------------------------------- options

# The paper's table (arXiv 2506.10911); tiny is for two laptop cores. lr: of the inner optimizer.
PAPER = dict(vocab=128000, seq_len=1024, steps=25000, warmup=1000)
MODELS = {
    "tiny": dict(hidden=128, layers=4, heads=4, mlp=512, lr=3e-3,
                 vocab=256, seq_len=128, steps=300, warmup=30),
    "small": dict(hidden=768, layers=12, heads=16, mlp=3072, lr=6e-4, **PAPER),
    "medium": dict(hidden=2048, layers=24, heads=32, mlp=8192, lr=2e-4, **PAPER),
    "large": dict(hidden=4096, layers=32, heads=32, mlp=16384, lr=1.2e-4, **PAPER),
}
# The options that only some methods have. gamma None: it is beta, also where a run resumes with
# another one.
METHODS = {
    "noloco": dict(inner_steps=50, alpha=0.5, beta=0.7, gamma=None, group_size=2),
    "diloco": dict(inner_steps=100, alpha=0.3, beta=0.7),
    "ddp": {},
    "local": {},
}
# The papers' values are for 25 000 steps; these are the best that we found for short runs of tiny.
TINY = {
    "noloco": dict(inner_steps=10, alpha=0.0, beta=1.0),
    "diloco": dict(inner_steps=20, alpha=0.0, beta=1.0),
}


class BadInput(Exception):
    """Something that the user can correct: one line, and status 2."""


def need(good, line):
    if not good:
        raise BadInput(line)


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line."""

    def __init__(self, description):
        module = getattr(sys.modules["__main__"], "__spec__", None)     # of a file there is none
        prog = module and f"python -m {module.name.removesuffix('.__main__')}"
        super().__init__(prog=prog, description=description, allow_abbrev=False,
                         formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message):
        raise BadInput(f"{message} (see --help)")


def number(convert, least=0, below=math.inf):
    """An argument type: numbers from `least` on, below `below`. convert: int or float."""
    def parse_number(text):
        value = convert(text)
        if not least <= value < below:
            top = f" and below {below}" if below < math.inf else ""
            raise argparse.ArgumentTypeError(f"must be at least {least}{top}, got {text}")
        return value

    parse_number.__name__ = convert.__name__    # argparse says "invalid int value"
    return parse_number


def integers(text):
    """Parses "3,2,2"."""
    return [int(part) for part in text.split(",")]


def options(description=__doc__):
    """The parser of every option. A default of None: from MODELS or METHODS."""
    parser = Parser(description)
    add = parser.add_argument
    count, whole, positive = number(int, 1), number(int), number(float, 1e-9)
    add("--method", default="noloco", choices=METHODS, help="how replicas synchronise")
    add("--inner-steps", type=count, help="optimizer steps per outer step (m)")
    add("--alpha", type=number(float, below=1), help="outer momentum (N2)")
    add("--beta", type=positive, help="outer learning rate (N2)")
    add("--gamma", type=number(float), help="pull between slow weights (N2; default: beta)")
    add("--group-size", type=number(int, 2), help="replicas that average in an outer step (n)")
    add("--stages", type=integers, help="replicas of each, as 3,2,2 (default: all in one stage)")
    add("--layers-per-stage", type=integers, help="as 1,2,3 (default: even; the rest to the last)")
    planners = ["skippipe", *(more.PLANNERS if more else [])]
    add("--routing", choices=["random", "fixed", *planners], help="paths: random at every "
        "boundary, fixed, planned by the paper's search (skippipe), or planned by planning/ "
        "(default: random; with --skip skippipe)")
    add("--skip", type=number(float, below=1), default=0.0,
        help="share of the stages that a microbatch leaves out, on planned paths")
    add("--unscaled", action="store_true",
        help="with --skip, evaluate as SkipPipe does, without the rho rule")
    add("--links",
        help="for planned paths: JSON with the ranks' delay and compute in seconds, which "
        "planning.measure writes (default: a message takes as long as a forward)")
    add("--microbatches", type=count, default=2, help="per origin and step (%(default)s)")
    add("--batch", type=count, default=4, help="sequences per microbatch (%(default)s)")
    add("--model", default="tiny", choices=MODELS, help="tiny, or one of the NoLoCo paper's")
    for name, value in MODELS["tiny"].items():
        size = number(type(value), 0 if name in ("lr", "warmup") else 1)
        add(flag(name), type=size, help=f"default: the model's value, for tiny {value}")
    add("--beta2", type=number(float, below=1), default=0.95,
        help="Adam's (%(default)s; the papers' released code: 0.999)")
    add("--clip", type=positive, default=1.0, help="largest norm of a gradient (%(default)s)")
    add("--data", help="text file or folder, or nanoGPT .bin (default: Python's own library)")
    add("--name", help="the run is kept in runs/NAME (default: method, stages and time)")
    add("--resume", help="folder of a run to continue; its options hold unless given again")
    add("--eval-every", type=count, default=100, help="steps between evaluations (%(default)s)")
    add("--eval-sequences", type=count, default=128,
        help="held-out sequences per evaluation and replica (%(default)s)")
    add("--save-every", type=count, default=100, help="steps between checkpoints (%(default)s)")
    add("--seed", type=whole, default=0, help="seed of weights, data order, paths and groups")
    add("--dtype", default="float32", choices=["float32", "bfloat16"],
        help="type in which the model computes; weights stay float32 (%(default)s)")
    add("--backend", default="auto", choices=["auto", "gloo", "nccl"],
        help="nccl needs a GPU for every process (%(default)s: nccl if it can be)")
    if more:
        more.add_options(parser, number)
    return parser


def flag(name):
    return "--" + name.replace("_", "-")


def parse(argv, world=1, parser=None):
    """The run's options. Raises BadInput. parser: `options` with more of them (survive/)."""
    parser = parser or options()
    o = parser.parse_args(argv)
    if o.resume:
        kept = read_config(o.resume, parser)
        parser.set_defaults(**kept)
        o = parser.parse_args(argv)
        need(o.method == kept["method"],
             f"--method {o.method}: it was {kept['method']}, and must be")
    for name, value in vars(o).items():
        need(value != "", f"{flag(name)} is empty: give a value, or leave it out")
    for name in METHODS["noloco"]:
        need(getattr(o, name) is None or name in METHODS[o.method],
             f"--method {o.method} has no {flag(name)}")
    need(o.name or o.resume or os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0",
         "--max-restarts: give a --name, by which a restart finds the run")
    defaults = MODELS[o.model] | METHODS[o.method] | dict(stages=[world])
    if o.model == "tiny":
        defaults |= TINY.get(o.method, {})
    defaults["routing"] = "skippipe" if o.skip else "random"
    sizes = "x".join(str(size) for size in o.stages or [world])
    defaults["name"] = f"{o.method}-{sizes}-{time.strftime('%Y%m%d-%H%M%S')}"
    for name, value in defaults.items():
        if getattr(o, name) is None:
            setattr(o, name, value)
    planned = o.routing not in ("random", "fixed")
    need(planned or not o.links, "--links is for planned paths: give --skip or --routing skippipe")
    need(planned or not o.skip, f"--skip needs a planned routing, not --routing {o.routing}")
    need(Path(o.name).name == o.name != "..", f"--name {o.name}: takes a name without a path")
    return o


def read_config(folder, parser):
    """{option: value} of a run's config.json, checked like a command line. Raises BadInput."""
    need(Path(folder).is_dir(), f"{folder}: no such folder: give that of a run, as runs/NAME")
    words = []
    try:
        for name, value in json.loads(Path(folder, "config.json").read_text()).items():
            text = ",".join(map(str, value)) if isinstance(value, list) else value
            if value is not None and value is not False:
                words.append(flag(name) if value is True else f"{flag(name)}={text}")
        kept, unknown = parser.parse_known_args(words)
        unknown = [word for word in unknown if not word.startswith("--survive=")]
        need(not unknown, f"no options of a run here: {' '.join(unknown)}")
        need(kept.stages, "it is of no run")
    except (OSError, ValueError, AttributeError, BadInput) as error:
        raise BadInput(f"{folder}: no readable config.json there: {error}: mend or remove it")
    return vars(kept)


def layout(o, world):
    """stages, the ranks of each, and layers, the global layer numbers of each. Raises BadInput."""
    sizes, count = o.stages, len(o.stages)
    depths = o.layers_per_stage
    if depths is None:          # later stages first: origins also carry embedding, head and loss
        depths = [(o.layers + s) // count for s in range(count)]
    need(min(sizes) >= 1, f"--stages {sizes}: every stage needs a replica")
    need(sum(sizes) == world,
         f"--stages {sizes} needs {sum(sizes)} processes but got {world} (--nproc-per-node)")
    need(len(depths) == count and min(depths) >= 1 and sum(depths) == o.layers,
         f"{count} stages must share {o.layers} layers, at least one each; got {depths}")
    need(not o.skip or count >= 3 and stages_to_keep(o.skip, sizes) >= 1,
         f"--skip needs at least 3 stages and must keep one; got {count} and {o.skip}")
    least = -(-max(sizes) // sizes[0])
    need(o.microbatches >= least, f"replicas would be idle: give --microbatches {least} or more")
    return cuts(sizes), cuts(depths)


def cuts(parts):
    """[2, 3] -> [[0, 1], [2, 3, 4]]"""
    return [list(range(end - n, end)) for n, end in zip(parts, accumulate(parts))]


# ---------------------------------------------------------------- data

HELDOUT = r"(^|[^a-z])val(id|idation)?([^a-z]|$)"       # in the name of a held-out file
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "encodings"}


# encode: bytes -> tokens; end: the token that ends a document; text: the bytes of its file
Tokenizer = namedtuple("Tokenizer", "encode end text")


def as_bytes(text):
    """Tokens are bytes, and a zero ends a text."""
    return torch.frombuffer(bytearray(text + b"\0"), dtype=torch.uint8)


BYTES = Tokenizer(as_bytes, 0, b"")


def load_corpus(o, tokenizer=None):
    """Training and held-out tokens from disjoint files; of a single file the end is held out.

    Losses compare only between runs with the same digest. end: the token that ends a document, if
    that is known. bytes_per_token: None of token files. tokenizer: a Tokenizer (default: BYTES).
    """
    root, files = find_files(o.data)
    c = SimpleNamespace(bytes_per_token=None, end=tokenizer and tokenizer.end, vocab=o.vocab)
    tokenizer = tokenizer or BYTES
    digest = hashlib.sha256(tokenizer.text)
    train_files, held_files = split(root, files)
    if train_files:
        c.train = read_tokens(train_files, tokenizer, digest)
    c.heldout = read_tokens(held_files, tokenizer, digest)
    if files[0].suffix != ".bin":
        size = sum(path.stat().st_size + 1 for path in held_files)
        c.bytes_per_token, c.end = size / len(c.heldout), tokenizer.end
    if not train_files:
        count = max(o.seq_len + 1, len(c.heldout) // 20)
        c.train, c.heldout = c.heldout[:-count], c.heldout[-count:]
    need(o.data or len(c.train) > 5e6, f"{root} has under 5 MB of .py text: give --data TEXT")
    c.digest = digest.hexdigest()[:12]
    count = (len(c.heldout) - 1) // o.seq_len
    need(count >= o.eval_sequences, f"{o.data or root} has {len(c.heldout)} held-out tokens, "
         f"{count} sequences: give more data, or a smaller --eval-sequences or --seq-len")
    for part in filter(len, (c.train, c.heldout)):
        stacked([part[:1 << 24]], o.vocab)
    return c


def stacked(rows, vocab):
    """These rows of tokens as one tensor. Raises BadInput for a token that the model lacks."""
    tokens = torch.stack(rows)
    top = int(tokens.int().max())
    need(top < vocab, f"the data has token {top}: give --vocab {top + 1} or more, not {vocab}")
    return tokens.long()


def find_files(data):
    """(the folder that paths are relative to, files) of --data: all text, or all .bin. By default
    the .py files of Python's own library: real text, which every machine has."""
    root = Path(data or sysconfig.get_paths()["stdlib"])
    if root.is_file():
        return root.parent, [root]
    need(root.is_dir(), f"{root}: no such file or folder")
    files = []
    for folder, inside, names in os.walk(root):
        inside[:] = [name for name in inside if name[0] != "." and (data or name not in LEFT_OUT)]
        files += [Path(folder, name) for name in names
                  if name[0] != "." and (data or name.endswith(".py"))]
    need(files, f"{root} has no file to read")
    kinds = {path.suffix == ".bin" for path in files}
    need(len(kinds) == 1, f"{root} has .bin files and text: give a folder with only one of them")
    return root, sorted(files)


def split(root, files):
    """(training, held-out) files. Held out are those with val or validation in their names, else a
    20th, at least one, by a hash of their names."""
    def by_hash(path):
        return hashlib.sha256(os.fsencode(path.relative_to(root).as_posix())).digest()

    held = [path for path in files if re.search(HELDOUT, path.name.lower())]
    if len(held) in (0, len(files)):
        held = sorted(files, key=by_hash)[:max(1, len(files) // 20)]
    held = set(held)
    return [path for path in files if path not in held], [path for path in files if path in held]


def read_tokens(paths, tokenizer, digest):
    """The tokens of these texts, or of one of nanoGPT's .bin files, which is mapped into memory.
    The digest takes in the text, of a .bin file its name and size."""
    if paths[0].suffix == ".bin":
        need(len(paths) == 1 and paths[0].stat().st_size, f"{paths[0]}: --data takes one "
             ".bin file with tokens, or a folder of two, train.bin and val.bin")
        size = paths[0].stat().st_size // 2
        digest.update(os.fsencode(f"{paths[0].name} {size}"))
        tokens = torch.from_file(str(paths[0]), size=size, dtype=torch.uint16)
        first = tokens[:1 << 16].int()
        need(size < 2 or first[1::2].max() > 3 or first[::2].max() < 4, f"{paths[0]}: every second "
             "token is below 4, as in a file of uint32: write uint16")
        return tokens
    parts = []
    for path in paths:
        text = path.read_bytes()
        need(b"\0" not in text[:8192], f"{path} is no text file: docs/data.md has a recipe that "
             "writes C4's shards as .bin files")
        digest.update(text + b"\0")
        parts.append(tokenizer.encode(text))
    return torch.cat(parts)


def heldout_sequences(corpus, count, seq_len):
    """(count, T + 1) held-out tokens, spread evenly: the same sequences for every replica."""
    last = len(corpus.heldout) - seq_len - 1
    starts = [round(i * last / max(1, count - 1)) for i in range(count)]
    return stacked([corpus.heldout[a:a + seq_len + 1] for a in starts], corpus.vocab)


class Reader:
    """One origin's sequences; `cursor` is all its state. Raises BadInput.

    Shards are alike: each epoch is one random permutation of all training sequences, the same for
    all origins, of which the place-th of so many origins takes every origins-th, from its place on.
    """

    def __init__(self, corpus, seq_len, seed, place=0, origins=1):
        self.count = (len(corpus.train) - 1) // seq_len // origins      # in an epoch
        need(self.count > 0, "too little data for every origin: give more, or a smaller --seq-len")
        # (sequences, T + 1): each begins with the last token of the one before
        self.sequences = corpus.train.unfold(0, seq_len + 1, seq_len)
        self.seed, self.place, self.origins = seed, place, origins
        self.vocab = corpus.vocab
        self.cursor = 0
        self.epoch = None

    def next(self, batch):
        """(batch, T + 1) tokens: inputs and, one further, targets."""
        return stacked([self.sequences[i] for i in self.draw(batch)], self.vocab)

    def draw(self, batch):
        """The numbers of the next sequences."""
        found = []
        for _ in range(batch):
            epoch, place = divmod(self.cursor, self.count)
            if epoch != self.epoch:
                self.shuffle(epoch)
            found.append(int(self.order[place]))
            self.cursor += 1
        return found

    def shuffle(self, epoch):
        """Draw the order of this epoch's sequences."""
        seed = random.Random(f"data {self.seed} {epoch}").getrandbits(63)
        generator = torch.Generator().manual_seed(seed)
        everyones = torch.randperm(len(self.sequences), generator=generator)
        self.order = everyones[self.place::self.origins].clone()
        self.epoch = epoch


# ---------------------------------------------------------------- processes

STOPPED = b"stopped"        # what a rank that ends tells in place of its next value


class Job:
    """This process among those of the run, which tell each other small values through a store.

    nccl: whether messages travel over NCCL. leads: it prints, and writes the log. restarts: how
    often torchrun has started these processes again. then: how to go on after an error, in words.
    Subclasses may override share, stop, leave, start_group, group_of and close.
    """
    silent = 5                      # seconds, before a line says for whom this process waits

    def __init__(self):
        self.rank = int(os.environ.get("RANK", 0))
        self.world = int(os.environ.get("WORLD_SIZE", 1))
        self.restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        self.device = torch.device("cpu")
        self.nccl = False
        self.leads = self.rank == 0
        self.then = ""
        self.calls = 0              # of `share`
        self.store = dist.HashStore()
        if self.world > 1:
            # torchrun keeps its store over a restart: nobody may read the keys from before.
            self.store = dist.PrefixStore(f"attempt{self.restarts}", self.reach_store())

    def reach_store(self):
        """The store of all ranks, once all have come."""
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        line = f"rank {self.rank}: waiting for rank 0 at {place}, and all others"
        late = threading.Timer(self.silent, print, [line], dict(file=sys.stderr, flush=True))
        late.start()
        try:
            return next(iter(dist.rendezvous("env://")))[0]
        except (RuntimeError, ValueError) as error:
            sys.stderr.write(f"error: rank {self.rank}, {place}: {one_line(error)[:200]}\n")
            sys.exit(2)
        finally:
            late.cancel()

    def share(self, value=None):
        """Every rank's value; all call this equally often. A rank that stops ends this process."""
        self.calls += 1
        self.store.set(f"{self.calls}/{self.rank}", json.dumps(value))
        texts = self.store.multi_get([f"{self.calls}/{r}" for r in range(self.world)])
        if STOPPED in texts:                            # that rank has said why
            self.leave(5)
            sys.exit(2)
        return [json.loads(text) for text in texts]

    def stop(self, line, status=2):
        """End this process, and all that wait for its next value. The first to stop says why."""
        usual = signal.signal(signal.SIGINT, signal.SIG_IGN)    # Ctrl-C may come twice
        signal.signal(signal.SIGTERM, signal.SIG_DFL)           # a second one ends this process
        first = True
        with contextlib.suppress(RuntimeError):         # of a lost store
            first = self.store.add("stopped", 1) == 1
        if first:
            tqdm.write(line + self.then, file=sys.stderr)
        with contextlib.suppress(RuntimeError):
            self.store.set(f"{self.calls + 1}/{self.rank}", STOPPED)
            self.leave(5)
        signal.signal(signal.SIGINT, usual)
        sys.exit(status)

    def leave(self, seconds):
        """The first rank leaves last, since it may host the store; it waits so long at most."""
        self.store.set(f"left/{self.rank}", "=")
        if self.leads:
            self.store.wait([f"left/{r}" for r in range(self.world)], timedelta(seconds=seconds))

    def connect(self, o):
        """NCCL if each process has a GPU of its own, else Gloo.

        Refuses hosts that offer others their loopback address; shares out each machine's cores.
        """
        gpus = torch.cuda.device_count()
        if gpus:
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % gpus)
            torch.cuda.set_device(self.device)
        enough = gpus >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        machine, host = this_host()
        interface = gloo_interface() if self.world > 1 else ""
        found = self.share([enough, interface, machine, host])
        enough, interfaces, machines, hosts = zip(*found)
        need(all(enough) or o.backend != "nccl",
             "--backend nccl: a machine has fewer GPUs than processes: use gloo")
        if self.world == 1:
            return
        self.nccl = all(enough) and o.backend != "gloo"
        need("lo" not in interfaces or len(set(hosts)) == 1, "a rank offers other hosts its "
             f"loopback interface ({', '.join(interfaces)}): give torchrun node 0's address as "
             "--master-addr, or on that host export GLOO_SOCKET_IFNAME=NAME")
        if "OMP_NUM_THREADS" not in os.environ:         # else every rank would use every core
            torch.set_num_threads(max(1, torch.get_num_threads() // machines.count(machine)))
        self.start_group()

    def start_group(self):
        """The default process group, of all ranks."""
        # Lazily Gloo connects only pairs that talk, otherwise every pair at the start.
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1" if self.world > 64 else "0")
        dist.init_process_group("nccl" if self.nccl else "gloo", rank=self.rank,
                                world_size=self.world, store=dist.PrefixStore("job", self.store))
        dist.barrier()              # NCCL: the first use of a group must have every rank in it

    def group_of(self, ranks):
        """A new process group of these ranks, which all call this; None for one rank."""
        if len(ranks) == 1:
            return None
        return dist.new_group(ranks, use_local_synchronization=True)

    def close(self):
        """At the end, when all is saved: a lost rank or store does not matter any more."""
        with contextlib.suppress(RuntimeError):
            self.share()                                # nobody has stopped
            if dist.is_initialized():
                dist.barrier()
                dist.destroy_process_group()
            self.leave(60)


def this_host():
    """(a text that no other machine has, one that no other host has): a network namespace is a
    host."""
    boot, network = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    if not (boot.exists() and network.exists()):            # not Linux
        return socket.gethostname(), socket.gethostname()
    return boot.read_text(), f"{boot.read_text()} {network.stat().st_ino}"


def gloo_interface():
    """The network interface of all Gloo groups, torch's own too (or several, with commas).

    GLOO_SOCKET_IFNAME names it. If unset, it becomes the one from which this host reaches
    MASTER_ADDR. torch itself would take the interface of the host's own name, which on Debian is
    the loopback, and hosts would never connect.
    """
    known = [name for _, name in socket.if_nameindex()]
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        alone = os.environ.get("LOCAL_WORLD_SIZE", "") == os.environ.get("WORLD_SIZE")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            master = "127.0.0.1" if alone else os.environ.get("MASTER_ADDR", "127.0.0.1")
            probe.connect((master, 1))                                  # sends nothing
            own = socket.inet_aton(probe.getsockname()[0])
            for name in known:
                with contextlib.suppress(OSError):                      # it may have no address
                    request = name.encode().ljust(40, b"\0")
                    if fcntl.ioctl(probe, 0x8915, request)[20:24] == own:       # SIOCGIFADDR
                        os.environ["GLOO_SOCKET_IFNAME"] = name
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    need(not names or set(names.split(",")) <= set(known),
         f"GLOO_SOCKET_IFNAME={names}: a host has only {', '.join(known)}")
    return names


# ---------------------------------------------------------------- the command line

BROKEN = "Connection ", "Broken pipe", "ncclRemoteError"        # in the errors of a lost peer


def one_line(error):
    return " ".join(str(error).split())


@contextlib.contextmanager
def in_one_line(job):
    """Around a run: it ends with one line of one rank, or a traceback of an unknown cause."""
    where = f"rank {job.rank}: " if job.rank else ""
    try:
        yield
    except KeyboardInterrupt:
        job.stop("stopped", 130)
    except (BadInput, OSError) as error:                        # OSError: most often a full disk
        job.stop(f"error: {where}{one_line(error)}")
    except RuntimeError as error:
        if not any(words in str(error) for words in BROKEN):
            raise
        job.stop(f"stopped: rank {job.rank} lost the connection to another process")


def start(argv):
    """This process's Job. Of a request for help all but the first rank end here."""
    job = Job()
    if not job.leads and {"-h", "--help"} & set(argv):
        sys.exit(0)
    return job


def built(job, argv, parser=None, **parts):
    """The Run of a command line, the first rank's for all. parser: see `parse`. parts: of Run, in
    place of the usual ones. Raises BadInput."""
    try:
        o = vars(parse(argv, job.world, parser)) if job.leads else None
        o = argparse.Namespace(**job.share(o)[0])
        job.connect(o)
        usual = more.parts(o) if more else {}
        return Run(job, o, **(usual | parts))
    except ValueError as error:                                 # of a model, a network, NoLoCo
        raise BadInput(error)


def main(argv=None, **parts):
    """argv: the command line (None: sys.argv). parts: see `built`."""
    argv = sys.argv[1:] if argv is None else argv
    job = start(argv)
    with in_one_line(job):
        run = built(job, argv, **parts)
        train(run)
        job.close()


if __name__ == "__main__":
    main()
