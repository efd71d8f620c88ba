"""The trainer beside others and beside its floors; its own processes are started here.

    python -m experiments.speed                   all parts and the table: 19 minutes on 2 idle cores, 14 GB
    python -m experiments.speed pipeline start    these parts
    python -m experiments.speed --table --out .   the table of what OUT/results/speed.json has
"""
import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F

import skippipe
import train
from experiments.pictures import kept, save, show_head, show_row
from experiments.runs import torchrun
from experiments.sync import quartiles
from model import Config, Llama, count_parameters
from noloco import NoLoCo, flatten
from planning.training import Watch, measure
from plumbing.fast import Adam, speed_up
from plumbing.options import Parser
from plumbing.processes import BadInput, Job
from survive.outer import SurvivingNoLoCo
from survive.parts import SurvivingJob
from survive.pipeline import SurvivingPipeline


# ---------------------------------------------------------------- timing


def medians(works, trials, job=None, warm=1):
    """{name: seconds of each trial} of functions, interleaved; with several processes a time is the
    slowest rank's."""
    times = {name: [] for name in works}
    for trial in range(warm + trials):
        for name, work in works.items():
            if job:
                dist.barrier()
            start = time.perf_counter()
            work()
            seconds = torch.tensor(time.perf_counter() - start)
            if job:
                dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
            times[name] += [float(seconds)] if trial >= warm else []
    return times


def ours_over(times, ours, other):
    """Tokens per second of ours over the other's: [median, lower, upper quartile] of the trials' ratios."""
    low, middle, high = quartiles([b / a for a, b in zip(times[ours], times[other])])
    return [middle, low, high]


def inner_step(adam, forward_backward, tokens):
    """train.inner_step where forward and backward are not the executor's."""
    def run(paths, batches, order):
        forward_backward()
        return 0.0, tokens, tokens
    train.inner_step(SimpleNamespace(run=run), adam, None, None, None, 1e-4, 1.0)


class Rig:
    """A rank of train.py without its loop: step(k) is an inner step on random tokens. Ranks of no stage
    do nothing.

    shape: (B, T) of a microbatch.
    """

    def __init__(self, job, stages, config, shape, microbatches, Pipeline=train.Pipeline,
                 route=skippipe.random_paths):
        self.rank, self.stages, self.microbatches, self.route = job.rank, stages, microbatches, route
        self.stage = next((s for s, ranks in enumerate(stages) if job.rank in ranks), None)
        if self.stage is None:
            return
        depth = config.num_hidden_layers // len(stages)
        layers = range(self.stage * depth, self.stage * depth + depth)
        self.model = speed_up(Llama(config, layers, ends=self.stage == 0))
        self.adam = Adam(*flatten(self.model.parameters()))
        self.pipeline = Pipeline(self.model, job, stages, (*shape, config.hidden_size))
        self.data = torch.randint(config.vocab_size, (shape[0], shape[1] + 1))

    def batches(self, paths):
        return {u: self.data for u, path in enumerate(paths) if path[0] == self.rank}

    def step(self, k):
        if self.stage is not None:
            paths = self.route(self.stages, self.microbatches, k, 0)
            train.inner_step(self.pipeline, self.adam, self.batches(paths), paths, None, 1e-4, 1.0)


class SurvivingRig(Rig):
    """As with --survive 60."""

    def __init__(self, job, *args):
        super().__init__(SurvivingJob(job, 60.0, False), *args, Pipeline=SurvivingPipeline)

    def step(self, k):
        self.pipeline.begin(self.pipeline.step + 1)         # numbered once and for all
        super().step(k)


def fixed_paths(stages, microbatches, *_):
    return skippipe.full_paths(stages, microbatches)


# ---------------------------------------------------------------- beside Hugging Face and torch


def hugging_face(config, **kwargs):
    """transformers' LlamaForCausalLM of the same configuration and weights."""
    from transformers import LlamaConfig, LlamaForCausalLM
    settings = dict(vars(config), attn_implementation="sdpa", use_cache=False, **kwargs)
    other = LlamaForCausalLM(LlamaConfig(**settings))
    other.load_state_dict(Llama(config).state_dict())
    return other


