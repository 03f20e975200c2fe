"""Gates chosen by what a few batches tell, no weight moved: for networks that are fine-tuned elsewhere.

Closing one unit adds about half its Fisher information to the loss, the mean squared gradient in its gate. The least
loss within a budget is then that of the units with the most of it for their cost.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dllp.errors import ConfigError
from dllp.posterior import evaluating
from dllp.training.gating import ChannelGating
from dllp.training.moments import measure
from dllp.training.particles import independent
from dllp.training.state import RunState
from dllp.training.step import apply_decisions
from dllp.training.trainer import Batches

BATCHES = 32
"""Most batches that are looked at."""


def choose(state: RunState, batches: Batches) -> None:
    """Rank the units by their Fisher information for their cost, decide the gates within the budget, and cut."""
    latents, gating = state.latents, state.gating
    if gating is None:
        return
    if latents.target is None:
        raise ConfigError("epochs = 0 only cuts, and needs a budget: give keep_flops, keep_params or keep_latency")
    squares, count = torch.zeros_like(latents.logits), 0
    for x, y in batches.epoch(0):
        for i, row in enumerate(squares):
            row += _gate_gradient(state, i, x, y).square()
        count += 1
        if count == BATCHES:
            break
    price = _prices(state)
    information = squares / count / price.clamp_min(torch.finfo(price.dtype).tiny)
    latents.logits.copy_((information + torch.finfo(information.dtype).tiny).log())
    apply_decisions(state, latents.decide())
    measure(state, "after")


def _prices(state: RunState) -> Tensor:
    """(1, U) or (U,): the cost of each unit."""
    gating, budget = state.gating, state.latents.budget
    if budget == "latency" and isinstance(gating, ChannelGating) and gating.latency is not None:
        return gating.latency.prices(gating.structure).to(state.latents.logits)
    open_ = torch.ones_like(state.latents.logits[:1]).requires_grad_()
    with torch.enable_grad():
        return torch.autograd.grad(getattr(gating, budget).expected(open_).sum(), open_)[0]


def _gate_gradient(state: RunState, i: int, x: object, y: object) -> Tensor:
    """(U,): gradient of particle i's loss in its open gates, in evaluation mode."""
    leaf = torch.ones_like(state.latents.logits[i]).requires_grad_()
    with torch.enable_grad(), evaluating(state.particles.active[i]):
        loss = state.objective(state.forward.unfused(i, leaf), x, y).loss
        if not loss.requires_grad:
            raise independent(i)
        found = torch.autograd.grad(loss, leaf, allow_unused=True)[0]
        return torch.zeros_like(leaf) if found is None else found
