"""The short commands: analyze, bench, export, methods and speed; each imports what it needs when it runs."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dllp import files
from dllp.cli import progress
from dllp.cli.open_run import StoredRun, as_trained, read_run
from dllp.errors import ArtifactError, ConfigError, DataError, DllpError
from dllp.runs.folder import SPEED
from dllp.runs.launch import KEPT

if TYPE_CHECKING:
    from dllp.data import Dataset
    from dllp.deploy.speed import Images

OWN_PAPER = "Efficient Stein Variational Inference for Reliable Distribution-lossless Network Pruning"


def analyze(args: Namespace) -> None:
    """Describe the weights of one particle before pruning, of the kept and of the removed part."""
    from dllp.evaluation import weight_analysis

    result = read_run(Path(args.folder), args).open(shape=args.shape)
    report = weight_analysis.analyze(result, args.particle - 1, result.original)
    if args.json is not None:
        files.write_json(Path(args.json), {"folder": str(Path(args.folder)), **report}, named=True)
    if not args.quiet:
        progress.show_weights(report)


def bench(args: Namespace) -> None:
    """Run what a table of the paper lacks; the parser has found the package `paper` of a checkout already."""
    command = import_module("paper.command")
    given = {name: value for name, value in vars(args).items() if name not in ("command", "chosen")}
    quiet = given.get("quiet", False)
    shown = dict(download=lambda: progress.download(quiet), reporter=lambda: progress.reporter(quiet, pause=60.0))
    try:
        command.execute(given, **shown)
    except KeyboardInterrupt as error:
        error.add_note(KEPT)
        raise


def export(args: Namespace) -> None:
    """Write one particle, or the posterior, as an ONNX or pt2 file, or as a folder of Hugging Face."""
    from dllp.deploy import export

    if args.posterior and args.particle is not None:
        raise ConfigError("--particle and --posterior exclude each other: give one of them")
    format = export.format_of(Path(args.out), args.format, args.int8)
    if format == "onnx":
        export.require_onnx()
    stored = read_run(Path(args.folder), args, needed=("model", "data") if args.int8 else ("model",))
    try:
        data = _data(stored) if args.int8 else None
    except DllpError as error:
        raise DataError(f"int8 has no data for its calibration ({error}): name some with --data") from error
    result = stored.open(shape=args.shape, data=data)
    particle = None if args.posterior else (1 if args.particle is None else args.particle) - 1
    given = {name: getattr(args, name) for name in ("uint8", "pad_to", "int8")}
    done = export.export(result, args.out, result.shape, format=format, particle=particle, data=data, **given)
    if format == "huggingface":
        print(f"{done.path}: {done.bytes:,} bytes; from_pretrained reads it, with the same outputs bit for bit")
        return
    tokens = isinstance(export.input_shape(result.model, result.shape), export.Tokens)
    kind = "uint8" if args.uint8 else "int64" if tokens else "float32"
    print(f"{done.path}: {done.bytes:,} bytes, {kind} input (batch, {', '.join(map(str, result.shape))})")
    print(f"outputs: {', '.join(done.outputs)}")
    against, seen = ("floats", "calibration examples") if args.int8 else ("PyTorch", f"batches of {export.BATCHES}")
    text = f"largest difference from {against}: {done.difference:.2g} ({done.runtime}, {seen})"
    if done.agreement is not None:
        text = f"int8: {done.agreement:.2%} of the {seen} get the class that floats give"
    if done.accuracy is not None:
        text += f"; {stored.task.split} accuracy {done.accuracy[1]:.2%}, {done.accuracy[0]:.2%} in floats"
    print(text)


def methods(args: Namespace) -> None:
    """List every method with what it removes, its paper and year, and the figures that the paper states."""
    from dllp.baselines import DYNAMIC, METHODS, hyperparameters

    own = {"name": "dllp", "removes": "channels or weights", "year": 2023, "paper": OWN_PAPER}
    listed = [own | {"hyperparameters": {}, "published": []}]
    for method in (*METHODS.values(), *DYNAMIC.values()):
        removes = f"{method.granularity}s" + " by image: dllp bench only" * (method.name in DYNAMIC)
        named = {"name": method.name, "removes": removes, "year": method.year, "paper": method.paper}
        figures = [vars(figure) for figure in method.published]
        listed.append(named | {"hyperparameters": hyperparameters(method), "published": figures})
    if args.json is not None:
        files.write_json(Path(args.json), listed, named=True)
    width = max(len(entry["name"]) for entry in listed)
    for entry in listed:
        figures = "".join(
            f"; {f['network']}: {f['drop']:g} lost at -{f['removed']:g}%"
            + (f", re-run by {f['rerun']}" if f["rerun"] else "")
            for f in entry["published"]
        )
        settings = "".join(f"; {name} {value:g}" for name, value in entry["hyperparameters"].items())
        print(f"{entry['name']:{width}}  {entry['year']}  {entry['paper']} ({entry['removes']}{settings}{figures})")


def profile(args: Namespace) -> None:
    """Time a network's layers on this machine."""
    from dllp.cli.structure import subject
    from dllp.deploy.profiles import measure_profile, timer_of
    from dllp.runs import settings

    task, _ = settings.split(args.chosen)
    args.tokens = None
    timer_of(args.runtime, (), args.threads, args.batch)  # what is missing is an error before data are read
    model, example = subject(task, args, args.classes)
    options = dict(runtime=args.runtime, threads=args.threads, batch=args.batch)
    with progress.status(args.quiet) as show:
        found = measure_profile(model, tuple(example.shape[1:]), progress=show, **options)
    found.write(Path(args.out))
    if not args.quiet:
        share = 100 * found.overhead / found.dense
        print(f"{args.out}: {1e3 * found.dense:.2f} ms dense, of which {share:.0f}% fall with no width")
        for check in found.checks:
            times = check.seconds, found.overhead + (1 - found.overhead / found.dense) * check.kernels
            measured, predicted = (f"{1e3 * seconds:.2f}" for seconds in times)
            print(f"at {100 * check.kept:g}% of the widths: {measured} ms, {predicted} predicted")
        print(f"next: dllp prune --model {task.model} --keep-latency 0.5 --profile {args.out}")


