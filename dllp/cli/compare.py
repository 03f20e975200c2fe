"""`dllp compare`: several methods, budgets and seeds for one network and its data; every run is one of `dllp prune`.

For each seed one dense network is trained, or taken as it is where the network has learned its task. Every method
starts from it, is taught by it, and has as many epochs as every other.
"""

from __future__ import annotations

import os
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dllp import api, files, report
from dllp.baselines import find as find_method
from dllp.baselines.run import FINETUNE_LR
from dllp.cli import progress, prune
from dllp.cli.commands import environment
from dllp.cli.open_run import configure, read_run, read_settings
from dllp.deploy import speed
from dllp.deploy.export import require_onnx
from dllp.devices.device import find_device
from dllp.devices.ranks import Ranks
from dllp.errors import ArtifactError, ConfigError, DllpError, Interrupted, WorkerError, check_count
from dllp.prepare import has_learned, make_gating, prepare, suited_multiple
from dllp.report import contents, methods
from dllp.report.page import markdown_table
from dllp.runs import launch, settings, workers
from dllp.runs.folder import PAGE, SPEED, RunFolder, particle_file
from dllp.runs.settings import DENSE, DLLP
from dllp.training.objective import Objective
from dllp.training.particles import Particles

VALUES, TABLE = "compare.json", "compare.md"
BUDGETS = {"keep_flops": "FLOPs", "keep_params": "parameters"}
REMOVAL = ("granularity", "particles", "round_to", "gate_linear")
"""Settings of what is removed, which a dense training does not have."""


@dataclass(frozen=True)
class Planned:
    """One run: the row of the table that it belongs to, its seed and folder, and the settings that it has."""

    row: str
    method: str
    seed: int
    folder: Path
    settings: dict[str, Any]

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def job(self) -> tuple[str, dict[str, Any]]:
        return str(self.folder), self.settings

    @property
    def finished(self) -> bool:
        return RunFolder(self.folder).finished


def run(args: Namespace) -> None:
    """Run what the folder lacks, then write table and page from everything that is finished."""
    report.require_plotly()
    require_onnx()
    given = {name: value for name, value in vars(args).items() if name in ("jobs", "launcher", "address", "cpus")}
    if "jobs" in given:
        given.setdefault("launcher", "local")
    launch.check_launcher(given)
    given["device"] = args.chosen.get("device", "auto")
    if given.get("launcher") != "ray":
        find_device(given["device"])
    out = Path(args.out).absolute()
    plan = _checked(_plan(args, out), args)
    _check_folder(out, plan)
    book = _Folders(args.quiet)
    try:
        _run([p for p in plan if p.method == DENSE], book, given, args)
        trained = {p.seed for p in plan if p.method == DENSE and p.finished}
        rows = [p for p in plan if p.method != DENSE]
        _run([p for p in rows if p.seed in trained], book, given, args)
    except (KeyboardInterrupt, Interrupted) as error:
        error.__notes__ = [launch.KEPT]  # in place of the one run's own way to go on
        raise
    for lost in rows:
        if lost.seed not in trained:
            book.failed(lost, ArtifactError("the dense network to start from is missing"))
    _write(out, plan, {p.name: str(error) for p, error in book.failures}, args)
    book.close()


# ---- the plan


def _plan(args: Namespace, out: Path) -> list[Planned]:
    """Every run by its settings, the dense ones first."""
    check_count(seeds=args.seeds, epochs=args.epochs)
    budgets = [(option, keep) for option in BUDGETS for keep in getattr(args, option) or ()]
    rows = [(method, *budget) for method in args.methods for budget in budgets]
    if not budgets or len(set(rows)) < len(rows):
        raise ConfigError("give --keep-flops or --keep-params, and each method and budget once")
    common = {name: value for name, value in args.chosen.items() if name not in ("seed", "device")}
    if "data" in settings.split(common)[0].code:
        raise ConfigError("data of your own code has no test set to compare on: give --data a name or a folder")
    start = {name: common.pop(name) for name in ("weights", "init") if name in common}
    dense = {name: value for name, value in common.items() if name not in REMOVAL} | start | {"method": DENSE}
    if args.dense_epochs is not None:
        dense["epochs"] = args.dense_epochs
    first = args.chosen.get("seed", 0)
    seeds = range(first, first + args.seeds)
    homes = {seed: out / f"{DENSE}-seed-{seed}" for seed in seeds}
    plan = [Planned(DENSE, DENSE, seed, homes[seed], {**dense, "seed": seed}) for seed in seeds]
    for method, option, keep in rows:
        row, unit = f"{method}, {100 * keep:g}% of {BUDGETS[option]}", BUDGETS[option].lower()
        name, own = re.sub(r"[^a-z0-9.=-]+", "_", method), {**_recipe(method, common, args.epochs), option: keep}
        for seed in seeds:
            weights = str(homes[seed] / particle_file(0))
            folder = out / f"{name}-{unit}-{keep:g}-seed-{seed}"
            plan.append(Planned(row, method, seed, folder, {**own, "seed": seed, "weights": weights}))
    return plan


