"""The state of a run: its networks, what is learned beside their weights, and how far it is.

A run has three phases. `open`: every gate is 1 and the networks train as dense ones. `soft`: gates are relaxed and
their logits follow the objective and the budget's multiplier. `discrete`: the gates are decided, channel-gated networks
are sliced, and the same run goes on in the small shape.

Steps, snapshots, health checks and other methods of pruning are functions of this state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dllp.config import Config
from dllp.devices.mesh import Mirror, Place
from dllp.method import stein
from dllp.method.update import compiled_update, update_rows
from dllp.records import EpochRecord, Moment, Phase
from dllp.training.forward import Forward
from dllp.training.gating import ChannelGating, WeightGating
from dllp.training.latents import Latents
from dllp.training.objective import Objective
from dllp.training.particles import Particles
from dllp.training.teacher import Teacher

HEALTH_CHECK = 16
"""Steps between two looks at a CUDA device's health; a broken step changes no weight, so nothing is lost by waiting."""


class RunState:
    """n particles on their way.

    Args:
        particles: The networks; `gating` None trains them as they are (the dense reference).
        config: A resolved configuration.
        num_data: N, the labels of the training set, or the numbers that a regression observes.
        steps_per_epoch: With `config.epochs` it fixes what progress in [0, 1] means.
        place: Which of all particles these are, and which part of a batch they see; by default everything.
        teacher: The network that teaches, where `config.teacher` is `given`.
        objective: The task loss; by default that of pairs (inputs, labels).
    """

    def __init__(
        self, particles: Particles, gating: ChannelGating | WeightGating | None, config: Config, *,
        num_data: int, steps_per_epoch: int, place: Place | None = None, teacher: Teacher | None = None,
        objective: Objective | None = None,
    ) -> None:  # fmt: skip
        rows, device = particles.rows, particles.device
        # what the run is made of
        self.particles, self.gating, self.config = particles, gating, config
        self.place = place or Place(len(particles))
        self.teacher, self.objective = teacher, objective or Objective(config)
        self.num_data, self.steps_per_epoch = num_data, steps_per_epoch
        self.total_steps = steps_per_epoch * config.epochs
        self.validation: Callable[[], Iterator[tuple[Any, Any]]] | None = None  # measured on, never learned from
        self.metrics: Callable[[nn.Module, Any], Mapping[str, Any]] | None = None  # of a network on such a batch
        self.penalty: Callable[[Tensor], Tensor] | None = (
            None  # (n, P) rows -> gradient of another method's regulariser
        )
        # masks of P or n P are kept in bytes: they are read in every step beside the weights themselves
        self.learnable = particles.layout.learnable(particles.networks[0]).to(device)  # (P,)
        lengths = {"module": particles.layout.blocks, "all": None, "coordinate": "coordinate"}[config.blocks]
        lengths = lengths if gating is not None else None  # particles without gates do not interact
        self.blocks = stein.block_index(lengths, device) if isinstance(lengths, list) else lengths
        # what a snapshot holds, beside the rows of the particles
        self.latents = Latents(gating, config, rows, num_data, self.place)
        self.momentum = torch.zeros_like(rows)
        self.statistics = torch.zeros(2, len(rows), device=device, dtype=torch.float64)  # sums of loss and of hits
        self.step_index, self.lr_scale = 0, 1.0
        self.history: list[EpochRecord] = []
        self.moments: list[Moment] = []
        self.best, self.waited = float("inf"), 0  # of the loss since the gates are discrete, for `patience`
        self.random_states: dict[str, Tensor] = {}  # of PyTorch's own generators, where a run is resumed
        # what the decision changes
        self.moving = self.learnable.expand(len(rows), -1)  # (n, P): False where a weight stands still
        self.decayed = self.latents.shrinkage(rows)
        # what one step leaves for the next, or for its readers
        self.gaussian = config.likelihood == "gaussian"
        self.scores = torch.zeros_like(rows if self.gaussian else rows[:, :0])
        self.knobs = rows.new_zeros(3)  # lr, temperature, ramp: read inside captured steps
        self.lr = self.tau = self.ramp = 0.0  # the same for the host
        self.healthy = torch.ones((), dtype=torch.bool, device=device)
        self.share = 1.0  # the batch's part that this process sees
        self.mirror: Mirror | None = None  # of other processes' particles, once the gates are discrete
        self.recent: deque[tuple[int, Any, Any]] = deque(maxlen=HEALTH_CHECK if device.type == "cuda" else 1)
        self.trouble = ""  # what made the run go back to where it starts now
        # how it is computed
        self.forward = Forward(particles, gating, config)
        # its inputs never change shape, so it is compiled once
        self.update = compiled_update() if device.type == "cuda" else update_rows

    @property
    def progress(self) -> float:
        return self.step_index / self.total_steps

    @property
    def phase(self) -> Phase:
        return self.phase_at(self.step_index)

    def phase_at(self, step: int) -> Phase:
        """The phase of a step before the gates are decided; once they are, it is discrete."""
        if self.latents.keep is not None:
            return "discrete"
        return "open" if self.gating is None or step / self.total_steps < self.config.open_until else "soft"

    @property
    def taught(self) -> bool:
        """True where a teacher takes part in the step that comes; one particle's own mean teaches nothing."""
        present = self.teacher is not None or (self.config.teacher == "posterior" and self.place.particles > 1)
        return present and self.progress >= self.config.teacher_from

    @property
    def epoch_ends(self) -> bool:
        """True where the last step closed an epoch."""
        return self.step_index % self.steps_per_epoch == 0

    def hold(self, moving: Tensor) -> None:
        """Let only coordinates that are True in `moving`, (P,) or (n, P), learn from here on."""
        self.moving = (moving & self.learnable).expand(len(self.particles), -1)
