"""Variants of a table's rows on held-out training images; one dense network a seed, trained once, serves them all.

    python benchmarks/variants.py --data-root DIR --try given-channel-55 --try given-channel-55 lr=0.2 --out FILE

Each `--try` is a row and what differs from it. One line of JSON for each run is appended to --out; a run whose line is
there is not run again. No test image is read: every network is measured on the images that `--validation` holds out.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from dllp.data import load
from dllp.devices.device import find_device
from paper import tables
from paper.jobs import Runner
from paper.launch import in_short
from paper.provenance import command, now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", default="table1")
    parser.add_argument("--try", nargs="+", action="append", required=True, metavar="WORD", dest="tries",
                        help="the name of a row, then settings NAME=VALUE")  # fmt: skip
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--validation", type=int, default=10_000)
    parser.add_argument("--epochs", type=int, help="of a quick try")
    parser.add_argument("--data-root")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    table, out = tables.table(options.table), Path(options.out)
    known = {json.loads(line)["digest"] for line in out.read_text().splitlines()} if out.exists() else set()
    device = find_device(options.device)
    machine = {"device": str(device), "precision": "bfloat16" if device.type == "cuda" else "float32"}
    runner = Runner(load(table.data, root=options.data_root), everywhere=False, **machine)
    variant = tables.Variant(options.epochs, options.validation)
    for seed in options.seeds:
        for row, *words in options.tries:
            settings = tables.settings(words)
            (planned,) = table.set(settings, [row]).plan([row], [seed], variant)
            for job in (planned.job.dense, planned.job) if planned.job.pretrain else (planned.job,):
                if job.digest in known:
                    continue
                known.add(job.digest)
                line = runner.run(job).line | {"date": now(), "command": command()}
                with out.open("a") as file:
                    file.write(json.dumps({"row": row, "vary": settings, **line}) + "\n")
                print(f"{job.method} {row} seed {seed} {' '.join(words)}: {in_short(line)}", flush=True)


if __name__ == "__main__":
    main()
