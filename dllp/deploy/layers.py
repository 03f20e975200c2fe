"""Time of each layer, dense and pruned, against its FLOPs: the layers that hold a pruned network back."""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dllp.deploy.export import INPUT, inputs, require_onnx, write
from dllp.deploy.runtimes import Subject, limited
from dllp.errors import ArtifactError
from dllp.structure.groups import discover

CONVOLUTIONS = ("Conv", "FusedConv", "NhwcFusedConv")
BLOCKED = "_nchwc"
"""Suffix of onnxruntime for the name of a kernel that works on blocks of channels."""


@dataclass(frozen=True)
class LayerTime:
    """A layer, dense and pruned: milliseconds of one batch, channels out, and the share of its FLOPs that is left."""

    layer: str
    dense_ms: float
    pruned_ms: float
    dense_width: int
    pruned_width: int
    kept_macs: float

    @property
    def lost_ms(self) -> float:
        """Time above the dense one scaled by the kept FLOPs."""
        return self.pruned_ms - self.dense_ms * self.kept_macs


def holding_back(layers: Sequence[LayerTime], count: int = 5) -> list[LayerTime]:
    """The layers that took most time above their share of the FLOPs, the worst first."""
    return [layer for layer in sorted(layers, key=lambda layer: -layer.lost_ms)[:count] if layer.lost_ms > 0]


def layers(
    dense: Subject, other: Subject, shape: tuple[int, ...], *, batch: int = 64, runs: int = 10
) -> list[LayerTime]:
    """Time of every convolution in onnxruntime on one thread; empty where the two graphs run differently."""
    require_onnx()
    times, widths, macs = [], [], []
    for subject in (dense, other):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            write(subject.network, path, inputs(2, shape), "onnx")
            times.append(_kernel_times(path, inputs(batch, shape), runs))
        widths.append(_convolutions(subject.network, shape))
        structure = discover(subject.network, inputs(2, shape), channels=False)
        macs.append({layer.name: layer.macs for layer in structure.layers})
    if len({len(part) for part in (*times, *widths)}) != 1:
        return []
    parts = zip(*times, *widths, strict=True)
    return [
        LayerTime(name, 1e3 * a, 1e3 * b, width, kept, macs[1][name] / macs[0][name])
        for a, b, (name, width), (_, kept) in parts
    ]


def torch_layers(
    dense: Subject, other: Subject, shape: tuple[int, ...], *, batch: int = 64, runs: int = 5
) -> list[LayerTime]:
    """Time of every convolution and linear layer in PyTorch on one thread: rougher, but it needs no extra."""
    with limited(1):
        before, after = (_timed_layers(subject.network, inputs(batch, shape), runs) for subject in (dense, other))
    return [
        LayerTime(name, 1e3 * a.seconds, 1e3 * after[name].seconds, a.width, after[name].width,
                  after[name].macs / a.macs)
        for name, a in before.items() if name in after
    ]  # fmt: skip


@dataclass
class _Timed:
    """Calls of one layer: seconds of each, channels out, multiply-accumulates."""

    width: int = 0
    macs: int = 0
    start: float = 0.0
    samples: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return float(np.median(self.samples[1:]))


def _timed_layers(network: nn.Module, x: Tensor, runs: int) -> dict[str, _Timed]:
    found: dict[str, _Timed] = {}
    hooks = []
    for name, module in network.named_modules():
        if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            timed = found[name] = _Timed()

            def begin(module: nn.Module, args: Any, timed: _Timed = timed) -> None:
                timed.start = time.perf_counter()

            def end(module: Any, args: Any, output: Tensor, timed: _Timed = timed) -> None:
                timed.samples.append(time.perf_counter() - timed.start)
                timed.width, timed.macs = len(module.weight), output.numel() * module.weight[0].numel()

            hooks += [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]
    try:
        with torch.inference_mode():
            for _ in range(runs + 1):
                network(x)
    finally:
        for hook in hooks:
            hook.remove()
    return {name: timed for name, timed in found.items() if len(timed.samples) > 1}


def _kernel_times(path: Path, x: Tensor, runs: int) -> list[float]:
    """Median seconds of every convolution in a file, in its order there, as far as kernels are found."""
    places, samples = _kernel_places(path), dict[int, list[float]]()
    for event in _profile(path, x, runs):
        arguments = event.get("args", {})
        if event["name"].endswith("_kernel_time") and arguments.get("op_name") in CONVOLUTIONS:
            place = places.get(_plain_name(event["name"]))
            if place is not None:  # batch norms may become convolutions, too
                samples.setdefault(place, []).append(event["dur"] * 1e-6)
    return [float(np.median(samples[place][1:])) for place in sorted(samples)]


def _kernel_places(path: Path) -> dict[str, int]:
    """Names that onnxruntime may give to the kernel of each convolution in a file -> that convolution's number in it.

    It runs branches in an order of its own. A kernel has the node's name; where it was made anew for blocks of
    channels, that of its output, which may be that of an activation that became part of it.
    """
    import onnx

    graph = onnx.load(str(path)).graph
    constants = {tensor.name for tensor in graph.initializer}
    places: dict[str, int] = {}
    gives: dict[str, int] = {}
    for node in graph.node:
        read = [name for name in node.input if name and name not in constants]
        if node.op_type == "Conv":
            places[node.name] = gives[node.output[0]] = len(places)
        elif len(read) == 1 and read[0] in gives:
            gives[node.output[0]] = gives[read[0]]
    return places | {name + BLOCKED: place for name, place in gives.items()}


def _plain_name(event: str) -> str:
    """A kernel's name without onnxruntime's prefix and suffix."""
    return re.sub(r"(_token_\d+)?_kernel_time$", "", event).removeprefix("fused ")


def _profile(path: Path, x: Tensor, runs: int) -> list[dict[str, Any]]:
    """onnxruntime's events of its kernels on one thread."""
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = 1
    settings.enable_profiling = True
    settings.profile_file_prefix = str(path.with_suffix(""))
    session = onnxruntime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
    for _ in range(runs + 1):
        session.run(None, {INPUT: x.numpy()})
    profile = Path(session.end_profiling())
    try:
        return json.loads(profile.read_bytes())
    except (OSError, ValueError):  # the runtime says nothing when a disk is full
        raise ArtifactError(f"cannot write {profile}: it is cut off; free some space there") from None


def _convolutions(network: nn.Module, shape: tuple[int, ...]) -> list[tuple[str, int]]:
    """Names and output channels of the convolutions, in the order of execution."""
    found: list[tuple[str, int]] = []

    def note(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        return lambda module, args, output: found.append((name, output.shape[1]))

    modules = [(name, m) for name, m in network.named_modules() if isinstance(m, nn.modules.conv._ConvNd)]
    hooks = [module.register_forward_hook(note(name)) for name, module in modules]
    with torch.no_grad():
        network(inputs(1, shape))
    for hook in hooks:
        hook.remove()
    return found
