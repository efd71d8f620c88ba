"""A Llama that can hold any subset of its layers: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

A pipeline stage is `Llama(config, layers=[2, 3], ends=False)`; a stage-0 rank (an origin) also holds the two ends, that is
the embedding, the final norm, the head and so the loss. Parameters carry the names that Hugging Face's Llama gives them, with
global layer numbers also inside a stage, so the union of the stages is a checkpoint that transformers loads unchanged.

    x = x + attention(norm(x))                                      rotary positions: arXiv 2104.09864
    x = x + down(silu(gate(norm(x))) * up(norm(x)))                 SwiGLU: arXiv 2002.05202
    norm(x) = weight * x / sqrt(mean(x^2) + eps)                    RMSNorm: arXiv 1910.07467

Shapes: B sequences, T tokens, C hidden size, H heads, K key-value heads, D = C / H, V vocabulary.
"""
import hashlib
import json
from dataclasses import dataclass, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn


@dataclass
class Config:
    """The fields and their names are those of Hugging Face's LlamaConfig."""
    vocab_size: int = 256
    hidden_size: int = 128
    intermediate_size: int = 512
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False       # the head is the embedding; both are an origin's, so tying needs no message

    def __post_init__(self):
        for name, value in vars(self).items():
            if name != "tie_word_embeddings" and not (isinstance(value, (int, float)) and value > 0):
                raise ValueError(f"{name} must be positive, got {value}")
        if self.hidden_size % (2 * self.num_attention_heads):
            raise ValueError(f"hidden size {self.hidden_size} must be a multiple of 2 x {self.num_attention_heads} heads")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(f"{self.num_attention_heads} heads must be a multiple of {self.num_key_value_heads} key-value heads")


def rotary(positions, dim, theta):
    """cos and sin, each (positions, dim): dimension i and i + dim/2 turn together by positions * theta^(-2i/dim), so sin's first half is negative."""
    rate = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)                   # (D/2)
    angle = torch.outer(torch.arange(positions, dtype=torch.float64), rate)                 # (T, D/2)
    return torch.cat((angle, angle), 1).cos().float(), torch.cat((-angle, angle), 1).sin().float()


def rotate(x, cos, sin):
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)                        # (B, heads, T, D)


class Norm(torch.autograd.Function):
    """The RMSNorm of x (..., C) with its gradient by hand: fewer runs through memory, and only x kept for it.

    With r = 1 / sqrt(mean(x^2) + eps) and y = w x r:    dw = sum g x r,    dx = w g r - x r^3 sum(w g x) / C
    """
    @staticmethod
    def forward(ctx, x, w, eps):
        r = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, w, r)
        return (x * r).mul_(w)

    @staticmethod
    def backward(ctx, g):
        x, w, r = ctx.saved_tensors
        gx = g * x
        dw = r.flatten() @ gx.flatten(0, -2)
        pull = (gx @ w).unsqueeze(-1).mul_(r**3).div_(-x.shape[-1])
        return torch.mul(g, w, out=gx).mul_(r).addcmul_(x, pull), dw, None


class RMSNorm(nn.RMSNorm):
    def forward(self, x):
        return Norm.apply(x, self.weight, self.eps)


class CrossEntropy(torch.autograd.Function):
    """Sum of -log softmax(logits)[target] over the tokens, in nats. Overwrites its logits (tokens, V), first with exp(logits - max), then
    with the gradient, softmax minus one-hot: with a vocabulary of 128000 each copy of them would be the largest tensor of all."""
    @staticmethod
    def forward(ctx, logits, targets):
        targets = targets[:, None]
        logits.sub_(logits.amax(1, keepdim=True))
        right = logits.gather(1, targets).sum()
        total = logits.exp_().sum(1, keepdim=True)
        ctx.save_for_backward(logits, targets, total)
        return total.log().sum() - right

    @staticmethod
    def backward(ctx, g):
        e, targets, total = ctx.saved_tensors
        return e.mul_(g / total).scatter_add_(1, targets, -g.expand(targets.shape)), None


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.head = config.hidden_size // config.num_attention_heads
        self.shared = config.num_attention_heads != config.num_key_value_heads
        width = self.head * config.num_key_value_heads
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x, cos, sin):
        q, k, v = (rearrange(project(x), "b t (h d) -> b h t d", d=self.head)
                   for project in (self.q_proj, self.k_proj, self.v_proj))                  # (B, H or K, T, D)
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.shared)
        return self.o_proj(rearrange(y, "b h t d -> b t (h d)"))                            # (B, T, C)


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """The layers whose global indices are in `layers` (default: all), run in that order; with `ends`, also embedding, norm and head.

    Weights: normal with deviation 0.02, gains one, drawn from (seed, parameter name) one by one, so that every layout and every
    device starts from the same model.
    """

    def __init__(self, config, layers=None, ends=True, seed=0, device=None):
        super().__init__()
        layers = range(config.num_hidden_layers) if layers is None else layers
        if wrong := [i for i in layers if not 0 <= i < config.num_hidden_layers]:
            raise ValueError(f"layers {wrong} are not among the model's {config.num_hidden_layers}")
        self.config = config
        # Names and shapes only: each tensor is filled once, below. On meta, the embedding's own initialisation would import all of
        # torch.compile, and to_empty sympy: a second of every process's start.
        with torch.device("meta"):
            self.model = nn.Module()
            self.model.layers = nn.ModuleDict({str(i): Block(config) for i in layers})
            if ends:
                self.model.embed_tokens = nn.Embedding.from_pretrained(torch.empty(config.vocab_size, config.hidden_size), freeze=False)
                self.model.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
                self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        weights = {}
        for name, parameter in self.named_parameters():
            digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
            weights[name] = torch.ones(parameter.shape) if parameter.ndim == 1 else torch.empty(parameter.shape).normal_(0, 0.02, generator=generator)
            weights[name] = weights[name].to(device)
        self.load_state_dict(weights, assign=True)
        if ends and config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.angles = None

    def embed(self, tokens):
        return self.model.embed_tokens(tokens)                                              # (B, T) -> (B, T, C)

    def blocks(self, x):
        """This module's layers, (B, T, C) -> (B, T, C): what a stage computes."""
        if self.angles is None or self.angles[0].shape[0] != x.shape[1] or self.angles[0].device != x.device:
            head = self.config.hidden_size // self.config.num_attention_heads
            self.angles = tuple(a.to(x.device) for a in rotary(x.shape[1], head, self.config.rope_theta))
        for layer in self.model.layers.values():
            x = layer(x, *self.angles)
        return x

    def logits(self, x):
        return self.lm_head(self.model.norm(x))                                             # (B, T, V)

    def loss(self, x, targets):
        """Cross-entropy in nats, summed over the tokens (B, T); a mean is taken once, where all tokens are known."""
        return CrossEntropy.apply(self.logits(x).flatten(0, 1).float(), targets.flatten())

    def forward(self, tokens):
        """Logits (B, T, V) of tokens (B, T), from a module that holds both ends."""
        return self.logits(self.blocks(self.embed(tokens)))


