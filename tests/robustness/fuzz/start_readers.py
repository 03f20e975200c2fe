"""Readers of what a training starts from: settings, weights, checkpoints."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import random
import zipfile
from pathlib import Path

import numpy as np
import torch
from mutate import mutate, mutate_json, mutate_lines, mutate_tensors
from reader import Broken, Reader, examples, network

import dllp
from dllp.cli.main import main
from dllp.errors import DllpError
from dllp.prepare import make_gating
from dllp.runs import checkpoints, pretrained
from dllp.runs.settings import read, split
from dllp.runs.tensors import write_tensors
from dllp.structure.groups import discover
from dllp.training import snapshot
from dllp.training.particles import Particles
from dllp.training.state import RunState

# ---- settings, through the command line


def _command(*words: str) -> None:
    """Run a command; its one line of error becomes a DllpError again."""
    error, output = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(error), contextlib.redirect_stdout(output):
        code = main(words)
    text = error.getvalue()
    if code == 0:
        return
    if code != 2 or text.count("\n") != 1 or not text.startswith("dllp: error: "):
        raise Broken(f"exit {code} and {text[:300]!r}")
    raise DllpError(text.strip())


def settings(root: Path) -> list[Reader]:
    root.mkdir(parents=True)
    rng = np.random.default_rng(0)
    (root / "data").mkdir()
    for part in ("train", "test"):
        np.save(root / "data" / f"{part}_x.npy", rng.integers(0, 255, (6, 8, 8), np.uint8))
        np.save(root / "data" / f"{part}_y.npy", np.arange(6) % 3)
    words = ["--data", str(root / "data"), "--model", "mlp", "--epochs", "1", "--keep-flops", "0.5", "--quiet"]
    assert main(["prune", *words, "--out", str(root / "run")]) == 0
    whole, path = (root / "run" / "config.yaml").read_bytes(), root / "other.yaml"
    small = (
        b"data: digits\nmodel: small_cnn\nkeep-flops: 0.3\nslab_bounds: [0.3, 30.0]\nvalidation: 0.1\ndense: false\n"
    )

    def read_prune(content: bytes) -> None:
        path.write_bytes(content)
        _command("prune", "--config", str(path), "--data", str(root / "nowhere"), "--out", str(root / "never"))

    def read_values(content: bytes) -> None:
        path.write_bytes(content)
        task, values = split(read(path))
        task.config(values)

    def evaluate(name: str, content: bytes) -> None:
        before = (root / "run" / name).read_bytes()
        (root / "run" / name).write_bytes(content)
        try:
            extra = () if name == "config.yaml" else ("--data", str(root / "data"))
            _command("evaluate", str(root / "run"), "--device", "cpu", "--json", str(root / "rows.json"), *extra)
        finally:
            (root / "run" / name).write_bytes(before)

    found = [
        Reader("config.yaml by prune", [whole, small], read_prune, "", (mutate_lines,), share=0.25),
        Reader("config.yaml", [whole, small], read_values, path.name, (mutate_lines,)),
    ]
    for name, mutator in (
        ("config.yaml", mutate_lines), ("run.json", mutate_json), ("dense.safetensors", mutate_tensors),
        ("particle-0.safetensors", mutate_tensors),
    ):  # fmt: skip
        seeds = [(root / "run" / name).read_bytes()]
        found.append(
            Reader(f"{name} by evaluate", seeds, functools.partial(evaluate, name), "", (mutator,), share=0.15)
        )
    return found


# ---- weights and checkpoints


def starts(root: Path) -> list[Reader]:
    """Weights to start from."""
    root.mkdir(parents=True)
    torch.save(network().state_dict(), root / "a.pt")
    torch.save({"epoch": 1, "state_dict": network().half().state_dict()}, root / "b.pt")
    write_tensors(root / "a.safetensors", network().state_dict())

    def read(path: Path, content: bytes) -> object:
        path.write_bytes(content)
        return pretrained.start(network(), path)

    def pickled(rng: random.Random, content: bytes, other: bytes) -> bytes:
        """Damage to the pickle alone, in an archive that is whole."""
        changed = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(changed, "w") as new:
            for name in old.namelist():
                part = old.read(name)
                new.writestr(name, mutate(rng, part, part) if name.endswith(".pkl") else part)
        return changed.getvalue()

    old = [(root / name).read_bytes() for name in ("a.pt", "b.pt")]
    new = [(root / "a.safetensors").read_bytes()]
    return [
        Reader("weights .pt", old, functools.partial(read, root / "x.pt"), "x.pt", (pickled,), share=0.5),
        Reader("weights .safetensors", new, functools.partial(read, root / "x.safetensors"), "x.safetensors",
               (mutate_tensors,), share=0.3),
    ]  # fmt: skip


def restarts(root: Path) -> list[Reader]:
    config = dllp.Config(keep_flops=0.5, epochs=2, batch_size=6, device="cpu", warmup=0).resolved()
    kept = checkpoints.Checkpoints(root / "whole")
    dllp.prune(network(), examples(), config, checkpoints=kept)
    kept.close()
    path = root / "step-000000001.safetensors"

    def fresh() -> RunState:
        model = network()
        structure = discover(model, examples()[0][:2])
        particles = Particles.start(model, config, torch.device("cpu"))
        gating = make_gating(model, structure, particles, config, None)
        return RunState(particles, gating, config, num_data=12, steps_per_epoch=2)

    def read(content: bytes) -> object:
        path.write_bytes(content)
        return checkpoints.read(path)

    def read_signed(content: bytes) -> object:
        """Values by someone who can compute a checksum; what does not fit must be told by whoever restores."""
        tensors, values = checkpoints.read(kept.files()[-1])
        try:
            values |= json.loads(content)
        except (ValueError, RecursionError, TypeError):
            return None
        snapshot.restore(fresh(), (tensors, values))
        return None

    seeds = [file.read_bytes() for file in kept.files()]
    values = json.dumps(checkpoints.read(kept.files()[-1])[1]).encode()
    return [
        Reader("checkpoint", seeds, read, path.name, (mutate_tensors,)),
        Reader("checkpoint, signed values", [values], read_signed, "checkpoint", (mutate_json,), share=0.2),
    ]
