"""Capacity fits and change detection, by tables."""

from __future__ import annotations

import pytest

from hpcps.config import CapacityConfig
from hpcps.errors import DataError, PlanError
from hpcps.policy import CapacityFit, DetectChange, FitCapacity, TimedStep

CONFIG = CapacityConfig()


def steps_of(fixed_s: float, per_sample_s: float, sizes: list[int]) -> list[TimedStep]:
    return [TimedStep(num_samples=size, seconds=fixed_s + per_sample_s * size) for size in sizes]


def test_exact_line_is_found_from_two_sizes() -> None:
    fit = FitCapacity(CONFIG).decide(steps_of(0.01, 0.002, [24, 40] * 10))
    assert fit is not None
    assert fit.fixed_s == pytest.approx(0.01, rel=1e-9)
    assert fit.per_sample_s == pytest.approx(0.002, rel=1e-9)
    assert fit.speed == pytest.approx(500.0, rel=1e-9)
    assert fit.error_frac == pytest.approx(0.0, abs=1e-12)
    assert fit.num_steps == 20
    assert fit.seconds(100) == pytest.approx(0.21)
    assert fit.seconds(0) == 0.0
    assert "2 sizes; 20 steps, 0 left out" in fit.reason


def test_no_fit_before_the_warm_up_is_over() -> None:
    assert FitCapacity(CONFIG).decide(steps_of(0.01, 0.002, [24, 40] * 9 + [24])) is None


def test_one_size_puts_all_cost_on_the_samples() -> None:
    fit = FitCapacity(CONFIG).decide(steps_of(0.02, 0.001, [20] * 20))
    assert fit is not None
    assert fit.fixed_s == 0.0
    assert fit.per_sample_s == pytest.approx(0.002)
    assert "sizes too close" in fit.reason


def test_close_sizes_keep_the_shape_of_the_earlier_fit() -> None:
    prior = CapacityFit(fixed_s=0.01, per_sample_s=0.001)
    throttled = steps_of(0.02, 0.002, [30, 31] * 10)
    fit = FitCapacity(CONFIG).decide(throttled, prior=prior)
    assert fit is not None
    assert fit.fixed_s == pytest.approx(0.02)
    assert fit.per_sample_s == pytest.approx(0.002)
    assert "earlier fit times 2.000" in fit.reason


def test_a_lone_stalled_step_of_a_rare_size_does_not_move_the_fit() -> None:
    steps = steps_of(0.0, 0.001, [30] * 10 + [50] * 10)
    steps.append(TimedStep(num_samples=90, seconds=20 * 0.09))
    fit = FitCapacity(CONFIG).decide(steps)
    assert fit is not None
    assert fit.per_sample_s == pytest.approx(0.001)
    assert fit.num_steps == 21
    assert "1 left out" in fit.reason


def test_stalled_steps_among_distinct_sizes_do_not_move_the_fit() -> None:
    steps = steps_of(0.005, 0.001, list(range(20, 60)))
    for index in (0, 7, 39):
        size = steps[index].num_samples
        steps[index] = TimedStep(num_samples=size, seconds=20 * steps[index].seconds)
    fit = FitCapacity(CONFIG).decide(steps)
    assert fit is not None
    assert fit.fixed_s == pytest.approx(0.005, rel=1e-6)
    assert fit.per_sample_s == pytest.approx(0.001, rel=1e-6)


def test_a_flat_device_keeps_a_positive_cost_per_sample() -> None:
    fit = FitCapacity(CONFIG).decide(steps_of(0.1, 0.0, [24, 40] * 10))
    assert fit is not None
    assert 0 < fit.per_sample_s < 0.0002
    assert fit.seconds(32) == pytest.approx(0.1, rel=0.02)


def test_a_line_below_the_origin_becomes_proportional() -> None:
    fit = FitCapacity(CONFIG).decide(steps_of(-0.01, 0.001, [20, 40] * 10))
    assert fit is not None
    assert fit.fixed_s == 0.0
    assert 0.0005 <= fit.per_sample_s <= 0.00075


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_times_are_refused(seconds: float) -> None:
    with pytest.raises(DataError, match=r"cannot use a timed step of 4 samples: got .* need a finite time above 0 s"):
        TimedStep(num_samples=4, seconds=seconds)


def test_a_step_without_samples_is_refused() -> None:
    with pytest.raises(DataError, match="cannot use a timed step: got 0 samples, need at least 1"):
        TimedStep(num_samples=0, seconds=1.0)


@pytest.mark.parametrize(("fixed_s", "per_sample_s"), [(-1.0, 1.0), (0.0, 0.0), (0.0, float("nan"))])
def test_impossible_fits_are_refused(fixed_s: float, per_sample_s: float) -> None:
    with pytest.raises(PlanError, match="cannot describe a worker's capacity"):
        CapacityFit(fixed_s=fixed_s, per_sample_s=per_sample_s)


# ratios of measured to predicted time, oldest first; changed; median
CHANGES = [
    ([2.0] * 8, True, 2.0),
    ([1.0] * 30 + [2.0] * 8, True, 2.0),
    ([0.5] * 8, True, 0.5),
    ([1.0] * 8, False, 1.0),
    ([1.0] * 7 + [20.0], False, 1.0),
    ([1.1] * 8, False, 1.1),
    ([0.9, 0.9, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0], True, 2.0),
    ([0.9, 0.9, 0.9, 2.0, 2.0, 2.0, 2.0, 2.0], False, 2.0),
    ([2.0] * 8 + [1.0] * 8, False, 1.0),
    ([2.0] * 7, False, 1.0),
]


@pytest.mark.parametrize(("ratios", "changed", "median"), CHANGES)
def test_change_table(ratios: list[float], changed: bool, median: float) -> None:
    fit = CapacityFit(fixed_s=0.01, per_sample_s=0.001)
    recent = [TimedStep(num_samples=30, seconds=ratio * fit.seconds(30)) for ratio in ratios]
    decision = DetectChange(CONFIG).decide(fit, recent)
    assert decision.changed is changed
    assert decision.ratio == pytest.approx(median)
    assert decision.reason
