"""Trained weights to start from: a safetensors file, or a state dict of torch.save, read weights-only."""

from __future__ import annotations

import os
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dllp import files
from dllp.errors import ArtifactError
from dllp.runs.settings import SUFFIXES
from dllp.runs.tensors import check_finite, read_tensors

WRAPPERS = ("state_dict", "model_state_dict", "model")  # under which training scripts keep the weights
PICKLE_BYTES = 2**24  # most bytes of the part that names the tensors


def start(network: nn.Module, path: Path) -> list[str]:
    """Fill a network from a file; returns one line where its last layer was made for other classes and stays new.

    Every other tensor must be there, fit in shape and be finite; half precision becomes the network's own.
    """
    stored, targets = read(path), network.state_dict()
    rename: Any = getattr(network, "usual_name", None)
    if rename is not None and not stored.keys() & targets.keys():
        stored = {rename(name): value for name, value in stored.items()}
    last = [name for name, module in network.named_modules() if any(True for _ in module.parameters(recurse=False))][-1]
    learned = {name for name, _ in network.named_parameters(remove_duplicate=False)}
    fresh, fitting = [], {}
    for name, target in targets.items():
        value = stored.pop(name, None)
        if value is None or value.shape != target.shape:
            found = "it is not there" if value is None else f"it is {tuple(value.shape)}"
            if name.rpartition(".")[0] == last:
                fresh.append(name)
            elif name in learned or value is not None or target.is_floating_point():
                raise ArtifactError(f"{path}: the network needs {name!r} of shape {tuple(target.shape)}, but {found}")
            continue
        if value.is_floating_point() != target.is_floating_point() or value.is_complex():
            raise ArtifactError(f"{path}: {name!r} is {value.dtype}, but the network needs {target.dtype}")
        check_finite(path, name, value, infinite=name not in learned)
        fitting[name] = value
    if stored:
        lacking = f"{path} has a tensor {min(stored)!r} that the network lacks"
        raise ArtifactError(f"{lacking}: it belongs to another network")
    for name, value in fitting.items():  # when all is known to fit: a network is never half filled
        targets[name].copy_(value)
    return [f"the last layer ({', '.join(fresh)}) does not fit {path}: it starts new"] if fresh else []


def read(path: Path) -> dict[str, Tensor]:
    """Names and tensors of a file of weights."""
    if not path.is_file():
        raise ArtifactError(f"{path} is no file: give trained weights, {' or '.join(SUFFIXES[:2])}")
    if path.suffix == ".safetensors":
        return read_tensors(path.resolve())
    found = _unpickled(path)
    for wrapper in WRAPPERS:
        if isinstance(found, Mapping) and isinstance(found.get(wrapper), Mapping):
            found = found[wrapper]
            break
    plain = isinstance(found, Mapping) and all(
        isinstance(name, str) and isinstance(value, Tensor) and value.layout == torch.strided
        and not value.is_quantized and value.device.type == "cpu"
        for name, value in found.items()
    )  # fmt: skip
    if not found or not plain:
        raise ArtifactError(f"{path} holds no names and tensors: save model.state_dict(), best as .safetensors")
    parallel = all(name.startswith("module.") for name in found)
    return {name.removeprefix("module.") if parallel else name: value for name, value in found.items()}


def _unpickled(path: Path) -> Any:
    """The content of a file of torch.save; nothing is compressed, so no tensor can be larger than the file."""
    with files.open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
    if size > files.cap():
        raise ArtifactError(f"{path} has {size} bytes, more than the {files.cap()} of ${files.CAP_VARIABLE}")
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                most = PICKLE_BYTES if member.filename.endswith(".pkl") else size
                if member.compress_type != zipfile.ZIP_STORED or member.file_size > most:
                    raise ValueError(member.filename)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # torch's own words are about another way to read it, which runs the file's code
        raise ArtifactError(
            f"{path} cannot be read as weights alone: it is damaged, or holds Python objects as a whole module does; "
            "save model.state_dict(), best as .safetensors"
        ) from None
