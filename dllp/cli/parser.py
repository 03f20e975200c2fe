"""The options of each command, and the words of a command line as a Namespace.

Options for the fields of Task and Config are made from their annotations and explained by their docstrings. Loads no
PyTorch: `dllp --help` is there at once.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import fields
from importlib import import_module
from typing import Any, Literal, NoReturn, get_args

from dllp import __version__
from dllp.config import OPEN, Config, types_of
from dllp.errors import ConfigError, nearest
from dllp.runs.settings import SUFFIXES, TASK, Task, convert

ABOUT = "Neural networks made small by Bayesian pruning, with a posterior that says how far to trust what is left."
NETWORKS = ("mlp", "resnet20", "resnet50", "resnet56", "small_cnn", "small_resnet", "vgg11_bn", "vgg16_bn")
"""Names that `dllp.zoo` knows, which takes PyTorch to ask; a test holds both equal."""
MAIN = ("keep_flops", "keep_params", "keep_latency", "granularity", "particles", "epochs", "batch_size", "seed", "init",
        "device")  # fmt: skip
"""Fields of Config that help shows first."""
SUITED = (*OPEN, "init", "task")  # fields of Config whose default depends on data and network
CHOSEN = "chosen."  # start of the names of options for fields of Task and Config until they are collected
Group = Any  # a parser or a group of its options: argparse has no public type for both


class Parser(argparse.ArgumentParser):
    """Mistakes are errors of one line that says where help is; examples keep their lines."""

    def __init__(self, **options: Any) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(formatter_class=formatter, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def parse(words: Sequence[str]) -> argparse.Namespace:
    """One command line: `command`, the command's own options by name, and `chosen`, given fields of Task and Config."""
    parser = Parser(
        prog="dllp", usage=f"dllp {', '.join(COMMANDS)} [options]", description=ABOUT,
        epilog="`dllp COMMAND --help` explains a command and shows examples.",
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"dllp {__version__}", help="Print version and exit.")
    commands = parser.add_subparsers(
        prog="dllp", title="commands", dest="command", metavar="COMMAND", required=True, parser_class=Parser
    )
    for name, (line, add_options) in COMMANDS.items():
        command = commands.add_parser(name, help=line)
        if name in words[:1] or name != "bench":
            add_options(command)
    args, rest = parser.parse_known_args(_usual(words))
    if rest:
        word = next((word.partition("=")[0] for word in rest if word.startswith("-")), rest[0])
        known = commands.choices[args.command]._option_string_actions if word.startswith("-") else ()
        raise ConfigError(f"unexpected argument {word}: {nearest(word, known, f'see dllp {args.command} --help')}")
    given = vars(args)
    args.chosen = {name.removeprefix(CHOSEN): given.pop(name) for name in [*given] if name.startswith(CHOSEN)}
    return args


def _usual(words: Sequence[str]) -> list[str]:
    """Other ways to write an option as the usual one: --keep_flops=0.5, and --init FILE for --weights FILE."""
    found = list(words)
    for i, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == "--init" and (value if equals else "".join(words[i + 1 : i + 2])).endswith(SUFFIXES):
            name = "--weights"
        found[i] = name.replace("_", "-") + equals + value if name.startswith("--") else word
    return found


# ---- options by their types


def add(group: Group, flag: str, kind: Any, text: str, *, least: int | None = None, **options: Any) -> None:
    """An option with values of an annotated type, numbers of at least `least`; a bool by its name alone.

    Help shows a default that is given.
    """

    def value(word: str) -> Any:
        found = convert(name, word, kind)
        if least is not None and found < least:
            raise ConfigError(f"{name} = {word}: at least {least} is needed")
        return found

    name = flag.removeprefix("--").replace("-", "_")
    if options.get("default", argparse.SUPPRESS) is not argparse.SUPPRESS:
        text += f" (default: {options['default']})"
    if kind is bool:
        options.setdefault("action", "store_true")
    else:
        options.setdefault("metavar", _metavar(kind))
        options["type"] = value
    group.add_argument(flag, help=text.replace("%", "%%"), **options)


