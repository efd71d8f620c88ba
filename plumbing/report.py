"""What a run says: first lines, progress bar, runs/NAME/metrics.jsonl (docs/metrics.md), last lines."""
import contextlib
import json
import math
import os
import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from tqdm import tqdm

from model import count_parameters
from plumbing.window import gamma_bound


@dataclass
class Meter:
    """What one rank has counted so far. The bytes that others count are taken over at each report."""
    seconds: float = 0.0        # of training; evaluations and checkpoints do not count
    seen: int = 0               # tokens of this origin
    skipped: int = 0            # optimizer steps left out: the gradient was not finite
    sync: int = 0               # bytes sent to synchronise, before this process began
    pipeline: int = 0           # bytes sent in the pipeline, likewise
    loss: float = 0.0           # summed since the last report, over `tokens`
    tokens: int = 0
    norm: float = 0.0           # of the last gradient
    iterations: list = field(default_factory=list)      # seconds of each since the last report
    waits: list = field(default_factory=list)           # seconds of each outer step of this process
    counts: dict = field(default_factory=dict)          # of survive/, before this process began
    clock: float = field(default_factory=time.perf_counter)

    def add(self, loss, home, norm, iteration):
        self.loss = self.loss + loss            # a tensor: read at the next report, not at every step
        self.tokens += home
        self.seen += home
        self.iterations.append(iteration)
        if norm is not None:
            self.norm = norm
            self.skipped += not math.isfinite(norm)

    def time(self, outer_step):
        start = time.perf_counter()
        if outer_step():
            self.waits.append(time.perf_counter() - start)

    def pause(self):
        self.seconds += time.perf_counter() - self.clock

    def go_on(self):
        self.clock = time.perf_counter()

    def state(self):
        return dict(seconds=self.seconds, seen=self.seen, skipped=self.skipped, loss=float(self.loss),
                    tokens=self.tokens)


def replace(file, text):
    """Write a small file; it changes as a whole or not at all."""
    half = file.with_suffix(".tmp")
    try:
        half.write_text(text)
        os.replace(half, file)
    except OSError:
        drop(half)
        raise


def drop(file):
    """What a full disk has left half written."""
    with contextlib.suppress(OSError):
        file.unlink()


def perplexity(loss):
    return math.exp(loss) if loss < 700 else math.inf


def weight_spread(theta, replicas, job, key):
    """(sum over the replicas of |theta - mean|^2, how many weights that are), on the first; (0, 0) on the
    others.

    Each sends its theta there. Differences to the first replica are summed, so that nothing cancels:
    sum |d - mean d|^2 = sum |d|^2 - |sum d|^2 / N.
    """
    if job.rank not in replicas:
        return 0.0, 0
    patience = timedelta(seconds=job.patience)
    try:
        members, link = job.meet(key, replicas) if len(replicas) > 1 else (replicas, None)
        job.link = link         # lives until the next one: what was sent may still be on its way
        if job.rank not in members:
            return 0.0, 0
        if job.rank != members[0]:
            for piece in theta.split(1 << 22) if link else []:
                link.send([piece.cpu()], 0, 0).wait(patience)
            return 0.0, 0
        pieces = theta.split(1 << 22) if link else []
        squares = sum(squares_of(piece, members, link, patience) for piece in pieces)
        return float(squares), len(members) * theta.numel()
    except RuntimeError:        # who was lost on the way spoils it for this time
        return 0.0, 0


def squares_of(piece, members, link, patience):
    """sum |d|^2 - |sum d|^2 / N of one piece of theta."""
    def square(d):
        return float(torch.linalg.vector_norm(d, dtype=torch.float64)) ** 2

    total, squares = torch.zeros_like(piece), 0.0
    other = torch.empty_like(piece, device="cpu")
    for place in range(1, len(members)):
        link.recv([other], place, 0).wait(patience)
        d = other.to(piece.device) - piece
        total += d
        squares += square(d)
    return squares - square(total) / len(members)


def sent(run):
    """Bytes that this process has sent to synchronise."""
    return sum(part.bytes_sent for part in (run.outer, run.average) if part)


def counts(run):
    """What survive/ counts: microbatches lost, outer steps done alone; with those before a resume."""
    now = dict(lost=run.pipeline.lost, alone=getattr(run.outer, "alone", 0))
    return {key: n + run.meter.counts.get(key, 0) for key, n in now.items()}


