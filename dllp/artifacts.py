"""Run folders: JSON and safetensors, never pickle. The only file that knows the disk format.

    run.json                  format, configuration, recipe of each particle, costs, history; written last
    gates.safetensors         gate logits, decisions, slab precisions, noise
    particle-K.safetensors    M_p of particle K; single pruned weights are stored as positions and values
    reference-K.safetensors   M_0 of particle K

Every file is written to a temporary name, flushed and renamed, and so is the folder: what has the name is whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from dllp.errors import ArtifactError

FORMAT = 1
RUN = "run.json"
_INDEX, _VALUE = "#index", "#value"


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file so that it is there whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as handle:
            handle.write(content)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):  # the folder itself may be what is missing
            temporary.unlink()
        reason = "Not a directory" if isinstance(error, FileExistsError) else error.strerror
        raise ArtifactError(f"cannot write {path}: {reason}; free some space or choose another folder") from None


def write_json(path: Path, value: Any) -> None:
    """JSON with a trailing newline; NaN is an error, so that every reader can parse it."""
    write_bytes(path, (json.dumps(value, indent=1, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> Any:
    """The value in a JSON file, or an ArtifactError that names it."""
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise ArtifactError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ArtifactError(f"{path} is not valid JSON: the file is damaged") from None


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file of contiguous CPU copies."""
    write_bytes(path, save({name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}))


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a safetensors file, or an ArtifactError that names it."""
    try:
        with safe_open(path, framework="pt") as handle:
            return {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise ArtifactError(f"{path} is missing: the run folder is incomplete") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise ArtifactError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None


def read_metadata(path: Path) -> dict[str, str]:
    """The text in a safetensors file's header."""
    try:
        with safe_open(path, framework="pt") as handle:
            return handle.metadata() or {}
    except (SafetensorError, OSError, ValueError) as error:
        raise ArtifactError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None


def write_network(path: Path, network: nn.Module, gated: tuple[str, ...] = ()) -> None:
    """A state dict; tensors named in `gated` as the positions and values of what is not zero."""
    tensors: dict[str, Tensor] = {}
    for name, value in network.state_dict().items():
        if name in gated:
            flat = value.detach().flatten()
            index = flat.nonzero().flatten()
            tensors[name + _INDEX], tensors[name + _VALUE] = index.to(torch.int32), flat[index]
        else:
            tensors[name] = value
    write_tensors(path, tensors)


def read_network(path: Path, network: nn.Module) -> None:
    """Fill `network` from a file of :func:`write_network`; every name, shape and dtype must fit."""
    stored = read_tensors(path)
    for name, target in network.state_dict().items():
        if name + _INDEX in stored and name + _VALUE in stored:
            value = _dense(path, name, stored.pop(name + _INDEX), stored.pop(name + _VALUE), target)
        elif name in stored:
            value = stored.pop(name)
        else:
            raise ArtifactError(f"{path} has no tensor {name!r}: it belongs to another network")
        if value.shape != target.shape or value.dtype != target.dtype:
            raise ArtifactError(
                f"{path}: {name!r} is {tuple(value.shape)} {value.dtype}, but the network needs "
                f"{tuple(target.shape)} {target.dtype}"
            )
        target.copy_(value)
    if stored:
        raise ArtifactError(
            f"{path} has a tensor {min(stored)!r} that the network lacks: it belongs to another network"
        )


def _dense(path: Path, name: str, index: Tensor, value: Tensor, target: Tensor) -> Tensor:
    flat = torch.zeros(target.numel(), dtype=value.dtype)
    fits = index.dtype == torch.int32 and index.dim() == 1 and index.shape == value.shape
    if not fits or (len(index) and (int(index.min()) < 0 or int(index.max()) >= len(flat))):
        raise ArtifactError(f"{path}: the positions of {name!r} do not fit the network")
    flat[index.long()] = value
    return flat.view(target.shape)


def read_run(folder: Path) -> dict[str, Any]:
    """The run.json of a finished run, its format checked."""
    if not folder.is_dir():
        raise ArtifactError(f"{folder} is not a folder: give the folder of a finished run")
    if not (folder / RUN).is_file():
        raise ArtifactError(f"{folder} holds no {RUN}: it is not the folder of a finished run")
    run = read_json(folder / RUN)
    if not isinstance(run, dict) or run.get("format") != FORMAT:
        raise ArtifactError(f"{folder / RUN} is not of format {FORMAT}: it was written by another version of dllp")
    return run


def network_bytes(folder: Path, particle: int) -> int:
    """Size on disk of one extracted network."""
    return (folder / f"particle-{particle}.safetensors").stat().st_size


# ---- the folder as a whole


def check_free(folder: Path, overwrite: bool = False) -> None:
    """Raise unless a run may be written there; only a run folder or an empty one is ever replaced."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ArtifactError(f"{folder} is a file: give a folder for the run")
    if (folder / RUN).exists():
        if not overwrite:
            raise ArtifactError(f"{folder} already holds a run: choose another folder, or replace it (--overwrite)")
    elif any(folder.iterdir()):
        raise ArtifactError(f"{folder} holds other files: choose another folder for the run")


@contextlib.contextmanager
def new_folder(folder: Path, overwrite: bool = False) -> Iterator[Path]:
    """A temporary folder beside `folder` that takes its place when the block ends well, and is gone otherwise."""
    check_free(folder, overwrite)
    folder = folder.absolute()
    made = [parent for parent in folder.parents if not parent.exists()]
    replaced: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise ArtifactError(f"cannot write to {folder.parent}: {error.strerror}") from None
    try:
        temporary.chmod(0o777 & ~_umask())  # mkdtemp makes it private
        yield temporary
        check_free(folder, overwrite)
        if folder.exists():
            replaced = temporary.with_name(temporary.name + "-old")
            os.rename(folder, replaced)
        os.rename(temporary, folder)
    except BaseException as error:
        if replaced is not None and replaced.exists() and not folder.exists():
            os.rename(replaced, folder)
        shutil.rmtree(temporary, ignore_errors=True)
        for parent in made:
            with contextlib.suppress(OSError):
                parent.rmdir()
        if isinstance(error, OSError):
            raise ArtifactError(f"cannot write {folder}: {error.strerror}; free some space or choose another") from None
        raise
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
