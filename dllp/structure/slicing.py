"""The cut of a network to its kept units, and the gated network that equals it.

A unit that no layer reads has no effect, so gates multiply every weight along the axis that it is read by; operations
on single channels (activations, batch norms, depth-wise convolutions, pooling) need none. Means over units, as layer
norms take them, are gated by themselves (:mod:`dllp.structure.means`).
"""

from __future__ import annotations

import copy
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils._pytree import tree_leaves

from dllp.devices.trees import tensors
from dllp.errors import StructureError, first_line
from dllp.records import Recipe
from dllp.structure import attributes
from dllp.structure.branches import GONE, check_removal, remove, within
from dllp.structure.following import follow, shrink
from dllp.structure.means import GATE, gate_means, plain_means

Net = TypeVar("Net", bound=nn.Module)
Side = Literal["out", "in"]
Role = Literal["write", "read", "mean", "size", "branch"]
TENSORS = ("write", "read", "branch")  # roles of slices that name a tensor
VECTORS = ("weight", "bias", "running_mean", "running_var")  # what a side `out` cuts, beside a matrix of weights


@dataclass(frozen=True, eq=False)
class Slice:
    """One axis that a group cuts.

    Its role is `read` for an axis of a parameter that is added up, where gates multiply; `write` for any other;
    `branch` for a parameter of a branch's last affine map, which its gate multiplies and no axis of which is cut.
    """

    name: str  # a parameter or buffer; of a `mean` the module that takes it, of a `size` the module and its attribute
    axis: int  # of the tensor; of a mean counted from the last one; of a size the position in the attribute
    unit: Tensor  # (size of the axis,) unit of each index, -1 where it has none
    role: Role = "write"

    @property
    def module(self) -> str:
        """The module that has the tensor, takes the mean or has the attribute."""
        if self.role == "size":
            return self.name.partition(":")[0]
        return self.name if self.role == "mean" else self.name.rpartition(".")[0]

    @property
    def key(self) -> tuple[bool, str, int]:
        """The place that is cut: slices of several groups may cut one axis."""
        return self.role in TENSORS, self.name, self.axis


@dataclass(frozen=True, eq=False)
class Group:
    """Units that are cut alike.

    Their kind is `channel`, `head` where products are computed for each unit by itself, `width` under a norm, or
    `branch` for a residual branch, which is one unit.
    """

    name: str  # the first layer that makes them
    units: int
    slices: tuple[Slice, ...]
    width: int = 1  # output channels of that layer for each unit
    kind: str = "channel"
    gone: tuple[tuple[str, str], ...] = ()  # modules that a closed branch removes, and the recipe's entry of each
    multiple: int = 1  # a kernel that reads them takes multiples of so many units only

    def inside(self, modules: Container[str]) -> bool:
        """True if nothing of the group is left where these modules are gone."""
        names = [piece.module for piece in self.slices if piece.role in TENSORS and not self.gone]
        return all(within(name, modules) for name in [*names, *(name for name, _ in self.gone)])

    @property
    def channels(self) -> int:
        """Length of the axis that its first reader reads: where layers are equally wide, that of both."""
        return min(int((piece.unit >= 0).sum()) for piece in self.slices if piece.role == "read")


def is_depthwise(module: nn.Module) -> bool:
    """True if each output channel of a convolution reads its own input channel only."""
    return isinstance(module, _ConvNd) and 1 < module.groups == module.in_channels == module.out_channels


def _multiplies(module: nn.Module) -> bool:
    """True if a convolution makes several output channels of each input channel by itself."""
    return isinstance(module, _ConvNd) and 1 < module.groups == module.in_channels != module.out_channels


def side_sizes(module: nn.Module) -> dict[Side, int]:
    """Number of channels on each side that a recipe can name; empty for modules whose tensors it names."""
    if _multiplies(module):
        return {}
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


def masks(groups: Sequence[Group], keep: Tensor) -> dict[tuple[bool, str, int], Tensor]:
    """keep (U,) bool -> what remains of every axis, bool (size,), by its slices' key; nothing of removed branches."""
    result: dict[tuple[bool, str, int], Tensor] = {}
    pairs, gone = _pairs(groups, keep), removed(groups, keep)
    for group, part in pairs:
        if group.inside(gone):
            continue
        padded = torch.cat([part | bool(group.gone), torch.ones(1, dtype=torch.bool)])  # unit -1 reads the last entry
        for piece in group.slices:
            if not within(piece.module, gone):
                found = padded[piece.unit]
                result[piece.key] = result[piece.key] & found if piece.key in result else found
    return result


