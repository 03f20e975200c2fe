"""Other packages that prune, run as they recommend and counted by our counter: extras of the tables, no dependencies.

Torch-Pruning 1.6.1 runs. OTO (`only_train_once` 3.0.1) cannot be imported with PyTorch 2.13 (`No module named
'torch.onnx._globals'`). ModelOpt 0.47.0 needs omegaconf, pulp and torchprofile 0.0.4; its FastNAS offers channels in
steps that cannot halve the FLOPs of our digits network (`NOT all constraints can be satisfied`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dllp.api import Result, train_dense
from dllp.baselines.run import FINETUNE_LR
from dllp.config import Config
from dllp.data import Dataset
from dllp.errors import ConfigError
from dllp.structure.groups import discover
from dllp.structure.slicing import copied

PRUNERS = {"peer-magnitude": "MagnitudePruner", "peer-bn-scale": "BNScalePruner", "peer-group-norm": "GroupNormPruner"}
"""High-level pruners of Torch-Pruning, by the name of their rows."""
STEPS = 200
"""Steps of a pruner from nothing to all; it stops at the first that meets the budget."""


@dataclass(frozen=True)
class Peer:
    """A finished network, its multiply-accumulates over the dense network's, and the seconds it took after training."""

    result: Result
    kept: float
    seconds: float


def prune(name: str, model: nn.Module, data: Dataset, config: Config, finetune_epochs: int) -> Peer:
    """A trained network cut by a pruner of Torch-Pruning to `config.keep_flops`, then fine-tuned by our recipe."""
    began, example = time.perf_counter(), data.train.inputs(slice(0, 2)).cpu()  # type: ignore[union-attr]
    dense = discover(model, example, channels=False).flops.dense
    small = shrunk(name, model, example, (config.keep_flops or 1.0) * dense)
    plain = config.resolved()
    tuning = Config(
        epochs=finetune_epochs, lr=FINETUNE_LR * plain.lr, batch_size=plain.batch_size, warmup=0.0, init="given",
        particles=1, seed=plain.seed, device=plain.device, weight_decay=plain.weight_decay,
    )  # fmt: skip
    result = train_dense(small, data, tuning, progress=False)
    kept = discover(result.model, example, channels=False).flops.dense / dense
    return Peer(result, kept, time.perf_counter() - began)


def shrunk(name: str, model: nn.Module, example: Tensor, budget: float) -> nn.Module:
    """A copy of the network cut until it costs at most `budget`; the last linear layer keeps its outputs."""
    try:
        import torch_pruning as tp  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ConfigError(f"row {name} needs Torch-Pruning: pip install torch-pruning") from None
    small = copied(model).cpu().eval()
    importance: Any = tp.importance.GroupMagnitudeImportance(p=2)
    if name == "peer-bn-scale":
        importance = tp.importance.BNScaleImportance()
    last = [module for module in small.modules() if isinstance(module, nn.Linear)][-1:]
    pruner = getattr(tp.pruner, PRUNERS[name])(
        small, example, importance=importance, pruning_ratio=0.99, ignored_layers=last, iterative_steps=STEPS
    )
    for _ in range(STEPS):
        if discover(small, example, channels=False).flops.dense <= budget:
            return small
        with torch.enable_grad():
            pruner.step()
    raise ConfigError(f"row {name}: Torch-Pruning does not reach the budget: keep more FLOPs")
