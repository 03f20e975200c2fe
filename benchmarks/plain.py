"""The yardstick of every ratio: n plain copies of a network, trained side by side with SGD."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PlainCopies:
    """n independent networks and optimisers; one call is one step of each, on a stream of its own on CUDA."""

    def __init__(self, network: nn.Module, n: int, device: torch.device, bf16: bool) -> None:
        self.networks = [copy.deepcopy(network).to(device).train() for _ in range(n)]
        if device.type == "cuda":
            self.networks = [net.to(memory_format=torch.channels_last) for net in self.networks]
        self.optimisers = [
            torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, nesterov=True, weight_decay=5e-4, fused=True)
            for net in self.networks
        ]
        self.streams = [torch.cuda.Stream(device) for _ in range(n)] if device.type == "cuda" and n > 1 else []
        self.bf16 = bf16

    def loss(self, network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.bf16, cache_enabled=False):
            outputs = network(x)
        return F.cross_entropy(outputs.float(), y)

    def step(self, x: Tensor, y: Tensor) -> None:
        for optimiser in self.optimisers:
            optimiser.zero_grad(set_to_none=False)
        if not self.streams:
            for network in self.networks:
                self.loss(network, x, y).backward()
        else:
            main = torch.cuda.current_stream()
            for network, stream in zip(self.networks, self.streams, strict=True):
                stream.wait_stream(main)
                with torch.cuda.stream(stream):
                    self.loss(network, x, y).backward()
            for stream in self.streams:
                main.wait_stream(stream)
        for optimiser in self.optimisers:
            optimiser.step()
