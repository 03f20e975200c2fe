"""Other packages that prune, by the recipe that they recommend: extras of the tables, no dependencies.

Each starts from the dense network of its seed, and its result is fine-tuned as every other method's is. Where a pruner
asks for a training with its regulariser before the cut, that takes a third of these epochs (its authors give it as many
epochs as fine-tuning), without weight decay as they have it. FLOPs are counted by our counter on what comes out.

docs/how-to/compare.md has versions, and what does not run.
"""

from __future__ import annotations

import importlib
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dllp.api import Result, train_dense
from dllp.baselines.run import Train, Verb, first_pairs, hooked
from dllp.config import Config
from dllp.data import Dataset
from dllp.errors import ConfigError
from dllp.posterior import evaluating
from dllp.prepare import prepare
from dllp.records import Size
from dllp.structure.groups import Structure, discover
from dllp.structure.slicing import copied
from dllp.training.state import RunState

EARLY = 1 / 3
"""Share of the epochs that a training with a pruner's regulariser takes."""
STEPS = 400
"""Steps of Torch-Pruning from nothing to all, as in its benchmark; it stops at the first that meets the budget."""
NEAR = 1.05
"""Its count over the budget from which on ours is asked too, which takes longer."""
IMAGES = 5000
"""Training images that ModelOpt's score is the accuracy on."""
CHANNELS = 8
"""Steps of ModelOpt's search: of 32, its default, and 16 ResNet-56 cannot lose 55% of its FLOPs."""


@dataclass(frozen=True)
class Task:
    """The setting of a peer beside its network: the structure, an example, training batches, and the FLOPs allowed."""

    structure: Structure
    example: Tensor
    batches: Any
    budget: float


@dataclass(frozen=True)
class Pruned:
    """The network just after the cut, its trainings, the last one's cost, and seconds from the dense network on."""

    cut: nn.Module
    trainings: list[Result]
    size: Size
    seconds: float


@dataclass(frozen=True)
class Peer(ABC):
    """A pruner of another package.

    Attributes:
        package, module: What pip installs, and what is imported of it.
        title: As tables print it.
        strength: Of its regulariser in a training before the cut; 0 for none.
    """

    package: ClassVar[str]
    module: ClassVar[str]
    strength: float = 0.0

    @property
    @abstractmethod
    def title(self) -> str: ...

    @property
    def recipe(self) -> str:
        """The kinds of its epochs, where they are not all fine-tuning."""
        return "a third of its epochs with its regulariser before the cut" if self.strength else ""

    @abstractmethod
    def cut(self, network: nn.Module, task: Task) -> nn.Module:
        """A network of at most `task.budget` multiply-accumulates, if there is one; the one given may change."""

    @cached_property
    def imported(self) -> Any:
        try:
            return importlib.import_module(self.module)
        except ImportError as error:
            raise ConfigError(f"{self.title} is not installed ({error}): pip install {self.package}") from None


def prune(
    name: str, model: nn.Module, data: Dataset, config: Config, *, epochs: int, lr: float,
    train: Train = lambda verb, stage, model, data, config: verb(model, data, config),
) -> Pruned:  # fmt: skip
    """Cut a trained network by a peer to `config.keep_flops`; its last training, or both of them, take `epochs`.

    Args:
        lr: Peak of the learning rate, as a share of the recipe's.
        train: As for :func:`dllp.baselines.run.prune`.
    """
    peer, tuning = PEERS[name], replace(config, particles=1, teacher="off").resolved()
    tuning = replace(tuning, init="given", warmup=0.0, lr=lr * tuning.lr)
    batches, example, structure, *_ = prepare(model, data, tuning, None)
    task = Task(structure, example, batches, (config.keep_flops or 1.0) * structure.flops.dense)
    began, network, trainings = time.perf_counter(), copied(model), []
    early = round(EARLY * epochs) if peer.strength else 0
    if isinstance(peer, TorchPruning) and early:
        before = replace(tuning, epochs=early, weight_decay=0.0, engine="eager")  # it indexes by lists
        trainings.append(train(peer.regularised(task), "regularised", network, data, before))
        network = trainings[0].model
    small = peer.cut(network.cpu().eval(), task).cpu().eval()
    if discover(small, example, channels=False).flops.dense > task.budget:
        raise ConfigError(f"{peer.title} does not reach the budget: keep more FLOPs")
    trainings.append(train(train_dense, "finetuned", small, data, replace(tuning, epochs=epochs - early)))
    seconds, end = time.perf_counter() - began, trainings[-1].model
    macs = discover(end, example, channels=False).flops.dense
    return Pruned(small, trainings, Size(macs, sum(p.numel() for p in end.parameters())), seconds)


