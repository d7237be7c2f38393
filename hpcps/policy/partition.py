"""How many samples each worker gets so that all finish together.

Exact integers, not rounded proportions: the result minimises the largest predicted step time.
This module measures nothing and moves no data.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hpcps.config import PartitionConfig
from hpcps.errors import ConfigError, PlanError
from hpcps.policy.capacity import CapacityFit
from hpcps.units import format_seconds

__all__ = ["Partition", "Shares", "equal_shares", "ideal_speedup", "warmup_shares"]

Ints = npt.NDArray[np.int64]

MAX_HALVINGS = 1200
"""Upper bound on halvings of the time interval: more than a double has distinct powers and bits."""

WARMUP_SWING = 4
"""A warm-up share differs from the equal share by this fraction of it: 0.75 and 1.25 of equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Samples of each worker, and when the last one is predicted to finish."""

    counts: tuple[int, ...]
    finish_s: float
    reason: str


class Partition:
    """Split a batch over workers so that the slowest finishes as early as possible.

    Args:
        config: least and greatest share.
        dead_band_frac: a gain below this part of the present finish time leaves the shares as they are.
    """

    def __init__(self, config: PartitionConfig, dead_band_frac: float) -> None:
        if not 0 <= dead_band_frac < 1:
            raise ConfigError(
                f"cannot accept capacity.dead_band_frac: got {dead_band_frac}, need 0 to below 1; try 0.05"
            )
        self._config = config
        self._dead_band_frac = dead_band_frac

    def decide(self, fits: Sequence[CapacityFit], total: int, *, current: Sequence[int] | None = None) -> Shares:
        """Choose the shares. Equal workers get equal shares within 1, the lower index the larger.

        Args:
            fits: cost of a step for each worker.
            total: samples to place, 0 or more.
            current: shares in use, one a worker, with the same sum; kept within the dead band.

        Returns:
            Shares in the order of fits; they sum to total.

        Raises:
            PlanError: no worker, the caps hold fewer samples than asked, or current does not fit.
        """
        _check_request(total, len(fits))
        low, high, note = self._bounds(total, len(fits))
        counts = _min_max(fits, total, low=low, high=high)
        best_s = _finish_s(fits, counts)
        equal_s = _finish_s(fits, equal_shares(total, len(fits)))
        reason = f"finish in {format_seconds(best_s)}, equal shares in {format_seconds(equal_s)}{note}"
        if current is None:
            return Shares(counts=counts, finish_s=best_s, reason=reason)
        _check_current(current, total, len(fits))
        now_s = _finish_s(fits, current)
        gain = 1.0 - best_s / now_s if now_s > 0 else 0.0
        legal = all(low <= count <= high for count in current)
        if legal and (gain <= 0 or gain < self._dead_band_frac):
            kept = f"shares kept: a change would gain {gain:.1%}, dead band {self._dead_band_frac:.1%}{note}"
            return Shares(counts=tuple(current), finish_s=now_s, reason=kept)
        why = f"gain {gain:.1%} over the present shares" if legal else "present shares leave the bounds"
        return Shares(counts=counts, finish_s=best_s, reason=f"{reason}; {why}")

    def _bounds(self, total: int, num_workers: int) -> tuple[int, int, str]:
        """Least and greatest share that can hold for all, and a note where the minimum had to fall."""
        high = self._config.max_share or total
        if high * num_workers < total:
            raise PlanError(
                f"cannot place {total} samples on {num_workers} workers: caps of {high} samples hold"
                f" {high * num_workers}, need {total}; raise partition.max_share or lower the global batch"
            )
        low = self._config.min_share
        if low * num_workers <= total:
            return low, high, ""
        possible = total // num_workers
        return possible, high, f"; minimum lowered from {low} to {possible}: {total} samples, {num_workers} workers"


def equal_shares(total: int, num_workers: int) -> tuple[int, ...]:
    """Split evenly; the first workers take one more where the split is not even.

    Raises:
        PlanError: no worker, or a negative total.
    """
    _check_request(total, num_workers)
    share, rest = divmod(total, num_workers)
    return tuple(share + (worker < rest) for worker in range(num_workers))


def warmup_shares(total: int, num_workers: int, step: int, *, max_share: int = 0) -> tuple[int, ...]:
    """Shares of a warm-up step: near equal, but every worker sees clearly different sizes over steps.

    Neighbours swap a quarter of their share, so that the sum stays. An odd worker at the end makes
    a team of three, in which up, down and even go round:

        step    0      1      2          workers 0 and 1 are a pair, 2, 3 and 4 a team of three
        up      0, 2   1, 3   0, 4
        down    1, 3   0, 4   1, 2
        even    4      2      3

    With less than two samples a worker there is nothing to swap; then the places of the larger
    shares go round. Below one sample a worker, some get none.

    Args:
        total: samples to place, 0 or more.
        num_workers: at least 1.
        step: number of the step, counted from 0.
        max_share: samples that a worker gets at most; 0: no cap. It only limits the swing.

    Raises:
        PlanError: no worker, or a negative total.
    """
    counts = list(equal_shares(total, num_workers))
    if num_workers == 1:
        return tuple(counts)
    if total < 2 * num_workers:
        turn = step % num_workers
        return tuple(counts[turn:] + counts[:turn])
    for first in range(0, num_workers - 1, 2):
        team = num_workers - first if num_workers - first == 3 else 2
        members = counts[first : first + team]
        swing = max(1, round(min(members) / WARMUP_SWING))
        if max_share:
            swing = max(0, min(swing, max_share - max(members)))
        counts[first + step % team] += swing
        counts[first + (step + 1) % team] -= swing
        if team == 3:
            break
    return tuple(counts)


def ideal_speedup(fits: Sequence[CapacityFit], total: int, *, config: PartitionConfig | None = None) -> float:
    """S*: finish time of the equal split over that of the best split.

    Args:
        fits: cost of a step for each worker.
        total: samples of one step of all workers, at least 1.
        config: bounds that the best split keeps.

    Raises:
        PlanError: no sample or no worker, or the caps hold fewer samples than asked.
    """
    if total < 1:
        raise PlanError(f"cannot compute the ideal speed-up: got {total} samples, need at least 1; raise the batch")
    best = Partition(config or PartitionConfig(), 0.0).decide(fits, total)
    return _finish_s(fits, equal_shares(total, len(fits))) / best.finish_s


def _check_request(total: int, num_workers: int) -> None:
    if num_workers < 1 or total < 0:
        raise PlanError(
            f"cannot split a batch: got {total} samples and {num_workers} workers, need 0 or more samples"
            " and at least 1 worker; add a worker or correct the batch"
        )


def _check_current(current: Sequence[int], total: int, num_workers: int) -> None:
    if len(current) != num_workers or sum(current) != total or min(current) < 0:
        raise PlanError(
            f"cannot compare with the present shares: got {len(current)} shares with sum {sum(current)},"
            f" need {num_workers} shares of 0 or more with sum {total}; pass the shares of this batch or none"
        )


def _finish_s(fits: Sequence[CapacityFit], counts: Sequence[int]) -> float:
    """Predicted time of the slowest worker."""
    return max(fit.seconds(count) for fit, count in zip(fits, counts, strict=True))


def _min_max(fits: Sequence[CapacityFit], total: int, *, low: int, high: int) -> tuple[int, ...]:
    """Integers in low..high with the sum total and the least greatest time.

    Halve the time interval until the samples that fit in the lower time fall short by at most one
    a worker, then hand out the rest one by one, always where it finishes first. The lower time is
    never above the optimum, so the start lies below an optimal split, and the last part is exact.
    """
    fixed = np.array([fit.fixed_s for fit in fits], dtype=np.float64)
    per = np.array([fit.per_sample_s for fit in fits], dtype=np.float64)
    low_s, high_s = 0.0, float(np.max(fixed + per * high))
    counts = np.full(len(fits), low, dtype=np.int64)
    for _ in range(MAX_HALVINGS):
        middle_s = low_s + (high_s - low_s) / 2
        if total - int(counts.sum()) <= len(fits) or not low_s < middle_s < high_s:
            break
        tried = _counts_within(middle_s, fixed, per, low=low, high=high)
        if int(tried.sum()) <= total:
            low_s, counts = middle_s, tried
        else:
            high_s = middle_s
    return _hand_out(fits, counts.tolist(), total, high=high)


def _counts_within(
    limit_s: float, fixed: npt.NDArray[np.float64], per: npt.NDArray[np.float64], *, low: int, high: int
) -> Ints:
    """Most samples of each worker that end by limit_s, never below low; rounding errs to fewer."""
    with np.errstate(over="ignore"):
        counts = np.clip(np.floor((limit_s - fixed) / per), low, high)
    counts -= fixed + per * counts > limit_s
    within: Ints = np.maximum(counts, low).astype(np.int64)
    return within


def _hand_out(fits: Sequence[CapacityFit], counts: list[int], total: int, *, high: int) -> tuple[int, ...]:
    """Give the rest of the samples, each to the worker that would finish it first.

    Ties go by the fit, then to the smaller share, then to the lower index: the plan does not depend
    on the order of the workers, and equal workers stay within 1.
    """

    def entry(worker: int) -> tuple[float, float, float, int, int]:
        fit, count = fits[worker], counts[worker]
        return fit.seconds(count + 1), fit.per_sample_s, fit.fixed_s, count, worker

    heap = [entry(worker) for worker in range(len(fits)) if counts[worker] < high]
    heapq.heapify(heap)
    for _ in range(total - sum(counts)):
        worker = heap[0][-1]
        counts[worker] += 1
        if counts[worker] < high:
            heapq.heapreplace(heap, entry(worker))
        else:
            heapq.heappop(heap)
    return tuple(counts)
