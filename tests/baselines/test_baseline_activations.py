"""Methods that look at activations: what they sample, what they give up, and how they repair the rest."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dllp.baselines import METHODS, reconstruction, run
from dllp.config import Config
from dllp.structure.slicing import cut
from dllp.zoo import small_cnn
from tests.support.oracles import normal
from tests.support.short_runs import DIGITS


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
def test_samples_are_what_the_layer_computes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(4, 5, 3, dilation=2, padding=2),
        nn.Conv2d(5, 5, (4, 3), dilation=(1, 2), padding="same"), nn.Conv2d(5, 6, (1, 2), padding="valid"),
        nn.Flatten(), nn.Linear(72, 2),
    ).double()  # fmt: skip
    assert all(reconstruction.plain(model[i]) for i in (0, 2, 3, 4, 6))
    for name, seen in reconstruction.observe(model, ["0", "2", "3", "4", "6"], normal(6, 3, 8, 8)).items():
        weight = reconstruction.flat_weight(model.get_submodule(name))
        torch.testing.assert_close(torch.einsum("nik,oik->no", seen.patches, weight), seen.outputs)
        assert len(seen.patches) == 60, "a linear layer has one place in an image, and as many looks"
    assert model.training and not model[0]._forward_hooks


def test_what_follows_reads_what_was_mended() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    x, means = normal(5, 3), {}

    def mend(name: str, seen: reconstruction.Sample) -> None:
        means[name] = seen.patches.mean((0, 2))
        with torch.no_grad():
            for parameter in model.get_submodule(name).parameters():
                parameter.zero_()

    reconstruction.rebuild(model, ["0", "1"], x, mend)
    torch.testing.assert_close(means["0"], x.mean(0))
    assert torch.equal(means["1"], torch.zeros(4, dtype=torch.float64))


def test_a_layer_that_is_called_twice_is_looked_at_once() -> None:
    layer = nn.Linear(3, 3).double()
    x, seen = normal(4, 3), []
    reconstruction.rebuild(nn.Sequential(layer, nn.ReLU(), layer), ["0"], x, lambda name, sample: seen.append(sample))
    assert len(seen) == 1
    torch.testing.assert_close(seen[0].patches[::10, :, 0], x)


def test_channels_that_go_together_get_no_huge_scales() -> None:
    """A pooled layer of a trained network: few images, outputs that nearly every channel tells."""
    shared = normal(50, 3)
    x = shared @ normal(3, 40, seed=1) + 0.02 * normal(50, 40, seed=2)
    start = torch.ones(40, 1, dtype=torch.float64)
    wanted = x @ start + 0.3 * normal(50, 1, seed=3)
    few, drawn = (reconstruction.towards(x, wanted, start, ridge) for ridge in (1e-6, reconstruction.RIDGE))
    assert few.abs().max() > 5 and drawn.abs().max() < 1.5
    assert (x @ drawn - wanted).square().mean() < 0.3**2, "and the fit is as good as the noise allows"


def test_thinet_gives_up_what_is_not_missed() -> None:
    shares = normal(500, 4)
    shares[:, 1] = 0  # says nothing
    shares[:, 3] = -shares[:, 2]  # the two cancel: giving up both costs nothing
    order = reconstruction.ThiNet().order(shares)
    assert order[1] == 0 and order[0] > order[1]
    # by brute force: of all pairs, {2, 3} and pairs with 1 that cost least
    costs = {(i, j): float(shares[:, [i, j]].sum(1).square().sum()) for i in range(4) for j in range(i)}
    assert min(costs, key=costs.__getitem__) == (3, 2)


def test_the_lasso_keeps_what_rebuilds() -> None:
    shares = normal(2000, 6) * torch.tensor([3.0, 0.01, 1.0, 0.0, 2.0, 0.1], dtype=torch.float64)
    scores = reconstruction.ChannelPruning().order(shares)
    assert scores.argsort(descending=True).tolist() == [0, 4, 2, 5, 1, 3]
    late = normal(2000, 4, seed=1) * torch.tensor([1e-4, 3.0, 1e-3, 0.0], dtype=torch.float64)
    assert reconstruction.ChannelPruning().order(late).argsort(descending=True).tolist() == [1, 2, 0, 3], (
        "also of those that the path never has"
    )
    assert not reconstruction.ChannelPruning().order(torch.zeros(9, 3, dtype=torch.float64)).any()


def test_the_lasso_of_units_that_do_not_mix_is_soft_thresholding() -> None:
    """By hand: without correlations b_c = max(t_c - penalty, 0) / g_c, and a unit is chosen below penalty t_c."""
    square = torch.tensor([4.0, 1.0, 9.0, 0.25], dtype=torch.float64)
    penalties = torch.tensor([9.0, 5.0, 2.0, 0.5, 0.1], dtype=torch.float64)
    expected = (square[:, None] - penalties).clamp_min(0) / square[:, None]
    torch.testing.assert_close(reconstruction.lasso(square.diag(), square, penalties), expected)
    shares = 2 * square.sqrt().diag()  # one place for each unit: four of them have these mean squares
    first = [float(penalty) for penalty in reconstruction.ChannelPruning().order(shares)]
    steps = [9.0 * 10 ** (-4 * k / 29) for k in range(30)]
    assert first == pytest.approx([max(s for s in steps if s < g) for g in square.tolist()], rel=1e-6)


def test_the_lasso_agrees_with_coordinate_descent() -> None:
    from sklearn.linear_model import Lasso

    x = normal(300, 8) @ (torch.eye(8, dtype=torch.float64) + 0.5 * normal(8, 8, seed=1))
    y = x.sum(1)
    gram, target = x.T @ x / 300, x.T @ y / 300
    strengths = torch.tensor([0.5, 0.1, 0.01], dtype=torch.float64) * target.abs().max()
    for strength, found in zip(strengths, reconstruction.lasso(gram, target, strengths).T, strict=True):
        oracle = Lasso(float(strength), fit_intercept=False, tol=1e-12, max_iter=100_000).fit(x.numpy(), y.numpy())
        torch.testing.assert_close(found, torch.from_numpy(oracle.coef_), rtol=1e-8, atol=1e-8)
        assert torch.equal(found == 0, torch.from_numpy(oracle.coef_ == 0))


def test_least_squares_rebuild_what_can_be_rebuilt() -> None:
    x, start = normal(400, 5), normal(5, 3, seed=2)
    true = normal(5, 3, seed=1)
    torch.testing.assert_close(reconstruction.towards(x, x @ true, start, ridge=1e-9), true, rtol=1e-6, atol=1e-6)
    few = reconstruction.towards(x[:1], x[:1] @ true, start, ridge=1e-9)
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
    particle = pruned.particles[0]
    unrepaired = cut(particle.reference, particle.recipe)
    x = DIGITS.train.inputs(slice(400, 800))
    with torch.no_grad():
        wanted = particle.reference(x)
        errors = [float((net.eval()(x) - wanted).square().mean()) for net in (particle.network, unrepaired)]
    assert errors[0] < 0.8 * errors[1]