@dataclass(frozen=True)
class TorchPruning(Peer):
    """A high-level pruner of Torch-Pruning, as its benchmark on CIFAR-10 calls it.

    What our structure keeps whole it keeps whole too: it cuts the sums behind ResNet-56's zero-padded shortcuts to
    unequal widths.

    Attributes:
        pruner, importance: Names of its classes.
        options: Of the importance.
        everywhere: One threshold for all layers, or the same share of each.
    """

    package = "torch-pruning"
    module = "torch_pruning"
    pruner: str = "MagnitudePruner"
    importance: str = "GroupMagnitudeImportance"
    options: Mapping[str, Any] = field(default_factory=dict)
    everywhere: bool = False

    @property
    def title(self) -> str:
        return f"Torch-Pruning, {self.pruner}"

    def around(self, network: nn.Module, task: Task) -> Any:
        """The package's object around a network."""
        tp, groups = self.imported, {group.name for group in task.structure.groups}
        layers = [(n, module) for n, module in network.named_modules() if isinstance(module, (nn.Conv2d, nn.Linear))]
        return getattr(tp.pruner, self.pruner)(
            network, task.example.to(next(network.parameters()).device), pruning_ratio=1.0, iterative_steps=STEPS,
            importance=getattr(tp.importance, self.importance)(**self.options), global_pruning=self.everywhere,
            ignored_layers=[module for name, module in layers if name not in groups],
            **({"reg": self.strength} if self.strength else {}),
        )  # fmt: skip

    def regularised(self, task: Task) -> Verb:
        """`train_dense` with the pruner's regulariser in the gradient of every step."""

        def start(state: RunState) -> None:
            network, layout = state.particles.networks[0], state.particles.layout
            pruner = self.around(network, task)
            network.train()  # it leaves networks in evaluation

            def penalty(rows: Tensor) -> Tensor:
                result = torch.zeros_like(rows)
                for name, parameter in network.named_parameters():
                    parameter.grad = layout.segments[name].view(result[0])
                pruner.regularize(network)
                network.zero_grad()
                return result

            state.penalty = penalty

        return hooked(start)

    def cut(self, network: nn.Module, task: Task) -> nn.Module:
        tp, pruner = self.imported, self.around(network, task)
        with torch.enable_grad():
            for _ in range(STEPS):
                theirs = tp.utils.count_ops_and_params(network, task.example)[0]
                if theirs <= NEAR * task.budget:
                    ours = discover(network, task.example, channels=False).flops.dense
                    if ours <= task.budget:
                        break
                pruner.step()
        return network


@dataclass(frozen=True)
class FastNAS(Peer):
    """ModelOpt's FastNAS: the narrowest layers that alone lose no more accuracy than a threshold, set by the budget.

    Its score is of training images, which the dense network has learned: no others may be chosen by.
    """

    package = "nvidia-modelopt omegaconf pulp torchprofile==0.0.4"
    module = "modelopt.torch.prune"

    @property
    def title(self) -> str:
        return "ModelOpt, FastNAS"

    def cut(self, network: nn.Module, task: Task) -> nn.Module:
        mtp, device = self.imported, task.batches.device
        network, pairs = network.to(device), list(first_pairs(task.batches, IMAGES))
        settings = mtp.fastnas.FastNASConfig().model_dump()
        for rules in settings.values():
            for rule in (rules or {}).values():
                rule |= {name: CHANNELS for name in ("channel_divisor", "feature_divisor") if name in rule}

        @torch.no_grad()
        def score(model: nn.Module) -> float:
            with evaluating(model):
                hits = sum((model(x).argmax(1) == y).sum() for x, y in pairs)
            return float(hits) / sum(len(x) for x, _ in pairs)

        given = {"score_func": score, "data_loader": pairs, "collect_func": lambda pair: pair[0]}
        limit, example = {"flops": 2 * task.budget}, task.example[:1].to(device)  # it counts both operations
        small, _ = mtp.prune(network, [("fastnas", settings)], limit, example, {**given, "verbose": False})
        return small


PEERS: Mapping[str, Peer] = MappingProxyType({
    "magnitude": TorchPruning(),
    "bn-scale": TorchPruning(5e-4, "BNScalePruner", "BNScaleImportance", everywhere=True),
    "group-norm": TorchPruning(5e-4, "GroupNormPruner", options={"normalizer": "max"}, everywhere=True),
    "fastnas": FastNAS(),
})  # fmt: skip
