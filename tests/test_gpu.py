"""What only a GPU's runs say: the share of its peak. (tests/test_nccl.py needs a GPU itself.)"""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from model import Config, Llama
from plumbing.gpu import flops_per_token, gpu_columns, gpu_row, peak_of, peak_share

CONFIG = Config(256, 32, 64, 3, 2, 2)


def test_the_operations_of_a_token_are_those_that_torch_counts():
    """But for the gains of the norms, which multiply without a matrix."""
    model, tokens = Llama(CONFIG), torch.zeros(2, 17, dtype=torch.long)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.loss(model.blocks(model.embed(tokens[:, :-1])), tokens[:, 1:]).backward()
    gains = sum(p.numel() for name, p in model.named_parameters() if "norm" in name)
    assert counter.get_total_flops() == 2 * 16 * (flops_per_token(CONFIG, 16) - 6 * gains)


def test_nanogpts_gpt2_by_hand():
    """Its N has the head once: 12 layers of 768, here without biases and positions."""
    config = Config(50304, 768, 2048, 12, 12, 12)       # three matrices of 2048 are its two of 3072
    inner = 12 * (4 * 768**2 + 8 * 768**2 + 2 * 768) + 768
    assert flops_per_token(config, 1024) == 6 * (inner + 50304 * 768) + 12 * 12 * 768 * 1024


@pytest.mark.parametrize("name, peak", [
    ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H200", 989e12), ("NVIDIA A100-SXM4-80GB", 312e12),
    ("NVIDIA H100 PCIe", None), ("NVIDIA H200 NVL", None), ("NVIDIA GeForce RTX 4090", None)])
def test_a_gpu_that_is_not_in_the_table_has_no_share(name, peak):
    assert peak_of(name) == peak
    share = peak_share(1e6, CONFIG, 16, {"a": name})
    assert share == (None if peak is None else 1e6 * flops_per_token(CONFIG, 16) / peak)


def test_ranks_that_share_a_gpu_share_its_peak_and_cpus_have_none():
    run = SimpleNamespace(o=SimpleNamespace(skip=0, seq_len=16), config=CONFIG)
    one = gpu_columns(run, 1e6, [["a", "NVIDIA H200", 7], ["a", "NVIDIA H200", 9]])
    two = gpu_columns(run, 1e6, [["a", "NVIDIA H200", 7], ["b", "NVIDIA H200", 9]])
    assert one["gpu_share"] == 2 * two["gpu_share"] > 0 and one["gpu_bytes"] == two["gpu_bytes"] == 9
    run.o.skip = 0.5
    assert gpu_columns(run, 1e6, [["a", "NVIDIA H200", 7]])["gpu_share"] is None
    nothing = gpu_columns(run, 1e6, [gpu_row(torch.device("cpu"))])
    assert nothing == dict(gpu_share=None, gpu_bytes=None)
