"""Metrics on values worked out by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dllp.errors import DataError
from dllp.evaluation import metrics
from dllp.posterior import class_entropy

P = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8], [0.7, 0.3]])
Y = torch.tensor([0, 1, 1, 1])


def test_hand_worked_values():
    assert metrics.accuracy(P, Y) == 0.5
    assert metrics.nll(P, Y) == pytest.approx(-(math.log(0.9) + math.log(0.4) + math.log(0.8) + math.log(0.3)) / 4)
    assert metrics.brier(P, Y) == pytest.approx(2 * (0.01 + 0.36 + 0.04 + 0.49) / 4)
    # Each confidence has a bin of its own: |0.9 - 1|, |0.6 - 0|, |0.8 - 1|, |0.7 - 0|.
    assert metrics.ece(P, Y) == pytest.approx((0.1 + 0.6 + 0.2 + 0.7) / 4)
    # One bin: |mean confidence - accuracy|.
    assert metrics.ece(P, Y, bins=1) == pytest.approx(0.25)
    assert metrics.signed_ece(P, Y) == pytest.approx(0.75 - 0.5)
    # Order 0.9 right, 0.8 right, 0.7 wrong, 0.6 wrong: risks 0, 0, 1/3, 2/4.
    assert metrics.aurc(P, Y) == pytest.approx((1 / 3 + 1 / 2) / 4)


def test_probabilities_that_underflow_or_exceed_one():
    p = torch.tensor([[1.0000001, 0.0], [0.0, 1.0]])
    assert metrics.nll(p, torch.tensor([1, 1])) == pytest.approx(-math.log(1e-38) / 2)
    assert metrics.ece(p, torch.tensor([0, 1])) == pytest.approx(0, abs=1e-6)
    assert math.isfinite(metrics.summary(p, torch.tensor([1, 1]))["nll_after_temperature"])


@given(st.permutations(range(6)))
def test_aurc_does_not_depend_on_the_order_of_ties(order):
    p = torch.tensor([[0.9, 0.1]] * 2 + [[0.8, 0.2]] * 4)
    y = torch.tensor([0, 0, 0, 1, 1, 0])
    # Four tied inputs with two errors: 1/2 error each.
    expected = (0.5 / 3 + 1 / 4 + 1.5 / 5 + 2 / 6) / 6
    assert metrics.aurc(p[list(order)], y[list(order)]) == pytest.approx(expected)


def test_out_of_distribution_scores():
    inside, outside = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.25, 0.4, 0.9])
    # Pairs won: 0.25 beats 2, 0.4 beats 3 and ties 1, 0.9 beats 4.
    assert metrics.auroc(inside, outside) == pytest.approx((2 + 3.5 + 4) / 12)
    assert metrics.fpr95(inside, outside) == pytest.approx(2 / 3)
    scores = torch.arange(100.0)
    assert metrics.fpr95(scores, torch.tensor([93.0, 94.0, 95.0, 200.0])) == 0.5
    assert metrics.auroc(torch.tensor([1000.0, 1001.0]), torch.tensor([1002.0, 1003.0])) == 1.0
    assert metrics.auroc(torch.ones(3), torch.ones(2)) == 0.5
    assert metrics.auroc(torch.tensor([1.0, math.inf]), torch.tensor([2.0, math.inf])) == 0.625


def test_entropy_and_disagreement():
    assert class_entropy(torch.tensor([[0.5, 0.5], [1.0, 0.0]])).tolist() == pytest.approx([math.log(2), 0])
    one, two = torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([[0.8, 0.2], [0.7, 0.3]])
    assert metrics.disagreement(torch.stack([one, two])) == 0.5
    assert metrics.disagreement(torch.stack([one, two, two])) == pytest.approx(1 / 3)
    assert metrics.disagreement(one[None]) == 0


def test_temperature_undoes_a_known_scale():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(20000, 5, generator=generator, dtype=torch.float64) * 2
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
    assert metrics.fit_temperature(logits, labels) == pytest.approx(1, abs=0.03)
    assert metrics.fit_temperature(3 * logits, labels) == pytest.approx(3, abs=0.09)
    assert metrics.fit_temperature((3 * logits).log_softmax(1), labels) == pytest.approx(3, abs=0.09)
    assert metrics.fit_temperature(logits - 200, labels) == pytest.approx(metrics.fit_temperature(logits, labels))
    raw, scaled = metrics.nll(logits.softmax(1), labels), metrics.nll_after_temperature(3 * logits, labels)
    assert scaled == pytest.approx(raw, rel=1e-3)
    assert metrics.nll_after_temperature(3 * logits - 200, labels) == pytest.approx(scaled)


def test_temperature_of_a_two_class_problem():
    # Logits (a, 0), and half a label of each class beside four: p = 3.5/5 or 4.5/5 has the least NLL.
    logits = torch.tensor([[2.0, 0.0]] * 4)
    assert metrics.fit_temperature(logits, torch.tensor([0, 0, 0, 1])) == pytest.approx(2 / math.log(3.5 / 1.5))
    assert metrics.fit_temperature(logits, torch.zeros(4).long()) == pytest.approx(2 / math.log(9))
    assert metrics.fit_temperature(logits, torch.ones(4).long()) == pytest.approx(100)


def test_temperature_is_measured_on_labels_that_it_was_not_fitted_to():
    """One label in each half, logits (2, 0): as 0 asks for p = 3/4, at a cost of log 4 to 1, which asks for T = 100."""
    logits, labels = torch.tensor([[2.0, 0.0]] * 2), torch.tensor([0, 1])
    expected = (math.log(4) + math.log1p(math.exp(-2 / 100))) / 2
    assert metrics.nll_after_temperature(logits, labels) == pytest.approx(expected)


def test_logits_of_minus_infinity_stand_for_the_smallest_probability():
    z = torch.tensor([[0.0, -math.inf, -1.0], [0.0, -2.0, -math.inf], [-1.0, 0.0, -3.0], [0.0, -math.inf, -4.0]])
    y = torch.tensor([0, 0, 1, 1])
    for function in (metrics.fit_temperature, metrics.nll_after_temperature):
        found = function(z, y)
        assert math.isfinite(found) and found == pytest.approx(function(z.clamp_min(math.log(metrics.SMALLEST)), y))


@pytest.mark.parametrize("scale", [1.0, 5.0, 30.0])
def test_temperature_of_nearly_error_free_data_stays_sound(scale):
    """Half of the data without any error must not make the other half's single error cost a fortune."""
    y = torch.arange(400) % 10
    logits = scale * torch.nn.functional.one_hot(y, 10).double()
    logits[0] = logits[1]  # one error
    raw = metrics.nll(logits.softmax(1), y)
    assert metrics.nll_after_temperature(logits, y) < min(raw, 0.05) + 0.01


