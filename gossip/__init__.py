"""Ours, on top of the NoLoCo paper's exchange. Three choices, which are independent of each other:

    how a vector is written     onebyte.py: a byte a weight; sums.py: bf16, a byte for the baselines
    when it is merged           delay.py: D inner steps later, or only phi ahead of theta
    which weights meet          fragments.py: all, or K parts by turns

    outer = NoLoCo(params, inner_steps=10, codec=OneByte(lengths_of(params)))       any codec
    outer = Delayed(DiLoCo(params, inner_steps=10), delay=3)            around any outer optimizer
    outer = Fragments(make, flatten(params), lengths_of(params), 5, 10)     make(vector, lengths, k)

`asynchronous.py` is another exchange, in which no replica waits for its partner.
`checks.py` warns in a trainer of one's own of what makes outer steps useless, `window.py` has the
window of gamma in which replicas stay together.
"""
from gossip.delay import Delayed, PhiAhead
from gossip.fragments import Fragments
from gossip.onebyte import OneByte, lengths_of
from gossip.sums import SUMS, ShortDiLoCo
from noloco import DiLoCo, NoLoCo, flatten


def outer_optimizer(method, wire, delay, params, ranks=None, *, theta=None, fragments=1,
                    **settings):
    """The outer optimizer of `--method`, `--wire`, `--delay` and `--fragments`.

    theta: noloco.flatten's vector of the params, if they are in one already. settings: those of
    NoLoCo or DiLoCo. Raises ValueError where there is none: what should average must never train
    alone instead.
    """
    params = list(params)
    lengths = lengths_of(params)
    if fragments == 1:
        whole = params if theta is None else theta
        return travelling(undelayed(method, wire, whole, lengths, ranks, **settings), delay)
    everyone = None                         # fragments of DiLoCo share one process group

    def make(vector, lengths, late):
        nonlocal everyone
        more = dict(settings)
        if method == "diloco":
            more["everyone"] = everyone
        elif late:
            more["seed"] = f"{settings.get('seed', 0)} {late}"          # fragments draw apart
        outer = undelayed(method, wire, vector, lengths, ranks, **more)
        everyone = getattr(outer, "everyone", None)
        return outer

    if theta is None:
        theta = flatten(params)
    return Fragments(make, theta, lengths, fragments, settings["inner_steps"], delay)


def undelayed(method, wire, params, lengths, ranks, **settings):
    """An outer optimizer whose messages are merged at once."""
    if method == "noloco" and wire == "fp32":
        return NoLoCo(params, ranks, **settings)
    if method == "noloco" and wire == "int8":
        return NoLoCo(params, ranks, codec=OneByte(lengths), **settings)
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
