"""Accuracy, calibration and out-of-distribution metrics of probabilities (B, C) and labels (B,), in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dllp.errors import DataError
from dllp.posterior import class_entropy

BINS = 15
TEMPERATURES = 1e-2, 1e2
SMALLEST = 1e-38  # probabilities below this count as this, so that one underflow does not make a mean infinite


def accuracy(probabilities: Tensor, labels: Tensor) -> float:
    """Fraction of labels that have the largest probability."""
    p, y = _checked(probabilities, labels)
    return float((p.argmax(1) == y).double().mean())


def nll(probabilities: Tensor, labels: Tensor) -> float:
    """Mean negative log-likelihood, in nats."""
    p, y = _checked(probabilities, labels)
    return -float(p[torch.arange(len(y)), y].clamp_min(SMALLEST).log().mean())


def brier(probabilities: Tensor, labels: Tensor) -> float:
    """Mean over inputs of the squared error summed over classes, in [0, 2]."""
    p, y = _checked(probabilities, labels)
    return float((p - torch.nn.functional.one_hot(y, p.shape[1])).square().sum(1).mean())


def ece(probabilities: Tensor, labels: Tensor, bins: int = BINS) -> float:
    """Expected calibration error: mean |confidence - accuracy| over the bins of :func:`reliability`."""
    found = reliability(*confidence(probabilities, labels), bins)
    parts = zip(found["confidence"], found["accuracy"], found["share"], strict=True)
    return math.fsum(share * abs(mean - right) for mean, right, share in parts)


def signed_ece(probabilities: Tensor, labels: Tensor) -> float:
    """Mean confidence minus accuracy: positive is overconfident. The signed sum over bins is this for any bins."""
    p, y = _checked(probabilities, labels)
    return float(p.amax(1).mean()) - accuracy(p, y)


def aurc(probabilities: Tensor, labels: Tensor) -> float:
    """Area under the risk-coverage curve: mean error rate of the k most confident inputs, over k = 1..B."""
    return float(selective_risk(*confidence(probabilities, labels)).mean())


def confidence(probabilities: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """(B, C), (B,) -> (B,) largest probability, and (B,) bool: the class that has it is the label."""
    p, y = _checked(probabilities, labels)
    largest, predicted = p.max(1)
    return largest, predicted == y


def selective_risk(confidence: Tensor, correct: Tensor) -> Tensor:
    """(B,), (B,) -> (B,) error rates of the k most confident inputs; equally confident ones share their errors."""
    _, group = confidence.unique(return_inverse=True)
    count = torch.bincount(group)
    shared = torch.zeros(len(count), dtype=torch.float64).index_add_(0, group, (~correct).double()) / count
    errors = shared[group[confidence.argsort(descending=True)]].cumsum(0)
    return errors / torch.arange(1, len(correct) + 1)


def reliability(confidence: Tensor, correct: Tensor, bins: int = BINS) -> dict[str, list[float]]:
    """(B,), (B,) -> mean confidence, accuracy and share of the inputs of every bin of equal width that holds any.

    A confidence on an edge belongs to the bin above, and 1, to which float32 often rounds, to the last bin.
    """
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64)
    bin_of = (torch.bucketize(confidence.double(), edges, right=True) - 1).clamp(0, bins - 1)
    count = torch.bincount(bin_of, minlength=bins)
    held = count > 0

    def mean(values: Tensor) -> list[float]:
        return (torch.zeros(bins, dtype=torch.float64).index_add_(0, bin_of, values.double()) / count)[held].tolist()

    share = count[held].double() / len(confidence)
    return {"confidence": mean(confidence), "accuracy": mean(correct), "share": share.tolist()}


def risk_coverage(confidence: Tensor, correct: Tensor, points: int = 100) -> dict[str, list[float]]:
    """Error rate of the most confident fraction of the inputs, for up to `points` fractions; its mean is the AURC."""
    risk = selective_risk(confidence, correct)
    at = torch.linspace(0, len(risk) - 1, min(points, len(risk)), dtype=torch.float64).round().long()
    return {"coverage": ((at + 1).double() / len(risk)).tolist(), "risk": risk[at].tolist()}


def auroc(inside: Tensor, outside: Tensor) -> float:
    """Probability that an out-of-distribution score (M,) exceeds an in-distribution one (N,); ties count half."""
    scores = torch.cat([inside, outside])
    values, rank = scores.unique(return_inverse=True)
    counts = [torch.bincount(part, minlength=len(values)) for part in rank.split([inside.numel(), outside.numel()])]
    # positives from the highest score down; in float32, so that published results keep their last digits
    false, true = (torch.cat([count.new_zeros(1), count.flip(0).cumsum(0)]) / count.sum() for count in counts)
    return float(torch.trapezoid(true, false))


def fpr95(inside: Tensor, outside: Tensor) -> float:
    """Fraction of out-of-distribution scores below the threshold that lets 95% of the in-distribution ones pass."""
    threshold = inside.sort().values[math.ceil(0.95 * len(inside)) - 1]
    return float((outside <= threshold).double().mean())


def disagreement(members: Tensor) -> float:
    """Fraction of inputs on which two networks differ, mean over all pairs of members (n, B, C); 0 for one member."""
    classes = members.argmax(-1)
    n = len(classes)
    pairs = [(classes[i] != classes[j]).double().mean() for i in range(n) for j in range(i)]
    return float(torch.stack(pairs).mean()) if pairs else 0.0


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """The T in :data:`TEMPERATURES` with the least NLL of softmax(logits / T); log-probabilities serve as logits.

    One label that is any class with equal chance counts beside the N real ones. Without it, labels that are all as
    predicted would ask for T = 0, and one error among other data would then cost any amount; on thousands of labels
    it moves the NLL by about 1e-5. The NLL is convex in 1/T, so its derivative is bisected.
    """
    z, y = _checked(logits, labels)
    z = _bounded(z)
    mean_true = (z[torch.arange(len(y)), y].sum() + z.mean()) / (len(y) + 1)
    low, high = (math.log(1 / b) for b in reversed(TEMPERATURES))
    for _ in range(60):
        middle = (low + high) / 2
        slope = ((z * math.exp(middle)).softmax(1) * z).sum(1).mean() - mean_true
        low, high = (low, middle) if slope > 0 else (middle, high)
    return math.exp(-(low + high) / 2)


def _bounded(logits: Tensor) -> Tensor:
    """(B, C) -> (B, C): logits below the largest of each input, none so low that it stands for less than SMALLEST."""
    return (logits - logits.amax(1, keepdim=True)).clamp_min(math.log(SMALLEST))


def nll_after_temperature(logits: Tensor, labels: Tensor, seed: int = 0) -> float:
    """NLL with the temperature fitted on a random half and applied to the other, mean of both ways; B at least 2."""
    z, y = _checked(logits, labels)
    z = _bounded(z)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    first, second = order[: len(y) // 2], order[len(y) // 2 :]
    total = 0.0
    for fit, measure in ((first, second), (second, first)):
        scaled = z[measure] / fit_temperature(z[fit], y[fit])
        total += float(torch.nn.functional.cross_entropy(scaled, y[measure], reduction="sum"))
    return total / len(y)


def summary(probabilities: Tensor, labels: Tensor) -> dict[str, float]:
    """Every single-number metric of a classifier's predictions."""
    p, y = _checked(probabilities, labels)
    result = {metric.__name__: metric(p, y) for metric in (accuracy, nll, brier, ece, signed_ece, aurc)}
    result["entropy"] = float(class_entropy(p).mean())
    if len(y) > 1:
        result["nll_after_temperature"] = nll_after_temperature(p.clamp_min(SMALLEST).log(), y)
    return result


