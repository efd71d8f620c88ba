"""Convergence and skipping with other tokens, other outer steps and larger steps.

    python -m experiments.variations [tokens momentum papers] [--seeds 0 1 2] [--steps N] [--out
    DIR]

tokens      4096 tokens of a byte-level BPE instead of bytes: 8 replicas, and 4 stages that skip
momentum    the papers' alpha, beta and gamma beside plain averages, 8 replicas, 800 steps
papers      16 384 tokens a replica and step, 4 replicas, 400 steps, one seed

The tokenizer, runs/tokenizer.json, is trained on the training files where it is missing.
"""
from pathlib import Path

import train
from experiments.comparing import Comparison, Table
from experiments.harness import MEANS_ONLY, Part, Setting, headline
from experiments.results import mean_final, more_at_the_ends, over_runs, results
from experiments.skip import missing_over, missing_stages, network_of
from experiments.together import MICROBATCHES, keep_links
from plumbing.data import load_corpus
from plumbing.processes import BadInput
from tools.installed import write_bpe

TOKENIZER, VOCAB = Path("runs/tokenizer.json"), 4096
BYTES_A_TOKEN = 3.525           # of the held-out text with that tokenizer

# ---------------------------------------------------------------- tokens of a BPE

OF_TOKENS = f"--vocab {VOCAB} --tokenizer {TOKENIZER}"
LEARN = "--layers 2 --warmup 50 --lr 6e-3 --batch 8 --microbatches 1"
TOKENS = {
    "DDP": "--method ddp",
    "NoLoCo, every 2": "--method noloco --inner-steps 2",
    "NoLoCo, every 10": "--method noloco --inner-steps 10",
    "DiLoCo, every 4": "--method diloco --inner-steps 4",
}
SKIPPED = {
    "4 stages, 50% skipped": "--routing skippipe --skip 0.5",
    "4 stages, 25% skipped": "--routing no-swaps --skip 0.25",
}


def tokens_settings(steps):
    if not TOKENIZER.exists():
        train_tokenizer()
    links = keep_links(network_of(4)[0], "headline-links-4.json")
    for label, options in SKIPPED.items():
        yield Setting(label, f"--method ddp --layers 8 --lr 4e-3 --microbatches {MICROBATCHES} "
                      f"--batch 2 --links {links} --stages 2,2,2,2 {options} "
                      f"--steps {steps or 300} {OF_TOKENS}", after=missing_stages)
    for label, options in TOKENS.items():
        yield Setting(label, f"{LEARN} --steps {steps or 600} {OF_TOKENS} {options}")


def train_tokenizer():
    """A byte-level BPE of VOCAB tokens from the training files. Raises BadInput without
    tokenizers."""
    corpus = load_corpus(train.parse([]))
    lines = []
    for part in corpus.train:
        lines += bytes(part.tolist()).decode(errors="replace").splitlines()
    try:
        write_bpe(lines, VOCAB, TOKENIZER)
    except ImportError:
        raise BadInput("the part tokens needs the tokenizers package: pip install '.[hf]'")


def per_byte(comparison):
    """A difference of perplexity per token, as one per byte."""
    differences = []
    for more in comparison.differences:
        differences.append((1 + more) ** (1 / BYTES_A_TOKEN) - 1)
    return Comparison(differences, "+.1%")


def show_tokens(found):
    runs = results(found)
    table = Table("8 replicas, 600 steps", "held-out nats per token",
                  "perplexity per token over DDP's", "per byte")
    for label in TOKENS:
        seeds, more = runs[label], None
        if label != "DDP":
            more = over_runs(seeds, runs["DDP"])
        table.add(label, mean_final(seeds), more, more and per_byte(more))
    table.end()
    table = Table("4 stages, 300 steps", "75% of the stages, over all of them: per token",
                  "half of the stages")
    for label in SKIPPED:
        table.add(label, missing_over(runs[label], "0.75"), missing_over(runs[label], "0.5"))
    table.end()


