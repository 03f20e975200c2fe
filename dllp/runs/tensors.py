"""Tensors on disk: safetensors files with a checksum in their header, never pickle.

safetensors refuses headers with gaps, overlaps, overflows and unknown types. Added here: the size of a file is checked
before memory is taken for it, links out of the folder and pipes are refused, the checksum reveals what a disk or a copy
changed, and names and shapes must be those of the network that is filled.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from dllp import files
from dllp.errors import ArtifactError

CHECKSUM = "dllp-sha256"
HEADER_BYTES = 2**24
INDEX, VALUE = "#index", "#value"  # endings of names: positions and values of what is not zero in a sparse tensor


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file of contiguous CPU copies."""
    files.write_bytes(path, packed({name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}, {}))


def packed(tensors: dict[str, Tensor], texts: Mapping[str, str]) -> bytes:
    """A safetensors file, with texts and a checksum of all in its header."""
    return save(tensors, {**texts, CHECKSUM: checksum(tensors, texts)})


def checksum(tensors: Mapping[str, Tensor], texts: Mapping[str, str]) -> str:
    """SHA-256 over texts by name, and names, types, shapes and contents of the tensors."""
    total = hashlib.sha256()
    for name in sorted(texts):
        total.update(f"{name!r} {texts[name]!r};".encode())  # as Python writes it: a stranger's text may hold anything
    for name in sorted(tensors):
        value = tensors[name].contiguous()
        total.update(f"{name!r} {value.dtype} {tuple(value.shape)};".encode())
        total.update(value.reshape(-1).view(torch.uint8).numpy().data)  # as bytes: numpy has no bfloat16
    return total.hexdigest()


def read_tensors(path: Path, limit: int | None = None) -> dict[str, Tensor]:
    """Every tensor of a safetensors file of at most `limit` bytes of them; its checksum, where it has one, must fit."""
    with _opened(path, limit) as file:
        return _tensors(path, file)


def read_checked(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and texts of a file that must have its checksum."""
    with _opened(path) as file:
        texts = file.metadata() or {}
        if CHECKSUM not in texts:
            raise ArtifactError(f"{path} has no checksum: it is damaged, or no file of dllp")
        return _tensors(path, file), texts


@contextmanager
def _opened(path: Path, limit: int | None = None) -> Iterator[Any]:
    """A safetensors file with a valid header; :func:`dllp.files.cap` holds whatever `limit` says."""
    if not files.contained(path.parent, path).exists():
        raise ArtifactError(f"{path} is missing: the run folder is incomplete")
    with files.open_plain(path) as file:
        header, size = int.from_bytes(file.read(8), "little"), os.fstat(file.fileno()).st_size
    body, most = size - 8 - header, files.cap() if limit is None else min(limit, files.cap())
    if header > HEADER_BYTES or body < 0:
        raise ArtifactError(f"{path} is no safetensors file: a header of {header} bytes in a file of {size}")
    if body > most:
        raise ArtifactError(f"{path} holds {body} bytes of tensors, more than the {most} that are read")
    try:
        with safe_open(path, framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError, ValueError, KeyError, AttributeError, RuntimeError, MemoryError) as error:
        raise ArtifactError(f"{path} cannot be read: {error}") from None


def _tensors(path: Path, file: Any) -> dict[str, Tensor]:
    """All tensors of an open file; those that others wrote have no checksum."""
    tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    texts = file.metadata() or {}
    stored = texts.pop(CHECKSUM, None)
    if stored is not None and stored != checksum(tensors, texts):
        raise ArtifactError(f"{path} is damaged: its checksum does not fit; copy it again from where it is whole")
    for name, value in tensors.items():
        # A byte other than 0 and 1 is undefined behaviour in whatever counts or indexes with the tensor.
        if value.dtype == torch.bool and value.numel() and int(value.view(torch.uint8).max()) > 1:
            raise ArtifactError(f"{path}: {name!r} holds booleans that are neither 0 nor 1")
    return tensors


def write_network(path: Path, network: nn.Module, gated: tuple[str, ...] = ()) -> None:
    """A state dict; tensors named in `gated` as the positions and values of what is not zero."""
    tensors: dict[str, Tensor] = {}
    for name, value in network.state_dict().items():
        if name in gated:
            flat = value.detach().flatten()
            index = flat.nonzero().flatten()
            tensors[name + INDEX], tensors[name + VALUE] = index.to(torch.int32), flat[index]
        else:
            tensors[name] = value
    write_tensors(path, tensors)


def read_network(path: Path, network: nn.Module) -> None:
    """Fill `network` from a file of :func:`write_network`; every name, shape and dtype must fit."""
    targets = network.state_dict()
    with _opened(path) as file:
        _check_shapes(path, file, targets)
        stored = _tensors(path, file)
    learned = {name for name, _ in network.named_parameters(remove_duplicate=False)}
    for name, target in targets.items():
        value = stored[name] if name in stored else _dense(path, name, stored, target)
        if value.dtype != target.dtype:
            raise ArtifactError(f"{path}: {name!r} is {value.dtype}, but the network needs {target.dtype}")
        check_finite(path, name, value, infinite=name not in learned)
        target.copy_(value)


def check_finite(path: Path, name: str, value: Tensor, *, infinite: bool) -> None:
    """Raise for NaN, and for infinity unless `infinite`: buffers may hold it on purpose (masks), weights never."""
    if value.is_floating_point() and bool((value.isnan() if infinite else ~value.isfinite()).any()):
        raise ArtifactError(f"{path}: {name!r} holds numbers that are not finite")


def check_shapes(path: Path, network: nn.Module) -> None:
    """Raise unless the file holds the names and shapes of `network`, which may be on the meta device."""
    with _opened(path) as file:
        _check_shapes(path, file, network.state_dict())


def _check_shapes(path: Path, file: Any, targets: Mapping[str, Tensor]) -> None:
    """Compare the header with a network, before any tensor is read."""
    found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    for name, target in targets.items():
        shape, index, value = (found.pop(name + end, None) for end in ("", INDEX, VALUE))
        if shape is None and index is not None and value is not None:
            if len(index) != 1 or index != value or index[0] > target.numel():
                raise ArtifactError(f"{path}: the positions of {name!r} do not fit the network")
        elif shape is None:
            raise ArtifactError(f"{path} has no tensor {name!r}: it belongs to another network")
        elif shape != target.shape:
            raise ArtifactError(f"{path}: {name!r} is {shape}, but the network needs {tuple(target.shape)}")
    if found:
        raise ArtifactError(f"{path} has a tensor {min(found)!r} that the network lacks: it belongs to another network")


def _dense(path: Path, name: str, stored: Mapping[str, Tensor], target: Tensor) -> Tensor:
    """A tensor that is stored as positions and values."""
    index, value = stored[name + INDEX], stored[name + VALUE]
    flat = torch.zeros(target.numel(), dtype=value.dtype)
    outside = len(index) and (int(index.min()) < 0 or int(index.max()) >= len(flat))
    if index.dtype != torch.int32 or outside:
        raise ArtifactError(f"{path}: the positions of {name!r} do not fit the network")
    flat[index.long()] = value
    return flat.view(target.shape)
