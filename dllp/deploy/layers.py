"""Time of each layer, dense and pruned, against its FLOPs: the layers that hold a pruned network back."""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from dllp.deploy.export import Named, Shape, inputs, require_onnx, write
from dllp.deploy.quantise import feed
from dllp.deploy.runtimes import Subject, limited
from dllp.errors import ArtifactError
from dllp.structure.groups import discover

CONVOLUTIONS = ("Conv", "FusedConv", "NhwcFusedConv")
BLOCKED = "_nchwc"  # suffix of onnxruntime for the name of a kernel that works on blocks of channels


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


def layers(dense: Subject, other: Subject, shape: Shape, *, batch: int = 64, runs: int = 10) -> list[LayerTime]:
    """Time of every convolution in onnxruntime on one thread; empty where the two graphs run differently."""
    require_onnx()
    times, names = [], []
    for subject in (dense, other):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            write(subject.network, path, inputs(2, shape), "onnx")
            times.append(_kernel_times(path, inputs(batch, shape), runs))
        names.append([name for name, _ in _calls(subject.network, inputs(1, shape), (_ConvNd,))])
    if len({len(part) for part in (*times, *names)}) != 1:
        return []
    return _compared(dense, other, shape, zip(names[0], *times, strict=True))


def torch_layers(dense: Subject, other: Subject, shape: Shape, *, batch: int = 64, runs: int = 5) -> list[LayerTime]:
    """Time of every convolution and linear layer in PyTorch on one thread: rougher, but it needs no extra."""
    with limited(1):
        before, after = (_timed_layers(subject.network, inputs(batch, shape), runs) for subject in (dense, other))
    both = ((name, seconds, after[name]) for name, seconds in before.items() if name in after)
    return _compared(dense, other, shape, both)


def _compared(
    dense: Subject, other: Subject, shape: Shape, times: Iterable[tuple[str, float, float]]
) -> list[LayerTime]:
    """Names and seconds of layers with their widths and the share of their FLOPs that is left."""
    structures = [discover(subject.network, (inputs(2, shape),), channels=False) for subject in (dense, other)]
    before, after = ({layer.name: layer.macs for layer in structure.layers} for structure in structures)

    def width(subject: Subject, name: str) -> int:
        layer: Any = subject.network.get_submodule(name)
        return layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels

    prefix = "network." if isinstance(dense.network, Named) else ""
    found = []
    for name, a, b in times:
        widths = width(dense, name), width(other, name)
        found.append(LayerTime(name.removeprefix(prefix), 1e3 * a, 1e3 * b, *widths, after[name] / before[name]))
    return found


def _timed_layers(network: nn.Module, x: Any, runs: int) -> dict[str, float]:
    """Median seconds of every convolution and linear layer, the first call left out."""
    samples: dict[str, list[float]] = {}
    for _ in range(runs + 1):
        for name, seconds in _calls(network, x, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            samples.setdefault(name, []).append(seconds)
    return {name: float(np.median(found[1:])) for name, found in samples.items()}


def _calls(network: nn.Module, x: Any, kinds: tuple[type[nn.Module], ...]) -> list[tuple[str, float]]:
    """Name and seconds of each call of a layer of some kinds, in the order of execution."""
    names = {module: name for name, module in network.named_modules() if isinstance(module, kinds)}
    starts: dict[nn.Module, float] = {}
    found: list[tuple[str, float]] = []

    def begin(module: nn.Module, args: Any) -> None:
        starts[module] = time.perf_counter()

    def end(module: nn.Module, args: Any, output: Any) -> None:
        found.append((names[module], time.perf_counter() - starts[module]))

    hooks = [module.register_forward_pre_hook(begin) for module in names]
    hooks += [module.register_forward_hook(end) for module in names]
    try:
        with torch.inference_mode():
            network(x)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _kernel_times(path: Path, x: Any, runs: int) -> list[float]:
    """Median seconds of every convolution in a file, in its order there, as far as kernels are found."""
    places, samples = _kernel_places(path), dict[int, list[float]]()
    for name, seconds in kernel_events(path, feed(path, x), runs):
        if name in places:  # batch norms may become convolutions, too
            samples.setdefault(places[name], []).append(seconds)
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


def kernel_events(path: Path, feed: dict[str, Any], runs: int, threads: int = 1) -> Iterator[tuple[str, float]]:
    """Plain name and seconds of each kernel of a convolution or matrix product, in `runs` runs after a first one."""
    for event in _profile(path, feed, runs, threads):
        if event["name"].endswith("_kernel_time") and event.get("args", {}).get("op_name") in (*CONVOLUTIONS, "MatMul"):
            yield _plain_name(event["name"]), event["dur"] * 1e-6


def _profile(path: Path, feed: dict[str, Any], runs: int, threads: int = 1) -> list[dict[str, Any]]:
    """onnxruntime's events of its kernels."""
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = threads
    settings.enable_profiling = True
    settings.profile_file_prefix = str(path.with_suffix(""))
    session = onnxruntime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
    for _ in range(runs + 1):
        session.run(None, feed)
    profile = Path(session.end_profiling())
    try:
        return json.loads(profile.read_bytes())
    except (OSError, ValueError):  # the runtime says nothing when a disk is full
        raise ArtifactError(f"cannot write {profile}: it is cut off; free some space there") from None
