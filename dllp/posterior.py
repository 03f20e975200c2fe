"""Predictions of the extracted particles: mean, aleatoric and epistemic uncertainty (Section 8)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dllp.config import Config
from dllp.devices import trees
from dllp.errors import DataError, StructureError, check_count, first_line
from dllp.method import likelihood
from dllp.structure.trace import UNFIT

if TYPE_CHECKING:  # the room above
    from dllp.data import ArrayData, LabelledBatches


@dataclass(frozen=True)
class Prediction:
    """Mean and uncertainty of B inputs from n forward passes; fields are (B, ...) tensors.

    Classification: `members` (n, B, C) probabilities, `mean` (B, C), `aleatoric` E_i[sum_c p(1-p)], `epistemic`
    sum_c Var_i[p] (population variance), `total` their sum, `expected_entropy` + `mutual_information` = `entropy`.
    Of tokens (B, T, C) and pixels (B, H, W, C) all have these axes, the classes last.
    Binary: `members` (n, B, ...) probabilities of yes, the rest for each output, p(1-p) and Var_i[p].
    Regression: `members` and `mean` are outputs (B, C), or maps as the networks give them, `aleatoric` is the
    likelihood's 1/d^2 for each number (1 where the loss was another, from which none is learned), the entropies None.
    Both: `noise` (B,) is that 1/d^2, mean over the members: one number, or one for each input where d(x) was learned.
    """

    members: Tensor
    mean: Tensor
    aleatoric: Tensor
    epistemic: Tensor
    entropy: Tensor | None = None
    expected_entropy: Tensor | None = None
    mutual_information: Tensor | None = None
    noise: Tensor | None = None

    @property
    def total(self) -> Tensor:
        """Total variance: aleatoric plus epistemic."""
        return self.aleatoric + self.epistemic


class Posterior:
    """An ensemble of n extracted networks.

    Args:
        networks: The members.
        noise: (n,) the likelihood's variance 1/d^2 of each.
        task: Classification, binary or regression.
        head: The last output of each network is log d(x), a noise for each input.
        select: Finds the logits in what a network returns; by default :func:`logits_of`.
    """

    def __init__(
        self, networks: Sequence[nn.Module], noise: Tensor, task: likelihood.Task = "classification", *,
        head: bool = False, select: Callable[[Any], Tensor] | None = None,
    ) -> None:  # fmt: skip
        self.networks, self.noise, self.head = list(networks), noise, head
        self.task: likelihood.Task = task
        self.select = select or logits_of

    def __len__(self) -> int:
        return len(self.networks)

    def to(self, device: torch.device | str) -> Posterior:
        """Move every network; returns itself."""
        for network in self.networks:
            network.to(device)
        return self

    def answers(self, x: Any, batch_size: int = 512) -> tuple[Tensor, Tensor]:
        """(B, ...) inputs -> (n, B, C) probabilities (regression: outputs) and (n, B) noise 1/d^2, on the CPU.

        Inputs are one tensor, a tuple of the network's arguments, or a dict of them by name: one forward pass of each
        member over them, on its own device, in its precision. Inputs that are not finite or that the networks cannot
        take raise a DataError.
        """
        return self._answers(x, batch_size)[:2]

    @torch.no_grad()
    def _answers(self, x: Any, batch_size: int) -> tuple[Tensor, Tensor, tuple[int, ...]]:
        """:meth:`answers`, and the shape of one output of a regression: of a map more than its last axis."""
        check_count(batch_size=batch_size)
        _check_inputs(x, batch_size)
        shape: tuple[int, ...] = ()
        x, predictions, noises = trees.plain(x), [], []
        chunks = trees.chunks(x, batch_size)
        for network, constant in zip(self.networks, self.noise.float().cpu(), strict=True):
            weight = next(network.parameters())
            with evaluating(network):
                parts = [self._outputs(network, _like(weight, part)).cpu() for part in chunks]
            outputs = torch.cat(parts)
            if self.task == "regression":
                shape, outputs = tuple(outputs.shape[1:]), outputs.flatten(1)
            noise = constant.expand(len(outputs))
            if self.head:
                outputs, log_d = likelihood.split_noise(outputs)
                noise = (-2 * log_d).exp()
            predictions.append(outputs)
            noises.append(noise)
        stacked = torch.stack(predictions)
        if self.task != "regression":
            stacked = stacked.softmax(-1) if self.task == "classification" else stacked.sigmoid()
        broken = (~stacked.isfinite()).flatten(2).any(-1).nonzero()
        if len(broken):
            network, example = broken[0].tolist()
            raise DataError(
                f"network {network + 1} answers example {example} with NaN or infinity: its weights are damaged, "
                "or the inputs are not in the range of the training's"
            )
        return stacked, torch.stack(noises), shape

    def _outputs(self, network: nn.Module, inputs: Any) -> Tensor:
        """Logits in float32, classes last; of a regression outputs as they are."""
        outputs = self.select(_forward(network, inputs)).float()
        if self.task == "classification" and outputs.dim() > 2 and not self.head:
            return likelihood.class_last(outputs)
        if outputs.dim() > 1 and (self.task == "binary" or (self.task == "regression" and not self.head)):
            return outputs
        return outputs.flatten(1)

    def members(self, x: Any, batch_size: int = 512) -> Tensor:
        """(B, ...) inputs -> (n, B, C) probabilities (classification) or outputs (regression), on the CPU."""
        return self.answers(x, batch_size)[0]

    def predict(self, x: Any, batch_size: int = 512) -> Prediction:
        """(B, ...) inputs -> their :class:`Prediction`, at the cost of n forward passes."""
        members, noise, shape = self._answers(x, batch_size)
        found = self.judge(members, noise)
        if len(shape) < 2:
            return found
        maps = {name: getattr(found, name) for name in ("members", "mean", "aleatoric", "epistemic")}
        return replace(found, **{name: value.unflatten(-1, shape) for name, value in maps.items()})

    def judge(self, members: Tensor, noise: Tensor) -> Prediction:
        """(n, B, C) and (n, B) of :meth:`answers` -> the prediction of the ensemble."""
        if self.task == "classification":
            return replace(decompose(members), noise=noise.mean(0))
        if self.task == "binary":
            found = decompose(torch.stack([1 - members, members], -1))
            halves = {"aleatoric": found.aleatoric / 2, "epistemic": found.epistemic / 2}  # of no and of yes alike
            return replace(found, members=members, mean=members.mean(0), **halves, noise=noise.mean(0))
        mean, spread = members.mean(0), members.var(0, correction=0)
        return Prediction(members, mean, noise.mean(0)[:, None].expand_as(mean), spread, noise=noise.mean(0))


def posterior_of(
    networks: Sequence[nn.Module], noise: Tensor, config: Config, select: Callable[[Any], Tensor] | None = None
) -> Posterior:
    """Networks that were trained by `config`, and the noise (n,) of each, as a posterior."""
    return Posterior(networks, noise, config.task, head=config.noise == "input", select=select)


@dataclass(frozen=True)
class PredictedData:
    """A data set predicted once, on the CPU: the source of its metrics and of its stored examples.

    Attributes:
        members: (n, B, C) probabilities, or outputs of a regression; of tokens, pixels and yes-or-no outputs B counts
            the labels.
        noise: (n, B) variance 1/d^2.
        labels: (B,) classes, or (B, C) targets.
        per_position: Labels are those of tokens or pixels.
    """

    members: Tensor
    noise: Tensor
    labels: Tensor
    per_position: bool = False

    def of(self, part: slice) -> PredictedData:
        """The same data as predicted by some of the members."""
        return replace(self, members=self.members[part], noise=self.noise[part])


def predict_data(
    posterior: Posterior, data: ArrayData | LabelledBatches, device: torch.device | str = "cpu"
) -> PredictedData:
    """One forward pass of each member over a data set; the networks are back on the CPU when this returns."""
    return counted(*_answers_to(posterior, data, device), data.y.cpu(), posterior.task)


def predict_unlabelled(
    posterior: Posterior, data: ArrayData | LabelledBatches, device: torch.device | str = "cpu"
) -> PredictedData:
    """The same without a look at labels: a row for each that the networks would give."""
    members, noise = _answers_to(posterior, data, device)
    if posterior.task == "binary":
        members = torch.stack([1 - members, members], -1)
    if posterior.task != "regression":
        members = members.flatten(1, -2)
    return PredictedData(members, noise, torch.empty(0))


def _answers_to(
    posterior: Posterior, data: ArrayData | LabelledBatches, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """:meth:`Posterior.answers` to a whole data set."""
    posterior.to(device)
    try:
        parts = [posterior.answers(x) for x in data.parts()]
    finally:
        posterior.to("cpu")
    if not parts:
        raise DataError("there is nothing to evaluate on: the data is empty")
    members, noise = (torch.cat(pieces, 1) for pieces in zip(*parts, strict=True))
    return members, noise


def counted(members: Tensor, noise: Tensor, labels: Tensor, task: likelihood.Task) -> PredictedData:
    """Predictions (n, B, ...) with one row for each label that counts: of an example, a token, a pixel, a yes or no."""
    if task == "binary":
        members, labels = torch.stack([1 - members, members], -1), (labels.reshape(members.shape[1:]) > 0.5).long()
    elif task == "regression" or labels.dim() == 1:
        return PredictedData(members, noise, labels)
    elif labels.is_floating_point():  # soft ones
        return PredictedData(members, noise, labels.argmax(1))
    keep = labels != likelihood.IGNORED
    spread = noise.reshape(*noise.shape, *[1] * (labels.dim() - 1)).expand(len(noise), *labels.shape)
    return PredictedData(members[:, keep], spread[:, keep], labels[keep], per_position=task == "classification")


def decompose(members: Tensor) -> Prediction:
    """(n, B, C) probabilities -> mean, and uncertainty split into aleatoric and epistemic, as variance and entropy."""
    mean = members.mean(0)
    entropy = class_entropy(mean)
    expected = class_entropy(members).mean(0).minimum(entropy)  # by Jensen; rounding must not make information negative
    return Prediction(
        members,
        mean,
        aleatoric=(members * (1 - members)).sum(-1).mean(0),
        epistemic=members.var(0, correction=0).sum(-1),
        entropy=entropy,
        expected_entropy=expected,
        mutual_information=entropy - expected,
    )


def class_entropy(p: Tensor) -> Tensor:
    """(..., C) probabilities -> (...) entropy in nats, with 0 log 0 = 0."""
    return torch.special.entr(p).sum(-1)


@contextmanager
def evaluating(*networks: nn.Module) -> Iterator[None]:
    """Put networks in evaluation mode, and every module back into its own mode at the end."""
    modes = {module: module.training for network in networks for module in network.modules()}
    try:
        for network in networks:
            network.eval()
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def entry(outputs: Any, name: str) -> Any:
    """An entry of a mapping or an attribute of an output object by name; None where there is none."""
    return outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)


def logits_of(outputs: Any) -> Tensor:
    """The logits in a network's outputs: a tensor, `logits` of an object or mapping, or the first of a tuple."""
    if isinstance(outputs, Tensor):
        return outputs
    found = entry(outputs, "logits")
    if found is None and isinstance(outputs, (tuple, list)) and outputs:
        found = outputs[0]
    if not isinstance(found, Tensor):
        raise StructureError(
            f"the network returns a {type(outputs).__name__} without logits: give select=, a function that finds them, "
            "or loss="
        )
    return found


