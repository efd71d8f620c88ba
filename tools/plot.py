"""Draw runs, also of those that are under way.

    python -m tools.plot runs/NAME                              into runs/NAME/plot.png
    python -m tools.plot runs/A runs/B ... [--out FILE.png]     into runs/plot.png
    python -m tools.plot runs/A runs/B --x bytes                the loss against bytes alone
    python -m tools.plot runs/A runs/B --csv > runs.csv         the numbers, instead of a picture

Held-out loss against steps, seconds and bytes; the replicas' weight spread; the share of the time
for which synchronisation held them. Methods have their colours. Runs that differ in their seeds
alone are one line, their mean, in a band, their range. Deaths, joins and new plans are marks.
"""
import math
import statistics
import sys
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path

from plumbing.drawing import COLOURS, NAMES, WIDTH, pyplot
from plumbing.options import Parser, flag
from plumbing.processes import BadInput, Job, forbid
from tools.runs import read_run, seeds_together, write_csv

LOSS = "held-out loss (nats per token)"


@dataclass(frozen=True)
class Panel:
    """One pair of axes: two metrics of metrics.jsonl, and what is written at their axes."""
    x: str
    y: str
    x_label: str
    y_label: str


# The first three by their names for --x.
LOSSES = {"steps": Panel("step", "heldout_loss", "inner steps", LOSS),
          "seconds": Panel("seconds", "heldout_loss", "seconds of training", LOSS),
          "bytes": Panel("sync_bytes", "heldout_loss", "bytes sent to synchronise, all ranks",
                         LOSS)}
PANELS = [*LOSSES.values(),
          Panel("step", "weight_spread", "inner steps", "weight spread (0: not drawn)"),
          Panel("step", "held", "inner steps", "time held by synchronisation")]

# Lines of one method, which has one colour.
DASHES = ["-", "--", ":", "-.", (0, (6, 1, 1, 1, 1, 1))]
POINTS = [".", "s", "v"]            # once the dashes are used up
LONGEST = 44                        # letters of options in a label

# Options that a label does not name: the method it has anyway, the others change no weights.
UNSAID = "method", "eval_every", "eval_sequences", "spread", "save_every"

OTHER = "other event"
GONE = "a rank is dead or missed"
MARKS = {GONE: "X", "a rank joins": "^", "new plan": "D", "another rank leads": "s",
         OTHER: "*"}
EVENTS = {"dead": GONE, "lost": GONE, "outer step without partners": GONE,
          "joined": "a rank joins", "planned anew": "new plan", "takeover": "another rank leads"}


def main(argv=None):
    Job().together(plot, argv)


def plot(argv):
    parser = Parser(__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--x", choices=list(LOSSES), help="draw the loss against this only")
    parser.add_argument("--out", type=Path, help="the picture: a .png, .pdf or .svg file (default: "
                        "plot.png, with --x plot-X.png, in the folder of one run, or beside that "
                        "of the first)")
    parser.add_argument("--csv", action="store_true",
                        help="print the lines of metrics.jsonl as CSV, and draw nothing")
    a = parser.parse_args(argv)
    forbid((a.csv and (a.out or a.x),
            "--csv prints all numbers and draws nothing: drop --out and --x"),
           (a.out and a.out.suffix not in (".png", ".pdf", ".svg"),
            f"--out {a.out}: the name of a picture ends with .png, .pdf or .svg, in small letters"))
    folders = without_files(a.runs)
    runs = [read_run(folder) for folder in folders]
    if a.csv:
        write_csv(runs, sys.stdout)
        return
    curves = make_curves(runs)
    panels = [LOSSES[a.x]] if a.x else [panel for panel in PANELS if shows(panel, curves)]
    try:
        plt = pyplot()
    except ImportError as error:
        raise BadInput(str(error))
    figure = draw(plt, curves, panels)
    out = a.out or default_file(folders, a.x)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, dpi=150)
    except OSError as error:
        raise BadInput(f"{out} cannot be written: {error.strerror}")
    plt.close(figure)
    print(out)
    if any(len(curve.steps) == 1 for curve in curves):
        print("a run has one evaluation so far, so its line is a point: for more, train with a "
              "smaller --eval-every")


