"""Networks that choose channels for each image: gates, the cost of an image, and the run that trains them.

Nothing can be extracted: the whole network is stored, and each image computes a part of it. Gates sit where DLLP's do,
at the inputs of the layers that read a unit, so that the network cut to an image's channels gives the same output.
A budget is a mean over training images; what is reported is measured on others.

Steps are captured as a CUDA graph: what a gate changes between steps is a buffer, and nothing is read back to the host.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dllp.api import Result
from dllp.baselines.protocol import Described
from dllp.baselines.reconstruction import plain
from dllp.baselines.run import FINETUNE_LR, IMAGES, Train, first_pairs, hooked
from dllp.config import Config
from dllp.devices.device import undisturbed
from dllp.errors import ConfigError, StructureError
from dllp.posterior import evaluating
from dllp.prepare import Data, prepare
from dllp.structure.groups import Structure
from dllp.structure.slicing import copied, cut, recipe
from dllp.training.gating import NORMS
from dllp.training.objective import LossFn
from dllp.training.state import Groups
from dllp.training.trainer import OnStep

AT_ONCE = 128
"""Images whose costs are counted together: masks are large."""
FLOPS_OF = "by image, gates included: mean / 95th percentile"


class Gate(nn.Module):
    """The units of one group that each image computes.

    Attributes:
        open: (B, units) 0 or 1, of the last forward pass.
        here: The group's slice of the vector of all units.
        least: Units that are open at least.
        macs: Multiply-accumulates of the choice itself, for one image.
    """

    def __init__(self, here: slice, least: int = 1) -> None:
        super().__init__()
        self.here, self.units, self.least, self.macs = here, here.stop - here.start, least, 0.0
        self.open = torch.ones(1, self.units)

    def choose(self, x: Tensor) -> None:
        """(B, I, places) inputs of the layer that makes the units: set `open` before it runs."""

    def see(self, x: Tensor) -> None:
        """(B, I, places) inputs of the first layer that reads the units."""


class Wrapper(nn.Module):
    """A layer beside a gate; gates are shared within one network, and copies of it share copies of them."""

    def __init__(self, module: nn.Module, gate: Gate) -> None:
        super().__init__()
        self.module, self.gate, self.linear = module, gate, isinstance(unwrapped(module), nn.Linear)

    def by_channel(self, x: Tensor) -> Tensor:
        """Inputs -> (B, I, places), in float32 at least: half precision would choose other channels."""
        x = x if x.dtype == torch.float64 else x.float()
        return x.flatten(1, -2).transpose(1, 2) if self.linear and x.dim() > 2 else x.unsqueeze(-1).flatten(2)

    def alone(self) -> nn.Module:
        """The layer as it was for the only image of the last forward pass."""
        return self.module


class Chooses(Wrapper):
    """The layer that makes the units of a gate, which looks at its input first."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            self.gate.choose(self.by_channel(x))
        return self.module(x)


class Reads(Wrapper):
    """A layer that reads the units of a gate, times what is open of them.

    Args:
        unit: (I,) the gate's unit of each input, -1 for none.
        macs: Multiply-accumulates of the layer for one image.
        first: The gate sees this layer's input.
    """

    unit: Tensor

    def __init__(self, module: nn.Module, gate: Gate, unit: Tensor, macs: float, first: bool) -> None:
        super().__init__(module, gate)
        self.macs, self.first = macs, first
        self.register_buffer("unit", unit.clone(), persistent=False)

    def opened(self) -> Tensor:
        """(B, I): 1 where an input is open, and where it belongs to no unit."""
        found: Tensor = self.gate.open
        return torch.cat([found, torch.ones_like(found[:, :1])], 1)[:, self.unit]  # unit -1 reads the last entry

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            with torch.autocast(x.device.type, enabled=False):
                self.gate.see(self.by_channel(x))
        found, ones = self.opened().to(x.dtype), [1] * (x.dim() - 2)
        shape = (*ones, -1) if self.linear else (-1, *ones)
        return self.module(x * found.view(len(found), *shape))


def unwrapped(module: nn.Module, alone: bool = False) -> nn.Module:
    """A layer without its wrappers; `alone` as it was for the only image of the last forward pass."""
    while isinstance(module, Wrapper):
        module = module.alone() if alone else module.module
    return module


