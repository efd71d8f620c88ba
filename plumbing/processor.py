"""The machine's processor: its cores, which ranks share."""
import os

import torch


def share_cores(machine, machines):
    """Give torch this rank's share of its machine's cores, where OMP_NUM_THREADS is unset.

    machine, machines: of this rank and of all ranks, a text that no other machine has. (After a
    takeover in survive/ a rank's place in the list is not its number.) Otherwise each rank on a
    machine would run a thread on every core, and they would wait for each other: ten times slower
    with 8 ranks on 2 cores. torchrun sets the variable, but only where it starts several processes
    itself. A rank that has its machine for itself keeps torch's default. The first process of each
    torchrun says so in a line.
    """
    ranks = machines.count(machine)
    if ranks == 1 or "OMP_NUM_THREADS" in os.environ:
        return
    threads = min(torch.get_num_threads(), max(1, cores() // ranks))
    torch.set_num_threads(threads)
    os.environ["OMP_NUM_THREADS"] = str(threads)        # for processes that this one starts
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"{ranks} ranks share this machine's {cores()} cores: torch uses "
              f"OMP_NUM_THREADS={threads} in each, since none was set", flush=True)


def cores():
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):                # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
