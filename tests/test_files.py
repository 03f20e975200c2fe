"""Files are read under limits and written whole; links, pipes and code of strangers are refused, each by one line."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file

from dllp import data, files
from dllp.cli.main import main
from dllp.config import fits
from dllp.data import images as pictures_of
from dllp.errors import LONGEST, ArtifactError, ConfigError, DataError, DllpError
from dllp.records import EpochRecord, Size
from dllp.runs import settings
from dllp.runs.tensors import read_tensors
from paper.store import Store
from tests.support.commands import ENVIRONMENT, FAST, npy, one_line, settle
from tests.support.interrupted import examples, unfinished


def images(root: Path, size: tuple[int, int] = (8, 8)) -> Path:
    for part in ("train", "test"):
        for name in ("a", "b"):
            (root / part / name).mkdir(parents=True)
            Image.new("RGB", size).save(root / part / name / "one.png")
    return root


# ---- one line, whatever it quotes


def test_messages_are_one_printable_line() -> None:
    text = str(DllpError("a\nb\x1b[31m\u2028c\udcff" + "x" * 5000))
    assert text.isprintable() and text.startswith("a b\\x1b[31m c\\udcff") and len(text) == LONGEST


# ---- links, pipes, code


@pytest.mark.parametrize("name", ["run.json", "config.yaml", "particle-0.safetensors", "dense.safetensors"])
def test_a_link_out_of_a_run_folder_is_refused(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    os.rename(copied / name, tmp_path / "outside")
    (copied / name).symlink_to(tmp_path / "outside")
    assert main(["evaluate", str(copied)]) == 2
    one_line(capsys, name, "leads out of")
    (copied / name).unlink()
    os.rename(tmp_path / "outside", copied / "inside")
    (copied / name).symlink_to("inside")
    assert main(["evaluate", str(copied)]) == 0, "a link within the folder does no harm"


@pytest.mark.parametrize("name", ["checkpoints", "checkpoints/pruned"])
def test_checkpoints_are_never_written_or_removed_elsewhere(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "step-000000001.safetensors").touch()
    (copied / "run.json").unlink()
    (copied / name).parent.mkdir(exist_ok=True)
    (copied / name).symlink_to(outside)
    for words in (["--resume"], ["--overwrite"]):
        assert main(["prune", *words, "--out", str(copied)]) == 2
        one_line(capsys, name, "leads out of")
    assert (outside / "step-000000001.safetensors").exists()


def test_a_link_in_a_circle_is_refused(copied: Path) -> None:
    (copied / "gates.safetensors").unlink()
    (copied / "gates.safetensors").symlink_to("gates.safetensors")
    with pytest.raises(ArtifactError, match="gates"):
        read_tensors(copied / "gates.safetensors")


def test_links_out_of_a_data_folder_are_refused(tmp_path: Path) -> None:
    folder = npy(tmp_path / "arrays", np.zeros((4, 3), np.float32), np.arange(4) % 2)
    os.rename(folder / "test_x.npy", tmp_path / "test_x.npy")
    (folder / "test_x.npy").symlink_to(tmp_path / "test_x.npy")
    with pytest.raises(DataError, match=r"test_x\.npy is a link that leads out"):
        data.load(folder)
    pictures = images(tmp_path / "images")
    os.rename(pictures / "train" / "a", tmp_path / "a")
    (pictures / "train" / "a").symlink_to(tmp_path / "a")
    with pytest.raises(DataError, match=r"train/a is a link that leads out"):
        data.load(pictures)


def test_pipes_never_hang(copied: Path, tmp_path: Path) -> None:
    readers = {"pipe.safetensors": read_tensors, "pipe.json": files.read_json, "pipe.yaml": settings.read}
    for name, read in readers.items():
        os.mkfifo(copied / name)
        with pytest.raises(DllpError, match=rf"{name}: it is no regular file"):
            read(copied / name)
    pictures = images(tmp_path / "images")
    (pictures / "train" / "a" / "one.png").unlink()
    os.mkfifo(pictures / "train" / "a" / "one.png")
    with pytest.raises(DataError, match="no regular file"):
        data.load(pictures)


def test_code_is_imported_only_where_the_command_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settle(tmp_path, monkeypatch)
    (tmp_path / "stranger.py").write_text("open('ran', 'w').close()\nfrom dllp.zoo import build\n"
                                          "def net():\n    return build('small_cnn', 10, 1)\n")  # fmt: skip
    (tmp_path / "theirs.yaml").write_text("model: stranger:net\n")
    words = ["prune", "--config", "theirs.yaml", *FAST, "--no-dense", "--quiet", "--out", "run"]
    assert main(words) == 2
    one_line(capsys, "stranger:net", "--model", "--trust-imports")
    assert not (tmp_path / "ran").exists() and not (tmp_path / "run").exists()
    assert main([*words, "--trust-imports"]) == 0 and (tmp_path / "ran").exists()
    assert main([*words, "--model", "small_cnn", "--overwrite"]) == 0, "what is named on the command line wins"


def test_pillow_gets_only_the_formats_we_name(tmp_path: Path) -> None:
    pictures = images(tmp_path / "images")
    Image.new("RGB", (8, 8)).save(tmp_path / "a.eps")
    (pictures / "train" / "a" / "one.png").write_bytes((tmp_path / "a.eps").read_bytes())
    with pytest.raises(DataError, match=r"cannot read 1 of 2 images.*one\.png"):
        data.load(pictures)


def test_large_images_are_told_by_their_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = images(tmp_path / "images")
    monkeypatch.setattr(pictures_of, "MAX_PIXELS", 63)
    with pytest.raises(DataError, match="8x8: more than 63 pixels"):
        data.load(pictures)
    monkeypatch.undo()
    monkeypatch.setenv(files.CAP_VARIABLE, "300")
    with pytest.raises(DataError, match="2 images of 8x8 take more than the 300 bytes"):
        data.load(pictures)
    with pytest.raises(DataError, match="image_size = 100000"):
        data.load(pictures, image_size=100_000)


def test_class_folders_need_names_that_are_text(tmp_path: Path) -> None:
    pictures = images(tmp_path / "images")
    os.rename(pictures / "train" / "a", pictures / "train" / "a\x1b[0m")
    with pytest.raises(DataError, match="no text"):
        data.load(pictures)


# ---- limits


def test_the_cap_is_stated_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"a": torch.zeros(100)}, tmp_path / "a.safetensors")
    folder = npy(tmp_path / "arrays", np.zeros((4, 30), np.float32), np.arange(4) % 2)
    monkeypatch.setenv(files.CAP_VARIABLE, "399")
    with pytest.raises(ArtifactError, match="400 bytes of tensors, more than the 399"):
        read_tensors(tmp_path / "a.safetensors")
    with pytest.raises(DataError, match="480 bytes, more than the 399"):
        data.load(folder)
    monkeypatch.setenv(files.CAP_VARIABLE, "much")
    with pytest.raises(ConfigError, match="DLLP_MAX_BYTES = 'much'"):
        read_tensors(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"NaN", "NaN is not finite"),
        (b"[1e999]", "not finite"),
        (b"9" * 5000, "5000 digits"),
        (b'{"a": 1, "a": 2}', "twice"),
        (b"[" * 10**5, "nested too deeply"),
        (b"\xff", "not valid JSON"),
        (b"\xef\xbb\xbf{}", "not valid JSON"),
        (b" " * (files.JSON_BYTES + 1), "bytes"),
        (b"," * (files.JSON_VALUES + 1), "too large for JSON"),
    ],
)
def test_json_that_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ArtifactError, match=words) as caught:
        files.read_json(tmp_path / "a.json")
    assert "a.json" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("epochs: !!int 3", "line 1 has a tag"),
        ("lr: &a 0.1\nlr_end: *a", "an anchor or an alias"),
        ("epochs: " + "[" * 1500, "not plain YAML"),
        ("epochs: {a: 1}", "epochs = {.*expected a whole number"),
        ("lr: '[0.1, 0.2]'", "expected a number"),
        ("epochs: 0x" + "f" * 40, "epochs = "),
        ("epochs: 0x" + "f" * 400, "epochs = "),
        ("1: 2", "unknown name '1'"),
        ("lr: -1", "lr = -1"),
        ("model:", "model = None: expected text"),
        ("epochs: null", "epochs = None: expected a whole number"),
        ("epochs: 3" + " " * 2**16, "more than the 65536"),
    ],
)  # fmt: skip
def test_settings_that_are_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        settings.read(tmp_path / "a.yaml")
    assert "a.yaml" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data": 3}, "info: data must be an object"),
        ({"data": {"num_classes": 2**30}}, "a size"),
        ({"data": {"num_classes": 2**20}}, "reference-0"),
        ({"data": {"shape": "8x8"}}, "info: data.shape must be a list"),
        ({"data": {"mean": [None]}}, "info: data.mean must be a list"),
        ({"data": {"std": [0.0], "mean": [0.0]}}, "a std of 0"),
        ({"dense_noise": "much"}, "info: dense_noise must be a number"),
    ],
)
def test_descriptions_that_are_refused(
    copied: Path, capsys: pytest.CaptureFixture[str], change: dict[str, object], words: str
) -> None:
    values = json.loads((copied / "run.json").read_text())
    values["info"] |= change
    (copied / "run.json").write_text(json.dumps(values))
    assert main(["evaluate", str(copied)]) == 2
    one_line(capsys, str(copied), words)


def test_digests_never_name_a_path(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for digest in ("../../x", "a/b", "", "x" * 65):
        store.runs.write_text(json.dumps({"digest": digest, "seed": 0}) + "\n")
        with pytest.raises(ArtifactError, match="line 1 is damaged"):
            store.lines()


# ---- JSON by types

RECORD = EpochRecord(
    epoch=1, phase="soft", loss=[0.5], accuracy=None, lr=0.1, temperature=1, budget=0.5, cost=[1.0], multiplier=[0.0],
    undecided=[0.0], noise=[1.0], seconds=1.5, engine="eager", gates=[[1, 2]],
)  # fmt: skip


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda x: st.lists(x), max_leaves=5
    )
)
def test_whatever_fits_is_of_its_kind(value: Any) -> None:
    if fits(value, list[float]):
        assert isinstance(value, list) and all(type(v) in (int, float) for v in value)
    assert fits(value, bool) == isinstance(value, bool)
    assert fits(value, int) == (type(value) is int)
    assert fits(value, Any) and fits([value], list[Any]) and fits({"a": value}, dict[str, Any])


def test_dataclasses_are_made_of_objects() -> None:
    assert files.typed(EpochRecord, asdict(RECORD), "here") == RECORD
    assert files.typed(list[EpochRecord], [asdict(RECORD)] * 2, "here") == [RECORD] * 2
    assert files.typed(dict[str, Size], {"a": {"macs": 3, "params": 4}}, "here") == {"a": Size(3, 4)}


def test_what_a_dataclass_has_by_default_may_be_missing_and_more_may_be_there() -> None:
    values = asdict(RECORD) | {"training": "dense"}
    del values["gates"], values["discrepancy"]
    assert files.typed(EpochRecord, values, "here").gates == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"loss": [0.5, "x"]}, r"run\.json: \[1\]\.loss\[1\] must be a number$"),
        ({"loss": 3}, r"run\.json: \[1\]\.loss must be a list$"),
        ({"accuracy": True}, r"\[1\]\.accuracy must be a list$"),
        ({"phase": "<b>"}, r"\[1\]\.phase must be open, soft, discrete$"),
        ({"epoch": True}, r"\[1\]\.epoch must be a whole number$"),
        ({"engine": None}, r"\[1\]\.engine must be text$"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ArtifactError, match=words):
        files.typed(list[EpochRecord], [asdict(RECORD), asdict(RECORD) | change], "run.json")


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ArtifactError, match=r"^a\.json: params is missing$"):
        files.typed(Size, {"macs": 1.0}, "a.json")
    with pytest.raises(ArtifactError, match=r"^a\.json: the document must be an object$"):
        files.typed(Size, [], "a.json")
    with pytest.raises(ArtifactError, match=r"^a\.json: conv\.1\[0\] must be a whole number$"):
        files.typed(dict[str, list[int]], {"conv.1": [0.5]}, "a.json")


# ---- written whole or not at all


def full(*args: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_a_failed_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    files.write_json(tmp_path / "old.json", {"a": 1})
    monkeypatch.setattr(os, name, full)
    for file in ("new.json", "old.json"):
        with pytest.raises(ArtifactError, match=rf"cannot write .*{file}: No space left on device"):
            files.write_json(tmp_path / file, {"a": 2})
    assert os.listdir(tmp_path) == ["old.json"] and files.read_json(tmp_path / "old.json") == {"a": 1}


def test_a_file_where_a_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match="cannot write"):
        files.write_json(tmp_path / "file" / "run.json", {})


def test_values_that_json_cannot_hold(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        files.write_json(tmp_path / "nan.json", float("nan"))
    assert not list(tmp_path.iterdir())


# ---- files that a user names for output


def test_a_pipe_is_written_into(tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for path in (pipe, link):
        found: list[bytes] = []
        reader = threading.Thread(target=lambda found=found: found.append(pipe.read_bytes()), daemon=True)
        reader.start()
        files.write_json(path, {"a": 1}, named=True)
        reader.join(30)
        assert json.loads(found[0]) == {"a": 1}
    assert stat.S_ISFIFO(pipe.lstat().st_mode) and link.is_symlink() and len(list(tmp_path.iterdir())) == 2


def test_a_pipe_that_nobody_reads_any_more_is_one_line(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: os.close(os.open(pipe, os.O_RDONLY)), daemon=True)
    reader.start()
    with pytest.raises(ArtifactError, match=r"cannot write .*pipe: Broken pipe"):
        files.write_named(pipe, bytes(2**20))
    reader.join(30)


@pytest.mark.parametrize("buffered", ["", "1"])
def test_a_reader_that_leaves_early_is_no_error(buffered: str) -> None:
    command = [sys.executable, "-m", "dllp", "bench", "table1", "--list"]
    ours, theirs = os.pipe()
    os.close(ours)  # as `| head` has left when more is said than it wants
    environment = {**ENVIRONMENT, "PYTHONUNBUFFERED": buffered}
    left = subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    os.close(theirs)
    assert (left.returncode, left.stderr) == (141, "")


def test_the_file_behind_a_link_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere, link = tmp_path / "elsewhere", tmp_path / "here" / "link"
    elsewhere.mkdir()
    link.parent.mkdir()
    link.symlink_to(Path("..") / "elsewhere" / "file")
    for content in (b"dangling", b"there"):
        files.write_named(link, content)
        assert link.is_symlink() and (elsewhere / "file").read_bytes() == content
    assert os.listdir(elsewhere) == ["file"] and os.listdir(link.parent) == ["link"]
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ArtifactError, match="file: No space left"):
        files.write_named(link, b"half")
    assert (elsewhere / "file").read_bytes() == b"there" and os.listdir(elsewhere) == ["file"]


@pytest.mark.parametrize("path", ["", ".", "/"])
def test_a_folder_is_no_file(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", "--json", path]) == 2
    one_line(capsys, f"cannot write {path or '.'}: it is a folder; give a file")


def test_standard_output_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    """A shell's `> lines`: what is printed before and after has to stay; so has a pipe without a name."""
    lines, links = tmp_path / "lines", [tmp_path / "out", tmp_path / "err"]
    for number, link in enumerate(links, 1):
        link.symlink_to(f"/proc/self/fd/{number}")  # as /dev/stdout is one
    code = (
        "import pathlib, sys; from dllp import files; print('before');"
        "[files.write_json(pathlib.Path(name), {'a': 1}, named=True) for name in sys.argv[1:]]; print('after')"
    )
    with lines.open("wb") as file:
        arguments = [sys.executable, "-c", code, *map(str, links)]
        done = subprocess.run(arguments, stdout=file, stderr=subprocess.PIPE, env=ENVIRONMENT, check=True)
    assert lines.read_bytes() == b'before\n{\n "a": 1\n}\nafter\n' and done.stderr == b'{\n "a": 1\n}\n'
    assert all(link.is_symlink() for link in links)


