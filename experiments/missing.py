"""Stages missing at inference: what it costs models trained with and without skipping.

    python -m experiments.missing [--scale try|plot|full] [--plot]

The runs are those of skipping. A model runs with 75 or 50% of its stages, in each choice of so
many; its loss is the mean over the choices. Named before the runs: trained half skipped for equal
steps, 4 stages, with half of them compared with all, by the rho rule.
"""
from experiments import skipping
from experiments.harness import Row, command
from experiments.pictures import COLOURS, WIDTH, curve, frame, legend
from experiments.skipping import FULL, HALF, QUARTER, facts_of, full_of, name_of, over_full, trained
from experiments.stats import Expected, Table, paired, perplexity

DRAWN = {       # (skip, routing), after equal steps: (its name in the picture, colour)
    FULL: ("none\nskipped", "full"),
    QUARTER: ("a quarter", "25%"),
    HALF: ("half", "50%"),
}


def over_whole(records, facts, share, rule="rho"):
    """Perplexity with so many percent of the stages over the same whole model's."""
    column = rule
    if share < 100:
        column = f"{rule}_{share}"
    return paired(records, facts, facts, column, perplexity, rule)


def show(found):
    """Also of the models that trained for equal time."""
    records = found["records"]
    table = Table("stages, share skipped in training", "75% compared with all, rho rule",
                  "half compared with all, rho rule", "75% compared with all, unscaled",
                  "half compared with all, unscaled")
    for facts in trained(records):
        table.add(name_of(facts), over_whole(records, facts, 75), over_whole(records, facts, 50),
                  over_whole(records, facts, 75, "unscaled"),
                  over_whole(records, facts, 50, "unscaled"))
    table.end()
    table = Table("half of the stages, compared with a whole model trained without skipping",
                  "rho rule", "unscaled")
    for facts in trained(records):
        if facts != full_of(facts):
            table.add(name_of(facts), over_full(records, facts, "rho_50", "rho"),
                      over_full(records, facts, "unscaled_50", "unscaled"))
    table.end()


def draw(plt, found):
    records = found["records"]
    counts = sorted({record["stages"] for record in records})
    figure, axes = plt.subplots(1, len(counts), figsize=(WIDTH, 3.8), sharey=True, squeeze=False)
    for axis, stages in zip(axes.flat, counts):
        for kind, (name, colour) in DRAWN.items():
            costs, facts = {}, facts_of(stages, *kind, "steps")
            if facts in trained(records):
                for share in (100, 75, 50):
                    costs[share] = over_whole(records, facts, share)
                curve(axis, costs, COLOURS[colour], name, times=100)
        axis.set(xlabel="% of the stages that run", xticks=(100, 75, 50), xlim=(104, 46),
                 title=f"{stages} stages")
    axes.flat[0].set_ylabel("perplexity compared\nwith its whole model, %")
    legend(axes.flat[-1])
    more = over_whole(records, facts_of(4, *HALF, "steps"), 50).mean
    frame(figure, found, f"With half of 4 stages, trained half skipped: perplexity {more:+.1%}",
          "Stages missing after training")
    return figure


def expected(found):
    """Trained without skipping, one seed of the full scale differs much from the next."""
    records, told = found["records"], []
    for kind, number, tolerance in ((HALF, 0.003, 0.01), (FULL, 0.47, 0.3)):
        facts = facts_of(4, *kind, "steps")
        told.append(Expected(f"{name_of(facts)} in training: perplexity with half of the stages, "
                             "compared with all (paper: +1.7%)",
                             over_whole(records, facts, 50).mean, number, tolerance))
    return told


ROW = Row("missing", skipping.measure, show, {"missing": draw}, expected, of_row="skipping")

if __name__ == "__main__":
    command(__doc__, ROW)
