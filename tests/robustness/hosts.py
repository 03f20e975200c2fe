"""Two hosts: network namespaces joined by a veth pair are two nodes of torchrun; the link is cut, and the run goes on.

    python -m tests.robustness.hosts        needs root and `ip`

A run that nothing happens to, one whose link is cut after a checkpoint, and its continuation: the end must be the same,
byte for byte, and both nodes must have ended by themselves within a minute and a half of the cut, with one line each.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from tests.robustness.crash.harness import digest
from tests.support.commands import ENVIRONMENT, npy

NODES = ("dllp-a", "dllp-b")
ADDRESSES, PORT = ("10.231.77.1", "10.231.77.2"), 29561
PATIENCE = 90
OPTIONS = ("--model", "mlp", "--granularity", "weight", "--gate-linear", "--keep-params", "0.3", "--epochs", "20",
           "--batch-size", "32", "--checkpoint-steps", "5", "--quiet", "--parallel", "particles")  # fmt: skip


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextmanager
def joined() -> Iterator[None]:
    """The two namespaces, each with its end of the link."""
    made: list[str] = []
    try:
        for node in NODES:
            ip("netns", "add", node)
            made.append(node)
        ip("link", "add", "link-a", "netns", NODES[0], "type", "veth", "peer", "name", "link-b", "netns", NODES[1])
        for node, end, address in zip(NODES, ("link-a", "link-b"), ADDRESSES, strict=True):
            ip("-n", node, "addr", "add", f"{address}/24", "dev", end)
            ip("-n", node, "link", "set", end, "up")
            ip("-n", node, "link", "set", "lo", "up")
        yield
    finally:
        for node in made:
            ip("netns", "del", node)


def start(data: Path, out: Path, *words: str) -> list[subprocess.Popen[str]]:
    """torchrun on both nodes; the second never sees the run folder."""
    processes = []
    for k, (node, end, address) in enumerate(zip(NODES, ("link-a", "link-b"), ADDRESSES, strict=True)):
        launcher = ["--nnodes=2", "--nproc-per-node=1", f"--node-rank={k}", f"--master-addr={ADDRESSES[0]}"]
        launcher += [f"--master-port={PORT}", f"--local-addr={address}"]
        prune = ["-m", "dllp", "prune", "--data", str(data), *OPTIONS, "--out", str(out if k == 0 else out / "none")]
        command = [
            "ip",
            "netns",
            "exec",
            node,
            sys.executable,
            "-m",
            "torch.distributed.run",
            *launcher,
            *prune,
            *words,
        ]
        environment = ENVIRONMENT | {"GLOO_SOCKET_IFNAME": end, "OMP_NUM_THREADS": "1"}
        processes.append(subprocess.Popen(command, env=environment, text=True, stderr=subprocess.PIPE))
    return processes


def finish(processes: list[subprocess.Popen[str]], seconds: float = 300) -> list[tuple[int, list[str]]]:
    """Exit code of each node, and what dllp said there."""
    texts = [process.communicate(timeout=seconds)[1] for process in processes]
    said = [[line for line in text.splitlines() if line.startswith("dllp:")] for text in texts]
    return [(process.returncode, lines) for process, lines in zip(processes, said, strict=True)]


def main() -> int:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        print("two hosts need root and `ip` (iproute2): nothing was tested")
        return 2
    rng, y = np.random.default_rng(0), np.arange(320) % 4
    with tempfile.TemporaryDirectory() as folder, joined():
        here = Path(folder)
        data = npy(here / "data", (rng.normal(size=(320, 6)) + y[:, None]).astype(np.float32), y)
        ended = finish(start(data, here / "whole"))
        assert [code for code, _ in ended] == [0, 0], ended
        cut = start(data, here / "cut")
        while not list((here / "cut").glob("checkpoints/pruned/step-*")):
            assert all(process.poll() is None for process in cut), finish(cut)
            time.sleep(0.02)
        ip("-n", NODES[0], "link", "set", "link-a", "down")
        began = time.monotonic()
        ended = finish(cut, PATIENCE)
        seconds = time.monotonic() - began
        assert all(code != 0 and len(lines) == 1 for code, lines in ended), ended
        assert not (here / "cut/run.json").exists(), "the link was cut too late"
        ip("-n", NODES[0], "link", "set", "link-a", "up")
        resumed = finish(start(data, here / "cut", "--resume"))
        assert [code for code, _ in resumed] == [0, 0], resumed
        assert digest(here / "cut") == digest(here / "whole"), "the end differs"
    print(f"the link was cut: both nodes ended after {seconds:.0f} s; the first said: {ended[0][1][0]}")
    print("the run went on to the same end, byte for byte")
    return 0


if __name__ == "__main__":
    sys.exit(main())
