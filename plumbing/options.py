"""Options: a dataclass whose fields carry their help, from the command line and a run's config.json."""
import argparse
import json
import math
import os
import time
from dataclasses import field, fields
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
            raise argparse.ArgumentTypeError(f"takes numbers with commas between them, not {text}")
    return parse


def steps_or_half(text):
    """An argument type: a number of inner steps, or half of those between two outer steps."""
    if text != "half" and not text.isdigit():
        raise argparse.ArgumentTypeError(f"takes a number of inner steps or half, got {text}")
    return text if text == "half" else int(text)


def empty_folder(text):
    """An argument type: a folder to write."""
    folder = Path(text)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise argparse.ArgumentTypeError(f"{folder} exists and is not an empty folder")
    return folder


class Parser(argparse.ArgumentParser):
    """argparse, but a mistake is one line."""

    def __init__(self, description, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs):
        super().__init__(description=description, allow_abbrev=False, formatter_class=formatter_class,
                         **kwargs)

    def error(self, message):
        raise BadInput(f"{message} (see --help)")


def flag(name):
    return "--" + name.replace("_", "-")


# The first of --help.
FIRST = ("method", "stages", "model", "data", "steps", "lr", "inner_steps", "skip", "name", "resume")
# A checkpoint fits only the same (and a corpus of one hash). DIMENSIONS: in the order of Config's fields.
DIMENSIONS = ("vocab", "hidden", "mlp", "layers", "heads", "kv_heads", "rope_theta", "norm_eps", "tied")
LAYOUT = (*DIMENSIONS, "stages", "layers_per_stage", "method", "delay", "model", "init_from", "seq_len",
          "seed", "tokenizer", "routing", "skip", "microbatches", "batch", "optimizer")
GONE = ("scaled", "falling", "warm_start")      # options of older versions
LEAST = dict(microbatches=1, batch=1, seq_len=1, steps=1, eval_every=1, eval_sequences=1, save_every=1,
             inner_steps=1, group_size=2, lr=0.0, clip=1e-6, survive=0.0, replan=0.0, delay=0)


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
    more = dict(stages=[world], routing="skippipe" if o.skip else "random")
    for name, value in {**MODELS[o.model], **METHODS[o.method], **outer, **more}.items():
        if getattr(o, name) is None:
            setattr(o, name, value)
    o.kv_heads = o.kv_heads or o.heads
    o.gamma = o.beta if o.gamma is None else o.gamma
    o.delay = delay_of(o)
    check(o)
    return o


def delay_of(o):
    """--delay as a number of inner steps. Raises BadInput."""
    delay = o.delay
    if delay == "half":
        return o.inner_steps // 2 if o.inner_steps else 0
    if delay and (o.method not in ("noloco", "diloco") or o.survive):
        raise BadInput("--delay is for noloco and diloco, without --survive, whose outer steps wait")
    if delay and delay > o.inner_steps:
        raise BadInput(f"--delay {delay}: the next outer step comes after --inner-steps {o.inner_steps}")
    return delay


def check(o):
    """Raise BadInput for options that are out of range, or do not go together."""
    for name, bound in LEAST.items():
        value = getattr(o, name)
        if value is not None and not bound <= value < math.inf:
            raise BadInput(f"{flag(name)} must be at least {bound}, got {value}")
    planned = o.routing not in ("random", "fixed")
    nameless = not (o.name or o.resume) and os.environ.get("TORCHELASTIC_RUN_ID") == "none"
    for wrong, line in (
            (not 0 <= o.skip < 1 or o.skip and not planned,
             f"--skip takes a share from 0 to below 1 and a planned routing, got {o.skip} and {o.routing}"),
            (not 0 <= o.beta2 < 1, f"--beta2 must be from 0 to below 1, got {o.beta2}"),
            (o.survive and o.method not in ("noloco", "local"),
             f"--survive is for noloco and local: --method {o.method} needs every process"),
            (o.replan and (o.survive or not planned),
             "--replan is for planned paths (--skip, --routing skippipe) and not with --survive"),
            (o.wire == "int8" and (o.method != "noloco" or o.gamma != o.beta),
             f"--wire int8 is for noloco with gamma = beta, not {o.method}, {o.gamma} and {o.beta}"),
            (o.join, "--join is for a process that comes back to a running job, never for rank 0"),
            (nameless and may_restart(), "--max-restarts needs --name NAME: else a restart finds no folder"),
            (o.name and Path(o.name).name != o.name, f"--name {o.name}: takes a name without a path")):
        if wrong:
            raise BadInput(line)


