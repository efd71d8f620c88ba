"""Ours, on top of the NoLoCo paper's exchange. Three choices, which are independent of each other:

    how a vector is written     onebyte.py: one byte per weight; sums.py: the same for the baselines
    when it is merged           delay.py: D inner steps later, or only phi ahead of theta
    which weights average       fragments.py: all, or K parts in turn

    outer = OneByteNoLoCo(params, inner_steps=10)               in place of NoLoCo
    outer = Delayed(DiLoCo(params, inner_steps=10), delay=3)    around any outer optimizer
    outer = Fragments(make, flatten(params), lengths_of(params), 5, 10)     make(vector, lengths, k)

`asynchronous.py` is another exchange, in which no replica waits for its partner.
`checks.py` warns, in other trainers, of what makes outer steps useless. `window.py` has the window
of gamma in which replicas stay together.
"""
from functools import partial

from gossip.delay import Delayed, PhiAhead
from gossip.fragments import Fragments
from gossip.onebyte import OneByteNoLoCo, lengths_of
from gossip.sums import Bf16Sum, Int8Sum, ShortDiLoCo
from noloco import DiLoCo, NoLoCo, flatten, parameter_list

OUTERS = {      # by --method and --wire
    ("noloco", "fp32"): NoLoCo,
    ("noloco", "int8"): OneByteNoLoCo,
    ("diloco", "fp32"): DiLoCo,
    ("diloco", "bf16"): partial(ShortDiLoCo, wire=Bf16Sum),
    ("diloco", "int8"): partial(ShortDiLoCo, wire=Int8Sum),
}


def outer_optimizer(method, wire, delay, params, ranks=None, *, theta=None, fragments=1,
                    **settings):
    """The outer optimizer of `--method`, `--wire`, `--delay` and `--fragments`.

    theta: noloco.flatten's vector of the params, if they are in one already. settings: those of
    NoLoCo or DiLoCo. Raises ValueError if there is none for this method and wire, because replicas
    that should average must not train alone instead.
    """
    if (method, wire) not in OUTERS:
        raise ValueError(f"no outer optimizer for --method {method} with --wire {wire}")
    kind = OUTERS[method, wire]
    params = parameter_list(params)
    lengths = lengths_of(params)

    def make(vector, lengths, late):
        more = dict(settings)
        if kind is OneByteNoLoCo:
            more["lengths"] = lengths
        if late and method == "noloco":
            more["seed"] = f"{settings.get('seed', 0)} {late}"          # fragments draw apart
        outer = kind(vector, ranks, **more)
        if method == "diloco":
            settings["everyone"] = outer.everyone       # fragments share one process group
        return outer

    if fragments > 1:
        if theta is None:
            theta = flatten(params)
        return Fragments(make, theta, lengths, fragments, settings["inner_steps"], delay)
    outer = make(params if theta is None else theta, lengths, 0)
    if delay:
        return Delayed(outer, delay)
    if outer.gamma != outer.beta:
        return PhiAhead(outer)
    return outer
