"""A run on several processes ends where one process alone would, whatever they share; in float64, through all phases.

Batch norm needs `sync_batch_norm` for that where a batch is shared; dropout draws other numbers, and is left out.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from dllp.devices.mesh import Axis, CpuSyncBatchNorm, CudaSyncBatchNorm, Place, synchronise
from dllp.devices.ranks import Ranks
from dllp.errors import ConfigError, DataError, DllpError, RankError
from dllp.training.snapshot import Snapshot, restore, snapshot
from dllp.training.trainer import train
from tests.support import many
from tests.support.commands import ENVIRONMENT, once

TWO = ("plain-data", "plain-particles", "norms-data", "weight-data", "weight-particles", "mean-particles",
       "coordinate-particles", "uneven-data", "four-particles", "parts-data", "parts-particles",
       "again-data", "streamed-data")  # fmt: skip
FOUR = ("plain-data", "norms-both", "weight-both", "mean-both", "uneven-both", "four-particles", "four-both",
        "streamed-data", "streamed-both")  # fmt: skip
cuda = pytest.mark.cuda


@cache
def alone(case: str) -> Snapshot:
    """What one process ends with."""
    return many.run(case, "data")[0]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Folders with the ends of all cases, on two processes and on four."""

    def end(size: int, names: tuple[str, ...], folder: Path) -> None:
        results = many.finish(many.start(size, ["tests.support.many", str(folder), *names]))
        assert all(code == 0 for code, _, _ in results), results

    return {
        size: once(tmp_path_factory, f"ranks-{size}", partial(end, size, names))
        for size, names in ((2, TWO), (4, FOUR))
    }


@pytest.mark.parametrize(("size", "name"), [*((2, name) for name in TWO), *((4, name) for name in FOUR)])
def test_several_processes_end_as_one(ended: dict[int, Path], size: int, name: str) -> None:
    tensors, values = alone(name.split("-")[0])
    found = load_file(ended[size] / f"{name}.safetensors")
    known = json.loads((ended[size] / f"{name}.json").read_text())
    assert found.keys() == tensors.keys() and torch.equal(found["random/gates"], tensors["random/gates"])
    assert known["fingerprint"] == values["fingerprint"] and known["step"] == many.STEPS
    assert known.get("bad") == values.get("bad") and ("bad" in known) == name.startswith("streamed")
    for key in found:
        if not key.startswith("random/"):
            torch.testing.assert_close(
                found[key], tensors[key], rtol=0, atol=1e-8, msg=lambda m, key=key: f"{key}: {m}"
            )
    for record, other in zip(known["history"], values["history"], strict=True):
        assert record["gates"] == other["gates"] and record["phase"] == other["phase"]
        assert record["loss"] == pytest.approx(other["loss"], abs=1e-8)
        assert record["accuracy"] == pytest.approx(other["accuracy"], abs=1e-8)
        assert record["discrepancy"] == pytest.approx(other["discrepancy"], rel=1e-8) and record["discrepancy"] > 0


def test_all_phases_were_seen() -> None:
    _, values = alone("plain")
    trainer, _ = many.build("plain", "data")
    assert trainer.phase == "open" and [record["phase"] for record in values["history"]] == ["soft", "discrete"]
    assert trainer.config.open_until * many.STEPS >= 4


def expected(case: str, lines: int, shards: int) -> float:
    """Bytes that a process sends in all steps of a case: the formulas of docs/scale.md, phase by phase."""
    trainer, data = many.build(case, "data")
    train(trainer, data)
    n, width, gates = trainer.config.particles, trainer.particles.rows.shape[1], trainer.latents.logits.shape[1]
    own, opened, soft, discrete = n // lines, 4, 8, 8
    cut = sum(part.row.numel() for part in trainer.particles.sliced) / lines or own * width
    slab = int(trainer.moving.sum(1).max())
    summed = (opened + soft) * own * width + discrete * cut + many.STEPS * 3 * own + soft * own * gates
    summed += many.STEPS * own * width if trainer.gaussian else 0
    gathered = own * ((opened + soft) * 2 * width + discrete * 2 * slab + width * 9 / 8)  # what stands still, once
    gathered += own * len(trainer.history) * 2 * int(trainer.learnable.sum())  # for the records
    return 8 * (2 * (shards - 1) / shards * summed + (lines - 1) * gathered)


LAYOUTS = [
    (2, "plain-data", 1), (4, "plain-data", 1), (2, "weight-data", 1), (2, "plain-particles", 2),
    (2, "weight-particles", 2), (4, "four-particles", 4), (4, "weight-both", 2),
]  # fmt: skip