def test_summary_holds_every_number():
    summary = metrics.summary(P, Y)
    assert summary["accuracy"] == 0.5 and summary["aurc"] == metrics.aurc(P, Y)
    assert all(isinstance(value, float) for value in summary.values())
    assert "nll_after_temperature" not in metrics.summary(P[:1], Y[:1])


def test_regression():
    mean, target = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0])
    assert metrics.rmse(mean, target) == pytest.approx(math.sqrt(2))
    expected = 0.5 * ((0 + 4 / 2) / 2 + math.log(2 * math.pi * 2))
    assert metrics.gaussian_nll(mean, 2.0, target) == pytest.approx(expected)
    assert metrics.gaussian_nll(mean, torch.full((2,), 2.0), target) == pytest.approx(expected)


@pytest.mark.parametrize(
    "call",
    [
        lambda: metrics.accuracy(P, Y[:2]),
        lambda: metrics.nll(P, Y + 1),
        lambda: metrics.brier(P * math.nan, Y),
        lambda: metrics.ece(P[:0], Y[:0]),
        lambda: metrics.nll_after_temperature(P[:1], Y[:1]),
        lambda: metrics.rmse(torch.ones(2), torch.ones(2, 1)),
    ],
)
def test_mistakes_get_one_line(call):
    with pytest.raises(DataError) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_reliability_bins_add_up_to_the_calibration_error():
    """Against a loop over bins, of which the last holds a confidence of exactly 1 too, as float32 often rounds to."""
    p = (3 * torch.randn(500, 4, dtype=torch.float64)).softmax(1)
    p[:100] = torch.eye(4, dtype=torch.float64)[0]
    y = torch.arange(500) % 4
    bins = metrics.reliability(*metrics.confidence(p, y))
    assert sum(bins["share"]) == pytest.approx(1) and len(bins["share"]) <= metrics.BINS
    confidence, right = p.amax(1), p.argmax(1) == y
    wanted = 0.0
    for k in range(metrics.BINS):
        low, high = k / metrics.BINS, (k + 1) / metrics.BINS
        held = (confidence >= low) & ((confidence < high) | (k == metrics.BINS - 1))
        wanted += abs(float(confidence[held].sum() - right[held].sum())) / len(y)
    assert metrics.ece(p, y) == pytest.approx(wanted, rel=1e-12)
    triples = zip(bins["share"], bins["confidence"], bins["accuracy"], strict=True)
    assert sum(share * abs(c - a) for share, c, a in triples) == pytest.approx(wanted, rel=1e-12)
    sure = metrics.reliability(torch.tensor([1.0]), torch.tensor([False]))
    assert sure == {"confidence": [1.0], "accuracy": [0.0], "share": [1.0]}


def test_a_confidence_on_an_edge_belongs_to_the_bin_above():
    """Exact edges, of halves and quarters: 1/2 lies with 0.6, and not with 0.4."""
    p = torch.tensor([[0.5, 0.25, 0.25], [0.6, 0.2, 0.2], [0.4, 0.3, 0.3]], dtype=torch.float64)
    for bins in (2, 4):
        found = metrics.reliability(*metrics.confidence(p, torch.tensor([0, 1, 0])), bins)
        assert found["confidence"] == pytest.approx([0.4, 0.55]) and found["accuracy"] == pytest.approx([1.0, 0.5])
        assert found["share"] == pytest.approx([1 / 3, 2 / 3])


def test_the_risk_coverage_curve_has_the_area():
    curve = metrics.risk_coverage(*metrics.confidence(P, Y))
    assert curve["coverage"] == [0.25, 0.5, 0.75, 1.0] and curve["risk"] == pytest.approx([0, 0, 1 / 3, 1 / 2])
    assert sum(curve["risk"]) / 4 == pytest.approx(metrics.aurc(P, Y))
    many = torch.rand(1000, 3, dtype=torch.float64).softmax(1)
    short = metrics.risk_coverage(*metrics.confidence(many, torch.arange(1000) % 3), points=7)
    assert len(short["risk"]) == 7 and short["coverage"][-1] == 1
    assert short["risk"][-1] == pytest.approx(1 - metrics.accuracy(many, torch.arange(1000) % 3))