def model(o, job):
    """Forward and backward of 2 microbatches (train.py's default), then Adam, in one process, one
    thread: ours, Hugging Face's with the same fused Adam, both compiled too."""
    torch.set_num_threads(1)
    rows = []
    for hidden, T in itertools.product((128, 512), (128, 512)):
        config = Config(hidden_size=hidden, intermediate_size=4 * hidden)
        tokens = torch.randint(256, (4, T + 1))
        works = {"ours": our_step(config, tokens), "theirs": their_step(config, tokens),
                 "ours, compiled": our_step(config, tokens, compiled=True),
                 "theirs, compiled": their_step(config, tokens, compiled=True)}
        times = medians(works, o.trials, warm=2)
        speeds = {name: 2 * 4 * T / statistics.median(seconds) for name, seconds in times.items()}
        rows.append(dict(hidden=hidden, T=T, tokens_per_second=speeds,
                         ratio=ours_over(times, "ours", "theirs"),
                         ratio_compiled=ours_over(times, "ours, compiled", "theirs, compiled")))
        print("model", rows[-1], flush=True)
    return rows


def our_step(config, tokens, compiled=False):
    model = speed_up(Llama(config))
    adam = Adam(*flatten(model.parameters()))
    x, y = tokens[:, :-1], tokens[:, 1:]
    if compiled:
        for layer in model.model.layers.values():
            layer.compile()

    def forward_backward():
        for _ in range(2):
            model.loss(model.blocks(model.embed(x)), y).backward()

    return lambda: inner_step(adam, forward_backward, 2 * y.numel())


def their_step(config, tokens, compiled=False):
    model = hugging_face(config)
    adam = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
    x, y = tokens[:, :-1], tokens[:, 1:].flatten()
    if compiled:
        for layer in model.model.layers:
            layer.compile()

    def step():
        adam.zero_grad()
        for _ in range(2):
            F.cross_entropy(model(input_ids=x).logits.flatten(0, 1), y).backward()
        adam.step()
    return step


def pipeline(o, job):
    """Two pipelines of 2 stages, beside 2 processes with the whole model and beside torch's 1F1B; 16
    sequences of 128 tokens a step."""
    config, shape, microbatches, steps = Config(), (4, 128), 2, 8
    two = [[0, 1], [2, 3]], config, shape, microbatches
    survives = SurvivingRig(job, *two)
    kinds = {"2 x 2": Rig(job, *two).step,                                  # as train.py runs it
             "2 x 2, fixed": Rig(job, *two, route=fixed_paths).step,        # as torch's
             "2 x 2, survives": survives.step,
             "no pipeline": Rig(job, [[0, 1]], config, shape, microbatches).step,
             "torch 1F1B": torch_1f1b(job, config, shape, microbatches)}

    def some_steps(step):
        return lambda: [step(k) for k in range(steps)]

    times = medians({name: some_steps(step) for name, step in kinds.items()}, o.trials, job)
    survives.pipeline.stop()
    tokens = steps * 2 * microbatches * shape[0] * shape[1]
    return dict(tokens_per_second={name: tokens / statistics.median(t) for name, t in times.items()},
                over_no_pipeline=ours_over(times, "2 x 2", "no pipeline"),
                over_fragile=ours_over(times, "2 x 2, survives", "2 x 2"),
                over_1f1b=ours_over(times, "2 x 2", "torch 1F1B"),
                fixed_over_1f1b=ours_over(times, "2 x 2, fixed", "torch 1F1B"))


