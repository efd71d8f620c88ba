"""Checkpoints by torch.distributed.checkpoint in which each replica keeps its own weights.

It takes equal keys for equal tensors, so every replica needs keys of its own. docs/trainers.md says
how to call `save` and `load`.
"""
import torch.distributed as dist
import torch.distributed.checkpoint as dcp


class Pickled:
    """An optimizer whose state is saved as one value.

    torch loads only into tensors that are there, and a new optimizer has none yet: without this it
    would load nothing, and nothing would warn.
    """

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def state_dict(self):
        return {"state": (self.optimizer.state_dict(),)}        # torch pickles a tuple as it is

    def load_state_dict(self, state):
        self.optimizer.load_state_dict(*state["state"])


def replica(**parts):
    """These parts of the training, under keys that only this replica has."""
    return {f"replica{dist.get_rank()}.{name}": part for name, part in parts.items()}


def save(folder, group, **parts):
    """Save while training goes on. group: a Gloo group of its own, for the thread that saves.

    Returns a Future: wait for its result() before the next save, and before the process ends.
    """
    return dcp.async_save(replica(**parts), checkpoint_id=folder, process_group=group)


def load(folder, group, **parts):
    """Load into parts that were made like those that this rank saved."""
    dcp.load(replica(**parts), checkpoint_id=folder, process_group=group)
