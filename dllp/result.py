"""What a run ends with: the pruned networks and all that is known about them, in memory and in a folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from dllp import notebook, reading, writing
from dllp.config import Config
from dllp.devices.torch_context import undisturbed
from dllp.errors import ArtifactError, ConfigError, StructureError
from dllp.posterior import Posterior
from dllp.runs import artifacts
from dllp.structure.slicing import copied, cut
from dllp.structure.trace import check_network
from dllp.training.extract import Slab


@dataclass(frozen=True)
class Size:
    """What a network costs: multiply-accumulates of one example and stored numbers, of non-zero weights only."""

    macs: float
    params: int


@dataclass(frozen=True)
class Result:
    """A pruned network and everything known about it.

    Attributes:
        config: The configuration of the run, every default filled in.
        slabs: The extracted particles, M_p and M_0 of each.
        posterior: Predicts with all extracted particles.
        history: One record for each epoch.
        dense, sizes: Costs of the original network and of each extracted one.
        gates: Gate logits (n, U), decisions (n, U), slab precisions (n, modules) and noise 1/d^2 (n,).
        widths: Kept and original channels (or weights) of each group, for each particle.
        whole: Groups that were kept whole, and why.
        info: Versions and hardware of the run, and whatever a caller adds.
    """

    config: Config
    slabs: list[Slab]
    posterior: Posterior
    history: list[dict[str, Any]]
    dense: Size
    sizes: list[Size]
    gates: dict[str, Tensor]
    widths: dict[str, list[int]]
    whole: dict[str, str] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> nn.Module:
        """M_p, the pruned network: the slab part of the first particle."""
        return self.slabs[0].network

    @property
    def reference(self) -> nn.Module:
        """M_0, the first particle in its full shape."""
        return self.slabs[0].reference

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        sizes = [vars(size) for size in self.sizes]
        return notebook.summary(self.config, vars(self.dense), sizes, self.widths, self.history)

    def save(self, folder: str | Path, *, overwrite: bool = False) -> Path:
        """Write the run into a new or empty folder, whole or not at all; `overwrite` replaces a run. Returns it."""
        folder = reading.as_path(folder)
        with artifacts.new_folder(folder, overwrite) as temporary:
            self.write_networks(temporary)
            self.write_run(temporary)
        return folder

    def write_networks(self, folder: Path) -> None:
        """The extracted networks and the gates."""
        for i, slab in enumerate(self.slabs):
            artifacts.write_network(folder / f"particle-{i}.safetensors", slab.network, slab.gated)
            artifacts.write_network(folder / f"reference-{i}.safetensors", slab.reference)
        artifacts.write_tensors(folder / "gates.safetensors", self.gates)

    def write_run(self, folder: Path) -> None:
        """run.json, the last file: where it is, a run is finished."""
        run = {
            "format": artifacts.FORMAT,
            "config": self.config.as_dict(),
            "recipes": [slab.recipe for slab in self.slabs],
            "gated": list(self.slabs[0].gated),
            "dense": vars(self.dense),
            "sizes": [vars(size) for size in self.sizes],
            "widths": self.widths,
            "whole": self.whole,
            "history": self.history,
            "info": self.info,
        }
        writing.write_json(folder / artifacts.RUN, run)


@undisturbed()
def load(folder: str | Path, model: nn.Module) -> Result:
    """A saved run, given a fresh instance of the original network; reads JSON and safetensors only."""
    folder = reading.as_path(folder)
    check_network(model)
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
    noise = gates["noise"]
    slabs = []
    for i, recipe in enumerate(recipes):
        reference = copied(model).cpu().eval()
        artifacts.read_network(folder / f"reference-{i}.safetensors", reference)
        try:
            network = cut(reference, recipe)
        except StructureError as error:
            raise ArtifactError(f"{folder / artifacts.RUN}: {error}") from None
        artifacts.read_network(folder / f"particle-{i}.safetensors", network)
        slabs.append(Slab(network, reference, recipe, gated, gates["keep"][i].bool()))
    posterior = posterior_of([slab.network for slab in slabs], noise, config)
    return Result(config, slabs, posterior, dense=dense, sizes=sizes, gates=gates, **rest)


def posterior_of(networks: Sequence[nn.Module], noise: Tensor, config: Config) -> Posterior:
    """Networks that were trained by `config`, and the noise (n,) of each, as a posterior."""
    return Posterior(networks, noise, config.task, head=config.noise == "input")
