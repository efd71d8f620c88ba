"""Options: a dataclass whose fields carry their help.

They come from the command line and from a run's config.json.
"""
import argparse
import json
import os
from dataclasses import field, fields
from itertools import accumulate
from pathlib import Path

from model import Config
from plumbing.processes import BadInput, forbid

# The paper's table (arXiv 2506.10911); tiny is for two laptop cores. lr: of the inner optimizer.
PAPER = dict(vocab=128000, seq_len=1024, steps=25000, warmup=1000)
MODELS = {
    "tiny": dict(hidden=128, layers=4, heads=4, mlp=512, lr=3e-3,
                 vocab=256, seq_len=128, steps=300, warmup=30),
    "small": dict(hidden=768, layers=12, heads=16, mlp=3072, lr=6e-4, **PAPER),
    "medium": dict(hidden=2048, layers=24, heads=32, mlp=8192, lr=2e-4, **PAPER),
    "large": dict(hidden=4096, layers=32, heads=32, mlp=16384, lr=1.2e-4, **PAPER),
}
# The options that only some methods have, with each method's defaults. gamma: see `gamma_of`.
METHODS = {
    "noloco": dict(inner_steps=50, alpha=0.5, beta=0.7, gamma=None, group_size=2, wire="fp32",
                   delay=0, fragments=1, survive=0.0),
    "diloco": dict(inner_steps=100, alpha=0.3, beta=0.7, wire="fp32", delay=0, fragments=1),
    "ddp": dict(wire="fp32"),
    "local": dict(survive=0.0),
}
# The papers' values are for 25 000 steps. These are the best that we found for short runs of tiny.
TINY = {
    "noloco": dict(inner_steps=10, alpha=0.0, beta=1.0),
    "diloco": dict(inner_steps=20, alpha=0.0, beta=1.0),
}
# The first of --help.
FIRST = ("method", "stages", "model", "data", "steps", "lr", "inner_steps", "skip", "name",
         "resume")
# In the order of Config's fields.
DIMENSIONS = "vocab", "hidden", "mlp", "layers", "heads"
# A checkpoint fits only a run that agrees in these, and in the hash of its corpus. It has the plan
# that was made for the links.
LAYOUT = (*DIMENSIONS, "stages", "layers_per_stage", "method", "delay", "fragments", "model",
          "seq_len", "seed", "tokenizer", "routing", "skip", "links", "microbatches", "batch",
          "optimizer")


# ---- fields and arguments


def option(default, help, choices=None, least=0, parse=None, planned=False):
    """A field of Options.

    least: of a number. parse: from the words of the command line (default: the field's type).
    planned: whether it does nothing without planned paths.
    """
    metadata = dict(help=help, choices=choices, least=least, parse=parse, planned=planned)
    return field(default=default, metadata=metadata)


def flag(name):
    return "--" + name.replace("_", "-")


def integers(text):
    """Parses "3,2,2". A config.json has it as "[3, 2, 2]"."""
    return [int(number) for number in text.strip("[]").split(",")]


def steps_or_half(text):
    """Parses a number of steps, or "half", which stays as it is until --inner-steps is known."""
    if text == "half":
        return text
    return int(text)


def empty_folder(text):
    """Parses a folder to write."""
    folder = Path(text)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise argparse.ArgumentTypeError(f"{folder} exists and is not an empty folder")
    return folder


class Parser(argparse.ArgumentParser):
    """argparse, but a mistake is one line."""

    def __init__(self, description, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs):
        super().__init__(description=description, formatter_class=formatter_class,
                         allow_abbrev=False, **kwargs)

    def error(self, message):
        raise BadInput(f"{message} (see --help)")