@dataclass(frozen=True, eq=False)
class Site:
    """A group that can be gated by image: one plain layer makes it, plain layers read it.

    Attributes:
        norm: The batch norm behind the layer that makes it.
        readers: The gate's unit of each input (I,), by name of the layer.
    """

    here: slice
    maker: str
    norm: str | None
    readers: dict[str, Tensor]


def sites(network: nn.Module, structure: Structure) -> list[Site]:
    """Groups that can be gated by image; sums of several layers' outputs, as in a residual stream, stay whole."""
    modules, found = dict(network.named_modules()), []
    order = [layer.name for layer in structure.layers]
    for group, here in zip(structure.groups, structure.slices, strict=True):
        makers = {s.module for s in group.slices if s.role == "write" and not isinstance(modules[s.module], NORMS)}
        norms = {s.module for s in group.slices if s.role == "write"} - makers
        readers = {s.module: s.unit for s in group.slices if s.role == "read"}
        roles = {s.role for s in group.slices}
        affine = all(isinstance(modules[name], nn.BatchNorm2d) and modules[name].weight is not None for name in norms)
        alone = len(makers) == 1 and group.width == 1 and len(norms) <= 1 and affine and "mean" not in roles
        if alone and readers and all(plain(modules[name]) for name in (*makers, *readers)):
            ordered = dict(sorted(readers.items(), key=lambda item: order.index(item[0])))
            found.append(Site(here, makers.pop(), next(iter(norms), None), ordered))
    if not found:
        raise StructureError("no channels can be chosen by image: plain convolutions with plain readers are needed")
    return found


@dataclass(frozen=True, eq=False)
class ByImage:
    """A network that chooses channels for each image, and its cost.

    Attributes:
        structure: Of the network without gates.
        computes_all: A channel is computed before its choice is known, so that only what reads it is saved.
    """

    network: nn.Module
    structure: Structure
    computes_all: bool = False

    @property
    def gates(self) -> list[Gate]:
        return [module for module in self.network.modules() if isinstance(module, Gate)]

    @property
    def params(self) -> int:
        """Stored numbers, those of the gates included."""
        return sum(parameter.numel() for parameter in self.network.parameters())

    @torch.no_grad()
    def masks(self, inputs: Tensor) -> Tensor:
        """(B, ...) inputs -> (B, U) float64 on the CPU: 1 where an image computes a unit, in evaluation mode."""
        parts = []
        with evaluating(self.network):
            for x in inputs.split(AT_ONCE):
                self.network(x)
                parts.append(x.new_ones(len(x), self.structure.units, dtype=torch.float64))
                for gate in self.gates:
                    parts[-1][:, gate.here] = gate.open
        return torch.cat(parts).cpu()

    def costs(self, masks: Tensor) -> Tensor:
        """(B, U) 0/1 -> (B,): exact multiply-accumulates of each image, gates included."""
        gates = sum(gate.macs for gate in self.gates)
        if not self.computes_all:
            return torch.cat([self.structure.flops.expected(part) for part in masks.split(AT_ONCE)]) + gates
        total = torch.full((len(masks),), self.structure.flops.dense + gates, dtype=torch.float64)
        for module in self.network.modules():
            if isinstance(module, Reads):
                unit = module.unit.cpu()
                read = masks[:, module.gate.here][:, unit.clamp_min(0)].masked_fill(unit < 0, 1.0)
                total -= module.macs * (1 - read.mean(1))
        return total

    def cost_of(self, count: Callable[[Gate], int]) -> float:
        """Multiply-accumulates of an image for which each gate opens so many units."""
        masks = torch.ones(1, self.structure.units, dtype=torch.float64)
        for gate in self.gates:
            masks[0, gate.here] = (torch.arange(gate.units) < count(gate)).double()
        return float(self.costs(masks))

    def cut_for(self, image: Tensor) -> nn.Module:
        """The plain network cut to the channels of an image (1, ...): what it computes for that."""
        keep = self.masks(image)[0].bool()
        network = copied(self.network)
        _unwrap(network)
        return cut(network, recipe(network, self.structure.groups, keep))

    def mean_cost(self, inputs: Tensor) -> float:
        """Mean multiply-accumulates over inputs."""
        return float(self.costs(self.masks(inputs)).mean())


