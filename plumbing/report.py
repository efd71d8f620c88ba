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

import torch
from tqdm import tqdm

from model import count_parameters
from plumbing.window import gamma_bound


@dataclass
class Meter:
    """What one rank has counted so far. The bytes that others count are taken over at each report."""
    seconds: float = 0.0        # of training; evaluations and checkpoints do not count
    held: float = 0.0           # seconds of these for which synchronisation held this rank
    seen: int = 0               # tokens of this origin
    skipped: int = 0            # optimizer steps left out: the gradient was not finite
    sync: int = 0               # bytes sent to synchronise, before this process began
    pipeline: int = 0           # bytes sent in the pipeline, likewise
    loss: float = 0.0           # summed since the last report, over `tokens`
    tokens: int = 0
    norm: float = 0.0           # of the last gradient
    iterations: list = field(default_factory=list)      # seconds of each since the last report
    syncs: list = field(default_factory=list)           # seconds of each synchronisation of this process
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

    def synchronise(self, function, *args):
        """function(*args), an outer step or an all-reduce; it returns something false if it did nothing."""
        start = time.perf_counter()
        found = function(*args)
        if found:
            self.syncs.append(time.perf_counter() - start)
            self.held += self.syncs[-1]
        return found

    def pause(self):
        self.seconds += time.perf_counter() - self.clock

    def go_on(self):
        self.clock = time.perf_counter()

    def state(self):
        return dict(seconds=self.seconds, held=self.held, seen=self.seen, skipped=self.skipped,
                    loss=float(self.loss), tokens=self.tokens)


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
    except BaseException:
        with contextlib.suppress(OSError):
            half.unlink()
        raise


def replace(file, text):
    with atomic(file) as out:
        out.write(text.encode())


def perplexity(loss):
    return math.exp(loss) if loss < 700 else math.inf


def weight_spread(theta, replicas, job, key):
    """(sum over the replicas of |theta - mean|^2, how many weights that are), on the first; (0, 0) on others.

    Each sends its theta there, which subtracts its own d, so that nothing cancels:
    sum |d - mean d|^2 = sum |d|^2 - |sum d|^2 / N.
    """
    if job.rank not in replicas:
        return 0.0, 0
    patience, pieces = timedelta(seconds=job.patience), theta.split(1 << 22)
    try:
        # the link lives on: messages may still be under way
        members, job.link = job.meet(key, replicas) if len(replicas) > 1 else (replicas, None)
        if job.rank in members[:1]:
            return sum(squares(p, members, job.link, patience) for p in pieces), len(members) * theta.numel()
        for piece in pieces if job.link else []:
            job.link.send([piece.cpu()], 0, 0).wait(patience)
    except RuntimeError:        # a replica lost on the way spoils this one
        pass
    return 0.0, 0


def squares(piece, members, link, patience):
    """sum |d|^2 - |sum d|^2 / N of one piece of theta."""
    total, found = torch.zeros_like(piece), 0.0
    other = torch.empty_like(piece, device="cpu")
    for place in range(1, len(members)):
        link.recv([other], place, 0).wait(patience)
        d = other.to(piece.device) - piece
        total += d
        found += float(torch.linalg.vector_norm(d, dtype=torch.float64)) ** 2
    return found - float(torch.linalg.vector_norm(total, dtype=torch.float64)) ** 2 / len(members)


def sent(run):
    """Bytes that this process has sent to synchronise."""
    return sum(part.bytes_sent for part in (run.outer, run.average) if part)


def counts(run):
    """What survive/ counts: microbatches lost, outer steps done alone; with those before a resume."""
    now = dict(lost_microbatches=run.pipeline.lost, steps_alone=getattr(run.outer, "alone", 0))
    return {key: n + run.meter.counts.get(key, 0) for key, n in now.items()}


# ---- before the run

# The tokens of a step, all replicas together, that the rates of the NoLoCo paper's models are for.
STEP_TOKENS = dict(small=500_000, medium=1_000_000, large=2_000_000)