def banner(run, rate):
    """What runs, in a few lines."""
    o, job, corpus = run.o, run.job, run.corpus
    stages = "x".join(map(str, o.stages))
    alone = "replicas of the whole model"
    pipelines = f"stages {stages}, {o.routing} routing" if len(o.stages) > 1 else alone
    over = f" over {'NCCL' if job.nccl else 'Gloo'}" if job.world > 1 else ""
    yield f"{o.method}, {pipelines}, {job.world} processes on {job.device.type}{over}"
    whole, inner = count_parameters(run.config)
    yield (f"{o.init_from or o.model} model: {whole / 1e6:.2f}M parameters, {inner / 1e6:.2f}M without "
           f"embedding and head; {o.dtype}")
    yield from settings(o, run.stages[0], rate)
    amount = f"{len(corpus.train)} shards to stream" if corpus.streamed else \
        f"{sum(map(len, corpus.train)) / 1e6:.1f}M training"
    size = f", {corpus.bytes_per_token:.3f} bytes per token" if o.tokenizer else ""
    yield f"{amount} and {len(corpus.heldout) / 1e6:.2f}M held-out tokens, corpus {corpus.digest}{size}"
    replicas = [len(ranks) for ranks in run.stages if len(ranks) > 1 and o.method == "noloco"]
    bounds = [gamma_bound(o.alpha, o.group_size, n) for n in replicas]
    if bounds and not 0 < o.gamma < min(bounds):
        yield (f"warning: gamma {o.gamma} is outside 0 < gamma < {min(bounds):.3f} (docs/stability.md): "
               "replicas may drift apart")
    if run.step and (before := json.loads((run.folder / "config.json").read_text())["steps"]) != o.steps:
        yield (f"warning: --steps {o.steps}, until now {before}: from step {run.step} on the cosine of the "
               f"learning rate is stretched to that")
    if o.skip and o.routing != "dtfm" and not o.unscaled:
        yield ("evaluated with what a stage adds times the share of the microbatches that visit it (the rho "
               "rule of planning/rho.py; without: --unscaled)")
    if run.outer and o.steps < o.inner_steps:
        yield (f"warning: {o.steps} steps are fewer than --inner-steps {o.inner_steps}: replicas never "
               "synchronise")


# The tokens of a step, all replicas together, that the rates of the NoLoCo paper's models are for.
STEP_TOKENS = dict(small=500_000, medium=1_000_000, large=2_000_000)


def settings(o, origins, rate):
    """Tokens of a step, the inner rate and the outer step: what a model's row brings along unasked. rate: the
    one of that row."""
    tokens = len(origins) * o.batch * o.seq_len                 # of one microbatch each
    yield (f"{o.steps} steps of {o.microbatches * tokens // len(origins)} tokens per origin, "
           f"{o.microbatches * tokens} in all; peak rate {o.lr:g}, beta2 {o.beta2:g}"
           + ", Muon for the layers' matrices" * (o.optimizer == "muon"))
    wanted = STEP_TOKENS.get(o.model, 0)
    fitting = max(1, round(wanted / tokens))
    if wanted and o.lr == rate and fitting != o.microbatches:
        yield (f"warning: the rate of --model {o.model} is the paper's for {wanted / 1e6:g}M tokens a step, "
               f"all origins together: --microbatches {fitting} gives as many")
    if o.inner_steps:
        yield (f"outer step every {o.inner_steps} steps, alpha {o.alpha}, beta {o.beta}, gamma {o.gamma}, "
               f"weights travel in {o.wire}")