def without_files(paths):
    """Each folder once. What is a file goes: `runs/*` may name an earlier picture."""
    folders = [path for path in dict.fromkeys(paths) if not path.is_file()]
    forbid((not folders, f"{paths[0]} is a file: give folders of runs, e.g. runs/NAME"))
    return folders


def default_file(folders, x):
    name = f"plot-{x}.png" if x else "plot.png"
    first = folders[0]
    return first / name if len(folders) == 1 else first.parent / name


# ---------------------------------------------------------------- what is drawn


@dataclass
class Curve:
    """One line of every panel: a run, or several seeds of one method."""
    runs: list              # of Logged
    label: str
    colour: str
    dashes: object
    point: str

    def __post_init__(self):
        by_step = [rows_by_step(run) for run in self.runs]
        shared = set.intersection(*map(set, by_step))
        self.steps = [row["step"] for row in self.runs[0].evaluations if row["step"] in shared]
        names = " and ".join(str(run.folder) for run in self.runs)
        forbid((not self.steps,
                f"{names} differ in their seeds alone, but have no evaluation after the same "
                "number of steps yet: wait, or draw each alone"))
        self.rows = []                  # of each step: the evaluation of each run
        for step in self.steps:
            self.rows.append([rows[step] for rows in by_step])

    def values(self, key):
        """A list for each step: the metric of each run (all nan if a run has not measured it)."""
        found = []
        for rows in self.rows:
            numbers = [row.get(key) for row in rows]
            found.append([math.nan] * len(rows) if None in numbers else numbers)
        return found

    def means(self, key):
        """The mean over the runs at each step (nan: a run has not measured it)."""
        return [statistics.fmean(numbers) for numbers in self.values(key)]

    def merged(self):
        """The merged model's loss at the end, mean over the runs (nan: not there, or not yet)."""
        return self.means("merged_loss")[-1]

    def ended(self):
        return all(self.steps[-1] == run.options.get("steps") for run in self.runs)


def rows_by_step(run):
    return {row["step"]: row for row in run.evaluations}


def make_curves(runs):
    """A Curve for the runs of each method and settings."""
    groups = seeds_together(runs)
    settings = [group[0].settings for group in groups]
    used = {}               # method: how many curves it has so far
    curves = []
    for group, own in zip(groups, settings):
        method = own["method"]
        number = used.get(method, 0)
        used[method] = number + 1
        name = NAMES.get(method, method)
        kind = number // len(DASHES) % len(POINTS)
        curves.append(Curve(group, label_of(group, settings), COLOURS.get(name, "#777777"),
                            DASHES[number % len(DASHES)], POINTS[kind]))
    return curves


def label_of(group, everybody):
    """The method, what tells this group of runs from the others, and how many runs it has."""
    own = group[0].settings
    method = NAMES.get(own["method"], own["method"])
    words = [method]
    for name, value in own.items():
        is_set = value is not None and value is not False
        if name not in UNSAID and is_set and tells(name, own, everybody):
            words.append(option_text(name, value))
    label = ", ".join(words)
    if len(label) > LONGEST:
        label = f"{method}, {group[0].folder}"
    if len(group) == 1:
        return label
    seeds = {run.options.get("seed") for run in group}
    return f"{label}, {len(group)} {'seeds' if len(seeds) == len(group) else 'runs'}"


def tells(name, own, everybody):
    """Whether an option tells these settings from others: of the same method, or with a value."""
    for other in everybody:
        theirs = other.get(name)
        comparable = other["method"] == own["method"] or None not in (theirs, own[name])
        if comparable and theirs != own[name]:
            return True
    return False


def option_text(name, value):
    """As on the command line, without the dashes."""
    words = flag(name).lstrip("-")
    if value is True:
        return words
    if isinstance(value, list):
        value = ",".join(str(number) for number in value)
    return f"{words} {value}"


def shows(panel, curves):
    """Whether a curve has any number there: one process alone has no spread, and sends nothing."""
    optional = panel.y != "heldout_loss" or panel.x == "sync_bytes"
    if not optional:
        return True
    metric = panel.x if panel.x == "sync_bytes" else panel.y
    for curve in curves:
        if any(number > 0 for number in curve.means(metric)):       # nan is not
            return True
    return False


