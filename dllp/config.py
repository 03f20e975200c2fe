"""The configuration of a run: the one place where a default stands.

Section numbers refer to docs/method. ``None`` means "by granularity", of `likelihood` "by task", and
:meth:`Config.resolved` fills it in; of `keep_flops` and `keep_params` it means no budget.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache, wraps
from types import MappingProxyType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from dllp.errors import ConfigError

T = TypeVar("T")
Granularity = Literal["channel", "weight"]
Budget = Literal["flops", "params"]
SPIKE_AND_SLAB = "spike_and_slab"
MOST_PARTICLES = 4096
LARGEST = 3.4028234663852886e38
"""What float32 holds."""
SHUT = 50.0
"""Logits beyond this are certainties in every precision."""


@cache
def types_of(cls: type) -> Mapping[str, Any]:
    """The types of a dataclass's fields: worked out once, because every configuration is held to them."""
    return MappingProxyType(get_type_hints(cls))


def _names_checked(cls: type[T]) -> type[T]:
    """A dataclass that answers an unknown name with the nearest one that it knows, where Python has a TypeError."""
    init, known = cls.__init__, types_of(cls)

    @wraps(init)
    def checked(self: T, *values: Any, **named: Any) -> None:
        for name in named:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]}?" if near else "see dllp.Config for the list"
                raise ConfigError(f"unknown configuration name {name!r}: {hint}")
        init(self, *values, **named)

    cls.__init__ = checked
    return cls


