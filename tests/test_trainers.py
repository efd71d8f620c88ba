"""NoLoCo in other people's trainers: the recipes of docs/trainers.md."""

import copy
import re

import pytest
import torch
import torch.distributed as dist

from tests.harness import HERE, gloo, processes

STEPS, INNER_STEPS = 6, 3


def recipe(heading):
    page = (HERE / "docs/trainers.md").read_text()
    scope = {}
    exec(re.search(rf"## {heading}.*?```python\n(.*?)```", page, re.S)[1], scope)
    return scope


@gloo
def _mix(rank, world):
    """(theta before, theta after) one outer step of the page's own rule."""
    outer = recipe("An outer rule of your own")["Mix"]([torch.nn.Parameter(torch.zeros(16))], inner_steps=1)
    outer.theta.add_(rank + 1.0)
    outer.step()
    return outer.theta[0].item(), outer.phi[0].item()


def test_a_rule_of_ones_own_mixes_as_it_says():
    """Three replicas are one group: each keeps 0.7 of its own and takes 0.3 of the mean of the others."""
    mixed = [0.7 * own + 0.3 * others for own, others in ((1, 2.5), (2, 2), (3, 1.5))]
    assert processes(3, _mix) == [(pytest.approx(value), pytest.approx(value)) for value in mixed]


def _transformers(rank, world, folder):
    """(this rank's weights after each step, whether each gradient was its own to the bit)."""
    transformers = pytest.importorskip("transformers")
    noloco_trainer = recipe("transformers.Trainer")["noloco_trainer"]
    sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=2))
    tokens = torch.randint(32, (64, 8), generator=torch.Generator().manual_seed(0))
    args = transformers.TrainingArguments(
        folder, max_steps=STEPS, per_device_train_batch_size=2, ddp_backend="gloo", report_to=[],
        average_tokens_across_devices=False, max_grad_norm=0, save_strategy="no", use_cpu=True,
        logging_strategy="no", disable_tqdm=True, learning_rate=1e-2,
    )
    seen, weights, own = {}, [], []

    class Watch(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            again = copy.deepcopy(model)
            again.zero_grad()
            again(**seen).loss.backward()
            pairs = zip(model.parameters(), again.parameters())
            own.append(all(torch.equal(a.grad, b.grad) for a, b in pairs))

        def on_step_end(self, args, state, control, model=None, **kwargs):
            weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]).tolist())

    dataset = [dict(input_ids=row, labels=row) for row in tokens]
    trainer = noloco_trainer(model, args, dataset, inner_steps=INNER_STEPS, alpha=0, beta=1)
    trainer.add_callback(Watch)
    model.register_forward_pre_hook(lambda module, args, kwargs: seen.update(kwargs), with_kwargs=True)
    trainer.train()
    dist.barrier()
    return weights, own


def test_the_transformers_trainer_keeps_replicas_apart_between_outer_steps(tmp_path):
    pytest.importorskip("accelerate")
    (first, own), (second, others) = processes(2, _transformers, str(tmp_path))
    assert own == others == [True] * STEPS
    assert [a == b for a, b in zip(first, second)] == [False, False, True] * 2
