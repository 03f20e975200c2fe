"""Trainers of other libraries: the pruner is their optimiser. Each needs its library (`pip install dllp[trainers]`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dllp
from dllp import Config
from tests.test_pruner import STEPS, X, Y, config, model

BATCH, EPOCHS = 8, 4  # 3 batches an epoch
HALF, CLIP = BATCH // 2, 0.2


def by_hand(given: nn.Module, c: Config, example: Any, batches: list[Any], loss: Any) -> dllp.Result:
    """Clipped, and each batch in two parts."""
    pruner = dllp.Pruner(given, example, c, num_data=24, steps=len(batches) // 2)
    torch.optim.lr_scheduler.ConstantLR(pruner, 1.0)
    for k, batch in enumerate(batches):
        (sum(loss(network, batch) for network in pruner.networks) / 2).backward()
        if k % 2:
            for network in pruner.networks:
                nn.utils.clip_grad_norm_(network.parameters(), CLIP)
            pruner.step()
    return pruner.finish()


def same(one: dllp.Result, other: dllp.Result) -> None:
    assert one.widths == other.widths
    for a, b in zip(one.model.state_dict().values(), other.model.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.filterwarnings("ignore")
def test_lightning(tmp_path: Path) -> None:
    pl = pytest.importorskip("pytorch_lightning")

    class Pruned(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.pruner = dllp.Pruner(model(), X[:2], config(particles=2), num_data=24, steps=STEPS)

        def training_step(self, batch: Any, _: int) -> Any:
            inputs, labels = batch
            return sum(F.cross_entropy(network(inputs), labels) for network in self.pruner.networks)

        def configure_optimizers(self) -> Any:
            return self.pruner

    module = Pruned()
    trainer = pl.Trainer(
        max_epochs=EPOCHS, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(X, Y), batch_size=BATCH))
    assert module.pruner.finished
    found = module.pruner.finish()
    pruner = dllp.Pruner(model(), X[:2], config(particles=2), num_data=24, steps=STEPS)
    for k in range(STEPS):
        part = slice(k % 3 * BATCH, k % 3 * BATCH + BATCH)
        for network in pruner.networks:
            F.cross_entropy(network(X[part]), Y[part]).backward()
        pruner.step()
    same(found, pruner.finish())


class Classifier(nn.Module):
    """Takes its arguments by name and returns its loss, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(6, 12), nn.Linear(12, 3)

    def forward(self, values: Tensor, labels: Tensor | None = None, **_: Any) -> Any:
        logits = self.out(self.inner(values).relu())
        from transformers.modeling_outputs import SequenceClassifierOutput

        return SequenceClassifierOutput(loss=None if labels is None else F.cross_entropy(logits, labels), logits=logits)


@pytest.mark.filterwarnings("ignore")
def test_trainer_of_hugging_face(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    modes: dict[str, set[bool]] = {"train": set(), "eval": set()}

    class PruningTrainer(transformers.Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.model_accepts_loss_kwargs = False

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            networks = self.optimizer.optimizer.networks
            modes["eval" if return_outputs else "train"] |= {network.training for network in networks}
            outputs = [network(**inputs) for network in networks]
            loss = sum(output.loss for output in outputs)
            return (loss, outputs[0]) if return_outputs else loss

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            if self.accelerator.sync_gradients:
                for network in self.optimizer.optimizer.networks:
                    nn.utils.clip_grad_norm_(network.parameters(), CLIP)
            return loss

    torch.manual_seed(0)
    given, values = Classifier(), torch.randn(24, 6)
    c = Config(keep_flops=0.6, particles=2, optimizer="adamw", lr=0.01, device="cpu", granularity="weight",
               gate_linear=True, beta=0.1)  # fmt: skip
    pruner = dllp.Pruner(given, {"values": values[:2]}, c, num_data=24, steps=STEPS)
    schedule = torch.optim.lr_scheduler.ConstantLR(pruner, 1.0)
    rows = [{"values": v, "labels": y} for v, y in zip(values, Y, strict=True)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=HALF, gradient_accumulation_steps=2, use_cpu=True,
        num_train_epochs=EPOCHS, report_to=[], save_strategy="no", eval_strategy="epoch", max_grad_norm=0.0,
        disable_tqdm=True, train_sampling_strategy="sequential", remove_unused_columns=False,
    )  # fmt: skip
    trainer = PruningTrainer(given, arguments, train_dataset=rows, eval_dataset=rows[:8], optimizers=(pruner, schedule))
    trainer.train()
    assert pruner.finished
    assert modes == {"train": {True}, "eval": {False}}
    parts = [slice(k % 6 * HALF, k % 6 * HALF + HALF) for k in range(2 * STEPS)]
    batches = [{"values": values[part], "labels": Y[part]} for part in parts]
    expected = by_hand(given, c, {"values": values[:2]}, batches, lambda network, batch: network(**batch).loss)
    same(pruner.finish(), expected)