class Log:
    """run: a train.Run. Only rank 0 writes; all tell it their numbers."""

    def __init__(self, run):
        self.run, self.o, self.job = run, run.o, run.job
        self.file = run.folder / "metrics.jsonl"
        self.heldout = None
        self.latest = {}                        # rank: its last row, also of those that answer no longer
        if self.job.rank == 0:
            replace(run.folder / "config.json", json.dumps(vars(run.o), indent=1))
            replace(self.file, "".join(line + "\n" for line in self.kept()))
            print(f"{run.folder}{f', from step {run.step}' if run.step else ''}")
        self.bar = tqdm(total=self.o.steps, initial=run.step, disable=self.job.rank != 0, unit="step",
                        dynamic_ncols=True)
        run.meter.go_on()

    def kept(self):
        """The lines up to the checkpoint; the others come again. A crash may have cut one short."""
        if not self.run.step or not self.file.exists():
            return
        for line in self.file.read_text().splitlines():
            with contextlib.suppress(ValueError):
                if json.loads(line)["step"] <= self.run.step:
                    yield line

    def progress(self, loss, home):
        if self.run.step % 10 == 0 or self.run.step == 1:
            heldout = f", held-out {self.heldout:.3f}" if self.heldout else ""
            self.bar.set_postfix_str(f"loss {float(loss) / max(1, home):.3f}{heldout}", refresh=False)
        self.bar.update(self.run.step - self.bar.n)

    def row(self, heldout):
        """This rank's numbers."""
        run, meter = self.run, self.run.meter
        waits = meter.waits + (run.average.waits if run.average else [])
        row = dict(loss=float(meter.loss), tokens=meter.tokens, heldout=heldout, seen=meter.seen,
                   syncs=len(waits), waited=sum(waits), longest=max(waits, default=0.0),
                   skipped=meter.skipped, norm=meter.norm, sync=meter.sync + sent(run),
                   pipeline=meter.pipeline + run.pipeline.bytes_sent,
                   bad=run.reader.bad_lines if run.reader else 0,
                   iteration=sorted(meter.iterations)[len(meter.iterations) // 2],
                   simulated=run.routes.makespan(), **counts(run))
        meter.loss, meter.tokens, meter.iterations = 0.0, 0, []
        return row

    def report(self, row, moment):
        """One line of metrics.jsonl from every rank's row."""
        replicas = next(ranks for ranks in self.run.routes.living() if self.job.rank in ranks)
        key = f"spread/{self.run.stage}/{moment}"
        row["spread"], row["weights"] = weight_spread(self.run.theta, replicas[:64], self.job, key)
        rows = self.job.collect(f"row/{moment}", row)
        if self.job.rank == 0:
            self.latest.update(rows)
            self.write(self.line(rows), self.job.news())

    def line(self, rows):
        run = self.run
        origins = [row for row in rows.values() if row["tokens"]]
        heldout = [row["heldout"] for row in rows.values() if row["heldout"] is not None] or [math.nan]

        def total(key, rows=self.latest):
            return sum(row.get(key, 0) for row in rows.values())

        mean = sum(heldout) / len(heldout)
        spread = total("spread", rows)
        per_byte = run.corpus.bytes_per_token
        iteration = max(row["iteration"] for row in rows.values())
        return dict(
            step=run.step, tokens=total("seen"), seconds=run.meter.seconds,
            tokens_per_second=total("seen") / run.meter.seconds, lr=run.lr,
            train_loss=sum(row["loss"] for row in origins) / max(1, sum(row["tokens"] for row in origins)),
            heldout_loss=mean, heldout_min=min(heldout), heldout_max=max(heldout),
            perplexity=perplexity(mean),
            heldout_nats_per_byte=per_byte and mean / per_byte,
            weight_spread=math.sqrt(max(spread, 0.0) / max(1, total("weights", rows))),
            gradient_norm=total("norm", rows) / len(rows), skipped_steps=total("skipped"),
            lost_microbatches=total("lost"), steps_alone=total("alone"), bad_lines=total("bad"),
            ranks=len(rows), sync_seconds=total("waited") / max(1, total("syncs")),
            sync_seconds_longest=max(row["longest"] for row in self.latest.values()),
            sync_bytes=total("sync"), pipeline_bytes=total("pipeline"),
            iteration_seconds=iteration / run.routes.pace, simulated_seconds=rows[0]["simulated"])

    def write(self, line, news):
        for event in news:
            told = [f"{key} {value}" for key, value in event.items() if value not in ("", None)]
            self.bar.write(event.get("line") or ", ".join(told), file=sys.stdout)
        with open(self.file, "a") as file:
            file.writelines(json.dumps(row) + "\n" for row in [*news, line])
        self.heldout = line["heldout_loss"]
        planned = line["simulated_seconds"]
        took = f", iteration {line['iteration_seconds']:.4g} s, simulated {planned:.4g} s" if planned else ""
        self.bar.write(
            f"step {line['step']}: held-out {self.heldout:.4f}, train {line['train_loss']:.4f}, "
            f"weight spread {line['weight_spread']:.2e}, sent {line['sync_bytes'] / 1e6:.1f} MB to "
            f"synchronise + {line['pipeline_bytes'] / 1e6:.1f} MB in the pipeline, "
            f"{line['tokens_per_second']:.0f} tokens/s{took}",
            file=sys.stdout)

    def close(self):
        self.bar.close()

    def summary(self):
        self.close()
        if self.job.rank == 0:
            print(f"kept in         {self.run.folder}")
            print("\n".join(last_lines(json.loads(self.file.read_text().splitlines()[-1]))))


def last_lines(line):
    per_byte = line["heldout_nats_per_byte"]
    bytes_ = f", {per_byte:.4f} nats per byte" if per_byte else ""
    yield (f"held-out loss   {line['heldout_loss']:.4f} nats per token{bytes_} (replicas "
           f"{line['heldout_min']:.4f} to {line['heldout_max']:.4f}), perplexity "
           f"{line['perplexity']:.3f} per token")
    yield f"weight spread   {line['weight_spread']:.3e} over the replicas of a stage"
    yield (f"bytes sent      {line['sync_bytes'] / 1e6:.1f} MB to synchronise, "
           f"{line['pipeline_bytes'] / 1e6:.1f} MB in the pipeline, all ranks")
    yield (f"speed           {line['tokens_per_second']:.0f} tokens/s, {line['seconds']:.0f} s of training, "
           "evaluation not counted")
    if line["skipped_steps"]:
        yield (f"skipped         {line['skipped_steps']:.0f} optimizer steps with a gradient that was not "
               "finite")
    if line["lost_microbatches"]:
        yield f"lost            {line['lost_microbatches']:.0f} microbatches with ranks that died"
    if line["steps_alone"]:
        yield (f"alone           {line['steps_alone']:.0f} outer steps that a replica did without any "
               "partner, all replicas together")
    if line["bad_lines"]:
        yield (f"bad lines       {line['bad_lines']:.0f} lines of the data were no JSON object with a text, "
               "or broke off")
