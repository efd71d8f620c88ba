"""What a GPU shows, in pieces of at most eight minutes: the same command goes on where it stopped.

    python -m experiments.gpu [PART ...] [--minutes 8]          all that is missing, part by part
    python -m experiments.gpu --try                             tiny, on any machine: minutes
    python -m experiments.gpu --plot --out .                    tables and pictures of results/

tokens   the gap to DDP against the tokens of a replica's step (experiments/tokens.py). The only
         part that also runs without a GPU, to 8192 tokens, one seed: hours, --minutes 600
small    the paper's small model, four replicas on one GPU (experiments/small.py)
nccl     the tests that need a GPU (tests/test_nccl.py)
outer    how long an outer step takes, and how much of it the training sees (experiments/outer.py)

A run is kept in runs/ once it is done, and none begins that would end too late; a longer one is
stopped. Results go to OUT/results/gpu_PART.json, pictures to OUT/figures (default OUT: runs). A
fresh machine goes on from OUT/results alone.
"""
import sys
from pathlib import Path

import torch

from experiments import outer, small, tokens
from experiments.pictures import picture
from experiments.pieces import Clock, Kept, OutOfTime, run_within, tail
from experiments.replicas import LENGTH
from experiments.results import kept_result, save_result
from plumbing.options import Parser
from plumbing.processes import BadInput, Job

# torchrun's workers, each as a host of its own: otherwise NCCL refuses two on one GPU.
ONE_GPU = ("NCCL_HOSTID=rank$RANK NCCL_SOCKET_IFNAME=lo LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 "
           'exec "$@"')
TESTS = ("any_combination_on_a_gpu", "fragments_on_a_gpu", "slow_replica_on_a_gpu",
         "nccl_loses_what_gloo", "goes_on_with_a_message", "planned_paths_and_replan")
TRIED_TESTS = ("runs_are_such_as_train_takes",)


# ---------------------------------------------------------------- nccl and outer


def folder_of(o):
    return Path("runs", "gpu-try" if o.tiny else "gpu")


def measure_tests(o, clock):
    """Each test function is a run; those that failed run again the next time."""
    kept = Kept(folder_of(o) / "nccl.json")
    names = TRIED_TESTS if o.tiny else TESTS
    for name in names:
        if kept.rows.get(name, {}).get("passed"):
            continue
        clock.need(f"nccl: {name}", 60)
        log = folder_of(o) / f"nccl-{name}.log"
        words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_nccl.py", "-k", name]
        status = run_within(clock.left(), words, log)
        lines = log.read_text(errors="replace").splitlines() or ["it printed nothing"]
        said = "stopped: out of time" if status is None else lines[-1]
        kept.keep(name, dict(passed=status == 0 and "passed" in said, said=said, log=str(log)))
        print(f"{name}: {said}", flush=True)


def show_tests(found):
    for name, row in found["rows"].items():
        more = "" if row["passed"] else f" (see {row['log']})"
        print(f"{name}: {row['said']}{more}")


def measure_outer(o, clock):
    """Over Gloo, then over NCCL: the rows that are missing."""
    file = folder_of(o) / "outer.json"
    backends = ["gloo", "nccl"]
    options = ""
    if o.tiny:
        backends = ["gloo"]
        options = "--device cpu --params 1e5 --work 64 --products 2 --trials 2"
    for backend in backends:
        if all(f"{backend}, {name}" in Kept(file).rows for name in outer.KINDS):
            continue
        clock.need(f"outer: {backend}", 30 if o.tiny else 60)
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        if backend == "nccl":
            words += ["--no-python", "sh", "-c", ONE_GPU, "sh", sys.executable]
        minutes = max(0.1, (clock.left() - 15) / 60)
        words += ["-m", "experiments.outer", str(file), "--backend", backend, "--minutes",
                  f"{minutes:.2f}", *options.split()]
        log = folder_of(o) / f"outer-{backend}.log"
        status = run_within(clock.left(), words, log)
        if status:
            raise BadInput(f"the outer steps over {backend} failed (see {log}): {tail(log)}")
        if not all(f"{backend}, {name}" in Kept(file).rows for name in outer.KINDS):
            raise OutOfTime(f"outer: {backend} has rows left")


