"""Options and settings files: every name and type checked, every mistake one line in the user's words."""

from __future__ import annotations

import argparse
import difflib
import re
import typing
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import yaml
from jsonargparse import ActionYesNo, ArgumentParser, DefaultHelpFormatter

from dllp import reading, zoo
from dllp.bench.command import RESULTS
from dllp.bench.tables import TABLES
from dllp.config import Config
from dllp.errors import ConfigError
from dllp.task import Task
from dllp.version import __version__
from dllp.weights import SUFFIXES

OUT = "runs/last"
ROUND_TO = 8
"""Multiple of channels whose effect `dllp speed` shows."""
MAIN = ("keep_flops", "keep_params", "granularity", "particles", "epochs", "batch_size", "seed", "init", "device")
"""Fields of Config that help shows first."""
SUITED = ("epochs", "batch_size", "init", "task")
"""Fields of Config whose default depends on data and network."""
TASK = tuple(field.name for field in fields(Task))
FREE = ("data", "data_root", "model", "weights", "device", "leave_out")
"""Settings whose text may hold anything; all others are words and numbers."""
SETTINGS_BYTES = 2**16

ABOUT = "Neural networks made small by Bayesian pruning, with a posterior that says how far to trust what is left."
PRUNE_EXAMPLES = f"""networks by name: {", ".join(zoo.names())}

examples:
  dllp prune --data digits --model small_cnn --keep-flops 0.2 --out runs/demo
      two small networks on embedded data, each at a fifth of the original's cost
  dllp prune --data cifar10 --model resnet56 --keep-flops 0.45 --lr 0.4 --precision bfloat16 --out runs/resnet56
  dllp prune --data photos --model my_package.nets:trained --keep-params 0.3 --epochs 30 --out runs/mine
      images in photos/train/<class>/ and photos/test/<class>/, a trained network from your own function
  dllp prune --data imagenet --image-size 224 --workers 16 --model resnet50 --init resnet50.safetensors \\
             --preset short --keep-flops 0.34 --out runs/imagenet
      a folder of any size, decoded by 16 processes; trained weights, and the schedule of a short run
  dllp prune --config runs/demo/config.yaml --out runs/again
      the same run once more; options beside --config win over the file
  dllp prune --method fpgm --keep-flops 0.45 --finetune-epochs 10 --out runs/fpgm
      another method, to the same budget; `dllp methods` lists them
  torchrun --nproc-per-node 2 -m dllp prune --particles 2 --parallel particles --out runs/two
      a process for each particle; --parallel data shares batches instead, on any number of devices and hosts
  dllp prune --resume --out runs/demo
      goes on with a run that was stopped or killed, to the same result

defaults (*): digits has 30 epochs; fewer than 10,000 training examples are taken in batches of 64; floating-point
targets make a regression; a network by name starts fresh, one of your own as it is given, and `--init FILE` starts from
trained weights. `--preset paper` and `--preset short` bring their own epochs, rates and start. Names may be written
with dashes or underscores, here and in files."""
EVALUATE_EXAMPLES = """examples:
  dllp evaluate runs/demo
  dllp evaluate runs/demo --corrupt gaussian-blur:1,2,3 sharpen noise:0.1 --json robustness.json
  dllp evaluate runs/demo --ood noise folder/of/photos
      how well doubt tells the test set from inputs that the network was never made for
  dllp evaluate runs/mine --model my_package.nets:trained --data other_photos --subset 0.2"""

BENCH_EXAMPLES = """Results lie in DIR/NAME: runs.jsonl (a line for each finished job), summary.json, table.md,
and test probabilities. Finished jobs are never run again: the same command goes on where it was interrupted.

examples:
  dllp bench table1 --data-root data
      every row with its own number of seeds (five for the headline, three elsewhere)
  dllp bench table1 --rows dense 'dllp-channel-*' --seeds 0 1 2 --list
      what would be run, and what is finished
  dllp bench table2 --shard 1/2 & dllp bench table2 --shard 2/2; wait
      two processes share the work
  dllp bench table3 --data imagenet --image-size 224 --out results-imagenet
      ResNet-50 on a folder of your own, train/<class>/*.jpg and val/<class>/*.jpg, streamed where it is large
  dllp bench figure3; dllp bench figure4; dllp bench reliability
      what pruned networks doubt; runs that another bench has finished are taken over
  dllp bench table1 --validation 5000 --epochs 20 --rows dllp-channel-55 --seeds 0
      a choice of hyperparameters: trained on 45,000 images, evaluated on the 5,000 others, in a folder of its own"""

