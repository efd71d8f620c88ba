"""One program for each row of README's table, and what they share.

    harness.py      the command line, records of runs, one runner, what is shown
    stats.py        paired differences, Holm's correction, tables, expected numbers
    pictures.py     drawing
    launch.py       ranks that import torch once, on hosts of their own
    clock.py        runs of train.py between hosts, by the clock
    fleet.py        many replicas in one process
    simulated.py    simulated seconds of an iteration and of a synchronisation

    many.py         many replicas, in equal simulated time
    gap.py          NoLoCo, DDP and DiLoCo, per step and per byte; fragments; Muon
    race.py         NoLoCo, DiLoCo and pairs that never wait, in equal time between hosts
    routing.py      random routing and the weight spread
    gamma.py        the window of gamma
    sync.py         how long synchronisation takes
    shorter.py      SkipPipe's iterations, simulated
    cities.py       SkipPipe's iterations, and its loss, between hosts
    skipping.py     the loss of a model trained with skipping
    missing.py      stages missing at inference
    together.py     both papers at once
    failures.py     a node dies in training
    peers.py        the speed of parts, compared with other projects

`python -m experiments` shows all rows that need no root; harness.py has the scales.
"""
