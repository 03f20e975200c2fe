"""The configuration of a run in five groups, with flat names: the one place where a default stands.

Section numbers refer to docs/method. ``None`` means "by granularity", of `likelihood` "by task", of the schedule and
its rates "by what the network has learned and by the batches", and :meth:`Config.resolved` fills it in; of
`keep_flops`, `keep_params` and `keep_latency` it means no budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, wraps
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from dllp.errors import ConfigError, nearest

T = TypeVar("T")
Granularity = Literal["channel", "weight"]
Counted = Literal["flops", "params", "latency"]
Units = Literal["channels", "blocks", "both"]
COUNTED = {"flops": "FLOPs", "params": "parameters", "latency": "time"}
"""Budgets in words."""
SPIKE_AND_SLAB = "spike_and_slab"
ADAMW_LR, ADAMW_LARGEST = 0.001, 0.05
"""Default and largest learning rate of AdamW, whose steps are of its size: SGD's would throw weights away."""
LARGEST = 3.4028234663852886e38
"""The largest number that float32 holds."""


@dataclass(frozen=True)
class Rule:
    """A condition on a value, written beside its type, and the words for its violation."""

    holds: Callable[[Any], bool]
    text: str


Count = Annotated[int, Rule(lambda v: v >= 1, "at least 1 is needed")]
Positive = Annotated[float, Rule(lambda v: 0 < v < math.inf, "a positive number is needed")]
NotNegative = Annotated[float, Rule(lambda v: 0 <= v < math.inf, "it must not be negative")]
NotNegativeInt = Annotated[int, Rule(lambda v: v >= 0, "it must not be negative")]
Share = Annotated[float, Rule(lambda v: 0 < v <= 1, "give the fraction to keep, in (0, 1], for example 0.45")]
BelowOne = Annotated[float, Rule(lambda v: 0 <= v < 1, "it must be in [0, 1)")]
Bounds = Annotated[tuple[float, float], Rule(lambda v: 0 < v[0] <= v[1] < math.inf, "give 0 < lower <= upper")]


@cache
def types_of(cls: type) -> Mapping[str, Any]:
    """The types of a dataclass's fields, without their rules: worked out once, every configuration is held to them."""
    return MappingProxyType(get_type_hints(cls))


@cache
def _rules_of(cls: type) -> Mapping[str, Rule]:
    """The rules of a dataclass's fields that have one."""
    found = {}
    for name, hint in get_type_hints(cls, include_extras=True).items():
        for part in (hint, *get_args(hint)):
            if get_origin(part) is Annotated:
                found[name] = get_args(part)[1]
    return MappingProxyType(found)


def _names_checked(cls: type[T]) -> type[T]:
    """A dataclass that answers an unknown name with the nearest one that it knows, where Python has a TypeError."""
    init, known = cls.__init__, types_of(cls)

    @wraps(init)
    def checked(self: T, *values: Any, **named: Any) -> None:
        for name in named:
            if name not in known:
                hint = nearest(name, known, "see dllp.Config for the list")
                raise ConfigError(f"unknown configuration name {name!r}: {hint}")
        init(self, *values, **named)

    cls.__init__ = checked
    return cls


def _changeable(default: Any) -> Any:
    """A field that a run may change when it is resumed."""
    return field(default=default, metadata={"changeable": True})


OPEN = (
    "round_to", "epochs", "open_until", "ramp_until", "discrete_at", "teacher", "batch_size", "lr", "lr_end", "warmup",
    "lr_gates",
)  # fmt: skip
"""Fields that wait for network and data: None until :meth:`Config.resolved`, whose readers find the annotated type."""
WAITS: Any = None


