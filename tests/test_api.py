"""The one verb: what it takes, what it gives, and what it says when it cannot."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import dllp
from dllp import Config, ConfigError, DataError, StructureError
from dllp.checkpoints import Checkpoints
from dllp.data import ArrayData, load
from dllp.devices import find_device
from tests.commands import npy


def network(outputs: int = 3) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, outputs),
    )  # fmt: skip


def images(n: int = 40) -> tuple[Tensor, Tensor]:
    y = torch.arange(n) % 3
    return torch.randn(n, 1, 6, 6) + 0.7 * y.view(-1, 1, 1, 1), y


def config(**changes: Any) -> Config:
    values: dict[str, Any] = dict(epochs=2, batch_size=16, keep_flops=0.6, device="cpu", warmup=0, lr_gates=0.3)
    return Config(**(values | changes))


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("granularity", ["channel", "weight"])
def test_the_result_and_the_untouched_model(granularity: str) -> None:
    model = network().train()
    model[0].weight.grad = gradient = torch.ones_like(model[0].weight)  # type: ignore[index, union-attr, arg-type]
    before = snapshot(model)
    result = dllp.prune(model, images(), config(granularity=granularity, epochs=3))
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert model.training and model[0].weight.grad is gradient  # type: ignore[index, union-attr]
    assert all(m.training for m in model.modules()) and not model._forward_hooks
    assert len(result.history) == 3 and [r["epoch"] for r in result.history] == [1, 2, 3]
    assert len(result.slabs) == len(result.posterior) == len(result.sizes) == 2
    assert result.model is result.slabs[0].network and result.reference is result.slabs[0].reference
    assert result.config == config(granularity=granularity, epochs=3).resolved()
    assert all(size.macs <= 0.6 * result.dense.macs for size in result.sizes)
    assert result.info["dllp"] == dllp.__version__
    for name, (*kept, total) in result.widths.items():
        assert all(0 <= k <= total for k in kept), name
    full = {name: value.shape for name, value in model.state_dict().items()}
    assert {name: value.shape for name, value in result.reference.state_dict().items()} == full


def test_the_pruned_network_is_plain_torch() -> None:
    model = dllp.prune(network(), images(), config()).model
    for module in model.modules():
        assert type(module).__module__.startswith("torch.nn")
        assert not module._forward_hooks and not module._forward_pre_hooks and not module.training
    for parameter in model.parameters():
        assert parameter.grad is None and parameter.is_contiguous()
        assert parameter.untyped_storage().nbytes() == parameter.numel() * parameter.element_size()


def test_global_random_states_are_left_alone() -> None:
    data, model = images(), network()
    state = torch.get_rng_state()
    dllp.prune(model, data, config(init="fresh"))
    assert torch.equal(state, torch.get_rng_state())


# ---- what data may be


def test_a_pair_of_tensors_or_arrays_or_a_split() -> None:
    x, y = images()
    by_tensor = dllp.prune(model := network(), (x, y), config())
    for other in ((x.numpy(), y.numpy()), ArrayData(x, y)):
        again = dllp.prune(model, other, config())
        assert torch.equal(again.gates["logits"], by_tensor.gates["logits"])


def test_a_data_loader() -> None:
    x, y = images()
    steps: list[int] = []
    loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
    first = dllp.prune(model := network(), loader, config(), on_step=lambda t: steps.append(t.step_index))
    assert steps == [1, 2, 3, 4, 5, 6]  # two epochs of 16, 16 and 8 examples
    second = dllp.prune(model, loader, config())
    assert torch.equal(first.gates["logits"], second.gates["logits"])


def test_a_named_data_set() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10))
    by_name = dllp.prune(model, "digits", config(epochs=1, batch_size=256))
    by_set = dllp.prune(model, load("digits"), config(epochs=1, batch_size=256))
    assert torch.equal(by_name.gates["logits"], by_set.gates["logits"])


def test_a_folder_by_text_or_by_path(tmp_path: Path) -> None:
    folder = npy(tmp_path / "arrays", np.random.default_rng(0).random((40, 1, 6, 6)), np.arange(40) % 3)
    by_path, by_text = (dllp.prune(network(), place, config(epochs=1, init="fresh")) for place in (folder, str(folder)))
    assert torch.equal(by_path.gates["logits"], by_text.gates["logits"])


def test_uint8_images() -> None:
    y = torch.arange(40) % 3
    result = dllp.prune(network(), (torch.randint(0, 256, (40, 1, 6, 6), dtype=torch.uint8), y), config())
    assert len(result.history) == 2


# ---- starts


def test_given_starts_at_the_networks_own_weights() -> None:
    model = network()
    result = dllp.prune(model, images(), config(lr=1e-12, lr_end=0.0, beta=0.0, jitter=0.5))
    own, twin = (slab.reference.get_parameter("5.weight").detach() for slab in result.slabs)
    given = model.get_parameter("5.weight").detach()
    torch.testing.assert_close(own, given, rtol=1e-6, atol=1e-7)
    distance = float(((twin - given) / given.std()).std())
    assert distance == pytest.approx(0.5, rel=0.25)


def test_fresh_starts_anywhere_but_there() -> None:
    model = network()
    result = dllp.prune(model, images(), config(lr=1e-12, lr_end=0.0, beta=0.0, init="fresh"))
    starts = [model, *(slab.reference for slab in result.slabs)]
    weights = [start.get_parameter("5.weight") for start in starts]
    for i in range(3):
        for j in range(i):
            assert (weights[i] - weights[j]).norm() > 0.5 * weights[i].norm()


def test_fresh_needs_modules_that_can_be_reset() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    with pytest.raises(ConfigError, match="reset_parameters"):
        dllp.prune(nn.Sequential(network(), Bare()), images(), config(init="fresh"))


# ---- the dense reference


def test_train_dense_prunes_nothing() -> None:
    model = network()
    before = snapshot(model)
    result = dllp.train_dense(model, images(), config(epochs=3))
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert result.sizes == [result.dense] * 2 and result.widths == {}
    assert [v.shape for v in result.model.state_dict().values()] == [v.shape for v in before.values()]
    assert all(r["phase"] == "open" and r["cost"] == [1, 1] for r in result.history)


def test_train_dense_saves_and_loads(tmp_path: Any) -> None:
    result = dllp.train_dense(network(), images(), config())
    loaded = dllp.load(result.save(tmp_path / "dense"), network())
    x = images()[0]
    assert torch.equal(loaded.posterior.members(x), result.posterior.members(x))


# ---- mistakes


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("name", ["cuda", "cuda:3"])
def test_a_device_that_is_not_there(name: str) -> None:
    with pytest.raises(ConfigError, match=f"device = '{name}' is not there"):
        dllp.prune(network(), images(), config(device=name))


def test_devices() -> None:
    assert find_device("cpu") == torch.device("cpu")
    assert find_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(ConfigError, match="unknown"):
        find_device("toaster")


class Endless(IterableDataset):
    def __iter__(self):
        yield from zip(*images(), strict=True)


X, Y = torch.randn(12, 1, 6, 6), torch.arange(12) % 3


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ((X, torch.full((12,), 3) - Y % 2), "out of range for 3 classes"),
        ((X, Y - 1), "negative"),
        ((X, torch.zeros(12, dtype=torch.long)), "one class only"),
        ((X, Y[:5]), "12 inputs but 5 labels"),
        ((X[:0], Y[:0]), "empty"),
        ((X / 0, Y), "NaN or infinity"),
        ((X, Y, Y), "a tuple of 3"),
        (17, "data of type int"),
        ("no-such-data", "no data set and no folder"),
        (DataLoader(TensorDataset(X, Y + 1), batch_size=4), "out of range for 3 classes"),
        (DataLoader(Endless(), batch_size=4), "no length"),
        (DataLoader(TensorDataset(X), batch_size=4), "not a pair of tensors"),
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


def test_a_last_batch_that_is_dropped_is_no_matter() -> None:
    steps: list[int] = []
    loader = DataLoader(TensorDataset(X[:9], Y[:9]), batch_size=4, drop_last=True)
    result = dllp.prune(normed(), loader, config(), on_step=lambda trainer: steps.append(trainer.step_index))
    assert steps == list(range(1, 2 * len(result.history) + 1))


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = network()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.body(x), x


@pytest.mark.parametrize(
    ("model", "changes", "words"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(36, 3)), {}, "no channels that can be pruned"),
        (nn.Sequential(nn.Flatten(), nn.Linear(36, 3)), {"granularity": "weight"}, "no weights to gate"),
        (network(), {"keep_flops": 0.001}, "cannot be reached"),
        (network(), {"keep_flops": 0.001, "granularity": "weight"}, "budget cannot be met"),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 3)), {}, "cannot take inputs of shape"),
        (TwoOutputs(), {}, "must return one tensor"),
        (nn.Sequential(network(), nn.Softmax(1)), {}, "remove the last softmax"),
        (network().requires_grad_(False), {}, "every parameter of the network is frozen"),
        (network().double(), {}, r"convert the network with .float\(\)"),
    ],
)
def test_networks_that_cannot_be_pruned(model: nn.Module, changes: dict[str, Any], words: str) -> None:
    before = snapshot(model)
    with pytest.raises(StructureError, match=words) as caught:
        dllp.prune(model, images(), config(**changes))
    assert "\n" not in str(caught.value)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


class Repeated(nn.Module):
    """One answer, given several times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.times, self.body = times, nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).repeat(1, self.times)


