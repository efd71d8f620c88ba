"""How far NoLoCo and DiLoCo end above DDP, for how many bytes: the row "gap" of README's table.

    python -m experiments.gap [--scale try|plot|full] [--plot] [--seeds 0 1]

`full` takes minutes of an H100 or some six hours of two cores, and may be stopped at any moment:
each fleet's records are kept once it is trained. Two processes may train into one DIR, with --seeds
of their own. `plot` has one seed, one rate and 60 steps.

Fleets of replicas (experiments/fleet.py) learn the standard library's text, byte by byte, in fp32,
messages and sums as well. A gap is the merged model's perplexity compared with DDP's, paired by
seed; replicas that never average have no merged model to speak of, and theirs is their mean.
`primary` has the comparisons that were named before the runs.
"""
from dataclasses import dataclass, field, replace

from experiments.fleet import Trial, train_missing
from experiments.harness import Row, command
from experiments.pictures import COLOURS, GREY, WIDTH, curve, forest, frame
from experiments.stats import (Expected, Table, less, mean, nats, paired, perplexity,
                               significant)

# ---------------------------------------------------------------- what is trained

DDP, NEVER = Trial("ddp"), Trial("local")
NOLOCO = {m: Trial("noloco", m) for m in (2, 10, 50)}
DILOCO = {m: Trial("diloco", m) for m in (4, 20, 100)}
PARTS, LATE_PARTS = Trial("noloco", 10, K=10), Trial("noloco", 10, D=1, K=10)
LATE, LATER = Trial("noloco", 10, D=1), Trial("noloco", 10, D=5)
PAPER_NOLOCO = Trial("noloco", 50, alpha=0.5, beta=0.7)
PAPER_DILOCO = Trial("diloco", 100, alpha=0.3, beta=0.7)
PAIR = DDP, NOLOCO[10]
THREE = DDP, NOLOCO[10], DILOCO[20]         # which have more seeds, and two to choose their rates
ALL = (DDP, NEVER, *NOLOCO.values(), *DILOCO.values(), PARTS, LATE_PARTS, LATE, LATER, PAPER_NOLOCO,
       PAPER_DILOCO)

# Learning rates, here and below the best of results/gap_rates.json (by 39ad616 and earlier): 0.001,
# 0.002, 0.004, 0.008, with Muon 0.006, 0.012, 0.024, after as many steps as are measured, by the
# merged model's mean loss on seeds 100 and 101, for never averaged by the replicas' mean. Methods
# outside THREE were tried on seed 100, and NoLoCo every 2 and DiLoCo every 4 then on 101 as well;
# 32 replicas on seed 100, from 0.002 on; 1.1M weights on seed 100, DDP from 0.002 on, the others up
# to 0.004. If the best was an end of these, it was tried once more beside the next one, on one
# text. Fragments and delays have the rate of NoLoCo every 10.
ADAM = dict.fromkeys(ALL, 4e-3) | {DDP: 8e-3, NEVER: 2e-3}
MUON = {DDP: 2.4e-2, NOLOCO[2]: 4.8e-2, NOLOCO[10]: 1.2e-2, LATE_PARTS: 1.2e-2}


@dataclass(frozen=True)
class Setting:
    """Methods that compare. facts: fields of Trial that all share."""
    name: str
    rates: dict = field(compare=False)          # {method: its learning rate}
    seeds: int = 3
    more_seeds: int = 0         # of THREE; 0: as many
    facts: dict = field(default_factory=dict, compare=False)

    @property
    def methods(self):
        return tuple(self.rates)

    def trial(self, method, **facts):
        return replace(method, rate=self.rates[method], **self.facts, **facts)

    def selector(self, method):
        """The facts of a method's records here, whatever their seed."""
        known = self.trial(method).known
        return {key: value for key, value in known.items() if key != "seed"}

    def trials(self):
        """All that are trained."""
        found = []
        for method in self.methods:
            more = method in THREE and self.more_seeds
            found += [self.trial(method, seed=seed) for seed in range(more or self.seeds)]
        return found


MAIN = Setting("Adam", ADAM, 5, 10)
WITH_MUON = Setting("Muon", MUON, 5, facts=dict(optimizer="muon"))
LARGER = Setting("1.1M weights", dict.fromkeys(THREE, 2e-3) | {DDP: 4e-3}, facts=dict(model="1.1M"))
SHORT = Setting("300 steps", {DDP: 4e-3, NOLOCO[10]: 8e-3}, facts=dict(steps=300))
TWO = Setting("2 replicas", dict.fromkeys(PAIR, 4e-3), facts=dict(N=2, steps=600))
MANY = Setting("32 replicas", dict.fromkeys(PAIR, 4e-3), facts=dict(N=32, steps=600))
MIDDLE = DDP, NOLOCO[2], NOLOCO[10], DILOCO[4], DILOCO[20], LATE_PARTS, LATE, LATER