def _pairs(groups: Sequence[Group], keep: Tensor) -> list[tuple[Group, Tensor]]:
    parts = keep.detach().to("cpu", torch.bool).split([group.units for group in groups])
    return list(zip(groups, parts, strict=True))


def removed(groups: Sequence[Group], keep: Tensor) -> dict[str, str]:
    """keep (U,) bool -> the modules that closed branches remove, without those inside others, and what they become."""
    closed = [group for group, part in _pairs(groups, keep) if group.gone and not part.any()]
    gone = {name: entry for group in closed for name, entry in group.gone}
    return {name: entry for name, entry in gone.items() if not within(name.rpartition(".")[0], gone)}


def recipe(model: nn.Module, groups: Sequence[Group], keep: Tensor) -> Recipe:
    """keep (U,) bool, groups concatenated in order -> what is kept of every module that loses something.

    By module: kept channels of the sides `out` and `in` of convolutions, linear layers and batch norms, kept indices of
    other tensors as `tensor.axis`, and new values of integer attributes as `.attribute`. Modules of a removed branch
    have an entry that begins with `!`, and says what stands in their place.
    """
    modules = dict(model.named_modules())
    result: Recipe = {name: {entry: []} for name, entry in removed(groups, keep).items()}
    touched = {p.key for group, part in _pairs(groups, keep) if not part.all() for p in group.slices}
    for key, mask in masks(groups, keep).items():
        tensor, name, axis = key
        if not tensor:
            module, _, path = name.partition(":")
            # a view may be asked for a wrong size even where it keeps its own
            if path.startswith("@") and key in touched:
                found = result.setdefault(module, {}).setdefault(f".{path}", [0] * int(path.partition("/")[2]))
                found[axis] = int(mask.sum())
            elif path and not mask.all():
                old = attributes.read(modules[module], path) or []
                result.setdefault(module, {}).setdefault(f".{path}", old)[axis] = int(mask.sum())
            continue
        if mask.all():
            continue
        module, _, parameter = name.rpartition(".")
        side, times = _side(modules[module], parameter, axis)
        kept = mask.repeat(times).nonzero().flatten().tolist()
        result.setdefault(module, {})[side or f"{parameter}.{axis}"] = kept
    return result


def _side(module: nn.Module, parameter: str, axis: int) -> tuple[Side | None, int]:
    """The side of a module that an axis of its tensor is, and how often the axis is repeated there."""
    if parameter == "weight" and isinstance(module, _ConvNd) and axis < 2 and not _multiplies(module):
        first: Side = "in" if isinstance(module, _ConvTransposeNd) and not is_depthwise(module) else "out"
        second: Side = "out" if first == "in" else "in"
        return (first, 1) if axis == 0 else (second, module.groups)
    if parameter == "weight" and isinstance(module, nn.Linear):
        return ("in" if axis else "out"), 1
    return ("out", 1) if side_sizes(module) and axis == 0 and parameter in VECTORS else (None, 1)


def copied(model: Net, *, shared: bool = False) -> Net:
    """A deep copy; tensors that a forward stored on modules (features, weights from hooks) are detached.

    PyTorch refuses to copy a tensor that was computed with gradients. With `shared` the parameters are new objects in
    the memory of the old ones; other copies forget what modules keep between forwards in evaluation.
    """
    stored = [value for m in model.modules() for k, value in vars(m).items() if k not in ("_modules", "_parameters")]
    computed = [leaf for leaf in tree_leaves(stored) if isinstance(leaf, Tensor) and not leaf.is_leaf]
    memo = {id(tensor): tensor.detach().clone() for tensor in computed}
    if shared:
        memo |= {id(p): nn.Parameter(p.detach(), requires_grad=p.requires_grad) for p in model.parameters()}
    try:
        result = copy.deepcopy(model, memo)
    except Exception as error:
        raise StructureError(f"the network cannot be copied: {first_line(error)}") from error
    if not shared:
        _forget(result)
    return result


