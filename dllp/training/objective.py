"""The task loss of a network on a batch of any structure: the likelihood of the task, the network's own, or a user's.

A loss that is not the likelihood of equation 9 counts as the negative mean log-likelihood, as cross-entropy does: it is
the data's part of the posterior's score, and one backward serves both (Section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dllp.config import Config
from dllp.errors import DataError, StructureError, first_line
from dllp.method import likelihood
from dllp.posterior import entry, logits_of
from dllp.structure.trace import UNFIT

LossFn = Callable[[nn.Module, Any], Any]
"""(network, batch) -> scalar mean loss, or a mapping with `loss` and, where they are known, `logits` and `labels`."""
Select = Callable[[Any], Tensor]
"""Outputs of a network -> its logits, or the predictions of a regression."""
Metrics = Callable[[nn.Module, Any], Mapping[str, Any]]
"""(network, batch) -> numbers by name, means over the batch."""
LABELS = "labels"
"""The entry of a dict batch that holds the labels."""
MISTAKES = (*UNFIT, TypeError, KeyError, AttributeError, AssertionError)
"""Errors that a user's function raises about a batch; their subclasses (out of memory) have other causes."""


@dataclass(frozen=True)
class Outcome:
    """Loss, outputs and labels of one forward pass.

    Attributes:
        loss: () mean over what was observed.
        output: Logits or predictions, where they are known.
        log_d: (B,) where the noise depends on the input.
        labels: The targets, where they are known.
        scored: The labels are those of the output, so that right answers can be counted. A language model's own loss
            may compare each token with the one before.
        residual: (B, C), where equation 9 applies: one label, or the numbers of a regression, for each example.
        hidden: Inner activations that a loss hands over, for a teacher.
    """

    loss: Tensor
    output: Tensor | None = None
    log_d: Tensor | None = None
    labels: Tensor | None = None
    residual: Tensor | None = None
    hidden: tuple[Tensor, ...] = ()
    scored: bool = False


class Objective:
    """Calls a network on a batch, and says how well it does.

    A batch is a pair (x, y) of tensors, or any structure x with y None: the last entry of a tuple and `labels` of a
    dict are its labels; a dict's entries are the network's arguments by name.

    Args:
        config: A resolved configuration.
        loss: In place of the task's own.
        select: Finds the logits in the network's outputs; by default :func:`dllp.posterior.logits_of`.
    """

    def __init__(self, config: Config, loss: LossFn | None = None, select: Select | None = None) -> None:
        self.task: likelihood.Task = config.task
        self.head, self.loss = config.noise == "input", loss
        self.select = select or logits_of
        self.labels_apart = False  # a network that does not take the labels of a dict batch
        self.residuals = loss is None  # equation 9 applies
        self.scored = loss is None  # right answers can be counted

    def __call__(self, network: nn.Module, x: Any, y: Any = None) -> Outcome:
        if self.loss is None and y is not None:
            return self._outcome(network, x, y)
        with (
            failing("the network") if self.loss is None else failing("the loss", "it is called as loss(network, batch)")
        ):
            found = self._outcome(network, x, y) if self.loss is None else self._custom(network, x, y)
        loss = found.loss
        if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point():
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise StructureError(f"the loss is {what}: a scalar is needed, the mean over the batch")
        return found

    def _outcome(self, network: nn.Module, x: Any, y: Any) -> Outcome:
        """By the task, or by the network's own loss."""
        if y is None:
            outputs, y = self._called(network, x)
            own = entry(outputs, "loss")
            if own is None and y is None:
                raise DataError(
                    f"a batch has {', '.join(x)}, but no {LABELS}, and the network returns no loss: name the labels "
                    f"{LABELS!r}, or give loss="
                )
            if own is not None:
                scored = isinstance(y, Tensor) and y.dim() == 1
                return Outcome(own, self.select(outputs), labels=y, scored=scored)
        else:
            outputs = network(x)
        output, log_d = self.select(outputs), None
        if self.head:
            output, log_d = likelihood.split_noise(output)
        loss = likelihood.task_loss(output, y, self.task)
        residual = None
        if self.task == "regression" or (self.task == "classification" and output.dim() == 2):
            residual = likelihood.residuals(output, y, self.task)
        return Outcome(loss, output, log_d, y, residual, scored=True)

    def labels(self, x: Any, y: Any) -> Tensor | None:
        """The labels of a batch, where it is known what they are."""
        if y is None and self.loss is None:
            y = x.get(LABELS) if isinstance(x, Mapping) else x[-1]
        return y if isinstance(y, Tensor) and self.loss is None else None

    def _called(self, network: nn.Module, batch: Any) -> tuple[Any, Any]:
        """Outputs and labels of a batch that is no pair of tensors."""
        if isinstance(batch, Mapping):
            given = {k: v for k, v in batch.items() if k != LABELS} if self.labels_apart else batch
            return network(**given), batch.get(LABELS)
        if isinstance(batch, Sequence) and len(batch) > 1:
            return network(*batch[:-1]), batch[-1]
        raise DataError(f"a batch is a {type(batch).__name__}: give (inputs, ..., labels), a dict, or loss=")

    def _custom(self, network: nn.Module, x: Any, y: Any) -> Outcome:
        """By the user's loss."""
        found = self.loss(network, x if y is None else (x, y))  # type: ignore[misc]
        if isinstance(found, Tensor):
            return Outcome(found)
        loss = entry(found, "loss")
        if loss is None:
            raise StructureError(f"loss returns a {type(found).__name__}: return a scalar, or a dict with 'loss'")
        hidden = entry(found, "hidden")
        hidden = (hidden,) if isinstance(hidden, Tensor) else tuple(hidden or ())
        logits, labels = entry(found, "logits"), entry(found, LABELS)
        return Outcome(loss, logits, labels=labels, hidden=hidden, scored=logits is not None and labels is not None)


@contextmanager
def failing(what: str, called: str = "") -> Iterator[None]:
    """One line for an error of something of the user's on a batch; what breaks a capture off passes.

    A TypeError, of a function of other arguments, says how it is `called`.
    """
    try:
        yield
    except MISTAKES as error:
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if type(error) not in MISTAKES or capturing:
            raise
        hint = f": {called}" if called and isinstance(error, TypeError) else ""
        raise DataError(f"{what} fails on a batch, {type(error).__name__}: {first_line(error)}{hint}") from error
