"""C4's shards (.json.gz, a document a line), streamed: too large to hold, or to tokenise before training."""
import gzip
import json
import zlib
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import torch

from plumbing.processes import BadInput

# Where there are fewer shards than origins, each gets a block of lines in turn; of a single shard the first
# line of each block is held out.
BLOCK = 20
READY = 256     # sequences that a stream keeps ahead of training


def documents(files, mine, shard=0, line=0, bad=0):
    """Documents of the shards from (shard, line) on, where mine(line), for ever.

    Yields ((shard, line, bad lines before it), text as bytes). A line that is no JSON object with a text is
    bad: skipped and counted, as is, once, the rest of a shard that breaks off. Shards count on over the
    epochs. Raises BadInput after a whole epoch without a document.
    """
    first, problem = shard, f"no lines in {files[shard % len(files)]}"
    while problem is None or shard < first + len(files):
        path = files[shard % len(files)]
        with gzip.open(path, "rb") as lines:
            try:
                for number, text in enumerate(lines):
                    if number < line or not mine(number):
                        continue
                    try:
                        document = json.loads(text)["text"].encode()
                    except (ValueError, KeyError, TypeError, AttributeError):
                        bad += 1
                        problem = problem and f"{path}, line {number + 1}: no JSON object with a text"
                        continue
                    problem = None
                    yield (shard, number, bad), document
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                bad += 1
                problem = problem and f"{path}: {error}"
        shard, line = shard + 1, 0
    raise BadInput(f"the data has no document for one of its readers: {problem}")


def heldout_documents(files, alone):
    """The texts of these shards, once; of a shard that is all the data, every 20th line."""
    for (shard, *_), text in documents(files, lambda line: not alone or line % BLOCK == 0):
        if shard >= len(files):
            return
        yield text


class Stream:
    """Sequences of one origin's share of the shards, in their order (C4 is shuffled).

    A thread reads and tokenises them ahead, in bounded memory. `cursor` is all the state: shard (counting on
    over the epochs), line, bad lines before it, and how many tokens of the line's document have been read.
    Raises BadInput for a share without a sequence.
    """

    def __init__(self, corpus, seq_len, origin, origins):
        shared = len(corpus.train) < origins        # each origin then reads all shards, in blocks of lines
        self.files = corpus.train if shared else corpus.train[origin::origins]
        self.blocks = (origin, origins) if shared else (0, 1)
        self.alone = corpus.alone
        self.encode = corpus.encode
        self.seq_len = seq_len
        self.cursor = (0, 0, 0, 0)
        self.ready = deque()
        self.ready_at = None                        # the cursor before the first that is ready
        self.thread = ThreadPoolExecutor(1)
        _, after = next(self.sequences(self.cursor))
        if after[0] >= len(self.files):
            raise BadInput("an origin's part of the data has fewer tokens than one sequence of "
                           f"{seq_len} + 1: more data, fewer origins or a smaller --seq-len")

    def mine(self, line):
        place, parts = self.blocks
        heldout = self.alone and line % BLOCK == 0
        return line // BLOCK % parts == place and not heldout

    @property
    def bad_lines(self):
        """Skipped so far."""
        return self.cursor[2]

    def sequences(self, cursor):
        """From the cursor on, for ever: (T + 1 tokens, the last of which comes again; the cursor after)."""
        *place, used = cursor
        coming = documents(self.files, self.mine, *place)
        tokens = torch.empty(0, dtype=torch.uint8)
        spans = deque()             # (place, length) of the documents that the tokens are from
        while True:
            places, texts = zip(*islice(coming, 64))
            parts = self.encode(texts)
            tokens = torch.cat([tokens, *parts])
            spans.extend(zip(places, map(len, parts)))
            while len(tokens) > used + self.seq_len:
                row = tokens[used:used + self.seq_len + 1]
                used += self.seq_len
                while used >= spans[0][1]:
                    _, length = spans.popleft()
                    tokens = tokens[length:]
                    used -= length
                yield row, (*spans[0][0], used)

    def next(self, batch):
        """(batch, T + 1) tokens: inputs and, one further, targets."""
        if self.cursor != self.ready_at:            # the start, or a checkpoint's cursor
            self.rows = self.sequences(self.cursor)
            self.ready = deque(self.thread.submit(next, self.rows) for _ in range(READY))
        rows = []
        for _ in range(batch):
            row, self.ready_at = self.ready.popleft().result()
            self.ready.append(self.thread.submit(next, self.rows))
            rows.append(row)
        self.cursor = self.ready_at
        return torch.stack(rows).long()