def asks_to_join(argv):
    """Whether the command line has --join, of this process alone: all else is as rank 0 has it."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--join", action="store_true")
    return parser.parse_known_args(argv)[0].join


def make_parser(Options, description):
    """A Parser of all fields. What it returns lacks the options that nobody gave."""
    parser = Parser(description, argument_default=argparse.SUPPRESS)
    first = parser.add_argument_group("what most runs need")
    more = parser.add_argument_group("more")
    for f in fields(Options):
        group = first if f.name in FIRST else more
        text = f.metadata["help"] + default_text(f)
        if f.type is bool:
            group.add_argument(flag(f.name), help=text, action="store_true")
        else:
            group.add_argument(flag(f.name), help=text, type=f.metadata["parse"] or f.type,
                               choices=f.metadata["choices"])
    return parser


def default_text(f):
    """How --help tells a field's default: that of each model and method, where they differ."""
    rows = {**MODELS, **METHODS}
    for method, row in TINY.items():
        rows[f"{method} with tiny"] = row
    shown = [f"{name} {row[f.name]}" for name, row in rows.items() if row.get(f.name) is not None]
    if shown:
        return f" (default: {', '.join(shown)})"
    if f.default is None or f.default is False:
        return ""
    return f" (default: {f.default})"


# ---- the options of a run


def parse_options(Options, argv, world, description):
    """The Options that the command line asks for. Raises BadInput.

    Every option but gamma (see `gamma_of`) gets its value here. So config.json says what ran, even
    where a later version of this program has other defaults.
    """
    parser = make_parser(Options, description)
    given = vars(parser.parse_args(argv))
    for name, value in given.items():
        if value == "":
            raise BadInput(f"{flag(name)} is empty: give a value, or leave it out")
    found = read_config(Options, parser, given["resume"]) if "resume" in given else {}
    o = Options(**{**found, **given})
    take_defaults(o, world)
    if found:
        check_resumed(o, given, found)
    check(o, given)
    return o


def take_defaults(o, world):
    """Give the options that nobody has given their values."""
    for f in fields(o):         # an older config.json has a gamma for every method
        if f.name in METHODS["noloco"] and f.name not in METHODS[o.method]:
            setattr(o, f.name, f.default)
    defaults = {**MODELS[o.model], **METHODS[o.method]}
    if o.model == "tiny":
        defaults.update(TINY.get(o.method, {}))
    defaults["stages"] = [world]
    defaults["routing"] = "skippipe" if o.skip else "random"
    for name, value in defaults.items():
        if getattr(o, name) is None:
            setattr(o, name, value)
    if o.delay == "half":
        o.delay = o.inner_steps // 2
        forbid((o.delay == 0, f"--delay half of --inner-steps {o.inner_steps} is no step: give "
                "--inner-steps 2 or more, or --delay 1"))


def gamma_of(o):
    """gamma (N2): beta, unless --gamma says otherwise.

    o.gamma stays None where nobody gave it, also in config.json, so that a run that resumes with
    another --beta has that for gamma, too.
    """
    return o.beta if o.gamma is None else o.gamma


def check(o, given):
    """Raise BadInput for options that are out of range, do not go together, or would do nothing.

    given: what the command line says, without defaults and config.json.
    """
    foreign = [name for name in METHODS["noloco"] if name not in METHODS[o.method]]
    told = [flag(name) for name in foreign if name in given]
    forbid((told, f"--method {o.method} has no {' and no '.join(told)}"))
    planned = o.routing not in ("random", "fixed")
    for f in fields(o):
        value, least = getattr(o, f.name), f.metadata["least"]
        if f.type in (int, float) and value is not None and not least <= value < float("inf"):
            raise BadInput(f"{flag(f.name)} must be at least {least}, got {value}")
        if f.metadata["planned"] and given.get(f.name) and not planned:
            raise BadInput(f"{flag(f.name)} is for planned paths: give --skip or "
                           "--routing skippipe")
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    gamma = gamma_of(o)
    forbid(
        (not o.skip < 1, f"--skip must be below 1, got {o.skip}"),
        (o.skip and not planned, f"--skip needs a planned routing, not --routing {o.routing}"),
        ("unscaled" in given and not o.skip,
         "--unscaled is for paths that skip stages: give --skip"),
        (not o.beta2 < 1, f"--beta2 must be below 1, got {o.beta2}"),
        (o.alpha is not None and not o.alpha < 1, f"--alpha must be below 1, got {o.alpha}"),
        (o.beta is not None and not o.beta > 0, f"--beta must be above 0, got {o.beta}"),
        (o.survive and o.delay, "--survive does not go with --delay"),
        (o.survive and o.fragments > 1, "--survive does not go with --fragments: a fragment's "
         "partners are drawn among all replicas, dead ones too (docs/failures.md)"),
        (o.wire == "bf16" and o.method == "noloco",
         "--wire bf16 rounds updates of NoLoCo's theta away: give --wire int8"),
        (o.wire == "int8" and gamma != o.beta,
         f"--wire int8 needs gamma = beta, not {gamma}, {o.beta}"),
        (o.delay and o.delay > o.inner_steps,
         f"--delay {o.delay}: takes 0 to --inner-steps, or half"),
        (o.fragments > (o.inner_steps or 1),
         f"--fragments {o.fragments}: takes 1 to --inner-steps, a step of its own for each"),
        (restarts and not (o.name or o.resume),
         "torchrun's --max-restarts needs --name, to find the folder"),
        (o.name and (Path(o.name).name != o.name or o.name == ".."),
         f"--name {o.name}: takes a name without a path"))


