"""A runtime whose times are a known step function of the widths: an oracle for profiles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from dllp.structure.rules import Form

STEP, OVERHEAD = 16, 1e-4


def seconds(places: int, kernel: int, inputs: int, outputs: int) -> float:
    """Time of a layer: blocks of 4 inputs, and of 16 outputs."""
    return 1e-7 * places * kernel * math.ceil(inputs / 4) * math.ceil(outputs / STEP)


class StepTimer:
    """Layers take :func:`seconds`, a network their sum and a constant; `slower` is a factor of cut ones."""

    def __init__(self, shape: tuple[int, ...], slower: float = 1.0) -> None:
        self.shape, self.slower, self.measured = shape, slower, 0

    def layer(self, form: Form, inputs: int, outputs: Sequence[int]) -> list[float]:
        places, kernel = math.prod(form.size), math.prod(form.kernel)
        return [seconds(places, kernel, inputs, made) for made in outputs]

    def networks(self, networks: Sequence[nn.Module]) -> list[float]:
        self.measured += 1
        first, *others = [self._network(network) for network in networks]
        return [first, *(self.slower * each for each in others)]

    def _network(self, network: nn.Module) -> float:
        found = [OVERHEAD]

        def add(module: Any, args: Any, output: Any) -> None:
            x = args[0]
            if isinstance(module, nn.Linear):
                found.append(seconds(1, 1, module.in_features, module.out_features))
            else:
                own = module.groups > 1 and module.groups == module.in_channels
                inputs = 1 if own else module.in_channels // module.groups
                found.append(seconds(x[0, 0].numel(), math.prod(module.kernel_size), inputs, module.out_channels))

        hooks = [m.register_forward_hook(add) for m in network.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
        network(torch.zeros(1, *self.shape))
        for hook in hooks:
            hook.remove()
        return sum(found)
