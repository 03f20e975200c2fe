"""Schedules: end points, monotone pieces, continuity."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dllp.method import schedule

share = st.floats(0, 1)


@given(share, share)
def test_learning_rate_rises_then_falls(one: float, two: float) -> None:
    early, late = sorted((one, two))
    rate = [schedule.learning_rate(p, peak=0.4, end=0.001, warmup=0.1) for p in (early, late)]
    if late <= 0.1:
        assert rate[0] <= rate[1] <= 0.4
    if early >= 0.1:
        assert 0.4 >= rate[0] >= rate[1] >= 0.001


def test_learning_rate_on_worked_values() -> None:
    def rate(progress: float, warmup: float = 0.2) -> float:
        return schedule.learning_rate(progress, peak=1.0, end=0.1, warmup=warmup)

    assert [rate(p) for p in (0.0, 0.1, 0.2, 0.6, 1.0)] == pytest.approx([0, 0.5, 1, 0.55, 0.1])
    assert rate(0.0, warmup=0) == 1.0
    assert rate(0.5, warmup=1) == 0.5 and rate(1.0, warmup=1) == pytest.approx(0.1)


@given(share, share)
def test_temperature_falls_and_stays(one: float, two: float) -> None:
    early, late = sorted((one, two))
    tau = [schedule.temperature(p, start=1.0, end=0.1, until=0.5) for p in (early, late)]
    assert 1.0 >= tau[0] >= tau[1] >= 0.1 - 1e-15
    if late >= 0.5:
        assert tau[1] == pytest.approx(0.1, rel=1e-15)


def test_temperature_is_linear_in_its_logarithm() -> None:
    tau = [schedule.temperature(p, start=1.0, end=0.01, until=0.8) for p in (0.0, 0.4, 0.8, 1.0)]
    assert tau == pytest.approx([1, 0.1, 0.01, 0.01])
    assert schedule.temperature(0.0, start=1.0, end=0.1, until=0.0) == pytest.approx(0.1)


@given(share, share, share, share, share)
def test_budget_ramp_falls_from_one_to_its_target(one: float, two: float, a: float, b: float, target: float) -> None:
    (early, late), (begin, until) = sorted((one, two)), sorted((a, b))
    cost = [schedule.budget_ramp(p, target=target, begin=begin, until=until) for p in (early, late)]
    assert 1 >= cost[0] >= cost[1] - 1e-15 and cost[1] >= target - 1e-15
    if late >= until:
        assert cost[1] == target
    elif early <= begin:
        assert cost[0] == 1


def test_budget_ramp_on_worked_values() -> None:
    cost = [schedule.budget_ramp(p, target=0.4, begin=0.1, until=0.3) for p in (0, 0.1, 0.2, 0.3, 1)]
    assert cost == pytest.approx([1, 1, 0.7, 0.4, 0.4])
    step = [schedule.budget_ramp(p, target=0.4, begin=0.2, until=0.2) for p in (0.19, 0.2)]
    assert step == [1, 0.4]


@given(share, st.floats(0.05, 0.45), st.floats(0.5, 1))
def test_every_schedule_is_continuous(progress: float, begin: float, until: float) -> None:
    step = 1e-9
    assume(progress + step <= 1)
    for function in (
        lambda p: schedule.learning_rate(p, peak=1.0, end=0.01, warmup=begin),
        lambda p: schedule.temperature(p, start=1.0, end=0.1, until=until),
        lambda p: schedule.budget_ramp(p, target=0.1, begin=begin, until=until),
    ):
        # No slope exceeds 1 / 0.05.
        assert math.isclose(function(progress), function(progress + step), abs_tol=21 * step, rel_tol=0)


def test_progress_outside_the_run_is_held_at_its_ends() -> None:
    for progress, cost, tau in ((-0.5, 1, 1.0), (1.5, 0.4, 0.1)):
        assert schedule.budget_ramp(progress, target=0.4, begin=0.1, until=0.3) == cost
        assert schedule.temperature(progress, start=1.0, end=0.1, until=0.5) == pytest.approx(tau)
    assert schedule.learning_rate(-1, peak=1.0, end=0.1, warmup=0.1) == 0
    assert schedule.learning_rate(2, peak=1.0, end=0.1, warmup=0.1) == pytest.approx(0.1)
