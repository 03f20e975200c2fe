"""Initialisation of networks: Kaiming for convolutions, each module's own rule for the others."""

from __future__ import annotations

import math
from functools import partial
from itertools import chain

import torch
from torch import nn

from dllp.errors import ConfigError

HOOKED = frozenset({"weight_g", "weight_v", "weight_orig"})  # from which hooks compute a weight


@torch.no_grad()
def initialise(model: nn.Module) -> None:
    """Initialise every parameter of `model` in place that is not frozen, from the global random generators.

    Convolutions get Kaiming normal weights (fan-out, ReLU) and zero biases; every other module is reset by its own
    `reset_parameters()`. ConfigError, before anything is changed, for a module with trainable parameters of its own and
    no such method, or with a weight that is computed from them.
    """
    for name, module in model.named_modules():
        if not any(p.requires_grad for p in module.parameters(recurse=False)):
            continue
        what = f"module {name or 'the network itself'!r} ({type(module).__name__})"
        if _resetter(module) is None:
            ways = "give it one, or start from the given weights with init='given'"
            raise ConfigError(f"{what} has parameters but no reset_parameters(): {ways}")
        if not HOOKED.isdisjoint(module._parameters):
            raise ConfigError(
                f"the weight of {what} is computed from other parameters, which its reset_parameters() leaves as they "
                "are: start from the given weights with init='given'"
            )
    frozen = [(p, p.clone()) for p in model.parameters() if not p.requires_grad]
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if own and not any(p.requires_grad for p in own):
            continue
        if not any(True for _ in chain(module.parameters(), module.buffers())):
            continue  # a residual branch that a cut has emptied
        reset = _resetter(module)
        if reset is not None:
            reset()
        if own and own[0].is_meta:
            continue  # without values, and normal_ would import PyTorch's compiler
        if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            fan_out = module.out_channels // module.groups * math.prod(module.kernel_size)
            module.weight.normal_(0, math.sqrt(2 / fan_out))
            if module.bias is not None:
                module.bias.zero_()
    for parameter, value in frozen:  # a module may be frozen in part, and one may reset another's
        parameter.copy_(value)


def reinitialise(model: nn.Module, seed: int) -> None:
    """Initialise a network from `seed`, frozen parameters excepted; the global random generators are left unchanged."""
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        # torch.manual_seed would also seed devices that are not forked.
        torch.default_generator.manual_seed(seed)
        for index in devices:
            torch.cuda.default_generators[index].manual_seed(seed)
        initialise(model)


def _resetter(module: nn.Module):
    if isinstance(module, nn.MultiheadAttention):
        return partial(_reset_attention, module)
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def _reset_attention(module: nn.MultiheadAttention) -> None:
    said = module._qkv_same_embed_dim  # a cut one says False, whether its projections are one tensor or three
    module._qkv_same_embed_dim = module.in_proj_weight is not None
    module._reset_parameters()
    module._qkv_same_embed_dim = said
