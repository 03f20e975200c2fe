"""A job: one table row for one seed; its recipe, its data, and the runner that trains and evaluates its networks."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from dllp import zoo
from dllp.api import Result, prune, train_dense
from dllp.baselines import dynamic
from dllp.baselines import find_any as find_baseline
from dllp.baselines import run as baseline
from dllp.baselines.run import FINETUNE_LR, masked
from dllp.config import LONG, Config, Machine
from dllp.data import ArrayData, Dataset, StreamedData, holdout, load, ood, stratified
from dllp.data.arrays import Augment
from dllp.data.corruptions import parse
from dllp.devices.device import environment, find_device
from dllp.errors import ArtifactError
from dllp.evaluation import metrics, weight_analysis
from dllp.method import weight_laws
from dllp.posterior import Posterior, predict_data
from dllp.records import EpochRecord, ExtractedParticle, Size
from dllp.structure.groups import Structure, discover
from dllp.structure.select import select
from dllp.structure.slicing import cut
from dllp.structure.slicing import recipe as kept_channels
from dllp.training.extract import costs, extract
from dllp.training.gating import WeightGating
from dllp.training.particles import Particles
from dllp.training.state import RunState
from paper import coloured_digits, masks, peers
from paper.provenance import source
from paper.store import CLEAN, OUTSIDE

# ---- recipes: one for each network, for dense, pruned and thin rows of every table alike

SHARED: dict[str, Any] = {**LONG, "init": "fresh", "particles": 2, "batch_size": 512, "beta": 0.1, "round_to": 1}
CHANNEL: dict[str, Any] = dict(open_until=0.15, ramp_until=0.3, discrete_at=0.35, lr_gates=0.05)
WEIGHT: dict[str, Any] = dict(
    open_until=0.15, ramp_until=0.4, discrete_at=0.5, lr_gates=0.02, weight_decay=1e-3, slab_bounds=(1.0, 30.0)
)
PEAK_LR = {"resnet20": 0.4, "resnet50": 0.2, "resnet56": 0.4, "vgg11_bn": 0.2, "vgg16_bn": 0.2}

TUNED = {
    "resnet56": {
        "deephoyer": "strength=1e-05",
        "magnitude-l1": "strength=3e-05",
        "polarization": "strength=0.0003",
        "slimming": "strength=1e-05",
        "sss": "strength=1e-06",
    },
    "vgg16_bn": {
        "deephoyer": "strength=1e-05,least=0.3",
        "magnitude-l1": "strength=1e-05",
        "polarization": "strength=3e-05,least=0.2",
        "slimming": "strength=1e-05,least=0.2",
        "sss": "strength=1e-06,least=0.3",
    },
}
"""Hyperparameters of other methods by network, chosen on held-out images (results/tuning)."""


def tuned(method: str, network: str) -> str:
    """The name of a method with the hyperparameters that were chosen for it, where any were."""
    chosen = TUNED.get(network, {}).get(method)
    return f"{method}:{chosen}" if chosen else method


def recipe(network: str, granularity: str, **changes: Any) -> Config:
    """The documented default for `network`, with whatever a job changes."""
    own = CHANNEL if granularity == "channel" else WEIGHT
    values = {**SHARED, "lr": PEAK_LR.get(network, 0.1), "granularity": granularity, **own, **changes}
    return Config(**values)


def short(granularity: str, **changes: Any) -> Config:
    """The short preset, for a network that a recipe above has trained."""
    shared = {name: SHARED[name] for name in ("particles", "batch_size", "beta", "round_to", "lr", "lr_end")}
    gates = {"lr_gates": 0.05 if granularity == "channel" else 0.02}
    return Config.short(**{**shared, **gates, "granularity": granularity, **changes})


# ---- jobs

Method = Literal["dense", "dllp", "thin", "magnitude", "random", "baseline", "masked", "peer"]
BUDGETED = ("dllp", "baseline", "masked", "peer")
DERIVED = ("magnitude", "random")
"""Methods that cut the dense network of the same seed and train nothing themselves."""
OnEpoch = Callable[[EpochRecord], None]
OnStep = Callable[[RunState], None]
FLOPS_OF = {"dense": "the dense network", "channel": "the extracted network", "weight": "its non-zero weights"}
OTHER_WEIGHTS = 1000
"""Added to a seed where weights must not be those that the same seed gives elsewhere."""
MACHINE = {f.name for f in fields(Machine)}
LATER: dict[str, Any] = {"prior": "spike_and_slab", "prior_scale": 0.05, "polarization": 1.2, "noise": "constant",
                         "sync_batch_norm": False, "accumulate": 1, "draw_gates": True,
                         "slab_decay": False}  # fmt: skip
"""Fields that Config gained after results were published, with the value that means "as before": left out of digests
where they have it, so that those results keep their names."""


@dataclass(frozen=True)
class Job:
    """One run; two jobs with the same digest are the same run.

    Attributes:
        keep: Fraction of the FLOPs that is kept; 1 for dense.
        validation: Number of training images held out and evaluated on instead of the test set: every choice of a
            hyperparameter is made this way.
        pretrain: How many of the epochs train the whole network first; the rest, by the short preset, start from it.
        fraction: Share of the training images that are used; epochs are as many more as there are fewer steps in one.
        augment: Of the training images, instead of what they were loaded with.
        without: Classes that are left out of training and test, and kept as out-of-distribution inputs.
        baseline: With the method `baseline`: one of :data:`dllp.baselines.METHODS`.
        finetune: Epochs after the cut of a baseline, at `finetune_lr` times the learning rate.
        peer: With the method `peer`: one of :data:`paper.peers.PEERS`.
        mask: With the method `masked`: the weights that are trained, from the first step on.
        changes: Differences from the network's recipe.
    """

    network: str
    method: Method
    granularity: Literal["channel", "weight"] = "channel"
    keep: float = 1.0
    seed: int = 0
    epochs: int = 60
    pretrain: int = 0
    validation: int = 0
    fraction: float = 1.0
    augment: Augment | None = None
    without: tuple[str, ...] = ()
    baseline: str = ""
    finetune: int = 0
    finetune_lr: float = FINETUNE_LR
    peer: str = ""
    mask: masks.Mask | None = None
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> Config:
        """The network's recipe with the job's own settings."""
        own: dict[str, Any] = {"keep_flops": self.keep} if self.method in BUDGETED else {}
        own |= {} if self.method == "dllp" else {"particles": 1}
        if self.method == "masked":  # plain training, without the prior that DLLP's weights are under
            own["weight_decay"] = recipe(self.network, "channel").resolved().weight_decay
        own |= {"epochs": self.epochs - self.pretrain, "seed": self.seed, **self.changes}
        return short(self.granularity, **own) if self.pretrain else recipe(self.network, self.granularity, **own)

    @property
    def derived(self) -> bool:
        """True where it starts from the dense network of the same seed."""
        baseline = self.method == "baseline" and not find_baseline(self.baseline).trains
        return self.method in (*DERIVED, "peer") or baseline or self.pretrain > 0

    @property
    def dense(self) -> Job:
        """The dense network to start from, or to compare with; nobody teaches it."""
        changes = {name: value for name, value in self.changes.items() if not name.startswith("teacher")}
        return replace(
            self, method="dense", granularity="channel", keep=1.0, epochs=self.pretrain or self.epochs, pretrain=0,
            baseline="", finetune=0, finetune_lr=FINETUNE_LR, peer="", mask=None,
            changes={} if self.pretrain else changes,
        )  # fmt: skip

    @property
    def digest(self) -> str:
        """A hash of everything that decides the job's outcome, the whole configuration included.

        The job's own fields count where they are not at their defaults; `changes` count as part of the configuration.
        """
        values = {f.name: (getattr(self, f.name), f.default) for f in fields(self) if f.name != "changes"}
        own = {name: value for name, (value, default) in values.items() if value != default}
        config = self.config.resolved().identity().items()
        counted = {name: value for name, value in config if name not in MACHINE and LATER.get(name, ...) != value}
        everything = {**own, "config": counted}
        return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()[:16]


# ---- data

Split = ArrayData | StreamedData
KEPT = ("dense", "dllp", "l1-filters")
"""Methods and baselines that are evaluated on every version of the test set."""
CORRUPTIONS = ("gaussian-blur:1,2,3,5", "sharpen")
FAR = (ood.NOISE, "digits")
MOST_OUTSIDE = 2000
"""Out-of-distribution inputs of each kind: areas under curves are good to a percent with them."""


class Splits:
    """Training data of a job, and every version of the data that it is evaluated on.

    Args:
        everywhere: Evaluate :data:`KEPT` methods on every version of the test set, not on the clean one only.
    """

    def __init__(self, data: Dataset, everywhere: bool = True) -> None:
        self.data, self.everywhere = data, everywhere

    @cached_property
    def described(self) -> dict[str, Any]:
        """Name and size of the data."""
        data = self.data
        name, shape = Path(data.name).name, list(data.train.shape)
        return {"name": name, "train": len(data.train), "classes": data.num_classes, "shape": shape}

    def check(self, seen: Sequence[dict[str, Any]]) -> None:
        """Raise where finished runs saw other data than this, whatever its folder is called."""
        for data in seen:
            if {**data, "name": ""} != {**self.described, "name": ""}:
                other, own = data_text(data), data_text(self.described)
                raise ArtifactError(f"the results hold runs on other data ({other}) than {own}: give another --out")

    def of(self, job: Job) -> tuple[Split, dict[str, ArrayData]]:
        """Training data, and every version of the data to evaluate on; a held-out part is the same for every seed."""
        train, test, versions = self.data.train, self.data.test, {CLEAN: self.data.test}
        if job.augment:
            train = replace(train, augment=job.augment)
        if job.without:
            train, _ = ood.leave_out(train, self.data.classes, job.without)
            test, left = ood.leave_out(test, self.data.classes, job.without)
            versions = {CLEAN: test, OUTSIDE + ood.LEFT_OUT: left, **self._far(test)}
        elif self.data.name == coloured_digits.DATA:
            train, versions = coloured_digits.painted(load("digits"), job.seed)
        elif self._on_every_version(job):
            versions = self.test_versions
        if job.validation:
            train, held = holdout(train, job.validation, seed=0)
            versions = {CLEAN: held.decoded() if isinstance(held, StreamedData) else held}
        if job.fraction < 1:
            train = train.subset(stratified(train.y.cpu(), round(job.fraction * len(train)), job.seed))
        return train, versions

    def _on_every_version(self, job: Job) -> bool:
        """True where a job is evaluated on corrupted and out-of-distribution inputs too; never on streamed images."""
        wanted = (job.baseline or job.method) in KEPT and job.granularity == "channel" and not job.validation
        return wanted and self.everywhere and isinstance(self.data.train, ArrayData)

    @cached_property
    def test_versions(self) -> dict[str, ArrayData]:
        """The clean test set and its corrupted versions, then out-of-distribution inputs."""
        everything = [corruption for text in CORRUPTIONS for corruption in parse(text)]
        corrupted = {c.name: c.apply_to(self.data.test) for c in everything}
        return {CLEAN: self.data.test, **corrupted, **self._far(self.data.test)}

    def _far(self, test: ArrayData) -> dict[str, ArrayData]:
        found = {name: ood.find(name, test) for name in FAR}
        return {OUTSIDE + name: data.subset(range(min(len(data), MOST_OUTSIDE))) for name, data in found.items()}


def data_text(data: dict[str, Any], held_out: int = 0) -> str:
    """The data of a run in words."""
    size = "x".join(map(str, data["shape"][1:] or data["shape"]))
    less = f" ({held_out:,} of them held out)" if held_out else ""
    return f"{data['name']}: {data['train']:,} training examples{less} of {size} in {data['classes']} classes"


# ---- running a job


@dataclass(frozen=True)
class Trained:
    """Networks of a method, to be evaluated; `before` is its network before fine-tuning."""

    posterior: Posterior
    sizes: list[Size]
    dense: Size
    seconds: float
    detail: dict[str, Any] = field(default_factory=dict)
    before: Posterior | None = None


@dataclass(frozen=True)
class Outcome:
    """A job's JSON line, and (n, B, C) probabilities on each version of the evaluation data with its labels (B,)."""

    line: dict[str, Any]
    probabilities: dict[str, np.ndarray]
    labels: np.ndarray