def _recipe(method: str, common: dict[str, Any], epochs: int) -> dict[str, Any]:
    """Settings of a method's runs: all have the same number of epochs after the dense network's.

    A method that only cuts spends them on fine-tuning, one with a training of its own half of them on that.
    """
    if method == DLLP:  # the whole run is what fine-tuning is to others
        rate = {"lr": FINETUNE_LR * common["lr"]} if "lr" in common else {}
        return {**common, **rate, "method": method, "epochs": epochs}
    first = epochs // 2 if find_method(method).trains else 0
    own = {"method": method, "epochs": first, "finetune_epochs": epochs - first, "teacher": "given"}
    return {name: value for name, value in common.items() if name != "particles"} | own


def _checked(plan: Sequence[Planned], args: Namespace) -> list[Planned]:
    """The plan with what depends on network and data; what any run would refuse of them is an error before all."""
    sample = [planned for planned in plan if planned.seed == plan[0].seed]
    for planned in sample:
        configure(*settings.split(planned.settings))  # bad values are errors before any data is read
    data, config, model, _ = prune.prepared(
        Ranks(), *settings.split(plan[0].settings), lambda image: progress.warn(str(image)), args.quiet
    )
    config = replace(config, device="cpu")
    whole = prepare(model, data, config, None, channels=False)
    learned = has_learned(model, whole.batches, config, Objective(config))
    structures = {"weight": whole.structure}
    settled: dict[str, dict[str, Any]] = {DENSE: {"epochs": config.epochs}}
    if learned and args.dense_epochs is None:
        settled[DENSE]["epochs"] = 0
    for planned in sample[1:]:
        own = configure(*settings.split(planned.settings), data)
        kind = own.granularity
        if kind not in structures:
            structures[kind] = prepare(model, data, config, None).structure
            api.check_groups(structures[kind])
        if kind == "channel" and own.round_to is None:
            settled[planned.row] = {"round_to": suited_multiple(structures[kind], own)}
        own = replace(own.resolved(), device="cpu", **settled.get(planned.row, {}))
        make_gating(model, structures[kind], Particles.start(model, own, torch.device("cpu")), own, None)
        if planned.method != DLLP:
            find_method(planned.method).settings(own)
    return [replace(p, settings=p.settings | settled.get(p.row, {})) for p in plan]


def _check_folder(out: Path, plan: Sequence[Planned]) -> None:
    """Raise where the folder holds anything but this comparison."""
    begun = [p for p in plan if p.finished or RunFolder(p.folder).unfinished]
    if out.exists() and not out.is_dir():
        raise ArtifactError(f"{out} is a file: give a folder for the comparison")
    if out.is_dir() and any(out.iterdir()) and not begun and not (out / VALUES).exists():
        raise ArtifactError(f"{out} holds other files: choose another folder for the comparison")
    for planned in begun:
        try:
            prune.chosen_settings(_arguments(*planned.job), Ranks())
        except ConfigError as error:
            raise ConfigError(f"{planned.folder}: {error}, or give another --out") from None


# ---- the runs


