"""One rule for each operation: the labels of its outputs, given those of its inputs.

An operation without a rule freezes all that it touches.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dllp.structure.atoms import MISALIGNED, Atom, Label, divided, freeze, fresh, merged, section, segments, unify

if TYPE_CHECKING:  # which imports this
    from dllp.structure.axes import Axes

ZERO_PAD = "a zero-pad shortcut shifts its channels"
MIXED = "an operation mixes its channels ({})"
PRODUCT = "products of activations add its channels up"
SPACE = "a place, no channel"


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


ELEMENTWISE = _names(
    "__and__ __or__ __xor__ _prelu_kernel _to_copy abs acos acosh add addcdiv addcmul alias angle asin asinh "
    "atan atan2 atanh bernoulli bitwise_and bitwise_not bitwise_or bitwise_xor ceil celu clamp clamp_max "
    "clamp_min clone contiguous copy cos cosh detach div elu empty_like eq erf erfc erfinv exp exp2 expm1 fill "
    "floor floor_divide fmod full_like ge gelu gt hardshrink hardsigmoid hardswish hardtanh imag isfinite isinf "
    "isnan le leaky_relu lerp lift_fresh log log10 log1p log2 log_sigmoid_forward logaddexp logical_and "
    "logical_not logical_or logical_xor logit lt masked_fill maximum minimum mish mul nan_to_num native_dropout "
    "ne neg ones_like polar pow prelu rand_like randn_like real reciprocal relu relu6 remainder round rsqrt "
    "rsub selu sgn sigmoid sign silu sin sinh softplus softshrink special_expit sqrt square sub tan tanh "
    "threshold to trunc type_as where xlogy zero zeros_like"
)
CREATING = _names(
    "arange empty empty_permuted empty_strided eye full linspace logspace new_empty new_empty_strided new_full "
    "new_ones new_zeros normal ones rand randint randn randperm scalar_tensor tril_indices triu_indices zeros"
)
"""Operations whose outputs have the sizes that a forward asked for."""
REDUCING = _names(
    "all amax amin any argmax argmin count_nonzero linalg_vector_norm logsumexp max median min mean norm prod std "
    "std_mean sum var var_mean"
)
MEANS = frozenset({"mean", "var", "var_mean", "std", "std_mean"})
SPATIAL = re.compile(r"(?:pool|upsample|_pad|grid_sampler)\w*?_?([123])d")

Rule = Callable[["Axes", "Call"], None]
RULES: dict[str, Rule] = {}


class Unknown(Exception):
    """An operation, or a use of one, that has no rule."""


@dataclass(frozen=True)
class Form:
    """A matrix product, or a convolution, of one example, but for its channels."""

    size: tuple[int, ...]  # rows of the matrix, or sides of the convolution's input
    kernel: tuple[int, ...] = ()  # this and what follows: of a convolution
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1  # 0 where each channel has its own


class Call:
    """One operation that was run: its name, arguments by position or name, and outputs."""

    def __init__(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], schema: Any, out: Any) -> None:
        self.name, self.out = name, out
        self.given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
        self.defaults = {argument.name: argument.default_value for argument in schema.arguments}
        flat: list[Any] = []
        for value in self.given.values():
            flat += value if isinstance(value, (list, tuple)) else [value]
        self.tensors = [value for value in flat if isinstance(value, Tensor)]
        outputs = out if isinstance(out, (list, tuple)) else [out]
        self.outputs = [value for value in outputs if isinstance(value, Tensor)]

    def __getitem__(self, name: str) -> Any:
        return self.given.get(name, self.defaults.get(name))


def rule(*names: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def apply(trace: Axes, call: Call) -> None:
    """Label the outputs of a call; Unknown where there is no rule."""
    if call.name in RULES:
        RULES[call.name](trace, call)
    elif call.name in CREATING or not call.tensors:
        for out in call.outputs:
            trace.set(out, [fresh(size) for size in out.shape])
    elif call.name in ELEMENTWISE:
        elementwise(trace, call.tensors, call.outputs)
    elif call.name in REDUCING:
        reduce(trace, call)
    elif match := SPATIAL.search(call.name):
        spatial(trace, call, int(match[1]))
    else:
        raise Unknown


def elementwise(trace: Axes, tensors: list[Tensor], outputs: list[Tensor]) -> None:
    """Axes of equal size are equal; an axis of size 1 is broadcast."""
    for out in outputs:
        labels: list[Label] = []
        for axis, size in enumerate(out.shape):
            found = [
                trace.label(t)[axis - out.dim()]
                for t in tensors
                if t.dim() >= out.dim() - axis and t.shape[axis - out.dim()] == size > 1
            ]
            for other in found[1:]:
                unify(found[0], other)
            labels.append(found[0] if found else fresh(size))
        if not any(out is t for t in tensors):  # in place it has its labels
            trace.set(out, labels)


def reduce(trace: Axes, call: Call) -> None:
    x, dims = call["self"], call["dim"]
    rank = x.dim()
    dims = [dims] if isinstance(dims, int) and not isinstance(dims, bool) else dims
    dims = sorted(d % rank for d in dims) if dims and not isinstance(dims, bool) else list(range(rank))
    labels = trace.label(x)
    for d in dims:
        if call.name in MEANS:
            trace.average(labels[d], d - rank)
        else:
            freeze(labels[d], MIXED.format(call.name))
    for out in call.outputs:
        kept = [[()] if d in dims else labels[d] for d in range(rank)]
        trace.set(out, kept if out.dim() == rank else [labels[d] for d in range(rank) if d not in dims])


def spatial(trace: Axes, call: Call, dims: int) -> None:
    """Pooling, interpolation and padding mix the last axes."""
    labels = trace.label(call.tensors[0])
    for label in labels[-dims:]:
        freeze(label, MIXED.format(call.name))
    for out in call.outputs:
        trace.set(out, [*labels[:-dims], *(fresh(size, SPACE) for size in out.shape[-dims:])])


# ---- views


@rule("view", "_unsafe_view", "reshape", "_reshape_alias")
def view(trace: Axes, call: Call) -> None:
    x, out = call["self"], call.out
    if not x.numel():
        raise Unknown
    labels, sizes, shape = trace.label(x), list(x.shape), list(out.shape)
    result: list[Label] = [[()] for _ in shape]
    i = j = 0
    while i < len(sizes) and j < len(shape):
        # the fewest axes on both sides with the same product
        before, after, product, wanted = [i], [j], sizes[i], shape[j]
        i, j = i + 1, j + 1
        while product != wanted:
            if product < wanted:
                before, product, i = [*before, i], product * sizes[i], i + 1
            else:
                after, wanted, j = [*after, j], wanted * shape[j], j + 1
        into = [labels[k] for k in before if sizes[k] > 1]
        parts = [k for k in after if shape[k] > 1]
        if not parts:
            continue
        whole = into[0] if len(into) == 1 else merged(into)
        found = [whole] if len(parts) == 1 or whole is None else divided(whole, [shape[k] for k in parts])
        if whole is None or found is None:
            for label in into:
                freeze(label, MISALIGNED)
            found = [fresh(shape[k], MISALIGNED) for k in parts]
        for k, label in zip(parts, found, strict=True):
            result[k] = label  # type: ignore[assignment]
    trace.set(out, result)


@rule("t", "permute", "transpose")
def reorder(trace: Axes, call: Call) -> None:
    labels = list(trace.label(call["self"]))
    if call.name == "permute":
        labels = [labels[d] for d in call["dims"]]
    else:
        a, b = (0, -1) if call.name == "t" else (call["dim0"], call["dim1"])
        labels[a], labels[b] = labels[b], labels[a]
    trace.set(call.out, labels)


@rule("unsqueeze")
def unsqueeze(trace: Axes, call: Call) -> None:
    labels = list(trace.label(call["self"]))
    labels.insert(call["dim"] % call.out.dim(), [()])
    trace.set(call.out, labels)


@rule("squeeze")
def squeeze(trace: Axes, call: Call) -> None:
    x, dims = call["self"], call["dim"]
    dims = range(x.dim()) if dims is None else dims if isinstance(dims, list) else [dims]
    dims = [d % max(x.dim(), 1) for d in dims]
    gone = [d for d in dims if d < x.dim() and x.shape[d] == 1]
    trace.set(call.out, [label for d, label in enumerate(trace.label(x)) if d not in gone])


@rule("expand")
def expand(trace: Axes, call: Call) -> None:
    x, out = call["self"], call.out
    labels, new = trace.label(x), out.dim() - x.dim()
    known = [d >= new and x.shape[d - new] == n for d, n in enumerate(out.shape)]
    trace.set(out, [labels[d - new] if known[d] else fresh(n) for d, n in enumerate(out.shape)])


@rule("repeat")
def repeat(trace: Axes, call: Call) -> None:
    x, out = call["self"], call.out
    new = out.dim() - x.dim()
    result: list[Label] = []
    for d, label in enumerate([[()]] * new + trace.label(x)):
        times = out.shape[d] // (x.shape[d - new] if d >= new else 1)
        result.append(label if times == 1 else merged([fresh(times), label]) or fresh(out.shape[d], MISALIGNED))
        if times > 1 and len(segments(label)) > 1:
            freeze(label, MISALIGNED)
    trace.set(out, result)


@rule("select", "unbind")
def select(trace: Axes, call: Call) -> None:
    labels = list(trace.label(call["self"]))
    freeze(labels.pop(call["dim"]), MIXED.format("indexing"))
    for out in call.outputs:
        trace.set(out, list(labels))


@rule("slice")
def slice_(trace: Axes, call: Call) -> None:
    x, out, axis = call["self"], call.out, call["dim"] % call["self"].dim()
    size, start = x.shape[axis], call["start"] or 0
    start = max(start + size, 0) if start < 0 else min(start, size)
    _section(trace, x, out, axis, start, call["step"])


def _section(trace: Axes, x: Tensor, out: Tensor, axis: int, start: int, step: int = 1) -> None:
    labels = list(trace.label(x))
    length = out.shape[axis]
    if length != x.shape[axis]:
        found = section(labels[axis], start, start + length) if step == 1 and length else None
        if found is None:
            freeze(labels[axis], MISALIGNED)
            found = fresh(length, MISALIGNED)
        labels[axis] = found
    trace.set(out, labels)


@rule("split_with_sizes", "unsafe_split_with_sizes")
def split_with_sizes(trace: Axes, call: Call) -> None:
    x, start = call["self"], 0
    axis = call["dim"] % x.dim()
    for out in call.outputs:
        _section(trace, x, out, axis, start)
        start += out.shape[axis]


@rule("split", "unsafe_split", "chunk")
def split(trace: Axes, call: Call) -> None:
    """Equal parts, which must stay equally long: they lose the same indices."""
    split_with_sizes(trace, call)
    axis = call["dim"] % call["self"].dim()
    first, *others = [trace.label(out)[axis] for out in call.outputs]
    for other, out in zip(others, call.outputs[1:], strict=True):
        if out.shape[axis] == call.outputs[0].shape[axis]:
            unify(first, other)
        else:
            freeze([*first, *other], MISALIGNED)


@rule("glu")
def glu(trace: Axes, call: Call) -> None:
    """One half of an axis, multiplied by gates made of the other: both lose the same indices."""
    x, out, axis = call["self"], call.out, call["dim"] % call["self"].dim()
    _section(trace, x, out, axis, 0)
    gates = section(trace.label(x)[axis], out.shape[axis], x.shape[axis])
    if gates is not None:
        unify(trace.label(out)[axis], gates)


@rule("cat")
def cat(trace: Axes, call: Call) -> None:
    out, tensors = call.out, [t for t in call["tensors"] if t.numel()]
    axis = call["dim"] % out.dim()
    labels = [trace.label(t) for t in tensors]
    for other in labels[1:]:
        for d in range(out.dim()):
            if d != axis and out.shape[d] > 1:
                unify(labels[0][d], other[d])
    result = list(labels[0])
    result[axis] = [segment for label in labels for segment in segments(label[axis])]
    trace.set(out, result)


@rule("stack")
def stack(trace: Axes, call: Call) -> None:
    out, tensors = call.out, call["tensors"]
    for other in tensors[1:]:
        for a, b in zip(trace.label(tensors[0]), trace.label(other), strict=True):
            unify(a, b)
    labels = list(trace.label(tensors[0]))
    labels.insert(call["dim"] % out.dim(), fresh(len(tensors), MIXED.format("stacking")))
    trace.set(out, labels)


@rule("view_as_complex")
def view_as_complex(trace: Axes, call: Call) -> None:
    *labels, last = trace.label(call["self"])
    freeze(last, MIXED.format("complex numbers"))
    trace.set(call.out, labels)


@rule("view_as_real")
def view_as_real(trace: Axes, call: Call) -> None:
    trace.set(call.out, [*trace.label(call["self"]), fresh(2, MIXED.format("complex numbers"))])


@rule("pixel_shuffle")
def pixel_shuffle(trace: Axes, call: Call) -> None:
    *batch, channels, _, _ = trace.label(call["self"])
    factor, out = call["upscale_factor"], call.out
    found = divided(channels, [out.shape[-3], factor * factor]) if out.shape[-3] > 1 else None
    if found is None:
        freeze(channels, MISALIGNED)
        found = [fresh(out.shape[-3], MISALIGNED), [()]]
    freeze(found[1], SPACE)
    trace.set(out, [*batch, found[0], *(fresh(n, SPACE) for n in out.shape[-2:])])


@rule("pixel_unshuffle")
def pixel_unshuffle(trace: Axes, call: Call) -> None:
    *batch, channels, _, _ = trace.label(call["self"])
    places = fresh(call["downscale_factor"] ** 2, SPACE)[0]
    made = [(*segment, *places) for segment in segments(channels)]
    trace.set(call.out, [*batch, made, *(fresh(n, SPACE) for n in call.out.shape[-2:])])


@rule("channel_shuffle", "native_channel_shuffle")
def channel_shuffle(trace: Axes, call: Call) -> None:
    """Channels (groups, of each) in the order (of each, groups)."""
    labels, parts = list(trace.label(call["self"])), call["groups"]
    each = call.out.shape[1] // parts
    found = divided(labels[1], [parts, each]) if parts > 1 and each > 1 else None
    if found is None:
        raise Unknown
    freeze(found[0], "the number of a shuffle's groups is fixed")
    labels[1] = [(*found[1][0], *found[0][0])]
    trace.set(call.out, labels)


# ---- indices, order and places


@rule("embedding")
def embedding(trace: Axes, call: Call) -> None:
    rows, columns = trace.label(call["weight"])
    freeze(rows, "a row for each word")
    trace.trace.writes.append((trace.where, columns))
    trace.set(call.out, [*trace.label(call["indices"]), columns])


@rule("index", "_unsafe_index")
def index(trace: Axes, call: Call) -> None:
    x, found = call["self"], call["indices"]
    used = [d for d, which in enumerate(found) if which is not None]
    if any(found[d].dtype in (torch.bool, torch.uint8) for d in used):
        raise Unknown
    labels = trace.label(x)
    for d in used:
        freeze(labels[d], MIXED.format("indexing"))
    places = [fresh(n, SPACE) for n in torch.broadcast_shapes(*[found[d].shape for d in used])]
    if used == list(range(used[0], used[-1] + 1)):
        trace.set(call.out, [*labels[: used[0]], *places, *labels[used[-1] + 1 :]])
    else:
        trace.set(call.out, [*places, *(label for d, label in enumerate(labels) if d not in used)])


@rule("index_select")
def index_select(trace: Axes, call: Call) -> None:
    labels, axis = list(trace.label(call["self"])), call["dim"]
    freeze(labels[axis], MIXED.format("indexing"))
    labels[axis] = fresh(call.out.shape[axis], SPACE)
    trace.set(call.out, labels)


@rule(
    "roll", "flip", "cumsum", "cumprod", "_softmax", "_log_softmax", "_safe_softmax", "softmax", "log_softmax", "sort"
)
def along(trace: Axes, call: Call) -> None:
    """Operations along some axes that leave the others alone."""
    labels = trace.label(call["self"])
    dims = call["dims"] if call["dims"] is not None else call["dim"]
    for d in [dims] if isinstance(dims, int) else dims or range(len(labels)):
        freeze(labels[d], MIXED.format(call.name.strip("_")))
    for out in call.outputs:
        trace.set(out, labels)


@rule("tril", "triu")
def triangle(trace: Axes, call: Call) -> None:
    labels = trace.label(call["self"])
    freeze([*labels[-1], *labels[-2]], MIXED.format(call.name))
    trace.set(call.out, labels)


@rule("constant_pad_nd")
def constant_pad_nd(trace: Axes, call: Call) -> None:
    x, out = call["self"], call.out
    labels = list(trace.label(x))
    for d, size in enumerate(out.shape):
        if size != x.shape[d]:
            freeze(labels[d], ZERO_PAD)
            labels[d] = fresh(size, ZERO_PAD)
    trace.set(out, labels)


@rule("unfold")
def unfold(trace: Axes, call: Call) -> None:
    labels, out = list(trace.label(call["self"])), call.out
    axis = call["dimension"] % len(labels)
    freeze(labels[axis], MIXED.format("unfold"))
    labels[axis] = fresh(out.shape[axis], SPACE)
    trace.set(out, [*labels, fresh(out.shape[-1], SPACE)])


# ---- products


@rule("mm", "addmm", "bmm", "baddbmm")
def matrix_product(trace: Axes, call: Call) -> None:
    """Matrices, or batches of them, and the tensor that the product may be added to."""
    *added, a, b = call.tensors
    (*batch, rows, inner), (*other, into, columns) = trace.label(a), trace.label(b)
    for one, two in zip(batch, other, strict=True):
        unify(one, two)
    trace.contract((a, b), (inner, into))
    labels = [*batch, rows, inner, columns]
    if batch:
        trace.multiply(b, None, labels)
    else:
        trace.multiply(b, columns, labels, form=Form((a.shape[0],)))
    trace.set(call.out, [*batch, rows, columns])
    if added:
        elementwise(trace, [call.out, *added], [call.out])


@rule("_grouped_mm")
def grouped_mm(trace: Axes, call: Call) -> None:
    """Rows (T, K) by the matrices (E, K, N) of experts."""
    a, b = call["self"], call["mat2"]
    if a.dim() != 2 or b.dim() != 3 or call["bias"] is not None:
        raise Unknown
    left, right = trace.label(a), trace.label(b)
    freeze(right[0], "an expert is chosen by its number")
    trace.contract((a, b), (left[1], right[1]))
    trace.trace.aligned += right[1:]  # the kernel asks for rows of whole 16 bytes
    trace.multiply(b, right[2], [left[0], left[1], right[2]])
    trace.set(call.out, [left[0], right[2]])


@rule("convolution")
def convolution(trace: Axes, call: Call) -> None:
    x, w, out, parts = call["input"], call["weight"], call.out, call["groups"]
    labels, weight = trace.label(x), trace.label(w)
    kernel, transposed = list(w.shape[2:]), call["transposed"]
    for label in weight[2:]:
        freeze(label, SPACE)
    inputs: Label = []
    if parts == 1:
        into, made = (weight[0], weight[1]) if transposed else (weight[1], weight[0])
        trace.contract((x, w), (labels[1], into))
        inner = into
    else:
        # the channels of group g are (g, i), its outputs (g, o); the weight has one of them as (g, .), the other alone
        group, inputs, outputs = Atom(parts), fresh(x.shape[1] // parts), fresh(out.shape[1] // parts)
        into, made = [(group, *inputs[0])], [(group, *outputs[0])]
        unify(labels[1], into)
        whole, alone = (into, outputs) if transposed else (made, inputs)
        unify(weight[0], whole)
        if w.shape[1] > 1:
            unify(weight[1], alone)
        inner = inputs
        if inputs == [()]:
            freeze(outputs, "a convolution makes as many channels of each")
        if inputs != [()]:
            freeze([(group,)], "the number of a convolution's groups is fixed")
            trace.contract((x, w), (into, weight[0]) if transposed else (inputs, weight[1]))
    if call["bias"] is not None:
        unify(made, trace.label(call["bias"])[0])
    still = not transposed and all(n == 1 for n in (*kernel, *call["stride"])) and not any(call["padding"])
    places = labels[2:] if still else [fresh(n, SPACE) for n in out.shape[2:]]
    if not still:
        for label in labels[2:]:
            freeze(label, SPACE)
    looks = torch.Size(x.shape[2:] if transposed else out.shape[2:]).numel() * torch.Size(kernel).numel()
    own = parts > 1 and x.shape[1] == out.shape[1] == parts
    stride, padding, dilation = (tuple(call[name]) for name in ("stride", "padding", "dilation"))
    form = Form(tuple(x.shape[2:]), tuple(kernel), stride, padding, dilation, 0 if own else parts)
    written = made if parts == 1 or inputs != [()] else None
    trace.multiply(w, written, [labels[0], made, inner], looks, None if transposed else form)
    trace.set(out, [labels[0], made, *places])


# ---- normalisation


@rule("_weight_norm_interface")
def weight_norm(trace: Axes, call: Call) -> None:
    """v / |v| * g: the norm is over all axes but one."""
    labels, axis = trace.label(call["v"]), call["dim"]
    for d, label in enumerate(labels):
        if d == axis:
            unify(label, trace.label(call["g"])[d])
        else:
            freeze(label, "the weight that reads them is computed from other parameters")
    trace.set(call.outputs[0], labels)
    for other in call.outputs[1:]:
        trace.set(other, [label if n > 1 else [()] for label, n in zip(labels, other.shape, strict=True)])


@rule("native_layer_norm", "_fused_rms_norm")
def layer_norm(trace: Axes, call: Call) -> None:
    x, out, dims = call["input"], call.outputs[0], len(call["normalized_shape"])
    labels = trace.label(x)
    for k in range(-dims, 0):
        for tensor in (call["weight"], call["bias"]):
            if tensor is not None and tensor.shape[k] > 1:
                unify(labels[k], trace.label(tensor)[k])
        trace.average(labels[k], k)
    trace.set(out, labels)
    for other in call.outputs[1:]:
        trace.set(other, [label if n > 1 else [()] for label, n in zip(labels, other.shape, strict=True)])


@rule("native_group_norm")
def group_norm(trace: Axes, call: Call) -> None:
    x, parts = call["input"], call["group"]
    labels = trace.label(x)
    for tensor in (call["weight"], call["bias"]):
        if tensor is not None:
            unify(labels[1], trace.label(tensor)[0])
    if parts > 1:
        inner = fresh(x.shape[1] // parts)
        unify(labels[1], [(Atom(parts, "the number of a norm's groups is fixed"), *inner[0])])
    trace.average(labels[1], 1 - x.dim())
    for label in labels[2:]:
        freeze(label, SPACE)
    trace.set(call.outputs[0], labels)
    for other in call.outputs[1:]:
        trace.set(other, [fresh(n, SPACE) for n in other.shape])


@rule("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "cudnn_batch_norm")
def batch_norm(trace: Axes, call: Call) -> None:
    labels = trace.label(call["input"])
    for name in ("weight", "bias", "running_mean", "running_var"):
        if call[name] is not None:
            unify(labels[1], trace.label(call[name])[0])
    if call["training"]:
        for label in (labels[0], *labels[2:]):
            freeze(label, MIXED.format("a norm"))
    trace.set(call.outputs[0], labels)
    for other in call.outputs[1:]:
        trace.set(other, [labels[1]] if other.dim() == 1 and other.numel() else [fresh(n) for n in other.shape])
