"""The window of gamma in which replicas stay together (ours; docs/stability.md has the proof)."""


def gamma_bound(alpha, n, replicas=None):
    """With gamma = beta replicas in groups of n stay together, in mean square, for 0 < gamma < this
    bound.

    replicas: how many there are; None: far more than n. A few replicas allow a larger gamma. The
    setting is plain SGD on one quadratic loss without clipping. With Adam, or another beta, the
    bound is a heuristic.
    """
    kept = 1 / n                                                        # 1 - k in docs/stability.md
    if replicas:
        groups = max(1, replicas // n)
        kept = (groups - 1) / max(1, replicas - 1)
    return 2 * (1 - alpha**2) / (1 - alpha + 2 * alpha * kept)