def _like(weight: Tensor, inputs: Any) -> Any:
    """Inputs on the device of a network's weight, real numbers in its precision."""

    def moved(x: Tensor) -> Tensor:
        return x.to(weight.device, weight.dtype if x.is_floating_point() else None, non_blocking=True)

    return trees.apply(inputs, moved)


def _check_inputs(inputs: object, batch_size: int) -> None:
    if not trees.tensors(trees.plain(inputs)):
        raise DataError(
            f"inputs of type {type(inputs).__name__}: give a tensor of (examples, ...), see torch.as_tensor"
        )
    for x in trees.tensors(trees.plain(inputs)):
        if not x.dim():
            continue
        # in parts: isfinite copies what it reads
        finite = torch.cat([part.isfinite().unsqueeze(-1).flatten(1).all(1) for part in x.split(batch_size)])
        if not bool(finite.all()):
            bad = int((~finite).nonzero()[0])
            raise DataError(f"NaN or infinity in the inputs, first in example {bad}: clean them before predicting")


def _forward(network: nn.Module, inputs: Any) -> Any:
    """Outputs for inputs of any structure; an error about them is reported with what the first layer takes."""
    x, (args, named) = trees.tensors(inputs)[0], trees.arguments(inputs)
    try:
        outputs = network(*args, **named)
    except (*UNFIT, TypeError) as error:
        if type(error) not in (*UNFIT, TypeError):
            raise
        raise DataError(f"{_mismatch(network, x)} ({first_line(error)})") from error
    if isinstance(outputs, Tensor) and len(outputs) != len(x):
        raise DataError(f"{_mismatch(network, x)} ({len(outputs)} outputs for {len(x)} inputs)")
    return outputs


def _mismatch(network: nn.Module, x: Tensor) -> str:
    layers = (m for m in network.modules() if isinstance(m, (nn.Linear, nn.modules.conv._ConvNd)))
    known = [f"its first layer is {layer} of {layer.weight.dtype}, give inputs" for layer in layers]
    given = f"the network cannot take inputs of shape {tuple(x.shape)} and {x.dtype}"
    return f"{given}: {known[0] if known else 'give them'} as for training"