def _forget(model: nn.Module) -> None:
    """Let modules drop what they made of their weights in evaluation, by train(), where those that keep it drop it."""
    modes = [(module, module.training) for module in model.modules()]
    for module, _ in modes:
        if type(module).train is not nn.Module.train:
            module.train()
    for module, mode in modes:
        module.training = mode


def cut(model: nn.Module, recipe: Recipe, *, shared: bool = False) -> nn.Module:
    """A deep copy with what `recipe` keeps; with `shared`, parameters that lose nothing stay in the model's memory."""
    result = copied(model, shared=shared)
    modules = dict(result.named_modules())
    for name, entries in recipe.items():
        if name not in modules:
            raise StructureError(f"the network has no module {name!r}: the recipe was made for another network")
        _cut_module(modules[name], _checked(name, modules[name], entries))
    gone = {name: entry for name, entries in recipe.items() for entry in entries if entry.startswith(GONE)}
    lost = {id(modules[name]._parameters.get("weight")) for name in recipe.keys() - gone.keys()} - {id(None)}
    for module in modules.values():  # others may share a weight that was cut
        if id(getattr(module, "weight", None)) in lost:
            _resize(module)
    for name, entry in gone.items():
        remove(result, name, entry)
    return result


def kept_indices(model: nn.Module, recipe: Recipe) -> dict[str, Tensor]:
    """{name: int64 in the shape of the cut tensor}: where each kept number lies in the flat tensor before the cut.

    For all parameters and buffers, found by the cut of a copy whose tensors count their own elements; those of removed
    branches have none.
    """
    indices = copied(model).cpu()
    for tensor in (*indices.parameters(), *indices.buffers()):
        tensor.requires_grad_(False)  # float64 counts exactly, and any tensor may hold it: bool and uint8 cannot count
        tensor.data = torch.arange(tensor.numel(), dtype=torch.float64).view(tensor.shape)
    small = cut(indices, recipe)
    before, after = (
        (*m.named_parameters(remove_duplicate=False), *m.named_buffers(remove_duplicate=False)) for m in (model, small)
    )
    none = {name: torch.zeros(0, dtype=torch.int64) for name, _ in before}
    return none | {name: tensor.data.long() for name, tensor in after}


