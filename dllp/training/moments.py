"""Measurements just before the gates are decided, just after, and at the end of a run.

"Distribution-lossless" is a claim about the decision, so it is measured there: accuracy and negative log-likelihood on
data that no step has seen, and the shape of the kept weights (Section 9).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dllp.devices import trees
from dllp.method import gates, likelihood, weight_laws
from dllp.records import Moment, MomentName
from dllp.training.gating import WeightGating
from dllp.training.objective import Metrics, Outcome, failing
from dllp.training.state import RunState

Evaluation = Callable[[], Iterator[tuple[Any, Any]]]
"""Walks once over the batches that are evaluated on, on the device of the run."""


@torch.no_grad()
def measure(state: RunState, name: MomentName, keep: Tensor | None = None) -> None:
    """Append a moment to the run's; `keep` (n, U) are decisions that are not yet applied."""
    gather = state.place.rows.all_gather_object
    shapes = [shape for own in gather(_shapes(state, keep)) for shape in own]
    scores = scored(state) if state.validation is not None else {}
    state.moments.append(Moment(name, state.step_index, shapes=shapes, **scores))


def _shapes(state: RunState, keep: Tensor | None) -> list[dict[str, float] | None]:
    """Near zero, KS distance and dip of each particle's kept weights, every layer standardised; None without any."""
    gating, particles, latents = state.gating, state.particles, state.latents
    if gating is None:
        return [None] * len(particles)
    if keep is not None and isinstance(gating, WeightGating):
        keep = gates.discretise(latents.logits - latents.threshold)  # what the relaxed network holds open
    chosen = latents.keep if keep is None else keep
    if chosen is None:
        return [None] * len(particles)
    weight = "{}.weight".format
    names = [weight(m) for m in gating.scales.modules] if isinstance(gating, WeightGating) else None
    segments = particles.layout.segments
    matrices = [s for s in segments.values() if (s.name in names if names else len(s.shape) > 1)]
    found = []
    for network, row, open_ in zip(particles.networks, particles.rows, chosen, strict=True):
        mask = gating.slab_coordinates(network, particles.layout, open_).to(row.device)
        layers = [s.view(row)[s.view(mask)].double().cpu().numpy() for s in matrices]
        found.append(_figures(weight_laws.pooled(layers)))
    return found


def _figures(kept: np.ndarray) -> dict[str, float] | None:
    some = weight_laws.thinned(kept, weight_laws.SAMPLE)
    shape = weight_laws.describe(some, fits=False)
    if shape is None:
        return None
    return {"kept": len(kept), "near_zero": shape.near_zero, "ks": shape.ks, "dip_p": shape.dip_p}


@torch.no_grad()
def scored(state: RunState) -> dict[str, Any]:
    """Accuracy and negative log-likelihood of each particle and of the ensemble; of a regression the squared error.

    Of a loss whose logits or labels are unknown the mean of the loss itself, and the user's own metrics of all.
    """
    rows, metrics = state.place.rows, state.metrics
    sums, together, own = torch.zeros(3, len(state.particles)), torch.zeros(3), []
    z = gates_now(state)
    for x, y in state.validation():  # type: ignore[misc]
        found, named = [], []
        for i in range(len(state.particles)):
            with state.forward.evaluated(i, z[i]) as network:
                found.append(state.objective(network, x, y))
                named.append({} if metrics is None else _named(metrics, network, x if y is None else (x, y)))
        own.append((trees.count(x), named))
        answers = [_probabilities(each, state) for each in found]
        if any(p is None for p in answers):  # a regression, or only the loss is known
            losses = torch.stack([each.loss for each in found]).float().cpu()
            sums += torch.stack([torch.zeros_like(losses), losses, torch.ones_like(losses)]) * trees.count(x)
            continue
        probabilities, labels = torch.stack([p[0] for p in answers]), answers[0][1]  # type: ignore[index]
        sums += _hits_and_losses(probabilities, labels).cpu()
        mean = rows.all_reduce_(probabilities.sum(0) / state.place.particles)
        together += _hits_and_losses(mean[None], labels)[:, 0].cpu()
    accuracy, nll, count = rows.all_gather(sums.T.contiguous()).T
    scores: dict[str, Any] = {"nll": (nll / count).tolist()}
    if float(together[2]):
        scores |= {"accuracy": (accuracy / count).tolist()}
        scores |= {"ensemble": {"accuracy": float(together[0] / together[2]), "nll": float(together[1] / together[2])}}
    if metrics is not None:
        scores["metrics"] = [m for part in rows.all_gather_object(_means(own)) for m in part]
    return scores


def _probabilities(found: Outcome, state: RunState) -> tuple[Tensor, Tensor] | None:
    """(K, C) probabilities and (K,) classes, or (K, C) soft ones, of all labels that count; None where unknown."""
    output, labels = found.output, found.labels
    if not found.scored or output is None or labels is None or state.config.task == "regression":
        return None
    if state.config.task == "binary":  # the answers no and yes
        yes = output.double().sigmoid().flatten()
        return torch.stack([1 - yes, yes], 1), (labels.flatten() > 0.5).long()
    logits = likelihood.class_last(output)
    if labels.is_floating_point() and labels.shape == logits.shape:
        return logits.double().softmax(-1), labels
    counted = labels != likelihood.IGNORED
    return logits[counted].double().softmax(-1), labels[counted]


def _hits_and_losses(probabilities: Tensor, y: Tensor) -> Tensor:
    """(n, K, C) -> (3, n): hits, sums of the negative log-likelihood, and labels."""
    classes = y.argmax(1) if y.dim() > 1 else y
    hits = (probabilities.argmax(-1) == classes).double().sum(1)
    logs = probabilities.clamp_min(1e-12).log()
    if y.dim() > 1:
        losses = -(y * logs).sum((1, 2))
    else:
        losses = F.nll_loss(logs.transpose(1, 2), y.expand(len(logs), -1), reduction="none").sum(1)
    return torch.stack([hits, losses, torch.full_like(hits, len(y))]).float()


def _named(metrics: Metrics, network: nn.Module, batch: Any) -> dict[str, float]:
    """The user's metrics of a batch, as numbers."""
    with failing("metrics"):
        return {name: float(value) for name, value in dict(metrics(network, batch)).items()}


def _means(batches: list[tuple[int, list[dict[str, float]]]]) -> list[dict[str, float]]:
    """Means of each particle's metrics over batches, by their examples."""
    total = sum(count for count, _ in batches)
    return [
        {name: sum(count * named[i][name] for count, named in batches) / total for name in first}
        for i, first in enumerate(batches[0][1])
    ]


def gates_now(state: RunState) -> Tensor:
    """(n, U): decided gates, or the medians of the relaxed ones."""
    latents = state.latents
    if latents.keep is not None:
        return latents.keep.to(latents.logits.dtype)
    if state.phase == "open":
        return torch.ones_like(latents.logits)
    if latents.ranked:
        return gates.discretise(latents.logits - latents.threshold).to(latents.logits.dtype)
    return gates.median(latents.logits, state.tau)