EXPORT_EXAMPLES = """Needs pip install 'dllp[onnx]' for ONNX. The file is checked against PyTorch before it is written.

examples:
  dllp export runs/demo --format onnx --out demo.onnx
      the first particle: float32 images, normalised as in training, to logits
  dllp export runs/demo --posterior --uint8 --out demo.onnx
      raw images to prediction, aleatoric and epistemic doubt, all particles in one graph
  dllp export runs/demo --pad-to 8 --out demo.onnx
      dead channels up to multiples of 8: the same outputs, often much faster in onnxruntime"""
REPORT_EXAMPLES = """Needs pip install 'dllp[report]'. The page holds everything: it opens from a file and asks for
nothing. Latency is what `dllp speed` found before, or is measured briefly; corruptions are shown where
`dllp evaluate --corrupt` was run.

examples:
  dllp report runs/demo
      writes runs/demo/report.html
  dllp report runs/a runs/b runs/c --out comparison.html
      accuracy against FLOPs with the Pareto front, and where the settings differ"""
SPEED_EXAMPLES = """Needs pip install 'dllp[onnx]'. Networks take turns, so that all see the same machine.

examples:
  dllp speed runs/demo
  dllp speed runs/demo --batch 1 16 64 --round-to 16 --json speed.json"""


ANALYZE_EXAMPLES = """examples:
  dllp analyze runs/demo
  dllp analyze runs/demo --particle 2 --json shapes.json
      every figure, every fit, and the densities for plots"""


def parse(words: Iterable[str]) -> tuple[str, dict[str, Any]]:
    """The command, and what the user gave for it; nothing that was not given."""
    parser = _parser(
        "prune, evaluate, analyze, report, export, speed, bench, methods",
        ABOUT,
        "`dllp COMMAND --help` explains a command and shows examples.",
        prog="dllp",
    )
    commands = parser.add_subcommands(dest="command", metavar="COMMAND", title="commands")
    commands.add_subcommand("prune", _prune(), help="train and prune a network in one run")
    commands.add_subcommand("evaluate", _evaluate(), help="measure the networks of a run folder")
    commands.add_subcommand("analyze", _analyze(), help="say what a run did to the distribution of its weights")
    commands.add_subcommand("report", _report(), help="show a run as one HTML page, or compare several")
    commands.add_subcommand("export", _export(), help="write a run's networks as ONNX or pt2")
    commands.add_subcommand("speed", _speed(), help="time the dense against the pruned network")
    commands.add_subcommand("bench", _bench(), help="measure a table of the paper")
    commands.add_subcommand("methods", _methods(), help="list the methods of pruning, with paper and year")
    try:
        given = parser.parse_args(_weights([_dashed(word) for word in words]), defaults=False)
    except argparse.ArgumentError as error:
        raise ConfigError(_plain(str(error))) from None
    return given["command"], vars(given[given["command"]])