def add_fields(group: Group, cls: type, names: Sequence[str], *, defaults: bool = True, prefix: str = CHOSEN) -> None:
    """An option for each named field of a dataclass; one that is not given leaves no trace."""
    kinds, texts = types_of(cls), _texts(cls)
    usual = {field.name: field.default for field in fields(cls)}
    for name in names:
        kind, text = kinds[name], texts[name]
        if name in SUITED:
            text += " (default: *)"
        elif defaults and usual[name] is not None and usual[name] is not False:
            text += f" (default: {usual[name]})"
        options: dict[str, Any] = {"default": argparse.SUPPRESS, "dest": prefix + name}
        if bool in (kind, *get_args(kind)):
            kind, options["action"] = bool, argparse.BooleanOptionalAction
        add(group, "--" + name.replace("_", "-"), kind, text, **options)


def _metavar(kind: Any) -> str:
    """Choices as they are typed, and a word for any other kind of value."""
    words = {int: "N", float: "NUMBER", str: "TEXT", tuple[float, float]: "[LOW,HIGH]", type(None): ""}
    if isinstance(kind, str):
        return kind
    return words[kind] if kind in words else "|".join(filter(None, map(_metavar, get_args(kind))))


def _texts(cls: type) -> dict[str, str]:
    """Field name -> its text in the Args of its class or a base; a field explained beside another one points there."""
    docs = "\n".join(base.__doc__ or "" for base in cls.__mro__ if base is not object)
    entries = re.findall(r"^ {8}([\w, ]+): (.*(?:\n {12}.*)*)", docs, re.MULTILINE)
    own = {name: " ".join(text.split()) for names, text in entries for name in names.split(", ")}
    for field in fields(cls):
        if field.name not in own:
            owner = next((name for name, text in own.items() if f"`{field.name}`" in text), "")
            own[field.name] = f"See --{owner.replace('_', '-')}."
    return own


# ---- options that several commands take

TRUST = "--trust-imports", bool, "Import the code that a settings file names; of a run folder it is asked for once."
QUIET = "--quiet", bool, "Print nothing but errors."


def _describe(parser: Parser, usage: str, about: str, examples: str) -> None:
    parser.usage, parser.description, parser.epilog = f"dllp {usage} [options]", about, examples


def _folder(parser: Parser) -> None:
    """Options of commands that read one network of a run folder, without its data."""
    parser.add_argument("folder", metavar="DIR", help="Folder of a finished run.")
    add(parser, "--particle", int, "Which extracted network, from 1.", default=1, metavar="K")
    add_fields(parser, Task, ("model",), defaults=False)
    add(parser, *TRUST)
    text = "Shape of one input, where the run does not say it: channels, height, width."
    add(parser, "--shape", int, text, nargs="+", least=1)


def add_launcher(group: Group) -> None:
    """Options of commands that spread jobs; those that are not given leave no trace."""
    text = "Where jobs run: worker processes of this machine, or a Ray cluster. (default: this process, one by one)"
    add(group, "--launcher", Literal["local", "ray"], text, default=argparse.SUPPRESS)
    text = "Jobs at once. (default: one for each CUDA device, or 2; on Ray as many as the cluster holds)"
    add(group, "--jobs", int, text, default=argparse.SUPPRESS)
    text = "Head of the Ray cluster: HOST:PORT, auto, or local. (default: $RAY_ADDRESS, or a Ray of its own)"
    add(group, "--address", str, text, default=argparse.SUPPRESS)
    add(group, "--cpus", int, "Processors for each job on Ray. (default: 1)", default=argparse.SUPPRESS)


# ---- one function a command