def banner(run, rate):
    """What runs, in a few lines. rate: the inner rate of the model's row."""
    o, job, corpus = run.o, run.job, run.corpus
    layout = "replicas of the whole model"
    if len(o.stages) > 1:
        layout = f"stages {'x'.join(map(str, o.stages))}, {o.routing} routing"
    over = f" over {'NCCL' if job.nccl else 'Gloo'}" if job.world > 1 else ""
    yield f"{o.method}, {layout}, {job.world} processes on {job.device.type}{over}"
    whole, inner = count_parameters(run.config)
    yield (f"{o.init_from or o.model} model: {whole / 1e6:.2f}M parameters, {inner / 1e6:.2f}M without "
           f"embedding and head; {o.dtype}")
    yield from settings(o, run.stages[0], rate)
    size = f" ({corpus.bytes_per_token:.3f} bytes each)" if o.tokenizer and corpus.bytes_per_token else ""
    yield (f"{sum(map(len, corpus.train)) / 1e6:.1f}M training tokens, {len(corpus.heldout) / 1e6:.2f}M "
           f"held-out tokens{size}, corpus {corpus.digest}")
    if corpus.undecodable:
        yield (f"warning: {corpus.undecodable} bytes of the text are no UTF-8: replacement characters stand "
               "for them; convert the text first, e.g. with iconv")
    replicas = [len(ranks) for ranks in run.stages if len(ranks) > 1 and o.method == "noloco"]
    bounds = [gamma_bound(o.alpha, o.group_size, n) for n in replicas]
    if bounds and not 0 < o.gamma < min(bounds):
        yield (f"warning: gamma {o.gamma} is outside 0 < gamma < {min(bounds):.3f} (docs/stability.md): "
               "replicas may drift apart")
    if run.step and (before := json.loads((run.folder / "config.json").read_text())["steps"]) != o.steps:
        yield (f"warning: --steps {o.steps}, until now {before}: from step {run.step} on the cosine of the "
               "learning rate is stretched to that")
    if o.skip and o.routing != "dtfm" and not o.unscaled:
        yield "evaluated under the rho rule of planning/rho.py (--unscaled: without)"
    if run.outer and o.steps < o.inner_steps:
        yield (f"warning: {o.steps} steps are fewer than --inner-steps {o.inner_steps}: replicas never "
               "synchronise")


def settings(o, origins, rate):
    """Tokens of a step, the inner rate and the outer step, which a model's row sets unasked."""
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


# ---- during the run

# Of a rank's row, and over all ranks of a line.
SUMS = ("tokens", "skipped_steps", "lost_microbatches", "steps_alone", "sync_bytes", "pipeline_bytes")
# What rank 0 prints of an event.
EVENTS = {
    "leapt": "rank {rank} left out {outer_steps} outer steps from outer step {outer} on: no partner is left",
    "outer step without partners": "rank {rank} did outer step {outer} without ranks {missing} {error}",
    "not finite": "rank {rank} refused the numbers of ranks {refused} in outer step {outer}: not finite",
    "fp32 instead of int8": "rank {rank} sent fp32 instead of int8 in outer step {outer}, to ranks {far}",
    "joined": "rank {rank} joined after outer step {outer} with the weights of rank {given_by}",
    "lost": "rank {rank} lost rank {peer} at step {step}: {error}",
    "dead": "from step {step} on paths go round the dead ranks {ranks}; stages left out: {stages_left_out}",
    "planned anew": "{line}",
}