@dataclass(frozen=True)
class Budget:
    """The units to remove, and how many of them.

    Args:
        keep_flops: Fraction of the multiply-accumulates to keep, in (0, 1]. Without this and without
            `keep_params` the prior and `sparsity` decide (natural sparsity).
        keep_params: Fraction of the parameters to keep, in (0, 1]; give one budget.
        keep_latency: Fraction of the dense network's time to keep, in (0, 1]: on a `--profile`, or as measured here.
        granularity: `channel` cuts whole channels; `weight` zeroes single weights.
        units: With `channel`: `channels` (heads and widths, too), `blocks`, each residual branch as a whole, or `both`;
            by default channels, and with keep_latency both.
        round_to: A layer keeps a multiple of this many channels, or all that it has. By default 8, which most runtimes
            are made for, where all layers are wide enough, and 1 elsewhere.
        even: Layers that were equally wide keep equally many channels, as one `config.json` of Hugging Face can say.
        gate_linear: With `weight`: gate the weights of linear layers too.
        sparsity: Without a budget: strength of the hyperprior -sparsity * cost/dense on the gates.
    """

    keep_flops: Share | None = None
    keep_params: Share | None = None
    keep_latency: Share | None = None
    granularity: Granularity = "channel"
    units: Units | None = None
    round_to: Count = WAITS
    even: bool = False
    gate_linear: bool = False
    sparsity: NotNegative | None = None


@dataclass(frozen=True)
class Prior:
    """The probabilistic model: particles, likelihood, prior, and the weight of the Stein term.

    Args:
        particles: Number of networks n; 1 is a MAP estimate, two or more tell how sure they are.
        task: `classification` (cross-entropy, of one label for each example, token or pixel), `binary` (one or several
            yes-or-no outputs) or `regression` (squared error).
        noise: `constant` learns one noise level 1/d^2 for each network, `input` one for each input, 1/d(x)^2: the
            network then has one output more than there are classes or targets, and the last one is log d(x).
        likelihood: `categorical` shares the cross-entropy (one backward), `gaussian` is equation 9 to the letter.
        beta: Weight of the Stein term in the objective (equation 13), the paper's only hyperparameter.
        bandwidth: `median`, `paper` (h = log 2) or a positive number.
        blocks: One kernel for each `module`, for `all` weights together, or for each `coordinate`.
        prior: Density of the weights: `spike_and_slab` (equation 10), or a prior of older methods, under
            which gates follow loss and budget alone: `laplace` (l1), `gaussian` (l2), `polarization` or `hoyer`.
        prior_scale: Width of such a prior: the scale b of Laplace, the std of Gaussian, a of polarization, 1 over the
            strength of Hoyer. The smaller, the stronger.
        epsilon: Root precision of the spike.
        slab: Initial root precision of the slab, learned per module within `slab_bounds`.
        slab_bounds: Bounds of the learned slab precision; they keep joint MAP of weights and slab bounded. By default
            they hold `slab` and end at `epsilon`.
    """

    particles: Annotated[int, Rule(lambda v: 1 <= v <= 4096, "at least 1 is needed, and at most 4096")] = 1
    task: Literal["classification", "binary", "regression"] = "classification"
    noise: Literal["constant", "input"] = "constant"
    likelihood: Literal["categorical", "gaussian"] | None = None
    beta: NotNegative = 0.1
    bandwidth: Literal["median", "paper"] | float = "median"
    blocks: Literal["module", "all", "coordinate"] = "module"
    prior: Literal["spike_and_slab", "laplace", "gaussian", "polarization", "hoyer"] = SPIKE_AND_SLAB
    prior_scale: Positive = 0.05
    epsilon: float | None = None
    slab: Positive = 20.0
    slab_bounds: Bounds | None = None


