"""How long 60 steps take between eight hosts, measured: three methods, on equal links and with one slow host.

    python -m experiments.links [--runs 3] [--out DIR]

Eight network namespaces of this machine with a link each (tools/hosts.py; root and iproute2), one replica
on each, real messages over Gloo. Every run is `train.py` under torchrun, started as docs/hosts.md
says; methods take turns, so that a noisy moment does not hit one of them alone. 28 minutes.
"""
import argparse
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

from tqdm import tqdm

from experiments.runs import command_line

HOSTS = 8
LINKS = {"all at 200 Mbit/s": [], "host 5 at 20 Mbit/s": ["--slow", "5=20"]}
METHODS = {"ddp": [], "diloco": ["--inner-steps", "5"], "noloco": ["--inner-steps", "5"]}
# One sequence a step: the links are to be measured, not two cores that compute for eight hosts.
TRAIN = ["--steps", "60", "--microbatches", "1", "--batch", "1", "--eval-every", "60", "--save-every", "1000",
         "--eval-sequences", "1"]
KEPT = ("seconds", "sync_seconds", "sync_seconds_longest", "sync_bytes", "steps_alone", "heldout_loss")


def command(links, method, name):
    words = ["--stages", str(HOSTS), "--method", method, *METHODS[method], *TRAIN, "--name", name]
    return command_line(HOSTS, "train.py", *words, hosts=["--mbit", "200", *LINKS[links]])


def measured(links, method):
    """The last line of one run's metrics.jsonl."""
    folder = Path("runs/links")
    shutil.rmtree(folder, ignore_errors=True)
    done = subprocess.run(command(links, method, folder.name), capture_output=True, text=True, timeout=600)
    if done.returncode:
        sys.exit(f"error: {links}, {method}: {done.stderr[-2000:]}")
    row = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    return {key: row[key] for key in KEPT}


def show(values, form):
    return f"{statistics.median(values):{form}} [{min(values):{form}}, {max(values):{form}}]"


def table(found):
    yield "| links | method | seconds of 60 steps | held per synchronisation, s | longest, s | MB sent |"
    yield "|---|---|---|---|---|---|"
    for links, rows in found.items():
        for method, runs in rows.items():
            columns = {key: [run[key] for run in runs] for key in KEPT}
            yield (f"| {links} | {method} | {show(columns['seconds'], '.1f')} | "
                   f"{show(columns['sync_seconds'], '.2f')} | "
                   f"{show(columns['sync_seconds_longest'], '.2f')} | "
                   f"{statistics.median(columns['sync_bytes']) / 1e6:.0f} |")


def main():
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs"), help="numbers go to OUT/results")
    o = parser.parse_args()
    found = {links: {method: [] for method in METHODS} for links in LINKS}
    turns = [(links, method) for _ in range(o.runs) for links in LINKS for method in METHODS]
    for links, method in tqdm(turns, dynamic_ncols=True):
        found[links][method].append(measured(links, method))
    print(*table(found), sep="\n")
    (o.out / "results").mkdir(parents=True, exist_ok=True)
    commands = {}
    for method in METHODS:
        words = command("all at 200 Mbit/s", method, "NAME")
        commands[method] = " ".join(Path(word).name if "/" in word else word for word in words)
    (o.out / "results" / "links.json").write_text(json.dumps(dict(commands=commands, rows=found), indent=1))


if __name__ == "__main__":
    main()
