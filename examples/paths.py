"""SkipPipe's paths on a network of six nodes: `PYTHONPATH=. python examples/paths.py`."""
import skippipe

# Seconds of a message, node to node. The diagonal counts for nothing.
delay = [[0.1 if (i + j) % 2 == 0 else 0.9 for j in range(6)] for i in range(6)]
network = skippipe.Network(delay, compute=[0.2] * 6, stages=[[0, 1], [2, 3], [4, 5]], memory=3)
plan = skippipe.plan(network, stages_kept=2, microbatches_per_origin=4, seconds=None, iterations=2000)
print(plan.paths)                                                   # [(0, 2), (1, 3), ...]
print(f"{plan.makespan:.2f} s")                                     # 3.50 s
print(skippipe.check(network, plan.paths))                          # []: all constraints hold
