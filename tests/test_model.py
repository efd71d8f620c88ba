"""The model beyond test_minimal.py: gradients, memory, stages, sizes, and Hugging Face's form of it."""

import json
import shutil
import sys

import pytest
import torch
from torch.nn.functional import cross_entropy

import train
from model import Config, Llama, count_parameters, rotary
from plumbing.fast import CrossEntropy, FastLlama
from plumbing.huggingface import load_weights, read_config, save_pretrained
from plumbing.processes import BadInput
from tests.harness import error_of, metrics, options, run
from tests.oracles import heldout_rows, reference_logits, through
from tools import export


@pytest.mark.parametrize("fast", [False, True])
def test_gradients_equal_independent_float64_llama(fast):
    config = Config(vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                    num_attention_heads=4, num_key_value_heads=2)
    model, generator = (FastLlama if fast else Llama)(config, seed=3), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * 0.2)
    tokens = torch.randint(50, (1, 10), generator=generator)
    w = {k: v.double().requires_grad_() for k, v in model.state_dict().items()}
    want = reference_logits(tokens[0, :-1], w, config).log_softmax(-1)[range(9), tokens[0, 1:]]
    (-3 * want.sum()).backward()
    loss = model.loss(model.blocks(model.embed(tokens[:, :-1])), tokens[:, 1:])
    assert loss.item() == pytest.approx(-want.sum().item(), rel=1e-6)
    (3 * loss).backward()       # not 1: the gradient from above counts
    for name, p in model.named_parameters():
        want = w[name].grad
        assert torch.allclose(p.grad.double(), want, rtol=1e-4, atol=1e-4 * float(want.abs().max())), name


@pytest.mark.parametrize("kv_heads", [4, 1])
def test_activation_bytes_equal_what_autograd_keeps(kv_heads):
    config, kept = Config(num_key_value_heads=kv_heads, num_hidden_layers=3), {}
    model, x = Llama(config), torch.randn(2, 32, 128, requires_grad=True)
    address = lambda t: t.untyped_storage().data_ptr()
    angles = rotary(32, 128 // 4, config.rope_theta, x.device)  # made once for all layers and microbatches
    own = {address(t) for t in (*model.parameters(), *angles)}

    passing = lambda t: address(t) in own or not t.is_floating_point()
    keep = lambda t: t if passing(t) else kept.setdefault(address(t), t)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        model.blocks(x)
    floats = 8 * 128 + 2 * 32 * kv_heads + 4 * 512 + 4 + 2      # a of docs/speed.md
    assert sum(t.untyped_storage().nbytes() for t in kept.values()) == 4 * 64 * 3 * floats


def test_the_fast_loss_is_the_plain_one_and_keeps_one_copy_of_the_logits():
    tokens = torch.randint(256, (2, 33), generator=torch.Generator().manual_seed(0))
    losses, gradients = [], []
    for model in (Llama(Config()), FastLlama(Config())):
        losses.append(model.loss(model.embed(tokens[:, :-1]), tokens[:, 1:]))
        losses[-1].backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-6)
    assert torch.allclose(gradients[0], gradients[1], rtol=1e-4, atol=1e-5)
    logits, places = torch.randn(64, 256, requires_grad=True) * 1, []
    logits.register_hook(lambda gradient: places.append(gradient.data_ptr()))
    CrossEntropy.apply(logits, tokens[:, 1:].flatten()).backward()
    assert places == [logits.data_ptr()]


def test_stages_hold_the_whole_models_weights_and_loss():
    config = Config(num_hidden_layers=5)
    whole, tokens = Llama(config, seed=7), torch.randint(256, (2, 17))
    stages = [Llama(config, held, ends=held == [0], seed=7) for held in ([0], [1, 2], [3, 4])]
    union = {k: v for s in stages for k, v in s.state_dict().items()}
    torch.testing.assert_close(union, dict(whole.state_dict()), rtol=0, atol=0)
    found, want = (held[0].loss(through(held, tokens[:, :-1]), tokens[:, 1:]) for held in (stages, [whole]))
    assert torch.equal(found, want)
    assert list(Llama(config, [3, 4, 1], ends=False, seed=7).model.layers) == ["3", "4", "1"]


def test_model_sizes_are_the_papers():
    sizes = dict(tiny=(1.1, 1.0), small=(310, 113), medium=(2135, 1611), large=(9639, 8590))
    for name, (millions, inner) in sizes.items():
        o = options("--model", name)
        all_, without = count_parameters(Config(o.vocab, o.hidden, o.mlp, o.layers, o.heads, o.kv_heads))
        assert all_ / 1e6 == pytest.approx(millions, rel=0.02)
        assert without / 1e6 == pytest.approx(inner, rel=0.05)