def _prune(parser: Parser) -> None:
    _describe(parser, "prune", "Train and prune a network in one run, and write it into a folder.", PRUNE)
    add_fields(parser.add_argument_group("data and network"), Task, TASK)
    group = parser.add_argument_group("run folder and output")
    add(group, "--out", str, "Folder of the run.", default="runs/last", metavar="DIR")
    add(group, "--overwrite", bool, "Replace the run that the folder holds.")
    add(group, "--resume", bool, "Go on with the unfinished run in the folder.")
    text = "Steps between two checkpoints, besides one at each epoch's end; 0 for no others."
    add(group, "--checkpoint-steps", int, text, default=0, least=0)
    text = "Minutes between two checkpoints, besides one at each epoch's end; 0 for no others."
    add(group, "--checkpoint-minutes", float, text, default=10.0, least=0)
    add(group, "--config", str, "YAML settings, such as a run folder's config.yaml.", metavar="FILE")
    add(group, *TRUST)
    text = "Curves and histograms for TensorBoard, in the run folder; needs pip install 'dllp[tensorboard]'."
    add(group, "--tensorboard", bool, text)
    add(group, *QUIET)
    add_fields(parser.add_argument_group("what to keep, and how long to train"), Config, MAIN)
    rest = [field.name for field in fields(Config) if field.name not in MAIN]
    add_fields(parser.add_argument_group("recipe"), Config, rest)
    parser.set_defaults(brief=False)  # a run of `dllp compare` shows its epochs alone


def _compare(parser: Parser) -> None:
    about = "Prune a network by several methods, to several budgets, with several seeds, and compare what comes out."
    _describe(parser, "compare", about, COMPARE)
    group = parser.add_argument_group("data and network")
    names = ("data", "model", "weights", "data_root", "image_size", "augment", "workers", "max_bad", "leave_out",
             "validation", "threads")  # fmt: skip
    add_fields(group, Task, names)
    group = parser.add_argument_group("what to compare")
    text = "`dllp` or any that `dllp methods` lists, as for --method of dllp prune. (default: dllp l1-filters fpgm)"
    add(group, "--methods", str, text, nargs="+", metavar="METHOD")
    add(group, "--keep-flops", float, "Fractions of the multiply-accumulates to keep.", nargs="+")
    add(group, "--keep-params", float, "Fractions of the parameters to keep.", nargs="+")
    add(group, "--seeds", int, "Number of seeds, counted from --seed.", default=3)
    add(group, "--epochs", int, "Epochs of every method after the dense network's.", default=30)
    text = "Epochs of the dense network. (default: 60, digits 30; none where the given network has learned its task)"
    add(group, "--dense-epochs", int, text)
    group = parser.add_argument_group("folder and output")
    add(group, "--out", str, "Folder of the comparison, with a run folder for each run.", required=True, metavar="DIR")
    add(group, *QUIET)
    add_launcher(parser.add_argument_group("several runs at once"))
    names = ("granularity", "particles", "batch_size", "lr", "optimizer", "weight_decay", "round_to", "gate_linear",
             "seed", "init", "device", "precision", "deterministic", "recompute", "accumulate", "on_nan")  # fmt: skip
    add_fields(parser.add_argument_group("recipe of all runs"), Config, names)
    parser.set_defaults(methods=["dllp", "l1-filters", "fpgm"], trust_imports=False)


def _evaluate(parser: Parser) -> None:
    about = "Measure the networks of a run folder, by default on the run's own test data."
    _describe(parser, "evaluate DIR", about, EVALUATE)
    parser.add_argument("folder", metavar="DIR", help="Folder of a finished run.")
    names = ("data", "model", "data_root", "image_size", "workers", "max_bad")
    add_fields(parser, Task, names, defaults=False)
    add(parser, *TRUST)
    text = "gaussian-blur:RADIUS,..., sharpen, noise:SIGMA,... (in units of 0..1)."
    add(parser, "--corrupt", str, text, nargs="+", metavar="KIND")
    text = "Out-of-distribution inputs: noise, digits, cifar10, left-out (see --leave-out of dllp prune), or a folder."
    add(parser, "--ood", str, text, nargs="+", metavar="NAME")
    add(parser, "--references", bool, "Also measure the particles before extraction.")
    text = "Also measure N networks for each particle whose gates are drawn by their probabilities."
    add(parser, "--gate-draws", int, text)
    add(parser, "--subset", float, "Fraction of the examples to use.")
    add(parser, "--device", str, "auto, cpu, cuda or cuda:K.", default="auto")
    add(parser, "--json", str, "File for the table with every metric.", metavar="FILE")


