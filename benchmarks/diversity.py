"""What makes particles differ that start from one trained network: accuracy, NLL and mutual information, held out.

    python benchmarks/diversity.py --data-root DIR --half --images 10000 --dense-epochs 15 --epochs 12 --out FILE

The ResNet-14 of benchmarks/allocation.py is trained dense once for each seed and pruned by channels with two particles
(or `--particles`) and the dense network as teacher. 10,000 training images judge, as they are, blurred and with noise;
no test image is read. One line of JSON for each run is appended to FILE; a run whose line is there is not run again.
Arms:

    given           dllp.prune
    antithetic      gate noise of particle i is that of the first, turned by i / n: no two masks are drawn alike
    own-batches     particles beyond the first see the batch of half an epoch ago
    own-flips       particle i > 0 sees the images mirrored
    jitter-K        particles beyond the first start with noise of K times each tensor's std (0.1 in the library)
    restart-stage   particles beyond the first start with a last stage and a classifier of fresh weights
    restart-blocks  particles beyond the first start with one fresh block in every stage
    untaught        no teacher
    taught-first    the teacher teaches the first particle only
    beta-K          another weight of the Stein term
    fresh           from fresh weights for the epochs of both, without a teacher: what independent particles gain
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import platform
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from allocation import HELD, Options, command, commit, parts, trained
from torch import Tensor, nn

import dllp
from dllp.method import gates
from dllp.structure.initialise import reinitialise
from dllp.training import particles, step
from dllp.training.forward import Forward
from dllp.training.latents import Latents
from dllp.training.objective import Objective, Outcome

ARMS = (
    "given", "antithetic", "own-batches", "own-flips", "jitter-0.3", "restart-stage", "restart-blocks", "untaught",
    "taught-first", "beta-1", "fresh",
)  # fmt: skip
SHIFTED = ("gaussian-blur:1", "noise:0.1")


@contextmanager
def antithetic() -> Iterator[None]:
    """Gate noise of particle i: (u + i / n) mod 1, which is uniform, too."""

    def relaxed(self: Latents, temperature: Tensor, ramp: Tensor) -> Tensor:
        n, units = self.logits.shape
        noise = torch.rand(units, generator=self.generator, dtype=self.logits.dtype)
        return gates.sample(self.logits, temperature, (noise + torch.arange(n)[:, None] / n) % 1)

    with mock.patch.object(Latents, "relaxed", relaxed):
        yield


class Turns:
    """Tells an objective which particle's forward it is called for."""

    def __init__(self) -> None:
        self.next = self.current = 0

    @contextmanager
    def told(self, change: Any, teach: Any = None, loss: Any = None) -> Iterator[None]:
        """`change(i, x, y)` gives the batch of particle i; `teach` and `loss` stand in for the step's own."""
        call, objective = Forward.__call__, Objective.__call__

        def forward(own: Forward, i: int, gates: Tensor | None) -> nn.Module:
            self.next = i
            return call(own, i, gates)

        def outcome(own: Objective, network: nn.Module, x: Any, y: Any = None) -> Outcome:
            self.current, self.next = self.next, 0
            return objective(own, network, *change(self.current, x, y))

        with (
            mock.patch.object(Forward, "__call__", forward), mock.patch.object(Objective, "__call__", outcome),
            mock.patch.object(step, "_teaching", teach or step._teaching),
            mock.patch.object(step, "taught_loss", loss or step.taught_loss),
        ):  # fmt: skip
            yield


