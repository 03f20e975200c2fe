"""Handing out jobs: what goes together, nothing twice, workers that are lost or fail, mistakes on the command line."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dllp.cli.main import main
from dllp.errors import ConfigError, StructureError, WorkerError
from dllp.runs import cluster
from dllp.runs.launch import Spread
from dllp.runs.workers import Answer, Failed, Lost, Processes, Unfit, Worker
from paper import tables
from paper.jobs import Job, Outcome, Runner
from paper.launch import Book, Settings
from paper.store import Store
from paper.tables import units
from tests.support import spreading
from tests.support.commands import one_line
from tests.support.many import free_port
from tests.support.spreading import EVERY, PLAN

# ---- what one worker takes


@pytest.mark.parametrize("name", list(tables.TABLES))
def test_derived_jobs_stay_with_their_dense_network(name: str) -> None:
    plan = tables.TABLES[name].plan()
    found = units(plan)
    assert sorted(p.job.digest for unit in found for p in unit) == sorted(p.job.digest for p in plan)
    homes = {planned.job.digest: i for i, unit in enumerate(found) for planned in unit}
    for unit in found:
        assert len(unit) == 1 or {p.job.dense.digest for p in unit} == {unit[0].job.dense.digest}
        assert [p.job.derived for p in unit] == sorted(p.job.derived for p in unit), "the dense network first"
    for planned in plan:
        if planned.job.derived and planned.job.dense.digest in homes:
            assert homes[planned.job.digest] == homes[planned.job.dense.digest]


# ---- handing out, with workers that only pretend


def outcome(job: Job) -> Outcome:
    versions = {"clean": np.full((1, 4, 2), 0.5)}
    return Outcome({"digest": job.digest, "seed": job.seed}, versions, np.zeros(4))


class Pretended:
    """Workers that answer at once, the latest first, by what `act` says for (worker, job)."""

    retries = 1

    def __init__(self, size: int, act: Callable[[int, Job], Answer] = lambda hand, job: outcome(job)) -> None:
        self.size, self.act = size, act
        self.started, self.gone, self.closed = 0, set[int](), False
        self.asked: dict[int, Job] = {}
        self.given: list[tuple[int, Job]] = []

    def room(self, busy: int) -> bool:
        return busy < self.size

    def start_worker(self) -> int:
        self.started += 1
        return self.started

    def give(self, hand: int, job: Job) -> None:
        assert hand not in self.asked and hand not in self.gone
        self.asked[hand] = job
        self.given.append((hand, job))

    def answers(self) -> Iterator[tuple[int, Answer]]:
        hand, job = self.asked.popitem()
        answer = self.act(hand, job)
        if isinstance(answer, Lost):
            self.gone.add(hand)
        yield hand, answer

    def dismiss(self, hand: int) -> None:
        assert hand not in self.asked and hand not in self.gone
        self.gone.add(hand)

    def close(self) -> None:
        self.closed = True


def spread(folder: Path, pool: Pretended) -> list[str]:
    """Run the small table's plan; returns what was told."""
    told: list[str] = []
    book = Book(Store(folder))
    try:
        Spread(units(PLAN), pool, book, told.append).run()
    finally:
        assert pool.closed
    book.close()
    return told


def test_every_job_once_and_in_order(tmp_path: Path) -> None:
    pool = Pretended(3)
    assert spread(tmp_path, pool) == []
    assert sorted(job.digest for _, job in pool.given) == sorted(EVERY)
    assert pool.started == 3 and pool.gone == {1, 2, 3}, "a free worker takes the next job, and ends when there is none"
    whose = {job.digest: (hand, i) for i, (hand, job) in enumerate(pool.given)}
    for _, job in pool.given:
        if job.derived:
            (hand, place), (home, before) = whose[job.digest], whose[job.dense.digest]
            assert hand == home and before < place
    lines = (tmp_path / "runs.jsonl").read_bytes().splitlines()
    assert sorted(json.loads(line)["digest"] for line in lines) == sorted(EVERY)
    again = Pretended(3)
    spread(tmp_path, again)
    assert again.given == [] and again.started == 0, "finished jobs are never run again"