def tried(setting):
    """The same in seconds."""
    one = setting.trial(DDP)
    facts = setting.facts | dict(N=min(4, one.N), tokens=128, steps=one.steps // 100)
    return replace(setting, seeds=2, more_seeds=0, facts=facts)


FULL = MAIN, WITH_MUON, LARGER, SHORT, TWO, MANY
SETTINGS = {"full": FULL, "try": tuple(map(tried, FULL)),
            "plot": (Setting("Adam", dict.fromkeys(MIDDLE, 4e-3), 1, facts=dict(steps=60)),)}
SMALL, LARGE = "--hidden 64 --mlp 256 --heads 2 --layers 2", "--hidden 128 --mlp 512 --heads 4"
TINY = "--hidden 16 --mlp 32 --heads 2 --layers 1 --warmup 2 --eval-sequences 8"
MODELS = {          # options of train.py
    "full": {"0.16M": f"{SMALL} --warmup 50 --eval-sequences 512",
             "1.1M": f"{LARGE} --layers 4 --warmup 50 --eval-sequences 512"},
    "plot": {"0.16M": f"{SMALL} --warmup 20 --eval-sequences 128"},
    "try": {"0.16M": TINY, "1.1M": TINY},
}


def settings_of(scale):
    """{name: Setting}"""
    return {setting.name: setting for setting in SETTINGS[scale]}


def measure(o):
    trials = [trial for setting in SETTINGS[o.scale] for trial in setting.trials()]
    train_missing("gap", trials, MODELS[o.scale], o)


# ---------------------------------------------------------------- what was found


def name_of(method):
    """In tables."""
    if method == DDP:
        return "DDP"
    if method == NEVER:
        return "never averaged"
    words = [{"noloco": "NoLoCo", "diloco": "DiLoCo"}[method.method]]
    if method.alpha:
        words.append("its paper's outer step")
    words.append(f"every {method.m}")
    if method.K > 1:
        words.append(f"{method.K} fragments")
    if method.D:
        words.append(f"D = {method.D}")
    return ", ".join(words)


def bytes_of_ddp(method, replicas):
    """Bytes sent per rank, over DDP's: it reduces the gradient at every step in a ring, which sends
    2 (N - 1) / N of it; DiLoCo every m steps; NoLoCo's pair sends the weights once."""
    if method == NEVER:
        return 0.0
    ring = 2 * (replicas - 1) / replicas
    own = 1.0 if method.method == "noloco" else ring
    return own / ring / method.m


def over(records, setting, method, base=DDP, key="merged", how=perplexity):
    """A method's losses over another's in this setting, paired by seed; None without a pair, or
    where the setting lacks one of the two."""
    if not {method, base} <= setting.rates.keys():
        return None
    return paired(records, setting.selector(method), setting.selector(base), key, how)


def nats_over(records, setting, method, base=DDP):
    return over(records, setting, method, base, how=nats)


def primary(records, scale):
    """{name: Comparison, in nats per byte; None while its runs are missing}, as named before the
    runs."""
    settings = settings_of(scale)
    main = settings["Adam"]
    found = {}

    def compare(name, setting, method, base=DDP):
        found[name] = nats_over(records, setting, method, base) if setting else None

    compare("NoLoCo every 10 minus DDP", main, NOLOCO[10])
    compare("NoLoCo every 10 minus DiLoCo every 20", main, NOLOCO[10], DILOCO[20])
    compare("NoLoCo every 2 minus DiLoCo every 4", main, NOLOCO[2], DILOCO[4])
    for name, pair in NAMED_FRAGMENTS.items():
        compare(name, main, *pair)
    muon = settings.get("Muon")
    compare("NoLoCo every 10 minus DDP, Muon", muon, NOLOCO[10])
    compare("NoLoCo every 10 in fragments minus DDP, Muon", muon, LATE_PARTS)
    compare("larger", settings.get("1.1M weights"), NOLOCO[10])
    found["NoLoCo every 10 minus DDP: 1.1M less 0.16M weights"] = less(
        found.pop("larger"), found["NoLoCo every 10 minus DDP"])
    return found


def show(found):
    """All tables of what is there."""
    records, scale = found["records"], found["scale"]
    table = Table("named before the runs; merged models", "seeds", "nats per byte")
    for name, one in primary(records, scale).items():
        if one:
            table.add(name, len(one.differences), one)
    table.end()
    for setting in SETTINGS[scale]:
        if setting.methods != PAIR:
            show_setting(records, setting)
    show_pairs(records, scale)
    show_muon(records, scale)
    settings = settings_of(scale)
    main, larger = settings["Adam"], settings.get("1.1M weights")
    show_differences(records, main, "outer steps, merged models", OUTER_STEPS)
    show_differences(records, main, "NoLoCo every 10 steps, merged models", OTHER_FRAGMENTS)
    if larger:
        show_differences(records, larger, "1.1M weights, merged models", LARGER_PAIR)


def show_setting(records, setting):
    one = setting.trial(DDP)
    table = Table(f"{setting.name}: {one.N} replicas, {one.tokens} tokens, {one.steps} steps",
                  "bytes, of DDP's", "learning rate", "loss, nats per byte",
                  "perplexity compared with DDP")
    for method in setting.methods:
        name, key = name_of(method), "merged"
        if method == NEVER:
            name, key = f"{name} (replicas' mean)", "mean"
        loss = mean(records, setting.selector(method), key)
        if loss:
            gap = None
            if method != DDP:
                gap = over(records, setting, method, key=key)
            table.add(name, f"{bytes_of_ddp(method, one.N):.1%}",
                      f"{setting.rates[method]:g}", loss, gap)
    table.end()


def show_pairs(records, scale):
    """NoLoCo every 10 compared with DDP in every setting."""
    table = Table("NoLoCo every 10 compared with DDP", "DDP's learning rate", "NoLoCo's",
                  "DDP's loss, nats per byte", "NoLoCo's perplexity compared with DDP")
    for setting in SETTINGS[scale]:
        base, own = setting.selector(DDP), setting.selector(NOLOCO[10])
        gap = over(records, setting, NOLOCO[10])
        if gap:
            name = f"{base['optimizer'].title()}, {base['model']} weights, {base['N']} replicas, "
            table.add(f"{name}{base['steps']} steps", f"{base['rate']:g}", f"{own['rate']:g}",
                      mean(records, base), gap)
    table.end()


def show_muon(records, scale):
    """Muon compared with Adam's DDP, which is what a user has today."""
    settings = settings_of(scale)
    if "Muon" not in settings:
        return
    base = settings["Adam"].selector(DDP)
    table = Table("Muon, compared with Adam's DDP", "nats per byte", "perplexity")
    for method in settings["Muon"].methods:
        own = settings["Muon"].selector(method)
        nats = paired(records, own, base)
        if nats:
            table.add(name_of(method), nats, paired(records, own, base, how=perplexity))
    table.end()


EQUALLY_LATE = "fragments, D = 1, minus whole, D = 1"
# {its name: (a method, the one that it is compared with)}. For the same bytes fragments exchange a
# tenth of the weights at each step, and the others all of them every 10 steps. NAMED: before the
# runs, so among `primary`.
NAMED_FRAGMENTS = {
    "fragments, D = 1, minus whole, D = 5": (LATE_PARTS, LATER),
    EQUALLY_LATE: (LATE_PARTS, LATE),
}
OTHER_FRAGMENTS = {
    "fragments, D = 0, minus whole, D = 0": (PARTS, NOLOCO[10]),
    "whole, D = 5, minus whole, D = 0": (LATER, NOLOCO[10]),
    "whole, D = 1, minus whole, D = 0": (LATE, NOLOCO[10]),
}


OUTER_STEPS = {
    "NoLoCo every 50, its paper's outer step, minus plain averages": (PAPER_NOLOCO, NOLOCO[50]),
    "DiLoCo every 100, its paper's outer step, minus plain averages": (PAPER_DILOCO, DILOCO[100]),
    "NoLoCo every 50 minus DiLoCo every 100, each paper's outer step": (PAPER_NOLOCO, PAPER_DILOCO),
}


LARGER_PAIR = {"NoLoCo every 10 minus DiLoCo every 20": (NOLOCO[10], DILOCO[20])}


def differences(records, setting, pairs):
    """{name: nats per byte} of what is trained in this setting."""
    compared = {name: nats_over(records, setting, *pair) for name, pair in pairs.items()}
    return {name: one for name, one in compared.items() if one}


def show_differences(records, setting, title, pairs):
    table = Table(title, "nats per byte")
    for name, one in differences(records, setting, pairs).items():
        table.add(name, one)
    table.end()


# ---------------------------------------------------------------- the pictures

LINES = (       # (setting, methods, label, colour, style)
    ("Adam", NOLOCO.values(), "NoLoCo", "NoLoCo", dict(ls="-")),
    ("Adam", DILOCO.values(), "DiLoCo", "DiLoCo", dict(ls="-")),
    ("Adam", [PAPER_NOLOCO], "NoLoCo, its paper's\nouter step", "NoLoCo", dict(mfc="white")),
    ("Adam", [PAPER_DILOCO], "DiLoCo, its paper's\nouter step", "DiLoCo", dict(mfc="white")),
    ("Adam", [LATE_PARTS], "NoLoCo, 10 fragments\none step late", "25%", dict(marker="D")),
    ("Muon", [NOLOCO[10], NOLOCO[2]], None, "NoLoCo", dict(ls="-")),
    ("Muon", [LATE_PARTS], None, "25%", dict(marker="D")),
)


def draw(plt, found):
    """The merged model's perplexity compared with DDP's, against the bytes that a rank sends, for
    each optimizer with its own DDP."""
    records, settings = found["records"], settings_of(found["scale"])
    kinds = [name for name in ("Adam", "Muon") if name in settings]
    figure, axes = plt.subplots(1, len(kinds), figsize=(WIDTH, 3.8), sharey=True, squeeze=False)
    axes = dict(zip(kinds, axes.flat))
    for kind, methods, label, colour, style in LINES:
        if kind not in settings:
            continue
        gaps = {}
        for method in methods:
            gap = over(records, settings[kind], method)
            if gap:
                gaps[100 * bytes_of_ddp(method, settings[kind].trial(DDP).N)] = gap
        if gaps:
            curve(axes[kind], gaps, COLOURS[colour], label, times=100, **style)
    for kind, axis in axes.items():
        axis.plot([100], [0], "s", color=COLOURS["DDP"], ms=6, label="DDP")
        axis.set_xscale("log")
        axis.set(xlim=(0.7, 160), xticks=(1, 5, 25, 100), title=kind,
                 xticklabels=("1%", "5%", "25%", "100%"), xlabel="bytes sent, of DDP's")
        axis.minorticks_off()
    first = axes[kinds[0]]
    first.set_ylabel("perplexity compared with DDP, %")
    figure.legend(*first.get_legend_handles_labels(), loc="outside right center", frameon=False,
                  labelcolor="linecolor")
    frame(figure, found, finding(records, found["scale"]),
          "NoLoCo and DiLoCo compared with DDP: perplexity against bytes")
    return figure


def finding(records, scale):
    """The picture's title."""
    far = over(records, settings_of(scale)["Adam"], NOLOCO[10])
    share = bytes_of_ddp(NOLOCO[10], 8)
    return f"NoLoCo's perplexity compared with DDP's: {far.mean:+.1%}, for {share:.0%} of the bytes"


def draw_fragments(plt, found):
    main = settings_of(found["scale"])["Adam"]
    compared = differences(found["records"], main, NAMED_FRAGMENTS | OTHER_FRAGMENTS)
    figure, axis = plt.subplots(figsize=(WIDTH, 3.4))
    named = {name.replace(", minus ", "\nminus "): one for name, one in compared.items()}
    colours = [COLOURS["NoLoCo"] if "fragments" in name else GREY for name in named]
    forest(axis, named, colours)
    axis.set(xlabel="nats per byte (below zero: the first one is better)")
    frame(figure, found, finding_of_fragments(found), "Fragments and whole messages")
    return figure


def finding_of_fragments(found):
    named = primary(found["records"], found["scale"])
    survive = dict(zip(named, significant(list(named.values()))))
    told = ("Fragments minus whole messages, both one step late: "
            f"{named[EQUALLY_LATE].mean:+.3f} nats")
    return told if survive[EQUALLY_LATE] else f"{told}, not significant"


# ---------------------------------------------------------------- expected numbers

NUMBERS = {     # (method, base): (perplexity over the base's, at most so much off)
    (NOLOCO[2], DDP): (0.105, 0.05),
    (NOLOCO[10], DDP): (0.12, 0.05),
    (DILOCO[20], DDP): (0.12, 0.05),
    (NOLOCO[10], DILOCO[20]): (0.0, 0.04),
}


def expected(found):
    told = []
    main = settings_of(found["scale"])["Adam"]
    for (method, base), number in NUMBERS.items():
        more = over(found["records"], main, method, base)
        told.append(Expected(f"{name_of(method)} compared with {name_of(base)}, perplexity",
                             more and more.mean, *number))
    name = next(iter(NAMED_FRAGMENTS))
    more = differences(found["records"], main, NAMED_FRAGMENTS).get(name)
    told.append(Expected(f"{name}, nats per byte", more and more.mean, -0.02, 0.04, "+.3f"))
    return told


ROW = Row("gap", measure, show, {"gap": draw, "fragments": draw_fragments}, expected)

if __name__ == "__main__":
    command(__doc__, ROW)