@_names_checked
@dataclass(frozen=True)
class Config:
    """How one network is pruned.

    Args:
        keep_flops: Fraction of the multiply-accumulates to keep, in (0, 1]. Without this and without
            `keep_params` the prior and `sparsity` decide (natural sparsity).
        keep_params: Fraction of the parameters to keep, in (0, 1]; give one of the two.
        granularity: `channel` cuts whole channels; `weight` zeroes single weights.
        round_to: A layer keeps a multiple of this many channels, or all that it has (8 suits most accelerators).
        gate_linear: With `weight`: gate the weights of linear layers too.
        particles: Number of networks n; 1 is a MAP estimate, 2 the paper's twin.
        epochs: Passes over the training data, in one run without fine-tuning.
        batch_size: Examples in a step; ignored where the data is a DataLoader.
        accumulate: Parts of a batch that are computed one after the other, to save memory; their gradients add up to
            that of the whole batch. Batch norm sees one part at a time.
        recompute: Keep the inputs of a network's blocks only, and compute the rest again in the backward pass: less
            memory for about a third more time, and the same numbers.
        seed: Fixes initialisation, data order and gate noise.
        init: `given` starts every particle at the network's own weights (jittered beyond the first),
            `fresh` re-initialises each independently.
        jitter: Noise on particles beyond the first under `given`, in units of each tensor's std.
        device: `auto`, `cpu`, `cuda` or `cuda:K`.
        precision: `bfloat16` autocasts forward and backward; master weights stay float32.
        engine: `graph` captures the step as a CUDA graph, `eager` does not,
            `auto` is graph on CUDA and eager elsewhere.
        on_nan: What to do when a number breaks: `stop`, or `rollback` to the last checkpoint with half the lr.
        parallel: What processes of torchrun share: each `data` batch, the `particles`, or `both`, the particles as far
            as they divide and each batch beyond. One process alone is the same with any of them.
        sync_batch_norm: Batch norms see the whole batch where processes share it; otherwise each its own shard.
        deterministic: Ask for deterministic kernels on CUDA (CPU runs always are).
        task: `classification` (cross-entropy) or `regression` (squared error).
        noise: `constant` learns one noise level 1/d^2 for each network, `input` one for each input, 1/d(x)^2: the
            network then has one output more than there are classes or targets, and the last one is log d(x).
        likelihood: `categorical` shares the cross-entropy (one backward), `gaussian` is equation 9 to the letter.
        beta: Weight of the Stein term in the objective (equation 13), the paper's only hyperparameter.
        bandwidth: `median`, `paper` (h = log 2) or a positive number.
        blocks: One kernel for each `module`, for `all` weights together, or for each `coordinate`.
        prior: What the weights are believed to be: `spike_and_slab` (equation 10), or a prior of older methods, under
            which gates follow loss and budget alone: `laplace` (l1), `gaussian` (l2), `polarization` or `hoyer`.
        prior_scale: Width of such a prior: the scale b of Laplace, the std of Gaussian, a of polarization, 1 over the
            strength of Hoyer. The smaller, the stronger.
        polarization: t of the polarization prior (equation 6): at 1.2 small and large factors part.
        epsilon: Root precision of the spike.
        slab: Initial root precision of the slab, learned per module within `slab_bounds`.
        slab_bounds: Bounds of the learned slab precision; they keep joint MAP of weights and slab bounded. By default
            they hold `slab` and end at `epsilon`.
        slab_decay: Once gates are discrete, shrink what they ruled as the slab does, by beta slab^2 / (particles N)
            with the slab that each module has learned, instead of by `weight_decay`.
        prior_strength: `bayes` weighs the prior by 1/N, `tempered` by 1/max(N, gated weights).
        sparsity: Without a budget: strength of the hyperprior -sparsity * cost/dense on the gates.
        lr: Peak learning rate; `lr_end` closes the cosine, after `warmup` epochs of linear rise, half the run at most.
        momentum: Nesterov momentum.
        weight_decay: Shrinkage of whatever the prior does not shrink.
        lr_gates: Adam's rate for gate logits; `lr_scales` is its rate for slab precisions and d.
        gate_logit: Initial gate logit (3: gates start 95% open).
        open_until, ramp_until, discrete_at: Progress in [0, 1] at which gates start to close, the budget
            ramp reaches its target, and gates become discrete and the network is sliced.
        tau_start, tau_end: Temperature of the relaxed gates, annealed until `discrete_at`.
        draw_gates: Draw the relaxed gates in each step, or take their medians: single weights tell their gates too
            little to be heard through the noise of all the others.
        dual_step: Step of the budget's multiplier; many single weights need a faster one than channels.
        gap_penalty: Weight of the squared gap between expected cost and ramp.
        mean_weight: Share of the cross-entropy that is taken to the mean prediction of all particles, held fixed,
            instead of the labels; for classification.
        patience: Stop early when the training loss has not improved for this many epochs after
            gates are discrete (0: run all epochs).
    """

    keep_flops: float | None = None
    keep_params: float | None = None
    granularity: Granularity = "channel"
    round_to: int = 1
    gate_linear: bool = False

    particles: int = 2
    epochs: int = 60
    batch_size: int = 512
    accumulate: int = 1
    recompute: bool = False
    seed: int = 0
    init: Literal["given", "fresh"] = "given"
    jitter: float = 0.1
    device: str = "auto"
    precision: Literal["float32", "bfloat16"] = "float32"
    engine: Literal["auto", "eager", "graph"] = "auto"
    deterministic: bool = False
    parallel: Literal["data", "particles", "both"] = "data"
    sync_batch_norm: bool = False
    on_nan: Literal["stop", "rollback"] = "stop"

    task: Literal["classification", "regression"] = "classification"
    noise: Literal["constant", "input"] = "constant"
    likelihood: Literal["categorical", "gaussian"] | None = None
    beta: float = 0.1
    bandwidth: Literal["median", "paper"] | float = "median"
    blocks: Literal["module", "all", "coordinate"] = "module"
    prior: Literal["spike_and_slab", "laplace", "gaussian", "polarization", "hoyer"] = SPIKE_AND_SLAB
    prior_scale: float = 0.05
    polarization: float = 1.2
    epsilon: float | None = None
    slab: float = 20.0
    slab_bounds: tuple[float, float] | None = None
    slab_decay: bool = False
    prior_strength: Literal["bayes", "tempered"] = "bayes"
    sparsity: float | None = None

    lr: float = 0.1
    lr_end: float = 0.001
    warmup: float = 2.0
    momentum: float = 0.9
    weight_decay: float | None = None
    lr_gates: float = 0.02
    lr_scales: float = 0.01
    gate_logit: float = 3.0
    open_until: float = 0.05
    ramp_until: float = 0.35
    discrete_at: float = 0.5
    tau_start: float = 1.0
    tau_end: float = 0.1
    draw_gates: bool | None = None
    dual_step: float | None = None
    gap_penalty: float | None = None
    mean_weight: float = 0.0
    patience: int = 0

    def __post_init__(self) -> None:
        for name, hint in types_of(type(self)).items():
            if not _fits(getattr(self, name), hint):
                raise ConfigError(f"{name} = {getattr(self, name)!r}: {_wanted(hint)} is needed")
        for name in ("weight_decay", "sparsity", "dual_step", "gap_penalty"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ConfigError(f"{name} = {value}: it must not be negative")
        if self.slab_bounds is not None and not 0 < self.slab_bounds[0] <= self.slab_bounds[1] < math.inf:
            raise ConfigError(f"slab_bounds = {self.slab_bounds}: give 0 < lower <= upper")
        for name in ("keep_flops", "keep_params"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise ConfigError(f"{name} = {value} is outside (0, 1]: give the fraction to keep, for example 0.45")
        if self.keep_flops is not None and self.keep_params is not None:
            raise ConfigError("keep_flops and keep_params are both given: choose one budget")
        for name in ("particles", "epochs", "batch_size", "accumulate", "round_to"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)}: at least 1 is needed")
        if self.accumulate > self.batch_size:
            raise ConfigError(f"accumulate = {self.accumulate}: a batch of {self.batch_size} has not so many parts")
        for name in ("lr", "lr_gates", "lr_scales", "slab", "tau_start", "tau_end", "prior_scale", "polarization"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} = {getattr(self, name)}: a positive number is needed")
        for name in ("beta", "lr_end", "warmup", "jitter", "patience"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} = {getattr(self, name)}: it must not be negative")
        if self.particles > MOST_PARTICLES:
            raise ConfigError(f"particles = {self.particles}: at most {MOST_PARTICLES}")
        if not abs(self.gate_logit) <= SHUT:
            raise ConfigError(f"gate_logit = {self.gate_logit}: beyond {SHUT:g} on either side no gate could move")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum = {self.momentum} is outside [0, 1)")
        if not 0 <= self.mean_weight < 1:
            raise ConfigError(f"mean_weight = {self.mean_weight} is outside [0, 1): with 1 no label would be seen")
        if self.mean_weight and self.task == "regression":
            raise ConfigError(f"mean_weight = {self.mean_weight} is for classification: leave it out")
        if self.epsilon is not None and self.epsilon <= self.slab:
            raise ConfigError(f"epsilon = {self.epsilon} must exceed slab = {self.slab}: the spike is the narrow part")
        if not 0 <= self.open_until <= self.ramp_until <= self.discrete_at <= 1:
            raise ConfigError("the schedule must satisfy 0 <= open_until <= ramp_until <= discrete_at <= 1")
        if isinstance(self.bandwidth, (int, float)) and not 0 < self.bandwidth < math.inf:
            raise ConfigError(f"bandwidth = {self.bandwidth}: a positive number, median or paper is needed")
        for name in types_of(type(self)):
            value = getattr(self, name)
            if isinstance(value, (int, float)) and not _storable(value):
                raise ConfigError(f"{name} = {value}: a finite number that float32, or 64 bits, can hold is needed")
        if self.slab_decay and self.prior != SPIKE_AND_SLAB:
            raise ConfigError(f"slab_decay = true needs a slab: prior = {self.prior} has none, leave one of both out")
        if self.task == "regression" and self.likelihood == "categorical":
            raise ConfigError("likelihood = categorical needs task = classification: use gaussian for regression")

    def check_new(self) -> None:
        """Raise for what no run should begin with; a stored one that once did can still be read."""
        if self.prior == SPIKE_AND_SLAB and self.slab_bounds is not None and self.slab_bounds[1] > self._spike:
            raise ConfigError(
                f"slab_bounds = {self.slab_bounds} end beyond epsilon = {self._spike:g}: the spike is the narrow part, "
                "lower the upper bound or raise epsilon"
            )
        owners = {"prior_scale": ("laplace", "gaussian", "polarization", "hoyer"), "polarization": ("polarization",)}
        for name, priors in owners.items():
            value, default = getattr(self, name), getattr(Config, name)
            if value != default and self.prior not in priors:
                raise ConfigError(f"{name} = {value} is for prior = {' or '.join(priors)}: leave it out, or choose one")

    @property
    def budget(self) -> tuple[Budget, float | None]:
        """What is counted, and the fraction of it to keep; None where nothing is asked for."""
        return ("flops", self.keep_flops) if self.keep_params is None else ("params", self.keep_params)

    @property
    def _spike(self) -> float:
        """`epsilon`, or its default."""
        return self.epsilon or (100.0 if self.granularity == "channel" else 300.0)

    def outputs(self, wanted: int) -> int:
        """Outputs that a network needs for so many classes or targets."""
        return wanted + (self.noise == "input")

    def resolved(self) -> Config:
        """The same configuration with every `None` that depends on task or granularity filled in."""
        channel = self.granularity == "channel"
        epsilon = self._spike
        low, high = (0.3, 30.0) if channel else (1.0, 200.0)
        # around a slab that was chosen, and never beyond the spike: the slab is the wide part
        bounds = min(low, self.slab), min(max(high, self.slab), epsilon)
        return replace(
            self,
            likelihood=self.likelihood or ("categorical" if self.task == "classification" else "gaussian"),
            epsilon=epsilon,
            slab_bounds=self.slab_bounds or bounds,
            weight_decay=(5e-4 if channel else 1e-4) if self.weight_decay is None else self.weight_decay,
            sparsity=(1.0 if channel else 0.0) if self.sparsity is None else self.sparsity,
            draw_gates=channel if self.draw_gates is None else self.draw_gates,
            dual_step=(0.02 if channel else 0.2) if self.dual_step is None else self.dual_step,
            gap_penalty=(10.0 if channel else 50.0) if self.gap_penalty is None else self.gap_penalty,
        )

    @classmethod
    def paper(cls, **changes: Any) -> Config:
        """The paper's own setting: lr 0.1 to 0.001, batch 512, 60 epochs, equation 9, h = log 2, drawn gates."""
        preset: dict[str, Any] = dict(
            lr=0.1,
            lr_end=0.001,
            batch_size=512,
            epochs=60,
            beta=0.1,
            init="fresh",
            likelihood="gaussian",
            bandwidth="paper",
            draw_gates=True,
        )
        return cls(**{**preset, **changes})

    @classmethod
    def short(cls, **changes: Any) -> Config:
        """5 to 20 epochs from trained weights: a low lr keeps what they know, and gates move early and fast."""
        preset: dict[str, Any] = dict(
            epochs=10,
            init="given",
            lr=0.02,
            lr_end=0.0002,
            warmup=0.5,
            lr_gates=0.05,
            open_until=0.02,
            ramp_until=0.3,
            discrete_at=0.45,
        )
        return cls(**{**preset, **changes})

    def as_dict(self) -> dict[str, Any]:
        """Plain values only, ready for JSON or YAML."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Config:
        """Inverse of :meth:`as_dict`; an unknown name is an error."""
        values = dict(values)
        if values.get("slab_bounds") is not None:
            values["slab_bounds"] = tuple(values["slab_bounds"])
        try:
            return cls(**values)
        except TypeError as error:
            raise ConfigError(f"a configuration value has the wrong type: {error}") from None


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value has the annotated type; integers are floats too, booleans are neither."""
    if get_origin(hint) in (UnionType, Union):
        return any(_fits(value, part) for part in get_args(hint))
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and len(value) == 2 and all(_fits(v, float) for v in value)
    if hint in (int, float):
        return isinstance(value, (int, float) if hint is float else int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _storable(value: float) -> bool:
    """Whether a file can hold it, and a computation start from it."""
    return abs(value) <= LARGEST if isinstance(value, float) else -(2**63) <= value < 2**63


def _wanted(hint: Any) -> str:
    """An annotation in words."""
    choices = [str(c) for part in (hint, *get_args(hint)) if get_origin(part) is Literal for c in get_args(part)]
    kinds = [part.__name__ for part in (hint, *get_args(hint)) if isinstance(part, type) and part is not type(None)]
    pairs = ["two numbers" for part in (hint, *get_args(hint)) if get_origin(part) is tuple]
    return " or ".join(choices + kinds + pairs)
