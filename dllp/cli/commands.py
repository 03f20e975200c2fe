"""The options of each command."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Literal

from jsonargparse import ArgumentParser

from dllp.cli import help_examples
from dllp.cli.fields import add_fields, new_parser
from dllp.cli.task import Task
from dllp.config import Config
from paper.command import RESULTS
from paper.tables import TABLES

OUT = "runs/last"
ROUND_TO = 8
"""Multiple of channels whose effect `dllp speed` shows."""
MAIN = ("keep_flops", "keep_params", "granularity", "particles", "epochs", "batch_size", "seed", "init", "device")
"""Fields of Config that help shows first."""
TASK = tuple(field.name for field in fields(Task))


# ---- what several commands take


def _folder(parser: ArgumentParser) -> None:
    """What commands take that read a run folder without its data."""
    parser.add_argument("folder", type=str, metavar="DIR", help="Folder of a finished run.")
    parser.add_argument("--particle", type=int, default=1, metavar="K", help="Which extracted network, from 1.")
    add_fields(parser, Task, ("model",), default=None)
    _trust(parser)
    text = "Shape of one input, where the run does not say it: channels, height, width."
    parser.add_argument("--shape", type=int, nargs="+", metavar="N", help=text)


def _trust(group: Any) -> None:
    group.add_argument("--trust-imports", action="store_true", help="Import the network that a settings file names.")


def _quiet(group: Any) -> None:
    group.add_argument("--quiet", action="store_true", help="Print nothing but errors.")


# ---- one parser each


def prune() -> ArgumentParser:
    parser = new_parser(
        "prune", "Train and prune a network in one run, and write it into a folder.", help_examples.PRUNE
    )
    add_fields(parser.add_argument_group("data and network"), Task, TASK)
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
    _quiet(group)
    add_fields(parser.add_argument_group("what to keep, and how long to train"), Config, MAIN)
    rest = [field.name for field in fields(Config) if field.name not in MAIN]
    add_fields(parser.add_argument_group("recipe"), Config, rest)
    return parser


def evaluate() -> ArgumentParser:
    about = "Measure the networks of a run folder, by default on the run's own test data."
    parser = new_parser("evaluate DIR", about, help_examples.EVALUATE)
    parser.add_argument("folder", type=str, metavar="DIR", help="Folder of a finished run.")
    add_fields(parser, Task, ("data", "model", "data_root", "image_size", "workers", "max_bad"), default=None)
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


def report() -> ArgumentParser:
    about = "Show a finished run as one self-contained HTML page, or compare several."
    parser = new_parser("report DIR...", about, help_examples.REPORT)
    parser.add_argument("folders", type=str, nargs="+", metavar="DIR", help="Folders of finished runs.")
    text = "File to write. (default: report.html in the run's folder; for several runs in the current one)"
    parser.add_argument("--out", type=str, metavar="FILE", help=text)
    add_fields(parser, Task, ("data", "model", "data_root"), default=None)
    _trust(parser)
    _quiet(parser)
    return parser


def export() -> ArgumentParser:
    about = "Write a run's networks as one file for other runtimes, with a dynamic batch."
    parser = new_parser("export DIR --out FILE", about, help_examples.EXPORT)
    _folder(parser)
    parser.add_argument("--out", type=str, required=True, metavar="FILE", help="File to write.")
    parser.add_argument(
        "--format",
        type=Literal["onnx", "pt2"],
        metavar="onnx|pt2",
        help="Its kind; by default what its name ends in, or onnx.",
    )
    parser.add_argument("--posterior", action="store_true", help="All particles, with their doubt as further outputs.")
    parser.add_argument("--uint8", action="store_true", help="Take raw images and normalise them inside.")
    text = "Add dead channels up to multiples of this; the outputs stay the same."
    parser.add_argument("--pad-to", type=int, default=1, metavar="N", help=text)
    return parser


def speed() -> ArgumentParser:
    about = "Measure time, memory and bytes of the dense and the pruned network, in PyTorch and onnxruntime."
    parser = new_parser("speed DIR", about, help_examples.SPEED)
    _folder(parser)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64], metavar="N", help="Batch sizes.")
    text = "Show what multiples of this many channels would do; 1 for nothing."
    parser.add_argument("--round-to", type=int, default=ROUND_TO, metavar="N", help=text)
    parser.add_argument("--seconds", type=float, default=5.0, metavar="NUMBER", help="Time for each setting.")
    parser.add_argument("--json", type=str, metavar="FILE", help="File for every figure.")
    _quiet(parser)
    return parser


def analyze() -> ArgumentParser:
    about = "Describe the weights of a run: before pruning, the kept part, the removed part; each layer and together."
    parser = new_parser("analyze DIR", about, help_examples.ANALYZE)
    _folder(parser)
    parser.add_argument("--json", type=str, metavar="FILE", help="File for every figure, with densities for plots.")
    _quiet(parser)
    return parser


def bench() -> ArgumentParser:
    about = "Run what a table of the paper still lacks, and write the table from everything that is finished."
    parser = new_parser("bench NAME", about, help_examples.BENCH)
    parser.add_argument("name", type=str, metavar="NAME", help=f"{', '.join(TABLES)}.")
    parser.add_argument("--seeds", type=int, nargs="+", metavar="N", help="Seeds, instead of each row's own.")
    parser.add_argument("--rows", type=str, nargs="+", metavar="ROW", help="Rows to run, by name or pattern.")
    parser.add_argument("--out", type=str, default=RESULTS, metavar="DIR", help="Folder of all results.")
    text = "Folder of images for table3: class folders or tar shards, of any size."
    parser.add_argument("--data", type=str, metavar="FOLDER", help=text)
    add_fields(parser, Task, ("data_root", "image_size", "workers", "max_bad"))
    add_fields(parser, Config, ("device", "recompute"))
    text = "float32, or bfloat16 with float32 master weights. (default: bfloat16 on CUDA)"
    parser.add_argument("--precision", type=Literal["float32", "bfloat16"], metavar="float32|bfloat16", help=text)
    parser.add_argument("--epochs", type=int, metavar="N", help="Epochs of a quick try, in a folder of its own.")
    text = "Training images to hold out and evaluate on instead of the test set, in a folder of its own."
    parser.add_argument("--validation", type=int, metavar="N", help=text)
    text = "Settings instead of the recipe's, or of a method's own, in a folder of its own."
    parser.add_argument("--set", type=str, nargs="+", metavar="NAME=VALUE", help=text)
    parser.add_argument("--shard", type=str, metavar="I/N", help="Run the I-th of N shares of the jobs.")
    text = "Where jobs run: worker processes of this machine, or a Ray cluster. (default: this process, one by one)"
    parser.add_argument("--launcher", type=Literal["local", "ray"], metavar="local|ray", help=text)
    text = "Jobs at once. (default: one for each CUDA device, or 2; on Ray as many as the cluster holds)"
    parser.add_argument("--jobs", type=int, metavar="N", help=text)
    text = "Head of the Ray cluster: HOST:PORT, auto, or local. (default: $RAY_ADDRESS, or a Ray of its own)"
    parser.add_argument("--address", type=str, metavar="TEXT", help=text)
    parser.add_argument("--cpus", type=int, metavar="N", help="Processors for each job on Ray. (default: 1)")
    parser.add_argument("--list", action="store_true", help="Print the jobs and what is finished, and run nothing.")
    parser.add_argument("--summary-only", action="store_true", help="Write the table again, and run nothing.")
    _quiet(parser)
    return parser


def methods() -> ArgumentParser:
    parser = new_parser("methods", "List the methods of pruning that `dllp prune --method` knows.", "")
    parser.add_argument("--json", type=str, metavar="FILE", help="File for the list.")
    return parser


COMMANDS = {
    "prune": (prune, "train and prune a network in one run"),
    "evaluate": (evaluate, "measure the networks of a run folder"),
    "analyze": (analyze, "say what a run did to the distribution of its weights"),
    "report": (report, "show a run as one HTML page, or compare several"),
    "export": (export, "write a run's networks as ONNX or pt2"),
    "speed": (speed, "time the dense against the pruned network"),
    "bench": (bench, "measure a table of the paper"),
    "methods": (methods, "list the methods of pruning, with paper and year"),
}
"""What makes each command's parser, and its line in the list of commands."""
