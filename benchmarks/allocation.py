"""Where a budget's channels go: our allocation against global magnitude and equal shares, on held-out images.

    python benchmarks/allocation.py --data-root DIR --device cuda --precision bfloat16 --out FILE
    python benchmarks/allocation.py --data-root DIR --half --images 10000 --dense-epochs 15 --seeds 0 1 --out FILE

A ResNet-14 of CIFAR-10 (175 k parameters; 16, 32 and 64 channels, projections between its stages) is trained dense once
for each seed, cut to `--keep-flops`, and trained for `--epochs` with the dense network as teacher. 10,000 training
images judge; no test image is read. One line of JSON for each run is appended to FILE; a run whose line is there is not
run again. Arms, each with the same epochs and rates:

    ours              dllp.prune
    equal-price       the same; the budget presses every gate alike, whatever it costs
    dense-price       the same; it presses by what a unit costs in the dense network, however thin its neighbours are
    progressive       the same; by that times the share of its group that is open, so that wide groups pay more
    no-prior          the same; the prior does not push gates
    magnitude-widths  the same; the decision keeps as many units of each group as `magnitude` does
    magnitude         cut at once: global l2 norms over the groups, each group's divided by their mean
    fisher            cut at once: dllp.prune with epochs = 0
    uniform           cut at once: the same share of every group, the largest norms in each
    own-mask          cut at once: the units that `ours` has kept
    own-widths        cut at once: as many units of each group as `ours` has kept, the largest norms in each
    widths:8,8,...    cut at once: so many units of each group, the largest norms in each

"Cut at once" is followed by all the epochs. Where `ours` decides after 30% of them, `at_cut` is the held-out accuracy
just before and after the decision; where the cut comes first, before and after it. `--set` changes the configuration of
the arms that are not cut at once, and so the choice that own-mask and own-widths take.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dllp
from dllp.data import ArrayData, holdout, load
from dllp.structure.groups import Structure, discover
from dllp.structure.select import select
from dllp.structure.slicing import cut, recipe
from dllp.training import latents
from dllp.training.gating import ChannelGating
from dllp.training.latents import Latents
from dllp.zoo.networks import CifarResNet

HELD = 10_000
GATED = ("ours", "equal-price", "dense-price", "progressive", "no-prior", "magnitude-widths")
AT_ONCE = ("magnitude", "fisher", "uniform", "own-mask", "own-widths")
WIDTHS = "widths:"


@dataclass(frozen=True)
class Options:
    """Settings that the runs of a call share."""

    data_root: str
    device: str
    precision: Literal["float32", "bfloat16"]
    half: bool
    images: int
    keep_flops: float
    epochs: int
    dense_epochs: int
    batch: int
    kept: str
    changes: tuple[tuple[str, Any], ...]


# ---- data, networks, accuracy


@cache
def parts(root: str, half: bool, images: int) -> tuple[ArrayData, ArrayData]:
    """Images to train on, and others to judge on; none of the test set."""
    data = load("cifar10", root=root).train
    assert isinstance(data, ArrayData)
    if half:
        small = F.avg_pool2d(data.x.float(), 2).round().to(torch.uint8)
        data = ArrayData(small, data.y, data.mean, data.std, "crop-flip")
    rest, held = holdout(data, HELD, seed=0)
    return (rest if images >= len(rest) else holdout(rest, len(rest) - images, seed=0)[0]), held


@torch.no_grad()
def accuracy(network: nn.Module, held: ArrayData, device: str) -> float:
    """Percent of held-out images that a network answers right."""
    network = network.to(device).eval()
    hits = torch.cat([network(x.to(device)).argmax(1).cpu() for x in held.parts()]) == held.y
    network.cpu()
    return round(100 * float(hits.double().mean()), 2)


@cache
def trained(options: Options, seed: int) -> tuple[nn.Module, float]:
    """The dense network and its accuracy, trained from scratch or as an earlier call has kept it."""
    train, held = parts(options.data_root, options.half, options.images)
    torch.manual_seed(seed)
    network = CifarResNet(2, shortcut="projection")
    side = 16 if options.half else 32
    path = Path(options.kept) / f"resnet14-{side}-{len(train)}-{options.dense_epochs}-{seed}.pt"
    if path.exists():
        network.load_state_dict(torch.load(path, weights_only=True))
    else:
        config = dllp.Config(
            init="fresh", epochs=options.dense_epochs, batch_size=options.batch, lr=0.1, lr_end=0.001, warmup=2.0,
            seed=seed, teacher="off", device=options.device, precision=options.precision,
        )  # fmt: skip
        network = dllp.train_dense(network, train, config, progress=False).model.cpu()
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(network.state_dict(), path)
    return network, accuracy(network, held, options.device)


# ---- choices without gates


def norms(structure: Structure, network: nn.Module) -> Tensor:
    """(U,): mean over the weights that make or read a unit of their squared l2 norm, over the mean in its group."""
    weights, found = dict(network.named_parameters()), []
    for group in structure.groups:
        total = torch.zeros(group.units, dtype=torch.float64)
        for piece in group.slices:
            if piece.name in weights and not piece.name.endswith("bias"):
                rows = weights[piece.name].detach().double().movedim(piece.axis, 0)
                size = rows.reshape(len(piece.unit), -1).square().sum(1)
                total.index_add_(0, piece.unit[piece.unit >= 0], size[piece.unit >= 0])
        found.append(total / total.mean())
    return torch.cat(found)


def largest(structure: Structure, values: Tensor, counts: list[int]) -> Tensor:
    """(U,) -> bool (U,): the units of each group with the `counts` largest values."""
    keep = torch.zeros(structure.units, dtype=torch.bool)
    for part, count in zip(structure.slices, counts, strict=True):
        keep[part.start + values[part].argsort(descending=True, stable=True)[:count]] = True
    return keep


def ranks(structure: Structure, values: Tensor) -> Tensor:
    """(U,) -> (U,): rank within each group in (0, 1]."""
    parts = [values[part].argsort(stable=True).argsort(stable=True) for part in structure.slices]
    return torch.cat([(part + 1).double() / len(part) for part in parts])


def dense_prices(structure: Structure) -> Tensor:
    """(U,): what each unit costs where all others are open."""
    open_ = torch.ones(structure.units, dtype=torch.float64, requires_grad=True)
    return torch.autograd.grad(structure.flops.expected(open_), open_)[0]


def counts_of(structure: Structure, keep: Tensor) -> list[int]:
    """Kept units of each group."""
    return [int(keep[part].sum()) for part in structure.slices]


# ---- suspects, switched


@contextmanager
def priced(structure: Structure, price: Tensor, device: str, *, progressive: bool = False) -> Iterator[None]:
    """The budget's pressure in proportion to `price` (U,) theta (1 - theta), its sum as it was."""
    own, price = Latents._budget_gradient, price.to(device, torch.float32)  # a captured step copies nothing
    sizes = [group.units for group in structure.groups]

    def changed(self: Latents, temperature: Tensor, ramp: Tensor) -> Tensor:
        found, theta = own(self, temperature, ramp), self.logits.sigmoid()
        weight = price * theta * (1 - theta)
        if progressive:
            open_ = [part.mean(1, keepdim=True).expand_as(part) for part in theta.split(sizes, 1)]
            weight = weight * torch.cat(open_, 1)
        return weight * (found.sum(1, keepdim=True) / weight.sum(1, keepdim=True))

    with mock.patch.object(Latents, "_budget_gradient", changed):
        yield


