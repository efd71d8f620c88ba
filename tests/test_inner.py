"""gossip/muon.py beside torch.optim.Muon and float64."""
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import gossip.muon
from gossip.muon import Muon, muon
from model import Config, Llama

SHAPES = [(24, 8), (8, 24), (16, 16)]


def matrices():
    """A new list of parameters, the same at each call."""
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def stepped(params, optimizer, steps=4):
    """The parameters after some steps along gradients that are the same for each optimizer."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()
    return params


def test_in_bf16_it_is_torchs_muon_to_the_bit(monkeypatch):
    monkeypatch.setattr(gossip.muon, "dtype_for", lambda device: torch.bfloat16)
    ours = matrices()
    theirs = matrices()
    stepped(ours, Muon(ours, lr=0.1))
    optimizer = torch.optim.Muon(theirs, lr=0.1, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    stepped(theirs, optimizer)
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs))


def test_on_a_cpu_its_steps_are_those_of_float64_to_fp32s_precision(monkeypatch):
    ours = matrices()
    exact = [torch.nn.Parameter(p.detach().double()) for p in matrices()]
    stepped(ours, Muon(ours, lr=0.1))
    monkeypatch.setattr(gossip.muon, "dtype_for", lambda device: torch.float64)
    generator = torch.Generator().manual_seed(1)
    optimizer = Muon(exact, lr=0.1)
    for _ in range(4):
        for p in exact:
            p.grad = torch.randn(p.shape, generator=generator).double()
        optimizer.step()
    for p, q in zip(ours, exact):
        torch.testing.assert_close(p.double(), q, rtol=0, atol=2e-5)


class Dtypes(TorchDispatchMode):
    """Keeps the dtypes of all matrix products."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function._schema.name in ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"):
            self.seen |= {a.dtype for a in args if torch.is_tensor(a)}
        return function(*args, **(kwargs or {}))


def test_no_product_of_muons_step_is_in_bf16_on_a_cpu():
    """Processors without bf16 arithmetic take up to 37 times as long for one."""
    model = Llama(Config(num_hidden_layers=1, hidden_size=16, intermediate_size=32))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with Dtypes() as dtypes:
        for optimizer in muon(model):
            optimizer.step()
    assert dtypes.seen == {torch.float32}
