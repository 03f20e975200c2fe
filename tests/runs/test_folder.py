"""Run folders are written whole or not at all, and never over anything else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import dllp
from dllp import ArtifactError, files
from dllp.runs.folder import RUN
from tests.support import short_runs


def test_a_failed_save_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result, calls, write = short_runs.pruned("channel", epochs=1), [], files.write_bytes

    def third(path: Path, content: bytes) -> None:
        calls.append(path)
        if len(calls) == 3:
            raise ArtifactError(f"cannot write {path}: full")
        write(path, content)

    monkeypatch.setattr(files, "write_bytes", third)
    with pytest.raises(ArtifactError, match="full"):
        result.save(tmp_path / "deep" / "run")
    assert len(calls) == 3 and not list(tmp_path.iterdir())


def test_save_refuses_a_folder_with_another_run(saved_run: tuple[dllp.Result, Path]) -> None:
    result, folder = saved_run
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ArtifactError, match="already holds a run"):
        result.save(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_save_replaces_a_run_when_asked_and_nothing_else(saved_run: tuple[dllp.Result, Path], tmp_path: Path) -> None:
    result, folder = saved_run
    old = Path(shutil.copytree(folder, tmp_path / "old"))
    (old / "extra.txt").write_text("part of the old run")
    assert result.save(old, overwrite=True) == old
    assert {path.name for path in old.iterdir()} == {path.name for path in folder.iterdir()}
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ArtifactError, match="holds other files"):
        result.save(tmp_path, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old", "thesis.tex"]


def test_the_longest_name_that_a_folder_can_have(saved_run: tuple[dllp.Result, Path], tmp_path: Path) -> None:
    folder = tmp_path / ("ä" * 127 + "a")
    assert (saved_run[0].save(folder) / RUN).is_file() and list(tmp_path.iterdir()) == [folder]
