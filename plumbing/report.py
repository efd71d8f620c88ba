"""What a run says: first lines, progress bar, runs/NAME/metrics.jsonl (docs/metrics.md), last lines."""
import contextlib
import json
import math
import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta

from tqdm import tqdm

from model import count_parameters
from gossip.window import gamma_bound
from plumbing.options import gamma_of

# What a rank counts over the whole run. A checkpoint keeps it; metrics.jsonl has the sum over the ranks.
COUNTS = ("tokens", "skipped_steps", "lost_microbatches", "steps_alone", "sync_bytes", "pipeline_bytes")


@dataclass
class Meter:
    """What one rank has measured. `state` is what a checkpoint keeps of it."""
    seconds: float = 0.0        # of training, without evaluations and checkpoints
    syncs: list = field(default_factory=list)           # seconds of each synchronisation
    loss: float = 0.0           # summed since the last report, over `home` tokens
    home: int = 0
    counts: dict = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    norm: float = 0.0           # of the last gradient
    iterations: list = field(default_factory=list)      # seconds of each since the last report
    clock: float = field(default_factory=time.perf_counter)

    def add(self, loss, home, norm, iteration):
        self.loss = self.loss + loss            # a tensor: read at the next report, not at every step
        self.home += home
        self.counts["tokens"] += home
        self.iterations.append(iteration)
        self.norm = norm or 0.0                 # None: no gradient reached this rank
        self.counts["skipped_steps"] += not math.isfinite(self.norm)

    def synchronise(self, function, *args):
        """function(*args), an outer step or an all-reduce; it returns something false if it did nothing."""
        start = time.perf_counter()
        if found := function(*args):
            self.syncs.append(time.perf_counter() - start)
        return found

    def pause(self):
        self.seconds += time.perf_counter() - self.clock

    def go_on(self):
        self.clock = time.perf_counter()

    def state(self, run):
        return dict(seconds=self.seconds, syncs=self.syncs, loss=float(self.loss), home=self.home,
                    counts=counts(run))


def counts(run):
    """This rank's COUNTS: those of its meter, and what the parts have counted since this process began."""
    now = dict(lost_microbatches=run.pipeline.lost, steps_alone=getattr(run.outer, "alone", 0),
               sync_bytes=sum(part.bytes_sent for part in (run.outer, run.average) if part),
               pipeline_bytes=run.pipeline.bytes_sent)
    return {key: n + now.get(key, 0) for key, n in run.meter.counts.items()}


