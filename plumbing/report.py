"""What a run says: first lines, progress bar, metrics.jsonl (docs/metrics.md), last lines."""
import json
import math
import statistics
import sys
import time
from dataclasses import dataclass, field
from itertools import chain

import torch
from tqdm import tqdm

from model import count_parameters
from gossip.window import gamma_bound
from plumbing.files import replace
from plumbing.options import gamma_of
from plumbing.plans import KeptPlans
from plumbing.spread import whole_spread

# What a rank counts over the whole run. A checkpoint keeps it; metrics.jsonl has the ranks' sum.
COUNTS = ("tokens", "skipped_steps", "lost_microbatches", "steps_alone", "sync_bytes", "log_bytes",
          "pipeline_bytes")


@dataclass
class Meter:
    """What one rank has measured. `state` is what a checkpoint keeps of it."""
    seconds: float = 0.0        # of training, without evaluations and checkpoints
    syncs: list = field(default_factory=list)           # seconds of each synchronisation
    loss: float = 0.0           # summed since the last report, over `home` tokens
    home: int = 0
    counts: dict = field(default_factory=dict)          # the numbers of COUNTS
    norm: float = None          # of the last gradient (None: none reached this rank)
    iterations: list = field(default_factory=list)      # seconds of each since the last report
    clock: float = field(default_factory=time.perf_counter)

    def __post_init__(self):
        # A checkpoint of an older program may lack some.
        self.counts = dict.fromkeys(COUNTS, 0) | self.counts

    def add(self, loss, home, norm, iteration):
        """Count one step of this rank. norm: None if no gradient reached it."""
        self.loss = self.loss + loss        # a tensor: read at the next report, not at every step
        self.home += home
        self.counts["tokens"] += home
        self.iterations.append(iteration)
        self.norm = norm
        if norm is not None and not math.isfinite(norm):
            self.counts["skipped_steps"] += 1

    def add_sync(self, seconds):
        """Count an outer step or an all-reduce that held this rank for so long."""
        self.syncs.append(seconds)

    def pause(self):
        """Evaluations and checkpoints do not count towards `seconds`."""
        self.seconds += time.perf_counter() - self.clock

    def go_on(self):
        self.clock = time.perf_counter()

    def elapsed(self):
        """Seconds of training so far, while the clock runs."""
        return self.seconds + time.perf_counter() - self.clock

    def state(self, run):
        return dict(seconds=self.seconds, syncs=self.syncs, loss=float(self.loss), home=self.home,
                    counts=counts(run))


def counts(run):
    """This rank's COUNTS: its meter's, and what the parts have counted since this process began."""
    found = dict(run.meter.counts)
    found["lost_microbatches"] += run.pipeline.lost
    found["pipeline_bytes"] += run.pipeline.bytes_sent
    if run.outer:
        found["sync_bytes"] += run.outer.bytes_sent
        found["steps_alone"] += getattr(run.outer, "alone", 0)      # of survive/
    if run.average:
        found["sync_bytes"] += run.average.bytes_sent
    return found


# ---- before the run


def banner(run):
    """Yields what runs, a line each, then warnings: for the first rank, which has config.json."""
    o, corpus = run.o, run.corpus
    parameters, inner_parameters = count_parameters(run.config)
    tokens = o.microbatches * o.batch * o.seq_len
    over_nccl = " with NCCL" if run.job.nccl else ""
    yield (f"{o.method}, stages {o.stages}, {o.routing} routing, {run.job.world} processes on "
           f"{run.job.device.type}{over_nccl}, {o.dtype}")
    yield (f"{o.model} model: {parameters / 1e6:.2f}M parameters, {inner_parameters / 1e6:.2f}M "
           "without embedding and head")
    yield (f"{o.steps} steps of {tokens} tokens per origin, {tokens * len(run.stages[0])} in all; "
           f"{o.optimizer}, peak rate {o.lr:g}, beta2 {o.beta2:g}")
    yield from who_synchronises(o, run.stages)
    training_tokens = sum(map(len, corpus.train))
    yield (f"{training_tokens:,} training tokens, {len(corpus.heldout):,} held-out tokens, corpus "
           f"{corpus.digest}")
    if o.steps < o.warmup:
        yield (f"warning: {o.steps} steps end within the warm-up of {o.warmup}: the rate reaches "
               f"{o.steps / o.warmup:.0%} of its peak (--warmup)")
    yield from outer_warnings(run)


