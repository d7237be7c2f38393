"""Fits on noisy steps."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcps.config import CapacityConfig
from hpcps.policy import CapacityFit, FitCapacity, TimedStep

CONFIG = CapacityConfig()
SIZES = (16, 32, 64, 128)

seeds = st.integers(0, 2**32 - 1)
costs = st.floats(1e-5, 1e-1)


def noisy(fit: CapacityFit, sizes: list[int], rng: np.random.Generator, *, num_stalls: int) -> list[TimedStep]:
    """Steps with 10 % noise; some of them take 20 times as long."""
    factors = np.exp(0.1 * rng.standard_normal(len(sizes)))
    factors[rng.permutation(len(sizes))[:num_stalls]] *= 20.0
    return [
        TimedStep(work=size, seconds=float(factor) * fit.seconds(size))
        for size, factor in zip(sizes, factors, strict=True)
    ]


@settings(deadline=None, max_examples=100, derandomize=True)
@given(seed=seeds, per_sample_s=costs, fixed_samples=st.floats(0, 64))
def test_a_planted_line_is_recovered_under_noise_and_stalls(
    seed: int, per_sample_s: float, fixed_samples: float
) -> None:
    planted = CapacityFit(fixed_s=fixed_samples * per_sample_s, per_sample_s=per_sample_s)
    steps = noisy(planted, list(SIZES) * 30, np.random.default_rng(seed), num_stalls=6)
    fit = FitCapacity(CONFIG).decide(steps)
    assert fit is not None
    for size in SIZES:
        assert abs(fit.seconds(size) / planted.seconds(size) - 1) < 0.15
    assert abs(fit.per_sample_s / per_sample_s - 1) < 0.25
    assert abs(fit.fixed_s - planted.fixed_s) < 0.25 * planted.seconds(32)
    assert 0.03 < fit.error_frac < 0.15


@settings(deadline=None, max_examples=50, derandomize=True)
@given(seed=seeds, per_sample_s=costs)
def test_the_order_of_steps_does_not_matter(seed: int, per_sample_s: float) -> None:
    planted = CapacityFit(fixed_s=0.0, per_sample_s=per_sample_s)
    steps = noisy(planted, [24, 40] * 12, np.random.default_rng(seed), num_stalls=2)
    shuffled = [steps[index] for index in np.random.default_rng(seed + 1).permutation(len(steps))]
    assert FitCapacity(CONFIG).decide(steps) == FitCapacity(CONFIG).decide(shuffled)


@settings(deadline=None, max_examples=100, derandomize=True)
@given(seed=seeds, sizes=st.lists(st.integers(1, 10_000), min_size=20, max_size=40))
def test_every_fit_is_usable(seed: int, sizes: list[int]) -> None:
    rng = np.random.default_rng(seed)
    steps = [TimedStep(work=size, seconds=float(rng.exponential()) + 1e-9) for size in sizes]
    fit = FitCapacity(CONFIG).decide(steps)
    assert fit is not None
    assert fit.fixed_s >= 0
    assert fit.per_sample_s > 0
    assert fit.num_steps == len(sizes)


@settings(deadline=None, max_examples=200, derandomize=True)
@given(
    known=st.tuples(st.floats(0.1, 1e4), st.floats(1e-6, 1e3)),
    new=st.tuples(st.floats(0.1, 1e4), st.floats(1e-6, 1e3)),
    tolerance_frac=st.floats(0, 3),
)
def test_every_bridge_is_a_line_that_meets_the_new_step(
    known: tuple[float, float], new: tuple[float, float], tolerance_frac: float
) -> None:
    before, after = (TimedStep(work=work, seconds=seconds) for work, seconds in (known, new))
    fit = FitCapacity(CONFIG).bridge(before, after, tolerance_frac=tolerance_frac)
    if fit is not None:
        assert abs(fit.seconds(after.work) / after.seconds - 1) < 1e-9
