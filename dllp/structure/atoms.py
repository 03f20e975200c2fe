"""Labels of tensor axes: sums of products of atoms, and their unification.

An atom is a set of indices that every axis holding it has in common: the heads of an attention, the channels of a
residual stream. An axis of a tensor is a sum (a concatenation) of segments, each of them a row-major product of atoms:
a fused projection is 3 * heads * dims. Operations unify labels; what does not fit together is frozen, with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

MISALIGNED = "its channels do not line up with those of a module they reach (an unknown operation stands between)"


class Atom:
    """`size` indices that are kept or removed wherever they occur; `why` says why none may be removed."""

    __slots__ = ("parts", "same", "size", "summed", "why")

    def __init__(self, size: int, why: str | None = None) -> None:
        self.size, self.why = size, why
        self.same: Atom | None = None  # that this one was found to be equal to
        self.parts: list[Atom] = []  # that this one was found to be made of: a product or, where `summed`, a sum
        self.summed = False

    def find(self) -> Atom:
        """The atom that stands for all equal ones."""
        atom = self
        while atom.same is not None:
            atom = atom.same
        return atom

    def split(self, sizes: Sequence[int], *, summed: bool) -> list[Atom]:
        """Make an atom without parts a sum or a product of new ones."""
        self.parts, self.summed = [Atom(size, self.why) for size in sizes], summed
        return self.parts


Segment = tuple[Atom, ...]
Label = list[Segment]  # the label of an axis; an axis of size 1 is the empty product


def fresh(size: int, why: str | None = None) -> Label:
    """The label of an axis that nothing is known of."""
    return [(Atom(size, why),)] if size > 1 else [()]


def leaves(label: Iterable[Segment]) -> Iterator[Atom]:
    """The atoms without parts in a label, in order; one that occurs twice is named twice."""
    for segment in label:
        for atom in segment:
            atom = atom.find()
            if atom.parts:
                yield from leaves([tuple(atom.parts)])
            else:
                yield atom


def freeze(label: Iterable[Segment], why: str) -> None:
    """Let no index of a label be removed; the first reason stays."""
    for atom in leaves(label):
        atom.why = atom.why or why


def size_of(segment: Segment) -> int:
    return math.prod(atom.size for atom in segment)


def segments(label: Label) -> Label:
    """The same label with products and leading sums written out."""
    result: Label = []
    for segment in label:
        product = _product(segment)
        first = product[0] if product else None
        if first is not None and first.parts:
            for part in first.parts:
                result += segments([(part, *product[1:])])
        else:
            result.append(product)
    return result


def _product(segment: Segment) -> Segment:
    """A segment with its products written out; sums stay atoms."""
    result: list[Atom] = []
    for atom in segment:
        atom = atom.find()
        result += _product(tuple(atom.parts)) if atom.parts and not atom.summed else [atom]
    return tuple(result)


def unify(x: Label, y: Label) -> None:
    """Make two labels of axes of the same size equal; freeze both where they cannot be."""
    if x is y:
        return
    for _ in range(4096):  # every round adds a boundary
        ours, theirs = segments(x), segments(y)
        mine, yours = _boundaries(ours), _boundaries(theirs)
        if mine == yours:
            for a, b in zip(ours, theirs, strict=True):
                _unify_products(a, b)
            return
        if mine[-1] != yours[-1]:
            break
        at = min(set(mine) ^ set(yours))
        if not _bound(y if at in mine else x, at):
            break
    freeze(x, MISALIGNED)
    freeze(y, MISALIGNED)


def _boundaries(label: Label) -> list[int]:
    ends, position = [], 0
    for segment in label:
        position += size_of(segment)
        ends.append(position)
    return ends


def _bound(label: Label, at: int) -> bool:
    """Make a segment end at position `at` of a label; False where none can."""
    position = 0
    for segment in segments(label):
        length = size_of(segment)
        if position < at < position + length:
            first, inner = segment[0], size_of(segment[1:])
            if (at - position) % inner or first.parts:
                return False
            left = (at - position) // inner
            first.split([left, first.size - left], summed=True)
            return True
        position += length
    return True


def section(label: Label, start: int, stop: int) -> Label | None:
    """The part of a label between two positions; None where an atom cannot be cut there."""
    if not (_bound(label, start) and _bound(label, stop)):
        return None
    result, position = [], 0
    for segment in segments(label):
        if start <= position < stop:
            result.append(segment)
        position += size_of(segment)
    return result or [()]


def _unify_products(x: Segment, y: Segment) -> None:
    left, right = list(_product(x)), list(_product(y))
    i = j = 0
    while i < len(left) and j < len(right):
        a, b = left[i].find(), right[j].find()
        if a.parts and not a.summed:  # split or joined meanwhile
            left[i : i + 1] = _product((a,))
        elif b.parts and not b.summed:
            right[j : j + 1] = _product((b,))
        elif a.size == b.size:
            _join(a, b)
            i, j = i + 1, j + 1
        elif a.size < b.size and b.size % a.size == 0 and not b.parts:
            right[j : j + 1] = b.split([a.size, b.size // a.size], summed=False)
        elif b.size < a.size and a.size % b.size == 0 and not a.parts:
            left[i : i + 1] = a.split([b.size, a.size // b.size], summed=False)
        else:
            freeze([tuple(left[i:]), tuple(right[j:])], MISALIGNED)
            return


def _join(a: Atom, b: Atom) -> None:
    """Make two atoms of equal size one."""
    if a is b:
        return
    if b.parts and not a.parts:
        a, b = b, a
    if _within(b, a) or _within(a, b):  # an atom that would be a part of itself
        freeze([(a,), (b,)], MISALIGNED)
        return
    if b.parts:
        unify([(a,)], [(b,)])
        a, b = a.find(), b.find()
        if a is not b and not _within(a, b) and not _within(b, a):
            b.same = a
        return
    if b.why:
        freeze([(a,)], b.why)
    b.same = a


def _within(atom: Atom, whole: Atom) -> bool:
    """True if `atom` is one of the parts of `whole`, or of their parts."""
    parts = [part.find() for part in whole.parts]
    return any(part is atom or _within(atom, part) for part in parts)


def merged(labels: Sequence[Label]) -> Label | None:
    """The label of axes that a view joins, the slowest first; None for a concatenation that is not the slowest."""
    first, *others = [segments(label) for label in labels]
    if any(len(other) > 1 for other in others):
        return None
    tail = tuple(atom for other in others for atom in other[0])
    return [(*segment, *tail) for segment in first]


def divided(label: Label, sizes: Sequence[int]) -> list[Label] | None:
    """The labels of the axes of `sizes` that a view makes of one axis; None where a concatenation cannot be split."""
    found = segments(label)
    if len(found) > 1:
        lengths = {size_of(segment) for segment in found}
        if len(lengths) > 1 or sizes[0] % len(found):
            return None
        for other in found[1:]:  # equal parts, one after the other: a product with their number
            unify([found[0]], [other])
        found = [(Atom(len(found), "its channels are divided in equal parts"), *found[0])]
    axes = [Atom(size) for size in sizes]
    _unify_products(tuple(axes), found[0])
    return [[_product((axis,))] for axis in axes]


def mask(label: Label, keep: Mapping[Atom, Tensor]) -> Tensor:
    """bool (size,): the positions of an axis that remain, given the kept indices (atom.size,) of atoms."""
    result = torch.ones(sum(map(size_of, label)), dtype=torch.bool)
    for atom in keep.keys() & set(leaves(label)):
        index = indices(label, atom)
        result &= (index < 0) | keep[atom][index]
    return result


def indices(label: Label, wanted: Atom) -> Tensor:
    """int64 (size,): the index of an atom at each position of an axis, -1 where it is not."""
    return torch.cat([_segment_indices(segment, wanted) for segment in label])


def _segment_indices(segment: Segment, wanted: Atom) -> Tensor:
    result = torch.full((1,), -1)
    for atom in segment:
        atom = atom.find()
        if atom is wanted:
            inner = torch.arange(atom.size)
        elif atom.parts and atom.summed:
            inner = torch.cat([_segment_indices((part,), wanted) for part in atom.parts])
        elif atom.parts:
            inner = _segment_indices(tuple(atom.parts), wanted)
        else:
            inner = torch.full((atom.size,), -1)
        result = torch.maximum(result[:, None], inner).flatten()
    return result
