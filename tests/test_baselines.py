"""Every method under one protocol: it meets the budget, its cut equals the mask, and it does the same twice."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dllp.baselines import METHODS, cp, find, run, samples, thinet
from dllp.baselines.deephoyer import DeepHoyer
from dllp.baselines.magnitude import MagnitudeL1
from dllp.baselines.polarization import Polarization
from dllp.baselines.protocol import Scene, penalty
from dllp.baselines.slimming import Slimming
from dllp.baselines.soft import SoftFilters
from dllp.baselines.sss import SparseStructures
from dllp.cli import main
from dllp.config import Config
from dllp.data import load
from dllp.errors import ConfigError, StructureError
from dllp.particles import Particles
from dllp.prepare import make_gating
from dllp.priors import PRIORS
from dllp.slicing import Fold, cut
from dllp.structure import discover
from dllp.train import Trainer
from dllp.zoo.small import small_cnn, small_resnet
from tests.commands import one_line
from tests.oracles import normal

DIGITS = load("digits")
SHORT = Config(keep_flops=0.4, epochs=2, batch_size=128, init="fresh", lr=0.1, seed=3)


def scene_of(model: nn.Module, inputs: Tensor, **changes: object) -> Scene:
    config = Config(**{"keep_flops": 0.4, "particles": 1, **changes}).resolved()  # pyright: ignore[reportArgumentType]
    particles = Particles([model])
    structure = discover(model, inputs)
    gating = make_gating(model, structure, particles, config, None)
    return Scene(particles, structure, gating, config, inputs)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_keeps_the_protocol(name: str) -> None:
    method = METHODS[name]
    data = DIGITS.train.subset(range(256))
    first, again = (run.prune(method, small_cnn(), data, SHORT, finetune_epochs=1) for _ in range(2))
    for result in (first.before, first.result):
        kept = result.sizes[0].macs / result.dense.macs
        # a channel of this network costs at most 1/32 of it; single weights fill a budget to the last one
        assert 0.4 - (0.04 if method.granularity == "channel" else 1e-4) < kept <= 0.4
    slab = first.before.slabs[0]
    x = normal(8, 1, 8, 8)
    reference, small = slab.reference.double(), first.before.model.double()
    weights = dict(reference.named_parameters())
    if method.granularity == "channel":
        structure = discover(slab.reference, x)
        assert slab.keep is not None
        masked = Fold(reference, structure.groups)(weights, slab.keep.double())
        if type(method).repair is not thinet.ThiNet.repair and type(method).repair is not cp.ChannelPruning.repair:
            expected = torch.func.functional_call(reference, masked, (x,))
            torch.testing.assert_close(small(x), expected, rtol=1e-9, atol=1e-9)
        assert small(x).shape == (8, 10) and sum(p.numel() for p in small.parameters()) == first.before.sizes[0].params
    else:
        for k, w in small.named_parameters():
            assert (
                torch.equal(w, weights[k] * (w != 0))
                and (first.result.model.state_dict()[k] != 0).sum() <= (w != 0).sum()
            )
    for a, b in ((first.before, again.before), (first.result, again.result)):
        assert all(torch.equal(v, b.model.state_dict()[k]) for k, v in a.model.state_dict().items())
        assert torch.equal(a.gates["keep"], b.gates["keep"]) and a.info["method"] == name
    tuned, cut = first.result.model.state_dict(), first.before.model.state_dict()
    assert any(not torch.equal(tuned[k].double(), cut[k].double()) for k in cut), "fine-tuning moved something"
    assert len(first.result.history) == 3 and first.result.history[-1]["epoch"] == 3


def test_a_residual_network_is_pruned_too() -> None:
    data = (torch.randn(64, 3, 8, 8), torch.arange(64) % 10)
    for name in ("thinet", "cp", "fpgm", "deephoyer"):
        pruned = run.prune(METHODS[name], small_resnet(), data, Config(keep_params=0.5, epochs=1, batch_size=32))
        assert pruned.result.sizes[0].params <= 0.5 * pruned.result.dense.params
        assert pruned.after is None and bool(pruned.result.model(data[0][:2]).isfinite().all())


# ---- regularisers, against autograd and by hand


def test_penalties_are_gradients_of_what_they_name() -> None:
    scene = scene_of(small_cnn().double(), normal(2, 1, 8, 8))
    rows = scene.particles.rows
    named = dict(scene.network.named_parameters())

    def gradient(energy: Tensor) -> dict[str, Tensor]:
        found = torch.autograd.grad(energy, list(named.values()), allow_unused=True)
        return {k: torch.zeros_like(p) if g is None else g for (k, p), g in zip(named.items(), found, strict=True)}

    with torch.no_grad():  # all ones would hide what the mean does
        for i in (1, 2, 3):
            named[f"bn{i}.weight"].copy_(normal(len(named[f"bn{i}.weight"]), seed=i).abs())
    gammas = torch.cat([named[f"bn{i}.weight"] for i in (1, 2, 3)])
    norms = [named[f"conv{i}.weight"].flatten(1).norm(dim=1) for i in (1, 2, 3)]
    for method, energy in (
        (Slimming(strength=0.3), gammas.abs().sum()),
        (Polarization(strength=0.3, t=1.2), 1.2 * gammas.abs().sum() - (gammas - gammas.mean()).abs().sum()),
        (DeepHoyer(strength=0.3), torch.stack([f.sum() ** 2 / f.square().sum() for f in norms]).sum()),
    ):
        trainer = Trainer(scene.particles, None, scene.config, num_data=10, steps_per_epoch=1)
        method.start(trainer, scene)
        assert trainer.penalty is not None
        found = trainer.penalty(rows)[0]
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
    trainer = Trainer(scene.particles, None, scene.config, num_data=10, steps_per_epoch=1)
    trainer.lr = 0.1
    gamma = dict(scene.network.named_parameters())["bn1.weight"]
    with torch.no_grad():
        gamma[:3] = torch.tensor([0.005, -0.02, 1.0])
    SparseStructures(strength=0.01).step(trainer, scene)  # threshold 0.1 * 0.01 / (1 - 0.9) = 0.01
    torch.testing.assert_close(gamma[:3].detach(), torch.tensor([0.0, -0.01, 0.99]).double())


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


# ---- methods that look at activations


def test_samples_are_what_the_layer_computes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(4, 5, 3, dilation=2, padding=2), nn.Flatten(),
        nn.Linear(80, 2),
    ).double()  # fmt: skip
    for name, seen in samples.observe(model, ["0", "2", "4"], normal(6, 3, 8, 8)).items():
        weight = samples.flat_weight(model.get_submodule(name))
        torch.testing.assert_close(torch.einsum("nik,oik->no", seen.patches, weight), seen.outputs)
    assert model.training and not model[0]._forward_hooks


def test_thinet_gives_up_what_is_not_missed() -> None:
    shares = normal(500, 4)
    shares[:, 1] = 0  # says nothing
    shares[:, 3] = -shares[:, 2]  # the two cancel: giving up both costs nothing
    order = thinet.removal_order(shares)
    assert order[1] == 0 and order[0] > order[1]
    # by brute force: of all pairs, {2, 3} and pairs with 1 that cost least
    costs = {(i, j): float(shares[:, [i, j]].sum(1).square().sum()) for i in range(4) for j in range(i)}
    assert min(costs, key=costs.__getitem__) == (3, 2)


def test_the_lasso_keeps_what_rebuilds() -> None:
    shares = normal(2000, 6) * torch.tensor([3.0, 0.01, 1.0, 0.0, 2.0, 0.1], dtype=torch.float64)
    scores = cp.survival(shares)
    assert scores.argsort(descending=True).tolist() == [0, 4, 2, 5, 1, 3]


def test_the_lasso_agrees_with_coordinate_descent() -> None:
    from sklearn.linear_model import Lasso

    x = normal(300, 8) @ (torch.eye(8, dtype=torch.float64) + 0.5 * normal(8, 8, seed=1))
    y = x.sum(1)
    gram, target = x.T @ x / 300, x.T @ y / 300
    start, rate = torch.zeros(8, dtype=torch.float64), 1 / torch.linalg.eigvalsh(gram)[-1]
    for share in (0.5, 0.1, 0.01):
        strength = share * target.abs().max()
        oracle = Lasso(float(strength), fit_intercept=False, tol=1e-12, max_iter=100_000).fit(x.numpy(), y.numpy())
        found = cp.lasso(gram, target, strength, start, rate, sweeps=500)
        torch.testing.assert_close(found, torch.from_numpy(oracle.coef_), rtol=1e-4, atol=1e-4)
        assert torch.equal(found == 0, torch.from_numpy(oracle.coef_ == 0))


def test_least_squares_rebuild_what_can_be_rebuilt() -> None:
    x, start = normal(400, 5), normal(5, 3, seed=2)
    true = normal(5, 3, seed=1)
    torch.testing.assert_close(samples.towards(x, x @ true, start, ridge=1e-9), true, rtol=1e-6, atol=1e-6)
    few = samples.towards(x[:1], x[:1] @ true, start, ridge=1e-9)
    torch.testing.assert_close(x[:1] @ few, x[:1] @ true, rtol=1e-5, atol=1e-5)
    across = torch.eye(5, dtype=torch.float64) - x[:1].T @ x[:1] / x[:1].square().sum()
    torch.testing.assert_close(
        across @ few, across @ start, rtol=1e-5, atol=1e-5, msg="as it was where nothing is known"
    )


@pytest.mark.parametrize("name", ["thinet", "cp"])
def test_repair_brings_the_cut_network_nearer_to_the_dense_one(name: str) -> None:
    data = DIGITS.train.subset(range(400))
    method = METHODS[name]
    config = Config(keep_flops=0.5, epochs=3, batch_size=64, init="fresh")
    pruned = run.prune(method, small_cnn(), data, config).before
    slab = pruned.slabs[0]
    unrepaired = cut(slab.reference, slab.recipe)
    x = DIGITS.train.inputs(slice(400, 800))
    with torch.no_grad():
        wanted = slab.reference(x)
        errors = [float((net.eval()(x) - wanted).square().mean()) for net in (slab.network, unrepaired)]
    assert errors[0] < 0.8 * errors[1]


# ---- mistakes


def test_mistakes_are_one_clear_line() -> None:
    data = (torch.randn(32, 1, 8, 8), torch.arange(32) % 10)
    with pytest.raises(ConfigError, match="no method 'nothing': choose from dllp, random"):
        find("nothing")
    with pytest.raises(ConfigError, match="slimming needs a budget"):
        run.prune(find("slimming"), small_cnn(), data, Config())
    with pytest.raises(StructureError, match="cannot be reached"):
        run.prune(find("sfp"), small_cnn(), data, Config(keep_flops=1e-4, epochs=10**6))
    with pytest.raises(StructureError, match="budget cannot be met"):
        run.prune(find("magnitude-l1"), small_cnn(), data, Config(keep_params=1e-4, epochs=10**6))
    with pytest.raises(ConfigError, match="finetune_epochs = -1"):
        run.prune(find("random"), small_cnn(), data, Config(keep_flops=0.5), finetune_epochs=-1)
    scene = scene_of(small_cnn(), data[0][:2])
    with pytest.raises(ConfigError, match="strength = -1"):
        penalty(scene.gating.scales, PRIORS["laplace"], -1.0, 1.0)
    with pytest.raises(ConfigError, match="prior laplace: scale = 0"):
        penalty(scene.gating.scales, PRIORS["laplace"], 1.0, 0.0)


def test_every_method_names_its_paper() -> None:
    assert len(METHODS) == 12
    for name, method in METHODS.items():
        assert method.name == name and method.title and method.paper and 2010 < method.year < 2024
        for figure in method.published:
            assert math.isfinite(figure.drop) and 0 < figure.removed < 100
    drops = {name: [p.drop for p in m.published] for name, m in METHODS.items() if m.published}
    assert drops == {
        "l1-filters": [0.5], "thinet": [0.14], "cp": [0.32], "slimming": [0.53], "sfp": [0.24], "fpgm": [0.1],
        "polarization": [-0.03], "deephoyer": [0.26],
    }  # fmt: skip
    assert {name for name, m in METHODS.items() if not m.trains} == {"random", "l1-filters", "thinet", "cp"}
    assert np.unique([m.title for m in METHODS.values()]).size == len(METHODS)


# ---- the command line


def test_a_run_of_another_method_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    words = ["--method", "magnitude-l1", "--keep-params", "0.3", "--epochs", "2", "--finetune-epochs", "1"]
    assert main(["prune", *words, "--batch-size", "256", "--out", str(out)]) == 0
    assert "before fine-tuning" in capsys.readouterr().out
    rows = json.loads((out / "evaluation.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["dense", "before fine-tuning", "particle 1"]
    assert rows[1]["params"] == rows[2]["params"] <= 0.3 * rows[0]["params"]
    stored = json.loads((out / "run.json").read_text())
    assert stored["info"]["method"] == "magnitude-l1" and stored["config"]["granularity"] == "weight"
    assert main(["analyze", str(out), "--json", str(tmp_path / "shapes.json")]) == 0
    whole = json.loads((tmp_path / "shapes.json").read_text())["whole"]
    assert whole["kept"]["near_zero"] < whole["before"]["near_zero"]
    capsys.readouterr()
    for options, words in (
        (["--method", "sfp", "--particles", "2", "--keep-flops", "0.5"], ["method sfp has particles = 1"]),
        (["--method", "sfp", "--granularity", "weight", "--keep-flops", "0.5"], ["granularity = channel"]),
        (["--method", "sfp"], ["sfp needs a budget"]),
        (["--method", "sfp", "--keep-flops", "0.0001"], ["cannot be reached"]),
        (["--finetune-epochs", "2"], ["finetune_epochs is for other methods"]),
        (["--method", "nothing"], ["there is no method 'nothing'"]),
    ):
        assert main(["prune", *options, "--out", str(tmp_path / "none")]) == 2
        one_line(capsys, *words)
    assert not (tmp_path / "none").exists()


def test_a_stopped_run_of_another_method_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--method", "magnitude-l1", "--keep-params", "0.3", "--epochs", "2", "--finetune-epochs", "1", "--quiet"]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert main(["prune", *words, "--out", str(whole)]) == 0

    def broken(*args: object, **rest: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(run, "holding", lambda gated: broken)
        assert main(["prune", *words, "--out", str(stopped)]) == 2
    assert not (stopped / "run.json").exists()
    assert main(["prune", "--resume", "--out", str(stopped), "--quiet"]) == 0
    for name in ("particle-0.safetensors", "reference-0.safetensors", "gates.safetensors"):
        assert (stopped / name).read_bytes() == (whole / name).read_bytes()


def test_methods_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", "--json", str(tmp_path / "list.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 13 and lines[0].startswith("dllp ") and any("2019" in line for line in lines)
    assert [entry["name"] for entry in json.loads((tmp_path / "list.json").read_text())] == ["dllp", *METHODS]