def _arguments(folder: str, chosen: dict[str, Any], quiet: bool = True) -> Namespace:
    """The command line of `dllp prune` for one run, which goes on where it was begun before."""
    held = RunFolder(Path(folder))
    if held.finished:  # wherever its folder has been moved since
        chosen = {name: value for name, value in chosen.items() if name != "weights"}
    return Namespace(
        out=folder, resume=held.finished or held.unfinished, overwrite=False, config=None, trust_imports=False,
        tensorboard=False, checkpoint_steps=0, checkpoint_minutes=10.0, quiet=quiet, brief=True, chosen=chosen,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Settings(workers.Settings):
    """Settings of a worker: the folder of the comparison, and the one from which the user's code is imported."""

    folder: str
    here: str
    quiet: bool = True

    def prepare(self) -> Callable[[tuple[str, dict[str, Any]]], None]:
        """A function that makes one run folder."""
        for place in (self.folder, self.here):
            if not os.path.isdir(place):
                raise WorkerError(f"{place} is not there: all machines must share the folders of a comparison")
        os.chdir(self.here)
        return self.run

    def run(self, job: tuple[str, dict[str, Any]]) -> None:
        """One run of `dllp prune`, on as many threads as every other begins with."""
        torch.set_num_threads(self.threads)
        folder, chosen = job
        prune.run(_arguments(folder, {**chosen, "device": self.device}, self.quiet))


class _Folders(launch.Book):
    """Finished runs are in their folders; a line on standard output says so."""

    def __init__(self, quiet: bool) -> None:
        super().__init__()
        self.quiet = quiet

    def is_pending(self, planned: Planned) -> bool:
        """True where the folder is to be made or finished."""
        return not planned.finished

    def keep(self, planned: Planned, answer: object) -> None:
        """Read the folder as this machine sees it."""
        try:
            found = methods.figures(contents.read(planned.folder))
        except DllpError as error:
            self.failed(planned, error)
            return
        if not self.quiet:
            quality = "rmse" if "rmse" in found else "accuracy"
            removed = f"{100 * found['flops_removed']:.1f}% of FLOPs removed"
            print(f"{planned.name}: {quality} {found[quality]:.4f}, {removed}, {found['seconds']:.0f} s", flush=True)


def _run(plan: Sequence[Planned], book: _Folders, given: dict[str, Any], args: Namespace) -> None:
    """Finish the runs, one after the other or spread over workers."""
    out = Path(args.out).absolute()
    out.mkdir(parents=True, exist_ok=True)
    places: dict[str, Any] = {"folder": str(out), "here": os.getcwd()}

    def begin(planned: Planned) -> None:
        if not args.quiet:
            print(f"{planned.name}: run {plan.index(planned) + 1} of {len(plan)}", flush=True)

    def tell(text: str) -> None:
        if not args.quiet:
            print(f"dllp: {text}", file=sys.stderr, flush=True)

    if "launcher" not in given:
        device = str(find_device(given["device"]))
        here = Settings(device=device, threads=torch.get_num_threads(), quiet=args.quiet, **places)
        launch.finish(plan, book, here.prepare(), begin)
    elif any(map(book.is_pending, plan)):
        with launch.opened_pool(given, lambda device: Settings(device=device, **places)) as pool:
            launch.Spread([[planned] for planned in plan], pool, book, tell).run()


# ---- the table and the page


def _write(out: Path, plan: Sequence[Planned], failed: dict[str, str], args: Namespace) -> None:
    """compare.json, compare.md and report.html from the finished runs; times that are missing are measured now."""
    with progress.status(args.quiet) as show:
        show("measuring latency")
        _measure([p for p in plan if p.method != DENSE and p.finished], args)
        show("drawing")
        found = {p.name: contents.read(p.folder) for p in plan if p.finished}
        runs: list[dict[str, Any]] = []
        for p in plan:
            dense = found.get(f"{DENSE}-seed-{p.seed}") if p.method != DENSE else None
            values = methods.figures(found[p.name], dense) if p.name in found else {"error": failed[p.name]}
            runs.append({"row": p.row, "seed": p.seed, "folder": p.name, **values})
        rows, task = methods.summary(runs, DENSE), settings.split(args.chosen)[0]
        about = {"model": task.model, "data": task.data, "split": task.split, "epochs": args.epochs}
        files.write_json(out / VALUES, {**about, "environment": environment(), "rows": rows, "runs": runs})
        text = f"{task.model} on the {task.split} examples of {task.data}\n\n"
        text += f"{markdown_table(*methods.cells(rows))}\n\n{methods.NOTE}\n"
        if not task.validation:
            text += "To choose by these figures would be a choice on the test set: hold out a part with --validation.\n"
        files.write_bytes(out / TABLE, text.encode())
        done = [p for p in plan if p.name in found]
        shown = [replace(found[p.name], settings=read_settings(p.folder), series=p.row) for p in done]
        if shown:
            files.write_bytes(out / PAGE, report.build(shown, [methods.section(rows)]))
    if not args.quiet:
        print(f"{text}\n{TABLE}, {VALUES} and {PAGE}, which opens in any browser, are in {args.out}")
        best = next((p for p in plan if p.method != DENSE and p.finished), None)
        if best is not None:
            print(progress.next_step("export", f"{args.out}/{best.name}", args, "--out network.onnx"))


def _measure(plan: Sequence[Planned], args: Namespace) -> None:
    """Time the networks of runs that were not yet timed, all in turns, and leave the figures in their folders."""
    lacking = [planned for planned in plan if not methods.timed(contents.read(planned.folder))]
    own = Namespace(chosen={k: v for k, v in args.chosen.items() if k == "model"}, trust_imports=False)
    if not lacking:
        return
    try:
        runs = [read_run(planned.folder, own).open() for planned in lacking]
        shape = runs[0].shape
        both = [speed.subjects(result, shape, round_to=1) for result in runs]
        named = [replace(pruned, name=p.name) for p, (_, pruned) in zip(lacking, both, strict=True)]
        times = {row.network: row for row in speed.measure_onnx([both[0][0], *named], shape)}
    except DllpError as error:
        progress.warn(f"times were not measured: {error}")
        return
    for planned in lacking:
        rows = speed.as_dict([times[speed.DENSE], replace(times[planned.name], network=speed.PRUNED)])
        values = {"environment": environment(), "rows": rows, "layers": [], "source": "measured by dllp compare"}
        files.write_json(planned.folder / SPEED, values)
