"""The choice of units to keep, given their logits and a budget (Section 5)."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dllp.errors import StructureError
from dllp.structure.cost import Cost
from dllp.structure.groups import OUTPUT, UNREAD, WEIGHTS_INSTEAD, Structure
from dllp.structure.latency import Latency

NEAR = 0.005
"""A budget counts as met when at most this fraction of the dense cost is left unused."""
FAR = 0.05
"""Largest fraction of the dense cost that several chunks may have that are exchanged for others."""
PRICES, SWEEPS = 40, 8
"""Prices of time that are tried, and most turns of all groups at each."""
CORRECTIONS, MEASURED = 2, 0.02
"""Decisions that are made again after measuring, and the relative distance from the budget that is near enough."""


class Chunk(NamedTuple):
    """Units that are taken together: of a group `owner`, or a branch with the best units of the groups in it.

    `holders` are the units of the branches around it, without which it cannot be.
    """

    owner: int
    units: Tensor
    score: float
    holders: list[int]


def select(
    structure: Structure, logits: Tensor, *, cost: Cost | Latency, keep: float | None, round_to: int = 1
) -> Tensor:
    """logits (U,) -> bool (U,): the units to keep; cost at most `keep` * dense, or logits > 0 without `keep`.

    Units are taken in descending order of their logits, in chunks of `round_to` channels within each group (of an even
    cut: within all groups that are cut alike); the best chunk of each group always stays. After the first chunk that
    does not fit, smaller ones use the remaining budget; where that is still much, the last chunks of a group are
    exchanged for others that use more of it. A residual branch is taken with the best chunk of each group in it, by the
    least of their logits, and goes with all of them.
    Latency has chunks of its own, up to widths that were measured, and of very different use: there the most probable
    gates that fit come first, and then what still fits in descending order; what takes no time always does.
    """
    scores = logits.detach().to("cpu", torch.float64)
    if scores.shape != (structure.units,) or bool(scores.isnan().any()):
        raise StructureError(f"logits must be {structure.units} numbers, one for each unit, and none of them NaN")
    kept = torch.zeros(structure.units, dtype=torch.bool)
    steps = cost.chunks if isinstance(cost, Latency) else structure.steps(round_to)
    ranking, inside = (_even_ranking if structure.even else _ranking)(structure, scores, steps, kept)
    if keep is None:
        for chunk in ranking:
            kept[chunk.units] |= chunk.score > 0
        return kept
    cost = cost.to("cpu", torch.float64)
    budget = keep * cost.dense * (1 + 1e-12)
    smallest = cost.expected(kept.double()).item()
    if smallest > budget:
        if isinstance(cost, Latency):
            raise StructureError(
                f"keep_latency = {keep:g} cannot be reached: the least widths of the profile take "
                f"{smallest / cost.dense:.4f} of the dense network's time; keep more{_reasons(structure)}"
            )
        raise StructureError(
            f"a fraction of {keep:g} cannot be reached: one chunk of {round_to} channels in each group already costs "
            f"{smallest / cost.dense:.4f} of the dense network; keep more, "
            f"{'lower round_to, ' if round_to > 1 else ''}or {WEIGHTS_INSTEAD}"
            f"{_reasons(structure)}"
        )
    if isinstance(cost, Latency):
        kept = _likeliest(scores, kept, ranking, inside, cost, budget)
        return _fill(kept, ranking, cost, budget, set())[0]
    return _nearest(scores, kept, ranking, inside, cost, budget)


def _ranking(
    structure: Structure, scores: Tensor, steps: list[int], kept: Tensor
) -> tuple[list[Chunk], dict[int, list[int]]]:
    """The chunks in the order they are taken in, and the units inside each branch; sets those that always stay."""
    holders, parts = structure.holders, structure.slices
    chunks = [
        list((scores[part].argsort(descending=True, stable=True) + part.start).split(step))
        for part, step in zip(parts, steps, strict=True)
    ]
    inside = {b: [parts[b].start] for b, group in enumerate(structure.groups) if group.gone}
    first = {b: [chunks[b][0]] for b in inside}  # what a branch is taken with
    for g, around in enumerate(holders):
        for b in around:
            inside[b] += range(parts[g].start, parts[g].stop)
        if g not in inside and around:
            first[max(around, key=lambda b: len(holders[b]))].append(chunks[g].pop(0))
        elif g not in inside:
            kept[chunks[g].pop(0)] = True
    # a branch whose units are all closed is closed, and so are the units of a closed branch
    own = {b: min(scores[units].mean().item() for units in found) for b, found in first.items()}
    ranking = []
    for g, around in enumerate(holders):
        most = min((own[b] for b in around), default=np.inf)
        units = [parts[b].start for b in around]
        for chunk in [torch.cat(first[g])] if g in inside else chunks[g]:
            score = own[g] if g in inside else scores[chunk].mean().item()
            ranking.append(Chunk(g, chunk, min(score, most), units))
    # of equal ones branches come first, those around others before them
    ranking.sort(key=lambda chunk: (-chunk.score, chunk.owner not in inside, len(chunk.holders)))
    return ranking, inside


def _even_ranking(
    structure: Structure, scores: Tensor, steps: list[int], kept: Tensor
) -> tuple[list[Chunk], dict[int, list[int]]]:
    """As `_ranking`, for groups of equally many channels that are cut alike: a chunk has units of each of them."""
    ranking = []
    alike: dict[int, list[int]] = {}
    for g, group in enumerate(structure.groups):
        alike.setdefault(group.channels, []).append(g)
    for owner, (channels, members) in enumerate(alike.items()):
        per_unit = {g: channels // structure.groups[g].units for g in members}
        size = math.lcm(*(per_unit[g] * steps[g] for g in members))
        parts = []
        for g in members:
            here = structure.slices[g]
            order = scores[here].argsort(descending=True, stable=True) + here.start
            parts.append(order.split(size // per_unit[g]))
        best, *others = zip(*parts, strict=True)
        kept[torch.cat(best)] = True
        for chunk in others:
            score = sum(scores[units].mean().item() for units in chunk) / len(chunk)
            ranking.append(Chunk(owner, torch.cat(chunk), score, []))
    ranking.sort(key=lambda chunk: -chunk.score)
    return ranking, {}


def _reasons(structure: Structure) -> str:
    """The reasons of the costliest inner layers that stay whole."""
    costs = {layer.name: layer.macs for layer in structure.layers}
    inner = [name for name, why in structure.whole.items() if why not in (OUTPUT, UNREAD)]
    names = sorted(inner, key=lambda name: -costs.get(name, 0.0))
    return f" (whole are {'; '.join(f'{name}: {structure.whole[name]}' for name in names[:3])})" if names else ""


def select_measured(structure: Structure, logits: Tensor, cost: Latency, keep: float) -> Tensor:
    """:func:`select` by latency, again while the measured time is not the predicted one; the nearest one stays."""
    best = kept = select(structure, logits, cost=cost, keep=keep)
    if cost.measure is None:
        return best
    distance = math.inf
    for _ in range(CORRECTIONS + 1):
        found = cost.measure(kept)
        if abs(found / keep - 1) < distance:
            best, distance = kept, abs(found / keep - 1)
        if distance <= MEASURED:
            break
        target = min(1.0, keep * cost.expected(kept.double()).item() / cost.dense / found)
        try:
            kept = select(structure, logits, cost=cost, keep=target)
        except StructureError:  # what was found before is the least there is
            break
    return best


def _likeliest(
    scores: Tensor, kept: Tensor, ranking: list[Chunk], inside: dict[int, list[int]], cost: Latency, budget: float
) -> Tensor:
    """Nearly the most probable of the choices that fit: a knapsack by Lagrange's relaxation.

    At a price of time each group in turn takes as many chunks as are worth most, the others as they are, until none
    changes; the least price at which all fit is found by bisection. Then single groups change, or two exchange a chunk,
    while that fits and is worth more. What a choice is worth is its log-probability over that of each gate's likelier
    state; gates in a branch that is gone do not count.
    """
    owned: dict[int, list[Chunk]] = {}
    for chunk in ranking:
        owned.setdefault(chunk.owner, []).append(chunk)
    branches = {units[0]: b for b, units in inside.items()}
    around = {g: [branches[unit] for unit in chunks[0].holders] for g, chunks in owned.items()}
    signals = cost.sizes.signals
    base, worth, counts = cost.sizes.base + kept.double() @ signals, {}, {}
    for g, chunks in owned.items():
        all_shut = 0.0 if g in inside else -sum(scores[chunk.units].clamp_min(0).sum().item() for chunk in chunks)
        gains = [scores[chunk.units].sum().item() for chunk in chunks]
        if g in inside:  # with the least of what is in it
            own, least = scores[chunks[0].units].tensor_split([1])
            gains = [(own.sum() + least.clamp_max(0).sum()).item()]
        worth[g] = torch.tensor([all_shut, *gains], dtype=torch.float64).cumsum(0)
        counts[g] = torch.stack([0 * base, *(signals[chunk.units].sum(0) for chunk in chunks)]).cumsum(0)

    def total(taken: dict[int, int], without: int | None = None) -> tuple[float, Tensor]:
        """Worth and counts of all owners whose branches are there."""
        there = [g for g in owned if g != without and all(taken[b] for b in around[g])]
        return sum(worth[g][taken[g]].item() for g in there), sum((counts[g][taken[g]] for g in there), base)

    def time(counts: Tensor) -> Tensor:
        return cost.of(cost.sizes.of(counts))

    def response(price: float) -> dict[int, int]:
        taken = {g: int(values.argmax()) for g, values in worth.items()}
        for _ in range(SWEEPS):
            before = dict(taken)
            for g in sorted(owned, key=lambda g: -len(around[g])):  # a branch after what is in it
                held = taken | dict.fromkeys([*around[g], g], 1)
                value, others = total(held, without=g)
                values, rows = worth[g] + value, counts[g] + others
                if g in inside:
                    values[0], rows[0] = total(held | {g: 0}, without=g)
                taken[g] = int((values - price * time(rows)).argmax())
            if taken == before:
                break
        return taken

    best, low, high, price = dict.fromkeys(owned, 0), 0.0, math.inf, 1 / cost.dense
    for _ in range(PRICES):
        found = response(price)
        if time(total(found)[1]) > budget:
            low = price
        else:
            high, best = price, max(best, found, key=lambda taken: total(taken)[0])
        price = 2 * low if high == math.inf else (low + high) / 2
    better: dict[int, int] | None = best
    while better is not None:
        best = better
        now = total(best)[0]
        fewer = [{g: count - 1} for g, count in best.items() if count]
        more = [{g: count + 1} for g, count in best.items() if count + 1 < len(worth[g])]
        changed = [best | {g: count} for g, values in worth.items() for count in range(len(values))]
        changed += [best | less | plus for less in fewer for plus in more]
        options = sorted(((total(taken)[0], k) for k, taken in enumerate(changed)), reverse=True)
        worthier = (changed[k] for value, k in options if value > now + 1e-9)
        better = next((taken for taken in worthier if time(total(taken)[1]) <= budget), None)
    kept = kept.clone()
    for g, chunks in owned.items():
        if all(best[b] for b in around[g]):
            for chunk in chunks[: best[g]]:
                kept[chunk.units] = True
    return kept


def _nearest(
    scores: Tensor, kept: Tensor, ranking: list[Chunk], inside: dict[int, list[int]], cost: Cost, budget: float
) -> Tensor:
    """Fill the budget; while more than `NEAR` of it is unused, try to exchange a group's last chunks for others.

    One of them first, then two, four and more, up to `FAR`; of these, those that still fit beside the others come back.
    The exchange that uses most of the budget is made. Of those that leave no more than `NEAR` of it, all are as good,
    and the one with the largest sum of logits is the most probable choice of independent gates.
    """
    met = budget - NEAR * cost.dense
    kept, now = _fill(kept, ranking, cost, budget, set())
    depth = 1
    while budget - now > NEAR * cost.dense:
        taken: dict[int, list[Tensor]] = {}
        for chunk in ranking:
            if bool(kept[chunk.units[0]]):
                taken.setdefault(chunk.owner, []).append(chunk.units)
        options = []
        for owner, chunks in taken.items():
            fewer = kept.clone()
            for chunk in chunks[-depth:]:
                fewer[inside.get(owner, chunk)] = False
            if depth > 1 and now - cost.expected(fewer.double()).item() > FAR * cost.dense:
                continue
            found = _fill(fewer, ranking, cost, budget, {owner})
            options.append(found if depth == 1 else _fill(found[0], ranking, cost, budget, set()))
        more, new = max(options, key=lambda o: (min(o[1], met), scores[o[0]].sum().item()), default=(kept, now))
        if new > now * (1 + 1e-12):
            kept, now, depth = more, new, 1
        elif options and depth < max(map(len, taken.values())):
            depth *= 2
        else:
            break
    return kept


def _fill(
    kept: Tensor, ranking: list[Chunk], cost: Cost | Latency, budget: float, closed: set[int]
) -> tuple[Tensor, float]:
    """Take chunks in order while they fit, and return their cost; a group whose next chunk does not fit is closed."""
    walk = (_Times if isinstance(cost, Latency) else _Terms)(cost, kept)  # pyright: ignore[reportArgumentType]
    now = cost.expected(kept.double()).item()
    kept = kept.clone()
    for owner, chunk, _, holders in ranking:
        if owner in closed or bool(kept[chunk[0]]) or not bool(kept[holders].all()):
            continue
        delta = walk.try_chunk(chunk)
        if now + delta > budget:
            closed.add(owner)
            continue
        now += delta
        walk.take()
        kept[chunk] = True
    return kept, now


class _Terms:
    """The terms of a polynomial cost at hard gates, chunk by chunk."""

    def __init__(self, cost: Cost, kept: Tensor) -> None:
        self.signals, self.weight, self.linear = cost.signals.numpy(), cost.weight.numpy(), cost.linear.numpy()
        self.columns = [column.numpy() for column in cost.factors.unbind(1)]
        self.counts = cost.base.numpy() + kept.double().numpy() @ self.signals
        self.products = self._of(self.counts)

    def _of(self, counts: np.ndarray) -> np.ndarray:
        found = self.weight
        for column in self.columns:
            found = counts[column] * found
        return found

    def try_chunk(self, chunk: Tensor) -> float:
        """Growth of the cost with a chunk."""
        index = chunk.numpy()
        self.more = self.counts + self.signals[index].sum(0)
        self.larger = self._of(self.more)
        return (self.larger - self.products).sum() + self.linear[index].sum()

    def take(self) -> None:
        """Keep the chunk that was tried last."""
        self.counts, self.products = self.more, self.larger


class _Times:
    """Time at hard gates, chunk by chunk."""

    def __init__(self, cost: Latency, kept: Tensor) -> None:
        self.cost, self.counts = cost, cost.sizes.base + kept.double() @ cost.sizes.signals
        self.now = cost.of(cost.sizes.of(self.counts)).item()

    def try_chunk(self, chunk: Tensor) -> float:
        """Growth of the time with a chunk."""
        self.more = self.counts + self.cost.sizes.signals[chunk].sum(0)
        self.later = self.cost.of(self.cost.sizes.of(self.more)).item()
        return self.later - self.now

    def take(self) -> None:
        """Keep the chunk that was tried last."""
        self.counts, self.now = self.more, self.later
