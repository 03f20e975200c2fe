"""Images per second of the input pipeline on two cores, over what Pillow alone decodes on those cores.

python benchmarks/pipeline.py FOLDER [--image-size 64] [--json FILE]    FOLDER: train/<class>/*.jpg

All take turns, so that they see the same machine; a ratio is the median over the turns. `host` is what the cores do:
reading, decoding, cropping, batching and handing over. `whole` also resizes, mirrors and normalises, on the GPU where
there is one; without one that competes for the same two cores.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import PIL
import torch
from PIL import Image

from dllp.data import StreamBatches, StreamedData
from dllp.data.bad import Tally
from dllp.data.sources import of_classes
from dllp.data.stream import Order, read

CORES, BATCH = 2, 256


def decode(paths: list[str]) -> int:
    """Pillow alone."""
    for path in paths:
        with Image.open(path) as image:
            image.convert("RGB")
    return len(paths)


def drained(batches: Iterator[Any], count: int) -> Callable[[], None]:
    """Takes so many batches; the first, for which the workers start, was taken before."""
    next(batches)

    def take() -> None:
        for _ in range(count):
            next(batches)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    return take


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(folder: Path, image_size: int, batches: int, rounds: int) -> dict[str, Any]:
    """Images per second of `rounds` turns of so many batches, and their ratios."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    sources, _ = of_classes(folder, "train")
    data = StreamedData(sources, torch.zeros(len(sources)).long(), image_size, Tally(len(sources)), workers=CORES)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    order = torch.randperm(len(sources), generator=torch.Generator().manual_seed(0))[: batches * BATCH].tolist()
    parts = [[sources.path(i) for i in order[start : start + 32]] for start in range(0, len(order), 32)]
    turns: list[dict[str, float]] = []
    with multiprocessing.Pool(CORES) as pool:
        sum(pool.imap_unordered(decode, parts))  # files and processes are warm from here on
        for _ in range(rounds):
            source = StreamBatches(data, BATCH, seed=0, device=device)
            turn = {"pillow": seconds(lambda: sum(pool.imap_unordered(decode, parts)))}
            turn["host"] = seconds(drained(read(data, Order(source, 0, 0), pinned=device.type == "cuda"), batches))
            turn["whole"] = seconds(drained(source.epoch(0), batches))
            turns.append({name: len(order) / spent for name, spent in turn.items()})
    ratios = {name: statistics.median(turn[name] / turn["pillow"] for turn in turns) for name in ("host", "whole")}
    return {
        "images": len(sources), "image_size": image_size, "batch": BATCH, "cores": CORES, "device": str(device),
        "hardware": platform.processor() or platform.machine(), "torch": torch.__version__, "Pillow": PIL.__version__,
        "images_per_second": {name: round(statistics.median(turn[name] for turn in turns)) for name in turns[0]},
        "ratio": {name: round(value, 3) for name, value in ratios.items()},
        "turns": [{name: round(value) for name, value in turn.items()} for turn in turns],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--batches", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    figures = measure(given.folder, given.image_size, given.batches, given.rounds)
    text = json.dumps(figures, indent=1)
    print(text)
    if given.json is not None:
        given.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
