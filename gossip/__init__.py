"""Ours, on top of the NoLoCo paper's exchange. Three choices, which are independent of each other:

    how a vector is written     onebyte.py: a byte a weight; for the baselines' sums sums.py: bf16, one byte
    when it is merged           delay.py: D inner steps later, or only phi ahead of theta
    which weights meet          fragments.py: all, or K parts by turns

    outer = NoLoCo(params, inner_steps=10, codec=OneByte())             any codec
    outer = Delayed(DiLoCo(params, inner_steps=10), delay=3)            around any outer optimizer

`window.py` has the window of gamma in which replicas stay together.
"""
from gossip.delay import Delayed, PhiAhead
from gossip.onebyte import OneByte
from gossip.sums import SUMS, ShortDiLoCo
from noloco import DiLoCo, NoLoCo


def outer_optimizer(method, wire, delay, params, ranks=None, **settings):
    """The outer optimizer of `--method`, `--wire` and `--delay`. settings: those of NoLoCo or DiLoCo.

    Raises ValueError where there is none: what should average must never train alone instead.
    """
    if method == "noloco" and wire == "fp32":
        outer = NoLoCo(params, ranks, **settings)
    elif method == "noloco" and wire == "int8":
        outer = NoLoCo(params, ranks, codec=OneByte(), **settings)
    elif method == "diloco" and wire == "fp32":
        outer = DiLoCo(params, ranks, **settings)
    elif method == "diloco" and wire in SUMS:
        outer = ShortDiLoCo(params, ranks, wire=SUMS[wire], **settings)
    else:
        raise ValueError(f"no outer optimizer for --method {method} with --wire {wire}")
    if delay:
        return Delayed(outer, delay)
    if outer.gamma != outer.beta:
        return PhiAhead(outer)
    return outer
