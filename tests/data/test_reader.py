"""What a worker hands over: the same however many it works on at a time, and however late one looks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dllp.data import StreamBatches, reader, stream
from dllp.data.reader import Answer, Reader, Request
from dllp.data.resize import resize_all
from dllp.data.sources import of_classes
from tests.support import pictures


def request(count: int, *numbers: int) -> Request:
    draws = np.random.default_rng(3).random((count, 5))
    return Request(np.array(numbers or range(count)), draws, fill=True)


def equal(a: Answer, b: Answer) -> bool:
    return torch.equal(a.pixels, b.pixels) and all(np.array_equal(a[k], b[k]) for k in (1, 2, 3)) and a.bad == b.bad


@pytest.mark.parametrize("finish", [True, False])
@pytest.mark.parametrize("limit", ["TOGETHER", "TOGETHER_BYTES", "TOGETHER_PIXELS"])
def test_how_many_are_worked_on_together_changes_nothing(
    photographs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finish: bool, limit: str
) -> None:
    spoiled = pictures.folder(tmp_path / "set")
    for number in (3, 4, 11):
        (spoiled / "train" / "cat" / f"{number:03d}.jpg").write_bytes((b"", b"no image")[number % 2])
    sources = pictures.training(spoiled, 16).sources
    together = Reader(sources, 16, finish)[request(24)]
    monkeypatch.setattr(reader, limit, 1)
    assert equal(together, Reader(sources, 16, finish)[request(24)])
    assert together.numbers.tolist()[2:6] == [2, 5, 5, 5] and [number for number, _ in together.bad] == [3, 4, 4, 11]


@pytest.mark.parametrize("finish", [True, False])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_an_answer_stays_until_the_next_is_taken(photographs: Path, workers: int, finish: bool) -> None:
    def answers(workers: int) -> Iterator[Answer]:
        data = pictures.training(photographs, 16, workers=workers)
        return islice(stream.read(data, stream.Order(StreamBatches(data, 2, seed=0), 0, 0), finish), 16)

    known = [answer._replace(pixels=answer.pixels.clone()) for answer in answers(0)]
    for k, answer in enumerate(answers(workers)):
        time.sleep(0.01)  # long enough for workers to be as far ahead as they may
        assert equal(answer, known[k]), k


def test_what_a_gpu_resizes_is_what_a_core_does(photographs: Path) -> None:
    sources = pictures.training(photographs, 16).sources
    cut, finished = (Reader(sources, 16, finish)[request(24)] for finish in (False, True))
    assert cut.mirror.any() and not cut.mirror.all() and finished.pixels.shape == (24, 3, 16, 16)
    resized = resize_all(cut.pixels, torch.from_numpy(cut.extent), torch.from_numpy(cut.mirror), 16)
    assert int((resized.int() - finished.pixels.int()).abs().max()) <= 1


def test_nothing_to_resize() -> None:
    none = torch.zeros(0, 2).long(), torch.zeros(0).bool()
    assert resize_all(torch.zeros(0, dtype=torch.uint8), *none, 16).shape == (0, 3, 16, 16)


def test_larger_images_are_cut_as_small_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train" / "a").mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (120, 150, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "train" / "a" / "1.png")
    sources, _ = of_classes(tmp_path, "train")
    cut = Reader(sources, 64, False)[request(4, 0, 0, 0, 0)]
    monkeypatch.setattr("dllp.data.images.SMALL", 2**20)
    assert equal(cut, Reader(sources, 64, False)[request(4, 0, 0, 0, 0)])