# ---------------------------------------------------------------- the papers' outer step

EIGHT = "--layers 2 --warmup 50 --microbatches 1 --batch 8 --eval-every 100"
PAPER = {"noloco": "--alpha 0.5 --beta 0.7", "diloco": "--alpha 0.3 --beta 0.7"}
NOLOCO, DILOCO = "--method noloco --inner-steps 10", "--method diloco --inner-steps 20"
WITHOUT = "NoLoCo, every 10 steps, the papers', without the third term (gamma 0)"
MOMENTUM = {
    "DDP": "--method ddp --lr 6e-3",
    "NoLoCo, every 10 steps, plain averages": f"{NOLOCO} --lr 6e-3",
    "NoLoCo, every 10 steps, the papers'": f"{NOLOCO} --lr 6e-3 {PAPER['noloco']}",
    "DiLoCo, every 20 steps, plain averages": f"{DILOCO} --lr 6e-3",
    "DiLoCo, every 20 steps, the papers'": f"{DILOCO} --lr 6e-3 {PAPER['diloco']}",
    "NoLoCo, every 50 steps, the papers', rate 3e-3":
        f"--method noloco --inner-steps 50 --lr 3e-3 {PAPER['noloco']}",
    WITHOUT: f"{NOLOCO} --lr 6e-3 {PAPER['noloco']} --gamma 0",
}


def momentum_settings(steps):
    for label, options in MOMENTUM.items():
        yield Setting(label, f"{EIGHT} {options} --steps {steps or 800}")


def show_momentum(found):
    runs = results(found)
    show_over_ddp(runs, "8 replicas, 800 steps")
    table = Table("8 replicas, 800 steps", "perplexity")
    for method in ("NoLoCo, every 10 steps", "DiLoCo, every 20 steps"):
        table.add(f"{method}: the papers' outer step over plain averages",
                  over_runs(runs[f"{method}, the papers'"], runs[f"{method}, plain averages"]))
    table.end()
    nats = more_at_the_ends(runs[WITHOUT], runs["NoLoCo, every 10 steps, the papers'"])
    print(f"NoLoCo with the papers' values, without the third term over with it: {nats} nats.\n")


def show_over_ddp(runs, head):
    table = Table(head, "held-out nats per byte", "perplexity over DDP's")
    for label, seeds in runs.items():
        more = over_runs(seeds, runs["DDP"]) if label != "DDP" else None
        table.add(label, mean_final(seeds), more)
    table.end()
    print(MEANS_ONLY)


# ---------------------------------------------------------------- the papers' size of a step

LARGE = "--layers 2 --lr 6e-3 --warmup 50 --batch 16 --microbatches 8"
PLAIN = "--alpha 0 --beta 1"
PAPERS = {
    "DDP": "--method ddp",
    "NoLoCo, every 50, plain": f"--method noloco --inner-steps 50 {PLAIN}",
    "NoLoCo, every 50, the paper's": f"--method noloco --inner-steps 50 {PAPER['noloco']}",
    "DiLoCo, every 100, plain": f"--method diloco --inner-steps 100 {PLAIN}",
    "DiLoCo, every 100, the paper's": f"--method diloco --inner-steps 100 {PAPER['diloco']}",
}


def papers_settings(steps):
    for label, options in PAPERS.items():
        yield Setting(label, f"{LARGE} --steps {steps or 400} {options}", 4)


def show_papers(found):
    show_over_ddp(results(found),
                  "4 replicas, 16 384 tokens a replica and step, 400 steps, one seed")


PARTS = {
    "tokens": Part(tokens_settings, show_tokens),
    "momentum": Part(momentum_settings, show_momentum),
    "papers": Part(papers_settings, show_papers, seeds=(0,)),
}

if __name__ == "__main__":
    headline(__doc__, PARTS)
