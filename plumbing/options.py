"""Options: a dataclass whose fields carry their help, from the command line and a run's config.json."""
import argparse
import json
import os
from dataclasses import field, fields
from itertools import accumulate
from pathlib import Path

from model import Config
from plumbing.processes import BadInput, forbid


# The paper's table (arXiv 2506.10911); tiny is for two laptop cores. Rates are those of the inner optimizer.
COLUMNS = ("hidden", "layers", "heads", "mlp", "lr", "vocab", "seq_len", "steps", "warmup")
MODELS = {name: dict(zip(COLUMNS, row)) for name, *row in (
    ("tiny", 128, 4, 4, 512, 3e-3, 256, 128, 300, 30),
    ("small", 768, 12, 16, 3072, 6e-4, 128000, 1024, 25000, 1000),
    ("medium", 2048, 24, 32, 8192, 2e-4, 128000, 1024, 25000, 1000),
    ("large", 4096, 32, 32, 16384, 1.2e-4, 128000, 1024, 25000, 1000))}
# The options that only some methods have, with each method's defaults. gamma: as beta.
METHODS = {
    "noloco": dict(inner_steps=50, alpha=0.5, beta=0.7, gamma=None, group_size=2, wire="fp32", delay=0,
                   survive=0.0),
    "diloco": dict(inner_steps=100, alpha=0.3, beta=0.7, wire="fp32", delay=0),
    "ddp": dict(wire="fp32"),
    "local": dict(survive=0.0),
}
# The papers' values are for 25 000 steps; these are the best we found for a short run of a tiny model.
TINY = {
    "noloco": dict(inner_steps=10, alpha=0.0, beta=1.0),
    "diloco": dict(inner_steps=20, alpha=0.0, beta=1.0),
}


def option(default, help, choices=None, least=0):
    """A field of Options. least: of a number."""
    return field(default=default, metadata=dict(help=help, choices=choices, least=least))


def integers(text):
    """An argument type."""
    return [int(number) for number in text.strip("[]").split(",")]          # [] in a config.json


def steps_or_half(text):
    """An argument type: a number of steps, or half of --inner-steps."""
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
# In the order of Config's fields.
DIMENSIONS = ("vocab", "hidden", "mlp", "layers", "heads", "kv_heads", "rope_theta", "norm_eps", "tied")
# A checkpoint fits only a run that agrees in these, and in the hash of its corpus.
LAYOUT = (*DIMENSIONS, "stages", "layers_per_stage", "method", "delay", "model", "seq_len", "seed",
          "tokenizer", "routing", "skip", "microbatches", "batch", "optimizer")


def parse_options(Options, argv, world, description):
    """The Options that the command line asks for. Raises BadInput."""
    parser = make_parser(Options, description)
    given = vars(parser.parse_args(argv))
    run = given.get("resume")
    found = vars(from_folder(Options, parser, run)) if run else {}
    if run and given.get("delay") == "half":
        given["delay"] = (given.get("inner_steps", found["inner_steps"]) or 0) // 2
    for name in LAYOUT:
        if name in found and given.get(name, found[name]) != found[name]:
            raise BadInput(f"{flag(name)} {given[name]} differs from the {found[name]} of {run}: drop it")
    o = Options(**{**found, **given})
    outer = TINY.get(o.method, {}) if o.model == "tiny" else {}
    more = dict(stages=[world], routing="skippipe" if o.skip else "random")
    for name, value in {**MODELS[o.model], **METHODS[o.method], **outer, **more}.items():
        if getattr(o, name) is None:
            setattr(o, name, value)
    o.kv_heads = o.kv_heads or o.heads
    o.gamma = o.beta if o.gamma is None else o.gamma
    o.delay = (o.inner_steps or 0) // 2 if o.delay == "half" else o.delay
    check(o, given)
    return o


