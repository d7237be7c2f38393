"""How fast each worker is: a line fitted to its timed steps, and the notice that it changed.

Model: a step of n samples takes ``fixed_s + per_sample_s * n`` seconds. Medians and a slope that a
minority of bad steps cannot move; no least squares. This module times nothing and keeps no history:
the caller drops the first steps, keeps the rest and passes them in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hpcps.config import CapacityConfig
from hpcps.errors import DataError, PlanError

__all__ = ["CapacityFit", "ChangeDecision", "DetectChange", "FitCapacity", "TimedStep"]

Floats = npt.NDArray[np.float64]

CONE_FACTOR = 3.0
"""Factor outside which a step is left out of the fit: well above honest noise, well below a stall."""

MIN_GAP_FRAC = 0.2
"""Two sizes closer than this part of the larger say too little about a slope: at 10 % noise and ten
steps a size, a gap of 0.2 gives the slope to about 30 %; the warm-up's sizes are 0.4 apart."""

MIN_SLOPE_FRAC = 0.02
"""Lowest believed cost of one more sample, as part of the mean cost of a sample; keeps it above 0."""

CHANGE_WINDOW = 8
"""Recent steps that a change is looked for in."""

CHANGE_AGREE = 6
"""How many of them must lie on the same side of the fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """One timed step of one worker.

    Args:
        num_samples: samples in the step, at least 1.
        seconds: time of the step, above 0 and finite.

    Raises:
        DataError: one of the two is out of range.
    """

    num_samples: int
    seconds: float

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise DataError(
                f"cannot use a timed step: got {self.num_samples} samples, need at least 1;"
                " do not time steps without samples"
            )
        if not (self.seconds > 0 and math.isfinite(self.seconds)):
            raise DataError(
                f"cannot use a timed step of {self.num_samples} samples: got {self.seconds} s,"
                " need a finite time above 0 s; measure with a monotonic clock"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityFit:
    """The fitted cost of a step.

    Args:
        fixed_s: seconds that a step takes whatever its size, 0 or more.
        per_sample_s: seconds that one more sample adds, above 0.
        error_frac: median relative distance of a step from the line: the uncertainty.
        num_steps: timed steps behind the fit, 0 where it was given by hand.
        reason: how the fit came about.

    Raises:
        PlanError: a cost is out of range.
    """

    fixed_s: float
    per_sample_s: float
    error_frac: float = 0.0
    num_steps: int = 0
    reason: str = "given"

    def __post_init__(self) -> None:
        fixed_ok = self.fixed_s >= 0 and math.isfinite(self.fixed_s)
        if not (fixed_ok and self.per_sample_s > 0 and math.isfinite(self.per_sample_s)):
            raise PlanError(
                f"cannot describe a worker's capacity: got {self.fixed_s} s a step and {self.per_sample_s} s"
                " a sample, need finite values, the first 0 or more, the second above 0; correct the fit"
            )

    @property
    def speed(self) -> float:
        """Samples per second of a large step."""
        return 1.0 / self.per_sample_s

    def seconds(self, num_samples: int) -> float:
        """Predicted time of a step; a worker without samples takes no step, so 0 samples take 0 s."""
        return self.fixed_s + self.per_sample_s * num_samples if num_samples > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeDecision:
    """Whether a worker's speed changed; ``ratio`` is measured over predicted time, above 1: slower."""

    changed: bool
    ratio: float
    reason: str


class FitCapacity:
    """Fit a worker's step time by its size.

    Source: slope by P. K. Sen, J. Am. Stat. Assoc. 63 (1968), the median of pairwise slopes; each
    pair of sizes is weighted by its gap over the standard error of the difference of its medians.
    """

    def __init__(self, config: CapacityConfig) -> None:
        self._config = config

    def decide(self, steps: Sequence[TimedStep], *, prior: CapacityFit | None = None) -> CapacityFit | None:
        """Fit the line, or say None while there are fewer steps than the warm-up asks for.

        Args:
            steps: timed steps of one worker, in any order.
            prior: the fit so far. Where the steps' sizes lie too close for a slope, its shape is
                kept and scaled to the measured times; without it all cost is taken as per sample.
        """
        if len(steps) < self._config.warmup_steps:
            return None
        samples = np.array([step.num_samples for step in steps], dtype=np.float64)
        seconds = np.array([step.seconds for step in steps], dtype=np.float64)
        keep = _inside_cone(samples, seconds)
        fixed_s, per_sample_s, how = _shape(samples[keep], seconds[keep], prior)
        predicted = fixed_s + per_sample_s * samples
        error_frac = float(np.median(np.abs(seconds - predicted) / predicted))
        num_left_out = len(steps) - int(keep.sum())
        return CapacityFit(
            fixed_s=fixed_s,
            per_sample_s=per_sample_s,
            error_frac=error_frac,
            num_steps=len(steps),
            reason=f"{how}; {len(steps)} steps, {num_left_out} left out, error {error_frac:.1%}",
        )


