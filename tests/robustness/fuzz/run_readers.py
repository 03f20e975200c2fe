"""Readers of what runs leave behind: run folders, reports of them, results of benches."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mutate import mutate_json, mutate_lines, mutate_tensors
from reader import Reader, examples, network

import dllp
from dllp import files, report
from dllp.data import from_pair
from dllp.deploy import speed
from dllp.evaluation.evaluate import Row
from dllp.evaluation.examples import collect
from dllp.posterior import predict_data
from dllp.report import compare, contents, page
from dllp.runs.folder import EVALUATION, EXAMPLES, LOG, RUN, SPEED
from paper import summary, tables
from paper.store import LABELS, Store, pack
from paper.summaries.figures_3_4 import QUALITIES
from paper.summaries.prediction_metrics import from_probabilities

OPTIONS: dict[str, Any] = dict(keep_flops=0.5, particles=2, epochs=2, batch_size=6, device="cpu", warmup=0)

# ---- run folders


def run_folders(root: Path) -> list[Reader]:
    found = []
    shared: dict[str, list[bytes]] = {}
    for granularity in ("channel", "weight"):
        config = dllp.Config(granularity=granularity, **OPTIONS)
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


def _load(folder: Path, name: str, whole: bytes, content: bytes) -> object:
    (folder / name).write_bytes(content)
    try:
        return dllp.load(folder, network())
    finally:
        (folder / name).write_bytes(whole)


# ---- reports


def reports(root: Path) -> list[Reader]:
    """Every file of a run folder that `dllp report` reads, through everything that is shown of it."""
    config = dllp.Config(**OPTIONS)
    result = dllp.prune(network(), examples(), config)
    folder = result.save(root / "run")
    x, y = examples()
    collect(predict_data(result.posterior, from_pair(x, y))).write(folder)
    rows = [row(name, data) for data in ("clean", "noise:0.1") for name in ("dense", "particle 1", "all particles")]
    files.write_json(folder / EVALUATION, {"rows": [vars(r) for r in rows]})
    times = [speed.Row(name, speed.TORCH, "cpu", 1, 64, 2e-3 / k, 1e-3, 3e-3, 7, 2e-3, 100 / k, 10)
             for k, name in enumerate((speed.DENSE, speed.PRUNED), 1)]  # fmt: skip
    layer = vars(speed.LayerTime("0", 2.0, 1.5, 4, 2, 0.5))
    files.write_json(folder / SPEED, {"rows": speed.as_dict(speed.compared(times)), "layers": [layer]})
    log = "".join(json.dumps({"training": "dense", **record}) + "\n" for record in result.history)
    (folder / LOG).write_text(log)

    def read(name: str, content: bytes) -> None:
        before = (folder / name).read_bytes()
        (folder / name).write_bytes(content)
        try:
            run = contents.read(folder)
            sections = [section(run) for section in report.SECTIONS] + compare.sections([run, run])
            for plot in (plot for section in sections if section for plot in section.plots):
                page._embedded(page._plot(plot))
        finally:
            (folder / name).write_bytes(before)

    mutators = {"safetensors": mutate_tensors, "json": mutate_json, "jsonl": mutate_lines}
    return [
        Reader(f"{name} by report", [(folder / name).read_bytes()], functools.partial(read, name), str(folder),
               (mutators[name.rpartition(".")[2]],), share=0.2)
        for name in (RUN, EVALUATION, SPEED, LOG, EXAMPLES,
                     "reference-0.safetensors")
    ]  # fmt: skip


def row(name: str, data: str) -> Row:
    return Row(name, data, {"accuracy": 0.9, "ece": 0.1, "nll": 0.3}, 100.0, 10, 40)


# ---- results of benches


def results(root: Path) -> list[Reader]:
    root.mkdir(parents=True)
    table = tables.table("table1")
    variant = tables.Variant(None, 0)
    store = Store(root)
    figures = {"accuracy": 0.9, "nll": 0.3, "ece": 0.01}
    p = np.random.default_rng(0).dirichlet(np.ones(3), (2, 4))
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
        return summary.write_summary(table, store, variant)

    def one(rng: random.Random, content: bytes, other: bytes) -> bytes:
        found = content.splitlines()
        i = rng.randrange(len(found))
        found[i] = mutate_json(rng, found[i], b"")
        return b"\n".join([*found, b""])

    figure = tables.table("figure4")
    figure4 = Store(root / "figure4")
    for planned in figure.plan():
        named = {"digest": planned.job.digest, "seed": planned.job.seed}
        figure4.add(lines[0] | named | {"log_prior": [30.0, 50.0], "num_data": 10})
        found = from_probabilities({quality: torch.from_numpy(p) for quality in QUALITIES}, torch.arange(4) % 3)
        figure4.add_figures({**named, "date": lines[0]["date"], "alone": found.particles, "together": found.ensemble})

    def read_figures(content: bytes) -> object:
        figure4.measured.write_bytes(content)
        return summary.write_summary(figure, figure4, variant)

    def read_arrays(content: bytes) -> object:
        (root / "probabilities" / "abc.npz").write_bytes(content)
        return store.probabilities("abc")

    (root / "probabilities").mkdir()
    content = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    return [
        Reader("runs.jsonl", [content], read_lines, "runs.jsonl", (one,), share=0.15),
        Reader("figures.jsonl", [figure4.measured.read_bytes()], read_figures, "figures.jsonl", (one,), share=0.15),
        Reader("probabilities", [pack({"clean": p, "blur": p, LABELS: np.arange(4) % 3})], read_arrays, "abc.npz"),
    ]
