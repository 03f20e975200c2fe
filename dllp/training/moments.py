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
from torch import Tensor

from dllp.method import gates, weight_laws
from dllp.records import Moment, MomentName
from dllp.training.gating import WeightGating
from dllp.training.state import RunState

Evaluation = Callable[[], Iterator[tuple[Tensor, Tensor]]]
"""Walks once over inputs (B, ...) and labels that are evaluated on, on the device of the run."""


@torch.no_grad()
def measure(state: RunState, name: MomentName, keep: Tensor | None = None) -> None:
    """Append a moment to the run's; `keep` (n, U) are decisions that are not yet applied."""
    gather = state.place.rows.all_gather_object
    shapes = [shape for own in gather(_shapes(state, keep)) for shape in own]
    scores = _scores(state) if state.validation is not None else {}
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


def _scores(state: RunState) -> dict[str, Any]:
    """Accuracy and negative log-likelihood of each particle and of the ensemble; of a regression the squared error."""
    classes, rows = state.config.task == "classification", state.place.rows
    sums, together, count = torch.zeros(2, len(state.particles)), torch.zeros(2), 0
    z = gates_now(state)
    for x, y in state.validation():  # type: ignore[misc]
        found = torch.stack([state.forward.evaluate(i, x, z[i]) for i in range(len(state.particles))])
        count += len(x)
        if not classes:
            outputs = found.flatten(2)[..., : y[0].numel()]
            sums[1] += (outputs - y.reshape(1, len(y), -1)).square().mean(2).sum(1).cpu()
            continue
        logits = found[..., :-1] if state.config.noise == "input" else found
        probabilities = logits.double().softmax(-1)
        sums += _hits_and_losses(probabilities, y).cpu()
        mean = rows.all_reduce_(probabilities.sum(0) / state.place.particles)
        together += _hits_and_losses(mean[None], y)[:, 0].cpu()
    each = rows.all_gather(sums.T.contiguous() / count).T.tolist()
    if not classes:
        return {"nll": each[1]}
    accuracy, nll = (together / count).tolist()
    return {"accuracy": each[0], "nll": each[1], "ensemble": {"accuracy": accuracy, "nll": nll}}


def _hits_and_losses(probabilities: Tensor, y: Tensor) -> Tensor:
    """(n, B, C) -> (2, n): hits, and sums of the negative log-likelihood."""
    hits = (probabilities.argmax(-1) == y).double().sum(1)
    logs = probabilities.clamp_min(1e-12).log().transpose(1, 2)
    return torch.stack([hits, F.nll_loss(logs, y.expand(len(logs), -1), reduction="none").sum(1)]).float()


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