def count_parameters(config):
    """(all, without embedding and head) parameters of the whole model."""
    head = config.hidden_size // config.num_attention_heads
    attention = 2 * config.hidden_size * (config.hidden_size + head * config.num_key_value_heads)
    block = attention + 3 * config.hidden_size * config.intermediate_size + 2 * config.hidden_size
    inner = config.num_hidden_layers * block + config.hidden_size
    return inner + (1 if config.tie_word_embeddings else 2) * config.vocab_size * config.hidden_size, inner


# ---------------------------------------------------------------- to and from Hugging Face's form


def read_config(folder):
    """The Config of a folder that transformers wrote. Raises ValueError on what this Llama does not have, OSError without a config.json."""
    found = json.loads((Path(folder) / "config.json").read_text())
    found = {**found, **(found.get("rope_scaling") or {}), **(found.get("rope_parameters") or {})}      # transformers 4, 5
    found = {name: value for name, value in found.items() if value is not None}
    wanted = dict(model_type="llama", hidden_act="silu", attention_bias=False, mlp_bias=False, quantization_config=None, rope_type="default",
                  type="default", partial_rotary_factor=1.0, head_dim=found.get("hidden_size", 0) // found.get("num_attention_heads", 1))
    for name, value in wanted.items():
        if found.get(name, None if name == "model_type" else value) != value:
            raise ValueError(f"{name} {found.get(name)} is not supported, only {value}")
    found = {**dict(rope_theta=10000.0, rms_norm_eps=1e-6, tie_word_embeddings=False, num_key_value_heads=found.get("num_attention_heads")), **found}
    if missing := [f.name for f in fields(Config) if f.name not in found]:
        raise ValueError(f"config.json has no {missing[0]}")
    return Config(**{f.name: found[f.name] for f in fields(Config)})


def load_weights(model, folder):
    """Fill the tensors that this module holds from a folder's model.safetensors, or the files that its index names; no others are read."""
    from safetensors import SafetensorError, safe_open
    folder = Path(folder)
    index = folder / "model.safetensors.index.json"
    files = json.loads(index.read_text())["weight_map"] if index.exists() else {}
    place = lambda name: folder / files.get(name, "model.safetensors")
    named = dict(model.named_parameters())          # a tied head goes by the name of the embedding
    for file in sorted(set(map(place, named))):
        try:
            with safe_open(file, "pt") as tensors, torch.no_grad():
                for name, parameter in named.items():
                    if place(name) == file:
                        if tensors.get_slice(name).get_shape() != list(parameter.shape):
                            raise ValueError(f"{name} has shape {tensors.get_slice(name).get_shape()}, its config.json says {list(parameter.shape)}")
                        parameter.copy_(tensors.get_tensor(name))
        except SafetensorError as error:
            raise ValueError(f"{file}: {error}")


def save_pretrained(model, folder, positions, end=None):
    """Write a whole model as a folder that transformers loads unchanged. positions: tokens per sequence; end: id of the token that ends a document."""
    from safetensors.torch import save_file
    folder, ends = Path(folder), dict(bos_token_id=None, eos_token_id=end, pad_token_id=None)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: parameter.detach().cpu() for name, parameter in model.named_parameters()}, folder / "model.safetensors", metadata={"format": "pt"})
    config = dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_act="silu", attention_bias=False, mlp_bias=False, torch_dtype="float32",
                  max_position_embeddings=positions, **ends, **vars(model.config))
    for name, content in (("config.json", config), ("generation_config.json", ends)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    (folder / "model.safetensors").chmod((folder / "config.json").stat().st_mode)      # the package makes it readable by its owner alone


def byte_tokenizer():
    """A tokenizer.json, as a dict, for which a text's tokens are its bytes in UTF-8. Its vocabulary writes each byte as the letter that GPT-2 gives it."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]       # these stand for themselves, the others come after 255
    others = [byte for byte in range(256) if byte not in plain]
    vocab = {**{chr(byte): byte for byte in plain}, **{chr(256 + i): byte for i, byte in enumerate(others)}}
    level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=False, use_regex=False)
    bpe = dict(type="BPE", dropout=None, unk_token=None, continuing_subword_prefix=None, end_of_word_suffix=None, fuse_unk=False, vocab=vocab, merges=[])
    return dict(version="1.0", truncation=None, padding=None, added_tokens=[], normalizer=None, pre_tokenizer=level, post_processor=None, decoder=level,
                model=bpe)
