"""How good a run is, and how far to trust it: every network of it on clean, corrupted and foreign data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from dllp.api import Result
from dllp.data import ArrayData
from dllp.data.corruptions import Corruption
from dllp.devices.torch_context import undisturbed
from dllp.errors import DataError
from dllp.evaluation import metrics
from dllp.method import efficiency, likelihood
from dllp.posterior import Posterior, decompose, posterior_of
from dllp.records import Size

CLEAN, OUTSIDE = "clean", "ood:"
DENSE, TOGETHER, REFERENCES, DRAWN = "dense", "all particles", "all references", "drawn gates"


@dataclass(frozen=True)
class Row:
    """One network, or all particles together, on one version of the data.

    Attributes:
        name: `dense`, `particle K` or `all particles`; `reference K` and `all references` before extraction; `drawn
            gates` for all networks with gates drawn anew.
        data: `clean`, the corruption's name, or `ood:NAME` for inputs from elsewhere.
        metrics: Single numbers by name: accuracy, nll, ece, ...; for regression rmse and nll; for inputs from
            elsewhere auroc and fpr95.
        macs, params, bytes: What it costs; all particles together cost the sum. None where unknown.
    """

    name: str
    data: str
    metrics: dict[str, float]
    macs: float | None = None
    params: int | None = None
    bytes: int | None = None


@dataclass(frozen=True)
class Efficiency:
    """Estimation efficiency on one version of the data (docs/method/efficiency), for one class or output.

    Attributes:
        data: As in :class:`Row`.
        s2, a2, b2: Observation noise (of the clean data), model variance, and the noise that a corruption adds.
        one, together: e of one network, a point estimate, and of all n particles; 1 where there is no variance.
        particles: n.
    """

    data: str
    s2: float
    a2: float
    b2: float
    one: float
    together: float
    particles: int


@dataclass(frozen=True)
class Evaluation:
    """Everything that was measured.

    Attributes:
        rows: The table.
        efficiency: One entry for each version of the labelled data; none for a single particle.
        curves: What plots of a classifier show: for each row of the labelled data `name`, `data`, the `reliability`
            diagram's bins and the `risk_coverage` curve.
    """

    rows: list[Row] = field(default_factory=list)
    efficiency: list[Efficiency] = field(default_factory=list)
    curves: list[dict[str, Any]] = field(default_factory=list)

    def besides(self) -> dict[str, Any]:
        """All but the rows as plain values, ready for JSON."""
        return {"efficiency": [asdict(entry) for entry in self.efficiency], "curves": self.curves}


def table(result: Result, data: ArrayData, dense: Posterior | None = None, **options: Any) -> list[Row]:
    """The rows of :func:`measure`, which takes the same arguments."""
    return measure(result, data, dense, **options).rows


@undisturbed()
def measure(
    result: Result,
    data: ArrayData,
    dense: Posterior | None = None,
    *,
    disk: Mapping[str, int] | None = None,
    corruptions: Iterable[Corruption] = (),
    outside: Mapping[str, ArrayData] | None = None,
    references: bool = False,
    drawn: Posterior | None = None,
    device: torch.device | str = "cpu",
) -> Evaluation:
    """Evaluate a run on labelled data, clean first and then under each corruption, and on inputs from elsewhere.

    Args:
        result: The run; its networks are back on the CPU when this returns.
        data: A split with labels; a regression's targets are floats.
        dense: The unpruned network to compare with, as a posterior of one member.
        disk: Bytes on disk by row name.
        corruptions: From :func:`dllp.data.corruptions.parse`; they need uint8 images.
        outside: Inputs from elsewhere by name, see :mod:`dllp.data.ood`.
        references: Also measure M_0, the particles before extraction.
        drawn: Also measure these networks, together, see :func:`dllp.sample_gates`.
        device: Where the networks run.
    """
    if data.is_classification != (result.config.task == "classification"):
        kind = "integer classes" if result.config.task == "classification" else "floating-point targets"
        raise DataError(f"the run is a {result.config.task} but the data's labels are not: give {kind}")
    n, known = len(result.posterior), disk or {}
    groups = [_Group(result.posterior, [f"particle {i + 1}" for i in range(n)], TOGETHER, result.sizes, known)]
    if references:
        whole = posterior_of(
            [particle.reference for particle in result.particles], result.posterior.noise, result.config
        )
        names = [f"reference {i + 1}" for i in range(n)]
        groups.insert(0, _Group(whole, names, REFERENCES, [result.dense] * n, known))
    if drawn is not None:
        groups.append(_Group(drawn, [], DRAWN, [result.dense] * len(drawn), known))
    if dense is not None:
        groups.insert(0, _Group(dense, [DENSE], "", [result.dense], known))
    found = Evaluation()
    clean: dict[str, _Answers] = {}
    components: efficiency.Components | None = None
    versions = [(CLEAN, data), *((c.name, c.apply_to(data)) for c in corruptions)]
    for name, version in versions:
        for group in groups:
            answers = _Answers(*_ask(group.posterior, version, device), group)
            if name == CLEAN:
                clean[group.together] = answers
            found.rows.extend(answers.rows(version, name))
            if data.is_classification:
                found.curves.extend(answers.curves(version.y.cpu(), name))
            if group.together == TOGETHER and n > 1:
                here = efficiency.estimate_components(answers.members.double(), version.y.cpu())
                components = components or here
                found.efficiency.append(_efficiency(name, components, here, n))
    for name, inputs in (outside or {}).items():
        for group in groups:
            answers = _Answers(*_ask(group.posterior, inputs, device), group)
            found.rows.extend(answers.outside(clean[group.together], OUTSIDE + name))
    return found


def as_dict(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Plain values, ready for JSON."""
    return [asdict(row) for row in rows]


