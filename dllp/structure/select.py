"""The choice of units to keep, given their logits and a budget (Section 5)."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from dllp.errors import StructureError
from dllp.structure.cost import Cost
from dllp.structure.groups import OUTPUT, UNREAD, WEIGHTS_INSTEAD, Structure

NEAR = 0.005
"""A budget counts as met when at most this fraction of the dense cost is left unused."""


def select(structure: Structure, logits: Tensor, *, cost: Cost, keep: float | None, round_to: int = 1) -> Tensor:
    """logits (U,) -> bool (U,): the units to keep; cost at most `keep` * dense, or logits > 0 without `keep`.

    Units are taken in descending order of their logits, in chunks of `round_to` channels within each group (of an even
    cut: within all groups that are cut alike); the best chunk of each group always stays. After the first chunk that
    does not fit, smaller ones use the remaining budget; where that is still much, the last chunk of a group is
    exchanged for others that use more of it.
    """
    scores = logits.detach().to("cpu", torch.float64)
    if scores.shape != (structure.units,) or bool(scores.isnan().any()):
        raise StructureError(f"logits must be {structure.units} numbers, one for each unit, and none of them NaN")
    chunks: list[Tensor] = []
    owners: list[int] = []
    means: list[float] = []
    kept = torch.zeros(structure.units, dtype=torch.bool)
    for owner, members in enumerate(_tied(structure, round_to)):
        orders = [scores[part].argsort(descending=True, stable=True) + part.start for part, _ in members]
        parts = [order.split(step) for order, (_, step) in zip(orders, members, strict=True)]
        best, *others = zip(*parts, strict=True)
        kept[torch.cat(best)] = True
        chunks += [torch.cat(chunk) for chunk in others]
        owners += [owner] * len(others)
        means += [sum(scores[part].mean().item() for part in chunk) / len(chunk) for chunk in others]
    ranking = sorted(range(len(chunks)), key=lambda i: -means[i])
    if keep is None:
        for i in ranking:
            kept[chunks[i]] |= means[i] > 0
        return kept
    cost = cost.to("cpu", torch.float64)
    budget = keep * cost.dense * (1 + 1e-12)
    smallest = cost.expected(kept.double()).item()
    if smallest > budget:
        raise StructureError(
            f"a fraction of {keep:g} cannot be reached: one chunk of {round_to} channels in each group already costs "
            f"{smallest / cost.dense:.4f} of the dense network; keep more, "
            f"{'lower round_to, ' if round_to > 1 else ''}or {WEIGHTS_INSTEAD}"
            f"{_reasons(structure)}"
        )
    return _nearest(kept, [(owners[i], chunks[i]) for i in ranking], cost, budget)


def _tied(structure: Structure, round_to: int) -> list[list[tuple[slice, int]]]:
    """Groups that are cut alike: the units of each, and how many of them a chunk has."""
    steps = structure.steps(round_to)
    if not structure.even:
        return [[member] for member in zip(structure.slices, steps, strict=True)]
    alike: dict[int, list[int]] = {}
    for g, group in enumerate(structure.groups):
        alike.setdefault(group.channels, []).append(g)
    result = []
    for channels, members in alike.items():
        per_unit = [channels // structure.groups[g].units for g in members]
        chunk = math.lcm(*(each * steps[g] for each, g in zip(per_unit, members, strict=True)))
        result.append([(structure.slices[g], chunk // each) for each, g in zip(per_unit, members, strict=True)])
    return result


def _reasons(structure: Structure) -> str:
    """The reasons of the costliest inner layers that stay whole."""
    costs = {layer.name: layer.macs for layer in structure.layers}
    inner = [name for name, why in structure.whole.items() if why not in (OUTPUT, UNREAD)]
    names = sorted(inner, key=lambda name: -costs.get(name, 0.0))
    return f" (whole are {'; '.join(f'{name}: {structure.whole[name]}' for name in names[:3])})" if names else ""


def _nearest(kept: Tensor, ranking: list[tuple[int, Tensor]], cost: Cost, budget: float) -> Tensor:
    """Fill the budget; while more than `NEAR` of it is unused, try to exchange a group's last chunk for others."""
    kept, now = _fill(kept, ranking, cost, budget, set())
    while budget - now > NEAR * cost.dense:
        last = {owner: chunk for owner, chunk in ranking if bool(kept[chunk[0]])}
        options = []
        for owner, chunk in last.items():
            fewer = kept.clone()
            fewer[chunk] = False
            options.append(_fill(fewer, ranking, cost, budget, {owner}))
        more, new = max(options, key=lambda option: option[1], default=(kept, now))
        if new <= now * (1 + 1e-12):
            break
        kept, now = more, new
    return kept


def _fill(
    kept: Tensor, ranking: list[tuple[int, Tensor]], cost: Cost, budget: float, closed: set[int]
) -> tuple[Tensor, float]:
    """Take chunks in order while they fit, and return their cost; a group whose next chunk does not fit is closed."""
    signals, weight, linear = cost.signals.numpy(), cost.weight.numpy(), cost.linear.numpy()
    columns = [column.numpy() for column in cost.factors.unbind(1)]
    counts = cost.base.numpy() + kept.double().numpy() @ signals
    products = _products(counts, columns, weight)
    now = cost.expected(kept.double()).item()
    kept = kept.clone()
    for owner, chunk in ranking:
        if owner in closed or bool(kept[chunk[0]]):
            continue
        index = chunk.numpy()
        more = counts + signals[index].sum(0)
        larger = _products(more, columns, weight)
        delta = (larger - products).sum() + linear[index].sum()
        if now + delta > budget:
            closed.add(owner)
            continue
        now += delta
        counts, products = more, larger
        kept[chunk] = True
    return kept, now


def _products(counts: np.ndarray, columns: list[np.ndarray], weight: np.ndarray) -> np.ndarray:
    """The terms of a cost at hard gates."""
    for column in columns:
        weight = counts[column] * weight
    return weight
