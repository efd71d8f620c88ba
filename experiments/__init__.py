"""The papers' results at the size of this machine: one program per result, one shared harness.

    harness.py      settings of train.py to run, the command line, what is kept, tried and shown
    results.py      results/*.json as losses, curves and paired differences
    comparing.py    intervals, Holm's correction, tables
    pictures.py     the style, lines of several seeds, labels at the lines' ends

    plots.py        `make plots`: small copies of the headlines, beside their expected numbers
                    (claims.py), measured and drawn by plotted.py

    losses.py       convergence: DDP, DiLoCo, NoLoCo, local
    replicas.py     the gap to DDP against bytes, delays, 2 to 64 replicas (trained by fleet.py)
    fragments.py    whole messages and fragments (rows kept by fleets.py)
    tokens.py       the gap to DDP against the tokens of a step
    points.py       NoLoCo against DiLoCo in equal time between hosts (by clock.py)
    skip.py         SkipPipe: skipped stages, the rho rule, missing stages
    network.py      SkipPipe's pipeline between hosts (by clock.py)
    together.py     both papers on the published instance
    failure.py      deaths of nodes
    stability.py    the window of gamma
    sync.py         bench_sync.py's tables and pictures
"""
