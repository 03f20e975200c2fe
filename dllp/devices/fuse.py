"""Fusion of batch norm, shortcut and ReLU for training: the same weights, fewer passes over memory.

The network is traced with torch.fx, its patterns norm -> ReLU and norm -> add -> ReLU become one module each, its 3x3
convolutions of few channels use a direct kernel, and the result must agree with the original on a batch. A network
that cannot be traced, or differs, is trained unchanged.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Sequence
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from dllp.devices.recompute import is_chain

TOLERANCE = 1e-3  # relative, in float32: sums are added in another order
FEW = (8, 16)  # the direct convolution was measured to be faster at 16 and not at 32; 8 pads to 16 (results/step)
RELU = (F.relu, torch.relu, F.relu_, torch.relu_)
ADD = (operator.add, operator.iadd, torch.add)


def available() -> bool:
    """True if Triton is installed, which compiles the kernels."""
    return find_spec("triton") is not None


def fuse(networks: list[nn.Module], example: Tensor, stages: Sequence[str] = ()) -> list[nn.Module]:
    """Modules with the same parameters and buffers (not copies) under the same names, or `networks` themselves.

    The first network and its fusion are compared on the `example`. Modules named in `stages` stay modules of their own,
    fused within; a plain chain of layers is left alone.
    """
    if "" in stages:
        return networks
    fused = [rewrite(network, stages) for network in networks]
    if fused[0] is None or not agree(networks[0], fused[0], example):
        return networks
    return [new or old for new, old in zip(fused, networks, strict=True)]


class _Tracer(fx.Tracer):
    """A tracer that treats stages as leaves."""

    def __init__(self, stages: Sequence[str]) -> None:
        super().__init__()
        self.stages = frozenset(stages)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name in self.stages or super().is_leaf_module(m, module_qualified_name)


def rewrite(network: nn.Module, stages: Sequence[str] = ()) -> fx.GraphModule | None:
    """The fused network, not yet verified; None if tracing fails or there is nothing to fuse."""
    from dllp.devices.direct_conv import DirectConv
    from dllp.devices.fused_norm import FusedNorm

    try:
        graph = _Tracer(stages).trace(network)
    except Exception:  # whatever a stranger's forward does with a symbolic input
        return None
    modules = dict(network.named_modules())
    calls = [str(node.target) for node in graph.nodes if node.op == "call_module"]
    within = {name: rewrite(modules[name]) for name in stages if not is_chain(modules[name])}
    replacements: dict[str, nn.Module] = {name: module for name, module in within.items() if module is not None}
    for node in list(graph.nodes):
        module = modules.get(str(node.target)) if node.op == "call_module" else None
        if calls.count(str(node.target)) > 1:
            continue
        if isinstance(module, nn.Conv2d) and _narrow(module):
            replacements[str(node.target)] = DirectConv(module)
        if not isinstance(module, nn.BatchNorm2d) or not (module.affine and module.track_running_stats):
            continue
        if module.momentum is None or not module.training:
            continue
        chain, residual = _pattern(node, modules)
        replacements[str(node.target)] = FusedNorm(module, relu=len(chain) > 1)
        with graph.inserting_before(chain[-1]):
            merged = graph.call_module(str(node.target), (node.args[0], *residual))
        chain[-1].replace_all_uses_with(merged)
        for gone in reversed(chain):
            graph.erase_node(gone)
    if not replacements:
        return None
    graph.lint()
    fused = fx.GraphModule(network, graph)
    for name, module in replacements.items():
        fused.set_submodule(name, module)
    return fused


def agree(network: nn.Module, fused: nn.Module, example: Tensor) -> bool:
    """True if outputs and running statistics are equal within `TOLERANCE`, random layers included."""
    results = []
    for module in (network, fused):
        trial = copy.deepcopy(module)
        devices = [example.device] if example.is_cuda else []
        # without TF32, whose rounding would hide differences
        exact = torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
        with torch.random.fork_rng(devices=devices), torch.no_grad(), exact:
            torch.manual_seed(0)
            try:
                values = [trial(example), trial(example.flip(0))]
            except Exception:  # a sum of unequal shapes, or kernels that this device cannot run
                return False
        results.append([*values, *(b.float() for _, b in sorted(trial.named_buffers()))])
    pairs = zip(*results, strict=True)
    return all(a.shape == b.shape and bool((a - b).norm() <= TOLERANCE * a.norm()) for a, b in pairs)


def _narrow(conv: nn.Conv2d) -> bool:
    """True if a convolution is plain 3x3, keeps the image's size and has few channels."""
    plain = (conv.kernel_size, conv.stride, conv.padding, conv.dilation) == ((3, 3), (1, 1), (1, 1), (1, 1))
    plain = plain and conv.groups == 1 and conv.bias is None and conv.padding_mode == "zeros"
    channels = {conv.in_channels, conv.out_channels}
    return plain and channels <= set(FEW) and conv.weight.dtype == torch.float32


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _is_relu(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    if node.op == "call_module":
        return isinstance(modules[str(node.target)], nn.ReLU)
    return node.target in RELU if node.op == "call_function" else (node.op, node.target) == ("call_method", "relu")


def _pattern(norm: fx.Node, modules: dict[str, nn.Module]) -> tuple[list[fx.Node], tuple[fx.Node, ...]]:
    """The nodes that one operation replaces, from the norm to a ReLU, and the residual added between them."""
    user = _only_user(norm)
    if user is None:
        return [norm], ()
    if _is_relu(user, modules):
        return [norm, user], ()
    after, others = _only_user(user), [arg for arg in user.args if arg is not norm]
    added = user.op == "call_function" and user.target in ADD and len(user.args) == 2 and not user.kwargs
    if added and after is not None and _is_relu(after, modules) and len(others) == 1 and isinstance(others[0], fx.Node):
        return [norm, user, after], (others[0],)
    return [norm], ()