@dataclass(frozen=True)
class _Group:
    """Networks that are measured one by one, as far as they have names, and together where there are several."""

    posterior: Posterior
    names: list[str]
    together: str
    sizes: Sequence[Size]
    disk: Mapping[str, int]


@dataclass(frozen=True)
class _Answers:
    """(n, B, C) predictions and (n, B) noise of a group on one version of the data."""

    members: Tensor
    noise: Tensor
    group: _Group

    @property
    def several(self) -> bool:
        return bool(self.group.together) and len(self.members) > len(self.group.names[:1])

    def rows(self, data: ArrayData, version: str) -> list[Row]:
        """A row for each member and, where there are several, one for their mean."""
        pairs = zip(self.members, self.noise, strict=True)
        alone = [_measure(m, v, data) for (m, v), _ in zip(pairs, self.group.names, strict=False)]
        together = _together(self.group.posterior, self.members, self.noise, data) if self.several else None
        return self._costed(alone, together, version)

    def outside(self, inside: _Answers, version: str) -> list[Row]:
        """How well doubt sets these inputs, from elsewhere, apart from those `inside`."""
        ones = [slice(i, i + 1) for i in range(len(self.group.names))]
        alone = [_separation(self._doubt(one), inside._doubt(one)) for one in ones]
        everyone = slice(None)
        together = _separation(self._doubt(everyone), inside._doubt(everyone)) if self.several else None
        return self._costed(alone, together, version)

    def curves(self, labels: Tensor, version: str) -> list[dict[str, Any]]:
        """Plots' data of each member and of their mean."""
        named = list(zip(self.group.names, self.members, strict=False))
        if self.several:
            named.append((self.group.together, self.members.mean(0)))
        return [
            {
                "name": name, "data": version, "reliability": metrics.reliability(p, labels),
                "risk_coverage": metrics.risk_coverage(p, labels),
            }
            for name, p in named
        ]  # fmt: skip

    def _doubt(self, which: slice) -> dict[str, Tensor]:
        if self.group.posterior.task == "classification":
            return _doubt(self.members[which])
        if self.noise[which].isnan().any():  # a network that was given says nothing of its noise
            return {}
        return {"": self.group.posterior.judge(self.members[which], self.noise[which]).total.mean(1)}

    def _costed(self, alone: Sequence[dict[str, float]], together: dict[str, float] | None, version: str) -> list[Row]:
        group = self.group
        rows = [
            Row(name, version, values, size.macs, size.params, group.disk.get(name))
            for name, size, values in zip(group.names, group.sizes, alone, strict=False)
        ]
        if together is not None:
            macs, params = sum(s.macs for s in group.sizes), sum(s.params for s in group.sizes)
            weights = [row.bytes for row in rows if row.bytes is not None]
            total = sum(weights) if weights and len(weights) == len(rows) else None
            rows.append(Row(group.together, version, together, macs, params, total))
        return rows


