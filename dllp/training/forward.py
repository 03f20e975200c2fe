"""Forward passes of the particles as fast as devices allow: fused norms, padding, half precision, recomputation."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dllp.config import Config
from dllp.devices import fuse, recompute, trees
from dllp.devices.device import HALF, cast_like_autocast
from dllp.devices.mesh import Axis, synchronise
from dllp.posterior import evaluating
from dllp.structure.slicing import Fold
from dllp.structure.trace import explained
from dllp.training.gating import ChannelGating, WeightGating
from dllp.training.particles import Particles

T = TypeVar("T")
TRACKED = "num_batches_tracked"


class Forward:
    """Calls particle i with its gates.

    Attributes:
        networks: What a call runs: the active networks, their norms fused where possible. Empty until `prepare`.
        stages: Blocks that keep their inputs only, where `config.recompute` asks for it.
        lane: Multiple of channels that the device likes; sliced networks are padded to it with closed channels.
        closed: Folds and gates that close the padding of each sliced network.
    """

    def __init__(self, particles: Particles, gating: ChannelGating | WeightGating | None, config: Config) -> None:
        cuda, n = particles.device.type == "cuda", len(particles)
        self.particles, self.gating, self.config = particles, gating, config
        self.networks: list[nn.Module] = []
        self.lane = 8 if cuda else 1  # widths that tensor cores like
        self.closed: list[tuple[Fold, Tensor]] = []
        self._views: dict[int, tuple[nn.Module, list[Tensor | None]]] = {}
        if isinstance(gating, ChannelGating):
            for network in particles.networks:
                gating.fold.prepare(network)
        self._fused = cuda and config.engine != "eager" and fuse.available()
        self._recompute = recompute.Recompute()
        self.stages = recompute.stages(particles.networks[0]) if config.recompute else []
        # side by side particles are faster and need the memory of all: not where memory is what matters
        aside = cuda and n > 1 and config.accumulate == 1 and not config.recompute
        self._streams = [torch.cuda.Stream(particles.device) for _ in range(n)] if aside else []

    def prepare(self, x: Any, shards: Axis) -> None:
        """Make the networks ready for batches like x, unless they are; norms are fused where it is one tensor."""
        if self.networks:
            return
        active = self.particles.active
        if self.config.sync_batch_norm and shards.size > 1:
            self.networks = [synchronise(network, shards) for network in active]
        else:
            fused = self._fused and isinstance(x, Tensor)
            self.networks = fuse.fuse(active, x[:16], self.stages) if fused else active

    def slice(self, gating: ChannelGating, keep: Tensor, logits: Tensor) -> None:
        """Run the networks cut to `keep` (n, U) from here on, padded by the likeliest closed channels."""
        padded = [gating.padded(row, values, self.lane) for row, values in zip(keep, logits, strict=True)]
        networks = self.particles.networks
        wide = [gating.recipe(network, row) for network, row in zip(networks, padded, strict=True)]
        slab = [gating.recipe(network, row) for network, row in zip(networks, keep, strict=True)]
        self.particles.slice(wide, slab)
        self.networks = []
        self._views.clear()
        if self.lane > 1:
            parts = zip(self.particles.sliced, padded, keep, strict=True)
            self.closed = [gating.closed(part.network, pad, row) for part, pad, row in parts]

    def __call__(self, i: int, gates: Tensor | None) -> nn.Module:
        """Particle i with its gates (U,), to be called with whatever the network takes; without gates all are open."""
        return self._gated(self.networks[i], i, gates)

    def called(self, i: int, gates: Tensor | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Outputs of particle i with its gates, its norms not fused: for loops that are not ours."""
        return self._call(self.particles.active[i], i, gates, args, kwargs)

    @contextmanager
    def evaluated(self, i: int, gates: Tensor | None) -> Iterator[nn.Module]:
        """Particle i with its gates in evaluation mode, without gradients and without fused norms."""
        network = self.particles.active[i]
        with torch.no_grad(), evaluating(network):
            yield self.unfused(i, gates)

    def unfused(self, i: int, gates: Tensor | None) -> nn.Module:
        """Particle i with its gates, its norms not fused."""
        return self._gated(self.particles.active[i], i, gates)

    def _gated(self, network: nn.Module, i: int, gates: Tensor | None) -> nn.Module:
        """A view of the network, made once, with the gates of its next call."""
        if id(network) not in self._views:
            held: list[Tensor | None] = [None]
            view = called_by(network, lambda args, kwargs: self._call(network, i, held[0], args, kwargs))
            self._views[id(network)] = view, held
        view, held = self._views[id(network)]
        held[0] = gates
        return view

    def _call(self, network: nn.Module, i: int, gates: Tensor | None, args: Any, kwargs: Any) -> Any:
        half = HALF.get(self.config.precision)
        # cast weights must not be cached: a captured graph would keep the first step's
        autocast = torch.autocast(self.particles.device.type, half, cache_enabled=False) if half else nullcontext()
        blocks = self._recompute(network, self.stages) if self.stages else nullcontext()
        explanation = explained((args, kwargs), cut=bool(self.particles.sliced))
        with autocast, blocks, explanation:
            weights: dict[str, Tensor] = {}
            if self.closed:
                fold, gate = self.closed[i]
                weights = fold(dict(network.named_parameters()), gate)
            elif gates is not None and self.gating is not None and not self.particles.sliced:
                weights = self.gating.fold(dict(network.named_parameters()), gates)
            if half is not None:
                weights = cast_like_autocast(network, weights, half)
            if weights:
                outputs = functional_call(network, weights, args, kwargs, tie_weights=False)
            else:
                outputs = network(*args, **kwargs)
        return trees.apply(outputs, _widened) if half else outputs

    def each(self, work: Callable[[int], T]) -> Sequence[T]:
        """work(i) for every particle; in a captured step each on a stream of its own, joined at the end.

        Not before: step by step the CPU cannot fill two streams, and memory freed on one does not serve the other.
        """
        if not self._streams or not torch.cuda.is_current_stream_capturing():
            return [work(i) for i in range(len(self.particles))]
        main, results = torch.cuda.current_stream(), []
        for i, stream in enumerate(self._streams):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                results.append(work(i))
        for stream in self._streams:
            main.wait_stream(stream)
        return results


