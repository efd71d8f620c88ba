"""Options: a dataclass whose fields carry their help, from the command line and a run's config.json."""
import argparse
import json
import math
import os
import time
from dataclasses import asdict, field, fields
from itertools import accumulate
from pathlib import Path

from model import Config
from plumbing.huggingface import read_config
from plumbing.processes import BadInput, may_restart


# The paper's table (arXiv 2506.10911); tiny is for two laptop cores. Rates are those of the inner optimizer.
COMMON = dict(vocab=128000, seq_len=1024, steps=25000, warmup=1000)
MODELS = {
    "tiny": dict(hidden=128, layers=4, heads=4, mlp=512, lr=3e-3,
                 vocab=256, seq_len=128, steps=300, warmup=30),
    "small": dict(hidden=768, layers=12, heads=16, mlp=3072, lr=6e-4, **COMMON),
    "medium": dict(hidden=2048, layers=24, heads=32, mlp=8192, lr=2e-4, **COMMON),
    "large": dict(hidden=4096, layers=32, heads=32, mlp=16384, lr=1.2e-4, **COMMON),
}
METHODS = {
    "noloco": dict(inner_steps=50, alpha=0.5, beta=0.7, gamma=None, group_size=2),      # gamma: as beta
    "diloco": dict(inner_steps=100, alpha=0.3, beta=0.7),
    "ddp": {},
    "local": {},
}
# The papers' values are for 25 000 steps; these are the best we found for a short run of a tiny model.
TINY = {
    "noloco": dict(inner_steps=10, alpha=0.0, beta=1.0),
    "diloco": dict(inner_steps=20, alpha=0.0, beta=1.0),
}


def option(default, help, **kwargs):
    return field(default=default, metadata=dict(help=help, **kwargs))


def numbers(kind):
    """An argument type: numbers with commas between them."""
    def parse(text):
        try:
            return [kind(x) for x in text.split(",")]
        except ValueError:
            line = f"takes numbers with commas between them, e.g. 3,2,2, not {text}"
            raise argparse.ArgumentTypeError(line)
    return parse


class Parser(argparse.ArgumentParser):
    """argparse, but a mistake is one line."""

    def __init__(self, description, **kwargs):
        super().__init__(description=description, allow_abbrev=False, **kwargs)

    def error(self, message):
        raise BadInput(f"{message} (see --help)")


def flag(name):
    return "--" + name.replace("_", "-")


# The first of --help.
FIRST = ("method", "stages", "model", "data", "steps", "lr", "inner_steps", "skip", "name", "resume")
# A checkpoint fits only the same. DIMENSIONS is in the order of Config's fields.
DIMENSIONS = ("vocab", "hidden", "mlp", "layers", "heads", "kv_heads", "rope_theta", "norm_eps", "tied")
LAYOUT = (*DIMENSIONS, "stages", "layers_per_stage", "method", "delay", "model", "init_from", "seq_len",
          "seed", "data", "tokenizer", "routing", "skip", "microbatches", "batch", "optimizer")
GONE = ("scaled", "falling", "warm_start")      # options of older versions
LEAST = dict(microbatches=1, batch=1, seq_len=1, steps=1, eval_every=1, eval_sequences=1, save_every=1,
             inner_steps=1, group_size=2, lr=0.0, clip=1e-6, survive=0.0, replan=0.0)


def parse(Options, argv, world, description):
    """The Options that the command line asks for. Raises BadInput."""
    given, old = read(Options, argv, description)
    o = Options(**{**old, **given})
    for name in METHODS["noloco"]:
        if name in given and name not in METHODS[o.method]:
            raise BadInput(f"--method {o.method} has no {flag(name)}")
    if o.init_from and not o.resume:
        take_dimensions(o, given)
    tiny_run = o.model == "tiny" and ("model" in given or not o.init_from)      # else as in the papers
    outer = TINY.get(o.method, {}) if tiny_run else {}
    for name, value in {**MODELS[o.model], **METHODS[o.method], **outer}.items():
        if getattr(o, name) is None:
            setattr(o, name, value)
    o.stages = o.stages or [world]
    o.kv_heads = o.kv_heads or o.heads
    o.gamma = o.beta if o.gamma is None else o.gamma
    o.delay = delay_of(o)
    o.routing = o.routing or ("skippipe" if o.skip else "random")
    check(o)
    return o


def delay_of(o):
    """--delay as a number of inner steps."""
    if o.delay == "half":
        return o.inner_steps // 2 if o.inner_steps else 0
    if not str(o.delay).isdigit():
        raise BadInput(f"--delay takes a number of inner steps or half, got {o.delay}")
    delay = int(o.delay)
    if delay and (o.method not in ("noloco", "diloco") or o.survive):
        raise BadInput("--delay is for noloco and diloco, without --survive, whose outer steps wait")
    if delay and delay > o.inner_steps:
        raise BadInput(f"--delay {delay}: the next outer step comes after --inner-steps {o.inner_steps}")
    return delay


