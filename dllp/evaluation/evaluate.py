"""Metrics of a run, per particle and for the ensemble, on clean, corrupted and out-of-distribution data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from dllp.api import Result
from dllp.data import ArrayData, LabelledBatches
from dllp.data.corruptions import Corruption
from dllp.devices.device import undisturbed
from dllp.errors import DataError
from dllp.evaluation import metrics
from dllp.method import efficiency, likelihood
from dllp.posterior import (
    Posterior,
    PredictedData,
    class_entropy,
    decompose,
    posterior_of,
    predict_data,
    predict_unlabelled,
)
from dllp.records import Size

CLEAN, OOD = "clean", "ood:"
DENSE, TOGETHER, REFERENCES, DRAWN = "dense", "all particles", "all references", "drawn gates"
BEFORE = "before fine-tuning"  # the row of another method's network as it was cut


@dataclass(frozen=True)
class Row:
    """One network, or the ensemble, on one version of the data; costs of an ensemble are sums, None where unknown.

    Its name is `dense`, `particle K` or `all particles`; `reference K` and `all references` before extraction; `drawn
    gates` for all networks with gates drawn anew.
    """

    name: str
    data: str  # `clean`, the corruption's name, or `ood:NAME` for out-of-distribution inputs
    metrics: dict[str, float]  # accuracy, nll, ece, ...; of a regression rmse and nll; of OOD inputs auroc and fpr95
    macs: float | None = None
    params: int | None = None
    bytes: int | None = None


@dataclass(frozen=True)
class Efficiency:
    """Estimation efficiency on one version of the data (docs/method/efficiency), for one class or output."""

    data: str  # as in :class:`Row`
    s2: float  # observation noise of the clean data
    a2: float  # model variance
    b2: float  # the noise that a corruption adds
    one: float  # e of one network, a point estimate; 1 where there is no variance
    together: float  # e of the ensemble
    particles: int  # their number n


@dataclass(frozen=True)
class Evaluation:
    """Everything that was measured.

    Curves are those of a classifier: `name`, `data`, the `reliability` diagram's bins and the `risk_coverage` curve for
    each row of the labelled data. Clean predictions are by group: `dense`, `all particles`, `all references`, ...
    """

    rows: list[Row] = field(default_factory=list)
    efficiency: list[Efficiency] = field(default_factory=list)  # none for a single particle
    curves: list[dict[str, Any]] = field(default_factory=list)
    clean: dict[str, PredictedData] = field(default_factory=dict)

    def __repr__(self) -> str:
        """The rows, a line for each: the data, the network, its main metrics and what it costs."""
        shown = ("accuracy", "rmse", "nll", "ece", "auroc", "fpr95")
        lines = []
        for row in self.rows:
            values = [f"{name} {row.metrics[name]:.4f}" for name in shown if name in row.metrics]
            costs = [] if row.macs is None else [f"{row.macs:,.0f} MACs"]
            lines.append(f"{row.data:<12} {row.name:<14} {'  '.join([*values, *costs])}")
        return "\n".join(lines)

    def besides(self) -> dict[str, Any]:
        """Plain values that JSON files hold beside the rows."""
        return {"efficiency": [asdict(entry) for entry in self.efficiency], "curves": self.curves}


def dense_posterior(result: Result) -> Posterior | None:
    """The dense network of a run as a posterior of one member; None where it has none."""
    if result.original is None:
        return None
    noise = result.info.get("dense_noise", torch.nan)
    return posterior_of([result.original], torch.tensor([noise]), result.config, result.posterior.select)


@undisturbed()
def measure(
    result: Result, data: ArrayData | LabelledBatches, dense: Posterior | None = None, *,
    disk: Mapping[str, int] | None = None, corruptions: Iterable[Corruption] = (),
    ood: Mapping[str, ArrayData | LabelledBatches] | None = None, references: bool = False,
    drawn: Posterior | None = None, device: torch.device | str = "cpu",
) -> Evaluation:  # fmt: skip
    """Evaluate a run on labelled data, clean first and then under each corruption, and on out-of-distribution inputs.

    Every network predicts every version of the data once, and is back on the CPU when this returns.

    Args:
        dense: The unpruned network to compare with, as a posterior of one member.
        disk: Bytes on disk by row name.
        ood: Out-of-distribution inputs by name, see :mod:`dllp.data.ood`.
        references: Also measure M_0, the particles before extraction.
        drawn: Also measure the ensemble of these networks, see :func:`dllp.sample_gates`.
    """
    task, classifies = result.config.task, result.config.task != "regression"
    soft = not data.is_classification and data.y.shape[1] > 1
    if data.is_classification == (task == "regression") and task != "binary" and not (classifies and soft):
        kind = "integer classes" if classifies else "floating-point targets"
        raise DataError(f"the run is a {result.config.task} but the data's labels are not: give {kind}")
    n, found = len(result.posterior), Evaluation()
    components: efficiency.Components | None = None
    groups = _groups(result, dense, drawn, references, disk or {})
    versions: list[tuple[str, ArrayData | LabelledBatches]] = [(CLEAN, data)]
    if isinstance(data, ArrayData):
        versions += [(c.name, c.apply_to(data)) for c in corruptions]
    for version, here in versions:
        for group in groups:
            predicted = predict_data(group.posterior, here, device)
            if version == CLEAN:
                found.clean[group.name] = predicted
            for row, part in group.rows:
                found.rows.append(replace(row, data=version, metrics=_metrics(group.posterior, predicted.of(part))))
                if classifies:
                    sure = metrics.confidence(predicted.members[part].mean(0), predicted.labels)
                    curves = {"reliability": metrics.reliability(*sure), "risk_coverage": metrics.risk_coverage(*sure)}
                    found.curves.append({"name": row.name, "data": version, **curves})
            if group.name == TOGETHER and n > 1:
                measured = efficiency.estimate_components(predicted.members.double(), predicted.labels)
                components = components or measured
                s2, a2, b2 = map(float, efficiency.variances(measured, components))
                one, ensemble = (float(efficiency.efficiency(s2, a2, b2, count)) for count in (1, n))
                found.efficiency.append(Efficiency(version, s2, a2, b2, one, ensemble, n))
    for name, inputs in (ood or {}).items():
        for group in groups:
            predicted, clean = predict_unlabelled(group.posterior, inputs, device), found.clean[group.name]
            for row, part in group.rows:
                outside, inside = (_uncertainty(group.posterior, each.of(part)) for each in (predicted, clean))
                found.rows.append(replace(row, data=OOD + name, metrics=separation(outside, inside)))
    return found


@dataclass(frozen=True)
class _Group:
    """A posterior, and its rows: names and costs, each with the members that it is about."""

    name: str
    posterior: Posterior
    rows: list[tuple[Row, slice]]


def _groups(
    result: Result, dense: Posterior | None, drawn: Posterior | None, references: bool, disk: Mapping[str, int]
) -> list[_Group]:
    """Everything to be measured, in the order of the table."""

    def group(name: str, posterior: Posterior, singles: Sequence[str], sizes: Sequence[Size]) -> _Group:
        """Rows of single networks, and one of the ensemble where there are several, or none has a name."""
        alone = [Row(n, "", {}, s.macs, s.params, disk.get(n)) for n, s in zip(singles, sizes, strict=False)]
        rows = [(row, slice(i, i + 1)) for i, row in enumerate(alone)]
        if len(posterior) > 1 or not singles:
            known = [row.bytes for row in alone if row.bytes is not None]
            total = sum(known) if known and len(known) == len(alone) else None
            ensemble = Row(name, "", {}, sum(s.macs for s in sizes), sum(s.params for s in sizes), total)
            rows.append((ensemble, slice(None)))
        return _Group(name, posterior, rows)

    numbers, groups = range(1, len(result.posterior) + 1), []
    if dense is not None:
        groups.append(group(DENSE, dense, [DENSE], [result.dense]))
    if references:
        networks = [particle.reference for particle in result.particles]
        whole = posterior_of(networks, result.posterior.noise, result.config, result.posterior.select)
        groups.append(group(REFERENCES, whole, [f"reference {i}" for i in numbers], [result.dense] * len(networks)))
    groups.append(group(TOGETHER, result.posterior, [f"particle {i}" for i in numbers], result.sizes))
    if drawn is not None:
        groups.append(group(DRAWN, drawn, [], [result.dense] * len(drawn)))
    return groups


def _metrics(posterior: Posterior, predicted: PredictedData) -> dict[str, float]:
    """Metrics of the members' mean; without a positive noise variance a regression has no likelihood."""
    members, y = predicted.members, predicted.labels
    if posterior.task != "regression":
        values = classified(members, y)
        return values | {"perplexity": math.exp(min(values["nll"], 700))} if predicted.per_position else values
    found = posterior.judge(members, predicted.noise)
    values = {"rmse": metrics.rmse(found.mean, y)}
    if bool((found.total > 0).all()):
        values["nll"] = metrics.gaussian_nll(found.mean, found.total, y)
    values |= likelihood.fitted(values["rmse"] ** 2, members.shape[2])
    if len(members) > 1:
        values |= {"aleatoric": float(found.aleatoric.mean()), "epistemic": float(found.epistemic.mean())}
    return values


