"""The command `dllp prune`: a run from its options, or from its own folder where it goes on."""

from __future__ import annotations

import os
import shlex
from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dllp import api, zoo
from dllp.api import Result
from dllp.baselines import find as find_method
from dllp.baselines import run as baseline
from dllp.cli import progress
from dllp.cli.evaluate import write_rows
from dllp.cli.open_run import build_network, check_import, configure, describe, disk, made, read_data
from dllp.config import Config, changeable
from dllp.data import Dataset
from dllp.data.unreadable import Report, SkippedImage
from dllp.deploy.profiles import measure_profile, usual_runtime
from dllp.devices.device import WORKSPACE, WORKSPACES, find_device, use_fastest_threads
from dllp.devices.ranks import Ranks, joined, restarts
from dllp.errors import ConfigError, Interrupted, NumericsError, RankError
from dllp.evaluation import evaluate, examples
from dllp.posterior import Posterior, posterior_of
from dllp.records import EpochRecord
from dllp.runs import pretrained, settings
from dllp.runs.checkpoints import Checkpoints, Signals, interrupt
from dllp.runs.folder import DENSE_FILE, EVALUATION, PROFILE, SETTINGS, TENSORBOARD, RunFolder, member
from dllp.runs.settings import DENSE, DLLP, Task
from dllp.runs.tensors import write_network
from dllp.structure.latency import Profile
from dllp.structure.slicing import copied
from dllp.training import health
from dllp.training.state import RunState

MAY_CHANGE = ("data_root", "workers", "max_bad", "threads")  # when a run goes on: they change no batch
Prepared = tuple[Dataset, Config, nn.Module, list[str]]


def run(args: Namespace) -> None:
    """Make a run folder, or finish the one that `--resume` names."""
    out = Path(args.out)
    with joined() as ranks, Signals() as signals, ExitStack() as held:
        if ranks.rank:
            return follow(ranks, signals)
        if restarts() and RunFolder(out).unfinished:  # torchrun starts the same command again
            args.resume, args.overwrite, args.config = True, False, None

        def take() -> tuple[RunFolder, tuple[Task, dict[str, Any]] | None]:
            if args.resume and (args.overwrite or args.config):
                raise ConfigError("--resume goes on with the folder's own run: leave out --overwrite and --config")
            if args.tensorboard:
                progress.require_tensorboard()
            folder = held.enter_context(RunFolder(out, resume=args.resume, overwrite=args.overwrite))
            if args.resume and folder.finished:
                if (out / SETTINGS).is_file():  # a run that was made in Python has none
                    chosen_settings(args, ranks)  # what contradicts the run is an error, finished or not
                return folder, None
            return folder, chosen_settings(args, ranks)

        folder, found = ranks.together(take)
        ranks.world.broadcast_object(found)
        if found is None:
            if not args.quiet:
                print(f"{out} holds a finished run: there is nothing to do")
            return
        task, values = found
        folder.command += trusting(task)
        pruning = _Pruning(args, ranks, folder, signals, task)
        (pruning.run_code if "data" in task.code else pruning.run)(values)


def follow(ranks: Ranks, signals: Signals) -> None:
    """Take part in the first process's trainings, by its settings; nothing is written or shown here."""
    ranks.together(lambda: None)
    found: tuple[Task, dict[str, Any]] | None = ranks.world.broadcast_object(None)
    if found is None:
        return
    task, values = found
    data, config, model, new_head = prepared(ranks, task, values, None, quiet=True)
    for verb, recipe in ((api.prune, config), (api.train_dense, dense_recipe(task, config, new_head))):
        if recipe is not None:
            held = Checkpoints(None, ranks=ranks)
            signals.stop = held.stop
            try:
                watched = data if task.validation else None
                verb(model, data, recipe, validation=watched, progress=False, checkpoints=held, ranks=ranks)
            except RankError:
                signals.ignore()
                raise
            finally:
                signals.stop = interrupt