def _analyze(parser: Parser) -> None:
    about = "Describe the weights of a run: before pruning, the kept part, the removed part; each layer and together."
    _describe(parser, "analyze DIR", about, ANALYZE)
    _folder(parser)
    add(parser, "--json", str, "File for every figure, with densities for plots.", metavar="FILE")
    add(parser, *QUIET)


def _report(parser: Parser) -> None:
    about = "Show a finished run as one self-contained HTML page, or compare several."
    _describe(parser, "report DIR...", about, REPORT)
    parser.add_argument("folders", nargs="+", metavar="DIR", help="Folders of finished runs.")
    text = "File to write. (default: report.html in the run's folder; for several runs in the current one)"
    add(parser, "--out", str, text, metavar="FILE")
    add_fields(parser, Task, ("data", "model", "data_root"), defaults=False)
    add(parser, *TRUST)
    add(parser, *QUIET)


def _export(parser: Parser) -> None:
    about = "Write a run's networks as one file for other runtimes, with a dynamic batch."
    _describe(parser, "export DIR --out FILE", about, EXPORT)
    _folder(parser)
    parser.set_defaults(particle=None)  # None: not given, as --posterior wants it
    add(parser, "--out", str, "File to write; of huggingface a new folder.", required=True, metavar="FILE")
    text = "Its kind; by default what its name ends in, or onnx. huggingface: an even cut that from_pretrained reads."
    add(parser, "--format", Literal["onnx", "pt2", "huggingface"], text)
    text = "All particles, with their uncertainty as further outputs."
    add(parser, "--posterior", bool, text)
    add(parser, "--uint8", bool, "Take raw images and normalise them inside.")
    text = "Add dead channels up to multiples of this; the outputs stay the same."
    add(parser, "--pad-to", int, text, default=1)
    group = parser.add_argument_group("int8, as `dllp speed` times it")
    text = "Quantise weights and activations, calibrated with training images; onnx only."
    add(group, "--int8", bool, text)
    add_fields(group, Task, ("data", "data_root", "image_size"), defaults=False)


def _speed(parser: Parser) -> None:
    about = "Measure time, memory and bytes of the dense and the pruned network, in PyTorch and onnxruntime."
    _describe(parser, "speed DIR", about, SPEED)
    _folder(parser)
    add(parser, "--batch", int, "Batch sizes.", nargs="+", default=[1, 64])
    text = "Show what multiples of this many channels would do; 1 for nothing."
    add(parser, "--round-to", int, text, default=8)
    add(parser, "--seconds", float, "Time for each setting.", default=5.0, least=0)
    add(parser, "--json", str, "File for every figure.", metavar="FILE")
    add(parser, *QUIET)


def _structure(parser: Parser) -> None:
    about = "List what of a network can be removed, what it costs, and what stays whole and why. Nothing is trained."
    _describe(parser, "structure", about, STRUCTURE)
    add_fields(parser, Task, ("model", "data", "data_root", "image_size"))
    add(parser, "--shape", int, "Shape of one input, in place of data: channels, height, width.", nargs="+", least=1)
    add(parser, "--tokens", int, "Length of one input of token numbers, in place of data.", least=1)
    add(parser, "--json", str, "File for every group.", metavar="FILE")
    add(parser, *QUIET)


