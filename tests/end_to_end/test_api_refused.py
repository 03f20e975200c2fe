"""What the one verb says when it cannot: one line, and the network untouched."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import dllp
from dllp import ConfigError, DataError, StructureError
from tests.support.short_runs import config, images, network, snapshot


def test_fresh_needs_modules_that_can_be_reset() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    with pytest.raises(ConfigError, match="reset_parameters"):
        dllp.prune(nn.Sequential(network(), Bare()), images(), config(init="fresh"))


@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
@pytest.mark.filterwarnings("ignore")
def test_fresh_needs_weights_of_their_own(norm: Any) -> None:
    """Hooks compute them from parameters that no rule resets: all particles would begin as they were given."""
    model = network()
    norm(next(m for m in model.modules() if isinstance(m, nn.Conv2d)))
    with pytest.raises(ConfigError, match=r"is computed from other parameters.*init='given'"):
        dllp.prune(model, images(), config(init="fresh"))


@pytest.mark.parametrize("name", ["cuda", "cuda:3"])
def test_a_device_that_is_not_there(name: str) -> None:
    with pytest.raises(ConfigError, match=f"device = '{name}' is not there"):
        dllp.prune(network(), images(), config(device=name))


class Endless(IterableDataset):
    def __iter__(self):
        yield from zip(*images(), strict=True)


X, Y = torch.randn(12, 1, 6, 6), torch.arange(12) % 3


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ((X, torch.full((12,), 3) - Y % 2), "out of range for 3 classes"),
        ((X, Y - 1), "negative"),
        ((X, Y.float()), r"use task = regression, or give classes as integers"),
        ((X, torch.rand(12)), r"use task = regression$"),
        ((X, torch.zeros(12, dtype=torch.long)), "one class only"),
        ((X, Y[:5]), "12 inputs but 5 labels"),
        ((X[:0], Y[:0]), "empty"),
        ((X / 0, Y), "NaN or infinity"),
        ((X, Y, Y), "takes 2 positional arguments but 3 were given"),
        (17, "data of type int"),
        ("no-such-data", "no data set and no folder"),
        (DataLoader(TensorDataset(X, Y + 1), batch_size=4), "out of range for 3 classes"),
        (DataLoader(Endless(), batch_size=4), "no length"),
        (
            DataLoader(TensorDataset(X), batch_size=4),
            "a batch is a list: give",
        ),
        (DataLoader(TensorDataset(X, Y), batch_size=None), "single example, not a batch"),
        ((X, Y.float()), "task = classification does not fit"),
    ],
)
def test_data_that_cannot_be_used(data: Any, words: str) -> None:
    with pytest.raises(DataError, match=words) as caught:
        dllp.prune(network(), data, config(batch_size=4))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("targets", "words"), [(Y, "task = regression does not fit"), (torch.randn(12, 2), "3 outputs but the data has 2")]
)
def test_targets_that_do_not_fit_a_regression(targets: Tensor, words: str) -> None:
    with pytest.raises(DataError, match=words):
        dllp.prune(network(), (X, targets), config(batch_size=4, task="regression"))


@pytest.mark.parametrize(
    ("targets", "task"), [(Y.float(), "classification"), (Y, "regression"), (torch.randn(12, 2), "regression")]
)
def test_a_loader_whose_targets_do_not_fit(targets: Tensor, task: str) -> None:
    with pytest.raises(DataError):
        dllp.prune(network(), DataLoader(TensorDataset(X, targets), batch_size=4), config(task=task))


def normed() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize(
    ("data", "changes"),
    [
        ((X, Y), {"batch_size": 1}),
        ((X, Y), {"batch_size": 4, "accumulate": 3}),
        (DataLoader(TensorDataset(X[:9], Y[:9]), batch_size=4), {}),
        (DataLoader(TensorDataset(X[:10], Y[:10]), batch_size=4), {"accumulate": 2}),
    ],
)
def test_batch_norm_and_a_single_example(data: Any, changes: dict[str, Any]) -> None:
    """Told before training, of a loader's last batch too; networks that can learn from one example do."""
    with pytest.raises(DataError, match="single example, from which the network cannot learn") as caught:
        dllp.prune(normed(), data, config(**changes))
    assert "\n" not in str(caught.value)
    dllp.prune(network(), data, config(**changes))  # its norm has 16 pixels of each


def test_batches_whose_sizes_nobody_knows() -> None:
    """A batch sampler does not tell that one of its batches is a single example: it is said when that comes."""
    loader = DataLoader(TensorDataset(X, Y), batch_sampler=[[0, 1, 2], [3, 4, 5], [6]])
    with pytest.raises(StructureError, match="where it cannot learn from a single one, use drop_last=True"):
        dllp.prune(normed(), loader, config())


def test_a_last_batch_that_is_dropped_is_no_matter() -> None:
    steps: list[int] = []
    loader = DataLoader(TensorDataset(X[:9], Y[:9]), batch_size=4, drop_last=True)
    result = dllp.prune(normed(), loader, config(), on_step=lambda trainer: steps.append(trainer.step_index))
    assert steps == list(range(1, 2 * len(result.history) + 1))


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = network()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"scores": self.body(x)}