@pytest.mark.parametrize(("size", "name", "lines"), LAYOUTS)
def test_bytes_sent_are_those_of_the_formula(ended: dict[int, Path], size: int, name: str, lines: int) -> None:
    sent = json.loads((ended[size] / f"{name}.json").read_text())["sent"]
    assert sent == pytest.approx(expected(name.split("-")[0], lines, size // lines), rel=0.05)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root: a loopback of its own")
def test_the_kernel_counts_the_same_bytes() -> None:
    """Bytes on a loopback that nobody else uses, headers included, in all three layouts."""
    script = Path(__file__).parents[2] / "benchmarks/scale.py"
    words = ("--network", "small_resnet", "--side", "8", "--batch", "8", "--steps", "3", "--ranks", "2", "4")
    done = subprocess.run(
        [sys.executable, script, *words], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True, check=True
    )
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert {record["parallel"] for record in records} == {"data", "particles", "both"}
    for record in records:
        assert record["sent_bytes"] == pytest.approx(record["formula_bytes"], rel=0.01), record
        assert record["wire_bytes"] == pytest.approx(record["formula_bytes"], rel=0.05), record


# ---- one state, whatever the layout


def test_a_state_is_cut_to_what_a_process_owns() -> None:
    """A checkpoint of one process is read by any part of another layout, and their parts make it whole again."""
    whole, _ = many.build("four", "data")
    train(whole, many.Fixed(many.BATCH))
    state = snapshot(whole)
    parts = []
    for index in (0, 1):
        part, _ = many.build("four", "particles", Place(4, Axis(None, index, 2)))
        restore(part, state)
        assert part.particles.rows.shape[0] == 2 and part.latents.keep is not None
        parts.append(part.particles.rows)
    assert torch.equal(torch.cat(parts), whole.particles.rows)


# ---- what a process owns


def test_shards_are_parts_of_the_batch() -> None:
    x, y = torch.arange(11.0), torch.arange(11)
    found = [Place(1, shards=Axis(None, k, 4)).shard(x, y) for k in range(4)]
    assert torch.equal(torch.cat([part for part, _, _ in found]), x)
    assert sum(share for _, _, share in found) == pytest.approx(1)
    with pytest.raises(DataError, match="a batch of 3 for 4 processes"):
        Place(1, shards=Axis(None, 0, 4)).shard(x[:3], y[:3])


@pytest.mark.parametrize(
    ("particles", "parallel", "lines"),
    [(2, "data", 1), (2, "both", 2), (3, "both", 1), (4, "particles", 4), (1, "particles", 1)],
)
def test_how_particles_are_spread(particles: int, parallel: Any, lines: int) -> None:
    assert Ranks(Axis(None, 0, 4)).lines(particles, parallel) == lines


def test_particles_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 particles cannot be spread evenly over 4 processes"):
        Ranks(Axis(None, 0, 4)).lines(3, "particles")


class Echo(Axis):
    """A line in which the others say what they are told to say."""

    def __init__(self, index: int, said: list[str]) -> None:
        super().__init__(None, index, len(said))
        self.said = said

    def all_gather_object(self, text: str) -> list[str]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return [text if k == self.index else other for k, other in enumerate(self.said)]


@pytest.mark.parametrize("index", [0, 2])
def test_an_error_anywhere_is_raised_everywhere_and_told_once(index: int) -> None:
    ranks = Ranks(Echo(index, ["", "no data", ""]))
    with pytest.raises(RankError, match="rank 1: no data") as caught:
        ranks.together(lambda: None)
    assert caught.value.reported_elsewhere == (index > 0)


def test_an_error_of_its_own_stays_what_it_is() -> None:
    def work() -> None:
        raise DataError("no data")

    with pytest.raises(DataError, match=r"^no data$"):
        Ranks(Echo(0, ["", ""])).together(work)
    with pytest.raises(DllpError, match="rank 1 has b, but rank 0 has a: versions must be the same"):
        Ranks(Echo(0, ["a", "b"])).same("versions", "a")


# ---- batch norm


@pytest.mark.parametrize(
    ("device", "kind"), [("cpu", CpuSyncBatchNorm), pytest.param("cuda", CudaSyncBatchNorm, marks=cuda)]
)
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("shape", [(6, 3), (4, 3, 5), (4, 3, 2, 2)])
def test_a_synchronised_norm_is_a_batch_norm(
    shape: tuple[int, ...], momentum: float | None, device: str, kind: type
) -> None:
    kinds = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}
    norm = kinds[len(shape)](3, momentum=momentum).to(device, torch.float64)  # pyright: ignore[reportArgumentType]
    nn.init.normal_(norm.weight)
    twin = copy.deepcopy(norm)
    shared = synchronise(twin, Axis())
    assert type(shared) is kind and type(twin) is type(norm)
    held = {name: tensor.data_ptr() for name, tensor in twin.state_dict().items()}
    assert {name: tensor.data_ptr() for name, tensor in shared.state_dict().items()} == held, "not copies"
    for training in (True, True, False):
        norm.train(training), shared.train(training)
        x = torch.randn(shape, dtype=torch.float64, device=device)
        results: list[Tensor] = []
        for module in (norm, shared):
            leaf = x.clone().requires_grad_()
            output = module(leaf)
            results += [output, *torch.autograd.grad(output.sin().sum(), [leaf, *module.parameters()])]
        for a, b in zip(results[:4], results[4:], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    for name, value in norm.named_buffers():
        torch.testing.assert_close(shared.get_buffer(name), value)
