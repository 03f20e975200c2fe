"""onnxruntime and PyTorch, dense against pruned, for the widths of real DLLP runs: `python benchmarks/latency.py`.

Time does not depend on the values of the weights, so the networks are freshly initialised and cut to the kept
channels of runs in results/table1 and table2. Appends to results/speed/rows.jsonl and layers.jsonl, each run after a
line with its environment, and writes table.md.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dllp.cli.commands import environment
from dllp.deploy import speed
from dllp.structure.groups import discover
from dllp.structure.slicing import cut, recipe
from dllp.zoo import build
from paper.provenance import command
from paper.store import Store

CASES = (("vgg16_bn", "table2", "a0bc110bb3ef6ed5", 3.0), ("resnet56", "table1", "88d16785dba05e9c", 1.7))
"""Network, table and digest of the run whose first particle's widths are taken, and the wanted speed-up."""
SHAPE = (3, 32, 32)
SETTING = (speed.ONNX, "cpu", 1, 64)


def cases(name: str, table: str, digest: str, multiples: Sequence[int]) -> list[speed.Subject]:
    """Dense and pruned network, and the pruned one with multiples of channels."""
    line = next(line for line in Store(Path("results", table)).lines() if line["digest"] == digest)
    torch.manual_seed(0)
    model = build(name, num_classes=10, in_channels=3, image_size=32).eval()
    structure = discover(model, torch.randn(2, *SHAPE))
    keep = torch.cat([torch.arange(group.units) < line["widths"][group.name][0] for group in structure.groups])
    kept = recipe(model, structure.groups, keep)
    macs = structure.flops.expected(keep.double()).item()
    assert abs(1 - macs / structure.flops.dense - line["flops_removed"][0]) < 1e-9
    found = [
        speed.Subject(speed.DENSE, model, structure.flops.dense),
        speed.Subject(speed.PRUNED, cut(model, kept), macs),
    ]
    return found + [part for each in multiples for part in speed.multiples(model, kept, structure, each)]


def busy(seconds: float = 3.0) -> float:
    """CPUs that others use at this moment."""

    def idle() -> float:
        return float(Path("/proc/uptime").read_text().split()[1])

    start, before = time.perf_counter(), idle()
    time.sleep(seconds)
    passed = time.perf_counter() - start
    return (os.cpu_count() or 1) - (idle() - before) / passed


def wait_for_quiet(limit: float, minutes: float) -> float:
    """Wait until others use less than `limit` CPUs; returns what they use then, or at the end of the patience."""
    end = time.monotonic() + 60 * minutes
    used = busy()
    while used > limit and time.monotonic() < end:
        used = busy()
    return used