# ---------------------------------------------------------------- the picture


def draw(plt, curves, panels):
    """The figure: the panels two in a row, and the legend in the place that is left, or below."""
    below = len(panels) == 1 or len(panels) % 2 == 0
    if len(panels) == 1:
        figure, grid = plt.subplots(1, 1, figsize=(WIDTH, 5.5), squeeze=False)
    else:
        rows = math.ceil(len(panels) / 2)
        height = 3 * rows
        if below:
            height += 1
        figure, grid = plt.subplots(rows, 2, figsize=(WIDTH, height), squeeze=False)
    axes = grid.flat[:len(panels)]
    for axis, panel in zip(axes, panels):
        draw_panel(axis, panel, curves)
    figure.suptitle(words_of(curves), x=0.01, ha="left")
    handles, texts = legend_of(plt, curves, axes)
    style = dict(title=legend_title(curves), alignment="left", frameon=False)
    if below:
        figure.legend(handles, texts, loc="outside lower left", ncols=2, **style)
    else:
        grid.flat[-1].axis("off")
        grid.flat[-1].legend(handles, texts, loc="upper left", **style)
    return figure


def draw_panel(axis, panel, curves):
    set_scales(axis, panel, curves)
    for curve in curves:
        x, y = points_of(axis, panel, curve)
        axis.plot(x, y, color=curve.colour, ls=curve.dashes, marker=curve.point, lw=1.5,
                  label=curve.label)
        if len(curve.runs) > 1:
            values = curve.values(panel.y)
            axis.fill_between(x, list(map(min, values)), list(map(max, values)),
                              color=curve.colour, alpha=0.15, lw=0)
        if panel.y == "heldout_loss" and not math.isnan(curve.merged()):
            axis.plot(x[-1], curve.merged(), color=curve.colour, ls="", marker="o", ms=7,
                      mfc="none", label="merged model")
    heights = []
    for curve in curves:
        heights += mark_events(axis, panel, curve)
        heights.append(curve.merged())
    if axis.get_xscale() == "linear":
        axis.set_xlim(left=0)
    if panel.y == "heldout_loss":
        show_losses(axis, [curve.values(panel.y) for curve in curves], heights)
    if panel.y == "held":
        axis.set_ylim(bottom=0)


def set_scales(axis, panel, curves):
    """Labels, scales and ticks. Bytes are logarithmic where methods are a factor of ten apart."""
    from matplotlib import ticker       # it is there: pyplot was imported
    axis.set(xlabel=panel.x_label, ylabel=panel.y_label)
    sent = [curve.means("sync_bytes")[-1] for curve in curves]
    sent = [number for number in sent if number > 0]
    if panel.x == "sync_bytes":
        axis.xaxis.set_major_locator(ticker.MaxNLocator(5))
        if sent and max(sent) > 10 * min(sent):
            axis.set_xscale("log")              # with ticks of its own
        axis.xaxis.set_major_formatter(ticker.EngFormatter("B"))
    if panel.y == "weight_spread":
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 3)))
        axis.yaxis.set_major_formatter("{x:.0e}")
        axis.yaxis.set_minor_locator(ticker.NullLocator())
    if panel.y == "held":
        axis.yaxis.set_major_formatter("{x:.0%}")


def points_of(axis, panel, curve):
    """The x and the y of a curve's steps; nan where a logarithmic axis has no place for a zero."""
    x, y = curve.means(panel.x), curve.means(panel.y)
    if axis.get_xscale() == "log":
        x = [number or math.nan for number in x]
    if axis.get_yscale() == "log":
        y = [number or math.nan for number in y]
    return x, y


def mark_events(axis, panel, curve):
    """A mark on the curve for each kind of event at a step. Returns their y."""
    x, y = points_of(axis, panel, curve)
    heights = []
    for kind, step in sorted(kinds_of_events(curve)):
        height = between(step, curve.steps, y)
        heights.append(height)
        axis.plot(between(step, [0, *curve.steps], [0.0, *x]), height, color=curve.colour, ls="",
                  marker=MARKS[kind], ms=8, mec="white", label=kind, zorder=3)
    return heights


