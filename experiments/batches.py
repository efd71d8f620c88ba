"""What the replicas of a fleet read (experiments/fleet.py)."""
import torch


class Batches:
    """What the readers of train.py draw, for all seeds and replicas at once.

    The text lies on the device, and a step is one index of it: readers stack sequence after
    sequence, for which a GPU would wait.
    """

    def __init__(self, corpus, readers, seq_len, device):
        self.text = corpus.train.to(device)
        self.readers = readers                              # seed by seed, each replica's
        self.seq_len = seq_len
        self.within = torch.arange(seq_len + 1, device=device)

    def next(self, count):
        """(readers, count, T + 1) tokens."""
        numbers = torch.tensor([reader.draw(count) for reader in self.readers])
        # A blocking copy would wait until a GPU has done all that was asked of it before.
        starts = (numbers * self.seq_len).to(self.text.device, non_blocking=True)
        return self.text[starts[..., None] + self.within].long()
