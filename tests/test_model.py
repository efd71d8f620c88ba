"""The model: logits, gradients, stages, sizes, and Hugging Face's form."""

import math

import pytest
import torch

from model import Config, Llama, rotary
from tools.export import save_pretrained
from tests.harness import options
from tests.oracles import reference_logits, through


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_logits_equal_independent_float64_llama(kv_heads):
    config = Config(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=kv_heads,
    )
    model = Llama(config, seed=3)
    with torch.no_grad():
        for p in model.parameters():  # gains and weights far from their start, so that each matters
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.2)
    tokens = torch.randint(50, (1, 9), generator=torch.Generator().manual_seed(0))
    doubles = {name: weights.double() for name, weights in model.state_dict().items()}
    want = reference_logits(tokens[0], doubles, config)
    assert torch.allclose(model(tokens)[0].double(), want, rtol=1e-4, atol=1e-4)
    targets = torch.randint(50, (1, 9), generator=torch.Generator().manual_seed(1))
    loss = model.loss(model.blocks(model.embed(tokens)), targets)
    logs = want.log_softmax(-1)[range(9), targets[0]]
    assert loss.item() == pytest.approx(-logs.sum().item(), rel=1e-5)


def test_gradients_equal_independent_float64_llama():
    config = Config(50, 32, 48, 2, 4, 2)
    model, generator = Llama(config, seed=3), torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.data.add_(torch.randn(p.shape, generator=generator) * 0.2)
    tokens = torch.randint(50, (1, 10), generator=generator)
    w = {k: v.double().requires_grad_() for k, v in model.state_dict().items()}
    want = reference_logits(tokens[0, :-1], w, config).log_softmax(-1)[range(9), tokens[0, 1:]]
    (-3 * want.sum()).backward()
    loss = model.loss(model.blocks(model.embed(tokens[:, :-1])), tokens[:, 1:])
    assert loss.item() == pytest.approx(-want.sum().item(), rel=1e-6)
    (3 * loss).backward()       # not 1: the gradient from above counts
    for name, p in model.named_parameters():
        want = w[name].grad
        atol = 1e-4 * float(want.abs().max())
        assert torch.allclose(p.grad.double(), want, rtol=1e-4, atol=atol), name


def test_a_model_first_called_under_inference_mode_then_trains():
    """By itself and compiled, on a shape and a base that no other test has."""
    model = Llama(Config(num_hidden_layers=1, rope_theta=321.0))
    tokens = torch.arange(2 * 19).view(2, 19)
    for module in (model, torch.compile(model, fullgraph=True, backend="eager")):
        with torch.inference_mode():
            first = module(tokens)
        logits = module(tokens)
        assert torch.equal(first, logits)
        model.zero_grad()
        logits.square().sum().backward()
        assert all(p.grad.any() for p in model.parameters())


def test_angles_are_those_of_the_formula_on_the_device_asked_for():
    cos, sin = rotary(5, 6, 100.0, torch.device("cpu"))
    for t, i in [(0, 0), (1, 0), (4, 1), (3, 2)]:
        angle = t * 100.0 ** (-2 * i / 6)
        assert cos[t, i] == cos[t, i + 3] == pytest.approx(math.cos(angle), abs=1e-7)
        assert -sin[t, i] == sin[t, i + 3] == pytest.approx(math.sin(angle), abs=1e-7)
    with torch.device("meta"):              # whatever the default device is
        again = rotary(5, 6, 100.0, torch.device("cpu"))
    assert torch.equal(again[0], cos) and torch.equal(again[1], sin)


def test_stages_hold_the_whole_models_weights_in_the_order_given():
    config = Config(num_hidden_layers=5)
    stages = [Llama(config, held, ends=held == [0], seed=7) for held in ([0], [3, 4, 1], [2])]
    union = {name: w for stage in stages for name, w in stage.state_dict().items()}
    torch.testing.assert_close(union, dict(Llama(config, seed=7).state_dict()), rtol=0, atol=0)
    assert list(stages[1].model.layers) == ["3", "4", "1"]


def test_heads_that_do_not_divide_the_hidden_size_are_refused():
    with pytest.raises(ValueError, match="hidden size 12 must be a multiple of 2 x 5 heads"):
        Config(hidden_size=12, num_attention_heads=5, num_key_value_heads=1)    # would give 6 heads


def test_model_sizes_are_the_papers(monkeypatch):
    """All parameters, and those without embedding and head."""
    without_memory = lambda name, shape, seed: torch.empty(shape, device="meta")
    monkeypatch.setattr("model.initial_weight", without_memory)
    sizes = dict(tiny=(1.1, 1.0), small=(310, 113), medium=(2135, 1611), large=(9639, 8590))
    for name, (millions, inner) in sizes.items():
        o = options("--model", name)
        config = Config(o.vocab, o.hidden, o.mlp, o.layers, o.heads, o.heads)
        lengths = {name: p.numel() for name, p in Llama(config).named_parameters()}
        ends = lengths["model.embed_tokens.weight"] + lengths["lm_head.weight"]
        assert sum(lengths.values()) / 1e6 == pytest.approx(millions, rel=0.02)
        assert (sum(lengths.values()) - ends) / 1e6 == pytest.approx(inner, rel=0.05)


def test_what_is_saved_is_the_same_model_in_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = Config(256, 32, 48, 4, 4, 2, rope_theta=700.0, rms_norm_eps=1e-3)
    ours = Llama(config, seed=9)
    tokens = torch.arange(40).view(2, 20) * 37 % 256
    for p in ours.parameters():
        p.data.mul_(5)
    save_pretrained(ours, tmp_path / "out", 128)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    wanted = ours.logits(through([ours], tokens))
    assert torch.allclose(theirs(tokens).logits, wanted, rtol=0, atol=1e-4)
    assert not theirs.config.tie_word_embeddings
    assert torch.equal(theirs.lm_head.weight, ours.lm_head.weight)
