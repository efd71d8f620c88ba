"""What no trainer can be faster than: torchrun, import torch, a process group. (Below what
experiments.speed starts.)"""
import time

import torch.distributed as dist

dist.init_process_group("gloo")
print(f"at {time.time()} {dist.get_rank()}\n", end="", flush=True)