def classified(members: Tensor, labels: Tensor) -> dict[str, float]:
    """(n, B, C) probabilities, (B,) -> metrics of their mean, and of several their disagreement, in float64."""
    exact = members.double()
    found = decompose(exact)
    values = metrics.summary(found.mean, labels) | {"aleatoric": float(found.aleatoric.mean())}
    values |= likelihood.fitted(values["brier"] / exact.shape[2], exact.shape[2])
    if len(exact) > 1 and found.mutual_information is not None:
        values["epistemic"] = float(found.epistemic.mean())
        values["mutual_information"] = float(found.mutual_information.mean())
        values["disagreement"] = metrics.disagreement(exact)
    return values


def class_uncertainty(members: Tensor) -> dict[str, Tensor]:
    """(n, B, C) -> (B,) scores that should be large for out-of-distribution inputs; the first is the usual one."""
    found = decompose(members.double())
    scores = {"": class_entropy(found.mean)}
    if len(members) > 1 and found.mutual_information is not None:
        scores["_mutual_information"] = found.mutual_information
    return scores


def _uncertainty(posterior: Posterior, predicted: PredictedData) -> dict[str, Tensor]:
    if posterior.task != "regression":
        return class_uncertainty(predicted.members)
    if predicted.noise.isnan().any():  # of a network that was given the noise is unknown
        return {}
    return {"": posterior.judge(predicted.members, predicted.noise).total.mean(1)}


def separation(outside: Mapping[str, Tensor], inside: Mapping[str, Tensor]) -> dict[str, float]:
    """Scores of out-of-distribution (M,) and of clean inputs (B,) -> AUROC and FPR95 of each."""
    values = {}
    for name, scores in outside.items():
        values[f"auroc{name}"] = metrics.auroc(inside[name], scores)
        values[f"fpr95{name}"] = metrics.fpr95(inside[name], scores)
    return values
