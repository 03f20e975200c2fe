"""The Stein direction (equation 14): kernels, bandwidths, blocks, and the kernelized Stein discrepancy.

n particles are the rows of an (n, P) matrix. Columns fall into consecutive blocks with one kernel each:
k(a, b) = exp(-|a - b|^2 / h). Pairs i < j are listed in the order (0,1), (0,2), ..., (1,2), ...

:func:`direction` is equation 14, and is :func:`pair_weights` followed by :func:`combine`. A run on one device calls the
two by themselves, because the second is elementwise and is fused with the update (:mod:`dllp.method.update`).
Every reduction is deterministic. The temporaries are a few rows; where each coordinate has a kernel, as many as pairs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import torch
from torch import Tensor

Bandwidth = Literal["median", "paper"] | float

_block_norms = torch._foreach_norm  # pyright: ignore[reportPrivateImportUsage]

# With a kernel for each coordinate the discrepancy needs all pairs of a column at once: columns are taken in strips.
_STRIP = 1 << 22


@dataclass(frozen=True, eq=False)
class BlockIndex:
    """Consecutive blocks of columns, prepared once: their lengths and the block of every g columns, (P / g,).

    g is what all lengths are multiples of. `index` is None for a single block, which needs no look-up.
    """

    lengths: tuple[int, ...]
    index: Tensor | None


Blocks = BlockIndex | Sequence[int] | Literal["coordinate"] | None


def block_index(lengths: Sequence[int], device: torch.device | str | None = None) -> BlockIndex:
    """lengths (B,) -> BlockIndex over sum(lengths) columns; build it once, it copies from host to device."""
    lengths = tuple(lengths)
    if len(lengths) == 1:
        return BlockIndex(lengths, None)
    counts = torch.tensor(lengths) // math.gcd(*lengths)
    index = torch.repeat_interleave(torch.arange(len(lengths), dtype=torch.int32), counts)
    return BlockIndex(lengths, index.to(device))


def _indexed(blocks: BlockIndex | Sequence[int] | None, particles: Tensor) -> BlockIndex:
    if isinstance(blocks, BlockIndex):
        return blocks
    return block_index(particles.shape[1:] if blocks is None else blocks, particles.device)


def squared_distances(particles: Tensor, blocks: Blocks = None) -> Tensor:
    """(n, P) -> (n(n-1)/2, B): squared distance of every pair i < j in every block, in float32 or better."""
    x = _at_least_float32(particles)
    if blocks == "coordinate":
        return torch.stack([(x[i] - x[j]).square_() for i, j in _pairs(len(x))])
    lengths = _indexed(blocks, x).lengths
    # One multi-tensor norm for all blocks of a pair: a fixed order of summation, no atomics, few launches.
    norms = [torch.stack(_block_norms((x[i] - x[j]).split(lengths))) for i, j in _pairs(len(x))]
    return torch.stack(norms).square_()


def kernel(sq_dists: Tensor, h: Tensor | float) -> Tensor:
    """(...) -> (...): the radial basis function exp(-|a - b|^2 / h)."""
    return (-sq_dists / h).exp()


def median_bandwidth(sq_dists: Tensor) -> Tensor:
    """(n(n-1)/2, B) -> (B,): h = med^2 / log n, med the median of the distances over pairs i < j.

    For n = 2 the kernel is then 1/2 whatever the distance. Where the median is 0 (coinciding particles) h is 1:
    the kernel is 1 and the repulsion vanishes with the difference, so the direction stays finite. Close to that
    point the repulsion grows as 1 / distance: see `reach` of :func:`pair_weights`.
    """
    count = sq_dists.shape[0]
    particles = (1 + math.isqrt(1 + 8 * count)) // 2
    ordered = sq_dists.sort(dim=0).values
    median = 0.5 * (ordered[(count - 1) // 2].sqrt() + ordered[count // 2].sqrt())
    h = median.square() / math.log(particles)
    return torch.where(h > torch.finfo(h.dtype).tiny, h, torch.ones_like(h))


def bandwidths(sq_dists: Tensor, rule: Bandwidth) -> Tensor:
    """(n(n-1)/2, B) -> (B,): h by the `median` rule, a number, or `paper`: log 2 as Algorithm 1 prints it.

    In high dimension the kernel of the latter underflows to 0.
    """
    if rule == "median":
        return median_bandwidth(sq_dists)
    return sq_dists.new_full(sq_dists.shape[1:], math.log(2) if rule == "paper" else rule)


@torch.no_grad()
def direction(
    particles: Tensor, scores: Tensor, *, num_data: float = 1, bandwidth: Bandwidth = "median", blocks: Blocks = None,
    reach: Tensor | float = 0.0, own: range | None = None,
) -> Tensor:  # fmt: skip
    """(n, P), (n, P) -> (n, P): phi_i = (1/n) sum_j [k(x_j, x_i) s_j + (1/N) grad_{x_j} k(x_j, x_i)].

    Exactly :func:`combine` with the weights of :func:`pair_weights`, computed and returned in float32 or better.

    Args:
        particles: One particle in each row.
        scores: Gradients of the mean log-posterior l; the target is exp(N l).
        num_data: N. With 1 and the scores of a log density this is the textbook direction of equation 14.
        bandwidth: `median`, `paper` or a number.
        blocks: None for one kernel, lengths or a BlockIndex for one kernel in each block, or `coordinate`.
        reach: As for :func:`pair_weights`.
        own: The rows to compute and return; all by default.
    """
    x, s = _at_least_float32(particles), _at_least_float32(scores)
    if len(x) == 1:  # k = 1 and no repulsion
        return s.clone()
    if blocks != "coordinate":
        blocks = _indexed(blocks, x)
    weights = pair_weights(x, num_data=num_data, bandwidth=bandwidth, blocks=blocks, reach=reach)
    return combine(x, s, *weights, blocks.index if isinstance(blocks, BlockIndex) else None, own)


def pair_weights(
    particles: Tensor, *, num_data: float = 1, bandwidth: Bandwidth = "median", blocks: Blocks = None,
    reach: Tensor | float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(n, P), n > 1 -> k/n and 2k/(hNn), (pairs, B) each: how much a pair shares its scores, how hard it repels.

    The first half of :func:`direction`. `reach` is a squared distance, of :func:`step_reach`: bandwidths see no pair
    closer than that.
    """
    sq_dists = squared_distances(particles, blocks)
    h = bandwidths(sq_dists.clamp_min(reach), bandwidth)
    attraction = kernel(sq_dists, h) / len(particles)
    return attraction, attraction * (2 / num_data) / h