@dataclass(frozen=True)
class Schedule:
    """The course of a run: its length, its phases, and its gates on the way from open to decided.

    What is not given follows the start: a trained network gets 30 epochs with itself as teacher, gates that move early,
    and most of the run to repair the cut (:func:`trained_schedule`); any other 60 epochs (:data:`LONG`).

    Args:
        epochs: Passes over the training data, in one run; those after `discrete_at` train the cut network. With 0 no
            weight moves: one particle is cut by what a few batches tell.
        open_until, ramp_until, discrete_at: Progress in [0, 1] at which gates start to close, the budget
            ramp reaches its target, and gates become discrete and the network is sliced.
        draw_gates: Draw the relaxed gates in each step, or take their medians, the default for single weights: the
            gradient of one weight's gate would drown in the noise of all the others.
        teacher: Who teaches beside the labels: `given`, the network that is pruned as it was handed over, or
            `posterior`, the mean prediction of all particles, for classification.
        teacher_weight: Fraction of the loss that is taken to the teacher's predictions instead of the labels.
        teacher_temperature: Divides the logits of teacher and particles in that part of the loss.
        teacher_from: Progress in [0, 1] at which the teacher begins.
        patience: Stop early when the training loss has not improved for this many epochs after
            gates are discrete (0: run all epochs).
    """

    epochs: NotNegativeInt = WAITS
    open_until: float = WAITS
    ramp_until: float = WAITS
    discrete_at: float = WAITS
    draw_gates: bool | None = None
    teacher: Literal["off", "given", "posterior"] = WAITS
    teacher_weight: BelowOne = 0.5
    teacher_temperature: Positive = 2.0
    teacher_from: BelowOne = 0.0
    patience: NotNegativeInt = 0


@dataclass(frozen=True)
class Optimizer:
    """Where training starts, and how it moves.

    Args:
        seed: Fixes initialisation, data order and gate noise.
        init: `given` starts every particle at the network's own weights (jittered beyond the first),
            `fresh` re-initialises each independently.
        batch_size: Examples in a step, by default 64 of fewer than 10,000 and 512 of more; a DataLoader has its own.
        accumulate: Parts of a batch that are computed one after the other, to save memory; their gradients add up to
            that of the whole batch. Batch norm sees one part at a time.
        sync_batch_norm: Batch norms see the whole batch where processes share it; otherwise each its own shard.
        optimizer: `sgd` with Nesterov momentum, or `adamw`, equation 15 divided by Adam's second moment.
        lr: Peak learning rate; `lr_end` closes the cosine, after `warmup` epochs of linear rise, half the run at most.
            By default 0.1 to 0.001; for a trained network it follows data and batch.
        momentum: Nesterov momentum; Adam's first inertia.
        weight_decay: Shrinkage of whatever the prior does not shrink; of `adamw` apart from the gradient.
        lr_gates: Adam's rate for gate logits.
        on_nan: Reaction to a number that breaks: `stop`, or `rollback` to the last checkpoint with half the lr.
    """

    seed: int = 0
    init: Literal["given", "fresh"] = "given"
    batch_size: Count = WAITS
    accumulate: Count = 1
    sync_batch_norm: bool = False
    optimizer: Literal["sgd", "adamw"] = "sgd"
    lr: Positive = WAITS
    lr_end: NotNegative = WAITS
    warmup: NotNegative = WAITS
    momentum: BelowOne = 0.9
    weight_decay: NotNegative | None = None
    lr_gates: Positive = WAITS
    on_nan: Literal["stop", "rollback"] = _changeable("stop")


@dataclass(frozen=True)
class Machine:
    """How a run is computed, not what: none of it counts in the digest of a published result.

    Args:
        device: `auto`, `cpu`, `cuda` or `cuda:K`.
        precision: `bfloat16` and `float16` autocast forward and backward; master weights stay float32. float16 is for
            CUDA: its losses are scaled, and a step whose gradients overflow is skipped.
        engine: `graph` captures the step as a CUDA graph, `eager` does not,
            `auto` is graph on CUDA and eager elsewhere.
        deterministic: Ask for deterministic kernels on CUDA (CPU runs always are).
        recompute: Keep the inputs of a network's blocks only, and compute the rest again in the backward pass: less
            memory for about a third more time, and the same numbers.
        parallel: What processes of torchrun share: each `data` batch, the `particles`, or `both`, the particles as far
            as they divide and each batch beyond. One process alone is the same with any of them.
    """

    device: str = _changeable("auto")
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    engine: Literal["auto", "eager", "graph"] = _changeable("auto")
    deterministic: bool = False
    recompute: bool = _changeable(False)
    parallel: Literal["data", "particles", "both"] = _changeable("data")