def launch():
    """A name for this launch; the same for processes that torchrun starts again."""
    return os.environ.get("TORCHELASTIC_RUN_ID") if may_restart() else time.strftime("%Y%m%d-%H%M%S")


# ---- the command line


def read(Options, argv, description):
    """(given, old): what the command line says, and what the run of --resume was started with."""
    parser = Parser(description, argument_default=argparse.SUPPRESS)
    most, more = parser.add_argument_group("what most runs need"), parser.add_argument_group("more")
    of_name = {f.name: f for f in fields(Options)}
    for name in dict.fromkeys((*FIRST, *of_name)):
        f = of_name[name]
        how = dict(action="store_true") if f.type is bool else \
            dict(type=f.metadata.get("type", f.type), choices=f.metadata.get("choices"))
        group = most if name in FIRST else more
        group.add_argument(flag(name), help=f.metadata["help"] + default_text(f), **how)
    given = vars(parser.parse_args(argv))
    old = resumed(Options, given["resume"]) if given.get("resume") else {}
    for name in LAYOUT if old else ():
        if name in given and given[name] != old[name]:
            raise BadInput(f"{flag(name)} {given[name]} differs from the {old[name]} of {given['resume']}, "
                           "which a run must keep: leave the option out or start a new run")
    return given, old


def default_text(f):
    tiny = {f"{method} with tiny": row for method, row in TINY.items()}
    shown = [f"{row} {values[f.name]}" for row, values in {**MODELS, **METHODS, **tiny}.items()
             if values.get(f.name) is not None]
    if not shown and f.default in (None, False, ()):
        return ""
    return f" (default: {', '.join(shown) or f.default})"


def resumed(Options, folder):
    """The options in a run's config.json. Raises BadInput."""
    try:
        found = json.loads((Path(folder) / "config.json").read_text())
        for name in GONE:
            if found.pop(name, False):
                raise BadInput(f"{folder} was started with {flag(name)}, which this version lacks")
        found = vars(Options(**found))
        for f in fields(Options):
            if not fits(found[f.name], f):
                raise ValueError(f"{f.name} is {found[f.name]!r}")
        return found
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise BadInput(f"{folder}: no readable config.json of a run there ({error})")


def fits(value, f):
    """Whether the value has the type of the field f of Options."""
    if value is None or f.type is list:
        return f.default is None and all(type(n) is int for n in value or [])
    return type(value) in ((int, float) if f.type is float else (f.type,)) \
        and value in f.metadata.get("choices", [value])


def take_dimensions(o, given):
    """--init-from: its config.json gives every dimension. Raises BadInput."""
    try:
        found = vars(read_config(o.init_from)).values()
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise BadInput(f"--init-from {o.init_from}: {error}")
    for name, value in zip(DIMENSIONS, found):
        if given.get(name, value) != value:
            raise BadInput(f"{flag(name)} {given[name]} differs from the {value} of {o.init_from}: drop it")
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
    sizes, depths, kept = o.stages, o.layers_per_stage, round((1 - o.skip) * len(o.stages))
    given = ",".join(map(str, sizes))
    if depths is None:      # later stages first: origins also carry the embedding, the head and the loss
        depths = [(o.layers + s) // len(sizes) for s in range(len(sizes))]
    if min(sizes) < 1:
        raise BadInput(f"--stages {given}: every stage needs a replica")
    if sum(sizes) != world:
        raise BadInput(f"--stages {given} needs {sum(sizes)} processes but got {world}: give torchrun "
                       f"--nproc-per-node {sum(sizes)}, or stages that add up to {world}")
    if len(depths) != len(sizes) or min(depths) < 1 or sum(depths) != o.layers:
        raise BadInput(f"{len(sizes)} stages must share {o.layers} layers, at least one each; got {depths}")
    if o.skip and (len(sizes) < 3 or kept < 1):
        raise BadInput(f"--skip needs at least 3 stages and must keep one; got {len(sizes)} and {o.skip}")
    if o.routing == "fixed" and sizes[0] * o.microbatches < max(sizes):
        least = -(-max(sizes) // sizes[0])
        raise BadInput(f"--routing fixed leaves replicas without work: give at least {least} --microbatches")
    return cuts(sizes), cuts(depths)


def cuts(parts):
    """[2, 3] -> [[0, 1], [2, 3, 4]]"""
    return [list(range(end - n, end)) for n, end in zip(parts, accumulate(parts))]
