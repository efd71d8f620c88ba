"""The papers' headline plots in a quarter of an hour: a picture and a few lines for each claim.

    python -m experiments.plots [PART ...] [--quick] [--plot] [--out DIR]

loss        DDP, DiLoCo, NoLoCo, NoLoCo in fragments and replicas that never average, 8 replicas
            each: loss against steps and bytes, and the weight spread (NoLoCo's Figs. 2, 3A, 3B, 4)
sync        NoLoCo's Figs. 5A and 5B, simulated by bench_sync.py
skip        SkipPipe's iteration times beside the published ones, and its timeline
partial     perplexity with 100, 75 and 50% of the stages, trained with and without skipping

Each line says a number, what was expected, and whether it is within the tolerance. Numbers go to
DIR/results, pictures to DIR/figures (default: runs/plots). The exit status is 1 where a part failed
or a number is outside. Finished runs of train.py are kept in runs/headline-* and not run again.
--quick: the same on less, in under two minutes, which says little about losses. All are small
copies of the experiments behind docs/results.md; experiments/claims.py has what is expected.
"""
import signal
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Callable

from experiments import claims, plotted
from experiments.harness import cpu_seconds
from experiments.pictures import picture
from experiments.results import kept_result, save_result
from train import BadInput, Job, Parser


@dataclass
class Plot:
    """A part: its numbers, its claims and its pictures."""
    measure: Callable       # quick -> the numbers, as JSON can hold them
    claims: Callable        # the numbers -> [Claim]
    pictures: dict          # {name: draw(plt, the numbers) -> figure}


PLOTS = {       # the short ones first
    "skip": Plot(plotted.measure_skip, claims.of_skip,
                 {"skip": plotted.draw_times, "skip_timeline": plotted.draw_timelines}),
    "sync": Plot(plotted.measure_sync, claims.of_sync, {"sync": plotted.draw_sync}),
    "partial": Plot(plotted.measure_partial, claims.of_partial, {"partial": plotted.draw_partial}),
    "loss": Plot(plotted.measure_loss, claims.of_loss, {"loss": plotted.draw_loss}),
}


def parse_arguments():
    """The command line. Raises BadInput."""
    p = Parser(__doc__)
    p.add_argument("parts", nargs="*", help=f"{', '.join(PLOTS)} (default: all)")
    p.add_argument("--quick", action="store_true", help="a try of each, in under two minutes")
    p.add_argument("--plot", action="store_true", help="draw the numbers that DIR has")
    p.add_argument("--out", help="folder of results/ and figures/ (default: runs/plots, with "
                   "--quick runs/plots/quick)")
    o = p.parse_args()
    for name in o.parts:
        if name not in PLOTS:
            raise BadInput(f"no part {name}, only {', '.join(PLOTS)}")
    if not find_spec("matplotlib"):
        raise BadInput("no picture without matplotlib: pip install '.[plot]'")
    if o.out is None:
        o.out = "runs/plots/quick" if o.quick else "runs/plots"
    return o


def make_plot(name, o):
    """Measure a part, draw it from the numbers that were saved, and return its claims."""
    plot = PLOTS[name]
    if not o.plot:
        began, spent = time.perf_counter(), cpu_seconds()
        found = plot.measure(o.quick)
        save_result(o.out, name, found)
        print(f"{name} took {(time.perf_counter() - began) / 60:.1f} minutes, "
              f"{cpu_seconds() - spent:.0f} processor seconds")
    found = kept_result(o.out, name)
    for drawn, draw in plot.pictures.items():
        picture(o.out, drawn, draw, found)
    return plot.claims(found)


def make_plots(o):
    """All parts, whatever becomes of one; then their lines. Returns the exit status."""
    told, failed = [], False
    for name in o.parts or PLOTS:
        try:
            told += make_plot(name, o)
        except (BadInput, OSError) as error:
            print(f"error: {name}: {str(error).splitlines()[0]}", file=sys.stderr)
            failed = True
    print()
    for claim in told:
        print(claim)
    outside = [claim for claim in told if claim.is_outside]
    return int(failed or len(outside) > 0)


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))     # so that started processes end too
    o = Job().together(parse_arguments)
    sys.exit(make_plots(o))


if __name__ == "__main__":
    main()