def kinds_of_events(curve):
    """{(kind, step)}; other events only at steps that have no mark of a kind with a name."""
    found = set()
    for run in curve.runs:
        for event in run.events:
            found.add((EVENTS.get(event["event"], OTHER), event["step"]))
    named = {step for kind, step in found if kind != OTHER}
    return {(kind, step) for kind, step in found if kind != OTHER or step not in named}


def between(step, steps, numbers):
    """The number at a step, on the straight line between the steps around it (nan: left out)."""
    known = [(s, number) for s, number in zip(steps, numbers) if not math.isnan(number)]
    if not known:
        return math.nan
    i = bisect_left(known, (step, -math.inf))
    if i == 0 or i == len(known):
        return known[max(0, i - 1)][1]
    (before, low), (after, high) = known[i - 1], known[i]
    return low + (high - low) * (step - before) / (after - before)


def show_losses(axis, curves, heights):
    """Limit a panel of losses to what follows the first tenth of the evaluations, and all marks.

    Otherwise the fall of the first steps hides how methods differ. curves: of each step, the losses
    of all seeds. heights: of marks, nan where there is none.
    """
    seen = list(heights)
    for steps in curves:
        for losses in steps[len(steps) // 10:]:
            seen += losses
    seen = [height for height in seen if math.isfinite(height)]
    if seen and max(seen) > min(seen):
        margin = 0.06 * (max(seen) - min(seen))
        axis.set_ylim(min(seen) - margin, max(seen) + margin)


def words_of(curves):
    """What came out, in words."""
    if len({curve.runs[0].settings["corpus"] for curve in curves}) > 1:
        return "The runs have different corpora: their losses do not compare"
    ends = [curve.means("heldout_loss")[-1] for curve in curves]
    if len(curves) == 1:
        curve = curves[0]
        names = [str(run.folder) for run in curve.runs]
        who = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        ended = "" if curve.ended() else f" of {curve.runs[0].options.get('steps')}"
        return f"{who}: held-out loss {loss_text(ends[0])} at step {curve.steps[-1]}{ended}"
    last = {curve.steps[-1] for curve in curves}
    if len(last) > 1:
        return "Held-out loss so far: compare at equal steps, the runs are not equally far"
    if any(map(math.isnan, ends)):
        return f"A held-out loss after {last.pop()} steps was not measured"
    lowest = ends.index(min(ends))
    return (f"Lowest held-out loss after {last.pop()} steps: {curves[lowest].label}, "
            f"{ends[lowest]:.4f}")


def legend_of(plt, curves, axes):
    """(handles, texts): each curve once, then each kind of mark, in grey as any curve has it."""
    handles, texts = [], []
    for curve in curves:
        handles.append(plt.Line2D([], [], color=curve.colour, ls=curve.dashes, marker=curve.point))
        texts.append(legend_text(curve))
    labels = {curve.label for curve in curves}
    for axis in axes:
        for mark in axis.lines:
            label = mark.get_label()
            if label not in labels:
                labels.add(label)
                handles.append(grey(plt, mark))
                texts.append(label)
    return handles, texts


def legend_title(curves):
    several = any(len(curve.runs) > 1 for curve in curves)
    return "last held-out loss" + (" (line: mean of seeds, band: range)" if several else "")


def loss_text(loss):
    return "not measured" if math.isnan(loss) else f"{loss:.4f}"


def legend_text(curve):
    """The label and the last loss; then how far a run is that is under way."""
    loss = curve.means("heldout_loss")[-1]
    text = f"{curve.label}: {loss_text(loss)}"
    if not curve.ended():
        text += f" at step {curve.steps[-1]}"
    if curve.means("sync_bytes")[-1] == 0:
        text += ", sent nothing"
    return text


def grey(plt, mark):
    colour = "#777777"
    face = "none" if mark.get_mfc() == "none" else colour
    return plt.Line2D([], [], ls="", color=colour, marker=mark.get_marker(), ms=mark.get_ms(),
                      mfc=face)


if __name__ == "__main__":
    main()