class Runner:
    """Runs jobs on one data set; dense networks are kept, because other methods start from them.

    Args:
        everywhere: As for :class:`Splits`.
        machine: Settings that do not change what is computed: device, precision, engine.
    """

    def __init__(
        self, data: Dataset, *, everywhere: bool = True, on_epoch: OnEpoch | None = None,
        on_step: OnStep | None = None, **machine: Any,
    ) -> None:  # fmt: skip
        self.data, self.machine, self.splits = data, machine, Splits(data, everywhere)
        self.watch: dict[str, Any] = {"on_epoch": on_epoch, "on_step": on_step, "progress": False}
        self.dense_networks: dict[str, Result] = {}
        self.source = source()  # as the code is now: it may be changed while jobs run

    def run(self, job: Job) -> Outcome:
        """Train, evaluate, report."""
        config = self.config(job)
        device = find_device(config.device)
        train, versions = self.splits.of(job)
        test = versions[CLEAN]
        trained = getattr(self, f"_{job.method}")(job, replace(self.data, train=train, test=test), config)
        probabilities = {
            name: predict_data(trained.posterior, version, device).members for name, version in versions.items()
        }
        clean, labels = probabilities[CLEAN], test.y.cpu()
        line = {
            **asdict(job),
            "digest": job.digest,
            "data": self.splits.described,
            "evaluated_on": "validation" if job.validation else "test",
            "particles": [metrics.summary(p, labels) for p in clean],
            "ensemble": metrics.summary(clean.mean(0), labels),
            "macs": [size.macs for size in trained.sizes],
            "params": [size.params for size in trained.sizes],
            "dense_macs": trained.dense.macs,
            "dense_params": trained.dense.params,
            "flops_removed": [1 - size.macs / trained.dense.macs for size in trained.sizes],
            "flops_of": FLOPS_OF["dense" if job.method == "dense" else job.granularity],
            "train_seconds": trained.seconds,
            "config": config.resolved().as_dict(),
            **({} if trained.before is None else {"before": scores(trained.before, test, device)}),
            **({"start": scores(self.dense_networks[job.dense.digest].posterior, test, device)} if job.derived else {}),
            **trained.detail,
            **environment(device),
            **self.source,
            "deterministic": device.type == "cpu" or config.deterministic,
            "threads": torch.get_num_threads(),
        }
        return Outcome(line, {name: p.numpy() for name, p in probabilities.items()}, labels.numpy())

    def config(self, job: Job) -> Config:
        """The job's configuration on this machine; a fraction of the data gets as many steps as all of it."""
        config = replace(job.config, **self.machine)
        if job.fraction == 1:
            return config
        sizes = (len(self.data.train), round(job.fraction * len(self.data.train)))
        whole, part = (max(1, size // config.batch_size) for size in sizes)
        factor = whole / part
        return replace(config, epochs=max(1, round(config.epochs * factor)), warmup=config.warmup * factor)

    def _network(self, job: Job) -> nn.Module:
        size = {"in_channels": self.data.in_channels, "image_size": self.data.image_size}
        return zoo.build(job.network, self.data.num_classes - len(job.without), **size)

    # ---- methods

    def _dllp(self, job: Job, data: Dataset, config: Config) -> Trained:
        first = self._trained_dense(job, data) if job.pretrain else None
        result = prune(first.model if first else self._network(job), data, config, **self.watch)
        seconds = spent(result) + (spent(first) if first else 0)
        detail = {"widths": result.widths, "history": brief(result.history), "noise": result.gates["noise"].tolist()}
        detail |= {name: result.info[name] for name in ("log_prior", "num_data", "moments")}
        return Trained(result.posterior, result.sizes, result.dense, seconds, detail | weights(job, result))

    def _baseline(self, job: Job, data: Dataset, config: Config) -> Trained:
        """Another method by the dense network's recipe, then its fine-tuning; seconds of its choice count, too."""
        config = replace(config, weight_decay=job.dense.config.resolved().weight_decay)  # not that of DLLP's weights
        method = find_baseline(job.baseline)
        if isinstance(method, dynamic.Dynamic):
            return self._by_image(method, job, data, config)
        pruned = baseline.prune(
            method, self._network(job), data, config, finetune_epochs=job.finetune,
            finetune_lr=job.finetune_lr, trained=self._trained_dense(job, data) if job.derived else None,
            train=lambda verb, stage, model, data, config: verb(model, data, config, **self.watch),
        )  # fmt: skip
        result = pruned.result
        detail = {"widths": result.widths, "history": brief(result.history), **weights(job, pruned.before)}
        detail |= moments(job, pruned.before, result)
        first = pruned.before.posterior if pruned.after else None
        choice = result.info["choice_seconds"]
        detail |= {"choice_seconds": choice}
        return Trained(result.posterior, result.sizes, result.dense, spent(result) + choice, detail, first)

    def _by_image(self, method: dynamic.Dynamic, job: Job, data: Dataset, config: Config) -> Trained:
        """A method that chooses channels by image, from the dense network on; its cost is the evaluated images'."""
        dense = self._trained_dense(job, data)
        found, trainings = dynamic.prune(
            method, dense.model, data, config, epochs=job.finetune, lr=job.finetune_lr,
            train=lambda verb, stage, model, data, config: verb(model, data, config, **self.watch),
        )  # fmt: skip
        device = find_device(config.device)
        found.network.to(device)
        masks = torch.cat([found.masks(x.to(device)) for x in data.test.parts()])
        costs, whole = found.costs(masks), dense_size(found.structure)
        parts = zip(found.structure.groups, found.structure.slices, strict=True)
        detail = {
            "flops_of": dynamic.FLOPS_OF,
            "flops_removed_p95": [1 - float(costs.quantile(0.95)) / whole.macs],
            "gate_macs": sum(gate.macs for gate in found.gates),
            "never_open": float((masks.amax(0) == 0).double().mean()),
            "widths": {group.name: [float(masks[:, here].sum(1).mean()), group.units] for group, here in parts},
            "history": brief([record for result in trainings for record in result.history]),
        }
        posterior = Posterior([found.network.cpu()], torch.ones(1))
        seconds = spent(dense) + sum(map(spent, trainings))
        return Trained(posterior, [Size(float(costs.mean()), found.params)], whole, seconds, detail)

    def _peer(self, job: Job, data: Dataset, config: Config) -> Trained:
        """Another package, from the dense network on; its seconds are those of its search, too."""
        dense = self._trained_dense(job, data)
        config = replace(config, weight_decay=job.dense.config.resolved().weight_decay)
        found = peers.prune(
            job.peer, dense.model, data, config, epochs=job.finetune, lr=job.finetune_lr,
            train=lambda verb, stage, model, data, config: verb(model, data, config, **self.watch),
        )  # fmt: skip
        whole = dense_size(discover(dense.model, self._example()))
        history = [record for result in found.trainings for record in result.history]
        detail = {"seconds_from_dense": found.seconds, "history": brief(history)}
        first = Posterior([found.cut], torch.ones(1))
        last = found.trainings[-1].posterior
        return Trained(last, [found.size], whole, spent(dense) + found.seconds, detail, first)

    def _dense(self, job: Job, data: Dataset, config: Config) -> Trained:
        result = train_dense(self._network(job), data, config, **self.watch)
        self.dense_networks[job.digest] = copy.deepcopy(result)
        detail = {"history": brief(result.history)} | weights(job, result)
        return Trained(result.posterior, result.sizes, result.dense, spent(result), detail)

    def _trained_dense(self, job: Job, data: Dataset) -> Result:
        """The dense network that a job starts from."""
        dense = job.dense
        if dense.digest not in self.dense_networks:
            self._dense(dense, data, replace(self.config(dense), keep_flops=None, keep_params=None))
        return self.dense_networks[dense.digest]

    def _thin(self, job: Job, data: Dataset, config: Config) -> Trained:
        """The same network, every layer equally narrower, trained from scratch; several are independent."""
        network = self._network(job)
        structure = discover(network, self._example())
        ranks = [-torch.arange(group.units, dtype=torch.float64) / group.units for group in structure.groups]
        small, size, widths = self._cut(network, structure, torch.cat(ranks), job.keep)
        result = train_dense(small, data, config, **self.watch)
        detail = {"widths": widths, "history": brief(result.history)}
        return Trained(result.posterior, [size] * config.particles, dense_size(structure), spent(result), detail)

    def _masked(self, job: Job, data: Dataset, config: Config) -> Trained:
        """Fresh weights, of which only those of a mask are there and learn; a DLLP run is trained first for its own."""
        network, example = self._network(job), self._example()
        structure = discover(network, example, channels=False)
        # other weights than those that the run began with
        other = replace(config, seed=config.seed + OTHER_WEIGHTS)
        particles = Particles.start(network, other, torch.device("cpu"))
        gating = WeightGating(network, structure, particles.layout, particles.device)
        keep, seconds = self._mask(job, data, gating, config)
        particle = extract(particles, gating, keep[None], example)[0]
        present = {name: particle.network.get_parameter(name).detach() != 0 for name in particle.gated}
        result = masked(present)(particle.network, data, replace(config, init="given"), **self.watch)
        sizes, widths = costs(gating, keep[None])
        detail = {"widths": widths, "history": brief(result.history)}
        return Trained(result.posterior, sizes, dense_size(structure), seconds + spent(result), detail)

    def _mask(self, job: Job, data: Dataset, gating: WeightGating, config: Config) -> tuple[Tensor, float]:
        """(U,) weights that are there, and the seconds of the run that chose them."""
        generator = torch.Generator().manual_seed(job.seed)
        if job.mask in masks.RANDOM:
            scores = masks.random_scores(list(gating.fold.shapes.values()), job.mask, generator)
            return gating.select(scores, *config.budget), 0.0
        learned = self.config(replace(job, method="dllp", mask=None))
        run = prune(self._network(job), data, learned, **self.watch)
        keep = run.gates["keep"][0]
        return (masks.shuffled(keep, gating.fold.sizes, generator) if job.mask == "shuffled" else keep), spent(run)

    def _magnitude(self, job: Job, data: Dataset, config: Config) -> Trained:
        """The dense network's channels with the largest filters, relative to their layer; no fine-tuning."""

        def score(network: nn.Module, structure: Structure) -> Tensor:
            scores = []
            for group in structure.groups:
                weight = network.get_submodule(group.name).weight.detach()  # type: ignore[union-attr, operator]
                norms = weight.abs().flatten(1).sum(1).double()
                scores.append(norms / norms.mean())
            return torch.cat(scores)

        return self._derived(job, data, score)

    def _random(self, job: Job, data: Dataset, config: Config) -> Trained:
        """Random channels of the dense network; no fine-tuning."""
        generator = torch.Generator().manual_seed(job.seed)
        return self._derived(job, data, lambda _, s: torch.rand(s.units, generator=generator))

    def _derived(self, job: Job, data: Dataset, score: Callable[[nn.Module, Structure], Tensor]) -> Trained:
        dense = self._trained_dense(job, data)
        network = dense.model
        structure = discover(network, self._example())
        small, size, widths = self._cut(network, structure, score(network, structure), job.keep)
        posterior = Posterior([small.eval()], torch.ones(1))
        return Trained(posterior, [size], dense_size(structure), spent(dense), {"widths": widths})

    def _example(self) -> Tensor:
        return self.data.test.inputs(slice(0, 2)).cpu()

    def _cut(
        self, network: nn.Module, structure: Structure, scores: Tensor, keep: float
    ) -> tuple[nn.Module, Size, dict[str, list[int]]]:
        """The network cut to the units with the highest scores, its cost, and kept and all units of each group."""
        chosen = select(structure, scores, cost=structure.flops, keep=keep)
        gates = chosen.double()
        size = Size(float(structure.flops.expected(gates)), round(float(structure.params.expected(gates))))
        parts = zip(structure.groups, structure.slices, strict=True)
        widths = {group.name: [int(chosen[part].sum()), group.units] for group, part in parts}
        return cut(network, kept_channels(network, structure.groups, chosen)), size, widths


def scores(posterior: Posterior, test: ArrayData, device: torch.device) -> dict[str, float]:
    """Metrics of one network: before it was fine-tuned, or the whole one that a job started from."""
    found = predict_data(posterior, test, device)
    return metrics.summary(found.members[0], found.labels)


def spent(result: Result) -> float:
    """Seconds of all its epochs."""
    return sum(record["seconds"] for record in result.history)


def weights(job: Job, result: Result) -> dict[str, Any]:
    """The distribution of the weights, for jobs that prune single weights (Section 9).

    Of particles behind the first the statistics of kept weights only; of all a sample of these, for later tests.
    """
    if job.granularity != "weight":
        return {}
    parts = [weight_analysis.split(particle) for particle in result.particles]
    pooled = [weight_laws.pooled([layer["kept"] for layer in layers.values()]) for layers in parts]
    samples = [np.round(weight_laws.thinned(kept, weight_laws.DIP_SAMPLE), 4).tolist() for kept in pooled]
    shapes = [weight_laws.describe(kept, fits=False) for kept in pooled[1:]]
    others = [
        {"kept": None if shape is None else asdict(shape), "sample": sample}
        for shape, sample in zip(shapes, samples[1:], strict=True)
    ]
    study = weight_analysis.study(parts[0], weight_analysis.weights(result.particles[0].reference))
    return {"distribution": {**study, "sample": samples[0], "others": others}}


def moments(job: Job, cut: Result, end: Result) -> dict[str, Any]:
    """The shape of a baseline's kept weights just after the cut and at the end, as lines of DLLP have it."""
    if job.granularity != "weight":
        return {}
    pairs = (("after", cut), ("end", end))
    return {"moments": [{"name": name, "shapes": [kept_shape(result.particles[0])]} for name, result in pairs]}


def kept_shape(particle: ExtractedParticle) -> dict[str, Any] | None:
    """Figures of a particle's kept weights, layers standardised; None for too few."""
    kept = weight_laws.pooled([layer["kept"] for layer in weight_analysis.split(particle).values()])
    shape = weight_laws.describe(kept, fits=False)
    return shape and {"kept": len(kept), "near_zero": shape.near_zero, "ks": shape.ks, "dip_p": shape.dip_p}


def dense_size(structure: Structure) -> Size:
    """The cost of the whole network."""
    return Size(structure.flops.dense, round(structure.params.dense))


def brief(history: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records without the counts of gates by module, which would be most of a line."""
    return [{name: value for name, value in record.items() if name != "gates"} for record in history]


def epochs_after_cut(line: Mapping[str, Any]) -> int:
    """Epochs of a finished run that trained a network whose gates were decided."""
    return sum(record["phase"] == "discrete" for record in line.get("history", ()))