def step_reach(rate: Tensor | float, particles: int, num_data: float) -> Tensor | float:
    """Squared distance at which one step of size `rate` along the repulsion doubles that distance: rate log n / N.

    By the median rule two particles repel each other by log 2 / (2 N distance). An explicit step from much nearer would
    throw them apart, without bound where they nearly coincide, as in scalars and new norms in which all of them begin
    alike; along the flow itself the squared distance only grows by 2 rate log 2 / N.
    """
    return rate * (math.log(particles) / num_data)


def combine(
    x: Tensor, s: Tensor, attraction: Tensor, repulsion: Tensor, index: Tensor | None, own: range | None = None
) -> Tensor:
    """(n, P), (n, P), (pairs, B), (pairs, B) -> (n, P): phi, accumulated pair by pair; elementwise only.

    The second half of :func:`direction`, with the weights of :func:`pair_weights`.
    `index` (P / g,) gives the block of every g columns, None where the weights are one for all or one for each column.
    With `own` only the rows in that range are computed and returned.
    """
    own = range(len(x)) if own is None else own
    phi = list((s / len(x)).unbind(0))
    for pair, (i, j) in enumerate(_pairs(len(x))):
        if i not in own and j not in own:
            continue
        k, w = attraction[pair], repulsion[pair]
        if index is not None:
            k, w = (_at_columns(values, index, x.shape[1]) for values in (k, w))
        # grad_{x_j} k(x_j, x_i) = (2 / h) k (x_i - x_j): away from the other particle, for both of them. As a
        # difference, not as the matrix form's diag(K1) X - K X, which cancels for particles close to each other.
        push = (x[i] - x[j]) * w
        phi[i] = phi[i] + k * s[j] + push
        phi[j] = phi[j] + k * s[i] - push
    return torch.stack(phi[own.start : own.stop])


def _at_columns(values: Tensor, index: Tensor, columns: int) -> Tensor:
    """(B,) values of blocks -> (P,), each at its columns."""
    return values.index_select(0, index)[:, None].expand(-1, columns // len(index)).reshape(columns)


@torch.no_grad()
def kernelized_discrepancy(
    particles: Tensor, scores: Tensor, *, num_data: float = 1, bandwidth: Bandwidth = "median", blocks: Blocks = None
) -> Tensor:
    """(n, P), (n, P) -> (): squared kernelized Stein discrepancy between the particles and exp(N l).

    The V-statistic, a mean over all pairs i, j, summed over blocks; at least two particles are needed.
    """
    x, s = _at_least_float32(particles), _at_least_float32(scores) * num_data
    if blocks == "coordinate":
        width = max(1, _STRIP // len(x) ** 2)
        columns = zip(x.T[:, :, None].split(width), s.T[:, :, None].split(width), strict=True)
    else:
        lengths = _indexed(blocks, x).lengths
        columns = zip(x[None].split(lengths, 2), s[None].split(lengths, 2), strict=True)
    return torch.stack([_stein_kernel_mean(a, b, bandwidth).sum() for a, b in columns]).sum()


def _stein_kernel_mean(x: Tensor, s: Tensor, bandwidth: Bandwidth) -> Tensor:
    """(B, n, D), (B, n, D) -> (B,): mean of the Stein kernel over pairs of particles, for B blocks of equal length.

    u(x, y) = k [ s_x.s_y + (2/h)(s_x - s_y).(x - y) + 2D/h - 4|x - y|^2/h^2 ].
    """
    n, width = x.shape[1:]
    square = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist").square()
    first, second = torch.triu_indices(n, n, 1, device=x.device)
    h = bandwidths(square[:, first, second].T, bandwidth)[:, None, None]
    cross = s @ x.mT
    own = cross.diagonal(dim1=1, dim2=2)
    drift = own[:, :, None] + own[:, None, :] - cross - cross.mT
    return (kernel(square, h) * (s @ s.mT + (2 / h) * drift + 2 * width / h - 4 * square / h**2)).mean((1, 2))


def _pairs(n: int) -> list[tuple[int, int]]:
    return list(combinations(range(n), 2))


def _at_least_float32(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))
