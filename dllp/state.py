"""Everything a run must remember to go on as if it had never stopped: tensors by name, and a few plain values."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any, get_type_hints

import torch
from safetensors.torch import load, save
from torch import Tensor

from dllp.errors import ArtifactError
from dllp.train import EpochRecord, Trainer

FREE = ("device", "engine", "on_nan", "parallel", "recompute")
"""Fields of Config that a run may change when it goes on."""
SMALL = 2**16
"""Numbers up to which a tensor is packed with others of its kind."""
State = tuple[dict[str, Tensor], dict[str, Any]]


def snapshot(trainer: Trainer) -> State:
    """Copies on the CPU of all that changes during a run: weights, beliefs, optimisers, random states, position.

    The same whatever processes hold the particles; all of them take it together.
    """
    tensors = _copies(_changing(trainer))
    if trainer.belief.keep is not None:
        tensors["keep"] = trainer.belief.keep.cpu().to(torch.uint8)
    tensors["random/gates"] = trainer.belief.generator.get_state()
    tensors["random/cpu"] = torch.get_rng_state()
    if trainer.particles.device.type == "cuda":
        tensors["random/cuda"] = torch.cuda.get_rng_state(trainer.particles.device)
    if trainer.place.rows.size > 1:
        tensors = _joined([load(part) for part in trainer.place.rows.payloads(save(tensors))])
    values = {
        "fingerprint": fingerprint(trainer),
        "step": trainer.step_index,
        "lr_scale": trainer.lr_scale,
        "patience": [trainer.best, trainer.waited],
        "history": [dict(vars(record)) for record in trainer.history],  # a closed record changes no more
    }
    return tensors, values


def unsound(trainer: Trainer) -> str:
    """Where in a snapshot a number broke; empty where all are sound, which one look at the device tells."""
    numbers = {name: value for name, value in _changing(trainer).items() if value.is_floating_point()}
    # buffers may hold infinities on purpose (masks)
    strict = {name: value for name, value in numbers.items() if "/" not in name}
    rest = {name: value for name, value in numbers.items() if name not in strict}
    flags = [value.isfinite().all() for value in strict.values()]
    flags += [~torch.cat([rest[name].reshape(-1) for name in names]).isnan().any() for names in _packs(rest)]
    if bool(torch.stack([flag.to(trainer.particles.device) for flag in flags]).all()):
        return ""
    broken = (n for n, v in numbers.items() if bool((~v.isfinite() if n in strict else v.isnan()).any()))
    return f"NaN or infinity in {next(broken)}"


def restore(trainer: Trainer, state: State) -> None:
    """Put a freshly built trainer where the snapshot was taken; what does not fit is an error before anything moves."""
    tensors, values, take = dict(state[0]), state[1], trainer.place.take
    if values.get("fingerprint") != fingerprint(trainer):
        raise ArtifactError("the checkpoint belongs to another run: configuration, network and data must be the same")
    try:
        _check(trainer, tensors, values)
        keep = tensors.pop("keep", None)
        _fill(trainer, tensors)  # the small networks are cut from full ones that hold the checkpoint's weights
        if keep is not None and trainer.gating is not None:
            trainer.apply_decisions(trainer.gating, take(keep).to(trainer.particles.device, torch.bool))
            _fill(trainer, tensors)
        for k, value in enumerate(trainer.belief.learned):
            moments = {key: tensors[f"adam/{k}/{key}"] for key in ("step", "exp_avg", "exp_avg_sq")
                       if f"adam/{k}/{key}" in tensors}  # fmt: skip
            if moments:
                on_device = {key: take(m).to(value.device) for key, m in moments.items() if key != "step"}
                step = moments["step"].to(value.device if value.is_cuda else "cpu")
                trainer.belief.adam.state[value] = {"step": step, **on_device}
        trainer.belief.generator.set_state(tensors["random/gates"])
        trainer.random_states = {name: tensors[name] for name in ("random/cpu", "random/cuda") if name in tensors}
        trainer.step_index, trainer.lr_scale = int(values["step"]), float(values["lr_scale"])
        trainer.best, trainer.waited = values["patience"]
        trainer.history = [EpochRecord(**record) for record in values["history"]]
    except (LookupError, TypeError, ValueError, RuntimeError, AssertionError) as error:
        raise ArtifactError(f"the checkpoint does not fit the run: {error}") from None


def _check(trainer: Trainer, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
    """Whoever can write a file can compute its checksum: values and the tensors that have no place to be copied to."""
    step, scale, (best, waited) = values["step"], values["lr_scale"], values["patience"]
    if type(step) is not int or not 0 <= step <= trainer.total_steps:
        raise ValueError(f"step is not one of 0..{trainer.total_steps}")
    if type(scale) not in (int, float) or not 0 < scale < float("inf"):
        raise ValueError("lr_scale is no positive number")
    if type(best) not in (int, float) or type(waited) is not int:
        raise ValueError("patience is not a loss and a number of epochs")
    hints = get_type_hints(EpochRecord)
    for record in values["history"]:
        for name, value in vars(EpochRecord(**record)).items():
            entries = value if isinstance(value, list) and "list" in str(hints[name]) else [value]
            if name == "gates":
                entries = [count for part in entries for count in (part if isinstance(part, list) else [part])]
            if not all(entry is None or isinstance(entry, (int, float, str)) for entry in entries):
                raise ValueError(f"{name} in its history is of the wrong kind")
    n = trainer.place.particles
    shapes = {"keep": (torch.uint8, torch.Size([n, trainer.belief.logits.shape[1]]))}
    states = {"random/gates": trainer.belief.generator.get_state(), "random/cpu": torch.get_rng_state()}
    shapes |= {name: (known.dtype, known.shape) for name, known in states.items()}
    for k, value in enumerate(trainer.belief.learned):
        of_all = value.dtype, torch.Size([n, *value.shape[1:]])
        shapes |= {f"adam/{k}/{key}": of_all for key in ("exp_avg", "exp_avg_sq")}
        shapes[f"adam/{k}/step"] = (torch.float32, torch.Size([]))
    for name, wanted in shapes.items():
        if name in tensors and (tensors[name].dtype, tensors[name].shape) != wanted:
            raise ValueError(f"{name} is {tuple(tensors[name].shape)} {tensors[name].dtype}, not {wanted}")


def fingerprint(trainer: Trainer) -> str:
    """Names what must be equal for a checkpoint to fit: configuration, shapes, size of the data."""
    config = {k: v for k, v in trainer.config.as_dict().items() if k not in FREE}
    shapes = [(name, list(s.shape)) for name, s in trainer.particles.layout.segments.items()]
    parts = [config, shapes, trainer.num_data, trainer.steps_per_epoch]
    parts.append([trainer.place.particles, trainer.belief.logits.shape[1]])
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _tensors(trainer: Trainer) -> Iterator[tuple[str, Tensor]]:
    belief, particles = trainer.belief, trainer.particles
    yield from (("rows", particles.rows), ("momentum", trainer.momentum), ("statistics", trainer.statistics))
    yield from (("logits", belief.logits), ("log_slab", belief.log_slab), ("log_d", belief.log_d))
    yield from (("multiplier", belief.multiplier), ("gap", belief.gap))
    for i, network in zip(trainer.place.own, particles.networks, strict=True):
        yield from ((f"full/{i}/{name}", buffer) for name, buffer in network.named_buffers())
    for i, part in zip(trainer.place.own, particles.sliced, strict=False):
        yield from ((f"small/{i}/{name}", buffer) for name, buffer in part.network.named_buffers())


def _changing(trainer: Trainer) -> dict[str, Tensor]:
    """What is copied, where it lies: the tensors above and Adam's moments."""
    found = dict(_tensors(trainer))
    for k, value in enumerate(trainer.belief.learned):
        for key, moment in trainer.belief.adam.state.get(value, {}).items():
            found[f"adam/{k}/{key}"] = moment
    return {name: value.detach() for name, value in found.items()}


