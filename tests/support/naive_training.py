"""A run of `dllp.method.algorithm1` on the tiny network: its settings from a Config, its gates and schedule."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from dllp.config import Config
from dllp.method import algorithm1, schedule
from dllp.method.gates import DUAL_STEP, GAP_PENALTY, INITIAL_LOGIT
from dllp.training.latents import LR_SCALES
from tests.support.tiny import CONVOLUTIONS, NUM_DATA, SCALES, expected_flops, explicit, kept_coordinates, scales_of


class Reference:
    """Algorithm 1 as it is specified, from the networks' present weights on."""

    def __init__(self, networks: list[nn.Module], config: Config, teacher: nn.Module | None = None) -> None:
        self.config, self.teacher, granularity = config, teacher, config.granularity
        weights = [{k: v.detach().clone() for k, v in network.named_parameters()} for network in networks]
        units = (4, 5) if granularity == "channel" else tuple(weights[0][k].numel() for k in CONVOLUTIONS)
        n, gates = len(networks), sum(units)
        logits = torch.full((n, gates), INITIAL_LOGIT, dtype=torch.float64, requires_grad=True)
        log_slab = torch.full((n, len(units)), math.log(config.slab), dtype=torch.float64).requires_grad_()
        log_d = torch.zeros(n, dtype=torch.float64, requires_grad=True)
        rates = [([logits], config.lr_gates), ([log_slab, log_d], LR_SCALES)]
        adam = torch.optim.Adam([{"params": values, "lr": lr} for values, lr in rates])
        self.state = algorithm1.State(
            weights, [{k: torch.zeros_like(v) for k, v in theta.items()} for theta in weights], logits, log_slab, log_d,
            torch.zeros(n, dtype=torch.float64), adam,
            square=[{k: torch.zeros_like(v) for k, v in theta.items()} for theta in weights],
        )  # fmt: skip
        self.network = algorithm1.Network(
            forward=lambda theta, x, z: explicit(theta, x, z, granularity),
            scales=lambda theta: scales_of(theta, granularity),
            cost=lambda theta: expected_flops(theta, granularity),
            units=units,
            ruled=SCALES[granularity],
            slab_part=lambda theta, keep: kept_coordinates(theta, keep, granularity),
            blocks=blocks(weights[0], config.blocks),
        )
        strength = 1 / NUM_DATA
        names = ("beta", "epsilon", "slab_bounds", "likelihood", "bandwidth", "momentum", "weight_decay",
                 "teacher_weight", "teacher_temperature", "optimizer")  # fmt: skip
        self.settings = algorithm1.Settings(
            num_data=NUM_DATA, strength=strength, leverage=max(1.0, config.beta * strength * gates),
            gap_penalty=GAP_PENALTY[granularity], dual_step=DUAL_STEP[granularity],
            budget=config.keep_flops is not None, sparsity=config.sparsity or 0.0,
            **{name: getattr(config, name) for name in names},
        )  # fmt: skip
        self.generator = torch.Generator().manual_seed(config.seed)

    def decide(self, keep: Tensor) -> None:
        """Hold the given gates: the spike's weights and their velocity stop."""
        state = self.state
        state.keep = keep
        for theta, velocity, row in zip(state.weights, state.velocity, keep, strict=True):
            for name, part in self.network.slab_part(theta, row).items():
                velocity[name] = velocity[name] * part

    def gates(self, soft: bool, tau: float, ramp: float) -> algorithm1.Gates:
        logits, keep, theta = self.state.logits, self.state.keep, self.state.logits.sigmoid()
        if not soft:
            z = torch.ones_like(logits) if keep is None else keep.double()
            return algorithm1.Gates(list(z), list(theta), list(theta), True)
        if self.config.draw_gates:
            u = torch.rand(logits.shape, generator=self.generator, dtype=torch.float64)
            z = torch.sigmoid((logits + torch.log(u / (1 - u))) / tau)
            return algorithm1.Gates(list(z), list(theta), list(theta), False)
        if self.config.keep_flops is None:
            medians = list(torch.sigmoid(logits / tau))
            return algorithm1.Gates(medians, medians, medians, False)
        thresholds = torch.stack([self.threshold(row, ramp) for row in logits.detach()])
        medians = torch.sigmoid((logits - thresholds) / tau)
        hard, above = (logits > thresholds).double(), (logits > 0).double()
        straight = medians - medians.detach()
        return algorithm1.Gates(list(hard + straight), list(medians), list(above + straight), True)

    def threshold(self, logits: Tensor, ramp: float) -> Tensor:
        """(U,) -> (1,): the smallest logit such that those above it fit the ramp, or below all."""
        if float(self.network.cost(torch.ones_like(logits))) <= ramp:
            return logits.min()[None] - 1
        fitting = (value for value in logits.sort().values if self.network.cost((logits > value).double()) <= ramp)
        return next(fitting)[None]

    def step(self, x: Tensor, y: Tensor, *, progress: float, lr: float) -> None:
        c = self.config
        soft = progress >= c.open_until and self.state.keep is None
        tau = schedule.temperature(progress, start=1.0, end=0.1, until=c.discrete_at)
        ramp = schedule.budget_ramp(progress, target=c.keep_flops or 1, begin=c.open_until, until=c.ramp_until)
        gates = self.gates(soft, tau, ramp)
        taught = c.teacher != "off" and progress >= c.teacher_from
        settings = self.settings if taught else replace(self.settings, teacher_weight=0.0)
        logits = None if self.teacher is None else copy.deepcopy(self.teacher).eval()(x).detach()
        algorithm1.step(self.state, self.network, settings, x, y, gates, lr=lr, ramp=ramp, soft=soft, teacher=logits)


def blocks(theta: algorithm1.Weights, kind: str) -> tuple[int, ...]:
    """Coordinates of each block of the Stein kernel: all of them, one each, or those of a module."""
    size = sum(w.numel() for w in theta.values())
    if kind == "all":
        return (size,)
    if kind == "coordinate":
        return (1,) * size
    modules: dict[str, int] = {}
    for name, w in theta.items():
        owner = name.rpartition(".")[0]
        modules[owner] = modules.get(owner, 0) + w.numel()
    return tuple(modules.values())