def who_synchronises(o, stages):
    """Yields how replicas come together, or that they do not: nobody should mistake the one for the
    other."""
    alone = [s for s, ranks in enumerate(stages) if len(ranks) == 1]
    if len(alone) == len(stages):
        yield (f"no other replicas: nothing is synchronised, {o.method} trains one model alone "
               "(more: torchrun --nproc-per-node, --stages)")
        return
    if o.method == "local":
        yield "replicas train alone: --method local never synchronises them"
        return
    if o.method == "ddp":
        yield f"gradients are averaged over replicas at every step, in {o.wire}"
    if o.inner_steps:
        travel = ""
        if o.delay:
            travel = f" for {o.delay} {'step' if o.delay == 1 else 'steps'}"
        if o.fragments > 1:
            travel += f", in {o.fragments} fragments by turns"
        yield (f"outer step every {o.inner_steps} steps, alpha {o.alpha}, beta {o.beta}, "
               f"gamma {gamma_of(o)}, weights travel in {o.wire}{travel}")
    if alone:
        yield f"stages {alone} have one replica each, which synchronises with nobody"


def outer_warnings(run):
    """Yields a line for each setting of the outer step that may keep replicas apart."""
    o = run.o
    sizes = [len(ranks) for ranks in run.stages if len(ranks) > 1]
    if not (run.outer and sizes):
        return
    if o.method == "noloco":
        if min(sizes) < o.group_size:
            yield (f"warning: --group-size {o.group_size} is more than the {min(sizes)} replicas "
                   "of a stage: there all meet at each outer step")
        bound = min(gamma_bound(o.alpha, o.group_size, n) for n in sizes)
        if not 0 < gamma_of(o) < bound:
            yield (f"warning: gamma {gamma_of(o)} is outside 0 < gamma < {bound:.3f}: replicas may "
                   "drift apart")
    if 2 * o.delay > o.inner_steps > 1:
        yield (f"warning: --delay {o.delay} is more than half of --inner-steps: replicas come "
               "together slowly")
    # Messages leave at step m, with K fragments from step m / K on. They are merged D steps later.
    first = o.inner_steps + o.delay
    if o.fragments > 1:
        first = o.inner_steps // o.fragments + o.delay
    if o.steps < first:
        yield (f"warning: {o.steps} steps end before the first merge, at step {first}: replicas "
               "never synchronise")
    elif o.steps < o.inner_steps + o.delay:
        yield (f"warning: {o.steps} steps end before step {o.inner_steps + o.delay}, when each "
               "fragment has met: some weights never synchronise")


# ---- during the run

# How the first rank says a number of metrics.jsonl that is neither null nor zero: at each
# evaluation, and at the end.
STEP = dict(
    heldout_loss="held-out {:.4f}", train_loss="train {:.4f}", tokens_per_second="{:.0f} tokens/s",
    weight_spread="weight spread {:.2e}", iteration_seconds="iteration {:.4g} s",
    simulated_seconds="simulated {:.4g} s")
LAST = dict(
    heldout_loss="held-out loss   {:.4f} nats per token",
    heldout_nats_per_byte="                {:.4f} nats per byte",
    perplexity="                {:.3f} perplexity per token",
    merged_loss="merged model    {:.4f} nats per token: one model, the mean of all replicas",
    merged_nats_per_byte="                {:.4f} nats per byte",
    merged_perplexity="                {:.3f} perplexity per token",
    weight_spread="weight spread   {:.3e} over a stage's replicas, after an outer step if due",
    sync_bytes="bytes sent      {:,} to synchronise, all ranks",
    pipeline_bytes="bytes sent      {:,} in the pipeline, all ranks",
    log_bytes="bytes sent      {:,} to compare weights for the log, all ranks",
    seconds="training        {:.0f} s, without evaluations",
    held="                {:.1%} of it held by synchronisation, mean over ranks",
    gpu_bytes="GPU memory      {:,} bytes at most, the rank with most",
    skipped_steps="skipped         {} optimizer steps with a gradient that was not finite",
    lost_microbatches="lost            {} microbatches with ranks that died",
    steps_alone="alone           {} outer steps that a replica did without any partner")