def _packs(tensors: dict[str, Tensor]) -> list[list[str]]:
    """Names of tensors that are handled together: small ones of a kind, each large one alone."""
    packs: dict[Any, list[str]] = {}
    for name, value in tensors.items():
        packs.setdefault((value.device, value.dtype) if value.numel() <= SMALL else name, []).append(name)
    return list(packs.values())


def _copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the CPU; hundreds of small tensors leave a device in one transfer."""
    copies: dict[str, Tensor] = {}
    for names in _packs(tensors):
        values = [tensors[name] for name in names]
        if len(values) == 1:
            copies[names[0]] = values[0].to("cpu", copy=True)
            continue
        parts = torch.cat([value.reshape(-1) for value in values]).cpu().split([value.numel() for value in values])
        copies |= {name: part.view(value.shape) for name, part, value in zip(names, parts, values, strict=True)}
    return copies


def _axis(name: str) -> int | None:
    """Along which axis a tensor lists the particles; None for what belongs to one of them, or to none."""
    if name.startswith(("full/", "small/", "random/")) or name.endswith("/step"):
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
def _fill(trainer: Trainer, tensors: dict[str, Tensor]) -> None:
    for name, target in _tensors(trainer):
        value, axis = tensors[name], _axis(name)
        value = value if axis is None or value.dim() <= axis else trainer.place.take(value, axis)
        if value.shape != target.shape or value.dtype != target.dtype:
            raise ValueError(f"{name} is {tuple(value.shape)} {value.dtype}, not {tuple(target.shape)} {target.dtype}")
        target.copy_(value)
