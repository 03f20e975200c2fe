"""A cut network as a plain folder of Hugging Face: config.json and model.safetensors, read without this package.

One configuration gives every layer the same sizes, so the cut must be even (`Config.even`). Nothing is known of any
class: numbers of the configuration that go with a width that was cut are tried, and the outputs decide.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dllp.devices.trees import tensors
from dllp.errors import ConfigError, ExportError
from dllp.runs.folder import new_folder

TRIES = 256  # most configurations whose shapes are looked at
UNEVEN = (
    "its layers have sizes that no single config.json gives: save the run and use dllp.load, or prune with even = True"
)


@torch.no_grad()
def write(network: nn.Module, original: nn.Module, folder: Path, example: Tensor | Mapping[str, Tensor]) -> int:
    """Write a cut network into a new folder that `from_pretrained` of its own class reads; the number of bytes.

    `original` is the network before the cut, with its configuration. For the `example`, inputs or several by name, the
    network that is read back must give the same numbers, bit for bit.
    """
    if not all(hasattr(network, name) for name in ("config", "save_pretrained", "from_pretrained")):
        raise ConfigError(
            f"a {type(network).__name__} has no save_pretrained: format = huggingface is for networks of Hugging Face"
        )
    kind: Any = type(network)
    wanted = _answers(network, example)
    with new_folder(folder) as temporary:
        for config in _configurations(network, original):
            with suppress(Exception):  # sizes that contradict each other
                plain = kind(config)
                plain.load_state_dict(network.state_dict())
                if hasattr(network, "generation_config"):  # how it writes texts
                    plain.generation_config = network.generation_config
                plain.save_pretrained(temporary)
                loaded = kind.from_pretrained(temporary).eval()
                if all(map(torch.equal, _answers(loaded, example), wanted)):
                    return sum(file.stat().st_size for file in temporary.iterdir())
        raise ExportError(UNEVEN)


def _configurations(network: nn.Module, original: nn.Module) -> Iterator[Any]:
    """Configurations from which the network's class makes tensors of the cut network's shapes, least changes first."""
    kind, config = type(network), original.config
    shapes, before = ({name: tensor.shape for name, tensor in n.state_dict().items()} for n in (network, original))
    pairs = {(o, n) for name in shapes for o, n in zip(before[name], shapes[name], strict=True) if o != n}
    sizes: dict[str, list[Any]] = {}
    others: dict[str, list[Any]] = {}
    for name, value in vars(config).items():
        if value is None:  # a size that follows from others unless it is given
            found = sorted({n for shape in shapes.values() for n in shape})
        elif type(value) is int and value > 1:  # a width o that became n, or a number that divides it
            found = sorted({value * n // o for o, n in pairs if o % value == 0 == value * n % o} - {value})
        else:
            continue
        if any(_shapes(kind, _changed(config, {name: new})) != before for new in found):
            sizes[name] = [value, *found]
        elif value is not None:
            others[name] = [value, *found]
    for given in islice(_combinations(sizes), TRIES):
        if _shapes(kind, _changed(config, given)) == shapes:
            for more in _combinations(others):
                yield _changed(config, given | more)


def _combinations(choices: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """One value for each name, those first that differ least from the first values."""
    ways = [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]
    return sorted(ways, key=lambda way: sum(way[name] != values[0] for name, values in choices.items()))


def _changed(config: Any, values: dict[str, Any]) -> Any:
    result = copy.deepcopy(config)
    vars(result).update(values)
    return result


def _shapes(kind: type[nn.Module], config: Any) -> dict[str, torch.Size] | None:
    """Shapes of a network's tensors, without any memory; None where it cannot be made."""
    with suppress(Exception), torch.device("meta"):
        return {name: tensor.shape for name, tensor in kind(config).state_dict().items()}
    return None


def _answers(network: nn.Module, example: Tensor | Mapping[str, Tensor]) -> list[Tensor]:
    return tensors(network(**example) if isinstance(example, Mapping) else network(example))
