"""A finished run on disk: its networks, its gates, and run.json, written last and read without trusting it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from dllp import files
from dllp.config import Config
from dllp.errors import ArtifactError, ConfigError, StructureError
from dllp.records import ExtractedParticle, Size
from dllp.runs import artifacts
from dllp.structure.slicing import copied, cut


def write_networks(folder: Path, particles: Sequence[ExtractedParticle], gates: dict[str, Tensor]) -> None:
    """The extracted networks and the gates."""
    for i, particle in enumerate(particles):
        artifacts.write_network(folder / f"particle-{i}.safetensors", particle.network, particle.gated)
        artifacts.write_network(folder / f"reference-{i}.safetensors", particle.reference)
    artifacts.write_tensors(folder / "gates.safetensors", gates)


def write_run(
    folder: Path, config: Config, particles: Sequence[ExtractedParticle], dense: Size, sizes: Sequence[Size],
    **rest: Any,
) -> None:  # fmt: skip
    """run.json, the last file: where it is, a run is finished. `rest` are its other fields: history, widths, ..."""
    run = {
        "format": artifacts.FORMAT,
        "config": config.as_dict(),
        "recipes": [particle.recipe for particle in particles],
        "gated": list(particles[0].gated),
        "dense": vars(dense),
        "sizes": [vars(size) for size in sizes],
        **rest,
    }
    files.write_json(folder / artifacts.RUN, run)


def read(folder: Path, model: nn.Module) -> dict[str, Any]:
    """The fields of a saved result by name, given a fresh instance of the original network."""
    run = artifacts.read_run(folder)
    try:
        config = Config.from_dict(run["config"])
    except ConfigError as error:
        raise ArtifactError(f"{folder / artifacts.RUN}: {error}") from None
    recipes, gated = run["recipes"], tuple(run["gated"])
    dense, sizes = Size(**run["dense"]), [Size(**size) for size in run["sizes"]]
    rest = {key: run[key] for key in ("history", "widths", "whole", "info")}
    if len(recipes) != len(sizes):
        raise ArtifactError(f"{folder / artifacts.RUN}: {len(recipes)} recipes but {len(sizes)} sizes")
    gates = artifacts.read_gates(folder, len(recipes), sum(value.numel() for value in model.state_dict().values()))
    particles = []
    for i, recipe in enumerate(recipes):
        reference = copied(model).cpu().eval()
        artifacts.read_network(folder / f"reference-{i}.safetensors", reference)
        try:
            network = cut(reference, recipe)
        except StructureError as error:
            raise ArtifactError(f"{folder / artifacts.RUN}: {error}") from None
        artifacts.read_network(folder / f"particle-{i}.safetensors", network)
        particles.append(ExtractedParticle(network, reference, recipe, gated, gates["keep"][i].bool()))
    return {"config": config, "particles": particles, "dense": dense, "sizes": sizes, "gates": gates, **rest}
