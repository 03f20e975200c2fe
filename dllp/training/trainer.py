"""The epochs of Algorithm 1 from wherever a run stands to its end, watched for numbers that break."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from dllp.devices import trees
from dllp.devices.cuda_graph import Capture
from dllp.method import stein
from dllp.method.update import score_of
from dllp.records import EpochRecord, Phase
from dllp.training import health
from dllp.training.moments import measure, scored
from dllp.training.state import RunState
from dllp.training.step import decide, prepare, step

COUNTED = 200
"""Epochs of a long run in which gates are counted, and up to twice as many: plenty for a picture. With the counts of
thousands, files would be too large to be read again."""
ENOUGH = 256
"""Examples whose statistics are as good as those of many: of a ResNet-14 16 were, or nearly."""
HELD = 2**28
"""Bytes of batches that are held until a check of health, to see which one broke: large ones are checked sooner."""

OnEpoch = Callable[[EpochRecord], None]
OnStep = Callable[[RunState], None]


class Batches(Protocol):
    """Data as training sees it: a fixed number of steps, and the batches of one epoch from a given step on."""

    steps: int

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[tuple[Any, Any]]: ...


def train(
    state: RunState, batches: Batches, *, on_epoch: OnEpoch | None = None, on_step: OnStep | None = None
) -> list[EpochRecord]:
    """Train from where the run stands to its end; returns the records of all epochs, earlier ones included.

    PyTorch's own generators (dropout) are seeded for the run and left as they were.
    """
    patience, capture = state.config.patience, captured_step(state)
    with deterministic_kernels(state.config.deterministic), _own_randomness(state):
        for epoch in range(state.step_index // state.steps_per_epoch, state.config.epochs):
            if patience and state.waited >= patience:
                break
            train_epoch(state, capture, epoch, batches, on_step)
            if on_epoch is not None:
                on_epoch(state.history[-1])
    if state.gating is not None and state.latents.keep is None:
        decide(state, _for_norms(state, batches))
    state.particles.finish()
    if not any(moment.name == "end" for moment in state.moments):
        measure(state, "end")
    return state.history


def _for_norms(state: RunState, batches: Batches) -> list[tuple[Any, Any]]:
    """Batches for the norms of networks that are decided at the end: no step comes that would mend them."""
    found, examples = [], 0
    for whole in batches.epoch(state.config.epochs - 1):
        x, y, state.share = state.place.shard(*whole)
        found.append((x, y))
        examples += trees.count(whole)
        if examples >= ENOUGH:
            break
    return found


def captured_step(state: RunState) -> Capture:
    """The step of a run, captured as a CUDA graph where that is possible."""
    c, cuda = state.config, state.particles.device.type == "cuda"
    return Capture(
        lambda x, y: step(state, x, y), state.latents.generator,
        enabled=c.engine != "eager" and cuda and state.place.alone, deterministic=c.deterministic,
    )  # fmt: skip


def train_epoch(state: RunState, capture: Capture, epoch: int, batches: Batches, on_step: OnStep | None) -> None:
    """Take the steps that an epoch still has, and record it."""
    began = time.perf_counter()
    for whole in batches.epoch(epoch, state.step_index % state.steps_per_epoch):
        x, y, state.share = state.place.shard(*whole)
        prepare(state, x, y)
        capture(x, y, key=f"{state.phase} taught" if state.taught else state.phase)
        state.recent.append((state.step_index, x, y))
        state.step_index += 1
        recent = state.recent
        if state.epoch_ends or len(recent) == recent.maxlen or len(recent) * trees.nbytes(x) > HELD:
            health.check(state)
        if state.epoch_ends:
            _close_epoch(state, _record(state, epoch, began, capture.state))
        if on_step is not None:
            on_step(state)


@contextmanager
def _own_randomness(state: RunState) -> Iterator[None]:
    device, known = state.particles.device, state.random_states
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(state.config.seed)
        if not state.place.alone:  # dropout must not be the same everywhere
            torch.manual_seed(hash((state.config.seed, state.place.everyone.index, state.step_index)))
        elif "random/cpu" in known:
            torch.set_rng_state(known["random/cpu"])
        if "random/cuda" in known and device.type == "cuda" and state.place.alone:
            torch.cuda.set_rng_state(known["random/cuda"], device)
        yield


def _close_epoch(state: RunState, record: EpochRecord) -> None:
    state.history.append(record)
    began_at = state.step_index - state.steps_per_epoch
    # discrete from its first step on: the loss of an epoch that was partly soft is no measure
    if state.phase == "discrete" and began_at / state.total_steps >= state.config.discrete_at:
        loss = sum(record.loss)
        state.best, state.waited = (loss, 0) if loss < state.best else (state.best, state.waited + 1)


def _record(state: RunState, epoch: int, began: float, engine: str) -> EpochRecord:
    means = state.place.rows.all_gather(state.statistics.T / state.steps_per_epoch)
    loss, hits = means.T.tolist()  # waits for the device: now the time is true
    state.statistics.zero_()
    counted = state.config.task != "regression" and state.objective.scored
    phase = state.phase_at(state.step_index - 1)
    return record(state, epoch + 1, phase, began, engine, loss, hits if counted else None)


def record(
    state: RunState, epoch: int, phase: Phase, began: float, engine: str, loss: list[float],
    accuracy: list[float] | None,
) -> EpochRecord:  # fmt: skip
    """Measurements at the end of an epoch, given its mean loss and accuracy on the training data."""
    seconds = time.perf_counter() - began
    gather, latents = state.place.rows.all_gather, state.latents
    held = scored(state) if state.validates else {}
    return EpochRecord(
        epoch=epoch,
        phase=phase,
        loss=loss,
        accuracy=accuracy,
        lr=state.lr,
        temperature=state.tau,
        budget=state.ramp,
        cost=gather(latents.cost()).tolist(),
        multiplier=gather(latents.multiplier).tolist(),
        undecided=gather(latents.undecided()).tolist(),
        noise=gather(latents.noise()).tolist(),
        seconds=seconds,
        engine=engine,
        gates=[] if epoch % max(1, state.config.epochs // COUNTED) else latents.counts(),
        discrepancy=discrepancy(state),
        validation_loss=held.get("nll"),
        validation_accuracy=held.get("accuracy"),
    )


@torch.no_grad()
def discrepancy(state: RunState) -> float | None:
    """Kernelized Stein discrepancy of the particles, by the scores that their last step had seen, over N.

    It is the norm of the direction phi (equation 14) in the kernel's space, the rate at which phi brings the
    particles nearer to the posterior. One batch estimates it, so that its noise is part of it, and it is not 0 for
    particles at rest: phi is 0 at them, not between them. None for one particle, for particles without gates, which
    do not interact, and where it is no finite number.
    """
    real, blocks = state.learnable, state.blocks  # padding is no dimension
    if state.gating is None or state.place.particles < 2 or not bool(real.any()):
        return None
    if isinstance(blocks, stein.BlockIndex):
        blocks = [count for part in real.cpu().split(blocks.lengths) if (count := int(part.sum()))]
    scores = score_of(state.particles.gradients, state.scores if state.gaussian else None, state.moving) * state.moving
    pairs = torch.stack([state.particles.rows[:, real], scores[:, real]], dim=1)
    rows, scores = state.place.rows.all_gather(pairs).unbind(1)
    square = stein.kernelized_discrepancy(
        rows, scores, num_data=state.num_data, bandwidth=state.config.bandwidth, blocks=blocks
    )
    value = float(square.clamp_min(0).sqrt()) / state.num_data
    return value if math.isfinite(value) else None


@contextmanager
def deterministic_kernels(wanted: bool) -> Iterator[None]:
    """Ask PyTorch for deterministic algorithms while a run lasts."""
    before = torch.are_deterministic_algorithms_enabled()
    lenient = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        torch.use_deterministic_algorithms(wanted or before, warn_only=lenient and not wanted)
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=lenient)