@contextmanager
def no_prior() -> Iterator[None]:
    """The prior's gradient in the gates is 0."""

    def nothing(w: Tensor, logit: Tensor, *precisions: Any) -> Tensor:
        return torch.zeros_like(logit)

    with mock.patch.object(latents.spike_and_slab, "gate_score", nothing):
        yield


@contextmanager
def widths(structure: Structure, counts: list[int]) -> Iterator[None]:
    """The decision keeps so many units of each group, those of the largest logits."""

    def decide(self: ChannelGating, logits: Tensor, budget: str, keep: float | None) -> Tensor:
        return largest(structure, logits.cpu(), counts).to(logits.device)

    with mock.patch.object(ChannelGating, "decide", decide):
        yield


# ---- runs


def prune(options: Options, arm: str, seed: int, multiple: int, lines: list[dict[str, Any]]) -> dict:
    """One run: what it kept, and how well it does."""
    dense, before = trained(options, seed)
    train, held = parts(options.data_root, options.half, options.images)
    structure = discover(dense, train.inputs(slice(0, 1)))
    shared: dict[str, Any] = dict(seed=seed, device=options.device, precision=options.precision)
    shared |= dict(epochs=options.epochs, batch_size=options.batch)
    budget = dllp.Config(keep_flops=options.keep_flops, round_to=multiple, **shared)
    by_budget = partial(select, structure, cost=structure.flops, keep=options.keep_flops, round_to=multiple)
    by_norm = by_budget(norms(structure, dense))
    if arm in GATED:
        switches: dict[str, Callable[[], Any]] = {
            "equal-price": partial(priced, structure, torch.ones(structure.units), options.device),
            "dense-price": partial(priced, structure, dense_prices(structure), options.device),
            "progressive": partial(priced, structure, dense_prices(structure), options.device, progressive=True),
            "no-prior": no_prior,
            "magnitude-widths": partial(widths, structure, counts_of(structure, by_norm)),
        }  # fmt: skip
        with switches.get(arm, mock.MagicMock)():
            result = dllp.prune(dense, train, budget, validation=held, progress=False, **dict(options.changes))
        keep, network = result.gates["keep"][0].cpu(), result.model
        at_cut = [round(100 * moment["accuracy"][0], 2) for moment in result.info["moments"][:2]]
    else:
        if arm == "fisher":
            found = dllp.prune(dense, train, budget, epochs=0, progress=False)
            keep = found.gates["keep"][0].cpu()
        elif arm.startswith(WIDTHS):
            keep = largest(structure, norms(structure, dense), [int(n) for n in arm.removeprefix(WIDTHS).split(",")])
        elif arm.startswith("own"):
            wanted = run_of(options, "ours", seed, multiple)
            keep = torch.tensor([c == "1" for c in next(line["keep"] for line in lines if line["run"] == wanted)])
            if arm == "own-widths":
                keep = largest(structure, norms(structure, dense), counts_of(structure, keep))
        else:
            keep = by_norm if arm == "magnitude" else by_budget(ranks(structure, norms(structure, dense)))
        small = cut(dense, recipe(dense, structure.groups, keep))
        at_cut = [before, accuracy(small, held, options.device)]
        result = dllp.train_dense(small, train, teacher=dense, progress=False, **shared)
        network = result.model
    pairs = zip(structure.groups, counts_of(structure, keep), strict=True)
    return {
        "dense": before, "at_cut": at_cut, "pruned": accuracy(network, held, options.device),
        "kept": round(float(structure.flops.expected(keep.double())) / structure.flops.dense, 4),
        "params": round(float(structure.params.expected(keep.double()))),
        "widths": {group.name: [count, group.units] for group, count in pairs},
        "keep": "".join(str(int(bit)) for bit in keep), "config": result.config.as_dict(),
    }  # fmt: skip