def test_two_who_share_a_folder(tmp_path: Path) -> None:
    other, kept = Store(tmp_path), PLAN[-1].job
    assert PLAN[-1].row.name == "thin" and len(set(EVERY)) == len(PLAN)
    dllp = next(planned.job for planned in PLAN if planned.row.predictions == "kept")

    def act(hand: int, job: Job) -> Answer:
        other.add({"digest": kept.digest, "seed": 7})  # not begun here yet
        if job.digest == dllp.digest:  # begun here, finished there first
            other.add({"digest": job.digest, "seed": 7}, {"clean": np.full((1, 4, 2), 0.25), "labels": np.ones(4)})
        return outcome(job)

    pool = Pretended(2, act)
    spread(tmp_path, pool)
    assert sorted(job.digest for _, job in pool.given) == sorted(set(EVERY) - {kept.digest})
    lines = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_bytes().splitlines()]
    assert sorted(line["digest"] for line in lines) == sorted(EVERY)
    assert [line["seed"] for line in lines if line["digest"] in (kept.digest, dllp.digest)] == [7, 7]
    assert (other.probabilities(dllp.digest)[1] == 1).all(), "arrays are those of the line"


def test_a_lost_worker_is_replaced_once(tmp_path: Path) -> None:
    first, always = PLAN[0].job, next(p.job for p in PLAN if p.row.name == "thin")
    fatal: set[str] = {first.digest}

    def act(hand: int, job: Job) -> Answer:
        if job.digest in fatal or job.digest == always.digest:
            fatal.discard(job.digest)
            return Lost("killed by SIGKILL")
        return outcome(job)

    pool = Pretended(2, act)
    with pytest.raises(WorkerError, match=r"thin seed 0: its worker was lost 2 times, last time killed by SIGKILL$"):
        spread(tmp_path, pool)
    assert Store(tmp_path).digests() == set(EVERY) - {always.digest}
    assert len(pool.given) == len(EVERY) + 2


def test_a_unit_goes_on_behind_what_is_finished(tmp_path: Path) -> None:
    magnitude = next(p.job for p in PLAN if p.row.name == "magnitude")
    fatal = {magnitude.digest}

    def act(hand: int, job: Job) -> Answer:
        if job.digest in fatal:
            fatal.remove(job.digest)
            return Lost("gone")
        return outcome(job)

    pool = Pretended(1, act)
    told = spread(tmp_path, pool)
    assert told == ["magnitude seed 0: its worker was lost (gone), another one takes the job"]
    assert [job.digest for _, job in pool.given].count(magnitude.dense.digest) == 1, "that one was finished"
    assert Store(tmp_path).digests() == set(EVERY)


def test_errors_of_a_job_are_not_tried_again(tmp_path: Path) -> None:
    def act(hand: int, job: Job) -> Answer:
        if job.method == "thin":
            return Failed(StructureError("it will not do"))
        return Failed(WorkerError("TypeError: no"), "Traceback ...") if job.method == "dllp" else outcome(job)

    pool, told, book = Pretended(1, act), list[str](), Book(Store(tmp_path))
    Spread(units(PLAN), pool, book, told.append).run()
    with pytest.raises(StructureError, match=r"^thin seed 0: it will not do \(3 more failed\)$"):
        book.close()
    assert len(pool.given) == len(PLAN) and told == ["dllp seed 0: TypeError: no\nTraceback ..."]
    assert pool.started == 2, "nothing more is asked of a worker that broke down"


def test_workers_that_cannot_take_part(tmp_path: Path) -> None:
    pool = Pretended(2, lambda hand, job: Unfit(WorkerError("no data here")) if hand == 2 else outcome(job))
    assert spread(tmp_path / "some", pool) == ["no data here; the others went on without it"]
    assert Store(tmp_path / "some").digests() == set(EVERY) and pool.started == 2
    with pytest.raises(WorkerError, match=r"^no data here$"):
        spread(tmp_path / "none", Pretended(2, lambda hand, job: Unfit(WorkerError("no data here"))))
    assert not (tmp_path / "none").exists()


# ---- a worker


