"""The files of a finished run, JSON and safetensors, never pickle: how they are read, checked and written.

    run.json                  format, configuration, recipe of each particle, costs, history; written last
    gates.safetensors         gate logits, decisions, slab precisions, noise
    particle-K.safetensors    M_p of particle K; single pruned weights are stored as positions and values
    reference-K.safetensors   M_0 of particle K

Every file is written under a temporary name and renamed: what has the name is whole. So is the folder of a result that
is saved; that of `dllp prune` is whole once run.json is there (see :mod:`dllp.runs.folder`). Tensors carry a checksum
in their file's header: what a disk or a copy changed later is told.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from dllp import files
from dllp.errors import ArtifactError
from dllp.records import EpochRecord

FORMAT = 1
RUN = "run.json"
LOG, EVALUATION, SPEED, CORRUPTIONS = "log.jsonl", "evaluation.json", "speed.json", "corruptions.json"
EXAMPLES, PAGE = "examples.safetensors", "report.html"
"""Files that commands add to a run."""
UNFINISHED = "checkpoints"
CHECKSUM = "dllp-sha256"
_INDEX, _VALUE = "#index", "#value"
_DTYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.uint16: "U16", torch.int16: "I16", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.uint32: "U32", torch.int32: "I32", torch.float32: "F32", torch.uint64: "U64",
    torch.int64: "I64", torch.float64: "F64", torch.complex64: "C64",
}  # fmt: skip
"""safetensors' own names."""


def member(folder: Path, name: str) -> Path:
    """A file of a run folder; a link that leads out of the folder is an error."""
    return files.contained(folder, folder / name)


def read_json(path: Path) -> Any:
    """The value in a JSON file, or an ArtifactError that names it."""
    return files.parse_json(files.read_bytes(path, files.JSON_BYTES), path)


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
    """Every tensor of a safetensors file, or an ArtifactError that names it; at most `limit` bytes, where given."""
    return _tensors(path, _header(path, limit)[1])


def read_checked(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and texts of a file that must have its checksum."""
    metadata = _header(path)[1]
    if CHECKSUM not in metadata:
        raise ArtifactError(f"{path} has no checksum: it is damaged, or no file of dllp")
    return _tensors(path, metadata), metadata


def _header(path: Path, limit: int | None = None) -> tuple[dict[str, files.Declared], dict[str, str]]:
    """What the file declares, checked, and the texts in its header; a link out of its folder is an error."""
    if not files.contained(path.parent, path).exists():
        raise ArtifactError(f"{path} is missing: the run folder is incomplete")
    return files.tensors_header(path, limit=limit)


def _tensors(path: Path, metadata: Mapping[str, str]) -> dict[str, Tensor]:
    """The tensors of a file; where it has a checksum, they must fit it. Files of others have none."""
    try:
        with safe_open(path, framework="pt") as handle:
            tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, KeyError, AttributeError, MemoryError) as error:
        raise ArtifactError(f"{path} cannot be read: {error}") from None
    for name, value in tensors.items():
        # A byte other than 0 and 1 is undefined behaviour in whatever counts or indexes with the tensor.
        if value.dtype == torch.bool and value.numel() and int(value.view(torch.uint8).max()) > 1:
            raise ArtifactError(f"{path}: {name!r} holds booleans that are neither 0 nor 1")
    texts = {name: text for name, text in metadata.items() if name != CHECKSUM}
    if CHECKSUM in metadata and metadata[CHECKSUM] != checksum(tensors, texts):
        raise ArtifactError(f"{path} is damaged: its checksum does not fit; copy it again from where it is whole")
    return tensors


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
    targets = network.state_dict()
    declared, metadata = _header(path)
    _check_fit(path, declared, targets)
    stored = _tensors(path, metadata)
    learned = {name for name, _ in network.named_parameters(remove_duplicate=False)}
    for name, target in targets.items():
        if name in stored:
            value = stored.pop(name)
        else:
            value = _dense(path, name, stored.pop(name + _INDEX), stored.pop(name + _VALUE), target)
        # Buffers may hold infinities on purpose (masks); a weight never does.
        if value.is_floating_point() and bool((~value.isfinite() if name in learned else value.isnan()).any()):
            raise ArtifactError(f"{path}: {name!r} holds numbers that are not finite")
        target.copy_(value)


def check_declared(path: Path, network: nn.Module) -> None:
    """Raise unless the file's header declares the state of `network`, which may be on the meta device."""
    _check_fit(path, _header(path)[0], network.state_dict())


def _check_fit(path: Path, declared: Mapping[str, files.Declared], targets: Mapping[str, Tensor]) -> None:
    """Names, shapes and dtypes of a header against those of a network: before any of its tensors is read."""
    rest = dict(declared)
    for name, target in targets.items():
        dtype = _DTYPES.get(target.dtype, "?")
        index, value = rest.get(name + _INDEX), rest.get(name + _VALUE)
        if name in rest:
            found = rest.pop(name)
            if found != (dtype, tuple(target.shape)):
                raise ArtifactError(
                    f"{path}: {name!r} is {found.shape} {found.dtype}, but the network needs "
                    f"{tuple(target.shape)} {dtype}"
                )
        elif index is not None and value is not None:
            del rest[name + _INDEX], rest[name + _VALUE]
            if index.dtype != "I32" or len(index.shape) != 1 or index.shape != value.shape:
                raise ArtifactError(f"{path}: the positions of {name!r} do not fit the network")
            if value.dtype != dtype or index.shape[0] > target.numel():
                raise ArtifactError(f"{path}: the values of {name!r} are not what the network needs: {dtype}")
        else:
            raise ArtifactError(f"{path} has no tensor {name!r}: it belongs to another network")
    if rest:
        raise ArtifactError(f"{path} has a tensor {min(rest)!r} that the network lacks: it belongs to another network")


def _dense(path: Path, name: str, index: Tensor, value: Tensor, target: Tensor) -> Tensor:
    flat = torch.zeros(target.numel(), dtype=value.dtype)
    if len(index) and (int(index.min()) < 0 or int(index.max()) >= len(flat)):
        raise ArtifactError(f"{path}: the positions of {name!r} do not fit the network")
    flat[index.long()] = value
    return flat.view(target.shape)


def read_run(folder: Path) -> dict[str, Any]:
    """The run.json of a finished run, its format checked."""
    if not folder.is_dir():
        raise ArtifactError(f"{folder} is not a folder: give the folder of a finished run")
    if not (folder / RUN).is_file() and (folder / UNFINISHED).is_dir():
        again = f"dllp prune --resume --out {shlex.quote(str(folder))}"
        raise ArtifactError(f"{folder} holds an unfinished run: finish it with {again}")
    if not (folder / RUN).is_file():
        raise ArtifactError(f"{folder} holds no {RUN}: it is not the folder of a finished run")
    path = member(folder, RUN)
    run = read_json(path)
    if not isinstance(run, dict) or run.get("format") != FORMAT:
        raise ArtifactError(f"{path} is not of format {FORMAT}: it was written by another version of dllp")
    for name, (fits, wanted) in _FIELDS.items():
        if name not in run or not fits(run[name]):
            raise ArtifactError(f"{path}: {name!r} is missing or is not {wanted}")
    files.check_settings(run["config"], f"{path}, 'config'")
    if any(len(counts) != len(run["recipes"]) + 1 or counts[-1] < 1 for counts in run["widths"].values()):
        raise ArtifactError(f"{path}: 'widths' has not one count for each particle and one before")
    files.records(EpochRecord, run["history"], path)
    return run


def _is_size(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and set(value) == {"macs", "params"}
        and type(value["macs"]) in (int, float)
        and type(value["params"]) is int
        and min(value.values()) >= 0
    )


def _is_list(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(fits, value))


def _is_dict(value: Any, fits: Callable[[Any], bool] = lambda entry: True) -> bool:
    return isinstance(value, dict) and all(map(fits, value.values()))


_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "config": (_is_dict, "a mapping of settings"),
    "recipes": (lambda v: _is_list(v, _is_dict) and bool(v), "a list of recipes, one for each particle"),
    "gated": (lambda v: _is_list(v, lambda name: isinstance(name, str)), "a list of names"),
    "dense": (_is_size, "a size: macs and params"),
    "sizes": (lambda v: _is_list(v, _is_size), "a list of sizes: macs and params"),
    "widths": (
        lambda v: _is_dict(v, lambda counts: _is_list(counts, lambda n: type(n) is int and n >= 0)),
        "a mapping of names to lists of counts",
    ),
    "whole": (lambda v: _is_dict(v, lambda why: isinstance(why, str)), "a mapping of names to reasons"),
    "history": (lambda v: _is_list(v, _is_dict), "a list of records"),
    "info": (_is_dict, "a mapping"),
}
"""What run.json must hold; the rest of the package relies on it."""


def read_gates(folder: Path, particles: int, numbers: int) -> dict[str, Tensor]:
    """The gates of a run of `particles` networks, each of `numbers` numbers: no gate stands for less than one."""
    path = folder / "gates.safetensors"
    gates = read_tensors(path, limit=particles * (32 * numbers + 1024))
    for name, dims in (("logits", 2), ("keep", 2), ("slab", 2), ("noise", 1)):
        value = gates.get(name)
        if value is None or value.dim() != dims or len(value) != particles:
            raise ArtifactError(f"{path}: {name!r} is missing or not of {dims} dimensions for {particles} particles")
        if value.dtype != torch.bool if name == "keep" else not value.is_floating_point():
            raise ArtifactError(f"{path}: {name!r} is {value.dtype}: booleans are kept, all others are floats")
    return gates


def network_bytes(folder: Path, particle: int) -> int:
    """Size on disk of one extracted network."""
    return member(folder, f"particle-{particle}.safetensors").stat().st_size


# ---- the folder as a whole


def check_free(folder: Path, overwrite: bool = False) -> None:
    """Raise unless a run may be written there; only a run folder or an empty one is ever replaced."""
    files.check_name(folder, ArtifactError)
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
        prefix = f".{folder.name[:32]}-"  # cut, so that the longest name that is allowed can still be written
        temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
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
