"""Every reader of files from strangers, with whole files to start from.

A reader takes bytes, puts them where a stranger would and reads them as a user would. What it may do is come back, or
raise a DllpError of one line that names the file.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import io
import json
import random
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from mutate import mutate, mutate_array, mutate_json, mutate_lines, mutate_tensors
from PIL import Image
from torch import Tensor, nn

import dllp
from dllp import artifacts, checkpoints, data, options, report, speed, state, weights
from dllp.bench import run as bench
from dllp.bench import tables
from dllp.bench.store import LABELS, Store, pack
from dllp.cli import main
from dllp.data import cifar10_files, from_pair
from dllp.errors import LONGEST, DllpError
from dllp.evaluate import Row
from dllp.examples import collect
from dllp.particles import Particles
from dllp.prepare import make_gating
from dllp.report import compare, contents, page
from dllp.structure import discover
from dllp.task import Task
from dllp.train import Trainer

Mutator = Callable[[random.Random, bytes, bytes], bytes]


class Broken(AssertionError):
    """An error that a reader told badly."""


@dataclass(frozen=True)
class Reader:
    """Attributes:
    name: Of the kind of file.
    seeds: Whole files.
    read: Reads one; raises nothing but DllpError.
    named: What every error must name.
    mutators: Damage that keeps the grammar, besides the plain one.
    share: Of the inputs; slow readers get fewer.
    """

    name: str
    seeds: list[bytes]
    read: Callable[[bytes], object]
    named: str
    mutators: tuple[Mutator, ...] = ()
    share: float = 1.0

    def damaged(self, number: int) -> bytes:
        """Input `number`, always the same."""
        rng = random.Random(f"{self.name} {number}")  # noqa: S311 - damage must repeat, not surprise
        content, other = rng.choice(self.seeds), rng.choice(self.seeds)
        if self.mutators and rng.random() < 0.6:
            content = rng.choice(self.mutators)(rng, content, other)
            return content if rng.random() < 0.8 else mutate(rng, content, other)
        return mutate(rng, content, other)

    def check(self, content: bytes) -> bool:
        """Read; whether the file was taken. Anything but success and a well-told DllpError is raised."""
        try:
            self.read(content)
            return True
        except DllpError as error:
            text = str(error)
            if not text.isprintable() or len(text) > LONGEST + 4 or self.named not in text:
                raise Broken(f"not one line that names {self.named}: {text[:300]!r}") from error
            return False


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip


def examples() -> tuple[Tensor, Tensor]:
    y = torch.arange(12) % 3
    return torch.randn(12, 1, 6, 6) + y.view(-1, 1, 1, 1), y


def readers(root: Path) -> list[Reader]:
    """All of them, with their files under `root`."""
    torch.manual_seed(0)
    return [
        *run_folders(root / "runs"), *settings(root / "settings"), *arrays(root / "arrays"), *cifar(root / "cifar"),
        *images(root / "images"), *shards(root / "shards"), *starts(root / "weights"),
        *results(root / "results"), *restarts(root / "checkpoints"),
        *reports(root / "reports"),
    ]  # fmt: skip


# ---- run folders


def run_folders(root: Path) -> list[Reader]:
    found = []
    shared: dict[str, list[bytes]] = {}
    for granularity in ("channel", "weight"):
        config = dllp.Config(granularity=granularity, keep_flops=0.5, epochs=2, batch_size=6, device="cpu", warmup=0)
        folder = dllp.prune(network(), examples(), config).save(root / granularity)
        for name in ("run.json", "gates.safetensors", "particle-0.safetensors", "reference-0.safetensors"):
            content = (folder / name).read_bytes()
            shared.setdefault(name, []).append(content)
            mutators = (mutate_json,) if name == "run.json" else (mutate_tensors,)
            read = functools.partial(_load, folder, name, content)
            label = f"{name.partition('.')[0]} ({granularity})"
            named = str(folder) if name == "run.json" else name
            found.append(Reader(label, shared[name], read, named, mutators))
    channel = root / "channel"
    run = json.loads((channel / "run.json").read_bytes())

    def read_recipe(content: bytes) -> object:
        try:
            value = json.loads(content)
            text = json.dumps(run | {"recipes": [value, run["recipes"][1]]}).encode()
        except (ValueError, RecursionError):
            text = b'{"recipes": ' + content
        return _load(channel, "run.json", (channel / "run.json").read_bytes(), text)

    seeds = [json.dumps(recipe).encode() for recipe in run["recipes"]]
    return [*found, Reader("recipe", seeds, read_recipe, str(channel), (mutate_json,))]


# ---- reports


def reports(root: Path) -> list[Reader]:
    """Every file of a run folder that `dllp report` reads, through everything that is shown of it."""
    config = dllp.Config(keep_flops=0.5, epochs=2, batch_size=6, device="cpu", warmup=0)
    result = dllp.prune(network(), examples(), config)
    folder = result.save(root / "run")
    x, y = examples()
    collect(result.posterior, from_pair(x, y)).write(folder)
    rows = [row(name, data) for data in ("clean", "noise:0.1") for name in ("dense", "particle 1", "all particles")]
    artifacts.write_json(folder / artifacts.EVALUATION, {"rows": [vars(r) for r in rows]})
    times = [speed.Row(name, speed.TORCH, "cpu", 1, 64, 2e-3 / k, 1e-3, 3e-3, 7, 2e-3, 100 / k, 10)
             for k, name in enumerate((speed.DENSE, speed.PRUNED), 1)]  # fmt: skip
    layer = vars(speed.LayerTime("0", 2.0, 1.5, 4, 2, 0.5))
    artifacts.write_json(folder / artifacts.SPEED, {"rows": speed.as_dict(speed.compared(times)), "layers": [layer]})
    log = "".join(json.dumps({"training": "dense", **record}) + "\n" for record in result.history)
    (folder / artifacts.LOG).write_text(log)

    def read(name: str, content: bytes) -> None:
        before = (folder / name).read_bytes()
        (folder / name).write_bytes(content)
        try:
            run = contents.read(folder)
            sections = [part.section(run) for part in report.PARTS] + compare.sections([run, run])
            for plot in (plot for section in sections if section for plot in section.plots):
                page._embedded(page._plot(plot))
        finally:
            (folder / name).write_bytes(before)

    mutators = {"safetensors": mutate_tensors, "json": mutate_json, "jsonl": mutate_lines}
    return [
        Reader(f"{name} by report", [(folder / name).read_bytes()], functools.partial(read, name), str(folder),
               (mutators[name.rpartition(".")[2]],), share=0.2)
        for name in (artifacts.RUN, artifacts.EVALUATION, artifacts.SPEED, artifacts.LOG, artifacts.EXAMPLES,
                     "reference-0.safetensors")
    ]  # fmt: skip


def row(name: str, data: str) -> Row:
    return Row(name, data, {"accuracy": 0.9, "ece": 0.1, "nll": 0.3}, 100.0, 10, 40)


def _load(folder: Path, name: str, whole: bytes, content: bytes) -> object:
    (folder / name).write_bytes(content)
    try:
        return dllp.load(folder, network())
    finally:
        (folder / name).write_bytes(whole)


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
        values = options.read(path)
        Task(**{name: values.pop(name) for name in options.TASK if name in values}).config(values)

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


# ---- data


def arrays(root: Path) -> list[Reader]:
    root.mkdir(parents=True)
    rng = np.random.default_rng(0)
    whole = {}
    for part in ("train", "test"):
        for name, value in (("x", rng.integers(0, 255, (6, 5, 5, 3), np.uint8)), ("y", np.arange(6) % 3)):
            np.save(root / f"{part}_{name}.npy", value)
            whole[f"{part}_{name}.npy"] = (root / f"{part}_{name}.npy").read_bytes()

    def packed(value: np.ndarray) -> bytes:
        buffer = io.BytesIO()
        np.save(buffer, value)
        return buffer.getvalue()

    def read(name: str, content: bytes) -> object:
        (root / name).write_bytes(content)
        try:
            return data.load(root)
        finally:
            (root / name).write_bytes(whole[name])

    more = {
        "train_x.npy": [rng.random((6, 4)), rng.random((6, 3, 5, 5)).astype(">f4"), np.zeros((6, 5, 5), np.uint8)],
        "train_y.npy": [rng.random((6, 2)).astype("f4"), np.arange(6, dtype=">i2") % 2, np.arange(6, dtype="u8")],
    }
    return [
        Reader(name, [whole[name], *map(packed, values)], functools.partial(read, name), "", (mutate_array,))
        for name, values in more.items()
    ]


def cifar(root: Path) -> list[Reader]:
    root.mkdir(parents=True)
    from test_cifar10 import LABELS as DIGITS
    from test_cifar10 import PIXELS, python2_pickle

    pickled = [python2_pickle(p[:2], y[:2].tolist()) for p, y in zip(PIXELS[:2], DIGITS, strict=False)]
    memo = pickled[0].replace(b"}(", b"}q\x01(", 1).replace(b"](", b"]q\x02(", 1).replace(b"u.", b"h\x02h\x02su.")
    raw = [bytes([int(y)]) + p.tobytes() for p, y in zip(PIXELS[0][:2], DIGITS[0], strict=False)]
    found = []
    for version, seeds in ((cifar10_files.PYTHON, [*pickled, memo]), (cifar10_files.BINARY, [b"".join(raw), raw[0]])):

        def read_file(content: bytes, version: cifar10_files.Version = version, first: bytes = seeds[0]) -> object:
            folder = root / version.folder
            folder.mkdir(exist_ok=True)
            for name in version.members():
                (folder / name).write_bytes(first)
            (folder / version.members()[2]).write_bytes(content)
            return cifar10_files.read_folder(folder, version)

        def read_packed(content: bytes, version: cifar10_files.Version = version) -> object:
            path = root / version.archive
            path.write_bytes(content)
            return cifar10_files.read_archive(path, version)

        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for name in version.members():
                info = tarfile.TarInfo(f"{version.folder}/{name}")
                info.size, info.pax_headers = len(seeds[0]), {"comment": "é"}
                tar.addfile(info, io.BytesIO(seeds[0]))
        plain = buffer.getvalue()

        def repacked(rng: random.Random, content: bytes, other: bytes, plain: bytes = plain) -> bytes:
            return gzip.compress(mutate(rng, plain, plain), 1)

        kind = "python" if version is cifar10_files.PYTHON else "binary"
        found.append(Reader(f"CIFAR-10 {kind}", seeds, read_file, "data_batch_3"))
        archive = [gzip.compress(plain, 1)]
        found.append(Reader(f"CIFAR-10 {kind} archive", archive, read_packed, version.archive, (repacked,), share=0.5))
    return found


def images(root: Path) -> list[Reader]:
    rng = np.random.default_rng(0)
    files: dict[str, list[bytes]] = {"png": [], "jpg": [], "bmp": [], "webp": []}
    for suffix, kind in (("png", "PNG"), ("jpg", "JPEG"), ("bmp", "BMP"), ("webp", "WEBP")):
        for mode in ("RGB", "L", "P", "RGBA") if kind == "PNG" else ("RGB",):
            buffer = io.BytesIO()
            Image.fromarray(rng.integers(0, 255, (9, 9, 3), np.uint8)).convert(mode).save(buffer, kind)
            files[suffix].append(buffer.getvalue())
    found = []
    for suffix, seeds in files.items():
        folder = root / suffix
        for part in ("train", "test"):
            for name in ("a", "b"):
                (folder / part / name).mkdir(parents=True)
                (folder / part / name / f"one.{suffix}").write_bytes(seeds[0])
        path = folder / "train" / "b" / f"one.{suffix}"

        def read(content: bytes, path: Path = path, folder: Path = folder) -> object:
            path.write_bytes(content)
            return data.load(folder)

        found.append(Reader(f"image .{suffix}", seeds, read, path.name))
    return found


def shards(root: Path) -> list[Reader]:
    """A tar shard; half of the damage is done to its headers."""
    root.mkdir(parents=True)
    rng = np.random.default_rng(0)
    buffer = io.BytesIO()
    Image.fromarray(rng.integers(0, 255, (9, 9, 3), np.uint8)).save(buffer, "JPEG")
    seeds = []
    for form in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w", format=form) as tar:
            for key, label in (("a", b"0"), ("b" * 120, b"1")):
                for suffix, content in (("jpg", buffer.getvalue()), ("cls", label)):
                    info = tarfile.TarInfo(f"{key}.{suffix}")
                    info.size, info.mtime = len(content), 0.5
                    tar.addfile(info, io.BytesIO(content))
        seeds.append(packed.getvalue())
    (root / "val-000000.tar").write_bytes(seeds[0])
    path = root / "train-000000.tar"

    def read(content: bytes) -> object:
        path.write_bytes(content)
        return data.load(root, image_size=8, workers=0)

    def headers(rng: random.Random, content: bytes, other: bytes) -> bytes:
        """Damage to one header, and a checksum that fits it: else every change would be told by the checksum."""
        start = 512 * rng.randrange(max(1, len(content) // 512))
        block = bytearray(mutate(rng, content[start : start + 512], other)[:512].ljust(512, b"\0"))
        block[148:156] = b" " * 8
        block[148:156] = b"%06o\0 " % sum(block)
        return content[:start] + bytes(block) + content[start + 512 :]

    return [Reader("tar shard", seeds, read, str(root), (headers,), share=0.5)]


def starts(root: Path) -> list[Reader]:
    """Weights to start from."""
    root.mkdir(parents=True)
    torch.save(network().state_dict(), root / "a.pt")
    torch.save({"epoch": 1, "state_dict": network().half().state_dict()}, root / "b.pt")
    artifacts.write_tensors(root / "a.safetensors", network().state_dict())

    def read(path: Path, content: bytes) -> object:
        path.write_bytes(content)
        return weights.start(network(), path)

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


# ---- results and checkpoints


def results(root: Path) -> list[Reader]:
    root.mkdir(parents=True)
    table = tables.table("table1")
    variant = tables.Variant(None, 0)
    store = Store(root)
    figures = {"accuracy": 0.9, "nll": 0.3, "ece": 0.01}
    lines = []
    for planned in table.plan()[:6]:
        lines.append({
            "digest": planned.job.digest, "seed": planned.job.seed, "epochs": planned.job.epochs,
            "particles": [figures, figures], "ensemble": figures, "macs": [1.0, 1.0], "params": [1, 2],
            "dense_params": 10, "flops_removed": [0.5, 0.5], "flops_of": "the extracted network", "train_seconds": 1.5,
            "config": {"precision": "float32"}, "hardware": "cpu", "dllp": "0", "torch": "2", "python": "3",
            "date": "2026-11-15T00:00:00+00:00",
        })  # fmt: skip

    def read_lines(content: bytes) -> object:
        store.runs.write_bytes(content)
        return bench.write_summary(table, store, variant)

    def one(rng: random.Random, content: bytes, other: bytes) -> bytes:
        found = content.splitlines()
        i = rng.randrange(len(found))
        found[i] = mutate_json(rng, found[i], b"")
        return b"\n".join([*found, b""])

    def read_arrays(content: bytes) -> object:
        (root / "probabilities" / "abc.npz").write_bytes(content)
        return store.probabilities("abc")

    (root / "probabilities").mkdir()
    p = np.random.default_rng(0).dirichlet(np.ones(3), (2, 4))
    content = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    return [
        Reader("runs.jsonl", [content], read_lines, "runs.jsonl", (one,), share=0.15),
        Reader("probabilities", [pack({"clean": p, "blur": p, LABELS: np.arange(4) % 3})], read_arrays, "abc.npz"),
    ]


def restarts(root: Path) -> list[Reader]:
    config = dllp.Config(keep_flops=0.5, epochs=2, batch_size=6, device="cpu", warmup=0).resolved()
    kept = checkpoints.Checkpoints(root / "whole")
    dllp.prune(network(), examples(), config, checkpoints=kept)
    kept.close()
    path = root / "step-000000001.safetensors"

    def trainer() -> Trainer:
        model = network()
        structure = discover(model, examples()[0][:2])
        particles = Particles.start(model, config, torch.device("cpu"))
        gating = make_gating(model, structure, particles, config, None)
        return Trainer(particles, gating, config, num_data=12, steps_per_epoch=2)

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
        state.restore(trainer(), (tensors, values))
        return None

    seeds = [file.read_bytes() for file in kept.files()]
    values = json.dumps(checkpoints.read(kept.files()[-1])[1]).encode()
    return [
        Reader("checkpoint", seeds, read, path.name, (mutate_tensors,)),
        Reader("checkpoint, signed values", [values], read_signed, "checkpoint", (mutate_json,), share=0.2),
    ]