def test_a_worker_answers_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, job = Settings("digits", None, "float32", device="cpu"), replace(spreading.DENSE, epochs=1)

    def fail(error: Exception) -> Answer:
        def run(self: Runner, job: Job) -> Any:
            raise error

        monkeypatch.setattr(Runner, "run", run)
        return Worker(settings).answer(job)

    expected = fail(ConfigError("as said"))
    assert isinstance(expected, Failed) and not expected.broken and isinstance(expected.error, ConfigError)
    short = fail(MemoryError())
    assert isinstance(short, Failed) and short.broken and "out of memory" in str(short.error) and not short.trace
    bug = fail(KeyError("x"))
    assert isinstance(bug, Failed) and bug.broken and "Traceback" in bug.trace and "KeyError: 'x'" in str(bug.error)
    for wrong in ({"data": "nowhere"}, {"device": "cuda:99"}, {"version": "0"}):
        answer = Worker(replace(settings, **wrong)).answer(job)
        assert isinstance(answer, Unfit) and str(answer.error).startswith("the worker on "), wrong


# ---- where workers are

CUDA = Settings("digits", None, "bfloat16", device="cuda")


def test_processes_share_processor_and_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    pool = Processes(CUDA, 3)
    assert [pool.place(k).device for k in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert (pool.sharing, pool.settings.threads, pool.room(2), pool.room(3)) == (2, 2, True, False)
    assert (Processes(CUDA).count, Processes(CUDA).sharing) == (2, 1), "a worker for each device"
    one = Processes(replace(CUDA, device="cuda:1"), 2)
    assert {one.place(k).device for k in range(2)} == {"cuda:1"} and one.sharing == 2
    cpu = Processes(replace(CUDA, device="cpu"), 9)
    assert (cpu.sharing, cpu.settings.threads) == (9, 1)


def test_room_on_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="needs Ray: pip install -e '.[dev]'")
    nodes: list[dict[str, float]] = [{"CPU": 8, "GPU": 2}, {"CPU": 5}, {"memory": 1}]
    monkeypatch.setattr(cluster, "_nodes", lambda: nodes)
    assert (cluster.device("auto"), cluster.device("cpu")) == ("cuda", "cpu")
    gpus = cluster.Cluster(CUDA, cpus=2)
    assert gpus.room(1) and not gpus.room(2) and gpus.sharing == 1
    cpus = cluster.Cluster(replace(CUDA, device="cpu"), cpus=2)
    assert cpus.room(5) and not cpus.room(6) and cpus.sharing == 4 and cpus.settings.threads == 2
    assert not cluster.Cluster(CUDA, limit=1).room(1)
    nodes[:] = [{"CPU": 1}]
    assert cluster.device("auto") == "cpu"
    assert not gpus.room(0), "its nodes were lost a moment ago: others may come"
    gpus.deadline = 0
    assert not gpus.room(1), "somebody still works"
    with pytest.raises(WorkerError, match="no node of the Ray cluster has 2 CPU and 1 GPU"):
        gpus.room(0)
    with pytest.raises(WorkerError, match="has 1 CPU and 1 GPU"):
        cluster.Cluster(CUDA).room(0)


# ---- the command line


def test_mistakes_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(tables.TABLES, "small", spreading.SMALL)
    port = free_port()
    cases: list[tuple[list[str], str]] = [
        (["--jobs", "2"], "--jobs needs --launcher local or --launcher ray"),
        (["--launcher", "local", "--cpus", "2"], "--cpus needs --launcher ray"),
        (["--address", "here:1"], "--address needs --launcher ray"),
        (["--launcher", "local", "--jobs", "0"], "jobs = 0: at least 1"),
        (["--launcher", "slurm"], "expected local, ray"),
        (["--launcher", "ray", "--cpus", "-1"], "cpus = -1"),
        (["--launcher", "ray", "--address", f"127.0.0.1:{port}"], f"can be reached at 127.0.0.1:{port}"),
        (["--launcher", "ray", "--address", "nonsense"], "give HOST:PORT"),
    ]
    for words, text in cases:
        if "ray" in words and importlib.util.find_spec("ray") is None:
            continue
        assert main(["bench", "small", "--out", str(tmp_path / "out"), *words]) == 2, words
        one_line(capsys, text)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["bench", "small", "--out", str(tmp_path / "out"), "--launcher", "ray"]) == 2
    one_line(capsys, "--launcher ray needs Ray: pip install 'dllp[ray]'")
    assert not (tmp_path / "out").exists()
