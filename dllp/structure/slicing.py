"""The cut of a network to its kept channels, and the gated network that equals it.

A channel that no layer reads has no effect, so gates multiply the input axis of every weight that mixes channels;
operations on single channels (norms, activations, depth-wise convolutions, pooling) need none.
"""

from __future__ import annotations

import copy
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils._pytree import tree_leaves

from dllp.errors import StructureError, first_line
from dllp.records import Recipe

Side = Literal["out", "in"]


@dataclass(frozen=True, eq=False)
class Slice:
    """One side of one module that a group cuts; `unit` (channels of the side,) maps each channel to its unit.

    `unit` is -1 for a channel of another group (concatenations). Per-channel modules have the side `out` only.
    """

    module: str
    side: Side
    unit: Tensor


@dataclass(frozen=True, eq=False)
class Group:
    """Coupled channels in units that can only be removed as one; `name` is the first layer that produces them."""

    name: str
    units: int
    slices: tuple[Slice, ...]


def is_depthwise(module: nn.Module) -> bool:
    """True if each output channel of a convolution reads its own input channel only."""
    return isinstance(module, _ConvNd) and 1 < module.groups == module.in_channels == module.out_channels


def side_sizes(module: nn.Module) -> dict[Side, int]:
    """Number of channels on each side that can be cut; empty for a module that cannot be cut."""
    if isinstance(module, _ConvNd):
        sizes: dict[Side, int] = {"out": module.out_channels}
        return sizes if is_depthwise(module) else {**sizes, "in": module.in_channels}
    if isinstance(module, nn.Linear):
        return {"out": module.out_features, "in": module.in_features}
    if isinstance(module, (_BatchNorm, _InstanceNorm)):
        return {"out": module.num_features}
    if isinstance(module, nn.PReLU) and module.num_parameters > 1:
        return {"out": module.num_parameters}
    return {}


def recipe(model: nn.Module, groups: Sequence[Group], keep: Tensor) -> Recipe:
    """keep (U,) bool, groups concatenated in order -> kept channels of every side that loses some."""
    kept: dict[tuple[str, Side], Tensor] = {}
    parts = keep.detach().to("cpu", torch.bool).split([group.units for group in groups])
    for group, part in zip(groups, parts, strict=True):
        padded = torch.cat([part, torch.ones(1, dtype=torch.bool)])  # unit -1 reads the last entry
        for piece in group.slices:
            mask = padded[piece.unit]
            key = (piece.module, piece.side)
            kept[key] = kept[key] & mask if key in kept else mask
    result: Recipe = {}
    for (module, side), mask in kept.items():
        if not mask.all():
            result.setdefault(module, {})[side] = mask.nonzero().flatten().tolist()
    return result


def copied(model: nn.Module) -> nn.Module:
    """A deep copy; tensors that a forward stored on modules (features, weights from hooks) are detached.

    PyTorch refuses to copy a tensor that was computed with gradients.
    """
    stored = [value for m in model.modules() for k, value in vars(m).items() if k not in ("_modules", "_parameters")]
    computed = [leaf for leaf in tree_leaves(stored) if isinstance(leaf, Tensor) and not leaf.is_leaf]
    try:
        return copy.deepcopy(model, {id(tensor): tensor.detach().clone() for tensor in computed})
    except Exception as error:
        raise StructureError(f"the network cannot be copied: {first_line(error)}") from error


def cut(model: nn.Module, recipe: Recipe) -> nn.Module:
    """A deep copy with only the kept channels of each side in `recipe`; the model itself is left unchanged."""
    result = copied(model)
    modules = dict(result.named_modules())
    for name, sides in recipe.items():
        if name not in modules:
            raise StructureError(f"the network has no module {name!r}: the recipe was made for another network")
        _cut_module(modules[name], _checked(name, modules[name], sides))
    return result


def kept_indices(model: nn.Module, recipe: Recipe) -> dict[str, Tensor]:
    """{name: int64 in the shape of the cut tensor}: where each kept number lies in the flat tensor before the cut.

    For all parameters and buffers, found by the cut of a copy whose tensors count their own elements.
    """
    indices = copied(model).cpu()
    for tensor in (*indices.parameters(), *indices.buffers()):
        tensor.requires_grad_(False)  # float64 counts exactly, and any tensor may hold it: bool and uint8 cannot count
        tensor.data = torch.arange(tensor.numel(), dtype=torch.float64).view(tensor.shape)
    small = cut(indices, recipe)
    named = (*small.named_parameters(remove_duplicate=False), *small.named_buffers(remove_duplicate=False))
    return {name: tensor.data.long() for name, tensor in named}


