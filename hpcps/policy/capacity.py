"""How fast each worker is: a line fitted to its timed steps.

Model: a step of work n (samples, or their cost in units of a mean sample) takes ``fixed_s + per_sample_s * n`` seconds.
Medians and a slope that a minority of bad steps cannot move; no least squares. This module times nothing and keeps no
history: the caller drops the first steps, keeps the rest and passes them in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hpcps.config import CapacityConfig
from hpcps.errors import DataError, PlanError

__all__ = ["RESHAPE_GAP_FRAC", "CapacityFit", "FitCapacity", "TimedStep"]

Floats = npt.NDArray[np.float64]

CONE_FACTOR = 3.0
"""Factor outside which a step is left out of the fit: well above honest noise, well below a stall."""

MIN_GAP_FRAC = 0.2
"""Two sizes closer than this part of the larger say too little about a slope: at 10 % noise and ten
steps a size, a gap of 0.2 gives the slope to about 30 %; the warm-up's sizes are 0.4 apart."""

RESHAPE_GAP_FRAC = 0.4
"""Sizes of a running job differ because the worker's pace did, so a slope through them takes a change of pace for one
of size: a pace off by 10 % and sizes 0.2 apart give a slope off by half. Only sizes this far apart, as the warm-up's
are, change the shape of a line that is there; else it is scaled."""

MIN_SLOPE_FRAC = 0.02
"""Lowest believed cost of one more sample, as part of the mean cost of a sample; keeps it above 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """One timed step of one worker.

    Args:
        work: what was done: samples, or their cost in units of a mean sample; above 0 and finite.
        seconds: time of the step, above 0 and finite.

    Raises:
        DataError: one of the two is out of range.
    """

    work: float
    seconds: float

    def __post_init__(self) -> None:
        if not (self.work > 0 and math.isfinite(self.work)):
            raise DataError(
                f"cannot use a timed step: got work {self.work}, need a finite number above 0;"
                " do not time steps without samples"
            )
        if not (self.seconds > 0 and math.isfinite(self.seconds)):
            raise DataError(
                f"cannot use a timed step of work {self.work}: got {self.seconds} s,"
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

    def scaled(self, ratio: float, *, error_frac: float, reason: str) -> CapacityFit:
        """The same curve for a device that takes so many times the seconds for everything."""
        return CapacityFit(
            fixed_s=self.fixed_s * ratio,
            per_sample_s=self.per_sample_s * ratio,
            error_frac=error_frac,
            num_steps=self.num_steps,
            reason=reason,
        )

    def seconds(self, work: float) -> float:
        """Predicted time of a step; a worker without samples takes no step, so no work takes 0 s."""
        return self.fixed_s + self.per_sample_s * work if work > 0 else 0.0


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
            prior: the fit so far. Where the steps' sizes lie less than ``RESHAPE_GAP_FRAC`` apart, its shape is
                kept and scaled to the measured times. Without it ``MIN_GAP_FRAC`` is enough, and where the sizes lie
                closer still, all cost is taken as per sample.
        """
        if len(steps) < self._config.warmup_steps:
            return None
        samples = np.array([step.work for step in steps], dtype=np.float64)
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

    def bridge(self, known: TimedStep, new: TimedStep, *, tolerance_frac: float) -> CapacityFit | None:
        """The line through a step at sizes seen before and one at another size, or None where none explains both.

        A line measured near the equal share and stretched to sizes far from it may miss. If sizes lie
        ``RESHAPE_GAP_FRAC`` apart, and time grows with size but not faster than it, the line was wrong, not the device
        another.

        Args:
            known: what a step of a size seen before takes.
            new: what a step of the new size takes.
            tolerance_frac: how far the seconds of the new one may be off.
        """
        sizes = sorted((known.work, new.work))
        if sizes[1] - sizes[0] < RESHAPE_GAP_FRAC * sizes[1]:
            return None
        grows, stays = known.seconds * new.work / known.work, known.seconds
        least, most = min(grows, stays), max(grows, stays)
        if not least * (1 - tolerance_frac) <= new.seconds <= most * (1 + tolerance_frac):
            return None
        slope = (new.seconds - known.seconds) / (new.work - known.work)
        mean_cost_s = new.seconds / new.work
        per_sample_s = min(max(slope, MIN_SLOPE_FRAC * mean_cost_s), mean_cost_s)
        return CapacityFit(
            fixed_s=max(0.0, new.seconds - per_sample_s * new.work),
            per_sample_s=per_sample_s,
            error_frac=tolerance_frac,
            num_steps=2,
            reason=f"line through sizes {known.work:g} and {new.work:g}, which the one before missed",
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
    line = _line(sizes, medians, counts, min_gap_frac=MIN_GAP_FRAC if prior is None else RESHAPE_GAP_FRAC)
    if line is not None:
        return (*line, f"line through the medians of {len(sizes)} sizes")
    if prior is None:
        cost_s = _weighted_median(medians / sizes, counts)
        return 0.0, cost_s, "sizes too close for a slope, all cost taken as per sample"
    scale = _weighted_median(medians / (prior.fixed_s + prior.per_sample_s * sizes), counts)
    how = f"sizes too close for a slope, earlier fit times {scale:.3f}"
    return prior.fixed_s * scale, prior.per_sample_s * scale, how


def _line(sizes: Floats, medians: Floats, counts: Floats, *, min_gap_frac: float) -> tuple[float, float] | None:
    """Fixed and per-sample seconds, or None where no two sizes are far enough apart."""
    low, high = np.triu_indices(len(sizes), k=1)
    gap = sizes[high] - sizes[low]
    far = gap >= min_gap_frac * sizes[high]
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
