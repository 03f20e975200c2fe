"""What tests of other methods share: digits, and a network as a method sees it."""

from __future__ import annotations

from torch import Tensor, nn

from dllp.baselines.protocol import Scene
from dllp.config import Config
from dllp.data import load
from dllp.prepare import make_gating
from dllp.structure.groups import discover
from dllp.training.particles import Particles

DIGITS = load("digits")


def scene_of(model: nn.Module, inputs: Tensor, **changes: object) -> Scene:
    config = Config(**{"keep_flops": 0.4, "particles": 1, **changes}).resolved()  # pyright: ignore[reportArgumentType]
    particles = Particles([model])
    structure = discover(model, inputs)
    gating = make_gating(model, structure, particles, config, None)
    return Scene(particles, structure, gating, config, inputs)