@contextlib.contextmanager
def atomic(file):
    """The file, open to write bytes; it changes as a whole or not at all."""
    half = file.with_suffix(".tmp")
    try:
        with open(half, "wb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        os.replace(half, file)
    finally:
        half.unlink(missing_ok=True)            # it is there only after an error


def replace(file, text):
    with atomic(file) as out:
        out.write(text.encode())


def weight_spread(theta, replicas, job, key):
    """(sum of (theta - the replicas' mean)^2, number of weights) of this rank; (0, 0) where it has no peers.

    theta: a vector. The mean is taken in float64, where that of equal replicas is exact: their spread is 0.
    A replica that is lost on the way leaves the pieces before.
    """
    squares, weights = 0.0, 0
    if job.rank not in replicas or len(replicas) == 1:
        return squares, weights
    with contextlib.suppress(RuntimeError):
        members, job.link = job.meet(key, replicas)         # the link is kept: peers may still read from it
        for piece in theta.split(1 << 20) if job.link else []:
            own = piece.cpu().double()
            mean = own.clone()
            job.link.allreduce([mean]).wait(timedelta(seconds=job.patience))
            squares += float((own - mean / len(members)).square().sum())
            weights += own.numel()
    return squares, weights


# ---- before the run

def banner(run):
    """Yields what runs, a line each, then warnings: for the first rank, which has config.json."""
    o, job, corpus = run.o, run.job, run.corpus
    whole, inner = (n / 1e6 for n in count_parameters(run.config))
    tokens = o.microbatches * o.batch * o.seq_len
    yield (f"{o.method}, stages {o.stages}, {o.routing} routing, {job.world} processes on {job.device.type}"
           f"{' with NCCL' if job.nccl else ''}, {o.dtype}")
    yield f"{o.model} model: {whole:.2f}M parameters, {inner:.2f}M without embedding and head"
    yield (f"{o.steps} steps of {tokens} tokens per origin, {tokens * len(run.stages[0])} in all; "
           f"{o.optimizer}, peak rate {o.lr:g}, beta2 {o.beta2:g}")
    if o.inner_steps:
        yield (f"outer step every {o.inner_steps} steps, alpha {o.alpha}, beta {o.beta}, "
               f"gamma {gamma_of(o)}, weights travel in {o.wire}{f' for {o.delay} steps' if o.delay else ''}")
    yield (f"{sum(map(len, corpus.train)):,} training tokens, {len(corpus.heldout):,} held-out tokens, "
           f"corpus {corpus.digest}")
    sizes = [len(ranks) for ranks in run.stages if len(ranks) > 1 and o.method == "noloco"]
    bound = min((gamma_bound(o.alpha, o.group_size, n) for n in sizes), default=math.inf)
    if sizes and not 0 < gamma_of(o) < bound:
        yield f"warning: gamma {gamma_of(o)} is outside 0 < gamma < {bound:.3f}: replicas may drift apart"
    if run.outer and 2 * o.delay > o.inner_steps > 1:
        yield f"warning: --delay {o.delay} is more than half of --inner-steps: replicas come together slowly"
    if run.outer and o.steps < o.inner_steps:
        yield f"warning: {o.steps} steps are fewer than --inner-steps: replicas never synchronise"


# ---- during the run

# How the first rank says a number of metrics.jsonl that is not zero: at each evaluation, and at the end.
STEP = dict(
    heldout_loss="held-out {:.4f}", train_loss="train {:.4f}", tokens_per_second="{:.0f} tokens/s",
    weight_spread="weight spread {:.2e}", iteration_seconds="iteration {:.4g} s",
    simulated_seconds="simulated {:.4g} s")
LAST = dict(
    heldout_loss="held-out loss   {:.4f} nats per token",
    heldout_nats_per_byte="                {:.4f} nats per byte",
    perplexity="                {:.3f} perplexity per token",
    weight_spread="weight spread   {:.3e} over a stage's replicas, after an outer step if due",
    sync_bytes="bytes sent      {:,} to synchronise, all ranks",
    pipeline_bytes="bytes sent      {:,} in the pipeline, all ranks",
    seconds="training        {:.0f} s, without evaluations",
    held="                {:.1%} of it held by synchronisation, mean over ranks",
    skipped_steps="skipped         {} optimizer steps with a gradient that was not finite",
    lost_microbatches="lost            {} microbatches with ranks that died",
    steps_alone="alone           {} outer steps that a replica did without any partner")


def say(line, words):
    return [text.format(line[key]) for key, text in words.items() if line[key]]


class Log:
    """The run's progress bar and metrics. run: a train.Run.

    Only the first rank writes; all ranks tell it their numbers.
    """

    def __init__(self, run):
        self.run, self.o, self.job = run, run.o, run.job
        self.file = run.folder / "metrics.jsonl"
        self.latest = {}                        # rank: its last row, also of those that answer no longer
        if self.job.leads:
            replace(run.folder / "config.json", json.dumps(vars(run.o), indent=1))
            replace(self.file, "".join(line + "\n" for line in self.kept()))
            print(f"{run.folder}{f', from step {run.step}' if run.step else ''}")
        self.bar = tqdm(total=self.o.steps, initial=run.step, disable=not self.job.leads, unit="step",
                        dynamic_ncols=True)
        run.meter.go_on()

    def kept(self):
        """The lines up to the checkpoint; training writes the later ones again."""
        old = self.run.step and self.file.exists()
        for number, line in enumerate(self.file.read_text(errors="replace").splitlines() if old else [], 1):
            try:
                if json.loads(line)["step"] <= self.run.step:
                    yield line
            except (ValueError, KeyError, TypeError):       # a crash may have cut the last one short
                print(f"warning: line {number} of {self.file} is damaged and left out: {line[:60]}")

    def progress(self, loss, home):
        if self.run.step % 10 == 0 or self.run.step == 1:
            self.bar.set_postfix_str(f"loss {float(loss) / max(1, home):.3f}", refresh=False)
        self.bar.update(self.run.step - self.bar.n)

    def own_row(self, heldout):
        """This rank's numbers since the last evaluation, or so far. heldout: its loss (None: no origin)."""
        meter = self.run.meter
        row = dict(loss=float(meter.loss), home=meter.home, heldout=heldout, norm=meter.norm,
                   syncs=len(meter.syncs), waited=sum(meter.syncs), **counts(self.run),
                   iteration=statistics.median_high(meter.iterations),
                   simulated=self.run.routes.makespan())      # before a new plan is made
        meter.loss, meter.home, meter.iterations = 0.0, 0, []
        return row

    def report(self, row, moment):
        """One line of metrics.jsonl, and one on the screen, from every rank's row. Events come before it."""
        replicas = next(ranks for ranks in self.run.routes.living() if self.job.rank in ranks)
        key = f"spread/{self.run.stage}/{moment}"
        row["squares"], row["weights"] = weight_spread(self.run.theta, replicas[:64], self.job, key)
        rows = self.job.collect(f"row/{moment}", row)
        if not self.job.leads:
            return
        self.latest.update(rows)
        line, events = self.line_of(rows, self.latest), self.job.news()
        with open(self.file, "a") as file:
            file.writelines(json.dumps(found) + "\n" for found in [*events, line])
        numbers = [*say(line, STEP), f"{line['ranks']} of {self.job.world} ranks"]
        told = [*(event["line"] for event in events), f"step {line['step']}: {', '.join(numbers)}"]
        self.bar.write("\n".join(told), file=sys.stdout)

    def line_of(self, rows, latest):
        """The line of metrics.jsonl. rows: {rank: its row} of the ranks that answered; latest: of all."""
        now, ever = ({key: [row[key] for row in found.values()] for key in found[self.job.rank]}
                     for found in (rows, latest))
        run, seconds, per_byte = self.run, self.run.meter.seconds, self.run.corpus.bytes_per_token
        heldout = [loss for loss in now["heldout"] if loss is not None] or [math.nan]
        mean, total = statistics.fmean(heldout), {key: sum(ever[key]) for key in COUNTS}
        return dict(
            step=run.step, seconds=seconds, lr=run.lr, ranks=len(now["loss"]), corpus=run.corpus.digest,
            train_loss=sum(now["loss"]) / max(1, sum(now["home"])),
            heldout_loss=mean, heldout_min=min(heldout), heldout_max=max(heldout),
            perplexity=math.exp(min(mean, 700)), heldout_nats_per_byte=per_byte and mean / per_byte,
            weight_spread=math.sqrt(sum(now["squares"]) / max(1, sum(now["weights"]))),
            gradient_norm=statistics.fmean(now["norm"]),
            held=statistics.fmean(ever["waited"]) / seconds, held_max=max(ever["waited"]) / seconds,
            sync_seconds=sum(ever["waited"]) / max(1, sum(ever["syncs"])),
            iteration_seconds=max(now["iteration"]) / run.routes.pace, simulated_seconds=now["simulated"][0],
            tokens_per_second=total["tokens"] / seconds, **total)

    def finish(self):
        """The last lines, from the last line of metrics.jsonl."""
        self.bar.close()
        if self.job.leads:
            line = json.loads(self.file.read_text().splitlines()[-1])
            self.job.say([*say(line, LAST), f"kept in {self.run.folder}"])
