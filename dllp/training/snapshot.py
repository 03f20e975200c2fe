"""Snapshots of a run: all that it needs to go on as if it had never stopped, as tensors by name and plain values."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from dllp.config import changeable, fits
from dllp.errors import ArtifactError
from dllp.files import typed
from dllp.records import EpochRecord, Moment
from dllp.training.state import RunState
from dllp.training.step import apply_decisions

Snapshot = tuple[dict[str, Tensor], dict[str, Any]]
UNFIT = "the checkpoint does not fit the run"


def snapshot(state: RunState) -> Snapshot:
    """Copies on the CPU of all that changes during a run: weights, beliefs, optimisers, random states, position.

    The same whatever processes hold the particles; all of them take it together.
    """
    return begin_snapshot(state, changing(state))()


def begin_snapshot(state: RunState, found: dict[str, Tensor]) -> Callable[[], Snapshot]:
    """Start to copy what :func:`changing` found, and let training go on; what is returned waits for the copies."""
    tensors = {name: _leaving(value) for name, value in found.items()}
    if state.latents.keep is not None:
        tensors["keep"] = _leaving(state.latents.keep.to(torch.uint8))
    tensors["random/gates"] = state.latents.generator.get_state()
    tensors["random/cpu"] = torch.get_rng_state()
    arrived = torch.cuda.Event() if state.particles.device.type == "cuda" else None
    if arrived is not None:
        tensors["random/cuda"] = torch.cuda.get_rng_state(state.particles.device)
        arrived.record()
    values = {
        "fingerprint": fingerprint(state),
        "step": state.step_index,
        "lr_scale": state.lr_scale,
        "patience": [state.best, state.waited],
        "history": [dict(vars(record)) for record in state.history],  # a closed record changes no more
        "moments": [dict(vars(moment)) for moment in state.moments],
    }

    def finish() -> Snapshot:
        if arrived is not None:
            arrived.synchronize()
        return tensors, values

    if state.place.rows.size > 1:  # messages are sent by the thread that trains
        finish()
        tensors = _joined(state.place.rows.all_gather_object(tensors))
    return finish


def changing(state: RunState) -> dict[str, Tensor]:
    """All that a snapshot copies, where it lies; a network's many small buffers are one tensor of each type."""
    found = dict(_tensors(state))
    for name, buffers in _buffers(state):
        found[name] = torch.cat([buffer.reshape(-1) for buffer in buffers.values()])
    for k, value in enumerate(state.latents.learned):
        for key, moment in state.latents.adam.state.get(value, {}).items():
            found[f"adam/{k}/{key}"] = moment
    return {name: value.detach() for name, value in found.items()}


def unsound(found: dict[str, Tensor]) -> str:
    """Where in what changes a number broke; empty where all are sound, which one look at the device tells."""
    numbers = {name: value for name, value in found.items() if value.is_floating_point()}
    # buffers may hold infinities on purpose (masks)
    sound = {name: ~value.isnan() if "/" in name else value.isfinite() for name, value in numbers.items()}
    flags = [flag.all() for flag in sound.values()]
    if bool(torch.stack([flag.to(numbers["rows"].device) for flag in flags]).all()):
        return ""
    return f"NaN or infinity in {next(name for name, flag in sound.items() if not bool(flag.all()))}"


def restore(state: RunState, saved: Snapshot) -> None:
    """Put a freshly built run where the snapshot was taken; what does not fit is an error before anything moves."""
    tensors, values, take = dict(saved[0]), saved[1], state.place.take
    if values.get("fingerprint") != fingerprint(state):
        raise ArtifactError("the checkpoint belongs to another run: configuration, network and data must be the same")
    try:
        _check(state, tensors, values)
        history = typed(list[EpochRecord], values["history"], UNFIT, "history")
        moments = typed(list[Moment], values.get("moments", []), UNFIT, "moments")  # none in files of 0.1.0
        keep = tensors.pop("keep", None)
        _fill(state, tensors)  # the small networks are cut from full ones that hold the checkpoint's weights
        if keep is not None and state.gating is not None:
            apply_decisions(state, take(keep).to(state.particles.device, torch.bool))
            _fill(state, tensors)
        for k, value in enumerate(state.latents.learned):
            if f"adam/{k}/step" in tensors:
                averages = {key: take(tensors[f"adam/{k}/{key}"]).to(value.device) for key in ("exp_avg", "exp_avg_sq")}
                state.latents.adam.state[value] = {"step": tensors[f"adam/{k}/step"].to(value.device), **averages}
        state.latents.generator.set_state(tensors["random/gates"])
        state.random_states = {name: tensors[name] for name in ("random/cpu", "random/cuda") if name in tensors}
        state.step_index, state.lr_scale = int(values["step"]), float(values["lr_scale"])
        state.best, state.waited = values["patience"]
        state.history, state.moments = history, moments
    except (LookupError, TypeError, ValueError, RuntimeError, AssertionError) as error:
        raise ArtifactError(f"{UNFIT}: {error}") from None


