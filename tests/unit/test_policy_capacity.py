"""Capacity fits, by tables."""

from __future__ import annotations

import pytest

from hpcps.config import CapacityConfig
from hpcps.errors import DataError, PlanError
from hpcps.policy import CapacityFit, FitCapacity, TimedStep

CONFIG = CapacityConfig()


def steps_of(fixed_s: float, per_sample_s: float, sizes: list[int]) -> list[TimedStep]:
    return [TimedStep(work=size, seconds=fixed_s + per_sample_s * size) for size in sizes]


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
    steps.append(TimedStep(work=90, seconds=20 * 0.09))
    fit = FitCapacity(CONFIG).decide(steps)
    assert fit is not None
    assert fit.per_sample_s == pytest.approx(0.001)
    assert fit.num_steps == 21
    assert "1 left out" in fit.reason


def test_stalled_steps_among_distinct_sizes_do_not_move_the_fit() -> None:
    steps = steps_of(0.005, 0.001, list(range(20, 60)))
    for index in (0, 7, 39):
        size = steps[index].work
        steps[index] = TimedStep(work=size, seconds=20 * steps[index].seconds)
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
    with pytest.raises(DataError, match=r"cannot use a timed step of work 4: got .* need a finite time above 0 s"):
        TimedStep(work=4, seconds=seconds)


def test_a_step_without_samples_is_refused() -> None:
    with pytest.raises(DataError, match="cannot use a timed step: got work 0, need a finite number above 0"):
        TimedStep(work=0, seconds=1.0)


@pytest.mark.parametrize(("fixed_s", "per_sample_s"), [(-1.0, 1.0), (0.0, 0.0), (0.0, float("nan"))])
def test_impossible_fits_are_refused(fixed_s: float, per_sample_s: float) -> None:
    with pytest.raises(PlanError, match="cannot describe a worker's capacity"):
        CapacityFit(fixed_s=fixed_s, per_sample_s=per_sample_s)


def test_only_sizes_far_apart_change_the_shape_of_a_line_that_is_there() -> None:
    """Sizes of a running job differ because the pace did: 30 % apart is enough for a first line only."""
    prior = CapacityFit(fixed_s=0.01, per_sample_s=0.001)
    for sizes, shape in (([28, 40], (0.01153, 0.001153)), ([20, 40], (0.0, 0.0015))):
        fit = FitCapacity(CONFIG).decide(steps_of(0.0, 0.0015, sizes * 10), prior=prior)
        assert fit is not None
        assert (fit.fixed_s, fit.per_sample_s) == pytest.approx(shape, rel=0.001, abs=1e-9), sizes
    first = FitCapacity(CONFIG).decide(steps_of(0.01, 0.0015, [28, 40] * 10))
    assert first is not None
    assert first.fixed_s == pytest.approx(0.01)


def test_a_scaled_curve_keeps_its_shape() -> None:
    fit = CapacityFit(fixed_s=0.01, per_sample_s=0.001, error_frac=0.2, num_steps=20)
    slow = fit.scaled(2.0, error_frac=0.03, reason="slower")
    assert (slow.fixed_s, slow.per_sample_s, slow.error_frac, slow.num_steps) == (0.02, 0.002, 0.03, 20)


# work and seconds known, work and seconds new; fixed and per-sample seconds of the line through both, or none
BRIDGES = [
    ((30, 0.04), (90, 0.1), (0.01, 0.001)),
    ((90, 0.1), (30, 0.04), (0.01, 0.001)),
    ((30, 0.03), (90, 0.09), (0.0, 0.001)),
    ((30, 0.03), (90, 0.095), (0.0, 0.095 / 90)),
    ((90, 0.09), (30, 0.028), (0.0, 0.028 / 30)),
    ((30, 0.03), (90, 0.03), (0.03 - 0.02 * 0.03, 0.02 * 0.03 / 90)),
    ((30, 0.03), (90, 0.028), (0.028 - 0.02 * 0.028, 0.02 * 0.028 / 90)),
    ((30, 0.03), (90, 0.12), None),
    ((30, 0.03), (90, 0.02), None),
    ((30, 0.03), (49, 0.04), None),
]


@pytest.mark.parametrize(("known", "new", "line"), BRIDGES)
def test_a_bridge_between_two_sizes(
    known: tuple[float, float], new: tuple[float, float], line: tuple[float, float] | None
) -> None:
    before, after = (TimedStep(work=work, seconds=seconds) for work, seconds in (known, new))
    fit = FitCapacity(CONFIG).bridge(before, after, tolerance_frac=0.1)
    if line is None:
        assert fit is None
        return
    assert fit is not None
    assert (fit.fixed_s, fit.per_sample_s) == pytest.approx(line, abs=1e-12)
    assert fit.seconds(after.work) == pytest.approx(after.seconds)
    assert f"sizes {known[0]} and {new[0]}" in fit.reason