def _unwrap(network: nn.Module) -> None:
    for name, child in list(network.named_children()):
        network.register_module(name, unwrapped(child, alone=True))
        _unwrap(network.get_submodule(name))


def cheapest(cost: Callable[[float], float], budget: float, low: float, high: float, steps: int = 25) -> float:
    """The least value from low to high at which a falling cost is within the budget, by bisection; `high` is."""
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (low, middle) if cost(middle) <= budget else (middle, high)
    return high


@dataclass(frozen=True, eq=False)
class Setup:
    """A trained network that is to choose channels by image.

    Attributes:
        found: The network, its gates in place.
        inputs: Training images, on the device.
        batches: All of them, epoch by epoch.
        budget: Multiply-accumulates of an image, on average.
        train: Trains a copy and returns it: (network, epochs, loss, start=, step=, groups=).
    """

    found: ByImage
    inputs: Tensor
    batches: Any
    budget: float
    train: Callable[..., nn.Module]


@dataclass(frozen=True)
class Dynamic(Described):
    """A method that chooses channels by image."""

    computes_all: ClassVar[bool] = False
    trains: ClassVar[bool] = False
    """It starts from the dense network."""

    @abstractmethod
    def insert(self, network: nn.Module, sites: Sequence[Site], seed: int) -> Sequence[Gate]:
        """Gates for the sites of a network, which is changed in place; what reads them is wrapped afterwards."""

    @abstractmethod
    def fit(self, setup: Setup, epochs: int) -> ByImage:
        """Train the network with its gates, and meet the budget."""


@undisturbed()
def prune(
    method: Dynamic, model: nn.Module, data: Data, config: Config, *, epochs: int, lr: float = FINETUNE_LR,
    train: Train = lambda verb, stage, model, data, config: verb(model, data, config),
) -> tuple[ByImage, list[Result]]:  # fmt: skip
    """Let a trained network choose channels by image; the network on the CPU, and the trainings that made it.

    Args:
        config: The dense network's recipe with `keep_flops`, on average.
        epochs: All of them, at `lr` times the recipe's learning rate.
        train: As for :func:`dllp.baselines.run.prune`.
    """
    if config.keep_flops is None:
        raise ConfigError(f"{method.name} needs a budget: give keep_flops, for example 0.5")
    tuning = replace(config, particles=1, teacher="off").resolved()
    tuning = replace(tuning, init="given", warmup=0.0, lr=lr * tuning.lr)
    batches, _, structure, *_ = prepare(model, data, tuning, None)
    results: list[Result] = []

    def trained(
        network: nn.Module, epochs: int, loss: LossFn, *, start: OnStep | None = None, step: OnStep | None = None,
        groups: Groups | None = None,
    ) -> nn.Module:  # fmt: skip
        verb = partial(hooked(start, step), loss=loss, groups=groups)
        results.append(train(verb, f"by-image-{len(results)}", network, data, replace(tuning, epochs=epochs)))
        return results[-1].model.to(batches.device)

    found = gated(method, model, structure, config.seed)
    found.network.to(batches.device)
    budget = config.keep_flops * structure.flops.dense
    inputs = torch.cat([x for x, _ in first_pairs(batches, IMAGES)])
    _check_reach(method, found, inputs, config.keep_flops)
    found = method.fit(Setup(found, inputs, batches, budget, trained), epochs)
    found.network.cpu().eval()
    return found, results


def gated(method: Dynamic, model: nn.Module, structure: Structure, seed: int) -> ByImage:
    """A copy of a network with the gates of a method."""
    network, macs = copied(model), {layer.name: layer.macs for layer in structure.layers}
    places = sites(network, structure)
    for site, gate in zip(places, method.insert(network, places, seed), strict=True):
        for i, (name, unit) in enumerate(site.readers.items()):
            network.set_submodule(name, Reads(network.get_submodule(name), gate, unit, macs[name], first=i == 0))
    return ByImage(network, structure, method.computes_all)


def _check_reach(method: Dynamic, found: ByImage, inputs: Tensor, keep: float) -> None:
    """Raise where the budget is below what every image costs; gates learn what they cost in a forward pass."""
    found.masks(inputs[:1])
    least = found.cost_of(lambda gate: gate.least) / found.structure.flops.dense
    if least > keep:
        raise StructureError(f"keep_flops = {keep:g}: {method.name} computes {least:.3f} for every image, give more")
