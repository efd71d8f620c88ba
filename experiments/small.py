"""The paper's small Llama, 125M, as four replicas on one GPU: loss against steps (part of
experiments/gpu.py).

bf16 compute, 32 768 tokens a replica and step, the paper's learning rate, momenta and steps between
outer steps. The text is that of the installed packages (tools/installed.py), in a BPE of 32 000
tokens. DDP is one process that sees all four replicas' tokens in its step: the same step but for
rounding and for which text comes when. It is also plain training, whose share of the GPU's peak is
told.
"""
import json
import re
import shutil
from pathlib import Path

from experiments.comparing import Table
from experiments.fleet import machine
from experiments.pictures import COLOURS, WIDTH, label_ends
from experiments.pieces import Kept, OutOfTime, run_within, tail
from plumbing.processes import BadInput

METHODS = {     # processes, and options of train.py
    "DDP": (1, "--method ddp"),
    "NoLoCo": (4, "--method noloco --inner-steps {noloco}"),
    "DiLoCo": (4, "--method diloco --inner-steps {diloco}"),
    "NoLoCo, fragments": (4, "--method noloco --inner-steps {noloco} --fragments {fragments}"),
}
FULL = dict(
    options="--model small --vocab 32000 --seq-len 1024 --batch 8 --dtype bfloat16 --device cuda "
    "--backend gloo --warmup 30 --eval-every 25 --eval-sequences 32",
    microbatches=4, steps=300, noloco=50, diloco=100, fragments=10)
TINY = dict(
    options="--hidden 32 --layers 2 --heads 2 --mlp 64 --seq-len 32 --batch 2 --device cpu "
    "--warmup 2 --eval-every 2 --eval-sequences 4",
    microbatches=1, steps=8, noloco=2, diloco=4, fragments=2)
LINE = re.compile(r"([\d.]+)M parameters")
KEEP = ("step", "heldout_loss", "merged_loss", "tokens_per_second", "gpu_share", "gpu_bytes",
        "seconds", "held")


def measure(o, clock):
    """Run what is missing. Raises OutOfTime; a run that is stopped goes on the next time."""
    folder = Path("runs", "gpu-try" if o.tiny else "gpu")
    kept = Kept(folder / "small.json")
    setting = dict(TINY if o.tiny else FULL)
    if o.steps:
        setting["steps"] = o.steps
    text = "" if o.tiny else make_text(folder, clock)
    for name in METHODS:
        if name not in kept.rows:
            clock.need(f"small: {name}, or a part of it,", 30 if o.tiny else 120)
            kept.keep(name, train_one(name, setting, text, folder, clock))


def make_text(folder, clock):
    """The options of train.py that read the text, which is written once."""
    tokenizer, data = folder / "bpe.json", folder / "text"
    if not (data / "val.bin").exists():
        clock.need("small: the text", 150)
        shutil.rmtree(data, ignore_errors=True)
        tokenizer.unlink(missing_ok=True)
        words = ["-m", "tools.installed", str(data), "--vocab", "32000", "--tokenizer",
                 str(tokenizer), "--megabytes", "200"]
        log = folder / "text.log"
        if run_within(clock.left(), words, log) != 0:
            raise BadInput(f"the text could not be made: {tail(log)}")
    return f"--data {data} --tokenizer {tokenizer}"


def train_one(name, setting, text, folder, clock):
    """The run's row. Raises BadInput where it fails, OutOfTime where it is stopped."""
    processes, options = METHODS[name]
    options = options.format(**setting)
    microbatches = setting["microbatches"] * (4 if processes == 1 else 1)
    run = Path("runs", f"{folder.name}-small-{name}".replace(", ", "-"))
    words = (f"--name {run.name} {setting['options']} {text} --microbatches {microbatches} "
             f"--steps {setting['steps']} --save-every 1000000 {options}")
    if any(run.glob("checkpoints/*/*.pt")):
        words = f"--resume {run}"
    else:
        shutil.rmtree(run, ignore_errors=True)
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes),
             "-m", "train"]
    log = folder / f"{run.name}.log"
    status = run_within(clock.left(), [*start, *words.split()], log, OMP_NUM_THREADS="2")
    if status is None:
        raise OutOfTime(f"small: the rest of {name} is left")
    if status:
        raise BadInput(f"train.py {words} failed (see {log}): {tail(log)}")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = LINE.search(log.read_text(errors="replace"))
    row = dict(command=f"train.py {words}", processes=processes, machine=machine(),
               millions=found and float(found[1]), curve=[])
    for line in lines:
        if "heldout_loss" in line:
            row["curve"].append({key: line[key] for key in KEEP})
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    return row


# ---------------------------------------------------------------- what was found


def show(found):
    table = Table("method", "loss, merged", "tokens/s", "share of the peak", "GB a rank")
    for name, row in found["rows"].items():
        last = row["curve"][-1]
        share = last["gpu_share"] and f"{last['gpu_share']:.1%}"
        memory = last["gpu_bytes"] and f"{last['gpu_bytes'] / 1e9:.1f}"
        table.add(name, f"{merged(last):.4f}", f"{last['tokens_per_second']:.0f}", share, memory)
    for row in list(found["rows"].values())[:1]:
        print(f"{row['millions']:g}M weights, {row['curve'][-1]['step']} steps, {row['machine']}\n")
    table.end()


def merged(line):
    """Of the merged model; of a single process it is the model's own."""
    return line["heldout_loss"] if line["merged_loss"] is None else line["merged_loss"]


def draw(plt, found):
    """The mean held-out loss of the replicas at each evaluation, from the second on."""
    figure, axis = plt.subplots(figsize=(WIDTH, 5))
    for name, row in found["rows"].items():
        curve = row["curve"][1:]
        axis.plot([line["step"] for line in curve], [line["heldout_loss"] for line in curve],
                  color=COLOURS[name.split(",")[0]], ls="--" if "," in name else "-", marker="o",
                  lw=1.3, label=name.replace(", ", ",\n"))
    axis.set(xlabel="steps", ylabel="held-out nats per token, mean over replicas")
    axis.set_title(title(found))
    label_ends(axis)
    return figure


def title(found):
    rows = found["rows"]
    if found.get("tiny") or len(rows) < len(METHODS):
        return f"Loss against steps (a try: {len(rows)} of {len(METHODS)} runs, no finding)"
    last = {name: merged(row["curve"][-1]) for name, row in rows.items()}
    steps = rows["DDP"]["curve"][-1]["step"]
    millions = rows["DDP"]["millions"]
    return (f"After {steps} steps of {millions:.0f}M weights the merged NoLoCo is "
            f"{last['NoLoCo'] - last['DDP']:+.3f} nats per token from DDP, in fragments "
            f"{last['NoLoCo, fragments'] - last['DDP']:+.3f},\nDiLoCo "
            f"{last['DiLoCo'] - last['DDP']:+.3f} (four replicas on one {rows['DDP']['machine']}, "
            "one seed)")
