"""A training step captured as a CUDA graph, with an eager fallback that names its reason."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from dllp.devices import trees
from dllp.errors import first_line

WARMUP = 3  # eager steps before the capture, in which libraries choose their kernels
SHAPES = 8  # most shapes of batches that are captured: a graph holds the memory of its whole step


class Capture:
    """Calls `step(x, y)` on batches of any structure; on CUDA captured once for each key and shape, and replayed.

    `state` is `eager`, `graph`, or `eager (reason)` where capturing failed.
    """

    def __init__(
        self, step: Callable[[Any, Any], None], generator: torch.Generator, *, enabled: bool,
        deterministic: bool = False,
    ) -> None:  # fmt: skip
        self.step, self.generator, self.enabled, self.deterministic = step, generator, enabled, deterministic
        self.state = "eager"
        self.graphs: dict[Any, tuple[torch.cuda.CUDAGraph, Any, Any]] = {}
        self.seen: dict[Any, int] = {}
        self.side: torch.cuda.Stream | None = None
        self.phase = ""

    def reset(self) -> None:
        """Drop every graph, because the networks have changed shape."""
        self.graphs.clear()
        self.seen.clear()
        if self.enabled:
            torch.cuda.empty_cache()

    def __call__(self, x: Any, y: Any, *, key: str) -> None:
        if not any(tensor.is_cuda for tensor in trees.tensors(x)):
            return self.step(x, y)
        # shapes are fixed within a phase, so that cuDNN may measure which kernels are fastest
        with torch.backends.cudnn.flags(
            enabled=True, benchmark=not self.deterministic, deterministic=self.deterministic,
            allow_tf32=torch.backends.cudnn.allow_tf32,
        ):  # fmt: skip
            self._run(x, y, key)

    def _run(self, x: Any, y: Any, key: Any) -> None:
        if not self.enabled:
            return self.step(x, y)
        if key != self.phase:  # phases do not return, and a graph holds the memory of its whole step
            self.phase = key
            self.reset()
        key = (key, trees.signature(x), trees.signature(y))
        if key not in self.graphs:
            if len(self.graphs) == SHAPES:
                self.reset()
                self.enabled, self.state = False, f"eager (batches of more than {SHAPES} shapes)"
                return self.step(x, y)
            self.seen[key] = self.seen.get(key, 0) + 1
            if self.seen[key] <= WARMUP:
                return self._on_side_stream(x, y)
            if not self._capture(key, x, y):
                return self.step(x, y)
        graph, static_x, static_y = self.graphs[key]
        trees.copy_(static_x, x)
        trees.copy_(static_y, y)
        graph.replay()

    def _on_side_stream(self, x: Any, y: Any) -> None:
        """Run a warm-up step on a side stream, as a capture does.

        Autograd remembers the stream a parameter was first used on, and memory freed on a stream serves that stream
        only, so that all warm-up steps share one.
        """
        self.side = self.side or torch.cuda.Stream()
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            self.step(x, y)
        torch.cuda.current_stream().wait_stream(self.side)

    def _capture(self, key: Any, x: Any, y: Any) -> bool:
        graph, static_x, static_y = torch.cuda.CUDAGraph(), *(trees.apply(part, torch.clone) for part in (x, y))
        graph.register_generator_state(self.generator)
        gc.collect()  # a graph of an earlier run that is freed during a capture would break it off
        try:
            with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
                self.step(static_x, static_y)
        except RuntimeError as error:
            self.enabled = False
            self.state = f"eager ({first_line(error)})"
            # an aborted capture stays registered with its generators: give them fresh states with the same numbers
            for generator in (self.generator, torch.cuda.default_generators[trees.tensors(x)[0].device.index]):
                generator.graphsafe_set_state(generator.clone_state())
            return False
        self.graphs[key] = (graph, static_x, static_y)
        self.state = "graph"
        return True
