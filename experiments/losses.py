"""Figs. 2 to 4 and Table 2 of arXiv 2506.10911, tiny: loss against tokens, and the weight spread.

    python -m experiments.losses [--seeds 0 1 2] [--steps N] [--out DIR] [--plot]

8x1: 8 replicas of one stage; 4x2: 4 of two stages. `local` has no outer step. Of an option given
twice the last counts. A loss of NoLoCo is the mean over its replicas, which still differ; a loss of
DiLoCo is that of the one model that it keeps.
"""
from experiments.comparing import Comparison, Table
from experiments.harness import MEANS_ONLY, Part, Setting, headline, title_of
from experiments.pictures import COLOURS, WIDTH, band, counted, focus, label_ends
from experiments.results import finals, mean_final, over_runs, results, same_seeds, spread_of

LEARN = "--layers 2 --warmup 50 --lr 6e-3 --batch 8 --microbatches 1 --eval-every 100"
EIGHT = f"{LEARN} --steps 1200"
FOUR = f"{LEARN} --steps 600 --microbatches 2 --stages 4,4"
NOLOCO, DILOCO = "--method noloco --inner-steps", "--method diloco --inner-steps"

OPTIONS = {
    "8x1 DDP": f"{EIGHT} --method ddp",
    "8x1 DiLoCo": f"{EIGHT} {DILOCO} 20",
    "8x1 NoLoCo": f"{EIGHT} {NOLOCO} 10",
    "8x1 local": f"{EIGHT} --method local",
    "8x1 DiLoCo, every 4 steps": f"{EIGHT} {DILOCO} 4",
    "8x1 NoLoCo, every 2 steps": f"{EIGHT} {NOLOCO} 2",
    "4x2 DDP, fixed routing": f"{FOUR} --method ddp --routing fixed",
    "4x2 DiLoCo, fixed routing": f"{FOUR} {DILOCO} 20 --routing fixed",
    "4x2 NoLoCo, random routing": f"{FOUR} {NOLOCO} 10 --routing random",
    "4x2 NoLoCo, fixed routing": f"{FOUR} {NOLOCO} 10 --routing fixed",
    "4x2 local, random routing": f"{FOUR} --method local --routing random",
    "4x2 local, fixed routing": f"{FOUR} --method local --routing fixed",
}
# NoLoCo: the DiLoCo beside which it is put, with about as many bytes.
BESIDE = {
    "8x1 NoLoCo": "8x1 DiLoCo",
    "8x1 NoLoCo, every 2 steps": "8x1 DiLoCo, every 4 steps",
    "4x2 NoLoCo, random routing": "4x2 DiLoCo, fixed routing",
    "4x2 NoLoCo, fixed routing": "4x2 DiLoCo, fixed routing",
}
DDP = {"8x1": "8x1 DDP", "4x2": "4x2 DDP, fixed routing"}       # of each layout


def convergence_settings(steps):
    for label, options in OPTIONS.items():
        yield Setting(label, f"{options} --steps {steps}" if steps else options)


# ---------------------------------------------------------------- the tables


def show_convergence(found):
    runs = results(found)
    table = Table("replicas x stages, method", "held-out nats per byte", "perplexity over DDP's",
                  "over DiLoCo's", "MB sent per rank")
    for label, seeds in runs.items():
        base = DDP[label[:3]]
        over_ddp, over_diloco = None, None
        if label != base:
            over_ddp = over_runs(seeds, runs[base])
        if label in BESIDE:
            over_diloco = over_runs(seeds, runs[BESIDE[label]])
        table.add(label, mean_final(seeds), over_ddp, over_diloco, f"{seeds[0].sent:.0f}")
    table.end()
    print(MEANS_ONLY)
    table = Table("4x2, random routing over fixed", "perplexity", "weight spread at the end")
    for method in "local", "NoLoCo":
        random, fixed = runs[f"4x2 {method}, random routing"], runs[f"4x2 {method}, fixed routing"]
        table.add(method, over_runs(random, fixed), spread_over(random, fixed))
    table.end()


def spread_over(runs, others):
    """The weight spread at the end over the others', seed by seed."""
    differences = []
    for run, other in zip(runs, same_seeds(runs, others)):
        differences.append(run.curves["weight_spread"][-1] / other.curves["weight_spread"][-1] - 1)
    return Comparison(differences, "+.1%")


def record_convergence(found):
    table = Table("replicas x stages, method", "held-out nats per byte (least to largest)",
                  "weight spread at the end (least to largest)")
    for label, seeds in results(found).items():
        spreads = [run.curves["weight_spread"][-1] for run in seeds]
        table.add(label, spread_of(finals(seeds)), spread_of(spreads, ".2e"))
    table.end()


# ---------------------------------------------------------------- the picture

DRAWN = {       # the run: (its name in the picture, colour, dashes)
    "8x1 local": ("never", "local", "-"),
    "8x1 NoLoCo": ("NoLoCo, every 10", "NoLoCo", "-"),
    "8x1 DiLoCo": ("DiLoCo, every 20", "DiLoCo", "-"),
    "8x1 NoLoCo, every 2 steps": ("NoLoCo, every 2", "NoLoCo", "--"),
    "8x1 DDP": ("DDP", "DDP", "-"),
}


def draw_convergence(plt, found):
    """Loss against tokens, with the bytes that each method sends."""
    runs = results(found)
    figure, axis = plt.subplots(figsize=(WIDTH, 4.8))
    curves = []
    for label, (name, colour, dashes) in DRAWN.items():
        seeds = runs[label]
        curves += [run.losses for run in seeds]
        x = [tokens / 1e6 for tokens in seeds[0].curves["tokens"]]
        band(axis, [run.losses for run in seeds], x, COLOURS[colour], ls=dashes,
             label=f"{name}: {seeds[0].sent:.0f} MB")
    rarely = over_runs(runs["8x1 NoLoCo"], runs["8x1 DDP"]).mean
    often = over_runs(runs["8x1 NoLoCo, every 2 steps"], runs["8x1 DDP"]).mean
    finding = (f"NoLoCo ends {often:.0%} in perplexity over DDP when it averages every 2 steps, "
               f"{rarely:.0%} every 10")
    seeds = counted(len(runs["8x1 DDP"]), "seed")
    focus(axis, curves)
    axis.set(xlabel=f"million tokens, all 8 replicas (bands: range of {seeds}; MB: sent per "
             "replica to synchronise)", ylabel="held-out nats per byte",
             title=title_of(found, finding, "Loss against tokens"))
    label_ends(axis)
    return figure


PARTS = {"convergence": Part(convergence_settings, show_convergence, record_convergence,
                             {"convergence": draw_convergence})}

if __name__ == "__main__":
    headline(__doc__, PARTS)