def _checked(name: str, module: nn.Module, sides: Mapping[str, list[int]]) -> dict[str, Tensor]:
    """Kept channels of each side as int64 vectors; StructureError for a recipe (read from a file) that cannot be."""
    sizes: dict[Any, int] = {**side_sizes(module)}
    result = {}
    for side, kept in sides.items():
        size = sizes.get(side, 0)
        if not kept or kept != sorted(set(kept)) or kept[0] < 0 or kept[-1] >= size:
            raise StructureError(f"the recipe of {name!r}, side {side!r}, must list channels of 0..{size - 1} in order")
        result[side] = torch.tensor(kept)
        parts = 1 if is_depthwise(module) else getattr(module, "groups", 1)
        if len(torch.bincount(result[side] // (size // parts), minlength=parts).unique()) > 1:
            raise StructureError(f"the recipe of {name!r}, side {side!r}, must keep equally many of its {parts} groups")
    return result


def _replace(module: nn.Module, name: str, value: Tensor) -> None:
    """Set a tensor's data, which leaves its class, requires_grad and sharing as they were."""
    old = getattr(module, name)
    if value.dim() == 4 and not old.is_contiguous() and old.is_contiguous(memory_format=torch.channels_last):
        value = value.contiguous(memory_format=torch.channels_last)
    old.data = value


def _cut_module(module: nn.Module, sides: dict[str, Tensor]) -> None:
    out, into = sides.get("out"), sides.get("in")
    if out is not None:
        vectors = ("weight", "bias", "running_mean", "running_var")
        per_channel = not isinstance(module, (_ConvNd, nn.Linear)) or is_depthwise(module)
        for key in vectors if per_channel else ("bias",):
            if getattr(module, key, None) is not None:
                value = getattr(module, key).data
                _replace(module, key, value[out.to(value.device)])
        if isinstance(module, (_BatchNorm, _InstanceNorm)):
            module.num_features = len(out)
        elif isinstance(module, nn.PReLU):
            module.num_parameters = len(out)
        elif isinstance(module, _ConvNd) and is_depthwise(module):
            module.in_channels = module.out_channels = module.groups = len(out)
            return
    if isinstance(module, (_ConvNd, nn.Linear)):
        _replace(module, "weight", _cut_weight(module, out, into))
        names = ("out_features", "in_features") if isinstance(module, nn.Linear) else ("out_channels", "in_channels")
        for key, kept in zip(names, (out, into), strict=True):
            if kept is not None:
                setattr(module, key, len(kept))


def _cut_weight(module: nn.Module, out: Tensor | None, into: Tensor | None) -> Tensor:
    """The kept outputs and inputs of a weight, each group of a grouped convolution with its own."""
    weight: Tensor = module.weight.data  # type: ignore[assignment, union-attr]
    parts = getattr(module, "groups", 1)
    transposed = isinstance(module, _ConvTransposeNd)
    local = []
    for side, kept in (("out", out), ("in", into)):
        size = side_sizes(module)[side] // parts  # type: ignore[index]
        kept = torch.arange(size * parts) if kept is None else kept
        local.append((kept % size).view(parts, -1).to(weight.device))
    rows, columns = reversed(local) if transposed else local
    # A plain convolution stores (out, in/groups, ...), a transposed one (in, out/groups, ...): both split along axis 0.
    blocks = weight.view(parts, weight.shape[0] // parts, *weight.shape[1:]).unbind(0)
    return torch.cat([block[r][:, c] for block, r, c in zip(blocks, rows, columns, strict=True)])


def restrict(groups: Sequence[Group], keep: Tensor, recipe: Recipe) -> list[Group]:
    """keep (U,) bool and its recipe -> the groups of the cut network: the kept units, renumbered."""
    result = []
    for group, part in zip(groups, keep.cpu().split([group.units for group in groups]), strict=True):
        units = torch.cat([part.cumsum(0) - 1, torch.tensor([-1])])  # unit -1 reads the last entry
        slices = []
        for piece in group.slices:
            kept = recipe.get(piece.module, {}).get(piece.side)
            old = piece.unit if kept is None else piece.unit[kept]
            slices.append(Slice(piece.module, piece.side, units[old]))
        result.append(Group(group.name, int(part.sum()), tuple(slices)))
    return result


class Fold:
    """Gates folded into the weights that read the gated channels, along their input axis."""

    def __init__(self, model: nn.Module, groups: Sequence[Group]) -> None:
        total = sum(group.units for group in groups)
        index: dict[str, Tensor] = {}
        self._shapes: list[tuple[int, ...]] = []
        offset = 0
        for group in groups:
            for piece in group.slices:
                if piece.side == "in":
                    full = index.setdefault(piece.module, torch.full_like(piece.unit, total))
                    full[piece.unit >= 0] = piece.unit[piece.unit >= 0] + offset
            offset += group.units
        for name in index:
            module = model.get_submodule(name)
            axis = 0 if isinstance(module, _ConvTransposeNd) else 1
            shape = [1] * module.weight.dim()  # type: ignore[union-attr, operator]
            shape[axis] = module.weight.shape[axis]  # type: ignore[union-attr, index, assignment]
            # Every group of a grouped convolution loses the same local channels: those of the first stand for all.
            index[name] = index[name][: shape[axis]]
            self._shapes.append(tuple(shape))
        self.names: list[str] = [f"{name}.weight" for name in index]
        self._sizes = [len(i) for i in index.values()]
        self._index = torch.cat(list(index.values())) if index else torch.zeros(0, dtype=torch.int64)

    def to(self, device: torch.device | str) -> Fold:
        """The same fold with its indices on `device`."""
        result = copy.copy(self)
        result._index = self._index.to(device)
        return result

    def __call__(self, parameters: Mapping[str, Tensor], gates: Tensor) -> dict[str, Tensor]:
        """gates (U,) -> the effective weight of every parameter in `names`, in the weight's own dtype."""
        open_end = torch.cat([gates, gates.new_ones(1)])
        factors = open_end.index_select(0, self._index).split(self._sizes)
        result = {}
        for name, shape, factor in zip(self.names, self._shapes, factors, strict=True):
            weight = parameters[name]
            result[name] = weight * factor.view(shape).to(weight.dtype)
        return result


class WeightFold:
    """Gates of single weights, multiplied into the named parameters one after the other.

    Args:
        shapes: Shape of each gated parameter, by its name.
        channels_last: Names of those whose gates are in the order of channels-last memory.
    """

    def __init__(self, shapes: Mapping[str, torch.Size], channels_last: Container[str] = ()) -> None:
        self.shapes, self.channels_last = dict(shapes), channels_last
        self.sizes = [shape.numel() for shape in self.shapes.values()]

    def split(self, values: Tensor) -> dict[str, Tensor]:
        """(..., U) -> {name: (..., *shape)}: the values of each parameter, as views."""
        result = {}
        for (name, shape), part in zip(self.shapes.items(), values.split(self.sizes, dim=-1), strict=True):
            if name in self.channels_last:
                o, i, h, w = shape
                result[name] = part.unflatten(-1, (o, h, w, i)).movedim(-1, -3)
            else:
                result[name] = part.unflatten(-1, shape)
        return result

    def __call__(self, parameters: Mapping[str, Tensor], gates: Tensor) -> dict[str, Tensor]:
        """gates (U,) -> the effective weight of every named parameter, in the weight's own dtype."""
        return {name: parameters[name] * gate.to(parameters[name].dtype) for name, gate in self.split(gates).items()}


@torch.no_grad()
def fold_in(network: nn.Module, fold: Fold | WeightFold, gates: Tensor) -> tuple[str, ...]:
    """Multiply a network's weights by their gates (U,) in place; the names of the parameters."""
    parameters = dict(network.named_parameters())
    weights = fold(parameters, gates)
    for name, weight in weights.items():
        parameters[name].copy_(weight)
    return tuple(weights)


def gated_outputs(model: nn.Module, groups: Sequence[Group], gates: Tensor, inputs: tuple[Any, ...]) -> list[Tensor]:
    """All output tensors of a network whose channels are gated by `gates` (U,)."""
    weights = Fold(model, groups).to(gates.device)(dict(model.named_parameters()), gates)
    return _tensors(functional_call(model, weights, inputs))


def difference(model: nn.Module, groups: Sequence[Group], keep: Tensor, inputs: tuple[Any, ...]) -> float | None:
    """Largest difference of gated and cut network, relative to the largest output; None where shapes differ.

    NaN counts as an infinite difference. Errors of the cut network are not caught.
    """
    with torch.no_grad():
        gates = keep.to(next(model.parameters()).device, torch.float64)
        expected = gated_outputs(model, groups, gates, inputs)
        actual = _tensors(cut(model, recipe(model, groups, keep))(*inputs))
        if [a.shape for a in actual] != [e.shape for e in expected]:
            return None
        worst = 0.0
        for a, e in zip(actual, expected, strict=True):
            gap = (a.double() - e.double()).abs().max().item() if a.numel() else 0.0
            if gap != gap:
                return float("inf")
            worst = max(worst, gap / max(e.abs().max().item(), 1e-300) if gap else 0.0)
    return worst


def _tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
