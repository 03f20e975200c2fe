"""n networks whose parameters are rows of one matrix, and their gradients rows of another.

Row i holds every parameter of particle i, so the Stein direction and the optimiser are a few elementwise kernels. Once
the gates are discrete the networks are sliced: forward and backward then run on the small networks, whose own compact
rows are gathered from and scattered into the full ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dllp.config import Config
from dllp.errors import StructureError
from dllp.structure.initialise import reinitialise
from dllp.structure.slicing import Recipe, copied, cut, kept_indices

ALIGN = 16  # elements; every segment starts on a 64-byte boundary
JITTER = 0.1
"""Noise on particles beyond the first where all start at the given weights, in units of each tensor's std."""


@dataclass(frozen=True)
class Segment:
    """Where one parameter lies in a row, and in which order its axes are stored."""

    name: str
    offset: int
    shape: torch.Size
    channels_last: bool

    def view(self, row: Tensor) -> Tensor:
        """(P,) row -> this parameter, sharing memory."""
        flat = row[self.offset : self.offset + self.shape.numel()]
        if self.channels_last:
            o, i, h, w = self.shape
            return flat.view(o, h, w, i).permute(0, 3, 1, 2)
        return flat.view(self.shape)


class Layout:
    """The segments of a row, one block for each module, and one spare element at the end for padding to point at."""

    def __init__(self, network: nn.Module, channels_last: bool = False) -> None:
        self.segments: dict[str, Segment] = {}
        self.blocks: list[int] = []  # lengths of the modules' consecutive blocks, padding included
        offset, owner = 0, None
        for name, parameter in network.named_parameters():
            module = name.rpartition(".")[0]
            last = channels_last and parameter.dim() == 4
            self.segments[name] = Segment(name, offset, parameter.shape, last)
            padded = -(-parameter.numel() // ALIGN) * ALIGN
            if module != owner:
                self.blocks.append(0)
                owner = module
            offset += padded
            self.blocks[-1] += padded
        self.size = offset + ALIGN
        self.blocks.append(ALIGN)
        self.spare = self.size - 1

    def bind(self, network: nn.Module, row: Tensor) -> None:
        """Make the network's parameters views into the row, at their present values."""
        for name, parameter in network.named_parameters():
            view = self.segments[name].view(row)
            view.copy_(parameter.data)
            parameter.data = view

    def targets(self, network: nn.Module, gradient: Tensor) -> tuple[list[nn.Parameter], list[Tensor]]:
        """The parameters that learn, and the views into a gradient row where their gradients belong."""
        named = [(name, p) for name, p in network.named_parameters() if p.requires_grad]
        return [p for _, p in named], [self.segments[name].view(gradient) for name, _ in named]

    def learnable(self, network: nn.Module) -> Tensor:
        """(P,) bool: coordinates of parameters that are not frozen (padding is not)."""
        mask = torch.zeros(self.size, dtype=torch.bool)
        for name, parameter in network.named_parameters():
            if parameter.requires_grad:
                self.segments[name].view(mask).fill_(True)
        return mask


@dataclass
class Sliced:
    """A particle's small network with rows of its own, and the full row's coordinate behind each of their elements.

    `slab` is what will remain of it: `recipe` may keep more channels, to a width that the device likes.
    """

    network: nn.Module
    recipe: Recipe
    slab: Recipe
    layout: Layout
    row: Tensor
    gradient: Tensor
    coordinates: Tensor


class Particles:
    """`rows` and `gradients` are (n, P); `networks[i]` reads and writes row i."""

    def __init__(self, networks: Sequence[nn.Module], *, channels_last: bool = False) -> None:
        self.networks = list(networks)
        parameters = list(self.networks[0].parameters())
        if not any(p.requires_grad for p in parameters):
            raise StructureError("the network has no parameter that learns: unfreeze some with requires_grad_()")
        kinds = {(p.dtype, p.device) for p in parameters}
        if len(kinds) > 1:
            raise StructureError("the network mixes dtypes or devices: convert it with .to(dtype, device) first")
        (dtype, device), self.channels_last = kinds.pop(), channels_last
        self.layout = Layout(self.networks[0], channels_last)
        self.rows = torch.zeros(len(self.networks), self.layout.size, dtype=dtype, device=device)
        self.gradients = torch.zeros_like(self.rows)
        for network, row in zip(self.networks, self.rows, strict=True):
            self.layout.bind(network, row)
        self.sliced: list[Sliced] = []
        self._aim()

    @classmethod
    def start(
        cls, model: nn.Module, config: Config, device: torch.device, own: Sequence[int] | None = None
    ) -> Particles:
        """n copies of `model`, left as it was: at its own weights with jitter beyond the first, or re-initialised.

        `own` takes some of them only, by their numbers.
        """
        networks = []
        for i in range(config.particles) if own is None else own:
            network = copied(model).train()
            seed = (config.seed * 1009 + i + 2**63) % 2**64 - 2**63  # as 64 bits hold it
            if config.init == "fresh":
                reinitialise(network, seed)
            elif i > 0:
                jitter(network, JITTER, seed)
            networks.append(network.to(device))
        return cls(networks, channels_last=device.type == "cuda")

    def __len__(self) -> int:
        return len(self.networks)

    @property
    def device(self) -> torch.device:
        return self.rows.device

    @property
    def active(self) -> list[nn.Module]:
        """The networks that forward and backward run on: sliced ones once there are any."""
        return [s.network for s in self.sliced] or self.networks

    def _aim(self) -> None:
        pairs = zip(self.networks, self.gradients, strict=True)
        self._targets = [s.layout.targets(s.network, s.gradient) for s in self.sliced] or [
            self.layout.targets(network, gradient) for network, gradient in pairs
        ]

    def slice(self, recipes: Sequence[Recipe], slabs: Sequence[Recipe] | None = None) -> None:
        """Replace the networks that are trained by their sliced parts; rows and momentum keep their full shape.

        Where `recipes` keep more than the slab, `slabs` say what the slab is.
        """
        triples = zip(self.networks, recipes, slabs or recipes, strict=True)
        self.sliced = [slice_particle(net, self.layout, wide, slab, self.channels_last) for net, wide, slab in triples]
        self.gradients.zero_()  # the small networks write only their own coordinates
        self._aim()

    def begin_step(self) -> None:
        """Bring the small networks' weights up to date."""
        for row, part in zip(self.rows, self.sliced, strict=False):
            torch.index_select(row, 0, part.coordinates, out=part.row)

    def differentiate(
        self, i: int, value: Tensor, *others: Tensor, into: Tensor | None = None, retain_graph: bool = False,
        add: bool = False,
    ) -> list[Tensor | None]:  # fmt: skip
        """Write the gradient of `value` in particle i's parameters into its row, or `add` it to what is there.

        One multi-tensor operation instead of one for each parameter. `into` (n, P) takes the gradient instead; without
        `add` the row of `gradients` is then left undefined. Returns the gradients in `others`.
        """
        parameters, views = self._targets[i]
        known = [*parameters, *others] if value.requires_grad else []
        found = torch.autograd.grad(value, known, allow_unused=True, retain_graph=retain_graph) if known else ()
        if all(gradient is None for gradient in found[: len(parameters)]):
            raise independent(i)
        part = self.sliced[i] if self.sliced else None
        row = self.gradients[i] if part is None else part.gradient
        if into is not None and add:  # the row holds what came before
            row = torch.zeros_like(row)
            layout, network = (self.layout, self.networks[i]) if part is None else (part.layout, part.network)
            views = layout.targets(network, row)[1]
        _write(views, found[: len(parameters)], add and into is None)
        if into is not None:
            _scatter(into[i], row, None if part is None else part.coordinates, add)
        return list(found[len(parameters) :])

    def take_gradients(self, i: int) -> bool:
        """Move what `backward` left at particle i's parameters into its row; False where it left nothing."""
        parameters, views = self._targets[i]
        found = [parameter.grad for parameter in parameters]
        if all(gradient is None for gradient in found):
            return False
        _write(views, found, add=False)
        for parameter in parameters:
            parameter.grad = None
        return True

    def written(self) -> list[Tensor]:
        """Where backward writes: the gradient matrix, or the small networks' rows once there are any."""
        return [part.gradient for part in self.sliced] or [self.gradients]

    def collect_gradients(self) -> None:
        """Scatter the small networks' gradients into the full matrix."""
        for gradient, part in zip(self.gradients, self.sliced, strict=False):
            gradient.index_copy_(0, part.coordinates, part.gradient)

    def collect_weights(self) -> None:
        """Scatter the small networks' weights into the full rows: whoever holds them may have changed them."""
        for row, part in zip(self.rows, self.sliced, strict=False):
            spare = row[self.layout.spare].clone()
            row.index_copy_(0, part.coordinates, part.row)
            row[self.layout.spare] = spare

    def finish(self) -> None:
        """Give the full networks the small ones' running statistics, and the small ones the last step's weights."""
        self.begin_step()
        for network, part in zip(self.networks, self.sliced, strict=False):
            scatter_buffers(network, part)


def independent(i: int) -> StructureError:
    """The error for a loss that says nothing about particle i."""
    return StructureError(
        f"the loss of particle {i + 1} does not depend on its weights: compute it from what network(...) returns"
    )


def _write(views: Sequence[Tensor], gradients: Sequence[Tensor | None], add: bool) -> None:
    """Gradients into their places, or on top of what is there."""
    pairs = [(view, gradient) for view, gradient in zip(views, gradients, strict=True) if gradient is not None]
    write = torch._foreach_add_ if add else torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
    write([view for view, _ in pairs], [gradient for _, gradient in pairs])
    for view, gradient in zip(views, gradients, strict=True):
        if gradient is None and not add:  # not used this time: what an earlier step wrote must go
            view.zero_()


def _scatter(target: Tensor, row: Tensor, coordinates: Tensor | None, add: bool) -> None:
    """A row, or a small network's at its coordinates, into a full one (P,), or on top of what is there."""
    if coordinates is None:
        (target.add_ if add else target.copy_)(row)
    elif add:  # coordinates differ but for padding, which is zero: no sum depends on an order
        target.index_copy_(0, coordinates, target.index_select(0, coordinates).add_(row))
    else:
        target.zero_().index_copy_(0, coordinates, row)


def jitter(network: nn.Module, amount: float, seed: int) -> None:
    """Add noise of `amount` times its own std to every parameter tensor that is not frozen."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.requires_grad and parameter.numel() > 1:
                noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype).to(parameter.device)
                parameter.add_(noise, alpha=amount * float(parameter.std()))


def parameter_coordinates(network: nn.Module, layout: Layout, recipe: Recipe) -> dict[str, Tensor]:
    """Each parameter of the cut network -> its coordinates in a full row, in its shape."""
    row, kept = torch.arange(layout.size), kept_indices(network, recipe)
    return {name: segment.view(row).flatten()[kept[name]] for name, segment in layout.segments.items()}


def kept_coordinates(network: nn.Module, layout: Layout, recipe: Recipe) -> Tensor:
    """(P,) bool: the coordinates of a full row that remain after the cut."""
    mask = torch.zeros(layout.size, dtype=torch.bool)
    for coordinates in parameter_coordinates(network, layout, recipe).values():
        mask[coordinates] = True
    return mask


def slice_particle(network: nn.Module, layout: Layout, recipe: Recipe, slab: Recipe, channels_last: bool) -> Sliced:
    """The cut network on a compact row, with each element's coordinate in the full row."""
    first = next(network.parameters())
    small = cut(network, recipe)
    compact = Layout(small, channels_last)
    row = torch.zeros(compact.size, dtype=first.dtype, device=first.device)
    compact.bind(small, row)
    coordinates = torch.full((compact.size,), layout.spare, dtype=torch.int64)
    for name, kept in parameter_coordinates(network, layout, recipe).items():
        if name in compact.segments:  # others are of branches that are gone
            compact.segments[name].view(coordinates).copy_(kept)
    return Sliced(small, recipe, slab, compact, row, torch.zeros_like(row), coordinates.to(first.device))


def scatter_buffers(network: nn.Module, part: Sliced) -> None:
    """Write the slab's buffers (running statistics) to their places in the full network."""
    wide, slab = (kept_indices(network, recipe) for recipe in (part.recipe, part.slab))
    values = dict(part.network.named_buffers())
    for name, buffer in network.named_buffers():
        if name not in values:  # of a branch that is gone
            continue
        places = wide[name].flatten()
        ours = torch.isin(places, slab[name])
        flat = buffer.flatten()
        flat[places[ours].to(buffer.device)] = values[name].flatten()[ours.to(buffer.device)]
        buffer.copy_(flat.view(buffer.shape))
