"""Write a run's model as a folder that transformers loads: one replica's, or the mean of all.

    python -m tools.export runs/NAME OUT [--replica mean]

It prints the held-out loss of each replica and of the mean, whichever is written. Where paths left
stages out the rho rule (planning/rho.py) is in the weights that are written, unless the run was
--unscaled.
"""
from pathlib import Path

import torch

from model import Llama
from noloco import flatten
from planning.rho import multiply
from plumbing.checkpoints import Checkpoints, load, rho_of
from plumbing.data import load_data
from plumbing.evaluation import evaluate, pipelines
from plumbing.huggingface import save_pretrained, save_tokenizer
from plumbing.options import Parser, empty_folder, layout, whole_config
from plumbing.processes import Job, forbid
from train import Pipeline, parse


def main(argv=None):
    job = Job()
    job.together(export, argv, job)


def export(argv, job):
    parser = Parser(__doc__)
    parser.add_argument("run", help="its folder, with the checkpoint parts of all ranks")
    parser.add_argument("out", type=empty_folder, help="a folder that is empty, or not there yet")
    parser.add_argument("--replica", default="mean", help="0, 1, ..., or the mean of all (default)")
    a = parser.parse_args(argv)
    forbid((job.world > 1, "tools.export runs in one process, without torchrun"))
    o = parse(["--resume", a.run])
    stages, layers = layout(o, sum(o.stages))
    replicas = {}                                           # name: the ranks of each of its stages
    for i, route in enumerate(pipelines(stages)):
        replicas[str(i)] = [[r] for r in route]
    replicas["mean"] = stages
    forbid((a.replica not in replicas, f"--replica takes {', '.join(replicas)}, not {a.replica}"))
    replicas[a.replica] = replicas.pop(a.replica)           # the last one stays in the model
    step, parts = newest(job, Path(a.run), stages)
    corpus, _ = load_data(o, 0, [0])
    model = Llama(whole_config(o), device=job.device)
    flat, rho = by_stage(model, layers), rho_of(o, parts[0])
    pipeline = Pipeline(model, job, [[0]], (o.batch, o.seq_len, o.hidden), getattr(torch, o.dtype))
    print(f"{a.run}, step {step}; held-out loss in nats per token, corpus {corpus.digest}")
    for name, chosen in replicas.items():
        for s, ranks in enumerate(chosen):
            flat[s].copy_(sum(parts[r]["theta"] for r in ranks) / len(ranks))
            multiply(rho[s], [model.model.layers[str(i)] for i in layers[s]])
        (loss,) = evaluate(pipeline, [[0]], corpus, o)
        print(f"replica {name:<9}{loss:.6f}")
    save_pretrained(model, a.out, o.seq_len, corpus.end)
    if o.tokenizer:
        save_tokenizer(a.out, o.tokenizer, corpus.end)
    print(f"{a.replica}, written to {a.out}")


def newest(job, folder, stages):
    """(step, {rank: its part}) of the newest checkpoint of which all parts are here."""
    checkpoints = Checkpoints(job, folder)
    held = {r: checkpoints.parts(r, ranks) for ranks in stages for r in ranks}
    step, lacking = checkpoints.whole(held)
    forbid((step < 0, f"{folder} has no checkpoint with the parts of all {len(held)} ranks: "
                      "bring those that are on other machines here"))
    job.say(f"warning: {why}; step {step} is taken instead" for why in lacking)
    return step, {r: load(files[step]) for r, files in held.items()}


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


if __name__ == "__main__":
    main()
