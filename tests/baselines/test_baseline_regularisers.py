"""Methods that act on the weights while training: penalties against autograd, thresholds and zeros by hand."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dllp.api import Result
from dllp.baselines import METHODS, run
from dllp.baselines.magnitude import MagnitudeL1
from dllp.baselines.protocol import Scene, StepInfo
from dllp.baselines.scaling_factors import DeepHoyer, Polarization, Slimming, SparseStructures
from dllp.baselines.soft import SoftFilters
from dllp.config import Config
from dllp.errors import ConfigError
from dllp.training.particles import Particles
from dllp.zoo import small_cnn
from tests.support.oracles import normal
from tests.support.short_runs import DIGITS, scene_of


def test_penalties_are_gradients_of_what_they_name() -> None:
    scene = scene_of(small_cnn().double(), normal(2, 1, 8, 8))
    rows = scene.particles.rows
    named = dict(scene.network.named_parameters())

    def gradient(energy: Tensor) -> dict[str, Tensor]:
        found = torch.autograd.grad(energy, list(named.values()), allow_unused=True, retain_graph=True)
        return {k: torch.zeros_like(p) if g is None else g for (k, p), g in zip(named.items(), found, strict=True)}

    with torch.no_grad():  # all ones would hide what the mean does
        for i in (1, 2, 3):
            named[f"bn{i}.weight"].copy_(normal(len(named[f"bn{i}.weight"]), seed=i) + 0.5)
    gammas = torch.cat([named[f"bn{i}.weight"] for i in (1, 2, 3)])
    assert bool((gammas < 0).any()), "the prior is on the sizes: a factor below 0 is drawn back to it"
    norms = [named[f"conv{i}.weight"].flatten(1).norm(dim=1) for i in (1, 2, 3)]
    for method, energy in (
        (Slimming(strength=0.3), gammas.abs().sum()),
        (
            Polarization(strength=0.3, t=1.2),
            1.2 * gammas.abs().sum() - (gammas.abs() - gammas.abs().mean()).abs().sum(),
        ),
        (DeepHoyer(strength=0.3), torch.stack([f.sum() ** 2 / f.square().sum() for f in norms]).sum()),
    ):
        penalty = method.penalty(scene)
        assert penalty is not None
        found = penalty(rows)[0]
        for k, expected in gradient(0.3 * energy).items():
            view = scene.particles.layout.segments[k].view(found)
            torch.testing.assert_close(view, expected, rtol=1e-9, atol=1e-12, msg=lambda m, n=method.name: f"{n}: {m}")


def test_l1_training_adds_the_sign_of_each_weight_to_the_gradient() -> None:
    data = DIGITS.train.subset(range(128))
    config = Config(keep_params=0.5, epochs=1, batch_size=128, init="fresh", warmup=0.0)
    plain, strong = (run.prune(MagnitudeL1(strength=s), small_cnn(), data, config) for s in (0.0, 1e-3))
    before = Particles.start(small_cnn(), config, torch.device("cpu")).networks[0]
    moved = dict(strong.before.reference.named_parameters())
    for name, w in plain.before.reference.named_parameters():
        shift = w - moved[name]
        if not name.startswith("conv"):
            assert torch.equal(shift, torch.zeros_like(shift))
            continue
        start = dict(before.named_parameters())[name]
        lr = plain.before.history[-1]["lr"]
        # the first step of Nesterov's momentum: lr (1 + 0.9) times the gradient
        torch.testing.assert_close(shift, 1.9 * lr * 1e-3 * start.sign(), rtol=1e-3, atol=1e-7)


def test_soft_thresholding_reaches_exact_zeros() -> None:
    scene = scene_of(small_cnn().double(), normal(2, 1, 8, 8))
    gamma = dict(scene.network.named_parameters())["bn1.weight"]
    with torch.no_grad():
        gamma[:3] = torch.tensor([0.005, -0.02, 1.0])
    SparseStructures(strength=0.01).after_step(
        scene, StepInfo(0.1, 0.5, False)
    )  # threshold 0.1 * 0.01 / (1 - 0.9) = 0.01
    torch.testing.assert_close(gamma[:3].detach(), torch.tensor([0.0, -0.01, 0.99]).double())


def test_soft_thresholding_minimises_what_it_names_without_a_norm() -> None:
    """|w - v|^2 / 2 + strength rms(w) over w of c weights: the root mean square of v less strength / c."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.Flatten(), nn.Linear(80, 2)).double()
    scene = scene_of(model, normal(2, 1, 8, 8))
    info, scales, rows = StepInfo(0.01, 0.5, False), scene.gating.scales, scene.particles.rows
    start, before = rows.clone(), scales.of(rows).clone()
    assert bool((scales.count > 1).all())
    for _ in range(200):
        with torch.no_grad():
            rows -= info.lr / (1 - scene.config.momentum) * (rows - start)
        SparseStructures(strength=0.2).after_step(scene, info)
    found = scales.of(rows)
    torch.testing.assert_close(found, before - 0.2 / scales.count, rtol=1e-6, atol=1e-9)


