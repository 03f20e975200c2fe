"""Rates for trained starts: a grid on the digits and on a part of CIFAR-10, measured on held-out training images.

    python benchmarks/trained_starts.py --data digits --batch 32 256 --epochs 5 --lr 0.0125 0.05 --out FILE
    python benchmarks/trained_starts.py --data cifar10 --data-root DIR --batch 32 128 512 --epochs 5 15 --lr 0.025 0.1

One line of JSON for each run is appended to FILE; a run whose line is there is not run again. CIFAR-10 is halved to
16x16 pixels, 10,000 images to train on and 10,000 others to judge on; of the digits 937 and 500. `--lr auto` is what
`dllp.Config` chooses by itself. The network that is pruned was trained by SGD for 30 epochs, with seed and data of the
run. No test image is read.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import subprocess
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import dllp
from dllp import zoo
from dllp.data import ArrayData, holdout, load
from dllp.zoo.networks import CifarResNet
from paper.jobs import kept_shape
from paper.provenance import command

TRAINED_EPOCHS = 30


@cache
def parts(name: str, root: str | None) -> tuple[ArrayData, ArrayData]:
    """Examples to train on, and others to judge on; none of the test set."""
    data = load(name, root=root).train
    assert isinstance(data, ArrayData)
    if name == "digits":
        return holdout(data, 500, seed=0)
    half = F.avg_pool2d(data.x.float(), 2).round().to(torch.uint8)
    rest, held = holdout(ArrayData(half, data.y, data.mean, data.std, "crop-flip"), 10_000, seed=0)
    return holdout(rest, len(rest) - 10_000, seed=0)[0], held


def accuracy(network: nn.Module, held: ArrayData) -> float:
    """Percent of held-out examples that a network answers right."""
    network.eval()
    with torch.no_grad():
        hits = torch.cat([network(x).argmax(1) for x in held.parts()]) == held.y
    return 100 * float(hits.double().mean())


@cache
def trained(name: str, root: str | None, seed: int, kept: Path) -> nn.Module:
    """A dense network, trained on the same examples from scratch, or as an earlier call has kept it."""
    train, _ = parts(name, root)
    torch.manual_seed(seed)
    network = CifarResNet(1, 10, 3) if name == "cifar10" else zoo.build("small_cnn", num_classes=10, in_channels=1)
    path = kept / f"{name}-{seed}.pt"
    if path.exists():
        network.load_state_dict(torch.load(path, weights_only=True))
        return network
    config = dllp.Config(
        init="fresh", particles=1, epochs=TRAINED_EPOCHS, batch_size=128 if name == "cifar10" else 64, lr=0.1,
        seed=seed, teacher="off", warmup=2.0, lr_end=0.001, device="cpu",
    )  # fmt: skip
    network = dllp.train_dense(network, train, config).model
    kept.mkdir(parents=True, exist_ok=True)
    torch.save(network.state_dict(), path)
    return network


def commit() -> str:
    """The commit of the package that runs, with a plus where files were changed."""
    folder = Path(dllp.__file__).parent
    words = ["git", "-C", str(folder), "describe", "--always", "--abbrev=12", "--dirty=+"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()  # noqa: S603 # nosec B603


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="digits")
    parser.add_argument("--data-root")
    parser.add_argument("--keep-flops", type=float, default=0.4)
    parser.add_argument("--granularity", choices=["channel", "weight"], default="channel")
    parser.add_argument("--batch", type=int, nargs="+", default=[64])
    parser.add_argument("--epochs", type=int, nargs="+", default=[5])
    parser.add_argument("--lr", nargs="+", default=["auto"])
    parser.add_argument("--lr-gates", nargs="+", default=["auto"])
    parser.add_argument("--round-to", nargs="+", default=["auto"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--kept", default="runs/trained-starts", help="folder for the trained dense networks")
    parser.add_argument("--out", default="results/tuning/trained-starts-cpu.jsonl")
    options = parser.parse_args()
    torch.set_num_threads(1)
    out = Path(options.out)
    done = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    known = {json.dumps(line["run"], sort_keys=True) for line in done}
    grid = itertools.product(
        options.epochs, options.seeds, options.batch, options.lr, options.lr_gates, options.round_to
    )
    for epochs, seed, batch, lr, lr_gates, round_to in grid:
        given: dict[str, Any] = {"lr": lr, "lr_gates": lr_gates, "round_to": round_to}
        given = {name: float(value) for name, value in given.items() if value != "auto"}
        if options.granularity != "channel":
            given["granularity"] = options.granularity
        if "lr" in given:
            given["lr_end"] = given["lr"] / 100
        if "round_to" in given:
            given["round_to"] = int(given["round_to"])
        run = {
            "data": options.data,
            "keep": options.keep_flops,
            "epochs": epochs,
            "batch": batch,
            "seed": seed,
            **given,
        }
        if json.dumps(run, sort_keys=True) in known:
            continue
        train, held = parts(options.data, options.data_root)
        dense = trained(options.data, options.data_root, seed, Path(options.kept))
        before, began = accuracy(dense, held), time.perf_counter()
        values = {"keep_flops": options.keep_flops, "epochs": epochs, "batch_size": batch, "seed": seed, "particles": 1}
        result = dllp.prune(dense, train, dllp.Config.short(**values, **given, device="cpu"))
        after = accuracy(result.model, held)
        line = {
            "run": run, "dense": round(before, 2), "pruned": round(after, 2),
            "kept": result.sizes[0].macs / result.dense.macs,
            "config": {name: getattr(result.config, name) for name in ("lr", "lr_gates", "round_to", "teacher")},
            **({"shape": kept_shape(result.particles[0])} if options.granularity == "weight" else {}),
            "seconds": round(time.perf_counter() - began, 1), "commit": commit(), "torch": torch.__version__,
            "python": platform.python_version(), "threads": 1, "command": command(),
        }  # fmt: skip
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{run} dense {before:.2f} pruned {after:.2f} {line['seconds']} s", flush=True)


if __name__ == "__main__":
    main()
