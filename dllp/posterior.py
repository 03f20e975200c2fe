"""Predictions of the extracted particles: their mean, and how much of the doubt is noise or ignorance (Section 8)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Prediction:
    """Everything about B inputs that n forward passes tell; fields are (B, ...) tensors.

    Classification: `members` (n, B, C) probabilities, `mean` (B, C), `aleatoric` E_i[sum_c p(1-p)], `epistemic`
    sum_c Var_i[p] (population variance), `total` their sum, `expected_entropy` + `mutual_information` = `entropy`.
    Regression: `members` and `mean` are outputs, `aleatoric` (B, C) is the likelihood's 1/d^2, the entropies None.
    """

    members: Tensor
    mean: Tensor
    aleatoric: Tensor
    epistemic: Tensor
    entropy: Tensor | None = None
    expected_entropy: Tensor | None = None
    mutual_information: Tensor | None = None

    @property
    def total(self) -> Tensor:
        """Law of total variance: what is noise plus what is ignorance."""
        return self.aleatoric + self.epistemic


class Posterior:
    """n extracted networks that predict together, with the likelihood's noise variance 1/d^2 of each."""

    def __init__(
        self, networks: Sequence[nn.Module], noise: Tensor,
        task: Literal["classification", "regression"] = "classification",
    ) -> None:  # fmt: skip
        self.networks, self.noise, self.task = list(networks), noise, task

    def __len__(self) -> int:
        return len(self.networks)

    def to(self, device: torch.device | str) -> Posterior:
        """Move every network; returns itself."""
        for network in self.networks:
            network.to(device)
        return self

    @torch.no_grad()
    def members(self, x: Tensor, batch_size: int = 512) -> Tensor:
        """(B, ...) inputs -> (n, B, C) probabilities (classification) or outputs (regression), on the CPU."""
        answers = []
        for network in self.networks:
            device = next(network.parameters()).device
            outputs = [network(part.to(device)).float().flatten(1).cpu() for part in x.split(batch_size)]
            answers.append(torch.cat(outputs))
        stacked = torch.stack(answers)
        return stacked.softmax(-1) if self.task == "classification" else stacked

    def predict(self, x: Tensor, batch_size: int = 512) -> Prediction:
        """(B, ...) inputs -> their :class:`Prediction`, at the cost of n forward passes."""
        members = self.members(x, batch_size)
        if self.task == "classification":
            return decompose(members)
        mean = members.mean(0)
        noise = self.noise.float().mean().cpu()
        return Prediction(members, mean, noise.expand_as(mean), members.var(0, correction=0))


def decompose(members: Tensor) -> Prediction:
    """(n, B, C) probabilities -> mean, and doubt split into aleatoric and epistemic, in variance and entropy form."""
    mean = members.mean(0)
    entropy = _entropy(mean)
    expected = _entropy(members).mean(0)
    return Prediction(
        members,
        mean,
        aleatoric=(members * (1 - members)).sum(-1).mean(0),
        epistemic=members.var(0, correction=0).sum(-1),
        entropy=entropy,
        expected_entropy=expected,
        mutual_information=entropy - expected,
    )


def _entropy(p: Tensor) -> Tensor:
    """(..., C) -> (...) in nats, with 0 log 0 = 0."""
    return torch.special.entr(p).sum(-1)
