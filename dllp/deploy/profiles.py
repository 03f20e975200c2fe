"""Profiles: the time of a network's layers at several widths on a runtime, and whole networks to hold them against."""

from __future__ import annotations

import json
import math
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dllp.deploy.export import INPUT, inputs, onnx_missing, packed, require_onnx, trace
from dllp.deploy.layers import BLOCKED, kernel_events
from dllp.deploy.runtimes import Call, Samples, interleaved, limited, onnx_samples
from dllp.devices.device import processor
from dllp.devices.ranks import Ranks
from dllp.errors import ConfigError
from dllp.structure.groups import FilterFn, Structure, discover
from dllp.structure.latency import Check, Profile, Table, fingerprint, grids, hard, latency, levels
from dllp.structure.rules import Form
from dllp.structure.slicing import copied, cut, recipe

Runtime = Literal["onnxruntime", "torch", "torch-cuda"]
FRACTIONS = (0.75, 0.5, 0.25)  # widths of the whole networks that are timed beside the dense one
RUNS = 9  # samples of a layer at one width, which take turns with those of its other widths
REPEATS, GRAPH = 20, 1e-3  # calls of a layer in one CUDA graph, at most, and seconds from which on fewer do
RUNS_ON_CUDA = 5  # of RUNS: nothing else runs there
SECONDS = 6.0  # time for which whole networks are measured, together
NEAR = 0.05  # relative distance from a latency budget from which on a run says that it is not met


class Timer(ABC):
    """Times layers and networks on a runtime, for inputs of one shape."""

    def __init__(self, shape: tuple[int, ...], threads: int, batch: int) -> None:
        self.shape, self.threads, self.batch = shape, threads, batch

    @abstractmethod
    def layer(self, form: Form, inputs: int, outputs: Sequence[int]) -> list[float]:
        """Seconds of a layer with so many inputs, for each number of outputs."""

    @abstractmethod
    def networks(self, networks: Sequence[nn.Module]) -> list[float]:
        """Seconds of whole networks, which take turns."""

    def input_of(self, form: Form, count: int, made: int) -> tuple[int, ...]:
        """Shape of a layer's inputs; channels that have a group each are as many as the outputs."""
        if not form.kernel:
            return (self.batch * form.size[0], count)
        return (self.batch, made if form.groups == 0 else count * form.groups, *form.size)