def check_resumed(o, given, found):
    """Raise BadInput where the run in o.resume cannot go on with what the command line gives.

    found: what its config.json says.
    """
    for name in LAYOUT:
        if name in given and getattr(o, name) != found[name]:
            raise BadInput(f"{flag(name)} {getattr(o, name)} differs from the {found[name]} of "
                           f"{o.resume}: drop it")
    folder = Path(o.resume).resolve().name
    inner_steps = found["inner_steps"]
    forbid(
        (given.get("name", folder) != folder,
         f"--name {o.name}: --resume goes on in {o.resume}: drop it"),
        # Nobody knows any more whether it was given as a number or as half.
        (o.delay and o.inner_steps != inner_steps and "delay" not in given,
         f"--inner-steps {o.inner_steps}: {o.resume} delays messages by {o.delay} of {inner_steps} "
         f"steps, which stays so: give --delay {o.delay} as well"))


def read_config(Options, parser, folder):
    """{name: value} of all Options, from a run's config.json. Raises BadInput.

    It goes through the parser, as if the command line gave it, which finds values of a wrong type.
    """
    try:
        config = json.loads((Path(folder) / "config.json").read_text())
        argv = []
        for name, value in config.items():
            if value is True:
                argv.append(flag(name))
            elif value is not None and value is not False:
                argv.append(f"{flag(name)}={value}")
        found = vars(Options(**vars(parser.parse_args(argv))))
    except (OSError, ValueError, AttributeError, BadInput) as error:
        raise BadInput(f"{folder}: no readable config.json there: {error}")
    lacking = [name for name in ("method", "model", "stages") if name not in config]
    forbid((lacking,
            f"{folder}: its config.json has no {' and no '.join(lacking)}: it is of no run"))
    return found


# ---- what the options mean


def whole_config(o):
    """The whole model's Config."""
    try:
        return Config(*(getattr(o, name) for name in DIMENSIONS), num_key_value_heads=o.heads)
    except ValueError as error:
        raise BadInput(str(error))


def layout(o, world):
    """stages, the ranks of each, and layers, the global layer numbers of each. Raises BadInput."""
    sizes, depths = o.stages, o.layers_per_stage
    count = len(sizes)
    if depths is None:          # later stages first: origins also carry embedding, head and loss
        depths = [(o.layers + s) // count for s in range(count)]
    kept = round((1 - o.skip) * count)
    forbid(
        (min(sizes) < 1, f"--stages {sizes}: every stage needs a replica"),
        (sum(sizes) != world,
         f"--stages needs {sum(sizes)} processes but got {world} (--nproc-per-node)"),
        (len(depths) != count or min(depths) < 1 or sum(depths) != o.layers,
         f"{count} stages must share {o.layers} layers, at least one each; got {depths}"),
        (o.skip and (count < 3 or kept < 1),
         f"--skip needs at least 3 stages and must keep one; got {count} and {o.skip}. Three are, "
         "with torchrun --nproc-per-node 3, --stages 1,1,1"),
        (o.routing == "fixed" and sizes[0] * o.microbatches < max(sizes),
         f"--routing fixed: {sizes[0]} origins with --microbatches {o.microbatches} leave replicas "
         "idle"))
    return cuts(sizes), cuts(depths)


def cuts(parts):
    """[2, 3] -> [[0, 1], [2, 3, 4]]"""
    return [list(range(end - n, end)) for n, end in zip(parts, accumulate(parts))]