def running_norms(network: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    """Batch norms in training mode that keep running statistics."""
    kinds = nn.modules.batchnorm._BatchNorm
    return [m for m in network.modules() if isinstance(m, kinds) and m.training and m.track_running_stats]


@contextmanager
def estimating(network: nn.Module, steps: int = 0) -> Iterator[None]:
    """Take the statistics of batch norms in training mode from the passes within alone, which count as so many steps.

    Running statistics are of gates that were drawn, by weights of some steps ago: what they say of a network whose
    gates are decided is worse than what a few examples say.
    """
    norms = running_norms(network)
    known = [(norm.momentum, norm.get_buffer(TRACKED).clone()) for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a mean over all passes
    try:
        yield
    finally:
        for norm, (momentum, tracked) in zip(norms, known, strict=True):
            norm.momentum = momentum
            norm.get_buffer(TRACKED).copy_(tracked + steps)


def called_by(network: nn.Module, call: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> nn.Module:
    """The network as an instance of its own class that shares all that it holds, and whose calls go through `call`.

    So a loss finds the methods, attributes, parameters and modes that it knows. Copies of it are plain networks.
    """
    kind = type(network)
    members = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "__call__": lambda self, *args, **kwargs: call(args, kwargs),
        "forward": lambda self, *args, **kwargs: call(args, kwargs),
        "__deepcopy__": lambda self, memo: copy.deepcopy(_of(kind, self.__dict__), memo),
        "__reduce_ex__": lambda self, protocol: _of(kind, self.__dict__).__reduce_ex__(protocol),
    }
    return _of(types.new_class(kind.__name__, (kind,), exec_body=lambda space: space.update(members)), network.__dict__)


def _of(kind: type[nn.Module], held: dict[str, Any]) -> nn.Module:
    """An instance that shares a module's attributes."""
    twin = object.__new__(kind)
    object.__setattr__(twin, "__dict__", held)
    return twin


def _widened(value: Tensor) -> Tensor:
    return value.float() if value.dtype in HALF.values() else value