# ---- what a stranger may have put into a run folder


def test_a_link_in_a_run_folder_is_replaced_and_not_followed(tmp_path: Path) -> None:
    mine, link = tmp_path / "mine", tmp_path / "run" / "speed.json"
    mine.write_text("years of work")
    link.parent.mkdir()
    link.symlink_to(mine)
    files.write_json(link, {})
    assert mine.read_text() == "years of work" and link.read_text() == "{}\n" and not link.is_symlink()


@pytest.mark.parametrize("name", ["log.jsonl", "evaluation.json", "checkpoints/pruned/step-000000005.safetensors"])
def test_a_resumed_run_writes_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    out = tmp_path / "out"
    unfinished(examples(tmp_path / "data"), out, monkeypatch)
    capsys.readouterr()
    (tmp_path / "mine").write_text("years of work")
    (out / name).unlink(missing_ok=True)
    (out / name).symlink_to(tmp_path / "mine")
    code = main(["prune", "--resume", "--quiet", "--out", str(out)])
    assert code == 0 or "leads out" in capsys.readouterr().err
    assert (tmp_path / "mine").read_text() == "years of work"


def test_corruptions_are_not_kept_through_a_link(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (copied / "corruptions.json").symlink_to(tmp_path / "mine")
    assert main(["evaluate", str(copied), "--corrupt", "sharpen"]) == 0
    one_line(capsys, "corruptions.json", "leads out", "the report will not show")
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize("command", ["evaluate", "analyze", "methods"])
def test_json_goes_into_a_pipe(command: str, run: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(pipe.read_bytes()), daemon=True)
    reader.start()
    words = [] if command == "methods" else [str(run)]
    assert main([command, *words, "--json", str(pipe)]) == 0
    assert stat.S_ISFIFO(pipe.lstat().st_mode)
    reader.join(30)
    assert json.loads(found[0])
