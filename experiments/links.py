"""How long 60 steps take between eight hosts, measured: three methods, on equal links and with one slow host.

    python -m experiments.links [--seeds 0 1 2] [--out DIR] [--plot]

Eight network namespaces of this machine with a link each (tools/hosts.py; root and iproute2), one replica
on each, real messages over Gloo. Every run is `train.py` under torchrun, started as docs/hosts.md
says; methods take turns, so that a noisy moment does not hit one of them alone. 28 minutes.
"""
import statistics

from experiments.hosts import TINY
from experiments.pictures import show_head, show_row
from experiments.runs import Run, headline, results

LINKS = {"all at 200 Mbit/s": "--mbit 200", "host 5 at 20 Mbit/s": "--mbit 200 --slow 5=20"}
METHODS = "ddp", "diloco --inner-steps 5", "noloco --inner-steps 5"
# One sequence a step: the links are to be measured, not two cores that compute for eight hosts.
COMMON = f"{TINY} --microbatches 1 --batch 1 --eval-every 60 --eval-sequences 1"


def runs(steps):
    for links, hosts in LINKS.items():
        for method in METHODS:
            options = f"{COMMON} --steps {steps or 60} --method {method}"
            yield Run(f"{links}: {method.split()[0]}", options, hosts=hosts)


def last(seeds, key, form):
    values = [run.curves[key][-1] for run in seeds]
    return f"{statistics.median(values):{form}} [{min(values):{form}}, {max(values):{form}}]"


def table(found):
    show_head("links | method | seconds of 60 steps | held per synchronisation, s | longest, s "
              "| MB sent by all")
    for label, seeds in results(found).items():
        links, method = label.split(": ")
        sent = statistics.median(run.curves["sync_bytes"][-1] for run in seeds) / 1e6
        show_row(links, method, last(seeds, "seconds", ".1f"), last(seeds, "sync_seconds", ".2f"),
                 last(seeds, "sync_seconds_longest", ".2f"), f"{sent:.0f}")


if __name__ == "__main__":
    headline("links", __doc__, runs, table)