@contextmanager
def own_batches(steps: int) -> Iterator[None]:
    """Other particles are half an epoch behind the first; in its first steps all see the oldest batch."""
    turns, seen = Turns(), deque[Any](maxlen=steps // 2 + 1)
    own, loss_of = step._teaching, step.taught_loss

    def teach(state: Any, x: Any, y: Any, ready: Any) -> Any:
        seen.append((x, y, own(state, x, y, ready)))
        return seen[-1][2]

    def change(i: int, x: Any, y: Any) -> Any:
        return seen[0][:2] if i else (x, y)

    def loss(found: Outcome, taught: Any, config: dllp.Config) -> Tensor:
        return loss_of(found, seen[0][2] if turns.current else taught, config)

    with turns.told(change, teach, loss):
        yield


@contextmanager
def own_flips() -> Iterator[None]:
    """Particles beyond the first see mirrored images."""
    with Turns().told(lambda i, x, y: (x.flip(3) if i else x, y)):
        yield


@contextmanager
def taught_first() -> Iterator[None]:
    """Particles beyond the first learn from the labels alone."""
    turns, loss_of = Turns(), step.taught_loss

    def loss(found: Outcome, taught: Any, config: dllp.Config) -> Tensor:
        return found.loss if turns.current else loss_of(found, taught, config)

    with turns.told(lambda i, x, y: (x, y), loss=loss):
        yield


@contextmanager
def restarted(names: list[str]) -> Iterator[None]:
    """Particles beyond the first have fresh weights in the modules of these names."""
    jitter = particles.jitter

    def changed(network: nn.Module, amount: float, seed: int) -> None:
        jitter(network, amount, seed)
        for k, name in enumerate(names):
            reinitialise(network.get_submodule(name), seed + k)

    with mock.patch.object(particles, "jitter", changed):
        yield


def switched(arm: str, steps: int) -> Any:
    """What an arm changes in the library while it runs."""
    name, _, value = arm.rpartition("-")
    if name == "jitter":
        return mock.patch.object(particles, "JITTER", float(value))
    return {
        "antithetic": antithetic(), "own-batches": own_batches(steps), "own-flips": own_flips(),
        "taught-first": taught_first(), "restart-stage": restarted(["blocks.4", "blocks.5", "classifier"]),
        "restart-blocks": restarted(["blocks.1", "blocks.3", "blocks.5"]),
    }.get(arm, mock.MagicMock())  # fmt: skip


def run(options: Options, arm: str, seed: int, particles: int) -> dict[str, Any]:
    """Prune, and judge each particle and all together."""
    dense, before = trained(options, seed)
    train, held = parts(options.data_root, options.half, options.images)
    shared: dict[str, Any] = dict(
        seed=seed, particles=particles, keep_flops=options.keep_flops, epochs=options.epochs, batch_size=options.batch,
        device=options.device, precision=options.precision, **dict(options.changes),
    )  # fmt: skip
    if arm == "untaught":
        shared["teacher"] = "off"
    elif arm.startswith("beta-"):
        shared["beta"] = float(arm.removeprefix("beta-"))
    elif arm == "fresh":
        shared |= dict(init="fresh", epochs=options.dense_epochs + options.epochs)
    with switched(arm, math.ceil(len(train) / options.batch)):
        result = dllp.prune(dense, train, dllp.Config(**shared), validation=held, progress=False)
    found = result.evaluate(held, corrupt=SHIFTED, device=options.device)
    keep = result.gates["keep"].double()
    return {
        "dense": before, "same_units": float((keep[0] == keep[1]).double().mean()),
        "rows": [{"name": row.name, "data": row.data, **row.metrics} for row in found.rows],
        "moments": result.info["moments"], "config": result.config.as_dict(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--half", action="store_true", help="images of 16x16 pixels")
    parser.add_argument("--images", type=int, default=50_000 - HELD, help="training images")
    parser.add_argument("--keep-flops", type=float, default=0.45)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--dense-epochs", type=int, default=60)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--arms", nargs="+", default=ARMS)
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=JSON", dest="changes")
    parser.add_argument("--particles", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--kept", default="runs/allocation", help="folder for the trained dense networks")
    parser.add_argument("--out", required=True)
    given = vars(parser.parse_args())
    pairs = (change.split("=") for change in given["changes"])
    given["changes"] = tuple((name, json.loads(value)) for name, value in pairs)
    options = Options(**{field.name: given[field.name] for field in fields(Options)})
    torch.set_num_threads(1)
    out = Path(given["out"])
    known = [json.loads(line)["run"] for line in out.read_text().splitlines()] if out.exists() else []
    for seed, arm in itertools.product(given["seeds"], given["arms"]):
        settings = {
            "arm": arm, "seed": seed, "keep": options.keep_flops, "epochs": options.epochs, "batch": options.batch,
            "images": min(options.images, 50_000 - HELD), "side": 16 if options.half else 32,
            "dense_epochs": options.dense_epochs, "precision": options.precision, **dict(options.changes),
            **({} if given["particles"] == 2 else {"particles": given["particles"]}),
        }  # fmt: skip
        if settings in known:
            continue
        trained(options, seed)
        began = time.perf_counter()
        line = {"run": settings, **run(options, arm, seed, given["particles"])}
        device = torch.cuda.get_device_name() if options.device.startswith("cuda") else "cpu, one thread"
        line |= {
            "seconds": round(time.perf_counter() - began, 1), "commit": commit(), "torch": torch.__version__,
            "python": platform.python_version(), "device": device, "command": command(),
        }  # fmt: skip
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        values = {(row["data"], row["name"]): row for row in line["rows"]}
        ones = [values["clean", f"particle {k + 1}"]["accuracy"] for k in range(given["particles"])]
        every = values["clean", "all particles"]
        print(
            f"{arm} seed {seed}: dense {line['dense']:.2f} particles {' / '.join(f'{100 * a:.2f}' for a in ones)} all "
            f"{100 * every['accuracy']:.2f} NLL {every['nll']:.3f} ECE {100 * every['ece']:.2f} mutual information "
            f"{every['mutual_information']:.4f} {line['seconds']} s",
            flush=True,
        )  # fmt: skip


if __name__ == "__main__":
    main()
