"""Collaborative channel pruning (CCP): a quadratic 0-1 problem for each layer, from first derivatives.

Removing channels changes the loss by a term for each and one for each pair. With t_ni = <dL_n/dw_i, w_i>, L_n the loss
of example n and w_i the kernel of channel i, b in {0, 1}^c the mask of a layer,

    L(b) - L(1) ~ sum_i (b_i - 1) u_i + sum_ij (b_i - 1) (b_j - 1) s_ij,
    u_i = mean_n t_ni,  s_ij = mean_n t_ni t_nj / 2,

the paper's Hessian (of the true class's probability alone) written without Jacobians: half the empirical Fisher matrix
of the channels' scales. b is relaxed to [0, 1]^c with sum b = p, where the problem is convex, and the p largest stay.

Hyperparameters: `images`, the training pairs that the means are taken over (the paper: all of CIFAR-10's); `inputs`,
1 for t where the next layer reads a channel, which is what the cut removes, in place of its kernel (0, the paper's: a
kernel at 0 leaves the shift of its norm behind).
Differences: the share of channels that every layer keeps follows from the budget; accelerated projected gradient in
place of sequential quadratic programming, which has the same solution; the training pairs are augmented ones; the
paper fine-tunes for 200 epochs from the full learning rate. Units that no plain layer makes or reads are ranked by the
l2 norm of their filters.
Published (the method's own): ResNet-56 on CIFAR-10, 0.04 lost at 47% and 0.08 at 52.6% fewer FLOPs; ResNet-50 on
ImageNet, 0.65 at 48.8% and 0.94 at 54.1%.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dllp.baselines.protocol import Method, Published, Scene, check_range
from dllp.baselines.reconstruction import by_unit, consumers, plain
from dllp.structure.slicing import Group, copied

ITERATIONS = 500
"""Steps of the quadratic program; each costs a product of a layer's matrix with a vector."""


@dataclass(frozen=True)
class CollaborativePruning(Method):
    """Units by the relaxed solution of their layer's quadratic program, the same share of every layer."""

    name = "ccp"
    title = "collaborative channel pruning (CCP)"
    paper = "Peng et al., Collaborative channel pruning for deep networks"
    year = 2019
    published = (Published("resnet56", 47, 0.04),)
    labelled = True
    images: float = 50_000
    inputs: float = 0

    def __post_init__(self) -> None:
        check_range(1e9, 1, images=self.images)
        check_range(1, inputs=self.inputs)

    def scores(self, scene: Scene) -> Tensor:
        statistics = self.statistics(scene)
        norms = scene.filter_matrix().norm(dim=1).double().cpu()  # for what no plain layer makes or reads
        counts = scene.even()
        solutions = [
            norms[here] if found is None else relaxed(*found, count)
            for here, found, count in zip(scene.structure.slices, statistics, counts, strict=True)
        ]
        return scene.chosen(torch.cat(solutions), counts)

    def statistics(self, scene: Scene) -> list[tuple[Tensor, Tensor] | None]:
        """u (units,) and s (units, units) of every group in float64; None where no layer is looked at.

        In evaluation mode: a norm that divides by the batch's own deviation would make every u zero.
        """
        network = copied(scene.network).eval().requires_grad_(False)
        places = consumers if self.inputs else producers
        layers = [places(scene, group) for group in scene.structure.groups]
        sums = [scene.inputs.new_zeros(group.units, dtype=torch.float64) for group in scene.structure.groups]
        squares = [torch.outer(total, total) for total in sums]
        count = 0
        for x, y in scene.examples(int(self.images)):
            terms = channel_terms(network, {name for found in layers for name in found}, bool(self.inputs), x, y)
            count += len(x)
            for g, found in enumerate(layers):
                t = x.new_zeros(len(x), len(sums[g]), dtype=torch.float64)
                for name, unit in found.items():
                    t += by_unit(terms[name].double(), unit, len(sums[g]))
                sums[g] += t.sum(0)
                squares[g] += t.T @ t
        means = zip(layers, sums, squares, strict=True)
        return [((u / count).cpu(), (s / count / 2).cpu()) if found else None for found, u, s in means]