def torch_1f1b(job, config, shape, microbatches):
    """step(k): the same on torch.distributed.pipelining, two pipelines 0 -> 2 and 1 -> 3; there the last
    stage holds norm, head and loss."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    stage = job.rank // 2
    groups = [dist.new_group([i, i + 2]) for i in range(2)]
    half = config.num_hidden_layers // 2
    model = Llama(config, range(stage * half, stage * half + half))
    if stage:
        del model.model.embed_tokens
        model.forward = lambda x: model.logits(model.blocks(x))
    else:
        del model.model.norm, model.lm_head
        model.forward = lambda tokens: model.blocks(model.embed(tokens))
    adam = Adam(*flatten(model.parameters()))
    data = torch.randint(config.vocab_size, (microbatches * shape[0], shape[1] + 1))
    inputs = () if stage else (data[:, :-1],)
    target = data[:, 1:] if stage else None

    def loss(logits, y):
        return F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum")

    place = PipelineStage(model, stage, 2, job.device, group=groups[job.rank % 2])
    schedule = Schedule1F1B(place, microbatches, loss, scale_grads=False)

    def forward_backward():
        schedule.step(*inputs, target=target, return_outputs=False)

    return lambda k: inner_step(adam, forward_backward, data[:, 1:].numel())


# ---------------------------------------------------------------- beside the simulator


def idle(o, job):
    """One pipeline of 2 stages, a core for each rank: the share of an iteration that a rank does not
    compute, beside what `simulate` says.

    The simulator gets the message times that train.py measures, and those of forward, loss and backward from
    the same iterations.
    """
    stages, microbatches = [[0], [1]], 4
    rig = Rig(job, stages, Config(), (4, 128), microbatches)
    delay, _ = measure(rig.pipeline, stages, job)
    paths = skippipe.full_paths(stages, microbatches)
    rig.pipeline.run(paths, rig.batches(paths))                             # warms up
    ranks = SimpleNamespace(compute=[1.0] * job.world)
    watch = Watch(SimpleNamespace(pipeline=rig.pipeline, network=ranks))
    shares, walls = [], []
    for _ in range(o.trials):
        dist.barrier()
        wall, busy = time.perf_counter(), time.thread_time()
        rig.pipeline.run(paths, rig.batches(paths))
        walls.append(time.perf_counter() - wall)
        shares.append(1 - (time.thread_time() - busy) / walls[-1])
    seconds = {what: statistics.median(end - begin for begin, end in times)
               for what, times in watch.times.items()}
    rows = job.collect("idle", dict(seconds, idle=statistics.median(shares)))
    if job.rank:
        return None
    rows = list(rows.values())
    result = as_measured(delay, rows, stages, microbatches)
    works = [sum(task.end - task.start for task in result.timeline if task.rank == r) for r in range(2)]
    return dict(measured=[row["idle"] for row in rows],
                simulated=[1 - work / result.makespan for work in works],
                makespan=result.makespan, iteration=statistics.median(walls))


def as_measured(delay, rows, stages, microbatches):
    """The simulated iteration with these times."""
    forward = [row["forward"] for row in rows]
    backward = [row["backward"] for row in rows]
    work = dict(backward=sum(backward) / sum(forward), loss=rows[0]["loss"] / forward[0])
    network = skippipe.Network(delay, forward, stages, memory=microbatches)
    paths = skippipe.full_paths(stages, microbatches)
    chains = [skippipe.chain(path) for path in paths]
    with mock.patch.dict(skippipe.WORK, work):
        return skippipe.simulate(network, paths, order=[train.tasks(chains, r) for r in range(2)])


# ---------------------------------------------------------------- the outer step, the start, memory


def sync(o, job):
    """4 replicas of the tiny model: 50 inner steps with and without the outer step; how long phi blocks
    when sent early or late."""
    rig = Rig(job, [[0, 1, 2, 3]], Config(), (4, 128), 2)
    outer = NoLoCo(rig.model.parameters())

    def fifty(after):
        for k in range(50):
            rig.step(k)
            after()

    works = {"noloco": lambda: fifty(outer.step), "local": lambda: fifty(lambda: None)}
    times = medians(works, max(1, o.trials // 2), job)
    store = dist.PrefixStore("one", job.store)
    works = {"survives": SurvivingNoLoCo(rig.model.parameters(), inner_steps=1, store=store).step,
             "fragile": NoLoCo(rig.model.parameters(), inner_steps=1).step}
    alone = medians(works, 4 * o.trials, job)
    blocked = {"early": [], "late": []}
    for name in 2 * o.trials * list(blocked):
        blocked[name].append(seconds_blocked(rig, early=name == "early"))
    rows = job.collect("sync", {name: statistics.median(seconds) for name, seconds in blocked.items()})
    low, middle, high = quartiles([a / b - 1 for a, b in zip(times["noloco"], times["local"])])
    return rows and dict(share=[middle, low, high], fifty_steps=statistics.median(times["local"]),
                         blocked={name: max(row[name] for row in rows.values()) for name in blocked},
                         outer_step={name: statistics.median(seconds) for name, seconds in alone.items()})


def seconds_blocked(rig, early):
    """Of an exchange after 3 inner steps, phi sent before them or with theta."""
    outer = NoLoCo(rig.model.parameters(), gamma=0.9, inner_steps=3)
    if not early:
        outer.ahead = None, []
    for k in range(2):
        rig.step(k)
        outer.step()
    rig.step(2)
    dist.barrier()
    start = time.perf_counter()
    if not early:
        outer.ahead = outer.send_ahead()
    outer.exchange()
    return time.perf_counter() - start


def start(o, job):
    """From launch until the last of 8 processes has done its first step, beside bare torchrun, import
    torch and a process group."""
    seconds = {"floor": [], "done": []}
    with tempfile.TemporaryDirectory() as folder:
        for trial in range(max(1, o.trials // 2)):
            floor = told(folder, "experiments.floor")
            first = told(folder, "experiments.first_step", "--stages", "4,4", "--steps", "2",
                         "--eval-sequences", "4", "--name", f"start-{trial}")
            seconds["floor"].append(max(times[0] for times in floor))
            seconds["done"].append(max(times[1] for times in first))
    beyond = statistics.median(b - a for a, b in zip(seconds["floor"], seconds["done"]))
    return dict({name: statistics.median(t) for name, t in seconds.items()}, beyond=beyond)


def told(folder, module, *options):
    """[the seconds after launch that a rank told, for each rank]"""
    launch = time.time()
    out = torchrun(8, "-m", module, *options, cwd=folder, stdout=subprocess.PIPE)
    times = {}
    for line in out.splitlines():
        if line.startswith("at "):
            _, moment, rank = line.split()
            times.setdefault(rank, []).append(float(moment) - launch)
    return list(times.values())


def memory_bytes(config, tokens, microbatches, vectors=7, layers=None):
    """Of a rank with both ends and `layers` layers: theta, gradient, Adam's two, phi, delta and a
    receive buffer (`vectors`), the activations of this many microbatches in flight, `tokens` tokens
    each, and while a loss is taken back its logits and the head's own gradient.

    A layer keeps of a token, in floats: x, x / rms(x) and norm(x) twice, q, attention's result and its
    log-sum, k and v, gate, up, silu(gate) and their product.
    """
    C = config.hidden_size
    D = C // config.num_attention_heads
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    layer = 8 * C + 2 * D * kv_heads + heads + 4 * config.intermediate_size + 2
    depth = config.num_hidden_layers if layers is None else layers
    activations = tokens * (microbatches * depth * layer + config.vocab_size + 3 * C)
    return 4 * (vectors * count_parameters(config)[0] + activations + C * config.vocab_size)


def memory(o, job):
    """Peak resident memory beyond what the process had before its model, 2 replicas, beside
    `memory_bytes`."""
    rows = {}
    # libraries load what they need at first use: that is not the model's
    tiny, small = train.MODELS["tiny"], train.MODELS["small"]
    shapes = {"warm-up": ({**tiny, "hidden": 32, "mlp": 32}, 1), "tiny": (tiny, 4),
              "small with 32 000 tokens": ({**small, "vocab": 32_000}, 1)}
    for name, (c, batch) in shapes.items():
        config = Config(c["vocab"], c["hidden"], c["mlp"], c["layers"], c["heads"], c["heads"])
        before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
        rig = Rig(job, [[0, 1]], config, (batch, c["seq_len"]), 1)
        outer = NoLoCo(rig.model.parameters(), inner_steps=1)
        for k in range(2):
            rig.step(k)
            outer.step()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
        rows[name] = dict(measured=peak, formula=memory_bytes(config, batch * c["seq_len"], 1))
        del rig, outer
    del rows["warm-up"]
    found = job.collect("memory", {name: row["measured"] for name, row in rows.items()})
    if found:
        for name, row in rows.items():
            row["measured"] = max(f[name] for f in found.values())
        return rows


# ---------------------------------------------------------------- the table, and the command line


def table(r):
    def times(ratio):
        return "{:.2f}x [{:.2f}, {:.2f}]".format(*ratio)

    show_head("what | measured | aim")
    for row in r["model"]:
        speeds = row["tokens_per_second"]
        show_row(f"model, hidden {row['hidden']}, T {row['T']}: tokens/s over Hugging Face's (both compiled)",
                 f"{times(row['ratio'])} ({times(row['ratio_compiled'])}), "
                 f"{speeds['ours']:.0f} and {speeds['theirs']:.0f} tokens/s", "1.0x")
    two, beside = r["pipeline"], r["sync"]["outer_step"]
    show_row("2 stages x 2 replicas over 2 processes without a pipeline", times(two["over_no_pipeline"]),
             "0.85x")
    show_row("2 stages x 2 replicas over torch's Schedule1F1B (fixed routes, as torch's)",
             f"{times(two['over_1f1b'])} ({times(two['fixed_over_1f1b'])})", "1.0x")
    show_row("idle share of ranks 0 and 1, 2 stages x 1 (simulated)",
             "{:.0%}, {:.0%} ({:.0%}, {:.0%})".format(*r["idle"]["measured"], *r["idle"]["simulated"]), "")
    show_row("an outer step over 50 inner steps (50 steps with it over 50 of `local`, less 1)",
             f"{beside['survives'] / r['sync']['fifty_steps']:.2%} "
             "({:+.1%} [{:+.1%}, {:+.1%}])".format(*r["sync"]["share"]), "3%")
    show_row("an outer step that survives failures (one that does not), all replicas at once",
             f"{beside['survives']:.4f} s ({beside['fragile']:.4f} s)", "+0.025 s")
    show_row("2 x 2: inner steps that survive failures over ones that do not", times(two["over_fragile"]), "")
    show_row("exchange blocks, phi sent early (late); without a store",
             "{early:.4f} s ({late:.4f} s)".format(**r["sync"]["blocked"]), "")
    show_row("launch to first step done, 8 processes (floor)",
             "{done:.1f} s ({floor:.1f} s), {beyond:+.1f} s".format(**r["start"]), "+2 s")
    for name, row in r["memory"].items():
        show_row(f"peak memory of a rank, {name} (formula)",
                 f"{row['measured'] / 1e6:.0f} MB ({row['formula'] / 1e6:.0f} MB)", "")


# name: (function(o, job) -> what rank 0 keeps, processes)
PARTS = {"model": (model, 1), "pipeline": (pipeline, 4), "idle": (idle, 2), "sync": (sync, 4),
         "start": (start, 1), "memory": (memory, 2)}


def parse(argv):
    p = Parser(__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("parts", nargs="*", help=f"{', '.join(PARTS)} (default: all, then the table)")
    p.add_argument("--trials", type=int, default=11, help="measurements of each (default: 11)")
    p.add_argument("--out", default="runs", help="folder of results/speed.json (default: runs)")
    p.add_argument("--table", action="store_true", help="measure nothing")
    o = p.parse_args(argv)
    if wrong := set(o.parts) - set(PARTS):
        raise BadInput(f"there is no part {sorted(wrong)[0]}, only {', '.join(PARTS)}")
    if o.trials < 1:
        raise BadInput(f"--trials must be at least 1, got {o.trials}")
    o.all = o.table or not o.parts
    o.parts = [] if o.table else o.parts or list(PARTS)
    if "model" in o.parts:
        try:
            import transformers                                     # noqa: F401
        except ImportError:
            raise BadInput("part model compares with transformers: pip install '.[test]'")
    return o


def run(name, o, job):
    """Into OUT/results/speed.json, which keeps the parts that are not run again."""
    load = os.getloadavg()[0]
    function, _ = PARTS[name]
    result = function(o, job)
    if job.rank == 0:
        there = Path(o.out, "results", "speed.json").exists()
        found = kept(o.out, "speed") if there else {}
        found[name] = dict(result=result, trials=o.trials, load_before=load, torch=torch.__version__,
                           cores=os.cpu_count())
        save(o.out, "speed", found)
        print(name, json.dumps(result), flush=True)


def main(argv=None):
    job = Job()
    o = job.together(parse, argv)
    job.connect(SimpleNamespace(device="cpu", backend="gloo"))
    for name in o.parts:
        _, processes = PARTS[name]
        if processes == job.world:
            run(name, o, job)
        elif job.world == 1:
            options = ["--trials", str(o.trials), "--out", o.out]
            torchrun(processes, "-m", "experiments.speed", name, *options)
    if o.all:
        found = job.together(kept, o.out, "speed")
        table({name: row["result"] for name, row in found.items()})
    job.close()


if __name__ == "__main__":
    main()
