"""The result of a finished run: every particle extracted, and what it costs counted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dllp.devices.device import environment
from dllp.result import Result, Size, posterior_of
from dllp.structure.groups import Structure
from dllp.training.extract import extract
from dllp.training.gating import ChannelGating, WeightGating
from dllp.training.trainer import Trainer


def collect(trainer: Trainer, structure: Structure, example: Tensor) -> Result:
    """Extract every particle of a finished run and count what it costs."""
    slabs = extract(trainer.particles, trainer.gating, trainer.belief.keep, example)
    belief = trainer.belief
    noise = belief.noise().cpu()
    dense = Size(structure.flops.dense, round(structure.params.dense))
    sizes, widths = [dense] * len(slabs), {}
    gating, keep = trainer.gating, belief.keep
    if gating is not None and keep is not None:
        sizes, widths = costs(gating, keep)
    empty = torch.zeros(len(slabs), 0, dtype=torch.bool)
    ordered = gating.in_order if gating is not None else lambda values: values
    return Result(
        config=trainer.config,
        slabs=slabs,
        posterior=posterior_of([slab.network for slab in slabs], noise, trainer.config),
        history=[record.as_dict() for record in trainer.history],
        dense=dense,
        sizes=sizes,
        gates={
            "logits": ordered(belief.logits).cpu(),
            "keep": (empty if keep is None else ordered(keep)).cpu(),
            "slab": belief.log_slab.exp().cpu(),
            "noise": noise,
        },
        widths=widths,
        whole=dict(structure.whole if gating is None else gating.whole),
        info=environment(trainer.particles.device) | log_prior(trainer),
    )


def costs(gating: ChannelGating | WeightGating, keep: Tensor) -> tuple[list[Size], dict[str, list[int]]]:
    """Decided gates (n, U) -> what each network costs, and kept and original channels (or weights) of each module."""
    z = keep.to(torch.get_default_dtype())
    pairs = zip(gating.flops.expected(z), gating.params.expected(z), strict=True)
    sizes = [Size(float(macs), round(float(params))) for macs, params in pairs]
    stored = gating.stored.to(keep.device)
    counts = gating.scales.module_sums(torch.cat([keep * stored, stored[None]])).cpu().T.tolist()
    return sizes, dict(zip(gating.scales.modules, counts, strict=True))


def log_prior(trainer: Trainer) -> dict[str, Any]:
    """What the prior says of each particle, and N, by which it counts in the mean log-posterior (Section 2)."""
    if trainer.gating is None:
        return {}
    with torch.no_grad():
        values = trainer.belief.log_prior(trainer.particles.rows)
    return {"log_prior": values.tolist(), "num_data": trainer.num_data}
