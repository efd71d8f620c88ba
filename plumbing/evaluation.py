"""The held-out loss of a run's pipelines."""
from planning.rho import scaled, with_stages_missing
from plumbing.data import heldout_sequences


def pipelines(stages):
    """Paths through every stage that visit every rank at least once: what evaluation runs.

    The i-th goes through the i-th rank of each stage; smaller stages begin anew. Where no stage has
    more ranks than stage 0 they are `skippipe.full_paths`.
    """
    count = max(len(ranks) for ranks in stages)
    paths = []
    for i in range(count):
        paths.append(tuple(ranks[i % len(ranks)] for ranks in stages))
    return paths


def evaluate(pipeline, stages, corpus, o):
    """Held-out loss, in nats per token, of each of this origin's pipelines (on other ranks: []).

    All pipelines read the same text. An origin with several runs one after the other.
    """
    rounds = -(-o.eval_sequences // o.batch)
    batches = []
    if corpus:
        rows = heldout_sequences(corpus, rounds * o.batch, o.seq_len).to(pipeline.device)
        batches = rows.split(o.batch)
    losses = []
    paths, origins = pipelines(stages), len(stages[0])
    for first in range(0, len(paths), origins):
        turn = paths[first:first + origins] * rounds        # at most one pipeline of each origin
        mine = [u for u, path in enumerate(turn) if path[0] == pipeline.rank]
        loss, home, _ = pipeline.run(turn, dict(zip(mine, batches)), train=False)
        if home:                                                # survive/: or all were lost
            losses.append(float(loss) / home)
    return losses


def heldout(run):
    """The losses of this origin's pipelines through all living stages, by the rho rule.

    run: a train.Run.
    """
    stages = run.routes.living()
    rho = with_stages_missing(run.rho, len(stages))             # 1 unless paths skip
    with scaled(run.model, rho[run.stage]):
        return evaluate(run.pipeline, stages, run.corpus, run.o)
