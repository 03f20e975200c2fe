"""Time of calls that take turns, so that all of them see the same machine."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from dllp.deploy.rows import Row, Subject

SAMPLE, FEWEST, MOST = 0.005, 7, 400
"""Seconds that one sample lasts at least, and the number of samples of each network."""
Call = Callable[[], Any]


def interleaved(calls: Sequence[Call], seconds: float, fewest: int | None = None) -> list[list[tuple[float, float]]]:
    """Seconds and CPU seconds of one call, many samples of each; they take turns, every other round backwards."""
    repeats = []
    for call in calls:
        call()
        start = time.perf_counter()
        call()
        repeats.append(max(1, round(SAMPLE / max(time.perf_counter() - start, 1e-9))))
    samples: list[list[tuple[float, float]]] = [[] for _ in calls]
    order = list(range(len(calls)))
    gc.collect()
    end = time.perf_counter() + seconds
    least = FEWEST if fewest is None else fewest
    while len(samples[0]) < least or (time.perf_counter() < end and len(samples[0]) < MOST):
        for i in order:
            start, work = time.perf_counter(), time.process_time()
            for _ in range(repeats[i]):
                calls[i]()
            passed, worked = time.perf_counter() - start, time.process_time() - work
            samples[i].append((passed / repeats[i], worked / repeats[i]))
        order.reverse()
    return samples


def summarise(subject: Subject, runtime: str, samples: list[tuple[float, float]], **rest: Any) -> Row:
    """Median and quartiles of a network's samples."""
    passed, worked = np.asarray(samples).T
    low, median, high = (float(v) for v in np.quantile(passed, (0.25, 0.5, 0.75)))
    times = dict(median=median, low=low, high=high, cpu=float(np.median(worked)))
    return Row(subject.name, runtime, samples=len(samples), macs=subject.macs, **times, **rest)


@contextmanager
def limited(count: int) -> Iterator[None]:
    """So many threads for PyTorch, and what it had before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
