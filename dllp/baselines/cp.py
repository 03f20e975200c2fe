"""Channel pruning (CP): a LASSO chooses the channels that rebuild the next layer, least squares give it new weights.

Equation: min over b of |Y - sum_c b_c X_c W_c|^2 / (2 N) + lambda |b|_1, lambda raised until enough channels are at 0;
then min over W' of |Y - sum_{c kept} X_c W'_c|^2, Y the dense network's output and X what the pruned one really feeds.
A unit's score is the largest lambda at which it is still chosen. The paper goes layer by layer, with shares set by
hand; here all layers are ranked on the dense network, and the weights are rebuilt from input to output.
Hyperparameters: images, with 10 places in each; the share, here the same for every layer and set by the budget; a ridge
of a tenth that draws the fit to the old weights. Units that only grouped convolutions read, or others than those of
images, are ranked by the l2 norm of their filters, and nothing is fitted there.
Published: VGG-16 on CIFAR-10, 0.32 points lost at 50% fewer FLOPs (as quoted by the DLLP paper's Table 2).
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from dllp.baselines.protocol import Published
from dllp.baselines.thinet import ThiNet, flat_weight, towards

STRENGTHS, FAINTEST = 30, 1e-4
"""Penalties along the LASSO's path, and the last of them over the first."""


@dataclass(frozen=True)
class ChannelPruning(ThiNet):
    """Units by the LASSO's path, the same share of every layer; what reads them gets new weights by least squares."""

    name = "cp"
    title = "channel pruning (CP)"
    paper = "He et al., Channel pruning for accelerating very deep neural networks"
    year = 2017
    published = (Published("vgg16_bn", 50, 0.32),)

    def order(self, shares: Tensor) -> Tensor:
        """(N, units) -> (units,): the largest penalty under which the LASSO of the full output still has the unit."""
        gram, target = shares.T @ shares / len(shares), shares.T @ shares.sum(1) / len(shares)
        strongest = target.abs().max()  # from here on every weight is 0
        penalties = strongest * torch.logspace(0, math.log10(FAINTEST), STRENGTHS, dtype=target.dtype)
        weights = lasso(gram, target, penalties)
        chosen, last = weights != 0, weights[:, -1].abs()
        largest = torch.where(chosen.any(1), penalties[chosen.int().argmax(1)], 0)
        # of those that enter together, the one with more weight at the end comes first; of those that never do, and
        # come after all others, the one that gives more
        late = 0.1 * FAINTEST * strongest * gram.diagonal() / gram.diagonal().max().clamp_min(1e-12)
        early = largest + 1e-9 * largest.max() * last / last.max().clamp_min(1e-12)
        return torch.where(largest > 0, early, late)

    @torch.no_grad()
    def fit(self, module: nn.Module, patches: Tensor, wanted: Tensor) -> None:
        """New weights for a layer, so that at places with `patches` (N, I, K) it gives what is `wanted` (N, O)."""
        old = flat_weight(module).flatten(1).double()
        new = towards(patches.flatten(1).double(), wanted.double(), old.T)
        weight: Tensor = module.weight  # type: ignore[assignment]
        weight.copy_(new.T.reshape(weight.shape))


def lasso(gram: Tensor, target: Tensor, penalties: Tensor) -> Tensor:
    """(units, penalties): argmin over b of b' gram b / 2 - b' target + penalty |b|_1, for falling penalties.

    The path is linear between the knots of least-angle regression.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import lars_path_gram

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a unit that others rebuild exactly is left out
        knots, _, weights = lars_path_gram(
            target.numpy(), gram.numpy(), n_samples=1, method="lasso",
            alpha_min=float(penalties[-1]),  # type: ignore[arg-type]
            max_iter=20 * len(target),
        )  # fmt: skip
    at = penalties.numpy()
    return torch.from_numpy(np.stack([np.interp(at, knots[::-1], path[::-1]) for path in weights]))
