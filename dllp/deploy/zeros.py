"""Drop from a traced graph what removed branches leave behind: zeros that are added, and ReLUs of ReLUs.

A removed branch ends in `nn.Threshold(inf, 0)` or in new zeros (docs/how-to/own-model.md). Runtimes do not see what is
superfluous then: they compare, select, scale and add whole maps. Of ResNet-56 without twelve blocks that took a sixth
of the time.
"""

from __future__ import annotations

import math

import torch
from torch import fx

ATEN = torch.ops.aten
ADD, MUL, RELU, THRESHOLD = ATEN.add.Tensor, ATEN.mul.Tensor, ATEN.relu.default, ATEN.threshold.default
NEW = (ATEN.new_zeros.default, ATEN.zeros_like.default, ATEN.zeros.default)
MOVED = (
    ATEN.view.default, ATEN.reshape.default, ATEN.permute.default, ATEN.transpose.int, ATEN.clone.default,
    ATEN.dropout.default, ATEN.contiguous.default, ATEN._to_copy.default, ATEN.unsqueeze.default, ATEN.squeeze.dim,
)  # fmt: skip
"""Operations of which zeros come out as zeros."""


def without_zeros(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The same function; a graph without removed branches as it is."""
    sums = [node for node in program.graph.nodes if node.target in (ADD, ATEN.add_.Tensor)]
    if not any(_gives_zeros(operand) for node in sums for operand in node.args):
        return program
    program = program.run_decompositions({})  # nothing in place from here on
    graph = program.graph
    ends = set(graph.output_node().all_input_nodes)  # the program's signature names them
    for node in list(graph.nodes):
        same = _same(node)
        if same is not None and node not in ends:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
    graph.eliminate_dead_code()
    program.graph_module.recompile()
    return program


def _same(node: fx.Node) -> fx.Node | None:
    """The input that a node returns as it is, if it does so."""
    if node.target is RELU:
        (x,) = node.args
        return x if isinstance(x, fx.Node) and x.target is RELU else None
    if node.target is not ADD or node.kwargs:  # a factor
        return None
    first, second = node.args
    for zeros, rest in ((first, second), (second, first)):
        if _gives_zeros(zeros) and isinstance(rest, fx.Node) and _form(rest) == _form(node):
            return rest
    return None


def _gives_zeros(node: object) -> bool:
    """True where a node's values are 0, whatever finite numbers it is computed from."""
    if not isinstance(node, fx.Node):
        return False
    if node.target is THRESHOLD:
        return node.args[1:] == (math.inf, 0.0)
    if node.target is MUL:
        return any(map(_gives_zeros, node.args))
    return node.target in NEW or (node.target in MOVED and _gives_zeros(node.args[0]))


def _form(node: fx.Node) -> tuple[torch.Size, torch.dtype]:
    """Shape and type: an addition may broadcast or convert its operands."""
    return node.meta["val"].shape, node.meta["val"].dtype
