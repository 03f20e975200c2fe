"""What tests of launchers share: a small table, workers that note what they begin, a Ray cluster of two nodes.

python -m tests.support.spreading NOTES bench ...    the command line with such workers
python -m tests.support.spreading cluster            prints the address of two nodes; a line on stdin kills the second
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

from dllp.cli.main import main
from dllp.runs import cluster, workers
from dllp.runs.workers import Answer, Settings, Worker
from paper import tables
from paper.jobs import Job
from paper.tables import Row, Table

NOTES, GO = "TEST_NOTES", ".go"
DENSE = Job("small_cnn", "dense", epochs=1)
SMALL = Table(
    "small",
    "Small",
    (
        Row("dense", DENSE, (0, 1)),
        Row("magnitude", replace(DENSE, method="magnitude", keep=0.5), (0, 1)),
        Row("thin", replace(DENSE, method="thin", keep=0.5), (0, 1, 2)),
        Row("dllp", replace(DENSE, method="dllp", keep=0.5), (0,), predictions="kept"),
    ),
    data="digits",
)
PLAN = SMALL.plan()
EVERY = [planned.job.digest for planned in PLAN]


class Noting(Worker):
    """Writes down every job that it begins, with its process; thin networks wait until :func:`let_go`."""

    def answer(self, job: Job) -> Answer:
        notes = os.environ[NOTES]
        with open(notes, "a") as file:
            file.write(f"{job.digest} {os.getpid()}\n")
        while job.method == "thin" and not os.path.exists(notes + GO):
            time.sleep(0.05)
        return super().answer(job)


def serve(pipe: Connection, settings: Settings) -> None:
    """In a worker's process: as ever, but with such a worker."""
    workers.Worker = Noting
    _serve(pipe, settings)


_serve = workers.serve


def begun(notes: Path) -> list[tuple[str, int]]:
    """(digest, process) of every job that was begun."""
    lines = notes.read_text().splitlines() if notes.exists() else []
    return [(digest, int(process)) for digest, process in map(str.split, lines)]


def held(notes: Path) -> list[int]:
    """Processes that wait in a job, as long as nobody let them go."""
    thin = {planned.job.digest for planned in PLAN if planned.job.method == "thin"}
    return [process for digest, process in begun(notes) if digest in thin]


def let_go(notes: Path) -> None:
    Path(f"{notes}{GO}").touch()


def counts(notes: Path) -> Counter[str]:
    """How often each job was begun."""
    return Counter(digest for digest, _ in begun(notes))


def two_nodes() -> None:
    """A Ray cluster until standard input ends."""
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    second = nodes.add_node(num_cpus=1)
    print(nodes.address, flush=True)
    if sys.stdin.readline():
        nodes.remove_node(second, allow_graceful=False)
        print("killed", flush=True)
        sys.stdin.read()
    nodes.shutdown()


if __name__ == "__main__":
    if sys.argv[1] == "cluster":
        two_nodes()
    else:
        from tests.support import spreading

        os.environ[NOTES] = sys.argv[1]
        tables.TABLES["small"] = SMALL
        workers.serve, cluster.Worker = spreading.serve, spreading.Noting
        sys.exit(main(sys.argv[2:]))