def test_soft_pruning_zeroes_the_smallest_filters_of_every_layer() -> None:
    scene = scene_of(small_cnn().double(), normal(2, 1, 8, 8))
    before = {k: p.detach().clone() for k, p in scene.network.named_parameters()}
    with torch.no_grad():  # norms take part: a filter is what the network applies
        for i in (1, 2, 3):
            for name in (f"bn{i}.weight", f"bn{i}.bias"):
                before[name].copy_(normal(len(before[name]), seed=i).abs() + 0.1)
                scene.network.get_parameter(name).copy_(before[name])
    SoftFilters().zero(scene)
    for i in (1, 2, 3):
        gamma, beta = (scene.network.get_parameter(f"bn{i}.{name}").detach() for name in ("weight", "bias"))
        sizes = before[f"conv{i}.weight"].flatten(1).norm(dim=1) * before[f"bn{i}.weight"]
        zero = gamma == 0
        assert 0 < int(zero.sum()) < len(zero) and sizes[zero].max() < sizes[~zero].min()
        assert torch.equal(beta == 0, zero) and torch.equal(gamma[~zero], before[f"bn{i}.weight"][~zero])
        assert torch.equal(scene.network.get_parameter(f"conv{i}.weight"), before[f"conv{i}.weight"]), "it may return"


@pytest.mark.parametrize("name", ["sfp", "fpgm"])
def test_what_is_zeroed_says_nothing_without_norms_either(name: str) -> None:
    """Biases too: the network with zeros is the network that is cut."""
    torch.manual_seed(0)
    data = (torch.randn(64, 1, 8, 8), torch.arange(64) % 10)
    model = nn.Sequential(
        nn.Conv2d(1, 12, 3), nn.ReLU(), nn.Conv2d(12, 9, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)
    )
    config = Config(keep_flops=0.3, epochs=2, batch_size=32)
    whole: list[nn.Module] = []

    def train(verb: run.Verb, stage: str, model: nn.Module, data: object, config: Config) -> Result:
        result = verb(model, data, config)
        whole.append(copy.deepcopy(result.model))
        return result

    cut = run.prune(METHODS[name], model, data, config, train=train).result.model
    with torch.no_grad():
        torch.testing.assert_close(whole[0](data[0]), cut(data[0]), rtol=1e-4, atol=1e-5)


def test_soft_pruning_waits_until_the_network_has_learned() -> None:
    for begin, first in ((0.5, 2), (0.0, 1), (1.0, 4)):
        scene = scene_of(small_cnn(), torch.zeros(2, 1, 8, 8), epochs=4)
        zeros = []
        for step in range(1, 13):
            SoftFilters(begin=begin).after_step(scene, StepInfo(0.1, step / 12, step % 3 == 0))
            zeros.append(any(bool((scene.network.get_parameter(f"bn{i}.weight") == 0).any()) for i in (1, 2, 3)))
        assert zeros == [step >= 3 * first for step in range(1, 13)], "after whole epochs, from the first one on"


def test_soft_pruning_does_not_spoil_training() -> None:
    config = Config(keep_flops=0.3, epochs=6, batch_size=64, init="fresh")
    test = DIGITS.test
    for name in ("sfp", "fpgm"):
        model = run.prune(METHODS[name], small_cnn(), DIGITS, config).before.reference
        assert float((model(test.inputs(slice(None))).argmax(1) == test.y).float().mean()) > 0.8