def markdown(rows: Sequence[dict[str, Any]], layers: Sequence[dict[str, Any]], info: dict[str, Any]) -> str:
    """The figures that were asked for, and everything else in short."""
    runs = ", ".join(f"`results/{table}`: {digest}" for _, table, digest, _ in CASES)
    lines = [
        "# Time: dense against pruned\n",
        f"`{info['command']}`; {info['processor']}, {info['cpus']} CPUs ({info['instructions']}), Python "
        f"{info['python']}, torch {info['torch']}, onnxruntime {info['onnxruntime']}; {info['date']}. Medians of "
        "interleaved samples with quartiles; others used "
        f"{info['busy_before']:.2f} CPUs before and {info['busy_after']:.2f} after.\n",
        "The networks are freshly initialised and cut to the channels that real DLLP runs kept "
        f"({runs}; first particle): time does not depend on "
        "the values of the weights. *Padded*: the same network, its outputs unchanged, with dead channels up to the "
        "multiple (`dllp export --pad-to`). *Rounded*: the widths that `--round-to` would have chosen within the same "
        "FLOPs. int8: ranges from random inputs, accuracy not measured.\n",
        "## onnxruntime, CPU, one thread, batch 64\n",
        "| model | network | FLOPs removed | ms (quartiles) | speed-up | by CPU time | ideal | wanted | time share |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    wanted = {name: goal for name, _, _, goal in CASES}
    base = rows[0]
    for row in rows:
        if (row["runtime"].removesuffix(" int8"), row["device"], row["threads"], row["batch"]) == SETTING:
            base = row if row["speedup"] is None else base
            goal = wanted[row["model"]] if row["network"] != speed.DENSE and row["share"] is not None else None
            lines.append(f"| {row['model']} | {_name(row)} | {_cells(row, base)} | {goal or '-'} | {_share(row)} |")
    lines += ["\n## Which layers hold it back\n", "Milliseconds of one batch of 64; ideal is dense times kept FLOPs.\n"]
    lines += [
        "| model | network | layer | channels | dense | this | ideal | lost |",
        "|---|---|---|---|---:|---:|---:|---:|",
    ]
    for name in wanted:
        for network in dict.fromkeys(layer["network"] for layer in layers):
            part = [layer for layer in layers if (layer["model"], layer["network"]) == (name, network)]
            for layer in sorted(part, key=lambda layer: -layer["lost_ms"])[:6]:
                ideal = layer["dense_ms"] * layer["kept_macs"]
                lines.append(
                    f"| {name} | {network} | {layer['layer']} | {layer['dense_width']} → {layer['pruned_width']} | "
                    f"{layer['dense_ms']:.2f} | {layer['pruned_ms']:.2f} | {ideal:.2f} | {layer['lost_ms']:.2f} |"
                )
    lines += ["\n## Every setting: speed-up over dense\n"]
    lines += [
        "| model | network | runtime | threads | batch | ms | speed-up | peak memory | on disk |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        gain = "-" if row["speedup"] is None else f"{row['speedup']:.2f}"
        peak = "-" if row["memory"] is None else f"{row['memory'] / 1e6:.1f} MB"
        place = f"{row['threads']}" if row["device"] == "cpu" else row["device"]
        lines.append(
            f"| {row['model']} | {row['network']} | {row['runtime']} | {place} | {row['batch']} | "
            f"{1e3 * row['median']:.2f} | {gain} | {peak} | {row['bytes'] / 1e6:.2f} MB |"
        )
    return "\n".join(lines) + "\n"


def _name(row: dict[str, Any]) -> str:
    return row["network"] + (" int8" if row["runtime"] == speed.INT8 else "")


def _cells(row: dict[str, Any], base: dict[str, Any]) -> str:
    times = f"{1e3 * row['median']:.1f} ({1e3 * row['low']:.1f}-{1e3 * row['high']:.1f})"
    gain = "1" if row["speedup"] is None else f"{row['speedup']:.2f}"
    cpu, ideal = base["cpu"] / row["cpu"], 1 / (1 - row["removed"])
    return f"{100 * row['removed']:.2f}% | {times} | {gain} | {cpu:.2f} | {ideal:.2f}"


def _share(row: dict[str, Any]) -> str:
    return "-" if row["share"] is None else f"{100 * row['share']:.0f}%"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/speed"))
    parser.add_argument("--seconds", type=float, default=8.0, help="for each setting")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--threads", type=int, nargs="+", help="by default 1 and all")
    parser.add_argument("--round-to", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--wait", type=float, default=5.0, help="minutes to wait for a quiet machine")
    given = parser.parse_args()
    before = wait_for_quiet(0.15, given.wait)
    rows: list[dict[str, Any]] = []
    layers: list[dict[str, Any]] = []
    for name, table, digest, _ in CASES:
        found = cases(name, table, digest, given.round_to)
        options: dict[str, Any] = dict(batches=given.batch, threads=given.threads, seconds=given.seconds)
        measured = speed.measure(found, SHAPE, progress=lambda text: print(text, flush=True), **options)
        for row in speed.as_dict(measured):
            rows.append({"model": name, "run": digest, "removed": 1 - row["macs"] / found[0].macs} | row)
            if row["batch"] == max(given.batch) and row["speedup"] is not None:
                print(name, row["network"], row["runtime"], row["threads"], f"{row['speedup']:.2f}", flush=True)
        for other in found[1:3]:
            for layer in speed.layers(found[0], other, SHAPE):
                layers.append({"model": name, "network": other.name} | vars(layer) | {"lost_ms": layer.lost_ms})
    info = environment() | {
        "command": command(),
        "cpus": os.cpu_count(),
        "date": time.strftime("%Y-%m-%d"),
        "busy_before": before,
        "busy_after": busy(),
    }
    given.out.mkdir(parents=True, exist_ok=True)
    for name, lines in (("rows", rows), ("layers", layers)):
        with (given.out / f"{name}.jsonl").open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in [{"environment": info}, *lines])
    (given.out / "table.md").write_text(markdown(rows, layers, info))


if __name__ == "__main__":
    main()
