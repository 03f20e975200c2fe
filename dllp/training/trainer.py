"""A run: the epochs of Algorithm 1 from wherever it stands to its end, watched for numbers that break."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from dllp.config import SPIKE_AND_SLAB, Config
from dllp.devices.cuda_graph import Capture
from dllp.devices.mesh import Place
from dllp.errors import NumericsError
from dllp.method import stein
from dllp.method.update import score_of
from dllp.records import EpochRecord
from dllp.training import health
from dllp.training.gating import ChannelGating, WeightGating
from dllp.training.particles import Particles
from dllp.training.step import Step

HEALTH_CHECK = 16
"""Steps between two looks at a CUDA device's health; a broken step changes no weight, so nothing is lost by waiting."""
COUNTED = 200
"""Epochs of a long run in which gates are counted, and up to twice as many: plenty for a picture. With the counts of
thousands, files would be too large to be read again."""
HELD = 2**28
"""Bytes of batches that are held until then, to see which one broke: large ones are looked at sooner."""


class Batches(Protocol):
    """Data as training sees it: a fixed number of steps, and the batches of one epoch from a given step on."""

    steps: int

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[tuple[Tensor, Tensor]]: ...


class Trainer(Step):
    """Takes the steps of a run and keeps its records; the arguments are those of :class:`Step`."""

    def __init__(
        self, particles: Particles, gating: ChannelGating | WeightGating | None, config: Config, *,
        num_data: int, steps_per_epoch: int, place: Place | None = None,
    ) -> None:  # fmt: skip
        total = steps_per_epoch * config.epochs
        super().__init__(particles, gating, config, num_data=num_data, total_steps=total, place=place)
        self.steps_per_epoch = steps_per_epoch
        self.trouble = ""  # what made the run go back to where it starts now
        self.history: list[EpochRecord] = []
        self.best, self.waited = float("inf"), 0  # of the loss since the gates are discrete, for `patience`
        self.random_states: dict[str, Tensor] = {}  # of PyTorch's own generators, where a run is resumed
        cuda = particles.device.type == "cuda"
        self.recent: deque[tuple[int, Tensor, Tensor]] = deque(maxlen=HEALTH_CHECK if cuda else 1)
        self.capture = Capture(
            self.step, self.belief.generator, enabled=config.engine != "eager" and cuda and self.place.alone,
            deterministic=config.deterministic,
        )  # fmt: skip

    @property
    def epoch_ends(self) -> bool:
        """Whether the last step closed an epoch."""
        return self.step_index % self.steps_per_epoch == 0

    def run(
        self, batches: Batches, *, on_epoch: Callable[[EpochRecord], None] | None = None,
        on_step: Callable[[Trainer], None] | None = None,
    ) -> list[EpochRecord]:  # fmt: skip
        """Train from where the run stands to its end; returns the records of all epochs, earlier ones included.

        PyTorch's own generators (dropout) are seeded for the run and left as they were.
        """
        with deterministic_kernels(self.config.deterministic), self._own_randomness():
            for epoch in range(self.step_index // self.steps_per_epoch, self.config.epochs):
                if self.config.patience and self.waited >= self.config.patience:
                    break
                self._epoch(epoch, batches, on_step)
                if on_epoch is not None:
                    on_epoch(self.history[-1])
        if self.gating is not None and self.belief.keep is None:
            self.discretise(self.gating)
        self.particles.finish()
        return self.history

    @contextmanager
    def _own_randomness(self) -> Iterator[None]:
        device = self.particles.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(self.config.seed)
            if not self.place.alone:  # dropout must not be the same everywhere
                torch.manual_seed(hash((self.config.seed, self.place.everyone.index, self.step_index)))
            elif "random/cpu" in self.random_states:
                torch.set_rng_state(self.random_states["random/cpu"])
            if "random/cuda" in self.random_states and device.type == "cuda" and self.place.alone:
                torch.cuda.set_rng_state(self.random_states["random/cuda"], device)
            yield

    def _epoch(self, epoch: int, batches: Batches, on_step: Callable[[Trainer], None] | None) -> None:
        began = time.perf_counter()
        for whole in batches.epoch(epoch, self.step_index % self.steps_per_epoch):
            x, y, self.share = self.place.shard(*whole)
            self.prepare(x)
            self.capture(x, y, key=self.phase)
            self.recent.append((self.step_index, x, y))
            self.step_index += 1
            if self.epoch_ends or len(self.recent) == self.recent.maxlen or len(self.recent) * x.nbytes > HELD:
                self.check_health()
            if self.epoch_ends:
                self._close_epoch(epoch, began)
            if on_step is not None:
                on_step(self)

    def _close_epoch(self, epoch: int, began: float) -> None:
        self.history.append(self._record(epoch, began))
        began_at = self.step_index - self.steps_per_epoch
        # discrete from its first step on: the loss of an epoch that was partly soft is no measure
        if self.phase == "discrete" and began_at / self.total_steps >= self.config.discrete_at:
            loss = sum(self.history[-1].loss)
            self.best, self.waited = (loss, 0) if loss < self.best else (self.best, self.waited + 1)

    def check_health(self) -> None:
        """Raise if a number broke in a recent step: the step is run once more to see which.

        That moves no weight; statistics of batch norms and what is learned beside the weights may move, in a run that
        ends here or goes back to its last checkpoint.
        """
        if not bool(self.healthy):
            for step, x, y in self.recent:
                data = health.in_data(self, x, y)
                trouble = data or health.diagnose(self, x, y)
                if trouble:
                    raise self.broken(trouble, step + 1, in_data=bool(data))
            raise self.broken("NaN or infinity", self.step_index)
        self.recent.clear()

    def broken(self, trouble: str, step: int, *, in_data: bool = False) -> NumericsError:
        """The error that names what broke, when, and the way out."""
        other = ", or use on_nan = rollback" if self.config.on_nan == "stop" else ""
        plain = self.gating is None or self.config.prior == SPIKE_AND_SLAB
        wider = "" if plain else f", raise prior_scale (now {self.config.prior_scale:g})"
        error = NumericsError(
            f"{trouble} at step {step} (epoch {(step - 1) // self.steps_per_epoch + 1}): lower lr "
            f"(now {self.config.lr * self.lr_scale:g}){wider}{other}"
        )
        error.told, error.in_data = not self.place.first, in_data
        return error

    def apply_decisions(self, gating: ChannelGating | WeightGating, keep: Tensor) -> None:
        """As in a step; captured graphs belong to the networks as they were."""
        super().apply_decisions(gating, keep)
        self.capture.reset()

    def _record(self, epoch: int, began: float) -> EpochRecord:
        join = self.place.rows.join
        means = join(self.statistics.T / self.steps_per_epoch)
        loss, hits = means.T.tolist()  # waits for the device: now the time is true
        seconds = time.perf_counter() - began
        self.statistics.zero_()
        return EpochRecord(
            epoch=epoch + 1,
            phase=self.phase_at(self.step_index - 1),
            loss=loss,
            accuracy=hits if self.config.task == "classification" else None,
            lr=self.lr,
            temperature=self.tau,
            budget=self.ramp,
            cost=join(self.belief.cost()).tolist(),
            multiplier=join(self.belief.multiplier).tolist(),
            undecided=join(self.belief.undecided()).tolist(),
            noise=join(self.belief.noise()).tolist(),
            seconds=seconds,
            engine=self.capture.state,
            gates=[] if (epoch + 1) % max(1, self.config.epochs // COUNTED) else self.belief.counts(),
            discrepancy=self.discrepancy(),
        )

    @torch.no_grad()
    def discrepancy(self) -> float | None:
        """Kernelized Stein discrepancy of the particles, by the scores that their last step had seen, over N.

        It is the norm of the direction phi (equation 14) in the kernel's space, the rate at which phi brings the
        particles nearer to the posterior. One batch estimates it, so that its noise is part of it, and it is not 0 for
        particles at rest: phi is 0 at them, not between them. None for one particle, for particles without gates, which
        do not interact, and where it is no finite number.
        """
        real, blocks = self.learnable, self.blocks  # padding is no dimension
        if self.gating is None or self.place.particles < 2 or not bool(real.any()):
            return None
        if isinstance(blocks, stein.BlockIndex):
            blocks = [count for part in real.cpu().split(blocks.lengths) if (count := int(part.sum()))]
        scores = score_of(self.particles.gradients, self.scores if self.gaussian else None, self.moving) * self.moving
        pairs = torch.stack([self.particles.rows[:, real], scores[:, real]], dim=1)
        rows, scores = self.place.rows.join(pairs).unbind(1)
        square = stein.kernelized_discrepancy(
            rows, scores, num_data=self.num_data, bandwidth=self.config.bandwidth, blocks=blocks, unbiased=False
        )
        value = float(square.clamp_min(0).sqrt()) / self.num_data
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
