"""The trainer's model beside transformers', and the formula of a rank's memory.

    python -m experiments.speed                   some minutes on an idle core
    python -m experiments.speed --plot --out .    the table of what OUT/results/speed.json has
"""
import os
import statistics
import time
from types import SimpleNamespace

import torch
import torch.nn.functional as F

import train
from bench_sync import quartiles
from experiments.pictures import kept, save, show_head, show_row
from model import Config, Llama, count_parameters
from noloco import flatten
from plumbing.fast import Adam, speed_up
from plumbing.options import Parser
from plumbing.processes import BadInput, Job

TRIALS = 11
SIZES = (128, 128), (128, 512), (512, 128), (512, 512)      # hidden size, tokens per sequence


def hugging_face(config, **kwargs):
    """transformers' LlamaForCausalLM of the same configuration and weights."""
    from transformers import LlamaConfig, LlamaForCausalLM
    settings = dict(vars(config), attn_implementation="sdpa", use_cache=False, **kwargs)
    other = LlamaForCausalLM(LlamaConfig(**settings))
    other.load_state_dict(Llama(config).state_dict())
    return other


def beside_transformers(hidden, T):
    """Steps of 2 microbatches of 4 sequences, in turn with transformers and torch's fused Adam."""
    config = Config(hidden_size=hidden, intermediate_size=4 * hidden)
    data = torch.randint(config.vocab_size, (4, T + 1))
    ours, other = speed_up(Llama(config)), hugging_face(config)
    pipeline = train.Pipeline(ours, Job(), [[0]], (4, T, hidden))
    run = SimpleNamespace(inner=Adam(*flatten(ours.parameters())), pipeline=pipeline, average=None,
                          o=SimpleNamespace(clip=1.0), lr=1e-4)
    adam = torch.optim.Adam(other.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)

    def our_step():
        train.inner_step(run, [data, data], [(0,), (0,)], None)

    def their_step():
        adam.zero_grad()
        for _ in range(2):
            logits = other(input_ids=data[:, :-1]).logits.flatten(0, 1)
            F.cross_entropy(logits, data[:, 1:].flatten()).backward()
        adam.step()

    times = [[], []]
    for _ in range(2 + TRIALS):
        for step, seconds in zip((our_step, their_step), times):
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
    ours, theirs = (seconds[2:] for seconds in times)           # two steps warm up
    low, middle, high = quartiles([b / a for a, b in zip(ours, theirs)])
    speeds = {name: 8 * T / statistics.median(s) for name, s in (("ours", ours), ("theirs", theirs))}
    return dict(hidden=hidden, T=T, tokens_per_second=speeds, ratio=[middle, low, high])


def memory_bytes(config, tokens, microbatches, vectors=7, layers=None):
    """Bytes of a rank with both ends and `layers` layers.

    vectors: theta, gradient, Adam's two, phi, delta and a receive buffer. Then the activations of so many
    microbatches in flight, `tokens` tokens each, and while a loss is taken back its logits and the head's own
    gradient. A layer keeps of a token, in floats: x, x / rms(x) and norm(x) twice, q, attention's result and
    its log-sum, k and v, gate, up, silu(gate) and their product.
    """
    C = config.hidden_size
    D = C // config.num_attention_heads
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    layer = 8 * C + 2 * D * kv_heads + heads + 4 * config.intermediate_size + 2
    depth = config.num_hidden_layers if layers is None else layers
    activations = tokens * (microbatches * depth * layer + config.vocab_size + 3 * C)
    return 4 * (vectors * count_parameters(config)[0] + activations + C * config.vocab_size)


def table(found):
    show_head("what | measured")
    for row in found["model"]["result"]:
        show_row(f"model, hidden {row['hidden']}, T {row['T']}: tokens/s over Hugging Face's",
                 "{:.2f}x [{:.2f}, {:.2f}]".format(*row["ratio"]))


def main(argv=None):
    p = Parser(__doc__)
    p.add_argument("--out", default="runs", help="folder of results/speed.json (default: runs)")
    p.add_argument("--plot", action="store_true", help="measure nothing: the table of OUT/results")
    o = p.parse_args(argv)
    if not o.plot:
        try:
            import transformers                                     # noqa: F401
        except ImportError:
            raise BadInput("this compares with transformers: pip install '.[test]'")
        torch.set_num_threads(1)
        load, rows = os.getloadavg()[0], [beside_transformers(*size) for size in SIZES]
        save(o.out, "speed", {"model": dict(result=rows, trials=TRIALS, load_before=load,
                                            torch=torch.__version__)}, indent=1)
    table(kept(o.out, "speed"))


if __name__ == "__main__":
    Job().together(main)