def _ask(posterior: Posterior, data: ArrayData, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """(n, B, C) predictions of every member and (n, B) noise."""
    posterior.to(device)
    try:
        parts = [posterior.answers(x) for x in data.parts()]
    finally:
        posterior.to("cpu")
    if not parts:
        raise DataError("there is nothing to evaluate on: the data is empty")
    members, noise = (torch.cat(pieces, 1) for pieces in zip(*parts, strict=True))
    broken = (~members.isfinite()).flatten(1).any(1).nonzero().flatten().tolist()
    if broken:
        raise DataError(f"network {broken[0] + 1} answers with numbers that are not finite: its weights are damaged")
    return members, noise


def _measure(prediction: Tensor, variance: Tensor, data: ArrayData) -> dict[str, float]:
    """Metrics of one (B, C) prediction; without a positive noise variance a regression has no likelihood."""
    y = data.y.cpu()
    if data.is_classification:
        return classified(prediction[None], y)
    values = {"rmse": metrics.rmse(prediction, y)}
    if bool((variance > 0).all()):
        values["nll"] = metrics.gaussian_nll(prediction, variance.view(len(y), -1), y)
    return values | likelihood.fitted(values["rmse"] ** 2, prediction.shape[1])


def _together(posterior: Posterior, members: Tensor, noise: Tensor, data: ArrayData) -> dict[str, float]:
    """Metrics of the members' mean, with what is noise and what is ignorance as means over the data (Section 8)."""
    if data.is_classification:
        return classified(members, data.y.cpu())
    doubt = posterior.judge(members, noise)
    values = {"aleatoric": float(doubt.aleatoric.mean()), "epistemic": float(doubt.epistemic.mean())}
    return _measure(doubt.mean, doubt.total, data) | values


def classified(members: Tensor, labels: Tensor) -> dict[str, float]:
    """(n, B, C) probabilities, (B,) -> every figure of their mean, and of several what they differ in, in float64."""
    exact = members.double()
    doubt = decompose(exact)
    values = metrics.summary(doubt.mean, labels) | {"aleatoric": float(doubt.aleatoric.mean())}
    values |= likelihood.fitted(values["brier"] / exact.shape[2], exact.shape[2])
    if len(exact) > 1 and doubt.mutual_information is not None:
        values |= {
            "epistemic": float(doubt.epistemic.mean()),
            "mutual_information": float(doubt.mutual_information.mean()),
            "disagreement": metrics.disagreement(exact),
        }
    return values


def separated(outside: Tensor, inside: Tensor) -> dict[str, float]:
    """(n, M, C) and (n, B, C) probabilities -> AUROC and FPR95 of the doubt about inputs from elsewhere."""
    return _separation(_doubt(outside), _doubt(inside))


def _doubt(members: Tensor) -> dict[str, Tensor]:
    """(n, B, C) -> (B,) scores that should be large for inputs from elsewhere; the first is the usual one."""
    found = decompose(members.double())
    scores = {"": metrics.entropy(found.mean)}
    if len(members) > 1 and found.mutual_information is not None:
        scores["_mutual_information"] = found.mutual_information
    return scores


def _separation(outside: Mapping[str, Tensor], inside: Mapping[str, Tensor]) -> dict[str, float]:
    """AUROC and FPR95 of every score."""
    values = {}
    for name, scores in outside.items():
        values[f"auroc{name}"] = metrics.auroc(inside[name], scores)
        values[f"fpr95{name}"] = metrics.fpr95(inside[name], scores)
    return values


def _efficiency(name: str, clean: efficiency.Components, here: efficiency.Components, n: int) -> Efficiency:
    s2, a2, b2 = map(float, efficiency.variances(here, clean))
    one, together = (float(efficiency.efficiency(s2, a2, b2, count)) for count in (1, n))
    return Efficiency(name, s2, a2, b2, one, together, n)