def check(o):
    for name, bound in LEAST.items():
        value = getattr(o, name)
        if value is not None and not bound <= value < math.inf:
            raise BadInput(f"{flag(name)} must be at least {bound}, got {value}")
    if not 0 <= o.skip < 1 or (o.skip and o.routing in ("random", "fixed")):
        raise BadInput("--skip takes a share from 0 to below 1 and a planned routing, got "
                       f"{o.skip} and {o.routing}")
    if not 0 <= o.beta2 < 1:
        raise BadInput(f"--beta2 must be from 0 to below 1, got {o.beta2}")
    if o.survive and o.method not in ("noloco", "local"):
        raise BadInput(f"--survive is for noloco and local: --method {o.method} needs every process")
    if o.replan and (o.survive or o.routing in ("random", "fixed")):
        raise BadInput("--replan is for planned paths (--skip, --routing skippipe) and not with --survive, "
                       "which plans anew round the dead only")
    if o.wire == "int8" and (o.method != "noloco" or o.gamma != o.beta):
        raise BadInput("--wire int8 is for noloco with gamma = beta, where theta alone travels; got "
                       f"{o.method}, gamma {o.gamma} and beta {o.beta}")
    if o.join:
        raise BadInput("--join is for a process that comes back to a running job; rank 0 cannot: without "
                       "node 0 there is no job")
    nameless = not (o.name or o.resume) and os.environ.get("TORCHELASTIC_RUN_ID") == "none"
    if nameless and may_restart():
        raise BadInput("--max-restarts needs --name NAME here: else processes that start again could not "
                       "find their folder")
    if o.name and Path(o.name).name != o.name:
        raise BadInput(f"--name {o.name}: takes the name of a folder in runs, without a path")


def launch():
    """A name for this launch; the same for processes that torchrun starts again."""
    return os.environ.get("TORCHELASTIC_RUN_ID") if may_restart() else time.strftime("%Y%m%d-%H%M%S")


# ---- the command line


def read(Options, argv, description):
    """(given, old): what the command line says, and what the run of --resume was started with."""
    parser = Parser(description)
    most, more = parser.add_argument_group("what most runs need"), parser.add_argument_group("more")
    for f in sorted(fields(Options), key=lambda f: FIRST.index(f.name) if f.name in FIRST else len(FIRST)):
        if f.type is bool:
            how = dict(action="store_true")
        else:
            how = dict(type=f.metadata.get("type", f.type), choices=f.metadata.get("choices"))
        text = f.metadata["help"] + default_text(f)
        group = most if f.name in FIRST else more
        group.add_argument(flag(f.name), help=text, default=argparse.SUPPRESS, **how)
    given = vars(parser.parse_args(argv))
    old = resumed(Options, given["resume"]) if given.get("resume") else {}
    for name in LAYOUT if old else ():
        if name in given and given[name] != old[name]:
            raise BadInput(f"{flag(name)} {given[name]} differs from the {old[name]} of {given['resume']}: a "
                           "run goes on only with the weights, ranks and data order it began with; leave the "
                           "option out or start a new run")
    return given, old


def default_text(f):
    tiny = {f"{method} with tiny": row for method, row in TINY.items()}
    rows = [(row, values.get(f.name)) for table in (MODELS, METHODS, tiny) for row, values in table.items()]
    shown = [f"{row} {value}" for row, value in rows if value is not None]
    if shown:
        return f" (default: {', '.join(shown)})"
    return "" if f.default in (None, False, ()) else f" (default: {f.default})"


def resumed(Options, folder):
    try:
        found = json.loads((Path(folder) / "config.json").read_text())
        for name in GONE:
            if found.pop(name, False):
                raise BadInput(f"--resume {folder}: was started with {flag(name)}, which this version lacks")
        return asdict(Options(**found))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise BadInput(f"--resume {folder}: no readable config.json there ({error})")


def take_dimensions(o, given):
    """--init-from: its config.json gives every dimension."""
    try:
        found = read_config(o.init_from)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise BadInput(f"--init-from {o.init_from}: {error}")
    for name, value in zip(DIMENSIONS, vars(found).values()):
        if given.get(name, value) != value:
            raise BadInput(f"{flag(name)} {given[name]} differs from the {value} of {o.init_from}: leave the "
                           "option out")
        setattr(o, name, value)


# ---- what the options mean


def whole_config(o):
    """The whole model's Config."""
    try:
        return Config(*(getattr(o, name) for name in DIMENSIONS))
    except ValueError as error:
        raise BadInput(str(error))


def layout(o, world):
    """stages, the ranks of each, and layers, the global layer numbers of each. Raises BadInput."""
    sizes, depths = o.stages, o.layers_per_stage
    given = ",".join(map(str, sizes))
    if min(sizes) < 1:
        raise BadInput(f"--stages {given}: every stage needs a replica")
    if sum(sizes) != world:
        raise BadInput(f"--stages {given} needs {sum(sizes)} processes but got {world}: start torchrun with "
                       f"--nproc-per-node {sum(sizes)}, or give stages that add up to {world}")
    if depths is None:      # later stages first: origins also carry the embedding, the head and the loss
        depths = [(o.layers + s) // len(sizes) for s in range(len(sizes))]
    if len(depths) != len(sizes) or min(depths) < 1 or sum(depths) != o.layers:
        raise BadInput(f"{len(sizes)} stages must share the model's {o.layers} layers, at least one each; "
                       f"got {depths}")
    kept = round((1 - o.skip) * len(sizes))
    if o.skip and (len(sizes) < 3 or kept < 1):
        raise BadInput("--skip needs at least 3 stages, of which round((1 - skip) x stages) >= 1 are kept; "
                       f"got {len(sizes)} and {o.skip}")
    if o.routing == "fixed" and sizes[0] * o.microbatches < max(sizes):
        raise BadInput("--routing fixed leaves replicas without work for ever: give at least "
                       f"{-(-max(sizes) // sizes[0])} --microbatches")
    return cuts(sizes), cuts(depths)


def cuts(parts):
    """[2, 3] -> [[0, 1], [2, 3, 4]]"""
    return [list(range(end - n, end)) for n, end in zip(parts, accumulate(parts))]
