"""The one verb: what it takes, and what it gives."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dllp
from dllp import ConfigError, StructureError
from dllp.data import ArrayData, load
from dllp.devices.device import find_device
from tests.support.commands import npy
from tests.support.short_runs import config, images, network, snapshot


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
    assert len(result.particles) == len(result.posterior) == len(result.sizes) == 2
    assert result.model is result.particles[0].network and result.reference is result.particles[0].reference
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


def test_given_starts_at_the_networks_own_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dllp.training.particles.JITTER", 0.5)
    model = network()
    result = dllp.prune(model, images(), config(lr=1e-12, lr_end=0.0, beta=0.0, prior="gaussian"))  # no spike
    own, twin = (particle.reference.get_parameter("5.weight").detach() for particle in result.particles)
    given = model.get_parameter("5.weight").detach()
    torch.testing.assert_close(own, given, rtol=1e-6, atol=1e-7)
    distance = float(((twin - given) / given.std()).std())
    assert distance == pytest.approx(0.5, rel=0.25)


def test_fresh_starts_anywhere_but_there() -> None:
    model = network()
    result = dllp.prune(model, images(), config(lr=1e-12, lr_end=0.0, beta=0.0, init="fresh"))
    starts = [model, *(particle.reference for particle in result.particles)]
    weights = [start.get_parameter("5.weight") for start in starts]
    for i in range(3):
        for j in range(i):
            assert (weights[i] - weights[j]).norm() > 0.5 * weights[i].norm()


# ---- the dense reference


def test_train_dense_prunes_nothing() -> None:
    model = network()
    before = snapshot(model)
    result = dllp.train_dense(model, images(), config(epochs=3))
    assert "whole network" in repr(result) and "budget" not in repr(result)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert result.sizes == [result.dense] * 2 and result.widths == {}
    assert [v.shape for v in result.model.state_dict().values()] == [v.shape for v in before.values()]
    assert all(r["phase"] == "open" and r["cost"] == [1, 1] for r in result.history)


def test_train_dense_saves_and_loads(tmp_path: Any) -> None:
    result = dllp.train_dense(network(), images(), config())
    loaded = dllp.load(result.save(tmp_path / "dense"), network())
    x = images()[0]
    assert torch.equal(loaded.posterior.members(x), result.posterior.members(x))


# ---- whatever the task, the seed and the device


def test_devices() -> None:
    assert find_device("cpu") == torch.device("cpu")
    assert find_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(ConfigError, match="unknown"):
        find_device("toaster")


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


@pytest.mark.parametrize("init", ["fresh", "given"])
def test_every_seed_of_64_bits_will_do(init: str) -> None:
    model, data = network(), images()
    ends = (2**63 - 1, -(2**63))
    first, second = (dllp.prune(model, data, config(epochs=1, seed=seed, init=init)) for seed in ends)
    assert first.history[0]["loss"] != second.history[0]["loss"]


def test_filter_fn_says_what_may_be_touched() -> None:
    model = network()
    result = dllp.prune(model, images(), config(keep_flops=0.95), filter_fn=lambda module, name: name != "0")
    assert set(result.widths) == {"5"} and "filter_fn keeps 0" in result.whole["0"]
    assert all(particle.network.get_submodule("0").out_channels == 8 for particle in result.particles)
    with pytest.raises(StructureError, match="no channels that can be pruned"):
        dllp.prune(model, images(), config(), filter_fn=lambda module, name: False)


def test_the_library_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    result = dllp.prune(network(), images(), config())
    copy.deepcopy(result.posterior).predict(images()[0])
    assert capfd.readouterr() == ("", "")
