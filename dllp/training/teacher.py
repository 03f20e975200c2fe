"""A teacher beside the labels: the given network, or the mean prediction of all particles (Section 11).

With weight w and temperature T the task loss is (1 - w) loss(labels) + w T^2 cross-entropy to the teacher's softened
prediction; of a regression, w times the squared distance to the teacher's outputs. The predictions count as
pseudo-observations: a likelihood that shares the task loss has them too, equation 9 has the labels only.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dllp.config import Config
from dllp.devices.device import HALF
from dllp.devices.mesh import Axis
from dllp.errors import StructureError
from dllp.method import likelihood
from dllp.structure.slicing import copied
from dllp.training.objective import Objective, Outcome


class Teacher:
    """A frozen network in evaluation mode.

    Args:
        network: Copied; the caller's is left as it was.
        config: A resolved configuration.
        device: Where the particles are.
    """

    def __init__(self, network: nn.Module, config: Config, device: torch.device) -> None:
        self.network = copied(network).to(device).eval().requires_grad_(False)
        if device.type == "cuda":
            self.network.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        self.config, self._device = config, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, objective: Objective, x: Any, y: Any) -> Taught:
        """Predictions of the teacher for a batch; read after :meth:`wait`.

        In a captured step it runs beside the particles, on a stream of its own.
        """
        if self._stream is None or not torch.cuda.is_current_stream_capturing():
            return self._predict(objective, x, y)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            return self._predict(objective, x, y)

    def wait(self) -> None:
        """Let the present stream wait until the last predictions are there."""
        if self._stream is not None and torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream().wait_stream(self._stream)

    @torch.no_grad()
    def _predict(self, objective: Objective, x: Any, y: Any) -> Taught:
        half = HALF.get(self.config.precision)
        # cast weights must not be cached: a captured graph would free them
        with torch.autocast(self._device.type, half, cache_enabled=False) if half else nullcontext():
            found = objective(self.network, x, y)
        output = needed(found.output)
        return Taught(softened(output.float() if half else output, self.config), found.hidden)


@dataclass(frozen=True)
class Taught:
    """Predictions to learn from: softened probabilities with classes last, or outputs; and inner activations."""

    output: Tensor
    hidden: tuple[Tensor, ...] = ()


def needed(output: Tensor | None) -> Tensor:
    """The logits, without which nothing can be taught."""
    if output is None:
        raise StructureError(
            "a teacher needs logits: let loss return a dict with 'loss' and 'logits', or switch it off"
        )
    return output


def softened(output: Tensor, config: Config) -> Tensor:
    """Logits -> probabilities at the teacher's temperature, classes last; the outputs of a regression as they are."""
    if config.task == "regression":
        return output
    output = output / config.teacher_temperature
    return output.sigmoid() if config.task == "binary" else likelihood.class_last(output).softmax(-1)


def mean_prediction(outcomes: Sequence[Outcome], config: Config, rows: Axis) -> Taught:
    """The mean prediction of all particles, other processes' too, without gradient."""
    mean = torch.stack([softened(needed(found.output).detach(), config) for found in outcomes]).mean(0)
    return Taught(mean if rows.size == 1 else rows.all_reduce_(mean / rows.size))


def taught_loss(found: Outcome, taught: Taught, config: Config) -> Tensor:
    """() task loss of a particle that is taught: labels and teacher by their weights."""
    w = config.teacher_weight
    return (1 - w) * found.loss + w * imitation_loss(found, taught, config)


def imitation_loss(found: Outcome, taught: Taught, config: Config) -> Tensor:
    """() distance to what is taught: of the predictions, and of inner activations the mean squared difference."""
    output = needed(found.output)
    loss = likelihood.teacher_loss(output, taught.output, config.task, config.teacher_temperature, found.labels)
    shapes = [[tuple(tensor.shape) for tensor in hidden] for hidden in (found.hidden, taught.hidden)]
    if found.hidden and shapes[0] != shapes[1]:
        raise StructureError(
            f"hidden activations of shapes {shapes[0]}, the teacher's {shapes[1]}: hand over such as are not cut, or "
            "keep them whole with filter_fn"
        )
    for own, other in zip(found.hidden, taught.hidden, strict=False):
        loss = loss + F.mse_loss(own, other.to(own.dtype))
    return loss
