"""Files that a user names for output: pipes, links and our own output are written into, and never replaced."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dllp import ArtifactError, files
from dllp.cli.main import main
from tests.support.commands import ENVIRONMENT, one_line
from tests.support.interrupted import examples, unfinished


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

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ArtifactError, match="file: No space left"):
        files.write_named(link, b"half")
    assert (elsewhere / "file").read_bytes() == b"there" and os.listdir(elsewhere) == ["file"]


def test_a_link_in_a_circle_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("link")
    with pytest.raises(ArtifactError, match=r"cannot write .*link: Too many levels"):
        files.write_named(tmp_path / "link", b"")
    assert (tmp_path / "link").is_symlink()


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


@pytest.mark.parametrize("command", ["evaluate", "analyze", "methods", "speed"])
def test_json_goes_into_a_pipe(command: str, run: Path, tmp_path: Path) -> None:
    words = {"methods": [], "speed": [str(run), "--batch", "1", "--seconds", "0.01"]}
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(pipe.read_bytes()), daemon=True)
    reader.start()
    assert main([command, *words.get(command, [str(run)]), "--json", str(pipe)]) == 0
    assert stat.S_ISFIFO(pipe.lstat().st_mode)
    reader.join(30)
    assert json.loads(found[0])
