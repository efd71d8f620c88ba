"""What a pipeline over NCCL needs before its first message."""
import torch
import torch.distributed as dist


def warm_up(pipeline):
    """Run each kind of task twice without messages. It leaves gradients, which a step zeroes.

    CUDA loads a kernel when it is first called, and may wait until all running kernels end. A
    receive of NCCL is a running kernel. Without this, four ranks waited for each other for ever in
    their first step.
    """
    model, shape = pipeline.model, pipeline.message_shape
    tokens = torch.zeros(shape[0], shape[1] + 1, dtype=torch.long, device=pipeline.device)
    for training in (True, True, False):        # the second run adds to the gradients of the first
        with torch.set_grad_enabled(training), pipeline.cast:
            x = torch.zeros(shape, dtype=pipeline.dtype, device=pipeline.device)
            x.requires_grad_(training)
            y = model.blocks(x.float()).to(pipeline.dtype)
            if hasattr(model, "lm_head"):
                y = model.blocks(model.embed(tokens[:, :-1])).to(pipeline.dtype)
                y = model.loss(y.float(), tokens[:, 1:])
        if training:
            y.backward(torch.zeros_like(y))
    torch.cuda.synchronize()


def lanes(pipeline, pairs):
    """A function (source, to) -> group. Over Gloo always None, the default group.

    NCCL ignores tags, and runs what two ranks exchange within a group in the order posted. So each
    direction of a pair has a group of its own. All pairs connect here, in one order for all ranks.
    In training each rank would wait for the other's first message.
    """
    job = pipeline.job
    if not job.nccl:
        return lambda source, to: None
    warm_up(pipeline)
    up, down = dist.new_group(), dist.new_group()
    one = torch.zeros(1, device=job.device)
    for a, b in pairs:
        for group, source, to in ((up, a, b), (down, b, a)):
            if job.rank == source:
                dist.send(one, to, group=group)
            elif job.rank == to:
                dist.recv(one, source, group=group)
    return lambda source, to: up if source < to else down