def test_the_geometric_median_goes_first() -> None:
    model = small_cnn()
    with torch.no_grad():
        model.conv2.weight[5] = model.conv2.weight.mean(0)  # replaceable by the others, though not the smallest
        model.conv2.weight[6] = 0.0 * model.conv2.weight[6] + 10.0
    scene = scene_of(model, torch.randn(2, 1, 8, 8))
    scores = METHODS["fpgm"].scores(scene)[scene.structure.slices[1]]
    assert scores[5] == scores.min() and scores[6] == scores.max()


@pytest.mark.parametrize("keep", [0.4, 0.9])
@pytest.mark.parametrize("name", ["sfp", "fpgm"])
def test_what_is_cut_is_what_was_zeroed(name: str, keep: float) -> None:
    """Also where filters have so much in common that zero lies far from their median."""
    model = small_cnn()
    with torch.no_grad():
        for conv in (model.conv1, model.conv2, model.conv3):
            conv.weight += 3 * conv.weight.std() * torch.randn(conv.weight.shape[1:]).sign()
    scene = scene_of(model, torch.randn(2, 1, 8, 8), keep_flops=keep)
    method = METHODS[name]
    assert isinstance(method, SoftFilters)
    chosen = scene.select(method.scores(scene))
    method.zero(scene)
    assert torch.equal(scene.select(method.scores(scene)), chosen) and not bool(chosen.all())


@pytest.mark.parametrize("name", ["sfp", "fpgm"])
def test_soft_pruning_needs_momentum(name: str) -> None:
    with pytest.raises(ConfigError, match="momentum = 0"):
        run.prune(METHODS[name], small_cnn(), DIGITS, Config(keep_flops=0.5, momentum=0.0, epochs=1))


@given(least=st.floats(0, 1), seed=st.integers(0, 99))
@settings(max_examples=30)
def test_at_least_a_share_of_every_layer_is_spared(least: float, seed: int) -> None:
    scene = small_scene()
    scores = normal(scene.structure.units, seed=seed)
    lifted = scene.spared(scores, least)
    for here in scene.structure.slices:
        up = lifted[here] != scores[here]
        count, share = int(up.sum()), least * len(up)
        assert count - 1 < share <= count, "no fewer than asked for, rounded up"
        assert not up.any() or lifted[here][up].min() > scores.max(), "above all others, in whatever layer"
        assert up.all() or not up.any() or scores[here][up].min() >= scores[here][~up].max(), "the best of it"


@cache
def small_scene() -> Scene:
    return scene_of(small_cnn(), torch.zeros(2, 1, 8, 8))


def test_deephoyer_does_not_feel_the_scale_of_a_layer() -> None:
    scene = scene_of(small_cnn().double(), normal(2, 1, 8, 8))
    scores = DeepHoyer(least=0.0).scores(scene)
    assert [float(scores[here].max()) for here in scene.structure.slices] == [1.0] * 3
    with torch.no_grad():
        for i, factor in ((1, 100.0), (3, 0.01)):
            scene.network.get_parameter(f"conv{i}.weight").mul_(factor)
    torch.testing.assert_close(DeepHoyer(least=0.0).scores(scene), scores)


@pytest.mark.parametrize("method", [Slimming, Polarization, SparseStructures, DeepHoyer])
def test_no_layer_is_emptied(method: type[Slimming] | type[DeepHoyer]) -> None:
    scene = scene_of(small_cnn(), normal(2, 1, 8, 8).float(), keep_flops=0.1)
    with torch.no_grad():  # the second layer has one channel of size, and all others come before the rest of it
        for i in (1, 2, 3):
            for name in (f"bn{i}.weight", f"conv{i}.weight"):
                parameter = scene.network.get_parameter(name)
                parameter.copy_(1 + normal(*parameter.shape).float().abs())
                if i == 2:
                    parameter[1:] *= 1e-6
    here = scene.structure.slices[1]
    none, quarter, whole = (int(scene.select(method(least=x).scores(scene))[here].sum()) for x in (0.0, 0.25, 1.0))
    assert none == whole < 8 and quarter == 16, "what is spared everywhere is spared nowhere"
