"""Write a run's model as a folder that transformers loads: one replica's, or the mean of all.

    python -m tools.export runs/NAME OUT [--replica mean] [--data MOVED]

It prints the held-out loss of each replica and of the mean, whichever is written. Where paths left
stages out, the rule of `train.scaled` is in the weights that are written, unless the run was
--unscaled.
"""
import json
import math
from pathlib import Path

import torch

from model import Llama
from noloco import flatten
from tools import empty_folder
from gossip import more
from train import (Job, Parser, Pipeline, config_of, evaluate, in_one_line, last_matrices, layout,
                   load_corpus, load_part, need, need_same, parse, pipelines)


def main(argv=None):
    job = Job()
    with in_one_line(job):
        export(argv, job)


def export(argv, job):
    parser = Parser(__doc__)
    parser.add_argument("run", help="the run's folder, with the checkpoint parts of all ranks")
    parser.add_argument("out", type=empty_folder, help="a folder to write, new or empty")
    parser.add_argument("--replica", default="mean",
                        help="the replica to write: 0, 1, ..., or mean, of all (default)")
    parser.add_argument("--data", help="where the run's data are now (default: where they were)")
    a = parser.parse_args(argv)
    need(job.world == 1, "tools.export runs in one process, without torchrun")
    o = parse(["--resume", a.run])
    o.data = a.data or o.data
    stages, layers = layout(o, sum(o.stages))
    replicas = {}                                           # name: the ranks of each of its stages
    for i, route in enumerate(pipelines(stages)):
        replicas[str(i)] = [[r] for r in route]
    replicas["mean"] = stages
    need(a.replica in replicas, f"--replica takes {', '.join(replicas)}, not {a.replica}")
    replicas[a.replica] = replicas.pop(a.replica)           # the last one stays in the model
    step, parts = newest(Path(a.run), stages)
    corpus = load_corpus(o, more.parts(o).get("tokenizer"))
    need_same(o, parts[0], corpus)
    model = Llama(config_of(o), device=job.device)
    flat = by_stage(model, layers)
    pipeline = Pipeline(model, job, [[0]], (o.batch, o.seq_len, o.hidden), getattr(torch, o.dtype))
    print(f"{a.run}, step {step}; held-out loss in nats per token, corpus {corpus.digest}")
    for name, chosen in replicas.items():
        for s, ranks in enumerate(chosen):
            flat[s].copy_(sum(parts[r]["theta"] for r in ranks) / len(ranks))
            if not o.unscaled:
                scale(model, layers[s], parts[0]["rho"][s])
        (loss,) = evaluate(pipeline, [[0]], corpus, o)
        print(f"replica {name:<9}{loss:.6f}")
    need(math.isfinite(loss), f"replica {a.replica} is not written: its held-out loss is {loss}")
    save_pretrained(model, a.out, o.seq_len, corpus.end)
    if o.tokenizer:
        save_tokenizer(a.out, o.tokenizer, corpus.end)
    print(f'{a.replica}, written to {a.out}: AutoModelForCausalLM.from_pretrained("{a.out}")')


def newest(folder, stages):
    """(step, {rank: its part}) of the newest checkpoint of which all parts are here.

    If a rank was dead (survive/checkpoints.py), another replica's part takes the place of its own.
    """
    for place in sorted(folder.glob("checkpoints/[0-9]*[0-9]"), reverse=True):
        files = {}
        for ranks in stages:
            for r in ranks:
                usable = [r, *ranks] if (place / f"rank{r}.dead").exists() else [r]
                there = [place / f"rank{u}.pt" for u in usable]
                files |= {r: file for file in reversed(there) if file.exists()}
        if len(files) == sum(len(ranks) for ranks in stages):
            return int(place.name), {r: load_part(file) for r, file in files.items()}
        print(f"warning: {place} lacks the part of some rank: an older one is taken instead")
    count = sum(len(ranks) for ranks in stages)
    need(False, f"{folder} has no checkpoint with the parts of all {count} ranks: bring those that "
         "are on other machines here")


def by_stage(model, layers):
    """The model's parameters as one vector for each stage, laid out as the stage's theta."""
    stage_of = {i: s for s, numbers in enumerate(layers) for i in numbers}
    held = [[] for _ in layers]
    for name, p in model.named_parameters():
        words = name.split(".")
        stage = 0                                               # of what belongs to no layer
        if "layers" in words:
            stage = stage_of[int(words[words.index("layers") + 1])]
        held[stage].append(p)
    return [flatten(params) for params in held]


def scale(model, layers, rho):
    """Put the rule of `train.scaled` into the weights of these layers, for good."""
    for w in last_matrices([model.model.layers[str(i)] for i in layers]):
        w.mul_(rho)


# ---- the folders of transformers


def save_pretrained(model, folder, positions, end=None):
    """Write a whole model as a folder that transformers loads unchanged.

    positions: tokens per sequence. end: the token that ends a document. Raises BadInput without
    safetensors.
    """
    try:
        from safetensors.torch import save_file
    except ImportError:
        need(False, "this needs the safetensors package: pip install '.[hf]'")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_act="silu",
                  torch_dtype="float32", max_position_embeddings=positions, bos_token_id=None,
                  eos_token_id=end, pad_token_id=None, **vars(model.config))
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    weights = {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    # the package makes it readable by its owner alone
    (folder / "model.safetensors").chmod((folder / "config.json").stat().st_mode)


def save_tokenizer(folder, tokenizer, end):
    """Write the run's tokenizer next to the model, as tokenizer.json and tokenizer_config.json."""
    from tokenizers import Tokenizer
    name = Tokenizer.from_file(tokenizer).id_to_token(end)
    (folder / "tokenizer.json").write_bytes(Path(tokenizer).read_bytes())
    config = dict(tokenizer_class="PreTrainedTokenizerFast", clean_up_tokenization_spaces=False,
                  eos_token=name)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    main()
