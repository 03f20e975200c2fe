"""The settings of a run, and files that hold them, such as a run folder's config.yaml.

A run is described by a :class:`Task` and a :class:`dllp.Config`. Every name and type is checked against both. Loads
neither PyTorch nor, before a file is read, yaml: `dllp --help` and benches on bare machines do without.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from dllp import files
from dllp.config import LONG, RETIRED, Config, check_retired, fits, in_words, types_of
from dllp.errors import ArtifactError, ConfigError, nearest

DLLP, DENSE = "dllp", "dense"  # methods of this package itself: its own, and plain training of the whole network
SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")  # endings of files with trained weights
SETTINGS_BYTES = 2**16  # most bytes of a settings file


@dataclass(frozen=True)
class Task:
    """The part of a run's settings that is not :class:`dllp.Config`.

    Args:
        data: `digits` (embedded), `cifar10`, or a folder: train/<class>/*.jpg and val or test/<class>/*.jpg, of any
            size; the same as tar shards; or train_x.npy, train_y.npy, test_x.npy and test_y.npy. Or
            package.module:function, which returns what dllp.prune takes as data; such a run is not evaluated.
        model: A network's name, or package.module:factory, called without arguments.
        loss: package.module:function, called with the network and a batch, in place of the task's own loss.
        weights: Trained weights to start from, .safetensors or .pt, read without running any code of theirs;
            `--init FILE` is the same.
        preset: The `paper`'s own setting, `short` for 5 to 60 epochs from trained weights with those as teacher, or
            `default`; by default `short` where a file of weights is given. Single options still win.
        data_root: Folder in which `cifar10` is looked for.
        image_size: Side to which images of class folders and shards are resized; other data are taken as they are.
        augment: Augmentation of training images; by default crop-flip for colour images in memory, resized-crop for
            large folders and shards, which are streamed.
        workers: Processes that decode streamed images; by default one for each core, up to 16.
        max_bad: Share of a split's images that may be unreadable; they are named and left out.
        leave_out: Classes by name, separated by commas, that training never shows: see --ood of dllp evaluate.
        validation: Fraction or number of training examples to hold out, and to evaluate on instead of the test set.
        dense: Compare with the dense network: the given one, or one trained by the same recipe where init is fresh.
        method: `dllp`, or one of the methods that `dllp methods` lists, trained by the same recipe to the same budget;
            with hyperparameters, for example `polarization:strength=1e-4,t=1.1`. `dense` trains and removes nothing.
        finetune_epochs: Epochs of training after the cut, for other methods than dllp.
        profile: File of `dllp profile` for keep_latency; without it this machine is measured: onnxruntime (or PyTorch,
            where that is not installed and on CUDA), one thread, batch 1.
        threads: CPU threads of the run; by default one or all, whichever is faster as it starts. Bits depend on them.
    """

    data: str = "digits"
    model: str = "small_cnn"
    loss: str | None = None
    weights: str | None = None
    preset: Literal["default", "paper", "short"] | None = None
    data_root: str | None = None
    image_size: int | None = None
    augment: Literal["none", "crop-flip", "resized-crop"] | None = None
    workers: int | None = None
    max_bad: str = "0.1%"
    leave_out: str = ""
    validation: int | float = 0
    dense: bool = True
    method: str = DLLP
    finetune_epochs: int = 0
    profile: str | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"threads = {self.threads}: at least 1 is needed")
        if self.finetune_epochs and self.method == DLLP:
            raise ConfigError(
                "finetune_epochs is for other methods: dllp trains on within its own epochs, leave it out or give 0"
            )
        if ("data" in self.code or self.loss) and (self.code[:2] != ("model", "data") or self.method != DLLP):
            raise ConfigError(
                "data or a loss of your own code need data and network of your own code, and method dllp: give --model "
                "package:factory and --data package:data"
            )

    @property
    def split(self) -> str:
        """Name of the part that the run is evaluated on."""
        return "validation" if self.validation else "test"

    @property
    def is_code(self) -> bool:
        """The network comes from an import."""
        return ":" in self.model

    @property
    def code(self) -> tuple[str, ...]:
        """Fields whose values are code to be imported."""
        data = ":" in self.data and not Path(self.data).exists()
        named = {"model": self.is_code, "data": data, "loss": self.loss is not None}
        return tuple(name for name, imported in named.items() if imported)

    @property
    def short(self) -> bool:
        """The run has the schedule for trained weights."""
        return self.preset == "short" or (self.preset is None and self.weights is not None and self.method == DLLP)

    def anchored(self) -> Task:
        """The same, its folders by absolute paths: it can be read from anywhere."""
        found = {name: getattr(self, name) for name in ("data", "data_root")}
        paths = {name: str(Path(p).resolve()) for name, p in found.items() if p and Path(p).is_dir()}
        given = {"weights": self.weights, "profile": self.profile}
        paths |= {name: str(Path(path).resolve()) for name, path in given.items() if path}
        return replace(self, **paths)

    def config(self, values: Mapping[str, Any], **suited: Any) -> Config:
        """Defaults, what is `suited` to the data and the method, the preset, the user's `values`: the later wins."""
        if self.weights:
            suited["init"] = "given"
            if values.get("init", "given") != "given":
                raise ConfigError("weights are given, but init = fresh would throw them away: leave out one of them")
        if self.preset == "paper":
            return Config.paper(**(suited | dict(values)))
        short = self.short
        if not self.is_code and not self.weights:
            if short:
                raise ConfigError("preset = short starts from trained weights: give --init FILE, or a network of yours")
            if values.get("teacher") == "given" and self.method == DLLP:
                raise ConfigError("teacher = given needs a trained network: give --init FILE, or a network of yours")
            suited["init"] = "fresh"  # a network by name has no weights worth starting from
        if self.data == "digits" and not short:
            suited["epochs"] = 30
        if self.preset == "default":
            suited = dict(LONG) | suited
        return (Config.short if short else Config)(**(suited | dict(values)))


TASK = tuple(field.name for field in fields(Task))


def split(values: Mapping[str, Any]) -> tuple[Task, dict[str, Any]]:
    """Settings by name as a task and the values for a Config."""
    own = {name: values[name] for name in TASK if name in values}
    return Task(**own), {name: value for name, value in values.items() if name not in TASK}


def convert(name: str, value: Any, kind: Any) -> Any:
    """A setting, as text or as YAML has it, in its annotated type."""
    try:
        return _converted(value, kind)
    except (ValueError, OverflowError):
        wanted = in_words(kind)
    if name == "init":
        wanted += f" or a file of trained weights ({', '.join(SUFFIXES)}; in a settings file that is `weights`)"
    raise ConfigError(f"{name} = {value}: expected {wanted}")


def _converted(value: Any, kind: Any) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        if type(None) in inner and value in (None, "null"):
            return None
        for part in inner:
            with suppress(ValueError):
                return _converted(value, part)
    elif origin is tuple:
        parts = value.strip("[]").split(",") if isinstance(value, str) else value
        if isinstance(parts, list) and len(parts) == len(inner):
            return tuple(_converted(part, float) for part in parts)
    elif kind in (int, float):
        if isinstance(value, str) or fits(value, kind):
            number = kind(value)
            if math.isfinite(number):
                return number
    elif fits(value, kind):
        return value
    raise ValueError


def read(path: Path) -> dict[str, Any]:
    """Fields of Task and Config by name, as a settings file gives them."""
    values = _parse(files.read_bytes(path, SETTINGS_BYTES, ConfigError), path)
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no settings: lines such as `epochs: 60` are needed")
    kinds = {**types_of(Task), **types_of(Config)}
    try:
        found = {}
        for name, value in values.items():
            name = str(name).replace("-", "_")
            if name not in kinds and name not in RETIRED:
                raise ConfigError(f"unknown name {name!r}: {nearest(name, kinds, 'see dllp prune --help')}")
            found[name] = convert(name, value, kinds[name]) if name in kinds else value
        found = check_retired(found)
        task, rest = split(found)
        task.config(rest)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return found


def _parse(content: bytes, path: Path) -> Any:
    """Less than YAML: no tags, anchors or aliases, no name twice."""
    import yaml

    try:
        for event in yaml.parse(content, yaml.SafeLoader):
            if getattr(event, "anchor", None) or getattr(event, "tag", None):
                raise yaml.YAMLError(f"line {event.start_mark.line + 1} has a tag, an anchor or an alias")
        root, seen = yaml.compose(content, yaml.SafeLoader), set()
        for key, _ in root.value if isinstance(root, yaml.MappingNode) else ():
            name = str(key.value).replace("-", "_")
            if name in seen:
                raise yaml.YAMLError(f"line {key.start_mark.line + 1} gives {name[:64]} a second time")
            seen.add(name)
        return yaml.safe_load(content)
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:  # yaml's own
        raise ConfigError(f"{path} is not plain YAML: {error}") from None


def write(task: Task, config: Config, left_out: Iterable[str] = ()) -> bytes:
    """The text of a settings file that makes the same run again."""
    import yaml

    values = asdict(task) | config.as_dict()
    return yaml.safe_dump({k: v for k, v in values.items() if k not in left_out}, sort_keys=False).encode()


def is_trusted(folder: Path, code: str) -> bool:
    """True where a user trusted `package.module:factory` for this folder before."""
    return code in _trusted().get(str(folder.resolve()), ())


def trust(folder: Path, code: Iterable[str]) -> None:
    """Remember code as trusted for this folder; where that cannot be written, commands ask again."""
    known, key = _trusted(), str(folder.resolve())
    wanted = sorted({*known.get(key, ()), *code})
    if wanted != known.get(key, []):
        with suppress(ArtifactError):
            files.write_json(_trust_file(), known | {key: wanted})


def _trusted() -> dict[str, list[str]]:
    """Absolute folder -> code that may be imported for it; a file that cannot be read trusts nothing."""
    try:
        return files.typed(dict[str, list[str]], files.read_json(_trust_file()), _trust_file())
    except ArtifactError:
        return {}


def _trust_file() -> Path:
    """Never in a run folder: whoever hands one over must not be able to say what may be imported from it."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "dllp" / "trusted.json"