def _profile(parser: Parser) -> None:
    about = "Time the layers of a network at several widths on this machine, for `dllp prune --keep-latency` on any."
    _describe(parser, "profile", about, PROFILE)
    add_fields(parser, Task, ("model", "data", "data_root", "image_size"))
    add(parser, "--shape", int, "Shape of one input, in place of data: channels, height, width.", nargs="+", least=1)
    add(parser, "--classes", int, "Outputs of a network by name, where no data say it.", default=10, least=1)
    kind = Literal["onnxruntime", "torch", "torch-cuda"]
    add(parser, "--runtime", kind, "Where it will run: CPU, or CUDA as a captured graph.", default="onnxruntime")
    add(parser, "--threads", int, "CPU threads.", default=1)
    add(parser, "--batch", int, "Examples in a call.", default=1)
    add(parser, "--out", str, "The profile.", default="profile.json", metavar="FILE")
    add(parser, *QUIET)


def _bench(parser: Parser) -> None:
    """The options are those of `python -m paper`, which is no part of the wheel."""
    try:
        paper = import_module("paper.__main__")
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("paper"):
            raise
        where = "which is in the source repository of dllp and not in its wheel: run it in a checkout"
        raise ConfigError(f"dllp bench needs the package `paper`, {where}") from None
    paper.add_options(parser)


def _methods(parser: Parser) -> None:
    _describe(parser, "methods", "List the methods of pruning that `dllp prune --method` knows.", "")
    add(parser, "--json", str, "File for the list.", metavar="FILE")


COMMANDS = {
    "prune": ("train and prune a network in one run", _prune),
    "compare": ("prune by several methods and seeds, one table", _compare),
    "evaluate": ("measure the networks of a run folder", _evaluate),
    "analyze": ("say what a run did to the distribution of its weights", _analyze),
    "report": ("show a run as one HTML page, or compare several", _report),
    "export": ("write a run's networks as ONNX or pt2", _export),
    "structure": ("list what of a network can be removed", _structure),
    "profile": ("time a network's layers for a latency budget", _profile),
    "speed": ("time the dense against the pruned network", _speed),
    "bench": ("measure a table of the paper", _bench),
    "methods": ("list the methods of pruning, with paper and year", _methods),
}
"""The line of each command in the list of commands, and the function that adds its options."""

# ---- ends of the help texts

PRUNE = f"""networks by name: {", ".join(NETWORKS)}

examples:
  dllp prune --data digits --model small_cnn --keep-flops 0.2 --out runs/demo
      a small network on embedded data, at a fifth of the original's cost
  dllp prune --data digits --model small_cnn --keep-flops 0.2 --particles 2 --out runs/two
      two of them, which tell together how sure they are
  dllp prune --data cifar10 --model resnet56 --keep-flops 0.45 --lr 0.4 --precision bfloat16 --out runs/resnet56
  dllp prune --data cifar10 --model resnet56 --init dense.safetensors --keep-latency 0.5 --profile phone.json
      half the time on the machine and runtime that `dllp profile` was run on
  dllp prune --data photos --model my_package.nets:trained --keep-params 0.3 --epochs 30 --out runs/mine
      images in photos/train/<class>/ and photos/test/<class>/, a trained network from your own function
  dllp prune --data imagenet --image-size 224 --workers 16 --model resnet50 --init resnet50.safetensors \\
             --keep-flops 0.34 --out runs/imagenet
      a folder of any size, decoded by 16 processes; trained weights, and the schedule of a short run
  dllp prune --config runs/demo/config.yaml --out runs/again
      the same run once more; options beside --config win over the file
  dllp prune --method fpgm --keep-flops 0.45 --finetune-epochs 10 --out runs/fpgm
      another method, to the same budget; `dllp methods` lists them
  torchrun --nproc-per-node 2 -m dllp prune --particles 2 --parallel particles --out runs/two
      a process for each particle; --parallel data shares batches instead, on any number of devices and hosts
  dllp prune --resume --out runs/demo
      goes on with a run that was stopped or killed, to the same result

defaults (*): a network by name starts fresh, one of your own as it is given, and `--init FILE` starts from trained
weights. What has learned its task gets the schedule for trained networks (`--preset short`): 30 epochs with itself as
teacher, rates that follow data and batch, and multiples of 8 channels where all layers are wide enough. Anything else
gets 60 epochs (digits: 30) from lr 0.1 to 0.001, as does all with `--preset default`. Fewer than 10,000 training
examples are taken in batches of 64, more in batches of 512; floating-point targets make a regression. The first lines
of a run say what was chosen. Names may be written with dashes or underscores, here and in files."""
COMPARE = """For each seed one dense network is trained, or taken as it is where it has learned its task. Every method
starts from it, is taught by it, and has --epochs more: dllp in one run, a method that only cuts for its fine-tuning,
one with a training of its own half for each. DIR holds a folder for each run, compare.md, compare.json and report.html.
The same command goes on where it was stopped. Needs pip install 'dllp[onnx,report]'.

examples:
  dllp compare --data digits --model small_cnn --methods dllp l1-filters fpgm --keep-flops 0.5 --seeds 3 --out cmp
  dllp compare --data photos --model my_package.nets:trained --keep-flops 0.5 0.3 --validation 0.1 --out cmp
      images in photos/train/<class>/, a trained network from your own function; a tenth of them held out to choose by
  dllp compare --data cifar10 --model resnet56 --init resnet56.safetensors --keep-flops 0.45 --jobs 4 --out cmp
      four runs at once; --launcher ray --address head:6379 for the nodes of a cluster that share DIR"""
