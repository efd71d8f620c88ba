"""What the replicas of a fleet read (experiments/fleet.py)."""
import torch


class Batches:
    """What the readers of train.py draw, for all seeds and replicas at once.

    The text lies on the device, and a step is one index of it: readers stack sequence after
    sequence, for which a GPU would wait.
    """

    def __init__(self, corpus, readers, replicas, seq_len, device):
        (text,) = corpus.train
        self.text = text.to(device)
        self.readers = readers                              # seed by seed, each replica's
        self.seq_len = seq_len
        share = len(text) // replicas
        places = torch.arange(len(readers)) % replicas
        self.begins = (share * places)[:, None]             # of each reader's part of the text
        self.within = torch.arange(seq_len + 1, device=device)

    def next(self, count):
        """(readers, count, T + 1) tokens."""
        numbers = torch.stack([drawn(reader, count) for reader in self.readers])
        starts = self.begins + numbers * self.seq_len
        # A blocking copy would wait until a GPU has done all that was asked of it before.
        starts = starts.to(self.text.device, non_blocking=True)
        return self.text[starts[..., None] + self.within].long()


def drawn(reader, count):
    """(count,) numbers of the reader's next sequences, as its `next` takes them."""
    found = []
    while count:
        epoch, place = divmod(reader.cursor, len(reader.sequences))
        if epoch != reader.epoch:
            reader.shuffle(epoch)
        some = reader.order[place:place + count]
        reader.cursor += len(some)
        count -= len(some)
        found.append(some)
    return torch.cat(found)
