"""The machine's processor: its cores, which ranks share, and whether it can compute in bf16."""
import os
import platform
import time
from pathlib import Path

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
    say_once_a_node(f"{ranks} ranks share this machine's {cores()} cores: torch uses "
                    f"OMP_NUM_THREADS={threads} in each, since none was set")


def cores():
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):                # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def warn_of_slow_bfloat16(dtype, device):
    """Say so where --dtype bfloat16 makes this machine slower. Torch then converts each number."""
    if dtype != "bfloat16" or device.type != "cpu":
        return
    times = bfloat16_over_float32()
    if times > 1.5:
        say_once_a_node(f"warning: --dtype bfloat16 is slow on this processor, {processor_name()}: "
                        f"a matrix product takes {times:.0f} times as long as in float32")


def bfloat16_over_float32():
    """The time of a matrix product in bf16 over that in fp32. To measure it takes milliseconds."""
    return seconds_of_product(torch.bfloat16) / seconds_of_product(torch.float32)


def seconds_of_product(dtype, size=256):
    """Processor time of one matrix product: the least of three, after a first that warms up."""
    a = torch.ones(size, size, dtype=dtype)
    a @ a
    times = []
    for _ in range(3):
        start = time.thread_time()
        a @ a
        times.append(time.thread_time() - start)
    return min(times)


def processor_name():
    """The processor as Linux calls it, or its architecture."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def say_once_a_node(line):
    """Print the line, from the first process of each torchrun."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(line, flush=True)
