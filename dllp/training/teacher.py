"""A teacher beside the labels: the given network, or the mean prediction of all particles (Section 11).

With weight w and temperature T the task loss is (1 - w) loss(labels) + w T^2 cross-entropy to the teacher's softened
prediction; of a regression, w times the squared distance to the teacher's outputs. The predictions count as
pseudo-observations: a likelihood that shares the task loss has them too, equation 9 has the labels only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dllp.config import Config
from dllp.devices.mesh import Axis
from dllp.errors import StructureError
from dllp.method import likelihood
from dllp.structure.slicing import copied


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
        self.config = config
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def check(self, example: Tensor, outputs: int) -> None:
        """Raise where the teacher does not give as many outputs for an example (2, ...) as the network it teaches."""
        weight = next(self.network.parameters(), example)
        found = self.network(example.to(weight.device, weight.dtype if example.is_floating_point() else None))
        if not isinstance(found, Tensor) or found[0].numel() != outputs:
            given = f"{found[0].numel()} outputs" if isinstance(found, Tensor) else f"a {type(found).__name__}"
            raise StructureError(f"the teacher gives {given} where the network gives {outputs}: both must agree")

    def __call__(self, x: Tensor) -> Tensor:
        """(B, ...) inputs -> (B, C) softened probabilities, or outputs of a regression; read after :meth:`wait`.

        In a captured step it runs beside the particles, on a stream of its own.
        """
        if self._stream is None or not torch.cuda.is_current_stream_capturing():
            return self._predict(x)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            return self._predict(x)

    def wait(self) -> None:
        """Let the present stream wait until the last predictions are there."""
        if self._stream is not None and torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream().wait_stream(self._stream)

    @torch.no_grad()
    def _predict(self, x: Tensor) -> Tensor:
        bf16 = self.config.precision == "bfloat16"
        # cast weights must not be cached: a captured graph would free them
        with torch.autocast(x.device.type, torch.bfloat16, enabled=bf16, cache_enabled=False):
            outputs = self.network(x)
        return softened(outputs.float() if bf16 else outputs, self.config)


def softened(outputs: Tensor, config: Config) -> Tensor:
    """(B, C) outputs of a network -> what they teach, without an output for log d(x)."""
    if config.noise == "input":
        outputs, _ = likelihood.split_noise(outputs)
    return (outputs / config.teacher_temperature).softmax(1) if config.task == "classification" else outputs


def mean_prediction(outputs: Sequence[Tensor], config: Config, rows: Axis) -> Tensor:
    """n times (B, C) outputs -> (B, C) mean over all particles, other processes' too, without gradient."""
    mean = torch.stack([softened(output.detach(), config) for output in outputs]).mean(0)
    return mean if rows.size == 1 else rows.all_reduce_(mean / rows.size)