class DetectChange:
    """Notice that a worker became slower or faster than its fit says."""

    def __init__(self, config: CapacityConfig) -> None:
        self._config = config

    def decide(self, fit: CapacityFit, recent: Sequence[TimedStep]) -> ChangeDecision:
        """Compare the last steps with the fit.

        A change is a median of measured over predicted time above ``1 + change_frac`` or below its
        inverse, with most steps on that side: a lasting throttle shows, a single stall does not.

        Args:
            fit: the fit in use.
            recent: latest timed steps, oldest first; only the last 8 count.
        """
        last = recent[-CHANGE_WINDOW:]
        if len(last) < CHANGE_WINDOW:
            return ChangeDecision(
                changed=False, ratio=1.0, reason=f"{len(last)} recent steps, need {CHANGE_WINDOW} to judge"
            )
        ratios = [step.seconds / fit.seconds(step.num_samples) for step in last]
        ratio = float(np.median(ratios))
        limit = 1.0 + self._config.change_frac
        slower = ratio > 1.0
        agree = sum((value > 1.0) == slower for value in ratios)
        changed = (ratio > limit or ratio * limit < 1.0) and agree >= CHANGE_AGREE
        return ChangeDecision(
            changed=changed,
            ratio=ratio,
            reason=f"steps take {ratio:.3f} of the predicted time, {agree} of {CHANGE_WINDOW} on that side;"
            f" a change needs {CHANGE_AGREE} and a factor of {limit:.3f}",
        )


def _inside_cone(samples: Floats, seconds: Floats) -> npt.NDArray[np.bool_]:
    """Mark the steps that some line of the model could explain, within ``CONE_FACTOR``.

    A line with non-negative terms through the median step (n0, t0) stays between the constant t0
    and the ray t0 n / n0. The median of the times is the time of the median size, as time grows
    with size, so the reference holds while most steps are good.
    """
    scaled = samples / np.median(samples)
    level = seconds / np.median(seconds)
    high = level <= CONE_FACTOR * np.maximum(1.0, scaled)
    low = level * CONE_FACTOR >= np.minimum(1.0, scaled)
    return high & low


def _medians_by_size(samples: Floats, seconds: Floats) -> tuple[Floats, Floats, Floats]:
    """Distinct sizes in ascending order, the median time of each, and its number of steps."""
    sizes, counts = np.unique(samples, return_counts=True)
    medians = np.array([np.median(seconds[samples == size]) for size in sizes], dtype=np.float64)
    return sizes, medians, counts.astype(np.float64)


def _shape(samples: Floats, seconds: Floats, prior: CapacityFit | None) -> tuple[float, float, str]:
    """Fixed and per-sample seconds, and how they were found."""
    sizes, medians, counts = _medians_by_size(samples, seconds)
    line = _line(sizes, medians, counts)
    if line is not None:
        return (*line, f"line through the medians of {len(sizes)} sizes")
    if prior is None:
        cost_s = _weighted_median(medians / sizes, counts)
        return 0.0, cost_s, "sizes too close for a slope, all cost taken as per sample"
    scale = _weighted_median(medians / (prior.fixed_s + prior.per_sample_s * sizes), counts)
    how = f"sizes too close for a slope, earlier fit times {scale:.3f}"
    return prior.fixed_s * scale, prior.per_sample_s * scale, how


def _line(sizes: Floats, medians: Floats, counts: Floats) -> tuple[float, float] | None:
    """Fixed and per-sample seconds, or None where no two sizes are far enough apart."""
    low, high = np.triu_indices(len(sizes), k=1)
    gap = sizes[high] - sizes[low]
    far = gap >= MIN_GAP_FRAC * sizes[high]
    if not far.any():
        return None
    low, high, gap = low[far], high[far], gap[far]
    slopes = (medians[high] - medians[low]) / gap
    weights = gap / np.sqrt(1.0 / counts[low] + 1.0 / counts[high])
    mean_cost_s = _weighted_median(medians / sizes, counts)
    slope = max(_weighted_median(slopes, weights), MIN_SLOPE_FRAC * mean_cost_s)
    fixed_s = _weighted_median(medians - slope * sizes, counts)
    return (fixed_s, slope) if fixed_s >= 0 else (0.0, mean_cost_s)


def _weighted_median(values: Floats, weights: Floats) -> float:
    """Smallest value with half the weight at or below it; the middle of two where the halves meet."""
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order])
    half = reached[-1] / 2
    index = int(np.searchsorted(reached, half))
    value = float(values[order[index]])
    if reached[index] == half and index + 1 < len(values):
        return (value + float(values[order[index + 1]])) / 2
    return value