# ---------------------------------------------------------------- the parts


def collect_rows(name):
    """What a part with a file of rows has kept."""
    def collect(o):
        return dict(rows=Kept(folder_of(o) / f"{name}.json").rows)
    return collect


# (measure(o, clock), collect(o) -> found, show(found), draw(plt, found) or None)
PARTS = {
    "tokens": (tokens.measure, tokens.collect, tokens.show, tokens.draw),
    "small": (small.measure, collect_rows("small"), small.show, small.draw),
    "nccl": (measure_tests, collect_rows("nccl"), show_tests, None),
    "outer": (measure_outer, collect_rows("outer"), outer.show, None),
}


def restore(name, key, o):
    """Take up what OUT/results has of an earlier piece, perhaps from a machine that is gone."""
    if not Path(o.out, "results", f"{key}.json").exists():
        return
    found = kept_result(o.out, key)
    if name == "tokens":
        tokens.restore(found)
        return
    kept = Kept(folder_of(o) / f"{name}.json")
    for row_name, row in found["rows"].items():
        if row_name not in kept.rows:
            kept.keep(row_name, row)


def parse(argv):
    p = Parser(__doc__)
    p.add_argument("parts", nargs="*", help=f"{', '.join(PARTS)} (default: all)")
    p.add_argument("--minutes", type=float, default=8, help="of this piece (default: 8)")
    p.add_argument("--try", dest="tiny", action="store_true", help="a tiny scale, on CPUs as well")
    p.add_argument("--seeds", nargs="+", type=int, help="tokens: in place of 0 1 2")
    p.add_argument("--tokens", nargs="+", type=int,
                   help=f"tokens: of a replica's step, multiples of {LENGTH} (default: 512 to "
                   "32768)")
    p.add_argument("--rates", nargs="+", type=float,
                   help="tokens: learning rates to take the best of, on the first seed "
                   "(default: 6e-3 alone)")
    p.add_argument("--steps", type=int, help="tokens, small: in place of 600 and 300")
    p.add_argument("--out", default="runs", help="folder of results/ and figures/ (default: runs)")
    p.add_argument("--plot", action="store_true", help="no runs: what OUT/results has")
    o = p.parse_args(argv)
    for name in o.parts:
        if name not in PARTS:
            raise BadInput(f"no part {name}, only {', '.join(PARTS)}")
    if any(count < LENGTH or count % LENGTH for count in o.tokens or ()):
        raise BadInput(f"--tokens must be multiples of {LENGTH}, a sequence's tokens")
    if not o.minutes > 0:
        raise BadInput(f"--minutes must be above 0, got {o.minutes:g}")
    needs = [name for name in o.parts or PARTS if name != "tokens"]
    if needs and not (o.tiny or o.plot or torch.cuda.is_available()):
        raise BadInput(f"{' and '.join(needs)}: torch sees no GPU: give only the part tokens, or "
                       "--try")
    return o


def run(argv=None):
    o = parse(argv)
    clock = Clock(o.minutes)
    stopped = ""
    for name in o.parts or PARTS:
        measure, collect, *_ = PARTS[name]
        key = f"gpu_{name}_try" if o.tiny else f"gpu_{name}"
        if not o.plot:
            restore(name, key, o)
            try:
                measure(o, clock)
            except OutOfTime as error:
                stopped = str(error)
            found = collect(o)
            if found["rows"]:
                save_result(o.out, key, found | dict(tiny=o.tiny))
        tell(name, key, o)
        if stopped:
            print(f"stopped: {stopped}. The same command goes on from here")
            return


def tell(name, key, o):
    """The part's tables and pictures, where it has kept anything."""
    if not o.plot and not Path(o.out, "results", f"{key}.json").exists():
        return
    _, _, show, draw = PARTS[name]
    found = kept_result(o.out, key)
    print(f"\n== {name}\n")
    show(found)
    if draw:
        picture(o.out, key, draw, found)


if __name__ == "__main__":
    Job().together(run)
