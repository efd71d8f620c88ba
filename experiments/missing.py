"""Stages missing at inference: what it costs models trained with and without skipping.

    python -m experiments.missing [--scale try|plot|full] [--plot]

The runs are those of skipping, after equal steps and under the rho rule. A model runs with 75 or
50% of its stages, in each choice of so many; its loss is the mean over the choices.
"""
from experiments import skipping
from experiments.harness import Row, command
from experiments.pictures import COLOURS, WIDTH, aside, bars, counted, frame
from experiments.skipping import RHO, losses_without
from experiments.tables import Comparison, Expected, Table, over, results

HALF = f"50% skipped{RHO}"
TRAINED = {         # the label's end: (its name in the picture, colour)
    "0% skipped": ("none\nskipped", "full"),
    f"25% skipped, in order{RHO}": ("a quarter", "25%"),
    HALF: ("half", "50%"),
}


def missing_over(runs, key):
    """Perplexity with stages missing over that of the run's whole model, seed by seed. key: the
    share of the stages that run."""
    whole = [run.shares["1.0"][0] for run in runs]
    return Comparison(over(losses_without(runs, key), whole), "+.1%")


def there(found, stages):
    """{the label's end: runs} of models of so many stages."""
    runs = results(found)
    return {end: runs[f"{stages} stages, {end}"] for end in TRAINED
            if f"{stages} stages, {end}" in runs}


def show(found):
    """Also of the models that trained for equal time."""
    table = Table("stages, share skipped in training", "perplexity with 75% of them, over all",
                  "with half of them, over all")
    for label, runs in results(found).items():
        if label.endswith(RHO) or label.endswith(" 0% skipped"):
            table.add(label, missing_over(runs, "0.75"), missing_over(runs, "0.5"))
    table.end()


def draw(plt, found):
    kinds = [stages for stages in skipping.STAGES if there(found, stages)]
    figure, axes = plt.subplots(1, len(kinds), figsize=(WIDTH, 4.0), sharey=True, squeeze=False)
    for axis, stages in zip(axes.flat, kinds):
        for place, (end, runs) in enumerate(there(found, stages).items()):
            name, colour = TRAINED[end]
            costs = [missing_over(runs, share) for share in ("1.0", "0.75", "0.5")]
            bars(axis, aside((100, 75, 50), place), costs, COLOURS[colour], label=name)
        axis.set(xlabel="% of the stages that run", xticks=(100, 75, 50), xlim=(106, 44),
                 title=f"{stages} stages")
    axes.flat[0].set_ylabel("perplexity over its whole model's, %")
    loses = missing_over(there(found, 4)[HALF], "0.5").mean
    frame(figure, found, f"Trained half skipped, 4 stages lose {loses:.1%} without half of them",
          "Stages missing after training",
          f"Labels: what was skipped in training. After equal steps, by the rho rule, the mean "
          f"over all choices of so many stages; {counted(len(runs), 'seed')}, bars: 95% intervals.")
    return figure


NUMBERS = {         # {(the label's end, the share of the stages that run): by scale}
    (HALF, "0.5"): dict(full=(0.007, 0.01), plot=(0.003, 0.01)),
    ("0% skipped", "0.5"): dict(full=(0.52, 0.1), plot=(0.24, 0.15)),
}


def expected(found):
    told, scale = [], found["scale"]
    for (end, share), numbers in NUMBERS.items():
        runs = there(found, 4).get(end)
        cost = runs and missing_over(runs, share).mean
        told.append(Expected(f"4 stages, {end} in training: perplexity with half of the stages, "
                             "over all (paper: +1.7%)", cost, *numbers.get(scale, (0, 0)),
                             judged=scale in numbers))
    return told


ROW = Row("missing", skipping.measure, show, {"missing": draw}, expected, of_row="skipping")

if __name__ == "__main__":
    command(__doc__, ROW)
