"""Table 3: its rows, and the same rows of a small network on a folder of pictures, in memory and streamed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dllp import data as datasets
from dllp.cli.main import main
from dllp.data import ArrayData, StreamedData
from dllp.errors import ArtifactError
from dllp.runs.launch import finish
from paper import __main__ as module
from paper import tables
from paper.jobs import Job, Runner, Splits
from paper.launch import Book, Settings, seen_data
from paper.store import CLEAN, Store
from paper.summary import open_store
from paper.tables import Quoted, Table, Variant
from tests.support import pictures
from tests.support.commands import ENVIRONMENT, one_line

SIDE = 20


def pictured(root: Path, count: int = 10, side: int = SIDE) -> Path:
    """train/<class>/ and val/<class>/ with pictures of one size."""
    random = np.random.default_rng(0)
    for part, number in (("train", count), ("val", 4)):
        for k, name in enumerate(("cat", "dog")):
            (root / part / name).mkdir(parents=True)
            for i in range(number):
                content = pictures.jpeg(random, (side, side), bright=100 * k)
                (root / part / name / f"{i}.jpg").write_bytes(content)
    return root


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pictured(tmp_path_factory.mktemp("pictures") / "animals")


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Table:
    """Table 3 with a small network."""
    made = tables.TABLES["table3"]
    rows = tuple(replace(row, job=replace(row.job, network="small_cnn"), seeds=(0,)) for row in made.rows)
    quoted = tuple(replace(row, network="small_cnn") for row in made.quoted)
    small = replace(made, name="small3", rows=rows, quoted=quoted)
    monkeypatch.setitem(tables.TABLES, "small3", small)
    return small


def test_every_row_stands_with_its_seeds_and_targets() -> None:
    table = tables.TABLES["table3"]
    jobs = {row.name: row.job for row in table.rows}
    own = ["dllp-channel-65.95", "given-channel-65.95", "given-both-65.95"]
    others = [f"tuned-{name}-65.95" for name in ("l1-filters", "slimming", "dcp", "ccp")]
    assert list(jobs) == ["dense", *own, *others]
    assert [job.keep for job in jobs.values()] == [1.0] + [0.3405] * 7
    assert [row.seeds for row in table.rows] == [(0, 1, 2)] * 4 + [(0,)] * 4
    assert [job.finetune for job in jobs.values()] == [0, 0, 0, 0, 30, 30, 30, 30]
    assert [job.epochs for job in jobs.values()] == [60, 60, 90, 90, 60, 60, 60, 60]
    for job in jobs.values():
        assert (job.network, job.config.batch_size, job.augment) == ("resnet50", 512, "resized-crop")
    assert jobs["dllp-channel-65.95"].config.particles == 2
    assert not any(row.predictions != "none" for row in table.rows)
    wanted = {row.name: row.wanted for row in table.rows if row.wanted}
    assert wanted == dict(
        zip(own, [(("drop", 1.5), ("gain", 0.0)), *[(("drop", 0.0), ("gain", 1.5))] * 2], strict=True)
    )
    assert {row.method: (row.dense_acc, row.flops_removed, row.drop) for row in table.quoted} == {
        "NS": (76.15, 53, 1.27), "SSS": (76.12, 43, 4.30), "DCP": (76.01, 56, 1.06), "CCP": (76.15, 54, 0.94),
        "SFP": (76.15, 62.14, 14.01), "DLLP": (76.15, 65.95, 6.13),
    }  # fmt: skip
    assert table.quoted[0] == Quoted("NS", "resnet50", 76.15, 53, 1.27)


def test_a_digest_tells_augmentations_apart() -> None:
    job = Job("resnet50", "dense")
    assert replace(job, augment="resized-crop").digest != job.digest != replace(job, augment="none").digest
    assert replace(job, augment="none").dense.augment == "none", "a network that is cut was trained alike"


def test_the_whole_table_on_pictures_in_memory(
    table: Table, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bench", "small3", "--data", str(folder), "--epochs", "2", "--out", str(tmp_path), "--device", "cpu"]
    assert main([*words, "--quiet"]) == 0
    store = Store(tmp_path / "small3-epochs2")
    lines = {line["row"]: line for line in store.lines()}
    assert set(lines) == {row.name for row in table.rows}
    for name, line in lines.items():
        assert line["data"] == {"name": "animals", "train": 20, "classes": 2, "shape": [3, SIDE, SIDE]}
        assert line["augment"] == "resized-crop"
        if name != "dense":
            assert min(line["flops_removed"]) >= 0.6595, name
    assert len(lines["dllp-channel-65.95"]["particles"]) == 2 and "before" in lines["tuned-slimming-65.95"]
    assert not (store.folder / "probabilities").exists()
    text = (store.folder / "table.md").read_text()
    assert f"Measured on animals: 20 training examples of {SIDE}x{SIDE} in 2 classes." in text
    assert "*SFP, quoted from the paper*" in text and "on ImageNet at 224x224" in text
    assert "`dllp bench small3 --data FOLDER" in text
    assert text.count(", 1 epochs of fine-tuning (before it ") == 3, "as many as the runs had, not the table's 30"
    assert json.loads((store.folder / "summary.json").read_text())["data"].startswith("animals: 20 ")
    assert main([*words[:2], *words[4:], "--list"]) == 0, "what is finished can be listed without the data"
    assert "8 of 8 jobs are finished" in capsys.readouterr().out


def test_streamed_pictures_and_a_validation_split(
    table: Table, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets, "IN_MEMORY", 1000)
    words = ["bench", "small3", "--data", str(folder), "--image-size", "16", "--workers", "0", "--validation", "6"]
    rows = ["--rows", "dense", "dllp-*", "--epochs", "1", "--out", str(tmp_path), "--device", "cpu", "--quiet"]
    assert main([*words, *rows]) == 0
    lines = Store(tmp_path / "small3-validation6-epochs1").lines()
    assert [line["row"] for line in lines] == ["dense", "dllp-channel-65.95"]
    for line in lines:
        assert line["data"]["shape"] == [3, 16, 16] and line["evaluated_on"] == "validation"


def test_workers_of_a_launcher_read_with_workers_of_their_own(table: Table, folder: Path, tmp_path: Path) -> None:
    data = pictures.shards(tmp_path / "shards", folder)
    words = ["--data", str(data), "--image-size", "16", "--workers", "1", "--epochs", "1", "--device", "cpu", "--quiet"]
    places = ["--launcher", "local", "--jobs", "1", "--rows", "dense", "--out", str(tmp_path)]
    assert main(["bench", "small3", *words, *places]) == 0
    assert [line["row"] for line in Store(tmp_path / "small3-epochs1").lines()] == ["dense"]


def test_bad_pictures_are_said(table: Table, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = shutil.copytree(folder, tmp_path / "data")
    bad = data / "train" / "cat" / "3.jpg"
    bad.write_bytes(b"")
    words = ["bench", "small3", "--data", str(data), "--rows", "dense", "--epochs", "1", "--device", "cpu"]
    for command, out in ((main, "a"), (lambda words: module.main(words[1:]), "b")):
        assert command([*words, "--max-bad", "10%", "--out", str(tmp_path / out)]) == 0
        warning = f"dllp: warning: {bad} is left out, 1 of 20 images so far: it is empty\n"
        assert warning in capsys.readouterr().err
    assert main([*words, "--max-bad", "10%", "--out", str(tmp_path / "c"), "--quiet"]) == 0
    assert not capsys.readouterr().err
    assert main([*words, "--out", str(tmp_path / "d")]) == 2
    assert f"cannot read 1 of 20 images, more than max_bad = 0.1% allows: replace or remove the image {bad}" in (
        capsys.readouterr().err
    )
    settings = Settings(str(data), None, "float32", device="cpu", loading={"max_bad": "10%"})
    known, quiet = replace(settings, reported=(str(bad),)), replace(settings, quiet=True)
    for own, lines in ((settings, 1), (known, 0), (quiet, 0)):
        own.prepare()
        assert capsys.readouterr().err.count("is left out") == lines


@pytest.mark.parametrize("streamed", [False, True])
def test_splits(folder: Path, monkeypatch: pytest.MonkeyPatch, streamed: bool) -> None:
    if streamed:
        monkeypatch.setattr(datasets, "IN_MEMORY", 1000)
    loaded = datasets.load(folder, image_size=16, workers=0)
    splits, job = Splits(loaded), Job("small_cnn", "dense", augment="resized-crop")
    train, versions = splits.of(job)
    assert isinstance(train, StreamedData if streamed else ArrayData) and train.augment == "resized-crop"
    assert versions[CLEAN] is loaded.test and (set(versions) == {CLEAN}) == streamed
    part, held = splits.of(replace(job, validation=6))
    assert (len(part), len(held[CLEAN])) == (14, 6) and held[CLEAN].augment == "none"
    assert held[CLEAN].y.tolist() == [0] * 3 + [1] * 3
    again = splits.of(replace(job, validation=6, seed=5))[1][CLEAN]
    assert (again.x == held[CLEAN].x).all(), "the same for every seed"


def test_runs_on_other_data_are_refused(table: Table, folder: Path, tmp_path: Path) -> None:
    out, variant = tmp_path / "out", Variant(epochs=1)
    store, plan = open_store(out, table, variant), table.plan(["dense"], [0, 1], variant)
    other = datasets.load(pictured(tmp_path / "other", count=8))
    finish(plan[:1], Book(store), Runner(other, device="cpu").run)
    with pytest.raises(ArtifactError, match=r"other data \(other: 16 training .* than animals: 20 .*another --out"):
        Runner(datasets.load(folder)).splits.check(seen_data(store))
    assert len(store.lines()) == 1


def test_mistakes_are_one_line(
    table: Table, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets, "IN_MEMORY", 1000)
    for words, text in (
        (["table3"], "table3 needs --data FOLDER"),
        (["table1", "--data", str(folder)], "table1 is measured on cifar10: leave out --data"),
        (["table3", "--data", str(tmp_path / "nowhere")], "no data set and no folder"),
        (["small3", "--data", str(folder)], "give their image_size"),
    ):
        assert main(["bench", *words, "--out", str(tmp_path / "out")]) == 2, words
        one_line(capsys, text)
    assert not (tmp_path / "out").exists()


def test_pictures_in_memory_need_no_packages_but_numpy_pillow_and_torch(folder: Path) -> None:
    others = ("torchdata", "torchvision", "rich", "yaml", "sklearn", "scipy")
    hidden = "; ".join(f"sys.modules[{name!r}] = None" for name in others)
    script = f"import sys; {hidden}; from dllp.data import load; print(len(load({str(folder)!r}).train))"
    done = subprocess.run([sys.executable, "-c", script], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert done.stdout == "20\n"


def test_nothing_is_predicted_that_nobody_keeps(
    folder: Path, table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Corrupting the test set, and predicting on all of it, takes longer than an epoch."""
    evaluated, of = [], Splits.of

    def watched(self: Splits, job: Job):
        evaluated.append(of(self, job)[1])
        return of(self, job)

    monkeypatch.setattr(Splits, "of", watched)
    words = ["--data", str(folder), "--epochs", "1", "--device", "cpu", "--quiet", "--out", str(tmp_path)]
    assert main(["bench", "small3", "--rows", "dense", *words]) == 0
    assert [list(versions) for versions in evaluated] == [[CLEAN]]
    kept = replace(table, rows=(replace(table.rows[0], predictions="kept"),))
    monkeypatch.setitem(tables.TABLES, "small3", kept)
    assert main(["bench", "small3", *words, "--seeds", "1"]) == 0
    assert "gaussian-blur:1" in evaluated[-1]


@pytest.mark.slow
def test_the_real_network(tmp_path: Path) -> None:
    """ResNet-50 on a few pictures, one epoch: every row of the table reaches its budget."""
    data = datasets.load(pictured(tmp_path / "pictures", count=8, side=32))
    table, variant = tables.TABLES["table3"], Variant(epochs=1)
    store = open_store(tmp_path, table, variant)
    finish(table.plan((), [0], variant), Book(store), Runner(data, device="cpu").run)
    found = {line["row"]: min(line["flops_removed"]) for line in store.lines()}
    assert len(found) == sum(not row.job.pretrain for row in table.rows)  # one epoch is too few for both parts
    assert all(removed >= 0.6595 for name, removed in found.items() if name != "dense")