def _checked(name: str, module: nn.Module, entries: Mapping[str, list[int]]) -> dict[str, Tensor]:
    """The entries of a module as int64 vectors; StructureError for a recipe (read from a file) that cannot be."""
    sizes: dict[Any, int] = {**side_sizes(module)}
    result = {}
    for entry, kept in entries.items():
        if entry.startswith(GONE):
            check_removal(name, entry, kept)
            continue
        if any(abs(value) >= 2**31 for value in kept):
            raise StructureError(f"the recipe of {name!r}, entry {entry!r}, holds a number that is no size or index")
        result[entry] = torch.tensor(kept)
        if entry.startswith(".@"):
            number, _, rank = entry[2:].partition("/")
            if not number.isdecimal() or rank != str(len(kept)) or any(size < 0 for size in kept):
                raise StructureError(f"the recipe of {name!r}, view {entry[2:]!r}, cannot be")
            continue
        if entry.startswith("."):
            old = attributes.read(module, entry[1:])
            if old is None or len(old) != len(kept) or any(new < 1 for new in kept):
                raise StructureError(f"the recipe of {name!r}, attribute {entry[1:]!r}, does not fit the network")
            continue
        tensor, _, axis = entry.rpartition(".")
        if tensor:
            shape = getattr({**module._parameters, **module._buffers}.get(tensor), "shape", ())
            size = shape[int(axis)] if axis.isdecimal() and int(axis) < len(shape) else 0
        else:
            size = sizes.get(entry, 0)
        if not kept or kept != sorted(set(kept)) or kept[0] < 0 or kept[-1] >= size:
            what = f"axis {entry!r}" if tensor else f"side {entry!r}"
            raise StructureError(f"the recipe of {name!r}, {what}, must list channels of 0..{size - 1} in order")
        parts = 1 if tensor or is_depthwise(module) else getattr(module, "groups", 1)
        if len(torch.bincount(result[entry] // (size // parts), minlength=parts).unique()) > 1:
            raise StructureError(f"the recipe of {name!r}, side {entry!r}, must keep equally many of {parts} groups")
    return result


def _replace(module: nn.Module, name: str, value: Tensor) -> None:
    """Set a tensor's data, which leaves its class, requires_grad and sharing as they were."""
    old = getattr(module, name)
    if value.dim() == 4 and not old.is_contiguous() and old.is_contiguous(memory_format=torch.channels_last):
        value = value.contiguous(memory_format=torch.channels_last)
    old.data = value


def _cut_module(module: nn.Module, entries: dict[str, Tensor]) -> None:
    _cut_sides(module, {entry: kept for entry, kept in entries.items() if entry in ("out", "in")})
    for entry, kept in sorted(entries.items()):  # attributes first
        if entry.startswith(".@"):
            follow(module, entry[1:], kept.tolist())
        elif entry.startswith("."):
            attributes.write(module, entry[1:], kept.tolist())
        elif entry not in ("out", "in"):
            tensor, _, axis = entry.rpartition(".")
            value = getattr(module, tensor).data
            _replace(module, tensor, value.index_select(int(axis), kept.to(value.device)))
    if any(not entry.startswith(".") for entry in entries):
        _resize(module)


def _resize(module: nn.Module) -> None:
    """Let the attributes of a plain layer say the shape that its tensors have."""
    weight = getattr(module, "weight", None)
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = weight.shape  # type: ignore[union-attr]
    elif _multiplies(module):
        times = module.out_channels // module.groups  # type: ignore[operator]
        module.groups = module.in_channels = weight.shape[0] // (1 if isinstance(module, _ConvTransposeNd) else times)  # type: ignore
        module.out_channels = module.groups * times
    elif isinstance(module, nn.RNNBase):
        module.input_size = module._parameters["weight_ih_l0"].shape[1]  # type: ignore[union-attr]
    elif isinstance(module, nn.MultiheadAttention):
        shrink(module)
    elif isinstance(module, nn.Embedding):
        module.embedding_dim = weight.shape[1]  # type: ignore[union-attr]
    elif isinstance(module, (nn.LayerNorm, nn.RMSNorm)) and weight is not None:
        module.normalized_shape = tuple(weight.shape)
    elif isinstance(module, nn.GroupNorm) and weight is not None:
        module.num_channels = len(weight)


def _cut_sides(module: nn.Module, sides: dict[str, Tensor]) -> None:
    out, into = sides.get("out"), sides.get("in")
    if out is not None:
        per_channel = not isinstance(module, (_ConvNd, nn.Linear)) or is_depthwise(module)
        for key in VECTORS if per_channel else ("bias",):
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
    if sides and isinstance(module, (_ConvNd, nn.Linear)):
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
    kept = [block.index_select(0, r).index_select(1, c) for block, r, c in zip(blocks, rows, columns, strict=True)]
    return kept[0] if parts == 1 else torch.cat(kept)


def restrict(groups: Sequence[Group], keep: Tensor) -> list[Group]:
    """keep (U,) bool -> the groups of the cut network: the kept units, renumbered."""
    left, result = masks(groups, keep), []
    for group, part in _pairs(groups, keep):
        units = torch.cat([part.cumsum(0) - 1, torch.tensor([-1])])  # unit -1 reads the last entry
        here = [piece for piece in group.slices if piece.key in left and part.any()]
        slices = tuple(replace(piece, unit=units[piece.unit[left[piece.key]]]) for piece in here)
        result.append(replace(group, units=int(part.sum()), slices=slices))
    return result


class Fold:
    """Gates folded into the weights that read the gated units, and into the means that are taken over them."""

    def __init__(self, model: nn.Module, groups: Sequence[Group]) -> None:
        total = sum(group.units for group in groups)
        index: dict[tuple[str, int], list[Tensor]] = {}
        means: dict[tuple[str, int], list[Tensor]] = {}
        offset = 0
        for group in groups:
            for piece in group.slices:
                if piece.role in ("read", "mean", "branch"):
                    found = (means if piece.role == "mean" else index).setdefault((piece.name, piece.axis), [])
                    _lay(found, piece.unit, offset, total)
            offset += group.units
        names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        alike = {found[0]: found for found in names.values()}
        ranks = {name: parameter.dim() for name, parameter in model.named_parameters()}
        self._entries = [
            (name, tuple(-1 if d == axis else 1 for d in range(ranks[name])), len(found))
            for (name, axis), found in index.items()
        ]
        self._means = [(name, len(found)) for (name, _), found in means.items()]
        self.axes = {name: axis for name, axis in means}  # modules that take means; axes count from the last one
        self._alike = {name: alike[name] for name in dict.fromkeys(name for name, _ in index)}
        self.names = [other for found in self._alike.values() for other in found]  # parameters that a call returns
        vectors = [vector for found in (*index.values(), *means.values()) for vector in found]
        self._sizes = [len(vector) for vector in vectors]
        self._index = torch.cat(vectors) if vectors else torch.zeros(0, dtype=torch.int64)

    def to(self, device: torch.device | str) -> Fold:
        """The same fold with its indices on `device`."""
        result = copy.copy(self)
        result._index = self._index.to(device)
        return result

    def __call__(self, parameters: Mapping[str, Tensor], gates: Tensor) -> dict[str, Tensor]:
        """gates (U,) -> the effective weight of every parameter in `names`, in its own dtype, and the gates of means.

        A parameter that modules share is returned under each of its names.
        """
        open_end = torch.cat([gates, gates.new_ones(1)])
        factors = iter(open_end.index_select(0, self._index).split(self._sizes))
        result: dict[str, Tensor] = {}
        for name, shape, count in self._entries:
            weight = result.get(name, parameters[name])
            for _ in range(count):
                weight = weight * next(factors).view(shape).to(weight.dtype)
            result[name] = weight
        for name, others in self._alike.items():
            result.update(dict.fromkeys(others, result[name]))
        for name, count in self._means:
            gate = next(factors)
            for _ in range(count - 1):
                gate = gate * next(factors)
            result[f"{name}.{GATE}" if name else GATE] = gate
        return result

    def prepare(self, network: nn.Module) -> None:
        """Let a network that is called with the results take gated means, in place."""
        gate_means(network, self.axes)


def _lay(vectors: list[Tensor], unit: Tensor, offset: int, total: int) -> None:
    """Add the gates of a group to those of an axis: into the first vector whose entries there are still open."""
    mine = unit >= 0
    for vector in vectors:
        if bool((vector[mine] == total).all()):
            vector[mine] = unit[mine] + offset
            return
    vectors.append(torch.where(mine, unit + offset, total))


class WeightFold:
    """Gates of single weights, multiplied into parameters of the given shapes one after the other.

    Parameters in `channels_last` have gates in the order of channels-last memory.
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
    """Multiply a network's weights by their gates (U,) in place, and gate its means; the names of the parameters."""
    parameters = dict(network.named_parameters())
    weights = fold(parameters, gates)
    for name in parameters.keys() & weights.keys():
        parameters[name].copy_(weights[name])
    if isinstance(fold, Fold):
        fold.prepare(network)
        for name in fold.axes:
            setattr(network.get_submodule(name), GATE, weights[f"{name}.{GATE}" if name else GATE])
        return tuple(fold.names)
    return tuple(weights)


def gated_outputs(model: nn.Module, groups: Sequence[Group], gates: Tensor, inputs: tuple[Any, ...]) -> list[Tensor]:
    """All output tensors of a network whose units are gated by `gates` (U,)."""
    fold = Fold(model, groups).to(gates.device)
    weights = fold(dict(model.named_parameters()), gates)
    fold.prepare(model)
    try:
        return tensors(functional_call(model, weights, inputs, tie_weights=False))
    finally:
        plain_means(model)


def gap(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float | None:
    """Largest difference of outputs relative to the largest of them; infinite for NaN, None where shapes differ."""
    if [a.shape for a in actual] != [e.shape for e in expected]:
        return None
    worst = 0.0
    for a, e in zip(actual, expected, strict=True):
        found = (a.double() - e.double()).abs().max().item() if a.numel() else 0.0
        if found != found:
            return float("inf")
        worst = max(worst, found / max(e.abs().max().item(), 1e-300) if found else 0.0)
    return worst