def prepared(ranks: Ranks, task: Task, values: dict[str, Any], report: Report | None, quiet: bool) -> Prepared:
    """Data, configuration, network and what of it is new to given weights, on every process or on none."""

    def work() -> Prepared:
        early = configure(task, values)  # bad values are errors before any data is read
        find_device(early.device)
        data = read_data(task, early.seed, quiet=quiet, report=report)
        if not task.is_code:
            zoo.check_images(task.model, data.train.shape[1:])
        config = configure(task, values, data)
        if config.deterministic:  # read when cuBLAS starts, which it has not yet
            os.environ.setdefault(WORKSPACE, WORKSPACES[0])
        sizes = config.outputs(data.num_classes), data.in_channels, data.image_size
        model = build_network(task, *sizes, config.seed)
        new_head = pretrained.start(model, Path(task.weights)) if task.weights else []
        if new_head:  # what has a new last layer teaches nothing
            config = replace(config.resolved(trained=True), teacher="off")
        return data, (api.settle(model, data, config) if task.method == DLLP else config.resolved()), model, new_head

    return ranks.together(work)


def dense_recipe(task: Task, config: Config, new_head: list[str]) -> Config | None:
    """How the dense network is trained that a run is compared with; None where there is none, or it is given."""
    if not task.dense or (config.init == "given" and not new_head):
        return None
    return replace(config, particles=1, keep_flops=None, keep_params=None, keep_latency=None)


def chosen_settings(args: Namespace, ranks: Ranks) -> tuple[Task, dict[str, Any]]:
    """The task and the values of Config that the user gave, here, in a settings file, or when the run began."""
    if args.resume:
        values = settings.read(member(Path(args.out), SETTINGS))
        for name, value in args.chosen.items():
            known = values.get(name)
            place = Path(str(known)) if name in ("data", "weights") else None
            same = place is not None and Path(str(value)).resolve() == place
            moved = place is not None and place.is_absolute() and not place.exists()
            if name not in (*changeable(), *MAY_CHANGE) and value != known and not same and not moved:
                raise ConfigError(f"{name} = {value} contradicts the run, which has {known}: leave it out")
            values[name] = known if same else value
        whose = "the run's"
    else:
        values = (settings.read(Path(args.config)) if args.config else {}) | args.chosen
        whose = "the settings file's"
    task, values = settings.split(values)
    check_import(task, args, whose, Path(args.out) if args.resume else None)
    if "data" in task.code and not ranks.alone:
        raise ConfigError("data of your own code is for one process: start it without torchrun, or use dllp.Pruner")
    if task.method != DLLP and not ranks.alone:
        raise ConfigError(f"method {task.method} trains in one process: start it without torchrun")
    return task, values


def with_threads(task: Task, model: nn.Module, data: Dataset, config: Config, ranks: Ranks) -> Task:
    """The task with its number of CPU threads, which PyTorch is set to; that of a GPU or of several processes stays."""
    if find_device(config.device).type != "cpu" or not ranks.alone:
        return task
    if task.threads is not None:
        torch.set_num_threads(task.threads)
        return task
    network = copied(model).train()
    x = torch.randn(config.batch_size, *data.train.shape)

    def step() -> None:
        with torch.random.fork_rng():
            network(x).sum().backward()

    try:
        return replace(task, threads=use_fastest_threads(step))
    except Exception:  # a network of other inputs or outputs: the run itself says what is wrong, if anything is
        return replace(task, threads=torch.get_num_threads())


def schedule_line(task: Task, values: dict[str, Any], config: Config) -> str:
    """One line about the schedule that a run has, and about choices that nobody made."""
    trained = config.teacher == "given" or task.short
    taught = ", the network as it was as its teacher" if config.teacher == "given" else ""
    kind = f"schedule for trained weights{taught}" if trained else "schedule for a start without trained weights"
    rates = f"{config.epochs} epochs, batches of {config.batch_size}, lr {config.lr:.3g}"
    if task.threads is not None:
        rates += f", {task.threads} thread{'s' * (task.threads > 1)}"
    if config.round_to > 1 and "round_to" not in values:
        rates += (
            f"; layers keep multiples of {config.round_to} channels, which runs faster (--round-to 1 for any number)"
        )
    return f"{kind}: {rates}"


def closing_lines(result: Result, examples: int, config: Config) -> list[str]:
    """Lines below the table at the end of a run."""
    found = []
    if config.task == "classification" and len(result.particles) > 1:
        found.append(
            f"all particles: the mean of {len(result.particles)} predictions, at the cost of all; one of {examples} "
            f"examples is {100 / examples:.2g} points, differences of a few are noise"
        )
    if "latency" in result.info:
        found.append(result.info["latency"]["text"])
    if result.history and result.history[-1].get("validation_loss"):
        found.append(progress.validated(result.history))
    return found