def run_of(options: Options, arm: str, seed: int, multiple: int) -> dict[str, Any]:
    """The settings that tell a run from others."""
    run: dict[str, Any] = dict(arm=arm, seed=seed, round_to=multiple, keep=options.keep_flops, epochs=options.epochs)
    if arm in GATED or arm.startswith("own"):
        run |= options.changes
    return run | dict(
        batch=options.batch, images=min(options.images, 50_000 - HELD), side=16 if options.half else 32,
        dense_epochs=options.dense_epochs, precision=options.precision,
    )  # fmt: skip


def commit() -> str:
    """The commit of the package that runs, with a plus where files were changed."""
    folder = Path(dllp.__file__).parent
    words = ["git", "-C", str(folder), "describe", "--always", "--abbrev=12", "--dirty=+"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()  # noqa: S603 # nosec B603


def command() -> str:
    """The words of the command line, without folders."""
    words = sys.argv[1:]
    folders = [i + k for i, word in enumerate(words) if word in ("--data-root", "--kept", "--out") for k in (0, 1)]
    return " ".join(word for i, word in enumerate(words) if i not in folders)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--half", action="store_true", help="images of 16x16 pixels")
    parser.add_argument("--images", type=int, default=50_000 - HELD, help="training images")
    parser.add_argument("--keep-flops", type=float, default=0.2)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--dense-epochs", type=int, default=30)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--arms", nargs="+", default=[*GATED, *AT_ONCE])
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=JSON", dest="changes")
    parser.add_argument("--round-to", type=int, nargs="+", default=[8, 1])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--kept", default="runs/allocation", help="folder for the trained dense networks")
    parser.add_argument("--out", default="results/tuning/allocation.jsonl")
    given = vars(parser.parse_args())
    pairs = (change.split("=") for change in given["changes"])
    given["changes"] = tuple((name, json.loads(value)) for name, value in pairs)
    options = Options(**{field.name: given[field.name] for field in fields(Options)})
    torch.set_num_threads(1)
    out = Path(given["out"])
    lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    for multiple, seed, arm in itertools.product(given["round_to"], given["seeds"], given["arms"]):
        run = run_of(options, arm, seed, multiple)
        if any(line["run"] == run for line in lines):
            continue
        trained(options, seed)
        began = time.perf_counter()
        line = {"run": run, **prune(options, arm, seed, multiple, lines)}
        device = torch.cuda.get_device_name() if options.device.startswith("cuda") else "cpu, one thread"
        line |= {
            "seconds": round(time.perf_counter() - began, 1), "commit": commit(), "torch": torch.__version__,
            "python": platform.python_version(), "device": device, "command": command(),
        }  # fmt: skip
        lines.append(line)
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        kept = " ".join(str(count) for count, _ in line["widths"].values())
        print(
            f"{arm} round_to {multiple} seed {seed}: dense {line['dense']:.2f} at cut {line['at_cut']} pruned "
            f"{line['pruned']:.2f} kept {line['kept']:.4f} widths {kept} {line['seconds']} s",
            flush=True,
        )  # fmt: skip


if __name__ == "__main__":
    main()