def rmse(prediction: Tensor, target: Tensor) -> float:
    """Root of the mean squared error over all entries."""
    return math.sqrt(float((_same(prediction, target)).square().mean()))


def gaussian_nll(mean: Tensor, variance: Tensor | float, target: Tensor) -> float:
    """Mean negative log density of `target` under N(mean, variance), constant included."""
    v = torch.as_tensor(variance, dtype=torch.float64).cpu()
    return float(0.5 * (_same(mean, target).square() / v + (2 * math.pi * v).log()).mean())


def _same(prediction: Tensor, target: Tensor) -> Tensor:
    if prediction.shape != target.shape or not prediction.numel():
        raise DataError(f"predictions {tuple(prediction.shape)} and targets {tuple(target.shape)} must match")
    return prediction.detach().double().cpu() - target.detach().double().cpu()


def _checked(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    if scores.ndim != 2 or labels.shape != scores.shape[:1] or not len(labels):
        shapes = f"predictions {tuple(scores.shape)} and labels {tuple(labels.shape)}"
        raise DataError(f"{shapes}: give (B, C) and (B,), B at least 1")
    p, y = scores.detach().double().cpu(), labels.detach().long().cpu()
    if int(y.min()) < 0 or int(y.max()) >= p.shape[1]:
        raise DataError(f"a label lies outside 0..{p.shape[1] - 1}: the data has other classes than the predictions")
    if bool(p.isnan().any()):
        raise DataError("a prediction is NaN: check the network's outputs")
    return p, y
