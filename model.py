"""A Llama that can hold any subset of its layers.

A pipeline stage is `Llama(config, layers=[2, 3], ends=False)`. A rank of stage 0 (an origin) also
holds the two ends: the embedding, the final norm, the head, and so the loss. Parameters carry the
names that Hugging Face's Llama gives them. A stage, too, numbers its layers as the whole model
does, so the union of the stages is a checkpoint that transformers loads unchanged.

    x = x + attention(norm(x))                                rotary positions: arXiv 2104.09864
    x = x + down(silu(gate(norm(x))) * up(norm(x)))           SwiGLU: arXiv 2002.05202
    norm(x) = weight * x / sqrt(mean(x^2) + eps)              RMSNorm: arXiv 1910.07467

From tokens (B, T + 1) to the loss in nats, summed, of a module that holds both ends:

    x = model.blocks(model.embed(tokens[:, :-1]))
    loss = model.loss(x, tokens[:, 1:])

Attention is causal, and grouped (arXiv 2305.13245) where there are fewer key-value heads than
heads.

Shapes: B sequences, T tokens, C hidden size, H heads, K key-value heads, D = C / H, F the MLP's
width, V vocabulary.
"""
import hashlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn


@dataclass
class Config:
    """The fields and their names are those of Hugging Face's LlamaConfig. Raises ValueError."""
    vocab_size: int = 256
    hidden_size: int = 128
    intermediate_size: int = 512
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5

    def __post_init__(self):
        # Without this refusal a hidden size of 12 for 5 heads would silently give 6 heads.
        if self.hidden_size % (2 * self.num_attention_heads):
            raise ValueError(f"hidden size {self.hidden_size} must be a multiple of "
                             f"2 x {self.num_attention_heads} heads")

    @property
    def head_dim(self):
        return self.hidden_size // self.num_attention_heads


def rotary(positions, dim, theta, device):
    """cos and sin of the angles t theta^(-2i/D) by which position t turns dimensions i and i + D/2.

    positions: T. dim: D. Each is (T, D): dimensions i and i + D/2 have the same cos, and sin with
    the sign that `rotate` needs, minus for i. They are computed anew in each forward pass, which is
    at most 2% of its time. A cache would break training: it would keep tensors of a first call
    under torch.inference_mode(), which take no part in a backward pass.
    """
    exact = dict(dtype=torch.float64, device=device)
    rate = theta ** (-torch.arange(0, dim, 2, **exact) / dim)                           # (D/2)
    angle = torch.outer(torch.arange(positions, **exact), rate)                         # (T, D/2)
    cos = angle.cos().float()
    sin = angle.sin().float()
    return torch.cat((cos, cos), dim=1), torch.cat((-sin, sin), dim=1)                  # (T, D)


def rotate(x, cos, sin):
    """x (B, heads, T, D) turned by these angles. `roll` brings the other dimension of each pair."""
    return (x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.head_dim = config.head_dim
        kv_size = self.head_dim * config.num_key_value_heads
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x, cos, sin):
        q = rearrange(self.q_proj(x), "b t (h d) -> b h t d", d=self.head_dim)  # (B, H, T, D)
        k = rearrange(self.k_proj(x), "b t (k d) -> b k t d", d=self.head_dim)  # (B, K, T, D)
        v = rearrange(self.v_proj(x), "b t (k d) -> b k t d", d=self.head_dim)  # (B, K, T, D)
        q = rotate(q, cos, sin)
        k = rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(rearrange(y, "b h t d -> b t (h d)"))                # (B, T, C)


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        gated = F.silu(self.gate_proj(x)) * self.up_proj(x)                     # (B, T, F)
        return self.down_proj(gated)                                            # (B, T, C)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """The layers whose global indices are in `layers` (default: all), run in that order.

    With `ends`, also the embedding, the norm and the head. Weights are normal with deviation 0.02,
    gains are one. Each is drawn by itself from (seed, parameter name), so that every layout and
    every device starts from the same model. Raises ValueError for layers that the model does not
    have.
    """

    def __init__(self, config, layers=None, ends=True, seed=0, device=None):
        super().__init__()
        layers = range(config.num_hidden_layers) if layers is None else layers
        wrong = [i for i in layers if not 0 <= i < config.num_hidden_layers]
        if wrong:
            raise ValueError(f"layers {wrong} are not among the model's {config.num_hidden_layers}")
        self.config = config
        with torch.device("meta"):          # names and shapes only: each tensor is filled once
            self.model = nn.Module()
            self.model.layers = nn.ModuleDict({str(i): Block(config) for i in layers})
            if ends:
                self.model.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
                self.model.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
                self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        weights = {name: initial_weight(name, p.shape, seed).to(device)
                   for name, p in self.named_parameters()}
        self.load_state_dict(weights, assign=True)

    def embed(self, tokens):
        return self.model.embed_tokens(tokens)                                  # (B, T, C)

    def blocks(self, x):
        """This module's layers, (B, T, C) -> (B, T, C): what a stage computes."""
        config = self.config
        cos, sin = rotary(x.shape[1], config.head_dim, config.rope_theta, x.device)     # (T, D)
        for layer in self.model.layers.values():
            x = layer(x, cos, sin)
        return x

    def logits(self, x):
        return self.lm_head(self.model.norm(x))                                 # (B, T, V)

    def loss(self, x, targets):
        """Cross-entropy in nats, summed over the targets (B, T).

        A mean is taken once, where all tokens are known.
        """
        logits = self.logits(x).flatten(0, 1).float()                           # (B T, V)
        return F.cross_entropy(logits, targets.flatten(), reduction="sum")

    def forward(self, tokens):
        """Logits (B, T, V) of tokens (B, T), from a module that holds both ends."""
        return self.logits(self.blocks(self.embed(tokens)))


def initial_weight(name, shape, seed):
    """The parameter of this name as it is before training, on the CPU."""
    if len(shape) == 1:                     # a gain
        return torch.ones(shape)
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))     # 56 bits
    return torch.empty(shape).normal_(0, 0.02, generator=generator)