BATCH = 512
"""Examples in a step of a large data set."""
SMALL, SMALL_BATCH = 10_000, 64
"""Fewer training examples than this are taken in batches of so many."""
LONG: dict[str, Any] = dict(
    epochs=60, open_until=0.05, ramp_until=0.35, discrete_at=0.5, teacher="off", lr=0.1, lr_end=0.001, warmup=2.0,
    lr_gates=0.02,
)  # fmt: skip
"""The schedule of a network that learns its task in the run."""
TRAINED_EPOCHS = 30
TRAINED_LR, MOST_GAIN, MANY = 0.1, 2.0, 40_000
"""Peak rate of a trained network that sees at least so many examples, and how much higher it is for few."""
LARGE_BATCH, ENOUGH_EPOCHS, ENOUGH_STEPS, FEW_STEPS = 128, 15, 200, 1000
"""In smaller batches and shorter runs the weights move slower; in few steps the gates move twice as fast."""


def usual_batch(examples: int) -> int:
    """Examples in a step where nobody chose."""
    return SMALL_BATCH if examples < SMALL else BATCH


def trained_schedule(granularity: str) -> dict[str, Any]:
    """The schedule of a trained network, for 5 to 60 epochs, without its rates."""
    shared: dict[str, Any] = dict(epochs=TRAINED_EPOCHS, teacher="given", warmup=1.0, open_until=0.02)
    if granularity == "weight":
        return shared | dict(ramp_until=0.3, discrete_at=0.4, weight_decay=1e-3)
    return shared | dict(ramp_until=0.25, discrete_at=0.3)


def trained_rates(granularity: str, batch_size: int, epochs: int, steps: int | None) -> dict[str, float]:
    """Rates of a trained network: higher on few examples, lower in small batches and short runs (see results/tuning).

    Args:
        steps: Steps in an epoch, where they are known: in few the gates must move fast, and weights cannot recover
            from high rates.
    """
    total, examples = (math.inf, math.inf) if steps is None else (steps * epochs, steps * batch_size)
    gain = min(max(math.sqrt(MANY / examples), 1.0), MOST_GAIN)
    length = min(1.0, epochs / ENOUGH_EPOCHS, total / ENOUGH_STEPS)
    lr = TRAINED_LR * gain * (min(1.0, batch_size / LARGE_BATCH) * length) ** 0.75
    gates = 0.02 if granularity == "weight" else 0.1 if total < FEW_STEPS else 0.05
    return dict(lr=lr, lr_end=lr / 100, lr_gates=gates)


def _in_order(config: Config, values: dict[str, Any]) -> dict[str, Any]:
    """Defaults of the phases that do not contradict those that were chosen: open before ramp before discrete."""
    names = ("open_until", "ramp_until", "discrete_at")
    for i, name in enumerate(names):
        if name in values:
            before = [v for other in names[:i] if (v := getattr(config, other)) is not None]
            after = [v for other in names[i + 1 :] if (v := getattr(config, other)) is not None]
            values[name] = min(max([values[name], *before]), *after, 1.0)
    return values


