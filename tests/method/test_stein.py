"""The Stein direction against closed forms and a naive double loop."""

from __future__ import annotations

import itertools
import math
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dllp.method import algorithm1, stein
from tests.support import oracles
from tests.support.oracles import TWO_PARTICLE_FIXED_POINT, Gaussian, normal

LENGTHS, MULTIPLES = (3, 1, 4), (2, 6)
MODES: dict[str, tuple[stein.Blocks, tuple[int, ...]]] = {
    "one": (None, (8,)),
    "lengths": (LENGTHS, LENGTHS),
    "prepared": (stein.block_index(LENGTHS), LENGTHS),
    "multiples": (stein.block_index(MULTIPLES), MULTIPLES),
    "coordinate": ("coordinate", (1,) * 8),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rule", ["median", "paper", 1.7])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_direction_equals_the_specification(n: int, rule: Literal["median", "paper"] | float, mode: str) -> None:
    x, s = normal(n, 8, seed=n), normal(n, 8, seed=10 + n)
    blocks, lengths = MODES[mode]
    expected = torch.cat(
        [
            algorithm1.stein_direction(a, b, 7.0, rule)
            for a, b in zip(x.split(lengths, 1), s.split(lengths, 1), strict=True)
        ],
        dim=1,
    )
    phi = stein.direction(x, s, num_data=7, bandwidth=rule, blocks=blocks)
    torch.testing.assert_close(phi, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("columns", [5, 6])
def test_strips_do_not_change_the_discrepancy(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    x, s = normal(4, columns, seed=1), normal(4, columns, seed=2)
    whole = stein.kernelized_discrepancy(x, s, blocks="coordinate")
    monkeypatch.setattr(stein, "_STRIP", 2)
    torch.testing.assert_close(stein.kernelized_discrepancy(x, s, blocks="coordinate"), whole)


@pytest.mark.parametrize("own", [range(2), range(1, 4)])
@pytest.mark.parametrize("blocks", [MODES["prepared"][0], "coordinate"])
def test_a_process_computes_its_own_rows(blocks: stein.Blocks, own: range) -> None:
    x, s = normal(4, 8, seed=1), normal(4, 8, seed=2)
    whole = stein.direction(x, s, num_data=7, blocks=blocks, reach=1.0)
    part = stein.direction(x, s, num_data=7, blocks=blocks, reach=1.0, own=own)
    assert torch.equal(part, whole[own.start : own.stop])


@pytest.mark.parametrize("dimension", [10, 100, 10_000])
def test_two_particles_settle_at_a_distance_that_ignores_the_dimension(dimension: int) -> None:
    x = oracles.follow(normal(2, dimension), Gaussian().score, lr=0.4, steps=400)
    assert float((x[0] - x[1]).square().sum()) == pytest.approx(TWO_PARTICLE_FIXED_POINT, rel=1e-9)
    assert float(x.mean(0).abs().max()) < 1e-9


@pytest.mark.parametrize("blocks", [(50, 50), (10, 20, 30, 40), "coordinate"])
def test_each_block_settles_at_its_own_distance(blocks: tuple[int, ...] | str) -> None:
    x = oracles.follow(normal(2, 100), Gaussian().score, lr=0.4, steps=400, blocks=blocks)
    count = 100 if blocks == "coordinate" else len(blocks)
    total = float((x[0] - x[1]).square().sum())
    assert total == pytest.approx(count * TWO_PARTICLE_FIXED_POINT, rel=1e-9)


@pytest.mark.parametrize("blocks", [None, (4, 6, 10)])
def test_the_fixed_point_shrinks_with_the_data(blocks: tuple[int, ...] | None) -> None:
    # l = -|x|^2 / 2 is a mean log-posterior over N data: the target exp(N l) is N(0, I / N).
    num_data = 50
    x = oracles.follow(normal(2, 20), Gaussian().score, lr=0.4, steps=400, num_data=num_data, blocks=blocks)
    expected = (len(blocks) if blocks else 1) * TWO_PARTICLE_FIXED_POINT / num_data
    assert float((x[0] - x[1]).square().sum()) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("bandwidth", ["median", 3.0])
@pytest.mark.parametrize("blocks", [None, (2, 4), "coordinate"])
def test_without_scores_particles_part(bandwidth: stein.Bandwidth, blocks: stein.Blocks) -> None:
    x = normal(2, 6)
    phi = stein.direction(x, torch.zeros_like(x), bandwidth=bandwidth, blocks=blocks)
    towards = (x[1] - x[0]) * phi[0]
    assert bool((towards < 0).all()), "repulsion must point away from the other particle in every coordinate"
    torch.testing.assert_close(phi[0], -phi[1])
    many = normal(5, 6, seed=3)
    later = oracles.follow(many, torch.zeros_like, lr=0.1, steps=20, bandwidth=bandwidth, blocks=blocks)
    assert float(torch.pdist(later).sum()) > float(torch.pdist(many).sum())


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 6), st.floats(-12, 0), st.floats(1e-4, 1.0), st.sampled_from([None, "coordinate"]))
def test_a_step_from_nowhere_goes_as_far_as_the_flow(n: int, power: float, rate: float, blocks: stein.Blocks) -> None:
    """However near particles are, a step along the repulsion leaves them within a few times what its flow covers."""
    num_data = 50.0
    reach = float(stein.step_reach(rate, n, num_data))
    x = normal(n, 5)
    x = x / stein.squared_distances(x, blocks).sqrt().max() * math.sqrt(reach) * 10**power
    moved = x + rate * stein.direction(x, torch.zeros_like(x), num_data=num_data, blocks=blocks, reach=reach)
    assert float(stein.squared_distances(moved, blocks).max()) <= 9 * reach


@pytest.mark.parametrize("blocks", [None, LENGTHS, "coordinate"])
def test_pairs_beyond_the_reach_are_as_without_it(blocks: stein.Blocks) -> None:
    x = normal(4, 8)
    reach = float(stein.squared_distances(x, blocks).min())
    for a, b in zip(
        stein.pair_weights(x, blocks=blocks), stein.pair_weights(x, blocks=blocks, reach=reach), strict=True
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_papers_bandwidth_is_map_over_n_in_high_dimension(dtype: torch.dtype) -> None:
    # |x1 - x2|^2 is about 2 P: exp(-2 P / log 2) underflows, the particles no longer see each other.
    x, s = normal(2, 2000).to(dtype), normal(2, 2000, seed=1).to(dtype)
    assert torch.equal(stein.direction(x, s, bandwidth="paper"), s / 2)
    assert not torch.equal(stein.direction(x, s, bandwidth="median"), s / 2)


@settings(deadline=None, max_examples=30)
@given(st.permutations(range(4)), st.sampled_from(["median", "paper", 0.5]), st.sampled_from(sorted(MODES)))
def test_direction_is_equivariant_under_permutations(order: list[int], bandwidth: stein.Bandwidth, mode: str) -> None:
    x, s = normal(4, 8, seed=5), normal(4, 8, seed=6)
    blocks = MODES[mode][0]
    permuted = stein.direction(x[order], s[order], num_data=3, bandwidth=bandwidth, blocks=blocks)
    original = stein.direction(x, s, num_data=3, bandwidth=bandwidth, blocks=blocks)
    torch.testing.assert_close(permuted, original[order], rtol=0, atol=1e-12)


@settings(deadline=None, max_examples=30)
@given(st.floats(-50, 50), st.floats(0.01, 100))
def test_median_direction_ignores_translation_and_follows_scale(shift: float, scale: float) -> None:
    x, s = normal(3, 4, seed=5), normal(3, 4, seed=6)
    base = stein.direction(x, s)
    torch.testing.assert_close(stein.direction(x + shift, s), base, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(stein.direction(scale * x, s / scale) * scale, base, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("dimension", [1, 2])
def test_fifty_particles_have_the_targets_spread(dimension: int) -> None:
    target = Gaussian(mean=1.5, std=2.0)
    x = oracles.follow(normal(50, dimension), target.score, lr=3.0, steps=60)
    torch.testing.assert_close(x.mean(0), torch.full((dimension,), 1.5, dtype=x.dtype), rtol=0, atol=0.05)
    torch.testing.assert_close(x.std(0), torch.full((dimension,), 2.0, dtype=x.dtype), rtol=0.1, atol=0)


def test_median_bandwidth_on_worked_values() -> None:
    # Three particles at 0, 1, 3: distances 1, 3, 2; four at 0, 1, 3, 7: 1, 3, 7, 2, 6, 4.
    three = stein.squared_distances(torch.tensor([[0.0], [1.0], [3.0]]))
    assert three.flatten().tolist() == [1, 9, 4]
    assert float(stein.median_bandwidth(three)) == pytest.approx(4 / math.log(3))
    four = stein.squared_distances(torch.tensor([[0.0], [1.0], [3.0], [7.0]]))
    assert float(stein.median_bandwidth(four)) == pytest.approx(3.5**2 / math.log(4))


@pytest.mark.parametrize("copies", [2, 4])
@pytest.mark.parametrize("blocks", [None, LENGTHS, "coordinate"])
def test_coinciding_particles_stay_finite(copies: int, blocks: stein.Blocks) -> None:
    x = torch.cat([normal(1, 8).repeat(copies, 1), normal(copies // 4, 8, seed=1)]).float()
    s = normal(len(x), 8, seed=2).float()
    phi = stein.direction(x, s, blocks=blocks)
    assert bool(phi.isfinite().all())
    if copies == 2:
        torch.testing.assert_close(phi, s.mean(0).expand(2, -1))


def test_half_precision_is_lifted() -> None:
    x, s = normal(3, 8).bfloat16(), normal(3, 8, seed=1).bfloat16()
    phi = stein.direction(x, s, blocks=LENGTHS)
    assert phi.dtype == torch.float32
    assert torch.equal(phi, stein.direction(x.float(), s.float(), blocks=LENGTHS))


def test_inputs_are_left_alone() -> None:
    x, s = normal(3, 8), normal(3, 8, seed=1)
    before = x.clone(), s.clone()
    stein.direction(x, s, blocks=LENGTHS)
    assert torch.equal(x, before[0]) and torch.equal(s, before[1])


@pytest.mark.parametrize("mode", MODES)
def test_discrepancy_equals_autograd(mode: str) -> None:
    x, s = normal(4, 8, seed=7), normal(4, 8, seed=8)
    blocks, lengths = MODES[mode]
    expected = 0.0
    for a, b in zip(x.split(lengths, 1), s.split(lengths, 1), strict=True):
        h = algorithm1.median_bandwidth(a, least=0.0)
        pairs = itertools.product(range(4), repeat=2)
        values = [oracles.naive_stein_kernel(a[i], a[j], 5 * b[i], 5 * b[j], h) for i, j in pairs]
        expected += float(sum(values)) / 16
    actual = stein.kernelized_discrepancy(x, s, num_data=5, blocks=blocks)
    assert float(actual) == pytest.approx(expected, rel=1e-10)


def test_discrepancy_is_near_zero_for_samples_of_the_target_only() -> None:
    target = Gaussian(mean=0.5, std=1.5)
    x = target.sample(400, 3)
    at_target = float(stein.kernelized_discrepancy(x, target.score(x)))
    shifted = [float(stein.kernelized_discrepancy(x + d, target.score(x + d))) for d in (1.0, 2.0)]
    collapsed = 0.5 + 0.3 * (x - 0.5)
    narrow = float(stein.kernelized_discrepancy(collapsed, target.score(collapsed)))
    assert 0 <= at_target < 0.02, "of order 1 / n at samples of the target"
    assert 4 * at_target < shifted[0] < shifted[1]
    assert narrow > 4 * at_target, "particles that collapse onto the mean must not look right"


def test_discrepancy_falls_along_the_direction() -> None:
    x = normal(20, 2) + 2
    before, after = x, oracles.follow(x, Gaussian().score, lr=0.5, steps=300)
    values = [float(stein.kernelized_discrepancy(y, Gaussian().score(y))) for y in (before, after)]
    assert 0 <= values[1] < 0.05 * values[0]
