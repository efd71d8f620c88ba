"""Options of train.py that no paper has, and the parts that they bring.

train.options adds them and train.built takes the parts, if the folder gossip/ is next to train.py.
"""
from gossip import outer_optimizer, sums
from gossip.muon import muon
from skippipe import read_network

PLANNERS = ["stronger", "no-swaps", "dtfm"]     # of --routing; the paper's search is skippipe.py's


def add_options(parser, number):
    """number: train.number, which makes argument types."""
    add = parser.add_argument
    add("--wire", default="fp32", choices=["fp32", "bf16", "int8"],
        help="the type in which weights, Deltas or gradients are sent (%(default)s)")
    add("--delay", type=number(int), default=0,
        help="inner steps between sending and merging (%(default)s, as in the paper)")
    add("--fragments", type=number(int, 1), default=1,
        help="parts of the weights that are averaged in turn (%(default)s, as in the paper)")
    add("--optimizer", default="adam", choices=["adam", "muon"],
        help="the inner optimizer; muon: for the matrices of the layers (%(default)s)")
    add("--tokenizer", help="a Hugging Face tokenizer.json (default: bytes)")


def parts(o):
    """{name of an argument of train.Run: what to give it}. Raises ValueError."""
    found = {}
    check(o)
    if o.method == "ddp" and o.wire != "fp32":
        found["Average"] = make_average
    elif o.wire != "fp32" or o.delay or o.fragments > 1 or phi_travels(o):
        found["make_outer"] = make_outer
    if o.optimizer == "muon":
        found["make_inner"] = lambda run: muon(run.model, o.beta2)
    if o.routing in PLANNERS:
        found["make_plan"] = make_plan
    if o.tokenizer:
        from tools.tokenizer import load
        found["tokenizer"] = load(o.tokenizer, o.vocab)
    return found


def phi_travels(o):
    """Whether phi travels too, in which case it leaves early (gossip/delay.py, PhiAhead)."""
    return o.method == "noloco" and o.gamma not in (None, o.beta)


def check(o):
    """Raises ValueError for an option that the method does not have."""
    given = dict(wire=o.wire != "fp32", delay=o.delay, fragments=o.fragments > 1)
    lacks = dict(local=("wire", "delay", "fragments"), ddp=("delay", "fragments"))
    for name in lacks.get(o.method, ()):
        if given[name]:
            raise ValueError(f"--method {o.method} has no --{name}")
    if o.method == "noloco" and o.wire == "bf16":
        raise ValueError("--wire bf16 rounds updates of NoLoCo's theta away: give --wire int8")


def make_outer(run):
    o = run.o
    wire = o.wire if len(run.replicas) > 1 else "fp32"
    return outer_optimizer(o.method, wire, o.delay, run.model.parameters(), run.replicas,
                           theta=run.theta, fragments=o.fragments, **run.outer_settings)


def make_average(run):
    return sums.Average(sums.SUMS[run.o.wire], run.replicas)


def make_plan(o, stages):
    from planning.training import plan_paths
    return plan_paths(read_network(o.links, stages), o.routing, o.skip, o.microbatches, o.seed)