@_names_checked
@dataclass(frozen=True)
class Config(Machine, Optimizer, Schedule, Prior, Budget):
    """How one network is pruned: :class:`Budget`, :class:`Prior`, :class:`Schedule`, :class:`Optimizer`, and
    :class:`Machine`, whose fields are given by their flat names: `Config(keep_flops=0.45, epochs=30)`.
    """

    def __post_init__(self) -> None:
        rules, unresolved = _rules_of(type(self)), self.unresolved
        for name, hint in types_of(type(self)).items():
            value = getattr(self, name)
            if name in unresolved:
                continue
            if not fits(value, hint):
                raise ConfigError(f"{name} = {value!r}: {in_words(hint)} is needed")
            if value is not None and name in rules and not rules[name].holds(value):
                raise ConfigError(f"{name} = {value}: {rules[name].text}")
            if isinstance(value, (int, float)) and not _storable(value):
                raise ConfigError(f"{name} = {value}: a finite number that float32, or 64 bits, can hold is needed")
        budgets = [f"keep_{name}" for name in COUNTED if getattr(self, f"keep_{name}") is not None]
        if len(budgets) > 1:
            raise ConfigError(f"{' and '.join(budgets)} are both given: choose one budget")
        if self.keep_latency is not None and self.granularity == "weight":
            raise ConfigError("keep_latency needs granularity = channel: zeros among weights save no time")
        if self.keep_latency is not None and self.round_to is not None and self.round_to > 1:
            raise ConfigError(
                f"round_to = {self.round_to}: with keep_latency the profile's widths decide, leave it out"
            )
        if self.even and (self.units in ("blocks", "both") or self.keep_latency is not None):
            raise ConfigError("even = True cuts channels by FLOPs or parameters: leave out units and keep_latency")
        if self.granularity == "weight" and self.units not in (None, "channels"):
            raise ConfigError(f"units = {self.units} are no single weights: leave out granularity = weight, or units")
        if "batch_size" not in unresolved and self.accumulate > self.batch_size:
            raise ConfigError(f"accumulate ({self.accumulate}) must not exceed batch_size ({self.batch_size})")
        if self.teacher == "posterior" and self.task == "regression":
            raise ConfigError("teacher = posterior is for classification: use given, or leave it out")
        if self.epsilon is not None and self.epsilon <= self.slab:
            raise ConfigError(f"epsilon = {self.epsilon} must exceed slab = {self.slab}: the spike is the narrow part")
        phases = [p for p in (self.open_until, self.ramp_until, self.discrete_at) if p is not None]
        if not phases == sorted(phases) or not all(0 <= p <= 1 for p in phases):
            raise ConfigError("the schedule must satisfy 0 <= open_until <= ramp_until <= discrete_at <= 1")
        if isinstance(self.bandwidth, (int, float)) and not 0 < self.bandwidth < math.inf:
            raise ConfigError(f"bandwidth = {self.bandwidth}: a positive number, median or paper is needed")
        if self.task == "regression" and self.likelihood == "categorical":
            raise ConfigError("likelihood = categorical needs task = classification: use gaussian for regression")
        if self.task == "binary" and (self.likelihood == "gaussian" or self.noise == "input"):
            raise ConfigError(
                "task = binary has no noise of equation 9: use likelihood = categorical, noise = constant"
            )
        if self.optimizer == "adamw" and self.lr is not None and self.lr > ADAMW_LARGEST:
            raise ConfigError(f"lr = {self.lr} is a rate of SGD: give lr for optimizer = adamw, such as 0.001")

    def check_new(self) -> None:
        """Raise for what no run should begin with; a stored one that once did can still be read."""
        if self.prior == SPIKE_AND_SLAB and self.slab_bounds is not None and self.slab_bounds[1] > self._spike:
            raise ConfigError(
                f"slab_bounds = {self.slab_bounds} end beyond epsilon = {self._spike:g}: the spike is the narrow part, "
                "lower the upper bound or raise epsilon"
            )
        if self.prior_scale != Config.prior_scale and self.prior == SPIKE_AND_SLAB:
            others = "laplace, gaussian, polarization or hoyer"
            raise ConfigError(f"prior_scale = {self.prior_scale} is for prior = {others}: leave it out, or choose one")

    @property
    def budget(self) -> tuple[Counted, float | None]:
        """The counted cost, and the fraction of it to keep; None without a budget."""
        if self.keep_latency is not None:
            return "latency", self.keep_latency
        return ("flops", self.keep_flops) if self.keep_params is None else ("params", self.keep_params)

    @property
    def usual_units(self) -> Units:
        """`units`, or their default."""
        return self.units or ("channels" if self.keep_latency is None else "both")

    @property
    def _spike(self) -> float:
        """`epsilon`, or its default."""
        return self.epsilon or (100.0 if self.granularity == "channel" else 300.0)

    def outputs(self, wanted: int) -> int:
        """Outputs that a network needs for so many classes or targets."""
        return wanted + (self.noise == "input")

    @property
    def unresolved(self) -> frozenset[str]:
        """Names of the fields of :data:`OPEN` that are not filled in."""
        return frozenset(name for name in OPEN if getattr(self, name) is None)

    def resolved(self, *, trained: bool = False, batch_size: int = BATCH, steps: int | None = None) -> Config:
        """The same configuration with every `None` filled in that stands for a default.

        Args:
            trained: The network has learned its task already, and starts as it is given.
            batch_size: Examples in a step, where the configuration does not say it.
            steps: Steps in an epoch, where they are known.
        """
        channel = self.granularity == "channel"
        epsilon = self._spike
        low, high = (0.3, 30.0) if channel else (1.0, 200.0)
        # around a slab that was chosen, and never beyond the spike: the slab is the wide part
        bounds = min(low, self.slab), min(max(high, self.slab), epsilon)
        batch_size = self.batch_size or batch_size
        schedule = LONG
        if trained:
            rates = trained_rates(self.granularity, batch_size, self.epochs or TRAINED_EPOCHS, steps)
            schedule = trained_schedule(self.granularity) | rates
        usual = {"weight_decay": 5e-4 if channel else 1e-4} | schedule
        usual |= {
            "batch_size": batch_size,
            "round_to": 1,
            "units": self.usual_units,
            "likelihood": "gaussian" if self.task == "regression" else "categorical",
            "epsilon": epsilon,
            "slab_bounds": bounds,
            "sparsity": 1.0 if channel else 0.0,
            "draw_gates": channel,
        }
        if self.optimizer == "adamw":
            usual |= {"lr": ADAMW_LR, "lr_end": (self.lr or ADAMW_LR) / 100, "weight_decay": 0.01}
        elif trained and self.lr is not None:
            usual["lr_end"] = self.lr / 100
        values = {name: value for name, value in usual.items() if getattr(self, name) is None}
        return replace(self, **_in_order(self, values))

    @classmethod
    def paper(cls, **changes: Any) -> Config:
        """Algorithm 1 as printed: a drawn Bernoulli gate for each weight, one kernel with h = log 2, equation 9, lr 0.1
        to 0.001, batch 512, 60 epochs, extraction after the last one. docs/method.md lists what still differs.
        """
        preset: dict[str, Any] = dict(
            granularity="weight", draw_gates=True, blocks="all", bandwidth="paper", likelihood="gaussian", beta=0.1,
            particles=2, init="fresh", lr=0.1, lr_end=0.001, batch_size=512, epochs=60, discrete_at=1.0,
        )  # fmt: skip
        return cls(**{**preset, **changes})

    @classmethod
    def short(cls, **changes: Any) -> Config:
        """The schedule for trained networks, whatever the network knows: 5 to 60 epochs, taught by its own weights.

        :func:`dllp.prune` chooses it by itself for a network that has learned its task. Rates wait for the batches.
        """
        preset = trained_schedule(changes.get("granularity", "channel"))
        return cls(**{"init": "given", **preset, **changes})

    def as_dict(self) -> dict[str, Any]:
        """Plain values only, ready for JSON or YAML."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Config:
        """Inverse of :meth:`as_dict`, also of earlier versions, whose retired options are dropped."""
        values = {name: value for name, value in values.items() if name not in RETIRED}
        if isinstance(values.get("slab_bounds"), list):
            values["slab_bounds"] = tuple(values["slab_bounds"])
        try:
            return cls(**values)
        except TypeError as error:
            raise ConfigError(f"a configuration value has the wrong type: {error}") from None

    def identity(self) -> dict[str, Any]:
        """All that digests and fingerprints count: :meth:`as_dict` with the values that retired options had.

        Options of a teacher count where there is one, the optimizer where it is not SGD, the units where they are not
        channels, a latency where it is the budget, and an even cut where it is asked for, so that runs without keep the
        names they had before.
        """
        values = self.as_dict() | {name: value[self.granularity] for name, value in RETIRED.items()}
        taught = self.teacher != "off"
        if self.optimizer == "sgd":
            del values["optimizer"]
        if self.units in (None, "channels"):
            del values["units"]
        if self.keep_latency is None:
            del values["keep_latency"]
        if not self.even:
            del values["even"]
        return {name: value for name, value in values.items() if taught or not name.startswith("teacher")}


def _both(value: Any) -> dict[str, Any]:
    return {"channel": value, "weight": value}


RETIRED: Mapping[str, Mapping[str, Any]] = {
    "jitter": _both(0.1),
    "gate_logit": _both(3.0),
    "lr_scales": _both(0.01),
    "tau_start": _both(1.0),
    "tau_end": _both(0.1),
    "polarization": _both(1.2),
    "mean_weight": _both(0.0),
    "prior_strength": _both("bayes"),
    "slab_decay": _both(False),
    "dual_step": {"channel": 0.02, "weight": 0.2},
    "gap_penalty": {"channel": 10.0, "weight": 50.0},
}
"""Options of version 0.1.0 that no published table had changed, by granularity: constants today."""


def check_retired(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without retired options; one that is not at its constant is an error, because it would do nothing."""
    granularity = values.get("granularity", "channel")
    for name in RETIRED.keys() & values.keys():
        constant = RETIRED[name][granularity if granularity in RETIRED[name] else "channel"]
        if values[name] not in (None, constant):
            raise ConfigError(f"{name} = {values[name]} is no option any more, it is always {constant}: remove it")
    return {name: value for name, value in values.items() if name not in RETIRED}


