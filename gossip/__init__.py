"""Ours, on top of the NoLoCo paper's exchange. Three choices, which are independent of each other:

    how a vector is written     onebyte.py: a byte a weight; sums.py: bf16, a byte for the baselines
    when it is merged           delay.py: D inner steps later, or only phi ahead of theta
    which weights meet          fragments.py: all, or K parts by turns

    outer = NoLoCo(params, inner_steps=10, codec=OneByte())             any codec
    outer = Delayed(DiLoCo(params, inner_steps=10), delay=3)            around any outer optimizer
    outer = Fragments(lambda part, at: NoLoCo(part, inner_steps=10, offset=at), params, 5, 10)

`window.py` has the window of gamma in which replicas stay together.
"""
from gossip.delay import Delayed, PhiAhead
from gossip.fragments import Fragments
from gossip.onebyte import OneByte
from gossip.sums import SUMS, ShortDiLoCo
from noloco import DiLoCo, NoLoCo


def outer_optimizer(method, wire, delay, params, ranks=None, *, fragments=1, **settings):
    """The outer optimizer of `--method`, `--wire`, `--delay` and `--fragments`.

    settings: those of NoLoCo or DiLoCo. Raises ValueError where there is none: what should average
    must never train alone instead.
    """
    if fragments == 1:
        return travelling(undelayed(method, wire, params, ranks, **settings), delay)
    everyone = None                         # fragments of DiLoCo share one process group

    def make(part, offset):
        nonlocal everyone
        more = {}
        if method == "diloco":
            more["everyone"] = everyone
        outer = undelayed(method, wire, part, ranks, offset=offset, **more, **settings)
        everyone = getattr(outer, "everyone", None)
        return outer

    return Fragments(make, params, fragments, settings["inner_steps"], delay)


def undelayed(method, wire, params, ranks, **settings):
    """An outer optimizer whose messages are merged at once."""
    if method == "noloco" and wire == "fp32":
        return NoLoCo(params, ranks, **settings)
    if method == "noloco" and wire == "int8":
        return NoLoCo(params, ranks, codec=OneByte(), **settings)
    if method == "diloco" and wire == "fp32":
        return DiLoCo(params, ranks, **settings)
    if method == "diloco" and wire in SUMS:
        return ShortDiLoCo(params, ranks, wire=SUMS[wire], **settings)
    raise ValueError(f"no outer optimizer for --method {method} with --wire {wire}")


def travelling(outer, delay):
    """The outer optimizer, with messages that travel during inner steps where that is asked or
    possible."""
    if delay:
        return Delayed(outer, delay)
    if outer.gamma != outer.beta:
        return PhiAhead(outer)
    return outer
