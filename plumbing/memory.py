"""Whether a run fits into the memory of its machines, reckoned before anything is allocated.

docs/speed.md has the formula and what it was measured against. A rank holds, beyond its libraries,

    4 (v P + n (m L a + V + 2 C) + max(2 n, C) V) bytes,      a = 8 C + 2 K D + 4 F + H + 2

for P parameters in v vectors, L layers, and m microbatches of n tokens in flight. The terms with
V are those of a rank that holds the two ends. model.py has the other letters.
"""
from pathlib import Path

from plumbing.options import gamma_of
from plumbing.processes import this_machine

GB = 1e9


def vectors(o, replicas):
    """How many vectors as long as theta a rank keeps, where its stage has so many replicas."""
    count = 4                               # theta, its gradient and Adam's two
    if o.method in ("noloco", "diloco"):
        count += 2                          # phi and delta
    if o.method == "noloco" and replicas > 1:
        partners = min(o.group_size, replicas) - 1
        if o.wire == "int8":
            count += 0.25 * (1 + partners) + partners   # the codes, and what is read of each
        elif gamma_of(o) == o.beta:
            count += partners                           # a theta of each
        else:
            count += 2 * partners                       # and a phi
    if o.delay:
        count += 1                          # the theta that it sent
        if o.method == "diloco":
            count += 1                      # and the sum
    return count


def bytes_needed(o, config, layers, ends, replicas, in_flight):
    """Of a rank with so many layers. ends: whether it holds embedding, head and loss."""
    C = config.hidden_size
    V = config.vocab_size
    F = config.intermediate_size
    H = config.num_attention_heads
    KD = C // H * config.num_key_value_heads
    matrices = layers * (2 * C * C + 2 * C * KD + 3 * C * F)
    parameters = matrices + layers * 2 * C
    activations = in_flight * layers * (8 * C + 2 * KD + 4 * F + H + 2)     # of each token
    logits = 0
    tokens = o.batch * o.seq_len
    if ends:
        tables = 1 if config.tie_word_embeddings else 2
        parameters += tables * C * V + C
        activations += V + 2 * C
        logits = max(2 * tokens, C) * V     # two more copies in the loss, or the head's gradient
    kept = vectors(o, replicas) * parameters
    if o.optimizer == "muon":
        kept -= matrices                # it has one vector for these, where Adam has two
    return 4 * (kept + tokens * activations + logits)


def free_bytes():
    """What this machine can still give, with its swap; None if the system does not tell."""
    table = Path("/proc/meminfo")
    if not table.exists():                      # not Linux
        return None
    found = {}
    for line in table.read_text().splitlines():
        name, _, rest = line.partition(":")
        found[name] = 1024 * int(rest.split()[0])
    free = found["MemAvailable"] + found["SwapFree"]
    limit = Path("/sys/fs/cgroup/memory.max")   # in a container, of all its processes together
    if limit.exists() and limit.read_text().strip() != "max":
        free = min(free, int(limit.read_text()))
    return free


def refuse_too_large(job, o, config, stages, layers):
    """Refuse a run that a machine cannot hold; every rank calls this. GPUs are left to torch.

    A process that joins is not counted: the run that it joins has its memory already.
    """
    if job.joining:
        return
    stage = next(s for s, ranks in enumerate(stages) if job.rank in ranks)
    # A microbatch comes back for its backward pass 2 (stages left) tasks later (train.tasks).
    in_flight = min(o.microbatches, 2 * (len(stages) - stage))
    needed = 0
    if job.device.type == "cpu":
        needed = bytes_needed(o, config, len(layers[stage]), ends=stage == 0,
                              replicas=len(stages[stage]), in_flight=in_flight)
    found = job.share("memory", [this_machine(), needed, free_bytes()])
    for machine in sorted({machine for machine, _, _ in found}):
        needs = [needed for which, needed, _ in found if which == machine]
        free = next(free for which, _, free in found if which == machine)
        total = sum(needs)
        if free is not None and total > free:
            who = "1 rank needs" if len(needs) == 1 else f"{len(needs)} ranks on one machine need"
            job.refuse(f"{who} about {total / GB:.1f} GB of memory, and {free / GB:.1f} GB are "
                       "free: start fewer here, or take a smaller --model, --vocab, --batch or "
                       "--seq-len")
