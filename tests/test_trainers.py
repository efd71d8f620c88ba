"""Other people's trainers: the recipes of docs/trainers.md, with two processes each."""

import importlib.util
import os

import pytest
import torch
import torch.distributed as dist

from tests.harness import gloo, processes
from tests.test_noloco import _whole, batches, loss_of, recipe, small

APART = [False, False, True]        # whether two replicas are equal after each step, where m = 3


def weights_of(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


@gloo
def _in_a_strange_loop(rank, world):
    """The weights at the end of the page's loop, and the inner steps that its NoLoCo counted.

    Each step has two microbatches; with `half`, their gradients add up to those of the whole batch.
    """
    from torch.nn.parallel import DistributedDataParallel

    half = lambda model, batch: loss_of(model, batch) / 2
    ddp = DistributedDataParallel(small())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    scope = dict(ddp=ddp, optimizer=optimizer, loss_of=half, batches=batches(rank))
    outer = recipe("trainers.md", "In a loop that is not yours", **scope)["outer"]
    return weights_of(ddp.module), outer.steps


def test_a_hook_and_no_sync_equal_a_loop_of_ones_own_without_ddp():
    strange, whole = processes(2, _in_a_strange_loop), processes(2, _whole)
    for (weights, steps), expected in zip(strange, whole):
        assert weights == pytest.approx(expected, abs=1e-6)
        assert steps == 9


def _transformers(rank, world, folder):
    """(this rank's weights after each step, counts of NoLoCo and of a hook, the wrapped model's class).

    The batches differ, so equal weights tell averaged gradients.
    """
    transformers = pytest.importorskip("transformers")
    scope = recipe("trainers.md", "transformers.Trainer")
    sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=2))
    tokens = torch.randint(32, (64, 8), generator=torch.Generator().manual_seed(0))
    args = transformers.TrainingArguments(
        folder, max_steps=6, per_device_train_batch_size=2, gradient_accumulation_steps=2, ddp_backend="gloo",
        report_to=[], use_cpu=True, average_tokens_across_devices=False, save_strategy="no",
        logging_strategy="no", disable_tqdm=True, learning_rate=1e-2)
    weights, counts, hooked = [], [], []

    class Watch(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, optimizer=None, **kwargs):
            optimizer.optimizer.register_step_post_hook(lambda *_: hooked.append(1))

        def on_step_end(self, args, state, control, model=None, **kwargs):
            weights.append(weights_of(model))
            counts.append((callback.outer.steps, len(hooked)))

    callback = scope["NoLoCoCallback"](inner_steps=3, alpha=0, beta=1)
    dataset = [dict(input_ids=row, labels=row) for row in tokens]
    trainer = scope["NoLoCoTrainer"](model, args, train_dataset=dataset, callbacks=[callback, Watch()])
    trainer.train()
    dist.barrier()
    return weights, counts, type(trainer.model_wrapped).__name__


def test_the_transformers_trainer_keeps_replicas_apart_between_outer_steps(tmp_path):
    """Also while it accumulates gradients, and in DDP."""
    pytest.importorskip("accelerate")
    (first, counts, wrapped), (second, _, _) = processes(2, _transformers, str(tmp_path))
    assert [a == b for a, b in zip(first, second, strict=True)] == APART * 2
    assert counts == [(step, step) for step in range(1, 7)]
    assert wrapped == "DistributedDataParallel"


def _lightning(rank, world):
    """(this rank's weights by optimizer step, NoLoCo's count, the wrapped model's class)."""
    os.environ["TORCHELASTIC_RUN_ID"] = "none"      # torchrun sets it: Lightning then starts no processes
    import lightning

    scope = recipe("trainers.md", "Lightning")
    weights, wrapped = {}, set()

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = small()

        def training_step(self, batch, index):
            wrapped.add(type(self.trainer.strategy.model).__name__)
            return loss_of(self.net, batch)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.05)

    class Watch(lightning.Callback):
        def on_train_batch_end(self, trainer, module, *batch):
            weights[trainer.global_step] = weights_of(module)

    callback = scope["NoLoCoCallback"](inner_steps=3, alpha=0, beta=1)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=world, strategy=scope["NoLoCoStrategy"](process_group_backend="gloo"),
        max_steps=6, accumulate_grad_batches=2, callbacks=[callback, Watch()], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    data = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    trainer.fit(Module(), torch.utils.data.DataLoader(data, batch_size=2))
    dist.barrier()
    return weights, callback.outer.steps, wrapped


@pytest.mark.skipif(not importlib.util.find_spec("lightning"),
                    reason="needs Lightning: pip install '.[lightning]'")
def test_lightning_keeps_replicas_apart_between_outer_steps():
    """Also while it accumulates gradients, and in DDP. Step 0: the weights before the first step."""
    (first, steps, wrapped), (second, _, _) = processes(2, _lightning)
    assert [first[step] == second[step] for step in range(7)] == [True, *APART * 2]
    assert steps == 6
    assert wrapped == {"DistributedDataParallel"}
