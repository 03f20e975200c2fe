"""Views whose sizes a forward takes from another axis than it means: `x.reshape(B, N, C)` with its input's width C.

After a cut the heads need not fill the width any more. Such calls are found by running a cut network once, and get the
sizes that their axes have; the recipe keeps them as `.@call/rank`, with 0 for the sizes that the forward asks for.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from dllp.structure.atoms import Atom, Label, indices, leaves, mask
from dllp.structure.axes import watched
from dllp.structure.following import asked_sizes
from dllp.structure.slicing import Group, Slice, cut, recipe

Call = tuple[str, int]  # a module, and the number of a view among all made within it in one forward


class _Learning(TorchFunctionMode):
    """Gives every view of a forward the sizes that its axes have, and notes where it was asked for others."""

    def __init__(self, wanted: Mapping[Call, list[int]]) -> None:
        super().__init__()
        self.wanted = wanted
        self.wrong: dict[Call, set[int]] = {}
        self.stack: list[str] = []
        self.counts: dict[str, int] = {}

    def enter(self, name: str, *_: Any) -> None:
        self.stack.append(name)
        self.counts[name] = 0

    def leave(self, *_: Any) -> None:
        self.stack.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asked = asked_sizes(getattr(func, "__name__", ""), args)
        if asked is not None:
            call = self.stack[-1], self.counts[self.stack[-1]]
            for name in set(self.stack):
                self.counts[name] += 1
            wanted = self.wanted.get(call, [])
            pairs = list(zip(asked, wanted, strict=True)) if len(wanted) == len(asked) else []
            differ = {d for d, (a, w) in enumerate(pairs) if a not in (-1, w)}
            if differ:
                self.wrong.setdefault(call, set()).update(differ)
                return func(args[0], tuple(w if d in differ else a for d, (a, w) in enumerate(pairs)))
        return func(*args, **(kwargs or {}))


def followed(
    model: nn.Module, groups: Mapping[Atom, Group], views: Mapping[Call, list[Label]], inputs: tuple[Any, ...]
) -> dict[Atom, Group]:
    """The groups with slices for the sizes of views that do not follow by themselves."""
    if not groups:
        return {}
    wrong: dict[Call, set[int]] = {}
    generator = torch.Generator().manual_seed(5)
    for _ in range(2):
        keep = {
            atom: torch.randperm(atom.size, generator=generator)
            < -(-int(torch.randint(max(atom.size // 4, 1), atom.size, (), generator=generator)) // step) * step
            for atom, step in ((atom, group.multiple) for atom, group in groups.items())
        }
        wanted = {call: [int(mask(label, keep).sum()) for label in labels] for call, labels in views.items()}
        learning = _Learning(wanted)
        small = cut(model, recipe(model, list(groups.values()), torch.cat(list(keep.values()))), shared=True)
        with suppress(Exception), torch.no_grad(), watched(small, learning.enter, learning.leave), learning:
            small(*inputs)  # the verification finds what fails
        for call, dims in learning.wrong.items():
            wrong.setdefault(call, set()).update(dims)
    result = {}
    for atom, group in groups.items():
        more = []
        for (module, number), dims in wrong.items():
            labels = views[module, number]
            near = any(p.module == module or p.module.startswith(f"{module}.") for p in group.slices)
            for d in sorted(dims):
                if near or atom in leaves(labels[d]):
                    name = f"{module}:@{number}/{len(labels)}"
                    more.append(Slice(name, d, indices(labels[d], atom), "size"))
        result[atom] = replace(group, slices=(*group.slices, *more))
    return result
