"""Accuracy beside time: rows of one trained network under FLOPs and latency budgets, whole branches removed or not.

    python benchmarks/accuracy_and_time.py train --data-root DIR --profile FILE.json --out FOLDER \\
        --row flops keep_flops=0.45 --row latency keep_latency=0.5 units=both
    python benchmarks/accuracy_and_time.py time FOLDER --data-root DIR --out results/speed/accuracy.jsonl

`train` trains the network of a table dense once a seed, prunes it for each row with one particle and itself as teacher,
and writes FOLDER/lines.jsonl and a file of weights for each network: where the GPU is. Accuracy is that on images held
out of the training set, on the test set with `--validation 0`. A row with `peer=magnitude keep_flops=0.33` is another
package's (paper/peers.py), by its own recipe and fine-tuned for as many epochs. `time` runs on the target: dense and
pruned network of every line in turns, in floats and in int8 (calibrated with training images), accuracy and seconds;
seconds alone where FOLDER lacks a file of weights. It appends a line for each row; a row that has its line, trained at
the same commit, is not timed again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dllp
from dllp.baselines.run import FINETUNE_LR
from dllp.cli.commands import environment
from dllp.data import Dataset, holdout, load
from dllp.deploy import speed
from dllp.devices import device as devices
from dllp.posterior import Posterior, predict_data
from dllp.structure.groups import discover
from dllp.structure.slicing import Recipe, cut
from dllp.zoo import build
from paper import peers, tables
from paper.jobs import Job, Runner
from paper.provenance import command, now, source

SHAPE, CLASSES = (3, 32, 32), 10
DENSE = "dense"


def train(given: argparse.Namespace) -> None:
    """Networks and their lines."""
    device = devices.find_device(given.device)
    machine: dict[str, Any] = {"device": str(device), "precision": "bfloat16" if device.type == "cuda" else "float32"}
    runner = Runner(load("cifar10", root=given.data_root), everywhere=False, **machine)
    given.out.mkdir(parents=True, exist_ok=True)
    for seed in given.seeds:
        job = Job(given.model, "dense", seed=seed, epochs=given.dense_epochs, validation=given.validation)
        line = runner.run(job).line
        dense = runner.dense_networks[job.digest].model
        part, versions = runner.splits.of(job)
        held = next(iter(versions.values()))
        data = replace(runner.data, train=part, test=held)
        shared = {
            "model": given.model,
            "seed": seed,
            "validation": given.validation,
            "command": command(),
        }
        shared |= {**source(), **devices.environment(device)}
        known = {"row": DENSE, "macs": 1.0, "accuracy": line["particles"][0]["accuracy"]}
        keep(given.out, {**shared, **known, "recipe": None}, dense)
        for row, *words in given.row:
            settings = tables.settings(words)
            chosen = {"epochs": given.epochs, "batch_size": 512, "seed": seed, "init": "given", **machine, **settings}
            began = time.perf_counter()
            if "peer" in settings:
                chosen["weight_decay"] = job.config.resolved().weight_decay
                pruned, known = by_peer(chosen.pop("peer"), dense, data, dllp.Config(**chosen))
            else:
                pruned, known = ours(dense, data, dllp.Config(**chosen), given.profile)
            known["seconds"] = time.perf_counter() - began
            predicted = predict_data(Posterior([pruned], torch.ones(1)), held, device)
            hits = predicted.members[0].cpu().argmax(1) == held.y.cpu()
            known |= {"row": row, "settings": settings, "accuracy": float(hits.double().mean())}
            keep(given.out, {**shared, **known}, pruned)


def ours(
    dense: nn.Module, data: Dataset, config: dllp.Config, profile: Path | None
) -> tuple[nn.Module, dict[str, Any]]:
    """The one particle of `dllp.prune`, and what its line says of it."""
    profile = None if config.keep_latency is None else profile
    result = dllp.prune(dense, data, config, profile=profile, progress=False)
    return result.model, {
        "macs": result.sizes[0].macs / result.dense.macs, "latency": result.info.get("latency"),
        "moments": result.info["moments"], "config": result.config.as_dict(), "recipe": result.particles[0].recipe,
    }  # fmt: skip


def by_peer(name: str, dense: nn.Module, data: Dataset, config: dllp.Config) -> tuple[nn.Module, dict[str, Any]]:
    """The network of another package, and what its line says of it."""
    found = peers.prune(name, dense, data, config, epochs=config.epochs or 0, lr=FINETUNE_LR)
    small = found.trainings[-1].model
    macs = found.size.macs / discover(dense, torch.randn(2, *SHAPE), channels=False).flops.dense
    known = {"macs": macs, "latency": None, "config": config.as_dict(), "recipe": widths(dense, small)}
    return small, known


def widths(dense: nn.Module, small: nn.Module) -> Recipe:
    """The recipe that gives the dense network another's widths: the first units of each layer."""
    modules, result = dict(small.named_modules()), {}
    for name, module in dense.named_modules():
        if isinstance(module, nn.Conv2d | nn.BatchNorm2d | nn.Linear) and module.weight is not None:
            shape = modules[name].weight.shape
            if shape != module.weight.shape:
                sides = ("out", "in")[: module.weight.dim()]
                result[name] = {side: list(range(size)) for side, size in zip(sides, shape, strict=False)}
    return result