def producers(scene: Scene, group: Group) -> dict[str, Tensor]:
    """Names of the plain modules that make a group, and the group's unit of each of their outputs (O,), -1 for none."""
    modules = dict(scene.network.named_modules())
    made = [s for s in group.slices if s.role == "write" and s.name == f"{s.module}.weight" and s.axis == 0]
    return {s.module: s.unit for s in made if plain(modules[s.module])}


def channel_terms(network: nn.Module, names: set[str], inputs: bool, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """(B, channels) for each named layer: sum over places of a channel times the derivative of its example's loss.

    Of outputs without their bias that is <dL_n/dw_i, w_i>; with `inputs` it is of what the layer reads.
    """
    with captured(network, names, inputs) as seen:
        loss = F.cross_entropy(network(x), y, reduction="sum")
    gradients = torch.autograd.grad(loss, [value for _, value in seen])
    found: dict[str, Tensor] = {}
    for (name, value), gradient in zip(seen, gradients, strict=True):
        module = network.get_submodule(name)
        axis = -1 if isinstance(module, nn.Linear) else 1
        value, gradient = (tensor.detach().movedim(axis, -1) for tensor in (value, gradient))
        bias = None if inputs else dict(module.named_parameters()).get("bias")
        terms = ((value if bias is None else value - bias) * gradient).reshape(len(x), -1, value.shape[-1]).sum(1)
        found[name] = found[name] + terms if name in found else terms
    return found


@contextmanager
def captured(network: nn.Module, names: set[str], inputs: bool) -> Iterator[list[tuple[str, Tensor]]]:
    """Outputs (or inputs) of the named layers, in the order of their calls, as tensors to be derived by.

    Copies, one for each layer: others may read the same tensor, or change it in place.
    """
    seen: list[tuple[str, Tensor]] = []

    def keep(name: str, value: Tensor) -> Tensor:
        own = value.clone()
        seen.append((name, own if own.requires_grad else own.requires_grad_()))
        return own.clone()

    def after(name: str) -> Callable[..., Tensor]:
        return lambda module, args, output: keep(name, output)

    def before(name: str) -> Callable[..., tuple[Any, ...]]:
        return lambda module, args: (keep(name, args[0]), *args[1:])

    with ExitStack() as stack:
        for name in names:
            module = network.get_submodule(name)
            if inputs:
                stack.callback(module.register_forward_pre_hook(before(name)).remove)
            else:
                stack.callback(module.register_forward_hook(after(name)).remove)
        yield seen


def relaxed(u: Tensor, s: Tensor, count: int) -> Tensor:
    """(c,), (c, c) -> b (c,) in [0, 1] with sum `count` that minimises (b - 1)' u + (b - 1)' s (b - 1)."""
    steepest = 2 * torch.linalg.eigvalsh(s)[-1].clamp_min(torch.finfo(s.dtype).tiny)
    b = ahead = torch.full_like(u, count / len(u))
    momentum = 1.0
    for _ in range(ITERATIONS):
        last, b = b, onto(ahead - (u + 2 * s @ (ahead - 1)) / steepest, count)
        if bool(((ahead - b) @ (b - last)) > 0):  # it climbs: begin the acceleration anew
            momentum = 1.0
        faster = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
        ahead, momentum = b + (momentum - 1) / faster * (b - last), faster
    return b


def onto(point: Tensor, count: int) -> Tensor:
    """(c,) -> the nearest point of {0 <= b <= 1, sum b = count}: clamped after a shift.

    The sum is linear in the shift between the shifts at which an entry reaches 0 or 1.
    """
    shifts, order = torch.cat([-point, 1 - point]).sort()
    slopes = torch.where(order < len(point), 1.0, -1.0).to(point).cumsum(0)
    sums = torch.cat([point.new_zeros(1), (slopes[:-1] * shifts.diff()).cumsum(0)])
    k = int((sums < count).sum().clamp(1, len(sums) - 1))
    share = (count - sums[k - 1]) / (sums[k] - sums[k - 1]).clamp_min(torch.finfo(point.dtype).tiny)
    return (point + shifts[k - 1] + share * (shifts[k] - shifts[k - 1])).clamp(0, 1)