@pytest.mark.parametrize(
    ("model", "changes", "words"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(36, 3)), {}, "no channels that can be pruned"),
        (nn.Sequential(nn.Flatten(), nn.Linear(36, 3)), {"granularity": "weight"}, "no weights to gate"),
        (network(), {"keep_flops": 0.001}, "cannot be reached"),
        (network(), {"keep_flops": 0.001, "granularity": "weight"}, "budget cannot be met"),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 3)), {}, "cannot take inputs of shape"),
        (Named(), {}, "a dict without logits: give select=, a function that finds them, or loss="),
        (nn.Sequential(network(), nn.Softmax(1)), {}, "remove the last softmax"),
        (network().requires_grad_(False), {}, "no parameter that learns"),
    ],
)
def test_networks_that_cannot_be_pruned(model: nn.Module, changes: dict[str, Any], words: str) -> None:
    before = snapshot(model)
    with pytest.raises(StructureError, match=words) as caught:
        dllp.prune(model, images(), config(**changes))
    assert "\n" not in str(caught.value)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


class OwnState(nn.Sequential):
    def get_extra_state(self) -> dict[str, int]:
        return {"version": 1}

    def set_extra_state(self, state: Any) -> None:
        pass


class Remembering(nn.Module):
    """Its hook belongs to the network that made it, whatever copy it is called in."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.kept = network(), {}
        self.body.register_forward_hook(lambda module, inputs, output: self.kept.__setitem__("last", output))
        self(images()[0][:1])

    def forward(self, x: Tensor) -> Tensor:
        self.body(x)
        return self.kept["last"]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (OwnState(network()), "state holds '_extra_state', a dict, and files hold tensors only"),
        (Remembering(), "a copy of the network gives 1 outputs for 2 inputs"),
    ],
    ids=["state", "hook"],
)
def test_networks_that_cannot_be_stored_or_copied(model: nn.Module, words: str) -> None:
    with pytest.raises(StructureError, match=words):
        dllp.prune(model, images(), config())


def test_one_output_for_two_classes() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 1))
    with pytest.raises(DataError, match="it needs one for each, two at least"):
        dllp.prune(model, (X, Y % 2), config())


@pytest.mark.parametrize("loaded", [False, True])
def test_targets_in_another_order_than_the_outputs(loaded: bool) -> None:
    """As many numbers in another order would be learned scrambled; sides of length 1 order nothing."""
    model = nn.Sequential(nn.Conv2d(1, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1))
    maps = torch.randn(12, 2, 6, 3)

    def run(y: Tensor) -> None:
        pair = (X[..., :3], y)
        data = DataLoader(TensorDataset(*pair), batch_size=4) if loaded else pair
        dllp.prune(model, data, config(task="regression", epochs=1))

    for y in (maps, maps.flatten(1), maps.flatten(2), maps[:, None]):
        run(y)
    for y in (maps.permute(0, 2, 3, 1), maps.transpose(2, 3)):
        with pytest.raises(DataError, match=r"targets of shape .* for outputs of shape \(2, 6, 3\)"):
            run(y)


@pytest.mark.parametrize("verb", [dllp.prune, dllp.train_dense])
def test_arguments_of_another_kind(verb: Any, tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match=r"config is a dict: give a dllp.Config"):
        verb(network(), images(), {"epochs": 1})
    for model, words in ((None, "is None: give an instance"), (nn.Flatten, "Flatten.*: give an instance")):
        with pytest.raises(StructureError, match=words):
            verb(model, images(), config())
        with pytest.raises(StructureError, match=words):
            dllp.load(tmp_path, model)


@pytest.mark.parametrize("verb", [dllp.prune, dllp.train_dense])
def test_a_folder_is_no_checkpoints(verb: Any) -> None:
    with pytest.raises(ConfigError, match=r"^checkpoints = 'folder': give dllp.checkpoints.Checkpoints\(folder\)$"):
        verb(network(), images(), config(), checkpoints="folder")


@pytest.mark.parametrize("granularity", ["channel", "weight"])
def test_a_filter_fn_says_yes_or_no(granularity: str) -> None:
    for wrong, words in (
        (lambda module, name: None, "answers None for module '0'"),
        (lambda module, name: "no", "answers 'no' for module '0': it must return True or False"),
    ):
        with pytest.raises(ConfigError, match=words):
            dllp.prune(network(), images(), config(granularity=granularity), filter_fn=cast(Any, wrong))
    yes = cast(Any, lambda module, name: np.bool_(True))
    assert dllp.prune(network(), images(), config(keep_flops=0.9, granularity=granularity), filter_fn=yes).widths


def test_a_network_without_parameters() -> None:
    with pytest.raises(StructureError, match=r"no parameters|no channels"):
        dllp.prune(nn.Flatten(), images(), config())


def test_every_error_is_a_dllp_error() -> None:
    for error in (ConfigError, DataError, StructureError, dllp.ArtifactError):
        assert issubclass(error, dllp.DllpError)
