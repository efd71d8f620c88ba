"""What the settings of the other headlines were chosen by: one grid for both methods, then what might
close NoLoCo's gap to DDP. 8 replicas, 800 steps.

    python -m experiments.tuning [--seeds 0 1 2] [--steps N] [--out DIR] [--plot]
"""

from experiments.pictures import show_head, show_row
from experiments.runs import Run, finals, headline, results, spread_of

RATES = ("4e-3", "6e-3", "8e-3", "1.2e-2")      # of DDP
# (rate, alpha, beta)
GRID = (("3e-3", 0, 1.0), ("3e-3", 0.3, 1.0), ("4e-3", 0, 1.0), ("4e-3", 0.3, 0.7), ("4e-3", 0.3, 1.0),
        ("6e-3", 0, 1.0), ("6e-3", 0.3, 1.0), ("6e-3", 0.5, 1.0), ("1.2e-2", 0.3, 1.0))
MORE = {
    "NoLoCo, rate 6e-3, alpha 0, beta 1.3, gamma 1.0": "noloco --beta 1.3 --gamma 1.0",
    "NoLoCo, every 5 steps": "noloco --inner-steps 5",
    "NoLoCo, every 2 steps": "noloco --inner-steps 2",
    "NoLoCo, warm start of a third": "noloco --warm-start {third}",
    "NoLoCo, warm start of a third, every 2 steps": "noloco --warm-start {third} --inner-steps 2",
    "DiLoCo, every 4 steps, alpha 0": "diloco --inner-steps 4 --alpha 0",
    "DiLoCo, every 4 steps, alpha 0.3": "diloco --inner-steps 4 --alpha 0.3",
    "DiLoCo, warm start of a third": "diloco --warm-start {third}",
}
LARGE = {"DDP": "ddp", "DiLoCo": "diloco", "NoLoCo": "noloco",
         "NoLoCo, warm start of a third": "noloco --warm-start {third}"}


def options(steps, method, rate="6e-3", batch=8):
    method = method.format(third=steps // 3)
    return (f"--steps {steps} --layers 2 --warmup 50 --microbatches 1 --batch {batch} --lr {rate} "
            f"--method {method}")


def runs(steps):
    steps = steps or 800
    for rate in RATES:
        yield Run(f"DDP, rate {rate}", options(steps, "ddp", rate))
    for name, method, inner in (("DiLoCo", "diloco", 20), ("NoLoCo", "noloco", 10)):
        for rate, alpha, beta in GRID:
            yield Run(f"{name}, rate {rate}, alpha {alpha}, beta {beta}",
                      options(steps, f"{method} --inner-steps {inner} --alpha {alpha} --beta {beta}", rate))
    for label, method in MORE.items():
        yield Run(label, options(steps, method))
    for name, method in LARGE.items():
        yield Run(f"{name}, 4 times the batch, half the steps", options(steps // 2, method, batch=32))


def table(found):
    show_head("setting | seeds | held-out nats per byte | MB sent per rank to synchronise")
    for label, seeds in results(found).items():
        show_row(label, len(seeds), spread_of(finals(seeds)), f"{seeds[0].sent:.0f}")


if __name__ == "__main__":
    headline("tuning", __doc__, runs, table)