def keep(folder: Path, line: Mapping[str, Any], network: nn.Module) -> None:
    """A line, and the weights that it speaks of."""
    state = {key: value.detach().cpu() for key, value in network.state_dict().items()}
    torch.save(state, folder / name(line))
    with (folder / "lines.jsonl").open("a") as file:
        file.write(json.dumps({**line, "date": now()}) + "\n")
    print(f"{line['row']} seed {line['seed']}: accuracy {100 * line['accuracy']:.2f}, {line['macs']:.3f} of the MACs")


def name(line: Mapping[str, Any]) -> str:
    """Of a network, and of the file of its weights."""
    return f"{line['model']}-{line['row']}-{line['seed']}.pt"


def network(folder: Path, line: Mapping[str, Any]) -> nn.Module:
    """The network of a line; with fresh weights where there is no file of its own."""
    model = build(line["model"], CLASSES, SHAPE[0], image_size=SHAPE[1])
    if line["recipe"] is not None:
        model = cut(model, line["recipe"])
    if (folder / name(line)).exists():
        model.load_state_dict(torch.load(folder / name(line), weights_only=True))
    return model.eval()


def measure(given: argparse.Namespace) -> None:
    """Accuracy and seconds of every row beside its dense network."""
    lines = [json.loads(line) for line in (given.folder / "lines.jsonl").read_text().splitlines()]
    data = load("cifar10", root=given.data_root)
    dense = {line["seed"]: line for line in lines if line["row"] == DENSE}
    found = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    timed = {(name(line), line["trained"]["commit"]) for line in found}
    for line in lines:
        if line["row"] == DENSE or (name(line), line["commit"]) in timed:
            continue
        before, whole = dense[line["seed"]]["accuracy"], network(given.folder, dense[line["seed"]])
        macs = discover(whole, torch.randn(2, *SHAPE), channels=False).flops.dense
        held = holdout(data.train, line["validation"], seed=0)[1] if line["validation"] else data.test
        images = speed.images(replace(data, test=held), SHAPE, macs)
        trained = all((given.folder / name(each)).exists() for each in (line, dense[line["seed"]]))
        first = speed.Subject(speed.DENSE, whole, macs, trained)
        pruned = speed.Subject(speed.PRUNED, network(given.folder, line), macs * line["macs"], trained)
        options: dict[str, Any] = dict(batches=given.batch, threads=given.threads, seconds=given.seconds)
        rows = speed.as_dict(speed.measure([first, pruned], SHAPE, images=images, **options))
        known = {key: line[key] for key in ("model", "row", "seed", "settings", "macs", "accuracy", "validation")}
        known |= {"dense_accuracy": before, "trained": {key: line[key] for key in ("commit", "dirty", "command")}}
        known |= {"rows": rows, "date": now(), **source(), "command": command(), **environment()}
        with given.out.open("a") as file:
            file.write(json.dumps(known) + "\n")
        print(f"{line['row']} seed {line['seed']}: {100 * before:.2f} -> {100 * line['accuracy']:.2f}")
        for each in rows:
            if each["network"] == speed.PRUNED:
                accuracy = "" if each["accuracy"] is None else f", accuracy {100 * each['accuracy']:.2f}"
                where = f"{each['runtime']}, {each['threads']} threads, batch {each['batch']}"
                print(f"    {where}: {each['speedup']:.2f} times as fast as dense{accuracy}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    first, second = verbs.add_parser("train"), verbs.add_parser("time")
    first.set_defaults(verb=train)
    first.add_argument("--model", default="resnet56")
    first.add_argument("--row", nargs="+", action="append", required=True, metavar="WORD", help="a name, then settings")
    first.add_argument("--profile", type=Path, help="of the network, for rows with keep_latency")
    first.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    first.add_argument("--validation", type=int, default=10_000)
    first.add_argument("--dense-epochs", type=int, default=60)
    first.add_argument("--epochs", type=int, default=30)
    first.add_argument("--device", default="auto")
    second.set_defaults(verb=measure)
    second.add_argument("folder", type=Path)
    second.add_argument("--batch", type=int, nargs="+", default=[64])
    second.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    second.add_argument("--seconds", type=float, default=8.0, help="for each setting")
    for each in (first, second):
        each.add_argument("--data-root")
        each.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    given.verb(given)


if __name__ == "__main__":
    main()
