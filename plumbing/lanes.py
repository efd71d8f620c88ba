"""Which process group carries a pipeline's message from one rank to another."""
import torch
import torch.distributed as dist


def lanes(job, pairs):
    """A function (source, to) -> group. Over Gloo always None, the default group.

    NCCL ignores tags, and runs what two ranks exchange within a group in the order posted. So each direction
    of a pair has a group of its own. All pairs connect here, in one order for all ranks: in training each
    rank would wait for the other's first message.
    """
    if not job.nccl:
        return lambda source, to: None
    up, down = dist.new_group(), dist.new_group()
    one = torch.zeros(1, device=job.device)
    for a, b in pairs:
        for group, source in ((up, a), (down, b)):
            if job.rank in (a, b):
                (dist.send if job.rank == source else dist.recv)(one, a + b - job.rank, group=group)
    return lambda source, to: up if source < to else down
