"""Pictures of a plan: its simulated timeline, the map of its paths, and a trace for a viewer."""

from skippipe import BACKWARD, FORWARD, LOSS

# Of a task by its kind. Where a node waits it is white.
TONES = {FORWARD: "#8FC1E3", LOSS: "#0B2545", BACKWARD: "#2F7AB5"}
NAMED = 40      # nodes; of more, a picture names the stages only


# ---------------------------------------------------------------- the timeline


def rows_of(network):
    """{node: its row}, from below: the nodes of stage 0 first, those of no stage last."""
    nodes = [node for stage in network.stages for node in stage]
    nodes += [node for node in range(len(network.delay)) if node not in network.stage_of]
    return {node: row for row, node in enumerate(nodes)}


def draw_timeline(axis, network, timeline, names=None, until=None):
    """Draw what each node does when, as `simulate` has it: nodes up, seconds to the right.

        result = simulate(network, paths, rounds, order)
        draw_timeline(axis, network, result.timeline)

    Each task is one patch of the axis, a rectangle from its start to its end in the tone of its
    kind; `axis.legend()` names the tones. Where nothing is drawn the node waits. Rows are grouped
    by stage. names: of each node, e.g. its city. until: the seconds at which the axis ends
    (default: the last task's end). Two pipelines side by side share one time axis where both get
    the longer one's makespan."""
    rows = rows_of(network)
    for kind, tone in TONES.items():
        tasks = [task for task in timeline if task.kind == kind]
        axis.barh(
            y=[rows[task.rank] for task in tasks],
            left=[task.start for task in tasks],
            width=[task.end - task.start for task in tasks],
            height=0.8, linewidth=0, color=tone, label=kind)
    axis.grid(False)
    axis.set(xlim=(0, until or max(task.end for task in timeline)), xlabel="seconds (simulated)",
             ylim=(-0.6, len(rows) - 0.4))
    label_rows(axis, network, rows, names)


def label_rows(axis, network, rows, names):
    """Name the nodes at the left of a timeline and the stages at its right, and part the stages."""
    axis.set_yticks([])
    if len(rows) <= NAMED:
        shown = [f"{names[node]} {node}" if names else f"node {node}" for node in rows]
        axis.set_yticks(range(len(rows)), shown)
        axis.tick_params(axis="y", length=0, labelsize=8)
    for s, stage in enumerate(network.stages):
        middle = rows[stage[0]] + (len(stage) - 1) / 2
        axis.annotate(f"stage {s}", (1, middle), xycoords=("axes fraction", "data"),
                      xytext=(5, 0), textcoords="offset points", va="center", color="#666666",
                      fontsize=8, annotation_clip=False)
        if s:
            axis.axhline(rows[stage[0]] - 0.5, color="#BBBBBB", lw=0.6)