PACE = 20       # steps by whose pace the first rank says how long the run will take
FIRST = 5       # of these, that do not count: they connect, and are slower
LONG = 100      # steps of a run for which it says so


def say(line, words):
    """What was measured, in words. Zeros are left out, but for a spread: replicas may be equal."""
    told = []
    for key, text in words.items():
        if line[key] or (key == "weight_spread" and line[key] == 0):
            told.append(text.format(line[key]))
    return told


def say_time(seconds):
    """About how long, in words."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


class Log:
    """The run's progress bar and metrics. run: a train.Run.

    Only the first rank writes; all ranks tell it their numbers.
    """

    def __init__(self, run):
        self.run = run
        self.o, self.job = run.o, run.job
        self.file = run.folder / "metrics.jsonl"
        self.latest = {}                # rank: its last row, also of those that answer no longer
        self.began = run.step
        self.paced_from = None          # (steps, seconds of training) after about FIRST steps
        self.pace_is_said = False
        self.plans = KeptPlans(run)
        self.losses = {}                # what the bar says: its words, and the number
        if self.job.leads:
            replace(run.folder / "config.json", json.dumps(vars(run.o), indent=1))
            replace(self.file, "".join(line + "\n" for line in self.kept()))
            resumed = f", from step {run.step}" if run.step else ""
            print(f"{run.folder}{resumed}")
        self.bar = tqdm(total=self.o.steps, initial=run.step, disable=not self.job.leads,
                        unit="step", dynamic_ncols=True)
        run.meter.go_on()

    def kept(self):
        """Yields the lines up to the checkpoint; training writes the later ones again."""
        if not (self.run.step and self.file.exists()):
            return
        lines = self.file.read_text(errors="replace").splitlines()
        for number, line in enumerate(lines, 1):
            try:
                if json.loads(line)["step"] <= self.run.step:
                    yield line
            except (ValueError, KeyError, TypeError):   # a crash may have cut the last one short
                print(f"warning: line {number} of {self.file} is damaged and left out: {line[:60]}")

    def progress(self, loss, home):
        """Move the bar to this step."""
        step = self.run.step
        if step % 10 == 0 or step == 1:
            self.show("loss", float(loss) / max(1, home))
        self.bar.update(step - self.bar.n)
        self.plans.keep()
        self.say_pace()

    def show(self, name, loss):
        """Let the bar say a loss beside the others; None takes it away."""
        self.losses[name] = loss
        known = [f"{name} {loss:.3f}" for name, loss in self.losses.items() if loss is not None]
        self.bar.set_postfix_str(", ".join(known), refresh=False)

    def say_pace(self):
        """Say once how long this run will take: a busy machine may need much longer than others."""
        done = self.run.step - self.began
        if self.pace_is_said or done < FIRST:
            return
        if self.paced_from is None:
            self.paced_from = done, self.run.meter.elapsed()
        first, seconds = self.paced_from
        if done < PACE or done == first:
            return
        self.pace_is_said = True
        left = self.o.steps - self.run.step
        if self.job.leads and left >= LONG - PACE:
            pace = (self.run.meter.elapsed() - seconds) / (done - first)
            line = (f"step {self.run.step}: the other {left} steps take about "
                    f"{say_time(left * pace)} at this pace, without evaluations")
            self.bar.write(line, file=sys.stdout)

    def take_row(self, heldout):
        """This rank's numbers since the last evaluation, which begin anew here, and those so far.

        heldout: the loss of each pipeline of this origin (empty: no origin).
        """
        meter = self.run.meter
        plan = self.run.routes.in_force()
        row = dict(loss=float(meter.loss), home=meter.home, heldout=heldout, norm=meter.norm,
                   syncs=len(meter.syncs), waited=sum(meter.syncs),
                   iteration=statistics.median_high(meter.iterations),
                   simulated=plan and plan["makespan"], gpu=gpu_bytes(self.job.device))
        meter.loss, meter.home = 0.0, 0
        meter.iterations = []
        return row

    def report(self, row, moment):
        """Write one line of metrics.jsonl, and one on the screen, from every rank's row.

        row: what `take_row` and `compare` (plumbing/spread.py) returned. Events go before the line.
        """
        rows = self.job.collect(f"row/{moment}", row | counts(self.run))
        if not self.job.leads:
            return
        self.latest.update(rows)
        line = self.line_of(rows, self.latest)
        events = self.job.news()
        with open(self.file, "a") as file:
            file.writelines(json.dumps(found) + "\n" for found in [*events, line])
        numbers = say(line, STEP)
        if line["weight_spread"] is None and line["compared"]:
            numbers.append(f"weight spread unknown ({line['compared']} ranks came to compare)")
        numbers.append(f"{line['ranks']} of {self.job.world} ranks")
        self.show("held-out", line["heldout_loss"])
        told = [event["line"] for event in events]
        told.append(f"step {line['step']}: {', '.join(numbers)}")
        self.bar.write("\n".join(told), file=sys.stdout)

    def line_of(self, rows, latest):
        """The line of metrics.jsonl. rows: {rank: its row} of who answered; latest: of all."""
        run = self.run
        seconds = run.meter.seconds
        now = by_column(rows)
        ever = by_column(latest)
        waited = sum(ever["waited"])
        syncs = sum(ever["syncs"])
        home = sum(now["home"])
        pipelines = list(chain.from_iterable(now["heldout"]))
        on_gpus = [most for most in now["gpu"] if most is not None]
        heldout = mean(pipelines)
        spread, compared = whole_spread(rows, run.stages)
        # An average over some of the replicas is no model that anybody keeps.
        merged = None if spread is None else mean(list(chain.from_iterable(now["merged"])))
        return dict(
            step=run.step, seconds=seconds, lr=run.lr, ranks=len(rows), corpus=run.corpus.digest,
            train_loss=sum(now["loss"]) / home if home else None,
            heldout_loss=heldout, heldout_min=min(pipelines, default=None),
            heldout_max=max(pipelines, default=None),
            perplexity=perplexity(heldout), heldout_nats_per_byte=self.per_byte(heldout),
            merged_loss=merged, merged_perplexity=perplexity(merged),
            merged_nats_per_byte=self.per_byte(merged),
            weight_spread=spread, compared=compared,
            gradient_norm=mean([norm for norm in now["norm"] if norm is not None]),
            held=statistics.fmean(ever["waited"]) / seconds, held_max=max(ever["waited"]) / seconds,
            sync_seconds=waited / syncs if syncs else None,
            iteration_seconds=max(now["iteration"]),
            simulated_seconds=now["simulated"][0],
            tokens_per_second=sum(ever["tokens"]) / seconds,
            gpu_bytes=max(on_gpus, default=None),
            **{key: sum(ever[key]) for key in COUNTS})

    def per_byte(self, loss):
        """Nats per byte of the held-out text (None: where only tokens are known, or no loss)."""
        bytes_per_token = self.run.corpus.bytes_per_token
        if loss is None or not bytes_per_token:
            return None
        return loss / bytes_per_token

    def finish(self):
        """The last lines, from the last line of metrics.jsonl."""
        self.bar.close()
        if self.job.leads:
            line = json.loads(self.file.read_text().splitlines()[-1])
            folder = self.run.folder
            self.job.say([*say(line, LAST),
                          f"kept in {folder}; a picture: python -m tools.plot {folder}"])


def gpu_bytes(device):
    """The most bytes of a GPU's memory that this rank has held. None on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def by_column(rows):
    """{name: [its value in each row]} of {rank: {name: value}}."""
    found = {}
    for row in rows.values():
        for name, value in row.items():
            found.setdefault(name, []).append(value)
    return found


def mean(numbers):
    """None of no numbers: no pipeline could be evaluated, or no gradient came."""
    return statistics.fmean(numbers) if numbers else None


def perplexity(loss):
    return None if loss is None else math.exp(min(loss, 700))
