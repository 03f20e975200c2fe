"""How good a run is: a row for the dense network, one for each particle, and one for all of them together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from dllp import metrics
from dllp.api import Result, Size
from dllp.data import ArrayData
from dllp.data.corruptions import Corruption
from dllp.errors import DataError
from dllp.posterior import Posterior, Prediction, decompose

CLEAN = "clean"
DENSE, TOGETHER = "dense", "all particles"
CHUNK = 4096
"""Inputs normalised at once: a large test set never lies in memory as floats."""


@dataclass(frozen=True)
class Row:
    """One network, or all particles together, on one version of the data.

    Attributes:
        name: `dense`, `particle K` or `all particles`.
        data: `clean`, or the corruption's name.
        metrics: Single numbers by name: accuracy, nll, ece, ...; for regression rmse and nll.
        macs, params, bytes: What it costs; all particles together cost the sum. None where unknown.
    """

    name: str
    data: str
    metrics: dict[str, float]
    macs: float | None = None
    params: int | None = None
    bytes: int | None = None


def table(
    result: Result,
    data: ArrayData,
    dense: Posterior | None = None,
    *,
    disk: Mapping[str, int] | None = None,
    corruptions: Iterable[Corruption] = (),
    device: torch.device | str = "cpu",
) -> list[Row]:
    """Evaluate a run on labelled data, clean first and then under each corruption.

    Args:
        result: The run; its networks are back on the CPU when this returns.
        data: A split with labels; a regression's targets are floats.
        dense: The unpruned network to compare with, as a posterior of one member.
        disk: Bytes on disk by row name.
        corruptions: From :func:`dllp.data.corruptions.parse`; they need uint8 images.
        device: Where the networks run.
    """
    if data.is_classification != (result.config.task == "classification"):
        kind = "integer classes" if result.config.task == "classification" else "floating-point targets"
        raise DataError(f"the run is a {result.config.task} but the data's labels are not: give {kind}")
    versions = [(CLEAN, data), *((c.name, c.apply_to(data)) for c in corruptions)]
    rows = []
    for name, version in versions:
        if dense is not None:
            rows += _rows(dense, [DENSE], [result.dense], version, name, disk or {}, device)
        names = [f"particle {i + 1}" for i in range(len(result.posterior))]
        rows += _rows(result.posterior, names, result.sizes, version, name, disk or {}, device)
    return rows


def as_dict(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Plain values, ready for JSON."""
    return [asdict(row) for row in rows]


def _rows(
    posterior: Posterior, names: list[str], sizes: Sequence[Size], data: ArrayData, version: str,
    disk: Mapping[str, int], device: torch.device | str,
) -> list[Row]:  # fmt: skip
    """A row for each member and, where there are several, one for their mean."""
    members = _members(posterior, data, device)
    noise = posterior.noise.double().cpu()
    rows = [
        Row(name, version, _measure(member, data, float(variance)), size.macs, size.params, disk.get(name))
        for name, size, member, variance in zip(names, sizes, members, noise, strict=True)
    ]
    if len(rows) > 1:
        weights = [row.bytes for row in rows if row.bytes is not None]
        values = _together(members, data, float(noise.mean()))
        macs, params = sum(s.macs for s in sizes), sum(s.params for s in sizes)
        rows.append(Row(TOGETHER, version, values, macs, params, sum(weights) if len(weights) == len(rows) else None))
    return rows


def _members(posterior: Posterior, data: ArrayData, device: torch.device | str) -> torch.Tensor:
    """(n, B, C) predictions of every member."""
    posterior.to(device)
    try:
        parts = [posterior.members(data.inputs(slice(start, start + CHUNK))) for start in range(0, len(data), CHUNK)]
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        shape = tuple(data.x.shape[1:])
        raise DataError(
            f"the network cannot take inputs of shape {shape} ({reason}): give data as in training"
        ) from None
    finally:
        posterior.to("cpu")
    if not parts:
        raise DataError("there is nothing to evaluate on: the data is empty")
    members = torch.cat(parts, 1)
    broken = (~members.isfinite()).flatten(1).any(1).nonzero().flatten().tolist()
    if broken:
        raise DataError(f"network {broken[0] + 1} answers with numbers that are not finite: its weights are damaged")
    return members


def _measure(prediction: torch.Tensor, data: ArrayData, variance: float | torch.Tensor) -> dict[str, float]:
    """Metrics of one (B, C) prediction; without a positive noise variance a regression has no likelihood."""
    y = data.y.cpu()
    if data.is_classification:
        return metrics.summary(prediction, y)
    values = {"rmse": metrics.rmse(prediction, y)}
    if bool((torch.as_tensor(variance) > 0).all()):
        values["nll"] = metrics.gaussian_nll(prediction, variance, y)
    return values


def _together(members: torch.Tensor, data: ArrayData, noise: float) -> dict[str, float]:
    """Metrics of the members' mean, with what is noise and what is ignorance as means over the data (Section 8)."""
    if data.is_classification:
        doubt = decompose(members)
        return _measure(doubt.mean, data, noise) | {
            "aleatoric": float(doubt.aleatoric.mean()),
            "epistemic": float(doubt.epistemic.mean()),
            "mutual_information": float((metrics.entropy(doubt.mean) - metrics.entropy(members).mean(0)).mean()),
            "disagreement": metrics.disagreement(members),
        }
    mean = members.mean(0)
    doubt = Prediction(members, mean, torch.full_like(mean, noise), members.var(0, correction=0))
    values = {"aleatoric": noise, "epistemic": float(doubt.epistemic.mean())}
    return _measure(mean, data, doubt.total) | values