def changeable() -> set[str]:
    """Names of the fields that a run may change when it is resumed."""
    return {f.name for f in fields(Config) if f.metadata.get("changeable")}


def fits(value: Any, hint: Any) -> bool:
    """True where a value has the annotated type; integers are floats too, booleans are neither."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (UnionType, Union):
        return any(fits(value, part) for part in inner)
    if origin is Literal:
        return value in inner
    if origin is tuple:
        return isinstance(value, tuple) and len(value) == len(inner) and all(map(fits, value, inner))
    if origin is list:
        return isinstance(value, list) and all(fits(part, inner[0]) for part in value)
    if origin is dict:
        return isinstance(value, dict) and all(fits(k, inner[0]) and fits(v, inner[1]) for k, v in value.items())
    if hint in (int, float):
        return isinstance(value, (int, float) if hint is float else int) and not isinstance(value, bool)
    return hint is Any or isinstance(value, hint)


def _storable(value: float) -> bool:
    """True where a file can hold it, and a computation start from it."""
    return abs(value) <= LARGEST if isinstance(value, float) else -(2**63) <= value < 2**63


def in_words(hint: Any) -> str:
    """An annotated type in words, for errors."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (UnionType, Union):
        return " or ".join(in_words(part) for part in inner if part is not NoneType)
    if origin is Literal:
        return ", ".join(map(str, inner))
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    words |= {tuple: "two numbers such as [0.3,30]", list: "a list"}
    return words.get(origin or hint, "an object")
