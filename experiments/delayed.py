"""CPU seconds of delayed outer steps with nothing hidden, over those of undelayed ones; before: commit 413ec0c's.

    torchrun --nproc-per-node 2 experiments/delayed.py --trials 15 --params 16e6 --out /tmp/delayed
"""
import sys, os
sys.path.insert(0, os.getcwd())
from functools import partial
import bench_sync
from bench_sync import Timed
from noloco import NoLoCo
from plumbing.onebyte import OneByteNoLoCo
from plumbing.overlap import DelayedNoLoCo, DelayedOneByte
import torch, time
from types import SimpleNamespace
from functools import reduce
from noloco import outer_update
bench_sync.time = SimpleNamespace(perf_counter=time.process_time)
class Old(DelayedNoLoCo):
    def land(self):
        self.settle()
        thetas, *phis = self.flying[0]
        phis = phis[0] if phis else []
        self.notice(thetas)
        averages = (self.alpha, self.beta, self.gamma) == (0, 1, 1)     # phi <- mean(theta), no delta
        vectors = self.theta, self.sent, self.phi, self.delta, *thetas, *phis
        for theta, sent, phi, delta, *others in zip(*(v.split(self.pieces) for v in vectors)):
            theta.sub_(sent)                                            # what was learnt meanwhile
            others = [v.to(theta.device) for v in others]
            total = reduce(torch.add, others[:len(thetas)])
            if averages:
                torch.div(total, len(thetas), out=phi)
            else:
                mean_phi = None
                outer_update(phi, delta, total / len(thetas), mean_phi, self.alpha, self.beta, self.gamma)
            theta.add_(phi)
        self.flying = None
def methods(o, params):
    rows, common, phi = {}, dict(inner_steps=1, seed=o.seed), None
    for name, kind, late in (("NoLoCo", NoLoCo, DelayedNoLoCo), ("before", NoLoCo, Old), ("one byte", OneByteNoLoCo, DelayedOneByte)):
        plain, outer = kind(params, **common), late(params, delay=1, **common)
        phi = phi or (plain.phi, plain.delta)
        for each in (plain, outer):
            each.phi, each.delta = phi
        rows[name] = Timed(plain.step, sent=partial(getattr, plain, "bytes_sent"))
        def run(outer, alpha, beta):
            outer.alpha, outer.beta, outer.gamma = alpha, beta, beta
            outer.step()
            outer.settle()
        for s, more in ((outer.alpha, outer.beta), ""), ((0, 1), ", plain"):
            rows[f"{name} delayed{more}"] = Timed(partial(run, outer, *s), sent=partial(getattr, outer, "bytes_sent"), floor=name)
    d = bench_sync.DiLoCo(params, inner_steps=1); d.phi, d.delta = phi
    rows["DiLoCo"] = Timed(d.step, sent=lambda: d.bytes_sent)
    return rows
import statistics, json
bench_sync.measure(bench_sync.parse(sys.argv[1:]), methods)
if os.environ["RANK"]=="0":
    o=bench_sync.parse(sys.argv[1:])
    r=json.load(open(f"{o.out}/results/sync_measured_{os.environ['WORLD_SIZE']}.json"))["rows"]
    for n,row in r.items():
        if row["floor"]:
            q=bench_sync.quartiles([a/b for a,b in zip(row["seconds"],r[row["floor"]]["seconds"])])
            print(n,[round(x,2) for x in q])