def check(o, given):
    """Raise BadInput for options that are out of range, or do not go together."""
    for f in fields(o):
        value, least = getattr(o, f.name), f.metadata["least"]
        if f.type in (int, float) and value is not None and not least <= value < float("inf"):
            raise BadInput(f"{flag(f.name)} must be at least {least}, got {value}")
    foreign = [flag(name) for name in METHODS["noloco"] if name in given and name not in METHODS[o.method]]
    planned = o.routing not in ("random", "fixed")
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    forbid(
        (foreign, f"--method {o.method} has no {' and no '.join(foreign)}"),
        (not o.skip < 1, f"--skip must be below 1, got {o.skip}"),
        (o.skip and not planned, f"--skip needs a planned routing, not --routing {o.routing}"),
        (o.alpha is not None and not o.alpha < 1, f"--alpha must be below 1, got {o.alpha}"),
        (not o.beta2 < 1, f"--beta2 must be below 1, got {o.beta2}"),
        (o.replan and not planned, "--replan is for planned paths: give --skip or --routing skippipe"),
        (o.survive and (o.replan or o.delay), "--survive goes with neither --replan nor --delay"),
        (o.wire == "bf16" and o.method == "noloco",
         "--wire bf16 rounds updates of NoLoCo's theta away: give --wire int8"),
        (o.wire == "int8" and o.gamma != o.beta, f"--wire int8 needs gamma = beta, not {o.gamma}, {o.beta}"),
        (not 0 <= o.delay <= (o.inner_steps or 0), f"--delay {o.delay}: takes 0 to --inner-steps, or half"),
        (restarts and not (o.name or o.resume), "torchrun's --max-restarts needs --name, to find the folder"),
        (o.name and Path(o.name).name != o.name, f"--name {o.name}: takes a name without a path"))


# ---- the command line and config.json


def make_parser(Options, description):
    """An option that the command line leaves out is absent from what the parser returns."""
    parser = Parser(description, argument_default=argparse.SUPPRESS)
    first, more = parser.add_argument_group("what most runs need"), parser.add_argument_group("more")
    for f in sorted(fields(Options), key=lambda f: f.name not in FIRST):
        kind = integers if f.type is list else f.type
        how = dict(action="store_true") if kind is bool else dict(type=kind, choices=f.metadata["choices"])
        group = first if f.name in FIRST else more
        group.add_argument(flag(f.name), help=f.metadata["help"] + default_text(f), **how)
    return parser


def default_text(f):
    rows = {**MODELS, **METHODS, **{f"{method} with tiny": row for method, row in TINY.items()}}
    shown = [f"{name} {row[f.name]}" for name, row in rows.items() if row.get(f.name) is not None]
    text = ", ".join(shown) or f.default
    return "" if text is None or text is False else f" (default: {text})"


def from_folder(Options, parser, run):
    """The Options of a run's config.json. Raises BadInput."""
    try:                # by the parser, as if the command line gave them, which finds values of a wrong type
        config = json.loads((Path(run) / "config.json").read_text())
        argv = [flag(name) if value is True else f"{flag(name)}={value}"
                for name, value in config.items() if value is not None and value is not False]
        return Options(**vars(parser.parse_args(argv)))
    except (OSError, ValueError, AttributeError, BadInput) as error:
        raise BadInput(f"{run}: no readable config.json there: {error}")


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
    if depths is None:      # later stages first: origins also carry the embedding, the head and the loss
        depths = [(o.layers + s) // len(sizes) for s in range(len(sizes))]
    forbid(
        (min(sizes) < 1, f"--stages {sizes}: every stage needs a replica"),
        (sum(sizes) != world, f"--stages needs {sum(sizes)} processes but got {world} (--nproc-per-node)"),
        (len(depths) != len(sizes) or min(depths) < 1 or sum(depths) != o.layers,
         f"{len(sizes)} stages must share {o.layers} layers, at least one each; got {depths}"),
        (o.skip and (len(sizes) < 3 or kept < 1),
         f"--skip needs at least 3 stages and must keep one; got {len(sizes)} and {o.skip}"),
        (o.routing == "fixed" and sizes[0] * o.microbatches < max(sizes),
         f"--routing fixed: {sizes[0]} origins with --microbatches {o.microbatches} leave replicas idle"))
    return cuts(sizes), cuts(depths)


def cuts(parts):
    """[2, 3] -> [[0, 1], [2, 3, 4]]"""
    return [list(range(end - n, end)) for n, end in zip(parts, accumulate(parts))]
