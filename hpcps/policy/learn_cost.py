"""What a sample costs, by length-like numbers of it: learned from the timed steps of all workers.

Model: a step of worker i takes ``s_i * (c + sum_k w_k F_k)`` seconds, F_k the sum of the k-th feature over the step's
samples. The weights w hold for all workers; how fast a worker is, s_i, and what a step costs whatever is in it, c, are
found along with them and dropped: others fit those better. This module times nothing and keeps no history.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hpcps.config import CapacityConfig

__all__ = ["CostRow", "CostWeights", "LearnCost"]

Floats = npt.NDArray[np.float64]

ROUNDS = 12
"""Turns of scales and weights; each of the two hardly depends on the other, so three would mostly do."""

CUT_FACTOR = 3.0
"""A step farther off than so many typical errors counts less, in proportion to its distance."""

MIN_ERROR_FRAC = 0.005
"""Smallest error, as part of a step, that is told apart from none."""

MIN_GAIN_FRAC = 0.05
"""New weights must lower the error by this part of it, and by 1 / sqrt(steps) more, what a median of so many may be off
by: what a unit of work is shall not jump."""

MIN_CHANGE = 0.02
"""Weights that differ by less than this are the same: a cost that wrong is below the noise of any step."""

ROWS_PER_WEIGHT = 10
"""Steps for each weight that is sought, at least."""


TINY = 1e-9
"""Least predicted work of a step, so that one whose samples should cost nothing is far off and not infinitely far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRow:
    """One timed step.

    Args:
        features: sum of each feature over the samples of the step, 0 or more; the first is the number of samples.
        seconds: time of the step, above 0.
    """

    features: tuple[float, ...]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CostWeights:
    """What each feature costs.

    Args:
        weights: cost of each feature, 0 or more; they sum to 1.
        error_frac: median relative distance of a step from what these weights say.
        changed: they are other weights than those in use.
        reason: how they were found, or why those in use were kept.
    """

    weights: tuple[float, ...]
    error_frac: float
    changed: bool
    reason: str


@dataclass(frozen=True, slots=True)
class _Model:
    """Weights (the last one is the step's own) with the error that is left."""

    weights: Floats
    error_frac: float


class LearnCost:
    """Fit the cost of samples.

    Non-negative least squares of relative errors, in turns with a median scale for each worker; steps that lie far off
    (stalls) count less.

    Source: C. L. Lawson, R. J. Hanson, Solving Least Squares Problems (1974), ch. 23; weights of far rows by
    P. J. Huber, Ann. Math. Stat. 35 (1964).

    Args:
        config: how many steps of each worker it takes.
    """

    def __init__(self, config: CapacityConfig) -> None:
        self._config = config

    def decide(self, rows: Sequence[Sequence[CostRow]], *, current: Sequence[float]) -> CostWeights | None:
        """Learn the weights, or keep those in use where others are hardly better.

        Args:
            rows: timed steps of each worker, in any order. Features are scaled to a mean of 1 over all samples of the
                data, so that weights with sum 1 give the mean sample a cost of 1.
            current: weights in use.

        Returns: None while there are too few steps, or where their times do not depend on the samples.
        """
        least = min((len(each) for each in rows), default=0)
        num_rows = sum(len(each) for each in rows)
        if least < self._config.warmup_steps or num_rows < ROWS_PER_WEIGHT * (len(current) + 1):
            return None
        sums = np.array([row.features for each in rows for row in each], dtype=np.float64)
        seconds = np.array([row.seconds for each in rows for row in each], dtype=np.float64)
        worker = np.repeat(np.arange(len(rows)), [len(each) for each in rows])
        found = _fit(sums, seconds, worker)
        known = np.array(current, dtype=np.float64)
        before = _fit(sums @ known[:, None], seconds, worker)
        if found is None or before is None:
            return None
        gain = 1.0 - found.error_frac / before.error_frac
        how = f"{num_rows} steps of {len(rows)} workers, error {found.error_frac:.1%}, in use {before.error_frac:.1%}"
        weights = tuple(found.weights[:-1].tolist())
        change = max(abs(new - old) for new, old in zip(weights, current, strict=True))
        need = MIN_GAIN_FRAC + 1 / math.sqrt(num_rows)
        if gain <= need or change < MIN_CHANGE:
            kept = f"kept: others gain {max(0.0, gain):.1%}, need {need:.0%}, and differ by {change:.3f}; {how}"
            return CostWeights(weights=tuple(current), error_frac=before.error_frac, changed=False, reason=kept)
        return CostWeights(weights=weights, error_frac=found.error_frac, changed=True, reason=f"learned from {how}")


def _fit(sums: Floats, seconds: Floats, worker: npt.NDArray[np.int64]) -> _Model | None:
    """Weights with sum 1 and what a step costs besides; None where the sums explain nothing."""
    columns = np.column_stack([sums, np.ones(len(seconds))])
    scale = _scales(np.maximum(sums.sum(axis=1), TINY), seconds, worker)
    weights = np.zeros(columns.shape[1])
    trust = np.ones(len(seconds))
    for _ in range(ROUNDS):
        relative = columns * (scale / seconds)[:, None]
        weights = _non_negative(relative * trust[:, None], trust)
        total = float(weights[:-1].sum())
        if not total > 0:
            return None
        weights /= total
        predicted = np.maximum(columns @ weights, TINY)
        scale = _scales(predicted, seconds, worker)
        distance = np.abs(scale * predicted / seconds - 1.0)
        limit = CUT_FACTOR * max(float(np.median(distance)), MIN_ERROR_FRAC)
        trust = np.sqrt(np.minimum(1.0, limit / np.maximum(distance, limit)))
    error_frac = float(np.median(np.abs(seconds / (scale * predicted) - 1.0)))
    return _Model(weights, max(error_frac, MIN_ERROR_FRAC))


def _scales(predicted: Floats, seconds: Floats, worker: npt.NDArray[np.int64]) -> Floats:
    """Median seconds a unit of each row's worker, shape [num_rows]."""
    scales = np.empty(len(seconds))
    for index in range(int(worker.max()) + 1):
        own = worker == index
        scales[own] = np.median(seconds[own] / predicted[own])
    return scales


def _non_negative(matrix: Floats, target: Floats) -> Floats:
    """The x of 0 or more with the least |matrix x - target|, exactly, by an active set."""
    num = matrix.shape[1]
    gram, moments = matrix.T @ matrix, matrix.T @ target
    tolerance = 1e-10 * float(np.abs(moments).max())
    x = np.zeros(num)
    free: list[int] = []
    for _ in range(3 * num):
        slope = moments - gram @ x
        slope[free] = 0.0
        entering = int(slope.argmax())
        if slope[entering] <= tolerance:
            break
        free.append(entering)
        while free:
            solved = np.linalg.lstsq(gram[np.ix_(free, free)], moments[free], rcond=None)[0]
            if solved.min() > 0:
                x[:] = 0.0
                x[free] = solved
                break
            falling = [(x[i] / (x[i] - value), i) for i, value in zip(free, solved, strict=True) if value <= 0]
            step, leaving = min(falling)
            x[free] += step * (solved - x[free])
            x[leaving] = 0.0
            free.remove(leaving)
    return x
