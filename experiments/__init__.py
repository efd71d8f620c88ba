"""One program a row of README's table, and what they share.

    harness.py      the command line, runs of train.py that are kept, what is shown
    tables.py       JSON files, intervals, Holm's correction, tables, expected numbers
    pictures.py     drawing
    fleet.py        many replicas in one process (batches.py: what they read)
    clock.py        runs of train.py between hosts, by the clock
    turns.py        compared runs one right after the other, with their machine and its load

    gap.py          NoLoCo beside DDP and DiLoCo, per step and per byte (gap_runs.py: its runs)
    fragments.py    parts of the weights meet in turn
    race.py         NoLoCo beside DiLoCo in equal time between hosts (tries.py: their settings)
    unwaiting.py    pairs that never wait beside both
    routing.py      random routing and the weight spread
    gamma.py        the window of gamma
    sync.py         how long synchronisation takes
    shorter.py      SkipPipe's iterations, simulated
    cities.py       SkipPipe's iterations, and its loss, between hosts
    skipping.py     the loss of a model trained with skipping
    missing.py      stages missing at inference
    together.py     both papers at once
    failures.py     a node dies in training

`python -m experiments` shows all rows that need no root; harness.py has the scales.
"""