def trusting(task: Task) -> str:
    """The end of a command that may import the run's network, which its folder names."""
    return "".join(f" --{name} {shlex.quote(getattr(task, name))}" for name in task.code)


class _Pruning:
    """One run of the command, from validated options to the table at the end."""

    def __init__(self, args: Namespace, ranks: Ranks, folder: RunFolder, signals: Signals, task: Task) -> None:
        self.args, self.ranks, self.folder, self.signals, self.task = args, ranks, folder, signals, task

    def run(self, values: dict[str, Any]) -> None:
        quiet, out = self.args.quiet or self.args.brief, self.folder.folder
        data, config, model, new_head = prepared(self.ranks, self.task, values, self.leave_out, quiet)
        for text in new_head:
            progress.warn(text)
        self.task = with_threads(self.task, model, data, config, self.ranks)
        if not quiet:
            print(schedule_line(self.task, values, config))
        device = find_device(config.device)
        self.task = task = self.task.anchored()
        self.text = settings.write(task, config)
        if self.folder.resume and device.type == "cuda" and not config.deterministic and not quiet:
            print("on CUDA without --deterministic the result has the same quality, but is not equal bit for bit")
        self.profile = self.profiled(model, tuple(data.train.shape), config)
        before: Result | None = None
        with progress.reporter(self.args.quiet, 60.0 * self.args.brief) as self.shown:
            if task.method == DLLP:
                result, dense = self.dllp(model, data, config, new_head)
            elif task.method == DENSE:
                result, dense = self.train(api.train_dense, DENSE, model, data, config), None
            else:
                result, dense, before = self.other(model, data, config, new_head)
        result.info["data"] = asdict(describe(data))
        result.write_networks(out)
        if dense is not None:
            write_network(out / DENSE_FILE, dense.networks[0])
        found = evaluate.measure(result, data.test, dense, disk=disk(out, result), device=device)
        rows = found.rows
        if before is not None:
            cut = evaluate.measure(before, data.test, device=device).rows
            rows[-1:-1] = [replace(row, name=evaluate.BEFORE) for row in cut]
        write_rows(out / EVALUATION, task, rows, **found.besides())
        if config.task == "classification":
            examples.collect(found.clean[evaluate.TOGETHER], found.clean.get(evaluate.DENSE)).write(out)
        result.write_run(out)
        if not quiet:
            progress.show(rows, f"{task.model} on {len(data.test)} {task.split} examples of {task.data}")
            for text in closing_lines(result, len(data.test), config):
                print(text)
            print(f"run folder: {out}\nnext: dllp report {shlex.quote(str(out))}{trusting(task)}")

    def run_code(self, values: dict[str, Any]) -> None:
        """A run whose network, data and loss are the user's code: networks and record, without evaluation."""
        task, out, quiet = self.task, self.folder.folder, self.args.quiet
        config = task.config(values)
        model, data = build_network(task, 0, 0, 0, config.seed), made("data", task.data)
        if task.weights:
            pretrained.start(model, Path(task.weights))
        loss = None if task.loss is None else made("loss", task.loss, called=False)
        config = api.settle(model, data, config, loss=loss)
        self.text = settings.write(task.anchored(), config)
        if config.keep_latency is not None and task.profile is None:
            raise ConfigError("keep_latency with data of your own code needs --profile FILE: make it with dllp profile")
        self.profile = None if task.profile is None else Profile.read(Path(task.profile))
        with progress.reporter(quiet) as self.shown:
            result = self.train(partial(api.prune, loss=loss, profile=self.profile), "pruned", model, data, config)
        result.write_networks(out)
        result.write_run(out)
        if not quiet:
            for k, size in enumerate(result.sizes):
                share = f"{100 * size.macs / result.dense.macs:.1f}% of the multiply-accumulates"
                print(f"particle {k + 1}: {share}, {100 * size.params / result.dense.params:.1f}% of the parameters")
            if "latency" in result.info:
                print(result.info["latency"]["text"])
            print(f"run folder: {out}")

    def dllp(
        self, model: nn.Module, data: Dataset, config: Config, new_head: list[str]
    ) -> tuple[Result, Posterior | None]:
        """DLLP's one training, and that of the dense network to compare with, where there has to be one."""
        result = self.train(partial(api.prune, profile=self.profile), "pruned", model, data, config)
        if not self.task.dense:
            return result, None
        alone = dense_recipe(self.task, config, new_head)
        if alone is None:
            return result, posterior_of([model.cpu().eval()], torch.tensor([torch.nan]), config)
        dense = self.train(api.train_dense, "dense", model, data, alone).posterior
        result.info["dense_noise"] = float(dense.noise[0])
        return result, dense

    def other(
        self, model: nn.Module, data: Dataset, config: Config, new_head: list[str]
    ) -> tuple[Result, Posterior | None, Result | None]:
        """Another method's trainings; compared with the given weights, or with its own network before the cut."""
        method, epochs = find_method(self.task.method), self.task.finetune_epochs
        given = model if self.task.weights and not new_head else None
        pruned = baseline.prune(method, model, data, config, finetune_epochs=epochs, teacher=given, train=self.train)
        result, noise = pruned.result, pruned.before.gates["noise"]
        whole = result.reference
        if given is None:
            result.info["dense_noise"] = float(noise[0])
        else:
            whole, noise = given.cpu().eval(), torch.tensor([torch.nan])
        dense = posterior_of([whole], noise, config) if self.task.dense else None
        return result, dense, pruned.before if pruned.after else None

    def train(self, verb: Callable[..., Result], name: str, model: nn.Module, data: Any, config: Config) -> Result:
        """One training with its checkpoints and its part of the log."""
        board = progress.Board(self.folder.folder / TENSORBOARD / name if self.args.tensorboard else None)
        steps, minutes = self.args.checkpoint_steps, self.args.checkpoint_minutes
        place = self.folder.checkpoints / name
        held = Checkpoints(place, every_steps=steps, every_minutes=minutes, on_begin=self.begin, ranks=self.ranks)

        def on_start(state: RunState) -> None:
            self.signals.stop = held.stop
            for text in held.damaged:
                used = "the checkpoint before it is used" if state.step_index else "no other is left to go on from"
                progress.warn(f"{text}; {used}")
            if state.trouble:
                rate = config.lr * state.lr_scale
                progress.warn(f"{state.trouble}; back at step {state.step_index} with lr {rate:g}")
            elif state.step_index and not self.args.quiet:
                print(f"{name}: going on after step {state.step_index} of {state.total_steps}", flush=True)
            self.folder.start_log(name, state.history)
            board.start(state)

        def on_epoch(record: EpochRecord) -> None:
            self.folder.log(name, record)
            self.shown.epoch(record)
            board.epoch(record)

        self.shown.begin(name, config.epochs, config.budget[1])
        try:
            result = verb(
                model, data, config, validation=data if self.task.validation else None, progress=False,
                on_start=on_start, on_epoch=on_epoch, on_step=self.shown.step, checkpoints=held, ranks=self.ranks,
            )  # fmt: skip
        except NumericsError:
            again, out = f"go on with {self.folder.command} --on-nan rollback", self.folder.folder
            self.folder.advice = again if config.on_nan == "stop" else f"its checkpoints are kept in {out}"
            raise
        except RankError:
            self.signals.ignore()
            raise
        finally:
            self.signals.stop = interrupt
            held.close()
            board.close()
        if held.signal is not None:  # it came after the last step
            raise Interrupted(held.signal)
        if isinstance(data, Dataset) and result.history and name != baseline.PREPARED:  # its loss is of several answers
            nothing = health.learned_nothing(result.history[-1]["loss"], data.train.y, config.budget[1])
            if nothing:
                progress.warn(f"{name}: {nothing}")
        return result

    def begin(self) -> None:
        """Take the folder; a run that goes on finds its profile there."""
        self.folder.begin(self.text)
        if self.profile is not None:
            self.profile.write(self.folder.folder / PROFILE)

    def profiled(self, model: nn.Module, shape: tuple[int, ...], config: Config) -> Profile | None:
        """The profile of a latency budget: the run's own, the one that was given, or one that is made now."""
        if config.keep_latency is None:
            if self.task.profile is not None:
                raise ConfigError("a profile is for a latency budget: give --keep-latency, or leave it out")
            return None
        own = self.folder.folder / PROFILE
        if self.task.profile is not None or (self.folder.resume and own.exists()):
            return Profile.read(Path(self.task.profile or own))
        with progress.status(self.args.quiet) as show:
            return measure_profile(model, shape, runtime=usual_runtime(find_device(config.device)), progress=show)

    def leave_out(self, image: SkippedImage) -> None:
        """Report and log an image that cannot be read."""
        progress.warn(str(image))
        self.folder.leave_out(image.name, image.reason)