def test_a_regression_learns_alike_from_one_target_and_from_many() -> None:
    """A map of a thousand pixels must not take steps a thousand times as long."""
    x = torch.randn(40, 4)
    y = x[:, :1] - x[:, 1:2]
    plan = config(task="regression", keep_flops=None, lr=0.05, batch_size=10, epochs=2)
    one, many = (dllp.train_dense(Repeated(k), (x, y.repeat(1, k)), plan) for k in (1, 50))
    for a, b in zip(one.model.parameters(), many.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    result = dllp.prune(Repeated(5), (x, y.repeat(1, 5)), plan)
    assert result.info["num_data"] == 40 * 5, "every output is an observation"


@pytest.mark.parametrize("verb", [dllp.prune, dllp.train_dense])
def test_arguments_of_another_kind(verb: Any, tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match=r"config is a dict: give a dllp.Config"):
        verb(network(), images(), {"epochs": 1})
    for model, words in ((None, "of type NoneType"), (nn.Flatten, "the class Flatten")):
        with pytest.raises(StructureError, match=words):
            verb(model, images(), config())
        with pytest.raises(StructureError, match=words):
            dllp.load(tmp_path, model)


@pytest.mark.parametrize("verb", [dllp.prune, dllp.train_dense])
@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("checkpoints", "folder", "give dllp.checkpoints.Checkpoints"),
        ("on_epoch", "print", "give a function"),
        ("on_step", 3, "give a function"),
        ("on_start", [], "give a function"),
        ("ranks", 2, "dllp.ranks.joined"),
    ],
)
def test_options_of_another_kind(verb: Any, name: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name} = .*: .*{words}") as caught:
        verb(network(), images(), config(), **{name: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("granularity", ["channel", "weight"])
def test_a_filter_fn_says_yes_or_no(granularity: str) -> None:
    for wrong, words in (
        ("0", "filter_fn = '0': give a function"),
        (lambda module, name: None, "answers None for module '0'"),
        (lambda module, name: "no", "answers 'no' for module '0': it must return True or False"),
    ):
        with pytest.raises(ConfigError, match=words):
            dllp.prune(network(), images(), config(granularity=granularity), filter_fn=cast(Any, wrong))
    yes = cast(Any, lambda module, name: np.bool_(True))
    assert dllp.prune(network(), images(), config(keep_flops=0.9, granularity=granularity), filter_fn=yes).widths


@pytest.mark.parametrize("name", [3, None, b"run"])
def test_folders_are_named_by_text(name: Any) -> None:
    for call in (lambda: dllp.load(name, network()), lambda: Checkpoints(name)):
        with pytest.raises(dllp.ArtifactError, match=r"is no name of a file or folder: give a text or a pathlib.Path"):
            call()


@pytest.mark.parametrize("init", ["fresh", "given"])
def test_every_seed_of_64_bits_will_do(init: str) -> None:
    model, data = network(), images()
    ends = (2**63 - 1, -(2**63))
    first, second = (dllp.prune(model, data, config(epochs=1, seed=seed, init=init)) for seed in ends)
    assert first.history[0]["loss"] != second.history[0]["loss"]


def test_a_network_without_parameters() -> None:
    with pytest.raises(StructureError, match=r"no parameters|no channels"):
        dllp.prune(nn.Flatten(), images(), config())


def test_filter_fn_says_what_may_be_touched() -> None:
    model = network()
    result = dllp.prune(model, images(), config(keep_flops=0.95), filter_fn=lambda module, name: name != "0")
    assert set(result.widths) == {"5"} and "filter_fn keeps 0" in result.whole["0"]
    assert all(slab.network.get_submodule("0").out_channels == 8 for slab in result.slabs)
    with pytest.raises(StructureError, match="no channels that can be pruned"):
        dllp.prune(model, images(), config(), filter_fn=lambda module, name: False)


def test_every_error_is_a_dllp_error() -> None:
    for error in (ConfigError, DataError, StructureError, dllp.ArtifactError):
        assert issubclass(error, dllp.DllpError)


def test_the_library_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    result = dllp.prune(network(), images(), config())
    copy.deepcopy(result.posterior).predict(images()[0])
    assert capfd.readouterr() == ("", "")
