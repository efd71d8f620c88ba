"""Figs. 2 to 4 and Table 2 of arXiv 2506.10911, tiny: loss against tokens, and the weight spread.

    python -m experiments.losses [--seeds 0 1 2] [--steps N] [--out DIR] [--plot]

8x1: 8 replicas of one stage; 4x2: 4 of two stages. `local` has no outer step. Of an option given twice the
last counts.
"""
import statistics

from experiments.pictures import COLOURS, WIDTH, label_ends, show_head, show_row
from experiments.runs import Part, Run, band, finals, headline, over, over_runs, results, spread_of

LEARN = "--layers 2 --warmup 50 --lr 6e-3 --batch 8 --microbatches 1 --eval-every 100"
EIGHT = f"{LEARN} --steps 1200"
FOUR = f"{LEARN} --steps 600 --microbatches 2 --stages 4,4"
NOLOCO, DILOCO = "--method noloco --inner-steps", "--method diloco --inner-steps"

TABLE = {
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


def runs(steps):
    for label, options in TABLE.items():
        yield Run(label, f"{options} --steps {steps}" if steps else options)


# ---------------------------------------------------------------- the table


def table(found):
    kinds = results(found)
    show_head("replicas x stages, method | held-out nats per byte | perplexity over DDP's "
              "| MB sent per rank to synchronise")
    for label, seeds in kinds.items():
        base = finals(kinds["8x1 DDP" if label.startswith("8x1") else "4x2 DDP, fixed routing"])
        show_row(label, spread_of(finals(seeds)), spread_of(over(finals(seeds), base), "+.1%"),
                 f"{seeds[0].sent:.0f}")


# ---------------------------------------------------------------- the picture


def draw(plt, found):
    """Loss against tokens, with the bytes that each method sends."""
    kinds = results(found)
    figure, axis = plt.subplots(figsize=(WIDTH, 5))
    lines = {"8x1 DDP": "DDP", "8x1 NoLoCo, every 2 steps": "NoLoCo, every 2",
             "8x1 DiLoCo": "DiLoCo, every 20", "8x1 NoLoCo": "NoLoCo, every 10", "8x1 local": "never (local)"}
    for label, name in lines.items():
        seeds = kinds[label]
        colour = COLOURS[label.split(",")[0].removeprefix("8x1 ")]
        x = [tokens / 1e6 for tokens in seeds[0].curves["tokens"]]
        dashes = "--" if "every 2 steps" in label else "-"
        band(axis, [run.losses for run in seeds], x, colour, ls=dashes,
             label=f"{name}: {seeds[0].sent:.0f} MB")
    more, less = (statistics.mean(over_runs(kinds[f"8x1 NoLoCo{m}"], kinds["8x1 DDP"]))
                  for m in ("", ", every 2 steps"))
    axis.set(xlabel="million tokens, all 8 replicas", ylabel="held-out nats per byte", ylim=(1.35, 2.4),
             title=f"Every 10 steps NoLoCo ends {more:.0%} perplexity over DDP, {less:.0%} every 2\n"
                   "(bands: range of three seeds; MB: sent per replica to synchronise)")
    label_ends(axis)
    return figure


if __name__ == "__main__":
    headline(__doc__, {"convergence": Part(runs, table, draw)})