def read(path: Path) -> dict[str, Any]:
    """A settings file such as a run folder's config.yaml: fields of Task and Config by name."""
    content = reading.read_bytes(path, SETTINGS_BYTES, ConfigError)
    try:
        values = yaml.load(content, _PlainLoader)  # noqa: S506 # nosec B506
    except (yaml.YAMLError, RecursionError, ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
        raise ConfigError(f"{path} is not plain YAML: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no settings: lines such as `epochs: 60` are needed")
    reading.check_settings(values, path, ConfigError)
    named = {name.replace("-", "_"): value for name, value in values.items()}
    for name, value in named.items():
        if isinstance(value, str) and name not in FREE and not re.fullmatch(r"[\w.+%-]{0,64}", value):
            raise ConfigError(f"{path}: {name} = {value[:64]!r} is neither a word nor a number")
    known = (*TASK, *(field.name for field in fields(Config)))
    for name in named:
        if name not in known:
            raise ConfigError(f"{path}: unknown name {name!r}{_near(name, known)}")
    try:
        read = vars(_prune().parse_object(named, defaults=False))
        hints = typing.get_type_hints(Task) | typing.get_type_hints(Config)
        for name, value in read.items():
            if value is None and type(None) not in typing.get_args(hints[name]):  # the parser takes it for "not given"
                raise ConfigError(f"{name} has no value")
        own = {name: read[name] for name in TASK if name in read}
        Task(**own).config({name: value for name, value in read.items() if name not in TASK})
    except (argparse.ArgumentError, ConfigError) as error:
        raise ConfigError(f"{path}: {_plain(str(error))}") from None
    return read


class _PlainLoader(yaml.SafeLoader):
    """Less than a SafeLoader: no tags, nothing that repeats or merges other parts, little nesting."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or event.anchor or getattr(event, "tag", None):
            raise yaml.YAMLError(f"line {event.start_mark.line + 1} has a tag, an anchor or an alias")
        self.depth += 1
        if self.depth > 4:
            raise yaml.YAMLError(f"line {event.start_mark.line + 1} is nested too deeply")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def write(task: dict[str, Any], config: Config) -> bytes:
    """The text of a settings file that makes the same run again."""
    return yaml.safe_dump(task | config.as_dict(), sort_keys=False).encode()


# ---- the parsers


class _Help(DefaultHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Examples keep their lines; types are left to the examples, and defaults stand where there is one."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        silent = any(action.default is value for value in (None, False, argparse.SUPPRESS)) or text.endswith("*)")
        return text if silent else text + " (default: %(default)s)"


def _parser(command: str, description: str, epilog: str, **options: Any) -> ArgumentParser:
    options = {"version": __version__, **options} if "prog" in options else options
    return ArgumentParser(
        usage=f"dllp {command} [options]", description=description, epilog=epilog, formatter_class=_Help,
        exit_on_error=False, allow_abbrev=False, **options,
    )  # fmt: skip


def _prune() -> ArgumentParser:
    parser = _parser("prune", "Train and prune a network in one run, and write it into a folder.", PRUNE_EXAMPLES)
    _add_fields(parser.add_argument_group("data and network"), Task, TASK)
    group = parser.add_argument_group("run folder and output")
    group.add_argument("--out", type=str, default=OUT, metavar="DIR", help="Folder of the run.")
    group.add_argument("--overwrite", action="store_true", help="Replace the run that the folder holds.")
    group.add_argument("--resume", action="store_true", help="Go on with the unfinished run in the folder.")
    text = "Steps between two checkpoints, besides one at each epoch's end; 0 for no others."
    group.add_argument("--checkpoint-steps", type=int, default=0, metavar="N", help=text)
    text = "Minutes between two checkpoints, besides one at each epoch's end; 0 for no others."
    group.add_argument("--checkpoint-minutes", type=float, default=10.0, metavar="NUMBER", help=text)
    group.add_argument("--config", type=str, metavar="FILE", help="YAML settings, such as a run folder's config.yaml.")
    _trust(group)
    text = "Curves and histograms for TensorBoard, in the run folder; needs pip install 'dllp[tensorboard]'."
    group.add_argument("--tensorboard", action="store_true", help=text)
    group.add_argument("--quiet", action="store_true", help="Print nothing but errors.")
    _add_fields(parser.add_argument_group("what to keep, and how long to train"), Config, MAIN)
    rest = [field.name for field in fields(Config) if field.name not in MAIN]
    _add_fields(parser.add_argument_group("recipe"), Config, rest)
    return parser


def _evaluate() -> ArgumentParser:
    about = "Measure the networks of a run folder, by default on the run's own test data."
    parser = _parser("evaluate DIR", about, EVALUATE_EXAMPLES)
    parser.add_argument("folder", type=str, metavar="DIR", help="Folder of a finished run.")
    _add_fields(parser, Task, ("data", "model", "data_root", "image_size", "workers", "max_bad"), default=None)
    _trust(parser)
    text = "gaussian-blur:RADIUS,..., sharpen, noise:SIGMA,... (in units of 0..1)."
    parser.add_argument("--corrupt", type=str, nargs="+", metavar="KIND", help=text)
    text = "Inputs from elsewhere: noise, digits, cifar10, left-out (see --leave-out of dllp prune), or a folder."
    parser.add_argument("--ood", type=str, nargs="+", metavar="NAME", help=text)
    parser.add_argument("--references", action="store_true", help="Also measure the particles before extraction.")
    text = "Also measure N networks for each particle whose gates are drawn by their probabilities."
    parser.add_argument("--gate-draws", type=int, metavar="N", help=text)
    parser.add_argument("--subset", type=float, metavar="NUMBER", help="Fraction of the examples to use.")
    parser.add_argument("--device", type=str, default="auto", metavar="TEXT", help="auto, cpu, cuda or cuda:K.")
    parser.add_argument("--json", type=str, metavar="FILE", help="File for the table with every metric.")
    return parser


def _folder(parser: ArgumentParser) -> None:
    """What commands take that read a run folder without its data."""
    parser.add_argument("folder", type=str, metavar="DIR", help="Folder of a finished run.")
    parser.add_argument("--particle", type=int, default=1, metavar="K", help="Which extracted network, from 1.")
    _add_fields(parser, Task, ("model",), default=None)
    _trust(parser)
    text = "Shape of one input, where the run does not say it: channels, height, width."
    parser.add_argument("--shape", type=int, nargs="+", metavar="N", help=text)


def _report() -> ArgumentParser:
    about = "Show a finished run as one self-contained HTML page, or compare several."
    parser = _parser("report DIR...", about, REPORT_EXAMPLES)
    parser.add_argument("folders", type=str, nargs="+", metavar="DIR", help="Folders of finished runs.")
    text = "File to write. (default: report.html in the run's folder; for several runs in the current one)"
    parser.add_argument("--out", type=str, metavar="FILE", help=text)
    _add_fields(parser, Task, ("data", "model", "data_root"), default=None)
    _trust(parser)
    parser.add_argument("--quiet", action="store_true", help="Print nothing but errors.")
    return parser


def _export() -> ArgumentParser:
    about = "Write a run's networks as one file for other runtimes, with a dynamic batch."
    parser = _parser("export DIR --out FILE", about, EXPORT_EXAMPLES)
    _folder(parser)
    parser.add_argument("--out", type=str, required=True, metavar="FILE", help="File to write.")
    parser.add_argument("--format", type=Literal["onnx", "pt2"], default="onnx", metavar="onnx|pt2", help="Its kind.")
    parser.add_argument("--posterior", action="store_true", help="All particles, with their doubt as further outputs.")
    parser.add_argument("--uint8", action="store_true", help="Take raw images and normalise them inside.")
    text = "Add dead channels up to multiples of this; the outputs stay the same."
    parser.add_argument("--pad-to", type=int, default=1, metavar="N", help=text)
    return parser


def _speed() -> ArgumentParser:
    about = "Measure time, memory and bytes of the dense and the pruned network, in PyTorch and onnxruntime."
    parser = _parser("speed DIR", about, SPEED_EXAMPLES)
    _folder(parser)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64], metavar="N", help="Batch sizes.")
    text = "Show what multiples of this many channels would do; 1 for nothing."
    parser.add_argument("--round-to", type=int, default=ROUND_TO, metavar="N", help=text)
    parser.add_argument("--seconds", type=float, default=5.0, metavar="NUMBER", help="Time for each setting.")
    parser.add_argument("--json", type=str, metavar="FILE", help="File for every figure.")
    parser.add_argument("--quiet", action="store_true", help="Print nothing but errors.")
    return parser


def _analyze() -> ArgumentParser:
    about = "Describe the weights of a run: before pruning, the kept part, the removed part; each layer and together."
    parser = _parser("analyze DIR", about, ANALYZE_EXAMPLES)
    _folder(parser)
    parser.add_argument("--json", type=str, metavar="FILE", help="File for every figure, with densities for plots.")
    parser.add_argument("--quiet", action="store_true", help="Print nothing but errors.")
    return parser


def _methods() -> ArgumentParser:
    parser = _parser("methods", "List the methods of pruning that `dllp prune --method` knows.", "")
    parser.add_argument("--json", type=str, metavar="FILE", help="File for the list.")
    return parser


def _trust(group: Any) -> None:
    group.add_argument("--trust-imports", action="store_true", help="Import the network that a settings file names.")


def _bench() -> ArgumentParser:
    about = "Run what a table of the paper still lacks, and write the table from everything that is finished."
    parser = _parser("bench NAME", about, BENCH_EXAMPLES)
    parser.add_argument("name", type=str, metavar="NAME", help=f"{', '.join(TABLES)}.")
    parser.add_argument("--seeds", type=int, nargs="+", metavar="N", help="Seeds, instead of each row's own.")
    parser.add_argument("--rows", type=str, nargs="+", metavar="ROW", help="Rows to run, by name or pattern.")
    parser.add_argument("--out", type=str, default=RESULTS, metavar="DIR", help="Folder of all results.")
    text = "Folder of images for table3: class folders or tar shards, of any size."
    parser.add_argument("--data", type=str, metavar="FOLDER", help=text)
    _add_fields(parser, Task, ("data_root", "image_size", "workers"))
    _add_fields(parser, Config, ("device", "recompute"))
    text = "float32, or bfloat16 with float32 master weights. (default: bfloat16 on CUDA)"
    parser.add_argument("--precision", type=Literal["float32", "bfloat16"], metavar="float32|bfloat16", help=text)
    parser.add_argument("--epochs", type=int, metavar="N", help="Epochs of a quick try, in a folder of its own.")
    text = "Training images to hold out and evaluate on instead of the test set, in a folder of its own."
    parser.add_argument("--validation", type=int, metavar="N", help=text)
    parser.add_argument("--shard", type=str, metavar="I/N", help="Run the I-th of N shares of the jobs.")
    parser.add_argument("--list", action="store_true", help="Print the jobs and what is finished, and run nothing.")
    parser.add_argument("--summary-only", action="store_true", help="Write the table again, and run nothing.")
    parser.add_argument("--quiet", action="store_true", help="Print nothing but errors.")
    return parser


def _add_fields(group: Any, cls: type, names: Sequence[str], **override: Any) -> None:
    """An option for each named field of a dataclass, explained by its docstring."""
    types, texts = typing.get_type_hints(cls), _texts(cls)
    for field in fields(cls):
        if field.name not in names:
            continue
        text = texts[field.name] + (" (default: *)" if field.name in SUITED else "")
        options = {"default": field.default, "help": text, **override}
        flag, kind = "--" + field.name.replace("_", "-"), types[field.name]
        if kind is bool:
            group.add_argument(flag, action=ActionYesNo(no_prefix="no-"), **options)
        else:
            group.add_argument(flag, type=kind, metavar=_metavar(kind), **options)


def _metavar(kind: Any) -> str:
    """Choices as they are typed, and what kind of value anything else is."""
    words = {int: "N", float: "NUMBER", str: "TEXT", tuple[float, float]: "[LOW,HIGH]", type(None): ""}
    if isinstance(kind, str):
        return kind
    return words[kind] if kind in words else "|".join(filter(None, map(_metavar, typing.get_args(kind))))


def _texts(cls: type) -> dict[str, str]:
    """Field name -> its text in the docstring's Args; a field explained beside another one points there."""
    entries = re.findall(r"^ {8}([\w, ]+): (.*(?:\n {12}.*)*)", cls.__doc__ or "", re.MULTILINE)
    own = {name: " ".join(text.split()) for names, text in entries for name in names.split(", ")}
    for field in fields(cls):
        if field.name not in own:
            owner = next((name for name, text in own.items() if f"`{field.name}`" in text), "")
            own[field.name] = f"See --{owner.replace('_', '-')}."
    return own


def _dashed(word: str) -> str:
    """--keep_flops=0.5 -> --keep-flops=0.5."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if word.startswith("--") else word


def _weights(words: list[str]) -> list[str]:
    """--init FILE -> --weights FILE."""
    for i, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == "--init" and (value if equals else " ".join(words[i + 1 : i + 2])).endswith(SUFFIXES):
            words[i] = "--weights" + equals + value
    return words


# ---- one line for every mistake

_KINDS = {"<class 'int'>": "a whole number", "<class 'float'>": "a number", "<class 'str'>": "text"}


def _plain(message: str) -> str:
    """A parser's message as one line in the user's words."""
    unknown = re.match(r"unrecognized arguments: (--[\w-]+)", message)
    if unknown:
        options = [
            flag
            for parser in (_prune(), _evaluate(), _analyze(), _report(), _export(), _speed(), _bench(), _methods())
            for flag in parser._option_string_actions
        ]
        return f"unknown option {unknown[1]}{_near(unknown[1], options)}"
    key = re.match(r'Parser key "(\w+)"(?: element \d+)?:', message)
    if not key:
        message = re.sub(r"(evaluate|analyze|report|export|speed)\.folders?", "the run folder", message)
        return message.replace("bench.name", "the table's name").replace("export.out", "--out FILE")
    kinds: list[str] = re.findall(r"Expected an? (typing\.Literal\[.*?\]|<class '\w+'>)", message)
    words = [_KINDS.get(kind) or kind.removeprefix("typing.Literal").strip("[]").replace("'", "") for kind in kinds]
    wanted = [word for word in words if not word.startswith("<")]
    value = re.search(r"(?:Got|Given) value: (.*)\Z", message)
    return f"{key[1]} = {value[1] if value else '?'}: expected {' or '.join(dict.fromkeys(wanted))}"


def _near(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f": did you mean {near[0]}?" if near else ": see dllp prune --help"