EVALUATE = """examples:
  dllp evaluate runs/demo
  dllp evaluate runs/demo --corrupt gaussian-blur:1,2,3 sharpen noise:0.1 --json robustness.json
  dllp evaluate runs/demo --ood noise folder/of/photos
      how well uncertainty tells the test set from inputs that the network was never made for
  dllp evaluate runs/mine --model my_package.nets:trained --data other_photos --subset 0.2"""
EXPORT = """Needs pip install 'dllp[onnx]' for ONNX. The file is checked against PyTorch before it is written.

examples:
  dllp export runs/demo --format onnx --out demo.onnx
      the first particle: float32 images, normalised as in training, to logits
  dllp export runs/demo --posterior --uint8 --out demo.onnx
      raw images to prediction, aleatoric and epistemic uncertainty, all particles in one graph
  dllp export runs/demo --pad-to 8 --out demo.onnx
      dead channels up to multiples of 8: the same outputs, often much faster in onnxruntime
  dllp export runs/demo --int8 --out demo.onnx
      static int8, calibrated with training images of the run's own data; --data names other data"""
REPORT = """Needs pip install 'dllp[report]'. The page holds everything: it opens from a file and asks for
nothing. Latency is what `dllp speed` found before, or is measured briefly; corruptions are shown where
`dllp evaluate --corrupt` was run.

examples:
  dllp report runs/demo
      writes runs/demo/report.html
  dllp report runs/a runs/b runs/c --out comparison.html
      accuracy against FLOPs with the Pareto front, and where the settings differ"""
STRUCTURE = """examples:
  dllp structure --model resnet50 --shape 3 224 224
  dllp structure --model my_package.nets:trained --data photos --image-size 224 --json structure.json
  dllp structure --model my_package.nets:language_model --tokens 128
      attention heads, hidden neurons and the width of the residual stream"""
PROFILE = """Needs pip install 'dllp[onnx]' for onnxruntime. Weights do not matter, shapes do: give the run's
data, or shape and classes. Let nothing else run meanwhile.

examples:
  dllp profile --model resnet56 --shape 3 32 32 --batch 64 --out phone.json
  dllp profile --model my_package.nets:trained --shape 3 224 224 --threads 2 --out two.json
  dllp prune --model my_package.nets:trained --data photos --keep-latency 0.5 --profile two.json --out runs/fast"""
SPEED = """Needs pip install 'dllp[onnx]'. Networks take turns, so that all see the same machine.

examples:
  dllp speed runs/demo
  dllp speed runs/demo --batch 1 16 64 --round-to 16 --json speed.json"""
ANALYZE = """examples:
  dllp analyze runs/demo
  dllp analyze runs/demo --particle 2 --json shapes.json
      every figure, every fit, and the densities for plots"""