def _check(state: RunState, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
    """Whoever can write a file can compute its checksum: values and the tensors that have no place to be copied to."""
    step, scale, patience = values["step"], values["lr_scale"], values["patience"]
    if not fits(step, int) or not 0 <= step <= state.total_steps:
        raise ValueError(f"step is not one of 0..{state.total_steps}")
    if not fits(scale, float) or not 0 < scale < float("inf"):
        raise ValueError("lr_scale is no positive number")
    if not fits(tuple(patience), tuple[float, int]):
        raise ValueError("patience is not a loss and a number of epochs")
    n = state.place.particles
    shapes = {"keep": (torch.uint8, torch.Size([n, state.latents.logits.shape[1]]))}
    states = {"random/gates": state.latents.generator.get_state(), "random/cpu": torch.get_rng_state()}
    shapes |= {name: (known.dtype, known.shape) for name, known in states.items()}
    for k, value in enumerate(state.latents.learned):
        of_all = value.dtype, torch.Size([n, *value.shape[1:]])
        shapes |= {f"adam/{k}/{key}": of_all for key in ("exp_avg", "exp_avg_sq")}
        shapes[f"adam/{k}/step"] = (torch.float32, torch.Size([]))
    for name, wanted in shapes.items():
        if name in tensors and (tensors[name].dtype, tensors[name].shape) != wanted:
            raise ValueError(f"{name} is {tuple(tensors[name].shape)} {tensors[name].dtype}, not {wanted}")


def fingerprint(state: RunState) -> str:
    """Names what must be equal for a checkpoint to fit: configuration, shapes, size of the data."""
    config = {k: v for k, v in state.config.identity().items() if k not in changeable()}
    shapes = [(name, list(s.shape)) for name, s in state.particles.layout.segments.items()]
    parts = [config, shapes, state.num_data, state.steps_per_epoch]
    parts.append([state.place.particles, state.latents.logits.shape[1]])
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _tensors(state: RunState) -> Iterator[tuple[str, Tensor]]:
    latents, particles = state.latents, state.particles
    yield from (("rows", particles.rows), ("momentum", state.momentum), ("statistics", state.statistics))
    if state.config.optimizer == "adamw":
        yield "second", state.second
    if state.loss_scale is not None:
        yield "loss_scale", state.loss_scale.values
    yield from (("logits", latents.logits), ("log_slab", latents.log_slab), ("log_d", latents.log_d))
    yield from (("multiplier", latents.multiplier), ("gap", latents.gap))


def _buffers(state: RunState) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """The buffers of each network, by type."""
    small = [part.network for part in state.particles.sliced]
    for size, networks in (("full", state.particles.networks), ("small", small)):
        for i, network in zip(state.place.own, networks, strict=False):
            kinds: dict[str, dict[str, Tensor]] = {}
            for name, buffer in network.named_buffers():
                kind = str(buffer.dtype).removeprefix("torch.")
                kinds.setdefault(f"{size}/{i}/{kind}", {})[name] = buffer
            yield from kinds.items()


def _leaving(value: Tensor) -> Tensor:
    """A copy on the CPU; from a CUDA device it is under way, in the order of the stream."""
    if value.device.type != "cuda":
        return value.to("cpu", copy=True)
    copy = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
    return copy.copy_(value, non_blocking=True)


def _axis(name: str) -> int | None:
    """Along which axis a tensor lists the particles; None for what belongs to one of them, or to none."""
    if name.startswith(("full/", "small/", "random/", "loss_scale")) or name.endswith("/step"):
        return None
    return 1 if name == "statistics" else 0


def _joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of processes that hold different particles, in their order."""
    whole: dict[str, Tensor] = {}
    for part in reversed(parts):  # random states are the first's
        whole |= part
    for name in parts[0]:
        axis = _axis(name)
        if axis is not None:
            whole[name] = torch.cat([part[name] for part in parts], axis)
    return whole


@torch.no_grad()
def _fill(state: RunState, tensors: dict[str, Tensor]) -> None:
    for name, target in _tensors(state):
        value, axis = tensors[name], _axis(name)
        value = value if axis is None or value.dim() <= axis else state.place.take(value, axis)
        if value.shape != target.shape or value.dtype != target.dtype:
            raise ValueError(f"{name} is {tuple(value.shape)} {value.dtype}, not {tuple(target.shape)} {target.dtype}")
        target.copy_(value)
    for name, buffers in _buffers(state):
        parts = tensors[name].split([buffer.numel() for buffer in buffers.values()])
        for buffer, part in zip(buffers.values(), parts, strict=True):
            if part.dtype != buffer.dtype:
                raise ValueError(f"{name} is {part.dtype}, not {buffer.dtype}")
            buffer.copy_(part.view(buffer.shape))
