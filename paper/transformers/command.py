"""`dllp bench transformers`: run the rows that are not finished, one job after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path
from typing import Any

from dllp.devices.device import environment, find_device
from dllp.errors import ConfigError
from paper.provenance import now, source
from paper.store import Store
from paper.summary import MARKDOWN
from paper.tables import Variant
from paper.transformers.material import Folders, material
from paper.transformers.rows import NAME, SEEDS, TASKS, Row, digest, rows
from paper.transformers.runner import Runner
from paper.transformers.summary import write_summary


def execute(
    given: Mapping[str, Any], command: str, settings: Mapping[str, Any], shard: tuple[int, int] = (1, 1)
) -> None:
    """Run the rows that are not finished, and write the table.

    Args:
        command: What was typed.
        shard: (I, N): the I-th of N shares; rows of one task and seed stay together.
    """
    for option in ("launcher", "data", "image_size"):
        if option in given:
            raise ConfigError(f"{NAME} runs its rows one after another on their own data: leave out --{option}")
    patterns, seeds = given.get("rows") or ["*"], tuple(given.get("seeds") or SEEDS)
    variant = Variant(given.get("epochs"), given.get("validation", 0), settings)
    chosen = [row for row in rows() if any(fnmatchcase(row.name, pattern) for pattern in patterns)]
    if not chosen:
        names = ", ".join(row.name for row in rows())
        raise ConfigError(f"{NAME} has no row {' '.join(patterns)!r}: choose from {names}")
    store = Store(Path(given.get("out", "results")) / f"{NAME}{variant.suffix}")
    plan = [(row, seed) for seed in seeds for row in chosen]
    parts, (index, count) = list(dict.fromkeys((row.task, seed) for row, seed in plan)), shard
    plan = [job for job in plan if parts.index((job[0].task, job[1])) % count == index - 1]
    finished = store.digests()
    if given.get("list"):
        for row, seed in plan:
            name = digest(row, seed, variant)
            print("done" if name in finished else "    ", name, row.name, "seed", seed)
        return
    try:
        if not given.get("summary_only"):
            _run(plan, store, variant, given, {"command": command, "processes": count})
    finally:
        written = write_summary(store, variant)
    if written and not given.get("quiet"):
        print((store.folder / MARKDOWN).read_text(encoding="utf-8"))
        print(f"results: {store.folder}")


def _run(
    plan: Sequence[tuple[Row, int]], store: Store, variant: Variant, given: Mapping[str, Any], known: Mapping[str, Any]
) -> None:
    """One job after another; those of one task and seed follow each other, and share their start.

    `known` is added to every line.
    """
    device = find_device(given.get("device", "auto"))
    usual = "bfloat16" if device.type == "cuda" else "float32"
    machine = {"device": str(device), "precision": given.get("precision", usual)}
    note = {**environment(device), **source(), **known}
    lengths = {} if variant.epochs is None else {"start": variant.epochs, "epochs": variant.epochs}
    read, models = (Path(given[name]) if name in given else None for name in ("texts", "models"))
    folders = Folders(read, models, given.get("data_root"))
    held = "validation" if variant.validation else "test"
    if "again" in given:
        for row, seed in plan:
            if digest(row, seed, variant) in store.digests():
                store.supersede(digest(row, seed, variant), given["again"])
    # each is looked up when its turn comes: another process may have finished it meanwhile
    lacking = (job for job in plan if digest(*job, variant) not in store.digests())
    for (task, seed), jobs in groupby(lacking, lambda job: (job[0].task, job[1])):
        changes = {**lengths, **variant.settings}
        fewer, length = changes.pop("examples", None), changes.pop("length", None)
        if not TASKS[task].start:
            changes.pop("start", None)
        runner = Runner(task, material(task, folders, seed, held, fewer=fewer, length=length), seed, machine, **changes)
        for row, _ in jobs:
            line = runner.run(row)
            named = {"digest": digest(row, seed, variant), "row": row.name, "seed": seed, "task": task}
            store.add({**named, "method": row.method, "removed": row.removed, **line, "date": now(), **note})
            if not given.get("quiet"):
                quality = ", ".join(f"{name} {value:.4f}" for name, value in line["ensemble"].items())
                print(f"{row.name} seed {seed}: {quality}, {line['train_seconds']:.0f} s", flush=True)
        del runner  # its memory goes before the next one's comes
