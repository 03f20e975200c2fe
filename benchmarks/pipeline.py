"""Images per second of the input pipeline on two cores, over what Pillow alone decodes on those cores.

python benchmarks/pipeline.py FOLDER [--image-size 64] [--jsonl FILE]    FOLDER: train/<class>/*.jpg

All take turns, so that they see the same machine; a ratio is the median over the turns.

pillow    opens and decodes files, in two processes
resized   Pillow alone too, and resizes half the area of each image to the size that training wants
host      what the worker processes do: read, decode, cut, resize and hand over batches
whole     batches as training gets them: on the device, and normalised there

`ratio` is of images per second: true where nobody else uses the cores. `effort` is the same of processor time for each
image, of all processes together, which others disturb less: the ratio that cores kept busy would reach.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import PIL
import torch
from PIL import Image

from dllp.data import StreamBatches, StreamedData
from dllp.data.sources import from_class_folders
from dllp.data.stream import batch_order, read_batches
from dllp.data.unreadable import UnreadableImages

CORES, BATCH = 2, 256
TICK = os.sysconf("SC_CLK_TCK")


def decode(size: int | None, paths: list[str]) -> int:
    """Pillow alone; with `size` a part of half the area becomes that square."""
    for path in paths:
        with Image.open(path) as image:
            whole = image.convert("RGB")
            if size is not None:
                box = 0, 0, 0.7 * whole.width, 0.7 * whole.height
                whole.resize((size, size), Image.Resampling.BILINEAR, box)
    return len(paths)


def taken(batches: Iterator[Any], count: int) -> tuple[float, float]:
    """What so many batches cost; the first, for which the workers start, was taken before. None lives on after it."""

    def take() -> None:
        for _ in range(count):
            next(batches)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    next(batches)
    found = cost(take)
    batches.close()  # type: ignore[attr-defined]
    while multiprocessing.active_children()[CORES:]:  # besides Pillow's own
        time.sleep(0.01)
    return found


def endless(data: StreamedData, device: torch.device) -> Iterator[Any]:
    """The batches of all epochs."""
    source = StreamBatches(data, BATCH, seed=0, device=device)
    for epoch in itertools.count():
        yield from source.epoch(epoch)


def spent() -> float:
    """Seconds of processor time of this process and those that it has started and that still live."""
    total = 0
    for pid in (os.getpid(), *(child.pid for child in multiprocessing.active_children())):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / TICK


def cost(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds by the clock, and of processor time."""
    processor, began = spent(), time.perf_counter()
    work()
    return time.perf_counter() - began, spent() - processor


def measure(folder: Path, image_size: int, batches: int, rounds: int) -> dict[str, Any]:
    """`rounds` turns of so many batches."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    sources, _ = from_class_folders(folder, "train")
    data = StreamedData(
        sources, torch.zeros(len(sources)).long(), image_size, UnreadableImages(len(sources)), workers=CORES
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    order = torch.randperm(len(sources), generator=torch.Generator().manual_seed(0))[: batches * BATCH].tolist()
    parts = [[sources.path(i) for i in order[start : start + 32]] for start in range(0, len(order), 32)]
    turns: list[dict[str, tuple[float, float]]] = []
    with multiprocessing.Pool(CORES) as pool:
        pillow, resized = (
            lambda size=size: sum(pool.imap_unordered(partial(decode, size), parts)) for size in (None, image_size)
        )
        pillow()  # files and processes are warm from here on
        for _ in range(rounds):
            turn = {"pillow": cost(pillow), "resized": cost(resized)}
            requests = batch_order(data, BATCH, 0, slice(BATCH))
            turn["host"] = taken(read_batches(data, requests), batches)
            turn["whole"] = taken(endless(data, device), batches)
            turns.append(turn)
    count = {name: len(order) if name in ("pillow", "resized") else batches * BATCH for name in turns[0]}
    middle = {
        name: [statistics.median(turn[name][k] / count[name] for turn in turns) for k in (0, 1)] for name in turns[0]
    }
    ratios = {
        name: [
            statistics.median(turn["pillow"][k] / count["pillow"] / (turn[name][k] / count[name]) for turn in turns)
            for k in (0, 1)
        ]
        for name in ("resized", "host", "whole")
    }
    return {
        "images": len(sources), "image_size": image_size, "batch": BATCH, "cores": CORES, "device": str(device),
        "hardware": platform.processor() or platform.machine(), "torch": torch.__version__, "Pillow": PIL.__version__,
        "load": round(os.getloadavg()[0], 1), "rounds": rounds,
        "images_per_second": {name: round(1 / value[0]) for name, value in middle.items()},
        "microseconds": {name: round(1e6 * value[1], 1) for name, value in middle.items()},
        "ratio": {name: round(value[0], 3) for name, value in ratios.items()},
        "effort": {name: round(value[1], 3) for name, value in ratios.items()},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--batches", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--jsonl", type=Path, help="a line is added to this file")
    given = parser.parse_args()
    line = json.dumps(measure(given.folder, given.image_size, given.batches, given.rounds))
    print(line)
    if given.jsonl is not None:
        with given.jsonl.open("a") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    main()
