"""NoLoCo in a training loop: `PYTHONPATH=. torchrun --nproc-per-node 4 examples/averaging.py`.

Each process trains its own replica on its own data; at the end all have the mean of all replicas.
"""
import torch
import torch.distributed as dist
from noloco import NoLoCo

dist.init_process_group("gloo")             # between machines first: export GLOO_SOCKET_IFNAME=eth0
torch.manual_seed(0)                        # the same weights everywhere
model = torch.nn.Linear(8, 1)               # move it to its device before NoLoCo sees it
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
outer = NoLoCo(model.parameters(), inner_steps=50, alpha=0, beta=1)         # plain averages
torch.manual_seed(dist.get_rank())          # its own data
for step in range(400):
    x = torch.randn(32, 8)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    outer.step()                            # every 50th call averages with a random partner
print(f"rank {dist.get_rank()}: loss {loss.item():.1e}")
dist.all_reduce(outer.theta)                # at the end the mean of all replicas
outer.theta /= dist.get_world_size()
dist.barrier()
dist.destroy_process_group()
