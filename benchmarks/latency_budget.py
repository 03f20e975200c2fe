"""A latency budget on a network with random weights: profile, choice without training, and the measured time.

python benchmarks/latency_budget.py --model resnet50 --shape 3 224 224 --keep 0.5 --threads 2 --out results/speed
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

import dllp
from dllp import zoo
from dllp.cli.commands import environment
from dllp.deploy.profiles import measure_profile
from paper.provenance import command

EXAMPLES = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--shape", type=int, nargs=3, default=[3, 224, 224])
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--keep", type=float, default=0.5)
    parser.add_argument("--runtime", default="onnxruntime")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--units", default="both")
    parser.add_argument("--out", type=Path, help="folder for the profile and a line of budgets.jsonl")
    given = parser.parse_args()
    torch.manual_seed(0)
    shape = tuple(given.shape)
    model = zoo.build(given.model, given.classes, shape[0], image_size=shape[-1])
    options = dict(runtime=given.runtime, threads=given.threads, batch=given.batch)
    profile = measure_profile(model, shape, progress=lambda text: print(text, flush=True), **options)
    if given.out is not None:
        profile.write(given.out / f"{given.model}-{given.runtime}-{given.threads}-{given.batch}.json")
    data = torch.randn(EXAMPLES, *shape), torch.arange(EXAMPLES) % given.classes
    choice = dict(keep_latency=given.keep, epochs=0, batch_size=2, init="given", units=given.units, device="cpu")
    result = dllp.prune(model, data, profile=profile, progress=False, **choice)
    line = {"model": given.model, "shape": list(shape), "units": given.units, **result.info["latency"]}
    line |= {"macs": result.sizes[0].macs / result.dense.macs, "dense_ms": 1e3 * profile.dense}
    line |= {"command": command(), "date": time.strftime("%Y-%m-%d"), **environment()}
    print(json.dumps(line))
    if given.out is not None:
        with open(given.out / "budgets.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
