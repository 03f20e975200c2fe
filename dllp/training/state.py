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
from dllp.errors import ConfigError
from dllp.method import stein
from dllp.method.update import ADAM_BETA2, adamw_rows, compiled, drive_rows, in_strips, shrink_rows, update_rows
from dllp.records import EpochRecord, Moment, Phase
from dllp.training.forward import Forward
from dllp.training.gating import ChannelGating, WeightGating
from dllp.training.latents import Latents
from dllp.training.loss_scale import LossScale
from dllp.training.objective import Metrics, Objective
from dllp.training.particles import Particles
from dllp.training.teacher import Teacher

HEALTH_CHECK = 16
"""Steps between two looks at a CUDA device's health; a broken step changes no weight, so nothing is lost by waiting."""


FACTORS = ("lr", "weight_decay")
Groups = Callable[[str, nn.Parameter], Mapping[str, float]]
"""(name, parameter) -> factors of `lr` and `weight_decay`, 1 where they are left out."""


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
        groups: Factors of learning rate and weight decay for some parameters; by default both are the same for all.
        total_steps: By default those of all epochs.
        gaussian: False where equation 9 has no residuals: the likelihood is then the loss, whatever `config` says.
    """

    def __init__(
        self, particles: Particles, gating: ChannelGating | WeightGating | None, config: Config, *,
        num_data: int, steps_per_epoch: int, place: Place | None = None, teacher: Teacher | None = None,
        objective: Objective | None = None, groups: Groups | None = None, total_steps: int | None = None,
        gaussian: bool = True,
    ) -> None:  # fmt: skip
        rows, device = particles.rows, particles.device
        # what the run is made of
        self.particles, self.gating, self.config = particles, gating, config
        self.place = place or Place(len(particles))
        self.teacher, self.objective = teacher, objective or Objective(config)
        self.num_data, self.steps_per_epoch = num_data, steps_per_epoch
        self.total_steps = steps_per_epoch * config.epochs if total_steps is None else total_steps
        self.validation: Callable[[], Iterator[tuple[Any, Any]]] | None = None  # measured on, never learned from
        self.metrics: Metrics | None = None  # of a network on such a batch
        self.validates = False  # at the end of each epoch, too
        self.penalty: Callable[[Tensor], Tensor] | None = None  # (n, P) -> gradient of another method's regulariser
        # masks of P or n P are kept in bytes: they are read in every step beside the weights themselves
        self.learnable = particles.layout.learnable(particles.networks[0]).to(device)  # (P,)
        lengths = {"module": particles.layout.blocks, "all": None, "coordinate": "coordinate"}[config.blocks]
        lengths = lengths if gating is not None else None  # particles without gates do not interact
        self.blocks = stein.block_index(lengths, device) if isinstance(lengths, list) else lengths
        # what a snapshot holds, beside the rows of the particles
        self.latents = Latents(gating, config, rows, num_data, self.place)
        self.momentum = torch.zeros_like(rows)
        self.second = torch.zeros_like(rows if config.optimizer == "adamw" else rows[:, :0])  # Adam's second moment
        self.loss_scale = LossScale(device) if config.precision == "float16" else None
        self.statistics = torch.zeros(2, len(rows), device=device, dtype=torch.float64)  # sums of loss and of hits
        self.step_index, self.lr_scale = 0, 1.0
        self.history: list[EpochRecord] = []
        self.moments: list[Moment] = []
        self.best, self.waited = float("inf"), 0  # of the loss since the gates are discrete, for `patience`
        self.random_states: dict[str, Tensor] = {}  # of PyTorch's own generators, where a run is resumed
        self.own_update: Callable[[Tensor], None] | None = None  # (n, P) grad CE - beta phi -> a user's own step
        # what the decision changes
        self.moving = self.learnable.expand(len(rows), -1)  # (n, P): False where a weight stands still
        learning = self.learnable if gating is None else self.learnable[gating.scales.at]
        self.frozen_units = None if bool(learning.all()) else ~learning  # (K,) gated weights that stand still
        self.rates, self.decays = parameter_factors(particles, groups)
        self.set_decay()
        # what one step leaves for the next, or for its readers
        self.gaussian = gaussian and config.likelihood == "gaussian"
        self.scores = torch.zeros_like(rows if self.gaussian else rows[:, :0])
        # lr, temperature, ramp, Adam's two corrections, number of the step: read inside captured steps
        self.knobs = rows.new_zeros(6)
        self.lr = self.tau = self.ramp = 0.0  # the same for the host
        self.healthy = torch.ones((), dtype=torch.bool, device=device)
        self.sound = torch.ones_like(self.healthy)  # the present step: what is not changes nothing
        self.share = 1.0  # the batch's part that this process sees
        self.mirror: Mirror | None = None  # of other processes' particles, once the gates are discrete
        self.recent: deque[tuple[int, Any, Any]] = deque(maxlen=HEALTH_CHECK if device.type == "cuda" else 1)
        self.trouble = ""  # what made the run go back to where it starts now
        # how it is computed
        self.forward = Forward(particles, gating, config)
        # their inputs never change shape, so they are compiled once
        made: Callable[[Any], Any] = compiled if device.type == "cuda" else in_strips
        self.update, self.drive, self.adamw = made(update_rows), made(drive_rows), made(adamw_rows)
        self.shrink = shrink_rows if device.type == "cuda" else in_strips(shrink_rows)

    @property
    def progress(self) -> float:
        return self.step_index / self.total_steps if self.total_steps else 1.0

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

    @property
    def rate(self) -> Tensor | float:
        """Learning rate of the step, () or (P,) by parameter; a number on the CPU, where no graph is captured."""
        rate = self.knobs[0] if self.particles.device.type == "cuda" else self.lr
        return rate if self.rates is None else rate * self.rates

    @property
    def corrections(self) -> tuple[Tensor, Tensor] | tuple[float, float]:
        """1 - inertia^t and the root of 1 - ADAM_BETA2^t of Adam's step t, of which skipped ones are none."""
        if self.loss_scale is not None:
            t = self.knobs[5] - self.loss_scale.skipped
            return 1 - self.config.momentum**t, (1 - ADAM_BETA2**t).sqrt()
        if self.particles.device.type == "cuda":
            return self.knobs[3], self.knobs[4]
        return self.host_corrections

    @property
    def host_corrections(self) -> tuple[float, float]:
        t = self.step_index + 1
        return 1 - self.config.momentum**t, (1 - ADAM_BETA2**t) ** 0.5

    def set_decay(self) -> None:
        """Find where weight decay acts now, and by which factor."""
        acts = self.latents.shrinkage(self.particles.rows)
        self.decayed = acts if self.decays is None else acts * self.decays  # (P,)

    def hold(self, moving: Tensor) -> None:
        """Let only coordinates that are True in `moving`, (P,) or (n, P), learn from here on."""
        self.moving = (moving & self.learnable).expand(len(self.particles), -1)


def parameter_factors(particles: Particles, groups: Groups | None) -> tuple[Tensor | None, Tensor | None]:
    """(P,) factors of learning rate and weight decay; None where all are 1, and bool where they are 0 or 1."""
    if groups is None:
        return None, None
    layout, found = particles.layout, {name: particles.rows.new_ones(particles.layout.size) for name in FACTORS}
    for name, parameter in particles.networks[0].named_parameters():
        given = groups(name, parameter)
        if not isinstance(given, Mapping) or not given.keys() <= set(FACTORS):
            raise ConfigError(f"groups answers {given!r:.60} for {name}: return factors of 'lr' and 'weight_decay'")
        for kind, factor in given.items():
            layout.segments[name].view(found[kind]).fill_(factor)
    rates, decays = (None if bool((values == 1).all()) else values for values in found.values())
    if decays is not None and bool(((decays == 0) | (decays == 1)).all()):
        decays = decays.bool()
    return rates, decays