def speed(args: Namespace) -> None:
    """Time dense and pruned network, and leave the figures of the first particle in the run folder for its report."""
    from dllp.deploy import speed
    from dllp.deploy.export import input_shape, require_onnx

    require_onnx()
    folder = Path(args.folder)
    stored = read_run(folder, args)
    result = stored.open(shape=args.shape)
    shape = input_shape(result.model, result.shape)
    subjects = speed.subjects(result, shape, particle=args.particle - 1, round_to=args.round_to)
    with progress.status(args.quiet) as show:
        show("reading the data")
        images, int8 = _images(stored, shape, subjects[0].macs)
        rows = speed.measure(subjects, shape, batches=args.batch, seconds=args.seconds, images=images, progress=show)
        show("layers")
        layers = speed.layers(subjects[0], subjects[1], shape, batch=max(args.batch))
    report = {"folder": str(folder), "environment": environment(), "int8": int8, "rows": speed.as_dict(rows)}
    report["layers"] = [vars(layer) | {"lost_ms": layer.lost_ms} for layer in layers]
    if args.json is not None:
        files.write_json(Path(args.json), report, named=True)
    if not args.quiet:
        progress.show_speed(rows, layers, f"{folder}: particle {args.particle} against dense", int8)
        padded = f" --pad-to {args.round_to}" if "--pad-to" in speed.advice(rows) else ""
        print(progress.next_step("export", args.folder, args, f"--out network.onnx{padded}"))
    if args.particle == 1:  # the one that the report speaks of
        try:
            files.write_json(folder / SPEED, report)
        except ArtifactError as error:
            progress.warn(f"{error}; the report will not show these times")


def _images(stored: StoredRun, shape: tuple[int, ...], macs: float) -> tuple[Images | None, str]:
    """Images of the run's data, and one line on what int8 was calibrated with; none where the data cannot be opened."""
    from dllp.deploy import speed

    try:
        if "data" not in stored.settings:
            raise DataError(f"{stored.folder} does not name its data")
        data = _data(stored)
        found = speed.images(data, shape, macs, stored.record.config.get("task", "classification"))
    except DllpError as error:
        return None, f"int8: calibrated with random inputs, accuracy not measured: {error}"
    seen = f"int8: calibrated with {len(found.calibration)} training examples"
    if found.test is None:
        return found, seen
    return found, f"{seen}; accuracy on {len(found.test)} of {len(data.test)} {stored.task.split} examples"


def _data(stored: StoredRun) -> Dataset:
    """The run's data, or those that were chosen instead, for its networks: their normalisation, and same classes."""
    data = stored.read_data(quiet=True)
    return replace(data, test=as_trained(data, stored.info.data))


def environment() -> dict[str, Any]:
    """Versions and hardware of a measurement by `dllp speed`."""
    import onnxruntime
    import torch

    from dllp.devices.device import environment, processor

    return environment(torch.device("cuda" if torch.cuda.is_available() else "cpu")) | {
        "onnxruntime": onnxruntime.__version__,
        "processor": processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }
