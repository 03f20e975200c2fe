"""A finished run on disk: its networks, its gates, and run.json, written last and read without trusting it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dllp import files
from dllp.config import Config
from dllp.errors import ArtifactError, ConfigError, StructureError
from dllp.records import EpochRecord, ExtractedParticle, Recipe, Size
from dllp.runs import settings
from dllp.runs.folder import DENSE_FILE, GATES, RUN, SETTINGS, RunFolder, member, particle_file, reference_file
from dllp.runs.settings import Task
from dllp.runs.tensors import read_network, read_tensors, write_network, write_tensors
from dllp.structure.slicing import copied, cut

FORMAT = 1


@dataclass(frozen=True)
class Run:
    """The content of run.json, as far as it is relied on."""

    config: dict[str, Any]  # fields of :class:`dllp.Config` by name, valid
    recipes: list[Recipe]  # of each particle
    gated: list[str]  # parameters whose single weights were pruned
    dense: Size
    sizes: list[Size]
    widths: dict[str, list[int]]  # kept channels (or weights) of each group, for each particle, and before
    whole: dict[str, str]  # groups that were kept whole, and why
    history: list[EpochRecord]
    info: dict[str, Any]  # versions and hardware of the run, and whatever a caller added


def write_networks(folder: Path, particles: Sequence[ExtractedParticle], gates: dict[str, Tensor]) -> None:
    """The extracted networks and the gates."""
    for k, particle in enumerate(particles):
        write_network(folder / particle_file(k), particle.network, particle.gated)
        write_network(folder / reference_file(k), particle.reference)
    write_tensors(folder / GATES, gates)


def write_run(
    folder: Path, config: Config, particles: Sequence[ExtractedParticle], dense: Size, sizes: Sequence[Size],
    **rest: Any,
) -> None:  # fmt: skip
    """run.json, the last file: where it is, a run is finished. `rest` are its other fields: history, widths, ..."""
    run = {"format": FORMAT, "config": config.as_dict(), "recipes": [particle.recipe for particle in particles]}
    run |= {"gated": list(particles[0].gated), "dense": vars(dense), "sizes": [vars(size) for size in sizes]}
    files.write_json(folder / RUN, run | rest)


def write_settings(folder: Path, config: Config, model: str, data: str | None) -> None:
    """config.yaml of a run that was made in Python: its configuration, and where its network and data are found."""
    task = Task(model=model, data=data or Task.data).anchored()
    left_out = () if data else ("data",)
    files.write_bytes(folder / SETTINGS, settings.write(task, config, left_out))


def read_run(folder: Path) -> Run:
    """The run.json of a finished run, every field checked."""
    if not folder.is_dir():
        raise ArtifactError(f"{folder} is not a folder: give the folder of a finished run")
    held = RunFolder(folder)
    if not held.finished and held.unfinished:
        raise ArtifactError(f"{folder} holds an unfinished run: finish it with {held.command}")
    if not held.finished:
        raise ArtifactError(f"{folder} holds no {RUN}: it is not the folder of a finished run")
    path = member(folder, RUN)
    found = files.read_json(path)
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        way = f"read it with that one, or run again from its settings: dllp prune --config {folder / SETTINGS}"
        raise ArtifactError(f"{path} is not of format {FORMAT}, but of another version of dllp: {way}")
    run = files.typed(Run, found, path)
    try:
        Config.from_dict(run.config)
    except ConfigError as error:
        raise ArtifactError(f"{path}: {error}") from None
    particles = len(run.recipes)
    if not particles or len(run.sizes) != particles:
        raise ArtifactError(f"{path}: {particles} recipes and {len(run.sizes)} sizes: one for each particle is needed")
    if any(len(counts) != particles + 1 or min(counts) < 0 or counts[-1] < 1 for counts in run.widths.values()):
        raise ArtifactError(f"{path}: 'widths' has not one count for each particle and one before")
    if any(size.macs < 0 or size.params < 0 for size in (run.dense, *run.sizes)):
        raise ArtifactError(f"{path}: a size is negative")
    return run


def read(folder: Path, model: nn.Module) -> dict[str, Any]:
    """The fields of a saved result by name, given a fresh instance of the original network."""
    run, path = read_run(folder), folder / RUN
    gates = _read_gates(folder, len(run.recipes), sum(value.numel() for value in model.state_dict().values()))
    particles = []
    for k, recipe in enumerate(run.recipes):
        reference = copied(model).cpu().eval()
        read_network(folder / reference_file(k), reference)
        try:
            network = cut(reference, recipe)
        except StructureError as error:
            raise ArtifactError(f"{path}: {error}") from None
        read_network(folder / particle_file(k), network)
        particles.append(ExtractedParticle(network, reference, recipe, tuple(run.gated), gates["keep"][k].bool()))
    original = None
    if (folder / DENSE_FILE).exists():
        original = copied(model).cpu().eval()
        read_network(member(folder, DENSE_FILE), original)
    known = run.info.get("data")
    shape = tuple(known.get("shape", ())) if isinstance(known, dict) else ()
    history = [record.as_dict() for record in run.history]
    same = {name: getattr(run, name) for name in ("dense", "sizes", "widths", "whole", "info")}
    read = {"original": original, "shape": shape, "particles": particles, "gates": gates, "history": history}
    return {"config": Config.from_dict(run.config), **read, **same}


def _read_gates(folder: Path, particles: int, numbers: int) -> dict[str, Tensor]:
    """The gates of a run of `particles` networks, each of `numbers` numbers: no gate stands for less than one."""
    path = folder / GATES
    gates = read_tensors(path, limit=particles * (32 * numbers + 1024))
    for name, dims in (("logits", 2), ("keep", 2), ("slab", 2), ("noise", 1)):
        value = gates.get(name)
        if value is None or value.dim() != dims or len(value) != particles:
            raise ArtifactError(f"{path}: {name!r} is missing or not of {dims} dimensions for {particles} particles")
        if value.dtype != torch.bool if name == "keep" else not value.is_floating_point():
            raise ArtifactError(f"{path}: {name!r} is {value.dtype}: booleans are kept, all others are floats")
    return gates
