"""Train with replicas and pipelines that outlive lost processes: train.py's options, and two more.

    torchrun --nnodes 8 --nproc-per-node 1 --node-rank I --master-addr HOST0 -m survive
    ... -m survive --survive 30         a partner that is silent for 30 seconds is given up
    ... -m survive --join               a process that was lost comes back

Each process needs a torchrun of its own, or none: torchrun ends all processes beside one that dies.
A process that comes back is started with the same RANK and --join, and takes its options from the
others. docs/failures.md says what is survived, and how long it takes.
"""
import argparse
import os
import sys
import traceback

from survive.parts import go_through
from survive.standby import address_in_use
from train import in_one_line, need, number, options, parse, start


def surviving_options(argv, world):
    """{name: value}. Raises BadInput."""
    parser = options(__doc__)
    parser.add_argument("--survive", type=number(float, 1e-3), default=60.0,
                        help="seconds to wait for a partner (default: 60)")
    o = parse(argv, world, parser)
    need(o.method in ("noloco", "local"), f"survive trains with noloco or local, not {o.method}")
    need(not o.delay and o.fragments == 1,
         "survive goes with neither --delay nor --fragments: a message under way, or a fragment's "
         "partners, would be lost with the dead (docs/failures.md)")
    return vars(o)


def train_surviving(argv):
    job = start(argv)
    joins = "--join" in argv
    if joins:
        refuse_wrong_join(job)
    argv = [word for word in argv if word != "--join"]
    with in_one_line(job):
        o = surviving_options(argv, job.world) if job.leads else None
        o = argparse.Namespace(**job.share(o)[0])
    go_through(job, o, joins)


def refuse_wrong_join(job):
    """End this process where it may not join, without a word to other ranks: that would stay in
    their store.
    """
    if job.leads:
        line = "is for a process that comes back to a running job, never for rank 0"
    else:
        place = address_in_use(job.store, job.rank)
        if not place:
            return
        line = (f"takes the place of a lost process, but rank {job.rank} lives at {place}: end it "
                "first")
    print(f"error: --join {line}", file=sys.stderr, flush=True)
    sys.exit(2)


def main(argv=None):
    """argv: the command line. None: that of this process, which ends here.

    Threads may be left that wait in Gloo for a lost peer, maybe for ever (pipeline.py). If such a
    wait ends while Python takes the interpreter down, Python ends the thread in the midst of
    torch's code, and that aborts the process: "terminate called without an active exception",
    status 134, after all was saved and said. `os._exit` takes nothing down.
    """
    if argv is not None:
        return train_surviving(argv)
    status = 1
    try:
        train_surviving(sys.argv[1:])
        status = 0
    except SystemExit as stop:
        status = status_of(stop)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def status_of(stop):
    """The exit status of a SystemExit. A text is printed, as Python does it, and means 1."""
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code
    print(stop.code, file=sys.stderr)
    return 1


if __name__ == "__main__":
    main()