@pytest.mark.parametrize("tied", [False, True])
def test_init_from_transformers_llama_and_back(tied, corpus, tmp_path, monkeypatch, capsys):
    """At rate 0 the held-out loss is that of transformers' model; what is exported is the same model.

    A resume does not need the folder.
    """
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, rms_norm_eps=1e-3, initializer_range=0.1, tie_word_embeddings=tied,
        rope_parameters=dict(rope_type="default", rope_theta=700.0),
    ))
    theirs.save_pretrained(tmp_path / "llama", max_shard_size="20KB" if tied else "1GB")
    assert tied == (tmp_path / "llama/model.safetensors.index.json").exists()
    tokens, config = torch.randint(256, (2, 20)), read_config(tmp_path / "llama")
    parts = [Llama(config, held, ends=0 in held, seed=9) for held in ([0, 1], [2, 3])]
    for part in parts:
        load_weights(part, tmp_path / "llama")
    got = parts[0].logits(through(parts, tokens))
    assert torch.allclose(got, theirs(tokens).logits, rtol=0, atol=1e-5)
    assert count_parameters(config)[0] == sum(p.numel() for p in theirs.parameters())

    monkeypatch.chdir(tmp_path)
    data = ["--data", corpus, "--seq-len", 32, "--batch", 2, "--eval-sequences", 8, "--device", "cpu"]
    argv = ["--init-from", "llama", "--stages", "1,1", "--steps", 1, "--lr", 0, "--name", "x", *data]
    run(2, *argv, cwd=tmp_path)
    rows = heldout_rows(options(*data))
    want = cross_entropy(theirs(rows[:, :-1]).logits.flatten(0, 1), rows[:, 1:].flatten()).item()
    assert metrics(tmp_path / "runs/x")[-1]["heldout_loss"] == pytest.approx(want, rel=1e-5)
    shutil.rmtree("llama")
    run(2, "--resume", "runs/x", "--steps", 2, cwd=tmp_path)
    export.main(["runs/x", "out"])
    back = transformers.AutoModelForCausalLM.from_pretrained("out")
    assert torch.allclose(back(tokens).logits, theirs(tokens).logits, rtol=0, atol=1e-6)
    same = torch.equal(back.lm_head.weight, back.model.embed_tokens.weight)
    assert back.config.tie_word_embeddings == tied == same


def test_a_stage_reads_its_own_tensors_only(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    whole = Llama(Config(), seed=1)
    save_pretrained(whole, tmp_path / "whole", 128)
    assert read_config(tmp_path / "whole") == Config()
    kept = {name: p.detach() for name, p in whole.named_parameters() if ".layers.2." in name}
    safetensors.save_file(kept, tmp_path / "whole/model.safetensors")  # the rest is gone
    part = Llama(Config(), [2], ends=False)
    load_weights(part, tmp_path / "whole")
    assert all(torch.equal(p, kept[name]) for name, p in part.named_parameters())
    with pytest.raises(BadInput, match="model.layers.1"):
        load_weights(Llama(Config(), [1], ends=False), tmp_path / "whole")
    with pytest.raises(BadInput, match="has shape"):
        load_weights(Llama(Config(intermediate_size=256), [2], ends=False), tmp_path / "whole")


LLAMA = dict(model_type="llama", vocab_size=256, hidden_size=128, intermediate_size=64, num_hidden_layers=2,
             num_attention_heads=4)


@pytest.mark.parametrize("change, error", [
    (dict(model_type="mistral"), "model_type mistral is not supported, only llama"),
    (dict(rope_scaling=dict(rope_type="llama3", factor=8.0)), "rope_type llama3"),
    (dict(rope_parameters=dict(rope_type="yarn", rope_theta=1e4)), "rope_type yarn"),
    (dict(rope_scaling=dict(type="linear", factor=2.0)), "type linear"),
    (dict(attention_bias=True), "attention_bias True"), (dict(mlp_bias=True), "mlp_bias True"),
    (dict(head_dim=64), "head_dim 64 is not supported, only 32"),
    (dict(hidden_act="gelu"), "hidden_act gelu"),
    (dict(quantization_config=dict(bits=4)), "quantization_config"),
    (dict(hidden_size=None), "no hidden_size"), (dict(vocab_size=None), "no vocab_size"),
    (dict(num_key_value_heads=3), "multiple of 3 key-value heads"),
    (dict(vocab_size="many"), "must be positive, got many"),
    (dict(hidden_size=100), "multiple of 2 x 4 heads"),
], ids=str)
def test_init_from_refuses_what_this_llama_has_not(change, error, tmp_path):
    config = {name: value for name, value in {**LLAMA, **change}.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInput, match=f"{tmp_path}: .*{error}"):
        options("--init-from", tmp_path)


def test_what_config_json_leaves_out_is_as_in_transformers_and_a_missing_package_names_the_extra(
        tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    monkeypatch.chdir(tmp_path)
    o = options("--init-from", ".")
    assert (o.hidden, o.kv_heads, o.norm_eps, o.rope_theta, o.tied) == (128, 4, 1e-6, 1e4, False)
    for package, argv in ("safetensors", ["--init-from", "."]), ("tokenizers", ["--tokenizer", "x.json"]):
        monkeypatch.setitem(sys.modules, package, None)
        assert f"needs the {package} package: pip install '.[hf]'" in error_of(train.main, *argv)
    assert not (tmp_path / "runs").exists()
