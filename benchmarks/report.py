"""Build time of a report, and its first paint in a browser: `python benchmarks/report.py`.

The claims: a report of a CIFAR-10 run is built in less than 5 s and paints in less than 1 s. The run is made here: a
VGG-16 with the widths of a pruned one, 60 epochs of history, and answers to 10,000 test images, so that everything that
costs time is of its real size; its numbers mean nothing. Writes results/report/README.md and summary.json.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import dllp
from dllp import files
from dllp.deploy import speed
from dllp.evaluation import examples
from dllp.evaluation.evaluate import DENSE
from dllp.records import GATE_BINS
from dllp.runs.folder import SPEED
from dllp.runs.tensors import write_network
from dllp.zoo import build

RUNS = 5
EPOCHS, TEST, PARTICLES = 60, 10_000, 2


def cifar_run(place: Path) -> tuple[Path, dllp.Result]:
    """A run folder of the size of a VGG-16 on CIFAR-10, with its data beside it."""
    rng = np.random.default_rng(0)
    data = place / "data"
    data.mkdir()
    for split, count in (("train", 50_000), ("test", TEST)):
        np.save(data / f"{split}_x.npy", rng.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8))
        np.save(data / f"{split}_y.npy", np.arange(count) % 10)
    model = build("vgg16_bn", num_classes=10, in_channels=3)
    x, y = torch.randn(32, 3, 32, 32), torch.arange(32) % 10
    config = dllp.Config(keep_flops=0.26, epochs=1, batch_size=16, particles=PARTICLES, init="fresh", device="cpu")
    result = dllp.prune(model, (x, y), config)
    record = result.history[-1]
    result.history[:] = [record | {"epoch": i + 1} for i in range(EPOCHS)]
    assert len(record["gates"]) == len(result.widths) and len(record["gates"][0]) == GATE_BINS
    classes = [str(i) for i in range(10)]
    shape: dict[str, Any] = {"num_classes": 10, "in_channels": 3, "image_size": 32, "shape": [3, 32, 32]}
    result.info["data"] = shape | {"classes": classes, "dtype": "uint8", "mean": [0.5] * 3, "std": [0.25] * 3}
    folder = result.save(place / "run")
    write_network(folder / "dense.safetensors", model)
    settings = {"data": str(data), "model": "vgg16_bn", **config.resolved().as_dict()}
    (folder / "config.yaml").write_text("".join(f"{k}: {json.dumps(v)}\n" for k, v in settings.items()))
    labels = torch.from_numpy(np.arange(TEST) % 10).int()
    names = [DENSE, *(f"particle {i + 1}" for i in range(PARTICLES)), "all particles"]
    p = torch.rand(TEST)
    examples.Examples(labels, dict.fromkeys(names, labels), dict.fromkeys(names, p), p / 2, p / 4).write(folder)
    return folder, result


def built(folder: Path) -> tuple[float, float]:
    """Seconds and CPU seconds of the whole command, start of Python included."""
    start, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "dllp", "report", str(folder), "--quiet"], check=True)  # noqa: S603 # nosec
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter() - start, now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime


def keep_speed(folder: Path, result: dllp.Result) -> None:
    """A speed.json as `dllp speed` leaves it, from one quick look."""
    dense, pruned = speed.subjects(result, (3, 32, 32), round_to=1)
    rows = speed.as_dict(speed.measure_torch([dense, pruned], (3, 32, 32), batches=[1], seconds=0))
    layers = [vars(layer) for layer in speed.torch_layers(dense, pruned, (3, 32, 32), batch=1, runs=1)]
    files.write_json(folder / SPEED, {"rows": rows, "layers": layers})


def painted(page: Path) -> dict[str, float] | None:
    """Milliseconds to the first paint and until every plot is drawn; None without a browser."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        print("no browser: apt-get install chromium")
        return None
    from playwright.sync_api import sync_playwright

    script = """() => performance.getEntriesByName("first-contentful-paint")[0].startTime"""
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser)
        tab = chromium.new_page()
        start = time.perf_counter()
        tab.goto(page.as_uri())
        tab.wait_for_selector("html[data-ready]", state="attached", timeout=120_000)
        found = {"first_paint_ms": tab.evaluate(script), "all_plots_ms": 1e3 * (time.perf_counter() - start)}
        chromium.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/report"))
    parser.add_argument("--runs", type=int, default=RUNS)
    given = parser.parse_args()
    out, runs = given.out, given.runs
    with tempfile.TemporaryDirectory() as place:
        folder, result = cifar_run(Path(place))
        cold = [built(folder) for _ in range(runs)]
        keep_speed(folder, result)
        stored = [built(folder) for _ in range(runs)]
        paints = [found for _ in range(runs) if (found := painted(folder / "report.html"))]
        size = (folder / "report.html").stat().st_size
    summary: dict[str, Any] = {
        "build_s": [wall for wall, _ in stored],
        "build_cpu_s": [cpu for _, cpu in stored],
        "build_measuring_latency_s": [wall for wall, _ in cold],
        "build_measuring_latency_cpu_s": [cpu for _, cpu in cold],
        "bytes": size,
        "first_paint_ms": [p["first_paint_ms"] for p in paints],
        "all_plots_ms": [p["all_plots_ms"] for p in paints],
        "runs": runs,
        "environment": dllp.devices.device.environment(torch.device("cpu")),
    }
    files.write_json(out / "summary.json", summary)
    rows = {
        "build, latency stored by `dllp speed`": (summary["build_s"], 5, "s"),
        "the same in CPU time": (summary["build_cpu_s"], None, "s"),
        "build, latency measured on the way": (summary["build_measuring_latency_s"], None, "s"),
        "the same in CPU time ": (summary["build_measuring_latency_cpu_s"], None, "s"),
        "first paint": (summary["first_paint_ms"], 1000, "ms"),
        "all plots drawn": (summary["all_plots_ms"], None, "ms"),
    }
    lines = [f"{__doc__.splitlines()[0]}\n" if __doc__ else "", "| what | median | least | most | wanted |",
             "|---|---:|---:|---:|---:|"]  # fmt: skip
    for name, (values, wanted, unit) in rows.items():
        if values:
            middle, low, high = statistics.median(values), min(values), max(values)
            goal = f"< {wanted} {unit}" if wanted else "-"
            lines.append(f"| {name} | {middle:.2f} {unit} | {low:.2f} | {high:.2f} | {goal} |")
    known = summary["environment"]
    lines.append(f"\n{runs} runs each, {size:,} bytes, Python {known['python']}, torch {known['torch']}, CPU.")
    text = "\n".join(lines) + "\n"
    files.write_bytes(out / "README.md", text.encode())
    print(text)


if __name__ == "__main__":
    main()
