"""The method as an optimiser: a user's own loop computes the losses of the particles, and `step` moves them."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dllp.api import Result, check_groups, collect, new_config
from dllp.config import Config
from dllp.devices import trees
from dllp.devices.device import check_precision, check_repeatable, find_device
from dllp.devices.mesh import Axis, Place, merged
from dllp.errors import ArtifactError, ConfigError, StructureError, check_callable, check_count
from dllp.prepare import (
    Data,
    Prepared,
    as_float32,
    check_loss,
    evaluation_batches,
    make_gating,
    positional,
)
from dllp.records import EpochRecord, Phase
from dllp.structure.groups import FilterFn, discover
from dllp.structure.trace import check_network
from dllp.training import health
from dllp.training.forward import called_by, estimating
from dllp.training.moments import gates_now, measure
from dllp.training.objective import LossFn, Metrics, Objective, Outcome
from dllp.training.particles import Particles
from dllp.training.snapshot import restore, snapshot
from dllp.training.state import HEALTH_CHECK, Groups, RunState
from dllp.training.step import advance, decide, gates, scheduled_lr, set_knobs
from dllp.training.teacher import Taught, Teacher, softened, taught_loss
from dllp.training.trainer import record

OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Pruner(torch.optim.Optimizer):
    """Prunes a network in a training loop of the user's own.

    The loss is the negative mean log-likelihood of equation 11, whatever it is; its backward reaches the gates as it
    reaches the weights. Gradients may be accumulated, clipped and scaled as with any optimiser, and learning-rate
    schedulers of PyTorch take the place of the configuration's schedule. Where torch.distributed is initialised each
    process computes the loss of its own part of a batch, and gradients are averaged here.

    Args:
        model: Any network; it is copied, and left as it was.
        example: A batch that it takes: a tensor, a tuple of its arguments, or a dict of them by name.
        config: How; `config.epochs` only gives `warmup` its unit, and batch sizes are the loop's own. `options` are its
            fields, instead of it or beside it.
        num_data: N, the labels of the training set: examples, or tokens or pixels that the loss is a mean over.
        steps: Calls of :meth:`step` until the end of the run.
        filter_fn: `filter_fn(module, name)` says what may be touched.
        groups: `groups(name, parameter)` gives factors of `lr` and `weight_decay`.
        optimizer: Builds another optimiser of the given parameters; it then takes the steps, of gradients in which the
            Stein direction and the prior are, with its own rate and decay. A scheduler may be built on either. Or
            the option, such as `adamw`.
        gates: False trains the networks as they are, without gates, prior and Stein term.
        validation: Data to measure on where the gates are decided, at the end, and by :meth:`end_epoch`; with `loss`
            and `metrics` as for :func:`dllp.prune`. No step learns from it.

    Attributes:
        networks: The particles, instances of the model's own class; called, they apply their gates. Once these are
            decided they are the small networks.
        teacher: With `Config(teacher="given")` the model as it was given, frozen; its outputs are for :meth:`taught`.
        inner: What `optimizer` built.
    """

    def __init__(
        self, model: nn.Module, example: Any, config: Config | None = None, *, num_data: int, steps: int,
        filter_fn: FilterFn | None = None, groups: Groups | None = None,
        optimizer: OptimizerFactory | str | None = None, gates: bool = True, validation: Data | None = None,
        loss: LossFn | None = None, metrics: Metrics | None = None, **options: Any,
    ) -> None:  # fmt: skip
        check_count(num_data=num_data, steps=steps)
        if isinstance(optimizer, str):  # the option of the same name
            options, optimizer = {**options, "optimizer": optimizer}, None
        check_callable(optimizer=optimizer, groups=groups, filter_fn=filter_fn)
        config = new_config(config, steps, options)
        if config.likelihood == "gaussian" and config.task != "regression":
            raise ConfigError("likelihood = gaussian needs labels, and an own loop has losses only: leave it out")
        if config.teacher == "posterior":
            raise ConfigError("teacher = posterior needs all predictions at once: use given, or dllp.prune")
        check_network(model)
        model = as_float32(model)
        device = find_device(config.device)
        check_repeatable(device, config.deterministic)
        check_precision(device, config.precision)
        channels = gates and config.granularity == "channel"
        self.example = positional(model, *trees.arguments(example))
        kinds: dict[str, Any] = {"channels": channels, "units": config.units, "even": config.even}
        self.structure = discover(model, self.example, filter_fn=filter_fn, **kinds)
        if channels:
            check_groups(self.structure)
        everyone = Axis()
        if dist.is_available() and dist.is_initialized():
            everyone = Axis(dist.group.WORLD, dist.get_rank(), dist.get_world_size())
        place = Place(config.particles, shards=everyone, everyone=everyone)
        particles = Particles.start(model, config, device)
        gating = make_gating(model, self.structure, particles, config, filter_fn) if gates else None
        self.run = RunState(
            particles, gating, config, num_data=num_data, steps_per_epoch=-(-steps // max(1, config.epochs)),
            place=place, groups=groups, total_steps=steps, gaussian=False, objective=Objective(config, loss),
        )  # fmt: skip
        self.run.loss_scale = None  # a loop that computes losses scales them: torch.amp.GradScaler
        self.teacher = Teacher(model, config, device).network if config.teacher == "given" else None
        if validation is not None:
            self._measured_on(model, validation, metrics)
        self._began = time.perf_counter()  # the present epoch
        self._phase: Phase = self.run.phase  # of the last step
        self.inner = None
        if optimizer is not None:
            learning = [p for network in particles.networks for p in network.parameters() if p.requires_grad]
            self.inner = optimizer(learning)
            self.run.own_update = self._inner_step
        self._leaves = [nn.Parameter(row.clone()) for row in self.run.latents.logits]
        self._z: Tensor | None = None  # the gates of the present step, once a network has asked for them
        self._called: set[int] = set()  # particles with decided gates that a batch of this step has been through
        self.networks = [self._view(i) for i in range(len(particles))]
        self._inner_rates = [] if self.inner is None else [group["lr"] for group in self.inner.param_groups]
        self._lr = next(iter(self._inner_rates), config.lr)  # as it was last set here
        defaults = {"lr": self._lr, "momentum": config.momentum, "weight_decay": config.weight_decay}
        groups_of = [{"params": self._learning()}, {"params": self._leaves}]
        super().__init__(groups_of, defaults)
        self._ready()

    # ---- what a loop uses

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Move all particles by the gradients that the losses of this step have left; returns what `closure` does."""
        found = None
        if closure is not None:
            with torch.enable_grad():
                found = closure()
        run, particles = self.run, self.run.particles
        if run.step_index >= run.total_steps:
            raise ConfigError(f"the run has had its {run.total_steps} steps: give steps= of all that the loop takes")
        z = self._gates()
        for i in range(len(particles)):
            if not particles.take_gradients(i):
                raise StructureError(
                    f"no gradient has reached particle {i + 1}: before step() call backward on a loss of each of "
                    "pruner.networks, computed by calling it"
                )
        through = torch.stack([torch.zeros_like(p) if p.grad is None else p.grad for p in self._leaves])
        self._average(through)
        run.lr = self._rate()
        run.knobs[0] = run.lr
        particles.collect_weights()
        self._phase = run.phase
        advance(run, z, through * (1 + run.config.beta))
        run.step_index += 1
        self.zero_grad()
        self._z = None
        self._called.clear()
        if particles.device.type != "cuda" or run.step_index % HEALTH_CHECK == 0 or self.finished:
            self._check()
        self._ready()
        return found

    def taught(
        self, loss: Tensor, logits: Tensor, answer: Tensor, *, labels: Tensor | None = None,
        hidden: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> Tensor:  # fmt: skip
        """The loss of a network that learns from the labels and from the teacher, by the configuration's weight.

        Without a teacher, and before `config.teacher_from`, the loss itself.

        Args:
            loss: Of the labels.
            logits, answer: What the network and the teacher say of the same batch.
            labels: Where -100 stands among them nothing is taught.
            hidden: Pairs of inner activations, the network's and the teacher's, that are to be near each other.
        """
        if self.teacher is None or not self.run.progress >= self.run.config.teacher_from:
            return loss
        own, others = tuple(a for a, _ in hidden), tuple(b.detach() for _, b in hidden)
        known = Taught(softened(answer.detach(), self.run.config), others)
        return taught_loss(Outcome(loss, logits, labels=labels, hidden=own), known, self.run.config)

    @torch.no_grad()
    def end_epoch(
        self, loss: Sequence[float] | Tensor | float = (), accuracy: Sequence[float] | Tensor | float | None = None
    ) -> EpochRecord:
        """Add a record to the run's history: gates and cost, and on `validation` how good the networks are.

        Args:
            loss: Mean training loss of each network in this epoch, where the loop knows it; of one network a number.
            accuracy: The same of right answers.
        """
        run, began, self._began = self.run, self._began, time.perf_counter()
        known = _numbers(loss), None if accuracy is None else _numbers(accuracy)
        for values in known:
            if values and len(values) != len(self.networks):
                raise ConfigError(f"{len(values)} values for {len(self.networks)} networks: give one for each")
        run.history.append(record(run, len(run.history) + 1, self._phase, began, "own loop", *known))
        return run.history[-1]

    @property
    def finished(self) -> bool:
        """True once all steps are taken."""
        return self.run.step_index >= self.run.total_steps

    @property
    def phase(self) -> Phase:
        """`open`, `soft` or `discrete`: every gate is 1, gates learn, gates are decided and networks are small."""
        return self.run.phase

    @property
    def cost(self) -> list[float]:
        """Cost of each particle over the dense cost, expected while gates are soft."""
        return self.run.latents.cost().tolist()

    def train(self) -> None:
        """Put all networks in training mode; the Trainer of Hugging Face asks its optimiser to."""
        for network in self.networks:
            network.train()

    def eval(self) -> None:
        """Put all networks in evaluation mode."""
        for network in self.networks:
            network.eval()

    @torch.no_grad()
    def finish(self) -> Result:
        """Decide the gates, where that is still to do, and cut every particle to its verified small network."""
        run = self.run
        run.particles.collect_weights()
        self._share_buffers()
        if run.gating is not None and run.latents.keep is None:
            if not self.finished:
                warnings.warn(
                    f"finish() after {run.step_index} of {run.total_steps} steps: gates are decided only now, and no "
                    "step has trained the cut networks; steps= counts the calls of step()",
                    stacklevel=3,  # 2 is no_grad
                )
            decide(run)
        run.particles.finish()
        measure(run, "end")
        with torch.enable_grad():
            return collect(run, self.structure, self.example)

    def state_dict(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """All that changes during a run, between two steps: a new pruner goes on from it bit for bit."""
        tensors, values = snapshot(self.run)
        rates = [group["lr"] for group in self.param_groups]
        inner = None if self.inner is None else self.inner.state_dict()
        return {"tensors": tensors, "values": values, "lr": [*rates, self._lr], "inner": inner}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Go on from where :meth:`state_dict` was taken, by a pruner that was built in the same way."""
        if not {"tensors", "values", "lr", "inner"} <= state_dict.keys():
            raise ArtifactError("this is not the state of a Pruner: give what its state_dict() has returned")
        if self.run.latents.keep is not None and "keep" not in state_dict["tensors"]:
            raise ArtifactError("the gates of this pruner are decided, those of the state are not: build a new Pruner")
        restore(self.run, (state_dict["tensors"], state_dict["values"]))
        for group, lr in zip(self.param_groups, state_dict["lr"], strict=False):
            group["lr"] = lr
        self._lr = state_dict["lr"][-1]
        if self.inner is not None:
            self.inner.load_state_dict(state_dict["inner"])
        self._z = None
        self._ready()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse parameters of others: the particles' are all that this moves."""
        if len(self.param_groups) == 2:
            raise ConfigError("a Pruner moves its own networks only: give other parameters an optimiser of their own")
        super().add_param_group(param_group)

    # ---- how it works

    def _measured_on(self, model: nn.Module, validation: Data, metrics: Metrics | None) -> None:
        """Set what the run is measured on, once it is known to fit the network."""
        run, as_is = self.run, Prepared(None, self.example, self.structure, self.example, None)  # type: ignore[arg-type]
        run.validation = evaluation_batches(validation, run.particles.device, as_is)
        run.validates, run.metrics = True, metrics
        first = trees.part(next(run.validation())[0], slice(0, 2))
        check_loss(model, run.objective, run.config, first)

    def _view(self, i: int) -> nn.Module:
        """Particle i, which asks for the gates of the present step at every call."""
        forward = self.run.forward

        def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            network = self.run.particles.active[i]
            with estimating(network, steps=1) if self._just_decided(i) else nullcontext():
                return forward.called(i, self._gates_of(i), args, kwargs)

        return called_by(self.run.particles.active[i], call)

    def _just_decided(self, i: int) -> bool:
        """True for the first training batch that particle i sees with decided gates: its norms are of others still."""
        run = self.run
        decided = any((moment.name, moment.step) == ("after", run.step_index) for moment in run.moments)
        first = decided and run.particles.active[i].training and i not in self._called
        if first:
            self._called.add(i)
        return first

    def _gates(self) -> Tensor:
        """(n, U) of the present step: drawn once, whatever number of forward passes it has."""
        if self._z is None:
            self._z = gates(self.run)
            for leaf, row in zip(self._leaves, self._z, strict=True):
                leaf.data.copy_(row)
        return self._z

    def _gates_of(self, i: int) -> Tensor | None:
        if self.run.phase == "open" or self.run.gating is None:
            return None
        if not self.run.particles.active[i].training:  # evaluated without noise
            return gates_now(self.run)[i]
        with torch.no_grad():
            self._gates()
        return self._leaves[i] if self.run.phase == "soft" else self._leaves[i].detach()

    def _ready(self) -> None:
        """Decide gates that are due, and set what the next step's gates depend on."""
        run = self.run
        due = run.gating is not None and run.latents.keep is None and run.progress >= run.config.discrete_at
        if due and not self.finished:
            self._share_buffers()
            decide(run)
        run.particles.begin_step()
        for view, network in zip(self.networks, run.particles.active, strict=True):
            object.__setattr__(view, "__dict__", network.__dict__)
        self.param_groups[0]["params"] = self._learning()
        if not self.finished:
            set_knobs(run)

    def _learning(self) -> list[nn.Parameter]:
        return [p for network in self.run.particles.active for p in network.parameters() if p.requires_grad]

    def _rate(self) -> float:
        """The configuration's or the inner optimiser's, unless a scheduler on this one or the loop has set another."""
        first = self.param_groups[0]
        if "initial_lr" in first or first["lr"] != self._lr:
            if self.inner is not None:
                for group, rate in zip(self.inner.param_groups, self._inner_rates, strict=True):
                    group["lr"] = first["lr"] * (rate / self._inner_rates[0])
            return float(first["lr"])
        own = scheduled_lr(self.run) if self.inner is None else self.inner.param_groups[0]["lr"]
        self._lr = first["lr"] = float(own)
        return self._lr

    def _average(self, through: Tensor) -> None:
        """Means over the processes that share each batch."""
        shards = self.run.place.shards
        if shards.size == 1:
            return
        for gradient in self.run.particles.written():
            shards.all_reduce_(gradient).div_(shards.size)
        through.copy_(merged([through], shards)[0]).div_(shards.size)

    def _share_buffers(self) -> None:
        """Give every process the first one's running statistics: cut networks must be the same everywhere."""
        everyone = self.run.place.everyone
        if everyone.size > 1:
            own = [[buffer.cpu() for buffer in network.buffers()] for network in self.run.particles.active]
            for network, values in zip(self.run.particles.active, everyone.broadcast_object(own), strict=True):
                for buffer, value in zip(network.buffers(), values, strict=True):
                    buffer.copy_(value)

    def _inner_step(self, drive: Tensor) -> None:
        """One step of the user's optimiser along `drive` (n, P); what does not move, or a broken step, stays."""
        run, inner = self.run, self.inner
        if inner is None:
            return
        before = run.particles.rows.clone()
        for network, row in zip(run.particles.networks, drive * run.moving, strict=True):
            parameters, views = run.particles.layout.targets(network, row)
            for parameter, view in zip(parameters, views, strict=True):
                parameter.grad = view
        inner.step()
        inner.zero_grad()
        run.particles.rows.copy_(torch.where(run.moving & run.sound, run.particles.rows, before))

    def _check(self) -> None:
        if not bool(self.run.healthy):
            trouble = health.find(self.run) or health.in_gradients(self.run) or "NaN or infinity"
            raise health.broken(self.run, trouble, self.run.step_index)


def _numbers(values: Sequence[float] | Tensor | float) -> list[float]:
    """One number for each network; a number alone is that of the only one."""
    if isinstance(values, (int, float)) or (isinstance(values, Tensor) and not values.dim()):
        return [float(values)]
    return [float(value) for value in values]