def measure_profile(
    model: nn.Module, shape: tuple[int, ...], *, runtime: str = "onnxruntime", threads: int = 1, batch: int = 1,
    filter_fn: FilterFn | None = None, timer: Timer | None = None, progress: Callable[[str], None] = lambda text: None,
) -> Profile:  # fmt: skip
    """Time a network's layers, and the network cut to several widths, on this machine; its weights do not matter.

    Args:
        shape: Of one input, without the batch.
        filter_fn: Of the run that the profile is for: layers that stay whole need one width only.
        timer: A runtime that is none of :data:`Runtime`.
        progress: Called with the name of what is timed.
    """
    model = copied(model).cpu().eval()
    timer = timer or timer_of(runtime, shape, threads, batch)
    structure = discover(model, inputs(2, shape), filter_fn=filter_fn)
    if not structure.kernels:
        raise ConfigError("the network has no convolution and no matrix product whose time could be measured")
    widths = grids(structure)
    alike: dict[tuple[Form, int, int], list[int]] = {}
    for k, kernel in enumerate(structure.kernels):
        alike.setdefault((kernel.form, kernel.inputs, kernel.outputs), []).append(k)
    shapes: dict[tuple[Form, tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for (form, into, made), found in alike.items():  # other axes may have the same widths
        shapes.setdefault((form, tuple(widths[into]), tuple(widths[made])), []).extend(found)
    tables = []
    for (form, into, made), found in shapes.items():
        name = structure.kernels[found[0]].layer
        progress(f"layer {len(tables) + 1} of {len(shapes)}: {name}")
        seconds = [timer.layer(form, count, made) for count in into]
        tables.append(Table(name, found, list(into), list(made), seconds))
    progress("whole networks")
    counts = [{g: max(1, round(f * len(each))) for g, each in enumerate(levels(structure))} for f in FRACTIONS]
    kept = [{g: levels(structure)[g][n - 1] for g, n in case.items()} for case in counts]
    gates = [hard(structure, case) for case in kept]
    networks = [cut(model, recipe(model, structure.groups, each.bool())) for each in gates]
    dense, *others = timer.networks([model, *networks])
    plain = Profile(runtime, threads, batch, machine(runtime), versions(runtime), fingerprint(structure), dense, 0.0,
                    tables, [])  # fmt: skip
    sums = [latency(structure, plain).expected(each).item() for each in gates]
    checks = [Check(*each) for each in zip(FRACTIONS, others, sums, strict=True)]
    # least squares for T = overhead + (dense - overhead) * sum / dense, which is right for the dense network
    left = np.array([1 - check.kernels / dense for check in checks])
    above = np.array([check.seconds - check.kernels for check in checks])
    overhead = float(np.clip(above @ left / max(left @ left, 1e-12), 0, 0.99 * dense))
    return replace(plain, overhead=overhead, checks=checks)


class Clock:
    """The time of a run's networks, by a profile (or its file) that is given, or made here by the first process.

    The attribute `structure` is the given one with its latency.
    """

    def __init__(
        self, structure: Structure, model: nn.Module, example: Any, profile: Profile | str | Path | None = None,
        filter_fn: FilterFn | None = None, device: torch.device | None = None, ranks: Ranks | None = None,
        timer: Timer | None = None,
    ) -> None:  # fmt: skip
        if not isinstance(example, Tensor):
            raise ConfigError("keep_latency needs a network of one input tensor: give keep_flops or keep_params")
        self.ranks, shape = ranks or Ranks(), tuple(example.shape[1:])

        def find() -> Profile:
            if isinstance(profile, str | Path):
                return Profile.read(Path(profile))
            runtime = usual_runtime(device or torch.device("cpu"))
            return profile or measure_profile(model, shape, runtime=runtime, filter_fn=filter_fn, timer=timer)

        found = self.ranks.together(lambda: None if self.ranks.rank else find())
        self.profile: Profile = self.ranks.world.broadcast_object(found)  # pyright: ignore[reportAttributeAccessIssue]
        if self.profile.runtime not in get_args(Runtime):
            raise ConfigError(f"the profile is of {self.profile.runtime!r:.40}: use {', '.join(get_args(Runtime))}")
        self.latency = latency(structure, self.profile)
        if self.profile.machine == machine(self.profile.runtime):
            here = versions(self.profile.runtime)
            if here != self.profile.versions:
                theirs, ours = (", ".join(map(" ".join, each.items())) for each in (self.profile.versions, here))
                raise ConfigError(f"the profile is of {theirs}, here is {ours}: renew it")
            timer = timer or timer_of(self.profile.runtime, shape, self.profile.threads, self.profile.batch)
            measure = partial(_relative, timer, copied(model).cpu().eval(), structure)
            self.latency = replace(self.latency, measure=measure)
        # processes that decide at once would disturb each other
        deciding = self.latency if self.ranks.alone else replace(self.latency, measure=None)
        self.structure = replace(structure, latency=deciding)

    def outcome(self, keep: float, kept: Tensor) -> dict[str, Any]:
        """Predicted and measured time of networks with the units (n, U), over the dense one's, and a line about it."""
        return self.ranks.world.broadcast_object({} if self.ranks.rank else self._outcome(keep, kept.cpu()))

    def _outcome(self, keep: float, kept: Tensor) -> dict[str, Any]:
        profile, measure = self.profile, self.latency.measure
        predicted = (self.latency.expected(kept.double()) / self.latency.dense).tolist()
        where = f"{profile.runtime}, {profile.threads} thread{'s' * (profile.threads > 1)}, batch {profile.batch}"
        named = ("runtime", "threads", "batch", "machine")
        found = {name: getattr(profile, name) for name in named} | {"keep": keep, "predicted": predicted}
        if measure is None:
            why = f"not measured; the profile is of another machine, {profile.machine}: run dllp speed there"
            return found | {"text": f"latency: {_percents(predicted)} of the dense predicted ({where}), {why}"}
        measured = [measure(each) for each in kept]
        text = f"latency: {_percents(measured)} of the dense measured, {100 * keep:g}% wanted ({where})"
        worst = max(measured, key=lambda value: abs(value / keep - 1))
        if abs(worst / keep - 1) > NEAR:
            why = "the widths are too few to come nearer, or the machine is not as quiet as when it was profiled"
            text += f"; {100 * (worst / keep - 1):+.1f}% off, {_percents(predicted)} was predicted: {why}"
        return found | {"measured": measured, "text": text}


def _relative(timer: Timer, model: nn.Module, structure: Structure, kept: Tensor) -> float:
    """Time of a network with the units (U,) over that of the dense one."""
    dense, small = timer.networks([model, cut(model, recipe(model, structure.groups, kept.cpu()))])
    return small / dense


def _percents(values: Sequence[float]) -> str:
    return ", ".join(f"{100 * value:.1f}%" for value in values)


def machine(runtime: str) -> str:
    """Name of the processor or GPU that a runtime works on."""
    return torch.cuda.get_device_name() if runtime == "torch-cuda" and torch.cuda.is_available() else processor()


def versions(runtime: str) -> dict[str, str]:
    """The runtime's version."""
    if runtime != "onnxruntime":
        return {"torch": torch.__version__}
    require_onnx()
    import onnxruntime

    return {"onnxruntime": onnxruntime.__version__}


def usual_runtime(device: torch.device) -> str:
    """The runtime of a profile that nobody chose."""
    if device.type == "cuda":
        return "torch-cuda"
    return "onnxruntime" if onnx_missing() == [] else "torch"


def timer_of(runtime: str, shape: tuple[int, ...], threads: int, batch: int) -> Timer:
    """The timer of a runtime."""
    if min(threads, batch) < 1:
        raise ConfigError(f"threads = {threads}, batch = {batch}: both must be at least 1")
    if runtime == "onnxruntime":
        require_onnx()
        return OnnxTimer(shape, threads, batch)
    if runtime == "torch":
        return TorchTimer(shape, threads, batch)
    if runtime != "torch-cuda":
        raise ConfigError(f"runtime = {runtime!r}: choose {', '.join(get_args(Runtime))}")
    if not torch.cuda.is_available():
        raise ConfigError("runtime = torch-cuda needs a GPU: make the profile where there is one")
    return CudaTimer(shape, threads, batch)


class OnnxTimer(Timer):
    """onnxruntime on the CPU. Layers are timed inside one graph: converting their inputs costs what a network saves."""

    exported: tuple[nn.Module, bytes] | None = None  # the dense network, which is measured beside every other one

    def layer(self, form: Form, inputs: int, outputs: Sequence[int]) -> list[float]:
        from onnx import TensorProto, helper, numpy_helper

        nodes, weights, given, results, feed = [], [], {}, [], {}
        for made in outputs:
            shape, name = self.input_of(form, inputs, made), f"{INPUT}{made if form.groups == 0 else ''}"
            given[name] = helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
            feed[name] = np.zeros(shape, np.float32)
            kernel = (made, 1 if form.groups == 0 else inputs, *form.kernel) if form.kernel else (inputs, made)
            weights.append(numpy_helper.from_array(np.full(kernel, 0.01, np.float32), f"w{made}"))
            options: dict[str, Any] = {}
            if form.kernel:
                options = dict(kernel_shape=form.kernel, strides=form.stride, dilations=form.dilation)
                options |= dict(pads=(*form.padding, *form.padding), group=form.groups or made)
            kind = "Conv" if form.kernel else "MatMul"
            nodes.append(helper.make_node(kind, [name, f"w{made}"], [f"y{made}"], f"layer{made}", **options))
            # small outputs: what a layer makes can be freed, and need not be converted
            axes = "GlobalMaxPool" if form.kernel else "ReduceMax"
            nodes.append(helper.make_node(axes, [f"y{made}"], [f"z{made}"], f"end{made}"))
            results.append(helper.make_tensor_value_info(f"z{made}", TensorProto.FLOAT, None))
        graph = helper.make_graph(nodes, "layers", list(given.values()), results, weights)
        content = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "layers.onnx"
            path.write_bytes(content.SerializeToString())
            samples: dict[str, list[float]] = {}
            for name, seconds in kernel_events(path, feed, RUNS, self.threads):
                samples.setdefault(name.removesuffix(BLOCKED), []).append(seconds)
        found = [samples.get(f"layer{made}") or samples.get(f"y{made}") or [] for made in outputs]
        if not all(found):
            raise ConfigError(f"onnxruntime does not tell the time of {json.dumps(form.kernel)} convolutions")
        return [max(float(np.median(each[1:])), 1e-7) for each in found]

    def networks(self, networks: Sequence[nn.Module]) -> list[float]:
        with tempfile.TemporaryDirectory() as folder:
            paths = [Path(folder) / f"{i}.onnx" for i in range(len(networks))]
            for path, network in zip(paths, networks, strict=True):
                known = self.exported[1] if self.exported is not None and self.exported[0] is network else None
                path.write_bytes(known or packed(trace(network, inputs(2, self.shape)), "onnx"))
            self.exported = networks[0], paths[0].read_bytes()
            found = onnx_samples(paths, inputs(self.batch, self.shape), "cpu", self.threads, SECONDS)
        return [_median(each, self.threads) for each in found]


class TorchTimer(Timer):
    """PyTorch on the CPU, operation by operation."""

    device = "cpu"

    def layer(self, form: Form, inputs: int, outputs: Sequence[int]) -> list[float]:
        calls = []
        for made in outputs:
            x = torch.zeros(self.input_of(form, inputs, made), device=self.device)
            weight = torch.zeros((made, 1 if form.groups == 0 else inputs, *form.kernel), device=self.device)
            if form.kernel:
                convolve: Any = (F.conv1d, F.conv2d, F.conv3d)[len(form.kernel) - 1]
                sides = (form.stride, form.padding, form.dilation, form.groups or made)
                calls.append(partial(convolve, x, weight, None, *sides))
            else:
                calls.append(partial(F.linear, x, weight))
        return self.times(calls, REPEATS, 0.0)

    def networks(self, networks: Sequence[nn.Module]) -> list[float]:
        x = inputs(self.batch, self.shape).to(self.device)
        return self.times([partial(copied(network).to(self.device), x) for network in networks], 1, SECONDS)

    def times(self, calls: Sequence[Call], repeats: int, seconds: float) -> list[float]:
        """Seconds of each call; one that is launched apart is repeated so often in a sample."""
        with limited(self.threads), torch.inference_mode():
            return [_median(each, self.threads) for each in interleaved(calls, seconds, RUNS)]


class CudaTimer(TorchTimer):
    """PyTorch on CUDA, captured as a graph."""

    device = "cuda"

    def times(self, calls: Sequence[Call], repeats: int, seconds: float) -> list[float]:
        with torch.inference_mode():
            graphs, counts = zip(*(self._captured(call, repeats) for call in calls), strict=True)
            samples = interleaved(graphs, seconds, RUNS_ON_CUDA)
            return [_median(each) / count for each, count in zip(samples, counts, strict=True)]

    @staticmethod
    def _captured(call: Call, most: int) -> tuple[Call, int]:
        """A graph of the call, and how often it is in it: a single one may take less time than its launch."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # libraries choose their kernels before the capture
            for _ in range(3):
                call()
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            torch.cuda.synchronize()
        repeats = min(most, math.ceil(GRAPH / (time.perf_counter() - start)))
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(repeats):
                call()

        def replay() -> None:
            graph.replay()
            torch.cuda.synchronize()

        return replay, repeats


def _median(samples: Samples, threads: int = 0) -> float:
    """Median seconds; of one CPU thread those that it worked, which the load of others disturbs least."""
    return float(np.median(np.asarray(samples)[:, 1 if threads == 1 else 0]))