class Log:
    """The run's progress bar and metrics. run: a train.Run. Only rank 0 writes; all tell it their numbers."""

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
            heldout = f", held-out {self.heldout:.3f}" if self.heldout else ""
            self.bar.set_postfix_str(f"loss {float(loss) / max(1, home):.3f}{heldout}", refresh=False)
        self.bar.update(self.run.step - self.bar.n)

    def own_row(self, heldout):
        """This rank's numbers since the last evaluation, or so far. heldout: its loss (None: no origin)."""
        run, meter = self.run, self.run.meter
        row = dict(loss=float(meter.loss), count=meter.tokens, heldout=heldout, norm=meter.norm,
                   syncs=len(meter.syncs), waited=sum(meter.syncs), longest=max(meter.syncs, default=0.0),
                   held=meter.held / meter.seconds, iteration=statistics.median_high(meter.iterations),
                   tokens=meter.seen, skipped_steps=meter.skipped, **counts(run),
                   sync_bytes=meter.sync + sent(run), pipeline_bytes=meter.pipeline + run.pipeline.bytes_sent,
                   simulated=run.routes.makespan())         # of the plan so far: a new one may follow
        meter.loss, meter.tokens, meter.iterations = 0.0, 0, []
        return row

    def report(self, row, moment):
        """One line of metrics.jsonl, and one on the screen, from every rank's row."""
        replicas = next(ranks for ranks in self.run.routes.living() if self.job.rank in ranks)
        key = f"spread/{self.run.stage}/{moment}"
        row["spread"], row["weights"] = weight_spread(self.run.theta, replicas[:64], self.job, key)
        rows = self.job.collect(f"row/{moment}", row)
        if self.job.rank == 0:
            self.latest.update(rows)
            self.write(self.line_of(list(rows.values()), list(self.latest.values())), self.job.news())

    def line_of(self, rows, latest):
        """The line of metrics.jsonl. rows: of the ranks that answered; latest: of all."""
        run, total = self.run, lambda key, rows=latest: sum(row[key] for row in rows)
        heldout = [row["heldout"] for row in rows if row["heldout"] is not None] or [math.nan]
        mean, per_byte = sum(heldout) / len(heldout), run.corpus.bytes_per_token
        return dict(
            step=run.step, seconds=run.meter.seconds, lr=run.lr, ranks=len(rows), corpus=run.corpus.digest,
            train_loss=total("loss", rows) / max(1, total("count", rows)),
            heldout_loss=mean, heldout_min=min(heldout), heldout_max=max(heldout),
            perplexity=perplexity(mean), heldout_nats_per_byte=per_byte and mean / per_byte,
            weight_spread=math.sqrt(max(total("spread", rows), 0.0) / max(1, total("weights", rows))),
            gradient_norm=total("norm", rows) / len(rows),
            held=total("held") / len(latest), held_max=max(row["held"] for row in latest),
            sync_seconds=total("waited") / max(1, total("syncs")),
            sync_seconds_longest=max(row["longest"] for row in latest),
            iteration_seconds=max(row["iteration"] for row in rows) / run.routes.pace,
            simulated_seconds=rows[0]["simulated"], tokens_per_second=total("tokens") / run.meter.seconds,
            **{key: total(key) for key in SUMS})

    def write(self, line, news):
        """news: events since the last line, each a dict."""
        with open(self.file, "a") as file:
            file.writelines(json.dumps(row) + "\n" for row in [*news, line])
        self.heldout, planned = line["heldout_loss"], line["simulated_seconds"]
        took = f", iteration {line['iteration_seconds']:.4g} s, simulated {planned:.4g} s" if planned else ""
        ranks = f", {line['ranks']} of {self.job.world} ranks" if line["ranks"] < self.job.world else ""
        step = (f"step {line['step']}: held-out {self.heldout:.4f}, train {line['train_loss']:.4f}, "
                f"weight spread {line['weight_spread']:.2e}{self.moment()}, "
                f"sent {line['sync_bytes'] / 1e6:.1f} MB to synchronise + {line['pipeline_bytes'] / 1e6:.1f} "
                f"MB in the pipeline, {line['tokens_per_second']:.0f} tokens/s{took}{ranks}")
        told = [EVENTS.get(event["event"], "{event}").format(**event) for event in news]
        self.bar.write("\n".join([*told, step]), file=sys.stdout)

    def moment(self):
        """Replicas agree then, or nearly so."""
        just_now = self.run.outer and self.run.step % self.o.inner_steps == 0
        return " just after an outer step" if just_now else ""

    def finish(self):
        """The last lines, from the last line of metrics.jsonl."""
        self.bar.close()
        if self.job.rank == 0:
            line = json.loads(self.file.read_text().splitlines()[-1])
            said = [f"kept in         {self.run.folder}", *last_lines(line, self.moment())]
            if line["ranks"] < self.job.world and "TORCHELASTIC_RUN_ID" in os.environ:
                said.append("Training is over. torchrun may wait 300 s for ranks that died; Ctrl-C ends it.")
            self.job.say(said)


def last_lines(line, moment):
    per_byte = line["heldout_nats_per_byte"]
    by_byte = f", {per_byte:.4f} nats per byte" if per_byte else ""
    yield (f"held-out loss   {line['heldout_loss']:.4f} nats per token{by_byte} (replicas "
           f"{line['heldout_min']:.4f} to {line['heldout_max']:.4f}), perplexity {line['perplexity']:.3f}")
    yield f"weight spread   {line['weight_spread']:.3e} over the replicas of a stage{moment and ','}{moment}"
    yield (f"bytes sent      {line['sync_bytes'] / 1e6:.1f} MB to synchronise, "
           f"{line['pipeline_bytes'] / 1e6:.1f} MB in the pipeline, all ranks")
    yield (f"speed           {line['tokens_per_second']:.0f} tokens/s, {line['seconds']:.0f} s of training, "
           "evaluation not counted")
    yield (f"held            {line['held']:.1%} of training by synchronisation, mean over ranks; the longest "
           f"{line['held_max']:.1%}")
    for key, name, what in (
            ("skipped_steps", "skipped", "optimizer steps with a gradient that was not finite"),
            ("lost_microbatches", "lost", "microbatches with ranks that died"),
            ("steps_alone", "alone", "outer steps that a replica did without any partner, all together")):
        if line[key]:
            yield f"{name:16}{line[key]:.0f} {what}"
