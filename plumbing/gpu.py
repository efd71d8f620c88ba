"""What share of its GPUs' peak a run reaches, counted as nanoGPT counts, and the memory it takes.

    floating point operations of a token = 6 N + 12 L H Q T

for N parameters, L layers of H heads with Q = D numbers each, and T tokens a sequence: forward and
backward, each multiplication and addition as one operation. The second term is attention, counted
as if it were not causal. N has no embedding, from which a token only reads its row; nanoGPT's N has
its embedding once, as the head that it also is.
"""
import torch

from model import count_parameters

# FLOP/s in bf16 without sparsity, by NVIDIA's data sheets of the SXM cards.
PEAKS = {"A100": 312e12, "H100": 989e12, "H200": 989e12}
SLOWER = "PCIe", "NVL"          # cards with the same number, and a peak that is not in the table


def flops_per_token(config, seq_len):
    """Floating point operations that training takes for a token. config: of the whole model."""
    parameters, inner = count_parameters(config)
    head = config.vocab_size * config.hidden_size
    attention = 12 * config.num_hidden_layers * config.hidden_size * seq_len       # H Q = hidden
    return 6 * (inner + head) + attention


def peak_of(name):
    """FLOP/s in bf16 of the GPU that calls itself so; None where it is not in the table."""
    if any(word.lower() in name.lower() for word in SLOWER):
        return None
    for number, peak in PEAKS.items():
        if number in name:
            return peak
    return None


def peak_share(rate, config, seq_len, gpus):
    """Which share of the GPUs' peak a training of `rate` tokens a second is.

    gpus: {a GPU's own identifier: its name}, each once however many ranks share it. None where one
    is not in the table.
    """
    peaks = [peak_of(name) for name in gpus.values()]
    if None in peaks:
        return None
    return rate * flops_per_token(config, seq_len) / sum(peaks)


def gpu_row(device):
    """What a rank tells the log of its GPU: [identifier, name, bytes that it held at most]; None
    on a CPU."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return [str(properties.uuid), properties.name, torch.cuda.max_memory_allocated(device)]


def gpu_columns(run, rate, rows):
    """The log's numbers of the GPUs. rows: each rank's `gpu_row`; rate: tokens a second of all
    ranks.

    A microbatch that skips stages takes fewer operations, so a run with --skip has no share.
    """
    known = [row for row in rows if row]
    if not known:
        return dict(gpu_share=None, gpu_bytes=None)
    share = None
    if not run.o.skip:
        gpus = {identifier: name for identifier, name, _ in known}
        share = peak_share(rate, run.config, run.o.seq_len, gpus)
    return dict(gpu_share=share, gpu_bytes=max(most for _, _, most in known))
